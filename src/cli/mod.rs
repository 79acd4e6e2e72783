//! The command line: parses, asks the daemon or opens devices itself, prints. Owns standard output
//! and the exit codes: 0 done, 1 error, 2 usage, and those of `status --test`. Must not know how
//! arrays work.

mod args;
mod attach;
mod client;
mod commands;
mod offline;
mod paths;
mod run;
mod text;
mod wait;

use args::Cli;

use crate::daemon::startup::panic::say_at_once;
use calpe_core::units::{Printable, PrintableLines, is_unprintable};
use clap::Parser;
use nix::sys::signal::{SigSet, Signal};
use std::io::{self, Write};
use std::process::ExitCode;

/// An error for the person at the command line.
#[derive(Debug, thiserror::Error)]
enum CliError {
    /// From the daemon, or from the connection to it.
    #[error(transparent)]
    Client(#[from] client::ClientError),
    /// Standard output failed.
    #[error("cannot write to standard output: {0}")]
    Output(#[from] io::Error),
    /// An array cannot be created.
    #[error(transparent)]
    Create(#[from] crate::daemon::devices::create::CreateError),
    /// The check of an array came to no result.
    #[error(transparent)]
    Check(#[from] crate::daemon::check::CheckError),
    /// A device cannot be used.
    #[error(transparent)]
    Device(#[from] crate::member::DeviceError),
    /// The configuration cannot be used. Each problem starts a line, so that editors find the place.
    #[error("the configuration cannot be used:\n{0}")]
    Config(#[from] crate::daemon::config::ConfigError),
    /// The daemon could not start, or not stop cleanly.
    #[error(transparent)]
    Run(#[from] crate::daemon::startup::error::RunError),
    /// A device was not attached or detached.
    #[error(transparent)]
    Attach(#[from] crate::attach::AttachError),
    /// The operation that was waited for failed, or did not exist.
    #[error("{0}")]
    Outcome(String),
    /// The command line is wrong, whatever the devices and the daemon are like.
    #[error("{0}")]
    Usage(String),
}

/// Exit code of a wrong command line; the parser uses the same.
const USAGE: u8 = 2;

impl CliError {
    /// The code that the process exits with.
    fn exit_code(&self) -> ExitCode {
        use crate::attach::{AttachError, DeviceError};
        use crate::daemon::startup::error::RunError;
        let is_usage = match self {
            CliError::Usage(_) => true,
            CliError::Create(error) | CliError::Run(RunError::Create(error)) => error.is_usage(),
            CliError::Attach(AttachError::Device(error)) => matches!(
                error,
                DeviceError::NotNbd { .. } | DeviceError::Partition { .. } | DeviceError::TooLarge { .. }
            ),
            _ => false,
        };
        if is_usage { USAGE.into() } else { ExitCode::FAILURE }
    }
}

type Outcome = Result<ExitCode, CliError>;

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    // Blocked before anything else: a reload that is requested before the daemon can handle it
    // waits, and does not end the process.
    let hangup = SigSet::from(Signal::SIGHUP);
    let was_blocked = SigSet::thread_get_mask().is_ok_and(|mask| mask.contains(Signal::SIGHUP));
    // This cannot fail with a valid set.
    let _ = hangup.thread_block();
    keep_file_size_errors();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            explain(&error);
            return USAGE.into();
        }
        // Help, or the version.
        Err(error) => error.exit(),
    };
    // The reader of a daemon's output may have gone long before the daemon ends.
    let serves = matches!(cli.command, args::Command::Up(_) | args::Command::Serve(_));
    let is_daemon = matches!(&cli.command, args::Command::Serve(args) if !args.check);
    if !is_daemon && !was_blocked {
        let _ = hangup.thread_unblock();
    }
    match commands::run(cli) {
        Ok(code) => code,
        // The reader of the output has gone: it has enough.
        Err(CliError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            if serves {
                say_at_once(&format!("calpe: {}\n", PrintableLines(&error.to_string())));
            } else {
                complain(&error);
            }
            error.exit_code()
        }
    }
}

/// Makes a write beyond the limit on the size of files (`ulimit -f`) fail with EFBIG, like a write
/// to a full filesystem. By default its signal, SIGXFSZ, ends the process in the middle of the
/// write. The signal is blocked, not ignored: threads inherit the mask, and a blocked SIGXFSZ has
/// no effect.
fn keep_file_size_errors() {
    // This cannot fail with a valid set.
    let _ = SigSet::from(Signal::SIGXFSZ).thread_block();
}

/// Prints what is wrong with a command line. The parser's message repeats arguments, which may be
/// names of files that a shell expanded. So the message is made from the same line with every
/// argument made printable, where that line is wrong, too.
fn explain(error: &clap::Error) {
    let arguments = std::env::args_os().map(|argument| Printable(&argument.to_string_lossy()).to_string());
    let printable = Cli::try_parse_from(arguments).err().filter(clap::Error::use_stderr);
    let text = printable.as_ref().unwrap_or(error).render().to_string();
    // Where standard error fails, there is no other place to report to.
    let _ = write!(io::stderr(), "{}", PrintableLines(&text));
}

/// Prints an error on standard error.
fn complain(error: &dyn std::error::Error) {
    tell(&error.to_string());
}

/// Prints a notice on standard error.
fn tell(text: &str) {
    // Where standard error fails, there is no other place to report to.
    let _ = writeln!(io::stderr(), "calpe: {}", PrintableLines(text));
}

/// Writes to standard output and flushes. Control characters in the text are made printable.
fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    write!(out, "{}", PrintableLines(text))?;
    out.flush()
}

/// Clears the terminal at standard output, and moves to its upper left corner.
fn clear_terminal() -> io::Result<()> {
    io::stdout().lock().write_all(b"\x1b[H\x1b[2J\x1b[3J")
}

/// Prints warnings, each on a line.
fn tell_warnings(warnings: &[String]) {
    warnings.iter().for_each(|warning| tell(warning));
}

/// Writes a JSON value, indented, and a newline.
fn say_json(value: &impl serde::Serialize) -> io::Result<()> {
    say_json_text(&serde_json::to_string_pretty(value)?)
}

/// Writes a JSON value on one line.
fn say_json_line(value: &impl serde::Serialize) -> io::Result<()> {
    say_json_text(&serde_json::to_string(value)?)
}

/// Writes JSON and a newline. JSON escapes the characters below a space by itself. The other
/// characters that a terminal acts upon occur only in strings, where their escapes mean the same.
fn say_json_text(json: &str) -> io::Result<()> {
    let mut text = String::with_capacity(json.len() + 1);
    for c in json.chars() {
        if c != '\n' && is_unprintable(c) {
            text.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            text.push(c);
        }
    }
    text.push('\n');
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
