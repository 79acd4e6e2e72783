//! The log as the usable members hold it: its batches, the pieces that each member holds of them, and the
//! chain that they form.
//!
//! Pure: finds go in, the batches that count come out (rules R2 and R3 of the crash-safety design). A batch's
//! manifest is kept once, however many members hold it; of payloads only one bit for each block is kept. A
//! durable batch is on every member that was live, so a batch that no member shows does not exist, unless
//! blocks that could not be read hide it (R5). Must not know how rings are read or rows are decoded.

use crate::array::geometry::Map;
use crate::array::mutation::{Mutation, is_off};
use crate::array::recovery::RecoveryError;
pub(super) use crate::array::recovery::unread::Bits;
use crate::array::recovery::unread::{Doubt, UnreadBlocks};
use crate::format::{Batch, BatchHash, EpochStamp, LogRecord, LogStart, MemberSet, NO_PLACE, SegmentHeader};
use crate::units::{BlockHash, ColumnIndex, MemberIndex, ROW_BYTES, SlotIndex, StripeIndex};
use std::collections::{HashMap, VecDeque};

/// The part of a batch that one member holds.
// Plain data: a find of a scan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The member that holds it.
    pub member: MemberIndex,
    /// Whether its header verifies.
    pub header: bool,
    /// Which blocks of its payload verify.
    pub good: Bits,
}

/// A batch of the log.
#[derive(Clone, Debug)]
pub(super) struct LogBatch {
    /// Its manifest.
    batch: Batch,
    /// Its identity.
    hash: BatchHash,
    /// Blocks of header of each piece.
    header_blocks: u32,
    /// The pieces that members hold of it.
    pieces: Vec<Piece>,
    /// For each record the index in `ordinals` of its first column.
    starts: Vec<u32>,
    /// For each column of each in-place record: where in its member's payload its blocks start.
    ordinals: Vec<u32>,
    /// Blocks of payload on each member.
    payloads: Vec<u32>,
}

impl LogBatch {
    /// A batch that was found on some member.
    ///
    /// # Errors
    /// When it is not possible in an array of this shape.
    pub(super) fn new(header: SegmentHeader, map: &Map, ring_blocks: u32) -> Result<LogBatch, RecoveryError> {
        let SegmentHeader { batch, hash, header_blocks, .. } = header;
        let impossible = RecoveryError::Impossible { sequence: batch.sequence };
        let fits =
            batch.places.len() == map.width() && batch.records.iter().all(|record| possible(record, map));
        if !fits {
            return Err(impossible);
        }
        let mut payloads = vec![0u32; map.width()];
        let (mut starts, mut ordinals) = (Vec::with_capacity(batch.records.len()), Vec::new());
        for record in &batch.records {
            starts.push(ordinals.len() as u32);
            let LogRecord::InPlace(record) = record else { continue };
            for (at, &column) in record.columns.iter().enumerate() {
                let member = map.member_of(record.slot, ColumnIndex(column));
                let count = &mut payloads[usize::from(member.0)];
                ordinals.push(*count);
                let stored =
                    (0..record.rows as usize).filter(|&row| record.hash(at, row).is_stored()).count();
                *count = count.checked_add(stored as u32).ok_or(impossible.clone())?;
            }
        }
        let inside = batch.places.iter().zip(&payloads).all(|(&place, &payload)| {
            place == NO_PLACE
                || u64::from(place) + u64::from(header_blocks) + u64::from(payload) <= u64::from(ring_blocks)
        });
        if !inside {
            return Err(impossible);
        }
        Ok(LogBatch { batch, hash, header_blocks, pieces: Vec::new(), starts, ordinals, payloads })
    }

    /// Its manifest.
    #[must_use]
    pub(super) fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Its identity.
    #[must_use]
    pub(super) fn hash(&self) -> BatchHash {
        self.hash
    }

    /// Place of a member's piece: its first block in the ring; none when the member had no part in it.
    #[must_use]
    pub(super) fn place(&self, member: MemberIndex) -> Option<u32> {
        Some(self.batch.places[usize::from(member.0)]).filter(|&place| place != NO_PLACE)
    }

    /// Blocks of payload of a member's piece.
    #[must_use]
    pub(super) fn payload_blocks(&self, member: MemberIndex) -> u32 {
        self.payloads[usize::from(member.0)]
    }

    /// The block of the ring behind a member's piece.
    #[must_use]
    pub(super) fn end(&self, member: MemberIndex) -> Option<u32> {
        self.place(member).map(|place| place + self.header_blocks + self.payload_blocks(member))
    }

    /// Where the images of a record's column start in its member's payload; `at` counts in the record's
    /// columns.
    #[must_use]
    pub(super) fn ordinal(&self, record: usize, at: usize) -> u32 {
        self.ordinals[self.starts[record] as usize + at]
    }

    /// The block of the ring with a block of a member's payload.
    #[must_use]
    pub(super) fn image_block(&self, member: MemberIndex, ordinal: u32) -> Option<u32> {
        self.place(member).map(|place| place + self.header_blocks + ordinal)
    }

    /// The hashes of a member's payload, block by block.
    #[must_use]
    pub(super) fn payload_hashes(&self, map: &Map, member: MemberIndex) -> Vec<BlockHash> {
        let mut hashes = Vec::with_capacity(self.payload_blocks(member) as usize);
        for record in &self.batch.records {
            let LogRecord::InPlace(record) = record else { continue };
            let column = map.column_of(record.slot, member).0;
            if let Ok(at) = record.columns.binary_search(&column) {
                let all = (0..record.rows as usize).map(|row| record.hash(at, row));
                hashes.extend(all.filter(|hash| hash.is_stored()));
            }
        }
        hashes
    }

    /// The piece that a member holds of it, if any was found.
    #[must_use]
    pub(super) fn piece(&self, member: MemberIndex) -> Option<&Piece> {
        self.pieces.iter().find(|piece| piece.member == member)
    }

    /// Takes the piece that was found on a member, in place of an earlier one.
    pub(super) fn set_piece(&mut self, piece: Piece) {
        match self.pieces.iter_mut().find(|known| known.member == piece.member) {
            Some(known) => *known = piece,
            None => self.pieces.push(piece),
        }
    }

    fn mend(&mut self, member: MemberIndex, ordinal: u32) {
        if let Some(piece) = self.pieces.iter_mut().find(|piece| piece.member == member) {
            piece.good.set(ordinal);
        }
    }

    /// Whether a member holds this image.
    #[must_use]
    pub(super) fn holds(&self, member: MemberIndex, ordinal: u32) -> bool {
        self.piece(member).is_some_and(|piece| piece.good.get(ordinal))
    }
}

/// Whether a record can be in a log of an array of this shape.
fn possible(record: &LogRecord, map: &Map) -> bool {
    // Checks again what the format itself ensures, because the code below relies on it.
    let rows = map.chunk / ROW_BYTES as usize;
    let slot = |slot: SlotIndex| slot.0 < map.slots;
    // There are never more stripes than slots.
    let stripe = |stripe: StripeIndex| stripe.0 < map.slots;
    match record {
        LogRecord::Discard { stripe: of, slot: at } => stripe(*of) && slot(*at),
        LogRecord::Fresh(record) => {
            let whole = record.hashes.len() == rows * map.width();
            stripe(record.stripe) && slot(record.slot) && slot(record.old_slot) && whole
        }
        LogRecord::InPlace(record) => {
            let ascending = record.columns.is_sorted_by(|a, b| a < b);
            let columns = record.columns.last().is_some_and(|&last| usize::from(last) < map.width());
            let height =
                (record.row as usize).checked_add(record.rows as usize).is_some_and(|end| end <= rows);
            let hashes = record.columns.len().checked_mul(record.rows as usize) == Some(record.hashes.len());
            stripe(record.stripe)
                && slot(record.slot)
                && ascending
                && columns
                && height
                && record.rows > 0
                && hashes
        }
    }
}

/// The batches that count, in order.
///
/// Replay starts at the highest tail of any usable member: below it everything is in place. But a member that
/// was rolled back, or did not get the newest tail, shows a lower one. It redoes by itself what batches
/// between its own tail and the highest one wrote on it (T6, own redo). So the chain starts at the lowest
/// tail, and names for each member where its own part starts.
#[derive(Debug)]
pub(super) struct Chain {
    /// Sequence of the first batch: the lowest tail of any usable member.
    tail: u64,
    /// Place of the first batch at the highest tail. Batches from there on are replayed on all members.
    top: u32,
    /// For each member, by index, the place of the first batch that may not be in place on it: at most `top`.
    floors: Vec<u32>,
    /// How many batches, from the first on, some note covers.
    noted: u32,
    /// For each member, by index, how many a note in its own log covers: it had flushed them when it got the
    /// note.
    own_noted: Vec<u32>,
    /// The batches of sequences `tail`, `tail + 1`, ...
    batches: Vec<LogBatch>,
    /// By epoch: batches below this sequence are covered by a note that was written in it.
    notes: HashMap<u64, u64>,
    /// Batches of the sequence before the tail that were found: they show where the first batch was written.
    before: Vec<LogBatch>,
    /// Blocks of the rings that could not be read.
    unread: UnreadBlocks,
}

impl Chain {
    /// A chain of no batches, the next of which is `sequence`, in an array of `width` members.
    #[must_use]
    pub(super) fn empty(sequence: u64, width: usize) -> Chain {
        Chain {
            tail: sequence,
            top: 0,
            floors: vec![0; width],
            noted: 0,
            own_noted: vec![0; width],
            batches: Vec::new(),
            notes: HashMap::new(),
            before: Vec::new(),
            unread: UnreadBlocks::default(),
        }
    }

    /// A chain of these batches from sequence 0 on; a note in every member's log covers `noted` of them.
    #[cfg(test)]
    pub(super) fn of(batches: Vec<LogBatch>, noted: u32, width: usize) -> Chain {
        let notes = HashMap::from([(1, noted.into())]);
        Chain { noted, own_noted: vec![noted; width], batches, notes, ..Chain::empty(0, width) }
    }

    /// Its batches: those of sequences `sequence(0)`, `sequence(1)`, ...
    #[must_use]
    pub(super) fn batches(&self) -> &[LogBatch] {
        &self.batches
    }

    /// One of them.
    #[must_use]
    pub(super) fn batch(&self, batch: u32) -> &LogBatch {
        &self.batches[batch as usize]
    }

    /// The sequence of a batch, or of the one behind the last.
    #[must_use]
    pub(super) fn sequence(&self, batch: u32) -> u64 {
        self.tail + u64::from(batch)
    }

    /// The first batch at the highest tail. Batches from there on are replayed on all members.
    #[must_use]
    pub(super) fn top(&self) -> u32 {
        self.top
    }

    /// How many batches, from the first on, some note covers.
    #[must_use]
    pub(super) fn noted(&self) -> u32 {
        self.noted
    }

    /// Blocks of the rings that could not be read.
    #[must_use]
    pub(super) fn unread(&self) -> &UnreadBlocks {
        &self.unread
    }

    pub(super) fn unread_mut(&mut self) -> &mut UnreadBlocks {
        &mut self.unread
    }

    /// Takes the piece that a member holds of the batch of this sequence and identity.
    pub(super) fn set_piece(&mut self, sequence: u64, batch: &BatchHash, piece: Piece) {
        let known = &mut self.batches[(sequence - self.tail) as usize];
        debug_assert_eq!(known.hash, *batch);
        known.set_piece(piece);
    }

    /// Records that an image of a batch was written again: it verifies now.
    pub(super) fn mend(&mut self, batch: u32, member: MemberIndex, ordinal: u32) {
        self.batches[batch as usize].mend(member, ordinal);
    }

    /// Whether everything that a batch wrote is in place on a member.
    #[must_use]
    pub(super) fn is_in_place(&self, member: MemberIndex, batch: u32) -> bool {
        batch < self.floors[usize::from(member.0)]
    }

    /// Whether a batch is in place on others and a member redoes it by itself.
    #[must_use]
    pub(super) fn is_own(&self, member: MemberIndex, batch: u32) -> bool {
        batch < self.top && !self.is_in_place(member, batch)
    }

    /// Whether a batch's data in place, written before it was issued, is known to be durable on a member.
    #[must_use]
    pub(super) fn is_flushed(&self, member: MemberIndex, batch: u32) -> bool {
        batch < self.own_noted[usize::from(member.0)] && !self.is_own(member, batch)
    }

    /// Blocks of the log that `members` must hold and that are missing or bad. A note promises that every
    /// member with a part in a batch holds all of it. Batches of an epoch before that of their note are left
    /// out: batches that a replay noted need only be complete enough to be replayed again.
    #[must_use]
    pub(super) fn faults(&self, members: MemberSet) -> Vec<(MemberIndex, u64)> {
        let noted = |batch: &&LogBatch| {
            self.notes.get(&batch.batch.epoch.id).is_some_and(|&noted| batch.batch.sequence < noted)
        };
        let mut faults = Vec::new();
        for member in members.iter() {
            let bad = |batch: &LogBatch| {
                let header = batch.piece(member).is_some_and(|piece| piece.header);
                let payload =
                    (0..batch.payload_blocks(member)).filter(|&at| !batch.holds(member, at)).count();
                u64::from(!header) + payload as u64
            };
            let floor = self.floors[usize::from(member.0)] as usize;
            let held = self.batches.iter().skip(floor);
            let concerned = held.filter(noted).filter(|batch| batch.place(member).is_some());
            let count: u64 = concerned.map(bad).sum();
            faults.extend((count > 0).then_some((member, count)));
        }
        faults
    }

    /// Whether a batch behind the last one may be hidden (R5). It is not if one of the members, read without
    /// an error where it would start, lacks it: a durable batch is on every member that was live. Members
    /// that are `behind` in their epoch, or had no part in the batch before, do not count, since they may
    /// have missed it. Where more members than the array survives are gone or gave errors, the one that lacks
    /// it may itself be damaged: then it decides only when the errors do not pass.
    #[must_use]
    pub(super) fn hidden_end(&self, members: MemberSet, behind: MemberSet, map: &Map) -> Doubt {
        let may_hold = |member: &MemberIndex| match self.places_of_next(*member) {
            Some(places) => places.into_iter().any(|place| self.unread.hides(*member, place)),
            None => self.unread.is_concerned(*member),
        };
        let unread = members.iter().filter(may_hold).count();
        let lacks_it = |member| self.was_there(member, behind) && !may_hold(&member);
        let lack_it = members.iter().any(lacks_it);
        match Doubt::of(unread, map.width() - members.len(), map.m) {
            Doubt::Beyond if lack_it => Doubt::Denied,
            _ if lack_it => Doubt::None,
            doubt => doubt,
        }
    }

    /// Whether a batch of the chain cannot have been durable: a member that had a part in it was read without
    /// an error and lacks some of its piece. Only a batch of the epoch before this one is judged so: in a
    /// later one a member that had failed may have come back without it.
    #[must_use]
    pub(super) fn was_never_durable(
        &self,
        batch: u32,
        members: MemberSet,
        behind: MemberSet,
        epoch: EpochStamp,
    ) -> bool {
        let batch = &self.batches[batch as usize];
        let lacks_some = |member: MemberIndex| {
            let Some(place) = batch.place(member) else { return false };
            let readable = |block: u32| !self.unread.contains(member, block);
            let header = batch.piece(member).is_some_and(|piece| piece.header)
                || !(place..place + batch.header_blocks).all(readable);
            let payload = (0..batch.payload_blocks(member)).all(|ordinal| {
                let block = batch.image_block(member, ordinal);
                batch.holds(member, ordinal) || !block.is_some_and(readable)
            });
            !(header && payload)
        };
        batch.batch.epoch.number + 1 >= epoch.number
            && members.iter().any(|member| !behind.contains(member) && lacks_some(member))
    }

    /// Whether a member was live when the end of the log was written, as far as is known.
    fn was_there(&self, member: MemberIndex, behind: MemberSet) -> bool {
        let last = self.batches.last().or(self.before.first());
        !behind.contains(member) && last.is_none_or(|batch| batch.place(member).is_some())
    }

    /// Where the batch behind the last one may start on a member: behind the last one, or where the ring
    /// begins, if it did not fit there, or if this log began with an empty ring. None where that is not
    /// known.
    fn places_of_next(&self, member: MemberIndex) -> Option<Vec<u32>> {
        let last: Vec<&LogBatch> = match self.batches.last() {
            Some(last) => vec![last],
            None => self.before.iter().collect(),
        };
        if last.is_empty() && self.tail > 0 {
            return None;
        }
        let ends: Option<Vec<u32>> = last.iter().map(|batch| batch.end(member)).collect();
        Some(ends?.into_iter().chain([0]).collect())
    }
}

/// Everything that was found, before it is decided which batches count.
#[derive(Debug)]
pub(super) struct Finds {
    start: LogStart,
    /// Members whose rings are read.
    members: MemberSet,
    batches: HashMap<BatchHash, LogBatch>,
    /// Marks in each member's own pieces, by index.
    shown: Vec<Shown>,
    /// The lowest tail that any member has shown so far.
    lowest: u64,
    /// The highest note seen.
    noted: u64,
    /// The highest note seen of each epoch.
    notes: HashMap<u64, u64>,
    /// Members that hold only the parent of an epoch, and that epoch. All members of its live set had it
    /// before a batch was written in it (E3).
    behind: (EpochStamp, MemberSet),
    /// Whether a batch of that epoch was found.
    has_batch_of_epoch: bool,
    /// Sequences of batches that verify and are not possible.
    impossible: Vec<u64>,
    /// Number of batches at which those below the tail are dropped next.
    prune_at: usize,
    /// Batches of the sequence before the tail.
    before: Vec<LogBatch>,
    /// Blocks that could not be read.
    unread: UnreadBlocks,
}

/// Marks in the pieces of a member's ring, except for pieces that a replay wrote there.
#[derive(Clone, Copy, Debug)]
struct Shown {
    /// Batches below are in place on it.
    tail: u64,
    /// Batches below were durable on it.
    noted: u64,
}

/// Why the log is not replayed with these members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ChainFault {
    /// The log cannot be replayed at all.
    Error(RecoveryError),
    /// The log cannot be replayed with these members (T6).
    RolledBack(Vec<(MemberIndex, RolledBack)>),
}

/// How the rings show that a member was rolled back (T6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RolledBack {
    /// Space of batches that are not in place on it was used again, which is done only once they are.
    #[error(
        "it was rolled back to an older state of itself: the others have used the space of its log again from batch {tail} on, up \
         to {top}"
    )]
    ReusedSpace {
        /// The tail that it shows.
        tail: u64,
        /// The highest tail.
        top: u64,
    },
    /// Batches were written in an epoch that it does not hold, and it had to hold it first.
    #[error(
        "it was rolled back to an older state of itself: it lacks epoch {epoch}, and batches were written in that one, which all \
         of its members had before"
    )]
    MissedEpoch {
        /// The number of the epoch.
        epoch: u64,
    },
}

impl From<RecoveryError> for ChainFault {
    fn from(error: RecoveryError) -> ChainFault {
        ChainFault::Error(error)
    }
}

/// Fewest batches among which those below the tail are looked for: doing so for each new one would be
/// quadratic.
const PRUNE_BATCHES_MIN: usize = 1024;

impl Finds {
    /// Nothing found yet in the rings of `members`, of an array of `width`; `start` is where the
    /// log starts (R2), and batches below `durable` were durable.
    #[must_use]
    pub(super) fn new(start: LogStart, members: MemberSet, width: usize, durable: u64) -> Finds {
        Finds {
            start,
            members,
            batches: HashMap::new(),
            shown: vec![Shown { tail: start.sequence, noted: start.sequence }; width],
            lowest: start.sequence,
            noted: start.sequence.max(durable),
            notes: HashMap::new(),
            behind: (EpochStamp::default(), MemberSet::default()),
            has_batch_of_epoch: false,
            impossible: Vec::new(),
            prune_at: PRUNE_BATCHES_MIN,
            before: Vec::new(),
            unread: UnreadBlocks::default(),
        }
    }

    /// Sets the members that hold only the parent of an epoch: they are current as long as there is no batch
    /// of it (A1).
    pub(super) fn expect_nothing_of(&mut self, epoch: EpochStamp, behind: MemberSet) {
        self.behind = (epoch, behind);
    }

    /// Takes a header that verifies, in a member's ring. Returns the batch it belongs to unless it is void:
    /// of an epoch older than the log start's, or in place on all.
    pub(super) fn add(
        &mut self,
        member: MemberIndex,
        header: SegmentHeader,
        map: &Map,
        ring_blocks: u32,
    ) -> Option<&LogBatch> {
        let (hash, sequence) = (header.hash, header.batch.sequence);
        self.has_batch_of_epoch |= header.batch.epoch == self.behind.0;
        if header.batch.epoch.number < self.start.epoch {
            if sequence + 1 == self.start.sequence {
                self.add_before(header, map, ring_blocks);
            }
            return None;
        }
        // The tail and the note in a header are true whatever happens to its batch. They count for the member
        // itself only if it got the header while it served.
        if !header.rewritten || is_off(Mutation::RewrittenTailBelieved) {
            let shown = &mut self.shown[usize::from(member.0)];
            shown.noted = shown.noted.max(header.batch.durable_upto);
            if header.batch.tail > shown.tail {
                shown.tail = header.batch.tail;
                self.lowest = self.tails().min().unwrap_or(self.lowest);
            }
        }
        self.noted = self.noted.max(header.batch.durable_upto);
        let note = self.notes.entry(header.batch.epoch.id).or_default();
        *note = header.batch.durable_upto.max(*note);
        if sequence < self.lowest {
            if sequence + 1 == self.lowest {
                self.add_before(header, map, ring_blocks);
            }
            return None;
        }
        if !self.batches.contains_key(&hash) {
            if self.batches.len() >= self.prune_at {
                self.prune();
            }
            match LogBatch::new(header, map, ring_blocks) {
                Ok(batch) => drop(self.batches.insert(hash, batch)),
                Err(_) => self.impossible.push(sequence),
            }
        }
        self.batches.get(&hash)
    }

    /// Takes a batch just below the tail: the next batch begins where it ends, whatever its epoch.
    fn add_before(&mut self, header: SegmentHeader, map: &Map, ring_blocks: u32) {
        if self.before.iter().all(|known| known.hash != header.hash) {
            self.before.extend(LogBatch::new(header, map, ring_blocks));
        }
    }

    /// Whether all of the rings could be read.
    pub(super) fn has_read_all(&self) -> bool {
        self.unread.is_empty()
    }

    pub(super) fn unread_mut(&mut self) -> &mut UnreadBlocks {
        &mut self.unread
    }

    fn tails(&self) -> impl Iterator<Item = u64> + '_ {
        self.members.iter().map(|member| self.shown[usize::from(member.0)].tail)
    }

    /// Takes the piece that a member holds of a batch. Does nothing when the batch has proved to be void
    /// meanwhile.
    pub(super) fn set_piece(&mut self, batch: &BatchHash, piece: Piece) {
        if let Some(batch) = self.batches.get_mut(batch) {
            batch.set_piece(piece);
        }
    }

    fn prune(&mut self) {
        let lowest = self.lowest;
        let void = self.batches.extract_if(|_, batch| batch.batch.sequence < lowest).map(|(_, batch)| batch);
        self.before.extend(void);
        self.before.retain(|batch| batch.batch.sequence + 1 == lowest);
        self.prune_at = PRUNE_BATCHES_MIN.max(2 * self.batches.len());
    }

    /// The chain (R3): from the highest tail on, each batch naming the one before, and back from there to the
    /// lowest. Of several candidates for a sequence the one of the highest epoch counts: only a recovery
    /// makes a second one, in a newer epoch, and that recovery had decided.
    ///
    /// # Errors
    /// When a noted batch cannot be found, unless `force`, or one is not possible; or when members were
    /// rolled back.
    pub(super) fn chain(&mut self, force: bool) -> Result<Chain, ChainFault> {
        let (epoch, behind) = self.behind;
        if self.has_batch_of_epoch && !behind.is_empty() && !is_off(Mutation::WritesInEpochPassedOver) {
            let why = RolledBack::MissedEpoch { epoch: epoch.number };
            return Err(ChainFault::RolledBack(behind.iter().map(|member| (member, why)).collect()));
        }
        let top = self.tails().max().unwrap_or(self.start.sequence);
        if is_off(Mutation::NoOwnRedo) {
            self.shown.iter_mut().for_each(|shown| shown.tail = top);
            self.lowest = top;
        }
        self.prune();
        let mut by_sequence: HashMap<u64, Vec<LogBatch>> = HashMap::new();
        for (_, batch) in self.batches.drain() {
            by_sequence.entry(batch.batch.sequence).or_default().push(batch);
        }
        let mut pick = |sequence: u64, fits: &dyn Fn(&LogBatch) -> bool| {
            let fitting = by_sequence.remove(&sequence)?.into_iter().filter(|c| fits(c));
            // The rest of the key only makes the choice reproducible.
            fitting.max_by_key(|c| (c.batch.epoch.number, c.pieces.len(), c.hash.0))
        };
        let mut batches: VecDeque<LogBatch> = VecDeque::new();
        let mut next = top;
        while let Some(best) = {
            let previous = batches.back().map(|batch| batch.hash);
            pick(next, &|c| previous.is_none_or(|p| c.batch.previous == p))
        } {
            batches.push_back(best);
            next += 1;
        }
        let mut first = top;
        while first > self.lowest
            && let Some(best) = {
                let expected = batches.front().map(|batch| batch.batch.previous);
                pick(first - 1, &|c| expected.is_none_or(|hash| c.hash == hash))
            }
        {
            batches.push_front(best);
            first -= 1;
        }
        for end in [next, first.saturating_sub(1)] {
            if self.impossible.contains(&end) {
                return Err(RecoveryError::Impossible { sequence: end }.into());
            }
        }
        // T6, reused space: some member holds the batches between another's tail and the highest one as long
        // as their space is not used again, and that waits until the tail is durable on all live members
        // (W4).
        let tail_of = |member: MemberIndex| (member, self.shown[usize::from(member.0)].tail);
        let rolled_back: Vec<_> =
            self.members.iter().map(tail_of).filter(|(_, tail)| *tail < first).collect();
        if !rolled_back.is_empty() && !is_off(Mutation::NoReusedSpace) {
            let why = |(member, tail)| (member, RolledBack::ReusedSpace { tail, top });
            return Err(ChainFault::RolledBack(rolled_back.into_iter().map(why).collect()));
        }
        let unchecked = is_off(Mutation::NoteNotChecked);
        if next < self.noted && !force && !unchecked {
            return Err(RecoveryError::LogBroken { sequence: next, noted: self.noted }.into());
        }
        // A ring has fewer than 2^32 blocks, so there are no more batches either.
        let place = |sequence: u64| (sequence.clamp(first, next) - first) as u32;
        let noted = if unchecked { 0 } else { self.noted };
        Ok(Chain {
            tail: first,
            top: place(top),
            floors: self.shown.iter().map(|shown| place(shown.tail.min(top))).collect(),
            noted: place(noted.max(top)),
            own_noted: self.shown.iter().map(|shown| place(shown.noted)).collect(),
            batches: batches.into(),
            notes: std::mem::take(&mut self.notes),
            before: std::mem::take(&mut self.before),
            unread: std::mem::take(&mut self.unread),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::recovery::tests::parts::{RING, batch, chain, fresh, hash, header, in_place, map};

    fn find(start: LogStart, batches: &[Batch]) -> Finds {
        let mut finds = Finds::new(start, MemberSet::first(1), 3, 0);
        for batch in batches {
            if finds.add(MemberIndex(0), header(batch), &map(2, 1, 1), RING).is_some() {
                let piece = Piece { member: MemberIndex(0), header: true, good: Bits::default() };
                finds.set_piece(&header(batch).hash, piece);
            }
        }
        finds
    }

    /// Batches from `sequence` on, in these epochs, each naming the one before.
    fn line(sequence: u64, epochs: &[u64], mut previous: BatchHash) -> Vec<Batch> {
        let mut all = Vec::new();
        for (at, &epoch) in epochs.iter().enumerate() {
            all.push(batch(
                sequence + at as u64,
                epoch,
                previous,
                vec![in_place(0, 0, 1, &[0, 2], epoch)],
                3,
            ));
            previous = header(&all[at]).hash;
        }
        all
    }

    fn sequences(chain: &Chain) -> Vec<(u64, u64)> {
        chain.batches.iter().map(|entry| (entry.batch.sequence, entry.batch.epoch.number)).collect()
    }

    const START: LogStart = LogStart { sequence: 5, epoch: 2 };

    #[test]
    fn the_chain_runs_over_epochs_and_ends_at_a_gap() {
        let mut batches = line(5, &[2, 2, 3, 3, 3], BatchHash::default());
        let whole = find(START, &batches).chain(false).unwrap();
        assert_eq!(sequences(&whole), [(5, 2), (6, 2), (7, 3), (8, 3), (9, 3)]);
        batches.remove(2);
        assert_eq!(sequences(&find(START, &batches).chain(false).unwrap()), [(5, 2), (6, 2)]);
    }

    #[test]
    fn a_batch_that_names_another_one_before_it_does_not_count() {
        let mut batches = line(5, &[2, 2], BatchHash::default());
        batches.extend(line(7, &[2], BatchHash([9; 32])));
        assert_eq!(sequences(&find(START, &batches).chain(false).unwrap()), [(5, 2), (6, 2)]);
    }

    #[test]
    fn of_two_batches_of_one_sequence_that_of_the_later_epoch_counts_with_its_followers() {
        let old = line(5, &[2, 2, 2], BatchHash::default());
        let new = line(6, &[4, 4], header(&old[0]).hash);
        for order in [[old.clone(), new.clone()], [new, old]] {
            let chain = find(START, &order.concat()).chain(false).unwrap();
            assert_eq!(sequences(&chain), [(5, 2), (6, 4), (7, 4)]);
        }
    }

    #[test]
    fn pieces_of_epochs_before_the_log_start_and_below_the_tail_are_void() {
        let mut old = line(5, &[1, 1], BatchHash::default());
        old[1].durable_upto = 9;
        let chain = find(START, &old).chain(false).unwrap();
        assert_eq!((sequences(&chain), chain.noted), (vec![], 0));

        let mut batches = line(5, &[2, 2, 2], BatchHash::default());
        batches[2].tail = 7;
        let chain = find(START, &batches).chain(false).unwrap();
        assert_eq!((sequences(&chain), chain.tail), (vec![(7, 2)], 7));
    }

    #[test]
    fn a_noted_batch_that_no_member_has_refuses_the_start_unless_forced() {
        let mut batches = line(5, &[2, 2], BatchHash::default());
        batches[1].durable_upto = 7;
        assert_eq!(find(START, &batches).chain(false).unwrap().noted, 2);
        batches[1].durable_upto = 8;
        let broken = RecoveryError::LogBroken { sequence: 7, noted: 8 };
        assert_eq!(find(START, &batches).chain(false).unwrap_err(), broken.into());
        assert_eq!(find(START, &batches).chain(true).unwrap().noted, 2);
    }

    #[test]
    fn a_batch_that_this_array_cannot_have_written_refuses_the_start() {
        let map = map(2, 1, 1);
        for record in [
            in_place(8, 0, 1, &[0], 1),
            in_place(0, 0, 2, &[0], 1),
            in_place(0, 1, 1, &[0], 1),
            fresh(0, 0, 9, &map, 1),
            fresh(0, 9, 0, &map, 1),
            LogRecord::Discard { stripe: StripeIndex(8), slot: SlotIndex(0) },
        ] {
            let batch = batch(5, 2, BatchHash::default(), vec![record.clone()], 3);
            let impossible = Err(RecoveryError::Impossible { sequence: 5 }.into());
            assert_eq!(find(START, &[batch]).chain(false).map(drop), impossible, "{record:?}");
        }
        let mut outside = batch(5, 2, BatchHash::default(), vec![in_place(0, 0, 1, &[0], 1)], 3);
        outside.places[1] = RING;
        assert!(find(START, &[outside]).chain(false).is_err());
    }

    #[test]
    fn a_piece_that_a_note_promises_and_a_member_does_not_hold_is_its_fault() {
        let map = map(2, 1, 1);
        let record = || vec![in_place(0, 0, 1, &[0, 2], 1)];
        let bad = |batch, member, _| (member == 2 && batch < 2) || (batch == 3 && member == 0);
        let mut chain = chain(&map, 3, vec![record(), record(), record(), record()], bad);
        let all = MemberSet::first(3);
        assert_eq!(chain.faults(all), [(MemberIndex(2), 2)], "the last batch may be torn");
        assert_eq!(chain.faults(MemberSet::first(2)), []);
        // Only a header is missing.
        let piece = Piece { header: false, ..chain.batches[2].piece(MemberIndex(1)).unwrap().clone() };
        chain.batches[2].set_piece(piece);
        assert_eq!(chain.faults(all), [(MemberIndex(1), 1), (MemberIndex(2), 2)]);
        // Batches that a later epoch noted are ones that a replay has found good enough.
        chain.batches.iter_mut().for_each(|batch| batch.batch.epoch.id = 2);
        assert_eq!(chain.faults(all), []);
    }

    #[test]
    fn images_are_where_the_order_of_the_payload_puts_them() {
        let map = map(2, 1, 4);
        let mut records = vec![in_place(0, 1, 2, &[0, 2], 10), in_place(3, 0, 3, &[0, 1, 2], 20)];
        if let LogRecord::InPlace(record) = &mut records[0] {
            record.hashes[0] = BlockHash::UNWRITTEN;
        }
        let chain = chain(&map, 0, vec![records], |_, _, _| false);
        let entry = &chain.batches[0];
        // Slots 0 and 3 have the same rotation: column c is on member c.
        let all = |member| entry.payload_hashes(&map, MemberIndex(member));
        assert_eq!(all(0), [hash(11), hash(20), hash(21), hash(22)], "the unwritten block has no payload");
        assert_eq!(all(1), [hash(23), hash(24), hash(25)]);
        assert_eq!(all(2), [hash(12), hash(13), hash(26), hash(27), hash(28)]);
        assert_eq!((entry.ordinal(0, 0), entry.ordinal(0, 1)), (0, 0));
        assert_eq!((entry.ordinal(1, 0), entry.ordinal(1, 1), entry.ordinal(1, 2)), (1, 0, 2));
    }

    /// A log of two batches on `width` members; blocks of some of them could not be read.
    fn hidden(k: usize, m: usize, gone: u16, unread: &[(u16, u32)]) -> Doubt {
        let map = map(k, m, 1);
        let record = || vec![in_place(0, 0, 1, &[0, k as u16], 1)];
        let mut chain = chain(&map, 0, vec![record(), record()], |_, _, _| false);
        for &(member, block) in unread {
            chain.unread.add(MemberIndex(member), block, RING);
        }
        let mut members = MemberSet::first((k + m) as u16);
        for at in 0..gone {
            members.remove(MemberIndex((k + m) as u16 - 1 - at));
        }
        chain.hidden_end(members, MemberSet::default(), &map)
    }

    fn end(member: u16) -> u32 {
        let map = map(2, 1, 1);
        let record = || vec![in_place(0, 0, 1, &[0, 2], 1)];
        let chain = chain(&map, 0, vec![record(), record()], |_, _, _| false);
        chain.batches[1].end(MemberIndex(member)).unwrap()
    }

    #[test]
    fn a_batch_may_be_hidden_behind_the_last_one_or_where_the_ring_begins() {
        let ends = [end(0), end(1), end(2)];
        assert_eq!(hidden(2, 1, 0, &[]), Doubt::None);
        assert_eq!(hidden(2, 1, 1, &[(0, ends[0]), (1, ends[1])]), Doubt::Beyond);
        assert_eq!(hidden(2, 1, 0, &[(0, 0), (1, ends[1]), (2, 0)]), Doubt::Beyond);
        assert_eq!(hidden(2, 1, 0, &[(0, ends[0] + 9), (1, ends[1] + 9), (2, ends[2] + 9)]), Doubt::None);
    }

    #[test]
    fn a_member_that_lacks_it_shows_that_it_was_not_durable() {
        assert_eq!(hidden(2, 1, 0, &[(0, end(0))]), Doubt::None);
        assert_eq!(hidden(2, 1, 1, &[(0, end(0))]), Doubt::Denied, "the other lacks it");
        assert_eq!(
            hidden(2, 1, 1, &[(0, end(0) + 9), (1, end(1) + 9)]),
            Doubt::None,
            "what the log does not use"
        );
        assert_eq!(
            hidden(2, 1, 1, &[(0, end(0) + 9), (1, end(1))]),
            Doubt::Denied,
            "one of both is read where it would be"
        );
        assert_eq!(hidden(2, 2, 1, &[(0, 0), (1, 0), (2, 0)]), Doubt::Beyond);
        assert_eq!(hidden(1, 2, 1, &[(0, 0)]), Doubt::None);
        assert_eq!(hidden(1, 2, 2, &[(0, 0)]), Doubt::Beyond);
        assert_eq!(hidden(2, 1, 1, &[]), Doubt::None, "a dead member alone never stops a start");
        assert_eq!(hidden(2, 2, 0, &[(0, end(0)), (1, end(1))]), Doubt::None);
    }

    #[test]
    fn a_member_that_is_behind_lacks_it_for_a_reason_of_its_own() {
        let map = map(2, 1, 1);
        let mut chain = chain(&map, 0, vec![vec![in_place(0, 0, 1, &[0, 2], 1)]], |_, _, _| false);
        for member in [0, 1] {
            chain.unread.add(MemberIndex(member), 0, RING);
        }
        let (members, mut behind) = (MemberSet::first(3), MemberSet::default());
        assert_eq!(chain.hidden_end(members, behind, &map), Doubt::Denied);
        behind.insert(MemberIndex(2));
        assert_eq!(chain.hidden_end(members, behind, &map), Doubt::Beyond);
    }

    #[test]
    fn a_batch_was_never_durable_if_a_member_lacks_its_piece_that_can_be_read() {
        let map = map(2, 1, 1);
        let record = || vec![in_place(0, 0, 1, &[0, 1, 2], 1)];
        let batches = || vec![record(), record()];
        let missing = |members: &'static [u16]| {
            move |batch: u32, member: u16, _: u32| batch == 1 && members.contains(&member)
        };
        let (members, nobody) = (MemberSet::first(3), MemberSet::default());
        let epoch = |number| EpochStamp { number, ..EpochStamp::default() };
        let verdict = |chain: &Chain| chain.was_never_durable(1, members, nobody, epoch(2));
        let mut both = chain(&map, 0, batches(), missing(&[0, 1]));
        assert!(verdict(&both));
        for member in [MemberIndex(0), MemberIndex(1)] {
            let block = both.batches[1].image_block(member, 0).unwrap();
            both.unread.add(member, block, RING);
            assert_eq!(verdict(&both), member.0 == 0, "as long as one of them was read");
        }
        let one = chain(&map, 0, batches(), missing(&[0]));
        assert!(verdict(&one));
        assert!(!one.was_never_durable(1, members, nobody, epoch(3)), "it may have come back since");
        let mut behind = MemberSet::default();
        behind.insert(MemberIndex(0));
        assert!(!one.was_never_durable(1, members, behind, epoch(2)));
    }

    #[test]
    fn a_header_whose_rest_cannot_be_read_may_be_that_of_the_next_batch() {
        let map = map(1, 1, 1);
        let mut chain = chain(&map, 0, vec![vec![in_place(0, 0, 1, &[0, 1], 1)]], |_, _, _| false);
        let place = chain.batches[0].end(MemberIndex(0)).unwrap();
        let (members, behind) = (MemberSet::first(1), MemberSet::default());
        chain.unread.add(MemberIndex(0), place + 1, RING);
        assert_eq!(chain.hidden_end(members, behind, &map), Doubt::None);
        chain.unread.add_cut(MemberIndex(0), place, RING);
        assert_eq!(chain.hidden_end(members, behind, &map), Doubt::Beyond);
    }
}
