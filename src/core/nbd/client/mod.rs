//! The NBD client: a connection to an export of another server, sans-IO.
//!
//! Invariants: the server is hostile input; whatever it sends ends in an event that was asked for or in a
//! [`ClientFatal`], never in a panic or in memory without bound. It must not know sockets, the clock, or what
//! the bytes are for.

mod handshake;
mod replies;

use std::collections::VecDeque;

use self::handshake::Handshake;
pub use self::replies::IN_FLIGHT_MAX;
use self::replies::Transmission;
use super::errno::Errno;
use super::server::HANDSHAKE_NANOS_MAX;
use super::wire::{
    self, Command, Headers, Request, RequestHeader, StringFault, check_string, clip, option, reply,
};
use crate::units::{Timestamp, is_unprintable};

/// A server's message or description is cut to this many bytes before it is shown.
const TEXT_BYTES_MAX: usize = 1024;

/// What to ask of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientOptions {
    /// The export's name; "" for the server's default.
    pub export: String,
    /// Ask for structured replies.
    pub structured: bool,
    /// Ask for extended headers first, which bring all that structured replies do, and lengths of 64 bits.
    pub extended: bool,
    /// Ask for base:allocation, which BLOCK_STATUS needs; takes effect only with structured replies.
    pub base_allocation: bool,
    /// Insist on TLS before anything else is said.
    pub tls: bool,
}

impl ClientOptions {
    /// Everything that this client can use, without TLS, of the export called `name`.
    ///
    /// # Errors
    /// When the name cannot travel.
    pub fn for_export(name: &str) -> Result<ClientOptions, StringFault> {
        check_string(name.as_bytes())?;
        Ok(ClientOptions {
            export: name.to_owned(),
            structured: true,
            extended: true,
            base_allocation: true,
            tls: false,
        })
    }

    /// The export called `name` with simple replies and compact headers alone: what the Linux driver speaks.
    /// Every option is written out here, so that a new one has to be decided upon.
    ///
    /// # Errors
    /// When the name cannot travel.
    pub fn simple_replies(name: &str) -> Result<ClientOptions, StringFault> {
        check_string(name.as_bytes())?;
        Ok(ClientOptions {
            export: name.to_owned(),
            structured: false,
            extended: false,
            base_allocation: false,
            tls: false,
        })
    }
}

/// What the server said about its export.
// More than 15 fields: what the protocol tells about an export, one for each flag and size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteExport {
    /// Its name; the one asked for if the server named none.
    pub name: String,
    /// A line for people, freed of control characters; may be empty.
    pub description: String,
    /// Bytes; not necessarily a multiple of `block_min`.
    pub size: u64,
    /// Refuses writes.
    pub read_only: bool,
    /// Spinning media.
    pub rotational: bool,
    /// Serves FLUSH.
    pub flush: bool,
    /// Honours FUA.
    pub fua: bool,
    /// Serves TRIM.
    pub trim: bool,
    /// Serves WRITE_ZEROES.
    pub write_zeroes: bool,
    /// Serves WRITE_ZEROES with FAST_ZERO.
    pub fast_zero: bool,
    /// FLUSH and FUA on one connection cover writes completed on all of them.
    pub multi_conn: bool,
    /// Serves CACHE.
    pub cache: bool,
    /// Honours DF.
    pub df: bool,
    /// Structured replies were negotiated, by themselves or as part of extended headers.
    pub structured: bool,
    /// Extended headers were negotiated: requests without payload may have any length.
    pub extended: bool,
    /// The id under which base:allocation was negotiated.
    pub base_allocation: Option<u32>,
    /// Alignment of every offset and length, bytes: a power of two up to 64 KiB.
    pub block_min: u32,
    /// The size from which aligned requests are efficient, bytes.
    pub block_preferred: u32,
    /// The largest READ or WRITE, bytes; at most 32 MiB, whatever the server would take.
    pub block_max: u32,
}

/// Why a request was not sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Before [`ClientEvent::Ready`], or after a disconnect or [`ClientFatal`].
    #[error("the connection is not open for requests")]
    NotReady,
    /// Too many requests without an answer.
    #[error("{limit} requests are in flight already")]
    TooManyInFlight {
        /// How many may be.
        limit: usize,
    },
    /// The range is empty or not inside the export.
    #[error("{length} bytes at {offset} are not a range inside an export of {size} bytes")]
    Range {
        /// Bytes.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Of the export, bytes.
        size: u64,
    },
    /// The range is not aligned.
    #[error("{length} bytes at {offset} are not aligned to the export's blocks of {block_min} bytes")]
    Alignment {
        /// Bytes.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Of the export, bytes.
        block_min: u32,
    },
    /// The request is longer than the server, or the protocol, takes.
    #[error("{length} bytes in one request; the limit is {limit}")]
    TooLong {
        /// Bytes.
        length: u64,
        /// Bytes.
        limit: u64,
    },
    /// The export is read-only.
    #[error("the export is read-only")]
    ReadOnly,
    /// The server offers neither this command nor anything in its place, or not with these flags.
    #[error("the server does not offer {command:?} with these flags")]
    NotOffered {
        /// The command.
        command: Command,
    },
}

impl RemoteExport {
    fn headers(&self) -> Headers {
        match (self.extended, self.structured) {
            (true, _) => Headers::Extended,
            (false, true) => Headers::Structured,
            (false, false) => Headers::Simple,
        }
    }

    /// Whether a request keeps within what the server offered.
    fn accepts(&self, request: &Request) -> Result<(), SubmitError> {
        let &Request { command, offset, length, .. } = request;
        let offered = match command {
            Command::Read | Command::Write => true,
            Command::Flush => self.flush,
            Command::Trim => self.trim,
            Command::Cache => self.cache,
            Command::WriteZeroes => self.write_zeroes,
            Command::BlockStatus => self.base_allocation.is_some(),
        };
        let flags_defined = request.flag_bits() & !command.flags() == 0;
        let flags_offered =
            (!request.fua || self.fua) && (!request.fast_zero || self.fast_zero) && (!request.df || self.df);
        if command.modifies() && self.read_only {
            return Err(SubmitError::ReadOnly);
        }
        if !offered || !flags_defined || !flags_offered {
            return Err(SubmitError::NotOffered { command });
        }
        let size = self.size;
        if command == Command::Flush {
            let empty = offset == 0 && length == 0;
            return if empty { Ok(()) } else { Err(SubmitError::Range { offset, length, size }) };
        }
        if length == 0 || offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(SubmitError::Range { offset, length, size });
        }
        let block_min = self.block_min;
        if !offset.is_multiple_of(u64::from(block_min)) || !length.is_multiple_of(u64::from(block_min)) {
            return Err(SubmitError::Alignment { offset, length, block_min });
        }
        let limit = u64::from(self.block_max);
        if matches!(command, Command::Read | Command::Write) && length > limit {
            return Err(SubmitError::TooLong { length, limit });
        }
        Ok(())
    }
}

/// Why a request failed at the server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{errno}{}{message}", if message.is_empty() { "" } else { ": " })]
pub struct Failure {
    /// The class of the failure.
    pub errno: Errno,
    /// The server's words, freed of control characters; may be empty.
    pub message: String,
}

/// An event that a connection reports to its driver; events are in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientEvent {
    /// The server grants TLS. Replace the stream by the TLS stream, then call
    /// [`ClientConnection::tls_started`].
    StartTls,
    /// The handshake is over: [`ClientConnection::export`] describes the export, requests may be submitted.
    Ready,
    /// The next `length` bytes of the stream are the read's bytes from `offset` of the export on. The driver
    /// takes them itself and calls [`ClientConnection::payload_taken`]. They count only once `Done` says so.
    Data {
        /// The read.
        cookie: u64,
        /// Absolute in the export, bytes.
        offset: u64,
        /// Bytes, never zero.
        length: u64,
    },
    /// These bytes of the read are zeroes; nothing follows on the stream.
    Hole {
        /// The read.
        cookie: u64,
        /// Absolute in the export, bytes.
        offset: u64,
        /// Bytes, never zero.
        length: u64,
    },
    /// The answer to BLOCK_STATUS: (bytes, state flags) from the request's offset on, never beyond its end.
    Extents {
        /// The request.
        cookie: u64,
        /// At least one.
        extents: Vec<(u64, u32)>,
    },
    /// The request is answered completely; its cookie is free.
    Done {
        /// The request.
        cookie: u64,
        /// What came of it.
        result: Result<(), Failure>,
    },
}

/// Why a server did not grant an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No such option.
    #[error("the option is not supported")]
    Unsupported,
    /// Its policy forbids it.
    #[error("its policy forbids it")]
    Policy,
    /// It found the option malformed.
    #[error("it took the option for malformed")]
    Invalid,
    /// TLS has to be used.
    #[error("it demands TLS")]
    TlsRequired,
    /// It has no such export.
    #[error("it has no such export")]
    UnknownExport,
    /// It is stopping.
    #[error("it is shutting down")]
    Shutdown,
    /// It wants its block size obeyed.
    #[error("it demands that its block size be asked for")]
    BlockSizeRequired,
    /// It wants extended headers, which it does not offer.
    #[error("it demands extended headers")]
    ExtendedHeadersRequired,
    /// Anything else.
    #[error("error reply {0:#x}")]
    Other(u32),
}

impl Refusal {
    fn from_code(code: u32) -> Refusal {
        match code {
            reply::ERR_UNSUP => Refusal::Unsupported,
            reply::ERR_POLICY => Refusal::Policy,
            reply::ERR_INVALID => Refusal::Invalid,
            reply::ERR_TLS_REQD => Refusal::TlsRequired,
            reply::ERR_UNKNOWN => Refusal::UnknownExport,
            reply::ERR_SHUTDOWN => Refusal::Shutdown,
            reply::ERR_BLOCK_SIZE_REQD => Refusal::BlockSizeRequired,
            reply::ERR_EXT_HEADER_REQD => Refusal::ExtendedHeadersRequired,
            other => Refusal::Other(other),
        }
    }
}

/// Why a connection to a server is over: close it; everything in flight is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientFatal {
    /// The other end does not speak NBD.
    #[error("the other end is no NBD server: its greeting holds {found:#018x}")]
    NotNbd {
        /// What stood in place of a magic.
        found: u64,
    },
    /// The other end speaks only a dialect from before fixed newstyle.
    #[error("the server speaks only the oldstyle protocol, without fixed newstyle negotiation")]
    Outdated,
    /// An option was refused for good.
    #[error("the server refused export '{export}': {reason}{}{message}", if message.is_empty() { "" } else { ": " })]
    Refused {
        /// The export asked for.
        export: String,
        /// Why.
        reason: Refusal,
        /// The server's words; may be empty.
        message: String,
    },
    /// TLS was asked for and refused.
    #[error("the server refused TLS, which is demanded here: {reason}{}{message}", if message.is_empty() { "" } else { ": " })]
    TlsRefused {
        /// Why.
        reason: Refusal,
        /// The server's words; may be empty.
        message: String,
    },
    /// Bytes arrived after the answer to STARTTLS. No server sends them; an attacker on the network
    /// would, so that they pass for bytes sent under TLS.
    #[error("bytes arrived in the clear behind the answer to STARTTLS")]
    BytesBeforeTls,
    /// Something else than an option reply arrived.
    #[error("an option reply starts with {found:#018x} instead of its magic")]
    OptionReplyMagic {
        /// What stood there.
        found: u64,
    },
    /// A reply to an option that was not sent.
    #[error("a reply to option {option} while option {expected} was pending")]
    OptionReplyFor {
        /// Answered.
        option: u32,
        /// Pending.
        expected: u32,
    },
    /// More or longer replies than any option needs.
    #[error("too many, or too long, replies to option {option}")]
    OptionReplyFlood {
        /// The option.
        option: u32,
    },
    /// A reply that the option cannot have, or whose content contradicts its length.
    #[error("a malformed reply of type {kind:#x} to option {option}")]
    OptionReplyMalformed {
        /// The option.
        option: u32,
        /// The reply's type.
        kind: u32,
    },
    /// Block sizes against the protocol's rules.
    #[error("block sizes {min}, {preferred}, {max} break the protocol's rules")]
    BlockSizes {
        /// Bytes.
        min: u32,
        /// Bytes.
        preferred: u32,
        /// Bytes.
        max: u32,
    },
    /// An export of an impossible size, or flags that are none.
    #[error("an export of {size} bytes with transmission flags {flags:#06x} cannot be")]
    ExportMalformed {
        /// Bytes.
        size: u64,
        /// As sent.
        flags: u16,
    },
    /// Something else than a reply arrived, or a kind of reply that was not negotiated.
    #[error("a reply starts with {found:#010x} instead of a negotiated magic")]
    ReplyMagic {
        /// What stood there.
        found: u32,
    },
    /// A reply to nothing.
    #[error("a reply with cookie {cookie:#x}, which no request in flight has")]
    UnknownCookie {
        /// As sent.
        cookie: u64,
    },
    /// A simple reply where structured ones are mandatory.
    #[error("a simple reply to request {cookie:#x}, which demands a structured one")]
    SimpleReply {
        /// The request.
        cookie: u64,
    },
    /// A chunk that the request cannot have, or whose content contradicts its length.
    #[error("a malformed chunk of type {kind:#x} with {length} bytes for request {cookie:#x}")]
    ChunkMalformed {
        /// The request.
        cookie: u64,
        /// The chunk's type.
        kind: u16,
        /// Of its payload, bytes.
        length: u64,
    },
    /// An extended header with another offset than its request has.
    #[error("a chunk for request {cookie:#x} names offset {offset}, and the request {expected}")]
    ReplyOffset {
        /// The request.
        cookie: u64,
        /// As sent.
        offset: u64,
        /// Of the request.
        expected: u64,
    },
    /// Content outside of the request, twice, or in more pieces than allowed.
    #[error("content of {length} bytes at {offset} is not a new part of read {cookie:#x}")]
    ContentRange {
        /// The read.
        cookie: u64,
        /// Bytes.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Extents that are empty, too long, or of a context that was not negotiated.
    #[error("the extents for request {cookie:#x} do not fit it")]
    Extents {
        /// The request.
        cookie: u64,
    },
    /// A reply that ended in success without all it promised.
    #[error("the reply to request {cookie:#x} ended before it was complete")]
    Incomplete {
        /// The request.
        cookie: u64,
    },
}

#[derive(Debug)]
enum Phase {
    Handshake(Box<Handshake>),
    Transmission(Box<Transmission>),
}

/// One connection to a server. See the folder's head page for how to drive it.
#[derive(Debug)]
pub struct ClientConnection {
    opened: Timestamp,
    phase: Phase,
    events: VecDeque<ClientEvent>,
    /// After a disconnect or a [`ClientFatal`]: no more requests.
    closing: bool,
    /// After a [`ClientFatal`]: further input is ignored.
    dead: bool,
}

impl ClientConnection {
    /// A connection opened at `now`. The server speaks first.
    ///
    /// # Errors
    /// When the export's name cannot travel.
    pub fn new(options: ClientOptions, now: Timestamp) -> Result<ClientConnection, StringFault> {
        check_string(options.export.as_bytes())?;
        Ok(ClientConnection {
            opened: now,
            phase: Phase::Handshake(Box::new(Handshake::new(options))),
            events: VecDeque::new(),
            closing: false,
            dead: false,
        })
    }

    /// Takes received bytes from the front of `input` and says how many: at most one message, and at least
    /// one byte when there is one. What has to be sent is appended to `out`. After every call, take the
    /// events, and the payload if one of them announces it, before feeding the rest.
    ///
    /// # Errors
    /// [`ClientFatal`]: send what is in `out` if that is easy, close the connection.
    ///
    /// # Panics
    /// When called after [`ClientEvent::Data`] before [`ClientConnection::payload_taken`].
    pub fn receive(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<usize, ClientFatal> {
        if self.dead {
            return Ok(input.len());
        }
        let mut rest = input;
        let outcome = match &mut self.phase {
            Phase::Handshake(handshake) => match handshake.receive(&mut rest, out) {
                Ok(Some(export)) => {
                    self.phase = Phase::Transmission(Box::new(Transmission::new(export)));
                    self.events.push_back(ClientEvent::Ready);
                    Ok(())
                }
                Ok(None) => {
                    if handshake.is_starting_tls() {
                        self.events.push_back(ClientEvent::StartTls);
                    }
                    Ok(())
                }
                Err(fatal) => Err(fatal),
            },
            Phase::Transmission(transmission) => transmission.receive(&mut rest, &mut self.events),
        };
        self.note(outcome)?;
        Ok(input.len() - rest.len())
    }

    /// The next event, in the order in which they happened.
    pub fn poll_event(&mut self) -> Option<ClientEvent> {
        self.events.pop_front()
    }

    /// The driver swapped the stream after [`ClientEvent::StartTls`]: what is received from now on came
    /// through TLS. Appends what goes into it first.
    ///
    /// # Panics
    /// When the server granted no TLS.
    pub fn tls_started(&mut self, out: &mut Vec<u8>) {
        match &mut self.phase {
            Phase::Handshake(handshake) => handshake.tls_started(out),
            Phase::Transmission(_) => panic!("TLS begins in the handshake"),
        }
    }

    /// The driver took the whole payload of the last [`ClientEvent::Data`] off the stream. May yield an
    /// event.
    ///
    /// # Errors
    /// As [`ClientConnection::receive`]: the payload may have been the end of a reply that lacks something.
    ///
    /// # Panics
    /// When no payload was to be taken.
    pub fn payload_taken(&mut self) -> Result<(), ClientFatal> {
        let outcome = match &mut self.phase {
            Phase::Transmission(transmission) => transmission.payload_taken(&mut self.events),
            Phase::Handshake(_) => panic!("a handshake has no payload"),
        };
        self.note(outcome)
    }

    /// Appends a request's header to `out` and returns its cookie, whose low 32 bits are a dense index below
    /// [`IN_FLIGHT_MAX`] for tables of the driver. The payload of a WRITE has to follow on the stream.
    ///
    /// # Errors
    /// [`SubmitError`]: nothing was appended.
    pub fn submit(&mut self, request: &Request, out: &mut Vec<u8>) -> Result<u64, SubmitError> {
        match &mut self.phase {
            Phase::Transmission(transmission) if !self.closing => transmission.submit(request, out),
            _ => Err(SubmitError::NotReady),
        }
    }

    /// Appends a disconnect. Wait for the requests in flight first; nothing can be submitted
    /// afterwards.
    pub fn disconnect(&mut self, out: &mut Vec<u8>) {
        if std::mem::replace(&mut self.closing, true) {
            return;
        }
        match &self.phase {
            Phase::Handshake(_) => handshake::encode_option(option::ABORT, &[], out),
            Phase::Transmission(transmission) => {
                let command = wire::COMMAND_DISC;
                RequestHeader { flags: 0, command, cookie: 0, offset: 0, length: 0 }
                    .encode(transmission.export().headers(), out);
            }
        }
    }

    /// The export; none before [`ClientEvent::Ready`].
    #[must_use]
    pub fn export(&self) -> Option<&RemoteExport> {
        match &self.phase {
            Phase::Transmission(transmission) => Some(transmission.export()),
            Phase::Handshake(_) => None,
        }
    }

    /// Requests without a complete answer.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        match &self.phase {
            Phase::Transmission(transmission) => transmission.in_flight(),
            Phase::Handshake(_) => 0,
        }
    }

    /// Whether the server has had [`HANDSHAKE_NANOS_MAX`] and still granted no export: give up.
    #[must_use]
    pub fn handshake_overdue(&self, now: Timestamp) -> bool {
        matches!(self.phase, Phase::Handshake(_)) && now.nanos_since(self.opened) >= HANDSHAKE_NANOS_MAX
    }

    fn note(&mut self, outcome: Result<(), ClientFatal>) -> Result<(), ClientFatal> {
        if outcome.is_err() {
            self.closing = true;
            self.dead = true;
        }
        outcome
    }
}

/// A server's text as it may be shown: valid UTF-8, without control characters, of bounded length.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(TEXT_BYTES_MAX)]);
    let clean: String = text.chars().map(|c| if is_unprintable(c) { ' ' } else { c }).collect();
    clip(clean.trim(), TEXT_BYTES_MAX).to_owned()
}
