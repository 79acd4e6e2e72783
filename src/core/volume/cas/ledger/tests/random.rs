//! Random sequences of what an owner of a volume does, against a model that copies whole volumes.

use super::*;
use proptest::prelude::*;
use proptest::sample::Index;

/// Blocks at which something begins: several leaves of maps of up to three levels.
const PLACES: [u64; 12] = [
    0,
    1,
    LEAF - 2,
    LEAF,
    LEAF * 2 - 1,
    LEAF * 3,
    LEAF * 3 + 98,
    LEAF * 400,
    TWO_LEVELS - 2,
    TWO_LEVELS,
    TWO_LEVELS + LEAF * 3,
    TWO_LEVELS * 2 + 3,
];
const SIZES: [u64; 4] = [400, LEAF * 3 + 100, TWO_LEVELS, TWO_LEVELS * 2 + 7];
const VOLUMES_MAX: usize = 3;

#[derive(Clone, Debug)]
enum Op {
    Create(Index),
    Write {
        volume: Index,
        at: Index,
        contents: Vec<Content>,
    },
    Unmap {
        volume: Index,
        from: Index,
        to: Index,
    },
    Wipe(Index),
    Snapshot(Index),
    Clone(Index),
    Rollback(Index),
    Delete(Index),
    Step {
        slot: Index,
        budget: usize,
    },
    Leap {
        slot: Index,
        to: Index,
    },
    /// The deletion of a snapshot has just begun, and nothing was written since it was taken.
    Part {
        volume: Index,
        to: Index,
    },
    Resize {
        volume: Index,
        size: Index,
    },
    Compact(Index),
    Any(CasRecord),
}

fn op() -> impl Strategy<Value = Op> {
    let index = any::<Index>;
    let contents = prop::collection::vec(0u64..12, 1..4);
    prop_oneof![
        1 => index().prop_map(Op::Create),
        9 => (index(), index(), contents)
            .prop_map(|(volume, at, contents)| Op::Write { volume, at, contents }),
        3 => (index(), index(), index()).prop_map(|(volume, from, to)| Op::Unmap { volume, from, to }),
        1 => index().prop_map(Op::Wipe),
        4 => index().prop_map(Op::Snapshot),
        1 => index().prop_map(Op::Clone),
        2 => index().prop_map(Op::Rollback),
        4 => index().prop_map(Op::Delete),
        4 => (index(), 0usize..4).prop_map(|(slot, budget)| Op::Step { slot, budget }),
        3 => (index(), index()).prop_map(|(slot, to)| Op::Leap { slot, to }),
        2 => (index(), index()).prop_map(|(volume, to)| Op::Part { volume, to }),
        1 => (index(), index()).prop_map(|(volume, size)| Op::Resize { volume, size }),
        1 => index().prop_map(Op::Compact),
        3 => record().prop_map(Op::Any),
    ]
}

/// A record that mostly makes no sense.
fn record() -> impl Strategy<Value = CasRecord> {
    let slot = || (0..BOUNDS.slots + 1).prop_map(CatalogueSlot);
    let segment = || (0u32..8).prop_map(SegmentIndex);
    let id = || (0u64..30).prop_map(ChunkId);
    let name = || prop::sample::select(vec!["", "v0", "v1", "s1", "s2", "new"]).prop_map(str::to_owned);
    let block = || prop::sample::select(PLACES.to_vec());
    prop_oneof![
        (segment(), 0u32..9, prop::collection::vec(id(), 0..3)).prop_map(|(segment, block, ids)| {
            let chunks = ids.into_iter().map(|id| (id, hash_of(id.0))).collect();
            CasRecord::Store { segment, block, chunks }
        }),
        (slot(), block(), prop::collection::vec(id(), 0..4))
            .prop_map(|(volume, block, ids)| CasRecord::Map { volume, block, ids }),
        (slot(), block(), block()).prop_map(|(volume, block, count)| CasRecord::Unmap {
            volume,
            block,
            count
        }),
        (segment(), 0u32..9, prop::collection::vec((id(), segment(), 0u32..8), 0..3)).prop_map(
            |(segment, block, chunks)| {
                let moved = |(id, segment, block)| Moved { id, segment, block };
                CasRecord::Move { segment, block, chunks: chunks.into_iter().map(moved).collect() }
            }
        ),
        (segment(), 0u8..4).prop_map(|(segment, kind)| CasRecord::Open { segment, kind }),
        segment().prop_map(|segment| CasRecord::GiveUp { segment }),
        (slot(), block(), name()).prop_map(|(slot, blocks, name)| CasRecord::Create {
            slot,
            created: 0,
            blocks,
            name
        }),
        (slot(), slot(), name()).prop_map(|(volume, slot, name)| CasRecord::Snapshot {
            volume,
            slot,
            created: 0,
            name
        }),
        (slot(), slot(), name()).prop_map(|(origin, slot, name)| CasRecord::Clone {
            origin,
            slot,
            created: 0,
            name
        }),
        (slot(), slot()).prop_map(|(volume, slot)| CasRecord::Rollback { volume, slot }),
        slot().prop_map(|slot| CasRecord::Delete { slot }),
        (slot(), block()).prop_map(|(slot, upto)| CasRecord::DeleteStep { slot, upto }),
    ]
}

/// A volume and its snapshots, the oldest first.
#[derive(Debug)]
struct Chain {
    origin: Option<CatalogueSlot>,
    snapshots: Vec<CatalogueSlot>,
    volume: CatalogueSlot,
}

/// What a volume or snapshot reads as.
#[derive(Clone, Debug)]
struct Image {
    blocks: u64,
    content: BTreeMap<u64, Content>,
}

#[derive(Debug, Default)]
struct Model {
    chains: Vec<Chain>,
    images: BTreeMap<CatalogueSlot, Image>,
    going: BTreeSet<CatalogueSlot>,
    /// What goes beside the chains, with the snapshot that it came from.
    beside: BTreeMap<CatalogueSlot, Option<CatalogueSlot>>,
}

fn pick<T: Copy>(index: &Index, from: &[T]) -> Option<T> {
    (!from.is_empty()).then(|| *index.get(from))
}

impl Model {
    fn volumes(&self) -> Vec<CatalogueSlot> {
        self.chains.iter().map(|chain| chain.volume).collect()
    }

    fn snapshots(&self) -> Vec<CatalogueSlot> {
        self.chains.iter().flat_map(|chain| chain.snapshots.clone()).collect()
    }

    fn chain(&mut self, volume: CatalogueSlot) -> &mut Chain {
        self.chains.iter_mut().find(|chain| chain.volume == volume).expect("a volume")
    }

    /// What a rollback of the volume goes to.
    fn newest(&mut self, volume: CatalogueSlot) -> Option<CatalogueSlot> {
        let chain = self.chain(volume);
        chain.snapshots.last().copied().or(chain.origin)
    }

    fn can_delete(&self, slot: CatalogueSlot) -> bool {
        if let Some(chain) = self.chains.iter().find(|chain| chain.volume == slot) {
            return chain.snapshots.is_empty();
        }
        let Some((chain, at)) = self
            .chains
            .iter()
            .find_map(|chain| Some((chain, chain.snapshots.iter().position(|snapshot| *snapshot == slot)?)))
        else {
            return false;
        };
        let near = at.saturating_sub(1)..(at + 2).min(chain.snapshots.len());
        let is_quiet = chain.snapshots[near].iter().all(|near| !self.going.contains(near));
        let is_origin = self.chains.iter().any(|chain| chain.origin == Some(slot))
            || self.beside.values().any(|before| *before == Some(slot));
        is_quiet && !is_origin
    }

    /// A deletion is done.
    fn gone(&mut self, slot: CatalogueSlot) {
        self.going.remove(&slot);
        self.beside.remove(&slot);
        self.chains.iter_mut().for_each(|chain| chain.snapshots.retain(|snapshot| *snapshot != slot));
    }
}

struct Run {
    world: World,
    model: Model,
}

impl Run {
    fn step(&mut self, op: Op) {
        match op {
            Op::Create(size) => {
                if self.model.chains.len() < VOLUMES_MAX && self.has_slot() {
                    self.create(*size.get(&SIZES));
                }
            }
            Op::Write { volume, at, contents } => {
                let Some(volume) = pick(&volume, &self.model.volumes()) else { return };
                let block = *at.get(&PLACES);
                let image = self.model.images.get_mut(&volume).expect("it has one");
                if block + contents.len() as u64 > image.blocks {
                    let ids = vec![ChunkId(1); contents.len()];
                    let refused = Inconsistent::Blocks { slot: volume, blocks: block };
                    assert_eq!(self.world.apply(CasRecord::Map { volume, block, ids }), Err(refused));
                    return;
                }
                image.content.extend((block..).zip(contents.iter().copied()));
                self.world.write(volume, block, &contents);
            }
            Op::Unmap { volume, from, to } => {
                let Some(volume) = pick(&volume, &self.model.volumes()) else { return };
                let blocks = self.model.images[&volume].blocks;
                let (one, other) = (*from.get(&PLACES), *to.get(&PLACES));
                let (from, to) = (one.min(other).min(blocks), one.max(other).min(blocks));
                self.unmap(volume, from, to);
            }
            Op::Wipe(volume) => {
                let Some(volume) = pick(&volume, &self.model.volumes()) else { return };
                self.unmap(volume, 0, self.model.images[&volume].blocks);
            }
            Op::Resize { volume, size } => {
                let Some(volume) = pick(&volume, &self.model.volumes()) else { return };
                let (blocks, old) = (*size.get(&SIZES), self.model.images[&volume].blocks);
                if blocks < old {
                    self.unmap(volume, blocks, old);
                }
                self.world.done(CasRecord::Resize { slot: volume, blocks });
                self.model.images.get_mut(&volume).expect("it has one").blocks = blocks;
            }
            Op::Snapshot(volume) => {
                let Some(volume) = pick(&volume, &self.model.volumes()) else { return };
                if self.has_slot() {
                    self.snapshot(volume);
                }
            }
            Op::Clone(snapshot) => self.clone_of(&snapshot),
            Op::Rollback(volume) => {
                let Some(volume) = pick(&volume, &self.model.volumes()) else { return };
                if self.has_slot() {
                    self.rollback(volume);
                }
            }
            Op::Delete(index) => {
                let slots: Vec<_> = self.model.images.keys().copied().collect();
                if let Some(slot) = pick(&index, &slots) {
                    self.delete(slot);
                }
            }
            Op::Step { slot, budget } => {
                let going: Vec<_> = self.model.going.iter().copied().collect();
                if let Some(slot) = pick(&slot, &going) {
                    let upto = self.world.next_step(slot, budget);
                    self.delete_step(slot, upto);
                }
            }
            Op::Leap { slot, to } => {
                let going: Vec<_> = self.model.going.iter().copied().collect();
                if let Some(slot) = pick(&slot, &going) {
                    self.leap(slot, &to);
                }
            }
            Op::Part { volume, to } => {
                let Some(volume) = pick(&volume, &self.model.volumes()) else { return };
                if self.has_slot() {
                    let slot = self.snapshot(volume);
                    self.delete(slot);
                    if self.model.going.contains(&slot) {
                        self.leap(slot, &to);
                    }
                }
            }
            Op::Compact(index) => self.compact(&index),
            Op::Any(record) => {
                let mut other = self.world.clone();
                let breaks = matches!(record, CasRecord::Store { .. });
                if other.apply(record).is_ok() && !breaks {
                    other.check();
                }
            }
        }
        for segment in self.world.effects.emptied.clone() {
            if self.world.live(segment) == 0 {
                self.world.give_up(segment);
            }
        }
        self.world.effects = Effects::default();
    }

    fn create(&mut self, blocks: u64) {
        let volume = self.world.create(blocks);
        self.model.chains.push(Chain { origin: None, snapshots: vec![], volume });
        self.model.images.insert(volume, Image { blocks, content: BTreeMap::new() });
    }

    fn has_slot(&self) -> bool {
        self.world.ledger.free_slot(&self.world.pages).is_some()
    }

    fn unmap(&mut self, volume: CatalogueSlot, from: u64, to: u64) {
        self.world.unmap(volume, from, to - from);
        let image = self.model.images.get_mut(&volume).expect("it has one");
        image.content.retain(|block, _| !(from..to).contains(block));
    }

    fn snapshot(&mut self, volume: CatalogueSlot) -> CatalogueSlot {
        let slot = self.world.snapshot(volume);
        self.model.chain(volume).snapshots.push(slot);
        let image = self.model.images[&volume].clone();
        self.model.images.insert(slot, image);
        slot
    }

    /// A deletion goes on to some border of a leaf, if it is not beyond.
    fn leap(&mut self, slot: CatalogueSlot, to: &Index) {
        let entry = self.world.entry(slot);
        let end = place::map_span(entry.height + 1);
        let upto = *to.get(&[LEAF, LEAF * 2, LEAF * 400, TWO_LEVELS, TWO_LEVELS + LEAF, end]);
        if upto > entry.cursor && upto <= end {
            self.delete_step(slot, upto);
        }
    }

    fn clone_of(&mut self, index: &Index) {
        let Some(origin) = pick(index, &self.model.snapshots()) else { return };
        if self.model.chains.len() == VOLUMES_MAX || !self.has_slot() {
            return;
        }
        if self.model.going.contains(&origin) {
            let record =
                CasRecord::Clone { origin, slot: self.world.slot(), created: 0, name: "clone".to_owned() };
            assert!(self.world.apply(record).is_err());
            return;
        }
        let volume = self.world.clone_of(origin);
        self.model.chains.push(Chain { origin: Some(origin), snapshots: vec![], volume });
        let image = self.model.images[&origin].clone();
        self.model.images.insert(volume, image);
    }

    fn rollback(&mut self, volume: CatalogueSlot) {
        match self.model.newest(volume) {
            Some(newest) if !self.model.going.contains(&newest) => {
                let slot = self.world.rollback(volume);
                let image = self.model.images[&newest].clone();
                self.model.images.insert(volume, image);
                self.model.beside.insert(slot, Some(newest));
                self.model.going.insert(slot);
            }
            _ => {
                let record = CasRecord::Rollback { volume, slot: self.world.slot() };
                assert!(self.world.apply(record).is_err());
            }
        }
    }

    fn delete(&mut self, slot: CatalogueSlot) {
        if !self.model.can_delete(slot) {
            assert_eq!(self.world.apply(CasRecord::Delete { slot }), Err(Inconsistent::Linked(slot)));
            return;
        }
        self.world.delete(slot);
        self.model.going.insert(slot);
        self.model.images.remove(&slot);
        if let Some(at) = self.model.chains.iter().position(|chain| chain.volume == slot) {
            let chain = self.model.chains.remove(at);
            self.model.beside.insert(slot, chain.origin);
        }
    }

    fn delete_step(&mut self, slot: CatalogueSlot, upto: u64) {
        self.world.step(slot, upto);
        if self.world.entry(slot).state == CatalogueState::Free {
            self.model.gone(slot);
        }
    }

    /// Moves what is live out of a segment.
    fn compact(&mut self, index: &Index) {
        self.world.show_all();
        let used: Vec<_> =
            (1..BOUNDS.segments).map(SegmentIndex).filter(|segment| self.world.live(*segment) > 0).collect();
        let Some(from) = pick(index, &used) else { return };
        let mut chunks = Vec::new();
        for block in 0..BOUNDS.blocks_per_segment {
            let (name, at) = place::of_directory(from, BOUNDS.blocks_per_segment, block);
            let id = ChunkId(self.world.pages.any(name).expect("it exists").directory_id(at));
            if let Located::At(place) = self.world.ledger.locate(&self.world.pages, id)
                && (place.segment, place.offset) == (from, block * 256)
            {
                chunks.push(Moved { id, segment: from, block });
            }
        }
        self.world.open = None;
        let count = chunks.len() as u32;
        let (segment, block) = self.world.room(count);
        self.world.done(CasRecord::Move { segment, block, chunks });
        self.world.open = Some((segment, block + count));
        assert_eq!(self.world.effects.emptied, [from]);
    }

    /// Every volume and snapshot reads as the model's, and the audit finds nothing.
    fn check(&mut self) {
        self.world.check();
        self.world.show_all();
        let slots: Vec<_> = self.model.images.keys().copied().collect();
        let known: Vec<_> = self
            .world
            .ledger
            .catalogue(&self.world.pages)
            .filter(|(_, entry)| entry.state != CatalogueState::Going)
            .map(|(slot, _)| slot)
            .collect();
        assert_eq!(known, slots);
        for (slot, image) in &self.model.images {
            let entry = self.world.entry(*slot);
            assert_eq!((entry.blocks, entry.mapped), (image.blocks, image.content.len() as u64));
            for block in PLACES.into_iter().flat_map(|place| place..place + 4) {
                let found = self.world.ledger.lookup(&self.world.pages, *slot, block).expect("readable");
                let content = match found {
                    Found::Hole => None,
                    Found::Chunk(id) => match self.world.ledger.locate(&self.world.pages, id) {
                        Located::At(place) => Some(place.hash),
                        other => panic!("{id:?}: {other:?}"),
                    },
                    Found::NotHere(name) => panic!("{name:?} is in memory"),
                };
                let expected = image.content.get(&block).map(|content| hash_of(*content));
                assert_eq!(content, expected, "block {block} of {slot:?}");
            }
        }
    }

    /// Deletes everything.
    fn end(mut self) {
        while !self.model.images.is_empty() || !self.model.going.is_empty() {
            for slot in self.model.going.clone() {
                let upto = self.world.next_step(slot, 50);
                self.delete_step(slot, upto);
            }
            let slots: Vec<_> = self.model.images.keys().copied().collect();
            for slot in slots {
                if self.model.can_delete(slot) {
                    self.delete(slot);
                }
            }
            self.check();
        }
        self.world.check_empty();
        self.world.check_replay();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 400 }))]

    #[test]
    fn volumes_and_snapshots_read_as_those_of_a_model(ops in prop::collection::vec(op(), 1..120)) {
        let mut run = Run { world: World::new(), model: Model::default() };
        run.create(TWO_LEVELS);
        for op in ops {
            run.step(op);
            run.check();
        }
        run.end();
    }
}
