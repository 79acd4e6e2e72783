//! Ids for new chunks. They come from one page of states at a time, the emptiest that is known, so that new
//! chunks change few pages.
//!
//! Must not know what a chunk is. An id that was given out and is not used yet is reserved: it is given to
//! nobody else.

use super::place::{self, PageAccess};
use crate::format::cas::{ChunkId, PAGE_SLOTS, PageName, PageSpace};
use std::collections::HashMap;

/// See the head of this file.
#[derive(Default)]
pub(super) struct Ids {
    /// The page of states from which ids come, and the ids of it that were free when it was looked at.
    page: Option<u64>,
    free: Vec<ChunkId>,
    /// Ids that were given out, and how many want them.
    reserved: HashMap<ChunkId, u32>,
    /// Where the search for the emptiest page goes on.
    cursor: u64,
}

/// Pages looked at for the emptiest one, unless none of them has room.
const SEARCH: u32 = 4096;

impl Ids {
    /// An id that nothing uses, which is reserved from now on; none while the pages that it needs, which are
    /// added to `missing`, are not in memory, and when there is none. `chunks`: ids are below.
    pub(super) fn take(
        &mut self,
        pages: &impl PageAccess,
        chunks: u64,
        missing: &mut Vec<PageName>,
    ) -> Option<ChunkId> {
        // Pages whose free ids are all reserved are passed over.
        let mut tried: Vec<u64> = Vec::new();
        loop {
            while let Some(id) = self.free.pop() {
                let (name, at) = place::of_state(id);
                let Some(states) = pages.page(name) else {
                    self.free.push(id);
                    missing.push(name);
                    return None;
                };
                // It may have been used since.
                if states.state_entry(at).count.get() == 0 && !self.reserved.contains_key(&id) {
                    self.reserved.insert(id, 1);
                    return Some(id);
                }
            }
            let number = match self.page.take() {
                Some(number) => number,
                None => self.emptiest(pages, chunks, &tried)?,
            };
            let name = PageName { space: PageSpace::States, level: 0, index: number };
            let Some(states) = pages.page(name) else {
                self.page = Some(number);
                missing.push(name);
                return None;
            };
            tried.push(number);
            let first = number * PAGE_SLOTS as u64;
            let is_free = |&at: &usize| states.state_entry(at).count.get() == 0;
            let ids = (0..PAGE_SLOTS).rev().filter(is_free).map(|at| ChunkId(first + at as u64));
            self.free =
                ids.filter(|id| id.0 != 0 && id.0 < chunks && !self.reserved.contains_key(id)).collect();
        }
    }

    /// The emptiest page of states of the next few that have room, without those in `tried`.
    fn emptiest(&mut self, pages: &impl PageAccess, chunks: u64, tried: &[u64]) -> Option<u64> {
        let count = chunks.div_ceil(PAGE_SLOTS as u64);
        let mut best: Option<(u64, u64)> = None;
        let mut looks = 0;
        for step in 0..count {
            let number = (self.cursor + step) % count;
            let first = number * PAGE_SLOTS as u64;
            // The first id is never used.
            let ids = (chunks - first).min(PAGE_SLOTS as u64) - u64::from(number == 0);
            let (name, at) = place::of_used(ChunkId(first));
            let used = pages.page(name).map_or(ids, |page| u64::from(page.used(at)));
            let free = ids.saturating_sub(used);
            if free > best.map_or(0, |(most, _)| most) && !tried.contains(&number) {
                best = Some((free, number));
            }
            looks += 1;
            if best.is_some() && (used == 0 || looks >= SEARCH) {
                break;
            }
        }
        let (_, number) = best?;
        self.cursor = number + 1;
        Some(number)
    }

    /// Somebody else wants an id that was taken as well.
    pub(super) fn share(&mut self, id: ChunkId) {
        if let Some(users) = self.reserved.get_mut(&id) {
            *users += 1;
        }
    }

    /// Ids that are reserved.
    pub(super) fn reserved(&self) -> usize {
        self.reserved.len()
    }

    /// One of those that want it has used an id that was taken, or does not want it any more.
    pub(super) fn release(&mut self, id: ChunkId) {
        if let Some(users) = self.reserved.get_mut(&id) {
            *users -= 1;
            if *users == 0 {
                self.reserved.remove(&id);
            }
        }
    }
}
