//! Reads of logged arrays: under a shared lock on the rows, every block verified. Blocks that are wrong are
//! decoded and rewritten.

use crate::array::base::lock::{LockKey, LockMode};
use crate::array::blocks::{BlockName, Missing, Why};
use crate::array::client::fetch::{Fetch, FetchRules, Fetched};
use crate::array::pages::hold::{PageHold, PagesHeld};
use crate::array::{Array, ClientError, Core, Flow, Inflight, Op, StripeReply, StripeRequestId};
use crate::block_io::{BufMut, IoFault, IoValue};
use crate::codec::CodedColumns;
use crate::units::{ROW_BYTES, SlotIndex, StripeIndex};
use std::ops::Range;

const BLOCK: usize = ROW_BYTES as usize;

/// Most blocks set aside that one read looks for on their members: a read of 1 MiB has no more.
const REPAID_AT_ONCE: usize = 256;

/// How often a read looks again for blocks that it could not have. Faults that follow one another quickly,
/// none of them more than the array survives, may all have met its first look.
const LOOKS_AGAIN: u32 = 2;

pub(in crate::array) struct LoggedRead {
    /// None: no client waits for it; it looks at one block of a column again.
    id: Option<StripeRequestId>,
    looks_at: Option<(usize, usize)>,
    stripe: StripeIndex,
    /// Where the stripe was when the lock was granted.
    slot: SlotIndex,
    target: ReadTarget,
    life: u64,
    stage: Stage,
    pages: PageHold,
    fetch: Fetch,
    repairing: usize,
    answered: bool,
    /// Whether its blocks that are set aside were read again on their own members. That is done once.
    has_repaid: bool,
    looked_again: u32,
    /// Whether the block that it looks at is set aside: its own member is asked for it next.
    is_aside: bool,
}

/// The part of the stripe that is read, and where it goes.
struct ReadTarget {
    offset: usize,
    /// The client's buffer, while nothing reads into it.
    buf: Option<BufMut>,
    len: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Lock,
    Pages,
    /// It has failed; what was read early is still under way.
    Drain,
    Fetch,
    Repair,
    /// Waits until blocks that are set aside have been read again.
    Repay,
}

impl Array {
    pub(in crate::array) fn start_logged_read(
        &mut self,
        id: StripeRequestId,
        stripe: StripeIndex,
        offset: usize,
        buf: BufMut,
    ) {
        self.core.load.client_ops += 1;
        self.pages.note_read(&mut self.core, stripe, offset, buf.len());
        self.begin_logged_read(Some(id), None, stripe, offset, buf);
    }

    /// Tells which stripes of a run hold no data.
    pub(in crate::array) fn logged_extents(&mut self, id: StripeRequestId, first: StripeIndex, count: u64) {
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

    /// Reads a block again that could not be had. The list of damage shows the result. `waiter` is advanced
    /// when the read is over.
    pub(in crate::array) fn look_again(&mut self, block: BlockName, waiter: Option<usize>) {
        if !self.looks.begin(block, waiter) {
            return;
        }
        let (stripe, column, row) = block;
        self.looks.read_began();
        let buf = self.core.pool.alloc(BLOCK);
        let (column, row) = (usize::from(column), row as usize);
        self.begin_logged_read(
            None,
            Some((column, row)),
            stripe,
            column * self.core.map.chunk + row * BLOCK,
            buf,
        );
    }

    fn begin_logged_read(
        &mut self,
        id: Option<StripeRequestId>,
        looks_at: Option<(usize, usize)>,
        stripe: StripeIndex,
        offset: usize,
        buf: BufMut,
    ) {
        let slot = SlotIndex(stripe.0);
        let mut read = Box::new(LoggedRead {
            id,
            looks_at,
            stripe,
            slot,
            target: ReadTarget { offset, len: buf.len(), buf: Some(buf) },
            life: self.redo.lives(),
            stage: Stage::Lock,
            pages: PageHold::default(),
            fetch: Fetch::new(slot, FetchRules::default()),
            repairing: 0,
            answered: false,
            has_repaid: false,
            looked_again: 0,
            is_aside: false,
        });
        let rows = self.core.rows_of_read(&read);
        let key = self.ops.insert(Op::Busy);
        let flow = if self.core.locks.acquire(LockKey::Stripe(stripe), rows, LockMode::Shared, key) {
            self.advance_logged_read(key, &mut read)
        } else {
            Flow::Wait
        };
        self.put_back(key, Op::LoggedRead(read), flow);
    }

    pub(in crate::array) fn advance_logged_read(&mut self, key: usize, read: &mut LoggedRead) -> Flow {
        if matches!(read.stage, Stage::Fetch | Stage::Repair | Stage::Drain) {
            return Flow::Wait;
        }
        if self.core.is_failed() || read.life != self.redo.lives() {
            return self.fail_logged_read(key, read);
        }
        if read.stage == Stage::Repay {
            if self.is_repaying(key) {
                return Flow::Wait;
            }
            read.stage = Stage::Lock;
            let rows = self.core.rows_of_read(read);
            self.core.locks.acquire(LockKey::Stripe(read.stripe), rows, LockMode::Shared, key);
        }
        if read.stage == Stage::Lock {
            if !self.core.locks.is_held(LockKey::Stripe(read.stripe), key) {
                return Flow::Wait;
            }
            read.slot = self.pages.map_entry(read.stripe).slot;
            if !self.pages.holds_data(read.stripe) {
                // The stripe is known to hold zeroes, whatever was damaged before it was discarded.
                self.damage.forget_stripe(read.stripe);
                let buf = read.target.buf.take().expect("nothing reads into it yet");
                let whole = 0..buf.len();
                return self.end_logged_read(key, read, Ok(StripeReply::Sparse(buf, vec![whole])));
            }
            read.stage = Stage::Pages;
            let rows = self.core.rows_of_read(read);
            let pages = self.pages.hash_pages(read.slot, rows.start / BLOCK..rows.end / BLOCK);
            read.pages = match read.looks_at {
                None => PageHold::of_client(pages, read.life),
                Some(_) => PageHold::new(pages, read.life),
            };
        }
        match self.hold_pages(key, &mut read.pages) {
            PagesHeld::Wait => {
                if read.looks_at.is_none() && !read.fetch.is_early() {
                    read.fetch = Fetch::new(read.slot, FetchRules::default());
                    self.core.want_columns(read);
                    self.fetch_early(key, &mut read.fetch);
                }
                Flow::Wait
            }
            PagesHeld::Unreadable => {
                if let Some((column, row)) = read.looks_at {
                    self.damage.note(read.stripe, &[Missing { column, row, why: Why::Unreadable }]);
                }
                self.fail_logged_read(key, read)
            }
            PagesHeld::All { .. } => self.fetch_for_read(key, read),
        }
    }

    fn fetch_for_read(&mut self, key: usize, read: &mut LoggedRead) -> Flow {
        read.stage = Stage::Fetch;
        if let Some((column, row)) = read.looks_at {
            let was_counted = self.damage.is_expected((read.stripe, column as u16, row as u32));
            let rules = FetchRules { background: true, is_look: true, was_counted, ..FetchRules::default() };
            read.fetch = Fetch::new(read.slot, rules);
            let buf = read.target.buf.take().expect("nothing reads into it yet");
            read.fetch.want(column, row..row + 1, buf);
            return match self.fetch(key, &mut read.fetch) {
                Fetched::Wait => Flow::Wait,
                Fetched::Done => self.answer_logged_read(key, read),
            };
        }
        let fetched = if read.fetch.is_early() {
            if read.fetch.is_reading() {
                return Flow::Wait;
            }
            self.judge_early(key, &mut read.fetch)
        } else {
            read.fetch = Fetch::new(read.slot, FetchRules::default());
            self.core.want_columns(read);
            self.fetch(key, &mut read.fetch)
        };
        match fetched {
            Fetched::Wait => Flow::Wait,
            Fetched::Done => self.answer_logged_read(key, read),
        }
    }

    pub(in crate::array) fn logged_read_io(
        &mut self,
        key: usize,
        read: &mut LoggedRead,
        item: usize,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        if read.stage == Stage::Repair {
            read.repairing -= 1;
            read.repairing += self.mend_io(key, &mut read.fetch, item, &entry, result).begun;
            return if read.repairing > 0 { Flow::Wait } else { self.release_logged_read(key, read) };
        }
        if read.stage == Stage::Drain {
            read.fetch.drop_one();
            return self.fail_logged_read(key, read);
        }
        let mut fetched = self.fetch_io(key, &mut read.fetch, item, entry, result);
        if read.stage == Stage::Fetch && read.fetch.is_early() && !read.fetch.is_reading() {
            fetched = self.judge_early(key, &mut read.fetch);
        }
        match fetched {
            Fetched::Wait => Flow::Wait,
            Fetched::Done => self.answer_logged_read(key, read),
        }
    }

    /// Takes the end of a job that has verified what was read.
    pub(in crate::array) fn logged_read_coded(
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
        if self.core.is_failed() || read.life != self.redo.lives() {
            return self.end_logged_read(key, read, Err(ClientError::Io));
        }
        if !read.fetch.missing().is_empty() {
            return self.read_missing(key, read);
        }
        if let Some((column, row)) = read.looks_at {
            self.damage.forget((read.stripe, column as u16, row as u32));
            self.looks.found();
            read.stage = Stage::Repair;
            read.repairing = self.send_repairs(key, &mut read.fetch);
            return if read.repairing > 0 { Flow::Wait } else { self.release_logged_read(key, read) };
        }
        self.forget_damage(read.stripe, read.target.offset, read.target.len);
        let aligned = read.target.offset.is_multiple_of(BLOCK) && read.target.len.is_multiple_of(BLOCK);
        let unwritten = read.fetch.take_unwritten();
        let mut zeroes: Vec<Range<usize>> = Vec::new();
        let parts = read.fetch.take();
        let mut reply = if aligned { None } else { read.target.buf.take() };
        let mut at = 0;
        for (range, (column, rows, part)) in
            self.core.map.columns(read.target.offset, read.target.len).zip(parts)
        {
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
                    Some(whole) => reply = Some(self.core.join(whole, part)),
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
        self.core.load.client_ops -= 1;
        let reply =
            if zeroes.is_empty() { StripeReply::Data(reply) } else { StripeReply::Sparse(reply, zeroes) };
        if let Some(id) = read.id {
            self.core.done(id, Ok(reply));
        }
        read.stage = Stage::Repair;
        read.repairing = self.send_repairs(key, &mut read.fetch);
        if read.repairing > 0 { Flow::Wait } else { self.release_logged_read(key, read) }
    }

    /// Handles blocks that cannot be had. Everything is read again where that may help. Blocks that are set
    /// aside are looked for once on their own members; the rest is an error.
    fn read_missing(&mut self, key: usize, read: &mut LoggedRead) -> Flow {
        let missing = read.fetch.take_missing();
        // A repair counts parity as well.
        let columns = if self.repair.is_some() { self.core.map.width() } else { self.core.map.k };
        let all = read.fetch.missing_data(&missing, columns);
        if read.looks_at.is_some() {
            self.damage.note(read.stripe, &all);
            read.is_aside = missing.iter().any(|block| block.why == Why::SetAside);
            return self.release_logged_read(key, read);
        }
        let may_change = |why| matches!(why, Why::Unreadable | Why::SetAside);
        let is_unread = missing.iter().any(|block| block.why == Why::Unreadable);
        if is_unread
            && missing.iter().all(|block| may_change(block.why))
            && read.looked_again < LOOKS_AGAIN
            && !read.fetch.host_is_short()
            && !self.core.stop.hurried
        {
            read.looked_again += 1;
            self.core.take_buffer_back(read);
            return self.fetch_for_read(key, read);
        }
        self.note_missing(read.stripe, read.slot, &all);
        let can_repay =
            missing.len() <= REPAID_AT_ONCE && !read.has_repaid && self.core.stop.stopping.is_none();
        if !can_repay || missing.iter().any(|block| block.why != Why::SetAside) {
            return self.end_logged_read(key, read, Err(ClientError::Io));
        }
        read.has_repaid = true;
        self.core.take_buffer_back(read);
        self.release_pages(&mut read.pages);
        self.core.unlock(LockKey::Stripe(read.stripe), key);
        read.stage = Stage::Repay;
        for block in missing {
            self.start_repay((read.stripe, block.column as u16, block.row as u32), Some(key));
        }
        Flow::Wait
    }

    /// Takes the blocks of a byte range that was read off the list of damage.
    fn forget_damage(&mut self, stripe: StripeIndex, offset: usize, len: usize) {
        if self.damage.is_empty() {
            return;
        }
        for part in self.core.map.columns(offset, len) {
            let rows = (part.range.start / BLOCK) as u32..part.range.end.div_ceil(BLOCK) as u32;
            self.damage.forget_rows(stripe, part.column.0, rows);
        }
    }

    /// Ends a read with an error, once nothing that it has begun early is under way.
    fn fail_logged_read(&mut self, key: usize, read: &mut LoggedRead) -> Flow {
        if read.fetch.is_reading() {
            read.stage = Stage::Drain;
            return Flow::Wait;
        }
        self.end_logged_read(key, read, Err(ClientError::Io))
    }

    fn end_logged_read(
        &mut self,
        key: usize,
        read: &mut LoggedRead,
        result: Result<StripeReply, ClientError>,
    ) -> Flow {
        if !read.answered {
            read.answered = true;
            if let Some(id) = read.id {
                self.core.load.client_ops -= 1;
                self.core.done(id, result);
            }
        }
        self.release_logged_read(key, read)
    }

    fn release_logged_read(&mut self, key: usize, read: &mut LoggedRead) -> Flow {
        if let Some((column, row)) = read.looks_at.take() {
            self.looks.read_ended();
            let block = (read.stripe, column as u16, row as u32);
            self.damage.looked_at(block);
            let waiters = self.looks.end(block);
            if read.is_aside && self.core.stop.stopping.is_none() {
                self.start_repay(block, waiters);
            } else {
                self.core.work.ready.extend(waiters);
            }
        }
        self.release_pages(&mut read.pages);
        if read.stage != Stage::Repay {
            self.core.unlock(LockKey::Stripe(read.stripe), key);
        }
        Flow::Finished
    }
}

impl Core {
    fn rows_of_read(&self, read: &LoggedRead) -> Range<usize> {
        match read.looks_at {
            Some((_, row)) => row * BLOCK..(row + 1) * BLOCK,
            None => self.rows_of(read.target.offset, read.target.len),
        }
    }

    /// Rows that a byte range of a stripe touches: whole blocks, in bytes within the chunk.
    pub(super) fn rows_of(&self, offset: usize, len: usize) -> Range<usize> {
        let (mut low, mut high) = (usize::MAX, 0);
        for part in self.map.columns(offset, len) {
            low = low.min(part.range.start / BLOCK * BLOCK);
            high = high.max(part.range.end.next_multiple_of(BLOCK));
        }
        low..high
    }

    /// Wants what the client asked for from the columns that have it.
    fn want_columns(&self, read: &mut LoggedRead) {
        let aligned = read.target.offset.is_multiple_of(BLOCK) && read.target.len.is_multiple_of(BLOCK);
        for part in self.map.columns(read.target.offset, read.target.len) {
            let rows = part.range.start / BLOCK..part.range.end.div_ceil(BLOCK);
            // Whole blocks are read into the client's buffer, others beside it.
            let buf = match read.target.buf.as_mut().filter(|_| aligned) {
                Some(rest) => {
                    let tail = rest.split_off(part.range.len());
                    std::mem::replace(rest, tail)
                }
                None => self.pool.alloc(rows.len() * BLOCK),
            };
            read.fetch.want(usize::from(part.column.0), rows, buf);
        }
    }

    /// Makes the client's buffer whole again if it was split among the columns.
    fn take_buffer_back(&self, read: &mut LoggedRead) {
        let parts = read.fetch.take();
        if read.target.buf.as_ref().is_none_or(|buf| buf.len() < read.target.len) {
            read.target.buf =
                parts.into_iter().map(|(_, _, part)| part).reduce(|whole, part| self.join(whole, part));
        }
    }

    /// Joins two buffers that were one. A part that had to be read again into another buffer is copied.
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
}
