//! Verifies peers' certificates only with CAs that have not expired: the TLS library does not ask
//! how long a trusted CA is valid.
//!
//! Invariant: a certificate is refused if every CA that signs it had expired at the time of
//! verification. Must not know files.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The last second of a CA, since 1970, and its certificate.
pub(super) type DatedCa = (u64, CertificateDer<'static>);

/// Makes a verifier that trusts these CAs.
type Make<V> = dyn Fn(RootCertStore) -> Result<Arc<V>, Error> + Send + Sync;

/// Verifies with the CAs that have not expired at the time of the call.
pub(super) struct Dated<V: ?Sized> {
    /// In order of expiry.
    cas: Vec<DatedCa>,
    make: Box<Make<V>>,
    /// Judges by all of them.
    all: Arc<V>,
    /// How many of the first CAs had expired at the last rebuild, and the verifier without them.
    later: Mutex<Option<(usize, Arc<V>)>>,
}

impl<V: ?Sized> Dated<V> {
    /// # Errors
    /// The error of `make` for all CAs.
    pub(super) fn new(mut cas: Vec<DatedCa>, make: Box<Make<V>>) -> Result<Dated<V>, Error> {
        cas.sort_by_key(|(end, _)| *end);
        let all = make(roots(&cas)?)?;
        Ok(Dated { cas, make, all, later: Mutex::default() })
    }

    /// Verifies with all CAs, and then, where some have expired, with the others alone.
    fn judge<T>(&self, now: UnixTime, by: impl Fn(&V) -> Result<T, Error>) -> Result<T, Error> {
        // All CAs first, so that other faults are reported as such.
        let verified = by(&self.all)?;
        let expired = self.cas.partition_point(|(end, _)| *end < now.as_secs());
        let Some((last_end, _)) = self.cas[..expired].last() else { return Ok(verified) };
        let not_after = UnixTime::since_unix_epoch(Duration::from_secs(*last_end));
        let of_expired = CertificateError::ExpiredContext { time: now, not_after };
        if expired == self.cas.len() {
            return Err(of_expired.into());
        }
        by(&*self.without(expired)?).map_err(|error| match error {
            Error::InvalidCertificate(CertificateError::UnknownIssuer) => of_expired.into(),
            error => error,
        })
    }

    fn without(&self, expired: usize) -> Result<Arc<V>, Error> {
        let mut later = self.later.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((number, judge)) = &*later
            && *number == expired
        {
            return Ok(Arc::clone(judge));
        }
        let judge = (self.make)(roots(&self.cas[expired..])?)?;
        *later = Some((expired, Arc::clone(&judge)));
        Ok(judge)
    }
}

fn roots(cas: &[DatedCa]) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    cas.iter().try_for_each(|(_, ca)| roots.add(ca.clone()))?;
    Ok(roots)
}

impl<V: ?Sized> fmt::Debug for Dated<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dated").field("cas", &self.cas.len()).finish_non_exhaustive()
    }
}

impl ClientCertVerifier for Dated<dyn ClientCertVerifier> {
    fn offer_client_auth(&self) -> bool {
        self.all.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.all.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.all.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.judge(now, |by| by.verify_client_cert(own, between, now))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.all.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.all.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.all.supported_verify_schemes()
    }
}

impl ServerCertVerifier for Dated<dyn ServerCertVerifier> {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.judge(now, |by| by.verify_server_cert(own, between, name, ocsp, now))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.all.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.all.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.all.supported_verify_schemes()
    }
}
