//! Reads the rings of all usable members once and finds what they hold of the log.
//!
//! Every 4 KiB block is looked at as the start of a header, also within payloads: a header may be stale and the blocks
//! behind it overwritten by newer segments. Payloads are compared with their manifest's hashes as they pass and not
//! kept. Memory is bounded by what is read at once, the longest header, and the manifests themselves.
//!
//! A member whose header of a batch is bad may hold its payload all the same: when the chain is known,
//! [`Scan::probe`] reads the payloads that were not recognised in passing. Must not know of rows or prefixes.

use super::chain::{Bits, Chain, Finds, LogBatch, Piece};
use crate::array::geometry::Map;
use crate::codec::BlockHasher;
use crate::format::{BatchHash, LOG_BLOCK_BYTES, LogKey, MemberSet, SegmentError, SegmentHeader};
use crate::units::{BlockHash, MemberIndex};
use std::collections::VecDeque;
use std::ops::Range;
use uuid::Uuid;

/// Blocks of one read, 1 MiB: large enough for the full speed of a disk.
pub const READ_BLOCKS: u32 = 256;

/// Members whose rings are read at once, one read each: bounds the memory of arrays of many members.
const MEMBERS_AT_ONCE: usize = 16;

/// What is the same for every ring.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    /// Blocks of the ring.
    pub blocks: u32,
    /// Key of headers.
    pub key: LogKey,
    /// Identity of the array.
    pub array: Uuid,
    /// Hash of payloads.
    pub hasher: BlockHasher,
    /// Where columns are.
    pub map: Map,
}

/// A read of a ring that is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingRead {
    /// Whose ring.
    pub member: MemberIndex,
    /// Which blocks of it.
    pub blocks: Range<u32>,
}

/// Reading of all rings, or of parts of them.
#[derive(Debug)]
pub struct Scan {
    ring: Ring,
    waiting: VecDeque<Reader>,
    reading: Vec<Reader>,
}

/// Reading of one ring: blocks in order, and what is made of them.
#[derive(Debug)]
struct Reader {
    member: MemberIndex,
    /// What is left to read, the next at the end. A range that cannot be read is halved until single blocks remain.
    left: Vec<Range<u32>>,
    in_flight: bool,
    /// Only known payloads are of interest, not headers.
    probe: bool,
    /// Headers that go on beyond what was read when they were met: (place, blocks).
    unfinished: Vec<(u32, u32)>,
    /// The bytes from the first unfinished header on.
    window: Vec<u8>,
    window_start: u32,
    open: Vec<OpenPiece>,
    /// When probing: the pieces of `left`, in the same order.
    upcoming: Vec<OpenPiece>,
}

/// A piece whose payload is passing.
#[derive(Debug)]
struct OpenPiece {
    batch: BatchHash,
    sequence: u64,
    header: bool,
    first: u32,
    hashes: Vec<BlockHash>,
    good: Bits,
}

impl Scan {
    /// A scan of the rings of `members`, whole.
    #[must_use]
    pub fn new(ring: Ring, members: MemberSet) -> Scan {
        let whole = || (ring.blocks > 0).then(|| 0..ring.blocks).into_iter().collect();
        let waiting = members.iter().map(|member| Reader::new(member, whole(), false)).collect();
        Scan { ring, waiting, reading: Vec::new() }
    }

    /// Reads the payloads of a chain's pieces whose headers were not found.
    #[must_use]
    pub fn probe(ring: Ring, members: MemberSet, chain: &Chain) -> Scan {
        let mut waiting = VecDeque::new();
        for member in members.iter() {
            let mut reader = Reader::new(member, Vec::new(), true);
            for batch in &chain.batches {
                if batch.piece(member).is_some() || batch.payload_blocks(member) == 0 {
                    continue;
                }
                if let Some(first) = batch.image_block(member, 0) {
                    reader.left.push(first..first + batch.payload_blocks(member));
                    reader.upcoming.push(OpenPiece::new(batch, &ring.map, member, first, false));
                }
            }
            if !reader.left.is_empty() {
                waiting.push_back(reader);
            }
        }
        Scan { ring, waiting, reading: Vec::new() }
    }

    /// The reads that can be done now. The caller ends each with [`Scan::done`].
    pub fn poll(&mut self, out: &mut Vec<RingRead>) {
        while self.reading.len() < MEMBERS_AT_ONCE {
            let Some(next) = self.waiting.pop_front() else { break };
            self.reading.push(next);
        }
        for reader in self.reading.iter_mut().filter(|reader| !reader.in_flight) {
            if let Some(blocks) = reader.next_read() {
                reader.in_flight = true;
                out.push(RingRead { member: reader.member, blocks });
            }
        }
    }

    /// Takes the end of a read, without bytes when it failed. What was found goes to `found`.
    pub fn done(&mut self, read: RingRead, bytes: Option<&[u8]>, found: &mut impl Found) {
        let at = self.reading.iter().position(|reader| reader.member == read.member);
        let reader = &mut self.reading[at.expect("a read belongs to a reader")];
        reader.in_flight = false;
        let RingRead { blocks, .. } = read;
        match bytes {
            Some(bytes) => {
                for (block, bytes) in blocks.zip(bytes.chunks_exact(LOG_BLOCK_BYTES)) {
                    reader.take(&self.ring, block, Some(bytes), found);
                }
            }
            None if blocks.len() > 1 => {
                let middle = blocks.start + blocks.len() as u32 / 2;
                reader.left.push(middle..blocks.end);
                reader.left.push(blocks.start..middle);
            }
            None => reader.take(&self.ring, blocks.start, None, found),
        }
        if reader.left.is_empty() {
            self.reading.swap_remove(at.expect("found above"));
        }
    }

    /// Whether all is read.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.reading.is_empty() && self.waiting.is_empty()
    }
}

/// Where what was found goes to.
pub trait Found {
    /// A header that verifies; returns its batch unless that is void.
    fn header(&mut self, header: SegmentHeader, ring: &Ring) -> Option<&LogBatch>;
    /// What a member holds of a batch.
    fn piece(&mut self, sequence: u64, batch: &BatchHash, piece: Piece);
}

impl Found for Finds {
    fn header(&mut self, header: SegmentHeader, ring: &Ring) -> Option<&LogBatch> {
        self.add(header, &ring.map, ring.blocks)
    }

    fn piece(&mut self, _: u64, batch: &BatchHash, piece: Piece) {
        self.set_piece(batch, piece);
    }
}

impl Found for Chain {
    /// Probing looks for payloads alone.
    fn header(&mut self, _: SegmentHeader, _: &Ring) -> Option<&LogBatch> {
        None
    }

    fn piece(&mut self, sequence: u64, batch: &BatchHash, piece: Piece) {
        let known = &mut self.batches[(sequence - self.tail) as usize];
        debug_assert_eq!(known.hash, *batch);
        known.set_piece(piece);
    }
}

impl OpenPiece {
    fn new(batch: &LogBatch, map: &Map, member: MemberIndex, first: u32, header: bool) -> OpenPiece {
        let hashes = batch.payload_hashes(map, member);
        let good = Bits::new(hashes.len() as u32);
        OpenPiece { batch: batch.hash, sequence: batch.batch.sequence, header, first, hashes, good }
    }

    fn end(&self) -> u32 {
        self.first + self.hashes.len() as u32
    }

    fn close(self, member: MemberIndex, found: &mut impl Found) {
        found.piece(self.sequence, &self.batch, Piece { member, header: self.header, good: self.good });
    }
}

impl Reader {
    fn new(member: MemberIndex, left: Vec<Range<u32>>, probe: bool) -> Reader {
        Reader {
            member,
            left,
            in_flight: false,
            probe,
            unfinished: Vec::new(),
            window: Vec::new(),
            window_start: 0,
            open: Vec::new(),
            upcoming: Vec::new(),
        }
    }

    fn next_read(&mut self) -> Option<Range<u32>> {
        let next = self.left.pop()?;
        let end = next.end.min(next.start + READ_BLOCKS);
        if end < next.end {
            self.left.push(end..next.end);
        }
        Some(next.start..end)
    }

    /// The next block; without bytes it cannot be read.
    fn take(&mut self, ring: &Ring, block: u32, bytes: Option<&[u8]>, found: &mut impl Found) {
        if self.probe && self.open.is_empty() {
            self.open.extend(self.upcoming.pop());
        }
        self.verify(ring, block, bytes, found);
        if self.probe {
            return;
        }
        let Some(bytes) = bytes else {
            self.unfinished.clear();
            self.window.clear();
            return;
        };
        if !self.unfinished.is_empty() {
            self.window.extend_from_slice(bytes);
        }
        match SegmentHeader::decode(&ring.key, ring.array, self.member, block, bytes) {
            Ok(header) => self.open(ring, header, found),
            Err(SegmentError::Longer { blocks }) if blocks > 1 && blocks <= ring.blocks - block => {
                if self.unfinished.is_empty() {
                    self.window_start = block;
                    self.window.clear();
                    self.window.extend_from_slice(bytes);
                }
                self.unfinished.push((block, blocks));
            }
            Err(_) => {}
        }
        self.finish_headers(ring, block, found);
    }

    /// Reads the headers that end with `block`.
    fn finish_headers(&mut self, ring: &Ring, block: u32, found: &mut impl Found) {
        if self.unfinished.is_empty() {
            return;
        }
        let ended = |&(place, blocks): &(u32, u32)| place + blocks == block + 1;
        let mut headers = Vec::new();
        for &(place, _) in self.unfinished.iter().filter(|header| ended(header)) {
            let from = (place - self.window_start) as usize * LOG_BLOCK_BYTES;
            let decoded =
                SegmentHeader::decode(&ring.key, ring.array, self.member, place, &self.window[from..]);
            headers.extend(decoded.ok());
        }
        self.unfinished.retain(|header| !ended(header));
        match self.unfinished.first() {
            Some(&(place, _)) => {
                let gone = (place - self.window_start) as usize * LOG_BLOCK_BYTES;
                self.window.drain(..gone);
                self.window_start = place;
            }
            None => self.window.clear(),
        }
        for header in headers {
            self.open(ring, header, found);
        }
    }

    fn open(&mut self, ring: &Ring, header: SegmentHeader, found: &mut impl Found) {
        let Some(batch) = found.header(header, ring) else { return };
        let Some(first) = batch.image_block(self.member, 0) else { return };
        let piece = OpenPiece::new(batch, &ring.map, self.member, first, true);
        if piece.hashes.is_empty() {
            piece.close(self.member, found);
        } else {
            self.open.push(piece);
        }
    }

    /// Compares a block with the payloads that it belongs to.
    fn verify(&mut self, ring: &Ring, block: u32, bytes: Option<&[u8]>, found: &mut impl Found) {
        let hash = match bytes {
            Some(bytes) if self.open.iter().any(|piece| (piece.first..piece.end()).contains(&block)) => {
                Some(ring.hasher.hash(bytes))
            }
            _ => None,
        };
        for piece in self.open.iter_mut().filter(|piece| (piece.first..piece.end()).contains(&block)) {
            let ordinal = block - piece.first;
            if hash == Some(piece.hashes[ordinal as usize]) {
                piece.good.set(ordinal);
            }
        }
        let mut at = 0;
        while at < self.open.len() {
            if self.open[at].end() == block + 1 {
                self.open.swap_remove(at).close(self.member, found);
            } else {
                at += 1;
            }
        }
    }
}
