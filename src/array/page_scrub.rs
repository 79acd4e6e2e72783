//! The last part of a scrub of a logged array: all copies of all metadata pages are read and compared, in turns of a
//! few pages each. They come after the slots in the scrub's order, see [`Array::scrub_turns`].
//!
//! Nothing is locked: a page that is being written is looked at after that. What is found bad is written again with the
//! next checkpoint, which the scrub waits for. A page that cannot be read now is left alone and counted as an error that was not repaired.

use super::page_hold::{PageHold, PagesHeld};
use super::{ActivityKind, Array, Flow, Op};
use crate::units::SlotIndex;

/// Pages of a turn: with all copies about as many bytes as a stripe.
const PAGES_PER_TURN: u64 = 32;

pub(super) struct PageScrub {
    /// Where in the scrub's order.
    turn: u64,
    hold: PageHold,
    life: u64,
}

impl Array {
    /// How many turns a scrub has: one for each slot, then those of the pages. Superblocks come before (super_scrub.rs).
    pub(super) fn scrub_turns(&self) -> u64 {
        let pages = self.redo.pages.layout().pages();
        self.map.slots + pages.div_ceil(PAGES_PER_TURN)
    }

    pub(super) fn start_page_scrub(&mut self, turn: u64) {
        let redo = self.redo();
        let first = (turn - self.map.slots) * PAGES_PER_TURN;
        let pages = first..(first + PAGES_PER_TURN).min(redo.pages.layout().pages());
        let life = redo.lives;
        let scrub = PageScrub { turn, hold: PageHold::checked(pages, life), life };
        let key = self.ops.insert(Op::PageScrub(Box::new(scrub)));
        self.ready.push_back(key);
    }

    pub(super) fn advance_page_scrub(&mut self, key: usize, scrub: &mut PageScrub) -> Flow {
        if self.is_failed() || scrub.life != self.redo().lives || !self.redo().is_serving() {
            return self.end_page_scrub(scrub, false);
        }
        let PagesHeld::All { unreadable } = self.hold_pages(key, &mut scrub.hold) else { return Flow::Wait };
        if let Some(pass) = self.passes.pass_mut(ActivityKind::Scrub) {
            pass.errors += unreadable as u64;
        }
        self.end_page_scrub(scrub, true)
    }

    pub(super) fn end_page_scrub(&mut self, scrub: &mut PageScrub, complete: bool) -> Flow {
        self.release_pages(&mut scrub.hold);
        self.verified(ActivityKind::Scrub, SlotIndex(scrub.turn), complete);
        Flow::Finished
    }
}
