//! Crashes, runs the recovery over the remains, and checks the conditions that must hold afterwards.

use crate::array::recovery::tests::disk::{BLOCK, Block, Disk, block_of};
use crate::array::recovery::tests::world::{ARRAY, Content, Crash, KEY, Shape, World, Writer};
use crate::array::recovery::*;
use crate::block_io::IoFaultKind;
use crate::format::{MapEntry, PAGE_BYTES, Page, PageLayout, RegionKind};
use crate::units::{BlockHash, ColumnIndex, StripeIndex};
use std::collections::HashMap;

/// How the array ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    PowerLoss,
    /// The caches survive.
    ProcessDeath,
}

/// Stands for the value of a block that cannot be read.
const LOST: u64 = u64::MAX;

impl World {
    /// Ends the array; everything acknowledged must be there again afterwards.
    pub(super) fn crash(&mut self, end: End) {
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

    /// Lowers the demand, because the damage is beyond the budget: only noted batches must be there.
    pub(super) fn lower_floor_to_note(&mut self) {
        (self.floor_process, self.floor_power) = (self.floor_noted, self.floor_noted);
    }

    pub(super) fn kill(&mut self, member: usize) {
        self.disks[member].dead = true;
        self.live.remove(MemberIndex(member as u16));
    }

    fn context(&self) -> RecoveryContext {
        let shape = &self.shape;
        let bytes = |blocks: u64| ByteOffset(blocks * BLOCK as u64);
        let start = self.live.iter().map(|m| self.starts[usize::from(m.0)]);
        RecoveryContext {
            map: Map::new(&shape.geometry()),
            geometry: shape.geometry(),
            stripes_at_once: 1 + self.burnt % 5,
            regions: Regions {
                data_offset: bytes(shape.data_at()),
                log: Region { kind: RegionKind::Log, offset: bytes(0), len: bytes(u64::from(shape.ring)).0 },
                pages_offset: bytes(shape.pages_at()),
            },
            checks: Checks { key: KEY, array: ARRAY, hasher: shape.hasher, checksums: shape.checksums },
            usable: self.live,
            building: self.building.iter().map(|(device, _)| *device).collect(),
            known: Known {
                start: start.max_by_key(|start| (start.epoch, start.sequence)).unwrap(),
                durable: 0,
                clean: false,
                map_pages: 0,
            },
            epoch: self.epoch,
            force: self.force,
            judging: Judging { judge_only: false, away: MemberSet::default(), behind: MemberSet::default() },
            lift_max: None,
            codec: self.codec.clone(),
            pool: self.pool.clone(),
        }
    }

    /// One recovery over the live members, up to its outcome or a burnt fuse. I/O ends in any order.
    pub(super) fn recover(&mut self, clean: bool) -> Result<(RecoveryOutcome, PageStore), Crash> {
        // A4: complete before the log is acted on; superblocks are atomic here.
        self.epoch = EpochStamp { number: self.epoch.number + 1, id: self.random.next_u64() };
        let mut context = self.context();
        context.known.clean = clean;
        let mut recovery = Recovery::new(context);
        let mut pages = self.page_store();
        let mut pending = Vec::new();
        let mut idle = 0;
        loop {
            if let Some(outcome) = recovery.poll(self.now, &mut pages, &mut pending) {
                return Ok((outcome, pages));
            }
            if pending.is_empty() && recovery.has_work() {
                continue;
            }
            if pending.is_empty() {
                self.now.0 += 100_000_000;
                idle += 1;
                assert!(idle < 1000, "the recovery waits for nothing");
                continue;
            }
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
    pub(super) fn start_log(&mut self, recovered: &Recovered) -> Result<(), Crash> {
        for member in self.live.iter() {
            self.tick()?;
            self.starts[usize::from(member.0)] =
                LogStart { sequence: recovered.next_sequence, epoch: self.epoch.number };
        }
        Ok(())
    }

    /// Checks the state that a recovery has left and goes on with it. Columns of `liars` may be bad.
    pub(super) fn serve(&mut self, recovered: Recovered, mut pages: PageStore, liars: &[usize]) {
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

    /// Promise 3: the content is that after some prefix of the batches, not below what was acknowledged;
    /// every row is consistent over all columns; the copies of every page agree.
    pub(super) fn check(&mut self, recovered: &Recovered, pages: &mut PageStore, liars: &[usize]) {
        let (content, _, _) = self.read_all(pages, liars, &recovered.lost);
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
            assert_eq!(recovered.page_faults, [], "a crash is no error of a member");
            self.check_page_copies(pages.layout());
        }
        // As a later start reads it.
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
                let page = pages.max_by_key(|page| (page.sequence, page.epoch));
                newest.push(page.map(|page| Page { paired: true, ..page }));
            }
            assert!(newest.windows(2).all(|pair| pair[0] == pair[1]), "copies of page {page:?} disagree");
        }
    }

    /// Reads the whole volume like an array that decodes blocks which do not verify.
    #[allow(clippy::type_complexity)]
    fn read_all(
        &mut self,
        pages: &mut PageStore,
        liars: &[usize],
        lost: &[LostRow],
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
                let told = lost.iter().find(|lost| lost.slot == entry.slot && lost.row == row);
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
                            liars.contains(&member) || told.is_some(),
                            "stripe {stripe} slot {slot} row {row} column {column} on member {member} is bad"
                        ),
                    }
                }
                if good.len() < k {
                    let is_good = |column: &usize| good.iter().any(|(c, _)| c == column);
                    let gone: Vec<usize> = (0..width).filter(|column| !is_good(column)).collect();
                    assert_eq!(
                        told.map(|lost| &lost.columns),
                        Some(&gone),
                        "slot {slot} row {row} is lost and not told as it is"
                    );
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

    /// The value that a block was made from.
    fn recognise(&self, block: &Block, at: usize) -> u64 {
        let mut values = self.states.iter().map(|(_, state)| state[at]).chain([0]);
        values.find(|&value| block_of(value) == *block).unwrap_or_else(|| {
            panic!("content {at} is garbage");
        })
    }
}
