//! Roots: the pages as they are at one position of the journal are written, then a root that names them.
//! Rules K1 and K3.

use super::space::Need;
use super::store::Store;
use super::{CasVolume, Purpose};
use crate::array::StripeRequest;
use crate::array::mutation::{Mutation, is_off};
use crate::block_io::Buf;
use crate::format::cas::{CAS_BLOCK_BYTES, CasRoot, JournalPlace, PageLocation, PageName, SegmentIndex};
use crate::units::{StripeIndex, Timestamp};

/// Segments of pages that are written at one time.
const IN_FLIGHT_MAX: usize = 4;
/// A root is written when the journal fills this many segments, or when this much of it does.
const JOURNAL_SEGMENTS: usize = 64;
/// A volume that has been quiet for this long writes a root.
const IDLE_NS: u64 = 1_000_000_000;

/// The root that is being written, and the newest one.
#[derive(Debug, Default)]
pub(super) struct Checkpoint {
    stage: Stage,
    wanted: bool,
    /// What the root says.
    generation: u64,
    place: JournalPlace,
    next_number: u32,
    in_flight: usize,
    /// Whether all pages of the root have got their places.
    all_handed_out: bool,
    /// The position of the newest root.
    pub newest: u64,
    last_join: Timestamp,
    joined: u64,
    /// The root itself, where a test has it count before it is written.
    early: Option<Buf>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Idle,
    Pages,
    Root(usize),
}

impl Checkpoint {
    /// After a start from a root.
    pub(super) fn after(generation: u64, newest: u64) -> Checkpoint {
        Checkpoint { generation, newest, ..Checkpoint::default() }
    }

    /// Asks for a root.
    pub(super) fn want(&mut self) {
        self.wanted = true;
    }

    /// Whether none is being written or asked for.
    pub(super) fn is_idle(&self) -> bool {
        self.stage == Stage::Idle && !self.wanted
    }

    /// Whether the newest root contains everything but what followed from it.
    pub(super) fn is_over(&self, store: &Store) -> bool {
        self.stage == Stage::Idle && (self.newest == store.journal.sequence() || !self.wanted)
    }
}

impl CasVolume {
    /// Advances the root that is being written, or begins one that is due.
    pub(super) fn pump_checkpoint(&mut self) {
        loop {
            let before = self.checkpoint.stage;
            match before {
                Stage::Idle => self.begin_root(),
                Stage::Pages => self.write_pages(),
                Stage::Root(_) => {}
            }
            if self.checkpoint.stage == before {
                return;
            }
        }
    }

    fn is_root_due(&self) -> bool {
        let checkpoint = &self.checkpoint;
        let store = &self.store;
        if checkpoint.wanted {
            return true;
        }
        let most = JOURNAL_SEGMENTS.min(self.facts.segments as usize / 16).max(2);
        let is_new = checkpoint.newest < store.journal.sequence() || !store.journal.is_open_empty();
        store.journal.segments() > most
            || store.pages.facts().changed * CAS_BLOCK_BYTES as u64 > self.facts.page_cache as u64 / 2
            || (is_new && self.now.nanos_since(checkpoint.last_join) >= IDLE_NS)
    }

    fn begin_root(&mut self) {
        if self.checkpoint.joined != self.store.journal.sequence() {
            self.checkpoint.joined = self.store.journal.sequence();
            self.checkpoint.last_join = self.now;
        }
        if !self.is_root_due() {
            return;
        }
        if !self.store.journal.is_open_empty() && !self.write_entry() {
            return;
        }
        self.checkpoint.wanted = false;
        self.checkpoint.generation += 1;
        self.checkpoint.place = self.store.journal.place();
        self.checkpoint.next_number = self.store.ledger.next_number();
        self.store.pages.freeze();
        self.checkpoint.all_handed_out = false;
        self.checkpoint.stage = Stage::Pages;
        if is_off(Mutation::CasJournalGivenUpEarly) {
            let place = self.checkpoint.place;
            let passed = self.store.journal.passed(&place);
            passed.into_iter().for_each(|segment| self.store.look_at(segment));
        }
    }

    /// Writes pages to free segments; when all are written, and the entries that the root contains, the root.
    fn write_pages(&mut self) {
        while self.checkpoint.in_flight < IN_FLIGHT_MAX && !self.checkpoint.all_handed_out {
            let Some(segment) = self.store.segments.take(self.reserve(Need::Root)) else { return };
            let (mut names, mut blocks) = (Vec::new(), Vec::new());
            while blocks.len() < self.facts.segment_blocks as usize {
                let at = PageLocation { segment, block: blocks.len() as u32 };
                let mut buf = self.pool.alloc(CAS_BLOCK_BYTES);
                let Some(name) = self.store.pages.next_to_write(at, &mut buf) else { break };
                names.push(name);
                blocks.push(buf.freeze());
            }
            self.checkpoint.all_handed_out = blocks.len() < self.facts.segment_blocks as usize;
            if blocks.is_empty() {
                self.store.segments.release(segment);
                break;
            }
            self.store.segments.add_pages(segment, blocks.len() as u64);
            let left = self.facts.segment_blocks as usize - blocks.len();
            if left > 0 {
                blocks.push(self.pool.alloc_zeroed(left * CAS_BLOCK_BYTES).freeze());
            }
            self.checkpoint.in_flight += 1;
            let stripe = StripeIndex(segment.0.into());
            let request = StripeRequest::WriteStripe { stripe, parts: blocks.clone(), fua: false };
            self.ask(Purpose::Pages(segment, names, blocks), request);
        }
        let is_early = is_off(Mutation::CasRootBeforePages) && !self.is_starting();
        let are_answered = self.checkpoint.in_flight == 0 || is_early;
        let is_written = are_answered && self.checkpoint.all_handed_out;
        let is_contained = self.store.journal.answered() >= self.checkpoint.place.sequence;
        if is_written && (is_contained || is_off(Mutation::CasRootBeforeEntries)) {
            self.checkpoint.stage = Stage::Root(0);
            self.write_root(0);
        }
    }

    pub(super) fn pages_written(&mut self, names: &[PageName]) {
        self.checkpoint.in_flight -= 1;
        names.iter().for_each(|name| self.store.pages.write_answered(*name));
    }

    fn write_root(&mut self, copy: usize) {
        let root = CasRoot {
            generation: self.checkpoint.generation,
            journal: self.checkpoint.place,
            next_number: self.checkpoint.next_number,
            spaces: self.store.pages.root_spaces(),
        };
        let mut block = self.pool.alloc(CAS_BLOCK_BYTES);
        block.copy_from_slice(&root.encode(&self.facts.key, self.facts.array)[..]);
        let block = block.freeze();
        let request = self.root_request(copy, block.clone());
        self.ask(Purpose::Root(copy, block.clone()), request);
        if is_off(Mutation::CasPagesReusedEarly) && !self.is_starting() {
            // The rest follows when the first place is answered.
            self.root_is_durable();
            self.checkpoint.early = Some(block);
        }
    }

    /// The segment of a place of the root.
    pub(super) fn root_segment(&self, copy: usize) -> SegmentIndex {
        SegmentIndex(if copy == 0 { 0 } else { self.facts.segments - 1 })
    }

    pub(super) fn root_request(&self, copy: usize, data: Buf) -> StripeRequest {
        let stripe = StripeIndex(self.root_segment(copy).0.into());
        StripeRequest::Write { stripe, offset: 0, data, fua: false }
    }

    /// A place of the root is written.
    pub(super) fn root_written(&mut self, copy: usize) {
        if copy == 0 {
            self.checkpoint.stage = Stage::Root(1);
            if let Some(block) = self.checkpoint.early.clone() {
                let request = self.root_request(1, block.clone());
                return self.ask(Purpose::Root(1, block), request);
            }
            return self.write_root(1);
        }
        if self.is_starting() {
            return self.start_root_written();
        }
        self.checkpoint.stage = Stage::Idle;
        if self.checkpoint.early.take().is_none() {
            self.root_is_durable();
        }
    }

    /// Only the newest root counts from now on.
    pub(super) fn root_is_durable(&mut self) {
        self.checkpoint.newest = self.checkpoint.place.sequence;
        for old in self.store.pages.root_is_durable() {
            self.store.segments.drop_page(old.segment);
        }
        let place = self.checkpoint.place;
        for segment in self.store.journal.passed(&place) {
            self.store.look_at(segment);
        }
        self.work.ready.extend(self.work.starved.drain(..));
    }

    /// Writes the first root of a new volume, or puts the newest root on the place that lacks it.
    pub(super) fn write_first_root(&mut self, next_number: u32, place: JournalPlace) {
        (self.checkpoint.generation, self.checkpoint.place) = (self.checkpoint.generation + 1, place);
        self.checkpoint.next_number = next_number;
        self.store.pages.freeze();
        self.checkpoint.all_handed_out = false;
        self.checkpoint.stage = Stage::Pages;
        self.write_pages();
    }

    /// Whether pages of the first root are still to be written.
    pub(super) fn pump_first_root(&mut self) {
        if self.checkpoint.stage == Stage::Pages {
            self.write_pages();
        }
    }
}
