//! What the explorer is told to explore: an array, a load, and how often each thing is tried.

use super::{SimShape, Workload};

/// What is explored.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Its name in a replay token.
    pub name: &'static str,
    /// The array.
    pub shape: SimShape,
    /// The load.
    pub workload: Workload,
    /// Steps of the load.
    pub steps: usize,
    /// Of the moments of a load, crashes are tried at one in so many, so that a seed goes through a long
    /// history.
    pub moments_one_in: u64,
    /// Crashes tried at each such moment.
    pub variants: u64,
    /// Crashes in a row.
    pub depth_max: u32,
    /// Of the moments of a recovery at which crashes are tried again, one in so many: it has some hundred.
    pub sweep_one_in: u64,
    /// After a crash any members at all are there, one time in so many; else as many current ones as are
    /// needed.
    pub any_one_in: u64,
    /// After a crash only those are there that hold the newest epoch, or only the others, one time in so
    /// many; never where it is 0.
    pub sides_one_in: u64,
    /// After a recovery everything is scrubbed, one time in so many.
    pub scrub_one_in: u64,
    /// Images in the log that newer ones replace are damaged on all members, one time in so many.
    pub spoil_one_in: u64,
    /// A member is lost at some step below this one; none where it is 0.
    pub loss_within: u64,
    /// What comes after a crash: see [`Next`].
    pub next: Next,
    /// Steps of a load that goes on after a crash, at most.
    pub steps_after: u64,
}

/// How often each thing comes after a start: the numbers are shares of their sum.
#[derive(Clone, Copy, Debug)]
pub struct Next {
    /// Everything is read, and that is the end.
    pub end: u64,
    /// Crashes at moments of the recovery.
    pub sweep: u64,
    /// Everything is read; another crash.
    pub crash: u64,
    /// Everything is read, the load goes on for some steps; another crash.
    pub load: u64,
}

impl Next {
    /// As much crashing as recovering.
    pub const MIXED: Next = Next { end: 4, sweep: 2, crash: 1, load: 1 };
}
