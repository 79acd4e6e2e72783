//! Everything wrong that a person can type, plug in or pull out, through the real binary: what is said (what,
//! where, what to do), the exit code, and that nothing is changed where it is refused.

use crate::support::tmpfs::Tmpfs;
use crate::support::{Up, calpe, disk_image, fio_verify, run, signal, try_run};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longest that anything may take; only a hang gets there.
const PATIENCE: Duration = Duration::from_secs(60);

/// A directory to work in.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().expect("a directory"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A sparse file.
    fn file(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path).expect("a file").set_len(bytes).expect("its size");
        path
    }

    fn try_calpe(&self, line: &str) -> Output {
        let mut command = calpe();
        command.env_remove("XDG_RUNTIME_DIR").current_dir(self.0.path()).args(line.split_whitespace());
        try_run(&mut command)
    }

    /// Runs a command that must fail with this code, says nothing on standard output, and returns what it
    /// said.
    #[track_caller]
    fn refused(&self, line: &str, code: i32) -> String {
        let output = self.try_calpe(line);
        let said = everything(&output);
        assert_eq!(output.status.code(), Some(code), "calpe {line}\n{said}");
        assert!(!said.contains("panicked"), "calpe {line}\n{said}");
        said
    }

    #[track_caller]
    fn calpe(&self, line: &str) -> String {
        let output = self.try_calpe(line);
        assert!(output.status.success(), "calpe {line}\n{}", everything(&output));
        everything(&output)
    }

    /// Every file and its content.
    fn contents(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let entries = fs::read_dir(self.0.path()).expect("the directory").flatten();
        let files = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
        let mut all: Vec<_> =
            files.map(|file| (file.path(), fs::read(file.path()).expect("its content"))).collect();
        all.sort();
        all
    }
}

fn everything(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[track_caller]
fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !reached() {
        assert!(Instant::now() < deadline, "not reached: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The daemon refuses: exit code 1, and all these words are said.
#[track_caller]
fn refused_by(up: &Up, args: &[&str], words: &[&str]) {
    let output = try_run(&mut up.command(args));
    let said = everything(&output);
    assert_eq!(output.status.code(), Some(1), "{args:?}\n{said}");
    for word in words {
        assert!(said.contains(word), "{args:?} does not say '{word}':\n{said}");
    }
}

#[track_caller]
fn test_code(up: &Up) -> i32 {
    try_run(&mut up.command(&["status", "--test"])).status.code().expect("an exit code")
}

#[test]
fn wrong_geometries_and_sizes_are_refused_with_a_way_out_and_create_nothing() {
    let place = Place::new();
    #[rustfmt::skip]
    let table: &[(&str, i32, &str)] = &[
        ("-k 0 -m 1 --size 1MiB m0", 2, "--data 1 or more"),
        ("-k 200 -m 56 --size 1MiB m0", 2, "at most 255"),
        ("-k 65535 -m 65535 --size 1MiB m0", 2, "at most 255"),
        ("-k 70000 -m 1 --size 1MiB m0", 2, "not in 0..=65535"),
        ("-k x -m 1 --size 1MiB m0", 2, "invalid"),
        ("-k 1 -m 1 --chunk 3000 --size 1MiB m0 m1", 2, "power of two from 4 KiB to 4 MiB"),
        ("-k 1 -m 1 --chunk 96KiB --size 1MiB m0 m1", 2, "power of two"),
        ("-k 1 -m 1 --chunk 2KiB --size 1MiB m0 m1", 2, "power of two"),
        ("-k 1 -m 1 --chunk 8MiB --size 1MiB m0 m1", 2, "4 MiB"),
        ("-k 1 -m 1 --chunk 1TiB --size 1MiB m0 m1", 2, "4 MiB"),
        ("-k 1 -m 1 --chunk 0 --size 1MiB m0 m1", 2, "power of two"),
        ("-k 1 -m 1 --size 0 m0 m1", 2, "multiple of 4 KiB above zero"),
        ("-k 1 -m 1 --size 4097 m0 m1", 2, "multiple of 4 KiB"),
        ("-k 1 -m 1 --size 512 m0 m1", 2, "multiple of 4 KiB"),
        ("-k 1 -m 1 --size banana m0 m1", 2, "'banana' is not a size"),
        ("-k 1 -m 1 --size -5 m0 m1", 2, "unexpected argument"),
        ("-k 1 -m 1 --size 1.5GB m0 m1", 2, "is not a size"),
        ("-k 1 -m 1 --size 1.5 m0 m1", 2, "not a whole number of bytes"),
        ("-k 1 -m 1 --size 99999999999999999999 m0 m1", 2, "is too large"),
        ("-k 1 -m 1 --size 16000000TiB m0 m1", 2, "larger than any device"),
        ("-k 1 -m 1 --size 8000000TiB m0 m1", 1, "choose a smaller size, more members"),
        ("-k 2 -m 1 --size 1MiB m0 m1", 2, "need 3 members, 2 given"),
        ("-k 1 -m 1 --size 1MiB m0 m1 m2", 2, "need 2 members, 3 given"),
        ("-k 1 -m 1 --size 1MiB m0 ./m0", 1, "same device"),
        ("-k 1 -m 1 m0 m1", 1, "m0: does not exist"),
        ("-k 1 -m 1 --size 1MiB m0 no/where", 1, "no/where: no such file"),
        ("-k 1 -m 1 --size 1MiB m0 /dev/calpe-nothing", 1, "no file is created under /dev"),
        ("-k 1 -m 1 --size 1MiB m0 nbd+unix:///?socket=none", 1, "cannot connect"),
        ("-k 1 -m 1 --volume cas --size 1MiB m0 m1", 2, "not supported by this version"),
        ("-k 1 -m 1 --checksum md5 --size 1MiB m0 m1", 2, "blake3"),
        ("-k 1 -m 1 --volume tape --size 1MiB m0 m1", 2, "plain, cas"),
    ];
    for &(rest, code, word) in table {
        let said = place.refused(&format!("create tank {rest}"), code);
        assert!(said.contains(word), "{rest} does not say '{word}':\n{said}");
    }
    for name in [".tank", "a/b", "", "tänk", &"x".repeat(65)] {
        let mut command = calpe();
        command.current_dir(place.0.path()).args(["create", name, "-k1", "-m1", "--size=1MiB", "m0", "m1"]);
        let output = try_run(&mut command);
        assert_eq!(output.status.code(), Some(2), "{name}");
        assert!(everything(&output).contains("cannot name an array"), "{name}: {}", everything(&output));
    }
    assert_eq!(place.contents(), []);
}

#[test]
fn an_up_that_is_refused_leaves_no_directory_and_no_file() {
    let place = Place::new();
    for (line, code, word) in [
        ("up --dir new/er --data 0", 2, "--data 1 or more"),
        ("up --dir new/er --data 250 --parity 6", 2, "at most 255"),
        ("up --dir new/er --size 0", 2, "multiple of 4 KiB"),
        ("up --dir new/er --size 4097", 2, "multiple of 4 KiB"),
        ("up --dir new/er --chunk 5000", 2, "power of two"),
        ("up --dir new/er --volume cas", 2, "not supported by this version"),
        ("up --socket x --dir new/er", 2, "leave --socket away"),
        (&format!("up --size 16MiB --dir new/{}", "x".repeat(110)), 1, "at most 107 bytes"),
    ] {
        let said = place.refused(line, code);
        assert!(said.contains(word), "{line}: {said}");
        assert!(!place.path("new").exists(), "{line}");
    }
    // What is in the way of a socket is in the way of the array too.
    for name in ["nbd.sock", "control.sock"] {
        let dir = place.path(&format!("with-{name}"));
        fs::create_dir(&dir).expect("a directory");
        fs::write(dir.join(name), "precious").expect("a file");
        let said = place.refused(&format!("up --size 16MiB --dir {}", dir.display()), 1);
        assert!(said.contains("exists and is not a socket"), "{said}");
        assert_eq!(fs::read_dir(&dir).expect("listed").count(), 1);
        assert_eq!(fs::read(dir.join(name)).expect("still there"), b"precious");
    }
    place.file("plain", 0);
    for dir in ["plain", "plain/x", "/proc/calpe"] {
        let said = place.refused(&format!("up --dir {dir}"), 1);
        assert!(said.contains(dir) && said.contains("choose another place"), "{said}");
    }
    // A file where a member would be created.
    let dir = place.path("taken");
    fs::create_dir(&dir).expect("a directory");
    fs::write(dir.join("member-01.img"), "precious").expect("a file");
    let said = place.refused(&format!("up --dir {}", dir.display()), 1);
    assert!(said.contains("member-01.img") && said.contains("move it away"), "{said}");
    assert_eq!(fs::read(dir.join("member-01.img")).expect("still there"), b"precious");
    assert_eq!(fs::read_dir(&dir).expect("listed").count(), 1);
}

#[test]
fn wrong_members_are_named_and_untouched() {
    let place = Place::new();
    let good = place.file("good", 32 << 20);
    fs::hard_link(&good, place.path("hard")).expect("a link");
    std::os::unix::fs::symlink("good", place.path("soft")).expect("a link");
    std::os::unix::fs::symlink("nowhere", place.path("dangling")).expect("a link");
    fs::create_dir(place.path("dir")).expect("a directory");
    nix::unistd::mkfifo(&place.path("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let _socket = UnixListener::bind(place.path("socket")).expect("a socket");
    place.file("empty", 0);
    place.file("short", 64 << 10);
    let before = place.contents();
    for (other, word) in [
        ("hard", "are the same device"),
        ("soft", "are the same device"),
        ("good", "are the same device"),
        ("dangling", "dangling"),
        ("dir", "dir: is a directory"),
        ("pipe", "pipe: is a pipe"),
        ("socket", "socket: is a socket"),
        ("/dev/null", "/dev/null: is a character device"),
        ("empty", "empty: has 0 B"),
        ("short", "short: has 64 KiB"),
    ] {
        for size in ["", "--size 8MiB", "--force", "-n"] {
            let said = place.refused(&format!("create tank -k 1 -m 1 {size} good {other}"), 1);
            assert!(said.contains(word), "{other} {size}: {said}");
        }
    }
    let said = place.refused("create tank -k 1 -m 1 --size 1GiB good fresh", 1);
    assert!(said.contains("good: has 32 MiB, but"), "{said}");
    assert_eq!(place.contents(), before);
    // The other name of a device is the device: it is refused while the first is a member.
    place.file("second", 32 << 20);
    place.calpe("create tank -k 1 -m 1 soft second");
    assert!(
        place.refused("create other -k 1 -m 1 hard second", 1).contains("holds Calpe member 0 of 'tank'")
    );
}

#[test]
fn a_member_that_may_not_be_written_is_refused() {
    let place = Place::new();
    let (good, other) = (place.file("good", 32 << 20), place.file("other", 32 << 20));
    let _ = (good, other);
    if nix::unistd::geteuid().is_root() {
        if run_is_ok(Command::new("chattr").arg("+i").arg(place.path("other"))) {
            let said = place.refused("create tank -k 1 -m 1 good other", 1);
            run(Command::new("chattr").arg("-i").arg(place.path("other")));
            assert!(said.contains("other: the file is read-only"), "{said}");
        } else {
            eprintln!("skipped: this filesystem has no immutable files");
        }
    } else {
        fs::set_permissions(place.path("other"), fs::Permissions::from_mode(0o000)).expect("a mode");
        let said = place.refused("create tank -k 1 -m 1 good other", 1);
        assert!(said.contains("other: permission denied"), "{said}");
    }
    let Some(tmpfs) = Tmpfs::mount(place.path("ro"), 4) else { return };
    let member = place.file("ro/member", 32 << 20);
    tmpfs.remount("ro");
    let said = place.refused("create tank -k 1 -m 1 good ro/member", 1);
    assert!(said.contains("ro/member: its filesystem is read-only"), "{said}");
    let said = place.refused("create tank -k 1 -m 1 --size 8MiB good ro/new", 1);
    assert!(said.contains("ro/new") && said.contains("read-only"), "{said}");
    assert_eq!(member.metadata().expect("still there").blocks(), 0);
    for dir in ["ro", "ro/new"] {
        let said = place.refused(&format!("up --dir {dir}"), 1);
        assert!(said.contains(dir) && said.to_lowercase().contains("read-only"), "{said}");
    }
    // What was locked, checked, or given up when a fellow failed is no member.
    assert!(place.refused("inspect good", 1).contains("no Calpe superblock"));
}

fn run_is_ok(command: &mut Command) -> bool {
    command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

#[test]
fn unequal_members_use_the_smallest_and_tell_what_is_left_over() {
    let place = Place::new();
    place.file("small", 32 << 20);
    place.file("large", 100 << 20);
    let told = place.calpe("create tank -k 1 -m 1 -n small large");
    assert!(told.contains("large: 68") && told.contains("left over") && !told.contains("small: 3"), "{told}");
    assert!(place.contents().iter().all(|(_, content)| content.iter().all(|byte| *byte == 0)), "-n wrote");
    let told = place.calpe("create tank -k 1 -m 1 small large");
    assert!(told.contains("large: 68") && told.contains("left over"), "{told}");
    let bytes = |name: &str| {
        let text = place.calpe(&format!("inspect {name} --json"));
        let told: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        (told["volume_bytes"].clone(), told["data_length"].clone())
    };
    assert_eq!(bytes("small"), bytes("large"));
}

#[test]
fn what_is_recognised_is_not_overwritten_unless_forced_and_a_dry_run_never_is() {
    let place = Place::new();
    let blank = place.file("blank", 32 << 20);
    let foreign = place.file("foreign", 32 << 20);
    if !run_is_ok(Command::new("mkfs.ext4").arg("-q").arg("-F").arg(&foreign)) {
        // Without the tool, the mark that all such filesystems bear.
        let file = File::options().write(true).open(&foreign).expect("opened");
        file.write_all_at(&[0x53, 0xef], 1024 + 56).expect("written");
    }
    let image = place.path("partitioned");
    let mut table = vec![0; 512];
    table[446 + 4] = 0x83;
    table[446 + 8..446 + 16].copy_from_slice(&[0, 8, 0, 0, 0, 64, 0, 0]);
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    place.file("partitioned", 32 << 20);
    File::options().write(true).open(&image).expect("opened").write_all_at(&table, 0).expect("written");
    let before = place.contents();
    for (name, word) in [("foreign", "foreign: holds ext"), ("partitioned", "partitioned: holds")] {
        for dry in ["", "-n"] {
            let said = place.refused(&format!("create tank -k 1 -m 1 {dry} blank {name}"), 1);
            assert!(
                said.contains(word) && said.contains("--force") && said.contains("nothing was changed"),
                "{said}"
            );
        }
        let told = place.calpe(&format!("create tank -k 1 -m 1 -n --force blank {name}"));
        assert!(told.contains("is destroyed"), "{told}");
    }
    assert!(place.contents() == before);
    let told = place.calpe("create tank -k 1 -m 1 --force blank foreign");
    assert!(told.contains("foreign: ext") && told.contains("is destroyed"), "{told}");
    // No trace of the old content makes anybody think that it is still there.
    let said = place.refused("create other -k 1 -m 1 blank foreign", 1);
    assert!(said.contains("Calpe member") && !said.contains("ext"), "{said}");
    assert!(blank.exists());
}

#[test]
fn a_full_device_is_taken_back_and_leaves_no_members() {
    let place = Place::new();
    let Some(_tmpfs) = Tmpfs::mount(place.path("full"), 1) else { return };
    fs::write(place.path("full/fill"), vec![1; 2 << 20]).expect_err("it is full before that");
    let said = place.refused("create tank -k 1 -m 1 --size 8MiB first full/second", 1);
    assert!(said.contains("taken back") && said.contains("full/second"), "{said}");
    assert!(said.to_lowercase().contains("space") || said.contains("room"), "{said}");
    assert!(!place.path("first").exists(), "the first member was not taken back");
    assert!(!place.path("full/second").exists());
}

#[test]
fn inspect_tells_what_is_damaged_and_fails_only_when_nothing_is_left() {
    let place = Place::new();
    place.calpe("create tank -k 1 -m 1 --size 8MiB m0 m1");
    let copies = |code: i32| {
        let output = place.try_calpe("inspect m0 --json");
        assert_eq!(output.status.code(), Some(code), "{}", everything(&output));
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        told
    };
    let told = copies(0);
    let valid: Vec<u64> = told["copies"]
        .as_array()
        .expect("copies")
        .iter()
        .filter(|copy| copy["valid"] == true)
        .map(|copy| copy["offset"].as_u64().expect("an offset"))
        .collect();
    assert_eq!(valid.len(), 2, "{told}");
    let file = File::options().write(true).open(place.path("m0")).expect("opened");
    file.write_all_at(b"damage", valid[0] + 100).expect("written");
    let told = copies(0);
    assert_eq!(told["name"], "tank");
    assert!(told["copies"].to_string().contains("damaged"), "{told}");
    file.write_all_at(b"damage", valid[1] + 100).expect("written");
    let told = copies(1);
    assert!(told["error"].is_string() && told.get("name").is_none(), "{told}");
    let said = place.refused("inspect m0", 1);
    assert!(said.contains("calpe: m0: "), "{said}");
    // A damaged member is not blank.
    let said = place.refused("create other -k 1 -m 1 m0 blank", 1);
    assert!(said.contains("blank") || said.contains("m0: holds"), "{said}");

    let mut random = calpe_core::testing::Random::new(3);
    for (name, bytes) in [("noise", 1 << 20), ("tiny", 100), ("none", 0), ("odd", 70_001)] {
        let mut content = vec![0; bytes];
        random.fill(&mut content);
        fs::write(place.path(name), content).expect("a file");
        assert!(place.refused(&format!("inspect {name}"), 1).contains("no Calpe superblock"), "{name}");
        place.refused(&format!("inspect {name} --json"), 1);
    }
    for (name, word) in
        [("nowhere", "no such file"), (".", "is a directory"), ("/dev/null", "character device")]
    {
        assert!(place.refused(&format!("inspect {name}"), 1).contains(word), "{name}");
    }
    // A copy that was cut short.
    fs::copy(place.path("m1"), place.path("cut")).expect("copied");
    File::options().write(true).open(place.path("cut")).expect("opened").set_len(5 << 20).expect("cut");
    assert!(place.refused("inspect cut", 1).contains("cut off"));
}

/// Earlier builds could make arrays without a redo log. The image is of one of their superblocks.
#[test]
fn members_of_an_array_without_redo_log_are_refused_by_name_everywhere() {
    let place = Place::new();
    fs::create_dir(place.path("members")).expect("a directory");
    let path = place.file("members/m2", 300 << 20);
    let image = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/superblock-v1-member.bin");
    let copy = fs::read(image).expect("a golden image");
    let file = File::options().write(true).open(&path).expect("opened");
    for offset in [0, (300 << 20) - 2 * copy.len() as u64] {
        file.write_all_at(&copy, offset).expect("written");
    }
    for command in ["inspect members/m2", "check members/m2", "up --dir members"] {
        let said = place.refused(command, 1);
        assert!(said.contains("members/m2: "), "{command}: {said}");
        for word in ["of the array 'tank' without redo log", "copy the data out with the version that made"] {
            assert!(said.contains(word), "{command}: {said}");
        }
    }
    let said = place.refused("create pond -k 1 -m 1 --size 1MiB members/m2 other", 1);
    assert!(said.contains("holds Calpe member of 'tank', an array without redo log"), "{said}");
    let written = fs::read(&path).expect("its content");
    assert!(written[..copy.len()] == copy[..], "nothing was changed");

    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), &[]);
    let members = path.parent().and_then(Path::to_str).expect("UTF-8");
    for (args, code) in [(&["import"][..], 0), (&["import", "-a"], 0), (&["import", "tank"], 1)] {
        let output = try_run(&mut up.command(&[args, &["--dir", members]].concat()));
        let said = everything(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains("of the array 'tank' without redo log"), "{args:?}: {said}");
    }
}

#[test]
fn a_member_that_was_cut_off_does_not_serve() {
    let dir = tempfile::tempdir().expect("a directory");
    let (up, image) =
        Up::start_with_image(dir.path(), &["--data", "2", "--parity", "1", "--size", "16MiB"], 16 << 20, 5);
    let (first, second) = (up.member(0), up.member(1));
    up.stop();
    let cut = |path: &Path| {
        File::options().write(true).open(path).expect("opened").set_len(9 << 20).expect("cut");
    };
    cut(&first);
    let up = Up::start(dir.path(), &[]);
    assert_eq!(up.status()["state"], "DEGRADED", "{}", up.status());
    assert!(up.log().contains("cut off"), "{}", up.log());
    refused_by(&up, &["online", "calpe", "0"], &["member 0"]);
    run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw"]).arg(&image).arg(up.uri()));
    // Also one that is cut off while it serves.
    let spare = dir.path().join("spare");
    up.calpe(&["replace", "calpe", "0", spare.to_str().expect("UTF-8"), "-w"]);
    // What is under way when it is cut off makes the file longer again.
    until("it is idle", || up.status()["dirty"] == false);
    cut(&second);
    until("the cut member is out", || test_code(&up) == 1);
    run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw"]).arg(&image).arg(up.uri()));
    assert_eq!(second.metadata().expect("still there").len(), 9 << 20, "it was written to");
    up.stop();
}

#[test]
fn configurations_are_refused_with_file_line_and_key_and_start_nothing() {
    let place = Place::new();
    #[rustfmt::skip]
    let table: &[(&str, &[&str])] = &[
        ("[daemon\n", &["c.toml:1:"]),
        ("x = \n", &["c.toml:1:"]),
        ("[daemon]\nmemory = 5\nfoo = 1\n", &["c.toml:2:10: daemon.memory", "c.toml:3:1: daemon.foo: unknown key"]),
        ("[daemon]\nmemory = \"lots\"\n", &["c.toml:2:10: daemon.memory"]),
        ("[daemon]\nlog_format = \"xml\"\n", &["c.toml:2:14: daemon.log_format", "human or json"]),
        ("[daemon]\ncontrol_socket = 7\n", &["c.toml:2:18: daemon.control_socket"]),
        ("[listen]\ntcp = \"0.0.0.0:10809\"\n", &["c.toml:2:7: listen.tcp", "plaintext = true"]),
        ("[listen]\ntcp = \"localhost\"\n", &["c.toml:2:7: listen.tcp", "127.0.0.1:10809"]),
        ("[listen]\nmax_connections = 0\n", &["c.toml:2:19: listen.max_connections"]),
        ("[listen]\nmax_connections = -1\n", &["c.toml:2:19: listen.max_connections"]),
        ("array = 1\n", &["c.toml:1:9: array", "[[array]]"]),
        ("[[array]]\nsearch = [\"x\"]\n", &["c.toml:1:1: array[0]", "name or a uuid"]),
        ("[[array]]\nname = \"a b\"\n", &["c.toml:2:8: array[0].name", "array[0].search"]),
        ("[[array]]\nname = \"a\"\nsearch = []\n", &["array[0].search"]),
        ("[[array]]\nuuid = \"12\"\nsearch = [\"x\"]\n", &["c.toml:2:8: array[0].uuid"]),
        ("[[array]]\nname = \"a\"\nsearch = [\"x\"]\nrebuild_min = \"2MiB\"\nrebuild_max = \"1MiB\"\n", &["c.toml:5:15: array[0].rebuild_max"]),
        ("[[array]]\nname = \"a\"\nsearch = [\"x\"]\n[[array]]\nname = \"a\"\nsearch = [\"x\"]\n", &["array[1]", "configured twice"]),
        ("[mumble]\n", &["c.toml:1:2: mumble: unknown key"]),
    ];
    for (text, words) in table {
        fs::write(place.path("c.toml"), format!("{text}\n")).expect("a configuration");
        for check in ["--check", ""] {
            let said = place.refused(&format!("serve --config c.toml {check}"), 1);
            for word in *words {
                assert!(said.contains(word), "{text} does not say '{word}':\n{said}");
            }
        }
    }
    fs::write(place.path("c.toml"), b"# \xff\n").expect("a file");
    assert!(place.refused("serve --check --config c.toml", 1).contains("c.toml"));
    assert!(place.refused("serve --check --config nowhere.toml", 1).contains("nowhere.toml: cannot read"));
    assert!(place.refused("serve --check --config .", 1).contains("cannot read"));
    fs::write(place.path("c.toml"), "[daemon]\nruntime_dir = \"run\"\n").expect("a configuration");
    assert!(place.calpe("serve --check --config c.toml").contains("c.toml: valid"));
    assert!(!place.path("run").exists());
}

#[test]
fn exit_codes_without_a_daemon_are_those_of_the_contract() {
    let place = Place::new();
    place.file("plain", 0);
    // A socket that nobody serves any more.
    drop(UnixListener::bind(place.path("stale")).expect("a socket"));
    for socket in ["nowhere", "plain", "stale"] {
        assert!(place.refused(&format!("--socket {socket} status"), 1).contains(socket));
        assert!(place.refused(&format!("--socket {socket} status --test"), 4).contains("start it"));
        for line in [
            "fail a 0",
            "offline a 0",
            "online a 0",
            "replace a 0 new",
            "scrub a",
            "wait a",
            "export a",
            "import -a",
            "events",
        ] {
            let said = place.refused(&format!("--socket {socket} {line}"), 1);
            assert!(said.contains("no daemon answers") && said.contains("--socket"), "{said}");
        }
    }
    assert!(!place.path("new").exists());
    for line in [
        "nonsense",
        "",
        "create",
        "create a -k 1",
        "status --wat",
        "fail a",
        "replace a 0",
        "scrub a -p -w",
        "wait a -t coffee",
        "inspect",
    ] {
        place.refused(line, 2);
    }
}

#[test]
fn what_a_daemon_is_asked_wrongly_it_refuses_and_nothing_changes() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), &["--data", "2", "--parity", "1", "--size", "16MiB", "--gpu", "off"]);
    let before = up.status();
    let path = |name: &str| dir.path().join(name);
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let member = text(&up.member(1));
    for line in [
        "fail nope 0",
        "offline nope 0",
        "online nope 0",
        "scrub nope",
        "wait nope",
        "export nope",
        "status nope",
    ] {
        let args: Vec<_> = line.split(' ').collect();
        refused_by(&up, &args, &["no array 'nope'", "calpe"]);
    }
    assert_eq!(try_run(&mut up.command(&["status", "--test", "nope"])).status.code(), Some(4));
    refused_by(&up, &["gpu", "drill", "hang"], &["no GPU is used", "switched off"]);
    refused_by(&up, &["gpu", "drill", "error", "-n"], &["no GPU is used", "switched off"]);
    for wrong in ["3", "65535", "/no/such/member", "00000000-0000-0000-0000-000000000000"] {
        for command in ["fail", "offline", "online"] {
            refused_by(&up, &[command, "calpe", wrong], &["has no member", "0 to 2"]);
        }
    }
    assert!(up.calpe(&["online", "calpe", "1"]).contains("ONLINE already"));
    refused_by(&up, &["import", "calpe", "--dir", &text(&path("data"))], &["served already"]);
    refused_by(&up, &["import", "tank", "--dir", &text(&path("nowhere"))], &["tank", "--dir"]);

    // Replacements that will not do.
    let file = |name: &str, bytes: u64| {
        File::create(path(name)).expect("a file").set_len(bytes).expect("its size");
        text(&path(name))
    };
    let (short, foreign) = (file("short", 1 << 20), file("foreign", 64 << 20));
    let mark = File::options().write(true).open(&foreign).expect("opened");
    mark.write_all_at(&[0x53, 0xef], 1024 + 56).expect("a mark");
    let content = fs::read(&foreign).expect("read");
    run(calpe().args(["create", "other", "-k1", "-m1", "--size=64MiB"]).args([path("o0"), path("o1")]));
    let other = text(&path("o0"));
    for (new, words) in [
        (short.as_str(), &["short: has 1 MiB, but"][..]),
        (&foreign, &["foreign: holds", "--force", "nothing was changed"]),
        (&other, &["o0: holds Calpe member 0 of 'other'", "--force"]),
        (&member, &["is member 1 of array"]),
        (&text(dir.path()), &["is a directory"]),
        ("/dev/null", &["is a character device"]),
        ("/dev/calpe-nothing", &["no such file or device"]),
        (&text(&path("no/where")), &["no such file or device"]),
        ("nbd+unix:///?socket=none", &["cannot connect"]),
        ("nbd+unix:///x", &["socket="]),
    ] {
        refused_by(&up, &["replace", "calpe", "0", new], words);
        refused_by(&up, &["replace", "calpe", "0", new, "-n"], &[]);
    }
    refused_by(&up, &["replace", "calpe", "0", &member, "--force"], &["is member 1 of array"]);
    assert!(fs::read(&foreign).expect("read") == content, "a refused replacement was written to");
    run(calpe().arg("inspect").arg(&other));

    // Dry runs.
    let fresh = text(&path("fresh"));
    for line in [
        vec!["fail", "calpe", "0", "-n"],
        vec!["offline", "calpe", "0", "-n"],
        vec!["replace", "calpe", "0", &fresh, "-n"],
        vec!["replace", "calpe", "0", &foreign, "--force", "-n"],
        vec!["scrub", "calpe", "-n"],
        vec!["export", "calpe", "-n"],
    ] {
        assert!(up.calpe(&line).starts_with("would "), "{line:?}");
    }
    assert!(!path("fresh").exists());
    assert!(fs::read(&foreign).expect("read") == content, "a dry run wrote");

    // Members in use by a running daemon, from outside.
    for args in [
        vec!["create", "x", "-k1", "-m1", "--size=8MiB", &member, &fresh],
        vec!["create", "x", "-k1", "-m1", "--size=8MiB", "--force", &member, &fresh],
        vec!["up", "--dir", &text(&path("data"))],
    ] {
        let output = try_run(calpe().args(&args));
        let said = everything(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}\n{said}");
        assert!(said.contains("is in use by process") && said.contains("(calpe)"), "{args:?}\n{said}");
    }
    run(calpe().arg("inspect").arg(&member));
    let now = up.status();
    for same in ["state", "members", "uuid", "volume"] {
        assert_eq!(now[same], before[same], "{same}");
    }
    assert_eq!(test_code(&up), 0);
    // The last that can go may go, one more may go too, and is told as what it is.
    up.calpe(&["fail", "calpe", "0"]);
    assert_eq!(test_code(&up), 1);
    refused_by(&up, &["wait", "calpe"], &[]);
    up.stop();
}

/// nbdsh with a line of Python on `h`.
fn nbdsh(up: &Up, line: &str) -> Output {
    try_run(Command::new("/usr/bin/python3").args(["-m", "nbd", "-u", &up.uri(), "-c", line]))
}

#[track_caller]
fn all_io_is_eio(up: &Up) {
    let script = r#"
import errno
calls = [lambda: h.pread(4096, 0), lambda: h.pwrite(b'x' * 4096, 0), lambda: h.zero(65536, 0), lambda: h.flush(),
         lambda: h.pwrite(b'x' * 512, 512, nbd.CMD_FLAG_FUA)]
for at, call in enumerate(calls):
    try:
        call()
    except nbd.Error as error:
        assert error.errnum == errno.EIO, (at, error)
    else:
        raise SystemExit(f"call {at} did not fail")
"#;
    let output = nbdsh(up, script);
    assert!(output.status.success(), "{}", everything(&output));
}

#[test]
fn an_array_that_loses_more_than_m_members_fails_writes_nothing_and_comes_back_with_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let (up, image) =
        Up::start_with_image(dir.path(), &["--data", "2", "--parity", "2", "--size", "32MiB"], 32 << 20, 6);
    let members: Vec<PathBuf> = (0..4).map(|index| up.member(index)).collect();
    let away = |index: usize| dir.path().join(format!("away-{index}"));
    for (gone, member) in members.iter().enumerate().take(3) {
        fs::rename(member, away(gone)).expect("moved");
        // One after the other, so that it is known which were current to the end.
        until("the loss is noticed", || up.status()["members"][gone]["state"] == "MISSING");
    }
    assert_eq!(up.status()["state"], "FAILED");
    assert_eq!(test_code(&up), 2);
    assert!(up.log().contains("FAILED") && up.log().contains("calpe online"), "{}", up.log());
    let everywhere =
        || [away(0), away(1), away(2), members[3].clone()].map(|path| fs::read(path).expect("read"));
    let before = everywhere();
    all_io_is_eio(&up);
    refused_by(&up, &["replace", "calpe", "0", "/nowhere"], &["FAILED"]);
    refused_by(&up, &["scrub", "calpe"], &["FAILED"]);
    refused_by(&up, &["wait", "calpe"], &["FAILED"]);
    refused_by(&up, &["online", "calpe", "2"], &["was not found"]);
    assert!(everywhere() == before, "a failed array wrote");

    // Back at run time: the last one first, which was there to the end.
    fs::rename(away(2), &members[2]).expect("moved back");
    up.calpe(&["online", "calpe", "2"]);
    until("it serves again", || up.status()["state"] == "DEGRADED");
    run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw"]).arg(&image).arg(up.uri()));
    for back in [0, 1] {
        fs::rename(away(back), &members[back]).expect("moved back");
        up.calpe(&["online", "calpe", &back.to_string()]);
    }
    up.wait_quiet();
    assert_eq!(up.status()["state"], "ONLINE");
    assert_eq!(up.scrub(), (0, 0));
    fio_verify(&up.uri(), 8, 6);
    run(Command::new("nbdcopy").arg("--flush").arg(&image).arg(up.uri()));

    // Again, and this time the daemon is stopped while the array is FAILED.
    for (gone, member) in members.iter().enumerate().take(3) {
        fs::rename(member, away(gone)).expect("moved");
        until("the loss is noticed", || up.status()["members"][gone]["state"] == "MISSING");
    }
    let before = everywhere();
    all_io_is_eio(&up);
    up.signal("TERM");
    up.ended();
    assert!(everywhere() == before, "stopping a failed array wrote");
    let said = everything(&try_run(calpe().arg("up").arg("--dir").arg(dir.path().join("data"))));
    assert!(said.contains("missing: member 2") && said.contains("member-00.img"), "{said}");
    assert!(everywhere() == before, "a refused start wrote");
    for (back, member) in members.iter().enumerate().take(3) {
        fs::rename(away(back), member).expect("moved back");
    }
    let up = Up::start(dir.path(), &[]);
    run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw"]).arg(&image).arg(up.uri()));
    for member in up.status()["members"].as_array().expect("members") {
        if member["state"] != "ONLINE" {
            up.calpe(&["online", "calpe", &member["index"].to_string()]);
        }
    }
    up.wait_quiet();
    assert_eq!(up.status()["state"], "ONLINE");
    assert_eq!(up.scrub(), (0, 0));
    up.stop();
}

#[test]
fn a_full_disk_is_enospc_for_the_client_and_the_array_lives_and_goes_on_when_there_is_room() {
    let dir = tempfile::tempdir().expect("a directory");
    let Some(tmpfs) = Tmpfs::mount(dir.path().join("data"), 48) else { return };
    let up = Up::start(dir.path(), &["--data", "2", "--parity", "1", "--size", "64MiB"]);
    assert!(up.log().contains("no space"), "the person was not warned: {}", up.log());
    let image = dir.path().join("image");
    disk_image(&image, 64 << 20, 7);
    let fill = r#"
import errno
block = bytes(range(256)) * 256
written = 0
try:
    while written < h.get_size():
        h.pwrite(block, written)
        written += len(block)
    raise SystemExit("64 MiB went onto 48 MiB")
except nbd.Error as error:
    assert error.errnum == errno.ENOSPC, error
assert written > 4 << 20, written
for offset in range(0, written, len(block)):
    assert h.pread(len(block), offset) == block, offset
h.flush()
h.zero(1 << 20, 0)
h.trim(1 << 20, 1 << 20)
"#;
    let output = nbdsh(&up, fill);
    assert!(output.status.success(), "{}\n{}", everything(&output), up.log());
    assert_ne!(up.status()["state"], "FAILED", "{}", up.status());
    assert!(up.calpe(&["events", "--json"]).contains("\"kind\":\"member_full\""), "{}", up.log());
    // One that stays short while the others are not may be out of service, and is back when there is room.
    let words = |up: &Up| -> Vec<String> {
        let status = up.status();
        let members = status["members"].as_array().expect("members");
        members.iter().map(|member| member["state"].as_str().expect("a state").to_owned()).collect()
    };
    let told = words(&up);
    assert!(!told.iter().any(|state| state == "FAULTED"), "a full disk is not a broken one: {}", up.status());
    tmpfs.remount("size=72m");
    until(&format!("all are back\n{}", up.log()), || up.status()["state"] == "ONLINE");
    up.wait_quiet();
    // Restarted while it is full.
    fs::write(dir.path().join("data/rest"), vec![7; 64 << 20]).expect_err("it is full");
    up.stop();
    let up = Up::start(dir.path(), &[]);
    assert_ne!(up.status()["state"], "FAILED");
    tmpfs.remount("size=200m");
    for (member, state) in words(&up).iter().enumerate() {
        if state != "ONLINE" {
            up.calpe(&["online", "calpe", &member.to_string()]);
        }
    }
    up.wait_quiet();
    run(Command::new("nbdcopy").arg("--flush").arg(&image).arg(up.uri()));
    run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw"]).arg(&image).arg(up.uri()));
    up.wait_quiet();
    assert_eq!(up.scrub(), (0, 0));
    up.stop();
}

#[test]
fn a_signal_under_load_or_during_a_rebuild_ends_cleanly_and_the_next_start_picks_up() {
    let dir = tempfile::tempdir().expect("a directory");
    let (mut up, image) =
        Up::start_with_image(dir.path(), &["--data", "2", "--parity", "2", "--size", "256MiB"], 64 << 20, 8);
    for name in ["TERM", "INT"] {
        let mut load = Command::new("fio")
            .args(["--name=load", "--ioengine=nbd", &format!("--uri={}", up.uri())])
            .args(["--rw=randwrite", "--bsrange=4k-256k", "--iodepth=16", "--offset=64M", "--size=128M"])
            .args(["--time_based", "--runtime=60", "--fsync=32"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("fio starts");
        std::thread::sleep(Duration::from_millis(700));
        // A rebuild that has just begun.
        let fresh = dir.path().join(format!("fresh-{name}"));
        up.calpe(&["replace", "calpe", "1", fresh.to_str().expect("UTF-8")]);
        up.signal(name);
        let log = up.dir.join("daemon.log");
        let status = up.ended();
        let said = fs::read_to_string(log).expect("a log");
        assert!(status.success(), "SIG{name}: {status}\n{said}");
        assert!(said.to_lowercase().contains("stopped"), "{said}");
        let ended = Instant::now();
        while load.try_wait().expect("ours").is_none() {
            // fio may retry for ever without a server.
            if ended.elapsed() > Duration::from_secs(5) {
                signal(&load, "KILL");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let data = dir.path().join("data");
        for socket in ["nbd.sock", "control.sock"] {
            assert!(!data.join(socket).exists(), "{socket} was left behind");
        }
        // The next start finds members by what they are, where they are looked for.
        let config = dir.path().join("calpe.toml");
        let text = format!(
            "[daemon]\nruntime_dir = {data:?}\n[[array]]\nname = \"calpe\"\nsearch = [{:?}, {data:?}]\n",
            dir.path()
        );
        fs::write(&config, text).expect("a configuration");
        up = Up::serve(dir.path(), &config);
        until("it is served", || up.status()["state"] != "FAILED");
        up.wait_quiet();
        assert_eq!(up.status()["state"], "ONLINE", "{}", up.log());
        assert_eq!(up.member(1), fresh, "the rebuild was forgotten");
        let compare = format!(
            "image = open({:?}, 'rb').read()\n\
             for at in range(0, len(image), 1 << 20):\n    \
                 assert h.pread(1 << 20, at) == image[at:at + (1 << 20)], at",
            image.to_str().expect("UTF-8")
        );
        let output = nbdsh(&up, &compare);
        assert!(output.status.success(), "what was flushed is lost: {}", everything(&output));
        assert_eq!(up.scrub(), (0, 0));
    }
    up.signal("TERM");
    assert!(up.ended().success());
}

#[test]
fn stale_sockets_are_taken_over_and_foreign_ones_are_not() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), &["--data", "1", "--parity", "1", "--size", "16MiB"]);
    let data = dir.path().join("data");
    // Killed, it leaves its sockets; the next one is not kept from starting by them.
    up.kill();
    assert!(data.join("nbd.sock").exists() && data.join("control.sock").exists());
    let up = Up::start(dir.path(), &[]);
    assert_eq!(up.status()["state"], "ONLINE");
    up.stop();
    assert!(!data.join("nbd.sock").exists() && !data.join("control.sock").exists());
    // Somebody else's live socket.
    let foreign = UnixListener::bind(data.join("nbd.sock")).expect("a socket");
    let output = try_run(calpe().arg("up").arg("--dir").arg(&data));
    let said = everything(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("nbd.sock: another daemon answers there"), "{said}");
    assert!(data.join("nbd.sock").exists() && !data.join("control.sock").exists());
    drop(foreign);
    // A process that another test is starting may still hold it for a moment.
    until("nobody listens", || UnixStream::connect(data.join("nbd.sock")).is_err());
    let up = Up::start(dir.path(), &[]);
    up.stop();
}

#[test]
fn output_into_a_closed_pipe_is_no_error_and_a_full_one_is_told() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), &["--data", "1", "--parity", "1", "--size", "16MiB"]);
    let mut child = up.command(&["status", "--json"]).stdout(Stdio::piped()).spawn().expect("started");
    drop(child.stdout.take());
    assert_eq!(child.wait().expect("ended").code(), Some(0));
    let full = File::options().write(true).open("/dev/full").expect("/dev/full");
    assert!((&full).write_all(b"x").is_err_and(|error| error.kind() == io::ErrorKind::StorageFull));
    let output = up.command(&["status"]).stdout(full).output().expect("ran");
    assert_eq!(output.status.code(), Some(1));
    assert!(everything(&output).contains("standard output"), "{}", everything(&output));
    up.stop();
}

/// What a daemon is told is text: no command may wait for an answer to what cannot be sent, and no array is
/// created where no daemon finds it.
#[test]
fn a_path_that_is_not_utf8_is_refused_at_once_with_its_bytes() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().expect("a directory");
    let serve = crate::support::serve::Serve::start(dir.path(), "");
    let bad = dir.path().join(std::ffi::OsStr::from_bytes(b"bad\xff"));
    fs::create_dir(&bad).expect("a directory");
    let told = |line: &str, paths: &[&Path]| {
        let begun = Instant::now();
        let output = try_run(serve.command(line).args(paths));
        let said = everything(&output);
        assert_eq!(output.status.code(), Some(2), "{line}: {said}");
        assert!(said.contains("bad\\xff") && said.contains("is not UTF-8"), "{line}: {said}");
        assert!(begun.elapsed() < Duration::from_secs(8), "{line}: it waited");
    };
    let (m0, m1) = (bad.join("m0"), bad.join("m1"));
    told("create tank -k 1 -m 1 --size 8MiB", &[&m0, &m1]);
    assert!(!m0.exists());
    told("import --dir", &[&bad]);
    told("import tank -n --dir", &[&bad]);
    told("replace tank 0", &[&m0]);
    told("online tank 0 --path", &[&m0]);
    // In a directory of a good name it is found by its superblock.
    let odd = dir.path().join(std::ffi::OsStr::from_bytes(b"odd\xff"));
    run(serve.command("create tank -k 1 -m 1 --size 8MiB").args([&odd, &dir.path().join("m1")]));
    serve.says("import tank --dir .");
    serve.stop();
}

/// Of sysfs, which tells a page as the size of its files.
const SYSFS_FILE: &str = "/sys/kernel/uevent_seqnum";

/// A file of the kernel's has no bytes, and is none that an interrupted creation has left.
#[test]
fn a_file_of_the_kernel_is_no_storage() {
    let place = Place::new();
    let said = place.refused("create tank -k 1 -m 1 --size 8MiB /proc/self/mem other", 1);
    assert!(said.contains("/proc/self/mem: is a view of the kernel, and no storage"), "{said}");
    assert!(!place.path("other").exists());
    // Without a size that says that files may be created, and with one of its own.
    for (options, file) in [("", "/proc/version"), ("", SYSFS_FILE), ("--size 8MiB", SYSFS_FILE)] {
        let said = place.refused(&format!("create tank -k 1 -m 0 {options} {file}"), 1);
        assert!(said.contains(&format!("{file}: is a view of the kernel")), "{said}");
    }
}

/// All places of superblocks are among it, as a start writes where a creation has not.
#[test]
fn a_new_file_has_room_for_its_log_and_every_superblock() {
    let place = Place::new();
    let line = "create tank -k 1 -m 1 --size 16MiB a b";
    let told = place.calpe(&format!("{line} -n"));
    place.calpe(line);
    let allocated = place.0.path().join("a").metadata().expect("there").blocks() * 512;
    let line = told.lines().find(|line| line.contains("allocated at once")).expect("a line");
    let said: f64 = line.split(' ').next().expect("a number").parse().expect("a number");
    let off = (said * 1_048_576.0 - allocated as f64).abs();
    assert!(off <= 8192.0, "{line}, and it is {allocated}");
}

/// Both ends of a file that exists are zeroed, beside what is set aside.
#[test]
fn a_dry_run_tells_how_much_of_files_that_exist_is_allocated() {
    for (bytes, chunk) in [(64, "1MiB"), (100, "1MiB"), (100, "64KiB"), (16, "4KiB")] {
        let place = Place::new();
        let files = ["a", "b"].map(|name| place.file(name, bytes << 20));
        let line = format!("create tank -k 1 -m 1 --chunk {chunk} a b");
        let told = place.calpe(&format!("{line} -n"));
        assert!(files.iter().all(|file| file.metadata().expect("there").blocks() == 0));
        place.calpe(&line);
        let allocated = files[0].metadata().expect("there").blocks() * 512;
        let line = told.lines().find(|line| line.contains("allocated at once")).expect("a line");
        let said: f64 = line.split(' ').next().expect("a number").parse().expect("a number");
        assert!(line.contains(" MiB of each member"), "{line}");
        let off = (said * 1_048_576.0 - allocated as f64).abs();
        assert!(off <= 0.06 * 1_048_576.0, "{bytes} MiB, {chunk}: {line}, and it is {allocated}");
    }
}
