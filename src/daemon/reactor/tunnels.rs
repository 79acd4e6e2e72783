//! TLS of clients: a connection's socket is handed to a pump as soon as the kernel works on nothing of it,
//! and the reactor goes on with the plain end. Cryptography never happens on this thread. Must not know what
//! is spoken.

use super::admission::STRANGERS_MAX;
use super::connections::Connections;
use super::listeners::set_send_buffer;
use super::orders::ConnectionId;
use crate::daemon::logging;
use crate::tls::Pumps;
use std::time::Duration;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Tunnels {
    pumps: Pumps,
    /// Most clients at one time.
    clients_max: usize,
    /// Whether some connection waits for others to end TLS.
    someone_waits: bool,
}

impl Tunnels {
    pub(super) fn new(clients_max: usize) -> Tunnels {
        Tunnels { pumps: Pumps::default(), clients_max, someone_waits: false }
    }

    /// Whether some connection waits for others to end TLS.
    pub(super) fn someone_waits(&self) -> bool {
        self.someone_waits
    }

    /// Starts TLS on a connection that can be handed over, or makes it wait for others.
    pub(super) fn start(&mut self, connections: &mut Connections, key: ConnectionId) {
        // Each pump has a thread until it ends, whatever becomes of its connection. Connections beyond that
        // many wait.
        if self.pumps.running() >= self.clients_max + STRANGERS_MAX {
            self.someone_waits = true;
            return;
        }
        let connection = &mut connections[key];
        let tls = connection.link().tls().expect("TLS is granted only where there is a certificate");
        // The pump gets a descriptor of its own: ring entries of this turn may still name the other one.
        let tunnel = connection.link().socket().try_clone().and_then(|socket| self.pumps.serve(socket, tls));
        match tunnel {
            Ok(tunnel) => {
                set_send_buffer(&tunnel.socket);
                connection.swap_socket(tunnel);
            }
            Err(error) => {
                if logging::TLS_STARTS.admits() {
                    tracing::warn!(connection = %key, %error, "cannot start TLS");
                }
                connection.break_off();
            }
        }
    }

    /// Starts TLS on connections that had to wait until others ended theirs.
    pub(super) fn resume(&mut self, connections: &mut Connections) {
        if std::mem::take(&mut self.someone_waits) {
            for key in connections.which(|_, connection| connection.link().is_starting_tls()) {
                connections.turn().mark(key);
            }
        }
    }

    /// Waits until last replies have passed through TLS.
    pub(super) fn wait(&self, patience: Duration) {
        self.pumps.wait(patience);
    }
}
