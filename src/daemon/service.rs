//! The daemon as administrators see it: the arrays it serves, and what may be asked about them.
//!
//! Invariants: requests that change something run one at a time; what is refused has changed nothing; everything
//! that an array is handed was opened and locked here. Must not know how requests arrive.

use super::certificates::Certificates;
use super::changes::{Change, Changes};
use super::clock;
use super::events::EventLog;
use super::gpu::Gpus;
use super::host_memory;
use super::import::{self, ImportError, LeftOut, Opened};
use super::reactor::{
    ArrayFacts, ArrayId, ListenAddress, ListenError, Listener, NewArray, ReactorConfig, ReactorError,
    ReactorHandle,
};
use super::report::{Meters, Names, Place};
use super::returns::Returns;
use super::search::{Found, Search, search};
pub use super::settings::ServeOptions;
use super::settings::Settings;
use crate::array::{ArrayConfig, Footprint, OpenDevice};
use crate::block_io::Pool;
use crate::codec::Codec;
use crate::control::{
    ArrayReport, ArrayState, ErrorCode, Event, Importable, ImportableMember, PROTOCOL_VERSION, Pong, Reply,
    Request, RequestError, ScrubAction, Severity, Status,
};
use crate::format::{MemberState, Superblock, VolumeKind};
use crate::gpu::GpuConfig;
use crate::member::{DEFAULT_MEMBER_TIMEOUT, TimeLimits, await_closings};
use crate::nbd::TlsMode;
use crate::units::{HumanSize, MemberIndex, SizeBeside};
use crate::volume::{AdminRequest, ArrayNotice, NoticeLevel, PlainVolume};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use uuid::Uuid;

/// The part of the memory that client payloads may take: the rest is for the reads and parity of their stripes.
const PAYLOAD_SHARE: u64 = 2;

/// The part of the memory of the host that metadata may take where nothing is configured, as a divisor.
const METADATA_PART: u64 = 2;

/// How long a request waits for another one about the same array, which may wait for a device.
const CHANGE_WAIT: Duration = Duration::from_secs(10);

/// How long the end of the daemon waits for requests that are being carried out.
const LAST_CHANGES_WAIT: Duration = Duration::from_secs(2);

/// How long the end of an array waits until its devices are closed; those that hang are left.
const CLOSING_WAIT: Duration = Duration::from_secs(1);

/// Lines about what could not be looked at that are told where members are missing.
const UNREAD_TOLD: usize = 8;

/// What a daemon is to be.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceConfig {
    /// Bytes of memory for requests.
    pub memory: u64,
    /// Bytes of memory that the stripe maps and page caches of all arrays may take; none: half of what this process can have.
    pub metadata_memory: Option<u64>,
    /// Takes all memory for requests at the start.
    pub resident: bool,
    /// Clients at one time.
    pub connections_max: usize,
    /// Where members are looked for when a request does not say.
    pub search: Vec<PathBuf>,
    /// Which GPUs are used, and how.
    pub gpu: GpuConfig,
    /// Where what was measured is kept; none: nowhere.
    pub runtime_dir: Option<PathBuf>,
}

/// A running daemon: a reactor and the names of what it serves.
#[derive(Debug)]
pub struct Daemon {
    pub(super) reactor: ReactorHandle,
    pool: Pool,
    gpus: Gpus,
    events: EventLog,
    metadata_memory: u64,
    /// Goes before `search` and `served` where several are taken.
    pub(super) settings: Mutex<Settings>,
    pub(super) search: Mutex<Vec<PathBuf>>,
    pub(super) certificates: Mutex<Certificates>,
    addresses: Mutex<Vec<(ListenAddress, TlsMode)>>,
    pub(super) served: Mutex<Vec<Served>>,
    returns: Mutex<Returns>,
    changes: Arc<Changes>,
    /// Rings when the daemon is to end.
    stop: EventFd,
}

#[derive(Debug)]
pub(super) struct Served {
    pub(super) id: ArrayId,
    /// One of its superblocks, for what never changes.
    pub(super) superblock: Superblock,
    pub(super) names: Names,
    pub(super) limits: TimeLimits,
    /// Bytes of memory for its metadata.
    memory: u64,
}

/// What a request that changes something leads to.
pub(super) type Outcome = Result<Done, RequestError>;

/// A request that was carried out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// One line for a person.
    pub message: String,
    /// More lines.
    pub warnings: Vec<String>,
}

impl Done {
    pub(super) fn line(message: impl Into<String>) -> Done {
        Done { message: message.into(), warnings: Vec::new() }
    }
}

pub(super) fn refusal(code: ErrorCode, message: impl Into<String>) -> RequestError {
    RequestError { code, message: message.into() }
}

impl From<ReactorError> for RequestError {
    fn from(error: ReactorError) -> RequestError {
        let code = match &error {
            ReactorError::Gone | ReactorError::Export { .. } => ErrorCode::Failed,
            ReactorError::NoSuchArray => ErrorCode::NoSuchArray,
            ReactorError::NameTaken { .. } | ReactorError::Refused(_) => ErrorCode::Refused,
        };
        refusal(code, error.to_string())
    }
}

impl From<ImportError> for RequestError {
    fn from(error: ImportError) -> RequestError {
        let code = match &error {
            ImportError::NotFound { .. } | ImportError::Ambiguous { .. } => ErrorCode::NoSuchArray,
            ImportError::Device(_) => ErrorCode::Device,
            ImportError::Assembly { .. } if error.needs_force() => ErrorCode::NeedsForce,
            ImportError::Assembly { .. } => ErrorCode::Refused,
        };
        refusal(code, error.to_string())
    }
}

impl Daemon {
    /// Starts a reactor that serves nothing yet.
    ///
    /// # Errors
    /// When the system has no memory or no io_uring for it, or a GPU is required and none can be used.
    pub fn start(config: ServiceConfig) -> io::Result<Daemon> {
        let memory = usize::try_from(config.memory).map_err(io::Error::other)?;
        let pool = Pool::new(memory)?;
        if config.resident
            && let Err(error) = pool.make_resident()
        {
            tracing::warn!(%error, "cannot take all memory for requests at the start");
        }
        let gpus = Gpus::start(&config.gpu, &pool, config.runtime_dir.as_deref())?;
        let events = EventLog::default();
        let reactor = ReactorHandle::spawn(
            ReactorConfig {
                pool: pool.clone(),
                payload_bytes: memory / PAYLOAD_SHARE as usize,
                connections_max: config.connections_max,
                gpu: gpus.runtime(),
            },
            events.clone(),
        )?;
        Ok(Daemon {
            reactor,
            pool,
            gpus,
            events,
            metadata_memory: config.metadata_memory.unwrap_or_else(|| host_memory::bytes() / METADATA_PART),
            settings: Mutex::default(),
            search: Mutex::new(config.search),
            certificates: Mutex::default(),
            addresses: Mutex::default(),
            served: Mutex::default(),
            returns: Mutex::default(),
            changes: Arc::default(),
            stop: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
        })
    }

    /// Accepts NBD clients at an address. Returns it, with the port that was given.
    ///
    /// # Errors
    /// When it is taken or not allowed.
    pub fn listen(&self, address: &ListenAddress) -> Result<ListenAddress, ListenError> {
        Ok(self.accept_on(Listener::bind(address)?))
    }

    /// Accepts NBD clients on a listener, by its rules for TLS. Returns its address.
    pub fn accept_on(&self, listener: Listener) -> ListenAddress {
        let address = listener.address().clone();
        lock(&self.addresses).push((address.clone(), listener.tls().mode));
        self.reactor.listen(listener);
        address
    }

    /// Begins to serve an opened array.
    ///
    /// # Errors
    /// When one of its name or identity is served, or it cannot be exported.
    pub fn serve(&self, opened: Opened, options: ServeOptions) -> Result<ArrayReport, RequestError> {
        let Opened { assembled, devices, damaged, warnings, left_out } = opened;
        let superblock = assembled.superblock.clone();
        if lock(&self.served).iter().any(|served| served.names.uuid == superblock.array) {
            return Err(refusal(
                ErrorCode::Refused,
                format!("array '{}' is served already", superblock.name),
            ));
        }
        if superblock.volume != VolumeKind::Plain {
            let what = format!(
                "array '{}' is a {} volume: a newer version of calpe is needed",
                superblock.name, superblock.volume
            );
            return Err(refusal(ErrorCode::Refused, what));
        }
        let memory = self.memory_for(&superblock, options)?;
        let geometry = superblock.geometry;
        let codec = Codec::new(usize::from(geometry.data), usize::from(geometry.parity))
            .map_err(|error| refusal(ErrorCode::Failed, error.to_string()))?;
        let devices: Vec<_> =
            devices.into_iter().map(|device| device.map(|d| (self.reactor.next_device_id(), d))).collect();
        let open = |key: usize| {
            let (id, device) = devices[key].as_ref().expect("assembly seats only devices that are open");
            OpenDevice { id: *id, bytes: device.facts().bytes }
        };
        let place = |key: &usize, uuid: Uuid| {
            let (id, device) = devices[*key].as_ref().expect("assembly seats only devices that are open");
            (*id, Place::of(uuid, device))
        };
        let seats = assembled.seats.iter().map(|seat| match &seat.key {
            Some(key) => place(key, seat.uuid).1,
            None => {
                let left = left_out.iter().find(|left| left.device == seat.uuid);
                Place::unseen(seat.uuid, left.and_then(|left| left.path.clone()))
            }
        });
        let names = Names {
            name: superblock.name.clone(),
            uuid: superblock.array,
            kind: superblock.volume,
            seats: seats.collect(),
            devices: assembled
                .seats
                .iter()
                .flat_map(|seat| {
                    let own = seat.key.as_ref().map(|key| place(key, seat.uuid));
                    let new = seat.replacement.as_ref().map(|(key, uuid, _)| place(key, *uuid));
                    own.into_iter().chain(new)
                })
                .collect(),
            damaged: damaged.into_iter().collect(),
            meters: Meters::default(),
        };
        for (_, device) in devices.iter().flatten() {
            device.set_limits(options.limits);
            crate::member::forget_lost(device.path(), device.since());
        }
        let rotational = devices.iter().flatten().any(|(_, device)| device.facts().rotational);
        let config = options.array_config(rotational);
        let assembled = import::with_handles(assembled, open);
        let volume = Box::new(PlainVolume::new(assembled, codec, self.pool.clone(), config));
        let settings = lock(&self.settings);
        let id = self.reactor.add_array(NewArray {
            array: superblock.array,
            name: names.name.clone(),
            volume,
            devices: devices.into_iter().flatten().collect(),
            read_only: options.read_only,
            rules: settings.rules(&names.name, names.uuid),
        })?;
        lock(&self.served).push(Served { id, superblock, names, limits: options.limits, memory });
        drop(settings);
        let report = self.report_of(id)?;
        let level = if report.state == ArrayState::Online { NoticeLevel::Info } else { NoticeLevel::Warning };
        self.notice(&report.name, level, format!("imported, {}", report.state));
        for warning in warnings {
            self.notice(&report.name, NoticeLevel::Warning, warning);
        }
        for LeftOut { device, reason, .. } in left_out {
            let member = report.members.iter().find(|member| member.uuid == device);
            let member = member.map(|member| MemberIndex(member.index));
            let text = format!("{reason}; the array starts without it");
            self.events.push(&report.name, ArrayNotice { level: NoticeLevel::Warning, member, text });
        }
        Ok(report)
    }

    /// Memory for the metadata of an array, in bytes, if there is enough beside that of the others.
    fn memory_for(&self, superblock: &Superblock, options: ServeOptions) -> Result<u64, RequestError> {
        let page_cache = options.page_cache.unwrap_or(ArrayConfig::default().page_cache as u64);
        let needed = Footprint::of(superblock, page_cache);
        let taken: u64 = lock(&self.served).iter().map(|served| served.memory).sum();
        let left = self.metadata_memory.saturating_sub(taken);
        if needed.total() <= left {
            return Ok(needed.total());
        }
        let what = format!(
            "array '{}' needs {needed} of memory, and {} of {} are left: raise metadata_memory in [daemon], lower the array's page_cache, or, if its size of {} is not what you expect, look at its members with 'calpe inspect'",
            superblock.name,
            SizeBeside { bytes: left, other: needed.total() },
            HumanSize(self.metadata_memory),
            HumanSize(superblock.geometry.volume_bytes),
        );
        Err(refusal(ErrorCode::Refused, what))
    }

    /// Remembers where the device of a member that is not there should be, for messages and for `online`.
    pub fn expect_member_at(&self, array: Uuid, index: usize, path: PathBuf) {
        let mut served = lock(&self.served);
        let seat = served
            .iter_mut()
            .find(|served| served.names.uuid == array)
            .and_then(|served| served.names.seats.get_mut(index));
        if let Some(seat) = seat {
            seat.path.get_or_insert(path);
        }
    }

    /// Carries out a request.
    pub fn handle(&self, request: Request) -> Reply {
        let outcome = match request {
            Request::Ping { version } => return self.ping(version),
            Request::Status { array } => {
                return match self.status(array.as_deref()) {
                    Ok(arrays) => {
                        Reply::Status(Status { certificates: self.certificates(), ..Status::new(arrays) })
                    }
                    Err(error) => Reply::Error(error),
                };
            }
            Request::Events { since } => return self.events_since(since),
            Request::ListImportable { dirs } => return self.importable(&dirs),
            Request::Import { array, all, dirs, force, dry_run } => {
                self.import(array.as_deref(), all, &dirs, force, dry_run)
            }
            Request::Export { array, dry_run } => self.export(&array, dry_run),
            Request::Fail { array, member, dry_run } => self.take_out(&array, &member, true, dry_run),
            Request::Offline { array, member, dry_run } => self.take_out(&array, &member, false, dry_run),
            Request::Online { array, member, path, dry_run } => {
                self.online(&array, &member, path.as_deref(), dry_run)
            }
            Request::Replace { array, old, new, force, dry_run } => {
                self.replace(&array, &old, &new, force, dry_run)
            }
            Request::Scrub { array, action, dry_run } => self.scrub(&array, action, dry_run),
            Request::Repair { array, dry_run } => self.repair(&array, dry_run),
            Request::Clear { array, member, dry_run } => self.clear(&array, member.as_ref(), dry_run),
            Request::GpuDrill { drill, dry_run } => {
                let done = self.gpus.drill(drill, dry_run);
                done.map(Done::line).map_err(|reason| refusal(ErrorCode::Refused, reason))
            }
            Request::Shutdown { dry_run } => Ok(self.request_shutdown(dry_run)),
        };
        match outcome {
            Ok(Done { message, warnings }) => Reply::Done { message, warnings },
            Err(error) => Reply::Error(error),
        }
    }

    /// State of one array, or of all in order of name.
    ///
    /// # Errors
    /// When there is no such array.
    pub fn status(&self, array: Option<&str>) -> Result<Vec<ArrayReport>, RequestError> {
        let ids = match array {
            Some(array) => vec![self.find(array, |served| served.id)?],
            None => lock(&self.served).iter().map(|served| served.id).collect(),
        };
        let mut reports = ids.into_iter().map(|id| self.report_of(id)).collect::<Result<Vec<_>, _>>()?;
        reports.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(reports)
    }

    /// Takes note of progress, for rates, and brings members back that are there again: of failed arrays, and remote ones; to
    /// be called once a second or so. Waits for no device.
    pub fn observe(self: &Arc<Self>) {
        self.gpus.tell(&self.events);
        lock(&self.certificates).tell(&self.events);
        let ids: Vec<(ArrayId, Uuid)> =
            lock(&self.served).iter().map(|served| (served.id, served.names.uuid)).collect();
        for (id, uuid) in ids {
            // An array that was just stopped has no facts, and needs none.
            let Ok(facts) = self.facts(id) else { continue };
            let failed = facts.status.state == crate::volume::ArrayState::Failed;
            let whole = facts.status.state == crate::volume::ArrayState::Online;
            if whole || (!failed && !self.has_away(id, &facts)) {
                continue;
            }
            // One that is being changed has its turn the next time.
            let Some(change) = self.changes.begin(uuid, Duration::ZERO) else { continue };
            let daemon = Arc::clone(self);
            let thread = std::thread::Builder::new().name("return".into());
            // Without a thread it is tried again the next time.
            let _ = thread.spawn(move || {
                if failed {
                    daemon.bring_back(id, &facts, &change);
                }
                daemon.return_members(id, &facts, &change);
            });
        }
    }

    /// The descriptor that becomes readable when somebody asks the daemon to end.
    #[must_use]
    pub fn stop_requested(&self) -> &EventFd {
        &self.stop
    }

    /// Stops every array and the reactor.
    ///
    /// # Errors
    /// What made the reactor end early, if something did.
    pub fn shutdown(&self) -> io::Result<()> {
        self.changes.close(LAST_CHANGES_WAIT);
        let result = self.reactor.shutdown();
        lock(&self.served).clear();
        await_closings(CLOSING_WAIT);
        result
    }

    /// Whether the reactor still runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.reactor.is_alive()
    }

    /// Begins a change of an array.
    ///
    /// # Errors
    /// When another one takes too long.
    pub(super) fn begin_change(&self, array: Uuid) -> Result<Change, RequestError> {
        self.changes.begin(array, CHANGE_WAIT).ok_or_else(|| {
            let what =
                "another request about this array is being carried out, or the daemon stops; try again";
            refusal(ErrorCode::Refused, what)
        })
    }

    fn ping(&self, version: u32) -> Reply {
        if version != PROTOCOL_VERSION {
            return Reply::Error(refusal(
                ErrorCode::BadRequest,
                format!(
                    "this daemon speaks version {PROTOCOL_VERSION} of the control protocol, the command version {version}: \
                     use the command that came with the daemon"
                ),
            ));
        }
        Reply::Pong(Pong {
            version: PROTOCOL_VERSION,
            program: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
        })
    }

    fn events_since(&self, since: u64) -> Reply {
        let events: Vec<Event> = self
            .events
            .since(since)
            .into_iter()
            .map(|event| Event {
                sequence: event.sequence,
                unix: event.unix,
                severity: match event.notice.level {
                    NoticeLevel::Info => Severity::Info,
                    NoticeLevel::Warning => Severity::Warning,
                    NoticeLevel::Error => Severity::Error,
                },
                array: Some(event.array),
                member: event.notice.member.map(|member| member.0),
                text: event.notice.text,
            })
            .collect();
        let next = events.last().map_or(since, |last| last.sequence + 1);
        Reply::Events { events, next }
    }

    fn places(&self, dirs: &[PathBuf]) -> Vec<PathBuf> {
        match (dirs, &self.search_places()[..]) {
            ([], []) => vec![import::DEFAULT_SEARCH.into()],
            ([], configured) => configured.to_vec(),
            (asked, configured) => asked.iter().chain(configured).cloned().collect(),
        }
    }

    fn importable(&self, dirs: &[PathBuf]) -> Reply {
        let found = search(&self.places(dirs), DEFAULT_MEMBER_TIMEOUT);
        let served: Vec<Uuid> = lock(&self.served).iter().map(|served| served.names.uuid).collect();
        let mut arrays: Vec<Importable> = found
            .arrays
            .iter()
            .filter(|(uuid, _)| !served.contains(uuid))
            .filter_map(|(_, members)| importable(members))
            .collect();
        arrays.sort_by(|a, b| (&a.name, a.uuid).cmp(&(&b.name, b.uuid)));
        Reply::Importable { arrays, warnings: found.warnings }
    }

    fn import(
        &self,
        array: Option<&str>,
        all: bool,
        dirs: &[PathBuf],
        force: bool,
        dry_run: bool,
    ) -> Outcome {
        let places = self.places(dirs);
        let found = search(&places, DEFAULT_MEMBER_TIMEOUT);
        let is_served = |uuid: &Uuid| lock(&self.served).iter().any(|served| served.names.uuid == *uuid);
        let chosen: Vec<Uuid> = match (array, all) {
            (Some(array), false) => {
                let uuid = found.choose(array, &places)?;
                if is_served(&uuid) {
                    return Err(refusal(ErrorCode::Refused, format!("array '{array}' is served already")));
                }
                vec![uuid]
            }
            (None, true) => found.arrays.keys().filter(|uuid| !is_served(uuid)).copied().collect(),
            _ => {
                return Err(refusal(
                    ErrorCode::BadRequest,
                    "name one array to import, or ask for all of them",
                ));
            }
        };
        let mut done = Done { message: String::new(), warnings: found.warnings.clone() };
        let mut lines = Vec::new();
        let mut failures = Vec::new();
        for uuid in chosen {
            match self.import_one(&found, uuid, force, dry_run) {
                Ok(Done { message, warnings }) => {
                    lines.push(message);
                    done.warnings.extend(warnings);
                }
                Err(error) => failures.push(error),
            }
        }
        // One failure among several must not hide what worked, nor pass for success.
        match (lines.is_empty(), failures.pop()) {
            (true, Some(error)) if failures.is_empty() => return Err(error),
            (_, Some(error)) => {
                let texts = failures.iter().chain([&error]).map(|e| e.message.clone());
                let text = lines.into_iter().chain(texts).collect::<Vec<_>>().join("\n");
                return Err(refusal(error.code, text));
            }
            (true, None) => lines.push("nothing to import".into()),
            (false, None) => {}
        }
        done.message = lines.join("\n");
        Ok(done)
    }

    fn import_one(&self, found: &Search, array: Uuid, force: bool, dry_run: bool) -> Outcome {
        let members = &found.arrays[&array];
        if dry_run {
            let assembled = import::preview(members, force).map_err(ImportError::from)?;
            let superblock = &assembled.superblock;
            return Ok(Done::line(format!(
                "would import array '{}' with {} of {} members",
                superblock.name,
                assembled.live.len(),
                superblock.members.len()
            )));
        }
        let options = ServeOptions { force, ..ServeOptions::default() };
        let (report, warnings) = self.open_and_serve(found, array, options, &[])?;
        Ok(Done { message: served_line(&report), warnings })
    }

    /// Opens an array that was found, and begins to serve it. Returns what a person should know, too, a line each. `told`
    /// becomes events of the array beside that.
    ///
    /// # Errors
    /// As [`import::open`] and [`Daemon::serve`].
    pub fn open_and_serve(
        &self,
        found: &Search,
        array: Uuid,
        options: ServeOptions,
        told: &[String],
    ) -> Result<(ArrayReport, Vec<String>), RequestError> {
        let _change = self.begin_change(array)?;
        let mut opened = import::open(&found.arrays[&array], options.force, options.limits.local)?;
        if opened.assembled.seats.iter().any(|seat| seat.state == MemberState::Missing) {
            opened.warnings.extend(found.unread.iter().take(UNREAD_TOLD).cloned());
        }
        let mut warnings = opened.warnings.clone();
        warnings.extend(opened.left_out.iter().map(|left| left.reason.clone()));
        opened.warnings.splice(0..0, told.iter().cloned());
        Ok((self.serve(opened, options)?, warnings))
    }

    fn export(&self, array: &str, dry_run: bool) -> Outcome {
        let about = |served: &Served| (served.id, served.names.uuid, served.names.name.clone());
        let (id, uuid, name) = self.find(array, about)?;
        let clients = self.facts(id)?.clients;
        let note = match clients {
            0 => Vec::new(),
            1 => vec!["1 client is attached and loses it".into()],
            many => vec![format!("{many} clients are attached and lose it")],
        };
        if dry_run {
            return Ok(Done { message: format!("would stop array '{name}'"), warnings: note });
        }
        let _change = self.begin_change(uuid)?;
        let result = self.reactor.stop_array(id);
        lock(&self.served).retain(|served| served.id != id);
        await_closings(CLOSING_WAIT);
        result?;
        self.notice(&name, NoticeLevel::Info, "exported, stopped cleanly".into());
        Ok(Done { message: format!("array '{name}' is stopped"), warnings: Vec::new() })
    }

    fn scrub(&self, array: &str, action: ScrubAction, dry_run: bool) -> Outcome {
        let (id, name) = self.find(array, |served| (served.id, served.names.name.clone()))?;
        let (request, word) = match action {
            ScrubAction::Start => (AdminRequest::ScrubStart, "start"),
            ScrubAction::Pause => (AdminRequest::ScrubPause, "pause"),
            ScrubAction::Stop => (AdminRequest::ScrubStop, "stop"),
        };
        if dry_run {
            return Ok(Done::line(format!("would {word} the scrub of array '{name}'")));
        }
        let outcome = self.reactor.admin(id, request, Vec::new())?;
        Ok(Done::line(format!("array '{name}': {}", outcome.0)))
    }

    fn repair(&self, array: &str, dry_run: bool) -> Outcome {
        let (id, name) = self.find(array, |served| (served.id, served.names.name.clone()))?;
        if dry_run {
            return Ok(Done::line(format!(
                "would look again at what is set aside or lost on array '{name}'"
            )));
        }
        let outcome = self.reactor.admin(id, AdminRequest::Repair, Vec::new())?;
        Ok(Done::line(format!("array '{name}': {}", outcome.0)))
    }

    fn request_shutdown(&self, dry_run: bool) -> Done {
        let count = lock(&self.served).len();
        let arrays = if count == 1 { "1 array".to_owned() } else { format!("{count} arrays") };
        if dry_run {
            return Done::line(format!("would stop {arrays} and the daemon"));
        }
        // A full counter has been rung already.
        let _ = self.stop.write(1);
        Done::line(format!("the daemon stops, {arrays} first"))
    }

    /// Looks an array up by name or uuid.
    pub(super) fn find<T>(&self, array: &str, take: impl FnOnce(&Served) -> T) -> Result<T, RequestError> {
        let served = lock(&self.served);
        let by_uuid = array.parse::<Uuid>().ok();
        served
            .iter()
            .find(|served| served.names.name == array || Some(served.names.uuid) == by_uuid)
            .map(take)
            .ok_or_else(|| {
                let names: Vec<_> = served.iter().map(|served| served.names.name.as_str()).collect();
                let known = match names[..] {
                    [] => "none is served".to_owned(),
                    _ => format!("served are: {}", names.join(", ")),
                };
                refusal(
                    ErrorCode::NoSuchArray,
                    format!("no array '{array}' is served ({known}); 'calpe import' lists what could be"),
                )
            })
    }

    /// The facts of an array, taken note of.
    pub(super) fn facts(&self, id: ArrayId) -> Result<ArrayFacts, RequestError> {
        let facts = self.reactor.status(id)?;
        self.with_names(id, |names| names.observe(clock::now(), &facts));
        Ok(facts)
    }

    pub(super) fn report_of(&self, id: ArrayId) -> Result<ArrayReport, RequestError> {
        let facts = self.facts(id)?;
        let addresses = lock(&self.addresses).clone();
        let gpu = self.gpus.report();
        self.with_names(id, |names| names.report(&facts, &addresses, &gpu))
            .ok_or_else(|| ReactorError::NoSuchArray.into())
    }

    /// Runs with the names of an array, if it is served.
    pub(super) fn with_names<T>(&self, id: ArrayId, action: impl FnOnce(&mut Names) -> T) -> Option<T> {
        let mut served = lock(&self.served);
        served.iter_mut().find(|served| served.id == id).map(|served| action(&mut served.names))
    }

    /// As [`Daemon::with_names`], with all that is known.
    pub(super) fn with_served<T>(&self, id: ArrayId, action: impl FnOnce(&Served) -> T) -> Option<T> {
        lock(&self.served).iter().find(|served| served.id == id).map(action)
    }

    pub(super) fn returns(&self) -> MutexGuard<'_, Returns> {
        lock(&self.returns)
    }

    pub(super) fn notice_member(&self, id: ArrayId, level: NoticeLevel, member: MemberIndex, text: String) {
        if let Some(name) = self.with_served(id, |served| served.names.name.clone()) {
            self.events.push(&name, ArrayNotice { level, member: Some(member), text });
        }
    }

    pub(super) fn search_places(&self) -> Vec<PathBuf> {
        lock(&self.search).clone()
    }

    fn notice(&self, array: &str, level: NoticeLevel, text: String) {
        self.events.push(array, ArrayNotice { level, member: None, text });
    }
}

/// One line on an array that has just begun to be served.
#[must_use]
pub fn served_line(report: &ArrayReport) -> String {
    let shape = format!("{}+{}, {}", report.data, report.parity, HumanSize(report.volume.bytes));
    let uri = report.uris.first().map(|uri| format!(", {uri}")).unwrap_or_default();
    format!("array '{}' ({shape}) is {}{uri}", report.name, report.state)
}

fn importable(members: &[Found]) -> Option<Importable> {
    let superblock = import::newest_found(members)?;
    let verdict = import::preview(members, false);
    let note = |path: &Path| match &verdict {
        Ok(assembled) => assembled
            .refused
            .iter()
            .find(|(key, _)| members[*key].path == path)
            .map(|(_, reason)| reason.clone()),
        Err(_) => None,
    };
    let member = |(record, index): (&crate::format::MemberRecord, u16)| {
        let found = members.iter().find(|found| found.superblock.device == record.uuid);
        ImportableMember {
            index,
            uuid: record.uuid,
            path: found.map(|found| found.path.clone()),
            note: found.and_then(|found| note(&found.path)),
        }
    };
    Some(Importable {
        name: superblock.name.clone(),
        uuid: superblock.array,
        data: superblock.geometry.data,
        parity: superblock.geometry.parity,
        volume_bytes: superblock.geometry.volume_bytes,
        problem: verdict.as_ref().err().map(ToString::to_string),
        members: superblock.members.iter().zip(0..).map(member).collect(),
    })
}

/// Locks; a panic of another holder leaves plain data, which stays usable.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
