//! A small seeded generator: the same seed gives the same run on every machine.

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator whose whole sequence follows from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next_u64() % end
    }

    /// An index below `end`, which must not be 0.
    pub fn index(&mut self, end: usize) -> usize {
        self.below(end as u64) as usize
    }

    /// Shuffles `items`.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.index(last + 1));
        }
    }

    /// True with probability `1 / of`.
    pub fn one_in(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }

    /// Fills `bytes`.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }

    /// `count` different numbers below `end`.
    pub fn choose(&mut self, count: usize, end: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..end).collect();
        for at in 0..count.min(end) {
            let other = at + self.index(end - at);
            all.swap(at, other);
        }
        all.truncate(count);
        all
    }
}
