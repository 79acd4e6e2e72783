//! Promise 1, through the real process: the daemon is killed under a verified write load, again and again,
//! with all members there and with some missing before, during and after; nothing that was acknowledged is
//! lost, and no block is a mix. `CALPE_KILL_CYCLES=200 cargo test --test daemon durability::` does it that
//! often.

use crate::support::load::{Client, Counts, Load};
use crate::support::process::{Daemon, Setup, create_lanes, hide, unhide};
use calpe::control::{ArrayState, MemberState};
use calpe_core::testing::Random;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How many cycles: as many as asked for, or a few.
fn cycles(few: u64) -> u64 {
    match std::env::var("CALPE_KILL_CYCLES") {
        Ok(text) => text.parse().expect("CALPE_KILL_CYCLES is a number"),
        Err(_) => few,
    }
}

/// Kills the daemon under load, and everything must be there afterwards. Every second time members are
/// missing: from before the load, or lost during it, and as many more as there may be when the daemon comes
/// back.
fn kill_under_load(setup: &Setup, lanes: u16, few: u64) {
    let dir = tempfile::tempdir().expect("a directory");
    let (dir, width) = (dir.path(), setup.width());
    let cycles = cycles(few);
    let mut random = Random::new(setup.data as u64 * 1000 + cycles);
    let mut load = Load::new(setup.bytes, setup.stripe_bytes(), random.next_u64());
    let counts = Counts::default();
    let (mut degraded, began) = (0, Instant::now());
    if lanes > 1 {
        create_lanes(dir, setup, lanes);
    }
    let mut daemon = Daemon::start(dir, setup);
    for cycle in 0..cycles {
        let lost = random.choose(setup.parity, width);
        let early = random.below(setup.parity as u64 + 1) as usize;
        let missing = match cycle % 4 {
            1 => &lost[..early.max(1).min(lost.len())],
            3 => &lost[..early],
            _ => &[],
        };
        if cycle % 4 == 1 {
            daemon.kill();
            hide(dir, missing);
            daemon = Daemon::start(dir, setup);
            let state = if missing.is_empty() { ArrayState::Online } else { ArrayState::Degraded };
            assert_eq!(daemon.report().state, state);
        }
        let mut client = Client::connect(&daemon.socket()).expect("connected");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let running = scope.spawn(|| load.run(&mut client, &stop, &counts));
            std::thread::sleep(Duration::from_millis(20 + random.below(150)));
            if cycle % 4 == 3 {
                missing.iter().for_each(|&index| daemon.fail(index));
                std::thread::sleep(Duration::from_millis(random.below(100)));
            }
            daemon.kill();
            let ended = running.join().expect("the load saw nothing wrong");
            assert!(ended.is_err(), "the connection outlived the daemon");
        });
        if cycle % 4 == 3 {
            hide(dir, missing);
        }
        if cycle % 2 == 1 {
            degraded += u64::from(!lost.is_empty());
            // Those that are lost after the crash.
            hide(dir, &lost[missing.len()..]);
        }
        daemon = Daemon::start(dir, setup);
        load.settle(&mut Client::connect(&daemon.socket()).expect("connected")).expect("all is read");
        let report = daemon.report();
        let gone = if cycle % 2 == 1 { lost.len() } else { 0 };
        let in_service = report.members.iter().filter(|member| member.state == MemberState::Online).count();
        assert_eq!(in_service, width - gone, "cycle {cycle}: {report:?}\n{}", daemon.log());
        assert_eq!((report.errors.client, report.lost.len()), (0, 0), "cycle {cycle}: {report:?}");
        if gone > 0 {
            unhide(dir, &lost);
            daemon.bring_back(&lost);
        }
        if cycle % 8 == 7 {
            assert_eq!(daemon.scrub(), 0, "cycle {cycle}\n{}", daemon.log());
        }
        // Nobody was found wrong: nothing on the members was damaged.
        let report = daemon.report();
        assert!(
            report.members.iter().all(|m| m.cksum + m.read + m.write == 0),
            "{report:?}\n{}",
            daemon.log()
        );
    }
    assert_eq!(daemon.scrub(), 0, "{}", daemon.log());
    load.settle(&mut Client::connect(&daemon.socket()).expect("connected")).expect("all is read");
    println!(
        "{}+{} {}: {cycles} kills, {degraded} of them with members missing, {} writes, {} reads, {} flushes, {:.1} s",
        setup.data,
        setup.parity,
        setup.checksum,
        counts.writes.load(Ordering::Relaxed),
        counts.reads.load(Ordering::Relaxed),
        counts.flushes.load(Ordering::Relaxed),
        began.elapsed().as_secs_f64()
    );
}

#[test]
fn nothing_acknowledged_is_lost_when_the_daemon_is_killed_4_2_blake3() {
    kill_under_load(
        &Setup { data: 4, parity: 2, checksum: "blake3", bytes: 16 << 20, chunk: 16 << 10 },
        1,
        20,
    );
}

#[test]
fn nothing_acknowledged_is_lost_when_the_daemon_is_killed_2_1_crc32c() {
    kill_under_load(&Setup { data: 2, parity: 1, checksum: "crc32c", bytes: 8 << 20, chunk: 64 << 10 }, 1, 8);
}

#[test]
fn nothing_acknowledged_is_lost_when_the_daemon_is_killed_3_2_without_checksums() {
    kill_under_load(&Setup { data: 3, parity: 2, checksum: "none", bytes: 8 << 20, chunk: 4 << 10 }, 1, 8);
}

#[test]
fn nothing_acknowledged_is_lost_when_the_daemon_of_an_array_without_parity_is_killed() {
    kill_under_load(&Setup { data: 3, parity: 0, checksum: "crc32c", bytes: 8 << 20, chunk: 16 << 10 }, 1, 8);
}

#[test]
fn nothing_acknowledged_is_lost_when_the_daemon_of_an_array_of_lanes_is_killed() {
    let setup = Setup { data: 4, parity: 2, checksum: "blake3", bytes: 32 << 20, chunk: 16 << 10 };
    kill_under_load(&setup, 5, 16);
}
