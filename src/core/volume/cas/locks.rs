//! Which blocks of the volumes are being changed: a change of a block begins when the one before has joined
//! the journal, in the order in which they came.
//!
//! Invariant: ranges that are held do not overlap, and none that waits overlaps a held one for longer than
//! that is held.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// See the head of this file. Blocks are numbered over all volumes.
#[derive(Default)]
pub(super) struct BlockLocks {
    /// First block of each held range, and its end.
    held: BTreeMap<u64, u64>,
    waiting: VecDeque<(Range<u64>, usize)>,
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

impl BlockLocks {
    /// Whether the range is held now; otherwise `key` waits for it.
    pub(super) fn lock(&mut self, range: Range<u64>, key: usize) -> bool {
        if self.is_held(&range) || self.waiting.iter().any(|(other, _)| overlap(other, &range)) {
            self.waiting.push_back((range, key));
            return false;
        }
        self.held.insert(range.start, range.end);
        true
    }

    /// Ranges that are held or waited for.
    pub(super) fn len(&self) -> usize {
        self.held.len() + self.waiting.len()
    }

    fn is_held(&self, range: &Range<u64>) -> bool {
        self.held.range(..range.end).next_back().is_some_and(|(_, &end)| end > range.start)
    }

    /// Gives a range back. Returns those that hold theirs now.
    pub(super) fn unlock(&mut self, range: &Range<u64>) -> Vec<usize> {
        let end = self.held.remove(&range.start);
        debug_assert_eq!(end, Some(range.end), "a range is given back as it was locked");
        let mut granted = Vec::new();
        let mut at = 0;
        while let Some((waiting, key)) = self.waiting.get(at).cloned() {
            let is_first = !self.waiting.iter().take(at).any(|(other, _)| overlap(other, &waiting));
            if is_first && !self.is_held(&waiting) {
                self.held.insert(waiting.start, waiting.end);
                self.waiting.remove(at);
                granted.push(key);
            } else {
                at += 1;
            }
        }
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_ranges_take_turns_in_their_order() {
        let mut locks = BlockLocks::default();
        assert!(locks.lock(0..10, 1) && locks.lock(10..20, 2));
        assert!(!locks.lock(5..15, 3));
        assert!(!locks.lock(14..16, 4), "not before the one that came first");
        assert!(locks.lock(20..21, 5));
        assert!(locks.unlock(&(0..10)).is_empty());
        assert_eq!(locks.unlock(&(10..20)), [3]);
        assert_eq!(locks.unlock(&(5..15)), [4]);
        assert!(locks.unlock(&(14..16)).is_empty() && locks.unlock(&(20..21)).is_empty());
        assert!(locks.held.is_empty());
    }
}
