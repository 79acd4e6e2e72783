//! How long the client of a write waits for the end of a shortage (rule T4 of the crash-safety design). A
//! write that has not joined a batch ends without having changed anything; one that has joined is carried out
//! later all the same.

use crate::array::ClientError;
use crate::array::client::write::{LoggedWrite, Stage};
use crate::units::Timestamp;

impl LoggedWrite {
    /// Whether the client gets this error instead of waiting any longer. The operation must be advanced then.
    pub(crate) fn loses_patience(&mut self, now: Timestamp, patience_ns: u64, error: ClientError) -> bool {
        let waits = matches!(self.stage, Stage::Room | Stage::Slot | Stage::Join | Stage::Logged);
        let is_late = now.nanos_since(self.request.since) >= patience_ns;
        let loses = waits && is_late && self.request.id.is_some() && self.request.expired.is_none();
        if loses {
            self.request.expired = Some(error);
        }
        loses
    }
}
