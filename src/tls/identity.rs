//! The identity of this host towards TLS peers and the CAs that it trusts, for both halves: makes
//! configurations of rustls from files.
//!
//! TLS 1.3 and 1.2 with the cipher suites that rustls considers safe, by the provider `ring`. Must
//! not know sockets.

use super::dated::{Dated, DatedCa};
use super::files::{CertificateFacts, FileFault, FileRole, Source, TlsFileError};
use super::key_kind::KeyKind;
use super::peer::Peer;
use calpe_core::units::shown;
use rustls::client::danger::ServerCertVerifier;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, Error, InconsistentKeys, RootCertStore, ServerConfig};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

/// The files of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerFiles {
    /// Its certificate and the chain to the root, PEM.
    pub certificate: PathBuf,
    /// The private key of the certificate, PEM; not readable for everybody.
    pub key: PathBuf,
    /// The CA that signs clients' certificates, PEM. If given, each client must present such a
    /// certificate.
    pub client_ca: Option<PathBuf>,
    /// Clients' certificates that were revoked, PEM; needs `client_ca`.
    pub crl: Option<PathBuf>,
}

/// The files of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientFiles {
    /// The CA that signs servers' certificates, PEM.
    pub ca: PathBuf,
    /// The own certificate and its key, PEM, for servers that demand them.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name that the server's certificate must have, where it is not the host of the URI.
    pub server_name: Option<String>,
}

/// What a server presents and demands. The files can be read again while it is in use.
#[derive(Debug)]
pub struct ServerTls {
    current: RwLock<Arc<Current>>,
}

/// The configuration from the last reading of the files.
#[derive(Debug)]
pub(super) struct Current {
    pub(super) config: Arc<ServerConfig>,
    /// Verifies clients' certificates; none where clients need none.
    verifier: Option<Arc<dyn ClientCertVerifier>>,
}

impl Current {
    fn load(files: &ServerFiles) -> Result<Current, TlsFileError> {
        let verifier = client_verifier(files)?;
        let config = Arc::new(server_config(files, verifier.clone())?);
        Ok(Current { config, verifier })
    }
}

impl ServerFiles {
    /// Facts about the own certificates and the CA's.
    ///
    /// # Errors
    /// The first file that cannot be used, and why.
    pub fn certificates(&self) -> Result<Vec<CertificateFacts>, TlsFileError> {
        let own = Some((FileRole::Certificate, &self.certificate));
        facts(own.into_iter().chain(self.client_ca.as_ref().map(|file| (FileRole::Ca, file))))
    }

    /// Warnings about files that can be used, a line each: a CA without a revocation list beside
    /// CAs with one, since all its clients are refused.
    ///
    /// # Errors
    /// The first file that cannot be used, and why.
    pub fn advice(&self) -> Result<Vec<String>, TlsFileError> {
        let (Some(ca), Some(crl)) = (&self.client_ca, &self.crl) else { return Ok(Vec::new()) };
        let list = Source { role: FileRole::Crl, file: crl };
        let cas = Source { role: FileRole::Ca, file: ca }.certificates()?;
        let without = list.not_covered(&list.revocation_lists()?, &cas)?;
        let line = |subject: String| {
            format!(
                "{}: holds no revocation list of {subject} in {}: every client with a certificate by that CA is refused; add its list",
                shown(crl),
                shown(ca)
            )
        };
        Ok(without.into_iter().map(line).collect())
    }

    /// Every file that cannot be used, and why. Files that belong together are compared where each
    /// is valid by itself.
    #[must_use]
    pub fn problems(&self) -> Vec<TlsFileError> {
        let own = identity_problems(&self.certificate, &self.key);
        let own = or_together(own, || server_config(self, None).map(drop));
        let ca = self.client_ca.as_ref().map(|file| dated_cas(Source { role: FileRole::Ca, file }).map(drop));
        let crl =
            self.crl.as_ref().map(|file| Source { role: FileRole::Crl, file }.revocation_lists().map(drop));
        let of_clients = [ca, crl].into_iter().flatten().filter_map(Result::err).collect();
        let of_clients = or_together(of_clients, || client_verifier(self).map(drop));
        own.into_iter().chain(of_clients).collect()
    }
}

impl ClientFiles {
    /// Facts about the own certificates and the CA's.
    ///
    /// # Errors
    /// The first file that cannot be used, and why.
    pub fn certificates(&self) -> Result<Vec<CertificateFacts>, TlsFileError> {
        let own = self.identity.as_ref().map(|(certificate, _)| (FileRole::Certificate, certificate));
        facts(own.into_iter().chain([(FileRole::Ca, &self.ca)]))
    }

    /// Every file that cannot be used, and why. Files that belong together are compared where all
    /// are valid.
    #[must_use]
    pub fn problems(&self) -> Vec<TlsFileError> {
        let own = self.identity.as_ref().map(|(certificate, key)| identity_problems(certificate, key));
        let ca = dated_cas(Source { role: FileRole::Ca, file: &self.ca }).err();
        let problems = own.into_iter().flatten().chain(ca).collect();
        or_together(problems, || ClientTls::load(self).map(drop))
    }
}

/// Problems of single files, or else of files together.
fn or_together(
    problems: Vec<TlsFileError>,
    together: impl FnOnce() -> Result<(), TlsFileError>,
) -> Vec<TlsFileError> {
    if problems.is_empty() { together().err().into_iter().collect() } else { problems }
}

/// Problems of a certificate and of its key, each by itself.
fn identity_problems(certificate: &Path, key: &Path) -> Vec<TlsFileError> {
    let own = Source { role: FileRole::Certificate, file: certificate };
    let chain = own.certificates().and_then(|chain| own.check_validity(&chain[0]));
    let key = Source { role: FileRole::Key, file: key }.private_key().map(drop);
    [chain, key].into_iter().filter_map(Result::err).collect()
}

fn facts<'a>(
    files: impl Iterator<Item = (FileRole, &'a PathBuf)>,
) -> Result<Vec<CertificateFacts>, TlsFileError> {
    let lists = files.map(|(role, file)| Source { role, file }.facts());
    Ok(lists.collect::<Result<Vec<_>, _>>()?.concat())
}

/// What a client presents and demands.
#[derive(Clone, Debug)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    server_name: Option<String>,
}

impl ServerTls {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// The first file that cannot be used, and why.
    pub fn load(files: &ServerFiles) -> Result<ServerTls, TlsFileError> {
        Ok(ServerTls { current: RwLock::new(Arc::new(Current::load(files)?)) })
    }

    /// Takes over the configuration of `fresh`. New connections use it; for the others ask
    /// [`ServerTls::trusts`].
    pub fn renew(&self, fresh: &ServerTls) {
        let fresh = fresh.current();
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = fresh;
    }

    /// Whether clients must present certificates.
    #[must_use]
    pub fn demands_certificates(&self) -> bool {
        self.current().verifier.is_some()
    }

    /// Whether the present files would let a client in that was let in before: its CA is still
    /// trusted, and its certificate is not revoked. A certificate that has expired since still
    /// counts. Does cryptography.
    ///
    /// # Errors
    /// Why not.
    pub fn trusts(&self, peer: &Peer) -> Result<(), Error> {
        let current = self.current();
        let Some(verifier) = &current.verifier else { return Ok(()) };
        let (own, between) = peer.chain.split_first().ok_or(Error::NoCertificatesPresented)?;
        verifier.verify_client_cert(own, between, peer.since).map(|_| ())
    }

    pub(super) fn current(&self) -> Arc<Current> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ClientTls {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// The first file that cannot be used, and why.
    pub fn load(files: &ClientFiles) -> Result<ClientTls, TlsFileError> {
        let ca = Source { role: FileRole::Ca, file: &files.ca };
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| ca.unusable(error))?
            .dangerous()
            .with_custom_certificate_verifier(server_verifier(ca)?);
        let mut config = match &files.identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let (chain, secret) = identity(certificate, key)?;
                let kind = KeyKind::of(&secret);
                builder
                    .with_client_auth_cert(chain, secret)
                    .map_err(|error| key_error(error, kind, certificate, key))?
            }
        };
        config.resumption = Resumption::disabled();
        Ok(ClientTls { config: Arc::new(config), server_name: files.server_name.clone() })
    }

    /// The same configuration, for a server whose certificate has this name.
    #[must_use]
    pub fn for_server(&self, name: &str) -> ClientTls {
        ClientTls { config: Arc::clone(&self.config), server_name: Some(name.to_owned()) }
    }

    pub(super) fn config(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.config)
    }

    /// The name that the certificate of the server at `host` must have.
    pub(super) fn name_of(&self, host: &str) -> io::Result<ServerName<'static>> {
        let name = self.server_name.as_deref().unwrap_or(host);
        server_name(name).map_err(|what| io::Error::new(io::ErrorKind::InvalidInput, what))
    }
}

/// Checks that a server's certificate can have this name.
///
/// # Errors
/// Why it could not.
pub(crate) fn check_server_name(name: &str) -> Result<(), String> {
    server_name(name).map(drop)
}

fn server_name(name: &str) -> Result<ServerName<'static>, String> {
    let wrong = |_| format!("'{name}' is neither a host name nor an address that a certificate could have");
    ServerName::try_from(name.to_owned()).map_err(wrong)
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// The verifier of clients' certificates; none where clients need none.
fn client_verifier(files: &ServerFiles) -> Result<Option<Arc<dyn ClientCertVerifier>>, TlsFileError> {
    let Some(path) = &files.client_ca else { return Ok(None) };
    let ca = Source { role: FileRole::Ca, file: path };
    let cas = dated_cas(ca)?;
    let crl = files.crl.as_ref().map(|file| Source { role: FileRole::Crl, file });
    let lists = crl.map(Source::revocation_lists).transpose()?.unwrap_or_default();
    if let Some(crl) = crl {
        let all = ca.certificates()?;
        if crl.not_covered(&lists, &all)?.len() == all.len() {
            return Err(crl.fault(FileFault::OfOtherCa { ca: path.clone() }));
        }
    }
    let make = move |roots: RootCertStore| -> Result<Arc<dyn ClientCertVerifier>, Error> {
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
        // A file without lists counts as no file.
        let built = verifier.with_crls(lists.clone()).build();
        let verifier = built.map_err(|error| Error::General(error.to_string()))?;
        Ok(verifier)
    };
    // The CA was checked before, so the fault is in the list.
    let verifier = Dated::<dyn ClientCertVerifier>::new(cas, Box::new(make));
    Ok(Some(Arc::new(verifier.map_err(|error| crl.unwrap_or(ca).unusable(error))?)))
}

/// The verifier of servers' certificates.
fn server_verifier(ca: Source<'_>) -> Result<Arc<dyn ServerCertVerifier>, TlsFileError> {
    let make = |roots: RootCertStore| -> Result<Arc<dyn ServerCertVerifier>, Error> {
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider());
        let verifier = verifier.build().map_err(|error| Error::General(error.to_string()))?;
        Ok(verifier)
    };
    let verifier = Dated::<dyn ServerCertVerifier>::new(dated_cas(ca)?, Box::new(make));
    Ok(Arc::new(verifier.map_err(|error| ca.unusable(error))?))
}

fn server_config(
    files: &ServerFiles,
    verifier: Option<Arc<dyn ClientCertVerifier>>,
) -> Result<ServerConfig, TlsFileError> {
    let own = Source { role: FileRole::Certificate, file: &files.certificate };
    let (chain, secret) = identity(&files.certificate, &files.key)?;
    let kind = KeyKind::of(&secret);
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| own.unusable(error))?;
    let builder = match verifier {
        None => builder.with_no_client_auth(),
        Some(verifier) => builder.with_client_cert_verifier(verifier),
    };
    let mut config = builder
        .with_single_cert(chain, secret)
        .map_err(|error| key_error(error, kind, &files.certificate, &files.key))?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// A certificate that is valid now, its chain, and the key.
fn identity(
    certificate: &Path,
    key: &Path,
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), TlsFileError> {
    let own = Source { role: FileRole::Certificate, file: certificate };
    let chain = own.certificates()?;
    own.check_validity(&chain[0])?;
    Ok((chain, Source { role: FileRole::Key, file: key }.private_key()?))
}

fn key_error(error: Error, kind: KeyKind, certificate: &Path, key: &Path) -> TlsFileError {
    let key = Source { role: FileRole::Key, file: key };
    match error {
        Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            key.fault(FileFault::Mismatch { certificate: certificate.into() })
        }
        Error::InvalidCertificate(_) => {
            Source { role: FileRole::Certificate, file: certificate }.unusable(error)
        }
        // The library's error says only that it does not know the key.
        _ if !kind.is_usable() => key.fault(FileFault::UnusableKey(kind)),
        other => key.unusable(format_args!("the key cannot be used: {other}")),
    }
}

/// The CAs in the file, each of which can be trusted, and their last seconds.
fn dated_cas(ca: Source<'_>) -> Result<Vec<DatedCa>, TlsFileError> {
    let dated = |(index, certificate): (usize, CertificateDer<'static>)| {
        RootCertStore::empty().add(certificate.clone()).map_err(|error| {
            ca.unusable(format_args!("certificate {} cannot be trusted: {error}", index + 1))
        })?;
        Ok((ca.end(&certificate), certificate))
    };
    ca.certificates()?.into_iter().enumerate().map(dated).collect()
}
