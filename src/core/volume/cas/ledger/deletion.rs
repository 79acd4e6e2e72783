//! Deleting a snapshot or a volume, in steps (S2).
//!
//! What is deleted is compared with its successor, which stays while it goes on. Blocks below the cursor have
//! been dealt with: pages that cover only such blocks are freed, or the successor's, and are not looked at
//! again, though pages above may still name them.

use super::maps::LEAF_BLOCKS;
use super::view::{Inconsistent, View};
use super::{Ledger, Plan};
use crate::format::cas::{
    CatalogueEntry, CatalogueSlot, CatalogueState, ChunkId, MapSlot, PAGE_SLOTS, PageName, RawCasPage,
};
use crate::volume::cas::place::{self, PageAccess, map_span};

/// How a deletion can go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::volume::cas) enum Step {
    /// By a record that says this.
    Upto(u64),
    /// These pages have to be in memory before that is known. There may be others after them.
    NotHere(Vec<PageName>),
}

/// What a deletion compares.
struct Deletion {
    entry: CatalogueEntry,
    /// The number of the snapshot before it; 0 for none.
    number: u32,
    /// The page of the successor's map that has the place of the top page.
    other: MapSlot,
}

/// Two pages at the same place: the one that is deleted, and that of the successor.
#[derive(Clone, Copy)]
struct Pair {
    own: MapSlot,
    other: MapSlot,
    level: u8,
    /// The first block that they cover.
    first: u64,
}

impl Pair {
    /// The first block behind.
    fn end(&self) -> u64 {
        self.first.saturating_add(map_span(self.level + 1))
    }

    /// The pairs below, given both pages.
    fn below(self, own: &RawCasPage, other: Option<&RawCasPage>) -> impl Iterator<Item = Pair> {
        (0..PAGE_SLOTS).map(move |at| Pair {
            own: own.map_slot(at),
            other: other.map_or(MapSlot::default(), |other| other.map_slot(at)),
            level: self.level - 1,
            first: self.first + at as u64 * map_span(self.level),
        })
    }
}

impl Deletion {
    /// The first block behind the map.
    fn end(&self) -> u64 {
        map_span(self.entry.height + 1)
    }

    fn top(&self) -> Pair {
        Pair { own: self.entry.top, other: self.other, level: self.entry.height, first: 0 }
    }

    /// Whether a page has blocks that are not dealt with and can have entries that are to be taken off. One
    /// that the snapshot before has, or the successor, has none.
    fn concerns(&self, pair: &Pair) -> bool {
        pair.own.id != 0
            && pair.own.id != pair.other.id
            && pair.own.birth > self.number
            && pair.end() > self.entry.cursor
    }

    /// Both pages; none if one of them is not in memory.
    fn read<'a, P: PageAccess>(
        view: &mut View<'a, P>,
        pair: &Pair,
    ) -> Option<(&'a RawCasPage, Option<&'a RawCasPage>)> {
        let own = view.page(place::of_map(pair.own.id));
        let other = match pair.other.id {
            0 => None,
            number => Some(view.page(place::of_map(number))?),
        };
        Some((own?, other))
    }

    /// Takes off and frees what is below one page, up to block `upto`.
    fn remove<P: PageAccess>(
        &self,
        view: &mut View<P>,
        plan: &mut Plan,
        pair: Pair,
        upto: u64,
    ) -> Result<(), Inconsistent> {
        if !self.concerns(&pair) || pair.first >= upto {
            return Ok(());
        }
        let Some((own, other)) = Deletion::read(view, &pair) else { return Ok(()) };
        if pair.level > 0 {
            for below in pair.below(own, other) {
                self.remove(view, plan, below, upto)?;
            }
        } else {
            for at in 0..PAGE_SLOTS {
                let slot = own.map_slot(at);
                let is_inherited = other.is_some_and(|other| other.map_slot(at) == slot);
                if slot.id != 0 && slot.birth > self.number && !is_inherited {
                    plan.tally.discount(view, ChunkId(slot.id))?;
                }
            }
        }
        if pair.end() <= upto {
            plan.freed_pages.push(pair.own.id);
        }
        Ok(())
    }

    /// Looks for the place at which `left` pages have been read. Returns it once it is found.
    fn advance<P: PageAccess>(&self, view: &mut View<P>, pair: Pair, left: &mut usize) -> Option<u64> {
        if !self.concerns(&pair) {
            return None;
        }
        if *left == 0 && pair.first > self.entry.cursor {
            return Some(pair.first);
        }
        *left = left.saturating_sub(1 + usize::from(pair.other.id != 0));
        let pages = Deletion::read(view, &pair);
        if pair.level == 0 {
            return None;
        }
        let (own, other) = pages?;
        pair.below(own, other).find_map(|below| self.advance(view, below, left))
    }
}

impl Ledger {
    /// Returns none while a page of the way to the successor's counterpart is not in memory.
    fn deletion<P: PageAccess>(
        &self,
        view: &mut View<P>,
        slot: CatalogueSlot,
    ) -> Result<Option<Deletion>, Inconsistent> {
        let entry = self.in_state(view.pages, slot, CatalogueState::Going)?;
        let number = match entry.before {
            Some(before) => self.snapshot_before(view.pages, before)?.number,
            None => 0,
        };
        let mut other = MapSlot::default();
        if let Some(after) = entry.after {
            let successor = self.entry(view.pages, after)?;
            // A volume that shrinks keeps its levels, and a rollback takes the snapshot's.
            if successor.before != Some(slot) || successor.height < entry.height {
                return Err(Inconsistent::Linked(slot));
            }
            other = successor.top;
            for _ in entry.height..successor.height {
                if other.id == 0 {
                    break;
                }
                let Some(page) = view.page(place::of_map(other.id)) else { return Ok(None) };
                other = page.map_slot(0);
            }
        }
        Ok(Some(Deletion { entry, number, other }))
    }

    /// The next step of a deletion, in which about `pages` pages of maps are compared, one of what is deleted
    /// at least.
    ///
    /// # Errors
    /// When the slot is not being deleted.
    pub(in crate::volume::cas) fn deletion_step<P: PageAccess>(
        &self,
        pages: &P,
        slot: CatalogueSlot,
        mut budget: usize,
    ) -> Result<Step, Inconsistent> {
        let mut view = View::new(pages);
        let upto = self.deletion(&mut view, slot)?.map(|deletion| {
            let found = deletion.advance(&mut view, deletion.top(), &mut budget);
            found.unwrap_or_else(|| deletion.end())
        });
        let wanted = view.wanted();
        match upto {
            Some(upto) if wanted.is_empty() => Ok(Step::Upto(upto)),
            _ => Ok(Step::NotHere(wanted.into_iter().collect())),
        }
    }

    pub(super) fn plan_step<P: PageAccess>(
        &self,
        view: &mut View<P>,
        plan: &mut Plan,
        slot: CatalogueSlot,
        upto: u64,
    ) -> Result<(), Inconsistent> {
        let Some(deletion) = self.deletion(view, slot)? else { return Ok(()) };
        let (cursor, end) = (deletion.entry.cursor, deletion.end());
        if upto <= cursor || upto > end || !upto.is_multiple_of(LEAF_BLOCKS) {
            return Err(Inconsistent::Step { slot, upto });
        }
        deletion.remove(view, plan, deletion.top(), upto)?;
        let mut entry = deletion.entry;
        if upto < end {
            entry.cursor = upto;
            plan.catalogue.insert(slot, entry);
            return Ok(());
        }
        if let Some(after) = entry.after {
            let mut successor = self.entry(view.pages, after)?;
            successor.before = entry.before;
            plan.catalogue.insert(after, successor);
            if let Some((before, mut found)) = self.before_in_chain(view.pages, slot, &entry)? {
                found.after = Some(after);
                plan.catalogue.insert(before, found);
            }
        }
        plan.catalogue.insert(slot, CatalogueEntry::default());
        Ok(())
    }
}
