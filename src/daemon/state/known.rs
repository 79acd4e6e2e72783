//! What is remembered of arrays: which are to be served, where their devices were, and their counts of
//! errors. Pure values, as they are on disk.

use calpe_core::volume::MemberCounters;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use uuid::Uuid;

/// Most arrays that are remembered: more than any host has. Beyond that, the one that has not been served for
/// longest is forgotten.
const ARRAYS_MAX: usize = 1024;

/// Arrays, by identity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Arrays(pub BTreeMap<Uuid, Known>);

/// What is known of an array.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Known {
    /// Its name.
    pub name: String,
    /// When it was served last, in seconds since 1970, roughly.
    #[serde(default)]
    pub served_unix: u64,
    /// Whether a command imported it, so that a restart serves it again.
    #[serde(default)]
    pub import: bool,
    /// Where that import looked for its members.
    #[serde(default)]
    pub search: Vec<PathBuf>,
    /// Whether an administrator has paused its scrub.
    #[serde(default)]
    pub scrub_paused: bool,
    /// When its last scrub ended, in seconds since 1970.
    #[serde(default)]
    pub scrub_unix: u64,
    /// Members that this scrub could not check.
    #[serde(default)]
    pub scrub_unchecked: Vec<u16>,
    /// Requests of clients that failed.
    #[serde(default)]
    pub client_errors: u64,
    /// Replacements that were given up while their members stayed in service.
    #[serde(default)]
    pub given_up: Vec<MemberReason>,
    /// Why members are out of service that the superblocks record as out.
    #[serde(default)]
    pub out: Vec<MemberReason>,
    /// Devices whose members were missing when it had failed, or could not be served, and have not come back.
    #[serde(default)]
    pub failed_without: Vec<Uuid>,
    /// The devices that served it last.
    #[serde(default)]
    pub devices: Vec<KnownDevice>,
}

/// Reason for a member's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemberReason {
    /// Which.
    pub member: u16,
    /// Its device.
    pub device: Uuid,
    /// Why its replacement was given up, or why it is out of service.
    pub reason: String,
}

/// A device of an array.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KnownDevice {
    /// Its member.
    pub member: u16,
    /// Its identity.
    pub uuid: Uuid,
    /// Where it was.
    pub path: PathBuf,
}

impl Arrays {
    /// Where a device was.
    pub(crate) fn path_of(&self, array: Uuid, device: Uuid) -> Option<PathBuf> {
        let devices = &self.0.get(&array)?.devices;
        devices.iter().find(|known| known.uuid == device).map(|known| known.path.clone())
    }

    /// The arrays of that name or identity.
    pub(crate) fn find<'a>(&'a self, which: &'a str) -> impl Iterator<Item = (&'a Uuid, &'a Known)> {
        let uuid = which.parse::<Uuid>().ok();
        self.0.iter().filter(move |(own, known)| known.name == which || uuid == Some(**own))
    }

    /// Records that an array is served by these devices. Returns whether anything has changed.
    pub(crate) fn note(&mut self, array: Uuid, name: &str, devices: Vec<KnownDevice>, unix: u64) -> bool {
        let known = self.0.entry(array).or_default();
        let is_new = known.name != name || known.devices != devices;
        if is_new {
            known.name = name.to_owned();
            known.devices = devices;
            known.served_unix = unix;
        }
        if self.0.len() > ARRAYS_MAX {
            let oldest = self.0.iter().filter(|(uuid, known)| **uuid != array && !known.import);
            let oldest = oldest.min_by_key(|(_, known)| known.served_unix).map(|(uuid, _)| *uuid);
            oldest.map(|uuid| self.0.remove(&uuid));
        }
        is_new
    }
}

impl Known {
    /// Records when the last scrub ended and which members it could not check. Returns whether that
    /// has changed.
    pub(crate) fn note_unchecked(&mut self, unix: u64, members: Vec<u16>) -> bool {
        let is_new = (self.scrub_unix, &self.scrub_unchecked) != (unix, &members);
        (self.scrub_unix, self.scrub_unchecked) = (unix, members);
        is_new
    }

    /// Records how many requests of clients have failed. Returns whether that has changed.
    pub(crate) fn note_client_errors(&mut self, count: u64) -> bool {
        std::mem::replace(&mut self.client_errors, count) != count
    }

    /// Records the replacements that were given up. Returns whether they have changed.
    pub(crate) fn note_given_up(&mut self, given_up: Vec<MemberReason>) -> bool {
        let is_new = self.given_up != given_up;
        self.given_up = given_up;
        is_new
    }

    /// Records why members are out of service. Returns whether that has changed.
    pub(crate) fn note_out(&mut self, out: Vec<MemberReason>) -> bool {
        let is_new = self.out != out;
        self.out = out;
        is_new
    }

    /// Records the devices that were missing when it had FAILED. Returns whether they have changed.
    pub(crate) fn note_failed_without(&mut self, devices: Vec<Uuid>) -> bool {
        let is_new = self.failed_without != devices;
        self.failed_without = devices;
        is_new
    }

    /// Records whether an administrator has paused the scrub. Returns whether that has changed.
    pub(crate) fn note_scrub(&mut self, is_paused: bool) -> bool {
        std::mem::replace(&mut self.scrub_paused, is_paused) != is_paused
    }
}

/// Counts of errors, by array and member.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Counters(pub BTreeMap<Uuid, Vec<Counts>>);

/// The counts of a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Counts {
    pub read: u64,
    pub write: u64,
    pub cksum: u64,
    pub repaired: u64,
}

impl From<MemberCounters> for Counts {
    fn from(counters: MemberCounters) -> Counts {
        Counts {
            read: counters.read_errors,
            write: counters.write_errors,
            cksum: counters.checksum_errors,
            repaired: counters.repaired,
        }
    }
}

impl std::ops::Add for Counts {
    type Output = Counts;

    fn add(self, other: Counts) -> Counts {
        Counts {
            read: self.read.saturating_add(other.read),
            write: self.write.saturating_add(other.write),
            cksum: self.cksum.saturating_add(other.cksum),
            repaired: self.repaired.saturating_add(other.repaired),
        }
    }
}

impl Counters {
    /// Records the counts of an array; all zeroes are not stored. Returns whether they have
    /// changed.
    pub(crate) fn note(&mut self, array: Uuid, counts: Vec<Counts>) -> bool {
        if counts.iter().all(|count| *count == Counts::default()) {
            return self.0.remove(&array).is_some();
        }
        self.0.insert(array, counts.clone()) != Some(counts)
    }
}

/// Most ranges remembered of an array: nobody reads a longer list.
const RANGES_MAX: usize = 16_384;

/// Ranges of volumes that could not be read, by array: (start, length) in bytes, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Damage(pub BTreeMap<Uuid, Vec<(u64, u64)>>);

impl Damage {
    /// Records which ranges of an array cannot be read now. Returns whether they have changed.
    pub(crate) fn note(&mut self, array: Uuid, mut ranges: Vec<(u64, u64)>) -> bool {
        if ranges.is_empty() {
            return self.0.remove(&array).is_some();
        }
        ranges.sort_unstable();
        ranges.dedup_by(|next, last| {
            let follows = last.0 + last.1 == next.0;
            if follows {
                last.1 += next.1;
            }
            follows
        });
        ranges.truncate(RANGES_MAX);
        if self.0.get(&array) == Some(&ranges) {
            return false;
        }
        self.0.insert(array, ranges);
        true
    }
}

/// Slots in which devices lack blocks, by array and device, as runs (first slot, count).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Lacking(pub BTreeMap<Uuid, BTreeMap<Uuid, Vec<(u64, u64)>>>);

impl Lacking {
    /// Records which slots the devices of an array lack now. Returns whether they have changed.
    pub(crate) fn note(&mut self, array: Uuid, devices: BTreeMap<Uuid, Vec<(u64, u64)>>) -> bool {
        if devices.is_empty() {
            return self.0.remove(&array).is_some();
        }
        if self.0.get(&array) == Some(&devices) {
            return false;
        }
        self.0.insert(array, devices);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_that_were_not_served_for_longest_make_room_but_not_those_to_be_imported() {
        let mut arrays = Arrays::default();
        for at in 0..ARRAYS_MAX as u128 {
            assert!(arrays.note(Uuid::from_u128(at), "a", Vec::new(), at as u64));
        }
        assert!(!arrays.note(Uuid::from_u128(1), "a", Vec::new(), 5000), "nothing new");
        arrays.0.get_mut(&Uuid::from_u128(0)).unwrap().import = true;
        assert!(arrays.note(Uuid::from_u128(9999), "b", Vec::new(), 9999));
        assert_eq!(arrays.0.len(), ARRAYS_MAX);
        assert!(arrays.0.contains_key(&Uuid::from_u128(0)) && !arrays.0.contains_key(&Uuid::from_u128(1)));
    }

    #[test]
    fn ranges_are_put_together_and_forgotten_when_there_are_none() {
        let (mut damage, array) = (Damage::default(), Uuid::from_u128(1));
        assert!(!damage.note(array, Vec::new()));
        assert!(damage.note(array, vec![(16384, 4096), (0, 4096), (4096, 8192)]));
        assert_eq!(damage.0[&array], [(0, 12288), (16384, 4096)]);
        assert!(!damage.note(array, vec![(0, 12288), (16384, 4096)]));
        assert!(damage.note(array, Vec::new()) && damage.0.is_empty());
    }

    #[test]
    fn counts_are_news_when_they_change() {
        let (mut counters, array) = (Counters::default(), Uuid::from_u128(1));
        let one = Counts { read: 1, ..Counts::default() };
        assert!(!counters.note(array, vec![Counts::default(); 2]));
        assert!(counters.note(array, vec![one, Counts::default()]));
        assert!(!counters.note(array, vec![one, Counts::default()]));
        assert!(counters.note(array, vec![one + one, Counts::default()]));
        assert!(counters.note(array, vec![Counts::default(); 2]) && counters.0.is_empty());
    }
}
