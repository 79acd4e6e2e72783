//! The running redo log: batches gather, are written, flushed and noted, and whoever waits for
//! that goes on. Rules W1, W2 and E3 of the crash-safety design; W3 and W4 are in `checkpoint.rs`, replay at start
//! in `startup.rs` and `recovery/`.
//!
//! A batch is issued at once when none is on its way, so a lone request never waits for others; requests that come
//! while one is on its way gather in the next. Invariant: no batch is issued, nothing is acknowledged and nothing
//! goes in place while a loss of a member is not recorded on the others.

use crate::array::base::members::Which;
use crate::array::client::fetch::Missing;
use crate::array::log::checkpoint::Checkpoint;
use crate::array::log::journal::{HEADER_BYTES_MAX, Journal, OpenBatch, record_bytes, stripe_of};
use crate::array::log::overlay::Overlay;
use crate::array::log::settle::Unsettled;
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::hold::Arrival;
use crate::array::pages::patience::UnreadablePages;
use crate::array::pages::store::PageStore;
use crate::array::pages::stripe_map::StripeMap;
use crate::array::recovery::startup::{Life, LogFacts};
use crate::array::{
    Array, ClientError, Core, Inflight, NoticeKind, NoticeLevel, Owner, PieceId, SlotReply, SlotRequest,
};
use crate::block_io::{Buf, IoFault, IoOp, IoValue};
use crate::codec::BlockHasher;
use crate::format::{EpochStamp, LOG_BLOCK_BYTES, LogRecord, MapEntry, MemberSet, MemberState};
use crate::units::{
    BlockHash, ByteOffset, ColumnIndex, Count, MemberIndex, ROW_BYTES, SlotIndex, StripeIndex, Timestamp,
    VolumeOffset,
};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;

/// See the head of this file.
pub(in crate::array) struct Redo {
    pub life: Life,
    /// A member that the last epoch had in service is missing, or holds only the parent of that
    /// epoch, and whether the array can be served is not known: until it is, nothing is written.
    /// Its return would not help, or what tells of its age would be gone.
    pub unjudged: bool,
    /// Of a start that is refused: whether a forced one would go on.
    pub yields_to_force: bool,
    /// While that is not known: members in service that hold only the parent of the last epoch.
    pub behind: MemberSet,
    /// Batches below were durable before the array failed, whatever its members say when they come
    /// back; 0 where nothing is known.
    pub durable_before: u64,
    /// Batches below were acknowledged before the array failed, durable or not; 0 where nothing is known.
    pub acknowledged_before: u64,
    /// Counts starts of the log: an operation that began in an earlier life ends with an error.
    pub lives: u64,
    pub journal: Journal,
    pub overlay: Overlay,
    pub pages: PageStore,
    pub stripes: StripeMap,
    /// Checksums of blocks, if the array has any.
    pub checksums: Option<BlockHasher>,
    pub checkpoint: Checkpoint,
    pub log_offset: ByteOffset,
    pub ring_blocks: u32,
    pub pages_offset: ByteOffset,
    pub open: OpenBatch,
    /// Operations whose batch has this sequence, and whether it must be durable for them; ascending.
    waiters: VecDeque<(u64, usize, bool)>,
    flushes: Vec<FlushRequest>,
    round: Option<Round>,
    /// Flush rounds begun and ended since the start.
    pub rounds_begun: u64,
    pub rounds_ended: u64,
    /// Operations that wait for room in the overlay or the log: later ones wait behind them, so
    /// that a large write is not kept out by small ones.
    pub waiting_for_room: VecDeque<usize>,
    /// Operations that wait for a free slot.
    pub waiting_for_slot: Vec<usize>,
    /// Operations whose records found the open batch full.
    pub waiting_for_batch: Vec<usize>,
    /// What admitted operations will add.
    pub promised: Share,
    /// Whole stripes being written to free slots.
    pub stripes_in_progress: usize,
    /// Fresh writes on their way, in bytes since the last checkpoint.
    pub fresh_bytes: usize,
    /// Passes that wait until a slot has no images.
    pub waiting_for_drain: Vec<usize>,
    /// Slots that may be used again once no checkpoint writes to them.
    pub to_free: Vec<SlotIndex>,
    /// Stripes discarded since the last checkpoint: their space is given back with the next.
    pub discarded: BTreeSet<u64>,
    /// A device waits to join: no new writes until the log is empty.
    pub held: bool,
    /// Pages that were loaded for operations which have not looked yet.
    pub arrivals: Vec<Arrival>,
    /// Pages that cannot be read for now.
    pub unreadable: UnreadablePages,
    /// By the ticket of their hold, the operations that wait for pages; see `page_hold.rs`.
    pub page_tickets: HashMap<usize, usize>,
    pub next_page_ticket: usize,
    /// Client requests that came before the log was replayed, and when.
    pub queued: VecDeque<(PieceId, SlotRequest, Timestamp)>,
    /// The next replay writes nothing in place.
    pub lifts: bool,
    /// What such a replay has found is not all in place.
    pub unsettled: Option<Unsettled>,
    /// Blocks of the rings that notes may use and other batches may not.
    reserve: u32,
    /// The open batch found no room in the rings.
    is_stuck: bool,
    /// Images that gather before a checkpoint, in bytes: what two generations have in any one ring
    /// must fit it, with their headers.
    pub overlay_max: usize,
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
struct FlushRequest {
    /// Every batch below must be durable for it.
    target: u64,
    piece: PieceId,
    since: Timestamp,
}

struct Round {
    pending: usize,
    upto: u64,
}

/// Batches on their way at one time: the second gathers what came while the first was written.
const IN_FLIGHT_MAX: usize = 4;
/// A batch beside others on their way is issued when it has this many bytes of payload on some member; a smaller one
/// gathers more until those are written.
const GATHER_BYTES: usize = 256 << 10;
/// A write goes through the log in parts that take no more than one in so many blocks of a ring each: several are then
/// on their way at a time, and none is ever too large for what a skipped end leaves.
const PART_FRACTION: usize = 16;
/// Blocks for notes in the smallest ring: those of a checkpoint, of its tail and of a replay.
const RESERVE_MIN: u32 = 4;
/// Largest payload of one batch on one member.
const BATCH_BYTES_MAX: usize = 8 << 20;

impl Redo {
    pub(in crate::array) fn new(facts: LogFacts, pages: PageStore, journal: Journal) -> Redo {
        let ring_blocks = journal.ring_blocks();
        let ring_bytes = ring_blocks as usize * LOG_BLOCK_BYTES;
        // A write adds to each of 1 + m members as many images as it takes of the fullest ring at
        // most.
        let overlay_max = facts.overlay_max.min(ring_bytes / 4 * facts.members_of_write);
        Redo {
            life: Life::Starting,
            unjudged: false,
            yields_to_force: false,
            behind: MemberSet::default(),
            durable_before: 0,
            acknowledged_before: 0,
            lives: 1,
            journal,
            overlay: Overlay::default(),
            pages,
            stripes: StripeMap::default(),
            checksums: facts.checksums,
            checkpoint: Checkpoint::default(),
            log_offset: facts.log.offset,
            ring_blocks,
            pages_offset: facts.pages_offset,
            open: OpenBatch::default(),
            waiters: VecDeque::new(),
            flushes: Vec::new(),
            round: None,
            rounds_begun: 0,
            rounds_ended: 0,
            waiting_for_room: VecDeque::new(),
            waiting_for_slot: Vec::new(),
            waiting_for_batch: Vec::new(),
            promised: Share::default(),
            stripes_in_progress: 0,
            fresh_bytes: 0,
            waiting_for_drain: Vec::new(),
            to_free: Vec::new(),
            discarded: BTreeSet::new(),
            held: false,
            queued: VecDeque::new(),
            lifts: false,
            unsettled: None,
            reserve: (ring_blocks / 8).max(RESERVE_MIN),
            is_stuck: false,
            overlay_max,
            arrivals: Vec::new(),
            unreadable: UnreadablePages::default(),
            page_tickets: HashMap::new(),
            next_page_ticket: 0,
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
        let pending = self.overlay.active_bytes() + self.promised.bytes;
        let open =
            self.open.payload_blocks_max() as usize + self.open.manifest_bytes().div_ceil(LOG_BLOCK_BYTES);
        // A piece may have to skip as much as it takes.
        let blocks = used_blocks as usize + 2 * (self.promised.blocks + share.blocks + open);
        !self.held
            && self.unsettled.is_none()
            && (pending == 0 || pending + share.bytes <= self.overlay_max)
            && blocks <= (self.ring_blocks - self.reserve - self.ring_blocks / 8) as usize
    }

    /// Rows that one record may have, so that every piece finds room in a ring once what is before it is in place. `width`
    /// is that of the array.
    pub(in crate::array) fn rows_max(&self, width: usize) -> usize {
        // What the manifest has for a row, at most; see `share_of_write`.
        let row_bytes = LOG_BLOCK_BYTES + 16 * width + 64 + 2 * width;
        ((self.ring_blocks as usize / PART_FRACTION).saturating_sub(1) * LOG_BLOCK_BYTES / row_bytes).max(1)
    }

    /// Whether a record that takes so many blocks of a ring, all of them header, finds room for certain.
    pub(in crate::array) fn fits_ring(&self, blocks: usize) -> bool {
        blocks <= self.ring_blocks as usize / 8
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
            self.waiters.push_back((last, key, durable));
        } else {
            self.open.waiters.push((key, durable));
        }
    }

    /// Whether an operation waits for a batch.
    pub(in crate::array) fn is_waiting(&self, key: usize) -> bool {
        self.waiters.iter().any(|(_, waiting, _)| *waiting == key)
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
        let bytes_max = BATCH_BYTES_MAX.min(self.ring_blocks as usize * LOG_BLOCK_BYTES / 8);
        self.open.is_empty()
            || (self.open.manifest_bytes() + record_bytes(record) <= bytes_max.min(HEADER_BYTES_MAX / 2)
                && self.open.payload_blocks_max() as usize * LOG_BLOCK_BYTES + payload_bytes <= bytes_max)
    }

    /// All operations that wait for something of the log: they are to look again.
    pub(super) fn take_all_waiting(&mut self) -> Vec<usize> {
        let mut all: Vec<usize> = self.waiters.drain(..).map(|(_, key, _)| key).collect();
        all.extend(self.open.waiters.drain(..).map(|(key, _)| key));
        all.extend(self.waiting_for_room.drain(..));
        all.append(&mut self.waiting_for_slot);
        all.append(&mut self.waiting_for_batch);
        all.append(&mut self.waiting_for_drain);
        all
    }

    pub(super) fn take_flushes(&mut self) -> Vec<PieceId> {
        std::mem::take(&mut self.flushes).into_iter().map(|flush| flush.piece).collect()
    }

    /// Flush requests that have waited for so long.
    pub(in crate::array) fn take_late_flushes(&mut self, now: Timestamp, patience_ns: u64) -> Vec<PieceId> {
        let late = |flush: &mut FlushRequest| now.nanos_since(flush.since) >= patience_ns;
        self.flushes.extract_if(.., late).map(|flush| flush.piece).collect()
    }

    /// An operation that may be waiting for something of the log waits for nothing any more.
    pub(in crate::array) fn forget_waiting(&mut self, key: usize) {
        self.waiters.retain(|(_, waiting, _)| *waiting != key);
        self.open.waiters.retain(|(waiting, _)| *waiting != key);
        self.waiting_for_room.retain(|waiting| *waiting != key);
        self.waiting_for_slot.retain(|waiting| *waiting != key);
        self.waiting_for_batch.retain(|waiting| *waiting != key);
    }
}

impl Array {
    /// The log, the overlay and the pages.
    pub(in crate::array) fn redo(&self) -> &Redo {
        &self.redo
    }

    /// See [`Array::redo`].
    pub(in crate::array) fn redo_mut(&mut self) -> &mut Redo {
        &mut self.redo
    }

    /// Moves the log on as far as it goes.
    pub(in crate::array) fn pump_redo(&mut self) {
        if self.core.is_stopped() {
            return;
        }
        if !self.redo().is_serving() {
            self.pump_startup();
            return;
        }
        if self.core.is_failed() {
            return;
        }
        self.end_hold();
        self.release_waiters();
        self.issue_open();
        self.pump_settling();
        self.pump_checkpoint();
        self.push_notes();
        self.start_round();
    }

    /// Whether writes wait for what a note or a tail would set free.
    fn is_pressed(&self) -> bool {
        let redo = self.redo();
        let waiting = redo.journal.slots_waiting() as u64;
        if !redo.journal.tail_is_news() && waiting == 0 {
            return false;
        }
        let reserve = self.core.map.slots - self.core.geometry.stripes();
        redo.is_stuck
            || !redo.waiting_for_room.is_empty()
            || !redo.waiting_for_slot.is_empty()
            || (waiting >= reserve.div_ceil(4) && redo.stripes.free_slots() <= reserve / 4)
            || (redo.journal.tail_is_news() && redo.journal.fullness() >= 64)
    }

    /// Issues an empty batch when its note or tail is waited for and no other batch will carry it.
    fn push_notes(&mut self) {
        let redo = self.redo();
        if redo.journal.in_flight() > 0 || !redo.journal.has_news() {
            return;
        }
        if redo.open.is_empty() && self.is_pressed() {
            self.issue_batch();
        } else if redo.is_stuck && redo.journal.tail_is_news() {
            // The reserve is for this: a tail that makes room goes before what waits for it.
            let open = std::mem::take(&mut self.redo_mut().open);
            self.issue_batch();
            self.redo_mut().open = open;
        }
    }

    /// Acknowledges what may be: operations look at their batch themselves when they are advanced.
    fn release_waiters(&mut self) {
        if !self.acknowledgements_allowed() && !is_off(Mutation::AckBeforeBump) {
            return;
        }
        let redo = &mut self.redo;
        redo.journal.tell_written();
        let (written, durable) = (redo.journal.written(), redo.journal.durable());
        while let Some(at) = redo.waiters.iter().position(|&(sequence, _, must_be_durable)| {
            sequence < if must_be_durable { durable } else { written }
        }) {
            let (_, key, _) = redo.waiters.remove(at).expect("just found");
            self.core.ready.push_back(key);
        }
        let done: Vec<PieceId> =
            redo.flushes.extract_if(.., |flush| flush.target <= durable).map(|flush| flush.piece).collect();
        for piece in done {
            self.core.client_ops -= 1;
            self.core.done(piece, Ok(SlotReply::Done));
        }
    }

    /// A flush of a logged array: everything acknowledged before is in written batches.
    pub(in crate::array) fn start_logged_flush(&mut self, piece: PieceId) {
        self.core.client_ops += 1;
        let target = self.redo().journal.written();
        let since = self.core.now;
        self.redo_mut().flushes.push(FlushRequest { target, piece, since });
    }

    /// Writes the open batch to the logs, if it is its turn.
    fn issue_open(&mut self) {
        loop {
            let redo = self.redo();
            if redo.open.is_empty() {
                return;
            }
            let in_flight = redo.journal.in_flight();
            // Records of whole stripes wait for those of as many others as are being written.
            if redo.open.is_records_alone() && redo.open.records.len() < redo.stripes_in_progress {
                return;
            }
            let gathered = redo.open.payload_blocks_max() as usize * LOG_BLOCK_BYTES >= GATHER_BYTES;
            if in_flight >= IN_FLIGHT_MAX || (in_flight > 0 && !gathered) || !self.issue_batch() {
                return;
            }
        }
    }

    /// Issues the open batch, which may be empty: a note. False: it cannot be now.
    pub(super) fn issue_batch(&mut self) -> bool {
        // Until the log starts anew, its space is taken by what was replayed.
        if self.redo().unsettled.is_some() || !self.writes_allowed() {
            return false;
        }
        let live = self.core.online();
        let epoch = self.supers.epoch();
        let stamp = EpochStamp { number: epoch.number, id: epoch.id };
        let redo = self.redo_mut();
        // The last block is for the note of a replay.
        let reserve = if redo.open.is_empty() { 1 } else { redo.reserve };
        let sequence = redo.journal.next();
        let Some((manifest, pieces)) = redo.journal.issue(stamp, &live, &redo.open, reserve) else {
            redo.checkpoint.want();
            redo.is_stuck = true;
            return false;
        };
        redo.is_stuck &= redo.open.is_empty();
        self.supers.note_batch();
        let redo = self.redo_mut();
        let open = std::mem::take(&mut redo.open);
        redo.waiters.extend(open.waiters.into_iter().map(|(key, durable)| (sequence, key, durable)));
        let log_offset = redo.log_offset;
        let waiting = std::mem::take(&mut redo.waiting_for_batch);
        self.core.ready.extend(waiting);
        let header = manifest.header_bytes();
        for piece in pieces {
            let payload = piece.payload_bytes();
            let mut buf = self.core.pool.alloc(header + payload);
            manifest.write_piece(piece.member, (payload / LOG_BLOCK_BYTES) as u32, &mut buf[..header]);
            let mut at = header;
            for block in &piece.payload {
                buf[at..at + block.len()].copy_from_slice(block);
                at += block.len();
            }
            let device = self.core.member(piece.member).device.expect("a member in service has a device").id;
            let offset = log_offset.plus(piece.offset);
            let op = IoOp::Write { offset, buf: buf.freeze(), fua: false };
            self.core.submit_io(Owner::Piece { sequence }, piece.member, device, op);
        }
        true
    }

    pub(in crate::array) fn piece_io(
        &mut self,
        sequence: u64,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) {
        if let Err(fault) = result {
            self.write_fault(entry.member, entry.device, "write to the redo log", fault);
        }
        let redo = self.redo_mut();
        if redo.is_serving() {
            redo.journal.piece_done(sequence);
        }
    }

    /// Begins a flush of every member when somebody waits for one.
    fn start_round(&mut self) {
        let redo = self.redo();
        if redo.round.is_some() {
            return;
        }
        let journal = &redo.journal;
        let (written, durable) = (journal.written(), journal.durable());
        let waited_for =
            redo.waiters.iter().any(|&(sequence, _, must)| must && sequence < written && sequence >= durable)
                || redo.flushes.iter().any(|flush| flush.target > durable && flush.target <= written)
                || redo.checkpoint.wants_round(journal, redo.rounds_begun)
                || (written > durable && self.is_pressed());
        if !waited_for {
            return;
        }
        // What a checkpoint wrote to devices under construction must be durable too: it counts as built.
        let all = redo.checkpoint.is_flushing();
        let mut pending = 0;
        for (member, which, device) in self.core.devices() {
            let in_service = which == Which::Primary && self.core.member(member).state == MemberState::Online;
            if (all || in_service) && device.is_unflushed() {
                self.core.submit_io(Owner::Round, member, device.id, IoOp::Flush);
                pending += 1;
            }
        }
        let redo = self.redo_mut();
        redo.rounds_begun += 1;
        redo.round = Some(Round { pending, upto: written });
        if pending == 0 {
            self.end_round();
        }
    }

    pub(in crate::array) fn round_io(&mut self, entry: Inflight, result: Result<IoValue, IoFault>) {
        if let Err(fault) = result {
            self.flush_fault(entry.member, entry.device, fault);
        }
        let redo = self.redo_mut();
        let Some(round) = &mut redo.round else { return };
        round.pending -= 1;
        if round.pending == 0 {
            self.end_round();
        }
    }

    fn end_round(&mut self) {
        let failed = self.core.is_failed();
        let redo = self.redo_mut();
        let Some(round) = redo.round.take() else { return };
        redo.rounds_ended = redo.rounds_begun;
        if failed || !redo.is_serving() {
            return;
        }
        let free = redo.journal.flushed(round.upto);
        redo.to_free.extend(free);
        self.free_slots();
        self.wake_waiting_for_room();
        // The round may be what an acknowledgement or the checkpoint waited for.
        self.release_waiters();
        self.pump_checkpoint();
        if !self.redo().checkpoint.is_quiet() {
            self.start_round();
        }
    }

    /// Gives slots back to the map that no checkpoint writes to (W3). Not while a loss is not recorded (E3).
    pub(super) fn free_slots(&mut self) {
        if !self.acknowledgements_allowed() {
            return;
        }
        let redo = self.redo_mut();
        let free: Vec<SlotIndex> = {
            let (overlay, checkpoint) = (&redo.overlay, &redo.checkpoint);
            redo.to_free
                .extract_if(.., |slot| {
                    (!overlay.is_frozen(*slot) && !checkpoint.is_punching(*slot))
                        || is_off(Mutation::DestageBySlotNumber)
                })
                .collect()
        };
        for slot in free {
            redo.stripes.free(slot);
        }
    }

    /// Lets operations look again whether there is room.
    pub(in crate::array) fn wake_waiting_for_room(&mut self) {
        let redo = self.redo_mut();
        let slots = std::mem::take(&mut redo.waiting_for_slot);
        let waiting = std::mem::take(&mut redo.waiting_for_room);
        self.core.ready.extend(slots);
        self.core.ready.extend(waiting);
    }

    /// Where a stripe is.
    pub(in crate::array) fn slot_of(&self, stripe: StripeIndex) -> SlotIndex {
        self.redo().pages.map_entry(stripe).slot
    }

    /// Whether a stripe holds data; otherwise it reads as zeroes.
    pub(in crate::array) fn holds_data(&self, stripe: StripeIndex) -> bool {
        self.redo().pages.map_entry(stripe).holds_data
    }

    /// Tells the operator of blocks that cannot be had, and keeps them for the status.
    pub(in crate::array) fn note_missing(
        &mut self,
        stripe: StripeIndex,
        slot: SlotIndex,
        missing: &[Missing],
    ) {
        self.damage.note(stripe, missing);
        self.notice_unreadable(slot, self.core.offset_of(stripe, missing));
    }

    /// The pages with the hashes of these rows; none where there are no checksums.
    pub(in crate::array) fn hash_pages(&self, slot: SlotIndex, rows: Range<usize>) -> Range<u64> {
        let redo = self.redo();
        if redo.checksums.is_some() { redo.pages.layout().hash_pages(slot, rows) } else { 0..0 }
    }

    /// Which stripes of a run hold nothing.
    pub(in crate::array) fn logged_extents(&mut self, piece: PieceId, first: StripeIndex, count: u64) {
        let mut runs: Vec<(u64, bool)> = Vec::new();
        for stripe in (first.0..first.0 + count).map(StripeIndex) {
            let hole = !self.holds_data(stripe);
            match runs.last_mut() {
                Some((stripes, last)) if *last == hole => *stripes += 1,
                _ => runs.push((1, hole)),
            }
        }
        self.core.done(piece, Ok(SlotReply::Holes(runs)));
    }

    /// The sequence of the next batch, when the log is empty and everything is in place and durable, copies of pages that
    /// have to be written again included.
    pub(in crate::array) fn drained_log(&self) -> Option<u64> {
        self.needless_log().filter(|_| self.redo().pages.dirty_pages() == 0)
    }

    /// The sequence of the next batch, when a replay would find nothing below it to be done. Copies of pages may have to be
    /// written again, which the log knows nothing of: they must not keep a member out of step that joins an array in which
    /// another one is being built, for it has no part in the batches so far.
    pub(in crate::array) fn needless_log(&self) -> Option<u64> {
        self.log_end_if_empty().filter(|_| self.redo.is_settled())
    }

    /// The same, whether or not the superblocks say that a log that was replayed starts there.
    pub(super) fn log_end_if_empty(&self) -> Option<u64> {
        let redo = &self.redo;
        let drained = redo.is_serving()
            && redo.journal.is_drained()
            && redo.journal.in_flight() == 0
            && redo.open.is_empty()
            && redo.overlay.is_empty()
            && redo.pages.changed_pages() == 0
            && redo.checkpoint.is_over();
        drained.then(|| redo.journal.next())
    }

    /// Ends everything that waits for the log: the array has failed, and what its members hold then decides.
    pub(in crate::array) fn log_failed(&mut self) {
        self.end_page_trials();
        if self.core.stopping.is_none() {
            // Nothing says that the array is quiet before its log was read.
            self.supers.unmark_clean();
        }
        let redo = &mut self.redo;
        redo.lives += 1;
        if redo.is_serving() {
            redo.durable_before = redo.journal.durable();
            redo.acknowledged_before = redo.journal.acknowledged();
        }
        let waiting = redo.take_all_waiting();
        let mut pieces = redo.take_flushes();
        self.core.client_ops -= pieces.len();
        pieces.extend(redo.queued.drain(..).map(|(piece, ..)| piece));
        redo.life = Life::Starting;
        redo.unsettled = None;
        redo.round = None;
        self.passes.forget_owed_pages();
        self.core.ready.extend(waiting);
        let patient = std::mem::take(&mut self.core.patient);
        self.core.ready.extend(patient.into_iter().map(|(_, key)| key));
        for piece in pieces {
            self.core.done(piece, Err(ClientError::Io));
        }
    }
}

impl Core {
    /// Whether whole stripes go to free slots.
    pub(in crate::array) fn full_stripe_fresh(&self) -> bool {
        self.config.full_stripe == crate::array::FullStripe::Fresh
    }

    pub(in crate::array) fn notice_repair(
        &mut self,
        member: MemberIndex,
        slot: SlotIndex,
        row: usize,
        rows: usize,
    ) {
        let text = format!(
            "{} of member {member} from row {row} of slot {slot} on {} wrong or unreadable; {} rewritten",
            Count::of(rows, "block"),
            Count::of(rows, "block").were(),
            if rows == 1 { "it is" } else { "they are" }
        );
        self.notice(NoticeKind::BlocksRepaired, NoticeLevel::Warning, Some(member), text);
    }

    /// The member that has a column of a slot.
    pub(in crate::array) fn member_at(&self, slot: SlotIndex, column: usize) -> MemberIndex {
        self.map.member_of(slot, ColumnIndex(column as u16))
    }

    /// Where in the volume the first of these blocks of a stripe lies; blocks of parity are those of its
    /// start.
    pub(in crate::array) fn offset_of(&self, stripe: StripeIndex, missing: &[Missing]) -> VolumeOffset {
        let data = missing.iter().filter(|block| block.column < self.map.k);
        let within = data.map(|block| block.column * self.map.chunk + block.row * ROW_BYTES as usize).min();
        VolumeOffset(stripe.0 * self.map.stripe_bytes() as u64 + within.unwrap_or(0) as u64)
    }
}
