//! The parameters of an exploration: an array, a load, and how often each kind of crash and start is tried.

use super::{SimShape, Workload};

/// A scenario of the explorer.
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
    /// Crashes are tried at one in this many moments of a load, so that a seed goes through a long history.
    pub moments_one_in: u64,
    /// Crashes tried at each such moment.
    pub variants: u64,
    /// Crashes in a row.
    pub depth_max: u32,
    /// Crashes are tried again at one in this many moments of a recovery, which has a few hundred.
    pub sweep_one_in: u64,
    /// After one crash in this many, an arbitrary choice of members is present; otherwise at least as many
    /// current ones as are needed.
    pub any_one_in: u64,
    /// After one crash in this many, only the members that hold the newest epoch are present, or only the
    /// others; 0: never.
    pub sides_one_in: u64,
    /// Everything is scrubbed after one recovery in this many.
    pub scrub_one_in: u64,
    /// One time in this many, images in the log that newer ones replace are damaged on all members.
    pub spoil_one_in: u64,
    /// A member is lost at some step below this one; 0: none is.
    pub loss_within: u64,
    /// The steps after a crash: see [`Next`].
    pub next: Next,
    /// Most steps of a load that goes on after a crash.
    pub steps_after: u64,
}

/// The step that follows a start: relative frequencies.
#[derive(Clone, Copy, Debug)]
pub struct Next {
    /// Everything is read; the path ends.
    pub end: u64,
    /// Crashes at moments of the recovery.
    pub sweep: u64,
    /// Everything is read; another crash.
    pub crash: u64,
    /// Everything is read, the load goes on for some steps; another crash.
    pub load: u64,
}

impl Next {
    /// About as many crashes as recoveries.
    pub const MIXED: Next = Next { end: 4, sweep: 2, crash: 1, load: 1 };
}
