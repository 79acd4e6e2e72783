//! Clients that ask for much, or for nothing, in great numbers: others wait for milliseconds, memory and
//! threads stay within what is stated in conf/calpe.toml.

use crate::support::{Up, calpe, run};
use crate::tls::World;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Longest that anything may take; only a hang gets there.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the daemon may take beyond `memory`, in bytes: itself, one small array, and the connections of this
/// test.
const BEYOND_MEMORY: u64 = 96 * MIB;

/// One of these tests at a time: each of them keeps all cores busy.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A value of the daemon's /proc/PID/status; of memory in bytes.
fn proc_status(up: &Up, key: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", up.pid())).expect("the daemon's status");
    let line = status.lines().find(|line| line.starts_with(key)).expect("the key");
    let number: u64 = line.split_whitespace().nth(1).expect("a number").parse().expect("a number");
    if line.ends_with("kB") { number << 10 } else { number }
}

/// Sets its flag when dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A connection to a port of this host from another of its addresses.
fn connect_from(from: [u8; 4], port: u16) -> Option<TcpStream> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket};
    let [a, b, c, d] = from;
    let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).ok()?;
    bind(socket.as_raw_fd(), &SockaddrIn::new(a, b, c, d, 0)).ok()?;
    connect(socket.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, port)).ok()?;
    Some(TcpStream::from(socket))
}

fn header(command: u16, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend([0, 0]);
    bytes.extend(command.to_be_bytes());
    bytes.extend(1u64.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes
}

/// A client of the only export, with simple replies.
fn attach(up: &Up) -> UnixStream {
    let mut stream = UnixStream::connect(up.socket()).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
    stream.read_exact(&mut [0; 18]).expect("a greeting");
    let mut hello = 3u32.to_be_bytes().to_vec();
    // EXPORT_NAME of the default export.
    hello.extend(b"IHAVEOPT\0\0\0\x01\0\0\0\0");
    stream.write_all(&hello).expect("sent");
    stream.read_exact(&mut [0; 10]).expect("the export");
    stream
}

fn read(stream: &mut UnixStream, offset: u64, length: u32) -> Vec<u8> {
    stream.write_all(&header(0, offset, length)).expect("sent");
    let mut reply = [0; 16];
    stream.read_exact(&mut reply).expect("a reply");
    assert_eq!(reply[4..8], [0; 4], "an error");
    let mut data = vec![0; length as usize];
    stream.read_exact(&mut data).expect("the data");
    data
}

/// A daemon with so much memory and one array of 64 MiB, all of it written.
fn serve(dir: &Path, memory: &str) -> Up {
    let mut create = calpe();
    create.args(["create", "tank", "--data", "2", "--parity", "1", "--size", "64MiB"]);
    create.args((0..3).map(|member| dir.join(format!("m{member}"))));
    run(&mut create);
    let config = dir.join("calpe.toml");
    let text = format!(
        "[daemon]\nruntime_dir = {0:?}\nmemory = \"{memory}\"\n[listen]\nunix = {1:?}\n[[array]]\nname = \"tank\"\nsearch = [{dir:?}]\npage_cache = \"4MiB\"\n",
        dir.join("data"),
        dir.join("data/nbd.sock"),
    );
    fs::write(&config, text).expect("a configuration");
    let up = Up::serve(dir, &config);
    let image = dir.join("image");
    fs::write(&image, vec![7; 64 << 20]).expect("an image");
    run(Command::new("nbdcopy").arg(&image).arg(up.uri()));
    up
}

#[test]
fn readers_that_never_read_and_writers_that_never_write_take_their_own_share_of_the_memory() {
    let _turn = turn();
    let dir = tempfile::tempdir().expect("a directory");
    let up = serve(dir.path(), "64MiB");
    let mut greedy: Vec<UnixStream> = (0..90).map(|_| attach(&up)).collect();
    for (at, stream) in greedy.iter_mut().enumerate() {
        if at % 2 == 0 {
            (0..64).for_each(|_| stream.write_all(&header(0, 0, 32 << 20)).expect("sent"));
        } else {
            stream.write_all(&header(1, 0, 32 << 20)).expect("sent");
            // It takes what it has memory for, and the socket some more.
            stream.set_write_timeout(Some(Duration::from_millis(20))).expect("a timeout");
            let _ = stream.write_all(&vec![9; 31 << 20]);
        }
    }
    let mut honest = attach(&up);
    for length in [4096, 1 << 20, 16 << 20, 32 << 20] {
        let started = Instant::now();
        let data = read(&mut honest, 32 * MIB, length);
        assert!(data.iter().all(|&byte| byte == 7), "what nobody has written since");
        assert!(started.elapsed() < Duration::from_secs(5), "{length} bytes took {:?}", started.elapsed());
    }
    let peak = proc_status(&up, "VmHWM");
    assert!(peak <= 64 * MIB + BEYOND_MEMORY, "{} MiB were resident", peak >> 20);
    drop(greedy);
    up.stop();
}

/// Runs floods of these names from a hundred connections against these victims.
fn flood(floods: &str, victims: &str) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/attack/floods.py");
    let binary = env!("CARGO_BIN_EXE_calpe");
    let mut command = Command::new("/usr/bin/python3");
    command.arg(script).args(["--calpe", binary, "--connections", "100", "--seconds", "0.5"]);
    command.args(["--only", floods, "--victims", victims]);
    // The bounds are far above what is measured (BENCHMARKS.md), for machines that do much else,
    // and far below what was.
    run(command.args(["--settle", "0.3", "--bound", "2000", "--limit", "60"]));
}

#[test]
fn a_flood_of_requests_keeps_nobody_else_waiting() {
    let _turn = turn();
    flood("status, whole;health;trim, 4;zeroes;unknown;options;connects", "read,status");
}

/// Rebuilds and the replay of a log wait for members step after step: behind thousands of reads of
/// another array they did not end before these did.
#[test]
fn a_flood_of_reads_that_need_members_keeps_nothing_of_another_array_waiting() {
    let _turn = turn();
    flood("data, 4", "all");
}

/// 16 million stripes: read and built at one go, their map would hold up everybody for seconds.
#[test]
fn a_large_map_that_is_loaded_keeps_nobody_waiting() {
    let _turn = turn();
    let dir = tempfile::tempdir().expect("a directory");
    let up = serve(dir.path(), "1GiB");
    let there = dir.path().join("large");
    fs::create_dir(&there).expect("a directory");
    let mut create = calpe();
    create.args(["create", "large", "--data", "2", "--parity", "1", "--chunk", "4KiB", "--size", "128GiB"]);
    run(create.args((0..3).map(|member| there.join(format!("m{member}")))));
    let mut victim = attach(&up);
    let ends = AtomicBool::new(false);
    let (mut reads, mut longest) = (0, Duration::ZERO);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _end = Ends(&ends);
            up.calpe(&["import", "large", "--dir", there.to_str().expect("a name")]);
            let is_served = || {
                let status = up.calpe(&["status", "large", "--json"]);
                let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
                status["arrays"][0]["log"]["state"] == "serving"
            };
            let started = Instant::now();
            while !is_served() {
                assert!(started.elapsed() < PATIENCE, "it is not served");
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        while !ends.load(Ordering::Relaxed) {
            let started = Instant::now();
            read(&mut victim, reads % 1000 * 4096, 4096);
            longest = longest.max(started.elapsed());
            reads += 1;
        }
    });
    assert!(reads > 100, "{reads} reads");
    assert!(longest < Duration::from_secs(1), "a read took {longest:?}");
    up.stop();
}

#[test]
fn handshakes_that_fail_cost_no_more_threads_than_there_are_places() {
    let _turn = turn();
    let world = World::new();
    let friend = world.friend();
    let up = world.serve("tls = \"required\"\n");
    let before = proc_status(&up, "VmHWM");
    let ends = AtomicBool::new(false);
    let nonsense = || {
        let mut tried = 0;
        while !ends.load(Ordering::Relaxed) {
            let Some(mut stream) = connect_from([127, 0, 0, 2], world.port) else { continue };
            let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
            let mut hello = vec![0, 0, 0, 3];
            hello.extend(b"IHAVEOPT\0\0\0\x05\0\0\0\0");
            let asked = stream.read_exact(&mut [0; 18]).and_then(|()| stream.write_all(&hello));
            if asked.and_then(|()| stream.read_exact(&mut [0; 20])).is_ok() {
                let _ = stream.write_all(&[0x77; 600]);
                tried += 1;
            }
        }
        tried
    };
    let (threads, tried) = std::thread::scope(|scope| {
        // Also when something here fails.
        let end = Ends(&ends);
        let attackers: Vec<_> = (0..16).map(|_| scope.spawn(nonsense)).collect();
        let mut threads = 0;
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(2) {
            threads = threads.max(proc_status(&up, "Threads"));
            std::thread::sleep(Duration::from_millis(10));
        }
        world.welcome(&friend);
        drop(end);
        let tried: u32 = attackers.into_iter().map(|attacker| attacker.join().expect("ended")).sum();
        (threads, tried)
    });
    assert!(tried > 200, "only {tried} handshakes were tried");
    assert!(threads < 200, "{threads} threads");
    // Of those who are turned away the log tells the first ones, and a number later.
    let lines = up.log().lines().filter(|line| line.contains("a connection was refused")).count();
    assert!((1..=20).contains(&lines), "{lines} lines for {tried} refusals");
    let grown = proc_status(&up, "VmHWM") - before;
    assert!(grown < 160 * MIB, "{} MiB more", grown >> 20);
    up.stop();
}
