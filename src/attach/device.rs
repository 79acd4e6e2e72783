//! What the system knows about /dev/nbdN: whether something is attached, what uses it, how its
//! queue is set.
//!
//! Invariant: only reads, except in [`Host::tune`] and [`Host::announce`]. The directories are
//! arguments, so that tests can make their own. Must not know netlink or servers.

use calpe_core::units::shown;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Number of devices that the kernel can have: a minor number has 20 bits, and partitions take
/// some.
const INDEX_MAX: u32 = (1 << 15) - 1;

/// Bytes of a sector in sysfs, whatever the device's are.
const SECTOR_BYTES: u64 = 512;

/// The largest request that servers have to take, in KiB: 32 MiB.
const REQUEST_KIB_MAX: u64 = 32 << 10;

/// Requests that the block layer may gather for one device beside those that are sent.
const REQUESTS: u64 = 256;

/// A device of the NBD driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct DeviceIndex(pub u32);

impl DeviceIndex {
    /// "nbd0".
    #[must_use]
    pub(crate) fn name(self) -> String {
        format!("nbd{}", self.0)
    }
}

impl fmt::Display for DeviceIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/dev/nbd{}", self.0)
    }
}

/// Why a path is not a device that can be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    /// Not one of the driver's devices.
    #[error("{path}: not an NBD device: name one of /dev/nbd0, /dev/nbd1, ...")]
    NotNbd {
        /// What was given.
        path: String,
    },
    /// A partition.
    #[error("{path}: a partition: name the whole device, {whole}")]
    Partition {
        /// What was given.
        path: String,
        /// The device it is part of.
        whole: DeviceIndex,
    },
    /// More than there can be.
    #[error("{path}: the kernel numbers NBD devices up to {INDEX_MAX}")]
    TooLarge {
        /// What was given.
        path: String,
    },
    /// The kernel has no such device.
    #[error("{device}: not there: load the driver with more devices, 'modprobe nbd nbds_max={}'", device.0 + 1)]
    Missing {
        /// Which.
        device: DeviceIndex,
    },
    /// The kernel could have the driver, but has not loaded it.
    #[error("the kernel has no NBD driver loaded: run 'modprobe nbd' first")]
    NoDriver,
    /// It is in use.
    #[error("{device}: in use, {}: end that first", users.join(", "))]
    InUse {
        /// Which.
        device: DeviceIndex,
        /// Its users.
        users: Vec<String>,
    },
    /// The system does not permit access.
    #[error("{}: {source}", shown(path))]
    Io {
        /// The path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// What is attached to a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attached {
    /// Process that attached it.
    pub pid: String,
    /// The backend that it gave; none where it gave none, or the kernel does not show it.
    pub backend: Option<String>,
    /// Bytes.
    pub size: u64,
    /// It refuses writes.
    pub read_only: bool,
}

/// The directories where the system shows its devices.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    sys: PathBuf,
    proc: PathBuf,
    dev: PathBuf,
}

impl Default for Host {
    fn default() -> Host {
        Host { sys: "/sys".into(), proc: "/proc".into(), dev: "/dev".into() }
    }
}

impl Host {
    /// The device that a path names, directly or by a link.
    ///
    /// # Errors
    /// When it is not one of the driver's devices.
    pub(crate) fn device(&self, given: &Path) -> Result<DeviceIndex, DeviceError> {
        let path = shown(given).to_string();
        let real = given.canonicalize().unwrap_or_else(|_| given.to_owned());
        let name = real.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let in_dev = real.parent().is_some_and(|parent| parent == self.dev || parent.as_os_str().is_empty());
        let digits = name.strip_prefix("nbd").filter(|_| in_dev);
        let Some(digits) = digits else { return Err(DeviceError::NotNbd { path }) };
        let (number, rest) = digits.split_at(digits.bytes().take_while(u8::is_ascii_digit).count());
        if number.is_empty() || (number.len() > 1 && number.starts_with('0')) {
            return Err(DeviceError::NotNbd { path });
        }
        let index = number.parse().ok().filter(|index| *index <= INDEX_MAX);
        let Some(index) = index.map(DeviceIndex) else { return Err(DeviceError::TooLarge { path }) };
        match rest {
            "" => Ok(index),
            part if part.starts_with('p') => Err(DeviceError::Partition { path, whole: index }),
            _ => Err(DeviceError::NotNbd { path }),
        }
    }

    /// Every device of the driver, in order.
    #[must_use]
    pub(crate) fn devices(&self) -> Vec<DeviceIndex> {
        let Ok(entries) = fs::read_dir(self.sys.join("block")) else { return Vec::new() };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let indexes: BTreeSet<_> = names
            .filter_map(|name| name.strip_prefix("nbd").and_then(|n| n.parse().ok()))
            .map(DeviceIndex)
            .collect();
        indexes.into_iter().collect()
    }

    /// Whether the kernel has the device.
    ///
    /// # Errors
    /// When it has not.
    pub(crate) fn exists(&self, device: DeviceIndex) -> Result<(), DeviceError> {
        if self.block(device).exists() {
            return Ok(());
        }
        let none = self.devices().is_empty() && !self.sys.join("module/nbd").exists();
        Err(if none { DeviceError::NoDriver } else { DeviceError::Missing { device } })
    }

    /// What is attached to a device; none when nothing is.
    #[must_use]
    pub(crate) fn attached(&self, device: DeviceIndex) -> Option<Attached> {
        let read = |name: &str| -> Option<String> {
            Some(fs::read_to_string(self.block(device).join(name)).ok()?.trim().to_owned())
        };
        let pid = read("pid")?;
        let sectors: u64 = read("size")?.parse().ok()?;
        Some(Attached {
            pid,
            backend: read("backend"),
            size: sectors.saturating_mul(SECTOR_BYTES),
            read_only: read("ro").is_some_and(|flag| flag != "0"),
        })
    }

    /// What uses a device, in words: mounts, swap, devices on top of it. Users that other
    /// namespaces hide are missing.
    #[must_use]
    pub(crate) fn holders(&self, device: DeviceIndex) -> Vec<String> {
        let mut parts = vec![device.name()];
        let entries = fs::read_dir(self.block(device)).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        parts.extend(names.filter(|name| name.starts_with(&format!("{}p", device.name()))));
        let mut users = Vec::new();
        for part in &parts {
            let sys = if *part == device.name() { self.block(device) } else { self.block(device).join(part) };
            let number = fs::read_to_string(sys.join("dev")).unwrap_or_default().trim().to_owned();
            users.extend(self.mounts(&number).into_iter().map(|at| format!("mounted on {at}")));
            let swaps = fs::read_to_string(self.proc.join("swaps")).unwrap_or_default();
            let path = self.dev.join(part).display().to_string();
            if swaps.lines().any(|line| line.split_whitespace().next() == Some(&path)) {
                users.push(format!("swap on {path}"));
            }
            let holders = fs::read_dir(sys.join("holders")).into_iter().flatten().flatten();
            users.extend(holders.map(|holder| format!("held by {}", holder.file_name().display())));
        }
        users
    }

    /// Where the device with that number, such as "43:0", is mounted.
    fn mounts(&self, number: &str) -> Vec<String> {
        let table = fs::read_to_string(self.proc.join("self/mountinfo")).unwrap_or_default();
        let mut found = Vec::new();
        for line in table.lines() {
            let mut words = line.split(' ').skip(2);
            if words.next() == Some(number)
                && let Some(at) = words.nth(1)
            {
                found.push(at.replace("\\040", " "));
            }
        }
        found
    }

    /// Processes other than this one that have the device, or a partition of it, open.
    #[must_use]
    pub(crate) fn openers(&self, device: DeviceIndex) -> Vec<String> {
        let mut found = Vec::new();
        for process in fs::read_dir(&self.proc).into_iter().flatten().flatten() {
            let name = process.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            if pid == std::process::id() {
                continue;
            }
            let descriptors = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
            let opens = descriptors.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|target| {
                let at =
                    |name: &str| target.strip_prefix(&self.dev).is_ok_and(|rest| rest == Path::new(name));
                let name = target.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                at(&device.name()) || (name.starts_with(&format!("{}p", device.name())) && at(name))
            });
            if opens {
                let command = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
                found.push(format!("process {pid} ({})", command.trim()));
            }
        }
        found
    }

    /// Opens a device so that nothing else can mount it, use it as swap or build on it while it is
    /// open.
    ///
    /// # Errors
    /// When something uses it already: says what.
    pub(crate) fn claim(&self, device: DeviceIndex, write: bool) -> Result<File, DeviceError> {
        let path = self.dev.join(device.name());
        let io = |source| DeviceError::Io { path: path.clone(), source };
        let file = OpenOptions::new().read(true).write(write).custom_flags(libc::O_EXCL).open(&path);
        match file {
            Ok(file) if !file.metadata().map_err(io)?.file_type().is_block_device() => {
                Err(DeviceError::NotNbd { path: shown(&path).to_string() })
            }
            Ok(file) => Ok(file),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                let mut users = self.holders(device);
                if users.is_empty() {
                    users.push(
                        "by something that cannot be seen from here, such as a mount of a container".into(),
                    );
                }
                Err(DeviceError::InUse { device, users })
            }
            Err(source) => Err(io(source)),
        }
    }

    /// Raises the limits of a device's queue to what the protocol and the driver take. Limits that
    /// cannot be set stay.
    pub(crate) fn tune(&self, device: DeviceIndex, request_bytes_max: u32) {
        let queue = self.block(device).join("queue");
        let number =
            |name: &str| -> Option<u64> { fs::read_to_string(queue.join(name)).ok()?.trim().parse().ok() };
        let largest = REQUEST_KIB_MAX.min(u64::from(request_bytes_max) >> 10);
        if let Some(possible) = number("max_hw_sectors_kb") {
            self.set(&queue.join("max_sectors_kb"), &possible.min(largest).to_string());
        }
        // The array sorts and merges by stripes itself; a second queue in front of it only adds
        // delay.
        self.set(&queue.join("scheduler"), "none");
        if number("nr_requests").is_some_and(|now| now < REQUESTS) {
            self.set(&queue.join("nr_requests"), &REQUESTS.to_string());
        }
    }

    fn set(&self, path: &Path, value: &str) {
        if let Err(error) = fs::write(path, value) {
            tracing::debug!(path = %shown(path), value, %error, "not set");
        }
    }

    /// Makes udev look at the device again: its content can be read only now.
    pub(crate) fn announce(&self, device: DeviceIndex) {
        self.set(&self.block(device).join("uevent"), "change");
    }

    /// Other devices that are attached to the same backend, for writing.
    #[must_use]
    pub(crate) fn twins(&self, device: DeviceIndex, backend: &str) -> Vec<DeviceIndex> {
        let mut others = self.devices();
        others.retain(|other| {
            *other != device
                && self
                    .attached(*other)
                    .is_some_and(|found| found.backend.as_deref() == Some(backend) && !found.read_only)
        });
        others
    }

    fn block(&self, device: DeviceIndex) -> PathBuf {
        self.sys.join("block").join(device.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A system with nbd0 to nbd2, of which nbd1 is attached.
    fn host() -> (tempfile::TempDir, Host) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let host = Host { sys: root.join("sys"), proc: root.join("proc"), dev: root.join("dev") };
        for index in 0..3 {
            let queue = host.sys.join(format!("block/nbd{index}/queue"));
            fs::create_dir_all(&queue).unwrap();
            fs::write(host.sys.join(format!("block/nbd{index}/dev")), format!("43:{}\n", index * 32))
                .unwrap();
            fs::write(queue.join("max_hw_sectors_kb"), "32768\n").unwrap();
            fs::write(queue.join("max_sectors_kb"), "127\n").unwrap();
            fs::write(queue.join("nr_requests"), "128\n").unwrap();
        }
        fs::create_dir_all(host.proc.join("self")).unwrap();
        fs::create_dir_all(&host.dev).unwrap();
        attach(&host, 1, "uuid/tank", 2048, "0");
        (dir, host)
    }

    fn attach(host: &Host, index: u32, backend: &str, sectors: u64, ro: &str) {
        let block = host.sys.join(format!("block/nbd{index}"));
        for (name, text) in [
            ("pid", "77\n".to_owned()),
            ("backend", format!("{backend}\n")),
            ("size", format!("{sectors}\n")),
            ("ro", format!("{ro}\n")),
        ] {
            fs::write(block.join(name), text).unwrap();
        }
    }

    #[test]
    fn only_whole_devices_of_the_driver_are_taken() {
        let (_dir, host) = host();
        let device = |name: &str| host.device(&host.dev.join(name));
        assert_eq!(device("nbd0").unwrap(), DeviceIndex(0));
        assert_eq!(device("nbd15").unwrap(), DeviceIndex(15));
        assert_eq!(host.device(Path::new("nbd7")).unwrap(), DeviceIndex(7));
        for name in ["sda", "nbd", "nbdx", "nbd01", "nbd1x", "xnbd1"] {
            assert!(matches!(device(name), Err(DeviceError::NotNbd { .. })), "{name}");
        }
        assert!(matches!(device("nbd1p2"), Err(DeviceError::Partition { whole: DeviceIndex(1), .. })));
        for name in ["nbd32768", "nbd99999999999"] {
            assert!(matches!(device(name), Err(DeviceError::TooLarge { .. })), "{name}");
        }
        assert!(matches!(host.device(Path::new("/tmp/nbd0")), Err(DeviceError::NotNbd { .. })));
        fs::write(host.dev.join("nbd2"), "").unwrap();
        std::os::unix::fs::symlink(host.dev.join("nbd2"), host.dev.join("tank")).unwrap();
        assert_eq!(device("tank").unwrap(), DeviceIndex(2));
    }

    #[test]
    fn a_missing_driver_and_a_missing_device_are_told_apart() {
        let (_dir, host) = host();
        host.exists(DeviceIndex(2)).unwrap();
        let error = host.exists(DeviceIndex(3)).unwrap_err();
        assert!(error.to_string().contains("nbds_max=4"), "{error}");
        let empty = Host { sys: "/nonexistent".into(), ..host };
        assert!(matches!(empty.exists(DeviceIndex(0)), Err(DeviceError::NoDriver)));
    }

    #[test]
    fn what_is_attached_is_read_from_sysfs() {
        let (_dir, host) = host();
        assert_eq!(host.attached(DeviceIndex(0)), None);
        let attached = host.attached(DeviceIndex(1)).unwrap();
        let expected =
            Attached { pid: "77".into(), backend: Some("uuid/tank".into()), size: 1 << 20, read_only: false };
        assert_eq!(attached, expected);
        assert_eq!(host.devices(), [0, 1, 2].map(DeviceIndex));
    }

    #[test]
    fn a_second_device_of_the_same_array_is_found_unless_it_is_read_only() {
        let (_dir, host) = host();
        assert_eq!(host.twins(DeviceIndex(0), "uuid/tank"), [DeviceIndex(1)]);
        assert_eq!(host.twins(DeviceIndex(1), "uuid/tank"), []);
        assert_eq!(host.twins(DeviceIndex(0), "uuid/other"), []);
        attach(&host, 1, "uuid/tank", 2048, "1");
        assert_eq!(host.twins(DeviceIndex(0), "uuid/tank"), []);
    }

    #[test]
    fn mounts_swap_and_devices_on_top_are_named_also_of_partitions() {
        let (_dir, host) = host();
        assert_eq!(host.holders(DeviceIndex(1)), Vec::<String>::new());
        fs::write(
            host.proc.join("self/mountinfo"),
            "22 1 43:32 / /srv/my\\040data rw - ext4 /dev/nbd1 rw\n23 1 8:1 / / rw - ext4 /dev/sda1 rw\n",
        )
        .unwrap();
        let part = host.sys.join("block/nbd1/nbd1p1");
        fs::create_dir_all(part.join("holders/dm-0")).unwrap();
        fs::write(part.join("dev"), "43:33\n").unwrap();
        let swaps = format!("Filename Type Size\n{}/nbd1p1 partition 8\n", host.dev.display());
        fs::write(host.proc.join("swaps"), swaps).unwrap();
        let swap = format!("swap on {}/nbd1p1", host.dev.display());
        assert_eq!(host.holders(DeviceIndex(1)), ["mounted on /srv/my data", &swap, "held by dm-0"]);
        assert_eq!(host.holders(DeviceIndex(0)), Vec::<String>::new());
    }

    #[test]
    fn processes_with_the_device_open_are_named() {
        let (_dir, host) = host();
        let open = |pid: u32, target: &str| {
            let fd = host.proc.join(pid.to_string()).join("fd");
            fs::create_dir_all(&fd).unwrap();
            fs::write(host.proc.join(pid.to_string()).join("comm"), "dd\n").unwrap();
            std::os::unix::fs::symlink(host.dev.join(target), fd.join("3")).unwrap();
        };
        open(10, "nbd1");
        open(11, "nbd10");
        open(12, "nbd1p3");
        let mut found = host.openers(DeviceIndex(1));
        found.sort();
        assert_eq!(found, ["process 10 (dd)", "process 12 (dd)"]);
    }

    #[test]
    fn queue_limits_rise_to_what_both_sides_take() {
        let (_dir, host) = host();
        let read = |name: &str| fs::read_to_string(host.sys.join("block/nbd0/queue").join(name)).unwrap();
        host.tune(DeviceIndex(0), 32 << 20);
        assert_eq!((read("max_sectors_kb"), read("nr_requests")), ("32768".into(), "256".into()));
        host.tune(DeviceIndex(0), 1 << 20);
        assert_eq!(read("max_sectors_kb"), "1024");
    }

    #[test]
    fn a_file_in_place_of_a_device_is_not_claimed() {
        let (_dir, host) = host();
        assert!(matches!(host.claim(DeviceIndex(0), false), Err(DeviceError::Io { .. })));
        fs::write(host.dev.join("nbd0"), "").unwrap();
        assert!(matches!(host.claim(DeviceIndex(0), false), Err(DeviceError::NotNbd { .. })));
    }
}
