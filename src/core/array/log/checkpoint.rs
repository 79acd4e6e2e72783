//! Checkpoints: the content of the log goes in place, then the log's tail moves. Rules W2, W3 and W4.
//!
//! One checkpoint at a time, in steps: freeze images and pages; wait until every batch of the frozen ones is
//! noted; write images and pages in place; flush; move the tail. A page is written as it was when it was
//! frozen, so no change of a batch that is not noted reaches it. When a member is lost during a checkpoint,
//! the tail stays: the next one writes the map pages again, which record since when the member lacks what it
//! missed.
//!
//! Must not know the content of the images.

use super::journal::Journal;
use super::overlay::Run;
use super::{Redo, hides_images};
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::Pages;
use crate::array::{Core, Owner};
use crate::block_io::{Buf, DeviceId, IoOp};
use crate::format::MapEntry;
use crate::units::{ROW_BYTES, SlotIndex, StripeIndex};
use std::collections::{BTreeSet, VecDeque};

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Checkpoint {
    stage: Stage,
    /// Whether a checkpoint is asked for: it starts when the open batch has been issued.
    wanted: bool,
    /// Batches below are in this checkpoint.
    upto: u64,
    /// Count of lost members when it began.
    losses: u64,
    runs: VecDeque<Run>,
    /// Slots of discarded stripes whose space is given back.
    punches: VecDeque<SlotIndex>,
    punching: BTreeSet<u64>,
    in_flight: usize,
    /// The flush round that must end before the tail moves.
    round: u64,
    /// Stripes that a lost member may lack although their map entry does not say so yet.
    remark: BTreeSet<u64>,
    /// Checkpoints begun and ended.
    begun: u64,
    ended: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Idle,
    /// Waits until the batches are noted.
    Note,
    Write,
    Flush,
}

/// Writes in place under way at one time.
const IN_FLIGHT_MAX: usize = 64;
/// Bytes of fresh writes after which a checkpoint is due: a restart has to read and verify that much.
const FRESH_BYTES_MAX: usize = 512 << 20;
/// A log that has been quiet for this long is put in place.
const IDLE_NS: u64 = 200_000_000;

impl Checkpoint {
    /// Asks for a checkpoint of everything joined so far.
    pub(super) fn want(&mut self) {
        self.wanted = true;
    }

    /// Whether no checkpoint runs and none is asked for.
    pub(super) fn is_quiet(&self) -> bool {
        self.stage == Stage::Idle && !self.wanted
    }

    /// Whether everything is in place and waits to be flushed.
    pub(super) fn is_flushing(&self) -> bool {
        self.stage == Stage::Flush
    }

    /// Whether the space of a slot is being given back.
    pub(super) fn is_punching(&self, slot: SlotIndex) -> bool {
        self.punching.contains(&slot.0)
    }

    /// Whether nothing is left for another checkpoint to do.
    pub(super) fn is_over(&self) -> bool {
        self.stage == Stage::Idle && self.remark.is_empty()
    }

    /// Whether it waits for a flush round that has not begun.
    pub(super) fn wants_round(&self, journal: &Journal, rounds_begun: u64) -> bool {
        match self.stage {
            Stage::Note => {
                let covered = journal.written() >= self.upto;
                let unflushed = journal.durable() < self.upto;
                let note_written = journal.carried_note() >= self.upto && journal.in_flight() == 0;
                (covered && unflushed) || (note_written && journal.noted() < self.upto)
            }
            Stage::Flush => rounds_begun < self.round,
            Stage::Idle | Stage::Write => false,
        }
    }

    /// Adds stripes that a lost member may lack, whatever the map says of them.
    pub(super) fn remark(&mut self, stripes: impl Iterator<Item = StripeIndex>) {
        self.remark.extend(stripes.map(|stripe| stripe.0));
    }

    /// Whether the map entry of a stripe does not say yet in which epoch it was written.
    pub(super) fn is_to_remark(&self, stripe: StripeIndex) -> bool {
        self.remark.contains(&stripe.0)
    }
}

impl Redo {
    /// Whether a checkpoint runs, or is asked for.
    pub(in crate::array) fn has_checkpoint(&self) -> bool {
        !self.checkpoint.is_quiet()
    }

    /// Asks for a checkpoint of everything joined so far.
    pub(in crate::array) fn want_checkpoint(&mut self) {
        self.checkpoint.want();
    }

    /// Asks for a checkpoint, and returns how many must have ended when it has. One that has begun already
    /// does not count.
    pub(in crate::array) fn want_whole_checkpoint(&mut self) -> u64 {
        self.checkpoint.want();
        self.next_checkpoint()
    }

    /// How many checkpoints must have ended when the next one to begin has.
    pub(in crate::array) fn next_checkpoint(&self) -> u64 {
        self.checkpoint.begun + 1
    }

    /// Checkpoints that have ended.
    pub(in crate::array) fn checkpoints_ended(&self) -> u64 {
        self.checkpoint.ended
    }

    /// Whether the map entry of a stripe does not say yet in which epoch it was written.
    pub(in crate::array) fn is_to_remark(&self, stripe: StripeIndex) -> bool {
        self.checkpoint.is_to_remark(stripe)
    }

    /// Whether the log should be put in place soon.
    fn checkpoint_due(&self, pages: &Pages) -> bool {
        self.overlay.active_bytes() >= self.room.overlay_max / 2
            || self.journal.fullness() >= 128
            || self.slots.fresh_bytes >= FRESH_BYTES_MAX
            || pages.store().is_dirty_beyond(2)
    }

    pub(super) fn pump_checkpoint(&mut self, core: &mut Core, pages: &mut Pages) {
        loop {
            let before = self.checkpoint.stage;
            match before {
                Stage::Idle => self.begin_checkpoint(core, pages),
                Stage::Note => self.note_checkpoint(core, pages),
                Stage::Write => self.write_checkpoint(core, pages),
                Stage::Flush => self.end_checkpoint(core, pages),
            }
            if self.checkpoint.stage == before {
                return;
            }
        }
    }

    fn begin_checkpoint(&mut self, core: &mut Core, pages: &mut Pages) {
        let wanted = self.checkpoint.wanted || self.checkpoint_due(pages);
        if !wanted || !self.open.is_empty() || !self.gate.permits().in_place {
            return;
        }
        let epoch = self.gate.permits().epoch.number;
        self.checkpoint.wanted = false;
        let remark = std::mem::take(&mut self.checkpoint.remark);
        let is_empty = self.overlay.is_empty() && pages.store().dirty_pages() == 0;
        if self.journal.is_drained() && remark.is_empty() && is_empty {
            self.checkpoint.begun += 1;
            // While the loss was not recorded slots were not freed; some may be free by now.
            self.free_slots(pages);
            self.checkpoint_ended(core);
            return;
        }
        for stripe in remark.into_iter().map(StripeIndex) {
            let entry = pages.map_entry(stripe);
            if entry.epoch < epoch {
                pages.set_map_entry(stripe, MapEntry { epoch, ..entry });
            }
        }
        self.overlay.freeze();
        for stripe in std::mem::take(&mut self.slots.discarded).into_iter().map(StripeIndex) {
            let entry = pages.map_entry(stripe);
            if !entry.holds_data && !self.overlay.is_frozen(entry.slot) {
                self.checkpoint.punches.push_back(entry.slot);
                self.checkpoint.punching.insert(entry.slot.0);
            }
        }
        pages.freeze(epoch);
        self.slots.fresh_bytes = 0;
        self.checkpoint.upto = self.journal.next();
        self.checkpoint.losses = self.gate.permits().losses;
        self.checkpoint.stage = Stage::Note;
        self.checkpoint.begun += 1;
        // A new generation has begun: there is room again.
        self.wake_waiting_for_room(core);
    }

    fn note_checkpoint(&mut self, core: &mut Core, pages: &mut Pages) {
        if is_off(Mutation::PagesBeforeDurable) {
            self.write_pages(core, pages);
        }
        let journal = &self.journal;
        let upto = self.checkpoint.upto;
        let broken = is_off(Mutation::DestageBeforeDurable)
            || (is_off(Mutation::NoNoteBeforeDestage) && journal.durable() >= upto);
        if journal.noted() >= upto || broken {
            if !self.gate.permits().in_place {
                return;
            }
            self.checkpoint.runs = self.overlay.frozen_runs().into();
            self.checkpoint.stage = Stage::Write;
        } else if journal.durable() >= upto && journal.carried_note() < upto && self.open.is_empty() {
            self.issue_batch(core);
        }
    }

    /// Sends writes in place while the window permits.
    fn write_checkpoint(&mut self, core: &mut Core, pages: &mut Pages) {
        while self.gate.permits().in_place && self.checkpoint.in_flight < IN_FLIGHT_MAX {
            if let Some(run) = self.checkpoint.runs.pop_front() {
                self.write_run(core, &run);
            } else if let Some(slot) = self.checkpoint.punches.pop_front() {
                self.punch_slot(core, slot);
            } else {
                break;
            }
        }
        self.write_pages(core, pages);
        let checkpoint = &mut self.checkpoint;
        let done = checkpoint.runs.is_empty() && checkpoint.punches.is_empty() && pages.store().is_written();
        if done && checkpoint.in_flight == 0 {
            checkpoint.stage = Stage::Flush;
            // A round under way may have begun before the last write.
            checkpoint.round = self.rounds.begun + 1;
        }
    }

    /// Sends writes of frozen pages while the window permits.
    fn write_pages(&self, core: &mut Core, pages: &mut Pages) {
        if self.gate.permits().in_place {
            pages.write_back(core, IN_FLIGHT_MAX);
        }
    }

    /// Writes a run of images to every device that has the slot.
    fn write_run(&mut self, core: &mut Core, run: &Run) {
        let member = core.member_at(run.slot, usize::from(run.column));
        let targets: Vec<DeviceId> = core.targets(member, run.slot).collect();
        if targets.is_empty() {
            return;
        }
        let bytes = core.join_blocks(&run.blocks);
        let within = run.row as usize * ROW_BYTES as usize;
        let offset = core.map.device_offset(core.shape.data_offset, run.slot, within);
        for device in targets {
            let op = IoOp::Write { offset, buf: bytes.clone(), fua: false };
            self.checkpoint.in_flight += 1;
            core.submit_io(Owner::InPlace, member, device, op);
        }
    }

    /// Gives back the space of a slot whose stripe holds no data, where a device can. No operation reads it,
    /// and the next write to it comes after this checkpoint.
    fn punch_slot(&mut self, core: &mut Core, slot: SlotIndex) {
        for column in 0..core.map.width() {
            let member = core.member_at(slot, column);
            for id in core.targets(member, slot).collect::<Vec<_>>() {
                if core.device_mut(member, id).is_none_or(|device| device.cannot_zero) {
                    continue;
                }
                let offset = core.map.device_offset(core.shape.data_offset, slot, 0);
                let op = IoOp::Zero { offset, len: core.map.chunk as u64, may_unmap: true };
                self.checkpoint.in_flight += 1;
                core.submit_io(Owner::Punch, member, id, op);
            }
        }
    }

    /// Counts a write in place that has ended, or a slot whose space was given back.
    pub(in crate::array) fn in_place_done(&mut self) {
        if self.is_serving() {
            self.checkpoint.in_flight -= 1;
        }
    }

    /// Ends the writes of a checkpoint: all is in place, and the tail moves once that is flushed.
    fn end_checkpoint(&mut self, core: &mut Core, pages: &mut Pages) {
        if !self.gate.permits().in_place {
            return;
        }
        if self.rounds.ended < self.checkpoint.round && !is_off(Mutation::TruncateBeforeFlush) {
            return;
        }
        self.checkpoint.stage = Stage::Idle;
        self.checkpoint.punching.clear();
        pages.thaw();
        let in_place = self.overlay.drop_frozen().filter(|_| !hides_images());
        in_place.for_each(|slot| pages.show_images(slot, false));
        if self.checkpoint.losses == self.gate.permits().losses || is_off(Mutation::InPlaceBeforeBump) {
            self.journal.in_place(self.checkpoint.upto);
        } else {
            // The lost member may lack what this checkpoint wrote: the map must say so before the log forgets
            // it.
            self.checkpoint.wanted = true;
        }
        self.checkpoint_ended(core);
        self.free_slots(pages);
        self.wake_waiting_for_room(core);
    }

    fn checkpoint_ended(&mut self, core: &mut Core) {
        self.checkpoint.ended += 1;
        self.wake_waiting_for_checkpoint(core);
    }

    /// Wakes the operations that wait for a checkpoint; they look again.
    pub(in crate::array) fn wake_waiting_for_checkpoint(&mut self, core: &mut Core) {
        core.work.ready.extend(self.waits.waiting_for_drain.drain(..));
    }

    /// Tick: puts a quiet log in place, and notes that it is.
    pub(in crate::array) fn checkpoint_when_idle(&mut self, core: &mut Core, pages: &Pages) {
        let quiet = core.now.nanos_since(core.load.last_write) >= IDLE_NS;
        if !self.is_serving() || core.load.write_ops > 0 {
            return;
        }
        let over = self.journal.is_drained() && pages.store().dirty_pages() == 0 && self.checkpoint.is_over();
        if quiet && !over {
            self.checkpoint.want();
        }
        // The note is written soon after each flush: until then more than m bad pieces would look like a torn
        // tail (W2).
        if self.journal.durable() > self.journal.carried_note()
            && self.open.is_empty()
            && !self.journal.is_drained()
        {
            self.issue_batch(core);
        }
    }
}

impl Core {
    /// Joins the blocks into one buffer.
    fn join_blocks(&self, blocks: &[Buf]) -> Buf {
        if let [one] = blocks {
            return one.clone();
        }
        let mut joined = self.pool.alloc(blocks.iter().map(|block| block.len()).sum());
        let mut at = 0;
        for block in blocks {
            joined[at..at + block.len()].copy_from_slice(block);
            at += block.len();
        }
        joined.freeze()
    }
}
