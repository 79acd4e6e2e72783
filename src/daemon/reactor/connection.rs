//! One client's connection: its state in user space, its operations in the kernel, how replies are worded,
//! and when it may be closed.
//!
//! Invariants: the kernel has at most one receive and one send of it; bytes are taken from the stream only
//! while the connection may start requests; a connection is removed only when neither the kernel nor a volume
//! has anything of it. Must not touch the ring or volumes.

mod requests;

use super::access::{ExportView, exceeds};
use super::admission::{Guest, Origin, Stage};
use super::directory::{ChosenArray, Directory, Listed, Seat};
use super::fence::{Session, Watched};
use super::link::Link;
use super::listener::ListenTls;
use super::long_line::LongLine;
use super::orders::{ArrayId, ConnectionId, LaneTicket, Requester, allocation_of, errno_of, health_of};
use super::shares::{Class, charge_of};
use super::sockets::{Outgoing, PollBits};
use crate::tls::{Goodbye, PeerRules, Tunnel};
use calpe_core::block_io::{BufMut, Pool};
use calpe_core::nbd::{
    Command, ExportInfo, Extents, Fatal, Incoming, ReadPart, Request, ServerConnection, UNREAD_BYTES_MAX,
};
use calpe_core::units::Timestamp;
use calpe_core::volume::{ClientError, ClientReply, ReadRun};
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Bytes received at once: some thousand headers, or a dozen small writes.
const INBOX_BYTES: usize = 64 << 10;

/// Bytes received at once after a large write: the next header, and little of its payload, so that the
/// payload goes straight into its own buffer instead of being copied there.
const INBOX_BYTES_BULK: usize = 4 << 10;

/// A write of at least this many bytes makes the next receive a short one.
const BULK_WRITE_BYTES: u64 = 128 << 10;

/// Requests of one connection in flight or answered but unsent: twice what the Linux client keeps in flight.
const REQUESTS_MAX: usize = 256;

/// Requests of one connection that wait for others; with more, nothing is received from it, because each
/// request that comes next must be compared with all that wait.
pub(super) const WAITING_MAX: usize = 64;

/// Bytes of replies without payload that may gather behind a message that is being sent: some thousand
/// replies. They are not charged to the memory for payloads.
const HEADS_BYTES_MAX: usize = 128 << 10;

/// Replies beyond this many bytes are sent before the next request is parsed, so that a client can read them
/// meanwhile.
const EARLY_SEND_BYTES: usize = 256 << 10;

/// A client's connection.
#[derive(Debug)]
pub(super) struct Connection {
    link: Link,
    nbd: ServerConnection,
    input: Input,
    output: Output,
    place: Place,
    work: Work,
    longs: LongLine,
    ending: Ending,
}

/// The stream from its client.
#[derive(Debug)]
struct Input {
    /// Bytes received and not yet parsed; none while the kernel fills it.
    inbox: Option<Inbox>,
    receiving: Receiving,
    /// When the payload that is being received began.
    payload_since: Timestamp,
    /// A request that waits for memory that this connection itself holds; nothing behind it is parsed.
    parked: Option<Request>,
    /// The last write was a large one.
    bulk: bool,
}

/// The stream to its client.
#[derive(Debug)]
struct Output {
    /// Replies being gathered.
    filling: Box<Outgoing>,
    /// Bytes that the kernel is sending, and since when; none when no send is under way.
    sending: Option<usize>,
    sending_since: Timestamp,
    /// An empty message to fill next.
    spare: Option<Box<Outgoing>>,
}

/// The connection's array.
#[derive(Debug, Default)]
struct Place {
    /// The array of the negotiated export: it becomes a client of that array or of none.
    chosen: Option<Arc<Listed>>,
    /// The array that it is a client of.
    array: Option<ChosenArray>,
    /// Its seat there, once the reactor has it that serves it; nothing is parsed before.
    seat: Option<Seat>,
    /// It has chosen an export and is no client yet; nothing is parsed.
    is_awaited: bool,
}

/// Counts of its requests.
#[derive(Debug, Default)]
struct Work {
    /// Requests that were handed to the volume, wait for others or are long, and are not answered.
    in_flight: usize,
    /// The tickets of those of them that wait for others.
    waiting: BTreeSet<LaneTicket>,
    /// Those of these that no longer have to, and whether they modify.
    ready: VecDeque<(LaneTicket, bool)>,
    /// Writes are lost that its client may have made and not flushed: its next flush fails.
    lost_writes: bool,
}

/// How far its end has come.
#[derive(Debug, Default)]
struct Ending {
    /// No more requests will come: goodbye, end of stream, or a protocol error.
    read_closed: bool,
    /// The socket is of no use any more: replies are dropped.
    broken: bool,
    /// When it was dismissed, or got its latest reply after that: its last replies are all it still gets.
    dismissed: Option<Timestamp>,
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

/// The next thing to do for the stream.
#[derive(Debug)]
pub(super) enum Next {
    /// Nothing to parse: receive.
    Receive,
    /// There is input, but this connection has enough in flight or unsent.
    Full,
    /// There is a request, and no memory for its payload until something else of the connection has ended.
    Starved,
    /// A message was answered, or is incomplete.
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
    /// The client gets TLS once everything that is ready for it was sent.
    StartTls,
    /// The client says goodbye.
    Leave,
    /// The client broke the protocol.
    Fatal(Fatal),
}

impl Connection {
    /// A connected client. `hangup`: bits of the socket that mean that it has hung up.
    pub(super) fn new(
        socket: OwnedFd,
        hangup: PollBits,
        now: Timestamp,
        tls: &ListenTls,
        origin: Origin,
    ) -> Connection {
        let mut filling = Box::new(Outgoing::new());
        let mut nbd = ServerConnection::with_tls(now, tls.mode);
        nbd.start(filling.head());
        Connection {
            link: Link::new(socket, hangup, tls.server.clone(), origin),
            nbd,
            input: Input {
                inbox: None,
                receiving: Receiving::Nothing,
                payload_since: now,
                parked: None,
                bulk: false,
            },
            output: Output { filling, sending: None, sending_since: now, spare: None },
            place: Place::default(),
            work: Work::default(),
            longs: LongLine::default(),
            ending: Ending::default(),
        }
    }

    /// Its class for shares of a turn.
    pub(super) fn class(&self) -> Class {
        if self.place.array.is_some() { Class::Client } else { Class::Stranger }
    }

    /// Its standing for places.
    pub(super) fn guest(&self, key: ConnectionId) -> Guest {
        let stage = match self.place.array {
            Some(_) => Stage::Client,
            None if self.ending.broken || self.ending.read_closed => Stage::Leaving,
            None => Stage::Stranger,
        };
        Guest { key: key.0, origin: self.link.origin(), stage }
    }
}

/// The stream of requests.
impl Connection {
    /// Parses the next received message. `allowed`: bytes that its payload may take.
    pub(super) fn next(&mut self, directory: &Directory, pool: &Pool, allowed: usize, held: usize) -> Next {
        if let Some(request) = self.input.parked.take() {
            return self.admit(request, pool, allowed, held);
        }
        let full = self.is_full();
        let Some(inbox) = self.input.inbox.as_mut().filter(|inbox| inbox.start < inbox.end) else {
            self.input.inbox = None;
            return Next::Receive;
        };
        if full {
            return Next::Full;
        }
        let input = &inbox.buf[inbox.start..inbox.end];
        let exports = ExportView { directory, link: &self.link };
        match self.nbd.receive(input, &exports, self.output.filling.head()) {
            Err(fatal) => Next::Fatal(fatal),
            Ok((taken, incoming)) => {
                inbox.start += taken;
                match incoming {
                    None => Next::Answered,
                    Some(Incoming::Selected) => Next::Selected,
                    Some(Incoming::StartTls) => Next::StartTls,
                    Some(Incoming::Disconnect) => Next::Leave,
                    Some(Incoming::Request(request) | Incoming::Write { request }) => {
                        self.admit(request, pool, allowed, held)
                    }
                }
            }
        }
    }

    /// Takes a request on, with the memory that it needs from here on, or parks it.
    fn admit(&mut self, request: Request, pool: &Pool, allowed: usize, held: usize) -> Next {
        let charge = charge_of(&request);
        let has_payload = matches!(request.command, Command::Read | Command::Write);
        if charge > allowed {
            let in_parts = request.command == Command::Write || self.nbd.takes_parts(&request);
            // A request waits for those under way if it cannot be cut, or can be cut only where nothing else
            // is under way.
            if held > 0 || !has_payload || !in_parts && self.work.in_flight > 0 {
                self.input.parked = Some(request);
                return Next::Starved;
            }
            return Next::InParts(request);
        }
        if request.command != Command::Write {
            return Next::Request(request);
        }
        self.input.bulk = request.length >= BULK_WRITE_BYTES;
        let mut buf = pool.alloc(request.length as usize);
        let have = self.take_payload(&mut buf);
        if have < buf.len() {
            return Next::Payload { request, buf, have };
        }
        self.nbd.payload_taken();
        Next::Write(request, buf)
    }

    /// Copies as much of a payload as was received with its header. Returns the number of bytes.
    pub(super) fn take_payload(&mut self, buf: &mut BufMut) -> usize {
        let Some(inbox) = &mut self.input.inbox else { return 0 };
        let have = buf.len().min(inbox.end - inbox.start);
        buf[..have].copy_from_slice(&inbox.buf[inbox.start..inbox.start + have]);
        inbox.start += have;
        if inbox.start == inbox.end {
            self.input.inbox = None;
        }
        have
    }

    /// Notes that the payload of the last write is complete.
    pub(super) fn payload_taken(&mut self) {
        self.nbd.payload_taken();
    }

    /// Whether a request may be answered in parts.
    pub(super) fn takes_parts(&self, request: &Request) -> bool {
        self.nbd.takes_parts(request)
    }

    /// Stores received bytes for [`Connection::next`].
    pub(super) fn received(&mut self, buf: BufMut, len: usize) {
        self.input.inbox = Some(Inbox { buf, start: 0, end: len });
    }

    /// The kernel has filled the buffer that it was given.
    pub(super) fn stop_receiving(&mut self) -> Receiving {
        std::mem::replace(&mut self.input.receiving, Receiving::Nothing)
    }

    /// The kernel begins to fill the inbox.
    pub(super) fn receives_inbox(&mut self) {
        self.input.receiving = Receiving::Inbox;
    }

    /// The kernel begins to fill a payload, of which `have` bytes are there.
    pub(super) fn receives_payload(&mut self, request: Request, have: usize, now: Timestamp) {
        self.input.receiving = Receiving::Payload { request, have };
        self.input.payload_since = now;
    }

    pub(super) fn is_receiving(&self) -> bool {
        self.input.receiving != Receiving::Nothing
    }

    /// A buffer to receive into, if the connection may receive now.
    pub(super) fn buffer_to_receive(&mut self, pool: &Pool) -> Option<BufMut> {
        let may = self.input.receiving == Receiving::Nothing
            && self.input.inbox.is_none()
            && !self.ending.read_closed
            && !self.ending.broken
            && !self.link.is_starting_tls()
            && self.longs.writing().is_none()
            && !self.is_on_its_way()
            && !self.is_full();
        may.then(|| pool.alloc(if self.input.bulk { INBOX_BYTES_BULK } else { INBOX_BYTES }))
    }

    /// Whether its own state permits parsing.
    pub(super) fn may_parse(&self) -> bool {
        !self.ending.broken
            && !self.ending.read_closed
            && self.input.receiving == Receiving::Nothing
            && !self.longs.blocks_stream()
            && !self.place.is_awaited
            && !self.is_on_its_way()
    }

    /// Whether it may start no more requests for now.
    pub(super) fn is_full(&self) -> bool {
        self.work.in_flight >= REQUESTS_MAX
            || self.work.waiting.len() >= WAITING_MAX
            || self.output.filling.head_bytes() > HEADS_BYTES_MAX
            || self.unsent() > UNREAD_BYTES_MAX
            || !self.output.filling.has_room_for(self.work.in_flight)
    }

    /// Whether it should be parsed again because something of it has ended: received requests waited until it
    /// may start more, or a long one for memory.
    pub(super) fn may_go_on(&self) -> bool {
        self.has_input() || self.input.parked.is_some() || !self.longs.is_empty()
    }

    /// Whether there are received requests that wait for nothing.
    pub(super) fn has_input(&self) -> bool {
        // A payload that is being received comes first: until it is complete, there is nothing to parse.
        self.input.inbox.is_some() && self.may_parse() && self.input.parked.is_none() && !self.is_full()
    }
}

/// Replies.
impl Connection {
    /// Appends the reply to a request. Returns how many bytes of its charge are kept until it is sent.
    pub(super) fn reply(
        &mut self,
        request: &Request,
        charge: usize,
        allocation: &[(u64, u32)],
        result: Result<ClientReply, ClientError>,
    ) -> usize {
        if self.ending.broken {
            return 0;
        }
        let filling = &mut self.output.filling;
        match result {
            Ok(ClientReply::Data(buf)) => {
                assert_eq!(buf.len() as u64, request.length, "a volume answered with another length");
                self.nbd.reply_read_header(request, filling.head());
                filling.hold(charge - buf.len());
                filling.push_payload(buf);
                charge
            }
            Ok(ClientReply::Sparse(runs)) => self.reply_runs(request, request.offset, charge, runs),
            Ok(ClientReply::Done) => {
                self.nbd.reply_done(request, filling.head());
                0
            }
            Ok(ClientReply::Extents(extents)) => {
                self.reply_status(request, charge, &allocation_of(&extents), &[]);
                charge
            }
            Ok(ClientReply::Health(runs)) => {
                self.reply_status(request, charge, allocation, &health_of(&runs));
                charge
            }
            Err(error) => {
                self.reply_error(request, error);
                0
            }
        }
    }

    /// Appends the bytes that a read found from `start` on, in parts, the last of which ends where the
    /// request does. Returns how many bytes of the read's charge are kept until it is sent.
    pub(super) fn reply_runs(
        &mut self,
        request: &Request,
        start: u64,
        charge: usize,
        runs: Vec<ReadRun>,
    ) -> usize {
        let filling = &mut self.output.filling;
        let end = request.offset + request.length;
        let (mut offset, mut sent) = (start, 0);
        for run in runs {
            let length = match &run {
                ReadRun::Zeroes(length) => *length,
                ReadRun::Data(buf) => buf.len() as u64,
            };
            let part = ReadPart { offset, length, last: offset + length == end };
            offset += length;
            match run {
                ReadRun::Zeroes(_) => self.nbd.reply_read_hole(request, part, filling.head()),
                ReadRun::Data(buf) => {
                    self.nbd.reply_read_data(request, part, filling.head());
                    sent += buf.len();
                    filling.push_payload(buf);
                }
            }
        }
        let kept = if sent > 0 { charge } else { 0 };
        filling.hold(kept - sent);
        kept
    }

    /// Appends bytes of a read that is answered whole, after its header if these are the first. Returns their
    /// number.
    pub(super) fn reply_bytes(&mut self, request: &Request, is_first: bool, runs: Vec<ReadRun>) -> usize {
        let filling = &mut self.output.filling;
        if is_first {
            self.nbd.reply_read_header(request, filling.head());
        }
        let mut kept = 0;
        for run in runs {
            let ReadRun::Data(buf) = run else { unreachable!("a read that is answered whole has no holes") };
            kept += buf.len();
            filling.push_payload(buf);
        }
        kept
    }

    /// Appends the reply to a BLOCK_STATUS, which keeps its charge until it is sent.
    pub(super) fn reply_status(
        &mut self,
        request: &Request,
        charge: usize,
        allocation: &[(u64, u32)],
        health: &[(u64, u32)],
    ) {
        let filling = &mut self.output.filling;
        self.nbd.reply_block_status(request, Extents { allocation, health }, filling.head());
        filling.hold(charge);
    }

    /// Appends the reply to a request that succeeded and carries no data back.
    pub(super) fn reply_done(&mut self, request: &Request) {
        self.nbd.reply_done(request, self.output.filling.head());
    }

    /// Appends the reply to a request that failed.
    pub(super) fn reply_error(&mut self, request: &Request, error: ClientError) {
        // Stopping: the client was dismissed, and learns by the end of the connection that its request was
        // not served.
        if error != ClientError::Stopping {
            let head = self.output.filling.head();
            self.nbd.reply_error(request, errno_of(error), &error.to_string(), head);
        }
    }

    /// Keeps bytes of memory until everything that is ready was sent.
    pub(super) fn hold(&mut self, bytes: usize) {
        self.output.filling.hold(bytes);
    }

    /// Whether enough is gathered that it should be sent before anything else is done.
    pub(super) fn should_send_now(&self) -> bool {
        self.output.sending.is_none() && self.output.filling.bytes() >= EARLY_SEND_BYTES
    }

    /// The next message to send, sealed, if there is one and no send is under way.
    pub(super) fn message_to_send(&mut self, now: Timestamp) -> Option<Box<Outgoing>> {
        let output = &mut self.output;
        if output.sending.is_some() || output.filling.is_empty() || self.ending.broken {
            return None;
        }
        let next = output.spare.take().unwrap_or_else(|| Box::new(Outgoing::new()));
        let mut message = std::mem::replace(&mut output.filling, next);
        message.seal();
        output.sending = Some(message.bytes());
        output.sending_since = now;
        Some(message)
    }

    /// Takes back a message that was sent, or never will be. Returns how many bytes of memory that frees.
    pub(super) fn sent(&mut self, mut message: Box<Outgoing>) -> usize {
        let held = message.held_bytes();
        message.recycle();
        self.output.sending = None;
        self.output.spare = Some(message);
        held
    }

    /// Drops the replies that a broken connection has gathered. Returns how many bytes of memory that frees.
    pub(super) fn drop_replies(&mut self) -> usize {
        let held = self.output.filling.held_bytes();
        self.output.filling.recycle();
        held
    }

    /// Bytes of replies that the client has not taken.
    fn unsent(&self) -> usize {
        self.output.filling.bytes() + self.output.sending.unwrap_or(0)
    }
}

/// The place.
impl Connection {
    /// The name of the negotiated export.
    pub(super) fn export_name(&self) -> &str {
        self.nbd.export().map_or("", |export| &export.name)
    }

    /// Whether its session goes beyond what these rules grant.
    pub(super) fn exceeds(&self, rules: Option<&PeerRules>) -> bool {
        exceeds(&self.link, self.nbd.export().is_some_and(|export| !export.read_only), rules)
    }

    /// Whether an export is as it was negotiated.
    pub(super) fn negotiated(&self, export: &ExportInfo) -> bool {
        self.nbd.export().is_some_and(|known| {
            let ExportInfo { size, block_min, read_only, .. } = *export;
            // Rules may have narrowed what it may do.
            (known.size, known.block_min, known.read_only || !read_only) == (size, block_min, true)
        })
    }

    /// Notes the array of the negotiated export.
    pub(super) fn choose(&mut self, array: Option<Arc<Listed>>) {
        self.place.chosen = array;
    }

    /// The array of the negotiated export.
    pub(super) fn chosen(&self) -> Option<ArrayId> {
        self.place.chosen.as_ref().map(|listed| listed.id())
    }

    /// Makes it wait for a place.
    pub(super) fn awaits_place(&mut self) {
        self.place.is_awaited = true;
    }

    /// Gives it a place: it becomes a client of the array that it chose.
    pub(super) fn take_place(&mut self) {
        self.place.is_awaited = false;
        self.place.array = self.place.chosen.as_ref().map(ChosenArray::new);
    }

    /// Whether its array serves it: it may have stopped, or have new rules.
    pub(super) fn may_stay(&self) -> bool {
        let serves = |array: &ChosenArray| array.is_serving() && !self.exceeds(array.rules().as_deref());
        self.place.array.as_ref().is_some_and(serves)
    }

    /// Takes its seat at its array.
    pub(super) fn take_seat(&mut self, requester: Requester) {
        let seat =
            |array: &ChosenArray| Seat::take(Arc::clone(array.listed()), Session::new(requester, &self.link));
        self.place.seat = self.place.array.as_ref().map(seat);
    }

    /// Whether it has a place and no seat yet: another reactor will serve it.
    fn is_on_its_way(&self) -> bool {
        self.place.array.is_some() && self.place.seat.is_none()
    }

    /// Whether it is to be handed to the reactor that will serve it, and can be: the kernel has nothing of
    /// it.
    pub(super) fn may_move(&self) -> bool {
        self.is_on_its_way() && !self.ending.broken && !self.is_dismissed() && self.is_idle_in_kernel()
    }

    /// The array that it is a client of.
    pub(super) fn array(&self) -> Option<&ChosenArray> {
        self.place.array.as_ref()
    }

    /// Its seat at its array.
    pub(super) fn seat(&self) -> Option<&Seat> {
        self.place.seat.as_ref()
    }

    /// Counts a request that has succeeded.
    pub(super) fn count(&self, request: &Request) {
        if let Some(seat) = &self.place.seat {
            seat.count(request);
        }
    }
}

/// Long requests.
impl Connection {
    /// Its long requests that can go on.
    pub(super) fn longs(&self) -> &LongLine {
        &self.longs
    }

    pub(super) fn longs_mut(&mut self) -> &mut LongLine {
        &mut self.longs
    }

    /// Counts a long request.
    pub(super) fn long_began(&mut self) {
        self.work.in_flight += 1;
    }

    /// Ends a long request. `was_alone`: it had the connection to itself.
    pub(super) fn long_ended(&mut self, was_alone: bool) {
        self.work.in_flight -= 1;
        if was_alone {
            self.longs.end_alone();
        }
    }

    /// Whether a part of a long write is being received.
    fn is_receiving_part(&self) -> bool {
        self.longs.writing().is_some() && self.is_receiving()
    }
}

/// The other end.
impl Connection {
    /// Its socket, and the identity of the other end.
    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    pub(super) fn link_mut(&mut self) -> &mut Link {
        &mut self.link
    }

    /// Its sockets, for a look whether its client has hung up.
    pub(super) fn watched(&self) -> Watched<'_> {
        Watched {
            sockets: self.link.watched_sockets().map(|socket| socket.as_fd()).collect(),
            hangup: self.link.hangup(),
            has_ended: self.ending.broken || self.link.goodbye().is_some_and(Goodbye::was_said),
        }
    }

    /// Whether the socket can be handed to TLS now: the acknowledgement of STARTTLS has left it, and nothing
    /// that arrives behind it was or will be received here.
    pub(super) fn may_swap_socket(&self) -> bool {
        self.link.is_starting_tls()
            && !self.ending.broken
            && !self.ending.read_closed
            && self.is_idle_in_kernel()
            && self.output.filling.is_empty()
            && self.input.inbox.is_none()
    }

    /// Goes on with the plain end of TLS.
    pub(super) fn swap_socket(&mut self, tunnel: Tunnel) {
        assert!(self.may_swap_socket(), "a socket was swapped under an operation");
        self.link.swap(tunnel);
        self.nbd.tls_started();
    }
}

/// The end.
impl Connection {
    /// Breaks it off: the socket is of no use any more.
    pub(super) fn break_off(&mut self) {
        self.ending.broken = true;
        if let Some(seat) = &self.place.seat {
            seat.session().break_off();
        }
    }

    pub(super) fn is_broken(&self) -> bool {
        self.ending.broken
    }

    /// Takes no more requests.
    pub(super) fn close_reading(&mut self) {
        self.ending.read_closed = true;
    }

    /// Takes no more requests, and drops those received but not parsed.
    pub(super) fn discard_input(&mut self) {
        self.ending.read_closed = true;
        self.input.inbox = None;
        self.input.parked = None;
    }

    /// Dismisses its client.
    pub(super) fn dismiss(&mut self, now: Timestamp) {
        self.discard_input();
        self.ending.dismissed.get_or_insert(now);
    }

    pub(super) fn is_dismissed(&self) -> bool {
        self.ending.dismissed.is_some()
    }

    /// Since when everything has ended except what only its client can end, if it is dismissed.
    pub(super) fn dismissed_since(&self) -> Option<Timestamp> {
        // A part that is being received depends on the client and is not waited for.
        let is_over = self.work.in_flight == usize::from(self.is_receiving_part());
        self.ending.dismissed.filter(|_| is_over)
    }

    /// Whether it has taken too long to choose an export.
    pub(super) fn handshake_overdue(&self, now: Timestamp) -> bool {
        self.nbd.handshake_overdue(now)
    }

    /// Since when it holds memory that only its client can free: a payload that does not come, replies that
    /// are not taken. None when it holds none.
    pub(super) fn keeps_memory_since(&self) -> Option<Timestamp> {
        let payload = matches!(self.input.receiving, Receiving::Payload { .. });
        let payload = payload.then_some(self.input.payload_since);
        let replies = self.output.sending.is_some().then_some(self.output.sending_since);
        payload.into_iter().chain(replies).min()
    }

    /// Whether everything it will ever say was sent.
    pub(super) fn is_done(&self) -> bool {
        let all_sent = self.output.sending.is_none() && self.output.filling.is_empty();
        self.work.in_flight == 0 && (self.ending.broken || (self.ending.read_closed && all_sent))
    }

    /// Whether the kernel works on nothing of it.
    pub(super) fn is_idle_in_kernel(&self) -> bool {
        self.input.receiving == Receiving::Nothing && self.output.sending.is_none()
    }
}
