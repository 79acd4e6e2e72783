//! The redo log's segments: one segment is one member's piece of a batch. See docs/on-disk-format.md, "Redo log".
//!
//! A segment is whole 4 KiB blocks: the header blocks (fixed fields, places, records), then the payload: for each
//! in-place record, in order, the member's own blocks in row order. Everything but the payload is the same on every
//! member, save the fields that say whose piece it is. Which member holds which column is not known here.
//!
//! Invariants: `decode` accepts exactly what `encode` writes for the same array, member and place, and never reads or
//! allocates beyond the bytes it is given, whatever they are.

use crate::units::{BlockHash, MemberIndex, SlotIndex, StripeIndex};
use uuid::Uuid;

/// Bytes of a block of the log: segments start and end on its multiples.
pub const LOG_BLOCK_BYTES: usize = 4096;

/// The place of a member that had no part in a batch.
pub const NO_PLACE: u32 = u32::MAX;

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
    /// Shard lane, 0 while there is one.
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
    /// New hash of each modified block, by column, then row. A column has payload on its member for those of its
    /// blocks whose hash [`BlockHash::is_stored`].
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
}

/// Why bytes are no header of a segment.
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

impl Batch {
    /// Blocks of header that this batch takes in every piece.
    #[must_use]
    pub fn header_blocks(&self) -> u32 {
        todo!()
    }

    /// Identity of this batch.
    #[must_use]
    pub fn hash(&self, _key: &LogKey) -> BatchHash {
        todo!()
    }

    /// The header blocks of `member`'s piece with `payload_blocks` blocks of payload.
    ///
    /// # Panics
    /// When the member has no place in the batch, or counts do not fit the format's fields.
    #[must_use]
    pub fn encode(&self, _key: &LogKey, _array: Uuid, _member: MemberIndex, _payload_blocks: u32) -> Vec<u8> {
        todo!()
    }
}

impl SegmentHeader {
    /// Reads the header of `member`'s piece from `bytes`, whole blocks that start at block `place` of the log region.
    ///
    /// # Errors
    /// When there is none, or more bytes are needed to tell.
    pub fn decode(
        _key: &LogKey,
        _array: Uuid,
        _member: MemberIndex,
        _place: u32,
        _bytes: &[u8],
    ) -> Result<SegmentHeader, SegmentError> {
        todo!()
    }
}
