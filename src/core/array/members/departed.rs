//! What members that are out of service held when they left. This decides whether one is caught up or built
//! anew.
//!
//! Per member: the last complete epoch in which it was current, and the sequence below which all batches of
//! the log were in place on it. The superblocks keep it ([`Left`]), as far as they have room. Must not know
//! of devices, logs or passes.

use crate::format::{Epoch, Left, MAX_LEFT, MAX_LEFT_UPDATES, MemberSet};
use crate::units::MemberIndex;

/// See the head of this file.
pub(in crate::array) struct Departed(Vec<Leaving>);

/// What a member that is out of service held when it left.
#[derive(Clone, Copy, Debug, Default)]
struct Leaving {
    /// The last complete epoch in which it was current, 0 for none.
    epoch: u64,
    /// The epoch before that, where the member left before `epoch` was on every member: its device may hold
    /// either, and nothing had been acknowledged in the later one. 0 for none.
    epoch_before: u64,
    /// The number of that epoch, 0 where it is not known.
    number: u64,
    /// Batches below were in place on it; none while the log that it left has not been read.
    tail: Option<u64>,
    /// The newest update of the superblocks that may have reached it, 0 where that is not known.
    update: u64,
    /// Its device was rolled back: nothing on it can be relied on.
    rolled_back: bool,
}

impl Departed {
    /// From the records in a superblock of this epoch, and the members whose devices were rolled back since.
    pub(super) fn new(left: &[Left], epoch: &Epoch, rolled_back: MemberSet) -> Departed {
        let leaving = |(at, left): (usize, &Left)| Leaving {
            epoch: left.epoch,
            epoch_before: 0,
            // Nothing was written in epochs between an epoch and its parent.
            number: if left.epoch == epoch.parent { epoch.number.saturating_sub(1) } else { 0 },
            tail: (left.epoch != 0).then_some(left.tail),
            update: left.update,
            rolled_back: rolled_back.contains(MemberIndex(at as u16)),
        };
        Departed(left.iter().enumerate().map(leaving).collect())
    }

    /// Records that a member leaves service. `tail`: batches below are in place on it, as far as that is
    /// known. `epoch_before`: the epoch before the present one, while that is not on every member; else 0.
    pub(super) fn leave(&mut self, member: MemberIndex, tail: Option<u64>, epoch_before: u64) {
        let left = &mut self.0[usize::from(member.0)];
        *left = Leaving { tail, epoch_before, update: left.update, ..Leaving::default() };
    }

    /// Records that a member's device was rolled back: it is never caught up.
    pub(in crate::array) fn roll_back(&mut self, member: MemberIndex) {
        let left = &mut self.0[usize::from(member.0)];
        *left = Leaving { rolled_back: true, update: left.update, ..Leaving::default() };
    }

    /// Sets the tail of members that left before the log was read: `tail` is its highest. Batches behind it
    /// are marked with an epoch in which these members do not live.
    pub(in crate::array) fn learn_tail(&mut self, tail: u64) {
        for left in self.0.iter_mut().filter(|left| left.epoch != 0) {
            left.tail = left.tail.or(Some(tail));
        }
    }

    /// What a member held when it left; none where it has to be rebuilt.
    pub(super) fn of(&self, member: MemberIndex) -> Option<Left> {
        let Leaving { epoch, tail, update, rolled_back, .. } = *self.0.get(usize::from(member.0))?;
        Some(Left { epoch, tail: tail?, update }).filter(|_| epoch != 0 && !rolled_back)
    }

    /// Whether a member that left may have held this epoch then.
    pub(super) fn may_have_held(&self, member: MemberIndex, epoch: u64) -> bool {
        let left = &self.0[usize::from(member.0)];
        left.epoch == epoch || (left.epoch_before != 0 && left.epoch_before == epoch)
    }

    /// The number of the last epoch in which a member was current; none where that is not known. `epoch`: the
    /// present one.
    pub(super) fn current_until(&self, member: MemberIndex, epoch: &Epoch) -> Option<u64> {
        let Leaving { number, rolled_back, .. } = *self.0.get(usize::from(member.0))?;
        let number = if epoch.live.contains(member) { epoch.number } else { number };
        (number != 0 && !rolled_back).then_some(number)
    }

    /// The present record of each member, whether or not a superblock has room for it.
    pub(super) fn all(&self) -> impl Iterator<Item = Left> + '_ {
        self.0.iter().map(|left| Left {
            epoch: left.epoch,
            tail: left.tail.unwrap_or(0),
            update: left.update,
        })
    }

    /// Records that an epoch begins after `before`, over the members that are online, with this update of the
    /// superblocks.
    pub(super) fn begin_epoch(&mut self, before: &Epoch, online: MemberSet, update: u64) {
        for (at, left) in self.0.iter_mut().enumerate() {
            let member = MemberIndex(at as u16);
            if online.contains(member) {
                *left = Leaving::default();
                continue;
            }
            if before.live.contains(member) {
                left.update = update;
            }
            if before.live.contains(member) && !left.rolled_back {
                // What it held of an earlier epoch no longer counts. A bump that was not complete when
                // another member left is made again, from the same epoch.
                let tail = left.tail.filter(|_| left.epoch == 0 || left.epoch == before.id);
                *left = Leaving { epoch: before.id, number: before.number, tail, ..*left };
            }
        }
    }

    /// Records that updates up to this one may reach a member that is out of service.
    pub(super) fn gets_updates(&mut self, member: MemberIndex, update: u64) {
        self.0[usize::from(member.0)].update = update;
    }

    /// The records in a superblock of an epoch with these live members about the others, as far as it has
    /// room.
    pub(super) fn records(&self, live: MemberSet) -> Vec<Left> {
        let mut records = vec![Left::default(); self.0.len()];
        let known = (0..self.0.len()).filter_map(|at| Some((at, self.of(MemberIndex(at as u16))?)));
        known.take(MAX_LEFT).for_each(|(at, left)| records[at] = Left { update: 0, ..left });
        let is_out = |at: &usize| self.0[*at].update != 0 && !live.contains(MemberIndex(*at as u16));
        let out = (0..self.0.len()).filter(is_out).take(MAX_LEFT_UPDATES);
        out.for_each(|at| records[at].update = self.0[at].update);
        records
    }
}
