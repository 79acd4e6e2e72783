//! The control socket: takes administrators' requests, a line each, and answers them in turn.
//!
//! Invariants: the socket is private to its user; a client that is slow, silent or talks nonsense costs one
//! thread of a limited number. Must not know what requests mean.

use super::drill;
use super::reactor::{ListenAddress, ListenError, Listener};
use super::service::Daemon;
use crate::control::{
    ErrorCode, MAX_REQUEST_BYTES, Reply, Request, RequestError, WireError, read_message, write_message,
};
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{Shutdown, getsockopt, shutdown};
use std::io::{self, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Administrators at one time: people and scripts, not load.
const CLIENTS_MAX: usize = 64;

/// How long a client may say nothing.
const SILENCE_MAX: Duration = Duration::from_secs(600);

/// A control socket being served. Dropping it stops taking clients and removes the socket.
#[derive(Debug)]
pub struct ControlServer {
    listener: Listener,
    socket: UnixListener,
    thread: Option<JoinHandle<()>>,
}

impl ControlServer {
    /// Serves `daemon` on a socket at `path`.
    ///
    /// # Errors
    /// When the socket cannot be had.
    pub fn start(daemon: Arc<Daemon>, path: &Path) -> Result<ControlServer, ListenError> {
        ControlServer::on(daemon, Listener::bind(&ListenAddress::Unix(path.into()))?)
    }

    /// Serves `daemon` on a unix socket that is there.
    ///
    /// # Errors
    /// When the system is out of descriptors or threads.
    ///
    /// # Panics
    /// When it is not a unix socket.
    pub fn on(daemon: Arc<Daemon>, listener: Listener) -> Result<ControlServer, ListenError> {
        let address = listener.address().clone();
        let fail = |source: io::Error| ListenError::Io { address: address.clone(), source };
        let socket = listener.unix_listener().map_err(fail)?;
        let accepting = socket.try_clone().map_err(fail)?;
        let thread = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || accept(&daemon, &accepting))
            .map_err(fail)?;
        Ok(ControlServer { listener, socket, thread: Some(thread) })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> &ListenAddress {
        self.listener.address()
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        // Wakes the thread; an error means that it is awake already.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // A panic was reported when it happened.
            let _ = thread.join();
        }
    }
}

fn accept(daemon: &Arc<Daemon>, listener: &UnixListener) {
    let clients = Arc::new(AtomicUsize::new(0));
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            // Shut down.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return,
            Err(error) => {
                tracing::warn!(%error, "control socket");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        if clients.fetch_add(1, Ordering::Relaxed) >= CLIENTS_MAX {
            clients.fetch_sub(1, Ordering::Relaxed);
            tracing::warn!("too many clients on the control socket");
            continue;
        }
        let (daemon, counted) = (Arc::clone(daemon), Arc::clone(&clients));
        let spawned = std::thread::Builder::new().name("admin".into()).spawn(move || {
            if let Err(error) = converse(&daemon, &stream) {
                tracing::debug!(%error, "control client");
            }
            counted.fetch_sub(1, Ordering::Relaxed);
        });
        if let Err(error) = spawned {
            clients.fetch_sub(1, Ordering::Relaxed);
            tracing::warn!(%error, "no thread for a control client");
        }
    }
}

fn converse(daemon: &Daemon, stream: &UnixStream) -> Result<(), WireError> {
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.set_write_timeout(Some(SILENCE_MAX))?;
    // Who connected; commands are told with it.
    let uid = getsockopt(stream, PeerCredentials).map_err(io::Error::from)?.uid();
    let mut reader = BufReader::new(stream);
    let mut writer = stream;
    loop {
        let reply = match read_message::<Request>(&mut reader, MAX_REQUEST_BYTES) {
            Ok(None) => return Ok(()),
            Ok(Some(request)) => {
                drill::point("admin");
                daemon.handle_from(request, uid)
            }
            Err(error @ WireError::Malformed(_)) => {
                Reply::Error(RequestError { code: ErrorCode::BadRequest, message: error.to_string() })
            }
            Err(error) => return Err(error),
        };
        write_message(&mut writer, &reply)?;
    }
}
