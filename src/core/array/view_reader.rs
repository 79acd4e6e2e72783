//! Reads of blocks on other threads than the array's: where the blocks are and what they must hash to, as the
//! array's view shows it, and the proof that what was read there is right. Where the hashes of a small read
//! are not in memory, the view names the version of their page, and the reader reads that too.
//!
//! A read that cannot be planned, whose device gives an error, or that does not verify goes to the array,
//! which reads under its locks, decodes and mends. Why the rest is right although it was read without a lock:
//! the head of `calpe_view`. Must not know of the array's state beyond the view.

use crate::array::Array;
use crate::array::geometry::Map;
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::store::shown::hash_of_shown;
use crate::array::pages::store::versions::PlacedVersion;
use crate::block_io::DeviceId;
use crate::codec::{BlockHasher, keyed_hash_each};
use crate::format::{HashedPage, LogKey, PAGE_BYTES, Page, PageIndex, PageLayout, hash_of_entry};
use crate::units::{BlockHash, ByteOffset, ColumnIndex, ROW_BYTES, SlotIndex, Timestamp, VolumeOffset};
use calpe_view::{Look, Orphan, Ticket, View};
use std::ops::{DerefMut, Range};
use std::sync::Arc;
use uuid::Uuid;

const BLOCK: usize = ROW_BYTES as usize;

/// Longest read for which pages are read as well. Longer ones cost the array little for each byte, and it
/// sees by them which streams there are.
const COLD_BYTES_MAX: usize = 4 * BLOCK;

/// Pages that are hashed side by side.
const PAGES_AT_ONCE: usize = 16;

/// Stands for a hash until its page was read: no content has it.
const NOT_READ: BlockHash = BlockHash::UNWRITTEN;

/// What a thread needs to read blocks of an array by itself.
#[derive(Clone, Debug)]
pub struct ViewReader {
    view: Arc<View>,
    map: Map,
    layout: PageLayout,
    /// Where slots begin on every device.
    data_offset: ByteOffset,
    checksums: Option<BlockHasher>,
    /// Where pages begin on every device, and what they must have been written with.
    pages_offset: ByteOffset,
    key: LogKey,
    array: Uuid,
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
    pages: Vec<PlannedPage>,
    /// Counts planned pages: which copy is read next.
    turns: usize,
}

/// A page of hashes that is read for a planned read.
#[derive(Clone, Debug)]
pub struct PlannedPage {
    piece: ReadPiece,
    page: PageIndex,
    version: PlacedVersion,
    slot: SlotIndex,
    column: ColumnIndex,
    /// The rows of the column whose hashes it has.
    rows: Range<usize>,
    /// The first of these hashes in the plan.
    first: usize,
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
    pages: usize,
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

    /// The pages that are to be read as well, see [`ViewReader::learn`].
    #[must_use]
    pub fn pages(&self) -> &[PlannedPage] {
        &self.pages
    }

    /// Forgets everything that is planned.
    pub fn clear(&mut self) {
        self.truncate(PlanExtent::default());
    }

    /// How much is planned.
    #[must_use]
    pub fn extent(&self) -> PlanExtent {
        PlanExtent {
            pieces: self.pieces.len(),
            hashes: self.hashes.len(),
            tickets: self.tickets.len(),
            pages: self.pages.len(),
        }
    }

    /// Forgets what was planned since.
    pub fn truncate(&mut self, extent: PlanExtent) {
        self.pieces.truncate(extent.pieces);
        self.hashes.truncate(extent.hashes);
        self.tickets.truncate(extent.tickets);
        self.pages.truncate(extent.pages);
    }

    /// Has one of the blocks of a page, which reads as `page`, hash to what that says.
    fn learn(&mut self, nth: usize, layout: &PageLayout, page: &HashedPage<'_>) {
        let PlannedPage { slot, column, ref rows, first, .. } = self.pages[nth];
        for (row, hash) in rows.clone().zip(&mut self.hashes[first..]) {
            let entry = hash_of_entry(page.entry(layout.hash_entry(slot, row, usize::from(column.0)).1));
            *hash = if entry.is_stored() { entry } else { NOT_READ };
        }
    }
}

impl PlannedPage {
    /// Where the page is read.
    #[must_use]
    pub fn piece(&self) -> ReadPiece {
        self.piece
    }

    /// Its number among all pages of the lane.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.page.0
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

    /// Most pages that the array keeps in memory.
    #[must_use]
    pub fn pages_kept_max(&self) -> usize {
        self.view.frames() as usize
    }

    /// Completes the plan with the pages that were read for it, in its order: they have the hashes of blocks.
    /// A plan with pages does not verify without. False: the array has to be asked, because a page is not
    /// what the view has named.
    #[must_use]
    pub fn learn<B: DerefMut<Target = [u8]>>(&self, plan: &mut ReadPlan, pages: &mut [B]) -> bool {
        if pages.len() != plan.pages.len() || pages.iter().any(|page| page.len() != PAGE_BYTES) {
            return false;
        }
        let (mut hashes, mut nth, mut are_right) = ([[0; 16]; PAGES_AT_ONCE], 0, true);
        for some in pages.chunks_mut(PAGES_AT_ONCE) {
            for (hash, page) in hashes.iter_mut().zip(&mut *some) {
                *hash = Page::take_hash(page.first_chunk_mut().expect("as many bytes as a page has"));
            }
            let bytes_of = |page| B::deref(page).first_chunk().expect("as many bytes as a page has");
            let mut wanted = hashes.iter();
            keyed_hash_each(&self.key.0, some.iter().map(bytes_of), |hash| {
                are_right &= wanted.next().is_some_and(|wanted| hash.starts_with(wanted));
            });
            for bytes in some.iter().map(bytes_of) {
                let PlannedPage { page, version, .. } = plan.pages[nth];
                let found = HashedPage::of(self.array, page, bytes).filter(|found| {
                    version.is(found.version()) || is_off(Mutation::ViewPageVersionNotCompared)
                });
                let Some(found) = found.filter(|_| are_right) else { return false };
                plan.learn(nth, &self.layout, &found);
                nth += 1;
            }
        }
        true
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
                self.plan_hashes(look, part.column, rows, len <= COLD_BYTES_MAX, plan)?;
            }
        }
        Some(())
    }

    /// Adds the hashes of rows of a column, or the pages that have them.
    fn plan_hashes(
        &self,
        look: &Look<'_>,
        column: ColumnIndex,
        rows: Range<usize>,
        may_be_cold: bool,
        plan: &mut ReadPlan,
    ) -> Option<()> {
        let slot = SlotIndex(look.slot());
        let entry_of = |row: usize| self.layout.hash_entry(slot, row, usize::from(column.0));
        let mut row = rows.start;
        while row < rows.end {
            let (page, _) = entry_of(row);
            let shown_as = page.0 - self.layout.map_pages();
            let entries = (row..rows.end).map(entry_of).take_while(|(other, _)| *other == page);
            let first = plan.hashes.len();
            let add = |hash| plan.hashes.push(hash_of_shown(hash));
            if look.hashes(shown_as, entries.clone().map(|(_, entry)| entry), add).is_none() {
                let version = look.on_members(shown_as).filter(|_| may_be_cold).map(PlacedVersion)?;
                let end = row + entries.count();
                plan.hashes.resize(first + end - row, NOT_READ);
                plan.hashes[first..].fill(NOT_READ);
                plan.turns = plan.turns.wrapping_add(1);
                let piece = self.piece_of_page(look, page, version, plan.turns)?;
                plan.pages.push(PlannedPage { piece, page, version, slot, column, rows: row..end, first });
            }
            row += plan.hashes.len() - first;
        }
        Some(())
    }

    /// Where a page is read: from one of its copies whose member serves. They take turns, so that a copy that
    /// has missed a write does not stay unseen.
    fn piece_of_page(
        &self,
        look: &Look<'_>,
        page: PageIndex,
        version: PlacedVersion,
        turn: usize,
    ) -> Option<ReadPiece> {
        let copies = || self.layout.copies(page).enumerate();
        let count = copies().count();
        let in_turn = copies().chain(copies()).skip(turn % count).take(count);
        let mut served = in_turn.filter_map(|(copy, (member, offset))| {
            let device = DeviceId(look.device(usize::from(member.0))?);
            let within = offset + (version.place(copy) * PAGE_BYTES) as u64;
            Some(ReadPiece { device, offset: self.pages_offset.plus(within), len: PAGE_BYTES })
        });
        served.next()
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
            pages_offset: self.pages.offset(),
            key: *self.pages.store().key(),
            array: self.pages.store().array(),
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
