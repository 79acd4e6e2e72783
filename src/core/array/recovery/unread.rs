//! Blocks of rings that could not be read, and whether the log may go on in them (rules R5 and T3).
//!
//! Pure. A batch that is durable is on every member that was live, so one that nobody shows is not there, unless errors hide
//! it. Must not know how rings are read, or when they are read again.

use crate::array::geometry::Map;
use crate::array::mutation::{Mutation, is_off};
use crate::array::recovery::chain::{Bits, Chain, LogBatch};
use crate::format::{EpochStamp, MemberSet};
use crate::units::MemberIndex;
use std::collections::{BTreeMap, BTreeSet};

/// See the head of this file.
#[derive(Clone, Debug, Default)]
pub(super) struct UnreadBlocks {
    members: BTreeMap<MemberIndex, OfMember>,
}

#[derive(Clone, Debug)]
struct OfMember {
    blocks: Bits,
    /// Where headers start that go on in blocks that could not be read.
    cut: BTreeSet<u32>,
}

/// Whether what could not be read could change what is made of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Doubt {
    /// It could not.
    None,
    /// It could, but no more members are gone or gave errors than the array survives: then what was durable shows all the
    /// same, and what does not show was not.
    Covered,
    /// It could, and on more members than the array survives. But one of the others shows that what would be there was never
    /// durable, unless its own log is damaged there.
    Denied,
    /// It could.
    Beyond,
}

impl Doubt {
    /// The doubt that is left by so many members that gave errors, and so many that are gone.
    #[must_use]
    pub(super) fn of(unread: usize, gone: usize, m: usize) -> Doubt {
        match unread {
            _ if is_off(Mutation::UnreadTailDropped) => Doubt::None,
            0 => Doubt::None,
            _ if unread + gone <= m => Doubt::Covered,
            _ => Doubt::Beyond,
        }
    }
}

impl UnreadBlocks {
    /// A block, of so many of the ring, could not be read.
    pub(super) fn add(&mut self, member: MemberIndex, block: u32, ring_blocks: u32) {
        self.of(member, ring_blocks).blocks.set(block);
    }

    /// A header starts at a block, and the rest of it could not be read.
    pub(super) fn add_cut(&mut self, member: MemberIndex, place: u32, ring_blocks: u32) {
        self.of(member, ring_blocks).cut.insert(place);
    }

    fn of(&mut self, member: MemberIndex, ring_blocks: u32) -> &mut OfMember {
        let new = || OfMember { blocks: Bits::new(ring_blocks), cut: BTreeSet::new() };
        self.members.entry(member).or_insert_with(new)
    }

    /// Whether everything was read.
    #[must_use]
    pub(super) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Whether a block could not be read.
    #[must_use]
    pub(super) fn contains(&self, member: MemberIndex, block: u32) -> bool {
        self.members.get(&member).is_some_and(|of| of.blocks.get(block))
    }

    /// The members in question, in words.
    #[must_use]
    pub(super) fn text(&self) -> String {
        in_words(self.members.keys().copied())
    }

    fn hides(&self, member: MemberIndex, place: u32) -> bool {
        self.members.get(&member).is_some_and(|of| of.blocks.get(place) || of.cut.contains(&place))
    }
}

/// Members, in words.
pub(super) fn in_words(members: impl Iterator<Item = MemberIndex>) -> String {
    let members: Vec<String> = members.map(|member| member.to_string()).collect();
    format!("member {}", members.join(", "))
}

impl Chain {
    /// Whether a batch behind the last one may be hidden (R5). It is not if one of the members,
    /// read without an error where it would start, lacks it: what is durable is on every member
    /// that was live. Those that are `behind` in their epoch, or had no part in the batch before,
    /// do not count, since they may have missed it. Where more members than the array survives are
    /// gone or gave errors, one that lacks it may be damaged: its word is enough only when the
    /// errors do not pass.
    #[must_use]
    pub(super) fn hidden_end(&self, members: MemberSet, behind: MemberSet, map: &Map) -> Doubt {
        let may_hold = |member: &MemberIndex| match self.places_of_next(*member) {
            Some(places) => places.into_iter().any(|place| self.unread.hides(*member, place)),
            None => self.unread.members.contains_key(member),
        };
        let unread = members.iter().filter(may_hold).count();
        let lacks_it = |member| self.was_there(member, behind) && !may_hold(&member);
        let lack_it = members.iter().any(lacks_it);
        match Doubt::of(unread, map.width() - members.len(), map.m) {
            Doubt::Beyond if lack_it => Doubt::Denied,
            _ if lack_it => Doubt::None,
            doubt => doubt,
        }
    }

    /// Whether a batch of the chain cannot have been durable: a member that had a part in it was
    /// read without an error and lacks some of its piece. Only a batch of the epoch before this one
    /// is judged so: in a later one a member that had failed may have come back without it.
    #[must_use]
    pub(super) fn was_never_durable(
        &self,
        batch: u32,
        members: MemberSet,
        behind: MemberSet,
        epoch: EpochStamp,
    ) -> bool {
        let batch = &self.batches[batch as usize];
        let lacks_some = |member: MemberIndex| {
            let Some(place) = batch.place(member) else { return false };
            let readable = |block: u32| !self.unread.contains(member, block);
            let header = batch.piece(member).is_some_and(|piece| piece.header)
                || !(place..place + batch.header_blocks).all(readable);
            let payload = (0..batch.payload_blocks(member)).all(|ordinal| {
                let block = batch.image_block(member, ordinal);
                batch.holds(member, ordinal) || !block.is_some_and(readable)
            });
            !(header && payload)
        };
        batch.batch.epoch.number + 1 >= epoch.number
            && members.iter().any(|member| !behind.contains(member) && lacks_some(member))
    }

    /// Whether a member was live when the end of the log was written, as far as is known.
    fn was_there(&self, member: MemberIndex, behind: MemberSet) -> bool {
        let last = self.batches.last().or(self.before.first());
        !behind.contains(member) && last.is_none_or(|batch| batch.place(member).is_some())
    }

    /// Where the batch behind the last one may start on a member: behind the last one, or where the ring begins, if it did not
    /// fit there, or if this log began with an empty ring. None: nobody knows.
    fn places_of_next(&self, member: MemberIndex) -> Option<Vec<u32>> {
        let last: Vec<&LogBatch> = match self.batches.last() {
            Some(last) => vec![last],
            None => self.before.iter().collect(),
        };
        if last.is_empty() && self.tail > 0 {
            return None;
        }
        let ends: Option<Vec<u32>> = last.iter().map(|batch| batch.end(member)).collect();
        Some(ends?.into_iter().chain([0]).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::recovery::tests::parts::{RING, chain, in_place, map};

    /// A log of two batches on `width` members; blocks of some of them could not be read.
    fn hidden(k: usize, m: usize, gone: u16, unread: &[(u16, u32)]) -> Doubt {
        let map = map(k, m, 1);
        let record = || vec![in_place(0, 0, 1, &[0, k as u16], 1)];
        let mut chain = chain(&map, 0, vec![record(), record()], |_, _, _| false);
        for &(member, block) in unread {
            chain.unread.add(MemberIndex(member), block, RING);
        }
        let mut members = MemberSet::first((k + m) as u16);
        for at in 0..gone {
            members.remove(MemberIndex((k + m) as u16 - 1 - at));
        }
        chain.hidden_end(members, MemberSet::default(), &map)
    }

    fn end(member: u16) -> u32 {
        let map = map(2, 1, 1);
        let record = || vec![in_place(0, 0, 1, &[0, 2], 1)];
        let chain = chain(&map, 0, vec![record(), record()], |_, _, _| false);
        chain.batches[1].end(MemberIndex(member)).unwrap()
    }

    #[test]
    fn a_batch_may_be_hidden_behind_the_last_one_or_where_the_ring_begins() {
        let ends = [end(0), end(1), end(2)];
        assert_eq!(hidden(2, 1, 0, &[]), Doubt::None);
        assert_eq!(hidden(2, 1, 1, &[(0, ends[0]), (1, ends[1])]), Doubt::Beyond);
        assert_eq!(hidden(2, 1, 0, &[(0, 0), (1, ends[1]), (2, 0)]), Doubt::Beyond);
        assert_eq!(hidden(2, 1, 0, &[(0, ends[0] + 9), (1, ends[1] + 9), (2, ends[2] + 9)]), Doubt::None);
    }

    #[test]
    fn a_member_that_lacks_it_shows_that_it_was_not_durable() {
        assert_eq!(hidden(2, 1, 0, &[(0, end(0))]), Doubt::None);
        assert_eq!(hidden(2, 1, 1, &[(0, end(0))]), Doubt::Denied, "the other lacks it");
        assert_eq!(
            hidden(2, 1, 1, &[(0, end(0) + 9), (1, end(1) + 9)]),
            Doubt::None,
            "what the log does not use"
        );
        assert_eq!(
            hidden(2, 1, 1, &[(0, end(0) + 9), (1, end(1))]),
            Doubt::Denied,
            "one of both is read where it would be"
        );
        assert_eq!(hidden(2, 2, 1, &[(0, 0), (1, 0), (2, 0)]), Doubt::Beyond);
        assert_eq!(hidden(1, 2, 1, &[(0, 0)]), Doubt::None);
        assert_eq!(hidden(1, 2, 2, &[(0, 0)]), Doubt::Beyond);
        assert_eq!(hidden(2, 1, 1, &[]), Doubt::None, "a dead member alone never stops a start");
        assert_eq!(hidden(2, 2, 0, &[(0, end(0)), (1, end(1))]), Doubt::None);
    }

    #[test]
    fn a_member_that_is_behind_lacks_it_for_a_reason_of_its_own() {
        let map = map(2, 1, 1);
        let mut chain = chain(&map, 0, vec![vec![in_place(0, 0, 1, &[0, 2], 1)]], |_, _, _| false);
        for member in [0, 1] {
            chain.unread.add(MemberIndex(member), 0, RING);
        }
        let (members, mut behind) = (MemberSet::first(3), MemberSet::default());
        assert_eq!(chain.hidden_end(members, behind, &map), Doubt::Denied);
        behind.insert(MemberIndex(2));
        assert_eq!(chain.hidden_end(members, behind, &map), Doubt::Beyond);
    }

    #[test]
    fn a_batch_was_never_durable_if_a_member_lacks_its_piece_that_can_be_read() {
        let map = map(2, 1, 1);
        let record = || vec![in_place(0, 0, 1, &[0, 1, 2], 1)];
        let batches = || vec![record(), record()];
        let missing = |members: &'static [u16]| {
            move |batch: u32, member: u16, _: u32| batch == 1 && members.contains(&member)
        };
        let (members, nobody) = (MemberSet::first(3), MemberSet::default());
        let epoch = |number| EpochStamp { number, ..EpochStamp::default() };
        let verdict = |chain: &Chain| chain.was_never_durable(1, members, nobody, epoch(2));
        let mut both = chain(&map, 0, batches(), missing(&[0, 1]));
        assert!(verdict(&both));
        for member in [MemberIndex(0), MemberIndex(1)] {
            let block = both.batches[1].image_block(member, 0).unwrap();
            both.unread.add(member, block, RING);
            assert_eq!(verdict(&both), member.0 == 0, "as long as one of them was read");
        }
        let one = chain(&map, 0, batches(), missing(&[0]));
        assert!(verdict(&one));
        assert!(!one.was_never_durable(1, members, nobody, epoch(3)), "it may have come back since");
        let mut behind = MemberSet::default();
        behind.insert(MemberIndex(0));
        assert!(!one.was_never_durable(1, members, behind, epoch(2)));
    }

    #[test]
    fn a_header_whose_rest_cannot_be_read_may_be_that_of_the_next_batch() {
        let map = map(1, 1, 1);
        let mut chain = chain(&map, 0, vec![vec![in_place(0, 0, 1, &[0, 1], 1)]], |_, _, _| false);
        let place = chain.batches[0].end(MemberIndex(0)).unwrap();
        let (members, behind) = (MemberSet::first(1), MemberSet::default());
        chain.unread.add(MemberIndex(0), place + 1, RING);
        assert_eq!(chain.hidden_end(members, behind, &map), Doubt::None);
        chain.unread.add_cut(MemberIndex(0), place, RING);
        assert_eq!(chain.hidden_end(members, behind, &map), Doubt::Beyond);
    }
}
