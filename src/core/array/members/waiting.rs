//! Requests of administrators that are answered later: pauses, members that go offline, and whatever the superblocks are to tell
//! of first.
//!
//! Each waits for a while at most, and is then answered all the same. Must not know how a request is carried out.

use crate::array::members::supers::Supers;
use crate::array::refusal::AdminRefusal;
use crate::array::{AdminOutcome, ArrayAction, Core, RequestId};
use crate::block_io::DeviceId;
use crate::units::{MemberIndex, Timestamp};
use uuid::Uuid;

/// How long a member that is to go offline waits for a checkpoint. One that hangs may be the reason to take it out.
pub(super) const DEPARTURE_PATIENCE_NS: u64 = 3_000_000_000;

/// How long the answer to a request that is carried out waits for the superblocks.
const RECORDING_PATIENCE_NS: u64 = 3_000_000_000;

/// Said where it has waited so long.
const NOT_RECORDED: &str =
    "; the members' superblocks do not say so yet: if the daemon is killed now, it may have to be done again";

/// How long the answer to a pause waits for the position of the scrub to be recorded.
const PAUSE_PATIENCE_NS: u64 = 2_000_000_000;

/// Said of a scrub that is paused while its position cannot be recorded.
pub(super) const PAUSED_UNRECORDED: &str =
    "the scrub is paused; its position could not be recorded yet, and is lost if the daemon is killed";

/// Requests of administrators that are answered later.
#[derive(Default)]
pub(in crate::array) struct WaitingRequests {
    /// To pause the scrub, whose position is not recorded yet, and since when.
    pauses: Vec<(RequestId, Timestamp)>,
    /// To take members offline, which go when the log is in its place.
    departures: Vec<Departure>,
    /// Answers that wait until an update of the superblocks that tells of them is complete.
    recordings: Vec<Recording>,
}

/// A member that is to go offline.
struct Departure {
    id: RequestId,
    member: MemberIndex,
    /// The one that it has.
    device: Option<DeviceId>,
    /// Checkpoints that must have ended; none before the log is replayed.
    checkpoint: Option<u64>,
    since: Timestamp,
}

/// A member that has waited to go offline, and goes now.
// Plain data: handed to what carries the request out.
pub(super) struct Due {
    pub id: RequestId,
    pub member: MemberIndex,
    /// The device that it had when it was asked to.
    pub device: Option<DeviceId>,
    /// What the log had for it is in its place.
    pub is_in_place: bool,
}

/// The answer to a request that is carried out, and that is given when the superblocks say so.
struct Recording {
    id: RequestId,
    text: String,
    /// See `Supers::next_record`.
    record: (u64, u64),
    since: Timestamp,
    /// The device of a replacement, which nothing comes of when it is given up meanwhile.
    replacement: Option<(DeviceId, Uuid)>,
}

impl WaitingRequests {
    /// The answer waits until the superblocks tell of what was done.
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

    /// Answers requests that are recorded, or that waited for that for long enough; all, if `all`.
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

    /// A member is to go offline when so many checkpoints have ended; where that is not known before the log is replayed, it is
    /// learnt later.
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

    /// Whether a member is to go offline and it is not known which checkpoint it waits for.
    pub(super) fn lacks_checkpoint(&self) -> bool {
        self.departures.iter().any(|departure| departure.checkpoint.is_none())
    }

    /// Members that wait for a checkpoint that was not known wait until so many have ended.
    pub(super) fn learn_checkpoint(&mut self, checkpoint: u64) {
        self.departures.iter_mut().for_each(|departure| _ = departure.checkpoint.get_or_insert(checkpoint));
    }

    /// Members that go offline now: what they have in the log alone is in its place, or that takes too long. `ended`: checkpoints
    /// that have.
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

    /// No member goes offline any more: the array stops.
    pub(super) fn refuse_departures(&mut self, core: &mut Core) {
        for departure in std::mem::take(&mut self.departures) {
            core.admin_done(departure.id, Err(AdminRefusal::Stopping));
        }
    }

    /// The answer to a pause of the scrub waits until its position is recorded: it then survives a kill.
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
