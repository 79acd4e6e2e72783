//! The start of the volume: the root, the pages that stay in memory, and the journal. Rules K1 and J4.

use super::checkpoint::Checkpoint;
use super::journal::Journal;
use super::pages::{Opening, PageLoad, Pages};
use super::place;
use super::reads::filled;
use super::segments::Segments;
use super::space::Need;
use super::store::{Store, blank_pages};
use super::{CasVolume, Purpose, Stage};
use crate::array::StripeReply;
use crate::array::mutation::{Mutation, is_off};
use crate::block_io::BufMut;
use crate::format::cas::{
    CAS_BLOCK_BYTES, CasRecord, CasRoot, CatalogueSlot, EntryHash, JournalEntry, JournalPlace, RootError,
    SegmentEntry, SegmentIndex,
};
use crate::volume::api::ClientError;
use std::collections::BTreeMap;

/// Most pages that are read at one time.
const READS_MAX: usize = 64;
/// The first entry of the journal.
const FIRST_SEQUENCE: u64 = 1;

/// How far a start has come.
pub(super) struct Start {
    stage: StartStage,
    /// What is read from the two places of the root.
    roots: [Option<Result<CasRoot, RootError>>; 2],
    /// Location pages, or pages of entries, that are being read.
    reading: Vec<Option<PageLoad>>,
    opening: Option<Opening>,
    /// Where the next entry of the journal is looked for.
    place: JournalPlace,
    /// Segments of the journal so far.
    segments: Vec<SegmentIndex>,
    /// The entry whose records are being applied, and how many are.
    entry: Option<(JournalEntry, usize)>,
    /// Blocks that the entry takes.
    blocks: u32,
    /// Whether the entry is looked for in the next segment, as there is none behind the last one.
    in_next: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StartStage {
    /// Both places of the root are read.
    Roots,
    /// The pages that say where pages lie, and those that stay in memory.
    Pages,
    /// The place that lacks the newest root gets it.
    Mend,
    /// The journal is read.
    Replay,
    /// A new volume is made.
    Format,
    /// The entry that begins this start's part of the journal is written.
    Mark,
}

impl CasVolume {
    pub(super) fn is_starting(&self) -> bool {
        matches!(self.stage, Stage::Starting(_))
    }

    fn start_of(&mut self) -> &mut Start {
        match &mut self.stage {
            Stage::Starting(start) => start,
            _ => unreachable!("the volume is starting"),
        }
    }

    /// Begins a start.
    pub(super) fn begin_start(&mut self) {
        self.store = Store::blank(&self.facts);
        self.checkpoint = Checkpoint::default();
        self.stage = Stage::Starting(Box::new(Start {
            stage: StartStage::Roots,
            roots: [None, None],
            reading: Vec::new(),
            opening: None,
            place: JournalPlace::default(),
            segments: Vec::new(),
            entry: None,
            blocks: 0,
            in_next: false,
        }));
        for copy in 0..2 {
            let buf = self.pool.alloc(CAS_BLOCK_BYTES);
            self.ask_blocks(Purpose::Start(copy), self.root_segment(copy), 0, buf);
        }
    }

    /// Something that a start reads is there.
    pub(super) fn start_read(&mut self, step: usize, result: Result<StripeReply, ClientError>) {
        let buf = match result {
            Ok(reply) => filled(reply),
            // A root that cannot be read may be on its other place.
            Err(_) if self.start_of().stage == StartStage::Roots => {
                self.start_of().roots[step] = Some(Err(RootError::Damaged));
                return self.choose_root();
            }
            Err(_) => return self.fail(),
        };
        match self.start_of().stage {
            StartStage::Roots => {
                let root = CasRoot::decode(&buf, &self.facts.key, self.facts.array);
                self.start_of().roots[step] = Some(root);
                self.choose_root();
            }
            StartStage::Pages => self.start_page(step, &buf),
            StartStage::Replay => self.entry_read(step, &buf),
            StartStage::Mend | StartStage::Format | StartStage::Mark => unreachable!("nothing is read"),
        }
    }

    /// Both places of the root were read.
    fn choose_root(&mut self) {
        let [Some(first), Some(last)] = self.start_of().roots.clone() else { return };
        let newest = match (first, last) {
            (Ok(first), Ok(last)) if first.generation >= last.generation => first,
            (_, Ok(last)) => last,
            (Ok(first), _) => first,
            (Err(RootError::Blank), Err(RootError::Blank)) => return self.format(),
            _ => return self.fail(),
        };
        self.checkpoint = Checkpoint::after(newest.generation, newest.journal.sequence);
        self.store.ledger = Store::ledger(&self.facts, newest.next_number);
        let Ok(opening) = Opening::new(self.facts.key, &newest.spaces) else { return self.fail() };
        let start = self.start_of();
        (start.place, start.segments) = (newest.journal, vec![newest.journal.segment]);
        start.opening = Some(opening);
        start.stage = StartStage::Pages;
        self.read_start_pages();
    }

    /// Reads the next pages that a start needs.
    fn read_start_pages(&mut self) {
        loop {
            let start = self.start_of();
            let under_way = start.reading.iter().flatten().count();
            if under_way >= READS_MAX {
                return;
            }
            let Some(opening) = &mut start.opening else { return };
            let Some(load) = opening.next_to_read() else {
                if under_way == 0 && opening.is_complete() {
                    return self.opened();
                }
                return;
            };
            let free = start.reading.iter().position(Option::is_none);
            let at = free.unwrap_or_else(|| {
                start.reading.push(None);
                start.reading.len() - 1
            });
            start.reading[at] = Some(load);
            let buf = self.pool.alloc(CAS_BLOCK_BYTES);
            self.ask_blocks(Purpose::Start(at), load.at.segment, load.at.block, buf);
        }
    }

    fn start_page(&mut self, at: usize, buf: &BufMut) {
        let start = self.start_of();
        let Some(load) = start.reading[at].take() else { unreachable!("a page was asked for") };
        let taken = start.opening.as_mut().is_some_and(|opening| opening.loaded(load, buf).is_ok());
        if !taken {
            return self.fail();
        }
        self.read_start_pages();
    }

    /// Chunks that are used, as the segments say.
    fn count_chunks(&mut self) {
        let live = |segment| u64::from(self.store.segment(segment).live.get());
        self.store.live = self.all_segments().map(live).sum::<u64>() / 256;
    }

    /// All locations and all pages that stay in memory are there.
    fn opened(&mut self) {
        let start = self.start_of();
        let Some(opening) = start.opening.take() else { unreachable!("pages were opened") };
        let is_on_both = match &start.roots {
            [Some(Ok(first)), Some(Ok(last))] => first.generation == last.generation,
            _ => false,
        };
        let is_on_both = is_on_both || is_off(Mutation::CasRootNotMended);
        start.stage = if is_on_both { StartStage::Replay } else { StartStage::Mend };
        let place = start.place;
        self.store.pages = Pages::new(opening, self.facts.page_cache as u64);
        self.count_chunks();
        if is_on_both {
            return self.read_entry();
        }
        let [first, last] = &self.start_of().roots;
        let (lacking, newest) = match (first, last) {
            (Some(Ok(first)), Some(Ok(last))) if first.generation > last.generation => (1, first.clone()),
            (Some(Ok(first)), Some(Err(_))) => (1, first.clone()),
            (_, Some(Ok(last))) => (0, last.clone()),
            _ => unreachable!("one of them is good"),
        };
        debug_assert_eq!(newest.journal, place);
        let mut block = self.pool.alloc(CAS_BLOCK_BYTES);
        block.copy_from_slice(&newest.encode(&self.facts.key, self.facts.array)[..]);
        let block = block.freeze();
        let request = self.root_request(lacking, block.clone());
        self.ask(Purpose::Mend(lacking, block), request);
    }

    /// The newest root is on both places.
    pub(super) fn mended(&mut self) {
        self.start_of().stage = StartStage::Replay;
        self.read_entry();
    }

    /// Reads the first block of the next entry of the journal.
    fn read_entry(&mut self) {
        let blocks = self.facts.segment_blocks;
        let start = self.start_of();
        if !start.in_next && start.place.block >= blocks {
            start.in_next = true;
        }
        let (segment, block) = match start.in_next {
            true => (start.place.next, 0),
            false => (start.place.segment, start.place.block),
        };
        let buf = self.pool.alloc(CAS_BLOCK_BYTES);
        self.ask_blocks(Purpose::Start(0), segment, block, buf);
    }

    /// A piece of the journal was read: the first block of an entry (step 0), or all of it (step 1).
    fn entry_read(&mut self, step: usize, buf: &BufMut) {
        let (key, blocks) = (self.facts.key, self.facts.segment_blocks);
        let start = self.start_of();
        let at = if start.in_next { 0 } else { start.place.block };
        let segment = if start.in_next { start.place.next } else { start.place.segment };
        let head = JournalEntry::peek(&buf[..CAS_BLOCK_BYTES]).ok().filter(|head| {
            let place = &head.place;
            place.sequence == start.place.sequence
                && place.previous == start.place.previous
                && (place.segment, place.block) == (segment, at)
                && u64::from(at) + u64::from(head.blocks()) <= u64::from(blocks)
        });
        let Some(head) = head else { return self.no_entry() };
        if step == 0 && head.blocks() > 1 {
            let buf = self.pool.alloc(head.blocks() as usize * CAS_BLOCK_BYTES);
            return self.ask_blocks(Purpose::Start(1), segment, at, buf);
        }
        let Ok(entry) = JournalEntry::decode(buf, &key) else { return self.no_entry() };
        if start.in_next {
            start.segments.push(segment);
        }
        start.in_next = false;
        start.place = JournalPlace {
            sequence: head.place.sequence + 1,
            previous: entry.hash,
            segment,
            block: at + head.blocks(),
            next: head.place.next,
        };
        start.entry = Some((entry, 0));
        self.replay();
    }

    /// No entry is where one was looked for.
    fn no_entry(&mut self) {
        let start = self.start_of();
        if !start.in_next {
            start.in_next = true;
            return self.read_entry();
        }
        self.serve();
    }

    /// A page that the replay waited for may be there.
    pub(super) fn start_goes_on(&mut self) {
        if let Stage::Starting(start) = &self.stage
            && start.stage == StartStage::Replay
            && start.entry.is_some()
        {
            self.replay();
        }
    }

    /// Applies the records of an entry as far as their pages are in memory.
    fn replay(&mut self) {
        loop {
            let start = self.start_of();
            let sequence = start.place.sequence - 1;
            let Some((entry, done)) = &start.entry else { return };
            let Some(record) = entry.records.get(*done).cloned() else { break };
            let missing = self.missing_for(std::slice::from_ref(&record));
            if !missing.is_empty() {
                return missing.into_iter().for_each(|name| self.load_page(name));
            }
            if self.store.apply(sequence, &record).is_err() {
                return self.fail();
            }
            if let Some((_, done)) = &mut self.start_of().entry {
                *done += 1;
            }
        }
        self.start_of().entry = None;
        self.read_entry();
    }

    /// Everything is known. The first entry of this start has to be there before any other is submitted (J5).
    fn serve(&mut self) {
        let start = self.start_of();
        let (place, segments) = (start.place, std::mem::take(&mut start.segments));
        self.store.journal =
            Journal::new(self.facts.key, self.facts.segment_blocks, self.life(), place, segments);
        self.count_segments();
        let empty: Vec<SegmentIndex> = self.all_segments().filter(|at| self.store.is_unused(*at)).collect();
        self.store.empty = empty;
        self.start_of().stage = StartStage::Mark;
        self.mark_start();
        if is_off(Mutation::CasNoStartEntry) && self.is_starting() {
            self.started();
        }
    }

    /// Writes the entry that begins this start's part of the journal: a single block. It waits for pages if
    /// the journal has to go on in another segment.
    fn mark_start(&mut self) {
        if is_off(Mutation::CasNoRandomNumber) {
            return self.started();
        }
        if self.store.journal.is_idle() && self.make_room(Need::Start, 0, 0) {
            self.write_entry_even_if_empty();
        }
    }

    /// Goes on with what a start does besides reading.
    pub(super) fn pump_start(&mut self) {
        match &self.stage {
            Stage::Starting(start) if start.stage == StartStage::Format => self.pump_first_root(),
            Stage::Starting(start) if start.stage == StartStage::Mark => self.mark_start(),
            _ => {}
        }
    }

    /// The entry that begins this start's part of the journal is answered: clients are served.
    pub(super) fn started(&mut self) {
        self.stage = Stage::Serving;
        for (id, request) in std::mem::take(&mut self.work.early) {
            self.begin(id, request);
        }
    }

    /// A random number that no other start has.
    fn life(&self) -> u64 {
        if is_off(Mutation::CasNoRandomNumber) {
            return 0;
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.facts.seed.to_le_bytes()).update(&self.io.life.to_le_bytes());
        let hash = hasher.finalize();
        u64::from_le_bytes(hash.as_bytes().as_chunks::<8>().0[0])
    }

    fn all_segments(&self) -> impl Iterator<Item = SegmentIndex> + use<> {
        (0..self.facts.segments).map(SegmentIndex)
    }

    /// Finds the free segments.
    fn count_segments(&mut self) {
        let pages: BTreeMap<SegmentIndex, u64> = self.store.pages.metadata_segments();
        let is_free = |segment: &SegmentIndex| {
            self.store.segment(*segment).kind == SegmentEntry::FREE && !pages.contains_key(segment)
        };
        let free: Vec<SegmentIndex> = self.all_segments().filter(is_free).collect();
        self.store.segments = Segments::new(free.into_iter(), pages.into_iter());
    }

    /// Makes a new volume on a blank array.
    fn format(&mut self) {
        self.start_of().stage = StartStage::Format;
        self.store.pages = blank_pages(&self.facts);
        for copy in 0..2 {
            let (name, at) = place::of_segment(self.root_segment(copy));
            let entry = SegmentEntry::new(SegmentEntry::ROOT, 0);
            place::PageAccess::change(&mut self.store.pages, name).set_segment_entry(at, entry);
        }
        let journal = |segment| CasRecord::Open { segment, kind: SegmentEntry::JOURNAL };
        let place = JournalPlace {
            sequence: FIRST_SEQUENCE,
            previous: EntryHash::default(),
            segment: SegmentIndex(1),
            block: 0,
            next: SegmentIndex(2),
        };
        let first = CasRecord::Create {
            slot: CatalogueSlot(0),
            created: 0,
            blocks: self.facts.first_blocks,
            name: "volume".into(),
        };
        for record in [journal(place.segment), journal(place.next), first] {
            self.store.apply(0, &record).expect("a blank volume takes these");
        }
        self.count_segments();
        let start = self.start_of();
        (start.place, start.segments) = (place, vec![place.segment]);
        let life = self.life();
        self.store.journal =
            Journal::new(self.facts.key, self.facts.segment_blocks, life, place, [place.segment]);
        self.write_first_root(1, place);
    }

    /// The first root of a new volume is on both places.
    pub(super) fn start_root_written(&mut self) {
        self.root_is_durable();
        self.checkpoint = Checkpoint::after(1, FIRST_SEQUENCE);
        self.serve();
    }
}
