//! The state of the rows that the log touches after a prefix of it, and the longest prefix that can be
//! recovered.
//!
//! Pure (rules R4 and R5 of the crash-safety design). Work goes tile by tile: some rows of one slot, so that
//! memory stays bounded however much the log touches. A row is judged for every prefix at once: between two
//! batches that touch its slot nothing changes, so it is good or bad for ranges of prefixes, and the longest
//! prefix in which nothing is bad is found when all ranges are known. Must not know how blocks are read.

use crate::array::geometry::Map;
use crate::array::mutation::{Mutation, is_off};
use crate::array::recovery::chain::{Chain, LogBatch};
use crate::array::recovery::unread::Doubt;
use crate::format::{InPlaceRecord, LogRecord, MapEntry, MemberSet};
use crate::units::{BlockHash, ColumnIndex, MemberIndex, ROW_BYTES, SlotIndex, StripeIndex};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// A record that touches a slot: writes it, or gives it up.
// Plain data: names the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Touch {
    /// The slot.
    pub slot: u64,
    /// Which batch of the chain.
    pub batch: u32,
    /// Which record of it.
    pub record: u32,
}

/// Every touch of a chain, by slot, then in log order.
fn touches(chain: &Chain) -> Vec<Touch> {
    let mut all = Vec::new();
    for (batch, entry) in chain.batches().iter().enumerate() {
        for (record, what) in entry.batch().records.iter().enumerate() {
            let mut add = |slot: SlotIndex| {
                all.push(Touch { slot: slot.0, batch: batch as u32, record: record as u32 });
            };
            match what {
                LogRecord::InPlace(record) => add(record.slot),
                LogRecord::Discard { slot, .. } => add(*slot),
                LogRecord::Fresh(record) => {
                    add(record.slot);
                    if record.old_slot != record.slot {
                        add(record.old_slot);
                    }
                }
            }
        }
    }
    all.sort_unstable();
    all
}

/// The map entries of all stripes that the first `prefix` batches touch, each with the last batch that does;
/// `epoch` goes into the entries.
#[must_use]
pub(super) fn final_map(chain: &Chain, prefix: u32, epoch: u64) -> BTreeMap<StripeIndex, (MapEntry, u32)> {
    let mut map = BTreeMap::new();
    for (batch, entry) in (0..).zip(&chain.batches()[..prefix as usize]) {
        for record in &entry.batch().records {
            let (stripe, slot, holds_data) = match record {
                LogRecord::InPlace(record) => (record.stripe, record.slot, true),
                LogRecord::Fresh(record) => (record.stripe, record.slot, true),
                LogRecord::Discard { stripe, slot } => (*stripe, *slot, false),
            };
            map.insert(stripe, (MapEntry { slot, holds_data, epoch }, batch));
        }
    }
    map
}

/// Some rows of one slot.
// Plain data: rows that are judged, or redone, together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tile {
    /// The slot.
    pub slot: SlotIndex,
    /// Rows of it.
    pub rows: Range<usize>,
    /// Its touches, as a range of all touches.
    pub touches: Range<usize>,
}

/// Where the content of a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cell {
    /// In place, as before the log; its hash is in the checksum pages.
    Untouched,
    /// In place: the batch of the record that names its hash is in place on this member.
    Placed(BlockHash),
    /// In place, written before the record of this batch that names its hash.
    Fresh {
        /// Its hash.
        hash: BlockHash,
        /// The batch.
        batch: u32,
    },
    /// In the log.
    Image {
        /// Its hash.
        hash: BlockHash,
        /// The batch.
        batch: u32,
        /// Which block of the member's payload.
        ordinal: u32,
    },
    /// Nowhere: unwritten or lost, it counts as zeroes.
    Zero(BlockHash),
}

impl Cell {
    /// The hash that the log gives the block; none when the log does not name it.
    #[must_use]
    pub(super) fn logged_hash(self) -> Option<BlockHash> {
        match self {
            Cell::Untouched => None,
            Cell::Placed(hash) | Cell::Fresh { hash, .. } | Cell::Image { hash, .. } | Cell::Zero(hash) => {
                Some(hash)
            }
        }
    }
}

/// The rows of a tile at some prefix.
#[derive(Clone, Debug)]
pub(super) struct TileState {
    /// Whether the slot holds data of a stripe.
    live: bool,
    rows: Range<usize>,
    width: usize,
    cells: Vec<Cell>,
    touched: Vec<bool>,
    /// Cells whose hash a record from the highest tail on has set: their entries in the pages may be older.
    is_news: Vec<bool>,
}

impl TileState {
    fn new(tile: &Tile, width: usize) -> TileState {
        let rows = tile.rows.len();
        TileState {
            live: false,
            rows: tile.rows.clone(),
            width,
            cells: vec![Cell::Untouched; rows * width],
            touched: vec![false; rows],
            is_news: vec![false; rows * width],
        }
    }

    /// Whether the slot holds data of a stripe.
    #[must_use]
    pub(super) fn is_live(&self) -> bool {
        self.live
    }

    /// Whether the hash of a block in the pages may be older than that in the log.
    #[must_use]
    pub(super) fn is_news(&self, row: usize, column: usize) -> bool {
        self.is_news[(row - self.rows.start) * self.width + column]
    }

    /// A block's source; `row` counts from the chunk's start.
    #[must_use]
    pub(super) fn cell(&self, row: usize, column: usize) -> Cell {
        self.cells[(row - self.rows.start) * self.width + column]
    }

    /// The rows that the log touches.
    pub(super) fn touched_rows(&self) -> impl Iterator<Item = usize> + '_ {
        self.rows.clone().filter(|row| self.touched[row - self.rows.start])
    }

    fn set(&mut self, row: usize, column: usize, cell: Cell, is_news: bool) {
        let at = (row - self.rows.start) * self.width + column;
        (self.cells[at], self.is_news[at]) = (cell, is_news);
        self.touched[row - self.rows.start] = true;
    }

    fn apply(&mut self, judge: &Judge, tile: &Tile, touch: Touch) {
        let entry = judge.entry(touch);
        let is_news = touch.batch >= judge.chain.top();
        match &entry.batch().records[touch.record as usize] {
            LogRecord::Discard { .. } => self.live = false,
            LogRecord::Fresh(record) if record.slot != tile.slot => self.live = false,
            LogRecord::Fresh(record) => {
                self.live = true;
                let height = record.hashes.len() / self.width;
                for row in self.rows.clone() {
                    for column in 0..self.width {
                        let hash = record.hashes[column * height + row];
                        let fresh = Cell::Fresh { hash, batch: touch.batch };
                        let image = matches!(self.cell(row, column), Cell::Image { .. });
                        if image && is_off(Mutation::FreshDoesNotVoid) {
                            continue;
                        }
                        let cell = if hash.is_stored() { fresh } else { Cell::Zero(hash) };
                        self.set(row, column, cell, is_news);
                    }
                }
            }
            LogRecord::InPlace(record) => self.apply_in_place(judge, tile, touch, record),
        }
    }

    fn apply_in_place(&mut self, judge: &Judge, tile: &Tile, touch: Touch, record: &InPlaceRecord) {
        let is_news = touch.batch >= judge.chain.top();
        if record.first {
            for row in self.rows.clone() {
                for column in 0..self.width {
                    self.set(row, column, Cell::Zero(BlockHash::UNWRITTEN), is_news);
                }
            }
        }
        self.live = true;
        for (at, &column) in record.columns.iter().enumerate() {
            let mut ordinal = judge.entry(touch).ordinal(touch.record as usize, at);
            let is_in_place = judge.chain.is_in_place(judge.member(tile, usize::from(column)), touch.batch);
            for offset in 0..record.rows as usize {
                let hash = record.hash(at, offset);
                let row = record.row as usize + offset;
                if self.rows.contains(&row) {
                    let image = match is_in_place {
                        true => Cell::Placed(hash),
                        false => Cell::Image { hash, batch: touch.batch, ordinal },
                    };
                    let cell = if hash.is_stored() { image } else { Cell::Zero(hash) };
                    self.set(row, usize::from(column), cell, is_news);
                }
                ordinal += u32::from(hash.is_stored());
            }
        }
    }
}

/// Results of reading home blocks: (row, column) to the hash of the block read, none where that gave an
/// error.
pub(super) type Homes = HashMap<(usize, usize), Option<BlockHash>>;

/// What the checksum pages record of an untouched block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Base {
    /// Its hash.
    Hash(BlockHash),
    /// There are no checksum pages: any block that can be read is good.
    Unchecked,
    /// The page is lost: it is not known whether the block is good.
    Unknown,
}

/// The facts that judging needs besides the chain, and the chain.
#[derive(Debug)]
pub(super) struct Judge {
    /// The chain.
    chain: Chain,
    /// All touches of the chain.
    touches: Vec<Touch>,
    /// Where columns are.
    map: Map,
    /// The members that may be read.
    usable: MemberSet,
    /// Members that are not here, and would be current if they were.
    away: MemberSet,
}

/// A range of prefixes in which a row cannot be decoded.
// Plain data: the contribution of a tile to the decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bad {
    /// Lengths of prefix.
    pub prefixes: Range<u32>,
    /// A prefix that ends where the last note does would not lose these blocks.
    pub avoidable: bool,
}

/// How blocks count that could not be read because of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// They are erasures.
    Erased,
    /// They are erasures where, together with members that are gone, they are no more than the array
    /// survives. Elsewhere they may be good.
    Covered,
    /// They may be good.
    Good,
    /// In a row in which a member that is not here had a part they may be good, and so may that member's
    /// blocks; elsewhere they are erasures.
    Present,
}

impl Reading {
    const COUNT: usize = 4;
    const ALL: [Reading; Reading::COUNT] =
        [Reading::Erased, Reading::Covered, Reading::Good, Reading::Present];
}

/// Why a block cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lack {
    /// It was read and is wrong, or its member never had it.
    Wrong,
    /// Reading it gave an error.
    Unread,
    /// Its member is not here, and had a part in it.
    Absent,
}

/// What a tile contributes to the decision.
// Plain data: the result of weighing it.
#[derive(Clone, Debug, Default)]
pub(super) struct Verdict {
    /// Ranges of prefixes that are bad, by [`Reading`].
    pub bad: [Vec<Bad>; Reading::COUNT],
    /// Blocks of usable members, (row, column), that are missing or bad at some prefix.
    pub suspects: Vec<(usize, usize)>,
}

impl Judge {
    /// A judge of the rows that a chain touches.
    #[must_use]
    pub(super) fn new(chain: Chain, map: Map, usable: MemberSet, away: MemberSet) -> Judge {
        let touches = touches(&chain);
        Judge { chain, touches, map, usable, away }
    }

    /// The chain that is judged.
    #[must_use]
    pub(super) fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Records that an image of the chain was written again: it verifies now.
    pub(super) fn mend(&mut self, batch: u32, member: MemberIndex, ordinal: u32) {
        self.chain.mend(batch, member, ordinal);
    }

    /// Whether there are touches from this index on, to be cut into tiles.
    #[must_use]
    pub(super) fn has_touches(&self, from: usize) -> bool {
        from < self.touches.len()
    }

    /// Cuts the rows that the log touches into tiles of at most `rows_max` rows, in the order of slots;
    /// `from` is an index of `touches` at which a slot starts. Returns the tiles of that slot and where the
    /// next one starts.
    #[must_use]
    pub(super) fn tiles(&self, from: usize, rows_max: usize) -> (Vec<Tile>, usize) {
        let Some(first) = self.touches.get(from) else { return (Vec::new(), from) };
        let len = self.touches[from..].iter().take_while(|touch| touch.slot == first.slot).count();
        let touches = from..from + len;
        let chunk_rows = self.map.chunk / ROW_BYTES as usize;
        let mut touched = vec![false; chunk_rows.div_ceil(rows_max)];
        for touch in &self.touches[touches.clone()] {
            match self.record(*touch) {
                LogRecord::InPlace(record) if !record.first => {
                    let (start, end) = (record.row as usize, (record.row + record.rows) as usize);
                    touched[start / rows_max..end.div_ceil(rows_max)].fill(true);
                }
                LogRecord::InPlace(_) => touched.fill(true),
                LogRecord::Fresh(record) if record.slot.0 == first.slot => touched.fill(true),
                LogRecord::Fresh(_) | LogRecord::Discard { .. } => {}
            }
        }
        let tile = |at: usize| Tile {
            slot: SlotIndex(first.slot),
            rows: at * rows_max..((at + 1) * rows_max).min(chunk_rows),
            touches: touches.clone(),
        };
        let tiles = (0..touched.len()).filter(|&at| touched[at]).map(tile).collect();
        (tiles, touches.end)
    }

    /// Whether a slot that holds data may have held none before the chain: its first record in the chain does
    /// not change blocks of existing data.
    #[must_use]
    pub(super) fn begins_in_log(&self, slot: SlotIndex) -> bool {
        let first = self.touches.partition_point(|touch| touch.slot < slot.0);
        let first = self.touches.get(first).filter(|touch| touch.slot == slot.0);
        first.is_some_and(|touch| match self.record(*touch) {
            LogRecord::InPlace(record) => record.first,
            LogRecord::Fresh(_) | LogRecord::Discard { .. } => true,
        })
    }

    /// The rows of a tile after the first `prefix` batches.
    #[must_use]
    pub(super) fn state_at(&self, tile: &Tile, prefix: u32) -> TileState {
        let mut state = TileState::new(tile, self.map.width());
        for touch in self.touches[tile.touches.clone()].iter().take_while(|touch| touch.batch < prefix) {
            state.apply(self, tile, *touch);
        }
        state
    }

    /// Rows in which a usable member's block is not known to be good at some prefix that may be chosen: their
    /// home blocks must be read before the tile can be weighed. Fresh data below the note was durable on all
    /// members before the note was written, and untouched blocks are as good as any block at rest: both are
    /// looked at only where a row must be decoded.
    #[must_use]
    pub(super) fn rows_in_doubt(&self, tile: &Tile) -> Vec<usize> {
        let mut doubtful = vec![false; tile.rows.len()];
        self.walk(tile, |state, _| {
            for row in state.touched_rows().collect::<Vec<_>>() {
                let doubt = &mut doubtful[row - tile.rows.start];
                *doubt =
                    *doubt || (0..self.map.width()).any(|column| self.in_doubt(tile, state, row, column));
            }
        });
        tile.rows.clone().filter(|row| doubtful[row - tile.rows.start]).collect()
    }

    /// Weighs a tile by the home blocks that were read of its doubtful rows. `base` gives the entry of an
    /// untouched block in the pages.
    #[must_use]
    pub(super) fn weigh(
        &self,
        tile: &Tile,
        doubtful: &[usize],
        homes: &Homes,
        base: impl Fn(usize, usize) -> Base,
    ) -> Verdict {
        let mut verdict = Verdict::default();
        let mut suspects = vec![false; tile.rows.len() * self.map.width()];
        // Blocks that are lost at the note already: no prefix that may be chosen could save them.
        let mut lost_at_note: [HashMap<usize, Vec<usize>>; Reading::COUNT] = Default::default();
        self.walk(tile, |state, prefixes| {
            for &row in doubtful.iter().filter(|&&row| state.touched[row - tile.rows.start]) {
                let mut lost: Vec<(usize, Option<bool>)> = Vec::new();
                for column in 0..self.map.width() {
                    let known = self.is_good(tile, state, row, column, homes, &base);
                    if known != Some(true) {
                        lost.push((column, known));
                    }
                    // An image that is in place already is missing in the log all the same.
                    if known == Some(false) || self.in_doubt_image(tile, state, row, column) {
                        suspects[(row - tile.rows.start) * self.map.width() + column] = true;
                    }
                }
                if lost.len() <= self.map.m {
                    continue;
                }
                let gone = lost.iter().filter(|(_, known)| known.is_none()).count();
                let lack = |(column, known): (usize, Option<bool>)| match known {
                    Some(_) if self.is_unread(tile, state, row, column, homes) => (column, Lack::Unread),
                    None if self.had_part(tile, state, row, column) => (column, Lack::Absent),
                    _ => (column, Lack::Wrong),
                };
                let lost: Vec<(usize, Lack)> = lost.into_iter().map(lack).collect();
                let unread = lost.iter().filter(|(_, lack)| *lack == Lack::Unread).count();
                let lacks_absent = lost.iter().any(|(_, lack)| *lack == Lack::Absent);
                let beyond = Doubt::of(unread, gone, self.map.m) == Doubt::Beyond;
                for reading in Reading::ALL {
                    let spares = |lack: Lack| match reading {
                        Reading::Erased => false,
                        Reading::Covered => beyond && lack == Lack::Unread,
                        Reading::Good => lack == Lack::Unread,
                        Reading::Present => lacks_absent && lack != Lack::Wrong,
                    };
                    let lost = lost.iter().filter(|(_, lack)| !spares(*lack)).map(|(column, _)| *column);
                    let lost: Vec<usize> = lost.collect();
                    if lost.len() <= self.map.m {
                        continue;
                    }
                    let lost_at_note = &mut lost_at_note[reading as usize];
                    if prefixes.start == self.chain.noted() {
                        lost_at_note.insert(row, lost.clone());
                    }
                    let before = lost_at_note.get(&row).map_or(&[][..], Vec::as_slice);
                    let avoidable = lost.iter().any(|column| !before.contains(column));
                    verdict.bad[reading as usize].push(Bad { prefixes: prefixes.clone(), avoidable });
                }
            }
        });
        let width = self.map.width();
        let cells = suspects.iter().enumerate().filter(|(_, suspect)| **suspect);
        verdict.suspects = cells.map(|(at, _)| (tile.rows.start + at / width, at % width)).collect();
        verdict
    }

    /// Calls `see` with the tile's live states and the lengths of prefix for which each holds, from the note
    /// on.
    fn walk(&self, tile: &Tile, mut see: impl FnMut(&TileState, Range<u32>)) {
        let mut state = TileState::new(tile, self.map.width());
        let mut groups = self.touches[tile.touches.clone()].chunk_by(|a, b| a.batch == b.batch).peekable();
        let end = self.chain.batches().len() as u32 + 1;
        while let Some(group) = groups.next() {
            for touch in group {
                state.apply(self, tile, *touch);
            }
            let until = groups.peek().map_or(end, |next| next[0].batch + 1);
            let prefixes = (group[0].batch + 1).max(self.chain.noted())..until;
            if state.live && !prefixes.is_empty() {
                see(&state, prefixes);
            }
        }
    }

    /// Whether a usable member lacks the image of this block.
    fn in_doubt_image(&self, tile: &Tile, state: &TileState, row: usize, column: usize) -> bool {
        matches!(state.cell(row, column), Cell::Image { .. }) && self.in_doubt(tile, state, row, column)
    }

    fn in_doubt(&self, tile: &Tile, state: &TileState, row: usize, column: usize) -> bool {
        let member = self.member(tile, column);
        self.usable.contains(member)
            && match state.cell(row, column) {
                Cell::Untouched | Cell::Zero(_) | Cell::Placed(_) => false,
                Cell::Fresh { batch, .. } => !self.chain.is_flushed(member, batch),
                Cell::Image { batch, ordinal, .. } => !self.chain.batch(batch).holds(member, ordinal),
            }
    }

    /// Whether a block can be had; none when its member is not usable.
    fn is_good(
        &self,
        tile: &Tile,
        state: &TileState,
        row: usize,
        column: usize,
        homes: &Homes,
        base: &impl Fn(usize, usize) -> Base,
    ) -> Option<bool> {
        let cell = state.cell(row, column);
        let wanted = cell.logged_hash().map_or_else(|| base(row, column), Base::Hash);
        // A block that counts as zeroes is on no device, so it does not matter whether its member is here.
        if matches!(wanted, Base::Hash(hash) if !hash.is_stored()) {
            return Some(true);
        }
        let member = self.member(tile, column);
        if !self.usable.contains(member) {
            return None;
        }
        let home = homes.get(&(row, column)).copied().flatten();
        let is_in_place = match wanted {
            Base::Hash(hash) => home == Some(hash),
            Base::Unchecked => home.is_some(),
            Base::Unknown => false,
        };
        // A block that is in place already need not be in the log.
        Some(
            is_in_place
                || matches!(cell, Cell::Image { batch, ordinal, .. }
            if self.chain.batch(batch).holds(member, ordinal)),
        )
    }

    /// Whether an error leaves it open whether a block of a usable member, which is not known to be good, is.
    fn is_unread(&self, tile: &Tile, state: &TileState, row: usize, column: usize, homes: &Homes) -> bool {
        let home = homes.get(&(row, column)) == Some(&None);
        home || match state.cell(row, column) {
            Cell::Image { batch, ordinal, .. } => {
                let member = self.member(tile, column);
                let block = self.chain.batch(batch).image_block(member, ordinal);
                block.is_some_and(|block| self.chain.unread().contains(member, block))
            }
            _ => false,
        }
    }

    /// Whether the member of a block is away, and was there when the block was written, by the log. A block
    /// that the log does not write is older: a member with any part in the log has it.
    fn had_part(&self, tile: &Tile, state: &TileState, row: usize, column: usize) -> bool {
        let member = self.member(tile, column);
        let had = |batch: &LogBatch| self.away.contains(member) && batch.place(member).is_some();
        match state.cell(row, column) {
            Cell::Image { batch, .. } | Cell::Fresh { batch, .. } => had(self.chain.batch(batch)),
            Cell::Untouched | Cell::Placed(_) | Cell::Zero(_) => self.chain.batches().iter().any(had),
        }
    }

    /// The member with a column of a tile.
    #[must_use]
    pub(super) fn member(&self, tile: &Tile, column: usize) -> MemberIndex {
        self.map.member_of(tile.slot, ColumnIndex(column as u16))
    }

    fn entry(&self, touch: Touch) -> &LogBatch {
        self.chain.batch(touch.batch)
    }

    fn record(&self, touch: Touch) -> &LogRecord {
        &self.entry(touch).batch().records[touch.record as usize]
    }
}

/// Finds the prefix from the verdicts of all tiles.
#[derive(Debug)]
pub(super) struct Decision {
    noted: u32,
    /// By [`Reading`], for each length of prefix how many more ranges start than end there: any, and
    /// avoidable ones.
    changes: [Vec<(i32, i32)>; Reading::COUNT],
}

impl Decision {
    /// A decision in which nothing is bad yet.
    #[must_use]
    pub(super) fn new(chain: &Chain) -> Decision {
        let changes = vec![(0, 0); chain.batches().len() + 2];
        Decision { noted: chain.noted(), changes: std::array::from_fn(|_| changes.clone()) }
    }

    /// Takes the bad ranges of one tile.
    pub(super) fn add(&mut self, bad: &[Vec<Bad>; Reading::COUNT]) {
        for (bad, changes) in bad.iter().zip(&mut self.changes) {
            for Bad { prefixes, avoidable } in bad {
                for (at, change) in [(prefixes.start, 1), (prefixes.end, -1)] {
                    let entry = &mut changes[at as usize];
                    entry.0 += change;
                    entry.1 += if *avoidable { change } else { 0 };
                }
            }
        }
    }

    /// Whether another prefix would be chosen if blocks that could not be read were good, or whether it would
    /// lose less (R5, T3).
    #[must_use]
    pub(super) fn doubt(&self) -> Doubt {
        let erased = self.longest();
        let differs =
            |reading| self.longest_if(reading) != erased || self.loses_less_if(reading, Reading::Erased);
        match (differs(Reading::Covered), differs(Reading::Good)) {
            _ if is_off(Mutation::UnreadTailDropped) => Doubt::None,
            (true, _) => Doubt::Beyond,
            (_, true) => Doubt::Covered,
            _ => Doubt::None,
        }
    }

    /// Whether rows cannot be decoded that could be if unread blocks were good, on more members than the
    /// array survives.
    #[must_use]
    pub(super) fn loses_unread(&self) -> bool {
        self.loses_less_if(Reading::Covered, Reading::Erased)
    }

    /// Whether rows cannot be decoded that could be with the blocks that members which are not here may have.
    /// Errors of other blocks of such a row make no difference: these may stay unreadable, and the members
    /// would be stale by then.
    #[must_use]
    pub(super) fn loses_absent(&self) -> bool {
        !is_off(Mutation::AbsentTakenForLost) && self.loses_less_if(Reading::Present, Reading::Erased)
    }

    /// Whether, at the prefix that is chosen, fewer rows cannot be decoded by one reading than by another.
    fn loses_less_if(&self, reading: Reading, than: Reading) -> bool {
        let prefix = self.longest() as usize;
        let losses = |reading: Reading| -> i32 {
            self.changes[reading as usize][..=prefix].iter().map(|(any, _)| any).sum()
        };
        losses(reading) < losses(than)
    }

    /// The longest prefix, not below the note, in which every row can be decoded (R5). Where there is none,
    /// rows that the noted batches touch are lost whatever is chosen; then the longest prefix that loses no
    /// others.
    #[must_use]
    pub(super) fn longest(&self) -> u32 {
        self.longest_if(Reading::Erased)
    }

    fn longest_if(&self, reading: Reading) -> u32 {
        let changes = &self.changes[reading as usize];
        let (mut any, mut avoidable) = (0, 0);
        let (mut whole, mut best) = (None, self.noted);
        for (at, change) in changes[..changes.len() - 1].iter().enumerate() {
            any += change.0;
            avoidable += change.1;
            let at = at as u32;
            if at >= self.noted {
                whole = if any == 0 { Some(at) } else { whole };
                if any != 0 && is_off(Mutation::BatchByBatch) {
                    break;
                }
                best = if avoidable == 0 { at } else { best };
            }
        }
        if is_off(Mutation::NoPrefix) {
            return changes.len() as u32 - 2;
        }
        whole.unwrap_or(best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::recovery::tests::parts::{chain, fresh, hash, in_place, map};
    use crate::testing::Random;

    /// All tiles of a judge, of at most `rows_max` rows.
    fn all_tiles(judge: &Judge, rows_max: usize) -> Vec<Tile> {
        let (mut all, mut next) = (Vec::new(), 0);
        while next < judge.touches.len() {
            let (tiles, after) = judge.tiles(next, rows_max);
            all.extend(tiles);
            next = after;
        }
        all
    }

    /// The decision when every home block is what `home` returns.
    fn decide(judge: &Judge, rows_max: usize, home: impl Fn(u64, usize, usize) -> Option<BlockHash>) -> u32 {
        let mut decision = Decision::new(&judge.chain);
        for tile in all_tiles(judge, rows_max) {
            let doubtful = judge.rows_in_doubt(&tile);
            let mut homes = Homes::new();
            for &row in &doubtful {
                for column in 0..judge.map.width() {
                    homes.insert((row, column), home(tile.slot.0, row, column));
                }
            }
            let base = |row, column| Base::Hash(base_hash(tile.slot.0, row, column));
            decision.add(&judge.weigh(&tile, &doubtful, &homes, base).bad);
        }
        decision.longest()
    }

    fn base_hash(slot: u64, row: usize, column: usize) -> BlockHash {
        hash(1 << 30 | slot << 16 | (row << 8) as u64 | column as u64)
    }

    fn untouched(slot: u64, row: usize, column: usize) -> Option<BlockHash> {
        Some(base_hash(slot, row, column))
    }

    fn judge(k: usize, m: usize, noted: u32, batches: Vec<Vec<LogRecord>>, missing: &[(u32, u16)]) -> Judge {
        let map = map(k, m, 1);
        let chain = chain(&map, noted, batches, |batch, member, _| missing.contains(&(batch, member)));
        Judge::new(chain, map, MemberSet::first((k + m) as u16), MemberSet::default())
    }

    #[test]
    fn a_missing_image_that_a_later_one_replaces_is_no_erasure() {
        let batches = || vec![vec![in_place(0, 0, 1, &[0, 2], 1)], vec![in_place(0, 0, 1, &[0, 2], 11)]];
        // If batches counted one by one, the first would end the prefix.
        assert_eq!(decide(&judge(2, 1, 0, batches(), &[(0, 0), (0, 2)]), 1, untouched), 2);
        assert_eq!(decide(&judge(2, 1, 0, batches(), &[(1, 0), (1, 2)]), 1, untouched), 1);
        assert_eq!(decide(&judge(2, 1, 0, batches(), &[(0, 0), (0, 2), (1, 0), (1, 2)]), 1, untouched), 0);
        // Column 0 at the second, column 1 not touched, parity missing: one erasure.
        assert_eq!(decide(&judge(2, 1, 0, batches(), &[(1, 2)]), 1, untouched), 2);
    }

    #[test]
    fn erasures_are_counted_over_the_row_not_over_the_batch() {
        // Each batch lacks one image; together the row has two erasures.
        let batches = vec![vec![in_place(0, 0, 1, &[0, 2], 1)], vec![in_place(0, 0, 1, &[1, 2], 11)]];
        assert_eq!(decide(&judge(2, 1, 0, batches, &[(0, 0), (1, 1)]), 1, untouched), 1);
    }

    #[test]
    fn an_unusable_member_is_an_erasure_too() {
        let batches = || vec![vec![in_place(0, 0, 1, &[0, 2], 1)]];
        let mut judge = judge(2, 1, 0, batches(), &[(0, 2)]);
        judge.usable.remove(MemberIndex(1));
        assert_eq!(decide(&judge, 1, untouched), 0);
        judge.usable.insert(MemberIndex(1));
        assert_eq!(decide(&judge, 1, untouched), 1);
    }

    #[test]
    fn a_block_that_was_never_written_is_had_without_its_member() {
        // Member 1 is away, and the image of column 0 is bad: parity and the zeroes of column 1 give it.
        let mut judge = judge(2, 1, 0, vec![vec![in_place(0, 0, 1, &[0, 2], 1)]], &[(0, 0)]);
        judge.usable.remove(MemberIndex(1));
        let decided = |base: Base| {
            let mut decision = Decision::new(&judge.chain);
            for tile in all_tiles(&judge, 1) {
                let homes = (0..3).map(|column| ((0, column), Some(hash(99)))).collect();
                let base = |_: usize, column: usize| if column == 1 { base } else { Base::Hash(hash(7)) };
                decision.add(&judge.weigh(&tile, &judge.rows_in_doubt(&tile), &homes, base).bad);
            }
            decision.longest()
        };
        assert_eq!(decided(Base::Hash(BlockHash::UNWRITTEN)), 1);
        assert_eq!(decided(Base::Hash(hash(8))), 0);
        assert_eq!(decided(Base::Unchecked), 0);
    }

    #[test]
    fn an_image_that_is_in_place_already_counts() {
        let batches = || vec![vec![in_place(0, 0, 1, &[0, 2], 1)]];
        let judge = judge(2, 1, 0, batches(), &[(0, 0), (0, 2)]);
        let redone =
            |slot, row, column| if column == 0 { Some(hash(1)) } else { untouched(slot, row, column) };
        assert_eq!(decide(&judge, 1, redone), 1);
        // Then the untouched column must be good.
        let rotten = |_, _, column| if column == 0 { Some(hash(1)) } else { None };
        assert_eq!(decide(&judge, 1, rotten), 0);
    }

    #[test]
    fn a_fresh_record_counts_when_k_columns_verify_and_voids_older_images() {
        let map = map(2, 1, 1);
        // The slot had an image that is missing; its stripe moves away and another one comes.
        let batches = || {
            vec![
                vec![in_place(1, 0, 1, &[0, 2], 1)],
                vec![fresh(1, 1, 2, &map, 100)],
                vec![fresh(0, 0, 1, &map, 200)],
            ]
        };
        let judge = judge(2, 1, 0, batches(), &[(0, 0), (0, 2)]);
        let written = |good: &'static [(u64, usize)]| {
            move |slot, _, column| {
                let value = if slot == 2 { 100 } else { 200 };
                good.contains(&(slot, column)).then(|| hash(value + column as u64))
            }
        };
        assert_eq!(decide(&judge, 1, written(&[(1, 0), (1, 1), (2, 0), (2, 2)])), 3);
        assert_eq!(decide(&judge, 1, written(&[(1, 0), (2, 0), (2, 2)])), 2);
        assert_eq!(
            decide(&judge, 1, written(&[(1, 0), (1, 1), (2, 0)])),
            0,
            "the first batch is bad without the second"
        );
    }

    #[test]
    fn rows_of_a_slot_that_was_given_up_count_no_more() {
        let torn = || vec![in_place(0, 0, 1, &[0, 2], 1)];
        let discard = || LogRecord::Discard { stripe: StripeIndex(0), slot: SlotIndex(0) };
        let missing = [(0, 0), (0, 2)];
        assert_eq!(decide(&judge(2, 1, 0, vec![torn(), vec![discard()]], &missing), 1, untouched), 2);
        // The stripe comes back: blocks that the first record of its new life does not name are unwritten.
        let mut first = in_place(0, 0, 1, &[1, 2], 11);
        if let LogRecord::InPlace(record) = &mut first {
            record.first = true;
        }
        let batches = vec![torn(), vec![discard()], vec![first]];
        assert_eq!(decide(&judge(2, 1, 0, batches, &missing), 1, |_, _, _| None), 3);
    }

    #[test]
    fn a_row_that_is_lost_at_the_note_neither_shortens_the_prefix_nor_excuses_more() {
        let batches = || {
            vec![
                vec![in_place(0, 0, 1, &[0, 2], 1)],
                vec![in_place(1, 0, 1, &[0, 2], 11)],
                vec![in_place(0, 0, 1, &[1, 2], 21)],
            ]
        };
        // Slot 0 is on members 0, 1, 2; its row is lost at the note.
        let lost = [(0, 0), (0, 2)];
        assert_eq!(
            decide(&judge(2, 1, 1, batches(), &lost), 1, untouched),
            3,
            "healed: parity is there again"
        );
        let still = [(0, 0), (0, 2), (2, 2)];
        assert_eq!(decide(&judge(2, 1, 1, batches(), &still), 1, untouched), 3, "no worse than at the note");
        let worse = [(0, 0), (0, 2), (2, 1)];
        assert_eq!(decide(&judge(2, 1, 1, batches(), &worse), 1, untouched), 2, "column 1 would be lost too");
        assert_eq!(decide(&judge(2, 1, 0, batches(), &worse), 1, untouched), 0, "nothing was noted");
    }

    #[test]
    fn ranges_of_prefixes_give_the_same_decision_as_looking_at_every_prefix() {
        for seed in 0..3000 {
            let random = &mut Random::new(seed);
            let (k, m) = [(2, 1), (1, 2), (2, 2), (3, 0)][random.below(4) as usize];
            let map = Map { slots: 4, ..map(k, m, 5) };
            let mut slots = [(0u64, 0u64), (1, 1)];
            let mut free = vec![2u64, 3];
            let mut batches = Vec::new();
            for _ in 0..random.below(7) {
                let mut records = Vec::new();
                for _ in 0..1 + random.below(2) {
                    let at = random.below(2) as usize;
                    let (stripe, slot) = slots[at];
                    let value = random.next_u64() >> 20;
                    records.push(match random.below(5) {
                        0 => {
                            let to = free.remove(0);
                            free.push(slot);
                            slots[at].1 = to;
                            fresh(stripe, slot, to, &map, value)
                        }
                        1 if random.one_in(2) => {
                            LogRecord::Discard { stripe: StripeIndex(stripe), slot: SlotIndex(slot) }
                        }
                        _ => {
                            let row = random.below(5) as u32;
                            let rows = 1 + random.below(u64::from(5 - row)) as u32;
                            let columns: Vec<u16> = (0..map.width() as u16)
                                .filter(|&c| usize::from(c) >= k || random.one_in(2))
                                .collect();
                            let columns = if columns.is_empty() { vec![0] } else { columns };
                            let mut record = in_place(slot, row, rows, &columns, value);
                            if let LogRecord::InPlace(record) = &mut record {
                                record.first = random.one_in(4);
                            }
                            record
                        }
                    });
                }
                batches.push(records);
            }
            let noted = random.below(batches.len() as u64 + 1) as u32;
            let salt = random.next_u64();
            let rare = 2 + random.below(6);
            let missing = |batch: u32, member: u16, block: u32| {
                let draw = salt ^ u64::from(batch) << 40 ^ u64::from(member) << 20 ^ u64::from(block);
                Random::new(draw).one_in(rare)
            };
            let judge = Judge::new(
                chain(&map, noted, batches, missing),
                map,
                MemberSet::first(map.width() as u16),
                MemberSet::default(),
            );
            // Fresh blocks are as some record says or absent; all others are as before the log.
            let fresh_hash = |slot: u64, row: usize, column: usize| {
                let records = judge.chain.batches().iter().flat_map(|entry| &entry.batch().records);
                let mut hashes = records.filter_map(|record| match record {
                    LogRecord::Fresh(record) if record.slot.0 == slot => {
                        Some(record.hashes[column * 5 + row])
                    }
                    _ => None,
                });
                hashes.next_back()
            };
            let home = |slot: u64, row: usize, column: usize| {
                let draw = salt ^ slot << 50 ^ (row << 10) as u64 ^ column as u64;
                let there = !Random::new(draw).one_in(5);
                there.then(|| fresh_hash(slot, row, column).unwrap_or(base_hash(slot, row, column)))
            };
            let expected = brute_force(&judge, home);
            for rows_max in [1, 2, 5] {
                assert_eq!(decide(&judge, rows_max, home), expected, "seed {seed}, tiles of {rows_max} rows");
            }
        }
    }

    /// The losses of the live rows after a prefix, computed from that prefix alone.
    fn losses(
        judge: &Judge,
        prefix: u32,
        home: impl Fn(u64, usize, usize) -> Option<BlockHash>,
    ) -> HashMap<(u64, usize), Vec<usize>> {
        let mut lost = HashMap::new();
        for tile in all_tiles(judge, 5) {
            let state = judge.state_at(&tile, prefix);
            for row in state.touched_rows().filter(|_| state.live) {
                let slot = tile.slot.0;
                // Rows of which nothing is missing are not looked at: home blocks at rest count as good.
                let mut doubt = false;
                let mut bad = Vec::new();
                for column in 0..judge.map.width() {
                    let member = judge.member(&tile, column);
                    let home = home(slot, row, column);
                    let good = match state.cell(row, column) {
                        Cell::Zero(_) => true,
                        Cell::Untouched => home == Some(base_hash(slot, row, column)),
                        Cell::Placed(hash) => home == Some(hash),
                        Cell::Fresh { hash, batch } => {
                            doubt |= batch >= judge.chain.noted();
                            home == Some(hash)
                        }
                        Cell::Image { hash, batch, ordinal } => {
                            let held = judge.chain.batch(batch).holds(member, ordinal);
                            doubt |= !held;
                            held || home == Some(hash)
                        }
                    };
                    if !good {
                        bad.push(column);
                    }
                }
                // A row in doubt at any prefix is looked at for all of them.
                let doubtful = judge.rows_in_doubt(&tile).contains(&row);
                assert!(doubtful || !doubt || prefix < judge.chain.noted());
                if doubtful && bad.len() > judge.map.m {
                    lost.insert((slot, row), bad);
                }
            }
        }
        lost
    }

    fn brute_force(judge: &Judge, home: impl Fn(u64, usize, usize) -> Option<BlockHash> + Copy) -> u32 {
        let prefixes = judge.chain.noted()..=judge.chain.batches().len() as u32;
        if let Some(whole) = prefixes.clone().rev().find(|&prefix| losses(judge, prefix, home).is_empty()) {
            return whole;
        }
        let noted = losses(judge, judge.chain.noted(), home);
        let no_worse = |prefix: &u32| {
            losses(judge, *prefix, home).iter().all(|(row, bad)| {
                bad.iter().all(|column| noted.get(row).is_some_and(|before| before.contains(column)))
            })
        };
        prefixes.rev().find(no_worse).expect("the note itself is no worse")
    }
}
