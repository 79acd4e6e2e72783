//! The running redo log: batches gather, are written, flushed and noted, and whoever waits for
//! that goes on. Rules W1, W2 and E3 of the crash-safety design; W3 and W4 are in `checkpoint.rs`, replay at start
//! in `recovery/`.
//!
//! A batch is issued at once when none is on its way, so a lone request never waits for others; requests that come
//! while one is on its way gather in the next. Invariant: no batch is issued, nothing is acknowledged and nothing
//! goes in place while a loss of a member is not recorded on the others.

use crate::array::base::members::Which;
use crate::array::client::fetch::Missing;
use crate::array::log::life::Life;
use crate::array::log::state::{FlushRequest, Redo, Round};
use crate::array::mutation::{Mutation, is_off};
use crate::array::{
    Array, ClientError, Core, Inflight, NoticeKind, NoticeLevel, Owner, StripeReply, StripeRequestId,
};
use crate::block_io::{IoFault, IoOp, IoValue};
use crate::format::{EpochStamp, LOG_BLOCK_BYTES, MemberState};
use crate::units::{ColumnIndex, Count, MemberIndex, ROW_BYTES, SlotIndex, StripeIndex, VolumeOffset};
use std::ops::Range;

/// Batches on their way at one time: the second gathers what came while the first was written.
const IN_FLIGHT_MAX: usize = 4;
/// A batch beside others on their way is issued when it has this many bytes of payload on some member; a smaller one
/// gathers more until those are written.
const GATHER_BYTES: usize = 256 << 10;

impl Array {
    /// The log, the overlay and the pages.
    pub(in crate::array) fn redo(&self) -> &Redo {
        &self.redo
    }

    /// See [`Array::redo`].
    pub(in crate::array) fn redo_mut(&mut self) -> &mut Redo {
        &mut self.redo
    }

    /// Moves the log on as far as it goes.
    pub(in crate::array) fn pump_redo(&mut self) {
        if self.core.is_stopped() {
            return;
        }
        if !self.redo().is_serving() {
            self.pump_startup();
            return;
        }
        if self.core.is_failed() {
            return;
        }
        self.end_hold();
        self.release_waiters();
        self.issue_open();
        self.pump_settling();
        self.pump_checkpoint();
        self.push_notes();
        self.start_round();
    }

    /// Whether writes wait for what a note or a tail would set free.
    fn is_pressed(&self) -> bool {
        let redo = self.redo();
        let waiting = redo.journal.slots_waiting() as u64;
        if !redo.journal.tail_is_news() && waiting == 0 {
            return false;
        }
        let reserve = self.core.map.slots - self.core.shape.geometry.stripes();
        redo.is_stuck
            || !redo.waits.waiting_for_room.is_empty()
            || !redo.waits.waiting_for_slot.is_empty()
            || (waiting >= reserve.div_ceil(4) && redo.stripes.free_slots() <= reserve / 4)
            || (redo.journal.tail_is_news() && redo.journal.fullness() >= 64)
    }

    /// Issues an empty batch when its note or tail is waited for and no other batch will carry it.
    fn push_notes(&mut self) {
        let redo = self.redo();
        if redo.journal.in_flight() > 0 || !redo.journal.has_news() {
            return;
        }
        if redo.open.is_empty() && self.is_pressed() {
            self.issue_batch();
        } else if redo.is_stuck && redo.journal.tail_is_news() {
            // The reserve is for this: a tail that makes room goes before what waits for it.
            let open = std::mem::take(&mut self.redo_mut().open);
            self.issue_batch();
            self.redo_mut().open = open;
        }
    }

    /// Acknowledges what may be: operations look at their batch themselves when they are advanced.
    fn release_waiters(&mut self) {
        if !self.acknowledgements_allowed() && !is_off(Mutation::AckBeforeBump) {
            return;
        }
        let redo = &mut self.redo;
        redo.journal.tell_written();
        let (written, durable) = (redo.journal.written(), redo.journal.durable());
        while let Some(at) = redo.waits.waiters.iter().position(|&(sequence, _, must_be_durable)| {
            sequence < if must_be_durable { durable } else { written }
        }) {
            let (_, key, _) = redo.waits.waiters.remove(at).expect("just found");
            self.core.work.ready.push_back(key);
        }
        let done: Vec<StripeRequestId> = redo
            .rounds
            .flushes
            .extract_if(.., |flush| flush.target <= durable)
            .map(|flush| flush.piece)
            .collect();
        for piece in done {
            self.core.load.client_ops -= 1;
            self.core.done(piece, Ok(StripeReply::Done));
        }
    }

    /// A flush of a logged array: everything acknowledged before is in written batches.
    pub(in crate::array) fn start_logged_flush(&mut self, piece: StripeRequestId) {
        self.core.load.client_ops += 1;
        let target = self.redo().journal.written();
        let since = self.core.now;
        self.redo_mut().rounds.flushes.push(FlushRequest { target, piece, since });
    }

    /// Writes the open batch to the logs, if it is its turn.
    fn issue_open(&mut self) {
        loop {
            let redo = self.redo();
            if redo.open.is_empty() {
                return;
            }
            let in_flight = redo.journal.in_flight();
            // Records of whole stripes wait for those of as many others as are being written.
            if redo.open.is_records_alone() && redo.open.records.len() < redo.slots.stripes_in_progress {
                return;
            }
            let gathered = redo.open.payload_blocks_max() as usize * LOG_BLOCK_BYTES >= GATHER_BYTES;
            if in_flight >= IN_FLIGHT_MAX || (in_flight > 0 && !gathered) || !self.issue_batch() {
                return;
            }
        }
    }

    /// Issues the open batch, which may be empty: a note. False: it cannot be now.
    pub(super) fn issue_batch(&mut self) -> bool {
        // Until the log starts anew, its space is taken by what was replayed.
        if self.redo().unsettled.is_some() || !self.writes_allowed() {
            return false;
        }
        let live = self.core.online();
        let epoch = self.supers.epoch();
        let stamp = EpochStamp { number: epoch.number, id: epoch.id };
        let redo = self.redo_mut();
        // The last block is for the note of a replay.
        let reserve = if redo.open.is_empty() { 1 } else { redo.place.reserve };
        let sequence = redo.journal.next();
        let Some((manifest, pieces)) = redo.journal.issue(stamp, &live, &redo.open, reserve) else {
            redo.checkpoint.want();
            redo.is_stuck = true;
            return false;
        };
        redo.is_stuck &= redo.open.is_empty();
        self.supers.note_batch();
        let redo = self.redo_mut();
        let open = std::mem::take(&mut redo.open);
        redo.waits.waiters.extend(open.waiters.into_iter().map(|(key, durable)| (sequence, key, durable)));
        let log_offset = redo.place.log_offset;
        let waiting = std::mem::take(&mut redo.waits.waiting_for_batch);
        self.core.work.ready.extend(waiting);
        let header = manifest.header_bytes();
        for piece in pieces {
            let payload = piece.payload_bytes();
            let mut buf = self.core.pool.alloc(header + payload);
            manifest.write_piece(piece.member, (payload / LOG_BLOCK_BYTES) as u32, &mut buf[..header]);
            let mut at = header;
            for block in &piece.payload {
                buf[at..at + block.len()].copy_from_slice(block);
                at += block.len();
            }
            let device = self.core.member(piece.member).device.expect("a member in service has a device").id;
            let offset = log_offset.plus(piece.offset);
            let op = IoOp::Write { offset, buf: buf.freeze(), fua: false };
            self.core.submit_io(Owner::Piece { sequence }, piece.member, device, op);
        }
        true
    }

    pub(in crate::array) fn piece_io(
        &mut self,
        sequence: u64,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) {
        if let Err(fault) = result {
            self.write_fault(entry.member, entry.device, "write to the redo log", fault);
        }
        let redo = self.redo_mut();
        if redo.is_serving() {
            redo.journal.piece_done(sequence);
        }
    }

    /// Begins a flush of every member when somebody waits for one.
    fn start_round(&mut self) {
        let redo = self.redo();
        if redo.rounds.round.is_some() {
            return;
        }
        let journal = &redo.journal;
        let (written, durable) = (journal.written(), journal.durable());
        let waited_for = redo
            .waits
            .waiters
            .iter()
            .any(|&(sequence, _, must)| must && sequence < written && sequence >= durable)
            || redo.rounds.flushes.iter().any(|flush| flush.target > durable && flush.target <= written)
            || redo.checkpoint.wants_round(journal, redo.rounds.rounds_begun)
            || (written > durable && self.is_pressed());
        if !waited_for {
            return;
        }
        // What a checkpoint wrote to devices under construction must be durable too: it counts as built.
        let all = redo.checkpoint.is_flushing();
        let mut pending = 0;
        for (member, which, device) in self.core.devices() {
            let in_service = which == Which::Primary && self.core.member(member).state == MemberState::Online;
            if (all || in_service) && device.is_unflushed() {
                self.core.submit_io(Owner::Round, member, device.id, IoOp::Flush);
                pending += 1;
            }
        }
        let redo = self.redo_mut();
        redo.rounds.rounds_begun += 1;
        redo.rounds.round = Some(Round { pending, upto: written });
        if pending == 0 {
            self.end_round();
        }
    }

    pub(in crate::array) fn round_io(&mut self, entry: Inflight, result: Result<IoValue, IoFault>) {
        if let Err(fault) = result {
            self.flush_fault(entry.member, entry.device, fault);
        }
        let redo = self.redo_mut();
        let Some(round) = &mut redo.rounds.round else { return };
        round.pending -= 1;
        if round.pending == 0 {
            self.end_round();
        }
    }

    fn end_round(&mut self) {
        let failed = self.core.is_failed();
        let redo = self.redo_mut();
        let Some(round) = redo.rounds.round.take() else { return };
        redo.rounds.rounds_ended = redo.rounds.rounds_begun;
        if failed || !redo.is_serving() {
            return;
        }
        let free = redo.journal.flushed(round.upto);
        redo.slots.to_free.extend(free);
        self.free_slots();
        self.wake_waiting_for_room();
        // The round may be what an acknowledgement or the checkpoint waited for.
        self.release_waiters();
        self.pump_checkpoint();
        if !self.redo().checkpoint.is_quiet() {
            self.start_round();
        }
    }

    /// Gives slots back to the map that no checkpoint writes to (W3). Not while a loss is not recorded (E3).
    pub(super) fn free_slots(&mut self) {
        if !self.acknowledgements_allowed() {
            return;
        }
        let redo = self.redo_mut();
        let free: Vec<SlotIndex> = {
            let (overlay, checkpoint) = (&redo.overlay, &redo.checkpoint);
            redo.slots
                .to_free
                .extract_if(.., |slot| {
                    (!overlay.is_frozen(*slot) && !checkpoint.is_punching(*slot))
                        || is_off(Mutation::DestageBySlotNumber)
                })
                .collect()
        };
        for slot in free {
            redo.stripes.free(slot);
        }
    }

    /// Lets operations look again whether there is room.
    pub(in crate::array) fn wake_waiting_for_room(&mut self) {
        let redo = self.redo_mut();
        let slots = std::mem::take(&mut redo.waits.waiting_for_slot);
        let waiting = std::mem::take(&mut redo.waits.waiting_for_room);
        self.core.work.ready.extend(slots);
        self.core.work.ready.extend(waiting);
    }

    /// Where a stripe is.
    pub(in crate::array) fn slot_of(&self, stripe: StripeIndex) -> SlotIndex {
        self.redo().pages.map_entry(stripe).slot
    }

    /// Whether a stripe holds data; otherwise it reads as zeroes.
    pub(in crate::array) fn holds_data(&self, stripe: StripeIndex) -> bool {
        self.redo().pages.map_entry(stripe).holds_data
    }

    /// Tells the operator of blocks that cannot be had, and keeps them for the status.
    pub(in crate::array) fn note_missing(
        &mut self,
        stripe: StripeIndex,
        slot: SlotIndex,
        missing: &[Missing],
    ) {
        self.damage.note(stripe, missing);
        self.notice_unreadable(slot, self.core.offset_of(stripe, missing));
    }

    /// The pages with the hashes of these rows; none where there are no checksums.
    pub(in crate::array) fn hash_pages(&self, slot: SlotIndex, rows: Range<usize>) -> Range<u64> {
        let redo = self.redo();
        if redo.checksums.is_some() { redo.pages.layout().hash_pages(slot, rows) } else { 0..0 }
    }

    /// Which stripes of a run hold nothing.
    pub(in crate::array) fn logged_extents(
        &mut self,
        piece: StripeRequestId,
        first: StripeIndex,
        count: u64,
    ) {
        let mut runs: Vec<(u64, bool)> = Vec::new();
        for stripe in (first.0..first.0 + count).map(StripeIndex) {
            let hole = !self.holds_data(stripe);
            match runs.last_mut() {
                Some((stripes, last)) if *last == hole => *stripes += 1,
                _ => runs.push((1, hole)),
            }
        }
        self.core.done(piece, Ok(StripeReply::Holes(runs)));
    }

    /// The sequence of the next batch, when the log is empty and everything is in place and durable, copies of pages that
    /// have to be written again included.
    pub(in crate::array) fn drained_log(&self) -> Option<u64> {
        self.needless_log().filter(|_| self.redo().pages.dirty_pages() == 0)
    }

    /// The sequence of the next batch, when a replay would find nothing below it to be done. Copies of pages may have to be
    /// written again, which the log knows nothing of: they must not keep a member out of step that joins an array in which
    /// another one is being built, for it has no part in the batches so far.
    pub(in crate::array) fn needless_log(&self) -> Option<u64> {
        self.log_end_if_empty().filter(|_| self.redo.is_settled())
    }

    /// The same, whether or not the superblocks say that a log that was replayed starts there.
    pub(super) fn log_end_if_empty(&self) -> Option<u64> {
        let redo = &self.redo;
        let drained = redo.is_serving()
            && redo.journal.is_drained()
            && redo.journal.in_flight() == 0
            && redo.open.is_empty()
            && redo.overlay.is_empty()
            && redo.pages.changed_pages() == 0
            && redo.checkpoint.is_over();
        drained.then(|| redo.journal.next())
    }

    /// Ends everything that waits for the log: the array has failed, and what its members hold then decides.
    pub(in crate::array) fn log_failed(&mut self) {
        self.end_page_trials();
        if self.core.stop.stopping.is_none() {
            // Nothing says that the array is quiet before its log was read.
            self.supers.unmark_clean();
        }
        let redo = &mut self.redo;
        redo.lives += 1;
        if redo.is_serving() {
            self.startup.note_failure(redo.journal.durable(), redo.journal.acknowledged());
        }
        let waiting = redo.take_all_waiting();
        let mut pieces = redo.take_flushes();
        self.core.load.client_ops -= pieces.len();
        pieces.extend(self.startup.take_queued().into_iter().map(|(piece, ..)| piece));
        redo.life = Life::Starting;
        self.startup.end_recovery();
        redo.unsettled = None;
        redo.rounds.round = None;
        self.passes.forget_owed_pages();
        self.core.work.ready.extend(waiting);
        let patient = std::mem::take(&mut self.core.work.patient);
        self.core.work.ready.extend(patient.into_iter().map(|(_, key)| key));
        for piece in pieces {
            self.core.done(piece, Err(ClientError::Io));
        }
    }
}

impl Core {
    /// Whether whole stripes go to free slots.
    pub(in crate::array) fn full_stripe_fresh(&self) -> bool {
        self.config.full_stripe == crate::array::FullStripe::Fresh
    }

    pub(in crate::array) fn notice_repair(
        &mut self,
        member: MemberIndex,
        slot: SlotIndex,
        row: usize,
        rows: usize,
    ) {
        let text = format!(
            "{} of member {member} from row {row} of slot {slot} on {} wrong or unreadable; {} rewritten",
            Count::of(rows, "block"),
            Count::of(rows, "block").were(),
            if rows == 1 { "it is" } else { "they are" }
        );
        self.notice(NoticeKind::BlocksRepaired, NoticeLevel::Warning, Some(member), text);
    }

    /// The member that has a column of a slot.
    pub(in crate::array) fn member_at(&self, slot: SlotIndex, column: usize) -> MemberIndex {
        self.map.member_of(slot, ColumnIndex(column as u16))
    }

    /// Where in the volume the first of these blocks of a stripe lies; blocks of parity are those of its
    /// start.
    pub(in crate::array) fn offset_of(&self, stripe: StripeIndex, missing: &[Missing]) -> VolumeOffset {
        let data = missing.iter().filter(|block| block.column < self.map.k);
        let within = data.map(|block| block.column * self.map.chunk + block.row * ROW_BYTES as usize).min();
        VolumeOffset(stripe.0 * self.map.stripe_bytes() as u64 + within.unwrap_or(0) as u64)
    }
}
