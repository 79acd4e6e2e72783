//! Bytes to types and back, for everything that is on disk. Pure: no I/O, no clocks, no randomness.
//! docs/on-disk-format.md is the byte-level document; code refers to it rather than repeating it.

pub mod cas;
mod copies;
mod counts;
mod features;
mod field;
mod format_error;
mod inspect;
mod lanes;
mod layout;
mod limits;
mod log;
mod member_set;
mod page;
mod signature;
mod superblock;
mod superblock_bytes;
#[cfg(test)]
mod vectors;
mod words;

pub use copies::{
    CopyPlace, FIRST_SEQUENCE, Identity, NewestError, all_copy_offsets, damaged_copies, decode_copy, newest,
    newest_read, superblock_offsets,
};
pub use counts::Unfit;
pub use format_error::FormatError;
pub use inspect::{CopyReport, Inspection, RegionReport, SuperblockReport};
pub use lanes::{LanePart, Lanes, MAX_GROUP, MAX_LANES};
pub use layout::{
    ArrayLayout, ArrayShape, LayoutError, MIN_REGION_OFFSET, REGION_ALIGN, geometry_for, layout_for,
    leftover_bytes, member_bytes_for,
};
pub use limits::{
    COPY_BYTES, COUNT_END, COUNTED_IN_A_LIFE, FORMAT_MAJOR, FORMAT_MINOR, MAX_CHUNK_BYTES, MAX_DEVICE_BYTES,
    MAX_LEFT, MAX_LEFT_UPDATES, MAX_MEMBERS, MAX_NAME_BYTES, MAX_REGIONS, MAX_REPLACEMENTS, MIN_CHUNK_BYTES,
};
pub use log::{
    Batch, BatchHash, EpochStamp, FreshRecord, InPlaceRecord, LOG_BLOCK_BYTES, LogKey, LogRecord,
    MAX_HEADER_BLOCKS, Manifest, NO_PLACE, SegmentError, SegmentHeader,
};
pub use member_set::MemberSet;
pub use page::{
    HashedPage, MapEntry, PAGE_BYTES, PAGE_ENTRIES, Page, PageError, PageIndex, PageLayout, hash_of_entry,
};
pub use signature::{SIGNATURE_WINDOW, Signature, recognise};
pub use superblock::{
    ChecksumKind, Epoch, Geometry, Left, LogStart, MatrixId, MemberRecord, MemberState, Region, RegionKind,
    ReplacementRecord, Role, ScrubRecord, Superblock, VolumeKind, check_array_name, region_end, valid_name,
};
pub use superblock_bytes::CLEARED_BYTE;
use superblock_bytes::MAGIC;
pub use words::UnknownWord;

/// The project's root, which holds the golden images and the documents.
#[cfg(test)]
fn project() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Asserts that `written` is byte for byte the image `name` in tests/golden, and returns it: the committed
/// images pin the format. An intended change needs a feature or version, and new images beside the old ones.
/// When the two differ, `written` is left in target/golden.
#[cfg(test)]
fn golden(name: &str, written: &[u8]) -> Vec<u8> {
    let root = project();
    let golden = std::fs::read(root.join("tests/golden").join(name)).unwrap_or_default();
    if golden != written {
        std::fs::create_dir_all(root.join("target/golden")).unwrap();
        std::fs::write(root.join("target/golden").join(name), written).unwrap();
        panic!("{name} differs from what is written now; see target/golden/{name}");
    }
    golden
}
