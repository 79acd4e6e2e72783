//! How fast passes over an array advance. Must not read the clock: each sample comes with its time.

use crate::control::{ScanKind, ScanReport, ScanState};
use calpe_core::units::Timestamp;
use calpe_core::volume::{Activity, ActivityKind, Rest};
use std::collections::{BTreeMap, VecDeque};

/// Rates are averages over this many nanoseconds: long enough to be steady, short enough to be
/// current.
const RATE_NANOS: u64 = 10_000_000_000;

/// A shorter time gives no rate.
const RATE_NANOS_MIN: u64 = 500_000_000;

/// Progress of passes over the last seconds.
#[derive(Debug, Default)]
pub(crate) struct Meters(BTreeMap<ActivityKind, VecDeque<(Timestamp, u64)>>);

impl Meters {
    /// Records the progress of passes.
    pub(crate) fn observe(&mut self, now: Timestamp, activities: &[Activity]) {
        self.0.retain(|kind, _| {
            activities.iter().any(|activity| activity.kind == *kind && activity.rest.is_none())
        });
        for activity in activities.iter().filter(|activity| activity.rest.is_none()) {
            let samples = self.0.entry(activity.kind).or_default();
            if samples.back().is_some_and(|(_, done)| *done > activity.done_bytes) {
                // The pass has started again.
                samples.clear();
            }
            samples.push_back((now, activity.done_bytes));
            // One sample older than the window stays, so that the window is full.
            while samples.get(1).is_some_and(|(at, _)| now.nanos_since(*at) >= RATE_NANOS) {
                samples.pop_front();
            }
        }
    }

    /// Bytes a second lately.
    fn rate(&self, kind: ActivityKind) -> Option<u64> {
        let samples = self.0.get(&kind)?;
        let ((start, from), (end, to)) = (samples.front()?, samples.back()?);
        let nanos = end.nanos_since(*start);
        (nanos >= RATE_NANOS_MIN).then(|| (u128::from(to - from) * 1_000_000_000 / u128::from(nanos)) as u64)
    }

    /// A pass with its rate.
    #[must_use]
    pub(crate) fn scan(&self, activity: &Activity) -> ScanReport {
        let rate = self.rate(activity.kind).filter(|_| activity.rest.is_none());
        let left = activity.total_bytes.saturating_sub(activity.done_bytes);
        ScanReport {
            kind: match activity.kind {
                ActivityKind::Rebuild => ScanKind::Rebuild,
                ActivityKind::Scrub => ScanKind::Scrub,
                ActivityKind::Repair => ScanKind::Repair,
            },
            // A listed pass is not over: metadata and superblocks come after the last slot.
            percent: ScanReport::percent_of(activity.done_bytes, activity.total_bytes)
                .min(ScanReport::RUNNING_PERCENT_MAX),
            done: activity.done_bytes,
            total: activity.total_bytes,
            rate_bytes_per_s: rate,
            // How long retries take depends on why the reads fail.
            eta_s: rate
                .filter(|rate| *rate > 0 && activity.retried + activity.retried_pages == 0)
                .map(|rate| left.div_ceil(rate)),
            retried: activity.retried,
            retried_pages: activity.retried_pages,
            paused: activity.rest.is_some(),
            state: match activity.rest {
                None => ScanState::Running,
                Some(Rest::Paused) => ScanState::Paused,
                Some(Rest::ForRebuild) => ScanState::WaitsForRebuild,
                Some(Rest::ForRoom) => ScanState::WaitsForRoom,
                Some(Rest::ForMembers) => ScanState::WaitsForMembers,
                Some(Rest::ForLanes) => ScanState::WaitsForLanes,
            },
            errors: activity.errors,
            repaired: activity.repaired,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rebuild(done: u64, paused: bool) -> Activity {
        Activity {
            kind: ActivityKind::Rebuild,
            done_bytes: done,
            total_bytes: 1000,
            retried: 0,
            retried_pages: 0,
            rest: paused.then_some(Rest::Paused),
            errors: 0,
            repaired: 0,
        }
    }

    #[test]
    fn a_pass_that_is_listed_is_never_told_as_done() {
        let scan = Meters::default().scan(&Activity { retried: 2, ..rebuild(1000, false) });
        assert_eq!((scan.percent, scan.retried), (ScanReport::RUNNING_PERCENT_MAX, 2));
    }

    fn at(seconds: u64) -> Timestamp {
        Timestamp(seconds * 1_000_000_000)
    }

    #[test]
    fn a_rate_needs_two_samples_and_tells_the_time_left() {
        let mut meters = Meters::default();
        meters.observe(at(1), &[rebuild(100, false)]);
        assert_eq!(meters.scan(&rebuild(100, false)).rate_bytes_per_s, None);
        meters.observe(at(3), &[rebuild(300, false)]);
        let scan = meters.scan(&rebuild(300, false));
        assert_eq!((scan.rate_bytes_per_s, scan.eta_s, scan.percent), (Some(100), Some(7), 30.0));
        let paused = meters.scan(&rebuild(300, true));
        assert_eq!((paused.rate_bytes_per_s, paused.eta_s), (None, None));
    }

    #[test]
    fn old_samples_and_earlier_passes_do_not_count() {
        let mut meters = Meters::default();
        for second in 0..30 {
            meters.observe(at(second), &[rebuild(if second < 15 { second } else { second * 10 }, false)]);
        }
        assert_eq!(meters.scan(&rebuild(290, false)).rate_bytes_per_s, Some(10));
        meters.observe(at(30), &[rebuild(5, false)]);
        assert_eq!(meters.scan(&rebuild(5, false)).rate_bytes_per_s, None);
        meters.observe(at(31), &[]);
        meters.observe(at(32), &[rebuild(6, false)]);
        assert_eq!(meters.scan(&rebuild(6, false)).rate_bytes_per_s, None);
    }
}
