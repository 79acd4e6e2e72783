//! Members that do not answer, cannot be opened, or are there twice, and a daemon that panics or is stuck:
//! with the real binary. What hangs is a filesystem of the tests' own (FUSE), which takes root to mount;
//! without, those tests say so and end.

use crate::support::fuse::{self, Fuse};
use crate::support::load::Client;
use crate::support::{Up, calpe, is_over, run, try_run};
use calpe_core::nbd::{Command as Nbd, Request};
use calpe_core::testing::Random;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

/// `member_timeout` of the arrays, in seconds.
const TIMEOUT: u64 = 4;

/// Longest that anything may take; only a hang gets there.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a machine under load takes longer than the limits that are tested.
const SLACK: Duration = Duration::from_secs(6);

#[track_caller]
fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !reached() {
        assert!(Instant::now() < deadline, "not reached: {what}");
        sleep(Duration::from_millis(20));
    }
}

/// A folder with 'tank', 2+2, whose member 1 lies behind a filesystem that can be frozen.
struct Scene {
    dir: tempfile::TempDir,
    fuse: Option<Fuse>,
}

impl Scene {
    /// None: nothing can be mounted here.
    fn new() -> Option<Scene> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        ["plain", "behind", "mnt"].iter().for_each(|name| fs::create_dir(path(name)).expect("a directory"));
        for file in ["plain/m0", "behind/m1", "plain/m2", "plain/m3"].map(path) {
            fs::File::create(file).and_then(|file| file.set_len(32 << 20)).expect("a file");
        }
        let fuse = Fuse::mount(&path("behind"), &path("mnt"))?;
        // Created through it: the array's sector is one that it can do.
        let members = ["plain/m0", "mnt/m1", "plain/m2", "plain/m3"].map(path);
        run(calpe().args(["create", "tank", "--data", "2", "--parity", "2"]).args(&members));
        Some(Scene { dir, fuse: Some(fuse) })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn fuse(&self) -> &Fuse {
        self.fuse.as_ref().expect("mounted")
    }

    fn config(&self) -> PathBuf {
        configure(self.dir.path(), &[self.path("plain"), self.path("mnt")], "")
    }

    fn serve(&self) -> Up {
        Up::serve(self.dir.path(), &self.config())
    }
}

fn configure(dir: &Path, search: &[PathBuf], more: &str) -> PathBuf {
    let config = dir.join("calpe.toml");
    let search: Vec<String> = search.iter().map(|path| format!("\"{}\"", path.display())).collect();
    let text = format!(
        "[daemon]\nruntime_dir = \"{}\"\n[gpu]\nmode = \"off\"\n[[array]]\nname = \"tank\"\nsearch = [{}]\nmember_timeout = {TIMEOUT}\n{more}",
        dir.join("data").display(),
        search.join(", ")
    );
    fs::write(&config, text).expect("written");
    config
}

/// A client, and what the start of the volume must read as.
struct Checked {
    client: Client,
    model: Vec<u8>,
    random: Random,
}

impl Checked {
    fn new(up: &Up) -> Checked {
        Checked::of(Client::connect(&up.socket()).expect("the daemon accepts"))
    }

    fn of(client: Client) -> Checked {
        Checked { client, model: vec![0; 4 << 20], random: Random::new(7) }
    }

    /// Writes somewhere, and tells how long it took.
    #[track_caller]
    fn write(&mut self, fua: bool) -> Duration {
        let at = self.random.below(self.model.len() as u64 / 4096) as usize * 4096;
        let mut block = [0; 4096];
        self.random.fill(&mut block);
        let request = Request { fua, ..Request::new(Nbd::Write, at as u64, 4096) };
        let begun = Instant::now();
        self.client.call(&request, &block).expect("the daemon goes on").expect("written");
        self.model[at..at + 4096].copy_from_slice(&block);
        begun.elapsed()
    }

    #[track_caller]
    fn write_some(&mut self, count: usize) {
        for n in 0..count {
            self.write(n % 5 == 0);
        }
    }

    /// Writes all of it, in whole stripes, which the members have in place then.
    #[track_caller]
    fn write_all(&mut self) {
        self.random.fill(&mut self.model);
        for at in (0..self.model.len()).step_by(1 << 20) {
            let request = Request::new(Nbd::Write, at as u64, 1 << 20);
            let content = &self.model[at..at + (1 << 20)];
            self.client.call(&request, content).expect("the daemon goes on").expect("written");
        }
    }

    #[track_caller]
    fn verify(&mut self) -> Duration {
        let begun = Instant::now();
        for at in (0..self.model.len()).step_by(1 << 20) {
            let request = Request::new(Nbd::Read, at as u64, 1 << 20);
            let read = self.client.call(&request, &[]).expect("the daemon goes on").expect("readable");
            assert!(read == self.model[at..at + (1 << 20)], "what was read at {at} is wrong");
        }
        begun.elapsed()
    }
}

/// What hangs is not taken back, and whoever wants that is told why, at once.
#[track_caller]
fn is_refused(up: &Up) {
    let begun = Instant::now();
    let output = try_run(&mut up.command(&["online", "tank", "1"]));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("have not ended"), "{text}");
    assert!(begun.elapsed() < Duration::from_secs(1) + SLACK, "{:?}", begun.elapsed());
}

/// Brings the member back, as soon as it can be.
#[track_caller]
fn take_back(up: &Up) {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let output = try_run(&mut up.command(&["online", "tank", "1"]));
        if output.status.success() {
            return;
        }
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(Instant::now() < deadline, "it is not taken back: {text}\n{}", up.log());
        sleep(Duration::from_millis(50));
    }
}

fn member_state(up: &Up, index: usize) -> String {
    up.status()["members"][index]["state"].as_str().expect("a state").to_owned()
}

/// Ends a daemon although a member hangs, and tells how long that took. What the kernel cannot take back of
/// what hangs ends with the thaw.
#[track_caller]
fn ends_in_time(up: Up, scene: &Scene, signal: &str) -> Duration {
    let (pid, dir) = (up.pid(), up.dir.clone());
    let begun = Instant::now();
    up.signal(signal);
    until("it ends", || is_over(pid));
    let took = begun.elapsed();
    let log = fs::read_to_string(dir.join("daemon.log")).expect("a log");
    assert!(took <= Duration::from_secs(10) + SLACK, "{took:?}: {log}");
    scene.fuse().thaw();
    let status = up.ended();
    assert!(status.success() && log.contains("stopped"), "{status}: {log}");
    took
}

#[test]
fn writes_go_on_without_a_local_member_that_never_answers() {
    let Some(scene) = Scene::new() else { return };
    let up = scene.serve();
    assert_eq!(up.status()["state"], "ONLINE", "{}", up.log());
    let mut checked = Checked::new(&up);
    checked.write_some(50);
    scene.fuse().freeze();
    let begun = Instant::now();
    let longest = (0..50).map(|n| checked.write(n % 5 == 0)).max().expect("some");
    let limit = Duration::from_secs(TIMEOUT);
    assert!(longest >= limit / 2, "nothing hung: {longest:?}");
    assert!(longest <= limit + Duration::from_secs(1) + SLACK, "a write took {longest:?}");
    assert!(begun.elapsed() <= 2 * limit + SLACK, "one wait is enough: {:?}", begun.elapsed());
    checked.verify();
    assert_eq!(member_state(&up, 1), "MISSING");
    let text = up.calpe(&["status", "-v"]);
    assert!(text.contains("does not answer"), "{text}");
    // It is not taken back before its operations have ended, whoever asks.
    let told =
        try_run(&mut up.command(&["online", "tank", "1", scene.path("mnt/m1").to_str().expect("text")]));
    assert!(!told.status.success(), "{told:?}");
    scene.fuse().thaw();
    take_back(&up);
    up.wait_quiet();
    until("it is whole", || up.status()["state"] == "ONLINE");
    checked.verify();
    assert_eq!(up.scrub(), (0, 0));
    up.stop();
}

#[test]
fn a_read_that_hangs_is_answered_by_the_others() {
    let Some(scene) = Scene::new() else { return };
    let up = scene.serve();
    let mut checked = Checked::new(&up);
    checked.write_some(200);
    up.stop();
    // Nothing is in memory now.
    let up = scene.serve();
    checked.client = Client::connect(&up.socket()).expect("the daemon accepts");
    scene.fuse().freeze();
    let took = checked.verify();
    assert!(took <= Duration::from_secs(TIMEOUT + 1) + SLACK, "{took:?}");
    ends_in_time(up, &scene, "INT");
}

#[test]
fn a_member_that_hangs_is_failed_by_command_at_once() {
    let Some(scene) = Scene::new() else { return };
    // Long enough that nothing but the command can be the reason.
    let config = configure(scene.dir.path(), &[scene.path("plain"), scene.path("mnt")], "");
    let text = fs::read_to_string(&config).expect("read");
    fs::write(&config, text.replace("member_timeout = 4", "member_timeout = 300")).expect("written");
    let up = Up::serve(scene.dir.path(), &config);
    let mut checked = Checked::new(&up);
    checked.write(true);
    scene.fuse().freeze();
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| (0..20).map(|_| checked.write(true)).max().expect("some"));
        sleep(Duration::from_secs(2));
        assert!(!writing.is_finished(), "nothing hangs");
        let begun = Instant::now();
        up.calpe(&["fail", "tank", "1"]);
        let longest = writing.join().expect("it goes on");
        assert!(begun.elapsed() <= Duration::from_secs(1) + SLACK, "{:?} after {longest:?}", begun.elapsed());
    });
    assert_eq!(member_state(&up, 1), "FAULTED");
    checked.verify();
    is_refused(&up);
    scene.fuse().thaw();
    take_back(&up);
    up.wait_quiet();
    checked.verify();
    assert_eq!(up.scrub(), (0, 0));
    up.stop();
}

#[test]
fn a_signal_ends_the_daemon_within_ten_seconds_though_a_member_hangs() {
    let Some(scene) = Scene::new() else { return };
    // Deaf: the daemon's own calls can be interrupted by its end. Frozen: what the kernel has cannot.
    for (signal, freeze) in [("INT", Fuse::turn_deaf as fn(&Fuse)), ("TERM", Fuse::freeze)] {
        let up = scene.serve();
        until("it is whole", || {
            up.status()["state"] == "ONLINE" || {
                let _ = try_run(&mut up.command(&["online", "tank", "1"]));
                false
            }
        });
        let mut checked = Checked::new(&up);
        checked.write_some(20);
        freeze(scene.fuse());
        ends_in_time(up, &scene, signal);
        // The others say that it was stopped cleanly.
        let plain = ["plain/m0", "plain/m2", "plain/m3"].map(|name| scene.path(name));
        for member in &plain {
            let text = run(calpe().arg("inspect").arg(member));
            assert!(text.contains("clean"), "{text}");
        }
    }
}

/// The scene with 'pond', 2+1, beside it, none of whose members hangs.
struct Both {
    scene: Scene,
    config: PathBuf,
}

impl Both {
    fn new() -> Option<Both> {
        let scene = Scene::new()?;
        let pond: Vec<PathBuf> = (0..3).map(|at| scene.path(&format!("pond{at}"))).collect();
        run(calpe().args(["create", "pond", "--data", "2", "--parity", "1", "--size", "16MiB"]).args(&pond));
        let list: Vec<String> = pond.iter().map(|path| format!("\"{}\"", path.display())).collect();
        let more = format!("[[array]]\nname = \"pond\"\nsearch = [{}]\n", list.join(", "));
        let config = configure(scene.dir.path(), &[scene.path("plain"), scene.path("mnt")], &more);
        Some(Both { scene, config })
    }

    /// Starts a daemon, and tells how long it took until it served both.
    #[track_caller]
    fn serve(&self) -> (Up, Duration) {
        let begun = Instant::now();
        let mut command = calpe();
        command.arg("serve").arg("--config").arg(&self.config).env("CALPE_LOG", "info");
        let up = Up::begin(self.scene.dir.path(), command);
        let is_served =
            |name: &str| matches!(Both::array(&up, name)["state"].as_str(), Some("ONLINE" | "DEGRADED"));
        let deadline = Instant::now() + PATIENCE;
        while !(is_served("tank") && is_served("pond")) {
            assert!(Instant::now() < deadline, "not served:\n{}", up.log());
            sleep(Duration::from_millis(20));
        }
        (up, begun.elapsed())
    }

    fn array(up: &Up, name: &str) -> serde_json::Value {
        let output = try_run(&mut up.command(&["status", "--json", name]));
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        status["arrays"][0].clone()
    }

    /// kill -9: what is left of the process then is what the kernel cannot end.
    #[track_caller]
    fn kill(up: Up) -> JoinHandle<()> {
        let pid = up.pid();
        up.signal("KILL");
        until("it is dead", || is_over(pid));
        // Whoever reaps it waits for the rest.
        std::thread::spawn(move || drop(up))
    }

    fn connect(up: &Up, name: &str) -> Client {
        Client::connect_to(&up.socket(), name, None).expect("the daemon accepts")
    }

    /// Starts a second daemon after the first was killed, which finds all but the member that
    /// hangs, and in the end that too.
    #[track_caller]
    fn is_taken_over(&self, mut checked: Checked, killed: JoinHandle<()>, kind: u32) {
        // Clients notice that it is gone.
        let begun = Instant::now();
        while checked.client.next().is_ok() {}
        assert!(begun.elapsed() < SLACK, "a connection stays: {:?}", begun.elapsed());
        let (up, took) = self.serve();
        assert!(took < 2 * Duration::from_secs(TIMEOUT) + SLACK, "{took:?}: {}", up.log());
        let pond = Both::array(&up, "pond");
        assert_eq!(pond["state"], "ONLINE", "{pond}");
        let tank = Both::array(&up, "tank");
        assert_eq!((&tank["state"], &tank["members"][1]["state"]), (&"DEGRADED".into(), &"MISSING".into()));
        let text = up.calpe(&["status", "-v", "tank"]);
        // Which of them depends on what of the filesystem hangs.
        let whys = ["no answer within", "was killed and cannot end before"];
        assert!(whys.iter().any(|why| text.contains(why)), "{text}\n{}", up.log());
        assert!(self.scene.fuse().holds(kind), "nothing hangs any more");
        checked.client = Both::connect(&up, "tank");
        checked.verify();
        checked.write_some(50);
        let refused = try_run(&mut up.command(&["online", "tank", "1"]));
        assert!(!refused.status.success(), "{refused:?}");
        self.scene.fuse().thaw();
        killed.join().expect("reaped");
        take_back(&up);
        until("it is whole", || Both::array(&up, "tank")["state"] == "ONLINE");
        checked.verify();
        up.calpe(&["scrub", "tank", "-w"]);
        let tank = Both::array(&up, "tank");
        let scrub = &tank["last_scrub"];
        assert_eq!((scrub["errors"].as_u64(), scrub["repaired"].as_u64()), (Some(0), Some(0)), "{tank}");
        up.stop();
    }
}

#[test]
fn of_a_daemon_that_was_killed_while_a_flush_hangs_only_that_member_stays() {
    let Some(both) = Both::new() else { return };
    let (up, _) = both.serve();
    let mut checked = Checked::of(Both::connect(&up, "tank"));
    checked.write_some(50);
    both.scene.fuse().freeze_only(fuse::FSYNC);
    checked.client.submit(&Request::new(Nbd::Flush, 0, 0), &[]).expect("the daemon goes on");
    until("a flush hangs", || both.scene.fuse().holds(fuse::FSYNC));
    let killed = Both::kill(up);
    both.is_taken_over(checked, killed, fuse::FSYNC);
}

#[test]
fn of_a_daemon_that_was_killed_while_all_of_a_filesystem_hangs_only_that_member_stays() {
    let Some(both) = Both::new() else { return };
    let (up, _) = both.serve();
    let mut checked = Checked::of(Both::connect(&up, "tank"));
    checked.write_all();
    up.stop();
    // Nothing is in memory now.
    let (up, _) = both.serve();
    checked.client = Both::connect(&up, "tank");
    // The replay is over then.
    checked.client.call(&Request::new(Nbd::Flush, 0, 0), &[]).expect("the daemon goes on").expect("flushed");
    both.scene.fuse().freeze();
    for at in (0..checked.model.len()).step_by(1 << 20) {
        let request = Request::new(Nbd::Read, at as u64, 1 << 20);
        checked.client.submit(&request, &[]).expect("the daemon goes on");
    }
    // Looks hang, too: those of the daemon itself, and those of whoever asks.
    let mnt = both.scene.path("mnt");
    let mut asking = up.command(&["import", "--all", "--dir", mnt.to_str().expect("text")]);
    let mut asking = asking.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("spawned");
    for kind in [fuse::READ, fuse::LOOKUP, fuse::GETATTR] {
        until(&format!("request {kind} hangs"), || both.scene.fuse().holds(kind));
    }
    let killed = Both::kill(up);
    asking.wait().expect("ours");
    both.is_taken_over(checked, killed, fuse::READ);
}

#[test]
fn a_write_of_a_daemon_that_was_killed_keeps_its_member_from_the_next_until_it_has_landed() {
    let Some(both) = Both::new() else { return };
    let (up, _) = both.serve();
    let mut checked = Checked::of(Both::connect(&up, "tank"));
    checked.write_some(50);
    both.scene.fuse().freeze_only(fuse::WRITE);
    // Of what is there already, so that it may be there or not.
    let request = Request { fua: true, ..Request::new(Nbd::Write, 0, 4096) };
    checked.client.submit(&request, &checked.model[..4096]).expect("the daemon goes on");
    until("a write hangs", || both.scene.fuse().holds(fuse::WRITE));
    let killed = Both::kill(up);
    both.is_taken_over(checked, killed, fuse::WRITE);
    let log = fs::read_to_string(both.scene.path("daemon.log")).expect("a log");
    assert!(log.contains("was killed and cannot end before"), "{log}");
}

#[test]
fn a_filesystem_that_freezes_holds_up_neither_other_arrays_nor_status() {
    let Some(scene) = Scene::new() else { return };
    let pond: Vec<PathBuf> = (0..3).map(|at| scene.path(&format!("pond{at}"))).collect();
    run(calpe().args(["create", "pond", "--data", "2", "--parity", "1", "--size", "16MiB"]).args(&pond));
    let list: Vec<String> = pond.iter().map(|path| format!("\"{}\"", path.display())).collect();
    let more = format!("[[array]]\nname = \"pond\"\nsearch = [{}]\n", list.join(", "));
    let config = configure(scene.dir.path(), &[scene.path("plain"), scene.path("mnt")], &more);
    let mut command = calpe();
    command.arg("serve").arg("--config").arg(&config).env("CALPE_LOG", "info");
    let log = fs::File::create(scene.path("daemon.log")).expect("a log");
    let mut daemon = command.stdout(log.try_clone().expect("a handle")).stderr(log).spawn().expect("spawned");
    let socket = scene.path("data/nbd.sock");
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", socket.display());
    until("both are served", || {
        ["tank", "pond"]
            .iter()
            .all(|name| try_run(Command::new("nbdinfo").arg("--size").arg(uri(name))).status.success())
    });
    let control = scene.path("data/control.sock");
    let ask = |args: &[&str]| {
        let begun = Instant::now();
        let output = try_run(calpe().arg("--socket").arg(&control).args(args));
        (output, begun.elapsed())
    };
    scene.fuse().freeze();
    // Requests that wait for the filesystem must not hold up others.
    let hanging = scene.path("mnt/m1");
    let mut stuck: Vec<_> = [
        vec!["online", "tank", "0", "--path", hanging.to_str().expect("text")],
        vec!["fail", "tank", hanging.to_str().expect("text")],
        vec!["import", "--dir", scene.path("mnt").to_str().expect("text"), "--all"],
    ]
    .into_iter()
    .map(|args| calpe().arg("--socket").arg(&control).args(args).spawn().expect("spawned"))
    .collect();
    let quick = Duration::from_secs(1) + SLACK;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(2 * TIMEOUT) {
        let (output, took) = ask(&["status"]);
        assert!(output.status.success() && took < quick, "{output:?} in {took:?}");
        let begun = Instant::now();
        run(Command::new("nbdinfo").arg("--map").arg(uri("pond")));
        assert!(begun.elapsed() < quick, "{:?}", begun.elapsed());
        let (output, took) = ask(&["scrub", "pond"]);
        assert!(took < quick, "{output:?} in {took:?}");
        sleep(Duration::from_millis(100));
    }
    let (output, took) = ask(&["offline", "pond", "0"]);
    assert!(output.status.success() && took < quick, "{output:?} in {took:?}");
    let (output, took) = ask(&["online", "pond", "0"]);
    assert!(output.status.success() && took < quick, "{output:?} in {took:?}");
    scene.fuse().thaw();
    stuck.iter_mut().for_each(|child| drop(child.wait()));
    crate::support::signal(&daemon, "INT");
    assert!(daemon.wait().expect("ours").success());
}

/// Runs a command and tells how it ended: its standard error, and how long it took.
#[track_caller]
fn fails_in(mut command: Command, least: Duration, most: Duration) -> String {
    let begun = Instant::now();
    let output = try_run(&mut command);
    let (text, took) = (String::from_utf8_lossy(&output.stderr).into_owned(), begun.elapsed());
    assert_eq!(output.status.code(), Some(1), "{command:?}: {text}");
    assert!(took >= least && took <= most + SLACK, "{command:?}: {took:?}: {text}");
    text
}

#[test]
fn a_replacement_whose_filesystem_hangs_is_refused_in_time() {
    let Some(scene) = Scene::new() else { return };
    let up = scene.serve();
    let new = scene.path("mnt/new");
    fs::File::create(scene.path("behind/new")).and_then(|file| file.set_len(64 << 20)).expect("a file");
    let path = new.to_str().expect("text").to_owned();
    // What the kernel knows of it already does not hang.
    up.calpe(&["replace", "tank", "2", &path, "-n"]);
    scene.fuse().freeze();
    let limit = Duration::from_secs(TIMEOUT);
    // Nor does it know yet what is at this one.
    let unseen = scene.path("mnt/unseen").to_str().expect("text").to_owned();
    for path in [&unseen, &path] {
        let first = fails_in(up.command(&["replace", "tank", "2", path, "-n"]), limit, limit);
        assert!(first.contains(path) && first.contains("no answer within 4 s"), "{first}");
    }
    for args in [
        &["replace", "tank", "2", &path][..],
        &["replace", "tank", "2", &path, "--force"],
        &["replace", "tank", "2", &path, "-n"],
    ] {
        let text = fails_in(up.command(args), Duration::ZERO, limit);
        assert!(text.contains("does not answer: an earlier attempt hangs still"), "{text}");
    }
    let text = up.calpe(&["status", "-v"]);
    assert!(!text.contains("mnt/new"), "{text}");
    scene.fuse().thaw();
    until("it can be used again", || {
        try_run(&mut up.command(&["replace", "tank", "2", &path, "-n"])).status.success()
    });
    up.stop();
}

/// A folder with 'tank', 2+2, none of whose members hangs, and a spare device behind a filesystem
/// that can be frozen.
fn with_spare() -> Option<Scene> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    ["plain", "behind", "mnt"].iter().for_each(|name| fs::create_dir(path(name)).expect("a directory"));
    let sized = |name: &str, bytes: u64| {
        fs::File::create(path(name)).and_then(|file| file.set_len(bytes)).expect("a file");
    };
    ["m0", "m1", "m2", "m3", "p0"].iter().for_each(|name| sized(&format!("plain/{name}"), 32 << 20));
    sized("behind/new", 64 << 20);
    let fuse = Fuse::mount(&path("behind"), &path("mnt"))?;
    let members = ["plain/m0", "plain/m1", "plain/m2", "plain/m3"].map(path);
    run(calpe().args(["create", "tank", "--data", "2", "--parity", "2"]).args(&members));
    Some(Scene { dir, fuse: Some(fuse) })
}

#[test]
fn a_replacement_that_hangs_after_the_look_is_given_up_in_time_and_can_be_had_later() {
    let Some(scene) = with_spare() else { return };
    let up = scene.serve();
    let mut checked = Checked::new(&up);
    checked.write_some(50);
    scene.fuse().freeze_only(fuse::WRITE);
    let new = scene.path("mnt/new");
    let path = new.to_str().expect("text");
    let limit = Duration::from_secs(TIMEOUT);
    let text = fails_in(up.command(&["replace", "tank", "2", path]), limit, limit);
    for part in [path, "cannot write to it", "does not answer", "the array is as it was", "try again"] {
        assert!(text.contains(part), "{text}");
    }
    let text = fails_in(up.command(&["replace", "tank", "2", path]), Duration::ZERO, limit);
    assert!(text.contains("an earlier attempt hangs still"), "{text}");
    assert_eq!(up.status()["state"], "ONLINE");
    assert!(!up.calpe(&["status", "-v"]).contains("mnt/new"));
    checked.write_some(50);
    scene.fuse().thaw();
    until("it can be used again", || {
        let output = try_run(&mut up.command(&["replace", "tank", "2", path]));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let waits = text.contains("hangs still") || text.contains("have not ended");
        assert!(output.status.success() || waits, "{text}");
        output.status.success()
    });
    up.wait_quiet();
    assert!(up.calpe(&["status", "-v"]).contains("mnt/new"));
    checked.verify();
    assert_eq!(up.scrub(), (0, 0));
    up.stop();
}

#[test]
fn a_replacement_has_its_path_in_the_status_while_it_is_not_recorded_yet() {
    let Some(scene) = Scene::new() else { return };
    let up = scene.serve();
    // Until the member that hangs is given up, the superblocks cannot tell of it.
    scene.fuse().freeze_only(fuse::WRITE);
    let new = scene.path("plain/new");
    let mut replacing = up.command(&["replace", "tank", "2", new.to_str().expect("text")]);
    let mut replacing = replacing.stdout(Stdio::null()).spawn().expect("begun");
    let mut replacement = serde_json::Value::Null;
    until("it is being built", || {
        replacement = up.status()["members"][2]["replacement"].clone();
        !replacement.is_null()
    });
    assert!(replacing.try_wait().expect("ours").is_none(), "it was recorded at once");
    assert_eq!(replacement["name"], new.display().to_string());
    assert!(replacing.wait().expect("ours").success());
    scene.fuse().thaw();
    up.stop();
}

#[test]
fn a_replacement_that_hangs_holds_up_no_look_at_another_file() {
    let Some(scene) = with_spare() else { return };
    let up = scene.serve();
    scene.fuse().freeze_only(fuse::WRITE);
    let (new, other) = (scene.path("mnt/new"), scene.path("plain/p0"));
    let limit = Duration::from_secs(TIMEOUT);
    let replace = ["replace", "tank", "2", new.to_str().expect("text")];
    fails_in(up.command(&replace), limit, limit);
    // The daemon has it open still, and now not even closing it would be answered.
    scene.fuse().freeze();
    let begun = Instant::now();
    run(&mut up.command(&["replace", "tank", "2", other.to_str().expect("text"), "--dry-run"]));
    assert!(begun.elapsed() < limit, "{:?}", begun.elapsed());
    scene.fuse().thaw();
    up.stop();
}

/// A command without a daemon, which waits for a device for [`TIMEOUT`] seconds, and has said why
/// it failed when that is over. Its process may need longer.
struct Failing {
    child: Child,
    text: String,
}

impl Failing {
    #[track_caller]
    fn run(scene: &Scene, args: &[&str]) -> Failing {
        let log = scene.path("command.log");
        let file = fs::File::create(&log).expect("a log");
        let mut command = calpe();
        command.args(args).env("CALPE_DRILL_LIMIT", TIMEOUT.to_string()).stdin(Stdio::null());
        let begun = Instant::now();
        let child = command.stdout(Stdio::null()).stderr(file).spawn().expect("spawned");
        until("it is over", || is_over(child.id()));
        let (text, took) = (fs::read_to_string(&log).expect("read"), begun.elapsed());
        assert!(took <= Duration::from_secs(TIMEOUT) + SLACK, "{args:?}: {took:?}: {text}");
        assert!(took >= Duration::from_secs(TIMEOUT) / 2, "{args:?}: {took:?}: {text}");
        Failing { child, text }
    }

    /// When nothing hangs any more.
    #[track_caller]
    fn failed(mut self) {
        assert_eq!(self.child.wait().expect("ours").code(), Some(1), "{}", self.text);
    }
}

#[test]
fn a_creation_that_hangs_after_the_look_is_given_up_in_time_and_can_be_had_later() {
    if !cfg!(debug_assertions) {
        eprintln!("a release build waits for 30 s: not tested");
        return;
    }
    let Some(scene) = with_spare() else { return };
    let path = |name: &str| scene.path(name).to_str().expect("text").to_owned();
    let (first, hanging) = (path("plain/p0"), path("mnt/new"));
    let args = ["create", "pond", "--data", "1", "--parity", "1", &first, &hanging];
    let before = fs::read(&first).expect("read");
    scene.fuse().freeze_only(fuse::WRITE);
    let failing = Failing::run(&scene, &args);
    let text = &failing.text;
    for part in
        [&hanging[..], "creation of 'pond' failed", "cannot write to it", "does not answer", "--force"]
    {
        assert!(text.contains(part), "{text}");
    }
    assert!(fs::read(&first).expect("read") == before, "what answers is not as it was");
    // What hangs may still be written.
    let again = Failing::run(&scene, &[&args[..], &["--force"]].concat());
    assert!(
        again.text.contains("does not answer") || again.text.contains("cannot end before"),
        "{}",
        again.text
    );
    scene.fuse().thaw();
    failing.failed();
    again.failed();
    let output = try_run(calpe().args(args));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() {
        assert!(text.contains("use --force"), "{text}");
        run(calpe().args(args).arg("--force"));
    }
    assert!(run(calpe().arg("inspect").arg(&hanging)).contains("pond"));
}

#[test]
fn commands_without_a_daemon_give_up_a_file_that_hangs_and_name_it() {
    if !cfg!(debug_assertions) {
        eprintln!("a release build waits for 30 s: not tested");
        return;
    }
    let Some(scene) = Scene::new() else { return };
    let path = |name: &str| scene.path(name).to_str().expect("text").to_owned();
    let members = ["plain/m0", "mnt/m1", "plain/m2", "plain/m3"].map(path);
    let members: Vec<&str> = members.iter().map(String::as_str).collect();
    scene.fuse().freeze();
    let create = ["create", "pond", "--data", "2", "--parity", "2", "--force"];
    for args in [
        [&["check"][..], &members].concat(),
        [&create[..], &members].concat(),
        [&create[..], &["-n"], &members].concat(),
        vec!["inspect", members[1]],
    ] {
        let failing = Failing::run(&scene, &args);
        let text = &failing.text;
        assert!(text.contains(members[1]) && text.contains("no answer within"), "{args:?}: {text}");
        scene.fuse().thaw();
        failing.failed();
        scene.fuse().freeze();
    }
    scene.fuse().thaw();
    run(calpe().arg("check").args(&members));
}

#[test]
fn an_import_of_another_array_waits_for_what_hangs_as_its_own_section_says() {
    let Some(scene) = Scene::new() else { return };
    fs::create_dir(scene.path("there")).expect("a directory");
    let pond: Vec<PathBuf> = (0..2).map(|at| scene.path(&format!("there/pond{at}"))).collect();
    run(calpe().args(["create", "pond", "--data", "1", "--parity", "1", "--size", "16MiB"]).args(&pond));
    let up = scene.serve();
    scene.fuse().freeze();
    let limit = Duration::from_secs(TIMEOUT);
    let begun = Instant::now();
    let there = scene.path("there");
    up.calpe(&["import", "pond", "--dir", there.to_str().expect("text")]);
    // A directory that cannot be listed, or each kind of look at what is in it.
    assert!(begun.elapsed() <= 3 * limit + SLACK, "{:?}", begun.elapsed());
    let text = fails_in(up.command(&["import", "tank", "-n"]), Duration::ZERO, Duration::from_secs(1));
    assert!(text.contains("'tank' is served already"), "{text}");
    ends_in_time(up, &scene, "INT");
}

#[test]
fn more_reads_than_a_frozen_filesystem_takes_hold_up_its_own_member_only() {
    /// The kernel takes 12 of a filesystem that names no number, and has the next caller wait.
    const READS: u64 = 64;
    const BYTES: u64 = 256 << 10;
    let Some(scene) = Scene::new() else { return };
    let content = vec![7; BYTES as usize];
    let up = scene.serve();
    let mut client = Client::connect(&up.socket()).expect("the daemon accepts");
    for at in 0..READS {
        let request = Request::new(Nbd::Write, at * BYTES, BYTES);
        client.call(&request, &content).expect("the daemon goes on").expect("written");
    }
    drop(client);
    up.stop();
    let pond: Vec<PathBuf> = (0..2).map(|at| scene.path(&format!("pond{at}"))).collect();
    run(calpe().args(["create", "pond", "--data", "1", "--parity", "1", "--size", "16MiB"]).args(&pond));
    let list: Vec<String> = pond.iter().map(|path| format!("\"{}\"", path.display())).collect();
    let more = format!("[[array]]\nname = \"pond\"\nsearch = [{}]\n", list.join(", "));
    let config = configure(scene.dir.path(), &[scene.path("plain"), scene.path("mnt")], &more);
    let array = |up: &Up, name: &str| {
        let output = try_run(&mut up.command(&["status", "--json", name]));
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        status["arrays"][0].clone()
    };
    let quick = Duration::from_secs(1) + SLACK;
    for signal in ["TERM", "INT"] {
        let mut command = calpe();
        command.arg("serve").arg("--config").arg(&config);
        let up = Up::begin(scene.dir.path(), command);
        until("both are whole", || {
            let _ = try_run(&mut up.command(&["online", "tank", "1"]));
            ["tank", "pond"].iter().all(|name| array(&up, name)["state"] == "ONLINE")
        });
        let connect = |name| Client::connect_to(&up.socket(), name, None).expect("the daemon accepts");
        let (mut client, mut other) = (connect("tank"), connect("pond"));
        scene.fuse().freeze();
        let begun = Instant::now();
        for at in 0..READS {
            client.submit(&Request::new(Nbd::Read, at * BYTES, BYTES), &[]).expect("the daemon goes on");
        }
        sleep(Duration::from_millis(300));
        loop {
            let asked = Instant::now();
            let status = array(&up, "tank");
            for (command, len) in [(Nbd::Write, 4096), (Nbd::Flush, 0), (Nbd::Read, 4096)] {
                let payload: &[u8] = if command == Nbd::Write { &[1; 4096] } else { &[] };
                let request = Request::new(command, len, len);
                other.call(&request, payload).expect("the daemon goes on").expect("served");
            }
            assert!(asked.elapsed() < quick, "others took {:?}", asked.elapsed());
            if status["members"][1]["state"] == "MISSING" {
                break;
            }
            let limit = Duration::from_secs(TIMEOUT + 1) + SLACK;
            assert!(begun.elapsed() < limit, "it is not taken out:\n{}", up.log());
            sleep(Duration::from_millis(50));
        }
        assert!(begun.elapsed() > Duration::from_secs(TIMEOUT / 2), "nothing hung: {:?}", begun.elapsed());
        for _ in 0..READS {
            let (_, read) = client.next().expect("the daemon goes on");
            assert!(read.expect("readable") == content);
        }
        // What hangs is with the kernel still.
        ends_in_time(up, &scene, signal);
    }
}

#[test]
fn an_array_starts_without_a_member_whose_filesystem_is_frozen() {
    /// Seconds; twice as long is more than it and the slack.
    const LIMIT: u64 = 10;
    let Some(scene) = Scene::new() else { return };
    let config = scene.config();
    let text = fs::read_to_string(&config).expect("read");
    fs::write(&config, text.replace("member_timeout = 4", &format!("member_timeout = {LIMIT}")))
        .expect("written");
    // A directory and what is in it; and a member that is remembered besides.
    for is_remembered in [false, true] {
        if is_remembered {
            scene.fuse().thaw();
            let up = Up::serve(scene.dir.path(), &config);
            until("it is whole", || {
                up.status()["state"] == "ONLINE" || {
                    let _ = try_run(&mut up.command(&["online", "tank", "1"]));
                    false
                }
            });
            up.stop();
        }
        scene.fuse().freeze();
        let begun = Instant::now();
        let up = Up::serve(scene.dir.path(), &config);
        let took = begun.elapsed();
        assert!(took >= Duration::from_secs(LIMIT), "nothing hung: {took:?}");
        assert!(took < Duration::from_secs(LIMIT) + SLACK, "{took:?}: {}", up.log());
        assert_eq!(up.status()["state"], "DEGRADED");
        let mut checked = Checked::new(&up);
        checked.write(true);
        assert!(up.log().contains("no answer within"), "{}", up.log());
        ends_in_time(up, &scene, "INT");
    }
}

#[test]
fn a_member_that_cannot_be_opened_is_left_out_and_told() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path("members")).expect("a directory");
    let members: Vec<PathBuf> = (0..4).map(|at| path(&format!("members/m{at}"))).collect();
    run(calpe().args(["create", "tank", "--data", "2", "--parity", "2", "--size", "16MiB"]).args(&members));
    let config = configure(dir.path(), &[path("members")], "");
    // Locked by somebody who is no Calpe.
    let mut locker = Command::new("flock");
    locker.arg("--no-fork").arg(&members[3]).arg("cat").stdin(Stdio::piped());
    let mut locker = locker.spawn().expect("flock");
    let busy = || !try_run(Command::new("flock").arg("-n").arg(&members[3]).arg("true")).status.success();
    until("it is locked", busy);
    let up = Up::serve(dir.path(), &config);
    assert_eq!(member_state(&up, 3), "MISSING");
    let text = up.calpe(&["status", "-v"]);
    assert!(text.contains("left out at the start") && text.contains("in use by"), "{text}");
    let events = up.calpe(&["events"]);
    assert!(events.contains("the array starts without it"), "{events}");
    Checked::new(&up).write(true);
    // Another daemon finds the members of this one in use, and refuses.
    fs::create_dir(path("other")).expect("a directory");
    let other = configure(&path("other"), &[path("members")], "");
    let mut second = calpe();
    second.arg("serve").arg("--config").arg(&other);
    let log = fs::File::create(path("other.log")).expect("a log");
    let mut second = second.stdout(log.try_clone().expect("a handle")).stderr(log).spawn().expect("spawned");
    let said = || fs::read_to_string(path("other.log")).unwrap_or_default();
    until("it refuses", || said().contains("cannot import") && said().contains("is in use by process"));
    crate::support::signal(&second, "INT");
    second.wait().expect("ours");
    locker.kill().expect("killed");
    locker.wait().expect("ours");
    up.stop();
}

#[test]
fn of_two_copies_of_a_member_the_current_one_is_used_and_of_two_alike_none() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    let (data, old, twin) = (path("data"), path("old"), path("twin"));
    let up = Up::start(dir.path(), &["--data", "2", "--parity", "2", "--size", "16MiB", "--gpu", "off"]);
    let member = up.member(1);
    up.stop();
    fs::copy(&member, &old).expect("copied");
    // A start and a stop later the copy is old.
    let up = Up::start(dir.path(), &["--gpu", "off"]);
    let mut checked = Checked::new(&up);
    checked.write_some(50);
    up.stop();
    fs::rename(&old, data.join("older-copy")).expect("moved");
    let up = Up::start(dir.path(), &["--gpu", "off"]);
    checked.client = Client::connect(&up.socket()).expect("the daemon accepts");
    assert_eq!(up.status()["state"], "ONLINE");
    let events = up.calpe(&["events"]);
    assert!(events.contains("older-copy") && events.contains("an older copy of member 1"), "{events}");
    checked.verify();
    up.stop();
    fs::rename(data.join("older-copy"), &old).expect("moved");
    fs::copy(&member, &twin).expect("copied");
    fs::rename(&twin, data.join("twin")).expect("moved");
    let up = Up::start(dir.path(), &["--gpu", "off"]);
    checked.client = Client::connect(&up.socket()).expect("the daemon accepts");
    assert_eq!(member_state(&up, 1), "MISSING");
    let text = up.calpe(&["status", "-v"]);
    let both = text.contains("member-01.img") && text.contains("twin") && text.contains("which is the copy");
    assert!(both, "{text}");
    checked.verify();
    up.stop();
}

#[test]
fn a_panic_on_any_thread_ends_the_daemon_at_once_after_a_line() {
    if !cfg!(debug_assertions) {
        eprintln!("a release build panics on no order: not tested");
        return;
    }
    for thread in ["reactor", "job", "admin"] {
        let dir = tempfile::tempdir().expect("a directory");
        let order = dir.path().join("order");
        let mut command = calpe();
        command.arg("up").arg("--dir").arg(dir.path().join("data")).env("CALPE_DRILL", &order);
        command.args(["--data", "2", "--parity", "1", "--size", "64MiB", "--gpu", "off"]);
        let up = Up::spawn(dir.path(), command);
        let mut checked = Checked::new(&up);
        checked.write_some(10);
        fs::write(&order, format!("panic {thread}\n")).expect("written");
        until("the order is taken", || !order.exists());
        // Whole stripes are coded as jobs.
        let stripes = vec![7; 8 << 20];
        let begun = Instant::now();
        for at in (0..48u64 << 20).step_by(8 << 20) {
            let request = Request::new(Nbd::Write, at, stripes.len() as u64);
            if checked.client.call(&request, &stripes).is_err() {
                break;
            }
            let _ = try_run(&mut up.command(&["status"]));
        }
        let log = || fs::read_to_string(dir.path().join("daemon.log")).expect("a log");
        let status = up.ended();
        assert!(begun.elapsed() < Duration::from_secs(10) + SLACK, "{thread}: {:?}", begun.elapsed());
        assert_eq!(status.code(), Some(70), "{thread}: {status}\n{}", log());
        let named = if thread == "job" { "thread 'job-" } else { &format!("thread '{thread}'") };
        let line = log().lines().find(|line| line.contains("panicked at")).map(str::to_owned);
        let line = line.unwrap_or_else(|| panic!("{thread}: no line\n{}", log()));
        assert!(line.contains(named) && line.contains("drill.rs:") && line.contains("a drill"), "{line}");
        // Nothing but a kill happened to the array.
        let up = Up::start(dir.path(), &["--gpu", "off"]);
        assert_eq!(up.status()["state"], "ONLINE");
        assert_eq!(up.scrub().0, 0);
        up.stop();
    }
}

#[test]
fn a_supervisor_hears_of_a_reactor_that_turns_and_not_of_one_that_is_stuck() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    let order = path("order");
    let supervisor = UnixDatagram::bind(path("notify")).expect("a socket");
    supervisor.set_read_timeout(Some(Duration::from_millis(200))).expect("set");
    let mut command = calpe();
    command.arg("up").arg("--dir").arg(path("data")).env("CALPE_DRILL", &order);
    command.args(["--data", "2", "--parity", "1", "--size", "16MiB", "--gpu", "off"]);
    command.env("NOTIFY_SOCKET", path("notify")).env("WATCHDOG_USEC", "2000000");
    let up = Up::spawn(dir.path(), command);
    let hear = |time: Duration| {
        let (begun, mut heard) = (Instant::now(), String::new());
        while begun.elapsed() < time {
            let mut message = [0; 256];
            if let Ok(len) = supervisor.recv(&mut message) {
                heard += &String::from_utf8_lossy(&message[..len]);
                heard.push('\n');
            }
        }
        heard
    };
    let heard = hear(Duration::from_secs(5));
    assert!(heard.contains("READY=1"), "{heard}");
    let pings = heard.matches("WATCHDOG=1").count();
    assert!((3..20).contains(&pings), "{pings} in five seconds of two: {heard}");
    if !cfg!(debug_assertions) {
        up.stop();
        return;
    }
    fs::write(&order, "hang reactor\n").expect("written");
    until("the order is taken", || !order.exists());
    hear(Duration::from_secs(2));
    let heard = hear(Duration::from_secs(4));
    assert!(!heard.contains("WATCHDOG"), "a reactor that is stuck says that all is well: {heard}");
    up.kill();
}
