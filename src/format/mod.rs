//! Bytes to types and back, for everything that is on disk. Pure: no I/O, no clocks, no randomness.
//! docs/on-disk-format.md is the byte-level document; code refers to it rather than repeating it.

mod superblock;

pub use superblock::{
    ChecksumKind, Epoch, FormatError, Geometry, MatrixId, MemberRecord, MemberSet, MemberState, Region,
    RegionKind, ReplacementRecord, Role, ScrubRecord, Superblock, VolumeKind,
};
