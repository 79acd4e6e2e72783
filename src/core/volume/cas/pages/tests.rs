//! Pages on a simulated disk: random changes, roots, loads and power losses, against a plain map of contents.

use super::cache::is_resident;
use super::*;
use proptest::prelude::*;
use std::collections::{BTreeSet, VecDeque};
use uuid::Uuid;

mod cases;

/// Blocks of a segment: few, so that segments come free and are used again.
const SEGMENT_BLOCKS: u32 = 4;

/// Pages that did not change and stay however many others there are.
const KEPT: usize = 2;

fn key() -> CasKey {
    CasKey::derive(Uuid::from_u128(3), [1; 16])
}

fn name(space: PageSpace, index: u64) -> PageName {
    PageName { space, level: 0, index }
}

fn map(index: u64) -> PageName {
    name(PageSpace::Map, index)
}

/// What the pages should hold: the value of each that was ever changed.
type Contents = BTreeMap<PageName, u64>;

/// A root as the disk has it, and what it should contain.
#[derive(Clone, Default)]
struct DurableRoot {
    spaces: [SpaceRoot; SPACES],
    contents: Contents,
}

/// A volume's worth of pages on a disk, with what is expected of them.
struct World {
    pages: Pages,
    disk: BTreeMap<PageLocation, Vec<u8>>,
    /// Places that a root names or a root under way was given.
    named: BTreeSet<PageLocation>,
    /// Where the next page goes; none before a segment was chosen.
    next: Option<PageLocation>,
    contents: Contents,
    frozen: Option<Contents>,
    durable: DurableRoot,
    reading: VecDeque<PageLoad>,
    /// Writes that are not on the disk yet, and may not be after a power loss.
    unanswered: Vec<(PageName, PageLocation, Vec<u8>)>,
    /// How many pages were to be written at most, before each that was, for the root under way.
    bounds: Vec<u64>,
    limit: usize,
    is_held: bool,
}

fn value_of(page: &RawCasPage) -> u64 {
    assert_eq!(page.location(0), page.location(PAGE_END));
    page.location(0)
}

const PAGE_END: usize = crate::format::cas::PAGE_SLOTS - 1;

/// A start from what is on the disk.
fn open(disk: &BTreeMap<PageLocation, Vec<u8>>, spaces: &[SpaceRoot; SPACES], limit: usize) -> Pages {
    let mut opening = Opening::new(key(), spaces).expect("a root that was written");
    while !opening.is_complete() {
        let loads: Vec<_> = std::iter::from_fn(|| opening.next_to_read()).collect();
        assert!(!loads.is_empty(), "something to go on with");
        for load in loads.into_iter().rev() {
            opening.loaded(load, &disk[&load.at]).expect("a page that was written");
        }
    }
    Pages::with_limit(opening, limit, KEPT)
}

impl World {
    fn new(limit: usize) -> World {
        let disk = BTreeMap::new();
        World {
            pages: open(&disk, &Default::default(), limit),
            disk,
            named: BTreeSet::new(),
            next: None,
            contents: Contents::new(),
            frozen: None,
            durable: DurableRoot::default(),
            reading: VecDeque::new(),
            unanswered: Vec::new(),
            bounds: Vec::new(),
            limit,
            is_held: false,
        }
    }

    /// Brings a page to memory.
    fn fetch(&mut self, name: PageName) {
        for _ in 0..2 {
            if self.pages.page(name).is_some() {
                return;
            }
            match self.pages.want(name) {
                Want::InMemory => panic!("not in memory, and need not be read"),
                Want::Read(load) => self.reading.push_back(load),
                Want::UnderWay => assert!(self.reading.iter().any(|load| load.name == name)),
            }
            let at = self.reading.iter().rposition(|load| load.name == name).expect("under way");
            let load = self.reading.remove(at).expect("there");
            self.pages.loaded(load, &self.disk[&load.at]).expect("a page that was written");
            self.check_limit();
        }
        panic!("a page that was just loaded was the first to go: {name:?}");
    }

    /// Above the limit are only pages that have to stay, and a few for what is loaded to be of use.
    fn check_limit(&self) {
        let may_go = |name: &&PageName| {
            !is_resident(name.space) && self.pages.cache.state(**name) == Known::Content(PageState::Clean)
        };
        let is_within = self.pages.facts().page_bytes <= (self.limit * CAS_BLOCK_BYTES) as u64;
        assert!(is_within || self.is_held || self.contents.keys().filter(may_go).count() <= KEPT);
    }

    fn change(&mut self, name: PageName, value: u64) {
        self.fetch(name);
        let page = self.pages.change(name);
        page.set_location(0, value);
        page.set_location(PAGE_END, value);
        self.contents.insert(name, value);
        self.check(name);
    }

    fn check(&mut self, name: PageName) {
        self.fetch(name);
        let page = self.pages.page(name).expect("in memory");
        assert_eq!(value_of(page), self.contents.get(&name).copied().unwrap_or(0), "{name:?}");
    }

    fn maps(&self) -> Vec<u64> {
        let maps = self.contents.range(map(0)..name(PageSpace::Table, 0));
        maps.map(|(name, _)| name.index).collect()
    }

    fn new_map(&mut self) -> u64 {
        let number = self.pages.new_map_page();
        let lowest = (1..).find(|&number| !self.contents.contains_key(&map(number)));
        assert_eq!(Some(number), lowest);
        self.contents.insert(map(number), 0);
        self.check(map(number));
        number
    }

    fn free_map(&mut self, number: u64) {
        self.pages.free_map_page(number);
        self.contents.remove(&map(number));
        self.check(map(number));
    }

    fn freeze(&mut self) {
        if self.frozen.is_none() {
            let [_, bound] = self.pages.write_bounds();
            self.pages.freeze();
            self.bounds = vec![bound];
            self.frozen = Some(self.contents.clone());
        }
    }

    /// The place after the last, or of a segment in which nothing is named.
    fn place(&mut self) -> PageLocation {
        if let Some(at) = self.next.filter(|at| at.block < SEGMENT_BLOCKS) {
            return at;
        }
        let is_free = |&segment: &u32| !self.named.iter().any(|at| at.segment.0 == segment);
        let segment = SegmentIndex((1..).find(is_free).expect("a free segment"));
        PageLocation { segment, block: 0 }
    }

    /// Writes a page of the root under way; false if there is none.
    fn write(&mut self) -> bool {
        if self.frozen.is_none() {
            return false;
        }
        let at = self.place();
        let [bound, _] = self.pages.write_bounds();
        let mut block = vec![0x55; CAS_BLOCK_BYTES];
        let Some(name) = self.pages.next_to_write(at, &mut block) else { return false };
        self.bounds.push(bound);
        assert!(RawCasPage::open(&block, &key(), name).is_some());
        assert!(self.named.insert(at), "written over what a root names");
        self.unanswered.push((name, at, block));
        self.next = Some(PageLocation { block: at.block + 1, ..at });
        true
    }

    fn answer(&mut self, at: usize) {
        if !self.unanswered.is_empty() {
            let (name, at, block) = self.unanswered.swap_remove(at % self.unanswered.len());
            self.disk.insert(at, block);
            self.pages.write_answered(name);
        }
    }

    fn durable(&mut self) {
        while self.write() {}
        let Some(contents) = self.frozen.take() else { return };
        // The first is that from before the freeze.
        let written = self.bounds.len() as u64 - 1;
        assert!(self.bounds[0] >= written, "{written} pages written");
        assert!(self.bounds[1..].iter().zip(0..).all(|(&bound, before)| bound >= written - before));
        // The root is written when all its pages are; whether that was said one by one is no matter.
        for (_, at, block) in self.unanswered.drain(..) {
            self.disk.insert(at, block);
        }
        self.durable = DurableRoot { spaces: self.pages.root_spaces(), contents };
        for at in self.pages.root_is_durable() {
            assert!(self.named.remove(&at), "handed back twice, or never named: {at:?}");
            // Whatever comes there next.
            self.disk.insert(at, vec![0xee; CAS_BLOCK_BYTES]);
        }
        self.check_accounts();
        self.check_durable();
    }

    /// What the locations say is named is what was written and not handed back.
    fn check_accounts(&self) {
        let mut counts: BTreeMap<SegmentIndex, u64> = BTreeMap::new();
        self.named.iter().for_each(|at| *counts.entry(at.segment).or_default() += 1);
        assert_eq!(self.pages.metadata_segments(), counts);
    }

    /// A start would find exactly what there was at the freeze, however often it happens.
    fn check_durable(&self) {
        let mut pages = open(&self.disk, &self.durable.spaces, 1000);
        for (&name, &value) in &self.durable.contents {
            if let Want::Read(load) = pages.want(name) {
                pages.loaded(load, &self.disk[&load.at]).expect("a page that was written");
            }
            assert_eq!(value_of(pages.page(name).expect("in memory")), value, "{name:?}");
        }
        let located = pages.trees.iter().flat_map(Tree::located).filter(|(name, _)| name.level == 0);
        let located: Vec<_> = located.map(|(name, _)| name).collect();
        assert!(
            located.iter().all(|name| self.durable.contents.contains_key(name)),
            "what was freed is gone"
        );
    }

    fn crash(&mut self) {
        self.pages = open(&self.disk, &self.durable.spaces, self.limit);
        self.contents = self.durable.contents.clone();
        self.is_held = false;
        (self.frozen, self.next) = (None, None);
        self.named = self.pages.trees.iter().flat_map(Tree::located).map(|(_, at)| at).collect();
        self.reading.clear();
        // Some arrived.
        let arrived = self.unanswered.drain(..).step_by(2);
        self.disk.extend(arrived.map(|(_, at, block)| (at, block)));
        self.check_accounts();
    }

    /// Moves what lies in a segment: after the next root nothing does.
    fn compact(&mut self, segment: SegmentIndex) {
        for name in self.pages.pages_at(|at| at == segment) {
            if !self.pages.touch(name) {
                self.fetch(name);
                assert!(self.pages.touch(name));
            }
        }
        assert!(self.pages.pages_at(|at| at == segment).iter().all(|name| name.level > 0));
    }

    fn named_segment(&self, at: usize) -> Option<SegmentIndex> {
        let segments: BTreeSet<_> = self.named.iter().map(|at| at.segment).collect();
        segments.iter().nth(at % segments.len().max(1)).copied()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Change(PageName, u64),
    ChangeMap(usize, u64),
    NewMaps(usize),
    FreeMap(usize),
    Check(PageName),
    CheckMap(usize),
    /// Starts reading without waiting.
    Want(PageName),
    WantMap(usize),
    /// The read is answered.
    Answer(usize),
    ReadFails(usize),
    Freeze,
    Write(usize),
    WriteAnswered(usize),
    Durable,
    Compact(usize),
    Hold(bool),
    EndHold,
    Crash,
}

fn page_name() -> impl Strategy<Value = PageName> {
    let space = prop::sample::select(&PageSpace::ALL[1..]);
    // Around the ends of pages and levels, and close together.
    let index = prop_oneof![
        8 => 0u64..40,
        2 => prop::sample::select(vec![31, 32, 33, 507, 508, 1015, 1016]),
        1 => prop::sample::select(vec![16255, 16256, 16257, 20000]),
    ];
    (space, index).prop_map(|(space, index)| name(space, index))
}

fn step() -> impl Strategy<Value = Step> {
    let at = || 0usize..1000;
    prop_oneof![
        12 => (page_name(), 1u64..1 << 32).prop_map(|(name, value)| Step::Change(name, value << 32)),
        8 => (at(), 1u64..1 << 32).prop_map(|(at, value)| Step::ChangeMap(at, value << 32)),
        4 => (1usize..20).prop_map(Step::NewMaps),
        8 => at().prop_map(Step::FreeMap),
        4 => page_name().prop_map(Step::Check),
        4 => at().prop_map(Step::CheckMap),
        4 => page_name().prop_map(Step::Want),
        4 => at().prop_map(Step::WantMap),
        4 => at().prop_map(Step::Answer),
        1 => at().prop_map(Step::ReadFails),
        5 => Just(Step::Freeze),
        8 => (1usize..12).prop_map(Step::Write),
        6 => at().prop_map(Step::WriteAnswered),
        3 => Just(Step::Durable),
        2 => at().prop_map(Step::Compact),
        2 => any::<bool>().prop_map(Step::Hold),
        1 => Just(Step::EndHold),
        1 => Just(Step::Crash),
    ]
}

impl World {
    fn step(&mut self, step: &Step) {
        let maps = self.maps();
        let map_at = |at: usize| maps.get(at % maps.len().max(1)).copied();
        match *step {
            Step::Change(name, value) => self.change(name, value),
            Step::ChangeMap(at, value) => {
                map_at(at).into_iter().for_each(|number| self.change(map(number), value));
            }
            Step::NewMaps(count) => (0..count).for_each(|_| _ = self.new_map()),
            Step::FreeMap(at) => map_at(at).into_iter().for_each(|number| self.free_map(number)),
            Step::Check(name) => self.check(name),
            Step::CheckMap(at) => map_at(at).into_iter().for_each(|number| self.check(map(number))),
            Step::Want(name) => self.want(name),
            Step::WantMap(at) => map_at(at).into_iter().for_each(|number| self.want(map(number))),
            Step::Answer(at) => self.answer_read(at, true),
            Step::ReadFails(at) => self.answer_read(at, false),
            Step::Freeze => self.freeze(),
            Step::Write(count) => drop((0..count).take_while(|_| self.write()).count()),
            Step::WriteAnswered(at) => self.answer(at),
            Step::Durable => self.durable(),
            Step::Compact(at) => {
                self.named_segment(at).into_iter().for_each(|segment| self.compact(segment));
            }
            Step::Hold(is_holding) => {
                self.is_held |= is_holding;
                self.pages.hold(is_holding);
            }
            Step::EndHold => {
                self.is_held = false;
                self.pages.end_hold();
            }
            Step::Crash => self.crash(),
        }
    }

    fn want(&mut self, name: PageName) {
        if let Want::Read(load) = self.pages.want(name) {
            self.reading.push_back(load);
        }
    }

    /// A read is answered, perhaps so late that the page was freed and its place used again.
    fn answer_read(&mut self, at: usize, is_good: bool) {
        if self.reading.is_empty() {
            return;
        }
        let at = at % self.reading.len();
        let load = self.reading.remove(at).expect("there");
        if is_good {
            self.pages.loaded(load, &self.disk[&load.at]).expect("what is wanted is there");
        } else {
            self.pages.load_failed(load);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn each_root_contains_what_there_was_at_its_freeze(
        limit in 3usize..60,
        steps in prop::collection::vec(step(), 1..250),
    ) {
        let mut world = World::new(limit);
        for step in &steps {
            world.step(step);
        }
        // All of it, and once more after a start.
        let names: Vec<_> = world.contents.keys().copied().collect();
        names.iter().for_each(|&name| world.check(name));
        world.durable();
        world.freeze();
        world.durable();
        world.crash();
        names.iter().for_each(|&name| world.check(name));
        prop_assert_eq!(world.contents.len(), names.len());
    }
}
