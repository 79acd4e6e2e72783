//! What the copies of one metadata page say, taken together: which version counts, which copies are bad, and where
//! each can be written without harm. Pure; the reasons are at the head of pages.rs.
//!
//! Must not know of I/O, nor of the pages' content.

use crate::format::{PAGE_BYTES, Page};
use crate::units::MemberIndex;

/// One or both of the places of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Places {
    First,
    /// The first, as the only one: the second is blank.
    Alone,
    Second,
    Both,
}

impl Places {
    pub fn one(place: usize) -> Places {
        if place == 0 { Places::First } else { Places::Second }
    }

    /// The place that the next write goes to once these hold the newest version.
    pub fn next(self) -> Places {
        if matches!(self, Places::First | Places::Alone) { Places::Second } else { Places::First }
    }

    /// Bytes from the start of the copy.
    pub fn offset(self) -> u64 {
        if self == Places::Second { PAGE_BYTES as u64 } else { 0 }
    }

    pub fn len(self) -> usize {
        if self == Places::Both { 2 * PAGE_BYTES } else { PAGE_BYTES }
    }
}

/// Whether a page's writes may have been cut off by a crash since it was last known to be whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Torn {
    /// Only for a page that the log names at the start after an unclean stop, and until replay has written it. Copies
    /// that are behind or half written are then nobody's fault.
    Possible,
    Impossible,
}

/// What is wrong with the copy of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyFault {
    /// It does not verify.
    Damaged,
    /// The device could not read all of it.
    Unreadable,
    /// It shows an older version than other copies: a write was lost.
    Stale,
    /// It shows nothing where other copies show a version.
    Blank,
}

/// Orders the versions of a page: sequence, epoch.
pub(super) type Version = (u64, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Unreadable,
    Blank,
    Damaged,
    /// Of the other place nothing is known.
    Valid(Version),
    /// Valid, and the other place had a version when this was written.
    Paired(Version),
}

/// A copy as a load has found it; none where its member is not usable.
#[derive(Debug)]
pub(super) struct CopyFound {
    pub member: MemberIndex,
    pub places: Option<[Place; 2]>,
}

/// The copies of a page as a load has found them.
#[derive(Debug)]
pub(super) struct Copies(pub Vec<CopyFound>);

impl Copies {
    /// Whether a page that no copy shows a version of was written once. As long as no more than m copies are at fault,
    /// each of the m + 1 in itself is right about "never written whole".
    pub fn have_lost(&self, torn: Torn) -> bool {
        !self.0.iter().any(|copy| copy.newest().is_some() || copy.may_be_unwritten(torn))
    }

    /// Whether a newer version than `truth`, the newest that any copy shows, may have been there: each of the m + 1 is
    /// missing or at fault, and what is unreadable in one may have been newer than what it shows.
    pub fn may_be_behind(&self, truth: Version, torn: Torn) -> bool {
        let is_witness = |copy: &CopyFound| copy.places.is_some() && copy.fault(Some(truth), torn).is_none();
        torn == Torn::Impossible && !self.0.iter().any(is_witness)
    }

    /// Those that are at fault when `truth` is the page's version, none for a page without one.
    pub fn faults(&self, truth: Option<Version>, torn: Torn) -> Vec<(MemberIndex, CopyFault)> {
        self.0.iter().filter_map(|copy| Some((copy.member, copy.fault(truth, torn)?))).collect()
    }
}

impl CopyFound {
    fn newest(&self) -> Option<(Version, usize)> {
        let valid = |(at, place): (usize, &Place)| match place {
            Place::Valid(version) | Place::Paired(version) => Some((*version, at)),
            _ => None,
        };
        self.places.iter().flatten().enumerate().filter_map(valid).max()
    }

    /// Whether a place that had a version, as the other one says, is blank: its beginning is gone.
    fn has_lost_a_place(&self) -> bool {
        matches!(self.places, Some([Place::Paired(_), Place::Blank] | [Place::Blank, Place::Paired(_)]))
    }

    fn count(&self, wanted: Place) -> usize {
        self.places.iter().flatten().filter(|&&place| place == wanted).count()
    }

    /// Whether this copy, with no fault of its own, says that no version was ever written whole. If one had been, all
    /// m + 1 copies that say no such thing would be at fault, so one copy that says so decides.
    fn may_be_unwritten(&self, torn: Torn) -> bool {
        match torn {
            Torn::Possible => {
                self.count(Place::Blank) + self.count(Place::Damaged) == 2 && self.count(Place::Blank) > 0
            }
            Torn::Impossible => self.count(Place::Blank) == 2,
        }
    }

    /// Where the next write of this copy does no harm if it is cut off; none if it was not read.
    pub fn next_write(&self) -> Option<Places> {
        Some(match (self.newest(), self.places?) {
            (Some((_, place)), _) => Places::one(1 - place),
            // Nothing was ever written whole here, and the second place, still blank, goes on saying so.
            (None, [Place::Blank | Place::Damaged, Place::Blank]) => Places::Alone,
            // Something was, and is gone: there is nothing to lose.
            _ => Places::Both,
        })
    }

    /// What is wrong with this copy when `truth` is the page's version, none for a page without one.
    fn fault(&self, truth: Option<Version>, torn: Torn) -> Option<CopyFault> {
        self.places?;
        let damaged = self.count(Place::Damaged) + usize::from(self.has_lost_a_place());
        let newest = self.newest().map(|(version, _)| version);
        if self.count(Place::Unreadable) > 0 {
            Some(CopyFault::Unreadable)
        } else if damaged == 2 {
            Some(CopyFault::Damaged)
        } else if torn == Torn::Possible {
            None
        } else if damaged == 1 {
            Some(CopyFault::Damaged)
        } else if newest.is_some() && newest != truth {
            Some(CopyFault::Stale)
        } else if newest != truth {
            Some(CopyFault::Blank)
        } else {
            None
        }
    }
}

/// The version of a page; `(0, 0)` for one that was never written.
pub(super) fn version_of(page: &Page) -> Version {
    (page.sequence, page.epoch)
}
