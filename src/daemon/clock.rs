//! The only clock. Must not be read by the layers below: they get a [`Timestamp`] with each event.

use calpe_core::units::Timestamp;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Now, in nanoseconds since 1970. Monotonic: the system clock is read once, at the first call, and the
/// monotonic clock counts from there. Divided by 10^9 it is precise enough as a date.
#[must_use]
pub(crate) fn now() -> Timestamp {
    static START: OnceLock<(Instant, Duration)> = OnceLock::new();
    let (start, unix) = START.get_or_init(|| {
        (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO))
    });
    let nanos = (*unix + start.elapsed()).as_nanos();
    Timestamp(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// Now in seconds since 1970.
#[must_use]
pub(crate) fn unix_seconds() -> u64 {
    now().0 / 1_000_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_forward_and_is_near_the_system_clock() {
        let first = now();
        let second = now();
        assert!(second >= first);
        let system = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        assert!(system.abs_diff(unix_seconds()) <= 2);
    }
}
