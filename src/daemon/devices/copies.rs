//! Several devices that claim to be the same member: a file was copied, a disk was cloned, or a snapshot of
//! one lies beside it. At most one of them is used, in all lanes. Pure: superblocks in, a verdict out.

use calpe_core::format::Superblock;
use calpe_core::units::MemberIndex;
use std::collections::BTreeMap;
use uuid::Uuid;

/// Devices that claim to be the same member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Twins {
    /// The identity that occurs more than once.
    pub device: Uuid,
    /// Indexes, in the list of claims, of those that are not used.
    pub unused: Vec<usize>,
    /// Index of the one that is used, if it is known which is current.
    pub used: Option<usize>,
}

impl Twins {
    /// Why the others are not used, for people. `path`: the path of an index in the list of claims.
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

/// What a device says that it is.
#[derive(Clone, Debug)]
pub(super) struct Claim<'s> {
    /// Its identity.
    pub device: Uuid,
    /// The superblock of each lane, where it has a usable one.
    pub lanes: Vec<Option<&'s Superblock>>,
}

impl Claim<'_> {
    fn lane(&self, lane: usize) -> Option<&Superblock> {
        self.lanes.get(lane).copied().flatten()
    }

    /// Newer is more; no usable superblock is least.
    fn age(&self, lane: usize) -> Option<(u64, u64)> {
        self.lane(lane).map(|superblock| (superblock.epoch.number, superblock.sequence))
    }
}

/// Finds devices of one identity among these, and which of them is current.
#[must_use]
pub(super) fn find_twins(claims: &[Claim<'_>]) -> Vec<Twins> {
    let mut places: BTreeMap<Uuid, Vec<usize>> = BTreeMap::new();
    for (at, claim) in claims.iter().enumerate() {
        places.entry(claim.device).or_default().push(at);
    }
    let twins = places.into_iter().filter(|(_, places)| places.len() > 1);
    twins
        .map(|(device, mut unused)| {
            let copies: Vec<&Claim<'_>> = unused.iter().map(|&at| &claims[at]).collect();
            let others: Vec<&Claim<'_>> = claims.iter().filter(|claim| claim.device != device).collect();
            let used = current_copy(&copies, &others).map(|at| unused.swap_remove(at));
            unused.sort_unstable();
            Twins { device, unused, used }
        })
        .collect()
}

/// Which of several copies of one member is current: the one that is older than another in no lane, and newer
/// than each in some lane, if other members know its epoch there. A claim that no other member supports does
/// not win, and neither does its rival.
fn current_copy(copies: &[&Claim<'_>], others: &[&Claim<'_>]) -> Option<usize> {
    let lanes = copies.iter().map(|copy| copy.lanes.len()).max()?;
    let is_current = |at: &usize| {
        let own = copies[*at];
        let mut rivals = (0..copies.len()).filter(|rival| rival != at).map(|rival| copies[rival]);
        rivals.all(|rival| {
            let is_older = |lane: usize| own.age(lane) < rival.age(lane);
            let mut newer = (0..lanes).filter(|&lane| own.age(lane) > rival.age(lane)).peekable();
            !(0..lanes).any(is_older)
                && newer.peek().is_some()
                && newer.all(|lane| own.lane(lane).is_some_and(|own| is_known(own, lane, others)))
        })
    };
    (0..copies.len()).find(is_current)
}

/// Whether another member knows the epoch of a superblock. A change of epoch may have been interrupted when
/// only some members had the new epoch.
fn is_known(superblock: &Superblock, lane: usize, others: &[&Claim<'_>]) -> bool {
    let epoch = superblock.epoch;
    let confirms = |other: &Superblock| {
        let same = other.epoch.id == epoch.id;
        same || other.epoch.parent == epoch.id || (epoch.parent != 0 && other.epoch.id == epoch.parent)
    };
    others.iter().filter_map(|other| other.lane(lane)).any(confirms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use calpe_core::format::Epoch;

    fn members() -> Vec<Superblock> {
        let devices: Vec<Uuid> = (1..4).map(Uuid::from_u128).collect();
        calpe_core::testing::small_array(2, 1).superblocks(&devices)
    }

    /// What is found among devices with these superblocks, one for each lane.
    fn found(devices: &[Vec<Option<Superblock>>]) -> Vec<Twins> {
        let claims = devices.iter().map(|lanes| Claim {
            device: lanes.iter().flatten().next().unwrap().device,
            lanes: lanes.iter().map(Option::as_ref).collect(),
        });
        find_twins(&claims.collect::<Vec<_>>())
    }

    fn found_uncut(devices: Vec<Superblock>) -> Vec<Twins> {
        found(&devices.into_iter().map(|superblock| vec![Some(superblock)]).collect::<Vec<_>>())
    }

    /// The members with a second copy of member 1, changed; and what is found.
    fn with_copy(change: impl FnOnce(&mut Superblock)) -> Vec<Twins> {
        let mut devices = members();
        let mut copy = devices[1].clone();
        change(&mut copy);
        devices.push(copy);
        found_uncut(devices)
    }

    /// The same with three lanes, whose superblocks in the copy are changed.
    fn with_copy_of_lanes(change: impl FnOnce(&mut [Option<Superblock>])) -> Vec<Twins> {
        let mut devices: Vec<_> = members().into_iter().map(|superblock| vec![Some(superblock); 3]).collect();
        let mut copy = devices[1].clone();
        change(&mut copy);
        devices.push(copy);
        found(&devices)
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
        assert_eq!(found_uncut(members()), []);
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
        let mut devices = members();
        for sequence in [7, 9, 8] {
            let copy = Superblock { sequence, ..devices[0].clone() };
            devices.push(copy);
        }
        let twins = found_uncut(devices);
        assert_eq!((twins[0].used, &twins[0].unused[..]), (Some(4), &[0, 3, 5][..]));
    }

    #[test]
    fn a_copy_is_current_that_is_older_in_no_lane_and_newer_in_some() {
        fn at(lane: &mut Option<Superblock>) -> &mut Superblock {
            lane.as_mut().unwrap()
        }
        assert_eq!(used(&with_copy_of_lanes(|_| {})), None);
        assert_eq!(used(&with_copy_of_lanes(|lanes| at(&mut lanes[2]).sequence += 1)), Some(3));
        assert_eq!(used(&with_copy_of_lanes(|lanes| at(&mut lanes[1]).sequence -= 1)), Some(1));
        let divided = |lanes: &mut [Option<Superblock>]| {
            at(&mut lanes[0]).sequence += 1;
            at(&mut lanes[2]).sequence -= 1;
        };
        assert_eq!(used(&with_copy_of_lanes(divided)), None, "newer in one lane, older in another");
        assert_eq!(used(&with_copy_of_lanes(|lanes| lanes[1] = None)), Some(1), "one lane cannot be read");
        let unknown = |lanes: &mut [Option<Superblock>]| {
            at(&mut lanes[0]).sequence += 1;
            let epoch = &mut at(&mut lanes[1]).epoch;
            (epoch.number, epoch.id, epoch.parent) = (epoch.number + 1, 77, 12345);
        };
        assert_eq!(used(&with_copy_of_lanes(unknown)), None, "nobody knows its epoch in lane 1");
    }
}
