//! The kind of filesystem that a member file is on, as far as it decides how the file is read and
//! written. Must not know how the file is read and written.

use nix::sys::statfs::statfs;
use std::path::Path;

/// Kinds of filesystems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filesystem {
    /// It lives in memory: I/O is a copy and never waits.
    Memory,
    /// It lives on disks of this host: a call that asks not to wait for them does not.
    Disk,
    /// Any other. Any call may wait for another host or process: FUSE, NFS, SMB, 9p, Ceph, cluster
    /// filesystems, an overlay over one of these, and unknown ones.
    Elsewhere,
}

/// Magic numbers from linux/magic.h and the filesystems' own sources.
const IN_MEMORY: [u32; 2] = [
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
];

/// The same.
const ON_DISK: [u32; 16] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0xf2f5_2010, // F2FS
    0xca45_1a4e, // bcachefs
    0x2fc1_2fc1, // ZFS
    0x3153_464a, // JFS
    0x3434,      // NILFS2
    0x5265_4973, // ReiserFS
    0x4d44,      // FAT
    0x2011_bab0, // exFAT
    0x7366_746e, // NTFS, of ntfs3
    0x4244,      // HFS
    0x482b,      // HFS+
    0x1501_3346, // UDF
    0x9584_58f6, // hugetlbfs
];

impl Filesystem {
    /// The kind for the file at a path. A filesystem that does not answer counts as unknown.
    pub(super) fn of(path: &Path) -> Filesystem {
        let magic = statfs(path).map(|fs| fs.filesystem_type().0);
        // The type is wider on some hosts, and signed.
        magic.map_or(Filesystem::Elsewhere, |magic| Filesystem::from_magic(magic as u32))
    }

    fn from_magic(magic: u32) -> Filesystem {
        match () {
            () if IN_MEMORY.contains(&magic) => Filesystem::Memory,
            () if ON_DISK.contains(&magic) => Filesystem::Disk,
            () => Filesystem::Elsewhere,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_wait_for_others_is_told_from_memory_and_disks() {
        assert_eq!(Filesystem::of(Path::new("/dev/shm")), Filesystem::Memory);
        assert_eq!(Filesystem::of(Path::new("/nonexistent")), Filesystem::Elsewhere);
        let fuse = nix::sys::statfs::FUSE_SUPER_MAGIC.0 as u32;
        let nfs = nix::sys::statfs::NFS_SUPER_MAGIC.0 as u32;
        for magic in [fuse, nfs, 0xff53_4d42, 0xfe53_4d42, 0x0102_1997, 0x00c3_6400] {
            assert_eq!(Filesystem::from_magic(magic), Filesystem::Elsewhere, "{magic:#x}");
        }
        let ext4 = nix::sys::statfs::EXT4_SUPER_MAGIC.0 as u32;
        let tmpfs = nix::sys::statfs::TMPFS_MAGIC.0 as u32;
        assert_eq!(Filesystem::from_magic(ext4), Filesystem::Disk);
        assert_eq!(Filesystem::from_magic(tmpfs), Filesystem::Memory);
    }
}
