//! Pages of which only a device that is caught up holds the newest version.
//!
//! Its member was away, and its copies do not count until it has joined. But where it has missed no change of
//! a page (`passes/page_pass.rs` knows), its copy says the same as the newest version. If that cannot be read
//! elsewhere, this copy is the only one left, so it is taken, as a new version that goes to every copy before
//! anything overwrites it. On the device itself that version goes first to the place that does not hold the
//! old one, and with the next write-back to both places.
//!
//! A copy with a fault of its own may show an older version. It is taken once every other copy was read and
//! none shows more. Its blank entries then count as lost, like those of such a copy on a member in service.
//! Until then it stays as it is on the device, because no other may be left.

use crate::array::base::members::Which;
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::copies::{CopyFound, Next, Place, Torn, version_of};
use crate::array::pages::store::trust::AHEAD;
use crate::array::pages::store::{Cached, Copies, LoadOutcome, Loaded, PageStore, Trust};
use crate::format::{LogKey, Page, PageError, PageIndex};
use crate::units::MemberIndex;
use uuid::Uuid;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Offer {
    own: CopyFound,
    newest: Option<Page>,
    /// Whether the device must have had a newer version than the one it shows.
    is_behind: bool,
}

impl Offer {
    pub(super) fn is_of(&self, member: MemberIndex) -> bool {
        self.own.member == member
    }

    /// Whether the copy, with no fault of its own, shows the page as it was when the member left.
    fn is_whole(&self) -> bool {
        let version = self.newest.as_ref().map(version_of);
        version.is_some() && !self.is_behind && self.own.fault(version, Torn::Impossible).is_none()
    }

    /// The content of the page, from this offer and from what a load has found without it; none if it cannot
    /// be known yet.
    pub(super) fn weigh(self, found: Option<&Page>, copies: &Copies) -> Option<Known> {
        let is_whole = self.is_whole() || is_off(Mutation::OfferNotWeighed);
        if !is_whole {
            let with_own = |copy: &CopyFound| *if self.is_of(copy.member) { &self.own } else { copy };
            if Copies(copies.0.iter().map(with_own).collect()).has_unread() {
                return None;
            }
        }
        // While the member was away no change was written that counts: a newer version says the same.
        let content = newer(found.cloned(), self.newest)?;
        Some(Known { own: self.own, content, is_doubted: !is_whole })
    }
}

/// The content of a page, taken from an offer.
pub(super) struct Known {
    own: CopyFound,
    content: Page,
    /// Whether it may be an older version.
    is_doubted: bool,
}

impl PageStore {
    /// Offers what a device that is caught up holds in the two places of its copy of a page; none for a place
    /// that cannot be read. The next load of the page takes it, if the page cannot be read otherwise and the
    /// offer suffices. False: the copy holds nothing that could ever be used.
    ///
    /// The member was in service until the end of epoch `since`, and has missed no change of the page.
    pub(crate) fn offer(
        &mut self,
        page: PageIndex,
        member: MemberIndex,
        since: u64,
        places: [Option<&[u8]>; 2],
    ) -> bool {
        let read = |bytes: &[u8]| decode_place(&self.site.key, self.site.array, page, bytes);
        let [first, second] = places.map(|bytes| bytes.map_or((Place::Unreadable, None), read));
        let own = CopyFound { member, places: Some([first.0, second.0]) };
        let newest = newer(first.1, second.1);
        let is_behind = self.versions.is_behind(page, newest.as_ref().map(version_of), since);
        let tells = own.is_unreadable() || newest.is_some() && !is_behind;
        self.offers.insert(page, Offer { own, newest, is_behind });
        self.show(page);
        tells
    }

    /// Puts the content known from an offer into the cache, since a load of the page has ended without its
    /// content.
    pub(super) fn take_offer(
        &mut self,
        page: PageIndex,
        known: Known,
        waiters: Vec<usize>,
        copies: &Copies,
    ) -> Loaded {
        let Known { own, mut content, is_doubted } = known;
        let faults = copies.faults(Some(version_of(&content)), Torn::Impossible);
        content.sequence += AHEAD;
        content.paired = true;
        if is_doubted {
            content.doubt();
        }
        let next = copies.0.iter().map(|copy| match copy.member {
            of if of == own.member => own.next_write(),
            of if self.away.contains(of) => Next::Anywhere,
            _ => copy.next_write(),
        });
        let cached = Cached::loaded(content, next, &waiters, Trust::Known);
        self.enter(page, cached);
        self.left_alone.remove(&page);
        self.rebuild_void(page);
        self.touch(page);
        let ((good, marked), outcome) = (Default::default(), LoadOutcome::Ready);
        let (unread, is_of_one_copy) = (None, false);
        Loaded { waiters, outcome, faults, is_kept: false, good, marked, unread, is_of_one_copy }
    }

    /// Leaves a page that cannot be read as it is on a device that is being built and has missed no change of
    /// it: once the device is in service its copy counts like any other. If the page can be read before that,
    /// the device gets it.
    ///
    /// # Panics
    /// When the page has no copy on this member.
    pub(crate) fn leave_alone(&mut self, page: PageIndex, member: MemberIndex) {
        assert!(self.site.layout.copy_on(page, member).is_some(), "{member} has a copy");
        if self.cached.contains_key(&page) {
            return self.rebuild(page, member, Which::Primary);
        }
        self.void.all.insert((page, member, false));
        self.left_alone.insert(page);
        self.show(page);
    }

    /// Whether copies on a device that is being built are to be written whole with the next write-back.
    pub(crate) fn is_due_on(&self, member: MemberIndex, which: Which) -> bool {
        self.due.values().any(|due| match which {
            Which::Primary => due.whole.contains(member),
            Which::Replacement => due.replacement.contains(member),
        })
    }
}

/// The content that a place of a copy shows.
pub(super) fn decode_place(
    key: &LogKey,
    array: Uuid,
    page: PageIndex,
    bytes: &[u8],
) -> (Place, Option<Page>) {
    match Page::decode(key, array, page, bytes) {
        Err(PageError::Blank) => (Place::Blank, None),
        Err(PageError::Damaged) => (Place::Damaged, None),
        Ok(version) => {
            let found = version_of(&version);
            (if version.paired { Place::Paired(found) } else { Place::Valid(found) }, Some(version))
        }
    }
}

/// The newer version; the first of two equal ones.
pub(super) fn newer(one: Option<Page>, other: Option<Page>) -> Option<Page> {
    match (&one, &other) {
        (Some(first), Some(second)) if version_of(first) < version_of(second) => other,
        (None, _) => other,
        _ => one,
    }
}
