//! The state of the redo log while the array serves: batches, who waits for them, slots and pages that they
//! concern. What happens to it is in `redo.rs` and `checkpoint.rs`.

use crate::array::StripeRequestId;
use crate::array::log::checkpoint::Checkpoint;
use crate::array::log::facts::LogFacts;
use crate::array::log::journal::{HEADER_BYTES_MAX, Journal, OpenBatch, record_bytes, stripe_of};
use crate::array::log::life::Life;
use crate::array::log::overlay::Overlay;
use crate::array::log::settle::Unsettled;
use crate::array::pages::hold::Arrival;
use crate::array::pages::patience::UnreadablePages;
use crate::array::pages::store::PageStore;
use crate::array::pages::stripe_map::StripeMap;
use crate::block_io::Buf;
use crate::codec::BlockHasher;
use crate::format::{LOG_BLOCK_BYTES, LogRecord, MapEntry};
use crate::units::{
    BlockHash, ByteOffset, ColumnIndex, MemberIndex, ROW_BYTES, SlotIndex, StripeIndex, Timestamp,
};
use std::collections::{BTreeSet, HashMap, VecDeque};

/// A write goes through the log in parts that take no more than one in so many blocks of a ring each: several are then
/// on their way at a time, and none is ever too large for what a skipped end leaves.
const PART_FRACTION: usize = 16;
/// Largest payload of one batch on one member.
const BATCH_BYTES_MAX: usize = 8 << 20;
/// Blocks for notes in the smallest ring: those of a checkpoint, of its tail and of a replay.
const RESERVE_MIN: u32 = 4;

/// See the head of this file.
pub(in crate::array) struct Redo {
    pub life: Life,
    /// Counts starts of the log: an operation that began in an earlier life ends with an error.
    pub lives: u64,
    pub journal: Journal,
    pub overlay: Overlay,
    pub pages: PageStore,
    pub stripes: StripeMap,
    /// Checksums of blocks, if the array has any.
    pub checksums: Option<BlockHasher>,
    pub checkpoint: Checkpoint,
    /// Where the log and the pages lie, and how much the log takes.
    pub(in crate::array) place: LogPlace,
    pub open: OpenBatch,
    /// Who waits for the log, and what was promised to operations that were admitted.
    pub(in crate::array) waits: LogWaits,
    /// Flushes of clients and the rounds that answer them.
    pub(in crate::array) rounds: Rounds,
    /// Slots between two checkpoints: being written, to be freed, given back.
    pub(in crate::array) slots: SlotsInUse,
    /// A device waits to join: no new writes until the log is empty.
    pub held: bool,
    /// Who waits for metadata pages.
    pub(in crate::array) page_waits: PageWaits,
    /// What such a replay has found is not all in place.
    pub unsettled: Option<Unsettled>,
    /// The open batch found no room in the rings.
    pub(in crate::array) is_stuck: bool,
    pub facts: LogFacts,
}

/// What an operation adds at most: bytes of images to the overlay, blocks to the fullest ring.
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
pub(super) struct FlushRequest {
    /// Every batch below must be durable for it.
    pub(in crate::array) target: u64,
    pub(in crate::array) piece: StripeRequestId,
    pub(in crate::array) since: Timestamp,
}

pub(super) struct Round {
    pub(in crate::array) pending: usize,
    pub(in crate::array) upto: u64,
}

/// Who waits for metadata pages.
pub(in crate::array) struct PageWaits {
    /// Pages that were loaded for operations which have not looked yet.
    pub(in crate::array) arrivals: Vec<Arrival>,
    /// Pages that cannot be read for now.
    pub(in crate::array) unreadable: UnreadablePages,
    /// By the ticket of their hold, the operations that wait for pages; see `pages/hold.rs`.
    pub(in crate::array) page_tickets: HashMap<usize, usize>,
    pub(in crate::array) next_page_ticket: usize,
}

/// Who waits for the log, and what was promised to operations that were admitted.
pub(in crate::array) struct LogWaits {
    /// Operations whose batch has this sequence, and whether it must be durable for them; ascending.
    pub(super) waiters: VecDeque<(u64, usize, bool)>,
    /// Operations that wait for room in the overlay or the log: later ones wait behind them, so
    /// that a large write is not kept out by small ones.
    pub(in crate::array) waiting_for_room: VecDeque<usize>,
    /// Operations that wait for a free slot.
    pub(in crate::array) waiting_for_slot: Vec<usize>,
    /// Operations whose records found the open batch full.
    pub(in crate::array) waiting_for_batch: Vec<usize>,
    /// What admitted operations will add.
    pub(in crate::array) promised: Share,
    /// Passes that wait until a slot has no images.
    pub(in crate::array) waiting_for_drain: Vec<usize>,
}

/// Flushes of clients and the rounds that answer them.
pub(in crate::array) struct Rounds {
    pub(super) flushes: Vec<FlushRequest>,
    pub(super) round: Option<Round>,
    /// Flush rounds begun and ended since the start.
    pub(in crate::array) rounds_begun: u64,
    pub(in crate::array) rounds_ended: u64,
}

/// Slots between two checkpoints: being written, to be freed, given back.
pub(in crate::array) struct SlotsInUse {
    /// Whole stripes being written to free slots.
    pub(in crate::array) stripes_in_progress: usize,
    /// Fresh writes on their way, in bytes since the last checkpoint.
    pub(in crate::array) fresh_bytes: usize,
    /// Slots that may be used again once no checkpoint writes to them.
    pub(in crate::array) to_free: Vec<SlotIndex>,
    /// Stripes discarded since the last checkpoint: their space is given back with the next.
    pub(in crate::array) discarded: BTreeSet<u64>,
}

/// Where the log and the pages lie, and how much the log takes.
pub(in crate::array) struct LogPlace {
    pub(in crate::array) log_offset: ByteOffset,
    ring_blocks: u32,
    pub(in crate::array) pages_offset: ByteOffset,
    /// Blocks of the rings that notes may use and other batches may not.
    pub(in crate::array) reserve: u32,
    /// Images that gather before a checkpoint, in bytes: what two generations have in any one ring
    /// must fit it, with their headers.
    pub(in crate::array) overlay_max: usize,
}

impl Redo {
    pub(in crate::array) fn new(facts: LogFacts, pages: PageStore, journal: Journal) -> Redo {
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
            pages,
            stripes: StripeMap::default(),
            checksums: facts.checksums,
            checkpoint: Checkpoint::default(),
            place: LogPlace {
                log_offset: facts.log.offset,
                ring_blocks,
                pages_offset: facts.pages_offset,
                reserve: (ring_blocks / 8).max(RESERVE_MIN),
                overlay_max,
            },
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
            page_waits: PageWaits {
                arrivals: Vec::new(),
                unreadable: UnreadablePages::default(),
                page_tickets: HashMap::new(),
                next_page_ticket: 0,
            },
            facts,
        }
    }

    /// What the block should hash to; none where the array has no checksums.
    pub(in crate::array) fn block_hash(
        &self,
        slot: SlotIndex,
        row: usize,
        column: usize,
    ) -> Option<BlockHash> {
        self.checksums.map(|_| self.pages.hash(slot, row, ColumnIndex(column as u16)))
    }

    /// Whether bytes read from a member are what they should be.
    pub(in crate::array) fn verifies(
        &self,
        slot: SlotIndex,
        row: usize,
        column: usize,
        bytes: &[u8],
    ) -> bool {
        self.checksums
            .is_none_or(|hasher| hasher.hash(bytes) == self.pages.hash(slot, row, ColumnIndex(column as u16)))
    }

    /// Which of the blocks of a column, from this row on, are what they should be.
    pub(in crate::array) fn verify_blocks(
        &self,
        slot: SlotIndex,
        row: usize,
        column: usize,
        bytes: &[u8],
    ) -> Vec<bool> {
        let Some(hasher) = self.checksums else { return vec![true; bytes.len() / ROW_BYTES as usize] };
        let mut hashes = Vec::with_capacity(bytes.len() / ROW_BYTES as usize);
        hasher.hash_blocks(bytes, &mut hashes);
        let wanted = self.pages.hashes(slot, row..row + hashes.len(), ColumnIndex(column as u16));
        wanted.zip(hashes).map(|(wanted, hash)| wanted == hash).collect()
    }

    /// What hashes the blocks that go into the log.
    pub(in crate::array) fn log_hasher(&self) -> BlockHasher {
        self.checksums.unwrap_or(BlockHasher::Crc32c)
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
    pub(in crate::array) fn map_pages(&self) -> Option<u64> {
        matches!(self.life, Life::Marking(_) | Life::Serving).then(|| self.pages.map_written())
    }

    /// Whether a write that adds so much may begin: it fits the overlay, and the rings with what is there already, also
    /// when a piece has to skip the end of a ring.
    pub(in crate::array) fn has_room(&self, share: Share, used_blocks: u32) -> bool {
        let pending = self.overlay.active_bytes() + self.waits.promised.bytes;
        let open =
            self.open.payload_blocks_max() as usize + self.open.manifest_bytes().div_ceil(LOG_BLOCK_BYTES);
        // A piece may have to skip as much as it takes.
        let blocks = used_blocks as usize + 2 * (self.waits.promised.blocks + share.blocks + open);
        !self.held
            && self.unsettled.is_none()
            && (pending == 0 || pending + share.bytes <= self.place.overlay_max)
            && blocks <= (self.place.ring_blocks - self.place.reserve - self.place.ring_blocks / 8) as usize
    }

    /// Rows that one record may have, so that every piece finds room in a ring once what is before it is in place. `width`
    /// is that of the array.
    pub(in crate::array) fn rows_max(&self, width: usize) -> usize {
        // What the manifest has for a row, at most; see `share_of_write`.
        let row_bytes = LOG_BLOCK_BYTES + 16 * width + 64 + 2 * width;
        ((self.place.ring_blocks as usize / PART_FRACTION).saturating_sub(1) * LOG_BLOCK_BYTES / row_bytes)
            .max(1)
    }

    /// Whether a record that takes so many blocks of a ring, all of them header, finds room for certain.
    pub(in crate::array) fn fits_ring(&self, blocks: usize) -> bool {
        blocks <= self.place.ring_blocks as usize / 8
    }

    /// Puts a record into the open batch. `payload`: for members, the blocks that go to their logs.
    pub(in crate::array) fn join(
        &mut self,
        record: LogRecord,
        payload: Vec<(MemberIndex, Buf)>,
        width: usize,
    ) {
        self.open.payload.resize_with(width, Vec::new);
        for (member, buf) in payload {
            self.open.payload[usize::from(member.0)].push(buf);
        }
        self.open.records.push(record);
    }

    /// `key` is advanced when everything that has joined so far is on the members, or durable.
    pub(in crate::array) fn wait_for_all(&mut self, key: usize, durable: bool) {
        if self.open.is_empty() {
            let last = self.journal.next().saturating_sub(1);
            self.waits.waiters.push_back((last, key, durable));
        } else {
            self.open.waiters.push((key, durable));
        }
    }

    /// Whether an operation waits for a batch.
    pub(in crate::array) fn is_waiting(&self, key: usize) -> bool {
        self.waits.waiters.iter().any(|(_, waiting, _)| *waiting == key)
            || self.open.waiters.iter().any(|(waiting, _)| *waiting == key)
    }

    /// A member was lost: it may lack what is not in place yet, and will lack what waits to be issued, although the map
    /// says of both that they were written while it was there.
    pub(in crate::array) fn member_lost(&mut self) {
        let issued = self.journal.stripes_not_in_place();
        let replayed = self.unsettled.iter().flat_map(|unsettled| unsettled.stripes.iter().copied());
        self.checkpoint.remark(issued.chain(replayed).chain(self.open.records.iter().map(stripe_of)));
    }

    /// Whether records of a stripe wait to be issued, or are in the log and not in place.
    pub(in crate::array) fn is_in_log(&self, stripe: StripeIndex) -> bool {
        self.open.records.iter().any(|record| stripe_of(record) == stripe)
            || self.journal.stripes_not_in_place().any(|touched| touched == stripe)
            || self
                .unsettled
                .as_ref()
                .is_some_and(|unsettled| unsettled.stripes.binary_search(&stripe).is_ok())
    }

    /// Changes what the map says of a stripe.
    pub(in crate::array) fn set_map_entry(&mut self, stripe: StripeIndex, entry: MapEntry) {
        // Most writes in place change nothing here, and a page that stays as it is need not be written.
        if self.pages.map_entry(stripe) != entry {
            self.pages.set_map_entry(stripe, entry);
        }
    }

    /// Whether one more record fits the open batch.
    pub(in crate::array) fn open_has_room(&self, record: &LogRecord, payload_bytes: usize) -> bool {
        let bytes_max = BATCH_BYTES_MAX.min(self.place.ring_blocks as usize * LOG_BLOCK_BYTES / 8);
        self.open.is_empty()
            || (self.open.manifest_bytes() + record_bytes(record) <= bytes_max.min(HEADER_BYTES_MAX / 2)
                && self.open.payload_blocks_max() as usize * LOG_BLOCK_BYTES + payload_bytes <= bytes_max)
    }

    /// All operations that wait for something of the log: they are to look again.
    pub(super) fn take_all_waiting(&mut self) -> Vec<usize> {
        let mut all: Vec<usize> = self.waits.waiters.drain(..).map(|(_, key, _)| key).collect();
        all.extend(self.open.waiters.drain(..).map(|(key, _)| key));
        all.extend(self.waits.waiting_for_room.drain(..));
        all.append(&mut self.waits.waiting_for_slot);
        all.append(&mut self.waits.waiting_for_batch);
        all.append(&mut self.waits.waiting_for_drain);
        all
    }

    pub(super) fn take_flushes(&mut self) -> Vec<StripeRequestId> {
        std::mem::take(&mut self.rounds.flushes).into_iter().map(|flush| flush.piece).collect()
    }

    /// Flush requests that have waited for so long.
    pub(in crate::array) fn take_late_flushes(
        &mut self,
        now: Timestamp,
        patience_ns: u64,
    ) -> Vec<StripeRequestId> {
        let late = |flush: &mut FlushRequest| now.nanos_since(flush.since) >= patience_ns;
        self.rounds.flushes.extract_if(.., late).map(|flush| flush.piece).collect()
    }

    /// An operation that may be waiting for something of the log waits for nothing any more.
    pub(in crate::array) fn forget_waiting(&mut self, key: usize) {
        self.waits.waiters.retain(|(_, waiting, _)| *waiting != key);
        self.open.waiters.retain(|(waiting, _)| *waiting != key);
        self.waits.waiting_for_room.retain(|waiting| *waiting != key);
        self.waits.waiting_for_slot.retain(|waiting| *waiting != key);
        self.waits.waiting_for_batch.retain(|waiting| *waiting != key);
    }
}
