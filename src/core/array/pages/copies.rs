//! Compares the copies of one metadata page: which version counts, which copies are bad, and where each can
//! be written without harm. Pure; the reasons are at the head of `store.rs`.
//!
//! A place that cannot be read is unknown, and never taken for old or damaged (rule T3).
//!
//! Must not know of I/O, nor of the pages' content.

use crate::format::{MemberSet, PAGE_BYTES, Page};
use crate::units::MemberIndex;

/// One or both of the places of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Places {
    First,
    /// The first, as the only one in use: the second is blank.
    Alone,
    Second,
    Both,
}

impl Places {
    pub(super) fn one(place: usize) -> Places {
        if place == 0 { Places::First } else { Places::Second }
    }

    /// The places of the next write once these hold the newest version.
    pub(super) fn next(self) -> Places {
        if matches!(self, Places::First | Places::Alone) { Places::Second } else { Places::First }
    }

    /// Offset from the start of the copy, in bytes.
    pub(super) fn offset(self) -> u64 {
        if self == Places::Second { PAGE_BYTES as u64 } else { 0 }
    }

    pub(super) fn len(self) -> usize {
        if self == Places::Both { 2 * PAGE_BYTES } else { PAGE_BYTES }
    }
}

/// Whether a page's writes may have been cut off by a crash since it was last known to be whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) enum Torn {
    /// Only for a page that the log names at the start after an unclean stop, and until replay has written
    /// it. Copies that are behind or half written are then no fault.
    Possible,
    /// Only for other pages of the stripe map at the start after an unclean stop: the marks that the loss of
    /// a member leaves on stripes are in no log, so a write of them may have been cut off. A damaged copy may
    /// come from that or from a fault.
    Unnamed,
    Impossible,
}

/// What is wrong with the copy of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) enum CopyFault {
    /// It does not verify.
    Damaged,
    /// The device could not read all of it.
    Unreadable,
    /// It shows an older version than other copies: it has lost a write.
    Stale,
    /// It shows no version where other copies show one.
    Blank,
}

impl CopyFault {
    /// Whether content was read, and is wrong.
    pub(in crate::array) fn is_of_content(self) -> bool {
        self != CopyFault::Unreadable
    }
}

/// Orders the versions of a page: sequence, epoch.
pub(super) type Version = (u64, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Unreadable,
    Blank,
    Damaged,
    /// Valid. Nothing is known of the other place.
    Valid(Version),
    /// Valid, and the other place had a version when this was written.
    Paired(Version),
}

/// A copy as a load has found it; no places where its member is not usable.
// Plain data: the result of reading a copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyFound {
    pub member: MemberIndex,
    pub places: Option<[Place; 2]>,
}

/// The copies of a page as a load has found them.
#[derive(Debug)]
pub(super) struct Copies(pub Vec<CopyFound>);

/// How the newest remembered version of a page compares with the one in question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remembered {
    Nothing,
    /// It is the same, or older.
    Same,
    /// It is newer.
    Newer,
}

/// What the copies of a page, taken together, prove about the newest version that they show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// It is the newest there is.
    Newest,
    /// It is the newest there is, provided that damaged copies come from writes that a crash cut off. A copy
    /// that gave an error could settle that.
    Likely,
    /// A newer one may be in copies that were not read: because of an error, or because their members are not
    /// here (rule T3).
    Unknown,
    /// Every copy was read, and every one is at fault: there may have been a newer one that is gone.
    Doubtful,
}

/// Where the next write of a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    At(Places),
    /// To both places: their content does not count, because their member was not in service, or missed a
    /// write.
    Anywhere,
    /// A place could not be read, so the newest version may be there: it is read again first (rule T3).
    Unread,
}

impl Copies {
    /// What the copies prove about `truth`, the newest version that any of them shows; none when none shows
    /// one.
    pub(super) fn standing(&self, truth: Option<Version>, remembered: Remembered, torn: Torn) -> Standing {
        if remembered == Remembered::Same {
            return Standing::Newest;
        }
        let is_witness =
            |copy: &&CopyFound| remembered == Remembered::Nothing && copy.is_witness(truth, torn);
        let witnesses: Vec<&CopyFound> = self.0.iter().filter(is_witness).collect();
        let is_certain = |copy: &&CopyFound| copy.count(Place::Damaged) == 0 && !copy.has_lost_a_place();
        if witnesses.is_empty() {
            return if self.has_unread() { Standing::Unknown } else { Standing::Doubtful };
        }
        match torn {
            _ if witnesses.iter().any(is_certain) => Standing::Newest,
            Torn::Possible | Torn::Unnamed if self.has_errors() => Standing::Likely,
            Torn::Unnamed => Standing::Doubtful,
            Torn::Possible | Torn::Impossible => Standing::Newest,
        }
    }

    /// Whether a copy was not read, wholly or in part: its member is not here, or returned an error.
    pub(super) fn has_unread(&self) -> bool {
        self.0.iter().any(|copy| copy.places.is_none()) || self.has_errors()
    }

    /// Whether a member returned an error.
    pub(super) fn has_errors(&self) -> bool {
        self.0.iter().any(CopyFound::is_unreadable)
    }

    /// Why the newest version is not known, in words.
    pub(super) fn hindrances(&self) -> String {
        let of = |what: &str, is_so: &dyn Fn(&CopyFound) -> bool| {
            let members = self.0.iter().filter(|copy| is_so(copy)).map(|copy| copy.member.to_string());
            let members: Vec<String> = members.collect();
            (!members.is_empty()).then(|| format!("{what} {}", members.join(", ")))
        };
        let parts = [
            of("unreadable on member", &|copy| copy.is_unreadable()),
            of("not there with member", &|copy| copy.places.is_none()),
            of("damaged or old on member", &|copy| copy.places.is_some() && !copy.is_unreadable()),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join("; ")
    }

    /// The copies that are at fault when `truth` is the page's version, none for a page without one.
    pub(super) fn faults(&self, truth: Option<Version>, torn: Torn) -> Vec<(MemberIndex, CopyFault)> {
        self.0.iter().filter_map(|copy| Some((copy.member, copy.fault(truth, torn)?))).collect()
    }
}

impl Copies {
    /// The members whose copies were read, and are right.
    pub(super) fn good(&self, truth: Option<Version>) -> MemberSet {
        let is_good =
            |copy: &&CopyFound| copy.places.is_some() && copy.fault(truth, Torn::Impossible).is_none();
        self.0.iter().filter(is_good).map(|copy| copy.member).collect()
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

    /// Whether a place is blank although the other one says that it had a version: that place has lost its
    /// content.
    fn has_lost_a_place(&self) -> bool {
        matches!(self.places, Some([Place::Paired(_), Place::Blank] | [Place::Blank, Place::Paired(_)]))
    }

    fn count(&self, wanted: Place) -> usize {
        self.places.iter().flatten().filter(|&&place| place == wanted).count()
    }

    /// Whether one of its places cannot be read.
    pub(super) fn is_unreadable(&self) -> bool {
        self.count(Place::Unreadable) > 0
    }

    /// Whether neither of its places can be read.
    pub(super) fn is_wholly_unreadable(&self) -> bool {
        self.count(Place::Unreadable) == 2
    }

    /// Whether this copy, with no fault of its own, proves that there is no newer version than `truth`. At
    /// most m of the m + 1 copies are at fault, so one such copy decides. Where a crash may have cut off a
    /// write, a copy that shows any version shows at least the one before that write, and that is enough.
    fn is_witness(&self, truth: Option<Version>, torn: Torn) -> bool {
        if self.places.is_none() || self.is_unreadable() {
            return false;
        }
        match (truth, torn) {
            (None, _) => self.may_be_unwritten(torn),
            (Some(_), Torn::Possible | Torn::Unnamed) => {
                self.newest().is_some() || self.may_be_unwritten(torn)
            }
            (Some(_), Torn::Impossible) => self.fault(truth, torn).is_none(),
        }
    }

    /// Whether this copy, with no fault of its own, proves that no version was ever written whole. If one had
    /// been, all m + 1 copies would show a version or a fault, so one that shows neither decides.
    fn may_be_unwritten(&self, torn: Torn) -> bool {
        match torn {
            Torn::Possible => {
                self.count(Place::Blank) + self.count(Place::Damaged) == 2 && self.count(Place::Blank) > 0
            }
            Torn::Unnamed | Torn::Impossible => self.count(Place::Blank) == 2,
        }
    }

    /// The place where a write of this copy does no harm if it is cut off.
    pub(super) fn next_write(&self) -> Next {
        if self.is_unreadable() {
            return Next::Unread;
        }
        match (self.newest(), self.places) {
            (_, None) => Next::Anywhere,
            (Some((_, place)), _) => Next::At(Places::one(1 - place)),
            // Nothing was ever written whole here. The second place, still blank, goes on showing that.
            (None, Some([Place::Blank | Place::Damaged, Place::Blank])) => Next::At(Places::Alone),
            // There was a version, and it is gone: nothing can be lost.
            (None, Some(_)) => Next::At(Places::Both),
        }
    }

    /// Where to write version `new` of the page to a copy that was read again just before and still cannot be
    /// read whole; `newest` is the version that it should have so far, both by their sequences. The
    /// unreadable place may hold the newest version of this copy, and may become readable: it is spared
    /// unless the other place holds that version.
    pub(super) fn next_write_unread(&self, newest: u64, new: u64) -> Places {
        match self.places {
            // No version was ever written, here or elsewhere.
            _ if new == 0 => Places::Both,
            _ if newest == 0 => Places::Alone,
            Some([Place::Unreadable, other] | [other, Place::Unreadable]) if other != Place::Unreadable => {
                let unread = usize::from(matches!(self.places, Some([_, Place::Unreadable])));
                let is_newest = matches!(other, Place::Valid((sequence, _)) | Place::Paired((sequence, _)) if sequence >= newest);
                Places::one(if is_newest { unread } else { 1 - unread })
            }
            _ => Places::Both,
        }
    }

    /// Whether a write to these places leaves a place unwritten that could not be read.
    pub(super) fn is_spared_by(&self, places: Places) -> bool {
        let unread = |place: usize| self.places.is_some_and(|both| both[place] == Place::Unreadable);
        match places {
            Places::First | Places::Alone => unread(1),
            Places::Second => unread(0),
            Places::Both => false,
        }
    }

    /// What is wrong with this copy when `truth` is the page's version, none for a page without one.
    pub(super) fn fault(&self, truth: Option<Version>, torn: Torn) -> Option<CopyFault> {
        self.places?;
        let damaged = self.count(Place::Damaged) + usize::from(self.has_lost_a_place());
        let newest = self.newest().map(|(version, _)| version);
        if self.is_unreadable() {
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
