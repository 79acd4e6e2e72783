//! `up` and `serve`: the commands that become the daemon.

use super::args::{GpuHelperArgs, ServeArgs, UpArgs};
use super::{Outcome, say, tell};
use crate::daemon::config::{Config, ConfigError};
use crate::daemon::logging::{self, LogFormat};
use crate::daemon::reactor::network_places;
use crate::daemon::startup::panic::end_process_on_panic;
use crate::daemon::startup::reload::certificate_advice;
use crate::daemon::startup::serve::run_serve;
use crate::daemon::startup::up::{UpOptions, run_up};
use calpe_core::units::shown;
use calpe_gpu::helper;
use calpe_host::reclaim;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use tracing::level_filters::LevelFilter;

/// The configuration that is used when none is named, if it exists.
const SYSTEM_CONFIG: &str = "/etc/calpe/calpe.toml";

/// `calpe up`. Its sockets are in its directory, where the other commands find them.
pub(super) fn up(args: UpArgs, log_format: Option<LogFormat>) -> Outcome {
    let log_format = log_format.unwrap_or_default();
    let _log = logging::start_queued(log_format, LevelFilter::INFO);
    end_process_on_panic(log_format);
    let UpArgs { data, parity, size, chunk, lanes, volume, checksum, gpu, dir, force } = args;
    let options = UpOptions { dir, data, parity, size, chunk, lanes, volume, checksum, gpu, force };
    run_up(&options, &mut io::stdout())?;
    Ok(ExitCode::SUCCESS)
}

/// The process in which a daemon uses a GPU.
pub(super) fn gpu_helper(args: &GpuHelperArgs) -> ! {
    logging::start_for_another();
    if args.locked && !reclaim::lock() {
        tracing::debug!("its memory is not locked");
    }
    helper::serve(args.daemon)
}

/// `calpe serve`. Options override the configuration.
pub(super) fn serve(args: ServeArgs, socket: Option<PathBuf>, log_format: Option<LogFormat>) -> Outcome {
    let file = args.config.or_else(|| Some(PathBuf::from(SYSTEM_CONFIG)).filter(|file| file.exists()));
    let check = args.check;
    let name = file.as_ref().map_or("built-in configuration".to_owned(), |file| shown(file).to_string());
    let read = move || -> Result<Config, ConfigError> {
        // A file that did not exist at the start may exist at a reload; one that existed must still
        // exist.
        let file = file.clone().or_else(|| Some(PathBuf::from(SYSTEM_CONFIG)).filter(|file| file.exists()));
        let mut config = file.map_or_else(|| Ok(Config::default()), |file| Config::load(&file))?;
        if let Some(socket) = &socket {
            config.set_control_socket(socket)?;
        }
        Ok(config)
    };
    let config = read()?;
    if check {
        say(&format!("{name}: valid\n"))?;
        if config.listen.tcp.is_some() && config.listen.unix.is_some() {
            let most = config.listen.max_connections as usize;
            say(&places(most))?;
        }
        // These are warnings: a daemon starts with this configuration.
        match certificate_advice(&config) {
            Ok(advice) => advice.iter().for_each(|line| tell(&format!("warning: {line}"))),
            Err(error) => tell(&format!("warning: cannot tell when certificates end: {error}")),
        }
        return Ok(ExitCode::SUCCESS);
    }
    let log_format = log_format.or(config.daemon.log_format).unwrap_or_default();
    let _log = logging::start_queued(log_format, LevelFilter::INFO);
    end_process_on_panic(log_format);
    run_serve(&config, &read)?;
    Ok(ExitCode::SUCCESS)
}

/// One line about how the places for clients are shared between the sockets.
fn places(most: usize) -> String {
    let network = network_places(most);
    match most - network {
        0 => "1 NBD connection (max_connections): none is kept for the unix socket, whose clients wait while a TCP client has it\n".into(),
        _ => format!(
            "of {most} NBD connections (max_connections), {network} at most are of TCP clients; the rest is kept for the unix socket\n"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_kept_for_the_unix_socket_where_there_are_two() {
        assert!(places(1).contains("none is kept for the unix socket"));
        assert!(places(2).starts_with("of 2 NBD connections (max_connections), 1 at most"));
    }
}
