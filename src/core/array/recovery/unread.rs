//! Which blocks of the members' rings could not be read, and how much doubt they leave (rules R5 and T3).
//!
//! Pure. `chain.rs` decides what the doubt means for a batch of the log. Must not know how rings are read,
//! when they are read again, or what a batch is.

use crate::array::mutation::{Mutation, is_off};
use crate::units::MemberIndex;
use std::collections::{BTreeMap, BTreeSet};

/// One bit for each block of a payload or of a ring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bits(Box<[u64]>);

impl Bits {
    /// `blocks` bits, all clear.
    #[must_use]
    pub(super) fn new(blocks: u32) -> Bits {
        Bits(vec![0; (blocks as usize).div_ceil(64)].into())
    }

    /// Sets a bit.
    pub(super) fn set(&mut self, at: u32) {
        self.0[at as usize / 64] |= 1 << (at % 64);
    }

    /// Whether a bit is set.
    #[must_use]
    pub(super) fn get(&self, at: u32) -> bool {
        self.0.get(at as usize / 64).is_some_and(|word| word >> (at % 64) & 1 == 1)
    }
}

/// The blocks that could not be read, by member.
#[derive(Clone, Debug, Default)]
pub(super) struct UnreadBlocks {
    members: BTreeMap<MemberIndex, OfMember>,
}

#[derive(Clone, Debug)]
struct OfMember {
    blocks: Bits,
    /// Where headers start that extend into blocks that could not be read.
    cut: BTreeSet<u32>,
}

/// Whether blocks that could not be read could change how the log is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Doubt {
    /// No unread block could change anything.
    None,
    /// Unread blocks could, but no more members are gone or gave errors than the array survives: then a
    /// durable batch shows all the same, and one that does not show was not durable.
    Covered,
    /// Unread blocks could, on more members than the array survives. But one of the others shows that a batch
    /// there was never durable, unless its own log is damaged there.
    Denied,
    /// Unread blocks could, and no member shows the contrary.
    Beyond,
}

impl Doubt {
    /// The doubt that is left when `unread` members gave errors and `gone` are gone.
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
    /// Adds a block, of a ring of `ring_blocks`, that could not be read.
    pub(super) fn add(&mut self, member: MemberIndex, block: u32, ring_blocks: u32) {
        self.of(member, ring_blocks).blocks.set(block);
    }

    /// Adds a header that starts at a block and could not be read to its end.
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

    /// Whether any block of a member's ring could not be read.
    #[must_use]
    pub(super) fn is_concerned(&self, member: MemberIndex) -> bool {
        self.members.contains_key(&member)
    }

    /// Whether a batch that starts at a place of a member's ring may be hidden.
    #[must_use]
    pub(super) fn hides(&self, member: MemberIndex, place: u32) -> bool {
        self.members.get(&member).is_some_and(|of| of.blocks.get(place) || of.cut.contains(&place))
    }
}

/// Members, in words.
pub(super) fn in_words(members: impl Iterator<Item = MemberIndex>) -> String {
    let members: Vec<String> = members.map(|member| member.to_string()).collect();
    format!("member {}", members.join(", "))
}
