//! Events and actions of a volume. See the head of the folder's `mod.rs`.

use crate::array::JobDone;
pub use crate::array::{
    AdminOutcome, AdminRefusal, AdminRequest, ArrayAction, ArrayNotice, ClientError, Health, LetGo,
    NewDevice, NoticeKind, NoticeLevel, ReplacementOrder, ReplacementStep, RequestId,
};
use crate::block_io::{Buf, BufMut, Completion, DeviceId, IoFault};
use crate::units::VolumeOffset;

/// A request of a client, already validated: inside the volume, aligned to its sector, length above zero.
#[derive(Debug)]
pub enum ClientRequest {
    /// Fill `buf` with the bytes from `offset` on; it is returned in [`ClientReply::Data`].
    Read {
        /// Where in the volume.
        offset: VolumeOffset,
        /// Filled whole on success.
        buf: BufMut,
    },
    /// The same, but the reply may be [`ClientReply::Sparse`], in which known zeroes are described, not
    /// filled in.
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
    /// The client does not need these bytes any more; advisory. Long requests of this and the following kinds
    /// come in parts, see [`super::Volume::part_len`].
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
    /// The health of the range: clean, degraded or lost.
    Health {
        /// Where in the volume.
        offset: VolumeOffset,
        /// Bytes.
        len: u64,
    },
}

impl ClientRequest {
    /// Its bytes in the volume; none for a flush.
    #[must_use]
    pub fn range(&self) -> Option<(VolumeOffset, u64)> {
        Some(match *self {
            ClientRequest::Read { offset, ref buf } | ClientRequest::ReadSparse { offset, ref buf } => {
                (offset, buf.len() as u64)
            }
            ClientRequest::Write { offset, ref data, .. } => (offset, data.len() as u64),
            ClientRequest::Trim { offset, len, .. }
            | ClientRequest::WriteZeroes { offset, len, .. }
            | ClientRequest::BlockStatus { offset, len }
            | ClientRequest::Health { offset, len } => (offset, len),
            ClientRequest::Flush => return None,
        })
    }

    /// Whether it holds memory.
    #[must_use]
    pub fn has_payload(&self) -> bool {
        use ClientRequest::{Read, ReadSparse, Write};
        matches!(self, Read { .. } | ReadSparse { .. } | Write { .. })
    }
}

/// The result of a client request that succeeded.
#[derive(Debug)]
pub enum ClientReply {
    /// Done; there is nothing to return.
    Done,
    /// The buffer of a read, filled.
    Data(BufMut),
    /// The result of a read, in runs that cover the requested range; at least one of them is of zeroes.
    Sparse(Vec<ReadRun>),
    /// Extents that cover the requested range; at least one.
    Extents(Vec<VolumeExtent>),
    /// Runs of equal health, (bytes, health), that cover the requested range; at least one.
    Health(Vec<(u64, Health)>),
}

/// A run of bytes in the result of a read.
#[derive(Debug)]
pub enum ReadRun {
    /// This many bytes of zeroes.
    Zeroes(u64),
    /// These bytes.
    Data(BufMut),
}

impl ReadRun {
    /// Appends a run to others: to the last one if both are of zeroes, or neighbours in memory. One without
    /// bytes is left out.
    pub(super) fn push_to(self, runs: &mut Vec<ReadRun>) {
        let rest = match (runs.last_mut(), self) {
            (_, ReadRun::Data(buf)) if buf.is_empty() => None,
            (Some(ReadRun::Zeroes(len)), ReadRun::Zeroes(more)) => {
                *len += more;
                None
            }
            (Some(ReadRun::Data(last)), ReadRun::Data(more)) => {
                last.try_unsplit(more).err().map(ReadRun::Data)
            }
            (_, run) => Some(run),
        };
        runs.extend(rest);
    }
}

/// A run of bytes of a volume with one allocation state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeExtent {
    /// Bytes, never zero.
    pub len: u64,
    /// Not allocated, and reads as zeroes.
    pub hole: bool,
}

/// An event for a volume.
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
    /// To a lane of several: what becomes of a replacement that it builds.
    Replacement(ReplacementOrder),
    /// To a lane of several: another lane has let go of a device. This one lets go of it, too, unless it
    /// needs it.
    LeftElsewhere(DeviceId, LetGo),
    /// Clients have read by themselves, with [`crate::volume::ViewReader`]: passes leave them room.
    ReadElsewhere,
    /// Time passed. Due at least every 100 ms while anything is under way; cheap.
    Tick,
}

/// The end of a client's request.
pub type EndedRequest = (RequestId, Result<ClientReply, ClientError>);

/// What a step returns. A driver takes the replies first: the action that ends a stop is the array's last.
#[derive(Debug, Default)]
pub struct VolumeOutput {
    /// Client requests that ended, in that order.
    pub replies: Vec<EndedRequest>,
    /// The array's actions, unchanged.
    pub actions: Vec<ArrayAction>,
}
