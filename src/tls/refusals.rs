//! Log lines about refused peers. Certificates are a common mistake, and anybody on the network can
//! cause refusals at will, so the lines are limited. Must not know sockets.

use calpe_core::units::{Count, RateLimit, Timestamp};
use std::fmt;
use std::sync::OnceLock;
use std::time::Instant;

/// Lines in a minute: enough to see what is wrong with the certificates of a few peers.
const LINES_MAX: u32 = 10;

/// The period of that limit, in seconds.
const PERIOD_S: u64 = 60;

static REFUSALS: RateLimit = RateLimit::new(LINES_MAX, PERIOD_S);

/// Logs why a connection was refused, within the limit.
pub(super) fn tell_refusal(fault: &dyn fmt::Display) {
    if let Some(left_out) = REFUSALS.admit(now()) {
        tell(Some(left_out));
        tracing::info!("a connection was refused: {fault}");
    }
}

/// Logs the number of refusals that were left out, when no other line follows them. To be called
/// every second or so.
pub(crate) fn tell_left_out() {
    tell(REFUSALS.left_out(now()));
}

fn tell(left_out: Option<u64>) {
    if let Some(count @ 1..) = left_out {
        tracing::info!("{} refused by TLS besides", Count(count, "connection"));
    }
}

/// Time since the first call.
fn now() -> Timestamp {
    static START: OnceLock<Instant> = OnceLock::new();
    let elapsed = START.get_or_init(Instant::now).elapsed();
    Timestamp(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX))
}
