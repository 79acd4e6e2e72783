//! What passes between other threads and a reactor: commands, each answered through a channel, and a bell
//! that the reactor rings. Must not touch what the reactor owns.

use super::listener::Listener;
use super::orders::ArrayId;
use crate::member::Device;
use crate::tls::{Peer, PeerRules};
use calpe_core::block_io::DeviceId;
use calpe_core::volume::{AdminOutcome, AdminRefusal, AdminRequest, Volume, VolumeStatus};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// An array to be served.
pub(crate) struct NewArray {
    /// Its identity; clients read it in the description of its export.
    pub array: uuid::Uuid,
    /// Its name, which is its export's name.
    pub name: String,
    /// Its volume, assembled on `devices`.
    pub volume: Box<dyn Volume>,
    /// Its open devices, under the ids that the volume knows them by.
    pub devices: Vec<(DeviceId, Device)>,
    /// Clients may only read.
    pub read_only: bool,
    /// Which certificates may use it; none: all of them.
    pub rules: Option<Arc<PeerRules>>,
}

impl std::fmt::Debug for NewArray {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewArray").field("name", &self.name).finish_non_exhaustive()
    }
}

/// What clients did to an array since it was added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Reads that succeeded.
    pub reads: u64,
    /// Bytes they carried.
    pub read_bytes: u64,
    /// Writes that succeeded.
    pub writes: u64,
    /// Bytes they carried.
    pub written_bytes: u64,
}

/// What a reactor knows of an array.
#[derive(Clone, Debug)]
pub(crate) struct ArrayFacts {
    /// What the volume says.
    pub status: VolumeStatus,
    /// Connections that chose it.
    pub clients: usize,
    /// What they did.
    #[cfg_attr(not(test), allow(dead_code))]
    pub traffic: Traffic,
    /// How often the reactor's loop has turned, for whatever reason.
    #[cfg_attr(not(test), allow(dead_code))]
    pub turns: u64,
}

/// Why a reactor refused or did not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReactorError {
    /// Its thread has ended.
    #[error("the daemon is stopping")]
    Gone,
    /// No array of that id is served.
    #[error("this array is not served any more")]
    NoSuchArray,
    /// The export cannot be offered to clients.
    #[error("array '{name}' cannot be exported: {fault}")]
    Export {
        /// Name of the array.
        name: String,
        /// What is wrong.
        fault: calpe_core::nbd::ExportFault,
    },
    /// Another array of that name is served.
    #[error("an array named '{name}' is served already: export that one first")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The volume refused a request of an administrator.
    #[error(transparent)]
    Refused(AdminRefusal),
    /// The volume was given up before it had stopped.
    #[error("the array did not stop in time: it will be checked at the next start")]
    NotStopped,
}

/// A reply channel of one command.
pub(super) type Reply<T> = SyncSender<Result<T, ReactorError>>;

#[derive(Debug)]
pub(super) enum Command {
    AddArray {
        id: ArrayId,
        array: NewArray,
        reply: Reply<()>,
    },
    Admin {
        array: ArrayId,
        request: AdminRequest,
        devices: Vec<(DeviceId, Device)>,
        reply: Reply<AdminOutcome>,
    },
    Would {
        array: ArrayId,
        request: AdminRequest,
        reply: Reply<AdminOutcome>,
    },
    Status {
        array: ArrayId,
        reply: Reply<ArrayFacts>,
    },
    SetRules {
        array: ArrayId,
        rules: Option<Arc<PeerRules>>,
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
    StopArray {
        array: ArrayId,
        reply: Reply<AdminOutcome>,
    },
    Listen {
        listener: Listener,
    },
    Shutdown,
}

/// Commands on their way, and the eventfd that wakes the reactor.
#[derive(Debug)]
pub(super) struct Mailbox {
    commands: Mutex<VecDeque<Command>>,
    wake: EventFd,
    findings: Bell,
    /// Number of passes over arrays that have ended.
    passes_ended: AtomicU64,
}

/// Rung by the reactor when the unreadable blocks of an array have changed, and when a pass has ended.
#[derive(Debug, Default)]
struct Bell {
    has_rung: Mutex<bool>,
    rung: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.has_rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.rung.notify_all();
    }

    /// Waits for a ring, for `limit` at most. Returns whether the bell was rung since the last call.
    fn wait(&self, limit: Duration) -> bool {
        let has_rung = self.has_rung.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.rung.wait_timeout_while(has_rung, limit, |rung| !*rung);
        std::mem::take(&mut *waited.unwrap_or_else(PoisonError::into_inner).0)
    }
}

impl Mailbox {
    /// An empty one.
    ///
    /// # Errors
    /// When the system has no eventfd for it.
    pub(super) fn new() -> io::Result<Mailbox> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let (commands, findings) = (Mutex::default(), Bell::default());
        Ok(Mailbox { commands, wake, findings, passes_ended: AtomicU64::new(0) })
    }

    pub(super) fn push(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push_back(command);
        self.wake_reactor();
    }

    pub(super) fn take(&self) -> VecDeque<Command> {
        std::mem::take(&mut *self.commands.lock().unwrap_or_else(PoisonError::into_inner))
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

    /// The unreadable blocks of an array have changed.
    pub(super) fn tell_findings(&self) {
        self.findings.ring();
    }

    /// A pass over an array has ended.
    pub(super) fn tell_pass_ended(&self) {
        self.passes_ended.fetch_add(1, Ordering::SeqCst);
        self.findings.ring();
    }

    /// Waits until findings have changed or a pass has ended, for `limit` at most. Returns whether that
    /// happened since the last call.
    pub(super) fn wait_for_findings(&self, limit: Duration) -> bool {
        self.findings.wait(limit)
    }

    /// How many passes over arrays have ended.
    pub(super) fn passes_ended(&self) -> u64 {
        self.passes_ended.load(Ordering::SeqCst)
    }
}
