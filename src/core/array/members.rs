//! The members of an array: which serves which slot, which must get a write, and what happens when one fails.

use super::bad_blocks::Ill;
use super::inflight::{Again, Inflight};
use super::mutation::{Mutation, is_off};
use super::{Array, ArrayAction, Core, Effect, Owner, Stopping};
use super::{MemberCondition, MemberCounters, MemberStatus, NoticeKind, NoticeLevel};
use crate::block_io::{DeviceId, IoFault, IoFaultKind, IoValue};
use crate::format::{MemberSet, MemberState};
use crate::units::{ByteOffset, Count, MemberIndex, ROW_BYTES, SlotIndex, Timestamp};
use std::collections::BTreeSet;
use uuid::Uuid;

/// A device that another has taken the place of: held until that is on disk, and on itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Replaced {
    pub member: MemberIndex,
    pub uuid: Uuid,
    pub device: Device,
}

/// A device in the hands of the array.
#[derive(Clone, Copy, Debug)]
pub(super) struct Device {
    pub id: DeviceId,
    pub bytes: u64,
    /// Writes that have completed on it.
    pub writes: u64,
    /// Of these, so many were complete when a flush began that has succeeded.
    pub flushed: u64,
    /// A superblock on it says what it is; a restart would find it.
    pub recorded: bool,
    /// It has refused to zero a range other than by writing.
    pub cannot_zero: bool,
    /// The sequence of the newest superblock that is known to be whole on it. The next one goes to the other slot.
    pub sequence: u64,
    /// The other slot holds nothing that a torn update of an earlier life has left.
    pub cleared: bool,
    /// It came without a superblock.
    pub is_blank: bool,
    /// The sequence of the superblock that the array has written last to each slot, those of even and of odd sequences.
    pub written: [Option<u64>; 2],
}

impl Device {
    /// A device about whose cache nothing is known yet; `sequence` is that of its superblock, 0 where it has none.
    pub(super) fn new(id: DeviceId, bytes: u64, sequence: u64) -> Device {
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
    pub(super) fn found(id: DeviceId, bytes: u64, sequence: u64) -> Device {
        Device { recorded: true, ..Device::new(id, bytes, sequence) }
    }

    /// Whether a flush would make anything durable.
    pub(super) fn is_unflushed(&self) -> bool {
        self.flushed < self.writes
    }
}

/// A device that lacks nothing but blocks and metadata pages that cannot be read does not join for
/// this long: the member that it takes the place of may hold the only copy of them, and others may
/// leave once it is there.
const JOIN_PATIENCE_NS: u64 = 30_000_000_000;

/// Time between two tries to build what it lacks.
const LACKING_RETRY_NS: u64 = 1_000_000_000;

/// How far a device has been built. Slots are built in ascending order, several at a time.
#[derive(Clone, Debug)]
pub(super) struct Progress {
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
    /// The device is current as of the end of this epoch: only what was written later has to be built.
    pub since: Option<u64>,
    /// Those of them that are being built once more, and perhaps some that have been since.
    pub retrying: BTreeSet<u64>,
    /// The most slots that were complete at one time: what is built once more was shown as done.
    pub covered_max: u64,
    /// Its log is being read, which may show that it is not: nothing is built before.
    pub awaits_ring: bool,
    /// How far its copies of metadata pages have come.
    pub pages: PagesBuilt,
    /// Pages that could not be read at first, and are tried again.
    pub retried_pages: u64,
}

/// Copies of metadata pages on a device under construction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PagesBuilt {
    #[default]
    No,
    Running,
    Done,
}

impl Progress {
    pub(super) fn fresh(known_zero: bool) -> Progress {
        Progress::starting_at(0, known_zero)
    }

    /// Everything from slot `next` on is to be built.
    pub(super) fn starting_at(next: u64, known_zero: bool) -> Progress {
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
        }
    }

    /// After a restart slots beyond the recorded position may have been written already.
    pub(super) fn resumed(rebuilt: SlotIndex) -> Progress {
        Progress::starting_at(rebuilt.0, false)
    }

    /// The slot to be built next: what could not be built whole comes again when all others are done.
    pub(super) fn due(&self, slots: u64, now: Timestamp) -> Option<u64> {
        if self.awaits_ring {
            return None;
        }
        if self.next < slots {
            return Some(self.next);
        }
        self.lacking.difference(&self.running).next().copied().filter(|_| now >= self.again)
    }

    /// Slot `slot`, which was due, is being built.
    pub(super) fn begin(&mut self, slot: u64) {
        if self.lacking.remove(&slot) {
            self.retrying.retain(|slot| self.running.contains(slot));
            self.retrying.insert(slot);
        }
        self.next = self.next.max(slot + 1);
        self.running.insert(slot);
    }

    /// Slot `slot`, which is being built, lacks blocks that cannot be read for now. False: it was tried for long enough.
    pub(super) fn lacks(&mut self, slot: u64, slots: u64, now: Timestamp) -> bool {
        if is_off(Mutation::JoinsLacking) {
            return false;
        }
        if self.next >= slots && !self.is_patient(now) {
            return false;
        }
        self.lacking.insert(slot);
        self.again = Timestamp(now.0 + LACKING_RETRY_NS);
        true
    }

    /// Slot `slot`, which was begun once more and not completed, comes again. False: it was begun
    /// for the first time.
    pub(super) fn put_back(&mut self, slot: u64, now: Timestamp) -> bool {
        let is_again = self.retrying.contains(&slot);
        if is_again {
            self.lacking.insert(slot);
            self.again = Timestamp(now.0 + LACKING_RETRY_NS);
        }
        is_again
    }

    /// All but what cannot be read is built: whether that is waited for still.
    pub(super) fn is_patient(&mut self, now: Timestamp) -> bool {
        now.nanos_since(*self.waits_since.get_or_insert(now)) < JOIN_PATIENCE_NS
    }

    /// Whether all slots are built, as far as their blocks can be had.
    pub(super) fn is_over(&self, slots: u64) -> bool {
        self.done() >= slots && self.lacking.is_empty()
    }

    /// Slot `slot` was not completed: it and all after it are started again. Slots that are still running keep
    /// their place and are then done twice, which is harmless under their locks.
    pub(super) fn rewind_to(&mut self, slot: u64) {
        self.covered_max = self.covered();
        self.next = self.next.min(slot);
        self.known_zero = false;
    }

    /// Whether writes to `slot` must reach the device: its slot is built. One that is being built, or waits for
    /// its lock, takes the new content with it when its turn comes.
    pub(super) fn has(&self, slot: SlotIndex) -> bool {
        slot.0 < self.next && !self.running.contains(&slot.0)
    }

    /// Where a restart goes on: what could not be built whole is not remembered otherwise.
    pub(super) fn recorded(&self) -> u64 {
        self.lacking.first().copied().unwrap_or(self.next).min(self.done())
    }

    /// How many slots to show as complete. Never fewer than before, whatever is tried again.
    pub(super) fn covered(&self) -> u64 {
        let first = self.running.difference(&self.retrying).next();
        let first = first.copied().unwrap_or(self.next).min(self.next);
        let retried = self.lacking.union(&self.retrying).filter(|slot| **slot < first);
        let open = retried.filter(|slot| self.lacking.contains(slot) || self.running.contains(slot)).count();
        (first - open as u64).max(self.covered_max)
    }

    /// How many slots could not be built whole at first, and are tried again.
    pub(super) fn retried(&self) -> u64 {
        let running = self.retrying.intersection(&self.running);
        (self.lacking.len() + running.filter(|slot| !self.lacking.contains(slot)).count()) as u64
    }

    /// The same with those of `unreadable` that are being built for the first time.
    pub(super) fn retried_beside(&self, unreadable: &BTreeSet<u64>) -> u64 {
        let first = unreadable.iter().filter(|slot| {
            self.running.contains(slot) && !self.retrying.contains(slot) && !self.lacking.contains(slot)
        });
        self.retried() + first.count() as u64
    }

    /// Slots below this are complete.
    pub(super) fn done(&self) -> u64 {
        self.running.first().copied().unwrap_or(self.next).min(self.next)
    }
}

/// A device that is being built while the old one, or nobody, serves.
#[derive(Clone, Debug)]
pub(super) struct Replacement {
    pub device: Device,
    pub uuid: Uuid,
    pub progress: Progress,
}

/// One member.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub uuid: Uuid,
    pub state: MemberState,
    pub device: Option<Device>,
    /// While `state` is Rebuilding.
    pub progress: Option<Progress>,
    pub replacement: Option<Replacement>,
    pub counters: MemberCounters,
    pub reason: Option<String>,
    /// It left because of a shortage, and may come back by itself.
    pub away: Option<MemberCondition>,
    /// It left because its file ended too early.
    pub cut_off: bool,
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
}

/// Which device of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Primary,
    Replacement,
}

/// How many members are what: asked at every step of the array, where to look at hundreds of members would take longer than
/// the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Census {
    online: usize,
    building: usize,
}

impl Census {
    pub(super) fn of(members: &[Member]) -> Census {
        let online = members.iter().filter(|member| member.state == MemberState::Online).count();
        let is_building = |member: &&Member| member.progress.is_some() || member.replacement.is_some();
        Census { online, building: members.iter().filter(is_building).count() }
    }
}

impl Member {
    /// Forgets its counts, and what is told of it while it is in service.
    pub(super) fn clear(&mut self) {
        self.counters = Default::default();
        if self.state == MemberState::Online {
            self.reason = None;
        }
    }
}

impl Array {
    /// A read failed. A device that is gone leaves service; for others see [`Array::judge_errors`].
    pub(super) fn read_fault(&mut self, index: MemberIndex, device: DeviceId, fault: IoFault) {
        if self.core.find_device(device).is_none() || self.core.is_passing(fault) {
            // What ends on a device that has left service tells nothing new.
            return;
        }
        if self.core.is_primary(device) {
            self.core.member_mut(index).counters.read_errors += 1;
        }
        if fault.kind == IoFaultKind::Gone {
            self.fault_by(index, device, format!("a read failed: {fault}"), fault);
        }
    }

    /// Bytes that were bad could not be rewritten. Nothing relies on that, so whether the member goes is judged as for
    /// reads (T5).
    pub(super) fn repair_fault(&mut self, index: MemberIndex, device: DeviceId, fault: IoFault) {
        if fault.kind == IoFaultKind::Medium {
            self.core.member_mut(index).counters.write_errors += u64::from(self.core.is_primary(device));
        } else {
            self.write_fault(index, device, "rewrite of a bad block", fault);
        }
    }

    /// Takes note of what the end of an operation says of places on members in service.
    pub(super) fn note_outcome(
        &mut self,
        entry: &Inflight,
        again: &Again,
        result: &Result<IoValue, IoFault>,
    ) {
        let (now, index) = (self.core.now, entry.member);
        if self.core.member(index).device.is_none_or(|device| device.id != entry.device) {
            return;
        }
        let bytes = |offset: &ByteOffset, len: usize| offset.0..offset.0 + len as u64;
        match (again, result) {
            (Again::Read { offset, len }, Ok(_)) => self.bad.read(now, index, bytes(offset, *len)),
            (Again::Read { offset, len }, Err(IoFault { kind: IoFaultKind::Medium, .. })) => {
                // What of the ring cannot be read harms no row; what replay needs of it is replay's to judge.
                if self.is_in_log(*offset) {
                    return;
                }
                // A place that is known to be bad says nothing about others.
                if !matches!(entry.owner, Owner::Probe) {
                    self.bad.read_failed(now, index, *offset);
                }
                // Of a longer range the blocks are read one by one afterwards.
                if self.core.is_data(*offset) && *len == ROW_BYTES as usize {
                    self.bad.failed(now, index, *offset, Ill::Unreadable);
                }
            }
            (Again::Write { offset, buf, .. }, Ok(_)) => self.bad.written(index, bytes(offset, buf.len())),
            (Again::Write { offset, buf, .. }, Err(IoFault { kind: IoFaultKind::Medium, .. }))
                if self.core.is_data(*offset) =>
            {
                self.bad.not_mended(now, index, bytes(offset, buf.len()));
            }
            _ => {}
        }
    }

    fn is_in_log(&self, offset: ByteOffset) -> bool {
        let log = &self.redo.facts.log;
        (log.offset.0..log.offset.0 + log.len).contains(&offset.0)
    }

    /// A block that a member gave is right or wrong. False: it is known to be wrong, and was not right since.
    pub(super) fn note_verdict(
        &mut self,
        index: MemberIndex,
        slot: SlotIndex,
        row: usize,
        is_good: bool,
    ) -> bool {
        if (is_good && self.bad.is_clear(index)) || self.core.member(index).state != MemberState::Online {
            return true;
        }
        let offset = self.core.map.device_offset(self.core.data_offset, slot, row * ROW_BYTES as usize);
        if is_good {
            self.bad.verified(index, offset);
            return true;
        }
        if self.may_lack_slot(index, slot) {
            // It was never given the block: that is no error of the device.
            return false;
        }
        let is_new = !self.bad.is_wrong(index, offset);
        self.bad.failed(self.core.now, index, offset, Ill::Wrong);
        is_new
    }

    /// A write or flush failed for good: the device leaves service. Not for a fault that passes: whoever relied on the
    /// operation is told of that only when its device has left, or it is void (T4).
    pub(super) fn write_fault(&mut self, index: MemberIndex, device: DeviceId, what: &str, fault: IoFault) {
        if self.core.find_device(device).is_none() || self.core.is_passing(fault) {
            // As above.
            return;
        }
        self.core.member_mut(index).counters.write_errors += u64::from(self.core.is_primary(device));
        self.fault_by(index, device, format!("a {what} failed: {fault}"), fault);
    }

    /// A flush failed: nobody knows what of the earlier writes is on the medium, so the member is gone, also as
    /// one that could return to a failed array.
    pub(super) fn flush_fault(&mut self, index: MemberIndex, device: DeviceId, fault: IoFault) {
        self.write_fault(index, device, "flush", fault);
        if fault.kind != IoFaultKind::Gone && !fault.kind.passes() {
            self.core.needs_restart(index);
        }
    }

    /// Takes a device out of service. Does nothing when it is out already.
    pub(super) fn fault_device(&mut self, index: MemberIndex, id: DeviceId, to: MemberState, reason: String) {
        self.out_of_service(index, id, to, reason, to == MemberState::Missing);
    }

    /// The same for a fault of the device.
    fn fault_by(&mut self, index: MemberIndex, id: DeviceId, reason: String, fault: IoFault) {
        let is_primary = self.core.is_primary(id);
        self.out_of_service(index, id, MemberState::Faulted, reason, fault.kind == IoFaultKind::Gone);
        self.core.note_cut_off(index, is_primary, fault);
    }

    /// The same for one that is gone although no operation failed.
    pub(super) fn device_missing(
        &mut self,
        index: MemberIndex,
        id: DeviceId,
        reason: String,
        fault: IoFault,
    ) {
        let is_primary = self.core.is_primary(id);
        self.fault_device(index, id, MemberState::Missing, reason);
        self.core.note_cut_off(index, is_primary, fault);
    }

    /// `out_of_reach`: nothing is known against the device but that it cannot be reached.
    fn out_of_service(
        &mut self,
        index: MemberIndex,
        id: DeviceId,
        to: MemberState,
        reason: String,
        out_of_reach: bool,
    ) {
        match self.core.find_device(id) {
            Some((member, Which::Primary)) if member == index => {
                self.fault_primary(index, to, reason, out_of_reach);
            }
            Some((member, Which::Replacement)) if member == index => self.drop_replacement(index, &reason),
            _ => {}
        }
    }

    fn fault_primary(&mut self, index: MemberIndex, to: MemberState, reason: String, out_of_reach: bool) {
        let was_failed = self.core.is_failed();
        if self.core.member(index).state == MemberState::Online {
            let tail = self.tail_of_leaving();
            self.supers.note_leaving(index, tail);
        }
        let member = self.core.member_mut(index);
        let was = std::mem::replace(&mut member.state, to);
        member.progress = None;
        member.away = None;
        member.cut_off = false;
        member.reason = Some(reason.clone());
        self.core.count_members();
        let member = self.core.member_mut(index);
        if let Some(device) = member.device.take() {
            self.core.hand_back(device.id);
        }
        self.supers.note_loss();
        self.bad.forget(index);
        self.core.paces.forget(index);
        self.damage.look_at_all();
        self.redo.pages.left(index);
        if self.redo.is_serving() {
            self.redo.member_lost();
        }
        let word = to.as_str();
        if was == MemberState::Rebuilding {
            // That it goes offline was asked for.
            let level = if to == MemberState::Offline { NoticeLevel::Warning } else { NoticeLevel::Error };
            self.core.notice(
                NoticeKind::MemberOut,
                level,
                Some(index),
                format!("the rebuild of member {index} ended ({word}): {reason}"),
            );
        } else if self.core.is_failed() {
            let text = format!(
                "member {index} is {word}: {reason}. The array is FAILED: more than {} {} gone; nothing is written until enough \
                 are back ('calpe online')",
                Count::of(self.core.map.m, "member"),
                Count::of(self.core.map.m, "member").are()
            );
            self.core.notice(NoticeKind::MemberOut, NoticeLevel::Error, Some(index), text);
            // From here on nothing is written: what this member holds stays current. One that was lost earlier has
            // been left out of writes.
            if was == MemberState::Online {
                self.core.returnable.insert(index);
            }
            if !was_failed {
                self.enter_failed();
            }
        } else if self.log_is_refused() {
            let text = format!(
                "member {index} is {word}: {reason}. The array stays FAILED: its redo log cannot be replayed"
            );
            self.core.notice(NoticeKind::MemberOut, NoticeLevel::Warning, Some(index), text);
        } else {
            let left = self.core.online().len() - self.core.map.k;
            let advice = match self.core.member(index) {
                Member { state: MemberState::Offline, replacement: Some(_), .. } => {
                    "the device that is being built takes its place; 'calpe replace --cancel' gives that up, so that 'calpe online' \
                     can bring it back"
                }
                Member { state: MemberState::Offline, .. } => "'calpe online' brings it back",
                Member { replacement: Some(_), .. } => "the device that is being built takes its place",
                // Only the daemon knows which devices it goes on trying to reach.
                _ if out_of_reach => "'calpe status' says whether it comes back by itself, and what to do",
                _ => "replace the member",
            };
            let text = format!(
                "member {index} is {word}: {reason}. The array is DEGRADED and survives {left} more{}; {advice}",
                self.but_beside(left, Some(index))
            );
            self.core.notice(NoticeKind::MemberOut, NoticeLevel::Warning, Some(index), text);
        }
    }

    /// What a member that leaves is to show when it comes back (T6). Not more than it was told: what a checkpoint put in place
    /// is told with the next batch or the mark of an idle array. A copy of the member from before the checkpoint shows as
    /// much, so the log keeps what it has from there on, and the map says of it that it was written without the member.
    fn tail_of_leaving(&mut self) -> Option<u64> {
        let tail = self.tail_in_place()?;
        if !self.redo.is_serving() || self.redo.unsettled.is_some() {
            return Some(tail);
        }
        let told = self.supers.template().redo.start.sequence;
        let redo = self.redo_mut();
        let shown = redo.journal.shown_tail(told);
        if shown < tail && !is_off(Mutation::ToldTailAlone) {
            redo.journal.withdraw_tail(shown);
            redo.checkpoint.want();
        }
        Some(shown)
    }

    /// Gives up the construction of a replacement.
    pub(super) fn drop_replacement(&mut self, index: MemberIndex, reason: &str) {
        if self.take_back_replacement(index) {
            let member = self.core.member_mut(index);
            if member.state == MemberState::Online {
                member.reason = Some(format!("its replacement was given up: {reason}"));
            }
            let text = format!("the replacement of member {index} was given up: {reason}");
            self.core.notice(NoticeKind::ReplacementGivenUp, NoticeLevel::Error, Some(index), text);
        }
    }

    /// A device that is being built as a replacement is not to be one any more. Whether there was one.
    pub(super) fn take_back_replacement(&mut self, index: MemberIndex) -> bool {
        let Some(replacement) = self.core.member_mut(index).replacement.take() else { return false };
        self.redo.pages.given_up(index);
        self.core.count_members();
        self.core.hand_back(replacement.device.id);
        self.supers.note_loss();
        true
    }

    /// The moment the array loses its last spare redundancy and one more: operations that wait end in EIO.
    fn enter_failed(&mut self) {
        // Those that wait for a gate decide anew when they are advanced.
        self.passes.drain();
        let gated = std::mem::take(&mut self.core.gated);
        self.core.ready.extend(gated);
        self.log_failed();
    }

    pub(super) fn member_status(&self) -> Vec<MemberStatus> {
        let status = |(at, member): (usize, &Member)| MemberStatus {
            index: MemberIndex(at as u16),
            uuid: member.uuid,
            state: member.state,
            device: member.device.map(|d| d.id),
            replacement: member.replacement.as_ref().map(|r| r.device.id),
            counters: member.counters,
            reason: member.reason.clone(),
            conditions: self.conditions(MemberIndex(at as u16)),
            returns: member.away.is_some(),
            lacking: self.lacking_of(member),
        };
        self.core.members.iter().enumerate().map(status).collect()
    }

    /// What a person should know of a member beside its state.
    fn conditions(&self, index: MemberIndex) -> Vec<MemberCondition> {
        let member = self.core.member(index);
        let kept = self.bad.is_kept(index).then_some(MemberCondition::KeptDespiteErrors);
        let is_unmended = kept.is_none() && self.bad.has_unmended(index);
        let not_mended = is_unmended.then_some(MemberCondition::NotMended);
        let lacks = (self.slots_lacking(index) > 0).then_some(MemberCondition::LacksBlocks);
        let slow = self.core.paces.is_slow(index).then_some(MemberCondition::Slow);
        let served_last = self.core.returnable_now().contains(index).then_some(MemberCondition::ServedLast);
        let cut_off = (member.cut_off && member.device.is_none()).then_some(MemberCondition::CutOff);
        let of_device = kept.into_iter().chain(not_mended).chain(lacks).chain(slow);
        self.core.lacks_of(member).chain(of_device).chain(served_last).chain(cut_off).collect()
    }
}

impl Core {
    /// The members in service.
    pub(super) fn online(&self) -> MemberSet {
        (0..self.members.len())
            .filter(|&at| self.members[at].state == MemberState::Online)
            .map(|at| MemberIndex(at as u16))
            .collect()
    }

    /// Whether more than m members are out of service.
    pub(super) fn is_failed(&self) -> bool {
        self.census().online < self.map.k
    }

    /// Whether a member or a replacement is being built.
    pub(super) fn any_building(&self) -> bool {
        self.census().building > 0
    }

    fn census(&self) -> Census {
        debug_assert_eq!(self.census, Census::of(&self.members), "members changed and were not counted");
        self.census
    }

    /// Counts the members again: to be called whenever the state of one changes, or the construction of one begins or ends.
    pub(super) fn count_members(&mut self) {
        self.census = Census::of(&self.members);
    }

    pub(super) fn member(&self, index: MemberIndex) -> &Member {
        &self.members[usize::from(index.0)]
    }

    pub(super) fn member_mut(&mut self, index: MemberIndex) -> &mut Member {
        &mut self.members[usize::from(index.0)]
    }

    /// The device to read `member`'s chunk of `slot` from.
    pub(super) fn readable(&self, member: MemberIndex, slot: SlotIndex) -> Option<DeviceId> {
        self.member(member).readable(slot)
    }

    /// The devices that must get a write to `member`'s chunk of `slot`: those in service and those on which the
    /// slot has been built. Does not change while the slot is locked and the members stay.
    pub(super) fn targets(
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
    pub(super) fn devices(&self) -> Vec<(MemberIndex, Which, Device)> {
        let mut all = Vec::with_capacity(self.members.len() + 1);
        for (at, member) in self.members.iter().enumerate() {
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

    pub(super) fn find_device(&self, id: DeviceId) -> Option<(MemberIndex, Which)> {
        let found = self.devices().into_iter().find(|(_, _, device)| device.id == id);
        found.map(|(member, which, _)| (member, which))
    }

    /// Whether a device counts as its member: the errors of one that is to replace it are not the member's.
    fn is_primary(&self, id: DeviceId) -> bool {
        matches!(self.find_device(id), Some((_, Which::Primary)))
    }

    pub(super) fn device_mut(&mut self, member: MemberIndex, id: DeviceId) -> Option<&mut Device> {
        let member = self.member_mut(member);
        let devices = [member.device.as_mut(), member.replacement.as_mut().map(|r| &mut r.device)];
        devices.into_iter().flatten().find(|device| device.id == id)
    }

    /// Whether a fault says nothing about its device (T4).
    pub(super) fn is_passing(&self, fault: IoFault) -> bool {
        fault.kind.passes() && !is_off(Mutation::ShortageIsAFault)
    }

    fn is_data(&self, offset: ByteOffset) -> bool {
        let bytes = self.map.slots * self.map.chunk as u64;
        (self.data_offset.0..self.data_offset.0 + bytes).contains(&offset.0)
    }

    /// What a member of a failed array acknowledged and did not flush may be gone. Clients would not notice if it came back
    /// under them, so it does not.
    fn needs_restart(&mut self, index: MemberIndex) {
        if self.returnable.remove(index) {
            let text = format!(
                "a flush of member {index} failed: writes that were acknowledged and not flushed may be lost. It cannot come \
                 back while the array is FAILED: restart the array when the cause is mended, without --force; nothing that \
                 was flushed is lost"
            );
            self.notice(NoticeKind::MemberNeedsRestart, NoticeLevel::Error, Some(index), text);
        }
    }

    /// Takes note of the fault for which a device of a member has just left. Where that was its own (`is_primary`), and its file
    /// ends too early, the member does not come back from there.
    fn note_cut_off(&mut self, index: MemberIndex, is_primary: bool, fault: IoFault) {
        let member = self.member_mut(index);
        member.cut_off |= is_primary && member.device.is_none() && fault.errno == libc::ENODATA;
    }

    /// Nobody waits for the operations of a device any more.
    pub(super) fn abandon(&mut self, id: DeviceId, fault: IoFault) {
        for (token, short) in self.inflight.abandon(id, fault) {
            self.shortages.ended(id, token, short, false);
        }
    }

    /// A device has failed: it is handed back, and nobody waits for what it has not ended (T7).
    fn hand_back(&mut self, id: DeviceId) {
        self.abandon(id, IoFault { kind: IoFaultKind::Gone, errno: libc::ENODEV });
        self.actions.push(ArrayAction::Release(id));
    }

    /// An operation has ended whose device had left service before.
    pub(super) fn late_end(&mut self, entry: &Inflight, result: &Result<IoValue, IoFault>) {
        // As in `flush_fault`.
        if let (Err(fault), Effect::Flush(_)) = (result, entry.effect)
            && fault.kind != IoFaultKind::Gone
        {
            self.needs_restart(entry.member);
        }
    }

    /// Hands back devices that others have taken the place of and that nobody waits for.
    pub(super) fn release_idle_devices(&mut self) {
        let inflight = &self.inflight;
        let actions = &mut self.actions;
        self.releasing.retain(|&id| {
            let awaited = inflight.is_awaited(id);
            if !awaited {
                actions.push(ArrayAction::Release(id));
            }
            awaited
        });
    }

    /// Whether the array has ended.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopping == Some(Stopping::Stopped)
    }
}
