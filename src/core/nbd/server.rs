//! One client's connection to this server: the handshake followed by the transmission phase.
//!
//! Invariants: [`ServerConnection::receive`] consumes at least one byte of a non-empty input or fails, and
//! handles at most one message per call, so that the caller can stop between messages when it has enough to
//! send. What is kept of the input is bounded: a header, or 16 KiB of option data during the handshake. It
//! must not know sockets, threads or the clock.

use super::errno::Errno;
use super::events::{Extents, Fatal, Incoming, ReadPart};
use super::export::{ExportInfo, Exports};
use super::handshake::{Handshake, Progress, TlsMode};
use super::transmission::Transmission;
use super::wire::Request;
use crate::units::Timestamp;

/// Connections that a driver should serve at once.
pub const CONNECTIONS_MAX: usize = 100;

/// Bytes that a driver should let a client leave unread before it stops taking requests from it.
pub const UNREAD_BYTES_MAX: usize = 16 << 20;

/// How long a client may take to choose an export, in nanoseconds: 10 s. Real ones need milliseconds.
pub const HANDSHAKE_NANOS_MAX: u64 = 10_000_000_000;

#[derive(Debug)]
enum Phase {
    Handshake(Box<Handshake>),
    Transmission(Box<Transmission>),
}

/// One client, from its connect to its close. See the folder's head page for how to drive it.
#[derive(Debug)]
pub struct ServerConnection {
    opened: Timestamp,
    phase: Phase,
    /// After a disconnect or a [`Fatal`]: further input is ignored; requests in flight may still be
    /// answered.
    closed: bool,
}

impl ServerConnection {
    /// A connection accepted at `now`.
    #[must_use]
    pub fn new(now: Timestamp) -> ServerConnection {
        ServerConnection::with_tls(now, TlsMode::Off)
    }

    /// A connection accepted at `now` on a listener that offers or demands TLS.
    #[must_use]
    pub fn with_tls(now: Timestamp, tls: TlsMode) -> ServerConnection {
        ServerConnection {
            opened: now,
            phase: Phase::Handshake(Box::new(Handshake::new(tls))),
            closed: false,
        }
    }

    /// Appends the greeting, the first bytes to send.
    pub fn start(&mut self, out: &mut Vec<u8>) {
        Handshake::greet(out);
    }

    /// Consumes received bytes from the front of `input`; returns how many, and the event they
    /// completed. Handles at most one message, and takes at least one byte when there is one;
    /// appends the replies that it makes itself to `out`. Call again with the rest, until nothing
    /// is left or `out` is long enough to be sent first.
    ///
    /// # Errors
    /// [`Fatal`]: close the connection.
    ///
    /// # Panics
    /// When called after [`Incoming::Write`] before [`ServerConnection::payload_taken`].
    pub fn receive(
        &mut self,
        input: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<(usize, Option<Incoming>), Fatal> {
        if self.closed {
            return Ok((input.len(), None));
        }
        let mut rest = input;
        let outcome = match &mut self.phase {
            Phase::Handshake(handshake) => match handshake.receive(&mut rest, exports, out) {
                Ok(Progress::Continue) => Ok(None),
                Ok(Progress::Selected(negotiated)) => {
                    let transmission = Transmission::new(*negotiated, handshake.stopping);
                    self.phase = Phase::Transmission(Box::new(transmission));
                    Ok(Some(Incoming::Selected))
                }
                Ok(Progress::StartTls) => Ok(Some(Incoming::StartTls)),
                Ok(Progress::Aborted) => Ok(Some(Incoming::Disconnect)),
                Err(fatal) => Err(fatal),
            },
            Phase::Transmission(transmission) => transmission.receive(&mut rest, out),
        };
        self.closed = matches!(outcome, Err(_) | Ok(Some(Incoming::Disconnect)));
        outcome.map(|incoming| (input.len() - rest.len(), incoming))
    }

    /// The driver replaced the stream after [`Incoming::StartTls`]: bytes received from now on came
    /// through TLS. The time limit of the handshake keeps running.
    ///
    /// # Panics
    /// When TLS was not to be started.
    pub fn tls_started(&mut self) {
        match &mut self.phase {
            Phase::Handshake(handshake) => handshake.tls_started(),
            Phase::Transmission(_) => panic!("TLS begins in the handshake"),
        }
    }

    /// The driver took the whole payload of the last [`Incoming::Write`] off the stream.
    ///
    /// # Panics
    /// When no payload was to be taken.
    pub fn payload_taken(&mut self) {
        match &mut self.phase {
            Phase::Transmission(transmission) => transmission.payload_taken(),
            Phase::Handshake(_) => panic!("a handshake has no payload"),
        }
    }

    /// The export that the client chose; none before [`Incoming::Selected`].
    #[must_use]
    pub fn export(&self) -> Option<&ExportInfo> {
        match &self.phase {
            Phase::Transmission(transmission) => Some(transmission.export()),
            Phase::Handshake(_) => None,
        }
    }

    /// Bytes that offsets and lengths of this client's requests are multiples of: the smallest block where
    /// the client asked for the block sizes, 1 where it did not; none before [`Incoming::Selected`].
    #[must_use]
    pub fn alignment(&self) -> Option<u64> {
        match &self.phase {
            Phase::Transmission(transmission) => Some(transmission.alignment()),
            Phase::Handshake(_) => None,
        }
    }

    /// Whether the client has had [`HANDSHAKE_NANOS_MAX`] and still chose no export: close it.
    #[must_use]
    pub fn handshake_overdue(&self, now: Timestamp) -> bool {
        matches!(self.phase, Phase::Handshake(_)) && now.nanos_since(self.opened) >= HANDSHAKE_NANOS_MAX
    }

    /// The server is stopping: from now on options are refused with ERR_SHUTDOWN and requests with ESHUTDOWN,
    /// while requests handed out before may still be answered.
    pub fn begin_shutdown(&mut self) {
        match &mut self.phase {
            Phase::Handshake(handshake) => handshake.stopping = true,
            Phase::Transmission(transmission) => transmission.stopping = true,
        }
    }

    /// Appends the successful reply to a request without reply payload.
    ///
    /// # Panics
    /// Like every `reply_*`, before an export was chosen.
    pub fn reply_done(&self, request: &Request, out: &mut Vec<u8>) {
        self.transmission().reply_done(request, out);
    }

    /// Appends an error reply. `message` reaches the client only over structured replies, cut to 256 bytes.
    /// ENOTSUP and EOVERFLOW become EINVAL where the protocol does not allow them.
    pub fn reply_error(&self, request: &Request, errno: Errno, message: &str, out: &mut Vec<u8>) {
        self.transmission().reply_error(request, errno, message, out);
    }

    /// Appends the header of a successful READ; exactly `request.length` bytes of payload must follow it on
    /// the stream. Call this when the bytes are at hand: if an error shows up afterwards, the connection must
    /// be closed.
    pub fn reply_read_header(&self, request: &Request, out: &mut Vec<u8>) {
        self.transmission().reply_read_header(request, out);
    }

    /// Whether a READ may be answered in parts, by [`ServerConnection::reply_read_data`] and
    /// [`ServerConnection::reply_read_hole`]. Parts cover the request, do not overlap, and the last one is
    /// said to be so.
    #[must_use]
    pub fn takes_parts(&self, request: &Request) -> bool {
        self.transmission().takes_parts(request)
    }

    /// Appends the header of one part of a READ; its bytes must follow it on the stream.
    pub fn reply_read_data(&self, request: &Request, part: ReadPart, out: &mut Vec<u8>) {
        self.transmission().reply_read_data(request, part, out);
    }

    /// Appends one part of a READ that is all zeroes; nothing follows it.
    pub fn reply_read_hole(&self, request: &Request, part: ReadPart, out: &mut Vec<u8>) {
        self.transmission().reply_read_hole(request, part, out);
    }

    /// Appends the reply to BLOCK_STATUS: one chunk for each of `request.contexts`. Extents are (bytes,
    /// flags) from `request.offset` on, flags being [`super::STATE_HOLE`] and [`super::STATE_ZERO`], or
    /// [`super::HEALTH_DEGRADED`] and [`super::HEALTH_LOST`]; neighbours of one state are merged, what lies
    /// beyond the request is cut off, one extent is sent for REQ_ONE. They may end before the request does.
    /// None at all reads as data of unknown state, or as clean.
    pub fn reply_block_status(&self, request: &Request, extents: Extents, out: &mut Vec<u8>) {
        self.transmission().reply_block_status(request, extents, out);
    }

    fn transmission(&self) -> &Transmission {
        match &self.phase {
            Phase::Transmission(transmission) => transmission,
            Phase::Handshake(_) => panic!("a reply before an export was chosen"),
        }
    }
}
