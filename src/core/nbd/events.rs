//! The events that a server connection reports to its driver, the reasons to close it, and the
//! parts of a reply. Data only: `handshake.rs` and `transmission.rs` create them.

use super::wire::{Request, StringFault};

/// An event that a connection reports to its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// The handshake is over and [`super::ServerConnection::export`] says which export was chosen.
    Selected,
    /// A valid request without payload, to be answered.
    Request(Request),
    /// A valid WRITE, to be answered. The next `request.length` bytes of the stream are its payload: the
    /// driver takes them itself and then calls [`super::ServerConnection::payload_taken`].
    Write {
        /// The request.
        request: Request,
    },
    /// The client is granted TLS. Send all of `out` first; then replace the stream by the TLS
    /// stream and call [`super::ServerConnection::tls_started`]. Bytes received before that do not
    /// count.
    StartTls,
    /// The client is leaving: finish what is in flight, send what is in `out`, close.
    Disconnect,
}

/// Why the connection has to be closed at once. What is in `out` may be sent, and may not arrive.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fatal {
    /// The client set flags that were not offered.
    #[error("the client sent handshake flags {flags:#x}, of which only 0x3 are known")]
    ClientFlags {
        /// All its flags.
        flags: u32,
    },
    /// The bytes received do not start an option.
    #[error("an option starts with {found:#018x} instead of IHAVEOPT")]
    OptionMagic {
        /// What stood there.
        found: u64,
    },
    /// An option announces more data than is drained.
    #[error("option {option} announces {length} bytes of data; at most {limit} are accepted")]
    OptionLength {
        /// The option's code.
        option: u32,
        /// Bytes announced.
        length: u32,
        /// Bytes accepted.
        limit: u32,
    },
    /// The client sent too many options without choosing an export.
    #[error("more than {limit} options in one handshake")]
    TooManyOptions {
        /// Options accepted.
        limit: u32,
    },
    /// A client that did not negotiate fixed newstyle may only send EXPORT_NAME.
    #[error("option {option} from a client that did not agree to fixed newstyle")]
    NotFixedNewstyle {
        /// The option's code.
        option: u32,
    },
    /// EXPORT_NAME, which has no error reply, with a name that is no string.
    #[error("the export name is {fault}")]
    ExportName {
        /// What is wrong with it.
        fault: StringFault,
    },
    /// EXPORT_NAME, which has no error reply, for an export that is not there.
    #[error("no export is called '{name}'")]
    UnknownExport {
        /// The name.
        name: String,
    },
    /// EXPORT_NAME from a client that negotiated extended headers, which demand GO.
    #[error("the client chose an export by EXPORT_NAME although it negotiated extended headers")]
    ExportNameAfterExtendedHeaders,
    /// EXPORT_NAME while the server is shutting down.
    #[error("the server is shutting down")]
    Stopping,
    /// EXPORT_NAME, which has no error reply, without the TLS that is demanded.
    #[error("the client chose an export without the TLS that is demanded here")]
    TlsRequired,
    /// Bytes arrived after STARTTLS and before its answer. No client sends them; an attacker on the
    /// network would, so that they pass for bytes sent under TLS.
    #[error("bytes arrived between STARTTLS and its answer")]
    BytesBeforeTls,
    /// The bytes received do not start a request: the stream is out of step.
    #[error("a request starts with {found:#010x} instead of the request magic")]
    RequestMagic {
        /// What stood there.
        found: u32,
    },
    /// A refused request with more payload than is drained.
    #[error("a refused request announces {length} bytes of payload; at most {limit} are drained")]
    PayloadLength {
        /// Bytes announced.
        length: u64,
        /// Bytes drained.
        limit: u64,
    },
}

/// A part of a READ's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadPart {
    /// Absolute in the export, bytes; a multiple of the minimum block, like the length.
    pub offset: u64,
    /// Bytes, never zero.
    pub length: u64,
    /// Nothing of the answer follows.
    pub last: bool,
}

/// The reply to BLOCK_STATUS, as (bytes, flags) from its offset on; see
/// [`super::ServerConnection::reply_block_status`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Extents<'a> {
    /// For base:allocation.
    pub allocation: &'a [(u64, u32)],
    /// For calpe:health.
    pub health: &'a [(u64, u32)],
}
