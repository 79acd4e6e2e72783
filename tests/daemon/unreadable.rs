//! What the status says of blocks that cannot be read, and of those who met them: it is true soon, it is
//! forgotten when it is true no more, also over a kill, and nothing counts twice.

use crate::support::image::Image;
use crate::support::load::Client;
use crate::support::serve::{Serve, array, both, create};
use calpe_core::nbd::{Command, Request};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

struct Scene {
    dir: tempfile::TempDir,
    section: String,
    members: PathBuf,
}

impl Scene {
    /// 'tank', 2+1, with a MiB written, of which the first block is beyond repair; nobody has met it yet.
    fn new() -> Scene {
        let dir = tempfile::tempdir().expect("a directory");
        let members = dir.path().join("there");
        create(&members, "tank", 2, 1);
        let scene = Scene { section: array("tank", &[&members]), dir, members };
        let serve = scene.start();
        write(&mut Client::connect(&serve.nbd()).expect("connected"), MIB);
        serve.stop();
        for index in 0..2 {
            let image = Image::open(&scene.members.join(format!("m{index}")));
            image.flip_at(image.superblock.data_region().offset.0, 1);
        }
        scene
    }

    /// The array is served, and nothing runs.
    fn start(&self) -> Serve {
        let mut serve = Serve::start(self.dir.path(), &self.section);
        serve.array_when("it is served", |tank| tank["state"] == "ONLINE");
        serve
    }

    fn damage_file(&self) -> PathBuf {
        self.dir.path().join("state/damage.json")
    }

    fn beyond_repair_file(&self) -> PathBuf {
        self.dir.path().join("state/beyond-repair.json")
    }
}

fn write(client: &mut Client, bytes: usize) {
    let request = Request::new(Command::Write, 0, bytes as u64);
    client.call(&request, &vec![7; bytes]).expect("connected").expect("written");
}

fn listed(tank: &Value, list: &str) -> usize {
    tank[list].as_array().expect("a list").len()
}

fn offset(part: &Value) -> u64 {
    part["offset"].as_u64().expect("an offset")
}

fn is_clear(tank: &Value) -> bool {
    ["lost", "unreadable", "set_aside", "unconfirmed"].iter().all(|list| listed(tank, list) == 0)
}

fn is_lost(tank: &Value) -> bool {
    listed(tank, "lost") > 0
}

fn is_kept(file: &Path) -> bool {
    fs::read_to_string(file).is_ok_and(|text| text.contains("4096"))
}

fn cksum(tank: &Value) -> u64 {
    let members = tank["members"].as_array().expect("members");
    members.iter().map(|member| member["cksum"].as_u64().expect("a count")).sum()
}

#[test]
fn what_became_a_hole_is_not_damaged_after_a_kill() {
    let scene = Scene::new();
    let mut serve = scene.start();
    serve.ask("scrub tank -w");
    serve.array_when("it is known", is_lost);
    serve.until("it is kept", |_| is_kept(&scene.damage_file()));
    let kept = fs::read(scene.damage_file()).expect("kept");
    serve.until("all is kept", |_| is_kept(&scene.beyond_repair_file()));
    let lost = fs::read(scene.beyond_repair_file()).expect("kept");
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    client.call(&Request::new(Command::Trim, 0, MIB as u64), &[]).expect("connected").expect("trimmed");
    client.call(&Request::new(Command::Flush, 0, 0), &[]).expect("connected").expect("flushed");
    serve.kill();
    // As if it had been killed before that was kept.
    fs::write(scene.damage_file(), kept).expect("written");
    fs::write(scene.beyond_repair_file(), lost).expect("written");
    let mut serve = scene.start();
    serve.array_when("it was looked at", |tank| {
        assert_eq!((listed(tank, "lost"), listed(tank, "unreadable")), (0, 0), "nothing shows it: {tank:#}");
        is_clear(tank)
    });
    serve.until("that is kept", |_| !is_kept(&scene.damage_file()));
    serve.kill();
}

#[test]
fn what_is_known_to_be_lost_is_told_as_lost_right_after_a_restart() {
    let scene = Scene::new();
    let mut serve = scene.start();
    serve.ask("scrub tank -w");
    let before = cksum(&serve.array_when("it is known", is_lost));
    serve.until("it is kept", |_| is_kept(&scene.damage_file()));
    let counters = scene.dir.path().join("state/counters.json");
    serve
        .until("counts are kept", |_| fs::read_to_string(&counters).is_ok_and(|text| text.contains("cksum")));
    serve.kill();
    let mut serve = scene.start();
    let begun = Instant::now();
    let tank = serve.array_when("it was looked at", is_lost);
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    assert_eq!(listed(&tank, "unreadable"), 0);
    assert_eq!(cksum(&tank), before, "an earlier run has counted it");
    serve.kill();
}

#[test]
fn what_is_good_again_is_kept_at_once() {
    const STRIPES: u64 = 5;
    let scene = Scene::new();
    let mut stripe_bytes = 0;
    for index in 0..2 {
        let image = Image::open(&scene.members.join(format!("m{index}")));
        let chunk = u64::from(image.superblock.geometry.chunk);
        stripe_bytes = 2 * chunk;
        let start = image.superblock.data_region().offset.0;
        (1..STRIPES).for_each(|slot| image.flip_at(start + slot * chunk, 1));
    }
    let mut serve = scene.start();
    serve.ask("scrub tank -w");
    let tank = serve.array_when("it is known", is_lost);
    let lost: Vec<u64> = tank["lost"].as_array().expect("a list").iter().map(offset).collect();
    let mut stripes: Vec<u64> = lost.iter().map(|offset| offset / stripe_bytes).collect();
    stripes.dedup();
    assert_eq!(stripes.len(), STRIPES as usize, "{tank:#}");
    let file = scene.damage_file();
    let kept = || fs::read_to_string(&file).unwrap_or_default();
    serve.until("it is kept", |_| kept().matches("4096").count() >= lost.len());
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    let mut waited = Duration::ZERO;
    for stripe in stripes {
        let before = kept();
        let write = Request::new(Command::Write, stripe * stripe_bytes, stripe_bytes);
        client.call(&write, &vec![9; stripe_bytes as usize]).expect("connected").expect("written");
        let begun = Instant::now();
        serve.until("that is kept", |_| kept() != before);
        waited += begun.elapsed();
    }
    // Once a second by chance would be half a second each.
    assert!(waited < Duration::from_millis(1200), "{waited:?}");
    assert!(kept().contains("\"content\": {}"), "{}", kept());
    serve.kill();
}

#[test]
fn a_request_that_fails_counts_once_and_is_told_and_a_look_counts_nothing() {
    let scene = Scene::new();
    let mut serve = scene.start();
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    let read = Request::new(Command::Read, 0, MIB as u64);
    assert!(client.call(&read, &[]).expect("connected").is_err());
    let tank = serve.array_when("it is known", is_lost);
    assert_eq!(tank["errors"]["client"], 1, "{tank:#}");
    let events = serve.events();
    let told: Vec<&Value> = events.iter().filter(|event| event["kind"] == "client_request_failed").collect();
    assert_eq!((told.len(), told[0]["offset"].as_u64()), (1, Some(0)), "{events:?}");
    let text = told[0]["text"].as_str().expect("a text");
    assert!(text.contains("read of 1048576 bytes at 0"), "{text}");
    let before = cksum(&serve.arrays()[0]);
    for _ in 0..3 {
        serve.ask("repair tank -w");
    }
    let tank = &serve.arrays()[0];
    assert_eq!(cksum(tank), before, "nothing new is wrong: {tank:#}");

    // A new device begins at 0.
    let old = (0..2).find(|&at| tank["members"][at]["cksum"] != 0).expect("one was wrong");
    write(&mut client, MIB);
    let new = scene.dir.path().join("new.img");
    serve.says(&format!("replace tank {old} {} -w", new.display()));
    let member = &serve.arrays()[0]["members"][old];
    assert!(member["name"].as_str().expect("a name").ends_with("new.img"), "{member}");
    assert_eq!(
        (&member["cksum"], &member["read"], &member["state"]),
        (&0.into(), &0.into(), &"ONLINE".into())
    );
    // The failed request stays counted until it is cleared, and that is what helps.
    let told = both(&serve.ask("status tank"));
    assert!(told.contains("calpe clear tank"), "{told}");
    serve.says("clear tank");
    assert_eq!(serve.arrays()[0]["errors"]["client"], 0);
    drop(client);
    let said = serve.says("export --force tank");
    assert!(said.contains("the next start serves it again"), "{said}");
    serve.stop();
}

#[test]
fn a_member_that_may_alone_have_blocks_is_to_be_brought_back_and_then_nothing_is_unreadable() {
    let scene = Scene::new();
    // Of member 1 alone, now: with member 0 in service all can be read.
    let image = Image::open(&scene.members.join("m0"));
    image.flip_at(image.superblock.data_region().offset.0, 1);
    let mut serve = scene.start();
    serve.says("offline tank 0");
    serve.ask("scrub tank -w");
    let tank = serve.array_when("it is out", |tank| tank["state"] == "DEGRADED");
    let parts = tank["unreadable"].as_array().expect("a list");
    let bytes: u64 = parts.iter().map(|part| part["bytes"].as_u64().expect("bytes")).sum();
    assert_eq!((bytes, listed(&tank, "lost")), (2 * 4096, 0), "{tank:#}");
    let word = |field: &str| tank[field].as_str().expect("a sentence").to_owned();
    assert!(word("status").starts_with("1 of 3 members is not in service; no further loss"), "{tank:#}");
    assert!(word("status").contains("8 KiB of the volume cannot be read for now"), "{tank:#}");
    assert!(word("action").contains("Bring it back with 'calpe online tank 0'"), "{tank:#}");
    assert!(!word("action").contains("calpe replace"), "{tank:#}");
    let repaired = serve.refuses("repair tank -w");
    assert!(
        repaired.contains("0 B are beyond repair") && repaired.contains("8 KiB unreadable"),
        "{repaired}"
    );
    let told = serve.says("replace tank 0 new.img -n");
    assert!(told.contains("8 KiB of the volume cannot be read, and its own device may be"), "{told}");
    serve.says("online tank 0");
    let told = serve.says("wait tank");
    assert!(!told.contains("cannot be read"), "{told}");
    let tank = serve.array_when("it is back", |tank| tank["state"] == "ONLINE");
    assert!(is_clear(&tank), "{tank:#}");
    serve.stop();
}
