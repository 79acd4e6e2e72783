//! Reads of blocks on other threads than the array's: where the blocks are and what they must hash to, as the
//! array's view shows it, and the proof that what was read there is right.
//!
//! A read that cannot be planned, whose device gives an error, or that does not verify goes to the array,
//! which reads under its locks, decodes and mends. Why the rest is right although it was read without a lock:
//! the head of `calpe_view`. Must not know of the array's state beyond the view.

use crate::array::Array;
use crate::array::geometry::Map;
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::store::shown::hash_of_shown;
use crate::block_io::DeviceId;
use crate::codec::BlockHasher;
use crate::format::PageLayout;
use crate::units::{BlockHash, ByteOffset, ColumnIndex, ROW_BYTES, SlotIndex, Timestamp, VolumeOffset};
use calpe_view::{Look, Orphan, Ticket, View};
use std::ops::Range;
use std::sync::Arc;

const BLOCK: usize = ROW_BYTES as usize;

/// What a thread needs to read blocks of an array by itself.
#[derive(Clone, Debug)]
pub struct ViewReader {
    view: Arc<View>,
    map: Map,
    layout: PageLayout,
    /// Where slots begin on every device.
    data_offset: ByteOffset,
    checksums: Option<BlockHasher>,
}

/// A read that is planned: its pieces in the order of the volume, and what is known of them. It can be used
/// for one read after another without taking memory.
#[derive(Clone, Debug, Default)]
pub struct ReadPlan {
    pieces: Vec<ReadPiece>,
    /// The hashes of all blocks, in their order; none in an array without checksums.
    hashes: Vec<BlockHash>,
    /// A ticket for each stripe.
    tickets: Vec<Ticket>,
}

/// Adjacent bytes of a read on one device.
// Plain data: one operation of a planned read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadPiece {
    /// The device.
    pub device: DeviceId,
    /// Where they are on it.
    pub offset: ByteOffset,
    /// How many.
    pub len: usize,
}

/// How much of a plan there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanExtent {
    pieces: usize,
    hashes: usize,
    tickets: usize,
}

/// The read has to be made by the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("only the array can read this")]
pub struct AskArray;

impl ReadPlan {
    /// Its pieces, in the order of the volume.
    #[must_use]
    pub fn pieces(&self) -> &[ReadPiece] {
        &self.pieces
    }

    /// Forgets everything that is planned.
    pub fn clear(&mut self) {
        self.truncate(PlanExtent::default());
    }

    /// How much is planned.
    #[must_use]
    pub fn extent(&self) -> PlanExtent {
        PlanExtent { pieces: self.pieces.len(), hashes: self.hashes.len(), tickets: self.tickets.len() }
    }

    /// Forgets what was planned since.
    pub fn truncate(&mut self, extent: PlanExtent) {
        self.pieces.truncate(extent.pieces);
        self.hashes.truncate(extent.hashes);
        self.tickets.truncate(extent.tickets);
    }
}

impl ViewReader {
    /// Plans a read of whole blocks: `len` bytes at `offset` of the volume. The moment of the read is that of
    /// this call, whenever the devices are read.
    ///
    /// # Errors
    /// When the array has to be asked. What is in `plan` means nothing then.
    ///
    /// # Panics
    /// When the range is not of whole blocks.
    pub fn plan(&self, offset: VolumeOffset, len: usize, plan: &mut ReadPlan) -> Result<(), AskArray> {
        plan.clear();
        self.plan_also(offset, len, plan)
    }

    /// The same, added to what is planned already.
    ///
    /// # Errors
    /// When the array has to be asked. The plan is then as it was.
    ///
    /// # Panics
    /// As [`ViewReader::plan`].
    pub fn plan_also(&self, offset: VolumeOffset, len: usize, plan: &mut ReadPlan) -> Result<(), AskArray> {
        assert!(offset.0.is_multiple_of(ROW_BYTES) && len.is_multiple_of(BLOCK), "whole blocks are read");
        let before = plan.extent();
        let planned = self.plan_stripes(offset.0, len, plan).ok_or(AskArray);
        if planned.is_err() {
            plan.truncate(before);
        }
        planned
    }

    fn plan_stripes(&self, mut at: u64, len: usize, plan: &mut ReadPlan) -> Option<()> {
        let (stripe_bytes, end) = (self.map.stripe_bytes(), at + len as u64);
        while at < end {
            let (stripe, within) = (at / stripe_bytes as u64, (at % stripe_bytes as u64) as usize);
            let part = (stripe_bytes - within).min((end - at) as usize);
            let look = self.view.look(stripe)?;
            self.plan_stripe(&look, within, part, plan)?;
            plan.tickets.push(look.end()?);
            at += part as u64;
        }
        Some(())
    }

    /// Whether `buffers`, which were filled as planned, together hold what the volume held at the moment of
    /// the plan.
    pub fn verify<'a>(&self, plan: &ReadPlan, buffers: impl Iterator<Item = &'a [u8]> + Clone) -> bool {
        ViewReader::verify_all(std::iter::once((self, plan)), buffers)
    }

    /// The same of several plans of lanes of one array, with the buffers of all in their order: many blocks
    /// are hashed side by side.
    pub fn verify_all<'p, 'b>(
        plans: impl Iterator<Item = (&'p ViewReader, &'p ReadPlan)> + Clone,
        buffers: impl Iterator<Item = &'b [u8]> + Clone,
    ) -> bool {
        let len = buffers.clone().map(<[u8]>::len).sum::<usize>();
        let pieces = plans.clone().flat_map(|(_, plan)| &plan.pieces);
        let is_whole = len == pieces.map(|piece| piece.len).sum::<usize>();
        let hasher = plans.clone().next().and_then(|(reader, _)| reader.checksums);
        let have_hashes = hasher.is_none_or(|hasher| {
            let mut wanted = plans.clone().flat_map(|(_, plan)| &plan.hashes);
            let mut have = wanted.clone().count() * BLOCK == len;
            let blocks = buffers.flat_map(|buffer| buffer.as_chunks::<BLOCK>().0);
            hasher.hash_each(Counted { blocks, left: len / BLOCK }, |hash| {
                have &= wanted.next() == Some(&hash)
            });
            have
        });
        let mut plans = plans;
        is_whole && have_hashes && plans.all(|(reader, plan)| reader.still_holds(plan))
    }

    /// The same where others have hashed all blocks of the buffers, of `len` bytes, in their order.
    #[must_use]
    pub fn verify_hashes(&self, plan: &ReadPlan, len: usize, hashes: &[BlockHash]) -> bool {
        let planned: usize = plan.pieces.iter().map(|piece| piece.len).sum();
        self.checksums.is_some()
            && (len, hashes.len() * BLOCK) == (planned, planned)
            && plan.hashes == hashes
            && self.still_holds(plan)
    }

    /// What blocks are hashed with, if they are.
    #[must_use]
    pub fn hasher(&self) -> Option<BlockHasher> {
        self.checksums
    }

    /// Has all reads go to the array until what is returned is dropped: a request of a client that is gone is
    /// still under way to it.
    #[must_use]
    pub fn orphan(&self) -> Orphan {
        self.view.orphan()
    }

    /// Whether nothing has changed since the plan, where hashes alone do not prove that.
    fn still_holds(&self, plan: &ReadPlan) -> bool {
        self.checksums == Some(BlockHasher::Blake3)
            || is_off(Mutation::ViewTicketNotCompared)
            || plan.tickets.iter().all(|ticket| self.view.still(ticket))
    }

    /// Plans a byte range of a stripe.
    fn plan_stripe(&self, look: &Look<'_>, within: usize, len: usize, plan: &mut ReadPlan) -> Option<()> {
        let slot = SlotIndex(look.slot());
        for part in self.map.columns(within, len) {
            let device = DeviceId(look.device(usize::from(self.map.member_of(slot, part.column).0))?);
            let offset = self.map.device_offset(self.data_offset, slot, part.range.start);
            plan.pieces.push(ReadPiece { device, offset, len: part.range.len() });
            if self.checksums.is_some() {
                let rows = part.range.start / BLOCK..part.range.end / BLOCK;
                self.plan_hashes(look, part.column, rows, &mut plan.hashes)?;
            }
        }
        Some(())
    }

    /// Adds the hashes of rows of a column.
    fn plan_hashes(
        &self,
        look: &Look<'_>,
        column: ColumnIndex,
        rows: Range<usize>,
        hashes: &mut Vec<BlockHash>,
    ) -> Option<()> {
        let entry_of =
            |row: usize| self.layout.hash_entry(SlotIndex(look.slot()), row, usize::from(column.0));
        let mut row = rows.start;
        while row < rows.end {
            let (page, _) = entry_of(row);
            let shown_as = page.0 - self.layout.map_pages();
            let entries = (row..rows.end).map(entry_of).take_while(|(other, _)| *other == page);
            let before = hashes.len();
            look.hashes(shown_as, entries.map(|(_, entry)| entry), |hash| hashes.push(hash_of_shown(hash)))?;
            row += hashes.len() - before;
        }
        Some(())
    }
}

impl Array {
    /// For reads on other threads.
    #[must_use]
    pub fn view_reader(&self) -> ViewReader {
        ViewReader {
            view: Arc::clone(self.pages.view()),
            map: self.core.map,
            layout: *self.pages.store().layout(),
            data_offset: self.core.shape.data_offset,
            checksums: self.pages.checksums(),
        }
    }

    /// Clients have read on other threads: passes leave them room.
    pub fn read_elsewhere(&mut self, now: Timestamp) {
        self.core.now = now;
        self.core.load.last_client = now;
    }

    /// Checks that readers on other threads are shown the pages as they are.
    #[cfg(test)]
    pub(crate) fn check_shown(&self) {
        self.pages.store().check_shown();
    }

    /// Shows readers on other threads which devices are in service, and whether they may read at all.
    pub(super) fn show(&mut self) {
        let is_open = self.redo.is_serving() && !self.core.is_failed() && self.core.stop.stopping.is_none();
        if let Some(devices) = self.core.changed_devices()
            && !is_off(Mutation::ViewMembersLate)
        {
            self.pages.show_members(devices);
        }
        self.pages.serve_elsewhere(is_open);
    }
}

/// An iterator with a known length.
struct Counted<I> {
    blocks: I,
    left: usize,
}

impl<I: Iterator> Iterator for Counted<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        self.left = self.left.saturating_sub(1);
        self.blocks.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<I: Iterator> ExactSizeIterator for Counted<I> {}
