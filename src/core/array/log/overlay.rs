//! Newest images of blocks that are in the redo log and not in place yet: where reads look first.
//!
//! Two generations: writes go to the active one; a checkpoint freezes it and writes it in place. Invariant:
//! an image stays until it is in place and flushed, or until its slot is given up.

use crate::array::mutation::{Mutation, is_off};
use crate::block_io::Buf;
use crate::units::{ROW_BYTES, SlotIndex};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// See the head of this file.
#[derive(Default)]
pub(super) struct Overlay {
    active: Generation,
    frozen: Generation,
}

#[derive(Default)]
struct Generation {
    slots: FxHashMap<u64, Images>,
    bytes: usize,
}

/// Images of one slot by column, then row.
type Images = BTreeMap<(u16, u32), Buf>;

/// Adjacent rows of one column, to be written in place in one write.
// Plain data: one write of a checkpoint.
#[derive(Debug)]
pub(super) struct Run {
    pub slot: SlotIndex,
    pub column: u16,
    pub row: u32,
    pub blocks: Vec<Buf>,
}

impl Overlay {
    /// The newest image of a block.
    pub(super) fn get(&self, slot: SlotIndex, column: usize, row: usize) -> Option<&Buf> {
        let key = (column as u16, row as u32);
        self.active.find(slot, key).or_else(|| self.frozen.find(slot, key))
    }

    /// Whether some block of the slot has an image.
    pub(super) fn has_slot(&self, slot: SlotIndex) -> bool {
        self.active.slots.contains_key(&slot.0) || self.is_frozen(slot)
    }

    /// Whether a checkpoint is writing images of the slot.
    pub(super) fn is_frozen(&self, slot: SlotIndex) -> bool {
        self.frozen.slots.contains_key(&slot.0)
    }

    /// Takes new images of `column` from `row` on.
    pub(super) fn insert(&mut self, slot: SlotIndex, column: usize, row: usize, bytes: &Buf) {
        let images = self.active.slots.entry(slot.0).or_default();
        for at in 0..bytes.len() / ROW_BYTES as usize {
            let start = at * ROW_BYTES as usize;
            let block = bytes.slice(start..start + ROW_BYTES as usize);
            if images.insert((column as u16, (row + at) as u32), block).is_none() {
                self.active.bytes += ROW_BYTES as usize;
            }
        }
    }

    /// Drops the active images of a slot that was given up: nothing needs them. Frozen ones go in place all
    /// the same: until the log says durably that the slot was given up, a restart may find the stripe in it.
    pub(super) fn give_up(&mut self, slot: SlotIndex) {
        if is_off(Mutation::DestageBySlotNumber) {
            return;
        }
        if let Some(images) = self.active.slots.remove(&slot.0) {
            self.active.bytes -= images.len() * ROW_BYTES as usize;
        }
    }

    /// Bytes of images that no checkpoint is writing yet.
    pub(super) fn active_bytes(&self) -> usize {
        self.active.bytes
    }

    /// Whether there are no images at all.
    pub(super) fn is_empty(&self) -> bool {
        self.active.bytes == 0 && self.frozen.bytes == 0
    }

    /// Freezes the active images. There must be no frozen ones.
    pub(super) fn freeze(&mut self) {
        debug_assert_eq!(self.frozen.bytes, 0, "one checkpoint at a time");
        std::mem::swap(&mut self.active, &mut self.frozen);
    }

    /// The frozen images in the order of their places.
    pub(super) fn frozen_runs(&self) -> Vec<Run> {
        let mut slots: Vec<(&u64, &Images)> = self.frozen.slots.iter().collect();
        slots.sort_by_key(|(slot, _)| **slot);
        let mut runs: Vec<Run> = Vec::new();
        for (slot, images) in slots {
            for (&(column, row), block) in images {
                let slot = SlotIndex(*slot);
                match runs.last_mut() {
                    Some(run)
                        if run.slot == slot
                            && run.column == column
                            && run.row as usize + run.blocks.len() == row as usize =>
                    {
                        run.blocks.push(block.clone());
                    }
                    _ => runs.push(Run { slot, column, row, blocks: vec![block.clone()] }),
                }
            }
        }
        runs
    }

    /// Drops the frozen images, once they are in place and flushed. Returns the slots that have no images any
    /// more.
    pub(super) fn drop_frozen(&mut self) -> impl Iterator<Item = SlotIndex> + '_ {
        let dropped = std::mem::take(&mut self.frozen).slots.into_keys();
        dropped.filter(|slot| !self.active.slots.contains_key(slot)).map(SlotIndex)
    }

    /// The slots that have images.
    pub(super) fn slots(&self) -> impl Iterator<Item = SlotIndex> + '_ {
        let frozen = self.frozen.slots.keys().filter(|slot| !self.active.slots.contains_key(slot));
        self.active.slots.keys().chain(frozen).map(|slot| SlotIndex(*slot))
    }
}

impl Generation {
    fn find(&self, slot: SlotIndex, key: (u16, u32)) -> Option<&Buf> {
        self.slots.get(&slot.0)?.get(&key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_io::Pool;

    const BLOCK: usize = ROW_BYTES as usize;

    fn image(pool: &Pool, blocks: usize, value: u8) -> Buf {
        let mut buf = pool.alloc(blocks * BLOCK);
        buf.fill(value);
        buf.freeze()
    }

    #[test]
    fn newer_images_hide_frozen_ones_until_those_are_dropped() {
        let pool = Pool::new(1 << 20).unwrap();
        let mut overlay = Overlay::default();
        let slot = SlotIndex(3);
        overlay.insert(slot, 1, 0, &image(&pool, 2, 1));
        overlay.freeze();
        overlay.insert(slot, 1, 1, &image(&pool, 2, 2));
        let first = |overlay: &Overlay, row| overlay.get(slot, 1, row).map(|block| block[0]);
        assert_eq!([0, 1, 2, 3].map(|row| first(&overlay, row)), [Some(1), Some(2), Some(2), None]);
        overlay.give_up(slot);
        assert_eq!([0, 1, 2].map(|row| first(&overlay, row)), [Some(1), Some(1), None]);
        assert_eq!(overlay.drop_frozen().collect::<Vec<_>>(), [slot]);
        assert!(overlay.is_empty() && !overlay.has_slot(slot));
    }

    #[test]
    fn adjacent_rows_of_a_column_are_one_run() {
        let pool = Pool::new(1 << 20).unwrap();
        let mut overlay = Overlay::default();
        for (slot, column, row, blocks) in
            [(1, 0, 4, 2), (1, 0, 6, 1), (1, 1, 7, 1), (0, 2, 0, 1), (1, 0, 8, 1)]
        {
            overlay.insert(SlotIndex(slot), column, row, &image(&pool, blocks, 1));
        }
        overlay.freeze();
        let runs: Vec<_> =
            overlay.frozen_runs().iter().map(|r| (r.slot.0, r.column, r.row, r.blocks.len())).collect();
        assert_eq!(runs, [(0, 2, 0, 1), (1, 0, 4, 3), (1, 0, 8, 1), (1, 1, 7, 1)]);
    }
}
