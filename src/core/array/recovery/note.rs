//! The note that recovery writes (R7): an empty batch that covers all before it, and where it goes.
//!
//! Pure. A segment is contiguous: where it does not fit between the last one and the end of the ring, it goes
//! to the start. Must not know how it is written.

use crate::array::recovery::RecoveryError;
use crate::array::recovery::chain::{Chain, LogBatch};
use crate::format::{Batch, BatchHash, EpochStamp, MemberSet, NO_PLACE};
use crate::units::MemberIndex;

/// For each member the block of its ring behind its last piece.
#[must_use]
pub(super) fn ends(batches: &[LogBatch], width: usize) -> Vec<u32> {
    let last = |at| batches.iter().rev().find_map(|batch| batch.end(MemberIndex(at as u16)));
    (0..width).map(|at| last(at).unwrap_or(0)).collect()
}

/// Whether a batch records nothing except that all before it is durable.
#[must_use]
pub(super) fn is_note(batch: &Batch) -> bool {
    batch.records.is_empty() && batch.durable_upto >= batch.sequence
}

/// The note behind the first `prefix` batches of a chain.
///
/// # Errors
/// When a member's ring has no room for it.
pub(super) fn batch(
    chain: &Chain,
    prefix: u32,
    usable: MemberSet,
    epoch: EpochStamp,
    ring_blocks: u32,
) -> Result<Batch, RecoveryError> {
    let batches = &chain.batches()[..prefix as usize];
    let sequence = chain.sequence(prefix);
    let first = chain.batches().first().map(LogBatch::batch);
    let width = first.map_or(0, |first| first.places.len());
    let mut note = Batch {
        lane: first.map_or(0, |first| first.lane),
        sequence,
        epoch,
        durable_upto: sequence,
        // The lowest: a member that has yet to redo content that is in place on others must not be given a
        // higher one.
        tail: chain.sequence(0),
        previous: batches.last().map_or(BatchHash::default(), LogBatch::hash),
        places: vec![NO_PLACE; width],
        records: Vec::new(),
    };
    let blocks = note.header_blocks();
    let ends = ends(batches, width);
    for member in usable.iter() {
        let end = ends[usize::from(member.0)];
        let place = if u64::from(end) + u64::from(blocks) <= u64::from(ring_blocks) { end } else { 0 };
        // Batches below the highest tail had given their space back, except on a member that was rolled back.
        let held = batches.iter().skip(chain.top() as usize);
        let mut pieces = held.filter_map(|batch| Some((batch.place(member)?, batch.end(member)?)));
        if blocks > ring_blocks || pieces.any(|(from, to)| from < place + blocks && place < to) {
            return Err(RecoveryError::NoRoom { member });
        }
        note.places[usize::from(member.0)] = place;
    }
    Ok(note)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::recovery::tests::parts::{RING, batch as batch_of, header, in_place, map};

    const EPOCH: EpochStamp = EpochStamp { number: 9, id: 9 };

    /// Two batches of two blocks each on member 0, at these places.
    fn log(first: u32, second: u32) -> Chain {
        let batches = [(0, first), (1, second)].map(|(sequence, place)| {
            let records = vec![in_place(0, 0, 1, &[0], sequence + 1)];
            let batch = batch_of(sequence, 1, BatchHash::default(), records, 1);
            let batch = Batch { places: vec![place], ..batch };
            LogBatch::new(header(&batch), &map(1, 0, 1), RING).unwrap()
        });
        Chain::of(batches.into(), 0, 1)
    }

    fn place(chain: &Chain, prefix: u32, ring: u32) -> Result<u32, RecoveryError> {
        batch(chain, prefix, MemberSet::first(1), EPOCH, ring).map(|note| note.places[0])
    }

    #[test]
    fn the_note_goes_behind_the_prefix_and_wraps_where_the_ring_ends() {
        assert_eq!(place(&log(0, 2), 2, 8), Ok(4));
        assert_eq!(place(&log(0, 2), 1, 8), Ok(2), "over what is dropped");
        assert_eq!(place(&log(4, 6), 2, 9), Ok(8));
        assert_eq!(place(&log(4, 6), 2, 8), Ok(0));
        assert_eq!(place(&log(4, 6), 0, 8), Ok(0));
    }

    #[test]
    fn a_ring_without_room_is_told() {
        let full = Err(RecoveryError::NoRoom { member: MemberIndex(0) });
        assert_eq!(place(&log(0, 2), 2, 4), full);
        assert_eq!(place(&log(3, 1), 2, 6), full);
    }

    #[test]
    fn it_covers_the_prefix_and_continues_the_chain() {
        let log = log(0, 2);
        let note = batch(&log, 1, MemberSet::first(1), EPOCH, 8).unwrap();
        assert_eq!((note.sequence, note.durable_upto, note.tail, note.epoch), (1, 1, 0, EPOCH));
        assert_eq!(note.previous, log.batch(0).hash());
        assert!(is_note(&note) && !is_note(log.batch(0).batch()));
        assert!(!is_note(&Batch { durable_upto: 0, ..note }), "a tail carrier covers nothing");
    }
}
