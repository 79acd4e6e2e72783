//! Slots with blocks that could not be read when a device was built, so that it went into service without
//! them. The array itself looks at them again, and builds them when it can.
//!
//! Such a device is in service, and its member counts as online; but these rows have less redundancy than
//! others until their slots are off this list. A slot leaves it only when all of its blocks on the device
//! were read and verified, or written and read again; or when it holds no data.
//!
//! Invariant: the list names every slot that a device joined without in this run; it may name more. The list
//! of an earlier run is handed in (`expect_lacking`).

use crate::array::Core;
use crate::array::base::members::{Member, MemberDevice, Which};
use crate::array::damage::Damage;
use crate::array::passes::rebuild::Target;
use crate::array::{Array, NoticeKind, NoticeLevel};
use crate::block_io::DeviceId;
use crate::format::MemberState;
use crate::units::{Count, MemberIndex, SlotIndex, Timestamp};
use std::collections::BTreeMap;
use uuid::Uuid;

/// Most runs of slots that are remembered of one device; with more, slots between two runs are looked at too.
const RUNS_MAX: usize = 4096;

/// Slots that are looked at together, and the time between such rounds: requests of clients for a slot wait
/// for its look.
const LOOK_ROUND: usize = 4;
const LOOK_INTERVAL_NS: u64 = 5_000_000_000;
/// The time after a round that built a slot: the cause that kept its blocks from being read has ended, for
/// others too.
const BUILT_INTERVAL_NS: u64 = 20_000_000;

/// Slots as runs: the start of each, and its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Slots(BTreeMap<u64, u64>);

impl Slots {
    /// From runs in any order, which may overlap: starts and ends.
    fn of_runs(mut runs: Vec<(u64, u64)>) -> Slots {
        runs.retain(|(start, end)| start < end);
        runs.sort_unstable();
        let mut slots = BTreeMap::<u64, u64>::new();
        for (start, end) in runs {
            let is_full = slots.len() == RUNS_MAX;
            match slots.last_entry() {
                Some(mut last) if is_full || start <= *last.get() => {
                    let longer = end.max(*last.get());
                    *last.get_mut() = longer;
                }
                _ => _ = slots.insert(start, end),
            }
        }
        Slots(slots)
    }

    fn contains(&self, slot: u64) -> bool {
        self.0.range(..=slot).next_back().is_some_and(|(_, end)| slot < *end)
    }

    fn insert(&mut self, slot: u64) -> bool {
        if self.contains(slot) {
            return false;
        }
        let end = self.0.remove(&(slot + 1)).unwrap_or(slot + 1);
        match self.0.range_mut(..slot).next_back().filter(|(_, before)| **before == slot) {
            Some((_, before)) => *before = end,
            None => {
                self.0.insert(slot, end);
            }
        }
        if self.0.len() > RUNS_MAX
            && let Some((_, end)) = self.0.pop_last()
            && let Some(mut last) = self.0.last_entry()
        {
            *last.get_mut() = end;
        }
        true
    }

    fn remove(&mut self, slot: u64) -> bool {
        let Some((start, end)) = self.0.range(..=slot).next_back().map(|(start, end)| (*start, *end)) else {
            return false;
        };
        if slot >= end {
            return false;
        }
        self.0.remove(&start);
        if start < slot {
            self.0.insert(start, slot);
        }
        if slot + 1 < end {
            match self.0.len() < RUNS_MAX {
                true => self.0.insert(slot + 1, end),
                // There is no room for another run, so the slots stay listed.
                false => self.0.insert(start, end),
            };
        }
        !self.contains(slot)
    }

    /// The first slot from here on.
    fn next(&self, from: u64) -> Option<u64> {
        if self.contains(from) {
            return Some(from);
        }
        self.0.range(from..).next().map(|(start, _)| *start)
    }

    fn count(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(in crate::array) struct Lacking {
    /// By the uuid of the device.
    of: BTreeMap<Uuid, Slots>,
    /// Number of looks under way.
    looks: usize,
    last_look: Timestamp,
    /// Whether the last round has built a slot.
    has_built: bool,
    /// The slot where the next look at each device goes on.
    next: BTreeMap<Uuid, u64>,
    revision: u64,
}

impl Lacking {
    /// A number that changes whenever the list does.
    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    fn note(&mut self, device: Uuid, slot: SlotIndex) {
        self.revision += u64::from(self.of.entry(device).or_default().insert(slot.0));
    }

    fn forget(&mut self, device: Uuid, slot: SlotIndex) -> bool {
        let Some(slots) = self.of.get_mut(&device) else { return false };
        let was_there = slots.remove(slot.0);
        if slots.0.is_empty() {
            self.of.remove(&device);
        }
        self.revision += u64::from(was_there);
        was_there
    }

    fn has(&self, device: Uuid, slot: SlotIndex) -> bool {
        self.of.get(&device).is_some_and(|slots| slots.contains(slot.0))
    }

    /// The runs of slots that a device went without: the first slot of each, and the count.
    pub(crate) fn runs_of(&self, device: Uuid) -> Vec<(SlotIndex, u64)> {
        let runs = self.of.get(&device).into_iter().flat_map(|slots| &slots.0);
        runs.map(|(start, end)| (SlotIndex(*start), end - start)).collect()
    }

    fn count(&self, device: Uuid) -> u64 {
        self.of.get(&device).map_or(0, Slots::count)
    }

    /// Adds slots that an earlier run has listed, of an array of `end` slots.
    fn expect(&mut self, device: Uuid, runs: &[(SlotIndex, u64)], end: u64) {
        let inside = |&(SlotIndex(first), many): &(SlotIndex, u64)| {
            (first.min(end), first.saturating_add(many).min(end))
        };
        let slots = Slots::of_runs(runs.iter().map(inside).collect());
        if !slots.0.is_empty() {
            self.of.insert(device, slots);
            self.revision += 1;
        }
    }

    /// Drops a device that is no longer part of this array.
    fn drop_device(&mut self, device: Uuid) {
        self.of.remove(&device);
        self.next.remove(&device);
        self.revision += 1;
    }

    /// Slots of a device that are looked at now; the next round goes on behind them.
    fn take_round(&mut self, device: Uuid) -> Vec<u64> {
        let mut round = Vec::new();
        let (Some(slots), next) = (self.of.get(&device), self.next.entry(device).or_default()) else {
            return round;
        };
        let mut from = *next;
        while round.len() < LOOK_ROUND {
            let Some(slot) = slots.next(from).or_else(|| slots.next(0)) else { break };
            if round.contains(&slot) {
                break;
            }
            round.push(slot);
            from = slot + 1;
        }
        *next = from;
        self.looks += round.len();
        round
    }

    /// When the next round is due.
    fn due(&self) -> Timestamp {
        let interval = if self.has_built { BUILT_INTERVAL_NS } else { LOOK_INTERVAL_NS };
        Timestamp(self.last_look.0 + interval)
    }
}

impl Damage {
    /// Runs of slots that the device of a member, and the one that is being built in its place, went without.
    pub(in crate::array) fn lacking_of(&self, member: &Member) -> Vec<(Uuid, Vec<(SlotIndex, u64)>)> {
        let new = member.replacement.as_ref().map(|new| new.uuid);
        let runs = |uuid| (uuid, self.lacking.runs_of(uuid));
        let devices = [Some(member.uuid), new].into_iter().flatten().map(runs);
        devices.filter(|(_, runs)| !runs.is_empty()).collect()
    }

    /// Records that a device under construction goes without blocks of the slot.
    pub(in crate::array) fn note_lacking(&mut self, core: &Core, slot: SlotIndex, target: &Target) {
        if let Some(device) = core.uuid_of_device(target.device.member, target.device.id) {
            self.lacking.note(device, slot);
        }
    }

    /// Takes the slot off the list: all its blocks are on the device of the member, or none is needed there.
    pub(in crate::array) fn forget_lacking(
        &mut self,
        core: &Core,
        slot: SlotIndex,
        member: MemberIndex,
        device: DeviceId,
    ) {
        if let Some(device) = core.uuid_of_device(member, device)
            && self.lacking.forget(device, slot)
        {
            self.lacking.has_built = true;
        }
    }

    /// Whether the device in service of the member may lack blocks of the slot.
    pub(in crate::array) fn may_lack_slot(&self, core: &Core, member: MemberIndex, slot: SlotIndex) -> bool {
        let of = core.member(member);
        of.state == MemberState::Online && self.lacking.has(of.uuid, slot)
    }

    /// Whether the device that is read for the slot may lack blocks of it: it went into service without them,
    /// or is being built and does not have them yet.
    pub(in crate::array) fn is_read_without(
        &self,
        core: &Core,
        member: MemberIndex,
        slot: SlotIndex,
    ) -> bool {
        if self.lacking.of.is_empty() && !core.any_building() {
            return false;
        }
        let Some(device) = core.readable(member, slot) else { return false };
        let of = core.member(member);
        let new = of.replacement.as_ref().filter(|new| new.device.id == device);
        let (uuid, progress) =
            new.map_or((of.uuid, of.progress.as_ref()), |new| (new.uuid, Some(&new.progress)));
        let is_lacking = progress
            .is_some_and(|progress| progress.lacking.contains(&slot.0) || progress.proofs.has_failed(slot.0));
        is_lacking || self.lacking.has(uuid, slot)
    }

    /// How many slots the device in service of the member went without.
    pub(in crate::array) fn slots_lacking(&self, core: &Core, member: MemberIndex) -> u64 {
        let of = core.member(member);
        if of.state == MemberState::Online { self.lacking.count(of.uuid) } else { 0 }
    }

    /// The members in service, other than this one, with devices that went without slots.
    pub(in crate::array) fn lacking_beside(
        &self,
        core: &Core,
        without: Option<MemberIndex>,
    ) -> Vec<MemberIndex> {
        if self.lacking.of.is_empty() {
            return Vec::new();
        }
        let members = (0..core.roster.members.len()).map(|at| MemberIndex(at as u16));
        members.filter(|&member| Some(member) != without && self.slots_lacking(core, member) > 0).collect()
    }

    /// As [`Damage::lacking_beside`], with a member that has come back with its last device.
    pub(in crate::array) fn lacking_with(&self, core: &Core, back: MemberIndex) -> Vec<MemberIndex> {
        let mut members = self.lacking_beside(core, Some(back));
        if self.lacking.count(core.member(back).uuid) > 0 {
            members.push(back);
        }
        members.sort_unstable();
        members
    }

    /// How many of these members have devices that went without the slot.
    pub(in crate::array) fn lacking_slot(
        &self,
        core: &Core,
        members: &[MemberIndex],
        slot: SlotIndex,
    ) -> usize {
        let has = |member: &&MemberIndex| self.lacking.has(core.member(**member).uuid, slot);
        members.iter().filter(has).count()
    }

    /// The exception, in words, for the slots that these members went without, where the array otherwise
    /// survives `left` more losses.
    pub(in crate::array) fn but_lacking(&self, core: &Core, left: usize, members: &[MemberIndex]) -> String {
        let of = |member: &MemberIndex| self.lacking.count(core.member(*member).uuid);
        let slots: u64 = members.iter().map(of).sum();
        let Some(first) = members.first() else { return String::new() };
        let whose = match members.len() {
            1 => format!("member {first}"),
            more => format!("{more} members"),
        };
        let what = format!("; but blocks of {} were not built on {whose} so far", Count(slots, "slot"));
        match left.checked_sub(members.len()) {
            Some(left) => format!("{what}, and these may survive only {left} more"),
            None => format!("{what}, and may then be unreadable: 'calpe scrub' looks for them"),
        }
    }

    /// Slots that devices went without, to look at now if it is time. Each look ends with
    /// [`Damage::looked_at_lacking`].
    fn lacking_round(&mut self, core: &Core, is_serving: bool) -> Vec<(SlotIndex, Target)> {
        let mut round = Vec::new();
        if !self.may_look_at_lacking(core, is_serving) || self.lacking.due() > core.now {
            return round;
        }
        (self.lacking.last_look, self.lacking.has_built) = (core.now, false);
        let uuids: Vec<Uuid> = self.lacking.of.keys().copied().collect();
        for uuid in uuids {
            let of_uuid = |at: &usize| core.roster.members[*at].uuid == uuid;
            let Some(at) = (0..core.roster.members.len()).find(of_uuid) else {
                if !core.knows(uuid) {
                    // The device was replaced, or given up.
                    self.lacking.drop_device(uuid);
                }
                continue;
            };
            let of = &core.roster.members[at];
            let Some(device) = of.device.filter(|_| of.state == MemberState::Online) else {
                continue;
            };
            let member = MemberIndex(at as u16);
            round.extend(self.lacking.take_round(uuid).into_iter().map(SlotIndex).map(|slot| {
                let column = usize::from(core.map.column_of(slot, member).0);
                let device = MemberDevice { member, which: Which::Primary, id: device.id };
                (slot, Target { device, column })
            }));
        }
        round
    }

    /// Counts a look at a slot that has ended.
    pub(in crate::array) fn looked_at_lacking(&mut self) {
        self.lacking.looks -= 1;
    }

    fn may_look_at_lacking(&self, core: &Core, is_serving: bool) -> bool {
        let may_begin = !core.stop.hurried && core.stop.stopping.is_none() && !core.is_failed();
        self.lacking.looks == 0 && !self.lacking.of.is_empty() && may_begin && is_serving
    }

    /// When a tick is due for slots that can probably be built.
    pub(super) fn lacking_soon(&self, core: &Core, is_serving: bool) -> Option<Timestamp> {
        (self.lacking.has_built && self.may_look_at_lacking(core, is_serving)).then(|| self.lacking.due())
    }

    /// Reports the slots that a device that was built and joins goes without.
    pub(in crate::array) fn tell_lacking(&self, core: &mut Core, member: MemberIndex, which: Which) {
        let of = core.member(member);
        let (device, progress) = match which {
            Which::Primary => (Some(of.uuid), of.progress.as_ref()),
            Which::Replacement => (
                of.replacement.as_ref().map(|new| new.uuid),
                of.replacement.as_ref().map(|new| &new.progress),
            ),
        };
        let slots = device.and_then(|device| self.lacking.of.get(&device));
        let Some((slots, first)) = slots.and_then(|slots| Some((slots.count(), slots.next(0)?))) else {
            return;
        };
        let what = match progress.is_some_and(|progress| progress.since.is_some()) {
            true => format!("member {member} is caught up without"),
            false => format!("the new device of member {member} goes without"),
        };
        let which = match slots {
            1 => format!("slot {first} that cannot be read"),
            many => format!("{many} slots that cannot be read, the first of which is slot {first}"),
        };
        let text = format!("{what} blocks of {which}: they are looked at again, and built when they can be");
        core.notice(NoticeKind::SlotLacks, NoticeLevel::Error, Some(member), text);
    }
}

impl Array {
    /// Takes the slots that a device went into service without in an earlier run, as runs: the first slot of
    /// each, and the count. They are looked at as soon as the array serves. Slots that this array does not
    /// have are left out.
    pub fn expect_lacking(&mut self, device: Uuid, runs: &[(SlotIndex, u64)]) {
        self.damage.lacking.expect(device, runs, self.core.map.slots);
    }

    /// Tick: looks again at slots that devices went without.
    pub(super) fn look_at_lacking(&mut self) {
        for (slot, target) in self.damage.lacking_round(&self.core, self.redo.is_serving()) {
            self.start_build_of(slot, target);
        }
    }
}

impl Core {
    fn uuid_of_device(&self, member: MemberIndex, device: DeviceId) -> Option<Uuid> {
        let of = self.member(member);
        match self.find_device(device)? {
            (at, Which::Primary) if at == member => Some(of.uuid),
            (at, Which::Replacement) if at == member => of.replacement.as_ref().map(|new| new.uuid),
            _ => None,
        }
    }

    /// Whether the device is that of a member, in service or not, or one that is being built.
    pub(in crate::array) fn knows(&self, device: Uuid) -> bool {
        self.roster.members.iter().any(|member| {
            member.uuid == device || member.replacement.as_ref().is_some_and(|new| new.uuid == device)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(slots: &Slots) -> Vec<u64> {
        let mut found = Vec::new();
        let mut from = 0;
        while let Some(slot) = slots.next(from) {
            found.push(slot);
            from = slot + 1;
        }
        found
    }

    #[test]
    fn slots_are_remembered_one_by_one_and_as_runs() {
        let mut slots = Slots::default();
        for slot in [5, 3, 4, 9, 7, 8, 0] {
            assert!(slots.insert(slot) && !slots.insert(slot));
        }
        assert_eq!((all(&slots), slots.count(), slots.0.len()), (vec![0, 3, 4, 5, 7, 8, 9], 7, 3));
        for slot in [4, 7, 9, 0] {
            assert!(slots.remove(slot) && !slots.remove(slot));
        }
        assert_eq!((all(&slots), slots.0.len()), (vec![3, 5, 8], 3));
        assert!([1, 4, 7, 9].iter().all(|slot| !slots.contains(*slot)));
    }

    #[test]
    fn runs_of_an_earlier_list_are_put_together() {
        let slots = Slots::of_runs(vec![(7, 9), (1, 3), (5, 5), (3, 4), (8, 10), (20, 21)]);
        assert_eq!(slots.0, BTreeMap::from([(1, 4), (7, 10), (20, 21)]));
        let many = (0..2 * RUNS_MAX as u64).map(|n| (3 * n, 3 * n + 1)).collect();
        let slots = Slots::of_runs(many);
        assert!(slots.0.len() == RUNS_MAX && slots.contains(3 * (2 * RUNS_MAX as u64 - 1)));
    }

    #[test]
    fn with_more_runs_than_are_remembered_none_is_forgotten() {
        let mut slots = Slots::default();
        let many = RUNS_MAX as u64 + 100;
        for slot in (0..many).map(|n| n * 2) {
            slots.insert(slot);
        }
        assert!(slots.0.len() <= RUNS_MAX && (0..many).all(|n| slots.contains(n * 2)));
        // Each is found good in turn, until the list is empty.
        let mut rounds = 0;
        while let Some(slot) = slots.next(0) {
            assert!(slots.remove(slot));
            rounds += 1;
        }
        assert!(rounds >= many);
    }
}
