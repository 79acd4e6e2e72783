//! Reproducible bytes, choices and orders without a pattern that could hide a mistake, for the suites of the
//! codecs. The generator is [`Random`]; this type adds byte columns and `usize` bounds.

use super::Random;

/// Test data; the whole sequence follows from the seed.
pub struct Noise(Random);

impl Noise {
    /// Noise whose whole sequence follows from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Noise {
        Noise(Random::new(seed))
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0.index(bound)
    }

    /// `length` bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.number() as u8).collect()
    }

    /// `count` columns of `length` bytes.
    pub fn columns(&mut self, count: usize, length: usize) -> Vec<Vec<u8>> {
        (0..count).map(|_| self.bytes(length)).collect()
    }

    /// Shuffles `items`.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        self.0.shuffle(items);
    }
}
