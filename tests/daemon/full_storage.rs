//! Members whose storage is full when the daemon is killed, started and stopped: with the real binary, on
//! filesystems of the tests' own (tmpfs), which take root to mount; without, those tests say so and end.

use crate::support::fuse::Fuse;
use crate::support::load::Client;
use crate::support::tmpfs::Tmpfs;
use crate::support::{Up, calpe, is_over, run};
use calpe_core::nbd::{Command as Nbd, Request};
use calpe_core::testing::Random;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

/// Longest that anything may take; only a hang gets there.
const PATIENCE: Duration = Duration::from_secs(120);

const MIB: usize = 1 << 20;

/// What docs/members.md promises of a stop.
const STOP_MAX: Duration = Duration::from_secs(10);

/// 'tank', 2+1, 8 MiB, with each member on a filesystem of its own, or all on the first.
struct Scene {
    disks: Vec<Tmpfs>,
    members: Vec<PathBuf>,
    dir: tempfile::TempDir,
}

impl Scene {
    /// None: nothing can be mounted here.
    fn new(shared: bool) -> Option<Scene> {
        Scene::in_lanes(shared, 1)
    }

    fn in_lanes(shared: bool, lanes: u16) -> Option<Scene> {
        let dir = tempfile::tempdir().expect("a directory");
        let count = if shared { 1 } else { 3 };
        let disks: Vec<Tmpfs> = (0..count)
            .map(|at| Tmpfs::mount(dir.path().join(format!("disk{at}")), 200))
            .collect::<Option<_>>()?;
        let members: Vec<PathBuf> =
            (0..3).map(|at| disks[at % count].path().join(format!("m{at}"))).collect();
        let shape = ["--data", "2", "--parity", "1", "--chunk", "4KiB", "--size", "8MiB"];
        let lanes = ["--lanes".to_owned(), lanes.to_string()];
        run(calpe().args(["create", "tank"]).args(shape).args(lanes).args(&members));
        Some(Scene { disks, members, dir })
    }

    fn serve(&self) -> Up {
        assert!(self.members.iter().all(|member| member.exists()));
        let searched: Vec<&Path> = self.disks.iter().map(Tmpfs::path).collect();
        serve(self.dir.path(), &searched)
    }
}

/// Serves 'tank' out of a directory, with what is found in others.
fn serve(dir: &Path, searched: &[&Path]) -> Up {
    let data = dir.join("data");
    fs::create_dir_all(&data).expect("a directory");
    let searched: Vec<String> = searched.iter().map(|path| format!("\"{}\"", path.display())).collect();
    let config = dir.join("calpe.toml");
    let text = format!(
        "[daemon]\nruntime_dir = \"{0}\"\nstate_dir = \"{0}/state\"\n[gpu]\nmode = \"off\"\n[[array]]\nname = \"tank\"\n\
         search = [{1}]\n",
        data.display(),
        searched.join(", ")
    );
    fs::write(&config, text).expect("a configuration");
    Up::serve(dir, &config)
}

fn connect(up: &Up) -> Client {
    Client::connect(&up.socket()).expect("it is served")
}

/// Writes small blocks from 1 MiB on until a request does not succeed.
fn write_until_it_fails(socket: &Path, seed: u64) {
    let Ok(mut client) = Client::connect(socket) else { return };
    let mut random = Random::new(seed);
    let mut block = [0; 4096];
    loop {
        random.fill(&mut block);
        let at = MIB as u64 + random.below(1700) * 4096;
        if !matches!(client.call(&Request::new(Nbd::Write, at, 4096), &block), Ok(Ok(_))) {
            return;
        }
    }
}

/// Reads the first MiB block by block, again and again, until a request does not succeed.
fn read_until_it_fails(socket: &Path) {
    let Ok(mut client) = Client::connect(socket) else { return };
    for block in (0..256).cycle() {
        if !matches!(client.call(&Request::new(Nbd::Read, block * 4096, 4096), &[]), Ok(Ok(_))) {
            return;
        }
    }
}

fn load(up: &Up, clients: u64) -> Vec<thread::JoinHandle<()>> {
    let start = |seed| {
        let socket = up.socket();
        thread::spawn(move || write_until_it_fails(&socket, seed))
    };
    (0..clients).map(start).collect()
}

#[track_caller]
fn stop_in_time(up: Up) {
    let begun = Instant::now();
    up.signal("TERM");
    let log = up.dir.join("daemon.log");
    let status = up.ended();
    let log = fs::read_to_string(log).unwrap_or_default();
    assert!(begun.elapsed() < STOP_MAX, "the stop took {:?}\n{log}", begun.elapsed());
    assert!(status.success() && !log.contains("did not stop in time"), "{status}\n{log}");
}

#[test]
fn reads_are_served_and_a_stop_is_short_while_a_replay_waits_for_room() {
    let Some(scene) = Scene::new(true) else { return };
    let up = scene.serve();
    let mut first = vec![0; MIB];
    Random::new(1).fill(&mut first);
    connect(&up).call(&Request::new(Nbd::Write, 0, MIB as u64), &first).expect("up").expect("written");
    connect(&up).call(&Request::new(Nbd::Flush, 0, 0), &[]).expect("up").expect("flushed");
    scene.disks[0].leave_room(1500);
    let clients = load(&up, 3);
    sleep(Duration::from_secs(3));
    up.kill();
    clients.into_iter().for_each(|client| client.join().expect("no panic"));

    for round in 0..2 {
        let up = scene.serve();
        let begun = Instant::now();
        let read = connect(&up).call(&Request::new(Nbd::Read, 0, MIB as u64), &[]);
        assert!(read.expect("up").expect("readable") == first, "wrong bytes");
        connect(&up)
            .call(&Request::new(Nbd::Read, 8 * MIB as u64 - 4096, 4096), &[])
            .expect("up")
            .expect("zeroes");
        connect(&up)
            .call(&Request::new(Nbd::Flush, 0, 0), &[])
            .expect("up")
            .expect("nothing is left to flush");
        assert!(begun.elapsed() < Duration::from_secs(10), "reads took {:?}\n{}", begun.elapsed(), up.log());
        assert_eq!(up.status()["log"]["state"], "settling", "{}", up.status());
        let told = up.calpe(&["status", "tank"]);
        assert!(told.contains("redo log holds") && told.contains("Make room there"), "{told}");
        let clients = load(&up, 2);
        if round == 0 {
            sleep(Duration::from_secs(1));
            stop_in_time(up);
        } else {
            scene.disks[0].remount("size=200m");
            let deadline = Instant::now() + PATIENCE;
            while up.status()["log"]["state"] != "serving" {
                assert!(Instant::now() < deadline, "it does not go on: {}\n{}", up.status(), up.log());
                sleep(Duration::from_millis(50));
            }
            let written = connect(&up).call(&Request::new(Nbd::Write, 0, 4096), &first[..4096]);
            written.expect("up").expect("written");
            stop_in_time(up);
        }
        clients.into_iter().for_each(|client| client.join().expect("no panic"));
    }
    let up = scene.serve();
    let read = connect(&up).call(&Request::new(Nbd::Read, 0, MIB as u64), &[]);
    assert!(read.expect("up").expect("readable") == first, "wrong bytes");
    assert_eq!(up.scrub(), (0, 0));
    up.stop();
}

/// 'tank' with a member that may hang behind `mnt`, one that may be full on `disk`, and the others in
/// `plain`.
struct Mixed {
    up: Up,
    disk: Tmpfs,
    fuse: Fuse,
    _dir: tempfile::TempDir,
}

impl Mixed {
    /// None: nothing can be mounted here.
    fn serve(data: &str, parity: &str, members: &[&str]) -> Option<Mixed> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        ["plain", "behind", "mnt"].iter().for_each(|name| fs::create_dir(path(name)).expect("a directory"));
        let disk = Tmpfs::mount(path("disk"), 200)?;
        for member in members {
            let file = path(&member.replace("mnt", "behind"));
            fs::File::create(file).and_then(|file| file.set_len(32 << 20)).expect("a file");
        }
        let fuse = Fuse::mount(&path("behind"), &path("mnt"))?;
        let shape = ["--data", data, "--parity", parity, "--chunk", "4KiB"];
        run(calpe().args(["create", "tank"]).args(shape).args(members.iter().map(|name| path(name))));
        let searched = ["plain", "mnt", "disk"].map(path);
        let up = serve(dir.path(), &searched.each_ref().map(PathBuf::as_path));
        Some(Mixed { up, disk, fuse, _dir: dir })
    }

    /// Stops under load while the one member is full and the other one does not answer for so long after the
    /// order, or for good. Returns the log.
    fn stop(self, silent: Option<Duration>) -> String {
        let Mixed { up, disk, fuse, _dir } = self;
        // Whole stripes are in place at once, so that reads ask the members.
        let first = connect(&up).call(&Request::new(Nbd::Write, 0, MIB as u64), &vec![7; MIB]);
        assert!(matches!(first, Ok(Ok(_))), "{first:?}");
        disk.leave_room(100);
        let clients = load(&up, 4);
        sleep(Duration::from_secs(2));
        fuse.turn_deaf();
        let socket = up.socket();
        let reader = thread::spawn(move || read_until_it_fails(&socket));
        sleep(Duration::from_millis(300));
        let (begun, log) = (Instant::now(), up.dir.join("daemon.log"));
        up.signal("TERM");
        while !is_over(up.pid()) && begun.elapsed() < PATIENCE {
            if silent.is_some_and(|silent| begun.elapsed() >= silent) {
                fuse.thaw();
            }
            sleep(Duration::from_millis(20));
        }
        let took = begun.elapsed();
        // Before that nobody hears of the end of a process.
        fuse.thaw();
        let (status, log) = (up.ended(), fs::read_to_string(log).unwrap_or_default());
        assert!(status.success() && took < STOP_MAX, "{status} after {took:?}\n{log}");
        assert!(log.contains("is full") && log.contains("stops although members lack room"), "{log}");
        clients.into_iter().chain([reader]).for_each(|client| client.join().expect("no panic"));
        log
    }
}

#[test]
fn a_stop_is_short_while_one_member_is_full_and_another_hangs() {
    let Some(mixed) = Mixed::serve("2", "2", &["plain/m0", "mnt/m1", "disk/m2", "plain/m3"]) else { return };
    let log = mixed.stop(None);
    assert!(log.contains("member 1 is MISSING"), "{log}");
}

#[test]
fn a_stop_leaves_no_slow_member_out_in_favour_of_one_that_is_full() {
    let Some(mixed) = Mixed::serve("1", "1", &["mnt/m0", "disk/m1"]) else { return };
    let log = mixed.stop(Some(Duration::from_millis(4500)));
    assert!(!log.contains("member 0 is"), "{log}");
}

#[test]
fn a_stop_is_short_while_one_member_is_full() {
    let Some(scene) = Scene::new(false) else { return };
    for waited in [1, 5] {
        let up = scene.serve();
        scene.disks[1].leave_room(100);
        let clients = load(&up, 4);
        sleep(Duration::from_secs(waited));
        stop_in_time(up);
        clients.into_iter().for_each(|client| client.join().expect("no panic"));
        scene.disks[1].remount("size=200m");
    }
    let up = scene.serve();
    up.wait_quiet();
    assert_eq!(up.status()["state"], "ONLINE", "{}", up.status());
    assert_eq!(up.scrub(), (0, 0));
    up.stop();
}

/// Waits until the array is as it should.
#[track_caller]
fn until(up: &Up, what: &str, reached: impl Fn(&serde_json::Value) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !reached(&up.status()) {
        assert!(Instant::now() < deadline, "not {what}: {}\n{}", up.status(), up.log());
        sleep(Duration::from_millis(50));
    }
}

/// The second lane lets go of a member that the first one needs, and gets it back beside it.
#[test]
fn a_member_that_was_full_for_one_lane_comes_back_to_it_while_another_lane_has_it() {
    use std::os::unix::fs::FileExt;
    let Some(scene) = Scene::in_lanes(false, 2) else { return };
    let told = run(calpe().args(["inspect", "--json"]).arg(&scene.members[0]));
    let told: serde_json::Value = serde_json::from_str(&told).expect("JSON");
    let window = told["lanes"][0]["window_bytes"].as_u64().expect("bytes");
    // The first lane starts without member 0.
    let file = fs::File::options().write(true).open(&scene.members[0]).expect("a member");
    for at in [0, window - (32 << 10)] {
        file.write_all_at(&[0; 32 << 10], at).expect("written");
    }
    let up = scene.serve();
    let bytes = vec![7; MIB];
    // A mebibyte of each lane.
    let write = |at: usize| {
        let written = connect(&up).call(&Request::new(Nbd::Write, (at * MIB) as u64, MIB as u64), &bytes);
        written.expect("up").expect("written");
    };
    write(0);
    scene.disks[1].leave_room(0);
    write(1);
    until(&up, "without member 1", |tank| tank["members"][1]["state"] == "MISSING");
    // Twice the time in which lanes are brought into step.
    sleep(Duration::from_secs(2));
    assert_eq!(up.status()["state"], "DEGRADED", "{}", up.log());
    scene.disks[1].remount("size=200m");
    until(&up, "with member 1", |tank| tank["members"][1]["state"] == "ONLINE");
    up.calpe(&["online", "tank", "0"]);
    until(&up, "whole", |tank| tank["state"] == "ONLINE");
    assert_eq!(up.scrub(), (0, 0));
    for at in 0..2 {
        let read = connect(&up).call(&Request::new(Nbd::Read, at * MIB as u64, MIB as u64), &[]);
        assert!(read.expect("up").expect("readable") == bytes, "wrong bytes");
    }
    up.stop();
}
