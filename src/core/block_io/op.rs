//! Operations on one member device and their outcomes. Offsets are absolute on the device; lengths
//! and offsets are multiples of the device's sector. A device executes operations in any order; a
//! caller that needs an order waits for the first completion before it submits the second
//! operation.

use super::{Buf, BufMut};
use crate::units::ByteOffset;

/// Handle of an opened device, assigned by the code that opened it. Never reused while the daemon
/// runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u32);

/// Names one submitted operation in its completion. Opaque to the executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IoToken(pub u64);

/// One operation on one device. Buffers are owned by the operation until it completes.
#[derive(Debug)]
pub enum IoOp {
    /// Fill the whole of `buf` from `offset`. A device that ends sooner is a fault.
    Read {
        /// Where to start.
        offset: ByteOffset,
        /// Filled whole and handed back on success; gone on failure.
        buf: BufMut,
    },
    /// Write the whole of `buf` at `offset`.
    Write {
        /// Where to start.
        offset: ByteOffset,
        /// The bytes to write.
        buf: Buf,
        /// Complete only when these bytes are on stable storage (RWF_DSYNC).
        fua: bool,
    },
    /// Complete when every write that completed before this was submitted is on stable storage.
    Flush,
    /// Make a range read as zeroes. Must do so or fail with [`IoFaultKind::Unsupported`] and change nothing.
    Zero {
        /// Where to start.
        offset: ByteOffset,
        /// How many bytes.
        len: u64,
        /// Whether the space may be given back (punch a hole, unmap).
        may_unmap: bool,
    },
    /// Report which parts of a range are holes (known to read as zeroes). Advisory: reporting all of it as
    /// data is a right answer.
    Extents {
        /// Where to start.
        offset: ByteOffset,
        /// How many bytes.
        len: u64,
    },
}

/// A run of bytes of one allocation state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes, never zero.
    pub len: u64,
    /// Known to read as zeroes and to occupy no space.
    pub hole: bool,
}

/// Result of a successful operation.
#[derive(Debug)]
pub enum IoValue {
    /// A write, flush or zero is done.
    Done,
    /// The filled buffer of a read.
    Data(BufMut),
    /// The extents of the whole asked range, in order; their lengths add up to its length.
    Extents(Vec<Extent>),
}

/// The class of a failure: what the array should make of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoFaultKind {
    /// The device reported that the operation failed (EIO, EREMOTEIO, ENODATA, EILSEQ, a
    /// timeout...).
    Medium,
    /// The device is not there any more (ENODEV, ENXIO, EBADF, ESTALE, a short transfer, a deleted file).
    Gone,
    /// The storage under the device is full (ENOSPC, EDQUOT): it ends when space is freed. Any write can fail
    /// so, even one over old data on thin or copy-on-write storage, and so can a flush.
    NoSpace,
    /// The host lacks memory, descriptors or the like (ENOMEM, EAGAIN, EMFILE, ENOBUFS...): it says
    /// nothing about the device, and is temporary.
    Shortage,
    /// The device cannot do this kind of operation (EOPNOTSUPP).
    Unsupported,
}

impl IoFaultKind {
    /// Whether the same operation can succeed later although nothing is done to the device (rule T4 of the
    /// crash-safety design).
    #[must_use]
    pub fn passes(self) -> bool {
        matches!(self, IoFaultKind::NoSpace | IoFaultKind::Shortage)
    }
}

/// A failed operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", std::io::Error::from_raw_os_error(*.errno))]
pub struct IoFault {
    /// The class of the failure.
    pub kind: IoFaultKind,
    /// The errno behind it, for the log.
    pub errno: i32,
}

/// The end of one operation.
#[derive(Debug)]
pub struct Completion {
    /// The token it was submitted with.
    pub token: IoToken,
    /// Its result.
    pub result: Result<IoValue, IoFault>,
}
