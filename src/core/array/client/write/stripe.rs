//! Writes of whole stripes. Each goes to a free slot: it is coded and hashed as a job, written once, and made
//! live by a record.

use crate::array::Core;
use crate::array::base::lock::{LockKey, LockMode};
use crate::array::client::write::{Flow, LoggedWrite, Stage, StripeWrite, Work};
use crate::array::pages::hold::PageHold;
use crate::array::{
    Array, ClientError, FullStripe, Inflight, NoticeKind, NoticeLevel, Owner, StripeRequestId,
};
use crate::block_io::{Buf, BufMut, IoFault, IoFaultKind, IoOp, IoValue};
use crate::codec::{CodecJob, CodedColumns, Column, Outputs};
use crate::format::{FreshRecord, LogRecord};
use crate::units::{ROW_BYTES, StripeIndex};

const BLOCK: usize = ROW_BYTES as usize;

impl Array {
    /// Starts the write of a whole stripe that is given in parts, one after the other.
    pub(in crate::array) fn start_stripe_write(
        &mut self,
        id: StripeRequestId,
        stripe: StripeIndex,
        parts: Vec<Buf>,
        fua: bool,
    ) {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        assert_eq!(bytes, self.core.map.stripe_bytes(), "the parts of a whole stripe");
        let work = match self.stripes_go_to_free_slots() {
            true => Work::Stripe { columns: self.core.cut_into(self.core.map.chunk, &parts) },
            false => Work::Data { offset: 0, data: self.core.cut_into(bytes, &parts).remove(0) },
        };
        self.start_logged(Some(id), stripe, work, fua);
    }

    /// Finds the slot that a whole stripe goes to.
    pub(super) fn choose_slot(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        self.tell_log();
        let may_write = self.redo.may_write();
        self.hear_log();
        if !may_write {
            self.core.work.gated.push(key);
            return Flow::Wait;
        }
        let entry = self.pages.map_entry(write.stripe);
        // The slot of a stripe that never held anything is as good as a free one.
        let target = if entry.epoch == 0 && !entry.holds_data {
            Some(entry.slot)
        } else if write.task.asked.is_some() && !self.has_slots_to_spare() {
            // Others that came at the same time have taken them.
            self.goes_through_log(key, write);
            return Flow::Wait;
        } else {
            self.pages.take_free_slot()
        };
        let Some(target) = target else {
            self.redo.wait_for_slot(key);
            return Flow::Wait;
        };
        write.whole.target = Some(target);
        write.pages =
            PageHold::of_client(self.pages.hash_pages(target, 0..self.core.map.chunk / BLOCK), write.life);
        write.stage = Stage::SlotLock;
        let lock = LockKey::Slot(target);
        self.core.locks.acquire(lock, 0..self.core.map.chunk, LockMode::Exclusive, key);
        Flow::Wait
    }

    /// Has the stripe coded and hashed, once.
    pub(super) fn code_stripe(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        let (k, chunk) = (self.core.map.k, self.core.map.chunk);
        let columns: Vec<Buf> = match &write.task.work {
            Work::Data { data, .. } => (0..k).map(|c| data.slice(c * chunk..(c + 1) * chunk)).collect(),
            Work::Stripe { columns } => columns.clone(),
            Work::Discard { .. } | Work::Repay { .. } => unreachable!("a whole stripe has data"),
        };
        // The pages load while the job runs.
        self.hold_pages(key, &mut write.pages);
        let bytes = self.core.map.width() * chunk;
        self.redo.begin_stripe(bytes);
        write.stage = Stage::Code;
        if let Some((outputs, hashes)) = write.whole.coded.take() {
            let inputs = columns.into_iter().map(Column::Shared).collect();
            return self.stripe_coded(key, write, CodedColumns { inputs, outputs, hashes });
        }
        let work = CodecJob {
            transform: Some(self.core.shape.encoding.clone()),
            hasher: Some(self.pages.log_hasher()),
            inputs: columns.into_iter().map(Column::Shared).collect(),
            outputs: Outputs::Into((0..self.core.map.m).map(|_| self.core.pool.alloc(chunk)).collect()),
        };
        self.core.give_away(key, work, self.core.client_urgency());
        Flow::Wait
    }

    /// Writes the stripe, once.
    pub(in crate::array) fn stripe_coded(
        &mut self,
        key: usize,
        write: &mut LoggedWrite,
        coded: CodedColumns,
    ) -> Flow {
        assert_eq!(write.stage, Stage::Code, "a stripe is coded once");
        let Some(target) = write.whole.target else { unreachable!("a whole stripe has a slot") };
        write.stage = Stage::Stripe;
        if !self.core.is_failed() && write.life == self.redo.lives() {
            let columns = coded.inputs.into_iter().map(Column::into_shared);
            let images = (0..).zip(columns.chain(coded.outputs.into_iter().map(BufMut::freeze))).collect();
            let (stripe, old_slot, mut hashes) = (write.stripe, write.slot, coded.hashes);
            if !write.whole.along.agrees(&mut hashes) {
                // Something has changed it in memory.
                self.redo.end_stripe();
                return match self.goes_through_log(key, write) {
                    true => self.advance_logged_write(key, write),
                    false => unreachable!("only a part takes the rest of its stripe along"),
                };
            }
            let record = FreshRecord { stripe, slot: target, old_slot, hashes };
            write.records = vec![(LogRecord::Fresh(record), images)];
            let rows = self.core.map.chunk / BLOCK;
            for column in (0..self.core.map.width()).filter(|c| !write.whole.along.is_unwritten(*c, rows)) {
                let member = self.core.member_at(target, column);
                for device in self.core.targets(member, target).collect::<Vec<_>>() {
                    write.whole.writes.push(StripeWrite { member, device, column, retried: false });
                }
            }
            for item in 0..write.whole.writes.len() {
                self.core.send_stripe_write(key, write, item);
            }
            if write.whole.pending > 0 {
                return Flow::Wait;
            }
        }
        let flow = self.stripe_written(key, write);
        if flow == Flow::Finished { flow } else { self.advance_logged_write(key, write) }
    }

    pub(super) fn stripe_written(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        if write.life == self.redo.lives() {
            self.redo.end_stripe();
        }
        if self.core.is_failed() || write.life != self.redo.lives() {
            return self.end_logged_write(key, write, Err(ClientError::Io));
        }
        if let Some(error) = write.whole.short {
            if self.core.stop.hurried {
                return self.end_logged_write(key, write, Err(ClientError::Stopping));
            }
            if self.goes_through_log(key, write) {
                self.core.note_no_room_for_slots();
                return Flow::Wait;
            }
            let text = format!("a whole stripe could not be written ({error}); nothing of it was changed");
            self.core.notice(NoticeKind::WriteFailed, NoticeLevel::Error, None, text);
            return self.end_logged_write(key, write, Err(error));
        }
        write.stage = Stage::Join;
        Flow::Wait
    }

    /// Takes the end of a member's write of its column.
    pub(super) fn stripe_io(
        &mut self,
        key: usize,
        write: &mut LoggedWrite,
        item: usize,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        write.whole.pending -= 1;
        if let Err(fault) = result {
            let retry = fault.kind == IoFaultKind::Medium && !write.whole.writes[item].retried;
            if fault.kind.passes() && self.core.find_device(entry.device).is_some() {
                let is_full =
                    fault.kind == IoFaultKind::NoSpace || write.whole.short == Some(ClientError::NoSpace);
                write.whole.short = Some(if is_full { ClientError::NoSpace } else { ClientError::Io });
            } else if retry && self.core.find_device(entry.device).is_some() {
                write.whole.writes[item].retried = true;
                self.core.send_stripe_write(key, write, item);
            } else {
                self.write_fault(entry.member, entry.device, "write", fault);
            }
        }
        if write.whole.pending > 0 {
            return Flow::Wait;
        }
        let flow = self.stripe_written(key, write);
        if flow == Flow::Finished { flow } else { self.advance_logged_write(key, write) }
    }
}

impl Core {
    /// Cuts bytes that are given in parts, one after the other, into pieces of `len` bytes. A piece that lies
    /// in several parts is copied.
    pub(super) fn cut_into(&self, len: usize, parts: &[Buf]) -> Vec<Buf> {
        let mut pieces = Vec::new();
        let mut joined: Option<(BufMut, usize)> = None;
        for part in parts {
            let mut at = 0;
            while at < part.len() {
                let rest = part.len() - at;
                if joined.is_none() && rest >= len {
                    pieces.push(part.slice(at..at + len));
                    at += len;
                    continue;
                }
                let (mut piece, filled) = joined.take().unwrap_or_else(|| (self.pool.alloc(len), 0));
                let count = rest.min(len - filled);
                piece[filled..filled + count].copy_from_slice(&part[at..at + count]);
                at += count;
                if filled + count == len {
                    pieces.push(piece.freeze());
                } else {
                    joined = Some((piece, filled + count));
                }
            }
        }
        pieces
    }

    /// Whether whole stripes go to free slots.
    pub(super) fn full_stripe_fresh(&self) -> bool {
        self.config.full_stripe == FullStripe::Fresh
    }

    pub(super) fn send_stripe_write(&mut self, key: usize, write: &mut LoggedWrite, item: usize) {
        let StripeWrite { member, device, column, .. } = write.whole.writes[item];
        let (Some(target), Some((_, images))) = (write.whole.target, write.records.first()) else { return };
        let buf = images[column].1.clone();
        let offset = self.map.device_offset(self.shape.data_offset, target, 0);
        write.whole.pending += 1;
        self.submit_io(Owner::Op { key, item }, member, device, IoOp::Write { offset, buf, fua: false });
    }
}
