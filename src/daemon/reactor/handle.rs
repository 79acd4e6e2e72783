//! How other threads talk to a reactor: a mailbox of commands, each answered through a channel. Must not touch
//! what the reactor owns.

use super::listener::Listener;
use super::{ArrayFacts, ArrayId, Reactor, ReactorConfig, sys};
use crate::daemon::events::EventLog;
use crate::member::Device;
use crate::tls::{Peer, PeerRules};
use calpe_core::block_io::DeviceId;
use calpe_core::volume::{AdminError, AdminOutcome, AdminRequest, Volume};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// An array to be served.
pub struct NewArray {
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
    /// Which certificates may use it; none: all.
    pub rules: Option<Arc<PeerRules>>,
}

impl std::fmt::Debug for NewArray {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewArray").field("name", &self.name).finish_non_exhaustive()
    }
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
    /// The volume refused.
    #[error("{0}")]
    Refused(AdminError),
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
    Check {
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
        /// Those without a certificate, too.
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
    pub(super) commands: Mutex<VecDeque<Command>>,
    pub(super) wake: EventFd,
    pub(super) findings: Bell,
    /// Passes over arrays that have ended.
    pub(super) passes_ended: AtomicU64,
}

/// Rung by the reactor when what cannot be read of an array has changed, and when a pass over one has ended.
#[derive(Debug, Default)]
pub(super) struct Bell {
    has_rung: Mutex<bool>,
    rung: Condvar,
}

impl Bell {
    pub(super) fn ring(&self) {
        *self.has_rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.rung.notify_all();
    }

    /// Waits until it is rung, for `limit` at most. Whether it was, since it was asked last.
    fn wait(&self, limit: Duration) -> bool {
        let has_rung = self.has_rung.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.rung.wait_timeout_while(has_rung, limit, |rung| !*rung);
        std::mem::take(&mut *waited.unwrap_or_else(PoisonError::into_inner).0)
    }
}

impl Mailbox {
    pub(super) fn take(&self) -> VecDeque<Command> {
        std::mem::take(&mut *self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A running reactor. Clones talk to the same one.
#[derive(Clone, Debug)]
pub struct ReactorHandle {
    mailbox: Arc<Mailbox>,
    ids: Arc<Ids>,
    thread: Arc<Thread>,
}

/// The reactor's thread, as far as others have to know. It is not joined: what the kernel still has of a device that hangs may
/// keep it from ending.
#[derive(Debug)]
struct Thread {
    alive: AtomicBool,
    /// How it ended; for one who asks.
    outcome: Mutex<Option<Receiver<io::Result<()>>>>,
}

#[derive(Debug, Default)]
struct Ids {
    device: AtomicU32,
    array: AtomicU32,
}

/// Dropped when the reactor takes no more commands: those that came too late are answered.
struct Last {
    thread: Arc<Thread>,
    mailbox: Arc<Mailbox>,
}

impl Drop for Last {
    fn drop(&mut self) {
        self.thread.alive.store(false, Ordering::SeqCst);
        self.mailbox.take().clear();
    }
}

impl ReactorHandle {
    /// Starts a reactor on a thread of its own.
    ///
    /// # Errors
    /// When the system has no io_uring for it.
    pub fn spawn(config: ReactorConfig, events: EventLog) -> io::Result<ReactorHandle> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let mailbox = Arc::new(Mailbox {
            commands: Mutex::default(),
            wake,
            findings: Bell::default(),
            passes_ended: AtomicU64::new(0),
        });
        let (started, start) = sync_channel(1);
        let (end, outcome) = sync_channel(1);
        let thread = Arc::new(Thread { alive: AtomicBool::new(true), outcome: Mutex::new(Some(outcome)) });
        let last = Last { thread: Arc::clone(&thread), mailbox: Arc::clone(&mailbox) };
        let in_thread = Arc::clone(&mailbox);
        std::thread::Builder::new().name("reactor".into()).spawn(move || {
            sys::go_first();
            let last = last;
            let reactor = match Reactor::new(config, in_thread, events) {
                Ok(reactor) => reactor,
                Err(error) => {
                    let _ = started.send(Err(error));
                    return;
                }
            };
            // Whoever waits for this may have given up: that is their affair.
            let _ = started.send(Ok(()));
            let result = reactor.run();
            drop(last);
            // As above.
            let _ = end.send(result);
        })?;
        start.recv().map_err(|_| io::Error::other("the reactor thread ended at once"))??;
        Ok(ReactorHandle { mailbox, ids: Arc::default(), thread })
    }

    /// A fresh device id.
    #[must_use]
    pub fn next_device_id(&self) -> DeviceId {
        DeviceId(self.ids.device.fetch_add(1, Ordering::Relaxed))
    }

    /// Begins to serve an array.
    ///
    /// # Errors
    /// When its name is taken or its export impossible.
    pub fn add_array(&self, array: NewArray) -> Result<ArrayId, ReactorError> {
        let id = ArrayId(self.ids.array.fetch_add(1, Ordering::Relaxed));
        self.ask(|reply| Command::AddArray { id, array, reply })?;
        Ok(id)
    }

    /// Hands an administrator's request to a volume, with the devices it names. The devices are closed again when
    /// the volume refuses.
    ///
    /// # Errors
    /// When the volume refuses.
    pub fn admin(
        &self,
        array: ArrayId,
        request: AdminRequest,
        devices: Vec<(DeviceId, Device)>,
    ) -> Result<AdminOutcome, ReactorError> {
        self.ask(|reply| Command::Admin { array, request, devices, reply })
    }

    /// Whether a volume would refuse a request, and what it would do; nothing is changed. Devices that the
    /// request names need not be handed over.
    ///
    /// # Errors
    /// When the volume would refuse.
    pub fn check(&self, array: ArrayId, request: AdminRequest) -> Result<AdminOutcome, ReactorError> {
        self.ask(|reply| Command::Check { array, request, reply })
    }

    /// The facts of an array.
    ///
    /// # Errors
    /// When it is not served.
    pub fn status(&self, array: ArrayId) -> Result<ArrayFacts, ReactorError> {
        self.ask(|reply| Command::Status { array, reply })
    }

    /// Replaces the rules about which certificates may use an array. Returns how many sessions end, because
    /// they have what is not granted any more.
    ///
    /// # Errors
    /// When it is not served.
    pub fn set_rules(&self, array: ArrayId, rules: Option<Arc<PeerRules>>) -> Result<usize, ReactorError> {
        self.ask(|reply| Command::SetRules { array, rules, reply })
    }

    /// Everybody who is connected and has proved who it is.
    ///
    /// # Errors
    /// When the reactor has ended.
    pub fn peers(&self) -> Result<Vec<Arc<Peer>>, ReactorError> {
        self.ask(|reply| Command::Peers { reply })
    }

    /// Ends the connections of these, and, if `anonymous`, those with TLS and without a certificate. Returns how many there
    /// were.
    ///
    /// # Errors
    /// When the reactor has ended.
    pub fn end_sessions(&self, peers: Vec<Arc<Peer>>, anonymous: bool) -> Result<usize, ReactorError> {
        self.ask(|reply| Command::EndSessions { peers, anonymous, reply })
    }

    /// Stops an array: refuses new requests, finishes those in flight, marks it clean, closes its devices. Returns
    /// when that is done.
    ///
    /// # Errors
    /// When it is not served, or could not be stopped cleanly; it is not served any more in either case.
    pub fn stop_array(&self, array: ArrayId) -> Result<AdminOutcome, ReactorError> {
        self.ask(|reply| Command::StopArray { array, reply })
    }

    /// Waits until what cannot be read of some array has changed since this was called last, or a pass over one has ended, for
    /// `limit` at most. Whether it has. For one caller.
    #[must_use]
    pub fn findings_change(&self, limit: Duration) -> bool {
        self.mailbox.findings.wait(limit)
    }

    /// How many passes over arrays (scrubs, repairs, rebuilds) have ended.
    #[must_use]
    pub fn passes_ended(&self) -> u64 {
        self.mailbox.passes_ended.load(Ordering::SeqCst)
    }

    /// Accepts clients on a listener from now on.
    pub fn listen(&self, listener: Listener) {
        self.send(Command::Listen { listener });
    }

    /// Stops all arrays and ends the reactor; returns when that is done.
    ///
    /// # Errors
    /// What made the reactor end early, if something did.
    pub fn shutdown(&self) -> io::Result<()> {
        self.send(Command::Shutdown);
        self.outcome()
    }

    /// Waits for the end of the thread. Only the first who asks is told how it came about.
    fn outcome(&self) -> io::Result<()> {
        let outcome = self.thread.outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
        let gone = |_| io::Error::other("the reactor thread panicked");
        outcome.map_or(Ok(()), |outcome| outcome.recv().map_err(gone)?)
    }

    /// Whether the thread still runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.thread.alive.load(Ordering::SeqCst)
    }

    fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, ReactorError> {
        let (reply, answer): (_, Receiver<Result<T, ReactorError>>) = sync_channel(1);
        self.send(command(reply));
        // The reactor answers everything it takes, and drops what it does not when it ends.
        answer.recv().unwrap_or(Err(ReactorError::Gone))
    }

    fn send(&self, command: Command) {
        let mut commands = self.mailbox.commands.lock().unwrap_or_else(PoisonError::into_inner);
        commands.push_back(command);
        drop(commands);
        // A full counter means that it is being woken already.
        let _ = self.mailbox.wake.write(1);
        if !self.is_alive() {
            // Nobody will take it: dropping the reply channel answers whoever waits.
            self.mailbox.take().clear();
        }
    }
}
