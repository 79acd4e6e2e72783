//! Rules of the view that a test can break, one at a time, in its own thread, to prove that the model
//! notices. Elsewhere they hold at compile time.

/// What keeps a look-up from returning what never was true together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// A look-up ends with a second look at the stripe's word.
    MapIsComparedAgain,
    /// A look-up ends with a second look at the slot's generation.
    GenerationIsComparedAgain,
    /// A ticket does not hold once a member has left.
    ServiceIsCompared,
    /// The sequence of a frame is compared after its hashes were read.
    FrameIsComparedAgain,
    /// A move changes the generations of both slots.
    MoveChangesGenerations,
    /// A generation is odd while hashes change.
    BusyIsShown,
}

#[cfg(all(test, loom))]
thread_local! {
    static BROKEN: std::cell::Cell<Option<Rule>> = const { std::cell::Cell::new(None) };
}

/// Whether the running test breaks this rule.
#[cfg(all(test, loom))]
pub(crate) fn is_off(rule: Rule) -> bool {
    BROKEN.get() == Some(rule)
}

/// Whether the running test breaks this rule.
#[cfg(not(all(test, loom)))]
pub(crate) const fn is_off(_: Rule) -> bool {
    false
}

/// Breaks a rule in this thread from now on, or none.
#[cfg(all(test, loom))]
pub(crate) fn break_rule(rule: Option<Rule>) {
    BROKEN.set(rule);
}
