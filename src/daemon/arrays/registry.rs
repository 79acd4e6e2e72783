//! All that the daemon knows of its arrays, and the questions that need several parts of it.
//!
//! Invariants: requests that change an array run one at a time; each part has a lock of its own, taken in the
//! order of `daemon/ranked.rs`. Must not know what is asked for, nor how arrays are opened.

use super::awaited::Awaited;
use super::away::{Away, find_away, returning};
use super::changes::{Change, Changes};
use super::held::{Held, held_alone, held_by_lanes};
use super::memory::{Memory, Sighting};
use super::names::Names;
use super::outcome::refusal;
use super::report::only_proven;
use super::returns::Returns;
use super::served::{Served, ServedArrays};
use super::settings::Settings;
use super::waiting::Waiting;
use crate::control::{ArrayReport, ErrorCode, RequestError};
use crate::daemon::clock;
use crate::daemon::devices::places::covers;
use crate::daemon::events::{EventLog, News, kinds};
use crate::daemon::gpu::Gpus;
use crate::daemon::ranked::{Ranked, lock};
use crate::daemon::reactor::{ArrayFacts, ArrayId, ListenAddress, Listener, ReactorError, ReactorHandle};
use crate::daemon::state::KnownDevice;
use crate::member::{DEFAULT_MEMBER_TIMEOUT, is_remote};
use calpe_core::block_io::Pool;
use calpe_core::nbd::TlsMode;
use calpe_core::units::MemberIndex;
use calpe_core::volume::{AdminRequest, MemberStatus, NoticeLevel};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How long a request waits for another one about the same array, which may in turn wait for a device.
const CHANGE_WAIT: Duration = Duration::from_secs(10);

/// How long damage and the counts of passes may change before they are written to the state directory.
const FINDINGS_DELAY: Duration = Duration::from_millis(20);

/// The arrays of a daemon. Each part keeps its state private.
#[derive(Debug)]
pub(crate) struct Arrays {
    pub(crate) reactor: ReactorHandle,
    pub(crate) events: EventLog,
    pub(crate) settings: Settings,
    pub(crate) served: ServedArrays,
    pub(crate) awaited: Awaited,
    pub(crate) returns: Returns,
    pub(crate) memory: Memory,
    /// Buffers of requests.
    pub(super) pool: Pool,
    /// Bytes of memory that the metadata of all arrays may take.
    pub(super) metadata_memory: u64,
    gpus: Gpus,
    addresses: Ranked<Vec<(ListenAddress, TlsMode)>, 9>,
    changes: Arc<Changes>,
    /// How many of the passes that have ended are in the state directory.
    passes_kept: AtomicU64,
}

/// The parts of [`Arrays`].
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) reactor: ReactorHandle,
    pub(crate) events: EventLog,
    pub(crate) settings: Settings,
    pub(crate) memory: Memory,
    pub(crate) pool: Pool,
    pub(crate) metadata_memory: u64,
    pub(crate) gpus: Gpus,
}

impl Arrays {
    /// No array is served or awaited yet.
    pub(crate) fn new(parts: Parts) -> Arrays {
        let Parts { reactor, events, settings, memory, pool, metadata_memory, gpus } = parts;
        Arrays {
            reactor,
            events,
            settings,
            served: ServedArrays::default(),
            awaited: Awaited::default(),
            returns: Returns::default(),
            memory,
            pool,
            metadata_memory,
            gpus,
            addresses: Ranked::default(),
            changes: Arc::default(),
            passes_kept: AtomicU64::new(0),
        }
    }

    /// Whether the reactor still runs.
    pub(crate) fn is_alive(&self) -> bool {
        self.reactor.is_alive()
    }

    /// Accepts NBD clients on a listener, by its rules for TLS. Returns its address.
    pub(crate) fn accept_on(&self, listener: Listener) -> ListenAddress {
        let address = listener.address().clone();
        lock(&self.addresses).push((address.clone(), listener.tls().mode));
        self.reactor.listen(listener);
        address
    }

    /// Begins a change of an array.
    ///
    /// # Errors
    /// When another one takes too long.
    pub(crate) fn begin_change(&self, array: Uuid) -> Result<Change, RequestError> {
        self.changes.begin(array, CHANGE_WAIT).ok_or_else(|| {
            let what =
                "another request about this array is being carried out, or the daemon stops; try again";
            refusal(ErrorCode::Refused, what)
        })
    }

    /// Begins a change of an array, if nobody else changes it.
    pub(crate) fn try_change(&self, array: Uuid) -> Option<Change> {
        self.changes.begin(array, Duration::ZERO)
    }

    /// Lets no more changes begin, and waits for those under way, but not for long.
    pub(crate) fn end_changes(&self, limit: Duration) {
        self.changes.close(limit);
    }

    /// Looks an array in service up by name or uuid.
    ///
    /// # Errors
    /// When there is none, and why, if it is awaited.
    pub(crate) fn find<T>(&self, array: &str, take: impl FnOnce(&Served) -> T) -> Result<T, RequestError> {
        let known = match self.served.find(array, take) {
            Ok(taken) => return Ok(taken),
            Err(known) => known,
        };
        if let Some(waiting) = self.find_awaited(array) {
            let why = waiting.problem().unwrap_or_else(|| "its members are being looked for".into());
            return Err(refusal(ErrorCode::NoSuchArray, format!("array '{array}' is not served: {why}")));
        }
        let known = match known[..] {
            [] => "none is served".to_owned(),
            _ => format!("served are: {}", known.join(", ")),
        };
        Err(refusal(
            ErrorCode::NoSuchArray,
            format!("no array '{array}' is served ({known}); 'calpe import' lists what could be"),
        ))
    }

    /// The awaited array of that name or uuid.
    pub(crate) fn find_awaited(&self, array: &str) -> Option<Waiting> {
        self.awaited.find(array, &self.served.in_service())
    }

    /// The facts of an array now, which are also recorded with its names.
    pub(crate) fn facts(&self, id: ArrayId) -> Result<ArrayFacts, RequestError> {
        let facts = self.reactor.status(id)?;
        self.served.with_names(id, |names| names.observe(clock::now(), &facts));
        Ok(facts)
    }

    /// What lanes of an array have of the device of a member that others are without.
    pub(crate) fn held(&self, id: ArrayId, member: MemberIndex) -> Held {
        self.facts(id).map_or(Held::Nowhere, |facts| held_by_lanes(&self.reactor, id, &facts, member))
    }

    /// The members of an array that are away and may come back by themselves.
    pub(crate) fn away(&self, id: ArrayId, facts: &ArrayFacts) -> Vec<Away> {
        let places = self.settings.search_places();
        let away = self.served.with(id, |served| find_away(served, facts, &self.returns, &places));
        away.unwrap_or_default()
    }

    /// What users see of an array.
    pub(crate) fn report_of(&self, id: ArrayId) -> Result<ArrayReport, RequestError> {
        let facts = self.facts(id)?;
        let mut addresses = lock(&self.addresses).clone();
        let named = self.served.with(id, |served| (served.names.name.clone(), served.names.uuid));
        if named.is_some_and(|(name, uuid)| self.settings.sections().rules(&name, uuid).is_some()) {
            only_proven(&mut addresses);
        }
        let gpu = self.gpus.report();
        let returning = returning(self.away(id, &facts), &self.returns);
        let held = held_alone(&self.reactor, id, &facts);
        self.served
            .with(id, |served| served.names.report(&facts, &addresses, &gpu, (&returning, &held)))
            .ok_or_else(|| ReactorError::NoSuchArray.into())
    }

    /// State of one array, or of all in order of name; also of those that are to be served and are
    /// not.
    ///
    /// # Errors
    /// When there is no such array.
    pub(crate) fn status(&self, array: Option<&str>) -> Result<Vec<ArrayReport>, RequestError> {
        let ids = match array {
            Some(array) => match (self.find(array, |served| served.id), self.find_awaited(array)) {
                (Ok(id), _) => vec![id],
                (Err(_), Some(waiting)) => return Ok(vec![waiting.report()]),
                (Err(error), None) => return Err(error),
            },
            None => self.served.ids(),
        };
        let mut reports = ids.into_iter().map(|id| self.report_of(id)).collect::<Result<Vec<_>, _>>()?;
        self.keep_ended_passes();
        if array.is_none() {
            let awaited = self.awaited.told(&self.served.in_service());
            reports.extend(awaited.iter().map(Waiting::report));
        }
        reports.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(reports)
    }

    /// Makes an array carry out a request without devices, or only say what would happen. Returns the answer
    /// for the administrator.
    pub(crate) fn ask(
        &self,
        id: ArrayId,
        name: &str,
        request: AdminRequest,
        dry_run: bool,
    ) -> Result<String, ReactorError> {
        if dry_run {
            let outcome = self.reactor.would_all(id, &request)?;
            return Ok(format!("would be done on array '{name}': {}", outcome.0));
        }
        let outcome = self.reactor.admin_all(id, &request)?;
        Ok(format!("array '{name}': {}", outcome.0))
    }

    /// What requests to the lanes of an array would come to, in words for an administrator.
    pub(crate) fn would(
        &self,
        id: ArrayId,
        name: &str,
        requests: Vec<AdminRequest>,
    ) -> Result<String, ReactorError> {
        let outcome = self.reactor.would(id, requests)?;
        Ok(format!("would be done on array '{name}': {}", outcome.0))
    }

    /// Writes the places of an array's devices, the counts of its members, and its unreadable blocks to the
    /// state directory.
    pub(crate) fn remember(&self, id: ArrayId, facts: &ArrayFacts) {
        let status = &facts.status;
        let sighting = self.served.with(id, |served| {
            let names = &served.names;
            let was_missing = |member: &&MemberStatus| self.returns.was_missing(names.uuid, member.index);
            Sighting {
                array: names.uuid,
                name: names.name.clone(),
                devices: known_devices(names, facts),
                counts: names.counts(status),
                client_errors: names.client_errors(status),
                given_up: names.given_up(status),
                out: names.out(status),
                unchecked: names.unchecked(status),
                lacking: Names::lacking(status),
                failed_without: status.members.iter().filter(was_missing).map(|m| m.uuid).collect(),
            }
        });
        if let Some(sighting) = sighting {
            self.memory.note(sighting, status);
        }
    }

    /// For `time`, writes damage to the state directory soon after it has changed, and the counts of passes
    /// soon after their end, so that the next start knows them even if the daemon is killed.
    pub(crate) fn keep_findings(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut pause = FINDINGS_DELAY;
        while self.is_alive() && self.reactor.findings_change(until.saturating_duration_since(Instant::now()))
        {
            // Changes that come together are written together.
            std::thread::sleep(pause);
            let begun = Instant::now();
            self.served.ids().into_iter().for_each(|id| self.remember_now(id));
            // Writing a long list that changes all the time takes a small share of one thread.
            pause = FINDINGS_DELAY.max(10 * begun.elapsed());
        }
    }

    /// Writes the counts of passes that have ended since the last call, before a status reports the end.
    /// Waits for the state directory, but not for long, and once for each end.
    pub(crate) fn keep_ended_passes(&self) {
        let ended = self.reactor.passes_ended();
        if self.passes_kept.load(Ordering::SeqCst) == ended {
            return;
        }
        self.served.ids().into_iter().for_each(|id| self.remember_now(id));
        // An event reports a failure.
        let _ = self.memory.await_kept();
        self.passes_kept.fetch_max(ended, Ordering::SeqCst);
    }

    /// As [`Arrays::remember`], with the current facts. Does nothing for an array that was stopped meanwhile.
    pub(crate) fn remember_now(&self, id: ArrayId) {
        if let Ok(facts) = self.facts(id) {
            self.remember(id, &facts);
        }
    }

    /// Records whether the scrub of an array is paused. Returns a line when that cannot be written to the
    /// state directory.
    pub(crate) fn remember_scrub(&self, id: ArrayId) -> Option<String> {
        let uuid = self.served.with(id, |served| served.names.uuid)?;
        let before = self.memory.scrub_was_paused(uuid);
        self.remember_now(id);
        let is_paused = self.memory.scrub_was_paused(uuid);
        if before == is_paused {
            return None;
        }
        let why = match self.memory.dir() {
            None if is_paused => "no 'state_dir' is configured".into(),
            None => return None,
            Some(_) => self.memory.await_kept()?,
        };
        Some(match is_paused {
            true => format!("the pause is not remembered, and a restart goes on with the scrub: {why}"),
            false => {
                format!("a restart may find the scrub paused: that it is not cannot be remembered: {why}")
            }
        })
    }

    /// How long an import by command waits for each path. Places in sections, and former places of devices of
    /// their arrays, get the limit of the section (the longest of several); other places get the limit of the
    /// section about the array that is wanted. Remote members have limits of their own.
    pub(crate) fn look_limits(&self, wanted: Option<&str>) -> impl Fn(&Path) -> Duration + Sync + use<> {
        let sections = self.settings.sections().all().to_vec();
        let own = wanted.and_then(|wanted| sections.iter().find(|config| config.which.to_string() == wanted));
        let own = own.map_or(DEFAULT_MEMBER_TIMEOUT, |config| config.limits.local);
        let places = sections.into_iter().map(|config| {
            let mut places = self.memory.earlier_paths(Some(&config.which.to_string()));
            places.extend(config.search);
            (places, config.limits.local)
        });
        let places: Vec<(Vec<PathBuf>, Duration)> = places.collect();
        move |path| {
            if is_remote(path) {
                return DEFAULT_MEMBER_TIMEOUT;
            }
            let of_it = places.iter().filter(|(places, _)| places.iter().any(|place| covers(place, path)));
            of_it.map(|(_, limit)| *limit).max().unwrap_or(own)
        }
    }

    /// Forgets an array that was stopped.
    pub(crate) fn forget_served(&self, id: ArrayId) {
        if let Some(uuid) = self.served.remove(id) {
            self.returns.forget(uuid);
        }
    }

    /// Makes an event about an array.
    pub(crate) fn notice(&self, array: &str, kind: &'static str, level: NoticeLevel, text: String) {
        self.events.tell(News::new(Some(array), kind, level, text));
    }

    /// Makes an event about a member of an array in service.
    pub(crate) fn notice_member(
        &self,
        id: ArrayId,
        kind: &'static str,
        level: NoticeLevel,
        member: MemberIndex,
        text: String,
    ) {
        if let Some(name) = self.served.with(id, |served| served.names.name.clone()) {
            self.events.tell(News { member: Some(member.0), ..News::new(Some(&name), kind, level, text) });
        }
    }

    /// Makes an event when the state directory cannot be written to, or can again.
    pub(crate) fn tell_of_state(&self) {
        let (level, text) = match self.memory.news() {
            None => return,
            Some(Ok(text)) => (NoticeLevel::Info, text),
            Some(Err(text)) => (NoticeLevel::Warning, text),
        };
        self.events.tell(News::new(None, kinds::STATE_DIR, level, text));
    }
}

/// Where the devices of an array are: those of its members, and those that are being built.
fn known_devices(names: &Names, facts: &ArrayFacts) -> Vec<KnownDevice> {
    let mut known = Vec::new();
    for (seat, member) in names.seats().iter().zip(&facts.status.members) {
        let replacement = member.replacement.and_then(|new| names.place_of(new.device));
        for place in [Some(seat), replacement].into_iter().flatten() {
            // JSON cannot express other paths.
            if let Some(path) = place.path.as_ref().filter(|path| path.to_str().is_some()) {
                known.push(KnownDevice { member: member.index.0, uuid: place.uuid, path: path.clone() });
            }
        }
    }
    known
}
