//! The cas volume: distinct blocks, stored once, on an array of one lane. See docs/cas.md for how it is built
//! and for the rules that the code names.
//!
//! `place` says which page holds what, `ledger` what records do to pages, `pages` where pages lie. `index`,
//! `ids`, `segments`, `journal` and `locks` each keep one thing; `store` joins these to the state that a
//! record changes. The volume itself is in this file, and in `start`, `scan`, `reads`, `writes`, `commit`,
//! `compact` and `checkpoint`, by what it is doing; `audit` checks all of it. Must not know of members.

mod audit;
mod checkpoint;
mod commit;
mod compact;
mod ids;
mod index;
mod journal;
mod ledger;
mod locks;
mod pages;
mod place;
mod reads;
mod scan;
mod segments;
mod space;
mod start;
mod store;
mod work;
mod writes;

#[cfg(test)]
mod tests;

use super::api::{
    AdminOutcome, AdminRefusal, AdminRequest, ArrayAction, ClientError, ClientReply, ClientRequest, Health,
    RequestId, VolumeEvent, VolumeExtent, VolumeOutput,
};
use super::driven::DrivenArray;
use super::reply::read_reply;
use super::{PartLen, Volume, VolumeStatus};
use crate::array::assembly::Assembled;
use crate::array::{Array, ArrayConfig, OpenDevice, StripeReply, StripeRequest, StripeRequestId};
use crate::block_io::{Buf, BufMut, Pool};
use crate::codec::Codec;
use crate::format::cas::{CAS_BLOCK_BYTES, CasKey, CatalogueSlot, PageName, SegmentIndex};
use crate::units::{StripeIndex, Timestamp, VolumeOffset};
use checkpoint::Checkpoint;
use compact::Compaction;
use pages::{PageLoad, Want};
use scan::Scan;
use slab::Slab;
use start::Start;
use std::sync::Arc;
use store::Store;
use uuid::Uuid;
use work::{Op, Request, RequestKind, Work};

/// Bits of an offset within a volume; the bits above are the volume's slot in the catalogue.
pub const VOLUME_WINDOW_BITS: u32 = 50;

const BLOCK: u64 = CAS_BLOCK_BYTES as u64;

/// After a failure of the array the volume looks this often whether it can start anew.
const REST_NS: u64 = 500_000_000;

/// See the head of this file.
pub struct CasVolume {
    driven: DrivenArray,
    pool: Pool,
    facts: Facts,
    stage: Stage,
    store: Store,
    io: InFlight,
    work: Work,
    checkpoint: Checkpoint,
    compaction: Compaction,
    scan: Scan,
    /// The next flush of every client has to fail.
    tells_lost: bool,
    /// Requests that were refused at once, and ended ones.
    ended: Vec<(RequestId, Result<ClientReply, ClientError>)>,
    now: Timestamp,
}

/// What never changes.
// Plain data: given to a volume when it is made.
#[derive(Clone, Copy, Debug)]
struct Facts {
    key: CasKey,
    array: Uuid,
    segments: u32,
    segment_blocks: u32,
    /// Blocks of the volume that a new array begins with.
    first_blocks: u64,
    /// Bytes of memory for pages.
    page_cache: usize,
    /// Randomness of this start of the process.
    seed: u64,
}

/// What the volume is doing.
enum Stage {
    /// It reads the root, the pages and the journal.
    Starting(Box<Start>),
    Serving,
    /// The array has failed it (F1); it starts anew after a while.
    Resting(Timestamp),
}

/// What the volume waits for from the array.
#[derive(Default)]
struct InFlight {
    /// Starts of the volume so far: what an earlier life asked for is of no interest.
    life: u64,
    purposes: Slab<(u64, Purpose)>,
}

/// Why something was asked of the array.
#[derive(Debug)]
enum Purpose {
    /// A step of the start.
    Start(usize),
    Page(PageLoad),
    /// A piece of a read: the operation, and which piece.
    Chunk(usize, usize),
    /// A segment of chunks.
    Data(usize),
    /// An entry of the journal; its bytes are kept in case that a member has no space.
    Entry(u64, StripeIndex, usize, Buf),
    /// A segment of pages.
    Pages(SegmentIndex, Vec<PageName>, Vec<Buf>),
    /// One of the two places of a root.
    Root(usize, Buf),
    /// The place that lacks the newest root, at a start.
    Mend(usize, Buf),
    /// A victim of compaction, by its place among them.
    Victim(usize),
    /// A segment of chunks that were moved.
    Moved(SegmentIndex, Vec<Buf>),
    /// A flush of a client, or what follows a write that must be durable.
    Flush(usize),
    /// A look at the array's health for a client.
    Health(usize),
}

impl CasVolume {
    /// Serves the cas volume of an assembled array, which is formatted if it is blank: with one volume of
    /// `first_bytes`.
    #[must_use]
    pub fn new(
        assembled: Assembled<OpenDevice>,
        codec: Codec,
        pool: Pool,
        config: ArrayConfig,
        first_bytes: u64,
    ) -> CasVolume {
        let superblock = &assembled.superblock;
        let (array, key) = (superblock.array, CasKey::derive(superblock.array, superblock.log_secret));
        let (page_cache, seed) = (config.page_cache, config.seed);
        let driven = DrivenArray::new(Array::new(assembled, codec, pool.clone(), config));
        let map = driven.array().map();
        let facts = Facts {
            key,
            array,
            segments: u32::try_from(driven.array().geometry().stripes()).unwrap_or(u32::MAX),
            segment_blocks: (map.stripe_bytes() / CAS_BLOCK_BYTES) as u32,
            first_blocks: first_bytes / BLOCK,
            page_cache,
            seed,
        };
        let mut volume = CasVolume {
            driven,
            pool,
            facts,
            stage: Stage::Serving,
            store: Store::blank(&facts),
            io: InFlight::default(),
            work: Work::default(),
            checkpoint: Checkpoint::default(),
            compaction: Compaction::default(),
            scan: Scan::default(),
            tells_lost: false,
            ended: Vec::new(),
            now: Timestamp::default(),
        };
        volume.begin_start();
        volume
    }

    /// What an earlier run could not read: see [`Array::expect_damage`].
    pub fn expect_damage(&mut self, ranges: &[(VolumeOffset, u64)], is_beyond_repair: bool) {
        self.driven.array_mut().expect_damage(ranges, is_beyond_repair);
    }

    /// Asks something of the array.
    fn ask(&mut self, purpose: Purpose, request: StripeRequest) {
        let id = self.io.purposes.insert((self.io.life, purpose));
        self.driven.submit(self.now, StripeRequestId(id as u64), request);
    }

    /// Reads `blocks` blocks of a segment.
    fn ask_blocks(&mut self, purpose: Purpose, segment: SegmentIndex, block: u32, buf: BufMut) {
        let (stripe, offset) = (StripeIndex(segment.0.into()), block as usize * CAS_BLOCK_BYTES);
        self.ask(purpose, StripeRequest::Read { stripe, offset, buf });
    }

    /// Has a page loaded for an operation, which is advanced when it is there.
    fn wait_for_page(&mut self, name: PageName, op: usize) {
        let waiters = self.work.page_waiters.entry(name).or_default();
        if !waiters.contains(&op) {
            waiters.push(op);
        }
        self.load_page(name);
    }

    /// Starts to load a page unless that is under way.
    fn load_page(&mut self, name: PageName) {
        if let Want::Read(load) = self.store.pages.want(name) {
            let buf = self.pool.alloc(CAS_BLOCK_BYTES);
            self.ask_blocks(Purpose::Page(load), load.at.segment, load.at.block, buf);
        }
    }

    /// Takes the end of what was asked of the array.
    fn array_ended(&mut self, id: StripeRequestId, result: Result<StripeReply, ClientError>) {
        let (life, purpose) = self.io.purposes.remove(id.0 as usize);
        if life != self.io.life {
            return;
        }
        match purpose {
            Purpose::Start(step) => self.start_read(step, result),
            Purpose::Page(load) => self.page_read(load, result),
            Purpose::Chunk(op, piece) => self.chunk_read(op, piece, result),
            Purpose::Victim(at) => self.victim_read(at, result),
            Purpose::Flush(request) => self.part_ended(request, result.map(|_| ()).err()),
            Purpose::Health(request) => {
                if let (Ok(StripeReply::Health(runs)), RequestKind::Health(found)) =
                    (&result, &mut self.work.requests[request].kind)
                {
                    *found = runs.iter().map(|(_, health)| *health).next().unwrap_or(Health::Clean);
                }
                self.part_ended(request, result.map(|_| ()).err());
            }
            write => match result {
                Ok(_) => self.written(write),
                Err(ClientError::NoSpace) => self.work.retries.push(write),
                Err(_) => self.fail(),
            },
        }
    }

    /// What had to be written is.
    fn written(&mut self, purpose: Purpose) {
        match purpose {
            Purpose::Data(filling) => self.segment_filled(filling),
            Purpose::Moved(..) => self.moved_written(),
            Purpose::Entry(sequence, ..) => self.entry_answered(sequence),
            Purpose::Pages(_, names, _) => self.pages_written(&names),
            Purpose::Root(copy, _) => self.root_written(copy),
            Purpose::Mend(..) => self.mended(),
            other => unreachable!("{other:?} writes nothing"),
        }
    }

    /// Writes again what found no space on a member.
    fn retry(&mut self) {
        for purpose in std::mem::take(&mut self.work.retries) {
            let request = match &purpose {
                Purpose::Data(filling) => self.work.filling[*filling].request(&self.facts, &self.pool),
                Purpose::Entry(_, stripe, offset, data) => {
                    StripeRequest::Write { stripe: *stripe, offset: *offset, data: data.clone(), fua: false }
                }
                Purpose::Pages(segment, _, parts) | Purpose::Moved(segment, parts) => {
                    StripeRequest::WriteStripe {
                        stripe: StripeIndex(segment.0.into()),
                        parts: parts.clone(),
                        fua: false,
                    }
                }
                Purpose::Root(copy, block) | Purpose::Mend(copy, block) => {
                    self.root_request(*copy, block.clone())
                }
                other => unreachable!("{other:?} writes nothing"),
            };
            self.ask(purpose, request);
        }
    }

    /// The array does not do what the state in memory needs (F1).
    fn fail(&mut self) {
        if matches!(self.stage, Stage::Resting(_)) {
            return;
        }
        // What clients have been answered may be lost.
        self.tells_lost |= matches!(self.stage, Stage::Serving);
        self.stage = Stage::Resting(self.now);
        self.io.life += 1;
        self.store = Store::blank(&self.facts);
        self.checkpoint = Checkpoint::default();
        self.compaction = Compaction::default();
        self.scan = Scan::default();
        let work = std::mem::take(&mut self.work);
        for (_, request) in work.requests {
            self.ended.push((request.id, Err(ClientError::Io)));
        }
        self.ended.extend(work.early.into_iter().map(|(id, _)| (id, Err(ClientError::Io))));
    }

    fn client(&mut self, id: RequestId, request: ClientRequest) {
        if self.driven.is_stopping() {
            return self.ended.push((id, Err(ClientError::Stopping)));
        }
        match self.stage {
            Stage::Starting(_) => self.work.early.push((id, request)),
            Stage::Resting(_) => self.ended.push((id, Err(ClientError::Io))),
            Stage::Serving => self.begin(id, request),
        }
    }

    /// Begins a client's request.
    fn begin(&mut self, id: RequestId, request: ClientRequest) {
        let (volume, offset) = match request.range() {
            None => (CatalogueSlot(0), 0),
            Some((offset, len)) => {
                let volume = CatalogueSlot((offset.0 >> VOLUME_WINDOW_BITS) as u16);
                let within = offset.0 & ((1 << VOLUME_WINDOW_BITS) - 1);
                if self.store.blocks_of(volume).is_none_or(|blocks| within + len > blocks * BLOCK) {
                    return self.ended.push((id, Err(ClientError::Io)));
                }
                (volume, within)
            }
        };
        match request {
            ClientRequest::Read { buf, .. } => self.read(id, volume, offset, buf, false),
            ClientRequest::ReadSparse { buf, .. } => self.read(id, volume, offset, buf, true),
            ClientRequest::Write { data, fua, .. } => self.write(id, volume, offset, &data, fua),
            ClientRequest::Flush => {
                let request = self.start_request(id, RequestKind::Plain);
                self.work.requests[request].pending += 1;
                self.ask(Purpose::Flush(request), StripeRequest::Flush);
            }
            ClientRequest::Trim { len, fua, .. } => {
                let start = offset.next_multiple_of(BLOCK);
                let end = (offset + len) / BLOCK * BLOCK;
                self.zero(id, volume, start..end.max(start), fua);
            }
            ClientRequest::WriteZeroes { len, fua, .. } => {
                self.zero(id, volume, offset..offset + len, fua);
            }
            ClientRequest::BlockStatus { len, .. } => self.extents(id, volume, offset, len),
            ClientRequest::Health { len, .. } => {
                let request = self.start_request(id, RequestKind::Health(Health::Clean));
                let request_ref = &mut self.work.requests[request];
                (request_ref.pending, request_ref.len) = (1, len);
                let all = StripeRequest::Health { first: StripeIndex(0), count: 1 };
                self.ask(Purpose::Health(request), all);
            }
        }
    }

    fn start_request(&mut self, id: RequestId, kind: RequestKind) -> usize {
        self.work.requests.insert(Request { id, kind, pending: 0, error: None, len: 0 })
    }

    /// A part of a client's request has ended.
    fn part_ended(&mut self, key: usize, error: Option<ClientError>) {
        let request = &mut self.work.requests[key];
        request.pending -= 1;
        request.error = request.error.or(error);
        if request.pending > 0 {
            return;
        }
        if let RequestKind::Change { fua } = &mut request.kind
            && std::mem::take(fua)
            && request.error.is_none()
        {
            request.pending = 1;
            return self.ask(Purpose::Flush(key), StripeRequest::Flush);
        }
        let request = self.work.requests.remove(key);
        let result = match (request.error, request.kind) {
            (Some(error), _) => Err(error),
            (None, RequestKind::Read { parts, sparse }) => Ok(read_reply(&self.pool, parts, sparse)),
            (None, RequestKind::Extents(extents)) => Ok(ClientReply::Extents(
                extents.into_iter().map(|(len, hole)| VolumeExtent { len, hole }).collect(),
            )),
            (None, RequestKind::Health(health)) => Ok(ClientReply::Health(vec![(request.len, health)])),
            (None, _) => Ok(ClientReply::Done),
        };
        self.ended.push((request.id, result));
    }

    /// Advances everything until it waits for something outside.
    fn pump(&mut self) {
        if let Stage::Resting(since) = self.stage
            && self.now.nanos_since(since) >= REST_NS
            && self.io.purposes.is_empty()
            && !self.driven.is_stopping()
        {
            self.begin_start();
        }
        loop {
            while let Some(op) = self.work.ready.pop_front() {
                self.advance(op);
            }
            if !matches!(self.stage, Stage::Serving) {
                return self.pump_start();
            }
            self.pump_compaction();
            self.commit();
            self.pump_checkpoint();
            self.pump_scan();
            self.feed_starved();
            if self.work.ready.is_empty() {
                return;
            }
        }
    }

    /// Advances an operation.
    fn advance(&mut self, key: usize) {
        match self.work.ops.get(key) {
            Some(Op::Read(_)) => self.advance_read(key),
            Some(Op::Write(_)) => self.advance_write(key),
            Some(Op::Extents(_)) => self.advance_extents(key),
            None => {}
        }
    }

    /// Whether nothing is left to do before the array stops.
    fn is_done(&self) -> bool {
        match self.stage {
            Stage::Resting(_) => self.work.requests.is_empty(),
            Stage::Starting(_) => false,
            Stage::Serving => {
                self.work.requests.is_empty()
                    && self.store.journal.is_idle()
                    && self.checkpoint.is_over(&self.store)
            }
        }
    }
}

impl Volume for CasVolume {
    fn take(&mut self, now: Timestamp, event: VolumeEvent) {
        self.now = now;
        if matches!(event, VolumeEvent::Tick) {
            self.retry();
        }
        if let Some((id, request)) = self.driven.take(now, event) {
            self.client(id, request);
        }
    }

    fn settle(&mut self, now: Timestamp, out: &mut VolumeOutput) {
        self.now = now;
        loop {
            self.pump();
            let Some((id, result)) = self.driven.next_ended() else { break };
            self.array_ended(id, result);
            while let Some((id, result)) = self.driven.next_ended() {
                self.array_ended(id, result);
            }
        }
        out.replies.append(&mut self.ended);
        let is_done = self.is_done();
        self.driven.pass_on(now, is_done, out);
        if out.actions.iter().any(|action| matches!(action, ArrayAction::WritesLost)) {
            // Memory may be ahead of the disk.
            self.fail();
            self.tells_lost = false;
            out.replies.append(&mut self.ended);
        }
        if std::mem::take(&mut self.tells_lost) {
            out.actions.push(ArrayAction::WritesLost);
        }
    }

    fn would(&self, request: &AdminRequest) -> Result<AdminOutcome, AdminRefusal> {
        self.driven.would(request)
    }

    fn part_len(&self) -> PartLen {
        Arc::new(|request| match request.range().filter(|_| !request.has_payload()) {
            None => u64::MAX,
            Some((offset, len)) => {
                let span = work::PART_SPAN * BLOCK;
                len.min((offset.0 / span + 1) * span - offset.0)
            }
        })
    }

    fn due(&self) -> Option<Timestamp> {
        self.driven.array().due()
    }

    fn damage_revision(&self) -> u64 {
        self.driven.array().damage_revision()
    }

    fn status(&self) -> VolumeStatus {
        self.driven.array().status()
    }
}
