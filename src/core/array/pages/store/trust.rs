//! Pages of which every copy is at fault: how far they are believed, and until when.
//!
//! Copies that were read and are wrong may be right a moment later (a cable, a controller, a server
//! that is being mended). So nothing is written that only a read has decided: such a page says what
//! is left of it to the requests that wait for it, and the next request has it loaded anew. A
//! change decides: the version that is written then is ahead of all that a copy may show later.
//!
//! Must not know how copies are compared.

use crate::array::pages::store::PageStore;
use crate::format::PageIndex;
use crate::units::SlotIndex;
use std::sync::Arc;

/// A version that is taken this way is ahead of what copies may show that cannot be read now: by more than a page can have been
/// written while its member was away, and so little that it can be done 2^11 times (`versions.rs`).
pub(super) const AHEAD: u64 = 1 << 32;

/// How far what a page in the cache says is believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trust {
    Known,
    /// A page of hashes of which every copy is at fault: a newer version may have been there. It
    /// says what the newest does that is left ([`crate::format::Page::doubt`]), until it is
    /// changed.
    Doubted,
    /// Nothing is left of it: it is [`crate::units::BlockHash::LOST`] all through, until it is changed.
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

    /// Whether the hash of a block may be that of an older one: its page is cached, and doubted.
    pub(crate) fn is_doubted(&self, slot: SlotIndex, row: usize, column: usize) -> bool {
        let (page, _) = self.site.layout.hash_entry(slot, row, column);
        self.cached.get(&page).is_some_and(|cached| cached.trust == Trust::Doubted)
    }

    /// The page is changed: what it says counts from now on.
    pub(super) fn believe(&mut self, page: PageIndex) {
        if self.at(page).trust == Trust::Doubted {
            self.get_ahead(page);
        }
    }

    /// The next version of the page counts whatever a copy may show later: it is ahead of that.
    pub(super) fn get_ahead(&mut self, page: PageIndex) {
        let known = self.versions.sequence(page);
        let cached = self.cached.get_mut(&page).expect("a page that is changed is cached");
        let image = Arc::make_mut(&mut cached.page);
        image.sequence = image.sequence.max(known) + AHEAD;
        cached.trust = Trust::Known;
    }

    /// A device that is being built is told what the page says. Two versions of one number must not
    /// differ, so it is a new one where it was doubted.
    pub(super) fn decide(&mut self, page: PageIndex) {
        if self.at(page).trust == Trust::Doubted {
            self.touch(page);
        }
    }

    /// Nothing uses the page, and it is not changed: if it is not known, the next request has it
    /// read again.
    pub(super) fn drop_unless_known(&mut self, page: PageIndex) {
        if self.at(page).trust != Trust::Known {
            self.cached.remove(&page);
            self.clock.retain(|&other| other != page);
        }
    }
}
