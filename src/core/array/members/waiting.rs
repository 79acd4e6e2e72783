//! Requests of administrators that are answered later: pauses, members that go offline, and requests that the
//! superblocks must record first.
//!
//! Each waits for a limited time, and is then answered all the same. Must not know how a request is carried
//! out.

use crate::array::members::supers::Supers;
use crate::array::refusal::AdminRefusal;
use crate::array::{AdminOutcome, ArrayAction, Core, RequestId};
use crate::block_io::DeviceId;
use crate::units::{MemberIndex, Timestamp};
use uuid::Uuid;

/// How long a member that is to go offline waits for a checkpoint. A member that hangs may be the reason to
/// take it out.
pub(super) const DEPARTURE_PATIENCE_NS: u64 = 3_000_000_000;

/// How long the answer to a request that was carried out waits for the superblocks.
const RECORDING_PATIENCE_NS: u64 = 3_000_000_000;

/// Added to the answer where it has waited that long.
const NOT_RECORDED: &str =
    "; the members' superblocks do not say so yet: if the daemon is killed now, it may have to be done again";

/// How long the answer to a pause waits for the position of the scrub to be recorded.
const PAUSE_PATIENCE_NS: u64 = 2_000_000_000;

/// The answer for a scrub that is paused while its position cannot be recorded.
pub(super) const PAUSED_UNRECORDED: &str =
    "the scrub is paused; its position could not be recorded yet, and is lost if the daemon is killed";

/// Requests of administrators that are answered later.
#[derive(Default)]
pub(in crate::array) struct WaitingRequests {
    /// Requests to pause the scrub, whose position is not recorded yet, and since when they wait.
    pauses: Vec<(RequestId, Timestamp)>,
    /// Members that are to go offline, once their part of the log is in place.
    departures: Vec<Departure>,
    /// Answers that wait until an update of the superblocks that records the change is complete.
    recordings: Vec<Recording>,
}

/// A member that is to go offline.
struct Departure {
    id: RequestId,
    member: MemberIndex,
    /// The device that it had when the request came.
    device: Option<DeviceId>,
    /// How many checkpoints must have ended; none before the log is replayed.
    checkpoint: Option<u64>,
    since: Timestamp,
}

/// A member that has waited to go offline, and goes now.
// Plain data: given to the code that carries the request out.
pub(super) struct Due {
    pub id: RequestId,
    pub member: MemberIndex,
    /// The device that it had when the request came.
    pub device: Option<DeviceId>,
    /// Whether everything that the log held for it is in place.
    pub is_in_place: bool,
}

/// The answer to a request that was carried out, given when the superblocks record it.
struct Recording {
    id: RequestId,
    text: String,
    /// See `Supers::next_record`.
    record: (u64, u64),
    since: Timestamp,
    /// The device of a replacement. The request is refused if that is given up meanwhile.
    replacement: Option<(DeviceId, Uuid)>,
}

impl WaitingRequests {
    /// Has the answer wait until the superblocks record what was done.
    pub(super) fn record(
        &mut self,
        core: &Core,
        supers: &Supers,
        id: RequestId,
        text: String,
        replacement: Option<(DeviceId, Uuid)>,
    ) {
        let (record, since) = (supers.next_record(), core.now);
        self.recordings.push(Recording { id, text, record, since, replacement });
    }

    /// Answers requests that are recorded, or that have waited long enough for that; all, if `all`.
    pub(super) fn end_recordings(&mut self, core: &mut Core, supers: &Supers, all: bool) {
        for recording in std::mem::take(&mut self.recordings) {
            if let Some((device, uuid)) = recording.replacement
                && core.find_device(device).is_none()
            {
                let refusal = match core.knows(uuid) {
                    true => AdminRefusal::NewDeviceLeft,
                    false => AdminRefusal::ReplacementGivenUp,
                };
                core.admin_done(recording.id, Err(refusal));
                continue;
            }
            let is_recorded = supers.is_recorded(recording.record);
            let is_late = core.now.nanos_since(recording.since) >= RECORDING_PATIENCE_NS;
            if !all && !core.is_failed() && !is_late && !is_recorded {
                self.recordings.push(recording);
                continue;
            }
            let Recording { id, text, .. } = recording;
            let text = if is_recorded { text } else { text + NOT_RECORDED };
            core.admin_done(id, Ok(AdminOutcome(text)));
        }
    }

    /// Has a member go offline when this many checkpoints have ended. Where the number is not known, before
    /// the log is replayed, it is set later.
    pub(super) fn depart(
        &mut self,
        core: &Core,
        id: RequestId,
        member: MemberIndex,
        checkpoint: Option<u64>,
    ) {
        let (device, since) = (core.member(member).device.map(|device| device.id), core.now);
        self.departures.push(Departure { id, member, device, checkpoint, since });
    }

    /// Whether a member waits to go offline, and it is not known for which checkpoint.
    pub(super) fn lacks_checkpoint(&self) -> bool {
        self.departures.iter().any(|departure| departure.checkpoint.is_none())
    }

    /// Sets the number of checkpoints that must have ended for members that wait without one.
    pub(super) fn learn_checkpoint(&mut self, checkpoint: u64) {
        self.departures.iter_mut().for_each(|departure| _ = departure.checkpoint.get_or_insert(checkpoint));
    }

    /// Members that go offline now: everything that only the log held for them is in place, or that takes too
    /// long. `ended`: checkpoints that have ended.
    pub(super) fn due_departures(&mut self, core: &Core, ended: u64) -> Vec<Due> {
        let is_in_place =
            |departure: &Departure| departure.checkpoint.is_some_and(|checkpoint| ended >= checkpoint);
        let (is_failed, is_told) = (core.is_failed(), core.roster.exchanged.is_empty());
        let is_due = |departure: &mut Departure| {
            let is_late = core.now.nanos_since(departure.since) >= DEPARTURE_PATIENCE_NS;
            is_failed || is_late || (is_in_place(departure) && is_told)
        };
        let due = self.departures.extract_if(.., is_due);
        due.map(|departure| {
            let is_in_place = is_in_place(&departure);
            let Departure { id, member, device, .. } = departure;
            Due { id, member, device, is_in_place }
        })
        .collect()
    }

    /// Refuses all requests to take members offline, because the array stops.
    pub(super) fn refuse_departures(&mut self, core: &mut Core) {
        for departure in std::mem::take(&mut self.departures) {
            core.admin_done(departure.id, Err(AdminRefusal::Stopping));
        }
    }

    /// Has the answer to a pause of the scrub wait until its position is recorded: it then survives a kill.
    pub(super) fn pause(&mut self, core: &Core, id: RequestId) {
        self.pauses.push((id, core.now));
    }

    /// Whether a pause waits for its answer.
    pub(super) fn has_pauses(&self) -> bool {
        !self.pauses.is_empty()
    }

    /// Tick: answers pauses whose position cannot be recorded.
    pub(super) fn judge_pauses(&mut self, core: &mut Core) {
        let now = core.now;
        let is_late = |(_, since): &(RequestId, Timestamp)| now.nanos_since(*since) >= PAUSE_PATIENCE_NS;
        if core.is_failed() || self.pauses.iter().any(is_late) {
            self.end_pauses(core, PAUSED_UNRECORDED);
        }
    }

    /// Answers all pauses.
    pub(super) fn end_pauses(&mut self, core: &mut Core, text: &str) {
        for (id, _) in std::mem::take(&mut self.pauses) {
            core.admin_done(id, Ok(AdminOutcome(text.into())));
        }
    }
}

impl Core {
    /// Answers a request.
    pub(super) fn admin_done(&mut self, id: RequestId, result: Result<AdminOutcome, AdminRefusal>) {
        self.actions.push(ArrayAction::AdminDone(id, result));
    }
}
