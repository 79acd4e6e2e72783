//! TLS of the NBD connections, for the server and the client half: certificates and keys from files, and pumps that
//! carry one connection between its network socket and a plain one.
//!
//! Whoever speaks NBD (the reactor, a remote member) never does cryptography. When both sides have agreed on STARTTLS
//! it hands the connected socket to [`Pumps::serve`] or [`Pumps::connect`] and goes on with the socket that it gets
//! back, on which everything is plain:
//!
//! ```no_run
//! # use calpe::tls::{ClientFiles, ClientTls, Pumps};
//! # use std::os::fd::OwnedFd;
//! # fn connect(socket: OwnedFd) -> Result<(), Box<dyn std::error::Error>> {
//! let files = ClientFiles { ca: "/etc/calpe/ca.pem".into(), identity: None, server_name: None };
//! let tls = ClientTls::load(&files)?;
//! let tunnel = Pumps::default().connect(socket, &tls, "storage.example.com")?;
//! // Speak NBD over `tunnel.socket`. When it ends early, `tunnel.failure()` says whether TLS was the reason.
//! # Ok(())
//! # }
//! ```
//!
//! Invariants: no byte is handed on that TLS did not authenticate; memory per connection is bounded both ways, so that
//! back-pressure passes through; a peer that stalls, lies or vanishes costs its own connection and one thread; a plain
//! socket never outlives its network. Sessions are not resumed: every connection proves itself anew, to the files as
//! they are. Keys appear in no message. Must not know NBD, the reactor, or where configurations come from.
//!
//! Pre-shared keys (TLS-PSK, `tls-psk` of other NBD software) are not served: rustls has no external PSK.

mod dated;
mod files;
mod identity;
mod key_kind;
mod peer;
mod pump;
mod refusals;
mod subject;
#[cfg(test)]
pub(crate) mod tests;

pub use files::{CertificateFacts, FileFault, FileRole, TlsFileError};
pub use identity::{ClientFiles, ClientTls, ServerFiles, ServerTls, check_server_name};
pub use key_kind::KeyKind;
pub use peer::{PATTERNS_MAX, Peer, PeerNames, PeerPattern, PeerRules, Right};
pub use pump::{Goodbye, ProvenPeer, Pumps, TlsFailure, Tunnel};
pub use refusals::tell_left_out;
