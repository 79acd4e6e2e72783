//! The superblock that counts on a simulated disk, remembered: the explorer starts many arrays from copies of the
//! same disks, and decoding four copies of 16 KiB each time would be most of its work.
//!
//! Blocks are shared between copies of a disk and never change under a handle, so equal handles are equal bytes. The
//! memory holds the handles it knows, so that no address is ever used again while it is a key.

use super::disk::{BLOCK, Block, SimDisk};
use crate::format::{COPY_BYTES, FormatError, Superblock, all_copy_offsets, newest as newest_copy};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

/// Blocks of one copy.
const BLOCKS: usize = COPY_BYTES / BLOCK as usize;
/// Copies that are remembered: all those of the widest array that is explored, many times over.
const REMEMBERED_MAX: usize = 2048;

type Key = [usize; BLOCKS];
type Decoded = Result<Superblock, FormatError>;

thread_local! {
    static REMEMBERED: RefCell<HashMap<Key, (Vec<Block>, Decoded)>> = RefCell::new(HashMap::new());
}

/// The superblock that counts; none where there is none, or none that may be used.
pub(super) fn newest(disk: &SimDisk) -> Option<Superblock> {
    newest_copy(all_copy_offsets(disk.bytes()).map(|offset| copy_at(disk, offset.0))).ok()
}

fn copy_at(disk: &SimDisk, offset: u64) -> Decoded {
    debug_assert!(offset.is_multiple_of(BLOCK));
    let first = offset / BLOCK;
    let blocks: Vec<Option<&Block>> = (first..first + BLOCKS as u64).map(|at| disk.block(at)).collect();
    let mut key = [0; BLOCKS];
    for (key, block) in key.iter_mut().zip(&blocks) {
        *key = block.map_or(0, |block| Arc::as_ptr(block).addr());
    }
    REMEMBERED.with_borrow_mut(|remembered| {
        if let Some((_, decoded)) = remembered.get(&key) {
            return decoded.clone();
        }
        let decoded = Superblock::decode(&disk.peek(offset, COPY_BYTES));
        if remembered.len() >= REMEMBERED_MAX {
            remembered.clear();
        }
        let held = blocks.into_iter().flatten().cloned().collect();
        remembered.insert(key, (held, decoded.clone()));
        decoded
    })
}
