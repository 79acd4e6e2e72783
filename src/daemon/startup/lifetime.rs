//! The daemon from its start to its clean stop: takes signals, and observes the arrays.
//!
//! Invariant: the thread that takes signals waits for nothing else. Must not know how the daemon
//! was started.

use super::error::{RunError, system};
use super::signals::{Signals, Woken};
use crate::daemon::control_server::ControlServer;
use crate::daemon::service::Daemon;
use crate::daemon::{drill, logging};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::Signal;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, sync_channel};
use std::time::{Duration, Instant};

/// Time between two checks whether all arrays have been tried, in milliseconds.
const ATTEMPT_POLL_MS: u16 = 10;

/// How often the arrays are observed.
const OBSERVED_EVERY: Duration = Duration::from_secs(1);

/// Signals within this time are one order to stop: terminals and supervisors send several.
const SAME_ORDER_MS: u16 = 1000;
const SAME_ORDER: Duration = Duration::from_millis(SAME_ORDER_MS as u64);

/// Waits for the order to stop, then stops everything. SIGHUP is such an order if there is no
/// `reload`. A supervisor is told that the daemon is ready once `has_started` returns true; it is
/// called again and again as long as the daemon runs.
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
            // An error means that there is no supervisor.
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

/// Observes the arrays on a thread of its own, as long as they are served: the thread that takes signals
/// waits for nothing else.
fn observe(daemon: &Arc<Daemon>) -> io::Result<()> {
    let daemon = Arc::clone(daemon);
    let thread = std::thread::Builder::new().name("observer".into());
    thread.spawn(move || {
        while daemon.is_alive() {
            daemon.observe();
            logging::tell_left_out();
            daemon.arrays().keep_findings(OBSERVED_EVERY);
        }
    })?;
    Ok(())
}

/// Runs work that may have to wait for a device. A signal ends the wait.
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
        // The waiting thread may have been told to stop.
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

/// Stops the daemon. Signals that come together with the first one are the same order; later ones
/// end the process, SIGHUP only if it `hangup_ends_us`.
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
