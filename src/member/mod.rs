//! Member devices, local and remote: opening, locking and sizing them, and executing [`calpe_core::block_io`] operations on them.
//!
//! Owns every file descriptor of a member and every buffer that the kernel is working on. A device
//! is locked against other daemons and other commands from opening to closing; a remote one against
//! others of this process only. Must not know what is stored on a device, of arrays or of clients.

mod aside;
mod created;
mod device;
mod engine;
mod error;
mod filesystem;
mod held;
mod helpers;
mod holder;
mod inbox;
mod local_file;
mod own_table;
pub mod patience;
mod ready;
mod registered;
mod remote;
mod ring;
mod ring_memory;

pub use created::CreatedFile;
pub use device::{
    Access, DEFAULT_MEMBER_TIMEOUT, Device, DeviceFacts, DeviceKind, FileRoom, Identity, TimeLimits,
    member_kind,
};
pub use engine::{MemberIo, Stragglers};
pub use error::DeviceError;
pub use held::await_closings;
pub use holder::{dead_holder_of, is_dead_and_there, is_held_by_calpe, is_stopped, words_for_dead};
pub use own_table::out_of_the_way;
pub use ready::MemberCompletion;
pub use remote::{
    Lost, ReadAt, RemoteError, RemoteLimits, Witness, backoff, forget_lost, is_remote, lost, same_remote,
    set_remote_tls,
};
pub use ring::{Ring, RingEvent};
