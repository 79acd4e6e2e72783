//! The metadata pages of a logged array in memory: a bounded cache of block hashes, and the whole stripe map.
//!
//! Sans-IO like the rest of the array: reads and writes of page copies come out as [`PageIo`] and come back as
//! [`PageStore::read_done`] and [`PageStore::write_done`]. A page has m + 1 copies on different members and each copy
//! two places (docs/on-disk-format.md, "Pages"). The rules, for at most m faults of one page (members gone, copies
//! damaged, unreadable or behind) and any number of crashes:
//! * A load reads both places of every usable copy; the newest valid version of all counts. A copy that does not
//!   show it lied, is charged to its member, and is written again with the next write-back.
//! * A write never goes over the newest valid version of its copy, so one that is cut off leaves the version before.
//!   A copy without a valid version keeps one blank place until a write has succeeded: that tells "never written
//!   whole" from "written, and damaged". Only a copy that can be no witness for either is written in both places.
//! * Which place holds a copy's newest version is believed from [`PageStore::thaw`] on, when the write is flushed.
//! * What is written back is what the page was at [`PageStore::freeze`] (rule W2 of the crash-safety design): later
//!   changes wait for the next one. Pages that are changed, or frozen and not thawed, are never evicted.
//!
//! Must not know of devices, epochs beyond their number, the log, or who waits.

use super::members::Which;
use super::page_copies::{Copies, CopyFault, CopyFound, Place, Places, Torn, Version, version_of};
use crate::block_io::{Buf, Pool};
use crate::format::{
    Geometry, LogKey, MapEntry, MemberSet, PAGE_BYTES, PAGE_ENTRIES, Page, PageError, PageIndex, PageLayout,
    hash_of_entry,
};
use crate::units::{BlockHash, ColumnIndex, MemberIndex, ROW_BYTES, SlotIndex, StripeIndex};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use uuid::Uuid;

/// Steps of the eviction clock for each page that is loaded: enough to find a victim unless nearly all pages are in
/// use or changed, few enough that a load costs the same however large the cache.
const CLOCK_STEPS_MAX: usize = 32;

/// Names a read of a page copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageRead {
    pub page: PageIndex,
    copy: u16,
    places: Places,
}

/// Names a write of a page copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageWrite {
    pub page: PageIndex,
    copy: u16,
    places: Places,
    which: Which,
}

/// I/O that the store wants done. Offsets count from the start of the member's pages region.
#[derive(Debug)]
pub(super) enum PageIo {
    /// From the member's device in service; ends in [`PageStore::read_done`].
    Read { read: PageRead, member: MemberIndex, offset: u64, len: usize },
    /// To the named device of the member; ends in [`PageStore::write_done`].
    Write { write: PageWrite, member: MemberIndex, which: Which, offset: u64, bytes: Buf },
}

/// What a read brought.
#[derive(Clone, Copy, Debug)]
pub(super) enum Answer<'a> {
    /// As many bytes as were asked for.
    Bytes(&'a [u8]),
    /// The device says that it cannot read them.
    Unreadable,
    /// The member is not in service any more.
    Gone,
}

/// How it stands with a page that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    /// It is in the cache, pinned for the caller.
    Cached,
    /// The asker's key will be among the waiters of a [`Loaded`], and the page is then pinned for it.
    Loading,
    /// No copy is on a usable member: the array has failed. Nothing is pinned.
    Unavailable,
}

/// What came of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoadOutcome {
    /// The page is in the cache.
    Ready,
    /// More copies are bad than the array survives. The page is in the cache with every entry [`BlockHash::LOST`];
    /// a lost page of the stripe map makes [`super::stripe_map::StripeMap::load`] fail.
    Lost,
    /// A member left service meanwhile: nothing is in the cache or pinned, every waiter has to ask again.
    AskAgain,
}

/// The end of a load.
#[derive(Debug)]
pub(super) struct Loaded {
    pub waiters: Vec<usize>,
    pub outcome: LoadOutcome,
    /// To be counted; the next write-back repairs them.
    pub faults: Vec<(MemberIndex, CopyFault)>,
}

#[derive(Debug)]
struct Load {
    waiters: Vec<usize>,
    torn: Torn,
    copies: Copies,
    pending: usize,
    newest: Option<Page>,
    member_left: bool,
    /// The page is in the cache with this version: its copies are to be compared with it.
    check: Option<Version>,
}

#[derive(Debug)]
struct Cached {
    page: Arc<Page>,
    /// For each copy where its next write goes; none where nothing is known of what it holds.
    next: Box<[Option<Places>]>,
    pins: u32,
    used: bool,
    dirty: bool,
    lost: bool,
}

/// Copies that are to be written although the page has not changed.
#[derive(Clone, Copy, Debug, Default)]
struct Due {
    /// Bad ones, in the place where a write harms nothing.
    heal: MemberSet,
    /// In both places, whatever they hold: on members under construction...
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
    /// A new version: every copy is written. Otherwise only those due.
    changed: bool,
    due: Due,
    /// The copies whose write has succeeded on the member's device in service, and where.
    written: Vec<(u16, Places)>,
}

/// See the head of this file.
pub(super) struct PageStore {
    geometry: Geometry,
    layout: PageLayout,
    key: LogKey,
    array: Uuid,
    /// Bound of the pages of hashes; pages of the stripe map come on top.
    cache_pages_max: usize,
    cached: HashMap<PageIndex, Cached>,
    loads: HashMap<PageIndex, Load>,
    /// The cached pages of hashes in the order in which eviction looks at them.
    clock: VecDeque<PageIndex>,
    dirty: Vec<PageIndex>,
    due: BTreeMap<PageIndex, Due>,
    frozen: BTreeMap<PageIndex, Frozen>,
    /// Frozen pages below this have had their writes given out.
    sent_below: PageIndex,
    writes_pending: usize,
}

impl PageStore {
    /// An empty cache for the pages of an array, with block hashes or without. It holds at most `cache_pages_max` pages
    /// of hashes unless more are in use or changed, and the whole stripe map besides.
    pub fn new(
        geometry: Geometry,
        checksums: bool,
        key: LogKey,
        array: Uuid,
        cache_pages_max: usize,
    ) -> PageStore {
        PageStore {
            geometry,
            layout: PageLayout::new(geometry, checksums),
            key,
            array,
            cache_pages_max,
            cached: HashMap::new(),
            loads: HashMap::new(),
            clock: VecDeque::new(),
            dirty: Vec::new(),
            due: BTreeMap::new(),
            frozen: BTreeMap::new(),
            sent_below: PageIndex(0),
            writes_pending: 0,
        }
    }

    /// Where entries are.
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// Asks for a page and pins it for the caller, who gives it back with [`PageStore::release`]. Unless it is cached
    /// it is loaded from the members that are `usable`, once for all who ask.
    pub fn want(
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
                Want::Cached
            }
            None => self.load(page, key, torn, usable, out),
        }
    }

    /// Like [`PageStore::want`], but reads the copies of a cached page too, to find those that are bad (scrub). A page
    /// that is being written anyway is not read.
    pub fn check(
        &mut self,
        page: PageIndex,
        key: usize,
        usable: &dyn Fn(MemberIndex) -> bool,
        out: &mut Vec<PageIo>,
    ) -> Want {
        let being_written = self.frozen.contains_key(&page);
        let checked = match self.cached.get_mut(&page) {
            Some(cached) if being_written || cached.dirty || cached.lost => Want::Cached,
            _ => self.load(page, key, Torn::Impossible, usable, out),
        };
        if let (Some(cached), true) = (self.cached.get_mut(&page), checked != Want::Unavailable) {
            cached.pins += 1;
        }
        checked
    }

    /// Undoes the pin of one [`PageStore::want`] or [`PageStore::check`].
    ///
    /// # Panics
    /// When the page is not pinned.
    pub fn release(&mut self, page: PageIndex) {
        let cached = self.cached.get_mut(&page).expect("a pinned page is cached");
        cached.pins = cached.pins.checked_sub(1).expect("a page that is released was pinned");
        // Its members may come to their senses: a lost page that nobody has changed is read again by who asks next.
        if cached.lost && self.is_evictable(page) {
            self.cached.remove(&page);
            self.clock.retain(|&other| other != page);
        }
    }

    /// Takes the end of a read; some when it was the last of its load.
    ///
    /// # Panics
    /// When no such read was given out, or the bytes are not as many as were asked for.
    pub fn read_done(&mut self, read: PageRead, answer: Answer<'_>, out: &mut Vec<PageIo>) -> Option<Loaded> {
        let PageRead { page, copy, places } = read;
        let load = self.loads.get_mut(&page).expect("a read belongs to a load");
        load.pending -= 1;
        match answer {
            Answer::Gone => load.member_left = true,
            // A bad sector in one place must not hide what the other holds.
            Answer::Unreadable if places == Places::Both => {
                let (member, offset) =
                    self.layout.copies(page).nth(usize::from(copy)).expect("a copy of the page");
                for places in [Places::First, Places::Second] {
                    let (read, offset) = (PageRead { places, ..read }, offset + places.offset());
                    out.push(PageIo::Read { read, member, offset, len: places.len() });
                    load.pending += 1;
                }
            }
            Answer::Unreadable => {}
            Answer::Bytes(bytes) => {
                assert_eq!(bytes.len(), places.len(), "a read brings what was asked for");
                let found = load.copies.0[usize::from(copy)].places.as_mut().expect("it was to be read");
                let first = usize::from(places == Places::Second);
                for (place, bytes) in found[first..].iter_mut().zip(bytes.chunks(PAGE_BYTES)) {
                    *place = match Page::decode(&self.key, self.array, page, bytes) {
                        Err(PageError::Blank) => Place::Blank,
                        Err(PageError::Damaged) => Place::Damaged,
                        Ok(version) => {
                            let found = version_of(&version);
                            if load.newest.as_ref().is_none_or(|newest| version_of(newest) < found) {
                                load.newest = Some(version);
                            }
                            Place::Valid(found)
                        }
                    };
                }
            }
        }
        if load.pending > 0 {
            return None;
        }
        let load = self.loads.remove(&page).expect("it was found above");
        Some(self.end_load(page, load))
    }

    /// The page as it is now; later changes do not show in it. Block hashes are in it where
    /// [`PageLayout::hash_entry`] says.
    ///
    /// # Panics
    /// When the page is not cached, as all that read and change entries: who uses a page has pinned it.
    pub fn snapshot(&self, page: PageIndex) -> Arc<Page> {
        Arc::clone(&self.at(page).page)
    }

    /// Whether the page was lost when it was loaded.
    pub fn is_lost(&self, page: PageIndex) -> bool {
        self.at(page).lost
    }

    /// The hash of a block.
    pub fn hash(&self, slot: SlotIndex, row: usize, column: ColumnIndex) -> BlockHash {
        let (page, entry) = self.layout.hash_entry(slot, row, usize::from(column.0));
        hash_of_entry(self.at(page).page.entries[entry])
    }

    /// Sets the hash of a block.
    pub fn set_hash(&mut self, slot: SlotIndex, row: usize, column: ColumnIndex, hash: BlockHash) {
        let (page, entry) = self.layout.hash_entry(slot, row, usize::from(column.0));
        self.set(page, entry, hash.0);
    }

    /// Makes every block of a slot [`BlockHash::UNWRITTEN`]. Its pages hold entries of other slots too, so all of them
    /// must be cached.
    pub fn clear_slot(&mut self, slot: SlotIndex) {
        for row in 0..(u64::from(self.geometry.chunk) / ROW_BYTES) as usize {
            for column in 0..self.geometry.width() {
                self.set_hash(slot, row, ColumnIndex(column), BlockHash::UNWRITTEN);
            }
        }
    }

    /// The stripe map's entry of a logical stripe. Its slot is below the number of slots if
    /// [`super::stripe_map::StripeMap::load`] has accepted the map.
    pub fn map_entry(&self, stripe: StripeIndex) -> MapEntry {
        let (page, entry) = self.layout.map_entry(stripe.0);
        MapEntry::decode(stripe.0, self.at(page).page.entries[entry])
    }

    /// Sets the stripe map's entry of a logical stripe. Who changes the slot of a stripe while the array serves does so
    /// through [`super::stripe_map::StripeMap::moved`].
    pub fn set_map_entry(&mut self, stripe: StripeIndex, entry: MapEntry) {
        let (page, at) = self.layout.map_entry(stripe.0);
        self.set(page, at, entry.encode(stripe.0));
    }

    /// Has a new version of the page written back although no entry changes (R8: replay writes every page that the
    /// log names).
    pub fn touch(&mut self, page: PageIndex) {
        let cached = self.cached.get_mut(&page).expect("a page that is changed is cached");
        if !cached.dirty {
            cached.dirty = true;
            self.dirty.push(page);
        }
    }

    /// The next page from `from` on that has a copy on `member`: the walk of a rebuild.
    pub fn next_page_on(&self, member: MemberIndex, from: PageIndex) -> Option<PageIndex> {
        let has_copy = |page: &PageIndex| self.layout.copies(*page).any(|(holder, _)| holder == member);
        (from.0..self.layout.pages()).map(PageIndex).find(has_copy)
    }

    /// Has the copy on a device that is being built written whole with the next write-back; one that was never written
    /// as zeroes, for a device that may hold anything. From before the first page until the device is in service it
    /// must be among the targets of every [`PageStore::frozen_writes`]; it is complete when all its pages have been
    /// asked for and a write-back frozen after that is thawed.
    ///
    /// # Panics
    /// When the page is not cached or has no copy on this member.
    pub fn rebuild(&mut self, page: PageIndex, member: MemberIndex, which: Which) {
        assert!(self.cached.contains_key(&page), "a page that is rebuilt is cached");
        assert!(self.layout.copies(page).any(|(holder, _)| holder == member), "{member} has a copy");
        let due = self.due.entry(page).or_default();
        match which {
            Which::Primary => due.whole.insert(member),
            Which::Replacement => due.replacement.insert(member),
        };
    }

    /// The pages whose copy on `member` the cache knows nothing of, because the member was not usable when they were
    /// loaded or has missed a write. A member that comes back without being rebuilt must have none left when it becomes
    /// usable again, or a write could go over the only valid version of its copy. A [`PageStore::check`] with this
    /// member among the usable ones tells what is there, unless the page is being written: then a write-back to it does.
    pub fn unknown_on(&self, member: MemberIndex) -> Vec<PageIndex> {
        let copy_of = |page| self.layout.copies(page).position(|(holder, _)| holder == member);
        let cached = self.cached.iter().filter(|&(&page, cached)| {
            let copy = copy_of(page);
            copy.is_some_and(|copy| cached.next[copy].is_none())
        });
        let loading = self.loads.iter().filter(|&(&page, load)| {
            let copy = copy_of(page);
            copy.is_some_and(|copy| load.copies.0[copy].places.is_none())
        });
        let pages: BTreeSet<PageIndex> =
            cached.map(|(page, _)| *page).chain(loading.map(|(page, _)| *page)).collect();
        pages.into_iter().collect()
    }

    /// Whether the page was never written.
    pub fn is_blank(&self, page: PageIndex) -> bool {
        let cached = self.at(page);
        cached.page.sequence == 0 && !cached.dirty && !cached.lost
    }

    /// Number of the epoch in which the version on the members, or on its way to them, was written; 0 for a page that
    /// was never written.
    pub fn epoch_written(&self, page: PageIndex) -> u64 {
        self.at(page).page.epoch
    }

    /// Pages that the next [`PageStore::freeze`] would take.
    pub fn dirty_pages(&self) -> usize {
        self.dirty.len() + self.due.len()
    }

    /// Pages in the cache, those of the stripe map not counted.
    pub fn cached_pages(&self) -> usize {
        self.clock.len()
    }

    /// Takes the pages to be written back as they are now, in a new version each, written in epoch `epoch`. Whatever
    /// they hold must be covered by a note that is durable on all live members before the writes start (W2).
    ///
    /// # Panics
    /// When the write-back before is not over.
    pub fn freeze(&mut self, epoch: u64) {
        assert!(self.frozen.is_empty(), "one write-back at a time");
        let mut due = std::mem::take(&mut self.due);
        for index in std::mem::take(&mut self.dirty) {
            let cached = self.cached.get_mut(&index).expect("a changed page is cached");
            cached.dirty = false;
            let page = Arc::make_mut(&mut cached.page);
            page.sequence += 1;
            page.epoch = epoch;
            let due = due.remove(&index).unwrap_or_default();
            let image = Arc::clone(&cached.page);
            self.frozen.insert(index, Frozen { image, changed: true, due, written: Vec::new() });
        }
        for (index, due) in due {
            let image = self.snapshot(index);
            self.frozen.insert(index, Frozen { image, changed: false, due, written: Vec::new() });
        }
        self.sent_below = PageIndex(0);
    }

    /// Gives out the writes of the next `pages_max` frozen pages, in ascending order, for the devices that are targets:
    /// all that are in service or being built.
    pub fn frozen_writes(
        &mut self,
        pages_max: usize,
        targets: &dyn Fn(MemberIndex, Which) -> bool,
        pool: &Pool,
        out: &mut Vec<PageIo>,
    ) {
        for (&page, frozen) in self.frozen.range(self.sent_below..).take(pages_max) {
            self.sent_below = PageIndex(page.0 + 1);
            let next = &self.cached.get(&page).expect("a frozen page is cached").next;
            // Version 0 is none: a bad or foreign copy of a page that was never written becomes zeroes.
            let blank = frozen.image.sequence == 0;
            let due = &frozen.due;
            let image =
                if blank { [0; PAGE_BYTES] } else { frozen.image.encode(&self.key, self.array, page) };
            let mut bytes = pool.alloc(2 * PAGE_BYTES);
            bytes.chunks_mut(PAGE_BYTES).for_each(|place| place.copy_from_slice(&image));
            let bytes = bytes.freeze();
            for (copy, (member, offset)) in self.layout.copies(page).enumerate() {
                let whole = blank || due.whole.contains(member);
                let own = next[copy].filter(|_| !whole).unwrap_or(Places::Both);
                let primary = frozen.changed || due.heal.contains(member) || due.whole.contains(member);
                let replacement = frozen.changed || due.replacement.contains(member);
                for (which, places, asked) in
                    [(Which::Primary, own, primary), (Which::Replacement, Places::Both, replacement)]
                {
                    if asked && targets(member, which) {
                        let write = PageWrite { page, copy: copy as u16, places, which };
                        let offset = offset + places.offset();
                        let bytes = bytes.slice(0..places.len());
                        out.push(PageIo::Write { write, member, which, offset, bytes });
                        self.writes_pending += 1;
                    }
                }
            }
        }
    }

    /// Takes the end of a write; a device that failed it must be out of service before [`PageStore::thaw`].
    pub fn write_done(&mut self, write: PageWrite, succeeded: bool) {
        self.writes_pending = self.writes_pending.checked_sub(1).expect("a write was given out");
        if succeeded && write.which == Which::Primary {
            let frozen = self.frozen.get_mut(&write.page).expect("a page stays frozen while it is written");
            frozen.written.push((write.copy, write.places));
        }
    }

    /// Writes of the write-back that were given out and are not over.
    pub fn writes_pending(&self) -> usize {
        self.writes_pending
    }

    /// Whether every write of the write-back was given out.
    pub fn all_sent(&self) -> bool {
        self.frozen.range(self.sent_below..).next().is_none()
    }

    /// Whether every write of the write-back was given out and is over.
    pub fn is_written(&self) -> bool {
        self.writes_pending == 0 && self.all_sent()
    }

    /// Ends the write-back when it is flushed on every device that is still in service. What was not written to a copy
    /// was missed by it: the copy counts for nothing until it is rebuilt.
    ///
    /// # Panics
    /// When writes are left.
    pub fn thaw(&mut self) {
        assert!(self.is_written(), "only what is written can be flushed");
        for (page, frozen) in std::mem::take(&mut self.frozen) {
            let next = &mut self.cached.get_mut(&page).expect("a frozen page is cached").next;
            for (copy, (member, _)) in self.layout.copies(page).enumerate() {
                let due = frozen.due.heal.contains(member) || frozen.due.whole.contains(member);
                if frozen.changed || due {
                    let written = frozen.written.iter().find(|(other, _)| usize::from(*other) == copy);
                    next[copy] = written.map(|(_, places)| places.next());
                }
            }
        }
        self.evict();
    }

    /// Gives up the write-back, for an array that has failed and may come back: its pages are written, in a newer
    /// version, by the next one, over the same places as now.
    ///
    /// # Panics
    /// When writes are under way.
    pub fn unfreeze(&mut self) {
        assert_eq!(self.writes_pending, 0, "writes that are under way end first");
        for (page, frozen) in std::mem::take(&mut self.frozen) {
            if frozen.changed {
                self.touch(page);
            }
            let due = frozen.due;
            if !(due.heal.is_empty() && due.whole.is_empty() && due.replacement.is_empty()) {
                self.due.entry(page).or_default().merge(due);
            }
        }
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
        page.0 < self.layout.map_pages()
    }

    /// Joins the load of a page, or starts it.
    fn load(
        &mut self,
        page: PageIndex,
        key: usize,
        torn: Torn,
        usable: &dyn Fn(MemberIndex) -> bool,
        out: &mut Vec<PageIo>,
    ) -> Want {
        assert!(page.0 < self.layout.pages(), "page {} of {}", page.0, self.layout.pages());
        if let Some(load) = self.loads.get_mut(&page) {
            load.waiters.push(key);
            if torn == Torn::Possible {
                load.torn = torn;
            }
            return Want::Loading;
        }
        let mut copies = Vec::new();
        let mut pending = 0;
        for (copy, (member, offset)) in self.layout.copies(page).enumerate() {
            let places = usable(member).then_some([Place::Unreadable; 2]);
            copies.push(CopyFound { member, places });
            if places.is_some() {
                let read = PageRead { page, copy: copy as u16, places: Places::Both };
                out.push(PageIo::Read { read, member, offset, len: Places::Both.len() });
                pending += 1;
            }
        }
        if pending == 0 {
            return Want::Unavailable;
        }
        let check = self.cached.get(&page).map(|cached| version_of(&cached.page));
        let waiters = vec![key];
        let load =
            Load { waiters, torn, copies: Copies(copies), pending, newest: None, member_left: false, check };
        self.loads.insert(page, load);
        Want::Loading
    }

    fn end_load(&mut self, page: PageIndex, load: Load) -> Loaded {
        let Load { waiters, torn, copies, newest, member_left, check, .. } = load;
        if member_left {
            // The pins that a check has taken go with it; a page in the cache that was only checked stays there.
            if check.is_some() {
                self.cached.get_mut(&page).expect("a page under check is pinned").pins -=
                    waiters.len() as u32;
            }
            return Loaded { waiters, outcome: LoadOutcome::AskAgain, faults: Vec::new() };
        }
        if let Some(version) = check {
            let cached = self.at(page);
            let unchanged = !cached.dirty && version_of(&cached.page) == version;
            let faults = if unchanged && !self.frozen.contains_key(&page) {
                let truth = (version != (0, 0)).then_some(version);
                let next = &mut self.cached.get_mut(&page).expect("a page under check is pinned").next;
                for (next, copy) in next.iter_mut().zip(&copies.0).filter(|(_, copy)| copy.places.is_some()) {
                    *next = copy.next_write();
                }
                self.note_bad_copies(page, &copies, truth, Torn::Impossible)
            } else {
                Vec::new()
            };
            return Loaded { waiters, outcome: LoadOutcome::Ready, faults };
        }
        let truth = newest.as_ref().map(version_of);
        let lost = copies.have_lost(torn);
        let mut content = newest.unwrap_or_else(Page::blank);
        if lost {
            content.entries = Box::new([BlockHash::LOST.0; PAGE_ENTRIES]);
        }
        // What is behind a lost page, should it show up again, must not pass for newer than what follows.
        let next = |copy: &CopyFound| if lost { Some(Places::Both) } else { copy.next_write() };
        let cached = Cached {
            page: Arc::new(content),
            next: copies.0.iter().map(next).collect(),
            pins: waiters.len() as u32,
            used: true,
            dirty: false,
            lost,
        };
        self.cached.insert(page, cached);
        if !self.is_map_page(page) {
            self.clock.push_back(page);
            self.evict();
        }
        let faults =
            if lost { copies.faults(None, torn) } else { self.note_bad_copies(page, &copies, truth, torn) };
        let outcome = if lost { LoadOutcome::Lost } else { LoadOutcome::Ready };
        Loaded { waiters, outcome, faults }
    }

    /// Marks the copies that are not as they should be for writing; returns those that somebody is to blame for.
    fn note_bad_copies(
        &mut self,
        page: PageIndex,
        copies: &Copies,
        truth: Option<Version>,
        torn: Torn,
    ) -> Vec<(MemberIndex, CopyFault)> {
        let bad = copies.faults(truth, Torn::Impossible);
        let heal: MemberSet = bad.into_iter().map(|(member, _)| member).collect();
        if !heal.is_empty() {
            self.due.entry(page).or_default().merge(Due { heal, ..Due::default() });
        }
        copies.faults(truth, torn)
    }

    fn is_evictable(&self, page: PageIndex) -> bool {
        let busy = |cached: &Cached| cached.pins > 0 || cached.dirty;
        !self.is_map_page(page)
            && self.cached.get(&page).is_some_and(|cached| !busy(cached))
            && !self.due.contains_key(&page)
            && !self.frozen.contains_key(&page)
    }

    /// Second chance (the clock algorithm): a page that was asked for since the hand last passed stays for a round.
    fn evict(&mut self) {
        for _ in 0..CLOCK_STEPS_MAX {
            if self.clock.len() <= self.cache_pages_max {
                return;
            }
            let page = self.clock.pop_front().expect("more than the bound");
            if self.is_evictable(page) && !self.at(page).used {
                self.cached.remove(&page);
            } else {
                self.cached.get_mut(&page).expect("pages of the clock are cached").used = false;
                self.clock.push_back(page);
            }
        }
    }
}
