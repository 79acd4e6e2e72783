//! A replay that hands over the blocks that it would write in place (R8), because there is no room for them
//! now.
//!
//! The note is durable by then, so the log keeps everything until the array has put it in place. Hashes and
//! the stripe map are in the page store as after any replay, changed and not written. Blocks that would take
//! too much memory go in place after all.

use crate::array::pages::store::PageStore;
use crate::array::recovery::{Recovery, Step};
use crate::block_io::Buf;
use crate::units::{ROW_BYTES, SlotIndex, StripeIndex};

/// The content of the log that is not in place.
// Plain data: given to the log at the end of a replay.
#[derive(Debug, Default)]
pub(in crate::array) struct Lifted {
    /// Blocks by slot, column and row; some of them more than once, with the same bytes.
    pub images: Vec<(SlotIndex, usize, usize, Buf)>,
    /// The stripes that the log names.
    pub stripes: Vec<StripeIndex>,
}

impl Recovery {
    /// Whether it writes in place, and another replay could hand that over instead: everything that it found
    /// is durable in the log, and decided.
    pub(crate) fn may_lift(&self) -> bool {
        self.cx.lift_max.is_none()
            && matches!(self.step, Step::Redo { .. } | Step::Pages { .. } | Step::FlushRedo { .. })
    }

    /// The blocks to hand over; none where everything is in place.
    pub(crate) fn take_lifted(&mut self) -> Option<Lifted> {
        self.lifted.take()
    }

    /// Whether it holds more than it may.
    pub(super) fn is_lift_full(&self) -> bool {
        let bytes = self.lifted.as_ref().map_or(0, |lifted| lifted.images.len() * ROW_BYTES as usize);
        self.cx.lift_max.is_some_and(|max| bytes > max)
    }

    /// Ends a step: everything that may be held at once was read. `left`: there is more.
    pub(super) fn end_lift(&mut self, left: bool, pages: &mut PageStore) -> bool {
        if left || self.is_lift_full() {
            self.lifted = None;
            self.result.rows_redone = 0;
            self.work.tiles.clear();
            self.step = Step::Redo { next: 0 };
        } else {
            self.finish(pages);
        }
        true
    }
}
