//! Memory that an array takes for as long as it is served, computed before any of it is allocated. Must not
//! know how much there is.

use crate::array::pages::store::shown::view_size;
use crate::format::{ChecksumKind, PAGE_BYTES, PageLayout, Superblock};
use crate::units::HumanSize;
use calpe_view::Size;
use std::fmt;

/// Bytes of a cached page beyond its content: its entry in the cache, where its copies are written next, its
/// place in the clock.
const PAGE_OVERHEAD_BYTES: u64 = 256;

/// Bytes in memory for each slot: which stripe is in it.
const SLOT_BYTES: u64 = 8;

/// Bytes in memory for each page, cached or not: its newest version, and in which place each copy has it.
/// With 4+2 that is 8 bytes for 168 blocks: 12 MiB for a TiB of data.
const VERSION_BYTES: u64 = 8;

/// Memory that an array takes, in bytes, by purpose. Requests under way are not included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// The stripe map, which is in memory as a whole, with the view of it that other threads read.
    pub stripe_map: u64,
    /// The cache for pages of hashes, with the view of them that other threads read, and the versions of all
    /// pages. It is twice as large as what it was asked to hold: the view has hashes of its own.
    pub page_cache: u64,
}

impl Footprint {
    /// The memory of an array with this superblock, with a page cache of `page_cache` bytes.
    #[must_use]
    pub fn of(superblock: &Superblock, page_cache: u64) -> Footprint {
        let checksums = superblock.checksum != ChecksumKind::None;
        let layout = PageLayout::new(superblock.geometry, checksums);
        let page = PAGE_BYTES as u64 + PAGE_OVERHEAD_BYTES;
        let slots = superblock.geometry.slots.saturating_mul(SLOT_BYTES);
        let cached = (page_cache / PAGE_BYTES as u64).min(layout.pages() - layout.map_pages());
        let view = view_size(&superblock.geometry, &layout, cached);
        let view_of_map = Size { pages: 0, frames: 0, ..view }.bytes();
        let stripe_map = layout.map_pages().saturating_mul(page).saturating_add(slots);
        let versions = layout.pages().saturating_mul(VERSION_BYTES);
        Footprint {
            stripe_map: stripe_map.saturating_add(view_of_map),
            page_cache: cached
                .saturating_mul(page)
                .saturating_add(versions)
                .saturating_add(view.bytes() - view_of_map),
        }
    }

    /// The bytes of a page cache that holds the checksums of the whole array.
    #[must_use]
    pub fn whole_cache(superblock: &Superblock) -> u64 {
        let layout = PageLayout::new(superblock.geometry, superblock.checksum != ChecksumKind::None);
        (layout.pages() - layout.map_pages()).saturating_mul(PAGE_BYTES as u64)
    }

    /// All of it.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.stripe_map.saturating_add(self.page_cache)
    }
}

impl fmt::Display for Footprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (map, cache) = (HumanSize(self.stripe_map), HumanSize(self.page_cache));
        write!(f, "{} ({map} for its stripe map, {cache} for its page cache)", HumanSize(self.total()))
    }
}
