//! Events and actions of a volume. See the folder's head page.

pub use crate::array::{
    AdminError, AdminOutcome, AdminRequest, ArrayNotice, ClientError, Health, NewDevice, NoticeKind,
    NoticeLevel, RequestId,
};
use crate::array::{Job, JobDone};
use crate::block_io::{Buf, BufMut, Completion, DeviceId, IoFault, IoOp, IoToken};
use crate::units::VolumeOffset;

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
    /// The same, where [`ClientReply::Sparse`] may come back: what is known to be zeroes is not filled in.
    ReadSparse {
        /// Where in the volume.
        offset: VolumeOffset,
        /// As many bytes as are asked for.
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
    /// The client does not need these bytes any more; advisory. Long ones come in parts, see [`super::Volume::part_len`];
    /// and so do all below.
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
    /// How well the range is kept.
    Health {
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
    /// What a read found, in runs that cover the asked range; one of them at least is of zeroes.
    Sparse(Vec<ReadRun>),
    /// Extents that cover the asked range, at least one.
    Extents(Vec<VolumeExtent>),
    /// Runs of equal health, (bytes, health), that cover the asked range, at least one.
    Health(Vec<(u64, Health)>),
}

/// A run of what a read found.
#[derive(Debug)]
pub enum ReadRun {
    /// So many bytes of zeroes.
    Zeroes(u64),
    /// These bytes.
    Data(BufMut),
}

/// A run of a volume with one allocation state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeExtent {
    /// Bytes, never zero.
    pub len: u64,
    /// Not allocated, and reads as zeroes.
    pub hole: bool,
}

/// What drives a volume.
#[derive(Debug)]
pub enum VolumeEvent {
    /// A client's request; answered by [`VolumeAction::ClientDone`] with the same id.
    Client(RequestId, ClientRequest),
    /// An administrator's request; answered by [`VolumeAction::AdminDone`].
    Admin(RequestId, AdminRequest),
    /// A member operation ended.
    Io(Completion),
    /// A job ended.
    Coded(JobDone),
    /// A device is known to be gone without an operation having failed: its file was deleted, or its operations do not end
    /// (ETIMEDOUT).
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
    /// Do the work, at once or on another thread, and answer with [`VolumeEvent::Coded`].
    Code(Job),
    /// A client request ended.
    ClientDone(RequestId, Result<ClientReply, ClientError>),
    /// An administrator's request ended (a replacement was admitted, not: is complete).
    AdminDone(RequestId, Result<AdminOutcome, AdminError>),
    /// The array has no more use for this device: close it once what is in flight on it has ended. It may be handed to an array
    /// again only then.
    Release(DeviceId),
    /// Something an operator wants to know: log it, keep it for `events`.
    Notice(ArrayNotice),
    /// Writes that were acknowledged and not flushed are lost: the next flush of every client that may have made them must fail.
    WritesLost,
}
