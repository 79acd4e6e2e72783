//! Tests of the ledger: rules one by one, and random sequences of records against a naive model.

mod audited;
mod random;
mod rules;

use super::audit::Difference;
use super::deletion::Step;
use super::{Bounds, Effects, Found, Inconsistent, Ledger, Located, Refused, audit};
use crate::format::cas::{
    CasRecord, CatalogueEntry, CatalogueSlot, CatalogueState, ChunkHash, ChunkId, Moved, PageName, PageSpace,
    RawCasPage, SegmentEntry, SegmentIndex,
};
use crate::volume::cas::place::{self, PageAccess};
use std::collections::{BTreeMap, BTreeSet};
use zerocopy::IntoBytes;

/// Blocks of a leaf.
const LEAF: u64 = 508;
/// Blocks of a map of two levels.
const TWO_LEVELS: u64 = LEAF * LEAF;
/// Small, with two pages of states and of the directory.
const BOUNDS: Bounds = Bounds { blocks_per_segment: 8, segments: 160, ids: 1000, slots: 14 };

/// Pages in memory, of which those that are not resident can be hidden until they are asked for.
#[derive(Clone)]
struct Pages {
    pages: BTreeMap<PageName, RawCasPage>,
    map_pages: BTreeSet<u64>,
    /// What is in memory, of the pages that can be elsewhere.
    shown: BTreeSet<PageName>,
    blank: RawCasPage,
}

impl Pages {
    fn new() -> Pages {
        let blank = RawCasPage::blank(PageName { space: PageSpace::Map, level: 0, index: 0 });
        Pages { pages: BTreeMap::new(), map_pages: BTreeSet::new(), shown: BTreeSet::new(), blank }
    }

    fn is_shown(&self, name: PageName) -> bool {
        use PageSpace::{Catalogue, Segments, Used};
        matches!(name.space, Segments | Used | Catalogue) || self.shown.contains(&name)
    }

    /// A page, in memory or not. One of a map that is not in use is none.
    fn any(&self, name: PageName) -> Option<&RawCasPage> {
        let exists = name.space != PageSpace::Map || self.map_pages.contains(&name.index);
        exists.then(|| self.pages.get(&name).unwrap_or(&self.blank))
    }

    fn bytes(&self) -> BTreeMap<PageName, &[u8]> {
        self.pages.iter().map(|(name, page)| (*name, page.as_bytes())).collect()
    }

    /// Changes a page behind the ledger's back.
    fn damage(&mut self, name: PageName) -> &mut RawCasPage {
        self.pages.entry(name).or_insert_with(|| RawCasPage::blank(name))
    }
}

impl PageAccess for Pages {
    fn page(&self, name: PageName) -> Option<&RawCasPage> {
        self.is_shown(name).then(|| self.any(name).expect("a page of a map that is in use"))
    }

    fn change(&mut self, name: PageName) -> &mut RawCasPage {
        assert!(self.page(name).is_some(), "{name:?} is not in memory");
        self.pages.entry(name).or_insert_with(|| RawCasPage::blank(name))
    }

    fn new_map_page(&mut self) -> u64 {
        let number = (1..).find(|number| !self.map_pages.contains(number)).expect("there are many");
        self.map_pages.insert(number);
        let name = place::of_map(number);
        self.pages.insert(name, RawCasPage::blank(name));
        self.shown.insert(name);
        number
    }

    fn free_map_page(&mut self, number: u64) {
        assert!(self.map_pages.remove(&number), "page {number} is not in use");
        self.pages.remove(&place::of_map(number));
    }
}

/// What a chunk is made of: stands for its bytes.
type Content = u64;

fn hash_of(content: Content) -> ChunkHash {
    let mut hash = [7; 32];
    hash[..8].copy_from_slice(&content.to_le_bytes());
    hash
}

/// A volume as its owner runs it: it chooses ids and places, and looks for duplicates.
#[derive(Clone)]
struct World {
    ledger: Ledger,
    pages: Pages,
    log: Vec<CasRecord>,
    free_ids: BTreeSet<u64>,
    index: BTreeMap<Content, ChunkId>,
    free_segments: BTreeSet<u32>,
    /// Where the next chunk goes.
    open: Option<(SegmentIndex, u32)>,
    /// What the last record did.
    effects: Effects,
}

impl World {
    fn new() -> World {
        World {
            ledger: Ledger::new(BOUNDS, 1),
            pages: Pages::new(),
            log: Vec::new(),
            free_ids: (1..BOUNDS.ids).collect(),
            index: BTreeMap::new(),
            free_segments: (1..BOUNDS.segments).collect(),
            open: None,
            effects: Effects::default(),
        }
    }

    /// Asks for the pages that a record needs, all others being elsewhere. Returns how often it had to ask.
    fn load(&mut self, record: &CasRecord) -> usize {
        self.pages.shown.clear();
        for round in 0.. {
            let mut wanted = Vec::new();
            self.ledger.missing(&self.pages, record, &mut wanted);
            if wanted.is_empty() {
                return round;
            }
            for name in wanted {
                assert!(self.pages.any(name).is_some(), "{name:?} is not in use");
                assert!(self.pages.shown.insert(name), "{name:?} is there");
            }
        }
        unreachable!()
    }

    /// Applies a record. If it is refused, checks that nothing has changed.
    fn apply(&mut self, record: CasRecord) -> Result<(), Inconsistent> {
        self.load(&record);
        let before = self.clone();
        let mut effects = Effects::default();
        match self.ledger.apply(&mut self.pages, self.log.len() as u64, &record, &mut effects) {
            Ok(()) => {}
            Err(Refused::NotHere(names)) => panic!("{names:?} was not asked for"),
            Err(Refused::Inconsistent(why)) => {
                assert_eq!(self.ledger, before.ledger);
                assert!(self.pages.bytes() == before.pages.bytes(), "{record:?} changed pages: {why}");
                assert_eq!(self.pages.map_pages, before.pages.map_pages);
                assert_eq!(effects, Effects::default());
                return Err(why);
            }
        }
        for id in &effects.freed {
            assert!(self.free_ids.insert(id.0), "{id:?} was free");
            self.index.retain(|_, other| other != id);
        }
        self.effects = effects;
        self.log.push(record);
        Ok(())
    }

    fn done(&mut self, record: CasRecord) {
        let shown = format!("{record:?}");
        if let Err(why) = self.apply(record) {
            panic!("{shown}: {why}");
        }
    }

    /// A place for so many chunks.
    fn room(&mut self, chunks: u32) -> (SegmentIndex, u32) {
        match self.open {
            Some((segment, block)) if block + chunks <= BOUNDS.blocks_per_segment => (segment, block),
            _ => {
                let segment = SegmentIndex(self.free_segments.pop_first().expect("many segments"));
                self.done(CasRecord::Open { segment, kind: SegmentEntry::DATA });
                self.open = Some((segment, 0));
                (segment, 0)
            }
        }
    }

    /// Gives up a segment in which nothing is live, unless it is open.
    fn give_up(&mut self, segment: SegmentIndex) {
        if self.open.is_none_or(|(open, _)| open != segment) {
            self.done(CasRecord::GiveUp { segment });
            self.free_segments.insert(segment.0);
        }
    }

    /// Stores what is new of these contents. Returns the ids of all.
    fn store(&mut self, contents: &[Content]) -> Vec<ChunkId> {
        let mut chunks = Vec::new();
        let ids = contents
            .iter()
            .map(|content| {
                *self.index.entry(*content).or_insert_with(|| {
                    let id = ChunkId(self.free_ids.pop_first().expect("many ids"));
                    chunks.push((id, hash_of(*content)));
                    id
                })
            })
            .collect();
        if !chunks.is_empty() {
            let count = chunks.len() as u32;
            let (segment, block) = self.room(count);
            self.done(CasRecord::Store { segment, block, chunks });
            self.open = Some((segment, block + count));
        }
        ids
    }

    fn write(&mut self, volume: CatalogueSlot, block: u64, contents: &[Content]) {
        let ids = self.store(contents);
        self.done(CasRecord::Map { volume, block, ids });
    }

    fn unmap(&mut self, volume: CatalogueSlot, block: u64, count: u64) {
        self.done(CasRecord::Unmap { volume, block, count });
    }

    fn slot(&self) -> CatalogueSlot {
        self.ledger.free_slot(&self.pages).expect("there are more slots than are used")
    }

    fn create(&mut self, blocks: u64) -> CatalogueSlot {
        let slot = self.slot();
        self.done(CasRecord::Create { slot, created: 5, blocks, name: format!("v{}", slot.0) });
        slot
    }

    fn snapshot(&mut self, volume: CatalogueSlot) -> CatalogueSlot {
        let slot = self.slot();
        self.done(CasRecord::Snapshot { volume, slot, created: 6, name: format!("s{}", slot.0) });
        slot
    }

    fn clone_of(&mut self, origin: CatalogueSlot) -> CatalogueSlot {
        let slot = self.slot();
        self.done(CasRecord::Clone { origin, slot, created: 7, name: format!("v{}", slot.0) });
        slot
    }

    fn rollback(&mut self, volume: CatalogueSlot) -> CatalogueSlot {
        let slot = self.slot();
        self.done(CasRecord::Rollback { volume, slot });
        slot
    }

    fn delete(&mut self, slot: CatalogueSlot) {
        self.done(CasRecord::Delete { slot });
    }

    fn step(&mut self, slot: CatalogueSlot, upto: u64) {
        self.done(CasRecord::DeleteStep { slot, upto });
    }

    /// How the deletion can go on, pages being loaded as they are asked for.
    fn next_step(&mut self, slot: CatalogueSlot, budget: usize) -> u64 {
        self.pages.shown.clear();
        loop {
            match self.ledger.deletion_step(&self.pages, slot, budget).expect("it is being deleted") {
                Step::Upto(upto) => return upto,
                Step::NotHere(names) => {
                    assert!(!names.is_empty());
                    for name in names {
                        assert!(self.pages.any(name).is_some(), "{name:?} is not in use");
                        assert!(self.pages.shown.insert(name), "{name:?} is there");
                    }
                }
            }
        }
    }

    fn finish(&mut self, slot: CatalogueSlot) {
        while self.entry(slot).state == CatalogueState::Going {
            let upto = self.next_step(slot, 3);
            self.step(slot, upto);
        }
    }

    fn entry(&self, slot: CatalogueSlot) -> CatalogueEntry {
        self.ledger.entry(&self.pages, slot).expect("a slot")
    }

    fn show_all(&mut self) {
        let names = self.pages.pages.keys().copied();
        let spaces = [PageSpace::Table, PageSpace::States, PageSpace::Directory];
        let low = spaces
            .into_iter()
            .flat_map(|space| (0..BOUNDS.ids / 90).map(move |index| PageName { space, level: 0, index }));
        self.pages.shown = names.chain(low).collect();
    }

    fn read(&mut self, slot: CatalogueSlot, block: u64) -> Option<Content> {
        self.show_all();
        match self.ledger.lookup(&self.pages, slot, block).expect("a volume or snapshot") {
            Found::Hole => None,
            Found::Chunk(id) => match self.ledger.locate(&self.pages, id) {
                Located::At(place) => {
                    let content = Content::from_le_bytes(place.hash[..8].try_into().expect("8 bytes"));
                    assert_eq!(place.hash, hash_of(content));
                    Some(content)
                }
                other => panic!("{id:?} of block {block} of {slot:?}: {other:?}"),
            },
            Found::NotHere(name) => panic!("{name:?} is in memory"),
        }
    }

    /// How many entries name the chunk with this content.
    fn count(&mut self, content: Content) -> u16 {
        self.show_all();
        let Some(id) = self.index.get(&content) else { return 0 };
        match self.ledger.locate(&self.pages, *id) {
            Located::At(place) => place.count,
            _ => 0,
        }
    }

    fn live(&self, segment: SegmentIndex) -> u32 {
        let (name, at) = place::of_segment(segment);
        self.pages.page(name).expect("resident").segment_entry(at).live.get()
    }

    fn audit(&self) -> Vec<Difference> {
        audit(&BOUNDS, self.ledger.next_number(), |name| self.pages.any(name), &self.pages.map_pages)
    }

    fn check(&self) {
        assert_eq!(self.audit(), []);
    }

    /// Replays all records from blank pages: the bytes have to be the same.
    fn check_replay(&self) {
        let mut other = World::new();
        let mut effects = Effects::default();
        for (sequence, record) in self.log.iter().enumerate() {
            other.load(record);
            other.ledger.apply(&mut other.pages, sequence as u64, record, &mut effects).expect("as before");
        }
        assert_eq!(other.ledger, self.ledger);
        assert_eq!(other.pages.map_pages, self.pages.map_pages);
        assert!(other.pages.bytes() == self.pages.bytes(), "a replay comes to other pages");
    }

    /// What is in use when everything was deleted.
    fn check_empty(&self) {
        self.check();
        assert_eq!(self.pages.map_pages, BTreeSet::new());
        assert_eq!(self.free_ids.len() as u64, BOUNDS.ids - 1);
        assert!((0..BOUNDS.segments).all(|segment| self.live(SegmentIndex(segment)) == 0));
    }
}
