//! Counts of a connection's requests: handed to a volume, waiting for others, and going on.
//!
//! Invariant: a request that modifies is counted at the connection's seat from before it is handed over until
//! it has ended, was dropped, or waits. One of several lanes is counted there once for each part.

use crate::daemon::reactor::connection::{Connection, Work};
use crate::daemon::reactor::orders::LaneTicket;
use calpe_core::units::Timestamp;

impl Connection {
    /// Counts a request that is about to be handed to its volume.
    pub(in crate::daemon::reactor) fn request_begins(&mut self, modifies: bool) {
        self.work.in_flight += 1;
        self.begins_modifying(modifies);
    }

    /// Counts a request that a volume has ended.
    pub(in crate::daemon::reactor) fn request_ended(&mut self, modifies: bool, now: Timestamp) {
        self.ends_modifying(modifies);
        self.whole_ended(now);
    }

    /// Counts one more part of a request, which is counted itself.
    pub(in crate::daemon::reactor) fn part_begins(&mut self, modifies: bool) {
        self.begins_modifying(modifies);
    }

    /// Counts a part of a request that has ended, or was dropped. `waited`: its ticket, if it waited for
    /// others when it was dropped.
    pub(in crate::daemon::reactor) fn part_ended(&mut self, modifies: bool, waited: Option<LaneTicket>) {
        // It may have been told to go on since.
        if !waited.is_some_and(|ticket| self.work.waiting.remove(&ticket)) {
            self.ends_modifying(modifies);
        }
    }

    /// Counts a request of which all parts have ended.
    pub(in crate::daemon::reactor) fn whole_ended(&mut self, now: Timestamp) {
        self.work.in_flight -= 1;
        self.refresh_dismissal(now);
    }

    /// The time to take the last replies begins with the last reply.
    pub(in crate::daemon::reactor) fn refresh_dismissal(&mut self, now: Timestamp) {
        self.ending.dismissed = self.ending.dismissed.map(|_| now);
    }

    /// Counts a request that was dropped. `waited`: its ticket, if it waited for others then.
    pub(in crate::daemon::reactor) fn request_lost(&mut self, modifies: bool, waited: Option<LaneTicket>) {
        self.work.in_flight -= 1;
        self.part_ended(modifies, waited);
    }

    /// A request that was handed over waits for others.
    pub(in crate::daemon::reactor) fn request_waits(&mut self, ticket: LaneTicket, modifies: bool) {
        self.work.waiting.insert(ticket);
        self.ends_modifying(modifies);
    }

    /// A request that waited is about to go on.
    pub(in crate::daemon::reactor) fn request_resumes(&mut self, ticket: LaneTicket, modifies: bool) {
        self.work.waiting.remove(&ticket);
        self.begins_modifying(modifies);
    }

    fn begins_modifying(&self, modifies: bool) {
        if let Some(seat) = self.place.seat.as_ref().filter(|_| modifies) {
            seat.begin_modifying();
        }
    }

    fn ends_modifying(&self, modifies: bool) {
        if let Some(seat) = self.place.seat.as_ref().filter(|_| modifies) {
            seat.end_modifying();
        }
    }

    /// Queues a request that no longer has to wait.
    pub(in crate::daemon::reactor) fn push_ready(&mut self, ticket: LaneTicket, modifies: bool) {
        if self.work.waiting.contains(&ticket) {
            self.work.ready.push_back((ticket, modifies));
        }
    }

    /// The next request that no longer has to wait.
    pub(in crate::daemon::reactor) fn pop_ready(&mut self) -> Option<(LaneTicket, bool)> {
        let Work { ready, waiting, .. } = &mut self.work;
        // One that was dropped meanwhile goes nowhere.
        std::iter::from_fn(|| ready.pop_front()).find(|(ticket, _)| waiting.contains(ticket))
    }

    /// Notes that writes are lost that its client may have made and not flushed.
    pub(in crate::daemon::reactor) fn lose_writes(&mut self) {
        self.work.lost_writes = true;
    }

    /// Whether its client has still to be told that writes are lost; clears the mark.
    pub(in crate::daemon::reactor) fn take_lost_writes(&mut self) -> bool {
        std::mem::take(&mut self.work.lost_writes)
    }
}
