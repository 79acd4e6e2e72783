//! The vocabulary of everything that moves blocks: aligned buffers and the operations a member device can be
//! asked for. It does no I/O itself, so the sans-IO layers may speak it; `member` executes it on real devices
//! and `testing` on simulated ones. Must not know of arrays, volumes or clients.

mod buffer;
mod op;
mod shared_memory;
mod shelf;

pub use buffer::{Buf, BufMut, Pool};
pub use op::{Completion, DeviceId, Extent, IoFault, IoFaultKind, IoOp, IoToken, IoValue};
pub use shared_memory::{Access, SharedMemory};
