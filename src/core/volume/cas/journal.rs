//! The running journal: the entry that gathers records, the entries under way, and where the next one goes.
//! Rules J1 to J4 of docs/cas.md. Pure bookkeeping; the writes are made by the volume.
//!
//! The place of the entry that gathers is fixed when its first record joins: chunks in it need to know where
//! they will lie. Invariant: entries are closed, answered and told in the order of their numbers.

use crate::array::mutation::{Mutation, is_off};
use crate::block_io::{Buf, Pool};
use crate::format::cas::{
    CAS_BLOCK_BYTES, CasKey, CasRecord, JournalEntry, JournalPlace, SegmentEntry, SegmentIndex,
};
use std::collections::{HashMap, VecDeque};

/// Most entries under way.
const IN_FLIGHT_MAX: usize = 4;
/// Most blocks of records in an entry.
const HEADER_BLOCKS_MAX: u32 = 16;

/// See the head of this file.
pub(super) struct Journal {
    key: CasKey,
    segment_blocks: u32,
    /// Tells the entries of this start from those of others.
    life: u64,
    /// Where the next entry to be closed goes.
    place: JournalPlace,
    open: OpenEntry,
    in_flight: VecDeque<Entry>,
    /// Segments from the newest root's on, the one being written last; the one after it is in `place`.
    segments: VecDeque<SegmentIndex>,
    /// Chunks of entries that are not answered yet, by segment and block.
    chunks: HashMap<(SegmentIndex, u32), Buf>,
}

/// An entry that gathers records.
#[derive(Default)]
struct OpenEntry {
    records: Vec<CasRecord>,
    record_bytes: usize,
    /// Chunks in the entry, and the blocks of header before them, which are fixed with the first one.
    chunks: Vec<Buf>,
    header_blocks: Option<u32>,
    waiters: Vec<usize>,
    given_up: Vec<SegmentIndex>,
}

/// An entry under way.
struct Entry {
    sequence: u64,
    is_answered: bool,
    /// Where it lies, for its chunks.
    chunks: Vec<(SegmentIndex, u32)>,
    ended: Ended,
}

/// What an entry that is answered ends.
#[derive(Default)]
pub(super) struct Ended {
    /// Operations whose records are in it.
    pub waiters: Vec<usize>,
    /// Segments that are free now.
    pub given_up: Vec<SegmentIndex>,
}

/// An entry to be written.
pub(super) struct EntryWrite {
    pub sequence: u64,
    pub segment: SegmentIndex,
    /// Block of the segment.
    pub block: u32,
    pub bytes: Buf,
}

impl Journal {
    /// A journal that goes on at `place`. `segments`: those from the newest root's on, up to that of `place`.
    pub(super) fn new(
        key: CasKey,
        segment_blocks: u32,
        life: u64,
        place: JournalPlace,
        segments: impl IntoIterator<Item = SegmentIndex>,
    ) -> Journal {
        Journal {
            key,
            segment_blocks,
            life,
            place,
            open: OpenEntry::default(),
            in_flight: VecDeque::new(),
            segments: segments.into_iter().collect(),
            chunks: HashMap::new(),
        }
    }

    /// The number of the entry that gathers.
    pub(super) fn sequence(&self) -> u64 {
        self.place.sequence
    }

    /// Where the entry that gathers goes: what a root says that contains all entries before it.
    pub(super) fn place(&self) -> JournalPlace {
        self.place
    }

    /// Whether nothing gathers.
    pub(super) fn is_open_empty(&self) -> bool {
        self.open.records.is_empty()
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Entries below are answered.
    pub(super) fn answered(&self) -> u64 {
        self.in_flight.front().map_or(self.place.sequence, |entry| entry.sequence)
    }

    /// Whether another entry may be written.
    pub(super) fn may_write(&self) -> bool {
        self.in_flight.len() < IN_FLIGHT_MAX
    }

    /// Blocks that are left in the segment that is being written.
    fn left(&self) -> u32 {
        self.segment_blocks - self.place.block
    }

    /// Whether the entry that gathers needs the segment after this one, and another one after that: then
    /// [`Journal::turn_over`] is due before any record joins. Little is lost at the end of a segment.
    pub(super) fn needs_segment(&self) -> bool {
        self.is_open_empty() && self.left() < (self.segment_blocks / 8).max(2)
    }

    /// The journal goes on in the next segment; `after` is free and comes after that. Its record is the first
    /// of the entry, and has been applied by the caller.
    pub(super) fn turn_over(&mut self, after: SegmentIndex) {
        debug_assert!(self.is_open_empty());
        self.segments.push_back(self.place.next);
        self.place = JournalPlace { segment: self.place.next, block: 0, next: after, ..self.place };
        self.join(CasRecord::Open { segment: after, kind: SegmentEntry::JOURNAL });
    }

    /// Whether records of so many bytes fit the entry that gathers, with so many chunks.
    pub(super) fn fits(&self, record_bytes: usize, chunks: usize) -> bool {
        let bytes = self.open.record_bytes + record_bytes;
        let header = JournalEntry::header_blocks(bytes);
        let in_header = match self.open.header_blocks {
            Some(fixed) => header <= fixed,
            None => header <= HEADER_BLOCKS_MAX.min(self.segment_blocks / 2),
        };
        let header = self.open.header_blocks.unwrap_or(header);
        in_header && header as usize + self.open.chunks.len() + chunks <= self.left() as usize
    }

    /// Segments that a start would read.
    pub(super) fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Bytes of the entry that gathers.
    pub(super) fn gathered(&self) -> usize {
        self.open.record_bytes + self.open.chunks.len() * CAS_BLOCK_BYTES
    }

    /// Where the next chunk in the entry will lie, if records of so many bytes are still to come.
    pub(super) fn chunk_place(&self, record_bytes: usize) -> (SegmentIndex, u32) {
        let needed = JournalEntry::header_blocks(self.open.record_bytes + record_bytes);
        let header = self.open.header_blocks.unwrap_or(needed);
        (self.place.segment, self.place.block + header + self.open.chunks.len() as u32)
    }

    /// Puts chunks into the entry, to which `record_bytes` of records are about to be added.
    pub(super) fn place_chunks(&mut self, chunks: &[Buf], record_bytes: usize) {
        let (_, first) = self.chunk_place(record_bytes);
        let needed = JournalEntry::header_blocks(self.open.record_bytes + record_bytes);
        self.open.header_blocks.get_or_insert(needed);
        for (chunk, block) in chunks.iter().zip(first..) {
            debug_assert_eq!(chunk.len(), CAS_BLOCK_BYTES);
            self.chunks.insert((self.place.segment, block), chunk.clone());
            self.open.chunks.push(chunk.clone());
        }
    }

    /// A record joins, which has been applied.
    pub(super) fn join(&mut self, record: CasRecord) {
        if let CasRecord::GiveUp { segment } = record {
            self.open.given_up.push(segment);
        }
        self.open.record_bytes += record.bytes();
        self.open.records.push(record);
    }

    /// An operation waits until the entry that gathers and all before it are answered.
    pub(super) fn wait(&mut self, key: usize) {
        self.open.waiters.push(key);
    }

    /// A chunk of an entry that is not answered yet.
    pub(super) fn chunk(&self, segment: SegmentIndex, block: u32) -> Option<&Buf> {
        self.chunks.get(&(segment, block))
    }

    /// Closes the entry that gathers, which is to be written now.
    pub(super) fn close(&mut self, pool: &Pool) -> EntryWrite {
        let open = std::mem::take(&mut self.open);
        let place = self.place;
        let header = open.header_blocks.unwrap_or_else(|| JournalEntry::header_blocks(open.record_bytes));
        let blocks = header + open.chunks.len() as u32;
        let mut buf = pool.alloc(blocks as usize * CAS_BLOCK_BYTES);
        let (head, rest) = buf.split_at_mut(header as usize * CAS_BLOCK_BYTES);
        for (to, chunk) in rest.chunks_exact_mut(CAS_BLOCK_BYTES).zip(&open.chunks) {
            to.copy_from_slice(chunk);
        }
        let chunks = open.chunks.iter().map(|chunk| &chunk[..]);
        let hash = JournalEntry::encode(&self.key, (&place, self.life), &open.records, chunks, head);
        let first = place.block + header;
        self.in_flight.push_back(Entry {
            sequence: place.sequence,
            is_answered: false,
            chunks: (0..open.chunks.len() as u32).map(|at| (place.segment, first + at)).collect(),
            ended: Ended { waiters: open.waiters, given_up: open.given_up },
        });
        self.place = JournalPlace {
            sequence: place.sequence + 1,
            previous: hash,
            block: place.block + blocks,
            ..place
        };
        EntryWrite {
            sequence: place.sequence,
            segment: place.segment,
            block: place.block,
            bytes: buf.freeze(),
        }
    }

    /// An entry is answered. Returns what that ends, entry by entry.
    pub(super) fn answer(&mut self, sequence: u64) -> Vec<Ended> {
        if let Some(entry) = self.in_flight.iter_mut().find(|entry| entry.sequence == sequence) {
            entry.is_answered = true;
        }
        let mut ended = Vec::new();
        if is_off(Mutation::CasEntriesNotInOrder) {
            let answered = self.in_flight.iter_mut().filter(|entry| entry.is_answered);
            let waiters = answered.flat_map(|entry| std::mem::take(&mut entry.ended.waiters)).collect();
            ended.push(Ended { waiters, given_up: Vec::new() });
        }
        while self.in_flight.front().is_some_and(|entry| entry.is_answered) {
            let Some(entry) = self.in_flight.pop_front() else { break };
            entry.chunks.iter().for_each(|at| {
                self.chunks.remove(at);
            });
            ended.push(entry.ended);
        }
        ended
    }

    /// Whether a start would read a segment, or the journal goes on in it.
    pub(super) fn is_needed(&self, segment: SegmentIndex) -> bool {
        self.place.next == segment || self.segments.contains(&segment)
    }

    /// A root is at `place`: segments before its segment are not needed for a start any more.
    pub(super) fn passed(&mut self, place: &JournalPlace) -> Vec<SegmentIndex> {
        let Some(at) = self.segments.iter().position(|segment| *segment == place.segment) else {
            return Vec::new();
        };
        self.segments.drain(..at).collect()
    }
}
