//! `calpe check` through the real binary: what is good is proved good, whatever byte is wrong is named with
//! its member, and no member is changed by looking.

use crate::support::image::{BLOCK, Image, live_log};
use crate::support::load::{Client, Counts, Load};
use crate::support::process::{Daemon, Setup, member};
use crate::support::serve::{Serve, create};
use crate::support::{calpe, run, try_run};
use calpe_core::format::RegionKind;
use calpe_core::nbd::{Command, Request};
use calpe_core::testing::Random;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const SETUP: Setup = Setup { data: 3, parity: 2, checksum: "blake3", bytes: 6 << 20, chunk: 16 << 10 };

fn paths(dir: &Path, setup: &Setup) -> Vec<PathBuf> {
    (0..setup.width()).map(|index| member(dir, index)).collect()
}

/// What the files hold.
fn sums(paths: &[PathBuf]) -> Vec<blake3::Hash> {
    paths.iter().map(|path| blake3::hash(&fs::read(path).expect("read"))).collect()
}

/// Runs a check. Returns its exit code and what it says.
fn check(paths: &[PathBuf]) -> (i32, Value) {
    let output = try_run(calpe().arg("check").arg("--json").args(paths));
    let told = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (output.status.code().expect("an exit code"), told)
}

/// The members that something is wrong with.
fn named(told: &Value) -> Vec<usize> {
    let members = told["members"].as_array().expect("members");
    let wrong = |member: &Value| ["read", "cksum", "superblock"].iter().any(|field| member[field] != 0);
    (0..members.len()).filter(|&at| wrong(&members[at])).collect()
}

#[track_caller]
fn assert_good(paths: &[PathBuf]) -> Value {
    let (code, told) = check(paths);
    assert_eq!(code, 0, "{told:#}");
    assert!(told["good"] == true && told["whole"] == true && named(&told).is_empty(), "{told:#}");
    told
}

/// An array that was written once, whole, and stopped.
fn written(dir: &Path, setup: &Setup) -> Vec<PathBuf> {
    let daemon = Daemon::start(dir, setup);
    let mut client = Client::connect(&daemon.socket()).expect("connected");
    let mut data = vec![0; 1 << 20];
    for offset in (0..setup.bytes).step_by(data.len()) {
        Random::new(offset + 1).fill(&mut data);
        let request = Request::new(Command::Write, offset, data.len() as u64);
        client.call(&request, &data).expect("connected").expect("written");
    }
    drop(client);
    daemon.stop();
    paths(dir, setup)
}

fn some(all: Vec<u64>, count: usize, random: &mut Random) -> Vec<u64> {
    random.choose(count, all.len()).into_iter().map(|at| all[at]).collect()
}

fn one_flipped_byte_is_named(checksum: &'static str, regions: &[RegionKind]) {
    let dir = tempfile::tempdir().expect("a directory");
    let setup = Setup { checksum, ..SETUP };
    let paths = written(dir.path(), &setup);
    let before = sums(&paths);
    assert_eq!(assert_good(&paths)["clean"], true);
    let mut random = Random::new(checksum.len() as u64);
    for (index, path) in paths.iter().enumerate().take(2) {
        let image = Image::open(path);
        let mut places = image.copies();
        for &kind in regions {
            let blocks = some(image.blocks(kind), 4, &mut random);
            assert_eq!(blocks.len(), 4, "{kind} is in use");
            places.extend(blocks.into_iter().map(|at| at..at + BLOCK));
        }
        for place in places {
            let (at, bit) = image.flip(place.clone(), &mut random);
            let (code, told) = check(&paths);
            image.flip_at(at, bit);
            assert_eq!(
                (code, named(&told)),
                (1, vec![index]),
                "bit {bit} of byte {at} in {place:?}: {told:#}"
            );
            assert!(told["good"] == false && told["consistent"] == false && told["whole"] == true);
            assert_eq!(told["lost"], Value::Array(Vec::new()), "{told:#}");
            // A check changes nothing, and does not say that it did.
            for notice in told["notices"].as_array().expect("notices") {
                let text = notice.as_str().expect("a text");
                let done = ["is rewritten", "are rewritten", "will be rewritten"];
                assert!(!done.iter().any(|word| text.contains(word)), "{text}");
            }
        }
    }
    assert_good(&paths);
    assert!(before == sums(&paths), "a check has changed a member");
    // And in words.
    let output = run(calpe().arg("check").args(&paths));
    assert!(output.contains("is good"), "{output}");
}

/// Both copies of a slot are gone where an update goes: there is no other to miss them by.
#[test]
fn superblock_copies_that_are_overwritten_all_count() {
    let dir = tempfile::tempdir().expect("a directory");
    let paths = written(dir.path(), &SETUP);
    assert_good(&paths);
    let whole = fs::read(&paths[1]).expect("read");
    let copies = Image::open(&paths[1]).copies();
    let mut random = Random::new(3);
    for gone in [&[0][..], &[0, 2], &[1, 3], &[0, 3], &[0, 1, 2]] {
        let mut bytes = whole.clone();
        gone.iter().for_each(|&at: &usize| {
            let place = copies[at].start as usize..copies[at].end as usize;
            random.fill(&mut bytes[place]);
        });
        fs::write(&paths[1], &bytes).expect("written");
        let (code, told) = check(&paths);
        assert_eq!((code, named(&told)), (1, vec![1]), "{gone:?}: {told:#}");
        assert_eq!(told["members"][1]["superblock"], gone.len(), "{gone:?}: {told:#}");
        fs::write(&paths[1], &whole).expect("written");
    }
    assert_good(&paths);
}

#[test]
fn what_a_scrub_would_rewrite_counts_as_repairable() {
    let dir = tempfile::tempdir().expect("a directory");
    let paths = written(dir.path(), &SETUP);
    let image = Image::open(&paths[1]);
    let mut random = Random::new(9);
    let blocks = some(image.blocks(RegionKind::Data), 20, &mut random);
    for at in &blocks {
        image.flip(*at..*at + BLOCK, &mut random);
    }
    let (code, told) = check(&paths);
    assert_eq!((code, named(&told)), (1, vec![1]), "{told:#}");
    assert_eq!((&told["errors"], &told["repairable"]), (&Value::from(20), &Value::from(20)), "{told:#}");
}

#[test]
fn one_flipped_byte_is_named_blake3() {
    one_flipped_byte_is_named("blake3", &[RegionKind::Pages, RegionKind::Data]);
}

#[test]
fn one_flipped_byte_is_named_crc32c() {
    one_flipped_byte_is_named("crc32c", &[RegionKind::Pages, RegionKind::Data]);
}

#[test]
fn one_flipped_byte_is_named_by_parity_alone() {
    one_flipped_byte_is_named("none", &[RegionKind::Data]);
}

#[test]
fn after_a_kill_the_log_is_replayed_in_memory_and_damage_in_it_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path();
    let (mut random, counts) = (Random::new(5), Counts::default());
    let mut load = Load::new(SETUP.bytes, SETUP.stripe_bytes(), 6);
    let paths = paths(dir, &SETUP);
    let mut flipped = 0;
    for round in 0..20 {
        let daemon = Daemon::start(dir, &SETUP);
        let mut client = Client::connect(&daemon.socket()).expect("connected");
        // What the last round left behind was not changed by checks.
        load.settle(&mut client).expect("all is read");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let running = scope.spawn(|| load.run(&mut client, &stop, &counts));
            std::thread::sleep(Duration::from_millis(100 + random.below(100)));
            daemon.kill();
            running.join().expect("the load saw nothing wrong").expect_err("the daemon is dead");
        });
        let before = sums(&paths);
        let told = assert_good(&paths);
        assert_eq!(told["clean"], false);
        let images: Vec<Image> = paths.iter().map(|path| Image::open(path)).collect();
        for index in 0..images.len() {
            let blocks = live_log(&images, &[index]).swap_remove(index);
            for at in some(blocks, 2, &mut random) {
                let (at, bit) = images[index].flip(at..at + BLOCK, &mut random);
                let (code, told) = check(&paths);
                images[index].flip_at(at, bit);
                assert_eq!((code, named(&told)), (1, vec![index]), "round {round}, byte {at}: {told:#}");
                flipped += 1;
            }
        }
        assert!(before == sums(&paths), "a check has changed a member");
        if flipped >= 10 {
            return;
        }
    }
    panic!("the log was hardly ever in use: {flipped} flips");
}

#[test]
fn missing_members_are_not_whole_and_too_much_damage_is_lost_not_wrong() {
    let dir = tempfile::tempdir().expect("a directory");
    let paths = written(dir.path(), &SETUP);
    let (code, told) = check(&paths[1..]);
    assert_eq!(
        (code, &told["consistent"], &told["whole"]),
        (1, &Value::Bool(true), &Value::Bool(false)),
        "{told:#}"
    );
    assert_eq!(told["members"][0]["verified"], false);
    let output = try_run(calpe().arg("check").args(&paths[1..]));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("consistent, not whole") && said.contains("1 of 5 members"), "{said}");

    // One block on each of m + 1 members, in one row: slot 0 is chunk 0 of all of them, and was written.
    let mut random = Random::new(1);
    let mut flips = Vec::new();
    for path in &paths[..3] {
        let image = Image::open(path);
        let first = image.superblock.data_region().offset.0;
        let (at, bit) = image.flip(first..first + BLOCK, &mut random);
        flips.push((image, at, bit));
    }
    let (code, told) = check(&paths);
    assert_eq!((code, named(&told)), (1, vec![0, 1, 2]), "{told:#}");
    let lost: u64 = told["lost"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|part| part["bytes"].as_u64().expect("bytes"))
        .sum();
    assert!((BLOCK..=3 * BLOCK).contains(&lost), "{told:#}");
    for (image, at, bit) in flips {
        image.flip_at(at, bit);
    }
    assert_good(&paths);
}

#[test]
fn what_cannot_be_checked_is_told_and_why() {
    let dir = tempfile::tempdir().expect("a directory");
    let paths = written(dir.path(), &SETUP);
    let refused = |paths: &[PathBuf], code: i32, word: &str| {
        let output = try_run(calpe().arg("check").args(paths));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(code) && said.contains(word), "'{word}': {said}");
    };
    let other = |name: &str| dir.path().join(name);
    fs::write(other("blank"), vec![0; 1 << 20]).expect("a file");
    run(calpe().args(["create", "pond", "-k1", "-m1", "--size=1MiB"]).args([other("p0"), other("p1")]));
    refused(&[], 2, "MEMBER");
    refused(&[other("nowhere")], 1, "nowhere: no such file");
    refused(&[other("blank")], 1, "none of these is a member");
    refused(&[paths[0].clone(), other("p0")], 1, "check one array at a time");
    refused(&[paths[0].clone(), dir.path().join("data/./member-00.img")], 1, "same device");
    refused(&paths[..2], 1, "cannot start");
    let with_blank: Vec<PathBuf> = paths.iter().cloned().chain([other("blank")]).collect();
    let line = |told: &Value, list: &str| told[list][0].as_str().expect("a line").to_owned();
    let (code, told) = check(&with_blank);
    assert_eq!((code, &told["good"], &told["whole"]), (0, &Value::Bool(true), &Value::Bool(true)));
    assert!(line(&told, "notices").contains("blank: no Calpe superblock"), "it is no member: {told:#}");
    let (code, told) = check(&with_blank[1..]);
    assert_eq!((code, &told["consistent"]), (1, &Value::Bool(false)), "it may be the member: {told:#}");
    assert!(line(&told, "problems").contains("blank: no Calpe superblock"), "{told:#}");

    let daemon = Daemon::start(dir.path(), &SETUP);
    refused(&paths, 1, "is in use by process");
    daemon.stop();
    assert_good(&paths);
}

#[test]
fn what_a_member_that_is_not_given_may_have_is_not_called_beyond_repair() {
    let dir = tempfile::tempdir().expect("a directory");
    let paths = written(dir.path(), &SETUP);
    let mut random = Random::new(3);
    // One block on each of m members, in one row of slot 0, where column c is on member c; and one
    // member that is not given.
    for (bad, absent, unreadable) in [([0, 1], 2, 3), ([3, 4], 0, 1), ([1, 3], 4, 1), ([2, 4], 1, 2)] {
        let flips: Vec<(Image, u64, u8)> = bad
            .iter()
            .map(|&member| {
                let image = Image::open(&paths[member]);
                let first = image.superblock.data_region().offset.0;
                let (at, bit) = image.flip(first..first + BLOCK, &mut random);
                (image, at, bit)
            })
            .collect();
        let given: Vec<PathBuf> =
            paths.iter().enumerate().filter(|(at, _)| *at != absent).map(|(_, path)| path.clone()).collect();
        let bytes = |told: &Value, list: &str| -> u64 {
            let parts = told[list].as_array().expect("a list");
            parts.iter().map(|part| part["bytes"].as_u64().expect("bytes")).sum()
        };
        let (code, told) = check(&given);
        assert_eq!(
            (code, &told["consistent"], named(&told)),
            (1, &Value::Bool(false), bad.to_vec()),
            "{told:#}"
        );
        assert_eq!((bytes(&told, "unreadable"), bytes(&told, "lost")), (unreadable * BLOCK, 0), "{told:#}");
        let text = try_run(calpe().arg("check").args(&given));
        let text = String::from_utf8_lossy(&text.stdout).into_owned();
        let line =
            format!("{} KiB of the volume cannot be read without member {absent}", unreadable * BLOCK / 1024);
        assert!(text.contains(&line) && !text.contains("beyond repair"), "{text}");
        let (code, told) = check(&paths);
        assert_eq!((code, bytes(&told, "unreadable"), bytes(&told, "lost")), (1, 0, 0), "{told:#}");
        assert_eq!(told["repairable"], 2, "{told:#}");
        flips.into_iter().for_each(|(image, at, bit)| image.flip_at(at, bit));
    }
    assert_good(&paths);
}

/// A copy that replay finds, not the scrub after it.
#[test]
fn a_damaged_copy_of_the_stripe_map_is_an_error_and_is_told_by_check_and_by_import() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let serve = Serve::start(dir.path(), "");
    serve.says("import tank --dir there");
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    let request = Request::new(Command::Write, 0, 1 << 20);
    client.call(&request, &vec![7; 1 << 20]).expect("connected").expect("written");
    drop(client);
    serve.says("export tank");
    let paths: Vec<PathBuf> = (0..3).map(|index| there.join(format!("m{index}"))).collect();
    assert_good(&paths);
    // Both places of the first of the pages of member 0, a copy of page 0 of the map.
    let image = Image::open(&paths[0]);
    let pages = image.superblock.region(RegionKind::Pages).expect("a logged array").offset.0;
    image.write(pages, &vec![0x5c; 2 * BLOCK as usize]);

    let (code, told) = check(&paths);
    assert_eq!((code, named(&told)), (1, vec![0]), "{told:#}");
    assert!(told["errors"] == 1 && told["repairable"] == 1, "{told:#}");
    let notice = "member 0 has an empty copy of metadata page 0; it would be rewritten by a scrub";
    assert_eq!(told["notices"], serde_json::json!([notice]), "{told:#}");
    serve.says("import tank --dir there");
    let tank = serve.arrays().remove(0);
    assert!(tank["members"][0]["cksum"] == 1 && tank["members"][0]["repaired"] == 1, "{tank:#}");
    let events = serve.events();
    let of_page = |event: &&Value| event["kind"] == "page_repaired" && event["member"] == 0;
    assert_eq!(events.iter().filter(of_page).count(), 1, "{events:#?}");
    serve.says("export tank");
    assert_good(&paths);
    serve.stop();
}

fn bytes_of(told: &Value, list: &str) -> u64 {
    let parts = told[list].as_array().expect("a list");
    parts.iter().map(|part| part["bytes"].as_u64().expect("bytes")).sum()
}

/// 'tank', 2+1, with a MiB written, while it is not served. Slot 0 has column c on member c.
fn tank(dir: &Path) -> (Serve, Vec<PathBuf>) {
    let there = dir.join("there");
    create(&there, "tank", 2, 1);
    let serve = Serve::start(dir, "");
    serve.says("import tank --dir there");
    write_to(&serve, 1 << 20);
    serve.says("export tank");
    (serve, (0..3).map(|index| there.join(format!("m{index}"))).collect())
}

fn write_to(serve: &Serve, bytes: usize) {
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    let request = Request::new(Command::Write, 0, bytes as u64);
    client.call(&request, &vec![7; bytes]).expect("connected").expect("written");
}

/// Changes the first block of slot 0 on a member; again it is as it was.
fn flip(path: &Path) {
    let image = Image::open(path);
    image.flip_at(image.superblock.data_region().offset.0, 1);
}

#[test]
fn a_block_that_is_set_aside_is_looked_for_in_its_place() {
    let dir = tempfile::tempdir().expect("a directory");
    let (serve, paths) = tank(dir.path());
    serve.says("import tank --dir there");
    serve.says("offline tank 0");
    serve.says("export tank");
    flip(&paths[1]);
    serve.says("import tank --dir there");
    write_to(&serve, BLOCK as usize);
    serve.says("export tank");
    // Its member still has something else there.
    let (code, told) = check(&paths[1..]);
    assert_eq!(code, 1, "{told:#}");
    assert_eq!(
        ["lost", "set_aside", "kept_aside"].map(|list| bytes_of(&told, list)),
        [BLOCK, 0, 0],
        "{told:#}"
    );
    // Its member is not there.
    let before = sums(&paths);
    flip(&paths[1]);
    // Its member has it.
    let good = sums(&paths);
    for given in [&paths[1..], &paths[..]] {
        let (code, told) = check(given);
        assert_eq!(code, 1, "{told:#}");
        let lists = ["lost", "set_aside", "kept_aside", "unreadable"];
        assert_eq!(lists.map(|list| bytes_of(&told, list)), [0, 0, BLOCK, 0], "{told:#}");
        assert!(told["errors"] == 1 && told["repairable"] == 1 && named(&told).is_empty(), "{told:#}");
        let text = String::from_utf8_lossy(&try_run(calpe().arg("check").args(given)).stdout).into_owned();
        assert!(text.contains("were set aside, and their own members have them"), "{text}");
        assert!(!text.contains("cannot be read") && text.contains("1 block can be read again"), "{text}");
    }
    assert!(before != good && good == sums(&paths), "a check has changed a member");
    serve.says("import tank --dir there");
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    let read = client.call(&Request::new(Command::Read, 0, 1 << 20), &[]).expect("connected").expect("read");
    assert!(read == vec![7; 1 << 20]);
    serve.stop();
}

#[test]
fn a_block_whose_own_member_has_lost_it_is_not_said_to_be_set_aside() {
    let dir = tempfile::tempdir().expect("a directory");
    let (serve, paths) = tank(dir.path());
    flip(&paths[0]);
    flip(&paths[1]);
    serve.says("import tank --dir there");
    write_to(&serve, BLOCK as usize);
    serve.says("export tank");
    let (code, told) = check(&paths);
    assert_eq!(code, 1, "{told:#}");
    let lists = ["lost", "set_aside", "kept_aside", "unreadable"];
    assert_eq!(lists.map(|list| bytes_of(&told, list)), [BLOCK, 0, 0, 0], "{told:#}");
    // Nor where another one is not given.
    let (_, told) = check(&paths[..2]);
    assert_eq!((bytes_of(&told, "lost"), bytes_of(&told, "set_aside")), (BLOCK, 0), "{told:#}");
    // Without its own member it may be there.
    let (_, told) = check(&[paths[0].clone(), paths[2].clone()]);
    assert_eq!((bytes_of(&told, "lost"), bytes_of(&told, "set_aside")), (0, BLOCK), "{told:#}");
    serve.stop();
}

#[test]
fn what_no_missing_member_can_give_is_beyond_repair() {
    let dir = tempfile::tempdir().expect("a directory");
    let (serve, paths) = tank(dir.path());
    serve.stop();
    flip(&paths[1]);
    flip(&paths[2]);
    // The block of column 0 may be good on member 0; that of column 1 would take two good ones.
    let (_, told) = check(&paths[1..]);
    assert_eq!((bytes_of(&told, "lost"), bytes_of(&told, "unreadable")), (BLOCK, BLOCK), "{told:#}");
    assert!(told["lost"][0]["offset"] != 0 && told["unreadable"][0]["offset"] == 0, "{told:#}");
    let (_, told) = check(&paths);
    assert_eq!((bytes_of(&told, "lost"), bytes_of(&told, "unreadable")), (BLOCK, 0), "{told:#}");
}
