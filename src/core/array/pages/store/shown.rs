//! What of the stripe map and of the pages of hashes readers on other threads see: where every stripe is, all
//! hashes of pages that are cached and known, and of pages that are not cached which version is the newest
//! and where. The view itself is `calpe_view`; each function here publishes one change whole.
//!
//! Invariants: a page of hashes is shown only while it is cached and known; its newest version is shown only
//! while it is not cached, so that no entry can change, and while a load of one copy would be enough
//! (`sole.rs`). Must not know who reads.

use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::store::versions::PlacedVersion;
use crate::array::pages::store::{PageStore, Trust};
use crate::format::{Geometry, PAGE_ENTRIES, PageIndex, PageLayout, hash_of_entry};
use crate::units::{BlockHash, SlotIndex, StripeIndex};
use calpe_view::{Hash, Publisher, Size, View};
use std::sync::Arc;

/// The size of the view of an array whose cache holds at most `cache_pages_max` pages of hashes.
pub(in crate::array) fn view_size(geometry: &Geometry, layout: &PageLayout, cache_pages_max: u64) -> Size {
    let pages = layout.pages() - layout.map_pages();
    Size {
        stripes: geometry.stripes(),
        slots: geometry.slots,
        pages,
        frames: u32::try_from(cache_pages_max.min(pages)).unwrap_or(u32::MAX - 1),
        entries: PAGE_ENTRIES as u32,
        members: geometry.width(),
    }
}

/// A hash as the view keeps it: that of a block whose own member has its bytes, or none.
fn shown(hash: BlockHash) -> Hash {
    if !hash.is_stored() {
        return [0; 2];
    }
    let (halves, _) = hash.0.as_chunks::<8>();
    [u64::from_le_bytes(halves[0]), u64::from_le_bytes(halves[1])]
}

/// See [`shown`].
pub(in crate::array) fn hash_of_shown([low, high]: Hash) -> BlockHash {
    let mut hash = [0; 16];
    hash[..8].copy_from_slice(&low.to_le_bytes());
    hash[8..].copy_from_slice(&high.to_le_bytes());
    BlockHash(hash)
}

impl PageStore {
    /// The view.
    pub(in crate::array) fn view(&self) -> &Arc<View> {
        self.shown.view()
    }

    /// The view's publisher, for what is not of pages.
    pub(in crate::array) fn publisher(&mut self) -> &mut Publisher {
        &mut self.shown
    }

    /// Goes on with the view of a store that this one replaces. It shows nothing any more.
    pub(in crate::array) fn take_over_view(&mut self, other: &mut PageStore) {
        std::mem::swap(&mut self.shown, &mut other.shown);
        self.shown.forget_all();
    }

    /// Shows a page of hashes as it is in the cache, if it may be shown; or, if it is not cached, its newest
    /// version and where that is, if all of this is known; and else no more of it.
    pub(super) fn show(&mut self, page: PageIndex) {
        let Some(shown_as) = self.shown_as(page) else { return };
        match self.cached.get(&page) {
            Some(_) if is_off(Mutation::ViewPagePlaceKept) && self.shown.placed(shown_as).is_some() => {}
            Some(cached) if cached.trust == Trust::Known => {
                let hashes = cached.page.entries.iter().map(|entry| shown(hash_of_entry(*entry)));
                self.shown.show_page(shown_as, hashes);
            }
            Some(_) => self.shown.hide_page(shown_as),
            None => match self.placed(page) {
                Some(version) => self.shown.place_page(shown_as, version.0),
                None => self.shown.hide_page(shown_as),
            },
        }
    }

    /// The newest version of a page that is not cached, and where that is, if one copy would be enough to
    /// load it from.
    fn placed(&self, page: PageIndex) -> Option<PlacedVersion> {
        let has_no_say = !self.left_alone.contains(&page) && !self.offers.contains_key(&page);
        self.versions.placed(page).filter(|_| has_no_say)
    }

    /// Shows a page that is in the cache, if it is not shown: there was no room when it was loaded.
    pub(super) fn show_if_hidden(&mut self, page: PageIndex) {
        if self.shown_as(page).is_some_and(|page| !self.shown.shows(page)) {
            self.show(page);
        }
    }

    /// Shows hashes of a slot that were changed in these entries of a page.
    pub(super) fn show_hashes(
        &mut self,
        slot: SlotIndex,
        page: PageIndex,
        entries: impl Iterator<Item = (usize, BlockHash)>,
    ) {
        if is_off(Mutation::ViewWriteLate) {
            return;
        }
        let Some(page) = self.shown_as(page).filter(|page| self.shown.shows(*page)) else { return };
        let mut change = self.shown.change(slot.0);
        entries.for_each(|(entry, hash)| change.set(page, entry, shown(hash)));
    }

    /// Sets an entry of a page of hashes, whatever slot it is of.
    #[cfg(test)]
    pub(super) fn set_and_show(&mut self, page: PageIndex, entry: usize, value: [u8; 16]) {
        self.set(page, entry, value);
        self.show(page);
    }

    /// Checks that no page is shown that is not cached and known, and none otherwise than it is.
    #[cfg(test)]
    pub(in crate::array) fn check_shown(&self) {
        for page in (self.site.layout.map_pages()..self.site.layout.pages()).map(PageIndex) {
            let shown_as = self.shown_as(page).expect("a page of hashes");
            if let Some(word) = self.shown.placed(shown_as) {
                assert!(!self.cached.contains_key(&page), "{page:?} is cached and shown as if it were not");
                assert_eq!(self.placed(page), Some(PlacedVersion(word)), "{page:?}");
            }
            let Some(hashes) = self.shown.shown(shown_as) else { continue };
            let cached = self.cached.get(&page).unwrap_or_else(|| panic!("{page:?} is shown and not cached"));
            assert_eq!(cached.trust, Trust::Known, "{page:?} is shown");
            let entries = cached.page.entries.iter().map(|entry| shown(hash_of_entry(*entry)));
            assert!(hashes.eq(entries), "{page:?} is shown otherwise than it is");
        }
    }

    /// Shows what a test keeps from being shown in time.
    pub(in crate::array) fn show_late(&mut self) {
        if is_off(Mutation::ViewWriteLate) {
            let pages: Vec<PageIndex> = self.clock.iter().copied().collect();
            pages.into_iter().for_each(|page| self.show(page));
        }
        if is_off(Mutation::ViewMoveLate) || is_off(Mutation::ViewDiscardLate) {
            for stripe in 0..self.site.geometry.stripes() {
                let entry = self.map_entry(StripeIndex(stripe));
                self.shown.set_stripe(stripe, entry.slot.0, entry.holds_data, false);
            }
        }
    }

    /// The number of a page of hashes in the view; none for a page of the stripe map.
    fn shown_as(&self, page: PageIndex) -> Option<u64> {
        page.0.checked_sub(self.site.layout.map_pages())
    }
}
