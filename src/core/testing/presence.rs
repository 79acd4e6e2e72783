//! Which members are present at the start after a crash: the losses, returns and stale members that the
//! explorer tries.

use super::sickness::depth_of_bad_sectors;
use super::{Random, Scenario, SimDisk, superblocks};
use crate::block_io::DeviceId;
use crate::format::{Role, Superblock};
use crate::units::LaneIndex;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The members and disks that are present at a start.
#[derive(Debug, Default)]
pub(super) struct Presence {
    /// Members that are present and known to be current: bit by index.
    pub current: u64,
    /// Members that were current and are gone.
    pub lost: u64,
    /// Disks that are present and perhaps stale.
    pub others: Vec<DeviceId>,
    /// Members whose logs are damaged.
    pub ruined: u64,
    /// Disks whose logs cannot be read for a moment.
    pub blind: BTreeSet<u32>,
    /// A superblock makes a claim that no other confirms: the start may be refused unless it is forced.
    pub claims: bool,
    /// Descriptions of other changes to members.
    pub said: Vec<String>,
}

impl fmt::Display for Presence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let others: Vec<u32> = self.others.iter().map(|id| id.0).collect();
        write!(f, "current members {:#b}, lost {:#b}, other disks {others:?}", self.current, self.lost)?;
        if self.ruined != 0 {
            write!(f, ", logs damaged {:#b}", self.ruined)?;
        }
        self.said.iter().try_for_each(|said| write!(f, ", {said}"))
    }
}

/// Decides which disks are present at the next start: of the current ones all but some, of the others any.
/// `seats` are the disks, with their members, that were in service and sound at the crash; `faithful` are the
/// members that have been so ever since the array was created: bit by index.
pub(super) fn choose(
    disks: &mut BTreeMap<u32, SimDisk>,
    scenario: &Scenario,
    seats: &[(u32, u16)],
    faithful: u64,
    random: &mut Random,
) -> Presence {
    let shape = scenario.shape;
    let known_in = |lane: LaneIndex| -> Vec<(u32, Superblock)> {
        let of = |(id, disk): (&u32, &SimDisk)| Some((*id, superblocks::of_lane(disk, lane)?));
        disks.iter().filter_map(of).collect()
    };
    let lanes = disks.values().next().map(SimDisk::lanes);
    let of_lanes: Vec<Vec<(u32, Superblock)>> = lanes.into_iter().flatten().map(known_in).collect();
    let known = of_lanes.first().cloned().unwrap_or_default();
    let newest = known.iter().map(|(_, s)| s.epoch.number).max().unwrap_or(0);
    // A member is current if it is in every lane.
    let is_good = |seat: &(u32, u16)| of_lanes.iter().all(|known| is_good(known, seat, faithful));
    // An array may have believed a forged superblock. It counts as a fault until an update overwrites it.
    let is_forged = |id: &u32| {
        let newest = known.iter().find(|(other, _)| other == id).map(|(_, s)| s.sequence);
        disks.get(id).and_then(|disk| disk.forged).is_some_and(|forged| newest.is_none_or(|s| s <= forged))
    };
    let good: Vec<(u32, u16)> =
        seats.iter().filter(|seat| is_good(seat) && !is_forged(&seat.0)).copied().collect();
    let missing = usize::from(shape.width()) - good.len();
    let sick = missing + depth_of_bad_sectors(disks.values());
    let spare = usize::from(shape.parity).saturating_sub(sick);
    // A disk that is being replaced is not among the good ones, and may still be needed.
    let none_may_go = sick > usize::from(shape.parity);
    let has_bad_sectors = disks.values().any(|disk| disk.scattered);
    // Now and then an arbitrary choice of members: with stale ones in place of current ones the array must
    // refuse to start, or return the right data.
    let any = random.one_in(scenario.any_one_in);
    let loss = match random.below(3) {
        _ if any && !has_bad_sectors => {
            random.below(usize::from(shape.parity).min(good.len()) as u64 + 1) as usize
        }
        0 => 0,
        1 => spare,
        _ => random.below(spare as u64 + 1) as usize,
    };
    let lost = random.choose(loss, good.len());
    let side = random.below(scenario.sides_one_in.max(1)) == 0 && scenario.sides_one_in > 0;
    let side = side.then(|| one_side(&known, newest, random));
    let mut presence = Presence::default();
    for (at, (id, member)) in good.iter().enumerate() {
        if side.as_ref().map_or(lost.contains(&at), |side| !side.contains(id)) {
            if let Some(disk) = disks.get_mut(id) {
                disk.dead = true;
            }
            presence.lost |= 1 << member;
        } else {
            presence.current |= 1 << member;
        }
    }
    for (id, disk) in disks.iter_mut().filter(|(id, _)| good.iter().all(|(other, _)| other != *id)) {
        disk.failing_flushes = 0;
        let there = if disk.dead && !any { random.one_in(3) } else { !random.one_in(4) };
        let there = side.as_ref().map_or(there, |side| side.contains(id)) || none_may_go;
        disk.dead = !there;
        if there {
            presence.others.push(DeviceId(*id));
        }
    }
    presence
}

/// Whether a seat holds what was acknowledged, by the superblocks of one lane.
fn is_good(known: &[(u32, Superblock)], (id, member): &(u32, u16), faithful: u64) -> bool {
    let newest = known.iter().map(|(_, s)| s.epoch.number).max().unwrap_or(0);
    let heads: Vec<_> = known.iter().filter(|(_, s)| s.epoch.number == newest).map(|(_, s)| s).collect();
    let is_current = |s: &Superblock| {
        s.role == Role::Member
                // A member that was just built is in the live set of the newest epoch, which may be
                // incomplete.
                && s.epoch.live.contains(s.member)
                && heads.iter().all(|head| {
                    head.epoch.live.contains(s.member)
                        && (head.epoch.id == s.epoch.id || head.epoch.parent == s.epoch.id)
                        && head.members[usize::from(s.member.0)].uuid == s.device
                })
    };
    // A member that has always been in service is current whatever the others record; a member built
    // meanwhile is current only if the others record that.
    known.iter().any(|(other, s)| {
        let named = s.role == Role::Member && s.epoch.live.contains(s.member);
        other == id && (is_current(s) || (named && faithful >> member & 1 == 1))
    })
}

/// The disks that hold one of the newest epochs, or all others: when the epochs on one side were cut short,
/// the other side may look complete.
fn one_side(known: &[(u32, Superblock)], newest: u64, random: &mut Random) -> BTreeSet<u32> {
    let ids: BTreeSet<u64> =
        known.iter().filter(|(_, s)| s.epoch.number == newest).map(|(_, s)| s.epoch.id).collect();
    let which = random.below(ids.len().max(1) as u64) as usize;
    let of = ids.into_iter().nth(which);
    let holders = random.one_in(2);
    known.iter().filter(|(_, s)| (Some(s.epoch.id) == of) == holders).map(|(id, _)| *id).collect()
}
