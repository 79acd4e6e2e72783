//! Batches and chains made by hand, for tests of the pure parts.

use crate::array::geometry::Map;
use crate::array::recovery::chain::{Bits, Chain, LogBatch, Piece};
use crate::codec::BlockHasher;
use crate::format::{
    Batch, BatchHash, EpochStamp, FreshRecord, InPlaceRecord, LogKey, LogRecord, SegmentHeader,
};
use crate::units::{BlockHash, MemberIndex, SlotIndex, StripeIndex};

pub(crate) const KEY: LogKey = LogKey([3; 32]);
pub(crate) const HASHER: BlockHasher = BlockHasher::Crc32c;
pub(crate) const RING: u32 = 1 << 20;

pub(crate) fn map(k: usize, m: usize, rows: usize) -> Map {
    Map { k, m, chunk: rows * 4096, slots: 8, ahead: 0 }
}

/// The hash of a content that `value` stands for.
pub(crate) fn hash(value: u64) -> BlockHash {
    HASHER.hash(&value.to_le_bytes())
}

/// Blocks of a slot, their contents numbered from `value` on.
pub(crate) fn in_place(slot: u64, row: u32, rows: u32, columns: &[u16], value: u64) -> LogRecord {
    let count = u64::from(rows) * columns.len() as u64;
    LogRecord::InPlace(InPlaceRecord {
        stripe: StripeIndex(slot),
        slot: SlotIndex(slot),
        first: false,
        row,
        rows,
        columns: columns.to_vec(),
        hashes: (0..count).map(|at| hash(value + at)).collect(),
    })
}

pub(crate) fn fresh(stripe: u64, old: u64, slot: u64, map: &Map, value: u64) -> LogRecord {
    let count = (map.width() * map.chunk / 4096) as u64;
    LogRecord::Fresh(FreshRecord {
        stripe: StripeIndex(stripe),
        slot: SlotIndex(slot),
        old_slot: SlotIndex(old),
        hashes: (0..count).map(|at| hash(value + at)).collect(),
    })
}

pub(crate) fn batch(
    sequence: u64,
    epoch: u64,
    previous: BatchHash,
    records: Vec<LogRecord>,
    width: usize,
) -> Batch {
    Batch {
        lane: 0,
        sequence,
        epoch: EpochStamp { number: epoch, id: epoch },
        durable_upto: 0,
        tail: 0,
        previous,
        places: vec![(sequence as u32) * 1000; width],
        records,
    }
}

pub(crate) fn header(batch: &Batch) -> SegmentHeader {
    let (hash, header_blocks) = (batch.hash(&KEY), batch.header_blocks());
    SegmentHeader { batch: batch.clone(), hash, header_blocks, payload_blocks: 0, rewritten: false }
}

/// A chain of batches with these records, from sequence 0. All members hold all of it except for the blocks
/// in `missing`: (batch, member, ordinal).
pub(crate) fn chain(
    map: &Map,
    noted: u32,
    batches: Vec<Vec<LogRecord>>,
    missing: impl Fn(u32, u16, u32) -> bool,
) -> Chain {
    let mut all = Vec::new();
    let mut previous = BatchHash::default();
    for (at, records) in batches.into_iter().enumerate() {
        let batch = batch(at as u64, 1, previous, records, map.width());
        previous = batch.hash(&KEY);
        let mut entry = LogBatch::new(header(&batch), map, RING).unwrap();
        for member in (0..map.width() as u16).map(MemberIndex) {
            let blocks = entry.payload_blocks(member);
            let mut good = Bits::new(blocks);
            (0..blocks)
                .filter(|&block| !missing(at as u32, member.0, block))
                .for_each(|block| good.set(block));
            entry.set_piece(Piece { member, header: true, good });
        }
        all.push(entry);
    }
    Chain::of(all, noted, map.width())
}
