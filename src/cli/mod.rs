//! The command line: parses, asks the daemon or looks at devices, prints. Owns standard output and the exit codes: 0
//! done, 1 error, 2 usage, and those of `status --test`. Must not know how arrays work.

mod args;
mod attach;
mod client;
mod commands;
mod offline;
mod run;
mod text;
mod wait;

pub use args::Cli;

use clap::Parser;
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
}

type Outcome = Result<ExitCode, CliError>;

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    match commands::run(cli) {
        Ok(code) => code,
        // Whoever reads our output has enough of it.
        Err(CliError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Prints an error on standard error, its causes after it.
fn complain(error: &dyn std::error::Error) {
    // Where standard error fails there is nobody left to tell.
    let _ = writeln!(io::stderr(), "calpe: {error}");
}

/// Writes to standard output at once.
fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Prints what a person should know besides, a line each.
fn tell_warnings(warnings: &[String]) {
    for warning in warnings {
        eprintln!("calpe: {warning}");
    }
}

/// Writes a JSON value, indented, and a newline.
fn say_json(value: &impl serde::Serialize) -> io::Result<()> {
    say(&(serde_json::to_string_pretty(value)? + "\n"))
}
