//! Places of members in service that could not be read, or held wrong bytes, and the consequences for the
//! members (rule T5 of the crash-safety design): the last copy is never thrown out for read errors.
//!
//! A place that was since read without error, or written, is listed no more and does not count. What counts
//! are places that are bad now, places that went bad again after they were written and were not read without
//! error since, and reads of which not one succeeds. The places of a member that has too many are looked at
//! again one by one. The member leaves only if they are still bad then, or go bad again at that very time,
//! and if every row and page that is listed for the others stays readable without it. Where that is not so,
//! or not known because a list is full, the member is kept, and the status says so.
//!
//! Invariant: a list holds places of the member's device in service only. Must not know of I/O, nor what
//! reads are for.

use crate::array::mutation::{Mutation, is_off};
use crate::format::PageIndex;
use crate::units::{ByteOffset, MemberIndex, ROW_BYTES, Timestamp};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// Errors that a member may have: a disk with some bad sectors goes on serving, one that decays leaves.
pub(super) const ERRORS_MAX: u64 = 256;

/// How long a member must have more than that: errors that end by themselves within this time take no member
/// out.
const EXCESS_NS: u64 = 10_000_000_000;

/// Time between two looks at the places of a member that is kept.
const PROBE_INTERVAL_NS: u64 = 60_000_000_000;

/// Places that are looked at again at one time: few enough that clients do not notice.
const PROBES_AT_ONCE: usize = 32;

/// Most places that are listed for a member; beyond that it is not known which rows are bad on it.
const LISTED_MAX: usize = 4096;

/// Most mended places that are listed for a member, to recognise one that fails again.
const MENDED_MAX: usize = 4096;

/// Places that went bad again within this time count without a look: they are rewritten, so a look shows
/// nothing.
const RECENT_NS: u64 = 2_000_000_000;

/// Time in which looks at content can begin after the last one was asked for.
const LOOKS_END_NS: u64 = 1_000_000_000;

/// Relapses count half as much after this time.
const HALF_LIFE_NS: u64 = 3_600_000_000_000;

/// What is wrong with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) enum Ill {
    /// The device cannot read it.
    Unreadable,
    /// Its content is wrong.
    Wrong,
}

/// Bad places of one member.
#[derive(Debug, Default)]
struct OfMember {
    /// 4 KiB blocks of the device.
    blocks: BTreeMap<u64, Ill>,
    pages: BTreeSet<PageIndex>,
    /// Blocks that could not be rewritten, or were bad right after that.
    unmended: BTreeMap<u64, Unmended>,
    /// Whether more were bad than could be listed.
    is_full: bool,
    /// Blocks that were bad and were written since; the oldest first.
    mended: BTreeSet<u64>,
    mended_order: VecDeque<u64>,
    /// Blocks that were bad again after they were mended, and were not found good since.
    relapsed: BTreeMap<u64, Relapse>,
    halved: Timestamp,
    streak: Option<Streak>,
    excess_since: Option<Timestamp>,
    probe: Option<Probe>,
    /// Whether it is kept although its errors do not end, and the operator was told.
    is_kept: bool,
}

/// A block that could not be repaired.
#[derive(Clone, Copy, Debug)]
struct Unmended {
    /// When it was tried last.
    tried: Timestamp,
    /// When it is due to be looked at.
    look: Timestamp,
    /// Whether it could be written, and was bad when it was read again.
    takes_writes: bool,
}

/// Errors at a place that had been mended before.
#[derive(Clone, Copy, Debug)]
struct Relapse {
    times: u64,
    ill: Ill,
    last: Timestamp,
}

/// Reads that failed with no success between them.
#[derive(Clone, Copy, Debug)]
struct Streak {
    reads: u64,
    /// The first block of the last of them.
    block: u64,
    first: Timestamp,
    last: Timestamp,
}

/// A look at all places that are listed.
#[derive(Debug, Default)]
struct Probe {
    left: Vec<u64>,
    in_flight: usize,
    asked: Timestamp,
    over: Option<Timestamp>,
}

/// What to do about a member that has too many errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Excess {
    /// Look at these blocks again, see [`BadBlocks::is_of_content`]; each look ends with
    /// [`BadBlocks::probed`].
    Probe(Vec<u64>),
    /// Try again to repair these blocks; no call follows.
    Unmended(Vec<u64>),
    /// Its errors do not end; their number.
    Certain(u64),
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(in crate::array) struct BadBlocks {
    members: BTreeMap<MemberIndex, OfMember>,
}

impl BadBlocks {
    /// Records that a block of the device is bad.
    pub(in crate::array) fn failed(
        &mut self,
        now: Timestamp,
        member: MemberIndex,
        offset: ByteOffset,
        ill: Ill,
    ) {
        let of = self.of(now, member);
        let block = offset.0 / ROW_BYTES;
        if of.mended.remove(&block) {
            of.mended_order.retain(|other| *other != block);
            of.note_relapse(now, block, ill);
        }
        if of.blocks.len() < LISTED_MAX || of.blocks.contains_key(&block) {
            of.blocks.insert(block, ill);
        } else {
            of.is_full = true;
        }
    }

    /// Records that a copy of a metadata page is bad.
    pub(in crate::array) fn page_failed(&mut self, now: Timestamp, member: MemberIndex, page: PageIndex) {
        let of = self.of(now, member);
        if of.pages.len() < LISTED_MAX || of.pages.contains(&page) {
            of.pages.insert(page);
        } else {
            of.is_full = true;
        }
    }

    /// Records that a read from this offset of the device on failed, whatever it was for.
    pub(in crate::array) fn read_failed(&mut self, now: Timestamp, member: MemberIndex, offset: ByteOffset) {
        let streak = &mut self.of(now, member).streak;
        let block = offset.0 / ROW_BYTES;
        let before = streak.unwrap_or(Streak { reads: 0, block, first: now, last: now });
        *streak = Some(Streak { reads: before.reads + 1, block, last: now, ..before });
    }

    /// Records that these bytes of the device could be read, whether or not they are right. A place that can
    /// be read just after it was bad and was rewritten need not stay good.
    pub(in crate::array) fn read(&mut self, now: Timestamp, member: MemberIndex, bytes: Range<u64>) {
        let Some(of) = self.members.get_mut(&member) else { return };
        of.streak = None;
        if is_off(Mutation::HealedErrorsCount) {
            return;
        }
        for (block, ill) in of.listed(bytes.clone()) {
            if ill == Ill::Unreadable {
                of.blocks.remove(&block);
                of.unmended.remove(&block);
            }
        }
        if !of.relapsed.is_empty() {
            let whole = whole_blocks(bytes);
            let stays = |relapse: &Relapse| relapse.ill == Ill::Wrong || relapse.is_recent(now);
            of.relapsed.retain(|block, relapse| !whole.contains(block) || stays(relapse));
        }
    }

    /// Records that the content of a block of the device is right, or is not needed.
    pub(in crate::array) fn verified(&mut self, member: MemberIndex, offset: ByteOffset) {
        if let Some(of) = self.members.get_mut(&member) {
            of.blocks.remove(&(offset.0 / ROW_BYTES));
            of.unmended.remove(&(offset.0 / ROW_BYTES));
            of.relapsed.remove(&(offset.0 / ROW_BYTES));
        }
    }

    /// Records that nothing in these bytes of the device is needed: bad places there prove nothing any more.
    pub(super) fn not_needed(&mut self, member: MemberIndex, bytes: Range<u64>) {
        let Some(of) = self.members.get_mut(&member) else { return };
        let whole = whole_blocks(bytes);
        of.blocks.retain(|block, _| !whole.contains(block));
        of.unmended.retain(|block, _| !whole.contains(block));
        of.relapsed.retain(|block, _| !whole.contains(block));
    }

    /// Whether a block of the device is listed because its content is wrong.
    pub(in crate::array) fn is_wrong(&self, member: MemberIndex, offset: ByteOffset) -> bool {
        let of = self.members.get(&member);
        of.and_then(|of| of.blocks.get(&(offset.0 / ROW_BYTES))) == Some(&Ill::Wrong)
    }

    /// Whether nothing is listed for the member.
    pub(in crate::array) fn is_clear(&self, member: MemberIndex) -> bool {
        let is_clear =
            |of: &OfMember| of.blocks.is_empty() && of.unmended.is_empty() && of.relapsed.is_empty();
        self.members.get(&member).is_none_or(is_clear)
    }

    /// Records that these bytes of the device were written.
    pub(in crate::array) fn written(&mut self, member: MemberIndex, bytes: Range<u64>) {
        let Some(of) = self.members.get_mut(&member) else { return };
        if !of.unmended.is_empty() {
            of.unmended.retain(|block, _| !bytes.contains(&(block * ROW_BYTES)));
        }
        for (block, _) in of.listed(bytes) {
            if is_off(Mutation::HealedErrorsCount) {
                continue;
            }
            of.blocks.remove(&block);
            if of.mended.insert(block) {
                of.mended_order.push_back(block);
            }
        }
        while of.mended_order.len() > MENDED_MAX {
            if let Some(oldest) = of.mended_order.pop_front() {
                of.mended.remove(&oldest);
            }
        }
    }

    /// Records that a bad block could not be rewritten, where no operation relies on that write.
    pub(in crate::array) fn not_mended(&mut self, now: Timestamp, member: MemberIndex, bytes: Range<u64>) {
        let blocks = bytes.start / ROW_BYTES..bytes.end.div_ceil(ROW_BYTES);
        let of = self.of(now, member);
        for block in blocks.take(LISTED_MAX) {
            if of.unmended.len() < LISTED_MAX || of.unmended.contains_key(&block) {
                of.unmended.insert(
                    block,
                    Unmended { tried: now, look: Timestamp(now.0 + EXCESS_NS), takes_writes: false },
                );
            }
        }
    }

    /// Records that a block that was bad was rewritten, and is bad when it is read right after that. This is
    /// no new error.
    pub(in crate::array) fn bad_again(
        &mut self,
        now: Timestamp,
        member: MemberIndex,
        offset: ByteOffset,
        ill: Ill,
    ) {
        self.failed(now, member, offset, ill);
        self.not_mended(now, member, offset.0..offset.0 + ROW_BYTES);
        let (block, of) = (offset.0 / ROW_BYTES, self.of(now, member));
        of.unmended.entry(block).and_modify(|unmended| unmended.takes_writes = true);
        let relapsed = &mut of.relapsed;
        if let Some(relapse) = relapsed.get_mut(&block).filter(|relapse| relapse.last == now) {
            relapse.times -= 1;
            relapsed.retain(|_, relapse| relapse.times > 0);
        }
    }

    /// Whether blocks of the member could not be rewritten, or were bad again right after that.
    pub(in crate::array) fn has_unmended(&self, member: MemberIndex) -> bool {
        self.members.get(&member).is_some_and(|of| !of.unmended.is_empty())
    }

    /// Whether to rewrite a block: not soon after a try has failed. A scrub or a look (`insists`) tries again
    /// at once where the write had succeeded and only the read after it was bad.
    pub(in crate::array) fn may_mend(
        &self,
        now: Timestamp,
        member: MemberIndex,
        offset: ByteOffset,
        insists: bool,
    ) -> bool {
        let of = self.members.get(&member);
        let tried = of.and_then(|of| of.unmended.get(&(offset.0 / ROW_BYTES)));
        tried.is_none_or(|of| now.nanos_since(of.tried) >= PROBE_INTERVAL_NS || (insists && of.takes_writes))
    }

    /// Records that a copy of a metadata page was read without error, or written.
    pub(in crate::array) fn page_mended(&mut self, member: MemberIndex, page: PageIndex) {
        if let Some(of) = self.members.get_mut(&member) {
            of.pages.remove(&page);
        }
    }

    /// Forgets the member's places: it has another device, or none.
    pub(in crate::array) fn forget(&mut self, member: MemberIndex) {
        self.members.remove(&member);
    }

    /// Clears the member's errors, of which a person has taken note: only places that are still bad, or go
    /// bad from now on, count.
    pub(in crate::array) fn clear(&mut self, member: MemberIndex) {
        if let Some(of) = self.members.get_mut(&member) {
            of.relapsed.clear();
            of.unmended.clear();
            of.mended.clear();
            of.mended_order.clear();
            (of.streak, of.excess_since, of.probe) = (None, None, None);
        }
    }

    /// Records that everything was read, and every bad place is listed or mended.
    pub(in crate::array) fn scrubbed(&mut self) {
        for of in self.members.values_mut() {
            of.is_full = of.blocks.len() >= LISTED_MAX || of.pages.len() >= LISTED_MAX;
        }
    }

    /// What to do now about members that have had too many errors for too long. `is_looking`: looks at
    /// content are under way, and nothing is certain before they have ended.
    pub(super) fn excessive(&mut self, now: Timestamp, is_looking: bool) -> Vec<(MemberIndex, Excess)> {
        let excess =
            |(&member, of): (&MemberIndex, &mut OfMember)| Some((member, of.excess(now, is_looking)?));
        self.members.iter_mut().filter_map(excess).collect()
    }

    /// Whether a look at a block must compare its content: a successful read alone proves nothing.
    pub(super) fn is_of_content(&self, member: MemberIndex, block: u64) -> bool {
        self.members.get(&member).is_some_and(|of| {
            !of.blocks.contains_key(&block)
                && of.relapsed.get(&block).is_some_and(|relapse| relapse.ill == Ill::Wrong)
        })
    }

    /// Records that a block was read again, with whatever result.
    pub(in crate::array) fn probed(&mut self, member: MemberIndex) {
        if let Some(probe) = self.members.get_mut(&member).and_then(|of| of.probe.as_mut()) {
            probe.in_flight = probe.in_flight.saturating_sub(1);
        }
    }

    /// Keeps the member in spite of its errors. True: it was not kept before.
    pub(super) fn keep(&mut self, member: MemberIndex) -> bool {
        self.members.get_mut(&member).is_some_and(|of| !std::mem::replace(&mut of.is_kept, true))
    }

    /// Whether the member is kept in spite of its errors.
    pub(in crate::array) fn is_kept(&self, member: MemberIndex) -> bool {
        self.members.get(&member).is_some_and(|of| of.is_kept)
    }

    /// Members, other than this one, on which any row may be bad: those with more bad places than are listed,
    /// and those with errors that do not end.
    pub(super) fn unlisted(&self, without: MemberIndex) -> usize {
        self.members.iter().filter(|&(member, of)| *member != without && of.is_unreliable()).count()
    }

    /// How many members other than this one have each listed block.
    pub(super) fn blocks(&self, without: MemberIndex) -> BTreeMap<u64, usize> {
        let mut counts = BTreeMap::new();
        for of in self.others(without) {
            let unmended = of.unmended.keys().filter(|block| !of.blocks.contains_key(block));
            for &block in of.blocks.keys().chain(unmended) {
                *counts.entry(block).or_default() += 1;
            }
        }
        counts
    }

    /// Whether the block is listed for the member.
    pub(super) fn has(&self, member: MemberIndex, block: u64) -> bool {
        let of = self.members.get(&member);
        of.is_some_and(|of| of.blocks.contains_key(&block) || of.unmended.contains_key(&block))
    }

    /// How many members other than this one have a bad copy of each listed page.
    pub(super) fn pages(&self, without: MemberIndex) -> BTreeMap<PageIndex, usize> {
        let mut counts = BTreeMap::new();
        for &page in self.others(without).flat_map(|of| &of.pages) {
            *counts.entry(page).or_default() += 1;
        }
        counts
    }

    /// Members whose lists are whole; [`BadBlocks::unlisted`] counts the others.
    fn others(&self, without: MemberIndex) -> impl Iterator<Item = &OfMember> {
        let others =
            self.members.iter().filter(move |(member, of)| **member != without && !of.is_unreliable());
        others.map(|(_, of)| of)
    }

    fn of(&mut self, now: Timestamp, member: MemberIndex) -> &mut OfMember {
        self.members.entry(member).or_insert_with(|| OfMember { halved: now, ..OfMember::default() })
    }
}

impl Relapse {
    fn is_recent(&self, now: Timestamp) -> bool {
        now.nanos_since(self.last) < RECENT_NS
    }
}

impl OfMember {
    /// Listed blocks that lie wholly within these bytes.
    fn listed(&self, bytes: Range<u64>) -> Vec<(u64, Ill)> {
        if self.blocks.is_empty() {
            return Vec::new();
        }
        self.blocks.range(whole_blocks(bytes)).map(|(&block, &ill)| (block, ill)).collect()
    }

    fn decay(&mut self, now: Timestamp) {
        while now.nanos_since(self.halved) >= HALF_LIFE_NS {
            self.halved = Timestamp(self.halved.0 + HALF_LIFE_NS);
            self.relapsed.values_mut().for_each(|relapse| relapse.times /= 2);
            self.relapsed.retain(|_, relapse| relapse.times > 0);
        }
    }

    fn note_relapse(&mut self, now: Timestamp, block: u64, ill: Ill) {
        if self.relapsed.len() >= LISTED_MAX && !self.relapsed.contains_key(&block) {
            return;
        }
        let relapse = self.relapsed.entry(block).or_insert(Relapse { times: 0, ill, last: now });
        (relapse.times, relapse.last) = (relapse.times + 1, now);
        if ill == Ill::Wrong {
            relapse.ill = ill;
        }
    }

    /// Places to look at again: all that are listed, and those that were mended and were not bad recently.
    fn to_look_at(&self, now: Timestamp) -> Vec<u64> {
        let old = self.relapsed.iter().filter(|(_, relapse)| !relapse.is_recent(now));
        let old = old.map(|(&block, _)| block);
        let streak = self.streak.map(|streak| streak.block);
        let all: BTreeSet<u64> = self.blocks.keys().copied().chain(old).chain(streak).collect();
        all.into_iter().collect()
    }

    /// Blocks that could not be repaired and are due for a look: soon at first, since the fault may pass,
    /// then once in a while. Each look is another try. They count as looked at from now on.
    fn unmended_to_look_at(&mut self, now: Timestamp) -> Vec<u64> {
        let due = self.unmended.iter_mut().filter(|(_, of)| of.look <= now);
        due.take(PROBES_AT_ONCE)
            .map(|(&block, of)| {
                of.look = Timestamp(now.0 + PROBE_INTERVAL_NS);
                block
            })
            .collect()
    }

    fn is_unreliable(&self) -> bool {
        self.is_full || self.is_kept
    }

    fn errors(&self) -> u64 {
        let streak = self.streak.filter(|streak| streak.last.nanos_since(streak.first) >= EXCESS_NS);
        let listed = (self.blocks.len() + self.pages.len()) as u64
            + self.relapsed.values().map(|relapse| relapse.times).sum::<u64>();
        listed.max(streak.map_or(0, |streak| streak.reads))
    }

    fn excess(&mut self, now: Timestamp, is_looking: bool) -> Option<Excess> {
        self.decay(now);
        if self.errors() <= ERRORS_MAX {
            (self.excess_since, self.probe, self.is_kept) = (None, None, false);
            let looks = self.unmended_to_look_at(now);
            return (!looks.is_empty()).then_some(Excess::Unmended(looks));
        }
        if now.nanos_since(*self.excess_since.get_or_insert(now)) < EXCESS_NS {
            return None;
        }
        if self.probe.is_none() {
            self.probe = Some(Probe { left: self.to_look_at(now), asked: now, ..Probe::default() });
        }
        let errors = self.errors();
        let probe = self.probe.as_mut()?;
        if let Some(over) = probe.over {
            if now.nanos_since(over) >= PROBE_INTERVAL_NS {
                self.probe = None;
            }
            return None;
        }
        let count = PROBES_AT_ONCE.saturating_sub(probe.in_flight).min(probe.left.len());
        if count > 0 {
            let batch = probe.left.split_off(probe.left.len() - count);
            probe.in_flight += count;
            probe.asked = now;
            return Some(Excess::Probe(batch));
        }
        if is_looking {
            probe.asked = now;
        }
        if probe.in_flight > 0 || now.nanos_since(probe.asked) < LOOKS_END_NS {
            return None;
        }
        probe.over = Some(now);
        Some(Excess::Certain(errors))
    }
}

/// Blocks that lie wholly within these bytes.
fn whole_blocks(bytes: Range<u64>) -> Range<u64> {
    let first = bytes.start.div_ceil(ROW_BYTES);
    first..(bytes.end / ROW_BYTES).max(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMBER: MemberIndex = MemberIndex(1);
    const OTHER: MemberIndex = MemberIndex(2);
    const SECOND: u64 = 1_000_000_000;

    fn at(seconds: u64) -> Timestamp {
        Timestamp(seconds * SECOND)
    }

    fn offset(block: u64) -> ByteOffset {
        ByteOffset(block * ROW_BYTES)
    }

    fn bytes(blocks: Range<u64>) -> Range<u64> {
        blocks.start * ROW_BYTES..blocks.end * ROW_BYTES
    }

    fn with_bad(blocks: Range<u64>, ill: Ill) -> BadBlocks {
        let mut bad = BadBlocks::default();
        blocks.for_each(|block| bad.failed(at(1), MEMBER, offset(block), ill));
        bad
    }

    /// Lets time pass until something is certain; nothing that is asked for is read.
    fn judge(bad: &mut BadBlocks, from: u64) -> Option<u64> {
        for second in from..from + 400 {
            for (member, excess) in bad.excessive(at(second), false) {
                match excess {
                    Excess::Certain(errors) => return Some(errors),
                    Excess::Unmended(_) => {}
                    Excess::Probe(blocks) => blocks.iter().for_each(|_| bad.probed(member)),
                }
            }
        }
        None
    }

    #[test]
    fn bad_places_count_while_they_are_bad() {
        let mut bad = with_bad(0..300, Ill::Unreadable);
        assert_eq!(judge(&mut bad, 1), Some(300));
        bad.read(at(9), MEMBER, bytes(0..100));
        assert_eq!(judge(&mut bad, 500), None, "200 are left");
        let mut bad = with_bad(0..300, Ill::Wrong);
        bad.read(at(9), MEMBER, bytes(0..300));
        assert_eq!(judge(&mut bad, 1), Some(300), "what was read is wrong still");
        (0..100).for_each(|block| bad.verified(MEMBER, offset(block)));
        assert_eq!(judge(&mut bad, 500), None);
        let mut bad = with_bad(0..300, Ill::Wrong);
        bad.written(MEMBER, 1..300 * ROW_BYTES);
        assert_eq!(judge(&mut bad, 1), None);
        assert_eq!(bad.blocks(OTHER), [(0, 1)].into(), "a block that is written in part stays");
    }

    #[test]
    fn a_place_that_can_be_read_when_it_is_looked_at_again_does_not_count() {
        let mut bad = with_bad(0..300, Ill::Unreadable);
        let mut asked = BTreeSet::new();
        for second in 1..100 {
            for (member, excess) in bad.excessive(at(second), false) {
                let Excess::Probe(blocks) = excess else { panic!("{excess:?}") };
                assert!(second > 10 && blocks.len() <= PROBES_AT_ONCE);
                for block in blocks {
                    asked.insert(block);
                    bad.read(at(second), member, bytes(block..block + 1));
                    bad.probed(member);
                }
            }
        }
        assert!(asked.len() >= 300 - ERRORS_MAX as usize, "{}", asked.len());
        assert!(bad.blocks(OTHER).len() as u64 <= ERRORS_MAX);
    }

    #[test]
    fn places_that_go_bad_again_count_until_that_is_long_ago() {
        let mut bad = BadBlocks::default();
        for round in 0..4 {
            for block in 0..100 {
                bad.failed(at(round), MEMBER, offset(block), Ill::Unreadable);
            }
            bad.written(MEMBER, bytes(0..100));
        }
        assert_eq!(judge(&mut bad, 5), Some(300));
        assert!(bad.keep(MEMBER) && !bad.keep(MEMBER) && bad.is_kept(MEMBER));
        assert_eq!(judge(&mut bad, 4000), None, "an hour later it is half as many");
        assert!(!bad.is_kept(MEMBER));
    }

    /// Two bursts over the same places, which are rewritten each time.
    fn after_bursts(ill: Ill) -> BadBlocks {
        let mut bad = BadBlocks::default();
        for round in 0..2 {
            (0..300).for_each(|block| bad.failed(at(round), MEMBER, offset(block), ill));
            bad.written(MEMBER, bytes(0..300));
        }
        bad
    }

    #[test]
    fn a_burst_of_errors_that_is_over_leaves_nothing_behind() {
        let mut bad = after_bursts(Ill::Unreadable);
        bad.read(at(9), MEMBER, bytes(0..300));
        assert_eq!(judge(&mut bad, 2), None, "a scrub has read it all");
        let mut bad = after_bursts(Ill::Wrong);
        bad.read(at(9), MEMBER, bytes(0..300));
        assert!(bad.is_of_content(MEMBER, 7) && !bad.is_clear(MEMBER));
        (0..300).for_each(|block| bad.verified(MEMBER, offset(block)));
        assert_eq!(judge(&mut bad, 2), None, "a scrub has verified it all");
        for ill in [Ill::Unreadable, Ill::Wrong] {
            let mut bad = after_bursts(ill);
            bad.clear(MEMBER);
            assert_eq!(judge(&mut bad, 2), None, "the counts were cleared");
            let mut bad = after_bursts(ill);
            assert_eq!(judge(&mut bad, 2), Some(300), "nothing shows that it is over");
        }
        // Nothing was read since.
        let mut bad = after_bursts(Ill::Unreadable);
        for second in 2..100 {
            for (member, excess) in bad.excessive(at(second), false) {
                let Excess::Probe(blocks) = excess else { panic!("{excess:?}") };
                for block in blocks {
                    bad.read(at(second), member, bytes(block..block + 1));
                    bad.probed(member);
                }
            }
        }
    }

    #[test]
    fn nothing_is_certain_while_content_is_being_looked_at() {
        let mut bad = after_bursts(Ill::Wrong);
        for second in 2..400 {
            if second == 300 {
                (0..300).for_each(|block| bad.verified(MEMBER, offset(block)));
            }
            for (member, excess) in bad.excessive(at(second), second < 300) {
                let Excess::Probe(blocks) = excess else { panic!("{second}: {excess:?}") };
                blocks.iter().for_each(|_| bad.probed(member));
            }
        }
    }

    #[test]
    fn a_place_that_is_still_bad_counts_after_it_was_cleared() {
        let mut bad = with_bad(0..300, Ill::Unreadable);
        bad.clear(MEMBER);
        assert_eq!((bad.blocks(OTHER).len(), judge(&mut bad, 2)), (300, Some(300)));
    }

    #[test]
    fn places_that_go_bad_again_at_the_time_of_the_judgement_count_without_a_look() {
        let mut bad = BadBlocks::default();
        let mut judged = None;
        for second in 0..30 {
            (0..100).for_each(|block| bad.failed(at(second), MEMBER, offset(block), Ill::Unreadable));
            bad.written(MEMBER, bytes(0..100));
            for (_, excess) in bad.excessive(at(second), false) {
                let Excess::Certain(errors) = excess else { panic!("{excess:?}") };
                judged.get_or_insert((second, errors));
            }
        }
        assert!(judged.is_some_and(|(second, errors)| second < 20 && errors > 1000), "{judged:?}");
    }

    #[test]
    fn a_member_that_is_kept_is_looked_at_again_from_time_to_time() {
        let mut bad = with_bad(0..300, Ill::Unreadable);
        assert_eq!(judge(&mut bad, 1), Some(300));
        assert_eq!(judge(&mut bad, 100), Some(300));
    }

    #[test]
    fn reads_that_fail_without_exception_count_when_they_have_for_a_while() {
        let mut bad = BadBlocks::default();
        (0..400).for_each(|_| bad.read_failed(at(1), MEMBER, offset(7)));
        assert_eq!(judge(&mut bad, 2), None, "nothing was read since: it may have passed");
        bad.read_failed(at(500), MEMBER, offset(7));
        assert_eq!(judge(&mut bad, 500), Some(401));
        bad.read(at(500), MEMBER, bytes(7..8));
        assert_eq!(judge(&mut bad, 1000), None);
    }

    #[test]
    fn a_block_that_cannot_be_rewritten_is_listed_until_it_can() {
        let mut bad = BadBlocks::default();
        bad.not_mended(at(1), MEMBER, bytes(3..5));
        assert_eq!(bad.blocks(OTHER), [(3, 1), (4, 1)].into());
        assert!(
            !bad.may_mend(at(2), MEMBER, offset(4), true) && bad.may_mend(at(2), MEMBER, offset(5), false)
        );
        assert!(bad.may_mend(at(100), MEMBER, offset(4), false), "once in a while");
        assert_eq!(judge(&mut bad, 1), None, "a member with few of them serves on");
        bad.written(MEMBER, bytes(0..9));
        assert!(bad.blocks(OTHER).is_empty());
    }

    #[test]
    fn a_block_that_is_not_needed_or_was_cleared_does_not_stay_bad() {
        let with_unmended = || {
            let mut bad = with_bad(7..9, Ill::Wrong);
            bad.written(MEMBER, bytes(7..9));
            (7..9).for_each(|block| bad.bad_again(at(2), MEMBER, offset(block), Ill::Wrong));
            bad
        };
        let mut bad = with_unmended();
        bad.not_needed(MEMBER, bytes(8..9));
        assert!(bad.has_unmended(MEMBER), "one is left");
        bad.not_needed(MEMBER, bytes(0..8));
        assert!(!bad.has_unmended(MEMBER) && bad.is_clear(MEMBER));
        let mut bad = with_unmended();
        bad.clear(MEMBER);
        assert!(!bad.has_unmended(MEMBER));
        assert_eq!(bad.blocks(OTHER).len(), 2, "they are bad all the same, as far as is known");
    }

    #[test]
    fn a_block_that_is_bad_right_after_it_was_rewritten_is_tried_again_once_in_a_while() {
        for ill in [Ill::Unreadable, Ill::Wrong] {
            let mut bad = with_bad(7..8, ill);
            bad.written(MEMBER, bytes(7..8));
            assert!(!bad.has_unmended(MEMBER));
            bad.bad_again(at(2), MEMBER, offset(7), ill);
            assert!(bad.has_unmended(MEMBER) && !bad.may_mend(at(3), MEMBER, offset(7), false));
            assert!(bad.may_mend(at(3), MEMBER, offset(7), true), "a scrub tries again");
            assert_eq!(bad.members[&MEMBER].errors(), 1, "it is one place");
            let asked: Vec<u64> =
                (3..200).filter(|&second| !bad.excessive(at(second), false).is_empty()).collect();
            assert_eq!(asked, [12, 72, 132, 192]);
            match ill {
                Ill::Unreadable => bad.read(at(200), MEMBER, bytes(7..8)),
                Ill::Wrong => bad.verified(MEMBER, offset(7)),
            }
            assert!(!bad.has_unmended(MEMBER));
        }
    }

    #[test]
    fn a_member_with_more_bad_places_than_are_listed_counts_everywhere_until_a_scrub() {
        let mut bad = with_bad(0..LISTED_MAX as u64 + 1, Ill::Unreadable);
        assert_eq!((bad.unlisted(OTHER), bad.unlisted(MEMBER)), (1, 0));
        assert!(bad.blocks(OTHER).is_empty());
        bad.written(MEMBER, bytes(0..LISTED_MAX as u64));
        assert_eq!(bad.unlisted(OTHER), 1, "the place of one is not known");
        bad.scrubbed();
        assert_eq!(bad.unlisted(OTHER), 0);
    }

    #[test]
    fn no_other_relies_on_a_member_that_is_kept_in_spite_of_its_errors() {
        let mut bad = with_bad(0..300, Ill::Unreadable);
        assert_eq!((bad.unlisted(OTHER), bad.blocks(OTHER).len()), (0, 300));
        assert_eq!(judge(&mut bad, 1), Some(300));
        bad.keep(MEMBER);
        assert_eq!((bad.unlisted(OTHER), bad.blocks(OTHER).len()), (1, 0));
    }

    #[test]
    fn the_places_of_a_member_go_with_its_device() {
        let mut bad = with_bad(0..300, Ill::Unreadable);
        bad.page_failed(at(1), MEMBER, PageIndex(4));
        assert_eq!(bad.pages(OTHER), [(PageIndex(4), 1)].into());
        assert!(bad.pages(MEMBER).is_empty() && bad.blocks(MEMBER).is_empty());
        bad.page_mended(MEMBER, PageIndex(4));
        assert!(bad.pages(OTHER).is_empty());
        bad.forget(MEMBER);
        assert_eq!(judge(&mut bad, 1), None);
    }
}
