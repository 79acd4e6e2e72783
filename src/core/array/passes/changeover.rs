//! How a device that is built takes its place: that of a member that was missing, or that of the old device
//! beside which it was built.
//!
//! In an array that is one lane of several, a device that was built beside the old one is *held* when it is
//! complete: writes go to both, as during the build, until the driver of the lanes says that all of them
//! have built theirs, or that another lane is without it ([`ReplacementOrder`]). If the old device leaves,
//! the new one takes its place at once. Must not know of other lanes.

use crate::array::base::members::{Changeover, Replaced, Which};
use crate::array::{Array, Core, NoticeKind, NoticeLevel, ReplacementOrder, ReplacementStep};
use crate::format::MemberState;
use crate::units::{MemberIndex, Timestamp};

impl Array {
    /// Takes an order about a replacement. It is void if that device is not being built here, or is the
    /// member's already.
    pub fn order_replacement(&mut self, now: Timestamp, order: &ReplacementOrder) {
        self.core.now = now;
        let index = order.member;
        let has_old = self.core.member(index).state == MemberState::Online;
        let new = self.core.member_mut(index).replacement.as_mut().filter(|new| new.uuid == order.device);
        match (new, &order.step) {
            (None, _) => {}
            (Some(new), ReplacementStep::ChangeOver) => new.changeover = Changeover::AtOnce,
            (Some(new), ReplacementStep::Stay) => new.stays = true,
            (Some(new), ReplacementStep::GoOn) => new.stays = false,
            (Some(_), ReplacementStep::GiveUp(reason)) if has_old => self.drop_replacement(index, reason),
            // The old device has left meanwhile: there is no other one.
            (Some(_), ReplacementStep::GiveUp(_)) => {}
        }
    }

    /// Has the devices of a member that are complete take their places, as far as they may.
    pub(super) fn end_finished_builds(&mut self, index: MemberIndex) {
        let slots = self.core.map.slots;
        // Only a device that a restart would find may count as the member.
        let member = self.core.member(index);
        let recorded = member.device.is_some_and(|device| device.recorded);
        let built = recorded && member.progress.as_ref().is_some_and(|p| p.is_over(slots));
        let new_built =
            member.replacement.as_ref().is_some_and(|r| r.device.recorded && r.progress.is_over(slots));
        if !built && !new_built {
            self.looks.forget_with(&mut self.damage, &self.core, index);
        }
        if built
            && self.looks.has_looked_with(&mut self.damage, &self.core, index)
            && self.may_join(index, Which::Primary)
        {
            self.join(index);
        }
        let complete = new_built
            && self.looks.has_looked_with(&mut self.damage, &self.core, index)
            && self.has_built_pages(index, Which::Replacement);
        if !self.holds(index, complete) && complete && self.may_join(index, Which::Replacement) {
            self.change_over(index);
        }
    }

    /// Whether the replacement of a member must not take its place, although it may be `complete`.
    fn holds(&mut self, index: MemberIndex, complete: bool) -> bool {
        let member = self.core.member_mut(index);
        let holds = member.holds_replacement();
        let Some(new) = &mut member.replacement else { return false };
        let stays = new.stays;
        match (new.changeover, complete && holds) {
            (Changeover::WhenTold, true) => {
                new.changeover = Changeover::Held;
                // A restart then finds that nothing of it is left to build.
                self.supers.want();
                let text = format!(
                    "the new device of member {index} is complete in one lane of the array, and takes its place when it is in \
                     all of them; the old device serves until then"
                );
                self.core.notice(NoticeKind::ReplacementWaits, NoticeLevel::Info, Some(index), text);
            }
            // Some of it is being built once more.
            (Changeover::Held, false) => new.changeover = Changeover::WhenTold,
            _ => {}
        }
        holds || stays
    }

    /// A member that was missing is in service again.
    fn join(&mut self, index: MemberIndex) {
        self.looks.forget_with(&mut self.damage, &self.core, index);
        self.damage.tell_lacking(&mut self.core, index, Which::Primary);
        self.take_in(index, Which::Primary);
    }

    /// The new device of a member takes the place of the old one.
    fn change_over(&mut self, index: MemberIndex) {
        self.damage.tell_lacking(&mut self.core, index, Which::Replacement);
        let member = self.core.member_mut(index);
        let Some(replacement) = member.replacement.take() else { return };
        let old = member.device.replace(replacement.device);
        self.looks.forget_with(&mut self.damage, &self.core, index);
        self.bad.forget(index);
        let member = self.core.member_mut(index);
        let uuid = std::mem::replace(&mut member.uuid, replacement.uuid);
        member.counters = Default::default();
        // The old device stays until the exchange is on disk: until then a restart would look for it.
        self.core.roster.exchanged.extend(old.map(|device| Replaced { member: index, uuid, device }));
        self.take_in(index, Which::Replacement);
    }

    /// The device of a member is complete and in service; it was built as this one.
    fn take_in(&mut self, index: MemberIndex, built_as: Which) {
        let member = self.core.member_mut(index);
        let was = std::mem::replace(&mut member.state, MemberState::Online);
        member.progress = None;
        member.reason = None;
        self.core.count_members();
        self.ask_log();
        self.pages.joined(index, built_as, self.core.now);
        // No batch may be written before the epoch with this device is complete: an old one must not count as
        // current once it misses a write.
        self.supers.note_join();
        let (kind, how) = match built_as {
            Which::Primary => (NoticeKind::MemberRebuilt, "rebuilt"),
            Which::Replacement => (NoticeKind::MemberReplaced, "replaced"),
        };
        let text = format!("member {index} is {how} and online");
        self.core.notice(kind, NoticeLevel::Info, Some(index), text);
        // Where its old device was in service, the member was not missing.
        if was != MemberState::Online {
            self.core.notice_if_whole();
        }
    }
}

impl Core {
    /// Whether everything that is being built is complete, and waits for other lanes.
    pub(super) fn all_builds_are_held(&self) -> bool {
        let mut members = self.roster.members.iter();
        members.all(|member| match member.replacement {
            Some(_) => member.has_held_replacement(),
            None => member.progress.is_none(),
        })
    }
}
