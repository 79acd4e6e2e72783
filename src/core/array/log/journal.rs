//! The running redo log: sequence numbers, places in the members' rings, and which state each batch has
//! reached. Pure bookkeeping of rules W1, W2 and W4 of the crash-safety design; the I/O is in `redo.rs`.
//!
//! A batch is *written* when every live member has its piece, *durable* when a flush after that succeeded,
//! *noted* when a durable batch says so, and *in place* when the checkpoint that covers it is flushed. Its
//! space is used again when a durable batch carries a tail beyond it.
//!
//! Invariant: each of these marks only grows, in sequence order.

use crate::array::mutation::{Mutation, is_off};
use crate::block_io::Buf;
use crate::format::{
    Batch, BatchHash, EpochStamp, LOG_BLOCK_BYTES, LogKey, LogRecord, Manifest, MemberSet, NO_PLACE,
};
use crate::units::{MemberIndex, SlotIndex, StripeIndex};
use std::collections::VecDeque;
use uuid::Uuid;

/// See the head of this file.
pub(in crate::array) struct Journal {
    site: LogSite,
    rings: Vec<Ring>,
    next: u64,
    previous: BatchHash,
    issued: VecDeque<Issued>,
    marks: Marks,
    slots_waiting: usize,
}

/// What a log is, and never changes.
// Plain data: given to a journal when it is made.
#[derive(Clone, Copy)]
pub(in crate::array) struct LogSite {
    pub key: LogKey,
    pub array: Uuid,
    /// Blocks of every member's ring.
    pub ring_blocks: u32,
}

/// Which batches have reached which state.
struct Marks {
    written: u64,
    /// Batches below were on every live member when clients last got answers.
    told: u64,
    durable: u64,
    noted: u64,
    /// Batches below are in place.
    tail: u64,
    durable_tail: u64,
    /// The marks `durable` and `tail` that the newest batch carries.
    carried: (u64, u64),
    /// Batches from here on are empty.
    filled: u64,
}

/// One member's ring: where the next segment goes, and how many of its blocks are taken.
#[derive(Clone, Copy, Debug, Default)]
struct Ring {
    head: u32,
    used: u32,
}

/// A batch under way or in the log.
struct Issued {
    sequence: u64,
    /// Pieces that are not written yet.
    pending: usize,
    note: u64,
    tail: u64,
    /// Blocks taken of each member's ring, skipped ones included.
    taken: Vec<u32>,
    stripes: Vec<StripeIndex>,
    /// Slots that its fresh records gave up.
    given_up: Vec<SlotIndex>,
}

/// The batch that gathers records until it is issued.
#[derive(Default)]
pub(super) struct OpenBatch {
    records: Vec<LogRecord>,
    /// Per member, in record order: blocks of payload.
    payload: Vec<Vec<Buf>>,
    given_up: Vec<SlotIndex>,
    /// Operations that wait for it, and whether it must be durable for them.
    waiters: Vec<(usize, bool)>,
}

/// One member's piece of a batch: the manifest first, then the payload.
// Plain data: bytes to be written to a member.
pub(super) struct Piece {
    pub member: MemberIndex,
    /// Byte offset in the log region.
    pub offset: u64,
    pub payload: Vec<Buf>,
}

impl Piece {
    /// Bytes of its payload.
    pub(super) fn payload_bytes(&self) -> usize {
        self.payload.iter().map(|buf| buf.len()).sum()
    }
}

/// Most header bytes of one batch: keeps a scan's buffer small.
pub(super) const HEADER_BYTES_MAX: usize = 1 << 20;

impl OpenBatch {
    /// Takes a record. `payload`: the blocks that go to members' logs, of `width` members.
    pub(super) fn join(&mut self, record: LogRecord, payload: Vec<(MemberIndex, Buf)>, width: usize) {
        self.payload.resize_with(width, Vec::new);
        for (member, buf) in payload {
            self.payload[usize::from(member.0)].push(buf);
        }
        self.records.push(record);
    }

    /// Records that one of its records gives up a slot.
    pub(super) fn give_up(&mut self, slot: SlotIndex) {
        self.given_up.push(slot);
    }

    /// Has an operation wait for it; `durable`: until it is durable.
    pub(super) fn wait(&mut self, key: usize, durable: bool) {
        self.waiters.push((key, durable));
    }

    pub(super) fn is_waiting(&self, key: usize) -> bool {
        self.waiters.iter().any(|(waiting, _)| *waiting == key)
    }

    pub(super) fn forget_waiting(&mut self, key: usize) {
        self.waiters.retain(|(waiting, _)| *waiting != key);
    }

    /// Operations that wait for it, and whether it must be durable for them.
    pub(super) fn take_waiters(&mut self) -> Vec<(usize, bool)> {
        std::mem::take(&mut self.waiters)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    pub(super) fn record_count(&self) -> usize {
        self.records.len()
    }

    /// The stripes of its records, in their order.
    pub(super) fn stripes(&self) -> impl Iterator<Item = StripeIndex> + '_ {
        self.records.iter().map(stripe_of)
    }

    /// Whether it has records, none of them with a payload, and no operation waits for it to be durable.
    pub(super) fn is_records_alone(&self) -> bool {
        self.payload.iter().all(Vec::is_empty) && !self.waiters.iter().any(|(_, durable)| *durable)
    }

    fn payload_blocks(&self, member: usize) -> u32 {
        let bufs = self.payload.get(member).map_or(&[][..], |bufs| bufs);
        (bufs.iter().map(|buf| buf.len()).sum::<usize>() / LOG_BLOCK_BYTES) as u32
    }

    /// The most blocks of payload that any member gets.
    pub(super) fn payload_blocks_max(&self) -> u32 {
        (0..self.payload.len()).map(|member| self.payload_blocks(member)).max().unwrap_or(0)
    }

    /// Bytes of hashes that its records carry: nearly all of the header.
    pub(super) fn manifest_bytes(&self) -> usize {
        self.records.iter().map(record_bytes).sum()
    }
}

/// Upper bound of a record's bytes in a header.
pub(in crate::array) fn record_bytes(record: &LogRecord) -> usize {
    64 + match record {
        LogRecord::InPlace(record) => 2 * record.columns.len() + 16 * record.hashes.len(),
        LogRecord::Fresh(record) => 16 * record.hashes.len(),
        LogRecord::Discard { .. } => 0,
    }
}

impl Journal {
    /// An empty log of `width` members whose next batch is `next`.
    pub(in crate::array) fn new(site: LogSite, heads: Vec<u32>, next: u64, previous: BatchHash) -> Journal {
        let rings = heads.into_iter().map(|head| Ring { head, used: 0 }).collect();
        Journal {
            site,
            rings,
            next,
            previous,
            issued: VecDeque::new(),
            marks: Marks {
                written: next,
                told: next,
                durable: next,
                noted: next,
                tail: next,
                durable_tail: next,
                carried: (next, next),
                filled: next,
            },
            slots_waiting: 0,
        }
    }

    /// Sequence of the next batch.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Batches below are on every live member.
    pub(super) fn written(&self) -> u64 {
        self.marks.written
    }

    /// Batches below were written when clients last got answers.
    pub(super) fn acknowledged(&self) -> u64 {
        self.marks.told.min(self.marks.filled)
    }

    /// Clients get answers for everything that is on every live member.
    pub(super) fn tell_written(&mut self) {
        self.marks.told = self.marks.written;
    }

    /// Batches below are durable.
    pub(super) fn durable(&self) -> u64 {
        self.marks.durable
    }

    /// Batches below are in place and flushed on all live members.
    pub(super) fn tail(&self) -> u64 {
        self.marks.tail
    }

    /// Batches below are durable, and a durable batch says so.
    pub(super) fn noted(&self) -> u64 {
        self.marks.noted
    }

    /// Whether an empty batch would carry a new note or tail.
    pub(super) fn has_news(&self) -> bool {
        self.marks.carried != (self.marks.durable, self.marks.tail)
    }

    /// Batches below are noted once the newest batch is durable.
    pub(super) fn carried_note(&self) -> u64 {
        self.marks.carried.0
    }

    /// Whether space is taken that would be free once the present tail is durable.
    pub(super) fn tail_is_news(&self) -> bool {
        self.marks.durable_tail < self.marks.tail && self.marks.filled > self.marks.durable_tail
    }

    /// Number of batches that are under way.
    pub(super) fn in_flight(&self) -> usize {
        (self.next - self.marks.written) as usize
    }

    /// Blocks taken in the fullest ring. That of a member out of service only empties.
    pub(super) fn used_blocks(&self) -> u32 {
        self.rings.iter().map(|ring| ring.used).max().unwrap_or(0)
    }

    /// The part of the fullest ring that is taken, in 1/256.
    pub(super) fn fullness(&self) -> u32 {
        (u64::from(self.used_blocks()) * 256 / u64::from(self.site.ring_blocks)) as u32
    }

    /// Blocks of every member's ring.
    pub(super) fn ring_blocks(&self) -> u32 {
        self.site.ring_blocks
    }

    /// Logical stripes that batches not yet in place have touched.
    pub(super) fn stripes_not_in_place(&self) -> impl Iterator<Item = StripeIndex> + '_ {
        self.issued
            .iter()
            .filter(|batch| batch.sequence >= self.marks.tail)
            .flat_map(|b| b.stripes.iter().copied())
    }

    /// Makes the next batch. None: some live member's ring lacks room for its piece and `reserve` blocks.
    pub(super) fn issue(
        &mut self,
        epoch: EpochStamp,
        live: &MemberSet,
        open: &OpenBatch,
        reserve: u32,
    ) -> Option<(Manifest, Vec<Piece>)> {
        let width = self.rings.len();
        let mut batch = Batch {
            lane: 0,
            sequence: self.next,
            epoch,
            durable_upto: self.marks.durable,
            tail: self.marks.tail,
            previous: self.previous,
            places: vec![NO_PLACE; width],
            records: open.records.clone(),
        };
        let header_blocks = batch.header_blocks();
        let mut taken = vec![0; width];
        for member in live.iter().map(|member| usize::from(member.0)) {
            let blocks = header_blocks + open.payload_blocks(member);
            let ring = self.rings[member];
            // A piece is never cut by the end of the ring: the blocks left there are skipped.
            let wraps = ring.head + blocks > self.site.ring_blocks;
            let skip = if wraps { self.site.ring_blocks - ring.head } else { 0 };
            if ring.used + skip + blocks + reserve > self.site.ring_blocks {
                return None;
            }
            batch.places[member] = if wraps { 0 } else { ring.head };
            taken[member] = skip + blocks;
        }
        let pieces: Vec<Piece> = live
            .iter()
            .map(|member| {
                let at = usize::from(member.0);
                let place = batch.places[at];
                self.rings[at].head = place + header_blocks + open.payload_blocks(at);
                self.rings[at].used += taken[at];
                Piece {
                    member,
                    offset: u64::from(place) * LOG_BLOCK_BYTES as u64,
                    payload: open.payload.get(at).cloned().unwrap_or_default(),
                }
            })
            .collect();
        let manifest = batch.manifest(&self.site.key, self.site.array);
        self.previous = manifest.hash();
        let mut stripes: Vec<StripeIndex> = open.stripes().collect();
        stripes.dedup();
        self.issued.push_back(Issued {
            sequence: self.next,
            pending: pieces.len(),
            note: self.marks.durable,
            tail: self.marks.tail,
            taken,
            stripes,
            given_up: open.given_up.clone(),
        });
        self.marks.carried = (self.marks.durable, self.marks.tail);
        self.slots_waiting += open.given_up.len();
        self.next += 1;
        if !open.is_empty() {
            self.marks.filled = self.next;
        }
        Some((manifest, pieces))
    }

    /// Counts a piece that is written, or whose member is out of service. Returns whether `written` has
    /// grown.
    pub(super) fn piece_done(&mut self, sequence: u64) -> bool {
        let first = self.issued.front().map_or(self.next, |batch| batch.sequence);
        let place = |sequence: u64| (sequence - first) as usize;
        // A batch is kept until its space is used again, which is after it is written.
        self.issued[place(sequence)].pending -= 1;
        let before = self.marks.written;
        while self.marks.written < self.next && self.issued[place(self.marks.written)].pending == 0 {
            self.marks.written += 1;
        }
        self.marks.written > before
    }

    /// Takes the success of a flush of every live member that began when batches below `upto` were written.
    /// Returns slots that may be used again (W2: their records are noted).
    pub(super) fn flushed(&mut self, upto: u64) -> Vec<SlotIndex> {
        self.marks.durable = self.marks.durable.max(upto);
        // Notes and tails only grow, so the newest durable batch has the highest.
        if let Some(batch) = self.issued.iter().rev().find(|batch| batch.sequence < self.marks.durable) {
            self.marks.noted = self.marks.noted.max(batch.note);
            self.marks.durable_tail = self.marks.durable_tail.max(batch.tail);
        }
        let mut free = Vec::new();
        if self.slots_waiting > 0 {
            let upto = if is_off(Mutation::ReuseBeforeDurable) { self.next } else { self.marks.noted };
            for batch in self.issued.iter_mut().take_while(|batch| batch.sequence < upto) {
                free.append(&mut batch.given_up);
            }
        }
        self.slots_waiting -= free.len();
        let free_below = if is_off(Mutation::OverwriteBeforeTailDurable) {
            self.marks.tail
        } else {
            self.marks.durable_tail
        };
        while self.issued.front().is_some_and(|batch| batch.sequence < free_below) {
            let Some(batch) = self.issued.pop_front() else { break };
            for (ring, blocks) in self.rings.iter_mut().zip(batch.taken) {
                ring.used -= blocks;
            }
        }
        free
    }

    /// How many slots wait for a note to be used again.
    pub(super) fn slots_waiting(&self) -> usize {
        self.slots_waiting
    }

    /// Records that batches below `tail` are in place and flushed.
    pub(super) fn in_place(&mut self, tail: u64) {
        self.marks.tail = self.marks.tail.max(tail);
    }

    /// The tail that members can show: that of the newest batch, or of a superblock whose log starts at
    /// `told`.
    pub(super) fn shown_tail(&self, told: u64) -> u64 {
        self.marks.tail.min(self.marks.carried.1.max(told))
    }

    /// Moves the tail back to the one that members can show. Everything from there on is still in the log.
    pub(super) fn withdraw_tail(&mut self, shown: u64) {
        assert!(
            shown >= self.marks.durable_tail.min(self.marks.tail),
            "the log is kept from the durable tail on"
        );
        self.marks.tail = self.marks.tail.min(shown);
    }

    /// Whether everything in the log is in place, so that a replay would need none of it.
    pub(super) fn is_drained(&self) -> bool {
        self.marks.tail >= self.marks.filled
    }
}

/// The stripe that a record is about.
pub(super) fn stripe_of(record: &LogRecord) -> StripeIndex {
    match record {
        LogRecord::InPlace(record) => record.stripe,
        LogRecord::Fresh(record) => record.stripe,
        LogRecord::Discard { stripe, .. } => *stripe,
    }
}
