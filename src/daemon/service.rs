//! The daemon as administrators see it: the arrays it serves, and what may be asked about them.
//!
//! Invariants: requests that change something run one at a time; what is refused has changed nothing; everything
//! that an array is handed was opened and locked here. Must not know how requests arrive.

use super::arrays::ImportOrder;
use super::certificates::Certificates;
use super::changes::{Change, Changes};
use super::clock;
use super::commands::command_of;
use super::config::MIN_PAGE_CACHE;
use super::events::{EventLog, News, kinds};
use super::gpu::Gpus;
use super::host_memory;
use super::import::{self, ImportError, LeftOut, Opened};
use super::memory::Memory;
use super::ranked::{Held, Ranked, RankedGuard, lock};
use super::reactor::{
    ArrayFacts, ArrayId, ListenAddress, ListenError, Listener, NewArray, ReactorConfig, ReactorError,
    ReactorHandle,
};
use super::report::{Meters, Names, Place, only_proven};
use super::returns::Returns;
use super::search::Hindrance;
pub use super::settings::ServeOptions;
use super::settings::Settings;
use super::state::{Remembered, StateDir};
use super::waiting::Waiting;
use crate::control::{
    ArrayReport, ArrayState, ErrorCode, MemberReport, MemberState, PROTOCOL_VERSION, Pong, Reply, Request,
    RequestError, ScanKind, Status,
};
use crate::member::{TimeLimits, await_closings};
use calpe_core::array::{ArrayConfig, Footprint, OpenDevice};
use calpe_core::block_io::Pool;
use calpe_core::codec::Codec;
use calpe_core::format::{MemberState as Seated, Superblock, VolumeKind};
use calpe_core::nbd::TlsMode;
use calpe_core::units::{HumanSize, MemberIndex, SizeBeside};
use calpe_core::volume::{NoticeLevel, PlainVolume};
use calpe_gpu::GpuConfig;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The part of the memory that client payloads may take: the rest is for the reads and parity of their stripes.
const PAYLOAD_SHARE: u64 = 2;

/// The part of the memory of the host that metadata may take where nothing is configured, as a divisor.
const METADATA_PART: u64 = 2;

/// How long a request waits for another one about the same array, which may wait for a device.
const CHANGE_WAIT: Duration = Duration::from_secs(10);

/// How long the end of the daemon waits for requests that are being carried out.
const LAST_CHANGES_WAIT: Duration = Duration::from_secs(2);

/// How long the end of the daemon waits for what is written to the state directory.
const STATE_WAIT: Duration = Duration::from_secs(2);

/// How long the end of an array waits until its devices are closed; those that hang are left.
pub(super) const CLOSING_WAIT: Duration = Duration::from_secs(1);

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
    /// Where is kept what the next start should know; none: nowhere.
    pub state_dir: Option<PathBuf>,
}

/// A running daemon: a reactor and the names of what it serves.
#[derive(Debug)]
pub struct Daemon {
    pub(super) reactor: ReactorHandle,
    pool: Pool,
    gpus: Gpus,
    pub(super) events: EventLog,
    pub(super) state: StateDir,
    metadata_memory: u64,
    /// Read while an array that is awaited begins to be served, written while one is given up. Goes
    /// before all others.
    giving_up: RwLock<()>,
    /// Held while a member that comes back by itself is handed over, and while it is said of one
    /// that it shall not.
    pub(super) returning: Ranked<(), 1>,
    pub(super) settings: Ranked<Settings, 2>,
    pub(super) served: Ranked<Vec<Served>, 3>,
    pub(super) waiting: Ranked<Vec<Waiting>, 4>,
    returns: Ranked<Returns, 5>,
    pub(super) search: Ranked<Vec<PathBuf>, 6>,
    pub(super) memory: Ranked<Memory, 7>,
    pub(super) certificates: Ranked<Certificates, 8>,
    addresses: Ranked<Vec<(ListenAddress, TlsMode)>, 9>,
    at_stop: Ranked<Vec<ArrayReport>, 10>,
    /// Names of arrays that were exported by a command, and when that was.
    pub(super) exported: Ranked<BTreeMap<Uuid, (String, Instant)>, 11>,
    changes: Arc<Changes>,
    /// How many of the passes that have ended were kept before that was told.
    pub(super) passes_kept: AtomicU64,
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
    /// What was refused or failed while others were done.
    pub failures: Vec<RequestError>,
}

impl Done {
    pub(super) fn line(message: impl Into<String>) -> Done {
        Done { message: message.into(), ..Done::default() }
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
            ImportError::Device(_) | ImportError::Threadless(_) => ErrorCode::Device,
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
        let opened = config.state_dir.as_deref().map(StateDir::open);
        let (
            state,
            Remembered {
                arrays, counters, damage, beyond_repair, lacking, events: earlier, warnings, ..
            },
        ) = opened.unwrap_or_default();
        let events = EventLog::new(state.clone(), earlier);
        for warning in warnings {
            events.tell(News::new(None, kinds::STATE_DIR, NoticeLevel::Warning, warning));
        }
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
            state,
            memory: Ranked::new(Memory { arrays, counters, damage, beyond_repair, lacking }),
            metadata_memory: config.metadata_memory.unwrap_or_else(|| host_memory::bytes() / METADATA_PART),
            settings: Ranked::default(),
            search: Ranked::new(config.search),
            certificates: Ranked::default(),
            addresses: Ranked::default(),
            served: Ranked::default(),
            waiting: Ranked::default(),
            returns: Ranked::default(),
            returning: Ranked::default(),
            giving_up: RwLock::default(),
            changes: Arc::default(),
            at_stop: Ranked::default(),
            exported: Ranked::default(),
            passes_kept: AtomicU64::new(0),
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
        let Opened { mut assembled, devices, damaged, warnings, left_out, forbidden } = opened;
        self.recall_given_up(&mut assembled, &left_out);
        let causes = self.recall_causes(&mut assembled, &left_out);
        let superblock = assembled.superblock.clone();
        let memory = self.check_servable(&superblock, options)?;
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
                let path = left.and_then(|left| left.path.clone());
                Place::unseen(seat.uuid, path.or_else(|| self.earlier_path(superblock.array, seat.uuid)))
            }
        });
        let missing = assembled.seats.iter().zip(0..).filter(|(seat, _)| seat.state == Seated::Missing);
        let missing: Vec<(u16, Uuid)> = missing.map(|(seat, index)| (index, seat.uuid)).collect();
        let forbidden = forbidden.into_iter().map(|device| (device, Hindrance::Forbidden));
        let hindered = left_out.iter().filter_map(|left| Some((left.device, left.hindrance?)));
        let hindrances = forbidden.chain(hindered).collect();
        let names = Names {
            name: superblock.name.clone(),
            uuid: superblock.array,
            kind: superblock.volume,
            read_only: options.read_only,
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
            earlier: self.earlier_counts(superblock.array),
            earlier_client_errors: self.earlier_client_errors(superblock.array),
            earlier_unchecked: self.earlier_unchecked(superblock.array),
            damaged: damaged.into_iter().collect(),
            hindrances,
            findings: std::collections::HashMap::new(),
            causes,
            meters: Meters::default(),
        };
        for (_, device) in devices.iter().flatten() {
            device.set_limits(options.limits);
            crate::member::forget_lost(device.path(), device.since());
        }
        let rotational = devices.iter().flatten().any(|(_, device)| device.facts().rotational);
        let config = options.array_config(rotational);
        let assembled = import::with_handles(assembled, open);
        let mut volume = Box::new(PlainVolume::new(assembled, codec, self.pool.clone(), config));
        let [unreadable, beyond_repair] = self.earlier_damage(superblock.array);
        volume.expect_damage(&beyond_repair, true);
        volume.expect_damage(&unreadable, false);
        for (device, runs) in self.earlier_lacking(superblock.array) {
            volume.expect_lacking(device, &runs);
        }
        if self.scrub_was_paused(superblock.array) {
            volume.keep_scrub_paused();
        }
        let settings = lock(&self.settings);
        if lock(&self.served).iter().all(|served| served.names.name != names.name) {
            self.events.name(&names.name, names.uuid);
        }
        let id = self.reactor.add_array(NewArray {
            array: superblock.array,
            name: names.name.clone(),
            volume,
            devices: devices.into_iter().flatten().collect(),
            read_only: options.read_only,
            rules: settings.rules(&names.name, names.uuid),
        })?;
        let (name, uuid) = (names.name.clone(), names.uuid);
        let paths: Vec<PathBuf> = names.paths().cloned().collect();
        self.begin_returns((&name, uuid), &paths, &missing, options.force);
        lock(&self.served).push(Served { id, superblock, names, limits: options.limits, memory });
        drop(settings);
        // Nobody goes on to look for it: an export right after this is not undone.
        self.now_served(&name, uuid, &paths);
        self.remember_now(id);
        let report = self.report_of(id)?;
        let level = if report.state == ArrayState::Online { NoticeLevel::Info } else { NoticeLevel::Warning };
        let scrub = report.scan.iter().find(|scan| scan.kind == ScanKind::Scrub);
        let scrub = scrub.map_or_else(String::new, |scan| {
            let words = scan.state.words().unwrap_or("goes on");
            format!("; a scrub that was under way, at {:.1} %, {words}", scan.percent)
        });
        // Whether it can be served shows when its log is replayed: an event of its own tells when it cannot.
        let is_there =
            |member: &&MemberReport| matches!(member.state, MemberState::Online | MemberState::Degraded);
        let there = report.members.iter().filter(is_there).count();
        let there = format!("{there} of {}", report.members.len());
        self.notice(&report.name, kinds::IMPORTED, level, format!("imported, with {there} members{scrub}"));
        for warning in warnings {
            self.notice(&report.name, kinds::IMPORT_NOTE, NoticeLevel::Warning, warning);
        }
        for LeftOut { device, reason, .. } in left_out {
            let member = report.members.iter().find(|member| member.uuid == device);
            let text = format!("{reason}; the array starts without it");
            let news = News::new(Some(&report.name), kinds::MEMBER_LEFT_OUT, NoticeLevel::Warning, text);
            self.events.tell(News { member: member.map(|member| member.index), ..news });
        }
        Ok(report)
    }

    /// Whether an array may be served beside the others. Returns the memory for its metadata, in bytes.
    pub(super) fn check_servable(
        &self,
        superblock: &Superblock,
        options: ServeOptions,
    ) -> Result<u64, RequestError> {
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
        self.memory_for(superblock, options)
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
        // With the smallest cache.
        let is_cache = Footprint::of(superblock, MIN_PAGE_CACHE).total() <= left;
        let cache = if is_cache { ", lower the array's page_cache" } else { "" };
        let what = format!(
            "array '{}' needs {needed} of memory, and {} of {} are left: raise metadata_memory in [daemon]{cache}, or, if its size of {} is not what you expect, look at its members with 'calpe inspect'",
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

    /// Carries out a request of this process's own user.
    pub fn handle(&self, request: Request) -> Reply {
        self.handle_from(request, nix::unistd::getuid().as_raw())
    }

    /// Carries out a request of a user. What it changes, or was to change, is an event.
    pub fn handle_from(&self, request: Request, uid: u32) -> Reply {
        let command = command_of(&request);
        let reply = self.carry_out(request);
        if let Some(command) = command {
            self.note_command(command, uid, &reply);
        }
        reply
    }

    fn carry_out(&self, request: Request) -> Reply {
        let outcome = match request {
            Request::Ping { version } => return self.ping(version),
            Request::Status { array } => {
                return match self.status(array.as_deref()) {
                    Ok(arrays) => Reply::Status(Status {
                        certificates: self.certificates(),
                        problems: self.state.trouble().into_iter().collect(),
                        ..Status::new(arrays)
                    }),
                    Err(error) => Reply::Error(error),
                };
            }
            Request::Events { since } => return self.events_since(since),
            Request::History { array } => return self.history(&array),
            Request::ListImportable { dirs } => return self.importable(&dirs),
            Request::Import { array, all, dirs, force, once, dry_run } => {
                self.import(&ImportOrder { array, all, dirs, force, once, dry_run })
            }
            Request::Export { array, force, dry_run } => self.export(&array, force, dry_run),
            Request::Fail { array, member, dry_run } => self.take_out(&array, &member, true, dry_run),
            Request::Offline { array, member, dry_run } => self.take_out(&array, &member, false, dry_run),
            Request::Online { array, member, path, dry_run } => {
                self.online(&array, &member, path.as_deref(), dry_run)
            }
            Request::Replace { array, old, new, force, dry_run } => {
                self.replace(&array, &old, &new, force, dry_run)
            }
            Request::CancelReplace { array, member, dry_run } => {
                self.cancel_replace(&array, &member, dry_run)
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
            Ok(Done { message, warnings, failures }) => Reply::Done { message, warnings, failures },
            Err(error) => Reply::Error(error),
        }
    }

    /// State of one array, or of all in order of name; also of those that are to be served and are not.
    ///
    /// # Errors
    /// When there is no such array.
    pub fn status(&self, array: Option<&str>) -> Result<Vec<ArrayReport>, RequestError> {
        let ids = match array {
            Some(array) => match (self.find(array, |served| served.id), self.find_awaited(array)) {
                (Ok(id), _) => vec![id],
                (Err(_), Some(waiting)) => return Ok(vec![waiting.report()]),
                (Err(error), None) => return Err(error),
            },
            None => lock(&self.served).iter().map(|served| served.id).collect(),
        };
        let mut reports = ids.into_iter().map(|id| self.report_of(id)).collect::<Result<Vec<_>, _>>()?;
        self.keep_ended_passes();
        if array.is_none() {
            reports.extend(self.awaited().iter().map(Waiting::report));
        }
        reports.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(reports)
    }

    /// Takes note of progress, for rates, and brings members back that are there again: of failed arrays, and remote ones; to
    /// be called once a second or so. Waits for no device.
    pub fn observe(self: &Arc<Self>) {
        self.gpus.tell(&self.events);
        lock(&self.certificates).tell(&self.events);
        self.tell_of_state();
        let ids: Vec<(ArrayId, Uuid)> =
            lock(&self.served).iter().map(|served| (served.id, served.names.uuid)).collect();
        for (id, uuid) in ids {
            // An array that was just stopped has no facts, and needs none.
            let asked = Instant::now();
            let Ok(facts) = self.facts(id) else { continue };
            // One whose log is refused takes no member: it is to be stopped first.
            let is_refused = matches!(facts.status.log, calpe_core::volume::LogState::Refused(_));
            let failed = facts.status.state == calpe_core::volume::ArrayState::Failed && !is_refused;
            self.returns().note(uuid, failed, &facts.status.members, asked);
            self.remember(id, &facts);
            let whole = facts.status.state == calpe_core::volume::ArrayState::Online;
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
        let ids: Vec<ArrayId> = lock(&self.served).iter().map(|served| served.id).collect();
        ids.iter().for_each(|id| self.remember_now(*id));
        *lock(&self.at_stop) = ids.into_iter().filter_map(|id| self.report_of(id).ok()).collect();
        let result = self.reactor.shutdown();
        lock(&self.served).clear();
        await_closings(CLOSING_WAIT);
        self.state.close(STATE_WAIT);
        result
    }

    /// The arrays that were served, as they were when the daemon was told to stop.
    #[must_use]
    pub fn reports_at_stop(&self) -> Vec<ArrayReport> {
        lock(&self.at_stop).clone()
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
        let events = self.events.since(since);
        let next = events.last().map_or(since, |last| last.sequence + 1);
        Reply::Events { events, next }
    }

    fn history(&self, array: &str) -> Reply {
        let uuid = array.parse::<Uuid>().ok();
        let served = self.find(array, |served| (served.names.name.clone(), served.names.uuid));
        let (name, uuid) = match &served {
            Ok((name, uuid)) => (Some(name.clone()), Some(*uuid)),
            Err(_) => (uuid.and_then(|uuid| self.earlier_name(uuid)), uuid),
        };
        let events = self.events.history(name.as_deref().unwrap_or(array), uuid);
        match (served, &events[..]) {
            (Err(error), []) => Reply::Error(error),
            _ => {
                let next = events.last().map_or(0, |last| last.sequence + 1);
                Reply::Events { events, next }
            }
        }
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
        let by_uuid = array.parse::<Uuid>().ok();
        let known = {
            let served = lock(&self.served);
            let is_it = |served: &&Served| served.names.name == array || Some(served.names.uuid) == by_uuid;
            if let Some(served) = served.iter().find(is_it) {
                return Ok(take(served));
            }
            served.iter().map(|served| served.names.name.clone()).collect::<Vec<_>>()
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

    /// The facts of an array, taken note of.
    pub(super) fn facts(&self, id: ArrayId) -> Result<ArrayFacts, RequestError> {
        let facts = self.reactor.status(id)?;
        self.with_names(id, |names| names.observe(clock::now(), &facts));
        Ok(facts)
    }

    pub(super) fn report_of(&self, id: ArrayId) -> Result<ArrayReport, RequestError> {
        let facts = self.facts(id)?;
        let mut addresses = lock(&self.addresses).clone();
        let named = self.with_names(id, |names| (names.name.clone(), names.uuid));
        if named.is_some_and(|(name, uuid)| lock(&self.settings).rules(&name, uuid).is_some()) {
            only_proven(&mut addresses);
        }
        let gpu = self.gpus.report();
        let returning = self.returning(id, &facts);
        self.with_names(id, |names| names.report(&facts, &addresses, &gpu, &returning))
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

    pub(super) fn returns(&self) -> RankedGuard<'_, Returns> {
        lock(&self.returns)
    }

    /// No awaited array is given up while this is held.
    pub(super) fn keep_awaiting(&self) -> (RwLockReadGuard<'_, ()>, Held) {
        let held = Held::new(0);
        (self.giving_up.read().unwrap_or_else(PoisonError::into_inner), held)
    }

    /// No awaited array begins to be served while this is held.
    pub(super) fn keep_from_serving(&self) -> (RwLockWriteGuard<'_, ()>, Held) {
        let held = Held::new(0);
        (self.giving_up.write().unwrap_or_else(PoisonError::into_inner), held)
    }

    pub(super) fn notice_member(
        &self,
        id: ArrayId,
        kind: &'static str,
        level: NoticeLevel,
        member: MemberIndex,
        text: String,
    ) {
        if let Some(name) = self.with_served(id, |served| served.names.name.clone()) {
            self.events.tell(News { member: Some(member.0), ..News::new(Some(&name), kind, level, text) });
        }
    }

    /// Identities of the arrays that are served.
    pub(super) fn served_uuids(&self) -> Vec<Uuid> {
        lock(&self.served).iter().map(|served| served.names.uuid).collect()
    }

    /// An array was stopped.
    pub(super) fn forget_served(&self, id: ArrayId) {
        let uuid = self.with_names(id, |names| names.uuid);
        lock(&self.served).retain(|served| served.id != id);
        if let Some(uuid) = uuid {
            self.returns().forget(uuid);
        }
    }

    pub(super) fn search_places(&self) -> Vec<PathBuf> {
        lock(&self.search).clone()
    }

    pub(super) fn notice(&self, array: &str, kind: &'static str, level: NoticeLevel, text: String) {
        self.events.tell(News::new(Some(array), kind, level, text));
    }
}
