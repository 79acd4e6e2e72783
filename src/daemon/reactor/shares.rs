//! What each connection gets: of the one thread's time a share of each turn, where one that used more has less of the
//! next; of the memory for payloads what its requests and unread replies may take, however many others there are and
//! whatever they do.
//!
//! Invariants of time: a turn spends no more than [`TURN_NANOS`] on what clients ask, and one request of each connection
//! beyond it that has sent no large ones of late; what is left over is not saved, what was overdrawn is owed. So a small
//! request waits for a turn or two, whatever the others send; a large one waits for as many turns as all large ones take.
//!
//! Invariants of memory: with `n` clients none is given more than 1/n of the memory, or half of it where there is but
//! one; all together are given no more than there is, but for [`GUARANTEED`] bytes each, which nobody can take from a
//! client. So a client waits for no memory but its own: what is too large for the rest is carried out in parts.
//!
//! Must not know connections, what requests are for, or what the memory holds.

use super::order::blocks_of;
use super::orders::ConnectionId;
use calpe_core::nbd::{Command, Request};
use std::collections::VecDeque;

/// What a turn spends on requests, in nanoseconds. Other clients, members and timers wait for so
/// long; a shorter turn would make more system calls for the same requests.
const TURN_NANOS: i64 = 2_000_000;

/// What a connection gets of a turn at least: several small requests. A hundred connections at work make a turn of 2 ms.
const SHARE_NANOS_MIN: i64 = 20_000;

/// Turns whose shares are remembered against what is owed.
const TURNS_MAX: u64 = 1_000;

/// A request that costs more than this is a large one, in nanoseconds: some 200 KiB.
const LARGE_NANOS: i64 = 50_000;

/// Turns for which that is remembered. No large request waits longer for others.
const LARGE_TURNS: u64 = 64;

/// What one step of a connection's work is charged at most as its time, in nanoseconds. No step takes so long by itself: the
/// thread was not running. A debt of some milliseconds would take seconds to pay while others flood.
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

/// The share of each of so many connections with something to do.
fn share(connections: usize) -> i64 {
    (TURN_NANOS / connections.max(1) as i64).max(SHARE_NANOS_MIN)
}

impl Allowance {
    /// In this turn it gets `share`. Returns whether that is news.
    fn renew(&mut self, turn: u64, share: i64) -> bool {
        let turns = (turn - self.turn).min(TURNS_MAX);
        if turns > 0 {
            self.turn = turn;
            self.nanos = self.nanos.saturating_add(share.saturating_mul(turns as i64)).min(share);
        }
        turns > 0
    }

    /// Spends what a request costs.
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

    /// Spends the time that a step has taken.
    fn spend_time(&mut self, nanos: u64, spent: &mut Spent) {
        self.charge((nanos as i64).clamp(0, STEP_NANOS_MAX), spent);
    }

    /// Whether it waits for the next turn, since this one is spent: it sends large requests, and small ones come first.
    fn yields(&self, spent: Spent) -> bool {
        spent.0 >= TURN_NANOS && self.large.is_some_and(|large| self.turn - large < LARGE_TURNS)
    }

    fn is_spent(&self) -> bool {
        self.nanos <= 0
    }
}

/// What a request costs beyond the time in which it was taken, in nanoseconds: its completions, its batch, its copies to and from
/// sockets and members, and its hashes, at 4 GB/s. Rough, after the rates of one reactor: 150,000 reads and 25,000
/// writes of 4 KiB a second.
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

/// Part of a turn, as a divisor, of a client that has not chosen an export: whoever can connect can be one.
const STRANGERS_SHARE: i64 = 4;

/// Whom work is done for, as far as shares of a turn go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// A client of an array.
    Client,
    /// A connection that has chosen no export.
    Stranger,
}

/// One turn after the other: which connections are to be parsed in it and settled at its end, and what each may spend.
#[derive(Debug, Default)]
pub(super) struct Turn {
    number: u64,
    /// What each connection may spend, in nanoseconds, and how many have begun to.
    share: i64,
    active: usize,
    /// What all have spent.
    spent: Spent,
    /// Connections with something to parse.
    dirty: VecDeque<ConnectionId>,
    /// Those that have had their share.
    later: Vec<ConnectionId>,
    /// Connections to be settled at the end.
    touched: Vec<ConnectionId>,
    /// There is enough to send that it should leave before the turn goes on.
    urgent: bool,
    /// By connection.
    standings: Vec<Standing>,
}

/// How a connection stands with the turn.
#[derive(Clone, Copy, Debug, Default)]
struct Standing {
    allowance: Allowance,
    /// Listed to be parsed.
    is_dirty: bool,
    /// Listed to be settled.
    is_touched: bool,
}

impl Turn {
    /// How many turns there were.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The loop has turned.
    pub(super) fn count(&mut self) {
        self.number += 1;
    }

    /// Deals the time out anew.
    pub(super) fn begin(&mut self) {
        self.urgent = false;
        self.dirty.extend(self.later.drain(..));
        // As many as there were in the last turn, or have something to do already.
        self.share = share(self.dirty.len().max(self.active));
        self.active = 0;
        self.spent = Spent::default();
    }

    /// Whether connections are to be parsed or settled.
    pub(super) fn has_work(&self) -> bool {
        !self.dirty.is_empty() || !self.later.is_empty() || !self.touched.is_empty()
    }

    /// A new connection.
    pub(super) fn enter(&mut self, key: ConnectionId) {
        if self.standings.len() <= key.0 {
            self.standings.resize(key.0 + 1, Standing::default());
        }
        self.standings[key.0] = Standing::default();
    }

    /// A connection is gone, and its number may be used again.
    pub(super) fn leave(&mut self, key: ConnectionId) {
        self.dirty.retain(|&dirty| dirty != key);
        self.later.retain(|&later| later != key);
        self.touched.retain(|&touched| touched != key);
    }

    /// Has a connection parsed and settled in this turn.
    pub(super) fn mark(&mut self, key: ConnectionId) {
        let standing = &mut self.standings[key.0];
        if !standing.is_dirty {
            standing.is_dirty = true;
            self.dirty.push_back(key);
        }
        self.touch(key);
    }

    /// Has a connection settled at the end of this turn.
    pub(super) fn touch(&mut self, key: ConnectionId) {
        let standing = &mut self.standings[key.0];
        if !standing.is_touched {
            standing.is_touched = true;
            self.touched.push(key);
        }
    }

    /// Has a connection parsed in the next turn.
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

    /// A connection is parsed: it gets its share, and is settled afterwards.
    pub(super) fn parses(&mut self, key: ConnectionId, class: Class) {
        // Also one that is gone on with from the last turn: if it is seen to have hung up, nothing else may settle it.
        self.touch(key);
        let share = match class {
            Class::Client => self.share,
            Class::Stranger => self.share / STRANGERS_SHARE,
        };
        let standing = &mut self.standings[key.0];
        standing.is_dirty = false;
        self.active += usize::from(standing.allowance.renew(self.number, share));
    }

    /// Whether a connection has had its share.
    pub(super) fn is_over_for(&self, key: ConnectionId) -> bool {
        let allowance = &self.standings[key.0].allowance;
        allowance.is_spent() || allowance.yields(self.spent)
    }

    /// A connection spends what a request costs beyond the time in which it is taken.
    pub(super) fn spend(&mut self, key: ConnectionId, request: &Request) {
        self.standings[key.0].allowance.spend(later_cost(request), &mut self.spent);
    }

    /// A connection spends the time that a step has taken.
    pub(super) fn spend_time(&mut self, key: ConnectionId, nanos: u64) {
        self.standings[key.0].allowance.spend_time(nanos, &mut self.spent);
    }

    /// There is enough to send.
    pub(super) fn hurry(&mut self) {
        self.urgent = true;
    }

    /// Whether there is enough to send that it should leave before the turn goes on.
    pub(super) fn is_urgent(&self) -> bool {
        self.urgent
    }

    /// Takes the connections to be settled. [`Turn::recycle`] takes the list back.
    pub(super) fn take_touched(&mut self) -> Vec<ConnectionId> {
        std::mem::take(&mut self.touched)
    }

    /// Takes back an empty list, for those that were touched while others were settled.
    pub(super) fn recycle(&mut self, mut touched: Vec<ConnectionId>) {
        touched.append(&mut self.touched);
        self.touched = touched;
    }

    /// A connection is settled.
    pub(super) fn settles(&mut self, key: ConnectionId) {
        self.standings[key.0].is_touched = false;
    }
}

/// Bytes that a client always has: a few small requests, or a part of a large one that is worth its trip.
pub(super) const GUARANTEED: usize = 64 << 10;

/// Most of the memory that one client gets, as a divisor, so that a second one finds some.
const CLIENTS_MIN: usize = 2;

/// What memory comes in, in bytes: buffers are whole pages.
const PAGE: u64 = 4096;

/// Bytes of memory that a request counts as, from its arrival until its reply was sent: the pages of its payload, or those
/// around what it reads; of a write that does not lie on blocks both.
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

/// Memory that a BLOCK_STATUS counts as, in bytes: the runs of its answer as they are gathered, or encoded.
pub(super) const STATUS_BYTES: usize = 32 << 10;

/// What all clients of a reactor have, and may have.
#[derive(Debug)]
struct Memory {
    bytes: usize,
    taken: usize,
    clients: usize,
}

impl Memory {
    fn new(bytes: usize) -> Memory {
        Memory { bytes, taken: 0, clients: 0 }
    }

    /// So many clients share it.
    fn set_clients(&mut self, clients: usize) {
        self.clients = clients;
    }

    /// Bytes that a client may have in all.
    fn share(&self) -> usize {
        (self.bytes / self.clients.max(CLIENTS_MIN)).max(GUARANTEED)
    }

    /// Bytes that a client may take now that has `held` of them.
    fn allowed(&self, held: usize) -> usize {
        let fair = self.share().saturating_sub(held).min(self.bytes.saturating_sub(self.taken));
        fair.max(GUARANTEED.saturating_sub(held))
    }

    /// Whether clients that hold more than their share keep others from theirs.
    fn is_scarce(&self) -> bool {
        self.taken + self.share() > self.bytes
    }

    /// There is more, for one client alone.
    fn lend(&mut self, bytes: usize) {
        self.bytes += bytes;
    }

    /// What was lent is gone again.
    fn take_away(&mut self, bytes: usize) {
        self.bytes -= bytes;
    }

    fn take(&mut self, bytes: usize) {
        self.taken += bytes;
    }

    fn give_back(&mut self, bytes: usize) {
        self.taken -= bytes;
    }
}

/// Which connection has how much of the memory.
#[derive(Debug)]
pub(super) struct Accounts {
    memory: Memory,
    /// By connection: bytes of its requests and unsent replies.
    held: Vec<usize>,
}

impl Accounts {
    /// `bytes`: what there is for all.
    pub(super) fn new(bytes: usize) -> Accounts {
        Accounts { memory: Memory::new(bytes), held: Vec::new() }
    }

    /// A new connection.
    pub(super) fn enter(&mut self, key: ConnectionId) {
        if self.held.len() <= key.0 {
            self.held.resize(key.0 + 1, 0);
        }
    }

    /// A connection is gone.
    pub(super) fn leave(&mut self, key: ConnectionId) {
        assert_eq!(self.held[key.0], 0, "memory of a client that is gone");
    }

    /// So many clients share the memory.
    pub(super) fn set_clients(&mut self, clients: usize) {
        self.memory.set_clients(clients);
    }

    /// Bytes that a connection has.
    pub(super) fn held(&self, key: ConnectionId) -> usize {
        self.held[key.0]
    }

    /// Bytes that a connection may take now.
    pub(super) fn allowed(&self, key: ConnectionId) -> usize {
        self.memory.allowed(self.held[key.0])
    }

    /// Whether a connection keeps more than its share while that keeps others from theirs.
    pub(super) fn is_hoarding(&self, key: ConnectionId) -> bool {
        self.memory.is_scarce() && self.held[key.0] > self.memory.share()
    }

    /// Charges memory to a connection.
    pub(super) fn take(&mut self, key: ConnectionId, bytes: usize) {
        self.held[key.0] += bytes;
        self.memory.take(bytes);
    }

    /// Gives back what was charged to a connection.
    pub(super) fn give_back(&mut self, key: ConnectionId, bytes: usize) {
        self.held[key.0] -= bytes;
        self.memory.give_back(bytes);
    }

    /// There is more, for one client alone.
    pub(super) fn lend(&mut self, bytes: usize) {
        self.memory.lend(bytes);
    }

    /// What was lent is gone again.
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

    /// The thread may be taken off its core in the middle of anybody's step, for many times a turn.
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
        let mut memory = Memory::new(128 * MIB);
        memory.set_clients(1);
        assert_eq!(memory.allowed(0), 64 * MIB);
        memory.take(64 * MIB);
        assert_eq!(memory.allowed(64 * MIB), 0);
        memory.set_clients(100);
        assert_eq!(memory.allowed(0), 128 * MIB / 100);
        assert_eq!(memory.allowed(64 * MIB), 0);
        memory.take(64 * MIB);
        assert_eq!(memory.allowed(0), GUARANTEED);
        assert_eq!(memory.allowed(GUARANTEED - 1), 1);
        assert!(memory.is_scarce());
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
        /// Greedy clients that come one after the other and give nothing back.
        #[test]
        fn all_together_have_no_more_than_there_is_and_each_its_guarantee(
            bytes in 0..200 * MIB, takes in prop::collection::vec(0..300usize, 0..2000),
        ) {
            let mut memory = Memory::new(bytes);
            let mut held = vec![0; 300];
            for (at, client) in takes.into_iter().enumerate() {
                memory.set_clients((at / 4 + 1).min(300));
                let client = client % (at / 4 + 1).min(300);
                let take = memory.allowed(held[client]);
                prop_assert!(held[client] > 0 || take >= GUARANTEED);
                memory.take(take);
                held[client] += take;
            }
            let all: usize = held.iter().sum();
            prop_assert!(all <= bytes + GUARANTEED * held.iter().filter(|held| **held > 0).count());
        }
    }
}
