//! Blocking I/O on a device for the control plane: superblocks, zeroing, allocation maps. Never
//! used on the data path. Must not know what the bytes mean.

use super::patience::begin_step;
use super::{Device, DeviceError, DeviceKind};
use calpe_core::block_io::Extent;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::{Whence, lseek};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

/// Alignment of bounce buffers in bytes: the most that direct I/O asks of memory.
const ALIGN: usize = 4096;

/// Most extents in the answer to one question; the rest of the range is reported as data. A file
/// with a hole in every other block must not stall the caller.
const EXTENTS_MAX: usize = 4096;

/// Bytes that are discarded with one call, which has the time limit of one step: a disk that has to
/// write zeroes takes a second or two for that, and hours for all of it.
const DISCARDED_AT_ONCE: u64 = 256 << 20;

/// Bytes of a block as stat(2) counts them.
const STAT_BLOCK: u64 = 512;

impl Device {
    /// Fills `target` from `offset`. Any offset and length inside the device.
    ///
    /// # Errors
    /// Beyond the end, or when the device fails.
    pub fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<(), DeviceError> {
        let sector = u64::from(self.facts().sector);
        let end = self.check_range(offset, target.len() as u64)?;
        let aligned = offset.is_multiple_of(sector) && end.is_multiple_of(sector);
        let read = |target: &mut [u8], from: u64| {
            begin_step()?;
            match self.file() {
                Ok(file) => file.read_exact_at(target, self.start() + from),
                Err(remote) => remote.read_at(self.start() + from, target),
            }
        };
        if aligned && target.as_ptr().addr().is_multiple_of(ALIGN) {
            let result = read(target, offset);
            return result.map_err(|e| self.io_error(format!("read {} bytes at {offset}", target.len()), e));
        }
        let first = offset - offset % sector;
        let last = end.next_multiple_of(sector);
        let mut bounce = Bounce::new((last - first) as usize);
        let action = || format!("read {} bytes at {offset}", target.len());
        read(bounce.bytes(), first).map_err(|e| self.io_error(action(), e))?;
        let skip = (offset - first) as usize;
        let len = target.len();
        target.copy_from_slice(&bounce.bytes()[skip..skip + len]);
        Ok(())
    }

    /// Writes `source` at `offset`; both multiples of the sector. Not flushed.
    ///
    /// # Errors
    /// Beyond the end, off the sectors, or when the device fails.
    pub fn write_at(&self, offset: u64, source: &[u8]) -> Result<(), DeviceError> {
        let sector = u64::from(self.facts().sector);
        let len = source.len() as u64;
        self.check_range(offset, len)?;
        if !offset.is_multiple_of(sector) || !len.is_multiple_of(sector) {
            return Err(self.bad_range(offset, len));
        }
        let action = || format!("write {len} bytes at {offset}");
        if self.refuses_writes() {
            return Err(self.io_error(action(), Errno::EBADF.into()));
        }
        begin_step().map_err(|e| self.io_error(action(), e))?;
        let file = match self.file() {
            Ok(file) => file,
            Err(remote) => {
                let written = remote.write_at(self.start() + offset, source);
                return written.map_err(|e| self.io_error(action(), e));
            }
        };
        let mut bounce = Bounce::new(source.len());
        bounce.bytes().copy_from_slice(source);
        file.write_all_at(bounce.bytes(), self.start() + offset).map_err(|e| self.io_error(action(), e))
    }

    /// Waits until everything written is on stable storage.
    ///
    /// # Errors
    /// When the device fails.
    pub fn flush(&self) -> Result<(), DeviceError> {
        let result = begin_step().and_then(|()| match self.file() {
            Ok(file) => file.sync_data(),
            Err(remote) => remote.flush(),
        });
        result.map_err(|e| self.io_error("flush it".into(), e))
    }

    /// Makes the whole device read as zeroes by discarding it, if it can do that. Returns whether
    /// it did; when not, nothing was changed, or a part was discarded.
    ///
    /// # Errors
    /// When the device fails on the way.
    pub fn discard_all(&self) -> Result<bool, DeviceError> {
        self.discard(0, self.facts().bytes)
    }

    /// The same for a range.
    ///
    /// # Errors
    /// When the range is not inside the device, or the device fails on the way.
    pub fn discard(&self, offset: u64, len: u64) -> Result<bool, DeviceError> {
        self.check_range(offset, len)?;
        if len == 0 {
            return Ok(true);
        }
        let file = match self.file() {
            Ok(file) => file,
            Err(_) if self.refuses_writes() => return Ok(false),
            Err(remote) => {
                let result = remote.discard(self.start() + offset, len);
                return result.map_err(|e| self.io_error("discard its content".into(), e));
            }
        };
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let signed = |value| libc::off_t::try_from(value).map_err(|_| self.bad_range(offset, len));
        let action = || "discard its content".to_owned();
        let mut done = 0;
        while done < len {
            let part = (len - done).min(DISCARDED_AT_ONCE);
            begin_step().map_err(|e| self.io_error(action(), e))?;
            match fallocate(file, flags, signed(self.start() + offset + done)?, signed(part)?) {
                Ok(()) => done += part,
                Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL | Errno::EPERM) => return Ok(false),
                Err(other) => return Err(self.io_error(action(), other.into())),
            }
        }
        Ok(true)
    }

    /// Reserves space so that writes to a range of a file find room; the content stays. Does
    /// nothing on a block device, on a remote one, and where the filesystem cannot.
    ///
    /// # Errors
    /// [`DeviceError::NoSpace`] when there is no room, or when the device fails.
    pub fn preallocate(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        self.check_range(offset, len)?;
        let (DeviceKind::File, Ok(file), true) = (self.facts().kind, self.file(), len > 0) else {
            return Ok(());
        };
        let signed = |value| libc::off_t::try_from(value).map_err(|_| self.bad_range(offset, len));
        let action = || format!("set {len} bytes aside at {offset}");
        begin_step().map_err(|e| self.io_error(action(), e))?;
        let at = signed(self.start() + offset)?;
        match fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, at, signed(len)?) {
            Ok(()) | Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => Ok(()),
            Err(Errno::ENOSPC | Errno::EDQUOT) => {
                Err(DeviceError::NoSpace { path: self.path().into(), bytes: len })
            }
            Err(other) => Err(self.io_error(action(), other.into())),
        }
    }

    /// Whether a file has ranges without space of their own, as far as the system tells; false for
    /// other devices.
    #[must_use]
    pub fn is_sparse(&self) -> bool {
        let metadata = self.file().ok().filter(|_| self.facts().kind == DeviceKind::File);
        let metadata = metadata.and_then(|file| file.metadata().ok());
        metadata.is_some_and(|metadata| metadata.blocks().saturating_mul(STAT_BLOCK) < metadata.len())
    }

    /// The holes and the data in a range inside the device. All data where the device cannot tell;
    /// the lengths always add up to `len`.
    #[must_use]
    pub fn extents(&self, offset: u64, len: u64) -> Vec<Extent> {
        self.placed_extents(self.start() + offset, len)
    }

    /// As [`Device::extents`], of a range of the whole device.
    pub(super) fn placed_extents(&self, offset: u64, len: u64) -> Vec<Extent> {
        let file = match self.file() {
            Ok(file) => file,
            Err(remote) => return remote.extents(offset, len),
        };
        let end = offset.saturating_add(len);
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = offset;
        while at < end && extents.len() < EXTENTS_MAX {
            // The next data at or after `at`; ENXIO means that only a hole follows.
            let data = match seek(file, at, Whence::SeekData) {
                Ok(data) => data.clamp(at, end),
                Err(Errno::ENXIO) => end,
                Err(_) => break,
            };
            if data > at {
                extents.push(Extent { len: data - at, hole: true });
                at = data;
                continue;
            }
            let Ok(hole) = seek(file, at, Whence::SeekHole) else { break };
            let hole = hole.min(end);
            if hole <= at {
                break;
            }
            extents.push(Extent { len: hole - at, hole: false });
            at = hole;
        }
        if at < end {
            match extents.last_mut() {
                Some(last) if !last.hole => last.len += end - at,
                _ => extents.push(Extent { len: end - at, hole: false }),
            }
        }
        extents
    }

    /// Checks that a range is inside the device; returns its end.
    fn check_range(&self, offset: u64, len: u64) -> Result<u64, DeviceError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.facts().bytes => Ok(end),
            _ => Err(self.bad_range(offset, len)),
        }
    }

    fn bad_range(&self, offset: u64, len: u64) -> DeviceError {
        DeviceError::BadRange { path: self.path().into(), offset, len, sector: self.facts().sector }
    }

    fn io_error(&self, action: String, source: io::Error) -> DeviceError {
        DeviceError::Io { path: self.path().into(), action, source }
    }
}

fn seek(file: &File, at: u64, whence: Whence) -> Result<u64, Errno> {
    let at = libc::off_t::try_from(at).map_err(|_| Errno::EOVERFLOW)?;
    lseek(file, at, whence).map(|found| u64::try_from(found).unwrap_or(0))
}

/// A zeroed buffer whose bytes start on an aligned address.
struct Bounce {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Bounce {
    fn new(len: usize) -> Bounce {
        let memory = vec![0; len + ALIGN];
        let start = memory.as_ptr().addr().next_multiple_of(ALIGN) - memory.as_ptr().addr();
        Bounce { memory, start, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::member::Access;
    use std::fs::OpenOptions;
    use tempfile::TempDir;

    const MIB: u64 = 1 << 20;

    fn device() -> (TempDir, Device) {
        let dir = tempfile::tempdir().unwrap();
        let device = Device::create_sparse(&dir.path().join("m.img"), 4 * MIB).unwrap();
        (dir, device)
    }

    #[test]
    fn any_range_reads_back_what_was_written() {
        let (_dir, device) = device();
        let data: Vec<u8> = (0..8192u32).map(|i| (i % 251) as u8).collect();
        device.write_at(4096, &data).unwrap();
        device.flush().unwrap();
        let mut part = vec![0; 3000];
        device.read_at(4096 + 777, &mut part).unwrap();
        assert_eq!(part, data[777..3777]);
    }

    #[test]
    fn ranges_outside_the_device_or_off_its_sectors_are_refused() {
        let (_dir, device) = device();
        for (offset, len) in [(4 * MIB - 4096, 8192), (u64::MAX, 4096), (100, 4096), (0, 100)] {
            let error = device.write_at(offset, &vec![0; len]).unwrap_err();
            assert!(matches!(error, DeviceError::BadRange { .. }), "{offset} {len}: {error}");
        }
        assert!(matches!(device.read_at(4 * MIB, &mut [0; 1]), Err(DeviceError::BadRange { .. })));
    }

    #[test]
    fn a_file_cut_off_while_open_fails_rather_than_reads_zeroes() {
        let (_dir, device) = device();
        OpenOptions::new().write(true).open(device.path()).unwrap().set_len(MIB).unwrap();
        assert!(matches!(device.read_at(2 * MIB, &mut [0; 512]), Err(DeviceError::Io { .. })));
    }

    #[test]
    fn extents_tell_holes_from_data_and_add_up() {
        let (_dir, device) = device();
        device.write_at(MIB, &vec![7; MIB as usize]).unwrap();
        let extents = device.extents(0, 4 * MIB);
        let expected = [(MIB, true), (MIB, false), (2 * MIB, true)].map(|(len, hole)| Extent { len, hole });
        assert_eq!(extents, expected);
        assert_eq!(device.extents(MIB + 4096, 4096), [Extent { len: 4096, hole: false }]);
        assert_eq!(device.extents(3 * MIB, MIB), [Extent { len: MIB, hole: true }]);
    }

    #[test]
    fn preallocated_ranges_keep_their_content_and_take_space() {
        use std::os::unix::fs::MetadataExt;
        let (_dir, device) = device();
        device.write_at(MIB, &[7; 4096]).unwrap();
        device.preallocate(MIB, 2 * MIB).unwrap();
        let mut back = vec![1; 8192];
        device.read_at(MIB, &mut back).unwrap();
        assert!(back[..4096].iter().all(|&b| b == 7) && back[4096..].iter().all(|&b| b == 0));
        let meta = std::fs::metadata(device.path()).unwrap();
        assert_eq!(meta.len(), 4 * MIB, "the size stays");
        assert!(meta.blocks() * 512 >= 2 * MIB, "{} blocks", meta.blocks());
        assert!(matches!(device.preallocate(3 * MIB, 2 * MIB), Err(DeviceError::BadRange { .. })));
    }

    #[test]
    fn a_discarded_file_reads_as_zeroes() {
        let (_dir, device) = device();
        device.write_at(0, &vec![7; 65536]).unwrap();
        assert!(device.discard_all().unwrap());
        let mut back = vec![1; 65536];
        device.read_at(0, &mut back).unwrap();
        assert!(back.iter().all(|&b| b == 0));
        assert_eq!(device.facts().bytes, 4 * MIB);
    }

    #[test]
    fn a_device_opened_for_looking_cannot_be_written() {
        let (_dir, device) = device();
        let viewer = Device::open(device.path(), Access::ReadOnly).unwrap();
        assert!(viewer.write_at(0, &[0; 4096]).is_err());
    }
}
