//! Blocking I/O on a remote device, for the control plane. Must not know what the bytes mean.

use super::RemoteDevice;
use calpe_core::block_io::{BufMut, Extent, IoFault, IoFaultKind, IoOp, IoValue, Pool};
use calpe_core::units::ByteOffset;
use std::io;
use std::sync::LazyLock;

/// Bytes zeroed by one call; the time limit of a request starts anew with each.
const ZEROED_PER_CALL: u64 = 1 << 30;

/// Superblocks are read so rarely that ordinary memory is enough: the pool's slab holds one page.
static POOL: LazyLock<io::Result<Pool>> = LazyLock::new(|| Pool::new(1));

fn alloc(len: usize) -> io::Result<BufMut> {
    let pool = POOL.as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string()))?;
    Ok(pool.alloc(len))
}

fn error(fault: IoFault) -> io::Error {
    io::Error::from_raw_os_error(fault.errno)
}

impl RemoteDevice {
    /// Fills `target` from `offset`; offset and length are multiples of the sector.
    pub(crate) fn read_at(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        if target.is_empty() {
            return Ok(());
        }
        let op = IoOp::Read { offset: ByteOffset(offset), buf: alloc(target.len())? };
        match self.call(op, false).map_err(error)? {
            IoValue::Data(buf) => target.copy_from_slice(&buf),
            other => unreachable!("a read gives data, not {other:?}"),
        }
        Ok(())
    }

    /// Writes `source` at `offset`; offset and length are multiples of the sector.
    pub(crate) fn write_at(&self, offset: u64, source: &[u8]) -> io::Result<()> {
        if source.is_empty() {
            return Ok(());
        }
        let mut buf = alloc(source.len())?;
        buf.copy_from_slice(source);
        let op = IoOp::Write { offset: ByteOffset(offset), buf: buf.freeze(), fua: false };
        self.call(op, false).map(drop).map_err(error)
    }

    /// Waits until everything written is durable.
    pub(crate) fn flush(&self) -> io::Result<()> {
        if !self.export().flush {
            return Ok(());
        }
        self.call(IoOp::Flush, false).map(drop).map_err(error)
    }

    /// Makes a range read as zeroes, if that is fast or it does so already. If a request is
    /// refused, the range before it reads as zeroes.
    pub(crate) fn discard(&self, offset: u64, bytes: u64) -> io::Result<bool> {
        if self.extents(offset, bytes).iter().all(|extent| extent.hole) {
            return Ok(true);
        }
        if !self.export().fast_zero {
            return Ok(false);
        }
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let len = (end - at).min(ZEROED_PER_CALL);
            match self.call(IoOp::Zero { offset: ByteOffset(at), len, may_unmap: true }, true) {
                Ok(_) => at += len,
                Err(IoFault { kind: IoFaultKind::Unsupported, .. }) => return Ok(false),
                Err(fault) => return Err(error(fault)),
            }
        }
        Ok(true)
    }

    /// The holes and the data of a range; all data where the server cannot tell.
    pub(crate) fn extents(&self, offset: u64, len: u64) -> Vec<Extent> {
        match self.call(IoOp::Extents { offset: ByteOffset(offset), len }, false) {
            Ok(IoValue::Extents(extents)) => extents,
            _ => vec![Extent { len, hole: false }],
        }
    }
}
