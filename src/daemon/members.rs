//! Administrators' requests about members: taking them out, bringing them back, replacing them.
//!
//! Invariants: a device is handed to an array only opened, locked, large enough and with sectors that fit; nothing
//! recognised is overwritten without force; when the array refuses, a file created for it is removed. Must not
//! know how requests arrive.

use super::import;
use super::reactor::{ArrayFacts, ArrayId};
use super::report::Place;
use super::service::{Daemon, Done, Outcome, refusal};
use super::superblocks::{read_superblock, reserve_regions, signatures, wipe_ends, wipe_log, witness};
use crate::control::{ErrorCode, MemberRef, RequestError};
use crate::format::{MemberState, NewestError, Role, Superblock};
use crate::member::{self, Access, Device, DeviceError, DeviceKind, RemoteLimits};
use crate::units::MemberIndex;
use crate::volume::{AdminRequest, ArrayState, NewDevice};
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// A member that a request is about.
pub(super) struct Target {
    array: ArrayId,
    name: String,
    superblock: Superblock,
    index: MemberIndex,
    seat: Place,
    remote: RemoteLimits,
}

impl Target {
    fn describe(&self) -> String {
        format!("member {} ({}) of array '{}'", self.index, self.seat.name(), self.name)
    }

    /// Bytes that a device needs to take its place.
    fn needed_bytes(&self) -> u64 {
        self.superblock.device_bytes_min()
    }
}

impl From<DeviceError> for RequestError {
    fn from(error: DeviceError) -> RequestError {
        refusal(ErrorCode::Device, error.to_string())
    }
}

impl Daemon {
    pub(super) fn take_out(&self, array: &str, member: &MemberRef, failed: bool, dry_run: bool) -> Outcome {
        let target = self.target(array, member)?;
        let (word, member) = (if failed { "fail" } else { "take offline" }, target.index);
        if dry_run {
            return Ok(Done::line(format!("would {word} {}", target.describe())));
        }
        let state = self.state_of(&target)?;
        let remote = target.seat.path.as_deref().is_some_and(member::is_remote);
        if remote && matches!(state, MemberState::Missing | MemberState::Faulted) {
            self.returns().keep_out(target.superblock.array, member);
            return Ok(Done::line(format!(
                "{} is {} and stays away until it is brought back with 'calpe online'",
                target.describe(),
                state.as_str()
            )));
        }
        let request = if failed { AdminRequest::Fail { member } } else { AdminRequest::Offline { member } };
        let outcome = self.reactor.admin(target.array, request, Vec::new())?;
        Ok(Done::line(format!("array '{}': {} ({})", target.name, outcome.0, target.seat.name())))
    }

    pub(super) fn online(
        &self,
        array: &str,
        member: &MemberRef,
        path: Option<&Path>,
        dry_run: bool,
    ) -> Outcome {
        let target = self.target(array, member)?;
        let state = self.state_of(&target)?;
        if matches!(state, MemberState::Online | MemberState::Rebuilding) {
            return match path.filter(|path| !target.seat.path.as_ref().is_some_and(|p| same_path(p, path))) {
                Some(_) => Err(refusal(
                    ErrorCode::Refused,
                    format!(
                        "{} is {} already; another device takes its place with 'calpe replace'",
                        target.describe(),
                        state.as_str()
                    ),
                )),
                None => Ok(Done::line(format!("{} is {} already", target.describe(), state.as_str()))),
            };
        }
        let path = match path {
            Some(path) => path.to_owned(),
            None => self.where_is(&target)?,
        };
        let access = if dry_run { Access::ReadOnly } else { Access::Exclusive };
        let device = Device::open(&path, access)?;
        let superblock = target.own_superblock(&device)?;
        check_fit(&target, &device)?;
        if dry_run {
            return Ok(Done::line(format!("would bring back {} from {}", target.describe(), path.display())));
        }
        self.bring_online(&target, device, superblock)
    }

    /// Hands a member's own device to its array again.
    pub(super) fn bring_online(&self, target: &Target, device: Device, superblock: Superblock) -> Outcome {
        check_fit(target, &device)?;
        let id = self.reactor.next_device_id();
        let new = NewDevice {
            device: id,
            uuid: superblock.device,
            bytes: device.facts().bytes,
            superblock: Some(Box::new(superblock)),
            known_zero: false,
        };
        let done =
            self.hand_over(target, new, device, |member, device| AdminRequest::Online { member, device })?;
        self.returns().back(target.superblock.array, target.index);
        Ok(done)
    }

    pub(super) fn replace(
        &self,
        array: &str,
        old: &MemberRef,
        new: &Path,
        force: bool,
        dry_run: bool,
    ) -> Outcome {
        let target = self.target(array, old)?;
        let facts = self.facts(target.array)?;
        let status = &facts.status.members[usize::from(target.index.0)];
        if facts.status.state == ArrayState::Failed {
            return Err(refusal(
                ErrorCode::Refused,
                format!("array '{}' has FAILED: bring its members back before replacing one", target.name),
            ));
        }
        if status.replacement.is_some() {
            return Err(refusal(
                ErrorCode::Refused,
                format!(
                    "a replacement of {} is being built already: wait until it is complete",
                    target.describe()
                ),
            ));
        }
        let access = if dry_run { Access::ReadOnly } else { Access::Exclusive };
        let mut warnings = Vec::new();
        let (device, created) = match Device::open(new, access) {
            Ok(device) => {
                check_fit(&target, &device)?;
                warnings = check_worthless(&device, force)?;
                (Some(device), false)
            }
            Err(DeviceError::NotFound { .. }) => {
                self.check_creatable(&target, new)?;
                (None, true)
            }
            Err(error) => return Err(error.into()),
        };
        if dry_run {
            let what = if created { "a new sparse file" } else { "the device" };
            let message = format!("would replace {} by {what} {}", target.describe(), new.display());
            return Ok(Done { message, warnings });
        }
        let (device, known_zero) = match device {
            Some(device) => {
                let zero = device.discard_all()?;
                if !zero {
                    wipe_ends(&device)?;
                    wipe_log(&device, &target.superblock)?;
                }
                (device, zero)
            }
            None => {
                let device = Device::create_sparse(new, self.file_bytes(&target))?;
                let fit = check_fit(&target, &device);
                if fit.is_err() {
                    // The reason is the answer; a file that stays behind is empty.
                    let _ = std::fs::remove_file(new);
                }
                fit?;
                (device, true)
            }
        };
        let reserved = reserve_regions(&device, &target.superblock);
        if reserved.is_err() && created {
            // As above.
            let _ = std::fs::remove_file(new);
        }
        reserved?;
        let id = self.reactor.next_device_id();
        let bytes = device.facts().bytes;
        let new_device = NewDevice { device: id, uuid: Uuid::new_v4(), bytes, superblock: None, known_zero };
        let outcome = self.hand_over(&target, new_device, device, |member, device| AdminRequest::Replace {
            member,
            device,
        });
        if outcome.is_err() && created {
            // As above.
            let _ = std::fs::remove_file(new);
        }
        outcome.map(|done| Done { warnings, ..done })
    }

    /// Brings back those members of a failed array that are where they were. What was in service when it failed is
    /// current, so nothing is overwritten by this; the array refuses all else.
    pub(super) fn bring_back(&self, array: ArrayId, facts: &ArrayFacts) {
        let gone = self.with_names(array, |names| {
            let members = facts.status.members.iter().zip(&names.seats);
            let gone = members.filter(|(member, seat)| {
                member.state == MemberState::Missing && seat.path.as_ref().is_some_and(|path| path.exists())
            });
            let gone: Vec<MemberIndex> = gone.map(|(member, _)| member.index).collect();
            (names.uuid.to_string(), gone)
        });
        let Some((uuid, gone)) = gone else { return };
        for index in gone {
            if let Err(error) = self.online(&uuid, &MemberRef::Index(index.0), None, false) {
                tracing::debug!(%error, "a member of a failed array is not back");
            }
        }
    }

    /// Hands an open device to an array, and remembers where it is.
    fn hand_over(
        &self,
        target: &Target,
        new: NewDevice,
        device: Device,
        request: impl FnOnce(MemberIndex, NewDevice) -> AdminRequest,
    ) -> Outcome {
        let id = new.device;
        let path = device.path().to_owned();
        device.set_remote_limits(target.remote);
        device.set_remote_witness(witness(device.facts().bytes, target.superblock.array, new.uuid, 0));
        let cached = device.facts().is_cached();
        let place = Place { uuid: new.uuid, path: Some(path.clone()), cached };
        let since = device.since();
        let outcome = self.reactor.admin(target.array, request(target.index, new), vec![(id, device)])?;
        self.with_names(target.array, |names| names.devices.insert(id, place));
        // It may have been lost again meanwhile, which is no reason to keep it out.
        member::forget_lost(&path, since);
        Ok(Done::line(format!("array '{}': {} ({})", target.name, outcome.0, path.display())))
    }

    pub(super) fn target(&self, array: &str, member: &MemberRef) -> Result<Target, RequestError> {
        let id = self.find(array, |served| served.id)?;
        let facts = self.facts(id)?;
        self.find(array, |served| {
            let names = &served.names;
            let current = |index: usize| {
                let status = &facts.status.members[index];
                status.device.and_then(|device| names.devices.get(&device)).unwrap_or(&names.seats[index])
            };
            let width = names.seats.len();
            let index = match member {
                MemberRef::Index(index) => Some(usize::from(*index)).filter(|index| *index < width),
                MemberRef::Uuid(uuid) => (0..width).find(|index| current(*index).uuid == *uuid),
                MemberRef::Path(path) => (0..width).find(|index| {
                    current(*index).path.as_ref().is_some_and(|known| same_path(known, path))
                }),
            };
            let index = index.ok_or_else(|| {
                refusal(
                    ErrorCode::NoSuchMember,
                    format!(
                        "array '{}' has no member {}: name it by its index (0 to {}), its path or its uuid, as \
                         'calpe status {}' shows them",
                        names.name,
                        name_of(member),
                        width - 1,
                        names.name
                    ),
                )
            })?;
            Ok(Target {
                array: id,
                name: names.name.clone(),
                superblock: served.superblock.clone(),
                index: MemberIndex(index as u16),
                seat: current(index).clone(),
                remote: served.remote,
            })
        })?
    }

    fn state_of(&self, target: &Target) -> Result<MemberState, RequestError> {
        Ok(self.facts(target.array)?.status.members[usize::from(target.index.0)].state)
    }

    /// Where the own device of a member is: where it was, or beside its fellows, or in the configured places.
    fn where_is(&self, target: &Target) -> Result<PathBuf, RequestError> {
        let fellows = self.with_names(target.array, |names| {
            let known =
                names.seats.iter().chain(names.devices.values()).filter_map(|place| place.path.as_ref());
            let mut parents: Vec<PathBuf> = known
                .filter(|path| !member::is_remote(path))
                .filter_map(|path| path.parent())
                .map(Path::to_path_buf)
                .collect();
            parents.sort();
            parents.dedup();
            parents
        });
        let own = target.seat.path.clone().filter(|path| member::is_remote(path) || path.exists());
        let wider = fellows.unwrap_or_default().into_iter().chain(self.search_places().iter().cloned());
        // All of /dev is not searched only because a member is there.
        let wider: Vec<PathBuf> = wider.filter(|place| place != Path::new("/dev")).collect();
        for places in [own.into_iter().collect(), wider] {
            let mut found = import::search(&places);
            let members = found.arrays.remove(&target.superblock.array).unwrap_or_default();
            let is_own = |s: &Superblock| {
                s.device == target.seat.uuid && s.member == target.index && s.role == Role::Member
            };
            if let Some(member) = members.into_iter().find(|member| is_own(&member.superblock)) {
                return Ok(member.path);
            }
        }
        Err(refusal(
            ErrorCode::Device,
            format!(
                "the device of {} (uuid {}) was not found: connect it and give its path, or replace it with \
                 'calpe replace {} {} NEW'",
                target.describe(),
                target.seat.uuid,
                target.name,
                target.index
            ),
        ))
    }

    /// Whether a file may be created as a replacement: where the array has files already, and not under /dev.
    fn check_creatable(&self, target: &Target, new: &Path) -> Result<(), RequestError> {
        let facts = self.facts(target.array)?;
        let files = self.with_names(target.array, |names| {
            facts.status.members.iter().any(|member| {
                let place = member.device.and_then(|device| names.devices.get(&device));
                place.and_then(|place| place.path.as_ref()).is_some_and(|path| path.is_file())
            })
        });
        let parent = new.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let in_dev = parent.canonicalize().is_ok_and(|p| p.starts_with("/dev") && !p.starts_with("/dev/shm"));
        if files != Some(true) || in_dev || !parent.is_dir() {
            return Err(DeviceError::NotFound { path: new.to_owned() }.into());
        }
        Ok(())
    }

    /// Size of a file that takes the place of a member: that of its fellows, so that they stay alike.
    fn file_bytes(&self, target: &Target) -> u64 {
        let paths = self.with_names(target.array, |names| {
            names.seats.iter().filter_map(|seat| seat.path.clone()).collect::<Vec<_>>()
        });
        let sizes = paths.unwrap_or_default().into_iter().filter_map(|path| {
            let meta = std::fs::metadata(path).ok()?;
            meta.is_file().then_some(meta.len())
        });
        sizes.min().unwrap_or(0).max(target.needed_bytes())
    }
}

fn name_of(member: &MemberRef) -> String {
    match member {
        MemberRef::Index(index) => index.to_string(),
        MemberRef::Uuid(uuid) => uuid.to_string(),
        MemberRef::Path(path) => path.display().to_string(),
    }
}

fn same_path(known: &Path, given: &Path) -> bool {
    if member::is_remote(known) || member::is_remote(given) {
        return known.as_os_str() == given.as_os_str() || member::same_remote(known, given);
    }
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| absolute(path));
    absolute(known) == absolute(given) || real(known) == real(given)
}

impl Target {
    /// The superblock of a device that must be the target's own.
    pub(super) fn own_superblock(&self, device: &Device) -> Result<Superblock, RequestError> {
        device.set_remote_limits(self.remote);
        own_superblock(self, device)
    }
}

fn own_superblock(target: &Target, device: &Device) -> Result<Superblock, RequestError> {
    let path = device.path().display();
    let refuse = |what: String| {
        let advice = format!("to build it anew: 'calpe replace {} {} NEW'", target.name, target.index);
        Err(refusal(ErrorCode::Refused, format!("{path}: {what}; {advice}")))
    };
    match read_superblock(device) {
        Ok(s) if s.array != target.superblock.array => {
            refuse(format!("is a member of another array, '{}' ({})", s.name, s.array))
        }
        Ok(s) if s.member != target.index => {
            refuse(format!("is member {} of array '{}', not {}", s.member, target.name, target.index))
        }
        Ok(s) if s.device != target.seat.uuid => {
            refuse(format!("once was {}, and has been replaced since", target.describe()))
        }
        Ok(s) => Ok(s),
        Err(NewestError::NotAMember) => refuse("holds no Calpe superblock".into()),
        Err(error) => refuse(error.to_string()),
    }
}

/// Whether a device can hold what a member holds.
fn check_fit(target: &Target, device: &Device) -> Result<(), RequestError> {
    let facts = device.facts();
    let (needed, sector) = (target.needed_bytes(), target.superblock.geometry.sector);
    if facts.bytes < needed {
        return Err(DeviceError::TooShort { path: device.path().into(), bytes: facts.bytes, needed }.into());
    }
    if facts.sector > sector {
        let what = match facts.kind {
            DeviceKind::Block => "device",
            DeviceKind::File => "filesystem",
            DeviceKind::Remote => "server",
        };
        return Err(refusal(
            ErrorCode::Device,
            format!(
                "{}: the {what} has sectors of {} bytes, array '{}' works in {sector}: use another one",
                device.path().display(),
                facts.sector,
                target.name
            ),
        ));
    }
    Ok(())
}

/// Refuses what is recognised on a device, or lists it when forced.
fn check_worthless(device: &Device, force: bool) -> Result<Vec<String>, RequestError> {
    let found = signatures(device)?;
    let path = device.path().display();
    if found.is_empty() || force {
        return Ok(found.iter().map(|signature| format!("{path}: {signature} is destroyed")).collect());
    }
    let lines: Vec<_> = found.iter().map(|signature| format!("{path}: holds {signature}")).collect();
    Err(refusal(
        ErrorCode::NeedsForce,
        format!("{}\nnothing was changed; use --force to overwrite it, which destroys it", lines.join("\n")),
    ))
}
