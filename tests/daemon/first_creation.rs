//! `up` over what earlier runs left, and what it says when it ends: after creations that were cut short, with
//! members that cannot be read, and of arrays that have FAILED.

use super::support::serve::{Serve, array, both};
use super::support::{Up, calpe, signal, try_run};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Longest that anything may take; only a hang gets there.
const PATIENCE: Duration = Duration::from_secs(60);

const UP: [&str; 6] = ["--data", "2", "--parity", "1", "--size", "8MiB"];

/// What `up` says that cannot start.
#[track_caller]
fn refused(dir: &Path, extra: &[&str]) -> String {
    let mut up = calpe();
    let output = try_run(up.arg("up").arg("--dir").arg(dir.join("data")).args(extra));
    assert_eq!(output.status.code(), Some(1), "{}", both(&output));
    both(&output)
}

fn member(dir: &Path, index: usize) -> std::path::PathBuf {
    dir.join(format!("data/member-{index:02}.img"))
}

/// Begins a creation that stops when the first superblock is written, and ends it with a signal.
fn interrupt(dir: &Path, name: &str) {
    let drill = dir.join("drill");
    fs::write(&drill, "hang create").unwrap();
    let mut up = calpe();
    up.arg("up").arg("--dir").arg(dir.join("data")).args(UP).env("CALPE_DRILL", &drill);
    let mut child = up.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    let has_superblock = || try_run(calpe().arg("inspect").arg(member(dir, 0))).status.success();
    while !has_superblock() {
        assert!(begun.elapsed() < PATIENCE && child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    signal(&child, name);
    assert!(!child.wait().unwrap().success());
}

/// The log is written by a thread of its own, so a line may come after the array is served.
fn await_log(up: &Up, line: &str) {
    let begun = Instant::now();
    while !up.log().contains(line) {
        assert!(begun.elapsed() < PATIENCE, "{}", up.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_creation_that_was_cut_short_is_begun_anew() {
    for name in ["KILL", "TERM", "INT"] {
        let dir = tempfile::tempdir().unwrap();
        interrupt(dir.path(), name);
        assert!(member(dir.path(), 2).exists());
        let up = Up::start(dir.path(), &UP);
        await_log(&up, "an earlier creation was interrupted: its 3 files were removed");
        assert_eq!(up.status()["state"], "ONLINE");
        up.stop();
    }
}

#[test]
fn files_without_content_are_created_over_and_others_never() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("data")).unwrap();
    // As a creation leaves it that was killed before it wrote a superblock; the next one has fewer members.
    for index in 0..5 {
        File::create(member(dir.path(), index))
            .unwrap()
            .set_len(if index == 4 { 0 } else { 64 << 20 })
            .unwrap();
    }
    let used = File::options().write(true).open(member(dir.path(), 3)).unwrap();
    used.write_all_at(b"precious", 60 << 20).unwrap();
    let told = refused(dir.path(), &UP);
    assert!(
        told.contains("member-03.img: holds no Calpe superblock") && told.contains("move it away"),
        "{told}"
    );
    assert!((0..5).all(|index| member(dir.path(), index).exists()));
    used.write_all_at(&[0; 8], 60 << 20).unwrap();
    let up = Up::start(dir.path(), &UP);
    await_log(&up, "its 5 files were removed");
    up.stop();
    // One that was in service is never begun anew, whatever became of the others.
    for index in [0, 1] {
        File::create(member(dir.path(), index)).unwrap().set_len(64 << 20).unwrap();
    }
    let told = refused(dir.path(), &UP);
    assert!(told.contains("1 of 2 needed"), "{told}");
    for index in [0, 1] {
        assert!(
            told.contains(&format!("member-{index:02}.img: holds no Calpe superblock any more")),
            "{told}"
        );
    }
}

#[test]
fn a_gpu_that_is_required_and_missing_is_told_before_anything_is_created() {
    if Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let told = refused(dir.path(), &["--gpu", "require"]);
    assert!(told.contains("GPU"), "{told}");
    assert!(!dir.path().join("data").exists());
}

#[test]
fn members_that_may_not_be_read_are_not_called_worthless() {
    let dir = tempfile::tempdir().unwrap();
    Up::start(dir.path(), &UP).stop();
    let as_another = |mode: u32| {
        for place in [dir.path().to_owned(), dir.path().join("data"), dir.path().join("data/state")] {
            fs::set_permissions(place, fs::Permissions::from_mode(mode)).unwrap();
        }
        let mut up = calpe();
        up.arg("up").arg("--dir").arg(dir.path().join("data")).args(UP);
        if nix::unistd::geteuid().is_root() {
            up.uid(65534).gid(65534);
        } else {
            for index in 0..3 {
                fs::set_permissions(member(dir.path(), index), fs::Permissions::from_mode(0o0)).unwrap();
            }
        }
        up.stdin(Stdio::null()).output()
    };
    // Where another user cannot run the binary there is nothing to see.
    let Ok(output) = as_another(0o755) else { return };
    let told = both(&output);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("permission denied") && !told.contains("move it away"), "{told}");
    assert!(!told.contains("no superblock"), "{told}");
}

#[test]
fn what_is_in_the_place_of_a_member_is_told_by_up_and_by_serve() {
    let spoil = |dir: &Path, how: &str| {
        let path = dir.join("data/member-01.img");
        match how {
            "cut" => File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap(),
            "garbage" => fs::write(&path, vec![7; 4 << 20]).unwrap(),
            _ => {
                fs::remove_file(&path).unwrap();
                fs::create_dir(&path).unwrap();
            }
        }
    };
    for (how, reason) in [
        ("cut", "has 1 MiB, but its superblock describes"),
        ("garbage", "holds no Calpe superblock any more"),
        ("directory", "is a directory: a member must be"),
    ] {
        let is_told = |text: &Value| {
            let text = text.as_str().unwrap_or_default();
            assert!(text.contains("member-01.img: ") && text.contains(reason), "{how}: {text}");
        };
        let dir = tempfile::tempdir().unwrap();
        Up::start(dir.path(), &UP).stop();
        spoil(dir.path(), how);
        let up = Up::start(dir.path(), &[]);
        is_told(&up.status()["members"][1]["reason"]);
        up.stop();

        let dir = tempfile::tempdir().unwrap();
        Up::start(dir.path(), &UP).stop();
        let section = array("calpe", &[&dir.path().join("data")]);
        let mut serve = Serve::start(dir.path(), &section);
        serve.array_when("it is served", |array| array["state"] == "ONLINE");
        serve.stop();
        spoil(dir.path(), how);
        let mut serve = Serve::start(dir.path(), &section);
        let array = serve.array_when("it is served", |array| array["state"] == "DEGRADED");
        is_told(&array["members"][1]["reason"]);
        let told =
            serve.events().iter().filter(|event| event["text"].as_str().unwrap().contains(reason)).count();
        assert_eq!(told, 1, "{how}: {:#?}", serve.events());
        serve.stop();
    }
}

#[test]
fn an_array_that_has_failed_is_not_said_to_be_stopped_cleanly() {
    let dir = tempfile::tempdir().unwrap();
    let (up, _) = Up::start_with_image(dir.path(), &UP, 1 << 20, 1);
    for index in [0, 2] {
        fs::rename(up.member(index), dir.path().join(format!("away-{index}"))).unwrap();
    }
    let begun = Instant::now();
    while up.status()["state"] != "FAILED" {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(50));
    }
    up.stop();
    let told = fs::read_to_string(dir.path().join("daemon.log")).unwrap();
    assert!(!told.contains("Stopped cleanly") && told.contains("Stopped, and the array is FAILED"), "{told}");
    for index in [0, 2] {
        assert!(told.contains(&format!("member-{index:02}.img")), "{told}");
    }
    for index in [0, 2] {
        fs::rename(dir.path().join(format!("away-{index}")), member(dir.path(), index)).unwrap();
    }
    let up = Up::start(dir.path(), &[]);
    assert_eq!(up.status()["state"], "ONLINE");
    // The same by `export`.
    for index in [0, 2] {
        fs::rename(up.member(index), dir.path().join(format!("away-{index}"))).unwrap();
    }
    while up.status()["state"] != "FAILED" {
        assert!(begun.elapsed() < 2 * PATIENCE);
        std::thread::sleep(Duration::from_millis(50));
    }
    let is_clean = {
        let told = up.calpe(&["export", "calpe"]);
        assert!(told.contains("is stopped"), "{told}");
        let inspected = try_run(calpe().args(["inspect", "--json"]).arg(member(dir.path(), 1)));
        let inspected: Value = serde_json::from_slice(&inspected.stdout).unwrap();
        inspected["clean"].as_bool().unwrap_or_else(|| panic!("{inspected}"))
    };
    let events = up.calpe(&["events"]);
    let exported = events.lines().find(|line| line.contains("exported, stopped")).expect(&events);
    assert!(exported.contains("FAILED") && exported.contains("is marked clean") == is_clean, "{exported}");
    up.stop();
}
