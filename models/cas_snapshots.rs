//! Explicit-state model of snapshots of the cas volume: map pages that maps share and copy, births, deletion
//! by comparing with the successor, clones and rolling back (rules S1 to S3 of docs/cas.md).
//!
//! Run: `cargo run --release -p calpe-models --bin cas-snapshots` (`explorer.rs` says what it accepts).
//!
//! Enumerated: every interleaving of the operations of a script, or of every sequence of so many operations
//! of a menu, with the steps of deletions, a block each; and with a root and a crash, of which each leaves a
//! number of records, and which replays them from the root.
//!
//! A chunk is its id, and what a block holds is an id. Each entry of a map carries the record that made it,
//! at which no rule looks. Checked after every step: every block of every volume and snapshot is what the
//! records say; the count of an id is the number of different entries with it that are in some map, those
//! left out that a deletion has passed; exactly the map pages are used that some map names. So nothing leaks
//! and nothing is freed too early. What is replayed is what was in memory.
//!
//! Bounds: maps of a top page and two leaves of two blocks; three ids; six volumes and snapshots.

use calpe_models::{self as explorer, Model};

const LEAVES: usize = 2;
const SLOTS: usize = 2;
const BLOCKS: usize = LEAVES * SLOTS;
const PAGES: usize = 18;
/// Ids begin with 1; id 0 is a hole.
const IDS: usize = 4;
/// Volumes and snapshots.
const CATALOGUE: usize = 6;
const NONE: u8 = 255;

/// One switch for each rule: true is the rule, false what the mutation does instead.
#[derive(Clone, Copy)]
struct Rules {
    /// (S1) An overwritten entry that is shared keeps its count.
    entries_are_shared: bool,
    /// (S1) A page that is shared is copied.
    pages_are_shared: bool,
    /// (S1) A new entry is younger than every snapshot.
    births_grow: bool,
    /// (S2) Entries that the successor has, too, keep their count.
    compares_entries: bool,
    /// (S2) An entry with the same id is another one if its birth is another.
    compares_births: bool,
    /// (S2) Pages that the successor has, too, are kept.
    compares_pages: bool,
    /// (S2) Entries born up to the predecessor keep their count.
    predecessor_keeps_entries: bool,
    /// (S2) Pages born up to the predecessor are kept.
    predecessor_keeps_pages: bool,
    /// (S2) An overwrite is judged without the snapshot where its deletion has passed.
    without_where_passed: bool,
    /// (S2) And with it elsewhere.
    with_elsewhere: bool,
    /// (S2) A page is passed when all of its blocks are (else: when the block that is overwritten is).
    pages_pass_whole: bool,
    /// (S2) The successor is the next snapshot, also if it is made during the deletion (else: the head).
    successor_is_next: bool,
    /// (S2) One deletion of a volume goes on at a time.
    one_at_a_time: bool,
    /// (S2) Of those that wait, the newest begins.
    newest_first: bool,
    /// (S3) The origin of a clone is the predecessor of what the clone has.
    origin_is_predecessor: bool,
    /// (S3) An origin is deleted after its clones.
    origin_after_clones: bool,
    /// (S3) A snapshot that a rollback makes has a number of its own.
    rollback_counts: bool,
    /// (K1) A root has all pages as they were at one position.
    root_is_sharp: bool,
}

const RULES: Rules = Rules {
    entries_are_shared: true,
    pages_are_shared: true,
    births_grow: true,
    compares_entries: true,
    compares_births: true,
    compares_pages: true,
    predecessor_keeps_entries: true,
    predecessor_keeps_pages: true,
    without_where_passed: true,
    with_elsewhere: true,
    pages_pass_whole: true,
    successor_is_next: true,
    one_at_a_time: true,
    newest_first: true,
    origin_is_predecessor: true,
    origin_after_clones: true,
    rollback_counts: true,
    root_is_sharp: true,
};

/// An entry of a map: `id` is a chunk's, or of a top page the number of a leaf.
#[derive(Clone, Copy, Eq, PartialEq, Hash, Default, Debug)]
struct Slot {
    id: u8,
    birth: u8,
    /// The record that made it.
    made_by: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
struct Page {
    is_used: bool,
    slots: [Slot; SLOTS],
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Kind {
    Free,
    Volume,
    Snapshot,
    /// A snapshot or a volume that is being deleted.
    Going,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Map {
    kind: Kind,
    top: Slot,
    number: u8,
    before: u8,
    after: u8,
    /// Blocks below have been dealt with.
    cursor: u8,
}

const NO_MAP: Map = Map {
    kind: Kind::Free,
    top: Slot { id: 0, birth: 0, made_by: 0 },
    number: 0,
    before: NONE,
    after: NONE,
    cursor: 0,
};

/// What the pages of the volume say, and what is to be read by the records.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Memory {
    counts: [u8; IDS],
    /// By their numbers; 0 is none.
    pages: [Page; PAGES],
    maps: [Map; CATALOGUE],
    /// Of the next snapshot.
    next_number: u8,
    expected: [[u8; BLOCKS]; CATALOGUE],
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Record {
    /// With id 0 the block becomes a hole.
    Map {
        volume: u8,
        block: u8,
        id: u8,
    },
    /// All blocks of a leaf become holes.
    Unmap {
        volume: u8,
        leaf: u8,
    },
    Snapshot {
        volume: u8,
        at: u8,
    },
    Clone {
        origin: u8,
        at: u8,
    },
    Rollback {
        volume: u8,
        at: u8,
    },
    Delete {
        at: u8,
    },
    DeleteStep {
        at: u8,
        upto: u8,
    },
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    memory: Memory,
    root: Memory,
    /// The records since the root, where there are crashes.
    records: Vec<Record>,
    /// How many records there were before the root.
    position: u8,
    /// How many operations there were.
    next: u8,
    roots: u8,
    crashes: u8,
}

#[derive(Clone, Copy)]
enum Op {
    Write(u8, u8, u8),
    Trim(u8, u8),
    Snapshot(u8),
    Clone(u8),
    Rollback(u8),
    Delete(u8),
}

struct Config {
    name: &'static str,
    /// One after the other.
    script: Vec<Op>,
    /// After the script so many of these, in any order and any number of times.
    menu: Vec<Op>,
    operations: u8,
    crashes: u8,
    roots: u8,
    rules: Rules,
}

type Step = explorer::Step<State>;

impl Memory {
    fn new() -> Memory {
        let mut maps = [NO_MAP; CATALOGUE];
        maps[0].kind = Kind::Volume;
        Memory {
            counts: [0; IDS],
            pages: [Page::default(); PAGES],
            maps,
            next_number: 1,
            expected: [[0; BLOCKS]; CATALOGUE],
        }
    }

    fn count(&mut self, id: u8, by: i8) {
        if id != 0 {
            self.counts[id as usize] = self.counts[id as usize].wrapping_add_signed(by);
        }
    }

    fn number_of(&self, map: u8) -> u8 {
        if map == NONE { 0 } else { self.maps[map as usize].number }
    }

    /// The number of a predecessor in the chain of `map`.
    fn number_before(&self, map: u8, before: u8, rules: &Rules) -> u8 {
        let is_origin = before != NONE && self.maps[before as usize].after != map;
        if is_origin && !rules.origin_is_predecessor { 0 } else { self.number_of(before) }
    }

    /// What was born up to this number in blocks up to `end` is shared by a snapshot of the volume.
    fn shared_upto(&self, volume: u8, end: u8, rules: &Rules) -> u8 {
        let (mut map, mut before) = (volume, self.maps[volume as usize].before);
        while before != NONE {
            let Map { kind, cursor, before: further, .. } = self.maps[before as usize];
            let is_passed = kind == Kind::Going
                && if rules.with_elsewhere { end <= cursor && rules.without_where_passed } else { true };
            if !is_passed {
                break;
            }
            (map, before) = (before, further);
        }
        self.number_before(map, before, rules)
    }

    /// The same for a page whose last block is before `end`, when `block` of it changes.
    fn page_shared_upto(&self, volume: u8, end: u8, block: u8, rules: &Rules) -> u8 {
        self.shared_upto(volume, if rules.pages_pass_whole { end } else { block + 1 }, rules)
    }

    fn new_page(&mut self, slots: [Slot; SLOTS], made_by: u8) -> Slot {
        let page = (1..PAGES).find(|page| !self.pages[*page].is_used).expect("as many as needed");
        self.pages[page] = Page { is_used: true, slots };
        Slot { id: page as u8, birth: self.next_number, made_by }
    }

    /// A page as it may be changed: itself, or a copy.
    fn own(&mut self, page: Slot, shared_upto: u8, made_by: u8, rules: &Rules) -> Slot {
        match page.id {
            0 => self.new_page(Default::default(), made_by),
            id if page.birth <= shared_upto && rules.pages_are_shared => {
                self.new_page(self.pages[id as usize].slots, made_by)
            }
            _ => page,
        }
    }

    fn leaf(&self, top: Slot, leaf: usize) -> Slot {
        self.pages[top.id as usize].slots[leaf]
    }

    fn entry(&self, top: Slot, block: usize) -> Slot {
        let leaf = self.leaf(top, block / SLOTS);
        self.pages[leaf.id as usize].slots[block % SLOTS]
    }

    fn count_off_overwritten(&mut self, volume: u8, block: u8, rules: &Rules) {
        let old = self.entry(self.maps[volume as usize].top, block as usize);
        if old.birth > self.shared_upto(volume, block + 1, rules) || !rules.entries_are_shared {
            self.count(old.id, -1);
        }
    }

    fn own_top(&mut self, volume: u8, block: u8, made_by: u8, rules: &Rules) -> usize {
        let shared = self.page_shared_upto(volume, BLOCKS as u8, block, rules);
        let top = self.own(self.maps[volume as usize].top, shared, made_by, rules);
        self.maps[volume as usize].top = top;
        top.id as usize
    }

    fn write(&mut self, volume: u8, block: u8, id: u8, made_by: u8, rules: &Rules) {
        self.expected[volume as usize][block as usize] = id;
        let old = self.entry(self.maps[volume as usize].top, block as usize);
        if old.id == 0 && id == 0 {
            return;
        }
        self.count_off_overwritten(volume, block, rules);
        self.count(id, 1);
        let top = self.own_top(volume, block, made_by, rules);
        let at = block as usize / SLOTS;
        let shared = self.page_shared_upto(volume, ((at + 1) * SLOTS) as u8, block, rules);
        let leaf = self.own(self.pages[top].slots[at], shared, made_by, rules);
        self.pages[top].slots[at] = leaf;
        let entry = Slot { id, birth: self.next_number, made_by };
        self.pages[leaf.id as usize].slots[block as usize % SLOTS] =
            if id == 0 { Slot::default() } else { entry };
    }

    fn unmap_leaf(&mut self, volume: u8, at: usize, made_by: u8, rules: &Rules) {
        let leaf = self.leaf(self.maps[volume as usize].top, at);
        let (first, end) = ((at * SLOTS) as u8, ((at + 1) * SLOTS) as u8);
        for block in first..end {
            self.expected[volume as usize][block as usize] = 0;
            self.count_off_overwritten(volume, block, rules);
        }
        if leaf.id == 0 {
            return;
        }
        let top = self.own_top(volume, first, made_by, rules);
        self.pages[top].slots[at] = Slot::default();
        if leaf.birth > self.page_shared_upto(volume, end, first, rules) {
            self.pages[leaf.id as usize] = Page::default();
        }
    }

    /// Adds a snapshot at the end of the chain of a volume.
    fn append(&mut self, volume: u8, at: u8, kind: Kind, rules: &Rules) {
        let Map { top, before, .. } = self.maps[volume as usize];
        self.maps[at as usize] =
            Map { kind, top, number: self.next_number, before, after: volume, cursor: 0 };
        self.expected[at as usize] = self.expected[volume as usize];
        if before != NONE && self.maps[before as usize].after == volume && rules.successor_is_next {
            self.maps[before as usize].after = at;
        }
        self.maps[volume as usize].before = at;
    }

    /// The snapshot that a volume can be rolled back to.
    fn newest(&self, volume: u8) -> Option<u8> {
        let (mut map, mut before) = (volume, self.maps[volume as usize].before);
        while before != NONE && self.maps[before as usize].after == map {
            if self.maps[before as usize].kind == Kind::Snapshot {
                return Some(before);
            }
            (map, before) = (before, self.maps[before as usize].before);
        }
        None
    }

    fn apply(&mut self, record: Record, made_by: u8, rules: &Rules) {
        match record {
            Record::Map { volume, block, id } => self.write(volume, block, id, made_by, rules),
            Record::Unmap { volume, leaf } => self.unmap_leaf(volume, leaf as usize, made_by, rules),
            Record::Snapshot { volume, at } => {
                self.append(volume, at, Kind::Snapshot, rules);
                self.next_number += u8::from(rules.births_grow);
            }
            Record::Clone { origin, at } => {
                let Map { top, .. } = self.maps[origin as usize];
                self.maps[at as usize] = Map { kind: Kind::Volume, top, before: origin, ..NO_MAP };
                self.expected[at as usize] = self.expected[origin as usize];
            }
            Record::Rollback { volume, at } => {
                let to = self.newest(volume).expect("a snapshot");
                self.append(volume, at, Kind::Going, rules);
                self.next_number += u8::from(rules.rollback_counts);
                self.maps[volume as usize].top = self.maps[to as usize].top;
                self.expected[volume as usize] = self.expected[to as usize];
            }
            Record::Delete { at } => {
                self.maps[at as usize].kind = Kind::Going;
            }
            Record::DeleteStep { at, upto } => {
                for block in self.maps[at as usize].cursor..upto {
                    self.delete_block(at, block as usize, rules);
                }
                self.maps[at as usize].cursor = upto;
                if upto as usize == BLOCKS {
                    self.end_deletion(at, rules);
                }
            }
        }
    }

    fn top_after(&self, map: &Map) -> Slot {
        if map.after == NONE { Slot::default() } else { self.maps[map.after as usize].top }
    }

    fn delete_block(&mut self, at: u8, block: usize, rules: &Rules) {
        let map = self.maps[at as usize];
        let before = self.number_before(at, map.before, rules);
        let (other, number) = (self.top_after(&map), block / SLOTS);
        let (leaf, other_leaf) = (self.leaf(map.top, number), self.leaf(other, number));
        let (entry, other_entry) = (self.entry(map.top, block), self.entry(other, block));
        let is_same = entry.id == other_entry.id
            && (entry.birth == other_entry.birth || !rules.compares_births)
            && rules.compares_entries;
        if !is_same && (entry.birth > before || !rules.predecessor_keeps_entries) {
            self.count(entry.id, -1);
        }
        if (block + 1).is_multiple_of(SLOTS) {
            self.free_page(leaf, other_leaf, before, rules);
        }
    }

    fn free_page(&mut self, page: Slot, other: Slot, before: u8, rules: &Rules) {
        let is_same = page.id == other.id && rules.compares_pages;
        if page.id != 0 && !is_same && (page.birth > before || !rules.predecessor_keeps_pages) {
            self.pages[page.id as usize] = Page::default();
        }
    }

    fn end_deletion(&mut self, at: u8, rules: &Rules) {
        let map = self.maps[at as usize];
        let before = self.number_before(at, map.before, rules);
        self.free_page(map.top, self.top_after(&map), before, rules);
        if map.before != NONE && self.maps[map.before as usize].after == at {
            self.maps[map.before as usize].after = map.after;
        }
        for other in &mut self.maps {
            if other.before == at {
                other.before = map.before;
            }
        }
        self.maps[at as usize] = NO_MAP;
        self.expected[at as usize] = [0; BLOCKS];
    }

    /// The volume in whose chain a snapshot is.
    fn volume_of(&self, mut map: u8) -> u8 {
        while self.maps[map as usize].after != NONE {
            map = self.maps[map as usize].after;
        }
        map
    }
}

impl Model for Config {
    type State = State;

    fn name(&self) -> &str {
        self.name
    }

    fn start(&self) -> State {
        let memory = Memory::new();
        State { memory, root: memory, records: vec![], position: 0, next: 0, roots: 0, crashes: 0 }
    }

    fn steps(&self, state: &State, steps: &mut Vec<Step>) {
        let next = state.next as usize;
        match self.script.get(next) {
            Some(op) => self.operation(state, *op, steps),
            None if next < self.script.len() + self.operations as usize => {
                self.menu.iter().for_each(|op| self.operation(state, *op, steps));
            }
            None => {}
        }
        self.deletion_steps(state, steps);
        self.root_steps(state, steps);
        for step in steps.iter_mut().filter(|step| step.wrong.is_none()) {
            step.wrong = wrong(&step.after.memory);
        }
    }
}

impl Config {
    fn issue(&self, state: &State, record: Record, is_operation: bool, steps: &mut Vec<Step>) {
        let mut after = state.clone();
        after.next += u8::from(is_operation);
        let made_by = state.position + state.records.len() as u8;
        after.memory.apply(record, made_by + 1, &self.rules);
        match self.crashes > 0 {
            true => after.records.push(record),
            false => after.position += 1,
        }
        steps.push(Step::new(format!("{record:?}"), after));
    }

    fn operation(&self, state: &State, op: Op, steps: &mut Vec<Step>) {
        let memory = &state.memory;
        let is = |map: u8, kind| memory.maps[map as usize].kind == kind;
        let free = memory.maps.iter().position(|map| map.kind == Kind::Free).map(|at| at as u8);
        let record = match (op, free) {
            (Op::Write(volume, block, id), _) if is(volume, Kind::Volume) => {
                Record::Map { volume, block, id }
            }
            (Op::Trim(volume, leaf), _) if is(volume, Kind::Volume) => Record::Unmap { volume, leaf },
            (Op::Snapshot(volume), Some(at)) if is(volume, Kind::Volume) => Record::Snapshot { volume, at },
            (Op::Clone(origin), Some(at)) if is(origin, Kind::Snapshot) => Record::Clone { origin, at },
            (Op::Rollback(volume), Some(at))
                if is(volume, Kind::Volume) && memory.newest(volume).is_some() =>
            {
                Record::Rollback { volume, at }
            }
            (Op::Delete(at), _) if self.may_be_deleted(memory, at) => Record::Delete { at },
            _ => return,
        };
        self.issue(state, record, true, steps);
    }

    fn may_be_deleted(&self, memory: &Memory, at: u8) -> bool {
        let Map { kind, before, after, .. } = memory.maps[at as usize];
        match kind {
            Kind::Snapshot => {
                let mut maps = (0..CATALOGUE as u8).filter(|map| *map != after);
                let is_origin = maps.any(|map| memory.maps[map as usize].before == at);
                !is_origin || !self.rules.origin_after_clones
            }
            Kind::Volume => before == NONE || memory.maps[before as usize].after != at,
            Kind::Free | Kind::Going => false,
        }
    }

    fn deletion_steps(&self, state: &State, steps: &mut Vec<Step>) {
        let memory = &state.memory;
        let going = || (0..CATALOGUE as u8).filter(|at| memory.maps[*at as usize].kind == Kind::Going);
        for at in going() {
            let volume = memory.volume_of(at);
            let others = || going().filter(|other| *other != at && memory.volume_of(*other) == volume);
            let is_under_way = |other: u8| memory.maps[other as usize].cursor > 0;
            let is_newer = |other: u8| memory.number_of(other) > memory.number_of(at);
            let must_wait = self.rules.one_at_a_time && others().any(is_under_way)
                || self.rules.newest_first && !is_under_way(at) && others().any(is_newer);
            if !must_wait {
                let upto = memory.maps[at as usize].cursor + 1;
                self.issue(state, Record::DeleteStep { at, upto }, false, steps);
            }
        }
    }

    fn root_steps(&self, state: &State, steps: &mut Vec<Step>) {
        if state.crashes == self.crashes {
            return;
        }
        for left in 0..=state.records.len() {
            let mut memory = state.root;
            for (at, record) in state.records[..left].iter().enumerate() {
                memory.apply(*record, state.position + at as u8 + 1, &self.rules);
            }
            let (records, crashes) = (state.records[..left].to_vec(), state.crashes + 1);
            let after = State { memory, records, crashes, ..state.clone() };
            let is_other = left == state.records.len() && memory != state.memory;
            let wrong = is_other.then(|| "what is replayed is not what was in memory".into());
            let text = format!("CRASH: {left} of {} records are left", state.records.len());
            steps.push(Step { text, after, wrong });
            if state.roots == self.roots {
                continue;
            }
            // A root at this position, though more records have joined.
            let mut after = state.clone();
            if !self.rules.root_is_sharp {
                memory.pages = state.memory.pages;
                memory.counts = state.memory.counts;
            }
            (after.root, after.records) = (memory, state.records[left..].to_vec());
            (after.position, after.roots) = (state.position + left as u8, state.roots + 1);
            steps.push(Step::new(format!("a root with {} records", after.position), after));
        }
    }
}

/// What is wrong in memory, if anything is.
fn wrong(memory: &Memory) -> Option<String> {
    let mut entries: Vec<(u8, u8)> = vec![];
    let mut named = [false; PAGES];
    for (at, map) in memory.maps.iter().enumerate().filter(|(_, map)| map.kind != Kind::Free) {
        let cursor = if map.kind == Kind::Going { map.cursor as usize } else { 0 };
        named[map.top.id as usize] = true;
        for block in cursor..BLOCKS {
            let entry = memory.entry(map.top, block);
            named[memory.leaf(map.top, block / SLOTS).id as usize] = true;
            if map.kind != Kind::Going && entry.id != memory.expected[at][block] {
                let expected = memory.expected[at][block];
                return Some(format!("block {block} of {at} holds {}, not {expected}", entry.id));
            }
            entries.push((entry.id, entry.made_by));
        }
    }
    entries.sort_unstable();
    entries.dedup();
    for id in 1..IDS {
        let expected = entries.iter().filter(|entry| entry.0 as usize == id).count();
        if memory.counts[id] as usize != expected {
            return Some(format!("the count of {id} is {}, not {expected}", memory.counts[id]));
        }
    }
    for (page, is_named) in named.iter().enumerate().skip(1) {
        if memory.pages[page].is_used != *is_named {
            return Some(format!("map page {page} is used: {}", !is_named));
        }
    }
    None
}

fn scenarios(rules: Rules) -> Vec<Config> {
    use Op::{Clone, Delete, Rollback, Snapshot, Trim, Write};
    let config = |name, script: &[Op], menu: &[Op], operations, crashes| Config {
        name,
        script: script.to_vec(),
        menu: menu.to_vec(),
        operations,
        crashes,
        roots: crashes,
        rules,
    };
    vec![
        config(
            "a: snapshots and deletions",
            &[Write(0, 0, 1)],
            &[Write(0, 0, 1), Write(0, 1, 2), Trim(0, 0), Snapshot(0), Delete(1), Delete(2), Delete(3)],
            6,
            0,
        ),
        config(
            "b: writes during a deletion",
            &[Write(0, 0, 1), Snapshot(0), Write(0, 0, 2), Write(0, 1, 1), Snapshot(0), Delete(2)],
            &[
                Write(0, 0, 1),
                Write(0, 1, 0),
                Write(0, 2, 2),
                Trim(0, 0),
                Snapshot(0),
                Rollback(0),
                Delete(1),
            ],
            4,
            0,
        ),
        config(
            "c: clones",
            &[Write(0, 0, 1), Snapshot(0), Clone(1)],
            &[
                Write(2, 0, 1),
                Write(0, 0, 2),
                Write(2, 1, 3),
                Snapshot(2),
                Snapshot(0),
                Delete(1),
                Delete(2),
                Delete(3),
            ],
            5,
            0,
        ),
        config(
            "d: rolled back",
            &[Write(0, 0, 1), Write(0, 2, 2), Snapshot(0)],
            &[Write(0, 0, 2), Write(0, 1, 1), Trim(0, 1), Snapshot(0), Rollback(0), Delete(1), Delete(2)],
            5,
            0,
        ),
        config(
            "e: a middle snapshot, and crashes",
            &[
                Write(0, 0, 1),
                Snapshot(0),
                Write(0, 0, 2),
                Write(0, 1, 1),
                Snapshot(0),
                Write(0, 0, 3),
                Delete(2),
                Trim(0, 0),
                Delete(1),
            ],
            &[],
            0,
            1,
        ),
        config(
            "f: a deletion, and two crashes",
            &[Write(0, 0, 1), Snapshot(0), Delete(1), Write(0, 0, 2), Rollback(0), Snapshot(0)],
            &[Write(0, 1, 1), Rollback(0)],
            2,
            2,
        ),
        config(
            "g: a clone, and a crash",
            &[
                Write(0, 0, 1),
                Snapshot(0),
                Clone(1),
                Write(2, 0, 2),
                Snapshot(2),
                Trim(2, 0),
                Delete(3),
                Delete(2),
                Delete(1),
            ],
            &[],
            0,
            1,
        ),
        config(
            "h: anything",
            &[],
            &[
                Write(0, 0, 1),
                Write(0, 1, 1),
                Write(2, 0, 1),
                Trim(0, 0),
                Snapshot(0),
                Snapshot(2),
                Clone(1),
                Rollback(0),
                Rollback(2),
                Delete(1),
                Delete(2),
                Delete(3),
            ],
            7,
            0,
        ),
    ]
}

fn main() {
    let rules = RULES;
    let mutations = [
        ("entries-are-shared", Rules { entries_are_shared: false, ..rules }, "a"),
        ("pages-are-shared", Rules { pages_are_shared: false, ..rules }, "a"),
        ("births-grow", Rules { births_grow: false, ..rules }, "a"),
        ("compares-entries", Rules { compares_entries: false, ..rules }, "a"),
        ("compares-births", Rules { compares_births: false, ..rules }, "a"),
        ("compares-pages", Rules { compares_pages: false, ..rules }, "a"),
        ("predecessor-keeps-entries", Rules { predecessor_keeps_entries: false, ..rules }, "ab"),
        ("predecessor-keeps-pages", Rules { predecessor_keeps_pages: false, ..rules }, "ab"),
        ("without-where-passed", Rules { without_where_passed: false, ..rules }, "ab"),
        ("with-elsewhere", Rules { with_elsewhere: false, ..rules }, "ab"),
        ("pages-pass-whole", Rules { pages_pass_whole: false, ..rules }, "ab"),
        ("successor-is-next", Rules { successor_is_next: false, ..rules }, "ab"),
        ("one-at-a-time", Rules { one_at_a_time: false, ..rules }, "ab"),
        ("origin-is-predecessor", Rules { origin_is_predecessor: false, ..rules }, "c"),
        ("origin-after-clones", Rules { origin_after_clones: false, ..rules }, "c"),
        ("rollback-counts", Rules { rollback_counts: false, ..rules }, "d"),
        ("newest-first", Rules { newest_first: false, ..rules }, "d"),
        ("root-is-sharp", Rules { root_is_sharp: false, ..rules }, "fe"),
    ];
    explorer::run(scenarios, rules, &mutations, &[]);
}
