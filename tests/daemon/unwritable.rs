//! Members that can be read and not written: what a list of arrays says of them is what an import comes to.

use crate::support::serve::Serve;
use crate::support::{calpe, run};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The files of a folder under another one, where they cannot be written; unmounted when dropped.
struct ReadOnly(PathBuf);

impl ReadOnly {
    /// None, with a line that says so, where this user may not mount.
    fn of(files: &Path, at: &Path) -> Option<ReadOnly> {
        fs::create_dir(at).expect("a directory");
        let bound = Command::new("mount").arg("--bind").args([files, at]).output();
        if !bound.as_ref().is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: this user may not mount ({bound:?})");
            return None;
        }
        let mount = ReadOnly(at.to_owned());
        run(Command::new("mount").args(["-o", "remount,bind,ro"]).arg(at));
        Some(mount)
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn create(dir: &Path) {
    fs::create_dir(dir.join("m")).expect("a directory");
    let mut create = calpe();
    create.current_dir(dir).args(["create", "tank", "-k", "2", "-m", "1", "--size", "8MiB"]);
    run(create.args(["m/m0", "m/m1", "m/m2"]));
}

fn listed(serve: &Serve, dirs: &str) -> Value {
    let list: Value = serde_json::from_str(&serve.says(&format!("import --json {dirs}"))).expect("JSON");
    list[0].clone()
}

#[test]
fn an_array_on_a_read_only_filesystem_is_not_said_to_be_importable() {
    let dir = tempfile::tempdir().unwrap();
    create(dir.path());
    let Some(_mount) = ReadOnly::of(&dir.path().join("m"), &dir.path().join("ro")) else { return };
    let serve = Serve::start(dir.path(), "");
    let array = listed(&serve, "--dir ro");
    assert_eq!(array["usable"], 0, "{array}");
    let problem = array["problem"].as_str().expect("a problem");
    assert!(problem.contains("ro/m1: its filesystem is read-only"), "{problem}");
    for member in array["members"].as_array().expect("members") {
        assert!(member["path"].as_str().expect("a path").contains("ro/m"), "{member}");
        let note = member["note"].as_str().expect("a note");
        assert!(note.starts_with("its filesystem is read-only"), "{note}");
    }
    let text = serve.says("import --dir ro");
    assert!(!text.contains("can be imported") && !text.contains("import it with"), "{text}");
    // The import says the same.
    for refused in [serve.refuses("import tank --dir ro -n"), serve.refuses("import tank --dir ro")] {
        for line in problem.lines() {
            // A command names paths as they were given.
            let line = line.replace(&format!("{}/", dir.path().display()), "");
            assert!(refused.contains(&line), "'{line}' in {refused}");
        }
    }
}

#[test]
fn a_member_that_cannot_be_written_is_noted_and_does_not_count() {
    let dir = tempfile::tempdir().unwrap();
    create(dir.path());
    let is_root = nix::unistd::geteuid().is_root();
    let mount = is_root.then(|| ReadOnly::of(&dir.path().join("m"), &dir.path().join("ro")));
    let (third, why) = match mount {
        Some(None) => return,
        Some(Some(_)) => ("ro/m2", "its filesystem is read-only"),
        None => {
            let own = dir.path().join("m/m2");
            fs::set_permissions(own, fs::Permissions::from_mode(0o400)).expect("ours");
            ("m/m2", "permission denied")
        }
    };
    let serve = Serve::start(dir.path(), "");
    let places = format!("--dir m/m0 --dir m/m1 --dir {third}");
    let array = listed(&serve, &places);
    assert_eq!((&array["usable"], &array["problem"]), (&Value::from(2), &Value::Null), "{array}");
    assert_eq!(array["members"][0]["note"], Value::Null, "{array}");
    let note = array["members"][2]["note"].as_str().expect("a note");
    assert!(note.starts_with(why), "{note}");
    assert!(serve.says(&format!("import {places}")).contains("can be imported, with 2 of 3 members"));
    // The same file by a path by which it can be written comes before it.
    if is_root {
        let both = serve.says(&format!("import --dir m {places}"));
        assert!(both.contains("can be imported\n"), "{both}");
    }
    let told = serve.says(&format!("import tank {places} -n"));
    assert!(told.contains("with 2 of 3 members") && told.contains(why), "{told}");
}

/// The usual mistake with members that root created, and a daemon that is not root.
#[test]
fn members_that_the_daemon_may_not_read_are_told_where_members_are_not_found() {
    use std::os::unix::process::CommandExt;
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root creates what others may not read");
        return;
    }
    let nobody = 65534;
    let dir = tempfile::tempdir().expect("a directory");
    std::os::unix::fs::chown(dir.path(), Some(nobody), Some(nobody)).expect("root may");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("ours");
    create(dir.path());
    let member = |index: usize| dir.path().join(format!("m/m{index}"));
    let own = |index: usize, uid: u32| {
        std::os::unix::fs::chown(member(index), Some(uid), Some(uid)).expect("root may");
        fs::set_permissions(member(index), fs::Permissions::from_mode(0o600)).expect("ours");
    };
    (0..3).for_each(|index| own(index, 0));
    let config = dir.path().join("calpe.toml");
    let text = "[daemon]\nruntime_dir = \"run\"\nstate_dir = \"state\"\n[gpu]\nmode = \"off\"\n";
    fs::write(&config, text).expect("written");
    let mut command = calpe();
    command.arg("serve").arg("--config").arg(&config).uid(nobody).gid(nobody);
    let serve = Serve::run(dir.path(), command);
    let all = ["m0", "m1", "m2"].map(|name| format!("m/{name}")).join(", ");
    for told in [
        serve.says("import --dir m"),
        serve.says("import -a --dir m"),
        serve.says("import -a --dir m -n"),
        serve.refuses("import tank --dir m"),
        serve.refuses("import tank --dir m -n"),
    ] {
        assert!(
            told.contains("m: 3 files or devices were not looked at, as uid 65534 may not read them"),
            "{told}"
        );
        assert!(told.contains(&all), "{told}");
    }
    own(0, nobody);
    own(1, nobody);
    let list = serve.says("import --dir m");
    assert!(list.contains("1 file or device was not looked at") && list.contains("perhaps"), "{list}");
    let told = serve.says("import tank --dir m -n");
    assert!(told.contains("with 2 of 3 members") && told.contains("m/m2: permission denied"), "{told}");
    assert!(serve.says("import tank --dir m").contains("m/m2: permission denied"));
    let status = serve.says("status -v tank");
    assert!(
        status.contains("not found at start; perhaps it is ") && status.contains("m2, which uid 65534"),
        "{status}"
    );
    serve.stop();
}
