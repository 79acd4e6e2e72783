//! Running reactors as other threads see them: their threads, and their mailboxes. Must not touch what
//! reactors own.

use super::error::ReactorError;
use super::event_loop::{Reactor, ReactorConfig};
use super::listener::Listener;
use super::mailbox::{ArrayFacts, Command, NewArray, Reply};
use super::orders::{ArrayId, ReactorId};
use super::peers::{ACCEPTOR, Peers};
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

/// The running reactors. Clones talk to the same ones.
#[derive(Clone, Debug)]
pub(crate) struct ReactorHandle {
    peers: Arc<Peers>,
    ids: Arc<Ids>,
    /// By reactor.
    threads: Vec<Arc<Thread>>,
}

/// A reactor's thread, as far as others have to know. It is not joined: operations of a hung device may keep
/// it from ending.
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
    me: ReactorId,
    thread: Arc<Thread>,
    peers: Arc<Peers>,
}

impl Drop for Last {
    fn drop(&mut self) {
        self.thread.alive.store(false, Ordering::SeqCst);
        let mailbox = self.peers.mailbox(self.me);
        mailbox.take().clear();
        mailbox.close();
        self.peers.ends(self.me);
    }
}

/// Starts one reactor on a thread of its own.
fn spawn_one(
    me: ReactorId,
    config: ReactorConfig,
    peers: &Arc<Peers>,
    events: EventLog,
) -> io::Result<Arc<Thread>> {
    let (started, start) = sync_channel(1);
    let (end, outcome) = sync_channel(1);
    let thread = Arc::new(Thread { alive: AtomicBool::new(true), outcome: Mutex::new(Some(outcome)) });
    let last = Last { me, thread: Arc::clone(&thread), peers: Arc::clone(peers) };
    let peers = Arc::clone(peers);
    let name = if me == ACCEPTOR { "reactor".to_owned() } else { format!("reactor-{}", me.0) };
    std::thread::Builder::new().name(name).spawn(move || {
        sys::raise_priority();
        let last = last;
        let reactor = match Reactor::new(me, config, peers, events) {
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
    Ok(thread)
}

impl ReactorHandle {
    /// Starts reactors, each on a thread of its own.
    ///
    /// # Errors
    /// When the system has no io_uring for them.
    pub(crate) fn spawn(config: ReactorConfig, events: EventLog) -> io::Result<ReactorHandle> {
        let peers = Arc::new(Peers::new(config.reactors, config.payload_bytes)?);
        let mut handle = ReactorHandle { peers, ids: Arc::default(), threads: Vec::new() };
        for me in (0..config.reactors).map(ReactorId) {
            match spawn_one(me, config.clone(), &handle.peers, events.clone()) {
                Ok(thread) => handle.threads.push(thread),
                Err(error) => {
                    // Those that run already serve nothing yet.
                    let _ = handle.shutdown();
                    return Err(error);
                }
            }
        }
        Ok(handle)
    }

    /// A fresh device id.
    #[must_use]
    pub(crate) fn next_device_id(&self) -> DeviceId {
        DeviceId(self.ids.device.fetch_add(1, Ordering::Relaxed))
    }

    /// Begins to serve an array, on the reactor that has the fewest.
    ///
    /// # Errors
    /// When its name is taken or its export impossible.
    pub(crate) fn add_array(&self, array: NewArray) -> Result<ArrayId, ReactorError> {
        let id = ArrayId(self.ids.array.fetch_add(1, Ordering::Relaxed));
        let owner = self.all().min_by_key(|&reactor| self.peers.directory.count_of(reactor));
        self.ask(owner.unwrap_or(ACCEPTOR), |reply| Command::AddArray { id, array, reply })?;
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
        self.ask(self.owner_of(array)?, |reply| Command::Admin { array, request, devices, reply })
    }

    /// What a request to a volume would come to; changes nothing. The devices that the request names need not
    /// be handed over.
    ///
    /// # Errors
    /// When the volume would refuse.
    pub(crate) fn would(&self, array: ArrayId, request: AdminRequest) -> Result<AdminOutcome, ReactorError> {
        self.ask(self.owner_of(array)?, |reply| Command::Would { array, request, reply })
    }

    /// The facts of an array.
    ///
    /// # Errors
    /// When it is not served.
    pub(crate) fn status(&self, array: ArrayId) -> Result<ArrayFacts, ReactorError> {
        self.ask(self.owner_of(array)?, |reply| Command::Status { array, reply })
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
        self.peers.directory.set_rules(array, rules)?;
        self.sum(|reply| Command::EndExceeding { array, reply })
    }

    /// The peers of all connections that have proved who they are.
    ///
    /// # Errors
    /// When the reactor has ended.
    pub(crate) fn peers(&self) -> Result<Vec<Arc<Peer>>, ReactorError> {
        let mut peers = Vec::new();
        for reactor in self.all() {
            peers.append(&mut self.ask(reactor, |reply| Command::Peers { reply })?);
        }
        Ok(peers)
    }

    /// Ends the connections of these peers, and, if `anonymous`, those with TLS and without a certificate.
    /// Returns how many there were.
    ///
    /// # Errors
    /// When the reactor has ended.
    pub(crate) fn end_sessions(&self, peers: Vec<Arc<Peer>>, anonymous: bool) -> Result<usize, ReactorError> {
        self.sum(|reply| Command::EndSessions { peers: peers.clone(), anonymous, reply })
    }

    /// Stops an array: refuses new requests, finishes those in flight, marks it clean, closes its devices.
    /// Returns when all of that is done.
    ///
    /// # Errors
    /// When it is not served, or could not be stopped cleanly; it is not served any more in either case.
    pub(crate) fn stop_array(&self, array: ArrayId) -> Result<AdminOutcome, ReactorError> {
        self.ask(self.owner_of(array)?, |reply| Command::StopArray { array, reply })
    }

    /// Waits until the unreadable blocks of an array have changed since the last call, or a pass has ended,
    /// for `limit` at most. Returns whether that happened. For one caller.
    #[must_use]
    pub(crate) fn findings_change(&self, limit: Duration) -> bool {
        self.peers.bell.wait(limit)
    }

    /// How many passes over arrays (scrubs, repairs, rebuilds) have ended.
    #[must_use]
    pub(crate) fn passes_ended(&self) -> u64 {
        self.peers.bell.passes_ended()
    }

    /// Accepts clients on a listener from now on.
    pub(crate) fn listen(&self, listener: Listener) {
        self.send(ACCEPTOR, Command::Listen { listener });
    }

    /// Stops all arrays and ends the reactors; returns when that is done.
    ///
    /// # Errors
    /// What made reactors end early, if something did.
    pub(crate) fn shutdown(&self) -> io::Result<()> {
        self.all().for_each(|reactor| self.send(reactor, Command::Shutdown));
        let ends: Vec<io::Result<()>> = self.threads.iter().map(|thread| thread.outcome()).collect();
        let errors: Vec<String> =
            ends.into_iter().filter_map(|end| end.err().map(|e| e.to_string())).collect();
        if errors.is_empty() { Ok(()) } else { Err(io::Error::other(errors.join("; "))) }
    }

    /// Whether all threads still run.
    #[must_use]
    pub(crate) fn is_alive(&self) -> bool {
        self.threads.iter().all(|thread| thread.alive.load(Ordering::SeqCst))
    }

    fn all(&self) -> impl Iterator<Item = ReactorId> + use<> {
        (0..self.threads.len()).map(ReactorId)
    }

    fn owner_of(&self, array: ArrayId) -> Result<ReactorId, ReactorError> {
        if !self.is_alive() {
            return Err(ReactorError::Gone);
        }
        Ok(self.peers.directory.get(array).ok_or(ReactorError::NoSuchArray)?.owner())
    }

    /// The sum of what all reactors answer.
    fn sum(&self, command: impl Fn(Reply<usize>) -> Command) -> Result<usize, ReactorError> {
        self.all().map(|reactor| self.ask(reactor, &command)).sum()
    }

    fn ask<T>(
        &self,
        reactor: ReactorId,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, ReactorError> {
        let (reply, answer): (_, Receiver<Result<T, ReactorError>>) = sync_channel(1);
        self.send(reactor, command(reply));
        // The reactor answers every command it takes, and drops the others when it ends.
        answer.recv().unwrap_or(Err(ReactorError::Gone))
    }

    fn send(&self, reactor: ReactorId, command: Command) {
        let mailbox = self.peers.mailbox(reactor);
        mailbox.push(command);
        if !self.threads[reactor.0].alive.load(Ordering::SeqCst) {
            // No thread takes them any more: dropping the reply channels answers those that wait.
            mailbox.take().clear();
        }
    }
}

impl Thread {
    /// Waits for the end of the thread. Only the first caller gets its result.
    fn outcome(&self) -> io::Result<()> {
        let outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
        let gone = |_| io::Error::other("the reactor thread panicked");
        outcome.map_or(Ok(()), |outcome| outcome.recv().map_err(gone)?)
    }
}
