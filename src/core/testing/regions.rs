//! Where the regions of a member lie on a simulated disk.

use super::{SimDisk, superblocks};
use crate::format::{COPY_BYTES, RegionKind, all_copy_offsets};
use std::ops::Range;

/// A region of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskRegion {
    /// The four copies of the superblock.
    Superblocks,
    /// The ring of the redo log.
    Log,
    /// Checksums and stripe map.
    Pages,
    /// Slots.
    Data,
}

impl DiskRegion {
    /// All regions.
    pub const ALL: [DiskRegion; 4] =
        [DiskRegion::Superblocks, DiskRegion::Log, DiskRegion::Pages, DiskRegion::Data];

    /// Where it lies on a disk that has a superblock, in bytes.
    #[must_use]
    pub fn ranges(self, disk: &SimDisk) -> Vec<Range<u64>> {
        let kind = match self {
            DiskRegion::Superblocks => {
                let copies = all_copy_offsets(disk.bytes());
                return copies.iter().map(|copy| copy.0..copy.0 + COPY_BYTES as u64).collect();
            }
            DiskRegion::Log => RegionKind::Log,
            DiskRegion::Pages => RegionKind::Pages,
            DiskRegion::Data => RegionKind::Data,
        };
        let region = superblocks::newest(disk).and_then(|superblock| superblock.region(kind));
        region.map(|region| region.offset.0..region.offset.0 + region.len).into_iter().collect()
    }
}
