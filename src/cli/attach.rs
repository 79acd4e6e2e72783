//! `attach` and `detach`: what to attach, which process stays as the keeper, and the list of attached
//! devices.
//!
//! Unless told to stay in the foreground, `attach` starts itself once more as the keeper, in a
//! session of its own, and waits for one line of JSON that tells whether the keeper attached the
//! device.

use super::args::{AttachArgs, DetachArgs};
use super::client::{Client, ClientError, Server};
use super::{CliError, Outcome, say, say_json, say_json_line, tell_warnings};
use crate::attach as devices;
use crate::attach::{
    Attachment, DeviceIndex, Directory, Host, Kept, LookupError, Options, StateDir, StateError, Target,
};
use crate::control::{ArrayReport, ErrorCode};
use crate::daemon::logging;
use crate::daemon::logging::LogFormat;
use calpe_core::nbd::UriError;
use calpe_core::units::HumanSize;
use calpe_host::reclaim;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;
use tracing::level_filters::LevelFilter;

/// Finds the daemon anew for each question: it may have been restarted in between.
struct Daemons {
    /// The socket named on the command line.
    socket: Option<PathBuf>,
    /// How long the daemon may take to answer.
    patience: Duration,
    /// Where a daemon was found, and which user it may belong to.
    server: Option<Server>,
}

impl Directory for Daemons {
    fn find(&mut self, array: &str) -> Result<ArrayReport, LookupError> {
        let server = match &self.server {
            Some(server) => Ok(server.clone()),
            None => Server::choose(self.socket.as_deref(), self.patience),
        };
        let mut client =
            server.and_then(Client::open).map_err(|error| LookupError::Daemon(error.to_string()))?;
        // From now on only this daemon and its successors are asked, not whichever comes first.
        self.server.get_or_insert_with(|| client.server().clone());
        let status = client.status(Some(array)).map_err(|error| match error {
            ClientError::Refused(refused) if refused.code == ErrorCode::NoSuchArray => {
                LookupError::NoArray(refused.message)
            }
            other => LookupError::Daemon(other.to_string()),
        })?;
        let none = || LookupError::NoArray(format!("no array '{array}'"));
        let report = status.arrays.into_iter().next().ok_or_else(none)?;
        match report.start {
            Some(_) => Err(LookupError::NoArray(format!("array '{array}': {}", report.status))),
            None => Ok(report),
        }
    }
}

/// How the keeper began.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Begun {
    /// The device was attached.
    Done {
        /// The line to print.
        line: String,
        /// Warnings, a line each.
        warnings: Vec<String>,
    },
    /// It was not; the error.
    Failed(String),
}

/// `calpe attach`.
pub(super) fn attach(
    args: AttachArgs,
    socket: Option<PathBuf>,
    patience: Duration,
    log_format: Option<LogFormat>,
) -> Outcome {
    let stays = args.foreground || args.keeper;
    let level = if stays && !args.dry_run { LevelFilter::INFO } else { LevelFilter::WARN };
    let log_format = log_format.unwrap_or_default();
    // A keeper that waited for its log would keep all users of the device waiting.
    let _log = stays.then(|| logging::start_queued(log_format, level));
    logging::start(log_format, level);
    let (Some(name), Some(device)) = (&args.name, &args.device) else {
        return list(&StateDir::new(&args.state_dir), args.json);
    };
    let host = Host::default();
    let state = StateDir::new(&args.state_dir);
    let target = if name.contains("://") {
        let unusable = |error: UriError| CliError::Usage(error.to_string());
        Target::Uri(name.parse().map_err(unusable)?)
    } else {
        Target::Array(name.clone())
    };
    let options = Options {
        device: host.device(device).map_err(devices::AttachError::from)?,
        target,
        connections: args.connections,
        timeout_s: args.timeout,
        dead_timeout_s: args.dead_timeout,
        read_only: args.read_only,
        block_size: args.block_size.map(|size| size.0),
        wait_s: args.wait,
    };
    let socket = socket.map(std::path::absolute).transpose()?;
    let mut directory = Daemons { socket, patience, server: None };
    if args.dry_run {
        let plan = devices::plan(&host, &options, &mut directory)?;
        tell_warnings(&plan.warnings());
        say(&format!("{}\n", plan.describe(false)))?;
        return Ok(ExitCode::SUCCESS);
    }
    if !stays {
        return in_background(&state, options.device);
    }
    if args.keeper {
        // Leave the terminal and its signals. This fails only for a process that leads a group
        // already.
        let _ = nix::unistd::setsid();
    }
    let protection = reclaim::protect();
    let begun = Attachment::start(&host, &state, &options, &mut directory);
    if args.keeper {
        let word = match &begun {
            Ok(attachment) => Begun::Done { line: attachment.describe(), warnings: attachment.warnings() },
            Err(error) => Begun::Failed(error.to_string()),
        };
        say_json_line(&word)?;
        leave_standard_output()?;
    }
    let attachment = begun?;
    tracing::info!("{}", attachment.describe());
    attachment.warnings().iter().for_each(|warning| tracing::warn!("{warning}"));
    if !protection.missing.is_empty() {
        tracing::warn!("memory reclaim may wait for this keeper: {protection}");
    }
    if args.foreground {
        say(&format!("{}\n", attachment.describe()))?;
    }
    // An error means that there is no supervisor.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    devices::keep(attachment, &mut directory)?;
    Ok(ExitCode::SUCCESS)
}

/// Closes the pipe to the process that started this keeper.
fn leave_standard_output() -> io::Result<()> {
    let nothing = OpenOptions::new().write(true).open("/dev/null")?;
    nix::unistd::dup2_stdout(&nothing)?;
    Ok(())
}

/// Starts this command once more as the keeper, and waits until the keeper has attached the device
/// or failed.
fn in_background(state: &StateDir, device: DeviceIndex) -> Outcome {
    state.create().map_err(devices::AttachError::from)?;
    let log = state.log(device);
    let system = |error: io::Error| CliError::Outcome(format!("cannot start the keeper: {error}"));
    let file: File = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&log)
        .map_err(|source| devices::AttachError::from(StateError::Io { path: log.clone(), source }))?;
    let mut keeper = Command::new(std::env::current_exe().map_err(system)?)
        .args(std::env::args_os().skip(1))
        .arg("--keeper")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(file)
        .spawn()
        .map_err(system)?;
    let mut line = String::new();
    if let Some(stdout) = keeper.stdout.take() {
        BufReader::new(stdout).read_line(&mut line)?;
    }
    match serde_json::from_str(&line) {
        Ok(Begun::Done { line, warnings }) => {
            tell_warnings(&warnings);
            say(&format!("{line}\n"))?;
            Ok(ExitCode::SUCCESS)
        }
        Ok(Begun::Failed(error)) => Err(CliError::Outcome(error)),
        Err(_) => Err(CliError::Outcome(format!("the keeper ended at once: its log is {}", log.display()))),
    }
}

/// `calpe detach`.
pub(super) fn detach(args: &DetachArgs) -> Outcome {
    let host = Host::default();
    let device = host.device(&args.device).map_err(devices::AttachError::from)?;
    let plan = devices::plan_detach(&host, device)?;
    let line = if args.dry_run {
        plan.describe(false)
    } else {
        devices::detach(&host, &StateDir::new(&args.state_dir), plan)?
    };
    say(&format!("{line}\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// One attached device, as `attach` lists it.
#[derive(Debug, Serialize)]
struct Listed {
    device: String,
    /// What is attached, as far as the kernel shows it.
    backend: Option<String>,
    /// Bytes.
    size: u64,
    read_only: bool,
    /// Process of its keeper; none when it has none.
    keeper: Option<u32>,
    /// Whether requests wait for the daemon.
    waiting: bool,
    /// Its users.
    users: Vec<String>,
}

fn list(state: &StateDir, json: bool) -> Outcome {
    let host = Host::default();
    let mut listed = Vec::new();
    for device in host.devices() {
        let Some(attached) = host.attached(device) else { continue };
        let kept: Option<Kept> = if state.is_kept(device) {
            state.read(device).map_err(devices::AttachError::from)?
        } else {
            None
        };
        listed.push(Listed {
            device: device.to_string(),
            backend: attached.backend,
            size: attached.size,
            read_only: attached.read_only,
            keeper: kept.as_ref().map(|kept| kept.keeper),
            waiting: kept.is_some_and(|kept| kept.waiting),
            users: host.holders(device),
        });
    }
    if json {
        say_json(&listed)?;
    } else {
        say(&table(&listed))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(listed: &[Listed]) -> String {
    if listed.is_empty() {
        return "nothing is attached\n".into();
    }
    let mut text = String::new();
    for device in listed {
        let keeper = match (device.keeper, device.waiting) {
            (None, _) => "no keeper".to_owned(),
            (Some(pid), false) => format!("kept by process {pid}"),
            (Some(pid), true) => format!("kept by process {pid}, waiting for the daemon"),
        };
        let mode = if device.read_only { ", read-only" } else { "" };
        let backend = device.backend.as_deref().unwrap_or("unknown");
        let size = HumanSize(device.size);
        // Writing to a string cannot fail.
        let _ = write!(text, "{:<12} {backend}  {size}{mode}  {keeper}", device.device);
        for user in &device.users {
            let _ = write!(text, "  {user}");
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_says_what_is_attached_and_who_keeps_it() {
        let device = |keeper, waiting| Listed {
            device: "/dev/nbd0".into(),
            backend: Some("calpe:uuid/tank".into()),
            size: 1 << 30,
            read_only: false,
            keeper,
            waiting,
            users: vec!["mounted on /srv".into()],
        };
        let text = table(&[device(Some(7), false)]);
        assert_eq!(text, "/dev/nbd0    calpe:uuid/tank  1 GiB  kept by process 7  mounted on /srv\n");
        assert!(table(&[device(Some(7), true)]).contains("waiting for the daemon"));
        assert!(table(&[device(None, false)]).contains("no keeper"));
        assert_eq!(table(&[]), "nothing is attached\n");
    }

    #[test]
    fn the_keeper_and_who_started_it_understand_each_other() {
        let text = serde_json::to_string(&Begun::Failed("no".into())).unwrap();
        assert!(matches!(serde_json::from_str(&text), Ok(Begun::Failed(error)) if error == "no"));
    }
}
