//! What a panic does to the daemon: one line on standard error, and the process ends at once, so that its supervisor starts
//! it again. Without, a thread would be missing, clients would wait for it, and nothing would tell.
//!
//! Threads of GPUs are left to their guards, which give the device up. Must not wait for anything but for a moment: another
//! thread may hold the library's lock of standard error, or be stuck in it.

use super::config::LogFormat;
use super::log_queue;
use super::reactor::exit_at_once;
use calpe_core::units::Printable;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::os::fd::AsFd;
use std::panic::PanicHookInfo;
use std::time::Duration;

/// Exit status of a process that has panicked: EX_SOFTWARE of sysexits(3).
pub const PANIC_STATUS: u8 = 70;

/// How long standard error may take before it can be written to, in milliseconds.
const STDERR_WAIT_MS: u16 = 500;

/// How long the lines before may take: they may say what led to it.
const LOG_WAIT: Duration = Duration::from_millis(100);

/// Longest line: what a pipe that can be written to takes at once.
const LINE_BYTES_MAX: usize = 4096;

/// Has panics of this process end it, from now on.
pub fn end_process_on_panic(format: LogFormat) {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("without a name");
        if thread.starts_with("gpu") {
            before(panic);
            return;
        }
        log_queue::flush(LOG_WAIT);
        say_at_once(&line(format, thread, panic));
        exit_at_once(i32::from(PANIC_STATUS));
    }));
}

fn line(format: LogFormat, thread: &str, panic: &PanicHookInfo<'_>) -> String {
    let place = panic.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
    // It is to be one line, whatever was panicked with.
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

/// Writes to standard error, as far as that is possible without waiting for somebody to read it.
pub fn say_at_once(text: &str) {
    let stderr = std::io::stderr();
    for part in text.as_bytes().chunks(LINE_BYTES_MAX) {
        let mut fds = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
        // Not through the library's lock. Where nobody reads it there is nobody to tell.
        if !matches!(poll(&mut fds, PollTimeout::from(STDERR_WAIT_MS)), Ok(ready) if ready > 0) {
            return;
        }
        let _ = nix::unistd::write(stderr.as_fd(), part);
    }
}
