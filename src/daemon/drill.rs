//! Deliberate faults of the daemon itself, for tests with a real process. Only in builds with debug
//! assertions: in a release build, no environment and no request makes a daemon panic.
//!
//! The environment variable CALPE_DRILL names a file. When it appears, it is removed and its order
//! is carried out: `panic THREAD` or `hang THREAD`, when that thread reaches its next [`point`].
//!
//! CALPE_DRILL_LIMIT is how many seconds a command without a daemon waits for a device, in place of
//! its usual limit.

#[cfg(debug_assertions)]
mod orders {
    use crate::member::DEFAULT_MEMBER_TIMEOUT;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Mutex, PoisonError};
    use std::time::Duration;

    static GIVEN: AtomicBool = AtomicBool::new(false);
    static ORDER: Mutex<String> = Mutex::new(String::new());

    /// How long a command without a daemon waits for a device.
    pub(crate) fn device_limit() -> Duration {
        let set = std::env::var("CALPE_DRILL_LIMIT").ok().and_then(|seconds| seconds.parse().ok());
        set.map_or(DEFAULT_MEMBER_TIMEOUT, Duration::from_secs)
    }

    /// Reads the order, if there is one.
    pub(crate) fn look() {
        let Some(file) = std::env::var_os("CALPE_DRILL") else { return };
        if let Ok(text) = std::fs::read_to_string(&file)
            && std::fs::remove_file(&file).is_ok()
        {
            *ORDER.lock().unwrap_or_else(PoisonError::into_inner) = text.trim().to_owned();
            GIVEN.store(true, Ordering::Release);
        }
    }

    /// A place where a thread panics or hangs when the order names it.
    pub(crate) fn point(thread: &str) {
        if !GIVEN.load(Ordering::Acquire) {
            return;
        }
        let order = ORDER.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match order.split_once(' ') {
            Some(("panic", who)) if who == thread => panic!("a drill"),
            Some(("hang", who)) if who == thread => loop {
                std::thread::sleep(Duration::from_secs(1));
            },
            _ => {}
        }
    }
}

#[cfg(not(debug_assertions))]
mod orders {
    pub(crate) fn device_limit() -> std::time::Duration {
        crate::member::DEFAULT_MEMBER_TIMEOUT
    }

    pub(crate) fn look() {}

    #[inline(always)]
    pub(crate) fn point(_thread: &str) {}
}

pub(crate) use orders::{device_limit, look, point};
