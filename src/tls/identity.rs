//! Who this host is to TLS peers and whom it trusts, for both halves: files to configurations of rustls.
//!
//! TLS 1.3 and 1.2 with the cipher suites that rustls considers safe, by the provider `ring`. Must not know sockets.

use super::files::{FileFault, FileRole, Source, TlsFileError};
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, Error, InconsistentKeys, RootCertStore, ServerConfig};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

/// The files of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerFiles {
    /// Its certificate and those that lead to the root, PEM.
    pub certificate: PathBuf,
    /// The private key of the certificate, PEM, not readable for everybody.
    pub key: PathBuf,
    /// The CA that signs clients' certificates, PEM. Given, clients must have such a certificate.
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
    /// The name that the server's certificate must have, where that is not the host that is connected to.
    pub server_name: Option<String>,
}

/// What a server presents and demands. The files can be read again while it is in use.
#[derive(Debug)]
pub struct ServerTls {
    files: ServerFiles,
    current: RwLock<Arc<ServerConfig>>,
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
        Ok(ServerTls { files: files.clone(), current: RwLock::new(Arc::new(server_config(files)?)) })
    }

    /// Reads the files again. New connections use them; on an error, all stays as it was.
    ///
    /// # Errors
    /// As [`ServerTls::load`].
    pub fn reload(&self) -> Result<(), TlsFileError> {
        let fresh = Arc::new(server_config(&self.files)?);
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = fresh;
        Ok(())
    }

    /// Whether clients must prove who they are.
    #[must_use]
    pub fn demands_certificates(&self) -> bool {
        self.files.client_ca.is_some()
    }

    pub(super) fn config(&self) -> Arc<ServerConfig> {
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
            .with_root_certificates(roots(ca)?);
        let mut config = match &files.identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let (chain, secret) = identity(certificate, key)?;
                builder
                    .with_client_auth_cert(chain, secret)
                    .map_err(|error| key_error(error, certificate, key))?
            }
        };
        config.resumption = Resumption::disabled();
        Ok(ClientTls { config: Arc::new(config), server_name: files.server_name.clone() })
    }

    /// The same, for a server whose certificate has this name.
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
        ServerName::try_from(name.to_owned()).map_err(|_| {
            let what =
                format!("'{name}' is neither a host name nor an address that a certificate could have");
            io::Error::new(io::ErrorKind::InvalidInput, what)
        })
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn server_config(files: &ServerFiles) -> Result<ServerConfig, TlsFileError> {
    let own = Source { role: FileRole::Certificate, file: &files.certificate };
    let (chain, secret) = identity(&files.certificate, &files.key)?;
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| own.unusable(error))?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let ca = Source { role: FileRole::Ca, file: path };
            let mut verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(ca)?), provider());
            let crl = files.crl.as_ref().map(|file| Source { role: FileRole::Crl, file });
            if let Some(crl) = crl {
                verifier = verifier.with_crls(crl.revocation_lists()?);
            }
            // The CA was checked; what is left to be wrong is the list.
            let verifier = verifier.build().map_err(|error| crl.unwrap_or(ca).unusable(error))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(chain, secret)
        .map_err(|error| key_error(error, &files.certificate, &files.key))?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// A certificate that is valid now, those behind it, and the key.
fn identity(
    certificate: &Path,
    key: &Path,
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), TlsFileError> {
    let own = Source { role: FileRole::Certificate, file: certificate };
    let chain = own.certificates()?;
    own.check_validity(&chain[0])?;
    Ok((chain, Source { role: FileRole::Key, file: key }.private_key()?))
}

fn key_error(error: Error, certificate: &Path, key: &Path) -> TlsFileError {
    let key = Source { role: FileRole::Key, file: key };
    match error {
        Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            key.fault(FileFault::Mismatch { certificate: certificate.into() })
        }
        Error::InvalidCertificate(_) => {
            Source { role: FileRole::Certificate, file: certificate }.unusable(error)
        }
        other => key.unusable(format_args!("the key cannot be used: {other}")),
    }
}

fn roots(ca: Source<'_>) -> Result<RootCertStore, TlsFileError> {
    let mut roots = RootCertStore::empty();
    for (index, certificate) in ca.certificates()?.into_iter().enumerate() {
        roots.add(certificate).map_err(|error| {
            ca.unusable(format_args!("certificate {} cannot be trusted: {error}", index + 1))
        })?;
    }
    Ok(roots)
}
