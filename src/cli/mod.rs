//! The command line: parses, asks the daemon or looks at devices, prints. Owns standard output and the exit codes: 0
//! done, 1 error, 2 usage, and those of `status --test`. Must not know how arrays work.

mod args;
mod attach;
mod client;
mod commands;
mod offline;
mod paths;
mod run;
mod text;
mod wait;

pub use args::Cli;

use crate::daemon::panic::say_at_once;
use calpe_core::units::{Printable, PrintableLines, is_unprintable};
use clap::Parser;
use nix::sys::signal::{SigSet, Signal};
use std::io::{self, Write};
use std::process::ExitCode;

/// An error for the person at the command line.
#[derive(Debug, thiserror::Error)]
enum CliError {
    /// From the daemon, or on the way to it.
    #[error(transparent)]
    Client(#[from] client::ClientError),
    /// Standard output failed.
    #[error("cannot write to standard output: {0}")]
    Output(#[from] io::Error),
    /// An array cannot be created.
    #[error(transparent)]
    Create(#[from] crate::daemon::create::CreateError),
    /// Nothing can be said about an array.
    #[error(transparent)]
    Check(#[from] crate::daemon::check::CheckError),
    /// A device cannot be used.
    #[error(transparent)]
    Device(#[from] crate::member::DeviceError),
    /// The configuration cannot be used. Its problems start their lines, so that editors find the places.
    #[error("the configuration cannot be used:\n{0}")]
    Config(#[from] crate::daemon::config::ConfigError),
    /// The daemon could not start, or not stop cleanly.
    #[error(transparent)]
    Run(#[from] crate::daemon::serve::RunError),
    /// A device was not attached or detached.
    #[error(transparent)]
    Attach(#[from] crate::attach::AttachError),
    /// What was waited for did not end well, or was not there.
    #[error("{0}")]
    Outcome(String),
    /// What was written on the command line cannot be meant, whatever the devices and the daemon are like.
    #[error("{0}")]
    Usage(String),
}

/// Exit code of a command line that cannot be meant; the parser's own, too.
const USAGE: u8 = 2;

impl CliError {
    /// The code that the process exits with.
    fn exit_code(&self) -> ExitCode {
        use crate::attach::{AttachError, DeviceError};
        use crate::daemon::serve::RunError;
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
    // The first of all: a reload that is asked for before the daemon can take it waits, and ends nothing.
    let hangup = SigSet::from(Signal::SIGHUP);
    let was_blocked = SigSet::thread_get_mask().is_ok_and(|mask| mask.contains(Signal::SIGHUP));
    // Cannot fail with a valid set.
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
    // Whoever reads what a daemon says may have stopped long before its end.
    let serves = matches!(cli.command, args::Command::Up(_) | args::Command::Serve(_));
    let is_daemon = matches!(&cli.command, args::Command::Serve(args) if !args.check);
    if !is_daemon && !was_blocked {
        let _ = hangup.thread_unblock();
    }
    match commands::run(cli) {
        Ok(code) => code,
        // Whoever reads our output has enough of it.
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

/// Has a write beyond the limit on the size of files (`ulimit -f`) give an error, EFBIG, as a full filesystem does: by default
/// its signal ends the process in the middle of what it writes. It is blocked, not ignored: a blocked one is inherited by
/// threads, and does nothing.
fn keep_file_size_errors() {
    // Cannot fail with a valid set.
    let _ = SigSet::from(Signal::SIGXFSZ).thread_block();
}

/// Prints what is wrong with a command line. It repeats what was written, which may be the name of a file that a shell put
/// there: it is told of the same line with every argument made printable, where that has an error, too.
fn explain(error: &clap::Error) {
    let arguments = std::env::args_os().map(|argument| Printable(&argument.to_string_lossy()).to_string());
    let printable = Cli::try_parse_from(arguments).err().filter(clap::Error::use_stderr);
    let text = printable.as_ref().unwrap_or(error).render().to_string();
    // Where standard error fails there is nobody left to tell.
    let _ = write!(io::stderr(), "{}", PrintableLines(&text));
}

/// Prints an error on standard error.
fn complain(error: &dyn std::error::Error) {
    tell(&error.to_string());
}

/// Prints what a person should know on standard error.
fn tell(text: &str) {
    // Where standard error fails there is nobody left to tell.
    let _ = writeln!(io::stderr(), "calpe: {}", PrintableLines(text));
}

/// Writes to standard output at once. Whatever is in the text, it cannot steer a terminal.
fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    write!(out, "{}", PrintableLines(text))?;
    out.flush()
}

/// Clears the terminal that standard output is, and goes to its upper left corner.
fn clear_terminal() -> io::Result<()> {
    io::stdout().lock().write_all(b"\x1b[H\x1b[2J\x1b[3J")
}

/// Prints what a person should know besides, each on a line.
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

/// Writes JSON and a newline. JSON escapes what is below a space by itself; the other characters that a terminal would act
/// upon can stand in texts alone, where their escapes mean the same.
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
