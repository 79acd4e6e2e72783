//! Places for clients: a connection that has chosen an export gets one, or waits for one and is a stranger
//! until then.
//!
//! Invariant: a client's array is that of its negotiated export; if that array is gone, it has none. Must not
//! know volumes.

use super::admission::has_place;
use super::arrays::Arrays;
use super::connections::Connections;
use super::orders::ConnectionId;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Shortest time between two log lines that say that clients wait for places.
const WAITING_TOLD_EVERY: Duration = Duration::from_secs(60);

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Seats {
    /// How many places there are.
    most: usize,
    /// Connections that wait for one.
    waiting: VecDeque<ConnectionId>,
    /// When the log last said that one waits.
    told: Option<Instant>,
}

/// What became of a connection that asked for a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seated {
    /// It waits.
    Waits,
    /// It is a client.
    Client,
    /// It has a place and is to leave: its array no longer grants access or is stopping. It may have waited.
    ToLeave,
}

impl Seats {
    pub(super) fn new(most: usize) -> Seats {
        Seats { most, waiting: VecDeque::new(), told: None }
    }

    /// Gives a place to a connection that has chosen its export. `reserve`: some are kept for unix sockets.
    pub(super) fn seat(
        &mut self,
        connections: &mut Connections,
        arrays: &Arrays,
        key: ConnectionId,
        reserve: bool,
    ) -> Seated {
        let unix = connections[key].link().origin().is_unix();
        if !has_place(connections.guests(), unix, self.most, reserve) {
            tracing::debug!(connection = %key, "there are enough clients: it waits");
            self.tell_waiting();
            connections[key].awaits_place();
            self.waiting.push_back(key);
            return Seated::Waits;
        }
        let connection = &mut connections[key];
        connection.take_place();
        // Arrays that are gone have no rules.
        let exceeds = |id| arrays.rules_of(id).is_none_or(|rules| connection.exceeds(rules));
        let is_for_it = |&id: &_| arrays.is_serving(id) && !exceeds(id);
        if connection.array().filter(is_for_it).is_some() { Seated::Client } else { Seated::ToLeave }
    }

    /// Logs that clients wait, which the clients themselves cannot see: a place is missing, or one that has
    /// it does not leave.
    fn tell_waiting(&mut self) {
        if self.told.is_some_and(|told| told.elapsed() < WAITING_TOLD_EVERY) {
            return;
        }
        self.told = Some(Instant::now());
        tracing::warn!(
            "a client waits for a place: of {} (max_connections in [listen]) none is free for it",
            self.most
        );
    }

    /// Waiting connections, in the order in which they came.
    pub(super) fn waiting(&self) -> &VecDeque<ConnectionId> {
        &self.waiting
    }

    /// Takes the waiting connections, to be seated again.
    pub(super) fn take_waiting(&mut self) -> VecDeque<ConnectionId> {
        std::mem::take(&mut self.waiting)
    }

    /// Forgets a connection that is gone.
    pub(super) fn leave(&mut self, key: ConnectionId) {
        self.waiting.retain(|&waiting| waiting != key);
    }
}
