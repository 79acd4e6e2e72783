//! Free ranges of a slab that threads keep for themselves, so that they rarely meet at its one lock, and find
//! in their caches what they have just used.
//!
//! Invariants: a range is on one shelf or with the buddy allocator; a shelf holds a bounded number of bytes;
//! whoever finds the buddy allocator empty can take all shelves down. Must not know memory, only pages.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Orders that are kept: ranges of a page to a MiB.
const ORDERS: usize = 9;

/// Threads that have something of their own: beyond that they share.
pub(super) const THREADS: usize = 32;

/// Part of the slab that one shelf may hold, as a divisor.
const PART: usize = 128;

/// Part of a shelf that is filled with ranges of one order at a time, as a divisor.
const REFILL_PART: usize = 8;

/// The ranges of some threads, by order; on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shelf {
    ranges: [Vec<usize>; ORDERS],
    pages: usize,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Shelves {
    all: Box<[Mutex<Shelf>]>,
    /// Most pages on one.
    pages_max: usize,
}

/// The number of this thread, below [`THREADS`].
pub(super) fn mine() -> usize {
    static SEEN: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: Cell<Option<usize>> = const { Cell::new(None) };
    }
    // A thread that is ending may still free memory.
    let number = NUMBER.try_with(|number| match number.get() {
        Some(known) => known,
        None => {
            let new = SEEN.fetch_add(1, Ordering::Relaxed) % THREADS;
            number.set(Some(new));
            new
        }
    });
    number.unwrap_or(0)
}

fn lock(shelf: &Mutex<Shelf>) -> MutexGuard<'_, Shelf> {
    shelf.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shelves {
    /// Empty ones, for a slab of this many pages.
    pub(super) fn new(pages: usize) -> Shelves {
        Shelves { all: (0..THREADS).map(|_| Mutex::default()).collect(), pages_max: pages / PART }
    }

    /// A range of 2^`order` pages, if this thread's shelf has one.
    pub(super) fn take(&self, order: u32) -> Option<usize> {
        if order as usize >= ORDERS || self.pages_max == 0 {
            return None;
        }
        let mut shelf = lock(&self.all[mine()]);
        let range = shelf.ranges[order as usize].pop()?;
        shelf.pages -= 1 << order;
        Some(range)
    }

    /// Keeps a range on this thread's shelf. Returns whether there was room.
    pub(super) fn put(&self, page: usize, order: u32) -> bool {
        if order as usize >= ORDERS || 1 << order > self.pages_max {
            return false;
        }
        let mut shelf = lock(&self.all[mine()]);
        let has_room = shelf.pages + (1 << order) <= self.pages_max;
        if has_room {
            shelf.pages += 1 << order;
            shelf.ranges[order as usize].push(page);
        }
        has_room
    }

    /// How many ranges of 2^`order` pages a shelf that has none is to be given beside the one that is
    /// wanted.
    pub(super) fn refill(&self, order: u32) -> usize {
        if order as usize >= ORDERS { 0 } else { (self.pages_max >> order) / REFILL_PART }
    }

    /// Takes from this thread's shelf, which has no room for a range of 2^`order` pages, half of the ranges
    /// of the order of which it has the most pages. Returns them with their order.
    pub(super) fn take_surplus(&self, order: u32) -> (Vec<usize>, u32) {
        if order as usize >= ORDERS {
            return (Vec::new(), order);
        }
        let mut shelf = lock(&self.all[mine()]);
        let Shelf { ranges, pages } = &mut *shelf;
        let most = (0..ORDERS).max_by_key(|&order| ranges[order].len() << order).unwrap_or(0);
        let ranges = &mut ranges[most];
        // Those that were kept last are taken first, while caches have them.
        let surplus: Vec<usize> = ranges.drain(..ranges.len().div_ceil(2)).collect();
        *pages -= surplus.len() << most;
        (surplus, most as u32)
    }

    /// Takes everything down: calls `free` with each range and its order.
    pub(super) fn clear(&self, mut free: impl FnMut(usize, u32)) {
        for shelf in &self.all {
            let Shelf { ranges, .. } = std::mem::take(&mut *lock(shelf));
            for (order, ranges) in ranges.into_iter().enumerate() {
                ranges.into_iter().for_each(|page| free(page, order as u32));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shelf_gives_what_it_was_given_and_has_an_end() {
        let shelves = Shelves::new(PART * 20);
        assert_eq!(shelves.take(0), None);
        assert!(shelves.put(32, 4) && shelves.put(7, 0));
        assert!(!shelves.put(64, 4), "33 pages are more than 20");
        assert!((0..3).all(|page| shelves.put(page, 0)) && !shelves.put(9, 0));
        assert_eq!((shelves.take(4), shelves.take(4)), (Some(32), None));
        assert!(!shelves.put(64, 9), "too large to keep");
        let mut left = Vec::new();
        shelves.clear(|page, order| left.push((page, order)));
        assert_eq!(left, [(7, 0), (0, 0), (1, 0), (2, 0)]);
        assert_eq!(shelves.take(0), None);
        assert!(!Shelves::new(PART - 1).put(1, 0), "a small slab has none");
    }

    #[test]
    fn a_full_shelf_gives_half_of_what_it_has_of_an_order_and_is_refilled_in_part() {
        let shelves = Shelves::new(PART * 64);
        assert_eq!([0, 1, 3, 4, 9].map(|order| shelves.refill(order)), [8, 4, 1, 0, 0]);
        assert!((0..60).all(|page| shelves.put(page, 0)) && shelves.put(64, 2) && !shelves.put(68, 2));
        assert_eq!(shelves.take_surplus(2), ((0..30).collect::<Vec<_>>(), 0), "single pages are the most");
        assert!((0..7).all(|nth| shelves.put(68 + 4 * nth, 2)) && !shelves.put(96, 3));
        assert_eq!(shelves.take_surplus(3), (vec![64, 68, 72, 76], 2));
        assert_eq!(shelves.take_surplus(9), (vec![], 9), "none are kept");
    }
}
