//! Promise 1, through the real process: the daemon is killed under a verified write load, again and again, with all
//! members there and with some missing before, during and after; nothing that was acknowledged is lost, and no block
//! is a mix. `CALPE_KILL_CYCLES=200 cargo test --test durability` does it that often.

mod support;

use calpe::control::{
    ArrayReport, ArrayState, MAX_REPLY_BYTES, MemberRef, MemberState, Reply, Request, ScrubAction,
    read_message, write_message,
};
use calpe::testing::Random;
use std::fs;
use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::calpe;
use support::load::{Client, Counts, Load};

/// Longest that anything may take; only a hang gets there.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often one does not wait longer than this between two looks.
const LOOK: Duration = Duration::from_millis(5);

/// Name of the array of `calpe up`.
const NAME: &str = "calpe";

struct Setup {
    data: usize,
    parity: usize,
    checksum: &'static str,
    bytes: u64,
    chunk: u64,
}

/// An array of `calpe up` in a directory, with the daemon that serves it.
struct Daemon {
    dir: PathBuf,
    child: Child,
}

impl Daemon {
    /// Starts `calpe up` and waits until it answers.
    fn start(dir: &Path, setup: &Setup) -> Daemon {
        let log =
            fs::File::options().create(true).append(true).open(dir.join("daemon.log")).expect("a log file");
        let mut command = calpe();
        command.arg("up").arg("--dir").arg(dir.join("data"));
        command.args(["--data", &setup.data.to_string(), "--parity", &setup.parity.to_string()]);
        command.args(["--checksum", setup.checksum, "--size", &setup.bytes.to_string()]);
        command.args(["--chunk", &setup.chunk.to_string()]);
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a second handle")).stderr(log);
        let mut daemon = Daemon { dir: dir.to_owned(), child: command.spawn().expect("the daemon starts") };
        daemon.until("it answers", |daemon| {
            if let Some(status) = daemon.child.try_wait().expect("ours") {
                panic!("the daemon ended: {status}\n{}", daemon.log());
            }
            daemon
                .try_ask(&Request::Status { array: Some(NAME.into()) })
                .is_some_and(|reply| matches!(reply, Reply::Status(_)))
                && Client::connect(&daemon.socket()).is_ok()
        });
        daemon
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.join("daemon.log")).unwrap_or_default()
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("data/nbd.sock")
    }

    fn try_ask(&self, request: &Request) -> Option<Reply> {
        let mut stream = UnixStream::connect(self.dir.join("data/control.sock")).ok()?;
        write_message(&mut stream, request).ok()?;
        read_message(&mut BufReader::new(stream), MAX_REPLY_BYTES).ok()?
    }

    #[track_caller]
    fn done(&self, request: &Request) -> String {
        match self.try_ask(request) {
            Some(Reply::Done { message, .. }) => message,
            other => panic!("{request:?}: {other:?}\n{}", self.log()),
        }
    }

    #[track_caller]
    fn report(&self) -> ArrayReport {
        match self.try_ask(&Request::Status { array: Some(NAME.into()) }) {
            Some(Reply::Status(mut status)) => status.arrays.remove(0),
            other => panic!("{other:?}\n{}", self.log()),
        }
    }

    #[track_caller]
    fn until(&mut self, what: &str, mut reached: impl FnMut(&mut Daemon) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !reached(self) {
            assert!(Instant::now() < deadline, "not reached: {what}\n{}", self.log());
            std::thread::sleep(LOOK);
        }
    }

    fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("reaped");
    }

    fn member(&self, index: usize) -> PathBuf {
        member(&self.dir, index)
    }

    fn fail(&self, index: usize) {
        self.done(&Request::Fail {
            array: NAME.into(),
            member: MemberRef::Index(index as u16),
            dry_run: false,
        });
    }

    /// Brings members back and waits until they are in service.
    fn bring_back(&mut self, members: &[usize]) {
        for &index in members {
            self.done(&Request::Online {
                array: NAME.into(),
                member: MemberRef::Index(index as u16),
                path: Some(self.member(index)),
                dry_run: false,
            });
        }
        self.until("all members are in service", |daemon| {
            let report = daemon.report();
            report.state == ArrayState::Online && report.scan.is_empty()
        });
    }

    /// Scrubs; there must be nothing to find.
    fn scrub(&mut self) {
        let before = self.report().last_scrub;
        self.done(&Request::Scrub { array: NAME.into(), action: ScrubAction::Start, dry_run: false });
        // Two scrubs may end within a second.
        self.until("the scrub is over", |daemon| {
            let report = daemon.report();
            report.scan.is_empty() && (report.last_scrub != before || before.is_some())
        });
        let report = self.report();
        assert_eq!(report.last_scrub.expect("a scrub").errors, 0, "{report:?}\n{}", self.log());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // A test that failed leaves no daemon behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn member(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("data/member-{index:02}.img"))
}

/// Takes the files of members away, or puts them back.
fn hide(dir: &Path, members: &[usize]) {
    fs::create_dir_all(dir.join("away")).expect("a directory");
    for &index in members {
        fs::rename(member(dir, index), dir.join(format!("away/{index}"))).expect("moved away");
    }
}

fn unhide(dir: &Path, members: &[usize]) {
    for &index in members {
        fs::rename(dir.join(format!("away/{index}")), member(dir, index)).expect("moved back");
    }
}

/// How many cycles: as many as asked for, or a few.
fn cycles(few: u64) -> u64 {
    match std::env::var("CALPE_KILL_CYCLES") {
        Ok(text) => text.parse().expect("CALPE_KILL_CYCLES is a number"),
        Err(_) => few,
    }
}

/// Kills the daemon under load, and everything must be there afterwards. Every second time members are missing: from
/// before the load, or lost during it, and as many more as there may be when the daemon comes back.
fn kill_under_load(setup: &Setup, few: u64) {
    let dir = tempfile::tempdir().expect("a directory");
    let (dir, width) = (dir.path(), setup.data + setup.parity);
    let cycles = cycles(few);
    let mut random = Random::new(setup.data as u64 * 1000 + cycles);
    let mut load = Load::new(setup.bytes, setup.chunk * setup.data as u64, random.next_u64());
    let counts = Counts::default();
    let (mut degraded, began) = (0, Instant::now());
    let mut daemon = Daemon::start(dir, setup);
    for cycle in 0..cycles {
        let lost = random.choose(setup.parity, width);
        let early = random.below(setup.parity as u64 + 1) as usize;
        let missing = match cycle % 4 {
            1 => &lost[..early.max(1)],
            3 => &lost[..early],
            _ => &[],
        };
        if cycle % 4 == 1 {
            daemon.kill();
            hide(dir, missing);
            daemon = Daemon::start(dir, setup);
            assert_eq!(daemon.report().state, ArrayState::Degraded);
        }
        let mut client = Client::connect(&daemon.socket()).expect("connected");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let running = scope.spawn(|| load.run(&mut client, &stop, &counts));
            std::thread::sleep(Duration::from_millis(20 + random.below(150)));
            if cycle % 4 == 3 {
                missing.iter().for_each(|&index| daemon.fail(index));
                std::thread::sleep(Duration::from_millis(random.below(100)));
            }
            daemon.kill();
            let ended = running.join().expect("the load saw nothing wrong");
            assert!(ended.is_err(), "the connection outlived the daemon");
        });
        if cycle % 4 == 3 {
            hide(dir, missing);
        }
        if cycle % 2 == 1 {
            degraded += 1;
            // Those that are lost after the crash.
            hide(dir, &lost[missing.len()..]);
        }
        daemon = Daemon::start(dir, setup);
        load.settle(&mut Client::connect(&daemon.socket()).expect("connected")).expect("all is read");
        let report = daemon.report();
        let gone = if cycle % 2 == 1 { lost.len() } else { 0 };
        let in_service = report.members.iter().filter(|member| member.state == MemberState::Online).count();
        assert_eq!(in_service, width - gone, "cycle {cycle}: {report:?}\n{}", daemon.log());
        assert_eq!((report.errors.client, report.lost.len()), (0, 0), "cycle {cycle}: {report:?}");
        if gone > 0 {
            unhide(dir, &lost);
            daemon.bring_back(&lost);
        }
        if cycle % 8 == 7 {
            daemon.scrub();
        }
        // Nobody was found wrong: nothing on the members was damaged.
        let report = daemon.report();
        assert!(
            report.members.iter().all(|m| m.cksum + m.read + m.write == 0),
            "{report:?}\n{}",
            daemon.log()
        );
    }
    daemon.scrub();
    load.settle(&mut Client::connect(&daemon.socket()).expect("connected")).expect("all is read");
    println!(
        "{}+{} {}: {cycles} kills, {degraded} of them with members missing, {} writes, {} reads, {} flushes, {:.1} s",
        setup.data,
        setup.parity,
        setup.checksum,
        counts.writes.load(Ordering::Relaxed),
        counts.reads.load(Ordering::Relaxed),
        counts.flushes.load(Ordering::Relaxed),
        began.elapsed().as_secs_f64()
    );
}

#[test]
fn nothing_acknowledged_is_lost_when_the_daemon_is_killed_4_2_blake3() {
    kill_under_load(&Setup { data: 4, parity: 2, checksum: "blake3", bytes: 16 << 20, chunk: 16 << 10 }, 20);
}

#[test]
fn nothing_acknowledged_is_lost_when_the_daemon_is_killed_2_1_crc32c() {
    kill_under_load(&Setup { data: 2, parity: 1, checksum: "crc32c", bytes: 8 << 20, chunk: 64 << 10 }, 8);
}

#[test]
fn nothing_acknowledged_is_lost_when_the_daemon_is_killed_3_2_without_checksums() {
    kill_under_load(&Setup { data: 3, parity: 2, checksum: "none", bytes: 8 << 20, chunk: 4 << 10 }, 8);
}
