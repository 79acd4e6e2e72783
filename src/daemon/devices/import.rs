//! Opens and locks the devices of an array that a search has found, and assembles it.
//!
//! Invariants: nothing is written here; decisions are made on superblocks that were read under the lock; a
//! device that cannot be opened, or does not answer, is left out, unless another daemon may serve the array.
//! Must not know of running arrays.

use crate::daemon::devices::copies::{Claim, Twins, find_twins};
use crate::daemon::devices::create::Created;
use crate::daemon::devices::lanes::{DeviceLane, DeviceLanes};
use crate::daemon::devices::search::{Found, Hindrance, Search, Unusable};
use crate::daemon::devices::superblocks::{check_length, patiently, windows_of, witness};
use crate::member::patience::{each_at_once, each_within};
use crate::member::{Access, Device, DeviceError, is_held_by_calpe, is_remote};
use calpe_core::array::assembly::{Assembled, AssemblyError, Candidate, Seat, assemble};
use calpe_core::format::{LanePart, MemberState, ReplacementRecord, Superblock};
use calpe_core::units::{LaneIndex, MemberIndex, shown};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
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
    #[error("{}{}{}{}", in_lane(*lane), told(source, left_out), advice(source), left_out.iter().map(|line| format!("\nleft out: {line}")).collect::<String>())]
    Assembly {
        /// In which of several lanes.
        lane: Option<LaneIndex>,
        /// Why not.
        source: AssemblyError,
        /// Devices that are there and were not used, a line each.
        left_out: Vec<String>,
    },
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

/// The head of an error about one of several lanes.
fn in_lane(lane: Option<LaneIndex>) -> String {
    lane.map_or_else(String::new, |lane| format!("lane {lane}: "))
}

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
                lane,
                source: source @ (AssemblyError::TooFew { .. } | AssemblyError::NoMajority { .. }),
                mut left_out,
            } => {
                for line in about().into_values() {
                    if !left_out.contains(&line) {
                        left_out.push(line);
                    }
                }
                ImportError::Assembly { lane, source, left_out }
            }
            error => error,
        }
    }
}

/// The newest superblock of an array, for its name and geometry: of several lanes that of the first one of
/// which there is any.
#[must_use]
pub(crate) fn newest_found(members: &[Found]) -> Option<&Superblock> {
    let all = members.iter().map(|found| &found.superblock);
    all.max_by_key(|s| (Reverse(s.part.lane), s.epoch.number, s.sequence))
}

/// The lanes of an array with such a superblock; one that is not cut has one, without a number.
fn lanes_of(part: LanePart) -> Vec<Option<LaneIndex>> {
    part.lanes.indices().map(|lane| part.is_cut().then_some(lane)).collect()
}

/// Whether superblocks with these parts are of arrays that are cut in the same way.
fn is_cut_alike(one: LanePart, other: LanePart) -> bool {
    LanePart { lane: other.lane, ..one } == other
}

/// How each lane of the members would assemble, without locking them; for lists. Those that cannot be written
/// are left out, as [`open`] does.
///
/// # Errors
/// Why they would not.
pub(crate) fn preview(members: &[Found], force: bool) -> Result<Vec<Assembled<usize>>, ImportError> {
    let twins = twins_among(members);
    let part = newest_found(members).map_or(LanePart::WHOLE, |superblock| superblock.part);
    let is_used = |(key, found): &(usize, &Found)| {
        let is_twin = twins.iter().any(|(twins, _)| twins.unused.contains(key));
        found.unwritable.is_none() && !is_twin && is_cut_alike(found.superblock.part, part)
    };
    let used: Vec<(usize, &Found)> = members.iter().enumerate().filter(is_used).collect();
    let assembled = lanes_of(part).into_iter().zip(0..).map(|(lane, at): (_, usize)| {
        let superblock = |&(key, found): &(usize, &Found)| {
            let superblock = found.lanes.get(at)?.clone()?;
            Some(Candidate { key, superblock })
        };
        let candidates: Vec<_> = used.iter().filter_map(superblock).collect();
        assemble(&candidates, force).map_err(|source| {
            let left_out = members.iter().filter_map(|found| found.unwritable.clone()).collect();
            ImportError::Assembly { lane, source, left_out }
        })
    });
    assembled.collect()
}

/// Devices that claim to be the same member, with the reason why an import would not use them. Their indexes
/// are those in `members`.
#[must_use]
pub(crate) fn twins_among(members: &[Found]) -> Vec<(Twins, String)> {
    let path = |key: usize| shown(&members[key].path).to_string();
    let (keys, claims): (Vec<usize>, Vec<Claim<'_>>) = members
        .iter()
        .enumerate()
        .filter(|(_, found)| found.unwritable.is_none())
        .map(|(key, found)| {
            let lanes = found.lanes.iter().map(Option::as_ref).collect();
            (key, Claim { device: found.superblock.device, lanes })
        })
        .unzip();
    let key = |at: usize| keys[at];
    let twins = find_twins(&claims).into_iter();
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
    /// Its lanes, in order: one where it is not cut.
    pub lanes: Vec<OpenedLane>,
    /// Damaged copies of the superblock, by device.
    pub damaged: Vec<(Uuid, u64)>,
    /// What a person should know, a line each.
    pub warnings: Vec<String>,
    /// Devices that are there and are not used.
    pub left_out: Vec<LeftOut>,
    /// Missing devices that may be among the paths that this user may not read.
    pub forbidden: Vec<Uuid>,
}

/// One lane of an array whose devices are open.
#[derive(Debug)]
pub(crate) struct OpenedLane {
    /// The verdict; keys are indexes in `devices`.
    pub assembled: Assembled<usize>,
    /// Windows of the devices that serve it, or are to be marked as replaced; none where one was refused.
    pub devices: Vec<Option<Device>>,
}

impl Opened {
    /// The first lane as it is assembled, for what all lanes have in common: name, identity, members.
    pub(crate) fn first(&self) -> &Assembled<usize> {
        &self.lanes[0].assembled
    }

    /// Gives missing members, and replacements that were being built, a reason: what the search has found in
    /// their places. `place`: where the device of an index and identity should be.
    pub(crate) fn explain_missing(&mut self, found: &Search, place: impl Fn(usize, Uuid) -> Option<PathBuf>) {
        let Opened { lanes, left_out, forbidden, .. } = self;
        let dirs: BTreeSet<PathBuf> = lanes
            .iter()
            .flat_map(|lane| lane.devices.iter().flatten())
            .filter_map(|device| device.path().parent().map(Path::to_path_buf))
            .collect();
        let perhaps = found.perhaps_forbidden(&dirs.into_iter().collect::<Vec<_>>());
        // A device that is used in one lane is there: what keeps it out of another is known already.
        let used: BTreeSet<Uuid> = lanes.iter().flat_map(OpenedLane::used).collect();
        let known: Vec<Uuid> = left_out.iter().map(|left| left.device).collect();
        for assembled in lanes.iter_mut().map(|lane| &mut lane.assembled) {
            let seats = assembled.seats.iter_mut().enumerate();
            for (index, seat) in seats.filter(|(_, seat)| seat.state == MemberState::Missing) {
                if known.contains(&seat.uuid) || used.contains(&seat.uuid) {
                    continue;
                }
                if let Some(left) = left_in_place(found, seat.uuid, place(index, seat.uuid)) {
                    seat.reason = Some(left.reason.clone());
                    add(left_out, left);
                } else if let Some(files) = &perhaps {
                    let before = seat.reason.take().map(|reason| reason + "; ").unwrap_or_default();
                    seat.reason = Some(format!("{before}perhaps it is {files}"));
                    if !forbidden.contains(&seat.uuid) {
                        forbidden.push(seat.uuid);
                    }
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
                    add(left_out, left);
                }
            }
            for (member, device) in lost_replacements(assembled) {
                if left_out.iter().all(|left| left.device != device) {
                    left_out.extend(left_in_place(found, device, place(usize::from(member.0), device)));
                }
            }
        }
    }

    /// The lines of a search that are not the reason for a member that was left out.
    pub(crate) fn not_told<'l>(&self, lines: &'l [String]) -> impl Iterator<Item = &'l String> {
        let told: Vec<String> = self.left_out.iter().map(|left| left.reason.clone()).collect();
        lines.iter().filter(move |line| !told.contains(line))
    }
}

impl OpenedLane {
    /// The identities of the devices that serve it.
    fn used(&self) -> impl Iterator<Item = Uuid> {
        let seats = self.assembled.seats.iter();
        seats.flat_map(|seat| {
            let own = seat.key.map(|_| seat.uuid);
            own.into_iter().chain(seat.replacement.as_ref().map(|(_, uuid, _)| *uuid))
        })
    }
}

/// Adds what is not in the list.
fn add(left_out: &mut Vec<LeftOut>, left: LeftOut) {
    if !left_out.contains(&left) {
        left_out.push(left);
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
/// left out; one whose superblock of a lane cannot be used, of that lane.
///
/// # Errors
/// When another daemon may serve it, or too few members are there, in any lane. Nothing was changed.
pub(crate) fn open(members: &[Found], force: bool, patience: Duration) -> Result<Opened, ImportError> {
    let mut warnings = Vec::new();
    let mut damaged = Vec::new();
    let mut opening = Opening::default();
    let part = newest_found(members).map_or(LanePart::WHOLE, |superblock| superblock.part);
    for (found, device, lanes) in opening.open_all(members, patience)? {
        let path = shown(&found.path);
        let why = match lanes.first() {
            Ok(superblock)
                if superblock.array == found.superblock.array
                    && check_length(&device, superblock).is_ok() =>
            {
                let alike = is_cut_alike(superblock.part, part);
                (!alike).then(|| "it is cut into lanes in another way than other members".to_owned())
            }
            Ok(_) => Some("it changed while it was opened".to_owned()),
            Err(error) => Some(error.to_string()),
        };
        if let Some(why) = why {
            opening.leave_out(found, format!("{path}: {why}"));
            continue;
        }
        let faults = lanes.words_for_damaged();
        if !faults.is_empty() {
            damaged.push((found.superblock.device, faults.len() as u64));
        }
        let is_written = |fault| format!("{path}: superblock copy {fault}; it is written anew");
        warnings.extend(faults.into_iter().map(is_written));
        opening.take(device, &lanes);
    }
    opening.part_twins();
    let lanes = lanes_of(part).into_iter().zip(0..).map(|(lane, at)| opening.assemble(lane, at, force));
    let lanes = lanes.collect::<Result<Vec<OpenedLane>, ImportError>>()?;
    warnings.extend(opening.note_refused(&lanes));
    let left_out = opening.left_out;
    let mut opened = Opened { lanes, damaged, warnings, left_out, forbidden: Vec::new() };
    // Gives the empty seats their reason.
    for assembled in opened.lanes.iter_mut().map(|lane| &mut lane.assembled) {
        for seat in assembled.seats.iter_mut().filter(|seat| seat.state == MemberState::Missing) {
            if let Some(left) = opened.left_out.iter().find(|left| left.device == seat.uuid) {
                seat.reason = Some(format!("left out at the start: {}", left.reason));
            }
        }
    }
    Ok(opened)
}

/// A new array, as if it had been opened.
///
/// # Errors
/// When its devices do not assemble.
pub(crate) fn opened_new(created: Created) -> Result<Opened, ImportError> {
    let mut opening = Opening::default();
    let part = created.members.first().map_or(LanePart::WHOLE, |(_, superblocks)| superblocks[0].part);
    for (device, superblocks) in created.members {
        let windows = device.windows(&windows_of(part, device.facts().bytes));
        let windows = windows.into_iter().map(Some).collect();
        let lanes = superblocks.into_iter().map(Ok).collect();
        opening.devices.push(Some(OpenedDevice { path: device.path().into(), lanes, windows }));
    }
    let lanes = lanes_of(part).into_iter().zip(0..).map(|(lane, at)| opening.assemble(lane, at, false));
    let lanes = lanes.collect::<Result<Vec<OpenedLane>, ImportError>>()?;
    let (damaged, warnings) = (Vec::new(), Vec::new());
    Ok(Opened { lanes, damaged, warnings, left_out: Vec::new(), forbidden: Vec::new() })
}

/// An array that is being opened.
#[derive(Default)]
struct Opening {
    /// By key; none for twins that are not used.
    devices: Vec<Option<OpenedDevice>>,
    left_out: Vec<LeftOut>,
}

/// A device whose superblocks were read under its lock.
struct OpenedDevice {
    path: PathBuf,
    /// The superblock of each lane, or why none can be used.
    lanes: Vec<Result<Superblock, String>>,
    /// Its windows, until the lanes have them.
    windows: Vec<Option<Device>>,
}

impl OpenedDevice {
    fn first(&self) -> Option<&Superblock> {
        self.lanes.iter().flatten().next()
    }
}

impl Opening {
    /// Opens and locks the devices, and reads the copies of their superblocks.
    fn open_all<'f>(
        &mut self,
        members: &'f [Found],
        patience: Duration,
    ) -> Result<Vec<(&'f Found, Device, DeviceLanes)>, ImportError> {
        let paths: Vec<PathBuf> = members.iter().map(|found| found.path.clone()).collect();
        let opened = each_within(&paths, "open it", patience, |path| {
            let device = patiently(Instant::now(), || Device::open(path, Access::Exclusive))?;
            // Remote devices are read later, when requests of an earlier daemon have landed.
            let lanes = (!is_remote(path)).then(|| DeviceLanes::read(&device));
            Ok((device, lanes))
        });
        let mut all = Vec::new();
        for (found, opened) in members.iter().zip(opened) {
            match opened.and_then(|opened| opened) {
                Ok((device, lanes)) => all.push((found, device, lanes)),
                // Another daemon has it, and may serve the array.
                Err(error @ DeviceError::Locked { .. }) if is_served_elsewhere(found) => {
                    return Err(error.into());
                }
                // The device may be good: an array must not start without it because of that.
                Err(error @ DeviceError::NoThread { .. }) => return Err(error.into()),
                Err(error) => self.leave_out(found, error.to_string()),
            }
        }
        let unclean = members.iter().any(|found| found.lanes.iter().flatten().any(|lane| !lane.clean));
        if unclean && all.iter().any(|(_, _, lanes)| lanes.is_none()) {
            std::thread::sleep(SETTLE);
        }
        // All at the same time, so that servers that do not answer cost their time once.
        let unread: Vec<&Device> =
            all.iter().filter(|entry| entry.2.is_none()).map(|entry| &entry.1).collect();
        let mut late = each_at_once(&unread, |device| DeviceLanes::read(device)).into_iter();
        let whole = |(found, device, lanes): (_, _, Option<DeviceLanes>)| {
            let lanes = lanes.or_else(|| late.next()).expect("what was not read was read now");
            (found, device, lanes)
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

    /// Takes a device for the lanes of which it has a superblock.
    fn take(&mut self, device: Device, lanes: &DeviceLanes) {
        let windows = device.windows(&lanes.windows(device.facts().bytes));
        for (window, superblock) in windows.iter().zip(lanes.superblocks()) {
            if let Some(superblock) = superblock {
                let Superblock { array, device, sequence, .. } = *superblock;
                window.set_remote_witness(witness(window.facts().bytes, array, device, sequence));
            }
        }
        let superblock = |lane: &DeviceLane| lane.superblock.clone().map_err(|error| error.to_string());
        self.devices.push(Some(OpenedDevice {
            path: device.path().into(),
            lanes: lanes.lanes.iter().map(superblock).collect(),
            windows: windows.into_iter().map(Some).collect(),
        }));
    }

    /// Keeps at most one of several devices that claim to be the same member.
    fn part_twins(&mut self) {
        let claim = |device: &OpenedDevice| Some(device.first()?.device);
        let claims = self.devices.iter().flatten().map(|device| Claim {
            device: claim(device).expect("a device that was taken has a superblock"),
            lanes: device.lanes.iter().map(|lane| lane.as_ref().ok()).collect(),
        });
        let all: Vec<Twins> = find_twins(&claims.collect::<Vec<_>>());
        for twins in all {
            let device = |at: usize| self.devices[at].as_ref().expect("none was taken away before");
            let member =
                device(twins.unused[0]).first().map_or(MemberIndex(0), |superblock| superblock.member);
            let reason = twins.reason(member, |at| shown(&device(at).path).to_string());
            let Twins { device, unused, used } = twins;
            let hindrance = used.is_none().then_some(Hindrance::Claimed);
            self.left_out.push(LeftOut { device, path: None, reason, hindrance });
            for at in unused {
                self.devices[at] = None;
            }
        }
    }

    /// Assembles a lane, and gives it the windows of its devices.
    fn assemble(
        &mut self,
        lane: Option<LaneIndex>,
        at: usize,
        force: bool,
    ) -> Result<OpenedLane, ImportError> {
        let devices = self.devices.iter().enumerate();
        let candidates: Vec<Candidate<usize>> = devices
            .filter_map(|(key, device)| {
                let superblock = device.as_ref()?.lanes[at].as_ref().ok()?.clone();
                Some(Candidate { key, superblock })
            })
            .collect();
        let mut assembled = assemble(&candidates, force).map_err(|source| {
            let mut left_out: Vec<String> = self.left_out.iter().map(|left| left.reason.clone()).collect();
            left_out.extend(self.unusable(at).map(|(_, reason)| reason));
            ImportError::Assembly { lane, source, left_out }
        })?;
        for (device, reason) in self.unusable(at) {
            for seat in assembled.seats.iter_mut().filter(|seat| seat.key.is_none() && seat.uuid == device) {
                seat.reason = Some(format!("left out at the start: {reason}"));
            }
        }
        let is_replaced = |key| assembled.replaced.iter().any(|(replaced, ..)| *replaced == key);
        let is_refused = |key| assembled.refused.iter().any(|(refused, _)| *refused == key);
        let is_used = |key| is_replaced(key) || !is_refused(key);
        let devices = self.devices.iter_mut().enumerate().map(|(key, device)| {
            let device = device.as_mut().filter(|device| device.lanes[at].is_ok() && is_used(key))?;
            device.windows[at].take()
        });
        let devices = devices.collect();
        Ok(OpenedLane { assembled, devices })
    }

    /// Devices without a usable superblock of a lane: their identities, and why.
    fn unusable(&self, at: usize) -> impl Iterator<Item = (Uuid, String)> {
        self.devices.iter().flatten().filter_map(move |device| {
            let why = device.lanes[at].as_ref().err()?;
            Some((device.first()?.device, format!("{}: lane {at}: {why}", shown(&device.path))))
        })
    }

    /// Notes the devices that no lane uses. Returns a warning for each that was not missed, and for each that
    /// some lanes start without.
    fn note_refused(&mut self, lanes: &[OpenedLane]) -> Vec<String> {
        let mut warnings = Vec::new();
        let without = |uuid: Uuid| {
            let superblock = &lanes[0].assembled.superblock;
            let member = superblock.members.iter().position(|member| member.uuid == uuid);
            let advice = member.map_or_else(String::new, |member| {
                let which = format!("{} {member}", superblock.name);
                format!(": to have it there, too, bring it back with 'calpe online {which}'")
            });
            format!("that lane starts without it{advice}")
        };
        for at in 0..lanes.len() {
            let unusable = self.unusable(at);
            warnings.extend(unusable.map(|(uuid, reason)| format!("{reason}; {}", without(uuid))));
        }
        for (key, device) in self.devices.iter().enumerate() {
            let Some(device) = device else { continue };
            let uuid = device.first().map_or_else(Uuid::nil, |superblock| superblock.device);
            let refusals: Vec<_> = lanes
                .iter()
                .enumerate()
                .filter_map(|(at, lane)| Some((at, lane.assembled.refused.iter().find(|(k, _)| *k == key)?)))
                .collect();
            let Some((_, (_, not_used))) = refusals.first() else { continue };
            let path = shown(&device.path);
            let usable = device.lanes.iter().filter(|lane| lane.is_ok()).count();
            if refusals.len() < usable {
                warnings.extend(refusals.iter().map(|(at, (_, not_used))| {
                    format!("{path}: lane {at}: not used: {}; {}", not_used.why, without(uuid))
                }));
                continue;
            }
            let reason = format!("{path}: not used: {}", not_used.why);
            let is_missed = |lane: &OpenedLane| {
                let is_it = |seat: &Seat<usize>| seat.state == MemberState::Missing && seat.uuid == uuid;
                let was_built = |(_, device): &(MemberIndex, Uuid)| *device == uuid;
                lane.assembled.seats.iter().any(is_it)
                    || lost_replacements(&lane.assembled).iter().any(was_built)
            };
            match lanes.iter().any(is_missed) {
                true => {
                    let path = Some(device.path.clone());
                    let is_kept = refusals.iter().any(|(_, (_, not_used))| not_used.is_kept);
                    let hindrance = is_kept.then_some(Hindrance::Kept);
                    self.left_out.push(LeftOut { device: uuid, path, reason, hindrance });
                }
                false => warnings.push(reason),
            }
        }
        warnings
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
        built: seat.built,
        replacement: seat.replacement.map(|(key, uuid, built)| (handle(key), uuid, built)),
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
        created_with_lanes(dir, name, data, parity, 1)
    }

    /// The same, cut into lanes.
    pub(crate) fn created_with_lanes(dir: &Path, name: &str, data: u16, parity: u16, lanes: u16) -> Uuid {
        let request = CreateRequest {
            name: name.into(),
            data,
            parity,
            chunk: DEFAULT_CHUNK,
            checksum: ChecksumKind::Blake3,
            volume: VolumeKind::Plain,
            volume_bytes: Some(8 << 20),
            lanes,
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
        assert_eq!(opened.lanes[0].devices.iter().flatten().count(), 3);
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
        assert_eq!(opened.first().live.len(), 3);
        let told = opened.warnings.join("\n");
        assert!(told.contains("m0: superblock copy head B is damaged"), "{told}");
        assert!(told.contains("m1: superblock copy tail B is damaged: it is not there"), "{told}");
    }

    /// Overwrites all copies of the superblock of a lane.
    fn wipe_lane(path: &Path, lane: usize) {
        let device = Device::open(path, Access::Exclusive).unwrap();
        let windows = DeviceLanes::read(&device).windows(device.facts().bytes);
        let window = device.window(&windows[lane]);
        for offset in calpe_core::format::all_copy_offsets(window.facts().bytes) {
            window.write_at(offset.0, &[0; calpe_core::format::COPY_BYTES]).unwrap();
        }
        device.close();
    }

    #[test]
    fn every_lane_has_windows_of_all_members_and_starts_without_those_whose_superblock_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let array = created_with_lanes(dir.path(), "tank", 2, 1, 3);
        wipe_lane(&dir.path().join("m1"), 2);
        let members = search(&[dir.path().into()], PATIENCE).arrays.remove(&array).unwrap();
        let readable: Vec<usize> = members.iter().map(|found| found.lanes.iter().flatten().count()).collect();
        assert_eq!(readable, [3, 2, 3]);
        let opened = open(&members, false, PATIENCE).unwrap();
        let told = opened.warnings.join("\n");
        assert!(told.contains("m1: lane 2: no Calpe superblock; that lane starts without it"), "{told}");
        assert_eq!(opened.left_out, []);
        for (at, lane) in opened.lanes.iter().enumerate() {
            let part = lane.assembled.superblock.part;
            assert_eq!((usize::from(part.lane.0), part.lanes.count), (at, 3));
            let windows: Vec<_> = lane.devices.iter().flatten().collect();
            assert_eq!((windows.len(), lane.assembled.live.len()), if at == 2 { (2, 2) } else { (3, 3) });
            for window in windows {
                let found = crate::daemon::devices::superblocks::read_superblock(window).unwrap();
                assert_eq!(found.part, part, "its own window");
            }
        }
        let seat = opened.lanes[2].assembled.seats.iter().find(|seat| seat.key.is_none()).unwrap();
        assert!(seat.reason.as_ref().is_some_and(|why| why.contains("m1: lane 2: ")), "{seat:?}");
        drop(opened);
        // One more than may be missing, in one lane.
        wipe_lane(&dir.path().join("m0"), 2);
        let members = search(&[dir.path().into()], PATIENCE).arrays.remove(&array).unwrap();
        let error = open(&members, false, PATIENCE).unwrap_err().to_string();
        assert!(error.starts_with("lane 2: ") && error.contains("m0: lane 2: "), "{error}");
        assert!(preview(&members, false).unwrap_err().to_string().starts_with("lane 2: "));
    }

    #[test]
    fn a_copy_of_a_device_of_several_lanes_is_used_in_no_lane_unless_it_is_current() {
        let dir = tempfile::tempdir().unwrap();
        let array = created_with_lanes(dir.path(), "tank", 2, 1, 2);
        std::fs::copy(dir.path().join("m1"), dir.path().join("copy")).unwrap();
        let look = || search(&[dir.path().into()], PATIENCE).arrays.remove(&array).unwrap();
        let opened = open(&look(), false, PATIENCE).unwrap();
        assert!(opened.lanes.iter().all(|lane| lane.devices.iter().flatten().count() == 2));
        assert_eq!(opened.left_out[0].hindrance, Some(Hindrance::Claimed));
        drop(opened);
        wipe_lane(&dir.path().join("copy"), 1);
        let opened = open(&look(), false, PATIENCE).unwrap();
        assert!(opened.lanes.iter().all(|lane| lane.devices.iter().flatten().count() == 3));
        assert!(
            opened.left_out[0].reason.contains("copy: an older copy of member 1"),
            "{:?}",
            opened.left_out
        );
    }

    #[test]
    fn a_device_that_is_cut_in_another_way_is_left_out() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let array = created_with_lanes(dir.path(), "tank", 2, 1, 2);
        created_with_lanes(other.path(), "tank", 2, 1, 4);
        let look = || search(&[dir.path().into()], PATIENCE).arrays.remove(&array).unwrap();
        let (before, path) = (look(), dir.path().join("m2"));
        // The device says the same of itself, but for how it is cut.
        let stranger = Device::open(&other.path().join("m2"), Access::Exclusive).unwrap();
        let own = &before[2].superblock;
        let lanes = DeviceLanes::read(&stranger);
        for (lane, window) in lanes.superblocks().flatten().zip(lanes.windows(stranger.facts().bytes)) {
            let (array, device, members) = (own.array, own.device, own.members.clone());
            let superblock = Superblock { array, device, members, ..lane.clone() };
            crate::daemon::devices::superblocks::write_superblock(&stranger.window(&window), &superblock)
                .unwrap();
        }
        stranger.close();
        std::fs::rename(other.path().join("m2"), &path).unwrap();
        let opened = open(&look(), false, PATIENCE);
        let told = match &opened {
            Ok(opened) => opened.left_out[0].reason.clone(),
            Err(error) => error.to_string(),
        };
        assert!(told.contains("cut into lanes in another way than other members"), "{told}");
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
