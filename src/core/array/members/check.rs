//! Judges administrators' requests: refuses a request, or plans how it is carried out.
//!
//! Invariants: nothing here changes anything; every reason for which the array refuses a request at once is
//! here; a dry run and the request itself go through [`Array::check`]. Must not know the words for a plan
//! (`outlook.rs`), nor how it is carried out (`admin.rs`).

use crate::array::base::members::{Changeover, Replacement};
use crate::array::log::life::Life;
use crate::array::members::current::{Mark, is_current};
use crate::array::mutation::{Mutation, is_off};
use crate::array::refusal::{AdminRefusal, ScrubState};
use crate::array::{AdminRequest, Array, Core, NewDevice};
use crate::format::{MemberState, Superblock};
use crate::units::{LaneIndex, MemberIndex};
use uuid::Uuid;

/// How a request that is not refused is carried out. The plan holds until the array changes.
#[derive(Debug)]
pub(super) enum Plan<'r> {
    /// A member leaves service, or stays out in another state.
    TakeOut {
        member: MemberIndex,
        to: MemberState,
        /// Whether everything that only the log holds for its device is put in place first.
        waits: bool,
    },
    /// A device comes in for a member that is out.
    BringIn {
        member: MemberIndex,
        device: &'r NewDevice,
        entry: Entry,
    },
    /// A new device is built for a member. `stake`: how that affects builds under way, and what may be lost
    /// by it.
    Replace {
        member: MemberIndex,
        device: &'r NewDevice,
        stake: String,
    },
    /// The device that is built to replace a member is handed back.
    CancelReplace {
        member: MemberIndex,
    },
    /// The pace of passes changes.
    Pace {
        rebuild_min: u64,
        rebuild_max: u64,
    },
    /// A scrub begins or goes on, from this state.
    StartScrub(ScrubState),
    PauseScrub,
    StopScrub,
    Repair,
    /// Counts of a member, or of all members and the array, are cleared.
    Clear {
        member: Option<MemberIndex>,
    },
    Stop,
}

/// How a device comes in for a member that is out.
#[derive(Clone, Copy, Debug)]
pub(super) enum Entry {
    /// To a failed array, whose members are all current.
    ToFailed,
    /// The device gets what the member missed since this mark.
    CaughtUp(Mark),
    /// The device gets everything.
    Rebuilt,
}

impl Array {
    /// Judges a request in the present state of the array.
    pub(super) fn check<'r>(&self, request: &'r AdminRequest) -> Result<Plan<'r>, AdminRefusal> {
        if self.core.stop.stopping.is_some() {
            return Err(AdminRefusal::Stopping);
        }
        match request {
            AdminRequest::Fail { member } => self.check_take_out(*member, MemberState::Faulted),
            AdminRequest::Offline { member } => self.check_take_out(*member, MemberState::Offline),
            AdminRequest::Online { member, device } => self.check_bring_in(*member, device),
            AdminRequest::Replace { member, device } => self.check_replace(*member, device),
            AdminRequest::CancelReplace { member, device } => self.check_cancel(*member, *device),
            AdminRequest::Pace { rebuild_min, rebuild_max } => {
                Ok(Plan::Pace { rebuild_min: *rebuild_min, rebuild_max: *rebuild_max })
            }
            AdminRequest::ScrubStart => self.check_scrub_start(),
            AdminRequest::ScrubPause => self.check_scrub_pause(),
            AdminRequest::ScrubStop => self.check_scrub_stop(),
            AdminRequest::Repair => self.check_repair(),
            AdminRequest::Clear { member } => self.check_clear(*member),
            AdminRequest::Stop => Ok(Plan::Stop),
        }
    }

    /// `to`: [`MemberState::Faulted`] or [`MemberState::Offline`].
    pub(super) fn check_take_out(
        &self,
        index: MemberIndex,
        to: MemberState,
    ) -> Result<Plan<'static>, AdminRefusal> {
        self.core.check_known(index)?;
        let member = self.core.member(index);
        let state = member.state;
        if member.device.is_none() {
            if state == to {
                return Err(AdminRefusal::OutAlready { member: index, state });
            }
            if self.core.is_failed() {
                return Err(AdminRefusal::NotRecorded { member: index, state });
            }
        }
        let online = self.core.online().len();
        if state == MemberState::Online && online <= self.core.map.k {
            return Err(AdminRefusal::Needed { member: index, online });
        }
        let waits = to == MemberState::Offline && self.may_lack(index);
        Ok(Plan::TakeOut { member: index, to, waits })
    }

    fn check_bring_in<'r>(&self, index: MemberIndex, new: &'r NewDevice) -> Result<Plan<'r>, AdminRefusal> {
        self.core.check_known(index)?;
        self.check_size(new)?;
        self.check_written()?;
        let superblock = new.superblock.as_deref();
        if let Some(why) = superblock.and_then(Superblock::unfit) {
            return Err(AdminRefusal::Unfit { member: index, why });
        }
        if let Some(claim) = superblock.and_then(|s| self.supers.unbelievable(s)) {
            return Err(AdminRefusal::Unbelievable { member: index, claim });
        }
        if let Some(found) = superblock.and_then(|s| self.other_lane(s)) {
            let expected = self.supers.template().part.lane;
            return Err(AdminRefusal::OtherLane { member: index, found, expected });
        }
        // Its superblock would be both that of a member and that of a device that was replaced.
        if self.core.roster.exchanged.iter().any(|replaced| replaced.uuid == new.uuid) {
            return Err(AdminRefusal::ReplacedJustNow);
        }
        let member = self.core.member(index);
        let state = member.state;
        if matches!(state, MemberState::Online | MemberState::Rebuilding) {
            return Err(AdminRefusal::InAlready { member: index, state });
        }
        if self.core.is_failed() {
            self.check_return_to_failed(index, new)?;
            return Ok(Plan::BringIn { member: index, device: new, entry: Entry::ToFailed });
        }
        if member.replacement.is_some() {
            return Err(AdminRefusal::BeingReplaced { array: self.name(), member: index });
        }
        if let Some(why) = superblock.and_then(|s| self.supers.apart(s)) {
            return Err(AdminRefusal::Kept { member: index, why });
        }
        // The device missed writes, or is blank: what it missed is built, or everything.
        let mark = superblock.and_then(|s| self.caught_up_from(index, s));
        let entry = mark.map_or(Entry::Rebuilt, Entry::CaughtUp);
        Ok(Plan::BringIn { member: index, device: new, entry })
    }

    /// The lane of a superblock of this array that lies in the window of another one.
    fn other_lane(&self, superblock: &Superblock) -> Option<LaneIndex> {
        let own = self.supers.template();
        (superblock.array == own.array && superblock.part != own.part).then_some(superblock.part.lane)
    }

    /// While the array has failed nothing is written, so a member that was in service when it failed is
    /// current.
    fn check_return_to_failed(&self, index: MemberIndex, new: &NewDevice) -> Result<(), AdminRefusal> {
        let mark = self.supers.mark();
        let own = new.superblock.as_deref().filter(|s| self.is_own_device(index, s));
        let Some(own) = own else {
            return Err(AdminRefusal::NotAsItLeft { member: index, why: None });
        };
        let is_as_it_left = is_current(own, 0, &mark);
        if self.core.roster.returnable.contains(index) {
            return is_as_it_left.map_err(|why| AdminRefusal::NotAsItLeft { member: index, why: Some(why) });
        }
        let first = self.core.returnable_now();
        if self.core.online().len() + first.len() >= self.core.map.k {
            return Err(AdminRefusal::OthersFirst { array: self.name(), member: index, first });
        }
        if is_as_it_left.is_ok() {
            let why = self.core.member(index).reason.clone();
            return Err(AdminRefusal::MayLackUnflushed { member: index, why });
        }
        Err(AdminRefusal::NotAsItLeft { member: index, why: None })
    }

    fn check_replace<'r>(&self, index: MemberIndex, new: &'r NewDevice) -> Result<Plan<'r>, AdminRefusal> {
        self.core.check_known(index)?;
        self.check_size(new)?;
        self.check_written()?;
        if self.core.is_failed() {
            return Err(AdminRefusal::NothingToBuildFrom);
        }
        if self.core.member(index).replacement.is_some() {
            return Err(AdminRefusal::BeingReplacedAlready { array: self.name(), member: index });
        }
        let stake = format!("{}{}", self.beside_others(index), self.at_stake(index));
        Ok(Plan::Replace { member: index, device: new, stake })
    }

    fn check_cancel(&self, index: MemberIndex, new: Option<Uuid>) -> Result<Plan<'static>, AdminRefusal> {
        self.core.check_known(index)?;
        let member = self.core.member(index);
        // Other lanes may have changed over, or this one has.
        let is_told =
            |new: &Replacement| self.supers.template().part.is_cut() && new.changeover == Changeover::AtOnce;
        let has_changed = member.state == MemberState::Online && Some(member.uuid) == new;
        let changes_over = has_changed || member.replacement.as_ref().is_some_and(is_told);
        match member {
            _ if changes_over && !is_off(Mutation::CancelledInSomeLanes) => {
                Err(AdminRefusal::ChangesOver { array: self.name(), member: index })
            }
            member if member.replacement.is_some() => Ok(Plan::CancelReplace { member: index }),
            member if member.state == MemberState::Rebuilding => {
                Err(AdminRefusal::NoOldDevice { member: index })
            }
            _ => Err(AdminRefusal::NotBeingReplaced { member: index }),
        }
    }

    fn check_scrub_start(&self) -> Result<Plan<'static>, AdminRefusal> {
        if self.core.is_failed() {
            return Err(AdminRefusal::NothingToScrub);
        }
        self.check_replayed()?;
        let state = self.scrub_state();
        if self.passes.scrub_is_running() {
            return Err(AdminRefusal::ScrubAlready { array: self.name(), state });
        }
        Ok(Plan::StartScrub(state))
    }

    /// The state of the scrub, or the one it would begin in if there is none.
    fn scrub_state(&self) -> ScrubState {
        match self.core.any_building() {
            _ if self.redo.is_settling() => ScrubState::ForLog,
            true => ScrubState::ForRebuild,
            false if self.passes_wait_for_room() => ScrubState::ForRoom,
            false => ScrubState::Running,
        }
    }

    fn check_scrub_pause(&self) -> Result<Plan<'static>, AdminRefusal> {
        if self.passes.scrub_is_paused() {
            return Err(AdminRefusal::ScrubPausedAlready { array: self.name() });
        }
        self.check_has_scrub()?;
        Ok(Plan::PauseScrub)
    }

    fn check_scrub_stop(&self) -> Result<Plan<'static>, AdminRefusal> {
        self.check_has_scrub()?;
        Ok(Plan::StopScrub)
    }

    /// Checks that there is a scrub, paused or not.
    fn check_has_scrub(&self) -> Result<(), AdminRefusal> {
        self.passes.has_scrub().then_some(()).ok_or(AdminRefusal::NoScrub)
    }

    fn check_repair(&self) -> Result<Plan<'static>, AdminRefusal> {
        if self.core.is_failed() {
            return Err(AdminRefusal::NothingToLookAt);
        }
        self.check_replayed()?;
        if !self.redo.is_serving() {
            return Err(AdminRefusal::NotServingYet);
        }
        match self.repair {
            Some(_) => Err(AdminRefusal::RepairAlready),
            None => Ok(Plan::Repair),
        }
    }

    fn check_clear(&self, member: Option<MemberIndex>) -> Result<Plan<'static>, AdminRefusal> {
        if let Some(member) = member {
            self.core.check_known(member)?;
        }
        Ok(Plan::Clear { member })
    }

    /// Checks that the new device has room for everything that every other member holds, and its tail
    /// superblocks behind that.
    fn check_size(&self, new: &NewDevice) -> Result<(), AdminRefusal> {
        let needed = self.supers.template().device_bytes_min();
        if new.bytes < needed {
            return Err(AdminRefusal::TooSmall { bytes: new.bytes, needed });
        }
        Ok(())
    }

    /// Refuses a build in an array that cannot be served.
    fn check_written(&self) -> Result<(), AdminRefusal> {
        if self.is_refused_unwritten() {
            return Err(AdminRefusal::NotServedUnwritten);
        }
        self.check_served()
    }

    /// Refuses a look at data in an array whose log cannot be replayed.
    fn check_replayed(&self) -> Result<(), AdminRefusal> {
        match self.redo.life() {
            // Nothing could bring back the content there.
            Life::Refused(reason)
                if self.core.roster.members.iter().all(|member| member.device.is_some()) =>
            {
                Err(AdminRefusal::NotServedWhole { array: self.name(), reason: reason.clone() })
            }
            _ => self.check_served(),
        }
    }

    /// Refuses to begin anything in an array whose log cannot be replayed.
    fn check_served(&self) -> Result<(), AdminRefusal> {
        match self.redo.life() {
            Life::Refused(reason) => {
                Err(AdminRefusal::NotServed { array: self.name(), reason: reason.clone() })
            }
            _ => Ok(()),
        }
    }

    fn name(&self) -> String {
        self.supers.template().name.clone()
    }
}

impl Core {
    fn check_known(&self, index: MemberIndex) -> Result<(), AdminRefusal> {
        let width = self.map.width();
        match usize::from(index.0) < width {
            true => Ok(()),
            false => Err(AdminRefusal::NoSuchMember { member: index, width }),
        }
    }
}
