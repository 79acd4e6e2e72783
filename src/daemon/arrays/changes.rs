//! One change of an array at a time; changes of different arrays run side by side. A change may
//! wait for a device that does not answer, so waiting for it has a limit. Must not know what
//! requests do.

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// See the head of this file.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    under_way: HashSet<Uuid>,
    closed: bool,
}

/// A change of an array. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Change {
    changes: Arc<Changes>,
    array: Uuid,
}

impl Drop for Change {
    fn drop(&mut self) {
        self.changes.state().under_way.remove(&self.array);
        self.changes.ended.notify_all();
    }
}

impl Changes {
    /// Begins a change of an array, once the one before has ended. None when that takes longer than
    /// `limit`, or when the daemon stops.
    pub(crate) fn begin(self: &Arc<Self>, array: Uuid, limit: Duration) -> Option<Change> {
        let deadline = Instant::now() + limit;
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            if state.under_way.insert(array) {
                return Some(Change { changes: Arc::clone(self), array });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lets no more changes begin, and waits for those under way, but not for long.
    pub(crate) fn close(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut state = self.state();
        state.closed = true;
        self.ended.notify_all();
        while !state.under_way.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(20);
    const LATE: Duration = Duration::from_secs(60);

    #[test]
    fn an_array_is_changed_by_one_at_a_time_and_others_do_not_wait() {
        let changes = Arc::new(Changes::default());
        let (tank, pond) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let first = changes.begin(tank, SOON).expect("nobody changes it");
        assert!(changes.begin(tank, SOON).is_none());
        let other = changes.begin(pond, SOON).expect("nobody changes it");
        let waiting = {
            let changes = Arc::clone(&changes);
            std::thread::spawn(move || changes.begin(tank, LATE).is_some())
        };
        drop(first);
        assert!(waiting.join().unwrap());
        drop(other);
    }

    #[test]
    fn after_the_end_nothing_begins_and_what_hangs_is_not_waited_for() {
        let changes = Arc::new(Changes::default());
        let hanging = changes.begin(Uuid::from_u128(1), SOON);
        changes.close(SOON);
        assert!(changes.begin(Uuid::from_u128(2), LATE).is_none());
        drop(hanging);
        changes.close(LATE);
    }
}
