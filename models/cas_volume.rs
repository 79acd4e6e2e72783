//! Explicit-state model of the cas volume above the array's log: map, counts, chunks, segments, deadlists and
//! the root under which they are saved; duplicates, segments that are given up and used again, moves,
//! snapshots, readers, checkpoints and crashes.
//!
//! Run: `cargo run --release -p calpe-models --bin cas-volume` (`explorer.rs` says what it accepts).
//!
//! Enumerated, breadth first, every interleaving of the steps of at most two writes of clients (look-up, then
//! the record), of giving a chunk up, of moving one, of one reader, of saving single pages, writing the root,
//! making it durable, moving the tail, of flushes, and of crashes, after each of which everything goes on.
//!
//! The log is that of the array: here it is a list of records, one for each batch, of which a crash leaves a
//! prefix that holds at least what was flushed, with the bytes of the chunks that these records name. Bytes
//! of other chunks on their way are torn by a power loss. A page is saved somewhere else each time, so the
//! root that is durable keeps its own pages.
//!
//! Checked after every step and every recovery, against the list of records alone: every block, of the volume
//! and of its snapshot, reads what the newest record says; counts are the entries of all maps; a deadlist
//! holds what the snapshot has and the volume does not; a segment is in use where a chunk is in it, and
//! nowhere else. A reader gets what its block held at some time while it read.
//!
//! Bounds: two blocks, each with a map page of its own; one page each for counts, for chunks with segments,
//! for the deadlist and for the snapshot; three ids; three or four segments of one chunk each; scripts of up
//! to six writes; one snapshot; two crashes. Not modelled: space (C5), compression, damage of members,
//! metadata segments; intents of TRIM and clones are in `cas_snapshots.rs`.

use calpe_models::{self as explorer, Model};

const BLOCKS: usize = 2;
/// Ids begin with 1; id 0 is a hole.
const IDS: usize = 4;
const SEGMENTS: usize = 4;
const RECORDS_MAX: usize = 10;
const WRITERS: usize = 2;

const NOWHERE: u8 = 255;
/// In place of a segment: the bytes are in the log, with the record whose number is the generation.
const IN_LOG: u8 = 253;
const TORN: u8 = 255;
/// Of bytes that no record names yet.
const UNNAMED: u8 = 254;

/// Pages of the volume. Those of the map come last, so that a record's other effects see what it replaces.
const COUNTS: usize = 0;
const DEADLIST: usize = 1;
const CHUNKS: usize = 2;
const SNAPSHOT: usize = 3;
const MAP: usize = 4;
const PAGES: usize = MAP + BLOCKS;
const PAGE_NAMES: [&str; PAGES] =
    ["counts", "deadlist", "chunks", "snapshot", "map of block 0", "map of block 1"];

/// One switch for each rule: true is the rule, false what the mutation does instead.
#[derive(Clone, Copy)]
struct Rules {
    /// A page carries the position that it includes, and replay applies newer records only (else: all).
    positions: bool,
    /// A record names the id that it replaces (else: replay takes it from the map).
    names_old: bool,
    /// It also says whether that goes to the deadlist (else: replay looks at births in the map).
    names_fate: bool,
    /// A saved page goes under a root only once its records are durable.
    root_after_durable: bool,
    /// The tail moves when the root is durable (else: when it is written).
    tail_after_root: bool,
    /// The tail is the oldest position of the root's pages (else: the newest).
    tail_is_oldest: bool,
    /// The tail stays below bytes that a page of the root places in the log.
    tail_keeps_bytes: bool,
    /// No page under a root includes records beyond a snapshot that the root lacks.
    no_page_beyond_snapshot: bool,
    /// A look-up pins the chunk until the record counts it (C2).
    pins: bool,
    /// Giving a chunk up joins a batch only while its count and pins are zero (C2).
    give_up_rechecks: bool,
    /// A move looks again at id and place when its record joins (C2).
    move_rechecks: bool,
    /// A match counts only where the chunk is still the one that the index means (C3).
    match_checks_generation: bool,
    /// A segment is used again once the record that gave it up is durable (C4).
    reuse_after_durable: bool,
    /// A reader looks at the map again after the table (C8).
    reader_rechecks: bool,
    /// A reader compares what it read with the hash (C8).
    reader_compares: bool,
    /// What a snapshot holds goes to the deadlist when it is overwritten (C9).
    deadlist: bool,
    /// A new entry is younger than every snapshot (C9).
    births_grow: bool,
    /// A record of a deletion names what it takes from the deadlist (else: all that is in it at replay).
    deletion_names: bool,
}

const RULES: Rules = Rules {
    positions: true,
    names_old: true,
    names_fate: true,
    root_after_durable: true,
    tail_after_root: true,
    tail_is_oldest: true,
    tail_keeps_bytes: true,
    no_page_beyond_snapshot: true,
    pins: true,
    give_up_rechecks: true,
    move_rechecks: true,
    match_checks_generation: true,
    reuse_after_durable: true,
    reader_rechecks: true,
    reader_compares: true,
    deadlist: true,
    births_grow: true,
    deletion_names: true,
};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
struct Entry {
    id: u8,
    birth: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Chunk {
    segment: u8,
    generation: u8,
    content: u8,
}

const NO_CHUNK: Chunk = Chunk { segment: NOWHERE, generation: 0, content: 0 };

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Segment {
    in_use: bool,
    generation: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Snapshot {
    /// 0: there is none.
    number: u8,
    map: [Entry; BLOCKS],
}

/// What the pages say, in memory or as saved, and the position that each includes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Volume {
    map: [Entry; BLOCKS],
    counts: [u8; IDS],
    table: [Chunk; IDS],
    segments: [Segment; SEGMENTS],
    dead: [u8; IDS],
    snapshot: Snapshot,
    positions: [u8; PAGES],
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Record {
    None,
    /// `new` is the chunk's place where it is a new one. `to_deadlist`: a snapshot holds what is replaced.
    Write {
        block: u8,
        entry: Entry,
        old: u8,
        content: u8,
        new: Option<(u8, u8)>,
        to_deadlist: bool,
    },
    GiveUp {
        id: u8,
        segment: u8,
    },
    Move {
        id: u8,
        from: u8,
        to: u8,
    },
    Snapshot {
        number: u8,
    },
    /// The snapshot is gone; what its deadlist holds is taken from the counts by the records that follow.
    Delete,
    Drop {
        id: u8,
    },
}

/// A write of a client on its way.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Writer {
    Idle,
    Duplicate { block: u8, id: u8, content: u8 },
    New { block: u8, id: u8, segment: u8, content: u8 },
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Reader {
    /// It has not begun.
    Waits,
    HasMap {
        block: u8,
        entry: Entry,
        held: u8,
    },
    HasTable {
        block: u8,
        chunk: Chunk,
        held: u8,
    },
    Over,
}

/// Moves a chunk from its segment, or from the log, to another segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Mover {
    id: u8,
    from: u8,
    generation: u8,
    to: u8,
}

/// An entry of the index: it may be of long ago.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Hint {
    id: u8,
    segment: u8,
    generation: u8,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    memory: Volume,
    /// Pages saved for the next root.
    saved: Volume,
    /// Which of them were saved since the last root, bit by page.
    saved_now: u8,
    written_root: Option<Volume>,
    root: Volume,
    log: [Record; RECORDS_MAX],
    issued: u8,
    durable: u8,
    /// Records below are gone from the log.
    tail: u8,
    disk: [u8; SEGMENTS],
    /// The record without which the bytes are torn by a power loss; 0 where they are durable.
    named_by: [u8; SEGMENTS],
    reserved: u8,
    reserved_ids: u8,
    /// The record that gave up the segment, or the id, last.
    freed_by: [u8; SEGMENTS],
    id_freed_by: [u8; IDS],
    pins: [u8; IDS],
    writers: [Writer; WRITERS],
    victim: u8,
    mover: Option<Mover>,
    index: [Hint; 4],
    reader: Reader,
    is_deleting: bool,
    next: u8,
    crashes: u8,
    roots: u8,
    moves: u8,
}

#[derive(Clone, Copy)]
enum Op {
    Write(u8, u8),
    Trim(u8),
    Snapshot,
    Delete,
}

#[derive(Clone)]
struct Config {
    name: &'static str,
    script: Vec<Op>,
    segments: usize,
    crashes: u8,
    roots: u8,
    moves: u8,
    reads: bool,
    /// Whether new chunks may go to the log first.
    logs: bool,
    rules: Rules,
}

type Step = explorer::Step<State>;

impl Volume {
    fn new() -> Volume {
        Volume {
            map: [Entry::default(); BLOCKS],
            counts: [0; IDS],
            table: [NO_CHUNK; IDS],
            segments: [Segment::default(); SEGMENTS],
            dead: [0; IDS],
            snapshot: Snapshot::default(),
            positions: [0; PAGES],
        }
    }

    /// Applies the effects of a record on one page, all of them together.
    fn apply(&mut self, page: usize, record: Record, rules: &Rules) {
        match (record, page) {
            (Record::Write { block, entry, old, .. }, COUNTS) => {
                let to_deadlist = self.goes_to_deadlist(record, rules);
                let old = if rules.names_old { old } else { self.map[block as usize].id };
                if entry.id != 0 {
                    self.counts[entry.id as usize] = self.counts[entry.id as usize].wrapping_add(1);
                }
                if old != 0 && !to_deadlist {
                    self.counts[old as usize] = self.counts[old as usize].wrapping_sub(1);
                }
            }
            (Record::Write { old, .. }, DEADLIST) if old != 0 && self.goes_to_deadlist(record, rules) => {
                self.dead[old as usize] += 1;
            }
            (Record::Write { entry, content, new: Some((segment, generation)), .. }, CHUNKS) => {
                self.table[entry.id as usize] = Chunk { segment, generation, content };
                if segment != IN_LOG {
                    self.segments[segment as usize].in_use = true;
                }
            }
            (Record::Write { block, entry, .. }, page) if page == MAP + block as usize => {
                self.map[block as usize] = entry;
            }
            (Record::GiveUp { id, segment }, CHUNKS) => {
                self.table[id as usize] = NO_CHUNK;
                self.free(segment);
            }
            (Record::Move { id, from, to }, CHUNKS) => {
                let generation = self.segments[to as usize].generation;
                self.table[id as usize].segment = to;
                self.table[id as usize].generation = generation;
                self.segments[to as usize].in_use = true;
                self.free(from);
            }
            (Record::Snapshot { number }, SNAPSHOT) => self.snapshot = Snapshot { number, map: self.map },
            (Record::Delete, SNAPSHOT) => self.snapshot = Snapshot::default(),
            (Record::Drop { id }, COUNTS) if rules.deletion_names => {
                self.counts[id as usize] = self.counts[id as usize].wrapping_sub(1);
            }
            (Record::Drop { .. }, COUNTS) => {
                for id in 0..IDS {
                    self.counts[id] = self.counts[id].wrapping_sub(self.dead[id]);
                }
            }
            (Record::Drop { id }, DEADLIST) if rules.deletion_names => {
                self.dead[id as usize] = self.dead[id as usize].wrapping_sub(1);
            }
            (Record::Drop { .. }, DEADLIST) => self.dead = [0; IDS],
            _ => {}
        }
    }

    /// Whether a snapshot holds what a write replaces.
    fn goes_to_deadlist(&self, record: Record, rules: &Rules) -> bool {
        let Record::Write { block, old, to_deadlist, .. } = record else { return false };
        if rules.names_fate {
            return to_deadlist;
        }
        old != 0 && self.snapshot.number != 0 && self.map[block as usize].birth <= self.snapshot.number
    }

    fn free(&mut self, segment: u8) {
        if segment == IN_LOG {
            return;
        }
        let segment = &mut self.segments[segment as usize];
        (segment.in_use, segment.generation) = (false, segment.generation + 1);
    }

    /// Takes one page as another volume has it.
    fn take_page(&mut self, page: usize, from: &Volume) {
        match page {
            COUNTS => self.counts = from.counts,
            DEADLIST => self.dead = from.dead,
            CHUNKS => (self.table, self.segments) = (from.table, from.segments),
            SNAPSHOT => self.snapshot = from.snapshot,
            map => self.map[map - MAP] = from.map[map - MAP],
        }
        self.positions[page] = from.positions[page];
    }

    /// Whether a page is as another volume has it, wherever that one stands.
    fn has_page_of(&self, page: usize, other: &Volume) -> bool {
        let mut copy = *self;
        copy.take_page(page, other);
        copy.positions = self.positions;
        copy == *self
    }
}

impl Model for Config {
    type State = State;

    fn name(&self) -> &str {
        self.name
    }

    fn start(&self) -> State {
        State {
            memory: Volume::new(),
            saved: Volume::new(),
            saved_now: 0,
            written_root: None,
            root: Volume::new(),
            log: [Record::None; RECORDS_MAX],
            issued: 0,
            durable: 0,
            tail: 0,
            disk: [0; SEGMENTS],
            named_by: [0; SEGMENTS],
            reserved: 0,
            reserved_ids: 0,
            freed_by: [0; SEGMENTS],
            id_freed_by: [0; IDS],
            pins: [0; IDS],
            writers: [Writer::Idle; WRITERS],
            victim: 0,
            mover: None,
            index: [Hint::default(); 4],
            reader: if self.reads { Reader::Waits } else { Reader::Over },
            is_deleting: false,
            next: 0,
            crashes: 0,
            roots: 0,
            moves: 0,
        }
    }

    fn steps(&self, state: &State, steps: &mut Vec<Step>) {
        self.client_steps(state, steps);
        self.background_steps(state, steps);
        if self.reads {
            self.reader_steps(state, steps);
        }
        self.checkpoint_steps(state, steps);
        self.crashes(state, steps);
        for step in steps.iter_mut().filter(|step| step.wrong.is_none()) {
            step.wrong = wrong(&step.after);
        }
    }
}

impl Config {
    /// Puts a record into the log, and applies it in memory.
    fn issue(&self, state: &mut State, record: Record) {
        state.log[state.issued as usize] = record;
        state.issued += 1;
        for page in 0..PAGES {
            state.memory.apply(page, record, &self.rules);
            state.memory.positions[page] = state.issued;
        }
    }

    fn has_room(&self, state: &State) -> bool {
        (state.issued as usize) < RECORDS_MAX
    }

    /// The chunk with this content that a new entry may refer to.
    fn find(&self, state: &State, content: u8) -> Option<u8> {
        let hint = state.index[content as usize];
        let chunk = state.memory.table[hint.id as usize];
        let is_current =
            (chunk.segment, chunk.generation, chunk.content) == (hint.segment, hint.generation, content);
        (hint.id != 0 && (is_current || !self.rules.match_checks_generation)).then_some(hint.id)
    }

    fn free_segment(&self, state: &State) -> Option<u8> {
        let is_free = |segment: &usize| {
            !state.memory.segments[*segment].in_use
                && state.reserved >> segment & 1 == 0
                && (!self.rules.reuse_after_durable || state.freed_by[*segment] <= state.durable)
        };
        // The one that was given up last, if any: using it again soon is what may go wrong.
        let free = (0..self.segments).filter(is_free);
        free.max_by_key(|segment| state.freed_by[*segment]).map(|segment| segment as u8)
    }

    /// An id is used again at once: the record that does so comes later in the log.
    fn free_id(&self, state: &State) -> Option<u8> {
        let is_free = |id: &usize| state.memory.table[*id] == NO_CHUNK && state.reserved_ids >> id & 1 == 0;
        (1..IDS).filter(is_free).max_by_key(|id| state.id_freed_by[*id]).map(|id| id as u8)
    }

    fn client_steps(&self, state: &State, steps: &mut Vec<Step>) {
        if let Some(op) = self.script.get(state.next as usize) {
            let mut after = state.clone();
            after.next += 1;
            let idle = state.writers.iter().position(|writer| *writer == Writer::Idle);
            match (*op, idle) {
                (Op::Write(block, content), Some(writer)) => {
                    if let Some(id) = self.find(state, content) {
                        after.writers[writer] = Writer::Duplicate { block, id, content };
                        after.pins[id as usize] += u8::from(self.rules.pins);
                        steps.push(Step::new(
                            format!("block {block} is to be {content}: id {id} has it"),
                            after,
                        ));
                    } else if let (Some(id), Some(segment)) = (self.free_id(state), self.free_segment(state))
                    {
                        after.writers[writer] = Writer::New { block, id, segment, content };
                        after.reserved |= 1 << segment;
                        after.reserved_ids |= 1 << id;
                        after.disk[segment as usize] = content;
                        after.named_by[segment as usize] = UNNAMED;
                        let text =
                            format!("block {block} is to be {content}: new, id {id}, into segment {segment}");
                        steps.push(Step::new(text, after));
                    }
                    if let (None, Some(id), true) =
                        (self.find(state, content), self.free_id(state), self.logs && self.has_room(state))
                    {
                        // With its record, as there is no time to fill a segment.
                        let mut after = state.clone();
                        after.next += 1;
                        let generation = state.issued + 1;
                        self.write(&mut after, block, id, content, Some((IN_LOG, generation)));
                        after.index[content as usize] = Hint { id, segment: IN_LOG, generation };
                        let text = format!(
                            "record: block {block} is id {id}, which is new, with its bytes: {content}"
                        );
                        steps.push(Step::new(text, after));
                    }
                }
                (Op::Trim(block), _) if self.has_room(state) => {
                    self.write(&mut after, block, 0, 0, None);
                    steps.push(Step::new(format!("block {block} is trimmed"), after));
                }
                (Op::Snapshot, _) if self.has_room(state) => {
                    self.issue(&mut after, Record::Snapshot { number: 1 });
                    steps.push(Step::new("a snapshot is made", after));
                }
                (Op::Delete, _) if self.has_room(state) => {
                    self.issue(&mut after, Record::Delete);
                    after.is_deleting = true;
                    steps.push(Step::new("the snapshot is deleted", after));
                }
                _ => {}
            }
        }
        for (at, writer) in state.writers.iter().enumerate().filter(|_| self.has_room(state)) {
            let mut after = state.clone();
            after.writers[at] = Writer::Idle;
            match *writer {
                Writer::Idle => continue,
                Writer::Duplicate { block, id, content } => {
                    after.pins[id as usize] -= u8::from(self.rules.pins);
                    self.write(&mut after, block, id, content, None);
                    steps.push(Step::new(format!("record: block {block} is id {id}"), after));
                }
                Writer::New { block, id, segment, content } => {
                    let generation = state.memory.segments[segment as usize].generation;
                    after.reserved &= !(1 << segment);
                    after.reserved_ids &= !(1 << id);
                    self.write(&mut after, block, id, content, Some((segment, generation)));
                    after.named_by[segment as usize] = after.issued;
                    after.index[content as usize] = Hint { id, segment, generation };
                    steps.push(Step::new(format!("record: block {block} is id {id}, which is new"), after));
                }
            }
        }
        if state.durable < state.issued {
            let mut after = state.clone();
            after.durable = state.issued;
            let is_named = |named_by: u8| named_by <= state.issued;
            after
                .named_by
                .iter_mut()
                .filter(|named_by| is_named(**named_by))
                .for_each(|named_by| *named_by = 0);
            steps.push(Step::new("flush", after));
        }
    }

    fn write(&self, state: &mut State, block: u8, id: u8, content: u8, new: Option<(u8, u8)>) {
        let old = state.memory.map[block as usize];
        let snapshot = state.memory.snapshot.number;
        let to_deadlist = self.rules.deadlist && old.id != 0 && snapshot != 0 && old.birth <= snapshot;
        let birth = if self.rules.births_grow { snapshot + 1 } else { 1 };
        let entry = Entry { id, birth };
        if let Reader::HasMap { block: read, held, .. } | Reader::HasTable { block: read, held, .. } =
            &mut state.reader
            && *read == block
        {
            *held |= 1 << content;
        }
        self.issue(state, Record::Write { block, entry, old: old.id, content, new, to_deadlist });
    }

    fn background_steps(&self, state: &State, steps: &mut Vec<Step>) {
        // Giving up: a chunk is chosen, and then its record joins.
        let is_unused = |id: usize| state.memory.counts[id] == 0 && state.pins[id] == 0;
        if state.victim == 0 {
            for id in (1..IDS).filter(|&id| state.memory.table[id] != NO_CHUNK && is_unused(id)) {
                let mut after = state.clone();
                after.victim = id as u8;
                steps.push(Step::new(format!("id {id} is to be given up"), after));
            }
        } else if self.has_room(state) {
            let id = state.victim as usize;
            let mut after = state.clone();
            after.victim = 0;
            let segment = state.memory.table[id].segment;
            if segment != NOWHERE && (is_unused(id) || !self.rules.give_up_rechecks) {
                self.issue(&mut after, Record::GiveUp { id: id as u8, segment });
                if segment != IN_LOG {
                    after.freed_by[segment as usize] = after.issued;
                }
                after.id_freed_by[id] = after.issued;
                steps.push(Step::new(format!("record: id {id} and segment {segment} are given up"), after));
            } else {
                steps.push(Step::new(format!("id {id} stays"), after));
            }
        }
        match state.mover {
            None if state.moves < self.moves => {
                let Some(to) = self.free_segment(state) else { return };
                for id in (1..IDS).filter(|&id| state.memory.table[id] != NO_CHUNK) {
                    let Chunk { segment: from, generation, .. } = state.memory.table[id];
                    let mut after = state.clone();
                    after.moves += 1;
                    after.mover = Some(Mover { id: id as u8, from, generation, to });
                    after.reserved |= 1 << to;
                    after.disk[to as usize] = held_at(state, state.memory.table[id]);
                    after.named_by[to as usize] = UNNAMED;
                    steps.push(Step::new(format!("id {id} is copied to segment {to}"), after));
                }
            }
            Some(Mover { id, from, generation, to }) if self.has_room(state) => {
                let mut after = state.clone();
                after.mover = None;
                after.reserved &= !(1 << to);
                let chunk = state.memory.table[id as usize];
                let is_there = (chunk.segment, chunk.generation) == (from, generation);
                if is_there || !self.rules.move_rechecks {
                    self.issue(&mut after, Record::Move { id, from, to });
                    after.named_by[to as usize] = after.issued;
                    if from != IN_LOG {
                        after.freed_by[from as usize] = after.issued;
                    }
                    let place = after.memory.table[id as usize];
                    for hint in after.index.iter_mut().filter(|hint| hint.id == id) {
                        (hint.segment, hint.generation) = (place.segment, place.generation);
                    }
                    steps.push(Step::new(format!("record: id {id} is in segment {to}"), after));
                } else {
                    steps.push(Step::new(format!("the copy of id {id} is dropped"), after));
                }
            }
            _ => {}
        }
        // A deletion goes on until the deadlist is empty.
        if state.is_deleting && self.has_room(state) {
            let mut after = state.clone();
            match (1..IDS).find(|&id| state.memory.dead[id] > 0) {
                Some(id) => {
                    self.issue(&mut after, Record::Drop { id: id as u8 });
                    steps.push(Step::new(format!("record: an entry of id {id} leaves the deadlist"), after));
                }
                None => {
                    after.is_deleting = false;
                    steps.push(Step::new("the deletion is over", after));
                }
            }
        }
    }

    fn reader_steps(&self, state: &State, steps: &mut Vec<Step>) {
        let mut after = state.clone();
        let content = |block: u8| contents(state).0[block as usize];
        match state.reader {
            Reader::Waits => {
                let entry = state.memory.map[0];
                if entry.id != 0 {
                    after.reader = Reader::HasMap { block: 0, entry, held: 1 << content(0) };
                    steps.push(Step::new(format!("a reader of block 0 finds id {}", entry.id), after));
                }
            }
            Reader::HasMap { block, entry, held } => {
                let chunk = state.memory.table[entry.id as usize];
                let is_same = state.memory.map[block as usize] == entry;
                after.reader = match chunk.segment != NOWHERE && (is_same || !self.rules.reader_rechecks) {
                    true => Reader::HasTable { block, chunk, held },
                    false => Reader::Waits,
                };
                steps.push(Step::new(format!("the reader finds segment {}", chunk.segment), after));
            }
            Reader::HasTable { chunk, held, .. } => {
                let found = held_at(state, chunk);
                let is_right = found == chunk.content || !self.rules.reader_compares;
                after.reader = if is_right { Reader::Over } else { Reader::Waits };
                let is_wrong = is_right && (found > 7 || held >> found & 1 == 0);
                let what = is_wrong.then(|| format!("the reader gets {found}, which its block did not hold"));
                steps.push(Step { text: format!("the reader reads {found}"), after, wrong: what });
            }
            Reader::Over => {}
        }
    }

    fn checkpoint_steps(&self, state: &State, steps: &mut Vec<Step>) {
        if state.roots < self.roots && state.written_root.is_none() {
            let is_due = |page: &usize| {
                state.saved_now >> page & 1 == 0 && !state.saved.has_page_of(*page, &state.memory)
            };
            for page in (0..PAGES).filter(is_due) {
                let mut after = state.clone();
                after.saved.take_page(page, &state.memory);
                after.saved_now |= 1 << page;
                let text =
                    format!("{} saved, with records up to {}", PAGE_NAMES[page], after.saved.positions[page]);
                steps.push(Step::new(text, after));
            }
            if state.saved_now != 0 && self.may_write_root(state) {
                let mut after = state.clone();
                // A page that has not changed need not be saved to include everything.
                let is_same = |page: &usize| {
                    state.memory.positions[*page] <= state.durable
                        && state.saved.has_page_of(*page, &state.memory)
                };
                (0..PAGES).filter(is_same).for_each(|page| after.saved.take_page(page, &state.memory));
                after.written_root = Some(after.saved);
                after.saved_now = 0;
                after.roots += 1;
                steps.push(Step::new("the root is written", after));
            }
        }
        if let Some(root) = state.written_root {
            let mut after = state.clone();
            after.root = root;
            after.written_root = None;
            steps.push(Step::new("the root is durable", after));
        }
        let root =
            if self.rules.tail_after_root { state.root } else { state.written_root.unwrap_or(state.root) };
        let positions = root.positions.iter();
        let mut tail =
            *if self.rules.tail_is_oldest { positions.min() } else { positions.max() }.expect("pages");
        for chunk in root.table.iter().filter(|chunk| chunk.segment == IN_LOG && self.rules.tail_keeps_bytes)
        {
            tail = tail.min(chunk.generation - 1);
        }
        if tail > state.tail {
            let mut after = state.clone();
            after.tail = tail;
            steps.push(Step::new(format!("the log begins after record {tail}"), after));
        }
    }

    fn may_write_root(&self, state: &State) -> bool {
        let newest = *state.saved.positions.iter().max().expect("pages");
        if self.rules.root_after_durable && newest > state.durable {
            return false;
        }
        if !self.rules.no_page_beyond_snapshot {
            return true;
        }
        let is_lacking = |number: u8| {
            let record = state.log[number as usize - 1];
            matches!(record, Record::Snapshot { .. })
                && state.saved.positions[SNAPSHOT] < number
                && state.saved.positions[MAP..].iter().any(|position| *position > number)
        };
        (1..=state.issued).all(|number| !is_lacking(number))
    }

    fn crashes(&self, state: &State, steps: &mut Vec<Step>) {
        if state.crashes == self.crashes {
            return;
        }
        let roots = [Some(state.root), state.written_root];
        for root in roots.into_iter().flatten() {
            for left in state.durable..=state.issued {
                let mut after = state.clone();
                for segment in 0..SEGMENTS {
                    let named_by = &mut after.named_by[segment];
                    if *named_by > left {
                        after.disk[segment] = TORN;
                    }
                    *named_by = 0;
                }
                let text = format!("POWER LOSS: records up to {left} of {} are left", state.issued);
                steps.push(self.recovered(after, root, left, text));
            }
        }
        // A process that dies leaves what it has written.
        let mut after = state.clone();
        after.named_by = [0; SEGMENTS];
        let root = state.written_root.unwrap_or(state.root);
        steps.push(self.recovered(after, root, state.issued, "PROCESS DEATH".into()));
    }

    /// Starts again from a root and the records up to `left`.
    fn recovered(&self, state: State, root: Volume, left: u8, text: String) -> Step {
        let mut volume = root;
        for number in state.tail + 1..=left {
            for page in 0..PAGES {
                if volume.positions[page] < number || !self.rules.positions {
                    volume.apply(page, state.log[number as usize - 1], &self.rules);
                }
            }
            // Only after all of its effects: one page may need what another was before.
            for position in volume.positions.iter_mut() {
                *position = number.max(*position);
            }
        }
        let mut after = State {
            memory: volume,
            saved: root,
            saved_now: 0,
            written_root: None,
            root,
            issued: left,
            durable: left,
            reserved: 0,
            reserved_ids: 0,
            freed_by: [0; SEGMENTS],
            id_freed_by: [0; IDS],
            pins: [0; IDS],
            writers: [Writer::Idle; WRITERS],
            victim: 0,
            mover: None,
            reader: if self.reads { Reader::Waits } else { Reader::Over },
            crashes: state.crashes + 1,
            ..state
        };
        after.log[left as usize..].fill(Record::None);
        // A deletion that was cut off goes on.
        after.is_deleting =
            after.log.contains(&Record::Delete) && after.memory.dead.iter().any(|dead| *dead > 0);
        Step::new(text, after)
    }
}

/// The bytes where a chunk is, or was.
fn held_at(state: &State, chunk: Chunk) -> u8 {
    if chunk.segment != IN_LOG {
        return state.disk[chunk.segment as usize];
    }
    match state.log[chunk.generation as usize - 1] {
        Record::Write { content, .. } if chunk.generation > state.tail => content,
        _ => TORN,
    }
}

/// What the blocks of the volume and of its snapshot hold by the records.
fn contents(state: &State) -> ([u8; BLOCKS], Option<[u8; BLOCKS]>) {
    let (mut head, mut snapshot) = ([0; BLOCKS], None);
    for record in &state.log[..state.issued as usize] {
        match *record {
            Record::Write { block, content, .. } => head[block as usize] = content,
            Record::Snapshot { .. } => snapshot = Some(head),
            Record::Delete => snapshot = None,
            _ => {}
        }
    }
    (head, snapshot)
}

/// What is wrong in memory, if anything is.
fn wrong(state: &State) -> Option<String> {
    let volume = &state.memory;
    let (head, snapshot) = contents(state);
    let read = |entry: Entry| match (entry.id, volume.table[entry.id as usize].segment) {
        (0, _) => 0,
        (_, NOWHERE) => TORN,
        _ => held_at(state, volume.table[entry.id as usize]),
    };
    for (block, expected) in head.iter().enumerate() {
        let found = read(volume.map[block]);
        if found != *expected {
            return Some(format!("block {block} reads {found}, not {expected}"));
        }
    }
    match (snapshot, volume.snapshot.number) {
        (None, 0) => {}
        (Some(expected), 1) => {
            for (block, expected) in expected.iter().enumerate() {
                let found = read(volume.snapshot.map[block]);
                if found != *expected {
                    return Some(format!("block {block} of the snapshot reads {found}, not {expected}"));
                }
            }
        }
        _ => return Some("a snapshot is there that should not be, or is not and should be".into()),
    }
    for id in 1..IDS {
        let entries = volume.map.iter().filter(|entry| entry.id as usize == id).count();
        let expected = entries + usize::from(volume.dead[id]);
        if usize::from(volume.counts[id]) != expected {
            return Some(format!("the count of id {id} is {}, not {expected}", volume.counts[id]));
        }
        let only_there = |block: &usize| {
            let entry = volume.snapshot.map[*block];
            entry.id as usize == id && entry != volume.map[*block]
        };
        let expected = (0..BLOCKS).filter(only_there).count();
        if snapshot.is_some() && usize::from(volume.dead[id]) != expected {
            return Some(format!("the deadlist has id {id} {} times, not {expected}", volume.dead[id]));
        }
    }
    for segment in 0..SEGMENTS {
        let is_needed = volume.table.iter().any(|chunk| chunk.segment as usize == segment);
        if volume.segments[segment].in_use != is_needed {
            return Some(format!("segment {segment} is in use: {}", !is_needed));
        }
    }
    None
}

fn scenarios(rules: Rules) -> Vec<Config> {
    use Op::{Delete, Snapshot, Trim, Write};
    let config = |name, script: &[Op], segments, crashes, roots, moves, reads| Config {
        name,
        script: script.to_vec(),
        segments,
        crashes,
        roots,
        moves,
        reads,
        logs: str::contains(name, "log"),
        rules,
    };
    vec![
        config("a: duplicates and overwrites", &[Write(0, 1), Write(1, 1), Write(0, 2)], 3, 2, 1, 0, false),
        config("b: a segment is used again", &[Write(0, 1), Write(0, 2), Write(1, 3)], 2, 2, 1, 0, false),
        config("c: a zero count is revived", &[Write(0, 1), Trim(0), Write(1, 1)], 2, 2, 1, 0, false),
        config("d: a chunk is moved", &[Write(0, 1), Trim(0), Write(1, 2)], 3, 1, 1, 1, false),
        config(
            "e: ids and hints used again",
            &[Write(0, 1), Trim(0), Write(0, 2), Write(1, 1)],
            2,
            1,
            0,
            0,
            false,
        ),
        config("f: a reader", &[Write(0, 1), Write(0, 2), Write(1, 3)], 2, 0, 0, 0, true),
        config("g: a snapshot", &[Write(0, 1), Snapshot, Write(0, 2), Write(0, 1)], 3, 1, 1, 0, false),
        config("h: a snapshot is deleted", &[Write(0, 1), Snapshot, Trim(0), Delete], 2, 2, 1, 0, false),
        config("i: two roots", &[Write(0, 1), Write(1, 1), Trim(0)], 2, 1, 2, 0, false),
        config("j: a reader and a move", &[Write(0, 1), Write(1, 2)], 3, 0, 0, 2, true),
        config("k: bytes in the log", &[Write(0, 1), Write(1, 1)], 2, 2, 2, 1, false),
        config("l: bytes in the log, given up", &[Write(0, 1), Trim(0), Write(1, 2)], 2, 1, 1, 1, false),
    ]
}

fn mutations() -> Vec<(&'static str, Rules, &'static str)> {
    let rules = RULES;
    vec![
        ("positions", Rules { positions: false, ..rules }, "a"),
        ("names-old", Rules { names_old: false, ..rules }, "a"),
        ("names-fate", Rules { names_fate: false, ..rules }, "g"),
        ("root-after-durable", Rules { root_after_durable: false, ..rules }, "a"),
        ("tail-after-root", Rules { tail_after_root: false, ..rules }, "a"),
        ("tail-is-oldest", Rules { tail_is_oldest: false, ..rules }, "a"),
        ("tail-keeps-bytes", Rules { tail_keeps_bytes: false, ..rules }, "k"),
        ("no-page-beyond-snapshot", Rules { no_page_beyond_snapshot: false, ..rules }, "g"),
        ("pins", Rules { pins: false, ..rules }, "c"),
        ("give-up-rechecks", Rules { give_up_rechecks: false, ..rules }, "c"),
        ("move-rechecks", Rules { move_rechecks: false, ..rules }, "d"),
        ("match-checks-generation", Rules { match_checks_generation: false, ..rules }, "e"),
        ("reuse-after-durable", Rules { reuse_after_durable: false, ..rules }, "b"),
        ("reader-rechecks", Rules { reader_rechecks: false, ..rules }, "f"),
        ("reader-compares", Rules { reader_compares: false, ..rules }, "f"),
        ("deadlist", Rules { deadlist: false, ..rules }, "g"),
        ("births-grow", Rules { births_grow: false, ..rules }, "g"),
        ("deletion-names", Rules { deletion_names: false, ..rules }, "h"),
    ]
}

fn main() {
    explorer::run(scenarios, RULES, &mutations(), &[]);
}
