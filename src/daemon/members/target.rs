//! The member that a request names, and where its own device is. Must not know what the request asks for.

use crate::control::{ErrorCode, MemberRef, RequestError};
use crate::daemon::arrays::names::Place;
use crate::daemon::arrays::outcome::refusal;
use crate::daemon::arrays::registry::Arrays;
use crate::daemon::devices::looking::{identity_of, patience};
use crate::daemon::devices::search::{Found, Hindrance, Unusable, search};
use crate::daemon::reactor::ArrayId;
use crate::member::{Device, TimeLimits};
use calpe_core::format::{MemberState, NewestError, Role, Superblock};
use calpe_core::units::{MemberIndex, Printable, shown};
use std::path::{Path, PathBuf};

/// Result of a search for a member's own device.
pub(crate) struct Sought {
    /// Devices that claim to be it: one, or copies of one.
    pub(crate) copies: Vec<Found>,
    /// What is wrong with its device, if that was cut off.
    pub(crate) cut_off: Option<String>,
    /// Whether a named place holds no superblock.
    pub(crate) is_overwritten: bool,
    /// The first other problem with the places.
    warning: Option<String>,
}

/// The member that a request names.
pub(crate) struct Target {
    pub(crate) array: ArrayId,
    pub(crate) name: String,
    pub(crate) superblock: Superblock,
    pub(crate) index: MemberIndex,
    pub(crate) seat: Place,
    pub(crate) limits: TimeLimits,
}

impl Target {
    pub(crate) fn describe(&self) -> String {
        format!("member {} ({}) of array '{}'", self.index, Printable(&self.seat.name()), self.name)
    }

    /// Bytes that a device needs to take its place.
    pub(crate) fn needed_bytes(&self) -> u64 {
        self.superblock.whole_device_bytes_min()
    }

    /// Searches places for the target's own device.
    pub(crate) fn seek(&self, places: &[PathBuf]) -> Sought {
        let mut found = search(places, patience(self.limits));
        let is_own =
            |s: &Superblock| s.device == self.seat.uuid && s.member == self.index && s.role == Role::Member;
        let is_cut = |other: &&Unusable| {
            other.device == Some(self.seat.uuid) && other.hindrance == Some(Hindrance::CutOff)
        };
        let members = found.arrays.remove(&self.superblock.array).unwrap_or_default();
        Sought {
            copies: members.into_iter().filter(|member| is_own(&member.superblock)).collect(),
            cut_off: found.unusable.iter().find(is_cut).map(|cut| cut.reason.clone()),
            is_overwritten: !found.blank.is_empty(),
            warning: found.warnings.into_iter().next(),
        }
    }

    /// An error for a device that no search has found.
    pub(crate) fn not_found(&self, there: &Sought) -> RequestError {
        refusal(
            ErrorCode::Device,
            format!(
                "the device of {} (uuid {}) was not found{}; connect it and give its path with --path; one that is gone for \
                 good, or overwritten, is replaced with 'calpe replace {} {} NEW', unless the array has FAILED",
                self.describe(),
                self.seat.uuid,
                there.warning.as_ref().map(|line| format!(": {line}")).unwrap_or_default(),
                self.name,
                self.index
            ),
        )
    }

    /// The path of the newest of these devices, each of which claims to be the target's.
    pub(crate) fn current_of(&self, copies: &[Found]) -> Result<PathBuf, RequestError> {
        let age = |found: &Found| (found.superblock.epoch.number, found.superblock.sequence);
        let newest = copies.iter().map(age).max();
        let current: Vec<&Path> = copies
            .iter()
            .filter(|found| Some(age(found)) == newest)
            .map(|found| found.path.as_path())
            .collect();
        if let [one] = current[..] {
            return Ok(one.to_owned());
        }
        let paths: Vec<String> = current.iter().map(|path| shown(path).to_string()).collect();
        let what = format!(
            "{}: each of them claims to be member {index} of array '{name}', and nothing tells which is the copy: move the copy away, or \
             name the one to use: 'calpe online {name} {index} --path PATH'",
            paths.join(", "),
            index = self.index,
            name = self.name
        );
        Err(refusal(ErrorCode::Refused, what))
    }

    /// Checks that a device with this superblock is the target's own.
    pub(crate) fn check_own(
        &self,
        device: &Device,
        superblock: Result<&Superblock, &NewestError>,
    ) -> Result<(), RequestError> {
        let path = shown(device.path());
        let refuse = |what: String| {
            let advice = format!("to build it anew: 'calpe replace {} {} NEW'", self.name, self.index);
            Err(refusal(ErrorCode::Refused, format!("{path}: {what}; {advice}")))
        };
        match superblock {
            Ok(s) if s.array != self.superblock.array => {
                refuse(format!("is a member of another array, '{}' ({})", s.name, s.array))
            }
            Ok(s) if s.member != self.index => {
                refuse(format!("is member {} of array '{}', not {}", s.member, self.name, self.index))
            }
            Ok(s) if s.device != self.seat.uuid => {
                refuse(format!("once was {}, and has been replaced since", self.describe()))
            }
            Ok(_) => Ok(()),
            Err(NewestError::NotAMember) => refuse("holds no Calpe superblock".into()),
            Err(error) => refuse(error.to_string()),
        }
    }
}

/// Looks up the member that a request names.
///
/// # Errors
/// When there is no such array, or it has no such member.
pub(crate) fn find(arrays: &Arrays, array: &str, member: &MemberRef) -> Result<Target, RequestError> {
    let id = arrays.find(array, |served| served.id)?;
    let facts = arrays.facts(id)?;
    // Outside the lock: the path may lead to a device that does not answer.
    let identity = match member {
        MemberRef::Path(path) if !arrays.find(array, |served| served.names.is_known(path))? => {
            identity_of(path)
        }
        _ => None,
    };
    arrays.find(array, |served| {
        let names = &served.names;
        let current = |index: usize| {
            let status = &facts.status.members[index];
            status.device.and_then(|device| names.place_of(device)).unwrap_or(&names.seats()[index])
        };
        let width = names.seats().len();
        let index = match member {
            MemberRef::Index(index) => Some(usize::from(*index)).filter(|index| *index < width),
            MemberRef::Uuid(uuid) => (0..width).find(|index| current(*index).uuid == *uuid),
            MemberRef::Path(path) => (0..width).find(|index| current(*index).is_at(path, identity)),
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
            limits: served.limits,
        })
    })?
}

/// The state of a member now.
pub(crate) fn state_of(arrays: &Arrays, target: &Target) -> Result<MemberState, RequestError> {
    Ok(arrays.facts(target.array)?.status.members[usize::from(target.index.0)].state)
}

fn name_of(member: &MemberRef) -> String {
    match member {
        MemberRef::Index(index) => index.to_string(),
        MemberRef::Uuid(uuid) => uuid.to_string(),
        MemberRef::Path(path) => shown(path).to_string(),
    }
}
