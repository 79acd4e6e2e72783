//! How the free segments are shared out, so that whatever frees segments finds those that it needs. Rule E1.
//!
//! A start needs one at most, for its entry. Roots come next: they free segments of the journal and of older
//! pages. Then what makes room: giving up segments, moving chunks, and trims. Clients' data gets the rest.

use super::CasVolume;
use super::store::RESERVE;

/// Most victims of a round.
pub(super) const VICTIMS_MAX: usize = 16;

/// For what a segment is taken. Each leaves the needs of those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// The first entry of a start.
    Start,
    /// Pages of a root.
    Root,
    /// Records that free segments, and chunks that move for that.
    Room,
    /// Clients' chunks, and the records that name them.
    Data,
}

impl CasVolume {
    /// Free segments that are left to others.
    pub(super) fn reserve(&self, need: Need) -> usize {
        match need {
            Need::Start => 0,
            Need::Root => 1,
            Need::Room => 1 + self.root_segments(),
            Need::Data => 1 + self.root_segments() + RESERVE / 2,
        }
    }

    /// Segments that the root under way needs still, and the next one.
    fn root_segments(&self) -> usize {
        let whole = u64::from(self.facts.segment_blocks);
        self.store.pages.write_bounds().into_iter().map(|pages| pages.div_ceil(whole) as usize).sum()
    }

    /// Free segments below which chunks move together.
    fn short(&self) -> usize {
        (self.reserve(Need::Data) + RESERVE).max(2 * RESERVE) + self.facts.segments as usize / 32
    }

    /// Whether free segments are few.
    pub(super) fn is_short(&self) -> bool {
        self.store.segments.free() < self.short()
    }

    /// Whether so many more blocks may be written.
    pub(super) fn has_room_for(&self, blocks: u64) -> bool {
        let taken = self.store.segments.metadata() + self.store.journal.segments() + 1 + self.short();
        let segments = (self.facts.segments as usize).saturating_sub(taken) as u64;
        let waiting = self.work.placing.len() as u64;
        // Chunks move from so many segments to one less: fuller ones are no victims.
        let victims = (RESERVE + self.facts.segments as usize / 32).min(VICTIMS_MAX) as u64;
        let room = segments * u64::from(self.facts.segment_blocks) * (victims - 1) / victims;
        room >= self.store.live + waiting + blocks
    }

    /// Whether nothing that is under way will free a segment.
    pub(super) fn is_full(&mut self) -> bool {
        let store = &self.store;
        let is_loading = store.pages.facts().loading > 0;
        if is_loading || !store.journal.is_idle() || !self.checkpoint.is_idle() {
            return false;
        }
        if !self.compaction.is_idle_at(store.journal.sequence()) {
            return false;
        }
        // A root frees what only the older one needs.
        if self.checkpoint.newest < store.journal.sequence() {
            self.checkpoint.want();
            return false;
        }
        true
    }

    /// Has a root written if that may free segments for what found none.
    pub(super) fn want_root_for_room(&mut self, need: Need) {
        let is_none_left = self.store.segments.free() <= self.reserve(need);
        if is_none_left && self.checkpoint.newest < self.store.journal.sequence() {
            self.checkpoint.want();
        }
    }

    /// Whether nothing is under way that would make room for what found none.
    pub(super) fn is_stuck(&self) -> bool {
        self.is_at_rest()
            && self.store.journal.is_idle()
            && self.checkpoint.is_idle()
            && self.checkpoint.newest >= self.store.journal.sequence()
    }

    /// Operations that wait for free segments are tried again, or, if none will be free, end with an error.
    pub(super) fn feed_starved(&mut self) {
        if self.work.starved.is_empty() || !self.work.ready.is_empty() || !self.is_full() {
            return;
        }
        for key in std::mem::take(&mut self.work.starved) {
            self.end_write(key, Some(crate::volume::api::ClientError::NoSpace));
        }
    }
}
