//! What moves the log on, beside the superblocks, whose word it needs; and what the ends of its I/O say of members.

use crate::array::blocks::Missing;
use crate::array::log::permits::Permits;
use crate::array::log::settle::Settling;
use crate::array::{
    Array, ClientError, Core, Inflight, NoticeKind, NoticeLevel, StripeReply, StripeRequestId,
};
use crate::block_io::{IoFault, IoFaultKind, IoValue};
use crate::format::EpochStamp;
use crate::units::{ColumnIndex, Count, MemberIndex, ROW_BYTES, SlotIndex, StripeIndex, VolumeOffset};
use std::ops::Range;

impl Array {
    /// What the superblocks permit the log now.
    pub(in crate::array) fn permits(&self) -> Permits {
        let epoch = self.supers.epoch();
        Permits {
            epoch: EpochStamp { number: epoch.number, id: epoch.id },
            losses: self.supers.losses(),
            acknowledge: self.acknowledgements_allowed(),
            in_place: self.in_place_allowed(),
            write: self.supers.is_durably_dirty() && self.in_place_allowed(),
            has_asked: false,
            has_issued: false,
        }
    }

    /// Takes what the log has to tell the superblocks.
    fn heed(&mut self, permits: &Permits) {
        if permits.has_asked {
            self.supers.want_dirty();
        }
        if permits.has_issued {
            self.supers.note_batch();
        }
    }

    /// Moves the log on as far as it goes.
    pub(super) fn pump_redo(&mut self) {
        if self.core.is_stopped() {
            return;
        }
        if !self.redo.is_serving() {
            self.pump_startup();
            return;
        }
        if self.core.is_failed() {
            return;
        }
        self.end_hold();
        let mut permits = self.permits();
        self.redo.pump_batches(&mut self.core, &mut permits);
        self.heed(&permits);
        self.pump_settling();
        let mut permits = self.permits();
        self.redo.pump_rest(&mut self.core, &mut self.pages, &mut permits);
        self.heed(&permits);
    }

    /// Moves the end of a replay on.
    fn pump_settling(&mut self) {
        match self.redo.settling(&self.pages) {
            Settling::StartAnew(end) if self.acknowledgements_allowed() => {
                let start = self.start_log_anew(end);
                self.redo.starts_anew(start);
                self.pump_supers();
            }
            Settling::Record(start)
                if self.supers.durable_log_start() == Some(start) && self.acknowledgements_allowed() =>
            {
                self.redo.settled(&mut self.core);
            }
            _ => {}
        }
    }

    /// Tick: a quiet log is put in place, and told to be so.
    pub(super) fn checkpoint_when_idle(&mut self) {
        let mut permits = self.permits();
        self.redo.checkpoint_when_idle(&mut self.core, &self.pages, &mut permits);
        self.heed(&permits);
    }

    pub(super) fn piece_io(&mut self, sequence: u64, entry: Inflight, result: Result<IoValue, IoFault>) {
        if let Err(fault) = result {
            self.write_fault(entry.member, entry.device, "write to the redo log", fault);
        }
        self.redo.piece_done(sequence);
    }

    pub(super) fn round_io(&mut self, entry: Inflight, result: Result<IoValue, IoFault>) {
        if let Err(fault) = result {
            self.flush_fault(entry.member, entry.device, fault);
        }
        let mut permits = self.permits();
        self.redo.flush_done(&mut self.core, &mut self.pages, &mut permits);
        self.heed(&permits);
    }

    pub(super) fn in_place_io(&mut self, entry: Inflight, result: Result<IoValue, IoFault>) {
        if let Err(fault) = result {
            self.write_fault(entry.member, entry.device, "write", fault);
        }
        self.redo.in_place_done();
    }

    pub(super) fn punch_io(&mut self, entry: Inflight, result: Result<IoValue, IoFault>) {
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
        self.redo.in_place_done();
    }

    /// Lets operations look again whether there is room.
    pub(in crate::array) fn wake_waiting_for_room(&mut self) {
        self.redo.wake_waiting_for_room(&mut self.core);
    }

    /// Where a stripe is.
    pub(in crate::array) fn slot_of(&self, stripe: StripeIndex) -> SlotIndex {
        self.pages.map_entry(stripe).slot
    }

    /// Whether a stripe holds data; otherwise it reads as zeroes.
    pub(in crate::array) fn holds_data(&self, stripe: StripeIndex) -> bool {
        self.pages.holds_data(stripe)
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
        self.pages.hash_pages(slot, rows)
    }

    /// Which stripes of a run hold nothing.
    pub(super) fn logged_extents(&mut self, id: StripeRequestId, first: StripeIndex, count: u64) {
        let mut runs: Vec<(u64, bool)> = Vec::new();
        for stripe in (first.0..first.0 + count).map(StripeIndex) {
            let hole = !self.pages.holds_data(stripe);
            match runs.last_mut() {
                Some((stripes, last)) if *last == hole => *stripes += 1,
                _ => runs.push((1, hole)),
            }
        }
        self.core.done(id, Ok(StripeReply::Holes(runs)));
    }

    /// The sequence of the next batch, when the log is empty and everything is in place and durable, copies of pages that
    /// have to be written again included.
    pub(in crate::array) fn drained_log(&self) -> Option<u64> {
        self.needless_log().filter(|_| self.pages.store().dirty_pages() == 0)
    }

    /// See [`crate::array::log::Redo::needless_end`].
    pub(in crate::array) fn needless_log(&self) -> Option<u64> {
        self.redo.needless_end(&self.pages)
    }

    /// Ends everything that waits for the log: the array has failed, and what its members hold then decides.
    pub(in crate::array) fn log_failed(&mut self) {
        self.pages.end_trials(&mut self.core);
        if self.core.stop.stopping.is_none() {
            // Nothing says that the array is quiet before its log was read.
            self.supers.unmark_clean();
        }
        if self.redo.is_serving() {
            let (durable, acknowledged) = self.redo.durable_and_acknowledged();
            self.startup.note_failure(durable, acknowledged);
        }
        let (waiting, mut ended) = self.redo.fail();
        self.core.load.client_ops -= ended.len();
        ended.extend(self.startup.take_queued().into_iter().map(|(id, ..)| id));
        self.startup.end_recovery();
        self.passes.forget_owed_pages();
        self.core.work.ready.extend(waiting);
        let patient = std::mem::take(&mut self.core.work.patient);
        self.core.work.ready.extend(patient.into_iter().map(|(_, key)| key));
        for id in ended {
            self.core.done(id, Err(ClientError::Io));
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
