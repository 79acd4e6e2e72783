//! Who copies to and from memory-backed files: this thread, or workers of the kernel. Few bytes are copied
//! here, where it costs least; transfers that would have to wait for that go to workers at the same time,
//! where there are cores for them. Must not know what is copied.

/// Smallest transfer that may be handed to a worker, in bytes: the hand-over costs a few microseconds, the
/// copying four times that.
const OFFLOAD_BYTES_MIN: usize = 32 << 10;

/// Bytes of transfers that may wait for this thread before further ones are handed to workers.
const INLINE_BYTES_MAX: usize = 128 << 10;

/// Most transfers with workers at one time; beyond that this thread copies, too.
const OFFLOADED_MAX: usize = 16;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Copying {
    /// Bytes of transfers that wait to be run on this thread.
    inline_bytes: usize,
    /// Transfers that workers are running.
    offloaded: usize,
    /// Whether there is another core for workers.
    has_workers: bool,
    /// Whether it is free for them at present.
    may_offload: bool,
}

impl Copying {
    pub(super) fn new() -> Copying {
        let has_workers = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1);
        Copying { inline_bytes: 0, offloaded: 0, has_workers, may_offload: has_workers }
    }

    /// Has workers copy from now on, or does not.
    pub(super) fn use_workers(&mut self, are_cores_free: bool) {
        self.may_offload = self.has_workers && are_cores_free;
    }

    /// Counts a transfer that begins. Returns whether a worker is to copy it; otherwise it waits for this
    /// thread.
    pub(super) fn offloads(&mut self, bytes: usize) -> bool {
        let is_offloaded = self.may_offload
            && bytes >= OFFLOAD_BYTES_MIN
            && self.inline_bytes >= INLINE_BYTES_MAX
            && self.offloaded < OFFLOADED_MAX;
        match is_offloaded {
            true => self.offloaded += 1,
            false => self.inline_bytes += bytes,
        }
        is_offloaded
    }

    /// This thread is about to copy a transfer that has waited for it.
    pub(super) fn ran_inline(&mut self, bytes: usize) {
        self.inline_bytes -= bytes;
    }

    /// A worker has copied a transfer.
    pub(super) fn ran_elsewhere(&mut self) {
        self.offloaded -= 1;
    }

    /// Whether workers are copying.
    pub(super) fn has_offloaded(&self) -> bool {
        self.offloaded > 0
    }
}

#[cfg(test)]
impl Copying {
    /// Whether workers have as much as they may, or nothing may be handed to them.
    pub(super) fn offloads_no_more(&self) -> bool {
        !self.may_offload || self.offloaded == OFFLOADED_MAX
    }

    /// Whether nothing is being copied.
    pub(super) fn is_over(&self) -> bool {
        (self.offloaded, self.inline_bytes) == (0, 0)
    }
}
