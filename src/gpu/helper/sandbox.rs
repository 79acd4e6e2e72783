//! What a helper does to itself before it loads a driver: it keeps nothing that it was not given, and lives
//! no longer than its daemon. Must not know what it helps with.
#![allow(unsafe_code)] // system calls that no crate wraps; each block argues for itself

use std::fs;
use std::io;

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// A helper's score for the kernel's out-of-memory killer: its end costs nobody anything, so it goes
/// before others, and long before its daemon.
const OOM_SCORE: &str = "500";

/// Cuts this process off, first of all. `daemon`: the process that started it.
///
/// # Errors
/// When the daemon is gone, or the system refuses.
pub(super) fn enter(daemon: u32) -> io::Result<()> {
    // SAFETY: nothing of this process has opened a descriptor but the standard ones, so nobody uses those
    // that are closed here.
    if unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) } != 0 {
        let error = io::Error::last_os_error();
        tracing::debug!(%error, "descriptors that were inherited stay open");
    }
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have ended before that.
    if getppid().map(Pid::as_raw_pid) != i32::try_from(daemon).ok() {
        return Err(io::Error::other("the daemon is gone"));
    }
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE] {
        // Those are for the daemon, which ends this process in its own time.
        // SAFETY: installs no handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // A mere preference.
    let _ = fs::write("/proc/self/oom_score_adj", OOM_SCORE);
    Ok(())
}

/// Ends this process without a word to any library in it: what a driver does at the exit of a process may
/// hang, and the kernel frees the same.
pub(super) fn leave(code: i32) -> ! {
    // SAFETY: runs no handler and returns to nobody.
    unsafe { libc::_exit(code) }
}
