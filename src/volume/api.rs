//! Events and actions of a volume. See the folder's head page.

use crate::block_io::{Buf, BufMut, Completion, DeviceId, IoFault, IoOp, IoToken};
use crate::units::{MemberIndex, VolumeOffset};

/// Names one client or admin request in its completion; chosen by the driver, opaque here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A request of a client, already validated: inside the volume, aligned to its sector, length above zero.
#[derive(Debug)]
pub enum ClientRequest {
    /// Fill `buf` from `offset`; it comes back in [`ClientReply::Data`].
    Read {
        /// Where in the volume.
        offset: VolumeOffset,
        /// Filled whole on success.
        buf: BufMut,
    },
    /// Write `data` at `offset`.
    Write {
        /// Where in the volume.
        offset: VolumeOffset,
        /// The payload; page-aligned memory for a page-aligned offset.
        data: Buf,
        /// Done only when on stable storage.
        fua: bool,
    },
    /// Done when every write completed before, on any connection, is on stable storage.
    Flush,
    /// The client does not need these bytes any more; advisory.
    Trim {
        /// Where in the volume.
        offset: VolumeOffset,
        /// Bytes; up to the whole volume.
        len: u64,
        /// Done only when on stable storage.
        fua: bool,
    },
    /// Make these bytes read as zeroes.
    WriteZeroes {
        /// Where in the volume.
        offset: VolumeOffset,
        /// Bytes; up to the whole volume.
        len: u64,
        /// Space may be given back.
        may_unmap: bool,
        /// Fail with [`ClientError::NotSupported`] at once rather than write zeroes the slow way.
        fast_only: bool,
        /// Done only when on stable storage.
        fua: bool,
    },
    /// Which parts of the range are allocated.
    BlockStatus {
        /// Where in the volume.
        offset: VolumeOffset,
        /// Bytes.
        len: u64,
    },
}

/// The good end of a client request.
#[derive(Debug)]
pub enum ClientReply {
    /// Done; nothing to carry back.
    Done,
    /// The buffer of a read, filled.
    Data(BufMut),
    /// Extents that cover the asked range from its start, at least one, perhaps not to its end.
    Extents(Vec<VolumeExtent>),
}

/// A run of a volume with one allocation state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeExtent {
    /// Bytes, never zero.
    pub len: u64,
    /// Not allocated, and reads as zeroes.
    pub hole: bool,
}

/// The bad end of a client request. The NBD layer turns it into an errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The bytes cannot be read or written (more than m members gone, or unreadable). EIO.
    #[error("input/output error")]
    Io,
    /// A member's filesystem is full. ENOSPC.
    #[error("no space left for a member")]
    NoSpace,
    /// A fast zero was asked for where there is none. ENOTSUP.
    #[error("not supported")]
    NotSupported,
    /// The volume is stopping. ESHUTDOWN.
    #[error("the volume is stopping")]
    Stopping,
}

/// An administrator's request.
#[derive(Debug)]
pub enum AdminRequest {
    /// Take a member out for good, as if it had failed.
    Fail {
        /// Which member.
        member: MemberIndex,
    },
    /// Take a member out on purpose.
    Offline {
        /// Which member.
        member: MemberIndex,
    },
    /// A member's device is there again (or a wholly blank device takes its place, when `superblock` is none).
    /// Whether it is current or has to be rebuilt is the array's to decide.
    Online {
        /// Which member.
        member: MemberIndex,
        /// The newly opened device.
        device: NewDevice,
    },
    /// Build a new device for a member; the old one, if there, stays in service until the new one is complete.
    Replace {
        /// Which member.
        member: MemberIndex,
        /// The newly opened, blank device.
        device: NewDevice,
    },
    /// Start or continue a scrub.
    ScrubStart,
    /// Pause a scrub.
    ScrubPause,
    /// Stop a scrub and forget its position.
    ScrubStop,
    /// Finish what is in flight, answer new requests with [`ClientError::Stopping`], flush, mark the array
    /// clean and complete. The volume does nothing after that.
    Stop,
}

/// A device that the driver has opened, locked and checked for size, handed to the array.
#[derive(Debug)]
pub struct NewDevice {
    /// Its handle.
    pub device: DeviceId,
    /// Its identity: that of its superblock, or freshly made for a blank device.
    pub uuid: uuid::Uuid,
    /// Size of the device in bytes, rounded down to its sector.
    pub bytes: u64,
    /// Its valid superblock of this array, if it has one.
    pub superblock: Option<Box<crate::format::Superblock>>,
    /// The data region is known to read as zeroes (a new sparse file, or just discarded).
    pub known_zero: bool,
}

/// What an administrator's request did, in one line for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminOutcome(pub String);

/// Why an administrator's request was refused; nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct AdminError(pub String);

/// What drives a volume.
#[derive(Debug)]
pub enum VolumeEvent {
    /// A client's request; answered by [`VolumeAction::ClientDone`] with the same id.
    Client(RequestId, ClientRequest),
    /// An administrator's request; answered by [`VolumeAction::AdminDone`].
    Admin(RequestId, AdminRequest),
    /// A member operation ended.
    Io(Completion),
    /// A device is known to be gone without an operation having failed (its file was deleted).
    DeviceGone(DeviceId, IoFault),
    /// Time passed. Due at least every 100 ms while anything is going on; cheap.
    Tick,
}

/// What a volume wants done.
#[derive(Debug)]
pub enum VolumeAction {
    /// Execute an operation and answer with [`VolumeEvent::Io`]. Must be accepted for any device that was not released.
    Io {
        /// Where.
        device: DeviceId,
        /// Goes into the completion.
        token: IoToken,
        /// What.
        op: IoOp,
    },
    /// A client request ended.
    ClientDone(RequestId, Result<ClientReply, ClientError>),
    /// An administrator's request ended (a replacement was admitted, not: is complete).
    AdminDone(RequestId, Result<AdminOutcome, AdminError>),
    /// The array has no more use for this device and has nothing in flight on it: close it.
    Release(DeviceId),
    /// Something an operator wants to know: log it, keep it for `events`.
    Notice(ArrayNotice),
}

/// Something an operator wants to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrayNotice {
    /// How bad: an error needs a person, a warning a look, information none.
    pub level: NoticeLevel,
    /// The member it is about, if one.
    pub member: Option<MemberIndex>,
    /// One sentence: what, where, what to do.
    pub text: String,
}

/// Severity of a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoticeLevel {
    /// Progress and completion.
    Info,
    /// Redundancy is reduced or something was repaired.
    Warning,
    /// Data cannot be served.
    Error,
}
