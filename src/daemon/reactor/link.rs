//! A connection's socket, and who is at the other end of it. Must not know what is spoken.

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
    /// What of its socket says that the client has hung up.
    hangup: PollBits,
    /// The client was seen to have hung up.
    hung_up: bool,
    /// The network behind `socket`, once there is TLS between them.
    network: Option<NetworkEnd>,
    /// What TLS is done with, where there is any.
    tls: Option<Arc<ServerTls>>,
    /// The socket is to be handed to TLS as soon as nothing of it is in the kernel and everything was sent: nothing is
    /// received from it any more.
    starting_tls: bool,
}

/// What tells of a client under TLS before its pump has passed on what came before.
#[derive(Debug)]
struct NetworkEnd {
    socket: Rc<OwnedFd>,
    goodbye: Goodbye,
    /// Who the client is.
    peer: ProvenPeer,
}

impl Link {
    /// `hangup`: what of the socket says that the client has hung up. It stays what it is under TLS, where the plain end
    /// tells as little as TCP what a client that ends its stream still wants. `tls`: what that is done with.
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

    /// Whether there is TLS on it.
    pub(super) fn has_tls(&self) -> bool {
        self.network.is_some()
    }

    /// Who the client has proved to be.
    pub(super) fn peer(&self) -> Option<&Arc<Peer>> {
        self.network.as_ref()?.peer.get()
    }

    /// What of its sockets says that the client has hung up.
    pub(super) fn hangup(&self) -> PollBits {
        self.hangup
    }

    /// The sockets that tell of a hang-up. What the pump has in its hands comes behind the end of the network: that counts,
    /// not what came out.
    pub(super) fn watched_sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let network = self.network.as_ref().map(|end| end.socket.as_fd());
        [Some(self.socket.as_fd()), network].into_iter().flatten()
    }

    /// Whether the client has ended TLS, and by that hung up.
    pub(super) fn said_goodbye(&self) -> bool {
        // As with TCP itself, and for the same reason.
        let half = self.hangup & libc::POLLRDHUP != 0;
        self.network.as_ref().is_some_and(|end| half && end.goodbye.was_said())
    }

    /// The client was seen to have hung up.
    pub(super) fn hang_up(&mut self) {
        self.hung_up = true;
    }

    pub(super) fn has_hung_up(&self) -> bool {
        self.hung_up
    }

    /// The client gets TLS once what there is for it was sent.
    pub(super) fn start_tls(&mut self) {
        self.starting_tls = true;
    }

    pub(super) fn is_starting_tls(&self) -> bool {
        self.starting_tls
    }

    /// What TLS is done with.
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
