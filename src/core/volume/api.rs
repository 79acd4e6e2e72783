//! Events and actions of a volume. See the folder's head page.

use crate::array::JobDone;
pub use crate::array::{
    AdminError, AdminOutcome, AdminRequest, ArrayAction, ArrayNotice, ClientError, Health, NewDevice,
    NoticeKind, NoticeLevel, RequestId,
};
use crate::block_io::{Buf, BufMut, Completion, DeviceId, IoFault};
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
    /// The client does not need these bytes any more; advisory. Long ones come in parts, see
    /// [`super::Volume::part_len`]; and so do all below.
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
    /// A client's request; answered in [`VolumeOutput::replies`] with the same id.
    Client(RequestId, ClientRequest),
    /// An administrator's request; answered by [`ArrayAction::AdminDone`].
    Admin(RequestId, AdminRequest),
    /// A member operation ended.
    Io(Completion),
    /// A job ended.
    Worked(JobDone),
    /// A device is known to be gone without an operation having failed: its file was deleted, or its
    /// operations do not end (ETIMEDOUT).
    DeviceGone(DeviceId, IoFault),
    /// Time passed. Due at least every 100 ms while anything is going on; cheap.
    Tick,
}

/// The end of a client's request.
pub type EndedRequest = (RequestId, Result<ClientReply, ClientError>);

/// What comes of an event. A driver takes the replies first: the end of a stop is the last thing of an array.
#[derive(Debug, Default)]
pub struct VolumeOutput {
    /// Client requests that ended, in that order.
    pub replies: Vec<EndedRequest>,
    /// What the array below wants done, as it said it.
    pub actions: Vec<ArrayAction>,
}
