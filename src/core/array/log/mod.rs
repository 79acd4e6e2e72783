//! The redo log while the array serves: batches, what they hold until it is in place, checkpoints, and
//! what waits for that.
//!
//! Above the pages, which it changes as its batches say. What happens to it is in `redo.rs`, `checkpoint.rs`
//! and `settle.rs`. Must not know of superblocks, whose word comes with each call, nor what clients and
//! passes want: it knows them as requests to answer and operations to wake.

mod checkpoint;
pub(in crate::array) mod facts;
pub(in crate::array) mod journal;
pub(in crate::array) mod life;
mod overlay;
pub(in crate::array) mod permits;
mod redo;
pub(in crate::array) mod settle;

use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::Pages;
use crate::array::{Core, StripeRequestId};
use crate::block_io::Buf;
use crate::format::{LOG_BLOCK_BYTES, LogRecord, LogStart, MapEntry, PageIndex, Region};
use crate::units::{ColumnIndex, MemberIndex, SlotIndex, StripeIndex, Timestamp};
use checkpoint::Checkpoint;
use facts::LogFacts;
use journal::{HEADER_BYTES_MAX, Journal, OpenBatch, record_bytes, stripe_of};
use life::Life;
use overlay::Overlay;
use permits::Permits;
use settle::Unsettled;
use std::collections::{BTreeSet, VecDeque};

/// A write goes through the log in parts that take no more than one in so many blocks of a ring each: several are then
/// on their way at a time, and none is ever too large for what a skipped end leaves.
const PART_FRACTION: usize = 16;
/// Largest payload of one batch on one member.
const BATCH_BYTES_MAX: usize = 8 << 20;
/// Blocks for notes in the smallest ring: those of a checkpoint, of its tail and of a replay.
const RESERVE_MIN: u32 = 4;

/// See the head of this file.
pub(in crate::array) struct Redo {
    life: Life,
    /// Counts starts of the log: an operation that began in an earlier life ends with an error.
    lives: u64,
    journal: Journal,
    overlay: Overlay,
    checkpoint: Checkpoint,
    /// How much the log takes.
    room: LogRoom,
    open: OpenBatch,
    /// What waits for the log, and what was promised to operations that were admitted.
    waits: LogWaits,
    /// Flushes of clients and the rounds that answer them.
    rounds: Rounds,
    /// Slots between two checkpoints: being written, to be freed, given back.
    slots: SlotsInUse,
    /// A device waits to join: no new writes until the log is empty.
    held: bool,
    /// A replay of which not all is in place; see `settle.rs`.
    unsettled: Option<Unsettled>,
    /// The open batch found no room in the rings.
    is_stuck: bool,
    facts: LogFacts,
}

/// What an operation adds at most: bytes of images to the overlay, blocks to the fullest ring.
// Plain data: what an operation is promised, and gives back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::array) struct Share {
    pub bytes: usize,
    pub blocks: usize,
}

impl std::ops::AddAssign for Share {
    fn add_assign(&mut self, other: Share) {
        self.bytes += other.bytes;
        self.blocks += other.blocks;
    }
}

impl std::ops::SubAssign for Share {
    fn sub_assign(&mut self, other: Share) {
        self.bytes -= other.bytes;
        self.blocks -= other.blocks;
    }
}

/// A client's flush.
struct FlushRequest {
    /// Every batch below must be durable for it.
    target: u64,
    id: StripeRequestId,
    since: Timestamp,
}

struct Round {
    pending: usize,
    upto: u64,
}

/// What waits for the log, and what was promised to operations that were admitted.
struct LogWaits {
    /// Operations whose batch has this sequence, and whether it must be durable for them; ascending.
    waiters: VecDeque<(u64, usize, bool)>,
    /// Operations that wait for room in the overlay or the log: later ones wait behind them, so
    /// that a large write is not kept out by small ones.
    waiting_for_room: VecDeque<usize>,
    /// Operations that wait for a free slot.
    waiting_for_slot: Vec<usize>,
    /// Operations whose records found the open batch full.
    waiting_for_batch: Vec<usize>,
    /// What admitted operations will add.
    promised: Share,
    /// Passes that wait until a slot has no images.
    waiting_for_drain: Vec<usize>,
}

/// Flushes of clients and the rounds that answer them.
struct Rounds {
    flushes: Vec<FlushRequest>,
    round: Option<Round>,
    /// Flush rounds begun and ended since the start.
    rounds_begun: u64,
    rounds_ended: u64,
}

/// Slots between two checkpoints: being written, to be freed, given back.
struct SlotsInUse {
    /// Whole stripes being written to free slots.
    stripes_in_progress: usize,
    /// Fresh writes on their way, in bytes since the last checkpoint.
    fresh_bytes: usize,
    /// Slots that may be used again once no checkpoint writes to them.
    to_free: Vec<SlotIndex>,
    /// Stripes discarded since the last checkpoint: their space is given back with the next.
    discarded: BTreeSet<u64>,
}

/// How much the log takes.
struct LogRoom {
    ring_blocks: u32,
    /// Blocks of the rings that notes may use and other batches may not.
    reserve: u32,
    /// Images that gather before a checkpoint, in bytes: what two generations have in any one ring
    /// must fit it, with their headers.
    overlay_max: usize,
}

impl Redo {
    pub(in crate::array) fn new(facts: LogFacts, journal: Journal) -> Redo {
        let ring_blocks = journal.ring_blocks();
        let ring_bytes = ring_blocks as usize * LOG_BLOCK_BYTES;
        // A write adds to each of 1 + m members as many images as it takes of the fullest ring at
        // most.
        let overlay_max = facts.overlay_max.min(ring_bytes / 4 * facts.members_of_write);
        Redo {
            life: Life::Starting,
            lives: 1,
            journal,
            overlay: Overlay::default(),
            checkpoint: Checkpoint::default(),
            room: LogRoom { ring_blocks, reserve: (ring_blocks / 8).max(RESERVE_MIN), overlay_max },
            open: OpenBatch::default(),
            waits: LogWaits {
                waiters: VecDeque::new(),
                waiting_for_room: VecDeque::new(),
                waiting_for_slot: Vec::new(),
                waiting_for_batch: Vec::new(),
                promised: Share::default(),
                waiting_for_drain: Vec::new(),
            },
            rounds: Rounds { flushes: Vec::new(), round: None, rounds_begun: 0, rounds_ended: 0 },
            slots: SlotsInUse {
                stripes_in_progress: 0,
                fresh_bytes: 0,
                to_free: Vec::new(),
                discarded: BTreeSet::new(),
            },
            held: false,
            unsettled: None,
            is_stuck: false,
            facts,
        }
    }

    pub(in crate::array) fn is_serving(&self) -> bool {
        matches!(self.life, Life::Serving)
    }

    pub(in crate::array) fn is_recovering(&self) -> bool {
        matches!(self.life, Life::Recovering)
    }

    pub(in crate::array) fn is_refused(&self) -> bool {
        matches!(self.life, Life::Refused(_))
    }

    /// Whether it is serving, and its log has no replay behind it that is not all in place.
    pub(in crate::array) fn is_settled(&self) -> bool {
        self.is_serving() && self.unsettled.is_none()
    }

    /// Pages of the stripe map that have a version which is flushed on the members in service; none while it is being loaded.
    pub(in crate::array) fn map_pages(&self, pages: &Pages) -> Option<u64> {
        matches!(self.life, Life::Marking(_) | Life::Serving).then(|| pages.store().map_written())
    }

    /// Starts of the log so far: an operation that began in an earlier life ends with an error.
    pub(in crate::array) fn lives(&self) -> u64 {
        self.lives
    }

    /// An operation is advanced after the next checkpoint; once, however often it asks for that.
    pub(in crate::array) fn wait_for_checkpoint_once(&mut self, key: usize) {
        if !self.waits.waiting_for_drain.contains(&key) {
            self.waits.waiting_for_drain.push(key);
        }
    }

    /// Whether nothing that a page of checksums tells of counts: no slot of it holds data, nor
    /// could a crash bring back some. What it says of such a slot is written anew with the first
    /// data.
    pub(in crate::array) fn tells_of_nothing(&self, pages: &Pages, page: PageIndex) -> bool {
        let layout = pages.store().layout();
        let may_count = |slot| match pages.stripes().stripe_at(slot) {
            Some(stripe) => pages.holds_data(stripe) || self.is_in_log(stripe),
            None => pages.stripes().is_retired(slot),
        };
        page.0 >= layout.map_pages()
            && self.is_serving()
            && !layout.slots_of(page).map(SlotIndex).any(may_count)
    }

    /// What a record says becomes true in memory: its images, which are by column, are in the overlay. A slot
    /// has so many rows.
    pub(in crate::array) fn apply(
        &mut self,
        pages: &mut Pages,
        record: &LogRecord,
        images: &[(u16, Buf)],
        permits: &Permits,
        rows: usize,
    ) {
        let epoch = permits.epoch.number;
        if !permits.acknowledge {
            // The epoch in which it will be written is not there yet.
            self.checkpoint.remark(std::iter::once(stripe_of(record)));
        }
        match record {
            LogRecord::InPlace(record) => {
                for (column, image) in images {
                    self.overlay.insert(record.slot, usize::from(*column), record.row as usize, image);
                }
                if record.first {
                    pages.clear_slot(record.slot);
                }
                let first = record.row as usize;
                let columns = record.columns.iter().map(|column| ColumnIndex(*column));
                let rows = first..first + record.rows as usize;
                pages.set_hashes(record.slot, rows, columns, &record.hashes);
                let entry = MapEntry { slot: record.slot, holds_data: true, epoch };
                pages.set_map_entry(record.stripe, entry);
            }
            LogRecord::Fresh(record) => {
                let columns = (0..record.hashes.len() / rows).map(|column| ColumnIndex(column as u16));
                pages.set_hashes(record.slot, 0..rows, columns, &record.hashes);
                self.overlay.give_up(record.old_slot);
                if record.slot == record.old_slot {
                    let entry = MapEntry { slot: record.slot, holds_data: true, epoch };
                    pages.set_map_entry(record.stripe, entry);
                } else {
                    let old = pages.move_stripe(record.stripe, record.slot, epoch);
                    debug_assert_eq!(old, record.old_slot);
                    self.open.give_up(old);
                }
            }
            LogRecord::Discard { stripe, slot } => {
                self.overlay.give_up(*slot);
                self.slots.discarded.insert(stripe.0);
                pages.set_map_entry(*stripe, MapEntry { slot: *slot, holds_data: false, epoch });
            }
        }
    }

    /// Whether a write that adds so much may begin; it is promised the room then. Not before others
    /// that wait for room.
    pub(in crate::array) fn admits(&mut self, share: Share) -> bool {
        let may_begin = self.waits.waiting_for_room.is_empty() && self.has_room(share);
        if may_begin {
            self.waits.promised += share;
        }
        may_begin
    }

    /// What an admitted operation was promised has joined a batch, or is not needed.
    pub(in crate::array) fn take_back(&mut self, share: Share) {
        self.waits.promised -= share;
    }

    /// An operation is advanced when there may be room for it.
    pub(in crate::array) fn wait_for_room(&mut self, key: usize) {
        self.checkpoint.want();
        self.waits.waiting_for_room.push_back(key);
    }

    /// An operation is advanced when there may be a free slot.
    pub(in crate::array) fn wait_for_slot(&mut self, key: usize) {
        self.waits.waiting_for_slot.push(key);
        if self.journal.slots_waiting() == 0 {
            self.checkpoint.want();
        }
    }

    /// An operation whose records found the open batch full is advanced when there is another.
    pub(in crate::array) fn wait_for_next_batch(&mut self, key: usize) {
        self.waits.waiting_for_batch.push(key);
    }

    /// An operation is advanced when the open batch is on the members, or durable.
    pub(in crate::array) fn wait_for_open(&mut self, key: usize, durable: bool) {
        self.open.wait(key, durable);
    }

    /// An operation is advanced after the next checkpoint, which is asked for.
    pub(in crate::array) fn wait_for_checkpoint(&mut self, key: usize) {
        self.checkpoint.want();
        self.waits.waiting_for_drain.push(key);
    }

    /// A whole stripe of so many bytes, parity included, is on its way to a free slot.
    pub(in crate::array) fn begin_stripe(&mut self, bytes: usize) {
        self.slots.fresh_bytes += bytes;
        self.slots.stripes_in_progress += 1;
    }

    /// It has been written, or is not going to be.
    pub(in crate::array) fn end_stripe(&mut self) {
        self.slots.stripes_in_progress -= 1;
    }

    /// The newest image of a block that is not in place.
    pub(in crate::array) fn image(&self, slot: SlotIndex, column: usize, row: usize) -> Option<&Buf> {
        self.overlay.get(slot, column, row)
    }

    /// Whether some block of the slot has an image.
    pub(in crate::array) fn has_images(&self, slot: SlotIndex) -> bool {
        self.overlay.has_slot(slot)
    }

    /// A device waits to join: no write begins.
    pub(in crate::array) fn hold_writes(&mut self) {
        self.held = true;
    }

    /// Whether writes are held for that.
    pub(in crate::array) fn holds_writes(&self) -> bool {
        self.held
    }

    /// No device does any more: writes go on.
    pub(in crate::array) fn release_writes(&mut self, core: &mut Core) {
        self.held = false;
        self.wake_waiting_for_room(core);
    }

    /// Whether admitted operations will add something.
    pub(in crate::array) fn has_promised(&self) -> bool {
        self.waits.promised != Share::default()
    }

    /// Where the log region of every member lies.
    pub(in crate::array) fn region(&self) -> Region {
        self.facts.log
    }

    /// What the log was told about itself.
    pub(in crate::array) fn facts(&self) -> &LogFacts {
        &self.facts
    }

    /// The log starts at `start` from now on, and is not empty for that.
    pub(in crate::array) fn starts_at(&mut self, start: LogStart) {
        self.facts.start = start;
        self.facts.clean = false;
    }

    /// Most bytes of images that gather before a checkpoint.
    pub(in crate::array) fn overlay_max(&self) -> usize {
        self.room.overlay_max
    }

    /// Batches below were durable, and acknowledged.
    pub(in crate::array) fn durable_and_acknowledged(&self) -> (u64, u64) {
        (self.journal.durable(), self.journal.acknowledged())
    }

    /// Where it is in its life.
    pub(in crate::array) fn life(&self) -> &Life {
        &self.life
    }

    /// Another part of its life begins.
    pub(in crate::array) fn set_life(&mut self, life: Life) {
        self.life = life;
    }

    /// It was replayed: the next batch goes where this journal says.
    pub(in crate::array) fn replayed(&mut self, journal: Journal) {
        self.journal = journal;
    }

    /// A log that begins another life, about which nothing is known yet but `facts`.
    pub(in crate::array) fn begin_anew(&mut self, facts: LogFacts, journal: Journal) {
        let lives = self.lives;
        *self = Redo { lives, life: Life::Recovering, ..Redo::new(facts, journal) };
    }

    /// Whether a replay is not all in place, for lack of room.
    pub(in crate::array) fn is_unsettled(&self) -> bool {
        self.unsettled.is_some()
    }

    /// Batches below are in place on all members in service, as far as is known; of a log that was replayed.
    pub(in crate::array) fn tail_in_place(&self) -> Option<u64> {
        match &self.unsettled {
            // Nothing has told the members of a higher one.
            Some(unsettled) => unsettled.tail(),
            None => Some(self.journal.tail()),
        }
    }

    /// The tail that members can show where a superblock names `told`; the log is kept from there on if it is
    /// below `tail`.
    pub(in crate::array) fn tail_to_show(&mut self, told: u64, tail: u64) -> u64 {
        let shown = self.journal.shown_tail(told);
        if shown < tail && !is_off(Mutation::ToldTailAlone) {
            self.journal.withdraw_tail(shown);
            self.checkpoint.want();
        }
        shown
    }

    /// Whether everything that is in the log is in place too, and flushed, copies of pages that have to be
    /// written again included.
    pub(in crate::array) fn is_in_place(&self, pages: &Pages) -> bool {
        self.is_settled()
            && self.journal.is_drained()
            && pages.store().dirty_pages() == 0
            && self.checkpoint.is_over()
    }

    /// Whether a write that adds so much may begin: it fits the overlay, and the rings with what is there already, also
    /// when a piece has to skip the end of a ring.
    fn has_room(&self, share: Share) -> bool {
        let pending = self.overlay.active_bytes() + self.waits.promised.bytes;
        let open =
            self.open.payload_blocks_max() as usize + self.open.manifest_bytes().div_ceil(LOG_BLOCK_BYTES);
        // A piece may have to skip as much as it takes.
        let blocks =
            self.journal.used_blocks() as usize + 2 * (self.waits.promised.blocks + share.blocks + open);
        !self.held
            && self.unsettled.is_none()
            && (pending == 0 || pending + share.bytes <= self.room.overlay_max)
            && blocks <= (self.room.ring_blocks - self.room.reserve - self.room.ring_blocks / 8) as usize
    }

    /// Rows that one record may have, so that every piece finds room in a ring once what is before it is in place. `width`
    /// is that of the array.
    pub(in crate::array) fn rows_max(&self, width: usize) -> usize {
        // What the manifest has for a row, at most; see `share_of_write`.
        let row_bytes = LOG_BLOCK_BYTES + 16 * width + 64 + 2 * width;
        ((self.room.ring_blocks as usize / PART_FRACTION).saturating_sub(1) * LOG_BLOCK_BYTES / row_bytes)
            .max(1)
    }

    /// Whether a record that takes so many blocks of a ring, all of them header, finds room for certain.
    pub(in crate::array) fn fits_ring(&self, blocks: usize) -> bool {
        blocks <= self.room.ring_blocks as usize / 8
    }

    /// Puts a record into the open batch. `payload`: for members, the blocks that go to their logs.
    pub(in crate::array) fn join(
        &mut self,
        record: LogRecord,
        payload: Vec<(MemberIndex, Buf)>,
        width: usize,
    ) {
        self.open.join(record, payload, width);
    }

    /// `key` is advanced when everything that has joined so far is on the members, or durable.
    pub(in crate::array) fn wait_for_all(&mut self, key: usize, durable: bool) {
        if self.open.is_empty() {
            let last = self.journal.next().saturating_sub(1);
            self.waits.waiters.push_back((last, key, durable));
        } else {
            self.open.wait(key, durable);
        }
    }

    /// Whether an operation waits for a batch.
    pub(in crate::array) fn is_waiting(&self, key: usize) -> bool {
        self.waits.waiters.iter().any(|(_, waiting, _)| *waiting == key) || self.open.is_waiting(key)
    }

    /// A member was lost: it may lack what is not in place yet, and will lack what waits to be issued, although the map
    /// says of both that they were written while it was there.
    pub(in crate::array) fn member_lost(&mut self) {
        let issued = self.journal.stripes_not_in_place();
        let replayed = self.unsettled.iter().flat_map(|unsettled| unsettled.stripes());
        self.checkpoint.remark(issued.chain(replayed).chain(self.open.stripes()));
    }

    /// Whether records of a stripe wait to be issued, or are in the log and not in place.
    pub(in crate::array) fn is_in_log(&self, stripe: StripeIndex) -> bool {
        self.open.stripes().any(|touched| touched == stripe)
            || self.journal.stripes_not_in_place().any(|touched| touched == stripe)
            || self.unsettled.as_ref().is_some_and(|unsettled| unsettled.names(stripe))
    }

    /// Whether one more record fits the open batch.
    pub(in crate::array) fn open_has_room(&self, record: &LogRecord, payload_bytes: usize) -> bool {
        let bytes_max = BATCH_BYTES_MAX.min(self.room.ring_blocks as usize * LOG_BLOCK_BYTES / 8);
        self.open.is_empty()
            || (self.open.manifest_bytes() + record_bytes(record) <= bytes_max.min(HEADER_BYTES_MAX / 2)
                && self.open.payload_blocks_max() as usize * LOG_BLOCK_BYTES + payload_bytes <= bytes_max)
    }

    /// All operations that wait for something of the log: they are to look again.
    pub(super) fn take_all_waiting(&mut self) -> Vec<usize> {
        let mut all: Vec<usize> = self.waits.waiters.drain(..).map(|(_, key, _)| key).collect();
        all.extend(self.open.take_waiters().into_iter().map(|(key, _)| key));
        all.extend(self.waits.waiting_for_room.drain(..));
        all.append(&mut self.waits.waiting_for_slot);
        all.append(&mut self.waits.waiting_for_batch);
        all.append(&mut self.waits.waiting_for_drain);
        all
    }

    pub(super) fn take_flushes(&mut self) -> Vec<StripeRequestId> {
        std::mem::take(&mut self.rounds.flushes).into_iter().map(|flush| flush.id).collect()
    }

    /// Flush requests that have waited for so long.
    pub(in crate::array) fn take_late_flushes(
        &mut self,
        now: Timestamp,
        patience_ns: u64,
    ) -> Vec<StripeRequestId> {
        let late = |flush: &mut FlushRequest| now.nanos_since(flush.since) >= patience_ns;
        self.rounds.flushes.extract_if(.., late).map(|flush| flush.id).collect()
    }

    /// An operation that may be waiting for something of the log waits for nothing any more.
    pub(in crate::array) fn forget_waiting(&mut self, key: usize) {
        self.waits.waiters.retain(|(_, waiting, _)| *waiting != key);
        self.open.forget_waiting(key);
        self.waits.waiting_for_room.retain(|waiting| *waiting != key);
        self.waits.waiting_for_slot.retain(|waiting| *waiting != key);
        self.waits.waiting_for_batch.retain(|waiting| *waiting != key);
    }
}
