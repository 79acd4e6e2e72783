//! Names the kind of a private key: the TLS library says only that it does not take a key.
//!
//! Reads the outer form of RFC 5208 (PKCS#8), RFC 8017 (PKCS#1) and RFC 5915 (SEC1). Must not know
//! what a key is used for.

use rustls::pki_types::PrivateKeyDer;
use std::fmt;
use x509_cert::der::asn1::{AnyRef, ContextSpecific, ObjectIdentifier, OctetStringRef, UintRef};
use x509_cert::der::{Decode, Reader, SliceReader};
use x509_cert::spki::AlgorithmIdentifierRef;

/// The keys that the TLS library (rustls with ring) takes.
pub(super) const USABLE_KEYS: &str = "RSA of 2048, 3072 or 4096 bits, ECDSA with P-256 or P-384, or Ed25519";

/// Sizes of RSA keys that the library takes, in bits.
const RSA_BITS: [usize; 3] = [2048, 3072, 4096];

const RSA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");
const EC: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.2.1");
const ED25519: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.101.112");

/// Curves by their identifiers, and whether the library takes them.
const CURVES: [(ObjectIdentifier, &str, bool); 4] = [
    (ObjectIdentifier::new_unwrap("1.2.840.10045.3.1.7"), "P-256", true),
    (ObjectIdentifier::new_unwrap("1.3.132.0.34"), "P-384", true),
    (ObjectIdentifier::new_unwrap("1.3.132.0.35"), "P-521", false),
    (ObjectIdentifier::new_unwrap("1.3.132.0.10"), "secp256k1", false),
];

/// Algorithms in use that the library does not take, by their identifiers.
const OTHERS: [(ObjectIdentifier, &str); 3] = [
    (ObjectIdentifier::new_unwrap("1.2.840.10040.4.1"), "a DSA key"),
    (ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.10"), "an RSA-PSS key"),
    (ObjectIdentifier::new_unwrap("1.3.101.113"), "an Ed448 key"),
];

/// What kind of key it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyKind {
    /// RSA with a modulus of this many bits.
    Rsa(usize),
    /// A key of an elliptic curve.
    Curve(ObjectIdentifier),
    /// Of another algorithm.
    Algorithm(ObjectIdentifier),
    /// It is damaged.
    Unreadable,
}

impl KeyKind {
    pub(super) fn of(key: &PrivateKeyDer<'_>) -> KeyKind {
        let kind = match key {
            PrivateKeyDer::Pkcs1(key) => rsa(key.secret_pkcs1_der()),
            PrivateKeyDer::Sec1(key) => sec1(key.secret_sec1_der()),
            PrivateKeyDer::Pkcs8(key) => pkcs8(key.secret_pkcs8_der()),
            _ => None,
        };
        kind.unwrap_or(KeyKind::Unreadable)
    }

    /// Whether the library takes keys of this kind. If it does, the key has another fault.
    pub(super) fn is_usable(self) -> bool {
        match self {
            KeyKind::Rsa(bits) => RSA_BITS.contains(&bits),
            KeyKind::Curve(curve) => CURVES.iter().any(|(oid, _, is_usable)| *oid == curve && *is_usable),
            KeyKind::Algorithm(algorithm) => algorithm == ED25519,
            KeyKind::Unreadable => true,
        }
    }
}

impl fmt::Display for KeyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyKind::Rsa(bits) => write!(f, "an RSA key of {bits} bits"),
            KeyKind::Curve(curve) => match CURVES.iter().find(|(oid, ..)| oid == curve) {
                Some((_, name, _)) => write!(f, "an ECDSA key with the curve {name}"),
                None => write!(f, "an ECDSA key with the curve {curve}"),
            },
            KeyKind::Algorithm(algorithm) => match OTHERS.iter().find(|(oid, _)| oid == algorithm) {
                Some((_, name)) => f.write_str(name),
                None => write!(f, "a key of algorithm {algorithm}"),
            },
            KeyKind::Unreadable => f.write_str("a key of no known form"),
        }
    }
}

/// The first element of a sequence; the rest is not read.
fn first_of<'d, T>(
    der: &'d [u8],
    read: impl FnOnce(&mut SliceReader<'d>) -> x509_cert::der::Result<T>,
) -> Option<T> {
    let sequence = AnyRef::from_der(der).ok()?;
    read(&mut SliceReader::new(sequence.value()).ok()?).ok()
}

fn rsa(der: &[u8]) -> Option<KeyKind> {
    first_of(der, |reader| {
        let _version: UintRef<'_> = reader.decode()?;
        let modulus: UintRef<'_> = reader.decode()?;
        let leading = modulus.as_bytes().first().map_or(0, |byte| byte.leading_zeros() as usize);
        Ok(KeyKind::Rsa(modulus.as_bytes().len() * 8 - leading))
    })
}

fn sec1(der: &[u8]) -> Option<KeyKind> {
    first_of(der, |reader| {
        let _version: UintRef<'_> = reader.decode()?;
        let _secret: OctetStringRef<'_> = reader.decode()?;
        let curve: ContextSpecific<ObjectIdentifier> = reader.decode()?;
        Ok(KeyKind::Curve(curve.value))
    })
}

fn pkcs8(der: &[u8]) -> Option<KeyKind> {
    let (algorithm, key) = first_of(der, |reader| {
        let _version: UintRef<'_> = reader.decode()?;
        let algorithm: AlgorithmIdentifierRef<'_> = reader.decode()?;
        let key: OctetStringRef<'_> = reader.decode()?;
        Ok((algorithm, key))
    })?;
    match algorithm.oid {
        RSA => rsa(key.as_bytes()),
        EC => algorithm.parameters_oid().ok().map(KeyKind::Curve),
        other => Some(KeyKind::Algorithm(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::{PrivatePkcs1KeyDer, PrivateSec1KeyDer};

    /// A value with its tag and length.
    fn tlv(tag: u8, value: &[u8]) -> Vec<u8> {
        let len = value.len();
        let head = match len {
            ..0x80 => vec![tag, len as u8],
            0x80..0x100 => vec![tag, 0x81, len as u8],
            _ => vec![tag, 0x82, (len >> 8) as u8, len as u8],
        };
        [&head, value].concat()
    }

    #[test]
    fn the_size_of_an_rsa_key_is_that_of_its_modulus() {
        for bits in [1024usize, 1536, 2049, 3000, 8192] {
            let mut modulus = vec![0xff; bits.div_ceil(8)];
            modulus[0] >>= (8 - bits % 8) % 8;
            if modulus[0] & 0x80 != 0 {
                modulus.insert(0, 0);
            }
            let key = tlv(0x30, &[vec![2, 1, 0], tlv(2, &modulus), vec![2, 1, 3]].concat());
            let kind = KeyKind::of(&PrivatePkcs1KeyDer::from(key).into());
            assert_eq!(kind, KeyKind::Rsa(bits));
            assert!(!kind.is_usable());
        }
        assert!(RSA_BITS.iter().all(|bits| KeyKind::Rsa(*bits).is_usable()));
    }

    #[test]
    fn a_key_that_cannot_be_read_is_not_blamed_on_its_kind() {
        for noise in [vec![], vec![0x30], tlv(0x30, &[2, 1, 0]), vec![0xff; 100]] {
            let kind = KeyKind::of(&PrivatePkcs1KeyDer::from(noise.clone()).into());
            assert_eq!(kind, KeyKind::Unreadable);
            assert_eq!(KeyKind::of(&PrivateSec1KeyDer::from(noise).into()), KeyKind::Unreadable);
        }
        assert!(KeyKind::Unreadable.is_usable());
    }
}
