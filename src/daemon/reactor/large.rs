//! The place for a large payload, beside the memory that is dealt out: a write whose payload exceeds its
//! client's memory takes it, one client at a time.
//!
//! So a write of any size is received whole before it begins. Only then can the reactor see whether the
//! client has hung up meanwhile, so that a write that was given up never lands after a later one (see
//! `event_loop`).
//!
//! Invariants: one client has the place, from before its payload is received until its write has ended.
//! Clients get it in turn, except that those that send nothing are passed over. While others wait, the client
//! that has it must send its payload within seconds. Must not know what is written.

use super::connections::Connections;
use super::orders::ConnectionId;
use super::sockets::has_input;
use calpe_core::units::Timestamp;
use std::collections::VecDeque;
use std::os::fd::AsFd;

/// While others wait for the place: how long a client may take to begin its payload, in nanoseconds.
const START_NANOS: u64 = 1_000_000_000;

/// And for each byte of it: 16 MB/s.
const BYTE_NANOS: u64 = 62;

/// Which connection has the place, and which wait for it.
#[derive(Debug, Default)]
pub(super) struct LargePlace {
    holder: Option<Holder>,
    /// The connections that wait, with the lengths of their payloads in bytes.
    queue: VecDeque<(ConnectionId, usize)>,
}

#[derive(Clone, Copy, Debug)]
struct Holder {
    connection: ConnectionId,
    bytes: usize,
    since: Timestamp,
}

impl LargePlace {
    /// Gives the place to a connection for a payload of `bytes`, or lets it wait. Returns whether it has the
    /// place.
    pub(super) fn take(
        &mut self,
        connections: &mut Connections,
        now: Timestamp,
        key: ConnectionId,
        bytes: usize,
    ) -> bool {
        if self.holder.is_none() && self.queue.is_empty() {
            self.give(connections, now, key, bytes);
        }
        let has = self.holder.is_some_and(|holder| holder.connection == key);
        if !has && !self.queue.iter().any(|&(waiting, _)| waiting == key) {
            self.queue.push_back((key, bytes));
        }
        has
    }

    fn give(&mut self, connections: &mut Connections, now: Timestamp, key: ConnectionId, bytes: usize) {
        connections.accounts().lend(bytes);
        self.holder = Some(Holder { connection: key, bytes, since: now });
    }

    /// A connection no longer needs the place.
    pub(super) fn leave(&mut self, connections: &mut Connections, now: Timestamp, key: ConnectionId) {
        self.queue.retain(|&(waiting, _)| waiting != key);
        if let Some(holder) = self.holder.take_if(|holder| holder.connection == key) {
            connections.accounts().take_away(holder.bytes);
            self.pass_on(connections, now);
        }
    }

    /// Gives the free place to the first waiting connection that has sent something, else to the first.
    fn pass_on(&mut self, connections: &mut Connections, now: Timestamp) {
        let sockets: Vec<_> =
            self.queue.iter().map(|&(key, _)| connections[key].link().socket().as_fd()).collect();
        let sends = has_input(&sockets);
        let next = sends.iter().position(|&sends| sends).unwrap_or(0);
        let Some((key, bytes)) = self.queue.remove(next) else { return };
        self.give(connections, now, key, bytes);
        connections.turn().mark(key);
    }

    /// Closes the connection that has the place and is too slow to send its payload, if others wait.
    pub(super) fn clear(&mut self, connections: &mut Connections, now: Timestamp) {
        let Some(Holder { connection: key, bytes, since }) = self.holder else { return };
        let limit = START_NANOS + BYTE_NANOS * bytes as u64;
        let is_sending = connections[key].is_receiving();
        if !self.queue.is_empty() && is_sending && now.nanos_since(since) > limit {
            tracing::debug!(connection = %key, "client took too long to send a payload that others wait for");
            connections.break_off(key);
        }
    }
}
