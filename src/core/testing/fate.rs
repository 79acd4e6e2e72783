//! The outcome of a write that a crash or a fault interrupts.

pub(super) const HEADLESS: u64 = 0;

/// The outcome of a write at a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Nothing of it is there.
    Lost,
    /// All of it is there.
    Kept,
    /// Some of its sectors are there; the number decides which.
    Torn(u64),
}

impl Fate {
    /// All but the first sector is there: the blocks behind a header have overwritten the old content, and
    /// the header itself is missing.
    pub const HEADLESS: Fate = Fate::Torn(HEADLESS);
}
