//! Which page holds what, and how the pages are reached.

use crate::format::cas::{ChunkId, PAGE_SLOTS, PageName, PageSpace, RawCasPage, SegmentIndex};

/// An entry: the page that holds it, and where in the page.
pub(super) type Place = (PageName, usize);

/// The pages of a volume as the ledger sees them. A page that was never written is in memory, and blank.
pub(super) trait PageAccess {
    /// A page as it is now; none if it is not in memory.
    fn page(&self, name: PageName) -> Option<&RawCasPage>;

    /// A page that is in memory, to be changed: what the next root is to contain.
    ///
    /// # Panics
    /// When it is not in memory.
    fn change(&mut self, name: PageName) -> &mut RawCasPage;

    /// The number of a new page of a map, which is blank: the lowest above 0 that no page has, so that a
    /// start, which makes the same pages again, gives them the same numbers.
    fn new_map_page(&mut self) -> u64;

    /// A page of a map is no longer used; its number may be.
    fn free_map_page(&mut self, number: u64);
}

fn place(space: PageSpace, entry: u64, each: usize) -> Place {
    let each = each as u64;
    (PageName { space, level: 0, index: entry / each }, (entry % each) as usize)
}

/// The entry of a chunk in the table.
pub(super) fn of_table(id: ChunkId) -> Place {
    place(PageSpace::Table, id.0, RawCasPage::TABLE_ENTRIES)
}

/// The state of a chunk.
pub(super) fn of_state(id: ChunkId) -> Place {
    place(PageSpace::States, id.0, PAGE_SLOTS)
}

/// How many ids are used of the page of states that holds this one.
pub(super) fn of_used(id: ChunkId) -> Place {
    place(PageSpace::Used, id.0 / PAGE_SLOTS as u64, RawCasPage::USED_ENTRIES)
}

/// A segment.
pub(super) fn of_segment(segment: SegmentIndex) -> Place {
    place(PageSpace::Segments, u64::from(segment.0), RawCasPage::SEGMENT_ENTRIES)
}

/// The id of the chunk at block `block` of a segment of `blocks` blocks.
pub(super) fn of_directory(segment: SegmentIndex, blocks: u32, block: u32) -> Place {
    debug_assert!(block < blocks);
    let entry = u64::from(segment.0) * u64::from(blocks) + u64::from(block);
    place(PageSpace::Directory, entry, RawCasPage::DIRECTORY_ENTRIES)
}

/// A slot of the catalogue.
pub(super) fn of_catalogue(slot: crate::format::cas::CatalogueSlot) -> Place {
    place(PageSpace::Catalogue, u64::from(slot.0), RawCasPage::CATALOGUE_ENTRIES)
}

/// A page of a map.
pub(super) fn of_map(number: u64) -> PageName {
    PageName { space: PageSpace::Map, level: 0, index: number }
}

/// Levels above the leaves that the map of so many blocks has.
pub(super) fn map_height(blocks: u64) -> u8 {
    let (mut height, mut covered) = (0, PAGE_SLOTS as u64);
    while covered < blocks {
        (height, covered) = (height + 1, covered.saturating_mul(PAGE_SLOTS as u64));
    }
    height
}

/// Blocks that an entry of a page of a map covers, `level` levels above the leaves.
pub(super) fn map_span(level: u8) -> u64 {
    (PAGE_SLOTS as u64).saturating_pow(u32::from(level))
}
