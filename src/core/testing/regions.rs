//! Where the regions of a member lie on a simulated disk.

use super::{SimDisk, superblocks};
use crate::format::{COPY_BYTES, RegionKind};
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

    /// Where it lies on a disk that has a superblock, in bytes; in the windows of all lanes.
    #[must_use]
    pub fn ranges(self, disk: &SimDisk) -> Vec<Range<u64>> {
        let kind = match self {
            DiskRegion::Superblocks => {
                return disk.copies().map(|copy| copy..copy + COPY_BYTES as u64).collect();
            }
            DiskRegion::Log => RegionKind::Log,
            DiskRegion::Pages => RegionKind::Pages,
            DiskRegion::Data => RegionKind::Data,
        };
        let range = |lane| {
            let region = superblocks::of_lane(disk, lane)?.region(kind)?;
            let start = disk.window(lane).start + region.offset.0;
            Some(start..start + region.len)
        };
        disk.lanes().filter_map(range).collect()
    }
}
