//! What every machine of the array stands on: its shape, its members, what is in flight, who waits for what, and what it asks of
//! its caller.
//!
//! Invariants: an operation that is ready or granted a lock is advanced before the array's call returns. Must not know of batches,
//! pages, passes or administrators.

pub(in crate::array) mod inflight;
pub(in crate::array) mod lock;
pub(in crate::array) mod members;
pub(in crate::array) mod pace;
pub(in crate::array) mod shortage;

use crate::array::base::inflight::{Inflight, InflightTable};
use crate::array::base::lock::LockTable;
use crate::array::base::members::{Census, Member, Replaced};
use crate::array::base::shortage::Shortages;
use crate::array::geometry::Map;
use crate::array::{
    ArrayAction, ArrayConfig, ArrayNotice, ClientError, Effect, EndedPiece, NoticeKind, NoticeLevel, Owner,
    PieceId, SlotReply, Stopping,
};
use crate::block_io::{DeviceId, IoOp, Pool};
use crate::codec::{Codec, Transform};
use crate::format::{Geometry, MemberSet};
use crate::units::{ByteOffset, MemberIndex, SlotIndex, Timestamp, VolumeOffset};
use std::collections::VecDeque;

/// See the head of this file.
pub(super) struct Core {
    pub(super) map: Map,
    pub(super) geometry: Geometry,
    pub(super) data_offset: ByteOffset,
    pub(super) codec: Codec,
    /// All parities from all data columns.
    pub(super) encoding: Transform,
    pub(super) pool: Pool,
    pub(super) config: ArrayConfig,
    pub(super) now: Timestamp,
    pub(super) members: Vec<Member>,
    /// Counts of them, see [`Core::count_members`].
    pub(super) census: Census,
    pub(super) inflight: InflightTable,
    /// Operations in flight that are tried again.
    pub(super) shortages: Shortages,
    /// What operations on the members take.
    pub(super) paces: pace::Paces,
    pub(super) ready: VecDeque<usize>,
    pub(super) granted: Vec<usize>,
    pub(super) ended: Vec<usize>,
    pub(super) locks: LockTable,
    /// Operations that wait for the gate to open before they touch a member.
    pub(super) gated: Vec<usize>,
    /// Members that were in service when the array failed: nothing was written without them.
    pub(super) returnable: MemberSet,
    pub(super) releasing: Vec<DeviceId>,
    /// Devices that were replaced, until that is on disk.
    pub(super) exchanged: Vec<Replaced>,
    /// Jobs given away and not answered.
    pub(super) jobs_out: usize,
    pub(super) client_ops: usize,
    pub(super) last_client: Timestamp,
    pub(super) write_ops: usize,
    pub(super) last_write: Timestamp,
    pub(super) stopping: Option<Stopping>,
    /// A stop is near: nothing waits for a fault to pass any more.
    pub(super) hurried: bool,
    /// When the stop was asked for.
    pub(super) stop_begun: Option<Timestamp>,
    /// Operations that wait until a time before they read again what could not be read.
    pub(super) patient: Vec<(Timestamp, usize)>,
    pub(super) actions: Vec<ArrayAction>,
    /// Ends of slot requests that the volume has not taken yet.
    pub(in crate::array) ended_pieces: VecDeque<EndedPiece>,
}

impl Core {
    pub(super) fn submit_io(&mut self, owner: Owner, member: MemberIndex, device: DeviceId, op: IoOp) {
        let effect = match op {
            IoOp::Write { .. } | IoOp::Zero { .. } => Effect::Write,
            IoOp::Flush => Effect::Flush(self.device_mut(member, device).map_or(0, |d| d.writes)),
            IoOp::Read { .. } | IoOp::Extents { .. } => Effect::None,
        };
        let token = self.inflight.insert(Inflight { owner, member, device, effect }, &op, self.now);
        self.actions.push(ArrayAction::Io { device, token, op });
    }

    /// Ends a request towards the volume.
    pub(super) fn done(&mut self, piece: PieceId, result: Result<SlotReply, ClientError>) {
        self.ended_pieces.push_back((piece, result));
    }

    pub(super) fn unlock(&mut self, slot: SlotIndex, key: usize) {
        self.locks.release(slot, key, &mut self.granted);
        self.ready.extend(self.granted.drain(..));
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
