//! The reactor's clients: requests that arrive on connections become orders for volumes, and outcomes of
//! orders become replies.
//!
//! Invariants: a connection parses only while it may start requests; payload bytes are charged from their
//! request until their reply has left; a misbehaving client loses only its own connection. Must not know what
//! volumes do.

use super::access::Viewer;
use super::admission::{Origin, stranger_to_drop};
use super::connection::{Connection, Next, Receiving};
use super::connections::Connections;
use super::directory::{ChosenArray, Directory, Seat};
use super::fence::have_hung_up;
use super::joins::{Cut, Joins, answer_to};
use super::large::LargeToken;
use super::long::{LongKind, Longs, Writing, is_long, written};
use super::orders::{Answer, ArrayId, ConnectionId, LaneTicket, Order, ReactorId, Requester};
use super::seats::{Seated, Seats};
use super::shares::{Memory, Turn, charge_of};
use super::sockets::{Outgoing, Sockets, hang_ups, hangup_bits};
use super::tunnels::Tunnels;
use crate::tls::Peer;
use calpe_core::block_io::{BufMut, Pool};
use calpe_core::nbd::{Command, Request};
use calpe_core::units::Timestamp;
use calpe_core::volume::{ClientError, ClientReply, Joined, LaneCut};
use nix::sys::socket::{Shutdown, shutdown};
use std::collections::VecDeque;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

/// How long a dismissed client may take to receive its last replies, in nanoseconds.
pub(super) const FAREWELL_NANOS: u64 = 2_000_000_000;

/// How long a client may hold more than its share of scarce memory, by not sending the rest of a payload or
/// not taking its replies, in nanoseconds. It got that much while there were fewer clients. A message of 32
/// MiB needs 3 MB/s to be in time; nobody waits for that memory meanwhile: large requests of others are
/// carried out in smaller parts.
const HOARD_NANOS_MAX: u64 = 10_000_000_000;

/// See the head of this file.
pub(super) struct Clients {
    connections: Connections,
    longs: Longs,
    seats: Seats,
    tunnels: Tunnels,
    /// Requests of several lanes.
    joins: Joins,
    pool: Pool,
}

/// What was taken from a connection's stream.
#[derive(Debug)]
pub(super) enum Taken {
    /// Nothing: the client has sent nothing, or has to wait.
    Nothing,
    /// A message that needs nothing more.
    Something,
    /// An export was chosen: the client needs a place.
    Selected,
    /// A request.
    Order(Order),
}

impl Clients {
    /// No clients yet. `memory`: for the requests and unread replies of all; `most`: clients of all reactors
    /// at one time.
    pub(super) fn new(
        reactor: ReactorId,
        pool: Pool,
        memory: Arc<Memory>,
        place: Arc<LargeToken>,
        most: usize,
    ) -> Clients {
        Clients {
            connections: Connections::new(reactor, memory),
            longs: Longs::new(pool.clone(), place),
            seats: Seats::new(most),
            tunnels: Tunnels::new(most),
            joins: Joins::new(pool.clone()),
            pool,
        }
    }

    pub(super) fn turn(&mut self) -> &mut Turn {
        self.connections.turn()
    }

    /// How many turns there were.
    pub(super) fn turns(&self) -> u64 {
        self.connections.turns()
    }

    /// Whether connections are to be parsed or settled.
    pub(super) fn has_work(&self) -> bool {
        self.connections.has_work()
    }

    /// Whether ticks are needed at the busy pace.
    pub(super) fn is_busy(&self) -> bool {
        self.tunnels.someone_waits() || !self.longs.is_empty()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    pub(super) fn contains(&self, key: ConnectionId) -> bool {
        self.connections.contains(key)
    }

    pub(super) fn is_broken(&self, key: ConnectionId) -> bool {
        self.connections[key].is_broken()
    }

    /// The array that a connection is a client of.
    pub(super) fn array_of(&self, key: ConnectionId) -> Option<ChosenArray> {
        self.connections[key].array().cloned()
    }

    /// The peers of all connections that have proved who they are.
    pub(super) fn peers(&self) -> Vec<Arc<Peer>> {
        self.connections.iter().filter_map(|(_, connection)| connection.link().peer().cloned()).collect()
    }

    /// Lets a new connection in.
    pub(super) fn accept(&mut self, connection: Connection, origin: Origin) -> ConnectionId {
        if let Some(dropped) = stranger_to_drop(self.connections.guests(), origin) {
            tracing::debug!(connection = dropped, "dropped for another one: it chose no export");
            self.connections.break_off(ConnectionId(dropped));
        }
        self.connections.insert(connection)
    }
}

/// Receiving and parsing.
impl Clients {
    /// Takes what was received. Returns a write whose payload is there.
    pub(super) fn received(
        &mut self,
        sockets: &mut Sockets,
        now: Timestamp,
        key: ConnectionId,
        buf: BufMut,
        result: io::Result<usize>,
    ) -> Option<Order> {
        self.connections.turn().mark(key);
        let connection = &mut self.connections[key];
        let receiving = connection.stop_receiving();
        let len = match result {
            Ok(len) => len,
            Err(error) => {
                tracing::debug!(connection = %key, %error, "client lost");
                connection.break_off();
                0
            }
        };
        let Receiving::Payload { request, have } = receiving else {
            match len {
                0 => connection.close_reading(),
                _ => connection.received(buf, len),
            }
            return None;
        };
        let (have, long) = (have + len, connection.longs().writing());
        let ended = len == 0 || connection.is_broken();
        if ended || have == buf.len() && connection.is_dismissed() {
            // The stream ended inside the payload, or the connection was to close before the payload was
            // complete: there is nobody to answer.
            if ended {
                connection.break_off();
            }
            let charge = if long.is_some() { buf.len() } else { charge_of(&request) };
            let requester = self.connections.requester(key);
            let order = Order { long, ..order_of(requester, request, None, charge) };
            self.drop_order(now, order);
            None
        } else if have < buf.len() {
            self.connections.receive_payload(sockets, now, key, request, (buf, have));
            None
        } else if let Some(long) = long {
            Some(written(self.connections.requester(key), long, request, buf))
        } else {
            connection.payload_taken();
            Some(order_of(self.connections.requester(key), request, Some(buf), charge_of(&request)))
        }
    }

    /// Begins to parse a connection.
    pub(super) fn begin_parsing(&mut self, key: ConnectionId) {
        let class = self.connections[key].class();
        self.connections.turn().parses(key, class);
    }

    /// Whether parsing of a connection goes on in this turn; otherwise it is broken, or goes on in the next
    /// one.
    pub(super) fn goes_on_parsing(&mut self, key: ConnectionId) -> bool {
        if self.connections[key].is_broken() {
            return false;
        }
        // A large reply leaves while what it carries is still in the core's cache.
        let is_over = self.connections[key].should_send_now() || self.connections.turn().is_over_for(key);
        if is_over {
            self.connections.turn().postpone(key);
        }
        !is_over
    }

    /// The next request of a connection that no longer has to wait, and whether it modifies.
    pub(super) fn next_ready(&mut self, key: ConnectionId) -> Option<(LaneTicket, bool)> {
        self.connections[key].pop_ready()
    }

    /// The next part of a connection's long requests. Some may be under way although this returns no order.
    pub(super) fn continue_longs(
        &mut self,
        sockets: &mut Sockets,
        now: Timestamp,
        key: ConnectionId,
    ) -> Writing {
        if self.connections[key].longs().is_empty() {
            return Writing::Waits;
        }
        match self.longs.advance(&mut self.connections, key) {
            Some(order) => Writing::Order(order),
            None => self.longs.continue_writing(&mut self.connections, sockets, now, key),
        }
    }

    /// Takes the next message that a connection has received.
    pub(super) fn take_next(
        &mut self,
        sockets: &mut Sockets,
        directory: &Directory,
        now: Timestamp,
        key: ConnectionId,
    ) -> Taken {
        let requester = self.connections.requester(key);
        let (allowed, held) = (self.connections.allowed(key), self.connections.held(key));
        let connection = &mut self.connections[key];
        if !connection.may_parse() {
            return Taken::Nothing;
        }
        match connection.next(directory, &self.pool, allowed, held) {
            Next::Receive | Next::Full | Next::Starved => return Taken::Nothing,
            Next::Answered => {}
            Next::Selected => {
                let array = directory.of_export(connection.export_name());
                // Another array may have that name by now.
                connection.choose(array.filter(|listed| connection.negotiated(listed.export())));
                return Taken::Selected;
            }
            Next::Request(request) => {
                let charge = charge_of(&request);
                let is_long = request.command != Command::Read
                    && is_long(connection.array().map(Deref::deref), &request);
                self.connections.accounts().take(key, charge);
                if is_long {
                    self.longs.begin(&mut self.connections, key, request, LongKind::NoPayload, charge);
                } else {
                    let sparse =
                        request.command == Command::Read && self.connections[key].takes_parts(&request);
                    return Taken::Order(Order { sparse, ..order_of(requester, request, None, charge) });
                }
            }
            Next::Write(request, buf) => {
                let charge = charge_of(&request);
                self.connections.accounts().take(key, charge);
                return Taken::Order(order_of(requester, request, Some(buf), charge));
            }
            Next::Payload { request, buf, have } => {
                self.connections.accounts().take(key, charge_of(&request));
                self.connections.receive_payload(sockets, now, key, request, (buf, have));
            }
            Next::InParts(request) => {
                let kind = match request.command {
                    Command::Write => LongKind::Write,
                    _ if connection.takes_parts(&request) => LongKind::ReadInParts,
                    _ => LongKind::ReadAlone,
                };
                self.longs.begin(&mut self.connections, key, request, kind, 0);
            }
            Next::StartTls => connection.link_mut().start_tls(),
            Next::Leave => connection.discard_input(),
            Next::Fatal(fault) => {
                tracing::debug!(connection = %key, %fault, "client broke the protocol");
                connection.discard_input();
            }
        }
        Taken::Something
    }
}

/// Outcomes of orders.
impl Clients {
    /// Answers an order that needs no volume. Returns whether it did.
    pub(super) fn answers_itself(&mut self, now: Timestamp, order: &Order) -> bool {
        let key = order.requester.connection;
        let connection = &mut self.connections[key];
        match order.request.command {
            Command::Flush if connection.take_lost_writes() => {
                self.connections.turn().spend(key, &order.request);
                match order.long {
                    None => self.reply(key, &order.request, order.charge, &[], Err(ClientError::Io)),
                    Some(at) => {
                        let answer = Answer {
                            requester: order.requester,
                            request: order.request,
                            part: None,
                            charge: order.charge,
                            long: order.long,
                            allocation: Vec::new(),
                            result: Err(ClientError::Io),
                        };
                        self.longs.part_done(&mut self.connections, now, at, answer);
                    }
                }
            }
            Command::Cache => {
                // Advisory, and there is no cache to fill.
                connection.reply_done(&order.request);
                self.connections.turn().spend(key, &order.request);
            }
            _ => return false,
        }
        true
    }

    /// An order is about to be handed to its volume.
    pub(super) fn submits(&mut self, key: ConnectionId, request: &Request) {
        self.connections[key].request_begins(request.command.modifies());
        self.connections.turn().spend(key, request);
    }

    /// An order that was handed over waits for others.
    pub(super) fn waits(&mut self, key: ConnectionId, ticket: LaneTicket, modifies: bool) {
        self.connections[key].request_waits(ticket, modifies);
    }

    /// A waiting order is about to go on.
    pub(super) fn resumes(&mut self, key: ConnectionId, ticket: LaneTicket, modifies: bool) {
        self.connections[key].request_resumes(ticket, modifies);
    }

    /// A waiting order may go on, as its connection's share of the time permits.
    pub(super) fn may_go_on(&mut self, key: ConnectionId, ticket: LaneTicket, modifies: bool) {
        self.connections[key].push_ready(ticket, modifies);
        self.connections.turn().mark(key);
    }

    /// Drops an order whose client or array is gone.
    pub(super) fn drop_order(&mut self, now: Timestamp, order: Order) {
        self.longs.drop_order(&mut self.connections, now, order);
    }

    /// Takes back an order that was dropped. `waited`: its ticket, if it waited for others then.
    pub(super) fn lose_order(&mut self, now: Timestamp, order: Order, waited: Option<LaneTicket>) {
        let key = order.requester.connection;
        if let Some(part) = order.part {
            self.part_ended(key, order.request.command.modifies(), waited);
            let joined = self.joins.dropped(part);
            self.take_joined(now, joined);
            return;
        }
        self.connections[key].request_lost(order.request.command.modifies(), waited);
        self.drop_order(now, order);
        self.connections.turn().mark(key);
    }

    /// Marks the clients of an array: writes that they may have made and not flushed are lost.
    pub(super) fn lose_writes(&mut self, array: ArrayId) {
        let is_of = |connection: &Connection| connection.array().is_some_and(|listed| listed.id() == array);
        for key in self.connections.which(|_, connection| is_of(connection)) {
            self.connections[key].lose_writes();
        }
    }

    /// Cuts an order that was [submitted](Clients::submits) into orders of lanes.
    pub(super) fn cut(&mut self, cut: &LaneCut, order: Order) -> Cut {
        let (key, modifies) = (order.requester.connection, order.request.command.modifies());
        let cut = self.joins.cut(cut, order);
        if let Cut::Parts(parts) = &cut {
            // All are counted before the first one can end.
            (1..parts.len()).for_each(|_| self.connections[key].part_begins(modifies));
        }
        cut
    }

    /// A part of a request has ended, or was dropped.
    fn part_ended(&mut self, key: ConnectionId, modifies: bool, waited: Option<LaneTicket>) {
        self.connections[key].part_ended(modifies, waited);
        // Requests may have been put off until nothing modifies.
        self.connections.turn().touch(key);
    }

    /// Takes a volume's answer.
    pub(super) fn answer(&mut self, now: Timestamp, answer: Answer) {
        let (key, modifies) = (answer.requester.connection, answer.request.command.modifies());
        if let Some(part) = answer.part {
            self.part_ended(key, modifies, None);
            let joined = self.joins.answered(part, answer);
            self.take_joined(now, joined);
        } else {
            self.connections[key].request_ended(modifies, now);
            self.take_answer(now, answer);
        }
    }

    /// Takes a request whose parts have all ended.
    fn take_joined(&mut self, now: Timestamp, joined: Option<Joined<Order>>) {
        match joined {
            None => {}
            Some(Joined::Answer(order, result)) => {
                self.connections[order.requester.connection].whole_ended(now);
                self.take_answer(now, answer_to(order, result));
            }
            Some(Joined::Dropped(order)) => {
                let key = order.requester.connection;
                self.connections[key].whole_ended(now);
                self.drop_order(now, order);
                self.connections.turn().mark(key);
            }
        }
    }

    fn take_answer(&mut self, now: Timestamp, mut answer: Answer) {
        let key = answer.requester.connection;
        if matches!(answer.result, Err(ClientError::Stopping)) {
            self.dismiss(now, key);
        }
        let connection = &mut self.connections[key];
        // Writes were lost while it was on its way, or before its volume had it.
        if answer.request.command == Command::Flush && answer.result.is_ok() && connection.take_lost_writes()
        {
            answer.result = Err(ClientError::Io);
        }
        match answer.long {
            Some(long) => self.longs.part_done(&mut self.connections, now, long, answer),
            None => {
                let Answer { request, charge, allocation, result, .. } = answer;
                if result.is_ok() {
                    self.connections[key].count(&request);
                }
                self.reply(key, &request, charge, &allocation, result);
            }
        }
        let may_go_on = self.connections[key].may_go_on();
        let turn = self.connections.turn();
        if may_go_on { turn.mark(key) } else { turn.touch(key) }
    }

    /// Appends the reply to a request.
    fn reply(
        &mut self,
        key: ConnectionId,
        request: &Request,
        charge: usize,
        allocation: &[(u64, u32)],
        result: Result<ClientReply, ClientError>,
    ) {
        let connection = &mut self.connections[key];
        // Bytes of its memory that are kept until the reply is sent.
        let kept = connection.reply(request, charge, allocation, result);
        if connection.should_send_now() {
            self.connections.turn().hurry();
        }
        self.connections.accounts().give_back(key, charge - kept);
    }

    /// Takes back a message that was sent, or never will be.
    pub(super) fn sent(&mut self, key: ConnectionId, message: Box<Outgoing>, result: io::Result<()>) {
        let connection = &mut self.connections[key];
        let held = connection.sent(message);
        if let Err(error) = result {
            tracing::debug!(connection = %key, %error, "client lost");
            connection.break_off();
        }
        self.connections.accounts().give_back(key, held);
        self.connections.turn().mark(key);
    }
}

/// Hang-ups.
impl Clients {
    /// A client's seat at its array.
    pub(super) fn seat_of(&self, key: ConnectionId) -> Option<&Seat> {
        self.connections[key].seat()
    }

    /// A connection hands nothing over from here on, until the next look for hang-ups.
    pub(super) fn rest(&self, key: ConnectionId) {
        if let Some(seat) = self.seat_of(key) {
            seat.rest();
        }
    }

    /// Whether a connection's client was seen to have hung up: then what it left unprocessed is dropped.
    pub(super) fn leaves_behind(&mut self, key: ConnectionId) -> bool {
        let has_hung_up = self.seat_of(key).is_some_and(|seat| seat.session().has_hung_up());
        if has_hung_up {
            tracing::debug!(connection = %key, "client hung up: what it left behind is dropped");
            self.connections[key].break_off();
        }
        has_hung_up
    }

    /// Closes the connections whose clients left while they waited for a place; nothing is received from them
    /// meanwhile.
    pub(super) fn leave_waiting(&mut self) {
        if self.seats.waiting().is_empty() {
            return;
        }
        let keys: Vec<ConnectionId> = self.seats.waiting().iter().copied().collect();
        let watched = keys.iter().map(|&key| self.connections[key].watched());
        let gone = have_hung_up(watched.collect());
        for key in keys.into_iter().zip(gone).filter_map(|(key, gone)| gone.then_some(key)) {
            tracing::debug!(connection = %key, "client left before there was a place for it");
            self.connections.break_off(key);
        }
    }

    /// Drops what is left to do for clients that have gone while nothing was received from them (they had too
    /// much in flight, or they wait): nobody reads the replies, and others may wait for their places.
    pub(super) fn leave_unheard(&mut self) {
        let unheard = self.connections.which(|_, connection| {
            connection.array().is_some() && !connection.is_broken() && !connection.is_receiving()
        });
        let sockets: Vec<_> =
            unheard.iter().map(|&key| self.connections[key].link().socket().as_fd()).collect();
        // The end of a stream is not the end of its client: one that has closed one half still reads. Sockets
        // that cannot be polled now are polled again at the next tick.
        let Some(seen) = hang_ups(&sockets) else { return };
        let gone = unheard.into_iter().zip(seen).filter(|(_, seen)| seen & hangup_bits(false) != 0);
        for (key, _) in gone {
            tracing::debug!(connection = %key, "client gone: what it asked for is dropped");
            self.connections.break_off(key);
        }
    }
}

/// Places.
impl Clients {
    /// Gives a place to a connection that has chosen its export, or lets it wait for one. `reserve`: some
    /// places are kept for unix sockets. One that is to leave again is dismissed.
    pub(super) fn seat(&mut self, now: Timestamp, key: ConnectionId, reserve: bool) -> Seated {
        let seated = self.seats.seat(&mut self.connections, key, reserve);
        if seated == Seated::ToLeave {
            self.serve(key);
            self.dismiss(now, key);
        }
        if seated != Seated::Waits {
            self.count_clients();
        }
        seated
    }

    /// Serves a connection that has a place.
    pub(super) fn serve(&mut self, key: ConnectionId) {
        let requester = self.connections.requester(key);
        self.connections[key].take_seat(requester);
        self.connections.turn().mark(key);
        tracing::debug!(connection = %key, "client attached");
    }

    /// Connections that wait for places, in the order in which they came; they are to be seated again.
    pub(super) fn take_waiting(&mut self) -> VecDeque<ConnectionId> {
        self.seats.take_waiting()
    }

    /// Takes a client out that another reactor is to serve.
    pub(super) fn deal_out(&mut self, key: ConnectionId) -> Connection {
        let bytes = self.connections.held(key);
        self.connections.accounts().give_back(key, bytes);
        let connection = self.connections.remove(key);
        self.seats.deal_out(connection.link().origin());
        connection
    }

    /// A client has gone. `elsewhere`: its origin, if another reactor served it.
    pub(super) fn leaves_place(&mut self, elsewhere: Option<Origin>) {
        if let Some(origin) = elsewhere {
            self.seats.gone_elsewhere(origin);
        }
        self.count_clients();
    }

    /// Takes over a client that has a place. It leaves again if its array does not serve it any more.
    pub(super) fn take_over(&mut self, now: Timestamp, connection: Connection) {
        let key = self.connections.insert(connection);
        self.serve(key);
        if !self.connections[key].may_stay() {
            self.dismiss(now, key);
        }
    }

    /// Whether a client waits for the reactor that will serve it, and can be handed to it.
    pub(super) fn may_move(&self, key: ConnectionId) -> bool {
        self.connections[key].may_move()
    }

    /// Deals the memory out again among the clients, those that other reactors serve among them.
    fn count_clients(&mut self) {
        let clients = self.connections.iter().filter(|(_, c)| c.array().is_some()).count();
        self.connections.accounts().set_clients(clients + self.seats.elsewhere());
    }
}

/// Settling and closing.
impl Clients {
    /// Sends what is ready for a connection, and receives more.
    pub(super) fn settle(&mut self, sockets: &mut Sockets, now: Timestamp, key: ConnectionId) {
        self.connections.turn().settles(key);
        let connection = &mut self.connections[key];
        if let Some(message) = connection.message_to_send(now) {
            sockets.send(key.0, connection.link().socket(), message);
        }
        if connection.may_swap_socket() {
            self.tunnels.start(&mut self.connections, key);
        }
        let connection = &mut self.connections[key];
        if let Some(buf) = connection.buffer_to_receive(&self.pool) {
            connection.receives_inbox();
            sockets.receive(key.0, connection.link().socket(), buf, 0, false);
        }
        if connection.has_input() {
            self.connections.turn().mark(key);
        }
        if self.connections[key].is_broken() {
            self.longs.drop_of(&mut self.connections, now, key);
        }
    }

    /// Removes a connection that is over. Returns its origin if it had a client's place.
    pub(super) fn close_if_done(&mut self, key: ConnectionId) -> Option<Origin> {
        let connection = &mut self.connections[key];
        if !connection.is_done() && !connection.is_broken() {
            return None;
        }
        if connection.is_broken() {
            let bytes = connection.drop_replies();
            self.connections.accounts().give_back(key, bytes);
        }
        let connection = &self.connections[key];
        if !connection.is_idle_in_kernel() {
            // Ends what the kernel still has of it; an error means that the socket is dead already.
            let _ = shutdown(connection.link().socket().as_raw_fd(), Shutdown::Both);
            return None;
        }
        if !connection.is_done() {
            return None;
        }
        tracing::debug!(connection = %key, "client gone");
        let connection = self.connections.remove(key);
        self.seats.leave(key);
        connection.array().map(|_| connection.link().origin())
    }

    /// Closes connections that never choose an export, that do not take their last replies, or that hold
    /// memory that others wait for.
    pub(super) fn close_overdue(&mut self, now: Timestamp) {
        let overdue = self.connections.which(|key, connection| {
            let since = connection.dismissed_since();
            let dismissed = since.is_some_and(|since| now.nanos_since(since) > FAREWELL_NANOS);
            let hoards = || {
                let since = connection.keeps_memory_since();
                self.connections.is_hoarding(key)
                    && since.is_some_and(|at| now.nanos_since(at) > HOARD_NANOS_MAX)
            };
            !connection.is_broken() && (dismissed || connection.handshake_overdue(now) || hoards())
        });
        for key in overdue {
            tracing::debug!(connection = %key, "client took too long");
            self.connections.break_off(key);
        }
    }

    /// Looks after the place for large payloads, at each tick.
    pub(super) fn look_after_large_place(&mut self, now: Timestamp) {
        self.longs.look_after_place(&mut self.connections, now);
    }

    /// The place for large payloads may be free.
    pub(super) fn large_place_is_free(&mut self, now: Timestamp) {
        self.longs.place_is_free(&mut self.connections, now);
    }

    /// Whether the other reactors are to be told that the place has become free, since the last call.
    pub(super) fn take_large_place_news(&mut self) -> bool {
        self.longs.take_place_news()
    }

    /// Starts TLS on connections that had to wait until others ended theirs.
    pub(super) fn resume_tls(&mut self) {
        self.tunnels.resume(&mut self.connections);
    }

    /// Waits until last replies have passed through TLS.
    pub(super) fn wait_for_tls(&self) {
        self.tunnels.wait(Duration::from_nanos(FAREWELL_NANOS));
    }

    /// Dismisses the clients of an array that is gone.
    pub(super) fn close_clients_of(&mut self, now: Timestamp, array: ArrayId) {
        self.close_where(now, |connection| connection.chosen() == Some(array));
    }

    /// Dismisses the clients that chose no array.
    pub(super) fn close_unattached(&mut self, now: Timestamp) {
        self.close_where(now, |connection| connection.array().is_none());
    }

    /// Dismisses the clients of these peers, and, if `anonymous`, those with TLS and without a certificate.
    /// Returns how many.
    pub(super) fn end_sessions(&mut self, now: Timestamp, peers: &[Arc<Peer>], anonymous: bool) -> usize {
        self.close_where(now, |connection| match Viewer::of(connection.link()) {
            Viewer::Proven(peer) => peers.iter().any(|ended| Arc::ptr_eq(ended, &peer)),
            Viewer::Stranger => anonymous && connection.link().has_tls(),
            Viewer::Local => false,
        })
    }

    /// Dismisses the clients of some connections. Returns how many.
    pub(super) fn close_where(&mut self, now: Timestamp, which: impl Fn(&Connection) -> bool) -> usize {
        let keys = self.connections.which(|_, connection| which(connection));
        keys.iter().for_each(|&key| self.dismiss(now, key));
        keys.len()
    }

    /// Takes no more requests of a client, and closes its connection once it has its replies. Requests that
    /// are not served get no error in reply: a filesystem would take that for a broken disk, whereas the end
    /// of the connection makes its driver wait for the next daemon and ask again.
    pub(super) fn dismiss(&mut self, now: Timestamp, key: ConnectionId) {
        self.connections[key].dismiss(now);
        self.longs.drop_of(&mut self.connections, now, key);
        self.connections.turn().mark(key);
    }
}

/// An order of a client, for all but long requests.
fn order_of(requester: Requester, request: Request, payload: Option<BufMut>, charge: usize) -> Order {
    let asked = request.offset;
    Order { requester, request, payload, asked, part: None, charge, long: None, sparse: false }
}
