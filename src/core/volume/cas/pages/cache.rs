//! Pages of level 0 in memory, and which of them give way to others.
//!
//! A page that is changed, or whose bytes are on their way to the disk, stays; so do those of the resident
//! spaces. The others are in a queue: the first gives way, unless it was looked at since it joined; it then
//! joins once more (second chance). A page that was just loaded counts as looked at. Pages of the holder
//! leave the queue until its end. Pages give way in [`Cache::make_room`] only. Must not know of locations.

use crate::format::cas::{PageName, PageSpace, RawCasPage, SPACES};
use slab::Slab;
use std::cell::Cell;

/// Whether a page may give way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageState {
    /// As it lies on disk.
    Clean,
    /// Changed after this many freezes.
    Changed(u64),
    /// Handed out to be written and not changed since; the write is not answered.
    Written,
}

/// What is known of a page without the disk.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Known<T> {
    /// It is in memory.
    Content(T),
    /// It was freed: what lies on disk does not count.
    Freed,
    /// Nothing: it is what lies on disk, or blank.
    Nothing,
}

struct Frame {
    name: PageName,
    page: Box<RawCasPage>,
    state: PageState,
    /// When it was looked at since it joined the queue: 0, not; 1, by anyone; above, by that holder.
    seen: Cell<u64>,
    is_queued: bool,
    /// Neighbours in the queue, while it is there.
    before: u32,
    after: u32,
}

/// In the index: no frame.
const NOTHING: u32 = u32::MAX;
/// In the index: no frame, and the page is freed. In the queue: no neighbour.
const FREED: u32 = u32::MAX - 1;
const NO_NEIGHBOUR: u32 = u32::MAX;

/// Holders begin with this number.
const FIRST_HOLDER: u64 = 2;

/// Counters of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CacheCounters {
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) evictions: u64,
}

/// The pages in memory.
pub(super) struct Cache {
    frames: Slab<Frame>,
    /// Frame of each page, by space and index.
    index: [Vec<u32>; SPACES],
    first: u32,
    last: u32,
    queued: usize,
    /// Pages in memory above which others give way.
    limit: usize,
    /// Pages of the queue that stay however many others there are.
    kept: usize,
    /// Pages that left the queue as the holder's, and may have changed or been freed since.
    held: Vec<PageName>,
    /// The holder whose pages stay, [`FIRST_HOLDER`] or above.
    holder: u64,
    /// What [`Frame::seen`] becomes: 1, or the holder.
    looking: u64,
    hits: Cell<u64>,
    misses: Cell<u64>,
    evictions: u64,
}

/// Whether the pages of a space always stay.
pub(super) fn is_resident(space: PageSpace) -> bool {
    matches!(space, PageSpace::Segments | PageSpace::Used | PageSpace::Catalogue)
}

impl Cache {
    pub(super) fn new(limit: usize, kept: usize) -> Cache {
        Cache {
            frames: Slab::new(),
            index: [const { Vec::new() }; SPACES],
            first: NO_NEIGHBOUR,
            last: NO_NEIGHBOUR,
            queued: 0,
            limit,
            kept,
            held: Vec::new(),
            holder: FIRST_HOLDER,
            looking: 1,
            hits: Cell::new(0),
            misses: Cell::new(0),
            evictions: 0,
        }
    }

    /// Pages in memory.
    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    /// Bytes of the index.
    pub(super) fn index_bytes(&self) -> u64 {
        self.index.iter().map(|space| (space.capacity() * size_of::<u32>()) as u64).sum()
    }

    pub(super) fn counters(&self) -> CacheCounters {
        CacheCounters { hits: self.hits.get(), misses: self.misses.get(), evictions: self.evictions }
    }

    fn at(&self, name: PageName) -> u32 {
        let space = &self.index[name.space as usize];
        usize::try_from(name.index).ok().and_then(|index| space.get(index)).copied().unwrap_or(NOTHING)
    }

    fn set_at(&mut self, name: PageName, at: u32) {
        let space = &mut self.index[name.space as usize];
        let index = name.index as usize;
        if index >= space.len() {
            space.resize(index + 1, NOTHING);
        }
        space[index] = at;
    }

    /// A page, looked at.
    pub(super) fn look(&self, name: PageName) -> Known<&RawCasPage> {
        match self.at(name) {
            NOTHING => Known::Nothing,
            FREED => Known::Freed,
            at => {
                let frame = &self.frames[at as usize];
                frame.seen.set(frame.seen.get().max(self.looking));
                self.hits.set(self.hits.get() + 1);
                Known::Content(&frame.page)
            }
        }
    }

    /// Counts a look that found nothing.
    pub(super) fn missed(&self) {
        self.misses.set(self.misses.get() + 1);
    }

    /// The state of a page.
    pub(super) fn state(&self, name: PageName) -> Known<PageState> {
        match self.at(name) {
            NOTHING => Known::Nothing,
            FREED => Known::Freed,
            at => Known::Content(self.frames[at as usize].state),
        }
    }

    /// A page that is in memory, to be changed.
    ///
    /// # Panics
    /// When it is not in memory.
    pub(super) fn page_mut(&mut self, name: PageName) -> &mut RawCasPage {
        let at = self.at(name);
        &mut self.frames[at as usize].page
    }

    /// A page that is in memory, not counted as a look.
    ///
    /// # Panics
    /// When it is not in memory.
    pub(super) fn peek(&self, name: PageName) -> &RawCasPage {
        &self.frames[self.at(name) as usize].page
    }

    /// Changes the state of a page that is in memory.
    ///
    /// # Panics
    /// When it is not in memory.
    pub(super) fn set_state(&mut self, name: PageName, state: PageState) {
        let at = self.at(name);
        let frame = &mut self.frames[at as usize];
        let old = std::mem::replace(&mut frame.state, state);
        match (old == PageState::Clean, state == PageState::Clean) {
            (true, false) => self.leave_queue(at),
            (false, true) => self.join_queue(at),
            _ => (),
        }
    }

    /// Takes in a page that is not in memory.
    pub(super) fn insert(&mut self, name: PageName, page: Box<RawCasPage>, state: PageState) {
        debug_assert!(matches!(self.at(name), NOTHING | FREED), "in memory twice");
        let (seen, before, after) = (Cell::new(1), NO_NEIGHBOUR, NO_NEIGHBOUR);
        let frame = Frame { name, page, state, seen, is_queued: false, before, after };
        let at = self.frames.insert(frame) as u32;
        assert!(at < FREED, "fewer pages in memory than numbers");
        self.set_at(name, at);
        if state == PageState::Clean {
            self.join_queue(at);
        }
    }

    /// A page is freed. Returns what was in memory.
    pub(super) fn free(&mut self, name: PageName) -> Option<(Box<RawCasPage>, PageState)> {
        let at = self.at(name);
        let taken = (at != NOTHING && at != FREED).then(|| self.take(at));
        self.set_at(name, FREED);
        taken
    }

    fn take(&mut self, at: u32) -> (Box<RawCasPage>, PageState) {
        if self.frames[at as usize].state == PageState::Clean {
            self.leave_queue(at);
        }
        let frame = self.frames.remove(at as usize);
        self.set_at(frame.name, NOTHING);
        (frame.page, frame.state)
    }

    /// From now on, pages that are looked at are those of the holder: they stay until its end.
    pub(super) fn hold(&mut self, is_holding: bool) {
        self.looking = if is_holding { self.holder } else { 1 };
    }

    /// The holder's pages need not stay any longer.
    pub(super) fn end_hold(&mut self) {
        self.holder += 1;
        self.looking = 1;
        for name in std::mem::take(&mut self.held) {
            let at = self.at(name);
            if self.frames.get(at as usize).is_some_and(|frame| frame.state == PageState::Clean) {
                self.join_queue(at);
            }
        }
    }

    /// Lets pages give way until no more than the limit are in memory, `others` included; but some stay for
    /// what is loaded to be of use.
    pub(super) fn make_room(&mut self, others: usize) {
        while self.frames.len() + others > self.limit && self.queued > self.kept {
            let at = self.first;
            let frame = &self.frames[at as usize];
            let (seen, name) = (frame.seen.replace(0), frame.name);
            if seen == 0 {
                self.take(at);
                self.evictions += 1;
                continue;
            }
            self.leave_queue(at);
            if seen == self.holder {
                self.frames[at as usize].seen.set(seen);
                self.held.push(name);
            } else {
                self.join_queue(at);
            }
        }
    }

    fn join_queue(&mut self, at: u32) {
        let last = self.last;
        let frame = &mut self.frames[at as usize];
        if is_resident(frame.name.space) || std::mem::replace(&mut frame.is_queued, true) {
            return;
        }
        (frame.before, frame.after) = (last, NO_NEIGHBOUR);
        self.last = at;
        match last {
            NO_NEIGHBOUR => self.first = at,
            last => self.frames[last as usize].after = at,
        }
        self.queued += 1;
    }

    fn leave_queue(&mut self, at: u32) {
        let frame = &mut self.frames[at as usize];
        if !std::mem::replace(&mut frame.is_queued, false) {
            return;
        }
        let (before, after) = (frame.before, frame.after);
        match before {
            NO_NEIGHBOUR => self.first = after,
            before => self.frames[before as usize].after = after,
        }
        match after {
            NO_NEIGHBOUR => self.last = before,
            after => self.frames[after as usize].before = before,
        }
        self.queued -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(index: u64) -> PageName {
        PageName { space: PageSpace::Table, level: 0, index }
    }

    fn insert(cache: &mut Cache, name: PageName, state: PageState) {
        cache.insert(name, Box::new(RawCasPage::blank(name)), state);
    }

    /// Those of the first `count` pages that are in memory.
    fn there(cache: &Cache, count: u64) -> Vec<u64> {
        (0..count).filter(|&index| cache.state(name(index)) != Known::Nothing).collect()
    }

    fn with_clean(limit: usize, count: u64) -> Cache {
        let mut cache = Cache::new(limit, 1);
        (0..count).for_each(|index| insert(&mut cache, name(index), PageState::Clean));
        cache
    }

    #[test]
    fn the_oldest_that_nobody_looked_at_gives_way() {
        let mut cache = with_clean(4, 6);
        cache.make_room(0);
        assert_eq!(there(&cache, 6), [2, 3, 4, 5], "all were just loaded");
        assert!(matches!(cache.look(name(2)), Known::Content(_)));
        (6..8).for_each(|index| insert(&mut cache, name(index), PageState::Clean));
        cache.make_room(0);
        assert_eq!(there(&cache, 8), [2, 5, 6, 7]);
        (8..10).for_each(|index| insert(&mut cache, name(index), PageState::Clean));
        cache.make_room(0);
        assert_eq!(there(&cache, 10), [6, 7, 8, 9], "2 had its second chance");
        insert(&mut cache, name(10), PageState::Clean);
        cache.make_room(0);
        assert_eq!(there(&cache, 11), [7, 8, 9, 10]);
        assert_eq!(cache.counters(), CacheCounters { hits: 1, misses: 0, evictions: 7 });
    }

    #[test]
    fn what_is_not_on_disk_stays_and_leaves_room_for_the_rest() {
        let mut cache = Cache::new(16, 2);
        (0..20).for_each(|index| insert(&mut cache, name(index), PageState::Changed(1)));
        (20..24).for_each(|index| insert(&mut cache, name(index), PageState::Clean));
        cache.make_room(0);
        assert_eq!(there(&cache, 24), (0..20).chain(22..24).collect::<Vec<_>>());
        (0..20).for_each(|index| cache.set_state(name(index), PageState::Written));
        cache.make_room(0);
        assert_eq!(there(&cache, 24).len(), 22);
        (0..20).for_each(|index| cache.set_state(name(index), PageState::Clean));
        cache.set_state(name(22), PageState::Changed(2));
        cache.make_room(3);
        let there = there(&cache, 24);
        assert_eq!(there.len(), 13);
        assert!(there.contains(&22));
    }

    #[test]
    fn resident_pages_stay() {
        let mut cache = Cache::new(1, 0);
        for space in PageSpace::ALL {
            insert(&mut cache, PageName { space, level: 0, index: 3 }, PageState::Clean);
        }
        cache.make_room(0);
        let there = |space| cache.state(PageName { space, level: 0, index: 3 }) != Known::Nothing;
        assert!(PageSpace::ALL.into_iter().all(|space| there(space) == is_resident(space)));
    }

    #[test]
    fn what_the_holder_looked_at_stays_until_its_end() {
        let mut cache = with_clean(4, 4);
        cache.hold(true);
        (0..4).for_each(|index| _ = cache.look(name(index)));
        cache.hold(false);
        (0..4).for_each(|index| _ = cache.look(name(index)));
        for index in 4..20 {
            insert(&mut cache, name(index), PageState::Clean);
            cache.make_room(0);
            assert_eq!(there(&cache, 20), [0, 1, 2, 3, index], "and the one that was loaded last");
        }
        // What became of a page while it was held counts at the end.
        cache.set_state(name(0), PageState::Changed(1));
        cache.set_state(name(1), PageState::Changed(1));
        cache.set_state(name(1), PageState::Clean);
        cache.free(name(2));
        cache.end_hold();
        (20..40).for_each(|index| insert(&mut cache, name(index), PageState::Clean));
        cache.make_room(0);
        assert_eq!(there(&cache, 2), [0]);
        assert_eq!((cache.len(), cache.queued), (4, 3));
    }
}
