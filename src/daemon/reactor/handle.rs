//! How other threads talk to a reactor: a mailbox of commands, each answered through a channel. Must not touch
//! what the reactor owns.

use super::listener::Listener;
use super::{ArrayFacts, ArrayId, Reactor, ReactorConfig, sys};
use crate::block_io::DeviceId;
use crate::daemon::events::EventLog;
use crate::member::Device;
use crate::volume::{AdminError, AdminOutcome, AdminRequest, Volume};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

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
        fault: crate::nbd::ExportFault,
    },
    /// Another array of that name is served.
    #[error("an array named '{name}' is served already")]
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
    Status {
        array: ArrayId,
        reply: Reply<ArrayFacts>,
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
    thread: Arc<Mutex<Option<JoinHandle<io::Result<()>>>>>,
}

#[derive(Debug, Default)]
struct Ids {
    device: AtomicU32,
    array: AtomicU32,
}

impl ReactorHandle {
    /// Starts a reactor on a thread of its own.
    ///
    /// # Errors
    /// When the system has no io_uring for it.
    pub fn spawn(config: ReactorConfig, events: EventLog) -> io::Result<ReactorHandle> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let mailbox = Arc::new(Mailbox { commands: Mutex::default(), wake });
        let (started, start) = sync_channel(1);
        let in_thread = Arc::clone(&mailbox);
        let thread = std::thread::Builder::new().name("reactor".into()).spawn(move || {
            sys::go_first();
            match Reactor::new(config, in_thread, events) {
                Ok(reactor) => {
                    // Whoever waits for this may have given up: that is their affair.
                    let _ = started.send(Ok(()));
                    reactor.run()
                }
                Err(e) => {
                    let _ = started.send(Err(e));
                    Ok(())
                }
            }
        })?;
        start.recv().map_err(|_| io::Error::other("the reactor thread ended at once"))??;
        Ok(ReactorHandle { mailbox, ids: Arc::default(), thread: Arc::new(Mutex::new(Some(thread))) })
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

    /// The facts of an array.
    ///
    /// # Errors
    /// When it is not served.
    pub fn status(&self, array: ArrayId) -> Result<ArrayFacts, ReactorError> {
        self.ask(|reply| Command::Status { array, reply })
    }

    /// Stops an array: refuses new requests, finishes those in flight, marks it clean, closes its devices. Returns
    /// when that is done.
    ///
    /// # Errors
    /// When it is not served, or could not be stopped cleanly; it is not served any more in either case.
    pub fn stop_array(&self, array: ArrayId) -> Result<AdminOutcome, ReactorError> {
        self.ask(|reply| Command::StopArray { array, reply })
    }

    /// Accepts clients on a listener from now on.
    pub fn listen(&self, listener: Listener) {
        self.send(Command::Listen { listener });
    }

    /// Stops all arrays and ends the thread; returns when it is gone.
    ///
    /// # Errors
    /// What made the reactor end early, if something did.
    pub fn shutdown(&self) -> io::Result<()> {
        self.send(Command::Shutdown);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        match thread.map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }

    /// Whether the thread still runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
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
