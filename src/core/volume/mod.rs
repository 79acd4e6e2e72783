//! Volumes: what clients see, on top of an array's slots.
//!
//! This file holds the interface between a volume and its driver (the daemon's reactor, or a test with
//! simulated members). A volume is sans-IO: events go in, and actions come out when it settles; time and
//! seeds are arguments. It owns its array. Must not know of sockets, threads or paths.

mod api;
#[allow(dead_code, unused_imports, reason = "under construction")]
mod cas;
mod cut;
mod driven;
mod gather;
mod lanes;
mod plain;
mod reply;

pub use crate::array::{
    Activity, ActivityKind, ArrayState, AskArray, Job, JobDone, LogState, MemberCondition, MemberCounters,
    MemberStatus, OpKey, Orphan, PlanExtent, PlannedPage, ReadPiece, ReadPlan, ReplacementStatus, Rest,
    STOPPED_CLEANLY, ScrubResult, Urgency, ViewReader, VolumeStatus, Work, WorkDone,
};
pub use api::{
    AdminOutcome, AdminRefusal, AdminRequest, ArrayAction, ArrayNotice, ClientError, ClientReply,
    ClientRequest, EndedRequest, Health, LetGo, NewDevice, NoticeKind, NoticeLevel, ReadRun,
    ReplacementOrder, ReplacementStep, RequestId, VolumeEvent, VolumeExtent, VolumeOutput,
};
pub use cas::{CasVolume, VOLUME_WINDOW_BITS};
pub use cut::{LaneCut, LanePiece};
pub use lanes::{
    Begun, Joined, LaneNotices, LaneRequest, LaneRequests, OutOfStep, PartId, WholeRequest, for_lane,
    merge_outcomes, merge_status, new_device_of, out_of_step, replacement_orders,
};
pub use plain::PlainVolume;

use crate::units::Timestamp;
use std::sync::Arc;

/// The most bytes of a request without payload, from its offset on, that one step should cover, so that the
/// step takes some tens of microseconds. The driver cuts the request there and asks again for the rest. Above
/// zero and at most the request's length; the whole length for a request that must be done or refused as a
/// whole. Any thread may ask.
pub type PartLen = Arc<dyn Fn(&ClientRequest) -> u64 + Send + Sync>;

/// A volume as its driver sees it.
pub trait Volume: Send {
    /// Takes an event. What comes of it, and of others that were taken before and after, comes out of
    /// [`Volume::settle`]; between the two, nothing but another event may follow.
    fn take(&mut self, now: Timestamp, event: VolumeEvent);

    /// Works until everything waits for something outside, and appends the replies and actions of all events
    /// since the last call to `out`.
    fn settle(&mut self, now: Timestamp, out: &mut VolumeOutput);

    /// Handles one event and appends its replies and actions to `out`.
    fn step(&mut self, now: Timestamp, event: VolumeEvent, out: &mut VolumeOutput) {
        self.take(now, event);
        self.settle(now, out);
    }

    /// How requests without payload are to be cut; see [`PartLen`].
    fn part_len(&self) -> PartLen;

    /// When [`VolumeEvent::Tick`] is due at the latest, if sooner than the interval stated there.
    fn due(&self) -> Option<Timestamp>;

    /// Changes whenever the lists of unreadable ranges change ([`VolumeStatus::lost`] and its like).
    fn damage_revision(&self) -> u64 {
        0
    }

    /// What an administrator's request would come to; nothing is changed.
    ///
    /// # Errors
    /// Why it would be refused.
    fn would(&self, request: &AdminRequest) -> Result<AdminOutcome, AdminRefusal>;

    /// For reads on other threads; none where they are not possible.
    fn view_reader(&self) -> Option<ViewReader> {
        None
    }

    /// The facts of the volume and its array.
    fn status(&self) -> VolumeStatus;
}
