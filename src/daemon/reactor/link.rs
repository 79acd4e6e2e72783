//! A connection's socket, and the identity of its other end. Must not know what is spoken.

use super::admission::Origin;
use super::sockets::PollBits;
use crate::tls::{Goodbye, Peer, ProvenPeer, ServerTls, Tunnel};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Link {
    socket: Arc<OwnedFd>,
    origin: Origin,
    /// Events on its socket that mean that the client has hung up.
    hangup: PollBits,
    /// The network behind `socket`, once there is TLS between them.
    network: Option<NetworkEnd>,
    /// The server's side of TLS, if the listener has it.
    tls: Option<Arc<ServerTls>>,
    /// Whether the socket is to be handed to TLS as soon as the kernel works on nothing of it and everything
    /// was sent: nothing more is received from it.
    starting_tls: bool,
}

/// The network's end under TLS: it shows a hang-up before the pump has passed on what came before.
#[derive(Debug)]
struct NetworkEnd {
    socket: Arc<OwnedFd>,
    goodbye: Goodbye,
    /// The client's identity.
    peer: ProvenPeer,
}

impl Link {
    /// `hangup`: events on the socket that mean that the client has hung up. They stay the same under TLS,
    /// where the plain end, like TCP, does not show whether a client that ends its stream still wants
    /// replies. `tls`: the server's side of TLS.
    pub(super) fn new(
        socket: OwnedFd,
        hangup: PollBits,
        tls: Option<Arc<ServerTls>>,
        origin: Origin,
    ) -> Link {
        Link { socket: Arc::new(socket), origin, hangup, network: None, tls, starting_tls: false }
    }

    pub(super) fn origin(&self) -> Origin {
        self.origin
    }

    pub(super) fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// Whether TLS runs on it.
    pub(super) fn has_tls(&self) -> bool {
        self.network.is_some()
    }

    /// The identity that the client has proved.
    pub(super) fn peer(&self) -> Option<&Arc<Peer>> {
        self.network.as_ref()?.peer.get()
    }

    /// Events on its sockets that mean that the client has hung up.
    pub(super) fn hangup(&self) -> PollBits {
        self.hangup
    }

    /// The sockets that show a hang-up. Under TLS that is the network's: data that the pump still holds comes
    /// later on the plain end.
    pub(super) fn watched_sockets(&self) -> impl Iterator<Item = &Arc<OwnedFd>> {
        let network = self.network.as_ref().map(|end| &end.socket);
        [Some(&self.socket), network].into_iter().flatten()
    }

    /// TLS's own goodbye, where it means that the client has hung up.
    pub(super) fn goodbye(&self) -> Option<&Goodbye> {
        // As with TCP itself, and for the same reason.
        let half = self.hangup & libc::POLLRDHUP != 0;
        self.network.as_ref().map(|end| &end.goodbye).filter(|_| half)
    }

    /// The client gets TLS once everything that is ready for it was sent.
    pub(super) fn start_tls(&mut self) {
        self.starting_tls = true;
    }

    pub(super) fn is_starting_tls(&self) -> bool {
        self.starting_tls
    }

    /// The server's side of TLS.
    pub(super) fn tls(&self) -> Option<&Arc<ServerTls>> {
        self.tls.as_ref()
    }

    /// Goes on with the plain end of TLS.
    pub(super) fn swap(&mut self, tunnel: Tunnel) {
        let (goodbye, peer) = (tunnel.goodbye(), tunnel.peer());
        let socket = std::mem::replace(&mut self.socket, Arc::new(tunnel.socket));
        self.network = Some(NetworkEnd { socket, goodbye, peer });
        self.starting_tls = false;
    }
}
