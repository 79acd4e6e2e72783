//! Messages between the superblocks (`members/supers.rs`) and the log: what superblocks permit, and what the
//! log reports for them.
//!
//! All are values. The log goes by its own copy of the permits, which changes only when it takes a message;
//! its reports are kept until they are taken. It never looks at a superblock.

use crate::format::EpochStamp;
use crate::units::MemberIndex;

/// To the log: what the superblocks of the members permit.
// Plain data: a message.
#[derive(Clone, Debug, Default)]
pub(in crate::array) struct Permits {
    /// The epoch that is being written, or was last.
    pub epoch: EpochStamp,
    /// Losses of devices so far.
    pub losses: u64,
    /// Operations may be acknowledged: every loss is recorded (E3).
    pub acknowledge: bool,
    /// Blocks and pages may be written in place, and log space be given back.
    pub in_place: bool,
    /// Writes may change members.
    pub write: bool,
}

/// From the log: what happened since the last reports were taken.
// Plain data: a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::array) struct Reports {
    /// A write was about to change members, whether or not it was permitted: if it was not, the superblocks
    /// have to prepare it.
    pub wants_write: bool,
    /// A batch was issued: the content of the log is not in place everywhere.
    pub has_issued: bool,
}

/// From the log: how it stands, for the next update of the superblocks. True until the log issues a batch or
/// a page changes.
// Plain data: a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::array) struct Standing {
    /// The log's next batch, when a replay would find nothing to do below it.
    pub needless: Option<u64>,
    /// Whether that is so, and no copies of pages have to be written again.
    pub is_drained: bool,
    /// Pages of the stripe map that have a version which is flushed on the members in service; none while the
    /// map is being loaded.
    pub map_pages: Option<u64>,
}

/// To the log: a member is out of service.
// Plain data: a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) struct Out {
    pub member: MemberIndex,
    /// Where the newest update of the superblocks says that the log starts, one under way included; none for
    /// a member that was not in service, whose tail does not count.
    pub told: Option<u64>,
}

/// From the log, in answer: it does nothing that E3 forbids before it is permitted again, and the map will
/// say that the member lacks what is behind the tail.
// Plain data: a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) struct Ceased {
    /// Batches below are in place on the member, and it was told so (T6); none where that is not known.
    pub tail: Option<u64>,
}

/// From the log: it waits for a flush of the members.
// Plain data: a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) struct RoundWish {
    /// Devices under construction are to be flushed as well: what a checkpoint writes to them counts as
    /// built.
    pub with_builds: bool,
}

/// From the log, when a round begins, and back to it when the round is over.
// Plain data: a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) struct Written {
    /// The pieces of all batches below have ended.
    pub upto: u64,
}

/// The log's side of the exchange.
#[derive(Default)]
pub(super) struct Gate {
    permits: Permits,
    reports: Reports,
}

impl Gate {
    pub(super) fn take(&mut self, permits: Permits) {
        self.permits = permits;
    }

    pub(super) fn take_reports(&mut self) -> Reports {
        std::mem::take(&mut self.reports)
    }

    /// What is permitted, by the last message.
    pub(super) fn permits(&self) -> &Permits {
        &self.permits
    }

    /// Whether writes may change members. If not, this asks for it.
    pub(super) fn may_write(&mut self) -> bool {
        self.reports.wants_write = true;
        self.permits.write
    }

    /// Reports that a batch was issued.
    pub(super) fn note_batch(&mut self) {
        self.reports.has_issued = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_taken_once() {
        let mut gate = Gate::default();
        assert!(!gate.may_write(), "nothing is permitted before a message says so");
        gate.take(Permits { write: true, ..Permits::default() });
        assert_eq!(gate.take_reports(), Reports { wants_write: true, has_issued: false });
        assert_eq!(gate.take_reports(), Reports::default());
        assert!(gate.may_write());
        gate.note_batch();
        assert_eq!(gate.take_reports(), Reports { wants_write: true, has_issued: true });
    }
}
