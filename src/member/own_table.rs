//! A descriptor table of a thread's own, for threads that a filesystem may keep waiting for ever.
//!
//! The threads of a process share one table of descriptors, which the kernel empties when the last
//! of them has ended. A thread that waits for FUSE cannot be killed, so a process that was killed
//! would keep all that it had open (sockets, locks of members that have nothing to do with it) until
//! the filesystem answers. With a table of its own, such a thread keeps nothing but what is in that.
//!
//! Descriptors are numbers in a table: one of another table means nothing here, or another file.
//! What such a thread uses it opens itself, or asks for in [`leave`]; what it owns is closed by it,
//! and what others own must not be dropped by it. Threads that it begins share its table. Must not
//! know what descriptors are for.
#![allow(unsafe_code)] // system calls; each block argues for itself

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Standard input, output and error stay: what is opened later must not get the number that a panic
/// is printed to.
const KEPT: libc::c_uint = 3;

/// Gives the calling thread a table of its own, with copies of `wanted`, which must be open in the
/// table that the process's first thread uses, and stay so until this returns. They are
/// the same open files: locks stay until the last copy is closed.
///
/// # Errors
/// When the system refuses. Then the thread shares its table as before, or has one of its own
/// without the copies; either way it can do nothing but end.
pub(super) fn leave(wanted: &[BorrowedFd<'_>]) -> io::Result<Vec<OwnedFd>> {
    // SAFETY: no memory involved. The kernel copies no more than the descriptors below the first
    // and closes nothing in the table that other threads use.
    if unsafe { libc::close_range(KEPT, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE as libc::c_int) } != 0 {
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

/// What a system call has opened, or its error.
fn owned(returned: libc::c_long) -> io::Result<OwnedFd> {
    if returned < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: opened just now, in the table of this thread, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(returned as libc::c_int) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
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
        // The pipe has ended: the copy went with its thread, and that of this table was open until now.
        assert_eq!(text, "there");
    }
}
