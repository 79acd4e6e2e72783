//! A model of an owner and a reader, run through every interleaving and every order of memory: scripts of
//! what an owner does, beside one read. And the proof that each rule is needed: with it broken, the model
//! finds a read that must not be.
//!
//! Content is a number that names its stripe and its version, and a device is a number for each slot. The
//! hash of content is the content itself, twice. A read must return its own stripe's content, and no version
//! older than the newest that was acknowledged before it began.

use crate::rules::{Rule, break_rule};
use crate::{Hash, Publisher, Size, View};
use loom::sync::atomic::AtomicU64;
use loom::thread;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};

/// Version `version` of stripe `stripe`.
const fn content(stripe: u64, version: u64) -> u64 {
    100 * (stripe + 1) + version
}

/// Stands for bytes of somebody else's.
const FOREIGN: u64 = 9000;

fn hash(content: u64) -> Hash {
    [content, content << 20]
}

/// Three slots, the first two of which have their hashes in page 0, the last in page 1.
const SIZE: Size = Size { stripes: 2, slots: 3, pages: 2, frames: 2, entries: 2, members: 1 };

fn entry_of(slot: u64) -> (u64, usize) {
    (slot / 2, (slot % 2) as usize)
}

/// The word of a page that is not in memory: its newest version, and in which of its two places that is.
fn placed(version: u64, place: u64) -> u64 {
    1 << 63 | version << 1 | place
}

/// What a place of page 0 on the members holds: a version of the page, and the content that it has a hash of
/// for slot 0.
fn page(version: u64, content: u64) -> u64 {
    version << 32 | content
}

/// What both threads share besides the view: devices, the places of page 0 on them, and which version of
/// stripe 0 is acknowledged.
struct World {
    disks: [[AtomicU64; 3]; 2],
    page: [AtomicU64; 2],
    acknowledged: AtomicU64,
}

impl World {
    fn put(&self, disk: usize, slot: u64, content: u64) {
        self.disks[disk][slot as usize].store(content, Release);
    }

    fn put_page(&self, place: usize, bytes: u64) {
        self.page[place].store(bytes, Release);
    }

    fn acknowledge(&self, version: u64) {
        self.acknowledged.store(version, Release);
    }
}

/// How a reader makes sure of what it has read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Check {
    Hash,
    /// The same, and at first page 0 is not in memory.
    HashAway,
    /// There are no hashes: the ticket is compared again.
    Ticket,
}

/// One read of stripe 0: the version that it returns, if it does not ask the owner.
fn read(view: &View, world: &World, check: Check) -> Option<u64> {
    let look = view.look(0)?;
    let slot = look.slot();
    let (mut wanted, mut named) = (None, None);
    if check != Check::Ticket {
        let (page, entry) = entry_of(slot);
        if look.hashes(page, std::iter::once(entry), |hash| wanted = Some(hash)).is_none() {
            (wanted, named) = (None, Some(look.on_members(page)?));
        }
    }
    let device = look.device(0)?;
    let ticket = look.end()?;
    if let Some(word) = named {
        let found = world.page[(word & 1) as usize].load(Acquire);
        let is_named = placed(found >> 32, word & 1) == word;
        wanted = is_named.then_some(hash(found & 0xffff_ffff));
        wanted?;
    }
    if let Some(wanted) = wanted {
        assert_eq!(wanted[0] / 100, 1, "the look-up returned a hash of another stripe");
        assert_eq!(wanted, hash(wanted[0]), "the look-up returned halves of two hashes");
    }
    let found = world.disks[device as usize][slot as usize].load(Acquire);
    let is_good = match wanted {
        Some(wanted) => hash(found) == wanted,
        None => view.still(&ticket),
    };
    is_good.then_some(found)
}

/// An owner with stripe 0 in slot 0 and stripe 1 in slot 1, both in their first version.
fn owner(check: Check) -> (Publisher, Arc<World>) {
    let mut publisher = Publisher::new(SIZE);
    let cell = || AtomicU64::new(0);
    let disks = [[cell(), cell(), cell()], [cell(), cell(), cell()]];
    let page = [AtomicU64::new(page(1, content(0, 1))), cell()];
    let world = Arc::new(World { disks, page, acknowledged: AtomicU64::new(1) });
    for stripe in 0..2 {
        world.put(0, stripe, content(stripe, 1));
        publisher.set_stripe(stripe, stripe, true, false);
    }
    match check {
        Check::HashAway => publisher.place_page(0, placed(1, 0)),
        Check::Hash | Check::Ticket => {
            publisher.show_page(0, [hash(content(0, 1)), hash(content(1, 1))].into_iter());
        }
    }
    publisher.set_members(std::iter::once(Some(0)));
    publisher.serve(true);
    (publisher, world)
}

/// Runs a script of the owner beside one read, in every order.
fn explore(check: Check, script: impl Fn(&mut Publisher, &World) + Send + Sync + Copy + 'static) {
    loom::model(move || {
        let (mut publisher, world) = owner(check);
        let (view, readers_world) = (Arc::clone(publisher.view()), Arc::clone(&world));
        let reader = thread::spawn(move || {
            let floor = readers_world.acknowledged.load(Acquire);
            if let Some(found) = read(&view, &readers_world, check) {
                assert_eq!(found / 100, 1, "a read returned another stripe's content: {found}");
                assert!(
                    found % 100 >= floor,
                    "a read returned {found} after version {floor} was acknowledged"
                );
            }
        });
        script(&mut publisher, &world);
        reader.join().expect("the reader checks itself");
    });
}

/// Whether the script shows that the rule is needed.
fn is_needed(
    rule: Rule,
    check: Check,
    script: impl Fn(&mut Publisher, &World) + Send + Sync + Copy + 'static,
) {
    break_rule(Some(rule));
    let result = catch_unwind(AssertUnwindSafe(|| explore(check, script)));
    break_rule(None);
    assert!(result.is_err(), "{rule:?} was broken and the model has not noticed");
}

/// Whether the model notices an owner that breaks a duty.
fn is_noticed(check: Check, script: impl Fn(&mut Publisher, &World) + Send + Sync + Copy + 'static) {
    let result = catch_unwind(AssertUnwindSafe(|| explore(check, script)));
    assert!(result.is_err(), "the owner broke a duty and the model has not noticed");
}

fn set_hash(publisher: &mut Publisher, slot: u64, value: u64) {
    let (page, entry) = entry_of(slot);
    publisher.change(slot).set(page, entry, hash(value));
}

/// Writes a version of stripe 0 to another slot.
fn write_afresh(publisher: &mut Publisher, world: &World, slot: u64, version: u64) {
    world.put(0, slot, content(0, version));
    set_hash(publisher, slot, content(0, version));
    publisher.set_stripe(0, slot, true, false);
    world.acknowledge(version);
}

/// Stripe 0 moves away, and stripe 1 is written to the slot that it has left.
fn move_and_reuse(publisher: &mut Publisher, world: &World) {
    publisher.show_page(1, [hash(content(0, 2))].into_iter());
    world.put(0, 2, content(0, 2));
    publisher.set_stripe(0, 2, true, false);
    world.acknowledge(2);
    world.put(0, 0, content(1, 2));
    set_hash(publisher, 0, content(1, 2));
    publisher.set_stripe(1, 0, true, false);
}

/// Stripe 0 moves away and back, and another stripe is written to its slot meanwhile. There are no hashes.
fn move_away_and_back(publisher: &mut Publisher, world: &World) {
    world.put(0, 2, content(0, 2));
    publisher.set_stripe(0, 2, true, false);
    world.acknowledge(2);
    world.put(0, 0, content(1, 2));
    world.put(0, 0, content(0, 3));
    publisher.set_stripe(0, 0, true, false);
}

/// A block is overwritten through the log, then put in place.
fn overwrite(publisher: &mut Publisher, world: &World) {
    publisher.set_images(0, true);
    set_hash(publisher, 0, content(0, 2));
    world.acknowledge(2);
    world.put(0, 0, content(0, 2));
    publisher.set_images(0, false);
}

/// The frame of the page with slot 0 is given to another page.
fn give_frame_away(publisher: &mut Publisher, _: &World) {
    publisher.hide_page(0);
    publisher.show_page(1, [hash(content(1, 2)), hash(content(1, 3))].into_iter());
}

/// Page 0 is pushed out of memory, and is loaded again.
fn push_out_and_load(publisher: &mut Publisher, _: &World) {
    publisher.place_page(0, placed(1, 0));
    publisher.show_page(0, [hash(content(0, 1)), hash(content(1, 1))].into_iter());
}

/// A block whose page is not in memory is overwritten. The device loses that write, and still holds the old
/// block, for which the old version of the page vouches.
fn lose_a_write(publisher: &mut Publisher, world: &World) {
    publisher.hide_page(0);
    publisher.set_images(0, true);
    world.acknowledge(2);
    world.put_page(1, page(2, content(0, 2)));
    publisher.set_images(0, false);
    publisher.place_page(0, placed(2, 1));
}

/// A page that is not in memory has changed twice when it is named again: its newest version is where the
/// named one was.
fn change_page_twice(publisher: &mut Publisher, world: &World) {
    publisher.hide_page(0);
    publisher.set_images(0, true);
    world.acknowledge(3);
    world.put(0, 0, content(0, 3));
    world.put_page(0, page(3, content(0, 3)));
    publisher.set_images(0, false);
    publisher.place_page(0, placed(3, 0));
}

/// Stripe 0 moves from a slot whose page is not in memory, and stripe 1 is written there.
fn reuse_with_the_page_away(publisher: &mut Publisher, world: &World) {
    publisher.set_stripe(0, 2, true, false);
    publisher.hide_page(0);
    world.put(0, 0, content(1, 2));
    world.put_page(1, page(2, content(1, 2)));
    publisher.place_page(0, placed(2, 1));
}

/// Another device takes the member's place, and the old one is used for something else.
fn exchange_member(publisher: &mut Publisher, world: &World) {
    world.put(1, 0, content(0, 1));
    publisher.set_members(std::iter::once(Some(1)));
    world.put(0, 0, FOREIGN);
}

#[test]
fn a_slot_that_is_used_again_is_not_read_for_its_old_stripe() {
    explore(Check::Hash, move_and_reuse);
    explore(Check::Ticket, move_and_reuse);
    is_needed(Rule::MapIsComparedAgain, Check::Hash, move_and_reuse);
}

#[test]
fn a_stripe_that_comes_back_to_its_slot_does_not_vouch_for_what_was_there_meanwhile() {
    explore(Check::Ticket, move_away_and_back);
    is_needed(Rule::MoveChangesGenerations, Check::Ticket, move_away_and_back);
    is_needed(Rule::GenerationIsComparedAgain, Check::Ticket, move_away_and_back);
}

#[test]
fn a_block_that_was_overwritten_is_not_read_from_its_place_before_it_is_there() {
    explore(Check::Hash, overwrite);
    explore(Check::Ticket, overwrite);
    // A hash that is ahead of what is in place does no harm: it matches nothing.
    explore(Check::Hash, |publisher, world| {
        set_hash(publisher, 0, content(0, 2));
        publisher.set_images(0, true);
        world.acknowledge(2);
    });
    is_noticed(Check::Ticket, |publisher, world| {
        // The slot shows images after the write was acknowledged.
        world.acknowledge(2);
        publisher.set_images(0, true);
    });
    is_noticed(Check::Ticket, |publisher, world| {
        // It shows none any more while they are not in place.
        publisher.set_images(0, true);
        world.acknowledge(2);
        publisher.set_images(0, false);
        world.put(0, 0, content(0, 2));
    });
    is_noticed(Check::Hash, |publisher, world| {
        // The new hash is published after the write was acknowledged, and no images are.
        world.acknowledge(2);
        set_hash(publisher, 0, content(0, 2));
        world.put(0, 0, content(0, 2));
    });
}

#[test]
fn a_hash_is_read_whole() {
    // Where several slots share a page, a hash may change without a move or images: a block is found again.
    let script = |publisher: &mut Publisher, _: &World| set_hash(publisher, 0, content(0, 2));
    explore(Check::Hash, script);
    is_needed(Rule::BusyIsShown, Check::Hash, script);
    is_needed(Rule::GenerationIsComparedAgain, Check::Hash, script);
}

#[test]
fn a_frame_that_is_given_to_another_page_is_not_read_for_the_first() {
    explore(Check::Hash, give_frame_away);
    is_needed(Rule::FrameIsComparedAgain, Check::Hash, give_frame_away);
}

#[test]
fn a_page_that_is_not_in_memory_vouches_for_what_it_said_at_the_look_up() {
    explore(Check::HashAway, push_out_and_load);
    explore(Check::HashAway, lose_a_write);
    explore(Check::HashAway, change_page_twice);
    explore(Check::HashAway, reuse_with_the_page_away);
    is_needed(Rule::MapIsComparedAgain, Check::HashAway, reuse_with_the_page_away);
    is_noticed(Check::HashAway, |publisher, world| {
        // The page changes while an older version of it is named.
        publisher.set_images(0, true);
        world.acknowledge(2);
        publisher.set_images(0, false);
    });
    is_noticed(Check::HashAway, |publisher, world| {
        // The old version is named when the page leaves memory.
        publisher.hide_page(0);
        publisher.set_images(0, true);
        world.acknowledge(2);
        publisher.set_images(0, false);
        publisher.place_page(0, placed(1, 0));
    });
}

#[test]
fn a_device_that_has_left_is_not_believed() {
    explore(Check::Hash, exchange_member);
    explore(Check::Ticket, exchange_member);
    is_needed(Rule::ServiceIsCompared, Check::Ticket, exchange_member);
    is_noticed(Check::Ticket, |publisher, world| {
        // A write that the old device has missed is acknowledged before the view says who serves.
        world.put(1, 0, content(0, 2));
        world.acknowledge(2);
        publisher.set_members(std::iter::once(Some(1)));
    });
}

#[test]
fn a_fresh_stripe_is_read_from_its_new_slot_once_it_is_acknowledged() {
    explore(Check::Ticket, |publisher, world| write_afresh(publisher, world, 2, 2));
    is_noticed(Check::Hash, |publisher, world| {
        // The move is published after the write was acknowledged.
        publisher.show_page(1, [hash(content(0, 2))].into_iter());
        world.put(0, 2, content(0, 2));
        world.acknowledge(2);
        publisher.set_stripe(0, 2, true, false);
    });
}

#[test]
fn nothing_is_read_of_a_life_that_has_ended() {
    explore(Check::Ticket, |publisher, world| {
        publisher.serve(false);
        publisher.forget_all();
        // A replay writes where it must, and the next life finds the stripe where it was.
        world.put(0, 0, FOREIGN);
        world.put(0, 0, content(0, 1));
        publisher.set_stripe(0, 0, true, false);
        publisher.serve(true);
    });
}

#[test]
fn nothing_is_read_while_a_request_of_a_client_that_is_gone_is_under_way() {
    loom::model(|| {
        let (publisher, world) = owner(Check::Ticket);
        let (view, readers_world) = (Arc::clone(publisher.view()), Arc::clone(&world));
        let orphan = publisher.view().orphan();
        let reader = thread::spawn(move || read(&view, &readers_world, Check::Ticket));
        assert_eq!(reader.join().expect("the reader ends"), None);
        drop(orphan);
        assert_eq!(read(publisher.view(), &world, Check::Ticket), Some(content(0, 1)));
    });
}
