//! Searches for members by their superblocks: in directories, at paths and behind URIs.
//!
//! Invariants: identity is the uuid, a path is only where a device was found; nothing is written; a place
//! that does not answer costs its own members and a limited time, and nothing else. Must not know of running
//! arrays.

use crate::daemon::devices::lanes::DeviceLanes;
use crate::daemon::devices::superblocks::{check_length, patiently};
use crate::member::patience::{hangs, within, within_apart, work_off};
use crate::member::{Access, Device, DeviceError, DeviceKind, is_remote, member_kind, same_remote};
use calpe_core::format::{NewestError, Role, Superblock};
use calpe_core::units::shown;
use nix::dir::Dir;
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Most entries of a directory that are read: a directory of members has fewer.
const ENTRIES_MAX: usize = 16 << 10;

/// Most files without a superblock that are named where members are missing.
const BLANKS_TOLD: usize = 8;

/// A smaller file was never a member.
const MEMBER_BYTES_MIN: u64 = 1 << 20;

/// A device with a superblock.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// Where.
    pub path: PathBuf,
    /// Its current superblock; of several lanes that of the first one that has one.
    pub superblock: Superblock,
    /// Those of all lanes; none where a lane has none that can be used.
    pub lanes: Vec<Option<Superblock>>,
    /// Its array has never been in service, as far as it tells.
    pub is_new: bool,
    /// It looks as a creation leaves a device that is cut short there.
    pub is_unfinished: bool,
    /// Whether it was found only because it had been there before.
    pub remembered: bool,
    /// Why it cannot be written, so that an import leaves it out: "PATH: what is wrong".
    pub unwritable: Option<String>,
}

/// Result of a search.
#[derive(Clone, Debug, Default)]
pub(crate) struct Search {
    /// Members, by array.
    pub arrays: BTreeMap<Uuid, Vec<Found>>,
    /// Paths that look like members and cannot be used, or could not be read, a line each.
    pub warnings: Vec<String>,
    /// Paths that nobody named and that could not be read, a line each: missing members may be among them.
    pub unread: Vec<String>,
    /// Paths that this user may not read.
    pub forbidden: Vec<PathBuf>,
    /// Finds that cannot be used: why members are missing.
    pub unusable: Vec<Unusable>,
    /// Finds without a superblock, in searched directories and at named paths.
    pub blank: Vec<Blank>,
    /// Why the system had no threads for the search: members that were not found may still be there.
    pub threadless: Option<String>,
}

/// Something that could be a member, and holds no superblock.
#[derive(Clone, Debug)]
pub(crate) struct Blank {
    /// Where.
    pub path: PathBuf,
    /// Its size; none where it is no file.
    pub file_bytes: Option<u64>,
}

/// Something in the present or former place of a member that cannot be used.
#[derive(Clone, Debug)]
pub(crate) struct Unusable {
    /// Where.
    pub path: PathBuf,
    /// The device whose superblock it holds, if that can be read.
    pub device: Option<Uuid>,
    /// The place, and what is wrong with it.
    pub reason: String,
    /// The kind of trouble, where the advice depends on it.
    pub hindrance: Option<Hindrance>,
}

/// Why a member cannot come back from the place of its device, as a search or an attempt has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hindrance {
    /// The place holds no superblock any more.
    Overwritten,
    /// The file there is smaller than the member.
    CutOff,
    /// Another member is there.
    Stranger,
    /// Several devices claim to be the member, and none can be told to be the copy.
    Claimed,
    /// It may be among the paths that this user may not read.
    Forbidden,
    /// Its device is there, and holds data that may be nowhere else.
    Kept,
}

impl Hindrance {
    /// Whether the member can never come back from there.
    #[must_use]
    pub(crate) fn is_for_good(self) -> bool {
        matches!(self, Hindrance::Overwritten | Hindrance::CutOff)
    }
}

/// A path to be read.
struct Place {
    path: PathBuf,
    /// The search names this very path, so every problem with it is worth a line.
    named: bool,
    /// A device was there before; the search does not name it.
    remembered: bool,
}

/// Where a search begins.
enum Root {
    /// A directory, or a file or device.
    Local(PathBuf),
    /// This path alone.
    Single(Place),
}

/// A part of a search.
enum Job {
    List(PathBuf),
    Look(Place),
}

/// What was found at a place.
struct Look {
    place: Place,
    /// What the path leads to; none for a remote member, or when it has not answered.
    node: Option<Result<Node, DeviceError>>,
    seen: Result<Seen, DeviceError>,
}

/// What is at a place.
enum Seen {
    Member(Box<Found>),
    Nothing(Blank),
    /// A present or former member that cannot be used.
    Unfit(Unusable),
    Unread(DeviceError),
}

/// Identity of a file or block device: numbers of filesystem and inode, or of the device.
type Node = (u64, u64, u64);

/// Reads every path and URI, and the regular files and block devices directly in each directory. A device
/// that several paths lead to counts once, under the first. Paths that do not answer within `patience` are
/// left out.
#[must_use]
pub(crate) fn search(places: &[PathBuf], patience: Duration) -> Search {
    search_with(places, &[], patience)
}

/// As [`search`], and also reads paths where devices were before. Nothing need be there any more.
#[must_use]
pub(crate) fn search_with(places: &[PathBuf], remembered: &[PathBuf], patience: Duration) -> Search {
    search_patiently(places, remembered, &|_| patience)
}

/// How long to wait for each path, or what is at it.
pub(crate) type Patience<'p> = &'p (dyn Fn(&Path) -> Duration + Sync);

/// As [`search_with`], with a patience for each path.
pub(crate) fn search_patiently(places: &[PathBuf], remembered: &[PathBuf], patience: Patience<'_>) -> Search {
    let mut search = Search::default();
    let mut roots: Vec<Root> = Vec::new();
    let mut uris: Vec<&PathBuf> = Vec::new();
    for place in places {
        if !is_remote(place) {
            roots.push(Root::Local(place.clone()));
        } else if !uris.iter().any(|other| same_remote(other, place)) {
            uris.push(place);
        }
    }
    let (remote, local): (Vec<_>, Vec<_>) = remembered.iter().cloned().partition(|path| is_remote(path));
    let known = |path| Root::Single(Place { path, named: false, remembered: true });
    roots.extend(local.into_iter().map(known));
    let named = |path| Root::Single(Place { path, named: true, remembered: false });
    let remote = remote.into_iter().filter(|path| !uris.iter().any(|uri| same_remote(uri, path)));
    let remote: Vec<Root> = remote.map(known).collect();
    roots.extend(uris.into_iter().cloned().map(named));
    roots.extend(remote);
    let mut looks = search.look_at_all(roots, patience);
    search.leave_out_twins(&mut looks, remembered);
    for (place, seen) in looks.into_iter().map(|look| (look.place, look.seen)) {
        match seen {
            Ok(Seen::Member(mut found)) => {
                found.remembered = place.remembered;
                search.arrays.entry(found.superblock.array).or_default().push(*found);
            }
            Ok(Seen::Unfit(unusable)) => {
                // A former member is reported only where members are missing.
                let told = if place.remembered { &mut search.unread } else { &mut search.warnings };
                told.push(unusable.reason.clone());
                search.unusable.push(unusable);
            }
            Ok(Seen::Nothing(_)) if place.remembered || remembered.contains(&place.path) => {
                let reason = overwritten(&place.path);
                let path = place.path.clone();
                let hindrance = Some(Hindrance::Overwritten);
                search.unusable.push(Unusable { path, device: None, reason, hindrance });
            }
            Ok(Seen::Nothing(blank)) => {
                if place.named {
                    search.warnings.push(format!("{}: holds no Calpe superblock", shown(&place.path)));
                }
                search.blank.push(blank);
            }
            Ok(Seen::Unread(error)) | Err(error) => search.note_unread(&place, &error),
        }
    }
    search.prefer_what_was_searched();
    search
}

impl Search {
    /// What is wrong with a path where a device was before, if known.
    #[must_use]
    pub(crate) fn problem_at(&self, path: &Path) -> Option<String> {
        if let Some(unusable) = self.unusable.iter().find(|unusable| unusable.path == path) {
            return Some(unusable.reason.clone());
        }
        let head = format!("{}: ", shown(path));
        self.unread.iter().chain(&self.warnings).find(|line| line.starts_with(&head)).cloned()
    }

    /// The line about a path where another device was before, if a member was found there now.
    #[must_use]
    pub(crate) fn stranger_at(&self, path: &Path) -> Option<String> {
        let found = self.arrays.values().flatten().find(|found| found.path == path)?;
        let Superblock { name, member, .. } = &found.superblock;
        Some(format!("{}: another device is there now, member {member} of array '{name}'", shown(path)))
    }

    /// A line about files without a superblock that may have been members: files of at least
    /// `bytes_min` bytes, directly in one of these directories.
    #[must_use]
    pub(crate) fn blanks(&self, bytes_min: u64, dirs: &[PathBuf]) -> Option<String> {
        let is_there = |path: &Path| path.parent().is_some_and(|dir| dirs.iter().any(|other| dir == other));
        let is_large = |blank: &&Blank| blank.file_bytes.is_some_and(|bytes| bytes >= bytes_min);
        let files = self.blank.iter().filter(is_large).filter(|blank| is_there(&blank.path));
        let files: Vec<String> = files.map(|blank| shown(&blank.path).to_string()).collect();
        let more = match files.len().saturating_sub(BLANKS_TOLD) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let holds = if files.len() == 1 { "holds" } else { "hold" };
        let files = (!files.is_empty()).then(|| files[..files.len().min(BLANKS_TOLD)].join(", "));
        files.map(|files| format!("{files}{more}, which {holds} no Calpe superblock (overwritten?)"))
    }

    /// A line for each directory of `is_wanted` about paths in it that this user may not read: members may be
    /// among them.
    #[must_use]
    pub(crate) fn forbidden_in(&self, is_wanted: impl Fn(&Path) -> bool) -> Vec<String> {
        let mut dirs: BTreeMap<&Path, Vec<String>> = BTreeMap::new();
        for path in &self.forbidden {
            let dir = path.parent().unwrap_or(path);
            dirs.entry(dir).or_default().push(shown(path).to_string());
        }
        let uid = nix::unistd::geteuid();
        let line = |(dir, paths): (&Path, Vec<String>)| {
            let named = paths[..paths.len().min(BLANKS_TOLD)].join(", ");
            let more = match paths.len().saturating_sub(BLANKS_TOLD) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let (count, them) = match paths.len() {
                1 => ("1 file or device was".to_owned(), "it"),
                many => (format!("{many} files or devices were"), "them"),
            };
            format!(
                "{}: {count} not looked at, as uid {uid} may not read {them}: {named}{more}: let that user read and write what is a \
                 member",
                shown(dir)
            )
        };
        dirs.into_iter().filter(|(dir, _)| is_wanted(dir)).map(line).collect()
    }

    /// A line about paths in these directories that this user may not read: missing members may be
    /// among them.
    #[must_use]
    pub(crate) fn perhaps_forbidden(&self, dirs: &[PathBuf]) -> Option<String> {
        let is_there =
            |path: &&PathBuf| path.parent().is_some_and(|dir| dirs.iter().any(|other| dir == other));
        let paths: Vec<String> =
            self.forbidden.iter().filter(is_there).map(|path| shown(path).to_string()).collect();
        let more = match paths.len().saturating_sub(BLANKS_TOLD) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let named = paths[..paths.len().min(BLANKS_TOLD)].join(", ");
        (!paths.is_empty())
            .then(|| format!("{named}{more}, which uid {} may not read", nix::unistd::geteuid()))
    }

    /// Finds in these places that cannot be used, a line each: they may be what was looked for.
    #[must_use]
    pub(crate) fn not_used(&self, places: &[PathBuf]) -> Vec<String> {
        let mut lines = self.warnings.clone();
        let is_overwritten = |unusable: &&Unusable| unusable.hindrance == Some(Hindrance::Overwritten);
        let overwritten = self.unusable.iter().filter(is_overwritten);
        lines.extend(overwritten.map(|unusable| unusable.reason.clone()));
        lines.extend(self.blanks(MEMBER_BYTES_MIN, places).map(|files| format!("perhaps members: {files}")));
        lines.extend(self.forbidden_in(|_| true));
        lines
    }

    /// What is known of members that were not found, a line each: what is at their former paths, and which
    /// files may be those members. `earlier`: where a device was before.
    pub(crate) fn about_missing(
        &self,
        members: &[Found],
        superblock: &Superblock,
        earlier: impl Fn(Uuid) -> Option<PathBuf>,
    ) -> BTreeMap<Uuid, String> {
        let dirs: Vec<PathBuf> =
            members.iter().filter_map(|found| found.path.parent()).map(Path::to_path_buf).collect();
        let blanks = self.blanks(superblock.whole_device_bytes_min(), &dirs);
        let forbidden = self.perhaps_forbidden(&dirs);
        let is_missing = |device: &Uuid| !members.iter().any(|found| found.superblock.device == *device);
        let missing = superblock.members.iter().map(|member| member.uuid).filter(is_missing);
        let about = |device: Uuid| {
            let path = earlier(device);
            let known = path.and_then(|path| self.problem_at(&path).or_else(|| self.stranger_at(&path)));
            let perhaps = || forbidden.as_ref().or(blanks.as_ref()).map(|files| format!("perhaps {files}"));
            Some((device, known.or_else(perhaps)?))
        };
        missing.filter_map(about).collect()
    }

    /// Drops remembered finds of a device that the search itself has found elsewhere, by another URI or path.
    fn prefer_what_was_searched(&mut self) {
        for members in self.arrays.values_mut() {
            let searched: Vec<Uuid> = members
                .iter()
                .filter(|found| !found.remembered)
                .map(|found| found.superblock.device)
                .collect();
            members.retain(|found| !found.remembered || !searched.contains(&found.superblock.device));
        }
    }

    /// Reads all paths at the same time: a path that hangs costs its time once, and no other waits for it.
    /// The results are in the order of the roots and their entries.
    fn look_at_all(&mut self, roots: Vec<Root>, patience: Patience<'_>) -> Vec<Look> {
        let (found, failed) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
        let jobs = roots.into_iter().enumerate().map(|(at, root)| match root {
            Root::Local(path) => ((at, 0), Job::List(path)),
            Root::Single(place) => ((at, 0), Job::Look(place)),
        });
        work_off(jobs.collect(), |(at, job)| match job {
            Job::Look(place) => {
                let look = look_within(place, patience);
                found.lock().unwrap_or_else(PoisonError::into_inner).push((at, look));
                Vec::new()
            }
            Job::List(path) => {
                let own = path.clone();
                let place = |path, named| Job::Look(Place { path, named, remembered: false });
                match within_apart(&path, "list it", patience(&path), move || list(&own)) {
                    Ok(Ok(Some(entries))) => {
                        let entries = entries.into_iter().enumerate();
                        entries.map(|(entry, path)| ((at.0, entry), place(path, false))).collect()
                    }
                    Ok(Ok(None)) => vec![(at, place(path, true))],
                    failure => {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).push((at, path, failure));
                        Vec::new()
                    }
                }
            }
        });
        let mut failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        failed.sort_unstable_by_key(|(at, ..)| *at);
        for (_, place, failure) in failed {
            match failure {
                Ok(Err(error)) => self.warnings.push(format!("{}: {error}", shown(&place))),
                Err(error) => {
                    self.note_threadless(&error);
                    self.warnings.push(error.to_string());
                }
                Ok(Ok(_)) => unreachable!("it was listed"),
            }
        }
        let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        found.sort_unstable_by_key(|(at, _)| *at);
        found.into_iter().map(|(_, look)| look).collect()
    }

    /// Keeps regular files and block devices, each once, and remote members.
    fn leave_out_twins(&mut self, looks: &mut Vec<Look>, remembered: &[PathBuf]) {
        let mut seen = HashSet::new();
        looks.retain(|Look { place, node, .. }| match node {
            None => true,
            Some(Ok(node)) => seen.insert(*node),
            Some(Err(error)) => {
                // A directory in a searched directory is no member and not worth a line. At a remembered
                // path, anything unusable is the reason why a member is missing.
                if remembered.contains(&place.path) && !matches!(error, DeviceError::NotFound { .. }) {
                    let reason = error.to_string();
                    let path = place.path.clone();
                    self.unusable.push(Unusable { path, device: None, reason, hindrance: None });
                }
                false
            }
        });
    }

    fn note_threadless(&mut self, error: &DeviceError) {
        if matches!(error, DeviceError::NoThread { .. }) {
            self.threadless.get_or_insert_with(|| error.to_string());
        }
    }

    fn note_unread(&mut self, place: &Place, error: &DeviceError) {
        self.note_threadless(error);
        let reason = error.to_string();
        let path = place.path.clone();
        self.unusable.push(Unusable { path, device: None, reason, hindrance: None });
        if place.named || hangs(&place.path) {
            self.warnings.push(error.to_string());
        } else {
            tracing::debug!(%error, "not looked at");
            self.unread.push(error.to_string());
            if matches!(error, DeviceError::Permission { .. }) && !place.remembered {
                self.forbidden.push(place.path.clone());
            }
        }
    }
}

/// The line about a path where a member was and something without a superblock is now.
#[must_use]
pub(crate) fn overwritten(path: &Path) -> String {
    format!(
        "{}: holds no Calpe superblock any more, or never did: it was overwritten, is another device, or a new one that left before it \
         had one",
        shown(path)
    )
}

/// The entries of a directory, as far as it can be read; none if the path is no directory. Does not use
/// `std::fs::read_dir`, which panics where closing a directory ends with an error.
fn list(place: &Path) -> io::Result<Option<Vec<PathBuf>>> {
    if !std::fs::metadata(place)?.is_dir() {
        return Ok(None);
    }
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut listed = Dir::open(place, flags, Mode::empty())
        .map_err(|errno| io::Error::other(format!("cannot be listed: {}", io::Error::from(errno))))?;
    let names = listed.iter().map_while(Result::ok);
    let names = names.map(|entry| OsStr::from_bytes(entry.file_name().to_bytes()).to_owned());
    let names = names.filter(|name| name != "." && name != "..");
    let mut entries: Vec<PathBuf> = names.take(ENTRIES_MAX).map(|name| place.join(name)).collect();
    entries.sort();
    Ok(Some(entries))
}

/// What a path leads to, if that can be a member.
fn node_of(path: &Path) -> Result<Node, DeviceError> {
    let look = || std::fs::metadata(path).map_err(|e| DeviceError::from_io(path, "look at it", e));
    let meta = patiently(Instant::now(), look)?;
    if meta.file_type().is_block_device() {
        return Ok((0, 0, meta.rdev()));
    }
    member_kind(path, &meta).map(|_| (meta.dev(), meta.ino(), u64::MAX))
}

/// Reads a place within its patience. A place that is neither file nor block device is not opened.
fn look_within(place: Place, patience: Patience<'_>) -> Look {
    let (path, limit) = (place.path.clone(), patience(&place.path));
    if is_remote(&path) {
        let seen = within(&place.path, "look at it", limit, move || look_at(&path));
        return Look { place, node: None, seen };
    }
    let looked = within_apart(&place.path, "look at it", limit, move || {
        let node = node_of(&path);
        let seen =
            if node.is_ok() { look_at(&path) } else { Seen::Nothing(Blank { path, file_bytes: None }) };
        (node, seen)
    });
    match looked {
        Ok((node, seen)) => Look { place, node: Some(node), seen: Ok(seen) },
        Err(error) => Look { place, node: None, seen: Err(error) },
    }
}

fn look_at(path: &Path) -> Seen {
    let device = match patiently(Instant::now(), || Device::open(path, Access::ReadOnly)) {
        Ok(device) => device,
        Err(error) => return Seen::Unread(error),
    };
    let unfit =
        |device, reason, hindrance| Seen::Unfit(Unusable { path: path.into(), device, reason, hindrance });
    let facts = device.facts();
    let file_bytes = (facts.kind == DeviceKind::File).then_some(facts.exact_bytes);
    let lanes = DeviceLanes::read(&device);
    let seen = match lanes.first() {
        Ok(superblock) => match check_length(&device, superblock) {
            Ok(()) => Seen::Member(Box::new(Found {
                path: path.into(),
                superblock: superblock.clone(),
                lanes: lanes.superblocks().map(|superblock| superblock.cloned()).collect(),
                is_new: lanes.is_new(),
                is_unfinished: lanes.is_unfinished(),
                remembered: false,
                unwritable: device.check_writable().err().map(|error| error.to_string()),
            })),
            Err(error) => {
                let &Superblock { ref name, member, device, role, .. } = superblock;
                // Another device may have taken its place.
                let was = match role {
                    Role::Member => "the device of",
                    Role::Replacement => "a device that was being built to replace",
                    Role::Replaced => "the device, until it was replaced, of",
                };
                let reason =
                    format!("{error} (by its superblock, it is {was} member {member} of array '{name}')");
                unfit(Some(device), reason, Some(Hindrance::CutOff))
            }
        },
        Err(NewestError::NotAMember) => Seen::Nothing(Blank { path: path.into(), file_bytes }),
        Err(error) => unfit(None, format!("{}: {error}", shown(path)), None),
    };
    device.close();
    seen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::devices::import::tests::created_in;
    use crate::member::DEFAULT_MEMBER_TIMEOUT;
    use crate::member::patience::without_threads;

    #[test]
    fn members_are_found_by_superblock_whatever_they_are_called() {
        let dir = tempfile::tempdir().unwrap();
        let array = created_in(dir.path(), "tank", 2, 1);
        std::fs::rename(dir.path().join("m1"), dir.path().join("zebra.bin")).unwrap();
        std::os::unix::fs::symlink("m0", dir.path().join("also-m0")).unwrap();
        std::fs::write(dir.path().join("note.txt"), "not a member").unwrap();
        let found = search(&[dir.path().into(), dir.path().join("m2")], DEFAULT_MEMBER_TIMEOUT);
        assert_eq!(found.arrays.len(), 1);
        assert_eq!(found.arrays[&array].len(), 3);
        assert_eq!(found.warnings, Vec::<String>::new());
    }

    #[test]
    fn what_could_not_be_looked_at_for_want_of_threads_is_not_missing() {
        let dir = tempfile::tempdir().unwrap();
        created_in(dir.path(), "tank", 2, 1);
        let places = [dir.path().into()];
        let found = without_threads(|| search(&places, DEFAULT_MEMBER_TIMEOUT));
        let refused = found.choose("tank", &places).unwrap_err().to_string();
        assert!(refused.contains("no thread to reach it by"), "{refused}");
        assert!(search(&places, DEFAULT_MEMBER_TIMEOUT).choose("tank", &places).is_ok());
    }

    #[test]
    fn what_is_named_and_no_member_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("blank");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let found = search(&[path, dir.path().join("nowhere")], DEFAULT_MEMBER_TIMEOUT);
        assert!(found.arrays.is_empty());
        assert_eq!(found.warnings.len(), 2, "{:?}", found.warnings);
    }
}
