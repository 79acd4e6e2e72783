//! Reads are served although what the redo log holds cannot be put in place for lack of room: the end of a replay, beside
//! clients.
//!
//! A replay that has waited for room begins again and hands over what it finds (`recovery/lift.rs`). Its
//! images are in the overlay then, where reads look first, its hashes in the page cache; a checkpoint puts
//! all of it in place when there is room, and the log starts anew behind it (R9).
//!
//! Invariant: until the superblocks say where the log starts anew, no batch is written, for its space may be
//! that of one that was replayed, and no member joins. Writes wait; what was acknowledged before is durable,
//! so flushes do not.

use crate::array::{Array, NoticeKind, NoticeLevel};
use crate::block_io::Buf;
use crate::format::LogStart;
use crate::units::{Count, SlotIndex, StripeIndex};

/// A replay that is not all in place.
pub(in crate::array) struct Unsettled {
    /// The highest tail of the log as it was read.
    pub tail: Option<u64>,
    /// What the log names, ascending.
    pub stripes: Vec<StripeIndex>,
    /// All is in place, and the log is to start here.
    start: Option<LogStart>,
}

impl Array {
    /// Takes over what a replay has not put in place: blocks by slot, column and row, and the stripes that the log names.
    pub(in crate::array) fn settle(
        &mut self,
        images: Vec<(SlotIndex, usize, usize, Buf)>,
        stripes: Vec<StripeIndex>,
        tail: Option<u64>,
    ) {
        let text = format!(
            "the redo log was read, and waits for room: {} of it are to be put in place. Reads are served meanwhile, writes wait",
            Count::of(images.len(), "block")
        );
        let redo = self.redo_mut();
        for (slot, column, row, block) in images {
            redo.overlay.insert(slot, column, row, &block);
        }
        redo.checkpoint.want();
        redo.unsettled = Some(Unsettled { tail, stripes, start: None });
        self.core.notice(NoticeKind::LogReplayed, NoticeLevel::Warning, None, text);
    }

    /// Whether a replay is not all in place, for lack of room: neither writes nor passes go on before it is.
    pub(in crate::array) fn is_settling(&self) -> bool {
        self.redo.unsettled.is_some() && self.redo.is_serving()
    }

    /// What is said of a request that begins a rebuild now.
    pub(in crate::array) fn after_settling(&self) -> &'static str {
        match self.is_settling() {
            true => "; that waits until what the redo log holds is in place: make room",
            false => "",
        }
    }

    /// Moves the end of a replay on: when all is in place, the log starts anew.
    pub(super) fn pump_settling(&mut self) {
        let Some(unsettled) = &self.redo.unsettled else { return };
        let Some(end) = self.log_end_if_empty() else {
            // Members that left meanwhile lack some of it: the stripe map must say so first.
            if self.redo.checkpoint.is_quiet() {
                self.redo_mut().checkpoint.want();
            }
            return;
        };
        match unsettled.start {
            None if self.acknowledgements_allowed() => {
                let start = self.start_log_anew(end);
                if let Some(unsettled) = &mut self.redo_mut().unsettled {
                    unsettled.start = Some(start);
                }
                self.pump_supers();
            }
            Some(start)
                if self.supers.durable_log_start() == Some(start) && self.acknowledgements_allowed() =>
            {
                self.redo_mut().unsettled = None;
                let text = "what the redo log held is in place: writes go on";
                self.core.notice(NoticeKind::LogReplayed, NoticeLevel::Info, None, text.into());
                self.wake_waiting_for_room();
            }
            _ => {}
        }
    }
}
