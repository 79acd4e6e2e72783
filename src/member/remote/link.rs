//! One connection to a server: a non-blocking socket and the client's half of the protocol on it.
//!
//! Invariants: nothing here blocks; the buffers for sending hold what was submitted, and one buffer
//! of a fixed size holds what arrives; payloads are sent from, and received into, the buffers of
//! the requests. Must not know what requests are for, or what happens when a connection ends.

use super::RemoteError;
use crate::tls::{TlsFailure, Tunnel};
use calpe_core::block_io::Buf;
use calpe_core::nbd::{ClientConnection, ClientEvent, ClientFatal, RemoteExport, Request, SubmitError};
use calpe_host::polling;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, Shutdown, UnixAddr, sendmsg, setsockopt, shutdown, sockopt};
use nix::sys::uio::readv;
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Bytes received at once beside payloads: hundreds of replies, or a few small reads with them.
const INPUT_BYTES: usize = 64 << 10;

/// Spans handed to the kernel with one call.
const SPANS_PER_SEND: usize = 64;

/// Bytes received before the caller gets its turn: other connections and submissions wait
/// meanwhile.
const RECEIVED_AT_ONCE: usize = 4 << 20;

/// Takes the replies of a connection.
pub(super) trait Sink {
    /// Where to put `len` bytes from `offset` of the export, which the read `cookie` requested.
    fn target(&mut self, cookie: u64, offset: u64, len: usize) -> &mut [u8];

    /// Takes any event but [`ClientEvent::Data`].
    fn event(&mut self, event: ClientEvent);
}

/// Why a connection is over.
#[derive(Debug)]
pub(super) enum LinkError {
    /// The server has closed it.
    Closed,
    /// The server has announced its end.
    Stopping,
    /// The system reports an error.
    Io(io::Error),
    /// The server does not keep to the protocol.
    Protocol(ClientFatal),
}

impl std::fmt::Display for LinkError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LinkError::Closed => f.write_str("the server closed the connection"),
            LinkError::Stopping => f.write_str("the server shuts down"),
            LinkError::Io(error) => write!(f, "the connection broke: {error}"),
            LinkError::Protocol(fatal) => write!(f, "the server broke the protocol: {fatal}"),
        }
    }
}

impl From<ClientFatal> for LinkError {
    fn from(fatal: ClientFatal) -> LinkError {
        LinkError::Protocol(fatal)
    }
}

/// What carries the bytes.
enum Stream {
    Plain(OwnedFd),
    Tls {
        tunnel: Tunnel,
        /// The network socket under TLS, to be cut.
        network: OwnedFd,
    },
}

impl Stream {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Plain(socket) => socket.as_fd(),
            Stream::Tls { tunnel, .. } => tunnel.socket.as_fd(),
        }
    }
}

/// Something to be sent.
enum Span {
    Bytes(Vec<u8>),
    Payload(Buf),
}

impl Span {
    fn bytes(&self) -> &[u8] {
        match self {
            Span::Bytes(bytes) => bytes,
            Span::Payload(buf) => buf,
        }
    }
}

/// Payload of a read that is arriving.
struct Payload {
    cookie: u64,
    offset: u64,
    left: usize,
}

/// A connection.
pub(super) struct Link {
    stream: Stream,
    nbd: ClientConnection,
    out: VecDeque<Span>,
    /// Bytes of the first span that are sent.
    sent: usize,
    out_bytes: usize,
    input: Box<[u8]>,
    /// Start of the bytes in `input` that were received and not parsed.
    start: usize,
    end: usize,
    payload: Option<Payload>,
}

impl Link {
    /// Wraps a connected, non-blocking stream.
    pub(super) fn new(socket: OwnedFd, nbd: ClientConnection) -> Link {
        Link {
            stream: Stream::Plain(socket),
            nbd,
            out: VecDeque::new(),
            sent: 0,
            out_bytes: 0,
            input: vec![0; INPUT_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            payload: None,
        }
    }

    /// Continues under TLS, which `start` begins on the socket. To be called after
    /// [`ClientEvent::StartTls`].
    pub(super) fn secure(
        self,
        start: impl FnOnce(OwnedFd) -> Result<Tunnel, RemoteError>,
    ) -> Result<Link, RemoteError> {
        assert!(self.out.is_empty() && self.start == self.end, "nothing is said beside STARTTLS");
        let Stream::Plain(socket) = self.stream else { unreachable!("TLS is started once") };
        let network = socket.try_clone().map_err(RemoteError::Connect)?;
        let stream = Stream::Tls { tunnel: start(socket)?, network };
        let mut link = Link { stream, ..self };
        let mut bytes = Vec::new();
        link.nbd.tls_started(&mut bytes);
        link.queue_bytes(bytes);
        Ok(link)
    }

    /// Why the connection ended, if TLS was the reason.
    pub(super) fn tls_failure(&self) -> Option<&TlsFailure> {
        match &self.stream {
            Stream::Plain(_) => None,
            Stream::Tls { tunnel, .. } => tunnel.failure(),
        }
    }

    /// Tells the server that no more requests come; its answers still arrive.
    pub(super) fn end_asking(&self) {
        // The next receive reports a broken connection.
        let _ = shutdown(self.fd().as_raw_fd(), Shutdown::Write);
    }

    /// Makes sure that unsent bytes are never sent: closing resets the connection. Unix sockets
    /// have no such option. For a connection that is dropped next.
    pub(super) fn cut(&self) {
        // Errors mean that the connection is dead already.
        let reset = libc::linger { l_onoff: 1, l_linger: 0 };
        match &self.stream {
            Stream::Plain(socket) => drop(setsockopt(socket, sockopt::Linger, &reset)),
            Stream::Tls { network, .. } => {
                let _ = setsockopt(network, sockopt::Linger, &reset);
                // Ends TLS at once, with the bytes that it holds.
                let _ = shutdown(network.as_raw_fd(), Shutdown::Both);
            }
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.fd()
    }

    pub(super) fn export(&self) -> Option<&RemoteExport> {
        self.nbd.export()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.nbd.in_flight()
    }

    /// Bytes that wait to be sent.
    pub(super) fn out_bytes(&self) -> usize {
        self.out_bytes
    }

    /// Queues a request, with the payload of a write. Returns its cookie.
    pub(super) fn submit(&mut self, request: &Request, payload: Option<Buf>) -> Result<u64, SubmitError> {
        let mut header = Vec::new();
        let cookie = self.nbd.submit(request, &mut header)?;
        self.queue_bytes(header);
        if let Some(payload) = payload {
            self.out_bytes += payload.len();
            self.out.push_back(Span::Payload(payload));
        }
        Ok(cookie)
    }

    /// Says goodbye, if the connection takes it at once. For a connection with nothing in flight.
    pub(super) fn farewell(&mut self) {
        let mut bytes = Vec::new();
        self.nbd.disconnect(&mut bytes);
        self.queue_bytes(bytes);
        // A server that does not get it sees the connection end.
        let _ = self.send();
    }

    /// Sends what the socket takes.
    pub(super) fn send(&mut self) -> Result<(), LinkError> {
        while !self.out.is_empty() {
            let mut slices = Vec::with_capacity(self.out.len().min(SPANS_PER_SEND));
            let mut skip = self.sent;
            for span in self.out.iter().take(SPANS_PER_SEND) {
                slices.push(IoSlice::new(&span.bytes()[skip..]));
                skip = 0;
            }
            let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
            match sendmsg::<UnixAddr>(self.stream.fd().as_raw_fd(), &slices, &[], flags, None) {
                Ok(count) => self.note_sent(count),
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(errno) if polling::survives(errno as i32, "a connection to a remote member") => {
                    return Ok(());
                }
                Err(errno) => return Err(LinkError::Io(errno.into())),
            }
        }
        Ok(())
    }

    /// Takes what has arrived, up to a limit.
    pub(super) fn receive(&mut self, sink: &mut impl Sink) -> Result<(), LinkError> {
        let mut received = 0;
        while received < RECEIVED_AT_ONCE {
            // Either `input` was parsed completely, or a payload in it was not complete.
            debug_assert!(self.start == self.end);
            (self.start, self.end) = (0, 0);
            let mut input = IoSliceMut::new(&mut self.input);
            let (result, room) = match &self.payload {
                Some(payload) => {
                    let target = sink.target(payload.cookie, payload.offset, payload.left);
                    let room = target.len() + input.len();
                    (readv(self.stream.fd(), &mut [IoSliceMut::new(target), input]), room)
                }
                None => {
                    let room = input.len();
                    (readv(self.stream.fd(), std::slice::from_mut(&mut input)), room)
                }
            };
            let count = match result {
                Ok(0) => return Err(LinkError::Closed),
                Ok(count) => count,
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => continue,
                Err(errno) if polling::survives(errno as i32, "a connection to a remote member") => {
                    return Ok(());
                }
                Err(errno) => return Err(LinkError::Io(errno.into())),
            };
            received += count;
            let payload = self.payload.as_mut().map_or(0, |payload| {
                let here = count.min(payload.left);
                payload.left -= here;
                payload.offset += here as u64;
                here
            });
            self.end = count - payload;
            self.parse(sink)?;
            if count < room {
                // The socket is empty; if not, the next poll reports it.
                return Ok(());
            }
        }
        Ok(())
    }

    fn parse(&mut self, sink: &mut impl Sink) -> Result<(), LinkError> {
        loop {
            if let Some(payload) = &mut self.payload {
                let here = payload.left.min(self.end - self.start);
                if here > 0 {
                    let from = &self.input[self.start..self.start + here];
                    sink.target(payload.cookie, payload.offset, here).copy_from_slice(from);
                    self.start += here;
                    payload.left -= here;
                    payload.offset += here as u64;
                }
                if payload.left > 0 {
                    return Ok(());
                }
                self.payload = None;
                self.nbd.payload_taken()?;
            } else {
                if self.start == self.end {
                    return Ok(());
                }
                let mut answer = Vec::new();
                self.start += self.nbd.receive(&self.input[self.start..self.end], &mut answer)?;
                self.queue_bytes(answer);
            }
            while let Some(event) = self.nbd.poll_event() {
                match event {
                    ClientEvent::Data { cookie, offset, length } => {
                        let left = usize::try_from(length).expect("a part of a request");
                        self.payload = Some(Payload { cookie, offset, left });
                    }
                    other => sink.event(other),
                }
            }
        }
    }

    fn queue_bytes(&mut self, bytes: Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        self.out_bytes += bytes.len();
        match self.out.back_mut() {
            Some(Span::Bytes(last)) => last.extend_from_slice(&bytes),
            _ => self.out.push_back(Span::Bytes(bytes)),
        }
    }

    fn note_sent(&mut self, mut count: usize) {
        self.out_bytes -= count;
        while let Some(first) = self.out.front() {
            let left = first.bytes().len() - self.sent;
            if count < left {
                self.sent += count;
                return;
            }
            count -= left;
            self.sent = 0;
            self.out.pop_front();
        }
    }
}
