//! Coding on a GPU: what runs there, and the host's side of it.
//!
//! Invariants: the GPU writes the same bytes as every engine of `codec`, and nothing here is needed for correct
//! service: without a device, a driver or enough memory the CPU engines do the work. A matrix is compiled to a
//! straight line of operations (`xor_program`), which is printed as a kernel (`ptx`) or run on the CPU in tests.
//! Must not know of arrays, members, stripes or clients: a column here is a range of bytes in memory.

pub mod ptx;
pub mod xor_program;
