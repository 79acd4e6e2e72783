//! The expected outcome of an administrator's request, in words; and words that a dry run and the request
//! itself share.
//!
//! Invariant: nothing here changes or judges anything; `check.rs` decides what is refused.

use crate::array::base::members::Member;
use crate::array::log::life::Life;
use crate::array::members::check::{Entry, Plan};
use crate::array::members::waiting::{DEPARTURE_PATIENCE_NS, PAUSED_UNRECORDED};
use crate::array::refusal::{AdminRefusal, ScrubState};
use crate::array::{AdminOutcome, AdminRequest, Array, Core, STOPPED_CLEANLY, Stopping};
use crate::format::MemberState;
use crate::units::{Count, HumanSize, MemberIndex};

pub(super) const PAUSED: &str = "the scrub is paused";
pub(super) const SCRUB_STOPPED: &str = "the scrub is stopped";
pub(super) const PACE_CHANGED: &str = "the pace of rebuild and scrub is changed";

impl Array {
    /// Tells what a request would do, and changes nothing.
    ///
    /// # Errors
    /// With the reason for which it would be refused.
    pub fn would(&self, request: &AdminRequest) -> Result<AdminOutcome, AdminRefusal> {
        self.check(request).map(|plan| AdminOutcome(self.outlook(&plan)))
    }

    fn outlook(&self, plan: &Plan<'_>) -> String {
        match plan {
            Plan::TakeOut { member, to, waits } => self.outlook_without(*member, *to, *waits),
            Plan::BringIn { member, entry, .. } => self.outlook_with(*member, *entry),
            Plan::Replace { member, stake, .. } => match self.core.member(*member).state {
                MemberState::Online => format!(
                    "member {member} is replaced; the old device serves until the new one is complete{stake}"
                ),
                _ => format!(
                    "member {member} is REBUILDING onto the new device, {}{stake}",
                    self.after(1, None)
                ),
            },
            Plan::CancelReplace { member } => {
                format!("the replacement of member {member} is cancelled; {}", self.core.without_it(*member))
            }
            Plan::Pace { .. } => PACE_CHANGED.into(),
            Plan::StartScrub(state) => words_of_scrub(*state).into(),
            // Nothing can be recorded before its members are back.
            Plan::PauseScrub if self.core.is_failed() => PAUSED_UNRECORDED.into(),
            Plan::PauseScrub => PAUSED.into(),
            Plan::StopScrub => SCRUB_STOPPED.into(),
            Plan::Repair => "what is set aside or lost is looked at again".into(),
            Plan::Clear { member } => words_of_clear(*member),
            Plan::Stop => self.outlook_of_stop().into(),
        }
    }

    fn outlook_without(&self, index: MemberIndex, to: MemberState, waits: bool) -> String {
        let is_online = self.core.member(index).state == MemberState::Online;
        let after = self.after(if is_online { -1 } else { 0 }, Some(index));
        let text = format!("member {index} is {}, {after}", to.as_str());
        match waits {
            true => format!(
                "what was written last is put in place on its device, which is waited for up to {} s; then {text}",
                DEPARTURE_PATIENCE_NS / 1_000_000_000
            ),
            false => text,
        }
    }

    fn outlook_with(&self, index: MemberIndex, entry: Entry) -> String {
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

    fn outlook_of_stop(&self) -> &'static str {
        if self.core.is_failed() || self.log_is_refused() {
            return self.words_for_stop(true);
        }
        // Unless there is room in time.
        if self.redo.is_unsettled() || self.stops_short() {
            return self.words_for_stop(false);
        }
        STOPPED_CLEANLY
    }

    /// The state of the array when this many more members are online, `without` one that leaves.
    fn after(&self, more: isize, without: Option<MemberIndex>) -> String {
        self.with_online(more, |left| self.but_beside(left, without))
    }

    /// The state of the array when a member has come back with its last device.
    fn after_return(&self, member: MemberIndex) -> String {
        self.with_online(1, |left| self.but_where(left, &self.damage.lacking_with(&self.core, member), None))
    }

    /// The exception, in words, for rows with bad blocks on members other than this one, where the array
    /// otherwise survives `left` more losses.
    pub(in crate::array) fn but_beside(&self, left: usize, without: Option<MemberIndex>) -> String {
        self.but_where(left, &self.damage.lacking_beside(&self.core, without), without)
    }

    /// As [`Array::but_beside`], where these members lack blocks of slots.
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
        // If not all bad blocks of a member are listed, any row may be bad.
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

    /// Errors that the last scrub has not repaired, if any. After a restart it is not known which blocks they
    /// are in.
    fn unrepaired(&self) -> Option<u64> {
        let last = self.passes.last_scrub()?;
        Some(last.errors.saturating_sub(last.repaired)).filter(|errors| *errors > 0)
    }

    /// The state of the array when this many more members are online; `but` gives the exception for parts of
    /// it, by the number of losses that are survived otherwise.
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

    /// How a new build for a member affects those under way: the progress shown is that of the build that is
    /// least far, and only one device at a time is built for a member that has none in service.
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

    /// What may be lost when another device takes the place of a member's own: blocks that no other device
    /// can give.
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

    /// The state in which a stop that ends now leaves the array.
    pub(super) fn words_for_stop(&self, is_recorded: bool) -> &'static str {
        let is_marked =
            !self.supers.is_dirty() && !matches!(self.core.stop.stopping, Some(Stopping::Marking(_)));
        match self.redo.life() {
            // The members of an array that was idle have the mark already.
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
    /// The state of a member without the replacement that is being built.
    pub(super) fn without_it(&self, index: MemberIndex) -> String {
        match self.member(index).state {
            MemberState::Online => "the old device stays in service".into(),
            state => format!("member {index} stays {}", state.as_str()),
        }
    }
}

/// What a scrub that begins, or goes on, will do now.
pub(super) fn words_of_scrub(state: ScrubState) -> &'static str {
    match state {
        ScrubState::ForLog => {
            "the scrub waits until what the redo log holds is in place, and runs then: make room"
        }
        ScrubState::ForRebuild => "the scrub waits for the rebuild, and runs then",
        ScrubState::ForRoom => {
            "the scrub waits for room on a member that is full, and goes on then: make room"
        }
        ScrubState::Running => "the scrub is running",
    }
}

/// The answer when counts are cleared: of a member, or of all members and the array.
pub(super) fn words_of_clear(member: Option<MemberIndex>) -> String {
    match member {
        Some(member) => format!("the counts of member {member} are cleared"),
        None => "the counts of the array and of its members are cleared".into(),
    }
}
