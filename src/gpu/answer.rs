//! What travels with a job through the runtime: its tag, the object that waits for its answer, and
//! the time of its offer. Must not know of devices or threads.

use std::sync::Arc;
use std::time::Instant;

use calpe_core::codec::{CodecJob, CodedColumns, Outputs};
use calpe_core::units::BlockHash;

/// Distinguishes jobs of the same answerer; the runtime only hands it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u64);

/// Who waits for jobs.
pub trait Answer: Send + Sync {
    /// A job is done. Called once for each job taken, from any thread, in any order; must not wait.
    fn done(&self, tag: Tag, columns: CodedColumns);

    /// A job panicked on the CPU, as it would anywhere, and its columns are gone: an invariant is
    /// broken. Called instead of [`Answer::done`].
    fn lost(&self, tag: Tag) {
        let _ = tag;
    }
}

/// Where the answer to a job goes.
pub(super) struct Ticket {
    pub(super) tag: Tag,
    pub(super) answer: Arc<dyn Answer>,
    /// Since when.
    pub(super) since: Instant,
}

/// A job that a device has done.
pub(super) struct Finished {
    pub(super) ticket: Ticket,
    pub(super) job: CodecJob,
    pub(super) hashes: Vec<BlockHash>,
}

impl Finished {
    /// The result of the device, and where it goes.
    pub(super) fn into_answer(self) -> (Ticket, CodedColumns) {
        let CodecJob { transform, inputs, outputs, .. } = self.job;
        let outputs = match outputs {
            Outputs::Into(outputs) if transform.is_some() => outputs,
            _ => Vec::new(),
        };
        (self.ticket, CodedColumns { inputs, outputs, hashes: self.hashes })
    }
}
