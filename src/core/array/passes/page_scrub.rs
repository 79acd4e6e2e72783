//! The last part of a scrub of a logged array: all copies of all metadata pages are read and compared, in
//! turns of a few pages each. In the scrub's order they come after the slots, see [`Array::scrub_turns`].
//!
//! Nothing is locked: a page that is being written is looked at after that. Bad copies are rewritten by the
//! next checkpoint, which the scrub waits for; then the copies of these pages are read once more, and those
//! that are good count as repaired. A page that cannot be read now is left alone and counted as an error that
//! was not repaired.

use crate::array::pages::hold::{PageHold, PagesHeld};
use crate::array::{Array, Flow, Op};
use crate::format::{MemberSet, PageIndex};
use crate::units::{MemberIndex, SlotIndex};
use std::ops::Range;

/// Pages of a turn: with all their copies about as many bytes as a stripe.
pub(super) const PAGES_PER_TURN: u64 = 32;

pub(in crate::array) struct PageScrub {
    stage: Stage,
    hold: PageHold,
    life: u64,
}

#[derive(Clone, Copy)]
enum Stage {
    /// The turn at this place in the scrub's order.
    Turn(u64),
    /// These pages had bad copies, which were written since. `scrubs_stopped`: how many scrubs had been
    /// stopped when it began; after another stop it belongs to no scrub under way.
    Reread { first: u64, end: u64, scrubs_stopped: u64 },
}

impl PageScrub {
    /// Whether it waits for pages to be written, and for nothing else.
    pub(in crate::array) fn waits_for_checkpoint(&self) -> bool {
        self.hold.waits_for_checkpoint()
    }
}

impl Array {
    /// How many turns a scrub has: one for each slot, then those of the pages. Superblocks come before
    /// (`super_scrub.rs`).
    pub(super) fn scrub_turns(&self) -> u64 {
        let pages = self.pages.store().layout().pages();
        self.core.map.slots + pages.div_ceil(PAGES_PER_TURN)
    }

    pub(super) fn start_page_scrub(&mut self, turn: u64) {
        let first = (turn - self.core.map.slots) * PAGES_PER_TURN;
        let pages = first..(first + PAGES_PER_TURN).min(self.pages.store().layout().pages());
        let life = self.redo.lives();
        let scrub = PageScrub { stage: Stage::Turn(turn), hold: PageHold::checked(pages, life), life };
        let key = self.ops.insert(Op::PageScrub(Box::new(scrub)));
        self.core.work.ready.push_back(key);
    }

    /// Reads the copies of these pages again, some of which were bad.
    pub(super) fn start_page_reread(&mut self, pages: Range<u64>) {
        let life = self.redo.lives();
        let scrubs_stopped = self.passes.scrubs_stopped();
        let stage = Stage::Reread { first: pages.start, end: pages.end, scrubs_stopped };
        let scrub = PageScrub { stage, hold: PageHold::checked(pages, life), life };
        let key = self.ops.insert(Op::PageScrub(Box::new(scrub)));
        self.core.work.ready.push_back(key);
    }

    pub(in crate::array) fn advance_page_scrub(&mut self, key: usize, scrub: &mut PageScrub) -> Flow {
        if self.core.is_failed() || scrub.life != self.redo.lives() || !self.redo.is_serving() {
            return self.end_page_scrub(scrub, false);
        }
        let PagesHeld::All { unreadable } = self.hold_pages(key, &mut scrub.hold) else { return Flow::Wait };
        let online = self.core.online();
        if let (Stage::Turn(_), Some(pass)) = (scrub.stage, self.passes.scrub_mut()) {
            pass.note_errors(unreadable as u64);
            for member in (0..self.core.map.width() as u16).map(MemberIndex) {
                if !online.contains(member) {
                    pass.note_unchecked(member);
                }
            }
        }
        self.end_page_scrub(scrub, true)
    }

    pub(super) fn end_page_scrub(&mut self, scrub: &mut PageScrub, complete: bool) -> Flow {
        match scrub.stage {
            Stage::Turn(turn) => self.passes.verified(self.core.now, SlotIndex(turn), complete),
            Stage::Reread { first, end, scrubs_stopped } => {
                self.passes.ended();
                if scrubs_stopped == self.passes.scrubs_stopped() {
                    self.end_reread(&scrub.hold, first..end, complete);
                }
            }
        }
        self.release_pages(&mut scrub.hold);
        Flow::Finished
    }

    fn end_reread(&mut self, hold: &PageHold, pages: Range<u64>, complete: bool) {
        let Some(pass) = self.passes.scrub_mut() else { return };
        pass.reread_ended();
        if !complete {
            return;
        }
        for page in pages.map(PageIndex) {
            // A page that is here and was not read has been written in every place meanwhile, several times
            // over.
            let is_written = hold.has(page) && !self.pages.store().is_lost(page);
            self.note_reread(page, if is_written { self.core.online() } else { MemberSet::default() });
        }
    }

    /// Counts the copies of a page on these members as good.
    pub(in crate::array) fn note_reread(&mut self, page: PageIndex, good: MemberSet) {
        let Some(pass) = self.passes.scrub_mut() else { return };
        for member in pass.reread(page, good) {
            self.core.member_mut(member).counters.repaired += 1;
        }
    }
}
