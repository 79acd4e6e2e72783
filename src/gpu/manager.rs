//! The thread that owns a device: it starts batches in idle slots, takes their results, answers,
//! and opens the device again after a failure. Sleeps while there is nothing to do.
//!
//! Invariants: a batch is among the lane's running ones before its device gets it, and until the
//! device has ended it, so a thread that gives the device up finds the batch there. A result counts
//! only if its batch is still there.
#![allow(unsafe_code)] // hands addresses to a device; the block argues for itself

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::answer::Finished;
use super::calibrate;
use super::device::{Device, DeviceError};
use super::lane::{Event, Running};
use super::metrics::GpuEventKind;
use super::policy::Costs;
use super::rerun;
use super::self_test;
use super::shared::Shared;
use super::tasks::Task;

/// How many times longer than a normal batch a test batch may take: programs may be loaded at their
/// first use.
const TRIAL_FACTOR: u32 = 5;

/// How many times longer than the shortest pause a device in a process of its own has to run for the next
/// pause to be that again. One that fails as soon as that, again and again, is soon left alone.
const WORTH_FACTOR: u32 = 10;

/// Most rows that a manager compares itself, at some ten microseconds each; more would keep the
/// device waiting.
const ROWS_COMPARED_HERE: usize = 8;

/// Why a device is no longer served.
enum Stop {
    /// The runtime ends, and nothing is under way.
    Closed,
    /// Another thread gave the device up.
    GivenUp,
    /// It failed.
    Failed(String),
}

/// Runs until the runtime ends. `first` gets the result of the first attempt to open the device.
pub(super) fn run(
    shared: &Arc<Shared>,
    lane: usize,
    inbox: &Receiver<Event>,
    first: Sender<Result<(), String>>,
) {
    let config = &shared.settings.config;
    let (mut pause, mut first, mut given_up) = (config.reopen_after, Some(first), 0);
    let isolated = shared.settings.driver.is_isolated();
    loop {
        let opened = open(shared, lane, &mut given_up);
        let outcome = opened.as_ref().map(|_| ()).map_err(String::clone);
        match opened {
            Ok((device, costs)) => {
                let opened_at = Instant::now();
                let generation = shared.up(lane, costs, &*device);
                report_first(&mut first, outcome);
                match generation {
                    Some(generation) => {
                        if serve(shared, lane, generation, device, inbox) {
                            return;
                        }
                    }
                    None => abandon(device),
                }
                given_up += 1;
                let ran = opened_at.elapsed();
                if ran >= config.reopen_after_max {
                    pause = config.reopen_after;
                    // In this process each of them has cost memory for good.
                    given_up = if isolated { 1 } else { given_up };
                } else if isolated && ran >= config.reopen_after * WORTH_FACTOR {
                    pause = config.reopen_after;
                }
            }
            Err(reason) => {
                // What fails at once, again and again, is not worth its processes either.
                given_up += u32::from(isolated);
                shared.not_opened(lane, &reason);
                report_first(&mut first, outcome);
            }
        }
        let is_given_up = |given_up| given_up >= config.given_up_max || shared.lanes[lane].lock().is_wrong();
        if !is_given_up(given_up) {
            shared.lanes[lane].lock().retry_at(Some(Instant::now() + pause));
            if !wait(shared, inbox, pause) {
                return;
            }
            shared.lanes[lane].lock().retry_at(None);
        }
        if is_given_up(given_up) {
            let rest = (isolated && !shared.lanes[lane].lock().is_wrong()).then_some(config.rest);
            shared.leave_alone(lane, given_up, rest);
            let Some(rest) = rest else {
                while !shared.is_closing() && inbox.recv().is_ok() {}
                return;
            };
            shared.lanes[lane].lock().retry_at(Some(Instant::now() + rest));
            if !wait(shared, inbox, rest) {
                return;
            }
            shared.lanes[lane].lock().retry_at(None);
            // One more failure, and it rests again.
            given_up = config.given_up_max.saturating_sub(1);
        }
        pause = (pause * 2).min(config.reopen_after_max);
    }
}

fn report_first(first: &mut Option<Sender<Result<(), String>>>, outcome: Result<(), String>) {
    if let Some(first) = first.take() {
        // After a timeout nothing listens any more.
        let _ = first.send(outcome);
    }
}

/// Waits before a device is opened again. False when the runtime ends.
fn wait(shared: &Shared, inbox: &Receiver<Event>, pause: Duration) -> bool {
    let until = Instant::now() + pause;
    while !shared.is_closing() {
        match inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(Event::Close) | Err(RecvTimeoutError::Disconnected) => return false,
            // Late events of an earlier generation are ignored.
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) => return true,
        }
    }
    false
}

/// Opens a device, tests it and gets its costs. A device that fails the test counts as given up
/// once.
fn open(shared: &Shared, lane: usize, given_up: &mut u32) -> Result<(Box<dyn Device>, Arc<Costs>), String> {
    let settings = &shared.settings;
    let index = shared.lanes[lane].info().index;
    let mut device = guarded("opening", || settings.driver.open(index, &settings.pools))?;
    match guarded("testing", || prepare(shared, lane, &mut *device)) {
        Ok(costs) => Ok((device, costs)),
        Err(reason) => {
            *given_up += 1;
            abandon(device);
            Err(reason)
        }
    }
}

fn prepare(shared: &Shared, lane: usize, device: &mut dyn Device) -> Result<Arc<Costs>, DeviceError> {
    let settings = &shared.settings;
    let hang_after = settings.config.hang_after * TRIAL_FACTOR;
    if device.slots() == 0 {
        return Err(DeviceError::Unsupported("it has no slots"));
    }
    self_test::run(device, &settings.pools[0], hang_after)?;
    if let Some(costs) = shared.lanes[lane].lock().costs() {
        return Ok(costs);
    }
    let alone = shared.measuring.lock().unwrap_or_else(PoisonError::into_inner);
    let (costs, unkept) = calibrate::costs(&settings.calibration, device, &settings.pools[0], hang_after)?;
    drop(alone);
    if let Some(error) = unkept {
        let text = format!("measurements cannot be kept for the next start: {error}");
        shared.event(lane, GpuEventKind::Calibration, text);
    }
    Ok(Arc::new(costs))
}

/// Serves a device until it fails or the runtime ends. Returns whether the runtime ends.
fn serve(
    shared: &Arc<Shared>,
    lane: usize,
    generation: u64,
    device: Box<dyn Device>,
    inbox: &Receiver<Event>,
) -> bool {
    let slots = device.slots();
    let (mut device, events) = (device, shared.lanes[lane].sender());
    device.watch(Box::new(move || {
        // A manager that has ended needs no events.
        let _ = events.send(Event::Lost { generation });
    }));
    let mut serving = Serving {
        shared,
        lane,
        generation,
        device,
        idle: (0..slots).rev().collect(),
        serials: vec![0; slots],
        next_serial: 0,
    };
    let stop = catch_unwind(AssertUnwindSafe(|| serving.run(inbox)));
    let stop =
        stop.unwrap_or_else(|panic| Stop::Failed(format!("its manager panicked: {}", text_of(&*panic))));
    let device = serving.device;
    match stop {
        Stop::Closed => {
            // However the device ends, others do not wait for it any more.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(device)));
            shared.closed(lane);
            true
        }
        Stop::GivenUp => {
            abandon(device);
            false
        }
        Stop::Failed(reason) => {
            shared.give_up(lane, generation, GpuEventKind::Failed, &reason);
            abandon(device);
            false
        }
    }
}

fn abandon(device: Box<dyn Device>) {
    // However this ends, the device is not used any more.
    let _ = catch_unwind(AssertUnwindSafe(|| device.abandon()));
}

fn guarded<T>(what: &str, call: impl FnOnce() -> Result<T, DeviceError>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("{what} it panicked: {}", text_of(&*panic))),
    }
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text")
}

/// A device at work.
struct Serving<'a> {
    shared: &'a Arc<Shared>,
    lane: usize,
    generation: u64,
    device: Box<dyn Device>,
    idle: Vec<usize>,
    /// Number of the last batch in each slot.
    serials: Vec<u64>,
    next_serial: u64,
}

impl Serving<'_> {
    fn run(&mut self, inbox: &Receiver<Event>) -> Stop {
        loop {
            match self.step(inbox) {
                Ok(()) => {}
                Err(stop) => return stop,
            }
        }
    }

    /// Starts batches in idle slots, then waits for one event.
    fn step(&mut self, inbox: &Receiver<Event>) -> Result<(), Stop> {
        while let Some(&slot) = self.idle.last() {
            if !self.launch(slot)? {
                break;
            }
        }
        if self.shared.is_closing() && self.idle.len() == self.serials.len() {
            return Err(Stop::Closed);
        }
        match inbox.recv() {
            Ok(Event::Woken { generation, serial, slot })
                if generation == self.generation && self.serials[slot] == serial =>
            {
                self.finish(slot)
            }
            // A batch of an earlier generation.
            Ok(Event::Woken { .. }) => Ok(()),
            Ok(Event::More | Event::Close) => Ok(()),
            Ok(Event::Lost { generation }) if generation == self.generation => {
                Err(Stop::Failed(self.device.lost().unwrap_or_else(|| "it is lost".to_owned())))
            }
            Ok(Event::Lost { .. }) => Ok(()),
            Ok(Event::GivenUp) => {
                let current = self.shared.lanes[self.lane].lock().generation();
                if current == self.generation { Ok(()) } else { Err(Stop::GivenUp) }
            }
            Err(_) => Err(Stop::Failed("nobody can reach its manager any more".to_owned())),
        }
    }

    /// Starts a batch in an idle slot if jobs wait.
    fn launch(&mut self, slot: usize) -> Result<bool, Stop> {
        let (shared, lane) = (self.shared, &self.shared.lanes[self.lane]);
        let Some(taken) = shared.take(self.lane) else { return Ok(false) };
        let mut state = lane.lock();
        if state.generation() != self.generation {
            drop(state);
            shared.run_taken_on_cpu(taken, false);
            return Err(Stop::GivenUp);
        }
        let running = state.running[slot].insert(Running { started: Instant::now(), taken });
        let work = running.taken.batch.work();
        drop(state);
        shared.alarm.set();

        let (generation, serial) = (self.generation, self.next_serial);
        self.next_serial += 1;
        self.serials[slot] = serial;
        let sender = lane.sender();
        let wake = Box::new(move || {
            // A manager that has ended needs no events.
            let _ = sender.send(Event::Woken { generation, serial, slot });
        });
        // SAFETY: the addresses are those of buffers that only the batch holds, which lies among
        // the running ones. It is taken from there after `finish` alone, or when the device is
        // given up: then `part_from_device` leaks its outputs and keeps its inputs mapped, before
        // anybody else sees them.
        match unsafe { self.device.start(slot, work, wake) } {
            Ok(()) => {
                self.idle.pop();
                Ok(true)
            }
            Err(DeviceError::Unsupported(_)) => self.refused(slot).map(|()| true),
            Err(error) => Err(Stop::Failed(error.to_string())),
        }
    }

    /// Gives a batch that the device does not do to the CPU.
    fn refused(&self, slot: usize) -> Result<(), Stop> {
        let shared = self.shared;
        let mut state = shared.lanes[self.lane].lock();
        if state.generation() != self.generation {
            return Err(Stop::GivenUp);
        }
        let refused = state.running[slot].take();
        state.counts.refused += 1;
        drop(state);
        if let Some(Running { taken, .. }) = refused {
            shared.queue().finished(self.lane, taken.class, taken.input_bytes);
            shared.run_taken_on_cpu(taken, false);
        }
        Ok(())
    }

    /// Takes the result of a batch, and answers its jobs or has them compared first.
    fn finish(&mut self, slot: usize) -> Result<(), Stop> {
        let digests = match self.device.finish(slot) {
            Ok(digests) => digests,
            Err(DeviceError::Unsupported(_)) => {
                self.refused(slot)?;
                self.idle.push(slot);
                return Ok(());
            }
            Err(error) => return Err(Stop::Failed(error.to_string())),
        };
        let (shared, lane) = (self.shared, &self.shared.lanes[self.lane]);
        let mut state = lane.lock();
        if state.generation() != self.generation {
            return Err(Stop::GivenUp);
        }
        let Some(running) = &state.running[slot] else {
            return Err(Stop::Failed(format!("slot {slot} ended with no batch in it")));
        };
        let hashes = running.taken.batch.hashes(&digests);
        let hashes = hashes.map_err(|expected| {
            Stop::Failed(format!("{} digests of a batch that has {expected}", digests.len()))
        })?;
        let Some(Running { started, taken }) = state.running[slot].take() else { return Ok(()) };
        let counts = &mut state.counts;
        counts.batches += 1;
        counts.jobs += taken.tickets.len() as u64;
        counts.bytes += taken.input_bytes;
        counts.latency.add(started.elapsed());
        drop(state);
        // SAFETY: the batch, and with it the outputs, is this function's alone since it was taken from the
        // running ones.
        unsafe { self.device.deliver(slot) };
        self.idle.push(slot);
        let mut queue = shared.queue();
        queue.finished(self.lane, taken.class, taken.input_bytes);
        if let (Some(expected), Some(first)) = (taken.expected, taken.tickets.first()) {
            queue.learn(self.lane, first.since.elapsed().as_secs_f64(), expected);
        }
        drop(queue);

        let jobs = taken.tickets.into_iter().zip(taken.batch.into_jobs()).zip(hashes);
        let jobs: Vec<Finished> =
            jobs.map(|((ticket, job), hashes)| Finished { ticket, job, hashes }).collect();
        let generation = self.generation;
        match shared.sample(&jobs) {
            Some(sample) if sample.len() > ROWS_COMPARED_HERE => {
                shared.push_task(Task::Compare { lane: self.lane, generation, jobs, sample });
                Ok(())
            }
            sample if rerun::settle(shared, self.lane, generation, jobs, sample.as_ref()) => Ok(()),
            _ => Err(Stop::GivenUp),
        }
    }
}
