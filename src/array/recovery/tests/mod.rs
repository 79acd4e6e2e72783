//! Replay against members that lose what was not flushed: see world.rs for what is simulated and what must hold.

mod world;

use super::*;
use crate::testing::Random;
use world::{Ask, Crash, Deed, End, Shape, World};

fn w(stripe: u64, columns: u32) -> Ask {
    Ask::Write { stripe, columns, row: 0, rows: 1 }
}

fn f(stripe: u64) -> Ask {
    Ask::Fresh { stripe }
}

/// Some run of an array: batches of anything, flushes of single members, notes, checkpoints.
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

/// Does the deeds until the fuse burns out; whether it did.
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
                    world.fuse = None;
                    world.serve(recovered.clone(), pages, liars);
                    return recovered;
                }
                Err(Crash) => true,
            },
            Ok((RecoveryOutcome::Failed { member, .. }, _)) => {
                world.kill(usize::from(member.0));
                false
            }
            Ok((RecoveryOutcome::Refused(error), _)) => panic!("refused: {error}"),
            Err(Crash) => true,
        };
        if crashed {
            let end = if world.random.one_in(2) { End::PowerLoss } else { End::ProcessDeath };
            world.crash(end);
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

/// Runs, crashes, recovers (crashing again inside), and goes on, `rounds` times.
fn soak(shape: Shape, seed: u64, rounds: usize) {
    let mut world = World::new(shape, seed);
    let mut random = Random::new(seed ^ 0xdeed);
    for _ in 0..rounds {
        let deeds = some_deeds(&shape, &mut random, 14, true);
        world.fuse = Some(random.below(120));
        run(&mut world, &deeds);
        world.crash(if random.one_in(3) { End::ProcessDeath } else { End::PowerLoss });
        let (dead, liars) = some_losses(&mut world);
        for member in dead {
            world.kill(member);
        }
        for &liar in &liars {
            // Without checksums nothing tells that a block in place is bad.
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

fn seeds() -> u64 {
    // How many seeds each random test runs: more for a soak.
    std::env::var("CALPE_RECOVERY_SEEDS").ok().and_then(|count| count.parse().ok()).unwrap_or(60)
}

#[test]
fn any_crash_of_any_run_recovers_to_an_acknowledged_state() {
    for seed in 0..seeds() {
        for (k, m) in [(2, 1), (2, 2), (3, 1), (1, 2)] {
            soak(Shape::new(k, m), seed, 4);
        }
    }
}
