//! Keeping a process able to run while the machine is out of memory and waits for that very process to write pages
//! back: a block device whose server runs on the same host would otherwise stand still for ever.
//!
//! What is done, each as far as the system lets it: the process is marked as one that the kernel cleans pages with, so
//! that its own allocations do not wait for its own device (PR_SET_IO_FLUSHER); its memory is not paged out; it is not
//! the first to be killed. Inherited by threads, so call it before there are any. Must not know what the process does.
#![allow(unsafe_code)] // one system call that no crate wraps

use nix::errno::Errno;
use nix::sys::mman::{MlockAllFlags, mlockall};
use std::io;

/// The score at which the kernel's out-of-memory killer takes all others first. Not -1000, which would forbid it: a leak
/// here must not bring the machine down.
const OOM_SCORE: &str = "-900";

/// What could not be done, in words; empty when all was.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shortfall(pub Vec<String>);

/// Protects this process. Does what it can, and says what it could not.
#[must_use]
pub fn protect() -> Shortfall {
    let mut missing = Vec::new();
    let mut note = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            missing.push(format!("{what} ({error})"));
        }
    };
    note("PR_SET_IO_FLUSHER, which needs CAP_SYS_RESOURCE", io_flusher());
    note("locked memory, which needs CAP_IPC_LOCK or LimitMEMLOCK=infinity", lock_memory());
    note("an OOM score of -900, which needs CAP_SYS_RESOURCE", oom_score());
    Shortfall(missing)
}

/// From linux/prctl.h; the libc crate does not have it.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

fn io_flusher() -> io::Result<()> {
    // SAFETY: takes no pointers; unused arguments are zero, as the call demands.
    let result = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Pages stay once they were touched. Not all at once: maps that are sparse on purpose (rings, thread stacks, device
/// memory of a GPU) would be filled.
fn lock_memory() -> io::Result<()> {
    let on_fault = MlockAllFlags::from_bits_retain(libc::MCL_ONFAULT);
    let flags = MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE | on_fault;
    mlockall(flags).map_err(|errno: Errno| errno.into())
}

fn oom_score() -> io::Result<()> {
    let now = std::fs::read_to_string("/proc/self/oom_score_adj")?;
    let lower = now.trim().parse::<i32>().is_ok_and(|now| now <= -900);
    // A supervisor may have set a lower one, on purpose.
    if lower { Ok(()) } else { std::fs::write("/proc/self/oom_score_adj", OOM_SCORE) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_knows_the_call() {
        // Refused or not depends on who runs this; unknown it is only to kernels before 5.6.
        if let Err(error) = io_flusher() {
            assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}");
        }
    }
}
