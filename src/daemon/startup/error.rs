//! Why a daemon could not start, or ended badly. Must not know what happens while it runs.

use super::activation::ActivationError;
use crate::control::RequestError;
use crate::daemon::devices::create::CreateError;
use crate::daemon::devices::import::ImportError;
use crate::daemon::reactor::{ListenAddress, ListenError};
use crate::tls::TlsFileError;
use calpe_core::units::shown;
use calpe_host::reclaim;
use nix::sys::signal::Signal;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Why a daemon could not start, or ended badly.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// A socket cannot be bound.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// What a supervisor handed over cannot be used.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// A file of TLS cannot be used.
    #[error("TLS: {0}")]
    Tls(#[from] TlsFileError),
    /// A socket of a supervisor would be open to everybody.
    #[error(
        "the supervisor listens on {address}, which is not loopback, and everybody who reaches it could read and write every volume: demand TLS with client certificates (tls_certificate, tls_key, tls_client_ca in [listen]), or allow it with plaintext = true"
    )]
    Exposed {
        /// Its address.
        address: ListenAddress,
    },
    /// A directory cannot be created.
    #[error(
        "{}: cannot create the directory: {source}: choose another place, or remove what is in the way",
        shown(path)
    )]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The array of `up` cannot be created.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// The array of `up` cannot be opened.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The array of `up` cannot be served.
    #[error(transparent)]
    Serve(#[from] RequestError),
    /// The directory of `up` holds more or other things than one array.
    #[error("{}: {what}", shown(dir))]
    Unclear {
        /// The directory.
        dir: PathBuf,
        /// What is there, and what to do.
        what: String,
    },
    /// A signal came before anything was served.
    #[error("ended by {0} before the array was served: the same command goes on")]
    Interrupted(Signal),
    /// The daemon must be protected against memory reclaim, and is not.
    #[error(
        "reclaim_safe is true, and the system grants {0}: see conf/systemd/calpe.service for what it needs, or write \"auto\""
    )]
    Unprotected(reclaim::Protection),
    /// The system refuses a call that a daemon needs.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

pub(super) fn system(action: &'static str) -> impl Fn(io::Error) -> RunError {
    move |source| RunError::System { action, source }
}

/// Creates a directory for sockets, with those above it, for this user alone. One that is there
/// stays as it is.
pub(super) fn create_dir(path: &Path) -> Result<(), RunError> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|source| RunError::Directory { path: path.to_path_buf(), source })
}
