//! Keeps a process able to run while the machine is out of memory and waits for that very process
//! to write pages back. Otherwise a block device whose server runs on the same host could stand
//! still for ever.
//!
//! Each step is done as far as the system allows: the process is marked as one that the kernel
//! cleans pages with, so that its own allocations do not wait for its own device
//! (PR_SET_IO_FLUSHER); its memory is not paged out; it is not the first to be killed. Threads
//! inherit the mark, so call this before there are any. Must not know what the process does.
#![allow(unsafe_code)] // one system call that no crate wraps

use nix::errno::Errno;
use nix::sys::mman::{MlockAllFlags, mlockall};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use std::fmt;
use std::io;

/// The score at which the kernel's out-of-memory killer takes nearly all others first. Not -1000,
/// which would forbid it: a leak here must not bring the machine down.
const OOM_SCORE: i32 = -900;

/// From linux/prctl.h; the libc crate does not have it.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Bit of CAP_IPC_LOCK among a process's capabilities.
const CAP_IPC_LOCK: u32 = 14;

/// How much protection a process insists on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// As much as the system allows.
    #[default]
    Auto,
    /// The process does not run without it.
    Require,
    /// Not at all.
    Off,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Protection {
    /// The process's memory is not paged out.
    pub locked: bool,
    /// The steps that failed, in words.
    pub missing: Vec<String>,
}

impl fmt::Display for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.missing.join("; "))
    }
}

/// Protects this process as far as possible, and says which steps failed.
#[must_use]
pub fn protect() -> Protection {
    let mut protection = Protection::default();
    let mut done = |what: &str, result: io::Result<()>| {
        let good = result.is_ok();
        protection.missing.extend(result.err().map(|error| format!("no {what} ({error})")));
        good
    };
    done("PR_SET_IO_FLUSHER, which needs CAP_SYS_RESOURCE", io_flusher());
    done("OOM score of -900, which needs CAP_SYS_RESOURCE", oom_score());
    let locked = done("locked memory, which needs LimitMEMLOCK=infinity or CAP_IPC_LOCK", lock_memory());
    protection.locked = locked;
    protection
}

/// Keeps the memory of this process from being paged out; unlike [`protect`] it leaves it to the kernel to
/// kill it. Whether that was granted.
pub fn lock() -> bool {
    lock_memory().is_ok()
}

/// Sets only the mark, which costs nothing. Whether it was granted.
pub fn mark() -> bool {
    io_flusher().is_ok()
}

fn io_flusher() -> io::Result<()> {
    // SAFETY: takes no pointers; unused arguments are zero, as the call demands.
    let result = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Locks pages once they were touched. Not all maps at once: that would fill maps that are sparse
/// on purpose (rings, thread stacks, address space that a GPU's driver reserves). Not where there
/// is a limit: the lock would be granted now, and later maps refused.
fn lock_memory() -> io::Result<()> {
    let (limit, _) = getrlimit(Resource::RLIMIT_MEMLOCK)?;
    if limit != RLIM_INFINITY && !may_lock(&std::fs::read_to_string("/proc/self/status")?) {
        return Err(Errno::EPERM.into());
    }
    let on_fault = MlockAllFlags::from_bits_retain(libc::MCL_ONFAULT);
    Ok(mlockall(MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE | on_fault)?)
}

/// Whether a process with this /proc/PID/status has CAP_IPC_LOCK.
fn may_lock(status: &str) -> bool {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & (1 << CAP_IPC_LOCK) != 0)
}

fn oom_score() -> io::Result<()> {
    let path = "/proc/self/oom_score_adj";
    let now = std::fs::read_to_string(path)?;
    // A supervisor may have set a lower score on purpose.
    if now.trim().parse::<i32>().is_ok_and(|now| now <= OOM_SCORE) {
        return Ok(());
    }
    std::fs::write(path, OOM_SCORE.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_the_call_is_the_kernels() {
        let path = "/usr/include/linux/prctl.h";
        let Ok(header) = std::fs::read_to_string(path) else {
            eprintln!("{path} is not there (package linux-libc-dev): not compared");
            return;
        };
        let line = header.lines().find(|line| line.contains("PR_SET_IO_FLUSHER")).unwrap();
        assert_eq!(line.split_whitespace().nth(2), Some(PR_SET_IO_FLUSHER.to_string().as_str()));
    }

    #[test]
    fn the_right_to_lock_memory_is_read_from_the_capabilities() {
        assert!(may_lock("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(may_lock("CapEff:\t0000000000004000\n"));
        // What containers usually get.
        assert!(!may_lock("CapEff:\t00000000a80425fb\n"));
        assert!(!may_lock("CapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n"));
        assert!(!may_lock(""));
    }

    #[test]
    fn what_is_missing_is_told_in_one_line() {
        let protection = Protection { locked: false, missing: vec!["a".into(), "b".into()] };
        assert_eq!(protection.to_string(), "a; b");
    }
}
