//! Finds members that are far slower than their peers: one of them slows the whole array down long before it
//! fails. Each is judged by the average time of its reads and writes, over windows of time, against the
//! others under the same load.
//!
//! Must not know what operations are for. A person decides what to do about a slow member.

use crate::array::{Core, NoticeKind, NoticeLevel};
use crate::units::{MemberIndex, Timestamp};

/// Length of a window, in nanoseconds.
const WINDOW_NS: u64 = 10_000_000_000;

/// Fewest operations in a window that count for anything.
const OPS_MIN: u64 = 16;

/// A member is far slower that takes this many times as long as the median of the others: disks of one make
/// differ by less than 2, and an SSD among disks is faster, not slower.
const FACTOR: u64 = 8;

/// A member that is faster than this is fast enough, however fast the others are: the time a disk takes to
/// seek twice.
const SLOW_NS: u64 = 20_000_000;

/// How many windows in a row must agree before a member is believed to be slow: a disk may spin up, or remap
/// a sector.
const WINDOWS: i32 = 3;

/// How long operations of the members take.
#[derive(Debug, Default)]
pub(in crate::array) struct Paces {
    members: Vec<Pace>,
    since: Timestamp,
}

#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    ops: u64,
    nanos: u64,
    /// Windows in a row in which it was slow, or, if negative, not slow.
    streak: i32,
    is_slow: bool,
}

/// A member that has become slow, or is slow no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PaceChange {
    pub member: MemberIndex,
    pub is_slow: bool,
    /// Average time of its operations.
    pub nanos: u64,
    /// The median of the average times of the others.
    pub peers_nanos: u64,
}

impl Paces {
    /// Counts an operation that has succeeded, and its time.
    pub(in crate::array) fn note(&mut self, member: MemberIndex, nanos: u64) {
        let at = usize::from(member.0);
        if self.members.len() <= at {
            self.members.resize(at + 1, Pace::default());
        }
        self.members[at].ops += 1;
        self.members[at].nanos += nanos;
    }

    /// Forgets the times of a member, because its device has left.
    pub(in crate::array) fn forget(&mut self, member: MemberIndex) {
        if let Some(pace) = self.members.get_mut(usize::from(member.0)) {
            *pace = Pace::default();
        }
    }

    pub(in crate::array) fn is_slow(&self, member: MemberIndex) -> bool {
        self.members.get(usize::from(member.0)).is_some_and(|pace| pace.is_slow)
    }

    /// Judges the members when a window is over.
    pub(super) fn judge(&mut self, now: Timestamp) -> Vec<PaceChange> {
        if now.nanos_since(self.since) < WINDOW_NS {
            return Vec::new();
        }
        self.since = now;
        let mean = |pace: &Pace| (pace.ops >= OPS_MIN).then(|| pace.nanos / pace.ops);
        let means: Vec<Option<u64>> = self.members.iter().map(mean).collect();
        let mut changes = Vec::new();
        for (at, pace) in self.members.iter_mut().enumerate() {
            (pace.ops, pace.nanos) = (0, 0);
            let others = means.iter().enumerate().filter(|(other, _)| *other != at);
            let mut peers: Vec<u64> = others.filter_map(|(_, mean)| *mean).collect();
            peers.sort_unstable();
            let (Some(nanos), Some(&peers_nanos)) = (means[at], peers.get(peers.len() / 2)) else { continue };
            let shows_slow = nanos >= SLOW_NS && nanos >= peers_nanos.saturating_mul(FACTOR);
            pace.streak = if shows_slow {
                (pace.streak.max(0) + 1).min(WINDOWS)
            } else {
                (pace.streak.min(0) - 1).max(-WINDOWS)
            };
            if pace.streak.abs() == WINDOWS && pace.is_slow != shows_slow {
                pace.is_slow = shows_slow;
                let member = MemberIndex(at as u16);
                changes.push(PaceChange { member, is_slow: shows_slow, nanos, peers_nanos });
            }
        }
        changes
    }
}

impl Core {
    /// Tick: reports members that have become slow, and those that are slow no more.
    pub(in crate::array) fn judge_paces(&mut self) {
        for PaceChange { member, is_slow, nanos, peers_nanos } in self.paces.judge(self.now) {
            let ms = |nanos: u64| nanos as f64 / 1e6;
            let text = match is_slow {
                true => format!(
                    "member {member} is far slower than the others: its reads and writes take {:.1} ms on average, theirs {:.1} ms. It slows \
                     the whole array down: look at its device and what leads there, and replace it if it stays so",
                    ms(nanos),
                    ms(peers_nanos)
                ),
                false => format!(
                    "member {member} is as fast as the others again: its reads and writes take {:.1} ms on average",
                    ms(nanos)
                ),
            };
            let (kind, level) = match is_slow {
                true => (NoticeKind::MemberSlow, NoticeLevel::Warning),
                false => (NoticeKind::MemberNotSlow, NoticeLevel::Info),
            };
            self.notice(kind, level, Some(member), text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Lets windows pass in which the members take this long for each of `ops` operations.
    fn windows(paces: &mut Paces, count: u64, ops: u64, millis: &[u64]) -> Vec<(u16, bool)> {
        let mut changes = Vec::new();
        for _ in 0..count {
            for (at, millis) in millis.iter().enumerate() {
                (0..ops).for_each(|_| paces.note(MemberIndex(at as u16), millis * MS));
            }
            let now = Timestamp(paces.since.0 + WINDOW_NS);
            changes.extend(paces.judge(now).iter().map(|change| (change.member.0, change.is_slow)));
        }
        changes
    }

    #[test]
    fn a_member_that_is_far_slower_for_a_while_is_told_once_and_so_is_its_end() {
        let mut paces = Paces::default();
        assert_eq!(windows(&mut paces, 2, 20, &[4, 5, 100, 4]), []);
        assert_eq!(windows(&mut paces, 5, 20, &[4, 5, 100, 4]), [(2, true)]);
        assert!(paces.is_slow(MemberIndex(2)) && !paces.is_slow(MemberIndex(0)));
        assert_eq!(windows(&mut paces, 2, 20, &[4, 5, 6, 4]), []);
        assert!(paces.is_slow(MemberIndex(2)), "not yet");
        assert_eq!(windows(&mut paces, 2, 20, &[4, 5, 6, 4]), [(2, false)]);
    }

    #[test]
    fn a_member_that_is_slow_like_the_others_fast_enough_or_rarely_used_is_not_reported() {
        let mut paces = Paces::default();
        assert_eq!(windows(&mut paces, 9, 20, &[100, 110, 300, 90]), [], "all are slow");
        assert_eq!(windows(&mut paces, 9, 20, &[0, 0, 15, 0]), [], "fast enough");
        assert_eq!(windows(&mut paces, 9, 3, &[1, 1, 100, 1]), [], "too few to tell");
        assert_eq!(windows(&mut paces, 9, 20, &[100]), [], "no other to compare with");
        for _ in 0..5 {
            assert_eq!(windows(&mut paces, 2, 20, &[1, 1, 100, 1]), []);
            assert_eq!(windows(&mut paces, 1, 20, &[1, 1, 2, 1]), [], "now and then");
        }
    }

    #[test]
    fn a_device_that_has_left_is_forgotten() {
        let mut paces = Paces::default();
        assert_eq!(windows(&mut paces, 3, 20, &[4, 100, 4]), [(1, true)]);
        paces.forget(MemberIndex(1));
        assert!(!paces.is_slow(MemberIndex(1)));
        assert_eq!(windows(&mut paces, 2, 20, &[4, 100, 4]), []);
    }
}
