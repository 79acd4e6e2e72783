//! The reactor's arrays: adding, stepping, administrating and stopping them.
//!
//! Invariants: every action of a volume is executed in order; a device handed over with a refused request is
//! closed again; a stop ends within a bounded time. Must not know what volumes do.

use super::fence::Fenced;
use super::handle::{NewArray, ReactorError, Reply};
use super::long::Order;
use super::{AdminPending, ArrayId, BUSY_NANOS, Pending, Reactor};
use crate::member::{Device, Stragglers};
use crate::tls::PeerRules;
use calpe_core::block_io::{DeviceId, IoFault, IoFaultKind};
use calpe_core::format::MemberState;
use calpe_core::nbd::{BLOCK_BYTES_MAX, ExportInfo};
use calpe_core::units::Timestamp;
use calpe_core::volume::{
    AdminError, AdminOutcome, AdminRequest, ArrayNotice, ClientRequest, MemberCondition, NoticeKind,
    NoticeLevel, RequestId, Volume, VolumeAction, VolumeEvent, VolumeStatus,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How long client requests in flight may take when an array is stopped, in nanoseconds.
pub(super) const DRAIN_NANOS: u64 = 5_000_000_000;

/// How long a volume may take to stop, in nanoseconds: flushing slow disks takes a while, and a supervisor kills
/// after 90 s by default.
pub(super) const STOP_NANOS_MAX: u64 = 60_000_000_000;

/// When nothing of an array that is being stopped has ended for so long, in nanoseconds, members that hold it up while enough
/// others have nothing to do are left out. Disks that are all slow, or all spin up, have all the time of the stop.
const STRAGGLING_NANOS_MAX: u64 = 3_000_000_000;

/// The same where there are not enough others: then the array is left as it is, to be checked at the next start. With what
/// goes before and after, the daemon ends within ten seconds.
const SILENCE_NANOS_MAX: u64 = 7_000_000_000;

/// How long after it was asked for a stop may take where members lack room or resources, in nanoseconds: what is in the log then
/// may stay there, and is replayed at the next start.
const SHORT_NANOS_MAX: u64 = 9_000_000_000;

/// Ids of administrators' requests have this bit, those of clients do not.
const ADMIN_BIT: u64 = 1 << 63;

/// What clients did to an array since it was added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
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
pub struct ArrayFacts {
    /// What the volume says.
    pub status: VolumeStatus,
    /// Connections that chose it.
    pub clients: usize,
    /// What they did.
    pub traffic: Traffic,
    /// How often the reactor's loop has turned, whatever for.
    pub turns: u64,
}

/// An array in service.
pub(super) struct Hosted {
    name: String,
    volume: Box<dyn Volume>,
    pub(super) export: ExportInfo,
    /// Which certificates may use it; none: all.
    pub(super) rules: Option<Arc<PeerRules>>,
    life: Life,
    stopping_since: Option<Timestamp>,
    pub(super) traffic: Traffic,
    /// Client requests inside the volume.
    pub(super) in_flight: usize,
    /// Those of them that the volume has and that modify.
    pub(super) modifying: usize,
    /// Which of the requests waits for which.
    pub(super) order: super::order::Precedence<Fenced>,
    last_request: Timestamp,
    /// As of the last tick: something runs by itself.
    active: bool,
    stop_replies: Vec<Reply<AdminOutcome>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Serving,
    /// Waiting for client requests to end.
    Draining(Timestamp),
    /// The volume was told to stop.
    Stopping(Timestamp),
    /// The volume has stopped, or will never.
    Stopped,
}

impl Hosted {
    pub(super) fn is_busy(&self, now: Timestamp) -> bool {
        self.active
            || self.in_flight > 0
            || self.life != Life::Serving
            || now.nanos_since(self.last_request) < BUSY_NANOS
    }

    /// Whether some member lacks room or resources.
    fn is_short(&self) -> bool {
        let is_short = |condition: &MemberCondition| {
            matches!(condition, MemberCondition::Full | MemberCondition::ShortOfResources)
        };
        let serves = |state| matches!(state, MemberState::Online | MemberState::Rebuilding);
        let members = self.volume.status().members;
        members.iter().any(|member| serves(member.state) && member.conditions.iter().any(is_short))
    }

    pub(super) fn is_serving(&self) -> bool {
        self.life == Life::Serving
    }

    /// How much of a request is done at once, in bytes.
    pub(super) fn part_len(&self, request: &ClientRequest) -> u64 {
        self.volume.part_len(request)
    }

    /// When its volume wants a tick at the latest, if sooner than usual.
    pub(super) fn due(&self) -> Option<Timestamp> {
        if self.life == Life::Stopped { None } else { self.volume.due() }
    }
}

impl Reactor {
    pub(super) fn hosted(&mut self, id: ArrayId) -> Option<&mut Hosted> {
        self.arrays.get_mut(id.0 as usize)?.as_mut()
    }

    /// The array of an export that is being served.
    pub(super) fn array_of_export(&self, name: &str) -> Option<ArrayId> {
        let matches = |array: &Option<Hosted>| {
            array.as_ref().is_some_and(|array| array.is_serving() && array.export.name == name)
        };
        self.arrays.iter().position(matches).map(|index| ArrayId(index as u32))
    }

    pub(super) fn add_array(&mut self, id: ArrayId, array: NewArray) -> Result<(), ReactorError> {
        let NewArray { array, name, volume, devices, read_only, rules } = array;
        if self.stopping.is_some() {
            return Err(ReactorError::Gone);
        }
        if self.arrays.iter().flatten().any(|other| other.name == name) {
            return Err(ReactorError::NameTaken { name });
        }
        let geometry = volume.status().geometry;
        let export = ExportInfo {
            name: name.clone(),
            description: format!("Calpe array {}+{}, {array}", geometry.data, geometry.parity),
            size: geometry.volume_bytes,
            read_only,
            block_min: geometry.sector,
            block_preferred: geometry.chunk.max(geometry.sector).min(BLOCK_BYTES_MAX),
            block_max: BLOCK_BYTES_MAX,
            rotational: devices.iter().any(|(_, device)| device.facts().rotational),
            trim: true,
            write_zeroes: true,
            // Whole stripes of logged arrays; the volume refuses what it would have to write.
            fast_zero: true,
            multi_conn: true,
            cache: true,
        };
        export.check().map_err(|fault| ReactorError::Export { name: name.clone(), fault })?;
        for (device_id, device) in devices {
            self.members.add(&mut self.ring, device_id, id.0, device);
        }
        let index = id.0 as usize;
        if self.arrays.len() <= index {
            self.arrays.resize_with(index + 1, || None);
        }
        self.arrays[index] = Some(Hosted {
            name,
            volume,
            export,
            rules,
            life: Life::Serving,
            stopping_since: None,
            traffic: Traffic::default(),
            in_flight: 0,
            modifying: 0,
            order: Default::default(),
            last_request: self.now,
            active: true,
            stop_replies: Vec::new(),
        });
        // Assembly leaves things to do; the first tick starts them.
        self.step(id, VolumeEvent::Tick);
        Ok(())
    }

    pub(super) fn facts(&mut self, id: ArrayId) -> Result<ArrayFacts, ReactorError> {
        let clients = self.connections.iter().filter(|(_, c)| c.array == Some(id)).count();
        let turns = self.turns;
        let array = self.hosted(id).ok_or(ReactorError::NoSuchArray)?;
        Ok(ArrayFacts { status: array.volume.status(), clients, traffic: array.traffic, turns })
    }

    /// Lets a volume take an event and executes what it wants. Events of arrays that are gone are dropped.
    pub(super) fn step(&mut self, id: ArrayId, event: VolumeEvent) {
        let now = self.now;
        let mut actions = std::mem::take(&mut self.actions);
        let Some(array) = self.hosted(id) else {
            self.actions = actions;
            return;
        };
        match event {
            VolumeEvent::Client(..) => array.last_request = now,
            VolumeEvent::Tick => {
                let status = array.volume.status();
                array.active =
                    status.dirty || status.activities.iter().any(|activity| activity.rest.is_none());
            }
            _ => {}
        }
        let before = array.volume.damage_revision();
        array.volume.step(now, event, &mut actions);
        if array.volume.damage_revision() != before {
            self.mailbox.findings.ring();
        }
        let jobs = actions.iter().filter(|action| matches!(action, VolumeAction::Code(_))).count();
        for action in actions.drain(..) {
            match action {
                VolumeAction::Code(job) => self.jobs.submit(id, job, jobs == 1),
                VolumeAction::Io { device, token, op } => {
                    self.members.submit(&mut self.ring, id.0, device, token, op);
                }
                VolumeAction::ClientDone(request, result) => self.client_done(request, result),
                VolumeAction::AdminDone(request, result) => self.admin_done(id, request, result),
                VolumeAction::Release(device) => self.members.release(device),
                VolumeAction::Notice(notice) => self.notice(id, notice),
                VolumeAction::WritesLost => {
                    let clients = self.connections.iter_mut().filter(|(_, client)| client.array == Some(id));
                    clients.for_each(|(_, client)| client.lost_writes = true);
                }
            }
        }
        self.actions = actions;
    }

    pub(super) fn admin_request(
        &mut self,
        id: ArrayId,
        request: AdminRequest,
        devices: Vec<(DeviceId, Device)>,
        reply: Reply<AdminOutcome>,
    ) {
        if self.hosted(id).is_none_or(|array| !array.is_serving()) {
            // Nobody may be waiting any more.
            let _ = reply.send(Err(ReactorError::NoSuchArray));
            return;
        }
        let ids = devices.iter().map(|(device_id, _)| *device_id).collect();
        for (device_id, device) in devices {
            self.members.add(&mut self.ring, device_id, id.0, device);
        }
        let request_id = self.next_admin_id();
        self.admin.insert(request_id, AdminPending { array: id, devices: ids, reply });
        self.step(id, VolumeEvent::Admin(request_id, request));
    }

    /// What would become of an administrator's request.
    pub(super) fn check_request(
        &mut self,
        id: ArrayId,
        request: &AdminRequest,
    ) -> Result<AdminOutcome, ReactorError> {
        let array = self.hosted(id).filter(|array| array.is_serving()).ok_or(ReactorError::NoSuchArray)?;
        array.volume.check(request).map_err(ReactorError::Refused)
    }

    /// Tells volumes of members that are gone.
    pub(super) fn report_vanished(&mut self) {
        for (owner, device, fault) in self.members.vanished() {
            self.step(ArrayId(owner), VolumeEvent::DeviceGone(device, fault));
        }
    }

    /// Starts to stop an array; the reply comes when it is done.
    pub(super) fn begin_stop(&mut self, id: ArrayId, reply: Option<Reply<AdminOutcome>>) {
        let now = self.now;
        let Some(array) = self.hosted(id) else {
            if let Some(reply) = reply {
                // Nobody may be waiting any more.
                let _ = reply.send(Err(ReactorError::NoSuchArray));
            }
            return;
        };
        array.stop_replies.extend(reply);
        if array.life != Life::Serving {
            return;
        }
        array.life = Life::Draining(now);
        array.stopping_since = Some(now);
        self.close_clients_of(id);
    }

    /// Moves arrays that are being stopped on to the next stage.
    pub(super) fn progress_stops(&mut self) {
        for index in 0..self.arrays.len() {
            let id = ArrayId(index as u32);
            let now = self.now;
            let Some(array) = self.hosted(id) else { continue };
            match array.life {
                Life::Serving => {}
                Life::Draining(since) => {
                    if array.in_flight == 0 || now.nanos_since(since) > DRAIN_NANOS {
                        array.life = Life::Stopping(now);
                        let request = self.next_admin_id();
                        self.step(id, VolumeEvent::Admin(request, AdminRequest::Stop));
                    }
                }
                Life::Stopping(since) => {
                    let is_late =
                        array.stopping_since.is_some_and(|begun| now.nanos_since(begun) > SHORT_NANOS_MAX);
                    if now.nanos_since(since) > STOP_NANOS_MAX || (is_late && array.is_short()) {
                        self.give_up_stop(id);
                    }
                }
                Life::Stopped => {}
            }
        }
    }

    /// Lets arrays that are being stopped go on without members that do not answer.
    pub(super) fn leave_stragglers(&mut self) {
        for index in 0..self.arrays.len() {
            let (id, now) = (ArrayId(index as u32), self.now);
            let Some(array) = self.hosted(id) else { continue };
            let Some(begun) = array.stopping_since else { continue };
            let needed = usize::from(array.volume.status().geometry.data);
            let Stragglers { busy, idle, silence } = self.members.stragglers(id.0);
            let silence = (silence.as_nanos() as u64).min(now.nanos_since(begun));
            if busy.is_empty() || silence < STRAGGLING_NANOS_MAX {
                continue;
            }
            if idle >= needed {
                for device in busy {
                    let fault = IoFault { kind: IoFaultKind::Gone, errno: libc::ETIMEDOUT };
                    self.step(id, VolumeEvent::DeviceGone(device, fault));
                }
            } else if silence >= SILENCE_NANOS_MAX {
                self.give_up_stop(id);
            }
        }
    }

    /// An array is left as it is.
    fn give_up_stop(&mut self, id: ArrayId) {
        let Some(array) = self.hosted(id) else { return };
        array.life = Life::Stopped;
        let text = "the array did not stop in time: it will be checked at the next start";
        self.notice(
            id,
            ArrayNotice {
                kind: NoticeKind::NotStopped,
                level: NoticeLevel::Error,
                member: None,
                offset: None,
                text: text.into(),
            },
        );
        self.remove_array(id, Err(AdminError(text.into())));
    }

    fn admin_done(&mut self, id: ArrayId, request: RequestId, result: Result<AdminOutcome, AdminError>) {
        if let Some(pending) = self.admin.remove(&request) {
            if result.is_err() {
                pending.devices.iter().for_each(|device| self.members.release(*device));
            }
            // Nobody may be waiting any more.
            let _ = pending.reply.send(result.map_err(ReactorError::Refused));
        } else if self.hosted(id).is_some_and(|array| matches!(array.life, Life::Stopping(_))) {
            self.remove_array(id, result);
        }
    }

    /// Takes a stopped array out of service.
    fn remove_array(&mut self, id: ArrayId, result: Result<AdminOutcome, AdminError>) {
        let Some(array) = self.arrays[id.0 as usize].take() else { return };
        self.members.release_owner(id.0);
        // Requests that the volume never answered, and their buffers, went with it.
        let lost: Vec<usize> =
            self.requests.iter().filter(|(_, pending)| pending.array == id).map(|(key, _)| key).collect();
        for key in lost {
            let pending = self.requests.remove(key);
            if pending.request.command.modifies() {
                self.modifies_less(pending.connection, id, &pending.request, pending.ticket);
            }
            let (key, Pending { request, charge, long, .. }) = (pending.connection, pending);
            self.connections[key].in_flight -= 1;
            self.drop_order(key, Order { request, payload: None, charge, long });
        }
        self.drop_fenced(array.order.into_waiting());
        self.close_clients_of(id);
        self.admin.retain(|_, pending| pending.array != id);
        if let (Err(error), true) = (&result, array.stop_replies.is_empty()) {
            self.unclean.push(format!("array '{}': {error}", array.name));
        }
        for reply in array.stop_replies {
            // Nobody may be waiting any more.
            let _ = reply.send(result.clone().map_err(ReactorError::Refused));
        }
    }

    fn notice(&mut self, id: ArrayId, notice: ArrayNotice) {
        let events = self.events.clone();
        if ends_pass(notice.kind) {
            self.mailbox.passes_ended.fetch_add(1, Ordering::SeqCst);
            self.mailbox.findings.ring();
        }
        if let Some(array) = self.hosted(id) {
            events.push(&array.name, notice);
        }
    }

    fn next_admin_id(&mut self) -> RequestId {
        self.next_admin += 1;
        RequestId(ADMIN_BIT | self.next_admin)
    }
}

/// Whether a notice tells of the end of a pass that may have counted errors.
fn ends_pass(kind: NoticeKind) -> bool {
    use NoticeKind::{MemberRebuilt, MemberReplaced, RepairEnded, ScrubEnded};
    matches!(kind, ScrubEnded | RepairEnded | MemberRebuilt | MemberReplaced)
}
