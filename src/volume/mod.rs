//! Volumes: what clients see, on top of an array's slots.
//!
//! This page holds the interface between a volume and whoever drives it (the daemon's reactor, or a test with
//! simulated members). A volume is sans-IO: events go in, actions come out, in one call of `step`; time and
//! seeds are arguments. It owns its array. Must not know of sockets, threads or paths.

mod api;
mod status;

use crate::units::Timestamp;

pub use api::{
    AdminError, AdminOutcome, AdminRequest, ArrayNotice, ClientError, ClientReply, ClientRequest, NewDevice,
    NoticeLevel, RequestId, VolumeAction, VolumeEvent, VolumeExtent,
};
pub use status::{
    Activity, ActivityKind, ArrayState, MemberCounters, MemberStatus, ScrubResult, VolumeStatus,
};

/// A volume, as its driver sees it. The driver executes the actions in order and answers each operation, and
/// calls from one thread at a time.
pub trait Volume: Send {
    /// Takes an event that happened at `now` and appends what is to be done to `out`.
    fn step(&mut self, now: Timestamp, event: VolumeEvent, out: &mut Vec<VolumeAction>);

    /// What there is to say of it.
    fn status(&self) -> VolumeStatus;
}
