//! Jobs that operations give away, and wait for.

use crate::array::ArrayAction;
use crate::array::base::Core;
use crate::array::job::{Job, OpKey, Urgency, Work};
use crate::codec::CodecJob;

impl Core {
    /// The urgency of a job that a client waits for.
    pub(in crate::array) fn client_urgency(&self) -> Urgency {
        if self.load.client_ops == 1 { Urgency::Alone } else { Urgency::Client }
    }

    /// Gives columns away to be coded, for an operation, which waits for the end of the job.
    pub(in crate::array) fn give_away(&mut self, key: usize, job: CodecJob, urgency: Urgency) {
        self.load.jobs_out += 1;
        let job = Job { owner: OpKey(key), work: Work::Code(job), urgency };
        self.actions.push(ArrayAction::Work(job));
    }
}
