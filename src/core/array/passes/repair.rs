//! `calpe repair`: looks again at every block that is set aside or called lost, on disk or in the list of
//! damage, and reports which are truly gone. And `calpe clear`: clears counts, and forgets errors that no bad
//! place shows any more.
//!
//! The walk reads the hashes of every stripe that holds data, without locks, and starts an operation with
//! locks for each block that it finds. The results come back through the list of damage. Damage that no hash
//! records is left to a scrub, which reads everything. Must not know how a block is decoded.

use crate::array::blocks::{BlockName, Why};
use crate::array::pages::hold::{PageHold, PagesHeld};
use crate::array::{Activity, ActivityKind, Array, Flow, NoticeKind, NoticeLevel, Op};
use crate::units::{BlockHash, ColumnIndex, Count, MemberIndex, ROW_BYTES, SlotIndex, StripeIndex};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// See the head of this file.
pub(in crate::array) struct Repair {
    /// The next slot of the walk.
    next: u64,
    hold: Option<PageHold>,
    /// Blocks found and not yet looked at.
    found: VecDeque<(BlockName, bool)>,
    /// Blocks in the list of damage, including those added meanwhile: the walk skips them.
    listed: BTreeSet<BlockName>,
    /// Rows that are already counted as undecodable.
    bad_rows: BTreeSet<(StripeIndex, u32)>,
    /// Unlisted blocks that were found in the current slot.
    of_slot: BTreeSet<BlockName>,
    /// Blocks that are being looked at.
    waiting: Vec<BlockName>,
    tally: Tally,
    life: u64,
}

/// Results for the blocks of the volume that were looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tally {
    readable: u64,
    set_aside: u64,
    unreadable: u64,
    lost: u64,
    /// Blocks of parity that cannot be had.
    parity: u64,
}

impl Tally {
    /// Blocks that cannot be had.
    fn bad(&self) -> u64 {
        self.set_aside + self.unreadable + self.lost + self.parity
    }
}

/// How far the repair under way is.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::array) struct RepairProgress {
    next: u64,
    errors: u64,
    repaired: u64,
}

/// Blocks that are looked at together.
const LOOKS_AT_ONCE: usize = 64;

impl Array {
    /// Starts a repair. A notice reports its end.
    pub(in crate::array) fn start_repair(&mut self) -> String {
        let found: VecDeque<(BlockName, bool)> =
            self.damage.iter().map(|(block, why)| (block, why.is_aside())).collect();
        let of_volume = found.iter().filter(|((_, column, _), _)| usize::from(*column) < self.core.map.k);
        let text = match of_volume.count() {
            0 => "looks for blocks that are set aside or lost".into(),
            known => format!(
                "looks again at {}, and searches for others that are set aside or lost",
                Count::of(known, "block")
            ),
        };
        self.repair = Some(RepairProgress::default());
        let life = self.redo.lives();
        let listed = found.iter().map(|(block, _)| *block).collect();
        let (bad_rows, of_slot) = (BTreeSet::new(), BTreeSet::new());
        let (waiting, tally) = (Vec::new(), Tally::default());
        let op = Repair { next: 0, hold: None, found, listed, bad_rows, of_slot, waiting, tally, life };
        let key = self.ops.insert(Op::Repair(Box::new(op)));
        self.core.work.ready.push_back(key);
        text
    }

    pub(in crate::array) fn advance_repair(&mut self, key: usize, op: &mut Repair) -> Flow {
        if self.core.is_failed() || op.life != self.redo.lives() || self.core.stop.hurried {
            return self.end_repair_walk(op, false);
        }
        loop {
            if op.waiting.iter().any(|block| self.looks.is_under_way(*block)) {
                return Flow::Wait;
            }
            self.tally_looks(op);
            if !op.found.is_empty() {
                self.look_at_found(key, op);
                continue;
            }
            if op.next >= self.core.map.slots {
                return self.end_repair_walk(op, true);
            }
            if !self.walk_slot(key, op) {
                return Flow::Wait;
            }
        }
    }

    /// Looks at the hashes of one slot. False: it waits for the slot's pages.
    fn walk_slot(&mut self, key: usize, op: &mut Repair) -> bool {
        let slot = SlotIndex(op.next);
        let rows = 0..self.core.map.chunk / ROW_BYTES as usize;
        let stripe = self.pages.stripes().stripe_at(slot).filter(|&stripe| self.pages.holds_data(stripe));
        let Some(stripe) = stripe.filter(|_| self.pages.checksums().is_some()) else {
            if let Some(mut hold) = op.hold.take() {
                self.release_pages(&mut hold);
            }
            op.next += 1;
            return true;
        };
        let mut hold = op
            .hold
            .take()
            .unwrap_or_else(|| PageHold::new(self.pages.hash_pages(slot, rows.clone()), op.life));
        let held = self.hold_pages(key, &mut hold);
        if held == PagesHeld::Wait {
            op.hold = Some(hold);
            return false;
        }
        if held == PagesHeld::Unreadable {
            op.tally.unreadable += (self.core.map.k * rows.len()) as u64;
            self.release_pages(&mut hold);
            op.next += 1;
            return true;
        }
        op.of_slot.clear();
        for column in 0..self.core.map.width() {
            let hashes = self.pages.store().hashes(slot, rows.clone(), ColumnIndex(column as u16));
            for (row, hash) in hashes.enumerate() {
                let block = (stripe, column as u16, row as u32);
                if (hash.is_set_aside() || hash == BlockHash::LOST) && !op.listed.contains(&block) {
                    op.of_slot.insert(block);
                    op.found.push_back((block, hash.is_set_aside()));
                }
            }
        }
        self.release_pages(&mut hold);
        op.next += 1;
        if let Some(progress) = &mut self.repair {
            progress.next = op.next;
        }
        true
    }

    fn look_at_found(&mut self, key: usize, op: &mut Repair) {
        let count = op.found.len().min(LOOKS_AT_ONCE);
        let blocks: BTreeMap<BlockName, bool> = op.found.drain(..count).collect();
        op.waiting = blocks.keys().copied().collect();
        self.damage.watch(blocks.keys().copied());
        for (block, is_set_aside) in blocks {
            if is_set_aside {
                self.start_repay(block, Some(key));
            } else {
                self.look_again(block, Some(key));
            }
        }
    }

    /// Adds the other unreadable blocks of the row, which a look has listed.
    fn add_others_of_row(&self, op: &mut Repair, block: BlockName) {
        for (other, why) in self.damage.of_stripe(block.0).filter(|(other, _)| other.2 == block.2) {
            if !op.of_slot.contains(&other) && op.listed.insert(other) {
                op.found.push_back((other, why.is_aside()));
            }
        }
    }

    /// Counts blocks of parity in the row of this one that are in no list, because their members are out.
    fn parity_away(&self, op: &Repair, (stripe, _, row): BlockName) -> u64 {
        let slot = self.pages.map_entry(stripe).slot;
        let is_away = |column: &usize| {
            let block = (stripe, *column as u16, row);
            self.core.readable(self.core.member_at(slot, *column), slot).is_none()
                && !op.listed.contains(&block)
                && !op.of_slot.contains(&block)
                && self.damage.why(block).is_none()
        };
        (self.core.map.k..self.core.map.width()).filter(is_away).count() as u64
    }

    fn tally_looks(&mut self, op: &mut Repair) {
        for block in std::mem::take(&mut op.waiting) {
            self.add_others_of_row(op, block);
            let why = self.damage.seen(block);
            // The row cannot be decoded: the parity of members that are out is counted, once.
            if matches!(why, Some(Why::Unreadable | Why::Proven)) && op.bad_rows.insert((block.0, block.2)) {
                op.tally.parity += self.parity_away(op, block);
            }
            if usize::from(block.1) >= self.core.map.k {
                op.tally.parity += u64::from(why.is_some());
                continue;
            }
            match why {
                None => op.tally.readable += 1,
                Some(Why::SetAside) => op.tally.set_aside += 1,
                Some(Why::Unreadable) => op.tally.unreadable += 1,
                // An earlier run called it lost; this one could not confirm that.
                Some(_) if self.damage.is_unconfirmed(block) => op.tally.unreadable += 1,
                Some(Why::Lost | Why::Proven | Why::Gone) => op.tally.lost += 1,
            }
        }
        if let Some(progress) = &mut self.repair {
            progress.repaired = op.tally.readable;
            progress.errors = op.tally.bad();
        }
    }

    pub(super) fn end_repair_walk(&mut self, op: &mut Repair, complete: bool) -> Flow {
        if let Some(mut hold) = op.hold.take() {
            self.release_pages(&mut hold);
        }
        self.repair = None;
        let Tally { readable, set_aside, unreadable, lost, parity } = op.tally;
        let word = if complete { "repair is complete" } else { "repair ended early" };
        let mut text = format!(
            "{word}: {} {} readable again, {set_aside} are still set aside, {unreadable} cannot be read for \
             now, {lost} are beyond repair",
            Count(readable, "block"),
            Count(readable, "block").are()
        );
        if parity > 0 {
            text += &format!("; {} of parity cannot be had either", Count(parity, "block"));
        }
        // Where the list of damage was lost, a scrub may have found more.
        let scrubbed =
            self.passes.last_scrub().map_or(0, |scrub| scrub.errors.saturating_sub(scrub.repaired));
        let is_less = scrubbed > op.tally.bad() + readable;
        if is_less {
            text += &format!(
                ". The last scrub found {} that it could not repair, more than this repair looked at: another scrub \
                 shows whether the others are good now",
                Count(scrubbed, "block")
            );
        }
        let is_well = complete && !is_less && op.tally.bad() == 0;
        let level = if is_well { NoticeLevel::Info } else { NoticeLevel::Warning };
        self.core.notice(NoticeKind::RepairEnded, level, None, text);
        Flow::Finished
    }

    /// The repair under way, for the status.
    pub(super) fn repair_activity(&self) -> Option<Activity> {
        let RepairProgress { next, errors, repaired } = self.repair?;
        let bytes = |slot: u64| slot * self.core.map.stripe_bytes() as u64;
        Some(Activity {
            kind: ActivityKind::Repair,
            done_bytes: bytes(next),
            total_bytes: bytes(self.core.map.slots),
            retried: 0,
            retried_pages: 0,
            rest: None,
            errors,
            repaired,
        })
    }

    /// Clears the counts of a member, or of all members and of the array. Damage stays listed until it is
    /// read or written: clearing a count repairs nothing.
    pub(in crate::array) fn clear(&mut self, member: Option<MemberIndex>) {
        if let Some(index) = member {
            self.core.member_mut(index).clear();
            self.bad.clear(index);
            return;
        }
        for index in (0..self.core.map.width()).map(|at| MemberIndex(at as u16)) {
            self.core.member_mut(index).clear();
            self.bad.clear(index);
        }
        self.client_notices.forget_errors();
    }
}
