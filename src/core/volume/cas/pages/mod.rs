//! The pages of a cas volume: in memory, where they lie on disk, and what a root needs written. Bytes go in
//! and come out; the owner reads and writes them, and keeps the requests that wait for a page.
//!
//! Locations of all pages are in memory, content of level 0 as far as it fits (`cache`). Of a page there are
//! at most two versions in memory: as it is now, which is what readers get, and as it was at the freeze,
//! until that is handed out to be written.
//!
//! The way of a root:
//! 1. [`Pages::freeze`] ends what it contains. One root is under way at a time.
//! 2. [`Pages::next_to_write`] hands out its pages, those of locations last; their writes are answered.
//! 3. [`Pages::root_spaces`] is what the root says of them. The root goes to both of its places.
//! 4. [`Pages::root_is_durable`] says which places are no longer used.
//!
//! An owner that starts anew forgets the reads and writes of before.
//!
//! Must not know what pages hold, nor the array.

mod cache;
mod numbers;
mod open;
mod root;
#[cfg(test)]
mod tests;
mod tree;

pub(super) use open::Opening;
pub(super) use tree::PAGES_MAX;

use super::place::PageAccess;
use crate::format::cas::{
    CAS_BLOCK_BYTES, CasKey, PageLocation, PageName, PageSpace, RawCasPage, SPACES, SegmentIndex, SpaceRoot,
};
use cache::{Cache, Known, PageState};
use numbers::MapNumbers;
use root::{Changes, RootWriter};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use tree::Tree;

/// Pages that did not change and stay in memory however little it is: more than come in between a load and
/// the next try of the operation that waits for it.
const KEPT_PAGES: usize = 256;

/// A page to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageLoad {
    /// The page.
    pub(super) name: PageName,
    /// Where it lies.
    pub(super) at: PageLocation,
    /// Tells this load from others of the same page.
    number: u64,
}

/// What becomes of the wish for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    /// It is in memory.
    InMemory,
    /// It is to be read, and the bytes given to [`Pages::loaded`].
    Read(PageLoad),
    /// It is being read for someone else.
    UnderWay,
}

/// What was read is not the page that lies there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "segment {}, block {} does not hold page {} of {:?}, level {}",
    at.segment.0, at.block, name.index, name.space, name.level
)]
pub(super) struct BadPage {
    /// The page.
    pub(super) name: PageName,
    /// Where it should lie.
    pub(super) at: PageLocation,
}

/// A root that contradicts itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the root contradicts itself about the pages of {space:?}")]
pub(super) struct BadSpace {
    /// Of this space.
    pub(super) space: PageSpace,
}

/// Figures for the status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageFacts {
    /// Bytes of pages in memory.
    pub(super) page_bytes: u64,
    /// Bytes of locations and of the index of pages in memory.
    pub(super) location_bytes: u64,
    /// Pages that changed since the newest freeze.
    pub(super) changed: u64,
    /// Pages of the root under way that are still to be written, without those of locations.
    pub(super) frozen: u64,
    /// Pages that are being read.
    pub(super) loading: u64,
    /// Looks that found their page.
    pub(super) hits: u64,
    /// Looks that did not.
    pub(super) misses: u64,
    /// Pages that gave way to others.
    pub(super) evictions: u64,
}

/// The pages of a volume.
pub(super) struct Pages {
    key: CasKey,
    /// By space. As the newest root has them, or the one under way as far as it is handed out.
    trees: [Tree; SPACES],
    cache: Cache,
    /// By space, what a page that was never written reads as.
    blanks: Box<[RawCasPage; SPACES]>,
    numbers: MapNumbers,
    /// Since the newest freeze.
    changes: Changes,
    /// Counts freezes: what [`PageState::Changed`] says.
    freezes: u64,
    root: Option<RootWriter>,
    loading: FxHashMap<PageName, PageLoad>,
    /// Numbers of loads.
    loads: u64,
}

impl Pages {
    /// The pages of a volume whose start has read what it needs. `limit` is in bytes of pages in memory;
    /// changed pages, and those that stay, may exceed it.
    ///
    /// # Panics
    /// When something is still to be read.
    pub(super) fn new(opening: Opening, limit: u64) -> Pages {
        let limit = usize::try_from(limit / CAS_BLOCK_BYTES as u64).unwrap_or(usize::MAX);
        Pages::with_limit(opening, limit, (limit / 8).max(KEPT_PAGES))
    }

    /// As [`Pages::new`], with the limit in pages, and how many pages that did not change stay in any case.
    fn with_limit(opening: Opening, limit: usize, kept: usize) -> Pages {
        assert!(opening.is_complete(), "all locations are known");
        let Opening { key, trees, resident, .. } = opening;
        let map = &trees[PageSpace::Map as usize];
        let numbers = MapNumbers::new(map.pages(), |number| map.location(0, number).is_some());
        let mut cache = Cache::new(limit, kept);
        for (name, page) in resident {
            cache.insert(name, page, PageState::Clean);
        }
        let blank = |at: usize| RawCasPage::blank(PageName { space: PageSpace::ALL[at], level: 0, index: 0 });
        Pages {
            key,
            trees,
            cache,
            blanks: Box::new(std::array::from_fn(blank)),
            numbers,
            changes: Changes::default(),
            freezes: 0,
            root: None,
            loading: FxHashMap::default(),
            loads: 0,
        }
    }

    /// Asks for a page of level 0. It may give way again before it is used: then ask again, see also
    /// [`Pages::hold`].
    pub(super) fn want(&mut self, name: PageName) -> Want {
        let Some(at) = self.lies_at(name) else { return Want::InMemory };
        if self.loading.contains_key(&name) {
            return Want::UnderWay;
        }
        self.loads += 1;
        let load = PageLoad { name, at, number: self.loads };
        self.loading.insert(name, load);
        Want::Read(load)
    }

    /// Where to read a page of level 0 that is not in memory.
    fn lies_at(&self, name: PageName) -> Option<PageLocation> {
        debug_assert_eq!(name.level, 0, "pages of locations are always in memory");
        match self.cache.state(name) {
            Known::Content(_) | Known::Freed => None,
            Known::Nothing => self.trees[name.space as usize].location(0, name.index),
        }
    }

    /// Takes in what was read. If the page was freed meanwhile, this does nothing. Other pages may give way.
    ///
    /// # Errors
    /// When the bytes are not this page. The load has then ended.
    pub(super) fn loaded(&mut self, load: PageLoad, bytes: &[u8]) -> Result<(), BadPage> {
        if !self.load_failed(load) {
            return Ok(());
        }
        let PageLoad { name, at, .. } = load;
        let page = RawCasPage::open(bytes, &self.key, name).ok_or(BadPage { name, at })?;
        self.cache.insert(name, page, PageState::Clean);
        self.make_room();
        Ok(())
    }

    /// A load ended without bytes. Returns whether the page is still wanted, and not freed meanwhile.
    pub(super) fn load_failed(&mut self, load: PageLoad) -> bool {
        let is_wanted = self.loading.get(&load.name) == Some(&load);
        if is_wanted {
            self.loading.remove(&load.name);
        }
        is_wanted
    }

    /// While this is on, pages that are looked at stay in memory until [`Pages::end_hold`]. For one operation
    /// at a time, which looks for its pages as often as it takes: the oldest, so that it comes to its end
    /// however small the memory is.
    pub(super) fn hold(&mut self, is_holding: bool) {
        self.cache.hold(is_holding);
    }

    /// Ends what [`Pages::hold`] began: its pages may give way again.
    pub(super) fn end_hold(&mut self) {
        self.cache.end_hold();
    }

    fn make_room(&mut self) {
        let held = self.root.as_ref().map_or(0, RootWriter::held);
        self.cache.make_room(held);
    }

    /// Has a page written elsewhere by the next root, though it need not have changed. Returns false if it
    /// must be in memory for that, and is not.
    pub(super) fn touch(&mut self, name: PageName) -> bool {
        if name.level > 0 {
            if self.trees[name.space as usize].location(name.level, name.index).is_some() {
                self.changes.add_locations(name);
            }
            return true;
        }
        match self.cache.state(name) {
            Known::Content(_) => {
                self.change(name);
                true
            }
            Known::Freed => true,
            Known::Nothing => self.lies_at(name).is_none(),
        }
    }

    /// Pages in the segments of metadata that `is_wanted` chooses, as far as the next root would leave them
    /// there. Looks at all locations: make one call for many segments.
    pub(super) fn pages_at(&self, is_wanted: impl Fn(SegmentIndex) -> bool) -> Vec<PageName> {
        let located = self.trees.iter().flat_map(Tree::located);
        let found = located.filter(|(_, at)| is_wanted(at.segment)).map(|(name, _)| name);
        found.filter(|&name| !self.is_leaving(name)).collect()
    }

    /// Whether the next root will have a page of level 0 elsewhere, or not at all.
    fn is_leaving(&self, name: PageName) -> bool {
        name.level == 0
            && match self.cache.state(name) {
                Known::Content(state) => matches!(state, PageState::Changed(_)),
                Known::Freed => true,
                Known::Nothing => false,
            }
    }

    /// Pages of level 0 that are not in memory.
    pub(super) fn absent(&self) -> Vec<PageName> {
        let located = self.trees.iter().flat_map(Tree::located).map(|(name, _)| name);
        located.filter(|name| name.level == 0 && self.lies_at(*name).is_some()).collect()
    }

    /// Pages of maps that are in use.
    pub(super) fn map_numbers(&self) -> BTreeSet<u64> {
        self.numbers.taken()
    }

    /// The segments of metadata and how many pages of the newest root each has. Looks at all locations.
    ///
    /// # Panics
    /// When a root is under way.
    pub(super) fn metadata_segments(&self) -> BTreeMap<SegmentIndex, u64> {
        assert!(self.root.is_none(), "the locations are those of one root");
        let mut counts = FxHashMap::default();
        for (_, at) in self.trees.iter().flat_map(Tree::located) {
            *counts.entry(at.segment).or_default() += 1;
        }
        counts.into_iter().collect()
    }

    /// Pages, those of locations included, that are still to be written for the root under way, and for the
    /// next one with what has changed until now: each at most.
    pub(super) fn write_bounds(&self) -> [u64; 2] {
        let under_way = self.root.as_ref().map_or(0, |root| root.write_bound(&self.trees));
        [under_way, self.changes.write_bound(&self.trees)]
    }

    /// Figures for the status.
    pub(super) fn facts(&self) -> PageFacts {
        let counters = self.cache.counters();
        let held = self.root.as_ref().map_or(0, RootWriter::held);
        PageFacts {
            page_bytes: ((self.cache.len() + held) * CAS_BLOCK_BYTES) as u64,
            location_bytes: self.trees.iter().map(Tree::bytes).sum::<u64>() + self.cache.index_bytes(),
            changed: self.changes.pages(),
            frozen: self.root.as_ref().map_or(0, RootWriter::pages_left),
            loading: self.loading.len() as u64,
            hits: counters.hits,
            misses: counters.misses,
            evictions: counters.evictions,
        }
    }
}

/// Roots.
impl Pages {
    /// Begins a root, which contains all changes until now.
    ///
    /// # Panics
    /// When another is under way.
    pub(super) fn freeze(&mut self) {
        assert!(self.root.is_none(), "one root at a time");
        self.root = Some(RootWriter::new(std::mem::take(&mut self.changes), &mut self.trees));
        self.freezes += 1;
    }

    /// The next page that the root under way needs written: `block` becomes what goes to `at`, a block that
    /// nothing names. None, and `at` is left, when there are no more.
    ///
    /// # Panics
    /// When no root is under way, `at` is in the first segment, or `block` is not as long as a page.
    pub(super) fn next_to_write(&mut self, at: PageLocation, block: &mut [u8]) -> Option<PageName> {
        assert_ne!(at.segment, SegmentIndex(0), "pages lie beyond the root");
        let root = self.root.as_mut().expect("a root is under way");
        let name = root.next(&mut self.trees, at)?;
        if name.level > 0 {
            let page = self.trees[name.space as usize].compose(name.level, name.index);
            page.write_to(&self.key, block);
        } else if let Some(page) = root.take_held(name) {
            page.write_to(&self.key, block);
        } else {
            debug_assert_eq!(self.cache.state(name), Known::Content(PageState::Changed(self.freezes - 1)));
            self.cache.peek(name).write_to(&self.key, block);
            self.cache.set_state(name, PageState::Written);
        }
        Some(name)
    }

    /// The write of a page that was handed out is answered, and what lies there may be read. Need not be said
    /// before the root is durable.
    pub(super) fn write_answered(&mut self, name: PageName) {
        if name.level == 0 && self.cache.state(name) == Known::Content(PageState::Written) {
            self.cache.set_state(name, PageState::Clean);
            self.make_room();
        }
    }

    /// What the root under way says of the pages.
    ///
    /// # Panics
    /// When no root is under way, or pages of it were not handed out.
    pub(super) fn root_spaces(&self) -> [SpaceRoot; SPACES] {
        assert!(self.root.as_ref().expect("a root is under way").is_complete(), "all pages have a place");
        std::array::from_fn(|at| self.trees[at].root())
    }

    /// The root under way is on both of its places: it is the newest. Returns the places that only the one
    /// before named, each once.
    ///
    /// # Panics
    /// As [`Pages::root_spaces`].
    pub(super) fn root_is_durable(&mut self) -> Vec<PageLocation> {
        let root = self.root.take().expect("a root is under way");
        assert!(root.is_complete(), "all pages have a place");
        let (written, unused) = root.finish();
        for name in written {
            if self.cache.state(name) == Known::Content(PageState::Written) {
                self.cache.set_state(name, PageState::Clean);
            }
        }
        self.make_room();
        unused
    }
}

/// Pages stay in memory from call to call here: others give way only when one was loaded or written.
impl PageAccess for Pages {
    fn page(&self, name: PageName) -> Option<&RawCasPage> {
        debug_assert_eq!(name.level, 0, "entries are in level 0");
        match self.cache.look(name) {
            Known::Content(page) => Some(page),
            Known::Nothing if self.trees[name.space as usize].location(0, name.index).is_some() => {
                self.cache.missed();
                None
            }
            Known::Nothing | Known::Freed => Some(&self.blanks[name.space as usize]),
        }
    }

    fn change(&mut self, name: PageName) -> &mut RawCasPage {
        let changed = PageState::Changed(self.freezes);
        match self.cache.state(name) {
            Known::Content(state) if state == changed => return self.cache.page_mut(name),
            Known::Content(state) => {
                if let PageState::Changed(_) = state {
                    let root = self.root.as_mut().expect("what changed before a freeze is in its root");
                    root.hold(name, Box::new(self.cache.peek(name).clone()));
                }
                self.cache.set_state(name, changed);
            }
            Known::Freed | Known::Nothing => {
                assert!(self.lies_at(name).is_none(), "a page that is changed is in memory: {name:?}");
                assert!(
                    name.space != PageSpace::Map || self.numbers.is_taken(name.index),
                    "no page of a map has this number: {name:?}"
                );
                self.make(name);
            }
        }
        self.changes.add(name);
        self.cache.page_mut(name)
    }

    fn new_map_page(&mut self) -> u64 {
        let name = PageName { space: PageSpace::Map, level: 0, index: self.numbers.take() };
        self.make(name);
        self.changes.add(name);
        name.index
    }

    fn free_map_page(&mut self, number: u64) {
        self.numbers.give_back(number);
        let name = PageName { space: PageSpace::Map, level: 0, index: number };
        self.loading.remove(&name);
        if let Some((page, PageState::Changed(after))) = self.cache.free(name)
            && after != self.freezes
        {
            let root = self.root.as_mut().expect("what changed before a freeze is in its root");
            root.hold(name, page);
        }
        self.changes.add_freed(number);
    }
}

impl Pages {
    /// A blank page, which counts as changed.
    fn make(&mut self, name: PageName) {
        assert!(name.level == 0 && name.index < PAGES_MAX, "a page that a space can have: {name:?}");
        let page = Box::new(RawCasPage::blank(name));
        self.cache.insert(name, page, PageState::Changed(self.freezes));
    }
}
