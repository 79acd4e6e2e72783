//! Signals that ask the process to end, as something to wait for.

use calpe_host::polling::{self, Trouble};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::io;
use std::os::fd::AsFd;

/// SIGTERM, SIGINT and SIGHUP, taken from their default actions.
#[derive(Debug)]
pub(super) struct Signals {
    set: SigSet,
    fd: SignalFd,
}

/// Why waiting ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    /// A signal came.
    Signal(Signal),
    /// The event was signalled.
    Event,
    /// The time is over.
    Timeout,
}

impl Signals {
    /// Blocks the signals in this thread and in all it starts from now on: call it before there are
    /// others.
    ///
    /// # Errors
    /// When the system is out of descriptors.
    pub(super) fn take() -> io::Result<Signals> {
        let set: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
        set.thread_block()?;
        let fd = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        Ok(Signals { set, fd })
    }

    /// Waits for a signal, an event or the end of `timeout_ms`.
    ///
    /// # Errors
    /// When polling fails.
    pub(super) fn wait(&self, event: &EventFd, timeout_ms: u16) -> io::Result<Woken> {
        let mut fds =
            [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN), PollFd::new(event.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::from(timeout_ms)) {
            Ok(_) => {}
            Err(errno) if polling::survives(errno as i32, "the thread that takes signals") => {}
            Err(other) => return Err(other.into()),
        }
        let signal = match self.fd.read_signal() {
            Err(errno) if polling::trouble(errno as i32) != Trouble::Lasting => None,
            other => other?,
        };
        if let Some(info) = signal
            && let Ok(signal) = Signal::try_from(info.ssi_signo as i32)
        {
            return Ok(Woken::Signal(signal));
        }
        Ok(if fds[1].any() == Some(true) { Woken::Event } else { Woken::Timeout })
    }

    /// Restores the default actions of the signals, so that the next one ends the process at once;
    /// that of SIGHUP only if `hangup_ends_us`.
    pub(super) fn give_back(&self, hangup_ends_us: bool) {
        let mut set = self.set;
        if !hangup_ends_us {
            set.remove(Signal::SIGHUP);
        }
        // Cannot fail with a valid set; if it did, the process would merely be harder to kill.
        let _ = set.thread_unblock();
    }
}
