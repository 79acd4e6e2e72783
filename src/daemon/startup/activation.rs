//! Sockets that a supervisor bound and passed to this process: systemd's socket activation, which
//! NBD clients also use to start a server themselves.
//!
//! A descriptor named "control" is the control socket; all others are for NBD clients. Invariant: a
//! descriptor that cannot be used is an error, never a socket that nobody serves. Must not know
//! what is spoken on them.

use crate::daemon::reactor::{ListenAddress, ListenError, Listener};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::PermissionsExt;

/// Name of the descriptor (FileDescriptorName=) that is the control socket.
const CONTROL_NAME: &str = "control";

/// What a supervisor handed over; empty without a supervisor.
#[derive(Debug, Default)]
pub(super) struct Activated {
    /// For NBD clients.
    pub nbd: Vec<Listener>,
    /// For administrators.
    pub control: Option<Listener>,
}

/// Why what a supervisor handed over cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ActivationError {
    /// The variables of the environment contradict themselves.
    #[error("LISTEN_FDS, LISTEN_PID and LISTEN_FDNAMES of the environment do not fit: {0}")]
    Environment(io::Error),
    /// One of the sockets is unfit.
    #[error(transparent)]
    Socket(#[from] ListenError),
    /// Administrators need a private socket.
    #[error("descriptor {descriptor} of the supervisor is named '{CONTROL_NAME}' and is {fault}")]
    Control {
        /// Its number.
        descriptor: RawFd,
        /// What is wrong with it.
        fault: &'static str,
    },
}

impl Activated {
    /// Takes over the descriptors that are there. Call it once.
    ///
    /// # Errors
    /// The first descriptor that cannot be used.
    pub(super) fn take() -> Result<Activated, ActivationError> {
        let mut activated = Activated::default();
        if sd_notify::listen_fds().map_err(ActivationError::Environment)?.len() == 0 {
            // The variables may be left from another process.
            return Ok(activated);
        }
        for (descriptor, name) in sd_notify::listen_fds_with_names().map_err(ActivationError::Environment)? {
            let listener = Listener::adopt(descriptor)?;
            warn_if_open(listener.address());
            if name != CONTROL_NAME {
                activated.nbd.push(listener);
                continue;
            }
            let unfit = |fault| Err(ActivationError::Control { descriptor, fault });
            if !matches!(listener.address(), ListenAddress::Unix(_)) {
                return unfit("not a unix socket");
            }
            if activated.control.replace(listener).is_some() {
                return unfit("the second one");
            }
        }
        Ok(activated)
    }
}

/// Warns when every user of this host may connect to a socket: they could write to every volume.
fn warn_if_open(address: &ListenAddress) {
    let ListenAddress::Unix(path) = address else { return };
    let mode = std::fs::metadata(path).map_or(0, |metadata| metadata.permissions().mode());
    // The directory may still protect it.
    if mode & 0o002 != 0 {
        tracing::warn!(%address, "every user may connect to this socket, unless its folder is private: set SocketMode=0600");
    }
}
