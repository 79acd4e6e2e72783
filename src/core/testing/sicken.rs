//! Faults that the explorer adds to a start after a crash: members whose operations fail for a while, members
//! that were rolled back, and members whose superblocks claim things that no other confirms.

use super::old_copies::{OldCopy, roll_back};
use super::presence::Presence;
use super::sickness::{self, SPAN_MAX, depth_of_bad_sectors, describe};
use super::{
    Claim, DiskRegion, FaultCounts, FaultKind, FaultKinds, OpKinds, PassingFault, Random, Scenario, SimDisk,
    Trouble, superblocks,
};
use crate::block_io::DeviceId;
use crate::units::Timestamp;
use std::collections::{BTreeMap, BTreeSet};

/// One in this many of the starts that may be given more faults gets some.
const SICK_ONE_IN: u64 = 2;

/// The kinds of faults that a member may have at a start.
const OF_STARTS: FaultKinds =
    FaultKinds::of(&[FaultKind::StartErrors, FaultKind::Rollback, FaultKind::Hostile]);
/// The kinds of faults that [`FaultKind::StartErrors`] may be.
const OF_ONE: FaultKinds =
    FaultKinds::of(&[FaultKind::ReadErrors, FaultKind::WriteErrors, FaultKind::Shortage, FaultKind::NoSpace]);

/// Makes some of the present, current members sick: at most as many as the array can spare beside those that
/// are missing or stale. They count as missing from then on. Ends the faults of the time before the crash.
pub(super) fn sicken(
    disks: &mut BTreeMap<u32, SimDisk>,
    presence: &mut Presence,
    scenario: &Scenario,
    copies: &[OldCopy],
    (random, counts): (&mut Random, &mut FaultCounts),
) {
    let kinds = scenario.workload.kinds.and(OF_STARTS);
    if scenario.workload.kinds.is_empty() {
        return;
    }
    disks.values_mut().for_each(SimDisk::clear_faults);
    let missing = usize::from(scenario.shape.width()) - presence.current.count_ones() as usize;
    let spare =
        usize::from(scenario.shape.parity).saturating_sub(missing + depth_of_bad_sectors(disks.values()));
    if kinds.is_empty() || spare == 0 || !random.one_in(SICK_ONE_IN) {
        return;
    }
    let members: Vec<u16> =
        (0..scenario.shape.width()).filter(|at| presence.current >> at & 1 == 1).collect();
    for at in random.choose(1 + random.clone().index(spare), members.len()) {
        let member = members[at];
        let Some(id) = holder(disks, member) else { continue };
        let Some(kind) = kinds.pick(random) else { return };
        let Some(disk) = disks.get_mut(&id) else { continue };
        let what = match kind {
            FaultKind::Rollback => roll_back(disk, copies, random),
            FaultKind::Hostile => forge(disk, random),
            _ => trouble(disk, scenario, random),
        };
        let Some(what) = what else { continue };
        counts.count(kind);
        presence.said.push(format!("member {member} {what}"));
        presence.current &= !(1 << member);
        presence.others.push(DeviceId(id));
    }
}

/// The present disk with the newest superblock of this member.
fn holder(disks: &BTreeMap<u32, SimDisk>, member: u16) -> Option<u32> {
    let known = disks.iter().filter(|(_, disk)| !disk.dead);
    let known = known.filter_map(|(id, disk)| Some((*id, superblocks::newest(disk)?)));
    let of_member = known.filter(|(_, superblock)| superblock.member.0 == member);
    of_member.max_by_key(|(_, superblock)| (superblock.epoch.number, superblock.sequence)).map(|(id, _)| id)
}

/// Rolls back more members than can be spared, but never all. Returns what was done, if anything.
pub(super) fn roll_back_many(
    disks: &mut BTreeMap<u32, SimDisk>,
    presence: &Presence,
    scenario: &Scenario,
    copies: &[OldCopy],
    (random, counts): (&mut Random, &mut FaultCounts),
) -> Option<String> {
    let is_wanted = scenario.workload.kinds.contains(FaultKind::RollbackMany) && random.one_in(SICK_ONE_IN);
    let mut members: Vec<u16> =
        (0..scenario.shape.width()).filter(|at| presence.current >> at & 1 == 1).collect();
    if !is_wanted || members.len() <= usize::from(scenario.shape.parity) + 1 {
        return None;
    }
    disks.values_mut().for_each(SimDisk::clear_faults);
    random.shuffle(&mut members);
    let most = members.len() - 1;
    let count = most - random.index(most - usize::from(scenario.shape.parity));
    let mut done = Vec::new();
    for &member in &members[..count] {
        let disk = holder(disks, member).and_then(|id| disks.get_mut(&id));
        if let Some(what) = disk.and_then(|disk| roll_back(disk, copies, random)) {
            done.push(format!("member {member} {what}"));
        }
    }
    counts.count(FaultKind::RollbackMany);
    (!done.is_empty()).then(|| done.join(", "))
}

/// Makes the logs of some members unreadable at a start, for less time than the start keeps trying. On any
/// number of members, and whatever else is wrong with the logs, that must change nothing (T1, T3) except the
/// words where nothing can be done. Returns what was done, and to which disks, if anything.
pub(super) fn blind_logs(
    disks: &mut BTreeMap<u32, SimDisk>,
    scenario: &Scenario,
    (random, counts): (&mut Random, &mut FaultCounts),
) -> Option<(String, BTreeSet<u32>)> {
    if !scenario.workload.kinds.contains(FaultKind::StartErrors) || !random.one_in(2) {
        return None;
    }
    let mut blind = BTreeSet::new();
    for (id, disk) in disks.iter_mut().filter(|(_, disk)| !disk.dead) {
        if random.one_in(2) {
            let until = Timestamp(1 + (SPAN_MAX >> random.below(8)));
            let fault = PassingFault::new(Trouble::Medium).on(OpKinds::READS).until(until);
            let within = DiskRegion::Log.ranges(disk);
            disk.inject(fault.within(within).one_in(1 << random.below(3), random.next_u64()));
            blind.insert(*id);
        }
    }
    counts.count(FaultKind::StartErrors);
    let text = format!("the logs of disks {blind:?} cannot be read for a moment");
    (!blind.is_empty()).then_some((text, blind))
}

fn forge(disk: &mut SimDisk, random: &mut Random) -> Option<String> {
    let claim = Claim::ALL[random.index(Claim::ALL.len())];
    let value = match random.below(6) {
        0 => u64::MAX,
        1 => u64::MAX - 1 - random.below(3),
        2 => 1 << 40,
        3 => 0,
        _ => random.next_u64() >> random.below(64),
    };
    let is_relative = random.one_in(3);
    let said = |before: u64| if is_relative { before.wrapping_add(1 + value % 4) } else { value };
    // Otherwise most copies would be in a slot that does not match their sequence.
    let keeps_slots = claim == Claim::Sequence && !random.one_in(4);
    let said = |before: u64| if keeps_slots { claim.in_place(said(before), before) } else { said(before) };
    let before = disk.forge_superblock(claim, said)?;
    disk.forged = Some(superblocks::newest(disk).map_or(u64::MAX, |forged| forged.sequence));
    Some(format!("claims {:#x} as {claim:?}, not {before:#x}", said(before)))
}

fn trouble(disk: &mut SimDisk, scenario: &Scenario, random: &mut Random) -> Option<String> {
    let kind = scenario.workload.kinds.and(OF_ONE).pick(random)?;
    let fault = sickness::fault_of(kind, disk, Timestamp(1), random)?;
    let what = format!("has trouble: {}", describe(&fault));
    disk.inject(fault);
    Some(what)
}
