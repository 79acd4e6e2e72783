//! Bulk codec jobs on GPUs: a runtime that takes jobs only where a device is measured to be worth it, gives every one of
//! them back done, and survives whatever becomes of a device.
//!
//! Invariants: a job that was taken is answered exactly once, by a device or by the CPU, with the same bytes; memory
//! that a device may still touch is neither given back nor reused. All that is unsafe about CUDA is below this folder.
//! Must not know of arrays, members or clients.

pub mod cuda;
pub mod device;
pub mod ptx;
pub mod xor_program;
