//! The threads that run jobs for all reactors.
//!
//! Invariants: jobs of clients come before those of passes, but every eighth one is of a pass if one waits;
//! within both, arrays take turns, so that one with many jobs does not keep the others waiting. A result goes
//! back to the reactor that gave the job away. Must not know what jobs are for.

use super::mailbox::Mailbox;
use super::orders::{ArrayId, LaneId};
use super::sys;
use crate::daemon::drill;
use calpe_core::block_io::BufMut;
use calpe_core::codec::CodedColumns;
use calpe_core::volume::{self, OpKey, Urgency};
use calpe_gpu::{Answer, Tag};
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Most threads: jobs of more would only wait for memory together.
const THREADS_MAX: usize = 8;

/// Jobs of clients that threads take in a row while a job of a rebuild or scrub waits.
const PASSED_OVER_MAX: u32 = 7;

/// Receiver of a job's result: an operation of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) lane: LaneId,
    pub(super) op: OpKey,
}

/// A job of an array.
pub(super) type Job = volume::Job<Owner>;

/// Its result.
pub(super) type JobDone = volume::JobDone<Owner>;

/// What a thread returns: its result, or the panic of the job.
pub(super) type Outcome = Result<JobDone, Box<dyn Any + Send>>;

/// What the threads do beside the jobs of volumes.
pub(super) type Errand = Box<dyn FnOnce() -> ErrandDone + Send>;

/// Its result, for whoever sent it.
// Plain data: it travels between threads.
pub(super) struct ErrandDone {
    /// The sender's name for it.
    pub(super) key: usize,
    pub(super) buf: BufMut,
    pub(super) is_right: bool,
}

/// A result from a thread or a GPU.
pub(super) enum Returned {
    Thread(Outcome),
    Errand(ErrandDone),
    Gpu(Tag, CodedColumns),
    /// A job that panicked on the CPU after a GPU was given it.
    Lost(Tag),
}

/// Where the results of one reactor's jobs come.
pub(super) struct Returns {
    done: Mutex<Vec<Returned>>,
    mailbox: Arc<Mailbox>,
}

impl Returns {
    pub(super) fn new(mailbox: Arc<Mailbox>) -> Returns {
        Returns { done: Mutex::default(), mailbox }
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.done).is_empty()
    }

    pub(super) fn take(&self) -> Vec<Returned> {
        std::mem::take(&mut *lock(&self.done))
    }

    fn give_back(&self, returned: Returned) {
        let mut done = lock(&self.done);
        done.push(returned);
        let first = done.len() == 1;
        drop(done);
        // The reactor takes all that is there when it wakes.
        if first {
            self.mailbox.wake_reactor();
        }
    }
}

impl Answer for Returns {
    fn done(&self, tag: Tag, columns: CodedColumns) {
        self.give_back(Returned::Gpu(tag, columns));
    }

    fn lost(&self, tag: Tag) {
        self.give_back(Returned::Lost(tag));
    }
}

/// See the head of this file. Its threads end when it is dropped.
pub(super) struct JobPool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for JobPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobPool").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

struct Shared {
    waiting: Mutex<Waiting>,
    more: Condvar,
    /// Bytes of the inputs of the jobs that wait or run.
    bytes: AtomicUsize,
    /// Threads that wait for work.
    idle: AtomicUsize,
}

/// What a thread is to do, for which array, and where the result is awaited.
struct Task {
    array: ArrayId,
    what: What,
    returns: Arc<Returns>,
}

enum What {
    Job(Job),
    Errand(Errand),
}

#[derive(Default)]
struct Waiting {
    clients: Line<Task>,
    background: Line<Task>,
    /// Jobs of clients taken since the last one of a pass.
    passed_over: u32,
    is_closing: bool,
}

/// Jobs of all arrays, which take turns.
pub(super) struct Line<T> {
    tasks: HashMap<ArrayId, VecDeque<T>>,
    turns: VecDeque<ArrayId>,
}

impl<T> Default for Line<T> {
    fn default() -> Line<T> {
        Line { tasks: HashMap::new(), turns: VecDeque::new() }
    }
}

impl<T> Line<T> {
    pub(super) fn push(&mut self, array: ArrayId, task: T) {
        let tasks = self.tasks.entry(array).or_default();
        if tasks.is_empty() {
            self.turns.push_back(array);
        }
        tasks.push_back(task);
    }

    pub(super) fn pop(&mut self) -> Option<T> {
        let array = self.turns.pop_front()?;
        let tasks = self.tasks.get_mut(&array)?;
        let task = tasks.pop_front();
        if tasks.is_empty() {
            self.tasks.remove(&array);
        } else {
            self.turns.push_back(array);
        }
        task
    }

    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// All of them, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.tasks.values().flatten()
    }

    fn retain(&mut self, is_kept: impl Fn(&T) -> bool) {
        self.tasks.values_mut().for_each(|tasks| tasks.retain(&is_kept));
        self.tasks.retain(|_, tasks| !tasks.is_empty());
        let tasks = &self.tasks;
        self.turns.retain(|array| tasks.contains_key(array));
    }
}

impl Waiting {
    fn push(&mut self, task: Task) {
        let is_of_pass = matches!(&task.what, What::Job(job) if job.urgency == Urgency::Background);
        let line = if is_of_pass { &mut self.background } else { &mut self.clients };
        line.push(task.array, task);
    }

    /// The next job: a client's first, but every eighth one from a pass, if one waits, because a pass is
    /// promised a rate.
    fn pop(&mut self) -> Option<Task> {
        if self.passed_over < PASSED_OVER_MAX
            && let Some(task) = self.clients.pop()
        {
            self.passed_over += u32::from(!self.background.is_empty());
            return Some(task);
        }
        self.passed_over = 0;
        self.background.pop().or_else(|| self.clients.pop())
    }
}

impl JobPool {
    /// As many threads as there are cores beside that of one reactor, up to a limit.
    ///
    /// # Errors
    /// When the system has no thread to give.
    pub(super) fn new() -> io::Result<JobPool> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        JobPool::with_threads((cores - 1).min(THREADS_MAX))
    }

    pub(super) fn with_threads(count: usize) -> io::Result<JobPool> {
        let (waiting, bytes, idle) = (Mutex::default(), AtomicUsize::new(0), AtomicUsize::new(0));
        let shared = Arc::new(Shared { waiting, more: Condvar::new(), bytes, idle });
        let mut pool = JobPool { shared, threads: Vec::new() };
        for number in 0..count {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new().name(format!("job-{number}"));
            pool.threads.push(thread.spawn(move || {
                sys::reset_priority();
                shared.work();
            })?);
        }
        Ok(pool)
    }

    pub(super) fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Bytes of the inputs of the jobs that wait or run.
    pub(super) fn bytes(&self) -> usize {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// Takes a job; there must be threads.
    pub(super) fn submit(&self, job: Job, returns: &Arc<Returns>) {
        self.shared.bytes.fetch_add(job.work.input_bytes(), Ordering::Relaxed);
        self.push(Task { array: job.owner.lane.array(), what: What::Job(job), returns: Arc::clone(returns) });
    }

    /// Takes an errand for an array; there must be threads.
    pub(super) fn run(&self, array: ArrayId, errand: Errand, returns: &Arc<Returns>) {
        self.push(Task { array, what: What::Errand(errand), returns: Arc::clone(returns) });
    }

    fn push(&self, task: Task) {
        lock(&self.shared.waiting).push(task);
        self.shared.more.notify_one();
    }

    /// How many threads have nothing to do, about.
    pub(super) fn idle(&self) -> usize {
        self.shared.idle.load(Ordering::Relaxed)
    }

    /// Drops the jobs that wait for a thread and whose results nobody will take.
    pub(super) fn drop_of(&self, returns: &Arc<Returns>) {
        let mut waiting = lock(&self.shared.waiting);
        let is_of_another = |task: &Task| !Arc::ptr_eq(&task.returns, returns);
        waiting.clients.retain(is_of_another);
        waiting.background.retain(is_of_another);
    }
}

impl Drop for JobPool {
    fn drop(&mut self) {
        let mut waiting = lock(&self.shared.waiting);
        waiting.is_closing = true;
        (waiting.clients, waiting.background) = Default::default();
        drop(waiting);
        self.shared.more.notify_all();
        for thread in self.threads.drain(..) {
            // A job's panic was returned as its outcome.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        while let Some(Task { what, returns, .. }) = self.next() {
            drill::point("job");
            match what {
                What::Job(job) => {
                    let bytes = job.work.input_bytes();
                    let outcome = catch_unwind(AssertUnwindSafe(|| job.run()));
                    self.bytes.fetch_sub(bytes, Ordering::Relaxed);
                    returns.give_back(Returned::Thread(outcome));
                }
                // A panic in one ends the process, like any other.
                What::Errand(errand) => returns.give_back(Returned::Errand(errand())),
            }
        }
    }

    fn next(&self) -> Option<Task> {
        let mut waiting = lock(&self.waiting);
        loop {
            if waiting.is_closing {
                return None;
            }
            if let Some(task) = waiting.pop() {
                return Some(task);
            }
            self.idle.fetch_add(1, Ordering::Relaxed);
            waiting = self.more.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            self.idle.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use calpe_core::block_io::Pool;
    use calpe_core::codec::{BlockHasher, Codec, CodecJob, Column, Outputs};
    use calpe_core::units::LaneIndex;
    use calpe_core::volume::Work;

    fn task(pool: &Pool, (array, op): (u32, usize), urgency: Urgency, returns: &Arc<Returns>) -> Task {
        let work = CodecJob {
            transform: Some(Codec::new(1, 1).expect("a geometry").encoding()),
            hasher: Some(BlockHasher::Blake3),
            inputs: vec![Column::Owned(pool.alloc(4096))],
            outputs: Outputs::Into(vec![pool.alloc(4096)]),
        };
        let owner = Owner { lane: LaneId::new(ArrayId(array), LaneIndex(0)), op: OpKey(op) };
        let what = What::Job(Job { owner, work: Work::Code(work), urgency });
        Task { array: ArrayId(array), what, returns: Arc::clone(returns) }
    }

    fn returns() -> Arc<Returns> {
        Arc::new(Returns::new(Arc::new(Mailbox::new().expect("an eventfd"))))
    }

    fn order(waiting: &mut Waiting) -> Vec<usize> {
        let op = |task: Task| match task.what {
            What::Job(job) => job.owner.op.0,
            What::Errand(_) => unreachable!("none was sent"),
        };
        std::iter::from_fn(|| waiting.pop()).map(op).collect()
    }

    #[test]
    fn clients_go_first_and_a_pass_is_not_forgotten() {
        let (pool, returns) = (Pool::new(8 << 20).expect("memory"), returns());
        let mut waiting = Waiting::default();
        for key in 0..4 {
            waiting.push(task(&pool, (0, 100 + key), Urgency::Background, &returns));
        }
        for key in 0..20 {
            waiting.push(task(&pool, (0, key), Urgency::Client, &returns));
        }
        let expected = (0..7).chain([100]).chain(7..14).chain([101]).chain(14..20).chain([102, 103]);
        assert_eq!(order(&mut waiting), expected.collect::<Vec<_>>());
    }

    #[test]
    fn arrays_take_turns_and_what_an_ended_reactor_gave_away_is_dropped() {
        let (pool, ended, other) = (Pool::new(8 << 20).expect("memory"), returns(), returns());
        let mut waiting = Waiting::default();
        for key in 0..4 {
            waiting.push(task(&pool, (1, key), Urgency::Client, &other));
            waiting.push(task(&pool, (3, 50 + key), Urgency::Client, &ended));
        }
        waiting.push(task(&pool, (2, 10), Urgency::Client, &other));
        waiting.clients.retain(|task| !Arc::ptr_eq(&task.returns, &ended));
        assert_eq!(order(&mut waiting), [0, 10, 1, 2, 3]);
        assert!(waiting.clients.is_empty() && waiting.clients.tasks.is_empty());
    }

    #[test]
    fn threads_end_with_the_pool_whatever_waits() {
        let (memory, returns) = (Pool::new(8 << 20).expect("memory"), returns());
        let pool = JobPool::with_threads(2).expect("threads");
        for key in 0..200 {
            pool.push(task(&memory, (0, key), Urgency::Client, &returns));
        }
        drop(pool);
    }
}
