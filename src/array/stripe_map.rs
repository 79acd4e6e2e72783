//! The in-memory side of the stripe map of a logged array: which slots are free, and which stripe is in which slot.
//!
//! Where each stripe is stands in the map pages ([`PageStore::map_entry`]), which never leave the cache; this is the
//! inverse, 8 bytes for each slot. Invariants: every stripe is in exactly one slot, written or not; a slot is free,
//! taken, retired, or holds one stripe, and only a free slot is given out. A slot that a stripe has left stays retired
//! until whoever knows about durability and writes in flight says otherwise (W3 of the crash-safety design).
//!
//! Must not know of the log, of members, or of when anything is durable.

use super::pages::PageStore;
use crate::format::{Geometry, MapEntry, PageIndex};
use crate::units::{SlotIndex, StripeIndex};

/// A slot that is not the home of a stripe has one of the top bits set; what is left of the word is the next free slot
/// or the stripe, both far below 2^62 since devices are.
const FREE: u64 = 1 << 63;
const TAG: u64 = 3 << 62;
/// Taken for a write that is under way.
const TAKEN: u64 = (1 << 62) | 1;
/// Left by its stripe.
const RETIRED: u64 = (1 << 62) | 2;
/// The end of the queue of free slots.
const END: u64 = !TAG;

/// Why the map pages make no map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum MapFault {
    /// More copies of a map page are bad than the array survives.
    #[error(
        "page {} of the stripe map, which says where stripe {stripe} and those after it are, is lost: more copies of \
         it are damaged or missing than the array survives; bring back members that are missing, or restore the \
         volume from a backup",
        .page.0
    )]
    Lost {
        /// The page.
        page: PageIndex,
        /// The first stripe whose place is not known.
        stripe: StripeIndex,
    },
    /// A stripe is in a slot that the array does not have.
    #[error(
        "the stripe map is inconsistent: stripe {stripe} is said to be in slot {slot}, and there are {slots}; \
         restore the volume from a backup"
    )]
    SlotOutOfRange {
        /// The stripe.
        stripe: StripeIndex,
        /// Its slot.
        slot: SlotIndex,
        /// Slots there are.
        slots: u64,
    },
    /// Two stripes are in one slot.
    #[error(
        "the stripe map is inconsistent: stripes {} and {} are both said to be in slot {slot}; restore the volume \
         from a backup",
        .stripes[0], .stripes[1]
    )]
    SlotTwice {
        /// The slot.
        slot: SlotIndex,
        /// The stripes.
        stripes: [StripeIndex; 2],
    },
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct StripeMap {
    /// For each slot the stripe it holds, or one of the words above.
    slots: Box<[u64]>,
    /// Free slots are given out in the order in which they became free: neighbours stay neighbours.
    first_free: u64,
    last_free: u64,
    free: u64,
}

impl StripeMap {
    /// Reads the map from its pages, all of which are cached; after a replay, which only sets entries.
    ///
    /// # Errors
    /// When the pages are lost or contradict each other: the array cannot be served.
    pub fn load(pages: &PageStore, geometry: &Geometry) -> Result<StripeMap, MapFault> {
        let slots = usize::try_from(geometry.slots).expect("slots of a valid geometry fit memory");
        let mut map = StripeMap {
            slots: vec![RETIRED; slots].into_boxed_slice(),
            first_free: END,
            last_free: END,
            free: 0,
        };
        let mut last_page = None;
        for stripe in (0..geometry.stripes()).map(StripeIndex) {
            let (page, _) = pages.layout().map_entry(stripe.0);
            if last_page != Some(page) && pages.is_lost(page) {
                return Err(MapFault::Lost { page, stripe });
            }
            last_page = Some(page);
            let slot = pages.map_entry(stripe).slot;
            if slot.0 >= geometry.slots {
                return Err(MapFault::SlotOutOfRange { stripe, slot, slots: geometry.slots });
            }
            let holder = &mut map.slots[slot.0 as usize];
            if *holder & TAG == 0 {
                return Err(MapFault::SlotTwice { slot, stripes: [StripeIndex(*holder), stripe] });
            }
            *holder = stripe.0;
        }
        for slot in 0..geometry.slots {
            if map.slots[slot as usize] == RETIRED {
                map.free(SlotIndex(slot));
            }
        }
        Ok(map)
    }

    /// The stripe in a slot, written or not; none for a slot that holds none.
    pub fn stripe_at(&self, slot: SlotIndex) -> Option<StripeIndex> {
        let word = self.slots[slot.0 as usize];
        (word & TAG == 0).then_some(StripeIndex(word))
    }

    /// How many slots can be taken.
    pub fn free_slots(&self) -> u64 {
        self.free
    }

    /// Takes the slot that has been free for longest. It ends up in [`StripeMap::moved`] or [`StripeMap::give_back`].
    pub fn take_free(&mut self) -> Option<SlotIndex> {
        if self.first_free == END {
            return None;
        }
        let slot = self.first_free;
        self.first_free = std::mem::replace(&mut self.slots[slot as usize], TAKEN) & !TAG;
        if self.first_free == END {
            self.last_free = END;
        }
        self.free -= 1;
        Some(SlotIndex(slot))
    }

    /// A slot was taken and not used: nothing that counts was written to it.
    ///
    /// # Panics
    /// When it was not taken.
    pub fn give_back(&mut self, slot: SlotIndex) {
        self.leave(slot, TAKEN);
    }

    /// A retired slot can be used again: the record that freed it is durable and nothing is being written to it.
    ///
    /// # Panics
    /// When it is not retired.
    pub fn free(&mut self, slot: SlotIndex) {
        self.leave(slot, RETIRED);
    }

    /// A stripe was written whole, in epoch `epoch`, to a slot that was taken, and is there from now on. Returns its
    /// old slot, which is retired.
    ///
    /// # Panics
    /// When the slot was not taken.
    pub fn moved(
        &mut self,
        pages: &mut PageStore,
        stripe: StripeIndex,
        slot: SlotIndex,
        epoch: u64,
    ) -> SlotIndex {
        let old = pages.map_entry(stripe).slot;
        assert_eq!(self.slots[slot.0 as usize], TAKEN, "slot {slot} was not taken");
        assert_eq!(self.slots[old.0 as usize], stripe.0, "slot {old} does not hold stripe {stripe}");
        pages.set_map_entry(stripe, MapEntry { slot, holds_data: true, epoch });
        self.slots[slot.0 as usize] = stripe.0;
        self.slots[old.0 as usize] = RETIRED;
        old
    }

    fn leave(&mut self, slot: SlotIndex, state: u64) {
        assert_eq!(self.slots[slot.0 as usize], state, "slot {slot} is given up by one who does not have it");
        self.slots[slot.0 as usize] = FREE | END;
        match self.last_free {
            END => self.first_free = slot.0,
            last => self.slots[last as usize] = FREE | slot.0,
        }
        self.last_free = slot.0;
        self.free += 1;
    }
}
