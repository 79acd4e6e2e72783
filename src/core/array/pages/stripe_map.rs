//! The in-memory side of the stripe map of a logged array: which slots are free, and which stripe is in which
//! slot.
//!
//! The map pages, which never leave the cache, say where each stripe is ([`PageStore::map_entry`]); this is
//! the inverse, 8 bytes for each slot. Invariants: every stripe is in exactly one slot, written or not; a
//! slot is free, taken, retired, or holds one stripe, and only a free slot is given out. A slot that a stripe
//! has left stays retired until the log, which knows about durability and writes in flight, frees it (W3 of
//! the crash-safety design).
//!
//! Must not know of the log, of members, or of when anything is durable.

use crate::array::pages::store::PageStore;
use crate::format::{Geometry, MapEntry, PageIndex};
use crate::units::{SlotIndex, StripeIndex};
use std::ops::Range;

/// A slot that is not the home of a stripe has one of the top bits set. The rest of the word is the next free
/// slot or the stripe; both are far below 2^62 because devices are.
const FREE: u64 = 1 << 63;
const TAG: u64 = 3 << 62;
/// Taken for a write that is under way.
const TAKEN: u64 = (1 << 62) | 1;
/// Left by its stripe.
const RETIRED: u64 = (1 << 62) | 2;
/// The end of the queue of free slots.
const END: u64 = !TAG;

/// Why no map can be made of the map pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::array) enum MapFault {
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
        /// Number of slots.
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::array) struct StripeMap {
    slots: Words,
    /// Free slots are given out in the order in which they became free: neighbours stay neighbours.
    first_free: u64,
    last_free: u64,
    free: u64,
}

/// For each slot the stripe it holds, or one of the words above. Zeroed memory means that every slot is
/// retired, so making it takes no time, however large it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Words(Box<[u64]>);

impl Words {
    fn all_retired(slots: u64) -> Words {
        let slots = usize::try_from(slots).expect("slots of a valid geometry fit memory");
        Words(vec![0; slots].into_boxed_slice())
    }

    fn get(&self, slot: SlotIndex) -> u64 {
        self.0[slot.0 as usize] ^ RETIRED
    }

    fn set(&mut self, slot: SlotIndex, word: u64) {
        self.0[slot.0 as usize] = word ^ RETIRED;
    }
}

/// Reads the map from its pages, all of which are cached, a step at a time. Used after a replay, which only
/// sets entries.
#[derive(Debug)]
pub(in crate::array) struct MapBuild {
    geometry: Geometry,
    map: StripeMap,
    /// Stripes, then slots, that have been gone through.
    stripes: u64,
    slots: u64,
}

impl MapBuild {
    pub(in crate::array) fn new(geometry: Geometry) -> MapBuild {
        let map = StripeMap { slots: Words::all_retired(geometry.slots), ..StripeMap::default() };
        MapBuild { geometry, map, stripes: 0, slots: 0 }
    }

    /// As [`MapBuild::step`]; readers on other threads are shown where the stripes are.
    ///
    /// # Errors
    /// As there.
    pub(in crate::array) fn step_and_show(
        &mut self,
        pages: &mut PageStore,
        count: u64,
    ) -> Result<Option<StripeMap>, MapFault> {
        let before = self.stripes;
        let built = self.step(pages, count)?;
        pages.show_stripes(before..self.stripes);
        Ok(built)
    }

    /// Goes through `count` more stripes or slots. Returns the map once it is whole.
    ///
    /// # Errors
    /// When the pages are lost or contradict each other: the array cannot be served.
    fn step(&mut self, pages: &PageStore, count: u64) -> Result<Option<StripeMap>, MapFault> {
        let stripes = self.stripes..self.geometry.stripes().min(self.stripes + count);
        if !stripes.is_empty() {
            self.stripes = stripes.end;
            self.place(stripes, pages)?;
            return Ok(None);
        }
        let slots = self.slots..self.geometry.slots.min(self.slots + count);
        self.slots = slots.end;
        for slot in slots.map(SlotIndex) {
            if self.map.is_retired(slot) {
                self.map.free(slot);
            }
        }
        let is_whole = self.slots == self.geometry.slots;
        Ok(is_whole.then(|| std::mem::take(&mut self.map)))
    }

    /// Records where these stripes are.
    fn place(&mut self, stripes: Range<u64>, pages: &PageStore) -> Result<(), MapFault> {
        let mut last_page = None;
        for stripe in stripes.map(StripeIndex) {
            let (page, _) = pages.layout().map_entry(stripe.0);
            if last_page != Some(page) && pages.is_lost(page) {
                return Err(MapFault::Lost { page, stripe });
            }
            last_page = Some(page);
            let slot = pages.map_entry(stripe).slot;
            if slot.0 >= self.geometry.slots {
                return Err(MapFault::SlotOutOfRange { stripe, slot, slots: self.geometry.slots });
            }
            if let Some(holder) = self.map.stripe_at(slot) {
                return Err(MapFault::SlotTwice { slot, stripes: [holder, stripe] });
            }
            self.map.slots.set(slot, stripe.0);
        }
        Ok(())
    }
}

/// The map of an array whose pages are not loaded yet: no slot is free.
impl Default for StripeMap {
    fn default() -> StripeMap {
        StripeMap { slots: Words::default(), first_free: END, last_free: END, free: 0 }
    }
}

impl StripeMap {
    /// The stripe in a slot, written or not; none for a slot that holds none.
    pub(in crate::array) fn stripe_at(&self, slot: SlotIndex) -> Option<StripeIndex> {
        let word = self.slots.get(slot);
        (word & TAG == 0).then_some(StripeIndex(word))
    }

    /// Whether its stripe has left a slot that must not be used again yet.
    pub(in crate::array) fn is_retired(&self, slot: SlotIndex) -> bool {
        self.slots.get(slot) == RETIRED
    }

    /// How many slots can be taken.
    pub(in crate::array) fn free_slots(&self) -> u64 {
        self.free
    }

    /// Takes the slot that has been free for longest. The caller ends that with [`StripeMap::moved`] or
    /// [`StripeMap::give_back`].
    pub(in crate::array) fn take_free(&mut self) -> Option<SlotIndex> {
        if self.first_free == END {
            return None;
        }
        let slot = SlotIndex(self.first_free);
        self.first_free = self.slots.get(slot) & !TAG;
        self.slots.set(slot, TAKEN);
        if self.first_free == END {
            self.last_free = END;
        }
        self.free -= 1;
        Some(slot)
    }

    /// Gives back a slot that was taken and not used: nothing that counts was written to it.
    ///
    /// # Panics
    /// When the slot was not taken.
    pub(in crate::array) fn give_back(&mut self, slot: SlotIndex) {
        self.leave(slot, TAKEN);
    }

    /// Frees a retired slot: the record that freed it is durable and nothing is being written to it.
    ///
    /// # Panics
    /// When the slot is not retired.
    pub(in crate::array) fn free(&mut self, slot: SlotIndex) {
        self.leave(slot, RETIRED);
    }

    /// Moves a stripe to a slot that was taken, where it was written whole in epoch `epoch`. Returns its old
    /// slot, which is retired.
    ///
    /// # Panics
    /// When the slot was not taken.
    pub(in crate::array) fn moved(
        &mut self,
        pages: &mut PageStore,
        stripe: StripeIndex,
        slot: SlotIndex,
        epoch: u64,
    ) -> SlotIndex {
        let old = pages.map_entry(stripe).slot;
        assert_eq!(self.slots.get(slot), TAKEN, "slot {slot} was not taken");
        assert_eq!(self.slots.get(old), stripe.0, "slot {old} does not hold stripe {stripe}");
        pages.set_map_entry(stripe, MapEntry { slot, holds_data: true, epoch });
        self.slots.set(slot, stripe.0);
        self.slots.set(old, RETIRED);
        old
    }

    fn leave(&mut self, slot: SlotIndex, state: u64) {
        assert_eq!(
            self.slots.get(slot),
            state,
            "slot {slot} is given up by an operation that does not have it"
        );
        self.slots.set(slot, FREE | END);
        match self.last_free {
            END => self.first_free = slot.0,
            last => self.slots.set(SlotIndex(last), FREE | slot.0),
        }
        self.last_free = slot.0;
        self.free += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::pages::store::tests::{array_without_map_page, new_array};
    use proptest::prelude::*;
    use std::collections::{BTreeMap, VecDeque};

    const CHUNK: u32 = 4096;

    /// Reads the map in steps of `count`.
    fn load_by(pages: &PageStore, geometry: &Geometry, count: u64) -> Result<StripeMap, MapFault> {
        let mut build = MapBuild::new(*geometry);
        loop {
            if let Some(map) = build.step(pages, count)? {
                return Ok(map);
            }
        }
    }

    fn load(pages: &PageStore, geometry: &Geometry) -> Result<StripeMap, MapFault> {
        load_by(pages, geometry, 1000)
    }

    fn geometry(slots: u64, stripes: u64) -> Geometry {
        Geometry {
            data: 2,
            parity: 1,
            chunk: CHUNK,
            sector: 512,
            slots,
            volume_bytes: stripes * 2 * u64::from(CHUNK),
            ahead: 0,
        }
    }

    fn in_slot(slot: u64) -> MapEntry {
        MapEntry { slot: SlotIndex(slot), holds_data: true, epoch: 1 }
    }

    proptest! {
        /// In whatever order slots are taken, moved to, given back and freed: none is given out twice or
        /// before it is freed, they are given out in the order in which they became free, and a map loaded
        /// from the pages knows the same stripes.
        #[test]
        fn slots_are_given_out_once_and_only_when_free(
            reserve in 1u64..20, stripes in 1u64..300, step in 1u64..400, steps in prop::collection::vec((0u8..4, any::<u64>()), 0..400),
        ) {
            let geometry = geometry(stripes + reserve, stripes);
            let mut pages = new_array(geometry);
            let mut map = load(&pages, &geometry).unwrap();
            let mut free: VecDeque<u64> = (stripes..stripes + reserve).collect();
            let mut home: Vec<u64> = (0..stripes).collect();
            let (mut taken, mut retired) = (Vec::new(), Vec::new());
            for (what, number) in steps {
                let pick = |from: &[u64]| (number % from.len().max(1) as u64) as usize;
                match what {
                    0 => {
                        let slot = map.take_free().map(|slot| slot.0);
                        prop_assert_eq!(slot, free.pop_front());
                        taken.extend(slot);
                    }
                    1 if !taken.is_empty() => {
                        let slot = taken.swap_remove(pick(&taken));
                        let stripe = number % stripes;
                        let old = map.moved(&mut pages, StripeIndex(stripe), SlotIndex(slot), number);
                        prop_assert_eq!(old.0, std::mem::replace(&mut home[stripe as usize], slot));
                        let entry = MapEntry { slot: SlotIndex(slot), holds_data: true, epoch: number };
                        prop_assert_eq!(pages.map_entry(StripeIndex(stripe)), entry);
                        retired.push(old.0);
                    }
                    2 if !taken.is_empty() => {
                        let slot = taken.swap_remove(pick(&taken));
                        map.give_back(SlotIndex(slot));
                        free.push_back(slot);
                    }
                    3 if !retired.is_empty() => {
                        let slot = retired.swap_remove(pick(&retired));
                        map.free(SlotIndex(slot));
                        free.push_back(slot);
                    }
                    _ => {}
                }
                prop_assert_eq!(map.free_slots(), free.len() as u64);
            }
            let after = load(&pages, &geometry).unwrap();
            prop_assert_eq!(&load_by(&pages, &geometry, step).unwrap(), &after);
            let holders: BTreeMap<u64, u64> = home.iter().enumerate().map(|(stripe, &slot)| (slot, stripe as u64)).collect();
            for slot in 0..geometry.slots {
                let holder = holders.get(&slot).copied().map(StripeIndex);
                prop_assert_eq!(map.stripe_at(SlotIndex(slot)), holder);
                prop_assert_eq!(after.stripe_at(SlotIndex(slot)), holder);
            }
            prop_assert_eq!(after.free_slots(), reserve);
        }
    }

    #[test]
    fn a_map_that_contradicts_itself_is_refused_by_name() {
        let geometry = geometry(600, 590);
        let mut pages = new_array(geometry);
        pages.set_map_entry(StripeIndex(7), in_slot(595));
        pages.set_map_entry(StripeIndex(300), in_slot(600));
        let fault = load(&pages, &geometry).unwrap_err();
        assert_eq!(
            fault,
            MapFault::SlotOutOfRange { stripe: StripeIndex(300), slot: SlotIndex(600), slots: 600 }
        );
        pages.set_map_entry(StripeIndex(300), in_slot(595));
        let fault = load(&pages, &geometry).unwrap_err();
        assert_eq!(
            fault,
            MapFault::SlotTwice { slot: SlotIndex(595), stripes: [StripeIndex(7), StripeIndex(300)] }
        );
        assert!(fault.to_string().contains("stripes 7 and 300 are both said to be in slot 595"), "{fault}");
        pages.set_map_entry(StripeIndex(300), in_slot(7));
        assert!(load(&pages, &geometry).is_ok());
    }

    #[test]
    fn a_lost_page_of_the_map_is_refused_by_name() {
        let geometry = geometry(600, 590);
        let fault = load(&array_without_map_page(geometry, PageIndex(1)), &geometry).unwrap_err();
        assert_eq!(fault, MapFault::Lost { page: PageIndex(1), stripe: StripeIndex(252) });
        assert!(
            fault.to_string().starts_with("page 1 of the stripe map, which says where stripe 252"),
            "{fault}"
        );
    }

    #[test]
    #[should_panic(expected = "slot 11 is given up by an operation that does not have it")]
    fn a_slot_is_not_freed_twice() {
        let geometry = geometry(12, 10);
        let mut map = load(&new_array(geometry), &geometry).unwrap();
        map.free(SlotIndex(11));
    }
}
