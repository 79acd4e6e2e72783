//! The newest known version of every page, 8 bytes each, cached or not: with it a single copy can be trusted,
//! and an older copy is recognised (rule T3). Where it is known in which place each copy holds that version,
//! the word says that too: one read of one place then brings the page.
//!
//! Must not know how copies are read or written.

use crate::array::pages::copies::{Remembered, Version};
use crate::format::PageIndex;

/// A word has three parts. Above: what is known, see below. Then the lower bits of the sequence, then those
/// of the epoch. Two epochs that wrote the same version are less than 2^20 apart. A version with a sequence
/// that does not fit is not remembered.
const EPOCH_BITS: u32 = 20;
const EPOCH_MASK: u64 = (1 << EPOCH_BITS) - 1;
const SEQUENCE_BITS: u32 = 40;
const SEQUENCE_MASK: u64 = (1 << SEQUENCE_BITS) - 1;
const KNOWN_SHIFT: u32 = EPOCH_BITS + SEQUENCE_BITS;

/// What is known: 0 of a page that was not seen, [`SEEN`] where the version is known alone. With
/// [`PLACED`] the three bits below it are places, one for each of the first copies; further copies share the
/// last of them.
const SEEN: u64 = 1;
const PLACED: u64 = 8;
const PLACE_BITS: usize = 3;

/// In which of its two places each copy of a page holds the newest version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NewestPlaces(u64);

impl NewestPlaces {
    /// The places (0 or 1) of the copies, in order; none for a copy that may be taken to hold the version in
    /// either, because nothing on it counts, or both hold it. None where one word has no room for them.
    pub(super) fn of(copies: impl Iterator<Item = Option<usize>>) -> Option<NewestPlaces> {
        let mut places = [None; PLACE_BITS];
        for (copy, place) in copies.enumerate() {
            let shared = &mut places[copy.min(PLACE_BITS - 1)];
            if shared.is_some() && place.is_some() && *shared != place {
                return None;
            }
            *shared = shared.or(place);
        }
        let bits = places.iter().enumerate().map(|(at, place)| (place.unwrap_or(0) as u64) << at);
        Some(NewestPlaces(bits.sum()))
    }

    /// The place of a copy: 0 or 1.
    pub(super) fn place(self, copy: usize) -> usize {
        (self.0 >> copy.min(PLACE_BITS - 1) & 1) as usize
    }
}

/// The word of a page whose newest version is known with its places, for readers that have no other part of
/// this. Its upper bit is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) struct PlacedVersion(pub u64);

impl PlacedVersion {
    /// In which of its two places (0 or 1) a copy holds the version.
    pub(in crate::array) fn place(self, copy: usize) -> usize {
        NewestPlaces(self.0 >> KNOWN_SHIFT & !PLACED).place(copy)
    }

    /// Whether that is the version.
    pub(in crate::array) fn is(self, version: Version) -> bool {
        let version = word(Some(version));
        version.is_some_and(|version| (version ^ self.0) & !(u64::MAX << KNOWN_SHIFT) == 0)
    }
}

/// See the head of this file.
pub(super) struct Versions {
    all: Box<[u64]>,
    /// Loads of one copy so far.
    turns: usize,
}

impl Versions {
    /// Which copy the next load of one copy begins with: each time another one.
    pub(super) fn next_turn(&mut self) -> usize {
        self.turns = self.turns.wrapping_add(1);
        self.turns
    }

    /// A record in which no page of `pages` was seen yet. Memory is touched as pages are seen.
    pub(super) fn new(pages: u64) -> Versions {
        let pages = usize::try_from(pages).expect("pages of a valid geometry fit memory");
        Versions { all: vec![0; pages].into_boxed_slice(), turns: 0 }
    }

    /// Sets the newest version of the page; none: it was never written. Its places are not known then.
    pub(super) fn set(&mut self, page: PageIndex, version: Option<Version>) {
        self.all[page.0 as usize] = word(version).unwrap_or(0);
    }

    /// Forgets the version of the page.
    pub(super) fn forget(&mut self, page: PageIndex) {
        self.all[page.0 as usize] = 0;
    }

    /// Sets the places in which the copies of a page hold `version`; none: they are not known. They count
    /// only where that is the version that is remembered.
    pub(super) fn set_places(&mut self, page: PageIndex, version: Version, places: Option<NewestPlaces>) {
        let is_same = self.compare(page, Some(version)) == Remembered::Same;
        let word = &mut self.all[page.0 as usize];
        if *word >> KNOWN_SHIFT != 0 {
            let known = places.filter(|_| is_same).map_or(SEEN, |places| PLACED | places.0);
            *word = *word & !(u64::MAX << KNOWN_SHIFT) | known << KNOWN_SHIFT;
        }
    }

    /// Forgets the places of the page, and keeps its version.
    pub(super) fn forget_places(&mut self, page: PageIndex) {
        self.set_places(page, (0, 0), None);
    }

    /// The places in which the copies of the page hold the version that is remembered, if they are known.
    pub(super) fn places(&self, page: PageIndex) -> Option<NewestPlaces> {
        let known = self.all[page.0 as usize] >> KNOWN_SHIFT;
        (known & PLACED != 0).then_some(NewestPlaces(known & !PLACED))
    }

    /// The same with the version, if the places are known.
    pub(super) fn placed(&self, page: PageIndex) -> Option<PlacedVersion> {
        self.places(page).map(|_| PlacedVersion(self.all[page.0 as usize]))
    }

    /// The sequence of the newest version that is remembered, 0 for none.
    pub(super) fn sequence(&self, page: PageIndex) -> u64 {
        sequence_of(self.all[page.0 as usize])
    }

    /// Compares the version of a copy (None: never written) with the remembered one.
    pub(super) fn compare(&self, page: PageIndex, shown: Option<Version>) -> Remembered {
        let known = self.all[page.0 as usize];
        // A version that does not fit was not written by this process since it remembered one.
        let Some(shown) = word(shown).filter(|_| known != 0) else { return Remembered::Nothing };
        match sequence_of(shown).cmp(&sequence_of(known)) {
            std::cmp::Ordering::Less => Remembered::Newer,
            std::cmp::Ordering::Equal if (known ^ shown) & EPOCH_MASK == 0 => Remembered::Same,
            // This process did not write such a version.
            std::cmp::Ordering::Equal | std::cmp::Ordering::Greater => Remembered::Nothing,
        }
    }

    /// Whether a version that a copy shows (none: no version) is older than a remembered one that was written
    /// in epoch `until` or before.
    pub(super) fn is_behind(&self, page: PageIndex, shown: Option<Version>, until: u64) -> bool {
        let known = self.all[page.0 as usize];
        let later = (known & EPOCH_MASK).wrapping_sub(until) & EPOCH_MASK;
        let is_later = later != 0 && later <= EPOCH_MASK / 2;
        self.compare(page, shown) == Remembered::Newer && !is_later
    }
}

fn sequence_of(word: u64) -> u64 {
    word >> EPOCH_BITS & SEQUENCE_MASK
}

fn word(version: Option<Version>) -> Option<u64> {
    let (sequence, epoch) = version.unwrap_or((0, 0));
    (sequence <= SEQUENCE_MASK).then_some(SEEN << KNOWN_SHIFT | sequence << EPOCH_BITS | (epoch & EPOCH_MASK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_recognised_and_an_older_one_too() {
        let mut versions = Versions::new(3);
        let page = PageIndex(1);
        assert_eq!(versions.compare(page, Some((1, 1))), Remembered::Nothing);
        versions.set(page, None);
        assert_eq!(versions.compare(page, None), Remembered::Same);
        versions.set(page, Some((7, 3)));
        assert_eq!(versions.compare(page, Some((7, 3))), Remembered::Same);
        assert_eq!(
            versions.compare(page, Some((8, 3))),
            Remembered::Nothing,
            "this process has not written it"
        );
        assert_eq!(versions.compare(page, Some((6, 9))), Remembered::Newer);
        assert_eq!(versions.compare(page, None), Remembered::Newer);
        assert_eq!(versions.compare(page, Some((7, 4))), Remembered::Nothing);
        assert_eq!(versions.compare(PageIndex(2), Some((7, 3))), Remembered::Nothing);
        versions.forget(page);
        assert_eq!(versions.compare(page, None), Remembered::Nothing);
    }

    #[test]
    fn a_version_that_a_copy_must_have_had_is_distinguished_from_later_ones() {
        let mut versions = Versions::new(1);
        let page = PageIndex(0);
        assert!(!versions.is_behind(page, Some((3, 1)), 9), "nothing is known");
        for epoch in [1, 5, EPOCH_MASK, EPOCH_MASK + 4] {
            versions.set(page, Some((7, epoch)));
            for (until, is_behind) in
                [(epoch - 1, false), (epoch, true), (epoch + 1, true), (epoch + 900, true)]
            {
                assert_eq!(versions.is_behind(page, Some((6, 1)), until), is_behind, "{epoch} {until}");
                assert_eq!(versions.is_behind(page, None, until), is_behind, "{epoch} {until}");
                assert!(!versions.is_behind(page, Some((7, epoch)), until));
            }
        }
    }

    #[test]
    fn places_are_those_of_the_version_that_is_remembered_and_change_nothing_else() {
        let mut versions = Versions::new(1);
        let page = PageIndex(0);
        let places = |all: &[Option<usize>]| NewestPlaces::of(all.iter().copied());
        let some = places(&[Some(1), Some(0), Some(1)]);
        versions.set_places(page, (7, 3), some);
        assert_eq!((versions.places(page), versions.sequence(page)), (None, 0), "it was not seen");
        versions.set(page, Some((7, EPOCH_MASK + 3)));
        versions.set_places(page, (7, EPOCH_MASK + 3), some);
        assert_eq!(versions.places(page), some);
        let placed = versions.placed(page).expect("the places are known");
        assert_eq!((0..3).map(|copy| placed.place(copy)).collect::<Vec<_>>(), [1, 0, 1]);
        assert!(placed.is((7, EPOCH_MASK + 3)) && placed.0 >> 63 == 1);
        for other in [(7, EPOCH_MASK + 4), (8, EPOCH_MASK + 3), (6, EPOCH_MASK + 3), (SEQUENCE_MASK + 8, 2)] {
            assert!(!placed.is(other), "{other:?}");
        }
        assert_eq!((0..3).map(|copy| some.unwrap().place(copy)).collect::<Vec<_>>(), [1, 0, 1]);
        assert_eq!(versions.compare(page, Some((7, EPOCH_MASK + 3))), Remembered::Same);
        assert_eq!(versions.compare(page, Some((7, EPOCH_MASK + 4))), Remembered::Nothing);
        assert_eq!(versions.sequence(page), 7);
        versions.set_places(page, (8, EPOCH_MASK + 3), some);
        assert_eq!(versions.places(page), None, "of another version");
        versions.set_places(page, (7, EPOCH_MASK + 3), some);
        versions.forget_places(page);
        assert_eq!((versions.places(page), versions.sequence(page)), (None, 7));
        assert_eq!(versions.placed(page), None);
        versions.set_places(page, (7, EPOCH_MASK + 3), some);
        versions.set(page, Some((8, 1)));
        assert_eq!(versions.places(page), None, "the new version is elsewhere");
    }

    #[test]
    fn copies_from_the_third_on_share_a_place() {
        let of = |all: &[Option<usize>]| NewestPlaces::of(all.iter().copied());
        let four = of(&[Some(0), None, Some(1), Some(1)]).unwrap();
        assert_eq!((0..4).map(|copy| four.place(copy)).collect::<Vec<_>>(), [0, 0, 1, 1]);
        assert_eq!(of(&[Some(0), Some(0), Some(1), Some(0)]), None);
        assert_eq!(of(&[Some(0), Some(0), None, Some(1), None, Some(1)]).unwrap().place(2), 1);
    }

    #[test]
    fn a_version_that_does_not_fit_is_not_remembered() {
        let mut versions = Versions::new(1);
        let page = PageIndex(0);
        versions.set(page, Some((SEQUENCE_MASK, 1)));
        assert_eq!(versions.compare(page, Some((SEQUENCE_MASK, 1))), Remembered::Same);
        assert_eq!(versions.compare(page, Some((SEQUENCE_MASK + 1, 1))), Remembered::Nothing);
        versions.set(page, Some((SEQUENCE_MASK + 1, 1)));
        assert_eq!(versions.compare(page, Some((SEQUENCE_MASK + 1, 1))), Remembered::Nothing);
        assert_eq!(versions.compare(page, Some((0, 1))), Remembered::Nothing);
    }
}
