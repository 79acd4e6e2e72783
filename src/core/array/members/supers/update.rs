//! How an update of the superblocks gets to its devices, stage by stage, and what is recorded of it when it
//! is over.
//!
//! Invariant: an update is complete only when every device that it began with has it, or has left. Reads only
//! the live set, the clean mark and the log's start from an update. Must not know how these are chosen.

use crate::array::base::members::{Device, Replaced};
use crate::array::members::supers::{Durable, Participant, Saved, Supers};
use crate::array::mutation::{Mutation, is_off};
use crate::array::{Core, NoticeKind, NoticeLevel, Owner};
use crate::block_io::{DeviceId, IoFault, IoOp};
use crate::format::{CLEARED_BYTE, COPY_BYTES, Epoch, MemberState, Role, Superblock, superblock_offsets};
use crate::units::{MemberIndex, SlotIndex};

/// What follows from the end of an I/O of an update.
pub(super) enum UpdateStep {
    /// The update goes on, or is over with nothing else to do.
    Nothing,
    /// The update was given up before any of it was written, and with it the epoch that it was to begin.
    EpochGivenUp,
    /// All devices have it.
    Written(Update),
}

/// An update that is on its devices.
pub(super) struct Update(Box<Job>);

pub(super) struct Job {
    stage: Stage,
    /// Whether all devices in use have the update, and those that were replaced now get it.
    marks: bool,
    pending: usize,
    /// The losses that this update records, and the count of losses when it began.
    losses: u64,
    losses_seen: u64,
    devices: Vec<Participant>,
    template: Superblock,
    before: Before,
}

/// The state before an update, which may be given up before any of it was written.
pub(super) struct Before {
    epoch: Epoch,
    is_complete: bool,
    bump_due: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    FlushData,
    /// For the first update of a device: a torn earlier one may have left its first sector there, and this
    /// one, torn as well, could complete it with sectors that both have alike. An epoch that was given up
    /// would then be back.
    Clear,
    FlushClear,
    WriteHead,
    FlushHead,
    WriteTail,
    FlushTail,
}

impl Stage {
    fn is_flush(self) -> bool {
        matches!(self, Stage::FlushData | Stage::FlushClear | Stage::FlushHead | Stage::FlushTail)
    }
}

impl Supers {
    /// The present epoch, to return to if an update is given up.
    pub(super) fn before(&self) -> Before {
        Before { epoch: self.epoch(), is_complete: self.epoch_is_complete, bump_due: self.bump_due }
    }

    /// Begins the update that writes `template`; `before` is the state before it. One that only finishes an
    /// epoch goes to the devices that this began with. A device that is being built for a member of it does
    /// not get it, since it would pass for that member after a crash.
    pub(super) fn begin(&mut self, core: &mut Core, template: Superblock, before: Before, progress: u64) {
        self.wanted = false;
        let came_since = |member: MemberIndex| {
            let is_of_epoch = !before.is_complete && template.epoch.live.contains(member);
            is_of_epoch && core.member(member).state == MemberState::Rebuilding
        };
        let mut devices = core.participants(template.sequence);
        if !is_off(Mutation::NewDeviceInOldEpoch) {
            devices.retain(|device| device.role != Role::Member || !came_since(device.member));
        }
        // Progress, cleanness and new devices must be on the media when the update records them.
        let mut job = Job {
            stage: Stage::FlushData,
            marks: false,
            pending: 0,
            // An update that only finishes an earlier epoch records no loss.
            losses: if template.epoch.live == core.online() && !self.bump_due {
                self.losses
            } else {
                self.durable.losses
            },
            losses_seen: self.losses,
            devices,
            template: template.clone(),
            before,
        };
        self.template = template;
        self.saved = Saved { at: core.now, progress };
        core.issue_super(&mut job);
        self.job = Some(job);
    }

    /// Takes the end of an I/O of the update. Its fault was judged before.
    pub(super) fn io_ended(&mut self, core: &mut Core) -> UpdateStep {
        let Some(mut job) = self.job.take() else { unreachable!("superblock I/O belongs to a job") };
        job.pending -= 1;
        while job.pending == 0 {
            // Nothing is written yet: progress that a flush has just shown to be lost must not be recorded.
            if job.stage == Stage::FlushData && self.losses != job.losses_seen {
                return self.give_up(&job);
            }
            if job.stage == Stage::FlushClear {
                // Also when the update fails: the next one finds in the slot what this one leaves there.
                for participant in job.devices.iter().filter(|other| other.is_marked() == job.marks) {
                    if let Some(device) = core.super_device_mut(participant.member, participant.device) {
                        device.cleared = true;
                    }
                }
            }
            job.stage = match job.stage {
                Stage::FlushData => Stage::Clear,
                Stage::Clear => Stage::FlushClear,
                Stage::FlushClear => Stage::WriteHead,
                Stage::WriteHead => Stage::FlushHead,
                Stage::FlushHead => Stage::WriteTail,
                Stage::WriteTail => Stage::FlushTail,
                Stage::FlushTail if !job.marks && job.devices.iter().any(Participant::is_marked) => {
                    job.marks = true;
                    Stage::Clear
                }
                Stage::FlushTail => return self.end_of(core, job),
            };
            if !core.is_failed() {
                core.issue_super(&mut job);
            }
            if job.pending == 0 && core.is_failed() {
                // The update is void; the array records its state when its members are back.
                self.wanted = true;
                return UpdateStep::Nothing;
            }
        }
        self.job = Some(job);
        UpdateStep::Nothing
    }

    /// Gives up an update of which nothing was written. It is made again.
    fn give_up(&mut self, job: &Job) -> UpdateStep {
        let is_epoch_void = self.epoch() != job.before.epoch;
        (self.template.epoch, self.epoch_is_complete) = (job.before.epoch, job.before.is_complete);
        // A change that came meanwhile, an exchange or the return of an array that had failed, needs its
        // epoch too.
        self.bump_due |= job.before.bump_due;
        self.wanted = true;
        if is_epoch_void { UpdateStep::EpochGivenUp } else { UpdateStep::Nothing }
    }

    /// Ends an update that all devices have, unless the array has failed.
    fn end_of(&mut self, core: &mut Core, job: Job) -> UpdateStep {
        if core.is_failed() {
            self.wanted = true;
            return UpdateStep::Nothing;
        }
        for participant in &job.devices {
            if let Some(device) = core.super_device_mut(participant.member, participant.device) {
                device.recorded = true;
                device.sequence = participant.sequence;
                device.written[(participant.sequence % 2) as usize] = Some(participant.sequence);
            }
        }
        // A device that came back to a failed array meanwhile does not have it. No epoch may follow before it
        // does (E2).
        let holds = |id: DeviceId| job.devices.iter().any(|participant| participant.device == id);
        let online = core.roster.members.iter().filter(|member| member.state == MemberState::Online);
        if online.filter_map(|member| member.device).any(|device| !holds(device.id)) {
            self.wanted = true;
            return UpdateStep::Nothing;
        }
        UpdateStep::Written(Update(Box::new(job)))
    }

    /// Completes an update: its content is durable, and the gate opens where it records every loss. False:
    /// its clean mark takes effect only with another update.
    pub(super) fn complete(&mut self, core: &mut Core, Update(job): &Update) -> bool {
        self.epoch_is_complete = true;
        self.update_complete = job.template.update;
        if self.bump_due || self.live() != core.online() {
            self.wanted = true;
        }
        self.durable = Durable {
            losses: job.losses,
            dirty: !job.template.clean,
            log_start: Some(job.template.log_start),
        };
        if self.acknowledgements_allowed(core) {
            let exchanged = std::mem::take(&mut core.roster.exchanged);
            core.roster.releasing.extend(exchanged.into_iter().map(|replaced| replaced.device.id));
            core.release_idle_devices();
            let gated = std::mem::take(&mut core.work.gated);
            core.work.ready.extend(gated);
        }
        let is_half_clean = !self.dirty && !job.template.clean;
        self.wanted |= self.new_log_start.is_some() || is_half_clean;
        !is_half_clean
    }
}

impl Update {
    /// The position of the scrub that it records.
    pub(super) fn scrub_position(&self) -> Option<SlotIndex> {
        self.0.template.scrub.position
    }
}

impl Job {
    /// Whether it says that the array is clean.
    pub(super) fn says_clean(&self) -> bool {
        self.template.clean
    }
}

impl Core {
    /// Whether a device was replaced and is getting its last update. It then leaves without that, because of
    /// this fault.
    pub(in crate::array) fn leaves_unmarked(&mut self, device: DeviceId, fault: IoFault) -> bool {
        let Some(at) = self.roster.exchanged.iter().position(|replaced| replaced.device.id == device) else {
            return false;
        };
        let Replaced { member, uuid, device } = self.roster.exchanged.swap_remove(at);
        self.roster.releasing.push(device.id);
        let text = format!(
            "the old device of member {member} (uuid {uuid}) could not be marked as replaced: {fault}; keep it away from \
             this array, or wipe it"
        );
        self.notice(NoticeKind::OldDeviceUnmarked, NoticeLevel::Warning, Some(member), text);
        self.release_idle_devices();
        true
    }

    fn issue_super(&mut self, job: &mut Job) {
        for participant in job.devices.iter_mut().filter(|participant| participant.is_marked() == job.marks) {
            let &mut Participant { member, device, bytes, uuid, role, sequence, .. } = participant;
            let found = self.super_device_mut(member, device);
            let Some((cleared, is_blank)) = found.map(|device| (device.cleared, device.is_blank)) else {
                continue;
            };
            if cleared && matches!(job.stage, Stage::Clear | Stage::FlushClear) {
                continue;
            }
            if job.pending > 0 && job.stage.is_flush() && is_off(Mutation::NoFlushBeforeDecide) {
                continue;
            }
            let op = match job.stage {
                Stage::FlushData | Stage::FlushClear | Stage::FlushHead | Stage::FlushTail => IoOp::Flush,
                Stage::Clear => {
                    let mut buf = self.pool.alloc(COPY_BYTES);
                    buf.fill(CLEARED_BYTE);
                    let buf = buf.freeze();
                    let [head, tail] = superblock_offsets(bytes, sequence);
                    let mut ends = vec![head];
                    if is_blank {
                        // For a new device, the other slot too: it is no damage that nothing was written
                        // there yet.
                        ends.extend(superblock_offsets(bytes, sequence ^ 1));
                    }
                    for offset in ends {
                        let op = IoOp::Write { offset, buf: buf.clone(), fua: false };
                        self.submit_io(Owner::Super, member, device, op);
                        job.pending += 1;
                    }
                    IoOp::Write { offset: tail, buf, fua: false }
                }
                // One end after the other: a void update may have left its remains in this slot, and one end
                // of it may be the newest that the device has.
                Stage::WriteHead | Stage::WriteTail => {
                    let encode = || {
                        let template = job.template.clone();
                        let superblock = Superblock { device: uuid, member, role, sequence, ..template };
                        let mut buf = self.pool.alloc(COPY_BYTES);
                        buf.copy_from_slice(&superblock.encode()[..]);
                        buf.freeze()
                    };
                    let buf = participant.encoded.get_or_insert_with(encode).clone();
                    let [head, tail] = superblock_offsets(bytes, sequence);
                    let offset = if job.stage == Stage::WriteHead { head } else { tail };
                    IoOp::Write { offset, buf, fua: false }
                }
            };
            self.submit_io(Owner::Super, member, device, op);
            job.pending += 1;
        }
    }

    /// A device that an update goes to: in use, or replaced and not yet marked.
    fn super_device_mut(&mut self, member: MemberIndex, id: DeviceId) -> Option<&mut Device> {
        if let Some(at) = self.roster.exchanged.iter().position(|replaced| replaced.device.id == id) {
            return Some(&mut self.roster.exchanged[at].device);
        }
        self.device_mut(member, id)
    }
}
