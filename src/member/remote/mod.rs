//! A member on another host: an NBD export of somebody else's.
//!
//! Each device has a thread that owns its connections ([`worker`]); operations are handed to it and come back through a
//! queue that wakes the reactor ([`Inbox`]), or to a caller that waits. Invariants: an operation is answered exactly once,
//! within the request limit, whatever the server does; the server is hostile input, and what it does costs its own member
//! at most. Must not know what is stored on the export, or arrays.

mod connect;
mod error;
mod jobs;
mod link;
mod plain;
mod registry;
mod secure;
#[cfg(test)]
mod tests;
mod worker;

pub use error::RemoteError;
pub use secure::set_remote_tls;

use super::inbox::{Inbox, Returned, ring};
use super::{Access, DeviceError, holder};
use calpe_core::block_io::{DeviceId, IoFault, IoFaultKind, IoOp, IoToken, IoValue};
use calpe_core::nbd::{NbdUri, RemoteExport};
use nix::sys::eventfd::{EfdFlags, EventFd};
use registry::Hold;
use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use worker::Worker;

/// Errno for what the server calls invalid, though it keeps to what the server announced.
const INTERNAL_ERRNO: i32 = libc::EIO;

/// The largest least block of a server: the largest sector that arrays have.
const BLOCK_MIN_MAX: u32 = 4096;

/// What unacknowledged data may wait at most before TCP gives a connection up, whatever the request limit is.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(10);

/// What the quarantine is longer than that.
const QUARANTINE_BEYOND: Duration = Duration::from_secs(5);

/// How long a caller that waits waits beyond the limits of its request: the thread answers by then.
const CALLER_PATIENCE: Duration = Duration::from_secs(5);

/// How long an export that is being closed in this process is waited for.
const CLOSING_WAIT: Duration = Duration::from_secs(1);

/// How patient to be with a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteLimits {
    /// For the answer to a request, reconnecting included; then the device is given up.
    pub request: Duration,
    /// For a lost connection to be there again.
    pub grace: Duration,
    /// For connecting, handshake included.
    pub connect: Duration,
}

impl Default for RemoteLimits {
    fn default() -> RemoteLimits {
        RemoteLimits {
            request: Duration::from_secs(30),
            grace: Duration::from_secs(8),
            connect: Duration::from_secs(5),
        }
    }
}

impl RemoteLimits {
    /// After how long without an acknowledgement TCP ends a connection.
    fn unacknowledged(&self) -> Duration {
        UNACKNOWLEDGED_MAX.min(self.request)
    }

    /// How long a device whose connection was lost with writes unanswered stays away.
    fn quarantine(&self) -> Duration {
        self.unacknowledged() + QUARANTINE_BEYOND
    }
}

/// How an export was lost that was in use as a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// For people.
    pub reason: String,
    /// Its server was there when it was last tried, and refused the connection.
    pub is_refused: bool,
    /// When.
    pub at: Instant,
    /// Writes of the lost connection may land until then.
    pub not_before: Instant,
    /// Nobody has taken note of it, or decided against its return.
    pub returns: bool,
}

/// Reads from an export: offset, and what to fill; both keep to its blocks.
pub type ReadAt<'a> = &'a mut dyn FnMut(u64, &mut [u8]) -> Result<(), RemoteError>;

/// Tells whether what a new connection reads is still the storage that was opened.
pub type Witness = dyn Fn(ReadAt<'_>) -> Result<(), RemoteError> + Send + Sync;

/// Whether a member is given as a URI instead of a path.
#[must_use]
pub fn is_remote(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().windows(3).any(|part| part == b"://")
}

/// Whether both are URIs of one export.
#[must_use]
pub fn same_remote(one: &Path, other: &Path) -> bool {
    matches!((parse(one), parse(other)), (Ok(one), Ok(other)) if one == other)
}

/// How the export at this URI was lost while it was a member of this process, if it was.
#[must_use]
pub fn lost(path: &Path) -> Option<Lost> {
    registry::lost(&parse(path).ok()?).filter(|lost| lost.returns)
}

/// The export is a member again, opened at that time, or what was lost until then is no reason to bring it back.
pub fn forget_lost(path: &Path, until: Instant) {
    if let Ok(uri) = parse(path) {
        registry::forget(&uri, until);
    }
}

fn parse(path: &Path) -> Result<NbdUri, RemoteError> {
    Ok(path.to_string_lossy().parse()?)
}

/// Something for the thread of a device to do.
struct Submission {
    op: IoOp,
    to: To,
    /// For a zeroing: fast or not at all.
    fast: bool,
}

/// Who wants the outcome.
enum To {
    Engine { owner: u32, device: DeviceId, token: IoToken },
    Caller(SyncSender<Result<IoValue, IoFault>>),
}

/// What a device and its thread share.
struct Shared {
    queue: Mutex<Queue>,
    wake: EventFd,
    inbox: OnceLock<Arc<Inbox>>,
    /// Not zero: the device was given up, and why.
    given_up: AtomicI32,
    /// Its array does without it: a connection that is lost from now on is no reason for it to come back.
    released: AtomicBool,
    /// How long a request may take, in milliseconds.
    request_ms: AtomicU64,
}

#[derive(Default)]
struct Queue {
    submissions: Vec<Submission>,
    limits: Option<RemoteLimits>,
    witness: Option<Arc<Witness>>,
    closing: bool,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        ring(&self.wake);
    }

    fn give_back(&self, group: Vec<Returned>) {
        if let Some(inbox) = self.inbox.get() {
            inbox.give(group);
        }
    }

    fn note_given_up(&self, errno: i32) {
        self.given_up.store(errno, Ordering::Release);
    }
}

/// An open remote device. Dropping it closes it, after a moment.
pub(super) struct RemoteDevice {
    uri: NbdUri,
    export: RemoteExport,
    since: Instant,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for RemoteDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteDevice").field("uri", &self.uri).finish_non_exhaustive()
    }
}

impl RemoteDevice {
    /// Connects and starts the thread.
    pub fn open(path: &Path, access: Access) -> Result<RemoteDevice, DeviceError> {
        let fail = |source| DeviceError::Remote { path: path.to_path_buf(), source };
        let uri = parse(path).map_err(fail)?;
        let hold = if access.locks() { Some(hold(&uri, path)?) } else { None };
        if access == Access::Exclusive {
            registry::check_quarantine(&uri).map_err(fail)?;
        }
        // The holder before has noted by now how it was lost, and the next one has not.
        let since = Instant::now();
        let limits = RemoteLimits::default();
        let links = connect::connect(&uri, &limits, &mut |reader| {
            check_export(reader.export(), access != Access::Exclusive)
        })
        .map_err(fail)?;
        let export = links[0].export().expect("connected").clone();
        if access == Access::Exclusive {
            check_writable(&export, path)?;
        }
        let broken = |source| fail(RemoteError::Lost(source));
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| broken(errno.into()))?;
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            wake,
            inbox: OnceLock::new(),
            given_up: AtomicI32::new(0),
            released: AtomicBool::new(false),
            request_ms: AtomicU64::new(whole_millis(limits.request)),
        });
        let worker = Worker::new(uri.clone(), links, limits, Arc::clone(&shared), hold);
        let thread = std::thread::Builder::new().name("remote".into());
        thread.spawn(move || run(worker)).map_err(broken)?;
        Ok(RemoteDevice { uri, export, since, shared })
    }

    /// Whether it could be written if it were open for that.
    pub fn check_writable(&self, path: &Path) -> Result<(), DeviceError> {
        check_writable(&self.export, path)
    }

    pub fn uri(&self) -> &NbdUri {
        &self.uri
    }

    pub fn export(&self) -> &RemoteExport {
        &self.export
    }

    /// Since when it is open: what was lost before was another opening of the export.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// Its array does without it from now on, for a reason that does not go away with a new connection.
    pub fn release(&self) {
        self.shared.released.store(true, Ordering::Release);
    }

    /// Why it was given up, if it was.
    pub fn given_up(&self) -> Option<IoFault> {
        let errno = self.shared.given_up.load(Ordering::Acquire);
        (errno != 0).then_some(IoFault { kind: IoFaultKind::Gone, errno })
    }

    pub fn set_limits(&self, limits: RemoteLimits) {
        self.shared.request_ms.store(whole_millis(limits.request), Ordering::Relaxed);
        self.shared.queue().limits = Some(limits);
        self.shared.ring();
    }

    pub fn set_witness(&self, witness: Arc<Witness>) {
        self.shared.queue().witness = Some(witness);
        self.shared.ring();
    }

    /// Outcomes of [`RemoteDevice::submit`] go there. Only the first time counts.
    pub fn attach(&self, inbox: &Arc<Inbox>) {
        let _ = self.shared.inbox.set(Arc::clone(inbox));
    }

    /// Starts an operation of the engine.
    pub fn submit(&self, owner: u32, device: DeviceId, token: IoToken, op: IoOp) {
        self.push(Submission { op, to: To::Engine { owner, device, token }, fast: false });
    }

    /// Runs an operation to its end; `fast`: a zeroing that is not fast is refused.
    pub fn call(&self, op: IoOp, fast: bool) -> Result<IoValue, IoFault> {
        let (reply, answer) = sync_channel(1);
        self.push(Submission { op, to: To::Caller(reply), fast });
        // Whoever gave up sooner than the thread would be told of a failure, and the bytes would land later.
        let limit = Duration::from_millis(self.shared.request_ms.load(Ordering::Relaxed));
        let patience = limit.max(RemoteLimits::default().request) + CALLER_PATIENCE;
        let timed_out = IoFault { kind: IoFaultKind::Gone, errno: libc::ETIMEDOUT };
        answer.recv_timeout(patience).unwrap_or(Err(timed_out))
    }

    fn push(&self, submission: Submission) {
        let mut queue = self.shared.queue();
        let first = queue.submissions.is_empty();
        queue.submissions.push(submission);
        drop(queue);
        // Otherwise the thread was woken, and has not looked yet.
        if first {
            self.shared.ring();
        }
    }
}

impl Drop for RemoteDevice {
    fn drop(&mut self) {
        self.shared.queue().closing = true;
        self.shared.ring();
    }
}

/// A broken invariant in the thread would leave operations unanswered for ever, and with them the array: the log is made for
/// the end of a process, not for that.
fn run(worker: Worker) {
    if catch_unwind(AssertUnwindSafe(|| worker.run())).is_err() {
        tracing::error!("the thread of a remote member panicked");
        std::process::abort();
    }
}

/// How long to wait after attempt number `attempt`, counted from 0, has failed: doubles from `first` up to `max`, and spreads: a
/// server that comes back is not met by all at once.
#[must_use]
pub fn backoff(first: Duration, max: Duration, attempt: u32) -> Duration {
    let whole = first.saturating_mul(1 << attempt.min(10)).min(max);
    let share = RandomState::new().hash_one(attempt) % 1000;
    whole / 2 + whole.mul_f64(share as f64 / 2000.0)
}

fn whole_millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Takes the export for this process; one that is being closed is waited for.
fn hold(uri: &NbdUri, path: &Path) -> Result<Hold, DeviceError> {
    let deadline = Instant::now() + CLOSING_WAIT;
    loop {
        if let Some(hold) = Hold::take(uri) {
            return Ok(hold);
        }
        if Instant::now() >= deadline {
            let holder = holder::OWN.to_owned();
            return Err(DeviceError::Locked { path: path.to_path_buf(), holder });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Refuses an export that no member can be, though it can be looked at.
fn check_writable(export: &RemoteExport, path: &Path) -> Result<(), DeviceError> {
    if export.read_only {
        return Err(DeviceError::ReadOnly { path: path.to_path_buf(), what: "the export" });
    }
    check_export(export, false).map_err(|source| DeviceError::Remote { path: path.to_path_buf(), source })
}

/// Whether an export can be a member, or be looked at.
fn check_export(export: &RemoteExport, looking: bool) -> Result<(), RemoteError> {
    if export.block_min > BLOCK_MIN_MAX {
        return Err(RemoteError::BlockSize { block_min: export.block_min });
    }
    if !export.flush && !export.read_only && !looking {
        return Err(RemoteError::NoFlush);
    }
    Ok(())
}
