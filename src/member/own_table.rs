//! A descriptor table of a thread's own, for threads that a filesystem may keep waiting for ever.
//!
//! The threads of a process share one table of descriptors, which the kernel empties when the last
//! of them has ended. A thread that waits for FUSE cannot be killed, so a killed process would keep
//! everything that it had open (sockets, locks of other members) until the filesystem answers. A
//! thread with a table of its own keeps only what is in that.
//!
//! Descriptors are numbers in a table: a number from another table means nothing here, or another
//! file. Such a thread opens what it uses itself, or asks for it in [`leave`]; it closes what it
//! owns, and must not drop what others own. Threads that it starts share its table.
//!
//! The kernel copies descriptors in groups, whatever is to be closed: a thread that leaves has
//! those of the first group for a moment, and closing a copy flushes its file, as closing the last
//! descriptor would. A file whose filesystem does not answer must not be in the first group
//! ([`raise`]), or it would block all threads that leave, with everything in their group. Must not
//! know what descriptors are for.
#![allow(unsafe_code)] // system calls; each block argues for itself

use nix::fcntl::{FcntlArg, fcntl};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Standard input, output and error stay: a file that is opened later must not get the number that
/// a panic is printed to.
const KEPT: libc::c_uint = 3;

/// The numbers of the first group end here: the bits of a long (`sane_fdtable_size` in the kernel).
const COPIED: RawFd = 64;

/// Gives the calling thread a table of its own, with copies of `wanted`, which must be open in the
/// table that the process's first thread uses, and stay so until this returns. They are
/// the same open files: locks stay until the last copy is closed.
///
/// # Errors
/// When the system refuses. Then the thread shares its table as before, or has one of its own
/// without the copies; either way it must end.
pub(super) fn leave(wanted: &[BorrowedFd<'_>]) -> io::Result<Vec<OwnedFd>> {
    // SAFETY: no memory involved. It closes copies, and nothing in the table that other threads
    // use.
    let left =
        unsafe { libc::syscall(libc::SYS_close_range, KEPT, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE) };
    if left != 0 {
        return Err(io::Error::last_os_error());
    }
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    // SAFETY: no memory involved.
    let process = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) })?;
    let copy = |fd: &BorrowedFd<'_>| {
        // SAFETY: no memory involved. It looks the number up in the table of the first thread.
        owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd.as_raw_fd(), 0) })
    };
    wanted.iter().map(copy).collect()
}

/// Moves an open file that may not answer to a number that no leaving thread copies. Where no
/// number is free, under a limit on descriptors, it stays.
pub(super) fn raise(file: OwnedFd) -> OwnedFd {
    if file.as_raw_fd() >= COPIED {
        return file;
    }
    fcntl(&file, FcntlArg::F_DUPFD_CLOEXEC(COPIED)).map_or(file, |fd| {
        // SAFETY: opened just now, and no other code knows of it.
        unsafe { OwnedFd::from_raw_fd(fd) }
    })
}

/// As `raise`, for a file.
pub(crate) fn out_of_the_way(file: File) -> File {
    File::from(raise(file.into()))
}

/// The descriptor that a system call has opened, or its error.
fn owned(returned: libc::c_long) -> io::Result<OwnedFd> {
    if returned < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: opened just now, in the table of this thread, and no other code knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(returned as libc::c_int) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    #[test]
    fn a_table_of_its_own_holds_the_same_files_and_nothing_else() {
        let (mut reader, writer) = io::pipe().unwrap();
        let held = std::thread::scope(|scope| {
            let left = scope.spawn(|| {
                let mut copies = leave(&[writer.as_fd()]).unwrap();
                let held = std::fs::read_dir("/proc/thread-self/fd").unwrap().count();
                File::from(copies.remove(0)).write_all(b"there").unwrap();
                held
            });
            left.join().unwrap()
        });
        // Three, the copy, and the directory that is read.
        assert!(held <= 5, "{held} descriptors");
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        // The pipe has ended: the copy went with its thread, and that of this table was open until
        // now.
        assert_eq!(text, "there");
    }

    /// A message queue loses its registration for notices of messages when any descriptor of it is flushed.
    #[test]
    fn a_raised_file_is_not_flushed_by_a_thread_that_leaves() {
        let name = CString::new(format!("/calpe-test-{}", std::process::id())).unwrap();
        // SAFETY: the name ends in a zero, and attributes of the system's choice are asked for.
        let queue = unsafe {
            libc::mq_open(
                name.as_ptr(),
                libc::O_RDWR | libc::O_CREAT,
                0o600,
                std::ptr::null_mut::<libc::mq_attr>(),
            )
        };
        // This host has no message queues.
        let Ok(queue) = owned(queue.into()) else { return };
        // SAFETY: as above.
        unsafe { libc::mq_unlink(name.as_ptr()) };
        let queue = raise(queue);
        assert!(queue.as_raw_fd() >= COPIED);
        let is_free = || {
            // SAFETY: zeroes are a valid value of it.
            let mut nobody: libc::sigevent = unsafe { std::mem::zeroed() };
            nobody.sigev_notify = libc::SIGEV_NONE;
            // SAFETY: the queue is open, and the structure is initialised.
            unsafe { libc::mq_notify(queue.as_raw_fd(), &raw const nobody) == 0 }
        };
        assert!(is_free() && !is_free());
        std::thread::spawn(|| leave(&[]).unwrap()).join().unwrap();
        assert!(!is_free(), "it was flushed");
    }
}
