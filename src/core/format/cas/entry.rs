//! Entries of the journal: a header with records, then the bytes of chunks that lie in the entry itself.

use super::{CAS_BLOCK_BYTES, CasKey, CasRecord, SegmentIndex};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Identity of an entry: the keyed hash of all its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct EntryHash(pub [u8; 32]);

/// Where an entry of the journal begins, or the next one will.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalPlace {
    /// Its number.
    pub sequence: u64,
    /// Hash of the entry before.
    pub previous: EntryHash,
    /// The segment.
    pub segment: SegmentIndex,
    /// Block of the segment's user data.
    pub block: u32,
    /// The segment in which the journal goes on after this one.
    pub next: SegmentIndex,
}

/// Longest header, in blocks. Bounds what a header that is not verified yet can make a reader read.
pub const MAX_ENTRY_HEADER_BLOCKS: u32 = 256;

const MAGIC: [u8; 8] = *b"CALPEJNL";

/// What the first block of an entry says of its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryHeader {
    /// Blocks of header, records included.
    pub header_blocks: u32,
    /// Blocks of chunks behind it.
    pub chunk_blocks: u32,
    /// Its place as it says, to be compared with where it was read.
    pub place: JournalPlace,
}

impl EntryHeader {
    /// Blocks of the entry.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.header_blocks + self.chunk_blocks
    }
}

/// An entry that verifies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalEntry {
    /// Its records, in order.
    pub records: Vec<CasRecord>,
    /// Its identity, which the next entry names.
    pub hash: EntryHash,
}

/// Why bytes are not an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// Not an entry, or that of another place.
    #[error("no entry of the journal starts here")]
    None,
    /// It starts like an entry and does not verify.
    #[error("a damaged or torn entry of the journal")]
    Damaged,
    /// It verifies, and its records make no sense: written by a version that this one does not know.
    #[error("an entry of the journal with records that this version does not know")]
    Unknown,
}

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    hash: [u8; 32],
    magic: [u8; 8],
    sequence: U64,
    life: U64,
    previous: [u8; 32],
    segment: U32,
    block: U32,
    next: U32,
    header_blocks: U32,
    chunk_blocks: U32,
    record_bytes: U32,
}

const HASH_BYTES: usize = 32;

impl JournalEntry {
    /// Blocks of header that records of so many bytes take.
    #[must_use]
    pub fn header_blocks(record_bytes: usize) -> u32 {
        (size_of::<RawHeader>() + record_bytes).div_ceil(CAS_BLOCK_BYTES) as u32
    }

    /// Bytes of records that fit so many blocks of header.
    #[must_use]
    pub fn record_room(header_blocks: u32) -> usize {
        header_blocks as usize * CAS_BLOCK_BYTES - size_of::<RawHeader>()
    }

    /// Writes the header of an entry to `header`, which has the blocks that it takes. `life` is random, and
    /// that of the start that writes it (J5); `chunks` are the bytes of the chunks behind it. Returns the
    /// entry's identity.
    ///
    /// # Panics
    /// When `header` has another size.
    pub fn encode<'a>(
        key: &CasKey,
        (place, life): (&JournalPlace, u64),
        records: &[CasRecord],
        chunks: impl Iterator<Item = &'a [u8]> + Clone,
        header: &mut [u8],
    ) -> EntryHash {
        let mut bytes = Vec::with_capacity(header.len());
        records.iter().for_each(|record| record.encode(&mut bytes));
        let blocks = JournalEntry::header_blocks(bytes.len());
        assert_eq!(header.len(), blocks as usize * CAS_BLOCK_BYTES, "as long as the records need");
        let chunk_bytes: usize = chunks.clone().map(<[u8]>::len).sum();
        let mut raw = RawHeader::new_zeroed();
        raw.magic = MAGIC;
        (raw.sequence, raw.previous) = (place.sequence.into(), place.previous.0);
        raw.life = life.into();
        (raw.segment, raw.block) = (place.segment.0.into(), place.block.into());
        raw.next = place.next.0.into();
        raw.header_blocks = blocks.into();
        raw.chunk_blocks = ((chunk_bytes / CAS_BLOCK_BYTES) as u32).into();
        raw.record_bytes = (bytes.len() as u32).into();
        let (head, rest) = header.split_at_mut(size_of::<RawHeader>());
        head.copy_from_slice(raw.as_bytes());
        rest[..bytes.len()].copy_from_slice(&bytes);
        rest[bytes.len()..].fill(0);
        let mut hasher = key.hasher();
        hasher.update(&header[HASH_BYTES..]);
        chunks.for_each(|chunk| {
            hasher.update(chunk);
        });
        let hash = EntryHash(*hasher.finalize().as_bytes());
        header[..HASH_BYTES].copy_from_slice(&hash.0);
        hash
    }

    /// What the first block of an entry says of its length; nothing of it is verified yet.
    ///
    /// # Errors
    /// When no entry starts here, or it cannot be as long as it says.
    pub fn peek(block: &[u8]) -> Result<EntryHeader, EntryError> {
        let (raw, _) = RawHeader::ref_from_prefix(block).map_err(|_| EntryError::None)?;
        if raw.magic != MAGIC {
            return Err(EntryError::None);
        }
        let header = EntryHeader {
            header_blocks: raw.header_blocks.get(),
            chunk_blocks: raw.chunk_blocks.get(),
            place: JournalPlace {
                sequence: raw.sequence.get(),
                previous: EntryHash(raw.previous),
                segment: SegmentIndex(raw.segment.get()),
                block: raw.block.get(),
                next: SegmentIndex(raw.next.get()),
            },
        };
        let is_possible = header.header_blocks <= MAX_ENTRY_HEADER_BLOCKS
            && JournalEntry::header_blocks(raw.record_bytes.get() as usize) == header.header_blocks
            && header.header_blocks.checked_add(header.chunk_blocks).is_some();
        if is_possible { Ok(header) } else { Err(EntryError::Damaged) }
    }

    /// Reads an entry from all its bytes.
    ///
    /// # Errors
    /// When they are not an entry.
    pub fn decode(bytes: &[u8], key: &CasKey) -> Result<JournalEntry, EntryError> {
        let header = JournalEntry::peek(bytes)?;
        if bytes.len() as u64 != u64::from(header.blocks()) * CAS_BLOCK_BYTES as u64 {
            return Err(EntryError::Damaged);
        }
        let hash = EntryHash(*key.hasher().update(&bytes[HASH_BYTES..]).finalize().as_bytes());
        if hash.0 != bytes[..HASH_BYTES] {
            return Err(EntryError::Damaged);
        }
        let (raw, rest) = RawHeader::ref_from_prefix(bytes).map_err(|_| EntryError::Damaged)?;
        let records = CasRecord::decode_all(&rest[..raw.record_bytes.get() as usize])
            .map_err(|_| EntryError::Unknown)?;
        Ok(JournalEntry { records, hash })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::cas::{CatalogueSlot, ChunkId};
    use uuid::Uuid;

    fn written(records: &[CasRecord], chunks: &[u8]) -> (Vec<u8>, EntryHash, CasKey) {
        let key = CasKey::derive(Uuid::from_u128(1), [0; 16]);
        let place = JournalPlace {
            sequence: 9,
            previous: EntryHash([3; 32]),
            segment: SegmentIndex(4),
            block: 5,
            next: SegmentIndex(6),
        };
        let bytes: usize = records.iter().map(CasRecord::bytes).sum();
        let mut header = vec![0xff; JournalEntry::header_blocks(bytes) as usize * CAS_BLOCK_BYTES];
        let hash = JournalEntry::encode(&key, (&place, 77), records, chunks.chunks(4096), &mut header);
        let head = JournalEntry::peek(&header[..CAS_BLOCK_BYTES]).expect("a header");
        assert_eq!(head.place, place);
        assert_eq!(head.blocks() as usize * CAS_BLOCK_BYTES, header.len() + chunks.len());
        header.extend(chunks);
        (header, hash, key)
    }

    #[test]
    fn an_entry_comes_back() {
        let map = CasRecord::Map { volume: CatalogueSlot(1), block: 7, ids: vec![ChunkId(8); 1000] };
        for (records, chunks) in
            [(vec![], vec![]), (vec![map.clone()], vec![5; 8192]), (vec![map; 3], vec![])]
        {
            let (bytes, hash, key) = written(&records, &chunks);
            assert_eq!(JournalEntry::decode(&bytes, &key), Ok(JournalEntry { records, hash }));
        }
    }

    #[test]
    fn no_byte_of_an_entry_can_change_unnoticed() {
        let store =
            CasRecord::Store { segment: SegmentIndex(4), block: 6, chunks: vec![(ChunkId(1), [1; 32])] };
        let (bytes, _, key) = written(&[store], &[7; 4096]);
        for at in (0..bytes.len()).step_by(61) {
            let mut bytes = bytes.clone();
            bytes[at] ^= 4;
            assert!(JournalEntry::decode(&bytes, &key).is_err(), "byte {at}");
        }
        assert_eq!(JournalEntry::decode(&bytes[..4096], &key), Err(EntryError::Damaged));
        assert_eq!(JournalEntry::decode(&[0; 4096], &key), Err(EntryError::None));
    }

    #[test]
    fn records_fill_the_header_to_the_last_byte() {
        for blocks in 1..4 {
            assert_eq!(JournalEntry::header_blocks(JournalEntry::record_room(blocks)), blocks);
            assert_eq!(JournalEntry::header_blocks(JournalEntry::record_room(blocks) + 1), blocks + 1);
        }
    }
}
