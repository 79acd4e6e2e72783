//! The commands as a person types them: the real binary, real files, real sockets. What is checked is the
//! contract with users: exit codes, JSON fields, refusals that change nothing. Nothing here needs root or a
//! tool that is not ours.

use serde_json::Value;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// How long a daemon may take to start, and a state to be reached, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A directory to work in, and a daemon in it.
struct Place {
    dir: tempfile::TempDir,
    daemon: Option<Child>,
}

impl Place {
    fn new() -> Place {
        Place { dir: tempfile::tempdir().unwrap(), daemon: None }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_calpe"));
        command.args(line.split_whitespace()).current_dir(self.dir.path());
        command.env_remove("CALPE_SOCKET").env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null());
        command
    }

    /// Runs a command; its exit code must be this.
    fn calpe(&self, line: &str, code: i32) -> Output {
        let output = self.command(line).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "calpe {line}\n{}", everything(&output));
        output
    }

    fn stdout(&self, line: &str) -> String {
        String::from_utf8(self.calpe(line, 0).stdout).unwrap()
    }

    fn refusal(&self, line: &str) -> String {
        let output = self.calpe(line, 1);
        assert_eq!(output.stdout, b"", "calpe {line}: a refusal goes to standard error");
        String::from_utf8(output.stderr).unwrap()
    }

    /// What is said of a line that cannot be meant.
    fn usage(&self, line: &str) -> String {
        let output = self.calpe(line, 2);
        assert_eq!(output.stdout, b"", "calpe {line}: a refusal goes to standard error");
        String::from_utf8(output.stderr).unwrap()
    }

    fn json(&self, line: &str) -> Value {
        serde_json::from_slice(&self.calpe(line, 0).stdout).unwrap()
    }

    /// Runs `up` until it has told all; what it prints goes to `log`.
    fn start_up(&mut self, line: &str, log: &str) {
        let file = File::create(self.path(log)).unwrap();
        let mut command = self.command(line);
        self.daemon = Some(command.stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap());
        self.until(|place| {
            let running = place.daemon.as_mut().unwrap().try_wait().unwrap().is_none();
            let told = fs::read_to_string(place.path(log)).unwrap();
            assert!(running, "calpe {line}\n{told}");
            told.contains("Ctrl-C stops cleanly")
        });
    }

    /// Asks the daemon to end as Ctrl-C does; it must end well.
    fn stop(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        let pid = nix::unistd::Pid::from_raw(i32::try_from(daemon.id()).unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
        assert_eq!(daemon.wait().unwrap().code(), Some(0));
    }

    fn until(&mut self, mut reached: impl FnMut(&mut Place) -> bool) {
        let started = Instant::now();
        while !reached(self) {
            assert!(started.elapsed() < PATIENCE, "not reached in {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn test_code(&self) -> i32 {
        self.command("status --test").output().unwrap().status.code().unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(daemon) = &mut self.daemon {
            // The test failed before it stopped the daemon.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

fn everything(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn usage_errors_exit_with_2_and_help_with_0() {
    let place = Place::new();
    for line in ["", "nonsense", "create x", "create x -k 1 -m 1 --chunk big a b", "scrub x -p -s"] {
        place.calpe(line, 2);
    }
    for (line, said) in [
        ("create a/b -k 1 -m 1 x y", "cannot name an array"),
        ("create x -k 0 -m 1 y", "at least one data chunk"),
        ("create x -k 1 -m 1 y", "need 2 members, 1 given"),
        ("create x -k 1 -m 1 --chunk 5000 y z", "power of two"),
        ("create x -k 1 -m 1 --chunk 8GiB y z", "4 MiB or less"),
        ("create x -k 1 -m 1 --size 1000 y z", "multiple of 4 KiB"),
        ("create x -k 1 -m 1 --size 16383PiB y z", "choose a smaller size"),
        ("create x -k 1 -m 1 --size 0.1KiB y z", "not a whole number of bytes"),
        ("create x -k 1 -m 1 --volume cas y z", "not supported"),
        ("up --data 0", "at least one data chunk"),
        ("up --size 1001", "multiple of 4 KiB"),
        ("up --socket s", "--dir"),
        ("attach tank /dev/sda", "not an NBD device"),
        ("attach nbd://:x /dev/nbd0", "nbd://"),
        ("detach nbd0p1", "nbd0"),
    ] {
        let told = place.usage(line);
        assert!(told.contains(said), "calpe {line}: {told}");
    }
    assert_eq!(names(place.dir.path()), Vec::<String>::new(), "nothing is left behind");
    for line in ["--help", "--version", "up --help", "replace --help", "bench codec --help"] {
        place.calpe(line, 0);
    }
}

#[test]
fn without_a_daemon_commands_say_how_to_start_one() {
    let place = Place::new();
    assert!(place.refusal("status").contains("calpe up"));
    assert_eq!(place.test_code(), 4);
    assert!(place.refusal("fail tank 0 --socket /nonexistent/sock").contains("/nonexistent/sock"));
    File::create(place.path("sock")).unwrap();
    assert!(place.refusal("status --socket sock").contains("no daemon answers"));
}

/// A log on a full disk costs its lines, not the arrays.
#[test]
fn a_daemon_whose_log_cannot_be_written_goes_on() {
    let place = tempfile::tempdir().unwrap();
    let config = place.path().join("calpe.toml");
    fs::write(&config, format!("[daemon]\nruntime_dir = \"{}\"\n", place.path().display())).unwrap();
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_calpe"))
        .args(["serve", "--config"])
        .arg(&config)
        .stderr(File::options().write(true).open("/dev/full").unwrap())
        .spawn()
        .unwrap();
    let socket = place.path().join("control.sock");
    let answers = || {
        let mut status = Command::new(env!("CARGO_BIN_EXE_calpe"));
        status.arg("--socket").arg(&socket).arg("status").output().unwrap().status.success()
    };
    let end = Instant::now() + Duration::from_secs(20);
    while !answers() {
        assert!(daemon.try_wait().unwrap().is_none(), "the daemon ended");
        assert!(Instant::now() < end, "the daemon does not answer");
    }
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(daemon.id() as i32), nix::sys::signal::Signal::SIGTERM)
        .unwrap();
    assert!(daemon.wait().unwrap().success());
}

/// A log collector that hangs costs lines: with a pipe that is full, commands and the array behind them go
/// on.
#[test]
fn a_daemon_whose_log_nobody_reads_goes_on() {
    let (mut log, stderr) = std::io::pipe().unwrap();
    // The least that a pipe can hold: some forty lines.
    nix::fcntl::fcntl(&stderr, nix::fcntl::FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    let place = tempfile::tempdir().unwrap();
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_calpe"))
        .args(["up", "--size", "16MiB", "--data", "2", "--parity", "1", "--dir"])
        .arg(place.path().join("up"))
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
        .unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    let ends = |child: &mut Child| {
        while Instant::now() < end {
            if let Some(status) = child.try_wait().unwrap() {
                return status.success();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        panic!("does not end");
    };
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_calpe"));
        command.arg("--socket").arg(place.path().join("up/control.sock")).args(arguments);
        ends(&mut command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    };
    while !run(&["wait", "calpe"]) {
        assert!(daemon.try_wait().unwrap().is_none(), "the daemon ended");
    }
    for _ in 0..20 {
        assert!(run(&["offline", "calpe", "0"]) && run(&["online", "calpe", "0"]) && run(&["wait", "calpe"]));
    }
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(daemon.id() as i32), nix::sys::signal::Signal::SIGTERM)
        .unwrap();
    assert!(ends(&mut daemon));
    let mut text = String::new();
    log.read_to_string(&mut text).unwrap();
    assert!(text.len() >= 3000 && text.contains("OFFLINE"), "the pipe was not full: {text}");
}

#[test]
fn create_and_inspect_agree_and_refusals_change_nothing() {
    let place = Place::new();
    let create = "create tank --data 2 --parity 1 --size 16MiB m0 m1 m2";
    let would = place.stdout(&format!("{create} -n"));
    assert!(
        would.contains("a new sparse file") && would.contains("of each member allocated at once"),
        "{would}"
    );
    assert_eq!(names(place.dir.path()), Vec::<String>::new(), "a dry run creates nothing");
    let created = place.stdout(create);
    let here = place.dir.path().display().to_string();
    for next in [format!("calpe import tank --dir {here}"), format!("  search = [\"{here}\"]")] {
        assert!(created.contains(&next), "no '{next}' in\n{created}");
    }
    let told = place.json("inspect m1 --json");
    for (field, expected) in [
        ("name", Value::from("tank")),
        ("data", 2.into()),
        ("parity", 1.into()),
        ("chunk", 65536.into()),
        ("matrix", "vandermonde-11d".into()),
        ("member_index", 1.into()),
        ("volume_bytes", (16 << 20).into()),
    ] {
        assert_eq!(told[field], expected, "{field}");
    }
    assert_eq!(told["epoch"]["number"], 1);
    assert_eq!(told["members"][2]["state"], "ONLINE");
    assert_eq!(told["array_uuid"], place.json("inspect m2 --json")["array_uuid"]);
    assert!(place.stdout("inspect m0").contains("tank"));

    let before = fs::read(place.path("m0")).unwrap();
    assert!(place.refusal("create other -k 2 -m 1 m0 m1 m2").contains("holds Calpe member 0 of 'tank'"));
    assert!(place.refusal("create other -k 2 -m 1 m0 m1 m9").contains("m9: does not exist"));
    assert!(place.refusal("create other -k 2 -m 1 m0 m1 ./m0").contains("same device"));
    assert!(place.usage("create other -k 2 -m 1 m0 m1").contains("need 3 members, 2 given"));
    assert!(place.usage("create other -k 2 -m 300 m0 m1").contains("at most 255"));
    assert!(fs::read(place.path("m0")).unwrap() == before && names(place.dir.path()).len() == 3);
    place.calpe("create other -k 2 -m 1 --force m0 m1 m2", 0);
    assert_eq!(place.json("inspect m0 --json")["name"], "other");

    File::create(place.path("blank")).unwrap().set_len(1 << 20).unwrap();
    let output = place.calpe("inspect blank --json", 1);
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["error"], "no Calpe superblock");
    assert!(place.refusal("inspect nowhere").contains("nowhere: no such file"));
}

#[test]
fn a_damaged_copy_is_told_and_the_others_still_count() {
    let place = Place::new();
    place.calpe("create tank -k 1 -m 1 --size 8MiB m0 m1", 0);
    let copies = |place: &Place| place.json("inspect m0 --json")["copies"].as_array().unwrap().clone();
    let valid: Vec<_> = copies(&place).into_iter().filter(|copy| copy["valid"] == true).collect();
    assert_eq!(valid.len(), 2);
    let file = File::options().write(true).open(place.path("m0")).unwrap();
    file.write_all_at(b"x", valid[0]["offset"].as_u64().unwrap() + 5000).unwrap();
    let now = copies(&place);
    assert!(now.iter().any(|copy| copy["error"].as_str().is_some_and(|text| text.contains("damaged"))));
    assert_eq!(now.iter().filter(|copy| copy["valid"] == true).count(), 1);
}

#[test]
fn a_wrong_configuration_is_told_whole_and_starts_nothing() {
    let place = Place::new();
    fs::write(place.path("bad.toml"), "[daemon]\nruntime_dir = \"run\"\nmemory = 1\n[listne]\n").unwrap();
    for line in ["serve --check --config bad.toml", "serve --config bad.toml"] {
        let text = place.refusal(line);
        assert!(text.contains("bad.toml:3:10: daemon.memory: "), "{text}");
        assert!(text.contains("bad.toml:4:2: listne: unknown key"), "{text}");
    }
    assert!(!place.path("run").exists());
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("conf/calpe.toml");
    place.calpe(&format!("serve --check --config {}", example.display()), 0);
}

#[test]
fn an_array_lives_through_loss_replacement_and_restart() {
    let mut place = Place::new();
    place.start_up("up --data 2 --parity 2 --size 32MiB", "first.log");
    let status = place.json("status --json");
    assert_eq!(status["output_version"], 1);
    let array = &status["arrays"][0];
    assert_eq!((&array["state"], &array["data"], &array["parity"]), (&"ONLINE".into(), &2.into(), &2.into()));
    assert_eq!(array["volume"]["bytes"], 32 << 20);
    assert!(array["uris"][0].as_str().unwrap().starts_with("nbd+unix://"));
    assert_eq!(place.test_code(), 0);
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let code = place.command("status --test").stdout(full()).status().unwrap().code();
    assert_eq!(code, Some(4), "whoever cannot be told does not take it for a degraded array");
    let told = place.refusal("status --socket calpe-data/nbd.sock");
    assert!(told.contains("is no control socket") && told.contains("--socket"), "{told}");
    let name = array["name"].as_str().unwrap().to_owned();
    let member = |index: usize| PathBuf::from(array["members"][index]["name"].as_str().unwrap());

    fs::remove_file(place.dir.path().join(member(1))).unwrap();
    place.until(|place| place.test_code() == 1);
    let told = place.stdout("status -x");
    assert!(
        told.contains("DEGRADED") && told.contains("MISSING") && told.contains("calpe replace"),
        "{told}"
    );
    place.calpe(&format!("wait {name}"), 1);
    let told = place.stdout(&format!("replace {name} 1 ./calpe-data/new -n"));
    assert!(
        told.starts_with("would ") && told.contains("(./calpe-data/new: "),
        "the path as it was given: {told}"
    );
    assert!(place.refusal(&format!("replace {name} 1 no/dir/m")).starts_with("calpe: no/dir/m: "));
    assert!(!place.path("calpe-data/new").exists());
    place.calpe(&format!("replace {name} 1 calpe-data/new -w"), 0);
    assert_eq!(place.test_code(), 0);
    assert!(place.stdout(&format!("scrub {name} -w")).contains("no errors"));
    assert!(place.stdout(&format!("scrub {name} -w")).contains("no errors"), "twice in one second");
    assert_eq!(place.stdout("status -x"), "all arrays are healthy\n");

    place.calpe(&format!("offline {name} 0"), 0);
    assert_eq!(place.test_code(), 1);
    place.calpe(&format!("online {name} 0"), 0);
    place.calpe(&format!("wait {name} -t rebuild"), 0);
    place.until(|place| place.test_code() == 0);
    assert!(place.stdout("events").contains("member 1"));

    for line in ["status nope", "scrub nope", "wait nope", "export nope"] {
        assert!(place.refusal(line).contains("no array 'nope'"), "{line}");
    }
    assert!(place.refusal(&format!("fail {name} 17")).contains("no member 17"));
    assert!(place.refusal("up").contains("is in use by process"), "a second daemon on the same members");
    place.stop();

    place.start_up("up --data 3 --parity 1", "second.log");
    let told = fs::read_to_string(place.path("second.log")).unwrap();
    assert!(told.contains("--data 3 does not count"), "{told}");
    let again = place.json("status --json");
    assert_eq!(
        (&again["arrays"][0]["uuid"], &again["arrays"][0]["state"]),
        (&array["uuid"], &array["state"])
    );
    place.stop();
}

#[test]
fn an_empty_array_takes_space_for_its_logs_and_not_for_its_pages() {
    let place = Place::new();
    place.calpe("create wide --data 4 --parity 2 --size 100GiB a b c d e f", 0);
    let inspected = place.json("inspect a --json");
    let text = inspected.to_string();
    let allocated = |member: &str| fs::metadata(place.path(member)).unwrap().blocks() * 512;
    let log = inspected["regions"]
        .as_array()
        .and_then(|regions| regions.iter().find(|region| region["kind"] == "log"))
        .and_then(|region| region["length"].as_u64())
        .unwrap_or_else(|| panic!("{text}"));
    for member in ["a", "b", "c", "d", "e", "f"] {
        assert!(allocated(member) < log + (2 << 20), "{member}: {} of {log}", allocated(member));
    }
}
