//! Operations as plain system calls of the calling thread. Must not know when that is faster than
//! io_uring.
#![allow(unsafe_code)] // pread, pwritev2 and fallocate; each block argues for itself

use calpe_core::block_io::IoOp;
use std::io;
use std::os::fd::RawFd;

/// Most bytes of one transfer; larger operations are continued like short transfers. Keeps lengths
/// in 32 bits.
pub(super) const TRANSFER_MAX: usize = 1 << 30;

/// One attempt of an operation as a plain system call, with the result that io_uring would give. A
/// transfer is of the `len` bytes from `done` on.
pub(super) fn system_call(fd: RawFd, op: &mut IoOp, done: usize, len: usize) -> i32 {
    let position = |offset: u64| libc::off_t::try_from(offset).unwrap_or(libc::off_t::MAX);
    let result = match op {
        IoOp::Read { offset, buf } => {
            let target = &mut buf[done..done + len];
            // SAFETY: writes at most `len` bytes into a slice of that length.
            unsafe { libc::pread(fd, target.as_mut_ptr().cast(), len, position(offset.0 + done as u64)) }
        }
        IoOp::Write { offset, buf, fua } => {
            let source = &buf[done..done + len];
            let vector = libc::iovec { iov_base: source.as_ptr().cast_mut().cast(), iov_len: len };
            let flags = if *fua { libc::RWF_DSYNC } else { 0 };
            // SAFETY: one iovec over a live slice that is only read.
            unsafe { libc::pwritev2(fd, &raw const vector, 1, position(offset.0 + done as u64), flags) }
        }
        // SAFETY: no memory involved.
        IoOp::Flush => unsafe { libc::fdatasync(fd) as isize },
        // SAFETY: no memory involved.
        IoOp::Zero { offset, len, may_unmap } => unsafe {
            libc::fallocate(fd, zero_mode(*may_unmap), position(offset.0), position(*len)) as isize
        },
        IoOp::Extents { .. } => unreachable!("extents are answered at submission"),
    };
    if result < 0 { -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) } else { result as i32 }
}

/// The mode of fallocate(2) that zeroes a range.
pub(super) fn zero_mode(may_unmap: bool) -> i32 {
    let how = if may_unmap { libc::FALLOC_FL_PUNCH_HOLE } else { libc::FALLOC_FL_ZERO_RANGE };
    how | libc::FALLOC_FL_KEEP_SIZE
}
