//! A member on another host: an NBD export of another server.
//!
//! Each device has a thread that owns its connections ([`worker`]); operations are handed to the
//! thread and come back through a queue that wakes the reactor ([`Inbox`]), or to a caller that
//! waits. Invariants: an operation is answered exactly once, within the request limit, whatever the
//! server does; the server is hostile input, and a misbehaving one costs its own member at most.
//! Must not know what is stored on the export, or arrays.

mod connect;
mod link;
mod operations;
mod plain;
mod registry;
mod secure;
#[cfg(test)]
mod tests;
mod worker;

pub(crate) use secure::set_remote_tls;

use super::access::Access;
use super::inbox::{Inbox, rouse};
use super::{DeviceError, RemoteError, holder};
use calpe_core::block_io::{DeviceId, IoFault, IoFaultKind, IoOp, IoToken, IoValue};
use calpe_core::nbd::{NbdUri, RemoteExport};
use nix::sys::eventfd::{EfdFlags, EventFd};
use registry::Hold;
use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use worker::Worker;

/// Errno for requests that the server calls invalid although they keep to what it announced.
const INTERNAL_ERRNO: i32 = libc::EIO;

/// The largest minimum block of a server: the largest sector that arrays have.
const BLOCK_MIN_MAX: u32 = 4096;

/// How long data may stay unacknowledged before TCP gives a connection up, whatever the request
/// limit is.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(10);

/// How much longer the quarantine lasts.
const QUARANTINE_BEYOND: Duration = Duration::from_secs(5);

/// How much longer than the limit of its request a caller waits: the thread answers by then.
const CALLER_PATIENCE: Duration = Duration::from_secs(5);

/// How long to wait for an export that is being closed in this process.
const CLOSING_WAIT: Duration = Duration::from_secs(1);

/// Time limits for a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteLimits {
    /// For the answer to a request, reconnecting included; then the device is given up.
    pub request: Duration,
    /// For restoring a lost connection.
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

    /// How long a device stays away whose connection was lost with unanswered writes.
    fn quarantine(&self) -> Duration {
        self.unacknowledged() + QUARANTINE_BEYOND
    }
}

/// How an export was lost while it was a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lost {
    /// For people.
    pub reason: String,
    /// The last attempt to connect reached the server, which refused.
    pub is_refused: bool,
    /// When.
    pub at: Instant,
    /// Writes of the lost connection may land until then.
    pub not_before: Instant,
    /// Whether it should come back: no part of the daemon has recorded the loss, or decided against its
    /// return.
    pub returns: bool,
}

/// Reads from an export: offset, and the buffer to fill; both keep to its blocks.
pub(crate) type ReadAt<'a> = &'a mut dyn FnMut(u64, &mut [u8]) -> Result<(), RemoteError>;

/// Checks whether a new connection reads the storage that was opened.
pub(crate) type Witness = dyn Fn(ReadAt<'_>) -> Result<(), RemoteError> + Send + Sync;

/// Whether both are URIs of one export.
#[must_use]
pub(crate) fn same_remote(one: &Path, other: &Path) -> bool {
    matches!((parse(one), parse(other)), (Ok(one), Ok(other)) if one == other)
}

/// How the export at this URI was lost while it was a member of this process; none if it was not.
#[must_use]
pub(crate) fn lost(path: &Path) -> Option<Lost> {
    registry::lost(&parse(path).ok()?).filter(|lost| lost.returns)
}

/// Forgets losses until `until`: the export has been opened again as a member, or is not to come
/// back.
pub(crate) fn forget_lost(path: &Path, until: Instant) {
    if let Ok(uri) = parse(path) {
        registry::forget(&uri, until);
    }
}

fn parse(path: &Path) -> Result<NbdUri, RemoteError> {
    Ok(path.to_string_lossy().parse()?)
}

/// An operation for the thread of a device.
struct Submission {
    op: IoOp,
    to: To,
    /// For a zeroing: fast or not at all.
    fast: bool,
}

/// Receiver of the outcome.
enum To {
    Engine { inbox: Arc<Inbox>, owner: u32, device: DeviceId, token: IoToken },
    Caller(SyncSender<Result<IoValue, IoFault>>),
}

/// What the windows of a device and its thread share.
struct Shared {
    queue: Mutex<Queue>,
    wake: EventFd,
    /// The errno for which the device was given up; 0 if it was not.
    given_up: AtomicI32,
    /// Windows that were not released. Without any, losing a connection is no reason to bring it back.
    in_use: AtomicUsize,
    /// Time limit of a request, in milliseconds.
    request_ms: AtomicU64,
}

#[derive(Default)]
struct Queue {
    submissions: Vec<Submission>,
    limits: Option<RemoteLimits>,
    /// With the places where their windows begin.
    witnesses: Vec<(u64, Arc<Witness>)>,
    closing: bool,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rouse(&self) {
        rouse(&self.wake);
    }

    fn note_given_up(&self, errno: i32) {
        self.given_up.store(errno, Ordering::Release);
    }
}

/// An open remote device, or a window of one. Dropping the last closes it, after a moment.
pub(super) struct RemoteDevice {
    connection: Arc<Connection>,
    /// Where the outcomes of its operations go.
    inbox: OnceLock<Arc<Inbox>>,
    released: AtomicBool,
}

/// What a thread serves.
struct Connection {
    uri: NbdUri,
    export: RemoteExport,
    since: Instant,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for RemoteDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteDevice").field("uri", self.uri()).finish_non_exhaustive()
    }
}

impl RemoteDevice {
    /// Connects and starts the thread.
    pub(super) fn open(path: &Path, access: Access) -> Result<RemoteDevice, DeviceError> {
        let fail = |source| DeviceError::Remote { path: path.to_path_buf(), source };
        let uri = parse(path).map_err(fail)?;
        let hold = if access.locks() { Some(hold(&uri, path)?) } else { None };
        if access == Access::Exclusive {
            registry::check_quarantine(&uri).map_err(fail)?;
        }
        // The previous holder has recorded by now how it lost the export.
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
            given_up: AtomicI32::new(0),
            in_use: AtomicUsize::new(1),
            request_ms: AtomicU64::new(whole_millis(limits.request)),
        });
        let worker = Worker::new(uri.clone(), links, limits, Arc::clone(&shared), hold);
        let thread = std::thread::Builder::new().name("remote".into());
        thread.spawn(move || run(worker)).map_err(broken)?;
        Ok(RemoteDevice::of(Arc::new(Connection { uri, export, since, shared })))
    }

    fn of(connection: Arc<Connection>) -> RemoteDevice {
        RemoteDevice { connection, inbox: OnceLock::new(), released: AtomicBool::new(false) }
    }

    /// Another user of the same connections, with an inbox of its own.
    pub(super) fn share(&self) -> RemoteDevice {
        self.shared().in_use.fetch_add(1, Ordering::AcqRel);
        RemoteDevice::of(Arc::clone(&self.connection))
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.connection.shared
    }

    /// Whether it could be opened for writing.
    pub(super) fn check_writable(&self, path: &Path) -> Result<(), DeviceError> {
        check_writable(&self.connection.export, path)
    }

    pub(super) fn uri(&self) -> &NbdUri {
        &self.connection.uri
    }

    pub(super) fn export(&self) -> &RemoteExport {
        &self.connection.export
    }

    /// When it was opened: earlier losses belong to another opening of the export.
    pub(super) fn since(&self) -> Instant {
        self.connection.since
    }

    /// Its array has released it, for a reason that a new connection does not remove.
    pub(super) fn release(&self) {
        if !self.released.swap(true, Ordering::AcqRel) {
            self.shared().in_use.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Why it was given up, if it was.
    pub(super) fn given_up(&self) -> Option<IoFault> {
        let errno = self.shared().given_up.load(Ordering::Acquire);
        (errno != 0).then_some(IoFault { kind: IoFaultKind::Gone, errno })
    }

    pub(super) fn set_limits(&self, limits: RemoteLimits) {
        self.shared().request_ms.store(whole_millis(limits.request), Ordering::Relaxed);
        self.shared().queue().limits = Some(limits);
        self.shared().rouse();
    }

    /// `start`: what its reads count from.
    pub(super) fn set_witness(&self, start: u64, witness: Arc<Witness>) {
        self.shared().queue().witnesses.push((start, witness));
        self.shared().rouse();
    }

    /// Sets where outcomes of [`RemoteDevice::submit`] go. Only the first call counts.
    pub(super) fn attach(&self, inbox: &Arc<Inbox>) {
        let _ = self.inbox.set(Arc::clone(inbox));
    }

    /// Starts an operation of the engine.
    pub(super) fn submit(&self, owner: u32, device: DeviceId, token: IoToken, op: IoOp) {
        let inbox = Arc::clone(self.inbox.get().expect("attached by the engine"));
        self.push(Submission { op, to: To::Engine { inbox, owner, device, token }, fast: false });
    }

    /// Runs an operation to its end. `fast`: a zeroing that is not fast is refused.
    pub(super) fn call(&self, op: IoOp, fast: bool) -> Result<IoValue, IoFault> {
        let (reply, answer) = sync_channel(1);
        self.push(Submission { op, to: To::Caller(reply), fast });
        // A caller that gave up sooner than the thread would report a failure, and the bytes would
        // land later.
        let limit = Duration::from_millis(self.shared().request_ms.load(Ordering::Relaxed));
        let patience = limit.max(RemoteLimits::default().request) + CALLER_PATIENCE;
        let timed_out = IoFault { kind: IoFaultKind::Gone, errno: libc::ETIMEDOUT };
        answer.recv_timeout(patience).unwrap_or(Err(timed_out))
    }

    fn push(&self, submission: Submission) {
        let mut queue = self.shared().queue();
        let first = queue.submissions.is_empty();
        queue.submissions.push(submission);
        drop(queue);
        // Otherwise the thread was woken already, and has not looked yet.
        if first {
            self.shared().rouse();
        }
    }
}

impl Drop for RemoteDevice {
    fn drop(&mut self) {
        // Other windows decide whether it should come back. The last one may be dropped with its process.
        if Arc::strong_count(&self.connection) > 1 {
            self.release();
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.queue().closing = true;
        self.shared.rouse();
    }
}

/// A broken invariant in the thread would leave operations unanswered for ever, and with them the
/// array. The log is made for the end of a process, so the process ends.
fn run(worker: Worker) {
    if catch_unwind(AssertUnwindSafe(|| worker.run())).is_err() {
        tracing::error!("the thread of a remote member panicked");
        std::process::abort();
    }
}

/// The wait after attempt number `attempt`, counted from 0, has failed: doubles from `first` up to
/// `max`, with a random part, so that a server that comes back is not met by all clients at once.
#[must_use]
pub(crate) fn backoff(first: Duration, max: Duration, attempt: u32) -> Duration {
    let whole = first.saturating_mul(1 << attempt.min(10)).min(max);
    let share = RandomState::new().hash_one(attempt) % 1000;
    whole / 2 + whole.mul_f64(share as f64 / 2000.0)
}

fn whole_millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Takes the export for this process; waits for one that is being closed.
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

/// Refuses an export that can be read but cannot be a member.
fn check_writable(export: &RemoteExport, path: &Path) -> Result<(), DeviceError> {
    if export.read_only {
        return Err(DeviceError::ReadOnly { path: path.to_path_buf(), what: "the export" });
    }
    check_export(export, false).map_err(|source| DeviceError::Remote { path: path.to_path_buf(), source })
}

/// Whether an export can be a member, or with `looking` be read.
fn check_export(export: &RemoteExport, looking: bool) -> Result<(), RemoteError> {
    if export.block_min > BLOCK_MIN_MAX {
        return Err(RemoteError::BlockSize { block_min: export.block_min });
    }
    if !export.flush && !export.read_only && !looking {
        return Err(RemoteError::NoFlush);
    }
    Ok(())
}
