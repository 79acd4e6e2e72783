//! Calls to the system that concern the process and its threads. Must not know sockets or arrays.
#![allow(unsafe_code)] // each block argues for itself

use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// How much sooner than its clients the reactor gets a core, as a nice value, where the system allows it. All
/// clients wait for this one thread, and where cores are few, a fair share would be that of a single client.
const NICE: i32 = -10;

/// Ends the process at once: waits for no other thread and cleans nothing up.
pub(crate) fn exit_at_once(status: i32) -> ! {
    // SAFETY: no memory involved; nothing of this process runs afterwards.
    unsafe { libc::_exit(status) }
}

/// Asks the system to run this thread before others. A refusal costs speed, nothing else.
pub(super) fn raise_priority() {
    set_nice(NICE);
}

/// Gives this thread the usual priority in place of the one that it inherited from the thread that started
/// it.
pub(super) fn reset_priority() {
    set_nice(0);
}

fn set_nice(nice: i32) {
    // SAFETY: no memory involved; 0 names the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
}

/// Takes ownership of a descriptor that this process was started with; none when it is not open.
pub(super) fn inherited(descriptor: RawFd) -> Option<OwnedFd> {
    // SAFETY: the call only reads the flags of a descriptor number, valid or not.
    let open = unsafe { libc::fcntl(descriptor, libc::F_GETFD) } >= 0;
    // SAFETY: it is open, and the caller says that the supervisor passed it for this process to own.
    open.then(|| unsafe { OwnedFd::from_raw_fd(descriptor) })
}
