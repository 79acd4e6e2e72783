//! The test vectors of docs/on-disk-format.md are what this code writes: a reader written from the
//! document can rely on them.

use super::log::tests::key;
use super::superblock_bytes::tests::example as superblock;
use super::{LOG_BLOCK_BYTES, MapEntry, Page, PageIndex, Role, SegmentHeader, Superblock};
use crate::units::{MemberIndex, SlotIndex};
use std::fmt::Write as _;

fn document() -> String {
    std::fs::read_to_string(super::project().join("docs/on-disk-format.md")).unwrap()
}

/// The vector of this name, as the document prints it: "`NAME`, N bytes" starts a paragraph; each of the
/// indented lines after it holds an offset and 16 bytes, in hexadecimal; zeroes are left out.
fn documented(name: &str) -> Vec<u8> {
    let text = document();
    let (_, behind) = text.split_once(&format!("\n`{name}`, ")).unwrap_or_else(|| panic!("no vector {name}"));
    let (len, behind) = behind.split_once(" bytes").unwrap();
    let mut bytes = vec![0; len.parse().unwrap()];
    let lines = behind.lines().skip_while(|line| !line.starts_with("    "));
    let mut printed = 0;
    for line in lines.take_while(|line| line.starts_with("    ")) {
        let (at, row) = line.trim().split_once("  ").unwrap();
        let at = usize::from_str_radix(at, 16).unwrap();
        let row: Vec<u8> = row.split(' ').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
        assert!(row.len() == 16 && at >= printed, "{name}: the line at {at:#x}");
        bytes[at..at + 16].copy_from_slice(&row);
        printed = at + 16;
    }
    assert!(printed > 0, "{name} has no bytes");
    bytes
}

/// Asserts that the document quotes these bytes in hexadecimal outside of the vectors.
fn assert_quoted(what: &str, bytes: &[u8]) {
    let mut hex = String::new();
    bytes.iter().for_each(|byte| write!(hex, "{byte:02x}").unwrap());
    assert!(document().contains(&format!("`{hex}`")), "the {what} is {hex}");
}

fn golden(name: &str) -> Vec<u8> {
    std::fs::read(super::project().join("tests/golden").join(name)).unwrap()
}

#[test]
fn the_documented_superblock_is_what_is_written() {
    let name = "superblock-update-count-member.bin";
    let bytes = documented(name);
    assert_eq!(bytes, superblock(Role::Member).encode().as_slice());
    assert_eq!(bytes, golden(name));
    assert_quoted("checksum", &bytes[0x10..0x30]);
    let read = Superblock::decode(&bytes).unwrap();
    assert_quoted("array", read.array.as_bytes());
    let secret = std::str::from_utf8(&read.log_secret).unwrap();
    assert!(document().contains(&format!("`{secret}`")), "log_secret");
    assert_quoted("key", &key().0);
}

#[test]
fn the_documented_header_of_a_piece_is_what_is_written() {
    let bytes = documented("log-segment.bin");
    assert_eq!(bytes, golden("log-segment.bin"));
    let array = superblock(Role::Member).array;
    let header = SegmentHeader::decode(&key(), array, MemberIndex(2), 18, &bytes).unwrap();
    assert_eq!(header.batch, super::log::tests::example());
    assert_eq!(bytes, header.batch.encode(&key(), array, MemberIndex(2), header.payload_blocks));
    assert_eq!((bytes.len(), header.payload_blocks), (LOG_BLOCK_BYTES, 8));
    assert_quoted("hash of the batch", &header.hash.0);
    assert_quoted("hash of the header", &bytes[8..0x28]);
}

#[test]
fn the_documented_page_is_what_is_written() {
    let bytes = documented("page-map.bin");
    assert_eq!(bytes, golden("page-map.bin"));
    let array = superblock(Role::Member).array;
    let page = Page::decode(&key(), array, PageIndex(0), &bytes).unwrap();
    assert_eq!(bytes, page.encode(&key(), array, PageIndex(0)));
    assert_eq!((page.sequence, page.epoch), (78, 9));
    let entries = (0..).zip(page.entries.iter()).map(|(stripe, entry)| MapEntry::decode(stripe, *entry));
    let said: Vec<_> = entries.take(4).map(|entry| (entry.slot, entry.holds_data)).collect();
    let expected =
        [(0, true), (4100, true), (2, false), (3, false)].map(|(slot, data)| (SlotIndex(slot), data));
    assert_eq!(said, expected);
    assert_quoted("hash", &bytes[..16]);
}
