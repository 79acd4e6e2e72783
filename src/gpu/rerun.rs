//! What the CPU does for devices: jobs of those that failed, and parts of the jobs of those that did not, to compare.
//! A few threads of the runtime's own, so that managers keep devices fed. Must not know of devices.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use calpe_core::codec::{CodecJob, CodedColumns, Outputs};
use calpe_core::units::BlockHash;

use super::batch::part_from_device;
use super::metrics::GpuEventKind;
use super::queue::Ticket;
use super::shared::Shared;
use super::verify::Sample;

/// Something for the CPU to do.
pub(super) enum Task {
    /// A job that no device did. `touched`: one may still be at its bytes.
    Run { ticket: Ticket, job: CodecJob, touched: bool },
    /// A batch of a device, done, of which much is to be compared before any job is answered.
    Compare { lane: usize, generation: u64, jobs: Vec<Finished>, sample: Sample },
}

/// A job that a device has done.
pub(super) struct Finished {
    pub(super) ticket: Ticket,
    pub(super) job: CodecJob,
    pub(super) hashes: Vec<BlockHash>,
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
            Task::Compare { lane, generation, jobs, sample } => {
                settle(shared, lane, generation, jobs, Some(&sample));
            }
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

/// Answers for jobs of a device if a sample of what it made of them is what the CPU makes of them.
/// If not, the device is given up, the CPU does all of them again, and this is false.
pub(super) fn settle(
    shared: &Shared,
    lane: usize,
    generation: u64,
    jobs: Vec<Finished>,
    sample: Option<&Sample>,
) -> bool {
    let wrong = sample.and_then(|sample| {
        shared.verified_rows.fetch_add(sample.len() as u64, Ordering::Relaxed);
        let compared = catch_unwind(AssertUnwindSafe(|| sample.difference(&jobs)));
        compared.unwrap_or_else(|_| Some("comparing it with what the CPU computes panicked".to_owned()))
    });
    let Some(wrong) = wrong else {
        jobs.into_iter().for_each(|done| done.answer(shared));
        return true;
    };
    let text = format!(
        "{wrong}; {} jobs are done again by the CPU, and the device is not used until the next start. What it did before was compared in \
         part only: scrub the arrays",
        jobs.len()
    );
    shared.give_up(lane, generation, GpuEventKind::Mismatch, &text);
    // A device that is wrong may be wrong about having ended, too: nothing that it could write is used.
    for done in jobs {
        shared.push_task(Task::Run { ticket: done.ticket, job: done.job, touched: true });
    }
    false
}
