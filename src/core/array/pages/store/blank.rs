//! Pages that show no version although they had one, or may have had one.
//!
//! Must not know what is in which slot: the caller says whether what a page tells of counts.

use crate::array::pages::store::{CopyFault, Due, Next, PageStore, Trust};
use crate::format::{MemberSet, PAGE_ENTRIES, PageIndex};
use crate::units::{BlockHash, MemberIndex};
use std::sync::Arc;

impl PageStore {
    /// A page that shows no version on any member must have been written, as a stripe holds data in one of its slots: it
    /// is lost. Otherwise its blocks would read as zeroes. Returns the copies that are at fault.
    pub(crate) fn deny_blank(&mut self, page: PageIndex) -> Vec<(MemberIndex, CopyFault)> {
        self.versions.forget(page);
        let cached = self.cached.get_mut(&page).expect("a page that was just loaded is cached");
        *Arc::make_mut(&mut cached.page).entries = [BlockHash::LOST.0; PAGE_ENTRIES];
        cached.trust = Trust::Lost;
        // Those that are not blank are no worse than those that are.
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

    /// The same, where copies could not be read and may show a version (rule T3): the page was not loaded, and whoever
    /// waited for it has nothing pinned.
    pub(crate) fn retract_blank(&mut self, page: PageIndex) {
        self.versions.forget(page);
        let due = self.due.remove(&page).unwrap_or_default();
        // Devices that are being built lack it still.
        let own = due.whole.iter().map(|member| (page, member, false));
        let lacking: Vec<_> = own.chain(due.replacement.iter().map(|member| (page, member, true))).collect();
        if !self.left_alone.contains(&page) {
            self.void.due.extend(&lacking);
        }
        self.void.all.extend(lacking);
        self.cached.remove(&page);
        self.clock.retain(|&other| other != page);
    }

    /// A page that shows no version, and rightly so, although it was left alone on a device, which
    /// may show one: it gets a version that is ahead of that.
    pub(crate) fn outdo_left_alone(&mut self, page: PageIndex) {
        if self.left_alone.contains(&page) && self.is_blank(page) {
            self.left_alone.remove(&page);
            self.get_ahead(page);
            self.touch(page);
        }
    }

    /// A page that was lost begins anew, as nothing that it tells of counts: no slot of it holds
    /// data. Its entries stay [`BlockHash::LOST`], so that nothing is claimed of any block; the
    /// first data of a slot sets all that it has. The version is ahead of all that a copy may show
    /// later. The copies of `bad` members are known to be bad from here on, as all that are to be
    /// written with the next write-back: a check before that is over tells of none of them again.
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
