//! Small files that are read whole: configurations, certificates, keys, caches.
//!
//! Invariants: at most the caller's limit is read, only from a file or a pipe, and a pipe without
//! data is waited for within a limit. Must not know what the files are for.

use crate::polling;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a pipe may take to deliver everything: its writer is a program of the same command
/// line.
const PIPE_MAX: Duration = Duration::from_secs(10);

/// Kinds of files that a text may be read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A regular file alone.
    File,
    /// Or a pipe: `/dev/stdin`, `<(...)` of a shell.
    FileOrPipe,
}

/// Why a file was not read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The system says so.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Its kind has no end.
    #[error("it is {found}, not a file")]
    Kind {
        /// What it is ("a directory").
        found: &'static str,
    },
    /// Longer than such a file can be.
    #[error("it is longer than {} KiB, which no such file is", limit >> 10)]
    TooLong {
        /// How many bytes are read at most.
        limit: u64,
    },
    /// A pipe without an end.
    #[error("it is a pipe, and its end did not come within {} s", PIPE_MAX.as_secs())]
    Silent,
}

/// An open file of a kind that ends. Opening it waited for nothing.
#[derive(Debug)]
pub struct Opened {
    file: File,
    metadata: Metadata,
}

/// Opens a file to be read whole.
///
/// # Errors
/// When the system does not let it be opened, or it is of another kind than `source` allows.
pub fn open(path: &Path, source: Source) -> Result<Opened, ReadError> {
    // Checked before it is opened: opening a device may have effects.
    check_kind(&path.metadata()?, source)?;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(path)?;
    // Checked again: the path may lead to something else by now.
    let metadata = file.metadata()?;
    check_kind(&metadata, source)?;
    Ok(Opened { file, metadata })
}

/// Opens and reads a file.
///
/// # Errors
/// See [`open`] and [`Opened::read`].
pub fn read(path: &Path, source: Source, limit: u64) -> Result<Vec<u8>, ReadError> {
    open(path, source)?.read(limit)
}

impl Opened {
    /// What the system knows of it.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Reads all of it, `limit` bytes at most.
    ///
    /// # Errors
    /// When it cannot be read, or is longer.
    pub fn read(self, limit: u64) -> Result<Vec<u8>, ReadError> {
        if self.metadata.len() > limit {
            return Err(ReadError::TooLong { limit });
        }
        let mut bytes = Vec::new();
        if self.metadata.is_file() {
            self.file.take(limit + 1).read_to_end(&mut bytes)?;
        } else {
            read_pipe(&self.file, limit, &mut bytes)?;
        }
        if bytes.len() as u64 > limit { Err(ReadError::TooLong { limit }) } else { Ok(bytes) }
    }
}

fn check_kind(metadata: &Metadata, source: Source) -> Result<(), ReadError> {
    let kind = metadata.file_type();
    let found = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_fifo() && source == Source::FileOrPipe => return Ok(()),
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () if kind.is_char_device() => "a character device",
        () => "a block device",
    };
    Err(ReadError::Kind { found })
}

/// Reads a pipe that does not block up to its end, or one byte more than `limit`.
fn read_pipe(mut pipe: &File, limit: u64, bytes: &mut Vec<u8>) -> Result<(), ReadError> {
    let deadline = Instant::now() + PIPE_MAX;
    let mut chunk = [0; 4096];
    while bytes.len() as u64 <= limit {
        match pipe.read(&mut chunk) {
            // Without a writer a pipe reads as ended, also before its writer has opened it.
            Ok(0) if !bytes.is_empty() => return Ok(()),
            Ok(0) => {}
            Ok(count) => {
                bytes.extend_from_slice(&chunk[..count]);
                continue;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.into()),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ReadError::Silent);
        }
        let mut fds = [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut fds, timeout) {
            // The writer closed the pipe without writing: it is empty.
            Ok(_) if fds[0].revents() == Some(PollFlags::POLLHUP) => return Ok(()),
            Ok(_) => {}
            Err(errno) if polling::survives(errno as i32, "a reader of a pipe") => {}
            Err(errno) => return Err(io::Error::from(errno).into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Write;

    #[test]
    fn files_are_read_up_to_the_limit_and_other_things_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        fs::write(&file, "12345").unwrap();
        assert_eq!(read(&file, Source::File, 5).unwrap(), b"12345");
        assert!(matches!(read(&file, Source::File, 4), Err(ReadError::TooLong { limit: 4 })));
        // A file that does not say how long it is.
        assert!(!read(Path::new("/proc/self/status"), Source::File, 1 << 20).unwrap().is_empty());
        assert!(matches!(
            read(Path::new("/proc/self/status"), Source::File, 9),
            Err(ReadError::TooLong { .. })
        ));
        for (path, what) in [("/dev/zero", "a character device"), ("/", "a directory")] {
            let error = read(Path::new(path), Source::FileOrPipe, 1 << 20).unwrap_err();
            assert!(matches!(error, ReadError::Kind { found } if found == what), "{error}");
        }
        assert!(matches!(read(&dir.path().join("no"), Source::File, 9), Err(ReadError::Io(_))));
    }

    #[test]
    fn pipes_are_read_to_their_end_where_they_are_allowed() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("p");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(matches!(read(&pipe, Source::File, 9), Err(ReadError::Kind { found: "a pipe" })));
        let write = |text: Vec<u8>| {
            let pipe = pipe.clone();
            std::thread::spawn(move || {
                // What is more than the limit is not taken: the pipe breaks.
                let _ = OpenOptions::new().write(true).open(pipe).unwrap().write_all(&text);
            })
        };
        let writer = write(vec![b'x'; 100_000]);
        assert_eq!(read(&pipe, Source::FileOrPipe, 100_000).unwrap().len(), 100_000);
        writer.join().unwrap();
        let writer = write(vec![b'x'; 1 << 20]);
        assert!(matches!(read(&pipe, Source::FileOrPipe, 100_000), Err(ReadError::TooLong { .. })));
        writer.join().unwrap();
    }
}
