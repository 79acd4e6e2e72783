//! One disk in memory: a medium, a volatile cache in front of it, and faults on request.
//!
//! Reads see the cache. A write stays in the cache, in order, until a flush submitted after the write
//! completed, or until the power fails: then the caller decides for each cached write whether it is kept,
//! lost or torn between sectors. Clones are cheap: blocks and tables of blocks are shared until written.
//! Invariant: reads see the medium with every cached write applied in order. Of arrays it knows only where
//! superblocks lie.

use super::fate::HEADLESS;
use super::faults::{PassingFault, PassingFaults, Trouble, fault};
use super::{Fate, Random};
use crate::block_io::{Buf, Extent, IoFault, IoFaultKind, IoOp, IoValue};
use crate::format::{LanePart, all_copy_offsets};
use crate::units::{LaneIndex, Timestamp};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a block: the unit of sharing between clones, and of unreadable data.
pub(super) const BLOCK: u64 = 4096;
/// Bytes that a disk writes whole or not at all.
pub(super) const SECTOR: usize = 512;
/// Blocks of a leaf: one superblock copy, or a small ring, fit into one or two.
const LEAF: u64 = 32;

pub(super) type Block = Arc<[u8; BLOCK as usize]>;

/// Content of a disk: blocks of zeroes take no memory.
#[derive(Clone, Default)]
struct Sparse {
    leaves: BTreeMap<u64, Arc<[Option<Block>; LEAF as usize]>>,
}

impl Sparse {
    fn get(&self, block: u64) -> Option<&Block> {
        self.leaves.get(&(block / LEAF))?[(block % LEAF) as usize].as_ref()
    }

    fn slot(&mut self, block: u64) -> &mut Option<Block> {
        let leaf = self.leaves.entry(block / LEAF).or_default();
        &mut Arc::make_mut(leaf)[(block % LEAF) as usize]
    }

    fn read(&self, offset: u64, out: &mut [u8]) {
        for (at, byte) in pieces(offset, out.len()) {
            let within = (byte % BLOCK) as usize;
            match self.get(byte / BLOCK) {
                Some(block) => out[at.clone()].copy_from_slice(&block[within..within + at.len()]),
                None => out[at].fill(0),
            }
        }
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        for (at, byte) in pieces(offset, bytes.len()) {
            let slot = self.slot(byte / BLOCK);
            if at.len() == BLOCK as usize {
                *slot = Some(Arc::<[u8]>::from(&bytes[at]).try_into().expect("a whole block"));
                continue;
            }
            let block = slot.get_or_insert_with(|| Arc::new([0; BLOCK as usize]));
            let within = (byte % BLOCK) as usize;
            Arc::make_mut(block)[within..within + at.len()].copy_from_slice(&bytes[at]);
        }
    }

    fn zero(&mut self, offset: u64, len: u64) {
        for (at, byte) in pieces(offset, len as usize) {
            if at.len() == BLOCK as usize {
                if self.get(byte / BLOCK).is_some() {
                    *self.slot(byte / BLOCK) = None;
                }
            } else if self.get(byte / BLOCK).is_some() {
                self.write(byte, &[0; BLOCK as usize][..at.len()]);
            }
        }
    }
}

/// A write in a disk's cache, or one that would be there once executed.
#[derive(Clone, Debug)]
pub struct DiskWrite {
    /// Where it starts on the disk, in bytes.
    pub offset: u64,
    content: Content,
    /// Only some of its sectors were written.
    torn: Option<u64>,
}

#[derive(Clone, Debug)]
enum Content {
    Bytes(Buf),
    Zeroes(u64),
}

/// A fault of a disk that hits one write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteFault {
    /// Acknowledged and never done.
    Lost,
    /// Done at this byte instead.
    Misdirected(u64),
    /// Done so many bytes further on, modulo 2^64.
    MisdirectedBy(u64),
}

impl DiskWrite {
    /// The write that `op` asks for; None when it is not a write.
    #[must_use]
    pub fn of(op: &IoOp) -> Option<DiskWrite> {
        match op {
            IoOp::Write { offset, buf, .. } => {
                Some(DiskWrite { offset: offset.0, content: Content::Bytes(buf.clone()), torn: None })
            }
            IoOp::Zero { offset, len, .. } => {
                Some(DiskWrite { offset: offset.0, content: Content::Zeroes(*len), torn: None })
            }
            IoOp::Read { .. } | IoOp::Flush | IoOp::Extents { .. } => None,
        }
    }

    /// Bytes that it writes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match &self.content {
            Content::Bytes(buf) => buf.len() as u64,
            Content::Zeroes(len) => *len,
        }
    }

    fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes()
    }

    fn apply(&self, to: &mut Sparse) {
        if let Some(which) = self.torn {
            return self.apply_torn(to, which);
        }
        match &self.content {
            Content::Bytes(buf) => to.write(self.offset, buf),
            Content::Zeroes(len) => to.zero(self.offset, *len),
        }
    }

    /// Applies the sectors that `which` picks: leading ones, trailing ones, or any.
    fn apply_torn(&self, to: &mut Sparse, which: u64) {
        let sectors = self.bytes() as usize / SECTOR;
        let mut random = Random::new(which);
        let edge = random.below(sectors as u64 + 1) as usize;
        let kind = random.below(4);
        for sector in 0..sectors {
            let there = match kind {
                _ if which == HEADLESS => sector > 0,
                0 => sector < edge,
                1 => sector >= edge,
                // Whole blocks only: the effect of a kernel that splits a request.
                2 => Random::new(which ^ (sector / 8) as u64).one_in(2),
                _ => random.one_in(2),
            };
            if !there {
                continue;
            }
            let offset = self.offset + (sector * SECTOR) as u64;
            match &self.content {
                Content::Bytes(buf) => to.write(offset, &buf[sector * SECTOR..(sector + 1) * SECTOR]),
                Content::Zeroes(_) => to.zero(offset, SECTOR as u64),
            }
        }
    }

    fn apply_as(&self, to: &mut Sparse, fate: Fate) {
        match fate {
            Fate::Lost => {}
            Fate::Torn(which) if self.torn.is_none() => self.apply_torn(to, which),
            Fate::Kept | Fate::Torn(_) => self.apply(to),
        }
    }
}

/// See the head of this file.
// More than 15 fields: the faults that tests set on a disk, and the marks they read from it.
#[derive(Clone, Default)]
pub struct SimDisk {
    /// The content that reads see.
    visible: Sparse,
    /// The content after a power cut that loses every cached write.
    medium: Sparse,
    /// Writes that no flush has covered, in order, each with the time of its execution.
    cached: Vec<(u64, DiskWrite)>,
    bytes: u64,
    /// How it is cut into windows of lanes; none for one lane.
    cut: Option<LanePart>,
    /// Every operation fails as if the device were gone.
    pub dead: bool,
    /// Reads that touch these 4 KiB blocks fail until the block is written.
    pub bad_blocks: BTreeSet<u64>,
    /// The bad blocks are in rows of which enough other members can read theirs: the disk counts as sound.
    pub scattered: bool,
    /// Writes of data fail for lack of space; superblocks have their space already.
    pub full: bool,
    /// Zeroing is refused as unsupported.
    pub cannot_zero: bool,
    /// The next flushes fail.
    pub failing_flushes: u32,
    /// The disk lost acknowledged writes that no flush had covered, while other disks kept theirs.
    pub forgot: bool,
    /// The number of the epoch in its superblock, in that of each lane, when it came back after forgetting.
    /// While that is still its epoch, the lane has not recorded that it was away, and only a log could show
    /// what it lacks. Empty when it has forgotten nothing.
    pub forgot_in: Vec<Option<u64>>,
    /// The disk was rolled back to an earlier content, and no recovery has made it whole since; `forgot` is
    /// set, too.
    pub restored: bool,
    /// The disk was `restored` when it came back; valid as long as `forgot_in`.
    pub restored_before: bool,
    /// Set when its superblock was forged: the sequence of the newest copy right afterwards.
    pub forged: Option<u64>,
    /// Its operations are executed only when no other disk has any.
    pub slow: bool,
    /// Its flushes are executed only when no disk has other operations.
    pub slow_flushes: bool,
    /// What happens to the next write that starts within these bytes.
    pub write_fault: Option<(Range<u64>, WriteFault)>,
    passing: PassingFaults,
    /// Reads executed.
    pub reads: u64,
    /// Bytes that these asked for.
    pub bytes_read: u64,
    /// Writes and zeroings executed.
    pub writes: u64,
    /// Flushes executed.
    pub flushes: u64,
}

/// A copy of all bytes of a disk; cheap.
#[derive(Clone)]
pub struct DiskCopy {
    content: Sparse,
}

impl SimDisk {
    /// A disk of zeroes.
    #[must_use]
    pub fn new(bytes: u64) -> SimDisk {
        SimDisk { bytes, ..SimDisk::default() }
    }

    /// The same disk, cut into windows of lanes.
    #[must_use]
    pub(super) fn cut_into(self, part: LanePart) -> SimDisk {
        SimDisk { cut: Some(part), ..self }
    }

    /// How it is cut.
    pub(super) fn part(&self) -> LanePart {
        self.cut.unwrap_or(LanePart::WHOLE)
    }

    /// The lanes that have a window of it.
    pub(super) fn lanes(&self) -> impl Iterator<Item = LaneIndex> + use<> {
        self.part().lanes.indices()
    }

    /// The window of a lane, in bytes.
    pub(super) fn window(&self, lane: LaneIndex) -> Range<u64> {
        self.part().window(lane, self.bytes)
    }

    /// Where the copies of superblocks lie, of all lanes.
    pub(super) fn copies(&self) -> impl Iterator<Item = u64> {
        self.lanes()
            .map(|lane| self.window(lane))
            .flat_map(|window| all_copy_offsets(window.end - window.start).map(|copy| window.start + copy.0))
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it works and has kept every write it acknowledged.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        !self.dead
            && !self.forgot
            && self.failing_flushes == 0
            && (self.scattered || self.bad_blocks.is_empty())
    }

    /// Adds a fault that hits operations from now on until it is over.
    pub fn inject(&mut self, fault: PassingFault) {
        self.passing.add(fault);
    }

    /// Ends all passing faults. Operations that hang stay so until [`super::SimArray::end_hung`].
    pub fn clear_faults(&mut self) {
        self.passing.clear();
    }

    /// Whether a passing fault may still hit an operation.
    #[must_use]
    pub fn has_passing_fault(&self, now: Timestamp) -> bool {
        self.passing.are_there(now)
    }

    /// Number of operations that passing faults have ended with this trouble.
    #[must_use]
    pub fn struck(&self, trouble: Trouble) -> u64 {
        self.passing.struck(trouble)
    }

    /// The trouble with which a passing fault ends this operation, if one hits it. The part of the operation
    /// that takes effect all the same is applied here.
    pub(super) fn strike(&mut self, op: &IoOp, (executed, now): (u64, Timestamp)) -> Option<Trouble> {
        if self.dead {
            return None;
        }
        let (trouble, fate) = self.passing.strike(op, now)?;
        if let Some(write) = DiskWrite::of(op).filter(|_| trouble != Trouble::Hang) {
            self.leave_behind(&write, executed, fate);
        }
        Some(trouble)
    }

    /// Starts the clock of the array's next life at zero; `now` is the last moment of this one.
    pub(super) fn start_clock_anew(&mut self, now: Timestamp) {
        self.passing.start_clock_anew(now);
    }

    /// A copy of its content. `durable`: the content that survives a power cut at this moment in any case;
    /// otherwise the content that reads see, as when a file is copied while it is in use.
    #[must_use]
    pub fn copy(&self, durable: bool) -> DiskCopy {
        DiskCopy { content: if durable { &self.medium } else { &self.visible }.clone() }
    }

    /// Restores the content of the copy. Bad blocks stay bad.
    pub fn restore(&mut self, copy: &DiskCopy) {
        self.cached.clear();
        self.visible = copy.content.clone();
        self.medium = copy.content.clone();
    }

    /// Reads without faults or counting.
    #[must_use]
    pub fn peek(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.visible.read(offset, &mut out);
        out
    }

    /// Writes to the medium without faults or counting.
    pub fn poke(&mut self, offset: u64, bytes: &[u8]) {
        self.write_back();
        self.medium.write(offset, bytes);
        self.visible.write(offset, bytes);
    }

    /// Whether the 4 KiB block was ever written; other blocks read as zeroes.
    #[must_use]
    pub fn holds(&self, block: u64) -> bool {
        self.visible.get(block).is_some()
    }

    /// The blocks within these bytes that were ever written.
    #[must_use]
    pub fn written_blocks(&self, range: Range<u64>) -> Vec<u64> {
        (range.start / BLOCK..range.end.div_ceil(BLOCK)).filter(|&block| self.holds(block)).collect()
    }

    /// The block as it is shared among clones: equal handles are equal bytes.
    pub(super) fn block(&self, block: u64) -> Option<&Block> {
        self.visible.get(block)
    }

    /// Inverts these bits of one byte, as a rotting medium does.
    pub fn flip(&mut self, offset: u64, bits: u8) {
        let byte = self.peek(offset, 1)[0];
        self.poke(offset, &[byte ^ bits]);
    }

    /// Swaps the contents of two blocks.
    pub fn swap_blocks(&mut self, first: u64, second: u64) {
        let [a, b] = [first, second].map(|block| self.peek(block * BLOCK, BLOCK as usize));
        self.poke(first * BLOCK, &b);
        self.poke(second * BLOCK, &a);
    }

    /// The writes that are only in the cache, in order.
    pub fn cached(&self) -> impl ExactSizeIterator<Item = &DiskWrite> {
        self.cached.iter().map(|(_, write)| write)
    }

    /// When the newest cached write was executed.
    pub(super) fn newest_cached(&self) -> u64 {
        self.cached.iter().map(|(when, _)| *when).max().unwrap_or(0)
    }

    /// Writes the whole cache to the medium.
    pub fn write_back(&mut self) {
        if !self.cached.is_empty() {
            self.medium = self.visible.clone();
            self.cached.clear();
        }
    }

    /// Cuts the power; `fate` decides for each cached write, by its index in [`SimDisk::cached`].
    pub fn cut_power(&mut self, mut fate: impl FnMut(usize, &DiskWrite) -> Fate) {
        if self.cached.is_empty() {
            return;
        }
        for (at, (_, write)) in std::mem::take(&mut self.cached).iter().enumerate() {
            write.apply_as(&mut self.medium, fate(at, write));
        }
        self.visible = self.medium.clone();
    }

    /// Cuts the power; `random` decides what is lost.
    pub fn lose_power(&mut self, random: &mut Random) {
        let mode = random.below(4);
        self.cut_power(|_, _| match mode {
            0 => Fate::Lost,
            1 => Fate::Kept,
            2 if random.one_in(2) => Fate::Lost,
            2 => Fate::Kept,
            _ => match random.below(3) {
                0 => Fate::Lost,
                1 => Fate::Kept,
                _ => Fate::Torn(random.next_u64()),
            },
        });
    }

    /// Applies, as `fate` says, a write of a process that died before it learned the outcome.
    pub(super) fn leave_behind(&mut self, write: &DiskWrite, now: u64, fate: Fate) {
        if self.dead || fate == Fate::Lost {
            return;
        }
        let mut write = write.clone();
        if let Fate::Torn(which) = fate {
            write.torn = Some(which);
        }
        self.accept(write, now, false);
    }

    fn holds_superblocks(&self, offset: u64) -> bool {
        self.copies().any(|copy| copy == offset)
    }

    /// Executes an operation. `now` counts operations of all disks; a flush submitted at `submitted` covers
    /// the operations executed until then.
    pub(super) fn execute(&mut self, op: IoOp, now: u64, submitted: u64) -> Result<IoValue, IoFault> {
        if self.dead {
            return Err(fault(IoFaultKind::Gone));
        }
        match op {
            IoOp::Read { offset, mut buf } => {
                self.reads += 1;
                self.bytes_read += buf.len() as u64;
                assert!(offset.0 + buf.len() as u64 <= self.bytes, "a read beyond the disk");
                let blocks = offset.0 / BLOCK..(offset.0 + buf.len() as u64).div_ceil(BLOCK);
                if self.bad_blocks.range(blocks).next().is_some() {
                    return Err(fault(IoFaultKind::Medium));
                }
                self.visible.read(offset.0, &mut buf);
                Ok(IoValue::Data(buf))
            }
            IoOp::Write { offset, ref buf, fua } => {
                self.writes += 1;
                assert!(offset.0 + buf.len() as u64 <= self.bytes, "a write beyond the disk");
                if self.full && !self.holds_superblocks(offset.0) {
                    return Err(fault(IoFaultKind::NoSpace));
                }
                let mut write = DiskWrite::of(&op).expect("it is a write");
                if let Some((_, fault)) = self.write_fault.take_if(|(within, _)| within.contains(&offset.0)) {
                    match fault {
                        WriteFault::Lost => return Ok(IoValue::Done),
                        WriteFault::Misdirected(to) => write.offset = to,
                        WriteFault::MisdirectedBy(bytes) => write.offset = write.offset.wrapping_add(bytes),
                    }
                }
                self.accept(write, now, fua);
                Ok(IoValue::Done)
            }
            IoOp::Flush if self.failing_flushes > 0 => {
                self.failing_flushes -= 1;
                Err(fault(IoFaultKind::Medium))
            }
            IoOp::Flush => {
                self.flushes += 1;
                self.flush(submitted);
                Ok(IoValue::Done)
            }
            IoOp::Zero { .. } if self.cannot_zero => Err(fault(IoFaultKind::Unsupported)),
            IoOp::Zero { offset, len, .. } => {
                self.writes += 1;
                assert!(
                    offset.0.is_multiple_of(BLOCK)
                        && len.is_multiple_of(BLOCK)
                        && offset.0 + len <= self.bytes
                );
                self.accept(DiskWrite::of(&op).expect("it zeroes"), now, false);
                Ok(IoValue::Done)
            }
            IoOp::Extents { offset, len } => {
                let blocks = offset.0 / BLOCK..(offset.0 + len) / BLOCK;
                let extents = blocks.map(|b| Extent { len: BLOCK, hole: !self.holds(b) });
                Ok(IoValue::Extents(extents.collect()))
            }
        }
    }

    fn accept(&mut self, write: DiskWrite, now: u64, fua: bool) {
        let range = write.range();
        if !self.bad_blocks.is_empty() {
            self.bad_blocks.retain(|block| !(range.start / BLOCK..range.end.div_ceil(BLOCK)).contains(block));
        }
        write.apply(&mut self.visible);
        if !fua {
            self.cached.push((now, write));
            return;
        }
        // Cached writes that overlap this one are older and must not be applied after it. They and, to keep
        // the order, all writes before them are written back first, as a disk may do at any time.
        let overlaps = |older: &DiskWrite| older.range().start < range.end && range.start < older.range().end;
        let medium = &mut self.medium;
        if let Some(last) = self.cached.iter().rposition(|(_, older)| overlaps(older)) {
            self.cached.drain(..=last).for_each(|(_, older)| older.apply(medium));
        }
        write.apply(medium);
    }

    fn flush(&mut self, submitted: u64) {
        if self.cached.iter().all(|(when, _)| *when <= submitted) {
            self.write_back();
            return;
        }
        let medium = &mut self.medium;
        self.cached.retain(|(when, write)| {
            let covered = *when <= submitted;
            if covered {
                write.apply(medium);
            }
            !covered
        });
    }
}

/// Cuts a byte range at block boundaries: (range in the caller's buffer, position on the disk).
fn pieces(offset: u64, len: usize) -> impl Iterator<Item = (Range<usize>, u64)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        if at >= len {
            return None;
        }
        let byte = offset + at as u64;
        let piece = ((BLOCK - byte % BLOCK) as usize).min(len - at);
        at += piece;
        Some((at - piece..at, byte))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_io::Pool;
    use crate::units::ByteOffset;
    use proptest::prelude::*;

    fn write(pool: &Pool, offset: u64, len: usize, byte: u8, fua: bool) -> IoOp {
        let mut buf = pool.alloc(len);
        buf.fill(byte);
        IoOp::Write { offset: ByteOffset(offset), buf: buf.freeze(), fua }
    }

    #[test]
    fn a_flush_covers_writes_executed_before_it_was_submitted_and_a_power_cut_takes_the_rest() {
        let pool = Pool::new(1 << 20).unwrap();
        let mut disk = SimDisk::new(1 << 20);
        disk.execute(write(&pool, 0, 4096, 1, false), 1, 0).unwrap();
        disk.execute(write(&pool, 0, 4096, 2, false), 2, 0).unwrap();
        disk.execute(IoOp::Flush, 3, 1).unwrap();
        assert_eq!(disk.peek(0, 1), [2], "reads see the cache");
        disk.cut_power(|_, _| Fate::Lost);
        assert_eq!(disk.peek(0, 1), [1], "the second write came after the flush was submitted");
    }

    #[test]
    fn a_write_through_the_cache_is_not_undone_by_older_writes_in_the_cache() {
        let pool = Pool::new(1 << 20).unwrap();
        let mut disk = SimDisk::new(1 << 20);
        disk.execute(write(&pool, 0, 8192, 1, false), 1, 0).unwrap();
        disk.execute(write(&pool, 4096, 4096, 2, true), 2, 0).unwrap();
        disk.cut_power(|_, _| Fate::Kept);
        assert_eq!((disk.peek(0, 1)[0], disk.peek(4096, 1)[0]), (1, 2));
    }

    #[test]
    fn a_torn_write_leaves_whole_sectors_of_either_content() {
        let pool = Pool::new(1 << 20).unwrap();
        let mut mixed = 0;
        for seed in 0..50 {
            let mut disk = SimDisk::new(1 << 20);
            disk.execute(write(&pool, 0, 8192, 1, false), 1, 0).unwrap();
            disk.cut_power(|_, _| Fate::Torn(seed));
            let bytes = disk.peek(0, 8192);
            assert!(bytes.chunks(SECTOR).all(|sector| sector.iter().all(|b| *b == sector[0])));
            mixed += usize::from(bytes.contains(&0) && bytes.contains(&1));
        }
        assert!(mixed > 20, "{mixed} of 50 torn writes are torn");
    }

    #[test]
    fn a_clone_shares_nothing_that_changes() {
        let mut disk = SimDisk::new(1 << 20);
        disk.poke(4096, &[7; 4096]);
        let clone = disk.clone();
        disk.poke(4100, &[8]);
        assert_eq!((disk.peek(4100, 1)[0], clone.peek(4100, 1)[0]), (8, 7));
    }

    proptest! {
        /// For any history: when the whole cache is kept, a power cut changes nothing that can be read.
        #[test]
        fn keeping_every_cached_write_keeps_the_visible_content(
            ops in prop::collection::vec((0u64..64, 1usize..17, any::<u8>(), any::<bool>(), 0u8..4), 1..40),
        ) {
            let pool = Pool::new(1 << 20).unwrap();
            let mut disk = SimDisk::new(1 << 20);
            for (at, (sector, count, byte, fua, kind)) in ops.into_iter().enumerate() {
                let now = at as u64 + 1;
                let op = match kind {
                    0 => IoOp::Flush,
                    1 => IoOp::Zero { offset: ByteOffset(sector / 8 * BLOCK), len: BLOCK, may_unmap: true },
                    _ => write(&pool, sector * 512, count * 512, byte, fua),
                };
                disk.execute(op, now, now.saturating_sub(3)).unwrap();
            }
            let before = disk.peek(0, 1 << 18);
            disk.cut_power(|_, _| Fate::Kept);
            prop_assert_eq!(disk.peek(0, 1 << 18), before);
        }
    }
}
