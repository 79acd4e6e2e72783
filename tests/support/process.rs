//! `calpe up` as a process that a test can kill and ask over its control socket, and whose members it can
//! read, without running any other program: fast enough for hundreds of starts.

use super::load::Client;
use super::{calpe, run};
use calpe::control::{
    ArrayReport, ArrayState, MAX_REPLY_BYTES, MemberRef, Reply, Request, ScrubAction, read_message,
    write_message,
};
use std::fs;
use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Time limit for everything a test waits for; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time between two checks while waiting.
const LOOK: Duration = Duration::from_millis(5);

/// Name of the array of `calpe up`.
const NAME: &str = "calpe";

/// The shape of an array.
#[derive(Clone, Copy)]
pub(crate) struct Setup {
    pub data: usize,
    pub parity: usize,
    pub checksum: &'static str,
    pub bytes: u64,
    pub chunk: u64,
}

impl Setup {
    pub(crate) fn width(&self) -> usize {
        self.data + self.parity
    }

    pub(crate) fn stripe_bytes(&self) -> u64 {
        self.data as u64 * self.chunk
    }
}

/// An array of `calpe up` in a directory, with the daemon that serves it.
pub(crate) struct Daemon {
    dir: PathBuf,
    child: Child,
}

impl Daemon {
    /// Starts `calpe up` and waits until it answers.
    pub(crate) fn start(dir: &Path, setup: &Setup) -> Daemon {
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

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.join("daemon.log")).unwrap_or_default()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("data/nbd.sock")
    }

    fn try_ask(&self, request: &Request) -> Option<Reply> {
        let mut stream = UnixStream::connect(self.dir.join("data/control.sock")).ok()?;
        write_message(&mut stream, request).ok()?;
        read_message(&mut BufReader::new(stream), MAX_REPLY_BYTES).ok()?
    }

    #[track_caller]
    pub(crate) fn done(&self, request: &Request) -> String {
        match self.try_ask(request) {
            Some(Reply::Done { message, .. }) => message,
            other => panic!("{request:?}: {other:?}\n{}", self.log()),
        }
    }

    #[track_caller]
    pub(crate) fn report(&self) -> ArrayReport {
        match self.try_ask(&Request::Status { array: Some(NAME.into()) }) {
            Some(Reply::Status(mut status)) => status.arrays.remove(0),
            other => panic!("{other:?}\n{}", self.log()),
        }
    }

    #[track_caller]
    pub(crate) fn until(&mut self, what: &str, mut reached: impl FnMut(&mut Daemon) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !reached(self) {
            assert!(Instant::now() < deadline, "not reached: {what}\n{}", self.log());
            std::thread::sleep(LOOK);
        }
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("reaped");
    }

    pub(crate) fn member(&self, index: usize) -> PathBuf {
        member(&self.dir, index)
    }

    pub(crate) fn fail(&self, index: usize) {
        self.done(&Request::Fail {
            array: NAME.into(),
            member: MemberRef::Index(index as u16),
            dry_run: false,
        });
    }

    /// Brings members back and waits until they are in service.
    pub(crate) fn bring_back(&mut self, members: &[usize]) {
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

    /// Scrubs, and returns how many errors there were.
    pub(crate) fn scrub(&mut self) -> u64 {
        // Several scrubs may end within a second, so the time of the last one does not tell them apart.
        let (_, since) = self.events(0);
        self.done(&Request::Scrub { array: NAME.into(), action: ScrubAction::Start, dry_run: false });
        self.until("the scrub is over", |daemon| {
            daemon.events(since).0.iter().any(|text| text.starts_with("scrub finished"))
        });
        self.report().last_scrub.expect("a scrub").errors
    }

    /// The events from number `since` on, and the number of the next one.
    fn events(&self, since: u64) -> (Vec<String>, u64) {
        match self.try_ask(&Request::Events { since }) {
            Some(Reply::Events { events, next }) => {
                (events.into_iter().map(|event| event.text).collect(), next)
            }
            other => panic!("{other:?}\n{}", self.log()),
        }
    }

    /// Stops the daemon cleanly.
    pub(crate) fn stop(mut self) {
        self.done(&Request::Shutdown { dry_run: false });
        self.until("the daemon has ended", |daemon| match daemon.child.try_wait().expect("ours") {
            Some(status) => {
                assert!(status.success(), "{status}\n{}", daemon.log());
                true
            }
            None => false,
        });
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // So that a failed test leaves no daemon behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn member(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("data/member-{index:02}.img"))
}

/// Creates the array that [`Daemon::start`] finds then, cut into lanes.
pub(crate) fn create_lanes(dir: &Path, setup: &Setup, lanes: u16) {
    fs::create_dir_all(dir.join("data")).expect("a directory");
    let mut command = calpe();
    command.args(["create", NAME, "--checksum", setup.checksum, "--lanes", &lanes.to_string()]);
    command.args(["--data", &setup.data.to_string(), "--parity", &setup.parity.to_string()]);
    command.args(["--size", &setup.bytes.to_string(), "--chunk", &setup.chunk.to_string()]);
    run(command.args((0..setup.width()).map(|index| member(dir, index))));
}

/// Moves the files of members away; [`unhide`] puts them back.
pub(crate) fn hide(dir: &Path, members: &[usize]) {
    fs::create_dir_all(dir.join("away")).expect("a directory");
    for &index in members {
        fs::rename(member(dir, index), dir.join(format!("away/{index}"))).expect("moved away");
    }
}

pub(crate) fn unhide(dir: &Path, members: &[usize]) {
    for &index in members {
        fs::rename(dir.join(format!("away/{index}")), member(dir, index)).expect("moved back");
    }
}
