//! Which segments may be written to. Rule K2 of docs/cas.md.
//!
//! Must not know what is in a segment; what counts as free on disk is told by the volume.

use crate::array::mutation::{Mutation, is_off};
use crate::format::cas::SegmentIndex;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// See the head of this file.
#[derive(Default)]
pub(super) struct Segments {
    free: BTreeSet<SegmentIndex>,
    /// Where the search for the next one begins, so that all are written equally often.
    cursor: SegmentIndex,
    /// Pages in each metadata segment that a root names, the newest one or the one being written.
    pages: HashMap<SegmentIndex, u64>,
    /// Chunks in a segment whose records have not joined yet, and whether it is still being filled.
    held: HashMap<SegmentIndex, u32>,
}

impl Segments {
    /// Segments with these free, and these pages in metadata segments.
    pub(super) fn new(
        free: impl Iterator<Item = SegmentIndex>,
        pages: impl Iterator<Item = (SegmentIndex, u64)>,
    ) -> Segments {
        Segments { free: free.collect(), pages: pages.collect(), ..Segments::default() }
    }

    /// Free ones.
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    /// Which ones are free.
    pub(super) fn free_ones(&self) -> &BTreeSet<SegmentIndex> {
        &self.free
    }

    /// Pages in each metadata segment.
    pub(super) fn pages(&self) -> BTreeMap<SegmentIndex, u64> {
        self.pages.iter().map(|(segment, pages)| (*segment, *pages)).collect()
    }

    /// Segments in which chunks wait for their records.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// Metadata segments.
    pub(super) fn metadata(&self) -> usize {
        self.pages.len()
    }

    /// A free one, which is free no longer; none where no more than `reserve` are free.
    pub(super) fn take(&mut self, reserve: usize) -> Option<SegmentIndex> {
        let segment = self.next(reserve)?;
        self.free.remove(&segment);
        self.cursor = SegmentIndex(segment.0.wrapping_add(1));
        Some(segment)
    }

    /// The one that [`Segments::take`] would give.
    pub(super) fn next(&self, reserve: usize) -> Option<SegmentIndex> {
        if self.free.len() <= reserve {
            return None;
        }
        self.free.range(self.cursor..).next().or_else(|| self.free.first()).copied()
    }

    /// A segment is free again.
    pub(super) fn release(&mut self, segment: SegmentIndex) {
        let is_new = self.free.insert(segment);
        debug_assert!(is_new, "segment {segment:?} was free already");
        if is_off(Mutation::CasPagesReusedEarly) {
            self.cursor = segment;
        }
    }

    /// Free segments of this kind are not to be used.
    pub(super) fn set_aside(&mut self, is_bad: impl Fn(SegmentIndex) -> bool) {
        self.free.retain(|segment| !is_bad(*segment));
    }

    /// So many chunks in a segment wait for their records.
    pub(super) fn hold(&mut self, segment: SegmentIndex, chunks: u32) {
        *self.held.entry(segment).or_default() += chunks;
    }

    /// The record of a chunk in it has joined, or never will. Returns whether no other chunk in it waits.
    pub(super) fn let_go(&mut self, segment: SegmentIndex) -> bool {
        if let Some(held) = self.held.get_mut(&segment) {
            *held -= 1;
            if *held > 0 {
                return false;
            }
            self.held.remove(&segment);
        }
        true
    }

    /// Whether chunks in it wait for their records.
    pub(super) fn is_held(&self, segment: SegmentIndex) -> bool {
        self.held.contains_key(&segment)
    }

    /// A root that is being written names this many pages of a segment.
    pub(super) fn add_pages(&mut self, segment: SegmentIndex, pages: u64) {
        *self.pages.entry(segment).or_default() += pages;
    }

    /// No root names a page any more.
    pub(super) fn drop_page(&mut self, segment: SegmentIndex) {
        if let Some(pages) = self.pages.get_mut(&segment) {
            *pages -= 1;
            if *pages == 0 {
                self.pages.remove(&segment);
                self.release(segment);
            }
        }
    }

    /// Metadata segments in which few places are used, the emptiest first.
    pub(super) fn sparse(&self, below: u64) -> Vec<SegmentIndex> {
        let mut sparse: Vec<_> = self.pages.iter().filter(|(_, pages)| **pages < below).collect();
        sparse.sort_unstable_by_key(|(segment, pages)| (**pages, **segment));
        sparse.into_iter().map(|(segment, _)| *segment).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_go_round_and_the_reserve_stays() {
        let mut segments = Segments::new((2..6).map(SegmentIndex), [(SegmentIndex(9), 2)].into_iter());
        assert_eq!(segments.take(2), Some(SegmentIndex(2)));
        assert_eq!(segments.take(2), Some(SegmentIndex(3)));
        assert_eq!(segments.take(2), None);
        segments.release(SegmentIndex(2));
        assert_eq!(segments.take(0), Some(SegmentIndex(4)), "after the last one");
        segments.drop_page(SegmentIndex(9));
        assert_eq!(segments.sparse(2), [SegmentIndex(9)]);
        segments.drop_page(SegmentIndex(9));
        assert_eq!((segments.free(), segments.metadata()), (3, 0));
        segments.hold(SegmentIndex(7), 2);
        segments.let_go(SegmentIndex(7));
        assert!(segments.is_held(SegmentIndex(7)));
        segments.let_go(SegmentIndex(7));
        assert!(!segments.is_held(SegmentIndex(7)));
    }
}
