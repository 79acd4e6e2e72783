//! The write-back of pages: frozen as they are, written to every copy in the place where that does no harm,
//! thawed once flushed.
//!
//! A copy of which a place could not be read is read again just before it is written (rule T3): its content
//! decides which place is written, and a copy that proves to be right is not repaired at all.

use crate::array::base::members::Which;
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::copies::{CopyFound, Next, Place, Places, Torn, version_of};
use crate::array::pages::store::{Due, Frozen, PageIo, PageRead, PageStore, PageWrite, Probe, Trust};
use crate::block_io::{Buf, Pool};
use crate::format::{MemberSet, PAGE_BYTES, Page, PageIndex};
use crate::units::MemberIndex;
use std::sync::Arc;

/// The images of a page for its two kinds of writes, alone and paired, made when they are needed.
struct Images<'a> {
    page: PageIndex,
    image: &'a Page,
    is_lost: bool,
    made: [Option<Buf>; 2],
}

impl PageStore {
    /// Has the copy on a device that is being built written whole with the next write-back. A page that was
    /// never written is written as zeroes, since the device may hold anything. From before the first page
    /// until the device is in service it must be among the targets of every [`PageStore::frozen_writes`]; it
    /// is complete when all its pages have been asked for and a write-back frozen after that is thawed.
    ///
    /// # Panics
    /// When the page is not cached or has no copy on this member.
    pub(crate) fn rebuild(&mut self, page: PageIndex, member: MemberIndex, which: Which) {
        assert!(self.cached.contains_key(&page), "a page that is rebuilt is cached");
        assert!(self.site.layout.copy_on(page, member).is_some(), "{member} has a copy");
        self.due.entry(page).or_default().insert(member, which);
        self.decide(page);
    }

    /// Has the copy on a device that is being built marked as damaged with the next write-back, because the
    /// page cannot be read: a blank copy would mean that the page was never written. If the page can be read
    /// before the device is in service, it is rebuilt.
    ///
    /// # Panics
    /// When the page has no copy on this member.
    pub(crate) fn void(&mut self, page: PageIndex, member: MemberIndex, which: Which) {
        assert!(self.site.layout.copy_on(page, member).is_some(), "{member} has a copy");
        if self.cached.contains_key(&page) {
            return self.rebuild(page, member, which);
        }
        let entry = (page, member, which == Which::Replacement);
        if self.void.all.insert(entry) || self.left_alone.contains(&page) {
            self.void.due.insert(entry);
        }
    }

    /// Pages that could not be read when they were to be written to a device that is being built.
    pub(crate) fn void_on(&self, member: MemberIndex, which: Which) -> impl Iterator<Item = PageIndex> + '_ {
        let is_on = move |(_, other, is_replacement): &&(PageIndex, MemberIndex, bool)| {
            (*other, *is_replacement) == (member, which == Which::Replacement)
        };
        self.void.all.iter().filter(is_on).map(|(page, _, _)| *page)
    }

    /// Whether the page is one of these.
    pub(crate) fn is_void_on(&self, page: PageIndex, member: MemberIndex, which: Which) -> bool {
        self.void.all.contains(&(page, member, which == Which::Replacement))
    }

    /// Has the page, which is now in the cache, written to devices on which it was marked as unreadable.
    pub(super) fn rebuild_void(&mut self, page: PageIndex) {
        let ends = [(page, MemberIndex(0), false), (page, MemberIndex(u16::MAX), true)];
        let void: Vec<_> = self.void.all.range(ends[0]..=ends[1]).copied().collect();
        for entry in void {
            let (_, member, is_replacement) = entry;
            self.void.all.remove(&entry);
            self.void.due.remove(&entry);
            self.void.frozen.remove(&entry);
            let which = if is_replacement { Which::Replacement } else { Which::Primary };
            self.due.entry(page).or_default().insert(member, which);
            self.decide(page);
        }
    }

    /// Records that a member is out of service. Until it joins again, nothing in its copies counts, and
    /// writes to a device that is built for it go to both places.
    pub(crate) fn left(&mut self, member: MemberIndex) {
        self.away.insert(member);
        self.offers.retain(|_, offer| !offer.is_of(member));
        self.set_next(member, |_| Next::Anywhere);
        self.forget_void(member, Which::Primary);
    }

    /// Records that the device that was being built to replace a member is given up: which pages the next one
    /// lacks is found out anew, and it is marked anew.
    pub(crate) fn given_up(&mut self, member: MemberIndex) {
        self.forget_void(member, Which::Replacement);
    }

    /// Forgets which pages the device there lacks, and returns these.
    fn forget_void(&mut self, member: MemberIndex, which: Which) -> Vec<PageIndex> {
        let lacked = self.void_on(member, which).collect();
        let of_device = (member, which == Which::Replacement);
        self.void.all.retain(|(_, other, is_replacement)| (*other, *is_replacement) != of_device);
        self.void.due.retain(|(_, other, is_replacement)| (*other, *is_replacement) != of_device);
        self.void.frozen.retain(|(_, other, is_replacement)| (*other, *is_replacement) != of_device);
        lacked
    }

    /// Records that a device that was built for a member is in service. Both places of every copy on it hold
    /// the newest version, see [`PageStore::left`]. So the next write may go to one of them, and must: a
    /// power cut during a write of both would leave no version. Loads that began without the member, or with
    /// the device that it had before, are asked for again.
    pub(crate) fn joined(&mut self, member: MemberIndex, which: Which) {
        self.away.remove(member);
        self.offers.retain(|_, offer| !offer.is_of(member));
        // Both places of a page without a version are blank, and the next write is the first.
        let next = |page: &Page| if page.sequence == 0 { Places::Alone } else { Places::First };
        self.set_next(member, |page| Next::At(next(page)));
        // Except for pages that could not be read when the device was built.
        let lacked = self.forget_void(member, which);
        if which == Which::Replacement {
            self.forget_void(member, Which::Primary);
        }
        for page in lacked {
            if !is_off(Mutation::PlacesOutliveReturn) {
                self.versions.forget_places(page);
                if !self.cached.contains_key(&page) {
                    self.show(page);
                }
            }
            if let (Some(cached), Some(copy)) =
                (self.cached.get_mut(&page), self.site.layout.copy_on(page, member))
            {
                cached.next[copy] = Next::Anywhere;
            }
        }
        let layout = self.site.layout;
        for (&page, load) in &mut self.loads {
            let copy = layout.copy_on(page, member);
            let is_other = |copy: usize| which == Which::Replacement || load.copies.0[copy].places.is_none();
            load.is_void |= copy.is_some_and(is_other);
        }
    }

    /// Where the next write of each copy on `member` goes, of the cached pages.
    fn set_next(&mut self, member: MemberIndex, next: impl Fn(&Page) -> Next) {
        for (&page, cached) in &mut self.cached {
            if let Some(copy) = self.site.layout.copy_on(page, member) {
                cached.next[copy] = next(&cached.page);
            }
        }
    }

    /// Takes the pages to be written back as they are now, in a new version each, written in epoch `epoch`. A
    /// note that is durable on all live members must cover all their content before the writes start (W2).
    ///
    /// # Panics
    /// When the previous write-back is not over.
    pub(crate) fn freeze(&mut self, epoch: u64) {
        assert!(
            self.write_back.frozen.is_empty() && self.write_back.probes.is_empty(),
            "one write-back at a time"
        );
        self.void.frozen.append(&mut self.void.due);
        let mut due = std::mem::take(&mut self.due);
        for index in std::mem::take(&mut self.dirty) {
            let cached = self.cached.get_mut(&index).expect("a changed page is cached");
            cached.dirty = false;
            let page = Arc::make_mut(&mut cached.page);
            page.sequence += 1;
            page.epoch = epoch;
            let due = due.remove(&index).unwrap_or_default();
            let image = Arc::clone(&cached.page);
            if is_off(Mutation::MapPagesCountedUnflushed) {
                self.map_written += u64::from(image.sequence == 1 && self.is_map_page(index));
            }
            self.write_back.frozen.insert(index, Frozen::new(image, true, due));
        }
        for (index, due) in due {
            let image = self.snapshot(index);
            self.write_back.frozen.insert(index, Frozen::new(image, false, due));
        }
        // The result of a check that has read a copy does not count once that is written, even if the version
        // stays.
        for page in self.write_back.frozen.keys() {
            if let Some(load) = self.loads.get_mut(page) {
                load.is_void = true;
            }
        }
        self.write_back.sent_below = PageIndex(0);
    }

    /// Gives out the writes of the next `pages_max` frozen pages, in ascending order, for the devices that
    /// are targets: all that are in service or being built. Some of the I/O is reads that come before a
    /// write.
    pub(crate) fn frozen_writes(
        &mut self,
        pages_max: usize,
        targets: &dyn Fn(MemberIndex, Which) -> bool,
        pool: &Pool,
        out: &mut Vec<PageIo>,
    ) {
        self.probed_writes(targets, pool, out);
        self.void_writes(pages_max, targets, pool, out);
        let next: Vec<PageIndex> = self
            .write_back
            .frozen
            .range(self.write_back.sent_below..)
            .take(pages_max)
            .map(|(page, _)| *page)
            .collect();
        for page in next {
            self.write_back.sent_below = PageIndex(page.0 + 1);
            let frozen = &self.write_back.frozen[&page];
            let cached = self.cached.get(&page).expect("a frozen page is cached");
            let due = &frozen.due;
            let mut images = Images::new(page, &frozen.image, cached.trust == Trust::Lost);
            for (copy, (member, offset)) in self.site.layout.copies(page).enumerate() {
                let copy = copy as u16;
                let next = cached.next[usize::from(copy)];
                // The first write does not go over a version that was taken from the device itself.
                let is_taken = self.away.contains(member) && next != Next::Anywhere;
                let own = if due.whole.contains(member) && !is_taken { Next::Anywhere } else { next };
                let primary = frozen.changed || due.heal.contains(member) || due.whole.contains(member);
                let replacement = frozen.changed || due.replacement.contains(member);
                for (which, next, asked) in
                    [(Which::Primary, own, primary), (Which::Replacement, Next::Anywhere, replacement)]
                {
                    if !asked || !targets(member, which) {
                        continue;
                    }
                    self.write_back.writes_pending += 1;
                    let places = match next {
                        Next::At(places) => places,
                        Next::Anywhere => Places::Both,
                        Next::Unread if is_off(Mutation::UnreadWrittenOver) => Places::Both,
                        Next::Unread => {
                            let read = PageRead { page, copy, places: Places::Both, before_write: true };
                            out.push(PageIo::Read { read, member, offset, len: Places::Both.len() });
                            let found = CopyFound { member, places: Some([Place::Unreadable; 2]) };
                            self.write_back.probes.insert((page, copy), Probe { found, pending: 1 });
                            continue;
                        }
                    };
                    let write = PageWrite { page, copy, places, which, is_void: false };
                    let bytes = images.bytes(places, (&self.site.key, self.site.array), pool);
                    let offset = offset + places.offset();
                    out.push(PageIo::Write { write, member, which, offset, bytes });
                }
            }
        }
    }

    /// Gives out the writes of copies that were read first.
    fn probed_writes(
        &mut self,
        targets: &dyn Fn(MemberIndex, Which) -> bool,
        pool: &Pool,
        out: &mut Vec<PageIo>,
    ) {
        let probes = std::mem::take(&mut self.write_back.probes).into_iter();
        let (read, unread): (Vec<_>, Vec<_>) = probes.partition(|(_, probe)| probe.pending == 0);
        self.write_back.probes = unread.into_iter().collect();
        for ((page, copy), probe) in read {
            let frozen =
                self.write_back.frozen.get_mut(&page).expect("a page stays frozen while its copies are read");
            let CopyFound { member, .. } = probe.found;
            let sequence = frozen.image.sequence;
            let truth = (sequence > 0).then(|| version_of(&frozen.image));
            if !frozen.changed && probe.found.fault(truth, Torn::Impossible).is_none() {
                frozen.whole.push((copy, probe.found.next_write()));
                continue;
            }
            if !targets(member, Which::Primary) {
                continue;
            }
            let places = match probe.found.next_write() {
                Next::At(places) => places,
                Next::Anywhere => Places::Both,
                Next::Unread => {
                    let newest = sequence - u64::from(frozen.changed);
                    let places = probe.found.next_write_unread(newest, sequence);
                    if probe.found.is_spared_by(places) {
                        frozen.spared.insert(member);
                    }
                    places
                }
            };
            let (_, offset) =
                self.site.layout.copies(page).nth(usize::from(copy)).expect("a copy of the page");
            let write = PageWrite { page, copy, places, which: Which::Primary, is_void: false };
            let cached = self.cached.get(&page).expect("a frozen page is cached");
            let is_lost = cached.trust == Trust::Lost;
            let bytes = Images::new(page, &frozen.image, is_lost).bytes(
                places,
                (&self.site.key, self.site.array),
                pool,
            );
            let offset = offset + places.offset();
            out.push(PageIo::Write { write, member, which: Which::Primary, offset, bytes });
            self.write_back.writes_pending += 1;
        }
    }

    /// Gives out the marks of pages that cannot be read.
    fn void_writes(
        &mut self,
        pages_max: usize,
        targets: &dyn Fn(MemberIndex, Which) -> bool,
        pool: &Pool,
        out: &mut Vec<PageIo>,
    ) {
        for _ in 0..pages_max {
            let Some((page, member, is_replacement)) = self.void.frozen.pop_first() else { return };
            let which = if is_replacement { Which::Replacement } else { Which::Primary };
            let mut copies = self.site.layout.copies(page).enumerate();
            let (copy, (_, offset)) =
                copies.find(|(_, (other, _))| *other == member).expect("a member with a copy");
            if !targets(member, which) {
                continue;
            }
            let write = PageWrite { page, copy: copy as u16, places: Places::Both, which, is_void: true };
            let bytes = twice(&Page::encode_void(self.site.array, page), pool);
            out.push(PageIo::Write { write, member, which, offset, bytes });
            self.write_back.writes_pending += 1;
        }
    }

    /// Takes the end of a write. A device that failed it must be out of service before [`PageStore::thaw`].
    pub(crate) fn write_done(&mut self, write: PageWrite, succeeded: bool) {
        self.write_back.writes_pending =
            self.write_back.writes_pending.checked_sub(1).expect("a write was given out");
        if succeeded && write.which == Which::Primary && !write.is_void {
            let frozen =
                self.write_back.frozen.get_mut(&write.page).expect("a page stays frozen while it is written");
            frozen.written.push((write.copy, write.places));
        }
    }

    /// Writes of the write-back that were given out and are not over.
    pub(crate) fn writes_pending(&self) -> usize {
        self.write_back.writes_pending
    }

    /// Whether every write of the write-back was given out, as far as is known.
    pub(crate) fn all_sent(&self) -> bool {
        self.write_back.frozen.range(self.write_back.sent_below..).next().is_none()
            && self.void.frozen.is_empty()
            && self.write_back.probes.values().all(|probe| probe.pending > 0)
    }

    /// Whether every write of the write-back was given out and is over.
    pub(crate) fn is_written(&self) -> bool {
        self.write_back.writes_pending == 0 && self.all_sent()
    }

    /// Ends the write-back when it is flushed on every device that is still in service. A copy that was not
    /// written has missed it, and does not count until it is rebuilt.
    ///
    /// # Panics
    /// When writes are left.
    pub(crate) fn thaw(&mut self) {
        assert!(self.is_written(), "only what is written can be flushed");
        for (page, frozen) in std::mem::take(&mut self.write_back.frozen) {
            let is_blank = frozen.image.sequence == 0;
            if frozen.changed {
                // Numbers of versions begin with 1.
                if frozen.image.sequence == 1 && !is_off(Mutation::MapPagesCountedUnflushed) {
                    self.map_written += u64::from(self.is_map_page(page));
                }
                self.versions.set(page, Some(version_of(&frozen.image)));
            }
            let cached = self.cached.get_mut(&page).expect("a frozen page is cached");
            for (copy, (member, _)) in self.site.layout.copies(page).enumerate() {
                let due = frozen.due.heal.contains(member) || frozen.due.whole.contains(member);
                if !frozen.changed && !due {
                    continue;
                }
                let is_this = |other: u16| usize::from(other) == copy;
                let whole = frozen.whole.iter().find(|(other, _)| is_this(*other));
                let written = frozen.written.iter().find(|(other, _)| is_this(*other));
                cached.next[copy] = match (whole, written) {
                    _ if self.away.contains(member) => {
                        if frozen.due.whole.contains(member) && cached.next[copy] != Next::Anywhere {
                            // The version was taken from the device itself, and is in one place there.
                            self.due.entry(page).or_default().insert(member, Which::Primary);
                        }
                        Next::Anywhere
                    }
                    // The other place could not be read, and was spared. It is written too, now that this one
                    // is whole.
                    (None, Some((_, places))) if frozen.spared.contains(member) => {
                        self.due.entry(page).or_default().merge(Due::healed([member].into_iter().collect()));
                        Next::At(places.next())
                    }
                    (Some((_, next)), _) => *next,
                    // Both places are zeroes: the next write is still the first.
                    (None, Some((_, Places::Alone | Places::Both)))
                        if is_blank && cached.trust != Trust::Lost =>
                    {
                        Next::At(Places::Alone)
                    }
                    (None, Some(_)) if is_blank => Next::At(Places::Both),
                    (None, Some((_, places))) => Next::At(places.next()),
                    (None, None) => Next::Anywhere,
                };
            }
            if self.is_evictable(page) {
                self.drop_unless_known(page);
            }
        }
        self.evict();
    }
}

impl Due {
    pub(super) fn is_empty(&self) -> bool {
        let Due { heal, whole, replacement } = self;
        [heal, whole, replacement].into_iter().all(MemberSet::is_empty)
    }

    fn insert(&mut self, member: MemberIndex, which: Which) {
        match which {
            Which::Primary => self.whole.insert(member),
            Which::Replacement => self.replacement.insert(member),
        };
    }

    pub(super) fn healed(heal: MemberSet) -> Due {
        Due { heal, ..Due::default() }
    }
}

impl Frozen {
    fn new(image: Arc<Page>, changed: bool, due: Due) -> Frozen {
        Frozen { image, changed, due, written: Vec::new(), whole: Vec::new(), spared: MemberSet::new() }
    }
}

impl<'a> Images<'a> {
    fn new(page: PageIndex, image: &'a Page, is_lost: bool) -> Images<'a> {
        Images { page, image, is_lost, made: [None, None] }
    }

    /// The bytes that go to these places of a copy.
    fn bytes(
        &mut self,
        places: Places,
        (key, array): (&crate::format::LogKey, uuid::Uuid),
        pool: &Pool,
    ) -> Buf {
        let paired = places != Places::Alone;
        let Images { page, image, is_lost, made } = self;
        let both = made[usize::from(paired)].get_or_insert_with(|| {
            let bytes = match image.sequence {
                // Version 0 is none: a bad or foreign copy of a page that was never written becomes zeroes.
                0 if !*is_lost => [0; PAGE_BYTES],
                // Zeroes would mean that the page was never written.
                0 => Page::encode_void(array, *page),
                _ if paired == image.paired => image.encode(key, array, *page),
                _ => Page { paired, ..(*image).clone() }.encode(key, array, *page),
            };
            twice(&bytes, pool)
        });
        both.slice(0..places.len())
    }
}

fn twice(image: &[u8; PAGE_BYTES], pool: &Pool) -> Buf {
    let mut bytes = pool.alloc(2 * PAGE_BYTES);
    bytes.chunks_mut(PAGE_BYTES).for_each(|place| place.copy_from_slice(image));
    bytes.freeze()
}
