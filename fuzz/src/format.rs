//! What is read from disks: superblocks, headers of log segments, pages. Inputs may end early; zeroes follow.

use calpe_core::format::{
    COPY_BYTES, COUNT_END, COUNTED_IN_A_LIFE, ChecksumKind, CopyPlace, FormatError, Inspection,
    LOG_BLOCK_BYTES, LogKey, MAX_HEADER_BLOCKS, MapEntry, PAGE_BYTES, Page, PageIndex, PageLayout,
    RegionKind, SegmentError, SegmentHeader, Superblock,
};
use calpe_core::units::MemberIndex;
use uuid::Uuid;

/// The array whose segments and pages are read.
pub const ARRAY: Uuid = Uuid::from_u128(0x0123_4567_89ab_4def_8000_0000_0000_03e8);
/// Its secret.
pub const SECRET: [u8; 16] = *b"fuzzfuzzfuzzfuzz";
/// The member whose segment is read.
pub const MEMBER: MemberIndex = MemberIndex(2);
/// The place it is read from.
pub const PLACE: u32 = 18;
/// The page that is read.
pub const PAGE: PageIndex = PageIndex(5);

/// Reads a superblock. One that is accepted must be written and read back alike, and its numbers must be safe
/// to calculate with.
pub fn superblock(data: &[u8]) {
    let _ = Superblock::decode(data);
    let mut copy = padded(data, COPY_BYTES);
    copy.truncate(COPY_BYTES);
    copy[0x10..0x30].fill(0);
    let hash = blake3::hash(&copy);
    copy[0x10..0x30].copy_from_slice(hash.as_bytes());
    let read = Superblock::decode(&copy);
    assert!(!matches!(read, Err(FormatError::Checksum { .. } | FormatError::Length { .. })), "{read:?}");
    let copies = CopyPlace::ALL.map(|_| Ok(read.clone()));
    let _ = Inspection::new("fuzz".into(), 1 << 40, copies).to_string();
    let Ok(superblock) = read else { return };
    let needed = superblock.device_bytes_min();
    assert!(superblock.regions.iter().all(|region| region.offset.0 + region.len < needed));
    let layout = PageLayout::new(superblock.geometry, superblock.checksum != ChecksumKind::None);
    let region = superblock.region(RegionKind::Pages).expect("a pages region");
    for (member, offset) in layout.copies(PageIndex(layout.pages() - 1)) {
        assert!(member.0 < superblock.geometry.width() && offset + 2 * PAGE_BYTES as u64 <= region.len);
    }
    let same = |superblock: &Superblock| {
        let again = Superblock::decode(superblock.encode().as_slice()).expect("our own bytes");
        // Written with counted updates, whatever was read.
        assert_eq!(again.features_incompat, superblock.features_incompat | 1 << 4);
        let Superblock { features_compat, features_incompat, .. } = *superblock;
        assert_eq!(Superblock { features_compat, features_incompat, ..again }, *superblock);
    };
    same(&superblock);
    if superblock.unfit().is_none() {
        let mut later = superblock;
        later.sequence += COUNTED_IN_A_LIFE - 1;
        later.epoch.number += COUNTED_IN_A_LIFE - 1;
        later.log_start.sequence += COUNTED_IN_A_LIFE - 1;
        later.log_start.epoch += COUNTED_IN_A_LIFE - 1;
        same(&later);
    }
}

/// Reads the header of a log segment. One that is accepted must be written and read back alike; one that is
/// longer must say so within bounds.
pub fn log_segment(data: &[u8]) {
    let key = LogKey::derive(ARRAY, SECRET);
    let decode = |bytes: &[u8]| SegmentHeader::decode(&key, ARRAY, MEMBER, PLACE, bytes);
    let check_error = |bytes: &[u8], read: &Result<SegmentHeader, SegmentError>| {
        if let Err(SegmentError::Longer { blocks }) = read {
            assert!(bytes.len() < *blocks as usize * LOG_BLOCK_BYTES && *blocks <= MAX_HEADER_BLOCKS);
        }
    };
    check_error(data, &decode(data));
    let mut bytes = padded(data, LOG_BLOCK_BYTES);
    bytes[..8].copy_from_slice(b"CALPELOG");
    bytes[0x08..0x28].fill(0);
    bytes[0x28..0x38].copy_from_slice(ARRAY.as_bytes());
    bytes[0x38..0x3a].copy_from_slice(&MEMBER.0.to_le_bytes());
    bytes[0x3c..0x40].copy_from_slice(&PLACE.to_le_bytes());
    let body = u32::from_le_bytes(bytes[0x98..0x9c].try_into().expect("4 bytes")) as usize;
    let end = body.saturating_add(0xa0).min(bytes.len());
    let keyed = |parts: [&[u8]; 2]| {
        *blake3::Hasher::new_keyed(&key.0).update(parts[0]).update(parts[1]).finalize().as_bytes()
    };
    let batch = keyed([b"CALPEBAT", &bytes[0x48..end]]);
    let hash = keyed([&bytes[..0x48], &batch]);
    bytes[0x08..0x28].copy_from_slice(&hash);
    let read = decode(&bytes);
    check_error(&bytes, &read);
    let Ok(header) = read else { return };
    assert_eq!(header.hash.0, batch);
    let written = header.batch.encode(&key, ARRAY, MEMBER, header.payload_blocks);
    assert_eq!(written.len(), header.header_blocks as usize * LOG_BLOCK_BYTES);
    let again = decode(&written).expect("our own bytes");
    assert_eq!((again.batch, again.payload_blocks), (header.batch, header.payload_blocks));
}

/// Reads a page and its entries, as a map page and as a checksum page.
pub fn page(data: &[u8]) {
    let key = LogKey::derive(ARRAY, SECRET);
    let _ = Page::decode(&key, ARRAY, PAGE, data);
    let mut bytes = padded(data, PAGE_BYTES);
    bytes.truncate(PAGE_BYTES);
    bytes[..0x10].fill(0);
    bytes[0x10..0x20].copy_from_slice(ARRAY.as_bytes());
    bytes[0x20..0x28].copy_from_slice(&PAGE.0.to_le_bytes());
    let hash = blake3::keyed_hash(&key.0, &bytes);
    bytes[..0x10].copy_from_slice(&hash.as_bytes()[..0x10]);
    let counted = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes")) < COUNT_END;
    let page = Page::decode(&key, ARRAY, PAGE, &bytes);
    assert_eq!(page.is_ok(), counted(0x28) && counted(0x30), "whole, with the right hash: {page:?}");
    let Ok(page) = page else { return };
    let again = Page::decode(&key, ARRAY, PAGE, &page.encode(&key, ARRAY, PAGE));
    assert_eq!(again.as_ref(), Ok(&page));
    for (stripe, entry) in (1..).zip(page.entries.iter()) {
        let entry = MapEntry::decode(stripe, *entry);
        assert_eq!(MapEntry::decode(stripe, entry.encode(stripe)), entry);
    }
}

/// The bytes with zeroes up to the next multiple of `unit`, at least one.
fn padded(data: &[u8], unit: usize) -> Vec<u8> {
    let mut bytes = data.to_vec();
    bytes.resize(data.len().next_multiple_of(unit).max(unit), 0);
    bytes
}
