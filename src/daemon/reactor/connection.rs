//! One client's connection: what of it is in user space, what the kernel holds, and when it may be closed.
//!
//! Invariants: at most one receive and one send are in the kernel; bytes are taken from the stream only while the
//! connection may start requests; a connection is removed only when nothing of it is in the kernel or in a
//! volume. Must not touch the ring or volumes.

use super::ArrayId;
use super::admission::{Guest, Origin, Stage};
use super::fence::FENCED_MAX;
use super::listener::ListenTls;
use super::memory::charge_of;
use super::order::Ticket;
use super::outgoing::Outgoing;
use super::sys::PollBits;
use super::turns::Allowance;
use crate::tls::{Goodbye, ProvenPeer, ServerTls, Tunnel};
use calpe_core::block_io::{BufMut, Pool};
use calpe_core::nbd::{Command, Exports, Fatal, Incoming, Request, ServerConnection, UNREAD_BYTES_MAX};
use calpe_core::units::Timestamp;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes received at once: some thousand headers, or a dozen small writes.
const INBOX_BYTES: usize = 64 << 10;

/// Bytes received at once after a large write: the next header, and little of its payload, so that the payload
/// goes straight into its own buffer instead of being copied there.
const INBOX_BYTES_BULK: usize = 4 << 10;

/// A write of at least this many bytes makes the next receive a short one.
const BULK_WRITE_BYTES: u64 = 128 << 10;

/// Requests of one connection in flight or answered but unsent: twice what the Linux client keeps in flight.
const REQUESTS_MAX: usize = 256;

/// Bytes of replies without payload that may gather behind a message that is being sent: some thousand. They are not charged to
/// the memory for payloads.
const HEADS_BYTES_MAX: usize = 128 << 10;

/// A client's connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: Rc<OwnedFd>,
    pub(super) nbd: ServerConnection,
    pub(super) origin: Origin,
    /// The array it chose.
    pub(super) array: Option<ArrayId>,
    /// Received and not yet parsed; none while the kernel fills it.
    inbox: Option<Inbox>,
    pub(super) receiving: Receiving,
    /// When the payload that is being received began, or the message that is being sent: the oldest thing that only
    /// this client can bring to an end.
    pub(super) payload_since: Timestamp,
    pub(super) sending_since: Timestamp,
    /// A request that waits for memory that this connection has itself; nothing behind it is parsed.
    parked: Option<Request>,
    /// Bytes of memory that its requests and unsent replies have.
    pub(super) held: usize,
    /// What it may spend of this turn.
    pub(super) allowance: Allowance,
    /// Its long requests that can go on.
    pub(super) longs: VecDeque<usize>,
    /// The long write whose payload comes next on the stream.
    pub(super) writing: Option<usize>,
    /// The array of the export that it was told of: it is a client of that one or of none.
    pub(super) chosen: Option<ArrayId>,
    /// It has chosen an export and is no client yet; nothing is parsed.
    pub(super) waits_for_place: bool,
    /// A long read has the connection to itself; nothing is parsed.
    pub(super) alone: bool,
    /// Replies being gathered.
    pub(super) filling: Box<Outgoing>,
    /// Bytes in the kernel's hands, when a send is under way.
    pub(super) sending: Option<usize>,
    /// An empty message to fill next.
    pub(super) spare: Option<Box<Outgoing>>,
    /// Requests given to the volume, or waiting for orphans, and not answered.
    pub(super) in_flight: usize,
    /// Those of them that wait for others, and of these what need not wait any more, by their tickets.
    pub(super) fenced: usize,
    pub(super) unfenced: VecDeque<Ticket>,
    /// Those given to the volume that modify.
    pub(super) modifying: usize,
    /// Writes are lost that its client may have made and not flushed: its next flush fails.
    pub(super) lost_writes: bool,
    /// Its client was seen to have hung up.
    pub(super) hung_up: bool,
    /// What of its socket says so.
    pub(super) hangup: PollBits,
    /// No more requests will come: goodbye, end of stream, or a protocol error.
    pub(super) read_closed: bool,
    /// The socket is of no use any more: replies are dropped.
    pub(super) broken: bool,
    /// Told to leave, and given its latest reply at this time: its last replies are all it still gets.
    pub(super) dismissed: Option<Timestamp>,
    /// The network behind `socket`, once there is TLS between them.
    pub(super) network: Option<NetworkEnd>,
    /// What TLS is done with, where there is any.
    pub(super) tls: Option<Arc<ServerTls>>,
    /// The socket is to be handed to TLS as soon as nothing of it is in the kernel and everything was sent: nothing is
    /// received from it any more.
    pub(super) starting_tls: bool,
    /// Listed to be parsed.
    pub(super) dirty: bool,
    /// Listed to be settled.
    pub(super) touched: bool,
    /// The last write was a large one.
    bulk: bool,
}

/// What tells of a client under TLS before its pump has passed on what came before.
#[derive(Debug)]
pub(super) struct NetworkEnd {
    pub(super) socket: Rc<OwnedFd>,
    goodbye: Goodbye,
    /// Who the client is.
    pub(super) peer: ProvenPeer,
}

impl NetworkEnd {
    /// Whether the client has ended TLS.
    pub(super) fn said_goodbye(&self) -> bool {
        self.goodbye.was_said()
    }
}

#[derive(Debug)]
struct Inbox {
    buf: BufMut,
    start: usize,
    end: usize,
}

/// What the kernel is filling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Receiving {
    Nothing,
    Inbox,
    /// The payload of a write, of which `have` bytes are there.
    Payload {
        request: Request,
        have: usize,
    },
}

/// What comes next on the stream.
#[derive(Debug)]
pub(super) enum Next {
    /// Nothing to parse: receive.
    Receive,
    /// There is something, but this connection has enough in flight or unsent.
    Full,
    /// There is a request, and no memory for its payload before something else of the connection has ended.
    Starved,
    /// A message was answered, or is not complete.
    Answered,
    /// An export was chosen.
    Selected,
    /// A request without payload.
    Request(Request),
    /// A write whose payload has arrived.
    Write(Request, BufMut),
    /// A write whose payload is to be received from `have` on.
    Payload { request: Request, buf: BufMut, have: usize },
    /// A READ or WRITE with more payload than there is memory for. The payload of a write is on the stream.
    InParts(Request),
    /// The client gets TLS once what there is for it was sent.
    StartTls,
    /// The client says goodbye.
    Leave,
    /// It broke the protocol.
    Fatal(Fatal),
}

impl Connection {
    /// `hangup`: what of the socket says that the client has hung up. It stays what it is under TLS, where the plain end
    /// tells as little as TCP what a client that ends its stream still wants.
    pub(super) fn new(
        socket: OwnedFd,
        hangup: PollBits,
        now: Timestamp,
        tls: &ListenTls,
        origin: Origin,
    ) -> Connection {
        let mut filling = Box::new(Outgoing::new());
        let mut nbd = ServerConnection::with_tls(now, tls.mode);
        nbd.start(&mut filling.head);
        Connection {
            socket: Rc::new(socket),
            nbd,
            origin,
            array: None,
            inbox: None,
            receiving: Receiving::Nothing,
            payload_since: now,
            sending_since: now,
            parked: None,
            held: 0,
            allowance: Allowance::default(),
            longs: VecDeque::new(),
            writing: None,
            chosen: None,
            waits_for_place: false,
            alone: false,
            filling,
            sending: None,
            spare: None,
            in_flight: 0,
            fenced: 0,
            unfenced: VecDeque::new(),
            modifying: 0,
            lost_writes: false,
            hung_up: false,
            hangup,
            read_closed: false,
            broken: false,
            dismissed: None,
            network: None,
            tls: tls.server.clone(),
            starting_tls: false,
            dirty: false,
            touched: false,
            bulk: false,
        }
    }

    /// What it is, as far as its place goes.
    pub(super) fn guest(&self, key: usize) -> Guest {
        let stage = match self.array {
            Some(_) => Stage::Client,
            None if self.broken || self.read_closed => Stage::Leaving,
            None => Stage::Stranger,
        };
        Guest { key, origin: self.origin, stage }
    }

    /// Parses the next message of what was received. `allowed`: bytes that its payload may take.
    pub(super) fn next(&mut self, exports: &dyn Exports, pool: &Pool, allowed: usize) -> Next {
        if let Some(request) = self.parked.take() {
            return self.admit(request, pool, allowed);
        }
        let full = self.is_full();
        let Some(inbox) = self.inbox.as_mut().filter(|inbox| inbox.start < inbox.end) else {
            self.inbox = None;
            return Next::Receive;
        };
        if full {
            return Next::Full;
        }
        let input = &inbox.buf[inbox.start..inbox.end];
        match self.nbd.receive(input, exports, &mut self.filling.head) {
            Err(fatal) => Next::Fatal(fatal),
            Ok((taken, incoming)) => {
                inbox.start += taken;
                match incoming {
                    None => Next::Answered,
                    Some(Incoming::Selected) => Next::Selected,
                    Some(Incoming::StartTls) => Next::StartTls,
                    Some(Incoming::Disconnect) => Next::Leave,
                    Some(Incoming::Request(request) | Incoming::Write { request }) => {
                        self.admit(request, pool, allowed)
                    }
                }
            }
        }
    }

    /// Takes a request on, with the memory that it needs from here on, or parks it.
    fn admit(&mut self, request: Request, pool: &Pool, allowed: usize) -> Next {
        let charge = charge_of(&request);
        let has_payload = matches!(request.command, Command::Read | Command::Write);
        if charge > allowed {
            let in_parts = request.command == Command::Write || self.nbd.takes_parts(&request);
            // What cannot be cut, or only where nothing else is under way, waits for what is.
            if self.held > 0 || !has_payload || !in_parts && self.in_flight > 0 {
                self.parked = Some(request);
                return Next::Starved;
            }
            return Next::InParts(request);
        }
        if request.command != Command::Write {
            return Next::Request(request);
        }
        self.bulk = request.length >= BULK_WRITE_BYTES;
        let mut buf = pool.alloc(request.length as usize);
        let have = self.take_payload(&mut buf);
        if have < buf.len() {
            return Next::Payload { request, buf, have };
        }
        self.nbd.payload_taken();
        Next::Write(request, buf)
    }

    /// Copies as much of a payload as was received with its header. Returns how much that is.
    pub(super) fn take_payload(&mut self, buf: &mut BufMut) -> usize {
        let Some(inbox) = &mut self.inbox else { return 0 };
        let have = buf.len().min(inbox.end - inbox.start);
        buf[..have].copy_from_slice(&inbox.buf[inbox.start..inbox.start + have]);
        inbox.start += have;
        if inbox.start == inbox.end {
            self.inbox = None;
        }
        have
    }

    /// Puts received bytes where [`Connection::next`] finds them.
    pub(super) fn received(&mut self, buf: BufMut, len: usize) {
        self.inbox = Some(Inbox { buf, start: 0, end: len });
    }

    /// A buffer to receive into, when the connection may receive now.
    pub(super) fn buffer_to_receive(&mut self, pool: &Pool) -> Option<BufMut> {
        let may = self.receiving == Receiving::Nothing
            && self.inbox.is_none()
            && !self.read_closed
            && !self.broken
            && !self.starting_tls
            && self.writing.is_none()
            && !self.is_full();
        may.then(|| pool.alloc(if self.bulk { INBOX_BYTES_BULK } else { INBOX_BYTES }))
    }

    /// A sealed message to be sent, when there is one and none is under way.
    pub(super) fn message_to_send(&mut self, now: Timestamp) -> Option<Box<Outgoing>> {
        if self.sending.is_some() || self.filling.is_empty() || self.broken {
            return None;
        }
        let next = self.spare.take().unwrap_or_else(|| Box::new(Outgoing::new()));
        let mut message = std::mem::replace(&mut self.filling, next);
        message.seal();
        self.sending = Some(message.bytes());
        self.sending_since = now;
        Some(message)
    }

    /// Bytes of replies that the client has not taken.
    pub(super) fn unsent(&self) -> usize {
        self.filling.bytes() + self.sending.unwrap_or(0)
    }

    /// Whether it may start no more requests for now.
    pub(super) fn is_full(&self) -> bool {
        self.in_flight >= REQUESTS_MAX
            || self.fenced >= FENCED_MAX
            || self.filling.head.len() > HEADS_BYTES_MAX
            || self.unsent() > UNREAD_BYTES_MAX
            || !self.filling.has_room_for(self.in_flight)
    }

    /// Whether it should be looked at again since something of it has ended: received requests waited until it may start
    /// more, or a long one for memory.
    pub(super) fn may_go_on(&self) -> bool {
        self.has_input() || self.is_parked() || !self.longs.is_empty() || self.writing.is_some() || self.alone
    }

    /// Whether there are received requests that wait for nothing.
    pub(super) fn has_input(&self) -> bool {
        // A payload that is being received comes first: until it is there, there is nothing to parse.
        self.inbox.is_some()
            && self.receiving == Receiving::Nothing
            && self.writing.is_none()
            && !self.alone
            && !self.waits_for_place
            && !self.is_parked()
            && !self.broken
            && !self.read_closed
            && !self.is_full()
    }

    /// Whether a part of a long write is being received.
    pub(super) fn is_receiving_part(&self) -> bool {
        self.writing.is_some() && self.receiving != Receiving::Nothing
    }

    /// Drops what was received and not parsed: nothing of it will be handled.
    pub(super) fn discard_input(&mut self) {
        self.inbox = None;
        self.parked = None;
    }

    /// Whether a request of it waits for payload memory.
    pub(super) fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    /// Since when it has kept memory that only its client can set free: a payload that does not come, replies that
    /// are not taken. None when it keeps none.
    pub(super) fn keeps_memory_since(&self) -> Option<Timestamp> {
        let payload = matches!(self.receiving, Receiving::Payload { .. }).then_some(self.payload_since);
        let replies = self.sending.is_some().then_some(self.sending_since);
        payload.into_iter().chain(replies).min()
    }

    /// Whether the socket can be handed to TLS now: the acknowledgement has left it, and nothing of what arrives behind
    /// it was or will be received here.
    pub(super) fn may_swap_socket(&self) -> bool {
        self.starting_tls
            && !self.broken
            && !self.read_closed
            && self.is_idle_in_kernel()
            && self.filling.is_empty()
            && self.inbox.is_none()
    }

    /// Goes on with the plain end of TLS.
    pub(super) fn swap_socket(&mut self, tunnel: Tunnel) {
        assert!(self.may_swap_socket(), "a socket was swapped under an operation");
        let (goodbye, peer) = (tunnel.goodbye(), tunnel.peer());
        let socket = std::mem::replace(&mut self.socket, Rc::new(tunnel.socket));
        self.network = Some(NetworkEnd { socket, goodbye, peer });
        self.starting_tls = false;
        self.nbd.tls_started();
    }

    /// Whether it has said all it will say.
    pub(super) fn is_done(&self) -> bool {
        self.in_flight == 0
            && (self.broken || (self.read_closed && self.sending.is_none() && self.filling.is_empty()))
    }

    /// Whether nothing of it is in the kernel.
    pub(super) fn is_idle_in_kernel(&self) -> bool {
        self.receiving == Receiving::Nothing && self.sending.is_none()
    }
}
