//! `up` and `serve`: the commands that become the daemon.

use super::args::{ServeArgs, UpArgs};
use super::{CliError, Outcome, say};
use crate::daemon::config::{Config, LogFormat};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The configuration when none is named, if it exists.
const SYSTEM_CONFIG: &str = "/etc/calpe/calpe.toml";

/// `calpe up`.
pub(super) fn up(_args: UpArgs, _socket: Option<&Path>, _log_format: Option<LogFormat>) -> Outcome {
    Err(CliError::Outcome("pending".into()))
}

/// `calpe serve`.
pub(super) fn serve(args: ServeArgs, _socket: Option<&Path>, _log_format: Option<LogFormat>) -> Outcome {
    let file = args.config.or_else(|| Some(PathBuf::from(SYSTEM_CONFIG)).filter(|file| file.exists()));
    let _config = match &file {
        Some(file) => Config::load(file)?,
        None => Config::default(),
    };
    if args.check {
        let name =
            file.map_or_else(|| "built-in configuration".to_owned(), |file| file.display().to_string());
        say(&format!("{name}: valid\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    Err(CliError::Outcome("pending".into()))
}
