//! Writes of logged arrays. A part of a stripe goes through the redo log and later in place; a whole stripe
//! goes to a free slot and becomes live by a record; a discarded stripe is a record alone.
//!
//! The rows are locked until their new content is in the open batch, in the overlay and in the page cache.
//! From then on all operations read the new content. Old data and old parity are verified before they enter a
//! new parity (`fetch.rs`). A write that fails before it joined a batch has changed nothing. A write changes
//! what it was asked to change (rule T2): `unreadable.rs` says how it goes on where a row cannot be read for
//! its parity.

use crate::array::base::lock::{LockKey, LockMode};
use crate::array::blocks::BlockName;
use crate::array::client::fetch::{Fetch, FetchRules, Fetched};
use crate::array::client::plan::{self, Band, ParityPath};
use crate::array::log::LogDemand;
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::hold::{PageHold, PagesHeld};
use crate::array::{Array, ClientError, Core, Flow, Inflight, Op, StripeReply, StripeRequestId};
use crate::block_io::{Buf, DeviceId, IoFault, IoValue};
use crate::codec::CodedColumns;
use crate::format::LogRecord;
use crate::units::{MemberIndex, ROW_BYTES, SlotIndex, StripeIndex, Timestamp};
use std::ops::Range;

mod parity;
mod patience;
mod records;
mod room;
mod stripe;
mod unreadable;
mod widen;

use unreadable::Way;
use widen::{Coded, TakenAlong};

const BLOCK: usize = ROW_BYTES as usize;

pub(in crate::array) struct LoggedWrite {
    /// What its client is answered, and when.
    request: WriteRequest,
    stripe: StripeIndex,
    slot: SlotIndex,
    task: WriteTask,
    life: u64,
    stage: Stage,
    /// The block that this operation writes again if its member still has it.
    repays: Option<BlockName>,
    /// The rows locked, in bytes within the chunk; none while unlocked.
    locked: Option<Range<usize>>,
    pages: PageHold,
    promised: LogDemand,
    fetch: Fetch,
    parity: ParityWork,
    records: Vec<(LogRecord, Vec<(u16, Buf)>)>,
    /// State of the write of a whole stripe.
    whole: WholeStripe,
}

/// What the client of a write is answered, and when.
struct WriteRequest {
    /// None once the client has its answer.
    id: Option<StripeRequestId>,
    fua: bool,
    /// When the client asked for it.
    since: Timestamp,
    /// The error that its client gets because it has waited too long for the end of a shortage.
    expired: Option<ClientError>,
}

/// What is to be written.
struct WriteTask {
    work: Work,
    /// The data as the client sent them, where `work` holds whole blocks made of them and of the old bytes of
    /// those blocks. Those blocks are right only while the rows are locked.
    asked: Option<(usize, Buf)>,
    /// Data that come after `work`: where a ring is small beside a chunk, a write goes part by part.
    rest: Option<(usize, Buf)>,
}

/// How new parity is computed.
struct ParityWork {
    plans: Vec<(Band, ParityPath)>,
    way: Way,
    /// When the rows could not be read for the first time.
    unreadable_since: Option<Timestamp>,
}

/// The write of a whole stripe.
#[derive(Default)]
struct WholeStripe {
    /// A part is to become a whole stripe, with what it leaves as it is.
    widens: bool,
    /// That was tried.
    was_tried: bool,
    /// What was taken along.
    along: TakenAlong,
    /// Parity and hashes, where they were computed when that was verified.
    coded: Option<Coded>,
    /// The free slot that it goes to, locked as such.
    target: Option<SlotIndex>,
    /// Writes under way, and the member of each.
    pending: usize,
    writes: Vec<StripeWrite>,
    /// The error for the client where a member had no room for the stripe, or this host lacked resources for
    /// it, for too long.
    short: Option<ClientError>,
}

enum Work {
    /// New bytes at an offset of the stripe.
    Data { offset: usize, data: Buf },
    /// A whole stripe, by column, for a free slot.
    Stripe { columns: Vec<Buf> },
    /// Discards `left` whole stripes, from this one on.
    Discard { left: u64 },
    /// Reads a block that is set aside, and writes it again if its member still has its content.
    Repay { column: usize, row: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Waits until there is room for it in overlay and log.
    Room,
    Lock,
    /// Waits until this time to read again what could not be read.
    Patience(Timestamp),
    /// Loading pages.
    Pages,
    /// Reading a block that is set aside.
    Repay,
    /// Reading the old bytes of blocks that are overwritten in part.
    Edges,
    /// Reading what new parity is computed from.
    Old,
    /// Reading the rest of the stripe, which goes to a free slot with what is new.
    Rest,
    /// Waits for a free slot, and for the gate.
    Slot,
    SlotLock,
    /// A whole stripe is being coded and hashed elsewhere.
    Code,
    /// Writing a whole stripe.
    Stripe,
    /// Its records wait to get into a batch.
    Join,
    /// In a batch; waits until that is written or durable.
    Logged,
}

impl Stage {
    /// Whether operations or a job are under way, whose ends take the write on.
    fn has_io(self) -> bool {
        use Stage::{Code, Edges, Old, Repay, Rest, Stripe};
        matches!(self, Edges | Old | Rest | Code | Stripe | Repay)
    }
}

struct StripeWrite {
    member: MemberIndex,
    device: DeviceId,
    column: usize,
    retried: bool,
}

impl Array {
    pub(in crate::array) fn start_logged_write(
        &mut self,
        id: StripeRequestId,
        stripe: StripeIndex,
        offset: usize,
        data: Buf,
        fua: bool,
    ) {
        assert!(
            !data.is_empty() && offset + data.len() <= self.core.map.stripe_bytes(),
            "a write beyond its stripe"
        );
        self.start_logged(Some(id), stripe, Work::Data { offset, data }, fua);
    }

    pub(in crate::array) fn start_discard(&mut self, id: StripeRequestId, first: StripeIndex, count: u64) {
        assert!(
            count > 0 && first.0 + count <= self.core.shape.geometry.stripes(),
            "a discard out of bounds"
        );
        self.start_logged(Some(id), first, Work::Discard { left: count }, false);
    }

    /// Starts a write. No client waits for one without an `id`.
    fn start_logged(&mut self, id: Option<StripeRequestId>, stripe: StripeIndex, work: Work, fua: bool) {
        self.core.load.client_ops += usize::from(id.is_some());
        self.core.load.write_ops += 1;
        let slot = SlotIndex(stripe.0);
        let repays = match work {
            Work::Repay { column, row } => Some((stripe, column as u16, row as u32)),
            Work::Data { .. } | Work::Stripe { .. } | Work::Discard { .. } => None,
        };
        let mut write = Box::new(LoggedWrite {
            request: WriteRequest { id, fua, since: self.core.now, expired: None },
            stripe,
            slot,
            task: WriteTask { work, asked: None, rest: None },
            life: self.redo.lives(),
            stage: Stage::Room,
            repays,
            locked: None,
            pages: PageHold::default(),
            promised: LogDemand::default(),
            fetch: Fetch::new(slot, FetchRules::default()),
            parity: ParityWork { plans: Vec::new(), way: Way::Usual, unreadable_since: None },
            records: Vec::new(),
            whole: WholeStripe::default(),
        });
        self.cut_write(&mut write);
        let key = self.ops.insert(Op::Busy);
        let flow = self.advance_logged_write(key, &mut write);
        self.put_back(key, Op::LoggedWrite(write), flow);
    }

    /// Takes the write as far as it can go: after a grant, a page, room, a free slot, a written batch, or a
    /// failure.
    pub(in crate::array) fn advance_logged_write(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        loop {
            if write.stage.has_io() {
                return Flow::Wait;
            }
            if self.core.is_failed() || write.life != self.redo.lives() {
                return self.end_logged_write(key, write, Err(ClientError::Io));
            }
            if let Some(error) = write.request.expired {
                return self.end_logged_write(key, write, Err(error));
            }
            let before = write.stage;
            let flow = match write.stage {
                Stage::Room => self.admit_write(key, write),
                Stage::Lock if !self.core.locks.is_held(LockKey::Stripe(write.stripe), key) => Flow::Wait,
                Stage::Lock => self.locked_write(key, write),
                Stage::Patience(until) => self.core.try_again(write, until),
                Stage::Pages => self.load_write(key, write),
                Stage::Slot => self.choose_slot(key, write),
                Stage::SlotLock => match write.whole.target {
                    Some(target) if self.core.locks.is_held(LockKey::Slot(target), key) => {
                        self.code_stripe(key, write)
                    }
                    _ => Flow::Wait,
                },
                Stage::Join => self.join_write(key, write),
                Stage::Logged if self.redo.is_waiting(key) => Flow::Wait,
                Stage::Logged => return self.acknowledge_logged(key, write),
                Stage::Edges | Stage::Old | Stage::Rest => Flow::Wait,
                Stage::Code | Stage::Stripe | Stage::Repay => Flow::Wait,
            };
            if flow == Flow::Finished || write.stage == before {
                return flow;
            }
        }
    }

    /// Whether the write goes to a free slot as a whole stripe.
    fn goes_to_free_slot(&self, write: &LoggedWrite) -> bool {
        self.core.is_whole(write) && !write.was_tried_as_stripe() && self.stripes_go_to_free_slots()
    }

    fn stripes_go_to_free_slots(&self) -> bool {
        let record = self.core.manifest_blocks(self.core.map.width() * self.core.map.chunk / BLOCK, 1);
        self.core.full_stripe_fresh() && self.redo.fits_ring(record)
    }

    fn admit_write(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        self.core.load.last_write = self.core.now;
        if !self.core.has_room_for_slots() {
            self.goes_through_log(key, write);
        }
        write.whole.widens = self.pays_as_stripe(write);
        let demand = self.demand_of_write(write);
        if !self.redo.admits(demand) {
            if let Some(error) = self.core.lasting_shortage() {
                return self.end_logged_write(key, write, Err(error));
            }
            self.redo.wait_for_room(key);
            return Flow::Wait;
        }
        write.promised = demand;
        let rows = self.rows_to_lock(write);
        write.stage = Stage::Lock;
        write.locked = Some(rows.clone());
        self.core.locks.acquire(LockKey::Stripe(write.stripe), rows, LockMode::Exclusive, key);
        Flow::Wait
    }

    /// Rows that the write locks for itself: all where the stripe holds no data yet, since its first write
    /// decides about every block, and where all blocks move.
    fn rows_to_lock(&self, write: &LoggedWrite) -> Range<usize> {
        match &write.task.work {
            Work::Data { offset, data }
                if self.pages.holds_data(write.stripe)
                    && !self.core.is_whole(write)
                    && !write.whole.widens =>
            {
                self.core.rows_of(*offset, data.len())
            }
            Work::Repay { row, .. } => row * BLOCK..(row + 1) * BLOCK,
            _ => 0..self.core.map.chunk,
        }
    }

    /// Goes on when the lock is granted.
    fn locked_write(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        let rows = self.rows_to_lock(write);
        let held = write.locked.clone().unwrap_or_default();
        if rows.start < held.start || rows.end > held.end {
            // The stripe was discarded while the write waited.
            self.core.unlock(LockKey::Stripe(write.stripe), key);
            write.locked = Some(rows.clone());
            if !self.core.locks.acquire(LockKey::Stripe(write.stripe), rows.clone(), LockMode::Exclusive, key)
            {
                return Flow::Wait;
            }
        }
        write.slot = self.pages.map_entry(write.stripe).slot;
        let first = !self.pages.holds_data(write.stripe);
        if let Work::Discard { .. } = write.task.work {
            if first {
                return self.next_discard(key, write);
            }
            write.records = vec![(LogRecord::Discard { stripe: write.stripe, slot: write.slot }, Vec::new())];
            write.stage = Stage::Join;
            return Flow::Wait;
        }
        if matches!(write.task.work, Work::Repay { .. }) && first {
            return self.end_logged_write(key, write, Ok(StripeReply::Done));
        }
        if first && self.pages.checksums().is_none() && !self.core.is_whole(write) {
            self.core.fill_stripe(write);
        }
        let goes_to_slot = self.core.is_whole(write) && !write.was_tried_as_stripe();
        if goes_to_slot && (self.core.full_stripe_fresh() || first) {
            write.stage = Stage::Slot;
            return Flow::Wait;
        }
        if first && write.whole.widens {
            return self.fetch_rest(key, write);
        }
        let rows = if first || write.whole.widens { 0..self.core.map.chunk } else { rows };
        let pages = self.pages.hash_pages(write.slot, rows.start / BLOCK..rows.end / BLOCK);
        write.pages = PageHold::of_client(pages, write.life);
        write.stage = Stage::Pages;
        Flow::Wait
    }

    /// Asks for the pages; once they are here, old bytes are read.
    fn load_write(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        match self.hold_pages(key, &mut write.pages) {
            PagesHeld::Wait => return Flow::Wait,
            PagesHeld::Unreadable => return self.end_logged_write(key, write, Err(ClientError::Io)),
            PagesHeld::All { .. } => {}
        }
        if write.whole.widens {
            return self.fetch_rest(key, write);
        }
        self.with_pages(key, write)
    }

    /// Reads old bytes, now that the pages are here.
    fn with_pages(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        if let Work::Repay { column, row } = write.task.work {
            return self.read_set_aside(key, write, column, row);
        }
        let Work::Data { offset, data } = &write.task.work else { unreachable!("a discard needs no pages") };
        let (start, end) = (*offset, *offset + data.len());
        if start.is_multiple_of(BLOCK) && end.is_multiple_of(BLOCK) {
            return self.plan_logged(key, write);
        }
        write.stage = Stage::Edges;
        write.fetch = Fetch::new(write.slot, FetchRules::default());
        if self.pages.holds_data(write.stripe) {
            let mut edges = Vec::new();
            if !start.is_multiple_of(BLOCK) {
                edges.push(start / BLOCK);
            }
            if !end.is_multiple_of(BLOCK) && !edges.contains(&(end / BLOCK)) {
                edges.push(end / BLOCK);
            }
            let rows = self.core.map.chunk / BLOCK;
            for block in edges {
                let buf = self.core.pool.alloc(BLOCK);
                write.fetch.want(block / rows, block % rows..block % rows + 1, buf);
            }
        }
        match self.fetch(key, &mut write.fetch) {
            Fetched::Wait => Flow::Wait,
            Fetched::Done => self.merge_edges(key, write),
        }
    }

    /// Makes whole blocks of the payload.
    fn merge_edges(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        if !write.fetch.missing().is_empty() {
            return self.edges_missing(key, write);
        }
        let Work::Data { offset, data } = &mut write.task.work else { unreachable!("only data has edges") };
        let start = *offset / BLOCK * BLOCK;
        let end = (*offset + data.len()).next_multiple_of(BLOCK);
        let rows = self.core.map.chunk / BLOCK;
        let mut merged = self.core.pool.alloc_zeroed(end - start);
        for (column, block, bytes) in write.fetch.take() {
            let at = (column * rows + block.start) * BLOCK - start;
            merged[at..at + BLOCK].copy_from_slice(&bytes);
        }
        merged[*offset - start..*offset - start + data.len()].copy_from_slice(data);
        let asked = (std::mem::replace(offset, start), std::mem::replace(data, merged.freeze()));
        write.task.asked = Some(asked);
        self.plan_logged(key, write)
    }

    /// Decides for each band how its parity is computed, and fetches what that takes.
    fn plan_logged(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        let Work::Data { offset, data } = &write.task.work else { unreachable!("a discard has no parity") };
        let parities: Vec<usize> = (self.core.map.k..self.core.map.width()).collect();
        let slot = write.slot;
        let readable = |column: usize| self.core.readable(self.core.member_at(slot, column), slot).is_some();
        let first = !self.pages.holds_data(write.stripe);
        write.parity.plans.clear();
        let believes_parity = is_off(Mutation::OldParityNotVerified);
        let rules = FetchRules { in_service_only: true, believes_parity, ..FetchRules::default() };
        write.fetch = Fetch::new(slot, rules);
        for band in plan::bands(&self.core.map, *offset, data.len()) {
            let usual = plan::path(&self.core.map, &band, readable, &parities);
            let path = match (usual, write.parity.way) {
                (ParityPath::Direct, _) => ParityPath::Direct,
                _ if first => ParityPath::ReconstructWrite,
                (ParityPath::ReadModifyWrite, Way::Usual) | (_, Way::Delta) => ParityPath::ReadModifyWrite,
                _ => ParityPath::ReconstructWrite,
            };
            let columns: Vec<usize> = match path {
                _ if first => Vec::new(),
                ParityPath::ReadModifyWrite => band.columns.clone().chain(parities.iter().copied()).collect(),
                ParityPath::ReconstructWrite => {
                    (0..self.core.map.k).filter(|c| !band.columns.contains(c)).collect()
                }
                _ => Vec::new(),
            };
            let rows = band.rows.start / BLOCK..band.rows.end / BLOCK;
            for column in columns {
                write.fetch.want(column, rows.clone(), self.core.pool.alloc(rows.len() * BLOCK));
            }
            write.parity.plans.push((band, path));
        }
        self.blend_parity(write);
        write.stage = Stage::Old;
        match self.fetch(key, &mut write.fetch) {
            Fetched::Wait => Flow::Wait,
            Fetched::Done => self.fetched_old(key, write),
        }
    }

    /// Where a large write is one band, has its parity computed in the same pass over memory that verifies
    /// the sources.
    fn blend_parity(&self, write: &mut LoggedWrite) {
        let (Work::Data { offset, data }, [(band, path)], Way::Usual) =
            (&write.task.work, &write.parity.plans[..], write.parity.way)
        else {
            return;
        };
        let first = !self.pages.holds_data(write.stripe);
        let Some(columns) = parity::blended_columns(&self.core.shape.codec, band, path, first) else {
            return;
        };
        let is_much =
            columns * band.rows.len() >= self.core.config.job_bytes_min || self.gains_from_batching();
        if self.pages.checksums().is_some() && is_much {
            let new_bytes = |column: usize| self.core.new_bytes(band, *offset, data, column);
            let blend = parity::blend_of_band(&self.core.shape.codec, band, path, new_bytes);
            write.fetch.blend(blend);
        }
    }

    fn fetched_old(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        // Coding knows a block that counts as zeroes, whatever it once held.
        if write.fetch.missing().iter().any(|block| self.core.keeps_from_coding(block)) {
            return self.old_missing(key, write);
        }
        self.records_made(write)
    }

    fn records_made(&mut self, write: &mut LoggedWrite) -> Flow {
        self.make_records(write);
        write.stage = Stage::Join;
        Flow::Wait
    }

    /// Goes on to the next stripe of a discard, or waits for the last batch.
    fn next_discard(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        let Work::Discard { left } = &mut write.task.work else {
            unreachable!("only discards have more stripes")
        };
        *left -= 1;
        let more = *left > 0;
        self.release_write(key, write);
        if !more {
            // Everything it did is in the open batch or in earlier ones.
            write.stage = Stage::Logged;
            self.redo.wait_for_all(key, write.request.fua);
            return Flow::Wait;
        }
        write.stripe = StripeIndex(write.stripe.0 + 1);
        write.stage = Stage::Room;
        Flow::Wait
    }

    pub(in crate::array) fn logged_write_io(
        &mut self,
        key: usize,
        write: &mut LoggedWrite,
        item: usize,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        if write.stage == Stage::Repay {
            return self.set_aside_read(key, write, result);
        }
        if write.stage != Stage::Stripe {
            let fetched = self.fetch_io(key, &mut write.fetch, item, entry, result);
            return self.go_on_fetched(key, write, fetched);
        }
        self.stripe_io(key, write, item, entry, result)
    }

    /// Takes the end of a job that has coded a whole stripe, or verified what was read.
    pub(in crate::array) fn logged_write_coded(
        &mut self,
        key: usize,
        write: &mut LoggedWrite,
        coded: CodedColumns,
    ) -> Flow {
        if write.stage == Stage::Code {
            return self.stripe_coded(key, write, coded);
        }
        let fetched = self.fetch_coded(key, &mut write.fetch, coded);
        self.go_on_fetched(key, write, fetched)
    }

    /// Goes on when everything fetched is here.
    fn go_on_fetched(&mut self, key: usize, write: &mut LoggedWrite, fetched: Fetched) -> Flow {
        if fetched == Fetched::Wait {
            return Flow::Wait;
        }
        if self.core.is_failed() || write.life != self.redo.lives() {
            return self.end_logged_write(key, write, Err(ClientError::Io));
        }
        let flow = match write.stage {
            Stage::Edges => self.merge_edges(key, write),
            Stage::Rest => self.rest_fetched(key, write),
            _ => self.fetched_old(key, write),
        };
        if flow == Flow::Finished { flow } else { self.advance_logged_write(key, write) }
    }

    fn acknowledge_logged(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        self.end_logged_write(key, write, Ok(StripeReply::Done))
    }

    /// Releases locks and pages.
    fn release_write(&mut self, key: usize, write: &mut LoggedWrite) {
        self.release_pages(&mut write.pages);
        if write.locked.take().is_some() {
            self.core.unlock(LockKey::Stripe(write.stripe), key);
        }
        if let Some(target) = write.whole.target.take() {
            self.core.unlock(LockKey::Slot(target), key);
        }
        let promised = std::mem::take(&mut write.promised);
        if write.life == self.redo.lives() {
            self.redo.take_back(promised);
        }
    }

    fn end_logged_write(
        &mut self,
        key: usize,
        write: &mut LoggedWrite,
        result: Result<StripeReply, ClientError>,
    ) -> Flow {
        // A free slot that did not become the stripe's is free again.
        if let (Some(target), true, Err(_)) = (write.whole.target, write.life == self.redo.lives(), &result)
            && target != write.slot
        {
            self.pages.give_back_slot(target);
        }
        self.release_write(key, write);
        if let Some(id) = write.request.id.take() {
            self.core.load.client_ops -= 1;
            self.core.done(id, result);
        }
        self.end_repay(write);
        self.core.load.write_ops -= 1;
        self.core.load.last_write = self.core.now;
        self.wake_waiting_for_room();
        Flow::Finished
    }
}

impl Core {
    fn is_whole(&self, write: &LoggedWrite) -> bool {
        match &write.task.work {
            Work::Data { offset, data } => *offset == 0 && data.len() == self.map.stripe_bytes(),
            Work::Stripe { .. } => true,
            Work::Discard { .. } | Work::Repay { .. } => false,
        }
    }

    /// Without checksums nothing tells which blocks were never written, so the first write of a stripe writes
    /// all of it.
    fn fill_stripe(&mut self, write: &mut LoggedWrite) {
        let Work::Data { offset, data } = &mut write.task.work else { return };
        let mut whole = self.pool.alloc_zeroed(self.map.stripe_bytes());
        whole[*offset..*offset + data.len()].copy_from_slice(data);
        (*offset, *data) = (0, whole.freeze());
    }

    /// New bytes of a write at `offset` for one column of one of its bands.
    fn new_bytes(&self, band: &Band, offset: usize, data: &Buf, column: usize) -> Buf {
        let start = column * self.map.chunk + band.rows.start - offset;
        data.slice(start..start + band.rows.len())
    }
}
