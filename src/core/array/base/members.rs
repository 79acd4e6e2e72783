//! The members of an array: which serves which slot, which must get a write, and what happens when one fails.

use crate::array::base::inflight::Inflight;
use crate::array::base::proofs::{Consequence, Proof, Proofs};
use crate::array::mutation::{Mutation, is_off};
use crate::array::{ArrayAction, Core, Effect, Stopping};
use crate::array::{MemberCondition, MemberCounters, NoticeKind, NoticeLevel};
use crate::block_io::{DeviceId, IoFault, IoFaultKind, IoValue};
use crate::format::{LanePart, MemberSet, MemberState};
use crate::units::{ByteOffset, MemberIndex, SlotIndex, Timestamp};
use std::collections::BTreeSet;
use uuid::Uuid;

/// A device that another has taken the place of: held until that is on disk, and on itself.
#[derive(Clone, Copy, Debug)]
pub(in crate::array) struct Replaced {
    pub member: MemberIndex,
    pub uuid: Uuid,
    pub device: Device,
}

/// One of a member's devices as an operation on it has found it: it may have left since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) struct MemberDevice {
    pub member: MemberIndex,
    pub which: Which,
    pub id: DeviceId,
}

/// A device in the hands of the array.
#[derive(Clone, Copy, Debug)]
pub(in crate::array) struct Device {
    pub id: DeviceId,
    pub bytes: u64,
    /// Writes that have completed on it.
    pub writes: u64,
    /// `writes` when the last successful flush began.
    pub flushed: u64,
    /// A superblock on it says what it is; a restart would find it.
    pub recorded: bool,
    /// Whether the device has refused to zero a range other than by writing.
    pub cannot_zero: bool,
    /// The sequence of the newest superblock that is known to be whole on it. The next one goes to the other
    /// slot.
    pub sequence: u64,
    /// The other slot holds nothing that a torn update of an earlier life has left.
    pub cleared: bool,
    /// Whether the device came without a superblock.
    pub is_blank: bool,
    /// The sequence of the superblock that the array has written last to each slot, those of even and of odd
    /// sequences.
    pub written: [Option<u64>; 2],
}

impl Device {
    /// A device about whose cache nothing is known yet; `sequence` is that of its superblock, 0 where it has
    /// none.
    pub(in crate::array) fn new(id: DeviceId, bytes: u64, sequence: u64) -> Device {
        Device {
            id,
            bytes,
            writes: 1,
            flushed: 0,
            recorded: false,
            cannot_zero: false,
            sequence,
            cleared: false,
            is_blank: false,
            written: [None; 2],
        }
    }

    /// A device that assembly has found by its superblock.
    pub(in crate::array) fn found(id: DeviceId, bytes: u64, sequence: u64) -> Device {
        Device { recorded: true, ..Device::new(id, bytes, sequence) }
    }

    /// Whether a flush would make anything durable.
    pub(in crate::array) fn is_unflushed(&self) -> bool {
        self.flushed < self.writes
    }
}

/// How long a device does not join that lacks nothing but blocks and metadata pages that cannot be read. The
/// member that it replaces may hold their only copy, and others may leave once it has joined.
const JOIN_PATIENCE_NS: u64 = 30_000_000_000;

/// Time between two tries to build the blocks that it lacks.
const LACKING_RETRY_NS: u64 = 1_000_000_000;

/// How far a device has been built. Slots are built in ascending order, several at a time.
#[derive(Clone, Debug)]
pub(in crate::array) struct Progress {
    /// Slots from here on have not been started.
    pub next: u64,
    /// Slots below `next` that are not complete.
    pub running: BTreeSet<u64>,
    /// Slots below `next` that could not be built whole, because blocks cannot be read for now.
    pub lacking: BTreeSet<u64>,
    /// When the next of them is tried again.
    pub again: Timestamp,
    /// When it was first found that only these are left.
    pub waits_since: Option<Timestamp>,
    /// Slots from `next` on read as zeroes, so a slot of zeroes need not be written.
    pub known_zero: bool,
    /// The device is current as of the end of this epoch: only data written later has to be built.
    pub since: Option<u64>,
    /// Slots of `lacking` that are being built once more, and perhaps some that have been since.
    pub retrying: BTreeSet<u64>,
    /// The most slots that were complete at one time: slots that are built once more were shown as done.
    pub covered_max: u64,
    /// Its log is being read, which may show that it is not current as of `since`: nothing is built before
    /// that.
    pub awaits_ring: bool,
    /// How far its copies of metadata pages have come.
    pub pages: PagesBuilt,
    /// Pages that could not be read at first, and are tried again.
    pub retried_pages: u64,
    /// What was built before an unclean stop.
    pub proofs: Proofs,
}

/// Copies of metadata pages on a device under construction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::array) enum PagesBuilt {
    #[default]
    No,
    Running,
    Done,
}

impl Progress {
    pub(in crate::array) fn fresh(known_zero: bool) -> Progress {
        Progress::starting_at(0, known_zero)
    }

    /// Everything from slot `next` on has to be built.
    pub(in crate::array) fn starting_at(next: u64, known_zero: bool) -> Progress {
        let pages = PagesBuilt::No;
        Progress {
            next,
            running: BTreeSet::new(),
            lacking: BTreeSet::new(),
            again: Timestamp(0),
            waits_since: None,
            known_zero,
            since: None,
            retrying: BTreeSet::new(),
            covered_max: 0,
            awaits_ring: false,
            pages,
            retried_pages: 0,
            proofs: Proofs::default(),
        }
    }

    /// After a restart slots beyond the recorded position may have been written already. `is_proven`: those
    /// below hold what they are to hold.
    pub(in crate::array) fn resumed(rebuilt: SlotIndex, is_proven: bool) -> Progress {
        Progress { proofs: Proofs::of(rebuilt, is_proven), ..Progress::starting_at(rebuilt.0, false) }
    }

    /// The next slot to be compared.
    pub(in crate::array) fn next_unproven(&self, now: Timestamp) -> Option<u64> {
        self.proofs.next(now).filter(|_| !self.awaits_ring)
    }

    /// Takes the outcome for a slot that was being compared.
    pub(in crate::array) fn end_proof(&mut self, slot: u64, outcome: Proof, now: Timestamp) {
        if self.proofs.end(slot, outcome, now) == Consequence::Rewind {
            self.rewind_to(slot);
        }
    }

    /// The slot to be built next. Slots that could not be built whole come again when all others are done.
    pub(in crate::array) fn due(&self, slots: u64, now: Timestamp) -> Option<u64> {
        if self.awaits_ring {
            return None;
        }
        if let Some(slot) = self.proofs.due() {
            return Some(slot);
        }
        if self.next < slots {
            return Some(self.next);
        }
        self.lacking.difference(&self.running).next().copied().filter(|_| now >= self.again)
    }

    /// Records that slot `slot`, which was due, is being built.
    pub(in crate::array) fn begin(&mut self, slot: u64) {
        if self.proofs.begin_build(slot) {
            self.running.insert(slot);
            return;
        }
        if self.lacking.remove(&slot) {
            self.retrying.retain(|slot| self.running.contains(slot));
            self.retrying.insert(slot);
        }
        self.next = self.next.max(slot + 1);
        self.running.insert(slot);
    }

    /// Records that slot `slot`, which is being built, lacks blocks that cannot be read for now. False: it
    /// was tried for long enough.
    pub(in crate::array) fn lacks(&mut self, slot: u64, slots: u64, now: Timestamp) -> bool {
        if is_off(Mutation::JoinsLacking) {
            return false;
        }
        if self.next >= slots && self.proofs.are_over() && !self.is_patient(now) {
            return false;
        }
        self.lacking.insert(slot);
        self.again = Timestamp(now.0 + LACKING_RETRY_NS);
        true
    }

    /// Makes slot `slot`, which was begun once more and not completed, due again. False: it was begun for the
    /// first time.
    pub(in crate::array) fn put_back(&mut self, slot: u64, now: Timestamp) -> bool {
        let is_again = self.retrying.contains(&slot);
        if is_again {
            self.lacking.insert(slot);
            self.again = Timestamp(now.0 + LACKING_RETRY_NS);
        }
        is_again
    }

    /// Whether a device, on which everything is built except for blocks that cannot be read, still waits for
    /// those.
    pub(in crate::array) fn is_patient(&mut self, now: Timestamp) -> bool {
        now.nanos_since(*self.waits_since.get_or_insert(now)) < JOIN_PATIENCE_NS
    }

    /// Whether all slots are built, as far as their blocks can be had.
    pub(in crate::array) fn is_over(&self, slots: u64) -> bool {
        self.done() >= slots && self.lacking.is_empty() && self.proofs.are_over()
    }

    /// Starts slot `slot`, which was not completed, and all after it again. Slots that are still running keep
    /// their place and are then done twice, which is harmless under their locks.
    pub(in crate::array) fn rewind_to(&mut self, slot: u64) {
        self.covered_max = self.covered();
        self.next = self.next.min(slot);
        self.proofs.rewind_to(slot);
        self.known_zero = false;
    }

    /// Whether writes to `slot` must reach the device, because its slot is built. A slot that is being built,
    /// or waits for its lock, gets the new content when its turn comes.
    pub(super) fn has(&self, slot: SlotIndex) -> bool {
        slot.0 < self.next && !self.running.contains(&slot.0)
    }

    /// The slot at which a restart goes on. Slots that could not be built whole are not recorded otherwise,
    /// nor are those that were not compared: after a clean stop nothing would compare them.
    pub(in crate::array) fn recorded(&self, is_clean: bool) -> u64 {
        let mut first = self.running.iter().copied().filter(|slot| !self.proofs.is_rebuilding(*slot));
        let done = first.next().unwrap_or(self.next).min(self.next);
        let built = self.lacking.first().copied().unwrap_or(self.next).min(done);
        let open = self.proofs.first_open().filter(|_| is_clean);
        built.min(open.unwrap_or(built))
    }

    /// Takes the end of the build of a slot.
    pub(in crate::array) fn built(&mut self, slot: u64, complete: bool) {
        self.running.remove(&slot);
        if !self.proofs.end_build(slot, complete) && !complete {
            self.rewind_to(slot);
        }
    }

    /// How many slots to show as complete: never fewer than before, whatever is tried again.
    pub(in crate::array) fn covered(&self) -> u64 {
        let mut first = self.running.difference(&self.retrying);
        let first = first.find(|slot| !self.proofs.is_rebuilding(**slot));
        let first = first.copied().unwrap_or(self.next).min(self.next);
        let retried = self.lacking.union(&self.retrying).filter(|slot| **slot < first);
        let open = retried.filter(|slot| self.lacking.contains(slot) || self.running.contains(slot)).count();
        first.saturating_sub(open as u64 + self.proofs.open()).max(self.covered_max)
    }

    /// How many slots could not be built whole at first, and are tried again.
    pub(in crate::array) fn retried(&self) -> u64 {
        let running = self.retrying.intersection(&self.running);
        (self.lacking.len() + running.filter(|slot| !self.lacking.contains(slot)).count()) as u64
    }

    /// As [`Progress::retried`], with those of `unreadable` that are being built for the first time.
    pub(in crate::array) fn retried_beside(&self, unreadable: &BTreeSet<u64>) -> u64 {
        let first = unreadable.iter().filter(|slot| {
            self.running.contains(slot) && !self.retrying.contains(slot) && !self.lacking.contains(slot)
        });
        self.retried() + first.count() as u64
    }

    /// Slots below this are complete.
    pub(in crate::array) fn done(&self) -> u64 {
        self.running.first().copied().unwrap_or(self.next).min(self.next)
    }
}

/// A device that is being built while the old one serves, or none does.
#[derive(Clone, Debug)]
pub(in crate::array) struct Replacement {
    pub device: Device,
    pub uuid: Uuid,
    pub progress: Progress,
    pub changeover: Changeover,
    /// Whether it must not take its place at this moment, whatever `changeover` is.
    pub stays: bool,
}

/// When a device that is being built beside the old one takes its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) enum Changeover {
    /// As soon as it is complete.
    AtOnce,
    /// When the array is told so, because it is one lane of several and the others build the device, too.
    WhenTold,
    /// As `WhenTold`. The device is complete, and that was told.
    Held,
}

impl Changeover {
    /// How an array begins with this part of the whole volume.
    pub(in crate::array) fn of(part: &LanePart) -> Changeover {
        match part.is_cut() && !is_off(Mutation::LaneChangesOverAlone) {
            true => Changeover::WhenTold,
            false => Changeover::AtOnce,
        }
    }
}

/// One member.
#[derive(Clone, Debug)]
pub(in crate::array) struct Member {
    pub uuid: Uuid,
    pub state: MemberState,
    pub device: Option<Device>,
    /// While `state` is Rebuilding.
    pub progress: Option<Progress>,
    pub replacement: Option<Replacement>,
    pub counters: MemberCounters,
    pub reason: Option<String>,
    /// Why the member left, if it was for a shortage: it may come back by itself.
    pub away: Option<MemberCondition>,
    /// Whether the member left because its file ended too early.
    pub cut_off: bool,
    /// Whether a device of it has left service since the start.
    pub has_left: bool,
    /// The device that this lane has kept although another one has let go of it, and when it last did so.
    pub kept: Option<(DeviceId, Timestamp)>,
}

impl Member {
    /// The device that can be read for `slot`.
    fn readable(&self, slot: SlotIndex) -> Option<DeviceId> {
        let primary = match self.state {
            MemberState::Online => true,
            MemberState::Rebuilding => self.progress.as_ref().is_some_and(|p| slot.0 < p.done()),
            _ => false,
        };
        if primary {
            return self.device.map(|d| d.id);
        }
        self.replacement.as_ref().filter(|r| slot.0 < r.progress.done()).map(|r| r.device.id)
    }

    /// Whether its replacement must not take its place yet, although it may be complete: the old device
    /// serves, and other lanes are not known to have built theirs. Without the old device there is nothing to
    /// wait for.
    pub(in crate::array) fn holds_replacement(&self) -> bool {
        let waits = self.replacement.as_ref().is_some_and(|new| new.changeover != Changeover::AtOnce);
        waits && self.state == MemberState::Online
    }

    /// Whether its replacement is complete and waits for the other lanes.
    pub(in crate::array) fn has_held_replacement(&self) -> bool {
        let is_held = |new: &Replacement| {
            // A log that begins a new life has its pages built again.
            new.changeover == Changeover::Held && new.progress.pages == PagesBuilt::Done
        };
        self.state == MemberState::Online && self.replacement.as_ref().is_some_and(is_held)
    }
}

/// Which device of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) enum Which {
    Primary,
    Replacement,
}

/// How many members are in which state. Asked at every step of the array, where looking at hundreds of
/// members would take longer than the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::array) struct Census {
    online: usize,
    building: usize,
}

impl Census {
    pub(in crate::array) fn of(members: &[Member]) -> Census {
        let online = members.iter().filter(|member| member.state == MemberState::Online).count();
        let is_building = |member: &&Member| member.progress.is_some() || member.replacement.is_some();
        Census { online, building: members.iter().filter(is_building).count() }
    }
}

impl Member {
    /// Clears its counts, and the conditions that are reported while it is in service.
    pub(in crate::array) fn clear(&mut self) {
        self.counters = Default::default();
        if self.state == MemberState::Online {
            self.reason = None;
        }
    }
}

impl Core {
    /// The device of a member, in service, being built, or its replacement.
    pub(in crate::array) fn device_of(&self, member: MemberIndex, which: Which) -> Option<DeviceId> {
        let member = self.member(member);
        match which {
            Which::Primary if matches!(member.state, MemberState::Online | MemberState::Rebuilding) => {
                member.device.map(|device| device.id)
            }
            Which::Primary => None,
            Which::Replacement => member.replacement.as_ref().map(|replacement| replacement.device.id),
        }
    }

    /// Whether the device still belongs to its member, in the same place.
    pub(in crate::array) fn still_has(&self, device: MemberDevice) -> bool {
        self.device_of(device.member, device.which) == Some(device.id)
    }

    /// The members in service.
    pub(in crate::array) fn online(&self) -> MemberSet {
        (0..self.roster.members.len())
            .filter(|&at| self.roster.members[at].state == MemberState::Online)
            .map(|at| MemberIndex(at as u16))
            .collect()
    }

    /// Whether more than m members are out of service.
    pub(in crate::array) fn is_failed(&self) -> bool {
        self.census().online < self.map.k
    }

    /// Whether a member or a replacement is being built.
    pub(in crate::array) fn any_building(&self) -> bool {
        self.census().building > 0
    }

    fn census(&self) -> Census {
        debug_assert_eq!(
            self.roster.census,
            Census::of(&self.roster.members),
            "members changed and were not counted"
        );
        self.roster.census
    }

    /// Counts the members again. Must be called whenever the state of one changes, or the construction of one
    /// begins or ends.
    pub(in crate::array) fn count_members(&mut self) {
        self.roster.census = Census::of(&self.roster.members);
        self.roster.has_changed = true;
    }

    /// The device of each member that is in service, if members have changed since the last call.
    pub(in crate::array) fn changed_devices(
        &mut self,
    ) -> Option<impl Iterator<Item = Option<DeviceId>> + '_> {
        let in_service = |member: &Member| match member.state {
            MemberState::Online => member.device.map(|device| device.id),
            _ => None,
        };
        std::mem::take(&mut self.roster.has_changed).then(|| self.roster.members.iter().map(in_service))
    }

    pub(in crate::array) fn member(&self, index: MemberIndex) -> &Member {
        &self.roster.members[usize::from(index.0)]
    }

    pub(in crate::array) fn member_mut(&mut self, index: MemberIndex) -> &mut Member {
        &mut self.roster.members[usize::from(index.0)]
    }

    /// The device to read `member`'s chunk of `slot` from.
    pub(in crate::array) fn readable(&self, member: MemberIndex, slot: SlotIndex) -> Option<DeviceId> {
        self.member(member).readable(slot)
    }

    /// The devices that must get a write to `member`'s chunk of `slot`: those in service and those on which
    /// the slot has been built. Does not change while the slot is locked and the members stay.
    pub(in crate::array) fn targets(
        &self,
        member: MemberIndex,
        slot: SlotIndex,
    ) -> impl Iterator<Item = DeviceId> + use<> {
        let member = self.member(member);
        let primary = match member.state {
            MemberState::Online => member.device,
            MemberState::Rebuilding => {
                member.device.filter(|_| member.progress.as_ref().is_some_and(|p| p.has(slot)))
            }
            _ => None,
        };
        let second = member.replacement.as_ref().filter(|r| r.progress.has(slot)).map(|r| r.device);
        [primary, second].into_iter().flatten().map(|device| device.id)
    }

    /// Every device in use, with its member.
    pub(in crate::array) fn devices(&self) -> Vec<(MemberIndex, Which, Device)> {
        let mut all = Vec::with_capacity(self.roster.members.len() + 1);
        for (at, member) in self.roster.members.iter().enumerate() {
            let index = MemberIndex(at as u16);
            if let Some(device) = member.device
                && matches!(member.state, MemberState::Online | MemberState::Rebuilding)
            {
                all.push((index, Which::Primary, device));
            }
            if let Some(replacement) = &member.replacement {
                all.push((index, Which::Replacement, replacement.device));
            }
        }
        all
    }

    pub(in crate::array) fn find_device(&self, id: DeviceId) -> Option<(MemberIndex, Which)> {
        let found = self.devices().into_iter().find(|(_, _, device)| device.id == id);
        found.map(|(member, which, _)| (member, which))
    }

    /// Whether a device counts as its member: errors of a device that is to replace a member are not the
    /// member's.
    pub(in crate::array) fn is_primary(&self, id: DeviceId) -> bool {
        matches!(self.find_device(id), Some((_, Which::Primary)))
    }

    pub(in crate::array) fn device_mut(&mut self, member: MemberIndex, id: DeviceId) -> Option<&mut Device> {
        let member = self.member_mut(member);
        let devices = [member.device.as_mut(), member.replacement.as_mut().map(|r| &mut r.device)];
        devices.into_iter().flatten().find(|device| device.id == id)
    }

    /// Whether a fault proves nothing about its device (T4).
    pub(in crate::array) fn is_passing(&self, fault: IoFault) -> bool {
        fault.kind.passes() && !is_off(Mutation::ShortageIsAFault)
    }

    pub(in crate::array) fn is_data(&self, offset: ByteOffset) -> bool {
        let bytes = self.map.slots * self.map.chunk as u64;
        (self.shape.data_offset.0..self.shape.data_offset.0 + bytes).contains(&offset.0)
    }

    /// Keeps a member of a failed array from coming back before a restart. Writes that it acknowledged and
    /// did not flush may be gone, and clients would not notice if it came back while they are connected.
    pub(in crate::array) fn needs_restart(&mut self, index: MemberIndex) {
        if self.roster.returnable.remove(index) {
            let text = format!(
                "a flush of member {index} failed: writes that were acknowledged and not flushed may be lost. It cannot come \
                 back while the array is FAILED: restart the array when the cause is mended, without --force; nothing that \
                 was flushed is lost"
            );
            self.notice(NoticeKind::MemberNeedsRestart, NoticeLevel::Error, Some(index), text);
        }
    }

    /// Notes the fault for which a device of a member has just left. If that was its own (`is_primary`), and
    /// its file ends too early, the member does not come back from there.
    pub(in crate::array) fn note_cut_off(&mut self, index: MemberIndex, is_primary: bool, fault: IoFault) {
        let member = self.member_mut(index);
        member.cut_off |= is_primary && member.device.is_none() && fault.errno == libc::ENODATA;
    }

    /// Abandons the operations of a device: no owner waits for them any more.
    pub(in crate::array) fn abandon(&mut self, id: DeviceId, fault: IoFault) {
        for (token, short) in self.inflight.abandon(id, fault) {
            self.shortages.ended(id, token, short, false);
        }
    }

    /// Hands back a device that has failed. No owner waits for operations that it has not ended (T7).
    pub(in crate::array) fn hand_back(&mut self, id: DeviceId) {
        self.abandon(id, IoFault { kind: IoFaultKind::Gone, errno: libc::ENODEV });
        self.actions.push(ArrayAction::Release(id));
    }

    /// Takes the end of an operation whose device had left service before.
    pub(in crate::array) fn late_end(&mut self, entry: &Inflight, result: &Result<IoValue, IoFault>) {
        // It is not known which earlier writes are on the medium.
        if let (Err(fault), Effect::Flush(_)) = (result, entry.effect)
            && fault.kind != IoFaultKind::Gone
        {
            self.needs_restart(entry.member);
        }
    }

    /// Hands back devices that were replaced, once no owner waits for their operations.
    pub(in crate::array) fn release_idle_devices(&mut self) {
        let inflight = &self.inflight;
        let actions = &mut self.actions;
        self.roster.releasing.retain(|&id| {
            let awaited = inflight.is_awaited(id);
            if !awaited {
                actions.push(ArrayAction::Release(id));
            }
            awaited
        });
    }

    /// Whether the array has ended.
    pub(in crate::array) fn is_stopped(&self) -> bool {
        self.stop.stopping == Some(Stopping::Stopped)
    }
}
