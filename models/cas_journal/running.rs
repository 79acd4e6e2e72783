//! Steps while the volume runs: clients, moving, giving up, roots, and answers of the store.

use crate::state::{
    BLOCKS, Cell, Chunk, Entry, Kind, PAGE_BLOCKS, Place, ROOT, Record, Root, Saving, Start, State, Store,
    UNDER_WAY, Use,
};
use crate::{Config, Op, Step};

impl Config {
    fn is_free(&self, state: &State, segment: usize) -> bool {
        let number = segment as u8;
        let newest = &state.roots[state.newest as usize];
        let written = state.saving.map(|saving| state.roots[saving.root as usize]);
        let has_chunks = |root: &Root| root.pages.kinds[segment] != Kind::Free;
        let stored = state.stores.iter().flatten();
        state.pages.kinds[segment] == Kind::Free
            && ![state.place.segment, state.place.next].contains(&number)
            && !stored.map(|store| store.to as usize / BLOCKS).any(|to| to == segment)
            && (!self.rules.free_when_answered || state.freed_by[segment] <= state.answered_upto())
            && (!self.rules.root_keeps_pages || newest.page != number)
            && !(self.rules.written_root_keeps_pages && written.is_some_and(|root| root.page == number))
            && !(self.rules.roots_keep_chunks && [Some(*newest), written].iter().flatten().any(has_chunks))
    }

    /// The one that was given up last, if any: using it again soon is what may go wrong.
    fn free_segment(&self, state: &State) -> Option<u8> {
        let free = (0..self.segments).filter(|segment| self.is_free(state, *segment));
        free.max_by_key(|segment| state.freed_by[*segment]).map(|segment| segment as u8)
    }

    /// Makes an entry and submits it. `record` is given the block behind its header.
    pub(crate) fn add(&self, state: &State, blocks: u8, record: impl Fn(u8) -> Record) -> Option<State> {
        let is_full = state.entries.len() == self.entries && state.start == Start::Done;
        if state.entries_under_way() == UNDER_WAY || is_full {
            return None;
        }
        let mut after = state.clone();
        let mut place = state.place;
        if place.block + blocks > BLOCKS as u8 {
            (place.segment, place.block) = (place.next, 0);
            after.place = place;
            place.next = self.free_segment(&after)?;
        }
        let header = place.cell() as u8;
        let run = if self.rules.entries_have_run { state.run } else { 0 };
        let entry = Entry { place, run, record: record(header + 1) };
        let same = after.entries.iter().position(|other| *other == entry);
        let identity = same.unwrap_or(after.entries.len()) as u8;
        if same.is_none() {
            after.entries.push(entry);
        }
        let mut cells = vec![(header, Cell::Header(identity))];
        cells.extend(entry.inline().map(|content| (header + 1, Cell::Chunk(content))));
        after.submit(Use::Entry { sequence: place.sequence }, cells);
        after.journal.push(identity);
        after.pages.apply(&entry);
        if let Record::GiveUp { segment } = entry.record {
            after.freed_by[segment as usize] = place.sequence + 1;
        }
        after.place =
            Place { sequence: place.sequence + 1, previous: identity, block: place.block + blocks, ..place };
        Some(after)
    }

    /// Begins to write a chunk to a data segment.
    fn store(&self, state: &State, block: u8, content: u8, from: Option<u8>) -> Option<State> {
        let slot = state.stores.iter().position(Option::is_none)?;
        let to = self.free_segment(state)? * BLOCKS as u8 + 1;
        let mut after = state.clone();
        after.stores[slot] = Some(Store { block, content, to, from, is_answered: false });
        after.submit(Use::Chunk { slot: slot as u8 }, vec![(to, Cell::Chunk(content))]);
        Some(after)
    }

    pub(crate) fn client_steps(&self, state: &State, steps: &mut Vec<Step>) {
        if let Some(op) = self.script.get(state.next as usize) {
            let (text, after) = match *op {
                Op::Inline(block, content) => {
                    let after = self.add(state, 2, |at| Record::Write { block, content, at });
                    (format!("entry {}: block {block} is {content}, inline", state.place.sequence), after)
                }
                Op::Stored(block, content) => {
                    let after = self.store(state, block, content, None);
                    (format!("block {block} is to be {content}, in a data segment"), after)
                }
            };
            if let Some(mut after) = after {
                after.next += 1;
                steps.push(Step::new(text, after));
            }
        }
        for (slot, store) in state.stores.iter().enumerate() {
            let Some(Store { block, content, to, from, is_answered }) = *store else { continue };
            if !is_answered && self.rules.chunk_before_entry {
                continue;
            }
            let is_there = |from| state.pages.map[block as usize].is_some_and(|chunk| chunk.at == from);
            let after = match from {
                None => self.add(state, 1, |_| Record::Write { block, content, at: to }),
                Some(from) if is_there(from) => self.add(state, 1, |_| Record::Move { block, from, to }),
                Some(_) => Some(state.clone()),
            };
            if let Some(mut after) = after {
                after.stores[slot] = None;
                let segment = to as usize / BLOCKS;
                let text = format!("entry {}: block {block} is in {segment}", state.place.sequence);
                steps.push(Step::new(text, after));
            }
        }
        self.flush_steps(state, steps);
    }

    fn flush_steps(&self, state: &State, steps: &mut Vec<Step>) {
        let promise = |state: &State| match self.rules.answers_in_order {
            true => state.answered_upto(),
            false => 16 - state.answered.leading_zeros() as u8,
        };
        if state.is_lost {
            let mut after = state.clone();
            after.is_lost = false;
            let wrong =
                (!self.rules.flush_tells).then(|| "a flush succeeds, and what it covers is lost".into());
            steps.push(Step { text: "a flush ends with an error".into(), after, wrong });
        } else if self.flushes && state.flushing.is_none() && promise(state) > state.promised {
            let mut after = state.clone();
            after.writes.iter_mut().for_each(|write| write.is_asked = write.is_answered && !write.is_late);
            after.flushing = Some(promise(state));
            if !self.rules.flush_waits {
                after.promised = promise(state);
            }
            steps.push(Step::new("a flush is asked for", after));
        } else if let Some(promised) = state.flushing {
            let mut after = state.clone();
            let promised = if self.rules.flush_asked_after { promised } else { promise(state) };
            (after.promised, after.flushing) = (promised.max(state.promised), None);
            while let Some(at) = after.writes.iter().position(|write| write.is_asked) {
                after.settle(at);
            }
            steps.push(Step::new(format!("the flush is answered: {promised} entries"), after));
        }
    }

    pub(crate) fn background_steps(&self, state: &State, steps: &mut Vec<Step>) {
        let newest = &state.roots[state.newest as usize];
        for segment in 0..self.segments {
            let number = segment as u8;
            let is_unused = !state.pages.has_chunk_in(segment);
            let is_free = match state.pages.kinds[segment] {
                Kind::Free => false,
                Kind::Data => is_unused,
                Kind::Journal => {
                    let mut entries = state.journal.iter().map(|entry| state.entries[*entry as usize].place);
                    let is_past = newest.place.segment != number
                        && !entries
                            .any(|place| place.sequence >= newest.place.sequence && place.segment == number);
                    ![state.place.segment, state.place.next].contains(&number)
                        && (is_past || !self.rules.journal_past_root)
                        && (is_unused || !self.rules.journal_keeps_chunks)
                }
            };
            if is_free && let Some(after) = self.add(state, 1, |_| Record::GiveUp { segment: number }) {
                let text = format!("entry {}: segment {segment} is given up", state.place.sequence);
                steps.push(Step::new(text, after));
            }
        }
        for (block, chunk) in state.pages.map.iter().enumerate().filter(|_| state.moves < self.moves) {
            let Some(Chunk { at, content }) = *chunk else { continue };
            let is_inline = state.pages.kinds[at as usize / BLOCKS] == Kind::Journal;
            let is_moving = state.stores.iter().flatten().any(|store| store.from == Some(at));
            if is_inline
                && !is_moving
                && let Some(mut after) = self.store(state, block as u8, content, Some(at))
            {
                after.moves += 1;
                steps.push(Step::new(format!("the chunk of block {block} is being moved"), after));
            }
        }
    }

    pub(crate) fn root_steps(&self, state: &State, steps: &mut Vec<Step>) {
        let Some(saving) = state.saving else {
            let newest = &state.roots[state.newest as usize];
            if state.saved == self.roots || newest.place.sequence == state.place.sequence {
                return;
            }
            let Some(page) = self.free_segment(state) else { return };
            let mut after = state.clone();
            let root = state.roots.len() as u8;
            let generation = newest.generation + 1;
            after.roots.push(Root { generation, place: state.place, page, pages: state.pages });
            after.saved += 1;
            after.saving = Some(Saving { root, page_is_answered: false, submitted: 0, answered: 0 });
            let first = page * BLOCKS as u8;
            after
                .submit(Use::Page, (0..PAGE_BLOCKS as u8).map(|at| (first + at, Cell::Page(root))).collect());
            let text = format!("the page of a root up to entry {} goes to {page}", state.place.sequence);
            return steps.push(Step::new(text, after));
        };
        let root = &state.roots[saving.root as usize];
        let may_be_written = (saving.page_is_answered || !self.rules.root_after_pages)
            && (root.place.sequence <= state.answered_upto() || !self.rules.root_after_entries);
        let is_turn = saving.submitted == saving.answered || !self.rules.one_place_at_a_time;
        if may_be_written && is_turn && saving.submitted < 2 {
            let mut after = state.clone();
            if !self.rules.root_is_sharp && saving.submitted == 0 {
                after.roots[saving.root as usize].place = state.place;
            }
            let place = ROOT as u8 + saving.submitted;
            after.submit(Use::Root, vec![(place, Cell::Root(saving.root))]);
            after.saving = Some(Saving { submitted: saving.submitted + 1, ..saving });
            steps.push(Step::new(format!("the root goes to place {}", saving.submitted), after));
        }
        if saving.answered == if self.rules.both_places { 2 } else { 1 } {
            let mut after = state.clone();
            after.newest = saving.root;
            if saving.submitted == 2 && saving.answered == 2 {
                after.saving = None;
            }
            steps.push(Step::new("the root counts", after));
        } else if saving.answered == 2 {
            let mut after = state.clone();
            after.saving = None;
            steps.push(Step::new("the root is on both places", after));
        }
    }

    pub(crate) fn store_steps(&self, state: &State, steps: &mut Vec<Step>) {
        for (at, write) in state.writes.iter().enumerate().filter(|(_, write)| !write.is_answered) {
            let mut after = state.clone();
            after.writes[at].is_answered = true;
            let text = match write.purpose {
                Use::Entry { sequence } => {
                    after.answered |= 1 << sequence;
                    if state.start == Start::EntryUnderWay {
                        after.start = Start::Done;
                    }
                    format!("entry {sequence} is answered")
                }
                Use::Chunk { slot } => {
                    if let Some(store) = &mut after.stores[slot as usize] {
                        store.is_answered = true;
                    }
                    "the chunk is answered".into()
                }
                Use::Page => {
                    if let Some(saving) = &mut after.saving {
                        saving.page_is_answered = true;
                    }
                    "the page is answered".into()
                }
                Use::Root => {
                    if let Some(saving) = &mut after.saving {
                        saving.answered += 1;
                    }
                    if state.start == Start::Root {
                        after.start = if self.rules.start_has_entry { Start::Entry } else { Start::Done };
                    }
                    "the root is answered".into()
                }
                Use::Nothing if write.is_late => {
                    let write = after.writes.remove(at);
                    write.cells.iter().for_each(|(at, cell)| after.cells[*at as usize] = *cell);
                    after.writes.iter_mut().for_each(|write| write.behind = 0);
                    "a write from before the start comes late".into()
                }
                Use::Nothing => continue,
            };
            steps.push(Step::new(text, after));
        }
    }
}
