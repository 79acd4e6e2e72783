//! Where the pages of one space lie: the locations of all its pages, level by level, in memory.
//!
//! Level 0 has the pages with entries. Page `i` of level `n + 1` holds the locations of the pages of level
//! `n` from `508 * i` on. The locations of the highest level, the first with at most [`TOP_LOCATIONS`] pages,
//! are in the root. A page without location is blank: of level 0 it was never written or is freed, of a level
//! above there is no page below it.

use crate::format::cas::{
    PAGE_SLOTS, PageLocation, PageName, PageSpace, RawCasPage, SpaceRoot, TOP_LOCATIONS,
};
use std::ops::Range;

/// Most pages of level 0 in a space. The table of 1.6 PiB of chunks has as many.
pub(in crate::volume::cas) const PAGES_MAX: u64 = 1 << 32;

/// The locations of a space's pages.
pub(super) struct Tree {
    space: PageSpace,
    /// By level and index, packed; 0 for none. There is at least level 0, which may have no pages.
    levels: Vec<Vec<u64>>,
}

impl Tree {
    /// The tree that a root speaks of, so far without any locations but those in the root. None if the root
    /// contradicts itself.
    pub(super) fn of_root(space: PageSpace, root: &SpaceRoot) -> Option<Tree> {
        if root.pages > PAGES_MAX {
            return None;
        }
        let mut tree = Tree { space, levels: vec![Vec::new()] };
        tree.cover(root.pages);
        let is_right_height = tree.height() == root.height;
        let top = tree.levels.last_mut().expect("a level");
        let (named, beyond) = root.top.split_at(top.len());
        let is_valid = |&at: &u64| at == 0 || PageLocation::unpack(at).is_some();
        if !is_right_height || !named.iter().all(is_valid) || beyond.iter().any(|&at| at != 0) {
            return None;
        }
        top.copy_from_slice(named);
        Some(tree)
    }

    /// What a root says of the space.
    pub(super) fn root(&self) -> SpaceRoot {
        let mut root = SpaceRoot { pages: self.pages(), height: self.height(), ..SpaceRoot::default() };
        let top = &self.levels[usize::from(self.height())];
        root.top[..top.len()].copy_from_slice(top);
        root
    }

    /// Pages of level 0, whether or not they have a location.
    pub(super) fn pages(&self) -> u64 {
        self.levels[0].len() as u64
    }

    /// The highest level.
    pub(super) fn height(&self) -> u8 {
        (self.levels.len() - 1) as u8
    }

    /// Where a page lies.
    pub(super) fn location(&self, level: u8, index: u64) -> Option<PageLocation> {
        let at = *self.levels.get(usize::from(level))?.get(usize::try_from(index).ok()?)?;
        PageLocation::unpack(at)
    }

    /// Gives a page another location, or none. Returns the one that it had.
    ///
    /// # Panics
    /// When the tree has no such page.
    pub(super) fn set_location(
        &mut self,
        level: u8,
        index: u64,
        at: Option<PageLocation>,
    ) -> Option<PageLocation> {
        let place = &mut self.levels[usize::from(level)][index as usize];
        PageLocation::unpack(std::mem::replace(place, at.map_or(0, PageLocation::pack)))
    }

    /// The page that holds the location of this one; none if the root does.
    pub(super) fn parent(&self, level: u8, index: u64) -> Option<(u8, u64)> {
        (level < self.height()).then_some((level + 1, index / PAGE_SLOTS as u64))
    }

    /// Whether there is a page of this name, with or without location.
    pub(super) fn has(&self, level: u8, index: u64) -> bool {
        self.levels.get(usize::from(level)).is_some_and(|level| index < level.len() as u64)
    }

    /// Grows to so many pages of level 0, if it has fewer. Returns the levels that are new and may have a
    /// location below them: page 0 of each has to be written, as what it holds was in the root.
    ///
    /// # Panics
    /// When it is more than [`PAGES_MAX`].
    pub(super) fn cover(&mut self, pages: u64) -> Range<u8> {
        assert!(pages <= PAGES_MAX, "more pages than a space can have");
        let (old_height, had_pages) = (self.height(), self.pages() > 0);
        let (mut level, mut count) = (0, pages as usize);
        loop {
            if self.levels.len() == level {
                self.levels.push(Vec::new());
            }
            let locations = &mut self.levels[level];
            count = count.max(locations.len());
            locations.resize(count, 0);
            if count <= TOP_LOCATIONS {
                break;
            }
            (level, count) = (level + 1, count.div_ceil(PAGE_SLOTS));
        }
        if had_pages { old_height + 1..self.height() + 1 } else { 0..0 }
    }

    /// Pages of levels above 0 that `changed` pages change at most, when the tree has at least `pages` of
    /// level 0. Those of new levels are counted.
    pub(super) fn locations_bound(&self, changed: u64, pages: u64) -> u64 {
        let (mut count, mut bound) = (self.pages().max(pages), 0);
        if changed == 0 {
            return 0;
        }
        while count > TOP_LOCATIONS as u64 {
            count = count.div_ceil(PAGE_SLOTS as u64);
            // One more: page 0 of a new level.
            bound += count.min(changed + 1);
        }
        bound
    }

    fn slots(level: usize, index: u64, levels: &[Vec<u64>]) -> Option<Range<usize>> {
        let below = levels.get(level.checked_sub(1)?)?.len();
        let first = usize::try_from(index).ok()?.checked_mul(PAGE_SLOTS)?;
        (first < below).then(|| first..below.min(first + PAGE_SLOTS))
    }

    fn below(&self, level: u8, index: u64) -> Range<usize> {
        Tree::slots(usize::from(level), index, &self.levels).expect("a page of a level above 0")
    }

    /// Whether no page below this one, which is of a level above 0, has a location.
    ///
    /// # Panics
    /// When the tree has no such page.
    pub(super) fn is_empty(&self, level: u8, index: u64) -> bool {
        let below = self.below(level, index);
        self.levels[usize::from(level) - 1][below].iter().all(|&at| at == 0)
    }

    /// The content of a page of a level above 0.
    ///
    /// # Panics
    /// When the tree has no such page.
    pub(super) fn compose(&self, level: u8, index: u64) -> RawCasPage {
        let mut page = RawCasPage::blank(PageName { space: self.space, level, index });
        let below = self.below(level, index);
        for (at, &packed) in self.levels[usize::from(level) - 1][below].iter().enumerate() {
            page.set_location(at, packed);
        }
        page
    }

    /// Takes the locations from a page of a level above 0 that was read. Returns the indexes of the pages
    /// below it, or none if the page contradicts the tree.
    pub(super) fn take_in(&mut self, level: u8, index: u64, page: &RawCasPage) -> Option<Range<u64>> {
        let below = Tree::slots(usize::from(level), index, &self.levels)?;
        let is_valid = |at: u64| at == 0 || PageLocation::unpack(at).is_some();
        let is_right = (0..PAGE_SLOTS).all(|at| {
            let packed = page.location(at);
            if at < below.len() { is_valid(packed) } else { packed == 0 }
        });
        if !is_right {
            return None;
        }
        for (at, place) in self.levels[usize::from(level) - 1][below.clone()].iter_mut().enumerate() {
            *place = page.location(at);
        }
        Some(below.start as u64..below.end as u64)
    }

    /// All pages that have a location, with it.
    pub(super) fn located(&self) -> impl Iterator<Item = (PageName, PageLocation)> {
        self.levels.iter().zip(0..).flat_map(move |(locations, level)| {
            locations.iter().zip(0..).filter_map(move |(&packed, index)| {
                let at = PageLocation::unpack(packed)?;
                Some((PageName { space: self.space, level, index }, at))
            })
        })
    }

    /// Bytes that the locations take.
    pub(super) fn bytes(&self) -> u64 {
        self.levels.iter().map(|level| (level.capacity() * size_of::<u64>()) as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::cas::SegmentIndex;

    fn tree(pages: u64) -> Tree {
        let mut tree = Tree::of_root(PageSpace::Table, &SpaceRoot::default()).expect("an empty tree");
        assert_eq!(tree.cover(pages), 0..0);
        tree
    }

    fn at(block: u32) -> PageLocation {
        PageLocation { segment: SegmentIndex(5), block }
    }

    #[test]
    fn the_top_level_is_the_first_that_fits_the_root() {
        for (pages, height) in [(0, 0), (32, 0), (33, 1), (32 * 508, 1), (32 * 508 + 1, 2)] {
            let tree = tree(pages);
            assert_eq!((tree.pages(), tree.height()), (pages, height));
            let again = Tree::of_root(PageSpace::Table, &tree.root()).expect("of its own root");
            assert_eq!(again.root(), tree.root());
        }
    }

    #[test]
    fn what_was_in_the_root_is_written_when_levels_come_on_top() {
        let mut tree = tree(3);
        tree.set_location(0, 2, Some(at(7)));
        assert_eq!(tree.cover(32), 1..1);
        assert_eq!(tree.cover(32 * 508 + 1), 1..3);
        assert!(!tree.is_empty(1, 0) && tree.is_empty(1, 1));
        assert_eq!(tree.compose(1, 0).location(2), at(7).pack());
        assert_eq!(
            (tree.parent(0, 508), tree.parent(1, 1), tree.parent(2, 0)),
            (Some((1, 1)), Some((2, 0)), None)
        );
    }

    #[test]
    fn a_root_or_page_that_contradicts_itself_is_refused() {
        let good = tree(33).root();
        let refused = |change: &dyn Fn(&mut SpaceRoot)| {
            let mut root = good;
            change(&mut root);
            Tree::of_root(PageSpace::Map, &root).is_none()
        };
        assert!(!refused(&|_| ()));
        assert!(refused(&|root| root.height = 0));
        assert!(refused(&|root| root.pages = PAGES_MAX + 1));
        assert!(refused(&|root| root.top[0] = 9), "a block of no segment");
        assert!(refused(&|root| root.top[1] = at(1).pack()), "beyond the level");

        let name = PageName { space: PageSpace::Table, level: 1, index: 0 };
        let mut page = RawCasPage::blank(name);
        page.set_location(32, at(3).pack());
        let mut tree = tree(33);
        assert_eq!(tree.take_in(1, 0, &page), Some(0..33));
        assert_eq!(tree.location(0, 32), Some(at(3)));
        page.set_location(33, at(4).pack());
        assert_eq!(tree.take_in(1, 0, &page), None, "beyond the level");
        assert_eq!(tree.take_in(1, 1, &page), None, "no such page");
        assert_eq!(tree.take_in(2, 0, &page), None, "no such level");
    }
}
