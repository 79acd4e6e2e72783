//! How long and how often a recovery reads blocks again that could not be read (rule T3).

use crate::units::Timestamp;

/// How long blocks that cannot be read are tried: longer than a bus reset or a short loss of a path takes,
/// and short enough for a person who waits for the start.
const LIMIT_NS: u64 = 10_000_000_000;
/// The first interval between two tries; each is twice as long as the one before.
const INTERVAL_MIN_NS: u64 = 50_000_000;
/// The longest interval between two tries.
const INTERVAL_MAX_NS: u64 = 1_600_000_000;
/// Fewest tries, however long each takes.
const TRIES_MIN: u32 = 3;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Patience {
    since: Option<Timestamp>,
    tries: u32,
}

impl Patience {
    /// Counts a failed try. Returns when to try again; none when that was the last.
    pub(super) fn failed(&mut self, now: Timestamp) -> Option<Timestamp> {
        let since = *self.since.get_or_insert(now);
        self.tries += 1;
        if now.nanos_since(since) >= LIMIT_NS && self.tries >= TRIES_MIN {
            return None;
        }
        let interval = INTERVAL_MIN_NS << (self.tries - 1).min(16);
        Some(Timestamp(now.0 + interval.min(INTERVAL_MAX_NS)))
    }

    /// Whether something is being tried again.
    pub(super) fn has_failed(&self) -> bool {
        self.since.is_some()
    }

    /// Counts a try that has succeeded: a later failure begins a new count.
    pub(super) fn succeeded(&mut self) {
        *self = Patience::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_go_on_for_the_limit_and_begin_anew_after_a_success() {
        let mut patience = Patience::default();
        for _ in 0..2 {
            let start = Timestamp(7);
            let mut now = start;
            let mut tries = 0;
            while let Some(next) = patience.failed(now) {
                assert!(next > now && next.nanos_since(now) <= INTERVAL_MAX_NS);
                now = next;
                tries += 1;
            }
            assert!((10..20).contains(&tries), "{tries}");
            assert!((LIMIT_NS..LIMIT_NS + INTERVAL_MAX_NS).contains(&now.nanos_since(start)));
            patience.succeeded();
        }
    }

    #[test]
    fn tries_that_take_long_are_made_all_the_same() {
        let mut patience = Patience::default();
        assert!(patience.failed(Timestamp(0)).is_some());
        assert!(patience.failed(Timestamp(3 * LIMIT_NS)).is_some());
        assert!(patience.failed(Timestamp(6 * LIMIT_NS)).is_none());
    }
}
