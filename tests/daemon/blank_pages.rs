//! Copies of the stripe map that were overwritten look as if they were never written. Where no other copy is
//! there, that is told, and nothing is read as zeroes that was written.

use crate::support::image::{BLOCK, Image};
use crate::support::load::Client;
use crate::support::serve::{Serve, array, both, create};
use crate::support::{calpe, try_run};
use calpe_core::format::RegionKind;
use calpe_core::nbd::{Command as NbdCommand, Request};
use calpe_core::testing::Random;
use std::fs;
use std::path::Path;
use std::process::Command;

const LEN: usize = 1 << 20;

fn read(serve: &Serve) -> Vec<u8> {
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    client.call(&Request::new(NbdCommand::Read, 0, LEN as u64), &[]).expect("connected").expect("read")
}

fn write(serve: &Serve, data: &[u8]) {
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    let request = Request::new(NbdCommand::Write, 0, data.len() as u64);
    client.call(&request, data).expect("connected").expect("written");
}

/// Overwrites what a member has first in its pages: a copy of page 0 of the map, if it has one.
fn overwrite_map(member: &Path, byte: u8) {
    let image = Image::open(member);
    let pages = image.superblock.region(RegionKind::Pages).expect("a logged array").offset.0;
    image.write(pages, &vec![byte; 2 * BLOCK as usize]);
}

fn check(there: &Path, members: &[usize]) -> (bool, String) {
    let output =
        try_run(calpe().arg("check").args(members.iter().map(|index| there.join(format!("m{index}")))));
    (output.status.success(), both(&output))
}

/// What scripts/recover.py says of these members, and what it has written.
pub(super) fn recover(
    dir: &Path,
    there: &Path,
    members: &[usize],
    flags: &[&str],
) -> (Option<i32>, String, Vec<u8>) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/recover.py");
    let volume = dir.join("volume");
    let mut command = Command::new("python3");
    command.arg(script).args(members.iter().map(|index| there.join(format!("m{index}"))));
    command.arg("--output").arg(&volume).args(flags);
    let output = try_run(&mut command);
    (output.status.code(), both(&output), fs::read(&volume).unwrap_or_default())
}

#[test]
fn a_map_whose_copies_that_are_there_were_overwritten_is_told_and_is_whole_with_the_missing_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let config = array("tank", &[&there]);
    let mut data = vec![0; LEN];
    Random::new(1).fill(&mut data);
    let mut serve = Serve::start(dir.path(), &config);
    serve.array_when("it is served", |array| array["state"] == "ONLINE");
    write(&serve, &data);
    serve.stop();
    assert!(
        both(&try_run(calpe().arg("inspect").arg(there.join("m2")))).contains("1 page written, at least")
    );

    // The copies of page 0 are on members 0 and 1.
    fs::rename(there.join("m0"), dir.path().join("m0")).expect("moved away");
    overwrite_map(&there.join("m1"), 0x5c);

    let (good, text) = check(&there, &[1, 2]);
    assert!(!good && text.contains("1 of 1 pages of the stripe map"), "{text}");
    let (code, text, _) = recover(dir.path(), &there, &[1, 2], &[]);
    assert!(code == Some(2) && text.contains("1 of 1 pages of the stripe map"), "{text}");
    let (code, text, volume) = recover(dir.path(), &there, &[1, 2], &["--force"]);
    assert!(code == Some(0) && text.contains("is zeroes in the file"), "{text}");
    assert!(volume.iter().all(|byte| *byte == 0), "{text}");

    let mut serve = Serve::start(dir.path(), &config);
    let tank = serve.array_when("it was tried", |array| array["state"] == "FAILED");
    let status = tank["status"].as_str().expect("text");
    assert!(status.contains("1 of 1 pages of the stripe map"), "{tank:#}");
    serve.stop();

    // With the member that was missing nothing is lost.
    fs::rename(dir.path().join("m0"), there.join("m0")).expect("moved back");
    let mut serve = Serve::start(dir.path(), &config);
    serve.array_when("it is whole", |array| array["state"] == "ONLINE");
    assert!(read(&serve) == data, "what was written is read");
    serve.says("scrub tank --wait");
    serve.stop();
    let (good, text) = check(&there, &[0, 1, 2]);
    assert!(good, "{text}");
}

#[test]
fn a_map_that_only_a_member_which_had_left_shows_is_recovered_from_there() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let mut data = vec![0; LEN];
    Random::new(2).fill(&mut data);
    let config = array("tank", &[&there]);
    let mut serve = Serve::start(dir.path(), &config);
    serve.array_when("it is served", |array| array["state"] == "ONLINE");
    write(&serve, &data);
    serve.stop();
    let mut serve = Serve::start(dir.path(), &config);
    serve.array_when("it is served again", |array| array["state"] == "ONLINE");
    serve.says("offline tank 0");
    serve.stop();
    overwrite_map(&there.join("m1"), 0x5c);

    let (code, text, _) = recover(dir.path(), &there, &[0, 1, 2], &[]);
    assert!(code == Some(2) && text.contains("1 of 1 pages of the stripe map"), "{text}");
    let (code, text, volume) = recover(dir.path(), &there, &[0, 1, 2], &["--force"]);
    assert!(code == Some(0) && text.contains("page 0 of the stripe map may be an old one"), "{text}");
    assert!(volume[..LEN] == data, "{text}");
}

#[test]
fn forced_it_is_said_that_stripes_read_as_zeroes() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let config = array("tank", &[&there]);
    let mut serve = Serve::start(dir.path(), &config);
    serve.array_when("it is served", |array| array["state"] == "ONLINE");
    write(&serve, &[7; LEN]);
    serve.stop();
    for index in 0..2 {
        overwrite_map(&there.join(format!("m{index}")), 0);
    }
    let mut serve = Serve::start(dir.path(), &config);
    serve.array_when("it was tried", |array| array["state"] == "FAILED");
    serve.says("export tank");
    serve.says(&format!("import --force tank --dir {}", there.display()));
    serve.array_when("it is served", |array| array["state"] == "ONLINE");
    assert!(read(&serve).iter().all(|byte| *byte == 0));
    let events = serve.says("events");
    assert!(
        events.contains("the start was forced, so what was in their stripes reads as zeroes"),
        "{events}"
    );
    // What was given up is not missed again.
    serve.stop();
    let mut serve = Serve::start(dir.path(), &config);
    serve.array_when("it is served again", |array| array["state"] == "ONLINE");
    serve.stop();
}
