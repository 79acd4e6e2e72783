//! Commits: chunks get their places, records their entries, and segments that hold nothing are given up.
//! Rules J1, J2, K2 and K3.
//!
//! While entries are under way, what comes gathers. Chunks for a whole segment are written to one at once;
//! what is left when nothing is under way goes into the entry of the journal, or, if it is more than that
//! should hold, into a segment with room left over.

use super::store::RESERVE;
use super::work::{Body, Filling, Found, Op, WriteStage};
use super::{CasVolume, Purpose};
use crate::array::StripeRequest;
use crate::block_io::Buf;
use crate::format::cas::{CAS_BLOCK_BYTES, CasRecord, ChunkId, SegmentEntry, SegmentIndex};
use crate::units::StripeIndex;
use crate::volume::api::ClientError;

/// Most bytes of records and chunks that gather while entries are under way.
const GATHER_BYTES: usize = 128 << 10;
/// Most chunks in an entry of the journal, whatever the size of a segment.
const INLINE_MAX: usize = 64;

/// Where chunks that have no place would lie, one after another from a block of a segment on.
struct Places<'a> {
    segment: SegmentIndex,
    first: u32,
    ids: &'a [ChunkId],
}

impl Places<'_> {
    fn of(&self, found: Found) -> Found {
        let Found::Pending(id) = found else { return found };
        let at = self.ids.iter().position(|other| *other == id).expect("all without a place are among them");
        Found::Placed(id, self.segment, self.first + at as u32)
    }
}

impl CasVolume {
    /// Whether so many more blocks may be written.
    pub(super) fn has_room_for(&self, blocks: u64) -> bool {
        let taken = self.store.segments.metadata() + self.store.journal.segments() + 4 + 2 * RESERVE;
        let segments = (self.facts.segments as usize).saturating_sub(taken) as u64;
        let waiting = self.work.placing.len() as u64;
        let whole = u64::from(self.facts.segment_blocks);
        // A segment that is nearly full is no victim.
        segments * whole * 15 / 16 >= self.store.live + waiting + blocks
    }

    /// Writes what has gathered, if it is its turn.
    pub(super) fn commit(&mut self) {
        self.give_up_segments();
        let whole = self.facts.segment_blocks as usize;
        while self.work.pending.len() >= whole && self.cut_segment(whole) {}
        if !self.work.pending.is_empty() && self.work.filling.is_empty() && self.store.journal.is_idle() {
            let most = (whole / 2).min(INLINE_MAX);
            let waiting = self.work.pending.len();
            if waiting <= most && self.place_inline() {
                // Others come later.
            } else if !self.cut_segment(waiting.min(whole)) && self.is_full() {
                self.refuse_pending();
            }
        }
        let journal = &self.store.journal;
        if !journal.is_open_empty() && (journal.is_idle() || journal.gathered() >= GATHER_BYTES) {
            self.write_entry();
        }
    }

    /// Writes the entry that gathers. False: it cannot be written now.
    pub(super) fn write_entry(&mut self) -> bool {
        if !self.store.journal.may_write() {
            return false;
        }
        if self.store.journal.is_open_empty() {
            return false;
        }
        self.write_entry_even_if_empty();
        true
    }

    /// Writes the entry that gathers, which may have no records.
    pub(super) fn write_entry_even_if_empty(&mut self) {
        let entry = self.store.journal.close(&self.pool);
        let (stripe, offset) = (StripeIndex(entry.segment.0.into()), entry.block as usize * CAS_BLOCK_BYTES);
        let data = entry.bytes.clone();
        let request = StripeRequest::Write { stripe, offset, data, fua: false };
        self.ask(Purpose::Entry(entry.sequence, stripe, offset, entry.bytes), request);
    }

    /// Makes room for records and chunks in the entry that gathers. False: there is none now.
    pub(super) fn make_room(&mut self, record_bytes: usize, chunks: usize) -> bool {
        loop {
            if self.store.journal.fits(record_bytes, chunks) && !self.store.journal.needs_segment() {
                return true;
            }
            if !self.store.journal.is_open_empty() {
                if !self.write_entry() {
                    return false;
                }
                continue;
            }
            let Some(record) = self.open_next(0, SegmentEntry::JOURNAL) else { return false };
            let CasRecord::Open { segment: after, .. } = record else { unreachable!("it opens a segment") };
            let sequence = self.store.journal.sequence();
            self.store.apply(sequence, &record).expect("a free segment is opened");
            self.store.journal.turn_over(after);
        }
    }

    /// Takes a free segment, which the record opens. None: there is none, or pages that the record needs are
    /// being read.
    pub(super) fn open_next(&mut self, reserve: usize, kind: u8) -> Option<CasRecord> {
        let segment = self.store.segments.next(reserve)?;
        let record = CasRecord::Open { segment, kind };
        let missing = self.missing_for(std::slice::from_ref(&record));
        if !missing.is_empty() {
            missing.into_iter().for_each(|name| self.load_page(name));
            return None;
        }
        self.store.segments.take(reserve)?;
        Some(record)
    }

    /// Whether nothing that is under way will free a segment.
    fn is_full(&mut self) -> bool {
        let store = &self.store;
        let is_loading = store.pages.facts().loading > 0;
        if is_loading || !store.journal.is_idle() || !store.empty.is_empty() || !self.checkpoint.is_idle() {
            return false;
        }
        if !self.compaction.is_idle_at(store.journal.sequence()) {
            return false;
        }
        // A root frees what only the older one needs.
        if self.checkpoint.newest < store.journal.sequence() {
            self.checkpoint.want();
            return false;
        }
        true
    }

    /// Ends all writes that wait for a place with an error.
    fn refuse_pending(&mut self) {
        while let Some(&(key, _)) = self.work.pending.front() {
            self.end_write(key, Some(ClientError::NoSpace));
        }
    }

    /// Writes so many chunks to a free segment. False: there is none.
    fn cut_segment(&mut self, count: usize) -> bool {
        let record_bytes = CasRecord::Open { segment: SegmentIndex(0), kind: 0 }.bytes();
        if self.store.segments.free() <= RESERVE / 2 || !self.make_room(record_bytes, 0) {
            return false;
        }
        let Some(record) = self.open_next(RESERVE / 2, SegmentEntry::DATA) else { return false };
        let CasRecord::Open { segment, .. } = record else { unreachable!("it opens a segment") };
        self.store.join(record);
        let pending: Vec<(usize, usize)> = self.work.pending.drain(..count).collect();
        let mut chunks = Vec::with_capacity(count);
        for (key, at) in pending {
            let block = &self.blocks_of_write(key)[at];
            chunks.push((block.hash, block.data.clone()));
        }
        // Held until the chunks have their places.
        self.store.segments.hold(segment, 1);
        let filling = self.work.filling.insert(Filling { segment, chunks });
        let request = self.work.filling[filling].request(&self.facts, &self.pool);
        self.ask(Purpose::Data(filling), request);
        true
    }

    /// A segment of chunks is written.
    pub(super) fn segment_filled(&mut self, filling: usize) {
        let Filling { segment, chunks } = self.work.filling.remove(filling);
        for ((hash, _), block) in chunks.iter().zip(0..) {
            self.placed(hash, segment, block);
        }
        self.store.segments.let_go(segment);
        self.store.look_at(segment);
    }

    /// Puts the chunks of operations, one after another, into the entry that gathers. False: none, and none
    /// will be by itself, as operations wait for one another's chunks.
    fn place_inline(&mut self) -> bool {
        let (mut tried, before) = (0, self.work.pending.len());
        while let Some(&(key, _)) = self.work.pending.get(tried) {
            let run = self.work.pending.iter().skip(tried).take_while(|(other, _)| *other == key).count();
            if !self.place_op_inline(key, tried, run) {
                tried += run;
            }
        }
        let comes = !self.work.ready.is_empty() || self.store.pages.facts().loading > 0;
        comes || self.work.pending.len() < before || !self.store.journal.is_open_empty()
    }

    /// Puts the chunks of an operation, `run` of those that are pending from `from` on, into the entry.
    /// False: not now.
    fn place_op_inline(&mut self, key: usize, from: usize, run: usize) -> bool {
        let Op::Write(write) = &self.work.ops[key] else { unreachable!("only writes have chunks") };
        let Body::Blocks(blocks) = &write.body else { unreachable!("chunks are of blocks") };
        // Blocks of this operation that get their places with the run.
        let get_theirs = self.work.pending.iter().skip(from).take(run).map(|(_, at)| {
            let users = self.work.placing.get(&blocks[*at].hash);
            users.into_iter().flatten().filter(|(user, _)| *user == key).count()
        });
        if write.stage != WriteStage::Place || write.pending != get_theirs.sum::<usize>() {
            // It looks for duplicates still, or waits for others' chunks.
            return false;
        }
        match self.check(key) {
            Err(missing) => {
                missing.into_iter().for_each(|name| self.load_page(name));
                return false;
            }
            Ok(true) => {}
            Ok(false) => {
                let write = self.write_of(key);
                write.stage = WriteStage::Find;
                self.work.ready.push_back(key);
                return false;
            }
        }
        // The records are as long wherever the chunks lie.
        let run_of: Vec<(usize, usize)> = self.work.pending.iter().skip(from).take(run).copied().collect();
        let ids: Vec<ChunkId> = run_of.into_iter().map(|user| self.pending_id(user)).collect();
        let places = Places { segment: SegmentIndex(0), first: 0, ids: &ids };
        let records = self.records_of(key, |found| places.of(found));
        let bytes: usize = records.iter().map(CasRecord::bytes).sum();
        if !self.make_room(bytes, run) {
            return false;
        }
        let (segment, first) = self.store.journal.chunk_place(bytes);
        let places = Places { segment, first, ids: &ids };
        let records = self.records_of(key, |found| places.of(found));
        let missing = self.missing_for(&records);
        if !missing.is_empty() {
            missing.into_iter().for_each(|name| self.load_page(name));
            return false;
        }
        let pending: Vec<(usize, usize)> = self.work.pending.drain(from..from + run).collect();
        let mut chunks = Vec::with_capacity(run);
        for (_, at) in pending {
            let block = &self.blocks_of_write(key)[at];
            chunks.push((block.hash, block.data.clone()));
        }
        let data: Vec<Buf> = chunks.iter().map(|(_, data)| data.clone()).collect();
        self.store.journal.place_chunks(&data, bytes);
        for ((hash, _), block) in chunks.iter().zip(first..) {
            self.placed(hash, segment, block);
        }
        self.join_write(key, records);
        true
    }

    /// An entry of the journal is answered.
    pub(super) fn entry_answered(&mut self, sequence: u64) {
        for ended in self.store.journal.answer(sequence) {
            ended.waiters.into_iter().for_each(|key| self.write_logged(key));
            ended.given_up.into_iter().for_each(|segment| self.store.segments.release(segment));
        }
        self.work.ready.extend(self.work.starved.drain(..));
        if self.is_starting() {
            self.started();
        }
    }

    /// Gives up segments in which nothing is used.
    fn give_up_segments(&mut self) {
        for segment in std::mem::take(&mut self.store.empty) {
            let record = CasRecord::GiveUp { segment };
            if !self.store.is_unused(segment) {
                continue;
            }
            if !self.make_room(record.bytes(), 0) {
                self.store.empty.push(segment);
                continue;
            }
            // Making room may have made a segment of the journal of another.
            if self.store.is_unused(segment) {
                self.store.join(record);
            }
        }
    }
}
