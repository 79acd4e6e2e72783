//! Reads the rings of all usable members once and finds the pieces of the log in them.
//!
//! Every 4 KiB block is tried as the start of a header, also within payloads: a header may be stale and the
//! blocks behind it overwritten by newer segments. Payloads are compared with their manifest's hashes as they
//! pass and not kept. Memory is bounded by the bytes read at once, the longest header, and the manifests
//! themselves.
//!
//! A member whose header of a batch is bad may hold its payload all the same: when the chain is known,
//! [`Scan::probe`] reads the payloads that were not recognised in passing. Must not know of rows or prefixes.

use crate::array::geometry::Map;
use crate::array::recovery::chain::{Bits, Chain, Finds, LogBatch, Piece};
use crate::array::recovery::unread::UnreadBlocks;
use crate::codec::BlockHasher;
use crate::format::{BatchHash, LOG_BLOCK_BYTES, LogKey, MemberSet, SegmentError, SegmentHeader};
use crate::units::{BlockHash, MemberIndex};
use std::collections::VecDeque;
use std::ops::{Range, RangeInclusive};
use uuid::Uuid;

/// Blocks of one read, 1 MiB: large enough for the full speed of a disk.
pub(super) const READ_BLOCKS: u32 = 256;

/// Members whose rings are read at once, one read each: bounds the memory of arrays of many members.
const MEMBERS_AT_ONCE: usize = 16;

/// Facts that are the same for every ring.
// Plain data: given to a scan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
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
// Plain data: identifies the read when it is asked for and when it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RingRead {
    /// The member whose ring it is.
    pub member: MemberIndex,
    /// Its blocks.
    pub blocks: Range<u32>,
}

/// Reading of all rings, or of parts of them.
#[derive(Debug)]
pub(super) struct Scan {
    ring: Ring,
    waiting: VecDeque<Reader>,
    reading: Vec<Reader>,
}

/// Reads one ring, block by block in order, and recognises headers and payloads.
#[derive(Debug)]
struct Reader {
    member: MemberIndex,
    /// Ranges left to read, the next at the end. A range that cannot be read is halved until single blocks
    /// remain.
    left: Vec<Range<u32>>,
    in_flight: bool,
    /// Whether only known payloads are looked for, not headers.
    probe: bool,
    /// Headers that extend beyond the blocks read when they were met: (place, blocks).
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
    pub(super) fn new(ring: Ring, members: MemberSet) -> Scan {
        let whole = || (ring.blocks > 0).then_some(0..ring.blocks).into_iter().collect();
        let waiting = members.iter().map(|member| Reader::new(member, whole(), false)).collect();
        Scan { ring, waiting, reading: Vec::new() }
    }

    /// Reads the payloads of a chain's pieces whose headers were not found.
    #[must_use]
    pub(super) fn probe(ring: Ring, members: MemberSet, chain: &Chain) -> Scan {
        let mut waiting = VecDeque::new();
        for member in members.iter() {
            let mut reader = Reader::new(member, Vec::new(), true);
            for (place, batch) in (0..).zip(chain.batches()) {
                // The space of pieces that are in place may have been used again.
                if chain.is_in_place(member, place)
                    || batch.piece(member).is_some()
                    || batch.payload_blocks(member) == 0
                {
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
    pub(super) fn poll(&mut self, out: &mut Vec<RingRead>) {
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

    /// Takes the end of a read, without bytes when it failed. Finds go to `found`.
    pub(super) fn done(&mut self, read: RingRead, bytes: Option<&[u8]>, found: &mut impl Found) {
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

    /// Whether everything was read.
    #[must_use]
    pub(super) fn is_over(&self) -> bool {
        self.reading.is_empty() && self.waiting.is_empty()
    }
}

/// What the ring of one member shows: the highest tail of its pieces, read piece by piece.
#[derive(Debug)]
pub(crate) struct RingTail {
    scan: Scan,
    highest: HighestTail,
}

#[derive(Debug)]
struct HighestTail {
    /// Numbers of the epochs whose pieces count.
    epochs: RangeInclusive<u64>,
    tail: u64,
    /// Blocks that could not be read.
    unread: UnreadBlocks,
}

impl RingTail {
    /// For a member's ring as a whole; pieces that were written in one of these epochs count.
    #[must_use]
    pub(crate) fn new(ring: Ring, member: MemberIndex, epochs: RangeInclusive<u64>) -> RingTail {
        let mut members = MemberSet::default();
        members.insert(member);
        RingTail {
            scan: Scan::new(ring, members),
            highest: HighestTail { epochs, tail: 0, unread: UnreadBlocks::default() },
        }
    }

    /// The next read, which ends with [`RingTail::done`] before there is another; none when everything was
    /// read.
    pub(crate) fn next_read(&mut self) -> Option<RingRead> {
        let mut reads = Vec::new();
        self.scan.poll(&mut reads);
        reads.pop()
    }

    /// Takes the end of a read, without bytes when it failed.
    pub(crate) fn done(&mut self, read: RingRead, bytes: Option<&[u8]>) {
        self.scan.done(read, bytes, &mut self.highest);
    }

    /// Whether every block so far could be read.
    #[must_use]
    pub(crate) fn was_read(&self) -> bool {
        self.highest.unread.is_empty()
    }

    /// Batches below are in place on the member; 0 when no piece says so.
    #[must_use]
    pub(crate) fn tail(&self) -> u64 {
        self.highest.tail
    }
}

impl Found for HighestTail {
    fn header(&mut self, _: MemberIndex, header: SegmentHeader, _: &Ring) -> Option<&LogBatch> {
        if self.epochs.contains(&header.batch.epoch.number) && !header.rewritten {
            self.tail = self.tail.max(header.batch.tail);
        }
        None
    }

    fn piece(&mut self, _: u64, _: &BatchHash, _: Piece) {
        unreachable!("no batch is asked for");
    }

    fn unread(&mut self) -> &mut UnreadBlocks {
        &mut self.unread
    }
}

/// Receives the finds of a scan.
pub(super) trait Found {
    /// A header that verifies, in a member's ring; returns its batch unless that is void.
    fn header(&mut self, member: MemberIndex, header: SegmentHeader, ring: &Ring) -> Option<&LogBatch>;
    /// The piece that a member holds of a batch.
    fn piece(&mut self, sequence: u64, batch: &BatchHash, piece: Piece);
    /// The list of blocks that could not be read.
    fn unread(&mut self) -> &mut UnreadBlocks;
}

impl Found for Finds {
    fn header(&mut self, member: MemberIndex, header: SegmentHeader, ring: &Ring) -> Option<&LogBatch> {
        self.add(member, header, &ring.map, ring.blocks)
    }

    fn piece(&mut self, _: u64, batch: &BatchHash, piece: Piece) {
        self.set_piece(batch, piece);
    }

    fn unread(&mut self) -> &mut UnreadBlocks {
        self.unread_mut()
    }
}

impl Found for Chain {
    /// A probe looks for payloads only.
    fn header(&mut self, _: MemberIndex, _: SegmentHeader, _: &Ring) -> Option<&LogBatch> {
        None
    }

    fn piece(&mut self, sequence: u64, batch: &BatchHash, piece: Piece) {
        self.set_piece(sequence, batch, piece);
    }

    fn unread(&mut self) -> &mut UnreadBlocks {
        self.unread_mut()
    }
}

impl OpenPiece {
    fn new(batch: &LogBatch, map: &Map, member: MemberIndex, first: u32, header: bool) -> OpenPiece {
        let hashes = batch.payload_hashes(map, member);
        let good = Bits::new(hashes.len() as u32);
        OpenPiece { batch: batch.hash(), sequence: batch.batch().sequence, header, first, hashes, good }
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
        if bytes.is_none() {
            found.unread().add(self.member, block, ring.blocks);
        }
        if self.probe {
            return;
        }
        let Some(bytes) = bytes else {
            for (place, _) in self.unfinished.drain(..) {
                found.unread().add_cut(self.member, place, ring.blocks);
            }
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
        let Some(batch) = found.header(self.member, header, ring) else { return };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::recovery::tests::parts::{HASHER, KEY, batch, fresh, in_place, map};
    use crate::format::{Batch, LogRecord, LogStart};
    use crate::testing::Random;

    const ARRAY: Uuid = Uuid::from_u128(77);
    /// Several reads, and the last one short.
    const BLOCKS: u32 = 2 * READ_BLOCKS + 90;

    /// Batches of the log that count.
    const LENGTH: u64 = 8;

    fn ring(map: Map) -> Ring {
        Ring { blocks: BLOCKS, key: KEY, array: ARRAY, hasher: HASHER, map }
    }

    /// A block whose hash is that of `in_place`'s value: the hashes of `parts` are of eight bytes, so the
    /// payload is made first and the record after it.
    fn payload(random: &mut Random) -> Vec<u8> {
        let mut block = vec![0; LOG_BLOCK_BYTES];
        random.fill(&mut block);
        block
    }

    /// The rings of three members, with a log that went round: (rings, batches of the last lap, first
    /// sequence).
    struct Rings {
        map: Map,
        bytes: Vec<Vec<u8>>,
        batches: Vec<Batch>,
    }

    fn write_rings(random: &mut Random) -> Rings {
        // Headers of several blocks: a fresh record has 64 rows times 3 columns of hashes.
        let map = map(2, 1, 64);
        let mut bytes = vec![vec![0; BLOCKS as usize * LOG_BLOCK_BYTES]; 3];
        let mut at = [random.below(u64::from(BLOCKS)) as u32; 3];
        let mut batches: Vec<Batch> = Vec::new();
        for sequence in 0..60 {
            let mut contents: Vec<Vec<u8>> = vec![Vec::new(); 3];
            let mut records = Vec::new();
            for _ in 0..random.below(9) {
                if random.one_in(3) {
                    records.push(fresh(0, 1, 2, &map, random.next_u64() >> 8));
                    continue;
                }
                let mut record = in_place(random.below(8), 0, 1 + random.below(8) as u32, &[0, 2], 1);
                let LogRecord::InPlace(inside) = &mut record else { unreachable!() };
                for (place, &column) in inside.columns.iter().enumerate() {
                    let member = map.member_of(inside.slot, crate::units::ColumnIndex(column));
                    for row in 0..inside.rows as usize {
                        let block = payload(random);
                        inside.hashes[place * inside.rows as usize + row] = HASHER.hash(&block);
                        contents[usize::from(member.0)].extend(block);
                    }
                }
                records.push(record);
            }
            let previous = batches.last().map_or(BatchHash::default(), |last| last.hash(&KEY));
            let mut batch = batch(sequence, 3, previous, records, 3);
            // The log that counts is shorter than the ring: older pieces are overwritten in part.
            batch.tail = sequence.saturating_sub(LENGTH - 1);
            let blocks: Vec<u32> = contents
                .iter()
                .map(|content| batch.header_blocks() + (content.len() / LOG_BLOCK_BYTES) as u32)
                .collect();
            for member in 0..3 {
                if at[member] + blocks[member] > BLOCKS {
                    at[member] = 0;
                }
                batch.places[member] = at[member];
                at[member] += blocks[member];
            }
            let manifest = batch.manifest(&KEY, ARRAY);
            for (member, content) in contents.into_iter().enumerate() {
                let from = batch.places[member] as usize * LOG_BLOCK_BYTES;
                let header = manifest.header_bytes();
                let blocks = (content.len() / LOG_BLOCK_BYTES) as u32;
                manifest.write_piece(
                    MemberIndex(member as u16),
                    blocks,
                    &mut bytes[member][from..from + header],
                );
                bytes[member][from + header..from + header + content.len()].copy_from_slice(&content);
            }
            batches.push(batch);
        }
        Rings { map, bytes, batches }
    }

    fn read_all(
        scan: &mut Scan,
        rings: &[Vec<u8>],
        bad: &[Vec<bool>],
        found: &mut impl Found,
        random: &mut Random,
    ) -> u64 {
        let (mut pending, mut blocks) = (Vec::new(), 0);
        loop {
            scan.poll(&mut pending);
            if pending.is_empty() {
                assert!(scan.is_over());
                return blocks;
            }
            let read: RingRead = pending.swap_remove(random.below(pending.len() as u64) as usize);
            blocks += read.blocks.len() as u64;
            assert!(read.blocks.len() <= READ_BLOCKS as usize);
            let member = usize::from(read.member.0);
            let range = read.blocks.start as usize..read.blocks.end as usize;
            let failed = bad[member][range.clone()].contains(&true);
            let bytes = &rings[member][range.start * LOG_BLOCK_BYTES..range.end * LOG_BLOCK_BYTES];
            scan.done(read, (!failed).then_some(bytes), found);
        }
    }

    #[test]
    fn the_pieces_of_each_batch_are_found_whatever_is_stale_damaged_or_unreadable() {
        let mut whole_tails = 0;
        for seed in 0..40 {
            let random = &mut Random::new(seed);
            let Rings { map, bytes: whole, batches } = write_rings(random);
            let mut bytes = whole.clone();
            let mut bad = vec![vec![false; BLOCKS as usize]; 3];
            let mut hurt = vec![vec![false; BLOCKS as usize]; 3];
            for member in 0..3 {
                for _ in 0..random.below(30) {
                    let at = random.below(u64::from(BLOCKS)) as usize;
                    hurt[member][at] = true;
                    if random.one_in(2) {
                        bad[member][at] = true;
                    } else {
                        bytes[member][at * LOG_BLOCK_BYTES + random.below(4096) as usize] ^= 0x40;
                    }
                }
            }
            // Only headers show which batches count: those that are met before open pieces that are stale.
            let mut finds = Finds::new(LogStart { sequence: 0, epoch: 3 }, MemberSet::first(3), 3, 0);
            let members = MemberSet::first(3);
            read_all(&mut Scan::new(ring(map), members), &bytes, &bad, &mut finds, random);
            // A member's newest headers may be damaged, and with them its tail; then earlier batches may be
            // gone on all.
            let Ok(mut chain) = finds.chain(true) else { continue };
            let mut probe = Scan::probe(ring(map), members, &chain);
            read_all(&mut probe, &bytes, &bad, &mut chain, random);
            let has_header_on = |m: usize, batch: &Batch| {
                let blocks = batch.header_blocks();
                !(batch.places[m]..batch.places[m] + blocks).any(|block| hurt[m][block as usize])
            };
            let has_header = |batch: &Batch| (0..3).any(|m| has_header_on(m, batch));
            let tail_on = |m: usize| {
                batches.iter().rev().find(|batch| has_header_on(m, batch)).map_or(0, |batch| batch.tail)
            };
            let tails = [0, 1, 2].map(tail_on);
            let (first, top) = (tails[0].min(tails[1]).min(tails[2]) as usize, *tails.iter().max().unwrap());
            assert_eq!(chain.sequence(0), first as u64, "seed {seed}");
            assert_eq!(chain.sequence(chain.top()), top, "seed {seed}");
            for (member, floor) in members.iter().zip(tails.map(|tail| (tail - first as u64) as u32)) {
                let in_place = (0..=floor).map(|batch| chain.is_in_place(member, batch));
                assert_eq!(
                    in_place.filter(|is_in_place| *is_in_place).count(),
                    floor as usize,
                    "seed {seed}"
                );
            }
            if first < batches.len() - LENGTH as usize {
                // The tail was lost with its header; earlier batches may be gone.
                continue;
            }
            whole_tails += 1;
            let mut expected = 0;
            for entry in chain.batches() {
                let batch = &batches[first + expected];
                assert_eq!(entry.batch(), batch);
                expected += 1;
                let is_needed = |member: &MemberIndex| !chain.is_in_place(*member, expected as u32 - 1);
                for member in members.iter().filter(is_needed) {
                    let (place, blocks) = (entry.place(member).unwrap(), entry.payload_blocks(member));
                    let is_hurt = |block: u32| hurt[usize::from(member.0)][block as usize];
                    // A byte of padding at a header's end is covered too: the format requires it to be zero.
                    let header = !(place..place + batch.header_blocks()).any(is_hurt);
                    let piece = entry.piece(member);
                    assert_eq!(
                        piece.is_some_and(|piece| piece.header),
                        header,
                        "seed {seed} member {member}"
                    );
                    for ordinal in 0..blocks {
                        let block = entry.image_block(member, ordinal).unwrap();
                        assert_eq!(
                            entry.holds(member, ordinal),
                            !is_hurt(block),
                            "seed {seed} block {block}"
                        );
                    }
                }
            }
            let none_has = batches.get(first + expected).is_none_or(|batch| !has_header(batch));
            assert!(none_has, "seed {seed}: the chain ends where no header is left");
        }
        assert!(whole_tails > 20, "{whole_tails}");
    }

    #[test]
    fn a_segment_inside_the_payload_of_a_stale_one_is_found() {
        let map = map(2, 1, 64);
        let mut rings = vec![vec![0; BLOCKS as usize * LOG_BLOCK_BYTES]; 3];
        let mut previous = BatchHash::default();
        for (sequence, place, rows) in [(0, 10, 40), (1, 13, 1)] {
            let mut batch = batch(sequence, 3, previous, vec![in_place(0, 0, rows, &[0], 1)], 3);
            (batch.places, batch.tail) = (vec![place; 3], sequence);
            let manifest = batch.manifest(&KEY, ARRAY);
            let from = place as usize * LOG_BLOCK_BYTES;
            manifest.write_piece(MemberIndex(0), rows, &mut rings[0][from..]);
            previous = manifest.hash();
        }
        let fine = vec![vec![false; BLOCKS as usize]; 3];
        let mut finds = Finds::new(LogStart { sequence: 0, epoch: 3 }, MemberSet::first(1), 3, 0);
        let mut scan = Scan::new(ring(map), MemberSet::first(1));
        read_all(&mut scan, &rings, &fine, &mut finds, &mut Random::new(1));
        let chain = finds.chain(false).unwrap();
        let found: Vec<_> =
            chain.batches().iter().map(|entry| (entry.batch().sequence, entry.batch().places[0])).collect();
        assert_eq!(found, [(1, 13)]);
    }

    #[test]
    fn rings_that_can_be_read_are_read_once() {
        let random = &mut Random::new(1);
        let Rings { map, bytes, .. } = write_rings(random);
        let fine = vec![vec![false; BLOCKS as usize]; 3];
        let mut finds = Finds::new(LogStart { sequence: 52, epoch: 3 }, MemberSet::first(3), 3, 0);
        let mut scan = Scan::new(ring(map), MemberSet::first(3));
        assert_eq!(read_all(&mut scan, &bytes, &fine, &mut finds, random), 3 * u64::from(BLOCKS));
        let mut chain = finds.chain(false).unwrap();
        assert_eq!(chain.batches().len(), 8);
        let mut probe = Scan::probe(ring(map), MemberSet::first(3), &chain);
        assert_eq!(read_all(&mut probe, &bytes, &fine, &mut chain, random), 0);
    }

    #[test]
    fn one_bad_block_costs_a_few_reads_more() {
        let random = &mut Random::new(2);
        let Rings { map, bytes, .. } = write_rings(random);
        let mut bad = vec![vec![false; BLOCKS as usize]; 3];
        bad[1][100] = true;
        let mut finds = Finds::new(LogStart { sequence: 52, epoch: 3 }, MemberSet::first(3), 3, 0);
        let mut scan = Scan::new(ring(map), MemberSet::first(3));
        let blocks = read_all(&mut scan, &bytes, &bad, &mut finds, random);
        assert!(blocks <= 3 * u64::from(BLOCKS) + 2 * u64::from(READ_BLOCKS), "{blocks}");
    }
}
