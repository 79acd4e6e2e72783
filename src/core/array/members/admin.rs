//! Administrators' requests: members out, members in, replacements, scrubs, and the clean stop.

use crate::array::base::members::{Device, Progress, Replacement};
use crate::array::log::life::Life;
use crate::array::members::current::{Mark, is_current, was_in_service};
use crate::array::members::waiting::Due;
use crate::array::mutation::{Mutation, is_off};
use crate::array::{AdminError, AdminOutcome, AdminRequest, NewDevice, NoticeKind, NoticeLevel, RequestId};
use crate::array::{Array, ArrayAction, Core, STOPPED_CLEANLY, Stopping};
use crate::block_io::DeviceId;
use crate::format::{COPY_BYTES, MemberSet, MemberState, Role, Superblock, region_end};
use crate::units::{MemberIndex, SlotIndex, Timestamp};
use uuid::Uuid;

/// How a device comes in for a member that is out.
#[derive(Clone, Copy, Debug)]
pub(super) enum Entry {
    /// To a failed array, whose members are all current.
    ToFailed,
    /// With what it missed since then.
    CaughtUp(Mark),
    /// With everything.
    Rebuilt,
}

/// Why a member went that an administrator has taken out: with all in place, or before that.
const TAKEN_OFFLINE: &str = "taken offline by an administrator";
const TAKEN_OFFLINE_EARLY: &str =
    "taken offline by an administrator, before what was written last was in place on its device";

/// Said where it has gone before that.
const NOT_IN_PLACE: &str = "; what was written last could not be put in place on its device in time, and may be in its log alone, \
     which is not read when it comes back";

impl Array {
    /// Starts a request; its end is an [`ArrayAction::AdminDone`].
    pub fn admin(&mut self, now: Timestamp, id: RequestId, request: AdminRequest) {
        self.core.now = now;
        if self.core.stop.stopping.is_some() {
            self.core.admin_done(id, Err(AdminError("the array is stopping".into())));
            return;
        }
        let is_recorded = matches!(
            &request,
            AdminRequest::Replace { .. }
                | AdminRequest::CancelReplace { .. }
                | AdminRequest::Fail { .. }
                | AdminRequest::Offline { .. }
        );
        let replacement = match &request {
            AdminRequest::Replace { device, .. } => Some((device.device, device.uuid)),
            _ => None,
        };
        let result = match request {
            AdminRequest::Fail { member } => {
                self.take_out(member, MemberState::Faulted, "failed by an administrator")
            }
            AdminRequest::Offline { member } => match self.check_take_out(member, MemberState::Offline) {
                Ok(_) if self.may_lack(member) => {
                    let checkpoint = self.checkpoint_to_depart();
                    self.waiting.depart(&self.core, id, member, checkpoint);
                    self.run();
                    return;
                }
                Ok(_) => self.take_out(member, MemberState::Offline, TAKEN_OFFLINE),
                Err(error) => Err(error),
            },
            AdminRequest::Online { member, device } => self.bring_in(member, device),
            AdminRequest::Replace { member, device } => self.replace(member, device),
            AdminRequest::Pace { rebuild_min, rebuild_max } => {
                (self.core.config.rebuild_min, self.core.config.rebuild_max) = (rebuild_min, rebuild_max);
                Ok("the pace of rebuild and scrub is changed".into())
            }
            AdminRequest::CancelReplace { member } => self.cancel_replacement(member),
            AdminRequest::ScrubStart => self.scrub_start(),
            AdminRequest::ScrubPause => match self.check_scrub(true) {
                Ok(()) => {
                    self.passes.pause_scrub();
                    self.waiting.pause(&self.core, id);
                    self.supers.want();
                    self.run();
                    return;
                }
                Err(error) => Err(error),
            },
            AdminRequest::ScrubStop => self.check_scrub(false).map(|()| {
                self.passes.stop_scrub();
                self.supers.want();
                "the scrub is stopped".into()
            }),
            AdminRequest::Repair => self.start_repair(),
            AdminRequest::Clear { member } => self.clear(member),
            AdminRequest::Stop => {
                self.waiting.refuse_departures(&mut self.core);
                self.waiting.end_recordings(&mut self.core, &self.supers, true);
                self.core.stop.stop_begun = Some(self.core.now);
                self.core.stop.stopping = Some(Stopping::Draining(id));
                self.run();
                return;
            }
        };
        match is_recorded {
            true => self.answer_recorded(id, result, replacement),
            false => self.core.admin_done(id, result.map(AdminOutcome).map_err(AdminError)),
        }
        self.run();
    }

    /// Answers a request when the superblocks tell of what it has done.
    fn answer_recorded(
        &mut self,
        id: RequestId,
        result: Result<String, String>,
        replacement: Option<(DeviceId, Uuid)>,
    ) {
        match result {
            Ok(text) if !self.core.is_failed() && !self.is_unjudged() => {
                self.waiting.record(&self.core, &self.supers, id, text, replacement);
            }
            result => self.core.admin_done(id, result.map(AdminOutcome).map_err(AdminError)),
        }
    }

    /// Whether the log has what is not in its place on a member in service.
    pub(super) fn may_lack(&self, index: MemberIndex) -> bool {
        let is_online = self.core.member(index).state == MemberState::Online;
        // What was replayed is in place there, but it was not told so yet: it would not show it
        // when it comes back. Before that it is not even in place.
        let is_untold = matches!(self.redo.life(), Life::Starting | Life::Recovering | Life::Marking(_));
        let is_in_place = self.redo.is_in_place(&self.pages);
        // The superblock of a device that has just replaced another does not say so yet.
        let is_told = self.core.roster.exchanged.is_empty();
        is_online && (is_untold || self.redo.is_serving() && !(is_in_place && is_told))
    }

    /// How many checkpoints must have ended before a member goes offline; none where that is not
    /// known before the log is replayed.
    fn checkpoint_to_depart(&mut self) -> Option<u64> {
        if !self.redo.is_serving() {
            return None;
        }
        Some(self.redo.want_whole_checkpoint())
    }

    /// Tick: members go offline when what they have in the log alone is in its place, or when that takes too long.
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
            let result = match of_member == device || of_member.is_none() {
                true => self.take_out(member, MemberState::Offline, reason).map(|done| done + rest),
                false => Err(format!("member {member} has left meanwhile, and has another device now")),
            };
            self.answer_recorded(id, result, None);
        }
    }

    /// A superblock update that holds this position of the scrub is complete.
    pub(super) fn scrub_recorded(&mut self, position: Option<SlotIndex>) {
        if !self.waiting.has_pauses() {
            return;
        }
        if position == self.passes.scrub_record().position {
            let text = match self.passes.has_scrub() {
                true => "the scrub is paused",
                false => "the scrub has ended: all that was left of it was under way",
            };
            self.waiting.end_pauses(&mut self.core, text);
        } else {
            // Slots that were under way are done since.
            self.supers.want();
        }
    }

    /// Tick: administrators' requests that wait.
    pub(in crate::array) fn judge_requests(&mut self) {
        self.waiting.judge_pauses(&mut self.core);
        self.waiting.end_recordings(&mut self.core, &self.supers, false);
        self.judge_departures();
    }

    fn take_out(&mut self, index: MemberIndex, to: MemberState, reason: &str) -> Result<String, String> {
        self.check_take_out(index, to)?;
        match self.core.member(index).device {
            Some(device) => self.fault_device(index, device.id, to, reason.into()),
            None => {
                // It is out already; it shall not come back by itself, nor after a restart.
                let member = self.core.member_mut(index);
                member.state = to;
                member.reason = Some(reason.into());
                member.away = None;
                self.core.count_members();
                self.supers.want();
            }
        }
        Ok(format!("member {index} is {}", to.as_str()))
    }

    /// A member's own device, or a blank one, for a member that is out.
    fn bring_in(&mut self, index: MemberIndex, new: NewDevice) -> Result<String, String> {
        let mark = match self.check_bring_in(index, &new)? {
            Entry::ToFailed => return Ok(self.return_to_failed(index, &new)),
            Entry::CaughtUp(mark) => Some(mark),
            Entry::Rebuilt => None,
        };
        let member = self.core.member_mut(index);
        if member.uuid != new.uuid {
            member.counters = Default::default();
        }
        member.uuid = new.uuid;
        member.device = Some(new_device(&new));
        member.away = None;
        member.state = MemberState::Rebuilding;
        let (since, awaits_ring) = (mark.map(|mark| mark.epoch.number), mark.is_some());
        member.progress = Some(Progress { since, awaits_ring, ..Progress::fresh(new.known_zero) });
        let how = if since.is_some() { "being caught up with what it missed" } else { "being rebuilt" };
        member.reason = Some(how.into());
        self.core.count_members();
        self.core.note_bad_supers(index, &new.bad_copies);
        match new.superblock {
            Some(superblock) => {
                self.supers.note_return(&superblock);
                if let Some(mark) = mark {
                    self.start_ring_check(index, new.device, *superblock, mark);
                }
            }
            None => self.supers.note_loss(),
        }
        Ok(format!("member {index} is REBUILDING ({how}){}", self.redo.after_settling()))
    }

    /// While the array has failed nothing was written, so a member that was in service at that moment is current.
    pub(super) fn check_return_to_failed(&self, index: MemberIndex, new: &NewDevice) -> Result<(), String> {
        let mark = self.supers.mark();
        let own = new.superblock.as_deref().filter(|s| self.is_own_device(index, s));
        let verdict =
            own.filter(|_| self.core.roster.returnable.contains(index)).map(|s| is_current(s, 0, &mark));
        let first = self.core.returnable_now();
        if verdict.is_none() && own.is_some() && self.core.online().len() + first.len() >= self.core.map.k {
            let first: Vec<String> = first.iter().map(|member| member.to_string()).collect();
            let name = &self.supers.template().name;
            return Err(format!(
                "the array has FAILED, and member {index} lacks what was written after it had left, or may lack it: bring back \
                 first what was in service until then, with 'calpe online {name} MEMBER' for member {}; then the array serves \
                 again, and member {index} is caught up with what it missed",
                first.join(", ")
            ));
        }
        if verdict.is_none() && own.is_some_and(|superblock| is_current(superblock, 0, &mark).is_ok()) {
            let why = self.core.member(index).reason.as_deref().unwrap_or("it left before the others");
            return Err(format!(
                "the array has FAILED, and member {index} may lack writes that it had acknowledged and not flushed ({why}); clients \
                 notice that only when the array is started anew. Restart it, without --force: the log is replayed, and nothing \
                 that was flushed is lost"
            ));
        }
        if verdict != Some(Ok(())) {
            let why = verdict.and_then(Result::err).map(|why| format!(" ({why})")).unwrap_or_default();
            return Err(format!(
                "the array has FAILED and this device does not hold what member {index} last held, or that is not \
                 sure{why}; bring back the members that were in service when it failed, or restart the array: a start looks at \
                 all members that are there"
            ));
        }
        Ok(())
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

    /// What a returning member's own device must show to be caught up from: that it is as it was when it left. None: what it
    /// missed since is not on record.
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

    fn is_own_device(&self, index: MemberIndex, superblock: &Superblock) -> bool {
        superblock.array == self.supers.template().array
            && superblock.member == index
            && superblock.role == Role::Member
            && superblock.device == self.core.member(index).uuid
    }

    /// Enough members are back. What their caches lost of unflushed writes is not known, so the log is replayed.
    fn leave_failed(&mut self) {
        self.core.roster.returnable = MemberSet::default();
        // Replay needs an epoch of its own although the members are the same: it alone voids what is left of batches
        // beyond the end that replay finds (A4, R9).
        self.supers.note_exchange();
        // What comes back may be older than what went: no epoch says otherwise before the log has been read.
        self.startup.judge_anew();
        self.was_failed = true;
    }

    fn replace(&mut self, index: MemberIndex, new: NewDevice) -> Result<String, String> {
        self.check_replace(index, &new)?;
        let beside = self.beside_others(index);
        let at_stake = self.at_stake(index);
        let device = new_device(&new);
        let progress = Progress::fresh(new.known_zero);
        let member = self.core.member_mut(index);
        match member.state {
            MemberState::Online => {
                member.replacement = Some(Replacement { device, uuid: new.uuid, progress });
                member.reason = None;
                self.core.count_members();
                self.supers.want();
                return Ok(format!(
                    "member {index} is being replaced; the old device serves until the new one is complete{beside}{at_stake}"
                ));
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
        // Nor does what the one before it was told of pages that it lacks.
        self.pages.left(index);
        self.bad.forget(index);
        let member = self.core.member_mut(index);
        member.uuid = new.uuid;
        // What the old device went through says nothing about this one.
        member.counters = Default::default();
        member.away = None;
        member.state = MemberState::Rebuilding;
        member.progress = Some(progress);
        member.reason = Some("being rebuilt onto a new device".into());
        self.core.count_members();
        self.supers.note_loss();
        self.core.release_idle_devices();
        Ok(format!("member {index} is REBUILDING onto the new device{beside}{at_stake}"))
    }

    /// The new device is handed back; the superblocks of the others say so from their next update on.
    fn cancel_replacement(&mut self, index: MemberIndex) -> Result<String, String> {
        self.core.check_cancel(index)?;
        self.take_back_replacement(index);
        let rest = self.core.without_it(index);
        let text = format!("the replacement of member {index} was cancelled; {rest}");
        self.core.notice(NoticeKind::ReplacementCancelled, NoticeLevel::Info, Some(index), text);
        Ok(format!("the replacement of member {index} is cancelled; {rest}"))
    }

    /// Nothing is built in an array that cannot be served.
    pub(super) fn check_written(&self) -> Result<(), String> {
        if self.is_refused_unwritten() {
            return Err("the array cannot be served as it was started, and nothing was written: stop it, bring back members that \
                        are missing, and start it with them"
                .into());
        }
        self.check_served()
    }

    /// Nothing begins in an array whose log cannot be replayed.
    pub(super) fn check_served(&self) -> Result<(), String> {
        if let Life::Refused(reason) = self.redo.life() {
            let name = &self.supers.template().name;
            return Err(format!(
                "the array cannot be served: {reason}. Stop it with 'calpe export {name}', bring back members that are missing, and \
                 import it again"
            ));
        }
        Ok(())
    }

    /// The new device must hold what every other member holds, and its tail superblocks behind it.
    pub(super) fn check_size(&self, new: &NewDevice) -> Result<(), String> {
        let needed = region_end(&self.supers.template().regions).0 + 2 * COPY_BYTES as u64;
        if new.bytes < needed {
            return Err(format!("the device has {} bytes and {needed} are needed", new.bytes));
        }
        Ok(())
    }

    fn scrub_start(&mut self) -> Result<String, String> {
        self.check_scrub_start()?;
        let text = self.words_for_scrub();
        self.passes.start_scrub();
        // It is recorded in the superblocks when it has looked at them.
        if !self.redo.is_serving() {
            self.supers.want();
        }
        Ok(text.into())
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
                if self.core.inflight.is_empty()
                    && self.core.load.jobs_out == 0
                    && self.core.load.client_ops == 0
                {
                    self.finish_stop(id);
                }
                return;
            }
            Some(Stopping::Draining(id)) => id,
            _ => return,
        };
        self.end_waiting_passes();
        if self.core.load.client_ops > 0
            || !self.core.inflight.is_empty()
            || self.core.load.jobs_out > 0
            || self.supers.is_busy()
            || !self.background_is_idle()
        {
            return;
        }
        let mut emptied = false;
        match self.redo.life() {
            Life::Starting | Life::Recovering | Life::Marking(_) => return,
            Life::Refused(_) if self.is_unjudged() => return self.finish_stop(id),
            Life::Refused(_) => {}
            Life::Serving if self.drained_log().is_some() => emptied = true,
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

    /// The last update of the superblocks has been written, or cannot be.
    pub(super) fn finish_stop(&mut self, id: RequestId) {
        if !self.core.is_failed() && !self.acknowledgements_allowed() && !self.is_refused_unwritten() {
            // A member failed during the last update; the next one records that.
            return;
        }
        self.stop_now(id, true);
    }

    /// `is_recorded`: the superblocks say what this array knows.
    pub(in crate::array) fn stop_now(&mut self, id: RequestId, is_recorded: bool) {
        self.waiting.end_pauses(&mut self.core, "the scrub is paused");
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

    /// How a stop that ends now leaves the array.
    pub(super) fn words_for_stop(&self, is_recorded: bool) -> &'static str {
        let is_marked =
            !self.supers.is_dirty() && !matches!(self.core.stop.stopping, Some(Stopping::Marking(_)));
        match self.redo.life() {
            // An array that was idle has the mark already.
            _ if self.core.is_failed() && is_marked => {
                "stopped while FAILED; it had been idle, and is marked clean"
            }
            _ if self.core.is_failed() => {
                "stopped while FAILED, and not cleanly: its log is replayed when enough of its members are back"
            }
            Life::Refused(_) => "stopped as it was found: it could not be served",
            _ if self.supers.is_dirty() || !is_recorded => {
                "stopped, and not cleanly: its log is replayed at the next start"
            }
            _ => STOPPED_CLEANLY,
        }
    }
}

impl Core {
    pub(in crate::array) fn known(&self, index: MemberIndex) -> Result<(), String> {
        let width = self.map.width();
        if usize::from(index.0) < width {
            return Ok(());
        }
        Err(format!("there is no member {index}: the array has members 0 to {}", width - 1))
    }

    /// The members that can come back to the array as long as it has failed.
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
