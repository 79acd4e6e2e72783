//! A filesystem for one test that can be frozen: the files of a directory, passed through FUSE by a thread of
//! the test. Mounting it takes root and /dev/fuse; without them, a test that needs it says so and ends.
//!
//! The protocol is that of linux/fuse.h, version 7.31. While frozen, the server takes requests and answers
//! none, so that their callers wait in the kernel and cannot be killed. While deaf, it does not even take
//! them, and their callers can be killed.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Larger than any request: a write of 1 MiB and its header.
const REQUEST_BYTES_MAX: usize = (1 << 20) + 4096;
const WRITE_BYTES_MAX: u32 = 1 << 20;
const ROOT: u64 = 1;

const RUNNING: u8 = 0;
const FROZEN: u8 = 1;
const DEAF: u8 = 2;
const ENDED: u8 = 3;
/// Requests of one kind are taken but not answered; all others are answered.
const FROZEN_IN_PART: u8 = 4;

/// Numbers of requests.
pub(crate) const LOOKUP: u32 = 1;
pub(crate) const GETATTR: u32 = 3;
pub(crate) const READ: u32 = 15;
pub(crate) const WRITE: u32 = 16;
pub(crate) const FSYNC: u32 = 20;

/// No test needs it frozen longer; after a failed test, the waiting processes get free.
const FROZEN_MAX: Duration = Duration::from_secs(180);

/// A mounted filesystem; unmounted when dropped.
pub(crate) struct Fuse {
    mount: PathBuf,
    state: Arc<AtomicU8>,
    /// The kind of request that is frozen, if not all are.
    kind: Arc<AtomicU32>,
    /// Kinds of requests that were taken but not answered, a bit each.
    held: Arc<AtomicU64>,
    server: Option<JoinHandle<()>>,
}

impl Fuse {
    /// Mounts the files of `backing` at `mount`, an empty directory. Returns None if that is not possible
    /// here.
    pub(crate) fn mount(backing: &Path, mount: &Path) -> Option<Fuse> {
        let device = File::options().read(true).write(true).open("/dev/fuse").ok()?;
        // The descriptor travels as standard input.
        let options = "fd=0,rootmode=40000,user_id=0,group_id=0,allow_other";
        let mounted = Command::new("mount")
            .args(["-i", "-t", "fuse", "-o", options, "calpe-test"])
            .arg(mount)
            .stdin(Stdio::from(device.try_clone().expect("a second handle")))
            .output();
        match mounted {
            Ok(output) if output.status.success() => {}
            other => {
                eprintln!("no FUSE here, this is not tested: {other:?}");
                return None;
            }
        }
        let state = Arc::new(AtomicU8::new(RUNNING));
        let (kind, held) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU64::new(0)));
        let mut server = Server {
            device,
            files: Files::new(backing),
            state: Arc::clone(&state),
            held: Vec::new(),
            kind: Arc::clone(&kind),
            kinds_held: Arc::clone(&held),
            answered: Instant::now(),
        };
        let server = std::thread::spawn(move || server.serve());
        Some(Fuse { mount: mount.to_owned(), state, kind, held, server: Some(server) })
    }

    /// Whether a request of this kind was taken and waits for its answer.
    pub(crate) fn holds(&self, kind: u32) -> bool {
        self.held.load(Ordering::SeqCst) & 1 << kind != 0
    }

    /// Stops answering requests of this kind, and only those.
    pub(crate) fn freeze_only(&self, kind: u32) {
        self.kind.store(kind, Ordering::SeqCst);
        self.state.store(FROZEN_IN_PART, Ordering::SeqCst);
    }

    /// Stops answering requests.
    pub(crate) fn freeze(&self) {
        self.state.store(FROZEN, Ordering::SeqCst);
    }

    /// Stops taking requests.
    pub(crate) fn turn_deaf(&self) {
        self.state.store(DEAF, Ordering::SeqCst);
    }

    /// Answers the waiting requests, and all later ones.
    pub(crate) fn thaw(&self) {
        self.state.store(RUNNING, Ordering::SeqCst);
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.state.store(ENDED, Ordering::SeqCst);
        // The connection closes with the thread: callers that still wait get an error.
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
        let _ = Command::new("umount").arg("-l").arg(&self.mount).status();
    }
}

struct Server {
    device: File,
    files: Files,
    state: Arc<AtomicU8>,
    /// Requests that were taken but not answered.
    held: Vec<Vec<u8>>,
    kind: Arc<AtomicU32>,
    kinds_held: Arc<AtomicU64>,
    /// When it was last running.
    answered: Instant,
}

impl Server {
    fn serve(&mut self) {
        let mut buffer = vec![0; REQUEST_BYTES_MAX];
        loop {
            let state = self.state.load(Ordering::SeqCst);
            if matches!(state, RUNNING | ENDED) {
                self.answered = Instant::now();
            } else if self.answered.elapsed() > FROZEN_MAX {
                self.state.store(RUNNING, Ordering::SeqCst);
                continue;
            }
            match state {
                ENDED => return,
                DEAF => {
                    std::thread::sleep(Duration::from_millis(5));
                    continue;
                }
                RUNNING => {
                    for request in std::mem::take(&mut self.held) {
                        self.answer(&request);
                    }
                    self.kinds_held.store(0, Ordering::SeqCst);
                }
                _ => {}
            }
            if !self.is_readable() {
                continue;
            }
            // Unmounted, or interrupted.
            let Ok(len) = self.device.read(&mut buffer) else { continue };
            let kind = u32_at(&buffer, 4);
            match self.state.load(Ordering::SeqCst) {
                RUNNING => self.answer(&buffer[..len]),
                FROZEN_IN_PART if kind != self.kind.load(Ordering::SeqCst) => self.answer(&buffer[..len]),
                _ => {
                    self.held.push(buffer[..len].to_vec());
                    self.kinds_held.fetch_or(1 << kind, Ordering::SeqCst);
                }
            }
        }
    }

    fn is_readable(&self) -> bool {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        use std::os::fd::AsFd;
        let mut fds = [PollFd::new(self.device.as_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, PollTimeout::from(20u8)), Ok(1)) && fds[0].any() == Some(true)
    }

    fn answer(&mut self, request: &[u8]) {
        let opcode = u32_at(request, 4);
        // FORGET, BATCH_FORGET and INTERRUPT have no answer.
        if matches!(opcode, 2 | 36 | 42) {
            return;
        }
        let (error, body) = match self.files.answer(opcode, u64_at(request, 16), &request[40..]) {
            Ok(body) => (0, body),
            Err(errno) => (-errno, Vec::new()),
        };
        let mut reply = Vec::with_capacity(16 + body.len());
        reply.extend_from_slice(&(16 + body.len() as u32).to_ne_bytes());
        reply.extend_from_slice(&error.to_ne_bytes());
        reply.extend_from_slice(&request[8..16]);
        reply.extend_from_slice(&body);
        // The caller may be gone.
        let _ = self.device.write(&reply);
    }
}

struct Files {
    dir: PathBuf,
    names: Vec<String>,
    files: Vec<File>,
}

impl Files {
    fn new(dir: &Path) -> Files {
        let entries = fs::read_dir(dir).expect("a directory");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect();
        names.sort();
        let open =
            |name: &String| File::options().read(true).write(true).open(dir.join(name)).expect("a file");
        let files = names.iter().map(open).collect();
        Files { dir: dir.to_owned(), names, files }
    }

    fn file(&self, node: u64) -> Result<&File, i32> {
        self.files.get((node as usize).wrapping_sub(2)).ok_or(libc::ENOENT)
    }

    fn answer(&mut self, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, i32> {
        let errno = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        match opcode {
            // INIT
            26 => {
                // ASYNC_READ, BIG_WRITES, ASYNC_DIO, MAX_PAGES
                let flags = 1u32 | 1 << 5 | 1 << 15 | 1 << 22;
                let mut out = words(&[7, 31, 1 << 17, flags]);
                // max_background and congestion_threshold: the kernel's defaults
                out.extend_from_slice(&12u16.to_ne_bytes());
                out.extend_from_slice(&9u16.to_ne_bytes());
                out.extend(words(&[WRITE_BYTES_MAX, 1]));
                // max_pages and map_alignment
                out.extend_from_slice(&256u16.to_ne_bytes());
                out.resize(64, 0);
                Ok(out)
            }
            // LOOKUP
            1 => {
                let name = body.split(|byte| *byte == 0).next().unwrap_or_default();
                let at = self.names.iter().position(|other| other.as_bytes() == name).ok_or(libc::ENOENT)?;
                let node = at as u64 + 2;
                let mut out = longs(&[node, 0, 0, 0]);
                out.extend(words(&[0, 0]));
                out.extend(self.attributes(node)?);
                Ok(out)
            }
            // GETATTR
            3 => {
                let mut out = longs(&[0]);
                out.extend(words(&[0, 0]));
                out.extend(self.attributes(node)?);
                Ok(out)
            }
            // SETATTR: a member's user changes no attributes
            4 => Err(libc::EPERM),
            // OPEN, OPENDIR
            14 | 27 => Ok([longs(&[node]), words(&[0, 0])].concat()),
            // READ
            15 => {
                let mut out = vec![0; u32_at(body, 16) as usize];
                let len = self.file(node)?.read_at(&mut out, u64_at(body, 8)).map_err(errno)?;
                out.truncate(len);
                Ok(out)
            }
            // WRITE
            16 => {
                let len = u32_at(body, 16);
                let data = &body[40..40 + len as usize];
                self.file(node)?.write_all_at(data, u64_at(body, 8)).map_err(errno)?;
                Ok(words(&[len, 0]))
            }
            // STATFS
            17 => {
                let mut out = longs(&[1 << 30, 1 << 29, 1 << 29, 1 << 20, 1 << 19]);
                out.extend(words(&[4096, 255, 4096]));
                out.resize(80, 0);
                Ok(out)
            }
            // RELEASE, FLUSH, RELEASEDIR
            18 | 25 | 29 => Ok(Vec::new()),
            // FSYNC
            20 => self.file(node)?.sync_data().map(|()| Vec::new()).map_err(errno),
            // READDIR
            28 => {
                let mut out = Vec::new();
                let from = u64_at(body, 8) as usize;
                for (at, name) in self.names.iter().enumerate().skip(from) {
                    let len = (24 + name.len()).next_multiple_of(8);
                    if out.len() + len > u32_at(body, 16) as usize {
                        break;
                    }
                    let start = out.len();
                    out.extend(longs(&[at as u64 + 2, at as u64 + 1]));
                    out.extend(words(&[name.len() as u32, 8]));
                    out.extend_from_slice(name.as_bytes());
                    out.resize(start + len, 0);
                }
                Ok(out)
            }
            _ => Err(libc::ENOSYS),
        }
    }

    fn attributes(&self, node: u64) -> Result<Vec<u8>, i32> {
        let (meta, mode) = match node {
            ROOT => (fs::metadata(&self.dir).map_err(|_| libc::EIO)?, libc::S_IFDIR | 0o755),
            _ => (self.file(node)?.metadata().map_err(|_| libc::EIO)?, libc::S_IFREG | 0o600),
        };
        let mut out = longs(&[node, meta.len(), meta.blocks(), 0, 0, 0]);
        out.extend(words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]));
        Ok(out)
    }
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn longs(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
