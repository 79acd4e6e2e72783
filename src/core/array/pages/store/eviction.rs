//! Chooses the page that leaves the cache when it is full.
//!
//! Invariant: no page leaves that is in use, changed, or still to be written. Must not know of copies or
//! versions.

use crate::array::pages::store::{Cached, PageStore};
use crate::format::PageIndex;

/// Steps of the eviction clock for each page that is loaded: enough to find a victim unless nearly all pages
/// are in use or changed, and few enough that a load costs the same however large the cache is.
const CLOCK_STEPS_MAX: usize = 32;

impl PageStore {
    /// Whether no operation or write-back needs the page in the cache.
    pub(super) fn is_evictable(&self, page: PageIndex) -> bool {
        let busy = |cached: &Cached| cached.pins > 0 || cached.dirty;
        !self.is_map_page(page)
            && self.cached.get(&page).is_some_and(|cached| !busy(cached))
            && !self.due.contains_key(&page)
            && !self.write_back.frozen.contains_key(&page)
    }

    /// Second chance (the clock algorithm): a page that was asked for since the hand last passed stays for a
    /// round.
    pub(super) fn evict(&mut self) {
        for _ in 0..CLOCK_STEPS_MAX {
            if self.clock.len() <= self.site.cache_pages_max {
                return;
            }
            let page = self.clock.pop_front().expect("more than the bound");
            if self.is_evictable(page) && !self.at(page).used {
                self.cached.remove(&page);
                self.show(page);
            } else {
                self.cached.get_mut(&page).expect("pages of the clock are cached").used = false;
                self.clock.push_back(page);
            }
        }
    }
}
