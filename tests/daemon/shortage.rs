//! A daemon that is short of memory for a while.

use crate::support::run;
use crate::support::serve::{Serve, array, create};
use std::fs;
use std::process::Command;

/// Steps of the limit in KiB: less than any alternate stack.
const STEP: usize = 4;

/// A thread's stack in KiB, with room for what is mapped beside it.
const STACK: usize = 2 << 10;

/// A value of /proc/PID/status, without its unit.
fn value_of<'a>(status: &'a str, key: &str) -> &'a str {
    let line = status.lines().find_map(|line| line.strip_prefix(key)).expect(key);
    line.trim_start_matches(':').split_whitespace().next().expect("a value")
}

/// Limits the address space of a process, to so many bytes or not at all.
fn limit(pid: u32, bytes: &str) {
    run(Command::new("prlimit").args(["--pid", &pid.to_string(), &format!("--as={bytes}:unlimited")]));
}

#[test]
fn memory_that_is_short_when_a_thread_begins_does_not_end_the_daemon() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let mut serve = Serve::start(dir.path(), &array("tank", &[&there]));
    serve.array_when("it is served", |array| array["state"] == "ONLINE");
    let pid = serve.id();
    let status = || fs::read_to_string(format!("/proc/{pid}/status")).expect("the daemon runs");
    // What maps memory in each thread that begins would be a handler of SIGSEGV or SIGBUS.
    for key in ["SigCgt", "SigIgn"] {
        let signals = u64::from_str_radix(value_of(&status(), key), 16).expect("a mask");
        assert_eq!(signals & (1 << (libc::SIGSEGV - 1) | 1 << (libc::SIGBUS - 1)), 0, "{key} {signals:x}");
    }
    // From no room at all to a stack and some more, so that each of the things that are mapped
    // finds none.
    for room in (0..64).step_by(STEP).chain((STACK..STACK + 64).step_by(STEP)) {
        let used: usize = value_of(&status(), "VmSize").parse().expect("KiB");
        limit(pid, &((used + room) << 10).to_string());
        let _ = serve.ask("status");
        limit(pid, "unlimited");
        serve.array_when("it answers again", |array| array["state"] == "ONLINE");
    }
    serve.stop();
}
