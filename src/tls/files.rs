//! Certificates, keys and revocation lists from PEM files.
//!
//! Invariants: every error names the file and what is wrong with it; a key that users outside its
//! owner and group may read is refused. Must not know what the files are for.

use super::key_kind::{KeyKind, USABLE_KEYS};
use super::peer::PeerNames;
use calpe_core::units::{quoted, shown};
use calpe_host::files::{self, ReadError};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use x509_cert::der::Decode;

/// Longest file that is read: a revocation list of a hundred thousand certificates is half as long.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileRole {
    /// The own certificate, with the chain from it to the root.
    Certificate,
    /// The private key of the own certificate.
    Key,
    /// The CAs that sign peers' certificates.
    Ca,
    /// Revoked certificates of peers.
    Crl,
}

/// A certificate in a file, and when it expires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFacts {
    /// What its file is for.
    pub role: FileRole,
    /// The file.
    pub file: PathBuf,
    /// The subject of the certificate.
    pub subject: String,
    /// Its last second, since 1970.
    pub not_after_unix: u64,
}

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {fault}", shown(file))]
pub struct TlsFileError {
    /// What the file is used for.
    pub role: FileRole,
    /// Its path.
    pub file: PathBuf,
    /// What is wrong with it.
    pub fault: FileFault,
}

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
pub enum FileFault {
    /// It cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(#[from] ReadError),
    /// It is not PEM, or damaged.
    #[error("is not sound PEM: {0}")]
    Pem(String),
    /// The file has no PEM section of the needed kind.
    #[error("holds no {what} in PEM form ('-----BEGIN {label}-----')")]
    Nothing {
        /// What was looked for.
        what: &'static str,
        /// How it is labelled.
        label: &'static str,
    },
    /// The key needs a passphrase.
    #[error(
        "the key is encrypted with a passphrase, which a daemon cannot be asked for: store it decrypted, with mode 0600 \
         ('openssl pkey -in {} -out NEW'), and name that file",
        quoted(key)
    )]
    Encrypted {
        /// Its file.
        key: PathBuf,
    },
    /// Others may read the key.
    #[error("the key has mode {mode:04o}, so that every user of this host may use it: chmod 0600 (or 0640)")]
    Exposed {
        /// Its permissions.
        mode: u32,
    },
    /// A certificate, key or list that is damaged or of an unknown kind.
    #[error("{0}")]
    Unusable(String),
    /// The key is intact, and of a kind that cannot be used.
    #[error("the key is {0}, which cannot be used here: use {USABLE_KEYS}")]
    UnusableKey(KeyKind),
    /// The key belongs to another certificate.
    #[error("the key does not belong to the certificate in {}", shown(certificate))]
    Mismatch {
        /// The certificate's file.
        certificate: PathBuf,
    },
    /// Revocation lists of CAs that are not trusted here.
    #[error(
        "holds no revocation list of a CA in {}, and every client would be refused: name the list of that CA, or leave it out",
        shown(ca)
    )]
    OfOtherCa {
        /// The file of the CAs.
        ca: PathBuf,
    },
    /// The certificate has expired.
    #[error("the certificate expired {} ago: renew it", Ago(*seconds))]
    Expired {
        /// Since when.
        seconds: u64,
    },
    /// The certificate is not valid yet.
    #[error("the certificate becomes valid only in {}: check this host's clock", Ago(*seconds))]
    NotYetValid {
        /// Until when.
        seconds: u64,
    },
}

/// A time in the units that people use.
struct Ago(u64);

impl fmt::Display for Ago {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            seconds @ ..120 => write!(f, "{seconds} s"),
            seconds @ ..7200 => write!(f, "{} min", seconds / 60),
            seconds @ ..172_800 => write!(f, "{} h", seconds / 3600),
            seconds => write!(f, "{} days", seconds / 86_400),
        }
    }
}

/// A file with its role, for errors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source<'a> {
    pub role: FileRole,
    pub file: &'a Path,
}

impl Source<'_> {
    pub(super) fn fault(self, fault: FileFault) -> TlsFileError {
        TlsFileError { role: self.role, file: self.file.into(), fault }
    }

    pub(super) fn unusable(self, what: impl fmt::Display) -> TlsFileError {
        self.fault(FileFault::Unusable(what.to_string()))
    }

    /// The certificates in the file, in its order; at least one.
    pub(super) fn certificates(self) -> Result<Vec<CertificateDer<'static>>, TlsFileError> {
        self.all("certificate", "CERTIFICATE", &self.read()?)
    }

    /// Subject and expiry of the certificates in the file, in its order.
    pub(super) fn facts(self) -> Result<Vec<CertificateFacts>, TlsFileError> {
        let facts = |certificate: &CertificateDer<'_>| {
            let parsed = self.parse(certificate)?;
            let not_after = parsed.tbs_certificate.validity.not_after.to_unix_duration();
            Ok(CertificateFacts {
                role: self.role,
                file: self.file.to_owned(),
                subject: PeerNames::read(certificate).to_string(),
                not_after_unix: not_after.as_secs(),
            })
        };
        self.certificates()?.iter().map(facts).collect()
    }

    /// The revocation lists in the file; at least one.
    pub(super) fn revocation_lists(self) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsFileError> {
        self.all("certificate revocation list", "X509 CRL", &self.read()?)
    }

    /// The subjects of those of these CAs that none of these revocation lists, which are in this
    /// file, is from.
    pub(super) fn not_covered(
        self,
        lists: &[CertificateRevocationListDer<'_>],
        cas: &[CertificateDer<'_>],
    ) -> Result<Vec<String>, TlsFileError> {
        let issuer = |list: &CertificateRevocationListDer<'_>| {
            let parsed = x509_cert::crl::CertificateList::from_der(list)
                .map_err(|error| self.unusable(format_args!("the revocation list is damaged: {error}")))?;
            Ok(parsed.tbs_cert_list.issuer)
        };
        let issuers = lists.iter().map(issuer).collect::<Result<Vec<_>, TlsFileError>>()?;
        let is_listed = |ca: &&CertificateDer<'_>| {
            let parsed = x509_cert::Certificate::from_der(ca);
            parsed.is_ok_and(|parsed| issuers.contains(&parsed.tbs_certificate.subject))
        };
        let others = cas.iter().filter(|ca| !is_listed(ca));
        Ok(others.map(|ca| PeerNames::read(ca).to_string()).collect())
    }

    /// The private key in the file.
    pub(super) fn private_key(self) -> Result<PrivateKeyDer<'static>, TlsFileError> {
        let bytes = self.read()?;
        match PrivateKeyDer::from_pem_slice(&bytes) {
            Ok(key) => Ok(key),
            Err(_) if is_encrypted(&bytes) => {
                Err(self.fault(FileFault::Encrypted { key: self.file.to_owned() }))
            }
            Err(pem::Error::NoItemsFound) => {
                Err(self.fault(FileFault::Nothing { what: "private key", label: "PRIVATE KEY" }))
            }
            Err(error) => Err(self.damaged(error)),
        }
    }

    /// Refuses a certificate that is not valid now.
    pub(super) fn check_validity(self, certificate: &CertificateDer<'_>) -> Result<(), TlsFileError> {
        let parsed = self.parse(certificate)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let validity = parsed.tbs_certificate.validity;
        let (from, until) = (validity.not_before.to_unix_duration(), validity.not_after.to_unix_duration());
        if now > until {
            return Err(self.fault(FileFault::Expired { seconds: (now - until).as_secs() }));
        }
        if now < from {
            return Err(self.fault(FileFault::NotYetValid { seconds: (from - now).as_secs() }));
        }
        Ok(())
    }

    /// The last second of a certificate, since 1970; the end of time for one that cannot be parsed.
    pub(super) fn end(self, certificate: &CertificateDer<'_>) -> u64 {
        let end = self.parse(certificate).map(|parsed| parsed.tbs_certificate.validity.not_after);
        end.map_or(u64::MAX, |end| end.to_unix_duration().as_secs())
    }

    fn parse(self, certificate: &CertificateDer<'_>) -> Result<x509_cert::Certificate, TlsFileError> {
        x509_cert::Certificate::from_der(certificate)
            .map_err(|error| self.unusable(format_args!("the certificate is damaged: {error}")))
    }

    fn all<T: PemObject>(
        self,
        what: &'static str,
        label: &'static str,
        bytes: &[u8],
    ) -> Result<Vec<T>, TlsFileError> {
        let items =
            T::pem_slice_iter(bytes).collect::<Result<Vec<T>, _>>().map_err(|error| self.damaged(error))?;
        if items.is_empty() { Err(self.fault(FileFault::Nothing { what, label })) } else { Ok(items) }
    }

    fn damaged(self, error: pem::Error) -> TlsFileError {
        let text =
            |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).trim().chars().take(80).collect::<String>();
        self.fault(FileFault::Pem(match error {
            pem::Error::MissingSectionEnd { end_marker } => {
                format!("the line '{}' is missing", text(end_marker))
            }
            pem::Error::IllegalSectionStart { line } => format!("a section starts with '{}'", text(line)),
            // The line is not quoted: it may be part of a key.
            pem::Error::Base64Decode(_) => "a section is damaged (base64)".into(),
            other => other.to_string(),
        }))
    }

    fn read(self) -> Result<Vec<u8>, TlsFileError> {
        let unreadable = |error| self.fault(FileFault::Unreadable(error));
        let file = files::open(self.file, files::Source::File).map_err(unreadable)?;
        let mode = file.metadata().permissions().mode() & 0o7777;
        if self.role == FileRole::Key && mode & 0o007 != 0 {
            return Err(self.fault(FileFault::Exposed { mode }));
        }
        file.read(FILE_BYTES_MAX).map_err(unreadable)
    }
}

/// Whether a PEM file holds an encrypted key, either in PKCS#8 form or with the headers of RFC
/// 1421, which no parser of plain keys takes.
fn is_encrypted(pem: &[u8]) -> bool {
    let marks: [&[u8]; 2] = [b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"\nProc-Type: 4,ENCRYPTED"];
    marks.iter().any(|mark| pem.windows(mark.len()).any(|window| window == *mark))
}
