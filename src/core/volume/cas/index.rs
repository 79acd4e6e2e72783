//! The hash index: which chunk may have a hash. It is soft: what it says is compared with the table, and what
//! it has forgotten is stored once more.
//!
//! A table of buckets of eight slots, each of which holds 24 bits of a hash and a chunk id. Its size is fixed
//! when it is made: with a slot and a quarter for each chunk, 10 bytes a chunk. A bucket that is full forgets
//! one of its chunks.

use crate::array::mutation::{Mutation, is_off};
use crate::format::cas::{ChunkHash, ChunkId, ID_BITS};

const SLOTS: usize = 8;

/// A bucket fills a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Bucket([u64; SLOTS]);

/// See the head of this file.
pub(super) struct Index {
    /// A power of two of them.
    buckets: Vec<Bucket>,
    entries: u64,
    /// Which slot a full bucket gives up next.
    hand: usize,
}

impl Index {
    /// An index for about so many chunks.
    pub(super) fn for_chunks(chunks: u64) -> Index {
        let buckets = (chunks + chunks / 4).div_ceil(SLOTS as u64).max(1).next_power_of_two();
        Index { buckets: vec![Bucket([0; SLOTS]); buckets as usize], entries: 0, hand: 0 }
    }

    /// The bucket of a hash, and its bits in a slot.
    fn home(&self, hash: &ChunkHash) -> (usize, u64) {
        let (low, high) = hash.as_chunks::<8>().0.split_at(1);
        let at = u64::from_le_bytes(low[0]) as usize & (self.buckets.len() - 1);
        // Other bits than those that choose the bucket.
        (at, u64::from_le_bytes(high[0]) >> ID_BITS << ID_BITS)
    }

    /// Chunks that may have this hash.
    pub(super) fn find(&self, hash: &ChunkHash) -> impl Iterator<Item = ChunkId> + use<> {
        let (at, tag) = self.home(hash);
        let ids = self.buckets[at].0;
        let by_bucket = is_off(Mutation::CasDuplicateByItsTag);
        ids.into_iter()
            .filter(move |&slot| slot != 0 && (slot >> ID_BITS << ID_BITS == tag || by_bucket))
            .map(|slot| ChunkId(slot & ((1 << ID_BITS) - 1)))
    }

    /// Takes a chunk in.
    pub(super) fn insert(&mut self, hash: &ChunkHash, id: ChunkId) {
        let (at, tag) = self.home(hash);
        let slots = &mut self.buckets[at].0;
        if slots.contains(&(tag | id.0)) {
            return;
        }
        let free = slots.iter().position(|&slot| slot == 0);
        self.entries += u64::from(free.is_some());
        let slot = free.unwrap_or_else(|| {
            self.hand = (self.hand + 1) % SLOTS;
            self.hand
        });
        slots[slot] = tag | id.0;
    }

    /// Forgets a chunk.
    pub(super) fn remove(&mut self, hash: &ChunkHash, id: ChunkId) {
        let (at, tag) = self.home(hash);
        if let Some(slot) = self.buckets[at].0.iter_mut().find(|slot| **slot == tag | id.0) {
            *slot = 0;
            self.entries -= 1;
        }
    }

    /// Chunks that it knows.
    pub(super) fn entries(&self) -> u64 {
        self.entries
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> u64 {
        size_of_val(&self.buckets[..]) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u64) -> ChunkHash {
        *blake3::hash(&number.to_le_bytes()).as_bytes()
    }

    #[test]
    fn what_was_inserted_is_found_until_it_is_removed() {
        let mut index = Index::for_chunks(1000);
        (1..=1000).for_each(|number| index.insert(&hash(number), ChunkId(number)));
        let found = (1..=1000).filter(|&n| index.find(&hash(n)).any(|id| id == ChunkId(n))).count();
        assert!(found >= 990, "a bucket in a thousand may be full: {found}");
        assert_eq!(index.entries(), found as u64);
        (1..=500).for_each(|number| index.remove(&hash(number), ChunkId(number)));
        assert!((1..=500).all(|n| index.find(&hash(n)).next().is_none()));
        index.remove(&hash(501), ChunkId(502));
        index.insert(&hash(600), ChunkId(600));
        assert!(index.find(&hash(600)).eq([ChunkId(600)]));
    }

    #[test]
    fn a_full_bucket_forgets_and_the_count_stays_true() {
        let mut index = Index::for_chunks(1);
        (1..=100).for_each(|number| index.insert(&hash(number), ChunkId(number)));
        assert_eq!(index.entries(), 8 * index.buckets.len() as u64);
        assert_eq!(index.bytes(), 64 * index.buckets.len() as u64);
    }
}
