//! A ring beside the engine's, on a thread of its own, for one member file whose filesystem may
//! keep a caller waiting (FUSE, network filesystems): only this thread, or the kernel's workers of
//! its ring, wait there.
//!
//! Why not the engine's ring: FUSE blocks the submitter of a read while more than a few are under
//! way (`max_background`, 12 by default), and ignores a request not to wait. Workers of the
//! engine's ring could wait in its place, but they serve all members of the engine: one member that
//! hangs can take all workers, and the kernel does not let writes to another file pass those of a
//! file with the same hash (there are 64 hashes). Workers belong to a thread, not to a ring, so it
//! takes a thread.
//!
//! Why a descriptor table of its own ([`super::own_table`]): the thread and its workers survive the
//! SIGKILL of a process whose filesystem does not answer, with everything in their table. The table
//! holds only this one file, so the sockets, the state directory and all other members are free at
//! once.
//!
//! Why no write of a killed process can land on a member that another process has taken: a process
//! writes to a member only while it holds the lock on it (flock), and the lock belongs to the open
//! file, which keeps it until its last reference is gone. Each operation in the kernel holds a
//! reference until the operation has ended, whatever becomes of tables, rings and threads; the
//! thread's own descriptor holds another one until nothing is under way. Operations that the kernel
//! did not have when the process was killed never reach it.
//!
//! Invariants: each pushed entry comes back through the inbox once; nothing is handed to the kernel
//! after the end; the file stays open, and locked, until all pushed entries have ended; the thread
//! closes its own descriptors and no others. Must not know what entries are for.
#![allow(unsafe_code)] // entries name memory of others; each block argues for itself

use super::held::Held;
use super::inbox::{EndedList, Inbox, put, rouse};
use super::{Ring, own_table};
use io_uring::{opcode, squeue, types};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Operations on such a file that the kernel has at one time: each may occupy a thread of it.
pub(super) const DEPTH_MAX: u32 = 64;

/// Entries of the ring: the operations, and the entry that wakes the thread.
const SUBMISSIONS: u32 = 2 * DEPTH_MAX;
const COMPLETIONS: u32 = 4 * DEPTH_MAX;

/// The `user_data` of the entry that wakes the thread. Entries of the engine carry its tag.
const WAKE: u64 = u64::MAX;

/// Longest sleep of the thread while there is nothing to do.
const NAP: Duration = Duration::from_secs(600);

/// The engine's end. Dropping it ends the thread when nothing is under way.
pub(super) struct Aside {
    queue: Arc<Mutex<Queue>>,
    /// In the engine's descriptor table.
    wake: EventFd,
    /// In that of the thread.
    fd: RawFd,
}

impl std::fmt::Debug for Aside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Aside").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Queue {
    entries: Vec<squeue::Entry>,
    closing: bool,
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The thread's end.
struct Shared {
    queue: Arc<Mutex<Queue>>,
    ended: EndedList,
    /// Keeps the device marked as open until this descriptor is closed.
    held: Option<Arc<Held>>,
}

/// Copies of descriptors that the thread closes.
struct Copies {
    file: OwnedFd,
    wake: EventFd,
    inbox_wake: EventFd,
}

impl Aside {
    /// Starts the thread, which has the file open from then on.
    ///
    /// # Errors
    /// When no thread, descriptor or ring is available.
    pub(super) fn start(inbox: &Inbox, file: BorrowedFd<'_>, held: Option<&Arc<Held>>) -> io::Result<Aside> {
        Aside::start_with(inbox, file, held, true).or_else(|error| {
            // A container may forbid the system calls, or the host may lack a resource for the
            // moment.
            tracing::info!(%error, "the ring of a member file has no descriptor table of its own");
            Aside::start_with(inbox, file, held, false)
        })
    }

    fn start_with(
        inbox: &Inbox,
        file: BorrowedFd<'_>,
        held: Option<&Arc<Held>>,
        has_own_table: bool,
    ) -> io::Result<Aside> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let queue = Arc::new(Mutex::default());
        let shared = Shared { queue: Arc::clone(&queue), ended: inbox.ended_list(), held: held.cloned() };
        let thread = std::thread::Builder::new().name("member-aside".into());
        // The numbers are valid in the thread until it has made its copies; this call waits for
        // that.
        let numbers = [file.as_raw_fd(), wake.as_fd().as_raw_fd(), inbox.wake.as_fd().as_raw_fd()];
        let (sender, receiver) = sync_channel(1);
        thread.spawn(move || {
            // SAFETY: open until the starter was answered, which is after the last use of these.
            let theirs = numbers.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
            run(shared, &theirs, has_own_table, &sender);
        })?;
        let started = receiver.recv().unwrap_or_else(|_| Err(io::Error::other("its thread ended")));
        started.map(|fd| Aside { queue, wake, fd })
    }

    /// The number of the file in entries.
    pub(super) fn fd(&self) -> RawFd {
        self.fd
    }

    /// Hands over an entry. It must name no descriptor but the file's.
    ///
    /// # Safety
    /// As for [`Ring::push`], except for the descriptor, until its end came out of the inbox.
    pub(super) unsafe fn push(&self, entry: squeue::Entry) {
        let mut queue = lock(&self.queue);
        let first = queue.entries.is_empty();
        queue.entries.push(entry);
        drop(queue);
        // Otherwise the thread was woken already, and has not looked yet.
        if first {
            rouse(&self.wake);
        }
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        lock(&self.queue).closing = true;
        rouse(&self.wake);
    }
}

fn run(
    shared: Shared,
    theirs: &[BorrowedFd<'_>],
    has_own_table: bool,
    started: &SyncSender<io::Result<RawFd>>,
) {
    let (copies, mut ring) = match begin(theirs, has_own_table) {
        Ok(begun) => begun,
        Err(error) => {
            let _ = started.send(Err(error));
            return;
        }
    };
    let _ = started.send(Ok(copies.file.as_raw_fd()));
    // The engine, which knows the device, reports one that hangs.
    if let Err(error) = serve(&shared, &copies, &mut ring) {
        tracing::error!(%error, "the ring of a member file ended: its operations do not end");
        // It is unknown which operations the kernel still has: the file stays open and locked.
        loop {
            std::thread::park();
        }
    }
    drop(ring);
    // Closing takes as long as the filesystem likes; only then may the device be opened again.
    drop(copies);
    drop(shared.held);
}

fn begin(theirs: &[BorrowedFd<'_>], has_own_table: bool) -> io::Result<(Copies, Ring)> {
    let copies = if has_own_table {
        own_table::leave(theirs)?
    } else {
        let copy = |fd: &BorrowedFd<'_>| fd.try_clone_to_owned().map(own_table::raise);
        theirs.iter().map(copy).collect::<io::Result<_>>()?
    };
    let [file, wake, inbox_wake] = <[OwnedFd; 3]>::try_from(copies).expect("one copy of each");
    // SAFETY: both are copies of event counters.
    let (wake, inbox_wake) = unsafe { (EventFd::from_owned_fd(wake), EventFd::from_owned_fd(inbox_wake)) };
    // The ring belongs to the thread that makes it.
    let ring = Ring::with_entries(SUBMISSIONS, COMPLETIONS)?;
    // One more entry is for the looks at the path.
    ring.allow_workers(DEPTH_MAX + 1);
    Ok((Copies { file, wake, inbox_wake }, ring))
}

fn serve(shared: &Shared, copies: &Copies, ring: &mut Ring) -> io::Result<()> {
    let mut events = Vec::new();
    let mut under_way = 0;
    await_wake(&copies.wake, ring);
    loop {
        let (entries, closing) = {
            let mut queue = lock(&shared.queue);
            (std::mem::take(&mut queue.entries), queue.closing)
        };
        under_way += entries.len();
        if closing && under_way == 0 {
            return Ok(());
        }
        for entry in entries {
            // SAFETY: the caller that pushed it promised that it stays valid until its end came out of the
            // inbox, where it is put only after its completion was taken.
            unsafe { ring.push(entry) }
        }
        let entered = ring.enter(Some(NAP), &mut events);
        let is_woken = events.iter().any(|event| event.user_data == WAKE);
        events.retain(|event| event.user_data != WAKE);
        under_way -= events.len();
        let ended = events.drain(..).map(|event| (event.user_data, event.result)).collect();
        put(&shared.ended, ended, &copies.inbox_wake);
        // Operations that have ended are reported even if this failed.
        entered?;
        if is_woken {
            // Entries that were handed over before the wake are taken next.
            await_wake(&copies.wake, ring);
        }
    }
}

/// Asks the ring to report when an entry was handed over.
fn await_wake(wake: &EventFd, ring: &mut Ring) {
    // An error means that there was nothing to read.
    let _ = wake.read();
    let fd = types::Fd(wake.as_fd().as_raw_fd());
    let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
    // SAFETY: no memory involved; the descriptor is open as long as the thread runs.
    unsafe { ring.push(entry.user_data(WAKE)) }
}
