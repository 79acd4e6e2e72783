//! Single properties, each shown on a few pages.

use super::*;

/// A world with a durable root over map pages 1 to `count` and the same pages of the table, each with its
/// index as value.
fn world(limit: usize, count: u64) -> World {
    let mut world = World::new(limit);
    for index in 1..=count {
        world.new_map();
        world.change(map(index), index);
        world.change(name(PageSpace::Table, index), index);
    }
    world.freeze();
    world.durable();
    world
}

fn read(world: &World, load: PageLoad) -> Vec<u8> {
    world.disk[&load.at].clone()
}

#[test]
fn a_page_that_is_not_the_one_asked_for_is_refused_and_can_be_read_again() {
    let mut world = world(100, 3);
    world.crash();
    let Want::Read(load) = world.pages.want(map(1)) else { panic!("to be read") };
    let Want::Read(other) = world.pages.want(map(2)) else { panic!("to be read") };
    assert_eq!(world.pages.want(map(1)), Want::UnderWay);
    let bad = Err(BadPage { name: map(1), at: load.at });
    assert_eq!(world.pages.loaded(load, &read(&world, other)), bad, "another page");
    for at in [0, 20, 100, 4095] {
        let Want::Read(load) = world.pages.want(map(1)) else { panic!("to be read again") };
        let mut bytes = read(&world, load);
        bytes[at] ^= 1;
        assert_eq!(world.pages.loaded(load, &bytes), bad, "byte {at}");
        assert!(world.pages.page(map(1)).is_none());
    }
    let Want::Read(load) = world.pages.want(map(1)) else { panic!("to be read again") };
    assert_eq!(world.pages.loaded(load, &read(&world, load)[..4095]), bad, "too short");
    world.check(map(1));
    assert_eq!(world.pages.want(map(1)), Want::InMemory);
}

#[test]
fn a_start_refuses_a_page_of_locations_that_is_not_the_one() {
    let world = world(100, 40);
    let mut opening = Opening::new(key(), &world.durable.spaces).expect("a root");
    let load = opening.next_to_read().expect("locations of the maps");
    assert_eq!((load.name.space, load.name.level), (PageSpace::Map, 1));
    let mut bytes = read(&world, load);
    bytes[1000] ^= 1;
    assert_eq!(opening.loaded(load, &bytes), Err(BadPage { name: load.name, at: load.at }));
    assert!(!opening.is_complete());
    assert_eq!(opening.loaded(load, &read(&world, load)), Ok(()));
    let mut spaces = world.durable.spaces;
    spaces[1].height = 3;
    assert_eq!(Opening::new(key(), &spaces).err(), Some(BadSpace { space: PageSpace::Table }));
}

#[test]
fn a_late_read_of_a_freed_page_is_not_taken_for_that_of_its_successor() {
    let mut world = world(4, 20);
    world.crash();
    let Want::Read(late) = world.pages.want(map(2)) else { panic!("to be read") };
    let bytes = read(&world, late);
    world.free_map(2);
    assert_eq!(world.pages.want(map(2)), Want::InMemory, "and blank");
    assert_eq!(world.new_map(), 2);
    world.change(map(2), 77);
    world.freeze();
    world.durable();
    (5..20).for_each(|number| world.check(map(number)));
    let Want::Read(load) = world.pages.want(map(2)) else { panic!("to be read") };
    assert_ne!(load.at, late.at);
    assert_eq!(world.pages.loaded(late, &bytes), Ok(()));
    assert!(world.pages.page(map(2)).is_none());
    assert_eq!(world.pages.loaded(load, &read(&world, load)), Ok(()));
    world.check(map(2));
}

#[test]
fn what_was_handed_out_is_not_read_before_it_is_written() {
    let mut world = world(4, 2);
    world.change(map(1), 50);
    world.freeze();
    assert!(world.write());
    for index in 1..=2 {
        world.check(name(PageSpace::Table, index));
        assert_eq!(world.pages.want(map(1)), Want::InMemory);
    }
    let state = |world: &World| world.pages.cache.state(map(1));
    assert_eq!(state(&world), Known::Content(PageState::Written));
    world.answer(0);
    assert_eq!(state(&world), Known::Content(PageState::Clean));
    // A change after that is the next root's, and the answer to the old bytes does not make it clean.
    world.change(map(1), 51);
    world.pages.write_answered(map(1));
    assert_eq!(state(&world), Known::Content(PageState::Changed(2)));
    world.durable();
    assert_eq!(state(&world), Known::Content(PageState::Changed(2)));
    assert_eq!(world.durable.contents[&map(1)], 50);
}

#[test]
fn a_page_is_copied_only_when_it_changes_between_freeze_and_writing() {
    let mut world = world(100, 10);
    (1..=10).for_each(|index| world.change(map(index), 100 + index));
    world.freeze();
    let before = world.pages.facts();
    assert_eq!((before.changed, before.frozen), (0, 10));
    world.change(map(9), 1);
    world.change(map(9), 2);
    world.free_map(8);
    world.change(name(PageSpace::Table, 3), 9);
    let held = |world: &World| world.pages.root.as_ref().map(RootWriter::held);
    assert_eq!(held(&world), Some(2));
    assert_eq!(world.pages.facts().page_bytes, before.page_bytes + 4096);
    while world.write() {}
    assert_eq!(held(&world), Some(0));
    world.change(map(1), 3);
    assert_eq!(held(&world), Some(0));
    world.durable();
    assert_eq!(world.pages.facts().frozen, 0);
}

#[test]
fn a_root_without_changes_writes_nothing_and_says_the_same() {
    let mut world = world(100, 600);
    let spaces = world.durable.spaces;
    assert!(spaces[0].height == 1 && spaces[0].pages == 601);
    world.freeze();
    assert_eq!(world.pages.write_bounds(), [0, 0]);
    assert!(!world.write());
    world.durable();
    assert_eq!(world.durable.spaces, spaces);
}

#[test]
fn freed_pages_take_their_locations_with_them() {
    let mut world = world(100, 600);
    let named = world.named.len();
    (509..=600).for_each(|number| world.free_map(number));
    world.freeze();
    world.durable();
    // The second page of locations stays for page 508.
    assert_eq!(world.named.len(), named - 92);
    world.free_map(508);
    world.freeze();
    world.durable();
    assert_eq!(world.named.len(), named - 94);
    world.crash();
    assert_eq!(world.new_map(), 508);
}

#[test]
fn a_segment_of_metadata_is_emptied_by_the_next_root() {
    let mut world = world(20, 600);
    let segments: Vec<_> = world.pages.metadata_segments().into_keys().collect();
    let old: BTreeSet<_> = segments.into_iter().step_by(3).collect();
    let with_locations = world.pages.pages_at(|at| old.contains(&at));
    assert!(with_locations.iter().any(|name| name.level > 0));
    old.iter().for_each(|&segment| world.compact(segment));
    world.freeze();
    world.durable();
    assert_eq!(world.pages.pages_at(|at| old.contains(&at)), []);
    let names: Vec<_> = world.contents.keys().copied().collect();
    names.into_iter().for_each(|name| world.check(name));
}

#[test]
fn memory_stays_at_its_limit_while_nothing_changes() {
    let mut world = world(50, 200);
    for _ in 0..3 {
        (1..=200).for_each(|index| world.check(name(PageSpace::Table, index)));
        assert!(world.pages.facts().page_bytes <= 50 * 4096);
    }
    let facts = world.pages.facts();
    assert!(facts.evictions > 400 && facts.misses >= 550 && facts.hits > 600, "{facts:?}");
}

#[test]
fn what_is_loaded_stays_for_a_while_in_no_memory_at_all() {
    let world = world(1000, 20);
    let mut pages = Pages::new(Opening::new(key(), &world.durable.spaces).expect("a root"), 0);
    for number in 1..=20 {
        let Want::Read(load) = pages.want(map(number)) else { panic!("to be read") };
        assert_eq!(pages.loaded(load, &read(&world, load)), Ok(()));
    }
    assert!((1..=20).all(|number| pages.page(map(number)).is_some()));
}

#[test]
fn the_holder_comes_to_its_end_in_any_memory() {
    let mut world = world(4, 100);
    world.crash();
    // It needs 30 pages at once and asks for them one by one, while others read on.
    let needed: Vec<_> = (1..=30).map(map).collect();
    let mut tries = 0;
    world.is_held = true;
    loop {
        world.pages.hold(true);
        let missing = needed.iter().copied().find(|&name| world.pages.page(name).is_none());
        let all: Vec<_> = needed.iter().map(|&name| world.pages.page(name).is_some()).collect();
        world.pages.hold(false);
        let Some(missing) = missing else { break };
        assert!(!all.iter().all(|&there| there));
        (1..=20).for_each(|index| world.check(name(PageSpace::Table, index + tries)));
        world.fetch(missing);
        tries += 1;
        assert!(tries <= 30, "each try comes nearer");
    }
    needed.iter().for_each(|&name| _ = world.pages.change(name));
    world.pages.end_hold();
}

#[test]
#[should_panic(expected = "is in memory")]
fn a_page_that_is_not_in_memory_is_not_changed() {
    let mut world = world(100, 3);
    world.crash();
    world.pages.change(map(1));
}

#[test]
#[should_panic(expected = "no page of a map has this number")]
fn a_page_of_a_map_is_made_before_it_is_changed() {
    World::new(100).pages.change(map(1));
}

#[test]
#[should_panic(expected = "one root at a time")]
fn a_second_root_waits_for_the_first() {
    let mut world = World::new(100);
    world.pages.freeze();
    world.pages.freeze();
}
