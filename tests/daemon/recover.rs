//! docs/on-disk-format.md is enough to recover data with: scripts/recover.py, written from it alone, gets out
//! of the members of a killed, degraded array what the daemon makes of them, block for block.

use crate::support::image::Image;
use crate::support::load::{BLOCK, Client, Counts, Load};
use crate::support::process::{Daemon, Setup, create_lanes, hide};
use crate::support::try_run;
use calpe_core::format::{COPY_BYTES, Superblock};
use calpe_core::nbd::{Command as NbdCommand, Request};
use calpe_core::testing::Random;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const BYTES: u64 = 8 << 20;

/// Runs the script on the members that are there.
fn recover(dir: &Path) -> (Output, Vec<u8>) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/recover.py");
    let volume = dir.join("volume");
    let output = try_run(Command::new("python3").arg(script).args(members(dir)).arg("--output").arg(&volume));
    (output, fs::read(&volume).unwrap_or_default())
}

/// Files of the members that are there.
fn members(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir.join("data")).expect("the directory of the members");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut images: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|e| e == "img")).collect();
    images.sort();
    images
}

/// Kills a daemon under load, with members lost before and after it as many as there may be.
fn killed_and_degraded(dir: &Path, setup: &Setup, early: usize, seed: u64) -> Load {
    let mut random = Random::new(seed);
    let mut load = Load::new(setup.bytes, setup.stripe_bytes(), random.next_u64());
    let lost = random.choose(setup.parity, setup.width());
    let daemon = Daemon::start(dir, setup);
    let mut client = Client::connect(&daemon.socket()).expect("connected");
    std::thread::scope(|scope| {
        let (stop, counts) = (AtomicBool::new(false), Counts::default());
        let running = scope.spawn(move || {
            let ended = load.run(&mut client, &stop, &counts);
            assert!(ended.is_err(), "the connection outlived the daemon");
            load
        });
        std::thread::sleep(Duration::from_millis(300));
        lost[..early].iter().for_each(|&index| daemon.fail(index));
        std::thread::sleep(Duration::from_millis(300));
        daemon.kill();
        let load = running.join().expect("the load saw nothing wrong");
        hide(dir, &lost);
        load
    })
}

fn a_reader_of_the_document_gets_everything(setup: &Setup, early: usize) {
    a_reader_gets_everything_of_lanes(setup, early, 1);
}

fn a_reader_gets_everything_of_lanes(setup: &Setup, early: usize, lanes: u16) {
    let dir = tempfile::tempdir().expect("a directory");
    if lanes > 1 {
        create_lanes(dir.path(), setup, lanes);
    }
    let mut load = killed_and_degraded(dir.path(), setup, early, setup.chunk);
    let (output, volume) = recover(dir.path());
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("not clean") && said.contains(" 0 blocks of 4 KiB lost"), "{said}");
    load.settle_on(&volume);
    // From now on each block has one content, and the daemon must have the same.
    let daemon = Daemon::start(dir.path(), setup);
    load.settle(&mut Client::connect(&daemon.socket()).expect("connected")).expect("all is read");
    daemon.kill();
}

#[test]
fn a_killed_and_degraded_array_is_recovered_4_2_blake3() {
    let setup = Setup { data: 4, parity: 2, checksum: "blake3", bytes: BYTES, chunk: 16 << 10 };
    a_reader_of_the_document_gets_everything(&setup, 1);
}

#[test]
fn a_killed_and_degraded_array_is_recovered_3_2_crc32c() {
    let setup = Setup { data: 3, parity: 2, checksum: "crc32c", bytes: BYTES, chunk: 64 << 10 };
    a_reader_of_the_document_gets_everything(&setup, 0);
}

#[test]
fn a_killed_and_degraded_array_is_recovered_2_1_without_checksums() {
    let setup = Setup { data: 2, parity: 1, checksum: "none", bytes: BYTES, chunk: 4 << 10 };
    a_reader_of_the_document_gets_everything(&setup, 0);
}

#[test]
fn a_killed_and_degraded_array_of_lanes_is_recovered() {
    let setup = Setup { data: 3, parity: 2, checksum: "blake3", bytes: BYTES, chunk: 16 << 10 };
    a_reader_gets_everything_of_lanes(&setup, 1, 4);
}

#[test]
fn an_older_superblock_whose_newest_has_rotted_does_not_count_as_clean() {
    let setup = Setup { data: 2, parity: 1, checksum: "blake3", bytes: BYTES, chunk: 16 << 10 };
    let dir = tempfile::tempdir().expect("a directory");
    let write = |daemon: &Daemon, fill: u8| {
        let mut client = Client::connect(&daemon.socket()).expect("connected");
        let request = Request::new(NbdCommand::Write, 0, BYTES);
        client.call(&request, &vec![fill; BYTES as usize]).expect("connected").expect("written");
        client.call(&Request::new(NbdCommand::Flush, 0, 0), &[]).expect("connected").expect("flushed");
    };
    let daemon = Daemon::start(dir.path(), &setup);
    write(&daemon, 1);
    daemon.stop();
    let daemon = Daemon::start(dir.path(), &setup);
    write(&daemon, 2);
    daemon.kill();
    for path in members(dir.path()) {
        let image = Image::open(&path);
        assert!(!image.superblock.clean);
        for copy in image.copies() {
            let sequence = Superblock::decode(&image.read(copy.start, COPY_BYTES)).map(|s| s.sequence);
            if sequence.is_ok_and(|sequence| sequence == image.superblock.sequence) {
                image.write(copy.start + 0x1000, &[0x66; 64]);
            }
        }
    }
    let (output, volume) = recover(dir.path());
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("not clean") && volume.iter().all(|&byte| byte == 2), "{said}");
}

#[test]
fn what_is_lost_is_told_and_is_what_the_daemon_answers_with_errors() {
    let setup = Setup { data: 3, parity: 1, checksum: "blake3", bytes: BYTES, chunk: 16 << 10 };
    let dir = tempfile::tempdir().expect("a directory");
    drop(killed_and_degraded(dir.path(), &setup, 0, 7));
    // One member is away; another has a part of its data damaged, behind log and pages.
    let victim = members(dir.path()).remove(0);
    let file = File::options().write(true).open(&victim).expect("a member");
    let middle = file.metadata().expect("its size").len() - (2 << 20);
    (0..64).for_each(|at| file.write_all_at(&[0x66; 100], middle + at * 3 * BLOCK as u64).expect("written"));

    let (output, volume) = recover(dir.path());
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let mut lost = vec![false; volume.len() / BLOCK];
    for line in said.lines().filter(|line| line.starts_with("lost: bytes ")) {
        let numbers: Vec<usize> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        lost[numbers[0] / BLOCK..numbers[1].div_ceil(BLOCK)].fill(true);
    }
    assert!(lost.iter().any(|lost| *lost) && !lost.iter().all(|lost| *lost), "{said}");

    let daemon = Daemon::start(dir.path(), &setup);
    let mut client = Client::connect(&daemon.socket()).expect("connected");
    for (at, bytes) in volume.chunks_exact(BLOCK).enumerate() {
        let request = Request::new(NbdCommand::Read, (at * BLOCK) as u64, BLOCK as u64);
        match client.call(&request, &[]).expect("connected") {
            Ok(served) => assert!(served == bytes && !lost[at], "block {at}"),
            Err(failure) => assert!(lost[at], "block {at}: {failure}"),
        }
    }
    daemon.kill();
}

/// Puts a value into a field of all superblocks of a device, with the right checksum.
fn forge(path: &Path, at: usize, value: &[u8]) {
    let file = File::options().read(true).write(true).open(path).expect("a member");
    let bytes = file.metadata().expect("a member").len();
    let mut copy = vec![0; COPY_BYTES];
    for offset in (0..bytes).step_by(BLOCK) {
        if file.read_exact_at(&mut copy, offset).is_err() || Superblock::decode(&copy).is_err() {
            continue;
        }
        copy[at..at + value.len()].copy_from_slice(value);
        copy[0x10..0x30].fill(0);
        let hash = blake3::hash(&copy);
        copy[0x10..0x30].copy_from_slice(hash.as_bytes());
        file.write_all_at(&copy, offset).expect("written");
    }
}

#[test]
fn superblocks_with_impossible_fields_are_refused_by_the_name_of_the_field() {
    let setup = Setup { data: 2, parity: 1, checksum: "crc32c", bytes: BYTES, chunk: 16 << 10 };
    for (at, value, field) in [
        (0xb8, &8194u16.to_le_bytes()[..], "member: 8194"),
        (0x15a, &0u16.to_le_bytes(), "member_count: 0"),
        (0x158, &99u16.to_le_bytes(), "region_count: 99"),
        (0x210, &(1u64 << 45).to_le_bytes(), "log region"),
        (0x3e0, &u64::MAX.to_le_bytes(), "lane_stride: 18446744073709551615"),
        (0x3e0, &(1u64 << 40).to_le_bytes(), "lane_stride: 1099511627776"),
        (0x3e8, &3u64.to_le_bytes(), "whole_volume_bytes: 3"),
        (0x3e8, &(1u64 << 50).to_le_bytes(), "whole_volume_bytes (of which lane 0 has"),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        create_lanes(dir.path(), &setup, 2);
        let devices = members(dir.path());
        // Of one device: the others are enough.
        forge(&devices[2], at, value);
        let (output, volume) = recover(dir.path());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains(&format!("impossible {field}")) && error.contains("02.img"), "{error}");
        assert!(output.status.success() && volume.len() as u64 == BYTES, "{field}: {error}");
        fs::remove_file(dir.path().join("volume")).expect("it was written");
        forge(&devices[1], at, value);
        let (output, volume) = recover(dir.path());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && !error.contains("Traceback"), "{field}: {error}");
        assert!(error.contains("cannot be recovered") && volume.is_empty(), "{field}: {error}");
    }
}
