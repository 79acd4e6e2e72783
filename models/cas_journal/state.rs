//! What the model of the journal is like between two steps: the store, what was made, and what the volume has
//! in memory.

pub(crate) const SEGMENTS: usize = 6;
/// Of a segment.
pub(crate) const BLOCKS: usize = 3;
/// Of a segment of pages, that are written.
pub(crate) const PAGE_BLOCKS: usize = 2;
/// The first place of the root, after all segments; the second follows.
pub(crate) const ROOT: usize = SEGMENTS * BLOCKS;
pub(crate) const CELLS: usize = ROOT + 2;
/// Blocks of the client.
pub(crate) const CLIENT: usize = 2;
pub(crate) const UNDER_WAY: usize = 2;
pub(crate) const NONE: u8 = 255;

/// What a block of the store holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Cell {
    Blank,
    /// Of an entry, by its identity.
    Header(u8),
    Chunk(u8),
    /// The page of a root.
    Page(u8),
    Root(u8),
    Unreadable,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Record {
    /// `at`: the block of the store that has the chunk.
    Write {
        block: u8,
        content: u8,
        at: u8,
    },
    Move {
        block: u8,
        from: u8,
        to: u8,
    },
    GiveUp {
        segment: u8,
    },
    /// The volume has started. An entry without records, which no other is.
    Start,
}

/// Where an entry lies, or the next one will.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) sequence: u8,
    /// The entry before.
    pub(crate) previous: u8,
    pub(crate) segment: u8,
    pub(crate) block: u8,
    /// The segment in which the journal goes on.
    pub(crate) next: u8,
}

impl Place {
    pub(crate) fn cell(&self) -> usize {
        self.segment as usize * BLOCKS + self.block as usize
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Entry {
    pub(crate) place: Place,
    /// The start that made it, if entries say so.
    pub(crate) run: u8,
    pub(crate) record: Record,
}

impl Entry {
    /// The chunk that lies in it.
    pub(crate) fn inline(&self) -> Option<u8> {
        match self.record {
            Record::Write { content, at, .. } if at / BLOCKS as u8 == self.place.segment => Some(content),
            _ => None,
        }
    }

    pub(crate) fn blocks(&self) -> u8 {
        1 + u8::from(self.inline().is_some())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Kind {
    Free,
    Data,
    Journal,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Chunk {
    pub(crate) at: u8,
    pub(crate) content: u8,
}

/// What the pages say.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Pages {
    pub(crate) map: [Option<Chunk>; CLIENT],
    pub(crate) kinds: [Kind; SEGMENTS],
}

impl Pages {
    pub(crate) const EMPTY: Pages = Pages { map: [None; CLIENT], kinds: [Kind::Free; SEGMENTS] };

    pub(crate) fn apply(&mut self, entry: &Entry) {
        self.kinds[entry.place.segment as usize] = Kind::Journal;
        match entry.record {
            Record::Write { block, content, at } => {
                self.map[block as usize] = Some(Chunk { at, content });
                if entry.inline().is_none() {
                    self.kinds[at as usize / BLOCKS] = Kind::Data;
                }
            }
            Record::Move { block, to, .. } => {
                if let Some(chunk) = &mut self.map[block as usize] {
                    chunk.at = to;
                }
                self.kinds[to as usize / BLOCKS] = Kind::Data;
            }
            Record::GiveUp { segment } => self.kinds[segment as usize] = Kind::Free,
            Record::Start => {}
        }
    }

    pub(crate) fn has_chunk_in(&self, segment: usize) -> bool {
        self.map.iter().flatten().any(|chunk| chunk.at as usize / BLOCKS == segment)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Root {
    pub(crate) generation: u8,
    /// The first entry whose records it does not contain.
    pub(crate) place: Place,
    /// The segment of its page.
    pub(crate) page: u8,
    pub(crate) pages: Pages,
}

/// What a write to the store is for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Use {
    Entry { sequence: u8 },
    Chunk { slot: u8 },
    Page,
    Root,
    Nothing,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Write {
    pub(crate) cells: Vec<(u8, Cell)>,
    pub(crate) purpose: Use,
    pub(crate) is_answered: bool,
    /// The writes, bit by bit, that were answered when it was submitted.
    pub(crate) behind: u16,
    /// The flush that is under way covers it.
    pub(crate) is_asked: bool,
    /// It was submitted before the volume started anew.
    pub(crate) is_late: bool,
}

/// A chunk on its way to a data segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Store {
    pub(crate) block: u8,
    pub(crate) content: u8,
    pub(crate) to: u8,
    /// Where it was, if it moves.
    pub(crate) from: Option<u8>,
    pub(crate) is_answered: bool,
}

/// A root that is being written.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Saving {
    pub(crate) root: u8,
    pub(crate) page_is_answered: bool,
    /// Places to which it was submitted, and on which it was answered.
    pub(crate) submitted: u8,
    pub(crate) answered: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Start {
    Root,
    Entry,
    EntryUnderWay,
    Done,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(crate) cells: [Cell; CELLS],
    pub(crate) writes: Vec<Write>,
    /// All that were ever made.
    pub(crate) entries: Vec<Entry>,
    pub(crate) roots: Vec<Root>,
    /// The entries of the journal, in order.
    pub(crate) journal: Vec<u8>,
    /// Which of them were answered, bit by bit.
    pub(crate) answered: u16,
    /// So many stay, whatever happens.
    pub(crate) promised: u8,
    /// The flush that is under way promises so many.
    pub(crate) flushing: Option<u8>,
    pub(crate) pages: Pages,
    pub(crate) place: Place,
    pub(crate) run: u8,
    pub(crate) stores: [Option<Store>; UNDER_WAY],
    pub(crate) saving: Option<Saving>,
    pub(crate) newest: u8,
    /// How many entries must have been answered before a segment is free.
    pub(crate) freed_by: [u8; SEGMENTS],
    /// Of a start: the newer root goes to the other place, then the entry of the start to the journal.
    pub(crate) start: Start,
    /// Writes that were answered are gone, and no client knows.
    pub(crate) is_lost: bool,
    pub(crate) next: u8,
    pub(crate) crashes: u8,
    pub(crate) failures: u8,
    pub(crate) saved: u8,
    pub(crate) moves: u8,
    pub(crate) damage: u8,
}

impl State {
    /// How many entries were answered, those before them included.
    pub(crate) fn answered_upto(&self) -> u8 {
        self.answered.trailing_ones() as u8
    }

    /// What a reader would see.
    pub(crate) fn seen(&self) -> [Cell; CELLS] {
        let mut cells = self.cells;
        for (at, cell) in self.writes.iter().filter(|write| !write.is_late).flat_map(|write| &write.cells) {
            cells[*at as usize] = *cell;
        }
        cells
    }

    pub(crate) fn submit(&mut self, purpose: Use, cells: Vec<(u8, Cell)>) {
        let mut behind = 0;
        for (at, write) in self.writes.iter().enumerate() {
            behind |= u16::from(write.is_answered) << at;
        }
        let write = Write { cells, purpose, is_answered: false, behind, is_asked: false, is_late: false };
        self.writes.push(write);
    }

    /// The write is in the store for good.
    pub(crate) fn settle(&mut self, at: usize) {
        let write = self.writes.remove(at);
        for (at, cell) in write.cells {
            self.cells[at as usize] = cell;
        }
        for other in &mut self.writes {
            let below = other.behind & ((1 << at) - 1);
            other.behind = below | (other.behind >> (at + 1)) << at;
        }
    }

    pub(crate) fn entries_under_way(&self) -> usize {
        self.journal.len() - self.answered.count_ones() as usize
    }
}
