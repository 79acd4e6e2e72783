//! A daemon whose GPU, a device in memory in a process of its own, is killed, drilled and left without its
//! program while clients write and read: they wait a moment, every byte is right, and the GPU is back.
#![cfg(debug_assertions)] // only a build with assertions has such devices

use crate::support::load::Client;
use crate::support::{Up, calpe, is_over};
use calpe_core::nbd::{Command as Nbd, Request};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(120);

/// Bytes of a request: several stripes.
const REQUEST: usize = 1 << 20;

/// Requests under way.
const DEPTH: u64 = 4;

fn command(dir: &Path, program: &Path, mode: &str) -> Command {
    let mut command = Command::new(program);
    command.env_remove("CALPE_SOCKET").env("CALPE_DRILL_GPU", dir.join("drill"));
    command.arg("up").arg("--dir").arg(dir.join("data")).args(["--gpu", mode, "--size", "64MiB"]);
    command.args(["--data", "4", "--parity", "2", "--checksum", "blake3"]);
    command
}

/// A daemon with a device that is believed to be faster than anything.
fn start(dir: &Path, program: &Path) -> Up {
    fs::create_dir(dir.join("drill")).expect("a folder");
    fs::write(dir.join("drill/devices"), "1").expect("written");
    Up::spawn(dir, command(dir, program, "require")).stop();
    let kept = dir.join("data/gpu-calibration.json");
    let mut figures: Value = serde_json::from_slice(&fs::read(&kept).expect("measured")).expect("JSON");
    for class in figures["entries"][0]["costs"]["classes"].as_array_mut().expect("classes") {
        class["batches"] = serde_json::json!([{ "bytes": 4096, "seconds": 1e-9 }]);
        class["cpu_seconds_per_byte"] = 1.0.into();
    }
    fs::write(&kept, figures.to_string()).expect("written");
    Up::spawn(dir, command(dir, program, "require"))
}

fn program() -> PathBuf {
    PathBuf::from(calpe().get_program())
}

fn device(up: &Up) -> Value {
    up.status()["engine"]["gpu"]["devices"][0].clone()
}

fn process(up: &Up) -> Option<u32> {
    device(up)["process"].as_u64().and_then(|pid| u32::try_from(pid).ok())
}

fn number(up: &Up, name: &str) -> u64 {
    device(up)[name].as_u64().expect("a number")
}

#[track_caller]
fn until(what: &str, up: &Up, holds: impl Fn() -> bool) -> Duration {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "{what}: {}\n{}", up.status(), up.log());
        thread::sleep(Duration::from_millis(5));
    }
    started.elapsed()
}

/// A client that writes and reads its volume, over and over, until it is stopped.
struct Load {
    stop: Arc<AtomicBool>,
    longest_us: Arc<AtomicU64>,
    passes: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Load {
    fn start(up: &Up) -> Load {
        let stop: Arc<AtomicBool> = Arc::default();
        let (longest_us, passes): (Arc<AtomicU64>, Arc<AtomicU64>) = (Arc::default(), Arc::default());
        let mut client = Client::connect_within(&up.socket(), Some(PATIENCE)).expect("connected");
        let thread = {
            let (stop, longest, passes) = (Arc::clone(&stop), Arc::clone(&longest_us), Arc::clone(&passes));
            thread::spawn(move || {
                let mut pass = 0;
                while !stop.load(Ordering::SeqCst) {
                    pass += 1;
                    for write in [true, false] {
                        run(&mut client, pass, write, &longest);
                    }
                    passes.store(pass, Ordering::SeqCst);
                }
            })
        };
        Load { stop, longest_us, passes, thread }
    }

    /// The longest that a request took.
    fn stop(self) -> Duration {
        let seen = self.passes.load(Ordering::SeqCst);
        while self.passes.load(Ordering::SeqCst) < seen + 1 && !self.thread.is_finished() {
            thread::sleep(Duration::from_millis(5));
        }
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().expect("every byte was right");
        Duration::from_micros(self.longest_us.load(Ordering::SeqCst))
    }
}

fn content(pass: u64, at: u64) -> Vec<u8> {
    let word = |nth: u64| (pass << 48 ^ at << 24 ^ nth).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    (0..REQUEST as u64 / 8).flat_map(word).collect()
}

fn run(client: &mut Client, pass: u64, write: bool, longest: &AtomicU64) {
    let count = client.size() / REQUEST as u64;
    let (mut next, mut done, mut begun) = (0, 0, std::collections::HashMap::new());
    while done < count {
        while next < count && begun.len() < DEPTH as usize {
            let command = if write { Nbd::Write } else { Nbd::Read };
            let request = Request::new(command, next * REQUEST as u64, REQUEST as u64);
            let payload = if write { content(pass, next) } else { Vec::new() };
            let cookie = client.submit(&request, &payload).expect("sent");
            begun.insert(cookie, (next, Instant::now()));
            next += 1;
        }
        let (cookie, result) = client.next().expect("an answer");
        let (at, since) = begun.remove(&cookie).expect("asked");
        longest.fetch_max(since.elapsed().as_micros() as u64, Ordering::SeqCst);
        let bytes = result.unwrap_or_else(|failure| panic!("a request failed: {failure}"));
        assert!(write || bytes == content(pass, at), "wrong bytes at {at} in pass {pass}");
        done += 1;
    }
}

fn kill(pid: u32) {
    assert!(Command::new("kill").arg("-KILL").arg(pid.to_string()).status().expect("kill runs").success());
}

#[test]
fn clients_notice_a_delay_when_the_process_of_a_gpu_is_killed_or_drilled_and_the_gpu_is_back() {
    let dir = tempfile::tempdir().expect("a folder");
    let up = start(dir.path(), &program());
    let load = Load::start(&up);
    until("the GPU works", &up, || number(&up, "jobs") > 0);
    for nth in 0..4 {
        let (reopened, before) = (number(&up, "reopened"), process(&up).expect("a process"));
        if nth % 2 == 0 {
            kill(before);
        } else {
            up.calpe(&["gpu", "drill", "error"]);
        }
        let took = until("it is opened again", &up, || number(&up, "reopened") > reopened);
        assert!(took < Duration::from_secs(10), "{took:?}");
        assert_ne!(process(&up), Some(before));
        let jobs = number(&up, "jobs");
        until("it works again", &up, || number(&up, "jobs") > jobs);
    }
    let longest = load.stop();
    assert!(longest < Duration::from_secs(20), "{longest:?}");
    assert_eq!(up.scrub(), (0, 0));
    let events = up.calpe(&["events"]);
    assert!(events.contains("was ended by signal 9") || events.contains("has ended"), "{events}");
    assert!(events.contains("opened again and tested"), "{events}");
    up.stop();
}

#[test]
fn a_gpu_comes_back_although_the_file_of_the_daemon_was_removed_and_ends_with_the_daemon() {
    let dir = tempfile::tempdir().expect("a folder");
    let own = dir.path().join("calpe");
    fs::copy(program(), &own).expect("copied");
    let up = start(dir.path(), &own);
    fs::remove_file(&own).expect("removed");
    let before = process(&up).expect("a process");
    kill(before);
    until("it is opened again", &up, || number(&up, "reopened") == 1);
    let load = Load::start(&up);
    until("the GPU works", &up, || number(&up, "jobs") > 0);
    load.stop();
    let last = process(&up).expect("a process");
    assert!(!is_over(last) && is_over(before));
    let started = Instant::now();
    up.kill();
    while !is_over(last) {
        assert!(started.elapsed() < PATIENCE, "process {last} has survived its daemon");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_a_helper_prints_is_in_the_log_of_the_daemon_and_a_flood_of_it_is_cut() {
    let dir = tempfile::tempdir().expect("a folder");
    let up = start(dir.path(), &program());
    fs::write(dir.path().join("drill/order"), "flood").expect("written");
    let load = Load::start(&up);
    until("it is opened again", &up, || number(&up, "hangs") == 1 && number(&up, "reopened") == 1);
    load.stop();
    let log = up.log();
    let lines = log.lines().filter(|line| line.contains("GPU helper ") && line.contains("flood")).count();
    assert!((10..=200).contains(&lines), "{lines} lines");
    up.stop();
}

#[test]
fn a_driver_that_crashes_when_it_is_loaded_costs_the_daemon_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    fs::create_dir(dir.path().join("drill")).expect("a folder");
    fs::write(dir.path().join("drill/start"), "die").expect("written");
    let up = Up::spawn(dir.path(), command(dir.path(), &program(), "auto"));
    let reason = up.status()["engine"]["gpu"]["reason"].as_str().expect("a reason").to_owned();
    assert!(reason.contains("was ended by signal 6"), "{reason}");
    Load::start(&up).stop();
    up.stop();
}
