//! Threads for work that volumes give away, so that a reactor goes on serving while stripes are coded and hashed.
//!
//! A reactor with no core to spare does the work itself, and so does one whose volume serves a lone request: the way
//! to a thread and back takes longer than a stripe. Must not know what the work is.

use super::ArrayId;
use super::handle::Mailbox;
use crate::volume::{Job, JobDone};
use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Threads of one reactor at most: with BLAKE3 and four parities these keep up with what one reactor can receive.
const THREADS_MAX: usize = 4;

type Outcome = Result<JobDone, Box<dyn Any + Send>>;

/// The threads of a reactor, and what it has done itself.
pub(super) struct Jobs {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Given to threads and not taken back.
    outstanding: usize,
    done: VecDeque<(ArrayId, JobDone)>,
}

struct Shared {
    waiting: Mutex<Waiting>,
    more: Condvar,
    done: Mutex<Vec<(ArrayId, Outcome)>>,
    mailbox: Arc<Mailbox>,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<(ArrayId, Job)>,
    closing: bool,
}

impl Jobs {
    /// As many threads as there are cores beside the reactor's own.
    ///
    /// # Errors
    /// When the system has no thread to give.
    pub(super) fn new(mailbox: Arc<Mailbox>) -> io::Result<Jobs> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self::with_threads((cores - 1).min(THREADS_MAX), mailbox)
    }

    fn with_threads(threads: usize, mailbox: Arc<Mailbox>) -> io::Result<Jobs> {
        let (waiting, done) = (Mutex::default(), Mutex::default());
        let shared = Arc::new(Shared { waiting, more: Condvar::new(), done, mailbox });
        let mut jobs = Jobs { shared, threads: Vec::new(), outstanding: 0, done: VecDeque::new() };
        for number in 0..threads {
            let shared = Arc::clone(&jobs.shared);
            let thread = std::thread::Builder::new().name(format!("job-{number}"));
            jobs.threads.push(thread.spawn(move || shared.work())?);
        }
        Ok(jobs)
    }

    /// Does a job here, or gives it to a thread. `only`: no other came with it.
    pub(super) fn submit(&mut self, array: ArrayId, job: Job, only: bool) {
        if self.threads.is_empty() || (only && self.outstanding == 0 && job.alone) {
            self.done.push_back((array, job.run()));
            return;
        }
        self.outstanding += 1;
        lock(&self.shared.waiting).jobs.push_back((array, job));
        self.shared.more.notify_one();
    }

    /// Whether something is done that nobody is woken for.
    pub(super) fn has_done(&self) -> bool {
        !self.done.is_empty()
    }

    /// The next job that is done.
    ///
    /// # Panics
    /// As the job did.
    pub(super) fn next_done(&mut self) -> Option<(ArrayId, JobDone)> {
        if self.done.is_empty() && self.outstanding > 0 {
            let done = std::mem::take(&mut *lock(&self.shared.done));
            self.outstanding -= done.len();
            for (array, outcome) in done {
                self.done.push_back((array, outcome.unwrap_or_else(|panic| resume_unwind(panic))));
            }
        }
        self.done.pop_front()
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        let mut waiting = lock(&self.shared.waiting);
        waiting.closing = true;
        waiting.jobs.clear();
        drop(waiting);
        self.shared.more.notify_all();
        for thread in self.threads.drain(..) {
            // What a job panicked with went to the reactor.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        while let Some((array, job)) = self.next() {
            let outcome = catch_unwind(AssertUnwindSafe(|| job.run()));
            let mut done = lock(&self.done);
            done.push((array, outcome));
            let first = done.len() == 1;
            drop(done);
            // The reactor takes all that is there when it wakes. An error means that it was woken already.
            if first {
                let _ = self.mailbox.wake.write(1);
            }
        }
    }

    fn next(&self) -> Option<(ArrayId, Job)> {
        let mut waiting = lock(&self.waiting);
        loop {
            if waiting.closing {
                return None;
            }
            if let Some(job) = waiting.jobs.pop_front() {
                return Some(job);
            }
            waiting = self.more.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_io::Pool;
    use crate::codec::{BlockHasher, Codec, CodecJob, Column, Outputs};
    use nix::sys::eventfd::{EfdFlags, EventFd};
    use std::time::{Duration, Instant};

    fn mailbox() -> Arc<Mailbox> {
        let wake = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).expect("an eventfd");
        Arc::new(Mailbox { commands: Mutex::default(), wake })
    }

    fn job(pool: &Pool, key: usize, alone: bool) -> Job {
        let mut column = pool.alloc(4096);
        column.fill(key as u8);
        let work = CodecJob {
            transform: Some(Codec::new(1, 1).expect("a geometry").encoding()),
            hasher: Some(BlockHasher::Blake3),
            inputs: vec![Column::Owned(column)],
            outputs: Outputs::Into(vec![pool.alloc(4096)]),
        };
        Job { key, work, alone }
    }

    #[test]
    fn every_job_is_done_once_and_the_reactor_is_woken() {
        let (pool, mailbox) = (Pool::new(8 << 20).expect("memory"), mailbox());
        let mut jobs = Jobs::with_threads(3, Arc::clone(&mailbox)).expect("threads");
        for key in 0..500 {
            jobs.submit(ArrayId(key as u32 % 2), job(&pool, key, false), false);
        }
        let (started, mut seen, mut wakes) = (Instant::now(), vec![false; 500], 0);
        while !seen.iter().all(|done| *done) {
            wakes += u64::from(mailbox.wake.read().is_ok());
            while let Some((array, coded)) = jobs.next_done() {
                assert_eq!(array, ArrayId(coded.key as u32 % 2));
                assert_eq!(coded.columns.outputs[0][..], [coded.key as u8; 4096][..], "1+1 is a mirror");
                assert!(!std::mem::replace(&mut seen[coded.key], true), "done twice");
            }
            assert!(started.elapsed() < Duration::from_secs(60), "jobs are lost");
        }
        assert!(wakes > 0 && jobs.outstanding == 0 && jobs.next_done().is_none());
    }

    #[test]
    fn a_lone_job_and_any_without_threads_is_done_here() {
        let (pool, mailbox) = (Pool::new(1 << 20).expect("memory"), mailbox());
        let mut jobs = Jobs::with_threads(1, Arc::clone(&mailbox)).expect("a thread");
        jobs.submit(ArrayId(1), job(&pool, 1, true), true);
        assert!(jobs.has_done() && jobs.outstanding == 0);
        jobs.submit(ArrayId(1), job(&pool, 2, true), false);
        assert_eq!(jobs.outstanding, 1);
        let mut none = Jobs::with_threads(0, mailbox).expect("no thread");
        none.submit(ArrayId(1), job(&pool, 3, false), false);
        assert_eq!(none.next_done().map(|(_, coded)| coded.key), Some(3));
    }

    #[test]
    fn threads_end_with_their_owner_whatever_waits() {
        let pool = Pool::new(8 << 20).expect("memory");
        let mut jobs = Jobs::with_threads(2, mailbox()).expect("threads");
        (0..200).for_each(|key| jobs.submit(ArrayId(0), job(&pool, key, false), false));
        drop(jobs);
    }
}
