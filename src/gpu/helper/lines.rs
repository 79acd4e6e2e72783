//! What a helper and the libraries in it print, as lines of this process's log. Must not know who prints.

use std::sync::LazyLock;
use std::time::Instant;

use calpe_core::units::{RateLimit, Timestamp};

/// Longest line; what is longer is cut into several.
const LINE_BYTES_MAX: usize = 1024;

/// Lines of all helpers that are logged in a period of so many seconds: an opening takes a few.
static LIMIT: RateLimit = RateLimit::new(100, 60);

/// Start of the clock of the limit.
static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The bytes of an unfinished line.
#[derive(Debug, Default)]
pub(super) struct Lines(Vec<u8>);

impl Lines {
    /// Logs the lines that end in these bytes.
    pub(super) fn push(&mut self, bytes: &[u8], pid: u32) {
        for &byte in bytes {
            if byte == b'\n' || self.0.len() == LINE_BYTES_MAX {
                self.end(pid);
            }
            if byte != b'\n' {
                self.0.push(byte);
            }
        }
    }

    /// Logs what has begun.
    pub(super) fn end(&mut self, pid: u32) {
        let line = std::mem::take(&mut self.0);
        let text = String::from_utf8_lossy(&line);
        if text.trim().is_empty() {
            return;
        }
        let now = Timestamp(u64::try_from(BEGUN.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let Some(left_out) = LIMIT.admit(now) else { return };
        if left_out > 0 {
            tracing::warn!("GPU helpers: {left_out} more lines were left out");
        }
        match split(&text) {
            (tracing::Level::ERROR, text) => tracing::error!("GPU helper {pid}: {text}"),
            (tracing::Level::WARN, text) => tracing::warn!("GPU helper {pid}: {text}"),
            (tracing::Level::INFO, text) => tracing::info!("GPU helper {pid}: {text}"),
            (_, text) => tracing::debug!("GPU helper {pid}: {text}"),
        }
    }
}

/// The level that a line begins with, and its text. What has none is not a helper's own: a library's, or
/// the words of a panic.
fn split(line: &str) -> (tracing::Level, &str) {
    let line = line.trim();
    let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
    match first {
        "ERROR" | "WARN" | "INFO" | "DEBUG" | "TRACE" => {
            (first.parse().unwrap_or(tracing::Level::WARN), rest.trim_start())
        }
        _ => (tracing::Level::WARN, line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_level_that_it_begins_with() {
        use tracing::Level;
        assert_eq!(split(" INFO 3 MiB registered"), (Level::INFO, "3 MiB registered"));
        assert_eq!(split("ERROR  x"), (Level::ERROR, "x"));
        assert_eq!(split("thread 'main' panicked"), (Level::WARN, "thread 'main' panicked"));
        assert_eq!(split("INFO"), (Level::INFO, ""));
    }

    #[test]
    fn a_line_without_end_takes_no_more_memory_than_a_line() {
        let mut lines = Lines::default();
        lines.push(&[b'x'; 10 * LINE_BYTES_MAX + 5], 1);
        assert!(lines.0.len() <= LINE_BYTES_MAX);
        lines.push(b"\nend", 1);
        assert_eq!(lines.0, b"end");
    }
}
