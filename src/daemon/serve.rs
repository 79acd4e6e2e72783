//! The daemon in the foreground: from a configuration to a clean stop.
//!
//! Invariant: nothing is left running or bound when it returns. Must not know of command lines.

use super::config::{ArrayConfig, Config};
use super::control_server::ControlServer;
use super::import;
use super::reactor::{ListenAddress, ListenError};
use super::service::{Daemon, ServeOptions, ServiceConfig, served_line};
use super::signals::{Signals, Woken};
use crate::control::RequestError;
use crate::reclaim;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Seconds between attempts to import a configured array that could not be: disks may be late.
const RETRY_SECONDS: u32 = 5;

/// Signals within this time are one order to stop: terminals and supervisors send several.
const SAME_ORDER_MS: u16 = 1000;
const SAME_ORDER: Duration = Duration::from_millis(SAME_ORDER_MS as u64);

/// Why a daemon could not start, or ended badly.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A socket cannot be had.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// A directory cannot be created.
    #[error("{}: cannot create the directory: {source}: choose another place, or remove what is in the way", path.display())]
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
    #[error("{}: {what}", dir.display())]
    Unclear {
        /// The directory.
        dir: PathBuf,
        /// What is there, and what to do.
        what: String,
    },
    /// The daemon was to be protected, and is not.
    #[error(
        "reclaim_safe is true, and the system grants {0}: see conf/calpe.service for what it needs, or write \"auto\""
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
/// Arrays that cannot be imported do not keep the others from being served: they are tried again until they come.
///
/// # Errors
/// When it cannot start, or could not stop cleanly.
pub fn run_serve(config: &Config) -> Result<(), RunError> {
    let signals = Signals::take().map_err(system("take over signals"))?;
    // Before there are threads and rings: they inherit it.
    let resident = protect(config.daemon.reclaim_safe)?;
    create_dir(&config.daemon.runtime_dir)?;
    for socket in [Some(&config.daemon.control_socket), config.listen.unix.as_ref()].into_iter().flatten() {
        if let Some(parent) = socket.parent() {
            create_dir(parent)?;
        }
    }
    let mut search: Vec<PathBuf> = Vec::new();
    for place in config.arrays.iter().flat_map(|array| &array.search) {
        if !search.contains(place) {
            search.push(place.clone());
        }
    }
    let daemon = Arc::new(
        Daemon::start(ServiceConfig {
            memory: config.daemon.memory,
            resident,
            connections_max: config.listen.max_connections as usize,
            search,
            gpu: config.gpu.clone(),
            runtime_dir: Some(config.daemon.runtime_dir.clone()),
        })
        .map_err(system("start the reactor"))?,
    );
    let control = ControlServer::start(Arc::clone(&daemon), &config.daemon.control_socket)?;
    tracing::info!(socket = %config.daemon.control_socket.display(), "listening for administrators");
    for address in
        [config.listen.unix.clone().map(ListenAddress::Unix), config.listen.tcp.map(ListenAddress::Tcp)]
            .into_iter()
            .flatten()
    {
        let address = daemon.listen(&address)?;
        tracing::info!(%address, "listening for NBD clients");
    }
    let mut waiting: Vec<Waiting> = config.arrays.iter().map(Waiting::new).collect();
    waiting.retain_mut(|array| !array.try_import(&daemon));
    until_stopped(&daemon, &signals, control, |second| {
        if second % RETRY_SECONDS == 0 {
            waiting.retain_mut(|array| !array.try_import(&daemon));
        }
    })
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

/// Waits for the order to stop, then stops everything. `every_second` is told how many have passed.
pub(super) fn until_stopped(
    daemon: &Arc<Daemon>,
    signals: &Signals,
    control: ControlServer,
    mut every_second: impl FnMut(u32),
) -> Result<(), RunError> {
    // Nobody listens unless a supervisor started us.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    let mut seconds = 0;
    loop {
        match signals.wait(daemon.stop_requested(), 1000).map_err(system("wait for signals"))? {
            Woken::Signal(signal) => {
                tracing::info!(%signal, "stopping; signal again to stop at once");
                break;
            }
            Woken::Event => {
                tracing::info!("stopping on request");
                break;
            }
            Woken::Timeout if !daemon.is_alive() => break,
            Woken::Timeout => {
                daemon.observe();
                seconds += 1;
                every_second(seconds);
            }
        }
    }
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    let result = shut_down(daemon, signals);
    drop(control);
    if result.is_ok() {
        tracing::info!("stopped");
    }
    result
}

/// Stops the daemon. Signals that come together with the first one are the same order; later ones end the process.
fn shut_down(daemon: &Arc<Daemon>, signals: &Signals) -> Result<(), RunError> {
    let finished = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
        .map_err(|errno| system("stop in order")(errno.into()))?;
    let result = std::thread::scope(|scope| {
        let ending = scope.spawn(|| {
            let result = daemon.shutdown();
            // Cannot be full.
            let _ = finished.write(1);
            result
        });
        let begun = Instant::now();
        while !ending.is_finished() && begun.elapsed() < SAME_ORDER {
            if signals.wait(&finished, SAME_ORDER_MS)? == Woken::Event {
                break;
            }
        }
        signals.give_back();
        ending.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    result.map_err(system("stop cleanly"))
}

pub(super) fn create_dir(path: &Path) -> Result<(), RunError> {
    std::fs::create_dir_all(path).map_err(|source| RunError::Directory { path: path.to_path_buf(), source })
}

/// A configured array that is not served yet.
struct Waiting {
    config: ArrayConfig,
    /// What was in the way last time; told once.
    told: Option<String>,
}

impl Waiting {
    fn new(config: &ArrayConfig) -> Waiting {
        Waiting { config: config.clone(), told: None }
    }

    /// Whether it need not be tried again.
    fn try_import(&mut self, daemon: &Daemon) -> bool {
        match self.import(daemon) {
            Ok(line) => {
                tracing::info!("{line}");
                true
            }
            Err(error) => {
                let text = error.to_string();
                if self.told.as_ref() != Some(&text) {
                    tracing::error!(array = %self.config.which, "cannot import: {text}");
                    self.told = Some(text);
                }
                false
            }
        }
    }

    fn import(&self, daemon: &Daemon) -> Result<String, RunError> {
        let found = import::search(&self.config.search);
        let uuid = found.choose(&self.config.which.to_string(), &self.config.search)?;
        if let Ok(reports) = daemon.status(Some(&uuid.to_string()))
            && let Some(report) = reports.first()
        {
            // An administrator was faster.
            return Ok(served_line(report));
        }
        let mut opened = import::open(&found.arrays[&uuid], false)?;
        opened.warnings.splice(0..0, found.warnings);
        let options = ServeOptions {
            read_only: self.config.read_only,
            rebuild_min: self.config.rebuild_min,
            rebuild_max: self.config.rebuild_max,
            full_stripe: self.config.full_stripe,
            page_cache: self.config.page_cache,
            force: false,
        };
        Ok(served_line(&daemon.serve(opened, options)?))
    }
}
