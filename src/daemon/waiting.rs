//! The arrays that are to be served and are not: what is in the way of each, and what was found of it. They
//! are part of every status, so that an array is never healthy by omission.
//!
//! Invariant: an array is either here or served, once it has been tried. Must not know how arrays are opened,
//! or when they are tried.

use super::arrays::importable;
use super::config::ArrayChoice;
use super::events::{News, kinds};
use super::import::IMPORT_AGAIN;
use super::memory::covers;
use super::ranked::lock;
use super::search::{Found, Search};
use super::service::{Daemon, Served};
use super::state::KnownDevice;
use crate::control::{
    ArrayReport, ArrayState, EngineReport, ErrorCode, ErrorReport, ImportableMember, LogReport, LogState,
    MemberReport, MemberState, RequestError, StartReport, VolumeReport, explain,
};
use calpe_core::array::assembly::STARTS_OLDER;
use calpe_core::format::{Superblock, VolumeKind};
use calpe_core::volume::NoticeLevel;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;
use uuid::Uuid;

/// Lines about what was found and cannot be used that a status carries: a directory may be full of it.
const NOTES_MAX: usize = 16;

/// An array that is to be served and is not.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    /// As it was asked for.
    which: ArrayChoice,
    /// Where its members are looked for.
    searched: Vec<PathBuf>,
    attempts: u64,
    /// What was in the way the last time; none before the first attempt has ended.
    problem: Option<RequestError>,
    /// What the newest superblock says, and where its members are.
    seen: Option<(Superblock, Vec<ImportableMember>)>,
    /// Whether several arrays have its name, and nothing tells which is meant.
    is_ambiguous: bool,
    /// An attempt has failed for a lack of members.
    has_lacked: bool,
    /// What was found and cannot be used, a line each.
    notes: Vec<String>,
    /// What is wrong with the devices of members that were not found, where they were before, by device.
    unusable: BTreeMap<Uuid, String>,
    /// Name and identity that it had when it was served.
    earlier: Option<(String, Uuid)>,
    /// Where its devices were then.
    devices: Vec<KnownDevice>,
    /// Where devices of all arrays were that had its name when it began to be awaited, and that it
    /// may be.
    remembered: Vec<PathBuf>,
    /// Where devices were found the last time, by device, of whichever array.
    places: BTreeMap<Uuid, PathBuf>,
    since: Instant,
    /// When an attempt has failed last, or it began to be awaited.
    last_try: Instant,
}

impl Waiting {
    /// An array whose first attempt is yet to come.
    pub fn new(which: ArrayChoice, searched: Vec<PathBuf>) -> Waiting {
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

    /// Takes note of an attempt that failed. Whether there is something new about it.
    pub fn note(&mut self, found: &Search, error: RequestError) -> bool {
        self.attempts += 1;
        self.last_try = Instant::now();
        let is_it = |members: &Vec<Found>| {
            let newest = super::import::newest_found(members);
            newest.is_some_and(|superblock| self.is(&superblock.name, superblock.array))
        };
        let all: Vec<_> = found.arrays.iter().filter(|(_, members)| is_it(members)).collect();
        self.is_ambiguous = all.len() > 1 && error.code == ErrorCode::NoSuchArray;
        let members = all.first().filter(|_| all.len() == 1);
        self.seen = members.and_then(|(_, members)| {
            let newest = super::import::newest_found(members)?.clone();
            let path = |device: &&KnownDevice| device.path.clone();
            let earlier = |_, uuid| self.devices.iter().find(|device| device.uuid == uuid).as_ref().map(path);
            Some((newest, importable(members, found, earlier)?.members))
        });
        self.notes = found.warnings.iter().chain(&found.unread).take(NOTES_MAX).cloned().collect();
        let unusable = |device: &KnownDevice| Some((device.uuid, found.problem_at(&device.path)?));
        self.unusable = self.devices.iter().filter_map(unusable).collect();
        let place = |member: &Found| (member.superblock.device, member.path.clone());
        self.places = found.arrays.values().flatten().map(place).collect();
        let is_new = self.problem.as_ref() != Some(&error);
        self.problem = Some(error);
        self.has_lacked |= self.lacks_members_now();
        is_new
    }

    fn is(&self, name: &str, uuid: Uuid) -> bool {
        self.which.means(name, uuid)
    }

    /// Whether it is this array, which is served and has devices at these paths. Of its name there
    /// may be others.
    fn is_met_by(&self, name: &str, uuid: Uuid, paths: &[PathBuf]) -> bool {
        let lies_there = || paths.iter().any(|path| self.searched.iter().any(|place| covers(place, path)));
        self.is(name, uuid)
            && match (&self.which, &self.seen, &self.earlier) {
                (ArrayChoice::Uuid(_), ..) => true,
                (_, Some((superblock, _)), _) => superblock.array == uuid,
                (_, None, Some((_, earlier))) if *earlier == uuid => true,
                (_, None, _) => lies_there(),
            }
    }

    /// The same, or it may be it: nothing but its name is known.
    fn may_be_met_by(&self, name: &str, uuid: Uuid, paths: &[PathBuf]) -> bool {
        let is_unknown = self.seen.is_none() && self.earlier.is_none();
        self.is_met_by(name, uuid, paths) || is_unknown && self.is(name, uuid)
    }

    /// Whether members are what it lacked the last time.
    fn lacks_members_now(&self) -> bool {
        let is_lack = |code| matches!(code, ErrorCode::NoSuchArray | ErrorCode::NeedsForce);
        let is_lack = self.problem.as_ref().is_some_and(|error| is_lack(error.code));
        self.lacks_members() || is_lack && !self.is_ambiguous
    }

    /// The devices of its members that were not found the last time.
    fn missing_devices(&self) -> Vec<Uuid> {
        match &self.seen {
            Some((_, members)) => members.iter().filter(|m| m.path.is_none()).map(|m| m.uuid).collect(),
            None => self.devices.iter().map(|device| device.uuid).collect(),
        }
    }

    /// As it was asked for.
    pub fn which(&self) -> &ArrayChoice {
        &self.which
    }

    /// Its name, or what else it is known by.
    pub fn name(&self) -> String {
        let earlier = || self.earlier.as_ref().map(|(name, _)| name.clone());
        let seen = self.seen.as_ref().map(|(superblock, _)| superblock.name.clone());
        seen.or_else(earlier).unwrap_or_else(|| self.which.to_string())
    }

    /// Its identity; all zeroes where it is not known.
    pub fn uuid(&self) -> Uuid {
        match (&self.seen, &self.which, &self.earlier) {
            (Some((superblock, _)), _, _) => superblock.array,
            (None, ArrayChoice::Uuid(uuid), _) | (None, ArrayChoice::Name(_), Some((_, uuid))) => *uuid,
            (None, ArrayChoice::Name(_), None) => Uuid::nil(),
        }
    }

    /// What was in the way, in a sentence without its end.
    pub fn problem(&self) -> Option<String> {
        let error = self.problem.as_ref()?;
        Some(match (error.code, &self.seen) {
            // Its advice is for one who has named the places on a command line.
            (ErrorCode::NoSuchArray, None) if !self.is_ambiguous => {
                format!("no member of it was found in {}", self.places().join(", "))
            }
            _ => error.message.replacen(IMPORT_AGAIN, "", 1).trim_end_matches('.').to_owned(),
        })
    }

    /// Where its members are looked for: in the places for it, and where they were before.
    fn places(&self) -> Vec<String> {
        let is_covered =
            |device: &&KnownDevice| self.searched.iter().any(|place| covers(place, &device.path));
        let before = self.devices.iter().filter(|device| !is_covered(device)).map(|device| &device.path);
        self.searched.iter().chain(before).map(|place| place.display().to_string()).collect()
    }

    /// Whether members are here as older copies of themselves.
    fn is_older(&self) -> bool {
        self.problem.as_ref().is_some_and(|error| error.message.contains(STARTS_OLDER))
    }

    fn lacks_members(&self) -> bool {
        self.problem.as_ref().is_some_and(|error| error.message.contains(IMPORT_AGAIN))
    }

    fn advice(&self) -> String {
        let name = self.name();
        match self.problem.as_ref().map(|error| error.code) {
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

    /// What is known of its members: where they were found, or were before.
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

    /// As a part of a status.
    pub fn report(&self) -> ArrayReport {
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
            errors: ErrorReport::default(),
            lost: Vec::new(),
            set_aside: Vec::new(),
            set_aside_members: Vec::new(),
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

impl Daemon {
    /// An array is to be served from now on: it is part of the status although nothing of it is known. Nothing changes for
    /// one that is awaited already.
    pub(super) fn await_array(&self, mut waiting: Waiting) {
        {
            let memory = lock(&self.memory);
            let which = waiting.which.to_string();
            let mut earlier = memory.arrays.find(&which);
            // Of two arrays of one name, nothing tells which is meant.
            if let (Some((uuid, known)), None) = (earlier.next(), earlier.next()) {
                waiting.earlier = Some((known.name.clone(), *uuid));
                waiting.devices = known.devices.clone();
            }
            let all = memory.arrays.find(&which).flat_map(|(_, known)| &known.devices);
            waiting.remembered = all.map(|device| device.path.clone()).collect();
        }
        let mut all = lock(&self.waiting);
        if !all.iter().any(|known| known.which == waiting.which) {
            all.push(waiting);
        }
    }

    /// An attempt to serve an array that is awaited has failed. It is told when there is something new about
    /// it.
    pub(super) fn still_awaited(&self, which: &ArrayChoice, found: &Search, error: RequestError) {
        let (told, lacks) = {
            let mut all = lock(&self.waiting);
            let Some(waiting) = all.iter_mut().find(|waiting| waiting.which == *which) else { return };
            let is_new = waiting.note(found, error);
            let lacks =
                waiting.has_lacked.then(|| (waiting.name(), waiting.uuid(), waiting.missing_devices()));
            let told = is_new.then(|| {
                let names = (waiting.name(), waiting.uuid());
                (names, waiting.problem().unwrap_or_default(), waiting.notes.clone())
            });
            (told, lacks)
        };
        if let Some((name, uuid, missing)) = lacks {
            self.remember_lack(&name, uuid, &missing);
        }
        if let Some(((name, uuid), problem, notes)) = told {
            let notes = notes.iter().map(|line| format!("\n{line}")).collect::<String>();
            let text = format!("cannot import it: {problem}; it is tried again{notes}");
            let news = News::new(Some(&name), kinds::IMPORT_FAILED, NoticeLevel::Error, text);
            // It is not served: one that is may have its name.
            self.events.tell(News { uuid: Some(uuid), ..news });
        }
    }

    /// An array is served, or need not be.
    pub(super) fn not_awaited(&self, which: &ArrayChoice) {
        lock(&self.waiting).retain(|waiting| waiting.which != *which);
    }

    /// An array is not to be served any more. An attempt that has its devices open serves it before
    /// this, or not at all. Whether it was awaited still.
    pub(super) fn give_up(&self, which: &ArrayChoice) -> bool {
        let _nothing_begins = self.keep_from_serving();
        let was_awaited = self.is_awaited(which);
        self.not_awaited(which);
        was_awaited
    }

    /// An administrator takes an array out of service: no section that is awaited brings it back,
    /// whatever its members' paths are called there.
    pub(super) fn note_exported(&self, name: &str, uuid: Uuid) {
        lock(&self.exported).insert(uuid, (name.to_owned(), Instant::now()));
    }

    /// Whether the array was exported since this one is awaited.
    pub(super) fn was_exported(&self, which: &ArrayChoice, uuid: Uuid) -> bool {
        let since = lock(&self.waiting).iter().find(|waiting| waiting.which == *which).map(|w| w.since);
        let exported = lock(&self.exported).get(&uuid).map(|(_, at)| *at);
        since.zip(exported).is_some_and(|(since, exported)| since <= exported)
    }

    /// Whether what is awaited is known to be another array than this one of its name.
    pub(super) fn is_another(&self, which: &ArrayChoice, uuid: Uuid) -> bool {
        let waiting = lock(&self.waiting);
        let known = |waiting: &Waiting| waiting.earlier.as_ref().is_some_and(|(_, earlier)| *earlier != uuid);
        waiting.iter().find(|waiting| waiting.which == *which).is_some_and(known)
    }

    /// An array is served from devices at these paths, whoever has asked for it.
    pub(super) fn now_served(&self, name: &str, uuid: Uuid, paths: &[PathBuf]) {
        lock(&self.waiting).retain(|waiting| !waiting.is_met_by(name, uuid, paths));
    }

    /// Whether this array was tried in vain, for lack of members, since it is awaited.
    pub(super) fn lacked_members(&self, name: &str, uuid: Uuid, paths: &[PathBuf]) -> bool {
        let waiting = lock(&self.waiting);
        waiting.iter().any(|waiting| waiting.is_met_by(name, uuid, paths) && waiting.has_lacked)
    }

    /// Where devices were that an array which is awaited may have. What was served under its name
    /// since is another one.
    pub(super) fn remembered_paths(&self, which: &ArrayChoice) -> Vec<PathBuf> {
        let waiting = lock(&self.waiting);
        let own = waiting.iter().find(|waiting| waiting.which == *which);
        own.map(|waiting| waiting.remembered.clone()).unwrap_or_default()
    }

    /// Whether the first attempt to serve an array that is awaited has not ended.
    pub(super) fn is_untried(&self, which: &ArrayChoice) -> bool {
        lock(&self.waiting).iter().any(|waiting| waiting.which == *which && waiting.attempts == 0)
    }

    /// Whether an array is to be served and is not.
    pub(super) fn is_awaited(&self, which: &ArrayChoice) -> bool {
        lock(&self.waiting).iter().any(|waiting| waiting.which == *which)
    }

    /// The arrays that are awaited, to be told of: one that was imported by hand meanwhile is
    /// served. So is one of which nothing but its name is known while one of that name is served,
    /// as that may be it; and when that is exported, it is told of again after the next attempt.
    pub(super) fn awaited(&self) -> Vec<Waiting> {
        let facts = |Served { names, .. }: &Served| {
            (names.name.clone(), names.uuid, names.paths().cloned().collect::<Vec<_>>())
        };
        let served: Vec<_> = lock(&self.served).iter().map(facts).collect();
        let is_served = |waiting: &Waiting| {
            served.iter().any(|(name, uuid, paths)| waiting.may_be_met_by(name, *uuid, paths))
        };
        let waiting = lock(&self.waiting);
        let exported = lock(&self.exported);
        // Until the next attempt tells whether it is that one.
        let may_be_exported = |waiting: &Waiting| {
            exported.iter().any(|(uuid, (name, at))| {
                waiting.last_try < *at
                    && waiting.seen.is_none()
                    && waiting.earlier.is_none()
                    && waiting.is(name, *uuid)
            })
        };
        let is_told = |waiting: &&Waiting| !is_served(waiting) && !may_be_exported(waiting);
        waiting.iter().filter(is_told).cloned().collect()
    }

    /// The awaited array of that name or uuid.
    pub(super) fn find_awaited(&self, array: &str) -> Option<Waiting> {
        let by_uuid = array.parse::<Uuid>().ok();
        let is_it = |waiting: &Waiting| waiting.name() == array || by_uuid == Some(waiting.uuid());
        self.awaited().into_iter().find(|waiting| is_it(waiting) || waiting.which.to_string() == array)
    }
}

#[cfg(test)]
mod tests {
    use super::super::search::Unusable;
    use super::super::service::refusal;
    use super::*;
    use crate::control::verdict;
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
        // What is in the way the last time is not all that was.
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
        let overwritten = super::super::search::overwritten(Path::new("/m/m0"));
        let (path, reason) = ("/m/m0".into(), overwritten.clone());
        let unusable = Unusable {
            path,
            device: None,
            reason,
            hindrance: Some(super::super::search::Hindrance::Overwritten),
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
