//! Each rule by itself.

use super::*;

const A: Content = 1;
const B: Content = 2;
const C: Content = 3;

fn store(segment: u32, block: u32, ids: &[u64]) -> CasRecord {
    let chunks = ids.iter().map(|id| (ChunkId(*id), hash_of(*id))).collect();
    CasRecord::Store { segment: SegmentIndex(segment), block, chunks }
}

fn map(volume: CatalogueSlot, block: u64, ids: &[u64]) -> CasRecord {
    CasRecord::Map { volume, block, ids: ids.iter().copied().map(ChunkId).collect() }
}

fn open(segment: u32) -> CasRecord {
    CasRecord::Open { segment: SegmentIndex(segment), kind: SegmentEntry::DATA }
}

#[test]
fn chunks_are_stored_under_free_ids_at_empty_places_of_open_segments() {
    let mut world = World::new();
    let volume = world.create(100);
    let segment = SegmentIndex(1);
    assert_eq!(world.apply(store(1, 0, &[1])), Err(Inconsistent::SegmentKind { segment, kind: 0 }));
    assert_eq!(world.apply(store(160, 0, &[1])), Err(Inconsistent::NoSegment(SegmentIndex(160))));
    world.done(open(1));
    assert_eq!(world.apply(store(1, 7, &[1, 2])), Err(Inconsistent::Place { segment, block: 7 }));
    assert_eq!(world.apply(store(1, u32::MAX, &[1])), Err(Inconsistent::Place { segment, block: u32::MAX }));
    assert_eq!(world.apply(store(1, 0, &[0])), Err(Inconsistent::NoChunk(ChunkId(0))));
    assert_eq!(world.apply(store(1, 0, &[1000])), Err(Inconsistent::NoChunk(ChunkId(1000))));
    assert_eq!(world.apply(store(1, 0, &[1, 1])), Err(Inconsistent::ChunkTaken(ChunkId(1))));
    world.done(store(1, 2, &[1, 600]));
    world.done(map(volume, 9, &[600, 1]));
    world.check();
    assert_eq!(world.apply(store(1, 3, &[2])), Err(Inconsistent::Place { segment, block: 3 }));
    assert_eq!(world.apply(store(1, 4, &[2, 600])), Err(Inconsistent::ChunkTaken(ChunkId(600))));
    world.show_all();
    let Located::At(place) = world.ledger.locate(&world.pages, ChunkId(600)) else { panic!("it is stored") };
    assert_eq!((place.segment, place.offset, place.stored), (segment, 3 * 256, 256));
    assert_eq!(world.live(segment), 2 * 256);
}

#[test]
fn a_chunk_lives_as_long_as_an_entry_names_it() {
    let mut world = World::new();
    let volume = world.create(TWO_LEVELS * 2);
    world.write(volume, 0, &[A, A, B]);
    world.write(volume, TWO_LEVELS, &[A]);
    assert_eq!((world.count(A), world.count(B)), (3, 1));
    world.write(volume, 0, &[B, B]);
    assert_eq!((world.count(A), world.count(B)), (1, 3));
    assert_eq!(world.effects, Effects::default());
    world.unmap(volume, TWO_LEVELS, 1);
    assert_eq!(world.effects, Effects { freed: vec![ChunkId(1)], emptied: vec![] });
    world.unmap(volume, 0, 3);
    assert_eq!(world.effects, Effects { freed: vec![ChunkId(2)], emptied: vec![SegmentIndex(1)] });
    assert_eq!(world.apply(map(volume, 0, &[1])), Err(Inconsistent::ChunkVoid(ChunkId(1))));
    world.check();
}

#[test]
fn a_chunk_that_changes_its_block_within_a_record_keeps_its_id() {
    let mut world = World::new();
    let volume = world.create(LEAF * 2);
    world.write(volume, LEAF - 1, &[A, B]);
    world.write(volume, LEAF - 1, &[B, A]);
    assert_eq!(world.effects, Effects::default());
    assert_eq!((world.read(volume, LEAF - 1), world.read(volume, LEAF)), (Some(B), Some(A)));
    world.check();
}

#[test]
fn counts_do_not_go_beyond_their_maximum() {
    let mut world = World::new();
    let volume = world.create(100);
    world.write(volume, 0, &[A]);
    let (name, at) = place::of_state(ChunkId(1));
    let page = world.pages.damage(name);
    let mut state = page.state_entry(at);
    state.count = (u16::MAX - 1).into();
    page.set_state_entry(at, state);
    assert_eq!(world.apply(map(volume, 5, &[1, 1])), Err(Inconsistent::ChunkFull(ChunkId(1))));
    world.done(map(volume, 5, &[1]));
    assert_eq!(world.count(A), u16::MAX);
    assert_eq!(world.apply(map(volume, 6, &[1])), Err(Inconsistent::ChunkFull(ChunkId(1))));
}

#[test]
fn blocks_beyond_the_end_and_slots_that_are_no_volume_are_refused() {
    let mut world = World::new();
    let volume = world.create(600);
    world.write(volume, 599, &[A]);
    let blocks = Inconsistent::Blocks { slot: volume, blocks: 599 };
    assert_eq!(world.apply(map(volume, 599, &[1, 1])), Err(blocks));
    let unmap = |block, count| CasRecord::Unmap { volume, block, count };
    assert_eq!(world.apply(unmap(599, 2)), Err(blocks));
    assert!(world.apply(unmap(u64::MAX, 2)).is_err());
    world.done(unmap(600, 0));
    assert_eq!(world.read(volume, 599), Some(A));
    let snapshot = world.snapshot(volume);
    let state = Inconsistent::SlotState { slot: snapshot, state: CatalogueState::Snapshot };
    assert_eq!(world.apply(map(snapshot, 0, &[1])), Err(state));
    let none = CatalogueSlot(BOUNDS.slots);
    assert_eq!(world.apply(map(none, 0, &[1])), Err(Inconsistent::NoSlot(none)));
    assert_eq!(world.apply(CasRecord::Delete { slot: none }), Err(Inconsistent::NoSlot(none)));
}

#[test]
fn a_snapshot_keeps_what_it_has() {
    let mut world = World::new();
    let volume = world.create(TWO_LEVELS);
    world.write(volume, 0, &[A, B]);
    world.write(volume, LEAF, &[C]);
    let snapshot = world.snapshot(volume);
    assert_eq!(world.pages.map_pages.len(), 3);
    world.write(volume, 0, &[C]);
    assert_eq!(world.pages.map_pages.len(), 5, "the top and one leaf are copied");
    world.write(volume, 1, &[C]);
    assert_eq!(world.pages.map_pages.len(), 5, "once");
    assert_eq!((world.count(A), world.count(B), world.count(C)), (1, 1, 3));
    world.unmap(volume, 0, TWO_LEVELS);
    assert_eq!(world.pages.map_pages.len(), 3);
    assert_eq!((world.read(volume, LEAF), world.read(snapshot, LEAF)), (None, Some(C)));
    assert_eq!((world.read(snapshot, 0), world.read(snapshot, 1)), (Some(A), Some(B)));
    assert_eq!((world.entry(volume).mapped, world.entry(snapshot).mapped), (0, 3));
    world.check();
    world.delete(snapshot);
    world.finish(snapshot);
    assert_eq!(world.entry(snapshot).state, CatalogueState::Free);
    world.check_empty();
}

#[test]
fn where_a_deletion_has_passed_the_head_is_judged_without_the_snapshot() {
    let mut world = World::new();
    let volume = world.create(TWO_LEVELS);
    world.write(volume, 0, &[A]);
    let first = world.snapshot(volume);
    world.write(volume, 1, &[B]);
    world.write(volume, LEAF, &[C]);
    let second = world.snapshot(volume);
    world.delete(second);
    world.step(second, LEAF);
    world.check();
    // The first snapshot still has A; B and C are those of the second, which is gone from the first leaf.
    world.write(volume, 0, &[4, 5]);
    assert_eq!((world.count(A), world.count(B)), (1, 0));
    world.check();
    world.write(volume, LEAF, &[6]);
    assert_eq!(world.count(C), 1);
    world.check();
    world.finish(second);
    assert_eq!(world.count(C), 0);
    assert_eq!((world.entry(volume).before, world.entry(first).after), (Some(first), Some(volume)));
    world.check();
}

#[test]
fn below_a_page_that_a_deletion_has_partly_passed_pages_are_the_volumes_own() {
    let mut world = World::new();
    let volume = world.create(TWO_LEVELS);
    world.write(volume, 0, &[A]);
    world.write(volume, LEAF, &[B]);
    let snapshot = world.snapshot(volume);
    world.delete(snapshot);
    world.step(snapshot, LEAF);
    // The top page is shared, its first leaf is not.
    world.unmap(volume, 0, TWO_LEVELS);
    assert_eq!((world.count(A), world.count(B)), (0, 1));
    world.check();
    world.finish(snapshot);
    world.check_empty();
}

#[test]
fn a_snapshot_taken_while_its_predecessor_is_deleted_takes_its_place() {
    let mut world = World::new();
    let volume = world.create(TWO_LEVELS);
    world.write(volume, 0, &[A]);
    world.write(volume, LEAF, &[B]);
    let first = world.snapshot(volume);
    world.write(volume, 0, &[C]);
    world.delete(first);
    world.step(first, LEAF);
    assert_eq!(world.count(A), 0);
    let second = world.snapshot(volume);
    world.check();
    assert_eq!(world.apply(CasRecord::Delete { slot: second }), Err(Inconsistent::Linked(second)));
    world.write(volume, LEAF, &[4]);
    world.finish(first);
    world.check();
    assert_eq!((world.read(second, 0), world.read(second, LEAF)), (Some(C), Some(B)));
    assert_eq!((world.entry(second).before, world.entry(second).after), (None, Some(volume)));
    world.delete(second);
    world.finish(second);
    world.check();
}

#[test]
fn neighbours_are_deleted_one_after_the_other() {
    let mut world = World::new();
    let volume = world.create(10);
    let snapshots: Vec<_> = (0..3).map(|_| world.snapshot(volume)).collect();
    world.delete(snapshots[1]);
    for slot in [snapshots[0], snapshots[2], volume] {
        assert_eq!(world.apply(CasRecord::Delete { slot }), Err(Inconsistent::Linked(slot)));
    }
    let going = Inconsistent::SlotState { slot: snapshots[1], state: CatalogueState::Going };
    assert_eq!(world.apply(CasRecord::Delete { slot: snapshots[1] }), Err(going));
    world.finish(snapshots[1]);
    for slot in [snapshots[0], snapshots[2], volume] {
        world.delete(slot);
        world.finish(slot);
    }
    world.check_empty();
}

#[test]
fn a_rollback_and_what_it_took_out_count_apart() {
    let mut world = World::new();
    let volume = world.create(TWO_LEVELS);
    world.write(volume, 0, &[A]);
    let snapshot = world.snapshot(volume);
    world.write(volume, 0, &[B, B]);
    let old = world.rollback(volume);
    assert_eq!(world.read(volume, 0), Some(A));
    // The same chunk, block and birth as in the old head: still two entries.
    world.write(volume, 0, &[B]);
    assert_eq!(world.count(B), 3);
    world.check();
    assert_eq!(world.apply(CasRecord::Delete { slot: snapshot }), Err(Inconsistent::Linked(snapshot)));
    let newer = world.snapshot(volume);
    world.finish(old);
    assert_eq!((world.count(A), world.count(B)), (1, 1));
    assert_eq!((world.entry(snapshot).after, world.entry(volume).before), (Some(newer), Some(newer)));
    world.check();
    for slot in [snapshot, newer, volume] {
        world.delete(slot);
        world.finish(slot);
        world.check();
    }
    world.check_empty();
}

#[test]
fn a_rollback_needs_a_snapshot_that_stays() {
    let mut world = World::new();
    let volume = world.create(10);
    let slot = CatalogueSlot(9);
    assert_eq!(world.apply(CasRecord::Rollback { volume, slot }), Err(Inconsistent::Linked(volume)));
    let snapshot = world.snapshot(volume);
    world.delete(snapshot);
    let going = Inconsistent::SlotState { slot: snapshot, state: CatalogueState::Going };
    assert_eq!(world.apply(CasRecord::Rollback { volume, slot }), Err(going));
    let (origin, name) = (snapshot, "clone".to_owned());
    assert_eq!(world.apply(CasRecord::Clone { origin, slot, created: 0, name }), Err(going));
}

#[test]
fn a_clone_goes_before_its_origin() {
    let mut world = World::new();
    let volume = world.create(TWO_LEVELS);
    world.write(volume, 0, &[A, B]);
    let origin = world.snapshot(volume);
    let clone = world.clone_of(origin);
    world.write(volume, 0, &[C]);
    world.write(clone, 1, &[C]);
    let own = world.snapshot(clone);
    world.write(clone, 0, &[4]);
    world.check();
    assert_eq!((world.read(clone, 0), world.read(own, 0), world.read(own, 1)), (Some(4), Some(A), Some(C)));
    assert_eq!(world.apply(CasRecord::Delete { slot: origin }), Err(Inconsistent::Linked(origin)));
    assert_eq!(world.apply(CasRecord::Delete { slot: clone }), Err(Inconsistent::Linked(clone)));
    world.delete(own);
    world.finish(own);
    assert_eq!((world.entry(clone).before, world.entry(origin).after), (Some(origin), Some(volume)));
    world.check();
    let old = world.rollback(clone);
    assert_eq!((world.read(clone, 0), world.read(clone, 1)), (Some(A), Some(B)));
    world.finish(old);
    world.check();
    world.delete(clone);
    assert_eq!(world.apply(CasRecord::Delete { slot: origin }), Err(Inconsistent::Linked(origin)));
    world.finish(clone);
    assert_eq!((world.read(origin, 0), world.read(origin, 1)), (Some(A), Some(B)));
    for slot in [origin, volume] {
        world.delete(slot);
        world.finish(slot);
    }
    world.check_empty();
}

#[test]
fn a_volume_grows_by_levels_and_a_snapshot_from_before_goes() {
    let mut world = World::new();
    let volume = world.create(10);
    world.write(volume, 0, &[A, B]);
    let snapshot = world.snapshot(volume);
    world.done(CasRecord::Resize { slot: volume, blocks: TWO_LEVELS + 5 });
    assert_eq!((world.entry(volume).height, world.entry(snapshot).height), (2, 0));
    world.write(volume, TWO_LEVELS, &[C]);
    world.write(volume, 1, &[C]);
    world.check();
    world.delete(snapshot);
    world.finish(snapshot);
    assert_eq!((world.count(A), world.count(B), world.count(C)), (1, 0, 2));
    assert_eq!((world.read(volume, 0), world.read(volume, TWO_LEVELS)), (Some(A), Some(C)));
    world.check();
}

#[test]
fn a_volume_that_shrinks_keeps_no_page_behind_its_end() {
    let mut world = World::new();
    let volume = world.create(LEAF * 3 + 7);
    for leaf in 0..4 {
        world.write(volume, LEAF * leaf, &[A]);
    }
    assert_eq!(world.pages.map_pages.len(), 5);
    let shrink = CasRecord::Resize { slot: volume, blocks: 3 };
    assert_eq!(world.apply(shrink.clone()), Err(Inconsistent::Blocks { slot: volume, blocks: 3 }));
    world.unmap(volume, 3, LEAF * 3 + 4);
    assert_eq!(world.pages.map_pages.len(), 2);
    world.done(shrink);
    world.check();
    world.done(CasRecord::Resize { slot: volume, blocks: LEAF * 3 + 7 });
    assert_eq!((world.read(volume, 0), world.read(volume, LEAF * 3)), (Some(A), None));
    for blocks in [0, u64::MAX] {
        let resize = CasRecord::Resize { slot: volume, blocks };
        assert_eq!(world.apply(resize), Err(Inconsistent::Blocks { slot: volume, blocks }));
    }
}

#[test]
fn holes_that_become_holes_copy_nothing() {
    let mut world = World::new();
    let volume = world.create(TWO_LEVELS);
    world.write(volume, 0, &[A]);
    world.snapshot(volume);
    world.unmap(volume, 1, 400);
    world.unmap(volume, LEAF * 2, LEAF * 100 + 9);
    assert_eq!(world.pages.map_pages.len(), 2);
    world.check();
}

#[test]
fn a_chunk_moves_only_from_where_it_is() {
    let mut world = World::new();
    let volume = world.create(100);
    world.write(volume, 0, &[A, B]);
    world.unmap(volume, 1, 1);
    world.done(open(20));
    let (from, to) = (SegmentIndex(1), SegmentIndex(20));
    let moving = |id, block, at| CasRecord::Move {
        segment: to,
        block: at,
        chunks: vec![Moved { id: ChunkId(id), segment: from, block }],
    };
    let elsewhere = |id| Err(Inconsistent::ChunkElsewhere(ChunkId(id)));
    assert_eq!(world.apply(moving(1, 1, 3)), elsewhere(1), "another block");
    assert_eq!(world.apply(moving(2, 1, 3)), elsewhere(2), "a free id");
    let twice = Moved { id: ChunkId(1), segment: from, block: 0 };
    let twice = CasRecord::Move { segment: to, block: 0, chunks: vec![twice; 2] };
    assert_eq!(world.apply(twice), elsewhere(1));
    world.done(moving(1, 0, 3));
    assert_eq!(world.effects, Effects { freed: vec![], emptied: vec![from] });
    assert_eq!((world.live(from), world.live(to)), (0, 256));
    assert_eq!(world.read(volume, 0), Some(A));
    world.check();
    assert_eq!(world.apply(moving(1, 0, 4)), elsewhere(1), "it moved");
}

#[test]
fn a_segment_is_given_up_when_nothing_lives_in_it_and_starts_afresh() {
    let mut world = World::new();
    let volume = world.create(100);
    let segment = SegmentIndex(1);
    world.write(volume, 0, &[A]);
    let give_up = CasRecord::GiveUp { segment };
    assert_eq!(world.apply(give_up.clone()), Err(Inconsistent::SegmentInUse { segment, live: 256 }));
    assert_eq!(world.apply(open(1)), Err(Inconsistent::SegmentKind { segment, kind: SegmentEntry::DATA }));
    world.unmap(volume, 0, 1);
    world.done(give_up.clone());
    assert_eq!(world.apply(give_up), Err(Inconsistent::SegmentKind { segment, kind: 0 }));
    for kind in [SegmentEntry::FREE, SegmentEntry::ROOT, 9] {
        let refused = Err(Inconsistent::SegmentKind { segment, kind });
        assert_eq!(world.apply(CasRecord::Open { segment, kind }), refused);
    }
    let sequence = world.log.len() as u64;
    world.done(CasRecord::Open { segment, kind: SegmentEntry::JOURNAL });
    let (name, at) = place::of_segment(segment);
    let entry = world.pages.page(name).expect("resident").segment_entry(at);
    assert_eq!(entry, SegmentEntry::new(SegmentEntry::JOURNAL, sequence));
    world.done(store(1, 0, &[5]));
    world.done(map(volume, 0, &[5]));
    world.check();
}

#[test]
fn a_chunk_is_not_mapped_after_its_segment_was_given_up() {
    let mut world = World::new();
    let volume = world.create(100);
    world.done(open(1));
    world.done(store(1, 0, &[5]));
    assert_eq!(
        world.audit(),
        [Difference::Void(ChunkId(5)), Difference::Used { page: 0, used: 1, found: 0 }]
    );
    let segment = SegmentIndex(1);
    world.done(CasRecord::GiveUp { segment });
    assert_eq!(world.apply(map(volume, 0, &[5])), Err(Inconsistent::SegmentKind { segment, kind: 0 }));
}

#[test]
fn names_are_unique_where_they_have_to_be() {
    let mut world = World::new();
    let volume = world.create(10);
    let slot = CatalogueSlot(9);
    let create = |name: &str| CasRecord::Create { slot, created: 0, blocks: 1, name: name.to_owned() };
    for name in ["", "v0", &"x".repeat(65)] {
        assert_eq!(world.apply(create(name)), Err(Inconsistent::Name(slot)));
    }
    let snapshot = world.snapshot(volume);
    let name = world.entry(snapshot).name;
    let again = CasRecord::Snapshot { volume, slot, created: 0, name: name.clone() };
    assert_eq!(world.apply(again), Err(Inconsistent::Name(slot)));
    let other = world.create(10);
    world.done(CasRecord::Snapshot { volume: other, slot, created: 0, name });
    let taken = CasRecord::Snapshot { volume, slot, created: 0, name: "s".to_owned() };
    let state = CatalogueState::Snapshot;
    assert_eq!(world.apply(taken), Err(Inconsistent::SlotState { slot, state }));
    world.check();
}

#[test]
fn the_last_number_is_not_given_to_a_snapshot() {
    let mut world = World::new();
    let volume = world.create(10);
    world.ledger = Ledger::new(BOUNDS, (1 << 24) - 2);
    world.snapshot(volume);
    let slot = CatalogueSlot(9);
    let name = "late".to_owned();
    assert_eq!(
        world.apply(CasRecord::Snapshot { volume, slot, created: 0, name }),
        Err(Inconsistent::Numbers)
    );
    world.write(volume, 0, &[A]);
    world.check();
}

#[test]
fn pages_are_asked_for_level_by_level() {
    let mut world = World::new();
    let volume = world.create(TWO_LEVELS * 2);
    world.write(volume, 0, &[A]);
    world.write(volume, TWO_LEVELS, &[B]);
    // Top, middle, leaf, and the state of the old chunk; that of the new one comes with the first.
    assert_eq!(world.load(&map(volume, 0, &[2])), 3);
    world.pages.shown.clear();
    let mut effects = Effects::default();
    let refused = world.ledger.apply(&mut world.pages, 0, &map(volume, 0, &[2]), &mut effects);
    let Err(Refused::NotHere(names)) = refused else { panic!("{refused:?}") };
    let spaces: Vec<_> = names.iter().map(|name| name.space).collect();
    assert_eq!(spaces, [PageSpace::Map, PageSpace::States]);
    let found = world.ledger.lookup(&world.pages, volume, 0);
    assert_eq!(found, Ok(Found::NotHere(names[0])));
    world.check();
}

#[test]
fn runs_are_looked_up_across_leaves_and_beyond_the_end() {
    let mut world = World::new();
    let volume = world.create(LEAF + 3);
    world.write(volume, LEAF - 1, &[A, B]);
    world.show_all();
    let mut found = Vec::new();
    let each = |block, chunk| found.push((block, chunk));
    world.ledger.lookup_run(&world.pages, volume, LEAF - 2, 6, each).expect("a volume");
    let (a, b) = (Found::Chunk(ChunkId(1)), Found::Chunk(ChunkId(2)));
    let chunks = [Found::Hole, a, b, Found::Hole, Found::Hole, Found::Hole];
    assert_eq!(found, (LEAF - 2..).zip(chunks).collect::<Vec<_>>());
}

#[test]
fn a_deletion_goes_on_in_steps_as_large_as_asked_for() {
    let mut world = World::new();
    let volume = world.create(TWO_LEVELS);
    for leaf in [0, 3, 9, 100] {
        world.write(volume, LEAF * leaf, &[A + leaf]);
    }
    let snapshot = world.snapshot(volume);
    for leaf in [0, 9] {
        world.write(volume, LEAF * leaf, &[B + 200]);
    }
    world.delete(snapshot);
    // The tops are two pages, and so is each pair of leaves that differ; those that are shared cost nothing.
    assert_eq!(world.next_step(snapshot, 1), 9 * LEAF);
    assert_eq!(world.next_step(snapshot, 4), 9 * LEAF);
    assert_eq!(world.next_step(snapshot, 5), TWO_LEVELS);
    for upto in [0, 5, LEAF + 1, TWO_LEVELS + LEAF] {
        let refused = Err(Inconsistent::Step { slot: snapshot, upto });
        assert_eq!(world.apply(CasRecord::DeleteStep { slot: snapshot, upto }), refused);
    }
    world.step(snapshot, 9 * LEAF);
    assert_eq!((world.count(A), world.count(A + 9)), (0, 1));
    assert!(world.apply(CasRecord::DeleteStep { slot: snapshot, upto: LEAF }).is_err());
    world.check();
    world.finish(snapshot);
    assert_eq!(world.pages.map_pages.len(), 5);
    world.check();
}
