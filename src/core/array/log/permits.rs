//! What the superblocks of the members permit the log, and what it has to tell them.

use crate::format::EpochStamp;

/// As it is when a call into the log begins, and the same until it ends.
// Plain data: handed to each call into the log, and back.
#[derive(Clone, Debug)]
pub(in crate::array) struct Permits {
    /// The epoch that is being written, or was last.
    pub epoch: EpochStamp,
    /// Losses of devices so far.
    pub losses: u64,
    /// Operations may be acknowledged: every loss is recorded (E3).
    pub acknowledge: bool,
    /// Blocks and pages may be written in place, and log space be given back.
    pub in_place: bool,
    /// Writes may touch members.
    pub write: bool,
    /// To be told: a write was to touch members, whether it might or not.
    pub has_asked: bool,
    /// To be told: a batch was issued.
    pub has_issued: bool,
}

impl Permits {
    /// Whether writes may touch members. If not, what that takes is on its way from here on.
    pub(super) fn may_write(&mut self) -> bool {
        self.has_asked = true;
        self.write
    }
}
