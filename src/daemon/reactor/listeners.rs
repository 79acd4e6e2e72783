//! The reactor's listening sockets: each waits for several clients at once. Must not know what becomes of
//! them.

use super::admission::Origin;
use super::connection::Connection;
use super::listener::{ListenAddress, Listener};
use super::sockets::{Sockets, grow_receive_buffer, hangup_bits};
use crate::daemon::logging;
use calpe_core::units::Timestamp;
use nix::sys::socket::{Shutdown, setsockopt, shutdown, sockopt};
use slab::Slab;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// Send buffer requested for each client, in bytes: a few large replies, so that the client has something to
/// read while the next are gathered.
const SEND_BUFFER_BYTES: usize = 2 << 20;

/// Receive buffer requested for each TCP client, in bytes: there must be room for everything that a client
/// sends ahead, or the end of its stream cannot be seen behind it (see `event_loop`). The kernel gives up to
/// half of net.ipv4.tcp_rmem's maximum, as it does to any client that has sent a lot.
const RECEIVE_BUFFER_BYTES: i32 = 32 << 20;

/// Most clients that a listener may get in one turn: with one for each turn, the last of a thousand would
/// wait for a thousand turns.
const ACCEPTS: usize = 16;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    all: Slab<Listening>,
}

#[derive(Debug)]
struct Listening {
    /// Removes the socket file when dropped.
    listener: Listener,
    socket: Arc<OwnedFd>,
    /// Accepts in the kernel.
    armed: usize,
    closing: bool,
}

impl Listeners {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether one of them is a unix socket.
    pub(super) fn has_unix(&self) -> bool {
        self.all.iter().any(|(_, one)| matches!(one.listener.address(), ListenAddress::Unix(_)))
    }

    pub(super) fn add(&mut self, sockets: &mut Sockets, listener: Listener) {
        match listener.descriptor() {
            Ok(socket) => {
                let socket = Arc::new(socket);
                self.all.insert(Listening { listener, socket, armed: 0, closing: false });
                self.resume(sockets);
            }
            Err(error) => tracing::error!(address = %listener.address(), %error, "cannot listen"),
        }
    }

    /// Waits for clients, also again where an accept failed. Every connection is let in; whether it gets a
    /// place is decided later.
    pub(super) fn resume(&mut self, sockets: &mut Sockets) {
        for (key, one) in &mut self.all {
            while !one.closing && one.armed < ACCEPTS {
                one.armed += 1;
                sockets.accept(key, &one.socket);
            }
        }
    }

    pub(super) fn close(&mut self, sockets: &mut Sockets) {
        self.all.retain(|key, one| {
            one.closing = true;
            if one.listener.is_adopted() {
                // The supervisor keeps this socket: a shutdown would end it for the next daemon, too.
                sockets.cancel_accepts(key);
            } else {
                // Wakes the accept in the kernel; an error means that there is none.
                let _ = shutdown(one.socket.as_raw_fd(), Shutdown::Both);
            }
            one.armed > 0
        });
    }

    /// Takes the outcome of an accept. Returns a client that has connected, and its origin.
    pub(super) fn accepted(
        &mut self,
        key: usize,
        now: Timestamp,
        result: io::Result<OwnedFd>,
    ) -> Option<(Connection, Origin)> {
        let one = &mut self.all[key];
        one.armed -= 1;
        if one.closing {
            if one.armed == 0 {
                self.all.remove(key);
            }
            return None;
        }
        match result {
            Ok(socket) => {
                let tcp = matches!(one.listener.address(), ListenAddress::Tcp(_));
                let origin = if tcp { network_origin(&socket) } else { Origin::Unix };
                tune(&socket, tcp);
                let connection = Connection::new(socket, hangup_bits(tcp), now, one.listener.tls(), origin);
                Some((connection, origin))
            }
            // Out of descriptors, or the client is gone already: the next tick tries again.
            Err(error) => {
                if logging::ACCEPT_FAILURES.admits() {
                    tracing::warn!(%error, "cannot accept a client");
                }
                None
            }
        }
    }

    /// The address of a listener, for people.
    pub(super) fn address(&self, key: usize) -> &ListenAddress {
        self.all[key].listener.address()
    }
}

/// The origin of a network socket; unknown where the client is gone already.
fn network_origin(socket: &OwnedFd) -> Origin {
    use nix::sys::socket::{SockaddrStorage, getpeername};
    let address = getpeername::<SockaddrStorage>(socket.as_raw_fd()).ok();
    let v4 = address.and_then(|address| Some(IpAddr::from(address.as_sockaddr_in()?.ip())));
    let v6 = address.and_then(|address| Some(IpAddr::from(address.as_sockaddr_in6()?.ip())));
    Origin::network(v4.or(v6).unwrap_or(IpAddr::from([0, 0, 0, 0])))
}

/// Socket options of a client; none of them is vital.
fn tune(socket: &OwnedFd, tcp: bool) {
    if tcp {
        let _ = setsockopt(socket, sockopt::TcpNoDelay, &true);
        let _ = setsockopt(socket, sockopt::KeepAlive, &true);
        grow_receive_buffer(socket, RECEIVE_BUFFER_BYTES);
    }
    set_send_buffer(socket);
}

/// Requests a send buffer for replies.
pub(super) fn set_send_buffer(socket: &OwnedFd) {
    // The privileged form is not bound by the system's default maximum.
    if setsockopt(socket, sockopt::SndBufForce, &SEND_BUFFER_BYTES).is_err() {
        let _ = setsockopt(socket, sockopt::SndBuf, &SEND_BUFFER_BYTES);
    }
}
