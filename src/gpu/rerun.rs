//! What the CPU does for devices: jobs of those that failed, and jobs of those that did not, to compare.
//! A few threads of the runtime's own, so that managers keep devices fed. Must not know of devices.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::block_io::BufMut;
use crate::codec::{CodecJob, CodedColumns, Outputs};
use crate::units::BlockHash;

use super::batch::part_from_device;
use super::metrics::GpuEventKind;
use super::queue::Ticket;
use super::shared::Shared;

/// Something for the CPU to do.
pub(super) enum Task {
    /// A job that no device did. `touched`: one may still be at its bytes.
    Run { ticket: Ticket, job: CodecJob, touched: bool },
    /// A batch of a device, done, of which some jobs are to be compared before any is answered.
    Compare { lane: usize, generation: u64, jobs: Vec<Finished> },
}

/// A job that a device has done.
pub(super) struct Finished {
    pub(super) ticket: Ticket,
    pub(super) job: CodecJob,
    pub(super) hashes: Vec<BlockHash>,
    pub(super) compare: bool,
}

impl Finished {
    /// Answers with what the device computed.
    pub(super) fn answer(self, shared: &Shared) {
        let CodecJob { transform, inputs, outputs, .. } = self.job;
        let outputs = match outputs {
            Outputs::Into(outputs) if transform.is_some() => outputs,
            _ => Vec::new(),
        };
        shared.answer(self.ticket, CodedColumns { inputs, outputs, hashes: self.hashes });
    }
}

/// Runs until the runtime is over.
pub(super) fn run(shared: &Arc<Shared>) {
    while let Some(task) = shared.next_task() {
        match task {
            Task::Run { ticket, mut job, touched } => {
                if touched {
                    part_from_device(&mut job, &shared.settings.pools);
                }
                run_and_answer(shared, ticket, job);
            }
            Task::Compare { lane, generation, jobs } => compare(shared, lane, generation, jobs),
        }
    }
}

fn run_and_answer(shared: &Shared, ticket: Ticket, job: CodecJob) {
    match guarded(shared, job) {
        Some(columns) => {
            shared.note_rerun(&ticket);
            shared.answer(ticket, columns);
        }
        None => shared.lost(ticket),
    }
}

/// Does a job. What panics here would panic wherever else it was done; it does not take other jobs with it.
fn guarded(shared: &Shared, job: CodecJob) -> Option<CodedColumns> {
    let done = catch_unwind(AssertUnwindSafe(|| job.run())).ok();
    if done.is_none() {
        shared.event(0, GpuEventKind::Answer, "a job panicked on the CPU and is lost".to_owned());
    }
    done
}

/// What the CPU made of a job.
struct Expected {
    outputs: Vec<BufMut>,
    hashes: Vec<BlockHash>,
}

fn compare(shared: &Shared, lane: usize, generation: u64, jobs: Vec<Finished>) {
    let (mut compared, mut wrong) = (Vec::with_capacity(jobs.len()), None);
    for mut done in jobs {
        let expected = if done.compare { recompute(shared, &mut done.job) } else { None };
        if done.compare && expected.is_none() {
            // Its inputs went with it.
            shared.lost(done.ticket);
            continue;
        }
        shared.verified_jobs.fetch_add(u64::from(expected.is_some()), Ordering::Relaxed);
        if let Some(expected) = &expected {
            wrong = wrong.or_else(|| difference(&done, expected));
        }
        compared.push((done, expected));
    }
    let Some(wrong) = wrong else {
        compared.into_iter().for_each(|(done, _)| done.answer(shared));
        return;
    };
    shared.give_up(lane, generation, GpuEventKind::Mismatch, &wrong);
    // A device that is wrong may be wrong about having ended, too: nothing that it could write is used.
    for (mut done, expected) in compared {
        part_from_device(&mut done.job, &shared.settings.pools);
        let Some(Expected { outputs, hashes }) = expected else {
            run_and_answer(shared, done.ticket, done.job);
            continue;
        };
        shared.note_rerun(&done.ticket);
        shared.answer(done.ticket, CodedColumns { inputs: done.job.inputs, outputs, hashes });
    }
}

/// Does a job once more, beside what a device made of it.
fn recompute(shared: &Shared, job: &mut CodecJob) -> Option<Expected> {
    let pool = &shared.settings.pools[0];
    let outputs = match &job.outputs {
        Outputs::Into(outputs) => {
            Outputs::Into(outputs.iter().map(|output| pool.alloc(output.len())).collect())
        }
        Outputs::Hashed => Outputs::Hashed,
    };
    let inputs = mem::take(&mut job.inputs);
    let again = CodecJob { transform: job.transform.clone(), hasher: job.hasher, inputs, outputs };
    let CodedColumns { inputs, outputs, hashes } = guarded(shared, again)?;
    job.inputs = inputs;
    Some(Expected { outputs, hashes })
}

/// How a device's result differs from the CPU's, if it does.
fn difference(done: &Finished, expected: &Expected) -> Option<String> {
    let what = done.job.transform.as_ref().map_or("hashing".to_owned(), |transform| format!("{transform:?}"));
    if let (Outputs::Into(outputs), true) = (&done.job.outputs, done.job.transform.is_some()) {
        let pairs = outputs.iter().zip(&expected.outputs).enumerate();
        let mut differing = pairs.filter_map(|(column, (is, should))| {
            Some((column, is.iter().zip(should.iter()).position(|(is, should)| is != should)?))
        });
        if let Some((column, at)) = differing.next() {
            return Some(format!("{what}: output {column} is not what the CPU computes, from byte {at} on"));
        }
    }
    let at = done.hashes.iter().zip(&expected.hashes).position(|(is, should)| is != should);
    at.map(|at| format!("{what}: the hash of block {at} is not what the CPU computes"))
}
