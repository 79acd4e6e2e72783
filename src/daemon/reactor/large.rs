//! The place for a large payload: a write with more payload than its client's memory allows for takes it, one client at a
//! time, beside the memory that is dealt out.
//!
//! So a write is received whole before it is begun, whatever its size: only then it is seen whether its client has hung up
//! meanwhile, and nothing of a write that was given up comes after what was written since (see [`super::fence`]).
//!
//! Invariants: one client has the place, from before its payload is received until its write has
//! ended; it gets it in turn, but for those that send nothing; while others wait it has some
//! seconds to send the payload. Must not know what is written.

use super::Reactor;
use super::connection::Receiving;
use super::sys::has_input;
use calpe_core::units::Timestamp;
use std::collections::VecDeque;
use std::os::fd::AsFd;

/// How long a client may take to send anything of a large payload while others wait for the place, in nanoseconds.
const START_NANOS: u64 = 1_000_000_000;

/// How long it may take for each byte then: 16 MB/s.
const BYTE_NANOS: u64 = 62;

/// Which connection has the place, and which wait for it.
#[derive(Debug, Default)]
pub(super) struct Large {
    holder: Option<Holder>,
    queue: VecDeque<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Holder {
    connection: usize,
    bytes: usize,
    since: Timestamp,
}

impl Large {
    fn is_held_by(&self, key: usize) -> bool {
        self.holder.is_some_and(|holder| holder.connection == key)
    }
}

impl Reactor {
    /// Whether a connection has the place for a payload of so many bytes; otherwise it waits for it.
    pub(super) fn take_place(&mut self, key: usize, bytes: usize) -> bool {
        if self.large.holder.is_none() && self.large.queue.is_empty() {
            self.give_place(key, bytes);
        }
        let has = self.large.is_held_by(key);
        if !has && !self.large.queue.contains(&key) {
            self.large.queue.push_back(key);
        }
        has
    }

    fn give_place(&mut self, key: usize, bytes: usize) {
        self.memory.lend(bytes);
        self.large.holder = Some(Holder { connection: key, bytes, since: self.now });
    }

    /// A connection needs no place any more.
    pub(super) fn leave_place(&mut self, key: usize) {
        self.large.queue.retain(|&waiting| waiting != key);
        if let Some(holder) = self.large.holder.take_if(|holder| holder.connection == key) {
            self.memory.take_away(holder.bytes);
            self.pass_place_on();
        }
    }

    /// Gives the free place to the first that waits and has sent something, or to the first.
    fn pass_place_on(&mut self) {
        let queue = &self.large.queue;
        let sockets: Vec<_> = queue.iter().map(|&key| self.connections[key].socket.as_fd()).collect();
        let sends = has_input(&sockets);
        let next = sends.iter().position(|&sends| sends).unwrap_or(0);
        let Some(key) = self.large.queue.remove(next) else { return };
        let long = self.connections[key].writing.expect("what waits for the place has a write");
        let bytes = self.longs[long].bytes();
        self.give_place(key, bytes);
        self.mark(key);
    }

    /// Closes the connection that has the place and does not use it, if others wait.
    pub(super) fn clear_place(&mut self) {
        let Some(Holder { connection: key, bytes, since }) = self.large.holder else { return };
        let limit = START_NANOS + BYTE_NANOS * bytes as u64;
        let is_sending = self.connections[key].receiving != Receiving::Nothing;
        if !self.large.queue.is_empty() && is_sending && self.now.nanos_since(since) > limit {
            tracing::debug!(connection = key, "client took too long to send a payload that others wait for");
            self.connections[key].broken = true;
            self.mark(key);
        }
    }
}
