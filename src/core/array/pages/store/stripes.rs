//! Entries of the stripe map in the cached pages: read, set, and shown to readers on other threads.

use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::store::PageStore;
use crate::format::MapEntry;
use crate::units::StripeIndex;
use std::ops::Range;

impl PageStore {
    /// The stripe map's entry of a logical stripe. Its slot is below the number of slots if
    /// [`crate::array::pages::stripe_map::MapBuild`] has accepted the map.
    pub(in crate::array) fn map_entry(&self, stripe: StripeIndex) -> MapEntry {
        let (page, entry) = self.site.layout.map_entry(stripe.0);
        MapEntry::decode(stripe.0, self.at(page).page.entries[entry])
    }

    /// Sets the stripe map's entry of a logical stripe. While the array serves, the slot of a stripe is
    /// changed through [`crate::array::pages::stripe_map::StripeMap::moved`] only.
    pub(in crate::array) fn set_map_entry(&mut self, stripe: StripeIndex, entry: MapEntry) {
        let (page, at) = self.site.layout.map_entry(stripe.0);
        self.set(page, at, entry.encode(stripe.0));
        self.show_stripe(stripe, entry);
    }

    /// Shows where these stripes are, by the map pages as they are.
    pub(in crate::array) fn show_stripes(&mut self, stripes: Range<u64>) {
        for stripe in stripes.map(StripeIndex) {
            let entry = self.map_entry(stripe);
            self.show_stripe(stripe, entry);
        }
    }

    fn show_stripe(&mut self, stripe: StripeIndex, entry: MapEntry) {
        let is_late = is_off(Mutation::ViewMoveLate) && entry.holds_data
            || is_off(Mutation::ViewDiscardLate) && !entry.holds_data;
        // Stripes that do not exist may have entries.
        if stripe.0 < self.site.geometry.stripes() && entry.slot.0 < self.site.geometry.slots && !is_late {
            self.shown.set_stripe(stripe.0, entry.slot.0, entry.holds_data, false);
        }
    }
}
