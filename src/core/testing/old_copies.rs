//! Copies of disks that a load has made, and disks that become what such a copy holds.

use super::{DiskCopy, Random, SimDisk, superblocks};
use uuid::Uuid;

/// A copy of a disk that a load has made.
#[derive(Clone)]
pub(super) struct OldCopy {
    /// The identity of the device.
    pub device: Uuid,
    pub copy: DiskCopy,
    /// Copies of one moment have one number.
    pub moment: u64,
}

/// The disk becomes what one of its copies has; none is made of what it holds.
pub(super) fn roll_back(disk: &mut SimDisk, copies: &[OldCopy], random: &mut Random) -> Option<String> {
    let device = superblocks::newest(disk)?.device;
    let of_disk: Vec<&OldCopy> = copies.iter().filter(|copy| copy.device == device).collect();
    let copy = of_disk.get(random.index(of_disk.len().max(1)))?;
    disk.restore(&copy.copy);
    (disk.forgot, disk.restored) = (true, true);
    Some(format!("is rolled back to moment {}", copy.moment))
}
