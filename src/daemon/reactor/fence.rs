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
//! cannot be seen.
//!
//! Cost: one poll without waiting for each parse run with a request that modifies, or while others modify. Must not
//! know what volumes do.

use super::edges::blocks_of;
use super::long::Order;
use super::sys::{PollBits, hang_ups};
use super::{ArrayId, Pending, Reactor};
use crate::nbd::Request;
use std::collections::HashSet;
use std::os::fd::AsFd;

/// A request that waits for others. Its connection and its array count it as in flight.
#[derive(Debug)]
pub(super) struct Fenced {
    connection: usize,
    array: ArrayId,
    order: Order,
    behind: Behind,
    /// Its own number.
    ticket: u64,
}

/// A request that another one waits for.
#[derive(Clone, Copy, Debug)]
enum Behind {
    /// The volume has it, by its key.
    Pending(usize),
    /// It waits itself, by its number.
    Fenced(u64),
}

/// What on a socket says that nobody waits for replies any more.
pub(super) const fn hangup_bits(tcp: bool) -> PollBits {
    let always = libc::POLLHUP | libc::POLLERR | libc::POLLNVAL;
    if tcp { always | libc::POLLRDHUP } else { always }
}

/// Whether two requests have a block in common.
fn overlap(a: &Request, b: &Request, block: u64) -> bool {
    let (a, b) = (blocks_of(a, block), blocks_of(b, block));
    a.start < b.end && b.start < a.end
}

impl Reactor {
    /// Hands a request to its volume, unless its client has hung up, or after the orphans that it overlaps. `looked`:
    /// it was seen in this run who has hung up.
    pub(super) fn begin(&mut self, key: usize, order: Order, looked: &mut bool) {
        let request = order.request;
        let connection = &self.connections[key];
        let modifies = request.command.modifies();
        if let Some(array) = connection.array {
            let mine = connection.modifying;
            let others = self.hosted(array).is_some_and(|hosted| hosted.modifying > mine);
            if !*looked && (modifies || others) {
                *looked = true;
                self.look(key, array);
            }
            if modifies && self.connections[key].hung_up {
                tracing::debug!(connection = key, "client hung up: what it left behind is dropped");
                self.connections[key].broken = true;
                self.drop_order(key, order);
                return;
            }
            let behind = self.find_orphan(key, array, &request).map(Behind::Pending);
            if let Some(behind) = behind.or_else(|| self.find_fenced(array, &request)) {
                self.connections[key].in_flight += 1;
                if let Some(hosted) = self.hosted(array) {
                    hosted.in_flight += 1;
                }
                let ticket = self.ticket;
                self.ticket += 1;
                self.fenced.push(Fenced { connection: key, array, order, behind, ticket });
                return;
            }
        }
        self.start(key, order);
    }

    /// Sees who of an array's clients has hung up: this one, and those of whom it has something to do that modifies.
    fn look(&mut self, key: usize, array: ArrayId) {
        let mut others = Vec::new();
        let mut sockets = Vec::new();
        for (other, connection) in &self.connections {
            let matters = other == key || connection.modifying > 0;
            if matters && connection.array == Some(array) && !connection.hung_up {
                // As with TCP itself, and for the same reason.
                let half = connection.hangup & libc::POLLRDHUP != 0;
                let goodbye = connection.network.as_ref().is_some_and(|end| half && end.said_goodbye());
                let ended = connection.broken || goodbye;
                // What the pump has in its hands comes behind the end of the network: that counts, not what came out.
                let network = connection.network.as_ref().map(|end| end.socket.as_fd());
                for socket in [Some(connection.socket.as_fd()), network].into_iter().flatten() {
                    others.push((other, ended, connection.hangup));
                    sockets.push(socket);
                }
            }
        }
        let seen = hang_ups(&sockets);
        for ((other, ended, hangup), seen) in others.into_iter().zip(seen) {
            let connection = &mut self.connections[other];
            if !connection.hung_up && (ended || seen & hangup != 0) {
                connection.hung_up = true;
                self.orphans += connection.modifying;
            }
        }
    }

    /// An orphan that a request overlaps, or a write where either does not lie on blocks, by its key.
    fn find_orphan(&self, key: usize, array: ArrayId, request: &Request) -> Option<usize> {
        let uneven = request.command.modifies() && self.has_edges(array, request);
        if self.orphans == 0 && self.edges == 0 && !uneven {
            return None;
        }
        let mut orphans =
            self.requests.iter().filter(|(_, pending)| self.must_wait_for(pending, key, array, request));
        orphans.next().map(|(behind, _)| behind)
    }

    /// A write that waits and must not be mixed with this one, which comes later.
    fn find_fenced(&self, array: ArrayId, request: &Request) -> Option<Behind> {
        if self.fenced.is_empty() || !request.command.modifies() {
            return None;
        }
        let uneven = self.has_edges(array, request);
        let must_wait_for = |fenced: &&Fenced| {
            let other = &fenced.order.request;
            fenced.array == array
                && other.command.modifies()
                && (uneven || self.has_edges(array, other))
                && overlap(other, request, self.block_of(array))
        };
        // The last: those before it are done by then.
        self.fenced.iter().rev().find(must_wait_for).map(|fenced| Behind::Fenced(fenced.ticket))
    }

    /// Whether a request overlaps this one, which a volume has of another client that has hung up, or which must not be mixed
    /// with it.
    fn must_wait_for(&self, pending: &Pending, key: usize, array: ArrayId, request: &Request) -> bool {
        let orphan = || pending.connection != key && self.connections[pending.connection].hung_up;
        let edges =
            || request.command.modifies() && (pending.edges.is_some() || self.has_edges(array, request));
        pending.array == array
            && pending.request.command.modifies()
            && overlap(&pending.request, request, self.block_of(array))
            && (orphan() || edges())
    }

    /// Notes that a volume was given a request that modifies.
    pub(super) fn modifies_more(&mut self, key: usize, array: ArrayId) {
        self.connections[key].modifying += 1;
        if let Some(hosted) = self.hosted(array) {
            hosted.modifying += 1;
        }
    }

    /// Notes that a volume is done with one.
    pub(super) fn modifies_less(&mut self, key: usize, array: ArrayId) {
        let connection = &mut self.connections[key];
        connection.modifying -= 1;
        if connection.hung_up {
            self.orphans -= 1;
        }
        self.unfence = !self.fenced.is_empty();
        if let Some(hosted) = self.hosted(array) {
            hosted.modifying -= 1;
        }
    }

    /// Tries those again that waited, in the order in which they came.
    pub(super) fn begin_fenced(&mut self) {
        if !std::mem::take(&mut self.unfence) {
            return;
        }
        let mut waiting = HashSet::new();
        for fenced in std::mem::take(&mut self.fenced) {
            let Fenced { connection: key, array, order, behind, ticket } = &fenced;
            let blocks = |pending| self.must_wait_for(pending, *key, *array, &order.request);
            let is_blocked = match behind {
                Behind::Pending(behind) => self.requests.get(*behind).is_some_and(blocks),
                Behind::Fenced(behind) => waiting.contains(behind),
            };
            if !self.connections[*key].broken && is_blocked {
                // Nothing has changed for it. To look for another each time would cost the square of all that wait.
                waiting.insert(*ticket);
                self.fenced.push(fenced);
                continue;
            }
            let Fenced { connection: key, array, order, .. } = fenced;
            self.connections[key].in_flight -= 1;
            if let Some(hosted) = self.hosted(array) {
                hosted.in_flight -= 1;
            }
            if self.connections[key].broken {
                self.drop_order(key, order);
            } else {
                self.begin(key, order, &mut false);
            }
            // It may have been the last thing that its connection waited for.
            self.mark(key);
        }
    }

    /// Forgets those that wait for orphans of an array that is gone.
    pub(super) fn drop_fenced(&mut self, array: ArrayId) {
        let (gone, stay): (Vec<Fenced>, _) =
            std::mem::take(&mut self.fenced).into_iter().partition(|fenced| fenced.array == array);
        self.fenced = stay;
        for fenced in gone {
            self.connections[fenced.connection].in_flight -= 1;
            self.drop_order(fenced.connection, fenced.order);
        }
    }
}
