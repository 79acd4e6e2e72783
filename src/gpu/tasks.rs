//! The CPU's tasks for devices, in order of arrival. Must not know of devices, nor how a task is
//! done.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use calpe_core::codec::CodecJob;

use super::answer::{Finished, Ticket};
use super::verify::Sample;

/// A task for the CPU.
pub(super) enum Task {
    /// A job that no device did. `touched`: a device may still use its memory.
    Run { ticket: Ticket, job: CodecJob, touched: bool },
    /// A batch that a device has done, with many rows to compare before its jobs are answered.
    Compare { lane: usize, generation: u64, jobs: Vec<Finished>, sample: Sample },
}

/// The tasks that wait for a thread.
#[derive(Default)]
pub(super) struct Tasks {
    waiting: Mutex<VecDeque<Task>>,
    more: Condvar,
}

impl Tasks {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Task>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, task: Task) {
        self.lock().push_back(task);
        self.more.notify_one();
    }

    pub(super) fn extend(&self, tasks: impl IntoIterator<Item = Task>) {
        let mut waiting = self.lock();
        let before = waiting.len();
        waiting.extend(tasks);
        let more = waiting.len() > before;
        drop(waiting);
        if more {
            self.more.notify_all();
        }
    }

    /// The next task, which is waited for; None when there will be none.
    pub(super) fn next(&self, is_over: impl Fn() -> bool) -> Option<Task> {
        let mut waiting = self.lock();
        loop {
            if let Some(task) = waiting.pop_front() {
                return Some(task);
            }
            if is_over() {
                return None;
            }
            waiting = self.more.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Makes every thread that waits for a task check again whether all is over. The lock is taken
    /// between the change and the notification, so that no thread misses it.
    pub(super) fn rouse(&self) {
        drop(self.lock());
        self.more.notify_all();
    }
}
