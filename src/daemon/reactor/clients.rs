//! The reactor's clients: accepting them, taking their requests, sending their replies.
//!
//! Invariants: a connection parses only while it may start requests; bytes of payloads are counted from their
//! request until their reply has left; whatever a client does costs nothing but its connection. Must not know
//! what volumes do.

use super::access::ExportView;
use super::admission::{Origin, STRANGERS_MAX, stranger_to_drop};
use super::connection::{Connection, Next, Receiving};
use super::edges::{blocks_of, middle};
use super::fence::hangup_bits;
use super::listener::{ListenAddress, Listener};
use super::long::{LongKind, Order};
use super::memory::charge_of;
use super::order::Ticket;
use super::outgoing::Outgoing;
use super::sys::grow_receive_buffer;
use super::turns::later_cost;
use super::{ArrayId, FAREWELL_NANOS, Pending, Reactor};
use crate::daemon::{clock, logging};
use calpe_core::block_io::BufMut;
use calpe_core::nbd::{
    Command, Errno, Extents, HEALTH_DEGRADED, HEALTH_LOST, ReadPart, Request, STATE_HOLE, STATE_ZERO,
    ServerConnection,
};
use calpe_core::units::VolumeOffset;
use calpe_core::volume::{
    ClientError, ClientReply, ClientRequest, Health, ReadRun, RequestId, VolumeEvent, VolumeExtent,
};
use nix::sys::socket::{Shutdown, setsockopt, shutdown, sockopt};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;

/// Send buffer asked of the kernel for each client, in bytes: a few large replies, so that the client has
/// something to read while the next are gathered.
const SEND_BUFFER_BYTES: usize = 2 << 20;

/// Receive buffer asked of the kernel for each TCP client, in bytes: what a client sends ahead is to find room there, or the
/// end of its stream is not seen behind it (see [`super::fence`]). The kernel gives up to half of net.ipv4.tcp_rmem's maximum,
/// as it does to a client that has sent a lot.
const RECEIVE_BUFFER_BYTES: i32 = 32 << 20;

/// Replies gathered beyond this many bytes are sent before the next request is looked at, so that a client can
/// read them meanwhile.
const EARLY_SEND_BYTES: usize = 256 << 10;

/// How long a client may keep more than its share of the memory while it is scarce, by not sending the rest of a payload or not
/// taking its replies, in nanoseconds. It can have come to that only while there were fewer clients. A message of 32 MiB needs
/// 3 MB/s to be in time; nobody else waits for it meanwhile, their large requests are carried out in smaller parts.
const HOARD_NANOS_MAX: u64 = 10_000_000_000;

/// Clients that a listener may get in one turn: a thousand turns for as many would keep the last one waiting.
const ACCEPTS: usize = 16;

/// Part of a turn, as a divisor, of a client that has not chosen an export: whoever can connect can be one.
const STRANGERS_SHARE: i64 = 4;

/// A listening socket of the reactor.
#[derive(Debug)]
pub(super) struct ListenerState {
    /// Removes the socket file when dropped.
    listener: Listener,
    socket: Rc<OwnedFd>,
    /// Accepts in the kernel.
    armed: usize,
    closing: bool,
}

impl ListenerState {
    pub(super) fn is_unix(&self) -> bool {
        matches!(self.listener.address(), ListenAddress::Unix(_))
    }
}

/// What the protocol has made sure of.
pub(super) const RANGE_OF_VOLUME: &str = "a request lies within its export";

/// A request without payload in a volume's terms; none for one that has some, or that no volume is asked.
pub(super) fn client_request(request: &Request) -> Option<ClientRequest> {
    let (offset, len) = (VolumeOffset(request.offset), request.length);
    Some(match request.command {
        Command::Flush => ClientRequest::Flush,
        Command::Trim => ClientRequest::Trim { offset, len, fua: request.fua },
        Command::WriteZeroes => ClientRequest::WriteZeroes {
            offset,
            len,
            may_unmap: !request.no_hole,
            fast_only: request.fast_zero,
            fua: request.fua,
        },
        Command::BlockStatus if request.contexts.allocation => ClientRequest::BlockStatus { offset, len },
        Command::BlockStatus => ClientRequest::Health { offset, len },
        Command::Read | Command::Write | Command::Cache => return None,
    })
}

impl Reactor {
    pub(super) fn add_listener(&mut self, listener: Listener) {
        match listener.descriptor() {
            Ok(socket) => {
                let socket = Rc::new(socket);
                self.listeners.insert(ListenerState { listener, socket, armed: 0, closing: false });
                self.resume_listeners();
            }
            Err(error) => tracing::error!(address = %listener.address(), %error, "cannot listen"),
        }
    }

    /// Waits for clients, again where an accept failed. Whoever connects is let in; a place is another matter.
    pub(super) fn resume_listeners(&mut self) {
        for (key, listener) in &mut self.listeners {
            while !listener.closing && listener.armed < ACCEPTS {
                listener.armed += 1;
                self.sockets.accept(&mut self.ring, key, &listener.socket);
            }
        }
    }

    pub(super) fn close_listeners(&mut self) {
        let (ring, sockets) = (&mut self.ring, &mut self.sockets);
        self.listeners.retain(|key, listener| {
            listener.closing = true;
            if listener.listener.is_adopted() {
                // It is its giver's, and goes on without us: a shutdown would end it for the next daemon, too.
                sockets.cancel_accepts(ring, key);
            } else {
                // Wakes the accept that is in the kernel; an error means that there is none to wake.
                let _ = shutdown(listener.socket.as_raw_fd(), Shutdown::Both);
            }
            listener.armed > 0
        });
    }

    pub(super) fn on_accepted(&mut self, key: usize, result: io::Result<OwnedFd>) {
        self.listeners[key].armed -= 1;
        if self.listeners[key].closing {
            if self.listeners[key].armed == 0 {
                self.listeners.remove(key);
            }
            return;
        }
        match result {
            Ok(socket) => {
                let now = self.now;
                let listener = &self.listeners[key].listener;
                let tcp = matches!(listener.address(), ListenAddress::Tcp(_));
                let origin = if tcp { network_origin(&socket) } else { Origin::Unix };
                tune(&socket, tcp);
                let connection = Connection::new(socket, hangup_bits(tcp), now, listener.tls(), origin);
                let guests = self.connections.iter().map(|(key, connection)| connection.guest(key));
                if let Some(dropped) = stranger_to_drop(guests, origin) {
                    tracing::debug!(connection = dropped, "dropped for another one: it chose no export");
                    self.connections[dropped].broken = true;
                    self.mark(dropped);
                }
                let connection = self.connections.insert(connection);
                tracing::debug!(connection, address = %self.listeners[key].listener.address(), "client connected");
                self.mark(connection);
                self.resume_listeners();
            }
            // Out of descriptors, or the client is gone already: the next tick tries again.
            Err(error) if logging::ACCEPT_FAILURES.admits() => {
                tracing::warn!(%error, "cannot accept a client")
            }
            Err(_) => {}
        }
    }

    /// Has a connection parsed and settled in this turn.
    pub(super) fn mark(&mut self, key: usize) {
        let connection = &mut self.connections[key];
        if !connection.dirty {
            connection.dirty = true;
            self.dirty.push_back(key);
        }
        self.touch(key);
    }

    /// Has a connection settled at the end of this turn.
    fn touch(&mut self, key: usize) {
        let connection = &mut self.connections[key];
        if !connection.touched {
            connection.touched = true;
            self.touched.push(key);
        }
    }

    pub(super) fn on_received(&mut self, key: usize, buf: BufMut, result: io::Result<usize>) {
        self.mark(key);
        let connection = &mut self.connections[key];
        let receiving = std::mem::replace(&mut connection.receiving, Receiving::Nothing);
        let len = match result {
            Ok(len) => len,
            Err(error) => {
                tracing::debug!(connection = key, %error, "client lost");
                connection.broken = true;
                0
            }
        };
        match receiving {
            Receiving::Payload { request, have } => {
                let have = have + len;
                let charge = if connection.writing.is_some() { buf.len() } else { charge_of(&request) };
                let ended = len == 0 || connection.broken;
                if ended || have == buf.len() && connection.dismissed.is_some() {
                    // The stream ended inside a payload, or it had to go before the payload was there: there is nobody to tell.
                    connection.broken |= ended;
                    let long = connection.writing;
                    self.drop_order(key, Order { charge, request, payload: None, long });
                } else if have < buf.len() {
                    self.receive_payload(key, request, buf, have);
                } else if connection.writing.is_some() {
                    self.part_received(key, request, buf, &mut false);
                } else {
                    connection.nbd.payload_taken();
                    self.begin(key, Order { request, payload: Some(buf), charge, long: None }, &mut false);
                }
            }
            Receiving::Inbox | Receiving::Nothing => {
                if len == 0 {
                    connection.read_closed = true;
                } else {
                    connection.received(buf, len);
                }
            }
        }
    }

    pub(super) fn on_sent(&mut self, key: usize, mut message: Box<Outgoing>, result: io::Result<()>) {
        self.give_memory_back(key, message.held_bytes());
        message.recycle();
        self.mark(key);
        let connection = &mut self.connections[key];
        connection.sending = None;
        connection.spare = Some(message);
        if let Err(error) = result {
            tracing::debug!(connection = key, %error, "client lost");
            connection.broken = true;
        }
    }

    /// Hands a connection's socket to TLS, and goes on with the plain end of it.
    fn start_tls(&mut self, key: usize) {
        let connection = &mut self.connections[key];
        let tls = connection.tls.as_ref().expect("TLS is granted only where there is a certificate");
        // The pump gets a descriptor of its own: entries of this turn may still name the other one.
        let tunnel = connection.socket.try_clone().and_then(|socket| self.pumps.serve(socket, tls));
        match tunnel {
            Ok(tunnel) => {
                set_send_buffer(&tunnel.socket);
                connection.swap_socket(tunnel);
            }
            Err(error) => {
                if logging::TLS_STARTS.admits() {
                    tracing::warn!(connection = key, %error, "cannot start TLS");
                }
                connection.broken = true;
            }
        }
    }

    /// Sends what there is for a connection, receives more, and sees whether it is over.
    pub(super) fn settle(&mut self, key: usize) {
        let now = self.now;
        let connection = &mut self.connections[key];
        connection.touched = false;
        if let Some(message) = connection.message_to_send(now) {
            self.sockets.send(&mut self.ring, key, &connection.socket, message);
        }
        if connection.may_swap_socket() {
            // Each has a thread, until that has ended, whatever became of its connection. Those beyond wait.
            if self.pumps.running() < self.config.connections_max + STRANGERS_MAX {
                self.start_tls(key);
            } else {
                self.next_turn_for_tls = true;
            }
        }
        let connection = &mut self.connections[key];
        if let Some(buf) = connection.buffer_to_receive(&self.config.pool) {
            connection.receiving = Receiving::Inbox;
            self.sockets.receive(&mut self.ring, key, &connection.socket, buf, 0, false);
        }
        if connection.has_input() {
            self.mark(key);
        }
        if self.connections[key].broken {
            self.drop_longs(key);
            self.drop_unfenced(key);
        }
        self.close_if_done(key);
    }

    /// Goes on with a connection's long requests and takes those that it has received, as far as it may start them and as its
    /// share of this turn goes.
    pub(super) fn parse(&mut self, key: usize) {
        // Also one that is gone on with from the last turn: if it is seen to have hung up, nothing else may settle it.
        self.touch(key);
        let connection = &mut self.connections[key];
        connection.dirty = false;
        let share = if connection.array.is_some() { self.share } else { self.share / STRANGERS_SHARE };
        self.active += usize::from(connection.allowance.renew(self.turns, share));
        let mut looked = false;
        let mut since = clock::now();
        while !self.connections[key].broken {
            let allowance = &self.connections[key].allowance;
            if allowance.is_spent() || allowance.yields(self.spent) {
                self.next_turn(key);
                return;
            }
            let begun = self.begin_unfenced(key, &mut looked);
            let advanced = self.advance_longs(key, &mut looked) || self.continue_writing(key, &mut looked);
            let taken = self.take_next(key, &mut looked);
            let now = clock::now();
            self.connections[key].allowance.spend_time(now.nanos_since(since), &mut self.spent);
            since = now;
            if !begun && !advanced && !taken {
                return;
            }
        }
    }

    /// Takes the next message that a connection has received. Returns whether there may be another one.
    fn take_next(&mut self, key: usize, looked: &mut bool) -> bool {
        let connection = &mut self.connections[key];
        if connection.broken
            || connection.read_closed
            || connection.receiving != Receiving::Nothing
            || connection.writing.is_some()
            || connection.alone
            || connection.waits_for_place
        {
            return false;
        }
        let allowed = self.memory.allowed(connection.held);
        let exports = ExportView { arrays: &self.arrays, viewer: connection.viewer() };
        match connection.next(&exports, &self.config.pool, allowed) {
            Next::Receive | Next::Full | Next::Starved => return false,
            Next::Answered => {}
            Next::Selected => self.selected(key),
            Next::Request(request) => {
                let charge = charge_of(&request);
                self.take_memory(key, charge);
                if self.is_long(key, &request) {
                    self.begin_long(key, request, LongKind::NoPayload, charge);
                } else {
                    self.begin(key, Order { request, payload: None, charge, long: None }, looked);
                }
            }
            Next::Write(request, buf) => {
                let charge = charge_of(&request);
                self.take_memory(key, charge);
                self.begin(key, Order { request, payload: Some(buf), charge, long: None }, looked);
            }
            Next::Payload { request, buf, have } => {
                self.take_memory(key, charge_of(&request));
                self.receive_payload(key, request, buf, have);
            }
            Next::InParts(request) => {
                let kind = match request.command {
                    Command::Write => LongKind::Write,
                    _ if connection.nbd.takes_parts(&request) => LongKind::ReadInParts,
                    _ => LongKind::ReadAlone,
                };
                self.begin_long(key, request, kind, 0);
            }
            Next::StartTls => connection.starting_tls = true,
            Next::Leave => {
                connection.read_closed = true;
                connection.discard_input();
            }
            Next::Fatal(fault) => {
                tracing::debug!(connection = key, %fault, "client broke the protocol");
                connection.read_closed = true;
                connection.discard_input();
            }
        }
        true
    }

    /// Has a connection parsed in the next turn.
    fn next_turn(&mut self, key: usize) {
        let connection = &mut self.connections[key];
        if !connection.dirty {
            connection.dirty = true;
            self.later.push(key);
        }
    }

    pub(super) fn receive_payload(&mut self, key: usize, request: Request, buf: BufMut, have: usize) {
        let connection = &mut self.connections[key];
        connection.receiving = Receiving::Payload { request, have };
        connection.payload_since = self.now;
        self.sockets.receive(&mut self.ring, key, &connection.socket, buf, have, true);
    }

    /// Hands a request to its volume; `ticket` is its place in the order of the array.
    pub(super) fn start(&mut self, key: usize, order: Order, ticket: Ticket) {
        let connection = &mut self.connections[key];
        let request = order.request;
        let array = connection.array.filter(|id| self.arrays[id.0 as usize].is_some());
        let Some(array) = array else {
            self.drop_order(key, order);
            self.dismiss(key);
            return;
        };
        connection.allowance.spend(later_cost(&request), &mut self.spent);
        if request.command == Command::Flush && std::mem::take(&mut connection.lost_writes) {
            self.reply(key, &request, order.charge, &[], Err(ClientError::Io));
            return;
        }
        let offset = VolumeOffset(request.offset);
        let uneven =
            matches!(request.command, Command::Read | Command::Write) && self.has_edges(array, &request);
        let (charge, long) = (order.charge, order.long);
        let mut pending = Pending {
            connection: key,
            array,
            request,
            ticket,
            charge,
            long,
            edges: None,
            allocation: Vec::new(),
        };
        let connection = &self.connections[key];
        let client_request = match (request.command, order.payload) {
            (Command::Read, _) if uneven => {
                let blocks = blocks_of(&request, self.block_of(array));
                let buf = self.config.pool.alloc((blocks.end - blocks.start) as usize);
                Some(ClientRequest::Read { offset: VolumeOffset(blocks.start), buf })
            }
            (Command::Write, Some(payload)) if uneven => {
                pending.edges = Some(Box::new(self.edges_of(array, &request, &payload)));
                None
            }
            (Command::Read, _) => {
                let buf = self.config.pool.alloc(request.length as usize);
                Some(if connection.nbd.takes_parts(&request) {
                    ClientRequest::ReadSparse { offset, buf }
                } else {
                    ClientRequest::Read { offset, buf }
                })
            }
            (Command::Write, Some(buf)) => {
                Some(ClientRequest::Write { offset, data: buf.freeze(), fua: request.fua })
            }
            (Command::Write, None) => unreachable!("a write starts with its payload"),
            (Command::Cache, _) => {
                // Advisory, and there is no cache to fill.
                let connection = &mut self.connections[key];
                connection.nbd.reply_done(&request, &mut connection.filling.head);
                return;
            }
            _ => Some(client_request(&request).expect("a request without payload")),
        };
        self.connections[key].in_flight += 1;
        if let Some(hosted) = self.hosted(array) {
            hosted.in_flight += 1;
        }
        if request.command.modifies() {
            self.modifies_more(key, array);
        }
        match client_request {
            Some(client_request) => {
                let id = self.requests.insert(pending);
                self.step(array, VolumeEvent::Client(RequestId(id as u64), client_request));
            }
            None => self.continue_edges(pending, None),
        }
    }

    /// Takes a volume's answer.
    pub(super) fn client_done(&mut self, id: RequestId, result: Result<ClientReply, ClientError>) {
        let pending = self.requests.remove(id.0 as usize);
        let result = match result {
            Ok(ClientReply::Data(block)) if pending.edges.is_some() => {
                self.continue_edges(pending, Some(block));
                return;
            }
            Ok(ClientReply::Data(blocks)) => {
                Ok(ClientReply::Data(middle(blocks, &pending.request, self.block_of(pending.array))))
            }
            result => result,
        };
        let Pending { connection: key, array, request, ticket, charge, long, allocation, .. } = pending;
        let result = match result {
            // Asked about both contexts: the other is another question, to the same volume.
            Ok(ClientReply::Extents(extents)) if request.contexts.health => {
                let allocation = extents.iter().map(|e| (e.len, allocation_flags(e))).collect();
                let edges = None;
                let pending =
                    Pending { connection: key, array, request, ticket, charge, long, edges, allocation };
                let id = self.requests.insert(pending);
                let question =
                    ClientRequest::Health { offset: VolumeOffset(request.offset), len: request.length };
                self.step(array, VolumeEvent::Client(RequestId(id as u64), question));
                return;
            }
            result => result,
        };
        if let Some(hosted) = self.hosted(array) {
            hosted.in_flight -= 1;
        }
        if request.command.modifies() {
            self.modifies_less(key, array, &request, ticket);
        }
        if matches!(result, Err(ClientError::Stopping)) {
            self.dismiss(key);
        }
        let now = self.now;
        let connection = &mut self.connections[key];
        connection.in_flight -= 1;
        // The time to take the last replies begins with the last reply.
        connection.dismissed = connection.dismissed.map(|_| now);
        match long {
            Some(long) => self.part_done((long, request, charge), allocation, result),
            None => {
                self.count_traffic(array, &request, result.is_ok());
                self.reply(key, &request, charge, &allocation, result);
            }
        }
        if self.connections[key].may_go_on() { self.mark(key) } else { self.touch(key) }
    }

    /// Appends the reply to a request.
    fn reply(
        &mut self,
        key: usize,
        request: &Request,
        charge: usize,
        allocation: &[(u64, u32)],
        result: Result<ClientReply, ClientError>,
    ) {
        let connection = &mut self.connections[key];
        if connection.broken {
            self.give_memory_back(key, charge);
            return;
        }
        let nbd = &connection.nbd;
        let head = &mut connection.filling.head;
        // What is kept of its memory until the reply is sent.
        let kept = match result {
            Ok(ClientReply::Data(buf)) => {
                assert_eq!(buf.len() as u64, request.length, "a volume answered with another length");
                nbd.reply_read_header(request, head);
                connection.filling.hold(charge - buf.len());
                connection.filling.push_payload(buf);
                charge
            }
            Ok(ClientReply::Sparse(runs)) => {
                let sent = append_runs(nbd, request, request.offset, runs, &mut connection.filling);
                let kept = if sent > 0 { charge } else { 0 };
                connection.filling.hold(kept - sent);
                kept
            }
            Ok(ClientReply::Done) => {
                nbd.reply_done(request, head);
                0
            }
            Ok(ClientReply::Extents(extents)) => {
                let extents: Vec<(u64, u32)> = extents.iter().map(|e| (e.len, allocation_flags(e))).collect();
                nbd.reply_block_status(request, Extents { allocation: &extents, health: &[] }, head);
                connection.filling.hold(charge);
                charge
            }
            Ok(ClientReply::Health(runs)) => {
                let health: Vec<(u64, u32)> =
                    runs.iter().map(|&(len, health)| (len, health_flags(health))).collect();
                nbd.reply_block_status(request, Extents { allocation, health: &health }, head);
                connection.filling.hold(charge);
                charge
            }
            // Dismissed: it learns by the end of the connection that its request was not served.
            Err(ClientError::Stopping) => 0,
            Err(error) => {
                nbd.reply_error(request, errno_of(error), &error.to_string(), head);
                0
            }
        };
        if connection.sending.is_none() && connection.filling.bytes() >= EARLY_SEND_BYTES {
            self.urgent = true;
        }
        self.give_memory_back(key, charge - kept);
    }

    /// Counts what a client did to an array.
    pub(super) fn count_traffic(&mut self, array: ArrayId, request: &Request, succeeded: bool) {
        let Some(hosted) = self.hosted(array).filter(|_| succeeded) else { return };
        match request.command {
            Command::Read => {
                hosted.traffic.reads += 1;
                hosted.traffic.read_bytes += request.length;
            }
            Command::Write => {
                hosted.traffic.writes += 1;
                hosted.traffic.written_bytes += request.length;
            }
            _ => {}
        }
    }

    /// Charges memory to a connection.
    pub(super) fn take_memory(&mut self, key: usize, bytes: usize) {
        self.connections[key].held += bytes;
        self.memory.take(bytes);
    }

    /// Gives back what was charged to a connection.
    pub(super) fn give_memory_back(&mut self, key: usize, bytes: usize) {
        self.connections[key].held -= bytes;
        self.memory.give_back(bytes);
    }

    fn close_if_done(&mut self, key: usize) {
        let connection = &mut self.connections[key];
        if !connection.is_done() && !connection.broken {
            return;
        }
        if connection.broken && !connection.filling.is_empty() {
            let bytes = connection.filling.held_bytes();
            connection.filling.recycle();
            self.give_memory_back(key, bytes);
        }
        let connection = &mut self.connections[key];
        if !connection.is_idle_in_kernel() {
            // Ends what the kernel has of it; an error means that the socket is dead already.
            let _ = shutdown(connection.socket.as_raw_fd(), Shutdown::Both);
        } else if connection.is_done() {
            tracing::debug!(connection = key, "client gone");
            let connection = self.connections.remove(key);
            assert_eq!(connection.held, 0, "memory of a client that is gone");
            // Its number may be used again: forget all that names it.
            self.dirty.retain(|&dirty| dirty != key);
            self.later.retain(|&later| later != key);
            self.touched.retain(|&touched| touched != key);
            self.waiting.retain(|&waiting| waiting != key);
            self.count_clients();
            if connection.array.is_some() {
                self.seat_waiting();
            }
        }
    }

    /// Closes connections that never came to the point, or do not take their last replies, or keep memory that others
    /// wait for.
    pub(super) fn close_overdue(&mut self) {
        let now = self.now;
        let (scarce, share) = (self.memory.is_scarce(), self.memory.share());
        let is_overdue = |connection: &Connection| {
            // What only its client can bring to an end is not waited for.
            let dismissed = connection.in_flight == usize::from(connection.is_receiving_part())
                && connection.dismissed.is_some_and(|since| now.nanos_since(since) > FAREWELL_NANOS);
            let hoards = || {
                connection.held > share
                    && connection.keeps_memory_since().is_some_and(|at| now.nanos_since(at) > HOARD_NANOS_MAX)
            };
            !connection.broken && (dismissed || connection.nbd.handshake_overdue(now) || scarce && hoards())
        };
        let overdue: Vec<usize> =
            self.connections.iter().filter(|(_, c)| is_overdue(c)).map(|(key, _)| key).collect();
        for key in overdue {
            tracing::debug!(connection = key, "client took too long");
            self.connections[key].broken = true;
            self.mark(key);
        }
    }

    /// Deals the memory out anew.
    pub(super) fn count_clients(&mut self) {
        let clients = self.connections.iter().filter(|(_, c)| c.array.is_some()).count();
        self.memory.set_clients(clients);
    }

    /// Starts TLS where it had to wait for other connections to end theirs.
    pub(super) fn resume_tls(&mut self) {
        if std::mem::take(&mut self.next_turn_for_tls) {
            let waiting: Vec<usize> =
                self.connections.iter().filter(|(_, c)| c.starting_tls).map(|(key, _)| key).collect();
            waiting.into_iter().for_each(|key| self.mark(key));
        }
    }

    /// Says goodbye to the clients of an array that is gone.
    pub(super) fn close_clients_of(&mut self, array: ArrayId) {
        self.close_where(|connection| connection.chosen == Some(array));
    }

    /// Says goodbye to the clients that chose no array.
    pub(super) fn close_unattached(&mut self) {
        self.close_where(|connection| connection.array.is_none());
    }

    /// Says goodbye to some clients, and returns to how many.
    pub(super) fn close_where(&mut self, which: impl Fn(&Connection) -> bool) -> usize {
        let keys: Vec<usize> =
            self.connections.iter().filter(|(_, c)| which(c)).map(|(key, _)| key).collect();
        let count = keys.len();
        keys.into_iter().for_each(|key| self.dismiss(key));
        count
    }

    /// Takes no more requests of a client, and closes its connection once it has its replies. What it asked for and does
    /// not get is not answered with an error: a filesystem would take that for a broken disk, where the end of the
    /// connection makes its driver wait for the next daemon, and ask again.
    pub(super) fn dismiss(&mut self, key: usize) {
        let connection = &mut self.connections[key];
        connection.read_closed = true;
        connection.discard_input();
        connection.dismissed.get_or_insert(self.now);
        self.drop_longs(key);
        self.mark(key);
    }
}

/// Appends what a read found from `start` on, in parts, the last of which ends where the request does; says how many bytes of
/// payload are sent.
pub(super) fn append_runs(
    nbd: &ServerConnection,
    request: &Request,
    start: u64,
    runs: Vec<ReadRun>,
    filling: &mut Outgoing,
) -> usize {
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
            ReadRun::Zeroes(_) => nbd.reply_read_hole(request, part, &mut filling.head),
            ReadRun::Data(buf) => {
                nbd.reply_read_data(request, part, &mut filling.head);
                sent += buf.len();
                filling.push_payload(buf);
            }
        }
    }
    sent
}

pub(super) fn allocation_flags(extent: &VolumeExtent) -> u32 {
    if extent.hole { STATE_HOLE | STATE_ZERO } else { 0 }
}

pub(super) fn health_flags(health: Health) -> u32 {
    match health {
        Health::Clean => 0,
        Health::Degraded => HEALTH_DEGRADED,
        Health::Lost => HEALTH_LOST,
    }
}

pub(super) fn errno_of(error: ClientError) -> Errno {
    match error {
        ClientError::Io | ClientError::Stopping => Errno::Io,
        ClientError::NoSpace => Errno::NoSpc,
        ClientError::NotSupported => Errno::NotSup,
    }
}

/// Where a socket of the network comes from; nowhere known where it is gone already.
fn network_origin(socket: &OwnedFd) -> Origin {
    use nix::sys::socket::{SockaddrStorage, getpeername};
    let address = getpeername::<SockaddrStorage>(socket.as_raw_fd()).ok();
    let v4 = address.and_then(|address| Some(IpAddr::from(address.as_sockaddr_in()?.ip())));
    let v6 = address.and_then(|address| Some(IpAddr::from(address.as_sockaddr_in6()?.ip())));
    Origin::network(v4.or(v6).unwrap_or(IpAddr::from([0, 0, 0, 0])))
}

/// Socket options of a client; none of them is vital.
fn tune(socket: &OwnedFd, tcp: bool) {
    if tcp {
        let _ = setsockopt(socket, sockopt::TcpNoDelay, &true);
        let _ = setsockopt(socket, sockopt::KeepAlive, &true);
        grow_receive_buffer(socket, RECEIVE_BUFFER_BYTES);
    }
    set_send_buffer(socket);
}

fn set_send_buffer(socket: &OwnedFd) {
    // The privileged form is not bound by the system's default maximum.
    if setsockopt(socket, sockopt::SndBufForce, &SEND_BUFFER_BYTES).is_err() {
        let _ = setsockopt(socket, sockopt::SndBuf, &SEND_BUFFER_BYTES);
    }
}
