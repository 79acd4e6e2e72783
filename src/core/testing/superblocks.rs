//! A cache of the valid superblocks of simulated disks: the explorer starts many arrays from copies of the
//! same disks, and decoding four copies of 16 KiB each time would be most of its work.
//!
//! Blocks are shared between copies of a disk and never change under a handle, so equal handles mean equal
//! bytes. The cache holds the handles it knows, so that no address is reused while it is a key.

use super::disk::{BLOCK, Block, SimDisk};
use crate::format::{COPY_BYTES, CopyPlace, FormatError, Superblock, all_copy_offsets, decode_copy};
use crate::units::LaneIndex;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

/// Blocks of one copy.
const BLOCKS: usize = COPY_BYTES / BLOCK as usize;
/// Most cached copies: many times those of the widest array that is explored.
const REMEMBERED_MAX: usize = 2048;

type Key = (CopyPlace, [usize; BLOCKS]);
type Decoded = Result<Superblock, FormatError>;

thread_local! {
    static REMEMBERED: RefCell<HashMap<Key, (Vec<Block>, Decoded)>> = RefCell::new(HashMap::new());
}

/// The valid superblock of a disk, that of the first lane; None when it has none, or none that this version
/// may use.
pub(super) fn newest(disk: &SimDisk) -> Option<Superblock> {
    of_lane(disk, LaneIndex(0))
}

/// The numbers of the epochs of all lanes of a disk.
pub(super) fn epochs(disk: &SimDisk) -> Vec<Option<u64>> {
    let epoch = |lane| of_lane(disk, lane).map(|superblock| superblock.epoch.number);
    disk.lanes().map(epoch).collect()
}

/// The valid superblock of a lane of a disk.
pub(super) fn of_lane(disk: &SimDisk, lane: LaneIndex) -> Option<Superblock> {
    let window = disk.window(lane);
    let copies = CopyPlace::ALL.into_iter().zip(all_copy_offsets(window.end - window.start));
    let copies: Vec<_> =
        copies.map(|(place, offset)| Ok(copy_at(disk, place, window.start + offset.0))).collect();
    crate::format::newest_read(copies.try_into().expect("four")).ok()
}

/// Fields of a superblock copy in which a device may lie; for their offsets see docs/on-disk-format.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Counts updates of the superblock.
    Sequence,
    /// Features that only readers may ignore.
    RoCompat,
    /// Number of the epoch.
    EpochNumber,
    /// Identity of the epoch.
    EpochId,
    /// Identity of the epoch before.
    EpochParent,
    /// The members in service, the first 64 of them.
    EpochLive,
    /// The sequence with which the log starts.
    LogStartSequence,
    /// The epoch in which the log starts.
    LogStartEpoch,
    /// Pages of the stripe map that have a version.
    MapPages,
}

impl Claim {
    /// The claims that the explorer forges.
    pub const ALL: [Claim; 8] = [
        Claim::Sequence,
        Claim::RoCompat,
        Claim::EpochNumber,
        Claim::EpochId,
        Claim::EpochParent,
        Claim::EpochLive,
        Claim::LogStartSequence,
        Claim::LogStartEpoch,
    ];

    /// The value that a copy claims instead of `before`, adapted so that the copy's slot stays right: a
    /// sequence belongs in the slot of its parity.
    #[must_use]
    pub fn in_place(self, value: u64, before: u64) -> u64 {
        if self == Claim::Sequence { value & !1 | before & 1 } else { value }
    }

    fn at(self) -> usize {
        match self {
            Claim::Sequence => 0x30,
            Claim::RoCompat => 0x40,
            Claim::EpochNumber => 0xe0,
            Claim::EpochId => 0xe8,
            Claim::EpochParent => 0xf0,
            Claim::EpochLive => 0xf8,
            Claim::LogStartSequence => 0x160,
            Claim::LogStartEpoch => 0x168,
            Claim::MapPages => 0x190,
        }
    }
}

/// The bytes of a copy that hold its checksum, which is computed with them set to zero.
const CHECKSUM_AT: std::ops::Range<usize> = 0x10..0x30;

impl SimDisk {
    /// Whether the newest superblock on this disk says that the array is clean.
    #[must_use]
    pub fn says_clean(&self) -> bool {
        newest(self).is_some_and(|superblock| superblock.clean)
    }

    /// How many slots of the device of this member, or of the one that is to replace it, are built, by the
    /// newest superblock on this disk.
    #[must_use]
    pub fn recorded_progress(&self, member: u16) -> Option<u64> {
        let superblock = newest(self)?;
        let new = superblock.replacements.iter().find(|new| new.member.0 == member);
        Some(new.map_or(superblock.members[usize::from(member)].rebuilt, |new| new.rebuilt).0)
    }

    /// Sets the field `claim` of every valid copy to `value(old)`, with a matching checksum, as a mistaken or
    /// hostile writer would. Returns the old value in the newest copy.
    pub fn forge_superblock(&mut self, claim: Claim, value: impl Fn(u64) -> u64) -> Option<u64> {
        let mut said = None;
        let copies: Vec<u64> = self.copies().collect();
        for offset in copies {
            let mut copy = self.peek(offset, COPY_BYTES);
            let Ok(superblock) = Superblock::decode(&copy) else { continue };
            let word = claim.at()..claim.at() + 8;
            let before = u64::from_le_bytes(copy[word.clone()].try_into().expect("eight bytes"));
            said = said.max(Some((superblock.sequence, before)));
            copy[word].copy_from_slice(&value(before).to_le_bytes());
            copy[CHECKSUM_AT].fill(0);
            let checksum = blake3::hash(&copy);
            copy[CHECKSUM_AT].copy_from_slice(checksum.as_bytes());
            self.poke(offset, &copy);
        }
        said.map(|(_, before)| before)
    }
}

fn copy_at(disk: &SimDisk, place: CopyPlace, offset: u64) -> Decoded {
    debug_assert!(offset.is_multiple_of(BLOCK));
    let first = offset / BLOCK;
    let blocks: Vec<Option<&Block>> = (first..first + BLOCKS as u64).map(|at| disk.block(at)).collect();
    let mut key = (place, [0; BLOCKS]);
    for (key, block) in key.1.iter_mut().zip(&blocks) {
        *key = block.map_or(0, |block| Arc::as_ptr(block).addr());
    }
    REMEMBERED.with_borrow_mut(|remembered| {
        if let Some((_, decoded)) = remembered.get(&key) {
            return decoded.clone();
        }
        let decoded = decode_copy(place, &disk.peek(offset, COPY_BYTES));
        if remembered.len() >= REMEMBERED_MAX {
            remembered.clear();
        }
        let held = blocks.into_iter().flatten().cloned().collect();
        remembered.insert(key, (held, decoded.clone()));
        decoded
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{SimArray, SimShape};

    #[test]
    fn a_forged_claim_is_read_as_such_and_nothing_else_is_changed() {
        let mut sim = SimArray::create(
            SimShape::new(2, 1, 4096, 2).logged(crate::format::ChecksumKind::Crc32c, 64 << 10),
            1,
        );
        sim.settle();
        let disk = sim.disks.get_mut(&1).expect("a disk");
        let before = newest(disk).expect("a superblock");
        assert_eq!(disk.forge_superblock(Claim::EpochNumber, |number| number + 7), Some(before.epoch.number));
        assert_eq!(disk.forge_superblock(Claim::EpochParent, |_| 99), Some(before.epoch.parent));
        let sequence = before.log_start.sequence;
        assert_eq!(disk.forge_superblock(Claim::LogStartSequence, |n| n + 1), Some(sequence));
        let mut expected = before;
        expected.epoch.number += 7;
        expected.epoch.parent = 99;
        expected.log_start.sequence += 1;
        assert_eq!(newest(disk), Some(expected));
    }

    #[test]
    fn each_claim_is_the_field_of_its_name() {
        let mut sim = SimArray::create(
            SimShape::new(2, 1, 4096, 2).logged(crate::format::ChecksumKind::Crc32c, 64 << 10),
            1,
        );
        sim.settle();
        let superblock = newest(&sim.disks[&0]).expect("a superblock");
        let said = |claim| sim.disks[&0].clone().forge_superblock(claim, |word| word).expect("a superblock");
        let start = superblock.log_start;
        let expected = [
            superblock.sequence,
            superblock.features_ro_compat,
            superblock.epoch.number,
            superblock.epoch.id,
            superblock.epoch.parent,
            superblock.epoch.live.0[0],
            start.sequence,
            start.epoch,
        ];
        assert_eq!(Claim::ALL.map(said), expected);
    }
}
