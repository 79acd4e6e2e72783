//! Local devices that this process has open as members, and how far they are closed. Closing a file
//! may block in its filesystem for ever, so a thread of its own does it; an opening of the same
//! device meanwhile waits a moment, or fails with the reason. The windows of a device have a mark each: the
//! device is as far as the window that is least far. Must not know what devices are for.

use std::collections::HashMap;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long to wait for a device that is being closed.
const CLOSING_WAIT: Duration = Duration::from_secs(1);

/// Identity of a device: the numbers of a filesystem and an inode, or 0 and those of a block
/// device.
pub(super) type Key = (u64, u64);

/// How far a device is closed, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    /// Counts openings and marks.
    next: u64,
    devices: HashMap<Key, Opening>,
}

impl Table {
    fn count(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn stage(&self, key: Key) -> Option<Stage> {
        self.devices.get(&key)?.marks.iter().map(|(_, stage)| *stage).min()
    }
}

/// A device that is open.
struct Opening {
    number: u64,
    /// Numbers and stages, one for each window.
    marks: Vec<(u64, Stage)>,
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
    mark: u64,
}

impl Held {
    /// For a device whose lock was just taken.
    pub(super) fn new(key: Key) -> Held {
        let mut table = table();
        let (opening, mark) = (table.count(), table.count());
        // The thread that closes an earlier opening has released the lock already.
        table.devices.insert(key, Opening { number: opening, marks: vec![(mark, Stage::Open)] });
        Held { key, opening, mark }
    }

    #[cfg(test)]
    pub(super) fn key(&self) -> Key {
        self.key
    }

    /// Another mark of the same opening, for a window that shares the lock.
    pub(super) fn share(&self) -> Held {
        let mut table = table();
        let mark = table.count();
        if let Some(opening) = table.devices.get_mut(&self.key).filter(|open| open.number == self.opening) {
            opening.marks.push((mark, Stage::Open));
        }
        Held { mark, ..*self }
    }

    pub(super) fn set(&self, stage: Stage) {
        if let Some(opening) = table().devices.get_mut(&self.key)
            && let Some(mark) = opening.marks.iter_mut().find(|(mark, _)| *mark == self.mark)
        {
            mark.1 = stage;
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut table = table();
        if let Some(opening) = table.devices.get_mut(&self.key) {
            opening.marks.retain(|(mark, _)| *mark != self.mark);
            if opening.marks.is_empty() {
                table.devices.remove(&self.key);
            }
        }
        CLOSED.notify_all();
    }
}

/// How far a device that this process has locked is closed. Waits a moment for one that is being
/// closed.
pub(super) fn stage(key: Key) -> Option<Stage> {
    let deadline = Instant::now() + CLOSING_WAIT;
    wait_until(deadline, |table| table.stage(key) != Some(Stage::Closing));
    now(key)
}

/// As [`stage`], without waiting.
pub(super) fn now(key: Key) -> Option<Stage> {
    table().stage(key)
}

/// Waits until every device that is being closed is closed, within `limit`.
pub(crate) fn await_closings(limit: Duration) {
    wait_until(Instant::now() + limit, |table| {
        let mut marks = table.devices.values().flat_map(|opening| &opening.marks);
        !marks.any(|(_, stage)| *stage == Stage::Closing)
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
    fn a_device_is_as_far_as_the_window_that_is_least_far() {
        let key = (u64::MAX, 3);
        let first = Held::new(key);
        let second = first.share();
        first.set(Stage::Closing);
        assert_eq!(stage(key), Some(Stage::Open));
        second.set(Stage::Leaving);
        assert_eq!(stage(key), Some(Stage::Leaving));
        drop(first);
        assert_eq!(stage(key), Some(Stage::Leaving));
        let third = second.share();
        assert_eq!(stage(key), Some(Stage::Open));
        drop((second, third));
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
