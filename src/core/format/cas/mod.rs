//! The bytes of a cas volume: the root, pages, and entries of the journal. See docs/cas.md for what they mean
//! and docs/on-disk-format.md, "Cas volume", for how they lie.
//!
//! All of them are whole 4 KiB blocks of the array's user data and carry a keyed hash, so that nothing that a
//! client wrote can pass for one of them. Must not know how a volume uses them.

mod entry;
mod page;
mod records;
mod root;

pub use entry::{EntryError, EntryHash, EntryHeader, JournalEntry, JournalPlace, MAX_ENTRY_HEADER_BLOCKS};
pub use page::{
    CatalogueEntry, CatalogueState, PAGE_SLOTS, PageName, PageSpace, RawCasPage, SegmentEntry, StateEntry,
    TableEntry, VOLUME_NAME_BYTES,
};
pub use records::{CasRecord, Moved, RecordError};
pub use root::{CasRoot, RootError, SPACES, SpaceRoot, TOP_LOCATIONS};

use crate::units::ROW_BYTES;

/// Bytes of a block: of a chunk before it is compressed, of a page, and the unit of the journal.
pub const CAS_BLOCK_BYTES: usize = ROW_BYTES as usize;

/// Stored lengths and offsets of chunks are multiples of this many bytes.
pub const CHUNK_ALIGN: usize = 16;

/// Bits of a chunk id and of the number of a page.
pub const ID_BITS: u32 = 40;

/// Bits of a birth.
pub const BIRTH_BITS: u32 = 24;

/// Name of a chunk; 0 names none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId(pub u64);

/// A segment of the volume: the stripe of the array with the same number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentIndex(pub u32);

/// A slot of the catalogue: a volume or a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CatalogueSlot(pub u16);

/// The BLAKE3 hash of a chunk's bytes.
pub type ChunkHash = [u8; 32];

/// An entry of a map: of a leaf, the chunk of a block; of an inner page, the page below it. Nothing where
/// `id` is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapSlot {
    /// A chunk id, or the number of a page.
    pub id: u64,
    /// The number that the next snapshot would have got when it was made.
    pub birth: u32,
}

impl MapSlot {
    /// Its 8 bytes as a number.
    #[must_use]
    pub fn pack(self) -> u64 {
        debug_assert!(self.id < 1 << ID_BITS && self.birth < 1 << BIRTH_BITS);
        self.id << BIRTH_BITS | u64::from(self.birth)
    }

    /// The entry of such a number.
    #[must_use]
    pub fn unpack(packed: u64) -> MapSlot {
        MapSlot { id: packed >> BIRTH_BITS, birth: (packed & ((1 << BIRTH_BITS) - 1)) as u32 }
    }
}

/// Where a page lies: a block of a segment. None is all zero, since the first segment holds no pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageLocation {
    /// The segment.
    pub segment: SegmentIndex,
    /// Block of the segment's user data.
    pub block: u32,
}

impl PageLocation {
    /// Its 8 bytes as a number; 0 is no location.
    #[must_use]
    pub fn pack(self) -> u64 {
        u64::from(self.segment.0) << 32 | u64::from(self.block)
    }

    /// The location of such a number, if it is one.
    #[must_use]
    pub fn unpack(packed: u64) -> Option<PageLocation> {
        let segment = SegmentIndex((packed >> 32) as u32);
        (segment.0 != 0).then_some(PageLocation { segment, block: packed as u32 })
    }
}

/// Key of the hashes of roots, pages and entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CasKey([u8; 32]);

/// Purpose of the key for BLAKE3's key derivation: the same for all versions of the format.
const KEY_CONTEXT: &str = "calpe cas volume 2026";

impl CasKey {
    /// The key of an array: from its identity and the secret in its superblock.
    #[must_use]
    pub fn derive(array: uuid::Uuid, secret: [u8; 16]) -> CasKey {
        let mut material = [0; 32];
        material[..16].copy_from_slice(array.as_bytes());
        material[16..].copy_from_slice(&secret);
        CasKey(blake3::derive_key(KEY_CONTEXT, &material))
    }

    fn hasher(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.0)
    }

    /// The first 16 bytes of the keyed hash of `bytes`.
    fn half(&self, bytes: &[u8]) -> [u8; 16] {
        let mut half = [0; 16];
        half.copy_from_slice(&self.hasher().update(bytes).finalize().as_bytes()[..16]);
        half
    }
}
