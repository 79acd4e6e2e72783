//! The subject of a certificate as RFC 4514 writes it, and patterns on it: the components of a
//! name, with escapes undone, so that the output of several programs for one name is the same.
//!
//! Invariants: a `*` of a pattern stands for one component, or for any bytes within one value,
//! never for more; a value is compared byte for byte. Pure. Must not know certificates.

use super::stars::matches_stars;

/// A subject, or a pattern of one: its components, the last of the name first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Subject(Vec<Component>);

/// A component of a name: mostly one attribute; if there are several, their order means nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Component {
    /// `*` in a pattern: any component.
    Any,
    Attributes(Vec<Attribute>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Attribute {
    /// In capitals; one name for each type.
    kind: String,
    value: Vec<Symbol>,
}

/// A symbol of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Symbol {
    Byte(u8),
    /// Any bytes.
    Star,
    /// A `#` that says that the value follows as hexadecimal digits of its encoding.
    Encoded,
}

/// Types of attributes with several names; the first name is the one used here.
const SYNONYMS: [&[&str]; 17] = [
    &["CN", "COMMONNAME", "2.5.4.3"],
    &["SN", "SURNAME", "2.5.4.4"],
    &["SERIALNUMBER", "2.5.4.5"],
    &["C", "COUNTRYNAME", "2.5.4.6"],
    &["L", "LOCALITYNAME", "2.5.4.7"],
    &["ST", "S", "STATEORPROVINCENAME", "2.5.4.8"],
    &["STREET", "STREETADDRESS", "2.5.4.9"],
    &["O", "ORGANIZATIONNAME", "2.5.4.10"],
    &["OU", "ORGANIZATIONALUNITNAME", "2.5.4.11"],
    &["TITLE", "2.5.4.12"],
    &["GN", "GIVENNAME", "2.5.4.42"],
    &["INITIALS", "2.5.4.43"],
    &["GENERATIONQUALIFIER", "2.5.4.44"],
    &["DNQUALIFIER", "2.5.4.46"],
    &["DC", "DOMAINCOMPONENT", "0.9.2342.19200300.100.1.25"],
    &["UID", "USERID", "0.9.2342.19200300.100.1.1"],
    &["EMAILADDRESS", "EMAIL", "E", "1.2.840.113549.1.9.1"],
];

impl Subject {
    /// The subject of a certificate, in which `*` is an ordinary character.
    pub(super) fn of_name(text: &str) -> Subject {
        // The subject of a certificate cannot be refused: one that cannot be understood matches
        // only `*`.
        Subject::parse(text, false).unwrap_or_default()
    }

    /// A pattern.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn pattern(text: &str) -> Result<Subject, String> {
        Subject::parse(text, true)
    }

    fn parse(text: &str, is_pattern: bool) -> Result<Subject, String> {
        if text.is_empty() {
            return Ok(Subject::default());
        }
        let component = |text: &str| {
            if is_pattern && text.trim() == "*" {
                return Ok(Component::Any);
            }
            let attributes = unescaped(text, '+').into_iter().map(|text| Attribute::parse(text, is_pattern));
            Ok(Component::Attributes(attributes.collect::<Result<_, String>>()?))
        };
        Ok(Subject(unescaped(text, ',').into_iter().map(component).collect::<Result<_, String>>()?))
    }

    /// Whether a subject matches this pattern, component by component, with equal numbers of
    /// components.
    pub(super) fn matches(&self, subject: &Subject) -> bool {
        let components = || self.0.iter().zip(&subject.0);
        self.0.len() == subject.0.len()
            && components().all(|(pattern, component)| match (pattern, component) {
                (Component::Any, _) => true,
                (Component::Attributes(patterns), Component::Attributes(attributes)) => {
                    all_are_there(patterns, attributes)
                }
                (Component::Attributes(_), Component::Any) => false,
            })
    }
}

impl Attribute {
    fn parse(text: &str, is_pattern: bool) -> Result<Attribute, String> {
        let shown = || text.escape_debug();
        let Some((kind, value)) = text.split_once('=') else {
            return Err(format!(
                "'{}' is no part of a subject: write TYPE=VALUE, like CN=client one, or * for any part",
                shown()
            ));
        };
        let kind = kind.trim().to_ascii_uppercase();
        let is_named = !kind.is_empty()
            && kind.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte));
        if !is_named {
            return Err(format!("'{}': '{}' names no type of an attribute", shown(), kind.escape_debug()));
        }
        let kind = kind.strip_prefix("OID.").unwrap_or(&kind);
        let known = SYNONYMS.iter().find(|names| names.contains(&kind)).map_or(kind, |names| names[0]);
        let value = symbols(value, is_pattern).map_err(|what| format!("'{}': {what}", shown()))?;
        Ok(Attribute { kind: known.to_owned(), value })
    }

    fn matches(&self, attribute: &Attribute) -> bool {
        self.kind == attribute.kind && glob(&self.value, &attribute.value)
    }
}

/// Splits at each `separator` that has no backslash before it.
fn unescaped(text: &str, separator: char) -> Vec<&str> {
    let (mut components, mut begin, mut escaped) = (Vec::new(), 0, false);
    for (at, character) in text.char_indices() {
        if character == separator && !escaped {
            components.push(&text[begin..at]);
            begin = at + separator.len_utf8();
        }
        escaped = character == '\\' && !escaped;
    }
    components.push(&text[begin..]);
    components
}

/// A value with its escapes undone.
fn symbols(value: &str, is_pattern: bool) -> Result<Vec<Symbol>, String> {
    if let Some(digits) = value.strip_prefix('#') {
        let digits = digits.bytes().map(|byte| match byte {
            b'*' if is_pattern => Symbol::Star,
            byte => Symbol::Byte(byte.to_ascii_lowercase()),
        });
        return Ok([Symbol::Encoded].into_iter().chain(digits).collect());
    }
    let mut symbols = Vec::new();
    let mut rest = value.as_bytes();
    while let [first, others @ ..] = rest {
        let (symbol, len) = match (first, others) {
            (b'\\', []) => return Err("nothing follows the backslash at its end".into()),
            (b'\\', [byte, others @ ..]) => match hex(*byte).zip(others.first().copied().and_then(hex)) {
                Some((high, low)) => (Symbol::Byte(high << 4 | low), 3),
                None => (Symbol::Byte(*byte), 2),
            },
            (b'*', _) if is_pattern => (Symbol::Star, 1),
            (byte, _) => (Symbol::Byte(*byte), 1),
        };
        symbols.push(symbol);
        rest = &rest[len..];
    }
    Ok(symbols)
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|digit| digit as u8)
}

/// Whether patterns and attributes can be paired without rest.
fn all_are_there(patterns: &[Attribute], attributes: &[Attribute]) -> bool {
    if patterns.len() != attributes.len() {
        return false;
    }
    // For each attribute, the index of its pattern.
    let mut taken: Vec<Option<usize>> = vec![None; attributes.len()];
    let mut tried = vec![false; attributes.len()];
    (0..patterns.len()).all(|at| {
        tried.fill(false);
        finds(at, patterns, attributes, &mut taken, &mut tried)
    })
}

/// Finds an attribute for a pattern, if need be one whose pattern can move to another attribute.
fn finds(
    at: usize,
    patterns: &[Attribute],
    attributes: &[Attribute],
    taken: &mut [Option<usize>],
    tried: &mut [bool],
) -> bool {
    for (place, attribute) in attributes.iter().enumerate() {
        if tried[place] || !patterns[at].matches(attribute) {
            continue;
        }
        tried[place] = true;
        if taken[place].is_none_or(|other| finds(other, patterns, attributes, taken, tried)) {
            taken[place] = Some(at);
            return true;
        }
    }
    false
}

/// Whether the pattern, with stars for any bytes, matches the value.
fn glob(pattern: &[Symbol], value: &[Symbol]) -> bool {
    matches_stars(pattern, value, &Symbol::Star)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, subject: &str) -> bool {
        let pattern = Subject::pattern(pattern).unwrap_or_else(|what| panic!("{pattern}: {what}"));
        pattern.matches(&Subject::of_name(subject))
    }

    #[test]
    fn what_openssl_prints_matches_what_is_in_the_certificate() {
        for (printed, subject) in [
            (r#"O=\C3\9Cn\C3\AFcode,CN=Zo\C3\AB \"x\""#, r#"O=Ünïcode,CN=Zoë \"x\""#),
            ("CN=dc,SN=Sur,GN=Jo", "CN=dc,SN=Sur,GIVENNAME=Jo"),
            ("emailAddress=sub@ject.org,CN=m", "EMAIL=sub@ject.org,CN=m"),
            ("OU=u+CN=m,O=Org", "CN=m+OU=u,O=Org"),
            (r"CN=\#hash,O=a\,b\+c\;d", r"CN=\#hash,O=a\,b\+c\;d"),
            (r"CN=\ lead trail\ ", r"CN=\ lead trail\ "),
            (r"CN=\20lead", r"CN=\ lead"),
            ("1.2.3.4=#0C0141", "1.2.3.4=#0c0141"),
            ("OID.1.2.3.4=#0C0141", "1.2.3.4=#0c0141"),
            (r"CN=a\\,O=b", r"CN=a\\,O=b"),
            ("CN=client one, O=Example", "CN=client one,O=Example"),
        ] {
            assert!(matches(printed, subject), "{printed}");
        }
    }

    #[test]
    fn a_star_stands_for_a_part_or_within_one_value() {
        for (pattern, subject) in [
            ("*,O=Org", "CN=m+OU=u,O=Org"),
            ("CN=m+OU=*,O=*", "OU=u+CN=m,O=Org"),
            ("OU=*+OU=b", "OU=a+OU=b"),
            ("OU=*+OU=b", "OU=b+OU=a"),
            ("OU=a*+OU=*b", "OU=xb+OU=ab"),
            (r"CN=\2a", "CN=*"),
            (r"CN=\*", "CN=*"),
        ] {
            assert!(matches(pattern, subject), "{pattern}");
        }
        for (pattern, subject) in [
            ("*", "CN=a,O=b"),
            ("*", ""),
            ("CN=*", "CN=m+OU=u"),
            ("CN=*", "CN=m,OU=u"),
            ("CN=a", "OU=a"),
            ("CN=a", "CN=A"),
            (r"CN=\2a", "CN=a"),
            (r"CN=\*", "CN=a"),
            ("OU=b+OU=b", "OU=a+OU=b"),
            ("OU=a*+OU=*b", "OU=xc+OU=ab"),
            ("CN=a", "CN=a+CN=a"),
            ("CN=#hash", r"CN=\#hash"),
            ("SERIALNUMBER=1", "SN=1"),
        ] {
            assert!(!matches(pattern, subject), "{pattern}");
        }
    }

    #[test]
    fn what_is_no_subject_is_told() {
        for (wrong, want) in [
            ("client one", "no part of a subject: write TYPE=VALUE"),
            ("CN=a,,O=b", "no part of a subject"),
            ("C*=a", "names no type"),
            ("=a", "names no type"),
            ("CN=a\\", "nothing follows the backslash"),
        ] {
            let said = Subject::pattern(wrong).expect_err("no pattern");
            assert!(said.contains(want), "{wrong}: {said}");
        }
        assert_eq!(Subject::of_name("no subject"), Subject::default());
    }
}
