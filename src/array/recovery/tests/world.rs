//! Members in memory with volatile caches, a small writer that logs as the running array does, and a power switch.
//!
//! The writer follows the rules W1 to W4: pieces to all live members, flushes of single members, notes, destage and page
//! write-back only behind a durable note, the tail behind a flush. A fuse counts writes and flushes; when it burns out
//! the power fails or the process dies, and every cached block is independently lost, kept or torn. What must hold
//! afterwards is kept beside: the volume's content after every batch, and which batches were acknowledged.

use super::super::*;
use crate::block_io::IoFaultKind;
use crate::format::{
    Batch, FreshRecord, Geometry, InPlaceRecord, LogRecord, MapEntry, NO_PLACE, PAGE_BYTES, Page, PageLayout,
    RegionKind,
};
use crate::testing::Random;
use crate::units::{BlockHash, ColumnIndex};
use std::collections::{BTreeMap, HashMap};

pub const BLOCK: usize = 4096;
/// In place of the value of a block that cannot be read.
const LOST: u64 = u64::MAX;
/// Batches at which the writer makes room.
const LOG_BATCHES_MAX: usize = 6;
const ARRAY: Uuid = Uuid::from_u128(0x5eed);
const KEY: LogKey = LogKey([7; 32]);

thread_local! {
    /// One for all worlds of a test: mapping memory costs more than a recovery.
    static POOL: Pool = Pool::new(8 << 20).unwrap();
}

/// The fuse has burnt out.
#[derive(Debug)]
pub struct Crash;

pub type Block = Box<[u8; BLOCK]>;

pub fn block_of(value: u64) -> Block {
    let mut block = Box::new([0; BLOCK]);
    if value != 0 {
        Random::new(value).fill(&mut block[..]);
    }
    block
}

/// A member's device.
#[derive(Clone, Default)]
pub struct Disk {
    stable: HashMap<u64, Block>,
    /// Versions since the last flush, oldest first.
    cached: BTreeMap<u64, Vec<Block>>,
    pub unreadable: BTreeSet<u64>,
    pub dead: bool,
    noise: u64,
}

impl Disk {
    pub fn peek(&self, block: u64) -> Block {
        let cached = self.cached.get(&block).and_then(|versions| versions.last());
        // A new device holds anything.
        cached.or(self.stable.get(&block)).cloned().unwrap_or_else(|| block_of(self.noise + block))
    }

    fn read(&self, block: u64) -> Option<Block> {
        (!self.dead && !self.unreadable.contains(&block)).then(|| self.peek(block))
    }

    fn write(&mut self, block: u64, bytes: &[u8]) {
        self.unreadable.remove(&block);
        self.cached.entry(block).or_default().push(Box::new(bytes.try_into().unwrap()));
    }

    fn flush(&mut self) {
        for (block, mut versions) in std::mem::take(&mut self.cached) {
            self.stable.insert(block, versions.pop().unwrap());
        }
    }

    fn lose_power(&mut self, random: &mut Random) {
        let mode = random.below(5);
        for (block, versions) in std::mem::take(&mut self.cached) {
            let pick = match mode {
                0 => 0,
                1 => versions.len(),
                _ => random.below(versions.len() as u64 + 1) as usize,
            };
            let mut all = vec![self.peek(block)];
            all.extend(versions);
            let mut kept = all[pick].clone();
            if mode == 4 && random.one_in(3) {
                for sector in kept.chunks_mut(512).enumerate() {
                    let other = &all[random.below(all.len() as u64) as usize];
                    sector.1.copy_from_slice(&other[sector.0 * 512..(sector.0 + 1) * 512]);
                }
            }
            self.stable.insert(block, kept);
        }
    }

    /// The block reads as something else from now on, or not at all.
    pub fn rot(&mut self, block: u64, random: &mut Random) {
        let mut bytes = self.peek(block);
        self.cached.remove(&block);
        match random.below(3) {
            0 => drop(self.unreadable.insert(block)),
            1 => bytes.fill(0),
            _ => bytes[random.below(BLOCK as u64) as usize] ^= 1 << random.below(8),
        }
        self.stable.insert(block, bytes);
    }
}

/// Shape of the array.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub k: usize,
    pub m: usize,
    pub rows: usize,
    pub stripes: u64,
    pub slots: u64,
    pub ring: u32,
    pub hasher: BlockHasher,
    pub checksums: bool,
}

impl Shape {
    pub fn new(k: usize, m: usize) -> Shape {
        let hasher = BlockHasher::Crc32c;
        Shape { k, m, rows: 1, stripes: 2, slots: 4, ring: 40, hasher, checksums: true }
    }

    pub fn width(&self) -> usize {
        self.k + self.m
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            data: self.k as u16,
            parity: self.m as u16,
            chunk: (self.rows * BLOCK) as u32,
            sector: 4096,
            slots: self.slots,
            volume_bytes: self.stripes * (self.k * self.rows * BLOCK) as u64,
        }
    }

    fn pages_at(&self) -> u64 {
        u64::from(self.ring)
    }

    fn data_at(&self) -> u64 {
        self.pages_at() + PageLayout::new(self.geometry(), self.checksums).region_bytes() / BLOCK as u64
    }

    pub fn home(&self, slot: u64, row: usize) -> u64 {
        self.data_at() + slot * self.rows as u64 + row as u64
    }

    pub fn blocks(&self) -> u64 {
        self.home(self.slots, 0)
    }
}

/// What a client asks for.
#[derive(Clone, Copy, Debug)]
pub enum Ask {
    /// Rows of some data columns (a bit each) of a stripe.
    Write {
        stripe: u64,
        columns: u32,
        row: usize,
        rows: usize,
    },
    /// The whole stripe, to a free slot.
    Fresh {
        stripe: u64,
    },
    Discard {
        stripe: u64,
    },
}

/// What the array does next.
#[derive(Clone, Debug)]
pub enum Deed {
    Batch(Vec<Ask>),
    Flush(usize),
    FlushAll,
    Note,
    /// Everything in place, and the tail behind it.
    Checkpoint,
    Fail(usize),
}

/// How the array ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    PowerLoss,
    /// The caches survive.
    ProcessDeath,
}

type Content = Vec<u64>;

/// What the array knows while it runs.
struct Writer {
    sequence: u64,
    previous: BatchHash,
    next_blocks: Vec<u32>,
    tail: u64,
    /// Batches below are written on all live members, flushed there, noted there durably.
    written: u64,
    durable: u64,
    noted: u64,
    /// For each member: batches below were flushed.
    flushed: Vec<u64>,
    /// Batches that are in the log.
    log: Vec<Batch>,
    pages: PageStore,
    map: Vec<MapEntry>,
    /// (slot, row, column) to hash and content.
    blocks: HashMap<(u64, usize, usize), (BlockHash, Block)>,
    /// Every block of parity and data that was written in place, by its hash: the payload of records.
    images: HashMap<BlockHash, Block>,
    /// Free slots, and the batch that must be durable before each is used.
    free: Vec<(u64, u64)>,
    content: Content,
}

/// See the head of this file.
pub struct World {
    pub shape: Shape,
    pub disks: Vec<Disk>,
    /// Log starts on the members, for whom a superblock write is atomic.
    pub starts: Vec<LogStart>,
    pub live: MemberSet,
    pub epoch: EpochStamp,
    pub building: Vec<(Building, Disk)>,
    pub random: Random,
    pub fuse: Option<u64>,
    pub burnt: u64,
    pub codec: Codec,
    pub pool: Pool,
    pub force: bool,
    writer: Option<Writer>,
    values: u64,
    /// The volume's content when all batches below a sequence are done.
    states: Vec<(u64, Content)>,
    /// Batches below must not be lost.
    floor_process: u64,
    floor_power: u64,
    floor_noted: u64,
    /// The layout of everything the log held at the crash, for tests that damage it.
    pub last_log: Vec<Batch>,
    pub page_faults: usize,
}

impl World {
    pub fn new(shape: Shape, seed: u64) -> World {
        let n = shape.width();
        let disks = (0..n).map(|at| Disk { noise: 1 << 40 | (at as u64) << 32, ..Disk::default() }).collect();
        let mut world = World {
            shape,
            disks,
            starts: vec![LogStart { sequence: 0, epoch: 1 }; n],
            live: MemberSet::first(n as u16),
            epoch: EpochStamp { number: 1, id: 11 },
            building: Vec::new(),
            random: Random::new(seed),
            fuse: None,
            burnt: 0,
            codec: Codec::new(shape.k, shape.m).unwrap(),
            pool: POOL.with(Clone::clone),
            force: false,
            writer: None,
            values: seed << 20,
            states: Vec::new(),
            floor_process: 0,
            floor_power: 0,
            floor_noted: 0,
            last_log: Vec::new(),
            page_faults: 0,
        };
        let mut pages = world.page_store();
        world.load_map(&mut pages);
        let recovered = Recovered { next_blocks: vec![0; n], ..Recovered::default() };
        world.serve(recovered, pages, &[]);
        world
    }

    fn page_store(&self) -> PageStore {
        PageStore::new(self.shape.geometry(), self.shape.checksums, KEY, ARRAY, 4)
    }

    /// One event; a multi-block write that is cut off is done in part.
    fn tick(&mut self) -> Result<(), Crash> {
        self.burnt += 1;
        match &mut self.fuse {
            Some(0) => Err(Crash),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn write(&mut self, member: usize, block: u64, bytes: &[u8]) -> Result<(), Crash> {
        let crash = self.tick();
        for (at, bytes) in bytes.chunks(BLOCK).enumerate() {
            if crash.is_ok() || self.random.one_in(2) {
                self.disks[member].write(block + at as u64, bytes);
            }
        }
        crash
    }

    /// Writes a block in place, on the member if it is live and on devices that are being built and are past the slot.
    fn write_home(&mut self, slot: u64, row: usize, column: usize, bytes: &[u8]) -> Result<(), Crash> {
        let (member, block) = (self.member_of(slot, column), self.shape.home(slot, row));
        if self.live.contains(MemberIndex(member as u16)) {
            self.write(member, block, bytes)?;
        }
        for at in 0..self.building.len() {
            let device = self.building[at].0;
            if usize::from(device.member.0) == member && slot < device.bound.0 {
                self.tick()?;
                self.building[at].1.write(block, bytes);
            }
        }
        Ok(())
    }

    /// A device that is being built, with every slot below `bound` as it is now. Nothing may be in the log alone.
    pub fn build(&mut self, member: usize, which: Which, bound: u64) {
        let mut disk = Disk { noise: 1 << 50, ..Disk::default() };
        for (&(slot, row, column), (_, block)) in &self.writer.as_ref().unwrap().blocks {
            if slot < bound && self.member_of(slot, column) == member {
                disk.write(self.shape.home(slot, row), &block[..]);
            }
        }
        disk.flush();
        let device = Building { member: MemberIndex(member as u16), which, bound: SlotIndex(bound) };
        self.building.push((device, disk));
    }

    /// Devices that are being built hold what they should below their bounds.
    pub fn check_building(&mut self) {
        let writer = self.writer.as_ref().unwrap();
        for entry in writer.map.iter().filter(|entry| entry.holds_data) {
            for (&(slot, row, column), (hash, block)) in &writer.blocks {
                let member = self.member_of(slot, column);
                for (device, disk) in &self.building {
                    let past = usize::from(device.member.0) == member && slot < device.bound.0;
                    if slot == entry.slot.0 && past && (hash.is_stored() || !self.shape.checksums) {
                        assert_eq!(
                            disk.peek(self.shape.home(slot, row)),
                            *block,
                            "slot {slot} of {device:?}"
                        );
                    }
                }
            }
        }
    }

    fn flush(&mut self, member: usize) -> Result<(), Crash> {
        self.tick()?;
        self.disks[member].flush();
        let writer = self.writer.as_mut().unwrap();
        writer.flushed[member] = writer.written;
        writer.durable = self.live.iter().map(|m| writer.flushed[usize::from(m.0)]).min().unwrap();
        let durable = writer.durable;
        let notes =
            writer.log.iter().filter(|batch| batch.sequence < durable).map(|batch| batch.durable_upto);
        writer.noted = notes.chain([writer.noted]).max().unwrap();
        self.floor_power = self.floor_power.max(writer.durable);
        self.floor_noted = self.floor_noted.max(writer.noted);
        Ok(())
    }

    pub fn map(&self) -> Map {
        Map::new(&self.shape.geometry())
    }

    pub fn member_of(&self, slot: u64, column: usize) -> usize {
        usize::from(self.map().member_of(SlotIndex(slot), ColumnIndex(column as u16)).0)
    }

    /// Does a deed; unless the fuse burns out.
    pub fn act(&mut self, deed: &Deed) -> Result<(), Crash> {
        if self.writer.as_ref().unwrap().log.len() >= LOG_BATCHES_MAX {
            self.checkpoint()?;
        }
        match deed {
            Deed::Batch(asks) => self.batch(asks),
            Deed::Flush(member) if self.live.contains(MemberIndex(*member as u16)) => self.flush(*member),
            Deed::Flush(_) => Ok(()),
            Deed::FlushAll => self.flush_all(),
            Deed::Note => self.note(),
            Deed::Checkpoint => self.checkpoint(),
            Deed::Fail(member) => {
                if self.live.len() > self.shape.k && self.live.remove(MemberIndex(*member as u16)) {
                    self.disks[*member].dead = true;
                    // The bump of the epoch: on the superblocks, which are atomic here.
                    self.epoch = EpochStamp { number: self.epoch.number + 1, id: self.random.next_u64() };
                }
                Ok(())
            }
        }
    }

    fn flush_all(&mut self) -> Result<(), Crash> {
        let mut members: Vec<usize> = self.live.iter().map(|m| usize::from(m.0)).collect();
        let first = self.random.below(members.len() as u64) as usize;
        members.rotate_left(first);
        for (_, disk) in &mut self.building {
            disk.flush();
        }
        members.into_iter().try_for_each(|member| self.flush(member))
    }

    fn batch(&mut self, asks: &[Ask]) -> Result<(), Crash> {
        let mut records = Vec::new();
        for ask in asks {
            records.extend(match *ask {
                Ask::Write { stripe, columns, row, rows } => Some(self.in_place(stripe, columns, row, rows)),
                Ask::Fresh { stripe } => self.fresh(stripe)?,
                Ask::Discard { stripe } => self.discard(stripe),
            });
        }
        self.log(records)
    }

    fn value(&mut self) -> u64 {
        self.values += 1;
        self.values
    }

    fn content_at(&self, stripe: u64, row: usize, column: usize) -> usize {
        ((stripe as usize * self.shape.rows) + row) * self.shape.k + column
    }

    fn parity(&self, data: &[Block]) -> Vec<Block> {
        let mut parity: Vec<Block> = (0..self.shape.m).map(|_| block_of(0)).collect();
        let data: Vec<&[u8]> = data.iter().map(|block| &block[..]).collect();
        let mut rows: Vec<(usize, &mut [u8])> =
            parity.iter_mut().enumerate().map(|(row, block)| (row, &mut block[..])).collect();
        self.codec.encode(&data, &mut rows);
        parity
    }

    fn in_place(&mut self, stripe: u64, columns: u32, row: usize, rows: usize) -> LogRecord {
        let Shape { k, m, hasher, .. } = self.shape;
        let entry = self.writer.as_ref().unwrap().map[stripe as usize];
        let (slot, first) = (entry.slot.0, !entry.holds_data);
        if first {
            self.clear(slot);
        }
        let touched: Vec<usize> = (0..k + m).filter(|&c| c >= k || columns >> c & 1 == 1).collect();
        let mut hashes = HashMap::new();
        for row in row..row + rows {
            for &column in touched.iter().filter(|&&column| column < k) {
                let value = self.value();
                let at = self.content_at(stripe, row, column);
                let writer = self.writer.as_mut().unwrap();
                writer.content[at] = value;
                let block = block_of(value);
                writer.images.insert(hasher.hash(&block[..]), block.clone());
                writer.blocks.insert((slot, row, column), (hasher.hash(&block[..]), block));
            }
            let writer = self.writer.as_ref().unwrap();
            let data: Vec<Block> =
                (0..k).map(|column| writer.blocks[&(slot, row, column)].1.clone()).collect();
            let parity = self.parity(&data);
            let writer = self.writer.as_mut().unwrap();
            for (at, block) in parity.into_iter().enumerate() {
                writer.images.insert(hasher.hash(&block[..]), block.clone());
                writer.blocks.insert((slot, row, k + at), (hasher.hash(&block[..]), block));
            }
            for &column in &touched {
                hashes.insert((column, row), writer.blocks[&(slot, row, column)].0);
            }
        }
        let epoch = self.epoch.number;
        self.writer.as_mut().unwrap().map[stripe as usize] =
            MapEntry { slot: SlotIndex(slot), holds_data: true, epoch };
        LogRecord::InPlace(InPlaceRecord {
            stripe: StripeIndex(stripe),
            slot: SlotIndex(slot),
            first,
            row: row as u32,
            rows: rows as u32,
            columns: touched.iter().map(|&column| column as u16).collect(),
            hashes: touched
                .iter()
                .flat_map(|&c| (row..row + rows).map(move |r| (c, r)))
                .map(|at| hashes[&at])
                .collect(),
        })
    }

    /// Every block of a slot is unwritten.
    fn clear(&mut self, slot: u64) {
        for row in 0..self.shape.rows {
            for column in 0..self.shape.width() {
                let block = (BlockHash::UNWRITTEN, block_of(0));
                self.writer.as_mut().unwrap().blocks.insert((slot, row, column), block);
            }
        }
    }

    fn fresh(&mut self, stripe: u64) -> Result<Option<LogRecord>, Crash> {
        let Shape { k, rows, hasher, .. } = self.shape;
        let writer = self.writer.as_mut().unwrap();
        let Some(at) = writer.free.iter().position(|&(_, since)| since <= writer.durable) else {
            return Ok(None);
        };
        let (slot, _) = writer.free.remove(at);
        let old = writer.map[stripe as usize];
        let sequence = writer.sequence;
        writer.free.push((old.slot.0, sequence + 1));
        for row in 0..rows {
            let mut columns = Vec::new();
            for column in 0..k {
                let value = self.value();
                let at = self.content_at(stripe, row, column);
                self.writer.as_mut().unwrap().content[at] = value;
                columns.push(block_of(value));
            }
            let parity = self.parity(&columns);
            columns.extend(parity);
            for (column, block) in columns.into_iter().enumerate() {
                self.write_home(slot, row, column, &block[..])?;
                let block = (hasher.hash(&block[..]), block);
                self.writer.as_mut().unwrap().blocks.insert((slot, row, column), block);
            }
        }
        let epoch = self.epoch.number;
        let writer = self.writer.as_mut().unwrap();
        writer.map[stripe as usize] = MapEntry { slot: SlotIndex(slot), holds_data: true, epoch };
        let at = (0..self.shape.width()).flat_map(|c| (0..rows).map(move |r| (slot, r, c)));
        let hashes = at.map(|at| writer.blocks[&at].0).collect();
        let (slot, old_slot) = (SlotIndex(slot), old.slot);
        Ok(Some(LogRecord::Fresh(FreshRecord { stripe: StripeIndex(stripe), slot, old_slot, hashes })))
    }

    fn discard(&mut self, stripe: u64) -> Option<LogRecord> {
        for row in 0..self.shape.rows {
            for column in 0..self.shape.k {
                let at = self.content_at(stripe, row, column);
                self.writer.as_mut().unwrap().content[at] = 0;
            }
        }
        let entry = &mut self.writer.as_mut().unwrap().map[stripe as usize];
        entry.holds_data = false;
        entry.epoch = self.epoch.number;
        Some(LogRecord::Discard { stripe: StripeIndex(stripe), slot: entry.slot })
    }

    /// Writes a batch to all live members.
    fn log(&mut self, records: Vec<LogRecord>) -> Result<(), Crash> {
        let n = self.shape.width();
        let map = self.map();
        let writer = self.writer.as_ref().unwrap();
        let mut batch = Batch {
            lane: 0,
            sequence: writer.sequence,
            epoch: self.epoch,
            durable_upto: writer.durable,
            tail: writer.tail,
            previous: writer.previous,
            places: vec![NO_PLACE; n],
            records,
        };
        let header_blocks = batch.header_blocks();
        let mut payloads: Vec<Vec<u8>> = vec![Vec::new(); n];
        for record in &batch.records {
            let LogRecord::InPlace(record) = record else { continue };
            for (at, &column) in record.columns.iter().enumerate() {
                let member = map.member_of(record.slot, ColumnIndex(column));
                let hashes = (0..record.rows as usize).map(|row| record.hash(at, row));
                for hash in hashes.filter(|hash| hash.is_stored()) {
                    payloads[usize::from(member.0)].extend_from_slice(&writer.images[&hash][..]);
                }
            }
        }
        let need = |at: usize| header_blocks + (payloads[at].len() / BLOCK) as u32;
        // Room stays for the note of a recovery, one block.
        let ring = self.shape.ring;
        let fits = |place: u32, at: usize, log: &[Batch]| {
            let end = place + need(at);
            let note = if end < ring { end } else { 0 };
            let used = |from: u32, to: u32| {
                log.iter().filter(|b| b.places[at] != NO_PLACE).any(|b| {
                    let start = b.places[at];
                    start < to && from < start + b.header_blocks() + payload_blocks(b, at, &map)
                })
            };
            end <= ring && !used(place, end) && !used(note, note + 1) && (note == end || place > 0)
        };
        for member in self.live.iter().map(|m| usize::from(m.0)) {
            let next = writer.next_blocks[member];
            let place = if next + need(member) <= self.shape.ring { next } else { 0 };
            assert!(fits(place, member, &writer.log), "the test's ring is too small");
            batch.places[member] = place;
        }
        let manifest = batch.manifest(&KEY, ARRAY);
        let writer = self.writer.as_mut().unwrap();
        writer.sequence += 1;
        writer.previous = manifest.hash();
        writer.log.push(batch.clone());
        self.states.push((batch.sequence + 1, writer.content.clone()));
        for member in self.live.iter().map(|m| usize::from(m.0)) {
            let mut bytes = vec![0; manifest.header_bytes()];
            let payload = std::mem::take(&mut payloads[member]);
            manifest.write_piece(MemberIndex(member as u16), (payload.len() / BLOCK) as u32, &mut bytes);
            bytes.extend(payload);
            let place = batch.places[member];
            self.writer.as_mut().unwrap().next_blocks[member] = place + (bytes.len() / BLOCK) as u32;
            self.write(member, u64::from(place), &bytes)?;
        }
        let writer = self.writer.as_mut().unwrap();
        writer.written = writer.sequence;
        self.floor_process = writer.written;
        Ok(())
    }

    /// An empty batch that tells what is durable, itself made durable.
    fn note(&mut self) -> Result<(), Crash> {
        self.log(Vec::new())?;
        self.flush_all()
    }

    /// Destage, page write-back, and the new tail.
    fn checkpoint(&mut self) -> Result<(), Crash> {
        self.flush_all()?;
        self.note()?;
        let writer = self.writer.as_ref().unwrap();
        let upto = writer.noted;
        assert!(upto + 1 >= writer.sequence, "all but the note is noted");
        let mut last: BTreeMap<(u64, usize, usize), (BlockHash, Block)> = BTreeMap::new();
        let mut in_place: BTreeSet<(u64, usize, usize)> = BTreeSet::new();
        for record in writer.log.iter().flat_map(|batch| &batch.records) {
            match record {
                LogRecord::InPlace(record) => {
                    let slot = record.slot.0;
                    if record.first {
                        for row in 0..self.shape.rows {
                            for column in 0..self.shape.width() {
                                last.insert((slot, row, column), writer.blocks[&(slot, row, column)].clone());
                                in_place.insert((slot, row, column));
                            }
                        }
                    }
                    for row in record.row as usize..(record.row + record.rows) as usize {
                        for &column in &record.columns {
                            let at = (slot, row, usize::from(column));
                            last.insert(at, writer.blocks[&at].clone());
                            in_place.insert(at);
                        }
                    }
                }
                LogRecord::Fresh(record) => {
                    for row in 0..self.shape.rows {
                        for column in 0..self.shape.width() {
                            let at = (record.slot.0, row, column);
                            last.insert(at, writer.blocks[&at].clone());
                            in_place.remove(&at);
                        }
                    }
                }
                LogRecord::Discard { .. } => {}
            }
        }
        let live_slots: Vec<u64> = writer.map.iter().filter(|e| e.holds_data).map(|e| e.slot.0).collect();
        for (slot, row, column) in in_place.into_iter().filter(|at| live_slots.contains(&at.0)) {
            let (hash, block) = last[&(slot, row, column)].clone();
            if hash.is_stored() || !self.shape.checksums {
                self.write_home(slot, row, column, &block[..])?;
            }
        }
        let none = self.page_store();
        let mut pages = std::mem::replace(&mut self.writer.as_mut().unwrap().pages, none);
        let written = self.write_pages(&mut pages, &last);
        self.writer.as_mut().unwrap().pages = pages;
        written?;
        self.flush_all()?;
        let writer = self.writer.as_mut().unwrap();
        writer.pages.thaw();
        // All but the note itself is in place; the note does nothing.
        writer.tail = writer.sequence;
        self.log(Vec::new())?;
        self.flush_all()?;
        let writer = self.writer.as_mut().unwrap();
        let tail = writer.tail;
        writer.log.retain(|batch| batch.sequence >= tail);
        Ok(())
    }

    fn write_pages(
        &mut self,
        pages: &mut PageStore,
        blocks: &BTreeMap<(u64, usize, usize), (BlockHash, Block)>,
    ) -> Result<(), Crash> {
        let map = self.writer.as_ref().unwrap().map.clone();
        for (stripe, entry) in map.into_iter().enumerate() {
            if pages.map_entry(StripeIndex(stripe as u64)) != entry {
                pages.set_map_entry(StripeIndex(stripe as u64), entry);
            }
        }
        if self.shape.checksums {
            for (&(slot, row, column), (hash, _)) in blocks {
                let page = pages.layout().hash_entry(SlotIndex(slot), row, column).0;
                self.page(pages, page);
                pages.set_hash(SlotIndex(slot), row, ColumnIndex(column as u16), *hash);
                pages.release(page);
            }
        }
        pages.freeze(self.epoch.number);
        let live = self.live;
        let mut out = Vec::new();
        let targets = |member, which| which == Which::Primary && live.contains(member);
        pages.frozen_writes(usize::MAX, &targets, &self.pool.clone(), &mut out);
        for io in out {
            let PageIo::Write { write, member, offset, bytes, .. } = io else { continue };
            let block = self.shape.pages_at() + offset / BLOCK as u64;
            let done = self.write(usize::from(member.0), block, &bytes);
            pages.write_done(write, done.is_ok());
            done?;
        }
        Ok(())
    }

    /// Loads and pins a page.
    fn page(&self, pages: &mut PageStore, page: PageIndex) {
        let mut out = Vec::new();
        let live = self.live;
        let _ = pages.want(page, 0, Torn::Impossible, &|member| live.contains(member), &mut out);
        while let Some(io) = out.pop() {
            let PageIo::Read { read, member, offset, len } = io else { continue };
            let from = self.shape.pages_at() + offset / BLOCK as u64;
            let blocks =
                (from..).take(len / BLOCK).map(|block| self.disks[usize::from(member.0)].read(block));
            let bytes: Option<Vec<Block>> = blocks.collect();
            let bytes: Option<Vec<u8>> =
                bytes.map(|all| all.iter().flat_map(|block| block.to_vec()).collect());
            pages.read_done(read, bytes.as_deref().map_or(Answer::Unreadable, Answer::Bytes), &mut out);
        }
    }

    fn load_map(&self, pages: &mut PageStore) {
        for page in (0..pages.layout().map_pages()).map(PageIndex) {
            self.page(pages, page);
            pages.release(page);
        }
    }

    /// The array ends; what was acknowledged is what must be there again.
    pub fn crash(&mut self, end: End) {
        self.fuse = None;
        if let Some(writer) = self.writer.take() {
            self.last_log = writer.log;
        }
        if end == End::PowerLoss {
            self.floor_process = self.floor_power;
            for disk in self.disks.iter_mut().chain(self.building.iter_mut().map(|(_, disk)| disk)) {
                disk.lose_power(&mut self.random);
            }
        }
    }

    /// What is damaged is beyond the budget: only noted batches must be there.
    pub fn lower_floor_to_note(&mut self) {
        (self.floor_process, self.floor_power) = (self.floor_noted, self.floor_noted);
    }

    pub fn kill(&mut self, member: usize) {
        self.disks[member].dead = true;
        self.live.remove(MemberIndex(member as u16));
    }

    fn context(&self) -> RecoveryContext {
        let shape = &self.shape;
        let bytes = |blocks: u64| ByteOffset(blocks * BLOCK as u64);
        let start = self.live.iter().map(|m| self.starts[usize::from(m.0)]);
        RecoveryContext {
            map: Map::new(&shape.geometry()),
            data_offset: bytes(shape.data_at()),
            log: Region { kind: RegionKind::Log, offset: bytes(0), len: bytes(u64::from(shape.ring)).0 },
            pages_offset: bytes(shape.pages_at()),
            key: KEY,
            array: ARRAY,
            hasher: shape.hasher,
            checksums: shape.checksums,
            usable: self.live,
            building: self.building.iter().map(|(device, _)| *device).collect(),
            start: start.max_by_key(|start| (start.epoch, start.sequence)).unwrap(),
            epoch: self.epoch,
            clean: false,
            force: self.force,
            codec: self.codec.clone(),
            pool: self.pool.clone(),
        }
    }

    /// One recovery over the live members, up to its outcome or a burnt fuse. I/O ends in any order.
    pub fn recover(&mut self, clean: bool) -> Result<(RecoveryOutcome, PageStore), Crash> {
        // A4: complete before the log is acted on; superblocks are atomic here.
        self.epoch = EpochStamp { number: self.epoch.number + 1, id: self.random.next_u64() };
        let mut recovery = Recovery::new(RecoveryContext { clean, ..self.context() });
        let mut pages = self.page_store();
        let mut pending = Vec::new();
        loop {
            if let Some(outcome) = recovery.poll(&mut pages, &mut pending) {
                return Ok((outcome, pages));
            }
            assert!(!pending.is_empty(), "the recovery waits for nothing");
            let at = self.random.below(pending.len() as u64) as usize;
            let (item, result) = self.execute(pending.swap_remove(at))?;
            recovery.io_done(item, result);
        }
    }

    fn execute(&mut self, io: RecoveryIo) -> Result<(usize, Result<IoValue, IoFault>), Crash> {
        let gone = Err(IoFault { kind: IoFaultKind::Gone, errno: 19 });
        let medium = Err(IoFault { kind: IoFaultKind::Medium, errno: 5 });
        let from = |offset: ByteOffset| {
            assert_eq!(offset.0 % BLOCK as u64, 0);
            offset.0 / BLOCK as u64
        };
        let bound = self.shape.blocks();
        Ok(match io {
            RecoveryIo::Read { item, member, offset, mut buf } => {
                assert!(self.live.contains(member), "member {member} may not be read");
                let disk = &self.disks[usize::from(member.0)];
                assert!(from(offset) + (buf.len() / BLOCK) as u64 <= bound);
                let mut ok = !disk.dead;
                for (at, target) in buf.chunks_exact_mut(BLOCK).enumerate() {
                    match disk.read(from(offset) + at as u64) {
                        Some(block) => target.copy_from_slice(&block[..]),
                        None => ok = false,
                    }
                }
                (item, if ok { Ok(IoValue::Data(buf)) } else { medium })
            }
            RecoveryIo::Write { item, member, which, offset, buf } => {
                let crash = self.tick();
                let block = from(offset);
                assert!(block + (buf.len() / BLOCK) as u64 <= bound);
                let keep: Vec<bool> =
                    (0..buf.len() / BLOCK).map(|_| crash.is_ok() || self.random.one_in(2)).collect();
                let disk = self.device(member, which);
                if disk.dead {
                    return Ok((item, gone));
                }
                for (at, bytes) in buf.chunks(BLOCK).enumerate().filter(|(at, _)| keep[*at]) {
                    disk.write(block + at as u64, bytes);
                }
                crash?;
                (item, Ok(IoValue::Done))
            }
            RecoveryIo::Flush { item, member, which } => {
                self.tick()?;
                let disk = self.device(member, which);
                if disk.dead {
                    return Ok((item, gone));
                }
                disk.flush();
                (item, Ok(IoValue::Done))
            }
        })
    }

    fn device(&mut self, member: MemberIndex, which: Which) -> &mut Disk {
        let built =
            self.building.iter_mut().find(|(device, _)| device.member == member && device.which == which);
        match built {
            Some((_, disk)) => disk,
            None => {
                assert!(
                    self.live.contains(member) && which == Which::Primary,
                    "{member} {which:?} is not written"
                );
                &mut self.disks[usize::from(member.0)]
            }
        }
    }

    /// R9, which may be cut off; then the array serves.
    pub fn start_log(&mut self, recovered: &Recovered) -> Result<(), Crash> {
        for member in self.live.iter() {
            self.tick()?;
            self.starts[usize::from(member.0)] =
                LogStart { sequence: recovered.next_sequence, epoch: self.epoch.number };
        }
        Ok(())
    }

    /// Checks what a recovery has left and goes on with it. Columns of `liars` may be bad.
    pub fn serve(&mut self, recovered: Recovered, mut pages: PageStore, liars: &[usize]) {
        self.check(&recovered, &mut pages, liars);
        let (content, blocks, map) = self.read_all(&mut pages, liars, &recovered.lost);
        let taken: Vec<u64> = map.iter().map(|entry| entry.slot.0).collect();
        let next = recovered.next_sequence;
        self.states = vec![(next, content.clone())];
        (self.floor_process, self.floor_power, self.floor_noted) = (next, next, next);
        self.writer = Some(Writer {
            sequence: next,
            previous: recovered.previous,
            next_blocks: recovered.next_blocks,
            tail: next,
            written: next,
            durable: next,
            noted: next,
            flushed: vec![next; self.shape.width()],
            log: Vec::new(),
            pages,
            map,
            blocks,
            images: HashMap::new(),
            free: (0..self.shape.slots).filter(|slot| !taken.contains(slot)).map(|slot| (slot, 0)).collect(),
            content,
        });
    }

    /// Promise 3: the content is that after some prefix of the batches, not below what was acknowledged; every row is
    /// consistent over all columns; the copies of every page agree.
    pub fn check(&mut self, recovered: &Recovered, pages: &mut PageStore, liars: &[usize]) {
        let (content, _, _) = self.read_all(pages, liars, &recovered.lost);
        self.page_faults += recovered.page_faults.len();
        if self.states.is_empty() {
            return;
        }
        let agrees = |state: &Content| state.iter().zip(&content).all(|(a, b)| a == b || *b == LOST);
        let matching = self.states.iter().rev().find(|(_, state)| agrees(state)).map(|(end, _)| *end);
        let Some(end) = matching else {
            panic!("no prefix has this content: {content:x?}, states {:x?}", self.states);
        };
        assert!(end >= self.floor_process, "prefix {end} and {} was acknowledged", self.floor_process);
        if liars.is_empty() {
            self.check_page_copies(pages.layout());
        }
        // What a later start reads.
        let mut cold = self.page_store();
        self.load_map(&mut cold);
        assert_eq!(self.read_all(&mut cold, liars, &recovered.lost).0, content);
    }

    fn check_page_copies(&self, layout: &PageLayout) {
        for page in (0..layout.pages()).map(PageIndex) {
            let mut newest = Vec::new();
            for (member, offset) in layout.copies(page).filter(|(member, _)| self.live.contains(*member)) {
                let from = self.shape.pages_at() + offset / BLOCK as u64;
                let places = (from..from + 2).map(|block| self.disks[usize::from(member.0)].peek(block));
                let pages =
                    places.filter_map(|bytes| Page::decode(&KEY, ARRAY, page, &bytes[..PAGE_BYTES]).ok());
                newest.push(pages.max_by_key(|page| (page.sequence, page.epoch)));
            }
            assert!(newest.windows(2).all(|pair| pair[0] == pair[1]), "copies of page {page:?} disagree");
        }
    }

    /// Reads the whole volume as an array would that decodes what does not verify.
    #[allow(clippy::type_complexity)]
    fn read_all(
        &mut self,
        pages: &mut PageStore,
        liars: &[usize],
        lost: &[(SlotIndex, usize)],
    ) -> (Content, HashMap<(u64, usize, usize), (BlockHash, Block)>, Vec<MapEntry>) {
        let Shape { k, rows, hasher, .. } = self.shape;
        let width = self.shape.width();
        let mut content = vec![0; self.shape.stripes as usize * rows * k];
        let mut blocks = HashMap::new();
        let map: Vec<MapEntry> =
            (0..self.shape.stripes).map(|stripe| pages.map_entry(StripeIndex(stripe))).collect();
        for (stripe, entry) in map.iter().enumerate().filter(|(_, entry)| entry.holds_data) {
            let slot = entry.slot.0;
            for row in 0..rows {
                let mut good: Vec<(usize, Block)> = Vec::new();
                for column in 0..width {
                    let hash = if self.shape.checksums {
                        let page = pages.layout().hash_entry(entry.slot, row, column).0;
                        self.page(pages, page);
                        let hash = pages.hash(entry.slot, row, ColumnIndex(column as u16));
                        pages.release(page);
                        Some(hash)
                    } else {
                        None
                    };
                    let member = self.member_of(slot, column);
                    if hash.is_some_and(|hash| !hash.is_stored()) {
                        good.push((column, block_of(0)));
                        blocks.insert((slot, row, column), (hash.unwrap(), block_of(0)));
                        continue;
                    }
                    if !self.live.contains(MemberIndex(member as u16)) {
                        continue;
                    }
                    let block = self.disks[member].read(self.shape.home(slot, row));
                    match block.filter(|block| hash.is_none_or(|hash| hasher.hash(&block[..]) == hash)) {
                        Some(block) => good.push((column, block)),
                        None => assert!(
                            liars.contains(&member) || lost.contains(&(entry.slot, row)),
                            "stripe {stripe} slot {slot} row {row} column {column} on member {member} is bad"
                        ),
                    }
                }
                if good.len() < k {
                    assert!(lost.contains(&(entry.slot, row)), "slot {slot} row {row} is lost and not told");
                    for column in 0..k {
                        let at = self.content_at(stripe as u64, row, column);
                        let found = good.iter().find(|(c, _)| *c == column);
                        content[at] = found.map_or(LOST, |(_, block)| self.recognise(block, at));
                    }
                    continue;
                }
                let columns: Vec<(usize, &[u8])> =
                    good.iter().map(|(column, block)| (*column, &block[..])).collect();
                assert!(self.codec.consistent(&columns), "stripe {stripe} row {row} is torn");
                for column in 0..width {
                    let mut block = block_of(0);
                    match good.iter().find(|(c, _)| *c == column) {
                        Some((_, found)) => block.clone_from(found),
                        None => {
                            self.codec.recover(&columns[..k], &mut [(column, &mut block[..])]).unwrap();
                        }
                    }
                    if column < k {
                        let at = self.content_at(stripe as u64, row, column);
                        content[at] = self.recognise(&block, at);
                    }
                    let hash = hasher.hash(&block[..]);
                    blocks.entry((slot, row, column)).or_insert((hash, block));
                }
            }
        }
        (content, blocks, map)
    }

    /// The value whose block this is.
    fn recognise(&self, block: &Block, at: usize) -> u64 {
        let mut values = self.states.iter().map(|(_, state)| state[at]).chain([0]);
        values.find(|&value| block_of(value) == *block).unwrap_or_else(|| {
            panic!("content {at} is garbage");
        })
    }
}

/// Blocks of payload of a member's piece.
pub fn payload_blocks(batch: &Batch, member: usize, map: &Map) -> u32 {
    let of = |record: &LogRecord| match record {
        LogRecord::InPlace(record) => {
            let column = map.column_of(record.slot, MemberIndex(member as u16)).0;
            let at = record.columns.binary_search(&column);
            let hashes = at.map_or(0, |at| {
                (0..record.rows as usize).filter(|&row| record.hash(at, row).is_stored()).count()
            });
            hashes as u32
        }
        _ => 0,
    };
    batch.records.iter().map(of).sum()
}
