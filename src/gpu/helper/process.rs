//! Starts a helper and attends it: its messages, its answers, its lines, its end. One thread for each
//! helper, which lives until the process is reaped.
//!
//! Invariants: no other thread ever waits for the process; a helper is killed when its socket ends, when it
//! breaks the rules, and when its owner gives it up. Must not know what batches are.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};

use super::exchange::Exchange;
use super::lines::Lines;
use super::link::Link;
use super::messages::{self, Order, Received, Reply};
use super::ring::Taker;
use calpe_host::polling;

/// How long a helper may take to list or open devices: a driver that nothing else uses first wakes them all.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long a helper whose socket has ended may take until its status is known, for the text of the event.
const STATUS_WITHIN: Duration = Duration::from_millis(20);

/// How long a helper that is told to end may take before it is killed.
const CLOSE_MAX: Duration = Duration::from_secs(2);

/// Time between two looks at a process that is to end.
const LOOK: Duration = Duration::from_millis(1);

/// What a service manager says to the daemon is not for its helpers.
const NOT_FOR_HELPERS: [&str; 6] =
    ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"];

/// How helpers are started.
#[derive(Clone, Debug)]
pub struct HelperCommand {
    program: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    patience: Duration,
}

impl HelperCommand {
    /// This process's own executable, which this name reaches even when its file was replaced.
    #[must_use]
    pub fn own_executable() -> HelperCommand {
        HelperCommand::new("/proc/self/exe")
    }

    /// Any program that calls [`serve`](super::serve).
    pub fn new(program: impl Into<PathBuf>) -> HelperCommand {
        HelperCommand {
            program: program.into(),
            arguments: Vec::new(),
            environment: Vec::new(),
            patience: PATIENCE,
        }
    }

    /// With one more argument.
    #[must_use]
    pub fn argument(mut self, argument: impl Into<OsString>) -> HelperCommand {
        self.arguments.push(argument.into());
        self
    }

    /// With a variable in its environment.
    #[must_use]
    pub fn variable(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> HelperCommand {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// With another limit on how long a helper takes to list or open devices.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> HelperCommand {
        self.patience = patience;
        self
    }

    /// How long a helper may take to list or open devices.
    pub(super) fn within(&self) -> Duration {
        self.patience
    }

    fn spawn(&self, socket: OwnedFd) -> io::Result<Child> {
        let mut command = Command::new(&self.program);
        for name in NOT_FOR_HELPERS {
            command.env_remove(name);
        }
        // Without any code between fork and exec, so that std starts it without copying this process's page
        // tables.
        command
            .args(&self.arguments)
            .arg(std::process::id().to_string())
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::from(socket))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
    }
}

/// What a helper serves batches through.
pub(super) struct Wires {
    pub(super) exchange: Arc<Exchange>,
    /// Rings when there are answers.
    pub(super) answers: Arc<OwnedFd>,
}

/// A helper that runs. Dropped, it is told to end.
pub(super) struct Helper {
    socket: OwnedFd,
    link: Arc<Link>,
    replies: Receiver<Reply>,
    wish: Arc<Wish>,
    pid: u32,
}

/// What the owner of a helper wants of it.
#[derive(Default)]
struct Wish {
    /// It is to end.
    closed: AtomicBool,
    /// It is to be killed.
    given_up: AtomicBool,
}

/// How many helpers have not been reaped.
pub(super) type Alive = Arc<AtomicUsize>;

/// What the thread of a helper has.
struct Attendant {
    socket: OwnedFd,
    stderr: Option<ChildStderr>,
    child: Child,
    wires: Option<Wires>,
    link: Arc<Link>,
    wish: Arc<Wish>,
    replies: Sender<Reply>,
    lines: Lines,
}

impl Helper {
    /// Starts a process, and the thread that attends it.
    pub(super) fn start(
        command: &HelperCommand,
        link: Arc<Link>,
        wires: Option<Wires>,
        alive: &Alive,
    ) -> io::Result<Helper> {
        let (ours, theirs) = messages::pair()?;
        let attended = ours.try_clone()?;
        let (replies, received) = channel();
        let (started, outcome) = channel();
        let wish = Arc::new(Wish::default());
        let shared = (Arc::clone(&link), Arc::clone(&wish), Arc::clone(alive), command.clone());
        // The process is told of the end of the thread that started it, so this one starts it.
        thread::Builder::new().name("gpu-helper".to_owned()).spawn(move || {
            let (link, wish, alive, command) = shared;
            let mut child = match command.spawn(theirs) {
                Ok(child) => child,
                Err(error) => return drop(started.send(Err(error))),
            };
            alive.fetch_add(1, Ordering::SeqCst);
            let stderr = child.stderr.take();
            let pid = child.id();
            let socket = attended;
            let lines = Lines::default();
            let attendant = Attendant { socket, stderr, child, wires, link, wish, replies, lines };
            // If nobody waits for it any more, the end of the socket ends it.
            let _ = started.send(Ok(pid));
            attendant.run();
            alive.fetch_sub(1, Ordering::SeqCst);
        })?;
        let pid = outcome.recv().map_err(io::Error::other)??;
        Ok(Helper { socket: ours, link, replies: received, wish, pid })
    }

    /// The process.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends an order and waits for the reply.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn ask(
        &self,
        order: &Order,
        descriptors: &[BorrowedFd<'_>],
        within: Duration,
    ) -> Result<Reply, String> {
        messages::send(self.socket.as_fd(), order, descriptors)
            .map_err(|error| self.link.ended().unwrap_or_else(|| format!("its helper: {error}")))?;
        match self.replies.recv_timeout(within) {
            Ok(Reply::Failed(reason)) => Err(reason),
            Ok(reply) => Ok(reply),
            Err(RecvTimeoutError::Timeout) => {
                self.give_up();
                Err(format!("its helper has not answered in {within:?}"))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(self.link.ended().unwrap_or_else(|| "its helper has ended".to_owned()))
            }
        }
    }

    /// Has the process killed; does not wait for that.
    pub(super) fn give_up(&self) {
        self.wish.given_up.store(true, Ordering::SeqCst);
        // Rouses the attendant, who has the same socket.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.wish.closed.store(true, Ordering::SeqCst);
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

/// Why a helper is no longer attended.
enum End {
    /// Its end of the socket is closed, or ours was shut.
    Closed,
    /// It says that it failed, or broke the rules.
    Reason(String),
}

impl Attendant {
    fn run(mut self) {
        let end = self.serve();
        let given_up = self.wish.given_up.load(Ordering::SeqCst);
        let mut status = None;
        if let End::Closed = end
            && !given_up
        {
            // If it was told to end, this is the time it has for it; if it ended by itself, it is over soon.
            let was_told = self.wish.closed.load(Ordering::SeqCst);
            status = self.status_within(if was_told { CLOSE_MAX } else { STATUS_WITHIN });
        }
        let reason = match end {
            End::Reason(reason) => reason,
            End::Closed if given_up => "it was given up".to_owned(),
            End::Closed => format!("its helper, process {}, {}", self.child.id(), told(status)),
        };
        // Who waits does not wait for the process to be gone: it writes to nothing that is theirs.
        self.link.end(reason);
        // One that is gone already cannot be killed.
        let _ = self.child.kill();
        self.read_lines();
        self.lines.end(self.child.id());
        // A process that hangs in its driver may never be gone; this thread has nothing else to do.
        if let Err(error) = self.child.wait() {
            tracing::warn!(%error, "a GPU helper cannot be waited for");
        }
    }

    /// Until something ends it.
    fn serve(&mut self) -> End {
        let mut taker = Taker::default();
        loop {
            let (message, bell, line) = match self.wait() {
                Ok(ready) => ready,
                Err(error) if polling::survives(error.raw_os_error(), "the attendant of a GPU helper") => {
                    continue;
                }
                Err(error) => return End::Reason(format!("its helper cannot be attended: {error}")),
            };
            if line {
                self.read_lines();
            }
            if bell && let Some(wires) = &self.wires {
                // Only cleared: which answers there are the ring says.
                let _ = rustix::io::read(&*wires.answers, &mut [0; 8]);
                if self.link.take_answers(&wires.exchange, &mut taker).is_err() {
                    return End::Reason("its helper answered what it was not asked".to_owned());
                }
            }
            if message {
                match messages::receive(&self.socket) {
                    Ok(Received::Nothing) => {}
                    Ok(Received::Message(Reply::Failed(reason), _)) => {
                        let _ = self.replies.send(Reply::Failed(reason.clone()));
                        return End::Reason(reason);
                    }
                    // If nobody waits for it, it was asked too long ago.
                    Ok(Received::Message(reply, _)) => drop(self.replies.send(reply)),
                    Ok(Received::End) => return End::Closed,
                    Err(error) => return End::Reason(format!("its helper sent what is no message: {error}")),
                }
            }
        }
    }

    /// Waits for a message, a bell or a line.
    fn wait(&self) -> Result<(bool, bool, bool), rustix::io::Errno> {
        let mut waits = vec![PollFd::new(&self.socket, PollFlags::IN)];
        let bell = self.wires.as_ref().map(|wires| {
            waits.push(PollFd::new(&*wires.answers, PollFlags::IN));
            waits.len() - 1
        });
        let line = self.stderr.as_ref().map(|stderr| {
            waits.push(PollFd::new(stderr, PollFlags::IN));
            waits.len() - 1
        });
        poll(&mut waits, None)?;
        let is_ready = |at: Option<usize>| at.is_some_and(|at| !waits[at].revents().is_empty());
        Ok((is_ready(Some(0)), is_ready(bell), is_ready(line)))
    }

    /// Logs what can be read without waiting, up to a limit.
    fn read_lines(&mut self) {
        let mut bytes = [0; 4096];
        for _ in 0..16 {
            let Some(stderr) = &mut self.stderr else { return };
            let mut waits = [PollFd::new(&*stderr, PollFlags::IN)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            if !poll(&mut waits, Some(&now)).is_ok_and(|ready| ready > 0) {
                return;
            }
            match stderr.read(&mut bytes) {
                Ok(0) | Err(_) => self.stderr = None,
                Ok(count) => self.lines.push(&bytes[..count], self.child.id()),
            }
        }
    }

    fn status_within(&mut self, within: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + within;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            if Instant::now() >= until || self.wish.given_up.load(Ordering::SeqCst) {
                return None;
            }
            thread::sleep(LOOK);
        }
    }
}

/// How a process ended.
fn told(status: Option<ExitStatus>) -> String {
    match status.map(|status| (status.signal(), status.code())) {
        Some((Some(signal), _)) => format!("was ended by signal {signal}"),
        Some((_, Some(code))) => format!("has ended with status {code}"),
        _ => "has ended".to_owned(),
    }
}
