//! Lanes that have stopped while other reactors were still reading their devices, and who waits for the end
//! of that. Must not know what is read.

use super::error::ReactorError;
use super::mailbox::Reply;
use super::orders::LaneId;
use calpe_core::units::Timestamp;
use calpe_core::volume::AdminOutcome;

/// How long the answer to a stop waits for reads of other reactors, in nanoseconds.
const WAIT_NANOS_MAX: u64 = 2_000_000_000;

/// See the head of this file.
#[derive(Default)]
pub(super) struct Departures {
    all: Vec<Departing>,
}

/// A stopped lane that is not quite gone.
struct Departing {
    lane: LaneId,
    since: Timestamp,
    replies: Vec<Reply<AdminOutcome>>,
    result: Result<AdminOutcome, ReactorError>,
}

impl Departures {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// A lane has stopped, with this result.
    pub(super) fn add(
        &mut self,
        lane: LaneId,
        since: Timestamp,
        replies: Vec<Reply<AdminOutcome>>,
        result: Result<AdminOutcome, ReactorError>,
    ) {
        self.all.push(Departing { lane, since, replies, result });
    }

    /// Answers those who wait for the end of lanes whose devices nobody reads any more. `is_closing`: whether
    /// somebody still does.
    pub(super) fn answer(&mut self, now: Timestamp, is_closing: impl Fn(LaneId) -> bool) {
        let has_gone = |departing: &mut Departing| {
            now.nanos_since(departing.since) > WAIT_NANOS_MAX || !is_closing(departing.lane)
        };
        for Departing { replies, result, .. } in self.all.extract_if(.., has_gone) {
            for reply in replies {
                // The requester may have gone.
                let _ = reply.send(result.clone());
            }
        }
    }
}
