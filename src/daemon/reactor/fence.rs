//! Fencing: what a client asked for before it hung up never comes after what is asked for later.
//!
//! A client that gives a connection up sends its requests again on another one, and goes on. A write of the old
//! connection that still lies here unread, or that its volume is still working on, must not land on top of
//! what was written since. The Linux driver does this whenever a connection is too slow for it.
//!
//! Invariants:
//! - A request that modifies is handed to its volume only after its client was seen not to have hung up, in this very
//!   parse run and after its payload was complete. What a client that hung up has left behind is dropped: nobody waits
//!   for the replies.
//! - A write waits while it overlaps another one, if either of them does not lie on blocks; also one that waits itself: what
//!   comes later does not go first, or the one that waits would do so for as long as others come.
//! - A request waits while it overlaps an orphan, that is a modifying request that a volume still has of a client that
//!   hung up. Whether others have hung up is asked before the request is looked at; and whoever sends a request
//!   again has hung up before.
//!
//! One thread parses for all, so what was handed over before the look was handed over before anything that is read
//! later. On a unix socket, closing is told from closing one half. On TCP it is not, before something is sent: there an
//! ended stream counts as hung up. Under TLS the network's socket is looked at too, and the goodbye that TLS has: what the
//! pump still holds must not look like what a client says that is there. A hang-up that the network has not delivered
//! cannot be seen: one behind more requests than the kernel takes for a connection that is not read from, above all. So TCP
//! connections get all the receive buffer that the system allows for from the start (`clients`).
//!
//! Cost: one poll without waiting for each parse run with a request that modifies, or while others modify; two entries
//! in an index for each that modifies (`order`). Must not know what volumes do.

use super::edges::blocks_of;
use super::long::Order;
use super::order::{Span, Ticket};
use super::sys::{PollBits, hang_ups};
use super::{ArrayId, Reactor};
use calpe_core::nbd::Request;
use std::collections::BTreeSet;
use std::os::fd::AsFd;

/// A request that waits for others. Its connection and its array count it as in flight.
#[derive(Debug)]
pub(super) struct Fenced {
    pub(super) connection: usize,
    pub(super) order: Order,
}

/// Requests of one connection that wait for others; with more, it is not listened to. What comes next has to be held against all
/// that wait.
pub(super) const FENCED_MAX: usize = 64;

/// What on a socket says that nobody waits for replies any more.
pub(super) const fn hangup_bits(tcp: bool) -> PollBits {
    let always = libc::POLLHUP | libc::POLLERR | libc::POLLNVAL;
    if tcp { always | libc::POLLRDHUP } else { always }
}

impl Reactor {
    /// What a request touches.
    pub(super) fn span_of(&self, array: ArrayId, request: &Request) -> Span {
        let bytes = blocks_of(request, self.block_of(array));
        let modifies = request.command.modifies();
        let uneven = modifies && bytes != (request.offset..request.offset + request.length);
        Span { bytes, modifies, uneven }
    }

    /// Hands a request to its volume, unless its client has hung up, or after those that it has to wait for. `looked`:
    /// it was seen in this run which clients have hung up.
    pub(super) fn begin(&mut self, key: usize, order: Order, looked: &mut bool) {
        let array = self.connections[key].array.filter(|&array| self.hosted(array).is_some());
        let Some(array) = array else { return self.start(key, order, 0) };
        let span = self.span_of(array, &order.request);
        if self.is_left_behind(key, array, &span, looked) {
            self.drop_order(key, order);
            return;
        }
        let entered = self.hosted(array).map(|hosted| hosted.order.enter(&span));
        let (ticket, behind) = entered.unwrap_or_default();
        self.start_or_wait(key, array, order, ticket, behind);
    }

    /// Whether what a request asks for is not to be done any more, for its client has hung up.
    fn is_left_behind(&mut self, key: usize, array: ArrayId, span: &Span, looked: &mut bool) -> bool {
        let mine = self.connections[key].modifying;
        let others = self.hosted(array).is_some_and(|hosted| hosted.modifying > mine);
        if !*looked && (span.modifies || others) {
            *looked = true;
            self.look(key, array);
        }
        let is_left = span.modifies && self.connections[key].hung_up;
        if is_left {
            tracing::debug!(connection = key, "client hung up: what it left behind is dropped");
            self.connections[key].broken = true;
        }
        is_left
    }

    fn start_or_wait(
        &mut self,
        key: usize,
        array: ArrayId,
        order: Order,
        ticket: Ticket,
        behind: Option<Ticket>,
    ) {
        let Some((behind, hosted)) = behind.zip(self.hosted(array)) else {
            return self.start(key, order, ticket);
        };
        hosted.in_flight += 1;
        hosted.order.wait(ticket, behind, Fenced { connection: key, order });
        let connection = &mut self.connections[key];
        connection.in_flight += 1;
        connection.fenced += 1;
    }

    /// Sees which of an array's clients have hung up: this one, and those that have asked for
    /// changes which are not done.
    fn look(&mut self, key: usize, array: ArrayId) {
        let all = self.connections.iter();
        let matter = all.filter(|(other, connection)| {
            let matters = *other == key || connection.modifying > 0;
            matters && connection.array == Some(array) && !connection.hung_up
        });
        for other in self.hung_up(matter.map(|(other, _)| other)) {
            let connection = &mut self.connections[other];
            connection.hung_up = true;
            if connection.modifying > 0 {
                self.orphan(other, array);
            }
        }
    }

    /// Which of these connections' clients have hung up by now.
    pub(super) fn hung_up(&self, keys: impl Iterator<Item = usize>) -> BTreeSet<usize> {
        let mut which = Vec::new();
        let mut sockets = Vec::new();
        for key in keys {
            let connection = &self.connections[key];
            // As with TCP itself, and for the same reason.
            let half = connection.hangup & libc::POLLRDHUP != 0;
            let goodbye = connection.network.as_ref().is_some_and(|end| half && end.said_goodbye());
            let ended = connection.broken || goodbye;
            // What the pump has in its hands comes behind the end of the network: that counts, not what came out.
            let network = connection.network.as_ref().map(|end| end.socket.as_fd());
            for socket in [Some(connection.socket.as_fd()), network].into_iter().flatten() {
                which.push((key, ended, connection.hangup));
                sockets.push(socket);
            }
        }
        // For want of memory: then nobody is known to be there.
        let seen = hang_ups(&sockets).unwrap_or_else(|| vec![libc::POLLERR; sockets.len()]);
        let has_ended = |((key, ended, hangup), seen): ((usize, bool, PollBits), PollBits)| {
            (ended || seen & hangup != 0).then_some(key)
        };
        which.into_iter().zip(seen).filter_map(has_ended).collect()
    }

    /// What a volume has of a client that hung up is waited for from now on.
    fn orphan(&mut self, key: usize, array: ArrayId) {
        let left = self.requests.iter().filter(|(_, pending)| pending.connection == key);
        let left: Vec<(Request, Ticket)> =
            left.map(|(_, pending)| (pending.request, pending.ticket)).collect();
        for (request, ticket) in left {
            let span = self.span_of(array, &request);
            if let Some(hosted) = self.hosted(array).filter(|_| span.modifies) {
                hosted.order.orphan(&span, ticket);
            }
        }
    }

    /// A request has ended, or is given up: those that have waited for it may go on, each as its connection's share of the
    /// time goes.
    fn leave_order(&mut self, array: ArrayId, span: &Span, ticket: Ticket) {
        let Some(hosted) = self.hosted(array) else { return };
        let woken = hosted.order.leave(span, ticket);
        let of = |ticket| Some((hosted.order.waiting(ticket)?.connection, ticket));
        let woken: Vec<(usize, Ticket)> = woken.into_iter().filter_map(of).collect();
        for (key, ticket) in woken {
            self.connections[key].unfenced.push_back(ticket);
            self.mark(key);
        }
    }

    /// Notes that a volume was given a request that modifies.
    pub(super) fn modifies_more(&mut self, key: usize, array: ArrayId) {
        self.connections[key].modifying += 1;
        if let Some(hosted) = self.hosted(array) {
            hosted.modifying += 1;
        }
    }

    /// Notes that a volume is done with one.
    pub(super) fn modifies_less(&mut self, key: usize, array: ArrayId, request: &Request, ticket: Ticket) {
        self.connections[key].modifying -= 1;
        let span = self.span_of(array, request);
        if let Some(hosted) = self.hosted(array) {
            hosted.modifying -= 1;
        }
        self.leave_order(array, &span, ticket);
    }

    /// Goes on with a request of a connection that has waited for another one. Returns whether there was one.
    pub(super) fn begin_unfenced(&mut self, key: usize, looked: &mut bool) -> bool {
        let Some(ticket) = self.connections[key].unfenced.pop_front() else { return false };
        let Some((array, order)) = self.resume(key, ticket) else { return true };
        let span = self.span_of(array, &order.request);
        if self.is_left_behind(key, array, &span, looked) {
            self.leave_order(array, &span, ticket);
            self.drop_order(key, order);
            return true;
        }
        let behind = self.hosted(array).and_then(|hosted| hosted.order.blocker(&span, ticket));
        self.start_or_wait(key, array, order, ticket, behind);
        true
    }

    /// Gives up what a connection that is broken has waited with long enough.
    pub(super) fn drop_unfenced(&mut self, key: usize) {
        while let Some(ticket) = self.connections[key].unfenced.pop_front() {
            if let Some((array, order)) = self.resume(key, ticket) {
                let span = self.span_of(array, &order.request);
                self.leave_order(array, &span, ticket);
                self.drop_order(key, order);
            }
        }
    }

    /// Takes a request that has waited, unless its array is gone.
    fn resume(&mut self, key: usize, ticket: Ticket) -> Option<(ArrayId, Order)> {
        let array = self.connections[key].array?;
        let hosted = self.hosted(array)?;
        let Fenced { order, .. } = hosted.order.resume(ticket)?;
        hosted.in_flight -= 1;
        let connection = &mut self.connections[key];
        connection.in_flight -= 1;
        connection.fenced -= 1;
        Some((array, order))
    }

    /// Forgets what waits in an array that is gone.
    pub(super) fn drop_fenced(&mut self, waiting: impl Iterator<Item = Fenced>) {
        for Fenced { connection: key, order } in waiting {
            let connection = &mut self.connections[key];
            connection.in_flight -= 1;
            connection.fenced -= 1;
            self.drop_order(key, order);
        }
    }
}
