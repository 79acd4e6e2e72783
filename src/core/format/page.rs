//! Metadata pages: block hashes and the stripe map. See docs/on-disk-format.md, "Pages".
//!
//! A page has `m + 1` copies on different members; each copy has two places, of which the one that
//! does not hold the copy's newest version is written next. The reader of the copies decides which
//! one counts.

use super::{COUNT_END, Geometry, LogKey};
use crate::units::{BlockHash, MemberIndex, ROW_BYTES, SlotIndex};
use std::ops::Range;
use uuid::Uuid;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// Entries of a page, 16 bytes each.
pub const PAGE_ENTRIES: usize = 252;
/// Places of each copy of a page, written alternately, so that a torn write leaves one intact.
const PLACES: u64 = 2;

/// A page's number in the page region: map pages first, then checksum pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageIndex(pub u64);

/// A page's content with what orders its versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Counts the versions of this page.
    pub sequence: u64,
    /// Number of the epoch in which this version was written.
    pub epoch: u64,
    /// Whether the other place of this copy held a version as well, or got this one too: if it is blank, that
    /// version was lost.
    pub paired: bool,
    /// The entries: block hashes, or [`MapEntry`]s.
    pub entries: Box<[[u8; 16]; PAGE_ENTRIES]>,
}

/// A page where it was read, whose hash is known to be right; see [`Page::take_hash`].
#[derive(Clone, Copy, Debug)]
pub struct HashedPage<'a>(&'a RawPage);

/// Why bytes are not a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// Never written by this array.
    #[error("a blank page")]
    Blank,
    /// Written by this array as this page, and damaged or torn.
    #[error("a damaged page")]
    Damaged,
}

/// What the stripe map says of a logical stripe. All zero bytes are the entry of a stripe that was never
/// written: it is in the slot of its own number and holds no data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// The slot.
    pub slot: SlotIndex,
    /// Whether the stripe holds data; otherwise it reads as zeroes and its blocks are unwritten.
    pub holds_data: bool,
    /// Number of the epoch in which the stripe was last written; 0 for never.
    pub epoch: u64,
}

/// Where every page and entry lies; pure arithmetic.
#[derive(Clone, Copy, Debug)]
pub struct PageLayout {
    geometry: Geometry,
    checksums: bool,
}

impl Page {
    /// A page that was never written.
    #[must_use]
    pub fn blank() -> Page {
        Page { sequence: 0, epoch: 0, paired: false, entries: Box::new([[0; 16]; PAGE_ENTRIES]) }
    }

    /// Marks the content as possibly older than the newest version: entries without a value may have got one
    /// since and count as lost; other entries do not match their block if they are old.
    pub fn doubt(&mut self) {
        let blank = self.entries.iter_mut().filter(|entry| **entry == BlockHash::UNWRITTEN.0);
        blank.for_each(|entry| *entry = BlockHash::LOST.0);
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self, key: &LogKey, array: Uuid, index: PageIndex) -> [u8; PAGE_BYTES] {
        let mut raw = RawPage {
            hash: [0; 16],
            array: array.into_bytes(),
            index: index.0.into(),
            sequence: self.sequence.into(),
            epoch: self.epoch.into(),
            flags: if self.paired { PAIRED } else { 0 }.into(),
            entries: *self.entries,
        };
        raw.hash = page_hash(key, &raw);
        zerocopy::transmute!(raw)
    }

    /// The bytes of a copy that is to count as damaged: versions of the page were written, and this copy
    /// holds none of them.
    #[must_use]
    pub fn encode_void(array: Uuid, index: PageIndex) -> [u8; PAGE_BYTES] {
        let raw = RawPage {
            // No page has this hash, except with a chance of 2^-128.
            hash: [0xff; 16],
            array: array.into_bytes(),
            index: index.0.into(),
            sequence: 0.into(),
            epoch: 0.into(),
            flags: 0.into(),
            entries: [[0; 16]; PAGE_ENTRIES],
        };
        zerocopy::transmute!(raw)
    }

    /// Takes the hash out of the bytes of a page. What is left hashes to it, with the array's key, if the
    /// bytes are a page of the array: so the pages of many reads can be hashed side by side.
    pub fn take_hash(bytes: &mut [u8; PAGE_BYTES]) -> [u8; 16] {
        let (hash, _) = bytes.split_first_chunk_mut().expect("a page is longer");
        std::mem::take(hash)
    }

    /// Reads a page.
    ///
    /// # Errors
    /// When the bytes are not this page of this array.
    pub fn decode(key: &LogKey, array: Uuid, index: PageIndex, bytes: &[u8]) -> Result<Page, PageError> {
        let raw = RawPage::ref_from_bytes(bytes).map_err(|_| PageError::Damaged)?;
        if raw.array != array.into_bytes() {
            return Err(PageError::Blank);
        }
        let counts = [raw.sequence, raw.epoch];
        let counted = counts.iter().all(|count| count.get() < COUNT_END);
        if raw.index.get() != index.0 || raw.hash != page_hash(key, raw) || !counted {
            return Err(PageError::Damaged);
        }
        let entries = Box::new(raw.entries);
        let paired = raw.flags.get() & PAIRED != 0;
        Ok(Page { sequence: raw.sequence.get(), epoch: raw.epoch.get(), paired, entries })
    }
}

impl<'a> HashedPage<'a> {
    /// A page out of bytes that have the hash of a page of this array; none if it is another page.
    #[must_use]
    pub fn of(array: Uuid, index: PageIndex, bytes: &'a [u8; PAGE_BYTES]) -> Option<HashedPage<'a>> {
        let raw: &RawPage = zerocopy::transmute_ref!(bytes);
        let is_counted = [raw.sequence, raw.epoch].iter().all(|count| count.get() < COUNT_END);
        let is_this = raw.array == array.into_bytes() && raw.index.get() == index.0;
        (is_this && is_counted).then_some(HashedPage(raw))
    }

    /// Sequence and epoch.
    #[must_use]
    pub fn version(&self) -> (u64, u64) {
        (self.0.sequence.get(), self.0.epoch.get())
    }

    /// An entry.
    #[must_use]
    pub fn entry(&self, at: usize) -> [u8; 16] {
        self.0.entries[at]
    }
}

impl MapEntry {
    /// The entry's bytes for stripe `stripe` (which decides what all zeroes mean).
    ///
    /// # Panics
    /// When the slot's number is beyond any array's, 2^56.
    #[must_use]
    pub fn encode(self, stripe: u64) -> [u8; 16] {
        if self == MapEntry::untouched(stripe) {
            return [0; 16];
        }
        let flags = KNOWN_ENTRY | if self.holds_data { HOLDS_DATA } else { 0 };
        assert!(self.slot.0 >> SLOT_BITS == 0, "slot {} in the stripe map", self.slot);
        let low = self.slot.0 | u64::from(flags) << SLOT_BITS;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&low.to_le_bytes());
        bytes[8..].copy_from_slice(&self.epoch.to_le_bytes());
        bytes
    }

    /// Reads the entry of stripe `stripe`; the caller checks that its slot is below the number of slots.
    #[must_use]
    pub fn decode(stripe: u64, bytes: [u8; 16]) -> MapEntry {
        let [low, epoch]: [U64; 2] = zerocopy::transmute!(bytes);
        let flags = (low.get() >> SLOT_BITS) as u8;
        if flags & KNOWN_ENTRY == 0 {
            return MapEntry::untouched(stripe);
        }
        MapEntry {
            slot: SlotIndex(low.get() & ((1 << SLOT_BITS) - 1)),
            holds_data: flags & HOLDS_DATA != 0,
            epoch: epoch.get(),
        }
    }

    /// The entry of a stripe that was never written.
    fn untouched(stripe: u64) -> MapEntry {
        MapEntry { slot: SlotIndex(stripe), holds_data: false, epoch: 0 }
    }
}

impl PageLayout {
    /// The layout of an array's pages; without `checksums` there are only map pages.
    #[must_use]
    pub fn new(geometry: Geometry, checksums: bool) -> PageLayout {
        PageLayout { geometry, checksums }
    }

    /// Pages in all.
    #[must_use]
    pub fn pages(&self) -> u64 {
        let rows = self.geometry.slots * self.rows();
        let checksums = match self.wide_pages() {
            Some(pages) => rows * pages,
            None => rows.div_ceil(self.rows_per_page()),
        };
        self.map_pages() + if self.checksums { checksums } else { 0 }
    }

    /// Pages of the stripe map: pages `0..map_pages()`. There is an entry for each slot, as there are never
    /// more stripes, so the pages stay where they are when a volume grows into free slots.
    #[must_use]
    pub fn map_pages(&self) -> u64 {
        self.geometry.slots.div_ceil(PAGE_ENTRIES as u64)
    }

    /// Page and entry of a logical stripe.
    #[must_use]
    pub fn map_entry(&self, stripe: u64) -> (PageIndex, usize) {
        debug_assert!(stripe < self.geometry.slots);
        (PageIndex(stripe / PAGE_ENTRIES as u64), (stripe % PAGE_ENTRIES as u64) as usize)
    }

    /// The pages with the hashes of some rows (4 KiB blocks within the chunk) of a slot.
    #[must_use]
    pub fn hash_pages(&self, slot: SlotIndex, rows: Range<usize>) -> Range<u64> {
        let first = self.hash_entry(slot, rows.start, 0).0.0;
        if rows.is_empty() {
            return first..first;
        }
        let last_column = usize::from(self.geometry.width()) - 1;
        first..self.hash_entry(slot, rows.end - 1, last_column).0.0 + 1
    }

    /// Page and entry of the hash of one block.
    #[must_use]
    pub fn hash_entry(&self, slot: SlotIndex, row: usize, column: usize) -> (PageIndex, usize) {
        debug_assert!(self.checksums && slot.0 < self.geometry.slots);
        let width = usize::from(self.geometry.width());
        debug_assert!(column < width);
        let row = slot.0 * self.rows() + row as u64;
        let (page, entry) = match self.wide_pages() {
            Some(pages) => (row * pages + (column / PAGE_ENTRIES) as u64, column % PAGE_ENTRIES),
            None => {
                let per_page = self.rows_per_page();
                (row / per_page, (row % per_page) as usize * width + column)
            }
        };
        (PageIndex(self.map_pages() + page), entry)
    }

    /// The slots whose hashes a page holds; none for a page of the stripe map.
    #[must_use]
    pub fn slots_of(&self, page: PageIndex) -> Range<u64> {
        let Some(page) = page.0.checked_sub(self.map_pages()).filter(|_| self.checksums) else { return 0..0 };
        let rows = match self.wide_pages() {
            Some(pages) => page / pages..page / pages + 1,
            None => page * self.rows_per_page()..(page + 1) * self.rows_per_page(),
        };
        let slots = self.geometry.slots;
        (rows.start / self.rows()).min(slots)..rows.end.div_ceil(self.rows()).min(slots)
    }

    /// Which of a page's copies is on `member`, if any.
    #[must_use]
    pub fn copy_on(&self, page: PageIndex, member: MemberIndex) -> Option<usize> {
        self.copies(page).position(|(holder, _)| holder == member)
    }

    /// The `m + 1` copies of a page: the member, and the offset in its pages region of the first of the
    /// copy's two places; the second follows it. Only for arrays whose [`PageLayout::region_bytes`] a device
    /// can have.
    pub fn copies(&self, page: PageIndex) -> impl Iterator<Item = (MemberIndex, u64)> + use<> {
        let (copies, width) = (u64::from(self.geometry.parity) + 1, u64::from(self.geometry.width()));
        // Copies go round the members like cards dealt: at most one of a page on each, so that all members
        // fill evenly.
        (0..copies).map(move |copy| {
            let global = page.0 * copies + copy;
            (MemberIndex((global % width) as u16), global / width * PLACES * PAGE_BYTES as u64)
        })
    }

    /// Bytes of the pages region of every member; `u64::MAX` when no device has as many.
    #[must_use]
    pub fn region_bytes(&self) -> u64 {
        let copies = u128::from(self.pages()) * (u128::from(self.geometry.parity) + 1);
        let on_member = copies.div_ceil(u128::from(self.geometry.width()));
        u64::try_from(on_member * u128::from(PLACES) * PAGE_BYTES as u128).unwrap_or(u64::MAX)
    }

    /// Rows of a slot.
    fn rows(&self) -> u64 {
        u64::from(self.geometry.chunk) / ROW_BYTES
    }

    /// Rows whose hashes share a page, if a page has room for a row.
    fn rows_per_page(&self) -> u64 {
        PAGE_ENTRIES as u64 / u64::from(self.geometry.width())
    }

    /// Pages of each row, if a page has no room for a row.
    fn wide_pages(&self) -> Option<u64> {
        let width = usize::from(self.geometry.width());
        (width > PAGE_ENTRIES).then(|| width.div_ceil(PAGE_ENTRIES) as u64)
    }
}

/// A hash as an entry.
#[must_use]
pub fn hash_of_entry(entry: [u8; 16]) -> BlockHash {
    BlockHash(entry)
}

/// Bits of a slot's number in a map entry, below the flags.
const SLOT_BITS: u32 = 56;
/// Flag of a map entry: the stripe holds data.
const HOLDS_DATA: u8 = 1;
/// Flag of a page: see [`Page::paired`].
const PAIRED: u64 = 1;
/// Flag of a map entry: it was set; without it the stripe was never written.
const KNOWN_ENTRY: u8 = 2;

#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawPage {
    hash: [u8; 16],
    array: [u8; 16],
    index: U64,
    sequence: U64,
    epoch: U64,
    flags: U64,
    entries: [[u8; 16]; PAGE_ENTRIES],
}

const _: () = {
    assert!(size_of::<RawPage>() == PAGE_BYTES);
    assert!(std::mem::offset_of!(RawPage, array) == 0x10);
    assert!(std::mem::offset_of!(RawPage, index) == 0x20);
    assert!(std::mem::offset_of!(RawPage, entries) == 0x40);
};

/// Hash of a page with the field for it zero.
fn page_hash(key: &LogKey, page: &RawPage) -> [u8; 16] {
    // The four chunks of one piece are hashed side by side; with two pieces some are hashed alone.
    let mut bytes = [0; PAGE_BYTES];
    bytes.copy_from_slice(page.as_bytes());
    Page::take_hash(&mut bytes);
    let hash = blake3::keyed_hash(&key.0, &bytes);
    *hash.as_bytes().first_chunk().expect("a hash of 32 bytes")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::format::golden;
    use crate::format::log::tests::key;
    use proptest::prelude::*;
    use std::collections::HashSet;

    const ARRAY: Uuid = Uuid::from_u128(0x0123_4567_89ab_4def_8000_0000_0000_03e8);
    const INDEX: PageIndex = PageIndex(0x1234);

    /// A page with something in every field, and the same at every run.
    pub(in crate::format) fn example() -> Page {
        let mut page = Page { sequence: 77, epoch: 9, ..Page::blank() };
        for (at, entry) in page.entries.iter_mut().enumerate() {
            *entry = (at as u128 * 0x0123_4567_89ab_cdef).to_le_bytes();
        }
        page.entries[3] = BlockHash::LOST.0;
        page
    }

    fn geometry(data: u16, parity: u16, chunk_log2: u32, slots: u64) -> Geometry {
        let chunk = 1 << chunk_log2;
        let volume_bytes = u64::from(chunk);
        Geometry { data, parity, chunk, sector: 512, slots, volume_bytes, ahead: 0 }
    }

    fn geometries() -> impl Strategy<Value = Geometry> {
        let width = prop_oneof![1u16..=255, 250u16..=255];
        let parity = prop_oneof![0u16..8, any::<u16>()];
        (width, parity, 12u32..=16, 1u64..3000).prop_map(|(width, parity, chunk, slots)| {
            let parity = parity % width;
            geometry(width - parity, parity, chunk, slots)
        })
    }

    proptest! {
        #[test]
        fn the_slots_of_a_page_are_those_whose_hashes_it_has(geometry in geometries()) {
            let layout = PageLayout::new(geometry, true);
            let rows = (geometry.chunk / 4096) as usize;
            let mut slots: std::collections::BTreeMap<u64, Vec<u64>> = std::collections::BTreeMap::new();
            for slot in 0..geometry.slots.min(300) {
                for page in layout.hash_pages(SlotIndex(slot), 0..rows) {
                    slots.entry(page).or_default().push(slot);
                }
            }
            // The last page may have room for more slots than the loop covered.
            slots.pop_last();
            for (page, slots) in slots {
                prop_assert_eq!(layout.slots_of(PageIndex(page)).collect::<Vec<_>>(), slots);
            }
            prop_assert!(layout.slots_of(PageIndex(0)).is_empty(), "a page of the map");
        }

        #[test]
        fn every_page_reads_back_as_it_was_written(
            numbers in any::<[u64; 3]>(), paired in any::<bool>(), entries in prop::collection::vec(any::<[u8; 16]>(), PAGE_ENTRIES),
        ) {
            let [sequence, epoch, index] = [numbers[0] % COUNT_END, numbers[1] % COUNT_END, numbers[2]];
            let page = Page { sequence, epoch, paired, entries: entries.try_into().unwrap() };
            let bytes = page.encode(&key(), ARRAY, PageIndex(index));
            prop_assert_eq!(Page::decode(&key(), ARRAY, PageIndex(index), &bytes), Ok(page));
            prop_assert_eq!(Page::decode(&key(), ARRAY, PageIndex(index ^ 1), &bytes), Err(PageError::Damaged));
        }

        #[test]
        fn noise_is_no_page(mut bytes in prop::collection::vec(any::<u8>(), PAGE_BYTES), dressed in any::<bool>()) {
            if dressed {
                bytes[0x10..0x28].copy_from_slice(&example().encode(&key(), ARRAY, INDEX)[0x10..0x28]);
            }
            let expected = if dressed { PageError::Damaged } else { PageError::Blank };
            prop_assert_eq!(Page::decode(&key(), ARRAY, INDEX, &bytes), Err(expected));
        }

        #[test]
        fn map_entries_read_back_and_zeroes_mean_untouched(
            stripe in 0u64..1 << 51, slot in 0u64..1 << 51, same in any::<bool>(), holds_data in any::<bool>(),
            epoch in prop_oneof![Just(0), any::<u64>()], noise in any::<[u8; 16]>(),
        ) {
            let slot = SlotIndex(if same { stripe } else { slot });
            let entry = MapEntry { slot, holds_data, epoch };
            prop_assert_eq!(MapEntry::decode(stripe, entry.encode(stripe)), entry);
            let untouched = MapEntry { slot: SlotIndex(stripe), holds_data: false, epoch: 0 };
            prop_assert_eq!(MapEntry::decode(stripe, [0; 16]), untouched);
            prop_assert_eq!(untouched.encode(stripe), [0; 16]);
            let any = MapEntry::decode(stripe, noise);
            prop_assert_eq!(MapEntry::decode(stripe, any.encode(stripe)), any);
        }

        #[test]
        fn copies_lie_on_distinct_members_never_overlap_and_fill_the_region(geometry in geometries()) {
            let layout = PageLayout::new(geometry, true);
            let pages = layout.pages();
            prop_assume!(pages * u64::from(geometry.parity + 1) < 200_000);
            let mut taken = HashSet::new();
            let mut end = 0;
            for page in 0..pages {
                let mut members = HashSet::new();
                for (member, offset) in layout.copies(PageIndex(page)) {
                    prop_assert!(member.0 < geometry.width() && members.insert(member));
                    prop_assert!(offset.is_multiple_of(8192) && taken.insert((member, offset)));
                    end = end.max(offset + 8192);
                }
                prop_assert_eq!(members.len(), usize::from(geometry.parity) + 1);
            }
            prop_assert_eq!(layout.region_bytes(), end);
        }

        #[test]
        fn every_block_and_stripe_has_an_entry_of_its_own(geometry in geometries()) {
            let geometry = Geometry { slots: geometry.slots % 40 + 1, ..geometry };
            let (layout, rows) = (PageLayout::new(geometry, true), geometry.chunk as usize / 4096);
            let mut taken = HashSet::new();
            for slot in 0..geometry.slots {
                prop_assert!(layout.map_entry(slot).0.0 < layout.map_pages());
                prop_assert!(taken.insert(layout.map_entry(slot)));
                for row in 0..rows {
                    let pages = layout.hash_pages(SlotIndex(slot), row..row + 1);
                    prop_assert!(pages.start >= layout.map_pages() && pages.end <= layout.pages());
                    for column in 0..usize::from(geometry.width()) {
                        let (page, entry) = layout.hash_entry(SlotIndex(slot), row, column);
                        prop_assert!(pages.contains(&page.0) && entry < PAGE_ENTRIES);
                        prop_assert!(taken.insert((page, entry)));
                    }
                }
                let all = layout.hash_pages(SlotIndex(slot), 0..rows);
                let first = layout.hash_pages(SlotIndex(slot), 0..1);
                let last = layout.hash_pages(SlotIndex(slot), rows - 1..rows);
                prop_assert_eq!(all, first.start..last.end);
                prop_assert!(layout.hash_pages(SlotIndex(slot), rows..rows).is_empty());
            }
            prop_assert_eq!(taken.iter().map(|(page, _)| page.0).max(), Some(layout.pages() - 1));
        }
    }

    #[test]
    fn every_flipped_byte_and_truncation_is_refused() {
        let mut bytes = example().encode(&key(), ARRAY, INDEX);
        for at in 0..PAGE_BYTES {
            for mask in [0x01, 0x80, 0xff] {
                bytes[at] ^= mask;
                let expected = if (0x10..0x20).contains(&at) { PageError::Blank } else { PageError::Damaged };
                let read = Page::decode(&key(), ARRAY, INDEX, &bytes);
                assert_eq!(read, Err(expected), "byte {at:#x} xor {mask:#x}");
                bytes[at] ^= mask;
            }
            assert_eq!(Page::decode(&key(), ARRAY, INDEX, &bytes[..at]), Err(PageError::Damaged));
        }
    }

    #[test]
    fn golden_pages_are_written_and_read_byte_for_byte() {
        let bytes = golden("page-checksums.bin", &example().encode(&key(), ARRAY, INDEX));
        assert_eq!(Page::decode(&key(), ARRAY, INDEX, &bytes), Ok(example()));
        let entries = [(0, true, 9), (4100, true, 8), (2, false, 7), (3, false, 0)];
        let mut map = Page { sequence: 78, epoch: 9, ..Page::blank() };
        for (stripe, (slot, holds_data, epoch)) in (0..).zip(entries) {
            let entry = MapEntry { slot: SlotIndex(slot), holds_data, epoch };
            map.entries[stripe as usize] = entry.encode(stripe);
        }
        let bytes = golden("page-map.bin", &map.encode(&key(), ARRAY, PageIndex(0)));
        assert_eq!(Page::decode(&key(), ARRAY, PageIndex(0), &bytes), Ok(map));
    }

    #[test]
    fn a_page_of_another_array_is_blank_and_one_with_another_key_damaged() {
        let bytes = example().encode(&key(), ARRAY, INDEX);
        assert_eq!(Page::decode(&key(), Uuid::nil(), INDEX, &bytes), Err(PageError::Blank));
        let other = LogKey::derive(ARRAY, [0; 16]);
        assert_eq!(Page::decode(&other, ARRAY, INDEX, &bytes), Err(PageError::Damaged));
        assert_eq!(Page::decode(&key(), ARRAY, INDEX, &[0; PAGE_BYTES]), Err(PageError::Blank));
    }

    #[test]
    fn without_checksums_there_are_only_map_pages() {
        let geometry = geometry(4, 2, 16, 1000);
        let layout = PageLayout::new(geometry, false);
        assert_eq!((layout.pages(), layout.map_pages()), (4, 4));
        assert_eq!(layout.region_bytes(), 2 * 8192);
        // 42 rows of 6 blocks in a page.
        assert_eq!(PageLayout::new(geometry, true).pages(), 4 + 16_000u64.div_ceil(42));
    }

    #[test]
    fn the_largest_array_does_not_overflow() {
        for (data, parity, possible) in [(1, 254, false), (255, 0, true), (1, 0, true), (100, 153, false)] {
            let layout = PageLayout::new(geometry(data, parity, 12, (1 << 51) - 1), true);
            let last = PageIndex(layout.pages() - 1);
            let block = layout.hash_entry(SlotIndex((1 << 51) - 2), 0, usize::from(data + parity) - 1);
            assert_eq!(block.0, last);
            if possible {
                let end = layout.copies(last).map(|(_, offset)| offset + 8192).max();
                assert_eq!(Some(layout.region_bytes()), end);
            } else {
                assert_eq!(layout.region_bytes(), u64::MAX);
            }
        }
    }
}
