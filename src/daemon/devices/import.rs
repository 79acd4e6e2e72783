//! Opens and locks the devices of an array that a search has found, and assembles it.
//!
//! Invariants: nothing is written here; decisions are made on superblocks that were read under the lock; a
//! device that cannot be opened, or does not answer, is left out, unless another daemon may serve the array.
//! Must not know of running arrays.

use crate::daemon::devices::copies::{Twins, find_twins};
use crate::daemon::devices::search::{Found, Hindrance, Search, Unusable};
use crate::daemon::devices::superblocks::{Copies, check_length, patiently, read_copies, witness};
use crate::member::patience::{each_at_once, each_within};
use crate::member::{Access, Device, DeviceError, is_held_by_calpe, is_remote};
use calpe_core::array::assembly::{Assembled, AssemblyError, Candidate, Seat, assemble};
use calpe_core::format::{MemberState, ReplacementRecord, Superblock, damaged_copies, newest_read};
use calpe_core::units::{MemberIndex, shown};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Where members are looked for by default.
pub(crate) const DEFAULT_SEARCH: &str = "/dev/disk/by-id";

/// How long a remote member must be reachable before its content counts as settled: servers may still carry
/// out requests of a killed daemon, and a new connection does not wait for those. Servers take milliseconds
/// for them.
pub(crate) const SETTLE: Duration = Duration::from_secs(2);

/// Why an array cannot be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// Nothing of that name or uuid was found.
    #[error(
        "no member of array '{wanted}' was found in {}: check its name, and name every place of its members with --dir{}",
        list(places),
        unused.iter().map(|line| format!("\n{line}")).collect::<String>()
    )]
    NotFound {
        /// What was asked for.
        wanted: String,
        /// The places that were searched.
        places: Vec<PathBuf>,
        /// What was found and cannot be used, a line each: it may be what was wanted.
        unused: Vec<String>,
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
    /// Members could not be looked for: the text says why.
    #[error("{0}")]
    Threadless(String),
    /// The members do not form an array.
    #[error("{}{}{}", told(source, left_out), advice(source), left_out.iter().map(|line| format!("\nleft out: {line}")).collect::<String>())]
    Assembly {
        /// Why not.
        source: AssemblyError,
        /// Devices that are there and were not used, a line each.
        left_out: Vec<String>,
    },
}

impl From<AssemblyError> for ImportError {
    fn from(source: AssemblyError) -> ImportError {
        ImportError::Assembly { source, left_out: Vec::new() }
    }
}

impl ImportError {
    /// Whether `force` would help.
    #[must_use]
    pub fn needs_force(&self) -> bool {
        matches!(
            self,
            ImportError::Assembly {
                source: AssemblyError::NoMajority { .. } | AssemblyError::Unconfirmed { .. },
                ..
            }
        )
    }
}

/// Advice about missing members in an answer to a command. It is left out for arrays that the
/// daemon tries again by itself.
pub(crate) const IMPORT_AGAIN: &str = ": bring them back, then import again";

/// The devices that were found and left out, for the text of the error.
fn told(source: &AssemblyError, left_out: &[String]) -> String {
    match source {
        AssemblyError::Nothing if !left_out.is_empty() => {
            "no device of the array that was found can be used".into()
        }
        source => source.to_string(),
    }
}

/// What to do, where the error itself does not say it.
fn advice(source: &AssemblyError) -> &'static str {
    match source {
        AssemblyError::TooFew { .. } => IMPORT_AGAIN,
        _ => "",
    }
}

fn list(places: &[PathBuf]) -> String {
    places.iter().map(|p| shown(p).to_string()).collect::<Vec<_>>().join(", ")
}

impl Search {
    /// Refuses a search that could not read every place for lack of threads: an array must not start without
    /// members because of that.
    ///
    /// # Errors
    /// [`ImportError::Threadless`].
    pub(crate) fn check_whole(&self) -> Result<(), ImportError> {
        self.threadless.clone().map_or(Ok(()), |why| Err(ImportError::Threadless(why)))
    }

    /// The array of that name or uuid.
    ///
    /// # Errors
    /// When there is none, or the name is not enough.
    pub(crate) fn choose(&self, wanted: &str, places: &[PathBuf]) -> Result<Uuid, ImportError> {
        self.check_whole()?;
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
            [] => Err(ImportError::NotFound {
                wanted: wanted.into(),
                places: places.to_vec(),
                unused: self.not_used(places),
            }),
            [one] => Ok(one),
            _ => Err(ImportError::Ambiguous { name: wanted.into(), uuids: named }),
        }
    }
}

impl ImportError {
    /// Adds what is known of members that were not found, if too few were.
    #[must_use]
    pub fn explained(self, about: impl FnOnce() -> BTreeMap<Uuid, String>) -> ImportError {
        match self {
            ImportError::Assembly {
                source: source @ (AssemblyError::TooFew { .. } | AssemblyError::NoMajority { .. }),
                mut left_out,
            } => {
                for line in about().into_values() {
                    if !left_out.contains(&line) {
                        left_out.push(line);
                    }
                }
                ImportError::Assembly { source, left_out }
            }
            error => error,
        }
    }
}

/// The newest superblock of an array, for its name and geometry.
#[must_use]
pub(crate) fn newest_found(members: &[Found]) -> Option<&Superblock> {
    members.iter().map(|found| &found.superblock).max_by_key(|s| (s.epoch.number, s.sequence))
}

/// How the members would assemble, without locking them; for lists. Those that cannot be written
/// are left out, as [`open`] does.
///
/// # Errors
/// Why they would not.
pub(crate) fn preview(members: &[Found], force: bool) -> Result<Assembled<usize>, ImportError> {
    let mut candidates = candidates_of(members);
    let twins = twins_among(members);
    candidates.retain(|candidate| !twins.iter().any(|(twins, _)| twins.unused.contains(&candidate.key)));
    assemble(&candidates, force).map_err(|source| {
        let left_out = members.iter().filter_map(|found| found.unwritable.clone()).collect();
        ImportError::Assembly { source, left_out }
    })
}

/// Keys are indexes in the list of members.
fn candidates_of(members: &[Found]) -> Vec<Candidate<usize>> {
    let candidates = members.iter().enumerate().filter(|(_, found)| found.unwritable.is_none());
    candidates.map(|(key, found)| Candidate { key, superblock: found.superblock.clone() }).collect()
}

/// Devices that claim to be the same member, with the reason why an import would not use them. Their indexes
/// are those in `members`.
#[must_use]
pub(crate) fn twins_among(members: &[Found]) -> Vec<(Twins, String)> {
    let path = |key: usize| shown(&members[key].path).to_string();
    let candidates = candidates_of(members);
    let key = |at: usize| candidates[at].key;
    let twins = find_twins(&candidates).into_iter();
    twins
        .map(|Twins { device, unused, used }| {
            let unused: Vec<usize> = unused.into_iter().map(key).collect();
            let twins = Twins { device, unused, used: used.map(key) };
            let reason = twins.reason(members[twins.unused[0]].superblock.member, path);
            (twins, reason)
        })
        .collect()
}

/// An array whose devices are open and locked.
#[derive(Debug)]
pub(crate) struct Opened {
    /// The verdict; keys are indexes in `devices`.
    pub assembled: Assembled<usize>,
    /// The devices that serve it, or are to be marked as replaced; none where a device was refused.
    pub devices: Vec<Option<Device>>,
    /// Damaged copies of the superblock, by device.
    pub damaged: Vec<(Uuid, u64)>,
    /// What a person should know, a line each.
    pub warnings: Vec<String>,
    /// Devices that are there and are not used.
    pub left_out: Vec<LeftOut>,
    /// Missing devices that may be among the paths that this user may not read.
    pub forbidden: Vec<Uuid>,
}

impl Opened {
    /// Gives missing members, and replacements that were being built, a reason: what the search has found in
    /// their places. `place`: where the device of an index and identity should be.
    pub(crate) fn explain_missing(&mut self, found: &Search, place: impl Fn(usize, Uuid) -> Option<PathBuf>) {
        let Opened { assembled, left_out, devices, forbidden, .. } = self;
        let dirs = devices.iter().flatten().filter_map(|device| device.path().parent());
        let dirs: Vec<PathBuf> = dirs.map(Path::to_path_buf).collect();
        let perhaps = found.perhaps_forbidden(&dirs);
        let seats = assembled.seats.iter_mut().enumerate();
        for (index, seat) in seats.filter(|(_, seat)| seat.state == MemberState::Missing) {
            if left_out.iter().any(|left| left.device == seat.uuid) {
                continue;
            }
            if let Some(left) = left_in_place(found, seat.uuid, place(index, seat.uuid)) {
                seat.reason = Some(left.reason.clone());
                left_out.push(left);
            } else if let Some(files) = &perhaps {
                let before = seat.reason.take().map(|reason| reason + "; ").unwrap_or_default();
                seat.reason = Some(format!("{before}perhaps it is {files}"));
                forbidden.push(seat.uuid);
            }
        }
        let is_out = |state| matches!(state, MemberState::Faulted | MemberState::Offline);
        let seats = assembled.seats.iter_mut().enumerate();
        for (index, seat) in seats.filter(|(_, seat)| is_out(seat.state)) {
            let left = left_in_place(found, seat.uuid, place(index, seat.uuid));
            // Whatever the member was out for, it cannot come back from there.
            if let Some(left) = left.filter(|left| left.hindrance.is_some_and(Hindrance::is_for_good)) {
                let before = seat.reason.take().map(|reason| reason + "; ").unwrap_or_default();
                seat.reason = Some(before + &left.reason);
                left_out.push(left);
            }
        }
        for (member, device) in lost_replacements(assembled) {
            if left_out.iter().all(|left| left.device != device) {
                left_out.extend(left_in_place(found, device, place(usize::from(member.0), device)));
            }
        }
    }

    /// The lines of a search that are not the reason for a member that was left out.
    pub(crate) fn not_told<'l>(&self, lines: &'l [String]) -> impl Iterator<Item = &'l String> {
        let told: Vec<String> = self.left_out.iter().map(|left| left.reason.clone()).collect();
        lines.iter().filter(move |line| !told.contains(line))
    }
}

/// What a search has found in the place of a device that is not usable.
fn left_in_place(found: &Search, device: Uuid, place: Option<PathBuf>) -> Option<LeftOut> {
    let is_own = |unusable: &&Unusable| match unusable.device {
        Some(own) => own == device,
        None => Some(&unusable.path) == place.as_ref(),
    };
    let unusable = found.unusable.iter().find(is_own).cloned();
    let stranger = |path: PathBuf| {
        let reason = found.stranger_at(&path)?;
        Some(Unusable { path, device: None, reason, hindrance: Some(Hindrance::Stranger) })
    };
    let Unusable { path, reason, hindrance, .. } = unusable.or_else(|| place.and_then(stranger))?;
    Some(LeftOut { device, path: Some(path), reason, hindrance })
}

/// Devices that were being built when the array was stopped, and that are not among its devices now: member
/// and device.
pub(crate) fn lost_replacements<K>(assembled: &Assembled<K>) -> Vec<(MemberIndex, Uuid)> {
    let is_lost = |record: &&ReplacementRecord| {
        let seat = &assembled.seats[usize::from(record.member.0)];
        seat.replacement.is_none() && seat.uuid != record.uuid
    };
    let lost = assembled.superblock.replacements.iter().filter(is_lost);
    lost.map(|record| (record.member, record.uuid)).collect()
}

/// A device of an array that is there and is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeftOut {
    /// Which.
    pub device: Uuid,
    /// Where; none if it is not known which of several it is.
    pub path: Option<PathBuf>,
    /// Why: "PATH: what is wrong".
    pub reason: String,
    /// The kind of trouble, where the advice depends on it.
    pub hindrance: Option<Hindrance>,
}

/// Opens, locks and assembles the array of these members. A device that does not answer within `patience` is
/// left out.
///
/// # Errors
/// When another daemon may serve it, or too few members are there. Nothing was changed.
pub(crate) fn open(members: &[Found], force: bool, patience: Duration) -> Result<Opened, ImportError> {
    let mut warnings = Vec::new();
    let mut damaged = Vec::new();
    let mut opening = Opening::default();
    for (found, device, copies) in opening.open_all(members, patience)? {
        let path = shown(&found.path);
        let faults = damaged_copies(&copies);
        match newest_read(copies) {
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
                warnings.extend(faults.iter().map(|(place, why)| {
                    format!("{path}: superblock copy {} is damaged: {why}; it is written anew", place.word())
                }));
                opening.candidates.push(Candidate { key: opening.devices.len(), superblock });
                opening.devices.push(Some(device));
            }
            outcome => {
                let why = match outcome {
                    Ok(_) => "it changed while it was opened".to_owned(),
                    Err(error) => error.to_string(),
                };
                opening.leave_out(found, format!("{path}: {why}"));
            }
        }
    }
    opening.part_twins();
    let Opening { mut devices, candidates, mut left_out } = opening;
    let mut assembled = match assemble(&candidates, force) {
        Ok(assembled) => assembled,
        Err(source) => {
            let left_out = left_out.into_iter().map(|left| left.reason).collect();
            return Err(ImportError::Assembly { source, left_out });
        }
    };
    for (key, not_used) in &assembled.refused {
        if let Some(device) = &devices[*key] {
            let reason = format!("{}: not used: {}", shown(device.path()), not_used.why);
            let own = candidates.iter().find(|candidate| candidate.key == *key);
            let uuid = own.map_or_else(Uuid::nil, |candidate| candidate.superblock.device);
            let is_missed = |seat: &Seat<usize>| seat.state == MemberState::Missing && seat.uuid == uuid;
            let was_built = || lost_replacements(&assembled).iter().any(|(_, device)| *device == uuid);
            match assembled.seats.iter().any(is_missed) || was_built() {
                true => {
                    let path = Some(device.path().to_owned());
                    let hindrance = not_used.is_kept.then_some(Hindrance::Kept);
                    left_out.push(LeftOut { device: uuid, path, reason, hindrance });
                }
                false => warnings.push(reason),
            }
        }
        if assembled.replaced.iter().all(|(replaced, ..)| replaced != key) {
            devices[*key] = None;
        }
    }
    // Gives the empty seats their reason.
    for seat in assembled.seats.iter_mut().filter(|seat| seat.state == MemberState::Missing) {
        if let Some(left) = left_out.iter().find(|left| left.device == seat.uuid) {
            seat.reason = Some(format!("left out at the start: {}", left.reason));
        }
    }
    Ok(Opened { assembled, devices, damaged, warnings, left_out, forbidden: Vec::new() })
}

/// An array that is being opened.
#[derive(Default)]
struct Opening {
    devices: Vec<Option<Device>>,
    candidates: Vec<Candidate<usize>>,
    left_out: Vec<LeftOut>,
}

impl Opening {
    /// Opens and locks the devices, and reads the copies of their superblocks.
    fn open_all<'f>(
        &mut self,
        members: &'f [Found],
        patience: Duration,
    ) -> Result<Vec<(&'f Found, Device, Copies)>, ImportError> {
        let paths: Vec<PathBuf> = members.iter().map(|found| found.path.clone()).collect();
        let opened = each_within(&paths, "open it", patience, |path| {
            let device = patiently(Instant::now(), || Device::open(path, Access::Exclusive))?;
            // Remote devices are read later, when requests of an earlier daemon have landed.
            let copies = (!is_remote(path)).then(|| read_copies(&device));
            Ok((device, copies))
        });
        let mut all = Vec::new();
        for (found, opened) in members.iter().zip(opened) {
            match opened.and_then(|opened| opened) {
                Ok((device, copies)) => all.push((found, device, copies)),
                // Another daemon has it, and may serve the array.
                Err(error @ DeviceError::Locked { .. }) if is_served_elsewhere(found) => {
                    return Err(error.into());
                }
                // The device may be good: an array must not start without it because of that.
                Err(error @ DeviceError::NoThread { .. }) => return Err(error.into()),
                Err(error) => self.leave_out(found, error.to_string()),
            }
        }
        let unclean = members.iter().any(|found| !found.superblock.clean);
        if unclean && all.iter().any(|(_, _, copies)| copies.is_none()) {
            std::thread::sleep(SETTLE);
        }
        // All at the same time, so that servers that do not answer cost their time once.
        let unread: Vec<&Device> =
            all.iter().filter(|entry| entry.2.is_none()).map(|entry| &entry.1).collect();
        let mut late = each_at_once(&unread, |device| read_copies(device)).into_iter();
        let whole = |(found, device, copies): (_, _, Option<Copies>)| {
            let copies = copies.or_else(|| late.next()).expect("what was not read was read now");
            (found, device, copies)
        };
        Ok(all.into_iter().map(whole).collect())
    }

    fn leave_out(&mut self, found: &Found, reason: String) {
        self.left_out.push(LeftOut {
            device: found.superblock.device,
            path: Some(found.path.clone()),
            reason,
            hindrance: None,
        });
    }

    /// Keeps at most one of several devices that claim to be the same member.
    fn part_twins(&mut self) {
        for twins in find_twins(&self.candidates) {
            let path = |at: usize| {
                let device = self.devices[self.candidates[at].key].as_ref();
                device.map_or_else(String::new, |device| shown(device.path()).to_string())
            };
            let reason = twins.reason(self.candidates[twins.unused[0]].superblock.member, path);
            let Twins { device, unused, used } = twins;
            let hindrance = used.is_none().then_some(Hindrance::Claimed);
            self.left_out.push(LeftOut { device, path: None, reason, hindrance });
            for at in unused {
                self.devices[self.candidates[at].key] = None;
            }
        }
        let devices = &self.devices;
        self.candidates.retain(|candidate| devices[candidate.key].is_some());
    }
}

/// Whether the lock on a member shows that another daemon may serve its array.
fn is_served_elsewhere(found: &Found) -> bool {
    is_remote(&found.path) || is_held_by_calpe(&found.path)
}

/// The same verdict with other handles.
#[must_use]
pub(crate) fn with_handles<K: Clone>(
    assembled: Assembled<usize>,
    handle: impl Fn(usize) -> K,
) -> Assembled<K> {
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
        behind: assembled.behind,
        sequence: assembled.sequence,
        update: assembled.update,
        update_complete: assembled.update_complete,
        rolled_back: assembled.rolled_back,
        sequences: assembled.sequences,
        epoch_number: assembled.epoch_number,
        // Their devices are closed already, except those of replaced members.
        refused: Vec::new(),
        replaced: assembled
            .replaced
            .into_iter()
            .map(|(key, member, uuid)| (handle(key), member, uuid))
            .collect(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::daemon::devices::create::{CreatePlan, CreateRequest, DEFAULT_CHUNK};
    use crate::daemon::devices::search::search;
    use crate::member::DEFAULT_MEMBER_TIMEOUT as PATIENCE;
    use calpe_core::format::{ChecksumKind, VolumeKind};

    /// Creates an array of sparse files m0, m1, ... and closes them.
    pub(crate) fn created_in(dir: &Path, name: &str, data: u16, parity: u16) -> Uuid {
        let request = CreateRequest {
            name: name.into(),
            data,
            parity,
            chunk: DEFAULT_CHUNK,
            checksum: ChecksumKind::Blake3,
            volume: VolumeKind::Plain,
            volume_bytes: Some(8 << 20),
            members: (0..data + parity).map(|i| dir.join(format!("m{i}"))).collect(),
            force: false,
        };
        CreatePlan::new(request).unwrap().execute(0).unwrap().array
    }

    #[test]
    fn devices_that_are_left_out_were_found() {
        let dir = tempfile::tempdir().unwrap();
        let array = created_in(dir.path(), "tank", 2, 1);
        let mut members = search(&[dir.path().into()], PATIENCE).arrays.remove(&array).unwrap();
        for found in &mut members {
            found.unwritable = Some("its filesystem is read-only".into());
        }
        let told = preview(&members, false).unwrap_err().to_string();
        let expected =
            "no device of the array that was found can be used\nleft out: its filesystem is read-only\n";
        assert!(told.starts_with(expected), "{told}");
        assert_eq!(preview(&[], false).unwrap_err().to_string(), "no device of the array was found");
    }

    #[test]
    fn what_keeps_a_member_away_is_known_by_its_kind_and_not_by_words() {
        let dir = tempfile::tempdir().unwrap();
        // Words of a path are no information about what is there.
        let within = dir.path().join("which uid 0 may not read, each of them claims to be member");
        std::fs::create_dir(&within).unwrap();
        let array = created_in(&within, "tank", 2, 1);
        let look = || search(std::slice::from_ref(&within), PATIENCE);
        let opened = |mut found: Search, forbidden: Vec<PathBuf>| {
            let mut opened = open(&found.arrays[&array], false, PATIENCE).unwrap();
            found.forbidden = forbidden;
            opened.explain_missing(&found, |_, _| Some(within.join("m2")));
            let hindrances: Vec<_> = opened.left_out.iter().map(|left| left.hindrance).collect();
            (hindrances, opened.forbidden.len())
        };
        assert_eq!(opened(look(), Vec::new()), (vec![], 0));
        std::fs::copy(within.join("m2"), within.join("copy")).unwrap();
        assert_eq!(opened(look(), Vec::new()), (vec![Some(Hindrance::Claimed)], 0));
        std::fs::remove_file(within.join("copy")).unwrap();
        std::fs::rename(within.join("m2"), dir.path().join("m2")).unwrap();
        assert_eq!(opened(look(), Vec::new()), (vec![], 0), "it is missing, and nothing is known of it");
        assert_eq!(opened(look(), vec![within.join("m2")]), (vec![], 1));
        let pond = tempfile::tempdir().unwrap();
        created_in(pond.path(), "pond", 1, 1);
        std::fs::copy(pond.path().join("m0"), within.join("m2")).unwrap();
        assert_eq!(opened(look(), Vec::new()), (vec![Some(Hindrance::Stranger)], 0));
    }

    #[test]
    fn two_arrays_of_one_name_need_a_uuid() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let first = created_in(one.path(), "tank", 2, 1);
        created_in(two.path(), "tank", 2, 1);
        let found = search(&[one.path().into(), two.path().into()], PATIENCE);
        assert!(matches!(found.choose("tank", &[]), Err(ImportError::Ambiguous { .. })));
        assert_eq!(found.choose(&first.to_string(), &[]).unwrap(), first);
    }

    #[test]
    fn an_array_with_a_member_in_use_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let array = created_in(dir.path(), "tank", 2, 1);
        let members = search(&[dir.path().into()], PATIENCE).arrays.remove(&array).unwrap();
        let opened = open(&members, false, PATIENCE).unwrap();
        assert_eq!(opened.devices.iter().flatten().count(), 3);
        assert!(matches!(
            open(&members, false, PATIENCE),
            Err(ImportError::Device(DeviceError::Locked { .. }))
        ));
        drop(opened);
        open(&members, false, PATIENCE).unwrap();
    }

    #[test]
    fn damaged_superblock_copies_are_told_and_counted_and_the_array_opens() {
        use std::os::unix::fs::FileExt;
        let dir = tempfile::tempdir().unwrap();
        let array = created_in(dir.path(), "tank", 2, 1);
        let members = search(&[dir.path().into()], PATIENCE).arrays.remove(&array).unwrap();
        let damage: [fn(&std::fs::File, u64); 2] = [
            |file, _| file.write_all_at(b"x", 16384 + 77).unwrap(),
            // A copy whose first sector was lost looks as if there were none.
            |file, bytes| file.write_all_at(&[0; 512], bytes - 16384).unwrap(),
        ];
        for (at, damage) in damage.into_iter().enumerate() {
            let path = dir.path().join(format!("m{at}"));
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            damage(&file, file.metadata().unwrap().len());
        }
        let opened = open(&members, false, PATIENCE).unwrap();
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
        let members = search(&[dir.path().into()], PATIENCE).arrays.remove(&array).unwrap();
        let error = open(&members, true, PATIENCE).unwrap_err();
        assert!(!error.needs_force());
        assert!(error.to_string().contains("cannot start"), "{error}");
    }
}
