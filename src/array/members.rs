//! The members of an array: who serves which slot, who must get a write, and what happens when one fails.

use super::{Array, ArrayAction, PieceId, Stopping};
use super::{MemberCounters, MemberStatus, NoticeLevel};
use crate::block_io::{DeviceId, IoFault, IoFaultKind};
use crate::format::{MemberSet, MemberState};
use crate::units::{MemberIndex, SlotIndex};
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
}

impl Device {
    /// A device about whose cache nothing is known yet; `sequence` is that of its superblock, 0 where it has none.
    pub fn new(id: DeviceId, bytes: u64, sequence: u64) -> Device {
        Device {
            id,
            bytes,
            writes: 1,
            flushed: 0,
            recorded: false,
            cannot_zero: false,
            sequence,
            cleared: false,
        }
    }

    /// A device that assembly has found by its superblock.
    pub fn found(id: DeviceId, bytes: u64, sequence: u64) -> Device {
        Device { recorded: true, ..Device::new(id, bytes, sequence) }
    }

    /// Whether a flush would make anything durable.
    pub fn is_unflushed(&self) -> bool {
        self.flushed < self.writes
    }
}

/// How far a device has been built. Slots are built in ascending order, several at a time.
#[derive(Clone, Debug)]
pub(super) struct Progress {
    /// Slots from here on have not been started.
    pub next: u64,
    /// Slots below `next` that are not complete.
    pub running: BTreeSet<u64>,
    /// Slots from `next` on read as zeroes, so a slot of zeroes need not be written.
    pub known_zero: bool,
    /// The device is current as of the end of this epoch: only what was written later has to be built.
    pub since: Option<u64>,
    /// How far its copies of metadata pages have come, in a logged array.
    pub pages: PagesBuilt,
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
    pub fn fresh(known_zero: bool) -> Progress {
        Progress::starting_at(0, known_zero)
    }

    /// Everything from slot `next` on is to be built.
    pub fn starting_at(next: u64, known_zero: bool) -> Progress {
        Progress { next, running: BTreeSet::new(), known_zero, since: None, pages: PagesBuilt::No }
    }

    /// After a restart slots beyond the recorded position may have been written already.
    pub fn resumed(rebuilt: SlotIndex) -> Progress {
        Progress::starting_at(rebuilt.0, false)
    }

    /// Slot `slot` was not completed: it and all after it are started again. Slots that are still running keep
    /// their place and are then done twice, which is harmless under their locks.
    pub fn rewind_to(&mut self, slot: u64) {
        self.next = self.next.min(slot);
        self.known_zero = false;
    }

    /// Whether writes to `slot` must reach the device: its slot is built. One that is being built, or waits for
    /// its lock, takes the new content with it when its turn comes.
    pub fn has(&self, slot: SlotIndex) -> bool {
        slot.0 < self.next && !self.running.contains(&slot.0)
    }

    /// Slots below this are complete.
    pub fn done(&self) -> u64 {
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

/// Failed reads of one member that are healed by rewriting before the member is given up: a disk with a few bad
/// sectors keeps serving, one that rots away is replaced.
const READ_ERRORS_MAX: u64 = 256;

impl Array {
    /// The members in service.
    pub(super) fn online(&self) -> MemberSet {
        (0..self.members.len())
            .filter(|&at| self.members[at].state == MemberState::Online)
            .map(|at| MemberIndex(at as u16))
            .collect()
    }

    /// Whether more than m members are out of service.
    pub(super) fn is_failed(&self) -> bool {
        let online = self.members.iter().filter(|m| m.state == MemberState::Online).count();
        online < self.map.k
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

    /// Whether some device in use is known to zero only by being written.
    pub(super) fn cannot_zero(&self) -> bool {
        self.members.iter().any(|member| {
            let replacement = member.replacement.as_ref().map(|r| &r.device);
            member.device.as_ref().into_iter().chain(replacement).any(|device| device.cannot_zero)
        })
    }

    pub(super) fn find_device(&self, id: DeviceId) -> Option<(MemberIndex, Which)> {
        self.devices()
            .into_iter()
            .find(|(_, _, device)| device.id == id)
            .map(|(member, which, _)| (member, which))
    }

    pub(super) fn device_mut(&mut self, member: MemberIndex, id: DeviceId) -> Option<&mut Device> {
        let member = self.member_mut(member);
        let devices = [member.device.as_mut(), member.replacement.as_mut().map(|r| &mut r.device)];
        devices.into_iter().flatten().find(|device| device.id == id)
    }

    /// A read failed. Counts it; a device that is gone, or has failed too often, leaves service.
    pub(super) fn read_fault(&mut self, index: MemberIndex, device: DeviceId, fault: IoFault) {
        let member = self.member_mut(index);
        member.counters.read_errors += 1;
        let errors = member.counters.read_errors;
        if fault.kind == IoFaultKind::Gone {
            self.fault_device(index, device, MemberState::Faulted, format!("a read failed: {fault}"));
        } else if errors > READ_ERRORS_MAX {
            self.fault_device(
                index,
                device,
                MemberState::Faulted,
                format!("{errors} reads failed, the last: {fault}"),
            );
        }
    }

    /// A write or flush failed for good: the device leaves service.
    pub(super) fn write_fault(&mut self, index: MemberIndex, device: DeviceId, what: &str, fault: IoFault) {
        self.member_mut(index).counters.write_errors += 1;
        self.fault_device(index, device, MemberState::Faulted, format!("a {what} failed: {fault}"));
    }

    /// A flush failed: nobody knows what of the earlier writes is on the medium, so the member is gone, also as
    /// one that could return to a failed array.
    pub(super) fn flush_fault(&mut self, index: MemberIndex, device: DeviceId, fault: IoFault) {
        self.write_fault(index, device, "flush", fault);
        if fault.kind != IoFaultKind::Gone {
            self.returnable.remove(index);
        }
    }

    /// Takes a device out of service. Does nothing when it is out already.
    pub(super) fn fault_device(&mut self, index: MemberIndex, id: DeviceId, to: MemberState, reason: String) {
        match self.find_device(id) {
            Some((member, Which::Primary)) if member == index => self.fault_primary(index, to, reason),
            Some((member, Which::Replacement)) if member == index => self.drop_replacement(index, &reason),
            _ => {}
        }
    }

    fn fault_primary(&mut self, index: MemberIndex, to: MemberState, reason: String) {
        let was_failed = self.is_failed();
        let member = self.member_mut(index);
        let was = std::mem::replace(&mut member.state, to);
        member.progress = None;
        member.reason = Some(reason.clone());
        if let Some(device) = member.device.take() {
            self.releasing.push(device.id);
        }
        self.supers.note_loss();
        if let Some(redo) = self.redo.as_mut() {
            redo.pages.left(index);
            if redo.is_serving() {
                redo.member_lost();
            }
        }
        let word = to.as_str();
        if was == MemberState::Rebuilding {
            self.notice(
                NoticeLevel::Error,
                Some(index),
                format!("the rebuild of member {index} ended ({word}): {reason}"),
            );
        } else if self.is_failed() {
            let text = format!(
                "member {index} is {word}: {reason}. The array is FAILED: more than {} members are gone; \
                 nothing is written until they come back ('calpe online')",
                self.map.m
            );
            self.notice(NoticeLevel::Error, Some(index), text);
            // From here on nothing is written: what this member holds stays current. One that was lost earlier has
            // been left out of writes.
            if was == MemberState::Online {
                self.returnable.insert(index);
            }
            if !was_failed {
                self.enter_failed();
            }
        } else {
            let left = self.online().len() - self.map.k;
            let text = format!(
                "member {index} is {word}: {reason}. The array is DEGRADED and survives {left} more; replace the member"
            );
            self.notice(NoticeLevel::Warning, Some(index), text);
        }
        self.release_idle_devices();
    }

    /// Gives up the construction of a replacement.
    pub(super) fn drop_replacement(&mut self, index: MemberIndex, reason: &str) {
        if let Some(replacement) = self.member_mut(index).replacement.take() {
            self.releasing.push(replacement.device.id);
            self.supers.note_loss();
            let text = format!("the replacement of member {index} was given up: {reason}");
            self.notice(NoticeLevel::Error, Some(index), text);
            self.release_idle_devices();
        }
    }

    /// The moment the array loses its last spare redundancy and one more: operations that wait end in EIO.
    fn enter_failed(&mut self) {
        // Those that wait for a gate or an acknowledgement decide anew when they are advanced.
        self.passes.drain();
        let gated = std::mem::take(&mut self.gated);
        let unacknowledged = std::mem::take(&mut self.unacknowledged);
        self.ready.extend(gated);
        self.ready.extend(unacknowledged);
        let flushes: Vec<PieceId> = self.flushes.take_all();
        for piece in flushes {
            self.client_ops -= 1;
            self.done(piece, Err(super::ClientError::Io));
        }
        self.log_failed();
    }

    /// Hands back devices that nothing is in flight on.
    pub(super) fn release_idle_devices(&mut self) {
        let inflight = &self.inflight;
        let actions = &mut self.actions;
        self.releasing.retain(|&id| {
            let busy = inflight.iter().any(|(_, entry)| entry.device == id);
            if !busy {
                actions.push(ArrayAction::Release(id));
            }
            busy
        });
    }

    pub(super) fn member_status(&self) -> Vec<MemberStatus> {
        let status = |(at, member): (usize, &Member)| MemberStatus {
            index: MemberIndex(at as u16),
            state: member.state,
            device: member.device.map(|d| d.id),
            replacement: member.replacement.as_ref().map(|r| r.device.id),
            counters: member.counters,
            reason: member.reason.clone(),
        };
        self.members.iter().enumerate().map(status).collect()
    }

    /// Whether the array has ended.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopping == Some(Stopping::Stopped)
    }
}
