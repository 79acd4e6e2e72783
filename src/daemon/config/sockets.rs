//! The sockets of a configuration: each has a path of its own, which fits into a socket address.
//! Must not know what is served on them.

use super::reader::{Reader, Section, absolute, string};
use crate::daemon::peer::SOCKET_PATH_MAX;
use calpe_core::units::shown;
use std::path::{Path, PathBuf};
use toml::Spanned;

/// Why a socket cannot be at its path.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketFault {
    /// Its path does not fit into a socket address.
    #[error("'{}' has {} bytes, a socket's path may have at most {SOCKET_PATH_MAX}", shown(path), path.as_os_str().len())]
    TooLong {
        /// The path.
        path: PathBuf,
    },
    /// It is the socket of both NBD clients and administrators.
    #[error(
        "'{}' is both listen.unix and daemon.control_socket: NBD clients and administrators need a socket each, choose another path for one of them",
        shown(path)
    )]
    Shared {
        /// The path.
        path: PathBuf,
    },
}

/// Whether a path fits into a socket address.
pub(super) fn check_length(path: &Path) -> Result<(), SocketFault> {
    match path.as_os_str().len() {
        ..=SOCKET_PATH_MAX => Ok(()),
        _ => Err(SocketFault::TooLong { path: path.into() }),
    }
}

/// Whether the two sockets have different paths. `look`: also compares the places that links lead to.
pub(super) fn check_apart(control: &Path, unix: Option<&Path>, look: bool) -> Result<(), SocketFault> {
    match unix {
        Some(unix) if unix == control || (look && is_same_place(unix, control)) => {
            Err(SocketFault::Shared { path: unix.into() })
        }
        _ => Ok(()),
    }
}

fn is_same_place(first: &Path, second: &Path) -> bool {
    let place = |path: &Path| {
        let absolute = std::path::absolute(path).ok()?;
        Some((absolute.parent()?.canonicalize().ok()?, absolute.file_name()?.to_owned()))
    };
    place(first).is_some_and(|first| Some(first) == place(second))
}

impl Reader<'_> {
    /// A path that fits into a socket address.
    pub(super) fn socket_path(&mut self, section: &Section<'_, '_>, key: &str) -> Option<PathBuf> {
        let dir = self.dir;
        self.value(section, key, |value| {
            let path = absolute(dir, string(value)?)?;
            check_length(&path).map(|()| path).map_err(|fault| fault.to_string())
        })
    }

    /// Notes the problems of the sockets that are not those of a single key.
    pub(super) fn check_sockets(&mut self, root: &Section<'_, '_>, control: &Path, unix: Option<&Path>) {
        let place = |section: &str, key: &str| {
            let table = root.table.get(section)?.get_ref().as_table()?;
            Some((table.get(key).map(Spanned::span)?.start, format!("{section}.{key}")))
        };
        let control_key = place("daemon", "control_socket");
        let unix_key = place("listen", "unix");
        // Paths that the file gives were checked with their keys.
        let derived_control = Some(control).filter(|_| control_key.is_none());
        let derived_unix = unix.filter(|_| unix_key.is_none());
        let too_long = [derived_control, derived_unix].into_iter().flatten();
        let too_long = too_long.filter_map(|path| check_length(path).err()).next();
        if let (Some(fault), Some((at, key))) = (too_long, place("daemon", "runtime_dir")) {
            self.problem(at, &key, &fault.to_string());
        }
        if let (Err(fault), Some((at, key))) =
            (check_apart(control, unix, self.open_files), unix_key.or(control_key))
        {
            self.problem(at, &key, &fault.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    #[track_caller]
    fn problem(text: &str, want: &str) {
        let problems = Config::parse(text, Path::new("/etc/calpe")).expect_err("a problem");
        assert!(problems.len() == 1, "{problems:?}");
        let said = format!("{}: {}", problems[0].key, problems[0].message);
        assert!(said.contains(want), "{said}");
    }

    #[test]
    fn clients_and_administrators_have_a_socket_each() {
        let both = "'/etc/calpe/s' is both listen.unix and daemon.control_socket";
        problem("[daemon]\ncontrol_socket = \"s\"\n[listen]\nunix = \"./s\"\n", both);
        problem("[daemon]\nruntime_dir = \"r\"\n[listen]\nunix = \"r/control.sock\"\n", "listen.unix: '");
        problem(
            "[daemon]\nruntime_dir = \"r\"\ncontrol_socket = \"r/nbd.sock\"\n",
            "daemon.control_socket: '",
        );
        let tcp = "[daemon]\nruntime_dir = \"r\"\ncontrol_socket = \"r/nbd.sock\"\n[listen]\ntcp = \"127.0.0.1:1\"\n";
        assert!(Config::parse(tcp, Path::new("/etc/calpe")).is_ok(), "there is no unix socket for clients");
    }

    #[test]
    fn a_runtime_directory_has_room_for_the_names_of_its_sockets() {
        let long = "d".repeat(SOCKET_PATH_MAX - "/etc/calpe//nbd.sock".len());
        let text = format!("[daemon]\nruntime_dir = \"{long}\"\n");
        problem(&text, "daemon.runtime_dir: '/etc/calpe/ddd");
        assert!(Config::parse(&format!("{text}control_socket = \"c\"\n"), Path::new("/etc/calpe")).is_ok());
        problem(
            &format!("[daemon]\nruntime_dir = \"{long}d\"\ncontrol_socket = \"c\"\n"),
            "nbd.sock' has 108 bytes",
        );
    }

    #[test]
    fn a_control_socket_of_the_command_line_goes_with_the_file() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("run")).unwrap();
        std::os::unix::fs::symlink("run", dir.path().join("link")).unwrap();
        let mut config = Config::parse("[listen]\nunix = \"run/s\"\n", dir.path()).unwrap();
        let shared = config.set_control_socket(&dir.path().join("link/s")).unwrap_err().to_string();
        assert!(shared.contains("--socket: '") && shared.contains("is both listen.unix and"), "{shared}");
        let long = dir.path().join("d".repeat(SOCKET_PATH_MAX));
        assert!(config.set_control_socket(&long).unwrap_err().to_string().contains("at most 107"));
        config.set_control_socket(&dir.path().join("run/c")).unwrap();
    }
}
