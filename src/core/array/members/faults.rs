//! Judges errors of members: which count, which cost a member its place, and what follows from that.
//!
//! The code that writes superblocks, log or pages only learns that an operation has failed: the meaning for
//! the device was judged here before. Fetches, writes of whole stripes, rebuilds and replays hand on their
//! own faults, because their next step decides which of these count. Must not know of bands, batches or
//! copies of pages.

use crate::array::base::inflight::{Again, Inflight};
use crate::array::base::members::{Member, Which};
use crate::array::log::permits::{Ceased, Out};
use crate::array::members::bad_blocks::Ill;
use crate::array::refusal::AdminRefusal;
use crate::array::{AdminRequest, Array, Effect, LetGo, Op, Owner};
use crate::array::{GIVEN_UP, MemberCondition, MemberStatus, NoticeKind, NoticeLevel, ReplacementStatus};
use crate::block_io::{DeviceId, IoFault, IoFaultKind, IoValue};
use crate::format::MemberState;
use crate::units::{ByteOffset, Count, MemberIndex, ROW_BYTES, SlotIndex, Timestamp};

/// Begins the reason of a member that left because another lane was without it; why follows.
const LET_GO: &str = "another lane of the array has let go of it: ";

/// How long it holds that a lane keeps a device that another one has let go of, in nanoseconds: it is told so
/// once a second for as long as that is so.
const KEPT_NANOS: u64 = 10_000_000_000;

impl Array {
    /// Judges the fault of an I/O before its owner learns of the end, where the I/O alone shows what the
    /// fault counts for.
    pub(in crate::array) fn judge_fault(&mut self, entry: &Inflight, fault: IoFault) {
        let &Inflight { owner, member, device, effect } = entry;
        let is_gone = fault.kind == IoFaultKind::Gone;
        match owner {
            Owner::Super => self.super_fault(entry, fault),
            Owner::Piece { .. } => self.write_fault(member, device, "write to the redo log", fault),
            Owner::Round => self.flush_fault(member, device, fault),
            Owner::InPlace => self.write_fault(member, device, "write", fault),
            // A device that cannot give space back keeps it.
            Owner::Punch if is_gone => self.write_fault(member, device, "trim", fault),
            Owner::Page(_) if effect == Effect::Write => {
                self.write_fault(member, device, "write of a metadata page", fault);
            }
            Owner::Page(_) => self.read_fault(member, device, fault),
            Owner::Op { key, .. } => {
                let counts = match &self.ops[key] {
                    // Unreadable parts of its ring harm nothing that is in service, nor does the copy of a
                    // page that it has before it joins.
                    Op::RingCheck(_) | Op::PagePass(_) => is_gone,
                    Op::SuperScrub(_) => !fault.kind.passes(),
                    _ => false,
                };
                if counts {
                    self.read_fault(member, device, fault);
                }
            }
            Owner::Punch | Owner::Probe | Owner::Recovery { .. } => {}
        }
    }

    /// Judges a failed update of the superblocks on a device.
    fn super_fault(&mut self, entry: &Inflight, fault: IoFault) {
        if self.core.leaves_unmarked(entry.device, fault) {
            return;
        }
        // E2: the update is finished on the others; the loss makes the next one.
        match entry.effect {
            Effect::Flush(_) => self.flush_fault(entry.member, entry.device, fault),
            _ => self.write_fault(entry.member, entry.device, "superblock update", fault),
        }
    }

    /// Judges a failed read. A device that is gone leaves service; for others see [`Array::judge_errors`].
    pub(in crate::array) fn read_fault(&mut self, index: MemberIndex, device: DeviceId, fault: IoFault) {
        if self.core.find_device(device).is_none() || self.core.is_passing(fault) {
            // The end of an I/O on a device that has left service proves nothing new.
            return;
        }
        if self.core.is_primary(device) {
            self.core.member_mut(index).counters.read_errors += 1;
        }
        if fault.kind == IoFaultKind::Gone {
            self.fault_by(index, device, format!("a read failed: {fault}"), fault);
        }
    }

    /// Judges a failed rewrite of bad bytes. No operation relies on it, so whether the member leaves is
    /// judged as for reads (T5).
    pub(in crate::array) fn repair_fault(&mut self, index: MemberIndex, device: DeviceId, fault: IoFault) {
        if fault.kind == IoFaultKind::Medium {
            self.core.member_mut(index).counters.write_errors += u64::from(self.core.is_primary(device));
        } else {
            self.write_fault(index, device, "rewrite of a bad block", fault);
        }
    }

    /// Notes what the end of an operation proves about places on members in service.
    pub(in crate::array) fn note_outcome(
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
                // Unreadable parts of the ring harm no row; the replay judges which of them it needs.
                if self.is_in_log(*offset) {
                    return;
                }
                // A place that is known to be bad proves nothing about others.
                if !matches!(entry.owner, Owner::Probe) {
                    self.bad.read_failed(now, index, *offset);
                }
                // The blocks of a longer range are read one by one afterwards.
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
        let log = self.redo.region();
        (log.offset.0..log.offset.0 + log.len).contains(&offset.0)
    }

    /// Notes whether a block that a member gave is right or wrong. False: it is known to be wrong, and was
    /// not right since.
    pub(in crate::array) fn note_verdict(
        &mut self,
        index: MemberIndex,
        slot: SlotIndex,
        row: usize,
        is_good: bool,
    ) -> bool {
        if (is_good && self.bad.is_clear(index)) || self.core.member(index).state != MemberState::Online {
            return true;
        }
        let offset = self.core.map.device_offset(self.core.shape.data_offset, slot, row * ROW_BYTES as usize);
        if is_good {
            self.bad.verified(index, offset);
            return true;
        }
        if self.damage.may_lack_slot(&self.core, index, slot) {
            // The member never got the block: that is no error of the device.
            return false;
        }
        let is_new = !self.bad.is_wrong(index, offset);
        self.bad.failed(self.core.now, index, offset, Ill::Wrong);
        is_new
    }

    /// Judges a write or flush that failed for good: the device leaves service. Not for a fault that passes:
    /// the operations that relied on the write learn of that only when its device has left, or when they are
    /// void (T4).
    pub(in crate::array) fn write_fault(
        &mut self,
        index: MemberIndex,
        device: DeviceId,
        what: &str,
        fault: IoFault,
    ) {
        if self.core.find_device(device).is_none() || self.core.is_passing(fault) {
            // The end of an I/O on a device that has left service proves nothing new.
            return;
        }
        self.core.member_mut(index).counters.write_errors += u64::from(self.core.is_primary(device));
        self.fault_by(index, device, format!("a {what} failed: {fault}"), fault);
    }

    /// Judges a failed flush: it is not known which earlier writes are on the medium, so the member is gone,
    /// also as one that could return to a failed array.
    pub(in crate::array) fn flush_fault(&mut self, index: MemberIndex, device: DeviceId, fault: IoFault) {
        self.write_fault(index, device, "flush", fault);
        if fault.kind != IoFaultKind::Gone && !fault.kind.passes() {
            self.core.needs_restart(index);
        }
    }

    /// Takes a device out of service. Does nothing when it is out already.
    pub(in crate::array) fn fault_device(
        &mut self,
        index: MemberIndex,
        id: DeviceId,
        to: MemberState,
        reason: String,
    ) {
        self.out_of_service(index, id, to, reason, to == MemberState::Missing);
    }

    /// As [`Array::fault_device`], for a fault of the device.
    fn fault_by(&mut self, index: MemberIndex, id: DeviceId, reason: String, fault: IoFault) {
        let is_primary = self.core.is_primary(id);
        self.out_of_service(index, id, MemberState::Faulted, reason, fault.kind == IoFaultKind::Gone);
        self.core.note_cut_off(index, is_primary, fault);
    }

    /// As [`Array::fault_device`], for a device that is gone although no operation failed.
    pub(in crate::array) fn device_missing(
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

    /// Takes the report that another lane of the array has let go of a device. This one lets go of it, too,
    /// unless it may need it; it may be told again, in case that has changed.
    pub fn left_elsewhere(&mut self, now: Timestamp, device: DeviceId, why: &LetGo) {
        self.core.now = now;
        let Some((member, Which::Primary)) = self.core.find_device(device) else { return };
        // What it may need is not known before that.
        if !self.redo.is_serving() {
            return;
        }
        match self.check(&AdminRequest::Fail { member }) {
            Ok(_) if !self.may_need(member) => {}
            Ok(_) | Err(AdminRefusal::Needed { .. }) => return self.keep_here(member, device),
            Err(_) => return,
        }
        let why_there = match why {
            LetGo::Lacks(MemberCondition::Full) => "its storage is full",
            LetGo::Lacks(_) => "this host lacks resources for operations on it",
            LetGo::Failed(reason) => reason.as_deref().unwrap_or("it has failed there"),
        };
        let reason = match why_there.starts_with(LET_GO) {
            true => why_there.to_owned(),
            false => format!("{LET_GO}{why_there}"),
        };
        match why {
            LetGo::Lacks(lacks) => {
                self.fault_device(member, device, MemberState::Missing, reason);
                self.core.member_mut(member).away = Some(*lacks);
            }
            LetGo::Failed(_) => self.fault_device(member, device, MemberState::Faulted, reason),
        }
    }

    /// Keeps a device that another lane has let go of.
    fn keep_here(&mut self, index: MemberIndex, device: DeviceId) {
        let is_news = !self.is_kept_here(index);
        self.core.member_mut(index).kept = Some((device, self.core.now));
        if is_news {
            let text = format!(
                "a lane of the array has let go of member {index}, and another one keeps it in service: without it blocks could not be \
                 read, as too many others are out, or have errors. Bring them back, or replace them; 'calpe online' brings member {index} \
                 back to the lanes that are without it"
            );
            self.core.notice(NoticeKind::MemberKept, NoticeLevel::Warning, Some(index), text);
        }
    }

    /// Whether the device of a member has been kept like that of late.
    fn is_kept_here(&self, index: MemberIndex) -> bool {
        let member = self.core.member(index);
        let device = member.device.map(|device| device.id);
        member
            .kept
            .is_some_and(|(kept, told)| device == Some(kept) && self.core.now.nanos_since(told) < KEPT_NANOS)
    }

    /// `out_of_reach`: the device cannot be reached, and nothing else is known against it.
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
        let was_in_service = self.core.member(index).state == MemberState::Online;
        // An update under way counts as written.
        let told = self.supers.template().log_start.sequence;
        let Ceased { tail } = self.cease(Out { member: index, told: was_in_service.then_some(told) });
        if was_in_service {
            self.supers.note_leaving(index, tail);
        }
        let member = self.core.member_mut(index);
        let was = std::mem::replace(&mut member.state, to);
        member.progress = None;
        member.away = None;
        member.cut_off = false;
        member.has_left = true;
        member.reason = Some(reason.clone());
        self.core.count_members();
        let member = self.core.member_mut(index);
        if let Some(device) = member.device.take() {
            self.core.hand_back(device.id);
        }
        // Before anything becomes live that this device does not have: its readers may have no hash to
        // notice.
        self.show();
        self.supers.note_loss();
        self.bad.forget(index);
        self.core.paces.forget(index);
        self.damage.look_at_all();
        let word = to.as_str();
        if was == MemberState::Rebuilding {
            // An administrator asked for it to go offline.
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
            // From here on nothing is written: the content of this member stays current. One that was lost
            // earlier has missed writes.
            if was == MemberState::Online {
                self.core.roster.returnable.insert(index);
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

    /// Gives up the construction of a replacement.
    pub(in crate::array) fn drop_replacement(&mut self, index: MemberIndex, reason: &str) {
        if self.take_back_replacement(index) {
            let member = self.core.member_mut(index);
            if member.state == MemberState::Online {
                member.reason = Some(format!("{GIVEN_UP}{reason}"));
            }
            let text = format!("the replacement of member {index} was given up: {reason}");
            self.core.notice(NoticeKind::ReplacementGivenUp, NoticeLevel::Error, Some(index), text);
        }
    }

    /// Takes back a device that is being built as a replacement. Returns whether there was one.
    pub(in crate::array) fn take_back_replacement(&mut self, index: MemberIndex) -> bool {
        let Some(replacement) = self.core.member_mut(index).replacement.take() else { return false };
        self.pages.given_up(index);
        self.core.count_members();
        self.core.hand_back(replacement.device.id);
        self.supers.note_loss();
        true
    }

    /// Fails the array, which has lost one member more than it survives: operations that wait end in EIO.
    fn enter_failed(&mut self) {
        // Operations that wait for a gate decide anew when they are advanced.
        self.passes.drain();
        let gated = std::mem::take(&mut self.core.work.gated);
        self.core.work.ready.extend(gated);
        self.log_failed();
    }

    pub(in crate::array) fn member_status(&self) -> Vec<MemberStatus> {
        let status = |(at, member): (usize, &Member)| MemberStatus {
            index: MemberIndex(at as u16),
            uuid: member.uuid,
            state: member.state,
            device: member.device.map(|d| d.id),
            replacement: member.replacement.as_ref().map(|new| ReplacementStatus {
                device: new.device.id,
                uuid: new.uuid,
                is_held: member.has_held_replacement(),
            }),
            counters: member.counters,
            reason: member.reason.clone(),
            conditions: self.conditions(MemberIndex(at as u16)),
            has_left: member.has_left,
            returns: member.away.is_some(),
            lacking: self.damage.lacking_of(member),
        };
        self.core.roster.members.iter().enumerate().map(status).collect()
    }

    /// The conditions of a member that a person should know of beside its state.
    fn conditions(&self, index: MemberIndex) -> Vec<MemberCondition> {
        let member = self.core.member(index);
        let kept = self.bad.is_kept(index).then_some(MemberCondition::KeptDespiteErrors);
        let is_unmended = kept.is_none() && self.bad.has_unmended(index);
        let not_mended = is_unmended.then_some(MemberCondition::NotMended);
        let by_lanes = self.is_kept_here(index).then_some(MemberCondition::KeptByLanes);
        let lacks =
            (self.damage.slots_lacking(&self.core, index) > 0).then_some(MemberCondition::LacksBlocks);
        let slow = self.core.paces.is_slow(index).then_some(MemberCondition::Slow);
        let served_last = self.core.returnable_now().contains(index).then_some(MemberCondition::ServedLast);
        let cut_off = (member.cut_off && member.device.is_none()).then_some(MemberCondition::CutOff);
        let waits = member.has_held_replacement().then_some(MemberCondition::NewDeviceWaits);
        let of_device = kept.into_iter().chain(by_lanes).chain(not_mended).chain(lacks).chain(slow);
        self.core.lacks_of(member).chain(waits).chain(of_device).chain(served_last).chain(cut_off).collect()
    }
}
