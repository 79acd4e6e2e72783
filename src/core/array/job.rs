//! Work on bytes that an array gives away: coding, decoding and hashing in bulk. Whoever drives the array may do it
//! at once, later, or on another thread or device. An operation outlives its job. Must not know of members or locks.

use crate::array::{ArrayAction, Core};
use crate::codec::{CodecJob, CodedColumns};

/// Work to be done. Answered by a [`JobDone`] with the same key, sooner or later.
#[derive(Debug)]
pub struct Job {
    /// The operation that waits.
    pub key: usize,
    /// What to do.
    pub work: CodecJob,
    /// Who waits for it.
    pub urgency: Urgency,
}

/// Who waits for a [`Job`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// A client, and nobody else is being served: whoever does it at once answers soonest.
    Alone,
    /// A client among others.
    Client,
    /// A pass over the members, which takes what clients leave.
    Background,
}

/// What became of a [`Job`].
#[derive(Debug)]
pub struct JobDone {
    /// The operation that waits.
    pub key: usize,
    /// The columns and their hashes.
    pub columns: CodedColumns,
}

impl Job {
    /// Does the work.
    #[must_use]
    pub fn run(self) -> JobDone {
        JobDone { key: self.key, columns: self.work.run() }
    }
}

impl Core {
    /// Of a job that a client waits for.
    pub(super) fn client_urgency(&self) -> Urgency {
        if self.client_ops == 1 { Urgency::Alone } else { Urgency::Client }
    }

    /// Gives work away for an operation, which waits for its end.
    pub(super) fn give_away(&mut self, key: usize, work: CodecJob, urgency: Urgency) {
        self.jobs_out += 1;
        self.actions.push(ArrayAction::Code(Job { key, work, urgency }));
    }
}
