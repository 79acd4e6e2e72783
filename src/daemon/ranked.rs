//! Locks that are taken in one order, the lower rank first: two threads that keep to it never wait for each
//! other. Debug builds, and so all tests, check the order whenever a thread holds two locks. Must not know
//! what is locked.
//!
//! Invariant: a thread takes a lock only while all that it holds have lower ranks.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A mutex with a rank.
#[derive(Debug, Default)]
pub(crate) struct Ranked<T, const RANK: u8>(Mutex<T>);

impl<T, const RANK: u8> Ranked<T, RANK> {
    pub(crate) fn new(value: T) -> Ranked<T, RANK> {
        Ranked(Mutex::new(value))
    }
}

/// The guard of such a lock.
#[derive(Debug)]
pub(crate) struct RankedGuard<'a, T> {
    guard: MutexGuard<'a, T>,
    _held: Held,
}

impl<T> Deref for RankedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for RankedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// A lock that [`lock`] takes.
pub(crate) trait Lock {
    type Guard<'a>
    where
        Self: 'a;

    fn take(&self) -> Self::Guard<'_>;
}

impl<T> Lock for Mutex<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        T: 'a;

    fn take(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T, const RANK: u8> Lock for Ranked<T, RANK> {
    type Guard<'a>
        = RankedGuard<'a, T>
    where
        T: 'a;

    fn take(&self) -> RankedGuard<'_, T> {
        // Checked before waiting, so that a deadlock is reported.
        let held = Held::new(RANK);
        RankedGuard { guard: self.0.take(), _held: held }
    }
}

/// Locks. The data stays usable after a panic of another holder.
pub(crate) fn lock<L: Lock>(lock: &L) -> L::Guard<'_> {
    lock.take()
}

/// Proof that this thread holds a lock of a rank, or is about to wait for it.
#[derive(Debug)]
pub(crate) struct Held {
    #[cfg(debug_assertions)]
    rank: u8,
}

#[cfg(debug_assertions)]
mod order {
    use super::Held;
    use std::cell::RefCell;

    thread_local! {
        static HELD: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }

    impl Held {
        pub(crate) fn new(rank: u8) -> Held {
            HELD.with_borrow_mut(|held| {
                let highest = held.iter().max();
                assert!(
                    highest.is_none_or(|highest| *highest < rank),
                    "a lock of rank {rank} is taken beside these: {held:?}"
                );
                held.push(rank);
            });
            Held { rank }
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            HELD.with_borrow_mut(|held| {
                if let Some(at) = held.iter().rposition(|rank| *rank == self.rank) {
                    held.remove(at);
                }
            });
        }
    }
}

#[cfg(not(debug_assertions))]
impl Held {
    pub(crate) fn new(_: u8) -> Held {
        Held {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_taken_in_one_order() {
        let (low, high) = (Ranked::<u8, 1>::new(1), Ranked::<u8, 2>::new(2));
        let (first, second) = (lock(&low), lock(&high));
        assert_eq!(*first + *second, 3);
        drop(first);
        let second = (second, Held::new(3));
        drop(second);
        *lock(&low) += 1;
        assert_eq!(*lock(&low), 2);
    }

    #[test]
    #[should_panic(expected = "a lock of rank 1 is taken beside these: [2]")]
    fn the_other_order_is_noticed_by_one_thread_alone() {
        let (low, high) = (Ranked::<u8, 1>::new(1), Ranked::<u8, 2>::new(2));
        let _high = lock(&high);
        let _low = lock(&low);
    }

    #[test]
    #[should_panic(expected = "a lock of rank 1 is taken beside these: [1]")]
    fn a_lock_is_not_taken_twice() {
        let one = Ranked::<u8, 1>::new(1);
        let _first = lock(&one);
        let _second = lock(&one);
    }
}
