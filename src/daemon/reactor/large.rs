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
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// While others wait for the place: how long a client may take to begin its payload, in nanoseconds.
const START_NANOS: u64 = 1_000_000_000;

/// And for each byte of it: 16 MB/s.
const BYTE_NANOS: u64 = 62;

/// The place itself: the clients of one reactor have it.
#[derive(Debug, Default)]
pub(super) struct LargeToken {
    is_taken: AtomicBool,
    /// Whether clients of other reactors wait for it.
    is_wanted: AtomicBool,
}

impl LargeToken {
    /// Takes the place if it is free. Otherwise whoever has it will say when it becomes free.
    fn take(&self) -> bool {
        let take = || !self.is_taken.swap(true, Ordering::SeqCst);
        if take() {
            return true;
        }
        self.is_wanted.store(true, Ordering::SeqCst);
        // It may have become free before anybody could see that.
        take()
    }

    /// Frees it. Returns whether others are to be told.
    fn give_back(&self) -> bool {
        self.is_taken.store(false, Ordering::SeqCst);
        self.is_wanted.swap(false, Ordering::SeqCst)
    }
}

/// Which connection of this reactor has the place, and which wait for it.
#[derive(Debug)]
pub(super) struct LargePlace {
    token: Arc<LargeToken>,
    /// It has become free, and all reactors are to be told.
    is_to_tell: bool,
    holder: Option<Holder>,
    /// The connections that wait, with the lengths of their payloads in bytes.
    queue: VecDeque<(ConnectionId, usize)>,
}

#[derive(Clone, Copy, Debug)]
struct Holder {
    connection: ConnectionId,
    bytes: usize,
    /// Since when it has the place and others wait for it, as far as has been seen.
    since: Timestamp,
}

impl LargePlace {
    pub(super) fn new(token: Arc<LargeToken>) -> LargePlace {
        LargePlace { token, is_to_tell: false, holder: None, queue: VecDeque::new() }
    }

    /// Whether all reactors are to be told that it has become free, since the last call.
    pub(super) fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.is_to_tell)
    }

    /// Gives the place to a connection for a payload of `bytes`, or lets it wait. Returns whether it has the
    /// place.
    pub(super) fn take(
        &mut self,
        connections: &mut Connections,
        now: Timestamp,
        key: ConnectionId,
        bytes: usize,
    ) -> bool {
        if self.holder.is_none() && self.queue.is_empty() && self.token.take() {
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
            self.is_to_tell |= self.token.give_back();
            // If other reactors wait, it is theirs until they have had it.
            if !self.is_to_tell {
                self.became_free(connections, now);
            }
        }
    }

    /// The place may be free: gives it to the first waiting connection that has sent something, else to the
    /// first.
    pub(super) fn became_free(&mut self, connections: &mut Connections, now: Timestamp) {
        if self.holder.is_some() || self.queue.is_empty() || !self.token.take() {
            return;
        }
        let sockets: Vec<_> =
            self.queue.iter().map(|&(key, _)| connections[key].link().socket().as_fd()).collect();
        let sends = has_input(&sockets);
        let next = sends.iter().position(|&sends| sends).unwrap_or(0);
        let (key, bytes) = self.queue.remove(next).expect("it was found there");
        self.give(connections, now, key, bytes);
        connections.turn().mark(key);
    }

    /// Looks after the place, at each tick: closes the connection that has it and is too slow to send its
    /// payload, if others wait.
    pub(super) fn look_after(&mut self, connections: &mut Connections, now: Timestamp) {
        self.became_free(connections, now);
        let is_wanted = !self.queue.is_empty() || self.token.is_wanted.load(Ordering::SeqCst);
        let Some(Holder { connection: key, bytes, since }) = &mut self.holder else { return };
        if !is_wanted || !connections[*key].is_receiving() {
            *since = now;
        } else if now.nanos_since(*since) > START_NANOS + BYTE_NANOS * *bytes as u64 {
            tracing::info!(connection = %key, bytes, "client takes too long to send a payload that others wait for");
            connections.break_off(*key);
        }
    }
}
