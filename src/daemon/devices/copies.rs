//! Several devices that claim to be the same member: a file was copied, a disk was cloned, or a snapshot of
//! one lies beside it. At most one of them is used. Pure: superblocks in, a verdict out.

use calpe_core::array::assembly::Candidate;
use calpe_core::format::Superblock;
use calpe_core::units::MemberIndex;
use std::collections::BTreeMap;
use uuid::Uuid;

/// Devices that claim to be the same member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Twins {
    /// The identity that occurs more than once.
    pub device: Uuid,
    /// Indexes, in the list of candidates, of those that are not used.
    pub unused: Vec<usize>,
    /// Index of the one that is used, if it is known which is current.
    pub used: Option<usize>,
}

impl Twins {
    /// Why the others are not used, for people. `path`: the path of an index in the list of candidates.
    pub(crate) fn reason(&self, member: MemberIndex, path: impl Fn(usize) -> String) -> String {
        let paths = self.unused.iter().map(|&at| path(at)).collect::<Vec<_>>().join(", ");
        match self.used {
            Some(used) => {
                format!("{paths}: an older copy of member {member}, which is {}; take it away", path(used))
            }
            None => format!(
                "{paths}: each of them claims to be member {member}, and nothing tells which is the copy, so none is \
                 used; move the copy away, and bring the other back with 'calpe online'; if the copy has taken the place \
                 of another member, replace that one"
            ),
        }
    }
}

/// Finds devices of one identity among candidates, and which of them is current.
#[must_use]
pub(super) fn find_twins<K>(candidates: &[Candidate<K>]) -> Vec<Twins> {
    let mut places: BTreeMap<Uuid, Vec<usize>> = BTreeMap::new();
    for (at, candidate) in candidates.iter().enumerate() {
        places.entry(candidate.superblock.device).or_default().push(at);
    }
    let twins = places.into_iter().filter(|(_, places)| places.len() > 1);
    twins
        .map(|(device, mut unused)| {
            let copies: Vec<&Superblock> = unused.iter().map(|&at| &candidates[at].superblock).collect();
            let all = candidates.iter().map(|candidate| &candidate.superblock);
            let others: Vec<&Superblock> = all.filter(|superblock| superblock.device != device).collect();
            let used = current_copy(&copies, &others).map(|at| unused.swap_remove(at));
            unused.sort_unstable();
            Twins { device, unused, used }
        })
        .collect()
}

/// Which of several copies of one member is current: the newest, if it is newer than every other and other
/// members know its epoch. A claim that no other member supports does not win, and neither does its rival.
fn current_copy(copies: &[&Superblock], others: &[&Superblock]) -> Option<usize> {
    let age = |superblock: &Superblock| (superblock.epoch.number, superblock.sequence);
    let newest = (0..copies.len()).max_by_key(|&at| age(copies[at]))?;
    let alone = (0..copies.len()).all(|at| at == newest || age(copies[at]) < age(copies[newest]));
    let epoch = copies[newest].epoch;
    // A change of epoch may have been interrupted when only some members had the new epoch.
    let confirms = |other: &&Superblock| {
        let same = other.epoch.id == epoch.id;
        same || other.epoch.parent == epoch.id || (epoch.parent != 0 && other.epoch.id == epoch.parent)
    };
    (alone && others.iter().any(confirms)).then_some(newest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use calpe_core::format::Epoch;

    fn members() -> Vec<Candidate<usize>> {
        let devices: Vec<Uuid> = (1..4).map(Uuid::from_u128).collect();
        let superblocks = calpe_core::testing::small_array(2, 1).superblocks(&devices);
        superblocks.into_iter().enumerate().map(|(key, superblock)| Candidate { key, superblock }).collect()
    }

    /// The members with a second copy of member 1, changed; and what is found.
    fn with_copy(change: impl FnOnce(&mut Superblock)) -> Vec<Twins> {
        let mut candidates = members();
        let mut copy = candidates[1].clone();
        change(&mut copy.superblock);
        candidates.push(copy);
        find_twins(&candidates)
    }

    fn used(twins: &[Twins]) -> Option<usize> {
        assert_eq!((twins.len(), twins[0].device), (1, Uuid::from_u128(2)));
        let mut all: Vec<usize> = twins[0].unused.iter().copied().chain(twins[0].used).collect();
        all.sort_unstable();
        assert_eq!(all, [1, 3]);
        twins[0].used
    }

    #[test]
    fn the_newer_copy_is_used_and_of_two_alike_none() {
        assert_eq!(find_twins(&members()), []);
        assert_eq!(used(&with_copy(|_| {})), None);
        assert_eq!(used(&with_copy(|copy| copy.sequence += 1)), Some(3));
        assert_eq!(used(&with_copy(|copy| copy.sequence -= 1)), Some(1));
    }

    #[test]
    fn an_epoch_counts_only_where_others_know_it() {
        let next = |copy: &mut Superblock, parent: u64| {
            copy.epoch = Epoch { number: copy.epoch.number + 1, id: 77, parent, live: copy.epoch.live };
        };
        assert_eq!(used(&with_copy(|copy| next(copy, copy.epoch.id))), Some(3), "a bump that was cut off");
        assert_eq!(used(&with_copy(|copy| next(copy, 12345))), None, "nobody knows it");
    }

    #[test]
    fn of_three_copies_the_newest_is_used() {
        let mut candidates = members();
        for sequence in [7, 9, 8] {
            let mut copy = candidates[0].clone();
            copy.superblock.sequence = sequence;
            candidates.push(copy);
        }
        let twins = find_twins(&candidates);
        assert_eq!((twins[0].used, &twins[0].unused[..]), (Some(4), &[0, 3, 5][..]));
    }
}
