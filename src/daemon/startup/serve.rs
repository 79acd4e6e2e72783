//! The daemon in the foreground: from a configuration to a clean stop.
//!
//! Invariant: nothing is left running or bound when it returns. Must not know of command lines.

use super::activation::Activated;
use super::error::{RunError, create_dir, system};
use super::lifetime::until_stopped;
use super::reload::{Reloader, watch_certificates};
use super::signals::Signals;
use super::tls::Tls;
use crate::daemon::config::{Config, ConfigError};
use crate::daemon::control_server::ControlServer;
use crate::daemon::imports::attempts::Imports;
use crate::daemon::reactor::{ListenAddress, Listener};
use crate::daemon::service::{Daemon, ServiceConfig};
use calpe_host::reclaim;
use std::sync::Arc;

/// Runs the daemon until it is told to stop.
///
/// An array that cannot be imported does not hold up the others: it is tried again until it is
/// served. SIGHUP has the configuration read again by `reread`, and never ends the daemon.
///
/// # Errors
/// When it cannot start, or could not stop cleanly.
pub(crate) fn run_serve(
    config: &Config,
    reread: &dyn Fn() -> Result<Config, ConfigError>,
) -> Result<(), RunError> {
    // First of all, before own descriptors could get the numbers of those handed over.
    let activated = Activated::take()?;
    let signals = Signals::take().map_err(system("take over signals"))?;
    // Before threads and rings exist, so that they inherit it.
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
            reactors: config.daemon.reactors,
            connections_max: config.listen.max_connections as usize,
            search: Vec::new(),
            gpu: config.gpu.clone(),
            runtime_dir: Some(config.daemon.runtime_dir.clone()),
            state_dir: Some(config.daemon.state_dir.clone()),
        })
        .map_err(system("start the reactor"))?,
    );
    daemon.configure(&config.arrays, &[]);
    // Before the first request, so that no status omits an array or a certificate.
    Imports::announce(daemon.arrays(), &config.arrays);
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
    let imports = Imports::start(daemon.arrays(), &config.arrays);
    // Clients of a socket that was bound before this process wait until all arrays have been tried.
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

/// Protects this process against waiting for itself when memory is short. Returns whether its
/// memory is locked.
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
