//! Metadata pages and the end of the log that cannot be read for a moment, or for long (rules T3, R5 and T8):
//! an error that goes away leaves nothing behind, and unknown content is never served as if it were known.
//! Each test is named after the property that it checks.

use crate::scenes::live;
use crate::scenes::page_faults::*;
use crate::scenes::returning::*;
use calpe_core::format::{PAGE_BYTES, PageIndex, PageLayout};
use calpe_core::testing::{DiskRegion, Random, SimArray};
use calpe_core::units::{MemberIndex, Timestamp, VolumeOffset};
use calpe_core::volume::{AdminRequest, NoticeKind};

/// Longer than a start tries.
const FOR_GOOD: Timestamp = Timestamp(u64::MAX);

#[test]
fn pages_that_cannot_be_read_for_a_moment_cost_nothing() {
    for offline in [false, true] {
        for seed in 0..6 {
            pages_unreadable_for_a_moment(offline, 1_000, seed)
                .unwrap_or_else(|what| panic!("{seed}: {what}"));
        }
    }
}

#[test]
fn pages_that_cannot_be_read_for_long_cost_errors_as_long() {
    for offline in [false, true] {
        for seed in 0..6 {
            pages_unreadable_for_a_moment(offline, 8_000, seed)
                .unwrap_or_else(|what| panic!("{seed}: {what}"));
        }
    }
}

#[test]
fn an_old_page_of_the_stripe_map_is_not_taken_for_the_newest() {
    for seed in 0..12 {
        for until in [Timestamp(500_000_000), FOR_GOOD] {
            old_map_page(until, seed).unwrap_or_else(|what| panic!("{seed} {until:?}: {what}"));
        }
    }
}

#[test]
fn pages_that_cannot_be_read_for_a_moment_during_a_replay_cost_nothing() {
    for seed in 0..6 {
        pages_unreadable_during_replay(500, seed).unwrap_or_else(|what| panic!("{seed}: {what}"));
    }
}

#[test]
fn what_could_not_be_read_for_a_moment_survives_a_power_cut_later() {
    for seed in 0..12 {
        pages_unreadable_and_a_power_cut(seed).unwrap_or_else(|what| panic!("{seed}: {what}"));
    }
}

#[test]
fn what_only_a_returning_member_can_tell_of_pages_is_not_destroyed() {
    use OtherCopies::*;
    for others in [Rotten, Unreadable, SomeRotten, RottenAndOneOwnPlace] {
        for (data, parity) in [(2, 1), (3, 1), (2, 2)] {
            for seed in 0..4 {
                only_a_returning_member_has_pages(shape(data, parity, 200), others, seed)
                    .unwrap_or_else(|what| panic!("{data}+{parity} {others:?} {seed}: {what}"));
            }
        }
    }
}

#[test]
fn an_older_version_of_a_returning_member_is_not_taken_for_the_newest() {
    use {Harm::*, OthersHarmed::*};
    // The state when everything can be read again: nothing was destroyed, unless every copy has rotted.
    for (own, others, loses) in [
        (Rotten, (Rotten, Both), true),
        (Rotten, (Unreadable, Both), false),
        (Unreadable, (Rotten, Both), false),
        (Unreadable, (Unreadable, Both), false),
        (Rotten, (Rotten, Older), false),
        (Unreadable, (Unreadable, Older), false),
        (WriteLost, (Unreadable, Older), false),
    ] {
        for (data, parity) in [(2, 1), (2, 2)] {
            for seed in 0..4 {
                let what = format!("{data}+{parity} own {own:?}, others {others:?}, seed {seed}");
                let errors = an_older_version_is_there(shape(data, parity, 200), own, others, seed)
                    .unwrap_or_else(|error| panic!("{what}: {error}"));
                assert!(loses || errors == 0, "{what}: {errors} errors");
            }
        }
    }
}

#[test]
fn errors_that_pass_of_the_only_copies_of_a_returning_member_cost_nothing() {
    for millis in [1, 100, 1000, 30_000] {
        for seed in 0..3 {
            let errors = own_copies_unreadable_for_a_moment(shape(2, 1, 200), millis, seed);
            assert_eq!(errors, Ok(0), "{millis} ms, seed {seed}");
        }
    }
}

#[test]
fn what_a_returning_member_missed_is_never_taken_from_it() {
    let mut taken = 0;
    for seed in 0..80 {
        let (data, parity) = [(2, 1), (2, 2), (3, 1), (1, 2)][(seed % 4) as usize];
        let run = what_it_missed_is_not_taken_from_it(data, parity, seed);
        taken += run.unwrap_or_else(|what| panic!("{data}+{parity} {seed}: {what}"));
    }
    assert!(taken > 100, "{taken}: hardly anything was taken");
}

/// Asserts, over many seeds, that faults of half a second never make a start refuse. Returns how many faults
/// without end did.
fn refusals(scene: fn(u64, u64) -> Result<bool, String>) -> usize {
    let run = |millis, seed| scene(millis, seed).unwrap_or_else(|what| panic!("{seed} {millis}: {what}"));
    let refused = |seed: &u64| {
        assert!(!run(500, *seed), "{seed}: it can be read again");
        run(u64::MAX / 1_000_000, *seed)
    };
    (0..12).filter(refused).count()
}

#[test]
fn a_flushed_batch_is_not_dropped_because_it_cannot_be_read_now() {
    assert!(refusals(flushed_batch_unreadable) > 3);
}

#[test]
fn what_was_flushed_is_not_lost_because_the_logs_cannot_be_read_now() {
    assert!(refusals(logs_unreadable) > 6);
}

#[test]
fn an_error_that_passes_costs_nothing_where_a_block_of_the_log_is_rotten_besides() {
    assert!(refusals(image_rotten_and_log_unreadable) > 3);
}

#[test]
fn rings_that_cannot_be_read_where_the_log_is_not_do_not_keep_an_array_from_starting() {
    for seed in 0..6 {
        unused_ring_unreadable(seed).unwrap_or_else(|what| panic!("{seed}: {what}"));
    }
}

#[test]
fn a_member_that_cannot_be_read_at_all_is_one_fault_and_no_more() {
    for seed in 0..12 {
        one_member_unreadable(seed).unwrap_or_else(|what| panic!("{seed}: {what}"));
    }
}

#[test]
fn what_was_flushed_is_not_lost_because_a_member_comes_late() {
    let scene = |seed| member_comes_late(seed).unwrap_or_else(|what| panic!("{seed}: {what}"));
    assert!((0..12).filter(|seed| scene(*seed)).count() > 2, "hardly any start had to be refused");
}

#[test]
fn what_cannot_be_read_for_want_of_its_pages_is_told_until_it_can() {
    let scene = Scene::stopped(shape(2, 1, 40), 3);
    let mut sim = scene.start(false);
    drain(&mut sim);
    sim.admin(AdminRequest::Offline { member: MemberIndex(0) }).expect("one is spare");
    drain(&mut sim);
    let until = Timestamp(sim.now().0 + 600_000_000_000);
    for disk in sim.disks.values_mut() {
        let pages = DiskRegion::Pages.ranges(disk);
        disk.inject(unreadable(pages, until));
    }
    let size = scene.model.len() as u64;
    assert!((0..size).step_by(BLOCK).any(|at| sim.read(at, BLOCK).is_err()), "nothing was cached");
    let status = sim.status();
    assert!(status.unreadable_pages > 0 && !status.unreadable.is_empty(), "{status:?}");
    // Blocks that an earlier run reported are not counted twice.
    let bytes = |ranges: &[(VolumeOffset, u64)]| ranges.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let ((first, len), before) = (status.unreadable[0], bytes(&status.unreadable));
    assert!(len >= 2 * BLOCK as u64, "{status:?}");
    sim.expect_damage(&[(first, BLOCK as u64)], false);
    sim.expect_damage(&[(VolumeOffset(first.0 + BLOCK as u64), BLOCK as u64)], true);
    let status = sim.status();
    assert_eq!(bytes(&status.unconfirmed_lost), BLOCK as u64);
    assert_eq!((bytes(&status.unconfirmed), bytes(&status.unreadable)), (0, before - BLOCK as u64));
    sim.admin(AdminRequest::Repair).expect("it runs");
    drain(&mut sim);
    let status = sim.status();
    let told = bytes(&status.unreadable) + bytes(&status.unconfirmed_lost) + bytes(&status.unconfirmed);
    let failing = (0..size).step_by(BLOCK).filter(|at| sim.read(*at, BLOCK).is_err()).count();
    assert_eq!(told, (failing * BLOCK) as u64, "{:?}", status.unreadable);
    let ended = sim.notices.iter().rfind(|notice| notice.kind == NoticeKind::RepairEnded).expect("it ended");
    assert!(!ended.text.contains(" 0 cannot be read for now"), "{}", ended.text);
    while sim.now() < until {
        drain(&mut sim);
    }
    drain(&mut sim);
    let status = sim.status();
    assert_eq!((status.unreadable_pages, status.unreadable), (0, Vec::new()), "without any request");
    verify(&mut sim, &scene.model, "at the end").unwrap();
}

/// Executes everything, and lets a tick pass.
fn tick(sim: &mut SimArray) {
    while sim.step() {}
    sim.sleep(100);
}

/// An array of which two of three members could not read their data while a client asked for it; the errors
/// are over.
fn data_unreadable_and_asked_for() -> SimArray {
    let scene = Scene::stopped(shape(2, 1, 40), 5);
    let mut sim = scene.start(false);
    drain(&mut sim);
    let until = Timestamp(sim.now().0 + 3_000_000_000);
    for index in [0, 1] {
        let disk = sim.disks.get_mut(&index).expect("a disk");
        let data = DiskRegion::Data.ranges(disk);
        disk.inject(unreadable(data, until));
    }
    for at in (0..scene.model.len()).step_by(BLOCK) {
        let _ = sim.read(at as u64, BLOCK);
    }
    let bytes: u64 = sim.status().unreadable.iter().map(|(_, bytes)| bytes).sum();
    assert!(bytes > 200 * BLOCK as u64, "{bytes} bytes are listed");
    while sim.now() < until {
        tick(&mut sim);
    }
    sim
}

#[test]
fn what_a_scrub_has_verified_is_not_listed_as_unreadable() {
    let mut sim = data_unreadable_and_asked_for();
    sim.admin(AdminRequest::ScrubStart).expect("it runs");
    while sim.status().last_scrub.is_none() {
        tick(&mut sim);
    }
    let status = sim.status();
    assert_eq!(status.unreadable, [], "{:?}", status.last_scrub);
}

#[test]
fn blocks_that_can_be_read_again_are_listed_no_longer_than_a_moment() {
    let mut sim = data_unreadable_and_asked_for();
    let begun = sim.now();
    while !sim.status().unreadable.is_empty() {
        tick(&mut sim);
        assert!(sim.now().nanos_since(begun) < 8_000_000_000, "{:?}", sim.status().unreadable);
    }
}

/// What happens while copies of pages read wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meanwhile {
    Reads,
    ReadsAndScrub,
    ReadsAndOneWrite,
}

/// All copies of pages of checksums read wrong for a moment: each is damaged in its newest place or in both,
/// or looks as if it had never been written. `rounds`: how often all blocks were written. Returns how many
/// blocks could not be read meanwhile, and how many cannot be read afterwards.
fn pages_wrong_for_a_moment(rounds: u8, meanwhile: Meanwhile, seed: u64) -> (usize, usize) {
    let mut random = Random::new(seed);
    let (world, mut sim, mut model) = Scene::running(shape(2, 1, 100), seed);
    for round in 1..rounds {
        for (at, block) in model.chunks_mut(BLOCK).enumerate() {
            block[7] = round;
            sim.write((at * BLOCK) as u64, block).expect("written");
        }
        sim.settle();
    }
    sim.admin(AdminRequest::Stop).expect("it stops");
    let mut scene = Scene { world, disks: sim.disks.clone(), model };
    let mut sim = scene.start(false);
    tick(&mut sim);
    let layout = PageLayout::new(superblock(&sim.disks[&0]).geometry, true);
    let mut harmed = Vec::new();
    for page in (layout.map_pages()..layout.pages()).map(PageIndex) {
        for (id, both) in copies(&sim.disks[&0], page) {
            let newest = newest_place(&sim.disks[&id], page, &both);
            let (places, from) = match random.below(3) {
                0 => (both, 0),
                1 => (both, 1000),
                _ => (newest, 1000),
            };
            let disk = sim.disks.get_mut(&id).expect("a disk");
            for place in places.step_by(PAGE_BYTES) {
                let right = disk.peek(place, PAGE_BYTES);
                let mut wrong = right.clone();
                wrong[from..].iter_mut().for_each(|byte| *byte ^= 0x5a);
                disk.poke(place, &wrong);
                harmed.push((id, place, right, wrong));
            }
        }
    }
    let errors = verify_or_error(&mut sim, &scene.model, "while pages read wrong").expect("nothing is wrong");
    if meanwhile == Meanwhile::ReadsAndScrub {
        sim.admin(AdminRequest::ScrubStart).expect("it begins");
    }
    if meanwhile == Meanwhile::ReadsAndOneWrite {
        let block = random.index(scene.model.len() / BLOCK) * BLOCK;
        scene.model[block..][..BLOCK].fill(9);
        sim.write(block as u64, &[9; BLOCK]).expect("written");
    }
    live(&mut sim, 5);
    for (id, place, right, wrong) in &harmed {
        let disk = sim.disks.get_mut(id).expect("a disk");
        if disk.peek(*place, PAGE_BYTES) == *wrong {
            disk.poke(*place, right);
        }
    }
    live(&mut sim, 70);
    let later = verify_or_error(&mut sim, &scene.model, "when they read right").expect("nothing is wrong");
    let mut sim = sim.stop_and_restart(false).expect("it starts");
    let last = verify_or_error(&mut sim, &scene.model, "after a restart").expect("nothing is wrong");
    assert!(last <= later, "{last} errors after a restart, {later} before");
    (errors, last)
}

#[test]
fn pages_that_read_wrong_for_a_moment_cost_nothing_unless_they_are_written() {
    use Meanwhile::*;
    let mut decided = 0;
    for meanwhile in [Reads, ReadsAndScrub, ReadsAndOneWrite] {
        for rounds in [1, 2, 3] {
            for seed in 0..6 {
                let (errors, last) = pages_wrong_for_a_moment(rounds, meanwhile, seed);
                assert!(errors > 0, "{meanwhile:?} {rounds} {seed}: nothing was harmed");
                if meanwhile == ReadsAndOneWrite {
                    decided += last;
                } else {
                    assert_eq!(last, 0, "{meanwhile:?} {rounds} {seed}");
                }
            }
        }
    }
    assert!(decided > 0, "a write beside them decides what the page says");
}
