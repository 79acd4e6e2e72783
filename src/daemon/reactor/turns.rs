//! Time of the one thread, dealt out to connections: each gets its share of a turn, and one that
//! used more has less of the next.
//!
//! Invariants: a turn spends no more than [`TURN_NANOS`] on what clients ask, and one request of each connection beyond it that
//! has sent no large ones of late; what is left over is not saved, what was overdrawn is owed. So a small request waits for a
//! turn or two, whatever the others send; a large one waits for as many turns as all large ones take. Must not know what
//! requests are.

use calpe_core::nbd::{Command, Request};

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
pub(super) struct Allowance {
    nanos: i64,
    turn: u64,
    /// The turn of its last large request.
    large: Option<u64>,
}

/// What all connections have spent of a turn, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spent(i64);

/// The share of each of so many connections with something to do.
pub(super) fn share(connections: usize) -> i64 {
    (TURN_NANOS / connections.max(1) as i64).max(SHARE_NANOS_MIN)
}

impl Allowance {
    /// In this turn it gets `share`. Returns whether that is news.
    pub(super) fn renew(&mut self, turn: u64, share: i64) -> bool {
        let turns = (turn - self.turn).min(TURNS_MAX);
        if turns > 0 {
            self.turn = turn;
            self.nanos = self.nanos.saturating_add(share.saturating_mul(turns as i64)).min(share);
        }
        turns > 0
    }

    /// Spends what a request costs.
    pub(super) fn spend(&mut self, nanos: i64, spent: &mut Spent) {
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
    pub(super) fn spend_time(&mut self, nanos: u64, spent: &mut Spent) {
        self.charge((nanos as i64).clamp(0, STEP_NANOS_MAX), spent);
    }

    /// Whether it waits for the next turn, since this one is spent: it sends large requests, and small ones come first.
    pub(super) fn yields(&self, spent: Spent) -> bool {
        spent.0 >= TURN_NANOS && self.large.is_some_and(|large| self.turn - large < LARGE_TURNS)
    }

    pub(super) fn is_spent(&self) -> bool {
        self.nanos <= 0
    }
}

/// What a request costs beyond the time in which it was taken, in nanoseconds: its completions, its batch, its copies to and from
/// sockets and members, and its hashes, at 4 GB/s. Rough, after the rates of one reactor: 150,000 reads and 25,000
/// writes of 4 KiB a second.
pub(super) fn later_cost(request: &Request) -> i64 {
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
