//! The load of the virtual-machine suite and its oracle: `vm-load write` changes files (or extents of a raw
//! device), makes each change durable and only then says so in a log; `vm-load verify` reads such a log and
//! demands that everything that was said to be durable is there, bit for bit, and that what was under way is
//! old or new in every block, never anything else. Must not know what lies below: a filesystem, a device,
//! Calpe or not.
//!
//! The log has one line for each change of each thread, in the thread's order: `b THREAD FILE VERSION BLOCKS`
//! before the change begins (0 blocks: the file is removed), and `d THREAD FILE VERSION` when it is durable.
//! A change is announced while the one before it is still under way, so that a log whose last line is lost in
//! a crash has still announced all that can have reached a disk.

use calpe_core::testing::Random;
use clap::{Parser, Subcommand};
use nix::fcntl::{FallocateFlags, fallocate};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a block: what a filesystem writes at once.
const BLOCK: usize = 4096;
/// Blocks of the largest file; also the distance of two files on a raw device.
const BLOCKS_MAX: u64 = 16;
/// Mistakes that are told one by one.
const TOLD_MAX: usize = 8;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: What,
}

#[derive(Subcommand)]
enum What {
    /// Changes files until --ops changes are made, --seconds are over or the file --stop exists
    Write(WriteArgs),
    /// Compares files with a log; exit 0 only if nothing is missing
    Verify(VerifyArgs),
}

#[derive(clap::Args)]
struct WriteArgs {
    /// A directory, or a raw device or image
    to: PathBuf,
    #[arg(long)]
    log: PathBuf,
    #[arg(long)]
    seed: u64,
    #[arg(long, default_value_t = 1)]
    threads: u64,
    /// Files of each thread
    #[arg(long, default_value_t = 48)]
    files: u64,
    #[arg(long, default_value_t = u64::MAX)]
    ops: u64,
    #[arg(long, default_value_t = 3600)]
    seconds: u64,
    #[arg(long)]
    stop: Option<PathBuf>,
    /// A dm-log-writes device that gets a mark `THREAD FILE VERSION` for each durable change
    #[arg(long)]
    mark: Option<String>,
}

#[derive(clap::Args)]
struct VerifyArgs {
    /// The directory, device or image
    of: PathBuf,
    #[arg(long)]
    log: PathBuf,
    #[arg(long)]
    seed: u64,
    /// Files of each thread, as given to `write`
    #[arg(long, default_value_t = 48)]
    files: u64,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        What::Write(args) => write(&args),
        What::Verify(args) => verify(&args),
    };
    match done {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("vm-load: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A file: (thread, file).
type Name = (u64, u64);

/// What block `index` of a version of a file holds.
fn fill(block: &mut [u8], seed: u64, (thread, file): Name, version: u64, index: u64) {
    let head = [u64::from_le_bytes(*b"vm-load\0"), seed, thread, file, version, index];
    let mut random = Random::new(head.iter().fold(0, |state, word| Random::new(state ^ word).next_u64()));
    for (at, word) in block.chunks_exact_mut(8).enumerate() {
        let value = head.get(at).copied().unwrap_or_else(|| random.next_u64());
        word.copy_from_slice(&value.to_le_bytes());
    }
}

fn content(seed: u64, name: Name, version: u64, blocks: u64) -> Vec<u8> {
    let mut bytes = vec![0; blocks as usize * BLOCK];
    for (index, block) in bytes.chunks_exact_mut(BLOCK).enumerate() {
        fill(block, seed, name, version, index as u64);
    }
    bytes
}

/// One change: the file holds `blocks` blocks of `version` afterwards; 0 blocks are no file.
#[derive(Clone, Copy)]
struct Change {
    name: Name,
    version: u64,
    blocks: u64,
    before: u64,
    how: How,
}

#[derive(Clone, Copy)]
enum How {
    /// Through the page cache, then fsync.
    Synced,
    /// O_DIRECT and O_DSYNC: what filesystems turn into FUA.
    Direct,
    /// Into another file that is renamed over it.
    Renamed,
}

/// Where changes go.
enum Place {
    Directory(PathBuf),
    Raw(PathBuf, u64),
}

impl Place {
    fn of(path: &Path, files: u64) -> io::Result<Self> {
        let kind = fs::metadata(path)?.file_type();
        let raw = kind.is_block_device() || kind.is_file();
        Ok(if raw { Self::Raw(path.to_owned(), files) } else { Self::Directory(path.to_owned()) })
    }

    fn file(&self, (thread, file): Name) -> PathBuf {
        match self {
            Self::Directory(path) => path.join(format!("t{thread}")).join(format!("f{file}")),
            Self::Raw(path, _) => path.clone(),
        }
    }

    fn offset(&self, (thread, file): Name) -> u64 {
        match self {
            Self::Directory(_) => 0,
            Self::Raw(_, files) => (thread * files + file) * BLOCKS_MAX * BLOCK as u64,
        }
    }

    /// Makes the change durable.
    fn apply(&self, change: &Change, seed: u64) -> io::Result<()> {
        let path = self.file(change.name);
        let parent = path.parent().expect("files have a parent");
        match (self, change.blocks) {
            (Self::Directory(_), 0) => {
                fs::remove_file(&path)?;
                File::open(parent)?.sync_all()
            }
            (Self::Raw(..), 0) => {
                let file = OpenOptions::new().write(true).open(&path)?;
                let (from, bytes) = (self.offset(change.name), change.before * BLOCK as u64);
                let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                fallocate(&file, flags, from as i64, bytes as i64)?;
                file.sync_data()
            }
            (_, blocks) => {
                let bytes = content(seed, change.name, change.version, blocks);
                let renamed = matches!((self, change.how), (Self::Directory(_), How::Renamed));
                let target = if renamed { path.with_extension("new") } else { path.clone() };
                let mut options = OpenOptions::new();
                options.write(true).create(matches!(self, Self::Directory(_)));
                if matches!(change.how, How::Direct) {
                    options.custom_flags(libc::O_DIRECT | libc::O_DSYNC);
                }
                let file = options.open(&target)?;
                write_aligned(&file, &bytes, self.offset(change.name))?;
                file.sync_data()?;
                if renamed {
                    fs::rename(&target, &path)?;
                }
                if matches!(self, Self::Directory(_)) && (renamed || change.before == 0) {
                    File::open(parent)?.sync_all()?;
                }
                Ok(())
            }
        }
    }
}

/// Writes from memory that O_DIRECT accepts.
fn write_aligned(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut memory = vec![0; bytes.len() + BLOCK];
    let start = memory.as_ptr().align_offset(BLOCK);
    memory[start..start + bytes.len()].copy_from_slice(bytes);
    file.write_all_at(&memory[start..start + bytes.len()], offset)
}

/// The changes of one thread, chosen by the seed alone.
struct Plan {
    thread: u64,
    random: Random,
    /// Of each file: version and blocks.
    state: Vec<(u64, u64)>,
}

impl Plan {
    fn next(&mut self) -> Change {
        let file = self.random.below(self.state.len() as u64);
        let (version, before) = &mut self.state[file as usize];
        let kind = self.random.below(10);
        let blocks = 1 + self.random.below(BLOCKS_MAX);
        let (how, blocks) = match (*before, kind) {
            (0, _) => (How::Synced, blocks),
            (_, 0 | 1) => (How::Synced, 0),
            (_, 2..=4) => (How::Direct, *before),
            (_, 5 | 6) => (How::Renamed, blocks.max(*before)),
            _ => (How::Synced, *before),
        };
        *version += 1;
        let change = Change { name: (self.thread, file), version: *version, blocks, before: *before, how };
        *before = blocks;
        change
    }
}

fn write(args: &WriteArgs) -> Result<String, String> {
    let text = |error: io::Error, path: &Path| format!("{}: {error}", path.display());
    let place = Place::of(&args.to, args.files).map_err(|e| text(e, &args.to))?;
    let log = OpenOptions::new().append(true).create(true).open(&args.log).map_err(|e| text(e, &args.log))?;
    let (began, made) = (Instant::now(), AtomicU64::new(0));
    // One system call for each line, so that lines of threads do not mix.
    let say = |line: String| (&log).write_all(line.as_bytes());
    let run = |thread: u64| -> io::Result<()> {
        let mut plan = Plan {
            thread,
            random: Random::new(args.seed ^ (thread << 32)),
            state: vec![(0, 0); args.files as usize],
        };
        if matches!(place, Place::Directory(_)) {
            fs::create_dir_all(args.to.join(format!("t{thread}")))?;
            File::open(&args.to)?.sync_all()?;
        }
        let announce = |change: &Change| {
            let (thread, file) = change.name;
            say(format!("b {thread} {file} {} {}\n", change.version, change.blocks))
        };
        let mut change = plan.next();
        announce(&change)?;
        let mut count = 0;
        loop {
            let next = plan.next();
            count += 1;
            let last = count == args.ops
                || began.elapsed() >= Duration::from_secs(args.seconds)
                || args.stop.as_ref().is_some_and(|stop| stop.exists());
            if !last {
                announce(&next)?;
            }
            place.apply(&change, args.seed)?;
            if let Some(device) = &args.mark {
                mark(device, &change)?;
            }
            let (thread, file) = change.name;
            say(format!("d {thread} {file} {}\n", change.version))?;
            made.fetch_add(1, Ordering::Relaxed);
            if last {
                return Ok(());
            }
            change = next;
        }
    };
    let failed = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..args.threads).map(|thread| scope.spawn(move || run(thread))).collect();
        threads.into_iter().filter_map(|thread| thread.join().expect("no thread panics").err()).next()
    });
    let made = made.into_inner();
    match failed {
        Some(error) => Err(format!("after {made} changes: {error}")),
        None => Ok(format!("{made} changes in {:.1} s", began.elapsed().as_secs_f64())),
    }
}

fn mark(device: &str, change: &Change) -> io::Result<()> {
    let (thread, file) = change.name;
    let name = format!("{thread}-{file}-{}", change.version);
    let done = Command::new("dmsetup").args(["message", device, "0", "mark", &name]).status()?;
    if done.success() { Ok(()) } else { Err(io::Error::other("dmsetup cannot mark the log")) }
}

/// What the log says about a file: every version announced and its blocks, and the newest durable one.
#[derive(Default)]
struct History {
    begun: BTreeMap<u64, u64>,
    durable: u64,
}

fn histories(log: &str) -> Result<BTreeMap<Name, History>, String> {
    let mut files: BTreeMap<Name, History> = BTreeMap::new();
    // A last line without its end was cut off by the crash.
    let whole = &log[..log.rfind('\n').map_or(0, |end| end + 1)];
    for line in whole.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let numbers: Vec<u64> =
            words[1..].iter().map(|word| word.parse()).collect::<Result<_, _>>().unwrap_or_default();
        match (words[0], &numbers[..]) {
            ("b", &[thread, file, version, blocks]) => {
                files.entry((thread, file)).or_default().begun.insert(version, blocks);
            }
            ("d", &[thread, file, version]) => {
                let history = files.entry((thread, file)).or_default();
                if !history.begun.contains_key(&version) || version <= history.durable {
                    return Err(format!("the log contradicts itself: {line}"));
                }
                history.durable = version;
            }
            _ => return Err(format!("not a line of a log: {line}")),
        }
    }
    Ok(files)
}

/// (version, blocks) that a file may have: the durable one and all that began later.
fn possible(history: &History) -> Vec<(u64, u64)> {
    let durable = (history.durable, history.begun.get(&history.durable).copied().unwrap_or(0));
    let later = history.begun.range(history.durable + 1..).map(|(version, blocks)| (*version, *blocks));
    std::iter::once(durable).chain(later).collect()
}

fn verify(args: &VerifyArgs) -> Result<String, String> {
    let log = fs::read_to_string(&args.log).map_err(|e| format!("{}: {e}", args.log.display()))?;
    let place = Place::of(&args.of, args.files).map_err(|e| format!("{}: {e}", args.of.display()))?;
    let files = histories(&log)?;
    let (mut durable, mut under_way, mut blocks) = (0, 0, 0);
    let mut wrong = Vec::new();
    for (name, history) in &files {
        let possible = possible(history);
        durable += u64::from(history.durable > 0);
        under_way += u64::from(possible.len() > 1);
        match compare(&place, args.seed, *name, &possible) {
            Ok(count) => blocks += count,
            Err(what) => {
                wrong.push(format!("file {name:?}, versions and blocks possible {possible:?}: {what}"))
            }
        }
    }
    if let Place::Directory(root) = &place {
        wrong.extend(strangers(root, &files).map_err(|error| format!("{}: {error}", root.display()))?);
    }
    if wrong.is_empty() {
        return Ok(format!("{durable} durable files, {under_way} under way, {blocks} blocks"));
    }
    let mut told = format!("{} of {} files are wrong", wrong.len(), files.len());
    for line in wrong.iter().take(TOLD_MAX) {
        let _ = write!(told, "\n  {line}");
    }
    Err(told)
}

/// Compares one file with what it may be; the blocks read.
fn compare(place: &Place, seed: u64, name: Name, possible: &[(u64, u64)]) -> Result<u64, String> {
    let path = place.file(name);
    let file = match File::open(&path) {
        Err(error)
            if error.kind() == ErrorKind::NotFound && possible.iter().any(|(_, blocks)| *blocks == 0) =>
        {
            return Ok(0);
        }
        other => other.map_err(|error| error.to_string())?,
    };
    let most = possible.iter().map(|(_, blocks)| *blocks).max().unwrap_or(0);
    let length = match place {
        Place::Raw(..) => most,
        Place::Directory(_) => {
            let bytes = file.metadata().map_err(|error| error.to_string())?.len();
            let settled = possible.len() == 1;
            let least =
                if settled { most } else { possible.iter().map(|(_, blocks)| *blocks).min().unwrap_or(0) };
            if most == 0
                || bytes < least * BLOCK as u64
                || bytes > most * BLOCK as u64
                || bytes % BLOCK as u64 != 0
            {
                return Err(format!("it has {bytes} bytes"));
            }
            bytes / BLOCK as u64
        }
    };
    let (mut found, mut wanted) = (vec![0; BLOCK], vec![0; BLOCK]);
    for index in 0..length {
        let at = place.offset(name) + index * BLOCK as u64;
        file.read_exact_at(&mut found, at).map_err(|error| format!("block {index}: {error}"))?;
        let good = possible.iter().any(|(version, blocks)| {
            if index >= *blocks {
                // Not there yet, or no longer. Nothing may ever show but zeroes.
                return found.iter().all(|byte| *byte == 0);
            }
            fill(&mut wanted, seed, name, *version, index);
            found == wanted
        });
        if !good {
            let head: Vec<u64> = found
                .chunks_exact(8)
                .take(6)
                .map(|w| u64::from_le_bytes(w.try_into().expect("8 bytes")))
                .collect();
            let sectors = sectors_of(&found, possible, |version| {
                fill(&mut wanted, seed, name, version, index);
                wanted.clone()
            });
            return Err(format!("block {index} begins with {head:x?}; versions of its sectors: {sectors}"));
        }
    }
    Ok(length)
}

/// Of which version each 512 bytes of a block are; '?': of none of them.
fn sectors_of(found: &[u8], possible: &[(u64, u64)], mut content: impl FnMut(u64) -> Vec<u8>) -> String {
    let contents: Vec<(u64, Vec<u8>)> =
        possible.iter().map(|(version, _)| (*version, content(*version))).collect();
    let version_of = |(at, sector): (usize, &[u8])| {
        let same = contents.iter().find(|(_, content)| content[at * 512..][..512] == *sector);
        let zero = sector.iter().all(|byte| *byte == 0);
        same.map_or_else(|| if zero { "0" } else { "?" }.to_owned(), |(version, _)| version.to_string())
    };
    found.chunks_exact(512).enumerate().map(version_of).collect::<Vec<_>>().join(" ")
}

/// Files that no change made.
fn strangers(root: &Path, files: &BTreeMap<Name, History>) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for thread in fs::read_dir(root)? {
        let thread = thread?;
        let Some(number) = number_of(&thread.path(), 't') else { continue };
        for file in fs::read_dir(thread.path())? {
            let path = file?.path();
            let known = number_of(&path.with_extension(""), 'f')
                .is_some_and(|file| files.contains_key(&(number, file)));
            if !known {
                found.push(format!("{} was never written", path.display()));
            }
        }
    }
    Ok(found)
}

fn number_of(path: &Path, letter: char) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix(letter)?.parse().ok()
}
