//! A load that reads one place of one copy, of a page whose newest version and its places are remembered.
//!
//! Invariant: what was read enters the cache only if it is exactly the version that is remembered: another
//! one, newer or older, a damaged place and a read error all say that a copy is at fault, and then all copies
//! are read and judged as if nothing had been read before. So a copy at fault is found and repaired as in any
//! other load. The other copies are taken to be as they were when the page left the cache.
//!
//! It is no load for a check, nor for a page that a crash may have torn, nor where a device that is built has
//! a say in what counts ([`PageStore::offer`], [`PageStore::leave_alone`]).

use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::copies::{Copies, CopyFound, Next, Place, Places, Remembered, Torn, version_of};
use crate::array::pages::store::versions::NewestPlaces;
use crate::array::pages::store::{Cached, Load, LoadOutcome, Loaded, PageIo, PageRead, PageStore, Trust};
use crate::format::{MemberSet, Page, PageIndex};
use crate::units::MemberIndex;

/// Which copies of a page a load reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reads {
    /// One, if enough is known of the page; else all.
    Fewest,
    /// All.
    All(Torn),
}

/// What a load of one copy knows besides.
#[derive(Debug)]
pub(super) struct Sole {
    /// Where the newest version is on every copy.
    places: NewestPlaces,
    /// Members with a copy that could be read when the load began.
    usable: MemberSet,
    /// No request has joined that compares all copies.
    is_enough: bool,
}

impl Sole {
    /// Has all copies read after this one: a request has joined that compares them.
    pub(super) fn compare_all(&mut self) {
        self.is_enough = false;
    }
}

impl PageStore {
    /// Begins to load a page from one of its copies. False: all of them must be read.
    pub(super) fn load_sole(
        &mut self,
        page: PageIndex,
        key: usize,
        usable: &dyn Fn(MemberIndex) -> bool,
        out: &mut Vec<PageIo>,
    ) -> bool {
        let Some(places) = self.versions.places(page) else { return false };
        if self.left_alone.contains(&page) || self.offers.contains_key(&page) || self.is_map_page(page) {
            return false;
        }
        let layout = self.site.layout;
        let copies: Vec<(MemberIndex, u64)> = layout.copies(page).collect();
        let can_be_read = |member: MemberIndex| usable(member) && !self.away.contains(member);
        let usable: MemberSet =
            copies.iter().map(|(member, _)| *member).filter(|member| can_be_read(*member)).collect();
        // Loads take turns which copy they prefer: a write that one of them lost does not stay unseen.
        let first = self.versions.next_turn();
        let mut turns = (0..copies.len()).map(|turn| (first + turn) % copies.len());
        let Some(copy) = turns.find(|copy| usable.contains(copies[*copy].0)) else { return false };
        let (member, offset) = copies[copy];
        let place = Places::one(places.place(copy));
        let read = PageRead { page, copy: copy as u16, places: place, before_write: false };
        out.push(PageIo::Read { read, member, offset: offset + place.offset(), len: place.len() });
        let found = copies.iter().enumerate().map(|(at, (member, _))| CopyFound {
            member: *member,
            places: (at == copy).then_some([Place::Unreadable; 2]),
        });
        let load = Load {
            waiters: vec![key],
            torn: Torn::Impossible,
            copies: Copies(found.collect()),
            pending: 1,
            newest: None,
            is_void: false,
            check: None,
            marked: MemberSet::new(),
            sole: Some(Sole { places, usable, is_enough: true }),
        };
        self.loads.insert(page, load);
        true
    }

    /// Ends the read of the copy. The page enters the cache, or all its copies are read.
    pub(super) fn end_sole(
        &mut self,
        page: PageIndex,
        mut load: Load,
        sole: Sole,
        out: &mut Vec<PageIo>,
    ) -> Option<Loaded> {
        let is_newest = |content: &Page| {
            self.versions.compare(page, Some(version_of(content))) == Remembered::Same
                || is_off(Mutation::AnyVersionBelieved)
        };
        let is_enough =
            sole.is_enough && !self.left_alone.contains(&page) && !self.offers.contains_key(&page);
        match load.newest.take() {
            Some(content) if is_enough && is_newest(&content) => {
                Some(self.take_sole(page, content, load.waiters, sole.places))
            }
            _ => self.read_all(page, load, sole.usable, out),
        }
    }

    fn take_sole(
        &mut self,
        page: PageIndex,
        mut content: Page,
        waiters: Vec<usize>,
        places: NewestPlaces,
    ) -> Loaded {
        content.paired = true;
        let copies = self.site.layout.copies(page).enumerate();
        let next = copies.map(|(copy, (member, _))| match self.away.contains(member) {
            true => Next::Anywhere,
            false if is_off(Mutation::NewestWrittenOver) => Next::At(Places::one(places.place(copy))),
            false => Next::At(Places::one(1 - places.place(copy))),
        });
        let cached = Cached::loaded(content, next, &waiters, Trust::Known);
        self.enter(page, cached);
        self.rebuild_void(page);
        let (good, marked) = (MemberSet::default(), MemberSet::default());
        Loaded {
            waiters,
            outcome: LoadOutcome::Ready,
            faults: Vec::new(),
            is_kept: false,
            good,
            marked,
            unread: None,
            is_of_one_copy: true,
        }
    }

    /// Goes on with all copies. The members that have left service since give none; if all have, every waiter
    /// asks again.
    fn read_all(
        &mut self,
        page: PageIndex,
        load: Load,
        usable: MemberSet,
        out: &mut Vec<PageIo>,
    ) -> Option<Loaded> {
        let mut load = Load { newest: None, pending: 0, marked: MemberSet::new(), ..load };
        let offsets: Vec<u64> = self.site.layout.copies(page).map(|(_, offset)| offset).collect();
        for ((copy, found), offset) in load.copies.0.iter_mut().enumerate().zip(offsets) {
            let member = found.member;
            let is_usable = usable.contains(member) && !self.away.contains(member);
            found.places = is_usable.then_some([Place::Unreadable; 2]);
            if is_usable {
                let read = PageRead { page, copy: copy as u16, places: Places::Both, before_write: false };
                out.push(PageIo::Read { read, member, offset, len: Places::Both.len() });
                load.pending += 1;
            }
        }
        if load.pending == 0 {
            load.is_void = true;
            return Some(self.end_load(page, load));
        }
        self.loads.insert(page, load);
        None
    }
}
