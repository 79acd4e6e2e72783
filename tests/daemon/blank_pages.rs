//! Copies of the stripe map that were overwritten look as if they were never written. Where no other copy is there, that is told, and
//! nothing is read as zeroes that was written.

use crate::support::image::{BLOCK, Image};
use crate::support::load::Client;
use crate::support::serve::{Serve, array, both, create};
use crate::support::{calpe, try_run};
use calpe::format::RegionKind;
use calpe::nbd::{Command as NbdCommand, Request};
use calpe::testing::Random;
use std::fs;
use std::path::Path;
use std::process::Command;

const LEN: usize = 1 << 20;

fn read(serve: &Serve) -> Vec<u8> {
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    client.call(&Request::new(NbdCommand::Read, 0, LEN as u64), &[]).expect("connected").expect("read")
}

fn check(there: &Path, members: &[usize]) -> (bool, String) {
    let output =
        try_run(calpe().arg("check").args(members.iter().map(|index| there.join(format!("m{index}")))));
    (output.status.success(), both(&output))
}

/// What scripts/recover.py says of members 1 and 2, and what it has written.
fn recover(dir: &Path, there: &Path, flags: &[&str]) -> (Option<i32>, String, Vec<u8>) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/recover.py");
    let volume = dir.join("volume");
    let mut command = Command::new("python3");
    command.arg(script).args([there.join("m1"), there.join("m2")]).arg("--output").arg(&volume).args(flags);
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
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    client.call(&Request::new(NbdCommand::Write, 0, LEN as u64), &data).expect("connected").expect("written");
    drop(client);
    serve.stop();
    assert!(
        both(&try_run(calpe().arg("inspect").arg(there.join("m2")))).contains("1 page written, at least")
    );

    // The copies of page 0 are on members 0 and 1.
    fs::rename(there.join("m0"), dir.path().join("m0")).expect("moved away");
    let image = Image::open(&there.join("m1"));
    let pages = image.superblock.region(RegionKind::Pages).expect("a logged array").offset.0;
    image.write(pages, &vec![0x5c; 2 * BLOCK as usize]);
    drop(image);

    let (good, text) = check(&there, &[1, 2]);
    assert!(!good && text.contains("1 of 1 pages of the stripe map"), "{text}");
    let (code, text, _) = recover(dir.path(), &there, &[]);
    assert!(code == Some(2) && text.contains("1 of 1 pages of the stripe map"), "{text}");
    let (code, text, volume) = recover(dir.path(), &there, &["--force"]);
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
fn forced_it_is_said_that_stripes_read_as_zeroes() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let config = array("tank", &[&there]);
    let mut serve = Serve::start(dir.path(), &config);
    serve.array_when("it is served", |array| array["state"] == "ONLINE");
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    client
        .call(&Request::new(NbdCommand::Write, 0, LEN as u64), &vec![7; LEN])
        .expect("connected")
        .expect("ok");
    drop(client);
    serve.stop();
    for index in 0..2 {
        let image = Image::open(&there.join(format!("m{index}")));
        let pages = image.superblock.region(RegionKind::Pages).expect("a logged array").offset.0;
        image.write(pages, &vec![0; 2 * BLOCK as usize]);
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
