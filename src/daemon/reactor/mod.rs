//! The reactor: one thread, one io_uring, any number of arrays, their clients and their members.
//!
//! A turn of the loop takes all completions, lets connections parse what came, steps volumes, executes what they
//! want, and submits everything with the one system call that also waits for the next completions. Replies of a
//! turn leave in one message per connection.
//!
//! Invariants: nothing here blocks but that call (and copies on memory-backed members); what the kernel works on
//! is owned by `sockets` and `members`; a request given to a volume is answered exactly once, or its array is
//! gone. Must not know what volumes do, or how the protocol encodes things.

mod access;
mod admission;
mod arrays;
mod clients;
mod connection;
mod edges;
mod fence;
mod handle;
mod jobs;
mod large;
mod listener;
mod long;
mod memory;
mod order;
mod outgoing;
mod ranges;
mod sys;
#[cfg(test)]
mod tests;
mod turns;
mod watchdog;

pub use admission::network_places;
pub use arrays::{ArrayFacts, Traffic};
pub use handle::{NewArray, ReactorError, ReactorHandle};
pub use listener::{ListenAddress, ListenError, ListenTls, Listener, SOCKET_PATH_MAX};
pub use sys::exit_at_once;

use crate::daemon::{clock, drill, events::EventLog};
use crate::member::{MemberIo, Ring, RingEvent};
use crate::tls::Pumps;
use arrays::Hosted;
use calpe_core::block_io::{DeviceId, Pool};
use calpe_core::nbd::Request;
use calpe_core::units::Timestamp;
use calpe_core::volume::{AdminOutcome, RequestId, VolumeAction, VolumeEvent};
use calpe_gpu::GpuRuntime;
use clients::ListenerState;
use connection::Connection;
use edges::Edges;
use handle::{Command, Mailbox, Reply};
use jobs::Jobs;
use large::Large;
use long::Long;
use memory::Memory;
use slab::Slab;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sys::{SocketEvent, Sockets};
use turns::Spent;
use watchdog::Watchdog;

/// `user_data` of member operations.
const TAG_MEMBER: u32 = 1;

/// `user_data` of socket operations.
const TAG_SOCKET: u32 = 2;

/// Longest wait while anything is going on: what volumes are promised.
const TICK_BUSY: Duration = Duration::from_millis(100);

/// Longest wait while nothing is going on.
const TICK_IDLE: Duration = Duration::from_secs(1);

/// How long after the last request an array counts as busy, in nanoseconds: volumes write back what they held up
/// in the hope of more.
const BUSY_NANOS: u64 = 2_000_000_000;

/// How often member files are looked at, in nanoseconds.
const LOOK_NANOS: u64 = 1_000_000_000;

/// Member completions handled between two looks at the ring: background work on memory-backed members would
/// otherwise keep the sockets waiting for ever.
const COMPLETIONS_PER_TURN: usize = 256;

/// How long completions are handled in a turn at least, in nanoseconds, although there is much to
/// send: a quarter of what clients may spend of it, and of what they have spent where there are
/// very many of them. Otherwise requests that need no member could keep those that do waiting for
/// ever.
const COMPLETION_NANOS_MIN: u64 = 500_000;

/// How long a client that was told to leave may take to receive its last replies, in nanoseconds.
const FAREWELL_NANOS: u64 = 2_000_000_000;

/// How long a shutdown may take in all, in nanoseconds: what an array may take, and the farewells.
const SHUTDOWN_NANOS_MAX: u64 = arrays::DRAIN_NANOS + arrays::STOP_NANOS_MAX + 2 * FAREWELL_NANOS;

/// Names an array in one reactor; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ArrayId(pub u32);

/// What a reactor has to work with.
#[derive(Clone, Debug)]
pub struct ReactorConfig {
    /// Memory for requests and members; shared with the volumes.
    pub pool: Pool,
    /// Bytes of memory that the requests and unread replies of clients may take, in equal shares; each client has a little
    /// beyond it, see `memory`.
    pub payload_bytes: usize,
    /// Clients at one time; more are let in and not served before others leave. Connections that have chosen no export do
    /// not count.
    pub connections_max: usize,
    /// GPUs that bulk work may go to.
    pub gpu: Option<GpuRuntime>,
}

/// A client's request inside a volume.
#[derive(Debug)]
struct Pending {
    connection: usize,
    array: ArrayId,
    request: Request,
    /// Its place in the order of its array, if it modifies.
    ticket: order::Ticket,
    /// Bytes of its connection's memory that it has.
    charge: usize,
    /// The long request that it is a part of.
    long: Option<usize>,
    /// Of a write that does not lie on blocks.
    edges: Option<Box<Edges>>,
    /// What is known already of a question about two contexts: (bytes, flags) of base:allocation.
    allocation: Vec<(u64, u32)>,
}

/// An administrator's request inside a volume.
#[derive(Debug)]
struct AdminPending {
    array: ArrayId,
    /// Devices that came with it.
    devices: Vec<DeviceId>,
    reply: Reply<AdminOutcome>,
}

struct Reactor {
    ring: Ring,
    sockets: Sockets,
    members: MemberIo,
    jobs: Jobs,
    /// TLS of clients; cryptography never happens on this thread.
    pumps: Pumps,
    config: ReactorConfig,
    events: EventLog,
    mailbox: Arc<Mailbox>,
    wake: Rc<OwnedFd>,
    now: Timestamp,
    turns: u64,
    arrays: Vec<Option<Hosted>>,
    listeners: Slab<ListenerState>,
    connections: Slab<Connection>,
    requests: Slab<Pending>,
    /// Administrators' requests inside volumes.
    admin: HashMap<RequestId, AdminPending>,
    next_admin: u64,
    /// Long requests of clients.
    longs: Slab<Long>,
    memory: Memory,
    large: Large,
    /// Connections with something to parse.
    dirty: VecDeque<usize>,
    /// Those that have had their share of this turn.
    later: Vec<usize>,
    /// What each connection may spend of this turn, in nanoseconds, and how many have begun to.
    share: i64,
    active: usize,
    /// What all have spent of it.
    spent: Spent,
    /// Connections that wait for a client's place.
    waiting: VecDeque<usize>,
    /// When it was told last that one waits.
    waiting_told: Option<Instant>,
    /// Connections to be settled at the end of this turn.
    touched: Vec<usize>,
    /// There is enough to send that it should leave before the turn goes on.
    urgent: bool,
    /// Some connection waits for others to end TLS.
    next_turn_for_tls: bool,
    /// What the last step of a volume asked for.
    actions: Vec<VolumeAction>,
    last_tick: Timestamp,
    last_look: Timestamp,
    watchdog: Option<Watchdog>,
    /// Being shut down since.
    stopping: Option<Timestamp>,
    /// Arrays that were shut down and did not stop cleanly, and why.
    unclean: Vec<String>,
}

impl Reactor {
    fn new(config: ReactorConfig, mailbox: Arc<Mailbox>, events: EventLog) -> io::Result<Reactor> {
        let mut ring = Ring::new()?;
        let mut members = MemberIo::new(TAG_MEMBER, &config.pool);
        members.open_inbox(&mut ring)?;
        let wake = Rc::new(mailbox.wake.as_fd().try_clone_to_owned()?);
        let now = clock::now();
        let memory = Memory::new(config.payload_bytes);
        Ok(Reactor {
            ring,
            sockets: Sockets::new(TAG_SOCKET),
            members,
            jobs: Jobs::new(Arc::clone(&mailbox), config.gpu.clone())?,
            pumps: Pumps::default(),
            config,
            events,
            mailbox,
            wake,
            now,
            turns: 0,
            arrays: Vec::new(),
            listeners: Slab::new(),
            connections: Slab::new(),
            requests: Slab::new(),
            admin: HashMap::new(),
            next_admin: 0,
            longs: Slab::new(),
            memory,
            large: Large::default(),
            dirty: VecDeque::new(),
            later: Vec::new(),
            share: 0,
            active: 0,
            spent: Spent::default(),
            waiting: VecDeque::new(),
            waiting_told: None,
            touched: Vec::new(),
            urgent: false,
            next_turn_for_tls: false,
            actions: Vec::new(),
            last_tick: now,
            last_look: now,
            watchdog: Watchdog::from_environment(),
            stopping: None,
            unclean: Vec::new(),
        })
    }

    fn run(mut self) -> io::Result<()> {
        let mut events: Vec<RingEvent> = Vec::new();
        self.sockets.poll(&mut self.ring, &self.wake);
        loop {
            self.jobs.end_turn();
            let more = self.members.has_finished() || self.jobs.has_done();
            let work = !self.dirty.is_empty() || !self.later.is_empty() || !self.touched.is_empty();
            let wait = if more || work { None } else { Some(self.until_tick()) };
            let wait_max = self.watchdog.as_ref().map(Watchdog::wait_max);
            let wait = wait.map(|wait| wait_max.map_or(wait, |max| max.min(wait)));
            self.ring.enter(wait, &mut events)?;
            self.now = clock::now();
            self.turns += 1;
            drill::point("reactor");
            if let Some(watchdog) = &mut self.watchdog {
                watchdog.turn(self.now);
            }
            for event in events.drain(..) {
                self.dispatch(event);
            }
            self.members.pass_time(self.now);
            self.tick_if_due();
            self.work();
            self.progress_stops();
            if self.stopping.is_some_and(|since| self.may_end(since)) {
                // Last replies may still be on their way through TLS.
                self.pumps.wait(Duration::from_nanos(FAREWELL_NANOS));
                let unclean = std::mem::take(&mut self.unclean);
                return if unclean.is_empty() { Ok(()) } else { Err(io::Error::other(unclean.join("; "))) };
            }
        }
    }

    fn dispatch(&mut self, event: RingEvent) {
        if (event.user_data >> 32) as u32 == TAG_MEMBER {
            self.members.complete(&mut self.ring, event.user_data, event.result);
            return;
        }
        match self.sockets.complete(&mut self.ring, event.user_data, event.result) {
            None => {}
            Some(SocketEvent::Received { owner, buf, result }) => self.on_received(owner, buf, result),
            Some(SocketEvent::Sent { owner, message, result }) => self.on_sent(owner, message, result),
            Some(SocketEvent::Accepted { owner, result }) => self.on_accepted(owner, result),
            Some(SocketEvent::Readable) => {
                // An error means that somebody else was woken for it, which is just as well.
                let _ = self.mailbox.wake.read();
                for command in self.mailbox.take() {
                    self.command(command);
                }
                self.sockets.poll(&mut self.ring, &self.wake);
            }
        }
    }

    /// Lets connections parse and members' completions flow until there is nothing left, or enough to send; then
    /// sends.
    fn work(&mut self) {
        self.urgent = false;
        self.dirty.extend(self.later.drain(..));
        // As many as there were in the last turn, or have something to do already.
        self.share = turns::share(self.dirty.len().max(self.active));
        self.active = 0;
        self.spent = Spent::default();
        self.parse_dirty();
        let began = clock::now();
        let least = COMPLETION_NANOS_MIN.max(began.nanos_since(self.now) / 4);
        for _ in 0..COMPLETIONS_PER_TURN {
            if self.urgent && clock::now().nanos_since(began) >= least {
                break;
            }
            while let Some((array, coded)) = self.jobs.next_done() {
                self.step(array, VolumeEvent::Coded(coded));
            }
            match self.members.next_finished() {
                Some(done) => self.step(ArrayId(done.owner), VolumeEvent::Io(done.completion)),
                None if self.jobs.do_small() => {}
                None => break,
            }
            self.parse_dirty();
        }
        // Where completions never end, nothing else would do them.
        self.jobs.do_small();
        let mut touched = std::mem::take(&mut self.touched);
        for key in touched.drain(..) {
            if self.connections.contains(key) {
                self.settle(key);
            }
        }
        // Settling may have touched others.
        touched.append(&mut self.touched);
        self.touched = touched;
    }

    fn parse_dirty(&mut self) {
        while let Some(key) = self.dirty.pop_front() {
            self.parse(key);
        }
    }

    fn command(&mut self, command: Command) {
        // A reply nobody waits for any more is no loss.
        match command {
            Command::AddArray { id, array, reply } => {
                let _ = reply.send(self.add_array(id, array));
            }
            Command::Admin { array, request, devices, reply } => {
                self.admin_request(array, request, devices, reply);
            }
            Command::Check { array, request, reply } => {
                let _ = reply.send(self.check_request(array, &request));
            }
            Command::Status { array, reply } => {
                let _ = reply.send(self.facts(array));
            }
            Command::SetRules { array, rules, reply } => {
                let _ = reply.send(self.set_rules(array, rules));
            }
            Command::Peers { reply } => {
                let _ = reply.send(Ok(self.peers()));
            }
            Command::EndSessions { peers, anonymous, reply } => {
                let _ = reply.send(Ok(self.end_sessions(&peers, anonymous)));
            }
            Command::StopArray { array, reply } => self.begin_stop(array, Some(reply)),
            Command::Listen { listener } => self.add_listener(listener),
            Command::Shutdown => self.begin_shutdown(),
        }
    }

    /// The longest wait until the next tick.
    fn until_tick(&self) -> Duration {
        let pace = if self.is_busy() { TICK_BUSY } else { TICK_IDLE };
        let due = self.arrays.iter().flatten().filter_map(Hosted::due).min();
        due.map_or(pace, |due| pace.min(Duration::from_nanos(due.nanos_since(self.now))))
    }

    fn tick_if_due(&mut self) {
        let pace = if self.is_busy() { TICK_BUSY } else { TICK_IDLE }.as_nanos() as u64;
        let is_due = self.arrays.iter().flatten().filter_map(Hosted::due).any(|due| due <= self.now);
        if is_due || self.now.nanos_since(self.last_tick) >= pace {
            self.last_tick = self.now;
            for index in 0..self.arrays.len() {
                self.step(ArrayId(index as u32), VolumeEvent::Tick);
            }
            self.close_overdue();
            self.resume_listeners();
            self.resume_tls();
            self.report_vanished();
            self.leave_stragglers();
            self.clear_place();
            self.leave_waiting();
            self.leave_unheard();
        }
        if self.now.nanos_since(self.last_look) >= LOOK_NANOS {
            self.last_look = self.now;
            self.members.look_after_files(&mut self.ring);
        }
    }

    fn is_busy(&self) -> bool {
        self.stopping.is_some()
            || self.next_turn_for_tls
            || self.members.in_flight() > 0
            || !self.longs.is_empty()
            || self.arrays.iter().flatten().any(|array| array.is_busy(self.now))
    }

    fn begin_shutdown(&mut self) {
        if self.stopping.is_some() {
            return;
        }
        self.stopping = Some(self.now);
        self.close_listeners();
        for index in 0..self.arrays.len() {
            if self.arrays[index].is_some() {
                self.begin_stop(ArrayId(index as u32), None);
            }
        }
        self.close_unattached();
    }

    /// Whether all is said and done after a shutdown, or has taken too long.
    fn may_end(&self, since: Timestamp) -> bool {
        let quiet = self.arrays.iter().flatten().next().is_none()
            && self.connections.is_empty()
            && self.listeners.is_empty()
            && self.members.in_flight() == 0;
        quiet || self.now.nanos_since(since) > SHUTDOWN_NANOS_MAX
    }
}
