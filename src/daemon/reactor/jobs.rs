//! Runs the jobs that volumes give away, so that the reactor goes on serving while columns are coded and
//! hashed: on a GPU where that is sooner, otherwise on threads.
//!
//! The reactor does the work itself where it has no core to spare, or where the volume serves a single
//! request: handing a job to a thread and back takes longer than coding a stripe. The jobs of one turn are
//! offered to the GPUs together, so that one launch can do them all. Small jobs of clients gather until they
//! fill the processor's registers side by side, or until there is nothing else to do. Must not know what the
//! work is.

use super::mailbox::Mailbox;
use super::orders::ArrayId;
use super::sys;
use crate::daemon::drill;
use calpe_core::codec::{BlockHasher, CodedColumns};
use calpe_core::units::ROW_BYTES;
use calpe_core::volume::{self, OpKey, Urgency, Work, WorkDone};
use calpe_gpu::{Answer, CpuLoad, GpuRuntime, Tag};
use slab::Slab;
use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Most threads of one reactor: with BLAKE3 and four parities these keep up with what one reactor can
/// receive.
const THREADS_MAX: usize = 4;

/// Jobs of clients with less input than this are done on the reactor's thread, together: handing them to a
/// thread and back takes longer.
const SMALL_BYTES: usize = 64 << 10;

/// The same limit for jobs that only check CRCs, where there is just one thread: a CRC costs a tenth
/// of the copy of a block, and that copy leaves the block in the cache.
const CRC_BYTES: usize = 1 << 20;

/// Bytes of small jobs that are done at once: two rounds of the widest registers, sixteen blocks each.
const GATHERED_BYTES_MAX: usize = 32 * ROW_BYTES as usize;

/// Jobs of clients that threads take in a row while a job of a rebuild or scrub waits.
const PASSED_OVER_MAX: u32 = 7;

/// Receiver of a job's result: an operation of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) array: ArrayId,
    pub(super) op: OpKey,
}

/// A job of one of the reactor's arrays.
pub(super) type Job = volume::Job<Owner>;

/// Its result.
pub(super) type JobDone = volume::JobDone<Owner>;

/// What a thread returns: its result, or the panic of the job.
type Outcome = Result<JobDone, Box<dyn Any + Send>>;

/// A result from a thread or a GPU.
enum Returned {
    Thread(Outcome),
    Gpu(Tag, CodedColumns),
    /// A job that panicked on the CPU after a GPU was given it.
    Lost(Tag),
}

/// The threads of a reactor, and what it has done itself.
pub(super) struct Jobs {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    gpu: Option<Gpu>,
    /// Small jobs, to be done on this thread together.
    small: Vec<Job>,
    small_bytes: usize,
    /// Jobs given away whose results have not been taken.
    outstanding: usize,
    /// Bytes of the inputs that the threads hold.
    threads_bytes: usize,
    done: VecDeque<JobDone>,
}

struct Gpu {
    runtime: GpuRuntime,
    answer: Arc<dyn Answer>,
    /// The jobs of this turn, to be offered at its end.
    turn: Vec<Job>,
    /// Owner and urgency of each job that a GPU took, by tag.
    taken: Slab<Taken>,
}

struct Taken {
    owner: Owner,
    urgency: Urgency,
}

struct Shared {
    waiting: Mutex<Waiting>,
    more: Condvar,
    done: Mutex<Vec<Returned>>,
    mailbox: Arc<Mailbox>,
}

#[derive(Default)]
struct Waiting {
    clients: VecDeque<Job>,
    background: VecDeque<Job>,
    /// Jobs of clients taken since the last one of a pass.
    passed_over: u32,
    closing: bool,
}

impl Waiting {
    fn push(&mut self, job: Job) {
        let line = if job.urgency == Urgency::Background { &mut self.background } else { &mut self.clients };
        line.push_back(job);
    }

    /// The next job: a client's first, but every eighth one from a pass, if one waits, because a pass is
    /// promised a rate.
    fn pop(&mut self) -> Option<Job> {
        if self.passed_over < PASSED_OVER_MAX
            && let Some(job) = self.clients.pop_front()
        {
            self.passed_over += u32::from(!self.background.is_empty());
            return Some(job);
        }
        self.passed_over = 0;
        self.background.pop_front().or_else(|| self.clients.pop_front())
    }
}

impl Jobs {
    /// As many threads as there are cores beside the reactor's own, and GPUs where there are any.
    ///
    /// # Errors
    /// When the system has no thread to give.
    pub(super) fn new(mailbox: Arc<Mailbox>, gpu: Option<GpuRuntime>) -> io::Result<Jobs> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self::with_threads((cores - 1).min(THREADS_MAX), mailbox, gpu)
    }

    fn with_threads(threads: usize, mailbox: Arc<Mailbox>, gpu: Option<GpuRuntime>) -> io::Result<Jobs> {
        let (waiting, done) = (Mutex::default(), Mutex::default());
        let shared = Arc::new(Shared { waiting, more: Condvar::new(), done, mailbox });
        let gpu = gpu.map(|runtime| Gpu {
            runtime,
            answer: Arc::clone(&shared) as Arc<dyn Answer>,
            turn: Vec::new(),
            taken: Slab::new(),
        });
        let mut jobs = Jobs {
            shared,
            threads: Vec::new(),
            gpu,
            small: Vec::new(),
            small_bytes: 0,
            outstanding: 0,
            threads_bytes: 0,
            done: VecDeque::new(),
        };
        for number in 0..threads {
            let shared = Arc::clone(&jobs.shared);
            let thread = std::thread::Builder::new().name(format!("job-{number}"));
            jobs.threads.push(thread.spawn(move || {
                sys::reset_priority();
                shared.work();
            })?);
        }
        Ok(jobs)
    }

    /// Does a job here, or gives it away, at the latest at the [end of this turn](Jobs::end_turn). `only`: it
    /// came alone. A small job waits for [`Jobs::do_small`] at most.
    pub(super) fn submit(&mut self, job: Job, only: bool) {
        if only && self.outstanding == 0 && job.urgency == Urgency::Alone {
            self.done.push_back(job.run());
            return;
        }
        let bytes = job.work.input_bytes();
        if bytes < self.small_bytes_max(&job.work) && job.urgency != Urgency::Background {
            self.small.push(job);
            self.small_bytes += bytes;
            if self.small_bytes >= GATHERED_BYTES_MAX {
                self.do_small();
            }
            return;
        }
        match &mut self.gpu {
            Some(gpu) => gpu.turn.push(job),
            None => self.give_threads(job),
        }
    }

    /// Jobs of clients with less input than this are done on this thread.
    fn small_bytes_max(&self, work: &Work) -> usize {
        let Work::Code(work) = work;
        let is_crc = work.transform.is_none() && work.hasher == Some(BlockHasher::Crc32c);
        if is_crc && self.threads.len() == 1 { CRC_BYTES } else { SMALL_BYTES }
    }

    /// Does the small jobs that have gathered. Returns whether there were any.
    pub(super) fn do_small(&mut self) -> bool {
        self.small_bytes = 0;
        let small = std::mem::take(&mut self.small);
        let any = !small.is_empty();
        let (owners, work): (Vec<Owner>, Vec<Work>) =
            small.into_iter().map(|Job { owner, work, .. }| (owner, work)).unzip();
        let done = owners.into_iter().zip(Work::run_together(work));
        self.done.extend(done.map(|(owner, done)| JobDone { owner, done }));
        any
    }

    /// Offers the jobs of this turn to the GPUs; threads get the rest.
    pub(super) fn end_turn(&mut self) {
        let cpu = CpuLoad { threads: self.threads.len(), waiting_bytes: self.threads_bytes };
        let Some(gpu) = self.gpu.as_mut().filter(|gpu| !gpu.turn.is_empty()) else { return };
        let turn = std::mem::take(&mut gpu.turn);
        self.outstanding += turn.len();
        let offered = turn.into_iter().map(|Job { owner, work: Work::Code(work), urgency }| {
            let tag = gpu.taken.insert(Taken { owner, urgency });
            (Tag(tag as u64), work)
        });
        let rest = gpu.runtime.offer(offered.collect(), cpu, &gpu.answer);
        self.outstanding -= rest.len();
        let rest: Vec<Job> = rest
            .into_iter()
            .map(|(tag, work)| {
                let Taken { owner, urgency } = gpu.taken.remove(tag.0 as usize);
                Job { owner, work: Work::Code(work), urgency }
            })
            .collect();
        for job in rest {
            self.give_threads(job);
        }
    }

    fn give_threads(&mut self, job: Job) {
        if self.threads.is_empty() {
            self.done.push_back(job.run());
            return;
        }
        self.outstanding += 1;
        self.threads_bytes += job.work.input_bytes();
        lock(&self.shared.waiting).push(job);
        self.shared.more.notify_one();
    }

    /// Whether there are results that wake nobody: those of this thread, and those of other threads after the
    /// first, which alone wakes the reactor and may have found it too busy to take the rest.
    pub(super) fn has_done(&self) -> bool {
        !self.done.is_empty()
            || !self.small.is_empty()
            || (self.outstanding > 0 && !lock(&self.shared.done).is_empty())
    }

    /// The next result.
    ///
    /// # Panics
    /// If the job panicked.
    pub(super) fn next_done(&mut self) -> Option<JobDone> {
        if self.done.is_empty() && self.outstanding > 0 {
            let done = std::mem::take(&mut *lock(&self.shared.done));
            self.outstanding -= done.len();
            for returned in done {
                let done = match returned {
                    Returned::Thread(outcome) => {
                        let done = outcome.unwrap_or_else(|panic| resume_unwind(panic));
                        self.threads_bytes -= done.done.input_bytes();
                        done
                    }
                    Returned::Gpu(tag, columns) => {
                        let gpu = self.gpu.as_mut().expect("only a GPU gives back what it has taken");
                        let Taken { owner, .. } = gpu.taken.remove(tag.0 as usize);
                        JobDone { owner, done: WorkDone::Code(columns) }
                    }
                    Returned::Lost(tag) => panic!("job {} panicked after a GPU had taken it", tag.0),
                };
                self.done.push_back(done);
            }
        }
        self.done.pop_front()
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        let mut waiting = lock(&self.shared.waiting);
        waiting.closing = true;
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
        while let Some(job) = self.next() {
            drill::point("job");
            let outcome = catch_unwind(AssertUnwindSafe(|| job.run()));
            self.give_back(Returned::Thread(outcome));
        }
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

    fn next(&self) -> Option<Job> {
        let mut waiting = lock(&self.waiting);
        loop {
            if waiting.closing {
                return None;
            }
            if let Some(job) = waiting.pop() {
                return Some(job);
            }
            waiting = self.more.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Answer for Shared {
    fn done(&self, tag: Tag, columns: CodedColumns) {
        self.give_back(Returned::Gpu(tag, columns));
    }

    fn lost(&self, tag: Tag) {
        self.give_back(Returned::Lost(tag));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use calpe_core::block_io::Pool;
    use calpe_core::codec::{Codec, CodecJob, Column, Outputs};
    use std::time::{Duration, Instant};

    fn mailbox() -> Arc<Mailbox> {
        Arc::new(Mailbox::new().expect("an eventfd"))
    }

    fn job(pool: &Pool, array: u32, op: usize, urgency: Urgency) -> Job {
        job_of(pool, SMALL_BYTES, array, op, urgency)
    }

    fn owner(array: u32, op: usize) -> Owner {
        Owner { array: ArrayId(array), op: OpKey(op) }
    }

    fn job_of(pool: &Pool, bytes: usize, array: u32, op: usize, urgency: Urgency) -> Job {
        let mut column = pool.alloc(bytes);
        column.fill(op as u8);
        let work = CodecJob {
            transform: Some(Codec::new(1, 1).expect("a geometry").encoding()),
            hasher: Some(BlockHasher::Blake3),
            inputs: vec![Column::Owned(column)],
            outputs: Outputs::Into(vec![pool.alloc(bytes)]),
        };
        Job { owner: owner(array, op), work: Work::Code(work), urgency }
    }

    #[test]
    fn every_job_is_done_once_and_the_reactor_is_woken() {
        let (pool, mailbox) = (Pool::new(80 << 20).expect("memory"), mailbox());
        let mut jobs = Jobs::with_threads(3, Arc::clone(&mailbox), None).expect("threads");
        for key in 0..500 {
            jobs.submit(job(&pool, key as u32 % 2, key, Urgency::Client), false);
        }
        let (started, mut seen, mut wakes) = (Instant::now(), vec![false; 500], 0);
        while !seen.iter().all(|done| *done) {
            wakes += u64::from(mailbox.was_woken());
            while let Some(JobDone { owner: Owner { array, op: OpKey(key) }, done }) = jobs.next_done() {
                let WorkDone::Code(columns) = done;
                assert_eq!(array, ArrayId(key as u32 % 2));
                assert_eq!(columns.outputs[0][..4096], [key as u8; 4096][..], "1+1 is a mirror");
                assert!(!std::mem::replace(&mut seen[key], true), "done twice");
            }
            assert!(started.elapsed() < Duration::from_secs(60), "jobs are lost");
        }
        assert!(jobs.outstanding == 0 && jobs.next_done().is_none());
        // Where all were done between two looks, the reactor is woken after it has taken the results.
        while wakes == 0 {
            wakes += u64::from(mailbox.was_woken());
            assert!(started.elapsed() < Duration::from_secs(60), "nobody was woken");
        }
    }

    #[test]
    fn small_jobs_of_clients_gather_and_are_done_here() {
        let pool = Pool::new(8 << 20).expect("memory");
        let mut jobs = Jobs::with_threads(1, mailbox(), None).expect("threads");
        let enough = GATHERED_BYTES_MAX / 4096;
        for key in 0..enough - 1 {
            jobs.submit(job_of(&pool, 4096, 1, key, Urgency::Client), false);
            assert!(jobs.next_done().is_none(), "they wait for company");
        }
        assert!(jobs.has_done(), "but nobody sleeps over them");
        jobs.submit(job_of(&pool, 4096, 2, enough - 1, Urgency::Client), false);
        assert!(!jobs.do_small(), "enough are done at once");
        for key in 0..enough {
            let JobDone { owner: done, done: WorkDone::Code(columns) } = jobs.next_done().expect("done");
            assert_eq!(done, owner(if key == enough - 1 { 2 } else { 1 }, key));
            assert_eq!(columns.outputs[0][..], [key as u8; 4096][..], "1+1 is a mirror");
        }
        jobs.submit(job_of(&pool, 4096, 1, 7, Urgency::Client), false);
        assert!(jobs.do_small() && jobs.next_done().is_some_and(|done| done.owner == owner(1, 7)));
        assert!(jobs.outstanding == 0 && jobs.next_done().is_none());
    }

    #[test]
    fn where_cores_are_few_crcs_are_checked_here() {
        let pool = Pool::new(8 << 20).expect("memory");
        let check = |hasher| {
            let inputs = vec![Column::Owned(pool.alloc(GATHERED_BYTES_MAX))];
            let work =
                CodecJob { transform: None, hasher: Some(hasher), inputs, outputs: Outputs::Into(vec![]) };
            Job { owner: owner(1, 1), work: Work::Code(work), urgency: Urgency::Client }
        };
        for (threads, hasher, is_here) in
            [(1, BlockHasher::Crc32c, true), (1, BlockHasher::Blake3, false), (2, BlockHasher::Crc32c, false)]
        {
            let mut jobs = Jobs::with_threads(threads, mailbox(), None).expect("threads");
            jobs.submit(check(hasher), false);
            assert_eq!(jobs.outstanding == 0, is_here, "{threads} {hasher:?}");
            assert_eq!(!jobs.done.is_empty(), is_here, "{threads} {hasher:?}");
        }
        let mut jobs = Jobs::with_threads(1, mailbox(), None).expect("a thread");
        jobs.submit(Job { urgency: Urgency::Background, ..check(BlockHasher::Crc32c) }, false);
        assert_eq!(jobs.outstanding, 1, "what nobody waits for keeps nobody waiting");
    }

    #[test]
    fn a_lone_job_and_any_without_threads_is_done_here() {
        let (pool, mailbox) = (Pool::new(1 << 20).expect("memory"), mailbox());
        let mut jobs = Jobs::with_threads(1, Arc::clone(&mailbox), None).expect("a thread");
        jobs.submit(job(&pool, 1, 1, Urgency::Alone), true);
        assert!(jobs.has_done() && jobs.outstanding == 0);
        jobs.submit(job(&pool, 1, 2, Urgency::Alone), false);
        assert_eq!(jobs.outstanding, 1);
        let mut none = Jobs::with_threads(0, mailbox, None).expect("no thread");
        none.submit(job(&pool, 1, 3, Urgency::Client), false);
        assert_eq!(none.next_done().map(|done| done.owner), Some(owner(1, 3)));
    }

    #[test]
    #[should_panic(expected = "job 7 panicked")]
    fn what_panicked_for_a_gpu_panics_here_as_what_threads_did_does() {
        let mut jobs = Jobs::with_threads(0, mailbox(), None).expect("no threads");
        jobs.outstanding = 1;
        jobs.shared.lost(Tag(7));
        jobs.next_done();
    }

    #[test]
    fn what_the_reactor_was_woken_for_and_left_is_not_forgotten() {
        let (pool, mailbox) = (Pool::new(1 << 20).expect("memory"), mailbox());
        let mut jobs = Jobs::with_threads(1, Arc::clone(&mailbox), None).expect("a thread");
        jobs.submit(job(&pool, 1, 4, Urgency::Client), false);
        let started = Instant::now();
        while !mailbox.was_woken() {
            assert!(started.elapsed() < Duration::from_secs(60), "nobody is woken");
            std::thread::yield_now();
        }
        assert!(jobs.has_done(), "nothing else would wake the reactor for it");
        assert_eq!(jobs.next_done().map(|done| done.owner), Some(owner(1, 4)));
        assert!(!jobs.has_done());
    }

    #[test]
    fn clients_go_first_and_a_pass_is_not_forgotten() {
        let pool = Pool::new(8 << 20).expect("memory");
        let mut waiting = Waiting::default();
        for key in 0..4 {
            waiting.push(job(&pool, 0, 100 + key, Urgency::Background));
        }
        for key in 0..20 {
            waiting.push(job(&pool, 0, key, Urgency::Client));
        }
        let order: Vec<usize> = std::iter::from_fn(|| waiting.pop()).map(|job| job.owner.op.0).collect();
        let expected = (0..7).chain([100]).chain(7..14).chain([101]).chain(14..20).chain([102, 103]);
        assert_eq!(order, expected.collect::<Vec<_>>());
    }

    #[test]
    fn threads_end_with_their_owner_whatever_waits() {
        let pool = Pool::new(8 << 20).expect("memory");
        let mut jobs = Jobs::with_threads(2, mailbox(), None).expect("threads");
        (0..200).for_each(|key| jobs.submit(job(&pool, 0, key, Urgency::Client), false));
        drop(jobs);
    }
}
