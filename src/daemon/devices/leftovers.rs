//! Leftovers of an interrupted first creation of `up`: recognises and removes them, so that the next `up` can
//! begin anew.
//!
//! Invariant: only files are removed that hold nothing: zeroes, or the superblock of an array that never was
//! in service while the rest of its members holds zeroes. Must not know of running arrays.

use crate::daemon::devices::lanes::DeviceLanes;
use crate::daemon::devices::search::Found;
use crate::member::{Access, Device, DeviceError, DeviceKind};
use calpe_core::format::Superblock;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Most bytes that are read of one file. A creation allocates less, and some filesystems cannot tell
/// allocated space from data.
const LOOKED_AT_MAX: u64 = 256 << 20;

/// Bytes that are read at one time.
const PIECE_BYTES: u64 = 1 << 20;

/// Why files stay where they are.
#[derive(Debug)]
pub(crate) enum Kept {
    /// It is in use, or cannot be opened or read.
    Device(DeviceError),
    /// It holds data.
    Used(PathBuf),
}

impl From<DeviceError> for Kept {
    fn from(error: DeviceError) -> Kept {
        Kept::Device(error)
    }
}

/// Whether these members of an array, all that were found, may be left from an interrupted creation: none has
/// been in service, and each is where `up` creates it. `place`: where it creates the member of an index.
pub(crate) fn is_unfinished(members: &[Found], name: &str, place: impl Fn(usize) -> PathBuf) -> bool {
    let is_first = |found: &Found| {
        let Superblock { name: own, member, .. } = &found.superblock;
        own == name && found.is_new && found.path == place(usize::from(member.0))
    };
    let width = members.first().map_or(0, |found| found.superblock.members.len());
    // Files are created before the first superblock is written.
    (members.len() < width || members.iter().any(|found| found.is_unfinished))
        && members.iter().all(is_first)
        && (0..width).all(|index| place(index).symlink_metadata().is_ok())
}

/// Removes these files if none of them holds anything; with an `array`, its superblocks count as
/// nothing. All of them, or none.
///
/// # Errors
/// The first that is kept, and why.
pub(crate) fn remove(files: &[PathBuf], array: Option<Uuid>) -> Result<(), Kept> {
    let mut held = Vec::new();
    for path in files {
        let device = Device::open(path, Access::Exclusive)?;
        let is_link = path.symlink_metadata().is_ok_and(|meta| meta.is_symlink());
        // Read again under the lock: a daemon may have served it since.
        let lanes = DeviceLanes::read(&device);
        let is_left = |array| lanes.first().is_ok_and(|s| s.array == array && lanes.is_new());
        let is_own = array.is_some_and(is_left);
        if is_link || device.facts().kind != DeviceKind::File || !(is_own || is_blank(&device)?) {
            return Err(Kept::Used(path.clone()));
        }
        held.push(device);
    }
    for device in held {
        device.remove_file().map_err(|error| DeviceError::from_io(device.path(), "remove it", error))?;
    }
    Ok(())
}

/// Whether a file holds nothing but zeroes, as far as can be found out soon.
fn is_blank(device: &Device) -> Result<bool, DeviceError> {
    let facts = device.facts();
    if facts.bytes != facts.exact_bytes {
        return Ok(false);
    }
    let (mut at, mut looked_at) = (0, 0);
    for extent in device.extents(0, facts.bytes) {
        let end = at + extent.len;
        if !extent.hole {
            looked_at += extent.len;
            if looked_at > LOOKED_AT_MAX {
                return Ok(false);
            }
            while at < end {
                let mut piece = vec![0; PIECE_BYTES.min(end - at) as usize];
                device.read_at(at, &mut piece)?;
                if piece.iter().any(|byte| *byte != 0) {
                    return Ok(false);
                }
                at += piece.len() as u64;
            }
        }
        at = end;
    }
    Ok(true)
}

/// The existing files among those that `up` could have created.
pub(crate) fn present(place: impl Fn(usize) -> PathBuf) -> Vec<PathBuf> {
    let all = (0..=usize::from(u8::MAX)).map(place);
    all.filter(|path: &PathBuf| Path::symlink_metadata(path).is_ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::devices::import::tests::created_with_lanes;
    use crate::daemon::devices::search::search;
    use crate::daemon::devices::superblocks::write_superblock;
    use crate::member::DEFAULT_MEMBER_TIMEOUT as PATIENCE;
    use calpe_core::format::{COPY_BYTES, superblock_offsets};
    use std::fs::{self, File};
    use std::os::unix::fs::FileExt;

    #[test]
    fn files_go_together_or_not_at_all_and_only_if_they_hold_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let files: Vec<PathBuf> = ["a", "b", "c"].map(|name| dir.path().join(name)).into();
        File::create(&files[0]).unwrap();
        File::create(&files[1]).unwrap().set_len(1 << 30).unwrap();
        let written = File::create(&files[2]).unwrap();
        written.set_len(8 << 20).unwrap();
        written.write_all_at(&[0; 8192], 4096).unwrap();
        written.write_all_at(&[1], (8 << 20) - 1).unwrap();
        assert!(matches!(remove(&files, None), Err(Kept::Used(path)) if path == files[2]));
        assert!(files.iter().all(|file| file.exists()));
        written.write_all_at(&[0], (8 << 20) - 1).unwrap();
        remove(&files, None).unwrap();
        assert!(files.iter().all(|file| !file.exists()));
    }

    #[test]
    fn a_creation_of_lanes_that_was_cut_short_on_its_last_device_is_recognised_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let array = created_with_lanes(dir.path(), "tank", 1, 1, 3);
        let place = |index: usize| dir.path().join(format!("m{index}"));
        let files: Vec<PathBuf> = (0..2).map(place).collect();
        let look = || search(&[dir.path().into()], PATIENCE).arrays.remove(&array).unwrap();
        assert!(!is_unfinished(&look(), "tank", place), "it is complete");
        let last = Device::open(&files[1], Access::Exclusive).unwrap();
        let lanes = DeviceLanes::read(&last);
        for offset in [0, COPY_BYTES as u64] {
            last.write_at(offset, &[0; COPY_BYTES]).unwrap();
        }
        assert!(is_unfinished(&look(), "tank", place));
        assert!(
            !is_unfinished(&look(), "other", place) && !is_unfinished(&look(), "tank", |at| place(at + 1))
        );
        // The array was in service, as one lane of one device knows.
        let first = lanes.superblocks().nth(1).flatten().unwrap();
        let window = last.window(&lanes.windows(last.facts().bytes)[1]);
        write_superblock(&window, &Superblock { sequence: 2, ..first.clone() }).unwrap();
        [window, last].into_iter().for_each(Device::close);
        assert!(!is_unfinished(&look(), "tank", place));
        assert!(remove(&files, Some(array)).is_err() && files.iter().all(|file| file.exists()));
        let last = Device::open(&files[1], Access::Exclusive).unwrap();
        let window = last.window(&lanes.windows(last.facts().bytes)[1]);
        let [head, tail] = superblock_offsets(window.facts().bytes, 2);
        for offset in [head.0, tail.0] {
            window.write_at(offset, &[0; COPY_BYTES]).unwrap();
        }
        [window, last].into_iter().for_each(Device::close);
        assert!(is_unfinished(&look(), "tank", place));
        remove(&files, Some(array)).unwrap();
        assert!(files.iter().all(|file| !file.exists()));
    }

    #[test]
    fn short_notes_links_and_directories_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("note"), "x").unwrap();
        fs::write(path("zeroes"), [0; 100]).unwrap();
        File::create(path("target")).unwrap();
        std::os::unix::fs::symlink("target", path("link")).unwrap();
        fs::create_dir(path("dir")).unwrap();
        for name in ["note", "zeroes", "link", "dir"] {
            assert!(remove(&[path(name)], None).is_err(), "{name}");
            assert!(path(name).symlink_metadata().is_ok(), "{name}");
        }
    }
}
