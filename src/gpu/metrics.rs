//! Reports of the runtime: counters, states of devices, and events. Must not know of jobs or
//! threads.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::device::DeviceInfo;
use super::policy::Crossover;

/// Buckets per doubling of a latency.
const STEPS: usize = 4;
/// From 1 to 2^32 microseconds, over an hour.
const BUCKETS: usize = 32 * STEPS;

/// Events kept until they are taken. A device that fails and comes back makes at most two in a
/// second.
const EVENTS_MAX: usize = 1024;

/// Counts and states of the runtime, since its start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuReport {
    /// One entry a device.
    pub devices: Vec<DeviceReport>,
    /// How many of the offered jobs were taken, and why others were not.
    pub decisions: Decisions,
    /// Jobs taken that the CPU did, because a device failed or was stopped.
    pub rerun_jobs: u64,
    /// The longest time that a requester waited for one of them, in microseconds.
    pub rerun_us_max: u64,
    /// Rows of blocks that the CPU computed again for comparison.
    pub verified_rows: u64,
    /// Jobs that wait for a device.
    pub waiting_jobs: u64,
    /// Bytes of their inputs.
    pub waiting_bytes: u64,
}

/// Jobs by decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decisions {
    /// Taken for a device.
    pub taken: u64,
    /// The CPU is faster for so few bytes.
    pub small: u64,
    /// The devices have enough to do.
    pub spill: u64,
    /// Hashed with a function that devices do not compute.
    pub hasher: u64,
    /// Columns of lengths or addresses that devices do not take, more than a slot holds, or nothing
    /// to compute.
    pub shape: u64,
    /// No device runs.
    pub unavailable: u64,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// What it is.
    #[serde(flatten)]
    pub info: DeviceInfo,
    /// Whether it runs.
    pub state: DeviceState,
    /// The process that it lies in, while it runs in one of its own.
    pub process: Option<u32>,
    /// Jobs done.
    pub jobs: u64,
    /// Bytes of their inputs.
    pub bytes: u64,
    /// Batches done.
    pub batches: u64,
    /// Batches refused before they were started; their jobs went to the CPU.
    pub refused: u64,
    /// How often it failed, wrong results included.
    pub errors: u64,
    /// How often it did not answer.
    pub hangs: u64,
    /// How often it computed something else than the CPU.
    pub mismatches: u64,
    /// How often it was opened again.
    pub reopened: u64,
    /// How long batches took.
    pub batch_latency: Latency,
    /// From which size on it is as fast as the CPU.
    pub crossovers: Vec<Crossover>,
}

/// Whether a device runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum DeviceState {
    /// It does.
    Running,
    /// It does not run, and is opened again from time to time.
    Failed {
        /// Why.
        reason: String,
        /// For how long.
        since_seconds: f64,
        /// Seconds until it is opened again; None: it is being opened now, or an opening has not
        /// returned.
        retry_seconds: Option<f64>,
    },
}

/// Durations in microseconds; quantiles are at most a fifth too high.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    /// Median.
    pub us_p50: u64,
    /// 99th percentile.
    pub us_p99: u64,
    /// The longest.
    pub us_max: u64,
}

/// An event that operators should see.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuEvent {
    /// The device's number.
    pub device: usize,
    /// Its name.
    pub name: String,
    /// What happened.
    pub kind: GpuEventKind,
    /// In words.
    pub text: String,
}

/// What can happen to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuEventKind {
    /// It failed, and its jobs went to the CPU.
    Failed,
    /// It did not answer in time, and its jobs went to the CPU.
    Hung,
    /// It computed something else than the CPU. The batch with the difference was done again;
    /// earlier batches were compared only in part.
    Mismatch,
    /// It runs again.
    Reopened,
    /// Its measurements could not be stored; they are repeated at the next start.
    Calibration,
    /// An answer panicked, or a job panicked on the CPU.
    Answer,
}

/// Events that were not taken yet; the oldest are dropped when there are too many.
#[derive(Default)]
pub(super) struct Events(VecDeque<GpuEvent>);

impl Events {
    pub(super) fn push(&mut self, event: GpuEvent) {
        if self.0.len() == EVENTS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(event);
    }

    pub(super) fn take(&mut self) -> Vec<GpuEvent> {
        std::mem::take(&mut self.0).into()
    }
}

/// Counters of one device.
#[derive(Default)]
pub(super) struct DeviceCounts {
    pub(super) jobs: u64,
    pub(super) bytes: u64,
    pub(super) batches: u64,
    pub(super) refused: u64,
    pub(super) errors: u64,
    pub(super) hangs: u64,
    pub(super) mismatches: u64,
    pub(super) reopened: u64,
    pub(super) latency: Histogram,
}

/// Durations by quarters of doublings.
pub(super) struct Histogram {
    counts: [u64; BUCKETS],
    us_max: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counts: [0; BUCKETS], us_max: 0 }
    }
}

impl Histogram {
    pub(super) fn add(&mut self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.us_max = self.us_max.max(us);
        let bucket = (0..BUCKETS - 1).find(|&bucket| us <= limit(bucket)).unwrap_or(BUCKETS - 1);
        self.counts[bucket] += 1;
    }

    pub(super) fn summary(&self) -> Latency {
        Latency { us_p50: self.quantile(50), us_p99: self.quantile(99), us_max: self.us_max }
    }

    fn quantile(&self, percent: u64) -> u64 {
        let wanted = (self.counts.iter().sum::<u64>() * percent).div_ceil(100);
        let mut seen = 0;
        let bucket = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        bucket.map_or(0, limit).min(self.us_max)
    }
}

/// The longest duration in microseconds that a bucket counts.
fn limit(bucket: usize) -> u64 {
    2f64.powf(bucket as f64 / STEPS as f64).floor() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_near_the_truth_and_never_below() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.summary(), Latency::default());
        (1..=1000).for_each(|us| histogram.add(Duration::from_micros(us)));
        let Latency { us_p50, us_p99, us_max } = histogram.summary();
        assert!((500..=600).contains(&us_p50) && (990..=1000).contains(&us_p99) && us_max == 1000);
        histogram.add(Duration::from_secs(100_000));
        assert_eq!(histogram.summary().us_max, 100_000_000_000);
    }

    #[test]
    fn old_events_make_room() {
        let mut events = Events::default();
        for device in 0..EVENTS_MAX + 2 {
            let (name, text) = (String::new(), String::new());
            events.push(GpuEvent { device, name, kind: GpuEventKind::Failed, text });
        }
        let taken = events.take();
        assert_eq!((taken.len(), taken[0].device, events.take().len()), (EVENTS_MAX, 2, 0));
    }

    #[test]
    fn a_report_survives_json() {
        let info =
            DeviceInfo { index: 1, name: "A".into(), uuid: "u".into(), driver: "1".into(), memory_bytes: 7 };
        let state = DeviceState::Failed { reason: "r".into(), since_seconds: 1.5, retry_seconds: Some(0.5) };
        let device = DeviceReport {
            info,
            state,
            process: Some(9),
            jobs: 1,
            bytes: 2,
            batches: 3,
            refused: 4,
            errors: 5,
            hangs: 6,
            mismatches: 7,
            reopened: 8,
            batch_latency: Latency { us_p50: 1, us_p99: 2, us_max: 3 },
            crossovers: Vec::new(),
        };
        let report = GpuReport { devices: vec![device], ..GpuReport::default() };
        let text = serde_json::to_string(&report).expect("plain data");
        assert_eq!(serde_json::from_str::<GpuReport>(&text).expect("what was written"), report);
    }
}
