//! Replay at the start of an array: the content of the log is put in place on the members before anything is
//! served.
//!
//! A sans-IO state machine that the array hosts once its new epoch is complete. It takes the steps of rules
//! R1 to R8 of the crash-safety design in order: flush every member; read the rings and find the chain
//! (`scan.rs`, `chain.rs`); decide on the longest prefix that can be recovered (`decide.rs`); write missing
//! parts of the log again; write the note; redo last images in place and write the pages (`jobs.rs`). The
//! array itself writes the log start (R9).
//!
//! Invariants: nothing in place and no page is written before the note is durable on all usable members; no
//! step starts before the flush that ends the step before; a failed write or flush ends the recovery, and the
//! array starts another over the members that are left (A1), with a new page store. A failed read is an
//! erasure, unless good bytes in its place would change what is decided or saved: then it is tried again for
//! a while, and after that the start is refused (rule T3; `patience.rs`). Memory holds the manifests of one
//! ring, and a window of rows and pages, however large the log is.
//!
//! Must not know of superblocks, clients or devices. Time comes with [`Recovery::poll`].

mod chain;
mod decide;
mod error;
mod jobs;
mod lift;
pub(in crate::array) mod log_start;
mod note;
mod pages;
mod patience;
mod scan;
pub(in crate::array) mod startup;
#[cfg(test)]
mod tests;
mod trials;
mod unread;

use crate::array::base::members::Which;
use crate::array::geometry::Map;
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::copies::CopyFault;
use crate::array::pages::store::{Answer, PageRead, PageStore, PageWrite, Settle};
use crate::array::pages::stripe_map::{MapBuild, StripeMap};
use crate::block_io::{Buf, BufMut, IoFault, IoValue, Pool};
use crate::codec::{BlockHasher, Codec};
use crate::format::{
    BatchHash, EpochStamp, Geometry, LOG_BLOCK_BYTES, LogKey, LogStart, MemberSet, PageIndex, Region,
};
use crate::units::{ByteOffset, MemberIndex, SlotIndex, Timestamp};
pub(super) use chain::RolledBack;
use chain::{Chain, Finds};
use decide::{Decision, Judge, Tile, final_map};
pub(super) use error::RecoveryError;
use jobs::{CellRead, CellTrials, Job};
pub(super) use lift::Lifted;
use pages::PageTrials;
use scan::Scan;
pub(super) use scan::{Ring, RingRead, RingTail};
use slab::Slab;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use trials::LogTrials;
use uuid::Uuid;

/// Changed pages at which redo pauses to write them back, 64 MiB.
const DIRTY_PAGES_MAX: usize = 16 << 10;

/// Most manifests that are written again at one time.
const MANIFEST_WRITES_AT_ONCE: usize = 64;

/// A device that is being built: its slots below `bound` are complete and must stay so.
// Plain data: part of the context of a recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Building {
    pub member: MemberIndex,
    pub which: Which,
    pub bound: SlotIndex,
}

/// The context of a recovery.
// Plain data: everything that it gets from outside when it begins.
#[derive(Clone, Debug)]
pub(super) struct RecoveryContext {
    pub map: Map,
    pub geometry: Geometry,
    pub regions: Regions,
    pub checks: Checks,
    /// The live set of the new epoch: at least k.
    pub usable: MemberSet,
    pub building: Vec<Building>,
    pub known: Known,
    pub judging: Judging,
    /// The new epoch, complete; for a judgement without a replay, the last one that is on a member.
    pub epoch: EpochStamp,
    /// Go on where noted content is lost and no checksum would reveal that.
    pub force: bool,
    /// Leave the content of the log where it is, and hand it over instead of writing it in place, up to this
    /// many bytes.
    pub lift_max: Option<usize>,
    /// How many stripes of the map are gone through before other work gets a turn.
    pub stripes_at_once: u64,
    pub codec: Codec,
    pub pool: Pool,
}

/// Where the regions of every member are.
// Plain data: part of the context of a recovery.
#[derive(Clone, Copy, Debug)]
pub(super) struct Regions {
    /// Where the data region starts.
    pub data_offset: ByteOffset,
    pub log: Region,
    /// Where the pages region starts.
    pub pages_offset: ByteOffset,
}

/// The hashers that verify blocks, pages and manifests.
// Plain data: part of the context of a recovery.
#[derive(Clone, Copy, Debug)]
pub(super) struct Checks {
    pub array: Uuid,
    pub key: LogKey,
    /// Hash of the manifests, and of the checksum pages if there are any.
    pub hasher: BlockHasher,
    /// Whether there are checksum pages.
    pub checksums: bool,
}

/// Facts about the log that are known before it is read.
// Plain data: part of the context of a recovery.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    /// The newest start that enough of the usable members name, by epoch, then sequence (R2, T6).
    pub start: LogStart,
    /// Batches below were durable, as far as this process knows because it served them; 0 where it does not.
    pub durable: u64,
    /// The log holds nothing beyond its start, so only the stripe map is loaded.
    pub clean: bool,
    /// The fewest pages of the stripe map that have a version.
    pub map_pages: u64,
}

/// How a recovery judges before it writes anything.
// Plain data: part of the context of a recovery.
#[derive(Clone, Copy, Debug)]
pub(super) struct Judging {
    /// Only find out whether log and map can be read: nothing is written.
    pub judge_only: bool,
    /// If so: members that are not usable, and would be current if they were here.
    pub away: MemberSet,
    /// If so: members that hold only the parent of the epoch.
    pub behind: MemberSet,
}

/// I/O that the recovery asks for, with absolute offsets. `item` comes back in [`Recovery::io_done`].
#[derive(Debug)]
pub(super) enum RecoveryIo {
    /// From the member's device in service.
    Read {
        item: usize,
        member: MemberIndex,
        offset: ByteOffset,
        buf: BufMut,
    },
    Write {
        item: usize,
        member: MemberIndex,
        which: Which,
        offset: ByteOffset,
        buf: Buf,
    },
    Flush {
        item: usize,
        member: MemberIndex,
        which: Which,
    },
}

/// The outcome of a recovery.
#[derive(Debug)]
pub(super) enum RecoveryOutcome {
    /// The array may write the log start and serve.
    Recovered(Box<Recovered>),
    /// Members were rolled back to older states of themselves: they must leave service. With each, how that
    /// is known.
    RolledBack(Vec<(MemberIndex, RolledBack)>),
    /// A device failed a write or flush, and must leave service.
    Failed { member: MemberIndex, which: Which, what: &'static str, fault: IoFault },
    /// The array cannot be started.
    Refused(RecoveryError),
}

/// A bad copy of a page that was found on the way.
// Plain data: part of the outcome of a recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageFault {
    /// The page.
    pub page: PageIndex,
    /// The member that holds the copy.
    pub member: MemberIndex,
    /// What is wrong with it.
    pub fault: CopyFault,
    /// No copy shows the content of the page. Otherwise the copy is rewritten.
    pub is_lost: bool,
}

/// The state of the array after replay.
// Plain data: the outcome of a recovery.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Recovered {
    /// Where every stripe is.
    pub stripes: StripeMap,
    /// Sequence of the next batch, and of the log start (R9).
    pub next_sequence: u64,
    /// Batches below are all there.
    pub end: u64,
    /// Identity of the batch before it.
    pub previous: BatchHash,
    /// For each member the block of its ring behind all pieces that count.
    pub next_blocks: Vec<u32>,
    /// Rows that could not be decoded, in order of slot and row.
    pub lost: Vec<LostRow>,
    /// Batches that were replayed.
    pub batches: u32,
    /// Batches that were dropped: never acknowledged as durable.
    pub dropped: u32,
    /// In words, the members with logs that could not be read where a dropped batch would be.
    pub dropped_unread: Option<String>,
    /// Rows that were written in place.
    pub rows_redone: u64,
    /// Bad copies of pages, to be counted against their members.
    pub page_faults: Vec<PageFault>,
    /// Pages of the stripe map that are used as their newest copy shows them, although there may have been
    /// newer ones.
    pub old_map_pages: Vec<u64>,
    /// Pages of the stripe map that were written and show nothing any more: the start was forced.
    pub map_pages_gone: u64,
    /// Blocks of the log that members should hold and do not, to be counted against them.
    pub log_faults: Vec<(MemberIndex, u64)>,
}

/// A row with blocks that cannot be had: they no longer match their checksums, if there are any.
// Plain data: part of the outcome of a recovery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LostRow {
    pub slot: SlotIndex,
    pub row: usize,
    /// Columns of the lost blocks, data and parity.
    pub columns: Vec<usize>,
}

/// The purpose of an operation in flight.
#[derive(Debug)]
enum Doing {
    Flush,
    Ring(RingRead),
    PageRead(PageRead),
    PageWrite(PageWrite),
    /// Home blocks or images for a job.
    Cells {
        job: usize,
        offset: ByteOffset,
        cells: Vec<CellRead>,
    },
    /// A write of a job, or one that no job waits for.
    Write {
        job: Option<usize>,
    },
}

#[derive(Debug)]
struct Flight {
    member: MemberIndex,
    which: Which,
    doing: Doing,
}

/// Operations in flight and those that are to be given out.
struct Io {
    pool: Pool,
    flights: Slab<Flight>,
    out: Vec<RecoveryIo>,
}

impl Io {
    fn read(&mut self, member: MemberIndex, offset: ByteOffset, len: usize, doing: Doing) {
        let item = self.flights.insert(Flight { member, which: Which::Primary, doing });
        self.out.push(RecoveryIo::Read { item, member, offset, buf: self.pool.alloc(len) });
    }

    fn write(&mut self, member: MemberIndex, which: Which, offset: ByteOffset, buf: Buf, doing: Doing) {
        let item = self.flights.insert(Flight { member, which, doing });
        self.out.push(RecoveryIo::Write { item, member, which, offset, buf });
    }

    fn flush(&mut self, member: MemberIndex, which: Which) {
        let item = self.flights.insert(Flight { member, which, doing: Doing::Flush });
        self.out.push(RecoveryIo::Flush { item, member, which });
    }

    fn is_idle(&self) -> bool {
        self.flights.is_empty()
    }
}

/// The present step. A step ends when nothing is in flight and nothing is left to start.
#[derive(Debug)]
enum Step {
    Start,
    /// R1.
    FlushAll,
    Scan(Box<(Scan, Finds)>),
    /// The rings are read again at this time.
    Again {
        at: Timestamp,
    },
    Probe(Box<(Scan, Chain)>),
    /// The stripe map.
    Map {
        next: u64,
    },
    /// Notes which slots hold data by the stripe map; the stripes before this one are done.
    Held {
        next: u64,
    },
    /// R4: tiles with blocks in doubt are looked at.
    Weigh {
        next: usize,
    },
    /// R6.
    Manifests {
        next: usize,
    },
    Images {
        next: usize,
    },
    FlushLog,
    /// R7.
    Note,
    WriteNote,
    FlushNote,
    /// R8, in turns: rows in place, then pages.
    Redo {
        next: usize,
    },
    Pages {
        next: usize,
    },
    FlushRedo {
        next: usize,
    },
    /// All is in place: the inverse of the stripe map is made.
    Index(Box<MapBuild>),
    Over,
}

/// See the head of this file.
pub(super) struct Recovery {
    cx: RecoveryContext,
    ring: Ring,
    io: Io,
    ended: Vec<(usize, Result<IoValue, IoFault>)>,
    step: Step,
    plan: Plan,
    work: RowWork,
    /// Columns by slot and row.
    lost: BTreeMap<(SlotIndex, usize), BTreeSet<usize>>,
    map: MapFinds,
    result: Recovered,
    outcome: Option<RecoveryOutcome>,
    /// The highest tail of the log, once it is known.
    tail: Option<u64>,
    now: Timestamp,
    trials: Trials,
    /// Content that is handed over; see `lift.rs`.
    lifted: Option<Lifted>,
}

/// The part of the log that is replayed.
struct Plan {
    judge: Judge,
    decision: Decision,
    /// Batches that are replayed.
    prefix: u32,
}

/// Rows that are looked at, or written again.
struct RowWork {
    jobs: Slab<Job>,
    /// Bytes that the jobs may hold.
    job_bytes: usize,
    tiles: VecDeque<Tile>,
    /// Tiles with blocks that are missing or bad in some prefix.
    suspects: Vec<(Tile, Vec<(usize, usize)>)>,
}

/// The stripe map before the replay, and the stripes and pages that the log names.
struct MapFinds {
    /// Map pages that the log names: copies may be behind.
    named_pages: BTreeSet<PageIndex>,
    /// For each slot whether it holds data by the stripe map as it was loaded.
    slots_with_data: Vec<bool>,
}

/// Reads that have failed and are tried again.
#[derive(Default)]
struct Trials {
    pages: PageTrials,
    cells: CellTrials,
    log: LogTrials,
}

impl Recovery {
    /// A recovery that has done nothing yet.
    #[must_use]
    pub(super) fn new(cx: RecoveryContext) -> Recovery {
        let blocks = u32::try_from(cx.regions.log.len / LOG_BLOCK_BYTES as u64).unwrap_or(u32::MAX);
        let ring = Ring {
            blocks,
            key: cx.checks.key,
            array: cx.checks.array,
            hasher: cx.checks.hasher,
            map: cx.map,
        };
        let chain = Chain::empty(cx.known.start.sequence, cx.map.width());
        let io = Io { pool: cx.pool.clone(), flights: Slab::new(), out: Vec::new() };
        Recovery {
            ring,
            io,
            ended: Vec::new(),
            step: Step::Start,
            plan: Plan {
                decision: Decision::new(&chain),
                judge: Judge::new(chain, cx.map, cx.usable, cx.judging.away),
                prefix: 0,
            },
            work: RowWork { jobs: Slab::new(), job_bytes: 0, tiles: VecDeque::new(), suspects: Vec::new() },
            lost: BTreeMap::new(),
            map: MapFinds { named_pages: BTreeSet::new(), slots_with_data: Vec::new() },
            result: Recovered::default(),
            outcome: None,
            tail: cx.known.clean.then_some(cx.known.start.sequence),
            now: Timestamp(0),
            trials: Trials::default(),
            lifted: cx.lift_max.map(|_| Lifted::default()),
            cx,
        }
    }

    /// The highest tail of the log, once it has been read: everything below is in place on the members that
    /// show it.
    pub(super) fn tail(&self) -> Option<u64> {
        self.tail
    }

    /// Takes the end of an operation; [`Recovery::poll`] acts on it.
    pub(super) fn io_done(&mut self, item: usize, result: Result<IoValue, IoFault>) {
        self.ended.push((item, result));
    }

    /// Does everything that can be done now. With an outcome it is over: nothing more is given out, and all
    /// in flight must end before another recovery starts. It may wait with nothing in flight, for time to
    /// pass.
    pub(super) fn poll(
        &mut self,
        now: Timestamp,
        pages: &mut PageStore,
        out: &mut Vec<RecoveryIo>,
    ) -> Option<RecoveryOutcome> {
        self.now = now;
        for (item, result) in std::mem::take(&mut self.ended) {
            let flight = self.io.flights.remove(item);
            if self.outcome.is_none() {
                self.end_flight(flight, result, pages);
            }
        }
        self.retry_pages(pages);
        self.retry_cells(pages);
        while self.outcome.is_none() && self.advance(pages) {}
        if self.outcome.is_some() {
            self.step = Step::Over;
            return self.outcome.take();
        }
        out.append(&mut self.io.out);
        None
    }

    fn end_flight(&mut self, flight: Flight, result: Result<IoValue, IoFault>, pages: &mut PageStore) {
        let Flight { member, which, doing } = flight;
        let failed = |what, fault| Some(RecoveryOutcome::Failed { member, which, what, fault });
        match (doing, result) {
            (Doing::Flush, Err(fault)) => self.outcome = failed("flush", fault),
            (Doing::Flush, Ok(_)) => {}
            (Doing::Ring(read), result) => {
                let data = data_of(result);
                match &mut self.step {
                    Step::Scan(scan) => scan.0.done(read, data.as_deref(), &mut scan.1),
                    Step::Probe(probe) => probe.0.done(read, data.as_deref(), &mut probe.1),
                    _ => unreachable!("rings are read in their step"),
                }
            }
            (Doing::PageRead(read), result) => {
                let data = data_of(result);
                let answer = data.as_deref().map_or(Answer::Unreadable, Answer::Bytes);
                let mut more = Vec::new();
                let loaded = pages.read_done(read, answer, &mut more);
                self.page_io(more);
                if let Some(loaded) = loaded {
                    self.page_loaded(read.page(), loaded, pages);
                }
            }
            (Doing::PageWrite(write), result) => {
                pages.write_done(write, result.is_ok());
                if let Err(fault) = result {
                    self.outcome = failed("write of a metadata page", fault);
                }
            }
            (Doing::Cells { job, offset, cells }, result) => {
                self.cells_read(job, member, offset, cells, data_of(result), pages);
            }
            (Doing::Write { .. }, Err(fault)) => self.outcome = failed("write of the recovery", fault),
            (Doing::Write { job }, Ok(_)) => {
                if let Some(job) = job {
                    self.job_written(job, pages);
                }
            }
        }
    }

    /// Advances by one step; false when it has to wait.
    fn advance(&mut self, pages: &mut PageStore) -> bool {
        match std::mem::replace(&mut self.step, Step::Over) {
            Step::Start if self.cx.known.clean => self.step = Step::Map { next: 0 },
            Step::Start => {
                if !is_off(Mutation::NoFlushBeforeDecide) && !self.cx.judging.judge_only {
                    self.flush(false);
                }
                self.step = Step::FlushAll;
            }
            Step::FlushAll => {
                if !self.io.is_idle() {
                    return self.stay(Step::FlushAll);
                }
                self.begin_scan();
            }
            Step::Scan(mut scan) => {
                self.read_rings(&mut scan.0);
                if !scan.0.is_over() {
                    return self.stay(Step::Scan(scan));
                }
                self.end_scan(scan.1);
            }
            Step::Again { at } => {
                if self.now < at {
                    return self.stay(Step::Again { at });
                }
                self.read_anew(pages);
            }
            Step::Probe(mut probe) => {
                self.read_rings(&mut probe.0);
                if !probe.0.is_over() {
                    return self.stay(Step::Probe(probe));
                }
                self.take_chain(probe.1, pages);
                self.step = Step::Map { next: 0 };
            }
            Step::Map { next } => return self.load_map(next, pages),
            Step::Held { next } => return self.note_held(next, pages),
            Step::Weigh { next } => return self.weigh(next, pages),
            Step::Manifests { next } => return self.write_manifests(next),
            Step::Images { next } => return self.write_images(next, pages),
            Step::FlushLog => {
                if !self.io.is_idle() {
                    return self.stay(Step::FlushLog);
                }
                self.step = Step::Note;
            }
            Step::Note => self.write_note(),
            Step::WriteNote => {
                if !self.io.is_idle() {
                    return self.stay(Step::WriteNote);
                }
                self.flush(false);
                self.step = Step::FlushNote;
            }
            Step::FlushNote => {
                if !self.io.is_idle() {
                    return self.stay(Step::FlushNote);
                }
                let top = self.plan.judge.chain().top();
                if let Some(lifted) = &mut self.lifted {
                    lifted.stripes =
                        final_map(self.plan.judge.chain(), self.plan.prefix, 0).into_keys().collect();
                }
                for (stripe, (entry, last)) in
                    final_map(self.plan.judge.chain(), self.plan.prefix, self.cx.epoch.number)
                {
                    let known = pages.map_entry(stripe);
                    let new = (known.slot, known.holds_data) != (entry.slot, entry.holds_data);
                    // Pages were written before the tail moved: only one that was rolled back with its member
                    // is older.
                    if (last < top || is_off(Mutation::PagesNotRewritten)) && !new {
                        continue;
                    }
                    pages.set_map_entry(stripe, entry);
                }
                self.step = Step::Redo { next: 0 };
            }
            Step::Redo { next } => return self.redo(next, pages),
            Step::Pages { next } => return self.write_pages(next, pages),
            Step::FlushRedo { next } => {
                if !self.io.is_idle() {
                    return self.stay(Step::FlushRedo { next });
                }
                pages.thaw();
                if self.plan.judge.has_touches(next) || !self.work.tiles.is_empty() {
                    self.step = Step::Redo { next };
                } else {
                    self.finish(pages);
                }
            }
            Step::Index(build) => return self.index(build, pages),
            Step::Over => return false,
        }
        true
    }

    /// Whether it waits for nothing: [`Recovery::poll`] did as much as it may do at once.
    pub(super) fn has_work(&self) -> bool {
        self.outcome.is_none() && matches!(self.step, Step::Held { .. } | Step::Index(_))
    }

    fn index(&mut self, mut build: Box<MapBuild>, pages: &mut PageStore) -> bool {
        match build.step_and_show(pages, self.cx.stripes_at_once) {
            Ok(None) => self.stay(Step::Index(build)),
            Ok(Some(stripes)) => {
                self.result.stripes = stripes;
                self.outcome = Some(RecoveryOutcome::Recovered(Box::new(std::mem::take(&mut self.result))));
                false
            }
            Err(fault) => {
                self.refuse(fault.into());
                false
            }
        }
    }

    fn stay(&mut self, step: Step) -> bool {
        self.step = step;
        false
    }

    fn refuse(&mut self, error: RecoveryError) {
        self.outcome = Some(RecoveryOutcome::Refused(error));
    }

    /// Flushes the usable members, and with `building` the devices that are being built.
    fn flush(&mut self, building: bool) {
        for member in self.cx.usable.iter() {
            self.io.flush(member, Which::Primary);
        }
        for device in self.cx.building.iter().filter(|_| building) {
            self.io.flush(device.member, device.which);
        }
    }

    fn read_rings(&mut self, scan: &mut Scan) {
        let mut reads = Vec::new();
        scan.poll(&mut reads);
        for read in reads {
            let offset = self.ring_offset(read.blocks.start);
            let len = read.blocks.len() * LOG_BLOCK_BYTES;
            self.io.read(read.member, offset, len, Doing::Ring(read));
        }
    }

    /// Where a block of the ring is on every member.
    fn ring_offset(&self, block: u32) -> ByteOffset {
        self.cx.regions.log.offset.plus(u64::from(block) * LOG_BLOCK_BYTES as u64)
    }

    fn take_chain(&mut self, chain: Chain, pages: &PageStore) {
        for (stripe, (_, last)) in final_map(&chain, chain.batches().len() as u32, 0) {
            if last >= chain.top() {
                self.map.named_pages.insert(pages.layout().map_entry(stripe.0).0);
            }
        }
        self.tail = Some(chain.sequence(chain.top()));
        self.result.log_faults = chain.faults(self.cx.usable);
        self.plan.decision = Decision::new(&chain);
        self.plan.judge = Judge::new(chain, self.cx.map, self.cx.usable, self.cx.judging.away);
    }

    /// R6: manifests on the usable members that lack them.
    fn write_manifests(&mut self, mut next: usize) -> bool {
        while next < self.plan.prefix as usize && self.io.flights.len() < MANIFEST_WRITES_AT_ONCE {
            let (chain, place) = (self.plan.judge.chain(), next as u32);
            let entry = chain.batch(place);
            next += 1;
            // Not below the highest tail, where space may be used again.
            let lacks = |member: &MemberIndex| {
                place >= chain.top() && !entry.piece(*member).is_some_and(|piece| piece.header)
            };
            let lacking =
                self.cx.usable.iter().filter(lacks).filter_map(|member| Some((member, entry.place(member)?)));
            let lacking: Vec<_> = lacking.collect();
            if lacking.is_empty() {
                continue;
            }
            let manifest = entry.batch().manifest(&self.cx.checks.key, self.cx.checks.array);
            for (member, place) in lacking {
                let mut bytes = self.cx.pool.alloc(manifest.header_bytes());
                manifest.rewrite_piece(member, entry.payload_blocks(member), &mut bytes);
                let offset = self.cx.regions.log.offset.plus(u64::from(place) * LOG_BLOCK_BYTES as u64);
                self.io.write(member, Which::Primary, offset, bytes.freeze(), Doing::Write { job: None });
            }
        }
        if next < self.plan.prefix as usize {
            return self.stay(Step::Manifests { next });
        }
        self.step = Step::Images { next: 0 };
        true
    }

    /// R7: the note, an empty batch of the new epoch that covers all before it, unless the log ends with one.
    fn write_note(&mut self) {
        let chain = self.plan.judge.chain();
        let batches = &chain.batches()[..self.plan.prefix as usize];
        let end = chain.sequence(self.plan.prefix);
        self.result.next_sequence = end;
        self.result.previous = batches.last().map_or(BatchHash::default(), |last| last.hash());
        self.result.next_blocks = note::ends(batches, self.cx.map.width());
        self.step = Step::FlushNote;
        let unnoted = is_off(Mutation::NoNoteBeforeRedo) || is_off(Mutation::EpochAfterRedoNorNote);
        if unnoted
            || chain.batches().is_empty()
            || batches.last().is_some_and(|last| note::is_note(last.batch()))
        {
            return;
        }
        let batch =
            match note::batch(chain, self.plan.prefix, self.cx.usable, self.cx.epoch, self.ring.blocks) {
                Ok(batch) => batch,
                Err(error) => return self.refuse(error),
            };
        let manifest = batch.manifest(&self.cx.checks.key, self.cx.checks.array);
        for member in self.cx.usable.iter() {
            let place = batch.places[usize::from(member.0)];
            let mut bytes = self.cx.pool.alloc(manifest.header_bytes());
            manifest.write_piece(member, 0, &mut bytes);
            let offset = self.ring_offset(place);
            self.io.write(member, Which::Primary, offset, bytes.freeze(), Doing::Write { job: None });
            self.result.next_blocks[usize::from(member.0)] = place + batch.header_blocks();
        }
        self.result.next_sequence = end + 1;
        self.result.previous = manifest.hash();
        self.step = Step::WriteNote;
    }

    fn finish(&mut self, pages: &mut PageStore) {
        pages.settle_for(Settle::Known);
        if self.cx.known.clean {
            self.result.next_sequence = self.cx.known.start.sequence;
            self.result.next_blocks = vec![0; self.cx.map.width()];
        }
        if self.refuse_losses() {
            return;
        }
        let lost = std::mem::take(&mut self.lost).into_iter();
        let row = |((slot, row), columns): (_, BTreeSet<usize>)| LostRow {
            slot,
            row,
            columns: columns.into_iter().collect(),
        };
        self.result.lost = lost.map(row).collect();
        self.result.end = match self.cx.known.clean {
            true => self.cx.known.start.sequence,
            false => self.plan.judge.chain().sequence(self.plan.prefix),
        };
        self.result.batches = self.plan.prefix;
        self.result.dropped = self.plan.judge.chain().batches().len() as u32 - self.plan.prefix;
        if self.cx.judging.judge_only {
            self.outcome = Some(RecoveryOutcome::Recovered(Box::new(std::mem::take(&mut self.result))));
        } else {
            self.step = Step::Index(Box::new(MapBuild::new(self.cx.geometry)));
        }
    }

    /// Refuses the start where rows are lost and no checksums would show that they are wrong.
    fn refuse_losses(&mut self) -> bool {
        let Some((&(slot, row), _)) = self.lost.first_key_value() else { return false };
        let refused = !self.cx.checks.checksums && !self.cx.force;
        if refused {
            self.refuse(RecoveryError::RowsLost { rows: self.lost.len(), slot, row });
        }
        refused
    }
}

/// The bytes of a read, none when it failed.
fn data_of(result: Result<IoValue, IoFault>) -> Option<Buf> {
    match result {
        Ok(IoValue::Data(buf)) => Some(buf.freeze()),
        _ => None,
    }
}
