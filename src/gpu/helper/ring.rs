//! Words from one process to another through shared memory, in order. There is no wake-up in it: its
//! user rings a bell beside it after each push, and looks after each ring of the bell.
//!
//! Invariants: each side has its position in memory of its own and only the count of words pushed is
//! shared, so the other side can claim what it likes and moves nothing here. There are never more words
//! on the way than places, which the users see to: a word names a slot, and a slot is named again only
//! after its word was taken and answered.

use std::sync::atomic::{AtomicU64, Ordering};

/// Places of a ring. A power of two, not less than the slots of any device.
pub(super) const PLACES: usize = 16;

/// A word of shared memory. Implemented by the processor's, and by those of a model checker.
pub(super) trait Word {
    fn get(&self, order: Ordering) -> u64;
    fn set(&self, value: u64, order: Ordering);
}

impl Word for AtomicU64 {
    fn get(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    fn set(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
}

/// The shared part of a ring: the count of words pushed, and the places.
pub(super) struct Ring<'a, W> {
    pub(super) pushed: &'a W,
    pub(super) places: &'a [W; PLACES],
}

/// The other side claims what cannot be.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Broken;

/// The position of the side that pushes.
#[derive(Debug, Default)]
pub(super) struct Pusher(u64);

impl Pusher {
    /// Makes a word visible to the other side, and all that was written before it.
    pub(super) fn push<W: Word>(&mut self, ring: &Ring<'_, W>, word: u64) {
        ring.places[(self.0 % PLACES as u64) as usize].set(word, Ordering::Relaxed);
        self.0 = self.0.wrapping_add(1);
        ring.pushed.set(self.0, Ordering::Release);
    }
}

/// The position of the side that takes.
#[derive(Debug, Default)]
pub(super) struct Taker(u64);

impl Taker {
    /// The next word, if there is one.
    ///
    /// # Errors
    /// When more words are said to be on the way than can be.
    pub(super) fn take<W: Word>(&mut self, ring: &Ring<'_, W>) -> Result<Option<u64>, Broken> {
        let waiting = ring.pushed.get(Ordering::Acquire).wrapping_sub(self.0);
        if waiting > PLACES as u64 {
            return Err(Broken);
        }
        if waiting == 0 {
            return Ok(None);
        }
        let word = ring.places[(self.0 % PLACES as u64) as usize].get(Ordering::Relaxed);
        self.0 = self.0.wrapping_add(1);
        Ok(Some(word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::Arc;

    impl Word for loom::sync::atomic::AtomicU64 {
        fn get(&self, order: Ordering) -> u64 {
            self.load(order)
        }

        fn set(&self, value: u64, order: Ordering) {
            self.store(value, order);
        }
    }

    struct Shared<W> {
        pushed: W,
        places: [W; PLACES],
    }

    impl<W> Shared<W> {
        fn new(zero: impl Fn() -> W) -> Shared<W> {
            Shared { pushed: zero(), places: std::array::from_fn(|_| zero()) }
        }

        fn ring(&self) -> Ring<'_, W> {
            Ring { pushed: &self.pushed, places: &self.places }
        }
    }

    #[test]
    fn words_come_in_order_round_and_round() {
        let shared = Shared::new(AtomicU64::default);
        let (mut pusher, mut taker) = (Pusher::default(), Taker::default());
        for round in 0..100u64 {
            let count = round % PLACES as u64 + 1;
            (0..count).for_each(|nth| pusher.push(&shared.ring(), 1000 * round + nth));
            for nth in 0..count {
                assert_eq!(taker.take(&shared.ring()), Ok(Some(1000 * round + nth)));
            }
            assert_eq!(taker.take(&shared.ring()), Ok(None));
        }
    }

    #[test]
    fn a_count_that_cannot_be_is_noticed_and_moves_nothing() {
        let shared = Shared::new(AtomicU64::default);
        let (mut pusher, mut taker) = (Pusher::default(), Taker::default());
        pusher.push(&shared.ring(), 5);
        for claimed in [PLACES as u64 + 1, u64::MAX, 1 << 63] {
            shared.pushed.store(claimed, Ordering::Release);
            assert_eq!(taker.take(&shared.ring()), Err(Broken));
        }
        shared.pushed.store(1, Ordering::Release);
        assert_eq!(taker.take(&shared.ring()), Ok(Some(5)));
        // Taken back: as many as 2^64 - 1 would be on the way.
        shared.pushed.store(0, Ordering::Release);
        assert_eq!(taker.take(&shared.ring()), Err(Broken));
    }

    /// Every order in which the two processes can run: what was written into a slot before its word was
    /// pushed is there when the word is taken, in both directions, and a slot that was answered is used
    /// again.
    #[test]
    fn a_slot_is_seen_as_it_was_when_its_word_was_pushed() {
        use loom::sync::atomic::AtomicU64 as Cell;
        const BATCHES: u64 = 3;
        loom::model(|| {
            let there = Arc::new(Shared::new(|| Cell::new(0)));
            let back = Arc::new(Shared::new(|| Cell::new(0)));
            // Bytes of the one slot: plain memory, which the checker guards against use by both at once.
            let slot = Arc::new(loom::cell::UnsafeCell::new(0u64));
            let helper = {
                let (there, back, slot) = (Arc::clone(&there), Arc::clone(&back), Arc::clone(&slot));
                loom::thread::spawn(move || {
                    let (mut orders, mut answers) = (Taker::default(), Pusher::default());
                    for _ in 0..BATCHES {
                        let word = wait(&mut orders, &there);
                        slot.with_mut(|bytes| *at(bytes) *= 10);
                        answers.push(&back.ring(), word);
                    }
                })
            };
            let (mut orders, mut answers) = (Pusher::default(), Taker::default());
            for batch in 1..=BATCHES {
                slot.with_mut(|bytes| *at(bytes) = batch);
                orders.push(&there.ring(), batch);
                assert_eq!(wait(&mut answers, &back), batch);
                assert_eq!(slot.with(|bytes| *at(bytes.cast_mut())), 10 * batch);
            }
            helper.join().expect("no panic");
        });
    }

    fn wait(taker: &mut Taker, shared: &Shared<loom::sync::atomic::AtomicU64>) -> u64 {
        loop {
            if let Some(word) = taker.take(&shared.ring()).expect("nobody lies") {
                return word;
            }
            // A bell that has not rung.
            loom::thread::yield_now();
        }
    }

    #[allow(unsafe_code)] // the checker's cell gives pointers only
    fn at<'a>(bytes: *mut u64) -> &'a mut u64 {
        // SAFETY: the checker fails the model if two threads are here at once.
        unsafe { &mut *bytes }
    }
}
