//! Prints moments as dates and times of day. Must not know what happened then.

use std::fmt;

/// Seconds since 1970, which print as `2025-11-21 12:25:00 UTC`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnixTime(pub u64);

impl fmt::Display for UnixTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UnixTime(unix) = *self;
        // Whole cycles of 400 years are 146097 days; years begin in March so that the leap day is the last.
        let days = unix / 86400 + 719_468;
        let (cycle, day) = (days / 146_097, days % 146_097);
        let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let shifted = (5 * day + 2) / 153;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
        let year = cycle * 400 + year + u64::from(month <= 2);
        let seconds = unix % 86400;
        write!(
            f,
            "{year:04}-{month:02}-{:02} {:02}:{:02}:{:02} UTC",
            day - (153 * shifted + 2) / 5 + 1,
            seconds / 3600,
            seconds / 60 % 60,
            seconds % 60
        )
    }
}
