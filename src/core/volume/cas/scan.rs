//! After a start the hash index is empty: all chunks are taken in again, one page of states after another,
//! beside clients. Until then a duplicate of a chunk that was not reached is stored once more.

use super::CasVolume;
use super::place::{self, PageAccess};
use crate::format::cas::{ChunkHash, ChunkId, PAGE_SLOTS, PageName};

/// How far the index has been filled.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// The next page of states.
    next: u64,
}

/// Pages of states that are looked at in one turn, of those in which nothing is used.
const EMPTY_MAX: u64 = 4096;

impl CasVolume {
    /// Takes the chunks of the next page of states in, or has the pages loaded that this needs.
    pub(super) fn pump_scan(&mut self) {
        let pages = self.store.chunks.div_ceil(PAGE_SLOTS as u64);
        for _ in 0..EMPTY_MAX {
            if self.scan.next >= pages {
                return;
            }
            let first = self.scan.next * PAGE_SLOTS as u64;
            let (name, at) = place::of_used(ChunkId(first));
            let is_used = self.store.pages.page(name).is_some_and(|page| page.used(at) > 0);
            if is_used {
                return self.scan_page(first);
            }
            self.scan.next += 1;
        }
    }

    fn scan_page(&mut self, first: u64) {
        let mut missing: Vec<PageName> = Vec::new();
        let mut found: Vec<(ChunkId, ChunkHash)> = Vec::new();
        for id in (first..self.store.chunks.min(first + PAGE_SLOTS as u64)).map(ChunkId) {
            match self.store.chunk(id) {
                Ok(None) => {}
                Ok(Some(chunk)) => found.push((id, chunk.hash)),
                Err(name) => missing.push(name),
            }
        }
        if missing.is_empty() {
            found.into_iter().for_each(|(id, hash)| self.store.index.insert(&hash, id));
            self.scan.next += 1;
            return;
        }
        missing.sort_unstable();
        missing.dedup();
        missing.into_iter().for_each(|name| self.load_page(name));
    }

    /// A page cannot be read: what it holds is not looked for.
    pub(super) fn scan_passes_over(&mut self) {
        self.scan.next += 1;
    }
}
