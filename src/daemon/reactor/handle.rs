//! A running reactor as other threads see it: its thread, and its mailbox. Must not touch what the reactor
//! owns.

use super::event_loop::{Reactor, ReactorConfig};
use super::listener::Listener;
use super::mailbox::{ArrayFacts, Command, Mailbox, NewArray, ReactorError, Reply};
use super::orders::ArrayId;

use super::sys;
use crate::daemon::events::EventLog;
use crate::member::Device;
use crate::tls::{Peer, PeerRules};
use calpe_core::block_io::DeviceId;
use calpe_core::volume::{AdminOutcome, AdminRequest};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A running reactor. Clones talk to the same one.
#[derive(Clone, Debug)]
pub(crate) struct ReactorHandle {
    mailbox: Arc<Mailbox>,
    ids: Arc<Ids>,
    thread: Arc<Thread>,
}

/// The reactor's thread, as far as others have to know. It is not joined: operations of a hung device may
/// keep it from ending.
#[derive(Debug)]
struct Thread {
    alive: AtomicBool,
    /// Its result, for the first caller that asks.
    outcome: Mutex<Option<Receiver<io::Result<()>>>>,
}

#[derive(Debug, Default)]
struct Ids {
    device: AtomicU32,
    array: AtomicU32,
}

/// Dropped when the reactor takes no more commands: later ones are answered then.
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
    pub(crate) fn spawn(config: ReactorConfig, events: EventLog) -> io::Result<ReactorHandle> {
        let mailbox = Arc::new(Mailbox::new()?);
        let (started, start) = sync_channel(1);
        let (end, outcome) = sync_channel(1);
        let thread = Arc::new(Thread { alive: AtomicBool::new(true), outcome: Mutex::new(Some(outcome)) });
        let last = Last { thread: Arc::clone(&thread), mailbox: Arc::clone(&mailbox) };
        let in_thread = Arc::clone(&mailbox);
        std::thread::Builder::new().name("reactor".into()).spawn(move || {
            sys::raise_priority();
            let last = last;
            let reactor = match Reactor::new(config, in_thread, events) {
                Ok(reactor) => reactor,
                Err(error) => {
                    let _ = started.send(Err(error));
                    return;
                }
            };
            // The caller may have given up waiting.
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
    pub(crate) fn next_device_id(&self) -> DeviceId {
        DeviceId(self.ids.device.fetch_add(1, Ordering::Relaxed))
    }

    /// Begins to serve an array.
    ///
    /// # Errors
    /// When its name is taken or its export impossible.
    pub(crate) fn add_array(&self, array: NewArray) -> Result<ArrayId, ReactorError> {
        let id = ArrayId(self.ids.array.fetch_add(1, Ordering::Relaxed));
        self.ask(|reply| Command::AddArray { id, array, reply })?;
        Ok(id)
    }

    /// Hands an administrator's request to a volume, with the devices it names. The devices are closed again
    /// when the volume refuses.
    ///
    /// # Errors
    /// When the volume refuses.
    pub(crate) fn admin(
        &self,
        array: ArrayId,
        request: AdminRequest,
        devices: Vec<(DeviceId, Device)>,
    ) -> Result<AdminOutcome, ReactorError> {
        self.ask(|reply| Command::Admin { array, request, devices, reply })
    }

    /// What a request to a volume would come to; changes nothing. The devices that the request names need not
    /// be handed over.
    ///
    /// # Errors
    /// When the volume would refuse.
    pub(crate) fn would(&self, array: ArrayId, request: AdminRequest) -> Result<AdminOutcome, ReactorError> {
        self.ask(|reply| Command::Would { array, request, reply })
    }

    /// The facts of an array.
    ///
    /// # Errors
    /// When it is not served.
    pub(crate) fn status(&self, array: ArrayId) -> Result<ArrayFacts, ReactorError> {
        self.ask(|reply| Command::Status { array, reply })
    }

    /// Replaces the rules about which certificates may use an array. Returns how many sessions end because
    /// they have rights that are no longer granted.
    ///
    /// # Errors
    /// When it is not served.
    pub(crate) fn set_rules(
        &self,
        array: ArrayId,
        rules: Option<Arc<PeerRules>>,
    ) -> Result<usize, ReactorError> {
        self.ask(|reply| Command::SetRules { array, rules, reply })
    }

    /// The peers of all connections that have proved who they are.
    ///
    /// # Errors
    /// When the reactor has ended.
    pub(crate) fn peers(&self) -> Result<Vec<Arc<Peer>>, ReactorError> {
        self.ask(|reply| Command::Peers { reply })
    }

    /// Ends the connections of these peers, and, if `anonymous`, those with TLS and without a certificate.
    /// Returns how many there were.
    ///
    /// # Errors
    /// When the reactor has ended.
    pub(crate) fn end_sessions(&self, peers: Vec<Arc<Peer>>, anonymous: bool) -> Result<usize, ReactorError> {
        self.ask(|reply| Command::EndSessions { peers, anonymous, reply })
    }

    /// Stops an array: refuses new requests, finishes those in flight, marks it clean, closes its devices.
    /// Returns when all of that is done.
    ///
    /// # Errors
    /// When it is not served, or could not be stopped cleanly; it is not served any more in either case.
    pub(crate) fn stop_array(&self, array: ArrayId) -> Result<AdminOutcome, ReactorError> {
        self.ask(|reply| Command::StopArray { array, reply })
    }

    /// Waits until the unreadable blocks of an array have changed since the last call, or a pass has ended,
    /// for `limit` at most. Returns whether that happened. For one caller.
    #[must_use]
    pub(crate) fn findings_change(&self, limit: Duration) -> bool {
        self.mailbox.wait_for_findings(limit)
    }

    /// How many passes over arrays (scrubs, repairs, rebuilds) have ended.
    #[must_use]
    pub(crate) fn passes_ended(&self) -> u64 {
        self.mailbox.passes_ended()
    }

    /// Accepts clients on a listener from now on.
    pub(crate) fn listen(&self, listener: Listener) {
        self.send(Command::Listen { listener });
    }

    /// Stops all arrays and ends the reactor; returns when that is done.
    ///
    /// # Errors
    /// What made the reactor end early, if something did.
    pub(crate) fn shutdown(&self) -> io::Result<()> {
        self.send(Command::Shutdown);
        self.outcome()
    }

    /// Waits for the end of the thread. Only the first caller gets its result.
    fn outcome(&self) -> io::Result<()> {
        let outcome = self.thread.outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
        let gone = |_| io::Error::other("the reactor thread panicked");
        outcome.map_or(Ok(()), |outcome| outcome.recv().map_err(gone)?)
    }

    /// Whether the thread still runs.
    #[must_use]
    pub(crate) fn is_alive(&self) -> bool {
        self.thread.alive.load(Ordering::SeqCst)
    }

    fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, ReactorError> {
        let (reply, answer): (_, Receiver<Result<T, ReactorError>>) = sync_channel(1);
        self.send(command(reply));
        // The reactor answers every command it takes, and drops the others when it ends.
        answer.recv().unwrap_or(Err(ReactorError::Gone))
    }

    fn send(&self, command: Command) {
        self.mailbox.push(command);
        if !self.is_alive() {
            // No thread takes them any more: dropping the reply channels answers those that wait.
            self.mailbox.take().clear();
        }
    }
}
