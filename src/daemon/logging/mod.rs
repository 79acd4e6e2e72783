//! The log: to standard error, for people or as JSON. Never user data.
//!
//! Invariants: an event is one line, and no text in it, whoever chose it, steers a terminal or passes for
//! another line; lines that a client can cause at will are logged a few times a minute at most, with a count
//! of those left out; a process that serves does not wait for the reader of its log.

pub(crate) mod queue;

use crate::daemon::clock;
use queue::Queue;

use calpe_core::units::{Printable, RateLimit};
use std::str::FromStr;
use std::time::Duration;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::fmt::writer::BoxMakeWriter;

/// Environment variable with the filter ("debug", "calpe::member=trace", "calpe_gpu=debug").
pub(crate) const LOG_VARIABLE: &str = "CALPE_LOG";

/// Lines of one kind in a period: enough to see the problem, and which clients cause it.
const LINES_MAX: u32 = 10;

/// The period, in seconds: a flood that lasts a day leaves 14400 lines of its kind, about 2 MB.
const PERIOD_S: u64 = 60;

/// How long the end of a process waits for its log to be read.
const FLUSH_MAX: Duration = Duration::from_secs(1);

/// Form of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// For people.
    #[default]
    Human,
    /// One JSON object a line.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<LogFormat, String> {
        match text {
            "human" => Ok(LogFormat::Human),
            "json" => Ok(LogFormat::Json),
            other => Err(format!("'{other}' is not a log format: write human or json")),
        }
    }
}

/// Starts logging of a command: a line is written when its call returns. `level` applies when the environment
/// sets none. Later calls do nothing.
pub(crate) fn start(format: LogFormat, level: LevelFilter) {
    start_with(format, level, BoxMakeWriter::new(std::io::stderr));
}

/// Starts logging of a process that serves, as [`start`] does, but through a queue: no thread waits for
/// standard error. The last lines are written when the guard is dropped.
#[must_use = "the last lines are written when it goes"]
pub(crate) fn start_queued(format: LogFormat, level: LevelFilter) -> FlushAtEnd {
    match Queue::to_stderr() {
        Ok(queue) => start_with(format, level, BoxMakeWriter::new(move || queue.clone())),
        // A log that may block its callers is better than none.
        Err(_) => start(format, level),
    }
    FlushAtEnd(())
}

/// Writes the last lines of the log when dropped, if they are taken within a second.
#[derive(Debug)]
pub(crate) struct FlushAtEnd(());

impl Drop for FlushAtEnd {
    fn drop(&mut self) {
        queue::flush(FLUSH_MAX);
    }
}

/// Starts logging of a process whose lines another process logs: level and text.
pub(crate) fn start_for_another() {
    let filter = EnvFilter::try_from_env(LOG_VARIABLE)
        .unwrap_or_else(|_| EnvFilter::new(LevelFilter::INFO.to_string()));
    let fields = debug_fn(field).delimited(" ");
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let builder = builder.without_time().with_ansi(false).log_internal_errors(false);
    // Fails only when a log is there already.
    let _ = builder.with_target(false).fmt_fields(fields).try_init();
}

fn start_with(format: LogFormat, level: LevelFilter, writer: BoxMakeWriter) {
    let filter = EnvFilter::try_from_env(LOG_VARIABLE).unwrap_or_else(|_| EnvFilter::new(level.to_string()));
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    // Errors of the log only cost its lines. The library would print them to the same place, and
    // panic.
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

/// Writes a field of an event, escaped: most values come from outside.
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
pub(crate) struct Limited {
    limit: RateLimit,
    /// What the line is about, for the line that counts those left out.
    what: &'static str,
}

impl Limited {
    const fn new(what: &'static str) -> Limited {
        Limited { limit: RateLimit::new(LINES_MAX, PERIOD_S), what }
    }

    /// Whether such a line may be logged now. Logs how many were left out before, if any were.
    pub(crate) fn admits(&self) -> bool {
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
pub(crate) static CONTROL_REFUSALS: Limited = Limited::new("clients of the control socket turned away");
/// Connections that could not be accepted, on any socket.
pub(crate) static ACCEPT_FAILURES: Limited = Limited::new("connections that could not be accepted");
/// Clients whose certificates may not use an export.
pub(crate) static NOT_ALLOWED: Limited =
    Limited::new("certificates that may not use the export that they asked for");
/// Connections on which TLS could not be started.
pub(crate) static TLS_STARTS: Limited = Limited::new("connections of which TLS could not be started");

/// Logs how many lines were left out, for kinds whose period is over. Call it about once a second.
pub(crate) fn tell_left_out() {
    for limited in [&CONTROL_REFUSALS, &ACCEPT_FAILURES, &TLS_STARTS] {
        limited.tell(limited.limit.left_out(clock::now()));
    }
    crate::tls::tell_left_out();
    if let count @ 1.. = queue::take_left_out() {
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
