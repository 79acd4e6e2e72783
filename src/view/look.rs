//! A look-up: what the view shows of one stripe at one moment.
//!
//! Invariant: nothing that a look-up returns counts before [`Look::end`] has returned a ticket.

use crate::Hash;
use crate::rules::{Rule, is_off};
use crate::shared::{CLOSED, GENERATION, View, readable_slot};
use std::sync::atomic::Ordering::Acquire;

/// A look-up under way. `None` from any of its functions means: ask the owner.
#[derive(Debug)]
pub struct Look<'a> {
    view: &'a View,
    slot: u64,
    ticket: Ticket,
}

/// The words that show whether what a look-up returned has changed since.
// Plain data: the words as they were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    service: u64,
    stripe: u64,
    map: u64,
    generation: u64,
}

impl View {
    /// Begins a look-up of a stripe. None: ask the owner.
    #[must_use]
    pub fn look(&self, stripe: u64) -> Option<Look<'_>> {
        let service = self.service.load(Acquire);
        if service & CLOSED != 0 || self.has_orphans() {
            return None;
        }
        let map = self.map.get(usize::try_from(stripe).ok()?)?.load(Acquire);
        let slot = readable_slot(map)?;
        let generation = self.slot(slot).load(Acquire);
        // Neither being changed nor with images.
        if !generation.is_multiple_of(GENERATION) {
            return None;
        }
        Some(Look { view: self, slot, ticket: Ticket { service, stripe, map, generation } })
    }

    /// Whether all that the look-up returned holds still: it has held ever since.
    #[must_use]
    pub fn still(&self, ticket: &Ticket) -> bool {
        let Ticket { service, stripe, map, generation } = *ticket;
        let slot = readable_slot(map).expect("a look-up that has ended named a slot");
        (self.slot(slot).load(Acquire) == generation || is_off(Rule::GenerationIsComparedAgain))
            && (self.map[stripe as usize].load(Acquire) == map || is_off(Rule::MapIsComparedAgain))
            && (self.service.load(Acquire) == service || is_off(Rule::ServiceIsCompared))
    }
}

impl Look<'_> {
    /// The slot that the stripe is in.
    #[must_use]
    pub fn slot(&self) -> u64 {
        self.slot
    }

    /// The device that serves a member.
    #[must_use]
    pub fn device(&self, member: usize) -> Option<u32> {
        Some(self.view.members[member].load(Acquire).checked_sub(1)? as u32)
    }

    /// Passes on the hashes of these entries of a page, in order, each of a block of this slot.
    #[must_use]
    pub fn hashes(
        &self,
        page: u64,
        entries: impl Iterator<Item = usize>,
        mut take: impl FnMut(Hash),
    ) -> Option<()> {
        let frame = self.view.frame(self.view.frame_of(page)?);
        let sequence = frame.sequence().load(Acquire);
        if !sequence.is_multiple_of(2) || frame.page().load(Acquire) != page + 1 {
            return None;
        }
        for entry in entries {
            let hash = frame.entry(entry).map(|half| half.load(Acquire));
            if hash == [0; 2] {
                return None;
            }
            take(hash);
        }
        (frame.sequence().load(Acquire) == sequence || is_off(Rule::FrameIsComparedAgain)).then_some(())
    }

    /// The owner's name for the newest version of a page that is not in memory, and for where that is on the
    /// members. The entries of the slot in that version are their hashes: what [`Look::hashes`] would return.
    #[must_use]
    pub fn on_members(&self, page: u64) -> Option<u64> {
        self.view.on_members(page)
    }

    /// Ends the look-up. All that it returned was true at one moment since it began, if there is a ticket.
    #[must_use]
    pub fn end(self) -> Option<Ticket> {
        self.view.still(&self.ticket).then_some(self.ticket)
    }
}
