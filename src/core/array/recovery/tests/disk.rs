//! A member's device in memory: writes that were not flushed may be lost, kept or torn, and blocks may rot.

use crate::testing::Random;
use std::collections::{BTreeMap, BTreeSet, HashMap};

pub(super) const BLOCK: usize = 4096;

pub(super) type Block = Box<[u8; BLOCK]>;

pub(super) fn block_of(value: u64) -> Block {
    let mut block = Box::new([0; BLOCK]);
    if value != 0 {
        Random::new(value).fill(&mut block[..]);
    }
    block
}

/// A member's device.
#[derive(Clone, Default)]
pub(super) struct Disk {
    stable: HashMap<u64, Block>,
    /// Versions since the last flush, oldest first.
    cached: BTreeMap<u64, Vec<Block>>,
    pub unreadable: BTreeSet<u64>,
    pub dead: bool,
    /// Seed of the noise that blocks show which were never written.
    noise: u64,
}

impl Disk {
    pub(super) fn new(noise: u64) -> Disk {
        Disk { noise, ..Disk::default() }
    }

    pub(super) fn peek(&self, block: u64) -> Block {
        let cached = self.cached.get(&block).and_then(|versions| versions.last());
        // A new device holds anything.
        cached.or(self.stable.get(&block)).cloned().unwrap_or_else(|| block_of(self.noise + block))
    }

    pub(super) fn read(&self, block: u64) -> Option<Block> {
        (!self.dead && !self.unreadable.contains(&block)).then(|| self.peek(block))
    }

    pub(super) fn write(&mut self, block: u64, bytes: &[u8]) {
        self.unreadable.remove(&block);
        self.cached.entry(block).or_default().push(Box::new(bytes.try_into().unwrap()));
    }

    pub(super) fn flush(&mut self) {
        for (block, mut versions) in std::mem::take(&mut self.cached) {
            self.stable.insert(block, versions.pop().unwrap());
        }
    }

    pub(super) fn lose_power(&mut self, random: &mut Random) {
        let mode = random.below(5);
        for (block, versions) in std::mem::take(&mut self.cached) {
            let pick = match mode {
                0 => 0,
                1 => versions.len(),
                _ => random.below(versions.len() as u64 + 1) as usize,
            };
            let mut all = vec![self.peek(block)];
            all.extend(versions);
            let mut kept = all[pick].clone();
            if mode == 4 && random.one_in(3) {
                for sector in kept.chunks_mut(512).enumerate() {
                    let other = &all[random.below(all.len() as u64) as usize];
                    sector.1.copy_from_slice(&other[sector.0 * 512..(sector.0 + 1) * 512]);
                }
            }
            self.stable.insert(block, kept);
        }
    }

    /// Cuts the power: of the blocks that were not flushed these are kept.
    pub(super) fn keep_only(&mut self, kept: impl Fn(u64) -> bool) {
        self.cached.retain(|block, _| kept(*block));
        self.flush();
    }

    /// Makes the block read as another content, without an error.
    pub(super) fn overwrite(&mut self, block: u64, value: u64) {
        self.cached.remove(&block);
        self.stable.insert(block, block_of(value));
    }

    /// Makes the block read as something else from now on, or not at all.
    pub(super) fn rot(&mut self, block: u64, random: &mut Random) {
        let mut bytes = self.peek(block);
        self.cached.remove(&block);
        match random.below(3) {
            0 => drop(self.unreadable.insert(block)),
            1 => bytes.fill(0),
            _ => bytes[random.below(BLOCK as u64) as usize] ^= 1 << random.below(8),
        }
        self.stable.insert(block, bytes);
    }
}
