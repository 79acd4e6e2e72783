//! What an error of a call that waits (poll, io_uring_enter, recv) means for a loop that repeats
//! the call: an error that passes must end neither the loop nor what it serves. Must not know what
//! is waited for.

use calpe_core::units::{RateLimit, Timestamp};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// How long a loop rests before it repeats a call for which this host lacked a resource: the kernel
/// needs a moment to write back, and a loop that does not rest takes the processor from it.
const PAUSE: Duration = Duration::from_millis(10);

/// Log lines about such calls: a lasting shortage is reported now and then.
static LINES: RateLimit = RateLimit::new(3, 60);

/// Start of this process's clock for the log's rate limit.
static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// What an error says about the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The call is to be repeated at once: a signal came, or there was nothing after all.
    Interrupted,
    /// This host lacks memory or another resource: the call is to be repeated after a pause.
    Short,
    /// It will fail again.
    Lasting,
}

/// What an errno of a call that waits says about the call.
#[must_use]
pub fn trouble(errno: i32) -> Trouble {
    match errno {
        libc::EINTR => Trouble::Interrupted,
        libc::ENOMEM | libc::EAGAIN | libc::EBUSY | libc::ENOBUFS => Trouble::Short,
        _ => Trouble::Lasting,
    }
}

/// Whether `what` is to repeat the call that ended with this errno. If this host lacks a resource,
/// this rests and writes to the log first.
#[must_use]
pub fn survives(errno: i32, what: &str) -> bool {
    let trouble = trouble(errno);
    if trouble == Trouble::Short {
        tell_short(errno, what);
        std::thread::sleep(PAUSE);
    }
    trouble != Trouble::Lasting
}

/// Logs that this host lacks a resource for a call of `what`; repetitions are left out.
pub fn tell_short(errno: i32, what: &str) {
    let now = Timestamp(u64::try_from(BEGUN.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let Some(left_out) = LINES.admit(now) else { return };
    let error = std::io::Error::from_raw_os_error(errno);
    tracing::warn!(%error, left_out, "{what} cannot wait for events: this host lacks memory or the like; it tries again");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_pass_are_told_from_those_that_last() {
        assert_eq!(trouble(libc::EINTR), Trouble::Interrupted);
        for errno in [libc::ENOMEM, libc::EAGAIN, libc::EBUSY, libc::ENOBUFS] {
            assert_eq!(trouble(errno), Trouble::Short);
            assert!(survives(errno, "a test"));
        }
        for errno in [libc::EBADF, libc::EINVAL, libc::EFAULT, libc::EPIPE, libc::ECONNRESET] {
            assert_eq!(trouble(errno), Trouble::Lasting);
            assert!(!survives(errno, "a test"));
        }
    }

    #[test]
    fn a_loop_rests_only_where_the_host_lacks_something() {
        let begun = Instant::now();
        assert!(survives(libc::ENOMEM, "a test"));
        assert!(begun.elapsed() >= PAUSE);
    }
}
