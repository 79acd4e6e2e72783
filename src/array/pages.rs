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

mod hashes;

use super::members::Which;
use super::mutation::{Mutation, is_off};
use super::page_copies::{Copies, CopyFault, CopyFound, Place, Places, Torn, Version, version_of};
use crate::block_io::{Buf, Pool};
use crate::format::{
    Geometry, LogKey, MapEntry, MemberSet, PAGE_BYTES, PAGE_ENTRIES, Page, PageError, PageIndex, PageLayout,
};
use crate::units::{BlockHash, MemberIndex, SlotIndex, StripeIndex};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
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
    /// It is to be checked, and being written: a check after [`PageStore::thaw`] can tell more. Nothing is pinned.
    BeingWritten,
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
    /// A page of the stripe map of which no copy is without a fault: it is in the cache as the newest copy shows it, and
    /// may have been changed since. (In such a page of hashes what is old does not match its block; so only its blank
    /// entries are not believed, and become [`BlockHash::LOST`].)
    Behind,
    /// A member left or joined service meanwhile, or a page under check was written: nothing was put into the cache, and
    /// nothing is pinned; every waiter has to ask again.
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
    /// What it finds is not what counts: a member has left service or joined it, or the page was being written.
    is_void: bool,
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
    cached: FxHashMap<PageIndex, Cached>,
    loads: FxHashMap<PageIndex, Load>,
    /// The cached pages of hashes in the order in which eviction looks at them.
    clock: VecDeque<PageIndex>,
    dirty: Vec<PageIndex>,
    due: BTreeMap<PageIndex, Due>,
    /// Members out of service.
    away: MemberSet,
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
            cached: FxHashMap::default(),
            loads: FxHashMap::default(),
            clock: VecDeque::new(),
            dirty: Vec::new(),
            due: BTreeMap::new(),
            away: MemberSet::new(),
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

    /// Like [`PageStore::want`], but reads the copies of a cached page too, to find those that are bad (scrub). If they
    /// are written meanwhile, the askers have to ask again.
    pub fn check(
        &mut self,
        page: PageIndex,
        key: usize,
        usable: &dyn Fn(MemberIndex) -> bool,
        out: &mut Vec<PageIo>,
    ) -> Want {
        if self.frozen.contains_key(&page) {
            return Want::BeingWritten;
        }
        let checked = match self.cached.get(&page) {
            Some(cached) if cached.lost => Want::Cached,
            _ => self.load(page, key, Torn::Impossible, usable, out),
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
    pub fn pin(&mut self, page: PageIndex) {
        self.cached.get_mut(&page).expect("a page that is pinned is cached").pins += 1;
    }

    /// Undoes the pin of one [`PageStore::want`] or [`PageStore::check`].
    ///
    /// # Panics
    /// When the page is not pinned.
    pub fn release(&mut self, page: PageIndex) {
        let cached = self.cached.get_mut(&page).expect("a pinned page is cached");
        cached.pins = cached.pins.checked_sub(1).expect("a page that is released was pinned");
        let lost = cached.lost;
        if !self.is_evictable(page) {
            return;
        }
        if lost {
            // Its members may come to their senses: while nobody has changed it, it is read again by who asks next.
            self.cached.remove(&page);
            self.clock.retain(|&other| other != page);
        }
        self.evict();
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
            Answer::Gone => load.is_void = true,
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
                            let (found, paired) = (version_of(&version), version.paired);
                            if load.newest.as_ref().is_none_or(|newest| version_of(newest) < found) {
                                load.newest = Some(version);
                            }
                            if paired { Place::Paired(found) } else { Place::Valid(found) }
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
        let has_copy = |page: &PageIndex| self.layout.copy_on(*page, member).is_some();
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
        assert!(self.layout.copy_on(page, member).is_some(), "{member} has a copy");
        let due = self.due.entry(page).or_default();
        match which {
            Which::Primary => due.whole.insert(member),
            Which::Replacement => due.replacement.insert(member),
        };
    }

    #[cfg(test)]
    /// The pages whose copy on `member` the cache knows nothing of, because the member was not usable when they were
    /// loaded or has missed a write. A member that comes back without being rebuilt must have none left when it becomes
    /// usable again, or a write could go over the only valid version of its copy. A [`PageStore::check`] with this
    /// member among the usable ones tells what is there, unless the page is being written: then a write-back to it does.
    pub fn unknown_on(&self, member: MemberIndex) -> Vec<PageIndex> {
        let copy_of = |page| self.layout.copy_on(page, member);
        let cached = self.cached.iter().filter(|&(&page, cached)| {
            let copy = copy_of(page);
            copy.is_some_and(|copy| cached.next[copy].is_none())
        });
        let loading = self.loads.iter().filter(|&(&page, load)| {
            let copy = copy_of(page);
            copy.is_some_and(|copy| load.copies.0[copy].places.is_none())
        });
        let pages: std::collections::BTreeSet<PageIndex> =
            cached.map(|(page, _)| *page).chain(loading.map(|(page, _)| *page)).collect();
        pages.into_iter().collect()
    }

    /// Slots of the stripes that hold data by the stripe map, all of which is cached.
    pub fn slots_with_data(&self) -> impl Iterator<Item = SlotIndex> + '_ {
        let entries = (0..self.geometry.stripes()).map(|stripe| self.map_entry(StripeIndex(stripe)));
        entries.filter(|entry| entry.holds_data).map(|entry| entry.slot)
    }

    /// A page that shows no version on any member must have been written, as a stripe holds data in one of its slots: it
    /// is lost. Otherwise its blocks would read as zeroes. Returns the copies that are at fault.
    pub fn deny_blank(&mut self, page: PageIndex) -> Vec<(MemberIndex, CopyFault)> {
        let cached = self.cached.get_mut(&page).expect("a page that was just loaded is cached");
        *Arc::make_mut(&mut cached.page).entries = [BlockHash::LOST.0; PAGE_ENTRIES];
        cached.lost = true;
        let copies = self.layout.copies(page).zip(&cached.next);
        copies.filter(|(_, next)| next.is_some()).map(|((member, _), _)| (member, CopyFault::Blank)).collect()
    }

    /// Whether the page was never written.
    pub fn is_blank(&self, page: PageIndex) -> bool {
        let cached = self.at(page);
        cached.page.sequence == 0 && !cached.dirty && !cached.lost
    }

    #[cfg(test)]
    /// Number of the epoch in which the version on the members, or on its way to them, was written; 0 for a page that
    /// was never written.
    pub fn epoch_written(&self, page: PageIndex) -> u64 {
        self.at(page).page.epoch
    }

    /// A member is out of service: until it joins again, nothing is believed of what its copies hold, and what is
    /// written to a device that is built in its stead goes to both places.
    pub fn left(&mut self, member: MemberIndex) {
        self.away.insert(member);
        self.set_next(member, |_| None);
    }

    /// A device that was built for a member is in service. Both places of every copy on it hold the newest version, see
    /// [`PageStore::left`]: so the next write may go to one of them, and must, for a power cut in a write of both would
    /// leave none. Loads that began without the member are asked for again.
    pub fn joined(&mut self, member: MemberIndex) {
        self.away.remove(member);
        // Of a page without a version both places are blank, and the next write is the first.
        let next = |page: &Page| if page.sequence == 0 { Places::Alone } else { Places::First };
        self.set_next(member, |page| Some(next(page)));
        let layout = self.layout;
        for (&page, load) in &mut self.loads {
            let copy = layout.copy_on(page, member);
            load.is_void |= copy.is_some_and(|copy| load.copies.0[copy].places.is_none());
        }
    }

    /// Where the next write of each copy on `member` goes, of the cached pages.
    fn set_next(&mut self, member: MemberIndex, next: impl Fn(&Page) -> Option<Places>) {
        for (&page, cached) in &mut self.cached {
            if let Some(copy) = self.layout.copy_on(page, member) {
                cached.next[copy] = next(&cached.page);
            }
        }
    }

    /// Pages whose entries have changed since the last [`PageStore::freeze`].
    pub fn changed_pages(&self) -> usize {
        self.dirty.len()
    }

    /// Pages that the next [`PageStore::freeze`] would take: changed ones, and those with copies to be written again.
    pub fn dirty_pages(&self) -> usize {
        self.dirty.len() + self.due.len()
    }

    #[cfg(test)]
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
        // What a check has read of a copy tells nothing once that is written, also when the version stays.
        for page in self.frozen.keys() {
            if let Some(load) = self.loads.get_mut(page) {
                load.is_void = true;
            }
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
            let due = &frozen.due;
            // Version 0 is none: a bad or foreign copy of a page that was never written becomes zeroes.
            let image_of = |paired: bool| {
                let image = match frozen.image.sequence {
                    0 => [0; PAGE_BYTES],
                    _ if paired => frozen.image.encode(&self.key, self.array, page),
                    _ => {
                        let image = Page { paired, ..(*frozen.image).clone() };
                        image.encode(&self.key, self.array, page)
                    }
                };
                let mut bytes = pool.alloc(2 * PAGE_BYTES);
                bytes.chunks_mut(PAGE_BYTES).for_each(|place| place.copy_from_slice(&image));
                bytes.freeze()
            };
            let mut images = [None, None];
            for (copy, (member, offset)) in self.layout.copies(page).enumerate() {
                let own = next[copy].filter(|_| !due.whole.contains(member)).unwrap_or(Places::Both);
                let primary = frozen.changed || due.heal.contains(member) || due.whole.contains(member);
                let replacement = frozen.changed || due.replacement.contains(member);
                for (which, places, asked) in
                    [(Which::Primary, own, primary), (Which::Replacement, Places::Both, replacement)]
                {
                    if asked && targets(member, which) {
                        let write = PageWrite { page, copy: copy as u16, places, which };
                        let offset = offset + places.offset();
                        let paired = places != Places::Alone;
                        let image: &Buf = images[usize::from(paired)].get_or_insert_with(|| image_of(paired));
                        let bytes = image.slice(0..places.len());
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
                    let written = written.filter(|_| !self.away.contains(member));
                    let is_blank = frozen.image.sequence == 0;
                    next[copy] = written.map(|(_, places)| match places {
                        // Both places are zeroes: the next write is still the first.
                        Places::Alone | Places::Both if is_blank => Places::Alone,
                        _ => places.next(),
                    });
                }
            }
        }
        self.evict();
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
            Load { waiters, torn, copies: Copies(copies), pending, newest: None, is_void: false, check };
        self.loads.insert(page, load);
        Want::Loading
    }

    fn end_load(&mut self, page: PageIndex, load: Load) -> Loaded {
        let Load { waiters, torn, copies, newest, is_void, check, .. } = load;
        if is_void {
            // The pins that a check has taken go with it; a page in the cache that was only checked stays there.
            if check.is_some() {
                self.cached.get_mut(&page).expect("a page under check is pinned").pins -=
                    waiters.len() as u32;
            }
            return Loaded { waiters, outcome: LoadOutcome::AskAgain, faults: Vec::new() };
        }
        if let Some(version) = check {
            let truth = (version != (0, 0)).then_some(version);
            let next = &mut self.cached.get_mut(&page).expect("a page under check is pinned").next;
            let read = |copy: &CopyFound| copy.places.is_some() && !self.away.contains(copy.member);
            for (next, copy) in next.iter_mut().zip(&copies.0).filter(|(_, copy)| read(copy)) {
                *next = copy.next_write();
            }
            let faults = self.note_bad_copies(page, &copies, truth, Torn::Impossible);
            return Loaded { waiters, outcome: LoadOutcome::Ready, faults };
        }
        let truth = newest.as_ref().map(version_of);
        let lost = copies.have_lost(torn);
        let mut content = newest.unwrap_or_else(Page::blank);
        content.paired = true;
        if lost {
            content.entries = Box::new([BlockHash::LOST.0; PAGE_ENTRIES]);
        }
        let is_behind = truth.is_some_and(|truth| copies.may_be_behind(truth, torn));
        let is_doubted = is_behind && !self.is_map_page(page);
        if is_doubted {
            let blank = content.entries.iter_mut().filter(|entry| **entry == BlockHash::UNWRITTEN.0);
            blank.for_each(|entry| *entry = BlockHash::LOST.0);
        }
        let cached = Cached {
            page: Arc::new(content),
            next: copies
                .0
                .iter()
                .map(|copy| copy.next_write().filter(|_| !self.away.contains(copy.member)))
                .collect(),
            pins: waiters.len() as u32,
            used: true,
            dirty: false,
            lost,
        };
        self.cached.insert(page, cached);
        if is_doubted {
            // What was decided stays so, whichever copies the next load finds.
            self.touch(page);
        }
        if !self.is_map_page(page) {
            self.clock.push_back(page);
            self.evict();
        }
        let faults =
            if lost { copies.faults(None, torn) } else { self.note_bad_copies(page, &copies, truth, torn) };
        let outcome = match is_behind {
            _ if lost => LoadOutcome::Lost,
            true if !is_doubted => LoadOutcome::Behind,
            _ => LoadOutcome::Ready,
        };
        Loaded { waiters, outcome, faults }
    }

    /// Marks the copies that are not as they should be for writing; returns those that somebody is to blame for and was
    /// not blamed for yet.
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
            self.due.entry(page).or_default().merge(Due { heal, ..Due::default() });
        }
        copies.faults(truth, torn).into_iter().filter(|(member, _)| !known.contains(*member)).collect()
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

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::units::{ColumnIndex, ROW_BYTES};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

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
        }
    }

    fn new_store(geometry: Geometry, cache_pages_max: usize) -> PageStore {
        PageStore::new(geometry, true, KEY, ARRAY, cache_pages_max)
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

    /// A store whose stripe map is loaded as far as possible: all copies of one of its pages are damaged.
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
            let members =
                vec![vec![0; store.layout.region_bytes() as usize]; usize::from(store.geometry.width())];
            Disks { members, dead: MemberSet::new(), unreadable: BTreeSet::new() }
        }

        fn is_alive(&self, member: MemberIndex) -> bool {
            !self.dead.contains(member)
        }

        /// Serves every read that comes, and the reads that these lead to.
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
            ended
        }

        /// Loads a page that is not cached.
        fn load(&self, store: &mut PageStore, page: PageIndex, torn: Torn) -> Loaded {
            let mut reads = Vec::new();
            assert_eq!(store.want(page, 1, torn, &|member| self.is_alive(member), &mut reads), Want::Loading);
            let mut loaded = self.serve(store, reads);
            assert_eq!(loaded.len(), 1);
            loaded.pop().unwrap()
        }

        fn check(&self, store: &mut PageStore, page: PageIndex) -> Loaded {
            let mut reads = Vec::new();
            assert_eq!(store.check(page, 1, &|member| self.is_alive(member), &mut reads), Want::Loading);
            let loaded = self.serve(store, reads).pop().unwrap();
            store.release(page);
            loaded
        }

        /// Performs the sectors of a write that are in `sectors`; a bad sector that is written is good again.
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

        /// Writes everything back that is due, and flushes it.
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
            store.frozen_writes(usize::MAX, &targets, &pool(), &mut writes);
            writes
        }

        fn place(&mut self, store: &PageStore, page: PageIndex, copy: usize, place: usize) -> &mut [u8] {
            let (member, offset) = store.layout.copies(page).nth(copy).unwrap();
            &mut self.members[usize::from(member.0)][offset as usize + place * PAGE_BYTES..][..PAGE_BYTES]
        }

        fn mar(&mut self, store: &PageStore, page: PageIndex, copy: usize, place: usize, harm: Harm) {
            let (member, offset) = store.layout.copies(page).nth(copy).unwrap();
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
        store.layout.copies(page).nth(copy).unwrap().0
    }

    /// Makes every entry of a page say `value`.
    fn fill(store: &mut PageStore, page: PageIndex, value: u8) {
        (0..PAGE_ENTRIES).for_each(|entry| store.set(page, entry, [value; 16]));
    }

    /// What every entry of a cached page says.
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
        /// For each copy the sectors of the write-back that make it; none when the write-back ends well.
        cut: Option<Vec<u16>>,
        /// Harm done to the sick copies afterwards: which of them, place, what.
        harm: Vec<(usize, usize, Harm)>,
        /// The sick copies lose the writes of this life without saying so.
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

        /// Lives that end in a crash during a write-back, each followed by the loss of every set of members that the
        /// array survives, with some copies sick all along. Loads must give a version that can be right: the last that
        /// was written back whole, or one that has been begun since.
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
                let loaded = disks.load(&mut store, page, torn);
                prop_assert_eq!(loaded.outcome, LoadOutcome::Ready);
                prop_assert!(possible.contains(&value(&store, page)));
                let new = number as u8 + 1;
                // Replay writes what the log names although nothing is new about it (R8).
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
                    let loaded = disks.load(&mut after, page, torn);
                    prop_assert_eq!(loaded.outcome, LoadOutcome::Ready);
                    prop_assert!(possible.contains(&value(&after, page)), "{} of {:?}", value(&after, page), possible);
                    if torn == Torn::Impossible && life.cut.is_none() {
                        prop_assert_eq!(value(&after, page), possible[0]);
                    }
                    // Only what is sick is ever blamed, but for a repair that was cut off.
                    let blamed: MemberSet = loaded.faults.iter().map(|(member, _)| *member).collect();
                    let sick: MemberSet =
                        (0..copies).filter(|&copy| is_sick(copy)).map(|copy| member_of(&store, page, copy)).collect();
                    prop_assert!(blamed.is_subset(&sick), "{:?}", loaded.faults);
                }
                disks.dead = MemberSet::new();
            }
        }

        /// What a load finds wrong is charged to who is to blame, and whole again after the next write-back.
        #[test]
        fn bad_copies_are_named_and_healed(
            data in 1u16..4, parity in 1u16..4, page in 0u64..16, versions in 1u8..5, before in 0usize..4,
            harms in prop::collection::vec((any::<[bool; 2]>(), harm()), 3),
        ) {
            let geometry = geometry(data, parity);
            let page = PageIndex(page);
            let mut disks = Disks::new(&new_store(geometry, 4));
            // Some lives first, so that copies differ in which place is the newest: a copy misses one now and then.
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
            disks.write_back(&mut store, 2);
            prop_assert_eq!(store.dirty_pages(), 0);
            prop_assert_eq!(disks.check(&mut store, page).faults, vec![]);
            let mut again = new_store(geometry, 4);
            prop_assert_eq!(disks.load(&mut again, page, Torn::Impossible).faults, vec![]);
            // Healing is no new version: only what was bad was written.
            prop_assert_eq!(version_of(&again.at(page).page), version_of(&store.at(page).page));
            prop_assert_eq!(again.epoch_written(page), 1);
        }
    }

    /// What a step of the cache's model does.
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

        /// However loads, changes, evictions and write-backs interleave: a page reads as it was last set, what is
        /// written is what it was at the freeze, and the members end up with all of it.
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
                            // A copy whose write is under way elsewhere is never read: nothing looks bad.
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

    /// An array of 2 + 1 with one page written in some versions, whose store is gone.
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
        for (versions, harm) in [(1, Harm::Flip), (1, Harm::BadSector), (2, Harm::Flip), (2, Harm::BadSector)]
        {
            let (geometry, mut disks) = small(versions);
            let mut store = new_store(geometry, 4);
            for copy in 0..2 {
                (0..usize::from(versions)).for_each(|place| disks.mar(&store, PAGE, copy, place, harm));
            }
            let loaded = disks.load(&mut store, PAGE, Torn::Impossible);
            assert_eq!(loaded.outcome, LoadOutcome::Lost);
            assert_eq!(loaded.faults.len(), 2);
            assert_eq!(value(&store, PAGE), LOST);
            assert!(store.is_lost(PAGE));
            assert_eq!(store.dirty_pages(), 0, "what may still be there is not written over");
            // A place that can be read again after all brings the page back, as nobody has changed it.
            store.release(PAGE);
            disks.unreadable.clear();
            let loaded = disks.load(&mut store, PAGE, Torn::Impossible);
            let back = matches!(harm, Harm::BadSector);
            assert_eq!(loaded.outcome, if back { LoadOutcome::Ready } else { LoadOutcome::Lost });
            assert_eq!(value(&store, PAGE), if back { versions } else { LOST });
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
                (0..version).for_each(|at| store.set(page, at, [version as u8; 16]));
                disks.write_back(&mut store, version as u64);
            }
            let mut store = new_store(geometry, 4);
            disks.mar(&store, page, 0, 1, Harm::Flip);
            disks.mar(&store, page, 1, 1, Harm::BadSector);
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
                // That is so for good, whatever can be read later.
                disks.write_back(&mut store, 3);
                disks.unreadable.clear();
            } else {
                assert_eq!(loaded.outcome, LoadOutcome::Behind);
                // Healed as it is, or with one copy mended, it is no question any more.
                disks.write_back(&mut store, 3);
            }
            let mut again = new_store(geometry, 4);
            let loaded = disks.load(&mut again, page, Torn::Impossible);
            assert_eq!((loaded.outcome, loaded.faults), (LoadOutcome::Ready, vec![]));
            assert_eq!(again.snapshot(page).entries, entries);
        }
    }

    #[test]
    fn a_lost_page_that_is_written_again_supersedes_whatever_shows_up() {
        let (geometry, mut disks) = small(4);
        let mut store = new_store(geometry, 4);
        for copy in 0..2 {
            disks.mar(&store, PAGE, copy, 0, Harm::BadSector);
            disks.mar(&store, PAGE, copy, 1, Harm::BadSector);
        }
        assert_eq!(disks.load(&mut store, PAGE, Torn::Impossible).outcome, LoadOutcome::Lost);
        store.set(PAGE, 5, [3; 16]);
        disks.write_back(&mut store, 1);
        disks.unreadable.clear();
        let mut store = new_store(geometry, 4);
        let loaded = disks.load(&mut store, PAGE, Torn::Impossible);
        assert_eq!((loaded.outcome, loaded.faults), (LoadOutcome::Ready, vec![]));
        let entries = store.snapshot(PAGE).entries.clone();
        assert!(entries.iter().enumerate().all(|(at, entry)| *entry == [if at == 5 { 3 } else { LOST }; 16]));
    }

    #[test]
    fn a_bad_sector_in_one_place_does_not_hide_the_other() {
        let (geometry, mut disks) = small(2);
        let store = new_store(geometry, 4);
        disks.dead.insert(member_of(&store, PAGE, 0));
        disks.mar(&store, PAGE, 1, 0, Harm::BadSector);
        let mut store = new_store(geometry, 4);
        let loaded = disks.load(&mut store, PAGE, Torn::Impossible);
        assert_eq!(loaded.outcome, LoadOutcome::Ready);
        assert_eq!(loaded.faults, [(member_of(&store, PAGE, 1), CopyFault::Unreadable)]);
        assert_eq!(value(&store, PAGE), 2);
        disks.write_back(&mut store, 2);
        assert!(disks.unreadable.is_empty(), "the bad sector was written, not the good one");
        store.release(PAGE);
        assert_eq!(disks.check(&mut store, PAGE).faults, []);
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
    fn all_who_ask_for_a_page_share_one_load_and_its_pins() {
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
    fn a_check_finds_what_went_bad_behind_the_cache_and_mends_it() {
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
    fn what_a_check_has_read_before_a_copy_was_healed_is_not_believed() {
        // The copy is behind, or shows nothing: its heal is all it has.
        for places in [vec![1], vec![0, 1]] {
            let (geometry, mut disks) = small(2);
            let mut store = new_store(geometry, 4);
            let (member, other) = (member_of(&store, PAGE, 1), member_of(&store, PAGE, 0));
            places.iter().for_each(|&place| disks.mar(&store, PAGE, 1, place, Harm::Zero));
            assert_eq!(disks.load(&mut store, PAGE, Torn::Impossible).faults.len(), 1);
            let mut reads = Vec::new();
            assert_eq!(store.check(PAGE, 1, &|_| true, &mut reads), Want::Loading);
            // One device has answered the check; the other takes its time, and a whole write-back goes by.
            let at =
                reads.iter().position(|io| matches!(io, PageIo::Read { member: of, .. } if *of == member));
            let early = reads.remove(at.expect("a read of either copy"));
            assert!(disks.serve(&mut store, vec![early]).is_empty());
            disks.write_back(&mut store, 2);
            let told = disks.serve(&mut store, reads).pop().unwrap();
            assert_eq!(told.faults, [], "nobody is blamed for what is healed");
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
    fn a_check_finds_what_went_bad_under_a_changed_page_and_blames_for_it_once() {
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
            // The device has been in the array before, and shows more than there ever was.
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
            store.joined(member);
            store.set(page, 0, [1; 16]);
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
            // As it goes on in one life: healed, then written.
            for &place in &places {
                if matches!(harm, Harm::Flip) {
                    disks.place(&store, PAGE, 1, place)[16..32].copy_from_slice(ARRAY.as_bytes());
                } else {
                    disks.mar(&store, PAGE, 1, place, harm);
                }
            }
            disks.load(&mut store, PAGE, Torn::Impossible);
            disks.write_back(&mut store, 1);
            store.set(PAGE, 0, [1; 16]);
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
        // While it is away more pages come in, and one is on its way when it is asked for.
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
