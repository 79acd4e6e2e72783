//! Flushes of a device that have failed, as each of its windows was told of them. Must not know what was
//! flushed.
//!
//! A system tells of a write that was lost once, and a disk of a cache that it could not empty: to whichever
//! flush came next, of any window. So a flush that failed fails the next flush of every other window, too.

use calpe_core::block_io::{IoFault, IoFaultKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    /// How many of the whole device have failed.
    failed: Arc<AtomicU64>,
    /// How many of them this window was told of.
    told: AtomicU64,
}

impl Flushes {
    /// Those of another window, which has nothing to flush yet.
    pub(super) fn share(&self) -> Flushes {
        let told = AtomicU64::new(self.failed.load(Ordering::SeqCst));
        Flushes { failed: Arc::clone(&self.failed), told }
    }

    /// What a flush of this window comes to. What the host is short of is no loss.
    pub(super) fn judge<T>(&self, result: Result<T, IoFault>) -> Result<T, IoFault> {
        match result {
            Err(fault) if fault.kind == IoFaultKind::Shortage => Err(fault),
            Err(fault) => {
                let failed = self.failed.fetch_add(1, Ordering::SeqCst) + 1;
                self.told.store(failed, Ordering::SeqCst);
                Err(fault)
            }
            Ok(value) => {
                let failed = self.failed.load(Ordering::SeqCst);
                match self.told.swap(failed, Ordering::SeqCst) == failed {
                    true => Ok(value),
                    false => Err(IoFault { kind: IoFaultKind::Medium, errno: libc::EIO }),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_that_failed_in_one_window_fails_the_next_one_of_each() {
        let first = Flushes::default();
        let windows = [first.share(), first.share(), first.share()];
        let flush = |window: usize, result: Result<(), IoFault>| windows[window].judge(result).is_ok();
        let lost = || Err(IoFault { kind: IoFaultKind::Medium, errno: libc::EIO });
        let short = || Err(IoFault { kind: IoFaultKind::Shortage, errno: libc::ENOMEM });
        assert!(flush(0, Ok(())) && flush(1, Ok(())));
        assert!(!flush(1, short()) && flush(0, Ok(())));
        assert!(!flush(0, lost()));
        assert!(flush(0, Ok(())), "it was told");
        assert!(!flush(1, Ok(())) && flush(1, Ok(())));
        assert!(!flush(2, lost()) && !flush(0, Ok(())) && !flush(1, Ok(())));
        assert!(windows.iter().all(|window| window.judge(Ok(())).is_ok()));
        assert!(first.share().judge(Ok(())).is_ok());
    }
}
