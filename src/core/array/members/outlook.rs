//! What an administrator's request would come to: the checks that the request itself makes, and the
//! consequence in words. So that a dry run never promises what is then refused.
//!
//! Invariant: nothing here changes anything. What `admin.rs` does begins with these checks.

use crate::array::Core;
use crate::array::base::members::Member;
use crate::array::log::life::Life;
use crate::array::members::admin::Entry;
use crate::array::members::waiting::{DEPARTURE_PATIENCE_NS, PAUSED_UNRECORDED};
use crate::array::{AdminError, AdminOutcome, AdminRequest, Array, NewDevice, STOPPED_CLEANLY};
use crate::format::{MemberState, Superblock};
use crate::units::{Count, HumanSize, MemberIndex};

impl Array {
    /// Whether a request would be refused, and what it would do.
    ///
    /// # Errors
    /// Why it would be refused.
    pub fn check(&self, request: &AdminRequest) -> Result<AdminOutcome, AdminError> {
        if self.core.stop.stopping.is_some() {
            return Err(AdminError("the array is stopping".into()));
        }
        let text = match request {
            AdminRequest::Fail { member } => self.check_take_out(*member, MemberState::Faulted),
            AdminRequest::Offline { member } => {
                self.check_take_out(*member, MemberState::Offline).map(|text| match self.may_lack(*member) {
                    true => format!(
                        "what was written last is put in place on its device, which is waited for up to {} s; then {text}",
                        DEPARTURE_PATIENCE_NS / 1_000_000_000
                    ),
                    false => text,
                })
            }
            AdminRequest::Online { member, device } => {
                self.check_bring_in(*member, device).map(|entry| self.words_for(*member, entry))
            }
            AdminRequest::Replace { member, device } => {
                self.check_replace(*member, device).map(|()| match self.core.member(*member).state {
                    MemberState::Online => format!(
                        "member {member} is replaced; the old device serves until the new one is complete{}{}",
                        self.beside_others(*member),
                        self.at_stake(*member)
                    ),
                    _ => format!(
                        "member {member} is REBUILDING onto the new device, {}{}{}",
                        self.after(1, None),
                        self.beside_others(*member),
                        self.at_stake(*member)
                    ),
                })
            }
            AdminRequest::CancelReplace { member } => self.core.check_cancel(*member).map(|()| {
                format!("the replacement of member {member} is cancelled; {}", self.core.without_it(*member))
            }),
            AdminRequest::ScrubStart => self.check_scrub_start().map(|()| self.words_for_scrub().into()),
            AdminRequest::ScrubPause => self.check_scrub(true).map(|()| match self.core.is_failed() {
                // Nothing can be recorded before its members are back.
                true => PAUSED_UNRECORDED.into(),
                false => "the scrub is paused".into(),
            }),
            AdminRequest::ScrubStop => self.check_scrub(false).map(|()| "the scrub is stopped".into()),
            AdminRequest::Repair => {
                self.check_repair().map(|()| "what is set aside or lost is looked at again".into())
            }
            AdminRequest::Clear { member: Some(member) } => {
                self.core.known(*member).map(|()| format!("the counts of member {member} are cleared"))
            }
            AdminRequest::Clear { member: None } => {
                Ok("the counts of the array and of its members are cleared".into())
            }
            AdminRequest::Pace { .. } => Ok("the pace of rebuild and scrub is changed".into()),
            AdminRequest::Stop if self.core.is_failed() || self.log_is_refused() => {
                Ok(self.words_for_stop(true).into())
            }
            // Unless there is room in time.
            AdminRequest::Stop if self.redo.is_unsettled() || self.stops_short() => {
                Ok(self.words_for_stop(false).into())
            }
            AdminRequest::Stop => Ok(STOPPED_CLEANLY.into()),
        };
        text.map(AdminOutcome).map_err(AdminError)
    }

    /// What the array is when this many more members are online, `without` one that leaves.
    fn after(&self, more: isize, without: Option<MemberIndex>) -> String {
        self.with_online(more, |left| self.but_beside(left, without))
    }

    /// What the array is when a member has come back with the device that it had last.
    fn after_return(&self, member: MemberIndex) -> String {
        self.with_online(1, |left| self.but_where(left, &self.damage.lacking_with(&self.core, member), None))
    }

    /// What is not true of rows of which members other than this one have bad blocks or none, where
    /// `left` more losses are survived otherwise.
    pub(in crate::array) fn but_beside(&self, left: usize, without: Option<MemberIndex>) -> String {
        self.but_where(left, &self.damage.lacking_beside(&self.core, without), without)
    }

    /// The same where these members lack blocks of slots.
    fn but_where(&self, left: usize, lacking: &[MemberIndex], without: Option<MemberIndex>) -> String {
        let without = without.unwrap_or(MemberIndex(u16::MAX));
        let (blocks, unlisted) = (self.bad.blocks(without), self.bad.unlisted(without));
        let bad = blocks.values().max().unwrap_or(&0) + unlisted;
        let mut text = self.damage.but_lacking(&self.core, left, lacking);
        if bad > 0 {
            let what = format!("; but rows have up to {}", Count(bad as u64, "bad block"));
            text += &match left.checked_sub(bad) {
                Some(left) => format!("{what}, and such a row survives only {left} more"),
                None => format!("{what}, and such a row may then be unreadable"),
            };
        }
        if bad == 0
            && let Some(unrepaired) = self.unrepaired()
        {
            let what = if left == 0 { "may then be unreadable" } else { "survives fewer" };
            text += &format!(
                "; but the last scrub has left {} unrepaired, and what is bad still {what}",
                Count(unrepaired, "error")
            );
        }
        // Of a member of which not all bad blocks are listed, any row may be bad.
        let unlisted = if unlisted > 0 { unlisted + lacking.len() } else { 0 };
        let listed = blocks.into_iter().map(|(block, bad)| {
            let others = lacking.iter().copied().filter(|&member| !self.bad.has(member, block));
            bad + self.damage.lacking_slot(
                &self.core,
                &others.collect::<Vec<_>>(),
                self.core.slot_of_block(block),
            )
        });
        let both = listed.max().unwrap_or(0).max(unlisted);
        let alone = bad.max(lacking.len());
        if bad == 0 || lacking.is_empty() || both <= alone || alone > left {
            return text;
        }
        text + &match left.checked_sub(both) {
            Some(left) => format!("; where both meet, rows may survive only {left} more"),
            None => "; where both meet, rows may then be unreadable".into(),
        }
    }

    /// Errors that the last scrub has not repaired, if there are any. Which blocks they are of is
    /// not known any more after a restart.
    fn unrepaired(&self) -> Option<u64> {
        let last = self.passes.last_scrub()?;
        Some(last.errors.saturating_sub(last.repaired)).filter(|errors| *errors > 0)
    }

    /// What the array is when this many more members are online; `but` says what is not true of
    /// parts of it where so many losses are survived otherwise.
    fn with_online(&self, more: isize, but: impl Fn(usize) -> String) -> String {
        if self.log_is_refused() {
            return "and the array stays FAILED: its redo log cannot be replayed".into();
        }
        let online = self.core.online().len().saturating_add_signed(more);
        match online.checked_sub(self.core.map.k) {
            None => "and the array is FAILED".into(),
            Some(left) if online == self.core.map.width() => format!("then the array is ONLINE{}", but(left)),
            Some(left) => format!("then the array is DEGRADED and survives {left} more{}", but(left)),
        }
    }

    pub(super) fn check_take_out(&self, index: MemberIndex, to: MemberState) -> Result<String, String> {
        self.core.known(index)?;
        let member = self.core.member(index);
        if member.device.is_none() {
            if member.state == to {
                return Err(format!("member {index} is {} already", to.as_str()));
            }
            if self.core.is_failed() {
                return Err(format!(
                    "member {index} is {} already, and the array has FAILED: nothing can be recorded before its members are back",
                    member.state.as_str()
                ));
            }
        }
        let is_online = member.state == MemberState::Online;
        if is_online && self.core.online().len() <= self.core.map.k {
            let online = match self.core.online().len() {
                1 => "1 member is".to_owned(),
                many => format!("{many} members are"),
            };
            return Err(format!(
                "member {index} is needed: {online} online, and with fewer the array could not serve its data"
            ));
        }
        let after = self.after(if is_online { -1 } else { 0 }, Some(index));
        Ok(format!("member {index} is {}, {after}", to.as_str()))
    }

    /// What a build for a member that begins means for those under way: the progress that is shown is that of the one that is
    /// least far, and one device at a time is built for a member that has none in service.
    pub(super) fn beside_others(&self, index: MemberIndex) -> String {
        let is_building = |member: &&Member| member.progress.is_some() || member.replacement.is_some();
        let own = usize::from(self.core.member(index).state == MemberState::Rebuilding);
        let beside = match (own, self.core.roster.members.iter().filter(is_building).count() - own) {
            (0, 0) => "",
            (0, _) => "; the progress shown begins again, as what is being built already goes on beside it",
            (_, 0) => "; the device that was being built for it is given up, and the rebuild begins again",
            _ => {
                "; the device that was being built for it is given up, and the progress shown begins again, as what is being built \
                 for others goes on beside it"
            }
        };
        format!("{beside}{}", self.redo.after_settling())
    }

    /// What may be lost when another device takes the place of a member's own: blocks that nobody
    /// can give without that.
    pub(super) fn at_stake(&self, index: MemberIndex) -> String {
        let member = self.core.member(index);
        let is_own = |progress: &crate::array::base::members::Progress| progress.since.is_some();
        let ranges = match member.state {
            MemberState::Rebuilding if !member.progress.as_ref().is_some_and(is_own) => return String::new(),
            MemberState::Online => self.ranges_on(index),
            _ => self.ranges_that_need(index),
        };
        let bytes = ranges.iter().map(|(_, bytes)| bytes).sum();
        if bytes == 0 {
            return String::new();
        }
        let name = &self.supers.template().name;
        let first = match member.state {
            MemberState::Online => {
                format!(
                    "Mend what makes its reads fail first; 'calpe repair {name}' tells whether that is done"
                )
            }
            MemberState::Rebuilding => {
                format!("It is being caught up: wait for that first, with 'calpe wait {name}'")
            }
            _ => format!(
                "If it can come back, bring that device back first, with 'calpe online {name} {index}'"
            ),
        };
        format!(
            "; {} of the volume cannot be read, and its own device may be the only one that can give them: with another they may be \
             beyond repair. {first}",
            HumanSize(bytes)
        )
    }

    fn words_for(&self, index: MemberIndex, entry: Entry) -> String {
        match entry {
            Entry::ToFailed => format!("member {index} is ONLINE, {}", self.after_return(index)),
            Entry::CaughtUp(_) => {
                let (after, wait) = (self.after_return(index), self.redo.after_settling());
                format!("member {index} is caught up with what it missed, {after}{wait}")
            }
            Entry::Rebuilt => {
                format!("member {index} is rebuilt, {}{}", self.after(1, None), self.redo.after_settling())
            }
        }
    }

    /// How a device would come in for a member that is out.
    pub(super) fn check_bring_in(&self, index: MemberIndex, new: &NewDevice) -> Result<Entry, String> {
        self.core.known(index)?;
        self.check_size(new)?;
        self.check_written()?;
        if let Some(why) = new.superblock.as_deref().and_then(Superblock::unfit) {
            return Err(format!("member {index} cannot come back: {why}; 'calpe replace' builds it anew"));
        }
        if let Some(why) = new.superblock.as_deref().and_then(|s| self.supers.unbelievable(s)) {
            return Err(format!("member {index} cannot come back: {why}; 'calpe replace' builds it anew"));
        }
        // Its superblock would be both that of a member and that of a device that was replaced.
        if self.core.roster.exchanged.iter().any(|replaced| replaced.uuid == new.uuid) {
            return Err(
                "this device was replaced just now, and that is still being recorded: try again".into()
            );
        }
        let state = self.core.member(index).state;
        if matches!(state, MemberState::Online | MemberState::Rebuilding) {
            return Err(format!(
                "member {index} is {} already; use 'calpe replace' for another device",
                state.as_str()
            ));
        }
        if self.core.is_failed() {
            return self.check_return_to_failed(index, new).map(|()| Entry::ToFailed);
        }
        if self.core.member(index).replacement.is_some() {
            let name = &self.supers.template().name;
            return Err(format!(
                "a replacement of member {index} is being built: wait until it is complete, or give it up with \
                 'calpe replace --cancel {name} {index}'"
            ));
        }
        if let Some(why) = new.superblock.as_deref().and_then(|s| self.supers.apart(s)) {
            return Err(format!("member {index} cannot come back: {why}"));
        }
        // It missed writes, or is blank: what it missed is built, or all of it.
        let mark = new.superblock.as_deref().and_then(|s| self.caught_up_from(index, s));
        Ok(mark.map_or(Entry::Rebuilt, Entry::CaughtUp))
    }

    pub(super) fn check_replace(&self, index: MemberIndex, new: &NewDevice) -> Result<(), String> {
        self.core.known(index)?;
        self.check_size(new)?;
        self.check_written()?;
        if self.core.is_failed() {
            return Err("the array has FAILED; bring its members back before replacing one".into());
        }
        if self.core.member(index).replacement.is_some() {
            let name = &self.supers.template().name;
            return Err(format!(
                "a replacement of member {index} is being built already: wait until it is complete, or give it up with \
                 'calpe replace --cancel {name} {index}'"
            ));
        }
        Ok(())
    }

    /// Nothing is looked at in an array whose log cannot be replayed.
    fn check_replayed(&self) -> Result<(), String> {
        match self.redo.life() {
            // Nobody can bring back what is there.
            Life::Refused(reason)
                if self.core.roster.members.iter().all(|member| member.device.is_some()) =>
            {
                let name = &self.supers.template().name;
                Err(format!(
                    "the array cannot be served: {reason}. 'calpe status {name}' says what can be done"
                ))
            }
            _ => self.check_served(),
        }
    }

    pub(super) fn check_scrub_start(&self) -> Result<(), String> {
        if self.core.is_failed() {
            return Err("the array has FAILED; there is nothing to scrub".into());
        }
        self.check_replayed()?;
        if !self.passes.scrub_is_running() {
            return Ok(());
        }
        let name = &self.supers.template().name;
        let (state, room) = match self.redo.is_settling() {
            true => ("waits until what the redo log holds is in place", "make room; "),
            false if self.core.any_building() => ("waits for a rebuild", ""),
            false if self.passes_wait_for_room() => {
                ("waits for room on a member that is full", "make room; ")
            }
            false => ("is running", ""),
        };
        Err(format!("a scrub {state} already: {room}'calpe wait {name} -t scrub' waits for its end"))
    }

    /// What a scrub does that begins, or goes on, now.
    pub(super) fn words_for_scrub(&self) -> &'static str {
        match self.core.any_building() {
            _ if self.redo.is_settling() => {
                "the scrub waits until what the redo log holds is in place, and runs then: make room"
            }
            true => "the scrub waits for the rebuild, and runs then",
            _ if self.passes_wait_for_room() => {
                "the scrub waits for room on a member that is full, and goes on then: make room"
            }
            false => "the scrub is running",
        }
    }

    /// Whether there is a scrub to be paused, or to be stopped.
    pub(super) fn check_scrub(&self, to_pause: bool) -> Result<(), String> {
        match self.passes.has_scrub() {
            true if to_pause && self.passes.scrub_is_paused() => {
                let name = &self.supers.template().name;
                Err(format!("the scrub is paused already: 'calpe scrub {name}' goes on with it"))
            }
            true => Ok(()),
            false => Err("no scrub is running".into()),
        }
    }

    pub(in crate::array) fn check_repair(&self) -> Result<(), String> {
        if self.core.is_failed() {
            return Err("the array has FAILED; there is nothing to look at".into());
        }
        self.check_replayed()?;
        if !self.redo.is_serving() {
            return Err(
                "the array does not serve yet, its redo log is being replayed: try again when that is done"
                    .into(),
            );
        }
        match self.repair {
            Some(_) => Err("a repair is running already".into()),
            None => Ok(()),
        }
    }
}

impl Core {
    /// What a member is without the replacement that is being built.
    pub(super) fn without_it(&self, index: MemberIndex) -> String {
        match self.member(index).state {
            MemberState::Online => "the old device stays in service".into(),
            state => format!("member {index} stays {}", state.as_str()),
        }
    }

    pub(super) fn check_cancel(&self, index: MemberIndex) -> Result<(), String> {
        self.known(index)?;
        match self.member(index) {
            member if member.replacement.is_some() => Ok(()),
            member if member.state == MemberState::Rebuilding => Err(format!(
                "member {index} is REBUILDING and there is no old device that could stay instead: 'calpe offline' or 'calpe fail' \
                 ends the rebuild"
            )),
            _ => Err(format!("member {index} is not being replaced")),
        }
    }
}
