//! The reactor's loop. It carries orders from clients to arrays, and their outcomes back.
//!
//! A turn takes all completions, lets connections parse what they received, hands orders to volumes, executes
//! the actions of the volumes, and submits everything with the one system call that also waits for the next
//! completions. Replies of a turn leave in one message per connection.
//!
//! # Fencing: a write from a closed connection never lands after a later write from another
//!
//! A client that gives a connection up sends its requests again on another one, and goes on. A write of the
//! old connection that is still unread here, or still in its volume, must not land on top of later writes.
//! The Linux driver gives a connection up whenever it is too slow.
//!
//! Invariants:
//! - Nothing here blocks but the one system call (and copies on memory-backed members).
//! - A request that modifies is handed to its volume only after a check that its client has not hung up, made
//!   in this very parse run and after the payload was complete. What a client that hung up has left
//!   unprocessed is dropped: nobody waits for the replies.
//! - A write waits while it overlaps another one, in the volume or waiting, if either of them does not lie on
//!   blocks. It may not overtake a waiting one, or that would wait for as long as others come.
//! - A request waits while it overlaps an orphan: a modifying request that a volume still has and whose
//!   client has hung up. Before the request is checked, other clients are checked for hang-ups; a client that
//!   sends a request again has hung up before.
//!
//! One thread parses for all clients of a reactor, so whatever was handed over before the check was handed
//! over before anything that is read later; `fence` says how that holds between reactors. On a unix socket, a
//! close can be told from the close of one half. On TCP it cannot, until something is sent: there an ended
//! stream counts as hung up. Under TLS the network's socket is checked too, and so is TLS's own goodbye: data
//! that the pump still holds must not make a client look present. A hang-up that the network has not
//! delivered cannot be seen, above all one behind more requests than the kernel buffers for a connection that
//! is not read. So TCP connections get the largest receive buffer that the system allows from the start
//! (`listeners`).
//!
//! Cost: one poll without waiting for each parse run with a modifying request, or while others modify; two
//! entries in an index for each modifying request (`order`). Must not know what volumes do, or how the
//! protocol encodes things.

use super::admission::Origin;
use super::arrays::Arrays;
use super::clients::{Clients, FAREWELL_NANOS, Taken};
use super::connection::Connection;
use super::directory::{Listed, ListedLane};
use super::error::ReactorError;
use super::jobs::Jobs;
use super::joins::Cut;
use super::listeners::Listeners;
use super::long::Writing;
use super::mailbox::{Command, Mailbox, Post};
use super::orders::{ArrayId, ConnectionId, LaneTicket, News, Order, Outcome, ReactorId, answer_of};
use super::peers::{ACCEPTOR, Dealer, Peers};
use super::reads::{Ended, Reads};
use super::seats::Seated;
use super::sockets::{SocketEvent, Sockets};
use super::stopping::{DRAIN_NANOS, STOP_NANOS_MAX};
use super::watchdog::Watchdog;
use crate::daemon::{clock, drill, events::EventLog};
use crate::member::{MemberIo, Ring, RingEvent};
use calpe_core::block_io::Pool;
use calpe_core::units::Timestamp;
use calpe_core::volume::{ViewReader, VolumeEvent};
use calpe_gpu::GpuRuntime;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// `user_data` of member operations.
const TAG_MEMBER: u32 = 1;

/// `user_data` of socket operations.
const TAG_SOCKET: u32 = 2;

/// `user_data` of reads that need no owner.
const TAG_READ: u32 = 3;

/// Longest wait while anything is going on, as promised to volumes.
const TICK_BUSY: Duration = Duration::from_millis(100);

/// Longest wait while nothing is going on.
const TICK_IDLE: Duration = Duration::from_secs(1);

/// How often member files are checked, in nanoseconds.
const LOOK_NANOS: u64 = 1_000_000_000;

/// How often volumes are given what has ended between two looks at the ring: otherwise background work on
/// memory-backed members would keep the sockets waiting for ever.
const ADVANCES_PER_TURN: usize = 16;

/// How long they are given it in a turn at most, in nanoseconds, give or take one look: sockets wait as long.
const ADVANCES_NANOS: u64 = 2_000_000;

/// How long completions are handled in a turn at least, in nanoseconds, although there is much to send: a
/// quarter of what clients may spend of it, and of what they have spent where there are very many of them.
/// Otherwise requests that need no member could keep those that do waiting for ever.
const COMPLETION_NANOS_MIN: u64 = 500_000;

/// Limit for a whole shutdown, in nanoseconds: the stop of an array, and the farewells.
const SHUTDOWN_NANOS_MAX: u64 = DRAIN_NANOS + STOP_NANOS_MAX + 2 * FAREWELL_NANOS;

/// Whether hang-ups were checked in a parse run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Looked {
    No,
    /// For requests that only read.
    ForReads,
    /// Also for those that modify.
    ForAll,
}

/// What reactors have to work with.
#[derive(Clone, Debug)]
pub(crate) struct ReactorConfig {
    /// How many there are.
    pub reactors: usize,
    /// Memory for requests and members; shared with the volumes.
    pub pool: Pool,
    /// Bytes of memory that the requests and unread replies of clients may take, in equal shares; each client
    /// has a little more, see `shares`.
    pub payload_bytes: usize,
    /// Most clients at one time; further ones are let in and served once others leave. Connections that have
    /// chosen no export do not count.
    pub connections_max: usize,
    /// GPUs that bulk work may go to.
    pub gpu: Option<GpuRuntime>,
}

/// When volumes last got a tick, and member files were last checked.
struct Last {
    tick: Timestamp,
    look: Timestamp,
}

/// See the head of this file.
pub(super) struct Reactor {
    me: ReactorId,
    sockets: Sockets,
    clients: Clients,
    listeners: Listeners,
    arrays: Arrays,
    reads: Reads,
    peers: Arc<Peers>,
    /// Of the reactor that accepts connections.
    dealer: Dealer,
    mailbox: Arc<Mailbox>,
    /// Posts that were put off until the next turn.
    posts: Vec<Post>,
    wake: Arc<OwnedFd>,
    now: Timestamp,
    last: Last,
    watchdog: Option<Watchdog>,
    /// Since when it is being shut down.
    stopping: Option<Timestamp>,
}

impl Reactor {
    pub(super) fn new(
        me: ReactorId,
        config: ReactorConfig,
        peers: Arc<Peers>,
        events: EventLog,
    ) -> io::Result<Reactor> {
        let ReactorConfig { reactors, pool, connections_max, gpu, .. } = config;
        let mut ring = Ring::new()?;
        let mut members = MemberIo::new(TAG_MEMBER, &pool, reactors);
        members.open_inbox(&mut ring)?;
        let mailbox = Arc::clone(peers.mailbox(me));
        let wake = Arc::new(mailbox.descriptor()?);
        let jobs = Jobs::new(Arc::clone(&peers.jobs), Arc::clone(&mailbox), gpu);
        let now = clock::now();
        let (bell, directory) = (Arc::clone(&peers.bell), Arc::clone(&peers.directory));
        let (memory, place) = (Arc::clone(&peers.memory), Arc::clone(&peers.large_place));
        Ok(Reactor {
            me,
            sockets: Sockets::new(ring, TAG_SOCKET),
            clients: Clients::new(me, pool.clone(), memory, place, connections_max),
            listeners: Listeners::default(),
            reads: Reads::new(me, TAG_READ, pool.clone()),
            arrays: Arrays::new(members, jobs, pool, events, bell, directory),
            peers,
            dealer: Dealer::new(reactors),
            mailbox,
            posts: Vec::new(),
            wake,
            now,
            last: Last { tick: now, look: now },
            watchdog: Watchdog::from_environment(),
            stopping: None,
        })
    }

    pub(super) fn run(mut self) -> io::Result<()> {
        let mut events: Vec<RingEvent> = Vec::new();
        self.sockets.poll(&self.wake);
        loop {
            self.arrays.end_turn();
            let has_work = self.arrays.has_ended() || self.clients.has_work() || !self.posts.is_empty();
            let may_wait = !has_work && self.mailbox.falls_asleep();
            let wait = if may_wait { Some(self.until_tick()) } else { None };
            let wait_max = self.watchdog.as_ref().map(Watchdog::wait_max);
            let wait = wait.map(|wait| wait_max.map_or(wait, |max| max.min(wait)));
            // One that only waits for its helpers keeps a core as busy as if it did their work itself.
            let is_idle = may_wait && !self.arrays.is_helped();
            if is_idle {
                self.peers.falls_asleep();
            }
            let entered = self.sockets.ring().enter(wait, &mut events);
            if is_idle {
                self.peers.wakes();
            }
            if may_wait {
                self.mailbox.is_awake();
            }
            entered?;
            let leaves_cores = self.peers.leaves_cores();
            self.sockets.copy_elsewhere(leaves_cores);
            self.arrays.use_helpers(leaves_cores);
            self.now = clock::now();
            self.clients.turn().count();
            drill::point("reactor");
            self.tell_watchdog();
            for event in events.drain(..) {
                self.dispatch(event);
            }
            self.take_posts();
            self.take_errands();
            self.arrays.pass_time(self.now);
            self.tick_if_due();
            self.work();
            self.arrays.progress_stops(self.sockets.ring(), self.now);
            self.pass_on();
            if self.stopping.is_some_and(|since| self.may_end(since)) {
                self.posts.append(&mut self.mailbox.close());
                std::mem::take(&mut self.posts).into_iter().for_each(|post| self.refuse(post));
                // Last replies may still be on their way through TLS.
                self.clients.wait_for_tls();
                let unclean = self.arrays.take_unclean();
                return if unclean.is_empty() { Ok(()) } else { Err(io::Error::other(unclean.join("; "))) };
            }
        }
    }

    /// Tells the supervisor that the loops of all reactors turn.
    fn tell_watchdog(&mut self) {
        self.peers.pulse.beat(self.me, self.now);
        let Some(watchdog) = self.watchdog.as_mut().filter(|_| self.me == ACCEPTOR) else { return };
        if self.peers.pulse.is_regular(self.now, watchdog.wait_max() * 2) {
            watchdog.turn(self.now);
        }
    }

    fn dispatch(&mut self, event: RingEvent) {
        match (event.user_data >> 32) as u32 {
            TAG_MEMBER => {
                self.arrays.complete(self.sockets.ring(), event.user_data, event.result);
                return;
            }
            TAG_READ => {
                self.reads.complete(event.user_data, event.result);
                return;
            }
            _ => {}
        }
        match self.sockets.complete(event.user_data, event.result) {
            None => {}
            Some(SocketEvent::Received { owner, buf, result }) => {
                let key = ConnectionId(owner);
                if let Some(order) = self.clients.received(&mut self.sockets, self.now, key, buf, result) {
                    self.begin(order, &mut Looked::No);
                    self.clients.rest(key);
                }
            }
            Some(SocketEvent::Sent { owner, message, result }) => {
                self.clients.sent(ConnectionId(owner), message, result);
            }
            Some(SocketEvent::Accepted { owner, result }) => {
                if let Some((connection, origin)) = self.listeners.accepted(owner, self.now, result) {
                    let key = self.clients.accept(connection, origin);
                    let address = self.listeners.address(owner);
                    tracing::debug!(connection = %key, %address, "client connected");
                    self.listeners.resume(&mut self.sockets);
                }
            }
            Some(SocketEvent::Readable) => {
                self.mailbox.was_woken();
                let commands = self.mailbox.take();
                // Clients on their way here come first: a command may be about all clients.
                self.take_posts();
                for command in commands {
                    self.command(command);
                }
                self.sockets.poll(&self.wake);
            }
        }
    }

    /// Lets connections parse and members' completions flow until nothing is left, or enough is ready to be
    /// sent; then sends.
    fn work(&mut self) {
        self.clients.turn().begin();
        self.parse_dirty();
        let began = clock::now();
        let least = COMPLETION_NANOS_MIN.max(began.nanos_since(self.now) / 4);
        for _ in 0..ADVANCES_PER_TURN {
            let spent = clock::now().nanos_since(began);
            if spent >= ADVANCES_NANOS || self.clients.turn().is_urgent() && spent >= least {
                break;
            }
            let may_go_on = self.arrays.advance(self.sockets.ring(), self.now);
            self.pass_on();
            if !may_go_on {
                break;
            }
            self.parse_dirty();
        }
        self.arrays.do_small_jobs();
        let mut touched = self.clients.turn().take_touched();
        for key in touched.drain(..) {
            if self.clients.contains(key) {
                self.settle(key);
            }
        }
        // Settling may have touched others.
        self.clients.turn().recycle(touched);
    }

    fn parse_dirty(&mut self) {
        while let Some(key) = self.clients.turn().next_dirty() {
            self.parse(key);
        }
        self.reads.verify_gathered();
        self.take_errands();
    }

    /// Goes on with a connection's long requests and takes its received requests, as far as it may start them
    /// and its share of this turn lasts.
    fn parse(&mut self, key: ConnectionId) {
        self.parse_for_a_while(key);
        self.clients.rest(key);
    }

    fn parse_for_a_while(&mut self, key: ConnectionId) {
        self.clients.begin_parsing(key);
        let mut looked = Looked::No;
        let mut since = clock::now();
        while self.clients.goes_on_parsing(key) {
            let begun = self.begin_ready(key, &mut looked);
            let long = self.clients.continue_longs(&mut self.sockets, self.now, key);
            let advanced = !matches!(long, Writing::Waits);
            if let Writing::Order(order) = long {
                self.begin(order, &mut looked);
            }
            let taken = self.take_next(key, &mut looked);
            let now = clock::now();
            self.clients.turn().spend_time(key, now.nanos_since(since));
            since = now;
            if !begun && !advanced && !taken {
                return;
            }
        }
    }

    /// Takes the next message that a connection has received. Returns whether there may be another one.
    fn take_next(&mut self, key: ConnectionId, looked: &mut Looked) -> bool {
        match self.clients.take_next(&mut self.sockets, &self.peers.directory, self.now, key) {
            Taken::Nothing => return false,
            Taken::Something => {}
            Taken::Selected => self.seat(key),
            Taken::Order(order) => self.begin(order, looked),
        }
        true
    }

    /// Sends what is ready for a connection, receives more, hands it to the reactor that will serve it, and
    /// closes it if it is over.
    fn settle(&mut self, key: ConnectionId) {
        self.clients.settle(&mut self.sockets, self.now, key);
        if self.clients.is_broken(key) {
            self.drop_ready(key);
        }
        if self.clients.may_move(key)
            && let Some(to) = self.dealer.moved(key)
        {
            let client = Box::new(self.clients.deal_out(key));
            // A reactor that has ended serves no array: the connection is closed.
            let _ = self.peers.post(to, Post::Client(client));
            return;
        }
        if let Some(origin) = self.clients.close_if_done(key) {
            match self.dealer.moved(key) {
                Some(to) => self.client_gone(to, None),
                None if self.me == ACCEPTOR => self.client_gone(self.me, None),
                None => {
                    let _ = self.peers.post(ACCEPTOR, Post::ClientGone(self.me, origin));
                }
            }
        }
    }
}

/// Places.
impl Reactor {
    /// Gives a place to a connection that has chosen its export, or lets it wait for one.
    fn seat(&mut self, key: ConnectionId) {
        let seated = self.clients.seat(self.now, key, self.listeners.has_unix());
        let Some(array) = self.clients.array_of(key).filter(|_| seated != Seated::Waits) else { return };
        if seated == Seated::ToLeave {
            self.dealer.keep(self.me);
            return;
        }
        match self.dealer.choose(array.first_owner()) {
            to if to == self.me => self.clients.serve(key),
            to => self.dealer.moves(key, to),
        }
    }

    /// A client of a reactor has gone. `elsewhere`: its origin, if it was handed to that reactor.
    fn client_gone(&mut self, reactor: ReactorId, elsewhere: Option<Origin>) {
        self.dealer.gone(reactor);
        self.clients.leaves_place(elsewhere);
        for key in self.clients.take_waiting() {
            self.seat(key);
            self.clients.turn().mark(key);
        }
    }
}

/// Orders and their outcomes.
impl Reactor {
    /// Hands an order to its volume, unless its client has hung up. `looked`: whether hang-ups were checked
    /// in this parse run.
    fn begin(&mut self, order: Order, looked: &mut Looked) {
        let key = order.requester.connection;
        let Some(array) = self.clients.array_of(key).filter(|array| !array.is_gone()) else {
            self.clients.drop_order(self.now, order);
            self.clients.dismiss(self.now, key);
            return;
        };
        if self.is_left_behind(key, &array, order.request.command.modifies(), looked) {
            self.clients.drop_order(self.now, order);
        } else if !self.clients.answers_itself(self.now, &order) {
            self.clients.submits(key, &order.request);
            self.hand_over(&array, order);
        }
    }

    /// Hands an order to the lanes that it concerns.
    fn hand_over(&mut self, array: &Listed, order: Order) {
        if let [lane] = array.lanes() {
            self.hand_to_lane(lane, order);
            return;
        }
        match self.clients.cut(array.cut(), order) {
            Cut::Whole(lane, order) => self.hand_to_lane(array.lane(lane), order),
            Cut::Parts(parts) => parts.for_each(|(lane, order)| self.hand_to_lane(array.lane(lane), order)),
            Cut::Refused(answer) => self.clients.answer(self.now, answer),
        }
    }

    /// Carries an order out here, if it is a read for which that is possible, or hands it to the owner of its
    /// lane.
    fn hand_to_lane(&mut self, lane: &Arc<ListedLane>, order: Order) {
        let (ring, jobs) = (self.sockets.ring(), self.arrays.jobs());
        if let Some(order) = self.reads.take(ring, jobs, self.now, lane, order) {
            self.ask_owner(lane, order);
        }
        self.take_reads();
    }

    /// Takes what threads have read, and the reads that have ended.
    fn take_errands(&mut self) {
        for errand in self.arrays.jobs().take_errands() {
            self.reads.errand_ended(errand);
        }
        self.take_reads();
    }

    /// Takes the reads that have ended.
    fn take_reads(&mut self) {
        while let Some(ended) = self.reads.next_ended() {
            match ended {
                Ended::Read(order, buf) => self.clients.answer(self.now, answer_of(order, buf)),
                Ended::AskOwner(lane, order) => self.ask_owner(&lane, order),
            }
        }
    }

    /// Hands an order to the owner of its lane.
    fn ask_owner(&mut self, lane: &ListedLane, order: Order) {
        if lane.owner() == self.me {
            self.arrays.submit(self.now, lane.id(), order);
        } else if let Some(Post::Order { order, .. }) =
            self.peers.post(lane.owner(), Post::Order { lane: lane.id(), order })
        {
            self.clients.lose_order(self.now, order, None);
        }
        // Whether it waits; its end comes when the lane settles.
        self.pass_on();
    }

    /// Goes on with a request of a connection that no longer waits. Returns whether there was one.
    fn begin_ready(&mut self, key: ConnectionId, looked: &mut Looked) -> bool {
        let Some((ticket, modifies)) = self.clients.next_ready(key) else { return false };
        let Some(array) = self.clients.array_of(key) else { return true };
        if self.is_left_behind(key, &array, modifies, looked) {
            self.give_up(&array, ticket);
            return true;
        }
        self.clients.resumes(key, ticket, modifies);
        let owner = array.lane(ticket.0.lane()).owner();
        if owner == self.me {
            self.arrays.resume(self.now, ticket);
        } else {
            // Where the owner has ended, the order was dropped.
            let _ = self.peers.post(owner, Post::Resume(ticket));
        }
        true
    }

    /// Gives up the requests of a broken connection that no longer wait.
    fn drop_ready(&mut self, key: ConnectionId) {
        // Requests that wait for those are given up in the same turn, if the array is here.
        while let Some((ticket, _)) = self.clients.next_ready(key) {
            if let Some(array) = self.clients.array_of(key) {
                self.give_up(&array, ticket);
            }
        }
    }

    fn give_up(&mut self, array: &Listed, ticket: LaneTicket) {
        let owner = array.lane(ticket.0.lane()).owner();
        if owner == self.me {
            self.arrays.give_up(ticket);
        } else {
            // As above.
            let _ = self.peers.post(owner, Post::GiveUp(ticket));
        }
        self.pass_on();
    }

    /// Whether a request is not to be carried out any more because its client has hung up.
    fn is_left_behind(
        &mut self,
        key: ConnectionId,
        array: &Listed,
        modifies: bool,
        looked: &mut Looked,
    ) -> bool {
        let Some(seat) = self.clients.seat_of(key) else { return false };
        let is_enough = if modifies { *looked == Looked::ForAll } else { *looked != Looked::No };
        if !is_enough && (modifies || seat.others_modify()) {
            *looked = if modifies { Looked::ForAll } else { Looked::ForReads };
            seat.look(modifies, |requester| {
                for lane in array.lanes() {
                    let (hold, id) = (lane.reader().map(ViewReader::orphan), lane.id());
                    // Behind what that client's reactor has posted. Where the owner has ended, its volume has
                    // nothing any more.
                    let _ = self.peers.post(lane.owner(), Post::Orphan { lane: id, requester, hold });
                }
            });
            if array.is_of(self.me) {
                self.take_orders();
            }
        }
        modifies && self.clients.leaves_behind(key)
    }

    /// Passes outcomes of arrays on to their requesters.
    fn pass_on(&mut self) {
        while let Some(outcome) = self.arrays.next_outcome() {
            match (outcome.requester(), outcome) {
                (Some(requester), outcome) if requester.reactor != self.me => {
                    // A reactor that has ended has no clients.
                    let _ = self.peers.post(requester.reactor, Post::Outcome(outcome));
                }
                (_, Outcome::News(news)) => {
                    for other in self.peers.others(self.me) {
                        // As above.
                        let _ = self.peers.post(other, Post::Outcome(Outcome::News(news)));
                    }
                    self.take_outcome(Outcome::News(news));
                }
                (_, outcome) => self.take_outcome(outcome),
            }
        }
        if self.clients.take_large_place_news() {
            for other in self.peers.others(self.me) {
                // As above.
                let _ = self.peers.post(other, Post::LargePlaceFree);
            }
        }
    }

    fn take_outcome(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Answer(answer) => self.clients.answer(self.now, answer),
            Outcome::Waits { requester, ticket, modifies } => {
                self.clients.waits(requester.connection, ticket, modifies);
            }
            Outcome::MayGoOn { requester, ticket, modifies } => {
                self.clients.may_go_on(requester.connection, ticket, modifies);
            }
            Outcome::Dropped { order, waited } => self.clients.lose_order(self.now, order, waited),
            Outcome::News(News::WritesLost(array)) => self.clients.lose_writes(array),
            Outcome::News(News::Leaves(array)) => {
                self.reads.forget(array);
                self.clients.close_clients_of(self.now, array);
            }
        }
    }
}

/// Posts of other reactors.
impl Reactor {
    fn take_posts(&mut self) {
        for post in std::mem::take(&mut self.posts) {
            self.take_post(post);
        }
        for post in self.mailbox.take_posts() {
            self.take_post(post);
        }
        self.arrays.settle(self.sockets.ring(), self.now);
        self.pass_on();
    }

    /// Takes what was posted for arrays here, and puts the rest off. After each look for hang-ups, an order
    /// of this reactor comes behind what others had posted by then: it must not overtake what a client left
    /// behind that the look has found, or that another reactor has found before.
    fn take_orders(&mut self) {
        for post in self.mailbox.take_posts() {
            match post {
                Post::Order { .. } | Post::Resume(_) | Post::GiveUp(_) | Post::Orphan { .. } => {
                    self.take_post(post);
                }
                post => self.posts.push(post),
            }
        }
    }

    fn take_post(&mut self, post: Post) {
        let now = self.now;
        match post {
            Post::Order { lane, order } => self.arrays.submit(now, lane, order),
            Post::Resume(ticket) => self.arrays.resume(now, ticket),
            Post::GiveUp(ticket) => self.arrays.give_up(ticket),
            // What holds reads off is let go when the orphans do that themselves.
            Post::Orphan { lane, requester, hold: _hold } => self.arrays.orphan(lane, requester),
            Post::Outcome(outcome) => self.take_outcome(outcome),
            Post::Client(connection) => self.clients.take_over(now, *connection),
            Post::ClientGone(reactor, origin) => self.client_gone(reactor, Some(origin)),
            Post::LargePlaceFree => self.clients.large_place_is_free(now),
        }
    }

    /// Refuses a post that has come when this reactor has ended.
    fn refuse(&mut self, post: Post) {
        if let Post::Order { order, .. } = post {
            let reactor = order.requester.reactor;
            // A reactor that has ended has no clients.
            let _ = self.peers.post(reactor, Post::Outcome(Outcome::Dropped { order, waited: None }));
        }
    }
}

/// Commands of other threads.
impl Reactor {
    fn command(&mut self, command: Command) {
        // A reply that nobody waits for any more is no loss.
        match command {
            Command::AddLane { lane, reply, .. } if self.stopping.is_some() => {
                // Its devices are closed before the requester can open them again.
                drop(lane);
                let _ = reply.send(Err(ReactorError::Gone));
            }
            Command::AddLane { listed, id, lane, reply } => {
                self.arrays.add(self.sockets.ring(), self.now, (listed, id), lane);
                let _ = reply.send(Ok(()));
            }
            Command::Admin { lane, request, devices, reply } => {
                self.arrays.admin(self.sockets.ring(), self.now, lane, request, devices, reply);
            }
            Command::Would { lane, request, reply } => {
                let _ = reply.send(self.arrays.would(lane, &request));
            }
            Command::Status { lane, reply } => {
                let _ = reply.send(self.arrays.facts(lane, self.clients.turns()));
            }
            Command::EndExceeding { array, reply } => {
                let _ = reply.send(Ok(self.end_exceeding(array)));
            }
            Command::Peers { reply } => {
                let _ = reply.send(Ok(self.clients.peers()));
            }
            Command::EndSessions { peers, anonymous, reply } => {
                let _ = reply.send(Ok(self.clients.end_sessions(self.now, &peers, anonymous)));
            }
            Command::WholeDevice { device, reply } => {
                let _ = reply.send(Ok(self.arrays.whole_device(device)));
            }
            Command::LeftElsewhere { lane, device, why } => {
                let event = VolumeEvent::LeftElsewhere(device, why);
                self.arrays.step(self.sockets.ring(), self.now, lane, event);
            }
            Command::Replacement { lane, order } => {
                let event = VolumeEvent::Replacement(order);
                self.arrays.step(self.sockets.ring(), self.now, lane, event);
            }
            Command::StopLane { lane, reply } => {
                self.arrays.begin_stop(self.now, lane, Some(reply));
            }
            Command::Listen { listener } => self.listeners.add(&mut self.sockets, listener),
            Command::Shutdown => self.begin_shutdown(),
        }
        self.pass_on();
    }

    /// Ends the sessions of an array that go beyond its rules. Returns how many there are.
    fn end_exceeding(&mut self, id: ArrayId) -> usize {
        let Some(listed) = self.peers.directory.get(id) else { return 0 };
        let rules = listed.rules();
        let ends = |c: &Connection| c.chosen() == Some(id) && c.exceeds(rules.as_deref());
        self.clients.close_where(self.now, ends)
    }

    fn begin_shutdown(&mut self) {
        if self.stopping.is_some() {
            return;
        }
        self.stopping = Some(self.now);
        self.listeners.close(&mut self.sockets);
        self.arrays.begin_stop_all(self.now);
        self.clients.close_unattached(self.now);
    }

    /// Whether everything is done after a shutdown, or has taken too long.
    fn may_end(&self, since: Timestamp) -> bool {
        // It tells the supervisor that the others go on, and has the ends of their clients under TLS.
        let is_last = self.me != ACCEPTOR || self.peers.others_have_ended();
        let quiet = is_last
            && self.arrays.is_empty()
            && self.clients.is_empty()
            && self.listeners.is_empty()
            && self.arrays.operations() == 0;
        quiet || self.now.nanos_since(since) > SHUTDOWN_NANOS_MAX
    }
}

/// Time.
impl Reactor {
    /// The longest wait until the next tick.
    fn until_tick(&self) -> Duration {
        let pace = self.pace();
        let due = self.arrays.due();
        due.map_or(pace, |due| pace.min(Duration::from_nanos(due.nanos_since(self.now))))
    }

    fn tick_if_due(&mut self) {
        let (pace, now) = (self.pace().as_nanos() as u64, self.now);
        let is_due = self.arrays.due().is_some_and(|due| due <= now);
        if is_due || now.nanos_since(self.last.tick) >= pace {
            self.last.tick = now;
            self.arrays.tick(self.sockets.ring(), now);
            self.pass_on();
            self.clients.close_overdue(now);
            self.listeners.resume(&mut self.sockets);
            self.clients.resume_tls();
            self.reads.lose_patience(now);
            self.take_reads();
            self.arrays.report_vanished(self.sockets.ring(), now);
            self.arrays.leave_stragglers(self.sockets.ring(), now);
            self.pass_on();
            self.clients.look_after_large_place(now);
            self.clients.leave_waiting();
            self.clients.leave_unheard();
        }
        if now.nanos_since(self.last.look) >= LOOK_NANOS {
            self.last.look = now;
            self.arrays.look_after_files(self.sockets.ring());
        }
    }

    /// The longest time between two ticks.
    fn pace(&self) -> Duration {
        let is_busy = self.stopping.is_some()
            || self.clients.is_busy()
            || self.reads.is_busy()
            || self.arrays.is_busy(self.now);
        if is_busy { TICK_BUSY } else { TICK_IDLE }
    }
}
