//! Why a copy of a superblock cannot be used. The checks are in `superblock_bytes.rs`.

use super::{COPY_BYTES, FORMAT_MAJOR};

/// Why bytes are not a usable superblock.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Wrong magic number: there is no superblock here.
    #[error("no Calpe superblock")]
    NoMagic,
    /// No whole copy, and a sector of it is cleared: the power failed in a first update after a start.
    #[error("cleared for an update that was cut off")]
    Cleared,
    /// Fewer (or more) bytes than a copy has.
    #[error("a superblock copy has {COPY_BYTES} bytes, {found} were given")]
    Length {
        /// Bytes given.
        found: usize,
    },
    /// The copy is damaged or torn.
    #[error("superblock checksum is {found}, its content hashes to {expected}: the copy is damaged")]
    Checksum {
        /// First bytes of the hash of the content, in hexadecimal.
        expected: String,
        /// First bytes of the checksum found.
        found: String,
    },
    /// A whole copy in the wrong slot for its sequence.
    #[error("superblock {sequence} does not belong at {place}: it was copied there, or altered")]
    Misplaced {
        /// Where it is.
        place: &'static str,
        /// Its sequence.
        sequence: u64,
    },
    /// Written by a version this one cannot read.
    #[error(
        "superblock has format version {major}.{minor}, this Calpe reads up to {FORMAT_MAJOR}.x: use a newer Calpe"
    )]
    NewerVersion {
        /// Major version found.
        major: u16,
        /// Minor version found.
        minor: u16,
        /// Sequence of the copy.
        sequence: u64,
    },
    /// Uses features that a version must know in order to read the member.
    #[error("superblock needs features this Calpe does not have: {features}; use a newer Calpe")]
    IncompatFeatures {
        /// Names, or bit numbers where there is no name, separated by commas.
        features: String,
        /// Sequence of the copy.
        sequence: u64,
    },
    /// Of an array without redo log: earlier builds made such arrays, and this one has no code for them.
    #[error(
        "it is a member of the array '{name}' without redo log, which an earlier build of Calpe made and this one cannot \
         serve: copy the data out with the version that made the array, then create a new one"
    )]
    NoRedoLog {
        /// Name of the array.
        name: String,
        /// Sequence of the copy.
        sequence: u64,
    },
    /// A field has an impossible value although the checksum is right: the writer had a bug.
    #[error("superblock field '{field}' is {found}, expected {expected}")]
    Field {
        /// Which field.
        field: &'static str,
        /// What was found.
        found: String,
        /// What would be right.
        expected: String,
        /// Sequence of the copy.
        sequence: u64,
    },
}

impl FormatError {
    /// The sequence of a copy that is whole but refused. Such a copy outranks older ones: falling back to
    /// them would undo what a newer version wrote.
    #[must_use]
    pub fn refused_sequence(&self) -> Option<u64> {
        match self {
            FormatError::NewerVersion { sequence, .. }
            | FormatError::IncompatFeatures { sequence, .. }
            | FormatError::NoRedoLog { sequence, .. }
            | FormatError::Misplaced { sequence, .. }
            | FormatError::Field { sequence, .. } => Some(*sequence),
            FormatError::NoMagic
            | FormatError::Cleared
            | FormatError::Length { .. }
            | FormatError::Checksum { .. } => None,
        }
    }
}
