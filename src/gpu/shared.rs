//! What the threads of the runtime share: the queue, the lanes of the devices, tasks for the CPU,
//! and counts.
//!
//! Invariants: every taken job is at any moment in exactly one place: the queue, a device's running
//! batches, the tasks, or the stack of the thread that answers it. A device runs for its lane
//! exactly while it does for the queue: both change under the lane's lock, which is taken before
//! the queue's and the events'; no other two of the locks here are held at once, but the end waits
//! for lanes. Must not know of addresses.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use calpe_core::block_io::Pool;
use calpe_core::codec::{CodecJob, CodedColumns};

use super::alarm::Alarm;
use super::answer::{Answer, Finished, Tag, Ticket};
use super::calibrate::CalibrationSource;
use super::config::GpuConfig;
use super::device::{Device, Driver};
use super::lane::{Event, GivenUp, Lane, Running};
use super::metrics::{Decisions, Events, GpuEvent, GpuEventKind, GpuReport};
use super::policy::{Costs, Verdict};
use super::queue::{Queue, Taken};
use super::tasks::{Task, Tasks};
use super::verify::{Sample, mix};

/// How long the end of the runtime waits, beyond a hang, for the CPU to do the remaining jobs. Then
/// its threads go on alone.
const CLOSE_MAX: Duration = Duration::from_secs(10);

thread_local! {
    /// Whether this thread belongs to a runtime: such a thread must not wait for a runtime's
    /// threads.
    static OWN_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// The arguments that the runtime was started with.
pub(super) struct Settings {
    pub(super) config: GpuConfig,
    pub(super) driver: Arc<dyn Driver>,
    /// At least one; replacement buffers come from the first.
    pub(super) pools: Vec<Pool>,
    pub(super) calibration: CalibrationSource,
}

/// See the module's head.
pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) lanes: Vec<Lane>,
    queue: Mutex<Queue>,
    /// The most that a job may take of a slot; 0 while no device runs. A hint that needs no lock.
    pub(super) slot_bytes: AtomicUsize,
    pub(super) decisions: DecisionCounts,
    /// Number of jobs taken and not answered.
    pub(super) unanswered: AtomicUsize,
    closing: AtomicBool,
    tasks: Tasks,
    pub(super) alarm: Alarm,
    ended: Mutex<()>,
    end: Condvar,
    events: Mutex<Events>,
    /// Held while a device is measured: one at a time, since devices share links and cores.
    pub(super) measuring: Mutex<()>,
    pub(super) cpu_work: CpuWorkCounts,
}

/// Counts of the CPU's work for devices, without a lock.
#[derive(Default)]
pub(super) struct CpuWorkCounts {
    rerun_jobs: AtomicU64,
    /// The longest time that a requester waited for one of them, in microseconds.
    rerun_us_max: AtomicU64,
    verified_rows: AtomicU64,
    /// Batches that samples were taken of.
    sampled: AtomicU64,
}

impl CpuWorkCounts {
    /// Counts a job that the CPU did in the end, and the time until then.
    pub(super) fn note_rerun(&self, waited: Duration) {
        self.rerun_jobs.fetch_add(1, Ordering::Relaxed);
        let us = u64::try_from(waited.as_micros()).unwrap_or(u64::MAX);
        self.rerun_us_max.fetch_max(us, Ordering::Relaxed);
    }

    /// Counts rows that were compared.
    pub(super) fn note_verified(&self, rows: usize) {
        self.verified_rows.fetch_add(rows as u64, Ordering::Relaxed);
    }
}

/// Counts of jobs by decision, without a lock.
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
            tasks: Tasks::default(),
            alarm: Alarm::default(),
            ended: Mutex::new(()),
            end: Condvar::new(),
            events: Mutex::default(),
            measuring: Mutex::new(()),
            cpu_work: CpuWorkCounts::default(),
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

    /// Whether nothing is left to do, and no job can come.
    pub(super) fn is_over(&self) -> bool {
        self.is_closing() && self.unanswered.load(Ordering::SeqCst) == 0
    }

    /// A device runs from now on. Returns its generation, or None if it was found meanwhile to have
    /// computed wrongly: then it must not run again.
    pub(super) fn up(&self, lane: usize, costs: Arc<Costs>, device: &dyn Device) -> Option<u64> {
        let mut state = self.lanes[lane].lock();
        if state.is_wrong() {
            return None;
        }
        if state.has_failed() {
            self.event(lane, GpuEventKind::Reopened, "opened again and tested".to_owned());
        }
        let generation = state.opened(Arc::clone(&costs), device.slots(), device.process());
        // Under the lane's lock, so that nobody sees a device that runs and takes no jobs.
        let mut queue = self.queue();
        queue.up(lane, costs, device.slot_bytes());
        self.slot_bytes.store(queue.slot_bytes(), Ordering::Relaxed);
        Some(generation)
    }

    /// A device could not be opened.
    pub(super) fn not_opened(&self, lane: usize, reason: &str) {
        let first = self.lanes[lane].lock().not_opened(reason);
        // Later attempts usually fail, too: one event is enough.
        if first {
            self.event(lane, GpuEventKind::Failed, reason.to_owned());
        }
    }

    /// A device that was given up too often, or computed wrongly, is not opened again, or after a long rest.
    pub(super) fn leave_alone(&self, lane: usize, given_up: u32, rest: Option<Duration>) {
        let told = self.lanes[lane].lock().leave_alone(given_up, rest);
        if let Some(text) = told {
            self.event(lane, GpuEventKind::Failed, text);
        }
    }

    /// A device is closed, with nothing under way.
    pub(super) fn closed(&self, lane: usize) {
        let mut state = self.lanes[lane].lock();
        state.closed();
        let left = self.down(lane);
        drop(state);
        self.run_on_cpu(left, false);
        self.notify_end();
    }

    /// Stops trusting a generation of a device: its batches under way go to the CPU, and if no
    /// other device runs, so do the waiting jobs. A device that computed wrongly is given up in any
    /// generation. False if it was given up before.
    pub(super) fn give_up(&self, lane: usize, generation: u64, kind: GpuEventKind, text: &str) -> bool {
        let mut state = self.lanes[lane].lock();
        let GivenUp { ran, batches } = state.give_up(generation, kind, text);
        // Under the lane's lock: its manager, which may open it again at once, comes after this.
        let left = if ran { self.down(lane) } else { Vec::new() };
        drop(state);
        if ran || kind == GpuEventKind::Mismatch {
            self.event(lane, kind, told(text, &batches));
        }
        let touches = !self.settings.driver.is_isolated();
        for Running { taken, .. } in batches {
            self.run_taken_on_cpu(taken, touches);
        }
        if ran {
            self.run_on_cpu(left, false);
            if touches {
                // The device may still touch the memory of its batches: no slab is freed while this
                // process lives.
                self.settings.pools.iter().for_each(|pool| std::mem::forget(pool.clone()));
            }
            self.lanes[lane].send(Event::GivenUp);
            self.notify_end();
        }
        ran
    }

    /// Lets the queue know that a device runs no longer. Returns the waiting jobs when no other
    /// device runs.
    fn down(&self, lane: usize) -> Vec<(Ticket, CodecJob)> {
        let mut queue = self.queue();
        let left = queue.down(lane);
        self.slot_bytes.store(queue.slot_bytes(), Ordering::Relaxed);
        // This device may have been woken for the waiting jobs, and not have taken them.
        let next = queue.wake_one();
        drop(queue);
        if let Some(next) = next {
            self.lanes[next].send(Event::More);
        }
        left
    }

    /// Takes a batch for a device.
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

    /// Gives the jobs of a batch to the CPU. `touched`: a device may still read or write their
    /// bytes.
    pub(super) fn run_taken_on_cpu(&self, taken: Taken, touched: bool) {
        let Taken { batch, tickets, .. } = taken;
        self.run_on_cpu(tickets.into_iter().zip(batch.into_jobs()), touched);
    }

    fn run_on_cpu(&self, jobs: impl IntoIterator<Item = (Ticket, CodecJob)>, touched: bool) {
        self.tasks.extend(jobs.into_iter().map(|(ticket, job)| Task::Run { ticket, job, touched }));
    }

    /// Gives the CPU something to do.
    pub(super) fn push_task(&self, task: Task) {
        self.tasks.push(task);
    }

    /// The next task for the CPU, which is waited for; None when there will be none.
    pub(super) fn next_task(&self) -> Option<Task> {
        self.tasks.next(|| self.is_over())
    }

    /// Answers a job.
    pub(super) fn answer(&self, ticket: Ticket, columns: CodedColumns) {
        self.tell(ticket, |tag, answer| answer.done(tag, columns));
    }

    /// Reports that a job will have no answer.
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
        // This may drop the last reference to it, which may panic, too.
        catch_unwind(AssertUnwindSafe(|| drop(answer))).unwrap_or_else(|_| panicked());
        self.release();
    }

    /// Counts a job as answered.
    fn release(&self) {
        if self.unanswered.fetch_sub(1, Ordering::SeqCst) == 1 && self.is_closing() {
            self.notify_end();
        }
    }

    /// Rouses every thread that waits for the end. The lock is taken between the change and the
    /// notification, so that no thread misses it.
    fn notify_end(&self) {
        self.tasks.rouse();
        self.alarm.rouse();
        drop(lock(&self.ended));
        self.end.notify_all();
    }

    /// The sample of a batch to compare: the same rows for the same seed.
    pub(super) fn sample(&self, jobs: &[Finished]) -> Option<Sample> {
        let config = &self.settings.config;
        let nth = self.cpu_work.sampled.fetch_add(1, Ordering::Relaxed);
        Sample::of(jobs, config.verify, mix(config.verify_seed ^ mix(nth)))
    }

    pub(super) fn event(&self, lane: usize, kind: GpuEventKind, text: String) {
        let info = self.lanes[lane].info();
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
            rerun_jobs: self.cpu_work.rerun_jobs.load(Ordering::Relaxed),
            rerun_us_max: self.cpu_work.rerun_us_max.load(Ordering::Relaxed),
            verified_rows: self.cpu_work.verified_rows.load(Ordering::Relaxed),
            waiting_jobs: waiting_jobs as u64,
            waiting_bytes,
        }
    }

    /// Ends the runtime: waiting jobs go to the CPU, batches under way end or hang, and every job
    /// is answered. Waits for that, unless this thread is one of the runtime's.
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
        while !(self.is_over() && self.lanes.iter().all(|lane| !lane.lock().is_up())) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            ended = self.end.wait_timeout(ended, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The text of the event when a device is given up: how many jobs were under way, and for how long.
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

/// A panic under a lock leaves no job half moved: moves of jobs cannot panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{FakeDevice, FakeDriver};
    use std::sync::mpsc;
    use std::thread;

    fn costs() -> Arc<Costs> {
        Arc::new(Costs::linear(1e-6, 1e9, 1e6))
    }

    fn shared() -> Shared {
        let driver = FakeDriver::new(vec![FakeDevice::default()]);
        let info = driver.devices().expect("devices").remove(0);
        let settings = Settings {
            config: GpuConfig::default(),
            driver: Arc::new(driver),
            pools: vec![Pool::new(1 << 20).expect("memory")],
            calibration: CalibrationSource::Given(vec![]),
        };
        let mut queue = Queue::default();
        queue.lanes.push(Default::default());
        Shared::new(settings, vec![Lane::new(info, mpsc::channel().0)], queue)
    }

    fn device(shared: &Shared) -> Box<dyn Device> {
        shared.settings.driver.open(0, &[]).expect("it opens")
    }

    fn runs(shared: &Shared) -> (bool, bool, bool) {
        let up = shared.lanes[0].lock().is_up();
        (up, shared.queue().is_up(), shared.slot_bytes.load(Ordering::Relaxed) > 0)
    }

    #[test]
    fn a_device_that_is_found_wrong_while_it_is_opened_again_does_not_run() {
        let shared = shared();
        let device = device(&shared);
        let first = shared.up(0, costs(), &*device).expect("it runs");
        assert_eq!(runs(&shared), (true, true, true));
        assert!(shared.give_up(0, first, GpuEventKind::Failed, "it failed"));
        assert_eq!(runs(&shared), (false, false, false));
        assert!(!shared.give_up(0, first, GpuEventKind::Mismatch, "an answer of before was wrong"));
        assert_eq!(shared.up(0, costs(), &*device), None);
        assert_eq!(runs(&shared), (false, false, false));
    }

    #[test]
    fn whoever_sees_a_device_run_can_give_it_jobs() {
        let shared = shared();
        let device = device(&shared);
        thread::scope(|scope| {
            let watched = scope.spawn(|| {
                let mut seen = 0;
                while seen < 1000 {
                    let state = shared.lanes[0].lock();
                    let up = state.is_up();
                    assert_eq!(up, shared.queue().is_up());
                    assert_eq!(up, shared.slot_bytes.load(Ordering::Relaxed) > 0);
                    drop(state);
                    seen += usize::from(up);
                    thread::yield_now();
                }
            });
            while !watched.is_finished() {
                let generation = shared.up(0, costs(), &*device).expect("it runs");
                thread::yield_now();
                assert!(shared.give_up(0, generation, GpuEventKind::Failed, "it failed"));
            }
        });
    }
}
