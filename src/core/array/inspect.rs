//! What the array holds of single blocks, for tests that look at it beside the clients. Reads memory only.

use crate::array::Array;
use crate::units::{BlockHash, ColumnIndex, StripeIndex};

impl Array {
    /// The hash of a block as the cached pages have it; none while they do not, or where blocks have none.
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
