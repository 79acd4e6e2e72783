//! Explicit-state model of snapshots of the cas volume: births, deadlists and what becomes of them when
//! snapshots are deleted, clones, and rolling back; with pages that are saved at different positions, and
//! crashes (rules C9 and C10, and the rules of pages; `cas_volume.rs` models chunks and segments).
//!
//! Run: `cargo run --release -p calpe-models --bin cas-snapshots` (`explorer.rs` says what it accepts).
//!
//! Enumerated: every interleaving of the operations of a script, the steps of a deletion, flushes, saving
//! single pages, writing the root, making it durable, moving the tail, and crashes, of which each leaves a
//! prefix of the records that holds at least what was flushed.
//!
//! A chunk is its id, and what a block holds is an id. Checked after every step: every block of every volume
//! and snapshot is what the records say; while nothing is being deleted, the count of an id is the number of
//! entries with it that some map has, where maps that share an entry have it together. During a deletion
//! counts may be higher, never lower.
//!
//! Pages: one for counts, one for the map of the first volume, one for its deadlist, and one for all that
//! snapshots and the clone have. Bounds: two blocks, three ids, two snapshots, one clone, scripts of up to
//! seven operations, one or two crashes. Not modelled: several deletions in one volume at a time, which the
//! rules do not allow; deleting a volume, which is trimming it.

use calpe_models::{self as explorer, Model};

const BLOCKS: usize = 2;
const IDS: usize = 4;
const BIRTHS: usize = 5;
const RECORDS_MAX: usize = 14;
const VOLUMES: usize = 2;
const SNAPSHOTS: usize = 2;

/// Pages in the order in which a record takes effect on them: a snapshot takes over a list before the list is
/// emptied.
const COUNTS: usize = 0;
const REST: usize = 1;
const DEADLIST: usize = 2;
const MAP: usize = 3;
const PAGES: usize = 4;
const PAGE_NAMES: [&str; PAGES] =
    ["counts", "snapshots and clone", "deadlist and intent of volume 0", "map of volume 0"];

/// One switch for each rule: true is the rule, false what the mutation does instead.
#[derive(Clone, Copy)]
struct Rules {
    /// An entry born up to the newest snapshot of its volume goes to the deadlist (else: is counted off).
    deadlist: bool,
    /// Overwriting an entry that a clone has from its origin changes nothing.
    clone_shares: bool,
    /// An origin is deleted after its clones.
    origin_after_clones: bool,
    /// A deletion counts off the entries born after the snapshot before (else: all that the next one lists).
    drops_own: bool,
    /// A deletion hands its own deadlist on.
    merges: bool,
    /// A deletion ends when both of these are done.
    ends_when_done: bool,
    /// Rolling back empties the deadlist.
    rollback_empties: bool,
    /// A write takes its block out of the intent to trim it (C10).
    writes_cut: bool,
    /// A snapshot takes over what is yet to be trimmed, and a clone and a rollback from the snapshot (C10).
    intents_are_inherited: bool,
    /// The record of a rollback names what it counts off (else: replay looks into the map).
    rollback_names: bool,
    /// No map page under a root includes records beyond a snapshot that the root lacks.
    no_map_beyond_snapshot: bool,
    /// The same for the deadlist, which the snapshot takes over.
    no_deadlist_beyond_snapshot: bool,
    /// No page of the map, or of intents, under a root lacks a rollback to a snapshot whose deletion the root
    /// includes.
    no_deletion_beyond_use: bool,
}

const RULES: Rules = Rules {
    deadlist: true,
    clone_shares: true,
    origin_after_clones: true,
    drops_own: true,
    merges: true,
    ends_when_done: true,
    rollback_empties: true,
    writes_cut: true,
    intents_are_inherited: true,
    rollback_names: true,
    no_map_beyond_snapshot: true,
    no_deadlist_beyond_snapshot: true,
    no_deletion_beyond_use: true,
};

/// `writer`: the volume in which it was written. An entry that a clone has from its origin is that of the
/// origin.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
struct Entry {
    id: u8,
    birth: u8,
    writer: u8,
}

/// How many entries of each id and birth a deadlist has.
type List = [[u8; BIRTHS]; IDS];

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Head {
    exists: bool,
    /// The number of the snapshot that it is a clone of; 0: it is no clone.
    origin: u8,
    map: [Entry; BLOCKS],
    dead: List,
    /// Blocks that read as zeroes and are yet to be trimmed, bit by block.
    intent: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Snapshot {
    /// 0: there is none.
    number: u8,
    volume: u8,
    map: [Entry; BLOCKS],
    dead: List,
    /// Blocks that read as zeroes whatever the map says. Their entries stay until the snapshot goes.
    intent: u8,
    is_deleting: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Pages {
    counts: [u8; IDS],
    heads: [Head; VOLUMES],
    snapshots: [Snapshot; SNAPSHOTS],
    /// The highest number that a snapshot was given.
    newest: u8,
    positions: [u8; PAGES],
}

/// A deadlist.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Owner {
    Head(u8),
    Snapshot(u8),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Fate {
    /// Another map has the entry, and counts it.
    Shared,
    CountedOff,
    Dead,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Record {
    None,
    Write {
        volume: u8,
        block: u8,
        entry: Entry,
        old: Entry,
        fate: Fate,
    },
    /// These blocks of the volume read as zeroes from now on.
    Intend {
        volume: u8,
        blocks: u8,
    },
    /// A block of the intent is trimmed.
    Trim {
        volume: u8,
        block: u8,
        old: Entry,
        fate: Fate,
    },
    Snapshot {
        at: u8,
        volume: u8,
        number: u8,
    },
    Clone {
        at: u8,
    },
    /// `counted_off`: ids that the volume had alone.
    Rollback {
        at: u8,
        counted_off: [u8; BLOCKS],
    },
    DeletionBegins {
        at: u8,
    },
    Drop {
        from: Owner,
        id: u8,
        birth: u8,
    },
    Merge {
        at: u8,
        to: Owner,
        id: u8,
        birth: u8,
    },
    DeletionEnds {
        at: u8,
    },
    CloneGone,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    memory: Pages,
    saved: Pages,
    saved_now: u8,
    written_root: Option<Pages>,
    root: Pages,
    log: [Record; RECORDS_MAX],
    issued: u8,
    durable: u8,
    tail: u8,
    next: u8,
    crashes: u8,
    roots: u8,
}

#[derive(Clone, Copy)]
enum Op {
    Write(u8, u8, u8),
    /// These blocks, bit by bit.
    Trim(u8, u8),
    Snapshot(u8, u8),
    Clone(u8),
    Rollback(u8),
    Delete(u8),
    CloneGone,
}

struct Config {
    name: &'static str,
    script: Vec<Op>,
    crashes: u8,
    roots: u8,
    rules: Rules,
}

type Step = explorer::Step<State>;

impl Pages {
    fn new() -> Pages {
        let mut heads = [Head::default(); VOLUMES];
        heads[0].exists = true;
        Pages { counts: [0; IDS], heads, snapshots: Default::default(), newest: 0, positions: [0; PAGES] }
    }

    fn list(&mut self, owner: Owner) -> &mut List {
        match owner {
            Owner::Head(volume) => &mut self.heads[volume as usize].dead,
            Owner::Snapshot(at) => &mut self.snapshots[at as usize].dead,
        }
    }

    /// The page that has a deadlist.
    fn page_of(owner: Owner) -> usize {
        if owner == Owner::Head(0) { DEADLIST } else { REST }
    }

    fn count(&mut self, id: u8, by: i8) {
        if id != 0 {
            self.counts[id as usize] = self.counts[id as usize].wrapping_add_signed(by);
        }
    }

    /// Applies the effects of a record on one page.
    fn apply(&mut self, page: usize, record: Record, rules: &Rules) {
        let map_page = |volume: u8| if volume == 0 { MAP } else { REST };
        match record {
            Record::Write { volume, block, entry, old, fate } => {
                if page == COUNTS {
                    self.count(entry.id, 1);
                    self.count(old.id, if fate == Fate::CountedOff { -1 } else { 0 });
                }
                if page == Self::page_of(Owner::Head(volume)) && fate == Fate::Dead {
                    self.heads[volume as usize].dead[old.id as usize][old.birth as usize] += 1;
                }
                if page == Self::page_of(Owner::Head(volume)) && rules.writes_cut {
                    self.heads[volume as usize].intent &= !(1 << block);
                }
                if page == map_page(volume) {
                    self.heads[volume as usize].map[block as usize] = entry;
                }
            }
            Record::Intend { volume, blocks } if page == Self::page_of(Owner::Head(volume)) => {
                self.heads[volume as usize].intent |= blocks;
            }
            Record::Trim { volume, block, old, fate } => {
                let head = &mut self.heads[volume as usize];
                if page == Self::page_of(Owner::Head(volume)) {
                    head.dead[old.id as usize][old.birth as usize] += u8::from(fate == Fate::Dead);
                    head.intent &= !(1 << block);
                }
                if page == map_page(volume) {
                    head.map[block as usize] = Entry::default();
                }
                if page == COUNTS && fate == Fate::CountedOff {
                    self.count(old.id, -1);
                }
            }
            Record::Snapshot { at, volume, number } => {
                let Head { map, dead, intent, .. } = self.heads[volume as usize];
                let intent = if rules.intents_are_inherited { intent } else { 0 };
                if page == REST {
                    self.snapshots[at as usize] =
                        Snapshot { number, volume, map, dead, intent, is_deleting: false };
                    self.newest = number;
                }
                if page == Self::page_of(Owner::Head(volume)) {
                    self.heads[volume as usize].dead = List::default();
                }
            }
            Record::Clone { at } if page == REST => {
                let Snapshot { number: origin, map, intent, .. } = self.snapshots[at as usize];
                self.heads[1] = Head { exists: true, origin, map, dead: List::default(), intent };
            }
            Record::CloneGone if page == REST => self.heads[1] = Head::default(),
            Record::Rollback { at, counted_off } => {
                let to = self.snapshots[at as usize].map;
                match page {
                    COUNTS if rules.rollback_names => counted_off.iter().for_each(|id| self.count(*id, -1)),
                    COUNTS => {
                        for entry in self.heads[0]
                            .map
                            .iter()
                            .filter(|entry| !to.contains(entry))
                            .copied()
                            .collect::<Vec<_>>()
                        {
                            self.count(entry.id, -1);
                        }
                    }
                    DEADLIST => {
                        self.heads[0].intent = self.snapshots[at as usize].intent;
                        if rules.rollback_empties {
                            self.heads[0].dead = List::default();
                        }
                    }
                    MAP => self.heads[0].map = to,
                    _ => {}
                }
            }
            Record::DeletionBegins { at } if page == REST => self.snapshots[at as usize].is_deleting = true,
            Record::Drop { from, id, birth } => {
                if page == COUNTS {
                    self.count(id, -1);
                }
                if page == Self::page_of(from) {
                    let listed = &mut self.list(from)[id as usize][birth as usize];
                    *listed = listed.wrapping_sub(1);
                }
            }
            Record::Merge { at, to, id, birth } => {
                if page == REST {
                    let listed = &mut self.snapshots[at as usize].dead[id as usize][birth as usize];
                    *listed = listed.wrapping_sub(1);
                }
                if page == Self::page_of(to) {
                    self.list(to)[id as usize][birth as usize] += 1;
                }
            }
            Record::DeletionEnds { at } if page == REST => self.snapshots[at as usize] = Snapshot::default(),
            _ => {}
        }
    }

    fn take_page(&mut self, page: usize, from: &Pages) {
        match page {
            COUNTS => self.counts = from.counts,
            MAP => self.heads[0].map = from.heads[0].map,
            DEADLIST => {
                (self.heads[0].dead, self.heads[0].intent) = (from.heads[0].dead, from.heads[0].intent);
            }
            _ => {
                self.heads[1] = from.heads[1];
                (self.snapshots, self.newest) = (from.snapshots, from.newest);
            }
        }
        self.positions[page] = from.positions[page];
    }

    /// Whether a page is as another set has it, wherever that one stands.
    fn has_page_of(&self, page: usize, other: &Pages) -> bool {
        let mut copy = *self;
        copy.take_page(page, other);
        copy.positions = self.positions;
        copy == *self
    }

    /// Numbers of the snapshots of a volume that are there and not being deleted.
    fn numbers(&self, volume: u8) -> impl Iterator<Item = u8> {
        let kept = |snapshot: &&Snapshot| snapshot.number != 0 && !snapshot.is_deleting;
        self.snapshots
            .iter()
            .filter(kept)
            .filter(move |snapshot| snapshot.volume == volume)
            .map(|of| of.number)
    }

    /// The number up to which entries of the volume are held by a snapshot before `number`, or by the origin.
    fn held_before(&self, volume: u8, number: u8) -> u8 {
        let before = self.numbers(volume).filter(|of| *of < number).max();
        before.unwrap_or(self.heads[volume as usize].origin)
    }

    /// The deadlist after that of a snapshot.
    fn list_after(&self, at: usize) -> Owner {
        let Snapshot { number, volume, .. } = self.snapshots[at];
        let is_after = |of: &usize| {
            let other = self.snapshots[*of];
            other.volume == volume && other.number > number
        };
        let after = (0..SNAPSHOTS).filter(is_after).min_by_key(|of| self.snapshots[*of].number);
        after.map_or(Owner::Head(volume), |of| Owner::Snapshot(of as u8))
    }
}

impl Model for Config {
    type State = State;

    fn name(&self) -> &str {
        self.name
    }

    fn start(&self) -> State {
        let pages = Pages::new();
        State {
            memory: pages,
            saved: pages,
            saved_now: 0,
            written_root: None,
            root: pages,
            log: [Record::None; RECORDS_MAX],
            issued: 0,
            durable: 0,
            tail: 0,
            next: 0,
            crashes: 0,
            roots: 0,
        }
    }

    fn steps(&self, state: &State, steps: &mut Vec<Step>) {
        if (state.issued as usize) < RECORDS_MAX {
            self.client_steps(state, steps);
            self.deletion_steps(state, steps);
            self.trim_steps(state, steps);
        }
        self.checkpoint_steps(state, steps);
        self.crashes(state, steps);
        for step in steps.iter_mut() {
            step.wrong = wrong(&step.after);
        }
    }
}

impl Config {
    fn issue(&self, state: &State, record: Record, text: String, steps: &mut Vec<Step>) {
        let mut after = state.clone();
        after.log[after.issued as usize] = record;
        after.issued += 1;
        for page in 0..PAGES {
            after.memory.apply(page, record, &self.rules);
            after.memory.positions[page] = after.issued;
        }
        steps.push(Step::new(text, after));
    }

    fn client_steps(&self, state: &State, steps: &mut Vec<Step>) {
        let Some(op) = self.script.get(state.next as usize) else { return };
        let memory = &state.memory;
        let mut begun = state.clone();
        begun.next += 1;
        // What a crash has undone is not done again, and what needed it is refused.
        if !self.may_begin(memory, *op) {
            steps.push(Step::new("an operation is refused", begun));
            return;
        }
        match *op {
            Op::Write(volume, block, id) => {
                let old = memory.heads[volume as usize].map[block as usize];
                let writer = volume;
                let entry =
                    if id == 0 { Entry::default() } else { Entry { id, birth: memory.newest + 1, writer } };
                let record =
                    Record::Write { volume, block, entry, old, fate: self.fate(memory, volume, old) };
                self.issue(&begun, record, format!("block {block} of volume {volume} is {id}"), steps);
            }
            Op::Trim(volume, blocks) => {
                let text = format!("volume {volume} is to be trimmed");
                self.issue(&begun, Record::Intend { volume, blocks }, text, steps);
            }
            Op::Snapshot(volume, at) => {
                let record = Record::Snapshot { at, volume, number: memory.newest + 1 };
                self.issue(&begun, record, format!("snapshot {at} of volume {volume}"), steps);
            }
            Op::Clone(at) => {
                self.issue(&begun, Record::Clone { at }, format!("a clone of snapshot {at}"), steps)
            }
            Op::CloneGone => self.issue(&begun, Record::CloneGone, "the clone is gone".into(), steps),
            Op::Rollback(at) => {
                let to = memory.snapshots[at as usize].map;
                let alone = |entry: Entry| if to.contains(&entry) { 0 } else { entry.id };
                let counted_off = memory.heads[0].map.map(alone);
                self.issue(
                    &begun,
                    Record::Rollback { at, counted_off },
                    format!("back to snapshot {at}"),
                    steps,
                );
            }
            Op::Delete(at) => {
                let record = Record::DeletionBegins { at };
                self.issue(&begun, record, format!("snapshot {at} is to be deleted"), steps);
            }
        }
    }

    fn may_begin(&self, memory: &Pages, op: Op) -> bool {
        let snapshot = |at: u8| memory.snapshots[at as usize];
        let is_there = |at: u8| snapshot(at).number != 0 && !snapshot(at).is_deleting;
        let is_deleting = memory.snapshots.iter().any(|snapshot| snapshot.is_deleting);
        let clone = memory.heads[1];
        match op {
            Op::Write(volume, ..) | Op::Trim(volume, _) => memory.heads[volume as usize].exists,
            Op::Snapshot(volume, at) => memory.heads[volume as usize].exists && snapshot(at).number == 0,
            Op::Clone(at) => is_there(at) && !clone.exists,
            Op::CloneGone => {
                let is_own = |entry: &Entry| entry.id != 0 && entry.birth > clone.origin;
                clone.exists && !clone.map.iter().any(is_own) && memory.numbers(1).next().is_none()
            }
            // To the newest snapshot.
            Op::Rollback(at) => {
                !is_deleting && is_there(at) && memory.numbers(0).max() == Some(snapshot(at).number)
            }
            Op::Delete(at) => {
                let is_origin = clone.exists && clone.origin == snapshot(at).number;
                !is_deleting && is_there(at) && !(is_origin && self.rules.origin_after_clones)
            }
        }
    }

    /// What becomes of an entry that is overwritten.
    fn fate(&self, memory: &Pages, volume: u8, old: Entry) -> Fate {
        let Head { origin, .. } = memory.heads[volume as usize];
        if old.id == 0 || origin != 0 && old.birth <= origin && self.rules.clone_shares {
            return Fate::Shared;
        }
        // One that is being deleted may count: what it has is counted off before the deletion ends.
        let newest = memory.numbers(volume).max();
        match newest.is_some_and(|number| old.birth <= number) && self.rules.deadlist {
            true => Fate::Dead,
            false => Fate::CountedOff,
        }
    }

    /// The first block of an intent is trimmed.
    fn trim_steps(&self, state: &State, steps: &mut Vec<Step>) {
        for volume in 0..VOLUMES as u8 {
            let head = state.memory.heads[volume as usize];
            let Some(block) = (0..BLOCKS as u8).find(|block| head.intent >> block & 1 == 1) else { continue };
            let old = head.map[block as usize];
            let fate = self.fate(&state.memory, volume, old);
            let text = format!("block {block} of volume {volume} is trimmed");
            self.issue(state, Record::Trim { volume, block, old, fate }, text, steps);
        }
    }

    fn deletion_steps(&self, state: &State, steps: &mut Vec<Step>) {
        let memory = &state.memory;
        let Some(at) = memory.snapshots.iter().position(|snapshot| snapshot.is_deleting) else { return };
        let Snapshot { number, volume, dead, .. } = memory.snapshots[at];
        let next = memory.list_after(at);
        let held = if self.rules.drops_own { memory.held_before(volume, number) } else { 0 };
        let (at, mut copy) = (at as u8, *memory);
        let listed = *copy.list(next);
        let first = |list: &List, from: usize| {
            (1..IDS as u8).find_map(|id| {
                let birth = (from..BIRTHS).find(|birth| list[id as usize][*birth] > 0)?;
                Some((id, birth as u8))
            })
        };
        // The entries that only this snapshot holds, before others join them.
        if let Some((id, birth)) = first(&listed, usize::from(held) + 1) {
            let record = Record::Drop { from: next, id, birth };
            self.issue(state, record, format!("{id}, born at {birth}, is counted off"), steps);
            if self.rules.ends_when_done {
                return;
            }
        } else if let Some((id, birth)) = first(&dead, 0).filter(|_| self.rules.merges) {
            let record = Record::Merge { at, to: next, id, birth };
            self.issue(state, record, format!("{id}, born at {birth}, is handed on"), steps);
            if self.rules.ends_when_done {
                return;
            }
        }
        self.issue(state, Record::DeletionEnds { at }, format!("snapshot {at} is gone"), steps);
    }

    fn checkpoint_steps(&self, state: &State, steps: &mut Vec<Step>) {
        if state.durable < state.issued {
            let mut after = state.clone();
            after.durable = state.issued;
            steps.push(Step::new("flush", after));
        }
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
            let mut after = state.clone();
            // A page that has not changed need not be saved to include everything.
            let is_same = |page: &usize| {
                state.memory.positions[*page] <= state.durable
                    && state.saved.has_page_of(*page, &state.memory)
            };
            (0..PAGES).filter(is_same).for_each(|page| after.saved.take_page(page, &state.memory));
            if state.saved_now != 0 && self.may_be_root(state, &after.saved) {
                after.written_root = Some(after.saved);
                after.saved_now = 0;
                after.roots += 1;
                steps.push(Step::new("the root is written", after));
            }
        }
        if let Some(root) = state.written_root {
            let mut after = state.clone();
            (after.root, after.written_root) = (root, None);
            steps.push(Step::new("the root is durable", after));
        }
        let tail = *state.root.positions.iter().min().expect("pages");
        if tail > state.tail {
            let mut after = state.clone();
            after.tail = tail;
            steps.push(Step::new(format!("the log begins after record {tail}"), after));
        }
    }

    /// Whether these pages may be under one root.
    fn may_be_root(&self, state: &State, pages: &Pages) -> bool {
        let at = &pages.positions;
        if at.iter().any(|position| *position > state.durable) {
            return false;
        }
        let records = || (1..=state.issued).map(|number| (number, state.log[number as usize - 1]));
        records().all(|(number, record)| match record {
            Record::Snapshot { volume: 0, .. } if at[REST] < number => {
                let map_is = self.rules.no_map_beyond_snapshot && at[MAP] > number;
                // The snapshot takes the list over, so it must not be empty already.
                let deadlist_is = self.rules.no_deadlist_beyond_snapshot && at[DEADLIST] >= number;
                !map_is && !deadlist_is
            }
            Record::Rollback { at: to, .. }
                if at[MAP].min(at[DEADLIST]) < number && self.rules.no_deletion_beyond_use =>
            {
                let is_deletion = |(later, record)| {
                    later > number && record == Record::DeletionEnds { at: to } && at[REST] >= later
                };
                !records().any(is_deletion)
            }
            _ => true,
        })
    }

    fn crashes(&self, state: &State, steps: &mut Vec<Step>) {
        if state.crashes == self.crashes {
            return;
        }
        for root in [Some(state.root), state.written_root].into_iter().flatten() {
            for left in state.durable..=state.issued {
                let mut pages = root;
                for number in state.tail + 1..=left {
                    for page in 0..PAGES {
                        if pages.positions[page] < number {
                            pages.apply(page, state.log[number as usize - 1], &self.rules);
                            pages.positions[page] = number;
                        }
                    }
                }
                let mut after = State {
                    memory: pages,
                    saved: root,
                    saved_now: 0,
                    written_root: None,
                    root,
                    issued: left,
                    durable: left,
                    crashes: state.crashes + 1,
                    ..state.clone()
                };
                after.log[left as usize..].fill(Record::None);
                let text = format!("CRASH: records up to {left} of {} are left", state.issued);
                steps.push(Step::new(text, after));
            }
        }
    }
}

/// What is wrong in memory, if anything is.
fn wrong(state: &State) -> Option<String> {
    let memory = &state.memory;
    let mut heads = [[0u8; BLOCKS]; VOLUMES];
    let mut snapshots = [None; SNAPSHOTS];
    for record in &state.log[..state.issued as usize] {
        match *record {
            Record::Write { volume, block, entry, .. } => heads[volume as usize][block as usize] = entry.id,
            Record::Intend { volume, blocks } => {
                let is_trimmed = |block: &usize| blocks >> block & 1 == 1;
                (0..BLOCKS).filter(is_trimmed).for_each(|block| heads[volume as usize][block] = 0);
            }
            Record::Snapshot { at, volume, .. } => snapshots[at as usize] = Some(heads[volume as usize]),
            Record::Clone { at } => heads[1] = snapshots[at as usize].expect("it is there"),
            Record::CloneGone => heads[1] = [0; BLOCKS],
            Record::Rollback { at, .. } => heads[0] = snapshots[at as usize].expect("it is there"),
            Record::DeletionBegins { at } => snapshots[at as usize] = None,
            _ => {}
        }
    }
    let ids = |map: [Entry; BLOCKS], intent: u8| {
        std::array::from_fn::<u8, BLOCKS, _>(|block| if intent >> block & 1 == 1 { 0 } else { map[block].id })
    };
    for (volume, expected) in heads.iter().enumerate() {
        let head = memory.heads[volume];
        let found = ids(head.map, head.intent);
        if found != *expected {
            return Some(format!("volume {volume} holds {found:?}, not {expected:?}"));
        }
    }
    for (at, snapshot) in memory.snapshots.iter().enumerate() {
        let found =
            (snapshot.number != 0 && !snapshot.is_deleting).then_some(ids(snapshot.map, snapshot.intent));
        if found != snapshots[at] {
            return Some(format!("snapshot {at} holds {found:?}, not {:?}", snapshots[at]));
        }
    }
    let kept = memory.snapshots.iter().filter(|snapshot| snapshot.number != 0 && !snapshot.is_deleting);
    let maps = memory.heads.iter().map(|head| head.map).chain(kept.map(|snapshot| snapshot.map));
    let entries = maps.flat_map(|map| map.into_iter().enumerate()).filter(|(_, entry)| entry.id != 0);
    let mut entries: Vec<(u8, u8, usize, u8)> =
        entries.map(|(block, entry)| (entry.id, entry.writer, block, entry.birth)).collect();
    entries.sort_unstable();
    entries.dedup();
    let is_deleting = memory.snapshots.iter().any(|snapshot| snapshot.is_deleting);
    for id in 1..IDS {
        let count = usize::from(memory.counts[id]);
        let expected = entries.iter().filter(|entry| usize::from(entry.0) == id).count();
        let is_right = if is_deleting { (expected..100).contains(&count) } else { count == expected };
        if !is_right {
            return Some(format!("the count of {id} is {count}, not {expected}"));
        }
    }
    None
}

fn scenarios(rules: Rules) -> Vec<Config> {
    use Op::{Clone, CloneGone, Delete, Rollback, Snapshot, Trim, Write};
    let config =
        |name, script: &[Op], crashes, roots| Config { name, script: script.to_vec(), crashes, roots, rules };
    vec![
        config(
            "a: the older of two is deleted",
            &[
                Write(0, 0, 1),
                Snapshot(0, 0),
                Write(0, 0, 2),
                Snapshot(0, 1),
                Write(0, 0, 3),
                Delete(0),
                Delete(1),
            ],
            1,
            1,
        ),
        config(
            "b: the newer of two is deleted",
            &[
                Write(0, 0, 1),
                Snapshot(0, 0),
                Write(0, 0, 2),
                Snapshot(0, 1),
                Write(0, 0, 3),
                Delete(1),
                Delete(0),
            ],
            1,
            1,
        ),
        config(
            "c: writes during a deletion",
            &[Write(0, 0, 1), Snapshot(0, 0), Delete(0), Write(0, 0, 2), Snapshot(0, 1), Write(0, 0, 1)],
            1,
            1,
        ),
        config(
            "d: a clone",
            &[
                Write(0, 0, 1),
                Snapshot(0, 0),
                Clone(0),
                Write(1, 0, 2),
                Write(0, 0, 3),
                Write(1, 0, 0),
                CloneGone,
                Delete(0),
            ],
            1,
            1,
        ),
        config(
            "e: a snapshot of a clone",
            &[
                Write(0, 0, 1),
                Snapshot(0, 0),
                Clone(0),
                Write(1, 1, 2),
                Snapshot(1, 1),
                Write(1, 0, 3),
                Write(1, 1, 3),
                Delete(1),
            ],
            1,
            1,
        ),
        config(
            "f: rolled back",
            &[Write(0, 0, 1), Snapshot(0, 0), Write(0, 0, 2), Rollback(0), Write(0, 1, 3), Delete(0)],
            1,
            1,
        ),
        config("g: two crashes", &[Write(0, 0, 1), Snapshot(0, 0), Write(0, 0, 2), Delete(0)], 2, 2),
        config(
            "i: trimmed by and by",
            &[Write(0, 0, 1), Write(0, 1, 2), Trim(0, 3), Write(0, 0, 3), Trim(0, 3)],
            1,
            1,
        ),
        config(
            "j: back to what is being trimmed",
            &[Write(0, 0, 1), Trim(0, 1), Snapshot(0, 0), Rollback(0), Delete(0)],
            1,
            1,
        ),
        config(
            "l: a snapshot of what is being trimmed",
            &[Write(0, 0, 1), Trim(0, 1), Snapshot(0, 0), Write(0, 0, 2), Delete(0)],
            1,
            1,
        ),
        config(
            "k: a clone of what is to be trimmed",
            &[
                Write(0, 0, 1),
                Trim(0, 1),
                Snapshot(0, 0),
                Clone(0),
                Write(1, 0, 2),
                Trim(1, 1),
                CloneGone,
                Delete(0),
            ],
            1,
            0,
        ),
        config(
            "h: an origin with a clone",
            &[Write(0, 0, 1), Snapshot(0, 0), Clone(0), Write(0, 0, 2), Delete(0), Write(1, 0, 3)],
            1,
            0,
        ),
    ]
}

fn main() {
    let rules = RULES;
    let mutations = [
        ("deadlist", Rules { deadlist: false, ..rules }, "a"),
        ("clone-shares", Rules { clone_shares: false, ..rules }, "d"),
        ("origin-after-clones", Rules { origin_after_clones: false, ..rules }, "h"),
        ("drops-own", Rules { drops_own: false, ..rules }, "ab"),
        ("merges", Rules { merges: false, ..rules }, "ab"),
        ("ends-when-done", Rules { ends_when_done: false, ..rules }, "a"),
        ("writes-cut", Rules { writes_cut: false, ..rules }, "i"),
        ("intents-are-inherited", Rules { intents_are_inherited: false, ..rules }, "j"),
        ("rollback-empties", Rules { rollback_empties: false, ..rules }, "f"),
        ("rollback-names", Rules { rollback_names: false, ..rules }, "f"),
        ("no-map-beyond-snapshot", Rules { no_map_beyond_snapshot: false, ..rules }, "ga"),
        ("no-deadlist-beyond-snapshot", Rules { no_deadlist_beyond_snapshot: false, ..rules }, "ab"),
        ("no-deletion-beyond-use", Rules { no_deletion_beyond_use: false, ..rules }, "f"),
    ];
    explorer::run(scenarios, rules, &mutations, &[]);
}
