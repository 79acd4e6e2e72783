//! Creations that fail on the way, or are killed: what existed is as it was, in content, length and space,
//! and what did not exist does not.

use super::support::serve::Serve;
use super::support::{calpe, try_run};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Longest that anything may take; only a hang gets there.
const PATIENCE: Duration = Duration::from_secs(60);

/// A file as a person would compare it.
#[derive(Debug, PartialEq)]
struct Look {
    bytes: u64,
    blocks: u64,
    content: Vec<u8>,
}

impl Look {
    /// Whether it is the same file for whoever uses it. ext4 keeps the block of 4 KiB that it took for the
    /// map of a file when there were more pieces.
    fn is_as(&self, before: &Look) -> bool {
        const MAP_BLOCKS: u64 = 8;
        self.bytes == before.bytes
            && self.content == before.content
            && (before.blocks..=before.blocks + MAP_BLOCKS).contains(&self.blocks)
    }
}

fn look(path: &Path) -> Look {
    let meta = fs::metadata(path).unwrap();
    Look { bytes: meta.len(), blocks: meta.blocks(), content: fs::read(path).unwrap() }
}

/// Sparse, with some content that nothing recognises: at its start, inside, and at its end.
fn sparse_file(path: &Path, bytes: u64) {
    let file = File::create(path).unwrap();
    file.set_len(bytes).unwrap();
    for at in [8192, bytes / 2, bytes - 8192] {
        file.write_all_at(&[0xa5; 4096], at).unwrap();
    }
    file.sync_all().unwrap();
}

/// Runs `calpe create tank --data 2 --parity 1 --size 8MiB m0 m1 m2` in a shell that sets a limit before.
fn create(dir: &Path, limit: &str, extra: &str) -> Output {
    let create = format!("create tank --data 2 --parity 1 --size 8MiB m0 m1 m2 {extra}");
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("{limit}; exec \"$CALPE\" {create}")).env("CALPE", calpe().get_program());
    shell.current_dir(dir).stdin(Stdio::null()).output().unwrap()
}

#[track_caller]
fn said(output: &Output, code: i32) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{said}{}", String::from_utf8_lossy(&output.stdout));
    said
}

fn members(dir: &Path) -> [PathBuf; 3] {
    ["m0", "m1", "m2"].map(|name| dir.join(name))
}

/// `ulimit -f` in POSIX blocks of 512 bytes.
fn limit(bytes: u64) -> String {
    format!("ulimit -f {}", bytes / 512)
}

#[test]
fn a_file_that_cannot_be_created_costs_those_that_exist_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let [m0, m1, m2] = members(dir.path());
    sparse_file(&m0, 64 * MIB);
    let before = look(&m0);
    // What it cannot do it does not promise.
    let would = said(&create(dir.path(), &limit(4 * MIB), "-n"), 1);
    assert!(would.contains("m1: ") && would.contains("the limit of this user ('ulimit -f')"), "{would}");
    let told = said(&create(dir.path(), &limit(4 * MIB), ""), 1);
    assert!(told.contains("creation of 'tank' failed and was taken back: m1: "), "{told}");
    assert!(look(&m0) == before, "{} blocks, {} before", look(&m0).blocks, before.blocks);
    assert!(!m1.exists() && !m2.exists());
}

#[test]
fn a_device_that_takes_only_a_part_of_what_is_written_gets_back_what_it_had() {
    let dir = tempfile::tempdir().unwrap();
    let files = members(dir.path());
    for file in &files {
        sparse_file(file, 64 * MIB);
    }
    let before: Vec<_> = files.iter().map(|file| look(file)).collect();
    // Its start can be written, its end cannot.
    let told = said(&create(dir.path(), &limit(60 * MIB), ""), 1);
    assert!(told.contains("was taken back: m0: cannot "), "{told}");
    for (file, before) in files.iter().zip(&before) {
        let now = look(file);
        assert!(now.is_as(before), "{}: {} blocks, {} before", file.display(), now.blocks, before.blocks);
    }
    // Without the limit it is created after all.
    said(&create(dir.path(), "true", ""), 0);
}

#[test]
fn a_member_that_cannot_be_opened_is_told_before_anything_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let [m0, m1, m2] = members(dir.path());
    sparse_file(&m0, 64 * MIB);
    fs::create_dir(&m2).unwrap();
    let before = look(&m0);
    assert!(said(&create(dir.path(), "true", "--force"), 1).contains("m2: is a directory"));
    assert!(look(&m0) == before && !m1.exists());
}

#[test]
fn sizes_that_round_to_one_text_are_told_in_bytes() {
    let dir = tempfile::tempdir().unwrap();
    said(&create(dir.path(), "true", ""), 0);
    let files = members(dir.path());
    let bytes = fs::metadata(&files[1]).unwrap().len();
    for file in &files {
        fs::remove_file(file).unwrap();
        File::create(file).unwrap().set_len(bytes).unwrap();
    }
    File::options().write(true).open(&files[1]).unwrap().set_len(bytes - 4096).unwrap();
    let told = said(&create(dir.path(), "true", ""), 1);
    assert!(told.contains(&format!("({} bytes), but", bytes - 4096)), "{told}");
    assert!(told.contains(&format!("({bytes} bytes) are needed")), "{told}");
}

#[test]
fn after_a_creation_that_was_killed_the_next_one_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let drill = dir.path().join("drill");
    fs::write(&drill, "hang create").unwrap();
    let arguments = "create tank --data 2 --parity 1 --size 8MiB m0 m1 m2";
    let mut child = calpe()
        .args(arguments.split(' '))
        .current_dir(dir.path())
        .env("CALPE_DRILL", &drill)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    // It hangs when the first superblock is written.
    let has_superblock = || {
        let inspected = calpe().arg("inspect").arg(dir.path().join("m0")).output().unwrap();
        inspected.status.success()
    };
    while !has_superblock() {
        assert!(begun.elapsed() < PATIENCE && child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let told = said(&create(dir.path(), "true", ""), 1);
    assert!(told.contains("m0: holds Calpe member 0 of 'tank'") && told.contains("--force"), "{told}");
    said(&create(dir.path(), "true", "--force"), 0);
    let mut check = calpe();
    check.arg("check").args(members(dir.path()));
    assert!(check.output().unwrap().status.success());
    // What one leaves that was killed before it could give a file its size.
    fs::remove_file(dir.path().join("m1")).unwrap();
    File::create(dir.path().join("m1")).unwrap();
    assert!(
        said(&create(dir.path(), "true", "--force"), 1)
            .contains("m1: has 0 B, as a file that an interrupted creation leaves")
    );
}

#[test]
fn a_path_that_can_only_be_a_directory_is_refused_by_a_dry_run_too() {
    let dir = tempfile::tempdir().unwrap();
    for path in ["nox/", "nox/."] {
        for dry in [&[][..], &["-n"]] {
            let mut create = calpe();
            create.current_dir(dir.path()).args(["create", "tank", "-k1", "-m0", "--size", "8MiB"]);
            let told = said(&try_run(create.args(dry).arg(path)), 1);
            assert!(told.contains("nox/") && told.contains("does not exist"), "{told}");
            assert!(told.contains("names a directory") && !told.contains("failed"), "{told}");
        }
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_link_that_leads_to_nothing_is_refused_by_dry_runs_too() {
    let dir = tempfile::tempdir().unwrap();
    let create = |name: &str, members: &[&str], dry: &[&str]| {
        let mut create = calpe();
        create.current_dir(dir.path()).args(["create", name, "-k1", "-m1", "--size", "8MiB"]);
        try_run(create.args(dry).args(members))
    };
    said(&create("tank", &["m0", "m1"], &[]), 0);
    std::os::unix::fs::symlink(dir.path().join("nowhere"), dir.path().join("link")).unwrap();
    let serve = Serve::start(dir.path(), "");
    serve.says("import tank --dir .");
    for dry in [&["-n"][..], &[]] {
        let replaced = serve.refuses(&format!("replace tank 0 link {}", dry.concat()));
        for told in [replaced, said(&create("other", &["link", "m2"], dry), 1)] {
            assert!(told.contains("link: a symbolic link that leads to nothing"), "{told}");
        }
    }
    assert!(!dir.path().join("nowhere").exists());
}
