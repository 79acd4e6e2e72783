//! The end of a replay beside clients: reads are served although the content of the redo log cannot be put in
//! place for lack of room.
//!
//! A replay that has waited for room begins again and hands over what it finds (`recovery/lift.rs`). Its
//! images are then in the overlay, where reads look first, and its hashes in the page cache. A checkpoint
//! puts all of it in place when there is room, and the log starts anew behind it (R9).
//!
//! Invariant: until the superblocks say where the log starts anew, no batch is written, because its space may
//! be that of a batch that was replayed, and no member joins. Writes wait. Flushes do not: everything
//! acknowledged before is durable.

use crate::array::log::Redo;
use crate::array::pages::Pages;
use crate::array::{Core, NoticeKind, NoticeLevel};
use crate::block_io::Buf;
use crate::format::LogStart;
use crate::units::{Count, SlotIndex, StripeIndex};

/// A replay whose content is not all in place.
pub(super) struct Unsettled {
    /// The highest tail of the log as it was read.
    tail: Option<u64>,
    /// Stripes that the log names, ascending.
    stripes: Vec<StripeIndex>,
    /// Where the log is to start, once all is in place.
    start: Option<LogStart>,
}

impl Unsettled {
    pub(super) fn tail(&self) -> Option<u64> {
        self.tail
    }

    pub(super) fn stripes(&self) -> impl Iterator<Item = StripeIndex> + '_ {
        self.stripes.iter().copied()
    }

    /// Whether the log names a stripe.
    pub(super) fn names(&self, stripe: StripeIndex) -> bool {
        self.stripes.binary_search(&stripe).is_ok()
    }
}

/// What the end of a replay beside clients needs next.
pub(in crate::array) enum Settling {
    /// Nothing, for now.
    Wait,
    /// The log must start anew at this batch.
    StartAnew(u64),
    /// The superblocks must say that the log starts here.
    Record(LogStart),
}

impl Redo {
    /// Takes over the content that a replay has not put in place: blocks by slot, column and row, and the
    /// stripes that the log names.
    pub(in crate::array) fn settle(
        &mut self,
        core: &mut Core,
        pages: &mut Pages,
        images: Vec<(SlotIndex, usize, usize, Buf)>,
        stripes: Vec<StripeIndex>,
        tail: Option<u64>,
    ) {
        let text = format!(
            "the redo log was read, and waits for room: {} of it are to be put in place. Reads are served meanwhile, writes wait",
            Count::of(images.len(), "block")
        );
        for (slot, column, row, block) in images {
            self.overlay.insert(slot, column, row, &block);
        }
        self.overlay.slots().for_each(|slot| pages.show_images(slot, true));
        self.checkpoint.want();
        self.unsettled = Some(Unsettled { tail, stripes, start: None });
        core.notice(NoticeKind::LogReplayed, NoticeLevel::Warning, None, text);
    }

    /// Whether the content of a replay is not all in place, for lack of room. Writes and passes wait for
    /// that.
    pub(in crate::array) fn is_settling(&self) -> bool {
        self.unsettled.is_some() && self.is_serving()
    }

    /// Words of the answer to a request that begins a rebuild now.
    pub(in crate::array) fn after_settling(&self) -> &'static str {
        match self.is_settling() {
            true => "; that waits until what the redo log holds is in place: make room",
            false => "",
        }
    }

    /// Returns the next step of the end of a replay. When all is in place, the log starts anew.
    pub(in crate::array) fn settling(&mut self, pages: &Pages) -> Settling {
        let Some(unsettled) = &self.unsettled else { return Settling::Wait };
        let Some(end) = self.end_if_empty(pages) else {
            // Members that left meanwhile lack some of the content: the stripe map must say so first.
            if self.checkpoint.is_quiet() {
                self.checkpoint.want();
            }
            return Settling::Wait;
        };
        unsettled.start.map_or(Settling::StartAnew(end), Settling::Record)
    }

    /// Records that the superblocks are asked to say that the log starts here.
    pub(in crate::array) fn starts_anew(&mut self, start: LogStart) {
        if let Some(unsettled) = &mut self.unsettled {
            unsettled.start = Some(start);
        }
    }

    /// Ends the replay, now that the superblocks say where the log starts.
    pub(in crate::array) fn settled(&mut self, core: &mut Core) {
        self.unsettled = None;
        let text = "what the redo log held is in place: writes go on";
        core.notice(NoticeKind::LogReplayed, NoticeLevel::Info, None, text.into());
        self.wake_waiting_for_room(core);
    }
}
