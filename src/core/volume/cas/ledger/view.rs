//! The pages as a plan reads them, and what a plan can find wrong.

use crate::format::cas::{CatalogueSlot, CatalogueState, ChunkId, PageName, RawCasPage, SegmentIndex};
use crate::volume::cas::place::PageAccess;
use std::collections::BTreeSet;

/// The pages before a record changes them. Notes which of those that are needed are not in memory.
pub(super) struct View<'a, P> {
    pub(super) pages: &'a P,
    wanted: BTreeSet<PageName>,
}

impl<'a, P: PageAccess> View<'a, P> {
    pub(super) fn new(pages: &'a P) -> View<'a, P> {
        View { pages, wanted: BTreeSet::new() }
    }

    /// A page that the record needs; none if it is not in memory, which is noted.
    pub(super) fn page(&mut self, name: PageName) -> Option<&'a RawCasPage> {
        let page = self.pages.page(name);
        if page.is_none() {
            self.wanted.insert(name);
        }
        page
    }

    /// What was needed and is not in memory.
    pub(super) fn wanted(self) -> BTreeSet<PageName> {
        self.wanted
    }
}

/// A page of a space that is always in memory.
///
/// # Panics
/// When it is not.
pub(super) fn resident<P: PageAccess>(pages: &P, name: PageName) -> &RawCasPage {
    pages.page(name).expect("the pages of this space are always in memory")
}

/// A record, or the pages, do not hold what the record relies on. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::volume::cas) enum Inconsistent {
    #[error("there is no segment {}", .0.0)]
    NoSegment(SegmentIndex),
    #[error("segment {} is of kind {kind}", .segment.0)]
    SegmentKind { segment: SegmentIndex, kind: u8 },
    #[error("{live} units of segment {} are in use", .segment.0)]
    SegmentInUse { segment: SegmentIndex, live: u32 },
    #[error("block {block} of segment {} is beyond its end, or was stored to before", .segment.0)]
    Place { segment: SegmentIndex, block: u32 },
    #[error("there is no chunk {}", .0.0)]
    NoChunk(ChunkId),
    #[error("chunk {} is stored already", .0.0)]
    ChunkTaken(ChunkId),
    #[error("chunk {} is not stored", .0.0)]
    ChunkVoid(ChunkId),
    #[error("chunk {} has the highest count", .0.0)]
    ChunkFull(ChunkId),
    #[error("chunk {} has no count left to lose", .0.0)]
    ChunkUncounted(ChunkId),
    #[error("chunk {} is not where the record says", .0.0)]
    ChunkElsewhere(ChunkId),
    #[error("the live bytes of segment {} are less than those of its chunks", .0.0)]
    Live(SegmentIndex),
    #[error("the count of used ids near chunk {} is wrong", .0.0)]
    Used(ChunkId),
    #[error("slot {} of the catalogue does not exist or is damaged", .0.0)]
    NoSlot(CatalogueSlot),
    #[error("slot {} of the catalogue is {state:?}", .slot.0)]
    SlotState { slot: CatalogueSlot, state: CatalogueState },
    #[error("{blocks} blocks are not a size for slot {}, or beyond its end", .slot.0)]
    Blocks { slot: CatalogueSlot, blocks: u64 },
    #[error("slot {} of the catalogue has another number of mapped blocks", .0.0)]
    Mapped(CatalogueSlot),
    #[error("the name for slot {} is not one, or is taken", .0.0)]
    Name(CatalogueSlot),
    #[error("slot {} of the catalogue depends on another one, or another one on it", .0.0)]
    Linked(CatalogueSlot),
    #[error("no number is left for a snapshot")]
    Numbers,
    #[error("the deletion of slot {} cannot go on to block {upto}", .slot.0)]
    Step { slot: CatalogueSlot, upto: u64 },
}
