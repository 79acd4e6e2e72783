//! How a page enters the cache, which page leaves it when it is full, and what is remembered of a page that
//! has left.
//!
//! Invariant: no page leaves that is in use, changed, or still to be written. Pages enter and leave here and
//! nowhere else ([`PageStore::forget_all`] apart). Must not know of copies or versions beyond handing on what
//! is known of them.

use crate::array::pages::copies::{Next, Places, version_of};
use crate::array::pages::store::versions::NewestPlaces;
use crate::array::pages::store::{Cached, PageStore, Trust};
use crate::format::{Page, PageIndex};
use std::sync::Arc;

/// Steps of the eviction clock for each page that is loaded: enough to find a victim unless nearly all pages
/// are in use or changed, and few enough that a load costs the same however large the cache is.
const CLOCK_STEPS_MAX: usize = 32;

impl Cached {
    /// A page that was loaded for these waiters. `next`: where the next write of each copy goes.
    pub(super) fn loaded(
        page: Page,
        next: impl Iterator<Item = Next>,
        waiters: &[usize],
        trust: Trust,
    ) -> Cached {
        let (page, next, pins) = (Arc::new(page), next.collect(), waiters.len() as u32);
        Cached { page, next, pins, used: true, dirty: false, trust }
    }
}

impl PageStore {
    /// Puts a page that was loaded into the cache; another one may have to leave for it, or the page itself
    /// once nothing needs it.
    pub(super) fn enter(&mut self, page: PageIndex, cached: Cached) {
        self.cached.insert(page, cached);
        if !self.is_map_page(page) {
            self.clock.push_back(page);
            self.evict();
        }
        self.show(page);
    }

    /// Takes a page out of the cache, which has left the clock already. Where each of its copies holds its
    /// version is remembered if all of that is known: the next load then needs one of them.
    pub(super) fn leave(&mut self, page: PageIndex) {
        let Some(cached) = self.cached.remove(&page) else { return };
        let version = version_of(&cached.page);
        let is_settled = cached.trust == Trust::Known && version.0 > 0 && !cached.dirty;
        let places = is_settled.then(|| self.newest_places(page, &cached)).flatten();
        self.versions.set_places(page, version, places);
        self.show(page);
    }

    /// The places in which the copies of a page hold its newest version. None where that is not known of
    /// every copy that counts.
    fn newest_places(&self, page: PageIndex, cached: &Cached) -> Option<NewestPlaces> {
        let mut places = Vec::with_capacity(cached.next.len());
        for ((member, _), next) in self.site.layout.copies(page).zip(&cached.next) {
            places.push(match next {
                _ if self.away.contains(member) => None,
                // The next write goes to the other place.
                Next::At(Places::Second) => Some(0),
                Next::At(Places::First) => Some(1),
                Next::At(Places::Alone | Places::Both) | Next::Anywhere | Next::Unread => return None,
            });
        }
        NewestPlaces::of(places.into_iter())
    }

    /// Whether the page is in the cache, or on its way.
    pub(in crate::array::pages) fn is_near(&self, page: PageIndex) -> bool {
        self.cached.contains_key(&page) || self.loads.contains_key(&page)
    }

    /// Most pages of hashes in the cache, unless more are in use or changed.
    pub(in crate::array::pages) fn cache_pages_max(&self) -> usize {
        self.site.cache_pages_max
    }

    /// Pages in the cache, those of the stripe map not counted.
    pub(in crate::array::pages) fn cached_pages(&self) -> usize {
        self.clock.len()
    }

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
                self.leave(page);
            } else {
                self.cached.get_mut(&page).expect("pages of the clock are cached").used = false;
                self.clock.push_back(page);
            }
        }
    }
}
