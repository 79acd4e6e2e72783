//! A panic ends the daemon at once, with one line on standard error, so that its supervisor starts it again.
//! Otherwise a thread would be missing, and its clients would wait for ever.
//!
//! Panics of GPU threads are left to their guards, which give the device up. Must not block: another thread
//! may hold the library's lock of standard error, or be stuck in it.

use crate::daemon::logging::LogFormat;
use crate::daemon::logging::queue;
use crate::daemon::reactor::exit_at_once;
use calpe_core::units::Printable;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::os::fd::AsFd;
use std::panic::PanicHookInfo;
use std::time::Duration;

/// Exit status of a process that has panicked: EX_SOFTWARE of sysexits(3).
pub(crate) const PANIC_STATUS: u8 = 70;

/// How long to wait until standard error can be written to, in milliseconds.
const STDERR_WAIT_MS: u16 = 500;

/// How long to wait for earlier lines of the log: they may say what led to the panic.
const LOG_WAIT: Duration = Duration::from_millis(100);

/// Longest line: a pipe that is ready takes this many bytes at once.
const LINE_BYTES_MAX: usize = 4096;

/// Makes every panic end this process, from now on.
pub(crate) fn end_process_on_panic(format: LogFormat) {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("without a name");
        if thread.starts_with("gpu") {
            before(panic);
            return;
        }
        queue::flush(LOG_WAIT);
        say_at_once(&line(format, thread, panic));
        exit_at_once(i32::from(PANIC_STATUS));
    }));
}

fn line(format: LogFormat, thread: &str, panic: &PanicHookInfo<'_>) -> String {
    let place = panic.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
    // Keeps the text of the panic on one line.
    let payload = panic.payload();
    let message = payload.downcast_ref::<&str>().copied();
    let message = message.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let message = message.unwrap_or("no text").split_whitespace().collect::<Vec<_>>().join(" ");
    let text = format!("thread '{thread}' panicked at {place}: {message}");
    let mut line = match format {
        LogFormat::Human => format!("ERROR {}; the daemon ends", Printable(&text)),
        LogFormat::Json => {
            serde_json::json!({ "level": "ERROR", "fields": { "message": text }, "target": "calpe::panic" })
                .to_string()
        }
    };
    while line.len() >= LINE_BYTES_MAX {
        line.pop();
    }
    line.push('\n');
    line
}

/// Writes to standard error without waiting for its reader.
pub(crate) fn say_at_once(text: &str) {
    let stderr = std::io::stderr();
    for part in text.as_bytes().chunks(LINE_BYTES_MAX) {
        let mut fds = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
        // Without the library's lock. If nobody reads standard error, the text is dropped.
        if !matches!(poll(&mut fds, PollTimeout::from(STDERR_WAIT_MS)), Ok(ready) if ready > 0) {
            return;
        }
        let _ = nix::unistd::write(stderr.as_fd(), part);
    }
}
