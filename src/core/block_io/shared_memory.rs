//! Memory that another process can map too: a memfd and this process's mapping of it.
//!
//! Invariants: the file is sealed at its size, so that no process can take pages from under another's
//! mapping; a mapping lives as long as its handle. Must not know what the bytes mean, nor who maps them.
#![allow(unsafe_code)] // mappings; each block argues for itself

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap};

/// Large pages begin at multiples of this, in the file and in the address space.
const LARGE_PAGE: usize = 2 << 20;

/// From linux/mman.h (6.1): large pages now, whatever the system's setting for shared memory is.
const MADV_COLLAPSE: libc::c_int = 25;

/// How a mapping may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Any write to it ends the process by a signal.
    ReadOnly,
    /// Reads and writes.
    ReadWrite,
}

/// See the module's head.
#[derive(Debug)]
pub struct SharedMemory {
    start: NonNull<u8>,
    bytes: usize,
    access: Access,
    file: OwnedFd,
}

// SAFETY: an address range and a descriptor; access to the bytes is the business of their users.
unsafe impl Send for SharedMemory {}
// SAFETY: as for Send.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// `bytes` of fresh memory, a multiple of 4 KiB, all zero. No page is allocated yet.
    ///
    /// # Errors
    /// When the system has no descriptor or address space for it.
    pub fn create(name: &CStr, bytes: usize) -> io::Result<SharedMemory> {
        let file = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        let file = File::from(file);
        file.set_len(bytes as u64)?;
        // A process that shrinks the file would end every other process that touches the mapping.
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        SharedMemory::map(file.into(), bytes, Access::ReadWrite)
    }

    /// Maps memory that another process has created.
    ///
    /// # Errors
    /// When the file is shorter than `bytes`, or there is no address space for it.
    pub fn map(file: OwnedFd, bytes: usize, access: Access) -> io::Result<SharedMemory> {
        let file = File::from(file);
        if file.metadata()?.len() < bytes as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "shared memory is shorter than said"));
        }
        let start = reserve(bytes)?;
        let mut protection = ProtFlags::PROT_READ;
        protection.set(ProtFlags::PROT_WRITE, access == Access::ReadWrite);
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED;
        let length = NonZeroUsize::new(bytes).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: replaces a reservation of ours, of the same place and length, that nothing uses.
        let mapped = unsafe { mmap(Some(start.addr()), length, protection, flags, &file, 0) };
        if let Err(error) = mapped {
            // SAFETY: the reservation is still ours, and unused.
            let _ = unsafe { munmap(start.cast(), bytes) };
            return Err(error.into());
        }
        // SAFETY: advice about a mapping of ours does not change what it holds.
        let _ = unsafe { madvise(start.cast(), bytes, MmapAdvise::MADV_HUGEPAGE) };
        Ok(SharedMemory { start, bytes, access, file: file.into() })
    }

    /// The first byte, at a multiple of 2 MiB if there are as many.
    #[must_use]
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// How it was mapped.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// The file, to be handed to another process.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Puts what is allocated of it into large pages, as far as the system can: its setting for shared
    /// memory often leaves them out.
    pub fn collapse(&self) {
        // SAFETY: the whole of a mapping of ours; moving its pages does not change what they hold.
        let _ = unsafe { libc::madvise(self.start.as_ptr().cast(), self.bytes, MADV_COLLAPSE) };
    }

    /// From here on any write of this process to this mapping ends the process. A device that was given
    /// the pages before goes on.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn make_read_only(&self) -> io::Result<()> {
        // SAFETY: a mapping of ours; who writes to it in spite of this is to be stopped.
        Ok(unsafe { mprotect(self.start.cast(), self.bytes, ProtFlags::PROT_READ) }?)
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the owner of the handle is the last user of the mapping.
        let unmapped = unsafe { munmap(self.start.cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping");
    }
}

/// Address space at a multiple of a large page, if it is as long as one: the kernel itself sees to that
/// only where it would use large pages at once.
fn reserve(bytes: usize) -> io::Result<NonNull<u8>> {
    let spare = if bytes >= LARGE_PAGE { LARGE_PAGE } else { 0 };
    let length = NonZeroUsize::new(bytes + spare).ok_or(io::ErrorKind::InvalidInput)?;
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
    // SAFETY: a fresh mapping aliases nothing.
    let start = unsafe { mmap_anonymous(None, length, ProtFlags::PROT_NONE, flags) }?;
    if spare == 0 {
        return Ok(start.cast());
    }
    let before = start.as_ptr().addr().next_multiple_of(LARGE_PAGE) - start.as_ptr().addr();
    // SAFETY: `before` is less than the spare length, so all three parts lie in the reservation; the ends
    // are whole pages that nothing uses.
    unsafe {
        let kept = start.byte_add(before);
        if before > 0 {
            let _ = munmap(start, before);
        }
        let _ = munmap(kept.byte_add(bytes), spare - before);
        Ok(kept.cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(memory: &SharedMemory) -> &[u8] {
        // SAFETY: mapped as long, and written by nobody while this is held in these tests.
        unsafe { std::slice::from_raw_parts(memory.start().as_ptr(), memory.bytes()) }
    }

    #[test]
    fn what_one_mapping_writes_another_reads() {
        for bytes in [4096, 3 << 20] {
            let memory = SharedMemory::create(c"test", bytes).expect("memory");
            let other = memory.file().try_clone_to_owned().expect("a descriptor");
            let seen = SharedMemory::map(other, bytes, Access::ReadOnly).expect("mapped again");
            assert!(bytes < LARGE_PAGE || memory.start().as_ptr().addr().is_multiple_of(LARGE_PAGE));
            // SAFETY: inside the mapping, which nothing else uses.
            unsafe { memory.start().as_ptr().add(bytes - 1).write(7) };
            memory.collapse();
            seen.make_read_only().expect("it is");
            assert_eq!(bytes_of(&seen)[bytes - 2..], [0, 7]);
        }
    }

    #[test]
    fn nobody_can_take_pages_away() {
        let memory = SharedMemory::create(c"test", 8192).expect("memory");
        let other = File::from(memory.file().try_clone_to_owned().expect("a descriptor"));
        assert!(other.set_len(4096).is_err() && other.set_len(16384).is_err());
        assert!(SharedMemory::map(other.into(), 8193, Access::ReadOnly).is_err(), "there is no more of it");
        assert_eq!(bytes_of(&memory), [0; 8192]);
    }
}
