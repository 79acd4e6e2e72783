//! The base of all machines of the array: its shape, its members, operations in flight, the queues of those
//! that wait, and requests to its caller.
//!
//! Invariants: an operation that is ready or granted a lock is advanced before the array's call returns. Must
//! not know of batches, pages, passes or administrators.

pub(in crate::array) mod inflight;
mod jobs;
pub(in crate::array) mod lock;
pub(in crate::array) mod members;
pub(in crate::array) mod pace;
pub(in crate::array) mod proofs;
pub(in crate::array) mod shortage;

use crate::array::base::inflight::{Inflight, InflightTable};
use crate::array::base::lock::{LockKey, LockTable};
use crate::array::base::members::{Census, Member, Replaced};
use crate::array::base::shortage::Shortages;
use crate::array::geometry::Map;
use crate::array::{
    ArrayAction, ArrayConfig, ArrayNotice, ClientError, Effect, EndedRequest, NoticeKind, NoticeLevel, Owner,
    Stopping, StripeReply, StripeRequestId,
};
use crate::block_io::{DeviceId, IoOp, Pool};
use crate::codec::{Codec, Transform};
use crate::format::{Geometry, MemberSet};
use crate::units::{ByteOffset, ColumnIndex, MemberIndex, SlotIndex, Timestamp, VolumeOffset};
use std::collections::VecDeque;

/// See the head of this file.
pub(super) struct Core {
    pub(super) map: Map,
    /// Facts about an array that never change, except for its map.
    pub(in crate::array) shape: Shape,
    pub(super) pool: Pool,
    pub(super) config: ArrayConfig,
    pub(super) now: Timestamp,
    /// The members, and devices that leave.
    pub(in crate::array) roster: Roster,
    pub(super) inflight: InflightTable,
    /// Operations in flight that are tried again.
    pub(super) shortages: Shortages,
    /// How long operations on the members take.
    pub(super) paces: pace::Paces,
    /// Operations that are ready, and those that wait for something other than I/O.
    pub(in crate::array) work: WorkQueues,
    pub(super) locks: LockTable,
    /// The work of clients and jobs under way, and when there last was some.
    pub(in crate::array) load: Load,
    /// How far a stop has come.
    pub(in crate::array) stop: StopState,
    pub(super) actions: Vec<ArrayAction>,
    /// Ends of slot requests that the volume has not taken yet.
    pub(in crate::array) ended_requests: VecDeque<EndedRequest>,
}

/// Facts about an array that never change, except for its map.
pub(in crate::array) struct Shape {
    pub(in crate::array) geometry: Geometry,
    pub(in crate::array) data_offset: ByteOffset,
    pub(in crate::array) codec: Codec,
    /// Computes all parities from all data columns.
    pub(in crate::array) encoding: Transform,
}

/// The members, and devices that leave.
pub(in crate::array) struct Roster {
    pub(in crate::array) members: Vec<Member>,
    /// Counts of them, see [`Core::count_members`].
    pub(in crate::array) census: Census,
    /// Whether they have changed, and readers on other threads were not shown it yet.
    pub(in crate::array) has_changed: bool,
    /// Members that were in service when the array failed: nothing was written without them.
    pub(in crate::array) returnable: MemberSet,
    pub(in crate::array) releasing: Vec<DeviceId>,
    /// Devices that were replaced, until that is recorded on disk.
    pub(in crate::array) exchanged: Vec<Replaced>,
}

/// Operations that are ready, and those that wait for something other than I/O.
pub(in crate::array) struct WorkQueues {
    pub(in crate::array) ready: VecDeque<usize>,
    pub(in crate::array) granted: Vec<usize>,
    pub(in crate::array) ended: Vec<usize>,
    /// Operations that wait for the gate to open before they touch a member.
    pub(in crate::array) gated: Vec<usize>,
    /// Operations that wait until a time, and then read again what could not be read.
    pub(in crate::array) patient: Vec<(Timestamp, usize)>,
}

/// The work of clients and jobs under way, and when there last was some.
pub(in crate::array) struct Load {
    /// Jobs given away and not answered.
    pub(in crate::array) jobs_out: usize,
    pub(in crate::array) client_ops: usize,
    pub(in crate::array) last_client: Timestamp,
    pub(in crate::array) write_ops: usize,
    pub(in crate::array) last_write: Timestamp,
}

/// How far a stop has come.
pub(in crate::array) struct StopState {
    pub(in crate::array) stopping: Option<Stopping>,
    /// Whether a stop is near, so that nothing waits for a fault to pass any more.
    pub(in crate::array) hurried: bool,
    /// When the stop was asked for.
    pub(in crate::array) stop_begun: Option<Timestamp>,
}

impl Core {
    pub(super) fn submit_io(&mut self, owner: Owner, member: MemberIndex, device: DeviceId, op: IoOp) {
        let effect = match op {
            IoOp::Write { .. } | IoOp::Zero { .. } => Effect::Write,
            IoOp::Flush => Effect::Flush(self.device_mut(member, device).map_or(0, |d| d.writes)),
            IoOp::Read { .. } | IoOp::Extents { .. } => Effect::None,
        };
        let is_written_back = matches!(owner, Owner::Page(_)) && effect == Effect::Write;
        let may_wait = is_written_back || matches!(owner, Owner::InPlace | Owner::Punch);
        let token = self.inflight.insert(Inflight { owner, member, device, effect }, &op, self.now);
        self.actions.push(ArrayAction::Io { device, token, op, may_wait });
    }

    /// The member that has a column of a slot.
    pub(in crate::array) fn member_at(&self, slot: SlotIndex, column: usize) -> MemberIndex {
        self.map.member_of(slot, ColumnIndex(column as u16))
    }

    /// Ends a request of the volume.
    pub(super) fn done(&mut self, id: StripeRequestId, result: Result<StripeReply, ClientError>) {
        self.ended_requests.push_back((id, result));
    }

    pub(super) fn unlock(&mut self, lock: LockKey, key: usize) {
        self.locks.release(lock, key, &mut self.work.granted);
        self.work.ready.extend(self.work.granted.drain(..));
    }

    pub(super) fn notice(
        &mut self,
        kind: NoticeKind,
        level: NoticeLevel,
        member: Option<MemberIndex>,
        text: String,
    ) {
        self.actions.push(ArrayAction::Notice(ArrayNotice { kind, level, member, offset: None, text }));
    }

    /// As [`Core::notice`], about a place of the volume.
    pub(super) fn notice_at(
        &mut self,
        kind: NoticeKind,
        level: NoticeLevel,
        offset: VolumeOffset,
        text: String,
    ) {
        let offset = Some(offset);
        self.actions.push(ArrayAction::Notice(ArrayNotice { kind, level, member: None, offset, text }));
    }
}
