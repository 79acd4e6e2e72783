//! Arrays that are cut into lanes, by the commands that need no daemon: created, shown, checked, recovered.

use crate::support::fuse::Fuse;
use crate::support::load::{BLOCK, Client, Counts, Load};
use crate::support::process::{Daemon, Setup, create_lanes, member};
use crate::support::serve::{Serve, array};
use crate::support::{calpe, run, try_run};
use calpe::control::ArrayState;
use calpe_core::format::{COPY_BYTES, LanePart, RegionKind, Superblock, all_copy_offsets};
use calpe_core::nbd::{Command as NbdCommand, Request};
use calpe_core::units::{LaneIndex, VolumeOffset};
use calpe_core::volume::LaneCut;
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const LANES: u16 = 4;
const BYTES: u64 = 16 << 20;

/// An array of 2 + 1 members m0.img, ... in DIR/data that was never in service.
fn created(dir: &Path) -> Vec<PathBuf> {
    fs::create_dir(dir.join("data")).expect("a directory");
    let paths: Vec<PathBuf> = (0..3).map(|index| member(dir, index)).collect();
    let said = run(create(&["--size", &BYTES.to_string(), "--lanes", &LANES.to_string()], &paths));
    assert!(said.contains("volume of 16 MiB, 4 lanes"), "{said}");
    paths
}

fn create(options: &[&str], paths: &[PathBuf]) -> &'static mut Command {
    let mut command = calpe();
    command.args(["create", "tank", "--data", "2", "--parity", "1"]).args(options).args(paths);
    Box::leak(Box::new(command))
}

/// What a device says of its first lane: the part, and the regions within a window.
fn superblock(path: &Path) -> Superblock {
    let mut copy = vec![0; COPY_BYTES];
    let file = File::open(path).expect("a member");
    let found = [0, COPY_BYTES as u64].into_iter().find_map(|at| {
        file.read_exact_at(&mut copy, at).expect("read");
        Superblock::decode(&copy).ok()
    });
    found.expect("a superblock at the head")
}

fn window(path: &Path, part: LanePart, lane: u16) -> std::ops::Range<u64> {
    let bytes = fs::metadata(path).expect("a member").len();
    part.window(LaneIndex(lane), bytes)
}

/// Overwrites all copies of the superblock of one lane.
fn wipe_lane(path: &Path, lane: u16) {
    let window = window(path, superblock(path).part, lane);
    let file = File::options().write(true).open(path).expect("a member");
    for offset in all_copy_offsets(window.end - window.start) {
        file.write_all_at(&vec![0; COPY_BYTES], window.start + offset.0).expect("written");
    }
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)))
}

fn check(paths: &[PathBuf]) -> (i32, Value) {
    let output = try_run(calpe().arg("check").arg("--json").args(paths));
    (output.status.code().expect("an exit code"), json(&output))
}

fn recover(dir: &Path, paths: &[PathBuf]) -> (Output, Vec<u8>) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/recover.py");
    let volume = dir.join("volume");
    let output = try_run(Command::new("python3").arg(script).args(paths).arg("--output").arg(&volume));
    (output, fs::read(&volume).unwrap_or_default())
}

#[test]
fn all_lanes_of_a_device_are_shown() {
    let dir = tempfile::tempdir().expect("a directory");
    let paths = created(dir.path());
    let told = json(&try_run(calpe().arg("inspect").arg("--json").arg(&paths[1])));
    let lanes = told["lanes"].as_array().expect("lanes");
    assert_eq!((lanes.len(), &told["member_index"], &told["error"]), (4, &1.into(), &Value::Null));
    let bytes = fs::metadata(&paths[1]).expect("a member").len();
    assert_eq!(told["device_bytes"], bytes);
    let mut end = 0;
    for (at, lane) in lanes.iter().enumerate() {
        assert_eq!((&lane["lane"]["index"], &lane["lane"]["count"]), (&at.into(), &4.into()));
        assert_eq!(lane["lane"]["whole_volume_bytes"], BYTES);
        assert_eq!(lane["window_offset"], end);
        end += lane["window_bytes"].as_u64().expect("bytes");
        assert_eq!((&lane["array_uuid"], &lane["device_uuid"]), (&told["array_uuid"], &told["device_uuid"]));
    }
    assert_eq!(end, bytes);
    let shares: u64 = lanes.iter().map(|lane| lane["volume_bytes"].as_u64().expect("bytes")).sum();
    assert_eq!(shares, BYTES);
    let text = run(calpe().arg("inspect").arg(&paths[1]));
    assert!(text.contains("lane 3, from byte ") && text.contains("lane: 0 of 4"), "{text}");

    wipe_lane(&paths[1], 2);
    let output = try_run(calpe().arg("inspect").arg("--json").arg(&paths[1]));
    let told = json(&output);
    assert_eq!(output.status.code(), Some(1));
    assert!(told["error"].as_str().is_some_and(|error| error.starts_with("lane 2: ")), "{told:#}");
    assert!(told["lanes"][2]["array_uuid"].is_null() && !told["lanes"][3]["array_uuid"].is_null());
}

#[test]
fn a_new_array_is_good_in_every_lane_and_what_is_wrong_in_one_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let paths = created(dir.path());
    let (code, told) = check(&paths);
    assert_eq!(code, 0, "{told:#}");
    assert!(told["good"] == true && told["lanes"] == LANES, "{told:#}");
    // One may be missing.
    let (code, told) = check(&paths[1..]);
    assert!(code == 1 && told["consistent"] == true && told["whole"] == false, "{told:#}");
    assert_eq!(told["members"][0]["reason"], "not given");

    wipe_lane(&paths[1], 2);
    let (code, told) = check(&paths);
    assert!(code == 1 && told["good"] == false, "{told:#}");
    let problem = told["problems"][0].as_str().expect("a problem");
    assert!(problem.contains("member-01.img: lane 2: no Calpe superblock"), "{told:#}");
    let reason = told["members"][1]["reason"].as_str().expect("a reason");
    assert_eq!(reason, "lane 2: no Calpe superblock");
    wipe_lane(&paths[0], 2);
    let output = try_run(calpe().arg("check").args(&paths));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("lane 2: "), "{error}");
}

#[test]
fn a_new_array_is_recovered_as_zeroes_lane_by_lane() {
    let dir = tempfile::tempdir().expect("a directory");
    let paths = created(dir.path());
    let (output, volume) = recover(dir.path(), &paths[..2]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("lane 3: array 'tank'") && said.contains(" 0 blocks of 4 KiB lost"), "{said}");
    assert!(volume.len() as u64 == BYTES && volume.iter().all(|&byte| byte == 0));
    wipe_lane(&paths[0], 1);
    let (output, _) = recover(dir.path(), &paths[..2]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && error.contains("lane 1: too few current members"), "{error}");
    let (output, _) = recover(dir.path(), &paths);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn what_cannot_be_cut_is_refused_with_what_to_do() {
    let dir = tempfile::tempdir().expect("a directory");
    let paths: Vec<PathBuf> = (0..3).map(|index| dir.path().join(format!("m{index}"))).collect();
    for (options, told) in [
        (["--size", "1GiB", "--lanes", "33"], "use 1 to 32"),
        (["--size", "1GiB", "--lanes", "0"], "use 1 to 32"),
        (["--size", "4MiB", "--lanes", "32"], "too small for 32 lanes: use fewer"),
    ] {
        let output = try_run(create(&options, &paths));
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(told), "{error}");
    }
    assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 0);
    // Existing devices that have no room for so many logs.
    for path in &paths {
        File::create(path).and_then(|file| file.set_len(100 << 20)).expect("a file");
    }
    let output = try_run(create(&["--lanes", "8"], &paths));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && error.contains("needed"), "{error}");
}

#[test]
fn logs_of_all_lanes_are_set_aside() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().expect("a directory");
    let paths = created(dir.path());
    let superblock = superblock(&paths[0]);
    let log = superblock.region(RegionKind::Log).expect("a log").len;
    let blocks = fs::metadata(&paths[0]).expect("a member").blocks() * 512;
    assert!(blocks >= u64::from(LANES) * log, "{blocks} bytes for {LANES} logs of {log}");
}

#[test]
fn an_array_of_lanes_that_was_killed_is_good_and_what_rots_in_a_lane_is_found() {
    let dir = tempfile::tempdir().expect("a directory");
    let setup = Setup { data: 2, parity: 1, checksum: "blake3", bytes: BYTES, chunk: 16 << 10 };
    create_lanes(dir.path(), &setup, LANES);
    let paths: Vec<PathBuf> = (0..3).map(|index| member(dir.path(), index)).collect();
    let daemon = Daemon::start(dir.path(), &setup);
    let mut client = Client::connect(&daemon.socket()).expect("connected");
    let load = Load::new(setup.bytes, setup.stripe_bytes(), 5);
    std::thread::scope(|scope| {
        let (stop, counts) = (AtomicBool::new(false), Counts::default());
        let running = scope.spawn(move || {
            let mut load = load;
            assert!(load.run(&mut client, &stop, &counts).is_err(), "the connection outlived the daemon");
        });
        std::thread::sleep(Duration::from_millis(500));
        daemon.kill();
        running.join().expect("the load saw nothing wrong");
    });
    let (code, told) = check(&paths);
    assert!(code == 0 && told["good"] == true && told["clean"] == false, "{told:#}");
    let notices: Vec<&str> =
        told["notices"].as_array().expect("notices").iter().filter_map(Value::as_str).collect();
    assert!(notices.iter().all(|notice| notice.starts_with("lane ")), "{notices:?}");

    // All data of one lane on one member rots: it can be decoded. On a second member it is lost, and only
    // what that lane has of the volume.
    let superblock = superblock(&paths[0]);
    let data = superblock.data_region();
    for (path, is_lost) in [(&paths[1], false), (&paths[2], true)] {
        let start = window(path, superblock.part, 2).start + data.offset.0;
        let file = File::options().read(true).write(true).open(path).expect("a member");
        let mut block = vec![0; BLOCK];
        for at in (0..data.len).step_by(BLOCK) {
            file.read_exact_at(&mut block, start + at).expect("read");
            if block.iter().any(|&byte| byte != 0) {
                file.write_all_at(&[block[7] ^ 1], start + at + 7).expect("written");
            }
        }
        file.sync_all().expect("flushed");
        let (code, told) = check(&paths);
        assert!(code == 1 && told["errors"].as_u64() > Some(0), "{told:#}");
        let lost = told["lost"].as_array().expect("parts");
        assert_eq!(!lost.is_empty(), is_lost, "{told:#}");
        let cut = LaneCut::of(&superblock);
        for part in lost {
            let [at, bytes] = ["offset", "bytes"].map(|field| part[field].as_u64().expect("bytes"));
            for piece in cut.pieces(VolumeOffset(at), bytes) {
                assert_eq!(piece.lane, LaneIndex(2), "{part}");
            }
        }
    }
}

/// An array of three members that was written to and stopped: the members, and what its volume begins with.
fn written_and_stopped(dir: &Path, setup: &Setup) -> (Vec<PathBuf>, Vec<u8>) {
    create_lanes(dir, setup, LANES);
    let content = vec![0x5a; 4 << 20];
    let daemon = Daemon::start(dir, setup);
    let mut client = Client::connect(&daemon.socket()).expect("connected");
    let write = Request::new(NbdCommand::Write, 0, content.len() as u64);
    client.call(&write, &content).expect("connected").expect("written");
    drop(client);
    daemon.stop();
    ((0..3).map(|index| member(dir, index)).collect(), content)
}

#[test]
fn a_lane_that_has_lost_its_superblock_on_a_member_is_served_without_it_and_builds_it_when_it_comes_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let setup = Setup { data: 2, parity: 1, checksum: "blake3", bytes: BYTES, chunk: 16 << 10 };
    let (paths, content) = written_and_stopped(dir.path(), &setup);
    wipe_lane(&paths[1], 2);
    let mut daemon = Daemon::start(dir.path(), &setup);
    let told = "lane 2: no Calpe superblock; that lane starts without it: to have it";
    daemon.until("it is told", |daemon| daemon.log().contains(told));
    assert_eq!(daemon.report().state, ArrayState::Degraded);
    let socket = dir.path().join("data/control.sock");
    run(calpe().arg("--socket").arg(&socket).args(["online", "calpe", "1"]));
    daemon.until("it is whole", |daemon| daemon.report().state == ArrayState::Online);
    // What lane 2 has built anew counts: another member is away.
    daemon.fail(0);
    let mut client = Client::connect(&daemon.socket()).expect("connected");
    let read = Request::new(NbdCommand::Read, 0, content.len() as u64);
    assert!(client.call(&read, &[]).expect("connected").expect("read") == content);
    drop(client);
    daemon.stop();
    let (_, told) = check(&paths[1..]);
    assert!(told["consistent"] == true, "{told:#}");
}

#[test]
fn members_that_different_lanes_are_without_come_back_while_the_others_have_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let setup = Setup { data: 2, parity: 1, checksum: "blake3", bytes: BYTES, chunk: 16 << 10 };
    let (paths, content) = written_and_stopped(dir.path(), &setup);
    wipe_lane(&paths[0], 0);
    wipe_lane(&paths[1], 1);
    let mut daemon = Daemon::start(dir.path(), &setup);
    let socket = dir.path().join("data/control.sock");
    let ask = |command: &str, member: &str| {
        let output = try_run(calpe().arg("--socket").arg(&socket).args([command, "calpe", member]));
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    // Neither can be taken out: the lane that is without the other one needs it.
    for member in ["0", "1"] {
        let (is_done, error) = ask("offline", member);
        assert!(!is_done && error.contains("is needed"), "{error}");
    }
    let copy = dir.path().join("copy.img");
    fs::copy(&paths[0], &copy).expect("copied");
    let online = ["online", "calpe", "0", "--path"];
    let output = try_run(calpe().arg("--socket").arg(&socket).args(online).arg(&copy));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("but a copy of it"), "{error}");
    for member in ["0", "1"] {
        let action = daemon.report().action;
        assert!(action.contains(&format!("'calpe online calpe {member}'")), "{action}");
        let (is_done, error) = ask("online", member);
        assert!(is_done, "{error}");
        daemon.until("it is built", |daemon| daemon.report().scan.is_empty());
    }
    daemon.until("it is whole", |daemon| daemon.report().state == ArrayState::Online);
    for away in [0, 1] {
        daemon.fail(away);
        let mut client = Client::connect(&daemon.socket()).expect("connected");
        let read = Request::new(NbdCommand::Read, 0, content.len() as u64);
        assert!(client.call(&read, &[]).expect("connected").expect("read") == content);
        drop(client);
        daemon.bring_back(&[away]);
    }
    daemon.stop();
    let (code, told) = check(&paths);
    assert!(code == 0 && told["good"] == true, "{told:#}");
}

/// Lanes cannot share a file on a filesystem that may keep its callers waiting.
#[test]
fn a_member_that_lanes_have_to_let_go_of_first_is_told_with_what_brings_it_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    ["there", "behind", "mnt"].iter().for_each(|name| fs::create_dir(path(name)).expect("a directory"));
    let size = ["--size", "16MiB", "--lanes", "4"];
    run(create(&size, &["there/m0", "behind/m1", "there/m2"].map(path)));
    wipe_lane(&path("behind/m1"), 2);
    let Some(_fuse) = Fuse::mount(&path("behind"), &path("mnt")) else { return };
    let mut serve = Serve::start(dir.path(), &array("tank", &[&path("there"), &path("mnt")]));
    let told = serve.array_when("it is served", |tank| tank["log"]["state"] == "serving");
    let member = &told["members"][1];
    assert!(told["state"] == "DEGRADED" && member["state"] == "MISSING", "{told:#}");
    let conditions = member["conditions"].as_array().expect("conditions");
    assert!(conditions.iter().any(|condition| condition == "held_alone"), "{told:#}");
    let action = told["action"].as_str().expect("an action");
    assert!(action.contains("'calpe offline tank 1' and then 'calpe online tank 1'"), "{action}");
    let refused = serve.refuses("online tank 1");
    assert!(refused.contains("'calpe offline tank 1'"), "{refused}");
    serve.says("offline tank 1");
    assert!(!serve.arrays()[0]["action"].as_str().expect("an action").contains("offline"));
    serve.brings_back("online tank 1");
    serve.array_when("it is back in every lane", |tank| tank["state"] == "ONLINE");
    serve.stop();
}

/// A range that several lanes have, some of it or all of it in whole stripes.
#[test]
fn zeroes_that_lie_in_several_lanes_are_all_zeroes_or_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let setup = Setup { data: 2, parity: 1, checksum: "blake3", bytes: BYTES, chunk: 64 << 10 };
    create_lanes(dir.path(), &setup, LANES);
    let daemon = Daemon::start(dir.path(), &setup);
    let mut client = Client::connect(&daemon.socket()).expect("connected");
    let stripe = setup.stripe_bytes();
    let whole = BYTES - 2 * stripe;
    for (offset, length, fast_zero, no_hole, is_done) in [
        (stripe, whole, true, false, true),
        (stripe, whole, false, false, true),
        (stripe, whole, false, true, true),
        (512, BYTES - 1024, false, false, true),
        (stripe, whole, true, true, false),
        (stripe + 4096, whole, true, false, false),
        (stripe, whole + 4096, true, false, false),
    ] {
        let mut expected = vec![0x5a; BYTES as usize];
        let write = Request::new(NbdCommand::Write, 0, BYTES);
        client.call(&write, &expected).expect("connected").expect("written");
        let zeroes = Request::new(NbdCommand::WriteZeroes, offset, length);
        let zeroes = Request { fast_zero, no_hole, ..zeroes };
        let answer = client.call(&zeroes, &[]).expect("connected");
        assert_eq!(answer.is_ok(), is_done, "{zeroes:?}: {answer:?}");
        if is_done {
            expected[offset as usize..][..length as usize].fill(0);
        }
        let read = Request::new(NbdCommand::Read, 0, BYTES);
        assert!(client.call(&read, &[]).expect("connected").expect("read") == expected, "{zeroes:?}");
    }
    drop(client);
    daemon.stop();
}
