//! The daemon in the foreground: from a configuration to a clean stop.
//!
//! Invariant: nothing is left running or bound when it returns. Must not know of command lines.

use super::activation::{Activated, ActivationError};
use super::config::{Config, ConfigError, ListenConfig};
use super::control_server::ControlServer;
use super::drill;
use super::import;
use super::imports::Imports;
use super::logging;
use super::reactor::{ListenAddress, ListenError, ListenTls, Listener};
use super::reload::{Reloader, watch_certificates};
use super::service::{Daemon, ServiceConfig};
use super::signals::{Signals, Woken};
use crate::control::RequestError;
use crate::member::set_remote_tls;
use crate::tls::{ClientTls, ServerTls, TlsFileError};
use calpe_core::nbd::TlsMode;
use calpe_core::units::shown;
use calpe_host::reclaim;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::Signal;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, sync_channel};
use std::time::{Duration, Instant};

/// How often it is looked whether the arrays have had their first attempt, in milliseconds.
const ATTEMPT_POLL_MS: u16 = 10;

/// How often progress is taken note of, and members that are away are looked for.
const OBSERVED_EVERY: Duration = Duration::from_secs(1);

/// Signals within this time are one order to stop: terminals and supervisors send several.
const SAME_ORDER_MS: u16 = 1000;
const SAME_ORDER: Duration = Duration::from_millis(SAME_ORDER_MS as u64);

/// Why a daemon could not start, or ended badly.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A socket cannot be had.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// What a supervisor handed over cannot be used.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// A file of TLS cannot be used.
    #[error("TLS: {0}")]
    Tls(#[from] TlsFileError),
    /// A socket of a supervisor would be open to everybody.
    #[error(
        "the supervisor listens on {address}, which is not loopback, and everybody who reaches it could read and write every volume: demand TLS with client certificates (tls_certificate, tls_key, tls_client_ca in [listen]), or allow it with plaintext = true"
    )]
    Exposed {
        /// Its address.
        address: ListenAddress,
    },
    /// A directory cannot be created.
    #[error(
        "{}: cannot create the directory: {source}: choose another place, or remove what is in the way",
        shown(path)
    )]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The array of `up` cannot be created.
    #[error(transparent)]
    Create(#[from] super::create::CreateError),
    /// The array of `up` cannot be opened.
    #[error(transparent)]
    Import(#[from] import::ImportError),
    /// The array of `up` cannot be served.
    #[error(transparent)]
    Serve(#[from] RequestError),
    /// The directory of `up` holds something else than one array.
    #[error("{}: {what}", shown(dir))]
    Unclear {
        /// The directory.
        dir: PathBuf,
        /// What is there, and what to do.
        what: String,
    },
    /// A signal came before anything was served.
    #[error("ended by {0} before the array was served: the same command goes on")]
    Interrupted(Signal),
    /// The daemon was to be protected, and is not.
    #[error(
        "reclaim_safe is true, and the system grants {0}: see conf/systemd/calpe.service for what it needs, or write \"auto\""
    )]
    Unprotected(reclaim::Protection),
    /// The system refuses what a daemon needs.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

pub(super) fn system(action: &'static str) -> impl Fn(io::Error) -> RunError {
    move |source| RunError::System { action, source }
}

/// Runs the daemon until it is told to stop.
///
/// Arrays that cannot be imported do not keep the others from being served: they are tried again until they
/// come. SIGHUP has the configuration read again by `reread`, and never ends the daemon.
///
/// # Errors
/// When it cannot start, or could not stop cleanly.
pub fn run_serve(config: &Config, reread: &dyn Fn() -> Result<Config, ConfigError>) -> Result<(), RunError> {
    // First of all: no descriptor of our own may have one of these numbers.
    let activated = Activated::take()?;
    let signals = Signals::take().map_err(system("take over signals"))?;
    // Before there are threads and rings: they inherit it.
    let resident = protect(config.daemon.reclaim_safe)?;
    let tls = Tls::load(config)?;
    for listener in &activated.nbd {
        tls.check_exposure(&config.listen, listener.address())?;
    }
    create_dir(&config.daemon.runtime_dir)?;
    let own_unix = config.listen.unix.as_ref().filter(|_| activated.nbd.is_empty());
    for socket in [Some(&config.daemon.control_socket), own_unix].into_iter().flatten() {
        if let Some(parent) = socket.parent() {
            create_dir(parent)?;
        }
    }
    let daemon = Arc::new(
        Daemon::start(ServiceConfig {
            memory: config.daemon.memory,
            metadata_memory: config.daemon.metadata_memory,
            resident,
            connections_max: config.listen.max_connections as usize,
            search: Vec::new(),
            gpu: config.gpu.clone(),
            runtime_dir: Some(config.daemon.runtime_dir.clone()),
            state_dir: Some(config.daemon.state_dir.clone()),
        })
        .map_err(system("start the reactor"))?,
    );
    daemon.configure(&config.arrays, &[]);
    // Before anybody can ask: no array and no certificate is ever left out of a status.
    Imports::announce(&daemon, &config.arrays);
    watch_certificates(&daemon, config);
    let control = match activated.control {
        Some(listener) => ControlServer::on(Arc::clone(&daemon), listener)?,
        None => ControlServer::start(Arc::clone(&daemon), &config.daemon.control_socket)?,
    };
    tracing::info!(socket = %control.address(), "listening for administrators");
    let own =
        [config.listen.unix.clone().map(ListenAddress::Unix), config.listen.tcp.map(ListenAddress::Tcp)];
    if activated.nbd.is_empty() {
        for address in own.into_iter().flatten() {
            tls.listen(&daemon, Listener::bind(&address)?);
        }
    }
    let imports = Imports::start(&daemon, &config.arrays);
    // Whoever connected to a socket that was there before us waits for the arrays, not for an answer without them.
    let mut activated = activated.nbd;
    let mut start = || {
        imports.begin_threadless();
        let tried = imports.all_tried();
        if tried {
            activated.drain(..).for_each(|listener| tls.listen(&daemon, listener));
        }
        tried
    };
    let reloader = Reloader::new(&daemon, config, reread, &imports, &tls);
    until_stopped(&daemon, &signals, control, Some(&|| reloader.reload()), &mut start)
}

/// What TLS means to the listeners of this daemon.
pub(super) struct Tls {
    tcp: ListenTls,
    unix: ListenTls,
    pub(super) server: Option<Arc<ServerTls>>,
}

impl Tls {
    fn load(config: &Config) -> Result<Tls, TlsFileError> {
        set_remote_tls(config.remote.as_ref().map(ClientTls::load).transpose()?);
        let Some(tls) = &config.listen.tls else {
            return Ok(Tls { tcp: ListenTls::default(), unix: ListenTls::default(), server: None });
        };
        let server = Some(Arc::new(ServerTls::load(&tls.files)?));
        let with = |mode| ListenTls { mode, server: server.clone() };
        Ok(Tls { tcp: with(tls.tcp), unix: with(tls.unix), server })
    }

    /// Refuses an address that others than this host can reach without proving who they are.
    fn check_exposure(&self, config: &ListenConfig, address: &ListenAddress) -> Result<(), RunError> {
        let ListenAddress::Tcp(tcp) = address else { return Ok(()) };
        let proven = self.tcp.mode == TlsMode::Required
            && self.server.as_ref().is_some_and(|server| server.demands_certificates());
        if tcp.ip().to_canonical().is_loopback() || proven || config.plaintext {
            return Ok(());
        }
        Err(RunError::Exposed { address: address.clone() })
    }

    fn listen(&self, daemon: &Daemon, listener: Listener) {
        let tls = match listener.address() {
            ListenAddress::Tcp(_) => &self.tcp,
            ListenAddress::Unix(_) => &self.unix,
        };
        let mode = tls.mode;
        let address = daemon.accept_on(listener.with_tls(tls.clone()));
        tracing::info!(%address, tls = ?mode, "listening for NBD clients");
    }
}

/// Protects this process against waiting for itself when memory is short. Whether its memory stays where it is.
fn protect(mode: reclaim::Mode) -> Result<bool, RunError> {
    if mode == reclaim::Mode::Off {
        return Ok(false);
    }
    let protection = reclaim::protect();
    if protection.missing.is_empty() {
        return Ok(true);
    }
    if mode == reclaim::Mode::Require {
        return Err(RunError::Unprotected(protection));
    }
    tracing::info!("memory reclaim may wait for a block device that is attached on this host: {protection}");
    Ok(protection.locked)
}

/// Waits for the order to stop, then stops everything. SIGHUP is such an order, unless it means to `reload`.
/// A supervisor is told that the daemon is ready when `has_started`, which is asked again and again as long as the daemon runs.
pub(super) fn until_stopped(
    daemon: &Arc<Daemon>,
    signals: &Signals,
    control: ControlServer,
    reload: Option<&dyn Fn()>,
    has_started: &mut dyn FnMut() -> bool,
) -> Result<(), RunError> {
    let mut started = false;
    let mut observe_at = Some(Instant::now());
    loop {
        if observe_at.is_some_and(|at| at <= Instant::now()) {
            observe_at = observe(daemon).err().map(|error| {
                tracing::warn!(%error, "no thread to look after the arrays: members that come back wait for it");
                Instant::now() + OBSERVED_EVERY
            });
        }
        if has_started() && !started {
            started = true;
            // Nobody listens unless a supervisor started us.
            let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        }
        let patience_ms = if started { 1000 } else { ATTEMPT_POLL_MS };
        match signals.wait(daemon.stop_requested(), patience_ms).map_err(system("wait for signals"))? {
            Woken::Signal(Signal::SIGHUP) if reload.is_some() => {
                if let Some(reload) = reload {
                    reload();
                }
            }
            Woken::Signal(signal) => {
                tracing::info!(%signal, "stopping; signal again to stop at once");
                break;
            }
            Woken::Event => {
                tracing::info!("stopping on request");
                break;
            }
            Woken::Timeout if !daemon.is_alive() => break,
            Woken::Timeout => drill::look(),
        }
    }
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    let result = shut_down(daemon, signals, reload.is_none());
    drop(control);
    if result.is_ok() {
        tracing::info!("stopped");
    }
    result
}

/// Looks after the arrays on a thread of its own, as long as they are served: the thread that takes signals waits for nothing
/// else.
fn observe(daemon: &Arc<Daemon>) -> io::Result<()> {
    let daemon = Arc::clone(daemon);
    let thread = std::thread::Builder::new().name("observer".into());
    thread.spawn(move || {
        while daemon.is_alive() {
            daemon.observe();
            logging::tell_left_out();
            daemon.keep_findings(OBSERVED_EVERY);
        }
    })?;
    Ok(())
}

/// Does what may take as long as a device likes while signals are taken: one of them ends the wait.
///
/// # Errors
/// The signal, or what the system refused.
pub(super) fn unless_stopped<T: Send + 'static>(
    signals: &Signals,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RunError> {
    let done = EventFd::from_flags(EfdFlags::EFD_CLOEXEC).map_err(|errno| system("start")(errno.into()))?;
    let done = Arc::new(done);
    let (sender, receiver) = sync_channel(1);
    let in_thread = Arc::clone(&done);
    let worker = move || {
        // Whoever waits may have been told to stop.
        let _ = sender.send(work());
        let _ = in_thread.write(1);
    };
    std::thread::Builder::new().name("start".into()).spawn(worker).map_err(system("start a thread"))?;
    loop {
        match signals.wait(&done, 1000).map_err(system("wait for signals"))? {
            Woken::Signal(signal) => return Err(RunError::Interrupted(signal)),
            Woken::Event | Woken::Timeout => match receiver.try_recv() {
                Ok(value) => return Ok(value),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => panic!("the start panicked"),
            },
        }
    }
}

/// Stops the daemon. Signals that come together with the first one are the same order; later ones end the
/// process, SIGHUP only if it `hangup_ends_us`.
fn shut_down(daemon: &Arc<Daemon>, signals: &Signals, hangup_ends_us: bool) -> Result<(), RunError> {
    let finished = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
        .map_err(|errno| system("stop in order")(errno.into()))?;
    let result = std::thread::scope(|scope| {
        let end = || {
            let result = daemon.shutdown();
            // Cannot be full.
            let _ = finished.write(1);
            result
        };
        let ending = match std::thread::Builder::new().name("stop".into()).spawn_scoped(scope, end) {
            Ok(ending) => ending,
            Err(error) => {
                tracing::warn!(%error, "no thread for the stop: a further signal ends the daemon at once");
                signals.give_back(hangup_ends_us);
                return daemon.shutdown();
            }
        };
        let begun = Instant::now();
        while !ending.is_finished() && begun.elapsed() < SAME_ORDER {
            if signals.wait(&finished, SAME_ORDER_MS)? == Woken::Event {
                break;
            }
        }
        signals.give_back(hangup_ends_us);
        ending.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    result.map_err(system("stop cleanly"))
}

/// Creates a directory for sockets, with those above it, for this user alone. One that is there stays as it is.
pub(super) fn create_dir(path: &Path) -> Result<(), RunError> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|source| RunError::Directory { path: path.to_path_buf(), source })
}
