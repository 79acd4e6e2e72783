//! Places for clients: a connection that has chosen an export gets one, or waits for one and is a stranger
//! until then. The reactor that accepts connections has all places, whichever reactor a client is dealt to.
//!
//! Invariant: a client's array is that of its negotiated export; if that array is gone, it has none. Must not
//! know volumes.

use super::admission::{Guest, Origin, Stage, has_place};
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
    /// Where the clients come from that other reactors serve.
    elsewhere: Vec<Origin>,
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
        Seats { most, waiting: VecDeque::new(), elsewhere: Vec::new(), told: None }
    }

    /// Gives a place to a connection that has chosen its export. `reserve`: some are kept for unix sockets.
    pub(super) fn seat(&mut self, connections: &mut Connections, key: ConnectionId, reserve: bool) -> Seated {
        let unix = connections[key].link().origin().is_unix();
        let elsewhere = self.elsewhere.iter().map(|&origin| Guest { key: 0, origin, stage: Stage::Client });
        if !has_place(connections.guests().chain(elsewhere), unix, self.most, reserve) {
            tracing::debug!(connection = %key, "there are enough clients: it waits");
            self.tell_waiting();
            connections[key].awaits_place();
            self.waiting.push_back(key);
            return Seated::Waits;
        }
        let connection = &mut connections[key];
        connection.take_place();
        let may_stay = connection.may_stay();
        if may_stay { Seated::Client } else { Seated::ToLeave }
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

    /// A client is dealt to another reactor.
    pub(super) fn deal_out(&mut self, origin: Origin) {
        self.elsewhere.push(origin);
    }

    /// A client of another reactor has gone.
    pub(super) fn gone_elsewhere(&mut self, origin: Origin) {
        let at = self.elsewhere.iter().position(|&other| other == origin).expect("it was dealt out");
        self.elsewhere.swap_remove(at);
    }

    /// Clients that other reactors serve.
    pub(super) fn elsewhere(&self) -> usize {
        self.elsewhere.len()
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
