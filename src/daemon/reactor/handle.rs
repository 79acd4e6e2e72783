//! Running reactors as other threads see them: their threads, and their mailboxes. Must not touch what
//! reactors own.

use super::directory::{Listed, ListedLane};
use super::error::ReactorError;
use super::event_loop::{Reactor, ReactorConfig};
use super::listener::Listener;
use super::mailbox::{ArrayFacts, Command, LaneFacts, NewArray, Reply};
use super::orders::{ArrayId, LaneId, ReactorId};
use super::peers::{ACCEPTOR, Peers};
use super::sys;
use crate::daemon::events::EventLog;
use crate::member::Device;
use crate::tls::{Peer, PeerRules};
use calpe_core::block_io::DeviceId;
use calpe_core::nbd::{BLOCK_BYTES_MAX, ExportInfo};
use calpe_core::units::LaneIndex;
use calpe_core::volume::{
    AdminOutcome, AdminRefusal, AdminRequest, LaneNotices, LetGo, ReplacementOrder, for_lane, merge_outcomes,
    merge_status,
};
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

    /// Begins to serve an array: each lane on the reactor that has the fewest.
    ///
    /// # Errors
    /// When its name is taken or its export impossible.
    pub(crate) fn add_array(&self, array: NewArray) -> Result<ArrayId, ReactorError> {
        let export = export_of(&array)?;
        let id = ArrayId(self.ids.array.fetch_add(1, Ordering::Relaxed));
        let NewArray { cut, lanes, rules, .. } = array;
        let mut load: Vec<usize> = self.all().map(|reactor| self.peers.directory.count_of(reactor)).collect();
        let mut listed = Vec::with_capacity(lanes.len());
        for (nth, lane) in (0..).map(LaneIndex).zip(&lanes) {
            let least = load.iter().copied().min().unwrap_or(0);
            let owner = load.iter().position(|&lanes| lanes == least).map_or(ACCEPTOR, ReactorId);
            load[owner.0] += 1;
            listed.push(ListedLane::new(LaneId::new(id, nth), owner, &*lane.volume));
        }
        let before: Vec<_> = lanes.iter().map(|lane| lane.volume.status()).collect();
        let notices = LaneNotices::new(cut, &before);
        let listed = Listed::new(id, export, (cut, listed, notices), rules);
        let listed = self.peers.directory.add(listed)?;
        for (nth, (lane, at)) in lanes.into_iter().zip(listed.lanes()).enumerate() {
            let (id, listed_too) = (at.id(), Arc::clone(&listed));
            let added =
                self.ask(at.owner(), |reply| Command::AddLane { listed: listed_too, id, lane, reply });
            if let Err(error) = added {
                // Its lanes that are there give their devices back.
                let stops = listed.lanes()[..nth].iter().map(|begun| {
                    let lane = begun.id();
                    self.begin_to_ask(begun.owner(), |reply| Command::StopLane { lane, reply })
                });
                stops.collect::<Vec<_>>().into_iter().for_each(|stop| drop(stop.recv()));
                self.peers.directory.remove(&listed);
                return Err(error);
            }
        }
        listed.begin_serving();
        Ok(id)
    }

    /// Hands an administrator's requests to the volumes of an array's lanes: one for each, with the devices
    /// that it names there. The devices are closed again where the volume refuses. In an array of several
    /// lanes nothing is done before all lanes would do it, and it is not done where it is so already.
    ///
    /// # Errors
    /// When a volume refuses.
    pub(crate) fn admin(
        &self,
        array: ArrayId,
        requests: Vec<LaneOrder>,
    ) -> Result<AdminOutcome, ReactorError> {
        let listed = self.listed(array)?;
        assert_eq!(requests.len(), listed.lanes().len(), "a request for each lane");
        let is_wanted: Vec<bool> = match requests.len() {
            1 => vec![true],
            _ => {
                let asked: Vec<_> = requests.iter().map(|(request, _)| request.clone()).collect();
                let would = self.would_each(&listed, asked)?;
                let is_wanted = would.iter().map(Result::is_ok).collect();
                of_lanes(would)?;
                is_wanted
            }
        };
        let lanes = listed.lanes().iter().zip(requests).zip(is_wanted).filter(|(_, is_wanted)| *is_wanted);
        let asked: Vec<_> = lanes
            .map(|((lane, (request, devices)), _)| {
                let id = lane.id();
                self.begin_to_ask(lane.owner(), |reply| Command::Admin { lane: id, request, devices, reply })
            })
            .collect();
        of_lanes(answers_of(asked)?)
    }

    /// The same request to all lanes, without devices.
    ///
    /// # Errors
    /// As [`ReactorHandle::admin`].
    pub(crate) fn admin_all(
        &self,
        array: ArrayId,
        request: &AdminRequest,
    ) -> Result<AdminOutcome, ReactorError> {
        let requests = requests_of(&*self.listed(array)?, request);
        self.admin(array, requests.into_iter().map(|request| (request, Vec::new())).collect())
    }

    /// What requests to the volumes of an array's lanes would come to; changes nothing. The devices that they
    /// name need not be handed over.
    ///
    /// # Errors
    /// When a volume would refuse.
    pub(crate) fn would(
        &self,
        array: ArrayId,
        requests: Vec<AdminRequest>,
    ) -> Result<AdminOutcome, ReactorError> {
        let listed = self.listed(array)?;
        of_lanes(self.would_each(&listed, requests)?)
    }

    /// The same request to all lanes.
    ///
    /// # Errors
    /// As [`ReactorHandle::would`].
    pub(crate) fn would_all(
        &self,
        array: ArrayId,
        request: &AdminRequest,
    ) -> Result<AdminOutcome, ReactorError> {
        self.would(array, requests_of(&*self.listed(array)?, request))
    }

    fn would_each(
        &self,
        listed: &Listed,
        requests: Vec<AdminRequest>,
    ) -> Result<Vec<Result<AdminOutcome, AdminRefusal>>, ReactorError> {
        assert_eq!(requests.len(), listed.lanes().len(), "a request for each lane");
        let asked = listed.lanes().iter().zip(requests).map(|(lane, request)| {
            let id = lane.id();
            self.begin_to_ask(lane.owner(), |reply| Command::Would { lane: id, request, reply })
        });
        answers_of(asked.collect())
    }

    /// An administrator's request to one lane of an array, without devices.
    ///
    /// # Errors
    /// When its volume refuses.
    pub(crate) fn admin_lane(
        &self,
        array: ArrayId,
        lane: LaneIndex,
        request: AdminRequest,
    ) -> Result<AdminOutcome, ReactorError> {
        let listed = self.listed(array)?;
        let lane = listed.lane(lane);
        let (id, devices) = (lane.id(), Vec::new());
        self.ask(lane.owner(), |reply| Command::Admin { lane: id, request, devices, reply })
    }

    /// The whole device of which a lane has a window; none if it has it no more, or cannot share it.
    pub(crate) fn whole_device(&self, array: ArrayId, lane: LaneIndex, device: DeviceId) -> Option<Device> {
        let listed = self.listed(array).ok()?;
        let owner = listed.lane(lane).owner();
        self.ask(owner, |reply| Command::WholeDevice { device, reply }).ok()?
    }

    /// Another lane of the array has let go of a device of this one. It lets go of it, too, unless it needs
    /// it.
    pub(crate) fn left_elsewhere(&self, array: ArrayId, lane: LaneIndex, device: DeviceId, why: LetGo) {
        if let Ok(listed) = self.listed(array) {
            let lane = listed.lane(lane);
            self.send(lane.owner(), Command::LeftElsewhere { lane: lane.id(), device, why });
        }
    }

    /// Tells a lane what becomes of a replacement that it builds.
    pub(crate) fn order_replacement(&self, array: ArrayId, lane: LaneIndex, order: ReplacementOrder) {
        if let Ok(listed) = self.listed(array) {
            let lane = listed.lane(lane);
            self.send(lane.owner(), Command::Replacement { lane: lane.id(), order });
        }
    }

    /// Tells all lanes of an array what becomes of a replacement, before any request that follows.
    pub(crate) fn order_all(&self, array: ArrayId, order: &ReplacementOrder) {
        let lanes = self.listed(array).map_or(0, |listed| listed.cut().count());
        (0..lanes).for_each(|lane| self.order_replacement(array, LaneIndex(lane), order.clone()));
    }

    /// The facts of an array.
    ///
    /// # Errors
    /// When it is not served.
    pub(crate) fn status(&self, array: ArrayId) -> Result<ArrayFacts, ReactorError> {
        let listed = self.listed(array)?;
        let (mut of_lane, mut turns) = (Vec::new(), 0);
        for facts in self.ask_lanes(&listed, |lane, reply| Command::Status { lane, reply }) {
            let LaneFacts { status, turns: of_reactor } = facts?;
            of_lane.push(status);
            turns = of_reactor.max(turns);
        }
        let status = merge_status(listed.cut(), &of_lane);
        let fence = listed.fence();
        Ok(ArrayFacts { status, of_lane, clients: fence.clients(), traffic: fence.traffic(), turns })
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
        let listed = self.listed(array)?;
        // Nobody becomes a client of the others while the first one stops.
        listed.stop_serving();
        let ends = self.ask_lanes(&listed, |lane, reply| Command::StopLane { lane, reply });
        let ends: Vec<AdminOutcome> = ends.into_iter().collect::<Result<_, _>>()?;
        merge_outcomes(ends.into_iter().map(Ok)).map_err(ReactorError::Refused)
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

    fn listed(&self, array: ArrayId) -> Result<Arc<Listed>, ReactorError> {
        if !self.is_alive() {
            return Err(ReactorError::Gone);
        }
        self.peers.directory.get(array).ok_or(ReactorError::NoSuchArray)
    }

    /// Asks the owners of all lanes at once.
    fn ask_lanes<T>(
        &self,
        listed: &Listed,
        command: impl Fn(LaneId, Reply<T>) -> Command,
    ) -> Vec<Result<T, ReactorError>> {
        let lanes = listed.lanes().iter();
        let asked: Vec<_> =
            lanes.map(|lane| self.begin_to_ask(lane.owner(), |reply| command(lane.id(), reply))).collect();
        asked.into_iter().map(answer_of).collect()
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
        answer_of(self.begin_to_ask(reactor, command))
    }

    fn begin_to_ask<T>(&self, reactor: ReactorId, command: impl FnOnce(Reply<T>) -> Command) -> Awaited<T> {
        let (reply, answer) = sync_channel(1);
        self.send(reactor, command(reply));
        answer
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

/// A request to a lane, with the devices that it names.
pub(crate) type LaneOrder = (AdminRequest, Vec<(DeviceId, Device)>);

/// An answer that is on its way.
type Awaited<T> = Receiver<Result<T, ReactorError>>;

/// The reactor answers every command it takes, and drops the others when it ends.
fn answer_of<T>(awaited: Awaited<T>) -> Result<T, ReactorError> {
    awaited.recv().unwrap_or(Err(ReactorError::Gone))
}

/// The answers of volumes, refusals among them.
fn answers_of(
    awaited: Vec<Awaited<AdminOutcome>>,
) -> Result<Vec<Result<AdminOutcome, AdminRefusal>>, ReactorError> {
    // All are waited for, so that nothing is under way when this returns.
    let answers: Vec<_> = awaited.into_iter().map(answer_of).collect();
    let answer = |answer| match answer {
        Err(ReactorError::Refused(refusal)) => Ok(Err(refusal)),
        answer => Ok(Ok(answer?)),
    };
    answers.into_iter().map(answer).collect()
}

/// The answer of an array, from those of its lanes.
fn of_lanes(answers: Vec<Result<AdminOutcome, AdminRefusal>>) -> Result<AdminOutcome, ReactorError> {
    merge_outcomes(answers).map_err(ReactorError::Refused)
}

/// A request without devices as each lane gets it. Rates are of the whole array.
fn requests_of(listed: &Listed, request: &AdminRequest) -> Vec<AdminRequest> {
    let lanes = u64::from(listed.cut().count());
    let request = match *request {
        AdminRequest::Pace { rebuild_min, rebuild_max } => AdminRequest::Pace {
            rebuild_min: rebuild_min.div_ceil(lanes),
            rebuild_max: rebuild_max.div_ceil(lanes),
        },
        _ => for_lane(request, None),
    };
    listed.lanes().iter().map(|_| request.clone()).collect()
}

/// What an array offers to clients.
fn export_of(array: &NewArray) -> Result<ExportInfo, ReactorError> {
    let geometry = array.lanes[0].volume.status().geometry;
    let mut devices = array.lanes.iter().flat_map(|lane| &lane.devices);
    let export = ExportInfo {
        name: array.name.clone(),
        description: format!("Calpe array {}+{}, {}", geometry.data, geometry.parity, array.array),
        size: array.cut.volume_bytes(),
        read_only: array.read_only,
        block_min: geometry.sector,
        block_preferred: geometry.chunk.max(geometry.sector).min(BLOCK_BYTES_MAX),
        block_max: BLOCK_BYTES_MAX,
        rotational: devices.any(|(_, device)| device.facts().rotational),
        trim: true,
        write_zeroes: true,
        // Whole stripes of logged arrays; the volume refuses what it would have to write.
        fast_zero: true,
        multi_conn: true,
        cache: true,
    };
    export.check().map_err(|fault| ReactorError::Export { name: array.name.clone(), fault })?;
    Ok(export)
}

impl Thread {
    /// Waits for the end of the thread. Only the first caller gets its result.
    fn outcome(&self) -> io::Result<()> {
        let outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
        let gone = |_| io::Error::other("the reactor thread panicked");
        outcome.map_or(Ok(()), |outcome| outcome.recv().map_err(gone)?)
    }
}
