//! The audit finds what is wrong with pages.

use super::*;
use crate::format::cas::{MapSlot, StateEntry};

fn world() -> (World, CatalogueSlot, CatalogueSlot) {
    let mut world = World::new();
    let volume = world.create(LEAF * 2);
    world.write(volume, 0, &[1, 2]);
    let snapshot = world.snapshot(volume);
    world.write(volume, 1, &[3]);
    world.check();
    (world, volume, snapshot)
}

/// What an audit says after something was changed.
fn after(change: impl FnOnce(&mut World, CatalogueSlot, CatalogueSlot)) -> Vec<Difference> {
    let (mut world, volume, snapshot) = world();
    change(&mut world, volume, snapshot);
    world.audit()
}

fn set_catalogue(world: &mut World, slot: CatalogueSlot, change: impl FnOnce(&mut CatalogueEntry)) {
    let mut entry = world.entry(slot);
    change(&mut entry);
    let (name, at) = place::of_catalogue(slot);
    world.pages.damage(name).set_catalogue_entry(at, &entry);
}

/// Changes an entry of the volume's first leaf.
fn set_slot(world: &mut World, volume: CatalogueSlot, at: usize, slot: MapSlot) {
    let top = world.entry(volume).top.id;
    let leaf = world.pages.any(place::of_map(top)).expect("in use").map_slot(0).id;
    world.pages.damage(place::of_map(leaf)).set_map_slot(at, slot);
}

#[test]
fn wrong_counts_are_found() {
    let id = ChunkId(2);
    let found = after(|world, _, _| {
        let (name, at) = place::of_state(id);
        world.pages.damage(name).set_state_entry(at, StateEntry::new(2, 256, SegmentIndex(1)));
    });
    assert_eq!(found, [Difference::Count { id, count: 2, found: 1 }]);
    let id = ChunkId(700);
    let found = after(|world, _, _| {
        let (name, at) = place::of_state(id);
        world.pages.damage(name).set_state_entry(at, StateEntry::new(0, 256, SegmentIndex(1)));
    });
    assert_eq!(found, [Difference::Void(id)]);
}

#[test]
fn wrong_sums_are_found() {
    let segment = SegmentIndex(1);
    let found = after(|world, _, _| {
        let (name, at) = place::of_segment(segment);
        let page = world.pages.damage(name);
        let mut entry = page.segment_entry(at);
        entry.live = 5.into();
        page.set_segment_entry(at, entry);
    });
    assert_eq!(found, [Difference::Live { segment, live: 5, found: 3 * 256 }]);
    let found = after(|world, _, _| {
        let (name, at) = place::of_used(ChunkId(600));
        world.pages.damage(name).set_used(at, 1);
    });
    assert_eq!(found, [Difference::Used { page: 1, used: 1, found: 0 }]);
    let found = after(|world, volume, _| set_catalogue(world, volume, |entry| entry.mapped = 9));
    assert_eq!(found, [Difference::Mapped { slot: CatalogueSlot(0), mapped: 9, found: 2 }]);
}

#[test]
fn chunks_that_are_not_where_they_should_be_are_found() {
    let found = after(|world, _, _| {
        let (name, at) = place::of_directory(SegmentIndex(1), BOUNDS.blocks_per_segment, 1);
        world.pages.damage(name).set_directory_id(at, 3);
    });
    assert_eq!(found, [Difference::Place(ChunkId(2))]);
    let found = after(|world, _, _| {
        let (name, at) = place::of_segment(SegmentIndex(1));
        let page = world.pages.damage(name);
        let mut entry = page.segment_entry(at);
        entry.kind = SegmentEntry::FREE;
        page.set_segment_entry(at, entry);
    });
    assert_eq!(found, [1, 2, 3].map(|id| Difference::Place(ChunkId(id))));
}

#[test]
fn pages_of_maps_that_are_lost_or_free_are_found() {
    let found = after(|world, _, _| {
        world.pages.new_map_page();
    });
    assert_eq!(found, [Difference::PageLost(5)]);
    let (world, ..) = world();
    let known = BTreeSet::from([1, 2, 3]);
    let found = audit(&BOUNDS, world.ledger.next_number(), |name| world.pages.any(name), &known);
    assert_eq!(found, [Difference::PageFree(4)]);
    let found = audit(
        &BOUNDS,
        world.ledger.next_number(),
        |name| world.pages.any(name).filter(|_| name != place::of_map(4)),
        &world.pages.map_pages,
    );
    assert!(found.contains(&Difference::NoPage { space: PageSpace::Map, index: 4 }), "{found:?}");
}

#[test]
fn impossible_entries_of_maps_are_found() {
    let slot = CatalogueSlot(0);
    let found = after(|world, volume, _| set_slot(world, volume, 1, MapSlot { id: 3, birth: 9 }));
    assert!(found.contains(&Difference::Entry { slot, block: 1 }), "{found:?}");
    let found = after(|world, volume, _| set_slot(world, volume, 1, MapSlot { id: 5000, birth: 2 }));
    assert!(found.contains(&Difference::Entry { slot, block: 1 }), "{found:?}");
    let found = after(|world, volume, _| set_slot(world, volume, 1, MapSlot { id: 3, birth: 1 }));
    assert_eq!(found, [Difference::NotInherited { slot, block: 1 }]);
    let found = after(|world, volume, _| set_catalogue(world, volume, |entry| entry.blocks = 1));
    assert_eq!(
        found,
        [Difference::Entry { slot, block: 1 }, Difference::Count { id: ChunkId(3), count: 1, found: 0 }]
    );
    let found = after(|world, volume, _| {
        let top = world.entry(volume).top.id;
        let leaf = world.pages.any(place::of_map(top)).expect("in use").map_slot(0);
        world.pages.damage(place::of_map(top)).set_map_slot(1, leaf);
    });
    assert!(matches!(found[0], Difference::PageTwice(_)), "{found:?}");
}

#[test]
fn chains_that_do_not_hold_together_are_found() {
    let (volume, snapshot) = (CatalogueSlot(0), CatalogueSlot(1));
    let found = after(|world, _, _| set_catalogue(world, snapshot, |entry| entry.after = None));
    assert!(found.contains(&Difference::Link(snapshot)), "{found:?}");
    let found = after(|world, _, _| set_catalogue(world, snapshot, |entry| entry.number = 2));
    assert!(found.contains(&Difference::Link(snapshot)), "{found:?}");
    let found = after(|world, _, _| set_catalogue(world, snapshot, |entry| entry.before = Some(snapshot)));
    assert!(found.contains(&Difference::Link(snapshot)), "{found:?}");
    let found = after(|world, _, _| set_catalogue(world, volume, |entry| entry.before = None));
    assert!(found.contains(&Difference::Link(snapshot)), "{found:?}");
    let found = after(|world, _, _| set_catalogue(world, volume, |entry| entry.height = 0));
    assert!(found.contains(&Difference::Slot(volume)), "{found:?}");
}
