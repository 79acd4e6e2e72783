//! One device in the runtime: how to reach its manager, whether it runs, and its batches under way.
//!
//! Invariant: a batch whose addresses a device has is among the running ones until it has ended or
//! the device is given up. Must not know of other devices, nor of the queue.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use calpe_core::units::Count;

use super::device::DeviceInfo;
use super::metrics::{DeviceCounts, DeviceReport, DeviceState, GpuEventKind};
use super::policy::Costs;
use super::queue::Taken;

/// What a manager is told.
#[derive(Debug)]
pub(super) enum Event {
    /// Jobs wait.
    More,
    /// A batch has ended.
    Woken { generation: u64, serial: u64, slot: usize },
    /// Another thread gave the device up.
    GivenUp,
    /// The device was lost while nothing was asked of it.
    Lost { generation: u64 },
    /// Everything ends.
    Close,
}

/// A device, its manager and its batches under way.
pub(super) struct Lane {
    info: DeviceInfo,
    events: Sender<Event>,
    state: Mutex<LaneState>,
}

/// The state of a device.
#[derive(Default)]
pub(super) struct LaneState {
    /// How often the device was given up: events of an earlier generation are ignored.
    generation: u64,
    up: bool,
    failure: Option<Failure>,
    /// The device computed something else than the CPU, and is not opened again.
    wrong: bool,
    /// By slot.
    pub(super) running: Vec<Option<Running>>,
    pub(super) counts: DeviceCounts,
    costs: Option<Arc<Costs>>,
    /// The process that the device lies in, while it runs in one of its own.
    process: Option<u32>,
}

struct Failure {
    reason: String,
    since: Instant,
    retry: Option<Instant>,
}

/// A batch whose addresses a device has.
pub(super) struct Running {
    pub(super) started: Instant,
    pub(super) taken: Taken,
}

/// Result of giving a device up.
pub(super) struct GivenUp {
    /// Whether the device ran until now.
    pub(super) ran: bool,
    /// What it had under way.
    pub(super) batches: Vec<Running>,
}

impl Lane {
    pub(super) fn new(info: DeviceInfo, events: Sender<Event>) -> Lane {
        Lane { info, events, state: Mutex::default() }
    }

    /// Sends an event to the manager; never waits.
    pub(super) fn send(&self, event: Event) {
        // A manager that has ended needs no events.
        let _ = self.events.send(event);
    }

    pub(super) fn sender(&self) -> Sender<Event> {
        self.events.clone()
    }

    pub(super) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, LaneState> {
        // A panic under the lock leaves no job half moved: moves of jobs cannot panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn report(&self) -> DeviceReport {
        let state = self.lock();
        let now = Instant::now();
        let device_state = match &state.failure {
            _ if state.up => DeviceState::Running,
            None => DeviceState::Failed {
                reason: "not opened yet".to_owned(),
                since_seconds: 0.0,
                retry_seconds: None,
            },
            Some(Failure { reason, since, retry }) => DeviceState::Failed {
                reason: reason.clone(),
                since_seconds: now.duration_since(*since).as_secs_f64(),
                retry_seconds: retry.map(|at| at.saturating_duration_since(now).as_secs_f64()),
            },
        };
        let counts = &state.counts;
        DeviceReport {
            info: self.info.clone(),
            state: device_state,
            process: state.process,
            jobs: counts.jobs,
            bytes: counts.bytes,
            batches: counts.batches,
            refused: counts.refused,
            errors: counts.errors,
            hangs: counts.hangs,
            mismatches: counts.mismatches,
            reopened: counts.reopened,
            batch_latency: counts.latency.summary(),
            crossovers: state.costs.as_ref().map_or(Vec::new(), |costs| costs.crossovers()),
        }
    }
}

impl LaneState {
    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn is_up(&self) -> bool {
        self.up
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Whether it computed something else than the CPU.
    pub(super) fn is_wrong(&self) -> bool {
        self.wrong
    }

    pub(super) fn costs(&self) -> Option<Arc<Costs>> {
        self.costs.clone()
    }

    /// When the oldest batch under way was started.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.running.iter().flatten().map(|running| running.started).min()
    }

    /// The device runs from now on. Returns its generation.
    pub(super) fn opened(&mut self, costs: Arc<Costs>, slots: usize, process: Option<u32>) -> u64 {
        self.process = process;
        self.counts.reopened += u64::from(self.failure.take().is_some());
        self.up = true;
        self.costs = Some(costs);
        self.running = (0..slots).map(|_| None).collect();
        self.generation
    }

    /// The device could not be opened. Returns whether this was the first failure in a row.
    pub(super) fn not_opened(&mut self, reason: &str) -> bool {
        let first = self.failure.is_none();
        let since = self.failure.as_ref().map_or_else(Instant::now, |failure| failure.since);
        self.failure = Some(Failure { reason: reason.to_owned(), since, retry: None });
        self.counts.errors += u64::from(first);
        first
    }

    /// Sets when the device is opened again after a failure; None: not yet known, or never.
    pub(super) fn retry_at(&mut self, retry: Option<Instant>) {
        if let Some(failure) = &mut self.failure {
            failure.retry = retry;
        }
    }

    /// The device is not opened again, or only after a long `rest`. Returns the text of an event, if there is
    /// news.
    pub(super) fn leave_alone(&mut self, given_up: u32, rest: Option<Duration>) -> Option<String> {
        let failure = self.failure.as_mut()?;
        failure.retry = None;
        if self.wrong {
            return None;
        }
        let times = Count(given_up as u64, "time");
        let next = rest.map_or("not tried again until the next start".to_owned(), |rest| {
            format!("tried again after {} minutes", rest.as_secs().div_ceil(60))
        });
        failure.reason.push_str(&format!("; given up {times}: {next}"));
        Some(failure.reason.clone())
    }

    /// The device is closed, with nothing under way.
    pub(super) fn closed(&mut self) {
        self.up = false;
        self.process = None;
    }

    /// Stops trusting the device. One that computed wrongly is given up in any generation;
    /// otherwise only the given generation is.
    pub(super) fn give_up(&mut self, generation: u64, kind: GpuEventKind, text: &str) -> GivenUp {
        let wrong = kind == GpuEventKind::Mismatch;
        let ran = self.up && (self.generation == generation || wrong);
        self.wrong |= wrong;
        self.counts.mismatches += u64::from(wrong);
        self.counts.hangs += u64::from(kind == GpuEventKind::Hung);
        let mut batches = Vec::new();
        if ran {
            self.counts.errors += u64::from(kind != GpuEventKind::Hung);
            self.up = false;
            self.process = None;
            self.generation += 1;
            self.failure = Some(Failure { reason: text.to_owned(), since: Instant::now(), retry: None });
            batches.extend(self.running.iter_mut().filter_map(Option::take));
        }
        GivenUp { ran, batches }
    }
}
