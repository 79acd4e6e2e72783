//! Where a log is in its life.

use crate::format::LogStart;

/// See the head of this file.
pub(in crate::array) enum Life {
    /// Nothing is known of it; waits until the epoch is complete and nothing is in flight.
    Starting,
    /// Being replayed, or only judged.
    Recovering,
    /// Replayed; waits until the superblocks say where it starts now (R9).
    Marking(LogStart),
    Serving,
    /// It cannot be served; the reason was told.
    Refused(String),
}
