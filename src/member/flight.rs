//! An operation of a member on its way through the engine. Must not know how it is run.

use calpe_core::block_io::{DeviceId, IoOp, IoToken};

#[derive(Debug)]
pub(super) struct Flight {
    pub(super) owner: u32,
    pub(super) device: DeviceId,
    pub(super) token: IoToken,
    /// With the offset on the whole device.
    pub(super) op: IoOp,
    /// Bytes transferred so far.
    pub(super) done: usize,
    /// Most bytes that one system call transfers.
    pub(super) most: usize,
    pub(super) retries: u16,
    /// Whether it is on a memory-backed file, and run by a worker.
    pub(super) offloaded: bool,
    /// Whether others of its owner that this thread runs come before it.
    pub(super) may_wait: bool,
    /// When the kernel got it, on the engine's clock.
    pub(super) since: Option<u64>,
}

impl Flight {
    /// Bytes that the next system call is to transfer.
    pub(super) fn next_bytes(&self) -> usize {
        (self.bytes() - self.done).min(self.most)
    }

    /// Bytes that it transfers in all; 0 if it transfers none.
    pub(super) fn bytes(&self) -> usize {
        match &self.op {
            IoOp::Read { buf, .. } => buf.len(),
            IoOp::Write { buf, .. } => buf.len(),
            IoOp::Flush | IoOp::Zero { .. } | IoOp::Extents { .. } => 0,
        }
    }
}
