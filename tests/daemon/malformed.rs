//! The obligations of a server against malformed requests, over the real sockets of real daemons:
//! tests/nbdsh/malformed.py sends them, through libnbd with its own checks off where it can, else through a
//! plain socket. No case may fail, and none may be missing.

use crate::support::{Up, calpe, run, try_run};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Cases that there have to be: a file that lost some would still pass all it has.
const CASES_MIN: usize = 80;

#[test]
fn every_malformed_request_is_answered_as_the_protocol_demands() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), &["--data", "2", "--parity", "1", "--size", "64MiB"]);
    let second = tempfile::tempdir().expect("a directory");
    let read_only = served_read_only(second.path());
    let before = members(second.path());

    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nbdsh/malformed.py");
    // The libnbd of Debian belongs to Debian's Python, whichever other comes first in PATH.
    let output =
        try_run(Command::new("/usr/bin/python3").arg(script).arg(up.socket()).arg(read_only.socket()));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let failed: Vec<&str> = said.lines().filter(|line| !line.starts_with("ok ")).collect();
    let passed = said.lines().filter(|line| line.starts_with("ok ")).count();
    assert!(
        output.status.success(),
        "{}: {failed:#?}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(failed, [format!("{passed} cases, 0 failed")]);
    assert!(passed >= CASES_MIN, "{passed} cases");
    println!("{passed} malformed-request cases passed");

    assert_eq!(up.status()["state"], "ONLINE");
    up.wait_quiet();
    assert_eq!(up.scrub(), (0, 0));
    up.stop();
    assert!(members(second.path()) == before, "clients changed members of a read-only array");
    read_only.stop();
}

/// A daemon that serves a new array read-only.
fn served_read_only(dir: &Path) -> Up {
    let data = dir.join("data");
    fs::create_dir(&data).expect("a directory");
    let members: Vec<_> = (0..3).map(|index| dir.join(format!("member-{index}.img"))).collect();
    run(calpe().args(["create", "tank", "--data", "2", "--parity", "1", "--size", "64MiB"]).args(&members));
    let search: Vec<String> = members.iter().map(|path| format!("'{}'", path.display())).collect();
    let config = dir.join("calpe.toml");
    let text = format!(
        "[daemon]\nruntime_dir = '{data}'\n[[array]]\nname = 'tank'\nsearch = [{search}]\nread_only = true\n",
        data = data.display(),
        search = search.join(", "),
    );
    fs::write(&config, text).expect("a configuration");
    Up::serve(dir, &config)
}

/// Where the log region starts, and the superblocks at the end, in bytes from there.
const HEAD_BYTES: usize = 1 << 20;
const TAIL_BYTES: usize = 32 << 10;

/// What the log, page and data regions of the members hold: all but the superblocks, which count starts.
fn members(dir: &Path) -> Vec<Vec<u8>> {
    (0..3)
        .map(|index| {
            let bytes = fs::read(dir.join(format!("member-{index}.img"))).expect("a member");
            bytes[HEAD_BYTES..bytes.len() - TAIL_BYTES].to_vec()
        })
        .collect()
}
