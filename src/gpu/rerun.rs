//! The CPU's work for devices: jobs of devices that failed, and samples of other jobs, to compare.
//! A few threads of the runtime do it, so that managers keep devices fed. Must not know of devices.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use calpe_core::codec::{CodecJob, CodedColumns};

use super::answer::{Finished, Ticket};
use super::batch::part_from_device;
use super::metrics::GpuEventKind;
use super::shared::Shared;
use super::tasks::Task;
use super::verify::Sample;

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
            shared.cpu_work.note_rerun(ticket.since.elapsed());
            shared.answer(ticket, columns);
        }
        None => shared.lost(ticket),
    }
}

/// Runs a job. A job that panics here would panic anywhere; it must not take other jobs with it.
fn guarded(shared: &Shared, job: CodecJob) -> Option<CodedColumns> {
    let done = catch_unwind(AssertUnwindSafe(|| job.run())).ok();
    if done.is_none() {
        shared.event(0, GpuEventKind::Answer, "a job panicked on the CPU and is lost".to_owned());
    }
    done
}

/// Answers jobs of a device if a sample of its results equals the CPU's. If not, the device is
/// given up, the CPU does all of them again, and this is false.
pub(super) fn settle(
    shared: &Shared,
    lane: usize,
    generation: u64,
    jobs: Vec<Finished>,
    sample: Option<&Sample>,
) -> bool {
    let wrong = sample.and_then(|sample| {
        shared.cpu_work.note_verified(sample.len());
        let compared = catch_unwind(AssertUnwindSafe(|| sample.difference(&jobs)));
        compared.unwrap_or_else(|_| Some("comparing it with what the CPU computes panicked".to_owned()))
    });
    let Some(wrong) = wrong else {
        for done in jobs {
            let (ticket, columns) = done.into_answer();
            shared.answer(ticket, columns);
        }
        return true;
    };
    let text = format!(
        "{wrong}; {} jobs are done again by the CPU, and the device is not used until the next start. What it did before was compared in \
         part only: scrub the arrays",
        jobs.len()
    );
    shared.give_up(lane, generation, GpuEventKind::Mismatch, &text);
    // A faulty device may also have reported the end too early: memory that it could still write is
    // not used.
    let touched = !shared.settings.driver.is_isolated();
    for done in jobs {
        shared.push_task(Task::Run { ticket: done.ticket, job: done.job, touched });
    }
    false
}
