//! Pages of which only a device that is caught up holds the newest version.
//!
//! Its member was away, and its copies count for nothing until it has joined. But where it has missed nothing of what a page
//! tells of (`page_pass.rs` knows), its copy says the same as the newest version; and if that cannot be read elsewhere, it is
//! all there is. So it is taken, as a new version that is written to every copy, before anything goes over it: to the
//! device itself first in the place that the version which it has is not in, and in both with the write-back after that.

use super::{Cached, Copies, LoadOutcome, Loaded, PageStore};
use crate::array::page_copies::{Next, Place, Places, Torn, version_of};
use crate::format::{LogKey, Page, PageError, PageIndex};
use crate::units::MemberIndex;
use std::sync::Arc;
use uuid::Uuid;

/// A version that is taken this way is ahead of what copies may show that cannot be read now: by more than a page can have been
/// written while its member was away, and so little that it can be done 2^11 times (`versions.rs`).
const AHEAD: u64 = 1 << 32;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Offer {
    member: MemberIndex,
    newest: Page,
    /// The place that this version is not in.
    other: Places,
}

impl Offer {
    pub fn is_of(&self, member: MemberIndex) -> bool {
        self.member == member
    }
}

impl PageStore {
    /// A device that is caught up holds this in the two places of its copy of a page; none for a place that cannot be read. The next
    /// load of the page takes the newest version, if the page cannot be read otherwise. Whether there is one.
    ///
    /// The member has missed nothing of what the page tells of.
    pub fn offer(&mut self, page: PageIndex, member: MemberIndex, places: [Option<&[u8]>; 2]) -> bool {
        let read = |bytes: &[u8]| decode_place(&self.key, self.array, page, bytes);
        let [first, second] = places.map(|bytes| bytes.map_or((Place::Unreadable, None), read).1);
        let is_second = match (&first, &second) {
            (Some(first), Some(second)) => version_of(first) < version_of(second),
            (first, _) => first.is_none(),
        };
        let Some(newest) = newer(first, second) else { return false };
        self.offers.insert(page, Offer { member, newest, other: Places::one(usize::from(!is_second)) });
        true
    }

    /// Puts what is offered of a page into the cache, as a load of it has ended without it.
    pub(super) fn take_offer(
        &mut self,
        page: PageIndex,
        offer: Offer,
        waiters: Vec<usize>,
        copies: &Copies,
    ) -> Loaded {
        let Offer { member, mut newest, other } = offer;
        let faults = copies.faults(Some(version_of(&newest)), Torn::Impossible);
        newest.sequence += AHEAD;
        newest.paired = true;
        let next = copies.0.iter().map(|copy| match copy.member {
            of if of == member => Next::At(other),
            of if self.away.contains(of) => Next::Anywhere,
            _ => copy.next_write(),
        });
        let cached = Cached {
            next: next.collect(),
            page: Arc::new(newest),
            pins: waiters.len() as u32,
            used: true,
            dirty: false,
            lost: false,
        };
        self.cached.insert(page, cached);
        self.rebuild_void(page);
        self.touch(page);
        if !self.is_map_page(page) {
            self.clock.push_back(page);
            self.evict();
        }
        Loaded { waiters, outcome: LoadOutcome::Ready, faults, good: Default::default(), unread: None }
    }

    /// Whether copies on the device of this member that is being built are to be written whole with the next write-back.
    pub fn is_due_on(&self, member: MemberIndex) -> bool {
        self.due.values().any(|due| due.whole.contains(member))
    }
}

/// What a place of a copy shows.
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

/// The newer version; the first of two that are the same.
pub(super) fn newer(one: Option<Page>, other: Option<Page>) -> Option<Page> {
    match (&one, &other) {
        (Some(first), Some(second)) if version_of(first) < version_of(second) => other,
        (None, _) => other,
        _ => one,
    }
}
