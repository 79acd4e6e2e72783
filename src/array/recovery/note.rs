//! The note that recovery writes (R7): an empty batch that covers all before it, and where it goes.
//!
//! Pure. A segment is contiguous: where it does not fit between the last one and the end of the ring, it goes to the
//! start. Must not know how it is written.

use super::RecoveryError;
use super::chain::{Chain, LogBatch};
use crate::format::{Batch, BatchHash, EpochStamp, MemberSet, NO_PLACE};
use crate::units::MemberIndex;

/// For each member the block of its ring behind its last piece.
#[must_use]
pub fn ends(batches: &[LogBatch], width: usize) -> Vec<u32> {
    let last = |at| batches.iter().rev().find_map(|batch| batch.end(MemberIndex(at as u16)));
    (0..width).map(|at| last(at).unwrap_or(0)).collect()
}

/// Whether a batch says no more than that all before it is durable.
#[must_use]
pub fn is_note(batch: &Batch) -> bool {
    batch.records.is_empty() && batch.durable_upto >= batch.sequence
}

/// The note behind the first `prefix` batches of a chain.
///
/// # Errors
/// When a member's ring has no room for it.
pub fn batch(
    chain: &Chain,
    prefix: u32,
    usable: MemberSet,
    epoch: EpochStamp,
    ring_blocks: u32,
) -> Result<Batch, RecoveryError> {
    let batches = &chain.batches[..prefix as usize];
    let sequence = chain.tail + u64::from(prefix);
    let width = chain.batches.first().map_or(0, |first| first.batch.places.len());
    let mut note = Batch {
        lane: chain.batches.first().map_or(0, |first| first.batch.lane),
        sequence,
        epoch,
        durable_upto: sequence,
        tail: chain.tail,
        previous: batches.last().map_or(BatchHash::default(), |last| last.hash),
        places: vec![NO_PLACE; width],
        records: Vec::new(),
    };
    let blocks = note.header_blocks();
    let ends = ends(batches, width);
    for member in usable.iter() {
        let end = ends[usize::from(member.0)];
        let place = if u64::from(end) + u64::from(blocks) <= u64::from(ring_blocks) { end } else { 0 };
        let mut pieces = batches.iter().filter_map(|batch| Some((batch.place(member)?, batch.end(member)?)));
        if blocks > ring_blocks || pieces.any(|(from, to)| from < place + blocks && place < to) {
            return Err(RecoveryError::NoRoom { member });
        }
        note.places[usize::from(member.0)] = place;
    }
    Ok(note)
}
