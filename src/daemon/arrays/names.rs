//! What the daemon knows of an array in service that its volume does not: its name, where its devices are or
//! were, what an earlier run has counted of it.
//!
//! Pure: facts in, answers out.

use super::meters::Meters;
use crate::daemon::devices::search::Hindrance;
use crate::daemon::reactor::ArrayFacts;
use crate::daemon::state::{Counts, MemberReason};
use crate::member::{self, Device, DeviceFacts, Identity, is_remote};
use calpe_core::block_io::DeviceId;
use calpe_core::format::{MemberState, VolumeKind};
use calpe_core::units::{MemberIndex, Timestamp};
use calpe_core::volume::{MemberStatus, VolumeStatus};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// A device as people know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Identity of the device.
    pub uuid: Uuid,
    /// Where it is, or was last; none if no path is known.
    pub path: Option<PathBuf>,
    /// The device that was found there when it was opened.
    pub found: Option<FoundThere>,
}

/// A device as it was when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FoundThere {
    /// Its properties.
    pub facts: DeviceFacts,
    /// Decides whether other paths lead to it; none for a remote device.
    pub identity: Option<Identity>,
}

impl Place {
    /// The place of an open device.
    #[must_use]
    pub(crate) fn of(uuid: Uuid, device: &Device) -> Place {
        let found = FoundThere { facts: device.facts(), identity: device.identity() };
        Place { uuid, path: Some(device.path().to_owned()), found: Some(found) }
    }

    /// The place of a device that was not opened.
    #[must_use]
    pub(crate) fn unseen(uuid: Uuid, path: Option<PathBuf>) -> Place {
        Place { uuid, path, found: None }
    }

    /// Whether its transfers go through this host's page cache.
    #[must_use]
    pub(crate) fn is_cached(&self) -> bool {
        self.found.is_some_and(|found| found.facts.is_cached())
    }

    /// Its path, or its uuid when no path is known.
    #[must_use]
    pub(crate) fn name(&self) -> String {
        self.path.as_ref().map_or_else(|| self.uuid.to_string(), |path| path.display().to_string())
    }

    /// Whether a path names this place, or leads to what was found there.
    pub(crate) fn is_at(&self, path: &Path, identity: Option<Identity>) -> bool {
        let Some(known) = &self.path else { return false };
        if is_remote(known) || is_remote(path) {
            return known.as_os_str() == path.as_os_str() || member::same_remote(known, path);
        }
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let found = self.found.and_then(|found| found.identity);
        absolute(known) == absolute(path) || (identity.is_some() && identity == found)
    }
}

/// What the daemon knows of an array that its volume does not.
#[derive(Debug)]
pub(crate) struct Names {
    /// Name of the array.
    pub name: String,
    /// Its identity.
    pub uuid: Uuid,
    /// Kind of its volume.
    pub(super) kind: VolumeKind,
    /// Clients may only read.
    pub(super) read_only: bool,
    /// The current or last device of each member.
    pub(super) seats: Vec<Place>,
    /// Every device handed to the array.
    pub(super) devices: HashMap<DeviceId, Place>,
    /// Counts of earlier runs, by member.
    pub(super) earlier: Vec<Counts>,
    /// Requests of clients that failed in earlier runs.
    pub(super) earlier_client_errors: u64,
    /// Members that a scrub of an earlier run could not check, and when it ended.
    pub(super) earlier_unchecked: (u64, Vec<u16>),
    /// Copies of the superblock that were found damaged when the array was opened, by device.
    pub(super) damaged: HashMap<Uuid, u64>,
    /// What keeps devices of members from coming back from where they had been.
    pub(super) hindrances: HashMap<Uuid, Hindrance>,
    /// What was found out about devices since the array gave the reason why they are out.
    pub(super) findings: HashMap<Uuid, String>,
    /// For devices whose members were out of service at the start: the reason that the array was given, and
    /// the cause that an earlier run knew.
    pub(super) causes: HashMap<Uuid, (Option<String>, Option<String>)>,
    /// Progress of passes over the last seconds.
    pub(super) meters: Meters,
}

impl Names {
    /// Records the current devices of members, and progress.
    pub(crate) fn observe(&mut self, now: Timestamp, facts: &ArrayFacts) {
        for (at, (seat, member)) in self.seats.iter_mut().zip(&facts.status.members).enumerate() {
            if let Some(place) = member.device.and_then(|device| self.devices.get(&device)) {
                if seat.uuid != place.uuid {
                    // The counts of an earlier run belong to the device that was replaced.
                    self.earlier.get_mut(at).into_iter().for_each(|counts| *counts = Counts::default());
                    self.damaged.remove(&seat.uuid);
                }
                self.hindrances.remove(&place.uuid);
                self.findings.remove(&place.uuid);
                self.causes.remove(&place.uuid);
                *seat = place.clone();
            }
        }
        self.meters.observe(now, &facts.status.activities);
    }

    /// The current or last device of each member.
    pub(crate) fn seats(&self) -> &[Place] {
        &self.seats
    }

    /// Where a device is that was handed to the array.
    pub(crate) fn place_of(&self, device: DeviceId) -> Option<&Place> {
        self.devices.get(&device)
    }

    /// The places of all members and of all devices that were handed to the array.
    pub(crate) fn all_places(&self) -> impl Iterator<Item = &Place> {
        self.seats.iter().chain(self.devices.values())
    }

    /// What keeps a device from coming back from where it had been.
    pub(crate) fn hindrance(&self, device: Uuid) -> Option<&Hindrance> {
        self.hindrances.get(&device)
    }

    /// Records a device that is handed to the array.
    pub(crate) fn add_device(&mut self, device: DeviceId, place: Place) {
        self.devices.insert(device, place);
    }

    /// Forgets a device that the array has not taken, or has lost again.
    pub(crate) fn withdraw_device(&mut self, device: DeviceId) {
        self.devices.remove(&device);
    }

    /// Records the device of a member, in service or not.
    pub(crate) fn seat(&mut self, index: usize, place: Place) {
        if self.seats[index].uuid != place.uuid {
            self.seats[index] = place;
        }
    }

    /// Remembers where the device of a missing member should be.
    pub(crate) fn expect_member_at(&mut self, index: usize, path: PathBuf) {
        if let Some(seat) = self.seats.get_mut(index) {
            seat.path.get_or_insert(path);
        }
    }

    /// Puts a line about a device in the place of the reason why its member is out.
    pub(crate) fn note_finding(&mut self, device: Uuid, found: String) {
        self.findings.insert(device, found);
    }

    /// Where the devices of its members are, or were.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.seats.iter().filter_map(|seat| seat.path.as_ref())
    }

    /// Records what keeps a device from coming back. `found`, a line, replaces the reason why its member is
    /// out, if it says something new.
    pub(crate) fn hinder(&mut self, device: Uuid, hindrance: Hindrance, found: String) {
        let before = self.hindrances.insert(device, hindrance);
        // A new hindrance replaces an older one; the reason why the member left service stays.
        if hindrance == Hindrance::Kept || before.is_some_and(|before| before != hindrance) {
            self.findings.insert(device, found);
        }
    }

    /// Where a device of the array may be besides its last place: beside other members, and in these places.
    /// /dev itself is left out: a member there is no reason to search all of it.
    pub(crate) fn places_around(&self, configured: &[PathBuf]) -> Vec<PathBuf> {
        let known = self.all_places().filter_map(|place| place.path.as_ref());
        let local = known.filter(|path| !is_remote(path));
        let mut around: Vec<PathBuf> =
            local.filter_map(|path| path.parent()).map(Path::to_path_buf).collect();
        around.sort();
        around.dedup();
        around.extend_from_slice(configured);
        around.retain(|place| place != Path::new("/dev"));
        around
    }

    /// Whether a path, as it is written, is that of a member.
    pub(crate) fn is_known(&self, path: &Path) -> bool {
        self.all_places().any(|place| place.is_at(path, None))
    }

    /// Members that the last scrub could not check.
    #[must_use]
    pub(crate) fn unchecked(&self, status: &VolumeStatus) -> Vec<u16> {
        let Some(scrub) = status.last_scrub else { return Vec::new() };
        let (finished_unix, members) = &self.earlier_unchecked;
        match scrub.unchecked.is_empty() && *finished_unix == scrub.finished_unix {
            true => members.clone(),
            false => scrub.unchecked.iter().map(|member| member.0).collect(),
        }
    }

    /// Slots that devices of members went into service without, by device, as runs (first slot, count).
    #[must_use]
    pub(crate) fn lacking(status: &VolumeStatus) -> BTreeMap<Uuid, Vec<(u64, u64)>> {
        let devices = status.members.iter().flat_map(|member| &member.lacking);
        devices
            .map(|(device, runs)| (*device, runs.iter().map(|(first, many)| (first.0, *many)).collect()))
            .collect()
    }

    /// The counts of all members, those of earlier runs included.
    #[must_use]
    pub(crate) fn counts(&self, status: &VolumeStatus) -> Vec<Counts> {
        self.seats.iter().zip(&status.members).map(|(seat, member)| self.counts_of(seat, member)).collect()
    }

    /// Requests of clients that failed, those of earlier runs included.
    #[must_use]
    pub(crate) fn client_errors(&self, status: &VolumeStatus) -> u64 {
        self.earlier_client_errors.saturating_add(status.client_errors)
    }

    /// Replacements that were given up while their members stayed in service.
    #[must_use]
    pub(crate) fn given_up(&self, status: &VolumeStatus) -> Vec<MemberReason> {
        let members = self.seats.iter().zip(&status.members);
        // A member in service has no other reason.
        let in_service = members.filter(|(_, member)| member.state == MemberState::Online);
        let given_up = in_service.filter_map(|(seat, member)| {
            let reason = member.reason.clone()?;
            Some(MemberReason { member: member.index.0, device: seat.uuid, reason })
        });
        given_up.collect()
    }

    /// Why members are out of service, for those that the superblocks record as out; kept for the next start.
    /// The reason that this start gave the array is left out; the cause in it is kept.
    pub(crate) fn out(&self, status: &VolumeStatus) -> Vec<MemberReason> {
        let members = self.seats.iter().zip(&status.members);
        let out = members.filter_map(|(seat, member)| {
            if !matches!(member.state, MemberState::Faulted | MemberState::Offline) {
                return None;
            }
            let reason = match self.causes.get(&seat.uuid) {
                Some((at_start, cause)) if *at_start == member.reason => cause.clone()?,
                _ => member.reason.clone()?,
            };
            Some(MemberReason { member: member.index.0, device: seat.uuid, reason })
        });
        out.collect()
    }

    pub(crate) fn counts_of(&self, seat: &Place, member: &MemberStatus) -> Counts {
        let cksum = self.damaged.get(&seat.uuid).copied().unwrap_or(0);
        let earlier = self.earlier.get(usize::from(member.index.0)).copied().unwrap_or_default();
        earlier + Counts::from(member.counters) + Counts { cksum, ..Counts::default() }
    }

    /// Forgets the counts of a member, or of all. The volume clears its own.
    pub(crate) fn clear(&mut self, member: Option<MemberIndex>) {
        if member.is_none() {
            self.earlier_client_errors = 0;
        }
        let is_meant = |at: usize| member.is_none_or(|member| usize::from(member.0) == at);
        for (_, counts) in self.earlier.iter_mut().enumerate().filter(|(at, _)| is_meant(*at)) {
            *counts = Counts::default();
        }
        for (at, seat) in self.seats.iter().enumerate() {
            if is_meant(at) {
                self.damaged.remove(&seat.uuid);
            }
        }
    }
}
