//! Metadata pages: block hashes and the stripe map. See docs/on-disk-format.md, "Pages".
//!
//! A page has `m + 1` copies on different members; each copy has two places, of which the one that does not hold the
//! copy's newest version is written next. Which copy counts is decided by whoever reads them.

use super::{Geometry, LogKey};
use crate::units::{BlockHash, MemberIndex, SlotIndex};
use std::ops::Range;
use uuid::Uuid;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// Entries of a page, 16 bytes each.
pub const PAGE_ENTRIES: usize = 252;

/// A page's number in the page region: map pages first, then checksum pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageIndex(pub u64);

/// A page's content with what orders its versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Counts the versions of this page.
    pub sequence: u64,
    /// Number of the epoch in which this version was written.
    pub epoch: u64,
    /// The entries: block hashes, or [`MapEntry`]s.
    pub entries: Box<[[u8; 16]; PAGE_ENTRIES]>,
}

/// Why bytes are no page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// Never written by this array.
    #[error("a blank page")]
    Blank,
    /// Written by this array as this page, and damaged or torn.
    #[error("a damaged page")]
    Damaged,
}

/// What the stripe map says of a logical stripe. All zero bytes are the entry of a stripe that was never written:
/// it is in the slot of its own number and holds no data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// The slot.
    pub slot: SlotIndex,
    /// Whether the stripe holds data; otherwise it reads as zeroes and its blocks are unwritten.
    pub holds_data: bool,
    /// Number of the epoch in which the stripe was last written; 0 for never.
    pub epoch: u64,
}

/// Where every page and entry lies; pure arithmetic.
#[derive(Clone, Copy, Debug)]
pub struct PageLayout {
    geometry: Geometry,
    checksums: bool,
}

impl Page {
    /// A page that was never written.
    #[must_use]
    pub fn blank() -> Page {
        Page { sequence: 0, epoch: 0, entries: Box::new([[0; 16]; PAGE_ENTRIES]) }
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self, _key: &LogKey, _array: Uuid, _index: PageIndex) -> [u8; PAGE_BYTES] {
        todo!()
    }

    /// Reads a page.
    ///
    /// # Errors
    /// When the bytes are not this page of this array.
    pub fn decode(_key: &LogKey, _array: Uuid, _index: PageIndex, _bytes: &[u8]) -> Result<Page, PageError> {
        todo!()
    }
}

impl MapEntry {
    /// The entry's bytes for stripe `stripe` (which decides what all zeroes mean).
    #[must_use]
    pub fn encode(self, _stripe: u64) -> [u8; 16] {
        todo!()
    }

    /// Reads the entry of stripe `stripe`; whether its slot is below the number of slots is the caller's to check.
    #[must_use]
    pub fn decode(_stripe: u64, _bytes: [u8; 16]) -> MapEntry {
        todo!()
    }
}

impl PageLayout {
    /// The layout of an array's pages; without `checksums` there are only map pages.
    #[must_use]
    pub fn new(geometry: Geometry, checksums: bool) -> PageLayout {
        PageLayout { geometry, checksums }
    }

    /// Pages in all.
    #[must_use]
    pub fn pages(&self) -> u64 {
        let _ = (self.geometry, self.checksums);
        todo!()
    }

    /// Pages of the stripe map: pages `0..map_pages()`.
    #[must_use]
    pub fn map_pages(&self) -> u64 {
        todo!()
    }

    /// Page and entry of a logical stripe.
    #[must_use]
    pub fn map_entry(&self, _stripe: u64) -> (PageIndex, usize) {
        todo!()
    }

    /// The pages with the hashes of some rows (4 KiB blocks within the chunk) of a slot.
    #[must_use]
    pub fn hash_pages(&self, _slot: SlotIndex, _rows: Range<usize>) -> Range<u64> {
        todo!()
    }

    /// Page and entry of the hash of one block.
    #[must_use]
    pub fn hash_entry(&self, _slot: SlotIndex, _row: usize, _column: usize) -> (PageIndex, usize) {
        todo!()
    }

    /// The `m + 1` copies of a page: the member, and the offset in its pages region of the first of the copy's two
    /// places; the second follows it.
    pub fn copies(&self, _page: PageIndex) -> impl Iterator<Item = (MemberIndex, u64)> + use<> {
        std::iter::empty()
    }

    /// Bytes of the pages region of every member.
    #[must_use]
    pub fn region_bytes(&self) -> u64 {
        todo!()
    }
}

/// A hash as an entry.
#[must_use]
pub fn hash_of_entry(entry: [u8; 16]) -> BlockHash {
    BlockHash(entry)
}
