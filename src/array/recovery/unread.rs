//! Blocks of rings that could not be read, and whether the log may go on in them (rules R5 and T3).
//!
//! Pure. A batch that is durable is on every member that was live, so one that nobody shows is not there, unless errors hide
//! it. Must not know how rings are read, or when they are read again.

use super::chain::{Bits, Chain, LogBatch};
use crate::array::mutation::{Mutation, is_off};
use crate::format::MemberSet;
use crate::units::MemberIndex;
use std::collections::{BTreeMap, BTreeSet};

/// See the head of this file.
#[derive(Clone, Debug, Default)]
pub struct UnreadBlocks {
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
pub enum Doubt {
    /// It could not.
    None,
    /// It could, but no more members are gone or gave errors than the array survives: then what was durable shows all the
    /// same, and what does not show was not.
    Covered,
    /// It could.
    Beyond,
}

impl Doubt {
    /// The doubt that is left by so many members that gave errors, and so many that are gone.
    #[must_use]
    pub fn of(unread: usize, gone: usize, m: usize) -> Doubt {
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
    pub fn add(&mut self, member: MemberIndex, block: u32, ring_blocks: u32) {
        self.of(member, ring_blocks).blocks.set(block);
    }

    /// A header starts at a block, and the rest of it could not be read.
    pub fn add_cut(&mut self, member: MemberIndex, place: u32, ring_blocks: u32) {
        self.of(member, ring_blocks).cut.insert(place);
    }

    fn of(&mut self, member: MemberIndex, ring_blocks: u32) -> &mut OfMember {
        let new = || OfMember { blocks: Bits::new(ring_blocks), cut: BTreeSet::new() };
        self.members.entry(member).or_insert_with(new)
    }

    /// Whether everything was read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Whether a block could not be read.
    #[must_use]
    pub fn contains(&self, member: MemberIndex, block: u32) -> bool {
        self.members.get(&member).is_some_and(|of| of.blocks.get(block))
    }

    /// The members in question, in words.
    #[must_use]
    pub fn text(&self) -> String {
        let members: Vec<String> = self.members.keys().map(ToString::to_string).collect();
        format!("member {}", members.join(", "))
    }

    fn hides(&self, member: MemberIndex, place: u32) -> bool {
        self.members.get(&member).is_some_and(|of| of.blocks.get(place) || of.cut.contains(&place))
    }
}

impl Chain {
    /// Whether a batch behind the last one may be hidden (R5). It is not if more than `m` of the members, read without an
    /// error where it would start, lack it.
    #[must_use]
    pub fn hidden_end(&self, members: MemberSet, width: usize, m: usize) -> Doubt {
        let may_hold = |member: &MemberIndex| match self.places_of_next(*member) {
            Some(places) => places.into_iter().any(|place| self.unread.hides(*member, place)),
            None => self.unread.members.contains_key(member),
        };
        let unread = members.iter().filter(may_hold).count();
        if members.len() - unread > m { Doubt::None } else { Doubt::of(unread, width - members.len(), m) }
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
    use super::super::tests::parts::{RING, chain, in_place, map};
    use super::*;

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
        chain.hidden_end(members, k + m, m)
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
        assert_eq!(hidden(2, 1, 0, &[(0, ends[0]), (1, ends[1])]), Doubt::Beyond);
        assert_eq!(hidden(2, 1, 0, &[(0, 0), (1, ends[1])]), Doubt::Beyond);
        assert_eq!(hidden(2, 1, 0, &[(0, ends[0] + 9), (1, ends[1] + 9), (2, ends[2] + 9)]), Doubt::None);
    }

    #[test]
    fn enough_members_that_lack_it_show_that_it_is_not_there() {
        assert_eq!(hidden(2, 1, 0, &[(0, end(0))]), Doubt::None, "two lack it, and one may be wrong");
        assert_eq!(hidden(2, 1, 1, &[(0, end(0))]), Doubt::Beyond, "one lacks it, and one is gone");
        assert_eq!(hidden(2, 1, 1, &[(0, end(0) + 9)]), Doubt::None, "what the log does not use");
        assert_eq!(hidden(2, 2, 1, &[(0, 0)]), Doubt::Covered);
        assert_eq!(hidden(2, 2, 2, &[(0, 0)]), Doubt::Beyond);
        assert_eq!(hidden(2, 1, 1, &[]), Doubt::None, "a dead member alone never stops a start");
    }

    #[test]
    fn a_header_whose_rest_cannot_be_read_may_be_that_of_the_next_batch() {
        let map = map(1, 1, 1);
        let mut chain = chain(&map, 0, vec![vec![in_place(0, 0, 1, &[0, 1], 1)]], |_, _, _| false);
        let place = chain.batches[0].end(MemberIndex(0)).unwrap();
        let members = MemberSet::first(2);
        chain.unread.add(MemberIndex(0), place + 1, RING);
        assert_eq!(chain.hidden_end(members, 2, 1), Doubt::None);
        chain.unread.add_cut(MemberIndex(0), place, RING);
        assert_eq!(chain.hidden_end(members, 2, 1), Doubt::Covered);
    }
}
