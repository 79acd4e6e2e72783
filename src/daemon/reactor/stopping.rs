//! How far an array has come towards its stop, from serving on. Must not know volumes.

use super::mailbox::Reply;
use calpe_core::units::Timestamp;
use calpe_core::volume::AdminOutcome;

/// How long client requests in flight may take when an array is stopped, in nanoseconds.
pub(super) const DRAIN_NANOS: u64 = 5_000_000_000;

/// How long a volume may take to stop, in nanoseconds: flushing slow disks takes a while, and a supervisor kills
/// after 90 s by default.
pub(super) const STOP_NANOS_MAX: u64 = 60_000_000_000;

/// How long after it was asked for a stop may take where members lack room or resources, in nanoseconds: what is in the log then
/// may stay there, and is replayed at the next start.
const SHORT_NANOS_MAX: u64 = 9_000_000_000;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Stopping {
    life: Life,
    /// When it was asked for.
    since: Option<Timestamp>,
    /// Those who wait for it.
    replies: Vec<Reply<AdminOutcome>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Serving,
    /// Waiting for client requests to end.
    Draining(Timestamp),
    /// The volume was told to stop.
    Stopping(Timestamp),
    /// The volume has stopped, or will never.
    Stopped,
}

/// What a stop has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopStep {
    /// It goes on, or was not asked for.
    Nothing,
    /// The volume is to stop now.
    TellVolume,
    /// It takes too long.
    GiveUp,
}

impl Stopping {
    /// Not asked for.
    pub(super) fn new() -> Stopping {
        Stopping { life: Life::Serving, since: None, replies: Vec::new() }
    }

    pub(super) fn is_serving(&self) -> bool {
        self.life == Life::Serving
    }

    /// Whether the volume was told to stop, and has not.
    pub(super) fn is_told(&self) -> bool {
        matches!(self.life, Life::Stopping(_))
    }

    /// Whether the volume has stopped, or will never.
    pub(super) fn is_over(&self) -> bool {
        self.life == Life::Stopped
    }

    /// When it was asked for.
    pub(super) fn since(&self) -> Option<Timestamp> {
        self.since
    }

    /// Asks for it. Returns whether nobody had.
    pub(super) fn ask(&mut self, now: Timestamp, reply: Option<Reply<AdminOutcome>>) -> bool {
        self.replies.extend(reply);
        if !self.is_serving() {
            return false;
        }
        self.life = Life::Draining(now);
        self.since = Some(now);
        true
    }

    /// Moves on to the next stage. `is_short`: members lack room or resources.
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

    /// The volume is left as it is.
    pub(super) fn give_up(&mut self) {
        self.life = Life::Stopped;
    }

    /// Those who wait for it.
    pub(super) fn into_replies(self) -> Vec<Reply<AdminOutcome>> {
        self.replies
    }
}
