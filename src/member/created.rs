//! Files that are created to become members, and removed again if the creation fails.
//!
//! Invariants: a file is removed only by the attempt that created it, only while that attempt has
//! it locked, and only while its path leads to it: a file that another process has locked meanwhile
//! is that process's. Must not know what files are for.

use super::access::Access;
use super::device::{Device, FileRoom};
use super::{DeviceError, is_remote, own_table};
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a new file that another process has locked while it was empty is waited for: that
/// process finds the file too small and lets it go.
const LOOKED_AT_WAIT: Duration = Duration::from_secs(1);

impl Device {
    /// Creates a sparse file of `bytes` and opens it as [`Access::Exclusive`]. Its content is
    /// zeroes.
    ///
    /// # Errors
    /// When the file exists, its directory does not, or the filesystem cannot hold a file of this
    /// size; when another process has locked the new file, which then stays. Otherwise a file that
    /// was created is removed again.
    pub fn create_sparse(path: &Path, bytes: u64) -> Result<Device, DeviceError> {
        if is_remote(path) {
            return Err(DeviceError::NotFound { path: path.into() });
        }
        Device::check_new_name(path)?;
        let fail = |action: &str, e: io::Error| match e.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => DeviceError::NoSpace { path: path.into(), bytes },
            Some(libc::EFBIG | libc::EINVAL) => DeviceError::FileTooLarge { path: path.into(), bytes },
            _ => DeviceError::from_io(path, action, e),
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(|e| not_created(path, &e).unwrap_or_else(|| fail("create it", e)))?;
        let file = own_table::out_of_the_way(file);
        lock_new(&file, path)?;
        let finish = || {
            file.set_len(bytes).map_err(|e| fail("set its size", e))?;
            file.sync_all().map_err(|e| fail("flush it", e))?;
            let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            File::open(parent).and_then(|d| d.sync_all()).map_err(|e| fail("flush its directory", e))?;
            // Until the next lock any process may lock the file: it is complete, and has no content
            // yet.
            file.unlock().map_err(|e| fail("unlock it", e))?;
            Device::open(path, Access::Exclusive)
        };
        finish().inspect_err(|_| {
            // The first error is the one to report; a file that cannot be removed stays.
            if file.try_lock().is_ok() {
                let _ = remove(path, &file);
            }
        })
    }

    /// Removes the file of a locked device, unless its path leads to another file by now.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn remove_file(&self) -> io::Result<()> {
        self.file().map_or(Ok(()), |file| remove(self.path(), file))
    }
}

/// The file of a device that was created for an operation that may still be refused. It is locked
/// while this value exists, whatever becomes of the device: no other process can take it before it
/// is removed.
#[derive(Debug)]
pub(crate) struct CreatedFile {
    path: PathBuf,
    /// Some until this value is dropped.
    file: Option<File>,
}

impl CreatedFile {
    /// The file of a device that was just [created](Device::create_sparse).
    ///
    /// # Errors
    /// When no descriptor is available. Then the file is removed.
    pub(crate) fn of(device: &Device) -> Result<CreatedFile, DeviceError> {
        let path = device.path();
        let Ok(file) = device.file() else { return Err(DeviceError::NotFound { path: path.into() }) };
        match file.try_clone() {
            Ok(file) => Ok(CreatedFile { path: path.into(), file: Some(file) }),
            Err(error) => {
                // The first error is the one to report.
                let _ = device.remove_file();
                Err(DeviceError::from_io(path, "open it", error))
            }
        }
    }

    /// Removes it, unless its path leads to another one by now.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn remove(&self) -> io::Result<()> {
        self.file.as_ref().map_or(Ok(()), |file| remove(&self.path, file))
    }
}

impl Drop for CreatedFile {
    fn drop(&mut self) {
        let file = self.file.take();
        // Closing may take as long as the filesystem likes. Without a thread the file is closed
        // here, when the closure is dropped.
        let _ = std::thread::Builder::new().name("close".into()).spawn(move || drop(file));
    }
}

/// Locks a file that was just created, before it has a size.
fn lock_new(file: &File, path: &Path) -> Result<(), DeviceError> {
    let deadline = Instant::now() + LOOKED_AT_WAIT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => {
                let _ = remove(path, file);
                return Err(DeviceError::from_io(path, "lock it", error));
            }
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                let holder = "another program, which opened it when it was created".to_owned();
                return Err(DeviceError::Locked { path: path.into(), holder });
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn remove(path: &Path, file: &File) -> io::Result<()> {
    let own = file.metadata()?;
    match path.symlink_metadata() {
        Ok(there) if (there.dev(), there.ino()) == (own.dev(), own.ino()) => std::fs::remove_file(path),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// A reason for which the system refuses even an empty file, where it is more common than the one
/// that the errno names.
fn not_created(path: &Path, error: &io::Error) -> Option<DeviceError> {
    let path = path.to_path_buf();
    let room = FileRoom::beside(&path);
    match error.raw_os_error()? {
        libc::ENOSPC if room.files_left == Some(0) => Some(DeviceError::NoInodes { path }),
        libc::ENOENT | libc::EACCES | libc::EPERM if room.is_none => Some(DeviceError::NoFiles { path }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    const BYTES: u64 = 1 << 20;

    /// Opens what is at a path as soon as it is a whole file, until it has one or is told that
    /// there will be none.
    fn take(path: &Path, over: &AtomicBool) -> Option<Device> {
        loop {
            let last = over.load(Ordering::Acquire);
            match Device::open(path, Access::Exclusive) {
                Ok(device) if device.facts().bytes == BYTES => return Some(device),
                Ok(device) => device.close(),
                Err(_) => {}
            }
            if last {
                return None;
            }
        }
    }

    /// Does something with a path while another thread opens what is there; returns what that has
    /// open.
    fn beside_an_opening<T>(path: &Path, act: impl FnOnce() -> T) -> (T, Option<Device>) {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let opening = scope.spawn(|| take(path, &over));
            let done = act();
            over.store(true, Ordering::Release);
            (done, opening.join().unwrap())
        })
    }

    #[test]
    fn a_creation_that_fails_leaves_the_file_to_whoever_has_opened_it() {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..200 {
            let path = dir.path().join(format!("{round}.img"));
            let (created, opened) = beside_an_opening(&path, || Device::create_sparse(&path, BYTES));
            let both = created.is_ok() && opened.is_some();
            assert!(!both && (created.is_ok() || opened.is_some()), "round {round}: {created:?} {opened:?}");
            assert!(created.ok().or(opened).unwrap().is_at(&path), "round {round}: the file is gone");
        }
    }

    #[test]
    fn an_opening_never_gets_a_file_that_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..200 {
            let path = dir.path().join(format!("{round}.img"));
            let (_, opened) = beside_an_opening(&path, || {
                let Ok(device) = Device::create_sparse(&path, BYTES) else { return };
                let created = CreatedFile::of(&device).unwrap();
                device.close();
                created.remove().unwrap();
            });
            assert!(opened.is_none_or(|device| device.is_at(&path)), "round {round}: it is gone");
        }
    }

    #[test]
    fn a_created_file_stays_locked_and_is_removed_only_from_its_own_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new.img");
        let device = Device::create_sparse(&path, BYTES).unwrap();
        let created = CreatedFile::of(&device).unwrap();
        device.close();
        assert!(matches!(Device::open(&path, Access::Exclusive), Err(DeviceError::Locked { .. })));
        let other = dir.path().join("other.img");
        std::fs::write(&other, "another").unwrap();
        std::fs::rename(&path, dir.path().join("moved.img")).unwrap();
        std::fs::rename(&other, &path).unwrap();
        created.remove().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"another");
        std::fs::rename(dir.path().join("moved.img"), &path).unwrap();
        created.remove().unwrap();
        assert!(!path.exists());
        created.remove().unwrap();
    }

    #[test]
    fn a_created_member_is_sparse_zero_and_never_overwrites() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new.img");
        let device = Device::create_sparse(&path, 1 << 30).unwrap();
        assert_eq!(device.facts().bytes, 1 << 30);
        assert!(std::fs::metadata(&path).unwrap().blocks() < 100);
        assert!(matches!(Device::create_sparse(&path, 4096), Err(DeviceError::Exists { .. })));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 30);
        let impossible = dir.path().join("huge.img");
        let error = Device::create_sparse(&impossible, 1 << 62).unwrap_err();
        assert!(matches!(error, DeviceError::FileTooLarge { .. }), "{error}");
        assert!(!impossible.exists());
        assert!(matches!(
            Device::create_sparse(&dir.path().join("no/such/dir.img"), 4096),
            Err(DeviceError::NotFound { .. })
        ));
    }
}
