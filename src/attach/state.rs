//! Files of the keepers in the runtime directory: which process keeps which device, and what it is
//! attached to.
//!
//! Invariants: a device has at most one keeper, the process that holds the lock of the device's
//! file; the kernel releases the lock when that process ends. A file is replaced as a whole. Must
//! not know netlink or servers.

use super::device::DeviceIndex;
use calpe_core::units::shown;
use calpe_host::files::{self, ReadError, Source};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Version of the files; a file of another version is not read.
const VERSION: u32 = 1;

/// Default directory of the files.
pub(crate) const STATE_DIR: &str = "/run/calpe-attach";

/// Longest file that is read: a keeper writes a few hundred bytes.
const STATE_BYTES_MAX: u64 = 64 << 10;

/// How often a lock is tried, and the time between two tries: another process that only checks for a keeper
/// holds it for microseconds.
const LOOKS: u32 = 10;
const LOOK: Duration = Duration::from_millis(10);

/// Why the runtime directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StateError {
    /// The device has a keeper already.
    #[error("{device}: a keeper runs for it{}: 'calpe detach {device}' ends it", named(pid))]
    Kept {
        /// Which device.
        device: DeviceIndex,
        /// The keeper's process, if it is known.
        pid: Option<u32>,
    },
    /// The system refuses.
    #[error("{}: {source}{}", shown(path), advice(source))]
    Io {
        /// The file that was read or written.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Advice for an error of the system, where there is some.
fn advice(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied => {
            ": only root may attach and detach devices: run this command as root (sudo)"
        }
        _ => "",
    }
}

fn named(pid: &Option<u32>) -> String {
    pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
}

/// What a keeper records about its device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// The version of the program that wrote it.
    pub version: u32,
    /// Which device.
    pub device: DeviceIndex,
    /// The array's name, or the URI.
    pub target: String,
    /// The backend that the kernel was given.
    pub backend: String,
    /// Bytes.
    pub size: u64,
    /// It refuses writes.
    pub read_only: bool,
    /// Connections that the kernel was given.
    pub connections: u32,
    /// The keeper's process.
    pub keeper: u32,
    /// Connections are missing.
    pub waiting: bool,
}

impl Kept {
    /// With the version of this program.
    #[must_use]
    pub(crate) fn version() -> u32 {
        VERSION
    }
}

/// The runtime directory of the keepers.
#[derive(Clone, Debug)]
pub(crate) struct StateDir {
    path: PathBuf,
}

/// The right to keep a device. Ends with this value, or with the process.
#[derive(Debug)]
pub(crate) struct KeeperLock {
    _file: Flock<File>,
    dir: StateDir,
    device: DeviceIndex,
}

impl StateDir {
    /// The directory at `path`, which need not exist.
    #[must_use]
    pub(crate) fn new(path: &Path) -> StateDir {
        StateDir { path: path.to_owned() }
    }

    /// Log file of the keeper of a device, when it runs in the background.
    #[must_use]
    pub(crate) fn log(&self, device: DeviceIndex) -> PathBuf {
        self.path.join(format!("{}.log", device.name()))
    }

    /// Makes the directory.
    ///
    /// # Errors
    /// When that is not possible.
    pub(crate) fn create(&self) -> Result<(), StateError> {
        fs::create_dir_all(&self.path).map_err(|source| self.io(&self.path, source))
    }

    /// Becomes the keeper of a device.
    ///
    /// # Errors
    /// When there is one.
    pub(crate) fn lock(&self, device: DeviceIndex) -> Result<KeeperLock, StateError> {
        self.create()?;
        let path = self.lock_file(device);
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let mut file = file.map_err(|source| self.io(&path, source))?;
        let mut looks_left = LOOKS;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(mut file) => {
                    // Before anything is attached: the file of an earlier keeper may name a process
                    // number that another process has now.
                    let written = file.set_len(0).and_then(|()| write!(file, "{}", std::process::id()));
                    written.map_err(|source| self.io(&path, source))?;
                    return Ok(KeeperLock { _file: file, dir: self.clone(), device });
                }
                // Another process may hold the lock only to look for a keeper.
                Err((same, Errno::EWOULDBLOCK)) if looks_left > 0 => {
                    looks_left -= 1;
                    file = same;
                    std::thread::sleep(LOOK);
                }
                Err((_, Errno::EWOULDBLOCK)) => {
                    return Err(StateError::Kept { device, pid: self.keeper(device) });
                }
                Err((_, errno)) => return Err(self.io(&path, errno.into())),
            }
        }
    }

    /// Whether a keeper runs for a device.
    #[must_use]
    pub(crate) fn is_kept(&self, device: DeviceIndex) -> bool {
        let Ok(file) = File::open(self.lock_file(device)) else { return false };
        // A shared lock: processes that check do not see each other.
        matches!(Flock::lock(file, FlockArg::LockSharedNonblock), Err((_, Errno::EWOULDBLOCK)))
    }

    /// The process that keeps a device, if there is one and it is known.
    #[must_use]
    pub(crate) fn keeper(&self, device: DeviceIndex) -> Option<u32> {
        // The number in the file may be an earlier keeper's: the process that has that number now must not be
        // ended.
        let written = || {
            let bytes = files::read(&self.lock_file(device), Source::File, STATE_BYTES_MAX).ok()?;
            String::from_utf8(bytes).ok()?.trim().parse().ok()
        };
        let said: Option<u32> = written().filter(|pid| *pid > 1);
        // The lock was held by the same process before and after: if it had ended in between, the
        // number could be another's.
        said.filter(|_| self.is_kept(device) && written() == said && self.is_kept(device))
    }

    fn lock_file(&self, device: DeviceIndex) -> PathBuf {
        self.path.join(format!("{}.lock", device.name()))
    }

    /// What the last keeper of a device recorded; none when there was none, or one of another
    /// version.
    ///
    /// # Errors
    /// When the file is there and cannot be read.
    pub(crate) fn read(&self, device: DeviceIndex) -> Result<Option<Kept>, StateError> {
        let path = self.file(device);
        let bytes = match files::read(&path, Source::File, STATE_BYTES_MAX) {
            Ok(bytes) => bytes,
            Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(ReadError::Io(source)) => return Err(self.io(&path, source)),
            Err(other) => return Err(self.io(&path, io::Error::other(other.to_string()))),
        };
        Ok(serde_json::from_slice::<Kept>(&bytes).ok().filter(|kept| kept.version == VERSION))
    }

    /// Forgets a device.
    pub(crate) fn remove(&self, device: DeviceIndex) {
        // The file stays; the free lock says that its keeper has gone.
        let _ = fs::remove_file(self.file(device));
    }

    fn file(&self, device: DeviceIndex) -> PathBuf {
        self.path.join(format!("{}.json", device.name()))
    }

    fn io(&self, path: &Path, source: io::Error) -> StateError {
        StateError::Io { path: path.to_owned(), source }
    }
}

impl KeeperLock {
    /// Publishes the record of a keeper.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write(&self, kept: &Kept) -> Result<(), StateError> {
        let path = self.dir.file(self.device);
        let new = path.with_extension("new");
        let text = serde_json::to_string_pretty(kept).expect("plain fields") + "\n";
        fs::write(&new, text).map_err(|source| self.dir.io(&new, source))?;
        fs::rename(&new, &path).map_err(|source| self.dir.io(&path, source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DeviceIndex = DeviceIndex(3);

    fn kept() -> Kept {
        Kept {
            version: VERSION,
            device: DEVICE,
            target: "tank".into(),
            backend: "uuid/tank".into(),
            size: 1 << 30,
            read_only: false,
            connections: 4,
            keeper: 77,
            waiting: false,
        }
    }

    #[test]
    fn a_user_who_may_not_attach_is_told_that_root_is_needed() {
        use std::os::unix::fs::PermissionsExt;
        const NOBODY: nix::unistd::Uid = nix::unistd::Uid::from_raw(65534);
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o500)).unwrap();
        let state = StateDir::new(&dir.path().join("attached"));
        let told = std::thread::spawn(move || {
            // For this thread alone. Root acts as another user on files; other threads do not.
            nix::unistd::setfsuid(NOBODY);
            state.create().unwrap_err().to_string()
        });
        let told = told.join().unwrap();
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o700)).unwrap();
        assert!(told.contains("as root"), "{told}");
    }

    #[test]
    fn a_device_has_one_keeper_and_the_next_one_after_it() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::new(&dir.path().join("attached"));
        assert!(!state.is_kept(DEVICE));
        let lock = state.lock(DEVICE).unwrap();
        lock.write(&kept()).unwrap();
        assert!(state.is_kept(DEVICE));
        assert!(!state.is_kept(DeviceIndex(4)));
        let error = state.lock(DEVICE).unwrap_err().to_string();
        let own = format!("process {}", std::process::id());
        assert!(error.contains(&own) && error.contains("detach /dev/nbd3"), "{error}");
        drop(lock);
        assert!(!state.is_kept(DEVICE));
        state.lock(DEVICE).unwrap();
    }

    #[test]
    fn a_process_that_an_earlier_keeper_named_is_not_taken_for_the_keeper() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::new(dir.path());
        let lock = state.lock(DEVICE).unwrap();
        lock.write(&kept()).unwrap();
        drop(lock);
        assert_eq!(state.keeper(DEVICE), None, "nobody keeps it");
        // The next keeper has not recorded yet what it keeps.
        let lock = state.lock(DEVICE).unwrap();
        assert_eq!(state.keeper(DEVICE), Some(std::process::id()));
        fs::write(dir.path().join("nbd3.lock"), "").unwrap();
        assert_eq!(state.keeper(DEVICE), None, "it has not said who it is");
        fs::write(dir.path().join("nbd3.lock"), "0").unwrap();
        assert_eq!(state.keeper(DEVICE), None, "that would be everybody");
        drop(lock);
    }

    #[test]
    fn what_was_written_is_read_and_other_versions_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::new(dir.path());
        assert_eq!(state.read(DEVICE).unwrap(), None);
        let lock = state.lock(DEVICE).unwrap();
        lock.write(&kept()).unwrap();
        assert_eq!(state.read(DEVICE).unwrap(), Some(kept()));
        lock.write(&Kept { version: 2, ..kept() }).unwrap();
        assert_eq!(state.read(DEVICE).unwrap(), None);
        fs::write(dir.path().join("nbd3.json"), "{").unwrap();
        assert_eq!(state.read(DEVICE).unwrap(), None);
        state.remove(DEVICE);
        assert!(!dir.path().join("nbd3.json").exists());
    }
}
