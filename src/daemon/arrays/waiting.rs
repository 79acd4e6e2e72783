//! An array that is to be served and is not: the obstacle, and what was found of it. A status lists it, so
//! that an array is never healthy by omission.
//!
//! Invariant: an array is either here or served, once it has been tried. Must not know how arrays are opened,
//! or when they are tried.

use super::memory::KnownArray;
use crate::control::{
    ArrayReport, ArrayState, EngineReport, ErrorCode, ErrorReport, ImportableMember, LogReport, LogState,
    MemberReport, MemberState, RequestError, StartReport, VolumeReport, explain,
};
use crate::daemon::config::ArrayChoice;
use crate::daemon::devices::import::{IMPORT_AGAIN, ImportError, newest_found};
use crate::daemon::devices::importable::importable;
use crate::daemon::devices::places::covers;
use crate::daemon::devices::search::{Found, Search};
use crate::daemon::state::KnownDevice;
use calpe_core::array::assembly::AssemblyError;
use calpe_core::format::{Superblock, VolumeKind};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;
use uuid::Uuid;

/// Most lines of a status about unusable finds: a directory may be full of them.
const NOTES_MAX: usize = 16;

/// Why an attempt to serve an array has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NotServed {
    pub(crate) error: RequestError,
    lack: Lack,
}

/// What a failed attempt lacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lack {
    /// More members, without which nothing can be served.
    Members,
    /// The current devices of members of which only older copies are there.
    Current,
    /// Something else, or unknown.
    Other,
}

impl From<RequestError> for NotServed {
    fn from(error: RequestError) -> NotServed {
        NotServed { error, lack: Lack::Other }
    }
}

impl From<ImportError> for NotServed {
    fn from(error: ImportError) -> NotServed {
        let lack = match &error {
            ImportError::Assembly { source: AssemblyError::TooFew { .. }, .. } => Lack::Members,
            ImportError::Assembly { source: AssemblyError::Unconfirmed { older, .. }, .. }
                if !older.is_empty() =>
            {
                Lack::Current
            }
            _ => Lack::Other,
        };
        NotServed { error: error.into(), lack }
    }
}

/// An array that is to be served and is not.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    /// The name or uuid by which it is awaited.
    which: ArrayChoice,
    /// Where its members are looked for.
    searched: Vec<PathBuf>,
    attempts: u64,
    /// Why the last attempt failed; none before the first attempt has ended.
    problem: Option<NotServed>,
    /// What the newest superblock says, and where its members are.
    seen: Option<(Superblock, Vec<ImportableMember>)>,
    /// Several arrays have its name, and nothing tells which is meant.
    is_ambiguous: bool,
    /// An attempt has failed for a lack of members.
    has_lacked: bool,
    /// What was found and cannot be used, a line each.
    notes: Vec<String>,
    /// What is wrong with devices of missing members at their former places, by device.
    unusable: BTreeMap<Uuid, String>,
    /// Its name and identity when it was served before.
    earlier: Option<(String, Uuid)>,
    /// Where its devices were then.
    devices: Vec<KnownDevice>,
    /// Former places of the devices of all arrays that had its name when it began to be awaited.
    remembered: Vec<PathBuf>,
    /// Where devices were found last, by device, of any array.
    places: BTreeMap<Uuid, PathBuf>,
    since: Instant,
    /// When the last attempt failed; before that, when it began to be awaited.
    last_try: Instant,
}

impl Waiting {
    /// An array whose first attempt is yet to come.
    pub(crate) fn new(which: ArrayChoice, searched: Vec<PathBuf>) -> Waiting {
        Waiting {
            which,
            searched,
            attempts: 0,
            problem: None,
            seen: None,
            is_ambiguous: false,
            has_lacked: false,
            notes: Vec::new(),
            unusable: BTreeMap::new(),
            earlier: None,
            devices: Vec::new(),
            remembered: Vec::new(),
            places: BTreeMap::new(),
            since: Instant::now(),
            last_try: Instant::now(),
        }
    }

    /// Records an attempt that failed. Returns whether its problem is new.
    pub(crate) fn note(&mut self, found: &Search, problem: impl Into<NotServed>) -> bool {
        let problem = problem.into();
        self.attempts += 1;
        self.last_try = Instant::now();
        let is_it = |members: &Vec<Found>| {
            let newest = newest_found(members);
            newest.is_some_and(|superblock| self.is(&superblock.name, superblock.array))
        };
        let all: Vec<_> = found.arrays.iter().filter(|(_, members)| is_it(members)).collect();
        self.is_ambiguous = all.len() > 1 && problem.error.code == ErrorCode::NoSuchArray;
        let members = all.first().filter(|_| all.len() == 1);
        self.seen = members.and_then(|(_, members)| {
            let newest = newest_found(members)?.clone();
            let path = |device: &&KnownDevice| device.path.clone();
            let earlier = |_, uuid| self.devices.iter().find(|device| device.uuid == uuid).as_ref().map(path);
            Some((newest, importable(members, found, earlier)?.members))
        });
        self.notes = found.warnings.iter().chain(&found.unread).take(NOTES_MAX).cloned().collect();
        let unusable = |device: &KnownDevice| Some((device.uuid, found.problem_at(&device.path)?));
        self.unusable = self.devices.iter().filter_map(unusable).collect();
        let place = |member: &Found| (member.superblock.device, member.path.clone());
        self.places = found.arrays.values().flatten().map(place).collect();
        let is_new = self.problem.as_ref() != Some(&problem);
        self.problem = Some(problem);
        self.has_lacked |= self.lacks_members_now();
        is_new
    }

    /// Takes what is remembered: the array that it must be, if known, and the former places of devices of all
    /// arrays that it may be.
    pub(super) fn recall(&mut self, earlier: Option<KnownArray>, remembered: Vec<PathBuf>) {
        if let Some(KnownArray { uuid, name, devices }) = earlier {
            self.earlier = Some((name, uuid));
            self.devices = devices;
        }
        self.remembered = remembered;
    }

    fn is(&self, name: &str, uuid: Uuid) -> bool {
        self.which.means(name, uuid)
    }

    /// Whether it is known to be another array of this name.
    pub(super) fn is_another(&self, uuid: Uuid) -> bool {
        self.earlier.as_ref().is_some_and(|(_, earlier)| *earlier != uuid)
    }

    /// Whether only its name is known, and it may be this array, which was exported after the last attempt.
    pub(super) fn may_be_exported(&self, name: &str, uuid: Uuid, at: Instant) -> bool {
        self.last_try < at && self.seen.is_none() && self.earlier.is_none() && self.is(name, uuid)
    }

    /// Whether its first attempt has not ended.
    pub(super) fn is_untried(&self) -> bool {
        self.attempts == 0
    }

    /// Since when it is awaited.
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// Former places of devices that may be its own.
    pub(super) fn remembered(&self) -> &[PathBuf] {
        &self.remembered
    }

    /// What was found and cannot be used, a line each.
    pub(super) fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Whether an attempt has failed for a lack of members.
    pub(super) fn has_lacked(&self) -> bool {
        self.has_lacked
    }

    /// Whether it is this array, which is served from devices at these paths. Other arrays may have the same
    /// name.
    pub(super) fn is_met_by(&self, name: &str, uuid: Uuid, paths: &[PathBuf]) -> bool {
        let lies_there = || paths.iter().any(|path| self.searched.iter().any(|place| covers(place, path)));
        self.is(name, uuid)
            && match (&self.which, &self.seen, &self.earlier) {
                (ArrayChoice::Uuid(_), ..) => true,
                (_, Some((superblock, _)), _) => superblock.array == uuid,
                (_, None, Some((_, earlier))) if *earlier == uuid => true,
                (_, None, _) => lies_there(),
            }
    }

    /// Whether it is this array, or may be, because only its name is known.
    pub(super) fn may_be_met_by(&self, name: &str, uuid: Uuid, paths: &[PathBuf]) -> bool {
        let is_unknown = self.seen.is_none() && self.earlier.is_none();
        self.is_met_by(name, uuid, paths) || is_unknown && self.is(name, uuid)
    }

    /// Whether the last attempt failed for lack of members.
    fn lacks_members_now(&self) -> bool {
        let is_lack = |code| matches!(code, ErrorCode::NoSuchArray | ErrorCode::NeedsForce);
        let is_lack = self.problem.as_ref().is_some_and(|problem| is_lack(problem.error.code));
        self.lacks_members() || is_lack && !self.is_ambiguous
    }

    /// The devices of its members that were not found the last time.
    pub(super) fn missing_devices(&self) -> Vec<Uuid> {
        match &self.seen {
            Some((_, members)) => members.iter().filter(|m| m.path.is_none()).map(|m| m.uuid).collect(),
            None => self.devices.iter().map(|device| device.uuid).collect(),
        }
    }

    /// The name or uuid by which it is awaited.
    pub(crate) fn which(&self) -> &ArrayChoice {
        &self.which
    }

    /// Its name, or what it is known by instead.
    pub(crate) fn name(&self) -> String {
        let earlier = || self.earlier.as_ref().map(|(name, _)| name.clone());
        let seen = self.seen.as_ref().map(|(superblock, _)| superblock.name.clone());
        seen.or_else(earlier).unwrap_or_else(|| self.which.to_string())
    }

    /// Its identity; all zeroes where it is not known.
    pub(crate) fn uuid(&self) -> Uuid {
        match (&self.seen, &self.which, &self.earlier) {
            (Some((superblock, _)), _, _) => superblock.array,
            (None, ArrayChoice::Uuid(uuid), _) | (None, ArrayChoice::Name(_), Some((_, uuid))) => *uuid,
            (None, ArrayChoice::Name(_), None) => Uuid::nil(),
        }
    }

    /// Why the last attempt failed, as a sentence without its full stop.
    pub(crate) fn problem(&self) -> Option<String> {
        let error = &self.problem.as_ref()?.error;
        Some(match (error.code, &self.seen) {
            // The advice in that message is for a command line that names places.
            (ErrorCode::NoSuchArray, None) if !self.is_ambiguous => {
                format!("no member of it was found in {}", self.places().join(", "))
            }
            _ => error.message.replacen(IMPORT_AGAIN, "", 1).trim_end_matches('.').to_owned(),
        })
    }

    /// Where its members are looked for: the configured places, and where they were before.
    fn places(&self) -> Vec<String> {
        let is_covered =
            |device: &&KnownDevice| self.searched.iter().any(|place| covers(place, &device.path));
        let before = self.devices.iter().filter(|device| !is_covered(device)).map(|device| &device.path);
        self.searched.iter().chain(before).map(|place| place.display().to_string()).collect()
    }

    /// Whether older copies of members were found.
    fn is_older(&self) -> bool {
        self.problem.as_ref().is_some_and(|problem| problem.lack == Lack::Current)
    }

    fn lacks_members(&self) -> bool {
        self.problem.as_ref().is_some_and(|problem| problem.lack == Lack::Members)
    }

    fn advice(&self) -> String {
        let name = self.name();
        match self.problem.as_ref().map(|problem| problem.error.code) {
            None => String::new(),
            Some(_) if self.is_ambiguous => {
                "Say which one is meant: its uuid in place of its name in the [[array]] section, or \
                 'calpe import UUID', which is remembered."
                    .to_owned()
            }
            Some(ErrorCode::NoSuchArray) if !self.notes.is_empty() => format!(
                "What was found and cannot be used may be its members: see to that first. Otherwise connect their devices, or say \
                 where they are ('search' of the array in the configuration, or 'calpe import {name} --dir DIR'). It is tried again \
                 by itself."
            ),
            Some(ErrorCode::NoSuchArray) => format!(
                "Connect the devices of its members, or say where they are ('search' of the array in the configuration, or 'calpe import \
                 {name} --dir DIR'). It is tried again by itself."
            ),
            Some(ErrorCode::NeedsForce) if self.is_older() => format!(
                "Put the current devices or files of the older copies back: it is tried again by itself, and nothing is lost then. Only \
                 if those are gone for good: 'calpe import --force {name}' serves the older state, without what was written since."
            ),
            Some(ErrorCode::NeedsForce) => format!(
                "Bring back the members that are missing: it is tried again by itself. If they are gone for good, 'calpe import \
                 --force {name}' starts it without them."
            ),
            Some(_) if self.lacks_members() => {
                "Bring back the members that are missing: it is tried again by itself.".to_owned()
            }
            Some(_) => "Mend what is in the way: it is tried again by itself.".to_owned(),
        }
    }

    /// Its members as far as known: where they were found, or were before.
    fn members(&self) -> Vec<MemberReport> {
        let earlier = |uuid: Uuid| self.devices.iter().find(|device| device.uuid == uuid);
        let report = |index: u16, uuid: Uuid, path: Option<&PathBuf>, note: Option<String>| {
            let place = path.or(earlier(uuid).map(|device| &device.path));
            let note = note.or_else(|| self.unusable.get(&uuid).filter(|_| path.is_none()).cloned());
            MemberReport {
                index,
                name: place.map_or_else(|| uuid.to_string(), |path| path.display().to_string()),
                uuid,
                state: match path {
                    Some(_) => MemberState::Found,
                    None if self.attempts == 0 => MemberState::Waiting,
                    None => MemberState::Missing,
                },
                read: 0,
                write: 0,
                cksum: 0,
                repaired: 0,
                reason: note,
                conditions: Vec::new(),
                cached: false,
                tried_in_s: None,
                replacement: None,
            }
        };
        match &self.seen {
            Some((_, members)) => members
                .iter()
                .map(|member| report(member.index, member.uuid, member.path.as_ref(), member.note.clone()))
                .collect(),
            None => {
                let known = self.devices.iter();
                let one = |d: &KnownDevice| report(d.member, d.uuid, self.places.get(&d.uuid), None);
                known.map(one).collect()
            }
        }
    }

    /// Its entry in a status.
    pub(crate) fn report(&self) -> ArrayReport {
        let superblock = self.seen.as_ref().map(|(superblock, _)| superblock);
        let geometry = superblock.map(|superblock| &superblock.geometry);
        let kind = superblock.map_or("", |superblock| match superblock.volume {
            VolumeKind::Plain => "plain",
            VolumeKind::Cas => "cas",
        });
        let mut report = ArrayReport {
            name: self.name(),
            uuid: self.uuid(),
            state: if self.attempts == 0 { ArrayState::Waiting } else { ArrayState::Failed },
            status: String::new(),
            action: String::new(),
            volume: VolumeReport {
                kind: kind.into(),
                bytes: geometry.map_or(0, |geometry| geometry.volume_bytes),
                logical: None,
                stored: None,
            },
            data: geometry.map_or(0, |geometry| geometry.data),
            parity: geometry.map_or(0, |geometry| geometry.parity),
            chunk: geometry.map_or(0, |geometry| geometry.chunk),
            checksum: superblock.map_or_else(String::new, |superblock| superblock.checksum.to_string()),
            log: LogReport { state: LogState::NotStarted, reason: None, yields_to_force: false },
            epoch: superblock.map_or(0, |superblock| superblock.epoch.number),
            dirty: superblock.is_some_and(|superblock| !superblock.clean),
            uris: Vec::new(),
            read_only: false,
            clients: 0,
            members: self.members(),
            scan: Vec::new(),
            last_scrub: None,
            last_scrub_unchecked: Vec::new(),
            engine: EngineReport::default(),
            page_cache: None,
            errors: ErrorReport::default(),
            lost: Vec::new(),
            set_aside: Vec::new(),
            set_aside_members: Vec::new(),
            failed_lanes: Vec::new(),
            unreadable: Vec::new(),
            unreadable_pages: 0,
            unconfirmed: Vec::new(),
            start: Some(StartReport {
                attempts: self.attempts,
                problem: self.problem(),
                advice: self.advice(),
                searched: self.places(),
                notes: self.notes.clone(),
            }),
        };
        let explanation = explain(&report);
        report.status = explanation.status;
        report.action = explanation.action;
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::verdict;
    use crate::daemon::arrays::outcome::refusal;
    use crate::daemon::devices::search::Unusable;
    use std::path::Path;

    #[test]
    fn before_its_first_attempt_an_array_is_waiting_and_not_healthy() {
        let mut waiting = Waiting::new(ArrayChoice::Name("tank".into()), vec!["/srv".into()]);
        waiting.devices = vec![KnownDevice { member: 0, uuid: Uuid::from_u128(1), path: "/srv/m0".into() }];
        let report = waiting.report();
        assert_eq!(report.members[0].state.to_string(), "WAITING", "nobody has looked for it");
        assert_eq!((report.state, report.state.to_string().as_str()), (ArrayState::Waiting, "WAITING"));
        assert!(report.start.as_ref().is_some_and(|start| start.problem.is_none()), "{report:?}");
        assert_eq!(verdict(&[report]).exit_code(), 2);
        waiting.note(&Search::default(), refusal(ErrorCode::NoSuchArray, "no member of it"));
        let report = waiting.report();
        assert_eq!((report.state, report.members[0].state), (ArrayState::Failed, MemberState::Missing));
        // The last obstacle need not be the only one.
        waiting.note(&Search::default(), refusal(ErrorCode::Refused, "no threads"));
        assert!(waiting.has_lacked);
    }

    #[test]
    fn members_that_cannot_be_read_are_named_before_ones_that_are_not_there() {
        let mut waiting = Waiting::new(ArrayChoice::Name("tank".into()), vec!["/srv".into()]);
        let mut found = Search::default();
        let error = || refusal(ErrorCode::NoSuchArray, "no member of it");
        waiting.note(&found, error());
        assert!(waiting.advice().starts_with("Connect the devices"), "{}", waiting.advice());
        found.unread.push("/srv/m0: permission denied".into());
        waiting.note(&found, error());
        assert!(waiting.advice().starts_with("What was found and cannot be used"), "{}", waiting.advice());
    }

    #[test]
    fn what_is_wrong_where_members_were_is_told_with_them_and_where_they_are_looked_for() {
        let device = |member: u16, path: &str| KnownDevice {
            member,
            uuid: Uuid::from_u128(u128::from(member)),
            path: path.into(),
        };
        let mut waiting = Waiting::new(
            ArrayChoice::Uuid(Uuid::from_u128(77)),
            vec!["/srv".into(), "/dev/disk/by-id".into()],
        );
        waiting.devices = vec![device(0, "/m/m0"), device(1, "/m/m1"), device(2, "/srv/m2")];
        let overwritten = crate::daemon::devices::search::overwritten(Path::new("/m/m0"));
        let (path, reason) = ("/m/m0".into(), overwritten.clone());
        let unusable = Unusable {
            path,
            device: None,
            reason,
            hindrance: Some(crate::daemon::devices::search::Hindrance::Overwritten),
        };
        let found = Search {
            unusable: vec![unusable],
            unread: vec!["/m/m1: permission denied".into()],
            ..Search::default()
        };
        waiting.note(&found, refusal(ErrorCode::NoSuchArray, "none"));
        let report = waiting.report();
        let reasons: Vec<_> = report.members.iter().map(|member| member.reason.as_deref()).collect();
        assert_eq!(reasons, [Some(overwritten.as_str()), Some("/m/m1: permission denied"), None]);
        let searched = report.start.expect("it is not served").searched;
        assert_eq!(searched, ["/srv", "/dev/disk/by-id", "/m/m0", "/m/m1"]);
        assert!(report.status.contains("in /srv, /dev/disk/by-id, /m/m0, /m/m1"), "{}", report.status);
    }
}
