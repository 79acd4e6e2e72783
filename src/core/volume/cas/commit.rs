//! Commits: chunks get their places, records their entries, and segments that hold nothing are given up.
//! Rules J1, J2, K2 and K3.
//!
//! While entries are under way, what comes gathers. Chunks for a whole segment are written to one at once;
//! what is left when nothing is under way goes into the entry of the journal, or, if it is more than that
//! should hold, into a segment with room left over.

use super::space::Need;
use super::work::{Body, Filling, Found, Op, Write, WriteStage};
use super::{CasVolume, Purpose};
use crate::array::StripeRequest;
use crate::array::mutation::{Mutation, is_off};
use crate::block_io::Buf;
use crate::format::cas::{CAS_BLOCK_BYTES, CasRecord, ChunkHash, ChunkId, SegmentEntry, SegmentIndex};
use crate::units::StripeIndex;
use crate::volume::api::ClientError;

/// Most bytes of records and chunks that gather while entries are under way.
const GATHER_BYTES: usize = 128 << 10;
/// Most chunks in an entry of the journal, whatever the size of a segment.
const INLINE_MAX: usize = 64;

impl CasVolume {
    /// Writes what has gathered, if it is its turn.
    pub(super) fn commit(&mut self) {
        self.give_up_segments();
        let whole = self.facts.segment_blocks as usize;
        while self.work.pending.len() >= whole && self.cut_segment(whole) {}
        if !self.work.pending.is_empty() && self.work.filling.is_empty() && self.store.journal.is_idle() {
            let most = (whole / 2).min(INLINE_MAX);
            let waiting = self.work.pending.len();
            let is_placed = waiting <= most && self.place_inline();
            // Operations that wait for one another's chunks get a segment, and so do those for which the
            // journal has no room.
            if !is_placed && self.is_at_rest() && !self.cut_segment(waiting.min(whole)) && self.is_full() {
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
    pub(super) fn make_room(&mut self, need: Need, record_bytes: usize, chunks: usize) -> bool {
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
            let Some(record) = self.open_next(need, SegmentEntry::JOURNAL) else {
                self.want_root_for_room(need);
                return false;
            };
            let CasRecord::Open { segment: after, .. } = record else { unreachable!("it opens a segment") };
            let sequence = self.store.journal.sequence();
            self.store.apply(sequence, &record).expect("a free segment is opened");
            self.store.journal.turn_over(after);
        }
    }

    /// Takes a free segment, which the record opens. None: there is none, or pages that the record needs are
    /// being read.
    pub(super) fn open_next(&mut self, need: Need, kind: u8) -> Option<CasRecord> {
        let reserve = self.reserve(need);
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

    /// Whether no operation can be advanced, nor waits for a page.
    pub(super) fn is_at_rest(&self) -> bool {
        self.work.ready.is_empty() && self.store.pages.facts().loading == 0
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
        if self.store.segments.free() <= self.reserve(Need::Data)
            || !self.make_room(Need::Data, record_bytes, 0)
        {
            return false;
        }
        let Some(record) = self.open_next(Need::Data, SegmentEntry::DATA) else { return false };
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
        if is_off(Mutation::CasEntryBeforeChunks) {
            self.segment_filled(filling);
        }
        true
    }

    /// A segment of chunks is written.
    pub(super) fn segment_filled(&mut self, filling: usize) {
        let Some(Filling { segment, chunks }) = self.work.filling.try_remove(filling) else {
            debug_assert!(is_off(Mutation::CasEntryBeforeChunks));
            return;
        };
        for ((hash, _), block) in chunks.iter().zip(0..) {
            self.placed(hash, segment, block);
        }
        self.store.segments.let_go(segment);
        self.store.look_at(segment);
    }

    /// Puts the chunks of operations, one after another, into the entry that gathers. False: of none.
    fn place_inline(&mut self) -> bool {
        let mut keys: Vec<usize> = Vec::new();
        for (key, _) in &self.work.pending {
            if !keys.contains(key) {
                keys.push(*key);
            }
        }
        let mut any = false;
        for key in keys {
            any |= self.place_op_inline(key);
        }
        any
    }

    /// Whether an operation waits for nothing but places of chunks that are its own.
    fn waits_for_own(&self, key: usize) -> bool {
        let Op::Write(Write { stage: WriteStage::Place, body: Body::Blocks(blocks), .. }) =
            &self.work.ops[key]
        else {
            return false;
        };
        let mut pending = blocks.iter().filter(|block| matches!(block.found, Found::Pending(_)));
        pending.all(|block| {
            let users = self.work.placing.get(&block.hash);
            users.and_then(|users| users.first()).is_some_and(|(first, _)| *first == key)
        })
    }

    /// Puts the chunks of an operation into the entry. False: not now.
    fn place_op_inline(&mut self, key: usize) -> bool {
        if !self.waits_for_own(key) {
            return false;
        }
        match self.check(key) {
            Err(missing) => {
                missing.into_iter().for_each(|name| self.wait_for_page(name, key));
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
        let mut chunks: Vec<(ChunkId, ChunkHash, Buf)> = Vec::new();
        for (_, at) in self.work.pending.clone().into_iter().filter(|(other, _)| *other == key) {
            let block = &self.blocks_of_write(key)[at];
            let Found::Pending(id) = block.found else { unreachable!("it has no place yet") };
            chunks.push((id, block.hash, block.data.clone()));
        }
        // The records are as long wherever the chunks lie.
        let bytes: usize =
            self.inline_records(key, &chunks, (SegmentIndex(0), 0)).iter().map(CasRecord::bytes).sum();
        if !self.make_room(Need::Data, bytes, chunks.len()) {
            return false;
        }
        let (segment, first) = self.store.journal.chunk_place(bytes);
        let records = self.inline_records(key, &chunks, (segment, first));
        let missing = self.missing_for(&records);
        if !missing.is_empty() {
            missing.into_iter().for_each(|name| self.wait_for_page(name, key));
            return false;
        }
        self.work.pending.retain(|(other, _)| *other != key);
        let data: Vec<Buf> = chunks.iter().map(|(_, _, data)| data.clone()).collect();
        self.store.journal.place_chunks(&data, bytes);
        for ((_, hash, _), block) in chunks.iter().zip(first..) {
            self.placed(hash, segment, block);
        }
        self.join_write(key, records);
        true
    }

    /// The records of an operation whose chunks lie one after another from a place on.
    fn inline_records(
        &mut self,
        key: usize,
        chunks: &[(ChunkId, ChunkHash, Buf)],
        (segment, first): (SegmentIndex, u32),
    ) -> Vec<CasRecord> {
        self.records_of(key, |found| match found {
            Found::Pending(id) => {
                let at = chunks.iter().position(|(other, ..)| *other == id).expect("one of its chunks");
                Found::Placed(id, segment, first + at as u32)
            }
            other => other,
        })
    }

    /// An entry of the journal is answered.
    pub(super) fn entry_answered(&mut self, sequence: u64) {
        for ended in self.store.journal.answer(sequence) {
            ended.waiters.into_iter().for_each(|key| self.write_logged(key));
            if !is_off(Mutation::CasReuseBeforeEntry) {
                ended.given_up.into_iter().for_each(|segment| self.store.segments.release(segment));
            }
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
            if !self.make_room(Need::Room, record.bytes(), 0) {
                self.store.empty.push(segment);
                continue;
            }
            // Making room may have made a segment of the journal of another.
            if self.store.is_unused(segment) {
                self.store.join(record);
                if is_off(Mutation::CasReuseBeforeEntry) {
                    self.store.segments.release(segment);
                }
            }
        }
    }
}
