//! The stages of a log's life.

use crate::format::LogStart;

/// See the head of this file.
pub(in crate::array) enum Life {
    /// Nothing is known of it yet; it waits until the epoch is complete and nothing is in flight.
    Starting,
    /// It is being replayed, or only judged.
    Recovering,
    /// It was replayed; it waits until the superblocks say where it starts now (R9).
    Marking(LogStart),
    Serving,
    /// It cannot be served; the reason was reported.
    Refused(String),
}
