//! Pages of which every copy is at fault: how far they are believed, and until when.
//!
//! Copies that were read and are wrong may be right a moment later (a cable, a controller, a server that is
//! being mended). So nothing is written on the evidence of a read alone: waiting requests get what is left of
//! such a page, and the next request has it loaded anew. A change settles it: the version that is written
//! then is ahead of all that a copy may show later.
//!
//! Must not know how copies are compared.

use crate::array::pages::store::PageStore;
use crate::format::PageIndex;
use crate::units::SlotIndex;
use std::sync::Arc;

/// A version that is taken this way is ahead, by this much, of versions that copies may show which cannot be
/// read now: by more than the number of times a page can have been written while its member was away, and by
/// so little that it can be done 2^8 times before versions are no longer remembered (`versions.rs`).
pub(super) const AHEAD: u64 = 1 << 32;

/// How far a page in the cache is believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trust {
    Known,
    /// A page of hashes of which every copy is at fault: there may have been a newer version. Its content is
    /// that of the newest version left ([`crate::format::Page::doubt`]), until it is changed.
    Doubted,
    /// No version of it is left: all its entries are [`crate::units::BlockHash::LOST`], until it is changed.
    Lost,
}

impl Trust {
    pub(super) fn of(is_lost: bool, is_doubted: bool) -> Trust {
        match is_doubted {
            _ if is_lost => Trust::Lost,
            true => Trust::Doubted,
            false => Trust::Known,
        }
    }
}

impl PageStore {
    /// Whether the page was lost when it was loaded.
    pub(crate) fn is_lost(&self, page: PageIndex) -> bool {
        self.at(page).trust == Trust::Lost
    }

    /// Whether the hash of a block may be an older one: its page is cached, and doubted.
    pub(crate) fn is_doubted(&self, slot: SlotIndex, row: usize, column: usize) -> bool {
        let (page, _) = self.site.layout.hash_entry(slot, row, column);
        self.cached.get(&page).is_some_and(|cached| cached.trust == Trust::Doubted)
    }

    /// Believes the page from now on, because it is changed.
    pub(super) fn believe(&mut self, page: PageIndex) {
        if self.at(page).trust == Trust::Doubted {
            self.get_ahead(page);
        }
    }

    /// Makes the next version of the page count whatever a copy may show later: it is ahead of that.
    pub(super) fn get_ahead(&mut self, page: PageIndex) {
        let known = self.versions.sequence(page);
        let cached = self.cached.get_mut(&page).expect("a page that is changed is cached");
        let image = Arc::make_mut(&mut cached.page);
        image.sequence = image.sequence.max(known) + AHEAD;
        cached.trust = Trust::Known;
        self.show(page);
    }

    /// Settles the content of the page, because it is written to a device that is being built. Two versions
    /// of one number must not differ, so a page that was doubted gets a new version.
    pub(super) fn decide(&mut self, page: PageIndex) {
        if self.at(page).trust == Trust::Doubted {
            self.touch(page);
        }
    }

    /// Drops a page from the cache that no operation uses and that is not changed, unless its content is
    /// known: the next request has it read again.
    pub(super) fn drop_unless_known(&mut self, page: PageIndex) {
        if self.at(page).trust != Trust::Known {
            self.clock.retain(|&other| other != page);
            self.leave(page);
        }
    }
}
