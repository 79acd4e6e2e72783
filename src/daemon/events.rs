//! What happened lately, for operators: a bounded list that every part of the daemon appends to and the control
//! server reads. Each event is also logged. Must not decide anything.

use super::clock;
use crate::volume::{ArrayNotice, NoticeLevel};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Events kept; older ones are in the log only. A bad day of one array is a few hundred.
const EVENTS_MAX: usize = 1024;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Counts events since the daemon started.
    pub sequence: u64,
    /// Seconds since 1970.
    pub unix: u64,
    /// Name of the array it is about.
    pub array: String,
    /// What.
    pub notice: ArrayNotice,
}

/// The list. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct EventLog(Arc<Mutex<Ring>>);

#[derive(Debug, Default)]
struct Ring {
    next: u64,
    events: VecDeque<Event>,
}

impl EventLog {
    /// Appends and logs an event.
    pub fn push(&self, array: &str, notice: ArrayNotice) {
        let member = notice.member.map(|m| m.0);
        match notice.level {
            NoticeLevel::Info => tracing::info!(array, member, "{}", notice.text),
            NoticeLevel::Warning => tracing::warn!(array, member, "{}", notice.text),
            NoticeLevel::Error => tracing::error!(array, member, "{}", notice.text),
        }
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sequence = ring.next;
        ring.next += 1;
        if ring.events.len() == EVENTS_MAX {
            ring.events.pop_front();
        }
        let event = Event { sequence, unix: clock::unix_seconds(), array: array.to_owned(), notice };
        ring.events.push_back(event);
    }

    /// The kept events with at least this sequence number, oldest first.
    #[must_use]
    pub fn since(&self, sequence: u64) -> Vec<Event> {
        let ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ring.events.iter().filter(|event| event.sequence >= sequence).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_events_make_room_and_numbers_go_on() {
        let log = EventLog::default();
        for n in 0..EVENTS_MAX + 10 {
            log.push("a", ArrayNotice { level: NoticeLevel::Info, member: None, text: n.to_string() });
        }
        let all = log.since(0);
        assert_eq!(all.len(), EVENTS_MAX);
        assert_eq!((all[0].sequence, all[0].notice.text.as_str()), (10, "10"));
        assert_eq!(log.since(EVENTS_MAX as u64 + 9).len(), 1);
    }
}
