//! A local device as threads other than its engine's read it.
//!
//! Invariants: a reader counts itself before it uses the descriptor and until the kernel has nothing of its
//! read any more; the engine that owns the device closes it only when it was released and nobody reads. So a
//! descriptor that was closed, and given to another file, is never read.
#![allow(unsafe_code)] // pread, and ring entries; each block argues for itself

use super::Ring;
use calpe_core::block_io::BufMut;
use io_uring::{opcode, types};
use slab::Slab;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Counts of one reader, on cache lines of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Readers(AtomicUsize);

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct SharedDevice {
    fd: RawFd,
    /// Where the device begins in the file.
    start: u64,
    is_memory: bool,
    is_released: AtomicBool,
    /// Reads under way, by reader.
    reading: Box<[Readers]>,
}

impl SharedDevice {
    /// For this many readers. The caller closes the descriptor once [`SharedDevice::is_unused`].
    pub(super) fn new(fd: RawFd, start: u64, is_memory: bool, readers: usize) -> SharedDevice {
        let reading = (0..readers).map(|_| Readers::default()).collect();
        SharedDevice { fd, start, is_memory, is_released: AtomicBool::new(false), reading }
    }

    /// Whether it lives in memory: a read is a copy and never waits.
    pub(crate) fn is_memory(&self) -> bool {
        self.is_memory
    }

    /// Begins a read. Returns whether it may be made; then it has to be ended.
    #[must_use]
    pub(crate) fn begin(&self, reader: usize) -> bool {
        self.reading[reader].0.fetch_add(1, Ordering::SeqCst);
        if !self.is_released() {
            return true;
        }
        self.end(reader);
        false
    }

    /// Ends a read.
    pub(crate) fn end(&self, reader: usize) {
        self.reading[reader].0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether the device is out of service: its owner waits for the end of reads.
    pub(crate) fn is_released(&self) -> bool {
        self.is_released.load(Ordering::SeqCst)
    }

    /// Lets no read begin any more.
    pub(super) fn release(&self) {
        self.is_released.store(true, Ordering::SeqCst);
    }

    /// Whether nothing of it is being read.
    pub(super) fn is_unused(&self) -> bool {
        self.reading.iter().all(|readers| readers.0.load(Ordering::SeqCst) == 0)
    }

    /// Reads in this thread, within a read that has begun. Returns whether all bytes came.
    #[must_use]
    pub(crate) fn read_now(&self, buf: &mut [u8], offset: u64) -> bool {
        let Ok(offset) = libc::off_t::try_from(self.start.saturating_add(offset)) else { return false };
        // SAFETY: writes at most as many bytes as the slice has; the descriptor is open while a read is
        // counted.
        let read = unsafe { libc::pread(self.fd, buf.as_mut_ptr().cast(), buf.len(), offset) };
        usize::try_from(read).is_ok_and(|read| read == buf.len())
    }

    /// Whether a reader has this many reads under way.
    pub(crate) fn is_full(&self, reader: usize, most: usize) -> bool {
        self.reading[reader].0.load(Ordering::Relaxed) >= most
    }
}

/// Reads of shared devices that the kernel has: of one reader, through its ring.
///
/// Invariant: a buffer, and the count that keeps its device open, stay here until the completion was taken,
/// and for ever if this is dropped before.
#[derive(Debug)]
pub(crate) struct DeviceReads {
    /// Upper 32 bits of the `user_data` of its entries.
    tag: u64,
    reader: usize,
    flights: Slab<Flight>,
}

#[derive(Debug)]
struct Flight {
    file: Arc<SharedDevice>,
    buf: BufMut,
    /// The caller's name for it; none: nobody waits for it any more.
    name: Option<(usize, usize)>,
}

impl DeviceReads {
    pub(crate) fn new(tag: u32, reader: usize) -> DeviceReads {
        DeviceReads { tag: u64::from(tag) << 32, reader, flights: Slab::new() }
    }

    /// Hands a read that has begun to the kernel; it ends here.
    pub(crate) fn submit(
        &mut self,
        ring: &mut Ring,
        file: Arc<SharedDevice>,
        buf: BufMut,
        offset: u64,
        name: (usize, usize),
    ) {
        let key = self.flights.insert(Flight { file, buf, name: Some(name) });
        let Flight { file, buf, .. } = &mut self.flights[key];
        let len = u32::try_from(buf.len()).expect("a piece of a request is shorter");
        let at = file.start + offset;
        let entry = opcode::Read::new(types::Fd(file.fd), buf.as_mut_ptr(), len).offset(at).build();
        // SAFETY: the buffer stays in `flights` until its completion was taken, and is leaked by `drop`
        // otherwise; the descriptor is open while the read is counted, which ends then, too.
        unsafe { ring.push(entry.user_data(self.tag | key as u64)) }
    }

    /// Takes a completion of the ring that carries the tag. Returns the name of the read, if somebody waits
    /// for it, and its bytes, if all came.
    pub(crate) fn complete(
        &mut self,
        user_data: u64,
        result: i32,
    ) -> Option<((usize, usize), Option<BufMut>)> {
        let Flight { file, buf, name } = self.flights.remove((user_data & u64::from(u32::MAX)) as usize);
        file.end(self.reader);
        let is_whole = usize::try_from(result).is_ok_and(|read| read == buf.len());
        Some((name?, is_whole.then_some(buf)))
    }

    /// Nobody waits any more for the reads with these names.
    pub(crate) fn abandon(&mut self, which: impl Fn(usize) -> bool) {
        for (_, flight) in &mut self.flights {
            flight.name.take_if(|(key, _)| which(*key));
        }
    }
}

impl Drop for DeviceReads {
    fn drop(&mut self) {
        std::mem::forget(std::mem::take(&mut self.flights));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_released_device_lets_nobody_begin_and_waits_for_who_has() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"what is read").unwrap();
        let device = SharedDevice::new(file.as_raw_fd(), 0, true, 2);
        let mut bytes = [0; 4];
        assert!(device.begin(1) && device.read_now(&mut bytes, 5) && &bytes == b"is r");
        device.release();
        assert!(!device.is_unused() && !device.begin(0) && !device.is_unused());
        device.end(1);
        assert!(device.is_unused());
    }

    #[test]
    fn a_read_that_brings_too_little_does_not_count() {
        let file = File::open("/dev/null").unwrap();
        let device = SharedDevice::new(file.as_raw_fd(), 0, true, 1);
        assert!(device.begin(0) && !device.read_now(&mut [0; 4], 0));
        assert!(!device.read_now(&mut [0; 4], u64::MAX));
    }

    #[test]
    fn offsets_count_from_the_start_of_a_window() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"what is read").unwrap();
        let device = SharedDevice::new(file.as_raw_fd(), 5, true, 1);
        let mut bytes = [0; 4];
        assert!(device.begin(0) && device.read_now(&mut bytes, 3) && &bytes == b"read");
        assert!(!device.read_now(&mut bytes, u64::MAX));
    }
}
