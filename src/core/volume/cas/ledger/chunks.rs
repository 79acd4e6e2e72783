//! Where chunks lie: records that store and move them, and that open and give up segments.
//!
//! A place of a segment is stored to once while the segment is open: `Open` empties its directory, and each
//! chunk then needs an empty place. So the directory of a segment names nothing from before it was opened.

use super::tally::{RAW_STORED, Tally, directory_places, holds_chunks, segment_entry};
use super::view::{Inconsistent, View};
use super::{Ledger, Plan};
use crate::format::cas::{CasRecord, ChunkHash, ChunkId, Moved, SegmentEntry, SegmentIndex, TableEntry};
use crate::volume::cas::place::{self, PageAccess};
use std::ops::Range;

impl Ledger {
    /// Checks that an id can be one.
    fn chunk_exists(&self, id: ChunkId) -> Result<(), Inconsistent> {
        if (1..self.bounds.ids).contains(&id.0) { Ok(()) } else { Err(Inconsistent::NoChunk(id)) }
    }

    fn segment<P: PageAccess>(&self, pages: &P, segment: SegmentIndex) -> Result<SegmentEntry, Inconsistent> {
        let exists = segment.0 < self.bounds.segments;
        if exists { Ok(segment_entry(pages, segment)) } else { Err(Inconsistent::NoSegment(segment)) }
    }

    /// Checks that a run of blocks of a segment can take chunks.
    fn check_places<P: PageAccess>(
        &self,
        view: &mut View<P>,
        segment: SegmentIndex,
        block: u32,
        len: usize,
    ) -> Result<(), Inconsistent> {
        self.segment(view.pages, segment)?;
        holds_chunks(view.pages, segment)?;
        let run = self.run(segment, block, len)?;
        for (block, (name, at)) in
            run.clone().zip(directory_places(segment, self.bounds.blocks_per_segment, run))
        {
            if view.page(name).is_some_and(|page| page.directory_id(at) != 0) {
                return Err(Inconsistent::Place { segment, block });
            }
        }
        Ok(())
    }

    fn run(&self, segment: SegmentIndex, block: u32, len: usize) -> Result<Range<u32>, Inconsistent> {
        let end = u32::try_from(len).ok().and_then(|len| block.checked_add(len));
        let end = end.filter(|end| *end <= self.bounds.blocks_per_segment);
        end.map(|end| block..end).ok_or(Inconsistent::Place { segment, block })
    }

    pub(super) fn plan_store<P: PageAccess>(
        &self,
        view: &mut View<P>,
        tally: &mut Tally,
        (segment, block): (SegmentIndex, u32),
        chunks: &[(ChunkId, ChunkHash)],
    ) -> Result<(), Inconsistent> {
        self.check_places(view, segment, block, chunks.len())?;
        for (id, _) in chunks {
            self.chunk_exists(*id)?;
            tally.store(view, *id, segment)?;
            view.page(place::of_table(*id).0);
        }
        Ok(())
    }

    pub(super) fn plan_move<P: PageAccess>(
        &self,
        view: &mut View<P>,
        tally: &mut Tally,
        (segment, block): (SegmentIndex, u32),
        chunks: &[Moved],
    ) -> Result<(), Inconsistent> {
        self.check_places(view, segment, block, chunks.len())?;
        let mut ids: Vec<_> = chunks.iter().map(|moved| moved.id).collect();
        ids.sort_unstable();
        if let Some(twice) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Inconsistent::ChunkElsewhere(twice[0]));
        }
        for moved in chunks {
            self.chunk_exists(moved.id)?;
            self.segment(view.pages, moved.segment)?;
            tally.relocate(view, moved.id, moved.segment, segment)?;
            let (name, at) = place::of_table(moved.id);
            let Some(page) = view.page(name) else { continue };
            let entry = page.table_entry(at);
            let is_there = moved.block < self.bounds.blocks_per_segment
                && entry.offset.get() == raw_offset(moved.block)
                && entry.algorithm == 0;
            if !is_there {
                return Err(Inconsistent::ChunkElsewhere(moved.id));
            }
        }
        Ok(())
    }

    pub(super) fn plan_open<P: PageAccess>(
        &self,
        view: &mut View<P>,
        segment: SegmentIndex,
        kind: u8,
    ) -> Result<(), Inconsistent> {
        if kind != SegmentEntry::DATA && kind != SegmentEntry::JOURNAL {
            return Err(Inconsistent::SegmentKind { segment, kind });
        }
        let entry = self.segment(view.pages, segment)?;
        if entry.kind != SegmentEntry::FREE {
            return Err(Inconsistent::SegmentKind { segment, kind: entry.kind });
        }
        self.check_empty(segment, &entry)?;
        let all = 0..self.bounds.blocks_per_segment;
        for (name, _) in directory_places(segment, self.bounds.blocks_per_segment, all) {
            view.page(name);
        }
        Ok(())
    }

    pub(super) fn plan_give_up<P: PageAccess>(
        &self,
        view: &View<P>,
        segment: SegmentIndex,
    ) -> Result<(), Inconsistent> {
        let entry = self.segment(view.pages, segment)?;
        holds_chunks(view.pages, segment)?;
        self.check_empty(segment, &entry)
    }

    fn check_empty(&self, segment: SegmentIndex, entry: &SegmentEntry) -> Result<(), Inconsistent> {
        let live = entry.live.get();
        if live == 0 { Ok(()) } else { Err(Inconsistent::SegmentInUse { segment, live }) }
    }

    /// Puts what a record says of places into the pages.
    pub(super) fn put_chunks<P: PageAccess>(&self, pages: &mut P, sequence: u64, record: &CasRecord) {
        match record {
            CasRecord::Store { segment, block, chunks } => {
                for (block, (id, hash)) in (*block..).zip(chunks) {
                    self.put_in_directory(pages, *segment, block, *id);
                    let (name, at) = place::of_table(*id);
                    pages.change(name).set_table_entry(at, TableEntry::raw(*hash, raw_offset(block)));
                }
            }
            CasRecord::Move { segment, block, chunks } => {
                for (block, moved) in (*block..).zip(chunks) {
                    self.put_in_directory(pages, *segment, block, moved.id);
                    let (name, at) = place::of_table(moved.id);
                    let page = pages.change(name);
                    let mut entry = page.table_entry(at);
                    entry.offset = raw_offset(block).into();
                    page.set_table_entry(at, entry);
                }
            }
            CasRecord::Open { segment, kind } => {
                for block in 0..self.bounds.blocks_per_segment {
                    self.put_in_directory(pages, *segment, block, ChunkId(0));
                }
                set_segment(pages, *segment, SegmentEntry::new(*kind, sequence));
            }
            CasRecord::GiveUp { segment } => {
                set_segment(pages, *segment, SegmentEntry::new(SegmentEntry::FREE, 0));
            }
            _ => unreachable!("the other records are not about places"),
        }
    }

    fn put_in_directory<P: PageAccess>(&self, pages: &mut P, segment: SegmentIndex, block: u32, id: ChunkId) {
        let (name, at) = place::of_directory(segment, self.bounds.blocks_per_segment, block);
        pages.change(name).set_directory_id(at, id.0);
    }

    /// Checks ids that a map is to name, and counts them.
    pub(super) fn count_all<P: PageAccess>(
        &self,
        view: &mut View<P>,
        plan: &mut Plan,
        ids: &[ChunkId],
    ) -> Result<(), Inconsistent> {
        for id in ids {
            self.chunk_exists(*id)?;
            plan.tally.count(view, *id)?;
        }
        Ok(())
    }
}

/// Where a chunk that is not compressed begins, in units of 16 bytes.
fn raw_offset(block: u32) -> u32 {
    block * u32::from(RAW_STORED)
}

fn set_segment<P: PageAccess>(pages: &mut P, segment: SegmentIndex, entry: SegmentEntry) {
    let (name, at) = place::of_segment(segment);
    pages.change(name).set_segment_entry(at, entry);
}
