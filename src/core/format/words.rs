//! One lower-case word for each value of an enum that people read or type, and one byte for each on disk.
//! The table given to [`worded!`] is the only place where word, byte and value meet.

/// A word that names no value of an enum.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{found}' is not a {what}: write one of {known}")]
pub struct UnknownWord {
    /// What was to be named ("volume kind").
    pub what: &'static str,
    /// The text found.
    pub found: String,
    /// The words there are, separated by commas.
    pub known: String,
}

/// Gives an enum its words (`Display`, `FromStr`, serde) and its on-disk bytes (`byte`, `from_byte`).
macro_rules! worded {
    ($name:ident, $what:literal, $($value:ident = $byte:literal $word:literal),+ $(,)?) => {
        impl $name {
            /// Every value.
            pub const ALL: &'static [$name] = &[$($name::$value),+];

            /// The lower-case word for this value.
            #[must_use]
            pub const fn word(self) -> &'static str {
                match self { $($name::$value => $word),+ }
            }

            /// The byte that stands for this value on disk.
            pub(in crate::format) const fn byte(self) -> u8 {
                match self { $($name::$value => $byte),+ }
            }

            /// The value that a byte on disk stands for.
            pub(in crate::format) const fn from_byte(byte: u8) -> Option<$name> {
                match byte { $($byte => Some($name::$value),)+ _ => None }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.word())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::format::UnknownWord;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Self::ALL.iter().copied().find(|value| value.word() == text).ok_or_else(|| {
                    $crate::format::UnknownWord {
                        what: $what,
                        found: text.to_owned(),
                        known: Self::ALL.iter().map(|value| value.word()).collect::<Vec<_>>().join(", "),
                    }
                })
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.word())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <String as serde::Deserialize>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

pub(super) use worded;

#[cfg(test)]
mod tests {
    use crate::format::{ChecksumKind, MemberState, VolumeKind};

    #[test]
    fn words_parse_back_and_bytes_decode_back() {
        for &state in MemberState::ALL {
            assert_eq!(state.to_string().parse(), Ok(state));
            assert_eq!(MemberState::from_byte(state.byte()), Some(state));
            assert_eq!(state.as_str().to_ascii_lowercase(), state.word());
        }
        assert_eq!(serde_json::to_string(&VolumeKind::Cas).unwrap(), "\"cas\"");
        assert_eq!(serde_json::from_str::<VolumeKind>("\"plain\"").unwrap(), VolumeKind::Plain);
        assert_eq!(ChecksumKind::from_byte(77), None);
    }

    #[test]
    fn an_unknown_word_is_refused_with_the_known_ones() {
        let error = "sha1".parse::<ChecksumKind>().unwrap_err().to_string();
        assert_eq!(error, "'sha1' is not a checksum: write one of none, crc32c, blake3");
        assert!("Plain".parse::<VolumeKind>().is_err(), "words are lower-case");
    }
}
