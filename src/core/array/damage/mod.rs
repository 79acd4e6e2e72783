//! Blocks that the array could not serve, with the reason known for each. The status and the health of a
//! stripe come from this list, and the array itself looks again at the blocks in it.
//!
//! The list remembers what requests, passes and replays met since the start, and what an earlier run has
//! listed; blocks that are not in it may be damaged all the same. What an earlier run has listed is not
//! asserted before this run has confirmed it: it may have been mended just before that run was killed. The
//! list never decides the content of a block: the block's entry and its content do (rule T1 of the
//! crash-safety design). Must not know of I/O.

mod lacking;
pub(in crate::array) mod looks;

use crate::array::Array;
use crate::array::blocks::{BlockName, Missing, Why};
use crate::array::geometry::Map;
use crate::format::MemberSet;
use crate::units::{MemberIndex, ROW_BYTES, StripeIndex, VolumeOffset};
use lacking::Lacking;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Bound, Range};

/// Most blocks that are remembered; beyond that, "and more" is all a person needs.
const BLOCKS_MAX: usize = 65_536;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Damage {
    blocks: BTreeMap<BlockName, Why>,
    /// Listed blocks that an earlier run has listed, and that this one has not looked at.
    expected: BTreeSet<BlockName>,
    /// Listed blocks that have to be looked at soon, because they may have changed.
    due: BTreeSet<BlockName>,
    /// Listed blocks that only an earlier run has seen: no look at them in this run had a clear result.
    unconfirmed: BTreeSet<BlockName>,
    /// Blocks that are being looked at, with what was noted of each since: the list may have no room for
    /// them.
    watched: BTreeMap<BlockName, Option<Why>>,
    /// Members with another device than when blocks of theirs were listed: looks at these blocks on the new
    /// device are not over.
    exchanged: MemberSet,
    /// Slots that devices in service may lack blocks of.
    lacking: Lacking,
    /// Number of changes of the list.
    revision: u64,
}

impl Damage {
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether there is no room for more: blocks that are not listed may then be damaged too.
    pub(super) fn is_full(&self) -> bool {
        self.blocks.len() >= BLOCKS_MAX
    }

    /// Takes the blocks of a stripe that a fetch could not get. A block that is known to be beyond repair
    /// stays so until it was read or written: it is nothing new that it cannot be read now, or was set aside.
    pub(super) fn note(&mut self, stripe: StripeIndex, missing: &[Missing]) {
        for &Missing { column, row, why } in missing {
            let block = (stripe, column as u16, row as u32);
            let before = self.blocks.get(&block).copied();
            let tells = why != Why::Unreadable || before.is_none_or(|before| !before.is_beyond_repair());
            self.revision += u64::from(tells && self.unconfirmed.remove(&block));
            let why = match (before, why) {
                (Some(before), Why::Unreadable) if before.is_beyond_repair() => before,
                (Some(Why::Proven | Why::Gone), Why::SetAside) => Why::Gone,
                _ => why,
            };
            self.blocks.insert(block, why);
            if let Some(noted) = self.watched.get_mut(&block) {
                *noted = Some(why);
            }
            self.revision += u64::from(before != Some(why));
        }
        while self.blocks.len() > BLOCKS_MAX {
            let last = self.blocks.pop_last();
            if let Some((block, _)) = last {
                self.unconfirmed.remove(&block);
                self.looked_at(block);
            }
        }
    }

    /// Sets the blocks that are about to be looked at; no others are.
    pub(super) fn watch(&mut self, blocks: impl Iterator<Item = BlockName>) {
        self.watched = blocks.map(|block| (block, None)).collect();
    }

    /// The result of a look at a watched block; none where the block can be had.
    pub(super) fn seen(&self, block: BlockName) -> Option<Why> {
        self.why(block).or_else(|| self.watched.get(&block).copied().flatten())
    }

    /// A number that changes whenever the list does.
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    /// Adds a block that an earlier run has listed, and whether that run called it beyond repair. It is
    /// listed as such until it is looked at.
    pub(super) fn expect(&mut self, stripe: StripeIndex, column: usize, row: usize, is_beyond_repair: bool) {
        let why = if is_beyond_repair { Why::Proven } else { Why::Unreadable };
        let block = (stripe, column as u16, row as u32);
        let is_seen = self.blocks.contains_key(&block) && !self.unconfirmed.contains(&block);
        self.note(stripe, &[Missing { column, row, why }]);
        if !self.blocks.contains_key(&block) {
            return;
        }
        self.expected.insert(block);
        if !is_seen {
            self.unconfirmed.insert(block);
        }
    }

    /// Whether nothing is known of the block except from an earlier run.
    pub(super) fn is_unconfirmed(&self, block: BlockName) -> bool {
        self.unconfirmed.contains(&block)
    }

    /// Whether everything known of the block is from an earlier run, and this run has not looked at it.
    pub(super) fn is_expected(&self, block: BlockName) -> bool {
        self.expected.contains(&block)
    }

    /// Has everything that is listed looked at soon.
    pub(super) fn look_at_all(&mut self) {
        self.due.extend(self.blocks.keys());
    }

    /// Records that the member has another device: listed blocks are looked at again on that.
    pub(super) fn exchange(&mut self, member: MemberIndex) {
        self.exchanged.insert(member);
        self.look_at_all();
    }

    /// Whether the member has another device, on which not all listed blocks were looked at yet.
    fn is_exchanged(&self, member: MemberIndex) -> bool {
        self.exchanged.contains(member)
    }

    /// Records that everything was looked at since devices were exchanged.
    pub(super) fn forget_exchanges(&mut self) {
        self.exchanged = MemberSet::new();
    }

    /// Has the block, which is listed, looked at soon.
    pub(super) fn look_at(&mut self, block: BlockName) {
        self.due.insert(block);
    }

    /// Whether blocks have to be looked at soon: those marked so, and those that an earlier run has listed.
    pub(super) fn has_due(&self) -> bool {
        !self.expected.is_empty() || !self.due.is_empty()
    }

    /// Some of those, at most `count`. Each stays due until [`Damage::looked_at`].
    pub(super) fn some_due(&mut self, count: usize) -> Vec<(BlockName, Why)> {
        let due = self.expected.iter().chain(self.due.difference(&self.expected));
        due.take(count).map(|block| (*block, self.blocks[block])).collect()
    }

    /// Records that the block was looked at, whatever the result.
    pub(super) fn looked_at(&mut self, block: BlockName) {
        self.expected.remove(&block);
        self.due.remove(&block);
    }

    /// Why a block cannot be had; none for one that can, as far as is known.
    pub(super) fn why(&self, block: BlockName) -> Option<Why> {
        self.blocks.get(&block).copied()
    }

    /// Takes a block off the list that was read, or written.
    pub(super) fn forget(&mut self, block: BlockName) {
        self.unconfirmed.remove(&block);
        if let Some(noted) = self.watched.get_mut(&block) {
            *noted = None;
        }
        self.looked_at(block);
        self.revision += u64::from(self.blocks.remove(&block).is_some());
    }

    /// Takes blocks of a column off the list that were read, or written.
    pub(super) fn forget_rows(&mut self, stripe: StripeIndex, column: u16, rows: Range<u32>) {
        self.forget_range((stripe, column, rows.start)..(stripe, column, rows.end));
    }

    /// Takes all blocks of a stripe off the list, since nothing of it is needed any more.
    pub(super) fn forget_stripe(&mut self, stripe: StripeIndex) {
        self.forget_range(names_in(stripe));
    }

    fn forget_range(&mut self, names: Range<BlockName>) {
        self.watched.range_mut(names.clone()).for_each(|(_, noted)| *noted = None);
        let known: Vec<BlockName> = self.blocks.range(names).map(|(&block, _)| block).collect();
        for block in known {
            self.forget(block);
        }
    }

    /// Every block, ascending.
    pub(super) fn iter(&self) -> impl Iterator<Item = (BlockName, Why)> + '_ {
        self.blocks.iter().map(|(&block, &why)| (block, why))
    }

    /// The blocks of a stripe, ascending.
    pub(super) fn of_stripe(&self, stripe: StripeIndex) -> impl Iterator<Item = (BlockName, Why)> + '_ {
        self.blocks.range(names_in(stripe)).map(|(&block, &why)| (block, why))
    }

    /// Up to `count` blocks behind `after`, or from the beginning where there is none.
    pub(super) fn next(&self, after: Option<BlockName>, count: usize) -> Vec<(BlockName, Why)> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let behind = self.blocks.range((start, Bound::Unbounded)).take(count);
        let found: Vec<(BlockName, Why)> = behind.map(|(&block, &why)| (block, why)).collect();
        if found.is_empty() { self.iter().take(count).collect() } else { found }
    }
}

/// The names of all blocks of a stripe.
fn names_in(stripe: StripeIndex) -> Range<BlockName> {
    (stripe, 0, 0)..(StripeIndex(stripe.0 + 1), 0, 0)
}

impl Damage {
    /// Blocks that could not be had in this run, as byte ranges of the volume.
    pub(super) fn ranges(&self, map: &Map, is_wanted: impl Fn(Why) -> bool) -> Vec<(VolumeOffset, u64)> {
        self.ranges_of(map, |block, why| is_wanted(why) && !self.is_unconfirmed(block))
    }

    /// Blocks that an earlier run called beyond repair, and of which nothing else is known.
    pub(super) fn unconfirmed_lost_ranges(&self, map: &Map) -> Vec<(VolumeOffset, u64)> {
        self.ranges_of(map, |block, why| why.is_beyond_repair() && self.is_unconfirmed(block))
    }

    fn ranges_of(&self, map: &Map, is_wanted: impl Fn(BlockName, Why) -> bool) -> Vec<(VolumeOffset, u64)> {
        let mut ranges: Vec<(VolumeOffset, u64)> = Vec::new();
        for (block, why) in self.iter() {
            let (stripe, column, row) = block;
            if usize::from(column) >= map.k || !is_wanted(block, why) {
                continue;
            }
            let within = usize::from(column) * map.chunk + row as usize * ROW_BYTES as usize;
            let start = stripe.0 * map.stripe_bytes() as u64 + within as u64;
            match ranges.last_mut() {
                Some((offset, len)) if offset.0 + *len == start => *len += ROW_BYTES,
                _ => ranges.push((VolumeOffset(start), ROW_BYTES)),
            }
        }
        ranges
    }

    /// Adds byte ranges that an earlier run has listed, of a volume of `bytes` bytes.
    fn expect_ranges(
        &mut self,
        map: &Map,
        volume_bytes: u64,
        ranges: &[(VolumeOffset, u64)],
        is_beyond_repair: bool,
    ) {
        let (chunk, stripe_bytes) = (map.chunk as u64, map.stripe_bytes() as u64);
        let parts = ranges.iter().flat_map(|&(start, len)| {
            let first = start.0 / ROW_BYTES * ROW_BYTES;
            let end = start.0.saturating_add(len).min(volume_bytes);
            (first..end).step_by(ROW_BYTES as usize)
        });
        for at in parts.take(BLOCKS_MAX) {
            let within = at % stripe_bytes;
            let (column, row) = ((within / chunk) as usize, (within % chunk / ROW_BYTES) as usize);
            let stripe = StripeIndex(at / stripe_bytes);
            self.expect(stripe, column, row, is_beyond_repair);
        }
    }

    /// A number that changes whenever the list does, or the slots that devices lack.
    fn listed_revision(&self) -> u64 {
        self.revision().wrapping_add(self.lacking.revision())
    }
}

impl Array {
    /// Blocks that an earlier run could not read, and of which nothing else is known, not even that their
    /// checksums cannot be read.
    pub(super) fn unconfirmed_ranges(&self) -> Vec<(VolumeOffset, u64)> {
        let told = self.damage.ranges_of(&self.core.map, |block, why| {
            !why.is_beyond_repair() && self.damage.is_unconfirmed(block)
        });
        if told.is_empty() { told } else { without(&told, &self.unreadable_ranges()) }
    }

    /// Parts of the volume that cannot be read for now: blocks that could not be had, and blocks whose
    /// checksums are in metadata pages that cannot be read. Blocks that are beyond repair, even if only by an
    /// earlier run, or set aside, are left out, so that each block counts once.
    pub(super) fn unreadable_ranges(&self) -> Vec<(VolumeOffset, u64)> {
        let mut parts = self.damage.ranges(&self.core.map, |why| why == Why::Unreadable);
        let behind_pages = self.pages.ranges_given_up(&self.core.map);
        if behind_pages.is_empty() {
            return parts;
        }
        parts.extend(behind_pages);
        parts.sort_unstable_by_key(|(start, _)| start.0);
        let mut ranges: Vec<(VolumeOffset, u64)> = Vec::new();
        for (start, len) in parts {
            match ranges.last_mut() {
                Some((first, whole)) if first.0 + *whole >= start.0 => {
                    *whole = (*whole).max(start.0 + len - first.0);
                }
                _ => ranges.push((start, len)),
            }
        }
        // Where only an earlier run knows of a block, it is left out only if that run called it beyond
        // repair.
        without(&ranges, &self.damage.ranges_of(&self.core.map, |_, why| why != Why::Unreadable))
    }

    /// Ranges that cannot be read, and may be readable with the device of a member that is out.
    pub(super) fn ranges_that_need(&self, member: MemberIndex) -> Vec<(VolumeOffset, u64)> {
        self.damage.ranges_of(&self.core.map, |(stripe, column, _), why| match why {
            Why::Unreadable => true,
            Why::SetAside | Why::Gone => {
                self.core.member_at(self.pages.map_entry(stripe).slot, usize::from(column)) == member
            }
            Why::Lost | Why::Proven => false,
        })
    }

    /// Ranges that cannot be read and lie on a member in service, or are set aside there.
    pub(super) fn ranges_on(&self, member: MemberIndex) -> Vec<(VolumeOffset, u64)> {
        self.damage.ranges_of(&self.core.map, |(stripe, column, _), why| {
            matches!(why, Why::Unreadable | Why::SetAside | Why::Gone)
                && self.core.member_at(self.pages.map_entry(stripe).slot, usize::from(column)) == member
        })
    }

    /// The members that have blocks of the volume which are set aside. A member whose device came after that,
    /// and was not looked at yet, is not known to have any.
    pub(super) fn set_aside_on(&self) -> MemberSet {
        let is_looked_at = self.damage.has_due() || !self.looks.is_idle();
        let is_new = |member: &MemberIndex| is_looked_at && self.damage.is_exchanged(*member);
        let of_data = self.set_aside_places().filter(|(column, _)| *column < self.core.map.k);
        of_data.map(|(_, member)| member).filter(|member| !is_new(member)).collect()
    }

    /// The column and the member of each block that is set aside.
    pub(super) fn set_aside_places(&self) -> impl Iterator<Item = (usize, MemberIndex)> {
        let aside = self.damage.iter().filter(|(_, why)| *why == Why::SetAside);
        aside.map(|((stripe, column, _), _)| {
            let column = usize::from(column);
            (column, self.core.member_at(self.pages.map_entry(stripe).slot, column))
        })
    }

    /// Takes byte ranges of the volume that could not be had in an earlier run, and whether that run knew
    /// them to be beyond repair. They are listed as unconfirmed, and looked at as soon as the array serves.
    /// Ranges that this volume does not have are left out.
    pub fn expect_damage(&mut self, ranges: &[(VolumeOffset, u64)], is_beyond_repair: bool) {
        let volume_bytes = self.core.shape.geometry.volume_bytes;
        self.damage.expect_ranges(&self.core.map, volume_bytes, ranges, is_beyond_repair);
    }

    /// A number that changes whenever the list of blocks that could not be had does.
    #[must_use]
    pub fn damage_revision(&self) -> u64 {
        self.damage.listed_revision().wrapping_add(self.pages.given_up_revision())
    }
}

/// Ranges without those parts that are in `others`; both ascend.
fn without(ranges: &[(VolumeOffset, u64)], others: &[(VolumeOffset, u64)]) -> Vec<(VolumeOffset, u64)> {
    let mut left = Vec::new();
    let mut others = others.iter().peekable();
    for &(VolumeOffset(mut at), len) in ranges {
        let end = at + len;
        while others.next_if(|(other, len)| other.0 + len <= at).is_some() {}
        // The last of those that begin within it may reach into the next range.
        while let Some(&&(VolumeOffset(other), len)) = others.peek().filter(|(other, _)| other.0 < end) {
            if at < other {
                left.push((VolumeOffset(at), other - at));
            }
            at = other + len;
            if at >= end {
                break;
            }
            others.next();
        }
        if at < end {
            left.push((VolumeOffset(at), end - at));
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(column: usize, row: usize, why: Why) -> Missing {
        Missing { column, row, why }
    }

    #[test]
    fn parts_in_other_ranges_are_left_out_and_the_rest_stays() {
        let at = |parts: &[(u64, u64)]| -> Vec<_> {
            parts.iter().map(|&(start, len)| (VolumeOffset(start), len)).collect()
        };
        let ranges = at(&[(10, 10), (30, 10), (50, 5)]);
        for (others, left) in [
            (&[][..], &[(10, 10), (30, 10), (50, 5)][..]),
            (&[(10, 10)], &[(30, 10), (50, 5)]),
            (&[(0, 12), (14, 2), (19, 12)], &[(12, 2), (16, 3), (31, 9), (50, 5)]),
            (&[(15, 40)], &[(10, 5)]),
            (&[(0, 5), (5, 5), (20, 10), (40, 10), (55, 5)], &[(10, 10), (30, 10), (50, 5)]),
            (&[(31, 1), (33, 1), (52, 100)], &[(10, 10), (30, 1), (32, 1), (34, 6), (50, 2)]),
        ] {
            assert_eq!(without(&ranges, &at(others)), at(left), "{others:?}");
        }
    }

    #[test]
    fn the_result_of_a_look_is_known_even_where_the_list_is_full() {
        let mut damage = Damage::default();
        for stripe in 0..(BLOCKS_MAX / 64) as u64 {
            let all: Vec<_> = (0..64).map(|row| missing(0, row, Why::Lost)).collect();
            damage.note(StripeIndex(stripe), &all);
        }
        let block = (StripeIndex(1 << 40), 1, 2);
        damage.watch([block].into_iter());
        assert_eq!(damage.seen(block), None);
        damage.note(block.0, &[missing(1, 2, Why::SetAside)]);
        assert_eq!((damage.why(block), damage.seen(block)), (None, Some(Why::SetAside)));
        damage.forget_stripe(block.0);
        assert_eq!(damage.seen(block), None);
    }

    #[test]
    fn blocks_that_were_read_or_written_are_forgotten_and_the_rest_stays() {
        let mut damage = Damage::default();
        let stripe = StripeIndex(3);
        damage.note(
            stripe,
            &[missing(0, 1, Why::SetAside), missing(0, 2, Why::Proven), missing(1, 2, Why::Lost)],
        );
        let neighbours = [StripeIndex(2), StripeIndex(4)];
        damage.note(neighbours[0], &[missing(1, 9, Why::Unreadable)]);
        damage.note(neighbours[1], &[missing(0, 0, Why::Unreadable)]);
        damage.forget_rows(stripe, 0, 2..9);
        let left: Vec<BlockName> = damage.iter().map(|(block, _)| block).collect();
        let others = [(neighbours[0], 1, 9), (neighbours[1], 0, 0)];
        assert_eq!(left, [others[0], (stripe, 0, 1), (stripe, 1, 2), others[1]]);
        damage.forget_stripe(stripe);
        assert_eq!(damage.of_stripe(stripe).count(), 0);
        let left: Vec<BlockName> = damage.iter().map(|(block, _)| block).collect();
        assert_eq!(left, others);
        damage.forget(others[0]);
        damage.forget(others[1]);
        assert!(damage.is_empty());
    }

    #[test]
    fn blocks_that_an_earlier_run_listed_are_expected_until_they_are_looked_at_read_or_written() {
        let mut damage = Damage::default();
        let stripe = StripeIndex(1);
        (0..4).for_each(|row| damage.expect(stripe, 0, row, false));
        let before = damage.revision();
        damage.forget((stripe, 0, 0));
        assert_ne!(damage.revision(), before);
        damage.looked_at((stripe, 0, 1));
        let rows = |damage: &mut Damage, count| -> Vec<u32> {
            damage.some_due(count).into_iter().map(|(block, _)| block.2).collect()
        };
        assert_eq!((rows(&mut damage, 1), rows(&mut damage, 9)), (vec![2], vec![2, 3]));
        assert!(damage.is_expected((stripe, 0, 2)) && !damage.is_expected((stripe, 0, 1)));
        assert_eq!(damage.iter().count(), 3, "a look alone does not mend");
        damage.note(stripe, &[missing(0, 1, Why::Unreadable)]);
        let before = damage.revision();
        damage.note(stripe, &[missing(0, 1, Why::Unreadable)]);
        assert_eq!(damage.revision(), before, "nothing new");
        damage.note(stripe, &[missing(0, 1, Why::Proven)]);
        assert_ne!(damage.revision(), before);
        damage.forget_stripe(stripe);
        assert!(damage.some_due(9).is_empty() && !damage.has_due());
    }

    #[test]
    fn a_block_that_is_due_is_looked_at_once_and_counts_as_seen() {
        let mut damage = Damage::default();
        let stripe = StripeIndex(1);
        (0..3).for_each(|row| damage.note(stripe, &[missing(0, row, Why::Unreadable)]));
        assert!(!damage.has_due());
        damage.look_at_all();
        damage.note(stripe, &[missing(0, 3, Why::Unreadable)]);
        damage.expect(stripe, 0, 1, false);
        let rows: Vec<u32> = damage.some_due(9).iter().map(|(block, _)| block.2).collect();
        assert_eq!(rows, [1, 0, 2], "what an earlier run has told of comes first");
        assert!(!damage.is_expected((stripe, 0, 0)) && damage.is_expected((stripe, 0, 1)));
        damage.looked_at((stripe, 0, 0));
        damage.forget((stripe, 0, 2));
        assert_eq!(damage.some_due(9).len(), 1);
        damage.looked_at((stripe, 0, 1));
        assert!(!damage.has_due() && damage.iter().count() == 3);
    }

    #[test]
    fn a_block_that_an_earlier_run_listed_is_confirmed_only_by_a_clear_result() {
        let mut damage = Damage::default();
        let stripe = StripeIndex(1);
        let unconfirmed = |damage: &Damage| -> Vec<u32> {
            (0..5).filter(|row| damage.is_unconfirmed((stripe, 0, *row))).collect()
        };
        damage.note(stripe, &[missing(0, 4, Why::Lost)]);
        (0..2).for_each(|row| damage.expect(stripe, 0, row, true));
        (0..5).for_each(|row| damage.expect(stripe, 0, row, false));
        assert_eq!(unconfirmed(&damage), [0, 1, 2, 3], "what this run has seen needs no confirmation");
        let before = damage.revision();
        damage.note(stripe, &[missing(0, 0, Why::Unreadable)]);
        damage.looked_at((stripe, 0, 0));
        assert_eq!((unconfirmed(&damage), damage.revision()), (vec![0, 1, 2, 3], before), "it may be good");
        damage.note(stripe, &[missing(0, 1, Why::Proven), missing(0, 2, Why::Unreadable)]);
        assert_eq!(unconfirmed(&damage), [0, 3]);
        assert_ne!(damage.revision(), before);
        damage.forget((stripe, 0, 0));
        damage.forget_stripe(stripe);
        damage.note(stripe, &[missing(0, 3, Why::Proven)]);
        assert!(unconfirmed(&damage).is_empty());
    }

    #[test]
    fn a_block_beyond_repair_stays_so_until_it_was_read_or_written() {
        let mut damage = Damage::default();
        let stripe = StripeIndex(1);
        damage.expect(stripe, 0, 0, true);
        damage.note(
            stripe,
            &[missing(0, 1, Why::Proven), missing(0, 2, Why::Lost), missing(0, 3, Why::Unreadable)],
        );
        let all = |damage: &Damage| -> Vec<Why> { damage.iter().map(|(_, why)| why).collect() };
        let known = [Why::Proven, Why::Proven, Why::Lost, Why::Unreadable];
        assert_eq!(all(&damage), known);
        (0..4).for_each(|row| damage.note(stripe, &[missing(0, row, Why::Unreadable)]));
        assert_eq!(all(&damage), known, "that it cannot be read now says nothing new");
        (0..4).for_each(|row| damage.note(stripe, &[missing(0, row, Why::SetAside)]));
        assert_eq!(all(&damage), [Why::Gone, Why::Gone, Why::SetAside, Why::SetAside]);
        (0..4).for_each(|row| damage.forget((stripe, 0, row)));
        (0..4).for_each(|row| damage.note(stripe, &[missing(0, row as usize, Why::Unreadable)]));
        assert_eq!(all(&damage), [Why::Unreadable; 4]);
    }

    #[test]
    fn blocks_take_turns() {
        let mut damage = Damage::default();
        let blocks: Vec<Missing> = (0..5).map(|row| missing(0, row, Why::SetAside)).collect();
        damage.note(StripeIndex(0), &blocks);
        let rows =
            |blocks: Vec<(BlockName, Why)>| blocks.iter().map(|(block, _)| block.2).collect::<Vec<_>>();
        assert_eq!(rows(damage.next(None, 3)), [0, 1, 2]);
        assert_eq!(rows(damage.next(Some((StripeIndex(0), 0, 2)), 3)), [3, 4]);
        assert_eq!(rows(damage.next(Some((StripeIndex(0), 0, 4)), 3)), [0, 1, 2]);
    }
}
