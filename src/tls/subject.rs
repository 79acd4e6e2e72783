//! The subject of a certificate as RFC 4514 writes it, and patterns on it: the parts of a name, with escapes undone, so that what
//! several programs print of one name is the same.
//!
//! Invariants: `*` of a pattern stands for a part, or within one value, never for more; a value is compared byte for byte.
//! Pure. Must not know certificates.

/// A subject, or a pattern of one: its parts, the last of the name first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Subject(Vec<Part>);

/// A part of a name: mostly one attribute; the order of several tells nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    /// `*` in a pattern: whatever it is.
    Any,
    Attributes(Vec<Attribute>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Attribute {
    /// In capitals, one name for each type.
    kind: String,
    value: Vec<Piece>,
}

/// A piece of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    Byte(u8),
    /// Any bytes.
    Star,
    /// A `#` that says that the value follows as hexadecimal digits of its encoding.
    Encoded,
}

/// Types of attributes that have several names, the one first that stands for all of them here.
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
    /// The subject of a certificate, in which `*` is a character like any.
    pub fn of_name(text: &str) -> Subject {
        // A certificate has the subject that it has: what cannot be understood matches nothing but `*`.
        Subject::parse(text, false).unwrap_or_default()
    }

    /// A pattern.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn pattern(text: &str) -> Result<Subject, String> {
        Subject::parse(text, true)
    }

    fn parse(text: &str, is_pattern: bool) -> Result<Subject, String> {
        if text.is_empty() {
            return Ok(Subject::default());
        }
        let part = |text: &str| {
            if is_pattern && text.trim() == "*" {
                return Ok(Part::Any);
            }
            let attributes = unescaped(text, '+').into_iter().map(|text| Attribute::parse(text, is_pattern));
            Ok(Part::Attributes(attributes.collect::<Result<_, String>>()?))
        };
        Ok(Subject(unescaped(text, ',').into_iter().map(part).collect::<Result<_, String>>()?))
    }

    /// Whether a subject is of this pattern: part by part, and there must be as many.
    pub fn matches(&self, subject: &Subject) -> bool {
        let parts = || self.0.iter().zip(&subject.0);
        self.0.len() == subject.0.len()
            && parts().all(|(pattern, part)| match (pattern, part) {
                (Part::Any, _) => true,
                (Part::Attributes(patterns), Part::Attributes(attributes)) => {
                    all_are_there(patterns, attributes)
                }
                (Part::Attributes(_), Part::Any) => false,
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
        let value = pieces(value, is_pattern).map_err(|what| format!("'{}': {what}", shown()))?;
        Ok(Attribute { kind: known.to_owned(), value })
    }

    fn matches(&self, attribute: &Attribute) -> bool {
        self.kind == attribute.kind && glob(&self.value, &attribute.value)
    }
}

/// Cuts at each of this character that no backslash stands before.
fn unescaped(text: &str, separator: char) -> Vec<&str> {
    let (mut parts, mut begin, mut escaped) = (Vec::new(), 0, false);
    for (at, character) in text.char_indices() {
        if character == separator && !escaped {
            parts.push(&text[begin..at]);
            begin = at + separator.len_utf8();
        }
        escaped = character == '\\' && !escaped;
    }
    parts.push(&text[begin..]);
    parts
}

/// A value with its escapes undone.
fn pieces(value: &str, is_pattern: bool) -> Result<Vec<Piece>, String> {
    if let Some(digits) = value.strip_prefix('#') {
        let digits = digits.bytes().map(|byte| match byte {
            b'*' if is_pattern => Piece::Star,
            byte => Piece::Byte(byte.to_ascii_lowercase()),
        });
        return Ok([Piece::Encoded].into_iter().chain(digits).collect());
    }
    let mut pieces = Vec::new();
    let mut rest = value.as_bytes();
    while let [first, others @ ..] = rest {
        let (piece, len) = match (first, others) {
            (b'\\', []) => return Err("nothing follows the backslash at its end".into()),
            (b'\\', [byte, others @ ..]) => match hex(*byte).zip(others.first().copied().and_then(hex)) {
                Some((high, low)) => (Piece::Byte(high << 4 | low), 3),
                None => (Piece::Byte(*byte), 2),
            },
            (b'*', _) if is_pattern => (Piece::Star, 1),
            (byte, _) => (Piece::Byte(*byte), 1),
        };
        pieces.push(piece);
        rest = &rest[len..];
    }
    Ok(pieces)
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|digit| digit as u8)
}

/// Whether each of these patterns has an attribute of its own, and each attribute a pattern.
fn all_are_there(patterns: &[Attribute], attributes: &[Attribute]) -> bool {
    if patterns.len() != attributes.len() {
        return false;
    }
    // Of each attribute, the pattern that has it.
    let mut taken: Vec<Option<usize>> = vec![None; attributes.len()];
    let mut tried = vec![false; attributes.len()];
    (0..patterns.len()).all(|at| {
        tried.fill(false);
        finds(at, patterns, attributes, &mut taken, &mut tried)
    })
}

/// Finds a pattern an attribute, if need be one that another pattern gives up for a further one.
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

/// Whether stars of the pattern can stand for something that makes it the value.
fn glob(pattern: &[Piece], value: &[Piece]) -> bool {
    super::peer::matches_stars(pattern, value, &Piece::Star)
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
