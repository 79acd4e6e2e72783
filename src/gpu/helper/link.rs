//! What the daemon knows of a helper's batches: which slots are under way, and who waits for them. Shared by
//! the thread that attends the process and the one that owns the device.
//!
//! Invariants: only a word that names a slot under way, by the number of its last batch, ends a batch; all
//! others break the link. When the helper has ended, everything that waits is woken once, and nothing can
//! begin. Must not know of processes.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::exchange::Exchange;
use super::ring::{Broken, Taker};
use crate::device::{Drill, Wake};

/// How many times in a row a bell may ring for nothing: one answer may be taken at the bell of another.
const IDLE_BELLS_MAX: u32 = 1000;

/// How a batch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Its outputs and digests are in the slot.
    Done,
    /// The device does not do such batches, and began nothing.
    Refused,
}

/// A word of either ring: a slot, the number of its batch, and what else there is to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) slot: usize,
    /// Of orders: a failure on purpose; of answers: the outcome.
    pub(super) note: u8,
    /// Of 48 bits.
    pub(super) serial: u64,
}

impl Word {
    pub(super) fn pack(self) -> u64 {
        self.slot as u64 & 0xff | u64::from(self.note) << 8 | self.serial << 16
    }

    pub(super) fn unpack(word: u64) -> Word {
        Word { slot: (word & 0xff) as usize, note: (word >> 8) as u8, serial: word >> 16 }
    }
}

/// The note of an order.
pub(super) fn note_of(drill: Option<Drill>) -> u8 {
    drill.map_or(0, |drill| drill as u8 + 1)
}

/// The failure on purpose in the note of an order.
pub(super) fn drill_in(note: u8) -> Option<Drill> {
    [Drill::Error, Drill::Hang].into_iter().find(|drill| note_of(Some(*drill)) == note)
}

/// A failure on purpose for the next batch of any device.
#[derive(Default)]
pub(super) struct NextDrill(AtomicU8);

impl NextDrill {
    pub(super) fn put(&self, drill: Drill) {
        self.0.store(note_of(Some(drill)), Ordering::SeqCst);
    }

    pub(super) fn take(&self) -> Option<Drill> {
        if self.0.load(Ordering::Relaxed) == 0 {
            return None;
        }
        drill_in(self.0.swap(0, Ordering::SeqCst))
    }
}

/// The note of an answer.
pub(super) fn note_for(outcome: Outcome) -> u8 {
    match outcome {
        Outcome::Done => 1,
        Outcome::Refused => 2,
    }
}

fn outcome_in(note: u8) -> Option<Outcome> {
    [Outcome::Done, Outcome::Refused].into_iter().find(|outcome| note_for(*outcome) == note)
}

/// See the module's head.
pub(super) struct Link {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    /// Why the helper is gone.
    ended: Option<String>,
    /// Called when the helper goes.
    lost: Option<Wake>,
    idle_bells: u32,
}

#[derive(Default)]
struct Slot {
    serial: u64,
    wake: Option<Wake>,
    outcome: Option<Outcome>,
}

impl Link {
    pub(super) fn new(slots: usize) -> Link {
        let slots = (0..slots).map(|_| Slot::default()).collect();
        Link { state: Mutex::new(State { slots, ..State::default() }) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock leaves a slot as it was or as it is to be.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a batch begins in an idle slot. Returns the number of the batch.
    ///
    /// # Errors
    /// Why the helper is gone; then nobody is woken.
    pub(super) fn begin(&self, slot: usize, wake: Wake) -> Result<u64, String> {
        let mut state = self.lock();
        if let Some(reason) = &state.ended {
            return Err(reason.clone());
        }
        let slot = &mut state.slots[slot];
        assert!(slot.wake.is_none() && slot.outcome.is_none(), "the slot is not idle");
        slot.serial = (slot.serial + 1) & (u64::MAX >> 16);
        slot.wake = Some(wake);
        Ok(slot.serial)
    }

    /// How the batch of a slot ended, which frees the slot; None: it has not.
    ///
    /// # Errors
    /// Why the helper is gone.
    pub(super) fn finish(&self, slot: usize) -> Result<Option<Outcome>, String> {
        let mut state = self.lock();
        match &state.ended {
            Some(reason) => Err(reason.clone()),
            None => Ok(state.slots[slot].outcome.take()),
        }
    }

    /// Calls `lost` when the helper goes, at once if it is gone.
    pub(super) fn watch(&self, lost: Wake) {
        let mut state = self.lock();
        if state.ended.is_none() {
            state.lost = Some(lost);
            return;
        }
        drop(state);
        lost();
    }

    /// Why the helper is gone, if it is.
    pub(super) fn ended(&self) -> Option<String> {
        self.lock().ended.clone()
    }

    /// Takes the answers that the helper has rung for, and wakes those that wait for them.
    ///
    /// # Errors
    /// When it answers what it was not asked, or rings for nothing all the time.
    pub(super) fn take_answers(&self, exchange: &Exchange, taker: &mut Taker) -> Result<(), Broken> {
        let mut any = false;
        while let Some(word) = taker.take(&exchange.answers())? {
            self.take_answer(Word::unpack(word))?();
            any = true;
        }
        let mut state = self.lock();
        state.idle_bells = if any { 0 } else { state.idle_bells + 1 };
        if state.idle_bells > IDLE_BELLS_MAX { Err(Broken) } else { Ok(()) }
    }

    fn take_answer(&self, word: Word) -> Result<Wake, Broken> {
        let mut state = self.lock();
        let slot = state.slots.get_mut(word.slot).filter(|slot| slot.serial == word.serial).ok_or(Broken)?;
        let outcome = outcome_in(word.note).ok_or(Broken)?;
        let wake = slot.wake.take().ok_or(Broken)?;
        slot.outcome = Some(outcome);
        Ok(wake)
    }

    /// The helper is gone: everything that waits is woken. The first reason stays.
    pub(super) fn end(&self, reason: String) {
        let mut state = self.lock();
        if state.ended.is_some() {
            return;
        }
        state.ended = Some(reason);
        let waiting: Vec<Wake> = state.slots.iter_mut().filter_map(|slot| slot.wake.take()).collect();
        let lost = state.lost.take();
        drop(state);
        waiting.into_iter().chain(lost).for_each(|wake| wake());
    }
}

#[cfg(test)]
mod tests {
    use super::super::exchange::Layout;
    use super::super::ring::Pusher;
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    struct Bed {
        link: Link,
        exchange: Exchange,
        answers: Pusher,
        taker: Taker,
        woken: Arc<AtomicUsize>,
    }

    impl Bed {
        fn new() -> Bed {
            let exchange = Exchange::create(Layout { slots: 2, slot_bytes: 4096 }).expect("memory");
            let (answers, taker) = (Pusher::default(), Taker::default());
            Bed { link: Link::new(2), exchange, answers, taker, woken: Arc::default() }
        }

        fn wake(&self) -> Wake {
            let woken = Arc::clone(&self.woken);
            Box::new(move || {
                woken.fetch_add(1, Ordering::SeqCst);
            })
        }

        fn answer(&mut self, word: Word) -> Result<(), Broken> {
            self.answers.push(&self.exchange.answers(), word.pack());
            self.link.take_answers(&self.exchange, &mut self.taker)
        }

        fn woken(&self) -> usize {
            self.woken.load(Ordering::SeqCst)
        }
    }

    #[test]
    fn words_survive_packing() {
        for (slot, note, serial) in [(0, 0, 0), (255, 255, u64::MAX >> 16), (3, 1, 7)] {
            let word = Word { slot, note, serial };
            assert_eq!(Word::unpack(word.pack()), word);
        }
        for drill in [None, Some(Drill::Error), Some(Drill::Hang)] {
            assert_eq!(drill_in(note_of(drill)), drill);
        }
    }

    #[test]
    fn an_answer_to_what_was_asked_ends_the_batch_once() {
        let mut bed = Bed::new();
        for round in 1..=3u64 {
            let serial = bed.link.begin(1, bed.wake()).expect("it is there");
            assert_eq!((serial, bed.link.finish(1)), (round, Ok(None)));
            assert_eq!(bed.answer(Word { slot: 1, note: 1, serial }), Ok(()));
            assert_eq!(bed.woken() as u64, round);
            assert_eq!(bed.link.finish(1), Ok(Some(Outcome::Done)));
        }
        let serial = bed.link.begin(0, bed.wake()).expect("it is there");
        assert_eq!(bed.answer(Word { slot: 0, note: 2, serial }), Ok(()));
        assert_eq!(bed.link.finish(0), Ok(Some(Outcome::Refused)));
    }

    #[test]
    fn any_other_answer_breaks_the_link_and_wakes_nobody() {
        let right = Word { slot: 1, note: 1, serial: 1 };
        let wrong = [
            Word { slot: 0, ..right },
            Word { slot: 2, ..right },
            Word { slot: 255, ..right },
            Word { note: 0, ..right },
            Word { note: 3, ..right },
            Word { serial: 0, ..right },
            Word { serial: 2, ..right },
        ];
        for word in wrong {
            let mut bed = Bed::new();
            bed.link.begin(1, bed.wake()).expect("it is there");
            assert_eq!((bed.answer(word), bed.woken()), (Err(Broken), 0), "{word:?}");
            assert_eq!(bed.link.finish(1), Ok(None));
        }
        let mut bed = Bed::new();
        bed.link.begin(1, bed.wake()).expect("it is there");
        assert_eq!((bed.answer(right), bed.answer(right)), (Ok(()), Err(Broken)), "twice");
    }

    #[test]
    fn bells_for_nothing_break_the_link_in_the_end() {
        let mut bed = Bed::new();
        for _ in 0..IDLE_BELLS_MAX {
            assert_eq!(bed.link.take_answers(&bed.exchange, &mut bed.taker), Ok(()));
        }
        let serial = bed.link.begin(0, bed.wake()).expect("it is there");
        assert_eq!(bed.answer(Word { slot: 0, note: 1, serial }), Ok(()));
        for _ in 0..IDLE_BELLS_MAX {
            assert_eq!(bed.link.take_answers(&bed.exchange, &mut bed.taker), Ok(()));
        }
        assert_eq!(bed.link.take_answers(&bed.exchange, &mut bed.taker), Err(Broken));
    }

    #[test]
    fn the_end_wakes_all_that_wait_and_nothing_begins_after_it() {
        let bed = Bed::new();
        bed.link.watch(bed.wake());
        bed.link.begin(0, bed.wake()).expect("it is there");
        bed.link.begin(1, bed.wake()).expect("it is there");
        bed.link.end("killed".into());
        bed.link.end("again".into());
        assert_eq!((bed.woken(), bed.link.ended()), (3, Some("killed".into())));
        assert_eq!(bed.link.begin(0, bed.wake()), Err("killed".into()));
        assert_eq!(bed.link.finish(1), Err("killed".into()));
        bed.link.watch(bed.wake());
        assert_eq!(bed.woken(), 4, "who comes too late is told at once");
    }
}
