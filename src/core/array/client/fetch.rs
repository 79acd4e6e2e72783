//! The right content of the blocks of a slot: from the overlay, as known zeroes, from their members and
//! verified, or decoded from others that verify. Reads, writes, rebuild and scrub of logged arrays get their
//! bytes here, so that nothing unverified reaches a client or a parity.
//!
//! Runs under a lock on the rows, with their checksum pages loaded and pinned by the caller: neither hashes
//! nor images of these rows change meanwhile (a read may begin under the lock alone, before the pages are
//! here: `fetch/early.rs`). The unit is one block: an unreadable or wrong block costs its
//! row one erasure, not the whole column. Bulk reads are judged as one job once all their bytes are here, and
//! decoded in it where possible (`fetch/job.rs`); other reads are judged here, block by block. Must not know
//! what the bytes are for.

mod early;
mod job;
mod mend;
mod unbuilt;

use crate::array::blocks::{Missing, Why};
use crate::array::{Array, Core, Inflight, Owner};
use crate::block_io::{BufMut, DeviceId, IoFault, IoFaultKind, IoOp, IoValue};
use crate::format::MemberState;
use crate::units::{BlockHash, ColumnIndex, MemberIndex, ROW_BYTES, SlotIndex};
use job::JobOut;
pub(in crate::array) use job::{Blend, Blended, Ingredient};
use mend::{Repair, Sent};
use std::collections::BTreeSet;
use std::ops::Range;

const BLOCK: usize = ROW_BYTES as usize;

/// See the head of this file.
pub(in crate::array) struct Fetch {
    slot: SlotIndex,
    parts: Vec<Part>,
    /// Reads in flight.
    pending: usize,
    /// Bytes of parts that this round reads whole; a round ends when nothing is in flight.
    round_bytes: usize,
    /// Whether its reads began before the checksums were here, and are not judged yet.
    is_early: bool,
    /// Whether small reads too are hashed in a job, batched with those of other clients.
    batch_small: bool,
    /// The job under way.
    job: Option<JobOut>,
    /// What is to be computed along with the verification, and the result.
    blend: Option<Blend>,
    blended: Option<Blended>,
    rules: FetchRules,
    /// Its results, besides the bytes.
    found: Findings,
    /// Repairs that were sent.
    sent: Vec<Sent>,
    /// Whether devices that are being built were asked for what members in service cannot give.
    asked_unbuilt: bool,
}

/// What a fetch may do, and whether anything waits for it.
// Plain data: what the operation that begins a fetch wants of it.
#[derive(Default)]
pub(in crate::array) struct FetchRules {
    /// No client waits for it, so the I/O of clients goes first.
    pub background: bool,
    /// It looks again at blocks that could not be had: failed reads of these were counted before.
    pub is_look: bool,
    /// Wrong blocks were counted by an earlier run.
    pub was_counted: bool,
    /// Devices that are being built are not asked. Fetches for new parity set this: the write replaces bytes
    /// in service only, and a block decoded with the help of the old bytes of such a device could not be
    /// decoded from the members afterwards.
    pub in_service_only: bool,
    /// Wanted parity is taken without verification. Never set, unless a test breaks the rule.
    pub believes_parity: bool,
}

/// Results of a fetch, besides the bytes.
#[derive(Default)]
struct Findings {
    /// A read failed because this host was short of something (rule T4): that proves nothing about the
    /// blocks.
    host_is_short: bool,
    /// Columns whose member in service did not give a block because of that shortage: good blocks of them may
    /// have been decoded.
    short_columns: BTreeSet<usize>,
    /// Blocks of wanted parts that cannot be had.
    missing: Vec<Missing>,
    /// Other blocks of these rows that cannot be had either: reading them would fail likewise.
    missing_sources: Vec<Missing>,
    /// Blocks of wanted parts that were never written, and thus are zeroes: (column, row).
    unwritten: Vec<(usize, usize)>,
    /// Blocks that were wrong or unreadable on a member in service, with what should be there.
    repairs: Vec<Repair>,
}

/// Some rows of one column that a fetch reads.
struct Part {
    column: usize,
    rows: Range<usize>,
    wanted: bool,
    /// Filled block by block; away while one I/O reads it whole.
    buf: Option<BufMut>,
    blocks: Vec<State>,
    /// The member that gave the bytes, while they wait to be judged with those of other parts.
    unjudged: Option<MemberIndex>,
    /// The device being built that gives it (`unbuilt.rs`); none where a member in service does.
    unbuilt: Option<DeviceId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Being read, or not judged yet.
    Pending,
    /// As expected.
    Good,
    /// Its entry says that it is lost or set aside: it counts as zeroes for coding.
    KnownZero(Why),
    /// Its member is out of service, or is not built up to here yet.
    Absent,
    /// Its member gave bytes that do not match.
    Wrong,
    /// Its member returned an error.
    Unread,
}

impl State {
    /// Whether coding knows its content.
    fn is_known(self) -> bool {
        matches!(self, State::Good | State::KnownZero(_))
    }
}

/// Whether a fetch waits for I/O or for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) enum Fetched {
    Wait,
    Done,
}

/// Item numbers: the part in the upper bits; in the lower ones 0 for the whole part, else 1 + the block read
/// alone.
const ITEM_ROW_BITS: u32 = 16;

impl Fetch {
    pub(in crate::array) fn new(slot: SlotIndex, rules: FetchRules) -> Fetch {
        Fetch {
            slot,
            parts: Vec::new(),
            pending: 0,
            round_bytes: 0,
            is_early: false,
            batch_small: false,
            job: None,
            blend: None,
            blended: None,
            rules,
            found: Findings::default(),
            sent: Vec::new(),
            asked_unbuilt: false,
        }
    }

    /// Wants rows of a column in `buf`, which has their length.
    pub(in crate::array) fn want(&mut self, column: usize, rows: Range<usize>, buf: BufMut) {
        debug_assert_eq!(buf.len(), rows.len() * BLOCK);
        self.parts.push(Part::new(column, rows, true, buf));
    }

    /// Whether rows of the column are wanted.
    pub(in crate::array) fn wants(&self, column: usize) -> bool {
        self.parts.iter().any(|part| part.wanted && part.column == column)
    }

    /// The wanted buffers, in the order they were wanted.
    pub(in crate::array) fn take(&mut self) -> Vec<(usize, Range<usize>, BufMut)> {
        let wanted = std::mem::take(&mut self.parts).into_iter().filter(|part| part.wanted);
        wanted
            .map(|part| {
                (part.column, part.rows, part.buf.expect("nothing is in flight when a fetch is done"))
            })
            .collect()
    }

    /// Blocks of wanted parts that cannot be had.
    pub(in crate::array) fn missing(&self) -> &[Missing] {
        &self.found.missing
    }

    /// Takes the same blocks out, so that they are not reported again.
    pub(in crate::array) fn take_missing(&mut self) -> Vec<Missing> {
        std::mem::take(&mut self.found.missing)
    }

    /// Blocks of wanted parts that were never written, and thus are zeroes: (column, row).
    pub(in crate::array) fn take_unwritten(&mut self) -> BTreeSet<(usize, usize)> {
        self.found.unwritten.drain(..).collect()
    }

    /// Whether a read failed because this host was short of something (rule T4): that proves nothing about
    /// the blocks.
    pub(in crate::array) fn host_is_short(&self) -> bool {
        self.found.host_is_short
    }

    /// Columns whose member in service did not give a block because of that shortage: good blocks of them may
    /// have been decoded.
    pub(in crate::array) fn short_columns(&self) -> &BTreeSet<usize> {
        &self.found.short_columns
    }

    /// How many blocks are to be repaired.
    pub(in crate::array) fn repair_count(&self) -> usize {
        self.found.repairs.len()
    }

    /// Drops all repairs but those for which `is_due` holds, by the member's device and column.
    pub(in crate::array) fn repair_only(&mut self, is_due: impl Fn(DeviceId, usize) -> bool) {
        self.found.repairs.retain(|repair| is_due(repair.device, repair.column));
    }

    /// Rows in which some block is to be decoded, ascending.
    fn broken_rows(&self) -> Vec<usize> {
        let mut rows: Vec<usize> = self.parts.iter().flat_map(Part::broken_rows).collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }

    fn state(&self, column: usize, row: usize) -> Option<State> {
        let covering = self.parts.iter().filter(|p| p.column == column && p.rows.contains(&row));
        covering.map(|p| p.blocks[row - p.rows.start]).reduce(|a, b| if a == State::Good { a } else { b })
    }

    /// Whether a member in service gave an error for a block of this row.
    pub(super) fn has_errors(&self, row: usize) -> bool {
        let mut parts = self.parts.iter().filter(|part| part.rows.contains(&row));
        parts.any(|part| part.blocks[row - part.rows.start] == State::Unread)
    }

    /// Whether this block's own member is out of service, or has not been built up to it yet.
    pub(super) fn is_absent(&self, column: usize, row: usize) -> bool {
        self.state(column, row) == Some(State::Absent)
    }

    /// Whether this block's own member gave bytes that do not match.
    pub(super) fn is_wrong(&self, column: usize, row: usize) -> bool {
        self.state(column, row) == Some(State::Wrong)
    }

    /// Whether a block that is not good is proven to be beyond repair. It was read and does not match, and
    /// either so many others were read and do not match that the rest could not decode it even if all of them
    /// were good, or enough to decode it are good and the decoded block does not match.
    fn is_proven(&self, column: usize, row: usize, width: usize, k: usize) -> bool {
        let is_wrong = |column: usize| self.state(column, row) == Some(State::Wrong);
        let wrong = (0..width).filter(|column| is_wrong(*column)).count();
        self.known(row, width) >= k || is_wrong(column) && width - wrong < k
    }

    /// How many blocks of a row are known, so that the others can be decoded from them.
    fn known(&self, row: usize, width: usize) -> usize {
        let is_known = |column: &usize| self.state(*column, row).is_some_and(State::is_known);
        (0..width).filter(is_known).count()
    }

    /// The blocks to report for rows with blocks that cannot be had: those blocks, and other such blocks of
    /// these rows in the first `columns` columns, which hold data.
    pub(in crate::array) fn missing_data(&self, missing: &[Missing], columns: usize) -> Vec<Missing> {
        let others = self.found.missing_sources.iter().filter(|block| block.column < columns);
        missing.iter().chain(others).copied().collect()
    }

    /// Exchanges good blocks between parts of the same column. A column can be here twice, wanted for some
    /// rows and as a source for more, and its member may have been built up to this slot in between.
    fn share_good_blocks(&mut self) {
        for at in 0..self.parts.len() {
            for block in 0..self.parts[at].blocks.len() {
                let part = &self.parts[at];
                if matches!(part.blocks[block], State::Good | State::KnownZero(_)) {
                    continue;
                }
                let Some(bytes) = self.good(part.column, part.rows.start + block).map(<[u8]>::to_vec) else {
                    continue;
                };
                let part = &mut self.parts[at];
                if let Some(buf) = &mut part.buf {
                    buf[block * BLOCK..(block + 1) * BLOCK].copy_from_slice(&bytes);
                    part.blocks[block] = State::Good;
                }
            }
        }
    }

    /// The good bytes of a block.
    fn good(&self, column: usize, row: usize) -> Option<&[u8]> {
        self.parts.iter().find_map(|part| {
            let at = row.checked_sub(part.rows.start).filter(|_| part.column == column)?;
            let fits = matches!(part.blocks.get(at)?, State::Good | State::KnownZero(_));
            let bytes = part.buf.as_deref().filter(|_| fits)?;
            Some(&bytes[at * BLOCK..(at + 1) * BLOCK])
        })
    }
}

impl Part {
    fn new(column: usize, rows: Range<usize>, wanted: bool, buf: BufMut) -> Part {
        let blocks = vec![State::Pending; rows.len()];
        Part { column, rows, wanted, buf: Some(buf), blocks, unjudged: None, unbuilt: None }
    }

    /// Rows in which a block is to be decoded if it can be.
    fn broken_rows(&self) -> impl Iterator<Item = usize> + '_ {
        self.rows.clone().zip(&self.blocks).filter(|(_, state)| self.is_broken(**state)).map(|(row, _)| row)
    }

    fn is_broken(&self, state: State) -> bool {
        matches!(state, State::Wrong | State::Unread) || (state == State::Absent && self.wanted)
    }
}

impl Array {
    /// Starts to fetch what is wanted. The rest goes through [`Array::fetch_io`] and [`Array::fetch_coded`].
    pub(in crate::array) fn fetch(&mut self, key: usize, fetch: &mut Fetch) -> Fetched {
        fetch.batch_small = !fetch.rules.background && self.gains_from_batching();
        for at in 0..fetch.parts.len() {
            self.issue_part(key, fetch, at);
        }
        self.begin_fetch_round(key, fetch)
    }

    /// Begins a round of which the wanted parts are issued.
    fn begin_fetch_round(&mut self, key: usize, fetch: &mut Fetch) -> Fetched {
        // Blocks that no member has are decoded from others: those are read in the same round, so that one
        // job can do all of it.
        let absent = fetch.broken_rows();
        if !absent.is_empty() {
            self.add_sources(key, fetch, &absent);
        }
        if fetch.pending > 0 { Fetched::Wait } else { self.end_fetch_round(key, fetch) }
    }

    /// Ends a round: nothing is in flight any more.
    fn end_fetch_round(&mut self, key: usize, fetch: &mut Fetch) -> Fetched {
        if self.send_fetch_job(key, fetch) { Fetched::Wait } else { self.settle_fetch(key, fetch) }
    }

    /// Fills the blocks that are known without I/O and reads the rest.
    fn issue_part(&mut self, key: usize, fetch: &mut Fetch, at: usize) {
        let known = self.fill_known(fetch, at);
        let part = &mut fetch.parts[at];
        let (slot, rows) = (fetch.slot, part.rows.clone());
        let member = self.core.map.member_of(slot, ColumnIndex(part.column as u16));
        let Some(device) = self.core.readable(member, slot) else { return };
        if !known {
            let Some(buf) = part.buf.take() else { return };
            let offset = self.core.map.device_offset(self.core.shape.data_offset, slot, rows.start * BLOCK);
            let item = at << ITEM_ROW_BITS;
            self.core.submit_io(Owner::Op { key, item }, member, device, IoOp::Read { offset, buf });
            fetch.pending += 1;
            fetch.round_bytes += rows.len() * BLOCK;
            return;
        }
        let pending: Vec<usize> =
            (0..rows.len()).filter(|&block| fetch.parts[at].blocks[block] == State::Pending).collect();
        for block in pending {
            self.core.read_block(key, fetch, at, block);
        }
    }

    /// Fills the blocks of a part that are known without I/O. False: all are on their member. Blocks that
    /// were read early keep their state unless they are known.
    fn fill_known(&mut self, fetch: &mut Fetch, at: usize) -> bool {
        let slot = fetch.slot;
        let part = &mut fetch.parts[at];
        let member = self.core.map.member_of(slot, ColumnIndex(part.column as u16));
        let device = self.core.readable(member, slot);
        let rows = part.rows.clone();
        let was_read = part.unjudged.is_some() || !part.is_wholly(State::Pending);
        let Some(buf) = part.buf.as_mut() else { return false };
        let column = part.column;
        let mut known = false;
        let has_bad = !self.bad.is_clear(member);
        let mut not_needed = Vec::new();
        for row in rows.clone() {
            let state = &mut part.blocks[row - rows.start];
            let bytes = &mut buf[(row - rows.start) * BLOCK..(row - rows.start + 1) * BLOCK];
            match self.pages.block_hash(slot, row, part.column) {
                Some(BlockHash::UNWRITTEN) => {
                    bytes.fill(0);
                    *state = State::Good;
                    not_needed.extend(has_bad.then_some(row));
                    if part.wanted {
                        fetch.found.unwritten.push((part.column, row));
                    }
                }
                Some(hash) if !hash.is_stored() => {
                    bytes.fill(0);
                    not_needed.extend(has_bad.then_some(row));
                    *state = State::KnownZero(if hash.is_set_aside() { Why::SetAside } else { Why::Lost });
                }
                _ if was_read => {}
                _ => match self.redo.image(slot, part.column, row) {
                    Some(image) => {
                        bytes.copy_from_slice(image);
                        *state = State::Good;
                    }
                    None if device.is_none() => *state = State::Absent,
                    None => *state = State::Pending,
                },
            }
            known |= *state != State::Pending;
        }
        if device.is_some() {
            not_needed.into_iter().for_each(|row| self.note_not_needed(slot, column, row));
        }
        known
    }

    /// Takes the end of one of the fetch's reads.
    pub(in crate::array) fn fetch_io(
        &mut self,
        key: usize,
        fetch: &mut Fetch,
        item: usize,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) -> Fetched {
        fetch.pending -= 1;
        let (at, block) = (item >> ITEM_ROW_BITS, (item & ((1 << ITEM_ROW_BITS) - 1)).checked_sub(1));
        match (result, block) {
            (result, Some(block)) if fetch.parts[at].unbuilt.is_some() => {
                self.unbuilt_io(fetch, at, block, &entry, result);
            }
            (Ok(IoValue::Data(buf)), None) => {
                fetch.parts[at].buf = Some(buf);
                if fetch.is_early || self.is_bulk(fetch) {
                    fetch.parts[at].unjudged = Some(entry.member);
                } else {
                    let blocks = 0..fetch.parts[at].blocks.len();
                    self.judge_blocks(fetch, at, blocks, entry.member);
                }
            }
            (Ok(IoValue::Data(bytes)), Some(block)) => {
                if let Some(buf) = &mut fetch.parts[at].buf {
                    buf[block * BLOCK..(block + 1) * BLOCK].copy_from_slice(&bytes);
                }
                if fetch.is_early {
                    fetch.parts[at].unjudged = Some(entry.member);
                } else {
                    self.judge_blocks(fetch, at, block..block + 1, entry.member);
                }
            }
            (Ok(_), _) => unreachable!("a read yields data"),
            // This proves nothing about the blocks; other members may have what is needed.
            (Err(fault), _) if fault.kind.passes() => {
                fetch.found.host_is_short = true;
                fetch.found.short_columns.insert(fetch.parts[at].column);
                let part = &mut fetch.parts[at];
                let bytes = part.blocks.len() * BLOCK;
                part.buf.get_or_insert_with(|| self.core.pool.alloc_zeroed(bytes));
                match block {
                    Some(block) => part.blocks[block] = State::Absent,
                    None => part.blocks.fill(State::Absent),
                }
            }
            (Err(fault), None) if fetch.parts[at].blocks.len() > 1 => {
                // Its blocks are read one by one to find which cannot be read.
                fetch.parts[at].buf = Some(self.core.pool.alloc_zeroed(fetch.parts[at].blocks.len() * BLOCK));
                if self.core.find_device(entry.device).is_some() && fault.kind == IoFaultKind::Medium {
                    for block in 0..fetch.parts[at].blocks.len() {
                        self.core.read_block(key, fetch, at, block);
                    }
                } else {
                    self.fetch_fault(fetch, &entry, fault);
                    fetch.parts[at].blocks.fill(State::Unread);
                }
            }
            (Err(fault), block) => {
                self.fetch_fault(fetch, &entry, fault);
                let part = &mut fetch.parts[at];
                part.blocks[block.unwrap_or(0)] = State::Unread;
                part.buf.get_or_insert_with(|| self.core.pool.alloc_zeroed(BLOCK));
            }
        }
        // What was read early waits for the checksums, and then for `judge_early`.
        let waits = fetch.pending > 0 || fetch.is_early;
        if waits { Fetched::Wait } else { self.end_fetch_round(key, fetch) }
    }

    /// Judges whether blocks that were read have the expected content.
    fn judge_blocks(&mut self, fetch: &mut Fetch, at: usize, blocks: Range<usize>, member: MemberIndex) {
        let part = &fetch.parts[at];
        let Some(bytes) = part.buf.as_deref() else { return };
        let bytes = &bytes[blocks.start * BLOCK..blocks.end * BLOCK];
        let row = part.rows.start + blocks.start;
        let verdicts = self.pages.verify_blocks(fetch.slot, row, part.column, bytes);
        self.pass_verdicts(fetch, at, blocks, member, verdicts);
    }

    /// Records for blocks that a member gave whether each is good or bad.
    fn pass_verdicts(
        &mut self,
        fetch: &mut Fetch,
        at: usize,
        blocks: Range<usize>,
        member: MemberIndex,
        verdicts: Vec<bool>,
    ) {
        let part = &mut fetch.parts[at];
        let column = part.column;
        let believed = fetch.rules.believes_parity && part.wanted && part.column >= self.core.map.k;
        let mut wrong = 0;
        let first = part.rows.start + blocks.start;
        for (at, (state, good)) in part.blocks[blocks].iter_mut().zip(verdicts).enumerate() {
            let good = believed || good;
            *state = if good { State::Good } else { State::Wrong };
            let is_new = self.note_verdict(member, fetch.slot, first + at, good);
            let counts = !good && is_new && !fetch.rules.was_counted;
            wrong += u64::from(counts && !self.is_expected_wrong(fetch.slot, column, first + at));
        }
        self.core.member_mut(member).counters.checksum_errors += wrong;
    }

    /// Whether a block is known to be wrong, or is the parity of a row with such a block: a device that was
    /// built without it does not have it, and has made no error.
    fn is_expected_wrong(&self, slot: SlotIndex, column: usize, row: usize) -> bool {
        if self.damage.is_empty() {
            return false;
        }
        let Some(stripe) = self.pages.stripes().stripe_at(slot) else { return false };
        let mut known =
            self.damage.of_stripe(stripe).map(|((_, column, row), _)| (usize::from(column), row as usize));
        known.any(|of| of == (column, row) || (column >= self.core.map.k && of.1 == row))
    }

    /// Handles a failed read of the fetch.
    fn fetch_fault(&mut self, fetch: &Fetch, entry: &Inflight, fault: IoFault) {
        if !fetch.rules.is_look || fault.kind != IoFaultKind::Medium {
            self.read_fault(entry.member, entry.device, fault);
        }
    }

    /// Once nothing is in flight, decodes the blocks that are not good, from more columns if need be.
    fn settle_fetch(&mut self, key: usize, fetch: &mut Fetch) -> Fetched {
        assert!(
            fetch.parts.iter().all(|part| !part.blocks.contains(&State::Pending)),
            "every block is known, judged or cannot be had"
        );
        fetch.share_good_blocks();
        let broken = fetch.broken_rows();
        if !broken.is_empty() && self.add_sources(key, fetch, &broken) {
            return if fetch.pending > 0 { Fetched::Wait } else { self.settle_fetch(key, fetch) };
        }
        for row in broken {
            self.decode_row(fetch, row);
        }
        fetch.found.missing = self.core.missing_of(fetch, true);
        if !fetch.found.missing.is_empty() && self.ask_unbuilt(key, fetch) {
            return Fetched::Wait;
        }
        fetch.found.missing_sources = Vec::new();
        if !fetch.found.missing.is_empty() {
            let mut sources = self.core.missing_of(fetch, false);
            let is_missing = |row: usize| fetch.found.missing.iter().any(|block| block.row == row);
            // Decode a block of a member out of service only when it is wanted; enough others could do it.
            let (width, k) = (self.core.map.width(), self.core.map.k);
            let could_be_decoded = |block: &Missing| {
                fetch.state(block.column, block.row) == Some(State::Absent)
                    && fetch.known(block.row, width) >= k
            };
            sources.retain(|block| is_missing(block.row) && !could_be_decoded(block));
            fetch.found.missing_sources = sources;
        }
        Fetched::Done
    }

    /// Reads further columns of the broken rows, where fewer than k are good or may be. False: there are
    /// enough, or no others to read.
    fn add_sources(&mut self, key: usize, fetch: &mut Fetch, broken: &[usize]) -> bool {
        let width = self.core.map.width();
        let is_good = |column: usize, row: usize| {
            matches!(fetch.state(column, row), Some(State::Good | State::KnownZero(_) | State::Pending))
        };
        let mut needed = 0;
        let mut window: Option<Range<usize>> = None;
        for &row in broken {
            let good = (0..width).filter(|&column| is_good(column, row)).count();
            if good < self.core.map.k {
                needed = needed.max(self.core.map.k - good);
                window = Some(window.map_or(row..row + 1, |w| w.start.min(row)..w.end.max(row + 1)));
            }
        }
        let Some(window) = window else { return false };
        // Columns not asked for yet, those that can be read first.
        let untried = |column: &usize| {
            !fetch.parts.iter().any(|part| {
                part.column == *column && part.rows.start <= window.start && part.rows.end >= window.end
            })
        };
        let mut columns: Vec<usize> = (0..width).filter(untried).collect();
        columns.sort_by_key(|&column| {
            self.core
                .readable(self.core.map.member_of(fetch.slot, ColumnIndex(column as u16)), fetch.slot)
                .is_none()
        });
        columns.truncate(needed);
        for &column in &columns {
            let buf = self.core.pool.alloc(window.len() * BLOCK);
            fetch.parts.push(Part::new(column, window.clone(), false, buf));
            self.issue_part(key, fetch, fetch.parts.len() - 1);
        }
        !columns.is_empty()
    }

    /// Decodes the blocks of one row that are bad, or absent and wanted. They keep their state when fewer
    /// than k columns are good, or when the result does not verify.
    fn decode_row(&mut self, fetch: &mut Fetch, row: usize) {
        let width = self.core.map.width();
        let targets: Vec<(usize, usize, State)> = fetch
            .parts
            .iter()
            .enumerate()
            .filter_map(|(at, part)| {
                let block = row.checked_sub(part.rows.start).filter(|_| part.rows.contains(&row))?;
                let state = part.blocks[block];
                part.is_broken(state).then_some((at, block, state))
            })
            .collect();
        for (at, block, state) in targets {
            let column = fetch.parts[at].column;
            let mut decoded = self.core.pool.alloc(BLOCK);
            {
                let present: Vec<(usize, &[u8])> = (0..width)
                    .filter(|&c| c != column)
                    .filter_map(|c| Some((c, fetch.good(c, row)?)))
                    .take(self.core.map.k)
                    .collect();
                if present.len() < self.core.map.k {
                    continue;
                }
                self.core
                    .shape
                    .codec
                    .recover(&present, &mut [(column, &mut decoded[..])])
                    .expect("k distinct present columns decode any other");
            }
            if !self.pages.verifies(fetch.slot, row, column, &decoded) {
                continue;
            }
            let part = &mut fetch.parts[at];
            if let Some(buf) = &mut part.buf {
                buf[block * BLOCK..(block + 1) * BLOCK].copy_from_slice(&decoded);
            }
            part.blocks[block] = State::Good;
            let member = self.core.map.member_of(fetch.slot, ColumnIndex(column as u16));
            let known = fetch.found.repairs.iter().any(|repair| repair.column == column && repair.row == row);
            if let (State::Wrong | State::Unread, false, MemberState::Online, Some(device)) =
                (state, known, self.core.member(member).state, self.core.readable(member, fetch.slot))
            {
                let bytes = decoded.freeze();
                fetch.found.repairs.push(Repair { member, device, column, row, bytes });
            }
        }
    }
}

impl Core {
    fn read_block(&mut self, key: usize, fetch: &mut Fetch, at: usize, block: usize) {
        let part = &mut fetch.parts[at];
        let member = self.map.member_of(fetch.slot, ColumnIndex(part.column as u16));
        let Some(device) = self.readable(member, fetch.slot) else {
            part.blocks[block] = State::Absent;
            return;
        };
        let offset =
            self.map.device_offset(self.shape.data_offset, fetch.slot, (part.rows.start + block) * BLOCK);
        let buf = self.pool.alloc(BLOCK);
        let item = at << ITEM_ROW_BITS | (block + 1);
        self.submit_io(Owner::Op { key, item }, member, device, IoOp::Read { offset, buf });
        fetch.pending += 1;
    }

    /// Blocks that cannot be had, of parts that are wanted or of those that are not.
    fn missing_of(&self, fetch: &Fetch, wanted: bool) -> Vec<Missing> {
        let (width, k) = (self.map.width(), self.map.k);
        let mut missing = Vec::new();
        for part in fetch.parts.iter().filter(|part| part.wanted == wanted) {
            for (row, state) in part.rows.clone().zip(&part.blocks) {
                let why = match state {
                    State::Good => continue,
                    State::KnownZero(why) => *why,
                    _ if fetch.is_proven(part.column, row, width, k) => Why::Proven,
                    _ => Why::Unreadable,
                };
                missing.push(Missing { column: part.column, row, why });
            }
        }
        missing
    }
}
