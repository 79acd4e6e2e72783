//! Checkpoints: what the log holds goes in place, then the log's tail moves. Rules W2, W3 and W4.
//!
//! One at a time, in steps: freeze images and pages; wait until every batch of the frozen ones is noted; write images
//! and pages in place; flush; move the tail. A page is written as it was when it was frozen, so nothing of a batch
//! that is not noted reaches it. When a member is lost on the way, the tail stays: the next checkpoint writes the map
//! pages again, which say since when the member lacks what it missed.
//!
//! Must not know what the images are.

use crate::array::base::members::Which;
use crate::array::log::journal::Journal;
use crate::array::log::overlay::Run;
use crate::array::mutation::{Mutation, is_off};
use crate::array::{Array, Core, Inflight, Owner};
use crate::block_io::{Buf, DeviceId, IoFault, IoFaultKind, IoOp, IoValue};
use crate::format::MemberSet;
use crate::units::{ROW_BYTES, SlotIndex, StripeIndex};
use std::collections::{BTreeSet, VecDeque};

/// See the head of this file.
#[derive(Debug, Default)]
pub(in crate::array) struct Checkpoint {
    stage: Stage,
    /// Somebody wants one: it starts when the open batch has been issued.
    wanted: bool,
    /// Batches below are in this checkpoint.
    upto: u64,
    /// Losses of members when it began.
    losses: u64,
    runs: VecDeque<Run>,
    /// Slots of discarded stripes whose space is given back.
    punches: VecDeque<SlotIndex>,
    punching: BTreeSet<u64>,
    in_flight: usize,
    /// The flush round that must have ended.
    round: u64,
    /// Stripes that a lost member may lack although their map entry does not say so yet.
    remark: BTreeSet<u64>,
    /// Checkpoints begun and ended.
    pub begun: u64,
    pub ended: u64,
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
/// Pages whose writes are made at one time.
const PAGES_AT_ONCE: usize = 8;
/// Fresh writes between two checkpoints, in bytes: what a restart has to read and verify.
const FRESH_BYTES_MAX: usize = 512 << 20;
/// A log that has been quiet for this long is put in place.
const IDLE_NS: u64 = 200_000_000;

impl Checkpoint {
    /// Asks for a checkpoint of everything joined so far.
    pub(in crate::array) fn want(&mut self) {
        self.wanted = true;
    }

    /// Whether none runs and none is wanted.
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

    /// Whether nothing is left for another.
    pub(in crate::array) fn is_over(&self) -> bool {
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

    /// A lost member may lack what was written to these stripes, whatever the map says of them.
    pub(in crate::array) fn remark(&mut self, stripes: impl Iterator<Item = StripeIndex>) {
        self.remark.extend(stripes.map(|stripe| stripe.0));
    }

    /// Whether the map entry of a stripe does not say yet in which epoch it was written.
    pub(in crate::array) fn is_to_remark(&self, stripe: StripeIndex) -> bool {
        self.remark.contains(&stripe.0)
    }
}

impl Array {
    /// Whether the log should be put in place soon.
    fn checkpoint_due(&self) -> bool {
        let redo = self.redo();
        redo.overlay.active_bytes() >= redo.place.overlay_max / 2
            || redo.journal.fullness() >= 128
            || redo.slots.fresh_bytes >= FRESH_BYTES_MAX
            || redo.pages.dirty_pages() >= redo.facts.cache_pages_max / 2
    }

    pub(super) fn pump_checkpoint(&mut self) {
        loop {
            let before = self.redo().checkpoint.stage;
            match before {
                Stage::Idle => self.begin_checkpoint(),
                Stage::Note => self.note_checkpoint(),
                Stage::Write => self.write_checkpoint(),
                Stage::Flush => self.end_checkpoint(),
            }
            if self.redo().checkpoint.stage == before {
                return;
            }
        }
    }

    fn begin_checkpoint(&mut self) {
        let wanted = self.redo().checkpoint.wanted || self.checkpoint_due();
        if !wanted || !self.redo().open.is_empty() || !self.in_place_allowed() {
            return;
        }
        let losses = self.supers.losses();
        let epoch = self.supers.epoch().number;
        let redo = self.redo_mut();
        redo.checkpoint.wanted = false;
        let remark = std::mem::take(&mut redo.checkpoint.remark);
        let is_empty = redo.overlay.is_empty() && redo.pages.dirty_pages() == 0;
        if redo.journal.is_drained() && remark.is_empty() && is_empty {
            redo.checkpoint.begun += 1;
            // A slot may be free by now that was not while a loss was to be recorded.
            self.free_slots();
            self.checkpoint_ended();
            return;
        }
        for stripe in remark.into_iter().map(StripeIndex) {
            let entry = redo.pages.map_entry(stripe);
            if entry.epoch < epoch {
                redo.pages.set_map_entry(stripe, crate::format::MapEntry { epoch, ..entry });
            }
        }
        redo.overlay.freeze();
        for stripe in std::mem::take(&mut redo.slots.discarded).into_iter().map(StripeIndex) {
            let entry = redo.pages.map_entry(stripe);
            if !entry.holds_data && !redo.overlay.is_frozen(entry.slot) {
                redo.checkpoint.punches.push_back(entry.slot);
                redo.checkpoint.punching.insert(entry.slot.0);
            }
        }
        redo.pages.freeze(epoch);
        redo.slots.fresh_bytes = 0;
        redo.checkpoint.upto = redo.journal.next();
        redo.checkpoint.losses = losses;
        redo.checkpoint.stage = Stage::Note;
        redo.checkpoint.begun += 1;
        // A new generation has begun: there is room again.
        self.wake_waiting_for_room();
    }

    fn note_checkpoint(&mut self) {
        if is_off(Mutation::PagesBeforeDurable) {
            self.write_pages();
        }
        let journal = &self.redo().journal;
        let upto = self.redo().checkpoint.upto;
        let broken = is_off(Mutation::DestageBeforeDurable)
            || (is_off(Mutation::NoNoteBeforeDestage) && journal.durable() >= upto);
        if journal.noted() >= upto || broken {
            if !self.in_place_allowed() {
                return;
            }
            let redo = self.redo_mut();
            redo.checkpoint.runs = redo.overlay.frozen_runs().into();
            redo.checkpoint.stage = Stage::Write;
        } else if journal.durable() >= upto && journal.carried_note() < upto && self.redo().open.is_empty() {
            self.issue_batch();
        }
    }

    /// Sends writes in place while the window permits.
    fn write_checkpoint(&mut self) {
        while self.in_place_allowed() && self.redo().checkpoint.in_flight < IN_FLIGHT_MAX {
            let checkpoint = &mut self.redo_mut().checkpoint;
            if let Some(run) = checkpoint.runs.pop_front() {
                self.write_run(&run);
            } else if let Some(slot) = checkpoint.punches.pop_front() {
                self.punch_slot(slot);
            } else {
                break;
            }
        }
        self.write_pages();
        let redo = self.redo_mut();
        let checkpoint = &mut redo.checkpoint;
        let done = checkpoint.runs.is_empty() && checkpoint.punches.is_empty() && redo.pages.is_written();
        if done && checkpoint.in_flight == 0 {
            checkpoint.stage = Stage::Flush;
            // A round under way may have begun before the last write.
            checkpoint.round = redo.rounds.rounds_begun + 1;
        }
    }

    /// Sends writes of frozen pages, to every device in service or being built, while the window permits.
    fn write_pages(&mut self) {
        let pages = &self.redo().pages;
        if pages.writes_pending() >= IN_FLIGHT_MAX || pages.all_sent() {
            return;
        }
        let (mut primaries, mut replacements) = (MemberSet::new(), MemberSet::new());
        for (member, which, _) in self.core.devices() {
            match which {
                Which::Primary => primaries.insert(member),
                Which::Replacement => replacements.insert(member),
            };
        }
        let pool = self.core.pool.clone();
        while self.in_place_allowed() && self.redo().pages.writes_pending() < IN_FLIGHT_MAX {
            let mut io = Vec::new();
            let targets = |member, which| match which {
                Which::Primary => primaries.contains(member),
                Which::Replacement => replacements.contains(member),
            };
            self.redo_mut().pages.frozen_writes(PAGES_AT_ONCE, &targets, &pool, &mut io);
            if io.is_empty() && self.redo().pages.all_sent() {
                return;
            }
            self.send_page_io(io);
        }
    }

    /// Writes a run of images to every device that has the slot.
    fn write_run(&mut self, run: &Run) {
        let member = self.core.member_at(run.slot, usize::from(run.column));
        let targets: Vec<DeviceId> = self.core.targets(member, run.slot).collect();
        if targets.is_empty() {
            return;
        }
        let bytes = self.core.join_blocks(&run.blocks);
        let offset = self.core.map.device_offset(
            self.core.shape.data_offset,
            run.slot,
            run.row as usize * ROW_BYTES as usize,
        );
        for device in targets {
            let op = IoOp::Write { offset, buf: bytes.clone(), fua: false };
            self.redo_mut().checkpoint.in_flight += 1;
            self.core.submit_io(Owner::InPlace, member, device, op);
        }
    }

    /// Gives back the space of a slot whose stripe holds no data, where a device can. Nobody reads it, and whoever
    /// writes it next does so after this checkpoint.
    fn punch_slot(&mut self, slot: SlotIndex) {
        for column in 0..self.core.map.width() {
            let member = self.core.member_at(slot, column);
            for id in self.core.targets(member, slot).collect::<Vec<_>>() {
                if self.core.device_mut(member, id).is_none_or(|device| device.cannot_zero) {
                    continue;
                }
                let offset = self.core.map.device_offset(self.core.shape.data_offset, slot, 0);
                let op = IoOp::Zero { offset, len: self.core.map.chunk as u64, may_unmap: true };
                self.redo_mut().checkpoint.in_flight += 1;
                self.core.submit_io(Owner::Punch, member, id, op);
            }
        }
    }

    pub(in crate::array) fn punch_io(&mut self, entry: Inflight, result: Result<IoValue, IoFault>) {
        match result {
            Err(fault) if fault.kind == IoFaultKind::Gone => {
                self.write_fault(entry.member, entry.device, "trim", fault);
            }
            Err(fault) if fault.kind.passes() => {}
            // A device that cannot give space back keeps it.
            Err(_) => {
                if let Some(device) = self.core.device_mut(entry.member, entry.device) {
                    device.cannot_zero = true;
                }
            }
            Ok(_) => {}
        }
        let redo = self.redo_mut();
        if redo.is_serving() {
            redo.checkpoint.in_flight -= 1;
        }
    }

    pub(in crate::array) fn in_place_io(&mut self, entry: Inflight, result: Result<IoValue, IoFault>) {
        if let Err(fault) = result {
            self.write_fault(entry.member, entry.device, "write", fault);
        }
        let redo = self.redo_mut();
        if redo.is_serving() {
            redo.checkpoint.in_flight -= 1;
        }
    }

    /// Everything is in place; once it is flushed, the tail moves.
    fn end_checkpoint(&mut self) {
        if !self.in_place_allowed() {
            return;
        }
        let losses = self.supers.losses();
        let redo = self.redo_mut();
        if redo.rounds.rounds_ended < redo.checkpoint.round && !is_off(Mutation::TruncateBeforeFlush) {
            return;
        }
        redo.checkpoint.stage = Stage::Idle;
        redo.checkpoint.punching.clear();
        redo.pages.thaw();
        redo.overlay.drop_frozen();
        if redo.checkpoint.losses == losses || is_off(Mutation::InPlaceBeforeBump) {
            redo.journal.in_place(redo.checkpoint.upto);
        } else {
            // The lost member may lack what this checkpoint wrote: the map must say so before the log forgets it.
            redo.checkpoint.wanted = true;
        }
        self.checkpoint_ended();
        self.free_slots();
        self.wake_waiting_for_room();
    }

    fn checkpoint_ended(&mut self) {
        self.redo_mut().checkpoint.ended += 1;
        self.wake_waiting_for_drain();
    }

    /// Whoever waits for a checkpoint looks again.
    pub(in crate::array) fn wake_waiting_for_drain(&mut self) {
        let waiting = std::mem::take(&mut self.redo_mut().waits.waiting_for_drain);
        self.core.work.ready.extend(waiting);
    }

    /// Tick: a quiet log is put in place, and told to be so.
    pub(in crate::array) fn checkpoint_when_idle(&mut self) {
        let quiet = self.core.now.nanos_since(self.core.load.last_write) >= IDLE_NS;
        let redo = &mut self.redo;
        if !redo.is_serving() || self.core.load.write_ops > 0 {
            return;
        }
        let over = redo.journal.is_drained() && redo.pages.dirty_pages() == 0 && redo.checkpoint.is_over();
        if quiet && !over {
            redo.checkpoint.want();
        }
        // The note soon after each flush: until then more than m bad pieces would look like a torn tail (W2).
        let redo = self.redo();
        if redo.journal.durable() > redo.journal.carried_note()
            && redo.open.is_empty()
            && !redo.journal.is_drained()
        {
            self.issue_batch();
        }
    }
}

impl Core {
    /// The blocks as one buffer.
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
