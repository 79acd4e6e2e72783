//! What a record does to the counts of chunks, to what is live in segments, and to the number of used ids:
//! worked out beside the pages first, then written to them.

use super::Effects;
use super::view::{Inconsistent, View, resident};
use crate::format::cas::{ChunkId, PageName, SegmentEntry, SegmentIndex, StateEntry};
use crate::volume::cas::place::{self, PageAccess, Place};
use std::collections::BTreeMap;

/// Units of 16 bytes of a chunk that is not compressed.
pub(super) const RAW_STORED: u16 =
    (crate::format::cas::CAS_BLOCK_BYTES / crate::format::cas::CHUNK_ALIGN) as u16;

/// Chunks in the order of their ids, segments in that of their numbers: what is told of them is the same
/// whenever the same record is applied.
#[derive(Default)]
pub(super) struct Tally {
    chunks: BTreeMap<ChunkId, Chunk>,
    /// Units in use: before, and after.
    live: BTreeMap<SegmentIndex, (u32, u32)>,
    used: BTreeMap<Place, u16>,
    freed: Vec<ChunkId>,
}

#[derive(Clone, Copy)]
struct Chunk {
    count: u16,
    stored: u16,
    segment: SegmentIndex,
}

impl Tally {
    /// The chunk as it is by now; none if its page is not in memory.
    fn chunk<P: PageAccess>(&mut self, view: &mut View<P>, id: ChunkId) -> Option<Chunk> {
        if let Some(chunk) = self.chunks.get(&id) {
            return Some(*chunk);
        }
        let (name, at) = place::of_state(id);
        let state = view.page(name)?.state_entry(at);
        let chunk = Chunk {
            count: state.count.get(),
            stored: state.stored.get(),
            segment: SegmentIndex(state.segment.get()),
        };
        Some(chunk)
    }

    /// Adds to or takes from what is live in a segment.
    fn live<P: PageAccess>(
        &mut self,
        view: &View<P>,
        segment: SegmentIndex,
        change: impl FnOnce(u32) -> Option<u32>,
    ) -> Result<(), Inconsistent> {
        let (_, live) = self.live.entry(segment).or_insert_with(|| {
            let live = segment_entry(view.pages, segment).live.get();
            (live, live)
        });
        *live = change(*live).ok_or(Inconsistent::Live(segment))?;
        Ok(())
    }

    fn used<P: PageAccess>(
        &mut self,
        view: &View<P>,
        id: ChunkId,
        change: impl FnOnce(u16) -> Option<u16>,
    ) -> Result<(), Inconsistent> {
        let place @ (name, at) = place::of_used(id);
        let used = self.used.entry(place).or_insert_with(|| resident(view.pages, name).used(at));
        *used = change(*used).ok_or(Inconsistent::Used(id))?;
        Ok(())
    }

    /// A free id becomes a chunk that nothing names yet.
    pub(super) fn store<P: PageAccess>(
        &mut self,
        view: &mut View<P>,
        id: ChunkId,
        segment: SegmentIndex,
    ) -> Result<(), Inconsistent> {
        let Some(chunk) = self.chunk(view, id) else { return Ok(()) };
        if chunk.count != 0 || chunk.stored != 0 {
            return Err(Inconsistent::ChunkTaken(id));
        }
        self.chunks.insert(id, Chunk { count: 0, stored: RAW_STORED, segment });
        self.used(view, id, |used| used.checked_add(1))
    }

    /// One more entry names a chunk.
    pub(super) fn count<P: PageAccess>(
        &mut self,
        view: &mut View<P>,
        id: ChunkId,
    ) -> Result<(), Inconsistent> {
        let Some(mut chunk) = self.chunk(view, id) else { return Ok(()) };
        if chunk.stored == 0 {
            return Err(Inconsistent::ChunkVoid(id));
        }
        if chunk.count == 0 {
            holds_chunks(view.pages, chunk.segment)?;
            self.live(view, chunk.segment, |live| live.checked_add(u32::from(chunk.stored)))?;
        }
        chunk.count = chunk.count.checked_add(1).ok_or(Inconsistent::ChunkFull(id))?;
        self.chunks.insert(id, chunk);
        Ok(())
    }

    /// One entry less names a chunk; at none, the id is free.
    pub(super) fn discount<P: PageAccess>(
        &mut self,
        view: &mut View<P>,
        id: ChunkId,
    ) -> Result<(), Inconsistent> {
        let Some(mut chunk) = self.chunk(view, id) else { return Ok(()) };
        chunk.count = chunk.count.checked_sub(1).ok_or(Inconsistent::ChunkUncounted(id))?;
        if chunk.count == 0 {
            self.live(view, chunk.segment, |live| live.checked_sub(u32::from(chunk.stored)))?;
            self.used(view, id, |used| used.checked_sub(1))?;
            self.freed.push(id);
            chunk = Chunk { count: 0, stored: 0, segment: SegmentIndex(0) };
        }
        self.chunks.insert(id, chunk);
        Ok(())
    }

    /// A chunk that is used and not compressed moves to another segment.
    pub(super) fn relocate<P: PageAccess>(
        &mut self,
        view: &mut View<P>,
        id: ChunkId,
        from: SegmentIndex,
        to: SegmentIndex,
    ) -> Result<(), Inconsistent> {
        let Some(mut chunk) = self.chunk(view, id) else { return Ok(()) };
        if chunk.count == 0 || chunk.segment != from || chunk.stored != RAW_STORED {
            return Err(Inconsistent::ChunkElsewhere(id));
        }
        self.live(view, from, |live| live.checked_sub(u32::from(chunk.stored)))?;
        self.live(view, to, |live| live.checked_add(u32::from(chunk.stored)))?;
        chunk.segment = to;
        self.chunks.insert(id, chunk);
        Ok(())
    }

    /// Writes it all to the pages.
    pub(super) fn commit<P: PageAccess>(self, pages: &mut P, effects: &mut Effects) {
        for (id, chunk) in self.chunks {
            let (name, at) = place::of_state(id);
            pages.change(name).set_state_entry(at, StateEntry::new(chunk.count, chunk.stored, chunk.segment));
        }
        for (segment, (before, after)) in self.live {
            let (name, at) = place::of_segment(segment);
            let page = pages.change(name);
            let mut entry = page.segment_entry(at);
            entry.live = after.into();
            page.set_segment_entry(at, entry);
            if before > 0 && after == 0 {
                effects.emptied.push(segment);
            }
        }
        for ((name, at), used) in self.used {
            pages.change(name).set_used(at, used);
        }
        effects.freed.extend(self.freed);
    }
}

/// A segment that exists.
pub(super) fn segment_entry<P: PageAccess>(pages: &P, segment: SegmentIndex) -> SegmentEntry {
    let (name, at) = place::of_segment(segment);
    resident(pages, name).segment_entry(at)
}

/// Checks that chunks may lie in a segment.
pub(super) fn holds_chunks<P: PageAccess>(pages: &P, segment: SegmentIndex) -> Result<(), Inconsistent> {
    let kind = segment_entry(pages, segment).kind;
    let holds = kind == SegmentEntry::DATA || kind == SegmentEntry::JOURNAL;
    if holds { Ok(()) } else { Err(Inconsistent::SegmentKind { segment, kind }) }
}

/// The page of the directory, and the place in it, of each block of a run of a segment.
pub(super) fn directory_places(
    segment: SegmentIndex,
    blocks_per_segment: u32,
    run: std::ops::Range<u32>,
) -> impl Iterator<Item = (PageName, usize)> {
    run.map(move |block| place::of_directory(segment, blocks_per_segment, block))
}
