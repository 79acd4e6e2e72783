//! What the superblocks of the members permit the log to do, and what the log reports back to them.

use crate::format::EpochStamp;

/// The permits when a call into the log begins; they do not change until it ends.
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
    /// Writes may change members.
    pub write: bool,
    /// Reported back: a write was about to change members, whether or not it was permitted.
    pub has_asked: bool,
    /// Reported back: a batch was issued.
    pub has_issued: bool,
}

impl Permits {
    /// Whether writes may change members. If not, this asks for it, and the superblocks begin to prepare it.
    pub(super) fn may_write(&mut self) -> bool {
        self.has_asked = true;
        self.write
    }
}
