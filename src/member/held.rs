//! Local devices that this process has open as members, and how far they are closed. Closing a file
//! may block in its filesystem for ever, so a thread of its own does it; an opening of the same
//! device meanwhile waits a moment, or fails with the reason. Must not know what devices are for.

use std::collections::HashMap;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long to wait for a device that is being closed.
const CLOSING_WAIT: Duration = Duration::from_secs(1);

/// Identity of a device: the numbers of a filesystem and an inode, or 0 and those of a block
/// device.
pub(super) type Key = (u64, u64);

/// How far a device is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Open.
    Open,
    /// Out of service, with operations that have not ended.
    Leaving,
    /// Being closed.
    Closing,
}

#[derive(Default)]
struct Table {
    /// Counts openings.
    next: u64,
    devices: HashMap<Key, (u64, Stage)>,
}

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);
static CLOSED: Condvar = Condvar::new();

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The record that a device is open; ends when dropped.
#[derive(Debug)]
pub(super) struct Held {
    key: Key,
    opening: u64,
}

impl Held {
    /// For a device whose lock was just taken.
    pub(super) fn new(key: Key) -> Held {
        let mut table = table();
        table.next += 1;
        let opening = table.next;
        // The thread that closes an earlier opening has released the lock already.
        table.devices.insert(key, (opening, Stage::Open));
        Held { key, opening }
    }

    pub(super) fn set(&self, stage: Stage) {
        if let Some(entry) = table().devices.get_mut(&self.key)
            && entry.0 == self.opening
        {
            entry.1 = stage;
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut table = table();
        if table.devices.get(&self.key).is_some_and(|entry| entry.0 == self.opening) {
            table.devices.remove(&self.key);
        }
        CLOSED.notify_all();
    }
}

/// How far a device that this process has locked is closed. Waits a moment for one that is being
/// closed.
pub(super) fn stage(key: Key) -> Option<Stage> {
    let deadline = Instant::now() + CLOSING_WAIT;
    wait_until(deadline, |table| table.devices.get(&key).is_none_or(|entry| entry.1 != Stage::Closing));
    now(key)
}

/// As [`stage`], without waiting.
pub(super) fn now(key: Key) -> Option<Stage> {
    table().devices.get(&key).map(|entry| entry.1)
}

/// Waits until every device that is being closed is closed, within `limit`.
pub(crate) fn await_closings(limit: Duration) {
    wait_until(Instant::now() + limit, |table| {
        !table.devices.values().any(|(_, stage)| *stage == Stage::Closing)
    });
}

fn wait_until(deadline: Instant, over: impl Fn(&Table) -> bool) {
    let mut table = table();
    while !over(&table) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        table = CLOSED.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_an_earlier_opening_is_not_that_of_a_later_one() {
        let key = (u64::MAX, 1);
        let first = Held::new(key);
        first.set(Stage::Leaving);
        assert_eq!(stage(key), Some(Stage::Leaving));
        let second = Held::new(key);
        first.set(Stage::Closing);
        drop(first);
        assert_eq!(stage(key), Some(Stage::Open));
        drop(second);
        assert_eq!(stage(key), None);
    }

    #[test]
    fn a_device_that_is_being_closed_is_waited_for() {
        let key = (u64::MAX, 2);
        let held = Held::new(key);
        held.set(Stage::Closing);
        let closing = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(held);
        });
        assert_eq!(stage(key), None);
        closing.join().unwrap();
    }
}
