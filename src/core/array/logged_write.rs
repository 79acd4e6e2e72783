//! Writes of logged arrays. A part of a stripe goes through the redo log and later in place; a whole stripe goes to
//! a free slot and becomes live by a record; a discarded stripe is a record alone.
//!
//! The rows are locked until their new content is in the open batch, in the overlay and in the page cache: from then
//! on it is what everybody reads. Old data and old parity are verified before they enter a new parity (`fetch.rs`).
//! A write that fails before it joined a batch has changed nothing. A write changes what it was asked to change (rule T2):
//! where a row cannot be read for its parity, `unreadable.rs` says how it goes on.

use super::damage::BlockName;
use super::fetch::{Blended, Fetch, Fetched};
use super::journal::{record_bytes, stripe_of};
use super::lock::LockMode;
use super::mutation::{Mutation, is_off};
use super::page_hold::{PageHold, PagesHeld};
use super::plan::{self, Band, ParityPath};
use super::redo::Share;
use super::{Array, ClientError, Core, Flow, Inflight, Op, PieceId, SlotReply};
use crate::block_io::{Buf, BufMut, DeviceId, IoFault, IoValue};
use crate::codec::CodedColumns;
use crate::format::{FreshRecord, InPlaceRecord, LogRecord, MapEntry};
use crate::units::{BlockHash, ColumnIndex, MemberIndex, ROW_BYTES, SlotIndex, StripeIndex, Timestamp};
use std::ops::Range;

mod parity;
mod patience;
mod room;
mod stripe;
mod unreadable;

use unreadable::Way;

const BLOCK: usize = ROW_BYTES as usize;

pub(super) struct LoggedWrite {
    /// None once the client has its answer.
    piece: Option<PieceId>,
    stripe: StripeIndex,
    slot: SlotIndex,
    work: Work,
    /// The data as they were asked for, where `work` has whole blocks made of them and of what the blocks held. That is
    /// true only while the rows are locked.
    asked: Option<(usize, Buf)>,
    /// What of the data comes after `work`: where a ring is small beside a chunk, a write goes part by part.
    rest: Option<(usize, Buf)>,
    fua: bool,
    life: u64,
    stage: Stage,
    /// The block that it writes again if its member still has it.
    repays: Option<BlockName>,
    /// The rows locked, in bytes within the chunk; none while unlocked.
    locked: Option<Range<usize>>,
    /// The free slot that a whole stripe goes to, locked as such.
    target: Option<SlotIndex>,
    pages: PageHold,
    promised: Share,
    fetch: Fetch,
    plans: Vec<(Band, ParityPath)>,
    /// How new parity comes about.
    way: Way,
    /// When the rows could not be read for the first time.
    unreadable_since: Option<Timestamp>,
    records: Vec<(LogRecord, Vec<(u16, Buf)>)>,
    /// Writes of a whole stripe under way, and what each is.
    pending: usize,
    writes: Vec<StripeWrite>,
    /// A member had no room for the stripe, or this host lacked resources for it, for too long.
    short: Option<ClientError>,
    /// When the client asked for it.
    since: Timestamp,
    /// It has waited for too long for what a shortage holds up.
    expired: Option<ClientError>,
}

enum Work {
    /// New bytes at an offset of the stripe.
    Data { offset: usize, data: Buf },
    /// Whole stripes from this one on that are to hold no data.
    Discard { left: u64 },
    /// A block that is set aside, to be written again if its member still has its content.
    Repay { column: usize, row: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Waits until there is room for it.
    Room,
    Lock,
    /// Waits until what could not be read is read again.
    Patience(Timestamp),
    /// Loading pages.
    Pages,
    /// Reading a block that is set aside.
    Repay,
    /// Reading blocks that are only partly overwritten.
    Edges,
    /// Reading what new parity needs.
    Old,
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

struct StripeWrite {
    member: MemberIndex,
    device: DeviceId,
    column: usize,
    retried: bool,
}

/// Locks of slots, as opposed to stripes, have this bit.
pub(super) const SLOT_LOCK: u64 = 1 << 63;

impl Array {
    pub(super) fn start_logged_write(
        &mut self,
        piece: PieceId,
        stripe: StripeIndex,
        offset: usize,
        data: Buf,
        fua: bool,
    ) {
        assert!(
            !data.is_empty() && offset + data.len() <= self.core.map.stripe_bytes(),
            "a write beyond its stripe"
        );
        self.start_logged(Some(piece), stripe, Work::Data { offset, data }, fua);
    }

    pub(super) fn start_discard(&mut self, piece: PieceId, first: StripeIndex, count: u64) {
        assert!(count > 0 && first.0 + count <= self.core.geometry.stripes(), "a discard out of bounds");
        self.start_logged(Some(piece), first, Work::Discard { left: count }, false);
    }

    /// Without a piece no client waits for it.
    fn start_logged(&mut self, piece: Option<PieceId>, stripe: StripeIndex, work: Work, fua: bool) {
        self.core.client_ops += usize::from(piece.is_some());
        self.core.write_ops += 1;
        let slot = SlotIndex(stripe.0);
        let repays = match work {
            Work::Repay { column, row } => Some((stripe, column as u16, row as u32)),
            Work::Data { .. } | Work::Discard { .. } => None,
        };
        let mut write = Box::new(LoggedWrite {
            piece,
            stripe,
            slot,
            work,
            asked: None,
            rest: None,
            fua,
            life: self.redo().lives,
            stage: Stage::Room,
            repays,
            locked: None,
            target: None,
            pages: PageHold::default(),
            promised: Share::default(),
            fetch: Fetch::new(slot),
            plans: Vec::new(),
            way: Way::Usual,
            unreadable_since: None,
            records: Vec::new(),
            pending: 0,
            writes: Vec::new(),
            short: None,
            since: self.core.now,
            expired: None,
        });
        self.cut_write(&mut write);
        let key = self.ops.insert(Op::Busy);
        let flow = self.advance_logged_write(key, &mut write);
        self.put_back(key, Op::LoggedWrite(write), flow);
    }

    /// Goes on as far as it goes: after a grant, a page, room, a free slot, a written batch, or a failure.
    pub(super) fn advance_logged_write(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        loop {
            if matches!(write.stage, Stage::Edges | Stage::Old | Stage::Code | Stage::Stripe | Stage::Repay) {
                return Flow::Wait;
            }
            if self.core.is_failed() || write.life != self.redo().lives {
                return self.end_logged_write(key, write, Err(ClientError::Io));
            }
            if let Some(error) = write.expired {
                return self.end_logged_write(key, write, Err(error));
            }
            let before = write.stage;
            let flow = match write.stage {
                Stage::Room => self.admit_write(key, write),
                Stage::Lock if !self.core.locks.is_held(SlotIndex(write.stripe.0), key) => Flow::Wait,
                Stage::Lock => self.locked_write(key, write),
                Stage::Patience(until) => self.core.try_again(write, until),
                Stage::Pages => self.load_write(key, write),
                Stage::Slot => self.choose_slot(key, write),
                Stage::SlotLock => match write.target {
                    Some(target) if self.core.locks.is_held(SlotIndex(target.0 | SLOT_LOCK), key) => {
                        self.code_stripe(key, write)
                    }
                    _ => Flow::Wait,
                },
                Stage::Join => self.join_write(key, write),
                Stage::Logged if self.redo().is_waiting(key) => Flow::Wait,
                Stage::Logged => return self.acknowledge_logged(key, write),
                Stage::Edges | Stage::Old | Stage::Code | Stage::Stripe | Stage::Repay => Flow::Wait,
            };
            if flow == Flow::Finished || write.stage == before {
                return flow;
            }
        }
    }

    /// Whether the write goes to a free slot as a whole stripe.
    fn goes_fresh(&self, write: &LoggedWrite) -> bool {
        let record = self.core.manifest_blocks(self.core.map.width() * self.core.map.chunk / BLOCK, 1);
        self.core.is_whole(write) && self.core.full_stripe_fresh() && self.redo().fits_ring(record)
    }

    fn admit_write(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        self.core.last_write = self.core.now;
        let share = self.share_of_write(write);
        let used = self.redo().journal.used_blocks();
        if !self.redo().waiting_for_room.is_empty() || !self.redo().has_room(share, used) {
            if let Some(error) = self.core.lasting_shortage() {
                return self.end_logged_write(key, write, Err(error));
            }
            let redo = self.redo_mut();
            redo.checkpoint.want();
            redo.waiting_for_room.push_back(key);
            return Flow::Wait;
        }
        self.redo_mut().promised += share;
        write.promised = share;
        let rows = self.rows_to_lock(write);
        write.stage = Stage::Lock;
        write.locked = Some(rows.clone());
        self.core.locks.acquire(SlotIndex(write.stripe.0), rows, LockMode::Exclusive, key);
        Flow::Wait
    }

    /// Rows that the write has to itself: all where the stripe holds no data yet, since its first write decides about
    /// every block.
    fn rows_to_lock(&self, write: &LoggedWrite) -> Range<usize> {
        match &write.work {
            Work::Data { offset, data } if self.holds_data(write.stripe) && !self.core.is_whole(write) => {
                self.core.rows_of(*offset, data.len())
            }
            Work::Repay { row, .. } => row * BLOCK..(row + 1) * BLOCK,
            _ => 0..self.core.map.chunk,
        }
    }

    /// The lock is granted.
    fn locked_write(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        let rows = self.rows_to_lock(write);
        let held = write.locked.clone().unwrap_or_default();
        if rows.start < held.start || rows.end > held.end {
            // While it waited the stripe was discarded.
            self.core.unlock(SlotIndex(write.stripe.0), key);
            write.locked = Some(rows.clone());
            if !self.core.locks.acquire(SlotIndex(write.stripe.0), rows.clone(), LockMode::Exclusive, key) {
                return Flow::Wait;
            }
        }
        write.slot = self.slot_of(write.stripe);
        let first = !self.holds_data(write.stripe);
        if let Work::Discard { .. } = write.work {
            if first {
                return self.next_discard(key, write);
            }
            write.records = vec![(LogRecord::Discard { stripe: write.stripe, slot: write.slot }, Vec::new())];
            write.stage = Stage::Join;
            return Flow::Wait;
        }
        if matches!(write.work, Work::Repay { .. }) && first {
            return self.end_logged_write(key, write, Ok(SlotReply::Done));
        }
        if first && self.redo().checksums.is_none() && !self.core.is_whole(write) {
            self.core.fill_stripe(write);
        }
        if self.core.is_whole(write) && (self.core.full_stripe_fresh() || first) {
            write.stage = Stage::Slot;
            return Flow::Wait;
        }
        let rows = if first { 0..self.core.map.chunk } else { rows };
        let pages = self.hash_pages(write.slot, rows.start / BLOCK..rows.end / BLOCK);
        write.pages = PageHold::new(pages, write.life);
        write.stage = Stage::Pages;
        Flow::Wait
    }

    /// The pages are asked for; once here, old bytes are read.
    fn load_write(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        match self.hold_pages(key, &mut write.pages) {
            PagesHeld::Wait => return Flow::Wait,
            PagesHeld::Unreadable => return self.end_logged_write(key, write, Err(ClientError::Io)),
            PagesHeld::All { .. } => {}
        }
        if let Work::Repay { column, row } = write.work {
            return self.read_set_aside(key, write, column, row);
        }
        let Work::Data { offset, data } = &write.work else { unreachable!("a discard needs no pages") };
        let (start, end) = (*offset, *offset + data.len());
        if start.is_multiple_of(BLOCK) && end.is_multiple_of(BLOCK) {
            return self.plan_logged(key, write);
        }
        write.stage = Stage::Edges;
        write.fetch = Fetch::new(write.slot);
        if self.holds_data(write.stripe) {
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

    /// The payload becomes whole blocks.
    fn merge_edges(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        if !write.fetch.missing.is_empty() {
            return self.edges_missing(key, write);
        }
        let Work::Data { offset, data } = &mut write.work else { unreachable!("only data has edges") };
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
        write.asked = Some(asked);
        self.plan_logged(key, write)
    }

    /// Decides per band how parity comes about, and fetches what that takes.
    fn plan_logged(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        let Work::Data { offset, data } = &write.work else { unreachable!("a discard has no parity") };
        let parities: Vec<usize> = (self.core.map.k..self.core.map.width()).collect();
        let slot = write.slot;
        let readable = |column: usize| self.core.readable(self.core.member_at(slot, column), slot).is_some();
        let first = !self.holds_data(write.stripe);
        write.plans.clear();
        write.fetch = Fetch::new(slot);
        write.fetch.in_service_only = true;
        for band in plan::bands(&self.core.map, *offset, data.len()) {
            let usual = plan::path(&self.core.map, &band, readable, &parities);
            let path = match (usual, write.way) {
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
            write.plans.push((band, path));
        }
        write.fetch.believes_parity = is_off(Mutation::OldParityNotVerified);
        self.blend_parity(write);
        write.stage = Stage::Old;
        match self.fetch(key, &mut write.fetch) {
            Fetched::Wait => Flow::Wait,
            Fetched::Done => self.fetched_old(key, write),
        }
    }

    /// Where a write is one band and much, its parity is computed in the pass that verifies what it is computed from.
    fn blend_parity(&self, write: &mut LoggedWrite) {
        let (Work::Data { offset, data }, [(band, path)], Way::Usual) =
            (&write.work, &write.plans[..], write.way)
        else {
            return;
        };
        let first = !self.holds_data(write.stripe);
        let Some(columns) = parity::blended_columns(&self.core.codec, band, path, first) else { return };
        let is_much =
            columns * band.rows.len() >= self.core.config.job_bytes_min || self.gains_from_company();
        if self.redo().checksums.is_some() && is_much {
            let new_bytes = |column: usize| self.core.new_bytes(band, *offset, data, column);
            let blend = parity::blend_of_band(&self.core.codec, band, path, new_bytes);
            write.fetch.blend(blend);
        }
    }

    fn fetched_old(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        // What counts as zeroes is known to coding, whatever it once held.
        if write.fetch.missing.iter().any(|block| self.core.keeps_from_coding(block)) {
            return self.old_missing(key, write);
        }
        self.records_made(write)
    }

    fn records_made(&mut self, write: &mut LoggedWrite) -> Flow {
        self.make_records(write);
        write.stage = Stage::Join;
        Flow::Wait
    }

    /// New parity, hashes and records of every band.
    fn make_records(&mut self, write: &mut LoggedWrite) {
        let Work::Data { offset, data } = &write.work else { return };
        let first = !self.holds_data(write.stripe);
        let missing = std::mem::take(&mut write.fetch.missing);
        let aside: Vec<(usize, usize)> = missing
            .iter()
            .filter(|block| !block.why.counts_as_zeroes())
            .map(|block| (block.column, block.row))
            .collect();
        let mut blended = write.fetch.take_blended();
        let mut old = write.fetch.take().into_iter();
        for (at, (band, path)) in write.plans.iter().enumerate() {
            let rows = band.rows.start / BLOCK..band.rows.end / BLOCK;
            let count = match path {
                _ if first => 0,
                ParityPath::ReadModifyWrite => band.columns.len() + self.core.map.m,
                ParityPath::ReconstructWrite => self.core.map.k - band.columns.len(),
                _ => 0,
            };
            let mut olds: Vec<(usize, BufMut)> =
                old.by_ref().take(count).map(|(column, _, buf)| (column, buf)).collect();
            for &(column, row) in aside.iter().filter(|(_, row)| rows.contains(row)) {
                if let Some((_, buf)) = olds.iter_mut().find(|(c, _)| *c == column) {
                    buf[(row - rows.start) * BLOCK..(row - rows.start + 1) * BLOCK].fill(0);
                }
            }
            let new_bytes = |column: usize| self.core.new_bytes(band, *offset, data, column);
            let (parity, hashes) = match blended.take() {
                Some(Blended { known_hashes, outputs, output_hashes }) => {
                    (outputs, Some([known_hashes, output_hashes].concat()))
                }
                None => {
                    let buf = |_| self.core.pool.alloc(band.rows.len());
                    let mut parity: Vec<BufMut> = (0..self.core.map.m).map(buf).collect();
                    let mut targets: Vec<(usize, &mut [u8])> =
                        parity.iter_mut().enumerate().map(|(p, buf)| (p, &mut buf[..])).collect();
                    parity::of_band(&self.core.codec, band, path, &mut olds, new_bytes, &mut targets);
                    (parity, None)
                }
            };
            let mut images: Vec<(u16, Buf)> =
                band.columns.clone().map(|c| (c as u16, new_bytes(c))).collect();
            let parities = parity.into_iter().enumerate();
            images.extend(parities.map(|(p, buf)| ((self.core.map.k + p) as u16, buf.freeze())));
            let first = first && at == 0;
            self.add_records(
                write.stripe,
                write.slot,
                &rows,
                first,
                (images, hashes),
                &aside,
                &mut write.records,
            );
        }
    }

    /// The records of a band: one, or one for each row where blocks, (column, row), are set aside. The hashes of its images
    /// are those given, in the order of the images, which is that of their columns; none are given where blocks are set
    /// aside.
    #[expect(clippy::too_many_arguments, reason = "the fields of the records it makes")]
    fn add_records(
        &self,
        stripe: StripeIndex,
        slot: SlotIndex,
        rows: &Range<usize>,
        first: bool,
        (images, hashed): (Vec<(u16, Buf)>, Option<Vec<BlockHash>>),
        aside: &[(usize, usize)],
        records: &mut Vec<(LogRecord, Vec<(u16, Buf)>)>,
    ) {
        let pieces: Vec<Range<usize>> = if aside.iter().any(|(_, row)| rows.contains(row)) {
            rows.clone().map(|row| row..row + 1).collect()
        } else {
            vec![rows.clone()]
        };
        assert!(
            hashed.is_none() || pieces.len() == 1,
            "what is blended has no row with blocks that are set aside"
        );
        for (nth, piece) in pieces.into_iter().enumerate() {
            let bytes = (piece.start - rows.start) * BLOCK..(piece.end - rows.start) * BLOCK;
            let images: Vec<(u16, Buf)> =
                images.iter().map(|(c, buf)| (*c, buf.slice(bytes.clone()))).collect();
            let aside_here = aside.iter().filter(|(_, row)| *row == piece.start).map(|(c, _)| *c as u16);
            let mut columns: Vec<u16> = images.iter().map(|(column, _)| *column).collect();
            columns.extend(aside_here.filter(|c| !images.iter().any(|(other, _)| other == c)));
            columns.sort_unstable();
            let hashes =
                hashed.clone().unwrap_or_else(|| {
                    let mut hashes = Vec::with_capacity(columns.len() * piece.len());
                    for column in &columns {
                        match images.iter().find(|(c, _)| c == column) {
                            Some((_, image)) => self.redo().log_hasher().hash_blocks(image, &mut hashes),
                            None if is_off(Mutation::LostWithoutEvidence) => {
                                hashes.extend(std::iter::repeat_n(BlockHash::LOST, piece.len()));
                            }
                            None => hashes.extend(piece.clone().map(|row| {
                                self.redo().pages.hash(slot, row, ColumnIndex(*column)).set_aside()
                            })),
                        }
                    }
                    hashes
                });
            let record = InPlaceRecord {
                stripe,
                slot,
                first: first && nth == 0,
                row: piece.start as u32,
                rows: piece.len() as u32,
                columns,
                hashes,
            };
            records.push((LogRecord::InPlace(record), images));
        }
    }

    /// Gets the records into the open batch and makes them what everybody reads.
    fn join_write(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        match self.hold_pages(key, &mut write.pages) {
            PagesHeld::Wait => return Flow::Wait,
            PagesHeld::Unreadable => return self.end_logged_write(key, write, Err(ClientError::Io)),
            PagesHeld::All { .. } => {}
        }
        let payload: usize = write
            .records
            .iter()
            .filter(|(record, _)| matches!(record, LogRecord::InPlace(_)))
            .map(|(_, images)| images.first().map_or(0, |(_, buf)| buf.len()))
            .sum();
        let fits = write.records.iter().all(|(record, _)| {
            debug_assert!(record_bytes(record) > 0);
            self.redo().open_has_room(record, payload)
        });
        if !fits {
            self.redo_mut().waiting_for_batch.push(key);
            return Flow::Wait;
        }
        let records = std::mem::take(&mut write.records);
        for (record, images) in records {
            self.apply_record(&record, &images);
            let payload = match &record {
                LogRecord::InPlace(record) => images
                    .into_iter()
                    .map(|(column, buf)| (self.core.member_at(record.slot, usize::from(column)), buf))
                    .collect(),
                LogRecord::Fresh(_) | LogRecord::Discard { .. } => Vec::new(),
            };
            let width = self.core.map.width();
            self.redo_mut().join(record, payload, width);
        }
        let promised = std::mem::take(&mut write.promised);
        self.redo_mut().promised -= promised;
        if let Work::Discard { left } = &write.work
            && *left > 1
        {
            return self.next_discard(key, write);
        }
        if let Some((offset, data)) = write.rest.take() {
            self.let_go(key, write);
            (write.work, write.asked) = (Work::Data { offset, data }, None);
            (write.way, write.unreadable_since, write.stage) = (Way::Usual, None, Stage::Room);
            write.writes.clear();
            self.cut_write(write);
            return Flow::Wait;
        }
        self.redo_mut().open.waiters.push((key, write.fua));
        write.stage = Stage::Logged;
        self.let_go(key, write);
        Flow::Wait
    }

    /// What a record says becomes true in memory.
    fn apply_record(&mut self, record: &LogRecord, images: &[(u16, Buf)]) {
        let epoch = self.supers.epoch().number;
        let rows = self.core.map.chunk / BLOCK;
        self.forget_lost(record);
        if !self.acknowledgements_allowed() {
            // The epoch in which it will be written is not there yet.
            self.redo_mut().checkpoint.remark(std::iter::once(stripe_of(record)));
        }
        let redo = self.redo_mut();
        match record {
            LogRecord::InPlace(record) => {
                for (column, image) in images {
                    redo.overlay.insert(record.slot, usize::from(*column), record.row as usize, image);
                }
                if redo.checksums.is_some() {
                    if record.first {
                        redo.pages.clear_slot(record.slot);
                    }
                    let first = record.row as usize;
                    let columns = record.columns.iter().map(|column| ColumnIndex(*column));
                    let rows = first..first + record.rows as usize;
                    redo.pages.set_hashes(record.slot, rows, columns, &record.hashes);
                }
                redo.set_map_entry(record.stripe, MapEntry { slot: record.slot, holds_data: true, epoch });
            }
            LogRecord::Fresh(record) => {
                if redo.checksums.is_some() {
                    let columns = (0..record.hashes.len() / rows).map(|column| ColumnIndex(column as u16));
                    redo.pages.set_hashes(record.slot, 0..rows, columns, &record.hashes);
                }
                redo.overlay.give_up(record.old_slot);
                if record.slot == record.old_slot {
                    redo.set_map_entry(
                        record.stripe,
                        MapEntry { slot: record.slot, holds_data: true, epoch },
                    );
                } else {
                    let old = redo.stripes.moved(&mut redo.pages, record.stripe, record.slot, epoch);
                    debug_assert_eq!(old, record.old_slot);
                    redo.open.given_up.push(old);
                }
            }
            LogRecord::Discard { stripe, slot } => {
                redo.overlay.give_up(*slot);
                redo.discarded.insert(stripe.0);
                redo.set_map_entry(*stripe, MapEntry { slot: *slot, holds_data: false, epoch });
            }
        }
    }

    /// Blocks that are written again are not lost any more.
    fn forget_lost(&mut self, record: &LogRecord) {
        if self.damage.is_empty() {
            return;
        }
        match record {
            LogRecord::InPlace(record) => {
                for (at, &column) in record.columns.iter().enumerate() {
                    let is_known = |&row: &u32| {
                        let hash = record.hash(at, row as usize);
                        hash.is_stored() || hash == BlockHash::UNWRITTEN
                    };
                    for row in (0..record.rows).filter(is_known) {
                        self.damage.forget((record.stripe, column, record.row + row));
                    }
                }
            }
            LogRecord::Fresh(FreshRecord { stripe, .. }) | LogRecord::Discard { stripe, .. } => {
                self.damage.forget_stripe(*stripe);
            }
        }
    }

    /// Goes on to the next stripe of a discard, or waits for the last batch.
    fn next_discard(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        let Work::Discard { left } = &mut write.work else { unreachable!("only discards have more stripes") };
        *left -= 1;
        let more = *left > 0;
        self.let_go(key, write);
        if !more {
            // Everything it did is in the open batch or in earlier ones.
            write.stage = Stage::Logged;
            let redo = self.redo_mut();
            redo.wait_for_all(key, write.fua);
            return Flow::Wait;
        }
        write.stripe = StripeIndex(write.stripe.0 + 1);
        write.stage = Stage::Room;
        Flow::Wait
    }

    pub(super) fn logged_write_io(
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

    /// Takes the end of a job: a whole stripe is coded, or what was read is verified.
    pub(super) fn logged_write_coded(
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

    /// Goes on when what was fetched is there.
    fn go_on_fetched(&mut self, key: usize, write: &mut LoggedWrite, fetched: Fetched) -> Flow {
        if fetched == Fetched::Wait {
            return Flow::Wait;
        }
        if self.core.is_failed() || write.life != self.redo().lives {
            return self.end_logged_write(key, write, Err(ClientError::Io));
        }
        let flow = match write.stage {
            Stage::Edges => self.merge_edges(key, write),
            _ => self.fetched_old(key, write),
        };
        if flow == Flow::Finished { flow } else { self.advance_logged_write(key, write) }
    }

    fn acknowledge_logged(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        self.end_logged_write(key, write, Ok(SlotReply::Done))
    }

    /// Gives up locks and pages.
    fn let_go(&mut self, key: usize, write: &mut LoggedWrite) {
        self.release_pages(&mut write.pages);
        if write.locked.take().is_some() {
            self.core.unlock(SlotIndex(write.stripe.0), key);
        }
        if let Some(target) = write.target.take() {
            self.core.unlock(SlotIndex(target.0 | SLOT_LOCK), key);
        }
        let promised = std::mem::take(&mut write.promised);
        if write.life == self.redo().lives {
            self.redo_mut().promised -= promised;
        }
    }

    fn end_logged_write(
        &mut self,
        key: usize,
        write: &mut LoggedWrite,
        result: Result<SlotReply, ClientError>,
    ) -> Flow {
        // A free slot that did not become the stripe's is free again.
        if let (Some(target), true, Err(_)) = (write.target, write.life == self.redo().lives, &result)
            && target != write.slot
        {
            self.redo_mut().stripes.give_back(target);
        }
        self.let_go(key, write);
        if let Some(piece) = write.piece.take() {
            self.core.client_ops -= 1;
            self.core.done(piece, result);
        }
        self.end_repay(write);
        self.core.write_ops -= 1;
        self.core.last_write = self.core.now;
        self.wake_waiting_for_room();
        Flow::Finished
    }
}

impl Core {
    fn is_whole(&self, write: &LoggedWrite) -> bool {
        matches!(&write.work, Work::Data { offset: 0, data } if data.len() == self.map.stripe_bytes())
    }

    /// Without checksums unwritten blocks are not known: the first write of a stripe writes all of it.
    fn fill_stripe(&mut self, write: &mut LoggedWrite) {
        let Work::Data { offset, data } = &mut write.work else { return };
        let mut whole = self.pool.alloc_zeroed(self.map.stripe_bytes());
        whole[*offset..*offset + data.len()].copy_from_slice(data);
        (*offset, *data) = (0, whole.freeze());
    }

    /// What a write at `offset` has for a column of one of its bands.
    fn new_bytes(&self, band: &Band, offset: usize, data: &Buf, column: usize) -> Buf {
        let start = column * self.map.chunk + band.rows.start - offset;
        data.slice(start..start + band.rows.len())
    }
}
