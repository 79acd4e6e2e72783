//! A member that a request is about, and where its own device is. Must not know what is asked of
//! it.

use super::members::patience;
use super::reactor::ArrayId;
use super::report::Place;
use super::search::{Found, Hindrance, Unusable, search};
use super::service::refusal;
use crate::control::{ErrorCode, RequestError};
use crate::member::{Device, TimeLimits};
use calpe_core::format::{NewestError, Role, Superblock};
use calpe_core::units::{MemberIndex, Printable, shown};
use std::path::{Path, PathBuf};

/// What a search for a member's own device shows.
pub(super) struct Sought {
    /// Devices that say that they are it: one, or copies of one.
    pub(super) copies: Vec<Found>,
    /// What is wrong with its device where that was cut off.
    pub(super) cut_off: Option<String>,
    /// Whether a place that was named has nothing of Calpe.
    pub(super) is_overwritten: bool,
    /// What else is wrong with the places, the first of all that is.
    warning: Option<String>,
}

/// A member that a request is about.
pub(super) struct Target {
    pub(super) array: ArrayId,
    pub(super) name: String,
    pub(super) superblock: Superblock,
    pub(super) index: MemberIndex,
    pub(super) seat: Place,
    pub(super) limits: TimeLimits,
}

impl Target {
    pub(super) fn describe(&self) -> String {
        format!("member {} ({}) of array '{}'", self.index, Printable(&self.seat.name()), self.name)
    }

    /// Bytes that a device needs to take its place.
    pub(super) fn needed_bytes(&self) -> u64 {
        self.superblock.device_bytes_min()
    }

    /// Searches places for the target's own device.
    pub(super) fn seek(&self, places: &[PathBuf]) -> Sought {
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
    pub(super) fn not_found(&self, there: &Sought) -> RequestError {
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

    /// Which of these devices, each of which says that it is the target's, is the newest.
    pub(super) fn current_of(&self, copies: &[Found]) -> Result<PathBuf, RequestError> {
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

    /// The superblock of a device, which must be the target's own.
    pub(super) fn own(
        &self,
        device: &Device,
        superblock: Result<Superblock, NewestError>,
    ) -> Result<Superblock, RequestError> {
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
            Ok(s) => Ok(s),
            Err(NewestError::NotAMember) => refuse("holds no Calpe superblock".into()),
            Err(error) => refuse(error.to_string()),
        }
    }
}
