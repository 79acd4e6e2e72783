//! What members that are out of service held when they left. This decides whether one is caught up or built
//! anew.
//!
//! Per member: the last complete epoch in which it was current, and for each lane the sequence below which
//! all batches of its log were in place on it. The superblocks keep it ([`Left`]), as far as they have room.
//! Must not know of devices, logs or passes.

use crate::format::{Epoch, Left, MAX_LEFT_UPDATES, MemberSet, left_max};
use crate::units::MemberIndex;

/// See the head of this file.
pub(in crate::array) struct Departed {
    members: Vec<Leaving>,
    lanes: u16,
}

/// What a member that is out of service held when it left.
#[derive(Clone, Debug, Default)]
struct Leaving {
    /// The last complete epoch in which it was current, 0 for none.
    epoch: u64,
    /// The epoch before that, where the member left before `epoch` was on every member: its device may hold
    /// either, and nothing had been acknowledged in the later one. 0 for none.
    epoch_before: u64,
    /// The number of that epoch, 0 where it is not known.
    number: u64,
    /// For each lane: batches below were in place on it; none while the logs that it left have not been read.
    tails: Option<Vec<u64>>,
    /// The newest update of the superblocks that may have reached it, 0 where that is not known.
    update: u64,
    /// Its device was rolled back: nothing on it can be relied on.
    rolled_back: bool,
}

impl Departed {
    /// From the records in a superblock of this epoch, and the members whose devices were rolled back since.
    pub(super) fn new(left: &[Left], lanes: u16, epoch: &Epoch, rolled_back: MemberSet) -> Departed {
        let leaving = |(at, left): (usize, &Left)| Leaving {
            epoch: left.epoch,
            epoch_before: 0,
            // Nothing was written in epochs between an epoch and its parent.
            number: if left.epoch == epoch.parent { epoch.number.saturating_sub(1) } else { 0 },
            tails: (left.epoch != 0).then(|| left.tails.clone()),
            update: left.update,
            rolled_back: rolled_back.contains(MemberIndex(at as u16)),
        };
        Departed { members: left.iter().enumerate().map(leaving).collect(), lanes }
    }

    /// Records that a member leaves service. `tails`: batches below are in place on it, lane by lane, as far
    /// as that is known. `epoch_before`: the epoch before the present one, while that is not on every member;
    /// else 0.
    pub(super) fn leave(&mut self, member: MemberIndex, tails: Option<Vec<u64>>, epoch_before: u64) {
        let left = &mut self.members[usize::from(member.0)];
        *left = Leaving { tails, epoch_before, update: left.update, ..Leaving::default() };
    }

    /// Records that a member's device was rolled back: it is never caught up.
    pub(in crate::array) fn roll_back(&mut self, member: MemberIndex) {
        let left = &mut self.members[usize::from(member.0)];
        *left = Leaving { rolled_back: true, update: left.update, ..Leaving::default() };
    }

    /// Sets the tails of members that left before the logs were read: `tails` are the highest, lane by lane.
    /// Batches behind them are marked with an epoch in which these members do not live.
    pub(in crate::array) fn learn_tails(&mut self, tails: &[u64]) {
        for left in self.members.iter_mut().filter(|left| left.epoch != 0) {
            left.tails.get_or_insert_with(|| tails.to_vec());
        }
    }

    /// What a member held when it left; none where it has to be rebuilt.
    pub(super) fn of(&self, member: MemberIndex) -> Option<Left> {
        let Leaving { epoch, ref tails, update, rolled_back, .. } =
            *self.members.get(usize::from(member.0))?;
        let tails = tails.as_ref().filter(|_| epoch != 0 && !rolled_back)?;
        Some(Left { epoch, tails: tails.clone(), update })
    }

    /// Whether a member that left may have held this epoch then.
    pub(super) fn may_have_held(&self, member: MemberIndex, epoch: u64) -> bool {
        let left = &self.members[usize::from(member.0)];
        left.epoch == epoch || (left.epoch_before != 0 && left.epoch_before == epoch)
    }

    /// The number of the last epoch in which a member was current; none where that is not known. `epoch`: the
    /// present one.
    pub(super) fn current_until(&self, member: MemberIndex, epoch: &Epoch) -> Option<u64> {
        let Leaving { number, rolled_back, .. } = *self.members.get(usize::from(member.0))?;
        let number = if epoch.live.contains(member) { epoch.number } else { number };
        (number != 0 && !rolled_back).then_some(number)
    }

    /// The present record of each member, whether or not a superblock has room for it.
    pub(super) fn all(&self) -> impl Iterator<Item = Left> + '_ {
        self.members.iter().map(|left| Left {
            epoch: left.epoch,
            tails: left.tails.clone().unwrap_or_else(|| vec![0; usize::from(self.lanes)]),
            update: left.update,
        })
    }

    /// Records that an epoch begins after `before`, over the members that are online, with this update of the
    /// superblocks.
    pub(super) fn begin_epoch(&mut self, before: &Epoch, online: MemberSet, update: u64) {
        for (at, left) in self.members.iter_mut().enumerate() {
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
                let is_its_own = left.epoch == 0 || left.epoch == before.id;
                let tails = left.tails.take().filter(|_| is_its_own);
                *left = Leaving { epoch: before.id, number: before.number, tails, ..*left };
            }
        }
    }

    /// Records that updates up to this one may reach a member that is out of service.
    pub(super) fn gets_updates(&mut self, member: MemberIndex, update: u64) {
        self.members[usize::from(member.0)].update = update;
    }

    /// The records in a superblock of an epoch with these live members about the others, as far as it has
    /// room.
    pub(super) fn records(&self, live: MemberSet) -> Vec<Left> {
        let mut records = vec![Left::default(); self.members.len()];
        let known = (0..self.members.len()).filter_map(|at| Some((at, self.of(MemberIndex(at as u16))?)));
        known.take(left_max(self.lanes)).for_each(|(at, left)| records[at] = Left { update: 0, ..left });
        let is_out = |at: &usize| self.members[*at].update != 0 && !live.contains(MemberIndex(*at as u16));
        let out = (0..self.members.len()).filter(is_out).take(MAX_LEFT_UPDATES);
        out.for_each(|at| records[at].update = self.members[at].update);
        records
    }
}
