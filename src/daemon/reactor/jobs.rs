//! Where the jobs that volumes give away are run, so that the reactor goes on serving while columns are coded
//! and hashed: on a GPU where that is sooner, otherwise by the threads of all reactors (`job_pool`).
//!
//! The reactor does the work itself where the volume serves a single request, since handing a job to a thread
//! and back takes longer than coding a stripe; and where reactors keep the cores busy, since a thread would
//! take the core of another one and find in no cache what it works on. The jobs of one turn are offered to
//! the GPUs together, so that one launch can do them all. Small jobs of clients gather until they fill the
//! processor's registers side by side, or until there is nothing else to do. Must not know what the work is.

use super::job_pool::{Errand, ErrandDone, Job, JobDone, JobPool, Line, Owner, Returned, Returns};
use super::mailbox::Mailbox;
use super::orders::ArrayId;
use calpe_core::codec::BlockHasher;
use calpe_core::units::ROW_BYTES;
use calpe_core::volume::{Urgency, Work, WorkDone};
use calpe_gpu::{Answer, CpuLoad, GpuRuntime, Tag};
use slab::Slab;
use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::Arc;

/// Jobs of clients with less input than this are done on the reactor's thread, together: handing them to a
/// thread and back takes longer.
const SMALL_BYTES: usize = 64 << 10;

/// The same limit for jobs that only check CRCs, where there is just one thread: a CRC costs a tenth
/// of the copy of a block, and that copy leaves the block in the cache.
const CRC_BYTES: usize = 1 << 20;

/// Most input of a job that the reactor does itself although there are threads: half a millisecond of its
/// time.
const HERE_BYTES_MAX: usize = 2 << 20;

/// Bytes of small jobs that are done at once: two rounds of the widest registers, sixteen blocks each.
const GATHERED_BYTES_MAX: usize = 32 * ROW_BYTES as usize;

/// What a reactor has given away, and what it has done itself.
pub(super) struct Jobs {
    pool: Arc<JobPool>,
    returns: Arc<Returns>,
    gpu: Option<Gpu>,
    /// Small jobs, to be done on this thread together.
    small: Vec<Job>,
    small_bytes: usize,
    /// Jobs given away whose results have not been taken.
    outstanding: usize,
    done: VecDeque<JobDone>,
    /// Large jobs that this thread does, one at a time: what one has coded is written before the next one
    /// takes its place in the cache.
    here: Line<Job>,
    /// Results of errands.
    errands: Vec<ErrandDone>,
    /// Whether threads do jobs of clients.
    uses_threads: bool,
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

impl Jobs {
    /// For the reactor that this mailbox wakes.
    pub(super) fn new(pool: Arc<JobPool>, mailbox: Arc<Mailbox>, gpu: Option<GpuRuntime>) -> Jobs {
        let returns = Arc::new(Returns::new(mailbox));
        let gpu = gpu.map(|runtime| Gpu {
            runtime,
            answer: Arc::clone(&returns) as Arc<dyn Answer>,
            turn: Vec::new(),
            taken: Slab::new(),
        });
        Jobs {
            pool,
            returns,
            gpu,
            small: Vec::new(),
            small_bytes: 0,
            outstanding: 0,
            done: VecDeque::new(),
            here: Line::default(),
            errands: Vec::new(),
            uses_threads: true,
        }
    }

    /// Sends an errand for an array, if a thread has nothing else to do. Gives it back otherwise.
    pub(super) fn send(&mut self, array: ArrayId, errand: Errand) -> Result<(), Errand> {
        if self.idle_threads() == 0 {
            return Err(errand);
        }
        self.outstanding += 1;
        self.pool.run(array, errand, &self.returns);
        Ok(())
    }

    /// How many threads have nothing to do, about.
    pub(super) fn idle_threads(&self) -> usize {
        if self.uses_threads { self.pool.idle() } else { 0 }
    }

    /// Takes the results of errands.
    pub(super) fn take_errands(&mut self) -> Vec<ErrandDone> {
        self.take_returned();
        std::mem::take(&mut self.errands)
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
        if is_crc && self.pool.threads() == 1 { CRC_BYTES } else { SMALL_BYTES }
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
        let cpu = self.cpu_load();
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

    /// Has threads do jobs of clients from now on, or does not.
    pub(super) fn use_threads(&mut self, uses_threads: bool) {
        self.uses_threads = uses_threads;
    }

    /// Whether threads work for this reactor now.
    pub(super) fn are_done_elsewhere(&self) -> bool {
        let on_gpu = self.gpu.as_ref().map_or(0, |gpu| gpu.taken.len());
        self.outstanding > on_gpu
    }

    /// Does one of the large jobs that are done here. Returns whether there was one.
    pub(super) fn do_one(&mut self) -> bool {
        let job = self.here.pop();
        let any = job.is_some();
        self.done.extend(job.map(Job::run));
        any
    }

    /// What would do jobs if no GPU took them.
    fn cpu_load(&self) -> CpuLoad {
        match self.uses_threads {
            true => CpuLoad { threads: self.pool.threads(), waiting_bytes: self.pool.bytes() },
            false => {
                let waiting_bytes = self.here.iter().map(|job| job.work.input_bytes()).sum();
                CpuLoad { threads: 1, waiting_bytes }
            }
        }
    }

    fn give_threads(&mut self, job: Job) {
        let may_be_here = job.urgency != Urgency::Background && job.work.input_bytes() <= HERE_BYTES_MAX;
        if self.pool.threads() == 0 || (!self.uses_threads && may_be_here) {
            self.here.push(job.owner.lane.array(), job);
            return;
        }
        self.outstanding += 1;
        self.pool.submit(job, &self.returns);
    }

    /// Whether there are results that wake nobody: those of this thread, and those of other threads after the
    /// first, which alone wakes the reactor and may have found it too busy to take the rest.
    pub(super) fn has_done(&self) -> bool {
        !self.done.is_empty()
            || !self.here.is_empty()
            || !self.small.is_empty()
            || (self.outstanding > 0 && !self.returns.is_empty())
    }

    /// The next result.
    ///
    /// # Panics
    /// If the job panicked.
    pub(super) fn next_done(&mut self) -> Option<JobDone> {
        if self.done.is_empty() {
            self.take_returned();
        }
        self.done.pop_front()
    }

    fn take_returned(&mut self) {
        if self.outstanding == 0 {
            return;
        }
        let done = self.returns.take();
        self.outstanding -= done.len();
        for returned in done {
            let done = match returned {
                Returned::Thread(outcome) => outcome.unwrap_or_else(|panic| resume_unwind(panic)),
                Returned::Errand(done) => {
                    self.errands.push(done);
                    continue;
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
}

impl Drop for Jobs {
    fn drop(&mut self) {
        self.pool.drop_of(&self.returns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::reactor::orders::LaneId;
    use calpe_core::block_io::Pool;
    use calpe_core::codec::{Codec, CodecJob, Column, Outputs};
    use calpe_core::units::LaneIndex;
    use calpe_core::volume::OpKey;
    use std::time::{Duration, Instant};

    fn mailbox() -> Arc<Mailbox> {
        Arc::new(Mailbox::new().expect("an eventfd"))
    }

    fn jobs_of(threads: usize, mailbox: Arc<Mailbox>) -> Jobs {
        Jobs::new(Arc::new(JobPool::with_threads(threads).expect("threads")), mailbox, None)
    }

    fn job(pool: &Pool, array: u32, op: usize, urgency: Urgency) -> Job {
        job_of(pool, SMALL_BYTES, array, op, urgency)
    }

    fn owner(array: u32, op: usize) -> Owner {
        Owner { lane: LaneId::new(ArrayId(array), LaneIndex(0)), op: OpKey(op) }
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
        let mut jobs = jobs_of(3, Arc::clone(&mailbox));
        for key in 0..500 {
            jobs.submit(job(&pool, key as u32 % 2, key, Urgency::Client), false);
        }
        let (started, mut seen, mut wakes) = (Instant::now(), vec![false; 500], 0);
        while !seen.iter().all(|done| *done) {
            wakes += u64::from(mailbox.was_woken());
            while let Some(JobDone { owner: Owner { lane, op: OpKey(key) }, done }) = jobs.next_done() {
                let WorkDone::Code(columns) = done;
                assert_eq!(lane.array(), ArrayId(key as u32 % 2));
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
        let mut jobs = jobs_of(1, mailbox());
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
            let mut jobs = jobs_of(threads, mailbox());
            jobs.submit(check(hasher), false);
            assert_eq!(jobs.outstanding == 0, is_here, "{threads} {hasher:?}");
            assert_eq!(!jobs.done.is_empty(), is_here, "{threads} {hasher:?}");
        }
        let mut jobs = jobs_of(1, mailbox());
        jobs.submit(Job { urgency: Urgency::Background, ..check(BlockHasher::Crc32c) }, false);
        assert_eq!(jobs.outstanding, 1, "what nobody waits for keeps nobody waiting");
    }

    #[test]
    fn a_lone_job_and_any_without_threads_is_done_here() {
        let (pool, mailbox) = (Pool::new(1 << 20).expect("memory"), mailbox());
        let mut jobs = jobs_of(1, Arc::clone(&mailbox));
        jobs.submit(job(&pool, 1, 1, Urgency::Alone), true);
        assert!(jobs.has_done() && jobs.outstanding == 0);
        jobs.submit(job(&pool, 1, 2, Urgency::Alone), false);
        assert_eq!(jobs.outstanding, 1);
        let mut none = jobs_of(0, mailbox);
        none.submit(job(&pool, 1, 3, Urgency::Client), false);
        assert!(none.has_done() && none.do_one() && !none.do_one());
        assert_eq!(none.next_done().map(|done| done.owner), Some(owner(1, 3)));
    }

    #[test]
    fn where_cores_are_busy_large_jobs_of_clients_are_done_here_one_at_a_time() {
        let pool = Pool::new(16 << 20).expect("memory");
        let mut jobs = jobs_of(1, mailbox());
        jobs.use_threads(false);
        assert_eq!(jobs.idle_threads(), 0, "nothing is sent to threads either");
        for key in 0..2 {
            jobs.submit(job(&pool, 1, key, Urgency::Client), false);
        }
        assert!(jobs.has_done() && jobs.next_done().is_none() && !jobs.are_done_elsewhere());
        for key in 0..2 {
            assert!(jobs.do_one());
            assert_eq!(jobs.next_done().map(|done| done.owner), Some(owner(1, key)));
            assert!(jobs.next_done().is_none());
        }
        jobs.submit(job(&pool, 1, 2, Urgency::Background), false);
        jobs.submit(job_of(&pool, HERE_BYTES_MAX + 4096, 1, 3, Urgency::Client), false);
        assert!(jobs.outstanding == 2 && jobs.are_done_elsewhere() && !jobs.do_one());
    }

    #[test]
    #[should_panic(expected = "job 7 panicked")]
    fn what_panicked_for_a_gpu_panics_here_as_what_threads_did_does() {
        let mut jobs = jobs_of(0, mailbox());
        jobs.outstanding = 1;
        jobs.returns.lost(Tag(7));
        jobs.next_done();
    }

    #[test]
    fn what_the_reactor_was_woken_for_and_left_is_not_forgotten() {
        let (pool, mailbox) = (Pool::new(1 << 20).expect("memory"), mailbox());
        let mut jobs = jobs_of(1, Arc::clone(&mailbox));
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
}
