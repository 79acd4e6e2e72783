//! Each connection's shares: of each turn of the one thread, less where it overdrew the turn before; and of
//! the memory for payloads, for its requests and unread replies, however many others there are and whatever
//! they do.
//!
//! Invariants of time: a turn spends no more than [`TURN_NANOS`] on what clients ask, plus one request of
//! each connection that has sent no large ones of late; time left over is not saved, time overdrawn is owed.
//! So a small request waits for a turn or two, whatever the others send; a large one waits for as many turns
//! as all large ones take.
//!
//! Invariants of memory: with `n` clients none is given more than 1/n of the memory, and a single client at
//! most half of it; all together are given no more than there is, plus [`GUARANTEED`] bytes each, which
//! nobody can take from a client. So a client never waits for memory that another one holds: a request too
//! large for the rest is carried out in parts.
//!
//! Must not know connections, what requests are for, or what the memory holds.

use super::order::blocks_of;
use super::orders::ConnectionId;
use calpe_core::nbd::{Command, Request};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a turn spends on requests, in nanoseconds. Other clients, members and timers wait that long; a
/// shorter turn would make more system calls for the same requests.
const TURN_NANOS: i64 = 2_000_000;

/// Least share of a connection in a turn, in nanoseconds: several small requests. A hundred active
/// connections make a turn of 2 ms.
const SHARE_NANOS_MIN: i64 = 20_000;

/// Most turns whose shares are credited at once to a connection that owes time.
const TURNS_MAX: u64 = 1_000;

/// A request that costs more than this is a large one, in nanoseconds: some 200 KiB.
const LARGE_NANOS: i64 = 50_000;

/// Turns for which a large request is remembered. No large request waits longer for others.
const LARGE_TURNS: u64 = 64;

/// Most time charged for one step of a connection's work, in nanoseconds. No step takes so long by itself:
/// the thread was not running. A debt of some milliseconds would take seconds to pay while others flood.
const STEP_NANOS_MAX: i64 = 100_000;

/// What a connection may still spend in this turn.
#[derive(Clone, Copy, Debug, Default)]
struct Allowance {
    nanos: i64,
    turn: u64,
    /// The turn of its last large request.
    large: Option<u64>,
}

/// What all connections have spent of a turn, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Spent(i64);

/// The share of each of `connections` active ones, in nanoseconds.
fn share(connections: usize) -> i64 {
    (TURN_NANOS / connections.max(1) as i64).max(SHARE_NANOS_MIN)
}

impl Allowance {
    /// Gives it `share` in a turn. Returns whether it had none in that turn yet.
    fn renew(&mut self, turn: u64, share: i64) -> bool {
        let turns = (turn - self.turn).min(TURNS_MAX);
        if turns > 0 {
            self.turn = turn;
            self.nanos = self.nanos.saturating_add(share.saturating_mul(turns as i64)).min(share);
        }
        turns > 0
    }

    /// Charges it the cost of a request.
    fn spend(&mut self, nanos: i64, spent: &mut Spent) {
        self.charge(nanos, spent);
        if nanos > LARGE_NANOS {
            self.large = Some(self.turn);
        }
    }

    fn charge(&mut self, nanos: i64, spent: &mut Spent) {
        self.nanos -= nanos;
        spent.0 += nanos;
    }

    /// Charges it the time of a step.
    fn spend_time(&mut self, nanos: u64, spent: &mut Spent) {
        self.charge((nanos as i64).clamp(0, STEP_NANOS_MAX), spent);
    }

    /// Whether it waits for the next turn because this one is spent: it sends large requests, and small ones
    /// come first.
    fn yields(&self, spent: Spent) -> bool {
        spent.0 >= TURN_NANOS && self.large.is_some_and(|large| self.turn - large < LARGE_TURNS)
    }

    fn is_spent(&self) -> bool {
        self.nanos <= 0
    }
}

/// Cost of a request beyond the time in which it was taken, in nanoseconds: its completions, its batch, its
/// copies to and from sockets and members, and its hashes, at 4 GB/s. Rough, after the rates of one reactor:
/// 150,000 reads and 25,000 writes of 4 KiB a second.
fn later_cost(request: &Request) -> i64 {
    let fixed = match request.command {
        Command::Read => 4_000,
        Command::Write | Command::WriteZeroes | Command::Trim => 25_000,
        Command::Flush => 10_000,
        Command::BlockStatus | Command::Cache => 1_000,
    };
    let bytes = match request.command {
        Command::Read | Command::Write => request.length,
        _ => 0,
    };
    fixed + (bytes / 4) as i64
}

/// Part of a turn, as a divisor, for a connection that has not chosen an export: anyone can open one.
const STRANGERS_SHARE: i64 = 4;

/// Kinds of connections with different shares of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// A client of an array.
    Client,
    /// A connection that has chosen no export.
    Stranger,
}

/// One turn after the other: which connections are parsed in it and settled at its end, and how much each may
/// spend.
#[derive(Debug, Default)]
pub(super) struct Turn {
    number: u64,
    /// The share of each connection, in nanoseconds, and how many have begun to spend theirs.
    share: i64,
    active: usize,
    /// Spent by all.
    spent: Spent,
    /// Connections with something to parse.
    dirty: VecDeque<ConnectionId>,
    /// Connections that have used their share up.
    later: Vec<ConnectionId>,
    /// Connections to be settled at the end.
    touched: Vec<ConnectionId>,
    /// Enough is ready to be sent that it should leave before the turn goes on.
    urgent: bool,
    /// By connection.
    standings: Vec<Standing>,
}

/// A connection's state in the turn.
#[derive(Clone, Copy, Debug, Default)]
struct Standing {
    allowance: Allowance,
    /// Listed to be parsed.
    is_dirty: bool,
    /// Listed to be settled.
    is_touched: bool,
}

impl Turn {
    /// Number of turns so far.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The loop has turned.
    pub(super) fn count(&mut self) {
        self.number += 1;
    }

    /// Starts a turn: deals the time out again.
    pub(super) fn begin(&mut self) {
        self.urgent = false;
        self.dirty.extend(self.later.drain(..));
        // As many connections as in the last turn, or as many as already have something to do.
        self.share = share(self.dirty.len().max(self.active));
        self.active = 0;
        self.spent = Spent::default();
    }

    /// Whether connections are to be parsed or settled.
    pub(super) fn has_work(&self) -> bool {
        !self.dirty.is_empty() || !self.later.is_empty() || !self.touched.is_empty()
    }

    /// Adds a connection.
    pub(super) fn enter(&mut self, key: ConnectionId) {
        if self.standings.len() <= key.0 {
            self.standings.resize(key.0 + 1, Standing::default());
        }
        self.standings[key.0] = Standing::default();
    }

    /// Removes a connection; its number may be used again.
    pub(super) fn leave(&mut self, key: ConnectionId) {
        self.dirty.retain(|&dirty| dirty != key);
        self.later.retain(|&later| later != key);
        self.touched.retain(|&touched| touched != key);
    }

    /// Lists a connection to be parsed and settled in this turn.
    pub(super) fn mark(&mut self, key: ConnectionId) {
        let standing = &mut self.standings[key.0];
        if !standing.is_dirty {
            standing.is_dirty = true;
            self.dirty.push_back(key);
        }
        self.touch(key);
    }

    /// Lists a connection to be settled at the end of this turn.
    pub(super) fn touch(&mut self, key: ConnectionId) {
        let standing = &mut self.standings[key.0];
        if !standing.is_touched {
            standing.is_touched = true;
            self.touched.push(key);
        }
    }

    /// Lists a connection to be parsed in the next turn.
    pub(super) fn postpone(&mut self, key: ConnectionId) {
        let standing = &mut self.standings[key.0];
        if !standing.is_dirty {
            standing.is_dirty = true;
            self.later.push(key);
        }
    }

    /// The next connection with something to parse.
    pub(super) fn next_dirty(&mut self) -> Option<ConnectionId> {
        self.dirty.pop_front()
    }

    /// Begins to parse a connection: it gets its share, and is settled afterwards.
    pub(super) fn parses(&mut self, key: ConnectionId, class: Class) {
        // Also a connection continued from the last turn: if it turns out to have hung up, nothing else may
        // settle it.
        self.touch(key);
        let share = match class {
            Class::Client => self.share,
            Class::Stranger => self.share / STRANGERS_SHARE,
        };
        let standing = &mut self.standings[key.0];
        standing.is_dirty = false;
        self.active += usize::from(standing.allowance.renew(self.number, share));
    }

    /// Whether a connection has used its share up.
    pub(super) fn is_over_for(&self, key: ConnectionId) -> bool {
        let allowance = &self.standings[key.0].allowance;
        allowance.is_spent() || allowance.yields(self.spent)
    }

    /// Charges a connection the cost of a request beyond the time in which it is taken.
    pub(super) fn spend(&mut self, key: ConnectionId, request: &Request) {
        self.standings[key.0].allowance.spend(later_cost(request), &mut self.spent);
    }

    /// Charges a connection the time of a step.
    pub(super) fn spend_time(&mut self, key: ConnectionId, nanos: u64) {
        self.standings[key.0].allowance.spend_time(nanos, &mut self.spent);
    }

    /// Notes that enough is ready to be sent.
    pub(super) fn hurry(&mut self) {
        self.urgent = true;
    }

    /// Whether enough is ready to be sent that it should leave before the turn goes on.
    pub(super) fn is_urgent(&self) -> bool {
        self.urgent
    }

    /// Takes the connections to be settled. [`Turn::recycle`] takes the list back.
    pub(super) fn take_touched(&mut self) -> Vec<ConnectionId> {
        std::mem::take(&mut self.touched)
    }

    /// Takes an empty list back for reuse, and adds to it what was touched while others were settled.
    pub(super) fn recycle(&mut self, mut touched: Vec<ConnectionId>) {
        touched.append(&mut self.touched);
        self.touched = touched;
    }

    /// Begins to settle a connection.
    pub(super) fn settles(&mut self, key: ConnectionId) {
        self.standings[key.0].is_touched = false;
    }
}

/// Bytes that a client always has: a few small requests, or one part of a large request, long enough to be
/// worth a round trip.
pub(super) const GUARANTEED: usize = 64 << 10;

/// Most of the memory that one client gets, as a divisor, so that a second client finds some.
const CLIENTS_MIN: usize = 2;

/// Unit of the memory, in bytes: buffers are whole pages.
const PAGE: u64 = 4096;

/// Bytes charged for a request, from its arrival until its reply was sent: the pages of its payload, or those
/// around what it reads; both for a write that does not lie on blocks.
pub(super) fn charge_of(request: &Request) -> usize {
    let around = blocks_of(request, PAGE);
    let around = around.end - around.start;
    let bytes = match request.command {
        Command::Read => around,
        Command::Write if around == request.length => around,
        Command::Write => around + request.length.next_multiple_of(PAGE),
        Command::BlockStatus => return STATUS_BYTES,
        _ => 0,
    };
    bytes as usize
}

/// Bytes charged for a BLOCK_STATUS: the runs of its answer as they are gathered, or encoded.
pub(super) const STATUS_BYTES: usize = 32 << 10;

/// Memory that all clients hold, and may hold, whichever reactor serves them. Two reactors that take from it
/// at the same moment may both get the rest.
#[derive(Debug, Default)]
pub(super) struct Memory {
    bytes: AtomicUsize,
    taken: AtomicUsize,
    clients: AtomicUsize,
    /// Bytes that each reactor takes to spare; it gives back what is more than twice that.
    spare: usize,
}

impl Memory {
    /// Memory of this size for the clients of so many reactors.
    pub(super) fn new(bytes: usize, reactors: usize) -> Memory {
        let spare = (bytes / (2 * SPARES_PART * reactors.max(1))).min(SPARE);
        Memory { bytes: AtomicUsize::new(bytes), spare, ..Memory::default() }
    }

    /// Sets the number of clients that share it.
    fn set_clients(&self, clients: usize) {
        self.clients.store(clients, Ordering::Relaxed);
    }

    /// Bytes that a client may have in all.
    fn share(&self) -> usize {
        let clients = self.clients.load(Ordering::Relaxed).max(CLIENTS_MIN);
        (self.bytes.load(Ordering::Relaxed) / clients).max(GUARANTEED)
    }

    /// Bytes that a client which holds `held` may take now, where `spare` bytes are taken already.
    fn allowed(&self, held: usize, spare: usize) -> usize {
        let bytes = self.bytes.load(Ordering::Relaxed) + spare;
        let left = bytes.saturating_sub(self.taken.load(Ordering::Relaxed));
        let fair = self.share().saturating_sub(held).min(left);
        fair.max(GUARANTEED.saturating_sub(held))
    }

    /// Whether clients that hold more than their share keep others from theirs, where `spare` bytes of what
    /// is taken are held by none.
    fn is_scarce(&self, spare: usize) -> bool {
        let taken = self.taken.load(Ordering::Relaxed).saturating_sub(spare);
        taken + self.share() > self.bytes.load(Ordering::Relaxed)
    }

    /// Adds memory for one client alone.
    fn lend(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Takes lent memory away again.
    fn take_away(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn take(&self, bytes: usize) {
        self.taken.fetch_add(bytes, Ordering::Relaxed);
    }

    fn give_back(&self, bytes: usize) {
        self.taken.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Bytes that a reactor takes from the memory beside those that its clients need: what it has taken is
/// counted for all reactors together, and counting every request there would cost each core a cache miss.
const SPARE: usize = 64 << 10;

/// Part of the memory that all reactors together may keep to spare, as a divisor.
const SPARES_PART: usize = 16;

/// How much memory each connection of a reactor holds.
#[derive(Debug)]
pub(super) struct Accounts {
    memory: Arc<Memory>,
    /// By connection: bytes of its requests and unsent replies.
    held: Vec<usize>,
    /// Sum of `held`.
    held_by_all: usize,
    /// Bytes taken from the memory that no connection here holds, up to twice [`Memory::spare`]; none where
    /// none holds anything.
    spare: usize,
}

impl Accounts {
    /// Nobody holds any of the memory here yet.
    pub(super) fn new(memory: Arc<Memory>) -> Accounts {
        Accounts { memory, held: Vec::new(), held_by_all: 0, spare: 0 }
    }

    /// Adds a connection.
    pub(super) fn enter(&mut self, key: ConnectionId) {
        if self.held.len() <= key.0 {
            self.held.resize(key.0 + 1, 0);
        }
    }

    /// Removes a connection.
    pub(super) fn leave(&mut self, key: ConnectionId) {
        assert_eq!(self.held[key.0], 0, "memory of a client that is gone");
    }

    /// Sets the number of clients that share the memory.
    pub(super) fn set_clients(&self, clients: usize) {
        self.memory.set_clients(clients);
    }

    /// Bytes that a connection holds.
    pub(super) fn held(&self, key: ConnectionId) -> usize {
        self.held[key.0]
    }

    /// Bytes that a connection may take now.
    pub(super) fn allowed(&self, key: ConnectionId) -> usize {
        self.memory.allowed(self.held[key.0], self.spare)
    }

    /// Whether a connection holds more than its share and thereby keeps others from theirs.
    pub(super) fn is_hoarding(&self, key: ConnectionId) -> bool {
        self.memory.is_scarce(self.spare) && self.held[key.0] > self.memory.share()
    }

    /// Charges memory to a connection.
    pub(super) fn take(&mut self, key: ConnectionId, bytes: usize) {
        self.held[key.0] += bytes;
        self.held_by_all += bytes;
        if self.spare < bytes {
            let spare = self.memory.spare;
            self.memory.take(bytes - self.spare + spare);
            self.spare = bytes + spare;
        }
        self.spare -= bytes;
    }

    /// Gives back memory that was charged to a connection.
    pub(super) fn give_back(&mut self, key: ConnectionId, bytes: usize) {
        self.held[key.0] -= bytes;
        self.held_by_all -= bytes;
        self.spare += bytes;
        let kept = if self.held_by_all > 0 { self.memory.spare } else { 0 };
        if self.spare > 2 * kept {
            self.memory.give_back(self.spare - kept);
            self.spare = kept;
        }
    }

    /// Adds memory for one client alone.
    pub(super) fn lend(&mut self, bytes: usize) {
        self.memory.lend(bytes);
    }

    /// Takes lent memory away again.
    pub(super) fn take_away(&mut self, bytes: usize) {
        self.memory.take_away(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn what_is_overdrawn_is_owed_and_what_is_left_is_not_saved() {
        let mut allowance = Allowance::default();
        let spent = &mut Spent::default();
        allowance.renew(5, 1000);
        assert!(!allowance.is_spent());
        allowance.spend(2500, spent);
        assert!(allowance.is_spent());
        allowance.renew(5, 1000);
        allowance.renew(6, 1000);
        assert!(allowance.is_spent(), "500 are owed");
        allowance.renew(7, 1000);
        allowance.spend(499, spent);
        assert!(!allowance.is_spent());
        allowance.renew(500, 1000);
        allowance.spend(1000, spent);
        assert!(allowance.is_spent(), "one share, however long it did nothing");
        assert_eq!(spent.0, 2500 + 499 + 1000);
        assert_eq!((share(0), share(1), share(50), share(1000)), (2_000_000, 2_000_000, 40_000, 20_000));
    }

    #[test]
    fn large_requests_yield_to_small_ones_in_a_turn_that_is_spent_and_not_for_ever() {
        let (mut small, mut large) = (Allowance::default(), Allowance::default());
        let mut spent = Spent::default();
        [&mut small, &mut large].into_iter().for_each(|allowance| _ = allowance.renew(1, 20_000));
        large.spend(300_000, &mut spent);
        small.spend(30_000, &mut spent);
        assert!(!large.yields(spent), "the turn is not spent");
        Allowance::default().spend(TURN_NANOS, &mut spent);
        assert!(!small.yields(spent) && large.yields(spent));
        large.renew(1 + LARGE_TURNS - 1, 20_000);
        assert!(large.yields(spent));
        large.renew(1 + LARGE_TURNS, 20_000);
        assert!(!large.yields(spent), "it has waited long enough");
    }

    /// The thread may lose its core in the middle of anybody's step, for many times a turn.
    #[test]
    fn nobody_owes_for_long_what_the_thread_was_not_running() {
        let mut allowance = Allowance::default();
        allowance.renew(1, 20_000);
        allowance.spend_time(50_000_000, &mut Spent::default());
        assert!(allowance.is_spent());
        allowance.renew(6, 20_000);
        assert!(!allowance.is_spent() && !allowance.yields(Spent(TURN_NANOS)));
    }

    #[test]
    fn one_client_gets_half_and_a_hundred_a_hundredth_each() {
        let memory = Memory::new(128 * MIB, 1);
        memory.set_clients(1);
        assert_eq!(memory.allowed(0, 0), 64 * MIB);
        memory.take(64 * MIB);
        assert_eq!(memory.allowed(64 * MIB, 0), 0);
        memory.set_clients(100);
        assert_eq!(memory.allowed(0, 0), 128 * MIB / 100);
        assert_eq!(memory.allowed(64 * MIB, 0), 0);
        memory.take(64 * MIB);
        assert_eq!(memory.allowed(0, 0), GUARANTEED);
        assert_eq!(memory.allowed(GUARANTEED - 1, 0), 1);
        assert!(memory.is_scarce(0));
    }

    #[test]
    fn a_request_counts_as_the_pages_it_takes() {
        let charge = |command, offset, length| charge_of(&Request::new(command, offset, length));
        assert_eq!(charge(Command::Read, 4096, 8192), 8192);
        assert_eq!(charge(Command::Read, 512, 512), 4096);
        assert_eq!(charge(Command::Read, 4000, 1200), 8192);
        assert_eq!(charge(Command::Write, 0, 4096), 4096);
        assert_eq!(charge(Command::Write, 4095, 2), 8192 + 4096);
        assert_eq!(charge(Command::Trim, 0, 1 << 30), 0);
    }

    proptest! {
        /// Reactors that take and give back in any order.
        #[test]
        fn what_reactors_keep_to_spare_is_bounded_and_is_theirs(
            steps in prop::collection::vec((0..3usize, 0..2usize, 0..400usize), 0..300),
        ) {
            let memory = Arc::new(Memory::new(MIB, 3));
            memory.set_clients(6);
            let mut reactors: Vec<Accounts> = (0..3).map(|_| Accounts::new(Arc::clone(&memory))).collect();
            reactors.iter_mut().for_each(|accounts| (0..2).for_each(|key| accounts.enter(ConnectionId(key))));
            for (reactor, key, pages) in steps {
                let (accounts, key) = (&mut reactors[reactor], ConnectionId(key));
                match pages * 4096 {
                    bytes if pages < 200 => accounts.take(key, bytes.min(accounts.allowed(key))),
                    bytes => accounts.give_back(key, (bytes / 2).min(accounts.held(key))),
                }
                let held: usize = reactors.iter().flat_map(|accounts| &accounts.held).sum();
                let spare: usize = reactors.iter().map(|accounts| accounts.spare).sum();
                prop_assert_eq!(memory.taken.load(Ordering::Relaxed), held + spare);
                prop_assert!(held <= MIB + 6 * GUARANTEED && spare <= MIB / SPARES_PART);
                for accounts in &reactors {
                    prop_assert_eq!(accounts.held_by_all, accounts.held.iter().sum::<usize>());
                    prop_assert!(accounts.spare <= 2 * memory.spare);
                    prop_assert!(accounts.held_by_all > 0 || accounts.spare == 0);
                }
            }
        }

        /// Greedy clients that come one after the other and give nothing back.
        #[test]
        fn all_together_have_no_more_than_there_is_and_each_its_guarantee(
            bytes in 0..200 * MIB, takes in prop::collection::vec(0..300usize, 0..2000),
        ) {
            let memory = Memory::new(bytes, 1);
            let mut held = vec![0; 300];
            for (at, client) in takes.into_iter().enumerate() {
                memory.set_clients((at / 4 + 1).min(300));
                let client = client % (at / 4 + 1).min(300);
                let take = memory.allowed(held[client], 0);
                prop_assert!(held[client] > 0 || take >= GUARANTEED);
                memory.take(take);
                held[client] += take;
            }
            let all: usize = held.iter().sum();
            prop_assert!(all <= bytes + GUARANTEED * held.iter().filter(|held| **held > 0).count());
        }
    }
}
