//! The catalogue: volumes, snapshots, and how they hang together.
//!
//! A chain is a volume and its snapshots, from the oldest on: `before` of each leads to the one before it,
//! and `after` of a snapshot to the one after it, the volume at last. `before` of the oldest of a clone is
//! its origin, which is of another chain: its `after` leads elsewhere. What a rollback took out of its
//! volume, and a volume that is deleted, have a `before` and no `after`.

use super::view::{Inconsistent, View, resident};
use super::{Ledger, Plan};
use crate::format::cas::{
    BIRTH_BITS, CatalogueEntry, CatalogueSlot, CatalogueState, MapSlot, VOLUME_NAME_BYTES,
};
use crate::volume::cas::place::{self, PageAccess, map_height};

/// Most blocks of a volume: 16 EiB.
const VOLUME_BLOCKS_MAX: u64 = 1 << 52;
/// Most levels above the leaves that a map of so many blocks has.
const HEIGHT_MAX: u8 = 5;

impl Ledger {
    /// A slot of the catalogue.
    ///
    /// # Errors
    /// When it does not exist, or its bytes make no sense.
    pub(in crate::volume::cas) fn entry<P: PageAccess>(
        &self,
        pages: &P,
        slot: CatalogueSlot,
    ) -> Result<CatalogueEntry, Inconsistent> {
        let (name, at) = place::of_catalogue(slot);
        let entry = || resident(pages, name).catalogue_entry(at).filter(|entry| entry.height <= HEIGHT_MAX);
        (slot.0 < self.bounds.slots).then(entry).flatten().ok_or(Inconsistent::NoSlot(slot))
    }

    /// The slots that are not free.
    pub(in crate::volume::cas) fn catalogue<'a, P: PageAccess>(
        &'a self,
        pages: &'a P,
    ) -> impl Iterator<Item = (CatalogueSlot, CatalogueEntry)> {
        let slots = (0..self.bounds.slots).map(CatalogueSlot);
        slots
            .filter_map(|slot| Some((slot, self.entry(pages, slot).ok()?)))
            .filter(|(_, entry)| entry.state != CatalogueState::Free)
    }

    /// The first free slot.
    pub(in crate::volume::cas) fn free_slot<P: PageAccess>(&self, pages: &P) -> Option<CatalogueSlot> {
        let mut slots = (0..self.bounds.slots).map(CatalogueSlot);
        slots.find(|slot| self.entry(pages, *slot).is_ok_and(|entry| entry.state == CatalogueState::Free))
    }

    pub(super) fn in_state<P: PageAccess>(
        &self,
        pages: &P,
        slot: CatalogueSlot,
        state: CatalogueState,
    ) -> Result<CatalogueEntry, Inconsistent> {
        let entry = self.entry(pages, slot)?;
        if entry.state == state {
            Ok(entry)
        } else {
            Err(Inconsistent::SlotState { slot, state: entry.state })
        }
    }

    /// A volume or snapshot that is not being deleted.
    pub(super) fn readable<P: PageAccess>(
        &self,
        pages: &P,
        slot: CatalogueSlot,
    ) -> Result<CatalogueEntry, Inconsistent> {
        let entry = self.entry(pages, slot)?;
        match entry.state {
            CatalogueState::Volume | CatalogueState::Snapshot => Ok(entry),
            state => Err(Inconsistent::SlotState { slot, state }),
        }
    }

    /// A slot that another one names as the snapshot before it.
    pub(super) fn snapshot_before<P: PageAccess>(
        &self,
        pages: &P,
        slot: CatalogueSlot,
    ) -> Result<CatalogueEntry, Inconsistent> {
        let entry = self.entry(pages, slot)?;
        match entry.state {
            CatalogueState::Snapshot | CatalogueState::Going => Ok(entry),
            state => Err(Inconsistent::SlotState { slot, state }),
        }
    }

    /// The one before in the same chain.
    pub(super) fn before_in_chain<P: PageAccess>(
        &self,
        pages: &P,
        slot: CatalogueSlot,
        entry: &CatalogueEntry,
    ) -> Result<Option<(CatalogueSlot, CatalogueEntry)>, Inconsistent> {
        let Some(before) = entry.before else { return Ok(None) };
        let found = self.snapshot_before(pages, before)?;
        Ok((found.after == Some(slot)).then_some((before, found)))
    }

    /// Checks a name for a slot that is free, among `others`.
    fn check_new<P: PageAccess>(
        &self,
        pages: &P,
        slot: CatalogueSlot,
        name: &str,
        mut others: impl Iterator<Item = CatalogueEntry>,
    ) -> Result<(), Inconsistent> {
        self.in_state(pages, slot, CatalogueState::Free)?;
        let is_right =
            (1..=VOLUME_NAME_BYTES).contains(&name.len()) && others.all(|other| other.name != name);
        if is_right { Ok(()) } else { Err(Inconsistent::Name(slot)) }
    }

    fn volumes<'a, P: PageAccess>(&'a self, pages: &'a P) -> impl Iterator<Item = CatalogueEntry> {
        let all = self.catalogue(pages).map(|(_, entry)| entry);
        all.filter(|entry| entry.state == CatalogueState::Volume)
    }

    /// The snapshots of a volume, from the newest on.
    fn snapshots<P: PageAccess>(
        &self,
        pages: &P,
        volume: CatalogueSlot,
        entry: &CatalogueEntry,
    ) -> Result<Vec<CatalogueEntry>, Inconsistent> {
        let mut found: Vec<CatalogueEntry> = Vec::new();
        let mut next = self.before_in_chain(pages, volume, entry)?;
        while let Some((slot, entry)) = next {
            // A damaged chain may go round in a circle.
            if found.last().is_some_and(|newer| newer.number <= entry.number) {
                return Err(Inconsistent::Linked(slot));
            }
            next = self.before_in_chain(pages, slot, &entry)?;
            found.push(entry);
        }
        Ok(found)
    }

    pub(super) fn plan_create<P: PageAccess>(
        &self,
        view: &View<P>,
        plan: &mut Plan,
        slot: CatalogueSlot,
        (created, name): (u64, &str),
        blocks: u64,
    ) -> Result<(), Inconsistent> {
        self.check_new(view.pages, slot, name, self.volumes(view.pages))?;
        check_size(slot, blocks)?;
        let entry = CatalogueEntry {
            state: CatalogueState::Volume,
            name: name.to_owned(),
            created,
            blocks,
            top: MapSlot::default(),
            height: map_height(blocks),
            ..CatalogueEntry::default()
        };
        plan.catalogue.insert(slot, entry);
        Ok(())
    }

    /// That nothing is mapped beyond a smaller size is not known without the whole map: only that no more
    /// blocks are mapped than the volume is to have.
    pub(super) fn plan_resize<P: PageAccess>(
        &self,
        view: &View<P>,
        plan: &mut Plan,
        slot: CatalogueSlot,
        blocks: u64,
    ) -> Result<(), Inconsistent> {
        let mut entry = self.in_state(view.pages, slot, CatalogueState::Volume)?;
        check_size(slot, blocks)?;
        if entry.mapped > blocks {
            return Err(Inconsistent::Blocks { slot, blocks });
        }
        entry.blocks = blocks;
        plan.catalogue.insert(slot, entry);
        Ok(())
    }

    pub(super) fn plan_snapshot<P: PageAccess>(
        &self,
        view: &View<P>,
        plan: &mut Plan,
        volume: CatalogueSlot,
        slot: CatalogueSlot,
        (created, name): (u64, &str),
    ) -> Result<(), Inconsistent> {
        let mut head = self.in_state(view.pages, volume, CatalogueState::Volume)?;
        let others = self.snapshots(view.pages, volume, &head)?;
        self.check_new(view.pages, slot, name, others.into_iter())?;
        if self.next_number + 1 >= 1 << BIRTH_BITS {
            return Err(Inconsistent::Numbers);
        }
        if let Some((before, mut entry)) = self.before_in_chain(view.pages, volume, &head)? {
            entry.after = Some(slot);
            plan.catalogue.insert(before, entry);
        }
        let snapshot = CatalogueEntry {
            state: CatalogueState::Snapshot,
            name: name.to_owned(),
            created,
            number: self.next_number,
            after: Some(volume),
            ..head.clone()
        };
        plan.catalogue.insert(slot, snapshot);
        head.before = Some(slot);
        plan.catalogue.insert(volume, head);
        plan.next_number += 1;
        Ok(())
    }

    pub(super) fn plan_clone<P: PageAccess>(
        &self,
        view: &View<P>,
        plan: &mut Plan,
        origin: CatalogueSlot,
        slot: CatalogueSlot,
        (created, name): (u64, &str),
    ) -> Result<(), Inconsistent> {
        let snapshot = self.in_state(view.pages, origin, CatalogueState::Snapshot)?;
        self.check_new(view.pages, slot, name, self.volumes(view.pages))?;
        let entry = CatalogueEntry {
            state: CatalogueState::Volume,
            name: name.to_owned(),
            created,
            number: 0,
            before: Some(origin),
            after: None,
            ..snapshot
        };
        plan.catalogue.insert(slot, entry);
        Ok(())
    }

    /// What the volume was has nothing in common with what it becomes but what the snapshot has: it is
    /// deleted as a volume is, beside the chain.
    pub(super) fn plan_rollback<P: PageAccess>(
        &self,
        view: &View<P>,
        plan: &mut Plan,
        volume: CatalogueSlot,
        slot: CatalogueSlot,
    ) -> Result<(), Inconsistent> {
        let mut head = self.in_state(view.pages, volume, CatalogueState::Volume)?;
        self.in_state(view.pages, slot, CatalogueState::Free)?;
        let before = head.before.ok_or(Inconsistent::Linked(volume))?;
        let snapshot = self.in_state(view.pages, before, CatalogueState::Snapshot)?;
        let going =
            CatalogueEntry { state: CatalogueState::Going, name: String::new(), cursor: 0, ..head.clone() };
        plan.catalogue.insert(slot, going);
        (head.top, head.height) = (snapshot.top, snapshot.height);
        (head.blocks, head.mapped) = (snapshot.blocks, snapshot.mapped);
        plan.catalogue.insert(volume, head);
        Ok(())
    }

    /// Neighbours in a chain are deleted one after the other: a deletion compares with a map that stays. What
    /// has a snapshot as the one before it, without being in its chain, is deleted first.
    pub(super) fn plan_delete<P: PageAccess>(
        &self,
        view: &View<P>,
        plan: &mut Plan,
        slot: CatalogueSlot,
    ) -> Result<(), Inconsistent> {
        let mut entry = self.entry(view.pages, slot)?;
        let before = match entry.state {
            CatalogueState::Volume | CatalogueState::Snapshot => {
                self.before_in_chain(view.pages, slot, &entry)?
            }
            state => return Err(Inconsistent::SlotState { slot, state }),
        };
        let is_bound = match (entry.state, entry.after) {
            (CatalogueState::Volume, _) => before.is_some(),
            (_, None) => true,
            (_, Some(after)) => {
                let is_going = |entry: &CatalogueEntry| entry.state == CatalogueState::Going;
                before.is_some_and(|(_, before)| is_going(&before))
                    || is_going(&self.entry(view.pages, after)?)
                    || self
                        .catalogue(view.pages)
                        .any(|(other, entry)| entry.before == Some(slot) && other != after)
            }
        };
        if is_bound {
            return Err(Inconsistent::Linked(slot));
        }
        entry.state = CatalogueState::Going;
        entry.name.clear();
        entry.cursor = 0;
        plan.catalogue.insert(slot, entry);
        Ok(())
    }
}

fn check_size(slot: CatalogueSlot, blocks: u64) -> Result<(), Inconsistent> {
    let is_size = (1..=VOLUME_BLOCKS_MAX).contains(&blocks);
    if is_size { Ok(()) } else { Err(Inconsistent::Blocks { slot, blocks }) }
}
