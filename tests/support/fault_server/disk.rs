//! The storage of one export: an image with a volatile cache in front of it. A power cut loses unflushed
//! writes, wholly or in part, and may leave earlier unflushed versions. Must not know NBD, time or faults.

use calpe_core::testing::Random;
use std::collections::BTreeMap;

/// Bytes that are written wholly or not at all.
pub(crate) const SECTOR: usize = 512;
const BLOCK: usize = 4096;
const SECTORS: usize = BLOCK / SECTOR;

/// One in this many writes over an unflushed block lets the older version reach the medium first, as caches
/// do.
const DESTAGE_ONE_IN: u64 = 8;

/// How much of the cache survives a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    Nothing,
    Everything,
    /// Some blocks of 4 KiB.
    Blocks,
    /// Some sectors: writes are torn.
    Sectors,
}

/// See the head of this file.
pub(crate) struct Disk {
    /// The content that reads see.
    current: Vec<u8>,
    /// The content that a power cut leaves.
    stable: Vec<u8>,
    /// Blocks in which the two may differ, with a bit for each of their sectors.
    unflushed: BTreeMap<usize, u8>,
    random: Random,
}

impl Disk {
    /// A disk of zeroes; the seed decides what power cuts lose.
    pub(crate) fn new(bytes: u64, seed: u64) -> Disk {
        assert!(bytes.is_multiple_of(BLOCK as u64), "{bytes} bytes are not whole blocks");
        let bytes = usize::try_from(bytes).expect("it fits in memory");
        Disk {
            current: vec![0; bytes],
            stable: vec![0; bytes],
            unflushed: BTreeMap::new(),
            random: Random::new(seed),
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.current.len() as u64
    }

    /// Whether the disk has this range, in whole sectors.
    pub(crate) fn has(&self, offset: u64, length: u64) -> bool {
        let aligned = offset.is_multiple_of(SECTOR as u64) && length.is_multiple_of(SECTOR as u64);
        aligned && offset.checked_add(length).is_some_and(|end| end <= self.bytes())
    }

    pub(crate) fn read(&self, offset: u64, length: usize) -> &[u8] {
        &self.current[offset as usize..offset as usize + length]
    }

    /// Writes whole sectors; with `durable` they are flushed, too.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8], durable: bool) {
        let offset = offset as usize;
        self.prepare(offset, data.len(), durable);
        self.current[offset..offset + data.len()].copy_from_slice(data);
        if durable {
            self.stable[offset..offset + data.len()].copy_from_slice(data);
        }
    }

    /// The same with zeroes.
    pub(crate) fn zero(&mut self, offset: u64, length: u64, durable: bool) {
        let (offset, length) = (offset as usize, length as usize);
        self.prepare(offset, length, durable);
        self.current[offset..offset + length].fill(0);
        if durable {
            self.stable[offset..offset + length].fill(0);
        }
    }

    /// Records that a range is about to be written.
    fn prepare(&mut self, offset: usize, length: usize, durable: bool) {
        let end = offset + length;
        for block in offset / BLOCK..end.div_ceil(BLOCK) {
            let from = offset.max(block * BLOCK) - block * BLOCK;
            let to = end.min((block + 1) * BLOCK) - block * BLOCK;
            let mask = sectors(from / SECTOR, to / SECTOR);
            if durable {
                if let Some(left) = self.unflushed.get_mut(&block) {
                    *left &= !mask;
                }
            } else {
                let before = self.unflushed.get(&block).copied().unwrap_or(0);
                if before != 0 && self.random.one_in(DESTAGE_ONE_IN) {
                    self.settle(block, before, before);
                }
                *self.unflushed.entry(block).or_default() |= mask;
            }
        }
    }

    /// Makes everything written so far stable.
    pub(crate) fn flush(&mut self) {
        for (block, mask) in std::mem::take(&mut self.unflushed) {
            self.settle(block, mask, mask);
        }
    }

    /// Loses what was not flushed, except what survives by chance.
    pub(crate) fn lose(&mut self, keep: Keep) {
        for (block, mask) in std::mem::take(&mut self.unflushed) {
            let kept = match keep {
                Keep::Nothing => 0,
                Keep::Everything => mask,
                Keep::Blocks => {
                    if self.random.one_in(2) {
                        mask
                    } else {
                        0
                    }
                }
                Keep::Sectors => mask & self.random.next_u64() as u8,
            };
            self.settle(block, mask, kept);
        }
    }

    /// Of the unflushed sectors of a block, those in `kept` become stable; the others go back to their stable
    /// content.
    fn settle(&mut self, block: usize, mask: u8, kept: u8) {
        for sector in (0..SECTORS).filter(|sector| mask >> sector & 1 == 1) {
            let at = block * BLOCK + sector * SECTOR;
            let range = at..at + SECTOR;
            if kept >> sector & 1 == 1 {
                self.stable[range.clone()].copy_from_slice(&self.current[range]);
            } else {
                self.current[range.clone()].copy_from_slice(&self.stable[range]);
            }
        }
    }

    /// The content that a power cut would leave if it lost the whole cache.
    pub(crate) fn stable(&self) -> &[u8] {
        &self.stable
    }

    /// Replaces everything by an earlier content.
    pub(crate) fn restore(&mut self, content: &[u8]) {
        self.unflushed.clear();
        self.current.copy_from_slice(content);
        self.stable.copy_from_slice(content);
    }

    /// Flips one bit, on the medium and in the cache.
    pub(crate) fn flip(&mut self, offset: u64, bit: u8) {
        let at = offset as usize;
        self.current[at] ^= 1 << (bit % 8);
        self.stable[at] ^= 1 << (bit % 8);
    }
}

fn sectors(from: usize, to: usize) -> u8 {
    ((1u16 << to) - (1 << from)) as u8
}
