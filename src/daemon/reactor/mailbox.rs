//! What passes between other threads and a reactor: commands, each answered through a channel; posts between
//! reactors; and a bell that reactors ring. Must not touch what a reactor owns.
//!
//! Invariant: a post never waits for its receiver. There are no more of them than what clients may have in
//! flight, and a few for each client and array besides.

use super::admission::Origin;
use super::connection::Connection;
use super::directory::Listed;
use super::error::ReactorError;
use super::fence::Traffic;
use super::listener::Listener;
use super::orders::{ArrayId, LaneId, LaneTicket, Order, Outcome, ReactorId, Requester};
use crate::member::Device;
use crate::tls::{Peer, PeerRules};
use calpe_core::block_io::DeviceId;
use calpe_core::volume::{
    AdminOutcome, AdminRequest, LaneCut, LetGo, Orphan, ReplacementOrder, Volume, VolumeStatus,
};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// An array to be served.
pub(crate) struct NewArray {
    /// Its identity; clients read it in the description of its export.
    pub array: uuid::Uuid,
    /// Its name, which is its export's name.
    pub name: String,
    /// How its volume is cut into those of its lanes.
    pub cut: LaneCut,
    /// Its lanes.
    pub lanes: Vec<NewLane>,
    /// Clients may only read.
    pub read_only: bool,
    /// Which certificates may use it; none: all of them.
    pub rules: Option<Arc<PeerRules>>,
}

/// A lane of an array that is to be served.
pub(crate) struct NewLane {
    /// Its volume, assembled on `devices`.
    pub volume: Box<dyn Volume>,
    /// Its open devices, under the ids that the volume knows them by.
    pub devices: Vec<(DeviceId, Device)>,
}

impl std::fmt::Debug for NewLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewLane").field("devices", &self.devices).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for NewArray {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewArray").field("name", &self.name).finish_non_exhaustive()
    }
}

/// What reactors know of an array.
#[derive(Clone, Debug)]
pub(crate) struct ArrayFacts {
    /// What its lanes together say.
    pub status: VolumeStatus,
    /// What each of its lanes says.
    pub of_lane: Vec<VolumeStatus>,
    /// Connections that chose it.
    pub clients: usize,
    /// What they did.
    #[cfg_attr(not(test), allow(dead_code))]
    pub traffic: Traffic,
    /// How often the loop of its reactor has turned, for whatever reason.
    #[cfg_attr(not(test), allow(dead_code))]
    pub turns: u64,
}

/// What the reactor of a lane knows of it.
#[derive(Debug)]
pub(super) struct LaneFacts {
    pub(super) status: VolumeStatus,
    pub(super) turns: u64,
}

/// A reply channel of one command.
pub(super) type Reply<T> = SyncSender<Result<T, ReactorError>>;

#[derive(Debug)]
pub(super) enum Command {
    AddLane {
        listed: Arc<Listed>,
        id: LaneId,
        lane: NewLane,
        reply: Reply<()>,
    },
    Admin {
        lane: LaneId,
        request: AdminRequest,
        devices: Vec<(DeviceId, Device)>,
        reply: Reply<AdminOutcome>,
    },
    Would {
        lane: LaneId,
        request: AdminRequest,
        reply: Reply<AdminOutcome>,
    },
    Status {
        lane: LaneId,
        reply: Reply<LaneFacts>,
    },
    /// Ends the sessions of an array that go beyond its rules, which have changed.
    EndExceeding {
        array: ArrayId,
        reply: Reply<usize>,
    },
    Peers {
        reply: Reply<Vec<Arc<Peer>>>,
    },
    EndSessions {
        peers: Vec<Arc<Peer>>,
        /// Also those without a certificate.
        anonymous: bool,
        reply: Reply<usize>,
    },
    WholeDevice {
        device: DeviceId,
        reply: Reply<Option<Device>>,
    },
    LeftElsewhere {
        lane: LaneId,
        device: DeviceId,
        why: LetGo,
    },
    Replacement {
        lane: LaneId,
        order: ReplacementOrder,
    },
    StopLane {
        lane: LaneId,
        reply: Reply<AdminOutcome>,
    },
    Listen {
        listener: Listener,
    },
    Shutdown,
}

/// What reactors tell one another.
#[derive(Debug)]
pub(super) enum Post {
    /// To the owner of a lane: an order.
    Order { lane: LaneId, order: Order },
    /// To the owner: a waiting order goes on.
    Resume(LaneTicket),
    /// To the owner: a waiting order is given up.
    GiveUp(LaneTicket),
    /// To the owner: a client has hung up, and later requests wait for its modifying ones. `hold` has all
    /// reads go to the owner from the moment when that was found.
    Orphan { lane: LaneId, requester: Requester, hold: Option<Orphan> },
    /// From the owner.
    Outcome(Outcome),
    /// From the reactor that accepts clients: a client to serve.
    Client(Box<Connection>),
    /// To that reactor: such a client of the one named has gone.
    ClientGone(ReactorId, Origin),
    /// The place for large payloads has become free.
    LargePlaceFree,
}

/// What other threads send to a reactor, and the eventfd that wakes it.
#[derive(Debug)]
pub(super) struct Mailbox {
    commands: Mutex<VecDeque<Command>>,
    posts: Mutex<Posts>,
    /// Whether the reactor waits, or is about to, without having looked at later posts.
    is_asleep: AtomicBool,
    wake: EventFd,
}

#[derive(Debug, Default)]
struct Posts {
    all: Vec<Post>,
    /// The reactor has ended: it takes no more.
    is_closed: bool,
}

/// Rung by reactors when the unreadable blocks of an array have changed, and when a pass has ended.
#[derive(Debug, Default)]
pub(super) struct Bell {
    has_rung: Mutex<bool>,
    rung: Condvar,
    /// Number of passes over arrays that have ended.
    passes_ended: AtomicU64,
}

impl Bell {
    /// The unreadable blocks of an array have changed.
    pub(super) fn tell_findings(&self) {
        *self.has_rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.rung.notify_all();
    }

    /// A pass over an array has ended.
    pub(super) fn tell_pass_ended(&self) {
        self.passes_ended.fetch_add(1, Ordering::SeqCst);
        self.tell_findings();
    }

    /// Waits until findings have changed or a pass has ended, for `limit` at most. Returns whether that
    /// happened since the last call.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let has_rung = self.has_rung.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.rung.wait_timeout_while(has_rung, limit, |rung| !*rung);
        std::mem::take(&mut *waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    /// How many passes over arrays have ended.
    pub(super) fn passes_ended(&self) -> u64 {
        self.passes_ended.load(Ordering::SeqCst)
    }
}

impl Mailbox {
    /// An empty one.
    ///
    /// # Errors
    /// When the system has no eventfd for it.
    pub(super) fn new() -> io::Result<Mailbox> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let (commands, posts) = (Mutex::default(), Mutex::default());
        Ok(Mailbox { commands, posts, is_asleep: AtomicBool::new(false), wake })
    }

    pub(super) fn push(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push_back(command);
        self.wake_reactor();
    }

    pub(super) fn take(&self) -> VecDeque<Command> {
        std::mem::take(&mut *self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sends a post. Posts of one thread arrive in their order. Gives it back when the reactor has ended.
    pub(super) fn post(&self, post: Post) -> Option<Post> {
        let mut posts = self.posts();
        if posts.is_closed {
            return Some(post);
        }
        posts.all.push(post);
        drop(posts);
        if self.is_asleep.swap(false, Ordering::SeqCst) {
            self.wake_reactor();
        }
        None
    }

    /// Takes the posts that have come.
    pub(super) fn take_posts(&self) -> Vec<Post> {
        std::mem::take(&mut self.posts().all)
    }

    /// The reactor is about to wait. Returns whether it may: no post has come.
    pub(super) fn falls_asleep(&self) -> bool {
        self.is_asleep.store(true, Ordering::SeqCst);
        let may = self.posts().all.is_empty();
        if !may {
            self.is_asleep.store(false, Ordering::SeqCst);
        }
        may
    }

    /// The reactor has waited; it looks at posts before it waits again.
    pub(super) fn is_awake(&self) {
        self.is_asleep.store(false, Ordering::SeqCst);
    }

    /// The reactor has ended. Returns the posts that it has not taken.
    pub(super) fn close(&self) -> Vec<Post> {
        let mut posts = self.posts();
        posts.is_closed = true;
        std::mem::take(&mut posts.all)
    }

    fn posts(&self) -> MutexGuard<'_, Posts> {
        self.posts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the reactor.
    pub(super) fn wake_reactor(&self) {
        // A full counter means that it is being woken already.
        let _ = self.wake.write(1);
    }

    /// Whether the reactor was woken since the last call.
    pub(super) fn was_woken(&self) -> bool {
        // An error means that there is nothing to read: another call took the wake-up.
        self.wake.read().is_ok()
    }

    /// A descriptor that is readable when the reactor is to wake.
    pub(super) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.wake.as_fd().try_clone_to_owned()
    }
}
