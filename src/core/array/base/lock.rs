//! Row locks of stripes and slots, in memory: writers exclude each other and decoding readers on overlapping
//! rows.
//!
//! Invariant: a waiter is granted only when it conflicts with no holder and no earlier waiter of its key, so
//! no request starves and requests on one row run in the order they came. Must not know what the holders do.

use crate::units::{SlotIndex, StripeIndex};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::ops::Range;

/// The operation that holds or waits.
pub(super) type OwnerKey = usize;

/// What is locked: rows of a stripe, in whichever slot it is, or rows of a slot, whatever it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::array) enum LockKey {
    /// For requests of clients.
    Stripe(StripeIndex),
    /// For operations that write to a slot without a stripe, or that need its content unchanged.
    Slot(SlotIndex),
}

/// What a lock excludes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) enum LockMode {
    /// Readers that need the row unchanged.
    Shared,
    /// Writers.
    Exclusive,
}

#[derive(Debug)]
struct Claim {
    owner: OwnerKey,
    rows: Range<usize>,
    mode: LockMode,
}

impl Claim {
    fn conflicts(&self, other: &Claim) -> bool {
        (self.mode == LockMode::Exclusive || other.mode == LockMode::Exclusive)
            && self.rows.start < other.rows.end
            && other.rows.start < self.rows.end
    }
}

#[derive(Debug, Default)]
struct Claims {
    holders: Vec<Claim>,
    waiters: VecDeque<Claim>,
}

/// All locks.
#[derive(Debug, Default)]
pub(in crate::array) struct LockTable {
    claims: FxHashMap<LockKey, Claims>,
    /// Emptied entries, kept so that a lone writer does not allocate.
    spare: Vec<Claims>,
}

/// Emptied entries worth keeping: about the number of slots written at one time.
const SPARE_MAX: usize = 256;

impl LockTable {
    /// Claims `rows` (bytes within the chunk) of `key`. True: granted now; false: `owner` comes out of a
    /// later [`LockTable::release`]. One owner claims a key at most once.
    pub(in crate::array) fn acquire(
        &mut self,
        key: LockKey,
        rows: Range<usize>,
        mode: LockMode,
        owner: OwnerKey,
    ) -> bool {
        let spare = &mut self.spare;
        let locks = self.claims.entry(key).or_insert_with(|| spare.pop().unwrap_or_default());
        let claim = Claim { owner, rows, mode };
        let blocked = locks.holders.iter().any(|h| h.conflicts(&claim))
            || locks.waiters.iter().any(|w| w.conflicts(&claim));
        if blocked {
            locks.waiters.push_back(claim);
        } else {
            locks.holders.push(claim);
        }
        !blocked
    }

    /// Gives up `owner`'s claim on `key`, held or awaited, and pushes the owners that are granted now.
    pub(super) fn release(&mut self, key: LockKey, owner: OwnerKey, granted: &mut Vec<OwnerKey>) {
        let Some(locks) = self.claims.get_mut(&key) else {
            debug_assert!(false, "release of what is not locked");
            return;
        };
        locks.holders.retain(|h| h.owner != owner);
        locks.waiters.retain(|w| w.owner != owner);
        let mut at = 0;
        while at < locks.waiters.len() {
            let waiter = &locks.waiters[at];
            let blocked = locks.holders.iter().any(|h| h.conflicts(waiter))
                || locks.waiters.iter().take(at).any(|w| w.conflicts(waiter));
            if blocked {
                at += 1;
            } else if let Some(claim) = locks.waiters.remove(at) {
                granted.push(claim.owner);
                locks.holders.push(claim);
            }
        }
        if locks.holders.is_empty() && locks.waiters.is_empty() {
            let empty = self.claims.remove(&key);
            if let Some(empty) = empty
                && self.spare.len() < SPARE_MAX
            {
                self.spare.push(empty);
            }
        }
    }

    /// Whether `owner` has been granted its claim on `key`.
    pub(in crate::array) fn is_held(&self, key: LockKey, owner: OwnerKey) -> bool {
        self.claims.get(&key).is_some_and(|locks| locks.holders.iter().any(|claim| claim.owner == owner))
    }

    /// Whether nothing is locked.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LockMode::{Exclusive, Shared};

    const KEY: LockKey = LockKey::Stripe(StripeIndex(7));

    #[test]
    fn disjoint_rows_and_shared_claims_do_not_wait() {
        let mut table = LockTable::default();
        assert!(table.acquire(KEY, 0..4096, Exclusive, 1));
        assert!(table.acquire(KEY, 4096..8192, Exclusive, 2));
        assert!(table.acquire(LockKey::Stripe(StripeIndex(8)), 0..8192, Exclusive, 3));
        assert!(table.acquire(KEY, 8192..12288, Shared, 4));
        assert!(table.acquire(KEY, 8192..12288, Shared, 5));
    }

    #[test]
    fn waiters_are_granted_in_order_and_not_overtaken() {
        let mut table = LockTable::default();
        let mut granted = Vec::new();
        assert!(table.acquire(KEY, 0..4096, Shared, 1));
        assert!(!table.acquire(KEY, 0..8192, Exclusive, 2));
        assert!(!table.acquire(KEY, 0..4096, Shared, 3), "a reader must not overtake the waiting writer");
        assert!(!table.acquire(KEY, 4096..8192, Exclusive, 4));
        table.release(KEY, 1, &mut granted);
        assert_eq!(granted, [2]);
        granted.clear();
        table.release(KEY, 2, &mut granted);
        assert_eq!(granted, [3, 4]);
    }

    #[test]
    fn giving_up_a_wait_lets_the_next_in_and_leaves_nothing() {
        let mut table = LockTable::default();
        let mut granted = Vec::new();
        assert!(table.acquire(KEY, 0..10, Shared, 1));
        assert!(!table.acquire(KEY, 0..10, Exclusive, 2));
        assert!(!table.acquire(KEY, 0..10, Shared, 3));
        table.release(KEY, 2, &mut granted);
        assert_eq!(granted, [3]);
        table.release(KEY, 1, &mut granted);
        table.release(KEY, 3, &mut granted);
        assert!(table.is_empty());
    }
}
