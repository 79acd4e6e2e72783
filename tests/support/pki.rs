//! Certificate authorities and certificates for tests, as PEM files.

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType,
    SerialNumber, date_time_ymd,
};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A certificate authority with a folder to put files into.
pub(crate) struct Ca {
    dir: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// The files of one identity.
#[derive(Clone)]
pub(crate) struct Identity {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Ca {
    /// Makes a CA, with its certificate at `DIR/ca-cert.pem`.
    pub(crate) fn new(dir: &Path) -> Ca {
        Ca::new_until(dir, 2090)
    }

    /// The same, valid until the first of January of a year.
    pub(crate) fn new_until(dir: &Path, year: i32) -> Ca {
        fs::create_dir_all(dir).expect("a folder");
        let mut params = CertificateParams::new(vec![]).expect("no names");
        let name = dir.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        params.distinguished_name.push(DnType::CommonName, format!("test CA {name}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(year, 1, 1));
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a CA");
        fs::write(dir.join("ca-cert.pem"), issuer.pem()).expect("written");
        Ca { dir: dir.into(), issuer }
    }

    pub(crate) fn certificate(&self) -> PathBuf {
        self.dir.join("ca-cert.pem")
    }

    /// Signs a certificate and writes `NAME-cert.pem` and `NAME-key.pem`, names as libnbd and qemu want them.
    pub(crate) fn issue(&self, name: &str, serial: u64) -> Identity {
        self.issue_until(name, serial, 2090)
    }

    /// The same, valid until the first of January of a year.
    pub(crate) fn issue_until(&self, name: &str, serial: u64, year: i32) -> Identity {
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
        let mut params = CertificateParams::new(names).expect("sound names");
        (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(year, 1, 1));
        self.sign(name, serial, params)
    }

    /// The same with other names: one with `://` is a URI, one with `@` an email address, any other a host.
    pub(crate) fn issue_to(&self, name: &str, serial: u64, names: &[&str]) -> Identity {
        let mut params = CertificateParams::new(vec![]).expect("no names");
        params.subject_alt_names = names
            .iter()
            .map(|&name| {
                let text = name.try_into().expect("ASCII");
                match name {
                    _ if name.contains("://") => SanType::URI(text),
                    _ if name.contains('@') => SanType::Rfc822Name(text),
                    _ => SanType::DnsName(text),
                }
            })
            .collect();
        (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2090, 1, 1));
        self.sign(name, serial, params)
    }

    /// The same, valid for some days from now on.
    pub(crate) fn issue_for_days(&self, name: &str, serial: u64, days: u64) -> Identity {
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
        let mut params = CertificateParams::new(names).expect("sound names");
        params.not_before = date_time_ymd(2020, 1, 1);
        // Plus half a day, so that the number of whole days is right however long the test takes.
        params.not_after = (SystemTime::now() + Duration::from_secs(days * 86_400 + 43_200)).into();
        self.sign(name, serial, params)
    }

    fn sign(&self, name: &str, serial: u64, mut params: CertificateParams) -> Identity {
        params.distinguished_name.push(DnType::CommonName, name);
        params.serial_number = Some(SerialNumber::from(serial));
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        let files = Identity {
            certificate: self.dir.join(format!("{name}-cert.pem")),
            key: self.dir.join(format!("{name}-key.pem")),
        };
        fs::write(&files.certificate, certificate.pem()).expect("written");
        fs::write(&files.key, key.serialize_pem()).expect("written");
        fs::set_permissions(&files.key, fs::Permissions::from_mode(0o600)).expect("ours");
        files
    }

    /// Revokes certificates by their serial numbers; writes `crl.pem`.
    pub(crate) fn revoke(&self, serials: &[u64]) -> PathBuf {
        let revoked = |serial: &u64| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: date_time_ymd(2021, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: date_time_ymd(2021, 1, 1),
            next_update: date_time_ymd(2090, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let path = self.dir.join("crl.pem");
        let list = params.signed_by(&self.issuer).expect("a list");
        fs::write(&path, list.pem().expect("PEM")).expect("written");
        path
    }
}
