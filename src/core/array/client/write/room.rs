//! How much of overlay and rings a write of a logged array takes, and how it is cut where a ring is small
//! beside it. Pure arithmetic on shapes. Must not know what is in the log.

use crate::array::Array;
use crate::array::Core;
use crate::array::client::write::{BLOCK, LogDemand, LoggedWrite, Work};
use crate::format::LOG_BLOCK_BYTES;

impl Array {
    /// Cuts `work` to what may go through the log at once, from the front.
    pub(super) fn cut_write(&self, write: &mut LoggedWrite) {
        if self.goes_to_free_slot(write) {
            return;
        }
        let Work::Data { offset, data } = &mut write.task.work else { return };
        let rows_max = self.redo.rows_max(self.core.map.width());
        if self.core.rows_of(*offset, data.len()).len() / BLOCK <= rows_max {
            return;
        }
        let column_end = (*offset / self.core.map.chunk + 1) * self.core.map.chunk;
        let end = ((*offset / BLOCK + rows_max) * BLOCK).min(column_end);
        if end < *offset + data.len() {
            write.task.rest = Some((end, data.slice(end - *offset..data.len())));
            *data = data.slice(0..end - *offset);
        }
    }

    /// The most that the write will add to overlay and log: a member gets one column of its rows.
    pub(super) fn demand_of_write(&self, write: &LoggedWrite) -> LogDemand {
        let manifest = |blocks, records| self.core.manifest_blocks(blocks, records);
        let of_stripe = manifest(self.core.map.width() * self.core.map.chunk / BLOCK, 1);
        match &write.task.work {
            Work::Discard { .. } => LogDemand { bytes: 0, blocks: 1 },
            Work::Repay { .. } => {
                let blocks = 1 + self.core.map.m;
                LogDemand { bytes: blocks * BLOCK, blocks: 1 + manifest(self.core.map.width(), 1) }
            }
            Work::Data { .. } | Work::Stripe { .. } if self.goes_to_free_slot(write) => {
                LogDemand { bytes: 0, blocks: of_stripe }
            }
            Work::Stripe { .. } => unreachable!("a stripe by column goes to a free slot"),
            Work::Data { offset, data } => {
                let rows = self.core.rows_of(*offset, data.len()).len() / BLOCK;
                let blocks = data.len() / BLOCK + 2 + self.core.map.m * rows;
                // The first write of a stripe without checksums writes all of it, and where blocks are set
                // aside each row has a record of its own.
                let in_log = rows + manifest(self.core.map.width() * rows, rows.max(3));
                // One that is to become a whole stripe may have to go this way all the same.
                let whole = if write.whole.widens { of_stripe } else { 0 };
                LogDemand { bytes: blocks * BLOCK, blocks: in_log.max(whole) }
            }
        }
    }
}

impl Core {
    /// Blocks that `records` records with hashes of `blocks` blocks take in the header of a piece.
    pub(super) fn manifest_blocks(&self, blocks: usize, records: usize) -> usize {
        (blocks * 16 + records * (64 + 2 * self.map.width())).div_ceil(LOG_BLOCK_BYTES)
    }
}
