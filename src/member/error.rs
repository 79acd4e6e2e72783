//! Why a member device cannot be used: what failed, on which path, and what to do about it. Must
//! not know why the caller wanted the device.

use super::RemoteError;
use super::holder::{advice_about, words_for_dead};
use calpe_core::block_io::IoFaultKind;
use calpe_core::units::{HumanSize, Printable, shown, two_sizes};
use std::io;
use std::path::{Path, PathBuf};

/// Why a device cannot be opened, created or used. Every message names the path and a way out.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// There is no file, and none can be created, since the path names a directory.
    #[error(
        "{}: does not exist, and names a directory: a member is a file, name it without what follows the last name",
        shown(path)
    )]
    NamesDirectory {
        /// The path.
        path: PathBuf,
    },
    /// A symbolic link at this path leads to nothing.
    #[error(
        "{}: a symbolic link that leads to nothing: name the file that it leads to, or remove the link",
        shown(path)
    )]
    DanglingLink {
        /// The link.
        path: PathBuf,
    },
    /// Nothing at this path.
    #[error("{}: no such file or device: check the path", shown(path))]
    NotFound {
        /// The path as given.
        path: PathBuf,
    },
    /// The system refuses access.
    #[error(
        "{}: permission denied for uid {}: let that user enter its directory, and read and write it, or run as one who may",
        shown(path),
        nix::unistd::geteuid()
    )]
    Permission {
        /// The path as given.
        path: PathBuf,
    },
    /// It can only be read.
    #[error("{}: {what} is read-only: a member must be writable", shown(path))]
    ReadOnly {
        /// The path as given.
        path: PathBuf,
        /// What is read-only: the filesystem, the device, the file.
        what: &'static str,
    },
    /// Neither a regular file nor a block device.
    #[error("{}: is {found}: a member must be a regular file or a block device", shown(path))]
    WrongType {
        /// The path as given.
        path: PathBuf,
        /// What it is ("a directory").
        found: &'static str,
    },
    /// Another member's superblock was written over the one that was just written to it.
    #[error(
        "{}: another member was written over it, so two of the paths and URIs lead to one place: name each once",
        shown(path)
    )]
    NamedTwice {
        /// As it was given.
        path: PathBuf,
    },
    /// The bytes that were just written to it are not there.
    #[error("{}: it does not keep what is written to it: {what}", shown(path))]
    NotKept {
        /// As it was given.
        path: PathBuf,
        /// What is there.
        what: String,
    },
    /// A remote member cannot be used.
    #[error("{}: {source}", shown(path))]
    Remote {
        /// The URI as given.
        path: PathBuf,
        /// Why.
        source: RemoteError,
    },
    /// Another process, or another array of this one, has it open as a member.
    #[error(
        "{}: is in use by {} (a member serves one array at a time): {}",
        shown(path),
        Printable(holder),
        advice_about(holder)
    )]
    Locked {
        /// The path as given.
        path: PathBuf,
        /// Who holds the lock, as far as the system tells.
        holder: String,
    },
    /// A killed process still holds it.
    #[error(
        "{}: {}. Let that answer, or abort it (docs/members.md), then try again",
        shown(path),
        words_for_dead(*pid, "which uses it")
    )]
    HeldByTheDead {
        /// The path as given.
        path: PathBuf,
        /// Number of the process.
        pid: u32,
    },
    /// Operations from when this process had it in service have not ended.
    #[error(
        "{}: operations on it from before it left service have not ended: it can be taken back when its filesystem or its disk has answered them",
        shown(path)
    )]
    Unfinished {
        /// The path as given.
        path: PathBuf,
    },
    /// Mounted, attached, part of something else. No `--force` helps.
    #[error("{}: is {}: release it first", shown(path), Printable(usage))]
    Busy {
        /// The path as given.
        path: PathBuf,
        /// How it is used ("mounted on /srv").
        usage: String,
    },
    /// Smaller than what is needed.
    #[error("{}: has {}, but {} are needed: use a larger one", shown(path), two_sizes(*bytes, *needed).0, two_sizes(*bytes, *needed).1)]
    TooShort {
        /// The path as given.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The size it should have at least.
        needed: u64,
    },
    /// Smaller than what its own superblock says.
    #[error("{}: has {}, but its superblock describes {}: it was cut off, or copied in part", shown(path), two_sizes(*bytes, *needed).0, two_sizes(*bytes, *needed).1)]
    CutOff {
        /// The path as given.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The size it should have at least.
        needed: u64,
    },
    /// A new file is to be created where there is a file already.
    #[error("{}: exists already: choose another name, or remove it", shown(path))]
    Exists {
        /// The path as given.
        path: PathBuf,
    },
    /// The size is beyond what the filesystem, or the limit of this process, allows for one file.
    #[error(
        "{}: no file of {} can be there: that is beyond the largest file of the filesystem, or the limit of this user ('ulimit -f'): choose a smaller size, more members, or another directory",
        shown(path),
        HumanSize(*bytes)
    )]
    FileTooLarge {
        /// The path as given.
        path: PathBuf,
        /// The size asked for.
        bytes: u64,
    },
    /// The filesystem is full.
    #[error("{}: the filesystem has no room for {}: free some space, or choose another directory", shown(path), HumanSize(*bytes))]
    NoSpace {
        /// The path as given.
        path: PathBuf,
        /// The size asked for.
        bytes: u64,
    },
    /// The filesystem has as many files as it can have.
    #[error(
        "{}: the filesystem has no room for another file (it is out of inodes, 'df -i' shows them): remove files, or choose another directory",
        shown(path)
    )]
    NoInodes {
        /// The path as given.
        path: PathBuf,
    },
    /// The directory cannot hold files: /proc, /sys.
    #[error("{}: no file can be created in this directory: choose another one", shown(path))]
    NoFiles {
        /// The path as given.
        path: PathBuf,
    },
    /// A request outside the device or off its sectors, which is a mistake of the caller.
    #[error(
        "{}: {len} bytes at {offset} are outside the device or off its {sector}-byte sectors",
        shown(path)
    )]
    BadRange {
        /// The path as given.
        path: PathBuf,
        /// Start of the range.
        offset: u64,
        /// Its length.
        len: u64,
        /// Sector of the device.
        sector: u32,
    },
    /// The system gives no thread to use the device with, which says nothing about the device.
    #[error(
        "{}: no thread to reach it by: {source}: raise the limit of tasks of the daemon (TasksMax), or of the host",
        shown(path)
    )]
    NoThread {
        /// The path as given.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Any other error of the operating system.
    #[error("{}: cannot {action}: {source}", shown(path))]
    Io {
        /// The path as given.
        path: PathBuf,
        /// What was tried ("read 4096 bytes at 0").
        action: String,
        /// What the system said.
        source: io::Error,
    },
}

impl DeviceError {
    /// What an error of the operating system says about the device; none for errors that Calpe
    /// found itself.
    #[must_use]
    pub fn fault_kind(&self) -> Option<IoFaultKind> {
        let DeviceError::Io { source, .. } = self else { return None };
        Some(source.raw_os_error().map_or(IoFaultKind::Medium, |errno| fault_kind(errno, false)))
    }

    /// Whether a server was reached and does not give its export, or the settings of this host do
    /// not allow to ask it.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(self, DeviceError::Remote { source, .. } if source.is_refusal())
    }

    pub(crate) fn from_io(path: &Path, action: impl Into<String>, source: io::Error) -> DeviceError {
        let path = path.to_path_buf();
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => DeviceError::NotFound { path },
            Some(libc::EACCES | libc::EPERM) => DeviceError::Permission { path },
            Some(libc::EROFS) => DeviceError::ReadOnly { path, what: "its filesystem" },
            Some(libc::EISDIR) => DeviceError::WrongType { path, found: "a directory" },
            Some(libc::EEXIST) => DeviceError::Exists { path },
            _ => DeviceError::Io { path, action: action.into(), source },
        }
    }
}

/// What an errno says about the device. `zero`: the operation was to zero a range.
pub(super) fn fault_kind(errno: i32, zero: bool) -> IoFaultKind {
    match errno {
        libc::ENODEV | libc::ENXIO | libc::EBADF | libc::ESTALE | libc::ENOMEDIUM | libc::ESHUTDOWN => {
            IoFaultKind::Gone
        }
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => IoFaultKind::NoSpace,
        libc::ENOMEM
        | libc::EAGAIN
        | libc::EINTR
        | libc::ECANCELED
        | libc::EMFILE
        | libc::ENFILE
        | libc::ENOBUFS
        | libc::ENOLCK
        | libc::EBUSY => IoFaultKind::Shortage,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY => IoFaultKind::Unsupported,
        // A filesystem or device that cannot zero this range in this way.
        libc::EINVAL | libc::EPERM if zero => IoFaultKind::Unsupported,
        _ => IoFaultKind::Medium,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_told_of_a_force_that_the_command_may_not_have() {
        let busy = DeviceError::Busy { path: "/dev/sdx".into(), usage: "mounted on /srv".into() };
        assert_eq!(busy.to_string(), "/dev/sdx: is mounted on /srv: release it first");
    }

    #[test]
    fn trouble_of_the_host_is_told_from_a_full_and_from_a_broken_device() {
        for errno in [libc::ENOMEM, libc::EAGAIN, libc::EINTR, libc::EMFILE, libc::ENFILE, libc::ENOBUFS] {
            assert_eq!(fault_kind(errno, false), IoFaultKind::Shortage, "{errno}");
            assert!(fault_kind(errno, true).passes());
        }
        for errno in [libc::ENOSPC, libc::EDQUOT] {
            assert_eq!(fault_kind(errno, false), IoFaultKind::NoSpace, "{errno}");
            assert!(fault_kind(errno, true).passes());
        }
        assert_eq!(fault_kind(libc::EIO, false), IoFaultKind::Medium);
        assert_eq!(fault_kind(libc::ENODEV, false), IoFaultKind::Gone);
        assert_eq!(fault_kind(libc::EINVAL, false), IoFaultKind::Medium);
        assert_eq!(fault_kind(libc::EINVAL, true), IoFaultKind::Unsupported);
        assert!(!IoFaultKind::Medium.passes() && !IoFaultKind::Gone.passes());
    }
}
