//! Copies of disks made during a load, and disks rolled back to such a copy.

use super::{DiskCopy, Random, SimDisk, superblocks};
use uuid::Uuid;

/// A copy of a disk made during a load.
#[derive(Clone)]
pub(super) struct OldCopy {
    /// The identity of the device.
    pub device: Uuid,
    pub copy: DiskCopy,
    /// Copies made at the same moment have the same number.
    pub moment: u64,
}

/// Rolls the disk back to one of its copies, if there is one; its present content is not copied first.
/// Returns what was done.
pub(super) fn roll_back(disk: &mut SimDisk, copies: &[OldCopy], random: &mut Random) -> Option<String> {
    let device = superblocks::newest(disk)?.device;
    let of_disk: Vec<&OldCopy> = copies.iter().filter(|copy| copy.device == device).collect();
    let copy = of_disk.get(random.index(of_disk.len().max(1)))?;
    disk.restore(&copy.copy);
    (disk.forgot, disk.restored) = (true, true);
    Some(format!("is rolled back to moment {}", copy.moment))
}
