//! The running redo log: batches gather, are written and noted, flushes are waited for, and the operations
//! that wait for them go on. Rules W1, W2 and E3 of the crash-safety design; W3 and W4 are in
//! `checkpoint.rs`, replay at start in `recovery/`.
//!
//! A batch is issued at once when none is under way, so a lone request never waits for others; requests that
//! come while one is under way gather in the next. Invariant: no batch is issued, no operation is
//! acknowledged and nothing goes in place while a loss of a member is not recorded on the others.

use super::life::Life;
use super::permits::{RoundWish, Written};
use super::{FlushRequest, Redo};
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::Pages;
use crate::array::{Core, Owner, StripeReply, StripeRequestId};
use crate::block_io::IoOp;
use crate::format::LOG_BLOCK_BYTES;

/// Most batches in flight at one time. Requests that come later gather in the open batch.
const IN_FLIGHT_MAX: usize = 4;
/// While others are under way, a batch is issued when it has this many bytes of payload on some member; a
/// smaller one gathers more until those are written.
const GATHER_BYTES: usize = 256 << 10;

impl Redo {
    /// Acknowledges operations that may be, and writes the open batch if it is its turn.
    pub(in crate::array) fn pump_batches(&mut self, core: &mut Core) {
        self.release_waiters(core);
        self.issue_open(core);
    }

    /// Advances the checkpoint, and the operations that depend on it.
    pub(in crate::array) fn pump_rest(&mut self, core: &mut Core, pages: &mut Pages) {
        self.pump_checkpoint(core, pages);
        self.push_notes(core, pages);
    }

    /// Whether writes wait for space that a note or a new tail would free.
    fn is_pressed(&self, core: &Core, pages: &Pages) -> bool {
        let waiting = self.journal.slots_waiting() as u64;
        if !self.journal.tail_is_news() && waiting == 0 {
            return false;
        }
        let reserve = core.map.slots - core.shape.geometry.stripes();
        self.is_stuck
            || !self.waits.waiting_for_room.is_empty()
            || !self.waits.waiting_for_slot.is_empty()
            || (waiting >= reserve.div_ceil(4) && pages.stripes().free_slots() <= reserve / 4)
            || (self.journal.tail_is_news() && self.journal.fullness() >= 64)
    }

    /// Issues an empty batch when a note or tail is waited for and no other batch will carry it.
    fn push_notes(&mut self, core: &mut Core, pages: &Pages) {
        if self.journal.in_flight() > 0 || !self.journal.has_news() {
            return;
        }
        if self.open.is_empty() && self.is_pressed(core, pages) {
            self.issue_batch(core);
        } else if self.is_stuck && self.journal.tail_is_news() {
            // The reserve is for this batch: it carries the tail that frees space for the operations that
            // wait.
            let open = std::mem::take(&mut self.open);
            self.issue_batch(core);
            self.open = open;
        }
    }

    /// Acknowledges operations that may be: they look at their batch themselves when they are advanced.
    fn release_waiters(&mut self, core: &mut Core) {
        if !self.gate.permits().acknowledge && !is_off(Mutation::AckBeforeBump) {
            return;
        }
        self.journal.tell_written();
        let (written, durable) = (self.journal.written(), self.journal.durable());
        while let Some(at) = self.waits.waiters.iter().position(|&(sequence, _, must_be_durable)| {
            sequence < if must_be_durable { durable } else { written }
        }) {
            let (_, key, _) = self.waits.waiters.remove(at).expect("just found");
            core.work.ready.push_back(key);
        }
        let done: Vec<StripeRequestId> = self
            .rounds
            .flushes
            .extract_if(.., |flush| flush.target <= durable)
            .map(|flush| flush.id)
            .collect();
        for id in done {
            core.load.client_ops -= 1;
            core.done(id, Ok(StripeReply::Done));
        }
    }

    /// Starts a flush of a client: everything acknowledged before is in written batches.
    pub(in crate::array) fn start_flush(&mut self, core: &mut Core, id: StripeRequestId) {
        core.load.client_ops += 1;
        let target = self.journal.written();
        self.rounds.flushes.push(FlushRequest { target, id, since: core.now });
    }

    /// Writes the open batch to the logs, if it is its turn.
    fn issue_open(&mut self, core: &mut Core) {
        loop {
            if self.open.is_empty() {
                return;
            }
            let in_flight = self.journal.in_flight();
            // A batch of records alone waits while more whole stripes are being written than it has records.
            if self.open.is_records_alone() && self.open.record_count() < self.slots.stripes_in_progress {
                return;
            }
            let gathered = self.open.payload_blocks_max() as usize * LOG_BLOCK_BYTES >= GATHER_BYTES;
            if in_flight >= IN_FLIGHT_MAX || (in_flight > 0 && !gathered) || !self.issue_batch(core) {
                return;
            }
        }
    }

    /// Issues the open batch. If that is empty it is a note. False: it cannot be issued now.
    pub(super) fn issue_batch(&mut self, core: &mut Core) -> bool {
        // Until the log starts anew, batches that were replayed occupy its space.
        if self.unsettled.is_some() || !self.gate.may_write() {
            return false;
        }
        // An empty batch may use all but the last block, which is for the note of a replay.
        let reserve = if self.open.is_empty() { 1 } else { self.room.reserve };
        let sequence = self.journal.next();
        let issued = self.journal.issue(self.gate.permits().epoch, &core.online(), &self.open, reserve);
        let Some((manifest, pieces)) = issued else {
            self.checkpoint.want();
            self.is_stuck = true;
            return false;
        };
        self.is_stuck &= self.open.is_empty();
        self.gate.note_batch();
        let waiters = std::mem::take(&mut self.open).take_waiters();
        self.waits.waiters.extend(waiters.into_iter().map(|(key, durable)| (sequence, key, durable)));
        core.work.ready.extend(self.waits.waiting_for_batch.drain(..));
        let header = manifest.header_bytes();
        for piece in pieces {
            let payload = piece.payload_bytes();
            let mut buf = core.pool.alloc(header + payload);
            manifest.write_piece(piece.member, (payload / LOG_BLOCK_BYTES) as u32, &mut buf[..header]);
            let mut at = header;
            for block in &piece.payload {
                buf[at..at + block.len()].copy_from_slice(block);
                at += block.len();
            }
            let device = core.member(piece.member).device.expect("a member in service has a device").id;
            let offset = self.facts.log.offset.plus(piece.offset);
            let op = IoOp::Write { offset, buf: buf.freeze(), fua: false };
            core.submit_io(Owner::Piece { sequence }, piece.member, device, op);
        }
        true
    }

    /// Counts a member's piece of a batch that is written, or whose member is out of service.
    pub(in crate::array) fn piece_done(&mut self, sequence: u64) {
        if self.is_serving() {
            self.journal.piece_done(sequence);
        }
    }

    /// Whether an operation waits for a flush of every member that covers what is written now.
    pub(in crate::array) fn wants_round(&self, core: &Core, pages: &Pages) -> Option<RoundWish> {
        let journal = &self.journal;
        let (written, durable) = (journal.written(), journal.durable());
        let waited_for = self
            .waits
            .waiters
            .iter()
            .any(|&(sequence, _, must)| must && sequence < written && sequence >= durable)
            || self.rounds.flushes.iter().any(|flush| flush.target > durable && flush.target <= written)
            || self.checkpoint.wants_round(journal, self.rounds.begun)
            || (written > durable && self.is_pressed(core, pages));
        waited_for.then(|| RoundWish { with_builds: self.checkpoint.is_flushing() })
    }

    /// Answers how far it has written: a round begins.
    pub(in crate::array) fn ask_written(&mut self) -> Written {
        self.rounds.begun += 1;
        Written { upto: self.journal.written() }
    }

    /// Takes the news that the round of this answer is over.
    pub(in crate::array) fn flushed(&mut self, core: &mut Core, pages: &mut Pages, written: Written) {
        self.rounds.ended = self.rounds.begun;
        if core.is_failed() || !self.is_serving() {
            return;
        }
        let free = self.journal.flushed(written.upto);
        self.slots.to_free.extend(free);
        self.free_slots(pages);
        self.wake_waiting_for_room(core);
        // An acknowledgement or the checkpoint may have waited for the round.
        self.release_waiters(core);
        self.pump_checkpoint(core, pages);
    }

    /// Gives slots back to the map that no checkpoint writes to (W3). Not while a loss is not recorded (E3).
    pub(super) fn free_slots(&mut self, pages: &mut Pages) {
        if !self.gate.permits().acknowledge {
            return;
        }
        let (overlay, checkpoint) = (&self.overlay, &self.checkpoint);
        let free = self.slots.to_free.extract_if(.., |slot| {
            (!overlay.is_frozen(*slot) && !checkpoint.is_punching(*slot))
                || is_off(Mutation::DestageBySlotNumber)
        });
        free.for_each(|slot| pages.free_slot(slot));
    }

    /// Wakes operations that wait for a slot or for space in the log.
    pub(in crate::array) fn wake_waiting_for_room(&mut self, core: &mut Core) {
        core.work.ready.extend(self.waits.waiting_for_slot.drain(..));
        core.work.ready.extend(self.waits.waiting_for_room.drain(..));
    }

    /// The sequence of the next batch, when a replay would find nothing to do below it. Copies of pages that
    /// have to be written again do not count, since the log knows nothing of them: otherwise they would keep
    /// a member out of step that joins an array in which another one is being built, for it has no part in
    /// the batches so far.
    pub(super) fn needless_end(&self, pages: &Pages) -> Option<u64> {
        self.end_if_empty(pages).filter(|_| self.is_settled())
    }

    /// As [`Redo::needless_end`], whether or not the superblocks say that a log that was replayed starts
    /// there.
    pub(super) fn end_if_empty(&self, pages: &Pages) -> Option<u64> {
        let drained = self.is_serving()
            && self.journal.is_drained()
            && self.journal.in_flight() == 0
            && self.open.is_empty()
            && self.overlay.is_empty()
            && pages.store().changed_pages() == 0
            && self.checkpoint.is_over();
        drained.then(|| self.journal.next())
    }

    /// Ends the log because the array has failed. Returns the operations that wait for the log, and the
    /// flushes of clients.
    pub(in crate::array) fn fail(&mut self) -> (Vec<usize>, Vec<StripeRequestId>) {
        self.lives += 1;
        let waiting = self.take_all_waiting();
        let flushes = self.take_flushes();
        self.life = Life::Starting;
        self.unsettled = None;
        (waiting, flushes)
    }
}
