//! The root of a cas volume: one block, on two places.

use super::{CAS_BLOCK_BYTES, CasKey, EntryHash, JournalPlace, PageSpace, SegmentIndex};
use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Spaces of pages.
pub const SPACES: usize = PageSpace::ALL.len();

/// Locations of a space in the root: of the pages of its highest level.
pub const TOP_LOCATIONS: usize = 32;

/// First bytes of a root.
const MAGIC: [u8; 8] = *b"CALPECAS";

/// The pages of a space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceRoot {
    /// Pages of level 0.
    pub pages: u64,
    /// The highest level: its locations are in the root.
    pub height: u8,
    /// The locations, packed, of pages of that level; 0 for none.
    pub top: [u64; TOP_LOCATIONS],
}

/// What a start begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CasRoot {
    /// Counts roots.
    pub generation: u64,
    /// The first entry of the journal whose records the pages do not contain.
    pub journal: JournalPlace,
    /// The number of the next snapshot.
    pub next_number: u32,
    /// The pages, by [`PageSpace`].
    pub spaces: [SpaceRoot; SPACES],
}

/// Why bytes are not a root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RootError {
    /// All zeroes.
    #[error("no root was ever written here")]
    Blank,
    /// Something else, or damaged.
    #[error("not a root of this array")]
    Damaged,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawSpace {
    pages: U64,
    height: u8,
    zero: [u8; 7],
    top: [U64; TOP_LOCATIONS],
}

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRoot {
    hash: [u8; 16],
    magic: [u8; 8],
    array: [u8; 16],
    generation: U64,
    sequence: U64,
    previous: [u8; 32],
    segment: U32,
    block: U32,
    next: U32,
    next_number: U32,
    spaces: [RawSpace; SPACES],
    rest: [u8; REST],
}

const FIELDS: usize = 16 + 8 + 16 + 8 + 8 + 32 + 4 * 4 + SPACES * size_of::<RawSpace>();
const REST: usize = CAS_BLOCK_BYTES - FIELDS;
const _: () = assert!(size_of::<RawRoot>() == CAS_BLOCK_BYTES);

impl CasRoot {
    /// Its block.
    #[must_use]
    pub fn encode(&self, key: &CasKey, array: Uuid) -> Box<[u8; CAS_BLOCK_BYTES]> {
        let mut raw = RawRoot::new_zeroed();
        raw.magic = MAGIC;
        raw.array = array.into_bytes();
        raw.generation = self.generation.into();
        let JournalPlace { sequence, previous, segment, block, next } = self.journal;
        (raw.sequence, raw.previous) = (sequence.into(), previous.0);
        (raw.segment, raw.block, raw.next) = (segment.0.into(), block.into(), next.0.into());
        raw.next_number = self.next_number.into();
        for (raw, space) in raw.spaces.iter_mut().zip(&self.spaces) {
            (raw.pages, raw.height) = (space.pages.into(), space.height);
            raw.top = space.top.map(U64::new);
        }
        raw.hash = key.half(&raw.as_bytes()[16..]);
        let mut bytes = Box::new([0; CAS_BLOCK_BYTES]);
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// Reads a root.
    ///
    /// # Errors
    /// When the bytes are not a root of this array.
    pub fn decode(bytes: &[u8], key: &CasKey, array: Uuid) -> Result<CasRoot, RootError> {
        if bytes.iter().all(|&byte| byte == 0) {
            return Err(RootError::Blank);
        }
        let raw = RawRoot::ref_from_bytes(bytes).map_err(|_| RootError::Damaged)?;
        if raw.magic != MAGIC || raw.array != array.into_bytes() || raw.hash != key.half(&bytes[16..]) {
            return Err(RootError::Damaged);
        }
        Ok(CasRoot {
            generation: raw.generation.get(),
            journal: JournalPlace {
                sequence: raw.sequence.get(),
                previous: EntryHash(raw.previous),
                segment: SegmentIndex(raw.segment.get()),
                block: raw.block.get(),
                next: SegmentIndex(raw.next.get()),
            },
            next_number: raw.next_number.get(),
            spaces: std::array::from_fn(|at| {
                let raw = &raw.spaces[at];
                SpaceRoot { pages: raw.pages.get(), height: raw.height, top: raw.top.map(U64::get) }
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_comes_back_and_nothing_else_passes_for_one() {
        let (array, key) = (Uuid::from_u128(1), CasKey::derive(Uuid::from_u128(1), [2; 16]));
        let mut spaces = [SpaceRoot::default(); SPACES];
        spaces[6] = SpaceRoot { pages: 9, height: 2, top: [u64::MAX; TOP_LOCATIONS] };
        let root = CasRoot {
            generation: 3,
            journal: JournalPlace {
                sequence: 1 << 50,
                previous: EntryHash([4; 32]),
                segment: SegmentIndex(5),
                block: 6,
                next: SegmentIndex(8),
            },
            next_number: 7,
            spaces,
        };
        let bytes = root.encode(&key, array);
        assert_eq!(CasRoot::decode(&bytes[..], &key, array), Ok(root));
        assert_eq!(CasRoot::decode(&[0; 4096], &key, array), Err(RootError::Blank));
        assert_eq!(CasRoot::decode(&bytes[..4095], &key, array), Err(RootError::Damaged));
        assert_eq!(CasRoot::decode(&bytes[..], &key, Uuid::from_u128(2)), Err(RootError::Damaged));
        for at in [0, 20, 100, 4095] {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0x80;
            assert_eq!(CasRoot::decode(&bytes[..], &key, array), Err(RootError::Damaged), "byte {at}");
        }
    }
}
