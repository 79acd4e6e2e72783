//! Which numbers of pages of maps are taken. The next is always the lowest that is not, whatever happened
//! before: a start that applies the same records gives the same numbers.

use std::collections::BTreeSet;

/// The numbers of pages of maps; 0 is none of them.
pub(super) struct MapNumbers {
    /// Free ones below `beyond`.
    free: BTreeSet<u64>,
    /// All from here on are free.
    beyond: u64,
}

impl MapNumbers {
    /// Taken are those that `is_taken` of the numbers below `end`.
    pub(super) fn new(end: u64, is_taken: impl Fn(u64) -> bool) -> MapNumbers {
        let beyond = (1..end).rev().find(|&number| is_taken(number)).map_or(1, |last| last + 1);
        MapNumbers { free: (1..beyond).filter(|&number| !is_taken(number)).collect(), beyond }
    }

    /// Takes the lowest.
    pub(super) fn take(&mut self) -> u64 {
        self.free.pop_first().unwrap_or_else(|| {
            self.beyond += 1;
            self.beyond - 1
        })
    }

    /// Gives one back.
    ///
    /// # Panics
    /// When it is not taken.
    pub(super) fn give_back(&mut self, number: u64) {
        assert!(self.is_taken(number), "page {number} of the maps is freed twice");
        self.free.insert(number);
    }

    /// Those that are taken.
    pub(super) fn taken(&self) -> BTreeSet<u64> {
        (1..self.beyond).filter(|number| !self.free.contains(number)).collect()
    }

    /// Whether a page has this number.
    pub(super) fn is_taken(&self, number: u64) -> bool {
        (1..self.beyond).contains(&number) && !self.free.contains(&number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_number_is_next_before_and_after_a_start() {
        let mut numbers = MapNumbers::new(0, |_| false);
        assert_eq!((0..5).map(|_| numbers.take()).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        [5, 2, 3].into_iter().for_each(|number| numbers.give_back(number));
        let mut started = MapNumbers::new(6, |number| [1, 4].contains(&number));
        for expected in [2, 3, 5, 6] {
            assert!(!numbers.is_taken(expected) && !started.is_taken(expected));
            assert_eq!((numbers.take(), started.take()), (expected, expected));
            assert!(numbers.is_taken(expected) && started.is_taken(expected));
        }
        assert!(!numbers.is_taken(0));
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_number_is_given_back_once() {
        let mut numbers = MapNumbers::new(0, |_| false);
        let number = numbers.take();
        numbers.give_back(number);
        numbers.give_back(number);
    }
}
