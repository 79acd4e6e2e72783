//! Reads of logged arrays: under a shared lock on the rows, every block verified, what is wrong decoded and rewritten.

use super::fetch::{Fetch, Fetched};
use super::lock::LockMode;
use super::page_hold::PageHold;
use super::{Array, ClientError, Flow, Inflight, Op, PieceId, SlotReply};
use crate::block_io::{BufMut, IoFault, IoValue};
use crate::codec::CodedColumns;
use crate::units::{ROW_BYTES, SlotIndex, StripeIndex};
use std::collections::BTreeSet;
use std::ops::Range;

const BLOCK: usize = ROW_BYTES as usize;

pub(super) struct LoggedRead {
    piece: PieceId,
    stripe: StripeIndex,
    /// Where the stripe was when the lock was granted.
    slot: SlotIndex,
    offset: usize,
    /// The client's buffer, while nothing reads into it.
    buf: Option<BufMut>,
    len: usize,
    life: u64,
    stage: Stage,
    pages: PageHold,
    fetch: Fetch,
    repairing: usize,
    answered: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Lock,
    Pages,
    Fetch,
    Repair,
}

impl Array {
    pub(super) fn start_logged_read(
        &mut self,
        piece: PieceId,
        stripe: StripeIndex,
        offset: usize,
        buf: BufMut,
    ) {
        self.client_ops += 1;
        let slot = SlotIndex(stripe.0);
        let mut read = Box::new(LoggedRead {
            piece,
            stripe,
            slot,
            offset,
            len: buf.len(),
            buf: Some(buf),
            life: self.redo().lives,
            stage: Stage::Lock,
            pages: PageHold::default(),
            fetch: Fetch::new(slot),
            repairing: 0,
            answered: false,
        });
        let rows = self.rows_of(offset, read.len);
        let key = self.ops.insert(Op::Busy);
        let flow = if self.locks.acquire(slot, rows, LockMode::Shared, key) {
            self.advance_logged_read(key, &mut read)
        } else {
            Flow::Wait
        };
        self.put_back(key, Op::LoggedRead(read), flow);
    }

    /// Rows, in bytes within the chunk and whole blocks, that a byte range of a stripe touches.
    pub(super) fn rows_of(&self, offset: usize, len: usize) -> Range<usize> {
        let (mut low, mut high) = (usize::MAX, 0);
        for part in self.map.columns(offset, len) {
            low = low.min(part.range.start / BLOCK * BLOCK);
            high = high.max(part.range.end.next_multiple_of(BLOCK));
        }
        low..high
    }

    pub(super) fn advance_logged_read(&mut self, key: usize, read: &mut LoggedRead) -> Flow {
        if matches!(read.stage, Stage::Fetch | Stage::Repair) {
            return Flow::Wait;
        }
        if self.is_failed() || read.life != self.redo().lives {
            return self.end_logged_read(key, read, Err(ClientError::Io));
        }
        if read.stage == Stage::Lock {
            if !self.locks.is_held(SlotIndex(read.stripe.0), key) {
                return Flow::Wait;
            }
            read.slot = self.slot_of(read.stripe);
            if !self.holds_data(read.stripe) {
                let buf = read.buf.take().expect("nothing reads into it yet");
                let whole = 0..buf.len();
                return self.end_logged_read(key, read, Ok(SlotReply::Sparse(buf, vec![whole])));
            }
            read.stage = Stage::Pages;
            let rows = self.rows_of(read.offset, read.len);
            let pages = self.hash_pages(read.slot, rows.start / BLOCK..rows.end / BLOCK);
            read.pages = PageHold::new(pages, read.life);
        }
        if !self.hold_pages(key, &mut read.pages) {
            return Flow::Wait;
        }
        self.fetch_for_read(key, read)
    }

    fn fetch_for_read(&mut self, key: usize, read: &mut LoggedRead) -> Flow {
        read.stage = Stage::Fetch;
        read.fetch = Fetch::new(read.slot);
        let aligned = read.offset.is_multiple_of(BLOCK) && read.len.is_multiple_of(BLOCK);
        for part in self.map.columns(read.offset, read.len).collect::<Vec<_>>() {
            let rows = part.range.start / BLOCK..part.range.end.div_ceil(BLOCK);
            // Whole blocks are read into the client's buffer, others beside it.
            let buf = match read.buf.as_mut().filter(|_| aligned) {
                Some(rest) => {
                    let tail = rest.split_off(part.range.len());
                    std::mem::replace(rest, tail)
                }
                None => self.pool.alloc(rows.len() * BLOCK),
            };
            read.fetch.want(usize::from(part.column.0), rows, buf);
        }
        match self.fetch(key, &mut read.fetch) {
            Fetched::Wait => Flow::Wait,
            Fetched::Done => self.answer_logged_read(key, read),
        }
    }

    pub(super) fn logged_read_io(
        &mut self,
        key: usize,
        read: &mut LoggedRead,
        item: usize,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        if read.stage == Stage::Repair {
            read.repairing -= 1;
            if let Err(fault) = result {
                self.write_fault(entry.member, entry.device, "rewrite of a wrong block", fault);
            }
            return if read.repairing > 0 { Flow::Wait } else { self.release_logged_read(key, read) };
        }
        match self.fetch_io(key, &mut read.fetch, item, entry, result) {
            Fetched::Wait => Flow::Wait,
            Fetched::Done => self.answer_logged_read(key, read),
        }
    }

    /// Takes the end of a job: what was read is verified.
    pub(super) fn logged_read_coded(
        &mut self,
        key: usize,
        read: &mut LoggedRead,
        coded: CodedColumns,
    ) -> Flow {
        match self.fetch_coded(key, &mut read.fetch, coded) {
            Fetched::Wait => Flow::Wait,
            Fetched::Done => self.answer_logged_read(key, read),
        }
    }

    fn answer_logged_read(&mut self, key: usize, read: &mut LoggedRead) -> Flow {
        if !read.fetch.lost.is_empty() || self.is_failed() || read.life != self.redo().lives {
            if !self.is_failed() {
                self.note_lost(read.stripe, read.slot, &read.fetch.lost);
            }
            return self.end_logged_read(key, read, Err(ClientError::Io));
        }
        let repairs = std::mem::take(&mut read.fetch.repairs);
        let aligned = read.offset.is_multiple_of(BLOCK) && read.len.is_multiple_of(BLOCK);
        let unwritten: BTreeSet<(usize, usize)> = read.fetch.unwritten.drain(..).collect();
        let mut zeroes: Vec<Range<usize>> = Vec::new();
        let parts = read.fetch.take();
        let mut reply = if aligned { None } else { read.buf.take() };
        let mut at = 0;
        for (range, (column, rows, part)) in self.map.columns(read.offset, read.len).zip(parts) {
            if aligned {
                if !unwritten.is_empty() {
                    let of_part = rows.clone().filter(|&row| unwritten.contains(&(column, row)));
                    for start in of_part.map(|row| at + (row - rows.start) * BLOCK) {
                        match zeroes.last_mut() {
                            Some(last) if last.end == start => last.end += BLOCK,
                            _ => zeroes.push(start..start + BLOCK),
                        }
                    }
                    at += part.len();
                }
                match reply.take() {
                    None => reply = Some(part),
                    Some(whole) => reply = Some(self.join(whole, part)),
                }
            } else if let Some(buf) = &mut reply {
                let start = range.range.start - rows.start * BLOCK;
                let len = range.range.len();
                buf[at..at + len].copy_from_slice(&part[start..start + len]);
                at += len;
            }
        }
        let reply = reply.expect("a read has at least one byte");
        read.answered = true;
        self.client_ops -= 1;
        let reply = if zeroes.is_empty() { SlotReply::Data(reply) } else { SlotReply::Sparse(reply, zeroes) };
        self.done(read.piece, Ok(reply));
        read.fetch.repairs = repairs;
        read.stage = Stage::Repair;
        read.repairing = self.send_repairs(key, &mut read.fetch);
        if read.repairing > 0 { Flow::Wait } else { self.release_logged_read(key, read) }
    }

    /// Joins two buffers that were one; a part that had to be read again elsewhere is copied.
    fn join(&self, mut whole: BufMut, part: BufMut) -> BufMut {
        match whole.try_unsplit(part) {
            Ok(()) => whole,
            Err(part) => {
                let mut joined = self.pool.alloc(whole.len() + part.len());
                joined[..whole.len()].copy_from_slice(&whole);
                joined[whole.len()..].copy_from_slice(&part);
                joined
            }
        }
    }

    fn end_logged_read(
        &mut self,
        key: usize,
        read: &mut LoggedRead,
        result: Result<SlotReply, ClientError>,
    ) -> Flow {
        if !read.answered {
            read.answered = true;
            self.client_ops -= 1;
            self.done(read.piece, result);
        }
        self.release_logged_read(key, read)
    }

    fn release_logged_read(&mut self, key: usize, read: &mut LoggedRead) -> Flow {
        self.release_pages(&mut read.pages);
        self.unlock(SlotIndex(read.stripe.0), key);
        Flow::Finished
    }
}
