//! A member is replaced in an array of four lanes: until the new device is whole the old one is the member in
//! every lane, and then all lanes change over.

use crate::support::load::{BLOCK, Client};
use crate::support::serve::{Serve, array, both};
use crate::support::tmpfs::Tmpfs;
use crate::support::{calpe, run, try_run};
use calpe_core::format::{COPY_BYTES, LanePart, Superblock};
use calpe_core::nbd::{Command as NbdCommand, Request};
use calpe_core::testing::Random;
use calpe_core::units::{LaneIndex, VolumeOffset};
use calpe_core::volume::LaneCut;
use nix::fcntl::{FallocateFlags, fallocate};
use serde_json::Value;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const LANES: u16 = 4;
const BYTES: u64 = 32 << 20;
/// With this a build takes half a minute.
const SLOW: &str = "rebuild_min = \"1MiB\"\nrebuild_max = \"1MiB\"\n";

/// 'tank', 2+1 in four lanes, with members there/m0, m1 and m2 and something in every lane.
struct Tank {
    dir: tempfile::TempDir,
    content: Vec<u8>,
}

impl Tank {
    fn create() -> Tank {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir(dir.path().join("there")).expect("a directory");
        let tank = Tank { dir, content: Vec::new() };
        let mut command = calpe();
        command.args(["create", "tank", "-k", "2", "-m", "1", "--chunk", "16KiB"]);
        command.args(["--size", &BYTES.to_string(), "--lanes", &LANES.to_string()]);
        run(command.args((0..3).map(|index| tank.member(index))));
        tank
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn member(&self, index: usize) -> PathBuf {
        self.path(&format!("there/m{index}"))
    }

    /// Serves it; members are looked for in these places, too.
    fn serve(&self, others: &[&Path]) -> Serve {
        self.serve_with(others, "")
    }

    /// The same, with these lines of configuration.
    fn serve_with(&self, others: &[&Path], more: &str) -> Serve {
        let there = self.path("there");
        let places: Vec<&Path> = [&*there].into_iter().chain(others.iter().copied()).collect();
        let section = array("tank", &places) + more;
        let mut serve = Serve::start(self.dir.path(), &section);
        serve.array_when("it is served", |tank| tank["log"]["state"] == "serving");
        serve
    }

    fn fill(&mut self, serve: &Serve) {
        self.content = vec![0; BYTES as usize];
        Random::new(5).fill(&mut self.content);
        self.write(serve, 0..BYTES);
    }

    /// Writes the content in this range, and flushes it.
    fn write(&self, serve: &Serve, range: Range<u64>) {
        let mut client = Client::connect(&serve.nbd()).expect("connected");
        for at in range.step_by(1 << 20) {
            let write = Request::new(NbdCommand::Write, at, 1 << 20);
            let bytes = &self.content[at as usize..][..1 << 20];
            client.call(&write, bytes).expect("connected").expect("written");
        }
        client.call(&Request::new(NbdCommand::Flush, 0, 0), &[]).expect("connected").expect("flushed");
    }

    /// Overwrites what begins and ends the volume, but in the last lane, where writes may wait for the build.
    fn overwrite(&mut self, serve: &Serve, salt: u8) {
        let cut = LaneCut::of(&self.superblock());
        let pieces =
            [0..4 << 20, BYTES - (4 << 20)..BYTES].into_iter().flat_map(|range| range.step_by(1 << 20));
        for at in pieces.filter(|at| cut.place_of(VolumeOffset(*at)).0 != LaneIndex(LANES - 1)) {
            assert!(cut.run_from(VolumeOffset(at)) >= 1 << 20, "a mebibyte of one lane");
            self.content[at as usize..][..1 << 20].fill(salt);
            self.write(serve, at..at + (1 << 20));
        }
    }

    #[track_caller]
    fn verify(&self, serve: &Serve) {
        let mut client = Client::connect(&serve.nbd()).expect("connected");
        for at in (0..BYTES).step_by(1 << 20) {
            let read = Request::new(NbdCommand::Read, at, 1 << 20);
            let bytes = client.call(&read, &[]).expect("connected").expect("read");
            let wrong = bytes.chunks(BLOCK).zip(self.content[at as usize..].chunks(BLOCK));
            assert!(bytes == self.content[at as usize..][..1 << 20], "{:?}", wrong.map(|(a, b)| a == b));
        }
    }

    /// The window of a lane on a member.
    fn window(&self, lane: u16) -> Range<u64> {
        let (part, bytes) = self.part();
        part.window(LaneIndex(lane), bytes)
    }

    fn part(&self) -> (LanePart, u64) {
        let superblock = self.superblock();
        (superblock.part, fs::metadata(self.member(0)).expect("a member").len())
    }

    fn superblock(&self) -> Superblock {
        let mut copy = vec![0; COPY_BYTES];
        let file = File::open(self.member(0)).expect("a member");
        let found = [0, COPY_BYTES as u64].into_iter().find_map(|at| {
            file.read_exact_at(&mut copy, at).expect("read");
            Superblock::decode(&copy).ok()
        });
        found.expect("a superblock at the head")
    }

    /// Has passes go as fast as they can from now on.
    fn speed_up(&self, serve: &Serve) {
        let config = self.path("calpe.toml");
        let text = fs::read_to_string(&config).expect("a configuration").replace(SLOW, "");
        fs::write(&config, text).expect("written");
        serve.signal("HUP");
    }

    /// Checks that member 1 has everything on this device, and stops the daemon.
    #[track_caller]
    fn check_whole(&self, serve: Serve, device: &Path) {
        self.verify(&serve);
        serve.says("fail tank 0");
        self.verify(&serve);
        serve.stop();
        self.check(&[device.to_owned(), self.member(2)]);
    }

    /// Checks all lanes of these devices without a daemon.
    #[track_caller]
    fn check(&self, paths: &[PathBuf]) {
        let output = try_run(calpe().arg("check").arg("--json").args(paths));
        let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert!(told["consistent"] == true && told["lost"] == Value::Array(Vec::new()), "{told:#}");
    }
}

fn is_on(tank: &Value, path: &Path) -> bool {
    let member = &tank["members"][1];
    member["name"] == path.display().to_string() && member["state"] == "ONLINE"
}

fn has(tank: &Value, wanted: &str) -> bool {
    let conditions = tank["members"][1]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|condition| condition == wanted))
}

fn kinds(serve: &Serve) -> Vec<String> {
    let text = |event: Value| event["kind"].as_str().expect("a kind").to_owned();
    serve.events().into_iter().map(text).collect()
}

/// A daemon in which member 1 is being replaced by a file in this filesystem: all lanes but the last hold it,
/// and the last one has no room for its data.
fn held_up(tank: &mut Tank) -> Option<(Serve, Tmpfs, PathBuf)> {
    let room = Tmpfs::mount(tank.path("mnt"), 512)?;
    let new = room.path().join("new");
    let mut serve = tank.serve_with(&[room.path()], SLOW);
    tank.fill(&serve);
    serve.says(&format!("replace tank 1 {}", new.display()));
    // The other lanes have their room.
    let (start, file) = (tank.window(LANES - 1).start, File::options().write(true).open(&new));
    let file = file.expect("the new device");
    fallocate(&file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, start as i64).expect("room");
    room.leave_room(1024);
    tank.speed_up(&serve);
    serve.array_when("the others wait for the last one", |tank| {
        let scan = &tank["scan"][0];
        let [done, total] = ["done", "total"].map(|field| scan[field].as_u64().unwrap_or_default());
        has(tank, "new_device_waits") && done * u64::from(LANES) >= total * u64::from(LANES - 1)
    });
    serve.array_when("the last one has no room", |tank| has(tank, "new_device_full"));
    Some((serve, room, new))
}

#[test]
fn lanes_wait_for_the_last_one_and_change_over_together() {
    let mut tank = Tank::create();
    let Some((mut serve, room, new)) = held_up(&mut tank) else { return };
    let told = serve.arrays().remove(0);
    assert!(is_on(&told, &tank.member(1)), "{told:#}");
    assert_eq!(told["members"][1]["replacement"]["name"], new.display().to_string());
    tank.overwrite(&serve, 0x11);
    assert!(serve.says("status").contains("its new device waits until every lane has built it"));
    let kinds_so_far = kinds(&serve);
    let is_told = |kind: &str| kinds_so_far.iter().filter(|other| *other == kind).count();
    assert_eq!((is_told("replacement_waits"), is_told("member_replaced")), (1, 0), "{kinds_so_far:?}");
    room.remount("size=512m");
    serve.array_when("it is replaced", |tank| {
        is_on(tank, &new) && tank["members"][1]["replacement"].is_null()
    });
    assert_eq!(kinds(&serve).iter().filter(|kind| *kind == "member_replaced").count(), 1);
    // Also what was written while it was held.
    tank.check_whole(serve, &new);
}

#[test]
fn a_new_device_that_fails_in_one_lane_is_given_up_in_all() {
    let mut tank = Tank::create();
    let Some((mut serve, _room, _)) = held_up(&mut tank) else { return };
    tank.overwrite(&serve, 0x22);
    // For want of room, after 20 s.
    let told = serve.array_when("it is given up", |tank| tank["members"][1]["replacement"].is_null());
    assert!(is_on(&told, &tank.member(1)) && told["state"] == "ONLINE", "{told:#}");
    let reason = told["members"][1]["reason"].as_str().expect("a reason");
    assert!(reason.starts_with("its replacement was given up: ") && !reason.contains("devices"), "{reason}");
    serve.array_when("no lane builds", |tank| tank["scan"].as_array().is_some_and(Vec::is_empty));
    let told = kinds(&serve);
    assert_eq!(told.iter().filter(|kind| *kind == "replacement_given_up").count(), 1, "{told:?}");
    tank.check_whole(serve, &tank.member(1));
}

#[test]
fn a_replacement_is_cancelled_in_every_lane_or_refused() {
    let mut tank = Tank::create();
    let mut serve = tank.serve(&[]);
    tank.fill(&serve);
    let mut device = tank.member(1);
    let mut answers = Vec::new();
    for round in 0..8 {
        let new = tank.path(&format!("there/new{round}"));
        serve.says(&format!("replace tank 1 {}", new.display()));
        // They change over within about a second.
        std::thread::sleep(Duration::from_millis(200 * round));
        let would = serve.ask("replace tank 1 --cancel -n").status.success();
        let output = serve.ask("replace tank 1 --cancel");
        assert!(would || !output.status.success(), "{}", both(&output));
        serve.array_when("it is decided", |tank| tank["members"][1]["replacement"].is_null());
        if !output.status.success() {
            let refused = both(&output);
            let is_told = ["change over to the new device", "is not being replaced"];
            assert!(is_told.iter().any(|told| refused.contains(told)), "{refused}");
            device = new;
        }
        answers.push(output.status.success());
        let told = serve.arrays().remove(0);
        assert!(is_on(&told, &device) && told["members"][1]["reason"].is_null(), "{answers:?}: {told:#}");
        tank.overwrite(&serve, round as u8);
    }
    assert!(answers.contains(&true) && answers.contains(&false), "{answers:?}");
    tank.check_whole(serve, &device);
}

#[test]
fn after_a_kill_the_lanes_go_on_and_change_over_together() {
    let mut tank = Tank::create();
    let Some((serve, room, new)) = held_up(&mut tank) else { return };
    tank.overwrite(&serve, 0x33);
    serve.kill();
    room.remount("size=512m");
    let mut serve = tank.serve(&[room.path()]);
    serve.array_when("it is replaced", |tank| {
        is_on(tank, &new) && tank["members"][1]["replacement"].is_null()
    });
    tank.check_whole(serve, &new);
}

/// A crash between the first changeover and the last one, put together from what was there before all and
/// after all: each lane lies in a window of its own.
#[test]
fn after_a_crash_within_the_changeover_the_other_lanes_change_over_too() {
    let mut tank = Tank::create();
    // It is not built before the kill.
    let serve = tank.serve_with(&[], SLOW);
    tank.fill(&serve);
    let new = tank.path("there/new");
    serve.says(&format!("replace tank 1 {}", new.display()));
    serve.kill();
    let devices = [tank.member(0), tank.member(1), tank.member(2), new.clone()];
    let before: Vec<Vec<u8>> = devices.iter().map(|path| fs::read(path).expect("a device")).collect();
    let mut serve = tank.serve(&[]);
    let told = serve.arrays().remove(0);
    assert!(!told["members"][1]["replacement"].is_null(), "{told:#}");
    serve.array_when("it is replaced", |tank| {
        is_on(tank, &new) && tank["members"][1]["replacement"].is_null()
    });
    serve.kill();
    for changed in [vec![0], vec![1, 3], vec![0, 1, 2]] {
        let after: Vec<Vec<u8>> = devices.iter().map(|path| fs::read(path).expect("a device")).collect();
        for (path, before) in devices.iter().zip(&before) {
            let file = File::options().write(true).open(path).expect("a device");
            for lane in (0..LANES).filter(|lane| !changed.contains(lane)) {
                let window = tank.part().0.window(LaneIndex(lane), before.len() as u64);
                file.write_all_at(&before[window.start as usize..window.end as usize], window.start)
                    .expect("written");
            }
        }
        let mut serve = tank.serve(&[]);
        let is_replaced = |tank: &Value| is_on(tank, &new) && tank["members"][1]["replacement"].is_null();
        serve.array_when("the others follow", is_replaced);
        let told = serve.arrays().remove(0);
        assert!(told["members"][1]["reason"].is_null() && told["state"] == "ONLINE", "{told:#}");
        let kinds = kinds(&serve);
        assert!(kinds.iter().any(|kind| kind == "member_replaced"), "{kinds:?}");
        tank.verify(&serve);
        std::thread::sleep(Duration::from_millis(200));
        serve.kill();
        tank.check(&devices[1..].iter().filter(|path| **path != tank.member(1)).cloned().collect::<Vec<_>>());
        for (path, after) in devices.iter().zip(&after) {
            fs::write(path, after).expect("written");
        }
    }
    // Without the new device, the lanes that have not changed over have the old one.
    for (path, before) in devices.iter().zip(&before) {
        let file = File::options().write(true).open(path).expect("a device");
        for lane in 1..LANES {
            let window = tank.part().0.window(LaneIndex(lane), before.len() as u64);
            file.write_all_at(&before[window.start as usize..window.end as usize], window.start)
                .expect("written");
        }
    }
    let away = tank.path("away");
    fs::rename(&new, &away).expect("moved away");
    let mut serve = tank.serve(&[]);
    let told = serve.array_when("nothing is built", |tank| tank["members"][1]["replacement"].is_null());
    assert_eq!(told["state"], "DEGRADED", "{told:#}");
    tank.verify(&serve);
    serve.stop();
}
