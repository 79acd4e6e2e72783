//! A connection's socket, and the identity of its other end. Must not know what is spoken.

use super::admission::Origin;
use super::sockets::PollBits;
use crate::tls::{Goodbye, Peer, ProvenPeer, ServerTls, Tunnel};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Link {
    socket: Rc<OwnedFd>,
    origin: Origin,
    /// Events on its socket that mean that the client has hung up.
    hangup: PollBits,
    /// Whether the client was seen to have hung up.
    hung_up: bool,
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
    socket: Rc<OwnedFd>,
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
        Link {
            socket: Rc::new(socket),
            origin,
            hangup,
            hung_up: false,
            network: None,
            tls,
            starting_tls: false,
        }
    }

    pub(super) fn origin(&self) -> Origin {
        self.origin
    }

    pub(super) fn socket(&self) -> &Rc<OwnedFd> {
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
    pub(super) fn watched_sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let network = self.network.as_ref().map(|end| end.socket.as_fd());
        [Some(self.socket.as_fd()), network].into_iter().flatten()
    }

    /// Whether the client has ended TLS, and so hung up.
    pub(super) fn said_goodbye(&self) -> bool {
        // As with TCP itself, and for the same reason.
        let half = self.hangup & libc::POLLRDHUP != 0;
        self.network.as_ref().is_some_and(|end| half && end.goodbye.was_said())
    }

    /// Notes that the client was seen to have hung up.
    pub(super) fn hang_up(&mut self) {
        self.hung_up = true;
    }

    pub(super) fn has_hung_up(&self) -> bool {
        self.hung_up
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
        let socket = std::mem::replace(&mut self.socket, Rc::new(tunnel.socket));
        self.network = Some(NetworkEnd { socket, goodbye, peer });
        self.starting_tls = false;
    }
}
