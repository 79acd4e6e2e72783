//! The ledger: what each record of the journal does to the pages of the volume, and what the pages say.
//!
//! Pure and deterministic: a function of the pages and the record, so that a start, which applies the same
//! records to the same pages, comes to the same bytes. A record is first planned, which reads only and checks
//! all that it relies on; what follows cannot fail. Must not know of buffers, the array or the journal.
//!
//! `view` is what a plan reads, `tally` works out counts, `chunks`, `maps`, `catalogue` and `deletion` are
//! the records by subject. `audit` computes everything anew from the maps, in other ways.

mod audit;
mod catalogue;
mod chunks;
mod deletion;
mod maps;
mod tally;
mod view;

#[cfg(test)]
mod tests;

pub(super) use audit::audit;
pub(super) use view::Inconsistent;

use super::place::{self, PageAccess};
use crate::format::cas::{
    CasRecord, CatalogueEntry, CatalogueSlot, ChunkHash, ChunkId, PageName, SegmentIndex,
};
use maps::{Leaf, Sharing};
use std::collections::BTreeMap;
use tally::Tally;
use view::View;

/// How large a volume is. What lies beyond does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    /// Blocks of a segment, 2^24 at most.
    pub(super) blocks_per_segment: u32,
    pub(super) segments: u32,
    /// Chunk ids are below.
    pub(super) ids: u64,
    /// Slots of the catalogue.
    pub(super) slots: u16,
}

/// Applies records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ledger {
    bounds: Bounds,
    /// The number of the next snapshot; the root has it. The first is 1.
    next_number: u32,
}

/// What records have done that is not found out by looking at what they say. In an order that is the same
/// whenever the same records are applied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Effects {
    /// Chunks that are free. Their entries of the table stay until they are stored again.
    pub(super) freed: Vec<ChunkId>,
    /// Segments in which nothing is live any more.
    pub(super) emptied: Vec<SegmentIndex>,
}

/// Why a record was not applied. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// It does not go with the pages.
    Inconsistent(Inconsistent),
    /// These pages are not in memory, and there may be others.
    NotHere(Vec<PageName>),
}

/// What a block of a volume or snapshot has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Zeroes.
    Hole,
    /// This chunk.
    Chunk(ChunkId),
    /// This page has to be in memory to tell.
    NotHere(PageName),
}

/// Where a chunk lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChunkPlace {
    pub(super) segment: SegmentIndex,
    /// In units of 16 bytes, from the start of the segment.
    pub(super) offset: u32,
    /// Bytes that it takes, in units of 16.
    pub(super) stored: u16,
    pub(super) algorithm: u8,
    /// How many entries of maps name it.
    pub(super) count: u16,
    pub(super) hash: ChunkHash,
}

/// What is known of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Located {
    /// No chunk has this id, or no map names it.
    Free,
    At(ChunkPlace),
    /// This page has to be in memory to tell.
    NotHere(PageName),
}

/// What a record is going to do, worked out before anything changes.
struct Plan {
    tally: Tally,
    /// Slots as they will be. The top of a map is put in when its pages are made.
    catalogue: BTreeMap<CatalogueSlot, CatalogueEntry>,
    /// Of the volume whose map changes.
    sharing: Option<Sharing>,
    freed_pages: Vec<u64>,
    next_number: u32,
}

impl Ledger {
    /// The ledger of a volume in which `next_number` is the number of the next snapshot, 1 in a new one.
    pub(super) fn new(bounds: Bounds, next_number: u32) -> Ledger {
        assert!(bounds.blocks_per_segment <= 1 << 24, "offsets have 32 bits");
        Ledger { bounds, next_number: next_number.max(1) }
    }

    /// How large the volume is.
    pub(super) fn bounds(&self) -> Bounds {
        self.bounds
    }

    /// The number of the next snapshot.
    pub(super) fn next_number(&self) -> u32 {
        self.next_number
    }

    /// Appends the pages that a record needs and that are known to be not in memory. Once they are, others
    /// may be known: when none is appended, the record can be applied.
    pub(super) fn missing<P: PageAccess>(&self, pages: &P, record: &CasRecord, out: &mut Vec<PageName>) {
        let mut view = View::new(pages);
        // What is wrong is said when the record is applied.
        let _ = self.plan(&mut view, record);
        out.extend(view.wanted());
    }

    /// Applies a record of entry `sequence` of the journal. `effects` is added to.
    ///
    /// # Errors
    /// When it does not go with the pages, or needs one that is not in memory; nothing was changed then.
    pub(super) fn apply<P: PageAccess>(
        &mut self,
        pages: &mut P,
        sequence: u64,
        record: &CasRecord,
        effects: &mut Effects,
    ) -> Result<(), Refused> {
        let mut view = View::new(&*pages);
        let plan = self.plan(&mut view, record);
        let wanted = view.wanted();
        if !wanted.is_empty() {
            return Err(Refused::NotHere(wanted.into_iter().collect()));
        }
        let plan = plan.map_err(Refused::Inconsistent)?;
        self.carry_out(pages, sequence, record, plan, effects);
        Ok(())
    }

    fn plan<P: PageAccess>(&self, view: &mut View<P>, record: &CasRecord) -> Result<Plan, Inconsistent> {
        let mut plan = Plan {
            tally: Tally::default(),
            catalogue: BTreeMap::new(),
            sharing: None,
            freed_pages: Vec::new(),
            next_number: self.next_number,
        };
        match record {
            CasRecord::Store { segment, block, chunks } => {
                self.plan_store(view, &mut plan.tally, (*segment, *block), chunks)
            }
            CasRecord::Map { volume, block, ids } => self.plan_map(view, &mut plan, *volume, *block, ids),
            CasRecord::Unmap { volume, block, count } => {
                self.plan_unmap(view, &mut plan, *volume, *block, *count)
            }
            CasRecord::Move { segment, block, chunks } => {
                self.plan_move(view, &mut plan.tally, (*segment, *block), chunks)
            }
            CasRecord::Open { segment, kind } => self.plan_open(view, *segment, *kind),
            CasRecord::GiveUp { segment } => self.plan_give_up(view, *segment),
            CasRecord::Create { slot, created, blocks, name } => {
                self.plan_create(view, &mut plan, *slot, (*created, name), *blocks)
            }
            CasRecord::Resize { slot, blocks } => self.plan_resize(view, &mut plan, *slot, *blocks),
            CasRecord::Snapshot { volume, slot, created, name } => {
                self.plan_snapshot(view, &mut plan, *volume, *slot, (*created, name))
            }
            CasRecord::Clone { origin, slot, created, name } => {
                self.plan_clone(view, &mut plan, *origin, *slot, (*created, name))
            }
            CasRecord::Rollback { volume, slot } => self.plan_rollback(view, &mut plan, *volume, *slot),
            CasRecord::Delete { slot } => self.plan_delete(view, &mut plan, *slot),
            CasRecord::DeleteStep { slot, upto } => self.plan_step(view, &mut plan, *slot, *upto),
        }?;
        Ok(plan)
    }

    fn carry_out<P: PageAccess>(
        &mut self,
        pages: &mut P,
        sequence: u64,
        record: &CasRecord,
        mut plan: Plan,
        effects: &mut Effects,
    ) {
        plan.tally.commit(pages, effects);
        match record {
            CasRecord::Store { .. }
            | CasRecord::Move { .. }
            | CasRecord::Open { .. }
            | CasRecord::GiveUp { .. } => self.put_chunks(pages, sequence, record),
            CasRecord::Map { volume, block, ids } => {
                let sharing = plan.sharing.expect("planned with it");
                let entry = plan.catalogue.get_mut(volume).expect("planned");
                self.map(pages, entry, &sharing, *block, ids);
            }
            CasRecord::Unmap { volume, block, count } => {
                let sharing = plan.sharing.expect("planned with it");
                let entry = plan.catalogue.get_mut(volume).expect("planned");
                self.unmap(pages, entry, &sharing, *block, *count);
            }
            CasRecord::Resize { slot, .. } => {
                self.raise(pages, plan.catalogue.get_mut(slot).expect("planned"));
            }
            _ => {}
        }
        plan.freed_pages.iter().for_each(|number| pages.free_map_page(*number));
        for (slot, entry) in &plan.catalogue {
            let (name, at) = place::of_catalogue(*slot);
            pages.change(name).set_catalogue_entry(at, entry);
        }
        self.next_number = plan.next_number;
    }

    /// What a block of a volume or snapshot has; a hole beyond its end.
    ///
    /// # Errors
    /// When the slot is neither, or is being deleted.
    pub(super) fn lookup<P: PageAccess>(
        &self,
        pages: &P,
        slot: CatalogueSlot,
        block: u64,
    ) -> Result<Found, Inconsistent> {
        let mut found = Found::Hole;
        self.lookup_run(pages, slot, block, 1, |_, chunk| found = chunk)?;
        Ok(found)
    }

    /// What blocks of a volume or snapshot have, one after another. Where a page is not in memory, that is
    /// said for each block.
    ///
    /// # Errors
    /// When the slot is neither, or is being deleted.
    pub(super) fn lookup_run<P: PageAccess>(
        &self,
        pages: &P,
        slot: CatalogueSlot,
        block: u64,
        count: u64,
        mut each: impl FnMut(u64, Found),
    ) -> Result<(), Inconsistent> {
        let entry = self.readable(pages, slot)?;
        let mut leaf = Leaf::None;
        for at in block..block.saturating_add(count) {
            if at == block || maps::index(0, at) == 0 {
                leaf = if at < entry.blocks { maps::leaf(pages, &entry, at) } else { Leaf::None };
            }
            each(
                at,
                match leaf {
                    Leaf::Page(page) if at < entry.blocks => match page.map_slot(maps::index(0, at)).id {
                        0 => Found::Hole,
                        id => Found::Chunk(ChunkId(id)),
                    },
                    Leaf::None | Leaf::Page(_) => Found::Hole,
                    Leaf::NotHere(name) => Found::NotHere(name),
                },
            );
        }
        Ok(())
    }

    /// Where a chunk lies.
    pub(super) fn locate<P: PageAccess>(&self, pages: &P, id: ChunkId) -> Located {
        if !(1..self.bounds.ids).contains(&id.0) {
            return Located::Free;
        }
        let (name, at) = place::of_state(id);
        let Some(page) = pages.page(name) else { return Located::NotHere(name) };
        let state = page.state_entry(at);
        if state.count.get() == 0 {
            return Located::Free;
        }
        let (name, at) = place::of_table(id);
        let Some(page) = pages.page(name) else { return Located::NotHere(name) };
        let entry = page.table_entry(at);
        Located::At(ChunkPlace {
            segment: SegmentIndex(state.segment.get()),
            offset: entry.offset.get(),
            stored: state.stored.get(),
            algorithm: entry.algorithm,
            count: state.count.get(),
            hash: entry.hash,
        })
    }
}
