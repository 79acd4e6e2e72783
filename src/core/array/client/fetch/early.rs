//! Reads that begin while the checksums of their rows are still being loaded, so that both are under way
//! together.
//!
//! Invariants: the lock on the rows is held, so neither the slot of the stripe nor what is in place of these
//! rows changes until the reads are judged. Nothing that was read leaves the fetch, and no error of content
//! is found, before the checksums are here. Of a column that has an image in the log nothing is read early:
//! the image counts, and the block in place does not.

use crate::array::Array;
use crate::array::Owner;
use crate::array::client::fetch::{BLOCK, Fetch, Fetched, ITEM_ROW_BITS, State};
use crate::block_io::IoOp;

impl Fetch {
    /// Whether it has begun before the checksums were here, and was not judged since.
    pub(in crate::array) fn is_early(&self) -> bool {
        self.is_early
    }

    /// Whether reads are under way.
    pub(in crate::array) fn is_reading(&self) -> bool {
        self.pending > 0
    }

    /// Takes the end of a read of which nothing is needed any more.
    pub(in crate::array) fn drop_one(&mut self) {
        self.pending -= 1;
    }
}

impl Array {
    /// Begins to read what is wanted, before the checksums are here. Each read ends in [`Array::fetch_io`];
    /// [`Array::judge_early`] goes on when all have, and the checksums are here.
    pub(in crate::array) fn fetch_early(&mut self, key: usize, fetch: &mut Fetch) {
        fetch.is_early = true;
        let slot = fetch.slot;
        for at in 0..fetch.parts.len() {
            let part = &mut fetch.parts[at];
            let (column, rows) = (part.column, part.rows.clone());
            let member = self.core.member_at(slot, column);
            let Some(device) = self.core.readable(member, slot) else { continue };
            if rows.clone().any(|row| self.redo.image(slot, column, row).is_some()) {
                continue;
            }
            let Some(buf) = part.buf.take() else { continue };
            let offset = self.core.map.device_offset(self.core.shape.data_offset, slot, rows.start * BLOCK);
            let owner = Owner::Op { key, item: at << ITEM_ROW_BITS };
            self.core.submit_io(owner, member, device, IoOp::Read { offset, buf });
            fetch.pending += 1;
            fetch.round_bytes += rows.len() * BLOCK;
        }
    }

    /// Goes on with what was read early, and begins to read what was not: the checksums are here.
    pub(in crate::array) fn judge_early(&mut self, key: usize, fetch: &mut Fetch) -> Fetched {
        assert!(fetch.is_early && fetch.pending == 0, "what was read early is here");
        fetch.is_early = false;
        fetch.batch_small = !fetch.rules.background && self.gains_from_batching();
        for at in 0..fetch.parts.len() {
            let part = &fetch.parts[at];
            if part.unjudged.is_none() && part.is_wholly(State::Pending) {
                self.issue_part(key, fetch, at);
                continue;
            }
            self.fill_known(fetch, at);
            let part = &mut fetch.parts[at];
            let (blocks, is_whole) = (part.blocks.len(), part.is_wholly(State::Pending));
            if is_whole && self.is_bulk(fetch) {
                continue;
            }
            let Some(member) = fetch.parts[at].unjudged.take() else { continue };
            if is_whole {
                self.judge_blocks(fetch, at, 0..blocks, member);
                continue;
            }
            for block in 0..blocks {
                if fetch.parts[at].blocks[block] == State::Pending {
                    self.judge_blocks(fetch, at, block..block + 1, member);
                }
            }
        }
        self.begin_fetch_round(key, fetch)
    }
}
