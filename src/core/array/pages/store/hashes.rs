//! Hashes of blocks in the cached pages: read and set, many with one lookup of a page.

use crate::array::pages::store::{PageStore, Trust};
use crate::format::{MapEntry, Page, PageIndex, hash_of_entry};
use crate::units::{BlockHash, ColumnIndex, ROW_BYTES, SlotIndex, StripeIndex};
use std::ops::Range;
use std::sync::Arc;

impl PageStore {
    /// The hash of a block.
    pub(crate) fn hash(&self, slot: SlotIndex, row: usize, column: ColumnIndex) -> BlockHash {
        let (page, entry) = self.site.layout.hash_entry(slot, row, usize::from(column.0));
        hash_of_entry(self.at(page).page.entries[entry])
    }

    /// The hash of a block, if its page is cached and was not lost.
    pub(crate) fn cached_hash(&self, slot: SlotIndex, row: usize, column: ColumnIndex) -> Option<BlockHash> {
        let (page, entry) = self.site.layout.hash_entry(slot, row, usize::from(column.0));
        let cached = self.cached.get(&page).filter(|cached| cached.trust != Trust::Lost)?;
        Some(hash_of_entry(cached.page.entries[entry]))
    }

    /// The stripe map's entry of a logical stripe, if its page is cached and was not lost.
    pub(crate) fn cached_map_entry(&self, stripe: StripeIndex) -> Option<MapEntry> {
        let (page, entry) = self.site.layout.map_entry(stripe.0);
        let cached = self.cached.get(&page).filter(|cached| cached.trust != Trust::Lost)?;
        Some(MapEntry::decode(stripe.0, cached.page.entries[entry]))
    }

    /// Sets the hash of a block.
    pub(crate) fn set_hash(&mut self, slot: SlotIndex, row: usize, column: ColumnIndex, hash: BlockHash) {
        let (page, entry) = self.site.layout.hash_entry(slot, row, usize::from(column.0));
        self.set(page, entry, hash.0);
        self.show_hashes(slot, page, std::iter::once((entry, hash)));
    }

    /// The hashes of rows of a column.
    pub(crate) fn hashes(
        &self,
        slot: SlotIndex,
        rows: Range<usize>,
        column: ColumnIndex,
    ) -> impl Iterator<Item = BlockHash> + '_ {
        let mut at: Option<(PageIndex, &Page)> = None;
        rows.map(move |row| {
            let (page, entry) = self.site.layout.hash_entry(slot, row, usize::from(column.0));
            let entries = match at {
                Some((same, entries)) if same == page => entries,
                _ => &self.at(page).page,
            };
            at = Some((page, entries));
            hash_of_entry(entries.entries[entry])
        })
    }

    /// Sets the hashes of rows of columns: those of the first column, then those of the next. A page is
    /// looked up once, not once for every block.
    ///
    /// # Panics
    /// When the number of hashes is not that of the blocks.
    pub(crate) fn set_hashes(
        &mut self,
        slot: SlotIndex,
        rows: Range<usize>,
        columns: impl ExactSizeIterator<Item = ColumnIndex> + Clone,
        hashes: &[BlockHash],
    ) {
        assert_eq!(hashes.len(), rows.len() * columns.len(), "a hash for each block");
        let layout = self.site.layout;
        let (first, count) = (rows.start, rows.len());
        let mut entries = rows
            .flat_map(|row| columns.clone().enumerate().map(move |(nth, column)| (row, nth, column)))
            .map(|(row, nth, column)| {
                let (page, entry) = layout.hash_entry(slot, row, usize::from(column.0));
                (page, entry, hashes[nth * count + row - first])
            })
            .peekable();
        while let Some(&(page, _, _)) = entries.peek() {
            self.touch(page);
            let cached = self.cached.get_mut(&page).expect("it was just marked");
            let image = Arc::make_mut(&mut cached.page);
            let before = entries.clone();
            while let Some((_, entry, hash)) = entries.next_if(|(other, _, _)| *other == page) {
                image.entries[entry] = hash.0;
            }
            let changed = before.take_while(|(other, _, _)| *other == page);
            self.show_hashes(slot, page, changed.map(|(_, entry, hash)| (entry, hash)));
        }
    }

    /// Makes every block of a slot [`BlockHash::UNWRITTEN`]. Its pages hold entries of other slots too, so
    /// all of them must be cached.
    pub(crate) fn clear_slot(&mut self, slot: SlotIndex) {
        let rows = 0..(u64::from(self.site.geometry.chunk) / ROW_BYTES) as usize;
        let columns = (0..self.site.geometry.width()).map(ColumnIndex);
        let unwritten = vec![BlockHash::UNWRITTEN; rows.len() * columns.len()];
        self.set_hashes(slot, rows, columns, &unwritten);
    }
}
