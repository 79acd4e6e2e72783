//! Finding arrays: looks for members by superblock, opens and locks those of one array, and assembles it.
//!
//! Invariants: identity is the uuid, a path is only where a device was found; nothing is written here; what was
//! decided was decided on superblocks read under the lock. Must not know of running arrays.

use super::superblocks::{check_length, read_copies, read_superblock, witness};
use crate::array::assembly::{Assembled, AssemblyError, Candidate, Seat, assemble};
use crate::format::{NewestError, Superblock, damaged_copies, newest};
use crate::member::{Access, Device, DeviceError, is_remote, same_remote};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use uuid::Uuid;

/// Where members are looked for when nobody says where.
pub const DEFAULT_SEARCH: &str = "/dev/disk/by-id";

/// How long a remote member has been reachable before what is on it is believed to stay: a daemon that was killed leaves
/// requests in the hands of its members' servers, which a new connection does not wait for. Milliseconds are what servers take.
pub(super) const SETTLE: Duration = Duration::from_secs(2);

/// Most entries of a directory that are looked at: a directory with more is not one of members.
const ENTRIES_MAX: usize = 16 << 10;

/// A device with a superblock.
#[derive(Clone, Debug)]
pub struct Found {
    /// Where.
    pub path: PathBuf,
    /// Its current superblock.
    pub superblock: Superblock,
}

/// What a search brought up.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// Members, by array.
    pub arrays: BTreeMap<Uuid, Vec<Found>>,
    /// What looks like a member and cannot be used, or could not be looked at, a line each.
    pub warnings: Vec<String>,
}

/// Why an array cannot be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// Nothing of that name or uuid was found.
    #[error(
        "no member of array '{wanted}' was found in {}: name the directory of its members with --dir",
        list(places)
    )]
    NotFound {
        /// What was asked for.
        wanted: String,
        /// Where it was looked for.
        places: Vec<PathBuf>,
    },
    /// Two arrays have the name.
    #[error("{} arrays are named '{name}': import one by its uuid ({})", uuids.len(), uuids.iter().map(Uuid::to_string).collect::<Vec<_>>().join(", "))]
    Ambiguous {
        /// The name.
        name: String,
        /// Their identities.
        uuids: Vec<Uuid>,
    },
    /// A member is in use or cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The members do not make up an array.
    #[error(transparent)]
    Assembly(#[from] AssemblyError),
}

impl ImportError {
    /// Whether `force` would help.
    #[must_use]
    pub fn needs_force(&self) -> bool {
        matches!(
            self,
            ImportError::Assembly(AssemblyError::NoMajority { .. } | AssemblyError::DirtyDegraded { .. })
        )
    }
}

fn list(places: &[PathBuf]) -> String {
    places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Looks at every path and URI; of a directory at the regular files and block devices directly in it. A device that several
/// paths lead to counts once, under the first.
#[must_use]
pub fn search(places: &[PathBuf]) -> Search {
    let mut search = Search::default();
    let mut seen = HashSet::new();
    let mut uris: Vec<PathBuf> = Vec::new();
    for place in places {
        if is_remote(place) {
            if !uris.iter().any(|other| same_remote(other, place)) {
                uris.push(place.clone());
            }
            continue;
        }
        match std::fs::metadata(place) {
            Ok(meta) if meta.is_dir() => {
                let mut entries: Vec<PathBuf> = match std::fs::read_dir(place) {
                    Ok(entries) => entries.flatten().take(ENTRIES_MAX).map(|entry| entry.path()).collect(),
                    Err(error) => {
                        search.warnings.push(format!("{}: cannot be listed: {error}", place.display()));
                        continue;
                    }
                };
                entries.sort();
                for path in entries {
                    look_at(&path, false, &mut seen, &mut search);
                }
            }
            Ok(_) => look_at(place, true, &mut seen, &mut search),
            Err(error) => search.warnings.push(format!("{}: {error}", place.display())),
        }
    }
    // At the same time: hosts that do not answer cost their time once, not one after the other.
    std::thread::scope(|scope| {
        let look = |uri: &Path| {
            let mut seen = Search::default();
            look_at_device(uri, true, &mut seen);
            seen
        };
        let looking: Vec<_> = uris.iter().map(|uri| scope.spawn(move || look(uri))).collect();
        for thread in looking {
            let found = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            search.warnings.extend(found.warnings);
            for (array, members) in found.arrays {
                search.arrays.entry(array).or_default().extend(members);
            }
        }
    });
    search
}

/// `named`: somebody named this very path, so that everything that is wrong with it is worth a line.
fn look_at(path: &Path, named: bool, seen: &mut HashSet<(u64, u64, u64)>, search: &mut Search) {
    let Ok(meta) = std::fs::metadata(path) else { return };
    let kind = meta.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return;
    }
    let node = if kind.is_block_device() { (0, 0, meta.rdev()) } else { (meta.dev(), meta.ino(), u64::MAX) };
    if !seen.insert(node) {
        return;
    }
    look_at_device(path, named, search);
}

fn look_at_device(path: &Path, named: bool, search: &mut Search) {
    let device = match Device::open(path, Access::ReadOnly) {
        Ok(device) => device,
        Err(error) => {
            if named {
                search.warnings.push(error.to_string());
            } else {
                tracing::debug!(%error, "not looked at");
            }
            return;
        }
    };
    match read_superblock(&device) {
        Ok(superblock) => {
            if let Err(error) = check_length(&device, &superblock) {
                let Superblock { name, member, .. } = superblock;
                search.warnings.push(format!("{error} (it is member {member} of array '{name}')"));
                return;
            }
            let found = Found { path: path.into(), superblock };
            search.arrays.entry(found.superblock.array).or_default().push(found);
        }
        Err(NewestError::NotAMember) => {
            if named {
                search.warnings.push(format!("{}: holds no Calpe superblock", path.display()));
            }
        }
        Err(error) => search.warnings.push(format!("{}: {error}", path.display())),
    }
}

impl Search {
    /// The array of that name or uuid.
    ///
    /// # Errors
    /// When there is none, or the name is not enough.
    pub fn choose(&self, wanted: &str, places: &[PathBuf]) -> Result<Uuid, ImportError> {
        if let Ok(uuid) = wanted.parse()
            && self.arrays.contains_key(&uuid)
        {
            return Ok(uuid);
        }
        let named: Vec<Uuid> = self
            .arrays
            .iter()
            .filter(|(_, members)| newest_found(members).is_some_and(|s| s.name == wanted))
            .map(|(uuid, _)| *uuid)
            .collect();
        match named[..] {
            [] => Err(ImportError::NotFound { wanted: wanted.into(), places: places.to_vec() }),
            [one] => Ok(one),
            _ => Err(ImportError::Ambiguous { name: wanted.into(), uuids: named }),
        }
    }
}

/// The superblock that speaks for an array as far as names go: the newest of them.
#[must_use]
pub fn newest_found(members: &[Found]) -> Option<&Superblock> {
    members.iter().map(|found| &found.superblock).max_by_key(|s| (s.epoch.number, s.sequence))
}

/// How the members would assemble, without locking them; for lists.
///
/// # Errors
/// Why they would not.
pub fn preview(members: &[Found], force: bool) -> Result<Assembled<usize>, AssemblyError> {
    let candidates: Vec<_> = members
        .iter()
        .enumerate()
        .map(|(key, found)| Candidate { key, superblock: found.superblock.clone() })
        .collect();
    assemble(&candidates, force)
}

/// An array whose devices are open and locked.
#[derive(Debug)]
pub struct Opened {
    /// The verdict; keys are places in `devices`.
    pub assembled: Assembled<usize>,
    /// The devices that serve it, or are to be marked as replaced; none where a device was refused.
    pub devices: Vec<Option<Device>>,
    /// Damaged copies of the superblock, by device.
    pub damaged: Vec<(Uuid, u64)>,
    /// What a person should know, a line each.
    pub warnings: Vec<String>,
    /// Where the devices are that were found and could not be opened.
    pub elsewhere: HashMap<Uuid, PathBuf>,
}

/// Opens, locks and assembles the array of these members.
///
/// # Errors
/// When a member is in use, or too few are there. Nothing was changed.
pub fn open(members: &[Found], force: bool) -> Result<Opened, ImportError> {
    let mut warnings = Vec::new();
    let mut devices = Vec::new();
    let mut candidates = Vec::new();
    let mut damaged = Vec::new();
    let mut open = Vec::new();
    let mut elsewhere = HashMap::new();
    for found in members {
        match Device::open(&found.path, Access::Exclusive) {
            Ok(device) => open.push((found, device)),
            // In use: by another daemon perhaps, which serves the array.
            Err(error @ (DeviceError::Locked { .. } | DeviceError::Busy { .. })) => return Err(error.into()),
            Err(error) => {
                warnings.push(format!("{error}; the array starts without it"));
                elsewhere.insert(found.superblock.device, found.path.clone());
            }
        }
    }
    let unclean = members.iter().any(|found| !found.superblock.clean);
    if unclean && open.iter().any(|(found, _)| is_remote(&found.path)) {
        std::thread::sleep(SETTLE);
    }
    for (found, device) in open {
        let copies = read_copies(&device);
        let faults = damaged_copies(&copies);
        match newest(copies.into_iter().flatten()) {
            Ok(superblock)
                if superblock.array == found.superblock.array
                    && check_length(&device, &superblock).is_ok() =>
            {
                if !faults.is_empty() {
                    damaged.push((superblock.device, faults.len() as u64));
                }
                device.set_remote_witness(witness(
                    device.facts().bytes,
                    superblock.array,
                    superblock.device,
                    superblock.sequence,
                ));
                let path = found.path.display();
                warnings.extend(faults.iter().map(|(place, why)| {
                    format!("{path}: superblock copy {} is damaged: {why}; it is written anew", place.word())
                }));
                candidates.push(Candidate { key: devices.len(), superblock });
                devices.push(Some(device));
            }
            _ => warnings.push(format!("{}: changed while it was opened; left out", found.path.display())),
        }
    }
    let assembled = assemble(&candidates, force)?;
    for (key, reason) in &assembled.refused {
        if let Some(device) = &devices[*key] {
            warnings.push(format!("{}: not used: {reason}", device.path().display()));
        }
        if assembled.replaced.iter().all(|(replaced, ..)| replaced != key) {
            devices[*key] = None;
        }
    }
    Ok(Opened { assembled, devices, damaged, warnings, elsewhere })
}

/// The same verdict with other handles.
#[must_use]
pub fn with_handles<K: Clone>(assembled: Assembled<usize>, handle: impl Fn(usize) -> K) -> Assembled<K> {
    let seat = |seat: Seat<usize>| Seat {
        uuid: seat.uuid,
        state: seat.state,
        key: seat.key.map(&handle),
        rebuilt: seat.rebuilt,
        replacement: seat.replacement.map(|(key, uuid, rebuilt)| (handle(key), uuid, rebuilt)),
        reason: seat.reason,
    };
    Assembled {
        superblock: assembled.superblock,
        seats: assembled.seats.into_iter().map(seat).collect(),
        live: assembled.live,
        epoch_is_complete: assembled.epoch_is_complete,
        sequence: assembled.sequence,
        sequences: assembled.sequences,
        epoch_number: assembled.epoch_number,
        resynced: assembled.resynced,
        log_start: assembled.log_start,
        // Their devices are closed already, but for those that were replaced.
        refused: Vec::new(),
        replaced: assembled
            .replaced
            .into_iter()
            .map(|(key, member, uuid)| (handle(key), member, uuid))
            .collect(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::create::{CreatePlan, CreateRequest, DEFAULT_CHUNK};
    use super::*;
    use crate::format::{ChecksumKind, VolumeKind};

    /// Creates an array of sparse files m0, m1, ... and closes them.
    pub(in super::super) fn created_in(dir: &Path, name: &str, data: u16, parity: u16) -> Uuid {
        let request = CreateRequest {
            name: name.into(),
            data,
            parity,
            chunk: DEFAULT_CHUNK,
            checksum: ChecksumKind::Blake3,
            log: true,
            volume: VolumeKind::Plain,
            volume_bytes: Some(8 << 20),
            members: (0..data + parity).map(|i| dir.join(format!("m{i}"))).collect(),
            force: false,
        };
        CreatePlan::new(request).unwrap().execute(0).unwrap().array
    }

    #[test]
    fn members_are_found_by_superblock_whatever_they_are_called() {
        let dir = tempfile::tempdir().unwrap();
        let array = created_in(dir.path(), "tank", 2, 1);
        std::fs::rename(dir.path().join("m1"), dir.path().join("zebra.bin")).unwrap();
        std::os::unix::fs::symlink("m0", dir.path().join("also-m0")).unwrap();
        std::fs::write(dir.path().join("note.txt"), "not a member").unwrap();
        let found = search(&[dir.path().into(), dir.path().join("m2")]);
        assert_eq!(found.arrays.len(), 1);
        assert_eq!(found.arrays[&array].len(), 3);
        assert_eq!(found.warnings, Vec::<String>::new());
        assert_eq!(found.choose("tank", &[]).unwrap(), array);
        assert_eq!(found.choose(&array.to_string(), &[]).unwrap(), array);
        assert!(matches!(found.choose("pond", &[]), Err(ImportError::NotFound { .. })));
    }

    #[test]
    fn what_is_named_and_no_member_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("blank");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let found = search(&[path, dir.path().join("nowhere")]);
        assert!(found.arrays.is_empty());
        assert_eq!(found.warnings.len(), 2, "{:?}", found.warnings);
    }

    #[test]
    fn two_arrays_of_one_name_need_a_uuid() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let first = created_in(one.path(), "tank", 2, 1);
        created_in(two.path(), "tank", 2, 1);
        let found = search(&[one.path().into(), two.path().into()]);
        assert!(matches!(found.choose("tank", &[]), Err(ImportError::Ambiguous { .. })));
        assert_eq!(found.choose(&first.to_string(), &[]).unwrap(), first);
    }

    #[test]
    fn an_array_with_a_member_in_use_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let array = created_in(dir.path(), "tank", 2, 1);
        let members = search(&[dir.path().into()]).arrays.remove(&array).unwrap();
        let opened = open(&members, false).unwrap();
        assert_eq!(opened.devices.iter().flatten().count(), 3);
        assert!(matches!(open(&members, false), Err(ImportError::Device(DeviceError::Locked { .. }))));
        drop(opened);
        open(&members, false).unwrap();
    }

    #[test]
    fn damaged_superblock_copies_are_told_and_counted_and_the_array_opens() {
        use std::os::unix::fs::FileExt;
        let dir = tempfile::tempdir().unwrap();
        let array = created_in(dir.path(), "tank", 2, 1);
        let members = search(&[dir.path().into()]).arrays.remove(&array).unwrap();
        let damage: [fn(&std::fs::File, u64); 2] = [
            |file, _| file.write_all_at(b"x", 16384 + 77).unwrap(),
            // A copy whose first sector was lost looks like none.
            |file, bytes| file.write_all_at(&[0; 512], bytes - 16384).unwrap(),
        ];
        for (at, damage) in damage.into_iter().enumerate() {
            let path = dir.path().join(format!("m{at}"));
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            damage(&file, file.metadata().unwrap().len());
        }
        let opened = open(&members, false).unwrap();
        let mut expected: Vec<_> = members[..2].iter().map(|found| (found.superblock.device, 1)).collect();
        expected.sort();
        let mut damaged = opened.damaged.clone();
        damaged.sort();
        assert_eq!(damaged, expected);
        assert_eq!(opened.assembled.live.len(), 3);
        let told = opened.warnings.join("\n");
        assert!(told.contains("m0: superblock copy head B is damaged"), "{told}");
        assert!(told.contains("m1: superblock copy tail B is damaged: it is not there"), "{told}");
    }

    #[test]
    fn too_few_members_are_told_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let array = created_in(dir.path(), "tank", 2, 1);
        for gone in ["m0", "m2"] {
            std::fs::remove_file(dir.path().join(gone)).unwrap();
        }
        let members = search(&[dir.path().into()]).arrays.remove(&array).unwrap();
        let error = open(&members, true).unwrap_err();
        assert!(!error.needs_force());
        assert!(error.to_string().contains("cannot start"), "{error}");
    }
}
