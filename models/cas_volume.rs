//! Explicit-state model of chunks of the cas volume: map, table and counts; duplicates, ids and segments that
//! are used again, moves, reads; records that join the journal, roots and replay (rules J1 and D1 to D3 of
//! docs/cas.md).
//!
//! Run: `cargo run --release -p calpe-models --bin cas-volume` (`explorer.rs` says what it accepts).
//!
//! Enumerated, breadth first, every interleaving of the steps of at most two writes of clients (look-up, then
//! the record), of giving segments up, of moving a chunk, of one reader, of answers and flushes, of a root,
//! and of crashes, after each of which everything goes on.
//!
//! The journal is a list of records, answered in order; `cas_journal.rs` has what is below. A crash leaves a
//! prefix that holds at least what was flushed. A segment that was overwritten has its old bytes after a
//! crash that does not leave what had been answered before, and is torn if no record is left that names what
//! is new. A hash is the content; contents 1 and 3 are the same in the bits that the index has.
//!
//! Checked after every step and every start, against the list of records alone: every block reads what the
//! newest record says; the count of an id is the number of entries with it; a segment has as many chunks as
//! the table says, and is in use if it has any. A reader gets what its block held at some time while it read,
//! and no error.
//!
//! Bounds: two or three blocks; three ids; two or three segments of one chunk each; counts up to two; scripts
//! of up to seven writes; one root; two crashes. Not modelled: compression, damage.

use calpe_models::{self as explorer, Model};

const BLOCKS: usize = 3;
/// Ids begin with 1; id 0 is a hole.
const IDS: usize = 4;
const SEGMENTS: usize = 3;
const RECORDS_MAX: usize = 12;
const WRITERS: usize = 2;
const COUNT_MAX: u8 = 2;

const NOWHERE: u8 = 255;
const TORN: u8 = 255;
/// Of bytes that no record names yet.
const UNNAMED: u8 = 254;

/// One switch for each rule: true is the rule, false what the mutation does instead.
#[derive(Clone, Copy)]
struct Rules {
    /// (J1) Records are in the journal in the order in which they changed memory.
    joins_in_order: bool,
    /// (J1) The id of a new chunk is chosen when its record joins.
    ids_are_chosen_late: bool,
    /// (K1) A root has all pages as they were at one position.
    root_is_sharp: bool,
    /// (D1) A duplicate is compared with the table once more when its record joins.
    duplicate_compares: bool,
    /// (D1) All bits of the hash are compared.
    all_bits: bool,
    /// (D1) A chunk that nothing refers to is no duplicate.
    duplicate_is_counted: bool,
    /// (D1) The table has nothing of an id that is free.
    free_id_is_void: bool,
    /// (D1) A chunk whose count is at its maximum is no duplicate.
    count_is_below_maximum: bool,
    /// (D2) A move joins only while the id is where it was copied from.
    move_compares_place: bool,
    /// (D2) And while it has the hash with which the copy was verified.
    move_compares_hash: bool,
    /// (D2) And while it is counted.
    move_is_counted: bool,
    /// (D3) A reader looks at map and table at one moment.
    reads_at_once: bool,
    /// (D3) It compares what it read with the hash.
    read_compares: bool,
    /// (D3) After a mismatch it looks up again.
    read_is_repeated: bool,
    /// (D3) An error says that nothing has changed, not even what was in the segment.
    read_sees_reuse: bool,
    /// (K2) A segment is used again when the record that gave it up is answered.
    reuse_after_answer: bool,
}

const RULES: Rules = Rules {
    joins_in_order: true,
    ids_are_chosen_late: true,
    root_is_sharp: true,
    duplicate_compares: true,
    all_bits: true,
    duplicate_is_counted: true,
    free_id_is_void: true,
    count_is_below_maximum: true,
    move_compares_place: true,
    move_compares_hash: true,
    move_is_counted: true,
    reads_at_once: true,
    read_compares: true,
    read_is_repeated: true,
    read_sees_reuse: true,
    reuse_after_answer: true,
};

/// An entry of the table: `content` is the hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Chunk {
    segment: u8,
    content: u8,
}

const NO_CHUNK: Chunk = Chunk { segment: NOWHERE, content: 0 };

/// What the pages say.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Pages {
    map: [u8; BLOCKS],
    counts: [u8; IDS],
    table: [Chunk; IDS],
    in_use: [bool; SEGMENTS],
    /// Chunks that are used, by segment.
    live: [u8; SEGMENTS],
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Record {
    /// `segment`: where the chunk is, if it is a new one. The content is what the client wrote.
    Write {
        block: u8,
        id: u8,
        content: u8,
        segment: u8,
    },
    GiveUp {
        segment: u8,
    },
    Move {
        id: u8,
        from: u8,
        to: u8,
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
    Waits,
    /// It looks up again after a mismatch.
    Repeats {
        found: Lookup,
        held: u8,
    },
    HasMap {
        id: u8,
        held: u8,
    },
    HasTable {
        found: Lookup,
        held: u8,
    },
    Over,
}

/// What a reader found, and how often the segment had been written to.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Lookup {
    id: u8,
    chunk: Chunk,
    uses: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Mover {
    id: u8,
    from: Chunk,
    to: u8,
}

/// The bytes of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Bytes {
    content: u8,
    /// What was there before, and is again if a crash leaves fewer records than had been answered.
    old: u8,
    answered: u8,
    /// The record without which the bytes are torn by a crash.
    named_by: u8,
    /// How often they were written, as long as the volume runs.
    uses: u8,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    memory: Pages,
    root: Pages,
    position: u8,
    /// Pages for the next root, of this position.
    saving: Option<(Pages, u8)>,
    journal: Vec<Record>,
    answered: u8,
    durable: u8,
    disk: [Bytes; SEGMENTS],
    reserved: u8,
    freed_by: [u8; SEGMENTS],
    writers: [Writer; WRITERS],
    mover: Option<Mover>,
    /// For the bits of a hash that it has, the id that was stored last.
    index: [u8; 2],
    reader: Reader,
    next: u8,
    crashes: u8,
    roots: u8,
    moves: u8,
}

#[derive(Clone)]
struct Config {
    name: &'static str,
    /// Blocks and what is written to them; content 0 is a TRIM.
    script: Vec<(u8, u8)>,
    segments: usize,
    crashes: u8,
    roots: u8,
    moves: u8,
    reads: bool,
    rules: Rules,
}

type Step = explorer::Step<State>;

impl Pages {
    fn apply(&mut self, record: Record, rules: &Rules) {
        match record {
            Record::Write { block, id, content, segment } => {
                if segment != NOWHERE {
                    self.table[id as usize] = Chunk { segment, content };
                    self.in_use[segment as usize] = true;
                    self.live[segment as usize] += 1;
                }
                if id != 0 {
                    self.counts[id as usize] = (self.counts[id as usize] + 1).min(COUNT_MAX);
                }
                let old = std::mem::replace(&mut self.map[block as usize], id) as usize;
                if old != 0 {
                    self.counts[old] = self.counts[old].wrapping_sub(1);
                    if self.counts[old] == 0 {
                        self.leave(self.table[old].segment);
                        if rules.free_id_is_void {
                            self.table[old] = NO_CHUNK;
                        }
                    }
                }
            }
            Record::GiveUp { segment } => self.in_use[segment as usize] = false,
            Record::Move { id, from, to } => {
                self.table[id as usize].segment = to;
                self.in_use[to as usize] = true;
                self.live[to as usize] += 1;
                self.leave(from);
            }
        }
    }

    fn leave(&mut self, segment: u8) {
        let live = &mut self.live[segment as usize];
        *live = live.wrapping_sub(1);
    }
}

impl Model for Config {
    type State = State;

    fn name(&self) -> &str {
        self.name
    }

    fn start(&self) -> State {
        let pages = Pages {
            map: [0; BLOCKS],
            counts: [0; IDS],
            table: [NO_CHUNK; IDS],
            in_use: [false; SEGMENTS],
            live: [0; SEGMENTS],
        };
        State {
            memory: pages,
            root: pages,
            position: 0,
            saving: None,
            journal: vec![],
            answered: 0,
            durable: 0,
            disk: Default::default(),
            reserved: 0,
            freed_by: [0; SEGMENTS],
            writers: [Writer::Idle; WRITERS],
            mover: None,
            index: [0; 2],
            reader: if self.reads { Reader::Waits } else { Reader::Over },
            next: 0,
            crashes: 0,
            roots: 0,
            moves: 0,
        }
    }

    fn steps(&self, state: &State, steps: &mut Vec<Step>) {
        self.client_steps(state, steps);
        if state.journal.len() < RECORDS_MAX {
            for at in 0..WRITERS {
                self.join(state, at, steps);
            }
            self.background_steps(state, steps);
        }
        self.reader_steps(state, steps);
        self.root_steps(state, steps);
        self.crashes(state, steps);
        for step in steps.iter_mut().filter(|step| step.wrong.is_none()) {
            step.wrong = wrong(&step.after);
        }
    }
}

impl Config {
    /// Puts a record into the journal, and applies it in memory.
    fn issue(&self, state: &mut State, record: Record) {
        let is_last_open = state.journal.len() > state.answered as usize;
        if !self.rules.joins_in_order && is_last_open {
            state.journal.insert(state.journal.len() - 1, record);
        } else {
            state.journal.push(record);
        }
        state.memory.apply(record, &self.rules);
        let held_by = match &mut state.reader {
            Reader::HasMap { held, .. } | Reader::HasTable { held, .. } | Reader::Repeats { held, .. } => {
                held
            }
            Reader::Waits | Reader::Over => return,
        };
        if let Record::Write { block: 0, content, .. } = record {
            *held_by |= 1 << content;
        }
    }

    /// Whether the chunk of an id may stand for this content.
    fn is_duplicate(&self, state: &State, id: u8, content: u8) -> bool {
        let (count, chunk) = (state.memory.counts[id as usize], state.memory.table[id as usize]);
        id != 0
            && (count > 0 || !self.rules.duplicate_is_counted)
            && (count < COUNT_MAX || !self.rules.count_is_below_maximum)
            && match self.rules.all_bits {
                true => chunk.content == content,
                false => chunk.content % 2 == content % 2 && chunk.content != 0,
            }
    }

    /// The one that was given up last, if any: using it again soon is what may go wrong.
    fn free_segment(&self, state: &State) -> Option<u8> {
        let is_free = |segment: &usize| {
            !state.memory.in_use[*segment]
                && state.reserved >> segment & 1 == 0
                && (!self.rules.reuse_after_answer || state.freed_by[*segment] <= state.answered)
        };
        let free = (0..self.segments).filter(is_free);
        free.max_by_key(|segment| state.freed_by[*segment]).map(|segment| segment as u8)
    }

    fn free_id(&self, state: &State) -> Option<u8> {
        (1..IDS).find(|id| state.memory.counts[*id] == 0).map(|id| id as u8)
    }

    /// Writes a chunk to a segment that is free.
    fn write_segment(&self, state: &mut State, content: u8) -> Option<u8> {
        let segment = self.free_segment(state)?;
        state.reserved |= 1 << segment;
        let bytes = &mut state.disk[segment as usize];
        let uses = bytes.uses + u8::from(self.reads);
        let (old, answered) = (bytes.content, state.answered);
        *bytes = Bytes { content, old, answered, named_by: UNNAMED, uses };
        Some(segment)
    }

    fn new_chunk(&self, state: &mut State, writer: usize, block: u8, content: u8) -> Option<u8> {
        let id = self.free_id(state)?;
        let segment = self.write_segment(state, content)?;
        state.writers[writer] = Writer::New { block, id, segment, content };
        Some(segment)
    }

    fn client_steps(&self, state: &State, steps: &mut Vec<Step>) {
        let idle = state.writers.iter().position(|writer| *writer == Writer::Idle);
        let (Some((block, content)), Some(at)) = (self.script.get(state.next as usize).copied(), idle) else {
            return;
        };
        let mut after = state.clone();
        after.next += 1;
        let id = state.index[content as usize % 2];
        if content == 0 {
            if state.journal.len() < RECORDS_MAX {
                self.issue(&mut after, Record::Write { block, id: 0, content, segment: NOWHERE });
                steps.push(Step::new(format!("record: block {block} is trimmed"), after));
            }
        } else if self.is_duplicate(state, id, content) {
            after.writers[at] = Writer::Duplicate { block, id, content };
            steps.push(Step::new(format!("block {block} is to be {content}: id {id} has it"), after));
        } else if let Some(segment) = self.new_chunk(&mut after, at, block, content) {
            let text = format!("block {block} is to be {content}: new, into segment {segment}");
            steps.push(Step::new(text, after));
        }
    }

    /// The record of a write joins.
    fn join(&self, state: &State, at: usize, steps: &mut Vec<Step>) {
        let mut after = state.clone();
        after.writers[at] = Writer::Idle;
        match state.writers[at] {
            Writer::Idle => {}
            Writer::Duplicate { block, id, content }
                if self.is_duplicate(state, id, content) || !self.rules.duplicate_compares =>
            {
                self.issue(&mut after, Record::Write { block, id, content, segment: NOWHERE });
                steps.push(Step::new(format!("record: block {block} is id {id}"), after));
            }
            Writer::Duplicate { block, content, .. } => {
                if let Some(segment) = self.new_chunk(&mut after, at, block, content) {
                    let text = format!("block {block}: no duplicate any more, into segment {segment}");
                    steps.push(Step::new(text, after));
                }
            }
            Writer::New { block, id, segment, content } => {
                let id = if self.rules.ids_are_chosen_late { self.free_id(state) } else { Some(id) };
                let Some(id) = id else { return };
                after.reserved &= !(1 << segment);
                self.issue(&mut after, Record::Write { block, id, content, segment });
                after.disk[segment as usize].named_by = after.journal.len() as u8;
                after.index[content as usize % 2] = id;
                let text = format!("record: block {block} is id {id}, in segment {segment}: {content}");
                steps.push(Step::new(text, after));
            }
        }
    }

    fn background_steps(&self, state: &State, steps: &mut Vec<Step>) {
        for segment in 0..self.segments {
            if state.memory.in_use[segment] && state.memory.live[segment] == 0 {
                let mut after = state.clone();
                self.issue(&mut after, Record::GiveUp { segment: segment as u8 });
                after.freed_by[segment] = after.journal.len() as u8;
                steps.push(Step::new(format!("record: segment {segment} is given up"), after));
            }
        }
        if let Some(Mover { id, from, to }) = state.mover {
            let mut after = state.clone();
            after.mover = None;
            after.reserved &= !(1 << to);
            let chunk = state.memory.table[id as usize];
            let may_join = (chunk.segment == from.segment || !self.rules.move_compares_place)
                && (chunk.content == from.content || !self.rules.move_compares_hash)
                && (state.memory.counts[id as usize] > 0 || !self.rules.move_is_counted);
            let text = if may_join {
                self.issue(&mut after, Record::Move { id, from: from.segment, to });
                after.disk[to as usize].named_by = after.journal.len() as u8;
                format!("record: id {id} is in segment {to}")
            } else {
                format!("the copy of id {id} is dropped")
            };
            steps.push(Step::new(text, after));
        } else if state.moves < self.moves {
            for id in (1..IDS).filter(|id| state.memory.counts[*id] > 0) {
                let mut after = state.clone();
                let from = state.memory.table[id];
                if let Some(to) = self.write_segment(&mut after, from.content) {
                    after.mover = Some(Mover { id: id as u8, from, to });
                    after.moves += 1;
                    let text = format!("id {id} is copied from segment {} to {to}", from.segment);
                    steps.push(Step::new(text, after));
                }
            }
        }
    }

    fn look_up(&self, state: &State, id: u8) -> Lookup {
        let chunk = state.memory.table[id as usize];
        let uses = state.disk.get(chunk.segment as usize).map_or(0, |bytes| bytes.uses);
        Lookup { id, chunk, uses: if self.rules.read_sees_reuse { uses } else { 0 } }
    }

    /// A reader of block 0.
    fn reader_steps(&self, state: &State, steps: &mut Vec<Step>) {
        let id = state.memory.map[0];
        let mut after = state.clone();
        match state.reader {
            Reader::Waits if id != 0 => {
                let held = 1 << contents(state)[0];
                after.reader = match self.rules.reads_at_once {
                    true => Reader::HasTable { found: self.look_up(state, id), held },
                    false => Reader::HasMap { id, held },
                };
                steps.push(Step::new(format!("a reader finds id {id}"), after));
            }
            Reader::HasMap { id, held } => {
                let found = self.look_up(state, id);
                after.reader =
                    if found.chunk == NO_CHUNK { Reader::Waits } else { Reader::HasTable { found, held } };
                steps.push(Step::new(format!("the reader finds segment {}", found.chunk.segment), after));
            }
            Reader::HasTable { found, held } => {
                let content = state.disk[found.chunk.segment as usize].content;
                let is_right = content == found.chunk.content || !self.rules.read_compares;
                after.reader = if is_right { Reader::Over } else { Reader::Repeats { found, held } };
                let wrong = if is_right && (content > 7 || held >> content & 1 == 0) {
                    Some(format!("the reader gets {content}, which its block did not hold"))
                } else {
                    (!is_right && !self.rules.read_is_repeated).then(|| "the reader gets an error".into())
                };
                steps.push(Step { text: format!("the reader reads {content}"), after, wrong });
            }
            Reader::Repeats { found: before, held } => {
                let found = self.look_up(state, id);
                let is_same = id != 0 && found == before;
                after.reader = if id == 0 { Reader::Over } else { Reader::HasTable { found, held } };
                let wrong = is_same.then(|| "the reader gets an error".into());
                steps.push(Step { text: format!("the reader finds id {id}"), after, wrong });
            }
            Reader::Waits | Reader::Over => {}
        }
    }

    fn root_steps(&self, state: &State, steps: &mut Vec<Step>) {
        let issued = state.journal.len() as u8;
        if state.answered < issued {
            let mut after = state.clone();
            after.answered += 1;
            steps.push(Step::new(format!("record {} is answered", after.answered), after));
        }
        if self.crashes == 0 {
            return;
        }
        if state.durable < state.answered {
            let mut after = state.clone();
            after.durable = state.answered;
            steps.push(Step::new("flush", after));
        }
        if let Some((mut pages, position)) = state.saving {
            if position <= state.answered {
                let mut after = state.clone();
                if !self.rules.root_is_sharp {
                    pages.map = state.memory.map;
                }
                (after.root, after.position, after.saving) = (pages, position, None);
                after.durable = after.durable.max(position);
                steps.push(Step::new("the root counts", after));
            }
        } else if state.roots < self.roots && issued > state.position {
            let mut after = state.clone();
            after.saving = Some((state.memory, issued));
            after.roots += 1;
            steps.push(Step::new(format!("pages for a root with {issued} records"), after));
        }
    }

    fn crashes(&self, state: &State, steps: &mut Vec<Step>) {
        if state.crashes == self.crashes {
            return;
        }
        for left in state.durable..=state.journal.len() as u8 {
            let mut memory = state.root;
            for record in &state.journal[state.position as usize..left as usize] {
                memory.apply(*record, &self.rules);
            }
            let mut after = State {
                memory,
                saving: None,
                journal: state.journal[..left as usize].to_vec(),
                answered: left,
                durable: left,
                reserved: 0,
                freed_by: [0; SEGMENTS],
                writers: [Writer::Idle; WRITERS],
                mover: None,
                reader: if self.reads { Reader::Waits } else { Reader::Over },
                crashes: state.crashes + 1,
                ..state.clone()
            };
            for bytes in &mut after.disk {
                let content = match *bytes {
                    Bytes { content, named_by, .. } if named_by <= left => content,
                    Bytes { old, answered, .. } if answered > left => old,
                    _ => TORN,
                };
                *bytes = Bytes { content, old: content, answered: 0, named_by: 0, uses: 0 };
            }
            let text = format!("CRASH: {left} of {} records are left", state.journal.len());
            steps.push(Step::new(text, after));
        }
    }
}

/// What the blocks hold by the records.
fn contents(state: &State) -> [u8; BLOCKS] {
    let mut contents = [0; BLOCKS];
    for record in &state.journal {
        if let Record::Write { block, content, .. } = *record {
            contents[block as usize] = content;
        }
    }
    contents
}

/// What is wrong in memory, if anything is.
fn wrong(state: &State) -> Option<String> {
    let pages = &state.memory;
    for (block, expected) in contents(state).into_iter().enumerate() {
        let found = match (pages.map[block], pages.table[pages.map[block] as usize].segment) {
            (0, _) => 0,
            (_, NOWHERE) => TORN,
            (_, segment) => state.disk[segment as usize].content,
        };
        if found != expected {
            return Some(format!("block {block} reads {found}, not {expected}"));
        }
    }
    for id in 1..IDS {
        let expected = pages.map.iter().filter(|entry| **entry as usize == id).count();
        if pages.counts[id] as usize != expected {
            return Some(format!("the count of id {id} is {}, not {expected}", pages.counts[id]));
        }
    }
    for segment in 0..SEGMENTS {
        let is_here = |id: &usize| pages.counts[*id] > 0 && pages.table[*id].segment as usize == segment;
        let expected = (1..IDS).filter(is_here).count();
        if pages.live[segment] as usize != expected {
            return Some(format!("segment {segment} has {expected} chunks, not {}", pages.live[segment]));
        }
        if expected > 0 && !pages.in_use[segment] {
            return Some(format!("segment {segment} has a chunk and is not in use"));
        }
    }
    None
}

fn scenarios(rules: Rules) -> Vec<Config> {
    let config = |name, script: &[(u8, u8)], segments, crashes, roots, moves| Config {
        name,
        script: script.to_vec(),
        segments,
        crashes,
        roots,
        moves,
        reads: str::contains(name, "reader"),
        rules,
    };
    vec![
        config("a: duplicates and overwrites", &[(0, 1), (1, 1), (0, 2), (1, 2)], 3, 2, 1, 0),
        config("b: a segment is used again", &[(0, 1), (0, 2), (1, 3), (1, 1)], 2, 2, 1, 0),
        config("c: ids are used again", &[(0, 1), (0, 0), (0, 2), (1, 1), (0, 1)], 3, 1, 1, 0),
        config("d: more than a count can say", &[(0, 1), (1, 1), (2, 1), (0, 0), (1, 0)], 3, 1, 1, 0),
        config("e: chunks are moved", &[(0, 1), (0, 0), (0, 2), (1, 2)], 3, 1, 1, 1),
        config("f: moves, and ids used again", &[(0, 1), (0, 0), (0, 1), (0, 0), (1, 3)], 3, 0, 0, 2),
        config("g: a reader", &[(0, 1), (0, 2), (1, 3), (0, 3)], 2, 0, 0, 0),
        config("h: a reader and moves", &[(0, 1), (1, 2), (0, 2)], 3, 0, 0, 2),
        config(
            "i: a reader, and the same again",
            &[(0, 1), (0, 2), (1, 3), (1, 0), (0, 0), (0, 1), (0, 3)],
            2,
            0,
            0,
            0,
        ),
    ]
}

fn mutations() -> Vec<(&'static str, Rules, &'static str)> {
    let rules = RULES;
    let any_free_id = Rules { duplicate_is_counted: false, free_id_is_void: false, ..rules };
    vec![
        ("joins-in-order", Rules { joins_in_order: false, ..rules }, "a"),
        ("ids-are-chosen-late", Rules { ids_are_chosen_late: false, ..rules }, "ab"),
        ("root-is-sharp", Rules { root_is_sharp: false, ..rules }, "a"),
        ("duplicate-compares", Rules { duplicate_compares: false, ..rules }, "c"),
        ("all-bits", Rules { all_bits: false, ..rules }, "b"),
        ("duplicate-is-counted, free-id-is-void", any_free_id, "bc"),
        ("count-is-below-maximum", Rules { count_is_below_maximum: false, ..rules }, "d"),
        ("move-compares-place", Rules { move_compares_place: false, ..rules }, "ef"),
        ("move-compares-hash", Rules { move_compares_hash: false, ..rules }, "ef"),
        ("move-is-counted", Rules { move_is_counted: false, free_id_is_void: false, ..rules }, "ef"),
        ("reads-at-once", Rules { reads_at_once: false, ..rules }, "g"),
        ("read-compares", Rules { read_compares: false, ..rules }, "g"),
        ("read-is-repeated", Rules { read_is_repeated: false, ..rules }, "g"),
        ("read-sees-reuse", Rules { read_sees_reuse: false, ..rules }, "i"),
        ("reuse-after-answer", Rules { reuse_after_answer: false, ..rules }, "b"),
    ]
}

fn main() {
    let variants = [
        ("duplicate-is-counted", Rules { duplicate_is_counted: false, ..RULES }),
        ("free-id-is-void", Rules { free_id_is_void: false, ..RULES }),
        ("move-is-counted", Rules { move_is_counted: false, ..RULES }),
    ];
    explorer::run(scenarios, RULES, &mutations(), &variants);
}
