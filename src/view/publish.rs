//! The owner's side: each function publishes one change, whole, to all readers.
//!
//! Invariant: there is one publisher of a view, so words are read back here as they were left.

use crate::Hash;
use crate::rules::{Rule, is_off};
use crate::shared::{BUSY, CLOSED, GENERATION, IMAGES, ON_MEMBERS, Size, View, map_word, slot_of};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// See the head of this file.
#[derive(Debug)]
pub struct Publisher {
    view: Arc<View>,
    /// Frames below this one have shown a page.
    used: u32,
    /// Those of them that show none.
    free: Vec<u32>,
}

/// Hashes of a slot that are being changed. Readers ask the owner for blocks of the slot until it is dropped.
#[derive(Debug)]
pub struct Change<'a> {
    publisher: &'a Publisher,
    slot: u64,
}

impl Drop for Publisher {
    fn drop(&mut self) {
        // Nobody answers for what is shown any more.
        self.serve(false);
    }
}

impl Publisher {
    /// Makes a view of this size. It shows nothing, and its service is closed.
    ///
    /// # Panics
    /// When there is no address space for it.
    #[must_use]
    pub fn new(size: Size) -> Publisher {
        Publisher { view: Arc::new(View::new(size)), used: 0, free: Vec::new() }
    }

    /// The view, for readers.
    #[must_use]
    pub fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// Lets readers read, or has them ask the owner for everything. Tickets from before do not hold.
    pub fn serve(&mut self, is_open: bool) {
        let word = self.view.service.load(Relaxed);
        if is_open != (word & CLOSED == 0) {
            self.view.service.store(word + 1, Release);
        }
    }

    /// Shows the device that serves each member, if one does. Tickets from before do not hold.
    pub fn set_members(&mut self, devices: impl Iterator<Item = Option<u32>>) {
        let was_open = self.view.service.load(Relaxed) & CLOSED == 0;
        self.serve(false);
        for (word, device) in self.view.members.iter().zip(devices) {
            word.store(device.map_or(0, |device| u64::from(device) + 1), Release);
        }
        self.serve(was_open);
    }

    /// Shows where a stripe is and whether it holds data. `owner_only`: readers ask the owner all the same.
    pub fn set_stripe(&mut self, stripe: u64, slot: u64, holds_data: bool, owner_only: bool) {
        let place = &self.view.map[stripe as usize];
        let (old, new) = (place.load(Relaxed), map_word(slot, holds_data, owner_only));
        if old == new {
            return;
        }
        // Both are busy until both have their next generation. Two slots may share a word.
        let own = self.view.slot_at(slot);
        let left = slot_of(old).map(|left| self.view.slot_at(left)).filter(|left| *left != own);
        let words = [Some(own), left];
        let words = || words.iter().flatten().filter(|_| !is_off(Rule::MoveChangesGenerations));
        words().for_each(|at| self.begin(*at));
        place.store(new, Release);
        words().for_each(|at| self.end(*at));
    }

    /// Shows that a slot has images that are not in place, or that it has none any more. Told once for each
    /// change.
    pub fn set_images(&mut self, slot: u64, has_images: bool) {
        let word = self.view.slot(slot);
        let now = word.load(Relaxed);
        let next = if has_images { now + IMAGES } else { now - IMAGES };
        debug_assert!(has_images || now % GENERATION >= IMAGES, "slot {slot} shows no images");
        word.store(next.wrapping_add(GENERATION), Release);
    }

    /// Begins a change of hashes of a slot.
    #[must_use]
    pub fn change(&mut self, slot: u64) -> Change<'_> {
        if !is_off(Rule::BusyIsShown) {
            self.begin(self.view.slot_at(slot));
        }
        Change { publisher: self, slot }
    }

    /// Whether a page is shown.
    #[must_use]
    pub fn shows(&self, page: u64) -> bool {
        self.view.frame_of(page).is_some()
    }

    /// What is shown of a page, all its entries in order; none if it is not shown.
    pub fn shown(&self, page: u64) -> Option<impl Iterator<Item = Hash> + '_> {
        let frame = self.view.frame(self.view.frame_of(page)?);
        let entries = 0..self.view.size.entries as usize;
        Some(entries.map(move |entry| frame.entry(entry).map(|half| half.load(Relaxed))))
    }

    /// Shows a page, all its entries in order; if it is shown already, it gets these. Without a frame for it,
    /// nothing is shown of it, and readers ask the owner.
    pub fn show_page(&mut self, page: u64, entries: impl Iterator<Item = Hash>) {
        let frame = match self.view.frame_of(page) {
            Some(frame) => frame,
            None => match self.free.pop() {
                Some(frame) => frame,
                None if self.used < self.view.size.frames => {
                    self.used += 1;
                    self.used - 1
                }
                None => return self.hide_page(page),
            },
        };
        self.fill(frame, page + 1, entries);
        self.set_page(page, u64::from(frame) + 1);
    }

    /// Shows a page no more, neither in memory nor on the members.
    pub fn hide_page(&mut self, page: u64) {
        let frame = self.view.frame_of(page);
        self.set_page(page, 0);
        if let Some(frame) = frame {
            self.fill(frame, 0, std::iter::empty());
            self.free.push(frame);
        }
    }

    /// Shows of a page that is not in memory its newest version and where that is, in one word that must have
    /// its upper bit set. As long as that is shown no entry of the page may change.
    ///
    /// # Panics
    /// When the upper bit is not set.
    pub fn place_page(&mut self, page: u64, word: u64) {
        assert!(word & ON_MEMBERS != 0, "{word:x} is the word of a frame");
        self.hide_page(page);
        self.set_page(page, word);
    }

    /// What [`Publisher::place_page`] shows of a page, if it is not in memory.
    #[must_use]
    pub fn placed(&self, page: u64) -> Option<u64> {
        self.view.on_members(page)
    }

    /// Closes the service, and shows no stripe, image or page any more.
    pub fn forget_all(&mut self) {
        self.serve(false);
        for word in &self.view.map {
            if word.load(Relaxed) != 0 {
                word.store(0, Release);
            }
        }
        for word in &self.view.slots {
            let now = word.load(Relaxed);
            if now != 0 {
                word.store((now - now % GENERATION).wrapping_add(GENERATION), Release);
            }
        }
        for page in 0..self.view.size.pages {
            self.hide_page(page);
        }
    }

    /// Sets where the hashes of a page are.
    fn set_page(&self, page: u64, word: u64) {
        let place = &self.view.pages[page as usize];
        if place.load(Relaxed) != word {
            place.store(word, Release);
        }
    }

    fn begin(&self, at: usize) {
        let word = &self.view.slots[at];
        word.store(word.load(Relaxed) | BUSY, Release);
    }

    fn end(&self, at: usize) {
        let word = &self.view.slots[at];
        word.store((word.load(Relaxed) & !BUSY).wrapping_add(GENERATION), Release);
    }

    /// Gives a frame to a page, whose number + 1 is `page`; 0 for none.
    fn fill(&self, frame: u32, page: u64, entries: impl Iterator<Item = Hash>) {
        let frame = self.view.frame(frame);
        let sequence = frame.sequence().load(Relaxed);
        frame.sequence().store(sequence + 1, Release);
        frame.page().store(page, Release);
        for (entry, hash) in entries.enumerate() {
            for (half, value) in frame.entry(entry).into_iter().zip(hash) {
                half.store(value, Release);
            }
        }
        frame.sequence().store(sequence + 2, Release);
    }
}

impl Change<'_> {
    /// Sets the hash of a block of this slot. Nothing happens if its page is not shown.
    pub fn set(&mut self, page: u64, entry: usize, hash: Hash) {
        let view = &self.publisher.view;
        if let Some(frame) = view.frame_of(page) {
            for (half, value) in view.frame(frame).entry(entry).into_iter().zip(hash) {
                half.store(value, Release);
            }
        }
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        if !is_off(Rule::BusyIsShown) {
            self.publisher.end(self.publisher.view.slot_at(self.slot));
        }
    }
}
