//! Whether filesystems have room for members, for dry runs of create and replace. Changes nothing that lasts;
//! room that cannot be determined without a change counts as present. Must not know of arrays.

use crate::member::{DeviceError, FileRoom, is_remote};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Bytes of a block in which files count what they take.
const STAT_BLOCK_BYTES: u64 = 512;

/// A planned member.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    /// Where.
    pub path: PathBuf,
    /// Size of the file that is to be created; none for an existing file, or a device.
    pub new_file: Option<u64>,
    /// Bytes that are allocated in it at once.
    pub allocated: u64,
}

/// Checks the room for all of them together.
///
/// # Errors
/// For the first member without room, in bytes or inodes, or whose file cannot be created.
pub(crate) fn check_room(wanted: &[Wanted]) -> Result<(), DeviceError> {
    let (mut free, mut files) = (Free::default(), Free::default());
    for Wanted { path, new_file, allocated } in wanted.iter().filter(|wanted| !is_remote(&wanted.path)) {
        let place = match new_file {
            Some(bytes) => {
                let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
                let parent = parent.unwrap_or(Path::new("."));
                try_size(path, parent, *bytes)?;
                parent
            }
            None => path,
        };
        let Ok(meta) = place.metadata() else { continue };
        let files_left = || FileRoom::beside(path).files_left.unwrap_or(u64::MAX);
        if new_file.is_some() && !files.take(meta.dev(), files_left, 1) {
            return Err(DeviceError::NoInodes { path: path.clone() });
        }
        let needed = match new_file {
            Some(_) => *allocated,
            // Some of its allocated space may lie outside the ranges that need space.
            None if meta.is_file() => allocated.saturating_sub(meta.blocks() * STAT_BLOCK_BYTES),
            None => continue,
        };
        if !free.take(meta.dev(), || free_bytes(place), needed) {
            return Err(DeviceError::NoSpace { path: path.clone(), bytes: needed });
        }
    }
    Ok(())
}

/// Free bytes of filesystems, by device number.
#[derive(Debug, Default)]
struct Free(BTreeMap<u64, u64>);

impl Free {
    /// Takes bytes of a filesystem, if it has them. `has`: its free bytes at the start.
    fn take(&mut self, filesystem: u64, has: impl FnOnce() -> u64, bytes: u64) -> bool {
        let left = self.0.entry(filesystem).or_insert_with(has);
        match left.checked_sub(bytes) {
            Some(rest) => {
                *left = rest;
                true
            }
            None => false,
        }
    }
}

/// What this user may take of a filesystem; a limit that cannot be read counts as none.
fn free_bytes(place: &Path) -> u64 {
    let Ok(fs) = nix::sys::statvfs::statvfs(place) else { return u64::MAX };
    // Filesystems keep a reserve that only root may use.
    let blocks = if nix::unistd::geteuid().is_root() { fs.blocks_free() } else { fs.blocks_available() };
    if fs.blocks() == 0 {
        // A filesystem without a size is one in memory without a limit.
        return u64::MAX;
    }
    blocks.saturating_mul(fs.fragment_size())
}

/// Checks that a filesystem takes a sparse file of this size, with an unnamed file that is gone
/// when it is closed.
fn try_size(path: &Path, parent: &Path, bytes: u64) -> Result<(), DeviceError> {
    let nameless =
        OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE).open(parent);
    let refused: Result<(), io::Error> = nameless.and_then(|file| file.set_len(bytes));
    let Err(error) = refused else { return Ok(()) };
    let room = FileRoom::beside(path);
    match error.raw_os_error() {
        _ if room.is_none => Err(DeviceError::NoFiles { path: path.into() }),
        Some(libc::ENOSPC) if room.files_left == Some(0) => Err(DeviceError::NoInodes { path: path.into() }),
        // The filesystem or the kernel has no unnamed files.
        Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT) => Ok(()),
        Some(libc::ENOSPC | libc::EDQUOT) => Err(DeviceError::NoSpace { path: path.into(), bytes }),
        Some(libc::EFBIG | libc::EINVAL) => Err(DeviceError::FileTooLarge { path: path.into(), bytes }),
        _ => Err(DeviceError::from_io(path, "create it", error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::member::Device;

    #[test]
    fn members_on_one_filesystem_need_their_room_together() {
        let mut free = Free::default();
        assert!(free.take(1, || 10, 6) && !free.take(1, || 10, 6) && free.take(1, || 10, 4));
        assert!(free.take(2, || 10, 6) && !free.take(1, || 10, 1));
    }

    #[test]
    fn a_place_that_takes_no_files_is_told_as_what_it_is_before_and_after_trying() {
        let path = Path::new("/proc/a");
        let wanted = Wanted { path: path.into(), new_file: Some(1 << 20), allocated: 4096 };
        let would = check_room(&[wanted]).unwrap_err().to_string();
        let did = Device::create_sparse(path, 1 << 20).unwrap_err().to_string();
        assert!(would.contains("no file can be created in this directory"), "{would}");
        assert_eq!(would, did);
    }

    #[test]
    fn what_is_there_is_asked_for_what_it_lacks_and_nothing_is_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let new = |bytes| Wanted { path: dir.path().join("new"), new_file: Some(bytes), allocated: 4096 };
        check_room(&[new(1 << 20)]).unwrap();
        let huge = check_room(&[new(1 << 62)]);
        assert!(matches!(huge, Err(DeviceError::FileTooLarge { .. })), "{huge:?}");
        let much = Wanted { allocated: u64::MAX / 4, ..new(1 << 20) };
        assert!(matches!(check_room(&[much]), Err(DeviceError::NoSpace { .. })));
        let full = dir.path().join("full");
        std::fs::write(&full, vec![1; 1 << 20]).unwrap();
        let there = |allocated| Wanted { path: full.clone(), new_file: None, allocated };
        check_room(&[there(1 << 20)]).unwrap();
        assert!(matches!(check_room(&[there(u64::MAX / 4)]), Err(DeviceError::NoSpace { .. })));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
