//! Lets the watchdog sleep while nothing can hang. Must not know what it watches.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// See the module's head.
#[derive(Default)]
pub(super) struct Alarm {
    /// Whether the watchdog will look again by itself before anything that starts now can hang.
    is_set: Mutex<bool>,
    look: Condvar,
}

impl Alarm {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_set.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A batch was started: from now on the watchdog has to look after it.
    pub(super) fn set(&self) {
        let mut is_set = self.lock();
        if !*is_set {
            *is_set = true;
            self.look.notify_one();
        }
    }

    /// Before the watchdog looks: a batch that starts from here on rouses it.
    pub(super) fn clear(&self) {
        *self.lock() = false;
    }

    /// Sleeps until `deadline`, or until a batch starts if there is none. False when all is over.
    pub(super) fn sleep(&self, deadline: Option<Instant>, is_over: impl Fn() -> bool) -> bool {
        let mut is_set = self.lock();
        if let Some(deadline) = deadline {
            // A batch that starts meanwhile can hang only later.
            *is_set = true;
            let left = deadline.saturating_duration_since(Instant::now());
            if !is_over() {
                drop(self.look.wait_timeout(is_set, left).unwrap_or_else(PoisonError::into_inner));
            }
        } else {
            while !*is_set && !is_over() {
                is_set = self.look.wait(is_set).unwrap_or_else(PoisonError::into_inner);
            }
        }
        !is_over()
    }

    /// Makes the watchdog check again whether all is over. The lock is taken between the change and
    /// the notification, so that the watchdog does not miss it.
    pub(super) fn rouse(&self) {
        drop(self.lock());
        self.look.notify_all();
    }
}
