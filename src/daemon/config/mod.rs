//! The configuration file of `calpe serve`: TOML, read and validated whole before anything starts.
//!
//! Every problem is reported with file, line, column and key, all of them at once, so that one edit can fix
//! the file. Unknown keys are problems: a mistyped limit must not silently have no effect. Relative paths are
//! relative to the file. conf/calpe.toml is the commented example, and a test keeps it true. Reads nothing
//! but the file and the TLS files that it names; must not know whether sockets can be bound or arrays found.

mod reader;
mod sockets;
mod tls;

pub(crate) use reader::Problem;
pub(crate) use sockets::SocketFault;
pub(crate) use tls::ListenTlsConfig;

use reader::{Reader, Section, absolute, boolean, expected, integer, string};

use super::host_memory;
use super::logging::LogFormat;
use super::state::DEFAULT_STATE_DIR;
use crate::member::{DEFAULT_MEMBER_TIMEOUT, RemoteLimits, TimeLimits, is_remote};
use crate::tls::{ClientFiles, PeerRules};
use calpe_core::array::FullStripe;
use calpe_core::nbd::NbdUri;
use calpe_core::units::{shown, two_sizes};
use calpe_gpu::{GpuConfig, Mode};
use calpe_host::files::{self, ReadError, Source};
use calpe_host::reclaim;
use std::collections::HashSet;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use uuid::Uuid;

/// Where `serve` keeps its sockets when nothing is configured.
pub(crate) const DEFAULT_RUNTIME_DIR: &str = "/run/calpe";
/// Name of the control socket in the runtime directory.
pub(crate) const CONTROL_SOCKET_NAME: &str = "control.sock";
/// Name of the NBD socket in the runtime directory.
pub(crate) const NBD_SOCKET_NAME: &str = "nbd.sock";

/// Name of the state directory in a runtime directory that is not that of the system.
pub(crate) const STATE_DIR_NAME: &str = "state";

/// Memory for requests when nothing is configured: a few dozen of the largest requests.
pub(crate) const DEFAULT_MEMORY: u64 = 256 << 20;
/// Less memory than this could not hold one full-stripe write of a wide array.
pub(crate) const MIN_MEMORY: u64 = 32 << 20;
/// With less memory for metadata, no useful page cache fits.
const MIN_METADATA_MEMORY: u64 = 4 << 20;
/// More memory than this is a mistyped suffix.
pub(crate) const MAX_MEMORY: u64 = 1 << 40;

/// NBD connections when nothing is configured.
pub(crate) const DEFAULT_CONNECTIONS: u32 = 100;
/// Each connection costs a file descriptor and some memory; this many is beyond any client known.
pub(crate) const MAX_CONNECTIONS: u32 = 10_000;

/// Most threads that serve clients.
pub(crate) const MAX_REACTORS: usize = 256;

/// A slower rebuild would practically never end.
pub(crate) const MIN_REBUILD_RATE: u64 = 1 << 20;

/// With a smaller page cache, a few dozen requests at once would read the same pages again and
/// again.
pub(crate) const MIN_PAGE_CACHE: u64 = 1 << 20;

/// Keys of a section `[[array]]`.
const ARRAY_KEYS: [&str; 13] = [
    "name",
    "uuid",
    "search",
    "read_only",
    "rebuild_min",
    "rebuild_max",
    "full_stripe",
    "page_cache",
    "member_timeout",
    "remote_timeout",
    "remote_grace",
    "tls_allow",
    "tls_allow_read_only",
];

/// Longest configurable time limit of an operation on a member, in seconds: clients give up
/// earlier.
const MAX_MEMBER_SECONDS: i128 = 600;

/// Longest file that is read: nobody writes a longer one on purpose.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The whole configuration.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    /// The daemon as such.
    pub daemon: DaemonConfig,
    /// Where NBD clients connect.
    pub listen: ListenConfig,
    /// Which GPUs are used, and how.
    pub gpu: GpuConfig,
    /// The files of TLS for connections to remote members.
    pub remote: Option<ClientFiles>,
    /// Arrays to import at start.
    pub arrays: Vec<ArrayConfig>,
}

/// Section `[daemon]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DaemonConfig {
    /// Directory of the sockets; created if missing.
    pub runtime_dir: PathBuf,
    /// Directory of what is remembered across restarts; created if missing.
    pub state_dir: PathBuf,
    /// Where administrators connect.
    pub control_socket: PathBuf,
    /// Bytes of memory for requests in flight.
    pub memory: u64,
    /// Bytes of memory for stripe maps and page caches; none for half of the host's.
    pub metadata_memory: Option<u64>,
    /// Threads that serve clients; none: as many as the cores allow.
    pub reactors: Option<usize>,
    /// Whether the daemon is protected against waiting for itself when memory is short.
    pub reclaim_safe: reclaim::Mode,
    /// Form of the log; none when the file does not say.
    pub log_format: Option<LogFormat>,
}

/// Section `[listen]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListenConfig {
    /// A unix socket; none only when `tcp` alone is configured.
    pub unix: Option<PathBuf>,
    /// A TCP address.
    pub tcp: Option<SocketAddr>,
    /// Whether a TCP address that is not loopback may go without TLS and client certificates.
    pub plaintext: bool,
    /// TLS of the clients; none without a certificate.
    pub tls: Option<ListenTlsConfig>,
    /// NBD connections at one time.
    pub max_connections: u32,
}

/// One section `[[array]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ArrayConfig {
    /// Which array.
    pub which: ArrayChoice,
    /// Directories, devices and URIs to look for its members in.
    pub search: Vec<PathBuf>,
    /// Offer it to clients for reading only.
    pub read_only: bool,
    /// Bytes a second that a rebuild or scrub takes even when clients are busy; none for the
    /// built-in floor.
    pub rebuild_min: Option<u64>,
    /// Bytes a second that it takes at most; none for no ceiling.
    pub rebuild_max: Option<u64>,
    /// What is done with writes of whole stripes; none for what suits the members.
    pub full_stripe: Option<FullStripe>,
    /// Bytes of memory for checksums and stripe map; none for the built-in amount.
    pub page_cache: Option<u64>,
    /// How patient to be with members.
    pub limits: TimeLimits,
    /// Which clients' certificates may use it; none: all of the CA.
    pub rules: Option<Arc<PeerRules>>,
}

/// How an array is chosen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ArrayChoice {
    /// By its name.
    Name(String),
    /// By its identity.
    Uuid(Uuid),
}

impl ArrayChoice {
    /// Whether it is the array of this name and identity that is chosen.
    #[must_use]
    pub(crate) fn means(&self, name: &str, uuid: Uuid) -> bool {
        match self {
            ArrayChoice::Name(own) => own == name,
            ArrayChoice::Uuid(own) => *own == uuid,
        }
    }
}

impl fmt::Display for ArrayChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ArrayChoice::Name(name) => name.fmt(f),
            ArrayChoice::Uuid(uuid) => uuid.fmt(f),
        }
    }
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot read the configuration: {source}", shown(file))]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        source: ReadError,
    },
    /// The file is not a configuration.
    #[error("{}", list(file, problems))]
    Invalid {
        /// The file.
        file: PathBuf,
        /// Everything that is wrong, in order of place.
        problems: Vec<Problem>,
    },
    /// The control socket of the command line does not go with the file.
    #[error("--socket: {0}")]
    ControlSocket(SocketFault),
}

fn list(file: &Path, problems: &[Problem]) -> String {
    let line = |p: &Problem| {
        let key = if p.key.is_empty() { String::new() } else { format!("{}: ", p.key) };
        format!("{}:{}:{}: {key}{}", shown(file), p.line, p.column, p.message)
    };
    problems.iter().map(line).collect::<Vec<_>>().join("\n")
}

impl Default for Config {
    /// What an empty file means.
    fn default() -> Config {
        Config::parse("", Path::new("/")).expect("an empty configuration is valid")
    }
}

impl Config {
    /// Reads and validates a file.
    ///
    /// # Errors
    /// When it cannot be read, or with everything that is wrong in it.
    pub(crate) fn load(file: &Path) -> Result<Config, ConfigError> {
        let unreadable = |source| ConfigError::Unreadable { file: file.into(), source };
        let bytes = files::read(file, Source::FileOrPipe, MAX_FILE_BYTES).map_err(unreadable)?;
        let text = String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            unreadable(io::Error::other(format!("it is not a text: byte {at} is not UTF-8")).into())
        })?;
        let absolute = std::path::absolute(file).map_err(|error| unreadable(error.into()))?;
        let dir = absolute.parent().unwrap_or(Path::new("/"));
        let invalid = |problems| ConfigError::Invalid { file: file.into(), problems };
        Config::read(&text, dir, true).map_err(invalid)
    }

    /// Validates a text, but not the files that it names; relative paths are relative to `dir`.
    ///
    /// # Errors
    /// Everything that is wrong, in order of place.
    pub(crate) fn parse(text: &str, dir: &Path) -> Result<Config, Vec<Problem>> {
        Config::read(text, dir, false)
    }

    /// Moves the control socket to another path than the file's.
    ///
    /// # Errors
    /// When it cannot be there.
    pub(crate) fn set_control_socket(&mut self, path: &Path) -> Result<(), ConfigError> {
        self.daemon.control_socket = path.into();
        sockets::check_length(path)
            .and_then(|()| sockets::check_apart(path, self.listen.unix.as_deref(), true))
            .map_err(ConfigError::ControlSocket)
    }

    fn read(text: &str, dir: &Path, open_files: bool) -> Result<Config, Vec<Problem>> {
        let mut reader = Reader { text, dir, open_files, problems: Vec::new() };
        let (root, errors) = DeTable::parse_recoverable(text);
        for error in errors {
            reader.problem(error.span().unwrap_or_default().start, "", error.message());
        }
        // If the text is not TOML, its keys are not interpreted: that would be guessing.
        let config = reader.problems.is_empty().then(|| reader.config(root.get_ref()));
        reader.problems.sort_by_key(|problem| (problem.line, problem.column));
        config.filter(|_| reader.problems.is_empty()).ok_or(reader.problems)
    }
}

impl Reader<'_> {
    fn config(&mut self, root: &DeTable<'_>) -> Config {
        let root = Section { name: String::new(), table: root, at: 0 };
        self.known(&root, &["daemon", "listen", "gpu", "remote", "array"]);
        let daemon = self.section(&root, "daemon");
        let listen = self.section(&root, "listen");
        let daemon = self.daemon(daemon.as_ref());
        let listen = self.listen(listen.as_ref(), &daemon.runtime_dir);
        self.check_sockets(&root, &daemon.control_socket, listen.unix.as_deref());
        let gpu = self.section(&root, "gpu");
        let gpu = self.gpu(gpu.as_ref());
        let remote = self.section(&root, "remote").and_then(|section| self.remote(&section));
        let client_ca = listen.tls.as_ref().is_some_and(|tls| tls.files.client_ca.is_some());
        let arrays = self.arrays(&root, client_ca);
        Config { listen, daemon, gpu, remote, arrays }
    }

    fn gpu(&mut self, section: Option<&Section<'_, '_>>) -> GpuConfig {
        let mut gpu = GpuConfig::default();
        let Some(section) = section else { return gpu };
        self.known(section, &["mode", "devices", "verify"]);
        if let Some(mode) = self.value(section, "mode", |value| gpu_mode(string(value)?)) {
            gpu.mode = mode;
        }
        if let Some(devices) = self.value(section, "devices", |value| {
            let list = value.as_array().ok_or_else(|| expected("a list of numbers like [0, 1]", value))?;
            list.iter()
                .map(|item| {
                    let number = integer(item.get_ref())?;
                    usize::try_from(number).map_err(|_| format!("{number} is not the number of a GPU"))
                })
                .collect::<Result<Vec<usize>, String>>()
        }) {
            gpu.devices = devices;
        }
        if let Some(share) = self.value(section, "verify", |value| {
            let share = match value.as_float() {
                Some(float) => float.as_str().parse().map_err(|_| format!("{float} is not a number"))?,
                None if value.as_integer().is_none() => {
                    return Err(expected("a number from 0 to 1, like 0.1", value));
                }
                None => integer(value)? as f64,
            };
            if (0.0..=1.0).contains(&share) {
                Ok(share)
            } else {
                Err(format!("{share} is out of range: it is a share, 0 to 1"))
            }
        }) {
            gpu.verify = share;
        }
        gpu
    }

    fn daemon(&mut self, section: Option<&Section<'_, '_>>) -> DaemonConfig {
        let runtime_dir = PathBuf::from(DEFAULT_RUNTIME_DIR);
        let mut daemon = DaemonConfig {
            control_socket: runtime_dir.join(CONTROL_SOCKET_NAME),
            runtime_dir,
            state_dir: DEFAULT_STATE_DIR.into(),
            memory: DEFAULT_MEMORY,
            metadata_memory: None,
            reactors: None,
            reclaim_safe: reclaim::Mode::default(),
            log_format: None,
        };
        let Some(section) = section else { return daemon };
        self.known(
            section,
            &[
                "runtime_dir",
                "state_dir",
                "control_socket",
                "memory",
                "metadata_memory",
                "reactors",
                "reclaim_safe",
                "log_format",
            ],
        );
        if let Some(dir) = self.path(section, "runtime_dir") {
            daemon.control_socket = dir.join(CONTROL_SOCKET_NAME);
            if dir != Path::new(DEFAULT_RUNTIME_DIR) {
                // This daemon runs beside that of the system, and has a state directory of its own.
                daemon.state_dir = dir.join(STATE_DIR_NAME);
            }
            daemon.runtime_dir = dir;
        }
        if let Some(dir) = self.path(section, "state_dir") {
            daemon.state_dir = dir;
        }
        if let Some(path) = self.socket_path(section, "control_socket") {
            daemon.control_socket = path;
        }
        let host = host_memory::bytes();
        if let Some(bytes) = self.memory(section, "memory", MIN_MEMORY, host) {
            daemon.memory = bytes;
        }
        daemon.metadata_memory = self.memory(section, "metadata_memory", MIN_METADATA_MEMORY, host);
        daemon.reactors = self.value(section, "reactors", |value| {
            let count = integer(value)?;
            let in_range = usize::try_from(count).ok().filter(|count| (1..=MAX_REACTORS).contains(count));
            in_range.ok_or_else(|| format!("{count} is out of range: use 1 to {MAX_REACTORS}"))
        });
        if let Some(mode) = self.value(section, "reclaim_safe", reclaim_safe) {
            daemon.reclaim_safe = mode;
        }
        daemon.log_format =
            self.value(section, "log_format", |value| string(value).and_then(|text| text.parse()));
        daemon
    }

    /// An amount of memory; no more than the `host` has for this process.
    fn memory(&mut self, section: &Section<'_, '_>, key: &str, min: u64, host: u64) -> Option<u64> {
        let bytes = self.size(section, key, min, MAX_MEMORY)?;
        if bytes <= host {
            return Some(bytes);
        }
        let (told, has) = two_sizes(bytes, host);
        let what = format!("{told} is more than the {has} that this process can have here: use less");
        self.value(section, key, |_| Err::<u64, _>(what))
    }

    fn listen(&mut self, section: Option<&Section<'_, '_>>, runtime_dir: &Path) -> ListenConfig {
        let default_unix = runtime_dir.join(NBD_SOCKET_NAME);
        let mut listen = ListenConfig {
            unix: None,
            tcp: None,
            plaintext: false,
            tls: None,
            max_connections: DEFAULT_CONNECTIONS,
        };
        if let Some(section) = section {
            self.known(section, &tls::LISTEN_KEYS);
            listen.tls = self.listen_tls(section);
            listen.unix = self.socket_path(section, "unix");
            let plaintext = self.value(section, "plaintext", boolean).unwrap_or(false);
            let safe = listen.tls.as_ref().is_some_and(ListenTlsConfig::is_safe_beyond_loopback);
            listen.plaintext = plaintext;
            listen.tcp = self.value(section, "tcp", |value| {
                let text = string(value)?;
                let address: SocketAddr = text.parse().map_err(|_| {
                    format!("'{text}' is not an address and port: write it like 127.0.0.1:10809 or [::1]:10809")
                })?;
                if address.ip().to_canonical().is_loopback() || plaintext || safe {
                    Ok(address)
                } else {
                    Err(format!(
                        "{address} is not a loopback address, and everybody who reaches it could read and write every volume: listen on loopback, or demand TLS with client certificates (tls_certificate, tls_key, tls_client_ca), or allow it with plaintext = true"
                    ))
                }
            });
            if let Some(count) = self.value(section, "max_connections", |value| {
                let count = integer(value)?;
                u32::try_from(count)
                    .ok()
                    .filter(|count| (1..=MAX_CONNECTIONS).contains(count))
                    .ok_or_else(|| format!("{count} is out of range: use 1 to {MAX_CONNECTIONS}"))
            }) {
                listen.max_connections = count;
            }
        }
        if listen.unix.is_none() && listen.tcp.is_none() {
            listen.unix = Some(default_unix);
        }
        listen
    }

    /// `client_ca`: whether clients show certificates.
    fn arrays(&mut self, root: &Section<'_, '_>, client_ca: bool) -> Vec<ArrayConfig> {
        let Some(value) = root.table.get("array") else { return Vec::new() };
        let Some(list) = value.get_ref().as_array() else {
            self.problem(value.span().start, "array", "write each array as a section of its own: [[array]]");
            return Vec::new();
        };
        let mut seen = HashSet::new();
        let mut arrays = Vec::new();
        for (index, item) in list.iter().enumerate() {
            let name = format!("array[{index}]");
            let at = item.span().start;
            match item.get_ref().as_table() {
                Some(table) => {
                    let section = Section { name: name + ".", table, at };
                    arrays.extend(self.array(&section, &mut seen, client_ca));
                }
                None => self.problem(at, &name, "write each array as a section of its own: [[array]]"),
            }
        }
        arrays
    }

    fn array(
        &mut self,
        section: &Section<'_, '_>,
        seen: &mut HashSet<ArrayChoice>,
        client_ca: bool,
    ) -> Option<ArrayConfig> {
        self.known(section, &ARRAY_KEYS);
        let name = self.value(section, "name", |value| {
            let name = string(value)?;
            calpe_core::format::check_array_name(name).map(|()| ArrayChoice::Name(name.to_owned()))
        });
        let uuid = self.value(section, "uuid", |value| {
            let text = string(value)?;
            text.parse().map(ArrayChoice::Uuid).map_err(|_| format!("'{text}' is not a uuid"))
        });
        let given = |key| section.table.get(key).map(Spanned::span);
        match (given("name"), given("uuid")) {
            (None, None) => {
                self.problem(section.at, section.name.trim_end_matches('.'), "needs a name or a uuid")
            }
            (Some(_), Some(uuid)) => self.problem(
                uuid.start,
                &format!("{}uuid", section.name),
                "name and uuid are both given: the uuid alone is enough",
            ),
            _ => {}
        }
        let search = self.search(section);
        let read_only = self.value(section, "read_only", boolean).unwrap_or(false);
        let rebuild_min = self.size(section, "rebuild_min", MIN_REBUILD_RATE, u64::MAX);
        let rebuild_max = self.size(section, "rebuild_max", MIN_REBUILD_RATE, u64::MAX);
        if let (Some(min), Some(max)) = (rebuild_min, rebuild_max)
            && min > max
        {
            let at = given("rebuild_max").unwrap_or_default().start;
            let (max, min) = two_sizes(max, min);
            let message = format!("is {max}, below rebuild_min, which is {min}");
            self.problem(at, &format!("{}rebuild_max", section.name), &message);
        }
        let full_stripe = self.value(section, "full_stripe", |value| full_stripe(string(value)?));
        let page_cache = self.size(section, "page_cache", MIN_PAGE_CACHE, MAX_MEMORY);
        let local = self.value(section, "member_timeout", seconds).unwrap_or(DEFAULT_MEMBER_TIMEOUT);
        let limits = TimeLimits { local, remote: self.remote_limits(section) };
        let rules = self.peer_rules(section, client_ca).map(Arc::new);
        let which = name.or(uuid)?;
        if !seen.insert(which.clone()) {
            let message = format!("'{which}' is configured twice");
            self.problem(section.at, section.name.trim_end_matches('.'), &message);
        }
        Some(ArrayConfig {
            which,
            search,
            read_only,
            rebuild_min,
            rebuild_max,
            full_stripe,
            page_cache,
            limits,
            rules,
        })
    }

    fn remote_limits(&mut self, section: &Section<'_, '_>) -> RemoteLimits {
        let defaults = RemoteLimits::default();
        let request = self.value(section, "remote_timeout", seconds).unwrap_or(defaults.request);
        let grace = self.value(section, "remote_grace", seconds);
        if grace.is_some_and(|grace| grace >= request) {
            let at = section.table.get("remote_grace").map(Spanned::span).unwrap_or_default().start;
            let message = format!("must be shorter than remote_timeout, which is {} s", request.as_secs());
            self.problem(at, &format!("{}remote_grace", section.name), &message);
        }
        // A default grace shrinks with a shorter limit.
        let grace = grace.unwrap_or(defaults.grace.min(request / 2));
        RemoteLimits { request, grace, connect: defaults.connect.min(request) }
    }

    fn search(&mut self, section: &Section<'_, '_>) -> Vec<PathBuf> {
        let key = format!("{}search", section.name);
        let Some(value) = section.table.get("search") else {
            self.problem(
                section.at,
                &key,
                "is missing: list the directories or devices of the members, search = [\"/dev/disk/by-id\"]",
            );
            return Vec::new();
        };
        let items = value.get_ref().as_array().filter(|list| !list.is_empty());
        let Some(items) = items else {
            let message = "needs a list of at least one directory or device: [\"/dev/disk/by-id\"]";
            self.problem(value.span().start, &key, message);
            return Vec::new();
        };
        let mut paths = Vec::new();
        for item in items.iter() {
            let path = string(item.get_ref()).and_then(|text| {
                if is_remote(Path::new(text)) {
                    let uri: Result<NbdUri, _> = text.parse();
                    uri.map(|_| PathBuf::from(text)).map_err(|error| error.to_string())
                } else if text.contains(['*', '?']) && !self.dir.join(text).exists() {
                    Err(format!("'{text}': patterns are not expanded, name the directory instead"))
                } else {
                    absolute(self.dir, text)
                }
            });
            match path {
                Ok(path) => paths.push(path),
                Err(message) => self.problem(item.span().start, &key, &message),
            }
        }
        paths
    }
}

fn reclaim_safe(value: &DeValue<'_>) -> Result<reclaim::Mode, String> {
    match (value.as_bool(), value.as_str()) {
        (Some(true), _) => Ok(reclaim::Mode::Require),
        (Some(false), _) => Ok(reclaim::Mode::Off),
        (None, Some("auto")) => Ok(reclaim::Mode::Auto),
        (None, Some(other)) => Err(format!("'{other}' is neither \"auto\" nor true nor false")),
        (None, None) => Err(expected("\"auto\", true or false", value)),
    }
}

fn full_stripe(text: &str) -> Result<FullStripe, String> {
    match text {
        "fresh" => Ok(FullStripe::Fresh),
        "logged" => Ok(FullStripe::Logged),
        other => Err(format!("'{other}' is no way to write whole stripes: write fresh or logged")),
    }
}

/// Whether GPUs are used.
///
/// # Errors
/// What would be right.
pub(crate) fn gpu_mode(text: &str) -> Result<Mode, String> {
    match text {
        "auto" => Ok(Mode::Auto),
        "off" => Ok(Mode::Off),
        "require" => Ok(Mode::Require),
        other => Err(format!("'{other}' is no way to use GPUs: write auto, off or require")),
    }
}

/// A whole number of seconds.
fn seconds(value: &DeValue<'_>) -> Result<Duration, String> {
    match integer(value)? {
        number @ 1..=MAX_MEMBER_SECONDS => Ok(Duration::from_secs(number as u64)),
        other => {
            Err(format!("{other} is out of range: it is a number of seconds, 1 to {MAX_MEMBER_SECONDS}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::peer::SOCKET_PATH_MAX;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<Config, Vec<Problem>> {
        Config::parse(text, Path::new("/etc/calpe"))
    }

    fn problems(text: &str) -> Vec<(usize, usize, String)> {
        let problems = parse(text).unwrap_err();
        problems.into_iter().map(|p| (p.line, p.column, format!("{}: {}", p.key, p.message))).collect()
    }

    fn only_problem(text: &str) -> (usize, usize, String) {
        let mut found = problems(text);
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        found.remove(0)
    }

    #[test]
    fn a_share_that_is_a_text_is_told_what_a_share_is() {
        for (value, told) in
            [("\"0.1\"", "a number from 0 to 1"), ("true", "a number from 0 to 1"), ("7", "0 to 1")]
        {
            let (.., text) = only_problem(&format!("[gpu]\nverify = {value}\n"));
            assert!(text.starts_with("gpu.verify") && text.contains(told), "{text}");
        }
    }

    #[test]
    fn an_empty_file_means_the_defaults() {
        let config = Config::default();
        assert_eq!(config.daemon.control_socket, Path::new("/run/calpe/control.sock"));
        assert_eq!(config.daemon.state_dir, Path::new("/var/lib/calpe"));
        assert_eq!(config.listen.unix.as_deref(), Some(Path::new("/run/calpe/nbd.sock")));
        assert_eq!((config.listen.tcp, config.listen.max_connections), (None, 100));
        assert!(config.arrays.is_empty());
    }

    #[test]
    fn the_committed_example_is_valid_and_so_is_all_that_it_comments_out() {
        let example = include_str!("../../../conf/calpe.toml");
        assert_eq!(parse(example).unwrap_or_else(|p| panic!("{p:?}")), Config::default());
        let uncommented: String =
            example.lines().map(|line| line.strip_prefix("#: ").unwrap_or(line).to_owned() + "\n").collect();
        let config = parse(&uncommented).unwrap_or_else(|p| panic!("{p:?}"));
        assert_eq!(config.arrays.len(), 2);
        assert!(config.arrays[1].read_only && config.arrays[0].rebuild_max.is_some());
        assert!(config.arrays[0].full_stripe.is_some() && config.arrays[0].page_cache.is_some());
        assert!(config.listen.tcp.is_some() && config.daemon.log_format == Some(LogFormat::Json));
    }

    #[test]
    fn everything_that_can_be_set_is_read() {
        let config = parse(
            r#"
            [daemon]
            runtime_dir = "run"
            memory = 67108864
            reclaim_safe = false
            log_format = "json"
            [listen]
            tcp = "[::1]:10809"
            max_connections = 7
            [[array]]
            uuid = "01234567-89ab-4def-8000-0000000003e8"
            search = ["/dev/disk/by-id", "members", "nbd+unix:///x?socket=/run/x"]
            read_only = true
            rebuild_min = "10MiB"
            rebuild_max = "1GiB"
            full_stripe = "logged"
            page_cache = "16MiB"
            member_timeout = 20
            remote_timeout = 10
            remote_grace = 3
            "#,
        )
        .unwrap();
        assert_eq!(config.daemon.control_socket, Path::new("/etc/calpe/run/control.sock"));
        assert_eq!(config.daemon.state_dir, Path::new("/etc/calpe/run/state"));
        let both = parse("[daemon]\nstate_dir = \"kept\"\nruntime_dir = \"run\"\n").unwrap();
        assert_eq!(both.daemon.state_dir, Path::new("/etc/calpe/kept"));
        assert_eq!((config.daemon.memory, config.daemon.log_format), (64 << 20, Some(LogFormat::Json)));
        assert_eq!(config.daemon.reclaim_safe, reclaim::Mode::Off);
        let reclaim_safe = |value: &str| parse(&format!("[daemon]\nreclaim_safe = {value}\n"));
        assert_eq!(reclaim_safe("true").unwrap().daemon.reclaim_safe, reclaim::Mode::Require);
        assert_eq!(reclaim_safe("\"auto\"").unwrap().daemon.reclaim_safe, reclaim::Mode::Auto);
        for wrong in ["\"yes\"", "1"] {
            assert!(reclaim_safe(wrong).is_err(), "{wrong}");
        }
        assert_eq!(config.listen.unix, None, "tcp alone was asked for");
        assert_eq!(config.listen.tcp.unwrap().to_string(), "[::1]:10809");
        let array = &config.arrays[0];
        let search = ["/dev/disk/by-id", "/etc/calpe/members", "nbd+unix:///x?socket=/run/x"];
        assert_eq!(array.search, search.map(PathBuf::from));
        let limits = array.limits;
        assert_eq!((limits.remote.request.as_secs(), limits.remote.grace.as_secs()), (10, 3));
        assert_eq!(limits.local.as_secs(), 20);
        assert_eq!((array.rebuild_min, array.rebuild_max), (Some(10 << 20), Some(1 << 30)));
        assert_eq!((array.full_stripe, array.page_cache), (Some(FullStripe::Logged), Some(16 << 20)));
    }

    #[test]
    fn all_problems_are_told_at_once_in_order_with_their_places() {
        let text = "[daemon]\nmemry = 1\nmemory = \"1KiB\"\n[listen]\nplaintext = 1\n  max_connections = 0\n\n[[array]]\nname = \"a b\"\n";
        let found = problems(text);
        let places: Vec<_> = found.iter().map(|(line, column, _)| (*line, *column)).collect();
        assert_eq!(places, [(2, 1), (3, 10), (5, 13), (6, 21), (8, 1), (9, 8)], "{found:?}");
        assert!(found[0].2.starts_with("daemon.memry: unknown key; known here are runtime_dir,"));
        assert!(found[4].2.starts_with("array[0].search: is missing"), "{}", found[4].2);
    }

    #[test]
    fn a_file_that_is_no_toml_is_told_with_its_line() {
        let found = problems("[daemon]\nmemory = = 3\nunknown = 1\n");
        assert!(found.iter().all(|(line, _, _)| *line == 2), "keys are not looked at: {found:?}");
        assert!(problems("[daemon\n[listen").len() >= 2);
    }

    #[test]
    fn plain_tcp_beyond_loopback_needs_consent() {
        let text = "[listen]\ntcp = \"0.0.0.0:10809\"\n";
        assert!(only_problem(text).2.contains("plaintext = true"));
        assert!(parse(&format!("{text}plaintext = true\n")).is_ok());
        assert!(only_problem("[listen]\ntcp = \"localhost\"").2.contains("127.0.0.1:10809"));
    }

    #[test]
    fn arrays_are_chosen_once_and_unambiguously() {
        let array = |rest: &str| format!("[[array]]\nsearch = [\"/srv\"]\n{rest}");
        let uuid = "uuid = \"01234567-89ab-4def-8000-0000000003e8\"\n";
        assert!(only_problem(&array("")).2.contains("needs a name or a uuid"));
        assert!(only_problem(&array(&format!("name = \"a\"\n{uuid}"))).2.contains("both given"));
        assert!(only_problem(&(array(uuid) + &array(uuid))).2.contains("configured twice"));
        assert!(only_problem(&array("uuid = \"7\"")).2.contains("'7' is not a uuid"));
        assert!(only_problem("array = 3").2.contains("[[array]]"));
        assert!(only_problem("array = [3]").2.contains("[[array]]"));
        let rates = array("name = \"a\"\nrebuild_min = \"2MiB\"\nrebuild_max = \"1MiB\"");
        assert!(only_problem(&rates).2.contains("below rebuild_min"));
        assert!(
            only_problem(&array("name = \"a\"\nfull_stripe = \"slow\"")).2.contains("write fresh or logged")
        );
        assert!(only_problem(&array("name = \"a\"\npage_cache = 4096")).2.contains("use 1 MiB or more"));
    }

    #[test]
    fn search_wants_plain_paths() {
        let search = |value: &str| only_problem(&format!("[[array]]\nname = \"a\"\nsearch = {value}")).2;
        assert!(search("\"/srv\"").contains("list of at least one"));
        assert!(search("[]").contains("list of at least one"));
        assert!(search("[\"/dev/sd*\"]").contains("patterns are not expanded"));
        let dir = tempfile::tempdir().unwrap();
        let named = dir.path().join("st*r");
        let section = format!("[[array]]\nname = \"a\"\nsearch = [\"{}\"]", named.display());
        assert!(only_problem(&section).2.contains("patterns are not expanded"));
        std::fs::create_dir(&named).unwrap();
        assert_eq!(parse(&section).unwrap().arrays[0].search, [named]);
        assert!(search("[\"\"]").contains("not a path"));
        assert!(search("[\"nbd://h:0/x\"]").contains("'0' is not a port"));
        assert!(search("[7]").contains("expected a text in quotes, found an integer"));
    }

    #[test]
    fn socket_paths_fit_a_socket_address() {
        let long = format!("[listen]\nunix = \"/{}\"", "d".repeat(SOCKET_PATH_MAX));
        assert!(only_problem(&long).2.contains("at most 107"));
    }

    #[test]
    fn files_are_named_in_errors() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("calpe.toml");
        assert!(Config::load(&file).unwrap_err().to_string().contains("calpe.toml: cannot read"));
        std::fs::write(&file, "x = 1\ny = 2\n").unwrap();
        let text = Config::load(&file).unwrap_err().to_string();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[1].starts_with(&format!("{}:2:1: y: unknown key", file.display())), "{text}");
        std::fs::write(&file, "[[array]]\nname = \"a\"\nsearch = [\"m\"]").unwrap();
        assert_eq!(Config::load(&file).unwrap().arrays[0].search, [dir.path().join("m")]);
    }

    proptest! {
        #[test]
        fn noise_never_panics(text in "[a-z\\[\\]=\"\n .0-9é{},-]{0,80}") {
            let _ = parse(&text);
            let _ = parse(&format!("[listen]\ntcp = {text}\n[[array]]\nsearch = {text}"));
        }
    }
}
