//! Member devices, local and remote: opening, locking and sizing them, and executing
//! [`calpe_core::block_io`] operations on them.
//!
//! Owns every file descriptor of a member and every buffer that the kernel is working on. A device
//! is locked against other daemons and other commands from opening to closing; a remote one only
//! against other openings in this process. Must not know what is stored on a device, nor arrays or
//! clients.

mod access;
mod aside;
mod attached;
mod copying;
mod created;
mod device;
mod engine;
mod error;
mod filesystem;
mod flight;
mod flushes;
mod held;
mod helpers;
mod holder;
mod inbox;
mod local_file;
mod own_table;
pub(crate) mod patience;
mod ready;
mod registered;
mod remote;
mod remote_error;
mod ring;
mod ring_memory;
mod shared;
mod system_call;
#[cfg(test)]
mod windows_tests;

pub use access::Access;
pub(crate) use access::is_remote;
pub(crate) use created::CreatedFile;
pub use device::Device;
pub(crate) use device::{
    DEFAULT_MEMBER_TIMEOUT, DeviceFacts, DeviceKind, FileRoom, Identity, TimeLimits, member_kind,
};
pub(crate) use engine::{MemberIo, Stragglers};
pub use error::DeviceError;
pub(crate) use held::await_closings;
pub(crate) use holder::{dead_holder_of, is_dead_and_there, is_held_by_calpe, is_stopped, words_for_dead};
pub(crate) use own_table::out_of_the_way;
pub(crate) use remote::{
    Lost, ReadAt, RemoteLimits, Witness, backoff, forget_lost, lost, same_remote, set_remote_tls,
};
pub(crate) use remote_error::RemoteError;
pub(crate) use ring::{Ring, RingEvent};
pub(crate) use shared::{DeviceReads, SharedDevice};
