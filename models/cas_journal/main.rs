//! Explicit-state model of the cas volume's journal: entries under way, roots on two places, segments that
//! are used again, and starts after crashes, on a store that keeps no more than A1 to A4 of docs/cas.md.
//!
//! Run: `cargo run --release -p calpe-models --bin cas-journal` (`explorer.rs` says what it accepts).
//!
//! Enumerated, breadth first: every order in which writes to the store are submitted and answered, flushes
//! asked for and answered, entries made for clients, for moving chunks and for giving segments up, pages and
//! roots written; and crashes and failures of the store at any point, starts included.
//!
//! The store has every write since the last flush. A crash leaves any set of them that A1 allows: a write of
//! which a block is there has every write behind it that was answered before it was submitted. Of one that
//! was not answered any of its blocks may be there. What a start found stays.
//!
//! The identity of an entry is its content, as its hash is: an entry that is made once more, equal in all
//! that it says, is the same entry.
//!
//! Checked at every start: the root's pages are where it says; the entries that count are the first of those
//! that were made, in order, at least as many as a flush promised or an earlier start found; the pages are
//! what these entries make of an empty volume; every block of the client reads what its newest entry says.
//! While the volume runs every block reads that, too.
//!
//! Bounds: four to six segments of three blocks, of which a chunk takes the second and pages the first two;
//! two entries and two chunks under way; scripts of up to four writes; two roots; three crashes.

mod running;
mod start;
mod state;

use calpe_models::{self as explorer, Model};
use start::wrong;
use state::{
    BLOCKS, CELLS, Cell, NONE, PAGE_BLOCKS, Pages, Place, ROOT, Record, Root, SEGMENTS, Start, State,
    UNDER_WAY,
};

/// One switch for each rule: true is the rule, false what the mutation does instead.
#[derive(Clone, Copy)]
struct Rules {
    /// (A1) A write that was answered is there if one is that was submitted later.
    ordered: bool,
    /// (A1) Also if only a part of that one is there.
    ordered_by_parts: bool,
    /// (A2) What a start found stays, whether or not it had been answered.
    found_stays: bool,
    /// (J2) An entry is submitted when its chunk was answered.
    chunk_before_entry: bool,
    /// (J3) A client is answered when all entries before its own are, too.
    answers_in_order: bool,
    /// (J3) A flush is answered when that of the array is.
    flush_waits: bool,
    /// (J3) It covers what was answered when that of the array was asked for (else: when that was answered).
    flush_asked_after: bool,
    /// (J4) The hash covers the chunk in the entry.
    hash_covers_chunk: bool,
    /// (J4) An entry follows on the hash of the one before (else: on its number).
    chained: bool,
    /// (J5) A start makes an entry of one block before any other.
    start_has_entry: bool,
    /// (Off) Instead of that each entry has the number of its start, which is not enough.
    entries_have_run: bool,
    /// (J5) It is answered before any other is submitted.
    start_entry_first: bool,
    /// (J4) Where the journal cannot be read a start fails (else: the journal ends).
    error_is_no_end: bool,
    /// (K1) The position of a root is that of its pages (else: that of the moment when it is written).
    root_is_sharp: bool,
    /// (K1) A root is written when its pages have been answered.
    root_after_pages: bool,
    /// (K1) And when the entries below its position have.
    root_after_entries: bool,
    /// (K1) It is written to one place after the other.
    one_place_at_a_time: bool,
    /// (K1) What the older root needs is free when the newer one is on both places (else: on one).
    both_places: bool,
    /// (K1) A start writes the newer root to the other place before anything else.
    start_completes: bool,
    /// (K2) A segment is free when the entry that gave it up, and all before, have been answered.
    free_when_answered: bool,
    /// (K2) Pages that the newest root names are kept.
    root_keeps_pages: bool,
    /// (K2) Pages that the root names that is being written are kept.
    written_root_keeps_pages: bool,
    /// (Off) Segments are kept that have chunks by the newest root, or by the one that is being written.
    roots_keep_chunks: bool,
    /// (K3) A segment of the journal is given up when a root is past it.
    journal_past_root: bool,
    /// (K3) And no chunk in it is used.
    journal_keeps_chunks: bool,
    /// (F1) When the array fails the volume starts anew from the disk.
    starts_anew: bool,
    /// (F1) It waits for all that is under way before.
    restart_waits: bool,
    /// (F1) Writes that were answered and are lost make the next flush fail.
    flush_tells: bool,
}

const RULES: Rules = Rules {
    ordered: true,
    ordered_by_parts: true,
    found_stays: true,
    chunk_before_entry: true,
    answers_in_order: true,
    flush_waits: true,
    flush_asked_after: true,
    hash_covers_chunk: true,
    chained: true,
    start_has_entry: true,
    entries_have_run: false,
    start_entry_first: true,
    error_is_no_end: true,
    root_is_sharp: true,
    root_after_pages: true,
    root_after_entries: true,
    one_place_at_a_time: true,
    both_places: true,
    start_completes: true,
    free_when_answered: true,
    root_keeps_pages: true,
    written_root_keeps_pages: true,
    roots_keep_chunks: false,
    journal_past_root: true,
    journal_keeps_chunks: true,
    starts_anew: true,
    restart_waits: true,
    flush_tells: true,
};

#[derive(Clone, Copy)]
enum Op {
    /// The chunk lies in the entry.
    Inline(u8, u8),
    /// The chunk lies in a data segment.
    Stored(u8, u8),
}

#[derive(Clone)]
struct Config {
    name: &'static str,
    script: Vec<Op>,
    segments: usize,
    entries: usize,
    crashes: u8,
    failures: u8,
    roots: u8,
    moves: u8,
    /// Whether clients flush.
    flushes: bool,
    /// Blocks that become unreadable at a crash: places of the root, or headers of entries.
    damage: Damage,
    rules: Rules,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Damage {
    None,
    Roots,
    Entries,
}

type Step = explorer::Step<State>;

impl Model for Config {
    type State = State;

    fn name(&self) -> &str {
        self.name
    }

    fn start(&self) -> State {
        let place = Place { sequence: 0, previous: NONE, segment: 0, block: 0, next: 1 };
        let pages = Pages::EMPTY;
        let mut cells = [Cell::Blank; CELLS];
        // The first page lies in the last segment.
        let page = self.segments as u8 - 1;
        cells[page as usize * BLOCKS..][..PAGE_BLOCKS].fill(Cell::Page(0));
        cells[ROOT] = Cell::Root(0);
        cells[ROOT + 1] = Cell::Root(0);
        State {
            cells,
            writes: vec![],
            entries: vec![],
            roots: vec![Root { generation: 0, place, page, pages }],
            journal: vec![],
            answered: 0,
            promised: 0,
            flushing: None,
            pages,
            place,
            run: 0,
            stores: [None; UNDER_WAY],
            saving: None,
            newest: 0,
            freed_by: [0; SEGMENTS],
            start: Start::Done,
            is_lost: false,
            next: 0,
            crashes: 0,
            failures: 0,
            saved: 0,
            moves: 0,
            damage: 0,
        }
    }

    fn steps(&self, state: &State, steps: &mut Vec<Step>) {
        if state.start == Start::Entry
            && let Some(mut after) = self.add(state, 1, |_| Record::Start)
        {
            let is_awaited = self.rules.start_entry_first;
            after.start = if is_awaited { Start::EntryUnderWay } else { Start::Done };
            steps.push(Step::new("the entry of the start", after));
        }
        if state.start == Start::Done {
            self.client_steps(state, steps);
            self.background_steps(state, steps);
            self.root_steps(state, steps);
        }
        self.store_steps(state, steps);
        for step in steps.iter_mut().filter(|step| step.wrong.is_none()) {
            step.wrong = wrong(&step.after.pages, &step.after.seen());
        }
        if state.crashes < self.crashes {
            for (cells, kept) in self.left_by_crash(state) {
                let name = format!("CRASH: of {} writes {kept} stay", state.writes.len());
                steps.extend(self.started(state, cells, None, name));
                if state.damage == 0 {
                    self.damaged(state, cells, steps);
                }
            }
        }
        if state.failures < self.failures {
            self.failures(state, steps);
        }
    }
}

fn scenarios(rules: Rules) -> Vec<Config> {
    use Op::{Inline, Stored};
    let base = Config {
        name: "",
        script: vec![],
        segments: 5,
        entries: 8,
        crashes: 2,
        failures: 0,
        roots: 0,
        moves: 0,
        flushes: true,
        damage: Damage::None,
        rules,
    };
    let config = |name, script: &[Op], segments, roots, moves| Config {
        name,
        script: script.to_vec(),
        segments,
        roots,
        moves,
        ..base.clone()
    };
    vec![
        config("a: entries under way", &[Inline(0, 1), Inline(1, 2), Inline(0, 1), Inline(1, 3)], 5, 0, 0),
        config("b: a root", &[Inline(0, 1), Stored(1, 2), Inline(0, 2)], 5, 1, 0),
        config("c: data used again", &[Stored(0, 1), Inline(0, 2), Stored(1, 3)], 4, 0, 0),
        Config {
            crashes: 1,
            ..config("d: data used again, roots", &[Stored(0, 1), Inline(0, 2), Stored(1, 3)], 5, 2, 0)
        },
        Config {
            crashes: 1,
            entries: 7,
            ..config(
                "e: journal used again",
                &[Inline(0, 1), Inline(1, 2), Inline(1, 3), Inline(0, 2)],
                5,
                2,
                0,
            )
        },
        Config {
            crashes: 1,
            entries: 5,
            flushes: false,
            ..config("f: out of the journal", &[Inline(0, 1), Inline(1, 2), Stored(1, 3)], 6, 1, 1)
        },
        Config {
            crashes: 1,
            failures: 1,
            ..config("g: the array fails", &[Inline(0, 1), Stored(1, 2), Inline(0, 3)], 5, 0, 0)
        },
        Config {
            damage: Damage::Roots,
            ..config("h: a place is unreadable", &[Inline(0, 1), Inline(1, 2)], 5, 2, 0)
        },
        Config {
            damage: Damage::Entries,
            crashes: 1,
            ..config("i: an entry is unreadable", &[Inline(0, 1), Inline(1, 2), Inline(0, 2)], 4, 1, 0)
        },
        Config {
            crashes: 3,
            ..config("j: three crashes", &[Inline(0, 1), Inline(1, 2), Inline(0, 1), Inline(1, 2)], 5, 0, 0)
        },
    ]
}

fn mutations() -> Vec<(&'static str, Rules, &'static str)> {
    let rules = RULES;
    let only_runs = Rules { start_has_entry: false, entries_have_run: true, ..rules };
    vec![
        ("ordered", Rules { ordered: false, ..rules }, "abc"),
        ("ordered-by-parts", Rules { ordered_by_parts: false, ..rules }, "abcdef"),
        ("found-stays", Rules { found_stays: false, ..rules }, "a"),
        ("chunk-before-entry", Rules { chunk_before_entry: false, ..rules }, "bc"),
        ("answers-in-order", Rules { answers_in_order: false, ..rules }, "a"),
        ("flush-waits", Rules { flush_waits: false, ..rules }, "a"),
        ("flush-asked-after", Rules { flush_asked_after: false, ..rules }, "a"),
        ("hash-covers-chunk", Rules { hash_covers_chunk: false, ..rules }, "a"),
        ("chained", Rules { chained: false, ..rules }, "a"),
        ("start-has-entry", Rules { start_has_entry: false, ..rules }, "a"),
        ("start-has-entry, entries-have-run", only_runs, "a"),
        ("start-entry-first", Rules { start_entry_first: false, ..rules }, "aj"),
        ("error-is-no-end", Rules { error_is_no_end: false, ..rules }, "i"),
        ("root-is-sharp", Rules { root_is_sharp: false, ..rules }, "b"),
        ("root-after-pages", Rules { root_after_pages: false, ..rules }, "b"),
        ("root-after-entries", Rules { root_after_entries: false, ..rules }, "b"),
        ("both-places", Rules { both_places: false, ..rules }, "h"),
        ("start-completes", Rules { start_completes: false, ..rules }, "h"),
        ("free-when-answered", Rules { free_when_answered: false, ..rules }, "cd"),
        ("root-keeps-pages", Rules { root_keeps_pages: false, ..rules }, "bd"),
        ("written-root-keeps-pages", Rules { written_root_keeps_pages: false, ..rules }, "bd"),
        ("journal-past-root", Rules { journal_past_root: false, ..rules }, "ef"),
        ("journal-keeps-chunks", Rules { journal_keeps_chunks: false, ..rules }, "ef"),
        ("starts-anew", Rules { starts_anew: false, ..rules }, "g"),
        ("restart-waits", Rules { restart_waits: false, ..rules }, "g"),
        ("flush-tells", Rules { flush_tells: false, ..rules }, "g"),
    ]
}

fn main() {
    let variants = [("one-place-at-a-time", Rules { one_place_at_a_time: false, ..RULES })];
    explorer::run(scenarios, RULES, &mutations(), &variants);
}
