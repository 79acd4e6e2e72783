//! The keys of TLS: the server's in `[listen]`, those for remote members in `[remote]`.
//!
//! Invariant: a file that cannot be used is a problem at the key that names it. Must not know what TLS does with them.

use super::{Reader, Section, absolute, string};
use crate::nbd::TlsMode;
use crate::tls::{ClientFiles, ClientTls, FileRole, ServerFiles, ServerTls, TlsFileError};
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
pub struct ListenTlsConfig {
    /// Certificates and key.
    pub files: ServerFiles,
    /// Whether clients on TCP may or must use it.
    pub tcp: TlsMode,
    /// Whether clients on unix sockets may or must use it.
    pub unix: TlsMode,
}

impl ListenTlsConfig {
    /// Whether nobody gets at a volume by TCP without a certificate.
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
    /// TLS of `[listen]`; none when there is none, or it is wrong, which is noted.
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
        if self.open_files
            && let Err(error) = ServerTls::load(&files)
        {
            self.file_problem(section, "tls_client_ca", &error);
        }
        let (tcp, unix) = (tcp.unwrap_or(TlsMode::Required), unix.unwrap_or(TlsMode::Optional));
        Some(ListenTlsConfig { files, tcp, unix })
    }

    /// Section `[remote]`; none when it is wrong, which is noted.
    pub(super) fn remote(&mut self, section: &Section<'_, '_>) -> Option<ClientFiles> {
        self.known(section, &REMOTE_KEYS);
        let identity = self.identity(section);
        let server_name = self.value(section, "tls_server_name", |value| string(value).map(str::to_owned));
        let ca = self.path(section, "tls_ca");
        if !section.table.contains_key("tls_ca") {
            let what = "needs tls_ca: the CA that signs the certificates of the servers";
            self.problem(section.at, section.name.trim_end_matches('.'), what);
        }
        let files = ClientFiles { ca: ca?, identity, server_name };
        if self.open_files
            && let Err(error) = ClientTls::load(&files)
        {
            self.file_problem(section, "tls_ca", &error);
        }
        Some(files)
    }

    /// A certificate and its key, which need each other.
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
