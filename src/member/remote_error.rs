//! Why a remote export cannot be a member, or can no longer be one. Must not know which member it would be.

use calpe_core::nbd::{ClientFatal, UriError};
use std::io;

impl RemoteError {
    /// Whether its server was reached and does not give the export, or the settings of this host forbid
    /// asking for it: then the network is not the problem.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            RemoteError::Resolve { .. }
            | RemoteError::Connect(_)
            | RemoteError::Timeout { .. }
            | RemoteError::Lost(_)
            | RemoteError::Quarantine { .. } => false,
            RemoteError::Uri(_)
            | RemoteError::Protocol(_)
            | RemoteError::Certificates(_)
            | RemoteError::Tls(_)
            | RemoteError::NoFlush
            | RemoteError::BlockSize { .. }
            | RemoteError::Request { .. }
            | RemoteError::Changed(_) => true,
        }
    }
}

/// Why a remote device cannot be used. The message goes behind its URI.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The URI cannot be used.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// The host has no address.
    #[error("the address of '{host}' cannot be found: {source}: check the name and the resolver")]
    Resolve {
        /// Name of the host.
        host: String,
        /// What the system said.
        source: io::Error,
    },
    /// Nothing accepts connections there.
    #[error("cannot connect: {0}: check that the server runs there and may be reached")]
    Connect(
        /// What the system said.
        io::Error,
    ),
    /// The server did not answer in time.
    #[error("no answer within {seconds} s while {doing}: check the server")]
    Timeout {
        /// What was waited for.
        doing: &'static str,
        /// How long.
        seconds: u64,
    },
    /// The server broke the protocol, or refused the export.
    #[error("{0}")]
    Protocol(
        /// How.
        ClientFatal,
    ),
    /// TLS is demanded, and certificates are missing.
    #[error("certificates for TLS: {0}")]
    Certificates(
        /// What is wrong with them.
        String,
    ),
    /// TLS ended the connection.
    #[error("TLS: {0}")]
    Tls(
        /// Why.
        String,
    ),
    /// The connection ended.
    #[error("the connection was lost: {0}")]
    Lost(
        /// What the system said.
        io::Error,
    ),
    /// Without FLUSH, nothing on it could be made durable.
    #[error("the server offers no FLUSH, so that nothing on it could be made durable: use one that does")]
    NoFlush,
    /// Its blocks are larger than any sector that arrays have.
    #[error("the server takes only blocks of {block_min} bytes or more, at most 4096 are possible")]
    BlockSize {
        /// The least it takes, bytes.
        block_min: u32,
    },
    /// A request was refused, or the server failed in it.
    #[error("{doing} failed: {source}")]
    Request {
        /// The action that the request was for.
        doing: &'static str,
        /// What the server said.
        source: io::Error,
    },
    /// The last connection was lost with writes under way, which may still land for a while.
    #[error(
        "the last connection to it was lost with writes under way, which may still land: try again in {seconds} s"
    )]
    Quarantine {
        /// How long still.
        seconds: u64,
    },
    /// The export that answers now is not the one that was opened.
    #[error("is not what it was: {0}")]
    Changed(
        /// What is different.
        String,
    ),
}
