//! Names of blocks, and why one cannot be had. Used by all code that reads, lists or looks for them.

use crate::units::StripeIndex;
use std::ops::Range;

/// Names a block of a volume: its stripe, column and row.
pub(in crate::array) type BlockName = (StripeIndex, u16, u32);

/// A wanted block that cannot be had.
// Plain data: a fetch's report about a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) struct Missing {
    pub column: usize,
    pub row: usize,
    pub why: Why,
}

/// Why a block cannot be had. Only content is evidence of a loss (rule T1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::array) enum Why {
    /// Its entry says that it is set aside: it counts as zeroes for coding.
    SetAside,
    /// Its entry says that it is lost: it counts as zeroes for coding.
    Lost,
    /// A block that could decode it was not read: its member is out of service, or gave an error. It may
    /// become readable again.
    Unreadable,
    /// It was read, and so many others of its row were read and do not match their hashes that it cannot be
    /// decoded.
    Proven,
    /// Its entry says that it is set aside, and everything that could give it was read, and is wrong. No
    /// single fetch finds this: it is known from earlier ones.
    Gone,
}

impl Why {
    /// Whether the block counts as zeroes for coding.
    pub(in crate::array) fn counts_as_zeroes(self) -> bool {
        matches!(self, Why::SetAside | Why::Lost | Why::Gone)
    }

    /// Whether the block is beyond repair: everything that could give it was read.
    pub(in crate::array) fn is_beyond_repair(self) -> bool {
        matches!(self, Why::Lost | Why::Proven | Why::Gone)
    }

    /// Whether only its own member can give it.
    pub(in crate::array) fn is_aside(self) -> bool {
        matches!(self, Why::SetAside | Why::Gone)
    }
}

/// The longest runs of rows for which `is_in` holds.
pub(in crate::array) fn runs(rows: Range<usize>, is_in: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for row in rows.filter(|&row| is_in(row)) {
        match runs.last_mut() {
            Some(run) if run.end == row => run.end += 1,
            _ => runs.push(row..row + 1),
        }
    }
    runs
}
