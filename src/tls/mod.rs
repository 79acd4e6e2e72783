//! TLS of the NBD connections, for the server and the client half: certificates and keys from
//! files, and pumps that carry one connection between its network socket and a plain one.
//!
//! The users of NBD (the reactor, a remote member) never do cryptography. When both sides have
//! agreed on STARTTLS, they hand the connected socket to [`Pumps::serve`] or [`Pumps::connect`] and
//! continue on the socket that they get back, on which everything is plain:
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
//! Invariants: no byte is passed on that TLS did not authenticate; memory per connection is bounded
//! both ways, so that back-pressure passes through; a peer that stalls, lies or vanishes costs its
//! own connection and one thread; a plain socket never outlives its network. Sessions are not
//! resumed: every connection is verified anew, with the present files. Keys appear in no message.
//! Must not know NBD, the reactor, or where configurations come from.
//!
//! Pre-shared keys (TLS-PSK, `tls-psk` of other NBD software) are not served: rustls has no
//! external PSK.

mod dated;
mod files;
mod identity;
mod key_kind;
mod peer;
mod pump;
mod refusals;
mod stars;
mod subject;
#[cfg(test)]
pub(crate) mod tests;

pub use files::TlsFileError;
pub(crate) use files::{CertificateFacts, FileRole};
pub use identity::{ClientFiles, ClientTls};
pub(crate) use identity::{ServerFiles, ServerTls, check_server_name};
pub(crate) use peer::{PATTERNS_MAX, Peer, PeerPattern, PeerRules, Right};
pub(crate) use pump::{Goodbye, ProvenPeer, TlsFailure};
pub use pump::{Pumps, Tunnel};
pub(crate) use refusals::tell_left_out;
