//! Whether cores have been busy of late, as one reactor sees it from turn to turn. A moment says little: all
//! reactors may be awake at once for some microseconds while the machine idles. So the answer is that of some
//! tens of milliseconds, and it takes more to begin than to go on: between the two it stays what it was.
//! Pure: must not know where the moments come from.

use calpe_core::units::Timestamp;

/// Nanoseconds after which a moment counts a third of a new one.
const MEMORY: f64 = 20e6;

/// Most time before a look that it stands for. A reactor that slept longer had nothing to do, which says that
/// cores were not busy.
const LOOK_NANOS_MAX: u64 = 5_000_000;

/// After so long without a look nothing is known.
const FORGOTTEN_NANOS: u64 = 100_000_000;

/// Part of the time that cores are busy from which on they count as busy, and below which they do not.
const BEGINS: f64 = 0.75;
/// See [`BEGINS`].
const ENDS: f64 = 0.25;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Busy {
    /// Part of the time that cores were busy.
    part: f64,
    looked: Timestamp,
    is_busy: bool,
}

impl Busy {
    /// Takes in how it is at this moment.
    pub(super) fn look(&mut self, now: Timestamp, is_busy: bool) {
        let passed = now.nanos_since(self.looked);
        self.looked = now;
        if passed > FORGOTTEN_NANOS {
            *self = Busy { looked: now, ..Busy::default() };
            return;
        }
        let seen = if is_busy { passed.min(LOOK_NANOS_MAX) } else { 0 };
        let rest = |nanos: u64| (-(nanos as f64) / MEMORY).exp();
        self.part *= rest(passed - seen);
        self.part += (1.0 - self.part) * (1.0 - rest(seen));
        self.is_busy = self.part > if self.is_busy { ENDS } else { BEGINS };
    }

    /// Whether they are busy.
    pub(super) fn is_busy(&self) -> bool {
        self.is_busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks every `step` microseconds, for `ms`; the part of the looks at which cores are busy.
    fn look(busy: &mut Busy, now: &mut u64, ms: u64, step: u64, part: f64) {
        let (steps, mut due) = (ms * 1000 / step, 0.0);
        for _ in 0..steps {
            *now += step * 1000;
            due += part;
            let is_busy = due >= 1.0;
            due -= f64::from(u8::from(is_busy));
            busy.look(Timestamp(*now), is_busy);
        }
    }

    #[test]
    fn cores_are_busy_after_some_tens_of_milliseconds_and_not_for_a_moment() {
        let (mut busy, mut now) = (Busy::default(), 1 << 40);
        look(&mut busy, &mut now, 1, 100, 0.0);
        look(&mut busy, &mut now, 10, 100, 1.0);
        assert!(!busy.is_busy());
        look(&mut busy, &mut now, 40, 100, 1.0);
        assert!(busy.is_busy());
    }

    #[test]
    fn between_both_limits_it_stays_as_it_was() {
        for (before, ends) in [(0.0, false), (1.0, true)] {
            let (mut busy, mut now) = (Busy::default(), 1 << 40);
            look(&mut busy, &mut now, 200, 100, before);
            for _ in 0..50 {
                look(&mut busy, &mut now, 20, 100, 0.5);
                assert_eq!(busy.is_busy(), ends);
            }
            look(&mut busy, &mut now, 200, 100, 1.0 - before);
            assert_eq!(busy.is_busy(), !ends);
        }
    }

    #[test]
    fn what_all_wake_for_at_once_now_and_then_is_no_load() {
        let (mut busy, mut now) = (Busy::default(), 1 << 40);
        for _ in 0..1000 {
            now += 50_000_000;
            busy.look(Timestamp(now), true);
            assert!(!busy.is_busy());
        }
    }

    #[test]
    fn a_load_of_long_ago_is_forgotten() {
        let (mut busy, mut now) = (Busy::default(), 1 << 40);
        look(&mut busy, &mut now, 200, 100, 1.0);
        assert!(busy.is_busy());
        now += FORGOTTEN_NANOS + 1;
        busy.look(Timestamp(now), true);
        assert!(!busy.is_busy());
    }
}
