//! The log: to standard error, for people or as JSON. Never user data.
//!
//! Invariants: an event is one line, and no text in it, whoever chose it, steers a terminal or passes for another line; what
//! a client can cause at will is told a few times a minute at most, and then how often it was left out; a process that
//! serves does not wait for whoever reads its log.

use super::clock;
use super::config::LogFormat;
use super::log_queue::{self, Queue};
use calpe_core::units::{Printable, RateLimit};
use std::time::Duration;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::fmt::writer::BoxMakeWriter;

/// Environment variable with the filter ("debug", "calpe::member=trace").
pub const LOG_VARIABLE: &str = "CALPE_LOG";

/// Lines of one kind in a period: enough to see what goes on, and with which clients.
const LINES_MAX: u32 = 10;

/// The period, in seconds: a flood that lasts a day leaves 14400 lines of its kind, about 2 MB.
const PERIOD_S: u64 = 60;

/// How long the end of a process waits for its log to be read.
const FLUSH_MAX: Duration = Duration::from_secs(1);

/// Starts logging of a command: a line is written when its call returns. `level` is what is logged when the environment
/// does not say. Later calls do nothing.
pub fn start(format: LogFormat, level: LevelFilter) {
    start_with(format, level, BoxMakeWriter::new(std::io::stderr));
}

/// Starts logging of a process that serves, as [`start`] does, but through a queue: nobody waits for standard error. The
/// last lines are written when the guard goes.
#[must_use = "the last lines are written when it goes"]
pub fn start_queued(format: LogFormat, level: LevelFilter) -> FlushAtEnd {
    match Queue::to_stderr() {
        Ok(queue) => start_with(format, level, BoxMakeWriter::new(move || queue.clone())),
        // Better a log that may keep somebody waiting than none.
        Err(_) => start(format, level),
    }
    FlushAtEnd(())
}

/// Writes the last lines of the log when it goes, if they are taken within a second.
#[derive(Debug)]
pub struct FlushAtEnd(());

impl Drop for FlushAtEnd {
    fn drop(&mut self) {
        log_queue::flush(FLUSH_MAX);
    }
}

fn start_with(format: LogFormat, level: LevelFilter, writer: BoxMakeWriter) {
    let filter = EnvFilter::try_from_env(LOG_VARIABLE).unwrap_or_else(|_| EnvFilter::new(level.to_string()));
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    // A log that is full or gone costs its lines. Told of it, the library would print to the same place, and panic.
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(colours)
        .log_internal_errors(false);
    // Fails only when a log is there already.
    let _ = match format {
        LogFormat::Human => {
            let fields = debug_fn(field).delimited(" ");
            builder.with_target(false).fmt_fields(fields).try_init()
        }
        LogFormat::Json => builder.json().try_init(),
    };
}

/// Writes a field of an event, escaped: its value is text of others more often than not.
fn field(
    writer: &mut Writer<'_>,
    field: &tracing::field::Field,
    value: &dyn std::fmt::Debug,
) -> std::fmt::Result {
    let value = format!("{value:?}");
    match field.name() {
        "message" => write!(writer, "{}", Printable(&value)),
        name => write!(writer, "{name}={}", Printable(&value)),
    }
}

/// A kind of line that clients can cause at will.
#[derive(Debug)]
pub struct Limited {
    limit: RateLimit,
    /// What it tells of, for the line that says how many were left out.
    what: &'static str,
}

impl Limited {
    const fn new(what: &'static str) -> Limited {
        Limited { limit: RateLimit::new(LINES_MAX, PERIOD_S), what }
    }

    /// Whether such a line may be logged now. Says how many were left out, if any were.
    pub fn admits(&self) -> bool {
        let admitted = self.limit.admit(clock::now());
        self.tell(admitted);
        admitted.is_some()
    }

    fn tell(&self, left_out: Option<u64>) {
        if let Some(count @ 1..) = left_out {
            tracing::warn!("{}: {count} more lines like these were left out", self.what);
        }
    }
}

/// Clients of the control socket that were turned away.
pub static CONTROL_REFUSALS: Limited = Limited::new("clients of the control socket turned away");
/// Connections that could not be accepted, on any socket.
pub static ACCEPT_FAILURES: Limited = Limited::new("connections that could not be accepted");
/// Clients whose certificates may not use an export.
pub static NOT_ALLOWED: Limited =
    Limited::new("certificates that may not use the export that they asked for");
/// Connections of which TLS could not be started.
pub static TLS_STARTS: Limited = Limited::new("connections of which TLS could not be started");

/// Tells of lines that were left out and that none of their kind followed. Call it every second or so.
pub fn tell_left_out() {
    for limited in [&CONTROL_REFUSALS, &ACCEPT_FAILURES, &TLS_STARTS] {
        limited.tell(limited.limit.left_out(clock::now()));
    }
    crate::tls::tell_left_out();
    if let count @ 1.. = log_queue::take_left_out() {
        tracing::warn!("{count} lines were left out here: standard error was not read");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_event_is_one_line_without_control_characters() {
        let sink = Sink::default();
        let writer = sink.clone();
        let log = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .with_target(false)
            .fmt_fields(debug_fn(field).delimited(" "))
            .finish();
        tracing::subscriber::with_default(log, || {
            let path = "/srv/a\n2026 ERROR forged\x1b[2J\u{202e}";
            tracing::warn!(%path, array = "tank\u{9b}", count = 3, "gone: {path}");
        });
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        let escaped = "/srv/a\\n2026 ERROR forged\\u{1b}[2J\\u{202e}";
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(
            text.contains(&format!("gone: {escaped} path={escaped}")) && text.contains("count=3"),
            "{text}"
        );
        assert!(
            !text.trim_end().contains(char::is_control) && text.contains("array=\"tank\\u{9b}\""),
            "{text}"
        );
    }
}
