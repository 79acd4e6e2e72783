//! The keys of TLS: the server's in `[listen]`, those for remote members in `[remote]`, and in `[[array]]`
//! those that say which clients may use an array.
//!
//! Invariant: a file that cannot be used is a problem at the key that names it. Must not know what
//! TLS does with them.

use super::reader::{Reader, Section, absolute, expected, string};
use crate::tls::{
    ClientFiles, FileRole, PATTERNS_MAX, PeerPattern, PeerRules, ServerFiles, TlsFileError, check_server_name,
};
use calpe_core::nbd::TlsMode;
use toml::Spanned;

/// Keys of section `[listen]`.
pub(super) const LISTEN_KEYS: [&str; 10] = [
    "unix",
    "tcp",
    "plaintext",
    "tls",
    "tls_unix",
    "tls_certificate",
    "tls_key",
    "tls_client_ca",
    "tls_crl",
    "max_connections",
];

/// Keys of section `[remote]`.
const REMOTE_KEYS: [&str; 4] = ["tls_ca", "tls_certificate", "tls_key", "tls_server_name"];

/// TLS of the NBD clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListenTlsConfig {
    /// Certificates and key.
    pub files: ServerFiles,
    /// Whether clients on TCP may or must use it.
    pub tcp: TlsMode,
    /// Whether clients on unix sockets may or must use it.
    pub unix: TlsMode,
}

impl ListenTlsConfig {
    /// Whether every TCP client needs a certificate.
    pub(super) fn is_safe_beyond_loopback(&self) -> bool {
        self.tcp == TlsMode::Required && self.files.client_ca.is_some()
    }
}

fn tls_mode(text: &str) -> Result<TlsMode, String> {
    match text {
        "off" => Ok(TlsMode::Off),
        "optional" => Ok(TlsMode::Optional),
        "required" => Ok(TlsMode::Required),
        other => Err(format!("'{other}' is not a mode of TLS: write off, optional or required")),
    }
}

impl Reader<'_> {
    /// TLS of `[listen]`; none when it is absent, or wrong, which is noted as a problem.
    pub(super) fn listen_tls(&mut self, section: &Section<'_, '_>) -> Option<ListenTlsConfig> {
        let tcp = self.value(section, "tls", |value| tls_mode(string(value)?));
        let unix = self.value(section, "tls_unix", |value| tls_mode(string(value)?));
        let identity = self.identity(section);
        let client_ca = self.path(section, "tls_client_ca");
        let crl = self.path(section, "tls_crl");
        if crl.is_some() && client_ca.is_none() {
            self.at_key(section, "tls_crl", "needs tls_client_ca: without it, no client shows a certificate");
        }
        let Some((certificate, key)) = identity else {
            let wants = |mode| matches!(mode, Some(TlsMode::Optional | TlsMode::Required));
            for (key, needs) in
                [("tls", wants(tcp)), ("tls_unix", wants(unix)), ("tls_client_ca", client_ca.is_some())]
            {
                if needs && !section.table.contains_key("tls_certificate") {
                    self.at_key(section, key, "needs tls_certificate and tls_key");
                }
            }
            return None;
        };
        let files = ServerFiles { certificate, key, client_ca, crl };
        let problems = if self.open_files { files.problems() } else { Vec::new() };
        problems.iter().for_each(|problem| self.file_problem(section, "tls_client_ca", problem));
        let (tcp, unix) = (tcp.unwrap_or(TlsMode::Required), unix.unwrap_or(TlsMode::Optional));
        Some(ListenTlsConfig { files, tcp, unix })
    }

    /// Section `[remote]`; none when it is wrong, which is noted as a problem.
    pub(super) fn remote(&mut self, section: &Section<'_, '_>) -> Option<ClientFiles> {
        self.known(section, &REMOTE_KEYS);
        let identity = self.identity(section);
        let server_name = self.value(section, "tls_server_name", |value| {
            let name = string(value)?;
            check_server_name(name).map(|()| name.to_owned())
        });
        let ca = self.path(section, "tls_ca");
        if !section.table.contains_key("tls_ca") {
            let what = "needs tls_ca: the CA that signs the certificates of the servers";
            self.problem(section.at, section.name.trim_end_matches('.'), what);
        }
        let files = ClientFiles { ca: ca?, identity, server_name };
        let problems = if self.open_files { files.problems() } else { Vec::new() };
        problems.iter().for_each(|problem| self.file_problem(section, "tls_ca", problem));
        Some(files)
    }

    /// Which certificates may use an array; none where the section does not say. `client_ca`:
    /// whether clients show certificates.
    pub(super) fn peer_rules(&mut self, section: &Section<'_, '_>, client_ca: bool) -> Option<PeerRules> {
        let [write, read] = ["tls_allow", "tls_allow_read_only"].map(|key| {
            if section.table.contains_key(key) && !client_ca {
                let what = "needs tls_client_ca in [listen]: without it, no client shows a certificate";
                self.at_key(section, key, what);
            }
            section.table.contains_key(key).then(|| self.patterns(section, key))
        });
        // If only one list is there, the other one counts as empty.
        let given = write.is_some() || read.is_some();
        given.then(|| PeerRules {
            write: write.unwrap_or_default(),
            read: read.unwrap_or_default(),
            within: None,
        })
    }

    fn patterns(&mut self, section: &Section<'_, '_>, key: &str) -> Vec<PeerPattern> {
        let Some(value) = section.table.get(key) else { return Vec::new() };
        let Some(list) = value.get_ref().as_array() else {
            let what = expected("a list of patterns like [\"CN:client one\"]", value.get_ref());
            self.at_key(section, key, &what);
            return Vec::new();
        };
        if list.len() > PATTERNS_MAX {
            let what = format!("has {} patterns: at most {PATTERNS_MAX}", list.len());
            self.at_key(section, key, &what);
        }
        let mut patterns = Vec::new();
        for item in list.iter() {
            match string(item.get_ref()).and_then(str::parse) {
                Ok(pattern) => patterns.push(pattern),
                Err(what) => self.problem(item.span().start, &format!("{}{key}", section.name), &what),
            }
        }
        patterns
    }

    /// A certificate and its key. Either both are there, or neither.
    fn identity(&mut self, section: &Section<'_, '_>) -> Option<(std::path::PathBuf, std::path::PathBuf)> {
        let dir = self.dir;
        let [certificate, key] = ["tls_certificate", "tls_key"]
            .map(|name| self.value(section, name, |value| absolute(dir, string(value)?)));
        for (have, lack) in [("tls_certificate", "tls_key"), ("tls_key", "tls_certificate")] {
            if section.table.contains_key(have) && !section.table.contains_key(lack) {
                self.at_key(section, have, &format!("needs {lack}, too"));
            }
        }
        certificate.zip(key)
    }

    fn file_problem(&mut self, section: &Section<'_, '_>, ca_key: &'static str, error: &TlsFileError) {
        let key = match error.role {
            FileRole::Certificate => "tls_certificate",
            FileRole::Key => "tls_key",
            FileRole::Ca => ca_key,
            FileRole::Crl => "tls_crl",
        };
        self.at_key(section, key, &error.to_string());
    }

    fn at_key(&mut self, section: &Section<'_, '_>, key: &str, message: &str) {
        let at = section.table.get(key).map_or(section.at, |value| Spanned::span(value).start);
        self.problem(at, &format!("{}{key}", section.name), message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::config::Config;
    use std::path::Path;

    const IDENTITY: &str = "tls_certificate = \"c.pem\"\ntls_key = \"k.pem\"\n";

    fn parse(text: &str) -> Result<Config, Vec<String>> {
        Config::parse(text, Path::new("/etc/calpe")).map_err(|problems| {
            problems.iter().map(|p| format!("{}:{}: {}", p.line, p.key, p.message)).collect()
        })
    }

    fn listen(text: &str) -> Result<Config, Vec<String>> {
        parse(&format!("[listen]\n{text}"))
    }

    #[track_caller]
    fn problem(result: Result<Config, Vec<String>>, want: &str) {
        let problems = result.expect_err("a problem");
        assert!(problems.len() == 1 && problems[0].contains(want), "{problems:?}");
    }

    #[test]
    fn a_certificate_makes_tls_required_on_tcp_and_optional_on_unix_sockets() {
        assert_eq!(listen("").unwrap().listen.tls, None);
        let tls = listen(IDENTITY).unwrap().listen.tls.unwrap();
        assert_eq!((tls.tcp, tls.unix), (TlsMode::Required, TlsMode::Optional));
        assert_eq!(tls.files.certificate, Path::new("/etc/calpe/c.pem"));
        let chosen = format!("{IDENTITY}tls = \"off\"\ntls_unix = \"required\"");
        let tls = listen(&chosen).unwrap().listen.tls.unwrap();
        assert_eq!((tls.tcp, tls.unix), (TlsMode::Off, TlsMode::Required));
        assert_eq!(listen("tls = \"off\"").unwrap().listen.tls, None);
    }

    #[test]
    fn keys_that_need_others_say_which() {
        problem(listen("tls_certificate = \"c\""), "2:listen.tls_certificate: needs tls_key");
        problem(listen("tls_key = \"k\""), "listen.tls_key: needs tls_certificate");
        problem(listen("tls = \"required\""), "listen.tls: needs tls_certificate and tls_key");
        problem(listen("tls_unix = \"optional\""), "listen.tls_unix: needs tls_certificate");
        problem(listen("tls_client_ca = \"ca\""), "listen.tls_client_ca: needs tls_certificate");
        problem(listen(&format!("{IDENTITY}tls_crl = \"crl\"")), "listen.tls_crl: needs tls_client_ca");
        problem(listen(&format!("{IDENTITY}tls = \"on\"")), "'on' is not a mode of TLS");
        problem(parse("[remote]\n"), "1:remote: needs tls_ca");
        problem(parse("[remote]\ntls_ca = \"a\"\ntls_key = \"k\""), "remote.tls_key: needs tls_certificate");
        problem(parse("[remote]\ntls_ca = \"a\"\ntls_crl = \"k\""), "remote.tls_crl: unknown key");
        let text = "[remote]\ntls_ca = \"a\"\ntls_server_name = \"store\"";
        let remote = parse(text).unwrap().remote.unwrap();
        assert_eq!(
            (remote.ca.as_path(), remote.server_name.as_deref()),
            (Path::new("/etc/calpe/a"), Some("store"))
        );
        let name = text.replace("store", "a b");
        problem(parse(&name), "remote.tls_server_name: 'a b' is neither a host name nor an address");
    }

    #[test]
    fn who_may_use_an_array_is_said_by_patterns() {
        let with = |ca: &str, keys: &str| {
            let listen = format!("[listen]\n{IDENTITY}{ca}");
            parse(&format!("{listen}[[array]]\nname = \"a\"\nsearch = [\"m\"]\n{keys}"))
        };
        let ca = "tls_client_ca = \"ca\"\n";
        let rules = |keys: &str| with(ca, keys).unwrap().arrays[0].rules.clone();
        assert_eq!(rules(""), None, "every certificate of the CA");
        let pattern = |text: &str| text.parse::<PeerPattern>().unwrap();
        let both = rules("tls_allow = [\"CN:one\", \"DNS:*.a\"]\ntls_allow_read_only = [\"*\"]").unwrap();
        assert_eq!(both.write, [pattern("CN:one"), pattern("DNS:*.a")]);
        assert_eq!(both.read, [pattern("*")]);
        let one = rules("tls_allow_read_only = [\"*\"]").unwrap();
        assert_eq!((one.write.len(), one.read.len()), (0, 1), "nobody writes");
        assert_eq!(rules("tls_allow = []").unwrap().write.len(), 0, "nobody at all");
        problem(with("", "tls_allow = [\"CN:one\"]"), "array[0].tls_allow: needs tls_client_ca");
        problem(with(ca, "tls_allow = \"CN:one\""), "array[0].tls_allow: expected a list of patterns");
        problem(with(ca, "tls_allow = [\"*\", \"one\"]"), "8:array[0].tls_allow: 'one' is no pattern");
        problem(with(ca, "tls_allow_read_only = [7]"), "tls_allow_read_only: expected a text");
        let many = vec!["\"*\""; PATTERNS_MAX + 1].join(",");
        problem(with(ca, &format!("tls_allow = [{many}]")), "at most 256");
    }

    #[test]
    fn tcp_beyond_loopback_needs_tls_with_client_certificates_or_an_explicit_word() {
        let with = |more: &str| listen(&format!("tcp = \"192.0.2.7:10809\"\n{more}"));
        let ca = format!("{IDENTITY}tls_client_ca = \"ca\"\n");
        with(&ca).expect("everybody has to prove who it is");
        problem(with(""), "not a loopback address");
        listen("tcp = \"[::ffff:127.0.0.1]:10809\"").expect("the same as 127.0.0.1");
        problem(with(IDENTITY), "not a loopback address");
        problem(with(&format!("{ca}tls = \"optional\"")), "not a loopback address");
        problem(with(&format!("{ca}tls = \"off\"")), "not a loopback address");
        let open = with(&format!("{IDENTITY}plaintext = true")).expect("asked for");
        assert!(open.listen.plaintext);
    }
}
