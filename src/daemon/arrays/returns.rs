//! Members that are away: which of them come back by themselves, when each is tried, and what the last
//! attempt met.
//!
//! Invariants: a member that an administrator took out stays out; each member has at most one attempt at a
//! time. Must not know how a device is looked for.

use crate::daemon::devices::import::SETTLE;
use crate::daemon::devices::lanes::DeviceLanes;
use crate::daemon::ranked::{Ranked, RankedGuard, lock};
use crate::member::{self, Device, DeviceError};
use calpe_core::format::MemberState;
use calpe_core::units::MemberIndex;
use calpe_core::volume::MemberStatus;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Wait after the first attempt that failed; doubled with each further one, ...
const BACKOFF_FIRST: Duration = Duration::from_secs(1);
/// ... up to this.
pub(super) const BACKOFF_MAX: Duration = Duration::from_secs(15);

/// The same where all places of an array are searched: that may make resting disks spin up.
pub(super) const SEARCH_BACKOFF_MAX: Duration = Duration::from_secs(60);

/// How long an attempt may take to close a device that it has open.
pub(crate) const ATTEMPT_WAIT: Duration = SETTLE.saturating_mul(2);

/// Time between two checks whether attempts have closed their devices.
const ATTEMPT_LOOK: Duration = Duration::from_millis(20);

/// A member of an array.
type Seat = (Uuid, u16);

/// The device of a member, and what it says of itself.
pub(crate) type Own = (Device, DeviceLanes);

/// What is known of members that are away.
#[derive(Debug, Default)]
pub(crate) struct Returns {
    /// Held while a member that comes back by itself is handed over, and while an administrator keeps one
    /// out.
    handing_over: Ranked<(), 1>,
    record: Ranked<Record, 5>,
    under_way: UnderWay,
}

#[derive(Debug, Default)]
struct Record {
    attempts: BTreeMap<Seat, Attempt>,
    /// Members that an administrator has taken out while they were away, and when.
    kept_out: BTreeMap<Seat, Instant>,
    /// Members that were missing while their array had FAILED or could not be served. One cause may have
    /// taken all of them away, and may bring all of them back.
    were_missing: BTreeSet<Seat>,
}

/// How many threads look for members of an array, including those whose result nobody waits for any more.
#[derive(Clone, Debug, Default)]
struct UnderWay(Arc<Mutex<BTreeMap<Uuid, usize>>>);

/// A thread that looks for a member.
#[derive(Debug)]
pub(crate) struct Looking(UnderWay, Uuid);

impl UnderWay {
    fn begin(&self, array: Uuid) -> Looking {
        *lock(&*self.0).entry(array).or_default() += 1;
        Looking(self.clone(), array)
    }

    fn has(&self, array: Uuid) -> bool {
        lock(&*self.0).contains_key(&array)
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        let mut all = lock(&*self.0.0);
        if let Some(count) = all.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.1);
            }
        }
    }
}

#[derive(Debug)]
struct Attempt {
    next: Instant,
    failures: u32,
    running: Option<Receiver<Attempted>>,
    /// What the last attempt has met in the place of the device.
    obstacle: Option<Obstacle>,
}

/// Outcome of an attempt: the member's device, locked, or why it cannot be used.
pub(crate) type Attempted = Result<Own, NotBack>;

/// Why the device of a member cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotBack {
    /// Nothing answers, or the answer may change.
    Away(String),
    /// Waiting does not remove the obstacle.
    Blocked(Obstacle),
}

/// What prevents a member from coming back by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// A server answers, and something else is in the place of the device, or the device is cut off or
    /// read-only.
    Displaced(String),
    /// A server answers and refuses the device, or this host lacks what it needs to ask for it.
    Refused(String),
}

impl Obstacle {
    /// For people.
    #[must_use]
    pub(crate) fn reason(&self) -> &str {
        let (Obstacle::Displaced(reason) | Obstacle::Refused(reason)) = self;
        reason
    }
}

impl std::fmt::Display for NotBack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NotBack::Away(reason) => f.write_str(reason),
            NotBack::Blocked(obstacle) => f.write_str(obstacle.reason()),
        }
    }
}

impl From<DeviceError> for NotBack {
    fn from(error: DeviceError) -> NotBack {
        let is_refusal = error.is_refusal();
        let reason = error.to_string();
        if is_refusal { NotBack::Blocked(Obstacle::Refused(reason)) } else { NotBack::Away(reason) }
    }
}

/// A member that comes back by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Returning {
    /// Which.
    pub index: MemberIndex,
    /// Its obstacle, as far as known.
    pub obstacle: Option<Obstacle>,
    /// It is not tried yet, because writes of the lost connection may still land.
    pub is_quarantined: bool,
    /// Seconds until it is tried; none while it is.
    pub tried_in_s: Option<u64>,
}

/// How a member is tried.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// Array and index.
    pub(super) seat: Seat,
    /// Earliest time of an attempt.
    pub(super) not_before: Option<Instant>,
    /// Longest wait between two attempts.
    pub(super) backoff_max: Duration,
    /// Whether an event reports obstacles in its place.
    pub(super) tells: bool,
}

/// Result of a step of the attempts to bring a member back.
#[derive(Debug)]
pub(crate) enum Step {
    /// Nothing new.
    Idle,
    /// An attempt has found its device.
    Found(Box<Own>),
    /// Something new is in the way.
    Blocked(Obstacle),
}

impl Returns {
    /// No member comes back by itself while the guard lives.
    pub(crate) fn alone(&self) -> RankedGuard<'_, ()> {
        lock(&self.handing_over)
    }

    /// Keeps a member that is away from coming back by itself.
    pub(crate) fn keep_out(&self, array: Uuid, index: MemberIndex) {
        let mut record = lock(&self.record);
        record.attempts.remove(&(array, index.0));
        record.kept_out.insert((array, index.0), Instant::now());
    }

    /// Whether an administrator has kept the member from coming back by itself.
    pub(crate) fn is_kept_out(&self, array: Uuid, index: MemberIndex) -> bool {
        lock(&self.record).kept_out.contains_key(&(array, index.0))
    }

    /// Records what an array, asked at `asked`, says of its members. A member that is missing while the array
    /// has FAILED is recorded until it is back; the records of a member that is in service again are dropped.
    pub(crate) fn note(&self, array: Uuid, has_failed: bool, members: &[MemberStatus], asked: Instant) {
        let mut record = lock(&self.record);
        for member in members {
            let seat = (array, member.index.0);
            match member.state {
                MemberState::Missing if has_failed => drop(record.were_missing.insert(seat)),
                MemberState::Missing => {}
                MemberState::Online | MemberState::Rebuilding => {
                    // A member that is being built may go away again with the others.
                    if member.state == MemberState::Online {
                        record.were_missing.remove(&seat);
                    }
                    record.attempts.remove(&seat);
                    // A request after `asked` is about a member that has left since.
                    if record.kept_out.get(&seat).is_some_and(|kept| *kept < asked) {
                        record.kept_out.remove(&seat);
                    }
                }
                _ => drop(record.were_missing.remove(&seat)),
            }
        }
    }

    /// Whether the member was missing when its array had failed, or could not be served, and has not come
    /// back.
    pub(crate) fn was_missing(&self, array: Uuid, index: MemberIndex) -> bool {
        lock(&self.record).were_missing.contains(&(array, index.0))
    }

    /// An administrator has brought the member back: drops its records.
    pub(crate) fn back(&self, array: Uuid, index: MemberIndex) {
        let mut record = lock(&self.record);
        record.attempts.remove(&(array, index.0));
        record.kept_out.remove(&(array, index.0));
    }

    /// Records that a member has come back by itself.
    pub(crate) fn succeeded(&self, array: Uuid, index: MemberIndex) {
        lock(&self.record).attempts.remove(&(array, index.0));
    }

    /// Records that a member's device was found, and not taken back.
    pub(crate) fn failed(&self, terms: Terms) {
        if let Some(attempt) = lock(&self.record).attempts.get_mut(&terms.seat) {
            attempt.fail(Instant::now(), terms.backoff_max);
        }
    }

    /// Drops all records of the members of an array that is not served any more.
    pub(crate) fn forget(&self, array: Uuid) {
        lock(&self.record).forget(array);
    }

    /// Records that an array begins to be served without these members (index and device). `comes_back` says
    /// which of them come back by themselves.
    pub(crate) fn begin(&self, array: Uuid, missing: &[(u16, Uuid)], comes_back: impl Fn(Uuid) -> bool) {
        let mut record = lock(&self.record);
        record.forget(array);
        let back = missing.iter().filter(|(_, device)| comes_back(*device));
        record.were_missing.extend(back.map(|(index, _)| (array, *index)));
    }

    /// Ends the current attempt to bring the member back by itself. The returned receiver tells when the
    /// attempt has closed the device.
    pub(crate) fn interrupt(&self, array: Uuid, index: MemberIndex) -> Option<Receiver<Attempted>> {
        lock(&self.record).attempts.get_mut(&(array, index.0))?.running.take()
    }

    /// As [`Returns::interrupt`], and no further attempt begins for a while.
    pub(crate) fn hold_off(&self, array: Uuid, index: MemberIndex) -> Option<Receiver<Attempted>> {
        let next = Instant::now() + BACKOFF_MAX;
        let none = Attempt { next, failures: 0, running: None, obstacle: None };
        let mut record = lock(&self.record);
        let attempt = record.attempts.entry((array, index.0)).or_insert(none);
        attempt.next = attempt.next.max(next);
        attempt.running.take()
    }

    /// Waits until attempts to bring back members of an array that is not served any more have closed their
    /// devices.
    pub(crate) fn await_attempts(&self, array: Uuid) {
        let until = Instant::now() + ATTEMPT_WAIT;
        while self.under_way.has(array) && Instant::now() < until {
            sleep(ATTEMPT_LOOK);
        }
    }

    /// Whether attempts to bring the member back have begun.
    pub(crate) fn is_tried(&self, terms: Terms) -> bool {
        lock(&self.record).attempts.contains_key(&terms.seat)
    }

    /// Advances the attempts to bring a member back: collects the outcome of the running one, or
    /// calls `begin` when one is due. `begin` returns the receiver of the outcome; a receiver
    /// without a sender counts as a failure.
    pub(crate) fn step(&self, terms: Terms, begin: impl FnOnce(Looking) -> Receiver<Attempted>) -> Step {
        let now = Instant::now();
        let first = Attempt { next: now, failures: 0, running: None, obstacle: None };
        let mut record = lock(&self.record);
        let attempt = record.attempts.entry(terms.seat).or_insert(first);
        match attempt.running.as_ref().map(Receiver::try_recv) {
            Some(Ok(Ok(found))) => {
                attempt.running = None;
                return Step::Found(Box::new(found));
            }
            Some(Ok(Err(not_back))) => {
                tracing::debug!(member = terms.seat.1, reason = %not_back, "a member is not back");
                attempt.fail(now, terms.backoff_max);
                let met = match not_back {
                    NotBack::Away(_) => None,
                    NotBack::Blocked(obstacle) => Some(obstacle),
                };
                let is_news = terms.tells && met != attempt.obstacle;
                attempt.obstacle.clone_from(&met);
                if let (true, Some(obstacle)) = (is_news, met) {
                    return Step::Blocked(obstacle);
                }
            }
            Some(Err(TryRecvError::Disconnected)) => attempt.fail(now, terms.backoff_max),
            Some(Err(TryRecvError::Empty)) => {}
            None => {
                let due = terms.not_before.map_or(attempt.next, |not_before| attempt.next.max(not_before));
                if now >= due {
                    attempt.running = Some(begin(self.under_way.begin(terms.seat.0)));
                }
            }
        }
        Step::Idle
    }

    /// State of the attempts to bring a member back: whether it waits for the end of its quarantine, in how
    /// many seconds it is tried (none while an attempt runs), and what the last attempt has met if one has
    /// failed.
    pub(super) fn outlook(&self, terms: Terms) -> (bool, Option<u64>, Option<Option<Obstacle>>) {
        let record = lock(&self.record);
        let attempt = record.attempts.get(&terms.seat);
        let (is_quarantined, tried_in_s) = when_tried(attempt, terms.not_before, Instant::now());
        let met = attempt.filter(|attempt| attempt.failures > 0).map(|attempt| attempt.obstacle.clone());
        (is_quarantined, tried_in_s, met)
    }
}

impl Record {
    fn forget(&mut self, array: Uuid) {
        self.attempts.retain(|(other, _), _| *other != array);
        self.kept_out.retain(|(other, _), _| *other != array);
        self.were_missing.retain(|(other, _)| *other != array);
    }
}

impl Attempt {
    fn fail(&mut self, now: Instant, max: Duration) {
        self.next = now + member::backoff(BACKOFF_FIRST, max, self.failures);
        self.failures += 1;
        self.running = None;
    }
}

/// Whether a member waits for the end of its quarantine, and in how many seconds it is tried; none while an
/// attempt runs.
fn when_tried(attempt: Option<&Attempt>, not_before: Option<Instant>, now: Instant) -> (bool, Option<u64>) {
    let quarantine = not_before.filter(|until| *until > now);
    if attempt.is_some_and(|attempt| attempt.running.is_some()) {
        return (false, None);
    }
    let next = attempt.map_or(now, |attempt| attempt.next).max(quarantine.unwrap_or(now));
    let seconds = next.saturating_duration_since(now).as_millis().div_ceil(1000) as u64;
    (quarantine.is_some(), Some(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    fn member(state: MemberState) -> MemberStatus {
        calpe_core::testing::bare_member(MemberIndex(1), state)
    }

    #[test]
    fn what_was_said_of_a_member_that_is_away_is_over_when_it_is_in_service() {
        let (array, index) = (Uuid::from_u128(1), MemberIndex(1));
        for (state, is_over) in [
            (MemberState::Online, true),
            (MemberState::Rebuilding, true),
            (MemberState::Missing, false),
            (MemberState::Faulted, false),
        ] {
            let returns = Returns::default();
            let before = Instant::now();
            returns.keep_out(array, index);
            returns.note(array, false, &[member(state)], before);
            assert!(returns.is_kept_out(array, index), "it was taken out after the array had been asked");
            returns.note(array, false, &[member(state)], Instant::now());
            assert_eq!(returns.is_kept_out(array, index), !is_over, "{state:?}");
        }
    }

    #[test]
    fn of_an_array_that_begins_anew_nothing_is_known_and_others_are_left_alone() {
        let (tank, pond, index) = (Uuid::from_u128(1), Uuid::from_u128(2), MemberIndex(1));
        let returns = Returns::default();
        for array in [tank, pond] {
            returns.keep_out(array, index);
            returns.note(array, true, &[member(MemberState::Missing)], Instant::now());
        }
        returns.forget(tank);
        let is_known = |array| [returns.is_kept_out(array, index), returns.was_missing(array, index)];
        assert_eq!([is_known(tank), is_known(pond)], [[false; 2], [true; 2]]);
    }

    #[test]
    fn a_member_is_told_to_be_tried_when_it_is_and_not_while_its_host_is_left_alone() {
        let now = Instant::now();
        let after = |seconds: u64| now + Duration::from_secs(seconds);
        let attempt = |next, running| Attempt { next, failures: 1, running, obstacle: None };
        assert_eq!(when_tried(None, None, now), (false, Some(0)));
        assert_eq!(when_tried(None, Some(after(15)), now), (true, Some(15)), "whether it answers or not");
        assert_eq!(when_tried(Some(&attempt(after(4), None)), None, now), (false, Some(4)));
        assert_eq!(when_tried(Some(&attempt(after(4), None)), Some(after(9)), now), (true, Some(9)));
        assert_eq!(
            when_tried(Some(&attempt(after(4), None)), Some(now), now),
            (false, Some(4)),
            "it is over"
        );
        let (_sender, running) = channel();
        assert_eq!(when_tried(Some(&attempt(now, Some(running))), Some(now), now), (false, None));
    }
}
