//! The vocabulary between the daemon and the programs that administer it: requests, replies,
//! status, events.
//!
//! On the wire each message is one line of JSON over a unix socket; a client sends a request and
//! reads one reply line before it sends the next. The names of the fields of [`Status`] are what
//! `calpe status --json` prints: a contract with scripts, versioned by [`OUTPUT_VERSION`]. Pure
//! types and rules: must not know sockets, threads, clocks or terminals, nor the layers that the
//! facts come from (the daemon translates).

mod certificate;
mod engine;
mod reply;
mod request;
mod status;
mod verdict;
mod wire;

pub use certificate::{CertificateReport, CertificateRole, CertificateState};
pub use engine::{EngineReport, GpuCrossover, GpuDecisions, GpuDeviceReport, GpuReport};
pub use reply::{ErrorCode, Event, Importable, ImportableMember, Pong, Reply, RequestError, Severity};
pub use request::{GpuDrill, MemberRef, Request, ScrubAction};
#[cfg(test)]
pub(crate) use status::tests::running;
pub use status::{
    ArrayReport, ArrayState, Condition, ErrorReport, LastScrub, LogReport, LogState, LostReport,
    MemberReport, MemberState, OUTPUT_VERSION, PageCacheReport, ReplacementReport, ScanKind, ScanReport,
    ScanState, StartReport, Status, VolumeReport,
};
pub(crate) use verdict::{Verdict, explain, is_healthy, verdict};
pub use wire::{MAX_REPLY_BYTES, MAX_REQUEST_BYTES, WireError, read_message, write_message};

/// Version of this vocabulary. A daemon refuses a client of another version, and names both
/// versions.
pub const PROTOCOL_VERSION: u32 = 2;
