//! What the daemon keeps of its arrays for the next start: where their devices are, how many errors they had,
//! what could not be read, and which of them are to be served again. Must not know how it is kept.

use super::clock;
use super::config::{ArrayChoice, ArrayConfig};
use super::events::{News, kinds};
use super::import::{LeftOut, lost_replacements};
use super::ranked::lock;
use super::reactor::{ArrayFacts, ArrayId};
use super::report::Names;
use super::service::Daemon;
use super::state::{Arrays, Counters, Counts, Damage, KnownDevice, Lacking};
use crate::member::{TimeLimits, is_remote, same_remote};
use calpe_core::array::assembly::{Assembled, Seat};
use calpe_core::format::MemberState;
use calpe_core::units::{MemberIndex, SlotIndex, VolumeOffset};
use calpe_core::volume::{MemberStatus, NoticeLevel, Rest};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How long a command waits until what it is to be remembered for is written.
const KEPT_WAIT: Duration = Duration::from_secs(2);

/// How long what cannot be read may change, and what passes count, before it is kept.
const FINDINGS_DELAY: Duration = Duration::from_millis(20);

/// What is remembered of all arrays.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pub arrays: Arrays,
    pub counters: Counters,
    pub damage: Damage,
    /// What of that is beyond repair.
    pub beyond_repair: Damage,
    pub lacking: Lacking,
}

impl Daemon {
    /// Keeps where the devices of an array are, the counts of its members, and what of it cannot be read.
    pub(super) fn remember(&self, id: ArrayId, facts: &ArrayFacts) {
        let known = self.with_names(id, |names| {
            let status = &facts.status;
            let told = (names.given_up(status), names.out(status));
            let returns = self.returns();
            let was_missing = |member: &&MemberStatus| returns.was_missing(names.uuid, member.index);
            let failed_without =
                status.members.iter().filter(was_missing).map(|member| member.uuid).collect();
            let unchecked = names.unchecked(status);
            let found =
                (names.client_errors(status), told, unchecked, Names::lacking(status), failed_without);
            (names.uuid, names.name.clone(), known_devices(names, facts), names.counts(status), found)
        });
        let Some((uuid, name, mut devices, counts, found)) = known else { return };
        let (client_errors, (given_up, out), unchecked, lacking, failed_without) = found;
        let mut memory = lock(&self.memory);
        // A member that was not seen since the start is where it was last.
        if let Some(known) = memory.arrays.0.get(&uuid) {
            let seated = |device: &KnownDevice| devices.iter().any(|other| other.member == device.member);
            let unseen: Vec<_> = known.devices.iter().filter(|device| !seated(device)).cloned().collect();
            devices.extend(unseen);
        }
        devices.sort_by_key(|device| (device.member, device.uuid));
        let mut is_new = memory.arrays.note(uuid, &name, devices, clock::unix_seconds());
        let is_paused = facts.status.activities.iter().any(|activity| activity.rest == Some(Rest::Paused));
        if let Some(known) = memory.arrays.0.get_mut(&uuid) {
            is_new |= known.note_scrub(is_paused);
            is_new |= known.note_client_errors(client_errors);
            is_new |= known.note_given_up(given_up);
            is_new |= known.note_out(out);
            is_new |= known.note_failed_without(failed_without);
            if let Some(scrub) = facts.status.last_scrub {
                is_new |= known.note_unchecked(scrub.finished_unix, unchecked);
            }
        }
        if is_new {
            self.state.save_arrays(&memory.arrays);
        }
        if memory.counters.note(uuid, counts) {
            self.state.save_counters(&memory.counters);
        }
        let status = &facts.status;
        let known = [&status.lost, &status.set_aside, &status.unreadable];
        // What nobody has looked at is kept as it was.
        let unconfirmed = [&status.unconfirmed_lost, &status.unconfirmed];
        let ranges = known.into_iter().chain(unconfirmed).flatten();
        if memory.damage.note(uuid, ranges.map(|&(start, bytes)| (start.0, bytes)).collect()) {
            self.state.save_damage(&memory.damage);
        }
        let lost = status.lost.iter().chain(&status.unconfirmed_lost);
        let lost = lost.map(|&(start, bytes)| (start.0, bytes)).collect();
        if memory.beyond_repair.note(uuid, lost) {
            self.state.save_beyond_repair(&memory.beyond_repair);
        }
        if memory.lacking.note(uuid, lacking) {
            self.state.save_lacking(&memory.lacking);
        }
    }

    /// For this time, keeps what cannot be read of arrays soon after it has changed, and what
    /// passes have counted soon after their end: a daemon that is killed then is to know it at the
    /// next start.
    pub(super) fn keep_findings(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut pause = FINDINGS_DELAY;
        while self.is_alive() && self.reactor.findings_change(until.saturating_duration_since(Instant::now()))
        {
            // What changes together is kept together.
            std::thread::sleep(pause);
            let begun = Instant::now();
            let ids: Vec<ArrayId> = lock(&self.served).iter().map(|served| served.id).collect();
            ids.into_iter().for_each(|id| self.remember_now(id));
            // A long list that keeps changing takes a small part of a thread.
            pause = FINDINGS_DELAY.max(10 * begun.elapsed());
        }
    }

    /// Waits until what is remembered is written, but not for long. Why it is not, if it is not.
    pub(super) fn await_kept(&self) -> Option<String> {
        self.state.flush(KEPT_WAIT).err()
    }

    /// Keeps what passes have counted that have ended since this was called last, before anybody is
    /// told that they have. Waits for the state directory, but not for long, and once for each end.
    pub(super) fn keep_ended_passes(&self) {
        let ended = self.reactor.passes_ended();
        if self.passes_kept.load(Ordering::SeqCst) == ended {
            return;
        }
        let ids: Vec<ArrayId> = lock(&self.served).iter().map(|served| served.id).collect();
        ids.into_iter().for_each(|id| self.remember_now(id));
        // That it cannot be kept is told by an event.
        let _ = self.await_kept();
        self.passes_kept.fetch_max(ended, Ordering::SeqCst);
    }

    /// As [`Daemon::remember`], of an array that may have just been stopped.
    pub(super) fn remember_now(&self, id: ArrayId) {
        if let Ok(facts) = self.facts(id) {
            self.remember(id, &facts);
        }
    }

    /// Keeps that the scrub of an array is paused now, or is not. A line when that cannot be kept.
    pub(super) fn remember_scrub(&self, id: ArrayId) -> Option<String> {
        let uuid = self.with_names(id, |names| names.uuid)?;
        let before = self.scrub_was_paused(uuid);
        self.remember_now(id);
        let is_paused = self.scrub_was_paused(uuid);
        if before == is_paused {
            return None;
        }
        let why = match self.state.path() {
            None if is_paused => "no 'state_dir' is configured".into(),
            None => return None,
            Some(_) => self.state.flush(KEPT_WAIT).err()?,
        };
        Some(match is_paused {
            true => format!("the pause is not remembered, and a restart goes on with the scrub: {why}"),
            false => {
                format!("a restart may find the scrub paused: that it is not cannot be remembered: {why}")
            }
        })
    }

    /// Why nothing can be remembered now, as far as is known.
    pub(super) fn cannot_remember(&self) -> Option<String> {
        match self.state.path() {
            None => Some("no 'state_dir' is configured".into()),
            Some(_) => self.state_trouble(),
        }
    }

    /// Why the state directory cannot be written to, as far as is known.
    pub(super) fn state_trouble(&self) -> Option<String> {
        self.state.trouble()
    }

    /// Whether the scrub of an array is remembered as paused by an administrator, by this run or an earlier one.
    pub(super) fn scrub_was_paused(&self, array: Uuid) -> bool {
        lock(&self.memory).arrays.0.get(&array).is_some_and(|known| known.scrub_paused)
    }

    /// Counts that an earlier run has left, by member.
    pub(super) fn earlier_counts(&self, array: Uuid) -> Vec<Counts> {
        lock(&self.memory).counters.0.get(&array).cloned().unwrap_or_default()
    }

    /// Devices whose members were missing when an array had failed, and are not back since, as far
    /// as is known.
    pub(super) fn failed_without(&self, array: Uuid) -> Vec<Uuid> {
        let memory = lock(&self.memory);
        memory.arrays.0.get(&array).map(|known| known.failed_without.clone()).unwrap_or_default()
    }

    /// An array cannot be served for a lack of these devices, among others perhaps that it has
    /// failed without before.
    pub(super) fn remember_lack(&self, name: &str, array: Uuid, missing: &[Uuid]) {
        if array.is_nil() || missing.is_empty() {
            return;
        }
        let mut memory = lock(&self.memory);
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
            self.state.save_arrays(&memory.arrays);
        }
    }

    /// Requests of clients that failed in an earlier run.
    pub(super) fn earlier_client_errors(&self, array: Uuid) -> u64 {
        lock(&self.memory).arrays.0.get(&array).map_or(0, |known| known.client_errors)
    }

    /// Replacements that were being built when the array was stopped and whose devices are not used now: the member, and what has
    /// become of the device.
    pub(super) fn lost_replacements<K>(
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

    /// Says of members in service that their replacement was given up: by this start, or before it.
    pub(super) fn recall_given_up<K>(&self, assembled: &mut Assembled<K>, left_out: &[LeftOut]) {
        let lost = self.lost_replacements(assembled, left_out);
        let memory = lock(&self.memory);
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

    /// Says of members that are recorded as out of service why they are, as far as an earlier run
    /// knew. Returns, by device, what the array is given as the reason, and that cause.
    pub(super) fn recall_causes<K>(
        &self,
        assembled: &mut Assembled<K>,
        left_out: &[LeftOut],
    ) -> HashMap<Uuid, (Option<String>, Option<String>)> {
        let memory = lock(&self.memory);
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

    /// Members that the scrub which an earlier run knew as the last could not check, and when that ended.
    pub(super) fn earlier_unchecked(&self, array: Uuid) -> (u64, Vec<u16>) {
        let memory = lock(&self.memory);
        let known = memory.arrays.0.get(&array);
        known.map(|known| (known.scrub_unix, known.scrub_unchecked.clone())).unwrap_or_default()
    }

    /// Ranges of an array's volume that an earlier run could not read: all, and those that it knew to be beyond repair. What was
    /// written or read since the latter were kept is in neither.
    pub(super) fn earlier_damage(&self, array: Uuid) -> [Vec<(VolumeOffset, u64)>; 2] {
        let memory = lock(&self.memory);
        let of = |damage: &Damage| damage.0.get(&array).cloned().unwrap_or_default();
        let (all, lost) = (of(&memory.damage), of(&memory.beyond_repair));
        let volume = |ranges: Vec<(u64, u64)>| {
            ranges.into_iter().map(|(start, bytes)| (VolumeOffset(start), bytes)).collect()
        };
        let lost = common(&all, &lost);
        [volume(all), volume(lost)]
    }

    /// What devices of an array went into service without, as an earlier run knew it.
    pub(super) fn earlier_lacking(&self, array: Uuid) -> Vec<(Uuid, Vec<(SlotIndex, u64)>)> {
        let memory = lock(&self.memory);
        let devices = memory.lacking.0.get(&array).into_iter().flatten();
        let slots =
            |runs: &Vec<(u64, u64)>| runs.iter().map(|&(first, many)| (SlotIndex(first), many)).collect();
        devices.map(|(device, runs)| (*device, slots(runs))).collect()
    }

    /// Where a device was, if it is not known better.
    pub(super) fn earlier_path(&self, array: Uuid, device: Uuid) -> Option<PathBuf> {
        lock(&self.memory).arrays.path_of(array, device)
    }

    /// Where devices were: of the array of that name or uuid, or of all.
    pub(super) fn earlier_paths(&self, array: Option<&str>) -> Vec<PathBuf> {
        let memory = lock(&self.memory);
        let paths = |devices: &[KnownDevice]| -> Vec<PathBuf> {
            devices.iter().map(|device| device.path.clone()).collect()
        };
        match array {
            Some(array) => memory.arrays.find(array).flat_map(|(_, known)| paths(&known.devices)).collect(),
            None => memory.arrays.0.values().flat_map(|known| paths(&known.devices)).collect(),
        }
    }

    /// The name under which an array was served.
    pub(super) fn earlier_name(&self, array: Uuid) -> Option<String> {
        lock(&self.memory).arrays.0.get(&array).map(|known| known.name.clone())
    }

    /// The array shall be served after a restart, or shall not. A line when that cannot be kept.
    pub(super) fn import_again(&self, array: Uuid, again: Option<&[PathBuf]>) -> Option<String> {
        {
            let mut memory = lock(&self.memory);
            let known = match again {
                Some(_) => memory.arrays.0.entry(array).or_default(),
                None => memory.arrays.0.get_mut(&array)?,
            };
            let search = again.unwrap_or_default().to_vec();
            if (known.import, &known.search) == (again.is_some(), &search) {
                return None;
            }
            (known.import, known.search) = (again.is_some(), search);
            self.state.save_arrays(&memory.arrays);
        }
        // Whoever asked for it is told when it is kept, or that it is not.
        let why = self.state.flush(KEPT_WAIT).err()?;
        Some(match again {
            // What was remembered of it before may say either.
            Some(_) => format!(
                "the import is not remembered: whether a restart serves the array is as it was remembered last: {why}"
            ),
            None => format!("the export is not remembered, and a restart may serve the array: {why}"),
        })
    }

    /// The array is served, and not again after a restart. A line where an earlier import of it may still be on record, as
    /// nothing that came since could be kept.
    pub(super) fn not_again(&self, array: Uuid) -> Option<String> {
        let is_known = lock(&self.memory).arrays.0.contains_key(&array);
        let why = self.state_trouble().filter(|_| is_known)?;
        Some(format!(
            "it is not remembered that the array is served only once, and a restart may serve it: {why}"
        ))
    }

    /// Which of several arrays of one name a section of the configuration means, if that can be told: one that is where the
    /// section says (`is_there`) rather than one that is known from before; of those, one that was imported by a command rather
    /// than another; of those, one that was served before.
    /// `once`: one that is served now, and not again for a command.
    pub(super) fn settle(
        &self,
        uuids: &[Uuid],
        is_there: impl Fn(&Uuid) -> bool,
        once: Option<Uuid>,
    ) -> Option<Uuid> {
        let memory = lock(&self.memory);
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

    /// Which array a section by this name means at the next start, if that can be told now. `there`: those of the name that are
    /// where it looks; `once`: one that is served now, and not again for a command.
    pub(super) fn meant_by_name(&self, name: &str, there: &[Uuid], once: Uuid) -> Option<Uuid> {
        let mut all: Vec<Uuid> = lock(&self.memory).arrays.find(name).map(|(uuid, _)| *uuid).collect();
        all.extend(there.iter().chain([&once]));
        all.sort_unstable();
        all.dedup();
        self.settle(&all, |uuid| there.contains(uuid), Some(once))
    }

    /// Whether another array of that name was served before.
    pub(super) fn has_namesake(&self, array: Uuid, name: &str) -> bool {
        lock(&self.memory).arrays.find(name).any(|(own, _)| *own != array)
    }

    /// The arrays that were imported by a command and not exported since, but for those that are configured.
    pub(super) fn imports_of_before(&self, configured: &[ArrayConfig]) -> Vec<ArrayConfig> {
        let memory = lock(&self.memory);
        let is_configured =
            |uuid: &Uuid, name: &str| configured.iter().any(|config| config.which.means(name, *uuid));
        let imports =
            memory.arrays.0.iter().filter(|(uuid, known)| known.import && !is_configured(uuid, &known.name));
        let as_config = |(uuid, known): (&Uuid, &super::state::Known)| ArrayConfig {
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

    /// The sections that mean, by their identities, other arrays which had the name of this one.
    pub(super) fn configured_namesakes(
        &self,
        which: &ArrayChoice,
        configured: &[ArrayConfig],
    ) -> Vec<ArrayChoice> {
        let memory = lock(&self.memory);
        let name = |which: &ArrayChoice| match which {
            ArrayChoice::Uuid(uuid) => memory.arrays.0.get(uuid).map(|known| known.name.as_str()),
            ArrayChoice::Name(_) => None,
        };
        let own = name(which);
        let sections = configured.iter().map(|config| &config.which);
        sections.filter(|other| own.is_some() && name(other) == own && *other != which).cloned().collect()
    }

    /// Tells when the state directory cannot be written to, or can again.
    pub(super) fn tell_of_state(&self) {
        let (level, text) = match self.state.news() {
            None => return,
            Some(Ok(text)) => (NoticeLevel::Info, text),
            Some(Err(text)) => (NoticeLevel::Warning, text),
        };
        self.events.tell(News::new(None, kinds::STATE_DIR, level, text));
    }

    /// A line for one who brings a device into an array that is outside of where its members are looked for.
    pub(super) fn outside_search(&self, array: Uuid, name: &str, path: &Path) -> Option<String> {
        let mut places = self.search_places();
        if let Some(known) = lock(&self.memory).arrays.0.get(&array) {
            places.extend(known.search.iter().cloned());
            // Others are there, and remembered as this one will be.
            if self.state.path().is_some() {
                let others = known.devices.iter().filter(|device| device.path != path);
                places.extend(others.filter_map(|device| directory_of(&device.path)));
            }
        }
        if places.iter().any(|place| covers(place, path)) {
            return None;
        }
        let (kept, is_kept) = match (self.state.path(), self.state.flush(KEPT_WAIT)) {
            (Some(dir), Ok(())) => (format!("is remembered in {}", dir.display()), true),
            (Some(_), Err(why)) => (format!("is forgotten at a restart ({why})"), false),
            (None, _) => ("is forgotten at a restart".to_owned(), false),
        };
        let advice = match (self.is_configured(array, name), is_kept) {
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

/// What two lists of byte ranges (start, length), both ascending, have in common.
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

/// Whether a search of this place looks at this path.
pub(super) fn covers(place: &Path, path: &Path) -> bool {
    if is_remote(place) || is_remote(path) {
        return is_remote(place) && is_remote(path) && same_remote(place, path);
    }
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let (place, path) = (absolute(place), absolute(path));
    place == path || path.parent() == Some(&place)
}

/// The directory of a file that is a member; none of a remote one, or of a device: all of /dev is not searched for it.
pub(super) fn directory_of(path: &Path) -> Option<PathBuf> {
    let directory = path.parent().filter(|parent| !is_remote(path) && !parent.starts_with("/dev"));
    directory.map(Path::to_owned)
}

/// Where the devices of an array are: those of its members, and those that are being built.
fn known_devices(names: &Names, facts: &ArrayFacts) -> Vec<KnownDevice> {
    let mut known = Vec::new();
    for (seat, member) in names.seats.iter().zip(&facts.status.members) {
        let replacement = member.replacement.and_then(|device| names.devices.get(&device));
        for place in [Some(seat), replacement].into_iter().flatten() {
            // JSON has no words for other paths.
            if let Some(path) = place.path.as_ref().filter(|path| path.to_str().is_some()) {
                known.push(KnownDevice { member: member.index.0, uuid: place.uuid, path: path.clone() });
            }
        }
    }
    known
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
