//! What happened, for operators: a bounded list that every part of the daemon appends to and the control
//! server reads, and the state directory keeps. Each event is also logged.
//!
//! Invariant: sequence numbers rise, also over restarts. Must not decide anything.

use crate::control::{Event, Severity};
use crate::daemon::clock;
use crate::daemon::state::StateDir;
use calpe_core::volume::{ArrayNotice, NoticeLevel};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use uuid::Uuid;

/// Events kept in memory; older ones are in the state directory and the log. A bad day of one array
/// is a few hundred.
const EVENTS_MAX: usize = 1024;

/// For this long, an event that repeats is one event with a count; after that it is a new event.
const COALESCED_SECONDS: u64 = 3600;

/// Kinds of events that begin or end a pass over an array: counts of frequent events start anew
/// after them.
const BOUNDS_OF_PASSES: [&str; 7] = [
    kinds::COMMAND,
    kinds::EXPORTED,
    kinds::IMPORTED,
    "member_rebuilt",
    "member_replaced",
    "repair_ended",
    "scrub_ended",
];

/// Kinds of events that the daemon itself makes, beside those of arrays. The names never change their
/// meaning.
pub(super) mod kinds {
    /// An array is served.
    pub(crate) const IMPORTED: &str = "imported";
    /// An array cannot be served.
    pub(crate) const IMPORT_FAILED: &str = "import_failed";
    /// Something about the members was found at an import.
    pub(crate) const IMPORT_NOTE: &str = "import_note";
    /// An array starts without a member that is there.
    pub(crate) const MEMBER_LEFT_OUT: &str = "member_left_out";
    /// An array was stopped.
    pub(crate) const EXPORTED: &str = "exported";
    /// An administrator's command, and its outcome.
    pub(crate) const COMMAND: &str = "command";
    /// The connection to a remote member is given up.
    pub(crate) const MEMBER_LOST: &str = "member_lost";
    /// A member that would come back by itself meets an obstacle: its server answers.
    pub(crate) const MEMBER_BLOCKED: &str = "member_blocked";
    /// A member came back by itself.
    pub(crate) const MEMBER_RETURNED: &str = "member_returned";
    /// Something about a GPU.
    pub(crate) const GPU: &str = "gpu";
    /// A certificate ends soon, or has ended.
    pub(crate) const CERTIFICATE: &str = "certificate";
    /// The state directory cannot be written to, or can again.
    pub(crate) const STATE_DIR: &str = "state_dir";
}

/// Kinds that come by the hundred and change nothing about an array: they are not part of its history.
const NOT_HISTORY: [&str; 5] =
    ["blocks_repaired", "blocks_unreadable", "client_request_failed", "page_repaired", "gpu"];

/// Something that has happened.
#[derive(Clone, Debug)]
pub(crate) struct News {
    /// Name of the array it is about.
    pub array: Option<String>,
    /// Which array of that name, all zeroes where unknown; none: the one that has the name, or had it last.
    pub uuid: Option<Uuid>,
    /// One of [`kinds`], or of those of arrays.
    pub kind: &'static str,
    /// How severe.
    pub level: NoticeLevel,
    /// The member it is about.
    pub member: Option<u16>,
    /// Where in the volume.
    pub offset: Option<u64>,
    /// The user that asked for it.
    pub uid: Option<u32>,
    /// What.
    pub text: String,
}

impl News {
    /// Something about an array, or about the daemon.
    #[must_use]
    pub(crate) fn new(array: Option<&str>, kind: &'static str, level: NoticeLevel, text: String) -> News {
        let array = array.map(str::to_owned);
        News { array, uuid: None, kind, level, member: None, offset: None, uid: None, text }
    }
}

/// The list. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct EventLog(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    ring: Mutex<Ring>,
    store: StateDir,
}

#[derive(Debug, Default)]
struct Ring {
    next: u64,
    events: VecDeque<Event>,
    /// The array that has each name, or had it last.
    arrays: BTreeMap<String, Uuid>,
}

impl EventLog {
    /// A list that continues an earlier one.
    #[must_use]
    pub(super) fn new(store: StateDir, earlier: Vec<Event>) -> EventLog {
        let mut ring = Ring::default();
        for event in coalesced(earlier) {
            ring.next = ring.next.max(event.sequence + 1);
            ring.push(event);
        }
        EventLog(Arc::new(Inner { ring: Mutex::new(ring), store }))
    }

    /// Appends and logs a notice of an array.
    pub(crate) fn push(&self, array: &str, notice: ArrayNotice) {
        self.tell(News {
            array: Some(array.to_owned()),
            uuid: None,
            kind: notice.kind.name(),
            level: notice.level,
            member: notice.member.map(|member| member.0),
            offset: notice.offset.map(|offset| offset.0),
            uid: None,
            text: notice.text,
        });
    }

    /// Appends and logs an event.
    pub(crate) fn tell(&self, news: News) {
        let News { array, uuid, kind, level, member, offset, uid, text } = news;
        let name = array.as_deref();
        match level {
            NoticeLevel::Info => tracing::info!(array = name, member, "{text}"),
            NoticeLevel::Warning => tracing::warn!(array = name, member, "{text}"),
            NoticeLevel::Error => tracing::error!(array = name, member, "{text}"),
        }
        let severity = match level {
            NoticeLevel::Info => Severity::Info,
            NoticeLevel::Warning => Severity::Warning,
            NoticeLevel::Error => Severity::Error,
        };
        let unix = clock::unix_seconds();
        let kind = kind.to_owned();
        let mut ring = self.ring();
        let sequence = ring.next;
        ring.next += 1;
        let array_uuid = match uuid {
            Some(uuid) => Some(uuid).filter(|uuid| !uuid.is_nil()),
            None => name.and_then(|name| ring.arrays.get(name).copied()),
        };
        let mut event = Event {
            sequence,
            unix,
            first_unix: unix,
            count: 1,
            kind,
            severity,
            array,
            array_uuid,
            member,
            offset,
            uid,
            text,
        };
        ring.coalesce(&mut event);
        // Under the lock, so that lines are in the order of their numbers.
        self.0.store.append(&event);
        ring.push(event);
    }

    /// Records that the name is that of this array from now on.
    pub(crate) fn name(&self, array: &str, uuid: Uuid) {
        self.ring().arrays.insert(array.to_owned(), uuid);
    }

    /// The number of the next event.
    #[must_use]
    pub(crate) fn next(&self) -> u64 {
        self.ring().next
    }

    /// The kept events with at least this sequence number, oldest first.
    #[must_use]
    pub(crate) fn since(&self, sequence: u64) -> Vec<Event> {
        self.ring().events.iter().filter(|event| event.sequence >= sequence).cloned().collect()
    }

    /// What was done to an array and what state it was in, as far back as is known, oldest first.
    #[must_use]
    pub(crate) fn history(&self, array: &str, uuid: Option<Uuid>) -> Vec<Event> {
        let kept = self.since(0);
        let numbers: BTreeSet<u64> = kept.iter().map(|event| event.sequence).collect();
        let mut all = self.0.store.events();
        // Events after those in memory come with the next request.
        let last = numbers.last().copied().unwrap_or(u64::MAX);
        all.retain(|event| event.sequence < last && !numbers.contains(&event.sequence));
        // An event in memory may include earlier ones in its count.
        all.extend(kept);
        let is_part = |event: &Event| {
            let is_own = match (uuid, event.array_uuid) {
                // Includes events from before its name was known.
                (Some(uuid), Some(own)) => uuid == own,
                _ => event.array.as_deref() == Some(array),
            };
            is_own && !NOT_HISTORY.contains(&event.kind.as_str())
        };
        coalesced(all).into_iter().filter(is_part).collect()
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.0.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ring {
    fn push(&mut self, event: Event) {
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// Merges an earlier event into the new one, if they are the same.
    fn coalesce(&mut self, event: &mut Event) {
        let at = if event.is_of_many() { self.of_same_pass(event) } else { self.same(event) };
        let Some(at) = at else { return };
        let last = &self.events[at];
        if event.unix.saturating_sub(last.first_unix) < COALESCED_SECONDS {
            event.count = last.count + 1;
            event.first_unix = last.first_unix;
            self.events.remove(at);
        }
    }

    /// The newest event about the same member or array, if it equals the new one.
    fn same(&self, event: &Event) -> Option<usize> {
        let subject = |event: &Event| (event.array.clone(), event.array_uuid, event.member);
        let same_subject = |other: &Event| subject(other) == subject(event);
        let at = self.events.iter().rposition(same_subject)?;
        let is_same = |e: &Event| (e.kind.clone(), e.severity, e.offset, e.uid, e.text.clone());
        // A command that was given twice is two events.
        (event.uid.is_none() && is_same(&self.events[at]) == is_same(event)).then_some(at)
    }

    /// The newest event of the same kind about the same member, if no pass has begun or ended
    /// since.
    fn of_same_pass(&self, event: &Event) -> Option<usize> {
        let is_same = |other: &Event| {
            (other.member, &other.kind, other.severity) == (event.member, &event.kind, event.severity)
        };
        let is_of_array =
            |other: &Event| (&other.array, other.array_uuid) == (&event.array, event.array_uuid);
        let of_array = self.events.iter().enumerate().rev().filter(|(_, other)| is_of_array(other));
        let in_pass = of_array.take_while(|(_, other)| !BOUNDS_OF_PASSES.contains(&other.kind.as_str()));
        in_pass.filter(|(_, other)| is_same(other)).map(|(at, _)| at).next()
    }
}

/// Leaves out events that later ones include in their counts.
fn coalesced(events: Vec<Event>) -> Vec<Event> {
    let mut kept: Vec<Event> = Vec::with_capacity(events.len());
    for event in events {
        if event.count > 1 {
            let is_earlier = |other: &Event| {
                (&other.array, other.member, &other.kind, other.first_unix, other.count)
                    == (&event.array, event.member, &event.kind, event.first_unix, event.count - 1)
                    && (event.is_of_many() || other.text == event.text)
            };
            if let Some(at) = kept.iter().rposition(is_earlier) {
                kept.remove(at);
            }
        }
        kept.push(event);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn news(member: u16, text: &str) -> News {
        let news = News::new(Some("a"), kinds::IMPORT_NOTE, NoticeLevel::Info, text.to_owned());
        News { member: Some(member), ..news }
    }

    #[test]
    fn old_events_make_room_and_numbers_go_on() {
        let log = EventLog::default();
        for n in 0..EVENTS_MAX + 10 {
            log.tell(news(0, &n.to_string()));
        }
        let all = log.since(0);
        assert_eq!(all.len(), EVENTS_MAX);
        assert_eq!((all[0].sequence, all[0].text.as_str()), (10, "10"));
        assert_eq!(log.since(EVENTS_MAX as u64 + 9).len(), 1);
        let next = EventLog::new(StateDir::default(), all);
        next.tell(news(0, "next"));
        assert_eq!(next.since(0).last().unwrap().sequence, EVENTS_MAX as u64 + 10);
    }

    #[test]
    fn what_repeats_is_one_event_with_a_count_and_a_new_number() {
        let log = EventLog::default();
        for _ in 0..3 {
            log.tell(news(0, "again"));
            log.tell(news(1, "again"));
        }
        log.tell(news(0, "other"));
        log.tell(news(0, "again"));
        let told: Vec<_> = log.since(0).into_iter().map(|e| (e.sequence, e.count, e.text)).collect();
        let expected = [(4, 3, "again"), (5, 3, "again"), (6, 1, "other"), (7, 1, "again")];
        assert_eq!(told, expected.map(|(sequence, count, text)| (sequence, count, text.to_owned())));
        for _ in 0..2 {
            log.tell(News { uid: Some(0), ..news(2, "a command") });
        }
        assert_eq!(log.since(8).len(), 2, "commands are never one");
    }

    #[test]
    fn what_a_bad_device_brings_about_by_the_hundred_is_one_event_of_each_kind_and_pass() {
        let log = EventLog::default();
        let of = |kind, member: u16, text: String| News { kind, ..news(member, &text) };
        log.tell(news(9, "what must stay"));
        let mut lines = log.since(0);
        for pass in 0..2 {
            for place in 0..EVENTS_MAX {
                for kind in ["page_repaired", "blocks_repaired"] {
                    log.tell(of(kind, 1, format!("place {place}")));
                    lines.extend(log.since(0).pop());
                }
            }
            log.tell(of("blocks_repaired", 2, "place 0".into()));
            log.tell(News { member: None, ..of("scrub_ended", 0, format!("pass {pass}")) });
            lines.extend(log.since(lines.last().unwrap().sequence + 1));
        }
        let told: Vec<_> = log.since(0).into_iter().map(|e| (e.kind, e.member, e.count, e.text)).collect();
        let last = format!("place {}", EVENTS_MAX - 1);
        let pass = |ended: &str| {
            [
                ("page_repaired", Some(1), EVENTS_MAX as u64, last.as_str()),
                ("blocks_repaired", Some(1), EVENTS_MAX as u64, last.as_str()),
                ("blocks_repaired", Some(2), 1, "place 0"),
                ("scrub_ended", None, 1, ended),
            ]
            .map(|(kind, member, count, text)| (kind.to_owned(), member, count, text.to_owned()))
        };
        assert_eq!(told[0].3, "what must stay");
        assert_eq!(told[1..], [pass("pass 0"), pass("pass 1")].concat());
        assert_eq!(EventLog::new(StateDir::default(), lines).since(0), log.since(0), "after a restart");
    }

    #[test]
    fn history_tells_once_what_is_one_event() {
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = StateDir::open(dir.path());
        let log = EventLog::new(store.clone(), Vec::new());
        for (member, text) in [(0, "again"), (1, "other"), (0, "again")] {
            log.tell(news(member, text));
        }
        store.flush(Duration::from_secs(10)).unwrap();
        let told = |log: &EventLog| log.history("a", None).into_iter().map(|e| (e.sequence, e.count, e.text));
        let expected = [(1, 1, "other".to_owned()), (2, 2, "again".to_owned())];
        assert!(told(&log).eq(expected.clone()), "{:?}", log.history("a", None));
        let next = EventLog::new(store, log.since(0));
        assert!(told(&next).eq(expected), "{:?}", next.history("a", None));
    }

    #[test]
    fn lines_that_later_ones_stand_for_are_left_out() {
        let log = EventLog::default();
        let mut lines = Vec::new();
        for text in ["a", "a", "b", "a", "a"] {
            log.tell(news(0, text));
            lines.extend(log.since(0).pop());
        }
        let kept: Vec<_> = coalesced(lines).into_iter().map(|e| (e.count, e.text)).collect();
        assert_eq!(kept, [(2, "a".to_owned()), (1, "b".to_owned()), (2, "a".to_owned())]);
    }
}
