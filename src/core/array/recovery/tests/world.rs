//! Members in memory with volatile caches, a small writer that logs as the running array does, and a power
//! switch.
//!
//! The writer follows the rules W1 to W4: pieces to all live members, flushes of single members, notes,
//! destage and page write-back only behind a durable note, the tail behind a flush. A fuse counts writes and
//! flushes; when it burns out the power fails or the process dies, and every cached block is independently
//! lost, kept or torn. The conditions for the time afterwards are kept beside: the volume's content after
//! every batch, and which batches were acknowledged.

use crate::array::pages::copies::Torn;
use crate::array::pages::store::PageIo;
use crate::array::recovery::tests::disk::{BLOCK, Block, Disk, block_of};
use crate::array::recovery::*;
use crate::format::{Batch, FreshRecord, Geometry, InPlaceRecord, LogRecord, MapEntry, NO_PLACE, PageLayout};
use crate::testing::Random;
use crate::units::{BlockHash, ColumnIndex, StripeIndex};
use std::collections::{BTreeMap, HashMap};

pub(super) const ARRAY: Uuid = Uuid::from_u128(0x5eed);
pub(super) const KEY: LogKey = LogKey([7; 32]);

thread_local! {
    /// One for all worlds of a test: mapping memory costs more than a recovery.
    static POOL: Pool = Pool::new(8 << 20).unwrap();
}

/// The fuse has burnt out.
#[derive(Debug)]
pub(super) struct Crash;

/// Shape of the array.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
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
    pub(super) fn new(k: usize, m: usize) -> Shape {
        let hasher = BlockHasher::Crc32c;
        Shape { k, m, rows: 1, stripes: 2, slots: 4, ring: 40, hasher, checksums: true }
    }

    pub(super) fn width(&self) -> usize {
        self.k + self.m
    }

    pub(super) fn geometry(&self) -> Geometry {
        Geometry {
            data: self.k as u16,
            parity: self.m as u16,
            chunk: (self.rows * BLOCK) as u32,
            sector: 4096,
            slots: self.slots,
            volume_bytes: self.stripes * (self.k * self.rows * BLOCK) as u64,
            ahead: 0,
        }
    }

    pub(super) fn pages_at(&self) -> u64 {
        u64::from(self.ring)
    }

    pub(super) fn data_at(&self) -> u64 {
        self.pages_at() + PageLayout::new(self.geometry(), self.checksums).region_bytes() / BLOCK as u64
    }

    pub(super) fn home(&self, slot: u64, row: usize) -> u64 {
        self.data_at() + slot * self.rows as u64 + row as u64
    }

    pub(super) fn blocks(&self) -> u64 {
        self.home(self.slots, 0)
    }
}

/// What a client asks for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ask {
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

/// The next step of the array.
#[derive(Clone, Debug)]
pub(super) enum Deed {
    Batch(Vec<Ask>),
    Flush(usize),
    FlushAll,
    Note,
    /// Puts everything in place, and moves the tail behind it.
    Checkpoint,
    Fail(usize),
}

pub(super) type Content = Vec<u64>;

/// The state of the array while it runs.
pub(super) struct Writer {
    pub sequence: u64,
    pub previous: BatchHash,
    pub next_blocks: Vec<u32>,
    pub tail: u64,
    /// Batches below are written on all live members, flushed there, noted there durably.
    pub written: u64,
    pub durable: u64,
    pub noted: u64,
    /// For each member: batches below were flushed.
    pub flushed: Vec<u64>,
    /// Batches that are in the log.
    pub log: Vec<Batch>,
    pub pages: PageStore,
    pub map: Vec<MapEntry>,
    /// (slot, row, column) to hash and content.
    pub blocks: HashMap<(u64, usize, usize), (BlockHash, Block)>,
    /// Every block of parity and data that was written in place, by its hash: the payload of records.
    pub images: HashMap<BlockHash, Block>,
    /// Free slots, and the batch that must be durable before each is used.
    pub free: Vec<(u64, u64)>,
    pub content: Content,
}

/// See the head of this file.
// More than 15 fields: the state of one modelled array, which its tests set up and look at.
pub(super) struct World {
    pub shape: Shape,
    pub disks: Vec<Disk>,
    /// Log starts on the members, on which a superblock write is atomic.
    pub starts: Vec<LogStart>,
    pub live: MemberSet,
    pub epoch: EpochStamp,
    pub building: Vec<(Building, Disk)>,
    pub random: Random,
    pub now: Timestamp,
    pub fuse: Option<u64>,
    pub burnt: u64,
    pub codec: Codec,
    pub pool: Pool,
    pub force: bool,
    /// Batches at which the writer makes room.
    pub log_batches_max: usize,
    pub writer: Option<Writer>,
    pub values: u64,
    /// The volume's content when all batches below a sequence are done.
    pub states: Vec<(u64, Content)>,
    /// Batches below must not be lost.
    pub floor_process: u64,
    pub floor_power: u64,
    pub floor_noted: u64,
    /// The layout of everything the log held at the crash, for tests that damage it.
    pub last_log: Vec<Batch>,
}

impl World {
    pub(super) fn new(shape: Shape, seed: u64) -> World {
        let n = shape.width();
        let disks = (0..n).map(|at| Disk::new(1 << 40 | (at as u64) << 32)).collect();
        let mut world = World {
            shape,
            disks,
            starts: vec![LogStart { sequence: 0, epoch: 1 }; n],
            live: MemberSet::first(n as u16),
            epoch: EpochStamp { number: 1, id: 11 },
            building: Vec::new(),
            random: Random::new(seed),
            now: Timestamp(0),
            fuse: None,
            burnt: 0,
            codec: Codec::new(shape.k, shape.m).unwrap(),
            pool: POOL.with(Clone::clone),
            force: false,
            log_batches_max: 6,
            writer: None,
            values: seed << 20,
            states: Vec::new(),
            floor_process: 0,
            floor_power: 0,
            floor_noted: 0,
            last_log: Vec::new(),
        };
        let mut pages = world.page_store();
        world.load_map(&mut pages);
        let recovered = Recovered { next_blocks: vec![0; n], ..Recovered::default() };
        world.serve(recovered, pages, &[]);
        world
    }

    pub(super) fn page_store(&self) -> PageStore {
        PageStore::new(self.shape.geometry(), self.shape.checksums, KEY, ARRAY, 4)
    }

    /// One event; a multi-block write that is cut off is done in part.
    pub(super) fn tick(&mut self) -> Result<(), Crash> {
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

    /// Writes a block in place, on the member if it is live and on devices that are being built and are past
    /// the slot.
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

    /// A device that is being built, with every slot below `bound` as it is now. Nothing may be in the log
    /// alone.
    pub(super) fn build(&mut self, member: usize, which: Which, bound: u64) {
        let mut disk = Disk::new(1 << 50);
        for (&(slot, row, column), (_, block)) in &self.writer.as_ref().unwrap().blocks {
            if slot < bound && self.member_of(slot, column) == member {
                disk.write(self.shape.home(slot, row), &block[..]);
            }
        }
        disk.flush();
        let device = Building { member: MemberIndex(member as u16), which, bound: SlotIndex(bound) };
        self.building.push((device, disk));
    }

    /// Checks that devices that are being built hold the right content below their bounds.
    pub(super) fn check_building(&mut self) {
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

    pub(super) fn map(&self) -> Map {
        Map::new(&self.shape.geometry())
    }

    pub(super) fn member_of(&self, slot: u64, column: usize) -> usize {
        usize::from(self.map().member_of(SlotIndex(slot), ColumnIndex(column as u16)).0)
    }

    /// Does a deed; unless the fuse burns out.
    pub(super) fn act(&mut self, deed: &Deed) -> Result<(), Crash> {
        if self.writer.as_ref().unwrap().log.len() >= self.log_batches_max {
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

    pub(super) fn content_at(&self, stripe: u64, row: usize, column: usize) -> usize {
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

    /// Writes an empty batch that records how far batches are durable, and makes it durable.
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
        // Everything except the note itself is in place; the note changes nothing.
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
    pub(super) fn page(&self, pages: &mut PageStore, page: PageIndex) {
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

    pub(super) fn load_map(&self, pages: &mut PageStore) {
        for page in (0..pages.layout().map_pages()).map(PageIndex) {
            self.page(pages, page);
            pages.release(page);
        }
    }
}

/// Blocks of payload of a member's piece.
pub(super) fn payload_blocks(batch: &Batch, member: usize, map: &Map) -> u32 {
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
