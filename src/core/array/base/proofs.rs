//! What of a device under construction was built before an unclean stop, and whether it is still there: slots
//! that have to be compared, that are being compared, and that are built once more. Must not know how a slot
//! is compared (`passes/walk/prove.rs`) or built.

use crate::array::mutation::{Mutation, is_off};
use crate::units::{SlotIndex, Timestamp};
use std::collections::BTreeSet;
use std::ops::Range;

/// See the head of this file.
#[derive(Clone, Debug, Default)]
pub(in crate::array) struct Proofs {
    /// Not compared yet.
    left: Range<u64>,
    under_way: BTreeSet<u64>,
    /// Could not be compared for a shortage of this host, and are tried again.
    again: BTreeSet<u64>,
    /// When the next slot may be compared, and since when none could be.
    not_before: Timestamp,
    unknown_since: Option<Timestamp>,
    /// Do not hold what they are to hold, and are to be built once more.
    failed: BTreeSet<u64>,
    /// Are being built once more.
    rebuilding: BTreeSet<u64>,
    is_announced: bool,
    is_told: bool,
}

/// What comparing a slot with its checksums has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) enum Proof {
    /// The device has what it is to have.
    Holds,
    /// It does not, or does not give it.
    Fails,
    /// It was not compared.
    Unknown,
}

/// What follows for the build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) enum Consequence {
    Nothing,
    /// Everything from the slot on is built once more: too much of it is not this device's build any more.
    Rewind,
}

/// Most slots that are built once more one by one.
const FAILED_MAX: usize = 1024;
/// After a shortage, the time until the next slot is compared.
/// Less than makes the next shortage a new one, which would be told again.
const AGAIN_NS: u64 = 500_000_000;
/// How long a shortage may last before slots are built once more instead.
const PATIENCE_NS: u64 = 30_000_000_000;

impl Proofs {
    /// For a device that is built up to `rebuilt`. `is_proven`: it holds what it is to hold.
    pub(super) fn of(rebuilt: SlotIndex, is_proven: bool) -> Proofs {
        let is_proven = is_proven || is_off(Mutation::BelievesWhatWasBuilt);
        Proofs { left: if is_proven { 0..0 } else { 0..rebuilt.0 }, ..Proofs::default() }
    }

    /// The slot to be compared next.
    pub(super) fn next(&self, now: Timestamp) -> Option<u64> {
        let next = || self.again.first().copied().or_else(|| self.left.clone().next());
        (now >= self.not_before).then(next).flatten()
    }

    /// Records that a slot, which was the next, is being compared.
    pub(in crate::array) fn begin(&mut self, slot: u64) {
        if !self.again.remove(&slot) {
            self.left.start = slot + 1;
        }
        self.under_way.insert(slot);
    }

    /// Takes the outcome for a slot that was being compared.
    pub(super) fn end(&mut self, slot: u64, outcome: Proof, now: Timestamp) -> Consequence {
        self.under_way.remove(&slot);
        match outcome {
            Proof::Holds => self.unknown_since = None,
            Proof::Unknown => {
                self.not_before = Timestamp(now.0 + AGAIN_NS);
                // It proves nothing of the slots that follow.
                let is_built = self.is_impatient(now) && self.failed.len() < FAILED_MAX;
                let list = if is_built { &mut self.failed } else { &mut self.again };
                list.insert(slot);
            }
            Proof::Fails if self.failed.len() < FAILED_MAX => _ = self.failed.insert(slot),
            Proof::Fails => return Consequence::Rewind,
        }
        Consequence::Nothing
    }

    fn is_impatient(&mut self, now: Timestamp) -> bool {
        now.nanos_since(*self.unknown_since.get_or_insert(now)) >= PATIENCE_NS
    }

    /// Forgets the slots from this one on: they are built anew.
    pub(super) fn rewind_to(&mut self, slot: u64) {
        self.left.end = self.left.end.min(slot);
        self.again.retain(|of| *of < slot);
        self.failed.retain(|of| *of < slot);
    }

    /// The slot to be built once more next.
    pub(in crate::array) fn due(&self) -> Option<u64> {
        self.failed.first().copied()
    }

    /// Whether the slot is known to be wrong, and not built yet.
    pub(in crate::array) fn has_failed(&self, slot: u64) -> bool {
        self.failed.contains(&slot) || self.rebuilding.contains(&slot)
    }

    /// Records that a slot is being built, if it is once more.
    pub(super) fn begin_build(&mut self, slot: u64) -> bool {
        let is_again = self.failed.remove(&slot);
        if is_again {
            self.rebuilding.insert(slot);
        }
        is_again
    }

    /// Takes the end of the build of a slot. False: it was not one that is built once more.
    pub(super) fn end_build(&mut self, slot: u64, complete: bool) -> bool {
        let was_again = self.rebuilding.remove(&slot);
        if was_again && !complete {
            self.failed.insert(slot);
        }
        was_again
    }

    /// Whether the slot is being built once more.
    pub(super) fn is_rebuilding(&self, slot: u64) -> bool {
        self.rebuilding.contains(&slot)
    }

    /// Whether every slot was compared, and those that failed are built.
    pub(in crate::array) fn are_over(&self) -> bool {
        self.first_open().is_none()
    }

    /// The first slot of which that is not so.
    pub(super) fn first_open(&self) -> Option<u64> {
        let sets = [&self.under_way, &self.again, &self.failed, &self.rebuilding];
        sets.iter().filter_map(|set| set.first().copied()).chain(self.left.clone().next()).min()
    }

    /// How many slots are open.
    pub(in crate::array) fn open(&self) -> u64 {
        let sets = [&self.under_way, &self.again, &self.failed, &self.rebuilding];
        let listed: usize = sets.iter().map(|set| set.len()).sum();
        self.left.end.saturating_sub(self.left.start) + listed as u64
    }

    /// Whether it was not told yet that slots are compared. From then on it counts as told.
    pub(in crate::array) fn announce(&mut self) -> bool {
        !std::mem::replace(&mut self.is_announced, true)
    }

    /// Whether it was not told yet that slots of the device failed. From then on it counts as told.
    pub(in crate::array) fn tell(&mut self) -> bool {
        !std::mem::replace(&mut self.is_told, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn compare(proofs: &mut Proofs, outcome: Proof, now: u64) -> (u64, Consequence) {
        let now = Timestamp(now);
        let slot = proofs.next(now).expect("a slot");
        proofs.begin(slot);
        (slot, proofs.end(slot, outcome, now))
    }

    #[test]
    fn every_slot_is_compared_once_and_those_that_fail_are_built() {
        let mut proofs = Proofs::of(SlotIndex(4), false);
        let outcomes = [Proof::Holds, Proof::Fails, Proof::Holds, Proof::Holds];
        for (at, outcome) in (0..).zip(outcomes) {
            assert_eq!(compare(&mut proofs, outcome, 0), (at, Consequence::Nothing));
        }
        assert_eq!((proofs.next(Timestamp(0)), proofs.due(), proofs.open()), (None, Some(1), 1));
        assert!(proofs.begin_build(1) && proofs.due().is_none() && !proofs.are_over());
        assert!(proofs.end_build(1, false) && proofs.begin_build(1) && proofs.end_build(1, true));
        assert!(proofs.are_over() && !proofs.begin_build(1) && !proofs.end_build(1, true));
    }

    #[test]
    fn after_a_shortage_a_slot_is_tried_again_soon_and_no_two_times_at_once() {
        let mut proofs = Proofs::of(SlotIndex(2), false);
        assert_eq!(compare(&mut proofs, Proof::Unknown, 0).0, 0);
        assert_eq!(proofs.next(Timestamp(SECOND / 2 - 1)), None);
        proofs.begin(proofs.next(Timestamp(SECOND / 2)).expect("the slot"));
        assert_eq!(proofs.next(Timestamp(SECOND / 2)), Some(1), "0 is being compared");
    }

    #[test]
    fn a_shortage_that_does_not_end_has_slots_built_once_more() {
        let mut proofs = Proofs::of(SlotIndex(1), false);
        for second in 0..30 {
            assert_eq!(compare(&mut proofs, Proof::Unknown, second * SECOND), (0, Consequence::Nothing));
            assert_eq!(proofs.due(), None);
        }
        compare(&mut proofs, Proof::Unknown, 30 * SECOND);
        assert_eq!((proofs.due(), proofs.next(Timestamp(99 * SECOND))), (Some(0), None));
    }

    #[test]
    fn a_long_shortage_costs_no_more_than_the_slots_that_it_meets() {
        let mut proofs = Proofs::of(SlotIndex(5000), false);
        for second in 0..3000 {
            let (_, consequence) = compare(&mut proofs, Proof::Unknown, second * SECOND);
            assert_eq!(consequence, Consequence::Nothing);
        }
        assert_eq!((proofs.open(), proofs.failed.len()), (5000, FAILED_MAX));
    }

    #[test]
    fn with_many_that_fail_all_that_follow_are_built() {
        let mut proofs = Proofs::of(SlotIndex(5000), false);
        for at in 0..FAILED_MAX as u64 {
            assert_eq!(compare(&mut proofs, Proof::Fails, 0), (at, Consequence::Nothing));
        }
        let (slot, consequence) = compare(&mut proofs, Proof::Fails, 0);
        assert_eq!(consequence, Consequence::Rewind);
        proofs.rewind_to(slot);
        assert_eq!((proofs.next(Timestamp(0)), proofs.open()), (None, FAILED_MAX as u64));
    }
}
