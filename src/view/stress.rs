//! An owner and readers on real threads for a moment: what the model goes through in small, with the
//! machine's own orders, and under ThreadSanitizer (scripts/view-tsan).

use crate::{Hash, Publisher, Size};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

const STRIPES: u64 = 8;
const SLOTS: u64 = 11;
const ENTRIES: u64 = 4;
/// Pages; one frame fewer than these.
const PAGES: u64 = SLOTS.div_ceil(ENTRIES);
const SIZE: Size = Size {
    stripes: STRIPES,
    slots: SLOTS,
    pages: PAGES,
    frames: PAGES as u32 - 1,
    entries: ENTRIES as u32,
    members: 1,
};

fn hash(content: u64) -> Hash {
    [content, !content]
}

/// Version `version` of a stripe. Versions do not reach 2^32.
fn content(stripe: u64, version: u64) -> u64 {
    (stripe + 1) << 32 | version
}

/// What the owner knows.
struct Owner {
    publisher: Publisher,
    place: Vec<u64>,
    versions: Vec<u64>,
    holds: Vec<u64>,
    random: u64,
}

impl Owner {
    fn below(&mut self, end: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % end
    }

    /// Shows the page of a slot, in the place of another where there is no frame left.
    fn show(&mut self, slot: u64) {
        let page = slot / ENTRIES;
        if !self.publisher.shows(page) {
            self.publisher.hide_page((page + 1) % PAGES);
            let entries = self.holds.iter().skip((page * ENTRIES) as usize).take(ENTRIES as usize);
            self.publisher.show_page(page, entries.map(|content| hash(*content)));
        }
    }

    fn set(&mut self, slot: u64, content: u64) {
        self.show(slot);
        self.holds[slot as usize] = content;
        self.publisher.change(slot).set(slot / ENTRIES, (slot % ENTRIES) as usize, hash(content));
    }

    fn write(&mut self, stripe: u64, disk: &[AtomicU64], acknowledged: &[AtomicU64]) {
        let at = stripe as usize;
        self.versions[at] += 1;
        let (version, new) = (self.versions[at], content(stripe, self.versions[at]));
        if self.below(2) == 0 {
            let slot = self.place[at];
            self.publisher.set_images(slot, true);
            self.set(slot, new);
            acknowledged[at].store(version, Release);
            disk[slot as usize].store(new, Release);
            self.publisher.set_images(slot, false);
        } else {
            let slot = (0..SLOTS).find(|slot| !self.place.contains(slot)).expect("more slots than stripes");
            disk[slot as usize].store(new, Release);
            self.set(slot, new);
            self.place[at] = slot;
            self.publisher.set_stripe(stripe, slot, true, false);
            acknowledged[at].store(version, Release);
        }
    }
}

#[test]
fn readers_beside_an_owner_return_nothing_old_and_nothing_of_others() {
    let disk: Vec<AtomicU64> = (0..SLOTS).map(|slot| AtomicU64::new(content(slot, 0))).collect();
    let acknowledged: Vec<AtomicU64> = (0..STRIPES).map(|_| AtomicU64::new(0)).collect();
    let mut owner = Owner {
        publisher: Publisher::new(SIZE),
        place: (0..STRIPES).collect(),
        versions: vec![0; STRIPES as usize],
        holds: (0..SLOTS).map(|slot| content(slot, 0)).collect(),
        random: 1,
    };
    (0..STRIPES).for_each(|stripe| owner.publisher.set_stripe(stripe, stripe, true, false));
    owner.publisher.set_members(std::iter::once(Some(0)));
    owner.publisher.serve(true);
    let until = Instant::now() + Duration::from_millis(500);
    let read = |seed: u64| {
        let view = Arc::clone(owner.publisher.view());
        let (disk, acknowledged) = (&disk, &acknowledged);
        move || {
            let (mut count, mut stripe) = (0u64, seed);
            while Instant::now() < until || count == 0 {
                stripe = (stripe + 3) % STRIPES;
                let floor = acknowledged[stripe as usize].load(Acquire);
                let Some(look) = view.look(stripe) else { continue };
                let (slot, mut wanted) = (look.slot(), None);
                let entry = std::iter::once((slot % ENTRIES) as usize);
                let found = look.hashes(slot / ENTRIES, entry, |hash| wanted = Some(hash));
                if found.is_none() || look.end().is_none() {
                    continue;
                }
                let found = disk[slot as usize].load(Acquire);
                if Some(hash(found)) == wanted {
                    assert_eq!(found >> 32, stripe + 1, "another stripe's content");
                    assert!(found & 0xffff_ffff >= floor, "older than what was acknowledged");
                    count += 1;
                }
            }
            count
        }
    };
    let (first, second) = (read(0), read(1));
    std::thread::scope(|scope| {
        let readers = [scope.spawn(first), scope.spawn(second)];
        while !readers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            let stripe = owner.below(STRIPES);
            owner.write(stripe, &disk, &acknowledged);
            if owner.below(8) == 0 {
                let slot = owner.below(SLOTS);
                owner.show(slot);
                std::thread::yield_now();
            }
        }
        for reader in readers {
            assert!(reader.join().expect("it checks itself") > 0);
        }
    });
}

#[test]
fn the_size_counts_all_memory() {
    let size = Size { stripes: 100, slots: 120, pages: 50, frames: 10, entries: 252, members: 6 };
    assert_eq!(size.frame_bytes(), 4096);
    assert_eq!(size.bytes(), (100 + 120 + 50 + 6) * 8 + 10 * 4096);
}

#[test]
fn slots_that_share_a_word_show_images_while_one_of_them_has_some() {
    let slots = (1 << 20) + 4;
    let mut publisher =
        Publisher::new(Size { stripes: slots, slots, pages: 0, frames: 0, entries: 252, members: 1 });
    let (one, other) = (3, 3 + (1 << 20));
    publisher.set_stripe(one, one, true, false);
    publisher.set_stripe(other, other, true, false);
    publisher.serve(true);
    let view = Arc::clone(publisher.view());
    let can_read = || [one, other, 4].map(|stripe| view.look(stripe).and_then(|look| look.end()).is_some());
    publisher.set_stripe(4, 4, true, false);
    assert_eq!(can_read(), [true, true, true]);
    publisher.set_images(one, true);
    publisher.set_images(other, true);
    publisher.set_images(one, false);
    assert_eq!(can_read(), [false, false, true]);
    publisher.set_images(other, false);
    assert_eq!(can_read(), [true, true, true]);
    // A stripe between two slots of one word.
    publisher.set_stripe(one, other, true, false);
    assert_eq!(view.look(one).map(|look| look.slot()), Some(other));
}

#[test]
fn what_readers_must_ask_the_owner_for_is_not_answered() {
    let mut publisher =
        Publisher::new(Size { stripes: 4, slots: 6, pages: 2, frames: 1, entries: 252, members: 2 });
    publisher.set_stripe(0, 5, true, false);
    publisher.set_stripe(1, 1, false, false);
    publisher.set_stripe(2, 2, true, true);
    publisher.show_page(1, [[7, 8], [0, 0]].into_iter());
    let view = Arc::clone(publisher.view());
    assert!(view.look(0).is_none(), "the service is closed");
    publisher.set_members([Some(9), None].into_iter());
    publisher.serve(true);
    for stripe in [1, 2, 3, 4] {
        assert!(view.look(stripe).is_none(), "stripe {stripe}: no data, owner only, not shown, not there");
    }
    let look = view.look(0).expect("it is shown");
    let hash = |page, entry| {
        let mut found = None;
        look.hashes(page, std::iter::once(entry), |hash| found = Some(hash)).and(found)
    };
    assert_eq!(publisher.shown(1).map(|hashes| hashes.take(2).collect()), Some(vec![[7, 8], [0, 0]]));
    assert_eq!([hash(1, 0), hash(1, 1), hash(0, 0)], [Some([7, 8]), None, None]);
    assert_eq!([look.device(0), look.device(1), Some(5)], [Some(9), None, Some(look.slot() as u32)]);
    let ticket = look.end().expect("nothing changed");
    assert!(view.still(&ticket));
    publisher.show_page(0, std::iter::empty());
    assert!(!publisher.shows(0), "there is one frame");
    publisher.hide_page(1);
    publisher.show_page(0, std::iter::empty());
    assert!(publisher.shows(0) && !publisher.shows(1) && view.still(&ticket));
    publisher.place_page(1, 1 << 63 | 5);
    publisher.place_page(0, 1 << 63 | 7);
    assert_eq!([publisher.placed(0), publisher.placed(1)], [Some(1 << 63 | 7), Some(1 << 63 | 5)]);
    publisher.show_page(1, std::iter::empty());
    assert!(publisher.shows(1) && !publisher.shows(0), "a page that is placed has no frame");
    let look = view.look(0).expect("it is shown");
    assert_eq!([look.on_members(0), look.on_members(1)], [Some(1 << 63 | 7), None]);
    assert_eq!(look.hashes(0, std::iter::once(0), |_| ()), None);
    publisher.show_page(0, std::iter::empty());
    assert_eq!((publisher.placed(0), publisher.shows(0)), (None, false), "in memory, and there is one frame");
    drop(view.orphan());
    publisher.serve(true);
    assert!(view.still(&ticket), "nothing changed");
    publisher.place_page(0, 1 << 63);
    publisher.serve(false);
    publisher.serve(true);
    assert!(!view.still(&ticket), "the service was closed meanwhile");
    publisher.forget_all();
    publisher.serve(true);
    assert!(view.look(0).is_none() && !publisher.shows(1) && publisher.placed(0).is_none());
}
