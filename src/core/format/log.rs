//! The redo log's segments: one segment is one member's piece of a batch. See docs/on-disk-format.md, "Redo
//! log".
//!
//! A segment is whole 4 KiB blocks: the header blocks (fixed fields, places, records), then the payload: for
//! each in-place record, in order, the member's own blocks in row order. Everything but the payload is the
//! same on every member, except the fields that say to which member the piece belongs. Must not know which
//! member holds which column.
//!
//! Invariants: `decode` accepts exactly what `encode` writes for the same array, member and place, and never
//! reads or allocates beyond the bytes it is given, whatever they are.

use super::{COUNT_END, MAX_CHUNK_BYTES, MAX_MEMBERS};
use crate::units::{BlockHash, MemberIndex, ROW_BYTES, SlotIndex, StripeIndex};
use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a block of the log: segments start and end on its multiples.
pub const LOG_BLOCK_BYTES: usize = 4096;

/// The place of a member that had no part in a batch.
pub const NO_PLACE: u32 = u32::MAX;

/// Longest header in blocks, 16 MiB: four whole stripes of 255 chunks of 4 MiB fit, one of which takes 4 MiB
/// of hashes. Bounds what a header that is not verified yet can make a reader read.
pub const MAX_HEADER_BLOCKS: u32 = 4096;

/// First bytes of every segment.
const MAGIC: [u8; 8] = *b"CALPELOG";
/// Precedes the shared bytes when they are hashed, so that the hash of a batch never equals that of a header
/// or page.
const BATCH_DOMAIN: [u8; 8] = *b"CALPEBAT";
/// Purpose of the key for BLAKE3's key derivation: the same for all versions of the format.
const KEY_CONTEXT: &str = "calpe redo log and pages 2026";
/// Rows of the largest chunk.
const MAX_ROWS: u32 = MAX_CHUNK_BYTES / ROW_BYTES as u32;

/// Key of the hashes of segments and pages: without it nobody can make a payload that passes for a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogKey(pub [u8; 32]);

/// Identity of a batch: the keyed hash of all that its pieces have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BatchHash(pub [u8; 32]);

/// An epoch as the log names it: its number for order, its random identity for sameness.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct EpochStamp {
    /// Number.
    pub number: u64,
    /// Identity.
    pub id: u64,
}

/// One group commit: what all its pieces have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Always 0: each lane of an array has a log of its own.
    pub lane: u16,
    /// Counts batches without gaps.
    pub sequence: u64,
    /// The epoch in which it was written (E4).
    pub epoch: EpochStamp,
    /// The note (W2): every batch below this sequence is durable on all members that were live.
    pub durable_upto: u64,
    /// Batches below this sequence are in place; their log space may be overwritten (W4).
    pub tail: u64,
    /// Identity of the batch before.
    pub previous: BatchHash,
    /// For each member the block of the log region at which its piece starts, or [`NO_PLACE`].
    pub places: Vec<u32>,
    /// What it does, in order.
    pub records: Vec<LogRecord>,
}

/// What a batch does to one stripe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogRecord {
    /// New images of some blocks of a slot.
    InPlace(InPlaceRecord),
    /// A stripe was written whole to a free slot, which becomes its slot.
    Fresh(FreshRecord),
    /// A stripe holds no data any more and reads as zeroes.
    Discard {
        /// The logical stripe.
        stripe: StripeIndex,
        /// Its slot.
        slot: SlotIndex,
    },
}

/// See [`LogRecord::InPlace`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InPlaceRecord {
    /// The logical stripe.
    pub stripe: StripeIndex,
    /// Its slot.
    pub slot: SlotIndex,
    /// The stripe held no data before: every block of the slot that this record does not name is unwritten.
    pub first: bool,
    /// First row.
    pub row: u32,
    /// Rows.
    pub rows: u32,
    /// Modified columns, ascending.
    pub columns: Vec<u16>,
    /// New hash of each modified block, by column, then row. A column has payload on its member for those of
    /// its blocks whose hash [`BlockHash::is_stored`].
    pub hashes: Vec<BlockHash>,
}

/// See [`LogRecord::Fresh`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreshRecord {
    /// The logical stripe.
    pub stripe: StripeIndex,
    /// The slot that was free and now holds it.
    pub slot: SlotIndex,
    /// The slot that held it before and is now free.
    pub old_slot: SlotIndex,
    /// Hash of every block of the slot, by column `0..k+m`, then row.
    pub hashes: Vec<BlockHash>,
}

/// A valid header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The batch.
    pub batch: Batch,
    /// Its identity, to be compared with the next batch's `previous`.
    pub hash: BatchHash,
    /// Blocks of header; the payload follows.
    pub header_blocks: u32,
    /// Blocks of payload.
    pub payload_blocks: u32,
    /// Whether a replay wrote it on a member that lacked it: it is true of the array, but does not show what
    /// this member did.
    pub rewritten: bool,
}

/// Why bytes are not a header of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// No magic, another array's, another member's, or at another place than it was written for.
    #[error("no log segment of this member starts here")]
    None,
    /// The header is longer than the bytes given.
    #[error("the header has {blocks} blocks")]
    Longer {
        /// Blocks of header.
        blocks: u32,
    },
    /// It starts like a header and does not verify: torn, damaged, or overwritten by a newer segment.
    #[error("a damaged or torn log segment")]
    Damaged,
}

impl InPlaceRecord {
    /// The hash of a modified block: `at` counts in `columns`, `row` from the record's first row.
    #[must_use]
    pub fn hash(&self, at: usize, row: usize) -> BlockHash {
        self.hashes[at * self.rows as usize + row]
    }
}

impl LogKey {
    /// The key of an array: from its identity and the secret in its superblock.
    #[must_use]
    pub fn derive(array: Uuid, secret: [u8; 16]) -> LogKey {
        let mut material = [0; 32];
        material[..16].copy_from_slice(array.as_bytes());
        material[16..].copy_from_slice(&secret);
        LogKey(blake3::derive_key(KEY_CONTEXT, &material))
    }

    /// A keyed hasher: its hashes cannot be forged without the key.
    pub(super) fn hasher(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.0)
    }
}

impl LogRecord {
    /// Bytes that it takes in the header.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of::<RawRecord>()
            + match self {
                LogRecord::InPlace(record) => {
                    size_of::<U16>() * record.columns.len() + size_of::<BlockHash>() * record.hashes.len()
                }
                LogRecord::Fresh(record) => size_of::<BlockHash>() * record.hashes.len(),
                LogRecord::Discard { .. } => 0,
            }
    }
}

impl Batch {
    /// Blocks of header that this batch takes in every piece; at most [`MAX_HEADER_BLOCKS`] can be encoded.
    #[must_use]
    pub fn header_blocks(&self) -> u32 {
        let bytes = HEAD_BYTES + self.body_bytes();
        u32::try_from(bytes.div_ceil(LOG_BLOCK_BYTES)).unwrap_or(u32::MAX)
    }

    /// Identity of this batch.
    ///
    /// # Panics
    /// As [`Batch::encode`].
    #[must_use]
    pub fn hash(&self, key: &LogKey) -> BatchHash {
        self.manifest(key, Uuid::nil()).hash()
    }

    /// The header blocks of `member`'s piece with `payload_blocks` blocks of payload. For several
    /// members, make the [`Manifest`] once.
    ///
    /// # Panics
    /// When the member has no place in the batch, or counts do not fit the format's fields.
    #[must_use]
    pub fn encode(&self, key: &LogKey, array: Uuid, member: MemberIndex, payload_blocks: u32) -> Vec<u8> {
        let manifest = self.manifest(key, array);
        let mut bytes = vec![0; manifest.header_bytes()];
        manifest.write_piece(member, payload_blocks, &mut bytes);
        bytes
    }

    /// The header in bytes and hashed, for the pieces of all members.
    ///
    /// # Panics
    /// When the batch breaks a rule of the format, see docs/on-disk-format.md.
    #[must_use]
    pub fn manifest(&self, key: &LogKey, array: Uuid) -> Manifest {
        let body_bytes = self.body_bytes();
        let blocks = self.header_blocks();
        assert!(blocks <= MAX_HEADER_BLOCKS, "a header of {blocks} blocks, at most {MAX_HEADER_BLOCKS}");
        let mut bytes = Vec::with_capacity(blocks as usize * LOG_BLOCK_BYTES);
        bytes.resize(size_of::<RawPiece>(), 0);
        let shared = RawShared {
            sequence: self.sequence.into(),
            epoch_number: self.epoch.number.into(),
            epoch_id: self.epoch.id.into(),
            durable_upto: self.durable_upto.into(),
            tail: self.tail.into(),
            previous: self.previous.0,
            lane: self.lane.into(),
            place_count: (self.places.len() as u16).into(),
            record_count: (self.records.len() as u32).into(),
            body_bytes: (body_bytes as u32).into(),
            reserved: [0; 4],
        };
        bytes.extend_from_slice(shared.as_bytes());
        assert!(self.places.len() <= usize::from(MAX_MEMBERS), "{} places", self.places.len());
        for &place in &self.places {
            bytes.extend_from_slice(&place.to_le_bytes());
        }
        for record in &self.records {
            record.write(self.places.len(), &mut bytes);
        }
        debug_assert_eq!(bytes.len(), HEAD_BYTES + body_bytes);
        let hash = batch_hash(key, &bytes[size_of::<RawPiece>()..]);
        bytes.resize(blocks as usize * LOG_BLOCK_BYTES, 0);
        Manifest { key: *key, array, places: self.places.clone(), bytes, hash }
    }

    fn body_bytes(&self) -> usize {
        size_of::<U32>() * self.places.len() + self.records.iter().map(LogRecord::bytes).sum::<usize>()
    }
}

/// The header of a batch in bytes and hashed, of which each member's piece is a copy with its own first
/// fields.
#[derive(Clone, Debug)]
pub struct Manifest {
    key: LogKey,
    array: Uuid,
    places: Vec<u32>,
    /// Header blocks, the fields of the piece blank.
    bytes: Vec<u8>,
    hash: BatchHash,
}

impl Manifest {
    /// Identity of the batch.
    #[must_use]
    pub fn hash(&self) -> BatchHash {
        self.hash
    }

    /// Bytes of header in every piece, whole blocks.
    #[must_use]
    pub fn header_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Writes the header of `member`'s piece with `payload_blocks` blocks of payload to the start of `out`.
    ///
    /// # Panics
    /// When `out` is shorter than [`Manifest::header_bytes`], the member has no place in the batch, or the
    /// piece would end beyond what places can name.
    pub fn write_piece(&self, member: MemberIndex, payload_blocks: u32, out: &mut [u8]) {
        self.write(member, payload_blocks, 0, out);
    }

    /// The same for a member that lacked its piece: [`SegmentHeader::rewritten`].
    ///
    /// # Panics
    /// As [`Manifest::write_piece`].
    pub fn rewrite_piece(&self, member: MemberIndex, payload_blocks: u32, out: &mut [u8]) {
        self.write(member, payload_blocks, REWRITTEN, out);
    }

    fn write(&self, member: MemberIndex, payload_blocks: u32, flags: u16, out: &mut [u8]) {
        let place = self.places.get(usize::from(member.0)).copied().filter(|&place| place != NO_PLACE);
        let place = place.unwrap_or_else(|| panic!("member {member} has no place in the batch"));
        let header_blocks = (self.bytes.len() / LOG_BLOCK_BYTES) as u32;
        assert!(piece_fits(place, header_blocks, payload_blocks), "a piece at {place} beyond every place");
        let mut piece = RawPiece {
            magic: MAGIC,
            hash: [0; 32],
            array: self.array.into_bytes(),
            member: member.0.into(),
            flags: flags.into(),
            place: place.into(),
            header_blocks: header_blocks.into(),
            payload_blocks: payload_blocks.into(),
        };
        piece.hash = piece_hash(&self.key, &piece, self.hash);
        let (first, rest) = out[..self.bytes.len()].split_at_mut(size_of::<RawPiece>());
        first.copy_from_slice(piece.as_bytes());
        rest.copy_from_slice(&self.bytes[size_of::<RawPiece>()..]);
    }
}

impl SegmentHeader {
    /// Reads the header of `member`'s piece from `bytes`, whole blocks that start at block `place` of the log
    /// region.
    ///
    /// # Errors
    /// When there is none, or more bytes are needed to tell.
    pub fn decode(
        key: &LogKey,
        array: Uuid,
        member: MemberIndex,
        place: u32,
        bytes: &[u8],
    ) -> Result<SegmentHeader, SegmentError> {
        if bytes.len() < LOG_BLOCK_BYTES {
            return Err(SegmentError::Longer { blocks: 1 });
        }
        let (piece, _) = RawPiece::ref_from_prefix(bytes).map_err(|_| SegmentError::Damaged)?;
        let mine = piece.magic == MAGIC
            && piece.array == array.into_bytes()
            && piece.member.get() == member.0
            && piece.place.get() == place;
        if !mine {
            return Err(SegmentError::None);
        }
        let blocks = piece.header_blocks.get();
        if !(1..=MAX_HEADER_BLOCKS).contains(&blocks) {
            return Err(SegmentError::Damaged);
        }
        let bytes = bytes.get(..blocks as usize * LOG_BLOCK_BYTES).ok_or(SegmentError::Longer { blocks })?;
        verified(key, piece, bytes).ok_or(SegmentError::Damaged)
    }
}

/// Flag of a piece: a replay wrote it.
const REWRITTEN: u16 = 1;

/// The header in its whole blocks; none unless it verifies and every field is possible.
fn verified(key: &LogKey, piece: &RawPiece, bytes: &[u8]) -> Option<SegmentHeader> {
    let (shared, _) = RawShared::ref_from_prefix(&bytes[size_of::<RawPiece>()..]).ok()?;
    let end = HEAD_BYTES.checked_add(shared.body_bytes.get() as usize)?;
    let padding = bytes.get(end..)?;
    if padding.len() >= LOG_BLOCK_BYTES || padding != &[0; LOG_BLOCK_BYTES][..padding.len()] {
        return None;
    }
    let hash = batch_hash(key, &bytes[size_of::<RawPiece>()..end]);
    if piece_hash(key, piece, hash) != piece.hash {
        return None;
    }
    let batch = shared.read(&bytes[HEAD_BYTES..end])?;
    let (header_blocks, payload_blocks) = (piece.header_blocks.get(), piece.payload_blocks.get());
    let place = batch.places.get(usize::from(piece.member.get()))?;
    let here = *place == piece.place.get() && piece_fits(*place, header_blocks, payload_blocks);
    let rewritten = piece.flags.get() & REWRITTEN != 0;
    here.then_some(SegmentHeader { batch, hash, header_blocks, payload_blocks, rewritten })
}

/// Whether a piece ends at or below the last block that a place can name.
fn piece_fits(place: u32, header_blocks: u32, payload_blocks: u32) -> bool {
    u64::from(place) + u64::from(header_blocks) + u64::from(payload_blocks) <= u64::from(NO_PLACE)
}

/// Hash of all that the pieces of a batch share.
fn batch_hash(key: &LogKey, shared: &[u8]) -> BatchHash {
    BatchHash(*key.hasher().update(&BATCH_DOMAIN).update(shared).finalize().as_bytes())
}

/// Hash of a header: of its own fields, with the hash field zero, and of the batch's hash, which covers
/// everything else except the padding. So the manifest is hashed once for all members.
fn piece_hash(key: &LogKey, piece: &RawPiece, batch: BatchHash) -> [u8; 32] {
    let mut blank = *piece;
    blank.hash = [0; 32];
    *key.hasher().update(blank.as_bytes()).update(&batch.0).finalize().as_bytes()
}

/// The start of every segment: the member to which the piece belongs.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawPiece {
    magic: [u8; 8],
    hash: [u8; 32],
    array: [u8; 16],
    member: U16,
    flags: U16,
    place: U32,
    header_blocks: U32,
    payload_blocks: U32,
}

/// Next: the fields that all pieces share. The places follow, then the records.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawShared {
    sequence: U64,
    epoch_number: U64,
    epoch_id: U64,
    durable_upto: U64,
    tail: U64,
    previous: [u8; 32],
    lane: U16,
    place_count: U16,
    record_count: U32,
    body_bytes: U32,
    reserved: [u8; 4],
}

/// The start of every record. An in-place record continues with its columns; both kinds end with hashes.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRecord {
    kind: u8,
    flags: u8,
    columns: U16,
    row: U32,
    rows: U32,
    reserved: U32,
    stripe: U64,
    slot: U64,
    old_slot: U64,
}

const HEAD_BYTES: usize = size_of::<RawPiece>() + size_of::<RawShared>();

const _: () = {
    assert!(size_of::<RawPiece>() == 0x48);
    assert!(std::mem::offset_of!(RawPiece, hash) == 0x08);
    assert!(std::mem::offset_of!(RawPiece, array) == 0x28);
    assert!(std::mem::offset_of!(RawPiece, member) == 0x38);
    assert!(std::mem::offset_of!(RawPiece, place) == 0x3c);
    assert!(size_of::<RawShared>() == 0x58);
    assert!(std::mem::offset_of!(RawShared, previous) == 0x70 - 0x48);
    assert!(std::mem::offset_of!(RawShared, lane) == 0x90 - 0x48);
    assert!(HEAD_BYTES == 0xa0);
    assert!(size_of::<RawRecord>() == 0x28);
    assert!(std::mem::offset_of!(RawRecord, stripe) == 0x10);
    assert!(size_of::<BlockHash>() == 16);
};

const IN_PLACE: u8 = 1;
const FRESH: u8 = 2;
const DISCARD: u8 = 3;
/// Flag of an in-place record.
const FIRST: u8 = 1;

impl LogRecord {
    /// Appends its bytes. `width` is the number of members.
    fn write(&self, width: usize, bytes: &mut Vec<u8>) {
        let mut raw = RawRecord::new_zeroed();
        let (columns, hashes): (&[u16], &[BlockHash]) = match self {
            LogRecord::InPlace(record) => {
                raw.kind = IN_PLACE;
                raw.flags = if record.first { FIRST } else { 0 };
                raw.columns = (record.columns.len() as u16).into();
                raw.row = record.row.into();
                raw.rows = record.rows.into();
                raw.stripe = record.stripe.0.into();
                raw.slot = record.slot.0.into();
                assert!(
                    rows_possible(record.row, record.rows) && columns_possible(&record.columns, width),
                    "an in-place record of rows {}+{} and columns {:?} of {width}",
                    record.row,
                    record.rows,
                    record.columns
                );
                let blocks = record.columns.len() * record.rows as usize;
                assert_eq!(record.hashes.len(), blocks, "hashes of an in-place record");
                (&record.columns, &record.hashes)
            }
            LogRecord::Fresh(record) => {
                let rows = (record.hashes.len() / width.max(1)) as u32;
                raw.kind = FRESH;
                raw.columns = (width as u16).into();
                raw.rows = rows.into();
                raw.stripe = record.stripe.0.into();
                raw.slot = record.slot.0.into();
                raw.old_slot = record.old_slot.0.into();
                let whole = record.hashes.len() == rows as usize * width;
                assert!(whole && rows_possible(0, rows), "{} hashes of a stripe", record.hashes.len());
                (&[], &record.hashes)
            }
            LogRecord::Discard { stripe, slot } => {
                raw.kind = DISCARD;
                raw.stripe = stripe.0.into();
                raw.slot = slot.0.into();
                (&[], &[])
            }
        };
        bytes.extend_from_slice(raw.as_bytes());
        bytes.extend(columns.iter().flat_map(|column| column.to_le_bytes()));
        bytes.extend(hashes.iter().flat_map(|hash| hash.0));
    }
}

impl RawShared {
    /// The batch, from these fields and the bytes of places and records.
    fn read(&self, mut body: &[u8]) -> Option<Batch> {
        let counts = [self.sequence, self.epoch_number, self.durable_upto, self.tail];
        if counts.iter().any(|count| count.get() >= COUNT_END) {
            return None;
        }
        let width = usize::from(self.place_count.get());
        if width > usize::from(MAX_MEMBERS) {
            return None;
        }
        let places = take(&mut body, size_of::<U32>(), width)?
            .map(|place| u32::from_le_bytes(place.try_into().expect("chunks of this size")))
            .collect();
        // No capacity from the count, which only the records that follow can prove.
        let mut records = Vec::new();
        for _ in 0..self.record_count.get() {
            records.push(read_record(&mut body, width)?);
        }
        body.is_empty().then_some(Batch {
            lane: self.lane.get(),
            sequence: self.sequence.get(),
            epoch: EpochStamp { number: self.epoch_number.get(), id: self.epoch_id.get() },
            durable_upto: self.durable_upto.get(),
            tail: self.tail.get(),
            previous: BatchHash(self.previous),
            places,
            records,
        })
    }
}

fn read_record(body: &mut &[u8], width: usize) -> Option<LogRecord> {
    let (raw, rest) = RawRecord::ref_from_prefix(body).ok()?;
    *body = rest;
    let (stripe, slot) = (StripeIndex(raw.stripe.get()), SlotIndex(raw.slot.get()));
    let (row, rows) = (raw.row.get(), raw.rows.get());
    let counted = usize::from(raw.columns.get());
    match raw.kind {
        IN_PLACE if raw.flags & !FIRST == 0 && rows_possible(row, rows) => {
            let columns: Vec<u16> = take(body, size_of::<U16>(), counted)?
                .map(|column| u16::from_le_bytes(column.try_into().expect("chunks of this size")))
                .collect();
            if !columns_possible(&columns, width) {
                return None;
            }
            let hashes = take_hashes(body, counted * rows as usize)?;
            let first = raw.flags & FIRST != 0;
            Some(LogRecord::InPlace(InPlaceRecord { stripe, slot, first, row, rows, columns, hashes }))
        }
        FRESH if raw.flags == 0 && rows_possible(0, rows) && counted == width && width > 0 => {
            let hashes = take_hashes(body, width * rows as usize)?;
            let old_slot = SlotIndex(raw.old_slot.get());
            Some(LogRecord::Fresh(FreshRecord { stripe, slot, old_slot, hashes }))
        }
        DISCARD if raw.flags == 0 => Some(LogRecord::Discard { stripe, slot }),
        _ => None,
    }
}

/// Whether these are rows of a chunk, at least one.
fn rows_possible(row: u32, rows: u32) -> bool {
    rows >= 1 && row.checked_add(rows).is_some_and(|end| end <= MAX_ROWS)
}

/// Whether these are columns of a stripe, at least one, ascending.
fn columns_possible(columns: &[u16], width: usize) -> bool {
    columns.is_sorted_by(|a, b| a < b) && columns.last().is_some_and(|&last| usize::from(last) < width)
}

/// Takes `count` things of `size` bytes from the front; none, and nothing allocated, when there are fewer.
fn take<'a>(body: &mut &'a [u8], size: usize, count: usize) -> Option<std::slice::ChunksExact<'a, u8>> {
    let (taken, rest) = body.split_at_checked(size.checked_mul(count)?)?;
    *body = rest;
    Some(taken.chunks_exact(size))
}

fn take_hashes(body: &mut &[u8], count: usize) -> Option<Vec<BlockHash>> {
    let hashes = take(body, size_of::<BlockHash>(), count)?;
    Some(hashes.map(|hash| BlockHash(hash.try_into().expect("chunks of this size"))).collect())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::format::golden;
    use proptest::prelude::*;

    const ARRAY: Uuid = Uuid::from_u128(0x0123_4567_89ab_4def_8000_0000_0000_03e8);

    pub(in crate::format) fn key() -> LogKey {
        LogKey::derive(ARRAY, *b"0123456789abcdef")
    }

    fn block_hash(number: u64) -> BlockHash {
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&number.to_le_bytes());
        hash[8..].copy_from_slice(&(!number).to_be_bytes());
        BlockHash(hash)
    }

    /// A batch with something in every field, and the same at every run: 4 + 3 members, of which one is out.
    pub(in crate::format) fn example() -> Batch {
        Batch {
            lane: 0,
            sequence: 1001,
            epoch: EpochStamp { number: 9, id: 0xdead_beef_0123_4567 },
            durable_upto: 1000,
            tail: 990,
            previous: BatchHash([0x3c; 32]),
            places: vec![17, 17, 18, 17, 19, NO_PLACE, 4000],
            records: vec![
                LogRecord::InPlace(InPlaceRecord {
                    stripe: StripeIndex(7),
                    slot: SlotIndex(4100),
                    first: true,
                    row: 3,
                    rows: 2,
                    columns: vec![1, 4, 5, 6],
                    hashes: (0..8)
                        .map(|i| {
                            [BlockHash::UNWRITTEN, BlockHash::LOST]
                                .get(i)
                                .copied()
                                .unwrap_or(block_hash(i as u64))
                        })
                        .collect(),
                }),
                LogRecord::Fresh(FreshRecord {
                    stripe: StripeIndex(8),
                    slot: SlotIndex(4101),
                    old_slot: SlotIndex(8),
                    hashes: (0..14).map(|i| block_hash(100 + i)).collect(),
                }),
                LogRecord::Discard { stripe: StripeIndex(9), slot: SlotIndex(9) },
            ],
        }
    }

    fn records(width: u16) -> impl Strategy<Value = LogRecord> {
        let ids = (any::<u64>(), any::<u64>(), any::<u64>());
        (0..3u8, ids, prop::collection::btree_set(0..width, 1..=usize::from(width)), 1u32..20, any::<u32>())
            .prop_map(move |(kind, (stripe, slot, old), columns, rows, noise)| {
                let (stripe, slot, old_slot) = (StripeIndex(stripe), SlotIndex(slot), SlotIndex(old));
                let hashes =
                    |count| (0..count).map(|i| block_hash(u64::from(noise) << 20 | i as u64)).collect();
                match kind {
                    0 => LogRecord::InPlace(InPlaceRecord {
                        stripe,
                        slot,
                        first: noise % 2 == 0,
                        row: noise % (MAX_ROWS - rows + 1),
                        rows,
                        hashes: hashes(columns.len() * rows as usize),
                        columns: columns.into_iter().collect(),
                    }),
                    1 => {
                        let hashes = hashes(usize::from(width) * rows as usize);
                        LogRecord::Fresh(FreshRecord { stripe, slot, old_slot, hashes })
                    }
                    _ => LogRecord::Discard { stripe, slot },
                }
            })
    }

    /// A batch, and a member with a place in it.
    fn batches() -> impl Strategy<Value = (Batch, MemberIndex)> {
        (1u16..=255).prop_flat_map(|width| {
            let places = prop::collection::vec(
                prop_oneof![4 => 0u32..1 << 30, 1 => Just(NO_PLACE)],
                usize::from(width),
            );
            let numbers = any::<[u64; 5]>();
            (places, numbers, prop::collection::vec(records(width), 0..6), 0..width, any::<[u8; 32]>())
                .prop_map(|(mut places, numbers, records, member, previous)| {
                    let [sequence, number, durable_upto, tail, id] = numbers;
                    let [sequence, number, durable_upto, tail] =
                        [sequence, number, durable_upto, tail].map(|count| count % COUNT_END);
                    places[usize::from(member)] &= (1 << 30) - 1;
                    let batch = Batch {
                        lane: sequence as u16,
                        sequence,
                        epoch: EpochStamp { number, id },
                        durable_upto,
                        tail,
                        previous: BatchHash(previous),
                        places,
                        records,
                    };
                    (batch, MemberIndex(member))
                })
        })
    }

    proptest! {
        #[test]
        fn every_header_reads_back_as_it_was_written((batch, member) in batches(), payload in 0u32..1 << 20) {
            let bytes = batch.encode(&key(), ARRAY, member, payload);
            prop_assert_eq!(bytes.len(), batch.header_blocks() as usize * LOG_BLOCK_BYTES);
            let place = batch.places[usize::from(member.0)];
            let decode = |bytes: &[u8]| SegmentHeader::decode(&key(), ARRAY, member, place, bytes);
            let header = decode(&bytes).unwrap();
            prop_assert_eq!(header.hash, batch.hash(&key()));
            prop_assert_eq!((header.header_blocks, header.payload_blocks), (batch.header_blocks(), payload));
            prop_assert_eq!(&header.batch, &batch);
            // What follows does not matter, what is missing is asked for.
            let mut long = bytes.clone();
            long.resize(bytes.len() + LOG_BLOCK_BYTES, 0xee);
            prop_assert_eq!(decode(&long), Ok(header));
            if bytes.len() > LOG_BLOCK_BYTES {
                let longer = SegmentError::Longer { blocks: batch.header_blocks() };
                prop_assert_eq!(decode(&bytes[..bytes.len() - LOG_BLOCK_BYTES]), Err(longer));
            }
        }

        #[test]
        fn a_header_is_refused_for_another_array_member_place_or_key((batch, member) in batches()) {
            let bytes = batch.encode(&key(), ARRAY, member, 0);
            let place = batch.places[usize::from(member.0)];
            let other = MemberIndex(member.0 ^ 1);
            let refused = |key: &LogKey, array, member, place| SegmentHeader::decode(key, array, member, place, &bytes);
            prop_assert_eq!(refused(&key(), ARRAY, other, place), Err(SegmentError::None));
            prop_assert_eq!(refused(&key(), ARRAY, member, place + 1), Err(SegmentError::None));
            prop_assert_eq!(refused(&key(), Uuid::nil(), member, place), Err(SegmentError::None));
            let wrong = LogKey::derive(ARRAY, [0; 16]);
            prop_assert_eq!(refused(&wrong, ARRAY, member, place), Err(SegmentError::Damaged));
        }

        #[test]
        fn every_shared_field_is_part_of_the_identity((batch, member) in batches(), pick in 0usize..9) {
            let mut other = batch.clone();
            match pick {
                0 => other.lane ^= 1,
                1 => other.sequence ^= 1,
                2 => other.epoch.number ^= 1,
                3 => other.epoch.id ^= 1,
                4 => other.durable_upto ^= 1,
                5 => other.tail ^= 1,
                6 => other.previous.0[31] ^= 1,
                7 => other.places[usize::from(member.0)] ^= 1,
                _ => other.records.push(LogRecord::Discard { stripe: StripeIndex(0), slot: SlotIndex(0) }),
            }
            prop_assert_ne!(batch.hash(&key()), other.hash(&key()));
        }

        #[test]
        fn bytes_with_right_hashes_and_wrong_fields_never_panic(
            edits in prop::collection::vec((0usize..600, any::<u8>()), 1..5),
        ) {
            // What a faulty writer that has the key would leave.
            let mut bytes = example().encode(&key(), ARRAY, MemberIndex(2), 8);
            for (at, byte) in edits {
                bytes[0x40 + at] = byte;
            }
            forge(&mut bytes);
            if let Ok(header) = SegmentHeader::decode(&key(), ARRAY, MemberIndex(2), 18, &bytes) {
                let again = header.batch.encode(&key(), ARRAY, MemberIndex(2), header.payload_blocks);
                let again = SegmentHeader::decode(&key(), ARRAY, MemberIndex(2), 18, &again).unwrap();
                prop_assert_eq!(again.batch, header.batch);
            }
        }

        #[test]
        fn noise_is_no_header(mut bytes in prop::collection::vec(any::<u8>(), 0..9000), dressed in any::<bool>()) {
            if dressed && bytes.len() >= HEAD_BYTES {
                let good = example().encode(&key(), ARRAY, MemberIndex(2), 8);
                bytes[..0x3c].copy_from_slice(&good[..0x3c]);
            }
            prop_assert!(SegmentHeader::decode(&key(), ARRAY, MemberIndex(2), 18, &bytes).is_err());
        }
    }

    /// Corrects the hash of a header of one block.
    fn forge(bytes: &mut [u8]) {
        let shared = RawShared::ref_from_prefix(&bytes[0x48..]).unwrap().0;
        let end = (HEAD_BYTES + shared.body_bytes.get() as usize).min(bytes.len());
        let hash = batch_hash(&key(), &bytes[0x48..end]);
        let piece = RawPiece::mut_from_prefix(bytes).unwrap().0;
        piece.hash = piece_hash(&key(), piece, hash);
    }

    #[test]
    fn every_flipped_byte_is_refused() {
        let mut bytes = example().encode(&key(), ARRAY, MemberIndex(2), 8);
        assert_eq!(bytes.len(), LOG_BLOCK_BYTES);
        for at in 0..bytes.len() {
            for mask in [0x01, 0x80, 0xff] {
                bytes[at] ^= mask;
                let read = SegmentHeader::decode(&key(), ARRAY, MemberIndex(2), 18, &bytes);
                assert!(read.is_err(), "byte {at:#x} xor {mask:#x}");
                bytes[at] ^= mask;
            }
        }
    }

    #[test]
    fn every_truncation_asks_for_what_is_missing() {
        let mut batch = example();
        let more = batch.records[1].clone();
        batch.records.extend(std::iter::repeat_n(more, 20));
        let bytes = batch.encode(&key(), ARRAY, MemberIndex(2), 8);
        assert_eq!(bytes.len(), 2 * LOG_BLOCK_BYTES);
        for len in 0..bytes.len() {
            let blocks = if len < LOG_BLOCK_BYTES { 1 } else { 2 };
            let read = SegmentHeader::decode(&key(), ARRAY, MemberIndex(2), 18, &bytes[..len]);
            assert_eq!(read, Err(SegmentError::Longer { blocks }), "{len} bytes");
        }
    }

    #[test]
    fn an_unverified_header_asks_for_no_more_than_the_limit() {
        let mut bytes = example().encode(&key(), ARRAY, MemberIndex(2), 8);
        for (blocks, expected) in [
            (0, SegmentError::Damaged),
            (MAX_HEADER_BLOCKS, SegmentError::Longer { blocks: MAX_HEADER_BLOCKS }),
            (MAX_HEADER_BLOCKS + 1, SegmentError::Damaged),
            (u32::MAX, SegmentError::Damaged),
        ] {
            bytes[0x40..0x44].copy_from_slice(&blocks.to_le_bytes());
            assert_eq!(SegmentHeader::decode(&key(), ARRAY, MemberIndex(2), 18, &bytes), Err(expected));
        }
    }

    #[test]
    fn impossible_fields_are_refused_although_the_hash_is_right() {
        let cases: &[(usize, &[u8], &str)] = &[
            (0x44, &[0xff; 4], "payload beyond every place"),
            (0x92, &[0, 1], "256 places"),
            (0x94, &[2], "a record left over"),
            (0x94, &[0xff; 4], "more records than bytes"),
            (0x98, &[0xff; 4], "more bytes than blocks"),
            (0xa8, &[0; 4], "another place than this"),
            (0xbc, &[4], "record kind"),
            (0xbd, &[2], "record flags"),
            (0xbe, &[0, 0], "no columns"),
            (0xc0, &[0xff; 4], "first row"),
            (0xc4, &[0; 4], "no rows"),
            (0xc4, &[0xff; 4], "rows"),
            (0xe4, &[4, 0], "columns that do not ascend"),
            (0xea, &[7, 0], "a column beyond the members"),
        ];
        for (at, bytes, what) in cases {
            let mut header = example().encode(&key(), ARRAY, MemberIndex(2), 8);
            header[*at..at + bytes.len()].copy_from_slice(bytes);
            forge(&mut header);
            let read = SegmentHeader::decode(&key(), ARRAY, MemberIndex(2), 18, &header);
            assert_eq!(read, Err(SegmentError::Damaged), "{what}");
        }
    }

    #[test]
    fn a_batch_that_breaks_the_format_is_not_written() {
        let broken = |change: fn(&mut Batch)| {
            let mut batch = example();
            change(&mut batch);
            std::panic::catch_unwind(|| batch.encode(&key(), ARRAY, MemberIndex(2), 8)).is_err()
        };
        fn in_place(batch: &mut Batch) -> &mut InPlaceRecord {
            match &mut batch.records[0] {
                LogRecord::InPlace(record) => record,
                other => panic!("{other:?}"),
            }
        }
        assert!(!broken(|_| ()));
        assert!(broken(|batch| batch.places[2] = NO_PLACE));
        assert!(broken(|batch| batch.places[2] = NO_PLACE - 8));
        assert!(broken(|batch| batch.places.truncate(1)));
        assert!(broken(|batch| in_place(batch).columns[0] = 5));
        assert!(broken(|batch| in_place(batch).rows = 3));
        assert!(broken(|batch| in_place(batch).row = MAX_ROWS - 1));
        assert!(broken(|batch| in_place(batch).hashes.truncate(7)));
    }

    #[test]
    fn the_longest_header_has_room_for_the_widest_stripes() {
        let places = vec![0; usize::from(MAX_MEMBERS)];
        let hashes = vec![block_hash(1); usize::from(MAX_MEMBERS) * MAX_ROWS as usize];
        let stripe = StripeIndex(0);
        let fresh =
            LogRecord::Fresh(FreshRecord { stripe, slot: SlotIndex(1), old_slot: SlotIndex(0), hashes });
        let records = vec![fresh; 4];
        let batch = Batch { places, records, ..example() };
        assert!(batch.header_blocks() <= MAX_HEADER_BLOCKS, "{}", batch.header_blocks());
        let bytes = batch.encode(&key(), ARRAY, MemberIndex(254), 0);
        assert_eq!(SegmentHeader::decode(&key(), ARRAY, MemberIndex(254), 0, &bytes).unwrap().batch, batch);
    }

    #[test]
    fn the_golden_segment_is_written_and_read_byte_for_byte() {
        let bytes = golden("log-segment.bin", &example().encode(&key(), ARRAY, MemberIndex(2), 8));
        let header = SegmentHeader::decode(&key(), ARRAY, MemberIndex(2), 18, &bytes).unwrap();
        assert_eq!((header.batch, header.payload_blocks), (example(), 8));
    }

    #[test]
    fn the_key_depends_on_the_array_and_the_secret() {
        assert_ne!(key(), LogKey::derive(ARRAY, [0; 16]));
        assert_ne!(key(), LogKey::derive(Uuid::nil(), *b"0123456789abcdef"));
    }
}
