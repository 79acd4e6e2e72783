//! Replay against members that lose writes which were not flushed. See `world.rs` for the simulation,
//! `oracle.rs` for the conditions that must hold.

mod disk;
mod oracle;
pub(super) mod parts;
mod world;

use super::*;
use crate::testing::Random;
use oracle::End;
use world::{Ask, Crash, Deed, Shape, World};

fn w(stripe: u64, columns: u32) -> Ask {
    Ask::Write { stripe, columns, row: 0, rows: 1 }
}

fn f(stripe: u64) -> Ask {
    Ask::Fresh { stripe }
}

/// A random run of an array: batches of anything, flushes of single members, notes, checkpoints.
fn some_deeds(shape: &Shape, random: &mut Random, count: usize, fail: bool) -> Vec<Deed> {
    let ask = |random: &mut Random| {
        let stripe = random.below(shape.stripes);
        match random.below(8) {
            0 | 1 => Ask::Fresh { stripe },
            2 => Ask::Discard { stripe },
            _ => {
                let row = random.below(shape.rows as u64) as usize;
                let rows = 1 + random.below((shape.rows - row) as u64) as usize;
                let columns = 1 + random.below((1 << shape.k) - 1) as u32;
                Ask::Write { stripe, columns, row, rows }
            }
        }
    };
    let deed = |random: &mut Random| match random.below(16) {
        0 => Deed::FlushAll,
        1 => Deed::Note,
        2 => Deed::Checkpoint,
        3..=6 => Deed::Flush(random.below(shape.width() as u64) as usize),
        7 if fail => Deed::Fail(random.below(shape.width() as u64) as usize),
        _ => Deed::Batch((0..1 + random.below(2)).map(|_| ask(random)).collect()),
    };
    (0..count).map(|_| deed(random)).collect()
}

/// Does the deeds until the fuse burns out. Returns whether it did.
fn run(world: &mut World, deeds: &[Deed]) -> bool {
    deeds.iter().any(|deed| matches!(world.act(deed), Err(Crash)))
}

/// Recovers, crashing again where `fuses` says so, until the array serves.
fn recover_through(world: &mut World, fuses: &[u64], liars: &[usize]) -> Recovered {
    let mut fuses = fuses.iter();
    for _ in 0..100 {
        world.fuse = fuses.next().copied();
        let crashed = match world.recover(false) {
            Ok((RecoveryOutcome::Recovered(recovered), pages)) => match world.start_log(&recovered) {
                Ok(()) => {
                    // A crash is no error of a member.
                    let named = |(member, _): &(MemberIndex, u64)| usize::from(member.0);
                    assert!(recovered.log_faults.iter().map(named).all(|at| liars.contains(&at)));
                    world.fuse = None;
                    world.serve((*recovered).clone(), pages, liars);
                    return *recovered;
                }
                Err(Crash) => true,
            },
            Ok((RecoveryOutcome::Failed { member, .. }, _)) => {
                world.kill(usize::from(member.0));
                false
            }
            Ok((RecoveryOutcome::RolledBack(members), _)) => {
                // A member whose newest headers have rotted away looks like one that never had them.
                for (member, _) in members {
                    assert!(liars.contains(&usize::from(member.0)), "member {member} is as it was");
                    world.kill(usize::from(member.0));
                }
                false
            }
            Ok((RecoveryOutcome::Refused(error), _)) => panic!("refused: {error}"),
            Err(Crash) => true,
        };
        if crashed {
            let end = if world.random.one_in(2) { End::PowerLoss } else { End::ProcessDeath };
            world.crash(end);
            if liars.is_empty() && world.live.len() > world.shape.k && world.random.one_in(2) {
                let live: Vec<usize> = world.live.iter().map(|member| usize::from(member.0)).collect();
                let at = world.random.below(live.len() as u64) as usize;
                world.kill(live[at]);
            }
        }
    }
    panic!("the recovery never ends");
}

/// Members to lose at a crash, and members whose blocks rot, at most m together with those that are gone.
fn some_losses(world: &mut World) -> (Vec<usize>, Vec<usize>) {
    let shape = world.shape;
    let gone = shape.width() - world.live.len();
    let mut live: Vec<usize> = world.live.iter().map(|member| usize::from(member.0)).collect();
    let mut losses = Vec::new();
    for _ in gone..shape.m {
        if world.random.one_in(2) {
            let at = world.random.below(live.len() as u64) as usize;
            losses.push(live.swap_remove(at));
        }
    }
    let liars = world.random.below(losses.len() as u64 + 1) as usize;
    let liars = losses.split_off(losses.len() - liars);
    (losses, liars)
}

/// Runs for `length` deeds, crashes, recovers (crashing again inside), and goes on, `rounds` times.
fn soak(shape: Shape, seed: u64, rounds: usize, length: usize) {
    let mut world = World::new(shape, seed);
    let mut random = Random::new(seed ^ 0xdeed);
    for _ in 0..rounds {
        let deeds = some_deeds(&shape, &mut random, length, true);
        world.fuse = Some(random.below(9 * length as u64));
        run(&mut world, &deeds);
        world.crash(if random.one_in(3) { End::ProcessDeath } else { End::PowerLoss });
        let (dead, liars) = some_losses(&mut world);
        for member in dead {
            world.kill(member);
        }
        for &liar in &liars {
            // Without checksums nothing shows that a block in place is bad.
            let end = if shape.checksums { shape.blocks() } else { u64::from(shape.ring) };
            for _ in 0..random.below(12) {
                let block = random.below(end);
                let disk = &mut world.disks[liar];
                disk.rot(block, &mut random);
            }
        }
        let fuses: Vec<u64> = (0..random.below(4)).map(|_| random.below(60)).collect();
        let recovered = recover_through(&mut world, &fuses, &liars);
        assert_eq!(recovered.lost, [], "within the budget");
        if !liars.is_empty() || world.live.len() <= shape.k {
            return;
        }
    }
}

/// How many seeds each random test runs; more for a soak.
fn seeds(few: u64) -> u64 {
    let factor = std::env::var("CALPE_RECOVERY_SOAK").ok().and_then(|factor| factor.parse().ok());
    few * factor.unwrap_or(1u64)
}

const GEOMETRIES: [(usize, usize); 4] = [(2, 1), (2, 2), (3, 1), (1, 2)];

#[test]
fn any_crash_of_any_run_recovers_to_an_acknowledged_state() {
    for seed in 0..seeds(60) {
        for (k, m) in GEOMETRIES {
            soak(Shape::new(k, m), seed, 4, 14);
        }
    }
}

#[test]
fn logs_that_have_gone_round_their_rings_recover() {
    for seed in 0..seeds(30) {
        for (k, m) in GEOMETRIES {
            soak(Shape { ring: 30, ..Shape::new(k, m) }, seed, 2, 80);
        }
    }
}

#[test]
fn stripes_of_several_rows_recover() {
    for seed in 0..seeds(30) {
        for (k, m) in GEOMETRIES {
            let hasher = if seed % 2 == 0 { BlockHasher::Blake3 } else { BlockHasher::Crc32c };
            soak(Shape { rows: 3, ring: 110, hasher, ..Shape::new(k, m) }, seed, 4, 14);
        }
    }
}

#[test]
fn without_checksum_pages_rows_recover_all_the_same() {
    for seed in 0..seeds(40) {
        for (k, m) in GEOMETRIES {
            soak(Shape { rows: 2, ring: 80, checksums: false, ..Shape::new(k, m) }, seed, 4, 14);
        }
    }
}

#[test]
fn an_array_without_parity_recovers() {
    for seed in 0..seeds(40) {
        soak(Shape::new(2, 0), seed, 4, 14);
        soak(Shape::new(1, 0), seed, 4, 14);
    }
}

/// The scenarios of the executable model: batches, and how many members fail while it runs.
fn scenarios() -> Vec<(usize, usize, Vec<Vec<Ask>>, usize)> {
    vec![
        (2, 1, vec![vec![w(0, 1)], vec![w(0, 2)]], 1),
        (2, 1, vec![vec![w(0, 1)]], 1),
        (2, 1, vec![vec![w(0, 1), w(1, 2)], vec![w(0, 2)], vec![w(1, 1)]], 0),
        (2, 1, vec![vec![w(0, 1)], vec![f(0)], vec![f(0)]], 0),
        (2, 1, vec![vec![f(0)], vec![w(0, 1)]], 0),
        (2, 1, vec![vec![f(0)]], 1),
        (2, 1, vec![vec![f(0)], vec![f(0)]], 1),
        (2, 2, vec![vec![w(0, 1)]], 2),
        (2, 2, vec![vec![w(0, 3)]], 1),
        (2, 2, vec![vec![f(0)], vec![w(0, 1)]], 0),
        (3, 1, vec![vec![w(0, 1)], vec![w(0, 2)]], 1),
        (1, 2, vec![vec![w(0, 1)], vec![f(0)], vec![w(0, 1)]], 1),
        // Beyond the model: a stripe that is given up and written again.
        (2, 1, vec![vec![w(0, 3)], vec![Ask::Discard { stripe: 0 }], vec![w(0, 1)]], 0),
        (2, 1, vec![vec![f(0)], vec![Ask::Discard { stripe: 0 }, w(0, 2)], vec![f(0)]], 0),
    ]
}

/// One interleaving of a script with flushes of single members, notes, destage and failures.
fn interleave(script: &[Vec<Ask>], width: usize, mut fails: usize, random: &mut Random) -> Vec<Deed> {
    let mut deeds = Vec::new();
    for batch in script {
        deeds.push(Deed::Batch(batch.clone()));
        for _ in 0..random.below(5) {
            deeds.push(match random.below(10) {
                0 => Deed::Checkpoint,
                1 | 2 => Deed::Note,
                3 => Deed::FlushAll,
                4 if fails > 0 => {
                    fails -= 1;
                    Deed::Fail(random.below(width as u64) as usize)
                }
                _ => Deed::Flush(random.below(width as u64) as usize),
            });
        }
    }
    deeds.push(Deed::Checkpoint);
    deeds
}

/// All sets of live members that may be lost.
fn dead_sets(world: &World) -> Vec<Vec<usize>> {
    let live: Vec<usize> = world.live.iter().map(|member| usize::from(member.0)).collect();
    let spare = live.len() - world.shape.k;
    let members =
        |set: u32| live.iter().enumerate().filter(move |(at, _)| set >> at & 1 == 1).map(|(_, m)| *m);
    (0..1 << live.len())
        .map(|set| members(set).collect::<Vec<_>>())
        .filter(|set| set.len() <= spare)
        .collect()
}

#[test]
fn every_scenario_of_the_model_recovers_from_a_crash_at_every_write_and_flush() {
    let mut random = Random::new(3);
    for (k, m, script, fails) in scenarios() {
        for seed in 0..seeds(1) {
            let deeds = interleave(&script, k + m, fails, &mut random);
            let mut whole = World::new(Shape::new(k, m), seed);
            assert!(!run(&mut whole, &deeds));
            for fuse in 0..=whole.burnt {
                for end in [End::PowerLoss, End::ProcessDeath] {
                    let crashed = || {
                        let mut world = World::new(Shape::new(k, m), seed);
                        world.fuse = Some(fuse);
                        run(&mut world, &deeds);
                        world
                    };
                    for dead in dead_sets(&crashed()) {
                        let mut world = crashed();
                        world.random = Random::new(random.next_u64());
                        world.crash(end);
                        dead.iter().for_each(|&member| world.kill(member));
                        let fuses: Vec<u64> = (0..random.below(3)).map(|_| random.below(40)).collect();
                        let recovered = recover_through(&mut world, &fuses, &[]);
                        assert_eq!(recovered.lost, []);
                    }
                }
            }
        }
    }
}

#[test]
fn a_crash_at_every_write_and_flush_of_the_recovery_is_recovered_from() {
    for seed in 0..seeds(4) {
        for (k, m) in GEOMETRIES {
            let shape = Shape::new(k, m);
            let deeds = some_deeds(&shape, &mut Random::new(seed), 10, false);
            let crashed = |random: u64| {
                let mut world = World::new(shape, seed);
                world.fuse = Some(40 + seed * 7);
                run(&mut world, &deeds);
                world.random = Random::new(seed);
                world.crash(End::PowerLoss);
                world.kill((seed as usize + k) % (k + m));
                world.random = Random::new(random);
                world.burnt = 0;
                world
            };
            let mut whole = crashed(1);
            recover_through(&mut whole, &[], &[]);
            for fuse in 0..whole.burnt {
                for random in 0..6 {
                    recover_through(&mut crashed(random), &[fuse], &[]);
                    recover_through(&mut crashed(random), &[fuse, random * 9], &[]);
                }
            }
        }
    }
}

#[test]
fn devices_that_are_being_built_stay_complete_below_their_bounds() {
    for seed in 0..seeds(60) {
        for (shape, which) in [
            (Shape::new(2, 1), Which::Primary),
            (Shape::new(2, 2), Which::Replacement),
            (Shape { rows: 2, ring: 80, checksums: seed % 2 == 0, ..Shape::new(3, 2) }, Which::Primary),
        ] {
            let mut world = World::new(shape, seed);
            let mut random = Random::new(seed);
            assert!(!run(&mut world, &some_deeds(&shape, &mut random, 8, false)));
            let member = random.below(shape.width() as u64) as usize;
            if which == Which::Primary {
                assert!(!run(&mut world, &[Deed::Fail(member)]));
            }
            assert!(!run(&mut world, &[Deed::Checkpoint]));
            world.build(member, which, random.below(shape.slots + 1));
            world.fuse = Some(random.below(60));
            run(&mut world, &some_deeds(&shape, &mut random, 10, false));
            world.crash(if random.one_in(2) { End::ProcessDeath } else { End::PowerLoss });
            let fuses: Vec<u64> = (0..random.below(3)).map(|_| random.below(40)).collect();
            recover_through(&mut world, &fuses, &[]);
            world.check_building();
        }
    }
}

#[test]
fn a_member_that_dies_under_the_recovery_is_named_and_the_rest_recovers() {
    let mut named = 0;
    for seed in 0..seeds(80) {
        for (k, m) in GEOMETRIES {
            let shape = Shape::new(k, m);
            let mut world = World::new(shape, seed);
            let mut random = Random::new(seed);
            world.fuse = Some(random.below(80));
            run(&mut world, &some_deeds(&shape, &mut random, 10, false));
            world.crash(End::PowerLoss);
            // Dead, and the recovery does not know it.
            let member = random.below(shape.width() as u64) as usize;
            world.disks[member].dead = true;
            match world.recover(false) {
                Ok((RecoveryOutcome::Failed { member: found, .. }, _)) => {
                    assert_eq!(usize::from(found.0), member);
                    named += 1;
                }
                other => panic!("{:?}", other.map(|(outcome, _)| outcome)),
            }
            world.kill(member);
            assert_eq!(recover_through(&mut world, &[], &[]).lost, []);
        }
    }
    assert!(named > 0);
}

/// Rots blocks of some batch's pieces on more members than the array survives.
fn rot_batch(world: &mut World, random: &mut Random) {
    let Some(batch) = world.last_log.get(random.below(world.last_log.len().max(1) as u64) as usize).cloned()
    else {
        return;
    };
    let members = world.shape.m + 1 + random.below(2) as usize;
    for member in random.choose(members, world.shape.width()) {
        let blocks = batch.header_blocks() + world::payload_blocks(&batch, member, &world.map());
        // Payloads more often than headers.
        let first = if random.one_in(4) { 0 } else { batch.header_blocks().min(blocks - 1) };
        for block in first..blocks {
            world.disks[member].rot(u64::from(batch.places[member] + block), random);
        }
    }
}

/// Whether more of the log is gone or cannot be read than the array survives.
fn is_of_the_log(error: &RecoveryError) -> bool {
    use RecoveryError::{EndUnreadable, LogBroken, LogUnreadable, RowUnreadable};
    matches!(error, LogBroken { .. } | EndUnreadable { .. } | LogUnreadable { .. } | RowUnreadable { .. })
}

#[test]
fn beyond_the_budget_noted_rows_are_told_lost_or_the_start_is_refused_and_nothing_is_wrong() {
    let (mut lost, mut refused, mut whole) = (0, 0, 0);
    for seed in 0..seeds(300) {
        for (shape, force) in [
            (Shape::new(2, 1), false),
            (Shape::new(2, 2), true),
            (Shape { rows: 2, ring: 80, ..Shape::new(3, 1) }, false),
        ] {
            let mut world = World::new(shape, seed);
            let mut random = Random::new(seed);
            world.fuse = Some(random.below(100));
            run(&mut world, &some_deeds(&shape, &mut random, 12, false));
            world.crash(End::ProcessDeath);
            world.lower_floor_to_note();
            rot_batch(&mut world, &mut random);
            let mut outcome = world.recover(false);
            // A member whose newest headers are gone looks like one that was rolled back.
            while let Ok((RecoveryOutcome::RolledBack(members), _)) = &outcome {
                members.iter().for_each(|(member, _)| world.kill(usize::from(member.0)));
                if world.live.len() < shape.k {
                    break;
                }
                outcome = world.recover(false);
            }
            match outcome {
                Ok((RecoveryOutcome::RolledBack(_), _)) => refused += 1,
                Ok((RecoveryOutcome::Recovered(recovered), pages)) => {
                    world.start_log(&recovered).unwrap();
                    if recovered.lost.is_empty() {
                        whole += 1
                    } else {
                        lost += 1
                    }
                    world.serve(*recovered, pages, &[]);
                }
                Ok((RecoveryOutcome::Refused(error), _)) if is_of_the_log(&error) => {
                    refused += 1;
                    if force {
                        // Blocks that the lost batches had put in place do not verify now; that is the price.
                        world.force = true;
                        let forced = world.recover(false).unwrap().0;
                        assert!(matches!(forced, RecoveryOutcome::Recovered(_)), "{forced:?}");
                    }
                }
                other => panic!("{:?}", other.map(|(outcome, _)| outcome)),
            }
        }
    }
    assert!(lost > 5 && refused > 5 && whole > 5, "{lost} lost, {refused} refused, {whole} whole");
}

#[test]
fn the_decision_of_a_recovery_stands_when_its_pieces_rot_beyond_the_budget() {
    let mut lost = 0;
    for seed in 0..seeds(400) {
        for (k, m) in [(2, 1), (2, 2)] {
            let shape = Shape::new(k, m);
            let mut world = World::new(shape, seed);
            let mut random = Random::new(seed);
            run(&mut world, &some_deeds(&shape, &mut random, 4, false));
            world.crash(End::ProcessDeath);
            world.lower_floor_to_note();
            // Late enough to be in the middle of the redo more often than not.
            world.fuse = Some(20 + random.below(30));
            let over = world.recover(false).is_ok();
            world.crash(if random.one_in(2) { End::ProcessDeath } else { End::PowerLoss });
            if over {
                continue;
            }
            rot_batch(&mut world, &mut random);
            match world.recover(false) {
                Ok((RecoveryOutcome::Recovered(recovered), pages)) => {
                    world.start_log(&recovered).unwrap();
                    lost += recovered.lost.len();
                    world.serve(*recovered, pages, &[]);
                }
                Ok((RecoveryOutcome::Refused(error), _)) if is_of_the_log(&error) => {}
                other => panic!("{:?}", other.map(|(outcome, _)| outcome)),
            }
        }
    }
    assert!(lost > 0, "{lost}");
}

#[test]
fn nothing_is_in_place_before_the_note_is_durable() {
    let shape = Shape::new(2, 1);
    let mut lost = 0;
    for fuse in 0..60 {
        let mut world = World::new(shape, 1);
        assert!(!run(
            &mut world,
            &[Deed::Batch(vec![w(0, 3)]), Deed::Checkpoint, Deed::Batch(vec![w(0, 3)])]
        ));
        world.crash(End::ProcessDeath);
        let batch = world.last_log.last().cloned().expect("the last batch");
        let crate::format::LogRecord::InPlace(record) = &batch.records[0] else { panic!("not in place") };
        let home = shape.home(record.slot.0, 0);
        let before: Vec<_> = world.disks.iter().map(|disk| disk.peek(home)).collect();
        world.fuse = Some(fuse);
        if world.recover(false).is_ok() {
            break;
        }
        // The power cut leaves only one column in place; then every image rots.
        let column_member = world.member_of(record.slot.0, 0);
        for (member, disk) in world.disks.iter_mut().enumerate() {
            disk.keep_only(|block| member == column_member && block == home);
        }
        world.crash(End::PowerLoss);
        world.lower_floor_to_note();
        let in_place = world.disks.iter().zip(&before).any(|(disk, before)| disk.peek(home) != *before);
        for member in 0..shape.width() {
            let images = batch.places[member] + batch.header_blocks();
            world.disks[member].overwrite(u64::from(images), fuse);
        }
        let recovered = recover_through(&mut world, &[], &[]);
        assert!(!in_place || recovered.dropped == 0, "what the redo has begun is not rolled back");
        lost += u32::from(in_place && !recovered.lost.is_empty());
    }
    assert!(lost > 0);
}

#[test]
fn decoded_blocks_are_compared_with_the_log_where_nothing_else_shows_that_one_is_bad() {
    let shape = Shape { checksums: false, ..Shape::new(2, 1) };
    let mut world = World::new(shape, 1);
    assert!(!run(&mut world, &[Deed::Batch(vec![w(0, 3)]), Deed::Checkpoint, Deed::Batch(vec![w(0, 1)])]));
    world.crash(End::ProcessDeath);
    let batch = world.last_log.last().cloned().expect("the last batch");
    let crate::format::LogRecord::InPlace(record) = &batch.records[0] else { panic!("not in place") };
    // Parity is missing in the log, and the column that it would be computed from has rotted without an
    // error.
    let (parity, other) = (world.member_of(record.slot.0, 2), world.member_of(record.slot.0, 1));
    world.disks[parity].overwrite(u64::from(batch.places[parity] + batch.header_blocks()), 3);
    world.disks[other].overwrite(shape.home(record.slot.0, 0), 4);
    let outcome = world.recover(false).unwrap().0;
    assert!(
        matches!(outcome, RecoveryOutcome::Refused(RecoveryError::RowsLost { rows: 1, .. })),
        "{outcome:?}"
    );
}

#[test]
fn without_checksums_lost_rows_refuse_the_start_unless_forced() {
    let mut refused = 0;
    for seed in 0..seeds(200) {
        let shape = Shape { checksums: false, ..Shape::new(2, 1) };
        let mut world = World::new(shape, seed);
        let mut random = Random::new(seed);
        run(&mut world, &some_deeds(&shape, &mut random, 5, false));
        assert!(!run(&mut world, &[Deed::FlushAll, Deed::Note]));
        world.crash(End::ProcessDeath);
        world.lower_floor_to_note();
        rot_batch(&mut world, &mut random);
        let before: Vec<_> = world.disks.clone();
        match world.recover(false) {
            Ok((RecoveryOutcome::Recovered(recovered), pages)) => {
                assert_eq!(recovered.lost, []);
                world.serve(*recovered, pages, &[]);
            }
            Ok((RecoveryOutcome::Refused(RecoveryError::RowsLost { .. }), _)) => {
                refused += 1;
                for (disk, before) in world.disks.iter().zip(&before) {
                    for block in u64::from(shape.ring)..shape.blocks() {
                        assert_eq!(
                            disk.peek(block),
                            before.peek(block),
                            "refused, and something was written in place"
                        );
                    }
                }
                world.force = true;
                let Ok((RecoveryOutcome::Recovered(recovered), _)) = world.recover(false) else {
                    panic!("refused although forced");
                };
                assert_ne!(recovered.lost, []);
            }
            Ok((RecoveryOutcome::Refused(error), _)) if is_of_the_log(&error) => {}
            other => panic!("{:?}", other.map(|(outcome, _)| outcome)),
        }
    }
    assert!(refused > 5, "{refused}");
}

#[test]
fn a_clean_start_reads_the_map_and_nothing_else() {
    let shape = Shape::new(2, 1);
    let mut world = World::new(shape, 1);
    assert!(!run(&mut world, &[Deed::Batch(vec![f(0), w(1, 1)]), Deed::Checkpoint]));
    world.crash(End::PowerLoss);
    let unclean = recover_through(&mut world, &[], &[]);
    world.crash(End::PowerLoss);
    world.burnt = 0;
    let Ok((RecoveryOutcome::Recovered(recovered), pages)) = world.recover(true) else {
        panic!("not recovered")
    };
    assert_eq!(world.burnt, 0, "nothing is written or flushed");
    let (stripes, next_sequence) = (unclean.stripes, unclean.next_sequence);
    let (end, next_blocks) = (next_sequence, vec![0; 3]);
    let expected = Recovered { stripes, next_sequence, end, next_blocks, ..Recovered::default() };
    assert_eq!(*recovered, expected);
    world.serve(*recovered, pages, &[]);
}

#[test]
fn crashes_between_note_and_log_start_use_up_room_for_one_note_only() {
    let shape = Shape::new(2, 1);
    let mut world = World::new(shape, 5);
    assert!(!run(&mut world, &[Deed::Batch(vec![w(0, 1)]), Deed::FlushAll, Deed::Batch(vec![w(1, 1)])]));
    world.crash(End::ProcessDeath);
    let mut ends = Vec::new();
    for _ in 0..5 {
        let Ok((RecoveryOutcome::Recovered(recovered), _)) = world.recover(false) else {
            panic!("not recovered")
        };
        ends.push((recovered.next_sequence, recovered.next_blocks));
    }
    assert!(ends.windows(2).all(|pair| pair[0] == pair[1]), "{ends:?}");
    assert_eq!(ends[0].0, 3, "two batches and the note");
}

#[test]
fn a_second_recovery_gives_the_same_result() {
    for seed in 0..seeds(40) {
        let shape = Shape::new(2, 2);
        let mut world = World::new(shape, seed);
        let mut random = Random::new(seed);
        world.fuse = Some(random.below(100));
        run(&mut world, &some_deeds(&shape, &mut random, 12, true));
        world.crash(End::PowerLoss);
        let first = recover_through(&mut world, &[], &[]);
        world.crash(End::PowerLoss);
        let second = recover_through(&mut world, &[], &[]);
        assert_eq!((second.batches, second.rows_redone), (0, 0));
        assert_eq!(second.next_sequence, first.next_sequence);
    }
}
