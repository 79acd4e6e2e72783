//! What the daemon remembers across restarts: events, counts of errors, what could not be read, which arrays
//! it serves and where their devices are.
//!
//! Invariants: nothing here is needed to serve: a file that cannot be read counts as absent, a write that
//! fails is tried again and reported once; only a thread of its own writes, so no other thread waits for the
//! directory; two daemons never write to one directory. Must not know what happens to arrays.

mod file;
mod known;

pub(crate) use known::{Arrays, Counters, Counts, Damage, Known, KnownDevice, Lacking, MemberReason};

use super::peer::Owner;
use crate::control::Event;
use crate::member::patience::{within, within_apart};
use crate::member::{dead_holder_of, words_for_dead};
use file::{append, encode, load, peek, read, replace, set_unread_aside};
use nix::fcntl::{Flock, FlockArg};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Where `serve` keeps its state when nothing is configured.
pub(super) const DEFAULT_STATE_DIR: &str = "/var/lib/calpe";

/// Arrays that are served, and where their devices are.
const ARRAYS_FILE: &str = "arrays.json";
/// Counts of errors.
const COUNTERS_FILE: &str = "counters.json";
/// Ranges that could not be read.
const DAMAGE_FILE: &str = "damage.json";
/// Those of them that are beyond repair.
const BEYOND_REPAIR_FILE: &str = "beyond-repair.json";
/// Blocks that devices went into service without.
const LACKING_FILE: &str = "lacking.json";
/// The files above, each replaced whole.
const WHOLE_FILES: [&str; 5] = [ARRAYS_FILE, COUNTERS_FILE, DAMAGE_FILE, BEYOND_REPAIR_FILE, LACKING_FILE];
/// Events, a line each.
const EVENTS_FILE: &str = "events.jsonl";
/// Earlier events.
const OLDER_EVENTS_FILE: &str = "events.1.jsonl";
/// Locked by the daemon that uses the directory.
const LOCK_FILE: &str = "lock";

/// Longest file of events. With the earlier file, these are about ten thousand events.
const EVENTS_BYTES_MAX: u64 = 2 << 20;

/// Most events that wait to be written. Beyond that the oldest are dropped; the log has them.
const LINES_MAX: usize = 4096;

/// How long the start waits for the directory: a directory that hangs must not keep arrays from being served.
const LOAD_WAIT: Duration = Duration::from_secs(5);

/// A write that takes longer than this means that the directory does not answer: that is reported, and nobody
/// waits for the directory until it answers.
const UNANSWERED: Duration = Duration::from_secs(5);

/// Time between attempts to write what could not be written, and between checks whether the directory is
/// still there.
const RETRY: Duration = Duration::from_secs(10);

/// A lasting problem is reported again after this long.
const TOLD_EVERY: Duration = Duration::from_secs(3600);

/// What a state directory held when the daemon started.
#[derive(Debug, Default)]
pub(crate) struct Remembered {
    pub arrays: Arrays,
    pub counters: Counters,
    pub damage: Damage,
    /// Those of the damage that are beyond repair.
    pub beyond_repair: Damage,
    pub lacking: Lacking,
    pub events: Vec<Event>,
    /// What could not be used, a line each.
    pub warnings: Vec<String>,
    /// The content of the files that were read.
    files: BTreeMap<&'static str, Vec<u8>>,
}

/// The devices of arrays and where they were, from a state directory that no daemon has taken yet.
/// Changes nothing there.
pub(crate) fn remembered_devices(dir: &Path) -> Vec<(Uuid, PathBuf)> {
    let file = dir.join(ARRAYS_FILE);
    let arrays = within_apart(dir, "read it", LOAD_WAIT, move || peek::<Arrays>(&file));
    let arrays = arrays.ok().flatten().unwrap_or_default();
    let devices = arrays.0.into_values().flat_map(|known| known.devices);
    devices.map(|device| (device.uuid, device.path)).collect()
}

/// The state directory of a daemon, or none. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct StateDir(Option<Arc<Shared>>);

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    work: Mutex<Work>,
    changed: Condvar,
}

/// What is to be written.
#[derive(Debug, Default)]
struct Work {
    files: BTreeMap<&'static str, Vec<u8>>,
    lines: VecDeque<Vec<u8>>,
    /// Since when the thread is writing, if it is.
    busy: Option<Instant>,
    closed: bool,
    /// The last try after `closed` has failed.
    given_up: bool,
    trouble: Trouble,
}

/// Whether the directory can be written to, and what was reported of it.
#[derive(Debug, Default)]
struct Trouble {
    now: Option<String>,
    told: Option<Instant>,
    /// A problem was reported, and its end was not.
    is_open: bool,
    /// What is to be reported next.
    news: Option<Result<String, String>>,
    /// The directory was found gone, and everything is written anew; reported when that has succeeded.
    found_gone: bool,
}

impl Trouble {
    fn failed(&mut self, text: String) {
        let due = self.told.is_none_or(|told| told.elapsed() >= TOLD_EVERY);
        if due {
            self.told = Some(Instant::now());
            self.is_open = true;
            self.news = Some(Err(text.clone()));
        }
        self.now = Some(text);
    }

    fn succeeded(&mut self, dir: &Path) {
        self.now = None;
        if std::mem::take(&mut self.found_gone) {
            self.is_open = false;
            self.news = Some(Err(format!(
                "the state directory {} was deleted or replaced while it was in use: what is known was written there \
                 anew, but earlier events are lost",
                dir.display()
            )));
        } else if std::mem::take(&mut self.is_open) {
            self.news = Some(Ok(format!("the state directory {} can be written to again", dir.display())));
        }
    }
}

impl StateDir {
    /// Takes the directory, creates it if need be, and reads what it holds. Every problem with it
    /// is a warning.
    pub(crate) fn open(dir: &Path) -> (StateDir, Remembered) {
        let own = dir.to_path_buf();
        let loaded = within(dir, "read it", LOAD_WAIT, move || Remembered::load(&own));
        let (lock, mut remembered) = loaded.unwrap_or_else(|error| {
            let warnings = vec![format!("{error}: nothing that an earlier run has left is known")];
            (None, Remembered { warnings, ..Remembered::default() })
        });
        let shared =
            Arc::new(Shared { dir: dir.to_path_buf(), work: Mutex::default(), changed: Condvar::new() });
        let in_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("state".into());
        let kept = std::mem::take(&mut remembered.files);
        if let Err(error) = thread.spawn(move || in_thread.write_all(lock, kept)) {
            tracing::warn!(%error, "no thread for the state directory: nothing is remembered");
            return (StateDir(None), remembered);
        }
        (StateDir(Some(shared)), remembered)
    }

    /// Where it is.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.0.as_ref().map(|shared| shared.dir.as_path())
    }

    /// Has the changed arrays written.
    pub(crate) fn save_arrays(&self, arrays: &Arrays) {
        self.save(ARRAYS_FILE, || encode(arrays));
    }

    /// Has the changed counts written.
    pub(crate) fn save_counters(&self, counters: &Counters) {
        self.save(COUNTERS_FILE, || encode(counters));
    }

    /// Has the changed list of unreadable ranges written.
    pub(crate) fn save_damage(&self, damage: &Damage) {
        self.save(DAMAGE_FILE, || encode(damage));
    }

    /// Has the changed list of ranges beyond repair written.
    pub(crate) fn save_beyond_repair(&self, damage: &Damage) {
        self.save(BEYOND_REPAIR_FILE, || encode(damage));
    }

    /// Has the changed list of blocks that devices lack written.
    pub(crate) fn save_lacking(&self, lacking: &Lacking) {
        self.save(LACKING_FILE, || encode(lacking));
    }

    fn save(&self, name: &'static str, content: impl FnOnce() -> Vec<u8>) {
        if let Some(shared) = &self.0 {
            let content = content();
            shared.work().files.insert(name, content);
            shared.changed.notify_all();
        }
    }

    /// Hands an event over to be written. Does not wait.
    pub(crate) fn append(&self, event: &Event) {
        let Some(shared) = &self.0 else { return };
        // JSON can express every event.
        let mut line = serde_json::to_vec(event).expect("plain data");
        line.push(b'\n');
        let mut work = shared.work();
        if work.lines.len() == LINES_MAX {
            work.lines.pop_front();
        }
        work.lines.push_back(line);
        shared.changed.notify_all();
    }

    /// The state of the directory if it has changed since the last call: an error when it cannot be written
    /// to.
    pub(crate) fn news(&self) -> Option<Result<String, String>> {
        self.0.as_ref()?.judged().trouble.news.take()
    }

    /// Why the directory cannot be written to, as far as is known.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.0.as_ref()?.judged().trouble.now.clone()
    }

    /// Events on disk, oldest first. Waits for the directory, but not for long.
    pub(crate) fn events(&self) -> Vec<Event> {
        let Some(shared) = &self.0 else { return Vec::new() };
        let dir = shared.dir.clone();
        let events = within_apart(&shared.dir, "read it", LOAD_WAIT, move || {
            let mut warnings = Vec::new();
            load_events(&dir, &mut warnings)
        });
        events.unwrap_or_default()
    }

    /// Waits until everything handed over is written, but not for longer than `limit`.
    ///
    /// # Errors
    /// Why it is not.
    pub(crate) fn flush(&self, limit: Duration) -> Result<(), String> {
        let Some(shared) = &self.0 else { return Ok(()) };
        let deadline = Instant::now() + limit;
        let mut work = shared.judged();
        while work.busy.is_some() || work.has_any() {
            if let Some(trouble) = &work.trouble.now {
                return Err(trouble.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(unanswered(&shared.dir));
            }
            work = shared.changed.wait_timeout(work, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Writes what is left, but not for longer than `limit`, and nothing afterwards.
    pub(crate) fn close(&self, limit: Duration) {
        let Some(shared) = &self.0 else { return };
        let deadline = Instant::now() + limit;
        let mut work = shared.work();
        work.closed = true;
        shared.changed.notify_all();
        // A slow directory may still take it.
        while work.busy.is_some() || (work.has_any() && !work.given_up) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            work = shared.changed.wait_timeout(work, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Work {
    fn has_any(&self) -> bool {
        !self.files.is_empty() || !self.lines.is_empty()
    }
}

impl Shared {
    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Shared::work`], after checking that the directory answers.
    fn judged(&self) -> MutexGuard<'_, Work> {
        let mut work = self.work();
        let hangs = work.busy.is_some_and(|since| since.elapsed() >= UNANSWERED);
        if hangs && work.trouble.now.is_none() {
            work.trouble.failed(format!(
                "{}; until it does, events, counts and imports are not kept there, and are lost at a restart",
                unanswered(&self.dir)
            ));
        }
        work
    }

    /// The thread that writes. `kept`: what the files in the directory hold.
    fn write_all(&self, mut lock: Option<Flock<File>>, mut kept: BTreeMap<&'static str, Vec<u8>>) {
        let mut unread = BTreeSet::new();
        let was_had = lock.is_some();
        loop {
            let (mut files, lines, is_last) = {
                let mut work = self.work();
                let until = Instant::now() + RETRY;
                // Without the lock the loop goes on: a directory that cannot be used is reported even if
                // there is nothing to write.
                while lock.is_some() && !work.has_any() && !work.closed {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break;
                    }
                    work = self.changed.wait_timeout(work, left).unwrap_or_else(PoisonError::into_inner).0;
                }
                if !work.has_any() && work.closed {
                    return;
                }
                work.busy = Some(Instant::now());
                (std::mem::take(&mut work.files), std::mem::take(&mut work.lines), work.closed)
            };
            let is_gone = lock.as_ref().is_some_and(|lock| !self.holds(lock));
            if is_gone {
                for (name, content) in &kept {
                    files.entry(name).or_insert_with(|| content.clone());
                }
            }
            let is_idle = lock.is_some() && !is_gone && files.is_empty() && lines.is_empty();
            let result = if is_idle { Ok(()) } else { self.write(&mut lock, &mut unread, &files, &lines) };
            let mut work = self.work();
            work.busy = None;
            work.trouble.found_gone |= is_gone;
            match result {
                Ok(()) => {
                    kept.append(&mut files);
                    // A directory that did not answer has answered.
                    work.trouble.succeeded(&self.dir);
                }
                Err(error) => {
                    for (name, content) in files {
                        work.files.entry(name).or_insert(content);
                    }
                    for line in lines.into_iter().rev().take(LINES_MAX - work.lines.len()) {
                        work.lines.push_front(line);
                    }
                    let unknown = match was_had {
                        true => "",
                        false => ", and what an earlier run has left there may not be known",
                    };
                    work.trouble.failed(format!(
                        "{}: events, counts and imports cannot be written there and are lost at a restart{unknown}: {error}; mend it, or \
                         name another 'state_dir'",
                        self.dir.display()
                    ));
                    let until = Instant::now() + RETRY;
                    while !work.closed {
                        let left = until.saturating_duration_since(Instant::now());
                        if left.is_zero() {
                            break;
                        }
                        work =
                            self.changed.wait_timeout(work, left).unwrap_or_else(PoisonError::into_inner).0;
                    }
                    // The directory may have been repaired since: one more try.
                    if is_last {
                        work.given_up = true;
                        self.changed.notify_all();
                        return;
                    }
                }
            }
            self.changed.notify_all();
        }
    }

    /// Whether this lock is that of the directory: another filesystem may have been mounted there since, or
    /// somebody has deleted it.
    fn holds(&self, lock: &Flock<File>) -> bool {
        let there = std::fs::metadata(self.dir.join(LOCK_FILE));
        let (Ok(held), Ok(there)) = (lock.metadata(), there) else { return false };
        (held.dev(), held.ino()) == (there.dev(), there.ino())
    }

    fn write(
        &self,
        lock: &mut Option<Flock<File>>,
        unread: &mut BTreeSet<&'static str>,
        files: &BTreeMap<&'static str, Vec<u8>>,
        lines: &VecDeque<Vec<u8>>,
    ) -> io::Result<()> {
        if !lock.as_ref().is_some_and(|lock| self.holds(lock)) {
            *lock = None;
            *lock = Some(take(&self.dir)?);
            // The files there may belong to another daemon, or to an earlier run and were not read at the
            // start.
            *unread = BTreeSet::from(WHOLE_FILES);
        }
        for (name, content) in files {
            let path = self.dir.join(name);
            if unread.remove(name)
                && let Some(fate) = set_unread_aside(&path)
            {
                tracing::warn!("{}: may be of another run, and is replaced: {fate}", path.display());
            }
            replace(&path, content).map_err(|error| with_path(&path, error))?;
        }
        let lines: Vec<u8> = lines.iter().flatten().copied().collect();
        if lines.is_empty() {
            return Ok(());
        }
        let older = self.dir.join(OLDER_EVENTS_FILE);
        let path = self.dir.join(EVENTS_FILE);
        append(&path, &older, &lines, EVENTS_BYTES_MAX).map_err(|error| with_path(&path, error))
    }
}

impl Remembered {
    fn load(dir: &Path) -> (Option<Flock<File>>, Remembered) {
        let mut remembered = Remembered::default();
        let lock = match take(dir) {
            Ok(lock) => Some(lock),
            // The state of another daemon is not ours.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                remembered.warnings.push(format!("{}: {error}: name another 'state_dir'", dir.display()));
                return (None, remembered);
            }
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                remembered.warnings.push(format!("{}: {error}", dir.display()));
                return (None, remembered);
            }
            // Nothing in it can be read either, so one warning is enough.
            Err(error) if may_not_be_entered(dir) => {
                remembered.warnings.push(format!(
                    "{}: {error}: this user ({}) may not look into the state directory, and nothing that an earlier run has left is known",
                    dir.display(),
                    Owner::own()
                ));
                return (None, remembered);
            }
            // It may still be readable.
            Err(_) => None,
        };
        let warnings = &mut remembered.warnings;
        remembered.arrays = load(&dir.join(ARRAYS_FILE), warnings).unwrap_or_default();
        remembered.counters = load(&dir.join(COUNTERS_FILE), warnings).unwrap_or_default();
        remembered.damage = load(&dir.join(DAMAGE_FILE), warnings).unwrap_or_default();
        remembered.beyond_repair = load(&dir.join(BEYOND_REPAIR_FILE), warnings).unwrap_or_default();
        remembered.lacking = load(&dir.join(LACKING_FILE), warnings).unwrap_or_default();
        remembered.events = load_events(dir, warnings);
        if lock.is_some() {
            let content = |name| Some((name, read(&dir.join(name)).ok()??));
            remembered.files = WHOLE_FILES.into_iter().filter_map(content).collect();
        }
        (lock, remembered)
    }
}

fn unanswered(dir: &Path) -> String {
    format!("{}: the state directory does not answer", dir.display())
}

/// Whether this user may not access the content of a directory.
fn may_not_be_entered(dir: &Path) -> bool {
    let entry = std::fs::symlink_metadata(dir.join(LOCK_FILE));
    entry.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

/// Says in the error when the path is a directory and should be a file.
fn with_path(path: &Path, error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::IsADirectory => {
            io::Error::new(error.kind(), format!("{} is a directory, and should be a file", path.display()))
        }
        _ => error,
    }
}

/// Creates the directory if need be, and locks it.
fn take(dir: &Path) -> io::Result<Flock<File>> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            let what = match dir.exists() {
                true => "it is a file, and no directory",
                false => "it is a symbolic link that leads nowhere",
            };
            io::Error::new(error.kind(), what)
        }
        _ => error,
    })?;
    let path = dir.join(LOCK_FILE);
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    // If the directory hangs later, closing the file must not hold up other threads.
    let file = crate::member::out_of_the_way(file.map_err(|error| with_path(&path, error))?);
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(file, errno)| match errno {
        nix::errno::Errno::EWOULDBLOCK => in_use(&file),
        errno => errno.into(),
    })
}

/// The error for a directory whose lock another process has.
fn in_use(lock: &File) -> io::Error {
    match dead_holder_of(lock) {
        Some(pid) => {
            let holder = words_for_dead(pid, "which uses this state directory");
            let text = format!("{holder}. Let that answer, or abort it (docs/members.md), and start again");
            io::Error::new(io::ErrorKind::ResourceBusy, text)
        }
        None => io::Error::new(io::ErrorKind::WouldBlock, "another daemon uses this state directory"),
    }
}

/// Events on disk, oldest first. Damaged lines are left out: the last one may be torn.
fn load_events(dir: &Path, warnings: &mut Vec<String>) -> Vec<Event> {
    let mut events: Vec<Event> = Vec::new();
    for name in [OLDER_EVENTS_FILE, EVENTS_FILE] {
        let path = dir.join(name);
        let bytes = match read(&path) {
            Ok(bytes) => bytes.unwrap_or_default(),
            Err(error) => {
                warnings.push(format!("{}: cannot be read: {error}", path.display()));
                continue;
            }
        };
        let lines = bytes.split(|byte| *byte == b'\n');
        let read = lines.filter(|line| !line.is_empty()).map(serde_json::from_slice::<Event>);
        let mut bad = 0;
        for event in read {
            match event {
                Ok(event) => events.push(event),
                Err(_) => bad += 1,
            }
        }
        if bad > 0 {
            warnings.push(format!("{}: {bad} lines are damaged and left out", path.display()));
        }
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_another_daemon_is_told_with_one_piece_of_advice() {
        let dir = tempfile::tempdir().unwrap();
        let _other = take(dir.path()).unwrap();
        let warnings = Remembered::load(dir.path()).1.warnings;
        let told = format!(
            "{}: another daemon uses this state directory: name another 'state_dir'",
            dir.path().display()
        );
        assert_eq!(warnings, [told]);
        let (state, _) = StateDir::open(dir.path());
        state.save_arrays(&Arrays::default());
        let trouble = state.flush(Duration::from_secs(10)).unwrap_err();
        assert_eq!(trouble.matches("name another").count(), 1, "{trouble}");
    }

    #[test]
    fn a_directory_of_a_daemon_that_was_killed_and_is_not_at_an_end_is_told_as_that() {
        let dir = tempfile::tempdir().unwrap();
        drop(take(dir.path()).unwrap());
        // The lock stays with the open file, which this process has, too; the process that took it is dead,
        // and the kernel does not update the lock's owner.
        let file = File::open(dir.path().join(LOCK_FILE)).unwrap();
        let mut child =
            std::process::Command::new("flock").arg("0").stdin(file.try_clone().unwrap()).spawn().unwrap();
        let pid = child.id();
        while !crate::member::is_dead_and_there(pid) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let told = Remembered::load(dir.path()).1.warnings.join("\n");
        let expected = format!("process {pid}, which uses this state directory, was killed and cannot end");
        assert!(told.contains(&expected) && !told.contains("another"), "{told}");
        child.wait().unwrap();
        drop(file);
        assert_eq!(Remembered::load(dir.path()).1.warnings, [""; 0]);
    }

    #[test]
    fn a_directory_that_was_mended_just_before_the_end_is_written() {
        for is_mended in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("state");
            std::fs::write(&path, "").unwrap();
            let (state, _) = StateDir::open(&path);
            state.save_arrays(&Arrays::default());
            state.flush(Duration::from_secs(10)).unwrap_err();
            if is_mended {
                std::fs::remove_file(&path).unwrap();
            }
            let begun = Instant::now();
            state.close(Duration::from_secs(30));
            assert!(begun.elapsed() < RETRY, "it is not waited for");
            assert_eq!(path.join(ARRAYS_FILE).exists(), is_mended);
        }
    }

    #[test]
    fn what_is_a_directory_and_should_be_a_file_is_named() {
        for name in [LOCK_FILE, ARRAYS_FILE, EVENTS_FILE] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join(name);
            std::fs::create_dir(&path).unwrap();
            let shared =
                Shared { dir: dir.path().to_path_buf(), work: Mutex::default(), changed: Condvar::new() };
            let files = BTreeMap::from([(ARRAYS_FILE, b"{}".to_vec())]);
            let lines = VecDeque::from([b"{}".to_vec()]);
            let error = shared.write(&mut None, &mut BTreeSet::new(), &files, &lines);
            match error {
                Ok(()) => assert_eq!(name, ARRAYS_FILE, "it is set aside"),
                Err(error) => {
                    let told = format!("{} is a directory, and should be a file", path.display());
                    assert_eq!(error.to_string(), told);
                }
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        std::fs::write(&path, "").unwrap();
        assert_eq!(take(&path).unwrap_err().to_string(), "it is a file, and no directory");
    }

    #[test]
    fn a_directory_that_was_deleted_is_written_anew_and_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let (state, _) = StateDir::open(&path);
        state.save_arrays(&Arrays::default());
        state.flush(Duration::from_secs(10)).unwrap();
        let end = |state: StateDir| {
            state.close(Duration::from_secs(10));
            while take(&path).is_err() {
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        end(state);
        let before = std::fs::read(path.join(ARRAYS_FILE)).unwrap();
        for _ in 0..2 {
            // The second time, nothing of it was written by this run.
            let (state, _) = StateDir::open(&path);
            std::fs::remove_dir_all(&path).unwrap();
            state.save_counters(&Counters::default());
            state.flush(Duration::from_secs(10)).unwrap();
            assert_eq!(std::fs::read(path.join(ARRAYS_FILE)).unwrap(), before);
            let told = state.news().unwrap().unwrap_err();
            assert!(told.contains("was deleted or replaced while it was in use"), "{told}");
            assert_eq!((state.news(), state.trouble()), (None, None));
            end(state);
        }
    }

    #[test]
    fn a_directory_that_may_not_be_looked_into_is_told_once() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        std::fs::create_dir(&state).unwrap();
        std::fs::write(state.join(ARRAYS_FILE), "{}").unwrap();
        std::fs::set_permissions(&state, PermissionsExt::from_mode(0o000)).unwrap();
        let own = state.clone();
        let thread = std::thread::spawn(move || {
            // For this thread alone. Root acts as another user on files; other threads do not.
            nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
            Remembered::load(&own).1.warnings
        });
        let warnings = thread.join().unwrap();
        std::fs::set_permissions(&state, PermissionsExt::from_mode(0o700)).unwrap();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("may not look into the state directory"), "{warnings:?}");
        assert!(state.join(ARRAYS_FILE).exists());
    }

    /// A directory that another daemon used, or that was not mounted yet, when this one started.
    #[test]
    fn what_was_not_read_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let shared =
            Shared { dir: dir.path().to_path_buf(), work: Mutex::default(), changed: Condvar::new() };
        let file = |name: &str| std::fs::read(dir.path().join(name)).ok();
        let ours = |text: &str| BTreeMap::from([(ARRAYS_FILE, text.as_bytes().to_vec())]);
        std::fs::write(dir.path().join(ARRAYS_FILE), "theirs").unwrap();
        let (mut lock, mut unread) = (None, BTreeSet::new());
        // A file that is not replaced stays: it may have been read.
        let counters = BTreeMap::from([(COUNTERS_FILE, b"{}".to_vec())]);
        shared.write(&mut lock, &mut unread, &counters, &VecDeque::new()).unwrap();
        assert_eq!(file(ARRAYS_FILE), Some(b"theirs".to_vec()));
        for text in ["first", "second"] {
            shared.write(&mut lock, &mut unread, &ours(text), &VecDeque::new()).unwrap();
            assert_eq!(file(ARRAYS_FILE), Some(text.as_bytes().to_vec()));
            assert_eq!(file("arrays.json.unread"), Some(b"theirs".to_vec()));
        }
        // Something is mounted over it.
        std::fs::remove_file(dir.path().join(LOCK_FILE)).unwrap();
        shared.write(&mut lock, &mut unread, &ours("third"), &VecDeque::new()).unwrap();
        assert_eq!(file("arrays.json.unread"), Some(b"second".to_vec()));
    }
}
