//! SIGHUP: reads the configuration and the files of TLS again, and applies what can change without
//! a restart.
//!
//! Invariants: a configuration with any problem, or a file of TLS that cannot be used, changes
//! nothing; changes that cannot be applied are named, every time, until the next start. Must not
//! know signals.

use super::tls::Tls;
use crate::daemon::arrays::configure::{Standing, pace};
use crate::daemon::certificates::Certificates;
use crate::daemon::clock;
use crate::daemon::config::{ArrayChoice, ArrayConfig, Config, ConfigError};
use crate::daemon::imports::attempts::Imports;
use crate::daemon::service::Daemon;
use crate::member::set_remote_tls;
use crate::tls::{CertificateFacts, ClientFiles, ClientTls, ServerFiles, ServerTls, TlsFileError};
use calpe_core::nbd::TlsMode;
use calpe_core::units::Count;
use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

/// See the head of this file.
pub(super) struct Reloader<'a> {
    daemon: &'a Arc<Daemon>,
    reread: &'a dyn Fn() -> Result<Config, ConfigError>,
    imports: &'a Imports,
    tls: &'a Tls,
    /// The configuration in effect.
    running: RefCell<Config>,
    /// Arrays that the log has reported as gone from the configuration.
    told_gone: RefCell<HashSet<ArrayChoice>>,
}

impl<'a> Reloader<'a> {
    /// `running`: what the daemon was started with.
    pub(super) fn new(
        daemon: &'a Arc<Daemon>,
        running: &Config,
        reread: &'a dyn Fn() -> Result<Config, ConfigError>,
        imports: &'a Imports,
        tls: &'a Tls,
    ) -> Reloader<'a> {
        Reloader {
            daemon,
            reread,
            imports,
            tls,
            running: RefCell::new(running.clone()),
            told_gone: RefCell::default(),
        }
    }

    /// Reads everything again, applies what can be applied, and says what cannot.
    pub(super) fn reload(&self) {
        let fresh = match (self.reread)() {
            Ok(fresh) => fresh,
            Err(error) => {
                tracing::error!("the configuration is refused, all stays as it was: {error}");
                return;
            }
        };
        match self.reload_tls(&fresh) {
            Ok(()) => {}
            Err(error) => {
                tracing::error!("cannot use the files of TLS, all stays as it was: {error}");
                return;
            }
        }
        self.apply_arrays(&fresh.arrays);
        let Left { restart, import } = what_is_left(&self.running.borrow(), &fresh);
        if restart.is_empty() && import.is_empty() {
            tracing::info!("read the configuration and the files of TLS again");
            return;
        }
        let mut text = "read the configuration and the files of TLS again".to_owned();
        if !restart.is_empty() {
            text += "; changed, and without effect until the next start: ";
            text += &restart.join(", ");
        }
        if !import.is_empty() {
            text += "; changed, and in effect for an array when it is imported again ('calpe export', then 'calpe import'), or \
                     from the next start: ";
            text += &import.join(", ");
        }
        tracing::warn!("{text}");
    }

    /// Takes the files of TLS that can be taken without a restart.
    fn reload_tls(&self, fresh: &Config) -> Result<(), TlsFileError> {
        let server = match (&self.running.borrow().listen.tls, &fresh.listen.tls) {
            (Some(old), Some(new)) => {
                let files = server_files(&old.files, &new.files);
                Some((ServerTls::load(&files)?, files))
            }
            // To gain or lose TLS, listeners would have to be bound anew.
            _ => None,
        };
        let client = fresh.remote.as_ref().map(ClientTls::load).transpose()?;
        // From here on, nothing fails.
        set_remote_tls(client);
        let mut running = self.running.borrow_mut();
        running.remote.clone_from(&fresh.remote);
        if let (Some(tls), Some((server, files)), Some(current)) =
            (&mut running.listen.tls, server, &self.tls.server)
        {
            current.renew(&server);
            tls.files = files;
            let (ended, anonymous) = self.daemon.end_untrusted(current);
            if !ended.is_empty() {
                let names: Vec<String> = ended.iter().map(|peer| peer.names().to_string()).collect();
                tracing::warn!(
                    "ended sessions of certificates that are not trusted any more: {}",
                    names.join(", ")
                );
            }
            if anonymous > 0 {
                let sessions = Count::of(anonymous, "session");
                tracing::warn!("ended {sessions} without a certificate: clients need one now");
            }
        }
        drop(running);
        watch_certificates(self.daemon, &self.running.borrow());
        Ok(())
    }

    fn apply_arrays(&self, fresh: &[ArrayConfig]) {
        let old = std::mem::take(&mut self.running.borrow_mut().arrays);
        let find = |list: &[ArrayConfig], which: &ArrayChoice| {
            list.iter().find(|config| config.which == *which).cloned()
        };
        let is_served = |config: &ArrayConfig| {
            self.daemon.arrays().find(&config.which.to_string(), |served| served.id).is_ok()
        };
        // Sections that were taken out stay in effect for as long as their arrays may be served.
        let is_back =
            |config: &ArrayConfig| self.told_gone.borrow().contains(&config.which) && !is_served(config);
        let is_new = |config: &&ArrayConfig| find(&old, &config.which).is_none() || is_back(config);
        let new: Vec<_> = fresh.iter().filter(is_new).cloned().collect();
        // The section of an array counts for as long as it may be served: without its rules, everybody could
        // use the array.
        let gone: Vec<_> =
            old.iter().filter(|config| find(fresh, &config.which).is_none()).cloned().collect();
        let served = |config: &ArrayConfig| {
            self.daemon.arrays().find(&config.which.to_string(), |served| served.id).ok()
        };
        let other_name = |config: &ArrayConfig| {
            let id = served(config)?;
            new.iter().find(|new| served(new) == Some(id)).map(|new| new.which.clone())
        };
        let (renamed, gone): (Vec<_>, Vec<_>) = gone
            .into_iter()
            .map(|config| (other_name(&config), config))
            .partition(|(name, _)| name.is_some());
        for (name, ArrayConfig { which, .. }) in &renamed {
            let name = name.as_ref().expect("it was found");
            tracing::info!(
                "array '{which}' is called '{name}' in the configuration now, and is the same array"
            );
        }
        let gone: Vec<_> = gone.into_iter().map(|(_, config)| config).collect();
        let all: Vec<_> = fresh.iter().chain(&gone).cloned().collect();
        let ended = self.daemon.configure(fresh, &gone);
        if ended > 0 {
            let sessions = Count::of(ended, "session");
            tracing::warn!("ended {sessions} of certificates that are not allowed any more");
        }
        for config in fresh {
            let changed = find(&old, &config.which).is_some_and(|was| {
                (was.rebuild_min, was.rebuild_max) != (config.rebuild_min, config.rebuild_max)
            });
            if changed && let Err(error) = pace(self.daemon.arrays(), config) {
                tracing::error!(array = %config.which, "cannot change the pace of rebuild and scrub: {error}");
            }
        }
        for config in &new {
            match pace(self.daemon.arrays(), config) {
                Ok(Standing::NotServed) => {
                    tracing::info!(array = %config.which, "new in the configuration: importing it");
                }
                Ok(Standing::Behind(first)) => tracing::warn!(
                    array = %config.which,
                    "new in the configuration, beside section '{first}' about the same array, which goes first: what tls_allow and \
                     tls_allow_read_only grant must be granted by both, and all else of this section but read_only counts for nothing"
                ),
                Ok(Standing::Before(second)) => tracing::warn!(
                    array = %config.which,
                    "new in the configuration, and goes before section '{second}' about the same array: its pace counts now; what \
                     tls_allow and tls_allow_read_only grant must be granted by both; the rest counts when the array is imported \
                     again, or from the next start"
                ),
                Ok(Standing::Counts) => tracing::info!(
                    array = %config.which,
                    "new in the configuration, and served already: pace and rules count now, the rest when the array is imported \
                     again, or from the next start"
                ),
                Err(error) => {
                    tracing::error!(array = %config.which, "cannot change the pace of rebuild and scrub: {error}");
                }
            }
        }
        let told = self.told_gone.replace(gone.iter().map(|config| config.which.clone()).collect());
        for config in gone.iter().filter(|config| !told.contains(&config.which)) {
            let name = &config.which;
            tracing::warn!(
                "array '{name}' is not in the configuration any more: if it is served, it goes on as it was until 'calpe export {name}', or the next start if no 'calpe import' is remembered"
            );
        }
        self.imports.update(fresh, &new);
        // Values that were not applied stay what they were.
        self.running.borrow_mut().arrays = all
            .into_iter()
            .map(|config| match find(&old, &config.which).filter(|_| find(&new, &config.which).is_none()) {
                Some(was) => ArrayConfig {
                    which: was.which,
                    search: config.search,
                    rules: config.rules,
                    rebuild_min: config.rebuild_min,
                    rebuild_max: config.rebuild_max,
                    ..was
                },
                None => config,
            })
            .collect();
    }
}

/// The new files, as far as they can be used without a restart. The CA of clients is never given up: there
/// may be listeners that only it makes safe.
fn server_files(old: &ServerFiles, new: &ServerFiles) -> ServerFiles {
    let mut files = new.clone();
    if files.client_ca.is_none() {
        files.client_ca.clone_from(&old.client_ca);
        files.crl.clone_from(&old.crl);
    }
    files
}

/// Changed keys that are not in effect.
#[derive(Debug, Default, PartialEq, Eq)]
struct Left {
    /// Keys that take effect at the next start.
    restart: Vec<String>,
    /// Keys of arrays that take effect when the array is imported again.
    import: Vec<String>,
}

/// The keys that differ between the configuration in effect and a fresh one. Applied changes are
/// the same in both.
fn what_is_left(running: &Config, fresh: &Config) -> Left {
    let mut left = Left::default();
    let mut check = |differs: bool, key: &str| {
        if differs {
            left.restart.push(key.to_owned());
        }
    };
    // Destructured, so that a new key cannot be forgotten.
    let Config { daemon, listen, gpu, remote: _, arrays } = running;
    let crate::daemon::config::DaemonConfig {
        runtime_dir,
        state_dir,
        control_socket,
        memory,
        metadata_memory,
        reactors,
        reclaim_safe,
        log_format,
    } = daemon;
    check(*runtime_dir != fresh.daemon.runtime_dir, "daemon.runtime_dir");
    check(*state_dir != fresh.daemon.state_dir, "daemon.state_dir");
    check(*control_socket != fresh.daemon.control_socket, "daemon.control_socket");
    check(*memory != fresh.daemon.memory, "daemon.memory");
    check(*metadata_memory != fresh.daemon.metadata_memory, "daemon.metadata_memory");
    check(*reactors != fresh.daemon.reactors, "daemon.reactors");
    check(*reclaim_safe != fresh.daemon.reclaim_safe, "daemon.reclaim_safe");
    check(*log_format != fresh.daemon.log_format, "daemon.log_format");
    let crate::daemon::config::ListenConfig { unix, tcp, plaintext, tls, max_connections } = listen;
    check(*unix != fresh.listen.unix, "listen.unix");
    check(*tcp != fresh.listen.tcp, "listen.tcp");
    check(*plaintext != fresh.listen.plaintext, "listen.plaintext");
    check(*max_connections != fresh.listen.max_connections, "listen.max_connections");
    match (tls, &fresh.listen.tls) {
        (None, None) => {}
        (Some(old), Some(new)) => {
            check(old.tcp != new.tcp, "listen.tls");
            check(old.unix != new.unix, "listen.tls_unix");
            check(old.files.client_ca != new.files.client_ca, "listen.tls_client_ca");
            check(old.files.crl != new.files.crl, "listen.tls_crl");
        }
        (None, Some(tls)) | (Some(tls), None) => {
            check(true, "listen.tls_certificate");
            check(true, "listen.tls_key");
            // Other keys have their defaults.
            check(tls.tcp != TlsMode::Required, "listen.tls");
            check(tls.unix != TlsMode::Optional, "listen.tls_unix");
            check(tls.files.client_ca.is_some(), "listen.tls_client_ca");
            check(tls.files.crl.is_some(), "listen.tls_crl");
        }
    }
    check(*gpu != fresh.gpu, "gpu");
    for old in arrays {
        let Some(new) = fresh.arrays.iter().find(|new| new.which == old.which) else { continue };
        let ArrayConfig { which, search: _, read_only, full_stripe, page_cache, limits, .. } = old;
        let mut check = |differs: bool, key: &str| {
            if differs {
                left.import.push(format!("{key} of array '{which}'"));
            }
        };
        check(*read_only != new.read_only, "read_only");
        check(*full_stripe != new.full_stripe, "full_stripe");
        check(*page_cache != new.page_cache, "page_cache");
        check(limits.local != new.limits.local, "member_timeout");
        check(limits.remote != new.limits.remote, "remote_timeout or remote_grace");
    }
    left
}

/// Makes the daemon report when the certificates that a configuration names end.
pub(super) fn watch_certificates(daemon: &Daemon, config: &Config) {
    match certificates_of(config) {
        Ok((server, remote)) => daemon.watch_certificates(server, remote),
        // Unlikely: the files were read a moment ago.
        Err(error) => tracing::warn!("cannot tell when certificates end: {error}"),
    }
    // A file that cannot be used is reported where it is used.
    for line in unlisted_cas(config).unwrap_or_default() {
        tracing::warn!("{line}");
    }
}

/// Warnings about CAs of clients without a revocation list, where others have one.
fn unlisted_cas(config: &Config) -> Result<Vec<String>, TlsFileError> {
    config.listen.tls.as_ref().map_or(Ok(Vec::new()), |tls| tls.files.advice())
}

/// What a daemon with this configuration would report of its certificates at its start, a line each.
///
/// # Errors
/// The first file that cannot be used, and why.
pub(crate) fn certificate_advice(config: &Config) -> Result<Vec<String>, TlsFileError> {
    let (server, remote) = certificates_of(config)?;
    let mut certificates = Certificates::default();
    certificates.watch(server, remote);
    let now = clock::unix_seconds();
    let reports = certificates.report(now);
    let ends = reports.iter().filter_map(|report| report.advice(&reports, now));
    Ok(ends.chain(unlisted_cas(config)?).collect())
}

/// The certificates of `[listen]`, and those of `[remote]`.
fn certificates_of(config: &Config) -> Result<(Vec<CertificateFacts>, Vec<CertificateFacts>), TlsFileError> {
    let server = config.listen.tls.as_ref().map(|tls| tls.files.certificates()).transpose()?;
    let remote = config.remote.as_ref().map(ClientFiles::certificates).transpose()?;
    Ok((server.unwrap_or_default(), remote.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn config(text: &str) -> Config {
        Config::parse(text, Path::new("/etc/calpe")).unwrap_or_else(|problems| panic!("{problems:?}"))
    }

    #[test]
    fn every_key_that_needs_a_restart_is_named() {
        let tls = "tls_certificate = \"c\"\ntls_key = \"k\"\n";
        let old = config(&format!("[listen]\n{tls}[[array]]\nname = \"a\"\nsearch = [\"m\"]\n"));
        assert_eq!(what_is_left(&old, &old), Left::default());
        let fresh = config(&format!(
            "[daemon]\nruntime_dir = \"r\"\nmemory = \"64MiB\"\nmetadata_memory = \"1GiB\"\nreactors = 3\nreclaim_safe = false\nlog_format = \"json\"\n[gpu]\nmode = \"off\"\n\
             [listen]\n{tls}tcp = \"127.0.0.1:1\"\nplaintext = true\ntls = \"optional\"\ntls_unix = \"required\"\n\
             tls_client_ca = \"ca\"\nmax_connections = 7\n\
             [[array]]\nname = \"a\"\nsearch = [\"m\"]\nread_only = true\nfull_stripe = \"logged\"\npage_cache = \"2MiB\"\n\
             member_timeout = 7\nremote_timeout = 7\n"
        ));
        let wanted = [
            "daemon.runtime_dir",
            "daemon.state_dir",
            "daemon.control_socket",
            "daemon.memory",
            "daemon.metadata_memory",
            "daemon.reactors",
            "daemon.reclaim_safe",
            "daemon.log_format",
            "listen.unix",
            "listen.tcp",
            "listen.plaintext",
            "listen.max_connections",
            "listen.tls",
            "listen.tls_unix",
            "listen.tls_client_ca",
            "gpu",
        ];
        let of_array = [
            "read_only of array 'a'",
            "full_stripe of array 'a'",
            "page_cache of array 'a'",
            "member_timeout of array 'a'",
            "remote_timeout or remote_grace of array 'a'",
        ];
        let left = what_is_left(&old, &fresh);
        assert_eq!(
            (&left.restart[..], &left.import[..]),
            (&wanted.map(String::from)[..], &of_array.map(String::from)[..])
        );
        let without = config("[[array]]\nname = \"a\"\nsearch = [\"m\"]\n");
        assert_eq!(what_is_left(&old, &without).restart, ["listen.tls_certificate", "listen.tls_key"]);
        let all = config(&format!(
            "[listen]\n{tls}tls = \"off\"\ntls_unix = \"required\"\ntls_client_ca = \"ca\"\ntls_crl = \"crl\"\n\
             [[array]]\nname = \"a\"\nsearch = [\"m\"]\n"
        ));
        let keys = ["certificate", "key", "", "unix", "client_ca", "crl"];
        let keys = keys.map(|key| format!("listen.tls_{key}").trim_end_matches('_').to_owned());
        assert_eq!(what_is_left(&without, &all).restart, keys);
        assert_eq!(what_is_left(&all, &without).restart, keys);
    }

    #[test]
    fn a_ca_is_not_given_up_without_a_restart() {
        let files = |certificate: &str, ca: Option<&str>, crl: Option<&str>| ServerFiles {
            certificate: certificate.into(),
            key: "k".into(),
            client_ca: ca.map(Into::into),
            crl: crl.map(Into::into),
        };
        let old = files("old", Some("ca"), Some("crl"));
        assert_eq!(server_files(&old, &files("new", None, None)), files("new", Some("ca"), Some("crl")));
        assert_eq!(server_files(&old, &files("new", Some("b"), None)), files("new", Some("b"), None));
        let open = files("old", None, None);
        assert_eq!(server_files(&open, &files("new", Some("b"), None)), files("new", Some("b"), None));
    }
}
