//! What the threads of the runtime share: the queue, what each device has under way, work for the CPU, and counts.
//!
//! Invariants: every job taken is at any moment in exactly one place: the queue, a device's running batches, the tasks, or
//! the stack of the thread that answers it. Of the locks here no two are held at once. Must not know of addresses.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use calpe_core::block_io::Pool;
use calpe_core::codec::{CodecJob, CodedColumns};
use calpe_core::units::Count;

use super::calibrate::CalibrationSource;
use super::device::{DeviceInfo, Driver};
use super::manager::Event;
use super::metrics::{
    Decisions, DeviceCounts, DeviceReport, DeviceState, Events, GpuEvent, GpuEventKind, GpuReport,
};
use super::policy::{Costs, Verdict};
use super::queue::{Queue, Taken, Ticket};
use super::rerun::{Finished, Task};
use super::runtime::{Answer, GpuConfig, Tag};
use super::verify::{Sample, mix};

/// How long the end of the runtime waits, beyond a hang, for the CPU to do what was left. Threads go on without it.
const CLOSE_MAX: Duration = Duration::from_secs(10);

thread_local! {
    /// Whether this thread is one of a runtime's, which must not wait for a runtime's threads.
    static OWN_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// What the runtime was started with.
pub(super) struct Settings {
    pub(super) config: GpuConfig,
    pub(super) driver: Arc<dyn Driver>,
    /// At least one; buffers are replaced from the first.
    pub(super) pools: Vec<Pool>,
    pub(super) calibration: CalibrationSource,
}

/// See the module's head.
pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) lanes: Vec<Lane>,
    queue: Mutex<Queue>,
    /// The most that a job may take of a slot; 0 while no device runs. A hint, to be told without the lock.
    pub(super) slot_bytes: AtomicUsize,
    pub(super) decisions: DecisionCounts,
    /// Jobs taken and not answered.
    pub(super) unanswered: AtomicUsize,
    closing: AtomicBool,
    tasks: Mutex<VecDeque<Task>>,
    more_tasks: Condvar,
    /// Whether the watchdog will look again by itself before anything that starts now can hang.
    watch: Mutex<bool>,
    look: Condvar,
    ended: Mutex<()>,
    end: Condvar,
    events: Mutex<Events>,
    /// Devices are measured one after the other, since they share links and cores.
    pub(super) measuring: Mutex<()>,
    rerun_jobs: AtomicU64,
    /// The longest that anybody waited for one of them, in microseconds.
    rerun_us_max: AtomicU64,
    pub(super) verified_rows: AtomicU64,
    sampled: AtomicU64,
}

/// Jobs by decision, counted without a lock.
#[derive(Default)]
pub(super) struct DecisionCounts {
    taken: AtomicU64,
    small: AtomicU64,
    spill: AtomicU64,
    pub(super) hasher: AtomicU64,
    pub(super) shape: AtomicU64,
    pub(super) unavailable: AtomicU64,
}

impl DecisionCounts {
    pub(super) fn count(&self, verdict: Verdict, jobs: u64) {
        let counter = match verdict {
            Verdict::Take => &self.taken,
            Verdict::Small => &self.small,
            Verdict::Spill => &self.spill,
        };
        counter.fetch_add(jobs, Ordering::Relaxed);
    }

    fn report(&self) -> Decisions {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Decisions {
            taken: count(&self.taken),
            small: count(&self.small),
            spill: count(&self.spill),
            hasher: count(&self.hasher),
            shape: count(&self.shape),
            unavailable: count(&self.unavailable),
        }
    }
}

/// A device, its manager and what it has under way.
pub(super) struct Lane {
    info: DeviceInfo,
    events: Sender<Event>,
    state: Mutex<LaneState>,
}

/// What changes about a device.
#[derive(Default)]
pub(super) struct LaneState {
    /// Counts how often it was given up: what was started before means nothing any more.
    pub(super) generation: u64,
    up: bool,
    failure: Option<Failure>,
    /// It computed something else than the CPU: it is not opened again.
    pub(super) wrong: bool,
    /// By slot.
    pub(super) running: Vec<Option<Running>>,
    pub(super) counts: DeviceCounts,
    costs: Option<Arc<Costs>>,
}

struct Failure {
    reason: String,
    since: Instant,
    retry: Option<Instant>,
}

/// A batch that a device has the addresses of.
pub(super) struct Running {
    pub(super) started: Instant,
    pub(super) taken: Taken,
}

impl Lane {
    pub(super) fn new(info: DeviceInfo, events: Sender<Event>) -> Lane {
        Lane { info, events, state: Mutex::default() }
    }

    /// Tells the manager something; never waits.
    pub(super) fn send(&self, event: Event) {
        // A manager that has ended needs to hear nothing.
        let _ = self.events.send(event);
    }

    pub(super) fn sender(&self) -> Sender<Event> {
        self.events.clone()
    }

    pub(super) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, LaneState> {
        lock(&self.state)
    }
}

impl LaneState {
    /// When the batch began that has been under way longest.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.running.iter().flatten().map(|running| running.started).min()
    }

    pub(super) fn costs(&self) -> Option<Arc<Costs>> {
        self.costs.clone()
    }
}

impl Shared {
    pub(super) fn new(settings: Settings, lanes: Vec<Lane>, queue: Queue) -> Shared {
        Shared {
            settings,
            lanes,
            queue: Mutex::new(queue),
            slot_bytes: AtomicUsize::new(0),
            decisions: DecisionCounts::default(),
            unanswered: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            tasks: Mutex::default(),
            more_tasks: Condvar::new(),
            watch: Mutex::new(false),
            look: Condvar::new(),
            ended: Mutex::new(()),
            end: Condvar::new(),
            events: Mutex::default(),
            measuring: Mutex::new(()),
            rerun_jobs: AtomicU64::new(0),
            rerun_us_max: AtomicU64::new(0),
            verified_rows: AtomicU64::new(0),
            sampled: AtomicU64::new(0),
        }
    }

    pub(super) fn mark_own_thread() {
        OWN_THREAD.set(true);
    }

    pub(super) fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Whether nothing is left to do, and nothing can come.
    fn is_over(&self) -> bool {
        self.is_closing() && self.unanswered.load(Ordering::SeqCst) == 0
    }

    /// A device runs from now on: its generation.
    pub(super) fn up(&self, lane: usize, costs: Arc<Costs>, slots: usize, slot_bytes: usize) -> u64 {
        let reopened = self.lanes[lane].lock().failure.is_some();
        if reopened {
            self.event(lane, GpuEventKind::Reopened, "opened again and tested".to_owned());
        }
        let mut state = self.lanes[lane].lock();
        state.failure = None;
        state.counts.reopened += u64::from(reopened);
        state.up = true;
        state.costs = Some(Arc::clone(&costs));
        state.running = (0..slots).map(|_| None).collect();
        let generation = state.generation;
        drop(state);
        let mut queue = self.queue();
        queue.up(lane, costs, slot_bytes);
        self.slot_bytes.store(queue.slot_bytes(), Ordering::Relaxed);
        generation
    }

    /// A device could not be opened.
    pub(super) fn not_opened(&self, lane: usize, reason: &str) {
        let mut state = self.lanes[lane].lock();
        let first = state.failure.is_none();
        let since = state.failure.as_ref().map_or_else(Instant::now, |failure| failure.since);
        state.failure = Some(Failure { reason: reason.to_owned(), since, retry: None });
        state.counts.errors += u64::from(first);
        drop(state);
        // Later attempts fail too, as a rule: once is enough to hear of.
        if first {
            self.event(lane, GpuEventKind::Failed, reason.to_owned());
        }
    }

    /// When a device that failed is tried again.
    pub(super) fn retry_at(&self, lane: usize, retry: Option<Instant>) {
        if let Some(failure) = &mut self.lanes[lane].lock().failure {
            failure.retry = retry;
        }
    }

    /// A device that was given up too often, or computed wrongly, is not opened again.
    pub(super) fn leave_alone(&self, lane: usize, given_up: u32) {
        let mut state = self.lanes[lane].lock();
        let wrong = state.wrong;
        let Some(failure) = &mut state.failure else { return };
        failure.retry = None;
        let reason = &mut failure.reason;
        if wrong {
            return;
        }
        reason.push_str(&format!(
            "; given up {}: not tried again until the next start",
            Count(given_up as u64, "time")
        ));
        let text = reason.clone();
        drop(state);
        self.event(lane, GpuEventKind::Failed, text);
    }

    /// A device is closed, with nothing under way.
    pub(super) fn closed(&self, lane: usize) {
        self.lanes[lane].lock().up = false;
        let left = self.queue().down(lane);
        self.run_on_cpu(left, false);
        self.notify_end();
    }

    /// A device of some generation is not believed any more: all that it has under way goes to the CPU, and so does what
    /// waits when it was the last. A device that computed wrongly is believed in no generation. False when that happened before.
    pub(super) fn give_up(&self, lane: usize, generation: u64, kind: GpuEventKind, text: &str) -> bool {
        let mut state = self.lanes[lane].lock();
        let wrong = kind == GpuEventKind::Mismatch;
        let fresh = state.up && (state.generation == generation || wrong);
        state.wrong |= wrong;
        let counts = &mut state.counts;
        counts.mismatches += u64::from(wrong);
        counts.hangs += u64::from(kind == GpuEventKind::Hung);
        let mut batches = Vec::new();
        if fresh {
            counts.errors += u64::from(kind != GpuEventKind::Hung);
            state.up = false;
            state.generation += 1;
            state.failure = Some(Failure { reason: text.to_owned(), since: Instant::now(), retry: None });
            batches.extend(state.running.iter_mut().filter_map(Option::take));
        }
        drop(state);
        if fresh || wrong {
            self.event(lane, kind, told(text, &batches));
        }
        for Running { taken, .. } in batches {
            self.run_taken_on_cpu(taken, true);
        }
        if fresh {
            let mut queue = self.queue();
            let left = queue.down(lane);
            self.slot_bytes.store(queue.slot_bytes(), Ordering::Relaxed);
            // It may have been the one that was told of what waits, and never got to it.
            let next = queue.wake_one();
            drop(queue);
            if let Some(next) = next {
                self.lanes[next].send(Event::More);
            }
            self.run_on_cpu(left, false);
            // What it left may still be touched by it: no slab goes for as long as this process lives.
            self.settings.pools.iter().for_each(|pool| std::mem::forget(pool.clone()));
            self.lanes[lane].send(Event::GivenUp);
            self.notify_end();
        }
        fresh
    }

    /// Something to do for a device.
    pub(super) fn take(&self, lane: usize) -> Option<Taken> {
        let mut queue = self.queue();
        let taken = queue.take(lane)?;
        let next = queue.wake_one();
        drop(queue);
        if let Some(next) = next {
            self.lanes[next].send(Event::More);
        }
        Some(taken)
    }

    /// Gives jobs of a batch to the CPU. `touched`: a device may still read or write their bytes.
    pub(super) fn run_taken_on_cpu(&self, taken: Taken, touched: bool) {
        let Taken { batch, tickets, .. } = taken;
        self.run_on_cpu(tickets.into_iter().zip(batch.into_jobs()), touched);
    }

    fn run_on_cpu(&self, jobs: impl IntoIterator<Item = (Ticket, CodecJob)>, touched: bool) {
        let mut tasks = lock(&self.tasks);
        let before = tasks.len();
        tasks.extend(jobs.into_iter().map(|(ticket, job)| Task::Run { ticket, job, touched }));
        let more = tasks.len() > before;
        drop(tasks);
        if more {
            self.more_tasks.notify_all();
        }
    }

    /// Gives the CPU something to do.
    pub(super) fn push_task(&self, task: Task) {
        lock(&self.tasks).push_back(task);
        self.more_tasks.notify_one();
    }

    /// The next thing for the CPU, waiting for it; None when there will be none.
    pub(super) fn next_task(&self) -> Option<Task> {
        let mut tasks = lock(&self.tasks);
        loop {
            if let Some(task) = tasks.pop_front() {
                return Some(task);
            }
            if self.is_over() {
                return None;
            }
            tasks = self.more_tasks.wait(tasks).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Counts a job that the CPU did after all, and how long it took until then.
    pub(super) fn note_rerun(&self, ticket: &Ticket) {
        self.rerun_jobs.fetch_add(1, Ordering::Relaxed);
        let us = u64::try_from(ticket.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.rerun_us_max.fetch_max(us, Ordering::Relaxed);
    }

    /// Tells what waits for a job.
    pub(super) fn answer(&self, ticket: Ticket, columns: CodedColumns) {
        self.tell(ticket, |tag, answer| answer.done(tag, columns));
    }

    /// Tells what waits for a job that there will be no answer.
    pub(super) fn lost(&self, ticket: Ticket) {
        self.tell(ticket, |tag, answer| answer.lost(tag));
    }

    fn tell(&self, ticket: Ticket, what: impl FnOnce(Tag, &dyn Answer)) {
        let Ticket { tag, answer, since: _ } = ticket;
        let panicked = || {
            let text = format!("what waited for job {} panicked at its answer", tag.0);
            self.event(0, GpuEventKind::Answer, text);
        };
        catch_unwind(AssertUnwindSafe(|| what(tag, &*answer))).unwrap_or_else(|_| panicked());
        // This may be the last that is held of it, and its end as bad.
        catch_unwind(AssertUnwindSafe(|| drop(answer))).unwrap_or_else(|_| panicked());
        self.release();
    }

    /// One job less that somebody waits for.
    fn release(&self) {
        if self.unanswered.fetch_sub(1, Ordering::SeqCst) == 1 && self.is_closing() {
            self.notify_end();
        }
    }

    /// Rouses whoever waits for the end. Each lock is taken between what it decides on and the call, so that none misses it.
    fn notify_end(&self) {
        drop(lock(&self.tasks));
        self.more_tasks.notify_all();
        drop(lock(&self.watch));
        self.look.notify_all();
        drop(lock(&self.ended));
        self.end.notify_all();
    }

    /// A batch was started: from now on somebody has to look after it.
    pub(super) fn watch_over(&self) {
        let mut awake = lock(&self.watch);
        if !*awake {
            *awake = true;
            self.look.notify_one();
        }
    }

    /// Before the watchdog looks: whatever starts from here on rouses it.
    pub(super) fn watch_begins(&self) {
        *lock(&self.watch) = false;
    }

    /// Sleeps until `deadline`, or until something starts if there is none. False when it is all over.
    pub(super) fn watch_sleeps(&self, deadline: Option<Instant>) -> bool {
        let mut awake = lock(&self.watch);
        if let Some(deadline) = deadline {
            // All that starts meanwhile can only hang later.
            *awake = true;
            let left = deadline.saturating_duration_since(Instant::now());
            if !self.is_over() {
                drop(self.look.wait_timeout(awake, left).unwrap_or_else(PoisonError::into_inner));
            }
        } else {
            while !*awake && !self.is_over() {
                awake = self.look.wait(awake).unwrap_or_else(PoisonError::into_inner);
            }
        }
        !self.is_over()
    }

    /// What of a batch is to be compared: the same parts for the same seed.
    pub(super) fn sample(&self, jobs: &[Finished]) -> Option<Sample> {
        let config = &self.settings.config;
        let nth = self.sampled.fetch_add(1, Ordering::Relaxed);
        Sample::of(jobs, config.verify, mix(config.verify_seed ^ mix(nth)))
    }

    pub(super) fn event(&self, lane: usize, kind: GpuEventKind, text: String) {
        let info = &self.lanes[lane].info;
        lock(&self.events).push(GpuEvent { device: info.index, name: info.name.clone(), kind, text });
    }

    pub(super) fn take_events(&self) -> Vec<GpuEvent> {
        lock(&self.events).take()
    }

    pub(super) fn report(&self) -> GpuReport {
        let (waiting_jobs, waiting_bytes) = self.queue().waiting();
        GpuReport {
            devices: self.lanes.iter().map(Lane::report).collect(),
            decisions: self.decisions.report(),
            rerun_jobs: self.rerun_jobs.load(Ordering::Relaxed),
            rerun_us_max: self.rerun_us_max.load(Ordering::Relaxed),
            verified_rows: self.verified_rows.load(Ordering::Relaxed),
            waiting_jobs: waiting_jobs as u64,
            waiting_bytes,
        }
    }

    /// Ends everything: what waits goes to the CPU, what is under way ends or hangs, all of it is answered. Waits for that
    /// unless this is one of the threads that would have to do it.
    pub(super) fn close(&self) {
        let mut queue = self.queue();
        queue.closing = true;
        let left = queue.drain();
        drop(queue);
        self.closing.store(true, Ordering::SeqCst);
        self.run_on_cpu(left, false);
        self.lanes.iter().for_each(|lane| lane.send(Event::Close));
        self.notify_end();
        if OWN_THREAD.get() {
            return;
        }
        let until = Instant::now() + self.settings.config.hang_after + CLOSE_MAX;
        let mut ended = lock(&self.ended);
        while !(self.is_over() && self.lanes.iter().all(|lane| !lane.lock().up)) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            ended = self.end.wait_timeout(ended, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Lane {
    fn report(&self) -> DeviceReport {
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

/// What operators are told of a device that is given up: how much was under way, and for how long.
fn told(text: &str, batches: &[Running]) -> String {
    let jobs: usize = batches.iter().map(|running| running.taken.tickets.len()).sum();
    match batches.iter().map(|running| running.started.elapsed()).max() {
        Some(longest) => {
            let seconds = longest.as_secs_f64();
            format!("{text}; {jobs} jobs begun up to {seconds:.3} s ago are done by the CPU")
        }
        None => text.to_owned(),
    }
}

/// What panics under a lock leaves nothing half done that matters here: moves of jobs cannot panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
