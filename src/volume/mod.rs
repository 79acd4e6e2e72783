//! Volumes: what clients see, on top of an array's slots.
//!
//! This page holds the interface between a volume and whoever drives it (the daemon's reactor, or a test with
//! simulated members). A volume is sans-IO: events go in, actions come out, in one call of `step`; time and
//! seeds are arguments. It owns its array. Must not know of sockets, threads or paths.

mod api;
mod status;

pub use api::{
    AdminError, AdminOutcome, AdminRequest, ArrayNotice, ClientError, ClientReply, ClientRequest, NewDevice,
    NoticeLevel, RequestId, VolumeAction, VolumeEvent, VolumeExtent,
};
pub use status::{
    Activity, ActivityKind, ArrayState, MemberCounters, MemberStatus, ScrubResult, VolumeStatus,
};
