//! The redo log while the array serves: batches, the content that they hold until it is in place,
//! checkpoints, and the operations that wait for these.
//!
//! Lies above the pages, which it changes as its batches say. The steps of its work are in `redo.rs`,
//! `checkpoint.rs` and `settle.rs`. Must not know of superblocks, whose permits come as messages, nor of
//! the purposes of clients and passes: to it they are requests to answer and operations to wake.

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
use permits::{Gate, Permits, Reports, Standing};
use settle::Unsettled;
use std::collections::{BTreeSet, VecDeque};

/// A write goes through the log in parts, each of which takes at most this fraction of a ring: several are
/// then under way at a time, and none is ever too large for the room that a skipped end of the ring leaves.
const PART_FRACTION: usize = 16;
/// Largest payload of one batch on one member.
const BATCH_BYTES_MAX: usize = 8 << 20;
/// Blocks for notes in the smallest ring: those of a checkpoint, of its tail and of a replay.
const RESERVE_MIN: u32 = 4;

/// See the head of this file.
pub(in crate::array) struct Redo {
    life: Life,
    /// Counts starts of the log. An operation that began in an earlier life ends with an error.
    lives: u64,
    /// What the superblocks permit, and what they have to be told.
    gate: Gate,
    journal: Journal,
    overlay: Overlay,
    checkpoint: Checkpoint,
    /// How much the log takes.
    room: LogRoom,
    open: OpenBatch,
    /// Operations that wait for the log, and the room promised to those that were admitted.
    waits: LogWaits,
    /// Flushes of clients and the rounds that answer them.
    rounds: Rounds,
    /// Slots between two checkpoints: being written, to be freed, given back.
    slots: SlotsInUse,
    /// Whether a device waits to join, so that no new writes begin until the log is empty.
    held: bool,
    /// A replay whose content is not all in place; see `settle.rs`.
    unsettled: Option<Unsettled>,
    /// Whether the open batch found no room in the rings.
    is_stuck: bool,
    facts: LogFacts,
}

/// The most that an operation adds: bytes of images to the overlay, blocks to the fullest ring.
// Plain data: room that is promised to an operation, and given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::array) struct LogDemand {
    pub bytes: usize,
    pub blocks: usize,
}

impl std::ops::AddAssign for LogDemand {
    fn add_assign(&mut self, other: LogDemand) {
        self.bytes += other.bytes;
        self.blocks += other.blocks;
    }
}

impl std::ops::SubAssign for LogDemand {
    fn sub_assign(&mut self, other: LogDemand) {
        self.bytes -= other.bytes;
        self.blocks -= other.blocks;
    }
}

/// A client's flush.
struct FlushRequest {
    /// The request is answered when all batches below are durable.
    target: u64,
    id: StripeRequestId,
    since: Timestamp,
}

/// Operations that wait for the log, and the room promised to those that were admitted.
struct LogWaits {
    /// Operations by the sequence of the batch that they wait for, ascending, and whether it must be durable
    /// for them.
    waiters: VecDeque<(u64, usize, bool)>,
    /// Operations that wait for room in the overlay or the log. Later ones wait behind them, so that small
    /// writes do not keep a large one out.
    waiting_for_room: VecDeque<usize>,
    /// Operations that wait for a free slot.
    waiting_for_slot: Vec<usize>,
    /// Operations whose records found the open batch full.
    waiting_for_batch: Vec<usize>,
    /// The most that admitted operations will still add.
    promised: LogDemand,
    /// Passes that wait until a slot has no images.
    waiting_for_drain: Vec<usize>,
}

/// Flushes of clients and the rounds that answer them.
#[derive(Default)]
struct Rounds {
    flushes: Vec<FlushRequest>,
    /// Flush rounds begun and ended since the start.
    begun: u64,
    ended: u64,
}

/// Slots between two checkpoints: being written, to be freed, given back.
struct SlotsInUse {
    /// Whole stripes being written to free slots.
    stripes_in_progress: usize,
    /// Bytes of whole stripes that were begun since the last checkpoint.
    fresh_bytes: usize,
    /// Slots that may be used again once no checkpoint writes to them.
    to_free: Vec<SlotIndex>,
    /// Stripes discarded since the last checkpoint. The next one gives their space back.
    discarded: BTreeSet<u64>,
}

/// How much room the log takes.
struct LogRoom {
    ring_blocks: u32,
    /// Blocks of the rings that are reserved for notes.
    reserve: u32,
    /// Images that gather before a checkpoint, in bytes. The images of two generations in any one ring must
    /// fit it, with their headers.
    overlay_max: usize,
}

impl Redo {
    pub(in crate::array) fn new(facts: LogFacts, journal: Journal) -> Redo {
        let ring_blocks = journal.ring_blocks();
        let ring_bytes = ring_blocks as usize * LOG_BLOCK_BYTES;
        // A write adds at least 1 + m images, each to another member, for every image that it puts into the
        // fullest ring.
        let overlay_max = facts.overlay_max.min(ring_bytes / 4 * facts.members_of_write);
        Redo {
            life: Life::Starting,
            lives: 1,
            gate: Gate::default(),
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
                promised: LogDemand::default(),
                waiting_for_drain: Vec::new(),
            },
            rounds: Rounds::default(),
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

    /// Takes a message: what the superblocks permit from now on.
    pub(in crate::array) fn take_permits(&mut self, permits: Permits) {
        self.gate.take(permits);
    }

    /// The reports for the superblocks since the last ones were taken.
    pub(in crate::array) fn take_reports(&mut self) -> Reports {
        self.gate.take_reports()
    }

    /// Whether operations may be acknowledged, by the last message.
    pub(in crate::array) fn may_acknowledge(&self) -> bool {
        self.gate.permits().acknowledge
    }

    /// Whether writes may change members, by the last message. If not, this asks for it.
    pub(in crate::array) fn may_write(&mut self) -> bool {
        self.gate.may_write()
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

    /// Whether it is serving, and all content of the replay before it is in place.
    pub(in crate::array) fn is_settled(&self) -> bool {
        self.is_serving() && self.unsettled.is_none()
    }

    /// How the log stands, for the superblocks.
    pub(in crate::array) fn standing(&self, pages: &Pages) -> Standing {
        let needless = self.needless_end(pages);
        Standing {
            needless,
            is_drained: needless.is_some() && pages.store().dirty_pages() == 0,
            map_pages: matches!(self.life, Life::Marking(_) | Life::Serving)
                .then(|| pages.store().map_written()),
        }
    }

    /// Starts of the log so far. An operation that began in an earlier life ends with an error.
    pub(in crate::array) fn lives(&self) -> u64 {
        self.lives
    }

    /// Has an operation advanced after the next checkpoint, once, however often it asks for that.
    pub(in crate::array) fn wait_for_checkpoint_once(&mut self, key: usize) {
        if !self.waits.waiting_for_drain.contains(&key) {
            self.waits.waiting_for_drain.push(key);
        }
    }

    /// Whether no entry of a page of checksums counts: no slot of it holds data, and a crash could not bring
    /// any back. The entries of such a slot are written anew with its first data.
    pub(in crate::array) fn no_entry_counts(&self, pages: &Pages, page: PageIndex) -> bool {
        let layout = pages.store().layout();
        let may_count = |slot| match pages.stripes().stripe_at(slot) {
            Some(stripe) => pages.holds_data(stripe) || self.is_in_log(stripe),
            None => pages.stripes().is_retired(slot),
        };
        page.0 >= layout.map_pages()
            && self.is_serving()
            && !layout.slots_of(page).map(SlotIndex).any(may_count)
    }

    /// Makes the content of a record true in memory. Its images, which are by column, are in the overlay. A
    /// slot has `rows` rows.
    pub(in crate::array) fn apply(
        &mut self,
        pages: &mut Pages,
        record: &LogRecord,
        images: &[(u16, Buf)],
        rows: usize,
    ) {
        let epoch = self.gate.permits().epoch.number;
        if !self.gate.permits().acknowledge {
            // The epoch in which it will be written has not begun.
            self.checkpoint.remark(std::iter::once(stripe_of(record)));
        }
        match record {
            LogRecord::InPlace(record) => {
                let had_images = self.overlay.has_slot(record.slot);
                for (column, image) in images {
                    self.overlay.insert(record.slot, usize::from(*column), record.row as usize, image);
                }
                // Before the rest of the record: until it is in place, nothing of it is on the members.
                self.show_images(pages, record.slot, had_images);
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
                let had_images = self.overlay.has_slot(record.old_slot);
                self.overlay.give_up(record.old_slot);
                if record.slot == record.old_slot {
                    let entry = MapEntry { slot: record.slot, holds_data: true, epoch };
                    pages.set_map_entry(record.stripe, entry);
                } else {
                    let old = pages.move_stripe(record.stripe, record.slot, epoch);
                    debug_assert_eq!(old, record.old_slot);
                    self.open.give_up(old);
                }
                // After the rest of the record: what is in place was old while the stripe was there.
                self.show_images(pages, record.old_slot, had_images);
            }
            LogRecord::Discard { stripe, slot } => {
                let had_images = self.overlay.has_slot(*slot);
                self.overlay.give_up(*slot);
                self.slots.discarded.insert(stripe.0);
                pages.set_map_entry(*stripe, MapEntry { slot: *slot, holds_data: false, epoch });
                self.show_images(pages, *slot, had_images);
            }
        }
    }

    /// Shows readers on other threads whether the slot has images, if that has changed.
    fn show_images(&self, pages: &mut Pages, slot: SlotIndex, had_images: bool) {
        let has_images = self.overlay.has_slot(slot);
        if has_images != had_images && !hides_images() {
            pages.show_images(slot, has_images);
        }
    }

    /// Whether a write that adds this much may begin; the room is then promised to it. It waits behind others
    /// that wait for room.
    pub(in crate::array) fn admits(&mut self, demand: LogDemand) -> bool {
        let may_begin = self.waits.waiting_for_room.is_empty() && self.has_room(demand);
        if may_begin {
            self.waits.promised += demand;
        }
        may_begin
    }

    /// Promises room that was promised to the same operation a moment ago.
    pub(in crate::array) fn promise(&mut self, demand: LogDemand) {
        self.waits.promised += demand;
    }

    /// Takes back a promise: the operation has joined a batch, or does not need the room.
    pub(in crate::array) fn take_back(&mut self, demand: LogDemand) {
        self.waits.promised -= demand;
    }

    /// Has an operation advanced when there may be room for it.
    pub(in crate::array) fn wait_for_room(&mut self, key: usize) {
        self.checkpoint.want();
        self.waits.waiting_for_room.push_back(key);
    }

    /// Has an operation advanced when there may be a free slot.
    pub(in crate::array) fn wait_for_slot(&mut self, key: usize) {
        self.waits.waiting_for_slot.push(key);
        if self.journal.slots_waiting() == 0 {
            self.checkpoint.want();
        }
    }

    /// Has an operation whose records found the open batch full advanced when there is another.
    pub(in crate::array) fn wait_for_next_batch(&mut self, key: usize) {
        self.waits.waiting_for_batch.push(key);
    }

    /// Has an operation advanced when the open batch is on the members, or durable.
    pub(in crate::array) fn wait_for_open(&mut self, key: usize, durable: bool) {
        self.open.wait(key, durable);
    }

    /// Has an operation advanced after the next checkpoint, which is asked for.
    pub(in crate::array) fn wait_for_checkpoint(&mut self, key: usize) {
        self.checkpoint.want();
        self.waits.waiting_for_drain.push(key);
    }

    /// Counts a whole stripe of `bytes` bytes, parity included, that is under way to a free slot.
    pub(in crate::array) fn begin_stripe(&mut self, bytes: usize) {
        self.slots.fresh_bytes += bytes;
        self.slots.stripes_in_progress += 1;
    }

    /// Counts one that has been written, or is not going to be.
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

    /// Holds new writes back, because a device waits to join.
    pub(in crate::array) fn hold_writes(&mut self) {
        self.held = true;
    }

    /// Whether new writes are held back for that.
    pub(in crate::array) fn holds_writes(&self) -> bool {
        self.held
    }

    /// Lets writes go on: no device waits to join any more.
    pub(in crate::array) fn release_writes(&mut self, core: &mut Core) {
        self.held = false;
        self.wake_waiting_for_room(core);
    }

    /// Whether some room is promised to admitted operations.
    pub(in crate::array) fn has_promised(&self) -> bool {
        self.waits.promised != LogDemand::default()
    }

    /// Where the log region of every member lies.
    pub(in crate::array) fn region(&self) -> Region {
        self.facts.log
    }

    /// The facts that the log was made with.
    pub(in crate::array) fn facts(&self) -> &LogFacts {
        &self.facts
    }

    /// Sets where the log starts from now on. It counts as not empty there.
    pub(in crate::array) fn starts_at(&mut self, start: LogStart) {
        self.facts.start = start;
        self.facts.clean = false;
    }

    /// Most bytes of images that gather before a checkpoint.
    pub(in crate::array) fn overlay_max(&self) -> usize {
        self.room.overlay_max
    }

    /// The sequences below which batches were durable, and acknowledged.
    pub(in crate::array) fn durable_and_acknowledged(&self) -> (u64, u64) {
        (self.journal.durable(), self.journal.acknowledged())
    }

    /// The stage of its life.
    pub(in crate::array) fn life(&self) -> &Life {
        &self.life
    }

    /// Begins another stage of its life.
    pub(in crate::array) fn set_life(&mut self, life: Life) {
        self.life = life;
    }

    /// Takes over after a replay: the next batch goes where this journal says.
    pub(in crate::array) fn replayed(&mut self, journal: Journal) {
        self.journal = journal;
    }

    /// Begins another life, of which nothing but `facts` is known yet.
    pub(in crate::array) fn begin_anew(&mut self, facts: LogFacts, journal: Journal) {
        let lives = self.lives;
        *self = Redo { lives, life: Life::Recovering, ..Redo::new(facts, journal) };
    }

    /// Whether the content of a replay is not all in place, for lack of room.
    pub(in crate::array) fn is_unsettled(&self) -> bool {
        self.unsettled.is_some()
    }

    /// The sequence below which batches are in place on all members in service, as far as is known; of a log
    /// that was replayed.
    pub(in crate::array) fn tail_in_place(&self) -> Option<u64> {
        match &self.unsettled {
            // No member was given a higher tail.
            Some(unsettled) => unsettled.tail(),
            None => Some(self.journal.tail()),
        }
    }

    /// The tail that members can show where a superblock names `told`. If that is below `tail`, the log is
    /// kept from there on.
    pub(in crate::array) fn tail_to_show(&mut self, told: u64, tail: u64) -> u64 {
        let shown = self.journal.shown_tail(told);
        if shown < tail && !is_off(Mutation::ToldTailAlone) {
            self.journal.withdraw_tail(shown);
            self.checkpoint.want();
        }
        shown
    }

    /// Whether everything that is in the log is also in place and flushed, and no copies of pages have to be
    /// written again.
    pub(in crate::array) fn is_in_place(&self, pages: &Pages) -> bool {
        self.is_settled()
            && self.journal.is_drained()
            && pages.store().dirty_pages() == 0
            && self.checkpoint.is_over()
    }

    /// Whether a write that adds this much may begin: it fits the overlay, and the rings beside what is there
    /// already, even when a piece has to skip the end of a ring.
    fn has_room(&self, demand: LogDemand) -> bool {
        let pending = self.overlay.active_bytes() + self.waits.promised.bytes;
        let open =
            self.open.payload_blocks_max() as usize + self.open.manifest_bytes().div_ceil(LOG_BLOCK_BYTES);
        // A piece may have to skip as many blocks as it takes.
        let blocks =
            self.journal.used_blocks() as usize + 2 * (self.waits.promised.blocks + demand.blocks + open);
        !self.held
            && self.unsettled.is_none()
            && (pending == 0 || pending + demand.bytes <= self.room.overlay_max)
            && blocks <= (self.room.ring_blocks - self.room.reserve - self.room.ring_blocks / 8) as usize
    }

    /// Most rows that one record may have, so that every piece finds room in a ring once what is before it is
    /// in place. `width` is that of the array.
    pub(in crate::array) fn rows_max(&self, width: usize) -> usize {
        // What the manifest has for a row, at most; see `demand_of_write`.
        let row_bytes = LOG_BLOCK_BYTES + 16 * width + 64 + 2 * width;
        ((self.room.ring_blocks as usize / PART_FRACTION).saturating_sub(1) * LOG_BLOCK_BYTES / row_bytes)
            .max(1)
    }

    /// Whether a record that takes this many blocks of a ring, all of them header, always finds room.
    pub(in crate::array) fn fits_ring(&self, blocks: usize) -> bool {
        blocks <= self.room.ring_blocks as usize / 8
    }

    /// Puts a record into the open batch. `payload`: the blocks that go to members' logs.
    pub(in crate::array) fn join(
        &mut self,
        record: LogRecord,
        payload: Vec<(MemberIndex, Buf)>,
        width: usize,
    ) {
        self.open.join(record, payload, width);
    }

    /// Has `key` advanced when everything that has joined so far is on the members, or durable.
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

    /// Records that a member was lost. It may lack what is not in place yet, and will lack what waits to be
    /// issued, although the map says of both that they were written while it was in service.
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

    /// Takes out all operations that wait for the log, so that they look again.
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

    /// Takes out the flush requests that have waited too long.
    pub(in crate::array) fn take_late_flushes(
        &mut self,
        now: Timestamp,
        patience_ns: u64,
    ) -> Vec<StripeRequestId> {
        let late = |flush: &mut FlushRequest| now.nanos_since(flush.since) >= patience_ns;
        self.rounds.flushes.extract_if(.., late).map(|flush| flush.id).collect()
    }

    /// Forgets that an operation waits for the log.
    pub(in crate::array) fn forget_waiting(&mut self, key: usize) {
        self.waits.waiters.retain(|(_, waiting, _)| *waiting != key);
        self.open.forget_waiting(key);
        self.waits.waiting_for_room.retain(|waiting| *waiting != key);
        self.waits.waiting_for_slot.retain(|waiting| *waiting != key);
        self.waits.waiting_for_batch.retain(|waiting| *waiting != key);
    }
}

/// Whether a test has the images of slots not shown to readers on other threads.
fn hides_images() -> bool {
    [Mutation::ViewWriteLate, Mutation::ViewImagesLate].into_iter().any(is_off)
}
