//! The state of the volume: what records change, and what follows from it in memory.

use super::Facts;
use super::ids::Ids;
use super::index::Index;
use super::journal::Journal;
use super::ledger::{Bounds, Effects, Ledger, Located, Refused};
use super::pages::{Opening, Pages};
use super::place::{self, PageAccess};
use super::segments::Segments;
use crate::format::cas::{
    CAS_BLOCK_BYTES, CHUNK_ALIGN, CasRecord, CatalogueSlot, CatalogueState, ChunkHash, ChunkId, PageName,
    SPACES, SegmentEntry, SegmentIndex, SpaceRoot, TableEntry,
};

/// Free segments that clients' chunks leave to others: for pages, the journal and what is moved.
pub(super) const RESERVE: usize = 6;

/// Slots of the catalogue.
const SLOTS: u16 = 4096;

/// See the head of this file.
pub(super) struct Store {
    pub pages: Pages,
    pub ledger: Ledger,
    pub index: Index,
    pub ids: Ids,
    pub segments: Segments,
    pub journal: Journal,
    /// Data segments in which nothing is used any more, to be given up.
    pub empty: Vec<SegmentIndex>,
    /// Ids are below.
    pub chunks: u64,
    /// Chunks that are used.
    pub live: u64,
}

/// Where a chunk lies, if it is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub id: ChunkId,
    pub hash: ChunkHash,
    pub segment: SegmentIndex,
    pub block: u32,
    pub count: u16,
}

impl Store {
    /// The state of a volume before anything was read.
    pub(super) fn blank(facts: &Facts) -> Store {
        let chunks = Store::ids(facts);
        Store {
            pages: blank_pages(facts),
            ledger: Store::ledger(facts, 1),
            index: Index::for_chunks(chunks.min(1 << 22)),
            ids: Ids::default(),
            segments: Segments::default(),
            journal: Journal::new(facts.key, facts.segment_blocks, 0, Default::default(), []),
            empty: Vec::new(),
            chunks,
            live: 0,
        }
    }

    /// The ledger of such a volume.
    pub(super) fn ledger(facts: &Facts, next_number: u32) -> Ledger {
        let bounds = Bounds {
            blocks_per_segment: facts.segment_blocks,
            segments: facts.segments,
            ids: Store::ids(facts),
            slots: SLOTS,
        };
        Ledger::new(bounds, next_number)
    }

    /// Ids are below.
    fn ids(facts: &Facts) -> u64 {
        u64::from(facts.segments) * u64::from(facts.segment_blocks) + 1
    }

    /// Blocks of a volume; none if the slot is not that of a volume.
    pub(super) fn blocks_of(&self, volume: CatalogueSlot) -> Option<u64> {
        let (name, at) = place::of_catalogue(volume);
        let entry = self.pages.page(name)?.catalogue_entry(at)?;
        (entry.state == CatalogueState::Volume).then_some(entry.blocks)
    }

    /// What is known of a chunk; `Err` names a page that is not in memory.
    pub(super) fn chunk(&self, id: ChunkId) -> Result<Option<Chunk>, PageName> {
        match self.ledger.locate(&self.pages, id) {
            Located::Free => Ok(None),
            Located::NotHere(name) => Err(name),
            Located::At(place) => Ok(Some(Chunk {
                id,
                hash: place.hash,
                segment: place.segment,
                block: place.offset / (CAS_BLOCK_BYTES / CHUNK_ALIGN) as u32,
                count: place.count,
            })),
        }
    }

    fn table_entry(&self, id: ChunkId) -> Result<TableEntry, PageName> {
        let (name, at) = place::of_table(id);
        Ok(self.pages.page(name).ok_or(name)?.table_entry(at))
    }

    /// How often a chunk is used; `Err` names a page that is not in memory.
    pub(super) fn count(&self, id: ChunkId) -> Result<u16, PageName> {
        let (name, at) = place::of_state(id);
        Ok(self.pages.page(name).ok_or(name)?.state_entry(at).count.get())
    }

    /// A segment as the pages say.
    pub(super) fn segment(&self, segment: SegmentIndex) -> SegmentEntry {
        let (name, at) = place::of_segment(segment);
        self.pages.page(name).expect("segments are in memory").segment_entry(at)
    }

    /// Makes a record true in memory. All pages that it needs are there.
    pub(super) fn apply(&mut self, sequence: u64, record: &CasRecord) -> Result<(), Refused> {
        let mut effects = Effects::default();
        self.ledger.apply(&mut self.pages, sequence, record, &mut effects)?;
        self.live -= effects.freed.len() as u64;
        for id in effects.freed {
            if let Ok(entry) = self.table_entry(id) {
                self.index.remove(&entry.hash, id);
            }
        }
        self.empty.extend(effects.emptied);
        if let CasRecord::Store { chunks, .. } = record {
            self.live += chunks.len() as u64;
            chunks.iter().for_each(|(id, hash)| self.index.insert(hash, *id));
        }
        Ok(())
    }

    /// A record joins the journal.
    pub(super) fn join(&mut self, record: CasRecord) {
        let sequence = self.journal.sequence();
        self.apply(sequence, &record).expect("a record was checked before it joins");
        self.journal.join(record);
    }

    /// Something in a segment that was to be used is not: it may be given up.
    pub(super) fn look_at(&mut self, segment: SegmentIndex) {
        self.empty.push(segment);
    }

    /// Whether a segment of chunks, or of the journal before the newest root, holds nothing that is used.
    pub(super) fn is_unused(&self, segment: SegmentIndex) -> bool {
        let entry = self.segment(segment);
        let is_kind = match entry.kind {
            SegmentEntry::DATA => true,
            SegmentEntry::JOURNAL => !self.journal.is_needed(segment),
            _ => false,
        };
        is_kind && entry.live.get() == 0 && !self.segments.is_held(segment)
    }
}

/// Pages of a volume that was never written.
pub(super) fn blank_pages(facts: &Facts) -> Pages {
    let opening =
        Opening::new(facts.key, &[SpaceRoot::default(); SPACES]).expect("no pages are no contradiction");
    Pages::new(opening, facts.page_cache as u64)
}
