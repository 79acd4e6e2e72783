//! Work on bytes that an array gives away: coding, decoding and hashing in bulk. The driver of the array may
//! do it at once, later, or on another thread or device. An operation lasts longer than its job. Must not
//! know of members or locks.
//!
//! A new kind of work is a variant of [`Work`] and of [`WorkDone`], and is run in this file.

use crate::codec::{CodecJob, CodedColumns};

/// The operation of an array that waits for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpKey(pub usize);

/// Work to be done. Answered by a [`JobDone`] with the same owner, sooner or later.
#[derive(Debug)]
pub struct Job<Owner = OpKey> {
    /// The owner of the result. An array names its own operations; a driver of several arrays adds which one
    /// it is.
    pub owner: Owner,
    /// What to do.
    pub work: Work,
    /// How urgently the result is needed.
    pub urgency: Urgency,
}

/// Kinds of work.
#[derive(Debug)]
pub enum Work {
    /// Columns are coded, decoded or hashed.
    Code(CodecJob),
}

/// Results of [`Work`], with the same names.
#[derive(Debug)]
pub enum WorkDone {
    /// The columns and their hashes.
    Code(CodedColumns),
}

/// How urgently the result of a [`Job`] is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// A client waits for it, and no other is being served: doing it at once gives the fastest answer.
    Alone,
    /// A client waits for it, among others.
    Client,
    /// A pass over the members waits for it, and takes the time that clients leave.
    Background,
}

/// The end of a [`Job`].
#[derive(Debug)]
pub struct JobDone<Owner = OpKey> {
    /// The owner of the result.
    pub owner: Owner,
    /// The result.
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

    /// Does several on this thread, side by side where that costs less. The results are in the same order.
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
