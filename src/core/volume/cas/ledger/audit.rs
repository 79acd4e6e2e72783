//! The audit: what the pages have to say, computed from nothing but the maps, and where they say something
//! else. The oracle of the simulator, and what `calpe check` finds out.
//!
//! Independent of how records are applied: an entry of a map is inherited if the map before has the same
//! entry for the same block, and counts otherwise; births are only looked at to check them. All findings are
//! of a state between two entries of the journal: within one, a chunk may be stored that no map names yet.

use super::Bounds;
use crate::format::cas::{
    CatalogueEntry, CatalogueSlot, CatalogueState, ChunkId, MapSlot, PAGE_SLOTS, PageName, PageSpace,
    RawCasPage, SegmentEntry, SegmentIndex,
};
use crate::volume::cas::place::{self, map_height, map_span};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Deref;

/// An audit ends after so many differences: who reads them learns nothing more from others.
const DIFFERENCES_MAX: usize = 1000;

/// Where the pages contradict the maps, or each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::volume::cas) enum Difference {
    #[error("{space:?} page {index} cannot be read")]
    NoPage { space: PageSpace, index: u64 },
    #[error("slot {} of the catalogue makes no sense", .0.0)]
    Slot(CatalogueSlot),
    #[error("slot {} of the catalogue does not fit the one before or after it", .0.0)]
    Link(CatalogueSlot),
    #[error("slot {} of the catalogue: {found} blocks are mapped, not {mapped}", .slot.0)]
    Mapped { slot: CatalogueSlot, mapped: u64, found: u64 },
    #[error("slot {} of the catalogue: the entry of block {block} is impossible", .slot.0)]
    Entry { slot: CatalogueSlot, block: u64 },
    #[error("slot {} of the catalogue: the entry of block {block} is shared, and the one before has another", .slot.0)]
    NotInherited { slot: CatalogueSlot, block: u64 },
    #[error("chunk {} has count {count}, and {found} entries name it", .id.0)]
    Count { id: ChunkId, count: u16, found: u32 },
    #[error("chunk {} is free and not void, or stored and not named", .0.0)]
    Void(ChunkId),
    #[error("chunk {} is not in a segment that holds chunks, or not where the directory has it", .0.0)]
    Place(ChunkId),
    #[error("segment {}: {live} units are live, not {found}", .segment.0)]
    Live { segment: SegmentIndex, live: u32, found: u64 },
    #[error("page {page} of states: {used} ids are used, not {found}")]
    Used { page: u64, used: u16, found: u16 },
    #[error("page {0} of a map is in use and counts as free")]
    PageFree(u64),
    #[error("page {0} of a map is not in use")]
    PageLost(u64),
    #[error("page {0} of a map is at two places")]
    PageTwice(u64),
}

/// Computes everything anew from the maps. `page` gives each page, those that were never written blank.
/// `next_number` is the number of the next snapshot, `map_pages` the pages of maps that count as used.
pub(in crate::volume::cas) fn audit<R: Deref<Target = RawCasPage>>(
    bounds: &Bounds,
    next_number: u32,
    page: impl FnMut(PageName) -> Option<R>,
    map_pages: &BTreeSet<u64>,
) -> Vec<Difference> {
    let mut audit = Audit {
        bounds: *bounds,
        next_number,
        page,
        nodes: BTreeMap::new(),
        counts: Vec::new(),
        map_pages: HashMap::new(),
        leaf_entries: HashMap::new(),
        found: Vec::new(),
    };
    audit.read_catalogue();
    audit.links();
    audit.maps();
    audit.numbers_of_pages(map_pages);
    audit.chunks();
    audit.found
}

struct Audit<F> {
    bounds: Bounds,
    next_number: u32,
    page: F,
    nodes: BTreeMap<CatalogueSlot, CatalogueEntry>,
    /// Entries that name a chunk, by its id.
    counts: Vec<u32>,
    /// Pages of maps that are in use, and where: level, first block.
    map_pages: HashMap<u64, (u8, u64)>,
    /// How many entries a leaf has.
    leaf_entries: HashMap<u64, u64>,
    found: Vec<Difference>,
}

impl<R: Deref<Target = RawCasPage>, F: FnMut(PageName) -> Option<R>> Audit<F> {
    fn differs(&mut self, difference: Difference) {
        if self.found.len() < DIFFERENCES_MAX {
            self.found.push(difference);
        }
    }

    fn read(&mut self, name: PageName) -> Option<R> {
        let page = (self.page)(name);
        if page.is_none() {
            self.differs(Difference::NoPage { space: name.space, index: name.index });
        }
        page
    }

    fn read_catalogue(&mut self) {
        for slot in (0..self.bounds.slots).map(CatalogueSlot) {
            let (name, at) = place::of_catalogue(slot);
            let Some(page) = self.read(name) else { continue };
            match page.catalogue_entry(at) {
                Some(entry) if entry.state == CatalogueState::Free => {}
                Some(entry) if entry.height <= 5 && entry.height >= map_height(entry.blocks) => {
                    self.nodes.insert(slot, entry);
                }
                _ => self.differs(Difference::Slot(slot)),
            }
        }
    }

    /// Checks the chains: each has one of a kind that fits before and after it, and numbers rise.
    fn links(&mut self) {
        let mut wrong = Vec::new();
        for (slot, entry) in &self.nodes {
            let node = |slot: CatalogueSlot| self.nodes.get(&slot);
            let before_fits = entry.before.is_none_or(|before| {
                node(before).is_some_and(|found| {
                    let is_older = entry.number == 0 || found.number < entry.number;
                    // A snapshot that goes has one after it. What has it before without being that one would
                    // lose what it shares.
                    let is_kept = found.state == CatalogueState::Snapshot
                        || found.state == CatalogueState::Going && found.after == Some(*slot);
                    found.number != 0 && is_older && is_kept
                })
            });
            let after_fits = match (entry.state, entry.after) {
                (CatalogueState::Volume, after) => after.is_none(),
                (CatalogueState::Going, None) => entry.number == 0,
                (_, after) => after.and_then(node).is_some_and(|found| {
                    let is_neighbour = found.before == Some(*slot) && found.height >= entry.height;
                    // Of two neighbours, one goes at most.
                    let stays = found.state != CatalogueState::Going
                        || entry.state == CatalogueState::Snapshot && found.after.is_some();
                    is_neighbour && found.state != CatalogueState::Free && stays
                }),
            };
            let is_snapshot = entry.after.is_some();
            let number_fits = (entry.number != 0) == is_snapshot && entry.number < self.next_number;
            if !(before_fits && after_fits && number_fits) {
                wrong.push(Difference::Link(*slot));
            }
        }
        wrong.into_iter().for_each(|difference| self.differs(difference));
    }

    /// The one before, as far as a block is concerned: a snapshot whose deletion has passed it is not there.
    fn before_at(&self, entry: &CatalogueEntry, block: u64) -> Option<&CatalogueEntry> {
        let mut before = self.nodes.get(&entry.before?)?;
        // Each is older than the last, or the chain is damaged.
        while before.state == CatalogueState::Going && block < before.cursor {
            let older = self.nodes.get(&before.before?)?;
            if older.number >= before.number {
                return None;
            }
            before = older;
        }
        Some(before)
    }

    fn maps(&mut self) {
        let nodes: Vec<_> = self.nodes.iter().map(|(slot, entry)| (*slot, entry.clone())).collect();
        for (slot, entry) in nodes {
            let mut mapped = 0;
            self.walk(slot, &entry, (entry.top.id, entry.height, 0), &mut mapped);
            if entry.state != CatalogueState::Going && mapped != entry.mapped {
                self.differs(Difference::Mapped { slot, mapped: entry.mapped, found: mapped });
            }
        }
    }

    fn walk(
        &mut self,
        slot: CatalogueSlot,
        entry: &CatalogueEntry,
        (number, level, first): (u64, u8, u64),
        mapped: &mut u64,
    ) {
        let is_dealt_with =
            entry.state == CatalogueState::Going && first.saturating_add(map_span(level + 1)) <= entry.cursor;
        if number == 0 || is_dealt_with {
            return;
        }
        if self.map_pages.insert(number, (level, first)).is_some_and(|other| other != (level, first)) {
            // Not looked into: it may lead round in a circle.
            return self.differs(Difference::PageTwice(number));
        }
        let before = self.before_at(entry, first).cloned();
        if level == 0 {
            let inherited = before.as_ref().map_or(0, |before| self.leaf_of(before, first));
            if inherited != number || !self.leaf_entries.contains_key(&number) {
                self.leaf(slot, entry, (number, first), before.as_ref().map(|before| (before, inherited)));
            }
            *mapped += self.leaf_entries.get(&number).copied().unwrap_or(0);
            return;
        }
        let Some(page) = self.read(place::of_map(number)) else { return };
        let below: Vec<_> = (0..PAGE_SLOTS).map(|at| page.map_slot(at).id).collect();
        drop(page);
        for (at, number) in below.into_iter().enumerate() {
            self.walk(slot, entry, (number, level - 1, first + at as u64 * map_span(level)), mapped);
        }
    }

    /// The number of the leaf that a map has for a block; 0 for none.
    fn leaf_of(&mut self, entry: &CatalogueEntry, block: u64) -> u64 {
        let mut number = if block < map_span(entry.height + 1) { entry.top.id } else { 0 };
        for level in (1..=entry.height).rev() {
            if number == 0 {
                break;
            }
            let at = block / map_span(level) % PAGE_SLOTS as u64;
            number = self.read(place::of_map(number)).map_or(0, |page| page.map_slot(at as usize).id);
        }
        number
    }

    fn leaf_slots(&mut self, number: u64) -> Vec<MapSlot> {
        if number == 0 {
            return vec![MapSlot::default(); PAGE_SLOTS];
        }
        let page = self.read(place::of_map(number));
        let slot = |at| page.as_ref().map_or(MapSlot::default(), |page| page.map_slot(at));
        (0..PAGE_SLOTS).map(slot).collect()
    }

    /// Counts the entries of a leaf that are not those of the leaf before.
    fn leaf(
        &mut self,
        slot: CatalogueSlot,
        entry: &CatalogueEntry,
        (number, first): (u64, u64),
        before: Option<(&CatalogueEntry, u64)>,
    ) {
        let own = self.leaf_slots(number);
        let inherited = self.leaf_slots(before.map_or(0, |(_, number)| number));
        let oldest = before.map_or(0, |(before, _)| before.number);
        let youngest = if entry.number == 0 { self.next_number } else { entry.number };
        let mut entries = 0;
        for (block, (own, inherited)) in (first..).zip(own.into_iter().zip(inherited)) {
            if own.id == 0 {
                continue;
            }
            entries += 1;
            if own.id >= self.bounds.ids || own.birth > youngest || block >= entry.blocks {
                self.differs(Difference::Entry { slot, block });
                continue;
            }
            if own == inherited {
                continue;
            }
            if own.birth <= oldest {
                self.differs(Difference::NotInherited { slot, block });
            }
            let id = own.id as usize;
            if self.counts.len() <= id {
                self.counts.resize(id + 1, 0);
            }
            self.counts[id] += 1;
        }
        self.leaf_entries.insert(number, entries);
    }

    fn numbers_of_pages(&mut self, known: &BTreeSet<u64>) {
        let in_use: BTreeSet<u64> = self.map_pages.keys().copied().collect();
        for number in in_use.difference(known) {
            self.differs(Difference::PageFree(*number));
        }
        for number in known.difference(&in_use) {
            self.differs(Difference::PageLost(*number));
        }
    }

    fn chunks(&mut self) {
        let mut live: BTreeMap<SegmentIndex, u64> = BTreeMap::new();
        for page in 0..self.bounds.ids.div_ceil(PAGE_SLOTS as u64) {
            let mut used = 0;
            for at in 0..PAGE_SLOTS {
                let id = ChunkId(page * PAGE_SLOTS as u64 + at as u64);
                let Some(states) = self.read(place::of_state(id).0) else { break };
                let state = states.state_entry(at);
                drop(states);
                let found = self.counts.get(id.0 as usize).copied().unwrap_or(0);
                let count = state.count.get();
                if u32::from(count) != found {
                    self.differs(Difference::Count { id, count, found });
                }
                if count == 0 {
                    if state.stored.get() != 0 || state.segment.get() != 0 {
                        self.differs(Difference::Void(id));
                    }
                    continue;
                }
                used += 1;
                let segment = SegmentIndex(state.segment.get());
                *live.entry(segment).or_default() += u64::from(state.stored.get());
                self.place_of(id, segment, state.stored.get());
            }
            let (name, at) = place::of_used(ChunkId(page * PAGE_SLOTS as u64));
            let said = self.read(name).map(|page| page.used(at));
            if let Some(said) = said.filter(|said| *said != used) {
                self.differs(Difference::Used { page, used: said, found: used });
            }
        }
        for segment in (0..self.bounds.segments).map(SegmentIndex) {
            let found = live.get(&segment).copied().unwrap_or(0);
            let said = self.segment(segment).map_or(0, |entry| entry.live.get());
            if u64::from(said) != found {
                self.differs(Difference::Live { segment, live: said, found });
            }
        }
    }

    fn segment(&mut self, segment: SegmentIndex) -> Option<SegmentEntry> {
        let (name, at) = place::of_segment(segment);
        self.read(name).map(|page| page.segment_entry(at))
    }

    /// Checks that segment, table and directory agree on where a chunk is.
    fn place_of(&mut self, id: ChunkId, segment: SegmentIndex, stored: u16) {
        const UNITS: u32 = 4096 / 16;
        let blocks = self.bounds.blocks_per_segment;
        let (name, at) = place::of_table(id);
        let Some(entry) = self.read(name).map(|page| page.table_entry(at)) else { return };
        let offset = entry.offset.get();
        let block = offset / UNITS;
        let lies_within = u64::from(offset) + u64::from(stored) <= u64::from(blocks) * u64::from(UNITS);
        let is_raw = entry.algorithm == 0 && offset.is_multiple_of(UNITS) && u32::from(stored) == UNITS;
        let mut is_right = segment.0 < self.bounds.segments && lies_within && is_raw;
        if is_right {
            let kind = self.segment(segment).map(|entry| entry.kind);
            let (name, at) = place::of_directory(segment, blocks, block);
            let named = self.read(name).map(|page| page.directory_id(at));
            is_right =
                matches!(kind, Some(SegmentEntry::DATA | SegmentEntry::JOURNAL)) && named == Some(id.0);
        }
        if !is_right {
            self.differs(Difference::Place(id));
        }
    }
}
