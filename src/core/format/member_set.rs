//! A set of members as a bit map, small enough to copy. On disk: four little-endian words, bit `i % 64` of
//! word `i / 64` for member `i`.

use crate::units::MemberIndex;
use std::fmt;

/// A set of members, one bit for each index. Serialises as the list of its indexes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MemberSet(pub [u64; 4]);

impl MemberSet {
    /// Indexes a set can hold: `0..CAPACITY`.
    pub const CAPACITY: u16 = 256;

    /// The empty set.
    #[must_use]
    pub const fn new() -> MemberSet {
        MemberSet([0; 4])
    }

    /// All members `0..count`. Panics beyond [`MemberSet::CAPACITY`].
    #[must_use]
    pub fn first(count: u16) -> MemberSet {
        (0..count).map(MemberIndex).collect()
    }

    /// Adds a member. Returns whether it is new. Panics beyond [`MemberSet::CAPACITY`].
    pub fn insert(&mut self, member: MemberIndex) -> bool {
        let (word, bit) = Self::place(member).expect("member index within a set's capacity");
        let new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        new
    }

    /// Takes a member out. Returns whether it was there.
    pub fn remove(&mut self, member: MemberIndex) -> bool {
        let Some((word, bit)) = Self::place(member) else { return false };
        let was = self.0[word] & bit != 0;
        self.0[word] &= !bit;
        was
    }

    /// Whether a member is in the set.
    #[must_use]
    pub fn contains(&self, member: MemberIndex) -> bool {
        Self::place(member).is_some_and(|(word, bit)| self.0[word] & bit != 0)
    }

    /// How many members the set has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0 == [0; 4]
    }

    /// Whether every member of this set is in `other`.
    #[must_use]
    pub fn is_subset(&self, other: &MemberSet) -> bool {
        self.0.iter().zip(other.0).all(|(mine, theirs)| mine & !theirs == 0)
    }

    /// The members, in rising order.
    pub fn iter(&self) -> impl Iterator<Item = MemberIndex> + use<> {
        let set = *self;
        (0..Self::CAPACITY).map(MemberIndex).filter(move |&member| set.contains(member))
    }

    fn place(member: MemberIndex) -> Option<(usize, u64)> {
        (member.0 < Self::CAPACITY).then(|| (usize::from(member.0 / 64), 1u64 << (member.0 % 64)))
    }
}

impl FromIterator<MemberIndex> for MemberSet {
    fn from_iter<I: IntoIterator<Item = MemberIndex>>(members: I) -> MemberSet {
        let mut set = MemberSet::new();
        set.extend(members);
        set
    }
}

impl Extend<MemberIndex> for MemberSet {
    fn extend<I: IntoIterator<Item = MemberIndex>>(&mut self, members: I) {
        for member in members {
            self.insert(member);
        }
    }
}

impl fmt::Display for MemberSet {
    /// `0, 1, 4`, or `none`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        for (position, member) in self.iter().enumerate() {
            write!(f, "{}{member}", if position == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl serde::Serialize for MemberSet {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl<'de> serde::Deserialize<'de> for MemberSet {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let members = <Vec<MemberIndex> as serde::Deserialize>::deserialize(deserializer)?;
        match members.iter().find(|member| member.0 >= Self::CAPACITY) {
            Some(member) => Err(serde::de::Error::custom(format!("member index {member} is above 255"))),
            None => Ok(members.into_iter().collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn behaves_like_an_ordered_set(operations in prop::collection::vec((any::<bool>(), 0u16..256), 0..200)) {
            let (mut set, mut model) = (MemberSet::new(), BTreeSet::new());
            for (insert, index) in operations {
                if insert {
                    prop_assert_eq!(set.insert(MemberIndex(index)), model.insert(MemberIndex(index)));
                } else {
                    prop_assert_eq!(set.remove(MemberIndex(index)), model.remove(&MemberIndex(index)));
                }
            }
            prop_assert_eq!(set.len(), model.len());
            prop_assert_eq!(set.is_empty(), model.is_empty());
            prop_assert!(set.iter().eq(model.iter().copied()));
            prop_assert!(model.iter().all(|&member| set.contains(member)));
            let json = serde_json::to_string(&set).unwrap();
            prop_assert_eq!(&json, &serde_json::to_string(&model).unwrap());
            prop_assert_eq!(serde_json::from_str::<MemberSet>(&json).unwrap(), set);
        }
    }

    #[test]
    fn indexes_outside_are_absent_and_refused_by_serde() {
        let mut set = MemberSet::first(255);
        assert_eq!(set.len(), 255);
        assert!(!set.contains(MemberIndex(255)) && !set.contains(MemberIndex(5000)));
        assert!(!set.remove(MemberIndex(5000)));
        assert!(serde_json::from_str::<MemberSet>("[256]").is_err());
        assert!(MemberSet::first(3).is_subset(&set) && !set.is_subset(&MemberSet::first(3)));
    }

    #[test]
    fn prints_as_a_list() {
        assert_eq!(MemberSet::first(3).to_string(), "0, 1, 2");
        assert_eq!(MemberSet::new().to_string(), "none");
    }
}
