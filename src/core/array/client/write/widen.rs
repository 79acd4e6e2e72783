//! Large writes of parts of a stripe, written as whole stripes: what they leave as it is, is read, verified
//! and goes with them to a free slot. That moves fewer bytes than to write their part and new parity twice,
//! to the log and in place.
//!
//! All rows are locked, since all blocks move. Blocks that were never written stay so. Where a block cannot
//! be had, where there is no slot to spare or no room, the write goes through the log as every other one.

use crate::array::client::fetch::{Blended, Fetch, FetchRules, Fetched};
use crate::array::client::plan::{Band, ParityPath};
use crate::array::client::write::{BLOCK, Flow, LoggedWrite, Stage, Way, WholeStripe, Work, parity};
use crate::array::mutation::{Mutation, is_off};
use crate::array::{Array, Core};
use crate::block_io::{Buf, BufMut};
use crate::units::BlockHash;
use std::ops::Range;

/// What a stripe takes along that its write left as it was.
#[derive(Default)]
pub(super) struct TakenAlong {
    /// Hashes of the data blocks, by column, then row; none for a block that is new. A block that was never
    /// written has the hash that says so.
    hashes: Vec<Option<BlockHash>>,
}

impl TakenAlong {
    /// Whether the first `rows` blocks of a column, which are all it has, were never written.
    pub(super) fn is_unwritten(&self, column: usize, rows: usize) -> bool {
        let of_column = self.hashes.get(column * rows..(column + 1) * rows);
        of_column.is_some_and(|hashes| hashes.iter().all(|hash| *hash == Some(BlockHash::UNWRITTEN)))
    }

    /// Puts the hashes of blocks that were never written among those of what is to be written. False: a block
    /// is not what it was when it was verified.
    pub(super) fn agrees(&self, hashes: &mut [BlockHash]) -> bool {
        for (hash, known) in hashes.iter_mut().zip(&self.hashes) {
            match known {
                Some(BlockHash::UNWRITTEN) => *hash = BlockHash::UNWRITTEN,
                Some(known) if known != hash => return false,
                Some(_) | None => {}
            }
        }
        true
    }
}

/// Parity of a stripe, and the hashes of all its blocks, by column, then row.
pub(super) type Coded = (Vec<BufMut>, Vec<BlockHash>);

impl TakenAlong {
    /// What the job that verified it has computed of it and of what is new.
    fn coded(&self, blended: Blended) -> Coded {
        let Blended { known_hashes, outputs, output_hashes } = blended;
        let mut new = known_hashes.into_iter();
        let data =
            self.hashes.iter().map(|known| known.or_else(|| new.next()).expect("each new block is hashed"));
        let hashes = data.chain(output_hashes).collect();
        (outputs, hashes)
    }
}

impl Array {
    /// Whether the write had better go to a free slot with the rest of its stripe: that moves at least a
    /// sixth fewer bytes, manifests included.
    pub(super) fn pays_as_stripe(&self, write: &LoggedWrite) -> bool {
        let Work::Data { offset, data } = &write.task.work else { return false };
        if self.core.is_whole(write)
            || write.whole.was_tried
            || write.task.rest.is_some()
            || write.parity.way != Way::Usual
            || self.pages.checksums().is_none()
            || !self.stripes_go_to_free_slots()
        {
            return false;
        }
        let entry = self.pages.map_entry(write.stripe);
        let has_own_slot = entry.epoch == 0 && !entry.holds_data;
        if !self.core.has_room_for_slots() || (!has_own_slot && !self.has_slots_to_spare()) {
            return false;
        }
        let map = &self.core.map;
        let (k, m, width) = (map.k, map.m, map.width());
        let rows = self.core.rows_of(*offset, data.len()).len();
        // Each member's piece of the log names every block that a record changes.
        let manifest = |bytes: usize| bytes / BLOCK * size_of::<BlockHash>() * width;
        let part = data.len() + m * rows;
        let (old, rest) = match entry.holds_data {
            true if m == 0 => (0, k * map.chunk - data.len()),
            true => (part.min((k * rows).saturating_sub(data.len())), k * map.chunk - data.len()),
            false => (0, 0),
        };
        let through_log = 2 * part + manifest(part) + old;
        let as_stripe = data.len() + m * map.chunk + manifest(width * map.chunk) + 2 * rest;
        6 * as_stripe <= 5 * through_log
    }

    /// Whether free slots are left for other writes than those that can do without.
    pub(super) fn has_slots_to_spare(&self) -> bool {
        let reserve = self.core.map.slots - self.core.shape.geometry.stripes();
        self.pages.stripes().free_slots() > reserve / 2
    }

    /// Reads what the write leaves as it is.
    pub(super) fn fetch_rest(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        let Work::Data { offset, data } = &write.task.work else {
            unreachable!("a part of a stripe is data")
        };
        write.stage = Stage::Rest;
        let rules = FetchRules { in_service_only: true, ..FetchRules::default() };
        write.fetch = Fetch::new(write.slot, rules);
        if self.pages.holds_data(write.stripe) {
            let new = *offset..*offset + data.len();
            for column in 0..self.core.map.k {
                for rows in self.core.rest_of_column(column, &new) {
                    let buf = self.core.pool.alloc(rows.len() * BLOCK);
                    write.fetch.want(column, rows, buf);
                }
            }
            if let Some(band) = self.core.whole_columns(&new) {
                let new_bytes = |column: usize| self.core.new_bytes(&band, *offset, data, column);
                let codec = &self.core.shape.codec;
                let blend = parity::blend_of_band(codec, &band, &ParityPath::ReconstructWrite, new_bytes);
                write.fetch.blend(blend);
            }
        }
        match self.fetch(key, &mut write.fetch) {
            Fetched::Wait => Flow::Wait,
            Fetched::Done => self.rest_fetched(key, write),
        }
    }

    /// Makes a whole stripe of the write and of what was read.
    pub(super) fn rest_fetched(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        write.whole.widens = false;
        write.whole.was_tried = true;
        let missing = write.fetch.take_missing();
        if !missing.is_empty() && !is_off(Mutation::TakesAlongWhatIsMissing) {
            return self.with_pages(key, write);
        }
        let Work::Data { offset, data } = &write.task.work else {
            unreachable!("a part of a stripe is data")
        };
        let new = *offset..*offset + data.len();
        if missing.is_empty() {
            write.whole.along = self.taken_along(write, &new);
        }
        let chunk = self.core.map.chunk;
        write.whole.coded = write.fetch.take_blended().map(|blended| write.whole.along.coded(blended));
        let mut read = write.fetch.take().into_iter().peekable();
        let column = |column: usize| {
            let bytes = column * chunk..(column + 1) * chunk;
            let covered = bytes.start.max(new.start)..bytes.end.min(new.end);
            if covered == bytes {
                return data.slice(covered.start - new.start..covered.end - new.start);
            }
            let mut parts: Vec<(Range<usize>, BufMut)> = Vec::new();
            while let Some((_, rows, buf)) = read.next_if(|(c, ..)| *c == column) {
                parts.push((rows, buf));
            }
            if covered.is_empty() && parts.len() == 1 {
                return parts.remove(0).1.freeze();
            }
            // Without parts the stripe held nothing.
            let mut whole = self.core.pool.alloc_zeroed(chunk);
            for (rows, buf) in parts {
                whole[rows.start * BLOCK..rows.end * BLOCK].copy_from_slice(&buf);
            }
            if !covered.is_empty() {
                let from = covered.start - new.start..covered.end - new.start;
                whole[covered.start - bytes.start..covered.end - bytes.start].copy_from_slice(&data[from]);
            }
            whole.freeze()
        };
        let columns: Vec<Buf> = (0..self.core.map.k).map(column).collect();
        let work = std::mem::replace(&mut write.task.work, Work::Stripe { columns });
        if let Work::Data { offset, data } = work {
            write.task.asked.get_or_insert((offset, data));
        }
        self.release_pages(&mut write.pages);
        // A stripe by column puts a record into the log, and no more.
        let demand = self.demand_of_write(write);
        self.redo.take_back(std::mem::replace(&mut write.promised, demand));
        self.redo.promise(demand);
        self.wake_waiting_for_room();
        write.stage = Stage::Slot;
        Flow::Wait
    }

    /// Hashes of the blocks outside of `new`.
    fn taken_along(&self, write: &LoggedWrite, new: &Range<usize>) -> TakenAlong {
        let (chunk, rows) = (self.core.map.chunk, self.core.map.chunk / BLOCK);
        let holds_data = self.pages.holds_data(write.stripe);
        let hash = |at: usize| {
            let start = at / rows * chunk + at % rows * BLOCK;
            if start < new.end && new.start < start + BLOCK {
                return None;
            }
            match holds_data {
                true => self.pages.block_hash(write.slot, at % rows, at / rows),
                false => Some(BlockHash::UNWRITTEN),
            }
        };
        TakenAlong { hashes: (0..self.core.map.k * rows).map(hash).collect() }
    }

    /// Goes on through the log with a write that would have taken space that a write in place does not need,
    /// and cannot be written so. False: it is none, or has joined a batch. Nothing of it has changed the
    /// stripe.
    pub(super) fn goes_through_log(&mut self, key: usize, write: &mut LoggedWrite) -> bool {
        if !write.has_way_through_log() {
            return false;
        }
        if let Some(target) = write.whole.target
            && target != write.slot
        {
            self.pages.give_back_slot(target);
        }
        self.release_write(key, write);
        if let Work::Stripe { columns } = &write.task.work {
            let bytes = self.core.map.stripe_bytes();
            let whole = || (0, self.core.cut_into(bytes, columns).remove(0));
            let (offset, data) = write.task.asked.take().unwrap_or_else(whole);
            write.task.work = Work::Data { offset, data };
        }
        write.whole = WholeStripe { was_tried: true, ..WholeStripe::default() };
        write.records.clear();
        self.cut_write(write);
        write.stage = Stage::Room;
        self.wake_waiting_for_room();
        true
    }
}

impl LoggedWrite {
    /// Whether a whole stripe was made of it, and can be written in place as well.
    pub(in crate::array) fn has_way_through_log(&self) -> bool {
        matches!(self.task.work, Work::Stripe { .. }) && self.stage != Stage::Logged
    }

    /// Whether it was to be written as a stripe, and is written through the log now.
    pub(super) fn was_tried_as_stripe(&self) -> bool {
        self.whole.was_tried && matches!(self.task.work, Work::Data { .. })
    }
}

impl Core {
    /// The band of a write that covers whole columns, where there is parity: it is computed in the same pass
    /// over memory that verifies the others.
    fn whole_columns(&self, new: &Range<usize>) -> Option<Band> {
        let chunk = self.map.chunk;
        let is_whole = new.start.is_multiple_of(chunk) && new.end.is_multiple_of(chunk) && self.map.m > 0;
        is_whole.then(|| Band { rows: 0..chunk, columns: new.start / chunk..new.end / chunk })
    }

    /// Rows of a column, in blocks, that are not new as a whole: at most two runs.
    fn rest_of_column(
        &self,
        column: usize,
        new: &Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let bytes = column * self.map.chunk..(column + 1) * self.map.chunk;
        let covered = bytes.start.max(new.start)..bytes.end.min(new.end);
        let runs = match covered.is_empty() {
            true => [0..self.map.chunk, 0..0],
            false => [0..covered.start - bytes.start, covered.end - bytes.start..self.map.chunk],
        };
        let blocks = |run: Range<usize>| run.start / BLOCK..run.end.div_ceil(BLOCK);
        runs.into_iter().filter(|run| !run.is_empty()).map(blocks)
    }
}
