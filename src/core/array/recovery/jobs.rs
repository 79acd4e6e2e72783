//! Work on the rows of one tile: weighing home blocks, writing missing images again (R6), redo in place (R8).
//!
//! A job pins the checksum pages of its tile, reads the blocks it needs, decodes missing ones from any k
//! columns, and writes. Every block that was read or decoded is compared with its hash, wherever that is
//! known. Jobs run side by side within a bound of bytes; the step that they belong to ends with the last.

use crate::array::base::members::Which;
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::store::{PageStore, Want};
use crate::array::recovery::decide::{Base, Cell, Homes, Judge, Tile, TileState};
use crate::array::recovery::patience::Patience;
use crate::array::recovery::unread::Doubt;
use crate::array::recovery::{Building, Doing, Recovery, RecoveryContext, RecoveryError, Step};
use crate::block_io::Buf;
use crate::format::PageIndex;
use crate::units::{BlockHash, ByteOffset, ColumnIndex, MemberIndex, ROW_BYTES, SlotIndex, Timestamp};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::mem;

/// Bytes of a block.
const BLOCK: usize = ROW_BYTES as usize;

/// Bytes of the rows of a tile, all columns: small enough that many tiles are in work at once.
const TILE_BYTES: usize = 1 << 20;

/// Most bytes of rows that all jobs may hold: keeps many disks busy and bounds memory. One tile may always
/// go.
const JOBS_BYTES: usize = 32 << 20;

/// Most blocks of one read or write of neighbours, 1 MiB.
const RUN_BLOCKS: usize = 256;

/// A block that is being read, and its expected content.
#[derive(Clone, Copy, Debug)]
pub(super) struct CellRead {
    row: usize,
    column: usize,
    expected: Option<BlockHash>,
    /// Its image in the log, to be read if the block there is not good: an earlier read of the image gave an
    /// error.
    or_at: Option<ByteOffset>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Weigh,
    Relog,
    Redo,
}

/// A block that has to be written.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    row: usize,
    column: usize,
    member: MemberIndex,
    which: Which,
    offset: ByteOffset,
    /// The image of the log that is good again once this is written.
    mends: Option<(u32, u32)>,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Job {
    kind: Kind,
    tile: Tile,
    bytes: usize,
    /// Pages that are pinned or will be.
    pages: Vec<PageIndex>,
    /// Pages or operations that it waits for.
    pending: usize,
    /// When weighing: the rows in doubt, and the home blocks read.
    doubtful: Vec<usize>,
    homes: Homes,
    /// When writing images again: the blocks in question.
    suspects: Vec<(usize, usize)>,
    /// The rows after the prefix; not when weighing.
    state: Option<TileState>,
    wanted: Vec<Wanted>,
    /// Good blocks.
    have: HashMap<(usize, usize), Buf>,
    /// Blocks that were asked for; those that are not in `have` cannot be had.
    asked: HashSet<(usize, usize)>,
    /// Blocks of `asked` whose reads gave an error.
    unread: HashSet<(usize, usize)>,
}

/// Jobs with rows that cannot be decoded because of errors.
#[derive(Debug, Default)]
pub(super) struct CellTrials {
    patience: Patience,
    /// When they read again.
    again: Option<Timestamp>,
    /// Jobs that wait for that.
    jobs: Vec<usize>,
    /// Jobs that have waited and are not yet done.
    tried: BTreeSet<usize>,
    /// Blocks whose reads give errors count as lost: there is no time left, and the start is forced.
    takes_anything: bool,
}

impl CellTrials {
    /// Whether blocks are tried again.
    pub(super) fn is_trying(&self) -> bool {
        !self.tried.is_empty()
    }
}

/// Where a block can be had.
enum Source {
    Zero,
    Read(ByteOffset, Option<BlockHash>, Option<ByteOffset>),
    Nowhere,
}

impl Recovery {
    /// R4: looks at the home blocks of rows in doubt, tile by tile, then decides.
    pub(super) fn weigh(&mut self, mut next: usize, pages: &mut PageStore) -> bool {
        while self.work.job_bytes < JOBS_BYTES && self.outcome.is_none() {
            let Some(tile) = self.next_tile(&mut next) else { break };
            let doubtful = self.plan.judge.rows_in_doubt(&tile);
            if !doubtful.is_empty() {
                let bytes = doubtful.len() * self.cx.map.width() * BLOCK;
                let job = Job { doubtful, ..Job::new(Kind::Weigh, tile, bytes) };
                self.start_job(job, pages);
            }
        }
        if self.plan.judge.has_touches(next) || !self.work.tiles.is_empty() || !self.work.jobs.is_empty() {
            return self.stay(Step::Weigh { next });
        }
        let doubt = self.plan.decision.doubt();
        if doubt != Doubt::None && !self.settles_end(doubt) {
            return true;
        }
        if self.cx.judging.judge_only {
            match self.absent_with_losses() {
                Some(members) => self.refuse(RecoveryError::RowsAbsent { members }),
                None => self.finish(pages),
            }
            return true;
        }
        // Rows that it loses show when they are to be decoded, before anything in place is written.
        self.plan.prefix = self.plan.decision.longest();
        self.step = Step::Manifests { next: 0 };
        if is_off(Mutation::NoRelog) {
            self.step = Step::Note;
        }
        true
    }

    /// R6: missing last images, and fresh columns that do not verify.
    pub(super) fn write_images(&mut self, mut next: usize, pages: &mut PageStore) -> bool {
        while self.work.job_bytes < JOBS_BYTES && self.outcome.is_none() && next < self.work.suspects.len() {
            let (tile, suspects) = mem::take(&mut self.work.suspects[next]);
            next += 1;
            let rows: BTreeSet<usize> = suspects.iter().map(|(row, _)| *row).collect();
            let bytes = rows.len() * self.cx.map.width() * BLOCK;
            let state = Some(self.plan.judge.state_at(&tile, self.plan.prefix));
            let job = Job { suspects, state, ..Job::new(Kind::Relog, tile, bytes) };
            self.start_job(job, pages);
        }
        if next < self.work.suspects.len() || !self.work.jobs.is_empty() || !self.io.is_idle() {
            return self.stay(Step::Images { next });
        }
        if !self.refuse_losses() {
            let unflushed = is_off(Mutation::NoFlushBeforeDecide) && self.work.suspects.is_empty();
            if !is_off(Mutation::NoteWithRelog) && !unflushed {
                self.flush(false);
            }
            self.step = Step::FlushLog;
        }
        true
    }

    /// R8: last images in place, hashes into the pages; until the log is through or enough pages are changed.
    pub(super) fn redo(&mut self, mut next: usize, pages: &mut PageStore) -> bool {
        while self.work.job_bytes < JOBS_BYTES && self.outcome.is_none() && !self.is_full(pages) {
            let Some(tile) = self.next_tile(&mut next) else { break };
            let state = self.plan.judge.state_at(&tile, self.plan.prefix);
            let bytes = state.touched_rows().count() * self.cx.map.width() * BLOCK;
            // A tile that only batches beyond the prefix touch needs no work.
            if bytes > 0 {
                self.start_job(Job { state: Some(state), ..Job::new(Kind::Redo, tile, bytes) }, pages);
            }
        }
        let left = self.plan.judge.has_touches(next) || !self.work.tiles.is_empty();
        if left && !self.is_full(pages) || !self.work.jobs.is_empty() {
            return self.stay(Step::Redo { next });
        }
        if self.lifted.is_some() {
            return self.end_lift(left, pages);
        }
        pages.freeze(self.cx.epoch.number);
        self.step = Step::Pages { next };
        true
    }

    /// Whether the changes so far must be written, or handed over, before more are made.
    fn is_full(&self, pages: &PageStore) -> bool {
        pages.dirty_pages() >= crate::array::recovery::DIRTY_PAGES_MAX || self.is_lift_full()
    }

    /// The next tile in the order of slots; `next` is the first touch of the slots that were not cut into
    /// tiles yet.
    fn next_tile(&mut self, next: &mut usize) -> Option<Tile> {
        let rows_max = (TILE_BYTES / (self.cx.map.width() * BLOCK)).max(1);
        while self.work.tiles.is_empty() && self.plan.judge.has_touches(*next) {
            let (tiles, after) = self.plan.judge.tiles(*next, rows_max);
            self.work.tiles.extend(tiles);
            *next = after;
        }
        self.work.tiles.pop_front()
    }

    fn start_job(&mut self, job: Job, pages: &mut PageStore) {
        self.work.job_bytes += job.bytes;
        let tile = job.tile.clone();
        let key = self.work.jobs.insert(job);
        if self.cx.checks.checksums {
            for page in pages.layout().hash_pages(tile.slot, tile.rows).map(PageIndex) {
                let want = self.want_page(page, key, pages);
                let job = &mut self.work.jobs[key];
                match want {
                    Want::Unavailable => return self.refuse(RecoveryError::PageUnavailable { page: page.0 }),
                    Want::Loading => job.pending += 1,
                    Want::Cached => {}
                    Want::BeingWritten => unreachable!("nothing is checked"),
                }
                job.pages.push(page);
            }
        }
        if self.work.jobs[key].pending == 0 {
            self.pages_ready(key, pages);
        }
    }

    pub(super) fn job_page_loaded(&mut self, key: usize, pages: &mut PageStore) {
        self.work.jobs[key].pending -= 1;
        if self.work.jobs[key].pending == 0 {
            self.pages_ready(key, pages);
        }
    }

    fn pages_ready(&mut self, key: usize, pages: &mut PageStore) {
        let job = &mut self.work.jobs[key];
        let mut reads = Vec::new();
        match job.kind {
            Kind::Weigh => {
                for &row in &job.doubtful {
                    for column in 0..self.cx.map.width() {
                        let member = self.plan.judge.member(&job.tile, column);
                        if self.cx.usable.contains(member) {
                            let offset = home(&self.cx, &job.tile, row);
                            reads.push((
                                member,
                                offset,
                                CellRead { row, column, expected: None, or_at: None },
                            ));
                        }
                    }
                }
            }
            Kind::Relog | Kind::Redo => {
                let state = job.state.take().expect("the rows are known");
                job.wanted = match job.kind {
                    Kind::Relog => wanted_again(&self.cx, &self.plan.judge, &job.tile, &state, &job.suspects),
                    _ => wanted_in_place(&self.cx, &self.plan.judge, &job.tile, &state),
                };
                job.state = Some(state);
                let cells: BTreeSet<_> =
                    job.wanted.iter().map(|wanted| (wanted.row, wanted.column)).collect();
                for (row, column) in cells {
                    reads.extend(job.ask(&self.cx, &self.plan.judge, pages, row, column));
                }
            }
        }
        self.read_cells(key, reads);
        if self.work.jobs[key].pending == 0 {
            self.cells_complete(key, pages);
        }
    }

    /// Reads blocks, neighbours together.
    fn read_cells(&mut self, key: usize, mut reads: Vec<(MemberIndex, ByteOffset, CellRead)>) {
        reads.sort_unstable_by_key(|(member, offset, _)| (*member, *offset));
        let adjacent = |a: &(MemberIndex, ByteOffset, CellRead), b: &(MemberIndex, ByteOffset, CellRead)| {
            a.0 == b.0 && a.1.plus(ROW_BYTES) == b.1
        };
        for run in reads.chunk_by(adjacent).flat_map(|run| run.chunks(RUN_BLOCKS)) {
            let (member, offset, _) = run[0];
            let cells: Vec<CellRead> = run.iter().map(|(_, _, cell)| *cell).collect();
            self.work.jobs[key].pending += 1;
            self.io.read(member, offset, cells.len() * BLOCK, Doing::Cells { job: key, offset, cells });
        }
    }

    pub(super) fn cells_read(
        &mut self,
        key: usize,
        member: MemberIndex,
        offset: ByteOffset,
        cells: Vec<CellRead>,
        data: Option<Buf>,
        pages: &mut PageStore,
    ) {
        let hasher = self.cx.checks.hasher;
        let mut elsewhere = Vec::new();
        let job = &mut self.work.jobs[key];
        job.pending -= 1;
        match data {
            // A bad sector must not hide its neighbours.
            None if cells.len() > 1 => {
                for (at, cell) in cells.into_iter().enumerate() {
                    let offset = offset.plus((at * BLOCK) as u64);
                    self.work.jobs[key].pending += 1;
                    self.io.read(member, offset, BLOCK, Doing::Cells { job: key, offset, cells: vec![cell] });
                }
                return;
            }
            None => {
                for cell in cells {
                    job.homes.insert((cell.row, cell.column), None);
                    job.unread.insert((cell.row, cell.column));
                    elsewhere.push(cell);
                }
            }
            Some(data) => {
                for (at, cell) in cells.into_iter().enumerate() {
                    let CellRead { row, column, expected, .. } = cell;
                    let block = data.slice(at * BLOCK..(at + 1) * BLOCK);
                    let hash = (job.kind == Kind::Weigh || expected.is_some()).then(|| hasher.hash(&block));
                    if job.kind == Kind::Weigh {
                        job.homes.insert((row, column), hash);
                    } else if expected.is_none() || expected == hash {
                        job.have.insert((row, column), block);
                        job.unread.remove(&(row, column));
                    } else {
                        elsewhere.push(cell);
                    }
                }
            }
        }
        for cell in elsewhere {
            let Some(offset) = cell.or_at else { continue };
            let cells = vec![CellRead { or_at: None, ..cell }];
            self.work.jobs[key].pending += 1;
            self.io.read(member, offset, BLOCK, Doing::Cells { job: key, offset, cells });
        }
        let job = &self.work.jobs[key];
        if job.pending == 0 {
            self.cells_complete(key, pages);
        }
    }

    /// Goes on, since every block that was asked for is here or cannot be had.
    fn cells_complete(&mut self, key: usize, pages: &mut PageStore) {
        let job = &mut self.work.jobs[key];
        if job.kind == Kind::Weigh {
            let base = |row, column| base(&self.cx, pages, &job.tile, row, column);
            let verdict = self.plan.judge.weigh(&job.tile, &job.doubtful, &job.homes, base);
            self.plan.decision.add(&verdict.bad);
            if !verdict.suspects.is_empty() {
                self.work.suspects.push((job.tile.clone(), verdict.suspects));
            }
            return self.end_job(key, pages);
        }
        let mut missing: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        for wanted in job.wanted.iter().filter(|wanted| !job.have.contains_key(&(wanted.row, wanted.column)))
        {
            missing.entry(wanted.row).or_default().insert(wanted.column);
        }
        let mut reads = Vec::new();
        let mut decodable = Vec::new();
        let mut waits_for = None;
        for (row, columns) in missing {
            // Zeroes cost nothing; of the other blocks only as many as needed are asked for at a time.
            let mut good = (0..self.cx.map.width()).filter(|&c| job.have.contains_key(&(row, c))).count();
            let mut asked = 0;
            for column in 0..self.cx.map.width() {
                if good + asked >= self.cx.map.k {
                    break;
                }
                if job.asked.contains(&(row, column)) {
                    continue;
                }
                let read = job.ask(&self.cx, &self.plan.judge, pages, row, column);
                asked += usize::from(read.is_some());
                good += usize::from(read.is_none() && job.have.contains_key(&(row, column)));
                reads.extend(read);
            }
            if good >= self.cx.map.k {
                decodable.push((row, columns));
            } else if asked == 0 {
                // Every column was asked for, and none can be decoded.
                let unread = job.unread.iter().filter(|(other, _)| *other == row).count();
                if good + unread >= self.cx.map.k && !self.trials.cells.takes_anything {
                    // With the blocks that gave errors it can (T3).
                    waits_for.get_or_insert((job.tile.slot, row));
                    continue;
                }
                let width = self.cx.map.width();
                let gone = (0..width).filter(|&column| !job.have.contains_key(&(row, column)));
                self.lost.entry((job.tile.slot, row)).or_default().extend(gone);
            }
        }
        if !reads.is_empty() {
            return self.read_cells(key, reads);
        }
        if let Some(row) = waits_for {
            return self.wait_for_cells(key, row);
        }
        for (row, columns) in decodable {
            let wrong = job.decode(&self.cx, row, &columns);
            if !wrong.is_empty() {
                self.lost.entry((job.tile.slot, row)).or_default().extend(wrong);
            }
        }
        self.write_job(key, pages);
    }

    /// Has blocks read again later that gave an error, and without which a row cannot be decoded. Otherwise
    /// the images of the row would be lost with the log. When this takes too long the start ends here, unless
    /// it is forced.
    fn wait_for_cells(&mut self, key: usize, (slot, row): (SlotIndex, usize)) {
        let trials = &mut self.trials.cells;
        trials.jobs.push(key);
        trials.tried.insert(key);
        if trials.again.is_none() {
            trials.again = trials.patience.failed(self.now);
        }
        if trials.again.is_some() {
            return;
        }
        if !self.cx.force {
            return self.refuse(RecoveryError::RowUnreadable { slot, row });
        }
        trials.takes_anything = true;
        trials.again = Some(self.now);
    }

    /// Reads blocks again that are due.
    pub(super) fn retry_cells(&mut self, pages: &mut PageStore) {
        if self.outcome.is_some() || self.trials.cells.again.is_none_or(|at| at > self.now) {
            return;
        }
        self.trials.cells.again = None;
        for key in mem::take(&mut self.trials.cells.jobs) {
            let job = &mut self.work.jobs[key];
            for cell in job.unread.drain() {
                job.asked.remove(&cell);
            }
            self.cells_complete(key, pages);
        }
    }

    /// Writes the wanted blocks that could be had, neighbours together; sets the hashes.
    fn write_job(&mut self, key: usize, pages: &mut PageStore) {
        if self.trials.cells.tried.remove(&key) && self.trials.cells.tried.is_empty() {
            self.trials.cells.patience.succeeded();
        }
        let job = &mut self.work.jobs[key];
        if job.kind == Kind::Redo {
            job.set_hashes(&self.cx, pages);
            let rows: BTreeSet<usize> = job.wanted.iter().map(|wanted| wanted.row).collect();
            self.result.rows_redone += rows.len() as u64;
        }
        let mut writes: Vec<(Wanted, Buf)> = Vec::new();
        for wanted in &job.wanted {
            if let Some(block) = job.have.get(&(wanted.row, wanted.column)) {
                writes.push((*wanted, block.clone()));
            }
        }
        if let (Kind::Redo, Some(lifted)) = (job.kind, &mut self.lifted) {
            let slot = job.tile.slot;
            let images = writes.into_iter().map(|(wanted, block)| (slot, wanted.column, wanted.row, block));
            lifted.images.extend(images);
            return self.end_job(key, pages);
        }
        job.wanted = writes.iter().map(|(wanted, _)| *wanted).collect();
        writes.sort_by_key(|(wanted, _)| (wanted.member, wanted.which == Which::Replacement, wanted.offset));
        let adjacent = |a: &(Wanted, Buf), b: &(Wanted, Buf)| {
            (a.0.member, a.0.which) == (b.0.member, b.0.which) && a.0.offset.plus(ROW_BYTES) == b.0.offset
        };
        for run in writes.chunk_by(adjacent).flat_map(|run| run.chunks(RUN_BLOCKS)) {
            let buf = match run {
                [(_, block)] => block.clone(),
                _ => {
                    let mut buf = self.cx.pool.alloc(run.len() * BLOCK);
                    for (target, (_, block)) in buf.chunks_exact_mut(BLOCK).zip(run) {
                        target.copy_from_slice(block);
                    }
                    buf.freeze()
                }
            };
            let Wanted { member, which, offset, .. } = run[0].0;
            self.work.jobs[key].pending += 1;
            self.io.write(member, which, offset, buf, Doing::Write { job: Some(key) });
        }
        if self.work.jobs[key].pending == 0 {
            self.end_job(key, pages);
        }
    }

    pub(super) fn job_written(&mut self, key: usize, pages: &mut PageStore) {
        let job = &mut self.work.jobs[key];
        job.pending -= 1;
        if job.pending > 0 {
            return;
        }
        for wanted in &job.wanted {
            if let Some((batch, ordinal)) = wanted.mends {
                self.plan.judge.mend(batch, wanted.member, ordinal);
            }
        }
        self.end_job(key, pages);
    }

    fn end_job(&mut self, key: usize, pages: &mut PageStore) {
        let job = self.work.jobs.remove(key);
        self.work.job_bytes -= job.bytes;
        for page in job.pages {
            pages.release(page);
        }
    }
}

impl Job {
    fn new(kind: Kind, tile: Tile, bytes: usize) -> Job {
        Job {
            kind,
            tile,
            bytes,
            pages: Vec::new(),
            pending: 0,
            doubtful: Vec::new(),
            homes: Homes::new(),
            suspects: Vec::new(),
            state: None,
            wanted: Vec::new(),
            have: HashMap::new(),
            asked: HashSet::new(),
            unread: HashSet::new(),
        }
    }

    /// Asks for a block: zeroes are here at once, others may need a read.
    fn ask(
        &mut self,
        cx: &RecoveryContext,
        judge: &Judge,
        pages: &PageStore,
        row: usize,
        column: usize,
    ) -> Option<(MemberIndex, ByteOffset, CellRead)> {
        self.asked.insert((row, column));
        let state = self.state.as_ref().expect("the state is known before blocks are asked for");
        match source(cx, judge, pages, &self.tile, state, row, column) {
            Source::Nowhere => None,
            Source::Zero => {
                self.have.insert((row, column), cx.pool.alloc_zeroed(BLOCK).freeze());
                None
            }
            Source::Read(offset, expected, or_at) => {
                let cell = CellRead { row, column, expected, or_at };
                Some((judge.member(&self.tile, column), offset, cell))
            }
        }
    }

    /// Computes missing columns of a row. Returns those whose result does not match the log.
    fn decode(&mut self, cx: &RecoveryContext, row: usize, columns: &BTreeSet<usize>) -> Vec<usize> {
        let width = cx.map.width();
        let present: Vec<(usize, &[u8])> = (0..width)
            .filter_map(|column| Some((column, &self.have.get(&(row, column))?[..])))
            .take(cx.map.k)
            .collect();
        let mut bufs: Vec<_> = columns.iter().map(|&column| (column, cx.pool.alloc(BLOCK))).collect();
        let mut outputs: Vec<(usize, &mut [u8])> =
            bufs.iter_mut().map(|(column, buf)| (*column, &mut buf[..])).collect();
        cx.codec.recover(&present, &mut outputs).expect("k distinct present columns decode any other");
        let state = self.state.as_ref().expect("the state is known before rows are decoded");
        let mut wrong = Vec::new();
        for (column, buf) in bufs {
            let expected = state.cell(row, column).logged_hash();
            if expected.is_none_or(|hash| cx.checks.hasher.hash(&buf) == hash) {
                self.have.insert((row, column), buf.freeze());
            } else {
                wrong.push(column);
            }
        }
        wrong
    }

    /// Sets the hash of every block that the log names, also for slots that hold nothing any more, because R8
    /// requires every page that the log names to be written.
    fn set_hashes(&self, cx: &RecoveryContext, pages: &mut PageStore) {
        if !cx.checks.checksums {
            return;
        }
        let state = self.state.as_ref().expect("the state is known before hashes are set");
        for row in state.touched_rows() {
            for column in 0..cx.map.width() {
                let Some(hash) = state.cell(row, column).logged_hash() else { continue };
                let index = ColumnIndex(column as u16);
                // Pages were written before the tail moved: only one that was rolled back with its member is
                // older.
                if state.is_news(row, column) || pages.hash(self.tile.slot, row, index) != hash {
                    pages.set_hash(self.tile.slot, row, index, hash);
                }
            }
        }
    }
}

/// Where a row's blocks are on the device of any member.
fn home(cx: &RecoveryContext, tile: &Tile, row: usize) -> ByteOffset {
    cx.map.device_offset(cx.regions.data_offset, tile.slot, row * BLOCK)
}

fn base(cx: &RecoveryContext, pages: &PageStore, tile: &Tile, row: usize, column: usize) -> Base {
    if !cx.checks.checksums {
        return Base::Unchecked;
    }
    let (page, _) = pages.layout().hash_entry(tile.slot, row, column);
    if pages.is_lost(page) {
        return Base::Unknown;
    }
    Base::Hash(pages.hash(tile.slot, row, ColumnIndex(column as u16)))
}

/// Where a block of the rows after the prefix can be had.
fn source(
    cx: &RecoveryContext,
    judge: &Judge,
    pages: &PageStore,
    tile: &Tile,
    state: &TileState,
    row: usize,
    column: usize,
) -> Source {
    let cell = state.cell(row, column);
    let base = match cell {
        Cell::Zero(_) => return Source::Zero,
        Cell::Untouched => base(cx, pages, tile, row, column),
        Cell::Placed(hash) | Cell::Fresh { hash, .. } | Cell::Image { hash, .. } => Base::Hash(hash),
    };
    let member = judge.member(tile, column);
    if matches!(base, Base::Hash(hash) if !hash.is_stored()) {
        return Source::Zero;
    }
    if base == Base::Unknown || !cx.usable.contains(member) {
        return Source::Nowhere;
    }
    let expected = match base {
        Base::Hash(hash) => Some(hash),
        _ => None,
    };
    let home = home(cx, tile, row);
    let Cell::Image { batch, ordinal, .. } = cell else { return Source::Read(home, expected, None) };
    let entry = judge.chain().batch(batch);
    let Some(block) = entry.image_block(member, ordinal) else { return Source::Read(home, expected, None) };
    let image = cx.regions.log.offset.plus(u64::from(block) * ROW_BYTES);
    if entry.holds(member, ordinal) {
        return Source::Read(image, expected, None);
    }
    Source::Read(home, expected, Some(image).filter(|_| judge.chain().unread().contains(member, block)))
}

/// R6: the blocks that usable members lack, and where they belong.
fn wanted_again(
    cx: &RecoveryContext,
    judge: &Judge,
    tile: &Tile,
    state: &TileState,
    suspects: &[(usize, usize)],
) -> Vec<Wanted> {
    let mut all = Vec::new();
    for &(row, column) in suspects.iter().filter(|_| state.is_live()) {
        let member = judge.member(tile, column);
        let which = Which::Primary;
        match state.cell(row, column) {
            Cell::Untouched | Cell::Zero(_) | Cell::Placed(_) => {}
            Cell::Fresh { .. } if is_off(Mutation::RebuildAfterNote) => {}
            Cell::Fresh { .. } => {
                all.push(Wanted { row, column, member, which, offset: home(cx, tile, row), mends: None });
            }
            // Its log has no room for the batches that others have in place. The blocks that it lacks of
            // those go in place here too, whatever the prefix.
            Cell::Image { batch, .. } if judge.chain().is_own(member, batch) => {
                all.push(Wanted { row, column, member, which, offset: home(cx, tile, row), mends: None });
            }
            Cell::Image { batch, ordinal, .. } => {
                let entry = judge.chain().batch(batch);
                // A member that had no part in the batch gets the block in place, with the redo.
                let place = entry.image_block(member, ordinal).filter(|_| !entry.holds(member, ordinal));
                if let Some(block) = place {
                    let offset = cx.regions.log.offset.plus(u64::from(block) * ROW_BYTES);
                    all.push(Wanted { row, column, member, which, offset, mends: Some((batch, ordinal)) });
                }
            }
        }
    }
    all
}

/// R8: last images to the usable members; all blocks that the log names to devices that are being built and
/// have come past the slot. Without checksum pages nothing records that a block is unwritten, so it is
/// written as zeroes.
fn wanted_in_place(cx: &RecoveryContext, judge: &Judge, tile: &Tile, state: &TileState) -> Vec<Wanted> {
    let mut all = Vec::new();
    let built: Vec<&Building> = cx.building.iter().filter(|device| tile.slot < device.bound).collect();
    for row in state.touched_rows().filter(|_| state.is_live()) {
        let offset = home(cx, tile, row);
        for column in 0..cx.map.width() {
            let member = judge.member(tile, column);
            let (image, named) = match state.cell(row, column) {
                Cell::Untouched => continue,
                Cell::Placed(_) => (false, true),
                Cell::Fresh { .. } => (is_off(Mutation::RebuildAfterNote), true),
                Cell::Image { .. } => (true, true),
                Cell::Zero(_) => (!cx.checks.checksums, !cx.checks.checksums),
            };
            if image && cx.usable.contains(member) {
                all.push(Wanted { row, column, member, which: Which::Primary, offset, mends: None });
            }
            for device in built.iter().filter(|device| named && device.member == member) {
                all.push(Wanted { row, column, member, which: device.which, offset, mends: None });
            }
        }
    }
    all
}
