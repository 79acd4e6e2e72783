//! What the daemon keeps of its arrays for the next start: where their devices are, how many errors they had,
//! what could not be read, and which of them are to be served again. Must not know how it is stored.

use crate::daemon::clock;
use crate::daemon::config::{ArrayChoice, ArrayConfig};
use crate::daemon::devices::import::{LeftOut, lost_replacements};
use crate::daemon::devices::places::{covers, directory_of};
use crate::daemon::ranked::{Ranked, lock};
use crate::daemon::state::{
    Arrays, Counters, Counts, Damage, Known, KnownDevice, Lacking, MemberReason, Remembered, StateDir,
};
use crate::member::TimeLimits;
use calpe_core::array::assembly::{Assembled, Seat};
use calpe_core::format::MemberState;
use calpe_core::units::{MemberIndex, SlotIndex, VolumeOffset};
use calpe_core::volume::{Rest, VolumeStatus};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;
use uuid::Uuid;

/// How long a command waits until its effect is written to the state directory.
const KEPT_WAIT: Duration = Duration::from_secs(2);

/// What is remembered of all arrays, and the directory where it is kept.
#[derive(Debug)]
pub(crate) struct Memory {
    store: StateDir,
    kept: Ranked<Kept, 7>,
}

#[derive(Debug, Default)]
struct Kept {
    arrays: Arrays,
    counters: Counters,
    damage: Damage,
    /// The part of that damage that is beyond repair.
    beyond_repair: Damage,
    lacking: Lacking,
}

/// An array that was served before.
#[derive(Debug)]
pub(crate) struct KnownArray {
    pub(crate) uuid: Uuid,
    pub(crate) name: String,
    pub(crate) devices: Vec<KnownDevice>,
}

/// What is to be remembered of an array in service.
#[derive(Debug)]
pub(crate) struct Sighting {
    pub(crate) array: Uuid,
    pub(crate) name: String,
    /// Where its devices are.
    pub(crate) devices: Vec<KnownDevice>,
    /// Counts of its members.
    pub(crate) counts: Vec<Counts>,
    /// Requests of clients that failed.
    pub(crate) client_errors: u64,
    /// Replacements that were given up while their members stayed in service.
    pub(crate) given_up: Vec<MemberReason>,
    /// Why members are out of service.
    pub(crate) out: Vec<MemberReason>,
    /// Members that the last scrub could not check.
    pub(crate) unchecked: Vec<u16>,
    /// What devices went into service without, by device.
    pub(crate) lacking: BTreeMap<Uuid, Vec<(u64, u64)>>,
    /// Devices whose members were missing when the array had failed, and have not come back.
    pub(crate) failed_without: Vec<Uuid>,
}

impl Memory {
    /// Continues with what an earlier run left in the state directory.
    pub(crate) fn new(store: StateDir, remembered: Remembered) -> Memory {
        let Remembered { arrays, counters, damage, beyond_repair, lacking, .. } = remembered;
        Memory { store, kept: Ranked::new(Kept { arrays, counters, damage, beyond_repair, lacking }) }
    }

    /// Records what is known of an array in service, and the unreadable ranges in its `status`.
    pub(crate) fn note(&self, sighting: Sighting, status: &VolumeStatus) {
        let Sighting { array, name, mut devices, counts, client_errors, .. } = sighting;
        let Sighting { given_up, out, unchecked, lacking, failed_without, .. } = sighting;
        let mut memory = lock(&self.kept);
        // A member that was not seen since the start is still listed at its last place.
        if let Some(known) = memory.arrays.0.get(&array) {
            let seated = |device: &KnownDevice| devices.iter().any(|other| other.member == device.member);
            let unseen: Vec<_> = known.devices.iter().filter(|device| !seated(device)).cloned().collect();
            devices.extend(unseen);
        }
        devices.sort_by_key(|device| (device.member, device.uuid));
        let mut is_new = memory.arrays.note(array, &name, devices, clock::unix_seconds());
        let is_paused = status.activities.iter().any(|activity| activity.rest == Some(Rest::Paused));
        if let Some(known) = memory.arrays.0.get_mut(&array) {
            is_new |= known.note_scrub(is_paused);
            is_new |= known.note_client_errors(client_errors);
            is_new |= known.note_given_up(given_up);
            is_new |= known.note_out(out);
            is_new |= known.note_failed_without(failed_without);
            if let Some(scrub) = status.last_scrub {
                is_new |= known.note_unchecked(scrub.finished_unix, unchecked);
            }
        }
        if is_new {
            self.store.save_arrays(&memory.arrays);
        }
        if memory.counters.note(array, counts) {
            self.store.save_counters(&memory.counters);
        }
        let known = [&status.lost, &status.set_aside, &status.unreadable];
        // Ranges that this run has not read yet stay as they were.
        let unconfirmed = [&status.unconfirmed_lost, &status.unconfirmed];
        let ranges = known.into_iter().chain(unconfirmed).flatten();
        if memory.damage.note(array, ranges.map(|&(start, bytes)| (start.0, bytes)).collect()) {
            self.store.save_damage(&memory.damage);
        }
        let lost = status.lost.iter().chain(&status.unconfirmed_lost);
        let lost = lost.map(|&(start, bytes)| (start.0, bytes)).collect();
        if memory.beyond_repair.note(array, lost) {
            self.store.save_beyond_repair(&memory.beyond_repair);
        }
        if memory.lacking.note(array, lacking) {
            self.store.save_lacking(&memory.lacking);
        }
    }

    /// Waits until everything is written, but not for long. Returns the reason if it is not.
    pub(crate) fn await_kept(&self) -> Option<String> {
        self.store.flush(KEPT_WAIT).err()
    }

    /// Why nothing can be remembered now, as far as is known.
    pub(crate) fn cannot_remember(&self) -> Option<String> {
        match self.store.path() {
            None => Some("no 'state_dir' is configured".into()),
            Some(_) => self.trouble(),
        }
    }

    /// Why the state directory cannot be written to, as far as is known.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.store.trouble()
    }

    /// Whether the scrub of an array is remembered as paused by an administrator, by this run or an
    /// earlier one.
    pub(crate) fn scrub_was_paused(&self, array: Uuid) -> bool {
        lock(&self.kept).arrays.0.get(&array).is_some_and(|known| known.scrub_paused)
    }

    /// Error counts of earlier runs, by member.
    pub(crate) fn earlier_counts(&self, array: Uuid) -> Vec<Counts> {
        lock(&self.kept).counters.0.get(&array).cloned().unwrap_or_default()
    }

    /// Devices whose members were missing when an array had failed, and have not come back, as far as is
    /// known.
    pub(crate) fn failed_without(&self, array: Uuid) -> Vec<Uuid> {
        let memory = lock(&self.kept);
        memory.arrays.0.get(&array).map(|known| known.failed_without.clone()).unwrap_or_default()
    }

    /// Records that an array cannot be served without these devices. They join those that it has failed
    /// without before.
    pub(crate) fn remember_lack(&self, name: &str, array: Uuid, missing: &[Uuid]) {
        if array.is_nil() || missing.is_empty() {
            return;
        }
        let mut memory = lock(&self.kept);
        // It may never have been served long enough to be on record.
        let known = memory.arrays.0.entry(array).or_default();
        if known.name.is_empty() {
            known.name = name.to_owned();
        }
        let mut all = known.failed_without.clone();
        all.extend(missing);
        all.sort_unstable();
        all.dedup();
        if known.note_failed_without(all) {
            self.store.save_arrays(&memory.arrays);
        }
    }

    /// Requests of clients that failed in an earlier run.
    pub(crate) fn earlier_client_errors(&self, array: Uuid) -> u64 {
        lock(&self.kept).arrays.0.get(&array).map_or(0, |known| known.client_errors)
    }

    /// Replacements that were being built when the array was stopped and whose devices are not used now: the
    /// member, and why its device is not used.
    pub(crate) fn lost_replacements<K>(
        &self,
        assembled: &Assembled<K>,
        left_out: &[LeftOut],
    ) -> Vec<(MemberIndex, String)> {
        let array = assembled.superblock.array;
        let why = |(member, device): (MemberIndex, Uuid)| {
            let left = left_out.iter().find(|left| left.device == device);
            let why = left.map(|left| left.reason.clone()).unwrap_or_else(|| {
                let path = self.earlier_path(array, device);
                let place = path.map_or_else(|| device.to_string(), |path| path.display().to_string());
                format!("{place} was not there at the start")
            });
            (member, why)
        };
        lost_replacements(assembled).into_iter().map(why).collect()
    }

    /// Sets a reason for members in service whose replacement was given up, by this start or before it.
    pub(crate) fn recall_given_up<K>(&self, assembled: &mut Assembled<K>, left_out: &[LeftOut]) {
        let lost = self.lost_replacements(assembled, left_out);
        let memory = lock(&self.kept);
        let known = memory.arrays.0.get(&assembled.superblock.array);
        let in_service = assembled
            .seats
            .iter_mut()
            .zip(0..)
            .filter(|(seat, _)| seat.state == MemberState::Online && seat.replacement.is_none());
        for (seat, index) in in_service {
            let lost = lost.iter().find(|(member, _)| member.0 == index);
            let before = known.into_iter().flat_map(|known| &known.given_up);
            let before = before.filter(|known| (known.member, known.device) == (index, seat.uuid));
            seat.reason = match lost {
                Some((_, why)) => Some(format!("its replacement was given up: {why}")),
                None => before.map(|known| known.reason.clone()).next(),
            };
        }
    }

    /// Sets the reason for members that are recorded as out of service, as an earlier run knew it. Returns,
    /// by device, the reason given to the array, and the cause in it.
    pub(crate) fn recall_causes<K>(
        &self,
        assembled: &mut Assembled<K>,
        left_out: &[LeftOut],
    ) -> HashMap<Uuid, (Option<String>, Option<String>)> {
        let memory = lock(&self.kept);
        let known = memory.arrays.0.get(&assembled.superblock.array);
        let is_out = |state| matches!(state, MemberState::Faulted | MemberState::Offline);
        let out = assembled.seats.iter_mut().zip(0..).filter(|(seat, _)| is_out(seat.state));
        let recall = |(seat, index): (&mut Seat<K>, u16)| {
            let mut before = known.into_iter().flat_map(|known| &known.out);
            let cause = before.find(|known| (known.member, known.device) == (index, seat.uuid));
            let cause = cause.map(|known| known.reason.clone());
            if let Some(cause) = &cause {
                let found = left_out.iter().find(|left| left.device == seat.uuid);
                let found = found.map_or_else(String::new, |left| format!("; {}", left.reason));
                seat.reason = Some(format!("{cause}{found}"));
            }
            (seat.uuid, (seat.reason.clone(), cause))
        };
        out.map(recall).collect()
    }

    /// When the last scrub that an earlier run knew ended, and the members that it could not check.
    pub(crate) fn earlier_unchecked(&self, array: Uuid) -> (u64, Vec<u16>) {
        let memory = lock(&self.kept);
        let known = memory.arrays.0.get(&array);
        known.map(|known| (known.scrub_unix, known.scrub_unchecked.clone())).unwrap_or_default()
    }

    /// Ranges of an array's volume that an earlier run could not read: all, and those beyond
    /// repair. Ranges that were written or read successfully since are in neither.
    pub(crate) fn earlier_damage(&self, array: Uuid) -> [Vec<(VolumeOffset, u64)>; 2] {
        let memory = lock(&self.kept);
        let of = |damage: &Damage| damage.0.get(&array).cloned().unwrap_or_default();
        let (all, lost) = (of(&memory.damage), of(&memory.beyond_repair));
        let volume = |ranges: Vec<(u64, u64)>| {
            ranges.into_iter().map(|(start, bytes)| (VolumeOffset(start), bytes)).collect()
        };
        let lost = common(&all, &lost);
        [volume(all), volume(lost)]
    }

    /// What devices of an array went into service without, as an earlier run knew it.
    pub(crate) fn earlier_lacking(&self, array: Uuid) -> Vec<(Uuid, Vec<(SlotIndex, u64)>)> {
        let memory = lock(&self.kept);
        let devices = memory.lacking.0.get(&array).into_iter().flatten();
        let slots =
            |runs: &Vec<(u64, u64)>| runs.iter().map(|&(first, many)| (SlotIndex(first), many)).collect();
        devices.map(|(device, runs)| (*device, slots(runs))).collect()
    }

    /// Where a device was last, as far as is remembered.
    pub(crate) fn earlier_path(&self, array: Uuid, device: Uuid) -> Option<PathBuf> {
        lock(&self.kept).arrays.path_of(array, device)
    }

    /// Where devices were: those of the array of that name or uuid, or of all.
    pub(crate) fn earlier_paths(&self, array: Option<&str>) -> Vec<PathBuf> {
        let memory = lock(&self.kept);
        let paths = |devices: &[KnownDevice]| -> Vec<PathBuf> {
            devices.iter().map(|device| device.path.clone()).collect()
        };
        match array {
            Some(array) => memory.arrays.find(array).flat_map(|(_, known)| paths(&known.devices)).collect(),
            None => memory.arrays.0.values().flat_map(|known| paths(&known.devices)).collect(),
        }
    }

    /// The array of that name or uuid, if there is only one, and where devices of all of them were.
    pub(crate) fn known_as(&self, which: &str) -> (Option<KnownArray>, Vec<PathBuf>) {
        let memory = lock(&self.kept);
        let mut all = memory.arrays.find(which);
        let one = match (all.next(), all.next()) {
            (Some((uuid, known)), None) => {
                Some(KnownArray { uuid: *uuid, name: known.name.clone(), devices: known.devices.clone() })
            }
            _ => None,
        };
        let devices = memory.arrays.find(which).flat_map(|(_, known)| &known.devices);
        (one, devices.map(|device| device.path.clone()).collect())
    }

    /// The name under which an array was served.
    pub(crate) fn earlier_name(&self, array: Uuid) -> Option<String> {
        lock(&self.kept).arrays.0.get(&array).map(|known| known.name.clone())
    }

    /// Records whether a restart serves the array (`again`: where its members are looked for). Returns a line
    /// when that cannot be written.
    pub(crate) fn import_again(&self, array: Uuid, again: Option<&[PathBuf]>) -> Option<String> {
        {
            let mut memory = lock(&self.kept);
            let known = match again {
                Some(_) => memory.arrays.0.entry(array).or_default(),
                None => memory.arrays.0.get_mut(&array)?,
            };
            let search = again.unwrap_or_default().to_vec();
            if (known.import, &known.search) == (again.is_some(), &search) {
                return None;
            }
            (known.import, known.search) = (again.is_some(), search);
            self.store.save_arrays(&memory.arrays);
        }
        // The reply to the command says whether it was written.
        let why = self.store.flush(KEPT_WAIT).err()?;
        Some(match again {
            // An earlier record may say either.
            Some(_) => format!(
                "the import is not remembered: whether a restart serves the array is as it was remembered last: {why}"
            ),
            None => format!("the export is not remembered, and a restart may serve the array: {why}"),
        })
    }

    /// Returns a line when an array that is served only once may be served again by a restart,
    /// because an earlier import of it is on record and cannot be overwritten.
    pub(crate) fn not_again(&self, array: Uuid) -> Option<String> {
        let is_known = lock(&self.kept).arrays.0.contains_key(&array);
        let why = self.trouble().filter(|_| is_known)?;
        Some(format!(
            "it is not remembered that the array is served only once, and a restart may serve it: {why}"
        ))
    }

    /// Which of several arrays of one name a section of the configuration means, if that can be decided.
    /// Arrays where the section looks (`is_there`) come before others; among those, arrays imported by a
    /// command; among those, arrays served before. `once`: an array that is served now and counts as not
    /// imported.
    pub(crate) fn settle(
        &self,
        uuids: &[Uuid],
        is_there: impl Fn(&Uuid) -> bool,
        once: Option<Uuid>,
    ) -> Option<Uuid> {
        let memory = lock(&self.kept);
        let known = |uuid: &Uuid| memory.arrays.0.get(uuid);
        let is_once = |uuid: &Uuid| once == Some(*uuid);
        let is_imported = |uuid: &Uuid| known(uuid).is_some_and(|known| known.import) && !is_once(uuid);
        let had_devices = |uuid: &Uuid| known(uuid).is_some_and(|known| !known.devices.is_empty());
        let was_served = |uuid: &Uuid| had_devices(uuid) || is_once(uuid);
        let mut left = uuids.to_vec();
        let narrow: [&dyn Fn(&Uuid) -> bool; 3] = [&is_there, &is_imported, &was_served];
        for is_meant in narrow {
            let meant: Vec<Uuid> = left.iter().filter(|uuid| is_meant(uuid)).copied().collect();
            if !meant.is_empty() {
                left = meant;
            }
        }
        (left.len() == 1).then(|| left[0])
    }

    /// Which array a section by this name means at the next start, if that can be decided now. `there`:
    /// arrays of the name where the section looks; `once`: as in [`Memory::settle`].
    pub(crate) fn meant_by_name(&self, name: &str, there: &[Uuid], once: Uuid) -> Option<Uuid> {
        let mut all: Vec<Uuid> = lock(&self.kept).arrays.find(name).map(|(uuid, _)| *uuid).collect();
        all.extend(there.iter().chain([&once]));
        all.sort_unstable();
        all.dedup();
        self.settle(&all, |uuid| there.contains(uuid), Some(once))
    }

    /// Whether another array of that name was served before.
    pub(crate) fn has_namesake(&self, array: Uuid, name: &str) -> bool {
        lock(&self.kept).arrays.find(name).any(|(own, _)| *own != array)
    }

    /// The arrays that a command has imported and none has exported since, except those that are configured.
    pub(crate) fn imports_of_before(&self, configured: &[ArrayConfig]) -> Vec<ArrayConfig> {
        let memory = lock(&self.kept);
        let is_configured =
            |uuid: &Uuid, name: &str| configured.iter().any(|config| config.which.means(name, *uuid));
        let imports =
            memory.arrays.0.iter().filter(|(uuid, known)| known.import && !is_configured(uuid, &known.name));
        let as_config = |(uuid, known): (&Uuid, &Known)| ArrayConfig {
            which: ArrayChoice::Uuid(*uuid),
            search: known.search.clone(),
            read_only: false,
            rebuild_min: None,
            rebuild_max: None,
            full_stripe: None,
            page_cache: None,
            limits: TimeLimits::default(),
            rules: None,
        };
        imports.map(as_config).collect()
    }

    /// The sections by uuid that mean another array of the same name as this one.
    pub(crate) fn configured_namesakes(
        &self,
        which: &ArrayChoice,
        configured: &[ArrayConfig],
    ) -> Vec<ArrayChoice> {
        let memory = lock(&self.kept);
        let name = |which: &ArrayChoice| match which {
            ArrayChoice::Uuid(uuid) => memory.arrays.0.get(uuid).map(|known| known.name.as_str()),
            ArrayChoice::Name(_) => None,
        };
        let own = name(which);
        let sections = configured.iter().map(|config| &config.which);
        sections.filter(|other| own.is_some() && name(other) == own && *other != which).cloned().collect()
    }

    /// The state of the state directory if it has changed since the last call: an error when it cannot be
    /// written to.
    pub(crate) fn news(&self) -> Option<Result<String, String>> {
        self.store.news()
    }

    /// The state directory.
    pub(crate) fn dir(&self) -> Option<&Path> {
        self.store.path()
    }

    /// Writes what is left, but not for longer than `limit`, and nothing afterwards.
    pub(crate) fn close(&self, limit: Duration) {
        self.store.close(limit);
    }

    /// Returns a line when the device at `path` lies outside the `places` where members of its
    /// array are looked for.
    pub(crate) fn outside_search(
        &self,
        array: Uuid,
        path: &Path,
        mut places: Vec<PathBuf>,
        is_configured: bool,
    ) -> Option<String> {
        if let Some(known) = lock(&self.kept).arrays.0.get(&array) {
            places.extend(known.search.iter().cloned());
            // A device beside remembered ones is found as they are.
            if self.store.path().is_some() {
                let others = known.devices.iter().filter(|device| device.path != path);
                places.extend(others.filter_map(|device| directory_of(&device.path)));
            }
        }
        if places.iter().any(|place| covers(place, path)) {
            return None;
        }
        let (kept, is_kept) = match (self.store.path(), self.store.flush(KEPT_WAIT)) {
            (Some(dir), Ok(())) => (format!("is remembered in {}", dir.display()), true),
            (Some(_), Err(why)) => (format!("is forgotten at a restart ({why})"), false),
            (None, _) => ("is forgotten at a restart".to_owned(), false),
        };
        let advice = match (is_configured, is_kept) {
            (true, _) => "; add it to 'search' of the array, so that it is found in any case",
            (false, true) => "",
            (false, false) => "; name its place with 'calpe import --dir' the next time",
        };
        Some(format!(
            "{} lies outside of the places where members are looked for: its path {kept}{advice}",
            path.display()
        ))
    }
}

/// The intersection of two ascending lists of byte ranges (start, length).
fn common(some: &[(u64, u64)], others: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let end = |&(start, bytes): &(u64, u64)| start.saturating_add(bytes);
    let (mut at, mut other, mut both) = (0, 0, Vec::new());
    while let (Some(a), Some(b)) = (some.get(at), others.get(other)) {
        let (first, last) = (a.0.max(b.0), end(a).min(end(b)));
        if first < last {
            both.push((first, last - first));
        }
        if end(a) <= end(b) { at += 1 } else { other += 1 }
    }
    both
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_lists_of_ranges_have_in_common() {
        let some = [(0, 10), (20, 10), (40, 10)];
        assert_eq!(common(&some, &[(5, 20), (45, 1), (47, 9)]), [(5, 5), (20, 5), (45, 1), (47, 3)]);
        assert_eq!(common(&some, &some), some);
        assert!(common(&some, &[(10, 10)]).is_empty() && common(&some, &[]).is_empty());
    }
}
