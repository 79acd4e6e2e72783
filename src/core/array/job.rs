//! Work on bytes that an array gives away: coding, decoding and hashing in bulk. Whoever drives the array may do it
//! at once, later, or on another thread or device. An operation outlives its job. Must not know of members or locks.
//!
//! A new kind of work is a variant of [`Work`] and of [`WorkDone`], and is run in this file.

use crate::codec::{CodecJob, CodedColumns};

/// The operation of an array that waits for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpKey(pub usize);

/// Work to be done. Answered by a [`JobDone`] with the same owner, sooner or later.
#[derive(Debug)]
pub struct Job<Owner = OpKey> {
    /// Who gets what comes of it. An array knows its own operations; whoever drives several adds which one it is.
    pub owner: Owner,
    /// What to do.
    pub work: Work,
    /// Who waits for it.
    pub urgency: Urgency,
}

/// What is to be done.
#[derive(Debug)]
pub enum Work {
    /// Columns are coded, decoded or hashed.
    Code(CodecJob),
}

/// What came of [`Work`], by the same names.
#[derive(Debug)]
pub enum WorkDone {
    /// The columns and their hashes.
    Code(CodedColumns),
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
pub struct JobDone<Owner = OpKey> {
    /// Who gets it.
    pub owner: Owner,
    /// What it is.
    pub done: WorkDone,
}

impl<Owner> Job<Owner> {
    /// Does the work.
    #[must_use]
    pub fn run(self) -> JobDone<Owner> {
        JobDone { owner: self.owner, done: self.work.run() }
    }

    /// The same job for another owner.
    pub fn owned_by<Other>(self, owner: impl FnOnce(Owner) -> Other) -> Job<Other> {
        Job { owner: owner(self.owner), work: self.work, urgency: self.urgency }
    }
}

impl Work {
    /// Does it.
    #[must_use]
    pub fn run(self) -> WorkDone {
        match self {
            Work::Code(job) => WorkDone::Code(job.run()),
        }
    }

    /// Does several on this thread, side by side where that costs less; what they come to is in their order.
    pub fn run_together(works: Vec<Work>) -> impl Iterator<Item = WorkDone> {
        let jobs = works.into_iter().map(|Work::Code(job)| job).collect();
        CodecJob::run_together(jobs).into_iter().map(WorkDone::Code)
    }

    /// Bytes of all inputs together.
    #[must_use]
    pub fn input_bytes(&self) -> usize {
        match self {
            Work::Code(job) => job.input_bytes(),
        }
    }
}

impl WorkDone {
    /// Bytes of all inputs together.
    #[must_use]
    pub fn input_bytes(&self) -> usize {
        match self {
            WorkDone::Code(columns) => columns.input_bytes(),
        }
    }
}
