//! The newest known version of every page, 8 bytes each, cached or not: with it a single copy can be trusted,
//! and an older copy is recognised (rule T3).

use crate::array::pages::copies::{Remembered, Version};
use crate::format::PageIndex;

/// Set in the word of a page that was seen, above the lower bits of the epoch and those of the sequence. The
/// word of a page that was not seen is 0. A page has fewer than 2^43 versions, and two epochs that wrote the
/// same version are less than 2^20 apart.
const SEEN: u64 = 1 << 63;
const EPOCH_BITS: u32 = 20;
const EPOCH_MASK: u64 = (1 << EPOCH_BITS) - 1;
const SEQUENCE_MASK: u64 = (1 << (63 - EPOCH_BITS)) - 1;

/// See the head of this file.
pub(super) struct Versions(Box<[u64]>);

impl Versions {
    /// A record in which no page of `pages` was seen yet. Memory is touched as pages are seen.
    pub(super) fn new(pages: u64) -> Versions {
        let pages = usize::try_from(pages).expect("pages of a valid geometry fit memory");
        Versions(vec![0; pages].into_boxed_slice())
    }

    /// Sets the newest version of the page; none: it was never written.
    pub(super) fn set(&mut self, page: PageIndex, version: Option<Version>) {
        self.0[page.0 as usize] = word(version);
    }

    /// Forgets the version of the page.
    pub(super) fn forget(&mut self, page: PageIndex) {
        self.0[page.0 as usize] = 0;
    }

    /// The sequence of the newest version that is remembered, 0 for none.
    pub(super) fn sequence(&self, page: PageIndex) -> u64 {
        self.0[page.0 as usize] >> EPOCH_BITS & SEQUENCE_MASK
    }

    /// Compares the version of a copy (None: never written) with the remembered one.
    pub(super) fn compare(&self, page: PageIndex, shown: Option<Version>) -> Remembered {
        let (known, shown) = (self.0[page.0 as usize], word(shown));
        let sequence = |word: u64| word >> EPOCH_BITS & SEQUENCE_MASK;
        match sequence(shown).cmp(&sequence(known)) {
            _ if known == 0 => Remembered::Nothing,
            std::cmp::Ordering::Less => Remembered::Newer,
            std::cmp::Ordering::Equal if known == shown => Remembered::Same,
            // This process did not write such a version.
            std::cmp::Ordering::Equal | std::cmp::Ordering::Greater => Remembered::Nothing,
        }
    }

    /// Whether a version that a copy shows (none: no version) is older than a remembered one that was written
    /// in epoch `until` or before.
    pub(super) fn is_behind(&self, page: PageIndex, shown: Option<Version>, until: u64) -> bool {
        let known = self.0[page.0 as usize];
        let later = (known & EPOCH_MASK).wrapping_sub(until) & EPOCH_MASK;
        let is_later = later != 0 && later <= EPOCH_MASK / 2;
        self.compare(page, shown) == Remembered::Newer && !is_later
    }
}

fn word(version: Option<Version>) -> u64 {
    let (sequence, epoch) = version.unwrap_or((0, 0));
    SEEN | (sequence & SEQUENCE_MASK) << EPOCH_BITS | (epoch & EPOCH_MASK)
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
}
