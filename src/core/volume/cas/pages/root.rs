//! What a root needs written: the pages that changed before it was begun, as they were then, and above them
//! the pages with their locations.
//!
//! Changes gather in a [`Changes`]. A freeze makes it a [`RootWriter`], which goes through it level by level,
//! as a page of locations is known once those below it have theirs. Must not know what is in memory: it keeps
//! the content of a page only if that changed since the freeze.

use super::tree::Tree;
use crate::format::cas::{PageLocation, PageName, PageSpace, RawCasPage, SPACES};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// What has changed since the newest root was begun.
#[derive(Default)]
pub(super) struct Changes {
    /// Pages of level 0, by space.
    pages: [BTreeSet<u64>; SPACES],
    /// Pages of maps that were freed, and perhaps made again since. They lose their locations before those
    /// that changed get theirs.
    freed: BTreeSet<u64>,
    /// Pages of locations: level, space and index.
    locations: BTreeSet<(u8, PageSpace, u64)>,
}

impl Changes {
    /// A page of level 0 has changed.
    pub(super) fn add(&mut self, name: PageName) {
        self.pages[name.space as usize].insert(name.index);
    }

    /// A page of a map is freed.
    pub(super) fn add_freed(&mut self, number: u64) {
        self.pages[PageSpace::Map as usize].remove(&number);
        self.freed.insert(number);
    }

    /// A page of locations is to be written again.
    pub(super) fn add_locations(&mut self, name: PageName) {
        self.locations.insert((name.level, name.space, name.index));
    }

    /// Changed pages of level 0.
    pub(super) fn pages(&self) -> u64 {
        self.pages.iter().map(|space| space.len() as u64).sum()
    }

    /// Pages, those of locations included, that a root of these changes writes at most.
    pub(super) fn write_bound(&self, trees: &[Tree; SPACES]) -> u64 {
        let (mut bound, mut locations) = (0, [0; SPACES]);
        self.locations.iter().for_each(|(_, space, _)| locations[*space as usize] += 1);
        for ((tree, changed), space) in trees.iter().zip(&self.pages).zip(PageSpace::ALL) {
            let end = changed.last().map_or(0, |last| last + 1);
            let freed = if space == PageSpace::Map { self.freed.len() } else { 0 };
            bound += changed.len() as u64;
            bound += tree.locations_bound((changed.len() + freed + locations[space as usize]) as u64, end);
        }
        bound
    }
}

/// A root on its way to the disk.
pub(super) struct RootWriter {
    left: Changes,
    /// Content of pages of level 0 that changed after the freeze and are not handed out.
    held: FxHashMap<PageName, Box<RawCasPage>>,
    /// Pages of level 0 that were handed out.
    written: Vec<PageName>,
    /// Locations that the new root no longer names.
    unused: Vec<PageLocation>,
    is_complete: bool,
}

impl RootWriter {
    /// Of a root that contains these changes, and the trees as the root before has them.
    pub(super) fn new(mut changes: Changes, trees: &mut [Tree; SPACES]) -> RootWriter {
        for ((tree, changed), space) in trees.iter_mut().zip(&changes.pages).zip(PageSpace::ALL) {
            let end = changed.last().map_or(0, |last| last + 1);
            for level in tree.cover(end) {
                changes.locations.insert((level, space, 0));
            }
        }
        RootWriter {
            left: changes,
            held: FxHashMap::default(),
            written: Vec::new(),
            unused: Vec::new(),
            is_complete: false,
        }
    }

    /// Keeps the content of a page that is frozen, not handed out, and about to change.
    pub(super) fn hold(&mut self, name: PageName, page: Box<RawCasPage>) {
        debug_assert!(self.left.pages[name.space as usize].contains(&name.index), "frozen");
        let other = self.held.insert(name, page);
        debug_assert!(other.is_none(), "only the first change since the freeze needs a copy");
    }

    /// The content that was kept of a page.
    pub(super) fn take_held(&mut self, name: PageName) -> Option<Box<RawCasPage>> {
        self.held.remove(&name)
    }

    /// The page that goes to `at`, which is its location from now on. None when all have theirs.
    pub(super) fn next(&mut self, trees: &mut [Tree; SPACES], at: PageLocation) -> Option<PageName> {
        while let Some(number) = self.left.freed.pop_first() {
            if trees[PageSpace::Map as usize].has(0, number) {
                self.locate(trees, PageName { space: PageSpace::Map, level: 0, index: number }, None);
            }
        }
        for space in PageSpace::ALL {
            if let Some(index) = self.left.pages[space as usize].pop_first() {
                let name = PageName { space, level: 0, index };
                self.locate(trees, name, Some(at));
                self.written.push(name);
                return Some(name);
            }
        }
        while let Some((level, space, index)) = self.left.locations.pop_first() {
            let name = PageName { space, level, index };
            if trees[space as usize].is_empty(level, index) {
                self.locate(trees, name, None);
            } else {
                self.locate(trees, name, Some(at));
                return Some(name);
            }
        }
        self.is_complete = true;
        None
    }

    fn locate(&mut self, trees: &mut [Tree; SPACES], name: PageName, at: Option<PageLocation>) {
        let PageName { space, level, index } = name;
        let tree = &mut trees[space as usize];
        let old = tree.set_location(level, index, at);
        self.unused.extend(old);
        if let Some((level, index)) = tree.parent(level, index).filter(|_| old != at) {
            self.left.locations.insert((level, space, index));
        }
    }

    /// Whether every page has its location.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Pages of level 0 that are still to be written.
    pub(super) fn pages_left(&self) -> u64 {
        self.left.pages()
    }

    /// See [`Changes::write_bound`].
    pub(super) fn write_bound(&self, trees: &[Tree; SPACES]) -> u64 {
        self.left.write_bound(trees)
    }

    /// Pages whose content was kept.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// Ends it: the pages of level 0 that were written, and the locations that are no longer used.
    pub(super) fn finish(self) -> (Vec<PageName>, Vec<PageLocation>) {
        debug_assert!(self.is_complete && self.held.is_empty());
        (self.written, self.unused)
    }
}
