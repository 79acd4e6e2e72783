//! Limits how many log lines of one kind are written: lines that a client can cause at will must
//! not fill a disk or hide the lines that matter. Sans-IO: time is an argument, and the caller
//! logs.

use super::Timestamp;
use std::sync::{Mutex, PoisonError};

/// Allows a number of lines in each period and counts the suppressed ones. Threads may share it.
#[derive(Debug)]
pub struct RateLimit {
    lines_max: u32,
    period_ns: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// When the present period began; none before the first line.
    since: Option<Timestamp>,
    lines: u32,
    left_out: u64,
}

impl RateLimit {
    /// `lines_max` lines in every `period_s` seconds.
    #[must_use]
    pub const fn new(lines_max: u32, period_s: u64) -> RateLimit {
        let state = Mutex::new(State { since: None, lines: 0, left_out: 0 });
        RateLimit { lines_max, period_ns: period_s * 1_000_000_000, state }
    }

    /// Whether a line may be logged now; if so, how many lines were suppressed since the last
    /// logged one.
    pub fn admit(&self, now: Timestamp) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // A clock that was set back begins a period, too: it must not silence the log until it has caught up.
        let is_over = |since| now < since || now.nanos_since(since) >= self.period_ns;
        if state.since.is_none_or(is_over) {
            (state.since, state.lines) = (Some(now), 0);
        }
        if state.lines >= self.lines_max {
            state.left_out = state.left_out.saturating_add(1);
            return None;
        }
        state.lines += 1;
        Some(std::mem::take(&mut state.left_out))
    }

    /// How many lines were suppressed in the last period and not reported yet. For a caller that
    /// polls, so that the end of a flood is reported although no line of its kind follows.
    pub fn left_out(&self, now: Timestamp) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = state.since.is_some_and(|since| now.nanos_since(since) >= self.period_ns);
        (is_over && state.left_out > 0).then(|| std::mem::take(&mut state.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_flood_leaves_a_few_lines_and_its_count() {
        let limit = RateLimit::new(3, 10);
        let at = |tenths: u64| Timestamp(5 * SECOND + tenths * SECOND / 10);
        let admitted: Vec<_> = (0..1000).map(|n| limit.admit(at(n / 100))).collect();
        assert_eq!(admitted.iter().flatten().count(), 3);
        assert_eq!(admitted[..3], [Some(0); 3]);
        assert_eq!(limit.left_out(at(99)), None, "the period goes on");
        assert_eq!(limit.admit(at(100)), Some(997), "the next period tells what the last one left out");
        assert_eq!(limit.admit(at(101)), Some(0));
    }

    #[test]
    fn the_end_of_a_flood_is_told_without_another_line() {
        let limit = RateLimit::new(1, 10);
        assert_eq!(limit.left_out(Timestamp(0)), None);
        assert_eq!((limit.admit(Timestamp(1)), limit.admit(Timestamp(2))), (Some(0), None));
        assert_eq!(limit.left_out(Timestamp(11 * SECOND)), Some(1));
        assert_eq!(limit.left_out(Timestamp(12 * SECOND)), None, "told once");
        assert_eq!(limit.admit(Timestamp(13 * SECOND)), Some(0));
    }

    #[test]
    fn a_clock_that_is_set_back_does_not_silence_the_log() {
        let limit = RateLimit::new(1, 10);
        assert_eq!(limit.admit(Timestamp(1000 * SECOND)), Some(0));
        assert_eq!(limit.admit(Timestamp(SECOND)), Some(0));
    }
}
