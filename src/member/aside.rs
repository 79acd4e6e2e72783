//! A ring beside the engine's, on a thread of its own, for one member file whose filesystem may keep
//! a caller waiting (FUSE, network filesystems): what waits there is this thread, or the kernel's
//! workers of its ring, and nobody else.
//!
//! Why not the engine's ring: FUSE holds up whoever submits a read while more than a few are under
//! way (`max_background`, 12 by default), and pays no heed to a request not to wait. Workers of the
//! engine's ring could wait in its place, but they serve all members of the engine: one that hangs
//! can take them all, and the kernel does not let writes to another file pass those of a file with
//! the same hash (there are 64). They belong to a thread, not to a ring, so it takes a thread.
//!
//! Invariants: what is pushed comes back through the inbox once; nothing is handed to the kernel
//! after the end. Must not know what entries are for.
#![allow(unsafe_code)] // entries name memory of others; each block argues for itself

use super::Ring;
use super::inbox::{Inbox, ring};
use io_uring::{opcode, squeue, types};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Operations of such a file that the kernel has at one time: each may occupy a thread of it.
pub(super) const DEPTH_MAX: u32 = 64;

/// Entries of the ring: those, and the one that wakes it.
const SUBMISSIONS: u32 = 2 * DEPTH_MAX;
const COMPLETIONS: u32 = 4 * DEPTH_MAX;

/// What the entry that wakes the thread carries. Entries of the engine carry its tag.
const WAKE: u64 = u64::MAX;

/// How long the thread sleeps at most while there is nothing to do.
const NAP: Duration = Duration::from_secs(600);

/// The engine's end. Dropping it ends the thread when nothing is under way.
pub(super) struct Aside(Arc<Shared>);

impl std::fmt::Debug for Aside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Aside").finish_non_exhaustive()
    }
}

struct Shared {
    queue: Mutex<Queue>,
    wake: EventFd,
    inbox: Arc<Inbox>,
}

#[derive(Default)]
struct Queue {
    entries: Vec<squeue::Entry>,
    closing: bool,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        ring(&self.wake);
    }
}

impl Aside {
    /// Starts the thread.
    ///
    /// # Errors
    /// When there is no thread, no descriptor or no ring to be had.
    pub fn start(inbox: &Arc<Inbox>) -> io::Result<Aside> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let shared = Arc::new(Shared { queue: Mutex::default(), wake, inbox: Arc::clone(inbox) });
        let (sender, receiver) = sync_channel(1);
        let own = Arc::clone(&shared);
        // The ring belongs to the thread that makes it.
        std::thread::Builder::new().name("member-aside".into()).spawn(move || run(&own, &sender))?;
        let started = receiver.recv().unwrap_or_else(|_| Err(io::Error::other("its thread ended")));
        started.map(|()| Aside(shared))
    }

    /// Hands over an entry.
    ///
    /// # Safety
    /// As for [`Ring::push`], until its end came out of the inbox.
    pub unsafe fn push(&self, entry: squeue::Entry) {
        let mut queue = self.0.queue();
        let first = queue.entries.is_empty();
        queue.entries.push(entry);
        drop(queue);
        // Otherwise the thread was woken, and has not looked yet.
        if first {
            self.0.ring();
        }
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        self.0.queue().closing = true;
        self.0.ring();
    }
}

fn run(shared: &Shared, started: &SyncSender<io::Result<()>>) {
    let mut ring = match Ring::with_entries(SUBMISSIONS, COMPLETIONS) {
        Ok(ring) => ring,
        Err(error) => {
            let _ = started.send(Err(error));
            return;
        }
    };
    ring.allow_workers(DEPTH_MAX);
    let _ = started.send(Ok(()));
    // What hangs is told by the engine, which knows the device.
    if let Err(error) = serve(shared, &mut ring) {
        tracing::error!(%error, "the ring of a member file ended: its operations do not end");
    }
}

fn serve(shared: &Shared, ring: &mut Ring) -> io::Result<()> {
    let mut events = Vec::new();
    let mut under_way = 0;
    await_wake(shared, ring);
    loop {
        let (entries, closing) = {
            let mut queue = shared.queue();
            (std::mem::take(&mut queue.entries), queue.closing)
        };
        under_way += entries.len();
        if closing && under_way == 0 {
            return Ok(());
        }
        for entry in entries {
            // SAFETY: whoever pushed it promised it until its end came out of the inbox, where it is
            // put only after its completion was taken.
            unsafe { ring.push(entry) }
        }
        ring.enter(Some(NAP), &mut events)?;
        let is_woken = events.iter().any(|event| event.user_data == WAKE);
        events.retain(|event| event.user_data != WAKE);
        under_way -= events.len();
        shared.inbox.give_ended(events.drain(..).map(|event| (event.user_data, event.result)).collect());
        if is_woken {
            // What was handed over before this is taken next.
            await_wake(shared, ring);
        }
    }
}

/// Has the ring tell when something was handed over.
fn await_wake(shared: &Shared, ring: &mut Ring) {
    // An error means that there was nothing to read.
    let _ = shared.wake.read();
    let fd = types::Fd(shared.wake.as_fd().as_raw_fd());
    let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
    // SAFETY: no memory involved; the descriptor is open as long as the thread runs.
    unsafe { ring.push(entry.user_data(WAKE)) }
}
