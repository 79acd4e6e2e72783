//! Pages of a cas volume: what each says of itself, and the entries of each kind.

use super::{CAS_BLOCK_BYTES, CasKey, CatalogueSlot, ChunkHash, MapSlot, SegmentIndex};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Entries of 8 bytes in a page.
pub const PAGE_SLOTS: usize = 508;

/// Most bytes of the name of a volume or snapshot.
pub const VOLUME_NAME_BYTES: usize = 64;

/// What pages hold. The numbers are on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum PageSpace {
    /// Pages of maps: [`MapSlot`]s.
    Map = 0,
    /// [`TableEntry`] of each chunk id.
    Table = 1,
    /// [`StateEntry`] of each chunk id.
    States = 2,
    /// [`SegmentEntry`] of each segment.
    Segments = 3,
    /// The chunk ids of each segment, by their place in it.
    Directory = 4,
    /// How many ids of each page of states are used.
    Used = 5,
    /// [`CatalogueEntry`] of each volume and snapshot.
    Catalogue = 6,
}

impl PageSpace {
    /// All of them, by their number.
    pub const ALL: [PageSpace; 7] = [
        PageSpace::Map,
        PageSpace::Table,
        PageSpace::States,
        PageSpace::Segments,
        PageSpace::Directory,
        PageSpace::Used,
        PageSpace::Catalogue,
    ];
}

/// The name of a page. Level 0 holds entries; a page of level `n + 1` holds the locations of pages of level
/// `n` of the same space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageName {
    /// What it holds.
    pub space: PageSpace,
    /// 0, or above the locations.
    pub level: u8,
    /// Its number.
    pub index: u64,
}

/// A page as it lies on disk.
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RawCasPage {
    hash: [u8; 16],
    space: u8,
    level: u8,
    zero: [u8; 6],
    index: U64,
    body: [u8; PAGE_SLOTS * 8],
}

const _: () = assert!(size_of::<RawCasPage>() == CAS_BLOCK_BYTES);

/// What the table says of a chunk.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, PartialEq, Eq)]
#[repr(C)]
pub struct TableEntry {
    /// BLAKE3 of its bytes.
    pub hash: ChunkHash,
    /// Where it begins in its segment, in units of 16 bytes.
    pub offset: U32,
    /// How it is compressed: 0, not at all.
    pub algorithm: u8,
    zero: [u8; 3],
}

impl TableEntry {
    /// The entry of a chunk that is not compressed.
    #[must_use]
    pub fn raw(hash: ChunkHash, offset: u32) -> TableEntry {
        TableEntry { hash, offset: offset.into(), algorithm: 0, zero: [0; 3] }
    }
}

/// How often a chunk is used, and what it takes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, PartialEq, Eq)]
#[repr(C)]
pub struct StateEntry {
    /// Entries of maps that name it; 0, the id is free.
    pub count: U16,
    /// Bytes that it takes in its segment, in units of 16.
    pub stored: U16,
    /// Its segment.
    pub segment: U32,
}

/// What is in a segment.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, PartialEq, Eq)]
#[repr(C)]
pub struct SegmentEntry {
    /// 0: free, or metadata, as the locations say; 1: data; 2: journal; 3: the root.
    pub kind: u8,
    zero: [u8; 3],
    /// Bytes of chunks that are used, in units of 16.
    pub live: U32,
    /// The entry of the journal that opened it.
    pub opened: U64,
}

impl SegmentEntry {
    /// Free, or metadata.
    pub const FREE: u8 = 0;
    /// Holds chunks.
    pub const DATA: u8 = 1;
    /// Holds entries of the journal, and chunks in them.
    pub const JOURNAL: u8 = 2;
    /// Holds the root.
    pub const ROOT: u8 = 3;

    /// A segment of this kind, in which nothing is used.
    #[must_use]
    pub fn new(kind: u8, opened: u64) -> SegmentEntry {
        SegmentEntry { kind, zero: [0; 3], live: 0.into(), opened: opened.into() }
    }
}

/// What a slot of the catalogue is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum CatalogueState {
    /// Free.
    #[default]
    Free = 0,
    /// A volume: the head of a chain of snapshots.
    Volume = 1,
    /// A snapshot.
    Snapshot = 2,
    /// A snapshot, or the head of a volume, that is being deleted.
    Going = 3,
}

/// A volume or snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CatalogueEntry {
    /// What it is.
    pub state: CatalogueState,
    /// Its name, unique among the volumes, or among the snapshots of one volume; none while it goes.
    pub name: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Blocks.
    pub blocks: u64,
    /// The top page of its map; none where nothing was ever written.
    pub top: MapSlot,
    /// Levels of its map above the leaves.
    pub height: u8,
    /// Of a snapshot, its number: entries born at or before it are in it or in earlier ones.
    pub number: u32,
    /// The snapshot before it in its chain: of the same volume, or the origin of a clone.
    pub before: Option<CatalogueSlot>,
    /// Of a snapshot, what follows it in its chain: the next snapshot, or the volume.
    pub after: Option<CatalogueSlot>,
    /// Of one that goes: blocks below have been dealt with.
    pub cursor: u64,
    /// Blocks that are mapped.
    pub mapped: u64,
}

/// A slot of the catalogue as it lies on disk.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawCatalogueEntry {
    state: u8,
    height: u8,
    name_len: u8,
    zero: u8,
    number: U32,
    before: U16,
    after: U16,
    zero2: U32,
    created: U64,
    blocks: U64,
    top: U64,
    cursor: U64,
    mapped: U64,
    name: [u8; VOLUME_NAME_BYTES],
}

/// Bytes of a slot of the catalogue.
const CATALOGUE_BYTES: usize = size_of::<RawCatalogueEntry>();
/// Stands for no slot.
const NO_SLOT: u16 = u16::MAX;
/// Bytes of an id in the directory.
const ID_BYTES: usize = super::ID_BITS as usize / 8;

impl RawCasPage {
    /// A page without entries.
    #[must_use]
    pub fn blank(name: PageName) -> RawCasPage {
        let mut page = RawCasPage::new_zeroed();
        (page.space, page.level, page.index) = (name.space as u8, name.level, name.index.into());
        page
    }

    /// Computes its hash; it is then as it goes to disk.
    pub fn seal(&mut self, key: &CasKey) {
        self.hash = key.half(&self.as_bytes()[16..]);
    }

    /// Writes the page to `block` as it goes to disk, with its hash.
    ///
    /// # Panics
    /// When `block` is not as long as a page.
    pub fn write_to(&self, key: &CasKey, block: &mut [u8]) {
        block.copy_from_slice(self.as_bytes());
        let hash = key.half(&block[16..]);
        block[..16].copy_from_slice(&hash);
    }

    /// Takes a page from disk, if the bytes are this page of this volume.
    #[must_use]
    pub fn open(bytes: &[u8], key: &CasKey, name: PageName) -> Option<Box<RawCasPage>> {
        let page = RawCasPage::ref_from_bytes(bytes).ok()?;
        let is_it = page.name() == Some(name) && page.hash == key.half(&bytes[16..]);
        is_it.then(|| Box::new(page.clone()))
    }

    /// What the page says that it is, whether or not its hash is right.
    #[must_use]
    pub fn name(&self) -> Option<PageName> {
        let space = *PageSpace::ALL.get(usize::from(self.space))?;
        Some(PageName { space, level: self.level, index: self.index.get() })
    }

    fn entry<T: FromBytes + Unaligned + Copy + KnownLayout + Immutable>(&self, at: usize) -> T {
        let from = at * size_of::<T>();
        T::read_from_bytes(&self.body[from..from + size_of::<T>()]).expect("as many bytes as it has")
    }

    fn set_entry<T: IntoBytes + Immutable>(&mut self, at: usize, entry: &T) {
        let from = at * size_of::<T>();
        self.body[from..from + size_of::<T>()].copy_from_slice(entry.as_bytes());
    }

    /// An entry of a map.
    #[must_use]
    pub fn map_slot(&self, at: usize) -> MapSlot {
        MapSlot::unpack(self.entry::<U64>(at).get())
    }

    /// Changes an entry of a map.
    pub fn set_map_slot(&mut self, at: usize, slot: MapSlot) {
        self.set_entry(at, &U64::new(slot.pack()));
    }

    /// Takes over all entries of another page of the same kind.
    pub fn take_entries(&mut self, from: &RawCasPage) {
        self.body = from.body;
    }

    /// A location, of a page of a level above 0; 0 for none.
    #[must_use]
    pub fn location(&self, at: usize) -> u64 {
        self.entry::<U64>(at).get()
    }

    /// Changes a location.
    pub fn set_location(&mut self, at: usize, packed: u64) {
        self.set_entry(at, &U64::new(packed));
    }

    /// Entries of the table in a page.
    pub const TABLE_ENTRIES: usize = PAGE_SLOTS * 8 / size_of::<TableEntry>();

    /// An entry of the table.
    #[must_use]
    pub fn table_entry(&self, at: usize) -> TableEntry {
        self.entry(at)
    }

    /// Changes an entry of the table.
    pub fn set_table_entry(&mut self, at: usize, entry: TableEntry) {
        self.set_entry(at, &entry);
    }

    /// The state of a chunk.
    #[must_use]
    pub fn state_entry(&self, at: usize) -> StateEntry {
        self.entry(at)
    }

    /// Changes the state of a chunk.
    pub fn set_state_entry(&mut self, at: usize, entry: StateEntry) {
        self.set_entry(at, &entry);
    }

    /// Segments in a page.
    pub const SEGMENT_ENTRIES: usize = PAGE_SLOTS * 8 / size_of::<SegmentEntry>();

    /// A segment.
    #[must_use]
    pub fn segment_entry(&self, at: usize) -> SegmentEntry {
        self.entry(at)
    }

    /// Changes a segment.
    pub fn set_segment_entry(&mut self, at: usize, entry: SegmentEntry) {
        self.set_entry(at, &entry);
    }

    /// Ids of the directory in a page.
    pub const DIRECTORY_ENTRIES: usize = PAGE_SLOTS * 8 / ID_BYTES;

    /// A chunk id of the directory; 0 for none.
    #[must_use]
    pub fn directory_id(&self, at: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes[..ID_BYTES].copy_from_slice(&self.body[at * ID_BYTES..(at + 1) * ID_BYTES]);
        u64::from_le_bytes(bytes)
    }

    /// Changes a chunk id of the directory.
    pub fn set_directory_id(&mut self, at: usize, id: u64) {
        let bytes = id.to_le_bytes();
        self.body[at * ID_BYTES..(at + 1) * ID_BYTES].copy_from_slice(&bytes[..ID_BYTES]);
    }

    /// Counts of ids in a page.
    pub const USED_ENTRIES: usize = PAGE_SLOTS * 8 / size_of::<U16>();

    /// How many ids of a page of states are used.
    #[must_use]
    pub fn used(&self, at: usize) -> u16 {
        self.entry::<U16>(at).get()
    }

    /// Changes how many are used.
    pub fn set_used(&mut self, at: usize, used: u16) {
        self.set_entry(at, &U16::new(used));
    }

    /// Slots of the catalogue in a page.
    pub const CATALOGUE_ENTRIES: usize = PAGE_SLOTS * 8 / CATALOGUE_BYTES;

    /// A slot of the catalogue; none if the bytes make no sense.
    #[must_use]
    pub fn catalogue_entry(&self, at: usize) -> Option<CatalogueEntry> {
        let raw: RawCatalogueEntry = self.entry(at);
        let state = match raw.state {
            0 => CatalogueState::Free,
            1 => CatalogueState::Volume,
            2 => CatalogueState::Snapshot,
            3 => CatalogueState::Going,
            _ => return None,
        };
        let name = raw.name.get(..usize::from(raw.name_len))?;
        let slot = |slot: U16| (slot.get() != NO_SLOT).then_some(CatalogueSlot(slot.get()));
        Some(CatalogueEntry {
            state,
            name: str::from_utf8(name).ok()?.to_owned(),
            created: raw.created.get(),
            blocks: raw.blocks.get(),
            top: MapSlot::unpack(raw.top.get()),
            height: raw.height,
            number: raw.number.get(),
            before: slot(raw.before).filter(|_| state != CatalogueState::Free),
            after: slot(raw.after).filter(|_| state != CatalogueState::Free),
            cursor: raw.cursor.get(),
            mapped: raw.mapped.get(),
        })
    }

    /// Changes a slot of the catalogue.
    ///
    /// # Panics
    /// When the name is longer than [`VOLUME_NAME_BYTES`].
    pub fn set_catalogue_entry(&mut self, at: usize, entry: &CatalogueEntry) {
        if entry.state == CatalogueState::Free {
            return self.set_entry(at, &RawCatalogueEntry::new_zeroed());
        }
        let mut name = [0; VOLUME_NAME_BYTES];
        name[..entry.name.len()].copy_from_slice(entry.name.as_bytes());
        let slot = |slot: Option<CatalogueSlot>| U16::new(slot.map_or(NO_SLOT, |slot| slot.0));
        let raw = RawCatalogueEntry {
            state: entry.state as u8,
            height: entry.height,
            name_len: entry.name.len() as u8,
            zero: 0,
            number: entry.number.into(),
            before: slot(entry.before),
            after: slot(entry.after),
            zero2: 0.into(),
            created: entry.created.into(),
            blocks: entry.blocks.into(),
            top: entry.top.pack().into(),
            cursor: entry.cursor.into(),
            mapped: entry.mapped.into(),
            name,
        };
        self.set_entry(at, &raw);
    }
}

impl StateEntry {
    /// A chunk that is used this often.
    #[must_use]
    pub fn new(count: u16, stored: u16, segment: SegmentIndex) -> StateEntry {
        StateEntry { count: count.into(), stored: stored.into(), segment: segment.0.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::cas::ChunkId;
    use uuid::Uuid;

    fn key() -> CasKey {
        CasKey::derive(Uuid::from_u128(7), [9; 16])
    }

    #[test]
    fn a_page_is_known_by_its_name_and_hash() {
        let name = PageName { space: PageSpace::States, level: 0, index: 12 };
        let mut page = RawCasPage::blank(name);
        page.set_state_entry(507, StateEntry::new(3, 256, SegmentIndex(77)));
        let mut bytes = vec![0xff; CAS_BLOCK_BYTES];
        page.write_to(&key(), &mut bytes);
        page.seal(&key());
        assert_eq!(bytes, page.as_bytes());
        let read = RawCasPage::open(&bytes, &key(), name).expect("a page");
        assert_eq!(read.state_entry(507), StateEntry::new(3, 256, SegmentIndex(77)));
        assert!(RawCasPage::open(&bytes, &key(), PageName { index: 13, ..name }).is_none());
        assert!(RawCasPage::open(&bytes, &CasKey::derive(Uuid::from_u128(8), [9; 16]), name).is_none());
        for at in [0, 16, 17, 24, 4095] {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            assert!(RawCasPage::open(&bytes, &key(), name).is_none(), "byte {at}");
        }
        assert!(RawCasPage::open(&bytes[1..], &key(), name).is_none());
    }

    #[test]
    fn entries_lie_apart() {
        let name = PageName { space: PageSpace::Directory, level: 0, index: 0 };
        let mut page = RawCasPage::blank(name);
        for at in 0..RawCasPage::DIRECTORY_ENTRIES {
            page.set_directory_id(at, (1 << 39) + at as u64);
        }
        assert!((0..RawCasPage::DIRECTORY_ENTRIES).all(|at| page.directory_id(at) == (1 << 39) + at as u64));
        let mut page = RawCasPage::blank(name);
        for at in 0..RawCasPage::TABLE_ENTRIES {
            page.set_table_entry(at, TableEntry::raw([at as u8; 32], at as u32));
        }
        assert_eq!(page.table_entry(100), TableEntry::raw([100; 32], 100));
        assert_eq!(ChunkId::default(), ChunkId(0));
    }

    #[test]
    fn a_slot_of_the_catalogue_comes_back() {
        let mut page = RawCasPage::blank(PageName { space: PageSpace::Catalogue, level: 0, index: 0 });
        let entry = CatalogueEntry {
            state: CatalogueState::Snapshot,
            name: "monday".into(),
            created: 5,
            blocks: 1 << 40,
            top: MapSlot { id: 99, birth: 3 },
            height: 4,
            number: 3,
            before: None,
            after: Some(CatalogueSlot(0)),
            cursor: 17,
            mapped: 6,
        };
        let last = RawCasPage::CATALOGUE_ENTRIES - 1;
        page.set_catalogue_entry(last, &entry);
        assert_eq!(page.catalogue_entry(last), Some(entry));
        assert_eq!(page.catalogue_entry(last - 1), Some(CatalogueEntry::default()));
        page.set_catalogue_entry(last, &CatalogueEntry::default());
        assert_eq!(page.catalogue_entry(last), Some(CatalogueEntry::default()));
    }
}
