//! The array's knowledge of single blocks, for tests that look at it while clients run. Reads memory only.

use crate::array::Array;
use crate::units::{BlockHash, ColumnIndex, StripeIndex};

impl Array {
    /// The hash of a block in the cached pages; none where its page is not cached, or where blocks have no
    /// hashes.
    pub(crate) fn cached_hash(
        &self,
        stripe: StripeIndex,
        column: ColumnIndex,
        row: usize,
    ) -> Option<BlockHash> {
        self.pages.checksums()?;
        let entry = self.pages.store().cached_map_entry(stripe)?;
        if !entry.holds_data {
            return Some(BlockHash::UNWRITTEN);
        }
        self.pages.store().cached_hash(entry.slot, row, column)
    }
}
