//! Pages that show no version although they had one, or may have had one.
//!
//! Must not know what is in which slot: the caller says whether the entries of a page count.

use crate::array::pages::store::{CopyFault, Due, Next, PageStore, Trust};
use crate::format::{MemberSet, PAGE_ENTRIES, PageIndex};
use crate::units::{BlockHash, MemberIndex};
use std::sync::Arc;

impl PageStore {
    /// Makes a page lost that shows no version on any member, but must have been written because a stripe
    /// holds data in one of its slots. Otherwise its blocks would read as zeroes. Returns the copies that are
    /// at fault.
    pub(crate) fn deny_blank(&mut self, page: PageIndex) -> Vec<(MemberIndex, CopyFault)> {
        self.versions.forget(page);
        let cached = self.cached.get_mut(&page).expect("a page that was just loaded is cached");
        *Arc::make_mut(&mut cached.page).entries = [BlockHash::LOST.0; PAGE_ENTRIES];
        cached.trust = Trust::Lost;
        self.show(page);
        let cached = &self.cached[&page];
        // Copies that are not blank are no worse than those that are.
        if let Some(due) = self.due.get_mut(&page) {
            due.heal = MemberSet::new();
            if due.is_empty() {
                self.due.remove(&page);
            }
        }
        let copies = self.site.layout.copies(page).zip(&cached.next);
        copies
            .filter(|(_, next)| **next != Next::Anywhere)
            .map(|((member, _), _)| (member, CopyFault::Blank))
            .collect()
    }

    /// Drops such a page again where copies could not be read and may show a version (rule T3). It then
    /// counts as not loaded, and operations that waited for it have nothing pinned.
    pub(crate) fn retract_blank(&mut self, page: PageIndex) {
        self.versions.forget(page);
        let due = self.due.remove(&page).unwrap_or_default();
        // Devices that are being built still lack it.
        let own = due.whole.iter().map(|member| (page, member, false));
        let lacking: Vec<_> = own.chain(due.replacement.iter().map(|member| (page, member, true))).collect();
        if !self.left_alone.contains(&page) {
            self.void.due.extend(&lacking);
        }
        self.void.all.extend(lacking);
        self.clock.retain(|&other| other != page);
        self.leave(page);
    }

    /// Gives a new version to a page that rightly shows none, but was left alone on a device, which may show
    /// one: the new version is ahead of that.
    pub(crate) fn outdo_left_alone(&mut self, page: PageIndex) {
        if self.left_alone.contains(&page) && self.is_blank(page) {
            self.left_alone.remove(&page);
            self.get_ahead(page);
            self.touch(page);
        }
    }

    /// Begins a lost page anew, because none of its entries counts: no slot of it holds data. Its entries
    /// stay [`BlockHash::LOST`], so that it says nothing of any block; the first data of a slot sets all its
    /// entries. The version is ahead of all that a copy may show later. The copies of `bad` members are known
    /// to be bad from here on, like all that the next write-back is to write: a check before that is over
    /// does not report them again.
    ///
    /// # Panics
    /// When the page was not just loaded, or is one of the stripe map.
    pub(crate) fn begin_anew(&mut self, page: PageIndex, bad: MemberSet) {
        assert!(!self.is_map_page(page), "what a page of the stripe map says always counts");
        self.get_ahead(page);
        self.left_alone.remove(&page);
        self.rebuild_void(page);
        self.touch(page);
        self.due.entry(page).or_default().merge(Due::healed(bad));
    }
}
