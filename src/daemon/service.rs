//! The running daemon: its arrays, and the dispatch of requests about them.
//!
//! Invariant: a request that is refused has changed nothing. Must not know how requests arrive.

use super::arrays::configure::configure;
use super::arrays::memory::Memory;
use super::arrays::outcome::{CLOSING_WAIT, Done, refusal};
use super::arrays::registry::{Arrays, Parts};
use super::arrays::settings::Settings;
use super::certificates::Certificates;
use super::clock;
use super::commands::{command_of, note_command};
use super::config::ArrayConfig;
use super::config::MAX_REACTORS;
use super::events::{EventLog, News, kinds};
use super::gpu::{FoundGpus, Gpus};
use super::host_memory;
use super::imports::order::{ImportOrder, import};
use super::imports::{export::export, list::list};
use super::members::in_step::{are_in_step, keep_in_step};
use super::members::online::online;
use super::members::replace::{cancel_replace, replace};
use super::members::returning::{bring_back, return_members};
use super::members::take_out::{clear, take_out};
use super::passes::{repair, scrub};
use super::ranked::{Ranked, lock};
use super::reactor::{ListenAddress, ListenError, Listener, ReactorConfig, ReactorHandle};
use super::state::StateDir;
use crate::control::{
    ArrayReport, CertificateReport, ErrorCode, PROTOCOL_VERSION, Pong, Reply, Request, Status,
};
use crate::member::await_closings;
use crate::tls::{CertificateFacts, Peer, ServerTls};
use calpe_core::volume::{ArrayState, LogState, NoticeLevel};
use calpe_gpu::GpuConfig;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::resource::{Resource, getrlimit};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Part of the memory that payloads of clients may take, as a divisor: the rest is for the reads and parity
/// of their stripes.
const PAYLOAD_SHARE: u64 = 2;

/// Fewest cores with which there are several reactors: below, jobs and clients need the others.
const REACTOR_CORES_MIN: usize = 4;

/// Descriptors of this process for each reactor by default: it takes a few itself, and clients and members
/// need some.
const REACTOR_DESCRIPTORS: u64 = 16;

/// One for each core, as far as there are descriptors: where all cores are busy reactors do their jobs
/// themselves.
fn default_reactors() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let descriptors = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(limit, _)| limit);
    reactors_for(cores, descriptors)
}

/// The default for so many cores and descriptors.
fn reactors_for(cores: usize, descriptors: u64) -> usize {
    let most = usize::try_from(descriptors / REACTOR_DESCRIPTORS).unwrap_or(usize::MAX);
    match cores {
        cores if cores < REACTOR_CORES_MIN => 1,
        cores => cores.min(MAX_REACTORS).min(most).max(1),
    }
}

/// Part of the host's memory that metadata may take by default, as a divisor.
const METADATA_PART: u64 = 2;

/// How long the stop of the daemon waits for requests that are being carried out.
const LAST_CHANGES_WAIT: Duration = Duration::from_secs(2);

/// How long the stop of the daemon waits for the state directory.
const STATE_WAIT: Duration = Duration::from_secs(2);

/// How a daemon is started.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ServiceConfig {
    /// Bytes of memory for requests.
    pub memory: u64,
    /// Bytes of memory that the stripe maps and page caches of all arrays may take; none: half of
    /// what this process can have.
    pub metadata_memory: Option<u64>,
    /// Whether all memory for requests is taken at the start.
    pub resident: bool,
    /// Threads that serve clients; none: as many as the cores allow.
    pub reactors: Option<usize>,
    /// Clients at one time.
    pub connections_max: usize,
    /// Where members are looked for when a request does not say.
    pub search: Vec<PathBuf>,
    /// Which GPUs are used, and how.
    pub gpu: GpuConfig,
    /// Where measurements are kept; none: nowhere.
    pub runtime_dir: Option<PathBuf>,
    /// Where the state for the next start is kept; none: nowhere.
    pub state_dir: Option<PathBuf>,
}

/// A running daemon.
#[derive(Debug)]
pub(super) struct Daemon {
    arrays: Arc<Arrays>,
    gpus: Gpus,
    certificates: Ranked<Certificates, 8>,
    /// The arrays that were served, as they were when the daemon was told to stop.
    at_stop: Ranked<Vec<ArrayReport>, 10>,
    /// Rings when the daemon is to end.
    stop: EventFd,
}

impl Daemon {
    /// Starts a reactor that serves nothing yet.
    ///
    /// # Errors
    /// When the system has no memory or no io_uring for it, or a GPU is required and none can be
    /// used.
    pub(super) fn start(config: ServiceConfig) -> io::Result<Daemon> {
        let memory = usize::try_from(config.memory).map_err(io::Error::other)?;
        let found = FoundGpus::find(&config.gpu, config.runtime_dir.as_deref(), config.resident)?;
        let pool = found.memory(memory)?;
        if config.resident
            && let Err(error) = pool.make_resident()
        {
            tracing::warn!(%error, "cannot take all memory for requests at the start");
        }
        let gpus = found.start(&pool)?;
        let opened = config.state_dir.as_deref().map(StateDir::open);
        let (state, mut remembered) = opened.unwrap_or_default();
        let events = EventLog::new(state.clone(), std::mem::take(&mut remembered.events));
        for warning in std::mem::take(&mut remembered.warnings) {
            events.tell(News::new(None, kinds::STATE_DIR, NoticeLevel::Warning, warning));
        }
        let reactor = ReactorHandle::spawn(
            ReactorConfig {
                reactors: config.reactors.unwrap_or_else(default_reactors),
                pool: pool.clone(),
                payload_bytes: memory / PAYLOAD_SHARE as usize,
                connections_max: config.connections_max,
                gpu: gpus.runtime(),
            },
            events.clone(),
        )?;
        let arrays = Arc::new(Arrays::new(Parts {
            reactor,
            events,
            settings: Settings::new(config.search),
            memory: Memory::new(state, remembered),
            pool,
            metadata_memory: config.metadata_memory.unwrap_or_else(|| host_memory::bytes() / METADATA_PART),
            gpus: gpus.clone(),
        }));
        Ok(Daemon {
            arrays,
            gpus,
            certificates: Ranked::default(),
            at_stop: Ranked::default(),
            stop: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
        })
    }

    /// Its arrays.
    pub(crate) fn arrays(&self) -> &Arc<Arrays> {
        &self.arrays
    }

    /// Accepts NBD clients at an address. Returns it, with the port that was given.
    ///
    /// # Errors
    /// When it is taken or not allowed.
    pub(super) fn listen(&self, address: &ListenAddress) -> Result<ListenAddress, ListenError> {
        Ok(self.arrays.accept_on(Listener::bind(address)?))
    }

    /// Replaces the sections of the configuration, also for arrays in service. The sections that are `gone`
    /// from it count for as long as their arrays are served. Returns how many sessions end as a result.
    pub(super) fn configure(&self, sections: &[ArrayConfig], gone: &[ArrayConfig]) -> usize {
        configure(&self.arrays, sections, gone)
    }

    /// Carries out a request of this process's own user.
    #[cfg(test)]
    pub(super) fn handle(&self, request: Request) -> Reply {
        self.handle_from(request, nix::unistd::getuid().as_raw())
    }

    /// Carries out a request of a user. A request for a change becomes an event. [`Request::Shutdown`] is
    /// only accepted here: [`Daemon::begin_stop`] follows the reply.
    pub(super) fn handle_from(&self, request: Request, uid: u32) -> Reply {
        let command = command_of(&request);
        let reply = self.carry_out(request);
        if let Some(command) = command {
            note_command(&self.arrays, command, uid, &reply);
        }
        reply
    }

    fn carry_out(&self, request: Request) -> Reply {
        let arrays = &*self.arrays;
        let outcome = match request {
            Request::Ping { version } => return self.ping(version),
            Request::Status { array } => {
                return match arrays.status(array.as_deref()) {
                    Ok(reports) => Reply::Status(Status {
                        certificates: self.certificates(),
                        problems: arrays.memory.trouble().into_iter().collect(),
                        ..Status::new(reports)
                    }),
                    Err(error) => Reply::Error(error),
                };
            }
            Request::Events { since } => return self.events_since(since),
            Request::History { array } => return self.history(&array),
            Request::ListImportable { dirs } => return list(arrays, &dirs),
            Request::Import { array, all, dirs, force, once, dry_run } => {
                import(arrays, &ImportOrder { array, all, dirs, force, once, dry_run })
            }
            Request::Export { array, force, dry_run } => export(arrays, &array, force, dry_run),
            Request::Fail { array, member, dry_run } => take_out(arrays, &array, &member, true, dry_run),
            Request::Offline { array, member, dry_run } => take_out(arrays, &array, &member, false, dry_run),
            Request::Online { array, member, path, dry_run } => {
                online(arrays, &array, &member, path.as_deref(), dry_run)
            }
            Request::Replace { array, old, new, force, dry_run } => {
                replace(arrays, &array, &old, &new, force, dry_run)
            }
            Request::CancelReplace { array, member, dry_run } => {
                cancel_replace(arrays, &array, &member, dry_run)
            }
            Request::Scrub { array, action, dry_run } => scrub(arrays, &array, action, dry_run),
            Request::Repair { array, dry_run } => repair(arrays, &array, dry_run),
            Request::Clear { array, member, dry_run } => clear(arrays, &array, member.as_ref(), dry_run),
            Request::GpuDrill { drill, dry_run } => {
                let done = self.gpus.drill(drill, dry_run);
                done.map(Done::line).map_err(|reason| refusal(ErrorCode::Refused, reason))
            }
            Request::Shutdown { dry_run } => Ok(self.accept_shutdown(dry_run)),
        };
        match outcome {
            Ok(Done { message, warnings, failures }) => Reply::Done { message, warnings, failures },
            Err(error) => Reply::Error(error),
        }
    }

    /// Records progress, for rates, and begins to bring back members that are there again; to be called about
    /// once a second. Waits for no device.
    pub(super) fn observe(&self) {
        self.gpus.tell(&self.arrays.events);
        lock(&self.certificates).tell(&self.arrays.events);
        self.arrays.tell_of_state();
        for (id, uuid) in self.arrays.served.list(|served| (served.id, served.names.uuid)) {
            // An array that was just stopped has no facts, and needs none.
            let asked = Instant::now();
            let Ok(facts) = self.arrays.facts(id) else { continue };
            // An array whose log is refused takes no member: it has to be stopped first.
            let is_refused = matches!(facts.status.log, LogState::Refused(_));
            let failed = facts.status.state == ArrayState::Failed && !is_refused;
            self.arrays.returns.note(uuid, failed, &facts.status.members, asked);
            self.arrays.remember(id, &facts);
            let whole = facts.status.state == ArrayState::Online;
            let is_in_step = are_in_step(&facts.of_lane);
            if is_in_step && (whole || (!failed && self.arrays.away(id, &facts).is_empty())) {
                continue;
            }
            // An array that is being changed is observed the next time.
            let Some(change) = self.arrays.try_change(uuid) else { continue };
            let arrays = Arc::clone(&self.arrays);
            let thread = std::thread::Builder::new().name("return".into());
            // Without a thread, the next call tries again.
            let _ = thread.spawn(move || {
                if failed {
                    bring_back(&arrays, id, &facts, &change);
                }
                keep_in_step(&arrays, id, &change);
                return_members(&arrays, id, &facts, &change);
            });
        }
    }

    /// The descriptor that becomes readable when somebody requests the end of the daemon.
    #[must_use]
    pub(super) fn stop_requested(&self) -> &EventFd {
        &self.stop
    }

    /// Stops every array and the reactor.
    ///
    /// # Errors
    /// What made the reactor end early, if something did.
    pub(super) fn shutdown(&self) -> io::Result<()> {
        let arrays = &*self.arrays;
        arrays.end_changes(LAST_CHANGES_WAIT);
        let ids = arrays.served.ids();
        ids.iter().for_each(|id| arrays.remember_now(*id));
        *lock(&self.at_stop) = ids.into_iter().filter_map(|id| arrays.report_of(id).ok()).collect();
        let result = arrays.reactor.shutdown();
        arrays.served.clear();
        await_closings(CLOSING_WAIT);
        arrays.memory.close(STATE_WAIT);
        result
    }

    /// The arrays that were served, as they were when the daemon was told to stop.
    #[must_use]
    pub(super) fn reports_at_stop(&self) -> Vec<ArrayReport> {
        lock(&self.at_stop).clone()
    }

    /// Whether the reactor still runs.
    #[must_use]
    pub(super) fn is_alive(&self) -> bool {
        self.arrays.is_alive()
    }

    /// Ends the sessions of clients that the TLS files no longer admit. Returns their certificates, and how
    /// many had none.
    pub(crate) fn end_untrusted(&self, tls: &ServerTls) -> (Vec<Arc<Peer>>, usize) {
        let mut peers = self.arrays.reactor.peers().unwrap_or_default();
        peers.retain(|peer| tls.trusts(peer).is_err());
        // A reactor that has ended has no sessions.
        let _ = self.arrays.reactor.end_sessions(peers.clone(), false);
        let anonymous =
            tls.demands_certificates().then(|| self.arrays.reactor.end_sessions(Vec::new(), true));
        (peers, anonymous.and_then(Result::ok).unwrap_or(0))
    }

    /// Reports from now on when these certificates end.
    pub(crate) fn watch_certificates(&self, server: Vec<CertificateFacts>, remote: Vec<CertificateFacts>) {
        lock(&self.certificates).watch(server, remote);
    }

    /// The certificates that it shows and trusts.
    pub(crate) fn certificates(&self) -> Vec<CertificateReport> {
        lock(&self.certificates).report(clock::unix_seconds())
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
        let events = self.arrays.events.since(since);
        let next = events.last().map_or(since, |last| last.sequence + 1);
        Reply::Events { events, next }
    }

    fn history(&self, array: &str) -> Reply {
        let uuid = array.parse::<Uuid>().ok();
        let served = self.arrays.find(array, |served| (served.names.name.clone(), served.names.uuid));
        let (name, uuid) = match &served {
            Ok((name, uuid)) => (Some(name.clone()), Some(*uuid)),
            Err(_) => (uuid.and_then(|uuid| self.arrays.memory.earlier_name(uuid)), uuid),
        };
        let events = self.arrays.events.history(name.as_deref().unwrap_or(array), uuid);
        match (served, &events[..]) {
            (Err(error), []) => Reply::Error(error),
            _ => {
                let next = events.last().map_or(0, |last| last.sequence + 1);
                Reply::Events { events, next }
            }
        }
    }

    fn accept_shutdown(&self, dry_run: bool) -> Done {
        let count = self.arrays.served.ids().len();
        let arrays = if count == 1 { "1 array".to_owned() } else { format!("{count} arrays") };
        if dry_run {
            return Done::line(format!("would stop {arrays} and the daemon"));
        }
        Done::line(format!("the daemon stops, {arrays} first"))
    }

    /// Begins the stop of the daemon: the process may end at any moment from here on, so the reply to
    /// [`Request::Shutdown`] is sent first.
    pub(super) fn begin_stop(&self) {
        // A full counter has the same effect.
        let _ = self.stop.write(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_reactor_for_each_core_as_far_as_there_are_descriptors() {
        let cases = [(1, 1024, 1), (3, 1024, 1), (4, 1024, 4), (16, 1024, 16), (256, 1024, 64)];
        for (cores, descriptors, reactors) in cases {
            assert_eq!(reactors_for(cores, descriptors), reactors, "{cores} cores");
        }
        assert_eq!((reactors_for(1000, u64::MAX), reactors_for(16, 10)), (MAX_REACTORS, 1));
    }
}
