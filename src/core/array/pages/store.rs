//! The metadata pages of a logged array in memory: a bounded cache of block hashes, and the whole stripe map.
//!
//! Sans-IO like the rest of the array: reads and writes of page copies come out as [`PageIo`] and come back
//! as [`PageStore::read_done`] and [`PageStore::write_done`]. A page has m + 1 copies on different members
//! and each copy two places (docs/on-disk-format.md, "Pages"). These rules hold for at most m faults of one
//! page (members gone, copies damaged, unreadable or behind) and any number of crashes:
//! * A load reads both places of every usable copy. The newest valid version of all counts, if it is known to
//!   be the newest there is (rule T3): a copy without a fault shows it, or it is remembered. A copy that
//!   lacks it counts as its member's error and is rewritten at the next write-back.
//! * Where the newest version and its places are remembered, one place of one copy is read. If that does not
//!   show exactly this version, it is not used, and all copies are read (`pages/store/sole.rs`).
//! * A copy that cannot be read is unknown, and so is one whose member is not here. If it stays open for that
//!   reason which version is the newest, nothing enters the cache and nothing is written: waiting operations
//!   get [`LoadOutcome::Unreadable`], and the next request has the page read again. A page is lost only if
//!   every copy was read without an error and too many are bad.
//! * A write never goes over the newest valid version of its copy, so one that is cut off leaves the version
//!   before. Where a place could not be read it is read again just before the write. A copy without a valid
//!   version keeps one blank place until a write has succeeded: that distinguishes "never written whole" from
//!   "written, and damaged". Only a copy that can be no witness for either is written in both places.
//! * The copy on a device under construction does not count. The exception is one that has missed no change
//!   of the page, where no other copy can be read (`pages/offers.rs`).
//! * Which place holds a copy's newest version is known from [`PageStore::thaw`] on, when the write is
//!   flushed.
//! * The page is written back as it was at [`PageStore::freeze`] (rule W2 of the crash-safety design): later
//!   changes wait for the next write-back. Pages that are changed, or frozen and not thawed, stay cached.
//!
//! Must not know of devices, epochs beyond their number, the log, or the operations that wait.

mod blank;
mod eviction;
mod hashes;
mod offers;
pub(in crate::array) mod shown;
mod sole;
mod stripes;
mod trust;
pub(in crate::array) mod versions;
mod write_back;

use crate::array::base::members::Which;
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::copies::{
    Copies, CopyFault, CopyFound, Next, Place, Places, Standing, Torn, Version, version_of,
};
use crate::block_io::Buf;
use crate::format::{Geometry, LogKey, MemberSet, PAGE_BYTES, PAGE_ENTRIES, Page, PageIndex, PageLayout};
use crate::units::{BlockHash, MemberIndex};
use calpe_view::Publisher;
use offers::{Offer, decode_place, newer};
use rustc_hash::FxHashMap;
use sole::{Reads, Sole};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use trust::Trust;
use uuid::Uuid;
use versions::Versions;

/// Names a read of a page copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) struct PageRead {
    page: PageIndex,
    copy: u16,
    places: Places,
    /// Its result decides where the copy is to be written: see [`Next::Unread`].
    before_write: bool,
}

/// Names a write of a page copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) struct PageWrite {
    page: PageIndex,
    copy: u16,
    places: Places,
    which: Which,
    /// It writes no version of the page, only a mark that this copy holds none: see [`PageStore::void`].
    is_void: bool,
}

impl PageRead {
    pub(in crate::array) fn page(&self) -> PageIndex {
        self.page
    }
}

impl PageWrite {
    pub(in crate::array) fn page(&self) -> PageIndex {
        self.page
    }
}

/// I/O that the store wants done. Offsets count from the start of the member's pages region.
#[derive(Debug)]
pub(in crate::array) enum PageIo {
    /// From the member's device in service; ends in [`PageStore::read_done`].
    Read { read: PageRead, member: MemberIndex, offset: u64, len: usize },
    /// To the named device of the member; ends in [`PageStore::write_done`].
    Write { write: PageWrite, member: MemberIndex, which: Which, offset: u64, bytes: Buf },
}

/// The result of a read.
#[derive(Clone, Copy, Debug)]
pub(in crate::array) enum Answer<'a> {
    /// As many bytes as were asked for.
    Bytes(&'a [u8]),
    /// The device reports that it cannot read them.
    Unreadable,
    /// The member is not in service any more.
    Gone,
}

/// Result of requesting a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) enum Want {
    /// It is in the cache, pinned for the caller.
    Cached,
    /// It is being loaded: the key will be among the waiters of a [`Loaded`], and the page is then pinned for
    /// it.
    Loading,
    /// It is to be checked, and is being written: a check after [`PageStore::thaw`] shows more. It is not
    /// pinned.
    BeingWritten,
    /// No copy is on a usable member: the array has failed. Nothing is pinned.
    Unavailable,
}

/// Result of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) enum LoadOutcome {
    /// The page is in the cache.
    Ready,
    /// Every copy was read, and more are bad than the array survives. The page is in the cache with every
    /// entry [`BlockHash::LOST`]; a lost page of the stripe map makes
    /// [`crate::array::pages::stripe_map::MapBuild::step`] fail.
    Lost,
    /// A page of the stripe map of which every copy was read and none is without a fault. It is in the cache
    /// as the newest copy shows it, and may have been changed since. (A page of hashes is then
    /// [`LoadOutcome::Ready`]: an old hash does not match its block, so only its blank entries become
    /// [`BlockHash::LOST`].)
    Behind,
    /// The newest version is not known, because copies could not be read (rule T3). The page is not cached.
    Unreadable,
    /// A member left or joined service meanwhile, or a page under check was written: nothing was put into the
    /// cache, and nothing is pinned; every waiter has to ask again.
    AskAgain,
}

impl LoadOutcome {
    /// Whether the page is in the cache and pinned for every waiter.
    pub(super) fn pins(self) -> bool {
        !matches!(self, LoadOutcome::Unreadable | LoadOutcome::AskAgain)
    }
}

/// The end of a load.
// Plain data: the result of comparing the copies of a page, given to the operations that wait for it.
#[derive(Debug)]
pub(in crate::array) struct Loaded {
    pub waiters: Vec<usize>,
    pub outcome: LoadOutcome,
    /// Faults to count. The next write-back repairs these copies, unless `is_kept`.
    pub faults: Vec<(MemberIndex, CopyFault)>,
    /// Every copy is at fault. None is written until the page is changed, since another read may show more.
    pub is_kept: bool,
    /// Members whose copies were read and are right.
    pub good: MemberSet,
    /// Members whose copies say that they hold no version: see [`PageStore::void`].
    pub marked: MemberSet,
    /// Why the page cannot be had, in words, or could not if it were blank; none where every copy was read.
    pub unread: Option<Unread>,
    /// Only one copy was read, which says nothing of the others.
    pub is_of_one_copy: bool,
}

/// Copies that could not be read.
// Plain data: part of the result of a load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::array) struct Unread {
    /// The copies, in words.
    pub text: String,
    /// A member returned an error, which may pass; otherwise members are not here.
    pub by_error: bool,
    /// The version read is the newest, provided that damage comes from a crash: see [`Settle::Likely`].
    pub is_likely: bool,
}

/// Which version a load accepts where copies could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::array) enum Settle {
    /// The version that is known to be the newest.
    Known,
    /// Also one that is the newest if damage comes from writes cut off by a crash, where that is possible.
    Likely,
    /// Any: an administrator has permitted it. A copy that cannot be read counts as damaged.
    Anything,
}

#[derive(Debug)]
struct Load {
    waiters: Vec<usize>,
    torn: Torn,
    copies: Copies,
    pending: usize,
    newest: Option<Page>,
    /// Its result does not count: a member has left service or joined it, or the page was being written.
    is_void: bool,
    /// The page is in the cache with this version: its copies are to be compared with that one.
    check: Option<Version>,
    /// Members whose copies say that they hold no version: see [`PageStore::void`].
    marked: MemberSet,
    /// While only one copy is read.
    sole: Option<Sole>,
}

#[derive(Debug)]
struct Cached {
    page: Arc<Page>,
    /// Where the next write of each copy goes.
    next: Box<[Next]>,
    pins: u32,
    used: bool,
    dirty: bool,
    trust: Trust,
}

/// Copies that are to be written although the page has not changed.
#[derive(Clone, Copy, Debug, Default)]
struct Due {
    /// Bad copies, in the place where a write harms nothing.
    heal: MemberSet,
    /// In both places, whatever they hold: copies on members under construction...
    whole: MemberSet,
    /// ...and on the replacements of members.
    replacement: MemberSet,
}

impl Due {
    fn merge(&mut self, other: Due) {
        self.heal.extend(other.heal.iter());
        self.whole.extend(other.whole.iter());
        self.replacement.extend(other.replacement.iter());
    }
}

#[derive(Debug)]
struct Frozen {
    image: Arc<Page>,
    /// There is a new version, so every copy is written. Otherwise only those due.
    changed: bool,
    due: Due,
    /// The copies whose write has succeeded on the member's device in service, and their places.
    written: Vec<(u16, Places)>,
    /// Copies that proved to be right when they were read before a repair, and where their next write goes.
    whole: Vec<(u16, Next)>,
    /// Members on whose copy a place that could not be read was left unwritten.
    spared: MemberSet,
}

/// A copy that is read before it is written.
#[derive(Debug)]
struct Probe {
    found: CopyFound,
    pending: usize,
}

/// See the head of this file.
pub(in crate::array) struct PageStore {
    site: Site,
    cached: FxHashMap<PageIndex, Cached>,
    loads: FxHashMap<PageIndex, Load>,
    /// The cached pages of hashes in the order in which eviction looks at them.
    clock: VecDeque<PageIndex>,
    dirty: Vec<PageIndex>,
    due: BTreeMap<PageIndex, Due>,
    /// Members out of service.
    away: MemberSet,
    write_back: WriteBack,
    void: VoidCopies,
    /// Copies, on devices that are caught up, of pages that cannot be read elsewhere.
    offers: BTreeMap<PageIndex, Offer>,
    /// Pages that could not be read, and so were left unchanged on a device that was caught up. Its version
    /// may be older than ones that become readable again, but says the same of all that counts.
    left_alone: BTreeSet<PageIndex>,
    /// The newest versions seen of pages, cached or not.
    versions: Versions,
    /// Pages of the stripe map that have a version on the members, among those that were loaded. A page is
    /// loaded once, and counted then or when its first version is flushed.
    map_written: u64,
    settles_for: Settle,
    /// What readers on other threads see of it.
    shown: Publisher,
}

/// The array, the places of its pages, and how many of them are cached.
struct Site {
    /// Most pages of hashes in the cache; pages of the stripe map are not counted.
    cache_pages_max: usize,
    geometry: Geometry,
    layout: PageLayout,
    key: LogKey,
    array: Uuid,
}

/// The write-back under way.
struct WriteBack {
    frozen: BTreeMap<PageIndex, Frozen>,
    /// The writes of frozen pages below this page were given out.
    sent_below: PageIndex,
    /// Writes, and reads before writes, that were given out and are not over.
    writes_pending: usize,
    /// Copies of frozen pages that are being read, or were read and are not written yet.
    probes: BTreeMap<(PageIndex, u16), Probe>,
}

/// Devices under construction whose copies get a mark that they hold no version; true for a replacement.
#[derive(Default)]
struct VoidCopies {
    all: BTreeSet<(PageIndex, MemberIndex, bool)>,
    /// Copies that the next write-back marks.
    due: BTreeSet<(PageIndex, MemberIndex, bool)>,
    /// Copies that the present write-back has still to mark.
    frozen: BTreeSet<(PageIndex, MemberIndex, bool)>,
}

impl PageStore {
    /// An empty cache for the pages of an array, with block hashes or without. It holds at most
    /// `cache_pages_max` pages of hashes unless more are in use or changed, and the whole stripe map besides.
    pub(in crate::array) fn new(
        geometry: Geometry,
        checksums: bool,
        key: LogKey,
        array: Uuid,
        cache_pages_max: usize,
    ) -> PageStore {
        let layout = PageLayout::new(geometry, checksums);
        PageStore {
            site: Site { cache_pages_max, geometry, layout, key, array },
            cached: FxHashMap::default(),
            loads: FxHashMap::default(),
            clock: VecDeque::new(),
            dirty: Vec::new(),
            due: BTreeMap::new(),
            away: MemberSet::new(),
            write_back: WriteBack {
                frozen: BTreeMap::new(),
                sent_below: PageIndex(0),
                writes_pending: 0,
                probes: BTreeMap::new(),
            },
            void: VoidCopies::default(),
            offers: BTreeMap::new(),
            left_alone: BTreeSet::new(),
            versions: Versions::new(layout.pages()),
            map_written: 0,
            settles_for: Settle::Known,
            shown: Publisher::new(shown::view_size(&geometry, &layout, cache_pages_max as u64)),
        }
    }

    /// Where the pages and their entries are.
    pub(in crate::array) fn layout(&self) -> &PageLayout {
        &self.site.layout
    }

    /// The key of the hashes of pages.
    pub(in crate::array) fn key(&self) -> &LogKey {
        &self.site.key
    }

    /// The array that pages must name.
    pub(in crate::array) fn array(&self) -> Uuid {
        self.site.array
    }

    /// Asks for a page and pins it for the caller, which gives it back with [`PageStore::release`]. Unless it
    /// is cached it is loaded from the members that are `usable`, once for all that ask.
    pub(in crate::array) fn want(
        &mut self,
        page: PageIndex,
        key: usize,
        torn: Torn,
        usable: &dyn Fn(MemberIndex) -> bool,
        out: &mut Vec<PageIo>,
    ) -> Want {
        match self.cached.get_mut(&page) {
            Some(cached) => {
                cached.pins += 1;
                cached.used = true;
                self.show_if_hidden(page);
                Want::Cached
            }
            None => {
                let reads = if torn == Torn::Impossible { Reads::Fewest } else { Reads::All(torn) };
                self.load(page, key, reads, usable, out)
            }
        }
    }

    /// Like [`PageStore::want`], but also reads the copies of a cached page, to find bad ones (scrub). If
    /// they are written meanwhile, the operations have to ask again.
    pub(super) fn check(
        &mut self,
        page: PageIndex,
        key: usize,
        usable: &dyn Fn(MemberIndex) -> bool,
        out: &mut Vec<PageIo>,
    ) -> Want {
        if self.write_back.frozen.contains_key(&page) {
            return Want::BeingWritten;
        }
        let checked = match self.cached.get(&page) {
            Some(cached) if cached.trust != Trust::Known => Want::Cached,
            _ => self.load(page, key, Reads::All(Torn::Impossible), usable, out),
        };
        if self.cached.contains_key(&page) && checked != Want::Unavailable {
            self.pin(page);
        }
        checked
    }

    /// Pins a page that is in the cache, like [`PageStore::want`].
    ///
    /// # Panics
    /// When it is not.
    pub(super) fn pin(&mut self, page: PageIndex) {
        self.cached.get_mut(&page).expect("a page that is pinned is cached").pins += 1;
    }

    /// Undoes the pin of one [`PageStore::want`] or [`PageStore::check`].
    ///
    /// # Panics
    /// When the page is not pinned.
    pub(in crate::array) fn release(&mut self, page: PageIndex) {
        let cached = self.cached.get_mut(&page).expect("a pinned page is cached");
        cached.pins = cached.pins.checked_sub(1).expect("a page that is released was pinned");
        if self.is_evictable(page) {
            self.drop_unless_known(page);
            self.evict();
        }
    }

    /// Takes the end of a read. Some when it was the last of its load.
    ///
    /// # Panics
    /// When no such read was given out, or the number of bytes is not the one asked for.
    pub(in crate::array) fn read_done(
        &mut self,
        read: PageRead,
        answer: Answer<'_>,
        out: &mut Vec<PageIo>,
    ) -> Option<Loaded> {
        let PageRead { page, copy, places, before_write } = read;
        let (found, pending) = if before_write {
            let probe =
                self.write_back.probes.get_mut(&(page, copy)).expect("a copy that is read before its write");
            (&mut probe.found, &mut probe.pending)
        } else {
            let load = self.loads.get_mut(&page).expect("a read belongs to a load");
            load.is_void |= matches!(answer, Answer::Gone);
            (&mut load.copies.0[usize::from(copy)], &mut load.pending)
        };
        *pending -= 1;
        let (mut newest, mut is_marked) = (None, false);
        match answer {
            // A bad sector in one place must not hide the content of the other.
            Answer::Unreadable if places == Places::Both => {
                let (member, offset) =
                    self.site.layout.copies(page).nth(usize::from(copy)).expect("a copy of the page");
                for places in [Places::First, Places::Second] {
                    let (read, offset) = (PageRead { places, ..read }, offset + places.offset());
                    out.push(PageIo::Read { read, member, offset, len: places.len() });
                    *pending += 1;
                }
            }
            Answer::Unreadable | Answer::Gone => {}
            Answer::Bytes(bytes) => {
                assert_eq!(bytes.len(), places.len(), "a read brings what was asked for");
                let found = found.places.as_mut().expect("it was to be read");
                let first = usize::from(places == Places::Second);
                for (place, bytes) in found[first..].iter_mut().zip(bytes.chunks(PAGE_BYTES)) {
                    let version;
                    (*place, version) = decode_place(&self.site.key, self.site.array, page, bytes);
                    newest = newer(newest, version);
                    is_marked |=
                        *place == Place::Damaged && bytes[..] == Page::encode_void(self.site.array, page)[..];
                }
            }
        }
        let is_over = *pending == 0;
        if before_write {
            self.write_back.writes_pending -= usize::from(is_over);
            return None;
        }
        let load = self.loads.get_mut(&page).expect("it was found above");
        load.newest = newer(load.newest.take(), newest);
        if is_marked {
            load.marked.insert(load.copies.0[usize::from(copy)].member);
        }
        if !is_over {
            return None;
        }
        let mut load = self.loads.remove(&page).expect("it was found above");
        match load.sole.take() {
            Some(sole) if !load.is_void => self.end_sole(page, load, sole, out),
            _ => Some(self.end_load(page, load)),
        }
    }

    /// The page as it is now; later changes do not show in it. For hashes see [`PageLayout::hash_entry`].
    ///
    /// # Panics
    /// When the page is not cached, as for all functions on entries: users of a page have pinned it.
    pub(super) fn snapshot(&self, page: PageIndex) -> Arc<Page> {
        Arc::clone(&self.at(page).page)
    }

    /// Has a new version of the page written back without a change (R8: every page that the log names).
    pub(super) fn touch(&mut self, page: PageIndex) {
        let cached = self.cached.get_mut(&page).expect("a page that is changed is cached");
        if !cached.dirty {
            cached.dirty = true;
            self.dirty.push(page);
        }
        self.believe(page);
    }

    /// The next page from `from` on that has a copy on `member`: the walk of a rebuild.
    pub(in crate::array) fn next_page_on(&self, member: MemberIndex, from: PageIndex) -> Option<PageIndex> {
        let has_copy = |page: &PageIndex| self.site.layout.copy_on(*page, member).is_some();
        (from.0..self.site.layout.pages()).map(PageIndex).find(has_copy)
    }

    /// Forgets everything: all pages are loaded anew. Nothing may be in use, changed or under way.
    pub(in crate::array) fn forget_all(&mut self) {
        assert!(self.loads.is_empty() && self.write_back.frozen.is_empty(), "nothing is on its way");
        assert!(self.cached.values().all(|cached| cached.pins == 0), "nothing is in use");
        self.shown.forget_all();
        self.cached.clear();
        self.clock.clear();
        self.dirty.clear();
        self.due.clear();
        self.offers.clear();
        self.versions = Versions::new(self.site.layout.pages());
        self.map_written = 0;
        self.settles_for = Settle::Known;
    }

    /// Sets which versions loads that end from now on accept.
    pub(in crate::array) fn settle_for(&mut self, settle: Settle) {
        self.settles_for = settle;
    }

    /// Pages of the stripe map that have a version on the members, once all were loaded.
    pub(in crate::array) fn map_written(&self) -> u64 {
        self.map_written
    }

    /// Whether the page was never written.
    pub(in crate::array) fn is_blank(&self, page: PageIndex) -> bool {
        let cached = self.at(page);
        cached.page.sequence == 0 && !cached.dirty && cached.trust == Trust::Known
    }

    #[cfg(test)]
    /// Number of the epoch in which the newest version was written, flushed or not; 0 for a blank page.
    pub(super) fn epoch_written(&self, page: PageIndex) -> u64 {
        self.at(page).page.epoch
    }

    /// Pages whose entries have changed since the last [`PageStore::freeze`].
    pub(in crate::array) fn changed_pages(&self) -> usize {
        self.dirty.len()
    }

    /// Pages that the next [`PageStore::freeze`] takes: changed ones, and those with copies to rewrite.
    pub(in crate::array) fn dirty_pages(&self) -> usize {
        self.dirty.len() + self.due.len() + self.void.due.len()
    }

    /// Whether these are at least the most pages of hashes that the cache may hold, divided by `divisor`.
    pub(in crate::array) fn is_dirty_beyond(&self, divisor: usize) -> bool {
        self.dirty_pages() >= (self.site.cache_pages_max / divisor).max(1)
    }

    fn at(&self, page: PageIndex) -> &Cached {
        self.cached.get(&page).expect("a page that is used is cached")
    }

    fn set(&mut self, page: PageIndex, entry: usize, value: [u8; 16]) {
        self.touch(page);
        let cached = self.cached.get_mut(&page).expect("it was just marked");
        Arc::make_mut(&mut cached.page).entries[entry] = value;
    }

    fn is_map_page(&self, page: PageIndex) -> bool {
        page.0 < self.site.layout.map_pages()
    }

    /// Joins the load of a page, or starts it.
    fn load(
        &mut self,
        page: PageIndex,
        key: usize,
        reads: Reads,
        usable: &dyn Fn(MemberIndex) -> bool,
        out: &mut Vec<PageIo>,
    ) -> Want {
        assert!(page.0 < self.site.layout.pages(), "page {} of {}", page.0, self.site.layout.pages());
        if let Some(load) = self.loads.get_mut(&page) {
            load.waiters.push(key);
            if let Reads::All(torn) = reads {
                if torn == Torn::Possible {
                    load.torn = torn;
                }
                load.sole.iter_mut().for_each(Sole::compare_all);
            }
            return Want::Loading;
        }
        if reads == Reads::Fewest && self.load_sole(page, key, usable, out) {
            return Want::Loading;
        }
        let torn = if let Reads::All(torn) = reads { torn } else { Torn::Impossible };
        let mut copies = Vec::new();
        let mut pending = 0;
        for (copy, (member, offset)) in self.site.layout.copies(page).enumerate() {
            let places = usable(member).then_some([Place::Unreadable; 2]);
            copies.push(CopyFound { member, places });
            if places.is_some() {
                let read = PageRead { page, copy: copy as u16, places: Places::Both, before_write: false };
                out.push(PageIo::Read { read, member, offset, len: Places::Both.len() });
                pending += 1;
            }
        }
        if pending == 0 {
            return Want::Unavailable;
        }
        let check = self.cached.get(&page).map(|cached| version_of(&cached.page));
        let waiters = vec![key];
        let (copies, marked) = (Copies(copies), MemberSet::new());
        let load =
            Load { waiters, torn, copies, pending, newest: None, is_void: false, check, marked, sole: None };
        self.loads.insert(page, load);
        Want::Loading
    }

    fn end_load(&mut self, page: PageIndex, load: Load) -> Loaded {
        let marked = load.marked;
        Loaded { marked, ..self.judge_load(page, load) }
    }

    fn judge_load(&mut self, page: PageIndex, load: Load) -> Loaded {
        let Load { waiters, torn, copies, newest, is_void, check, .. } = load;
        let mut unread = copies.has_unread().then(|| Unread {
            text: copies.hindrances(),
            by_error: copies.has_errors(),
            is_likely: false,
        });
        let (faults, good, marked) = (Vec::new(), MemberSet::default(), MemberSet::default());
        let without_page = |waiters, outcome, unread| Loaded {
            waiters,
            outcome,
            faults,
            is_kept: false,
            good,
            marked,
            unread,
            is_of_one_copy: false,
        };
        if is_void {
            // The pins of a check end with it; a page in the cache that was only checked stays there.
            if check.is_some() {
                self.cached.get_mut(&page).expect("a page under check is pinned").pins -=
                    waiters.len() as u32;
            }
            return without_page(waiters, LoadOutcome::AskAgain, None);
        }
        if let Some(version) = check {
            let truth = (version != (0, 0)).then_some(version);
            let next = &mut self.cached.get_mut(&page).expect("a page under check is pinned").next;
            let read = |copy: &CopyFound| copy.places.is_some() && !self.away.contains(copy.member);
            for (next, copy) in next.iter_mut().zip(&copies.0).filter(|(_, copy)| read(copy)) {
                *next = match copy.next_write() {
                    // An unread version is still in its place; both places of a copy without a readable one
                    // are written.
                    Next::Unread if matches!(next, Next::At(_)) && !copy.is_wholly_unreadable() => *next,
                    told => told,
                };
            }
            let faults = self.note_bad_copies(page, &copies, truth, Torn::Impossible);
            let good = copies.good(truth);
            let outcome = LoadOutcome::Ready;
            let is_of_one_copy = false;
            return Loaded { waiters, outcome, faults, is_kept: false, good, marked, unread, is_of_one_copy };
        }
        let offer = self.offers.remove(&page);
        let truth = newest.as_ref().map(version_of);
        let standing = match copies.standing(truth, self.versions.compare(page, truth), torn) {
            Standing::Unknown if is_off(Mutation::UnreadTakenForOld) && truth.is_some() => Standing::Newest,
            Standing::Unknown if is_off(Mutation::UnreadTakenForLost) => Standing::Doubtful,
            Standing::Likely if self.settles_for >= Settle::Likely => {
                if torn == Torn::Possible {
                    Standing::Newest
                } else {
                    Standing::Doubtful
                }
            }
            Standing::Unknown if self.settles_for == Settle::Anything => {
                if truth.is_some() && torn == Torn::Possible { Standing::Newest } else { Standing::Doubtful }
            }
            standing => standing,
        };
        let is_doubtful = match standing {
            Standing::Newest => false,
            Standing::Doubtful => true,
            Standing::Likely | Standing::Unknown => {
                if let Some(known) = offer.and_then(|offer| offer.weigh(newest.as_ref(), &copies)) {
                    return self.take_offer(page, known, waiters, &copies);
                }
                if let Some(unread) = &mut unread {
                    unread.is_likely = standing == Standing::Likely;
                }
                return without_page(waiters, LoadOutcome::Unreadable, unread);
            }
        };
        let lost = is_doubtful && truth.is_none();
        self.map_written += u64::from(truth.is_some() && self.is_map_page(page));
        let mut content = newest.unwrap_or_else(Page::blank);
        content.paired = true;
        if lost {
            content.entries = Box::new([BlockHash::LOST.0; PAGE_ENTRIES]);
        }
        let is_behind = is_doubtful && !lost;
        let is_doubted = is_behind && !self.is_map_page(page);
        if is_doubted {
            content.doubt();
        }
        // A page without a version counts as blank until the caller has judged that.
        let was_left_alone = truth.is_some() && self.left_alone.remove(&page);
        if was_left_alone {
            content.sequence += trust::AHEAD;
        }
        if !is_doubtful {
            self.versions.set(page, truth);
        }
        let next_of = |copy: &CopyFound| {
            if self.away.contains(copy.member) { Next::Anywhere } else { copy.next_write() }
        };
        let trust = Trust::of(lost, is_doubted);
        let cached = Cached::loaded(content, copies.0.iter().map(next_of), &waiters, trust);
        self.enter(page, cached);
        if !lost {
            self.rebuild_void(page);
        }
        if was_left_alone {
            // The decision stands, whichever copies the next load finds.
            self.touch(page);
        }
        let is_kept = lost || is_doubted;
        let faults = match is_kept {
            true => copies.faults(truth, torn),
            false => self.note_bad_copies(page, &copies, truth, torn),
        };
        let outcome = match is_behind {
            _ if lost => LoadOutcome::Lost,
            true if !is_doubted => LoadOutcome::Behind,
            _ => LoadOutcome::Ready,
        };
        let good = if lost { MemberSet::default() } else { copies.good(truth) };
        Loaded { waiters, outcome, faults, is_kept, good, marked, unread, is_of_one_copy: false }
    }

    /// Marks bad copies for writing. Returns those that count as errors and were not counted yet.
    fn note_bad_copies(
        &mut self,
        page: PageIndex,
        copies: &Copies,
        truth: Option<Version>,
        torn: Torn,
    ) -> Vec<(MemberIndex, CopyFault)> {
        let bad = copies.faults(truth, Torn::Impossible);
        let heal: MemberSet = bad.into_iter().map(|(member, _)| member).collect();
        let known = self.due.get(&page).map(|due| due.heal).unwrap_or_default();
        let left = torn == Torn::Possible && is_off(Mutation::PagesNotRewritten);
        if !heal.is_empty() && !left {
            self.due.entry(page).or_default().merge(Due::healed(heal));
        }
        copies.faults(truth, torn).into_iter().filter(|(member, _)| !known.contains(*member)).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::block_io::Pool;
    use crate::units::SlotIndex;
    use crate::units::{ColumnIndex, ROW_BYTES};
    use proptest::prelude::*;

    const ARRAY: Uuid = Uuid::from_u128(0x1234);
    const KEY: LogKey = LogKey([7; 32]);
    /// Every 512-byte sector of a write.
    const WHOLE: u16 = u16::MAX;

    fn geometry(data: u16, parity: u16) -> Geometry {
        Geometry {
            data,
            parity,
            chunk: 8192,
            sector: 512,
            slots: 1400,
            volume_bytes: 1300 * u64::from(data) * 8192,
            ahead: 0,
        }
    }

    fn new_store(geometry: Geometry, cache_pages_max: usize) -> PageStore {
        PageStore::new(geometry, true, KEY, ARRAY, cache_pages_max)
    }

    impl PageStore {
        /// The pages of whose copy on `member` the cache knows nothing, because the member was not usable
        /// when they were loaded or has missed a write. A member that comes back without being rebuilt must
        /// have none left when it becomes usable again; otherwise a write could go over the only valid
        /// version of its copy. A [`PageStore::check`] with this member among the usable ones finds out what
        /// the copy holds, unless the page is being written: then a write-back to it does.
        pub(super) fn unknown_on(&self, member: MemberIndex) -> Vec<PageIndex> {
            let copy_of = |page| self.site.layout.copy_on(page, member);
            let cached = self.cached.iter().filter(|&(&page, cached)| {
                let copy = copy_of(page);
                copy.is_some_and(|copy| cached.next[copy] == Next::Anywhere)
            });
            let loading = self.loads.iter().filter(|&(&page, load)| {
                let copy = copy_of(page);
                copy.is_some_and(|copy| load.copies.0[copy].places.is_none())
            });
            let pages: BTreeSet<PageIndex> =
                cached.map(|(page, _)| *page).chain(loading.map(|(page, _)| *page)).collect();
            pages.into_iter().collect()
        }
    }

    /// A store of an array that was just created, with its stripe map loaded.
    pub(in crate::array) fn new_array(geometry: Geometry) -> PageStore {
        let mut store = new_store(geometry, 8);
        let disks = Disks::new(&store);
        for page in 0..store.layout().map_pages() {
            disks.load(&mut store, PageIndex(page), Torn::Impossible);
        }
        store
    }

    /// A store whose stripe map is loaded except for one page: all copies of that are damaged.
    pub(in crate::array) fn array_without_map_page(geometry: Geometry, page: PageIndex) -> PageStore {
        let mut store = new_array(geometry);
        let mut disks = Disks::new(&store);
        store.touch(page);
        disks.write_back(&mut store, 1);
        let mut store = new_store(geometry, 8);
        for copy in 0..=usize::from(geometry.parity) {
            disks.mar(&store, page, copy, 0, Harm::Flip);
        }
        for page in 0..store.layout().map_pages() {
            disks.load(&mut store, PageIndex(page), Torn::Impossible);
        }
        store
    }

    /// The pages regions of the members of an array.
    struct Disks {
        members: Vec<Vec<u8>>,
        dead: MemberSet,
        /// Places with a bad sector, by member and offset.
        unreadable: BTreeSet<(u16, u64)>,
    }

    impl Disks {
        fn new(store: &PageStore) -> Disks {
            let members = vec![
                vec![0; store.site.layout.region_bytes() as usize];
                usize::from(store.site.geometry.width())
            ];
            Disks { members, dead: MemberSet::new(), unreadable: BTreeSet::new() }
        }

        fn is_alive(&self, member: MemberIndex) -> bool {
            !self.dead.contains(member)
        }

        /// Serves every read that the store gives out, and the reads that follow from these.
        fn serve(&self, store: &mut PageStore, mut reads: Vec<PageIo>) -> Vec<Loaded> {
            let mut ended = Vec::new();
            while let Some(io) = reads.pop() {
                let PageIo::Read { read, member, offset, len } = io else { panic!("a load writes nothing") };
                let mut places = (offset..offset + len as u64).step_by(PAGE_BYTES);
                let bad = places.any(|place| self.unreadable.contains(&(member.0, place)));
                let bytes = &self.members[usize::from(member.0)][offset as usize..][..len];
                let answer = if bad { Answer::Unreadable } else { Answer::Bytes(bytes) };
                ended.extend(store.read_done(read, answer, &mut reads));
            }
            store.check_shown();
            ended
        }

        /// Loads a page that is not cached.
        fn load(&self, store: &mut PageStore, page: PageIndex, torn: Torn) -> Loaded {
            let mut reads = Vec::new();
            assert_eq!(store.want(page, 1, torn, &|member| self.is_alive(member), &mut reads), Want::Loading);
            let mut loaded = self.serve(store, reads);
            assert_eq!(loaded.len(), 1);
            store.check_shown();
            loaded.pop().unwrap()
        }

        /// As [`Disks::load`], but damage that a crash may have caused counts as caused by one.
        fn load_patiently(&self, store: &mut PageStore, page: PageIndex, torn: Torn) -> Loaded {
            let loaded = self.load(store, page, torn);
            if !loaded.unread.as_ref().is_some_and(|unread| unread.is_likely) {
                return loaded;
            }
            assert_eq!(loaded.outcome, LoadOutcome::Unreadable);
            store.settle_for(Settle::Likely);
            self.load(store, page, torn)
        }

        fn check(&self, store: &mut PageStore, page: PageIndex) -> Loaded {
            let mut reads = Vec::new();
            assert_eq!(store.check(page, 1, &|member| self.is_alive(member), &mut reads), Want::Loading);
            let loaded = self.serve(store, reads).pop().unwrap();
            store.release(page);
            loaded
        }

        /// Performs those sectors of a write that are in `sectors`. A bad sector that is written is good
        /// again.
        fn write(&mut self, io: &PageIo, sectors: u16) -> PageWrite {
            let PageIo::Write { write, member, offset, bytes, .. } = io else {
                panic!("a write-back reads nothing")
            };
            for (at, sector) in bytes.chunks(512).enumerate().filter(|(at, _)| sectors >> at & 1 == 1) {
                let start = *offset as usize + at * 512;
                self.members[usize::from(member.0)][start..][..512].copy_from_slice(sector);
                if at % 8 == 0 {
                    self.unreadable.remove(&(member.0, start as u64));
                }
            }
            *write
        }

        /// Writes back everything that is due, and flushes it.
        fn write_back(&mut self, store: &mut PageStore, epoch: u64) {
            store.freeze(epoch);
            for io in self.frozen_writes(store) {
                let write = self.write(&io, WHOLE);
                store.write_done(write, true);
            }
            store.thaw();
        }

        fn frozen_writes(&self, store: &mut PageStore) -> Vec<PageIo> {
            let mut writes = Vec::new();
            let targets = |member, which| which == Which::Primary && self.is_alive(member);
            // Some copies are read first.
            while !store.all_sent() {
                store.frozen_writes(usize::MAX, &targets, &pool(), &mut writes);
                let is_read = |io: &mut PageIo| matches!(io, PageIo::Read { .. });
                let reads = writes.extract_if(.., is_read).collect();
                assert!(self.serve(store, reads).is_empty(), "nothing is loaded");
            }
            writes
        }

        fn place(&mut self, store: &PageStore, page: PageIndex, copy: usize, place: usize) -> &mut [u8] {
            let (member, offset) = store.site.layout.copies(page).nth(copy).unwrap();
            &mut self.members[usize::from(member.0)][offset as usize + place * PAGE_BYTES..][..PAGE_BYTES]
        }

        fn mar(&mut self, store: &PageStore, page: PageIndex, copy: usize, place: usize, harm: Harm) {
            let (member, offset) = store.site.layout.copies(page).nth(copy).unwrap();
            match harm {
                Harm::Flip => self.place(store, page, copy, place)[1000] ^= 4,
                Harm::Zero => self.place(store, page, copy, place).fill(0),
                Harm::BadSector => {
                    self.unreadable.insert((member.0, offset + (place * PAGE_BYTES) as u64));
                }
            }
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Harm {
        Flip,
        Zero,
        BadSector,
    }

    fn harm() -> impl Strategy<Value = Harm> {
        prop_oneof![Just(Harm::Flip), Just(Harm::Zero), Just(Harm::BadSector)]
    }

    fn pool() -> Pool {
        Pool::new(0).unwrap()
    }

    fn member_of(store: &PageStore, page: PageIndex, copy: usize) -> MemberIndex {
        store.site.layout.copies(page).nth(copy).unwrap().0
    }

    /// Sets every entry of a page to `value`.
    fn fill(store: &mut PageStore, page: PageIndex, value: u8) {
        (0..PAGE_ENTRIES).for_each(|entry| store.set_and_show(page, entry, [value; 16]));
    }

    /// The value in every entry of a cached page.
    fn value(store: &PageStore, page: PageIndex) -> u8 {
        let entries = &store.at(page).page.entries;
        assert!(entries.iter().flatten().all(|&byte| byte == entries[0][0]), "a mix of versions");
        entries[0][0]
    }

    const LOST: u8 = 0xff;

    /// One life of the array in the model of crashes.
    #[derive(Clone, Debug)]
    struct Life {
        changes: bool,
        /// For each copy the sectors of the write-back that reach it; none when the write-back succeeds.
        cut: Option<Vec<u16>>,
        /// Harm done to the sick copies afterwards: copy, place, kind.
        harm: Vec<(usize, usize, Harm)>,
        /// The sick copies lose the writes of this life without an error.
        lost_writes: bool,
    }

    fn life() -> impl Strategy<Value = Life> {
        let sectors = prop_oneof![2 => Just(0), 2 => Just(WHOLE), 1 => Just(0xff), 1 => Just(0xff00), 5 => any::<u16>()];
        let cut = prop_oneof![1 => Just(None), 3 => prop::collection::vec(sectors, 4).prop_map(Some)];
        let harm = prop::collection::vec((0usize..4, 0usize..2, harm()), 0..3);
        (prop::bool::weighted(0.8), cut, harm, prop::bool::weighted(0.2))
            .prop_map(|(changes, cut, harm, lost_writes)| Life { changes, cut, harm, lost_writes })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        /// Lives that end in a crash during a write-back, each followed by the loss of every set of members
        /// that the array survives, with some copies sick throughout. Loads must give a version that can be
        /// right: the last that was written back whole, or one that was begun since.
        #[test]
        fn crashes_and_any_m_faults_never_lose_a_page(
            data in 1u16..4, parity in 0u16..4, page in 0u64..16, sick in 0usize..16,
            lives in prop::collection::vec(life(), 1..7),
        ) {
            let geometry = geometry(data, parity);
            let page = PageIndex(page);
            let copies = usize::from(parity) + 1;
            let sick = sick & ((1 << copies) - 1);
            let sick = if sick.count_ones() > u32::from(parity) { 0 } else { sick };
            let is_sick = |copy: usize| sick >> copy & 1 == 1;
            let mut disks = Disks::new(&new_store(geometry, 4));
            let mut possible = vec![0u8];
            let mut torn = Torn::Impossible;
            for (number, life) in lives.iter().enumerate() {
                let mut store = new_store(geometry, 4);
                let loaded = disks.load_patiently(&mut store, page, torn);
                prop_assert_eq!(loaded.outcome, LoadOutcome::Ready);
                prop_assert!(possible.contains(&value(&store, page)));
                let new = number as u8 + 1;
                // Replay writes the pages that the log names although nothing in them is new (R8).
                let changes = life.changes || torn == Torn::Possible;
                if changes {
                    fill(&mut store, page, new);
                }
                store.freeze(number as u64 + 1);
                for (at, io) in disks.frozen_writes(&mut store).iter().enumerate() {
                    let PageIo::Write { write, .. } = io else { unreachable!() };
                    let lost = life.lost_writes && is_sick(usize::from(write.copy));
                    let sectors = life.cut.as_ref().map_or(WHOLE, |cut| cut[at]);
                    disks.write(io, if lost { 0 } else { sectors });
                }
                if life.cut.is_none() {
                    torn = Torn::Impossible;
                    if changes {
                        possible = vec![new];
                    }
                } else if changes {
                    torn = Torn::Possible;
                    possible.push(new);
                }
                for &(copy, place, harm) in life.harm.iter().filter(|(copy, ..)| is_sick(*copy)) {
                    disks.mar(&store, page, copy, place, harm);
                }
                for dead in 0..1usize << copies {
                    if (dead | sick).count_ones() > u32::from(parity) {
                        continue;
                    }
                    let is_dead = |copy: &usize| dead >> copy & 1 == 1;
                    disks.dead = (0..copies).filter(is_dead).map(|copy| member_of(&store, page, copy)).collect();
                    let mut after = new_store(geometry, 4);
                    let loaded = disks.load_patiently(&mut after, page, torn);
                    prop_assert_eq!(loaded.outcome, LoadOutcome::Ready);
                    prop_assert!(possible.contains(&value(&after, page)), "{} of {:?}", value(&after, page), possible);
                    if torn == Torn::Impossible && life.cut.is_none() {
                        prop_assert_eq!(value(&after, page), possible[0]);
                    }
                    // Only sick copies ever count as errors, except for a repair that was cut off.
                    let blamed: MemberSet = loaded.faults.iter().map(|(member, _)| *member).collect();
                    let sick: MemberSet =
                        (0..copies).filter(|&copy| is_sick(copy)).map(|copy| member_of(&store, page, copy)).collect();
                    prop_assert!(blamed.is_subset(&sick), "{:?}", loaded.faults);
                }
                disks.dead = MemberSet::new();
            }
        }

        /// A copy that a load finds wrong counts as an error of the right member, and is whole again after
        /// the next write-back.
        #[test]
        fn bad_copies_are_named_and_healed(
            data in 1u16..4, parity in 1u16..4, page in 0u64..16, versions in 1u8..5, before in 0usize..4,
            harms in prop::collection::vec((any::<[bool; 2]>(), harm()), 3),
        ) {
            let geometry = geometry(data, parity);
            let page = PageIndex(page);
            let mut disks = Disks::new(&new_store(geometry, 4));
            // Some lives first, so that copies differ in which place is the newest: now and then a copy
            // misses one.
            for version in 1..=versions {
                let mut store = new_store(geometry, 4);
                disks.load(&mut store, page, Torn::Possible);
                fill(&mut store, page, version);
                store.freeze(1);
                for io in disks.frozen_writes(&mut store) {
                    let PageIo::Write { write, .. } = &io else { unreachable!() };
                    let missed = version < versions && usize::from(write.copy) == before && parity > 0;
                    disks.write(&io, if missed { 0 } else { WHOLE });
                }
            }
            let mut expected = Vec::new();
            for (copy, (places, harm)) in harms.iter().take(usize::from(parity)).enumerate() {
                let store = new_store(geometry, 4);
                let is_valid = |place: usize, disks: &mut Disks| {
                    let page = Page::decode(&KEY, ARRAY, page, disks.place(&store, page, copy, place)).ok();
                    page.map(|page| (version_of(&page), page.paired))
                };
                let versions = [is_valid(0, &mut disks), is_valid(1, &mut disks)];
                let newest = if versions[0] > versions[1] { 0 } else { 1 };
                let mut sick = None;
                for place in (0..2).filter(|&place| places[place]) {
                    disks.mar(&store, page, copy, place, *harm);
                    let shows = places[newest] && place == newest || matches!(harm, Harm::BadSector);
                    let other = versions[1 - place].filter(|_| !places[1 - place]);
                    let missing = matches!(harm, Harm::Zero) && matches!(other, Some((_, true)));
                    let damaged = versions[place].is_some() && (matches!(harm, Harm::Flip) || missing);
                    if shows || damaged {
                        sick = Some(match harm {
                            Harm::BadSector => CopyFault::Unreadable,
                            Harm::Flip => CopyFault::Damaged,
                            Harm::Zero if missing => CopyFault::Damaged,
                            Harm::Zero if versions[1 - newest].is_some() && !places[1 - newest] => CopyFault::Stale,
                            Harm::Zero => CopyFault::Blank,
                        });
                    }
                }
                expected.extend(sick.map(|fault| (member_of(&store, page, copy), fault)));
            }
            let mut store = new_store(geometry, 4);
            let loaded = disks.load(&mut store, page, Torn::Impossible);
            prop_assert_eq!(loaded.outcome, LoadOutcome::Ready);
            prop_assert_eq!(value(&store, page), versions);
            prop_assert_eq!(&loaded.faults, &expected);
            prop_assert_eq!(store.dirty_pages(), usize::from(!expected.is_empty()));
            // A place that might have been the newest is written when the other one has been.
            disks.write_back(&mut store, 2);
            disks.write_back(&mut store, 2);
            prop_assert_eq!(store.dirty_pages(), 0);
            prop_assert_eq!(disks.check(&mut store, page).faults, vec![]);
            let mut again = new_store(geometry, 4);
            prop_assert_eq!(disks.load(&mut again, page, Torn::Impossible).faults, vec![]);
            // A repair makes no new version: only bad copies were written.
            prop_assert_eq!(version_of(&again.at(page).page), version_of(&store.at(page).page));
            prop_assert_eq!(again.epoch_written(page), 1);
        }
    }

    /// A step in the model of the cache.
    #[derive(Clone, Debug)]
    enum Step {
        Want(u64),
        Set(u64, u8),
        Release(u64),
        Freeze,
        Send(usize),
        Write(usize),
        Thaw,
        Check(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0u64..14).prop_map(Step::Want),
            6 => (0u64..14, 1u8..0xff).prop_map(|(page, value)| Step::Set(page, value)),
            6 => (0u64..14).prop_map(Step::Release),
            2 => Just(Step::Freeze),
            4 => (1usize..4).prop_map(Step::Send),
            6 => (0usize..8).prop_map(Step::Write),
            3 => Just(Step::Thaw),
            1 => (0u64..14).prop_map(Step::Check),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// In whatever order loads, changes, evictions and write-backs come: a page reads as it was last set,
        /// it is written as it was at the freeze, and the members end up with all changes.
        #[test]
        fn a_small_cache_is_as_good_as_memory(
            data in 1u16..4, parity in 0u16..3, steps in prop::collection::vec(step(), 0..300),
        ) {
            let geometry = geometry(data, parity);
            let mut store = new_store(geometry, 3);
            let mut disks = Disks::new(&store);
            let mut model = [0u8; 14];
            let mut image = model;
            let mut pins = [0usize; 14];
            let mut pending: Vec<PageIo> = Vec::new();
            let mut is_frozen = false;
            for step in steps {
                match step {
                    Step::Want(at) => {
                        let mut reads = Vec::new();
                        if store.want(PageIndex(at), 7, Torn::Impossible, &|_| true, &mut reads) == Want::Loading {
                            let loaded = disks.serve(&mut store, reads).pop().unwrap();
                            prop_assert_eq!(loaded.waiters, vec![7]);
                            // A copy whose write is still under way is never read: none looks bad.
                            prop_assert_eq!(loaded.faults, vec![]);
                        }
                        pins[at as usize] += 1;
                        prop_assert_eq!(value(&store, PageIndex(at)), model[at as usize]);
                    }
                    Step::Set(at, new) if pins[at as usize] > 0 => {
                        let before = store.snapshot(PageIndex(at));
                        fill(&mut store, PageIndex(at), new);
                        prop_assert!(before.entries.iter().flatten().all(|&byte| byte == model[at as usize]));
                        model[at as usize] = new;
                    }
                    Step::Release(at) if pins[at as usize] > 0 => {
                        store.release(PageIndex(at));
                        pins[at as usize] -= 1;
                    }
                    Step::Freeze if !is_frozen => {
                        store.freeze(1);
                        image = model;
                        is_frozen = true;
                    }
                    Step::Send(pages) => {
                        store.frozen_writes(pages, &|_, which| which == Which::Primary, &pool(), &mut pending);
                    }
                    Step::Write(at) if at < pending.len() => {
                        let io = pending.swap_remove(at);
                        let PageIo::Write { write, bytes, .. } = &io else { unreachable!() };
                        let page = Page::decode(&KEY, ARRAY, write.page, &bytes[..PAGE_BYTES]).unwrap();
                        prop_assert!(page.entries.iter().flatten().all(|&byte| byte == image[write.page.0 as usize]));
                        let write = disks.write(&io, WHOLE);
                        store.write_done(write, true);
                    }
                    Step::Thaw if is_frozen && store.is_written() => {
                        store.thaw();
                        is_frozen = false;
                    }
                    Step::Check(at) => {
                        let mut reads = Vec::new();
                        match store.check(PageIndex(at), 7, &|_| true, &mut reads) {
                            Want::Loading => {
                                prop_assert_eq!(disks.serve(&mut store, reads).pop().unwrap().faults, vec![]);
                            }
                            Want::BeingWritten => continue,
                            Want::Cached | Want::Unavailable => unreachable!("no page is lost"),
                        }
                        store.release(PageIndex(at));
                    }
                    _ => {}
                }
            }
            if is_frozen {
                pending.extend(disks.frozen_writes(&mut store));
                for io in pending {
                    let write = disks.write(&io, WHOLE);
                    store.write_done(write, true);
                }
                store.thaw();
            }
            disks.write_back(&mut store, 2);
            for at in 0..14 {
                (0..std::mem::take(&mut pins[at as usize])).for_each(|_| store.release(PageIndex(at)));
            }
            let mut after = new_store(geometry, 100);
            for at in 0..14 {
                let mut reads = Vec::new();
                if store.want(PageIndex(at), 7, Torn::Impossible, &|_| true, &mut reads) == Want::Loading {
                    disks.serve(&mut store, reads);
                }
                store.release(PageIndex(at));
                disks.load(&mut after, PageIndex(at), Torn::Impossible);
                prop_assert_eq!(value(&after, PageIndex(at)), model[at as usize]);
            }
            prop_assert!(store.cached_pages() <= 3 && store.dirty_pages() == 0);
        }
    }

    /// A page of hashes of [`small`].
    const PAGE: PageIndex = PageIndex(9);

    /// An array of 2 + 1 with one page written in some versions, without its store.
    fn small(versions: u8) -> (Geometry, Disks) {
        let geometry = geometry(2, 1);
        let mut disks = Disks::new(&new_store(geometry, 4));
        for version in 1..=versions {
            let mut store = new_store(geometry, 4);
            disks.load(&mut store, PAGE, Torn::Impossible);
            fill(&mut store, PAGE, version);
            disks.write_back(&mut store, u64::from(version));
        }
        (geometry, disks)
    }

    #[test]
    fn beyond_the_budget_a_page_is_lost_and_not_taken_for_blank_or_old() {
        for versions in [1, 2] {
            let (geometry, mut disks) = small(versions);
            let mut store = new_store(geometry, 4);
            for copy in 0..2 {
                (0..usize::from(versions)).for_each(|place| disks.mar(&store, PAGE, copy, place, Harm::Flip));
            }
            for _ in 0..2 {
                let loaded = disks.load(&mut store, PAGE, Torn::Impossible);
                assert_eq!((loaded.outcome, loaded.unread), (LoadOutcome::Lost, None));
                assert_eq!(loaded.faults.len(), 2);
                assert_eq!(value(&store, PAGE), LOST);
                assert!(store.is_lost(PAGE));
                assert_eq!(store.dirty_pages(), 0, "what may still be there is not written over");
                // The page was not changed: the next request has it read again.
                store.release(PAGE);
            }
        }
    }

    /// T3: an error is no content. Whatever else is wrong, the page cannot be had, nothing is written, and
    /// when the error has passed everything is as it was.
    #[test]
    fn a_page_is_neither_lost_nor_old_because_of_errors() {
        // A copy that reads as zeroes may pass for one that was never written: wrong content, not an error.
        let harms = [Harm::BadSector, Harm::Flip];
        let others = harms.into_iter().flat_map(|harm| [Some((harm, 0)), Some((harm, 1))]).chain([None]);
        let others: Vec<_> = others.collect();
        let places = [vec![0], vec![1], vec![0, 1]];
        for (page, places) in
            [PageIndex(0), PAGE].into_iter().flat_map(|page| places.clone().map(|p| (page, p)))
        {
            for other in others.clone() {
                let geometry = geometry(2, 1);
                let mut disks = Disks::new(&new_store(geometry, 4));
                for version in 1..=2 {
                    let mut store = new_store(geometry, 4);
                    disks.load(&mut store, page, Torn::Impossible);
                    fill(&mut store, page, version);
                    disks.write_back(&mut store, u64::from(version));
                }
                let mut store = new_store(geometry, 4);
                for place in &places {
                    disks.mar(&store, page, 0, *place, Harm::BadSector);
                }
                match other {
                    Some((harm, place)) => disks.mar(&store, page, 1, place, harm),
                    None => drop(disks.dead.insert(member_of(&store, page, 1))),
                }
                let before = disks.members.clone();
                let context = format!("{page:?} {places:?} {other:?}");
                for torn in [Torn::Impossible, Torn::Unnamed, Torn::Possible] {
                    let loaded = disks.load(&mut store, page, torn);
                    let is_damaged = matches!(other, Some((Harm::Flip, _)));
                    let unread = loaded.unread.expect("a copy was not read");
                    assert_eq!(loaded.outcome, LoadOutcome::Unreadable, "{context} {torn:?}");
                    assert_eq!(loaded.faults, [], "no error is counted as long as nothing is known");
                    assert!(unread.by_error);
                    assert_eq!(
                        unread.is_likely,
                        torn != Torn::Impossible && is_damaged,
                        "{context} {torn:?}"
                    );
                    assert!(!store.cached.contains_key(&page) && store.dirty_pages() == 0);
                }
                disks.unreadable.clear();
                let loaded = disks.load(&mut store, page, Torn::Impossible);
                assert_eq!(loaded.outcome, LoadOutcome::Ready, "{context}");
                assert_eq!(value(&store, page), 2, "{context}");
                assert_eq!(disks.members, before);
            }
        }
    }

    #[test]
    fn with_a_version_remembered_one_copy_is_enough_and_an_older_one_is_known_to_be_old() {
        let (geometry, mut disks) = small(2);
        let mut store = new_store(geometry, 0);
        disks.load(&mut store, PAGE, Torn::Impossible);
        fill(&mut store, PAGE, 3);
        store.release(PAGE);
        disks.write_back(&mut store, 3);
        assert_eq!(store.cached_pages(), 0);
        // Version 3 is in the first place of each copy.
        disks.dead.insert(member_of(&store, PAGE, 0));
        disks.mar(&store, PAGE, 1, 1, Harm::BadSector);
        assert_eq!(
            disks.load(&mut new_store(geometry, 0), PAGE, Torn::Impossible).outcome,
            LoadOutcome::Unreadable
        );
        let loaded = disks.load(&mut store, PAGE, Torn::Impossible);
        assert_eq!(loaded.outcome, LoadOutcome::Ready);
        assert_eq!(value(&store, PAGE), 3);
        store.release(PAGE);
        disks.write_back(&mut store, 3);
        assert_eq!(store.cached_pages(), 0);
        disks.unreadable.clear();
        // A copy without any fault, except that a newer version is remembered.
        let (old, place) = (small(2).1, disks.place(&store, PAGE, 1, 0).to_vec());
        let (member, offset) = store.site.layout.copies(PAGE).nth(1).unwrap();
        let bytes = &old.members[usize::from(member.0)][offset as usize..][..2 * PAGE_BYTES];
        disks.members[usize::from(member.0)][offset as usize..][..2 * PAGE_BYTES].copy_from_slice(bytes);
        assert_eq!(
            disks.load(&mut new_store(geometry, 0), PAGE, Torn::Impossible).outcome,
            LoadOutcome::Ready
        );
        assert_eq!(disks.load(&mut store, PAGE, Torn::Impossible).outcome, LoadOutcome::Unreadable);
        // The write was lost in the cache of the device, and is there again.
        disks.place(&store, PAGE, 1, 0).copy_from_slice(&place);
        assert_eq!(disks.load(&mut store, PAGE, Torn::Impossible).outcome, LoadOutcome::Ready);
        assert_eq!(value(&store, PAGE), 3);
    }

    /// T3: a place of a copy that could not be read is read again before the copy is written. So a power cut
    /// in that write leaves the copy its newest version, if it can be read by then.
    #[test]
    fn a_place_that_could_not_be_read_is_not_written_over() {
        for (places, clears, changes) in [vec![0], vec![1], vec![0, 1]].into_iter().flat_map(|places| {
            [(true, true), (true, false), (false, true), (false, false)]
                .map(|(clears, changes)| (places.clone(), clears, changes))
        }) {
            for versions in 1..=3u8 {
                let (geometry, mut disks) = small(versions);
                let mut store = new_store(geometry, 4);
                places.iter().for_each(|&place| disks.mar(&store, PAGE, 1, place, Harm::BadSector));
                let other = member_of(&store, PAGE, 0);
                assert_eq!(disks.load(&mut store, PAGE, Torn::Impossible).outcome, LoadOutcome::Ready);
                if clears {
                    disks.unreadable.clear();
                }
                if changes {
                    fill(&mut store, PAGE, 9);
                }
                store.freeze(4);
                let writes = disks.frozen_writes(&mut store);
                let context = format!("{places:?} {clears} {changes} {versions}");
                let to_copy = |io: &&PageIo| matches!(io, PageIo::Write { member, .. } if *member != other);
                assert_eq!(
                    writes.iter().filter(to_copy).count(),
                    usize::from(changes || !clears),
                    "{context}"
                );
                for io in &writes {
                    disks.write(io, 0b1111);
                }
                // After the cut everything can be read, and the other copy is gone.
                disks.unreadable.clear();
                disks.dead.insert(other);
                let mut after = new_store(geometry, 4);
                let torn = if changes { Torn::Possible } else { Torn::Impossible };
                let loaded = disks.load(&mut after, PAGE, torn);
                if clears || places.len() == 1 {
                    assert!(
                        matches!(loaded.outcome, LoadOutcome::Ready | LoadOutcome::Unreadable),
                        "{context}"
                    );
                    let newest = loaded.outcome == LoadOutcome::Ready;
                    assert!(newest || !changes, "{context}");
                    assert!(!newest || value(&after, PAGE) == versions, "{context}");
                } else {
                    // The fault was there at the cut: with the other copy gone that is more than the array
                    // survives.
                    assert_ne!(loaded.outcome, LoadOutcome::Behind, "{context}");
                }
            }
        }
    }

    #[test]
    fn where_every_copy_is_at_fault_an_older_version_is_not_taken_for_the_newest() {
        let geometry = geometry(2, 1);
        for page in [PageIndex(0), PAGE] {
            let mut disks = Disks::new(&new_store(geometry, 4));
            for version in 1..=2 {
                let mut store = new_store(geometry, 4);
                disks.load(&mut store, page, Torn::Impossible);
                (0..version).for_each(|at| store.set_and_show(page, at, [version as u8; 16]));
                disks.write_back(&mut store, version as u64);
            }
            let mut store = new_store(geometry, 4);
            disks.mar(&store, page, 0, 1, Harm::Flip);
            disks.mar(&store, page, 1, 1, Harm::Flip);
            let loaded = disks.load(&mut store, page, Torn::Impossible);
            assert_eq!(loaded.faults.len(), 2);
            let entries = store.snapshot(page).entries.clone();
            assert_eq!(entries[0], [1; 16], "what there is");
            if page == PAGE {
                assert_eq!(loaded.outcome, LoadOutcome::Ready);
                assert!(
                    entries[1..].iter().all(|entry| *entry == BlockHash::LOST.0),
                    "a written block is not blank"
                );
                // Until the page is changed: its copies stay as they are.
                assert!(loaded.is_kept && store.dirty_pages() == 0);
                store.release(page);
                assert_eq!(disks.load(&mut store, page, Torn::Impossible).faults, loaded.faults);
                store.set_and_show(page, 0, [3; 16]);
            } else {
                assert_eq!(loaded.outcome, LoadOutcome::Behind);
                // Repaired unchanged, it is settled.
            }
            disks.write_back(&mut store, 3);
            let mut again = new_store(geometry, 4);
            let loaded = disks.load(&mut again, page, Torn::Impossible);
            assert_eq!((loaded.outcome, loaded.faults), (LoadOutcome::Ready, vec![]));
            assert_eq!(again.snapshot(page).entries[1..], entries[1..]);
            assert!(page != PAGE || again.snapshot(page).sequence > 1 << 32, "ahead of what was hidden");
        }
    }

    #[test]
    fn a_lost_page_that_is_written_again_supersedes_whatever_was_damaged() {
        let (geometry, mut disks) = small(4);
        let mut store = new_store(geometry, 4);
        for (copy, place) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            disks.mar(&store, PAGE, copy, place, Harm::Flip);
        }
        assert_eq!(disks.load(&mut store, PAGE, Torn::Impossible).outcome, LoadOutcome::Lost);
        store.set_and_show(PAGE, 5, [3; 16]);
        disks.write_back(&mut store, 1);
        let mut store = new_store(geometry, 4);
        let loaded = disks.load(&mut store, PAGE, Torn::Impossible);
        assert_eq!((loaded.outcome, loaded.faults), (LoadOutcome::Ready, vec![]));
        let entries = store.snapshot(PAGE).entries.clone();
        assert!(entries.iter().enumerate().all(|(at, entry)| *entry == [if at == 5 { 3 } else { LOST }; 16]));
    }

    #[test]
    fn a_bad_sector_in_one_place_does_not_hide_the_other() {
        let (geometry, mut disks) = small(2);
        let mut store = new_store(geometry, 4);
        disks.mar(&store, PAGE, 1, 0, Harm::BadSector);
        let loaded = disks.load(&mut store, PAGE, Torn::Impossible);
        assert_eq!(loaded.outcome, LoadOutcome::Ready);
        assert_eq!(loaded.faults, [(member_of(&store, PAGE, 1), CopyFault::Unreadable)]);
        assert_eq!(value(&store, PAGE), 2);
        disks.write_back(&mut store, 2);
        assert!(disks.unreadable.is_empty(), "the bad sector was written, not the good one");
        store.release(PAGE);
        assert_eq!(disks.check(&mut store, PAGE).faults, []);
    }

    /// The copy on a device that was built while a page could not be read is marked so, and does not look as
    /// if the page was never written.
    #[test]
    fn a_device_built_without_a_page_is_no_witness_for_it() {
        for recovers_before_it_joins in [true, false] {
            let (geometry, mut disks) = small(2);
            let mut store = new_store(geometry, 4);
            let (member, other) = (member_of(&store, PAGE, 0), member_of(&store, PAGE, 1));
            store.left(member);
            disks.dead.insert(member);
            for place in 0..2 {
                disks.mar(&store, PAGE, 1, place, Harm::BadSector);
                disks.place(&store, PAGE, 0, place).fill(0);
            }
            assert_eq!(disks.load(&mut store, PAGE, Torn::Impossible).outcome, LoadOutcome::Unreadable);
            store.void(PAGE, member, Which::Primary);
            assert_eq!(store.dirty_pages(), 1);
            disks.dead = MemberSet::new();
            disks.write_back(&mut store, 3);
            assert_eq!(store.dirty_pages(), 0);
            let mut cold = new_store(geometry, 4);
            assert_eq!(disks.load(&mut cold, PAGE, Torn::Impossible).outcome, LoadOutcome::Unreadable);
            if recovers_before_it_joins {
                disks.unreadable.clear();
                disks.dead.insert(member);
                disks.load(&mut store, PAGE, Torn::Impossible);
                disks.dead = MemberSet::new();
                disks.write_back(&mut store, 3);
            }
            store.joined(member, Which::Primary);
            disks.unreadable.clear();
            let mut cold = new_store(geometry, 4);
            let loaded = disks.load(&mut cold, PAGE, Torn::Impossible);
            assert_eq!(loaded.outcome, LoadOutcome::Ready);
            assert_eq!(value(&cold, PAGE), 2);
            let expected = [(member, CopyFault::Damaged)];
            assert_eq!(loaded.faults, if recovers_before_it_joins { &[][..] } else { &expected[..] });
            disks.write_back(&mut cold, 3);
            disks.dead.insert(other);
            let mut cold = new_store(geometry, 4);
            disks.load(&mut cold, PAGE, Torn::Impossible);
            assert_eq!(value(&cold, PAGE), 2, "it has the page now");
        }
    }

    #[test]
    fn a_bad_copy_of_a_page_never_written_becomes_blank_and_nothing_else_is_written() {
        let (geometry, mut disks) = small(0);
        let mut store = new_store(geometry, 4);
        disks.mar(&store, PAGE, 1, 1, Harm::BadSector);
        let loaded = disks.load(&mut store, PAGE, Torn::Impossible);
        assert_eq!(loaded.outcome, LoadOutcome::Ready);
        assert_eq!(loaded.faults, [(member_of(&store, PAGE, 1), CopyFault::Unreadable)]);
        assert!(store.is_blank(PAGE));
        disks.write_back(&mut store, 2);
        assert!(disks.unreadable.is_empty());
        assert!(disks.members.iter().flatten().all(|&byte| byte == 0));
    }

    #[test]
    fn all_requests_for_a_page_share_one_load_and_each_pins_it() {
        let (geometry, disks) = small(1);
        let mut store = new_store(geometry, 4);
        let mut reads = Vec::new();
        for key in [3, 5] {
            assert_eq!(store.want(PAGE, key, Torn::Impossible, &|_| true, &mut reads), Want::Loading);
        }
        assert_eq!(reads.len(), 2, "one read of each copy");
        let loaded = disks.serve(&mut store, reads).pop().unwrap();
        assert_eq!(loaded.waiters, [3, 5]);
        assert_eq!(store.want(PAGE, 6, Torn::Impossible, &|_| true, &mut Vec::new()), Want::Cached);
        assert_eq!(store.at(PAGE).pins, 3);
    }

    #[test]
    fn a_member_that_leaves_during_a_load_has_everybody_ask_again() {
        let (geometry, disks) = small(1);
        let mut store = new_store(geometry, 4);
        for cached in [false, true] {
            let mut reads = Vec::new();
            let wanted = if cached {
                disks.load(&mut store, PAGE, Torn::Impossible);
                store.check(PAGE, 3, &|_| true, &mut reads)
            } else {
                store.want(PAGE, 3, Torn::Impossible, &|_| true, &mut reads)
            };
            assert_eq!(wanted, Want::Loading);
            let Some(PageIo::Read { read, .. }) = reads.pop() else { panic!("two reads") };
            assert!(store.read_done(read, Answer::Gone, &mut Vec::new()).is_none());
            let loaded = disks.serve(&mut store, reads).pop().unwrap();
            assert_eq!((loaded.outcome, loaded.waiters), (LoadOutcome::AskAgain, vec![3]));
            assert_eq!(store.cached.get(&PAGE).map(|cached| cached.pins), cached.then_some(1));
        }
        assert_eq!(store.check(PageIndex(11), 3, &|_| false, &mut Vec::new()), Want::Unavailable);
        assert_eq!(
            store.want(PageIndex(11), 3, Torn::Impossible, &|_| false, &mut Vec::new()),
            Want::Unavailable
        );
    }

    #[test]
    fn a_check_finds_a_copy_that_went_bad_behind_the_cache_and_mends_it() {
        let (geometry, mut disks) = small(3);
        let mut store = new_store(geometry, 4);
        disks.load(&mut store, PAGE, Torn::Impossible);
        assert_eq!(disks.check(&mut store, PAGE).faults, []);
        disks.mar(&store, PAGE, 0, 0, Harm::Flip);
        let fault = [(member_of(&store, PAGE, 0), CopyFault::Damaged)];
        assert_eq!(disks.check(&mut store, PAGE).faults, fault);
        disks.write_back(&mut store, 9);
        assert_eq!(disks.check(&mut store, PAGE).faults, []);
        assert_eq!(store.epoch_written(PAGE), 3);
    }

    #[test]
    fn a_check_does_not_mistake_a_write_under_way_for_a_fault() {
        let (geometry, mut disks) = small(3);
        let mut store = new_store(geometry, 4);
        disks.load(&mut store, PAGE, Torn::Impossible);
        let mut reads = Vec::new();
        assert_eq!(store.check(PAGE, 1, &|_| true, &mut reads), Want::Loading);
        fill(&mut store, PAGE, 7);
        let mut none = Vec::new();
        store.freeze(4);
        assert_eq!(store.check(PAGE, 2, &|_| true, &mut none), Want::BeingWritten);
        assert!(none.is_empty());
        for io in disks.frozen_writes(&mut store) {
            let write = disks.write(&io, WHOLE);
            store.write_done(write, true);
        }
        let told = disks.serve(&mut store, reads).pop().unwrap();
        assert_eq!((told.outcome, told.faults), (LoadOutcome::AskAgain, vec![]));
        store.thaw();
        assert_eq!(disks.check(&mut store, PAGE).faults, []);
        assert_eq!(store.dirty_pages(), 0);
    }

    #[test]
    fn a_page_that_is_marked_while_a_write_back_is_flushed_is_told_by_the_next() {
        let (geometry, _) = small(2);
        let mut store = new_store(geometry, 4);
        let member = member_of(&store, PAGE, 1);
        store.left(member);
        store.freeze(4);
        assert!(store.is_written());
        store.void(PAGE, member, Which::Primary);
        assert!(store.is_written(), "it is no part of this one");
        store.thaw();
        assert_eq!(store.dirty_pages(), 1);
        store.freeze(4);
        assert!(!store.is_written());
        let mut out = Vec::new();
        store.frozen_writes(4, &|_, _| true, &Pool::new(0).unwrap(), &mut out);
        let Some(PageIo::Write { write, .. }) = out.pop() else { panic!("a mark is written") };
        assert!(write.is_void && out.is_empty());
        store.write_done(write, true);
        store.thaw();
        assert_eq!(store.dirty_pages(), 0);
    }

    #[test]
    fn a_device_is_still_told_of_a_page_whose_load_came_to_nothing() {
        let (geometry, _) = small(2);
        let mut store = new_store(geometry, 4);
        let mut disks = Disks::new(&store);
        let new = member_of(&store, PAGE, 1);
        store.left(new);
        disks.dead.insert(new);
        store.void(PAGE, new, Which::Primary);
        // The other copy shows no version, and the page must have one because its slots hold data.
        let loaded = disks.load(&mut store, PAGE, Torn::Impossible);
        assert!(loaded.outcome == LoadOutcome::Ready && loaded.unread.is_some());
        store.retract_blank(PAGE);
        assert!(store.is_void_on(PAGE, new, Which::Primary));
        store.freeze(4);
        let mut out = Vec::new();
        store.frozen_writes(4, &|_, _| true, &Pool::new(0).unwrap(), &mut out);
        let Some(PageIo::Write { write, member, .. }) = out.pop() else { panic!("a mark is written") };
        assert!(write.is_void && member == new && out.is_empty());
    }

    #[test]
    fn a_page_that_was_left_alone_and_shows_no_version_elsewhere_is_blank() {
        let (geometry, _) = small(2);
        let mut store = new_store(geometry, 4);
        let mut disks = Disks::new(&store);
        let own = member_of(&store, PAGE, 1);
        store.left(own);
        disks.dead.insert(own);
        store.leave_alone(PAGE, own);
        let loaded = disks.load(&mut store, PAGE, Torn::Impossible);
        assert!(loaded.outcome == LoadOutcome::Ready && loaded.unread.is_some());
        assert!(store.is_blank(PAGE), "or what its slots hold reads as zeroes");
        store.retract_blank(PAGE);
        store.freeze(4);
        assert!(store.is_written(), "it is left alone");
    }

    #[test]
    fn a_load_that_read_from_a_device_proves_nothing_about_the_one_in_its_place() {
        let (geometry, _) = small(2);
        let mut store = new_store(geometry, 4);
        let disks = Disks::new(&store);
        let member = member_of(&store, PAGE, 1);
        store.void(PAGE, member, Which::Replacement);
        let mut reads = Vec::new();
        assert_eq!(store.want(PAGE, 1, Torn::Impossible, &|_| true, &mut reads), Want::Loading);
        store.joined(member, Which::Replacement);
        let loaded = disks.serve(&mut store, reads).pop().unwrap();
        assert_eq!(loaded.outcome, LoadOutcome::AskAgain);
    }

    #[test]
    fn a_check_that_read_a_copy_before_its_repair_is_not_believed() {
        // The copy is behind, or shows nothing: its repair is the only version it has.
        for places in [vec![1], vec![0, 1]] {
            let (geometry, mut disks) = small(2);
            let mut store = new_store(geometry, 4);
            let (member, other) = (member_of(&store, PAGE, 1), member_of(&store, PAGE, 0));
            places.iter().for_each(|&place| disks.mar(&store, PAGE, 1, place, Harm::Zero));
            assert_eq!(disks.load(&mut store, PAGE, Torn::Impossible).faults.len(), 1);
            let mut reads = Vec::new();
            assert_eq!(store.check(PAGE, 1, &|_| true, &mut reads), Want::Loading);
            // One device has answered the check; the other takes long, and a whole write-back passes.
            let at =
                reads.iter().position(|io| matches!(io, PageIo::Read { member: of, .. } if *of == member));
            let early = reads.remove(at.expect("a read of either copy"));
            assert!(disks.serve(&mut store, vec![early]).is_empty());
            disks.write_back(&mut store, 2);
            let told = disks.serve(&mut store, reads).pop().unwrap();
            assert_eq!(told.faults, [], "no error is counted for a repaired copy");
            // A power cut in the next write leaves the version before on the copy.
            fill(&mut store, PAGE, 9);
            store.freeze(3);
            for io in disks.frozen_writes(&mut store) {
                disks.write(&io, 0b1111);
            }
            disks.dead = [other].into_iter().collect();
            let mut after = new_store(geometry, 4);
            disks.load(&mut after, PAGE, Torn::Possible);
            assert_eq!(value(&after, PAGE), 2, "{places:?}");
        }
    }

    #[test]
    fn a_check_finds_a_copy_that_went_bad_under_a_changed_page_and_counts_it_once() {
        let (geometry, mut disks) = small(3);
        for place in 0..2 {
            let mut store = new_store(geometry, 4);
            disks.load(&mut store, PAGE, Torn::Impossible);
            fill(&mut store, PAGE, 7);
            disks.mar(&store, PAGE, 0, place, Harm::Flip);
            let fault = [(member_of(&store, PAGE, 0), CopyFault::Damaged)];
            assert_eq!(disks.check(&mut store, PAGE).faults, fault);
            assert_eq!(disks.check(&mut store, PAGE).faults, []);
            disks.write_back(&mut store, 9);
            assert_eq!(disks.check(&mut store, PAGE).faults, []);
        }
    }

    #[test]
    fn a_member_under_construction_gets_every_copy_whole() {
        let (primary, replacement) = (Which::Primary, Which::Replacement);
        for (which, was_in_service) in
            [(primary, false), (primary, true), (replacement, false), (replacement, true)]
        {
            let (geometry, mut disks) = small(3);
            let mut store = new_store(geometry, 4);
            let (member, other) = (member_of(&store, PAGE, 0), member_of(&store, PAGE, 1));
            let blank =
                (1..).map(PageIndex).find(|&page| page != PAGE && member_of(&store, page, 1) == member);
            let pages = [(PAGE, 0), (blank.unwrap(), 1)];
            if !was_in_service {
                disks.dead.insert(member);
            }
            for (page, _) in pages {
                disks.load(&mut store, page, Torn::Impossible);
            }
            assert_eq!(store.unknown_on(member).is_empty(), was_in_service);
            // The device was in the array before, and shows a version newer than the array ever had.
            let mut old = Page::blank();
            (old.sequence, old.epoch) = (50, 2);
            for ((page, copy), place) in pages.into_iter().flat_map(|page| [(page, 0), (page, 1)]) {
                let bytes = old.encode(&KEY, ARRAY, page);
                disks.place(&store, page, copy, place).copy_from_slice(&bytes);
            }
            for (page, _) in pages {
                store.rebuild(page, member, which);
            }
            store.freeze(4);
            let mut writes = Vec::new();
            let is_target = |to: MemberIndex, device: Which| to != member || device == which;
            store.frozen_writes(usize::MAX, &is_target, &pool(), &mut writes);
            assert_eq!(writes.len(), 2, "only what is being built");
            for io in &writes {
                let PageIo::Write { member: to, which: device, .. } = io else { unreachable!() };
                assert_eq!((*to, *device), (member, which));
                let write = disks.write(io, WHOLE);
                store.write_done(write, true);
            }
            store.thaw();
            assert_eq!(store.unknown_on(member).is_empty(), was_in_service || which == primary);
            disks.dead = MemberSet::new();
            for dead in [None, Some(other)] {
                disks.dead = dead.into_iter().collect();
                let mut after = new_store(geometry, 4);
                assert_eq!(disks.load(&mut after, PAGE, Torn::Impossible).faults, []);
                assert_eq!(value(&after, PAGE), 3);
                assert_eq!(disks.load(&mut after, pages[1].0, Torn::Impossible).faults, []);
                assert!(after.is_blank(pages[1].0));
            }
        }
    }

    #[test]
    fn the_first_version_of_a_page_that_was_blank_when_a_device_joined_is_no_fault_of_the_device() {
        let (geometry, mut disks) = small(0);
        for page in [PageIndex(0), PAGE] {
            let mut store = new_store(geometry, 4);
            let (member, other) = (member_of(&store, page, 0), member_of(&store, page, 1));
            disks.load(&mut store, page, Torn::Impossible);
            // The member is out, and a new device is built for it: the page is blank.
            store.left(member);
            store.rebuild(page, member, Which::Primary);
            disks.write_back(&mut store, 1);
            store.joined(member, Which::Primary);
            store.set_and_show(page, 0, [1; 16]);
            disks.write_back(&mut store, 2);
            for dead in [None, Some(other)] {
                disks.dead = dead.into_iter().collect();
                let mut after = new_store(geometry, 4);
                let loaded = disks.load(&mut after, page, Torn::Impossible);
                assert_eq!(
                    (loaded.outcome, loaded.faults),
                    (LoadOutcome::Ready, vec![]),
                    "{page:?} {dead:?}"
                );
                assert_eq!(after.snapshot(page).entries[1], [0; 16], "nothing was written there");
            }
            disks.dead = MemberSet::new();
        }
    }

    #[test]
    fn the_first_version_after_a_blank_page_was_healed_is_no_fault() {
        for (places, harm) in [(vec![0], Harm::Flip), (vec![0], Harm::BadSector), (vec![1], Harm::BadSector)]
        {
            let (geometry, mut disks) = small(0);
            let mut store = new_store(geometry, 4);
            let other = member_of(&store, PAGE, 0);
            for &place in &places {
                disks.place(&store, PAGE, 1, place).copy_from_slice(&[0; PAGE_BYTES]);
                if matches!(harm, Harm::Flip) {
                    disks.place(&store, PAGE, 1, place)[..64].fill(0x34);
                    disks.place(&store, PAGE, 1, place)[16..32].copy_from_slice(ARRAY.as_bytes());
                } else {
                    disks.mar(&store, PAGE, 1, place, harm);
                }
            }
            disks.load(&mut store, PAGE, Torn::Impossible);
            disks.write_back(&mut store, 1);
            assert_eq!(disks.check(&mut store, PAGE).faults, []);
            let mut store = new_store(geometry, 4);
            // As within one life: repaired, then written.
            for &place in &places {
                if matches!(harm, Harm::Flip) {
                    disks.place(&store, PAGE, 1, place)[16..32].copy_from_slice(ARRAY.as_bytes());
                } else {
                    disks.mar(&store, PAGE, 1, place, harm);
                }
            }
            disks.load(&mut store, PAGE, Torn::Impossible);
            disks.write_back(&mut store, 1);
            store.set_and_show(PAGE, 0, [1; 16]);
            disks.write_back(&mut store, 2);
            for dead in [None, Some(other)] {
                disks.dead = dead.into_iter().collect();
                let mut after = new_store(geometry, 4);
                let loaded = disks.load(&mut after, PAGE, Torn::Impossible);
                assert_eq!(
                    (loaded.outcome, loaded.faults),
                    (LoadOutcome::Ready, vec![]),
                    "{places:?} {harm:?} {dead:?}"
                );
                assert_eq!(after.snapshot(PAGE).entries[1], [0; 16], "nothing was written there");
            }
        }
    }

    #[test]
    fn a_change_reaches_devices_under_construction_whole() {
        let (geometry, mut disks) = small(2);
        let mut store = new_store(geometry, 4);
        disks.load(&mut store, PAGE, Torn::Impossible);
        fill(&mut store, PAGE, 9);
        store.freeze(4);
        let mut writes = Vec::new();
        store.frozen_writes(usize::MAX, &|_, _| true, &pool(), &mut writes);
        let lengths: Vec<(Which, usize)> = writes
            .iter()
            .map(|io| match io {
                PageIo::Write { which, bytes, .. } => (*which, bytes.len()),
                PageIo::Read { .. } => panic!("a write-back reads nothing"),
            })
            .collect();
        let (primary, replacement) = ((Which::Primary, PAGE_BYTES), (Which::Replacement, 2 * PAGE_BYTES));
        assert_eq!(lengths, [primary, replacement, primary, replacement]);
        for io in writes {
            let write = disks.write(&io, WHOLE);
            store.write_done(write, true);
        }
        store.thaw();
        assert!((0..3).all(|member| store.unknown_on(MemberIndex(member)).is_empty()));
    }

    #[test]
    fn a_member_that_missed_a_write_is_known_again_by_a_check_or_a_write() {
        let (geometry, mut disks) = small(2);
        let mut store = new_store(geometry, 4);
        disks.load(&mut store, PAGE, Torn::Impossible);
        let member = member_of(&store, PAGE, 1);
        disks.dead.insert(member);
        fill(&mut store, PAGE, 9);
        disks.write_back(&mut store, 3);
        assert_eq!(store.unknown_on(member), [PAGE]);
        // While it is away more pages are loaded, and one is being loaded when the list is asked for.
        let next = PageIndex(PAGE.0 + 3);
        assert_eq!(member_of(&store, next, 1), member);
        let mut reads = Vec::new();
        store.want(next, 1, Torn::Impossible, &|member| disks.is_alive(member), &mut reads);
        assert_eq!(store.unknown_on(member), [PAGE, next]);
        disks.serve(&mut store, reads);
        assert_eq!(store.unknown_on(member), [PAGE, next]);
        disks.dead = MemberSet::new();
        assert_eq!(disks.check(&mut store, PAGE).faults, [(member, CopyFault::Stale)]);
        assert_eq!(disks.check(&mut store, next).faults, []);
        assert_eq!(store.unknown_on(member), []);
        disks.write_back(&mut store, 4);
        assert_eq!(disks.check(&mut store, PAGE).faults, []);
    }

    #[test]
    fn hashes_set_together_are_those_set_one_by_one() {
        let geometry = geometry(2, 1);
        let (mut one, mut together) = (new_store(geometry, 64), new_store(geometry, 64));
        let rows = (u64::from(geometry.chunk) / ROW_BYTES) as usize;
        let slot = SlotIndex(geometry.slots - 1);
        for store in [&mut one, &mut together] {
            let disks = Disks::new(store);
            for page in store.layout().hash_pages(slot, 0..rows).map(PageIndex) {
                disks.load(store, page, Torn::Impossible);
            }
        }
        let columns = [2, 0].map(ColumnIndex);
        let hashes: Vec<BlockHash> = (0..2 * (rows - 1)).map(|at| BlockHash([at as u8 + 1; 16])).collect();
        together.set_hashes(slot, 1..rows, columns.into_iter(), &hashes);
        for (nth, column) in columns.into_iter().enumerate() {
            for row in 1..rows {
                one.set_hash(slot, row, column, hashes[nth * (rows - 1) + row - 1]);
            }
        }
        for column in (0..geometry.width()).map(ColumnIndex) {
            let by_row: Vec<BlockHash> = (0..rows).map(|row| one.hash(slot, row, column)).collect();
            assert_eq!(together.hashes(slot, 0..rows, column).collect::<Vec<_>>(), by_row, "{column:?}");
        }
        assert_eq!(together.dirty_pages(), one.dirty_pages());
    }

    #[test]
    fn pages_in_use_or_changed_stay_beyond_the_bound_and_the_stripe_map_always() {
        let geometry = geometry(2, 1);
        let mut store = new_store(geometry, 2);
        let mut disks = Disks::new(&store);
        let map_pages = store.layout().map_pages();
        for page in (0..map_pages).map(PageIndex) {
            disks.load(&mut store, page, Torn::Impossible);
            store.release(page);
        }
        let hash_pages: Vec<PageIndex> = (map_pages..map_pages + 9).map(PageIndex).collect();
        disks.mar(&store, hash_pages[2], 1, 0, Harm::BadSector);
        for (at, &page) in hash_pages.iter().enumerate() {
            disks.load(&mut store, page, Torn::Impossible);
            match at {
                0 => continue,
                1 => fill(&mut store, page, 4),
                _ => {}
            }
            store.release(page);
        }
        let cached = |store: &PageStore, at: usize| store.cached.contains_key(&hash_pages[at]);
        assert!(cached(&store, 0), "in use");
        assert!(cached(&store, 1), "changed");
        assert!(cached(&store, 2), "to be mended");
        assert_eq!(store.cached_pages(), 3);
        disks.write_back(&mut store, 1);
        store.release(hash_pages[0]);
        for &page in &hash_pages[4..] {
            if !store.cached.contains_key(&page) {
                disks.load(&mut store, page, Torn::Impossible);
                store.release(page);
            }
        }
        assert!((0..3).all(|at| !cached(&store, at)) && store.cached_pages() == 2);
        store.check_shown();
        // There are as many frames as the cache holds pages: a page beyond that is shown when it is asked for
        // and others have left.
        let left: Vec<PageIndex> =
            hash_pages.iter().filter(|page| store.cached.contains_key(page)).copied().collect();
        for page in left {
            assert_eq!(store.want(page, 1, Torn::Impossible, &|_| true, &mut Vec::new()), Want::Cached);
            assert!(store.publisher().shows(page.0 - map_pages));
            store.release(page);
        }
        assert!((0..map_pages).all(|page| store.cached.contains_key(&PageIndex(page))));
    }

    #[test]
    fn clearing_a_slot_leaves_its_neighbours_alone() {
        let geometry = geometry(3, 1);
        let mut store = new_store(geometry, 100);
        let disks = Disks::new(&store);
        for page in store.layout().map_pages()..store.layout().pages() {
            disks.load(&mut store, PageIndex(page), Torn::Impossible);
        }
        let hash = |slot: u64, row: usize, column: u16| {
            BlockHash([slot as u8 + 1, row as u8, column as u8, 1].repeat(4).try_into().unwrap())
        };
        let all = || {
            (0..100u64).flat_map(|slot| {
                (0..2usize).flat_map(move |row| (0..4u16).map(move |column| (slot, row, column)))
            })
        };
        for (slot, row, column) in all() {
            store.set_hash(SlotIndex(slot), row, ColumnIndex(column), hash(slot, row, column));
        }
        store.clear_slot(SlotIndex(31));
        for (slot, row, column) in all() {
            let expected = if slot == 31 { BlockHash::UNWRITTEN } else { hash(slot, row, column) };
            assert_eq!(store.hash(SlotIndex(slot), row, ColumnIndex(column)), expected);
        }
    }

    #[test]
    fn the_walk_of_a_member_visits_the_pages_that_have_a_copy_on_it() {
        let store = new_store(geometry(3, 1), 1);
        let member = MemberIndex(2);
        let mut walked = Vec::new();
        while let Some(page) = store.next_page_on(
            member,
            walked.last().map_or(PageIndex(0), |last: &PageIndex| PageIndex(last.0 + 1)),
        ) {
            walked.push(page);
        }
        let all = (0..store.layout().pages()).map(PageIndex);
        let expected: Vec<PageIndex> =
            all.filter(|&page| store.layout().copy_on(page, member).is_some()).collect();
        assert!(expected.len() > 5);
        assert_eq!(walked, expected);
    }
}
