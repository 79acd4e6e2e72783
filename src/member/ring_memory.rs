//! An io_uring whose queues lie in memory of this process, not in that of the ring's file.
//!
//! Why: a mapping of the ring's file keeps the ring, and a killed process keeps its mappings as
//! long as one of its threads waits for a filesystem. The ring would keep everything that it has
//! requests for: listening sockets, so that no other process can listen, and clients' sockets, so
//! that clients would not notice that their server is gone.
//!
//! Invariant: the ring behaves as any other. Must not know what it is for.
#![allow(unsafe_code)] // a system call and the memory that it is given; each block argues for itself

use io_uring::{IoUring, Parameters};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};

/// Of linux/io_uring.h: CQSIZE, COOP_TASKRUN, SINGLE_ISSUER, DEFER_TASKRUN, NO_MMAP.
const FLAGS: u32 = 1 << 3 | 1 << 8 | 1 << 12 | 1 << 13 | 1 << 14;

/// Offset of the submission entries in a ring's file, and so in the file that stands for it:
/// IORING_OFF_SQES.
const ENTRIES_AT: usize = 0x1000_0000;

/// Bytes of a submission entry, of a completion entry, and of an index of the first.
const SUBMISSION_BYTES: usize = 64;
const COMPLETION_BYTES: usize = 16;
const INDEX_BYTES: usize = 4;

/// MFD_NOEXEC_SEAL of linux/memfd.h, without which a host with vm.memfd_noexec=2 gives none. Linux
/// before 6.3 does not know it.
const NO_EXEC: MFdFlags = MFdFlags::from_bits_retain(8);

/// Unit of mappings; the kernel's header of the queues needs less.
const PAGE: usize = 4096;

/// `struct io_sqring_offsets`, and `struct io_cqring_offsets`, which has other names in the same
/// places.
#[repr(C)]
#[derive(Default)]
struct Offsets {
    fields: [u32; 8],
    user_address: u64,
}

/// `struct io_uring_params`.
#[repr(C)]
#[derive(Default)]
struct Setup {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    others: [u32; 7],
    submissions: Offsets,
    completions: Offsets,
}

const _: () = assert!(size_of::<Setup>() == size_of::<Parameters>());

/// Builds a ring.
///
/// # Errors
/// When the kernel cannot do it (IORING_SETUP_NO_MMAP, for queues of many pages), or lacks a
/// resource.
pub(super) fn build(submissions: u32, completions: u32) -> io::Result<IoUring> {
    let (entries, slots) =
        (submissions.next_power_of_two() as usize, completions.next_power_of_two() as usize);
    let queue_bytes = (slots * COMPLETION_BYTES + entries * INDEX_BYTES).next_multiple_of(PAGE) + PAGE;
    let entry_bytes = (entries * SUBMISSION_BYTES).next_multiple_of(PAGE);
    let flags = MFdFlags::MFD_CLOEXEC;
    let memory = memfd_create(c"ring", flags | NO_EXEC).or_else(|_| memfd_create(c"ring", flags))?;
    nix::unistd::ftruncate(&memory, (ENTRIES_AT + entry_bytes) as libc::off_t)?;
    let queues = Mapping::of(&memory, 0, queue_bytes)?;
    let sqes = Mapping::of(&memory, ENTRIES_AT, entry_bytes)?;
    let mut setup = Setup { cq_entries: completions, flags: FLAGS, ..Setup::default() };
    setup.submissions.user_address = sqes.address.addr() as u64;
    setup.completions.user_address = queues.address.addr() as u64;
    // SAFETY: the structure has the layout of the kernel's (asserted above by its size); the memory
    // that it names is mapped, and as large as the kernel makes its queues of these numbers. The
    // kernel holds the pages from here on.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, submissions, &raw mut setup) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: opened just now, and no other code knows of it.
    let ring = unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) };
    // SAFETY: `Parameters` is a transparent wrapper of the structure, filled in by the kernel; any
    // bits are valid.
    let parameters = unsafe { std::mem::transmute::<Setup, Parameters>(setup) };
    let number = memory.into_raw_fd();
    // The queues are mapped from what has this number now: the memory, in which they lie where they
    // would in the ring's file. SAFETY: the number is open and given away here; what is mapped is
    // what the parameters describe.
    let built = unsafe { IoUring::from_fd(number, parameters) }?;
    // From here on the number is the ring's. SAFETY: both are open; the second belongs to what was
    // built, which has not used it for anything but mapping.
    if unsafe { libc::dup3(ring.as_raw_fd(), number, libc::O_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(built)
}

/// A mapping that ends when dropped.
struct Mapping {
    address: *mut libc::c_void,
    len: usize,
}

impl Mapping {
    fn of(memory: &OwnedFd, offset: usize, len: usize) -> io::Result<Mapping> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        let (at, fd) = (offset as libc::off_t, memory.as_raw_fd());
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, fd, at) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Mapping { address, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`, and no reference to it was made.
        unsafe { libc::munmap(self.address, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_uring::opcode;

    #[test]
    fn a_ring_in_memory_of_its_own_completes_what_it_is_given_and_maps_no_ring() {
        for (submissions, completions) in [(8, 32), (96, 192), (1024, 8192)] {
            // An older kernel refuses this and gets a ring built in the other way.
            let Ok(mut ring) = build(submissions, completions) else { return };
            // Every place of every queue is used, and more than once.
            for round in 0..20 {
                for at in 0..u64::from(submissions) {
                    let entry = opcode::Nop::new().build().user_data(round << 32 | at);
                    // SAFETY: it names no memory.
                    unsafe { ring.submission().push(&entry) }.unwrap();
                }
                ring.submit_and_wait(submissions as usize).unwrap();
                let ended: Vec<_> = ring.completion().map(|end| (end.user_data(), end.result())).collect();
                let expected: Vec<_> = (0..u64::from(submissions)).map(|at| (round << 32 | at, 0)).collect();
                assert_eq!(ended, expected, "{submissions}/{completions}");
            }
            let link = std::fs::read_link(format!("/proc/self/fd/{}", ring.as_raw_fd())).unwrap();
            assert!(link.to_string_lossy().contains("io_uring"), "{link:?}");
        }
    }
}
