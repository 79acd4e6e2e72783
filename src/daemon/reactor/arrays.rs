//! The reactor's arrays: volumes with the orders that they have, their members, and their jobs. Orders go in;
//! results of orders, and everything else that concerns requesters, come out as a list of [`Outcome`]s that
//! the loop takes.
//!
//! Invariants: every action of a volume is executed in order; an order is answered once, or dropped with its
//! array; a device handed over with a refused request is closed again; a stop ends within a bounded time.
//! Must not know connections, or what volumes do.

use super::administration::Administration;
use super::departures::Departures;
use super::directory::{Directory, Listed, ListedLane};
use super::error::ReactorError;
use super::hosted::{Hosted, Pending, is_shortage};
use super::job_pool::{JobDone, Owner};
use super::jobs::Jobs;
use super::mailbox::{Bell, LaneFacts, NewLane, Reply};
use super::order::{Precedence, Span, Ticket};
use super::orders::{LaneId, LaneTicket, News, Order, Outcome, Requester};
use super::stopping::{StopStep, Stopping};
use crate::daemon::clock;
use crate::daemon::events::EventLog;
use crate::member::{Device, MemberIo, Ring, Stragglers};
use calpe_core::block_io::{DeviceId, IoFault, IoFaultKind, Pool};
use calpe_core::format::MemberState;
use calpe_core::units::Timestamp;
use calpe_core::volume::{
    self, AdminOutcome, AdminRefusal, AdminRequest, ArrayAction, ArrayNotice, MemberStatus, NoticeKind,
    NoticeLevel, RequestId, ViewReader, VolumeEvent, VolumeOutput,
};
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// How long nothing of a stopping array has ended before the members that hold it up are taken out, provided
/// that enough others are idle. Disks that are all slow, or all spin up, have the whole time of the stop.
const STRAGGLING: Duration = Duration::from_secs(3);

/// The same without enough idle members: then the array is left as it is, to be checked at the next start.
/// With the stages before and after, the daemon ends within ten seconds.
const SILENCE_NANOS_MAX: u64 = 7_000_000_000;

/// Most operations of members whose ends volumes take before they settle: each settling costs about as much
/// as the end of an operation, and the more ends it is for, the larger the batches of the log.
const OPERATIONS_AT_ONCE: usize = 128;

/// How long operations of members may take before volumes settle, in nanoseconds: those on memory-backed
/// files are run when their turn comes.
const OPERATIONS_NANOS: u64 = 200_000;

/// See the head of this file.
pub(super) struct Arrays {
    /// Lanes of arrays, by their numbers.
    hosted: Vec<Option<Box<Hosted>>>,
    members: MemberIo,
    jobs: Jobs,
    pool: Pool,
    administration: Administration,
    outcomes: VecDeque<Outcome>,
    /// Lanes that have taken events since they settled.
    unsettled: Vec<LaneId>,
    /// What the last lane that settled gave out.
    output: VolumeOutput,
    /// Stopped lanes whose devices other reactors were still reading.
    departures: Departures,
    /// Arrays that did not stop cleanly although no requester waited for the stop, and why.
    unclean: Vec<String>,
    events: EventLog,
    bell: Arc<Bell>,
    directory: Arc<Directory>,
}

impl Arrays {
    pub(super) fn new(
        members: MemberIo,
        jobs: Jobs,
        pool: Pool,
        events: EventLog,
        bell: Arc<Bell>,
        directory: Arc<Directory>,
    ) -> Arrays {
        Arrays {
            hosted: Vec::new(),
            members,
            jobs,
            pool,
            administration: Administration::default(),
            outcomes: VecDeque::new(),
            unsettled: Vec::new(),
            output: VolumeOutput::default(),
            departures: Departures::default(),
            unclean: Vec::new(),
            events,
            bell,
            directory,
        }
    }

    fn get(&self, id: LaneId) -> Option<&Hosted> {
        self.hosted.get(id.number() as usize)?.as_deref()
    }

    fn get_mut(&mut self, id: LaneId) -> Option<&mut Hosted> {
        self.hosted.get_mut(id.number() as usize)?.as_deref_mut()
    }

    fn ids(&self) -> Vec<LaneId> {
        self.hosted.iter().flatten().map(|hosted| hosted.id).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.hosted.iter().flatten().next().is_none() && self.departures.is_empty()
    }

    /// Begins to serve a lane of an array that is listed.
    pub(super) fn add(
        &mut self,
        ring: &mut Ring,
        now: Timestamp,
        (listed, id): (Arc<Listed>, LaneId),
        lane: NewLane,
    ) {
        let NewLane { volume, devices } = lane;
        for (device_id, device) in devices {
            self.members.add(ring, device_id, id.number(), device);
            share(&self.members, listed.lane(id.lane()), device_id);
        }
        let index = id.number() as usize;
        if self.hosted.len() <= index {
            self.hosted.resize_with(index + 1, || None);
        }
        self.hosted[index] = Some(Box::new(Hosted {
            id,
            volume,
            listed,
            stopping: Stopping::new(),
            pending: Slab::new(),
            modifying: 0,
            order: Precedence::default(),
            waiting: 0,
            reads: 0,
            last_request: now,
            is_unsettled: false,
            damage_revision: 0,
            active: true,
        }));
        // Assembly leaves work to do; the first tick starts it.
        self.step(ring, now, id, VolumeEvent::Tick);
    }

    /// The facts of a lane. `turns`: how often the loop has turned.
    pub(super) fn facts(&self, id: LaneId, turns: u64) -> Result<LaneFacts, ReactorError> {
        let array = self.get(id).ok_or(ReactorError::NoSuchArray)?;
        Ok(LaneFacts { status: array.volume.status(), turns })
    }
}

/// Orders.
impl Arrays {
    /// Takes an order: hands it to its volume, makes it wait for others, or drops it where the array is gone.
    /// What comes of it comes with [`Arrays::settle`].
    pub(super) fn submit(&mut self, now: Timestamp, id: LaneId, order: Order) {
        let Some(hosted) = self.hosted.get_mut(id.number() as usize).and_then(Option::as_deref_mut) else {
            self.outcomes.push_back(Outcome::Dropped { order, waited: None });
            return;
        };
        // A read waits for orphans only, and orphans modify.
        let (ticket, behind) = match order.request.command.modifies() || hosted.modifying > 0 {
            true => hosted.order.enter(&hosted.span_of(&order.request)),
            false => (Ticket::default(), None),
        };
        let event = hosted.begin_or_wait(order, ticket, behind, &self.pool, &mut self.outcomes);
        if let Some(event) = event {
            self.take(now, id, event);
        }
    }

    /// Goes on with a waiting order, like [`Arrays::submit`]. One whose array is gone was dropped with it.
    pub(super) fn resume(&mut self, now: Timestamp, (id, ticket): LaneTicket) {
        let Some(hosted) = self.hosted.get_mut(id.number() as usize).and_then(Option::as_deref_mut) else {
            return;
        };
        let Some(order) = hosted.take_waiting(ticket) else { return };
        let behind = hosted.order.blocker(&hosted.span_of(&order.request), ticket);
        let event = hosted.begin_or_wait(order, ticket, behind, &self.pool, &mut self.outcomes);
        if let Some(event) = event {
            self.take(now, id, event);
        }
    }

    /// Gives up a waiting order. One whose array is gone was dropped with it.
    pub(super) fn give_up(&mut self, (id, ticket): LaneTicket) {
        let Some(hosted) = self.hosted.get_mut(id.number() as usize).and_then(Option::as_deref_mut) else {
            return;
        };
        let Some(order) = hosted.take_waiting(ticket) else { return };
        hosted.leave(&order.request, ticket, &mut self.outcomes);
        self.outcomes.push_back(Outcome::Dropped { order, waited: Some((id, ticket)) });
    }

    /// Makes orphans of the modifying orders of a requester that has gone: later requests wait for them.
    pub(super) fn orphan(&mut self, id: LaneId, requester: Requester) {
        let Some(hosted) = self.get_mut(id) else { return };
        let block = hosted.block();
        let of_it = |pending: &&mut Pending| pending.requester == requester && !pending.is_orphan;
        for pending in hosted.pending.iter_mut().map(|(_, pending)| pending).filter(of_it) {
            let span = Span::of(&pending.request, block);
            if span.modifies {
                pending.is_orphan = true;
                pending.hold = hosted.listed.lane(id.lane()).reader().map(ViewReader::orphan);
                hosted.order.orphan(&span, pending.ticket);
            }
        }
    }

    /// The next outcome for a requester.
    pub(super) fn next_outcome(&mut self) -> Option<Outcome> {
        self.outcomes.pop_front()
    }
}

/// Steps of volumes.
impl Arrays {
    /// Gives an event to a volume. Events of arrays that are gone are dropped.
    fn take(&mut self, now: Timestamp, id: LaneId, event: VolumeEvent) {
        let Some(hosted) = self.hosted.get_mut(id.number() as usize).and_then(Option::as_deref_mut) else {
            return;
        };
        hosted.note(&event, now);
        hosted.volume.take(now, event);
        if !std::mem::replace(&mut hosted.is_unsettled, true) {
            self.unsettled.push(id);
        }
    }

    /// Gives an event to a volume, and carries out what comes of it at once.
    pub(super) fn step(&mut self, ring: &mut Ring, now: Timestamp, id: LaneId, event: VolumeEvent) {
        self.take(now, id, event);
        self.settle_lane(ring, now, id);
    }

    /// Carries out what comes of the events that volumes have taken.
    pub(super) fn settle(&mut self, ring: &mut Ring, now: Timestamp) {
        let mut unsettled = std::mem::take(&mut self.unsettled);
        for id in unsettled.drain(..) {
            self.settle_lane(ring, now, id);
        }
        // Its memory is reused.
        self.unsettled = unsettled;
    }

    /// Lets a volume work until it waits for something, and executes the actions that it returns.
    fn settle_lane(&mut self, ring: &mut Ring, now: Timestamp, id: LaneId) {
        let Some(hosted) = self.hosted.get_mut(id.number() as usize).and_then(Option::as_deref_mut) else {
            return;
        };
        if !std::mem::take(&mut hosted.is_unsettled) {
            return;
        }
        hosted.volume.settle(now, &mut self.output);
        let mut asked = false;
        while !self.output.replies.is_empty() {
            let mut replies = std::mem::take(&mut self.output.replies);
            for (request, result) in replies.drain(..) {
                if let Some(question) = hosted.end(request, result, &self.pool, &mut self.outcomes) {
                    hosted.volume.take(now, VolumeEvent::Client(request, question));
                    asked = true;
                }
            }
            if std::mem::take(&mut asked) {
                hosted.volume.settle(now, &mut self.output);
            }
            if self.output.replies.is_empty() {
                // Its memory is reused.
                self.output.replies = replies;
            }
        }
        let revision = hosted.volume.damage_revision();
        if std::mem::replace(&mut hosted.damage_revision, revision) != revision {
            self.bell.tell_findings();
        }
        let mut actions = std::mem::take(&mut self.output.actions);
        let jobs = actions.iter().filter(|action| matches!(action, ArrayAction::Work(_))).count();
        for action in actions.drain(..) {
            match action {
                ArrayAction::Work(job) => {
                    self.jobs.submit(job.owned_by(|op| Owner { lane: id, op }), jobs == 1);
                }
                ArrayAction::Io { device, token, op, may_wait: true } => {
                    self.members.submit_later(ring, id.number(), device, token, op)
                }
                ArrayAction::Io { device, token, op, may_wait: false } => {
                    self.members.submit(ring, id.number(), device, token, op)
                }
                ArrayAction::AdminDone(request, result) => self.admin_done(id, request, result),
                ArrayAction::Release(device) => self.release(id, device),
                ArrayAction::Notice(notice) => self.notice(id, notice),
                ArrayAction::WritesLost => {
                    self.outcomes.push_back(Outcome::News(News::WritesLost(id.array())));
                }
            }
        }
        self.output.actions = actions;
    }

    /// Takes what has ended: all jobs, and some operations of members. Returns whether there may be more.
    pub(super) fn advance(&mut self, ring: &mut Ring, now: Timestamp) -> bool {
        self.settle(ring, now);
        while let Some(JobDone { owner: Owner { lane, op }, done }) = self.jobs.next_done() {
            self.take(now, lane, VolumeEvent::Worked(volume::JobDone { owner: op, done }));
        }
        let began = clock::now();
        let mut any = false;
        for nth in 1..=OPERATIONS_AT_ONCE {
            let Some(done) = self.members.next_finished() else { break };
            any = true;
            self.take(now, LaneId::from_number(done.owner), VolumeEvent::Io(done.completion));
            if nth % 4 == 0 && clock::now().nanos_since(began) >= OPERATIONS_NANOS {
                break;
            }
        }
        self.settle(ring, now);
        let has_coded = self.jobs.do_one();
        any || has_coded || self.jobs.do_small()
    }

    /// Does small jobs that have gathered: while completions never end, nothing else would do them.
    pub(super) fn do_small_jobs(&mut self) {
        self.jobs.do_small();
    }

    /// Where jobs are run.
    pub(super) fn jobs(&mut self) -> &mut Jobs {
        &mut self.jobs
    }

    /// Gives away the jobs that have come since the last turn.
    pub(super) fn end_turn(&mut self) {
        self.jobs.end_turn();
    }

    /// Whether something that has ended was not taken yet.
    pub(super) fn has_ended(&self) -> bool {
        self.members.has_finished() || self.jobs.has_done() || !self.unsettled.is_empty()
    }

    /// Takes a completion of the ring that belongs to a member.
    pub(super) fn complete(&mut self, ring: &mut Ring, user_data: u64, result: i32) {
        self.members.complete(ring, user_data, result);
    }

    /// Has others work for this reactor from now on, or does not: the kernel's workers copy large transfers
    /// of members, and threads do jobs of clients.
    pub(super) fn use_helpers(&mut self, leaves_cores: bool) {
        self.members.copy_elsewhere(leaves_cores);
        self.jobs.use_threads(leaves_cores);
    }

    /// Whether they work for it now.
    pub(super) fn is_helped(&self) -> bool {
        self.jobs.are_done_elsewhere() || self.members.is_copied_elsewhere()
    }

    /// Members' operations in flight.
    pub(super) fn operations(&self) -> usize {
        self.members.in_flight()
    }

    pub(super) fn pass_time(&mut self, now: Timestamp) {
        self.members.pass_time(now);
        if !self.departures.is_empty() {
            self.answer_departed(now);
        }
    }

    pub(super) fn look_after_files(&mut self, ring: &mut Ring) {
        self.members.look_after_files(ring);
    }

    /// Whether an array works on something, or may do so soon.
    pub(super) fn is_busy(&self, now: Timestamp) -> bool {
        self.members.in_flight() > 0
            || self.members.is_closing(None)
            || self.hosted.iter().flatten().any(|array| array.is_busy(now))
    }

    /// Latest time of the next tick, if sooner than usual.
    pub(super) fn due(&self) -> Option<Timestamp> {
        self.hosted.iter().flatten().filter_map(|hosted| hosted.due()).min()
    }

    /// Gives all volumes a tick.
    pub(super) fn tick(&mut self, ring: &mut Ring, now: Timestamp) {
        for id in self.ids() {
            let Some(array) = self.get_mut(id) else { continue };
            let reads = array.listed.fence().traffic().reads;
            if std::mem::replace(&mut array.reads, reads) != reads {
                self.step(ring, now, id, VolumeEvent::ReadElsewhere);
            }
            self.step(ring, now, id, VolumeEvent::Tick);
        }
    }

    /// Tells volumes of members that are gone.
    pub(super) fn report_vanished(&mut self, ring: &mut Ring, now: Timestamp) {
        for (owner, device, fault) in self.members.vanished() {
            self.step(ring, now, LaneId::from_number(owner), VolumeEvent::DeviceGone(device, fault));
        }
    }

    /// A lane loses a device whose operations do not end.
    fn lose_device(&mut self, ring: &mut Ring, now: Timestamp, id: LaneId, device: DeviceId) {
        let fault = IoFault { kind: IoFaultKind::Gone, errno: libc::ETIMEDOUT };
        self.step(ring, now, id, VolumeEvent::DeviceGone(device, fault));
    }

    /// Lets go of a device.
    fn release(&mut self, id: LaneId, device: DeviceId) {
        if let Some(array) = self.get(id) {
            array.lane().devices().remove(device);
        }
        self.members.release(device);
    }

    fn notice(&mut self, id: LaneId, notice: ArrayNotice) {
        if ends_pass(notice.kind) {
            self.bell.tell_pass_ended();
        }
        if let Some(array) = self.get(id)
            && let Some(notice) = array.listed.take_notice(id.lane(), notice)
        {
            self.events.push(array.name(), notice);
        }
    }
}

/// Administrators' requests.
impl Arrays {
    pub(super) fn admin(
        &mut self,
        ring: &mut Ring,
        now: Timestamp,
        id: LaneId,
        request: AdminRequest,
        devices: Vec<(DeviceId, Device)>,
        reply: Reply<AdminOutcome>,
    ) {
        if let Err(error) = self.check_serving(id) {
            // The requester may have gone.
            let _ = reply.send(Err(error));
            return;
        }
        // Another lane may have kept the device open.
        if devices.iter().any(|(_, device)| self.members.has(id.number(), device)) {
            let _ = reply.send(Err(ReactorError::Unfinished));
            return;
        }
        let ids = devices.iter().map(|(device_id, _)| *device_id).collect();
        let lane = self.get(id).map(|array| Arc::clone(array.lane()));
        for (device_id, device) in devices {
            self.members.add(ring, device_id, id.number(), device);
            if let Some(lane) = &lane {
                share(&self.members, lane, device_id);
            }
        }
        let request_id = self.administration.begin(id, ids, reply);
        self.step(ring, now, id, VolumeEvent::Admin(request_id, request));
    }

    /// The whole device behind a window of a lane, for windows of other lanes.
    pub(super) fn whole_device(&self, device: DeviceId) -> Option<Device> {
        self.members.device(device)?.whole()
    }

    /// What an administrator's request would come to; changes nothing.
    pub(super) fn would(&self, id: LaneId, request: &AdminRequest) -> Result<AdminOutcome, ReactorError> {
        self.check_serving(id)?.volume.would(request).map_err(ReactorError::Refused)
    }

    /// Only arrays that serve take administrators' requests.
    fn check_serving(&self, id: LaneId) -> Result<&Hosted, ReactorError> {
        self.get(id).filter(|array| array.is_serving()).ok_or(ReactorError::NoSuchArray)
    }

    fn admin_done(&mut self, id: LaneId, request: RequestId, result: Result<AdminOutcome, AdminRefusal>) {
        let result = result.map_err(ReactorError::Refused);
        if let Some((devices, reply)) = self.administration.end(request) {
            if result.is_err() {
                devices.into_iter().for_each(|device| self.release(id, device));
            }
            // The requester may have gone.
            let _ = reply.send(result);
        } else if self.get(id).is_some_and(|array| array.stopping.is_told()) {
            self.remove(id, result);
        }
    }
}

/// Stopping.
impl Arrays {
    /// Begins to stop an array; the reply comes when it has stopped.
    pub(super) fn begin_stop(&mut self, now: Timestamp, id: LaneId, reply: Option<Reply<AdminOutcome>>) {
        let Some(array) = self.get_mut(id) else {
            if let Some(reply) = reply {
                // The requester may have gone.
                let _ = reply.send(Err(ReactorError::NoSuchArray));
            }
            return;
        };
        array.listed.stop_serving();
        if array.stopping.ask(now, reply) {
            self.outcomes.push_back(Outcome::News(News::Leaves(id.array())));
        }
    }

    /// Begins to stop all arrays.
    pub(super) fn begin_stop_all(&mut self, now: Timestamp) {
        self.ids().into_iter().for_each(|id| self.begin_stop(now, id, None));
    }

    /// Moves the stops of arrays on to the next stage.
    pub(super) fn progress_stops(&mut self, ring: &mut Ring, now: Timestamp) {
        for id in self.ids() {
            let Some(hosted) = self.get_mut(id) else { continue };
            match hosted.stop_step(now) {
                StopStep::Nothing => {}
                StopStep::TellVolume => {
                    let request = self.administration.next_id();
                    self.step(ring, now, id, VolumeEvent::Admin(request, AdminRequest::Stop));
                }
                StopStep::GiveUp => self.give_up_stop(id),
            }
        }
    }

    /// Takes members that do not answer out of arrays that are being stopped.
    pub(super) fn leave_stragglers(&mut self, ring: &mut Ring, now: Timestamp) {
        for id in self.ids() {
            let Some(array) = self.get(id) else { continue };
            let Some(begun) = array.stopping.since() else { continue };
            let Stragglers { busy, idle, silence } = self.members.stragglers(id.number(), STRAGGLING);
            let silence = (silence.as_nanos() as u64).min(now.nanos_since(begun));
            if busy.is_empty() || silence < STRAGGLING.as_nanos() as u64 {
                continue;
            }
            let status = array.volume.status();
            // One that lacks room is idle between its tries, and has not got what the others have.
            let is_sound = |member: &&MemberStatus| {
                member.state == MemberState::Online && !member.conditions.iter().any(is_shortage)
            };
            let sound = status.members.iter().filter(is_sound).filter_map(|member| member.device);
            let spare = sound.filter(|device| idle.contains(device)).count();
            if spare >= usize::from(status.geometry.data) {
                for device in busy {
                    self.lose_device(ring, now, id, device);
                }
            } else if silence >= SILENCE_NANOS_MAX {
                self.give_up_stop(id);
            }
        }
    }

    /// Ends the stop of an array with the array as it is.
    fn give_up_stop(&mut self, id: LaneId) {
        let Some(array) = self.get_mut(id) else { return };
        array.stopping.give_up();
        let notice = ArrayNotice {
            kind: NoticeKind::NotStopped,
            level: NoticeLevel::Error,
            member: None,
            offset: None,
            text: ReactorError::NotStopped.to_string(),
        };
        self.notice(id, notice);
        self.remove(id, Err(ReactorError::NotStopped));
    }

    /// Takes a stopped array out of service.
    fn remove(&mut self, id: LaneId, result: Result<AdminOutcome, ReactorError>) {
        let Some(mut array) = self.hosted[id.number() as usize].take() else { return };
        self.directory.lane_is_gone(&array.listed);
        self.members.release_owner(id.number());
        // Requests that the volume never answered are lost with it, and so are their buffers.
        for Pending { requester, request, asked, part, charge, long, .. } in array.pending.drain() {
            let order = Order { requester, request, payload: None, asked, part, charge, long, sparse: false };
            self.outcomes.push_back(Outcome::Dropped { order, waited: None });
        }
        let waiting = array.order.into_waiting();
        let dropped = |(ticket, order)| Outcome::Dropped { order, waited: Some((id, ticket)) };
        self.outcomes.extend(waiting.map(dropped));
        self.outcomes.push_back(Outcome::News(News::Leaves(id.array())));
        self.administration.forget(id);
        let replies = array.stopping.into_replies();
        if let (Err(error), true) = (&result, replies.is_empty()) {
            let of_lane = match array.listed.cut().count() {
                1 => String::new(),
                _ => format!(", lane {}", id.lane()),
            };
            self.unclean.push(format!("array '{}'{of_lane}: {error}", array.listed.export().name));
        }
        let since = clock::now();
        self.departures.add(id, since, replies, result);
        self.answer_departed(since);
    }

    fn answer_departed(&mut self, now: Timestamp) {
        let members = &self.members;
        self.departures.answer(now, |lane| members.is_closing(Some(lane.number())));
    }

    /// The arrays that did not stop cleanly, and why.
    pub(super) fn take_unclean(&mut self) -> Vec<String> {
        std::mem::take(&mut self.unclean)
    }
}

/// Lists a device that any reactor may read.
fn share(members: &MemberIo, lane: &ListedLane, device: DeviceId) {
    if let Some(shared) = members.shared(device) {
        lane.devices().add(device, shared);
    }
}

/// Whether a notice reports the end of a pass that may have counted errors.
fn ends_pass(kind: NoticeKind) -> bool {
    use NoticeKind::{MemberRebuilt, MemberReplaced, RepairEnded, ScrubEnded};
    matches!(kind, ScrubEnded | RepairEnded | MemberRebuilt | MemberReplaced)
}
