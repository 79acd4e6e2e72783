//! The redo logs of simulated disks: their content, and damage to it.
//!
//! Reads only the format: the array decides what a log means, and the explorer checks it.

use super::disk::BLOCK;
use super::{DiskRegion, Random, SimDisk, superblocks};
use crate::array::geometry::Map;
use crate::codec::BlockHasher;
use crate::format::{
    Batch, BatchHash, ChecksumKind, LogKey, LogRecord, LogStart, NO_PLACE, Region, RegionKind, SegmentError,
    SegmentHeader, Superblock,
};
use crate::units::{BlockHash, ColumnIndex, LaneIndex, MemberIndex, VolumeOffset};
use crate::volume::LaneCut;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Limit of a header's length in blocks; headers in a simulated ring are far shorter.
const HEADER_BLOCKS_MAX: u32 = 64;

/// Damages the logs of some disks, block by block. Returns their members: bit by index.
pub(super) fn ruin(disks: &mut BTreeMap<u32, SimDisk>, width: u16, random: &mut Random) -> u64 {
    let mut ruined = 0;
    let many = random.below(u64::from(width)) + 1;
    for disk in disks.values_mut().filter(|disk| !disk.dead) {
        if random.below(u64::from(width)) >= many {
            continue;
        }
        let Some(superblock) = superblocks::newest(disk) else { continue };
        let regions = DiskRegion::Log.ranges(disk);
        if regions.is_empty() {
            continue;
        }
        let one_in = 1 + random.below(3);
        let kind = random.below(3);
        let blocks: Vec<u64> = regions.into_iter().flat_map(|region| disk.written_blocks(region)).collect();
        for block in blocks {
            if random.one_in(one_in) {
                harm(disk, block, kind, random);
            }
        }
        ruined |= 1 << superblock.member.0;
    }
    ruined
}

/// Members with unreadable blocks in their logs: bit by index.
pub(super) fn unreadable(disks: &BTreeMap<u32, SimDisk>) -> u64 {
    let of = |disk: &SimDisk| {
        let bit = 1 << superblocks::newest(disk)?.member.0;
        let regions = DiskRegion::Log.ranges(disk);
        let is_of_log = |block: &u64| regions.iter().any(|region| region.contains(&(block * BLOCK)));
        disk.bad_blocks.iter().any(is_of_log).then_some(bit)
    };
    disks.values().filter(|disk| !disk.dead).filter_map(of).fold(0, |bits, bit| bits | bit)
}

/// Damages images that later batches replace, on any number of members. No row needs them, so nothing may be
/// lost. Returns how many it damaged. All present disks must be current, and nothing is damaged unless every
/// member is present: a member that comes back at a later start may lack the newer batch, and if others were
/// lost meanwhile, the older image would be needed.
pub(super) fn spoil_superseded(disks: &mut BTreeMap<u32, SimDisk>, width: u16, random: &mut Random) -> usize {
    let one_in = 1 + random.below(3);
    let kind = random.below(3);
    let mut spoilt = 0;
    for (id, block) in superseded(disks, width) {
        if let Some(disk) = disks.get_mut(&id).filter(|_| random.one_in(one_in)) {
            harm(disk, block, kind, random);
            spoilt += 1;
        }
    }
    spoilt
}

fn harm(disk: &mut SimDisk, block: u64, kind: u64, random: &mut Random) {
    match kind {
        0 => drop(disk.bad_blocks.insert(block)),
        1 => disk.poke(block * BLOCK, &[0; BLOCK as usize]),
        _ => disk.flip(block * BLOCK + random.below(BLOCK), 1 << random.below(8)),
    }
}

/// Blocks of the volume in batches of a lane that none of these disks notes as flushed. Between a flush and
/// its note (W2) a rolled-back disk looks like one that had not yet received such a batch. Other disks are
/// stale: their notes are not read.
pub(super) fn blocks_not_noted<'a>(
    disks: impl Iterator<Item = (&'a u32, &'a SimDisk)>,
    lane: LaneIndex,
) -> BTreeSet<usize> {
    let logs: Vec<Log> = disks.filter_map(|(id, disk)| Log::of(*id, disk, lane)).collect();
    let Some(first) = logs.first() else { return BTreeSet::new() };
    let (geometry, cut) = (first.superblock.geometry, LaneCut::of(&first.superblock));
    let (data, rows) = (usize::from(geometry.data), geometry.chunk as usize / BLOCK as usize);
    let headers: Vec<SegmentHeader> = logs.iter().flat_map(Log::headers).collect();
    let starts = logs.iter().map(|log| log.superblock.log_start).max().map_or(0, |start| start.sequence);
    let noted = headers.iter().map(|header| header.batch.durable_upto).fold(starts, u64::max);
    let mut blocks = BTreeSet::new();
    for record in headers.iter().filter(|h| h.batch.sequence >= noted).flat_map(|h| &h.batch.records) {
        let (stripe, record) = match record {
            LogRecord::InPlace(record) => (record.stripe, Some(record).filter(|record| !record.first)),
            LogRecord::Fresh(record) => (record.stripe, None),
            LogRecord::Discard { stripe, .. } => (*stripe, None),
        };
        let start = cut.whole_of(lane, VolumeOffset(stripe.0 * geometry.stripe_bytes()));
        let first = (start.0 / BLOCK) as usize;
        let Some(record) = record else {
            blocks.extend(first..first + data * rows);
            continue;
        };
        for column in record.columns.iter().map(|&column| usize::from(column)).filter(|&c| c < data) {
            let from = first + column * rows + record.row as usize;
            blocks.extend(from..from + record.rows as usize);
        }
    }
    blocks
}

/// The log of one disk.
struct Log<'a> {
    id: u32,
    disk: &'a SimDisk,
    superblock: Superblock,
    /// Where the ring begins on the disk.
    start: u64,
    region: Region,
    key: LogKey,
}

impl<'a> Log<'a> {
    /// The log of a lane of a disk, if the disk is present and has one.
    fn of(id: u32, disk: &'a SimDisk, lane: LaneIndex) -> Option<Log<'a>> {
        let superblock = superblocks::of_lane(disk, lane).filter(|_| !disk.dead)?;
        let key = LogKey::derive(superblock.array, superblock.log_secret);
        let region = superblock.region(RegionKind::Log)?;
        let start = disk.window(lane).start + region.offset.0;
        Some(Log { id, disk, superblock, start, region, key })
    }

    fn block_of_disk(&self, place: u32) -> u64 {
        self.start / BLOCK + u64::from(place)
    }

    /// The header at `place`, if there is one that verifies.
    fn header(&self, place: u32) -> Option<SegmentHeader> {
        let block = self.block_of_disk(place);
        let left = (self.region.len / BLOCK) as u32 - place;
        let mut blocks = 1;
        loop {
            if (block..block + u64::from(blocks)).any(|block| self.disk.bad_blocks.contains(&block)) {
                return None;
            }
            let bytes = self.disk.peek(block * BLOCK, blocks as usize * BLOCK as usize);
            let Superblock { array, member, .. } = self.superblock;
            match SegmentHeader::decode(&self.key, array, member, place, &bytes) {
                Ok(header) => return Some(header),
                Err(SegmentError::Longer { blocks: wanted }) if wanted <= left.min(HEADER_BLOCKS_MAX) => {
                    blocks = wanted;
                }
                Err(_) => return None,
            }
        }
    }

    fn headers(&self) -> Vec<SegmentHeader> {
        let range = self.start..self.start + self.region.len;
        let blocks = self.disk.written_blocks(range);
        blocks.iter().filter_map(|block| self.header((block - self.block_of_disk(0)) as u32)).collect()
    }

    fn holds(&self, block: u64, hash: BlockHash) -> bool {
        let hasher = match self.superblock.checksum {
            ChecksumKind::Blake3 => BlockHasher::Blake3,
            ChecksumKind::None | ChecksumKind::Crc32c => BlockHasher::Crc32c,
        };
        !self.disk.bad_blocks.contains(&block)
            && hasher.hash(&self.disk.peek(block * BLOCK, BLOCK as usize)) == hash
    }
}

/// An image in a batch: slot, row and column, hash, and the member and block of its payload.
struct Image {
    cell: (u64, usize, u16),
    hash: BlockHash,
    member: MemberIndex,
    ordinal: u32,
}

fn images(batch: &Batch, map: &Map) -> Vec<Image> {
    let mut all = Vec::new();
    let mut payload: HashMap<u16, u32> = HashMap::new();
    for record in &batch.records {
        let LogRecord::InPlace(record) = record else { continue };
        for (at, &column) in record.columns.iter().enumerate() {
            let member = map.member_of(record.slot, ColumnIndex(column));
            for offset in 0..record.rows as usize {
                let hash = record.hash(at, offset);
                if hash.is_stored() {
                    let ordinal = payload.entry(member.0).or_default();
                    let cell = (record.slot.0, record.row as usize + offset, column);
                    all.push(Image { cell, hash, member, ordinal: *ordinal });
                    *ordinal += 1;
                }
            }
        }
    }
    all
}

/// Blocks of disks with images that no recovery needs: a later batch replaces them, every member is present,
/// and that batch and all before it are whole on every member.
fn superseded(disks: &BTreeMap<u32, SimDisk>, width: u16) -> Vec<(u32, u64)> {
    let lanes = disks.values().next().map(SimDisk::lanes);
    lanes.into_iter().flatten().flat_map(|lane| superseded_in(disks, width, lane)).collect()
}

fn superseded_in(disks: &BTreeMap<u32, SimDisk>, width: u16, lane: LaneIndex) -> Vec<(u32, u64)> {
    let logs: Vec<Log> = disks.iter().filter_map(|(id, disk)| Log::of(*id, disk, lane)).collect();
    let start = logs.iter().map(|log| log.superblock.log_start).max();
    let (Some(start), Some(first)) = (start, logs.first()) else { return Vec::new() };
    if logs.len() != usize::from(width) {
        return Vec::new();
    }
    let map = Map::new(&first.superblock.geometry);
    let whole = whole_batches(&logs, start, &map);
    let mut last: HashMap<(u64, usize, u16), Vec<(u32, u64)>> = HashMap::new();
    let mut replaced = Vec::new();
    for header in &whole {
        let mut given_up = Vec::new();
        for record in &header.batch.records {
            match record {
                LogRecord::InPlace(record) if record.first => given_up.push(record.slot.0),
                LogRecord::InPlace(_) => {}
                LogRecord::Fresh(record) => given_up.extend([record.slot.0, record.old_slot.0]),
                LogRecord::Discard { slot, .. } => given_up.push(slot.0),
            }
        }
        // A batch that both frees a slot and writes it is left alone.
        last.retain(|(slot, ..), at| {
            let kept = !given_up.contains(slot);
            if !kept {
                replaced.append(at);
            }
            kept
        });
        for image in images(&header.batch, &map) {
            let place = header.batch.places[usize::from(image.member.0)];
            let holder = logs.iter().find(|log| log.superblock.member == image.member);
            let at = holder
                .filter(|_| place != NO_PLACE)
                .map(|log| (log.id, log.block_of_disk(place + header.header_blocks + image.ordinal)));
            let before = last.insert(image.cell, at.into_iter().collect());
            replaced.extend(before.into_iter().flatten());
        }
    }
    replaced
}

/// The batches from the tail on that every disk holds whole, data of fresh records included.
fn whole_batches(logs: &[Log], start: LogStart, map: &Map) -> Vec<SegmentHeader> {
    let mut found: HashMap<BatchHash, (SegmentHeader, Vec<MemberIndex>)> = HashMap::new();
    let (mut tail, mut noted) = (start.sequence, start.sequence);
    for log in logs {
        for header in log.headers().into_iter().filter(|h| h.batch.epoch.number >= start.epoch) {
            tail = tail.max(header.batch.tail);
            noted = noted.max(header.batch.durable_upto);
            let holders = &mut found.entry(header.hash).or_insert_with(|| (header, Vec::new())).1;
            holders.push(log.superblock.member);
        }
    }
    let mut whole: Vec<SegmentHeader> = Vec::new();
    loop {
        let sequence = tail + whole.len() as u64;
        let fits = |header: &&(SegmentHeader, _)| {
            let batch = &header.0.batch;
            batch.sequence == sequence && whole.last().is_none_or(|before| before.hash == batch.previous)
        };
        let next = found.values().filter(fits).max_by_key(|(header, _)| header.batch.epoch.number);
        let Some((header, holders)) = next else { return whole };
        let all = images(&header.batch, map);
        let is_whole = |log: &Log| {
            let member = log.superblock.member;
            let place = header.batch.places[usize::from(member.0)];
            let first = log.block_of_disk(0) + u64::from(place) + u64::from(header.header_blocks);
            let mut payload = all.iter().filter(|image| image.member == member);
            place == NO_PLACE
                || (holders.contains(&member)
                    && payload.all(|image| log.holds(first + u64::from(image.ordinal), image.hash)))
        };
        // The data of a fresh record is not checked; it is whole if the batch is noted as flushed.
        let is_fresh = header.batch.records.iter().any(|record| matches!(record, LogRecord::Fresh(_)));
        if !logs.iter().all(is_whole) || (is_fresh && sequence >= noted) {
            return whole;
        }
        whole.push(header.clone());
    }
}
