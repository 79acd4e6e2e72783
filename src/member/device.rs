//! One member device: a regular file, a block device or a remote export, open and locked.
//!
//! Invariants: an exclusively opened device is locked (flock, and O_EXCL on a block device) until
//! it is dropped, so no second daemon or command writes to it; its size and sector do not change
//! while it is open. The path is for messages; the inode identifies the device. Windows of a device share
//! one open file, or the connections to one export; no operation leaves its window. Must not know what is
//! stored on it.
#![allow(unsafe_code)] // ioctl, fcntl and statx; each block argues for itself

use super::access::{Access, is_remote};
use super::filesystem::Filesystem;
use super::flushes::Flushes;
use super::held::{self, Held, Stage};
use super::local_file::{LocalFile, Node};
use super::remote::{self, RemoteDevice, RemoteLimits, Witness};
use super::{DeviceError, holder, own_table, patience};
use calpe_core::block_io::{IoFault, IoOp};
use calpe_core::units::{SECTOR_BYTES, shown};
use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::{AccessFlags, faccessat};
use std::ffi::CString;
use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Largest direct-I/O alignment that is accepted in bytes: what the buffers are aligned to.
const DIRECT_ALIGN_MAX: u32 = 4096;

/// Alignment assumed for direct I/O where the system does not tell.
const DIRECT_ALIGN_UNKNOWN: u32 = 4096;

/// Default time limit of an operation on a local device. A disk that retries bad sectors takes
/// seven to twenty seconds, and one that has to spin up takes ten.
pub(crate) const DEFAULT_MEMBER_TIMEOUT: Duration = Duration::from_secs(30);

/// Time limits of members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeLimits {
    /// For an operation on a local member, which is given up after that.
    pub local: Duration,
    /// For the servers of remote members.
    pub remote: RemoteLimits,
}

impl Default for TimeLimits {
    fn default() -> TimeLimits {
        TimeLimits { local: DEFAULT_MEMBER_TIMEOUT, remote: RemoteLimits::default() }
    }
}

/// What kind of device it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A regular file.
    File,
    /// A block device.
    Block,
    /// An export of an NBD server.
    Remote,
}

/// Facts about an open device; constant while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// File or block device.
    pub kind: DeviceKind,
    /// Size in bytes, rounded down to the sector: what can be read and written. Of a window its own.
    pub bytes: u64,
    /// Size in bytes as the system tells it, not rounded: for messages. Of a window that of the whole.
    pub exact_bytes: u64,
    /// Smallest unit of I/O in bytes: a power of two of 512 to 4096.
    pub sector: u32,
    /// It spins (as far as the system tells; false for files).
    pub rotational: bool,
    /// It lives in memory (tmpfs, ramfs): I/O is a copy and never waits.
    pub memory: bool,
    /// Opened with O_DIRECT: transfers bypass the page cache.
    pub direct: bool,
}

impl DeviceFacts {
    /// Whether transfers go through this host's page cache.
    #[must_use]
    pub fn is_cached(&self) -> bool {
        self.kind != DeviceKind::Remote && !self.direct
    }
}

/// An open member device. Dropping it closes and unlocks it without waiting: closing a file may
/// take as long as its filesystem likes.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
    backing: Backing,
    facts: DeviceFacts,
    /// Where it begins on the whole device, which has `whole_bytes`.
    start: u64,
    whole_bytes: u64,
    since: Instant,
    /// Time limit of an operation, in milliseconds.
    limit_ms: AtomicU64,
    flushes: Flushes,
}

/// The file or connection behind a device.
#[derive(Debug)]
enum Backing {
    Local(LocalFile),
    Remote { device: RemoteDevice, writable: bool },
}

/// Distinguishes local devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity(held::Key);

impl Identity {
    /// Identity of the device that a path leads to now; none where the system does not tell.
    #[must_use]
    pub fn of(path: &Path) -> Option<Identity> {
        std::fs::metadata(path).ok().map(|meta| Identity(Node::of(&meta).key()))
    }

    /// Whether this process had it in service, and operations from then have not ended.
    #[must_use]
    pub fn is_leaving(self) -> bool {
        held::now(self.0) == Some(Stage::Leaving)
    }
}

impl Device {
    /// Opens a member.
    ///
    /// `Exclusive` locks it; direct I/O is used where the filesystem can, with one log line where
    /// it cannot.
    ///
    /// # Errors
    /// Everything that makes it unusable, in words for a person.
    pub fn open(path: &Path, access: Access) -> Result<Device, DeviceError> {
        if is_remote(path) {
            return Device::connect(path, access);
        }
        let meta = std::fs::metadata(path).map_err(|e| DeviceError::from_io(path, "look at it", e))?;
        let kind = member_kind(path, &meta)?;
        let filesystem = (kind == DeviceKind::File).then(|| Filesystem::of(path));
        let wants_direct = filesystem != Some(Filesystem::Memory);
        let (file, direct) = open_file(path, access, kind, wants_direct)?;
        let opened = file.metadata().map_err(|e| DeviceError::from_io(path, "look at it", e))?;
        Node::of(&meta).check_same(path, &opened)?;
        let device = Device::with_file(path, file, access, direct, filesystem)?;
        if access.locks() && kind == DeviceKind::File {
            // The process that had it locked may have removed it before it released the lock.
            let there = std::fs::metadata(path).map_err(|e| DeviceError::from_io(path, "look at it", e))?;
            Node::of(&meta).check_same(path, &there)?;
        }
        Ok(device)
    }

    /// A device over any other file, as if it were a regular file.
    #[cfg(test)]
    pub(super) fn fake(path: &Path, file: File, bytes: u64) -> Device {
        let facts = DeviceFacts {
            kind: DeviceKind::File,
            bytes,
            exact_bytes: bytes,
            sector: SECTOR_BYTES as u32,
            rotational: false,
            memory: false,
            direct: false,
        };
        let node = Node::of(&file.metadata().unwrap());
        let file = LocalFile::new(file, node, None, true, false);
        Device::new(path, Backing::Local(file), facts, Instant::now())
    }

    /// Acts as if its filesystem could keep callers waiting.
    #[cfg(test)]
    pub(super) fn hold_up(&mut self) {
        if let Backing::Local(local) = &mut self.backing {
            local.holds_up = true;
        }
    }

    /// As [`Device::open`], and no longer than `limit`.
    ///
    /// # Errors
    /// As [`Device::open`], and when it takes longer, or an earlier attempt still hangs.
    pub fn open_within(path: &Path, access: Access, limit: Duration) -> Result<Device, DeviceError> {
        let own = path.to_path_buf();
        patience::within(path, "open it", limit, move || Device::open(&own, access))?
    }

    /// Windows of this device, each a device of its own, with offsets that count from its start. They share
    /// the open file, or the connections, and the lock, which lasts until the last of them is dropped;
    /// each may be used by another thread. Watching the path of one judges the whole.
    ///
    /// # Panics
    /// When a range is not inside this device, or not at its sectors.
    #[must_use]
    pub fn windows(&self, ranges: &[Range<u64>]) -> Vec<Device> {
        ranges.iter().map(|range| self.window(range)).collect()
    }

    /// One of its [windows](Device::windows), beside others that there are.
    ///
    /// # Panics
    /// As those.
    #[must_use]
    pub fn window(&self, range: &Range<u64>) -> Device {
        let (bytes, sector) = (self.facts.bytes, u64::from(self.facts.sector));
        assert!(range.start <= range.end && range.end <= bytes, "{range:?} of {bytes} bytes");
        assert!(range.start.is_multiple_of(sector) && range.end.is_multiple_of(sector), "off its sectors");
        let backing = match &self.backing {
            Backing::Local(local) => Backing::Local(local.share()),
            Backing::Remote { device, writable } => {
                Backing::Remote { device: device.share(), writable: *writable }
            }
        };
        Device {
            path: self.path.clone(),
            backing,
            facts: DeviceFacts { bytes: range.end - range.start, ..self.facts },
            start: self.start + range.start,
            whole_bytes: self.whole_bytes,
            since: self.since,
            limit_ms: AtomicU64::new(self.limit_ms.load(Ordering::Relaxed)),
            flushes: self.flushes.share(),
        }
    }

    /// The whole device of a window, with its lock, to take further windows of it. None for a file that only
    /// a ring beside the engine's has open.
    #[must_use]
    pub fn whole(&self) -> Option<Device> {
        if matches!(&self.backing, Backing::Local(local) if !local.can_be_shared()) {
            return None;
        }
        let all = self.window(&(0..self.facts.bytes));
        let facts = DeviceFacts { bytes: self.whole_bytes, ..self.facts };
        Some(Device { facts, start: 0, ..all })
    }

    /// What a flush comes to, in view of those of other windows.
    pub(super) fn judge_flush<T>(&self, result: Result<T, IoFault>) -> Result<T, IoFault> {
        self.flushes.judge(result)
    }

    /// Where it begins on the whole device: what is added to offsets before the system sees them.
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// Moves an operation to where its bytes are on the whole device.
    ///
    /// # Panics
    /// When it leaves its window: it would change what belongs to others.
    pub(super) fn place(&self, mut op: IoOp) -> IoOp {
        let (offset, len) = match &mut op {
            IoOp::Read { offset, buf } => (offset, buf.len() as u64),
            IoOp::Write { offset, buf, .. } => (offset, buf.len() as u64),
            IoOp::Zero { offset, len, .. } | IoOp::Extents { offset, len } => (offset, *len),
            IoOp::Flush => return op,
        };
        if self.facts.bytes < self.whole_bytes {
            let is_inside = offset.0.checked_add(len).is_some_and(|end| end <= self.facts.bytes);
            assert!(is_inside, "{len} bytes at {offset:?} of a window of {} bytes", self.facts.bytes);
        }
        offset.0 += self.start;
        op
    }

    /// Closes it in this thread, however long that takes.
    pub fn close(mut self) {
        if let Backing::Local(local) = &mut self.backing {
            local.closes_slowly = false;
        }
    }

    /// Refuses a path at which there is nothing and no file can be created: one that ends in a
    /// slash or in a directory's own entry, and a link that leads to nothing.
    ///
    /// # Errors
    /// [`DeviceError::NamesDirectory`], [`DeviceError::DanglingLink`].
    pub fn check_new_name(path: &Path) -> Result<(), DeviceError> {
        let bytes = path.as_os_str().as_bytes();
        match () {
            () if bytes.ends_with(b"/") || bytes.ends_with(b"/.") => {
                Err(DeviceError::NamesDirectory { path: path.into() })
            }
            () if path.is_symlink() && !path.exists() => Err(DeviceError::DanglingLink { path: path.into() }),
            () => Ok(()),
        }
    }

    /// Whether the device could be opened for writing. For a device that is open for reading only,
    /// without opening it again.
    ///
    /// # Errors
    /// The error that opening it as [`Access::Exclusive`] would give.
    pub fn check_writable(&self) -> Result<(), DeviceError> {
        let local = match &self.backing {
            Backing::Local(local) => local,
            Backing::Remote { device, .. } => return device.check_writable(&self.path),
        };
        faccessat(AT_FDCWD, &self.path, AccessFlags::W_OK, AtFlags::AT_EACCESS)
            .map_err(|errno| open_error(&self.path, self.facts.kind, errno.into()))?;
        if self.facts.kind == DeviceKind::Block {
            check_block_writable(&self.path, local.file())?;
        }
        Ok(())
    }

    /// The path it was opened by, as given.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is known of it.
    #[must_use]
    pub fn facts(&self) -> DeviceFacts {
        self.facts
    }

    /// Identifies the device whatever path leads to it; none for a remote one.
    #[must_use]
    pub fn identity(&self) -> Option<Identity> {
        match &self.backing {
            Backing::Local(local) => Some(Identity(local.node.key())),
            Backing::Remote { .. } => None,
        }
    }

    /// Since when it is open.
    #[must_use]
    pub fn since(&self) -> Instant {
        self.since
    }

    /// Whether both are the same file or block device, or windows of one.
    #[must_use]
    pub fn same_device(&self, other: &Device) -> bool {
        match (&self.backing, &other.backing) {
            (Backing::Local(local), Backing::Local(other)) => local.node.same_device(other.node),
            (Backing::Remote { device, .. }, Backing::Remote { device: other, .. }) => {
                device.uri() == other.uri()
            }
            _ => false,
        }
    }

    /// Whether `path` leads to this device now.
    #[must_use]
    pub fn is_at(&self, path: &Path) -> bool {
        match &self.backing {
            Backing::Local(local) => {
                std::fs::metadata(path).is_ok_and(|meta| local.node.same_device(Node::of(&meta)))
            }
            Backing::Remote { .. } => remote::same_remote(&self.path, path),
        }
    }

    /// Sets its time limits from now on.
    pub fn set_limits(&self, limits: TimeLimits) {
        self.set_time_limit(limits.local);
        if let Some(device) = self.remote() {
            device.set_limits(limits.remote);
        }
    }

    /// Sets the check that a restored connection leads to the same storage; it reads at offsets of this
    /// window. Without any, a remote device is given up when its connection is lost; those of all windows
    /// have to agree. Does nothing for other devices.
    pub fn set_remote_witness(&self, witness: Arc<Witness>) {
        if let Some(device) = self.remote() {
            device.set_witness(self.start, witness);
        }
    }

    fn set_time_limit(&self, limit: Duration) {
        self.limit_ms.store(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Time limit of an operation on a local device; a device that exceeds it leaves service.
    pub(super) fn time_limit(&self) -> Duration {
        Duration::from_millis(self.limit_ms.load(Ordering::Relaxed))
    }

    /// Why a remote device was given up, if it was.
    pub(super) fn given_up(&self) -> Option<IoFault> {
        self.remote()?.given_up()
    }

    /// Whether a block device is smaller than when it was opened: of size 0 where it was taken
    /// away. Some drivers answer writes to such a device with ENOSPC, as if it were full. The
    /// system answers from memory.
    pub(super) fn was_cut_off(&self) -> bool {
        let Backing::Local(local) = &self.backing else { return false };
        let is_block = self.facts.kind == DeviceKind::Block;
        is_block && block_bytes(local.file()).is_ok_and(|bytes| bytes < self.whole_bytes)
    }

    /// Whether starting an operation on it may block, although the operation asks not to.
    pub(super) fn holds_up(&self) -> bool {
        matches!(&self.backing, Backing::Local(local) if local.holds_up)
    }

    /// The path of a file, to be checked now and then; none for devices whose operations fail once
    /// they are gone.
    pub(super) fn path_to_watch(&self) -> Option<CString> {
        let watched = self.facts.kind == DeviceKind::File;
        CString::new(self.path.as_os_str().as_bytes()).ok().filter(|_| watched)
    }

    /// Whether this file was deleted, moved away, truncated or replaced by another since it was
    /// opened, so that its path does not lead to it any more, or not to all of it. Judged from the
    /// statx of the path, or its errno; other errors mean no. The answer is ENOENT where nothing is
    /// at the path, EEXIST where another file is, EISDIR where something other than a file is, and
    /// ENODATA where the file ends too early.
    pub(super) fn has_vanished(&self, stat: Result<&libc::statx, i32>) -> Option<i32> {
        let Backing::Local(local) = &self.backing else { return None };
        match stat {
            Ok(stat) => {
                let device = libc::makedev(stat.stx_dev_major, stat.stx_dev_minor);
                let is_file = u32::from(stat.stx_mode) & libc::S_IFMT == libc::S_IFREG;
                let node = Node { device, inode: stat.stx_ino, rdev: 0 };
                match is_file {
                    false => Some(libc::EISDIR),
                    true if node != local.node => Some(libc::EEXIST),
                    true => (stat.stx_size < self.whole_bytes).then_some(libc::ENODATA),
                }
            }
            Err(libc::ENOENT | libc::ENOTDIR) => Some(libc::ENOENT),
            Err(_) => None,
        }
    }

    /// Marks it as out of service with operations in flight.
    pub(super) fn leave(&self) {
        if let Some(held) = self.held() {
            held.set(Stage::Leaving);
        }
    }

    /// The mark that a local device is locked by this process.
    pub(super) fn held(&self) -> Option<&Arc<Held>> {
        if let Backing::Local(local) = &self.backing { local.held.as_ref() } else { None }
    }

    /// Gives the file to a ring beside the engine's: from here on only that ring can use it.
    pub(super) fn hand_over(&mut self) {
        if let Backing::Local(local) = &mut self.backing {
            local.hand_over();
        }
    }

    /// The file of a local device, or else the remote device.
    pub(super) fn file(&self) -> Result<&File, &RemoteDevice> {
        match &self.backing {
            Backing::Local(local) => Ok(local.file()),
            Backing::Remote { device, .. } => Err(device),
        }
    }

    pub(super) fn remote(&self) -> Option<&RemoteDevice> {
        if let Backing::Remote { device, .. } = &self.backing { Some(device) } else { None }
    }

    /// Of a local device.
    pub(super) fn raw_fd(&self) -> RawFd {
        self.file().expect("remote devices have no descriptor").as_raw_fd()
    }

    /// Whether it is a remote device that was opened for reading only; files refuse writes
    /// themselves.
    pub(super) fn refuses_writes(&self) -> bool {
        matches!(self.backing, Backing::Remote { writable: false, .. })
    }

    fn connect(path: &Path, access: Access) -> Result<Device, DeviceError> {
        let device = RemoteDevice::open(path, access)?;
        let since = device.since();
        let export = device.export();
        let sector = export.block_min.max(SECTOR_BYTES as u32);
        let facts = DeviceFacts {
            kind: DeviceKind::Remote,
            bytes: export.size - export.size % u64::from(sector),
            exact_bytes: export.size,
            sector,
            rotational: export.rotational,
            memory: false,
            direct: false,
        };
        let backing = Backing::Remote { device, writable: access == Access::Exclusive };
        Ok(Device::new(path, backing, facts, since))
    }

    fn with_file(
        path: &Path,
        file: File,
        access: Access,
        direct: bool,
        filesystem: Option<Filesystem>,
    ) -> Result<Device, DeviceError> {
        let fail = |action: &str, e: io::Error| DeviceError::from_io(path, action, e);
        let meta = file.metadata().map_err(|e| fail("look at it", e))?;
        let kind = member_kind(path, &meta)?;
        let node = Node::of(&meta);
        let held = if access.locks() { Some(lock(&file, path, &node)?) } else { None };
        let memory = filesystem == Some(Filesystem::Memory);
        let holds_up = filesystem == Some(Filesystem::Elsewhere);
        let file = LocalFile::new(file, node, held, !memory, holds_up);
        if access.locks()
            && kind == DeviceKind::File
            && let Some(usage) = holder::file_usage(path)
        {
            return Err(DeviceError::Busy { path: path.into(), usage });
        }
        let (bytes, sector, rotational) = match kind {
            DeviceKind::File => {
                let align = if direct { direct_alignment(file.file()) } else { None };
                let unknown = if direct { DIRECT_ALIGN_UNKNOWN } else { SECTOR_BYTES as u32 };
                (meta.len(), align.unwrap_or(unknown), false)
            }
            DeviceKind::Block | DeviceKind::Remote => {
                let bytes = block_bytes(file.file()).map_err(|e| fail("find out its size", e))?;
                let sector = block_sector(file.file()).map_err(|e| fail("find out its sector", e))?;
                if access == Access::Exclusive {
                    check_block_writable(path, file.file())?;
                }
                (bytes, sector, block_rotational(node.rdev))
            }
        };
        let sector = sector.max(SECTOR_BYTES as u32);
        let (exact_bytes, bytes) = (bytes, bytes - bytes % u64::from(sector));
        let facts = DeviceFacts { kind, bytes, exact_bytes, sector, rotational, memory, direct };
        Ok(Device::new(path, Backing::Local(file), facts, Instant::now()))
    }

    fn new(path: &Path, backing: Backing, facts: DeviceFacts, since: Instant) -> Device {
        let (path, start, whole_bytes, limit_ms) = (path.into(), 0, facts.bytes, AtomicU64::new(0));
        let flushes = Flushes::default();
        let device = Device { path, backing, facts, start, whole_bytes, since, limit_ms, flushes };
        device.set_time_limit(DEFAULT_MEMBER_TIMEOUT);
        device
    }
}

/// How many more files a filesystem can take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileRoom {
    /// Number of files; none where there is no limit.
    pub files_left: Option<u64>,
    /// The filesystem seems to have neither blocks nor files, like /proc.
    pub is_none: bool,
}

impl FileRoom {
    /// For the filesystem that a file at this path would be on. A filesystem that does not tell has
    /// no limit.
    #[must_use]
    pub(crate) fn beside(path: &Path) -> FileRoom {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let Ok(fs) = nix::sys::statvfs::statvfs(parent.unwrap_or(Path::new("."))) else {
            return FileRoom::default();
        };
        FileRoom {
            // Filesystems that make inodes as they need them report 0 for both.
            files_left: (fs.files() > 0).then(|| fs.files_available()),
            is_none: fs.blocks() == 0 && fs.files() == 0,
        }
    }
}

/// How long to wait for a lock without a living holder: a killed daemon releases its members only
/// when the kernel has dismantled its io_uring.
const DYING_HOLDER_WAIT: Duration = Duration::from_secs(5);

/// Locks by flock(2); closing the file unlocks it.
fn lock(file: &File, path: &Path, node: &Node) -> Result<Held, DeviceError> {
    // Half of the time left, so that the reason can still be reported in time.
    let patience = patience::time_left().map_or(DYING_HOLDER_WAIT, |left| DYING_HOLDER_WAIT.min(left / 2));
    let deadline = Instant::now() + patience;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Held::new(node.key())),
            Err(TryLockError::Error(e)) => return Err(DeviceError::from_io(path, "lock it", e)),
            Err(TryLockError::WouldBlock) => {}
        }
        match held::stage(node.key()) {
            Some(Stage::Leaving | Stage::Closing) => {
                return Err(DeviceError::Unfinished { path: path.into() });
            }
            // Closed just now.
            None if file.try_lock().is_ok() => return Ok(Held::new(node.key())),
            None | Some(Stage::Open) => {}
        }
        let holder = holder::flock_holder(node.device, node.inode);
        if holder.is_some() || Instant::now() >= deadline {
            if holder.is_none()
                && let Some(pid) = holder::dead_flock_holder(node.device, node.inode)
            {
                return Err(DeviceError::HeldByTheDead { path: path.into(), pid });
            }
            let holder = holder.unwrap_or_else(|| "another process".to_owned());
            return Err(DeviceError::Locked { path: path.into(), holder });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The kind of device at a path, from its metadata.
///
/// # Errors
/// When it is neither a regular file nor a block device.
pub(crate) fn member_kind(path: &Path, meta: &Metadata) -> Result<DeviceKind, DeviceError> {
    let kind = meta.file_type();
    let found = match () {
        () if kind.is_file() => return Ok(DeviceKind::File),
        () if kind.is_block_device() => return Ok(DeviceKind::Block),
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () if kind.is_char_device() => "a character device",
        () => "neither file nor device",
    };
    Err(DeviceError::WrongType { path: path.into(), found })
}

/// Opens the file, direct if wanted and possible. Returns whether it is direct.
fn open_file(
    path: &Path,
    access: Access,
    kind: DeviceKind,
    want_direct: bool,
) -> Result<(File, bool), DeviceError> {
    let open = |direct: bool| {
        // O_NONBLOCK: never hang on something that has become a pipe since it was checked.
        let mut flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        if direct {
            flags |= libc::O_DIRECT;
        }
        if access.locks() && kind == DeviceKind::Block {
            flags |= libc::O_EXCL;
        }
        let file = OpenOptions::new()
            .read(true)
            .write(access == Access::Exclusive)
            .custom_flags(flags)
            .open(path)
            .map_err(|e| open_error(path, kind, e))?;
        let file = own_table::out_of_the_way(file);
        clear_nonblock(&file).map_err(|e| DeviceError::from_io(path, "set its flags", e))?;
        Ok(file)
    };
    if !want_direct {
        return Ok((open(false)?, false));
    }
    let reason = match open(true) {
        Ok(file) if kind == DeviceKind::Block => return Ok((file, true)),
        Ok(file) => match direct_alignment(&file) {
            None => return Ok((file, true)),
            Some(0) => "the filesystem does not offer it for this file".to_owned(),
            Some(align) if align <= DIRECT_ALIGN_MAX => return Ok((file, true)),
            Some(align) => format!("the filesystem wants an alignment of {align} bytes"),
        },
        Err(DeviceError::Io { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
            "the filesystem refuses it".to_owned()
        }
        Err(other) => return Err(other),
    };
    let file = open(false)?;
    tracing::info!(path = %shown(path), %reason, "no direct I/O: using the page cache");
    Ok((file, false))
}

fn open_error(path: &Path, kind: DeviceKind, e: io::Error) -> DeviceError {
    match e.raw_os_error() {
        Some(libc::EBUSY) => {
            let usage = std::fs::metadata(path).ok().filter(|_| kind == DeviceKind::Block).and_then(|meta| {
                holder::block_usage(meta.rdev()).or_else(|| {
                    holder::flock_holder(meta.dev(), meta.ino()).map(|h| format!("in use by {h}"))
                })
            });
            DeviceError::Busy {
                path: path.into(),
                usage: usage.unwrap_or_else(|| "in use by the kernel or another program".to_owned()),
            }
        }
        Some(libc::ETXTBSY) => DeviceError::Busy {
            path: path.into(),
            usage: "a program that is running, or swap space".to_owned(),
        },
        // The file is immutable. For a block device EPERM means that a container withholds it from
        // this process.
        Some(libc::EPERM) if kind == DeviceKind::File => {
            DeviceError::ReadOnly { path: path.into(), what: "the file" }
        }
        _ => DeviceError::from_io(path, "open it", e),
    }
}

/// Clears O_NONBLOCK: with it, io_uring would fail a request that has to wait.
fn clear_nonblock(file: &File) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
    fcntl(file, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
    Ok(())
}

/// Alignment of offsets for direct I/O on a regular file; `Some(0)` when it is not supported, none
/// when the kernel does not tell (before 6.1).
fn direct_alignment(file: &File) -> Option<u32> {
    let mut buffer = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: an empty path with AT_EMPTY_PATH means the descriptor, which is open; the buffer is a
    // statx.
    let done = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            buffer.as_mut_ptr(),
        )
    };
    // SAFETY: zeroed memory is a valid statx, filled in or not.
    let answer = unsafe { buffer.assume_init() };
    (done == 0 && answer.stx_mask & libc::STATX_DIOALIGN != 0).then(|| {
        if answer.stx_dio_offset_align == 0 {
            0
        } else {
            answer.stx_dio_offset_align.max(answer.stx_dio_mem_align)
        }
    })
}

mod ioctl {
    nix::ioctl_read!(blkgetsize64, 0x12, 114, u64);
    nix::ioctl_read_bad!(blksszget, nix::request_code_none!(0x12, 104), libc::c_int);
    nix::ioctl_read_bad!(blkroget, nix::request_code_none!(0x12, 94), libc::c_int);
}

fn block_bytes(file: &File) -> io::Result<u64> {
    let mut bytes = 0u64;
    // SAFETY: BLKGETSIZE64 writes one u64.
    unsafe { ioctl::blkgetsize64(file.as_raw_fd(), &mut bytes) }?;
    Ok(bytes)
}

fn block_sector(file: &File) -> io::Result<u32> {
    let mut sector = 0;
    // SAFETY: BLKSSZGET writes one int.
    unsafe { ioctl::blksszget(file.as_raw_fd(), &mut sector) }?;
    match u32::try_from(sector) {
        Ok(sector) if sector.is_power_of_two() && sector <= DIRECT_ALIGN_MAX => Ok(sector),
        _ => Err(io::Error::other(format!("a sector of {sector} bytes is not supported"))),
    }
}

fn check_block_writable(path: &Path, file: &File) -> Result<(), DeviceError> {
    let mut flag = 0;
    // SAFETY: BLKROGET writes one int.
    unsafe { ioctl::blkroget(file.as_raw_fd(), &mut flag) }
        .map_err(|errno| DeviceError::from_io(path, "find out if it is writable", errno.into()))?;
    match flag {
        0 => Ok(()),
        _ => Err(DeviceError::ReadOnly { path: path.into(), what: "the device" }),
    }
}

fn block_rotational(rdev: u64) -> bool {
    let base = format!("/sys/dev/block/{}:{}", libc::major(rdev), libc::minor(rdev));
    // A partition has no queue of its own; the directory above it is the disk's.
    [format!("{base}/queue/rotational"), format!("{base}/../queue/rotational")]
        .iter()
        .find_map(|path| std::fs::read_to_string(path).ok())
        .is_some_and(|text| text.trim() == "1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use tempfile::TempDir;

    fn dir_with_member() -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("member.img");
        File::create(&path).unwrap().set_len((1 << 20) + 100).unwrap();
        (dir, path)
    }

    #[test]
    fn a_second_exclusive_opening_is_refused_and_names_the_holder() {
        let (_dir, path) = dir_with_member();
        let first = Device::open(&path, Access::Exclusive).unwrap();
        let error = Device::open(&path, Access::Exclusive).unwrap_err();
        assert!(
            matches!(&error, DeviceError::Locked { holder, .. } if holder.contains("this process")),
            "{error}"
        );
        drop(first);
        Device::open(&path, Access::Exclusive).unwrap();
    }

    #[test]
    fn a_member_held_by_another_process_is_refused_with_its_number() {
        let (_dir, path) = dir_with_member();
        let mut child = std::process::Command::new("flock")
            .arg(&path)
            .args(["sh", "-c", "echo locked; exec sleep 60"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0; 7];
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
        let error = Device::open(&path, Access::Exclusive).unwrap_err();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(
            matches!(&error, DeviceError::Locked { holder, .. } if holder.starts_with("process ")),
            "{error}"
        );
    }

    #[test]
    fn a_member_held_by_a_process_that_was_killed_and_is_not_at_an_end_is_told_as_that() {
        let (_dir, path) = dir_with_member();
        // The lock stays with the open file, which this process has, too; the process that took it is dead,
        // and the kernel does not update the lock's owner.
        let file = File::open(&path).unwrap();
        let mut child =
            std::process::Command::new("flock").arg("0").stdin(file.try_clone().unwrap()).spawn().unwrap();
        let pid = child.id();
        while !holder::is_dead_and_there(pid) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let error = Device::open(&path, Access::Exclusive).unwrap_err();
        assert!(matches!(error, DeviceError::HeldByTheDead { pid: told, .. } if told == pid), "{error}");
        child.wait().unwrap();
        drop(file);
        Device::open(&path, Access::Exclusive).unwrap();
    }

    #[test]
    fn another_name_of_the_same_file_is_the_same_device() {
        let (dir, path) = dir_with_member();
        let link = dir.path().join("link.img");
        symlink(&path, &link).unwrap();
        let hard = dir.path().join("hard.img");
        std::fs::hard_link(&path, &hard).unwrap();
        let first = Device::open(&path, Access::Exclusive).unwrap();
        for name in [&link, &hard] {
            assert!(matches!(Device::open(name, Access::Exclusive), Err(DeviceError::Locked { .. })));
            assert!(first.is_at(name));
            assert!(Device::open(name, Access::ReadOnly).unwrap().same_device(&first));
        }
    }

    #[test]
    fn looking_works_beside_the_holder_and_does_not_take_its_lock_away() {
        let (_dir, path) = dir_with_member();
        let _first = Device::open(&path, Access::Exclusive).unwrap();
        drop(Device::open(&path, Access::ReadOnly).unwrap());
        assert!(matches!(Device::open(&path, Access::Exclusive), Err(DeviceError::Locked { .. })));
    }

    #[test]
    fn a_device_that_is_to_stay_as_it_is_keeps_others_out_and_cannot_be_written() {
        let (_dir, path) = dir_with_member();
        let still = Device::open(&path, Access::Still).unwrap();
        for access in [Access::Exclusive, Access::Still] {
            assert!(matches!(Device::open(&path, access), Err(DeviceError::Locked { .. })));
        }
        assert!(still.write_at(0, &[1; 4096]).is_err());
        drop(still);
        let _served = Device::open(&path, Access::Exclusive).unwrap();
        assert!(matches!(Device::open(&path, Access::Still), Err(DeviceError::Locked { .. })));
    }

    #[test]
    fn the_size_is_rounded_down_to_the_sector() {
        let (_dir, path) = dir_with_member();
        let facts = Device::open(&path, Access::Exclusive).unwrap().facts();
        assert_eq!(facts.kind, DeviceKind::File);
        assert!(facts.sector.is_power_of_two() && (512..=4096).contains(&facts.sector), "{facts:?}");
        assert_eq!(facts.bytes, 1 << 20);
    }

    #[test]
    fn what_is_neither_file_nor_disk_is_refused_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for (path, what) in
            [(dir.path(), "a directory"), (&pipe, "a pipe"), (Path::new("/dev/null"), "a character device")]
        {
            let error = Device::open(path, Access::Exclusive).unwrap_err();
            assert!(matches!(error, DeviceError::WrongType { found, .. } if found == what), "{error}");
        }
    }

    #[test]
    fn missing_paths_and_remote_members_say_what_to_do() {
        let missing = Device::open(Path::new("/nonexistent/x.img"), Access::Exclusive).unwrap_err();
        assert!(missing.to_string().starts_with("/nonexistent/x.img: no such file"), "{missing}");
        let remote = Device::open(Path::new("nbds://host/disk"), Access::Exclusive).unwrap_err();
        let text = remote.to_string();
        assert!(text.starts_with("nbds://host/disk: ") && text.contains("TLS"), "{text}");
    }

    #[test]
    fn a_file_without_write_permission_is_refused() {
        let (_dir, path) = dir_with_member();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).unwrap();
        match Device::open(&path, Access::Exclusive) {
            Err(error) => assert!(matches!(error, DeviceError::Permission { .. }), "{error}"),
            // Root may write anything; that is not refused.
            Ok(_) => assert!(nix::unistd::geteuid().is_root()),
        }
        Device::open(&path, Access::ReadOnly).unwrap();
    }

    #[test]
    fn whether_a_member_could_be_written_is_told_without_opening_it_for_that() {
        let (_dir, path) = dir_with_member();
        let _held = Device::open(&path, Access::Exclusive).unwrap();
        let device = Device::open(&path, Access::ReadOnly).unwrap();
        device.check_writable().unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).unwrap();
        let may_all = nix::unistd::geteuid().is_root();
        match device.check_writable() {
            Err(error) => assert!(matches!(error, DeviceError::Permission { .. }), "{error}"),
            Ok(()) => assert!(may_all),
        }
    }

    #[test]
    fn a_link_that_leads_to_nothing_is_no_name_for_a_new_file() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        symlink(dir.path().join("nowhere"), &link).unwrap();
        assert!(matches!(Device::check_new_name(&link), Err(DeviceError::DanglingLink { .. })));
        assert!(matches!(Device::create_sparse(&link, 4096), Err(DeviceError::DanglingLink { .. })));
        assert!(!dir.path().join("nowhere").exists());
    }
}
