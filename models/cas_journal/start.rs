//! Crashes, failures and damage of the store, and starts from what is left.

use crate::state::{
    BLOCKS, CELLS, Cell, Chunk, PAGE_BLOCKS, Pages, Place, ROOT, SEGMENTS, Start, State, UNDER_WAY, Use,
    Write,
};
use crate::{Config, Damage, Step};

impl Config {
    /// What the store may hold after a crash, and how many writes have left something.
    pub(crate) fn left_by_crash(&self, state: &State) -> Vec<([Cell; CELLS], u32)> {
        let mut left: Vec<([Cell; CELLS], u32)> = vec![];
        // For each write the blocks of it that are there, bit by bit.
        let mut chosen = vec![0u8; state.writes.len()];
        self.choose(state, &mut chosen, 0, &mut |chosen| {
            let mut cells = state.cells;
            for (write, kept) in state.writes.iter().zip(chosen) {
                for (at, (cell, content)) in write.cells.iter().enumerate() {
                    if kept >> at & 1 == 1 {
                        cells[*cell as usize] = *content;
                    }
                }
            }
            if left.iter().all(|(other, _)| *other != cells) {
                left.push((cells, chosen.iter().map(|kept| u32::from(*kept != 0)).sum()));
            }
        });
        left
    }

    fn choose(&self, state: &State, chosen: &mut Vec<u8>, at: usize, found: &mut impl FnMut(&[u8])) {
        let Some(write) = state.writes.get(at) else { return found(chosen) };
        let all = (1u8 << write.cells.len()) - 1;
        for kept in (0..=all).filter(|kept| [0, all].contains(kept) || !write.is_answered) {
            let counts = kept != 0 && (kept == all || self.rules.ordered_by_parts);
            let is_whole = |other: usize| chosen[other] == (1u8 << state.writes[other].cells.len()) - 1;
            let is_allowed = (0..at).all(|other| write.behind >> other & 1 == 0 || is_whole(other));
            if !counts || is_allowed || !self.rules.ordered {
                chosen[at] = kept;
                self.choose(state, chosen, at + 1, found);
            }
        }
        chosen[at] = 0;
    }

    pub(crate) fn damaged(&self, state: &State, cells: [Cell; CELLS], steps: &mut Vec<Step>) {
        let may_be = |cell: &Cell| match (self.damage, cell) {
            (Damage::Roots, Cell::Root(_)) => true,
            (Damage::Entries, Cell::Header(entry)) => state.journal.contains(entry),
            _ => false,
        };
        for at in (0..CELLS).filter(|at| may_be(&cells[*at])) {
            let mut cells = cells;
            cells[at] = Cell::Unreadable;
            let mut damaged = state.clone();
            damaged.damage = 1;
            steps.extend(self.started(&damaged, cells, None, format!("CRASH, and {at} cannot be read")));
        }
    }

    /// The array fails: writes that were not flushed may be gone, while clients stay.
    pub(crate) fn failures(&self, state: &State, steps: &mut Vec<Step>) {
        for (cells, kept) in self.left_by_crash(state) {
            let name = format!("THE ARRAY FAILS: of {} writes {kept} stay", state.writes.len());
            if !self.rules.starts_anew {
                let mut after = state.clone();
                (after.cells, after.failures) = (cells, state.failures + 1);
                (after.writes, after.flushing) = (vec![], None);
                after.answered = (1 << state.journal.len()) - 1;
                (after.stores, after.saving) = ([None; UNDER_WAY], None);
                let wrong = wrong(&after.pages, &after.seen());
                steps.push(Step { text: name, after, wrong });
                continue;
            }
            steps.extend(self.started(state, cells, Some(None), name.clone()));
            if !self.rules.restart_waits {
                for (at, write) in state.writes.iter().enumerate().filter(|(_, write)| !write.is_answered) {
                    steps.extend(self.started(
                        state,
                        cells,
                        Some(Some(write)),
                        format!("{name}, {at} later"),
                    ));
                }
            }
        }
    }

    /// Starts from what the store holds. `failed`: after a failure of the array, with a write that is under
    /// way still.
    pub(crate) fn started(
        &self,
        state: &State,
        cells: [Cell; CELLS],
        failed: Option<Option<&Write>>,
        text: String,
    ) -> Option<Step> {
        let mut after = State {
            cells,
            writes: vec![],
            flushing: None,
            stores: [None; UNDER_WAY],
            saving: None,
            freed_by: [0; SEGMENTS],
            start: if self.rules.start_has_entry { Start::Entry } else { Start::Done },
            run: state.run + u8::from(self.rules.entries_have_run),
            crashes: state.crashes + u8::from(failed.is_none()),
            failures: state.failures + u8::from(failed.is_some()),
            ..state.clone()
        };
        let say = |after, wrong: &str| Some(Step { text: text.clone(), after, wrong: Some(wrong.into()) });
        let root_at = |place: usize| match cells[ROOT + place] {
            Cell::Root(root) => Some(root),
            _ => None,
        };
        let roots = [root_at(0), root_at(1)];
        let newest = roots.into_iter().flatten().max_by_key(|root| state.roots[*root as usize].generation);
        let Some(newest) = newest else { return say(after, "there is no root") };
        let root = state.roots[newest as usize];
        if cells[root.page as usize * BLOCKS..][..PAGE_BLOCKS] != [Cell::Page(newest); PAGE_BLOCKS] {
            return say(after, "the page of the root is gone");
        }
        let (found, place) = self.found(state, &cells, root.place)?;
        let mut journal = state.journal[..root.place.sequence as usize].to_vec();
        journal.extend(&found);
        if state.journal.get(..journal.len()) != Some(&journal[..]) {
            return say(after, "an entry counts that is not the next of the journal");
        }
        if journal.len() < state.promised as usize {
            return say(after, "an entry is lost that a flush promised, or that a start had found");
        }
        let mut pages = root.pages;
        found.iter().for_each(|entry| pages.apply(&state.entries[*entry as usize]));
        let mut expected = Pages::EMPTY;
        journal.iter().for_each(|entry| expected.apply(&state.entries[*entry as usize]));
        if pages != expected {
            return say(after, "the pages are not what the entries make of them");
        }
        if !self.rules.found_stays {
            // What had not been answered may go again.
            for write in state.writes.iter().filter(|write| !write.is_answered) {
                if write.cells.iter().all(|(at, cell)| cells[*at as usize] == *cell) {
                    write.cells.iter().for_each(|(at, _)| after.cells[*at as usize] = Cell::Blank);
                    after.submit(Use::Nothing, write.cells.clone());
                }
            }
        }
        after.is_lost = failed.is_some() && state.answered_upto() as usize > journal.len();
        (after.pages, after.place, after.newest) = (pages, place, newest);
        (after.promised, after.answered) = (journal.len() as u8, (1 << journal.len()) - 1);
        after.journal = journal;
        if let Some(Some(late)) = failed {
            after.writes.push(Write { purpose: Use::Nothing, is_late: true, ..late.clone() });
            after.writes[0].behind = 0;
        }
        if let Some(other) = (0..2).find(|place| root_at(*place) != Some(newest))
            && self.rules.start_completes
        {
            after.submit(Use::Root, vec![((ROOT + other) as u8, Cell::Root(newest))]);
            after.start = Start::Root;
        }
        let wrong = wrong(&after.pages, &after.seen());
        Some(Step { text, after, wrong })
    }

    /// The entries that count from a place on, and the place behind them; none if that cannot be said.
    fn found(&self, state: &State, cells: &[Cell; CELLS], from: Place) -> Option<(Vec<u8>, Place)> {
        let (mut found, mut place) = (vec![], from);
        'entries: loop {
            let next = Place { segment: place.next, block: 0, ..place };
            let places = [place, next];
            for at in places.iter().filter(|at| (at.block as usize) < BLOCKS) {
                let cell = at.cell();
                match cells[cell] {
                    Cell::Unreadable if self.rules.error_is_no_end => return None,
                    Cell::Header(identity) => {
                        let entry = &state.entries[identity as usize];
                        let is_next = entry.place.sequence == at.sequence
                            && (entry.place.previous == at.previous || !self.rules.chained)
                            && entry.place.cell() == cell;
                        let is_right = |content| cells[cell + 1] == Cell::Chunk(content);
                        if is_next && (entry.inline().is_none_or(is_right) || !self.rules.hash_covers_chunk) {
                            found.push(identity);
                            place = Place {
                                sequence: at.sequence + 1,
                                previous: identity,
                                block: at.block + entry.blocks(),
                                ..entry.place
                            };
                            continue 'entries;
                        }
                    }
                    _ => {}
                }
            }
            return Some((found, place));
        }
    }
}

/// What a block of the client reads that it should not.
pub(crate) fn wrong(pages: &Pages, cells: &[Cell; CELLS]) -> Option<String> {
    for (block, chunk) in pages.map.iter().enumerate() {
        let Some(Chunk { at, content }) = *chunk else { continue };
        let found = cells[at as usize];
        if found != Cell::Chunk(content) {
            return Some(format!("block {block} reads {found:?} of {at}, not {content}"));
        }
    }
    None
}
