//! Administrators' requests carried out: members out, members in, replacements, scrubs, and the clean stop.
//!
//! Invariant: each request is carried out by a plan that `check.rs` has made in the same call; a departure
//! that has waited is judged once more. Must not judge requests otherwise.

use crate::array::base::members::{Changeover, Device, Progress, Replacement};
use crate::array::log::life::Life;
use crate::array::members::check::{Entry, Plan};
use crate::array::members::current::{Mark, was_in_service};
use crate::array::members::outlook::{PACE_CHANGED, PAUSED, SCRUB_STOPPED, words_of_clear, words_of_scrub};
use crate::array::members::waiting::Due;
use crate::array::mutation::{Mutation, is_off};
use crate::array::refusal::AdminRefusal;
use crate::array::{AdminOutcome, AdminRequest, NewDevice, NoticeKind, NoticeLevel, RequestId};
use crate::array::{Array, ArrayAction, Core, Stopping};
use crate::block_io::DeviceId;
use crate::format::{MemberSet, MemberState, Role, Superblock};
use crate::units::{MemberIndex, SlotIndex, Timestamp};
use uuid::Uuid;

/// The reason of a member that an administrator has failed.
const FAILED: &str = "failed by an administrator";

/// The reason of a member that an administrator has taken offline, with everything in place or before that.
const TAKEN_OFFLINE: &str = "taken offline by an administrator";
const TAKEN_OFFLINE_EARLY: &str =
    "taken offline by an administrator, before what was written last was in place on its device";

/// Added where it has gone before everything was in place.
const NOT_IN_PLACE: &str = "; what was written last could not be put in place on its device in time, and may be in its log alone, \
     which is not read when it comes back";

impl Array {
    /// Starts a request; its end is an [`ArrayAction::AdminDone`].
    pub fn admin(&mut self, now: Timestamp, id: RequestId, request: AdminRequest) {
        self.core.now = now;
        match self.check(&request) {
            Ok(plan) => self.carry_out(id, plan),
            Err(refusal) => self.core.admin_done(id, Err(refusal)),
        }
    }

    /// Does what is planned, and answers the request, or arranges for a later answer.
    fn carry_out(&mut self, id: RequestId, plan: Plan<'_>) {
        let text = match plan {
            Plan::TakeOut { member, waits: true, .. } => return self.begin_departure(id, member),
            Plan::TakeOut { member, to, .. } => {
                let reason = if to == MemberState::Offline { TAKEN_OFFLINE } else { FAILED };
                let text = self.take_out(member, to, reason);
                return self.answer_recorded(id, text, None);
            }
            Plan::BringIn { member, device, entry } => self.bring_in(member, device, entry),
            Plan::Replace { member, device, stake } => {
                let text = self.replace(member, device, &stake);
                return self.answer_recorded(id, text, Some((device.device, device.uuid)));
            }
            Plan::CancelReplace { member } => {
                let text = self.cancel_replacement(member);
                return self.answer_recorded(id, text, None);
            }
            Plan::Pace { rebuild_min, rebuild_max } => {
                (self.core.config.rebuild_min, self.core.config.rebuild_max) = (rebuild_min, rebuild_max);
                PACE_CHANGED.into()
            }
            Plan::StartScrub(state) => {
                self.start_scrub();
                words_of_scrub(state).into()
            }
            Plan::PauseScrub => {
                self.passes.pause_scrub();
                // The answer waits until the position is recorded: it then survives a kill.
                self.waiting.pause(&self.core, id);
                self.supers.want();
                return;
            }
            Plan::StopScrub => {
                self.passes.stop_scrub();
                self.supers.want();
                SCRUB_STOPPED.into()
            }
            Plan::Repair => self.start_repair(),
            Plan::Clear { member } => {
                self.clear(member);
                words_of_clear(member)
            }
            Plan::Stop => return self.begin_stop(id),
        };
        self.core.admin_done(id, Ok(AdminOutcome(text)));
    }

    /// Answers a request that was carried out, when the superblocks record that.
    fn answer_recorded(&mut self, id: RequestId, text: String, replacement: Option<(DeviceId, Uuid)>) {
        if self.core.is_failed() || self.is_unjudged() {
            return self.core.admin_done(id, Ok(AdminOutcome(text)));
        }
        self.waiting.record(&self.core, &self.supers, id, text, replacement);
    }

    /// Whether the log holds something that is not in place on a member in service.
    pub(super) fn may_lack(&self, index: MemberIndex) -> bool {
        let is_online = self.core.member(index).state == MemberState::Online;
        // The content of the replay is in place there, but its superblock does not say so yet: the device
        // would not show it when it comes back. In the earlier stages it is not even in place.
        let is_untold = matches!(self.redo.life(), Life::Starting | Life::Recovering | Life::Marking(_));
        let is_in_place = self.redo.is_in_place(&self.pages);
        // The superblock of a device that has just replaced another does not say so yet.
        let is_told = self.core.roster.exchanged.is_empty();
        is_online && (is_untold || self.redo.is_serving() && !(is_in_place && is_told))
    }

    /// Takes a member offline when everything that the log holds for it is in place on its device.
    fn begin_departure(&mut self, id: RequestId, member: MemberIndex) {
        let checkpoint = self.checkpoint_to_depart();
        self.waiting.depart(&self.core, id, member, checkpoint);
    }

    /// How many checkpoints must have ended before a member goes offline; none where that is not
    /// known before the log is replayed.
    fn checkpoint_to_depart(&mut self) -> Option<u64> {
        if !self.redo.is_serving() {
            return None;
        }
        Some(self.redo.want_whole_checkpoint())
    }

    /// Tick: takes members offline when everything that only the log holds for them is in place, or when that
    /// takes too long.
    fn judge_departures(&mut self) {
        if self.waiting.lacks_checkpoint()
            && let Some(checkpoint) = self.checkpoint_to_depart()
        {
            self.waiting.learn_checkpoint(checkpoint);
        }
        let ended = self.redo.checkpoints_ended();
        for Due { id, member, device, is_in_place } in self.waiting.due_departures(&self.core, ended) {
            let of_member = self.core.member(member).device.map(|device| device.id);
            let (reason, rest) = match is_in_place {
                true => (TAKEN_OFFLINE, ""),
                false => (TAKEN_OFFLINE_EARLY, NOT_IN_PLACE),
            };
            let refusal = match of_member == device || of_member.is_none() {
                true => self.check_take_out(member, MemberState::Offline).err(),
                false => Some(AdminRefusal::HasOtherDevice { member }),
            };
            if let Some(refusal) = refusal {
                self.core.admin_done(id, Err(refusal));
                continue;
            }
            let text = self.take_out(member, MemberState::Offline, reason) + rest;
            self.answer_recorded(id, text, None);
        }
    }

    /// Takes the end of a superblock update that holds this position of the scrub.
    pub(super) fn scrub_recorded(&mut self, position: Option<SlotIndex>) {
        if !self.waiting.has_pauses() {
            return;
        }
        if position == self.passes.scrub_record().position {
            let text = match self.passes.has_scrub() {
                true => PAUSED,
                false => "the scrub has ended: all that was left of it was under way",
            };
            self.waiting.end_pauses(&mut self.core, text);
        } else {
            // Slots that were under way have ended since.
            self.supers.want();
        }
    }

    /// Tick: handles requests of administrators that wait.
    pub(in crate::array) fn judge_requests(&mut self) {
        self.waiting.judge_pauses(&mut self.core);
        self.waiting.end_recordings(&mut self.core, &self.supers, false);
        self.judge_departures();
    }

    fn take_out(&mut self, index: MemberIndex, to: MemberState, reason: &str) -> String {
        match self.core.member(index).device {
            Some(device) => self.fault_device(index, device.id, to, reason.into()),
            None => {
                // The member is out already; now it must not come back by itself, nor after a restart.
                let member = self.core.member_mut(index);
                member.state = to;
                member.reason = Some(reason.into());
                member.away = None;
                self.core.count_members();
                self.supers.want();
            }
        }
        format!("member {index} is {}", to.as_str())
    }

    /// Brings a device in for a member that is out: the member's own, or a blank one.
    fn bring_in(&mut self, index: MemberIndex, new: &NewDevice, entry: Entry) -> String {
        let mark = match entry {
            Entry::ToFailed => return self.return_to_failed(index, new),
            Entry::CaughtUp(mark) => Some(mark),
            Entry::Rebuilt => None,
        };
        let member = self.core.member_mut(index);
        if member.uuid != new.uuid {
            member.counters = Default::default();
        }
        member.uuid = new.uuid;
        member.device = Some(new_device(new));
        member.away = None;
        member.state = MemberState::Rebuilding;
        let (since, awaits_ring) = (mark.map(|mark| mark.epoch.number), mark.is_some());
        member.progress = Some(Progress { since, awaits_ring, ..Progress::fresh(new.known_zero) });
        let how = if since.is_some() { "being caught up with what it missed" } else { "being rebuilt" };
        member.reason = Some(how.into());
        self.core.count_members();
        self.core.note_bad_supers(index, &new.bad_copies);
        match new.superblock.as_deref() {
            Some(superblock) => {
                self.supers.note_return(superblock);
                if let Some(mark) = mark {
                    self.start_ring_check(index, new.device, superblock.clone(), mark);
                }
            }
            None => self.supers.note_loss(),
        }
        format!("member {index} is REBUILDING ({how}){}", self.redo.after_settling())
    }

    fn return_to_failed(&mut self, index: MemberIndex, new: &NewDevice) -> String {
        let epoch = self.supers.epoch();
        let is_behind = new.superblock.as_ref().is_some_and(|superblock| superblock.epoch != epoch);
        self.startup.note_return(index, is_behind);
        let member = self.core.member_mut(index);
        member.device = Some(new_device(new));
        member.away = None;
        member.state = MemberState::Online;
        member.reason = None;
        self.core.count_members();
        self.core.note_bad_supers(index, &new.bad_copies);
        if self.core.is_failed() {
            let missing = self.core.map.k - self.core.online().len();
            return format!("member {index} is back; {missing} more are needed");
        }
        self.leave_failed();
        format!("member {index} is ONLINE; the array serves again when its log is replayed")
    }

    /// The mark that a returning member's own device must show to be caught up: that it is as it was when it
    /// left. None: there is no record of what it missed since.
    pub(super) fn caught_up_from(&self, index: MemberIndex, superblock: &Superblock) -> Option<Mark> {
        let left = self.supers.departed().of(index)?;
        let held = superblock.epoch;
        let mark = Mark { epoch: held, update: 0, tail: left.tail };
        // In the epoch before the one that it left in it may have been a device under construction.
        let may_be_as_it_left = (held.live.contains(index) || is_off(Mutation::CaughtUpFromBeforeJoin))
            && self.supers.departed().may_have_held(index, held.id);
        let is_as_it_left = may_be_as_it_left && was_in_service(superblock);
        (self.is_own_device(index, superblock) && is_as_it_left).then_some(mark)
    }

    pub(super) fn is_own_device(&self, index: MemberIndex, superblock: &Superblock) -> bool {
        superblock.array == self.supers.template().array
            && superblock.member == index
            && superblock.role == Role::Member
            && superblock.device == self.core.member(index).uuid
            && superblock.part == self.supers.template().part
    }

    /// Leaves the failed state: enough members are back. It is not known which unflushed writes their caches
    /// lost, so the log is replayed.
    fn leave_failed(&mut self) {
        self.core.roster.returnable = MemberSet::default();
        // Replay needs an epoch of its own although the members are the same: only that voids remains of
        // batches beyond the end that replay finds (A4, R9).
        self.supers.note_exchange();
        // A device that comes back may be older than when it went, and no epoch shows that before the log has
        // been read.
        self.startup.judge_anew();
        self.was_failed = true;
    }

    fn replace(&mut self, index: MemberIndex, new: &NewDevice, stake: &str) -> String {
        let device = new_device(new);
        let progress = Progress::fresh(new.known_zero);
        let changeover = Changeover::of(&self.supers.template().part);
        let member = self.core.member_mut(index);
        match member.state {
            MemberState::Online => {
                let uuid = new.uuid;
                member.replacement = Some(Replacement { device, uuid, progress, changeover, stays: false });
                member.reason = None;
                self.core.count_members();
                self.supers.want();
                return format!(
                    "member {index} is being replaced; the old device serves until the new one is complete{stake}"
                );
            }
            MemberState::Rebuilding => {
                let old = member.device.replace(device);
                self.core.roster.releasing.extend(old.map(|device| device.id));
                let text = format!(
                    "the rebuild of member {index} ended: another new device takes the place of the one that was being built, \
                     which holds nothing current"
                );
                self.core.notice(NoticeKind::ReplacementGivenUp, NoticeLevel::Warning, Some(index), text);
            }
            _ => member.device = Some(device),
        }
        // The marks of pages that the device before it lacked do not count for this one.
        self.pages.left(index);
        self.bad.forget(index);
        let member = self.core.member_mut(index);
        member.uuid = new.uuid;
        // The errors of the old device say nothing about this one.
        member.counters = Default::default();
        member.away = None;
        member.state = MemberState::Rebuilding;
        member.progress = Some(progress);
        member.reason = Some("being rebuilt onto a new device".into());
        self.core.count_members();
        self.supers.note_loss();
        self.core.release_idle_devices();
        format!("member {index} is REBUILDING onto the new device{stake}")
    }

    /// Hands the new device back; the superblocks of the others record that from their next update on.
    fn cancel_replacement(&mut self, index: MemberIndex) -> String {
        self.take_back_replacement(index);
        let rest = self.core.without_it(index);
        let text = format!("the replacement of member {index} was cancelled; {rest}");
        self.core.notice(NoticeKind::ReplacementCancelled, NoticeLevel::Info, Some(index), text);
        format!("the replacement of member {index} is cancelled; {rest}")
    }

    fn start_scrub(&mut self) {
        self.passes.start_scrub();
        // The scrub is recorded in the superblocks once it has looked at them.
        if !self.redo.is_serving() {
            self.supers.want();
        }
    }

    fn begin_stop(&mut self, id: RequestId) {
        self.waiting.refuse_departures(&mut self.core);
        self.waiting.end_recordings(&mut self.core, &self.supers, true);
        self.core.stop.stop_begun = Some(self.core.now);
        self.core.stop.stopping = Some(Stopping::Draining(id));
    }

    /// Stop: first everything under way ends, then the members are marked clean.
    pub(in crate::array) fn pump_stop(&mut self) {
        if let Some(Stopping::Draining(id) | Stopping::Marking(id)) = self.core.stop.stopping
            && self.stop_without_short(id)
        {
            return;
        }
        let id = match self.core.stop.stopping {
            Some(Stopping::Draining(id) | Stopping::Marking(id)) if self.core.is_failed() => {
                // Nothing may be written: the members stay dirty.
                if self.io_is_idle() && self.core.load.jobs_out == 0 && self.core.load.client_ops == 0 {
                    self.finish_stop(id);
                }
                return;
            }
            Some(Stopping::Draining(id)) => id,
            _ => return,
        };
        self.end_waiting_passes();
        if self.core.load.client_ops > 0
            || !self.io_is_idle()
            || self.core.load.jobs_out > 0
            || self.supers.is_busy()
            || !self.background_is_idle()
        {
            return;
        }
        let mut emptied = false;
        self.ask_log();
        match self.redo.life() {
            Life::Starting | Life::Recovering | Life::Marking(_) => return,
            Life::Refused(_) if self.is_unjudged() => return self.finish_stop(id),
            Life::Refused(_) => {}
            Life::Serving if self.supers.is_log_drained() => emptied = true,
            Life::Serving => {
                self.redo.want_checkpoint();
                return;
            }
        }
        self.core.stop.stopping = Some(Stopping::Marking(id));
        if emptied {
            self.supers.mark_clean();
        }
        self.supers.want();
        self.pump_supers();
    }

    /// Ends a stop when the last update of the superblocks has been written, or cannot be.
    pub(super) fn finish_stop(&mut self, id: RequestId) {
        if !self.core.is_failed()
            && !self.supers.acknowledgements_allowed(&self.core)
            && !self.is_refused_unwritten()
        {
            // A member failed during the last update; the next one records that.
            return;
        }
        self.stop_now(id, true);
    }

    /// `is_recorded`: the superblocks record everything that this array knows.
    pub(in crate::array) fn stop_now(&mut self, id: RequestId, is_recorded: bool) {
        self.waiting.end_pauses(&mut self.core, PAUSED);
        self.waiting.end_recordings(&mut self.core, &self.supers, true);
        let words = self.words_for_stop(is_recorded);
        self.core.stop.stopping = Some(Stopping::Stopped);
        let exchanged = std::mem::take(&mut self.core.roster.exchanged);
        let exchanged = exchanged.into_iter().map(|replaced| replaced.device.id);
        for device in self.core.devices().into_iter().map(|(_, _, device)| device.id).chain(exchanged) {
            self.core.actions.push(ArrayAction::Release(device));
        }
        self.core.admin_done(id, Ok(AdminOutcome(words.into())));
    }
}

impl Core {
    /// The members that can come back to the array while it has failed.
    pub(in crate::array) fn returnable_now(&self) -> MemberSet {
        let is_out = |member: &MemberIndex| self.member(*member).state != MemberState::Online;
        if self.is_failed() {
            self.roster.returnable.iter().filter(is_out).collect()
        } else {
            MemberSet::new()
        }
    }
}

fn new_device(new: &NewDevice) -> Device {
    let sequence = new.superblock.as_ref().map_or(0, |superblock| superblock.sequence);
    Device { is_blank: new.superblock.is_none(), ..Device::new(new.device, new.bytes, sequence) }
}
