//! Maps: which chunk a block has, the records that change it, and which pages and entries are shared (S1).
//!
//! A page is as old as its youngest path: an entry may be younger than the page that it is in, but no
//! snapshot of the chain lies between the two, since the page would be shared by it and the entry be in a
//! copy. So all that lies below a page that a snapshot has is in the snapshot too, except where its deletion
//! has passed.

use super::view::{Inconsistent, View};
use super::{Ledger, Plan};
use crate::format::cas::{
    CatalogueEntry, CatalogueSlot, CatalogueState, ChunkId, MapSlot, PAGE_SLOTS, PageName, RawCasPage,
};
use crate::volume::cas::place::{self, PageAccess, map_height, map_span};
use std::ops::Range;

/// Blocks of a leaf.
pub(super) const LEAF_BLOCKS: u64 = PAGE_SLOTS as u64;

/// Which pages and entries a volume shares with the snapshot before it.
#[derive(Clone, Copy)]
pub(super) struct Sharing {
    /// The number of the newest snapshot; 0 for none. Births begin at 1.
    number: u32,
    /// The deletion of that snapshot has passed the blocks below, which are judged by the one before it.
    passed: u64,
    number_passed: u32,
}

impl Sharing {
    /// Whether a page or entry that covers `span` blocks from `first` on is shared.
    fn covers(&self, birth: u32, first: u64, span: u64) -> bool {
        let is_passed = first.saturating_add(span) <= self.passed;
        birth <= if is_passed { self.number_passed } else { self.number }
    }
}

/// A leaf of a map.
pub(super) enum Leaf<'a> {
    /// There is none: all its blocks are holes.
    None,
    Page(&'a RawCasPage),
    /// This page, of the path or the leaf itself, is not in memory.
    NotHere(PageName),
}

/// The leaf of a map that has a block.
pub(super) fn leaf<'a, P: PageAccess>(pages: &'a P, entry: &CatalogueEntry, block: u64) -> Leaf<'a> {
    if block >= map_span(entry.height + 1) {
        return Leaf::None;
    }
    let (mut number, mut level) = (entry.top.id, entry.height);
    loop {
        if number == 0 {
            return Leaf::None;
        }
        let name = place::of_map(number);
        let Some(page) = pages.page(name) else { return Leaf::NotHere(name) };
        if level == 0 {
            return Leaf::Page(page);
        }
        number = page.map_slot(index(level, block)).id;
        level -= 1;
    }
}

/// Which entry of a page, `level` levels above the leaves, leads to a block or is that of a block.
pub(super) fn index(level: u8, block: u64) -> usize {
    (block / map_span(level) % LEAF_BLOCKS) as usize
}

/// The entries of a page, whose first block is `first`, that cover blocks of `range`, with the first block
/// that each covers.
fn entries(level: u8, first: u64, range: &Range<u64>) -> impl Iterator<Item = (usize, u64)> + use<> {
    let span = map_span(level);
    let from = range.start.saturating_sub(first) / span;
    let to = range.end.saturating_sub(first).div_ceil(span).min(LEAF_BLOCKS);
    (from..to).map(move |at| (at as usize, first + at * span))
}

/// The runs of blocks that lie in one leaf each.
fn leaf_runs(block: u64, len: usize) -> impl Iterator<Item = Range<u64>> {
    let end = block + len as u64;
    let mut from = block;
    std::iter::from_fn(move || {
        let to = (from - from % LEAF_BLOCKS + LEAF_BLOCKS).min(end);
        let run = from..to;
        from = to;
        (!run.is_empty()).then_some(run)
    })
}

impl Ledger {
    pub(super) fn sharing<P: PageAccess>(
        &self,
        pages: &P,
        entry: &CatalogueEntry,
    ) -> Result<Sharing, Inconsistent> {
        let mut sharing = Sharing { number: 0, passed: 0, number_passed: 0 };
        let Some(slot) = entry.before else { return Ok(sharing) };
        let before = self.snapshot_before(pages, slot)?;
        sharing.number = before.number;
        if before.state == CatalogueState::Going {
            sharing.passed = before.cursor;
            if let Some(slot) = before.before {
                sharing.number_passed = self.snapshot_before(pages, slot)?.number;
            }
        }
        Ok(sharing)
    }

    /// Counts the new chunks of the record first and takes off the old ones then: a chunk that moves from one
    /// block to another within a record keeps its id.
    pub(super) fn plan_map<P: PageAccess>(
        &self,
        view: &mut View<P>,
        plan: &mut Plan,
        volume: CatalogueSlot,
        block: u64,
        ids: &[ChunkId],
    ) -> Result<(), Inconsistent> {
        let mut entry = self.in_state(view.pages, volume, CatalogueState::Volume)?;
        check_range(volume, &entry, block, ids.len() as u64)?;
        let sharing = self.sharing(view.pages, &entry)?;
        // All pages that are needed are asked for, even where a chunk is not stored yet: the record that
        // stores it may be about to join together with this one.
        let counted = self.count_all(view, plan, ids);
        for run in leaf_runs(block, ids.len()) {
            let page = match leaf(view.pages, &entry, run.start) {
                Leaf::None => None,
                Leaf::Page(page) => Some(page),
                Leaf::NotHere(name) => {
                    view.page(name);
                    continue;
                }
            };
            let first = run.start - run.start % LEAF_BLOCKS;
            for block in run {
                let old = page.map_or(MapSlot::default(), |page| page.map_slot(index(0, block)));
                if old.id == 0 {
                    entry.mapped += 1;
                } else if !sharing.covers(old.birth, first, LEAF_BLOCKS) {
                    plan.tally.discount(view, ChunkId(old.id))?;
                }
            }
        }
        plan.catalogue.insert(volume, entry);
        plan.sharing = Some(sharing);
        counted
    }

    pub(super) fn plan_unmap<P: PageAccess>(
        &self,
        view: &mut View<P>,
        plan: &mut Plan,
        volume: CatalogueSlot,
        block: u64,
        count: u64,
    ) -> Result<(), Inconsistent> {
        let mut entry = self.in_state(view.pages, volume, CatalogueState::Volume)?;
        check_range(volume, &entry, block, count)?;
        let sharing = self.sharing(view.pages, &entry)?;
        let range = unmapped(&entry, block, count);
        let mut holes = 0;
        forget(view, plan, &sharing, (entry.top, entry.height, 0), &range, &mut holes)?;
        entry.mapped = entry.mapped.checked_sub(holes).ok_or(Inconsistent::Mapped(volume))?;
        plan.catalogue.insert(volume, entry);
        plan.sharing = Some(sharing);
        Ok(())
    }

    /// Blocks from `block` on get these chunks.
    pub(super) fn map<P: PageAccess>(
        &self,
        pages: &mut P,
        entry: &mut CatalogueEntry,
        sharing: &Sharing,
        block: u64,
        ids: &[ChunkId],
    ) {
        let mut ids = ids.iter();
        for run in leaf_runs(block, ids.len()) {
            let number = self.leaf_to_write(pages, entry, sharing, run.start);
            let page = pages.change(place::of_map(number));
            for (block, id) in run.zip(&mut ids) {
                page.set_map_slot(index(0, block), MapSlot { id: id.0, birth: self.next_number });
            }
        }
    }

    /// The number of the leaf that has a block, which only this volume has. Pages of the path that are
    /// missing are made, and those that are shared copied.
    fn leaf_to_write<P: PageAccess>(
        &self,
        pages: &mut P,
        entry: &mut CatalogueEntry,
        sharing: &Sharing,
        block: u64,
    ) -> u64 {
        let mut level = entry.height;
        let mut first = block - block % map_span(level + 1);
        entry.top = self.to_write(pages, entry.top, sharing, first, map_span(level + 1));
        let mut number = entry.top.id;
        while level > 0 {
            let at = index(level, block);
            let old = pages.page(place::of_map(number)).expect("it was just made or found").map_slot(at);
            let span = map_span(level);
            first = block - block % span;
            let new = self.to_write(pages, old, sharing, first, span);
            if new != old {
                pages.change(place::of_map(number)).set_map_slot(at, new);
            }
            number = new.id;
            level -= 1;
        }
        number
    }

    /// A page that covers `span` blocks from `first` on, in a form that only this volume has.
    fn to_write<P: PageAccess>(
        &self,
        pages: &mut P,
        slot: MapSlot,
        sharing: &Sharing,
        first: u64,
        span: u64,
    ) -> MapSlot {
        if slot.id == 0 {
            return MapSlot { id: pages.new_map_page(), birth: self.next_number };
        }
        if !sharing.covers(slot.birth, first, span) {
            return slot;
        }
        let old = pages.page(place::of_map(slot.id)).expect("the plan has seen it").clone();
        let id = pages.new_map_page();
        pages.change(place::of_map(id)).take_entries(&old);
        MapSlot { id, birth: self.next_number }
    }

    /// Blocks become holes: pages that only this volume has are freed where all their blocks do.
    pub(super) fn unmap<P: PageAccess>(
        &self,
        pages: &mut P,
        entry: &mut CatalogueEntry,
        sharing: &Sharing,
        block: u64,
        count: u64,
    ) {
        let range = unmapped(entry, block, count);
        entry.top = self.clear(pages, sharing, (entry.top, entry.height, 0), &range);
    }

    /// Returns what the parent of the page is to have in its place.
    fn clear<P: PageAccess>(
        &self,
        pages: &mut P,
        sharing: &Sharing,
        (slot, level, first): (MapSlot, u8, u64),
        range: &Range<u64>,
    ) -> MapSlot {
        if slot.id == 0 || range.is_empty() {
            return slot;
        }
        let span = map_span(level + 1);
        let is_whole = range.start <= first && first.saturating_add(span) <= range.end;
        let is_shared = sharing.covers(slot.birth, first, span);
        // Below a shared page, only what the deletion of the snapshot has passed can be this volume's.
        let is_all_shared = is_shared && first >= sharing.passed;
        if is_whole && is_all_shared {
            return MapSlot::default();
        }
        let mut changes = Vec::new();
        if !is_whole || level > 0 {
            for (at, first) in entries(level, first, range) {
                let page = pages.page(place::of_map(slot.id)).expect("the plan has seen it");
                let old = page.map_slot(at);
                let new = match level {
                    0 => MapSlot::default(),
                    _ => self.clear(pages, sharing, (old, level - 1, first), range),
                };
                if new != old {
                    changes.push((at, new));
                }
            }
        }
        if is_whole {
            if !is_shared {
                pages.free_map_page(slot.id);
            }
            return MapSlot::default();
        }
        if changes.is_empty() {
            return slot;
        }
        let slot = self.to_write(pages, slot, sharing, first, span);
        let page = pages.change(place::of_map(slot.id));
        changes.into_iter().for_each(|(at, new)| page.set_map_slot(at, new));
        slot
    }

    /// Adds levels on top until the map has those that its blocks need.
    pub(super) fn raise<P: PageAccess>(&self, pages: &mut P, entry: &mut CatalogueEntry) {
        let height = map_height(entry.blocks);
        while entry.height < height {
            entry.height += 1;
            if entry.top.id != 0 {
                let id = pages.new_map_page();
                pages.change(place::of_map(id)).set_map_slot(0, entry.top);
                entry.top = MapSlot { id, birth: self.next_number };
            }
        }
    }
}

/// The blocks that an `Unmap` covers. One up to the end of the volume goes on to the end of the map, so that
/// the last leaf is covered wholly.
fn unmapped(entry: &CatalogueEntry, block: u64, count: u64) -> Range<u64> {
    let end = block + count;
    block..if count > 0 && end == entry.blocks { map_span(entry.height + 1) } else { end }
}

fn check_range(
    slot: CatalogueSlot,
    entry: &CatalogueEntry,
    block: u64,
    count: u64,
) -> Result<(), Inconsistent> {
    let is_within = block.checked_add(count).is_some_and(|end| end <= entry.blocks);
    if is_within { Ok(()) } else { Err(Inconsistent::Blocks { slot, blocks: block }) }
}

/// Takes off what blocks of `range` have, below one page.
fn forget<P: PageAccess>(
    view: &mut View<P>,
    plan: &mut Plan,
    sharing: &Sharing,
    (slot, level, first): (MapSlot, u8, u64),
    range: &Range<u64>,
    holes: &mut u64,
) -> Result<(), Inconsistent> {
    if slot.id == 0 || range.is_empty() {
        return Ok(());
    }
    let Some(page) = view.page(place::of_map(slot.id)) else { return Ok(()) };
    for (at, below) in entries(level, first, range) {
        let old = page.map_slot(at);
        if level > 0 {
            forget(view, plan, sharing, (old, level - 1, below), range, holes)?;
        } else if old.id != 0 {
            *holes += 1;
            if !sharing.covers(old.birth, first, LEAF_BLOCKS) {
                plan.tally.discount(view, ChunkId(old.id))?;
            }
        }
    }
    Ok(())
}
