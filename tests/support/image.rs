//! The file of a member as a test that damages it sees it: where things lie, and which of them matter.

use calpe::daemon::read_superblock;
use calpe::member::{Access, Device};
use calpe_core::array::geometry::Map;
use calpe_core::format::{
    COPY_BYTES, LOG_BLOCK_BYTES, LogKey, RegionKind, SegmentError, SegmentHeader, Superblock,
    all_copy_offsets,
};
use calpe_core::testing::Random;
use calpe_core::units::SlotIndex;
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Bytes of a block of data, parity, log and pages.
pub(crate) const BLOCK: u64 = 4096;
const SECTOR: usize = 512;

/// A kind of damage to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Damage {
    /// One bit of one byte.
    Flip,
    /// One sector reads as zeroes.
    ZeroSector,
    /// Two blocks are swapped.
    Swap,
}

/// See the head of this file.
pub(crate) struct Image {
    pub path: PathBuf,
    file: File,
    bytes: u64,
    pub superblock: Superblock,
}

impl Image {
    pub(crate) fn open(path: &Path) -> Image {
        let device = Device::open(path, Access::ReadOnly).expect("a member");
        let superblock = read_superblock(&device).expect("a superblock");
        let mut options = File::options();
        options.read(true).write(true);
        // Past the page cache, as the daemon does: when both kinds of access meet, the kernel may report
        // errors to both.
        let direct = options.clone().custom_flags(libc::O_DIRECT).open(path);
        let file = direct.or_else(|_| options.open(path)).expect("opened");
        Image { path: path.into(), file, bytes: device.facts().bytes, superblock }
    }

    /// The copies of the superblock.
    pub(crate) fn copies(&self) -> Vec<Range<u64>> {
        all_copy_offsets(self.bytes).iter().map(|at| at.0..at.0 + COPY_BYTES as u64).collect()
    }

    /// Offsets of the blocks of a region that are not zero.
    pub(crate) fn blocks(&self, kind: RegionKind) -> Vec<u64> {
        let region = self.superblock.region(kind).expect("a logged array");
        let bytes = self.read(region.offset.0, region.len as usize);
        let used = bytes.chunks_exact(BLOCK as usize).map(|block| block.iter().any(|&byte| byte != 0));
        used.enumerate()
            .filter(|(_, used)| *used)
            .map(|(at, _)| region.offset.0 + at as u64 * BLOCK)
            .collect()
    }

    /// Offsets of the blocks of the data region that are not zero and lie in wanted columns. `wanted` gets
    /// the column and the number of data columns.
    pub(crate) fn columns(&self, wanted: impl Fn(u16, u16) -> bool) -> Vec<u64> {
        let Superblock { geometry, member, .. } = self.superblock;
        let map = Map::new(&geometry);
        let start = self.superblock.data_region().offset.0;
        let column = |at: u64| map.column_of(SlotIndex((at - start) / u64::from(geometry.chunk)), member).0;
        let blocks = self.blocks(RegionKind::Data).into_iter();
        blocks.filter(|&at| wanted(column(at), geometry.data)).collect()
    }

    pub(crate) fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let start = offset / BLOCK * BLOCK;
        let whole = self.read_blocks(start, offset + len as u64);
        let from = (offset - start) as usize;
        whole.bytes()[from..from + len].to_vec()
    }

    /// Writes the bytes, by rewriting the whole blocks that hold them.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let start = offset / BLOCK * BLOCK;
        let mut whole = self.read_blocks(start, offset + bytes.len() as u64);
        let from = (offset - start) as usize;
        whole.bytes_mut()[from..from + bytes.len()].copy_from_slice(bytes);
        self.file.write_all_at(whole.bytes(), start).expect("written");
        self.file.sync_data().expect("flushed");
    }

    fn read_blocks(&self, start: u64, end: u64) -> Aligned {
        let mut whole = Aligned::new((end - start).next_multiple_of(BLOCK) as usize);
        self.file.read_exact_at(whole.bytes_mut(), start).expect("read");
        whole
    }

    /// Flips one bit of a byte drawn from a range. Returns both, so that the same flip can undo it.
    pub(crate) fn flip(&self, range: Range<u64>, random: &mut Random) -> (u64, u8) {
        let at = range.start + random.below(range.end - range.start);
        let bit = 1 << random.below(8);
        self.flip_at(at, bit);
        (at, bit)
    }

    pub(crate) fn flip_at(&self, at: u64, bit: u8) {
        let byte = self.read(at, 1)[0];
        self.write(at, &[byte ^ bit]);
    }

    /// Damages the block at an offset; `others` are blocks that it may be swapped with. Returns the blocks
    /// that were written, with what they held before.
    pub(crate) fn damage(
        &self,
        damage: Damage,
        offset: u64,
        others: &[u64],
        random: &mut Random,
    ) -> Vec<(u64, Vec<u8>)> {
        let before = self.read(offset, BLOCK as usize);
        match damage {
            Damage::Flip => {
                self.flip(offset..offset + BLOCK, random);
                vec![(offset, before)]
            }
            Damage::ZeroSector => {
                let sector = random.below(BLOCK / SECTOR as u64) * SECTOR as u64;
                self.write(offset + sector, &[0; SECTOR]);
                vec![(offset, before)]
            }
            Damage::Swap => {
                let other = others[random.below(others.len() as u64) as usize];
                let theirs = self.read(other, BLOCK as usize);
                self.write(offset, &theirs);
                self.write(other, &before);
                vec![(offset, before), (other, theirs)]
            }
        }
    }

    /// Every header of the log, with the block it starts at.
    fn headers(&self) -> Vec<(u64, SegmentHeader)> {
        let region = self.superblock.region(RegionKind::Log).expect("a logged array");
        let key = LogKey::derive(self.superblock.array, self.superblock.log_secret);
        let ring = self.read(region.offset.0, region.len as usize);
        let decode = |block: usize| {
            let rest = &ring[block * LOG_BLOCK_BYTES..];
            let decode = |blocks: usize| {
                let bytes = rest.get(..blocks * LOG_BLOCK_BYTES).ok_or(SegmentError::None)?;
                let Superblock { array, member, .. } = self.superblock;
                SegmentHeader::decode(&key, array, member, block as u32, bytes)
            };
            match decode(1) {
                Err(SegmentError::Longer { blocks }) => decode(blocks as usize).ok(),
                other => other.ok(),
            }
        };
        let blocks = ring.len() / LOG_BLOCK_BYTES;
        (0..blocks)
            .filter_map(|block| Some((region.offset.0 + block as u64 * BLOCK, decode(block)?)))
            .collect()
    }
}

/// Memory aligned for direct I/O.
struct Aligned {
    memory: Vec<u8>,
    from: usize,
    len: usize,
}

impl Aligned {
    fn new(len: usize) -> Aligned {
        let memory = vec![0; len + BLOCK as usize];
        let from = memory.as_ptr().align_offset(BLOCK as usize);
        Aligned { memory, from, len }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.from..self.from + self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.from..self.from + self.len]
    }
}

/// For each member, the blocks of its log that a replay needs and that are noted as flushed: by a member
/// that is none of `liars`, whose damage may take a note away. Without one a replay need not find a batch
/// whole, and blames nobody for what it lacks of it.
pub(crate) fn live_log(images: &[Image], liars: &[usize]) -> Vec<Vec<u64>> {
    let headers: Vec<Vec<(u64, SegmentHeader)>> = images.iter().map(Image::headers).collect();
    let start = images.iter().map(|image| image.superblock.log_start).max().expect("a member");
    let counts = |header: &&SegmentHeader| header.batch.epoch.number >= start.epoch;
    let all = || headers.iter().flatten().map(|(_, header)| header).filter(counts);
    let tail = all().map(|header| header.batch.tail).max().unwrap_or(0).max(start.sequence);
    let mut notes: HashMap<u64, u64> = HashMap::new();
    let trusted = headers.iter().enumerate().filter(|(index, _)| !liars.contains(index));
    for header in trusted.flat_map(|(_, headers)| headers).map(|(_, header)| header).filter(counts) {
        let note = notes.entry(header.batch.epoch.id).or_default();
        *note = header.batch.durable_upto.max(*note);
    }
    let live = |header: &SegmentHeader| {
        let batch = &header.batch;
        let noted = notes.get(&batch.epoch.id).is_some_and(|&note| batch.sequence < note);
        counts(&header) && batch.sequence >= tail && noted
    };
    let blocks = |(offset, header): &(u64, SegmentHeader)| {
        let offset = *offset;
        (0..u64::from(header.header_blocks + header.payload_blocks)).map(move |at| offset + at * BLOCK)
    };
    let of_member = |headers: &Vec<(u64, SegmentHeader)>| {
        headers.iter().filter(|(_, header)| live(header)).flat_map(blocks).collect()
    };
    headers.iter().map(of_member).collect()
}
