//! One io_uring, with the fallbacks that older kernels need. Must not know what its entries are
//! for.
//!
//! Invariants: entries are submitted in the order of `push`; none is lost when the submission queue
//! is full or the kernel is short of memory. The ring belongs to the thread that made it.
#![allow(unsafe_code)] // raw submission; each block argues for itself

use super::ring_memory;
use calpe_host::polling;
use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, squeue};
use std::cell::OnceCell;
use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::time::Duration;

/// Entries of the submission queue. One turn of a reactor submits rarely more than this; if it
/// does, the ring submits in between.
const SUBMISSIONS: u32 = 1024;

/// Entries of the completion queue: room for what may be in flight; beyond it the kernel keeps a
/// list.
const COMPLETIONS: u32 = 8192;

/// One completion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingEvent {
    /// The `user_data` of the entry.
    pub user_data: u64,
    /// The result of the system call: a count, or a negative errno.
    pub result: i32,
}

/// An io_uring of one thread.
pub(crate) struct Ring {
    ring: IoUring,
    /// Entries that found the submission queue full, in order.
    backlog: VecDeque<squeue::Entry>,
    /// The kernel's default limit of worker threads for transfers that block, once it was asked.
    workers_default: OnceCell<u32>,
    /// Made with DEFER_TASKRUN, which ties it to its thread.
    _not_send: PhantomData<*const ()>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("backlog", &self.backlog.len()).finish_non_exhaustive()
    }
}

impl Ring {
    /// A ring of the calling thread.
    ///
    /// # Errors
    /// When the kernel has no io_uring or forbids it.
    pub(crate) fn new() -> io::Result<Ring> {
        Ring::with_entries(SUBMISSIONS, COMPLETIONS)
    }

    /// The same with `submissions` entries.
    ///
    /// # Errors
    /// As [`Ring::new`].
    pub(super) fn with_entries(submissions: u32, completions: u32) -> io::Result<Ring> {
        // Newest first: NO_MMAP leaves nothing behind when the process is killed, 6.1 runs
        // completions only when this thread asks, 5.19 without interrupting it.
        let in_own_memory = ring_memory::build(submissions, completions);
        let deferred = || {
            IoUring::builder()
                .setup_cqsize(completions)
                .setup_single_issuer()
                .setup_coop_taskrun()
                .setup_defer_taskrun()
                .build(submissions)
        };
        let built = in_own_memory
            .or_else(|_| deferred())
            .or_else(|_| IoUring::builder().setup_cqsize(completions).setup_coop_taskrun().build(submissions))
            .or_else(|_| IoUring::builder().setup_cqsize(completions).build(submissions));
        let ring = built.map_err(|e| {
            io::Error::new(
                e.kind(),
                format!(
                    "io_uring is not available ({e}): Linux 5.11 or newer is needed, \
                     kernel.io_uring_disabled must be 0 and a container must allow it"
                ),
            )
        })?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "io_uring of this kernel is too old: Linux 5.11 or newer is needed",
            ));
        }
        Ok(Ring { ring, backlog: VecDeque::new(), workers_default: OnceCell::new(), _not_send: PhantomData })
    }

    /// Queues an entry; it reaches the kernel with the next [`Ring::enter`] at the latest.
    ///
    /// # Safety
    /// All memory and descriptors that the entry names stay valid until its (last) completion was
    /// taken from this ring, even if the caller is dropped.
    pub(crate) unsafe fn push(&mut self, entry: squeue::Entry) {
        if self.backlog.is_empty() {
            // SAFETY: passed on from the caller.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
            // `enter` meets the same failure again, and reports it.
            let _ = self.ring.submit();
            // SAFETY: passed on from the caller.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
        }
        self.backlog.push_back(entry);
    }

    /// Submits the pushed entries, waits until at least one completion is there or `wait` is over
    /// (none: does not wait), and appends all completions to `events`.
    ///
    /// # Errors
    /// Only errors that leave the ring useless; interruptions and shortages are retried later.
    pub(crate) fn enter(&mut self, wait: Option<Duration>, events: &mut Vec<RingEvent>) -> io::Result<()> {
        self.drain_backlog();
        let wait = if self.backlog.is_empty() { wait } else { None };
        let result = match wait {
            Some(limit) => {
                let limit = Timespec::new().sec(limit.as_secs()).nsec(limit.subsec_nanos());
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&limit))
            }
            None => {
                let pending = self.ring.submission().len() as u32;
                // SAFETY: no argument; GETEVENTS makes the kernel run deferred completions.
                unsafe {
                    self.ring.submitter().enter::<libc::sigset_t>(
                        pending,
                        0,
                        EnterFlags::GETEVENTS.bits(),
                        None,
                    )
                }
            }
        };
        let before = events.len();
        events.extend(
            self.ring.completion().map(|c| RingEvent { user_data: c.user_data(), result: c.result() }),
        );
        match result {
            Ok(_) => Ok(()),
            Err(e) => match e.raw_os_error() {
                // Timed out, interrupted, or completions came first: all normal.
                Some(libc::ETIME | libc::EINTR | libc::EBUSY) => Ok(()),
                // No memory for a request: operations in flight must end first.
                Some(libc::EAGAIN | libc::ENOMEM) => {
                    if events.len() == before {
                        polling::tell_short(e.raw_os_error().unwrap_or(libc::ENOMEM), "the reactor");
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Ok(())
                }
                _ => Err(e),
            },
        }
    }

    /// Registers memory for READ_FIXED and WRITE_FIXED, as buffers 0, 1, ... of the given lengths.
    ///
    /// # Safety
    /// The memory stays mapped as long as the ring lives.
    ///
    /// # Errors
    /// When the memory may not be locked (RLIMIT_MEMLOCK), or buffers are registered already.
    pub(super) unsafe fn register_buffers(&self, buffers: &[libc::iovec]) -> io::Result<()> {
        // SAFETY: passed on from the caller.
        unsafe { self.ring.submitter().register_buffers(buffers) }
    }

    /// Raises the kernel's limit of worker threads for blocking operations by `more`. A kernel that
    /// has no such setting has a limit of its own.
    pub(super) fn allow_workers(&self, more: u32) {
        // The kernel answers with the previous limits; zeroes change nothing.
        let mut workers = [0, 0];
        if self.submitter_workers(&mut workers) {
            let default = *self.workers_default.get_or_init(|| workers[0]);
            self.submitter_workers(&mut [default.saturating_add(more), 0]);
        }
    }

    fn submitter_workers(&self, workers: &mut [u32; 2]) -> bool {
        self.ring.submitter().register_iowq_max_workers(workers).is_ok()
    }

    fn drain_backlog(&mut self) {
        while !self.backlog.is_empty() {
            let mut submission = self.ring.submission();
            while let Some(entry) = self.backlog.front() {
                // SAFETY: the caller that pushed it promised what `push` demands.
                if unsafe { submission.push(entry) }.is_err() {
                    break;
                }
                self.backlog.pop_front();
            }
            let full = submission.is_full();
            drop(submission);
            if !full || self.ring.submit().is_err() || self.ring.submission().is_full() {
                return;
            }
        }
    }
}
