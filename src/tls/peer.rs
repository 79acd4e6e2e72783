//! The names in a peer's certificate, and patterns on them: which peers may do what.
//!
//! Invariants: a pattern matches the whole of a name, never a part of it; `*` never reaches beyond
//! the component that it stands in; a name that cannot be read matches nothing but "every
//! certificate". Pure. Must not know volumes.

use super::stars::matches_stars;
use super::subject::Subject;
use rustls::pki_types::{CertificateDer, UnixTime};
use std::fmt;
use std::str::FromStr;
use x509_cert::attr::AttributeTypeAndValue;
use x509_cert::der::asn1::{
    Ia5StringRef, ObjectIdentifier, PrintableStringRef, TeletexStringRef, Utf8StringRef,
};
use x509_cert::der::{Decode, Tag, Tagged};
use x509_cert::ext::pkix::SubjectAltName;
use x509_cert::ext::pkix::name::GeneralName;

/// Longest pattern, in bytes: the longest names that certificate authorities sign, URIs, have some
/// hundred.
pub(super) const PATTERN_BYTES_MAX: usize = 1024;

/// Most patterns of one list: all are tried whenever a client looks for an export.
pub(crate) const PATTERNS_MAX: usize = 256;

/// commonName.
const COMMON_NAME: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.5.4.3");

/// A peer that has proved that its certificate is its own.
#[derive(Debug)]
pub struct Peer {
    /// Its certificate first.
    pub(super) chain: Vec<CertificateDer<'static>>,
    /// When its certificate was verified: a certificate that expires later does not end the
    /// connection.
    pub(super) since: UnixTime,
    names: PeerNames,
}

impl Peer {
    pub(super) fn new(chain: Vec<CertificateDer<'static>>, since: UnixTime) -> Peer {
        let names = chain.first().map(|certificate| PeerNames::read(certificate)).unwrap_or_default();
        Peer { chain, since, names }
    }

    /// The same peer, let in at another time, in seconds since 1970.
    #[cfg(test)]
    pub(super) fn at(&self, unix: u64) -> Peer {
        let since = UnixTime::since_unix_epoch(std::time::Duration::from_secs(unix));
        Peer::new(self.chain.clone(), since)
    }

    /// The names in its certificate.
    #[must_use]
    pub fn names(&self) -> &PeerNames {
        &self.names
    }
}

/// The names in a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerNames {
    /// The subject as RFC 4514 writes it, last component first: "CN=client one,O=Example".
    pub subject: String,
    common: Vec<String>,
    dns: Vec<String>,
    uri: Vec<String>,
    email: Vec<String>,
}

impl fmt::Display for PeerNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.subject[..], self.uri.first().or(self.dns.first()).or(self.email.first())) {
            ("", Some(name)) => name.escape_debug().fmt(f),
            (subject, _) => subject.escape_debug().fmt(f),
        }
    }
}

impl PeerNames {
    /// The names in a certificate; none where it cannot be parsed, which rustls would not have
    /// accepted.
    pub(super) fn read(certificate: &CertificateDer<'_>) -> PeerNames {
        let Ok(certificate) = x509_cert::Certificate::from_der(certificate) else {
            return PeerNames::default();
        };
        let tbs = certificate.tbs_certificate;
        let mut names = PeerNames { subject: tbs.subject.to_string(), ..PeerNames::default() };
        let components = tbs.subject.0.iter().flat_map(|rdn| rdn.0.iter());
        names.common = components.filter(|component| component.oid == COMMON_NAME).filter_map(text).collect();
        if let Ok(Some((_, SubjectAltName(alternatives)))) = tbs.get::<SubjectAltName>() {
            for alternative in alternatives {
                match alternative {
                    GeneralName::DnsName(name) => names.dns.push(name.to_string()),
                    GeneralName::UniformResourceIdentifier(name) => names.uri.push(name.to_string()),
                    GeneralName::Rfc822Name(name) => names.email.push(name.to_string()),
                    _ => {}
                }
            }
        }
        names
    }
}

fn text(component: &AttributeTypeAndValue) -> Option<String> {
    let value = &component.value;
    Some(match value.tag() {
        Tag::Utf8String => Utf8StringRef::try_from(value).ok()?.as_str().to_owned(),
        Tag::PrintableString => PrintableStringRef::try_from(value).ok()?.as_str().to_owned(),
        Tag::Ia5String => Ia5StringRef::try_from(value).ok()?.as_str().to_owned(),
        Tag::TeletexString => TeletexStringRef::try_from(value).ok()?.as_str().to_owned(),
        _ => return None,
    })
}

/// The kind of name that a pattern is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Any,
    Common,
    Subject,
    Dns,
    Uri,
    Email,
}

/// A pattern on the names of a certificate, as configurations write it; docs/tls.md has the
/// grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerPattern {
    kind: Kind,
    components: Vec<String>,
    /// For a pattern on the subject.
    subject: Subject,
}

impl FromStr for PeerPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<PeerPattern, String> {
        if text.len() > PATTERN_BYTES_MAX {
            return Err(format!("a pattern of {} bytes: at most {PATTERN_BYTES_MAX}", text.len()));
        }
        if text == "*" {
            return Ok(PeerPattern { kind: Kind::Any, components: Vec::new(), subject: Subject::default() });
        }
        let kinds = [
            ("CN", Kind::Common),
            ("DN", Kind::Subject),
            ("DNS", Kind::Dns),
            ("URI", Kind::Uri),
            ("email", Kind::Email),
        ];
        let split = text.split_once(':');
        let found = split.and_then(|(word, rest)| {
            kinds.into_iter().find(|(name, _)| *name == word).map(|(_, kind)| (kind, rest))
        });
        let Some((kind, rest)) = found else {
            return Err(format!(
                "'{}' is no pattern of a certificate: write \"*\" for every one, or CN:, DN:, DNS:, URI: or email: and \
                 the name, in which * stands for any characters of one component",
                text.escape_debug()
            ));
        };
        if rest.is_empty() {
            return Err(format!("'{text}': the name is missing"));
        }
        if kind == Kind::Email && rest.matches('@').count() != 1 {
            return Err(format!(
                "'{}' is no address: write it like email:*@example.com",
                text.escape_debug()
            ));
        }
        if kind == Kind::Subject {
            let subject = Subject::pattern(rest)?;
            return Ok(PeerPattern { kind, components: Vec::new(), subject });
        }
        Ok(PeerPattern { kind, components: components(kind, rest), subject: Subject::default() })
    }
}

impl PeerPattern {
    /// Whether one of the names matches this pattern.
    #[must_use]
    pub(crate) fn matches(&self, names: &PeerNames) -> bool {
        let list: &[String] = match self.kind {
            Kind::Any => return true,
            Kind::Common => &names.common,
            Kind::Subject => return self.subject.matches(&Subject::of_name(&names.subject)),
            Kind::Dns => &names.dns,
            Kind::Uri => &names.uri,
            Kind::Email => &names.email,
        };
        list.iter().any(|name| {
            let components = components(self.kind, name);
            components.len() == self.components.len()
                && components
                    .iter()
                    .zip(&self.components)
                    .all(|(component, pattern)| glob(pattern, component))
        })
    }
}

/// The components of a name, normalised so that equal components have equal bytes.
fn components(kind: Kind, name: &str) -> Vec<String> {
    match kind {
        Kind::Any | Kind::Common | Kind::Subject => vec![name.to_owned()],
        // Host names are case-insensitive.
        Kind::Dns => name.to_ascii_lowercase().split('.').map(str::to_owned).collect(),
        Kind::Uri => name.split('/').map(str::to_owned).collect(),
        // Only the host is compared without regard to case.
        Kind::Email => match name.rsplit_once('@') {
            Some((user, host)) => {
                let host = components(Kind::Dns, host);
                [user.to_owned()].into_iter().chain(host).collect()
            }
            None => vec![name.to_owned()],
        },
    }
}

/// Whether the pattern, in which each `*` stands for any characters, matches the text.
fn glob(pattern: &str, text: &str) -> bool {
    matches_stars(pattern.as_bytes(), text.as_bytes(), &b'*')
}

/// What a client may do with an export; the weaker right first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Right {
    /// Read.
    Read,
    /// Read and write.
    Write,
}

/// Which right a certificate gives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PeerRules {
    /// These certificates may read and write.
    pub write: Vec<PeerPattern>,
    /// Those may read.
    pub read: Vec<PeerPattern>,
    /// Other rules that must grant a right, too.
    pub within: Option<Box<PeerRules>>,
}

impl PeerRules {
    /// The right of a peer; with none, the peer must not learn that the export exists.
    #[must_use]
    pub(crate) fn right_of(&self, names: &PeerNames) -> Option<Right> {
        let listed = |list: &[PeerPattern]| list.iter().any(|pattern| pattern.matches(names));
        let own =
            if listed(&self.write) { Right::Write } else { listed(&self.read).then_some(Right::Read)? };
        match &self.within {
            None => Some(own),
            Some(rules) => Some(own.min(rules.right_of(names)?)),
        }
    }

    /// These rules and `other`: a right needs both.
    #[must_use]
    pub(crate) fn both(&self, other: &PeerRules) -> PeerRules {
        let within = self.within.as_ref().map_or_else(|| other.clone(), |rules| rules.both(other));
        PeerRules { within: Some(Box::new(within)), ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::pki::Ca;
    use super::*;
    use rustls::pki_types::pem::PemObject;

    fn names() -> PeerNames {
        PeerNames {
            subject: "CN=client one,OU=Backup\\, nightly,O=Example".into(),
            common: vec!["client one".into()],
            dns: vec!["Host7.clients.example.com".into()],
            uri: vec!["spiffe://example.com/ns/backup/sa/one".into()],
            email: vec!["one@Example.com".into()],
        }
    }

    fn matches(pattern: &str) -> bool {
        pattern.parse::<PeerPattern>().unwrap_or_else(|what| panic!("{pattern}: {what}")).matches(&names())
    }

    #[test]
    fn a_pattern_matches_a_whole_name_and_a_star_stays_in_its_component() {
        for yes in [
            "*",
            "CN:client one",
            "CN:client*",
            "CN:*",
            "CN:*one",
            "CN:c*t*e",
            "DNS:host7.clients.example.com",
            "DNS:HOST*.clients.example.com",
            "DNS:*.clients.*.com",
            "URI:spiffe://example.com/ns/*/sa/*",
            "URI:spiffe://*/ns/backup/sa/one",
            "email:*@example.com",
            "email:one@*.com",
            "DN:CN=client one,OU=Backup\\, nightly,O=Example",
            "DN:cn=*,ou=*,o=Example",
        ] {
            assert!(matches(yes), "{yes}");
        }
        for no in [
            "CN:client",
            "CN:lient one",
            "CN:Client one",
            "CN:client one ",
            "CN:host7.clients.example.com",
            "DNS:*",
            "DNS:*.example.com",
            "DNS:clients.example.com",
            "DNS:host7.clients.example.com.",
            "DNS:client one",
            "URI:spiffe://example.com/*",
            "URI:spiffe://example.com/ns/*",
            "URI:spiffe://example.com/ns/backup/sa/one/",
            "URI:SPIFFE://example.com/ns/backup/sa/one",
            "email:ONE@example.com",
            "email:*@com",
            "email:*@*",
            "DN:CN=client one,O=Example",
            "DN:CN=*",
            "DN:*",
            "DN:O=Example,OU=Backup\\, nightly,CN=client one",
        ] {
            assert!(!matches(no), "{no}");
        }
    }

    #[test]
    fn what_is_no_pattern_is_told() {
        for (wrong, want) in [
            ("", "no pattern"),
            ("client", "no pattern"),
            ("cn:client", "no pattern"),
            ("IP:127.0.0.1", "no pattern"),
            ("CN:", "name is missing"),
            ("email:example.com", "email:*@example.com"),
            (&format!("CN:{}", "x".repeat(PATTERN_BYTES_MAX)), "at most 1024"),
        ] {
            let said = wrong.parse::<PeerPattern>().expect_err("no pattern");
            assert!(said.contains(want), "{wrong}: {said}");
        }
    }

    #[test]
    fn the_right_to_write_goes_first_and_who_is_not_named_has_none() {
        let list =
            |patterns: &[&str]| patterns.iter().map(|pattern| pattern.parse().expect("sound")).collect();
        let right = |write: &[&str], read: &[&str]| {
            PeerRules { write: list(write), read: list(read), within: None }.right_of(&names())
        };
        assert_eq!(right(&["CN:client*"], &["*"]), Some(Right::Write));
        assert_eq!(right(&["CN:other"], &["*"]), Some(Right::Read));
        assert_eq!(right(&["CN:other"], &["CN:another"]), None);
        assert_eq!(right(&[], &[]), None);
    }

    #[test]
    fn of_two_rules_both_must_grant_it() {
        let rules = |write: &[&str], read: &[&str]| {
            let list =
                |patterns: &[&str]| patterns.iter().map(|pattern| pattern.parse().expect("sound")).collect();
            PeerRules { write: list(write), read: list(read), within: None }
        };
        let (write, read, none) = (rules(&["*"], &[]), rules(&[], &["*"]), rules(&["CN:other"], &[]));
        for (one, other, granted) in [
            (&write, &write, Some(Right::Write)),
            (&write, &read, Some(Right::Read)),
            (&read, &read, Some(Right::Read)),
            (&write, &none, None),
            (&none, &read, None),
        ] {
            assert_eq!(one.both(other).right_of(&names()), granted);
            assert_eq!(other.both(one).right_of(&names()), granted);
            assert_eq!(write.both(one).both(other).right_of(&names()), granted);
        }
    }

    #[test]
    fn names_are_read_from_a_certificate() {
        let dir = tempfile::tempdir().expect("a folder");
        let names = ["spiffe://example.com/one", "one@example.com", "one.example.com"];
        let identity = Ca::new(dir.path()).issue_to("client, one", 7, &names);
        let certificate = CertificateDer::from_pem_file(&identity.certificate).expect("a certificate");
        let names = PeerNames::read(&certificate);
        assert_eq!(names.subject, "CN=client\\, one");
        assert_eq!((names.common, names.dns), (vec!["client, one".into()], vec!["one.example.com".into()]));
        assert_eq!(names.uri, ["spiffe://example.com/one"]);
        assert_eq!(names.email, ["one@example.com"]);
        assert_eq!(PeerNames::read(&CertificateDer::from(vec![1, 2, 3])), PeerNames::default());
    }

    #[test]
    fn many_stars_take_no_time() {
        let begun = std::time::Instant::now();
        assert!(!glob(&"*a".repeat(500), &"a".repeat(499)));
        assert!(!glob(&format!("{}b", "*a".repeat(500)), &"a".repeat(100_000)));
        assert!(begun.elapsed().as_secs() < 5);
    }
}
