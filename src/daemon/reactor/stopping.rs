//! The stages of an array's stop, from serving to stopped. Must not know volumes.

use super::mailbox::Reply;
use calpe_core::units::Timestamp;
use calpe_core::volume::AdminOutcome;

/// How long client requests in flight may take once an array is to stop, in nanoseconds.
pub(super) const DRAIN_NANOS: u64 = 5_000_000_000;

/// How long a volume may take to stop, in nanoseconds: flushing slow disks takes a while, and a supervisor
/// kills after 90 s by default.
pub(super) const STOP_NANOS_MAX: u64 = 60_000_000_000;

/// Limit for a whole stop, from the request for it, while members lack room or resources, in nanoseconds:
/// what is in the log then stays there and is replayed at the next start.
const SHORT_NANOS_MAX: u64 = 9_000_000_000;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Stopping {
    life: Life,
    /// When the stop was requested.
    since: Option<Timestamp>,
    /// Requesters that wait for the end of the stop.
    replies: Vec<Reply<AdminOutcome>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Serving,
    /// Waiting for client requests to end.
    Draining(Timestamp),
    /// The volume was told to stop.
    Stopping(Timestamp),
    /// The volume has stopped, or was given up.
    Stopped,
}

/// What the caller has to do for a stop now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopStep {
    /// Nothing: the stop goes on by itself, or none was requested.
    Nothing,
    /// The volume is to stop now.
    TellVolume,
    /// Give the volume up: its stop takes too long.
    GiveUp,
}

impl Stopping {
    /// An array that serves.
    pub(super) fn new() -> Stopping {
        Stopping { life: Life::Serving, since: None, replies: Vec::new() }
    }

    pub(super) fn is_serving(&self) -> bool {
        self.life == Life::Serving
    }

    /// Whether the volume was told to stop and has not stopped yet.
    pub(super) fn is_told(&self) -> bool {
        matches!(self.life, Life::Stopping(_))
    }

    /// Whether the volume has stopped or was given up.
    pub(super) fn is_over(&self) -> bool {
        self.life == Life::Stopped
    }

    /// When the stop was requested.
    pub(super) fn since(&self) -> Option<Timestamp> {
        self.since
    }

    /// Requests the stop. Returns true for the first request.
    pub(super) fn ask(&mut self, now: Timestamp, reply: Option<Reply<AdminOutcome>>) -> bool {
        self.replies.extend(reply);
        if !self.is_serving() {
            return false;
        }
        self.life = Life::Draining(now);
        self.since = Some(now);
        true
    }

    /// Moves on to the next stage. `is_short`: whether members lack room or resources.
    pub(super) fn step(
        &mut self,
        now: Timestamp,
        in_flight: usize,
        is_short: impl FnOnce() -> bool,
    ) -> StopStep {
        match self.life {
            Life::Draining(since) if in_flight == 0 || now.nanos_since(since) > DRAIN_NANOS => {
                self.life = Life::Stopping(now);
                StopStep::TellVolume
            }
            Life::Stopping(since) => {
                let is_late = self.since.is_some_and(|begun| now.nanos_since(begun) > SHORT_NANOS_MAX);
                let is_over = now.nanos_since(since) > STOP_NANOS_MAX || (is_late && is_short());
                if is_over { StopStep::GiveUp } else { StopStep::Nothing }
            }
            Life::Serving | Life::Draining(_) | Life::Stopped => StopStep::Nothing,
        }
    }

    /// Ends the stop with the volume as it is.
    pub(super) fn give_up(&mut self) {
        self.life = Life::Stopped;
    }

    /// Requesters that wait for the end of the stop.
    pub(super) fn into_replies(self) -> Vec<Reply<AdminOutcome>> {
        self.replies
    }
}
