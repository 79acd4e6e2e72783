//! A reader on another thread than the array's: it plans reads by the array's view, reads the disks itself
//! some time later, a piece or a page at a time, and answers what verifies. The oracle judges that as a read
//! that began when it was planned.
//!
//! It has its own randomness, so that a load is the same with and without it. Must not ask the array.

use super::oracle::BLOCK_BYTES;
use super::sim::disk_of;
use super::{Floor, Oracle, Random, SimArray};
use crate::units::{LaneIndex, VolumeOffset};
use crate::volume::{PlannedPage, ReadPiece, ReadPlan};

/// Most reads under way.
const READS_MAX: usize = 4;
/// Most blocks of a read.
const BLOCKS_MAX: u64 = 9;

/// See the head of this file.
pub(super) struct Elsewhere {
    random: Random,
    reads: Vec<ForeignRead>,
    /// Reads that verified.
    pub verified: u64,
    /// Those of them whose hashes were read from members, too.
    pub with_pages: u64,
    /// Reads that the array has to be asked for, because the view did not answer or the bytes did not verify.
    pub unplanned: u64,
    pub unverified: u64,
}

struct ForeignRead {
    plan: ReadPlan,
    /// The lane whose view it was planned by.
    lane: LaneIndex,
    first_block: usize,
    /// The moment of the plan on the oracle's clock.
    since: u64,
    /// What is to be read: the pieces of the plan, and its pages before or behind these.
    pieces: Vec<ReadPiece>,
    pages_first: bool,
    /// The bytes read so far, by piece.
    bytes: Vec<Vec<u8>>,
    /// A piece is read in one step of so many.
    pause: u64,
}

impl Elsewhere {
    pub(super) fn new(seed: u64) -> Elsewhere {
        let random = Random::new(seed ^ 0xe15e);
        Elsewhere { random, reads: Vec::new(), verified: 0, with_pages: 0, unplanned: 0, unverified: 0 }
    }

    /// Forgets the reads under way: the process is gone.
    pub(super) fn end_all(&mut self) {
        self.reads.clear();
    }

    /// Goes on with the reads under way, and begins another now and then.
    ///
    /// # Errors
    /// When a read that verified is wrong, with a description.
    pub(super) fn step(&mut self, sim: &SimArray, oracle: &mut Oracle) -> Result<(), String> {
        for at in (0..self.reads.len()).rev() {
            let pause = self.reads[at].pause;
            if self.random.one_in(pause) && self.go_on(at, sim) {
                let read = self.reads.swap_remove(at);
                self.end(read, sim, oracle)?;
            }
        }
        if self.reads.len() < READS_MAX && self.random.one_in(3) {
            self.begin(sim, oracle);
        }
        Ok(())
    }

    fn begin(&mut self, sim: &SimArray, oracle: &mut Oracle) {
        let blocks = oracle.blocks() as u64;
        let first = self.random.below(blocks);
        let count = (1 + self.random.below(BLOCKS_MAX)).min(blocks - first);
        // What lies in other lanes would be another read.
        let (lane, within, run) = sim.lane_of(VolumeOffset(first * BLOCK_BYTES as u64));
        let count = count.min(run / BLOCK_BYTES as u64);
        let since = oracle.begin_read();
        let mut plan = ReadPlan::default();
        let len = count as usize * BLOCK_BYTES;
        let reader = sim.volume.view_reader(lane);
        if reader.is_none_or(|reader| reader.plan(within, len, &mut plan).is_err()) {
            self.unplanned += 1;
            return oracle.end_read(since);
        }
        let pause = [1, 4, 40][self.random.index(3)];
        let pages_first = !plan.pages().is_empty() && self.random.one_in(2);
        let mut pieces = plan.pieces().to_vec();
        let at = if pages_first { 0 } else { pieces.len() };
        pieces.splice(at..at, plan.pages().iter().map(PlannedPage::piece));
        self.reads.push(ForeignRead {
            plan,
            pieces,
            pages_first,
            lane,
            first_block: first as usize,
            since,
            bytes: Vec::new(),
            pause,
        });
    }

    /// Reads the next piece of a read. Returns whether that was the last, or cannot be read.
    fn go_on(&mut self, at: usize, sim: &SimArray) -> bool {
        let read = &mut self.reads[at];
        let piece = read.pieces[read.bytes.len()];
        let disk = sim.disks.get(&disk_of(piece.device).0);
        let start = disk.map_or(0, |disk| disk.window(read.lane).start) + piece.offset.0;
        let blocks = start / BLOCK_BYTES as u64..(start + piece.len as u64) / BLOCK_BYTES as u64;
        let disk = disk.filter(|disk| {
            !disk.dead && !disk.has_passing_fault(sim.now()) && disk.bad_blocks.range(blocks).next().is_none()
        });
        let Some(disk) = disk else { return true };
        read.bytes.push(disk.peek(start, piece.len));
        read.bytes.len() == read.pieces.len()
    }

    fn end(&mut self, mut read: ForeignRead, sim: &SimArray, oracle: &mut Oracle) -> Result<(), String> {
        oracle.end_read(read.since);
        let is_whole = read.bytes.len() == read.pieces.len();
        let reader = sim.volume.view_reader(read.lane).expect("the volume planned the read");
        let is_right = is_whole && {
            let (pages, pieces) = (read.plan.pages().len(), read.plan.pieces().len());
            let at = if read.pages_first { 0 } else { pieces };
            let mut pages: Vec<Vec<u8>> = read.bytes.splice(at..at + pages, []).collect();
            reader.learn(&mut read.plan, &mut pages)
                && reader.verify(&read.plan, read.bytes.iter().map(Vec::as_slice))
        };
        if !is_right {
            self.unverified += 1;
            return Ok(());
        }
        self.verified += 1;
        self.with_pages += u64::from(!read.plan.pages().is_empty());
        let bytes = read.bytes.concat();
        let checked = oracle.check(read.first_block, &bytes, Floor::Answered(read.since));
        checked.map_err(|wrong| format!("a read on another thread: {wrong}"))
    }
}

impl SimArray {
    /// Reads blocks of a volume of one lane on another thread, at one moment. None: the array has to be
    /// asked. Otherwise also whether pages were read for it. `turn` chooses among the copies of a page.
    #[must_use]
    pub fn read_elsewhere(&self, offset: u64, len: usize, turn: usize) -> Option<(Vec<u8>, bool)> {
        let (reader, mut plan) = (self.view_reader(), ReadPlan::default());
        reader.plan(VolumeOffset(offset), len, &mut plan).ok()?;
        // Each time a page is planned that is another one.
        for _ in 0..turn % 3 {
            reader.plan(VolumeOffset(offset), len, &mut plan).ok()?;
        }
        let read = |piece: ReadPiece| {
            let disk = self.disks.get(&disk_of(piece.device).0).filter(|disk| !disk.dead);
            disk.map(|disk| disk.peek(piece.offset.0, piece.len))
        };
        let mut pages = plan.pages().iter().map(|page| read(page.piece())).collect::<Option<Vec<_>>>()?;
        let bytes = plan.pieces().iter().copied().map(read).collect::<Option<Vec<_>>>()?;
        let is_right =
            reader.learn(&mut plan, &mut pages) && reader.verify(&plan, bytes.iter().map(Vec::as_slice));
        is_right.then(|| (bytes.concat(), !pages.is_empty()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::ChecksumKind;
    use crate::testing::{Run, SimShape, Workload};
    use crate::units::MemberIndex;
    use crate::volume::{AdminRequest, AskArray};

    const KINDS: [ChecksumKind; 3] = [ChecksumKind::None, ChecksumKind::Crc32c, ChecksumKind::Blake3];

    fn run(shape: SimShape, workload: Workload, seed: u64, steps: usize) -> Run {
        let sim = SimArray::create(shape, seed);
        let mut load = Run::new(sim, Oracle::new(shape.volume_bytes), workload, Random::new(seed));
        for step in 0..steps {
            load.step().expect("nothing is wrong");
            if step % 8 == 0 {
                load.sim.volume.check_shown();
            }
        }
        load
    }

    #[test]
    fn reads_on_another_thread_are_answered_there_and_right() {
        for (seed, checksum) in (1..).zip(KINDS) {
            let shape = SimShape::new(4, 2, 8192, 6).logged(checksum, 256 << 10);
            let workload = Workload { faults: 0, admin: 0, ..Workload::MIXED };
            let load = run(shape, workload, seed, 6000);
            let (verified, unplanned, unverified) = load.read_elsewhere();
            let counts =
                format!("{checksum:?}: {verified} verified, {unplanned} not planned, {unverified} wrong");
            assert!(verified > 100 && unplanned > 100, "{counts}");
        }
    }

    #[test]
    fn a_page_is_shown_while_it_is_cached_and_known_whatever_happens_to_members() {
        for (seed, checksum) in (20..).zip(&KINDS[1..]) {
            let shape = SimShape::new(2, 2, 4096, 300).logged(*checksum, 256 << 10);
            let shape = SimShape { page_cache: Some(4096), ..shape };
            run(shape, Workload { faults: 2, unreadable: 2, admin: 2, ..Workload::MIXED }, seed, 3000);
        }
    }

    #[test]
    fn pages_that_are_not_cached_are_read_with_the_data_and_reads_are_right() {
        for (seed, checksum) in (30..).zip(&KINDS[1..]) {
            let shape = SimShape::new(2, 2, 4096, 300).logged(*checksum, 256 << 10);
            let shape = SimShape { page_cache: Some(4096), ..shape };
            let few_writes =
                Workload { small_writes: 4, stripe_writes: 3, other_writes: 1, ..Workload::MIXED };
            let workload = Workload { operations: 200, reads: 20, pauses: 8, unreadable: 1, ..few_writes };
            let load = run(shape, workload, seed, 20_000);
            let with_pages = load.read_elsewhere_with_pages();
            assert!(with_pages > 100, "{checksum:?}: {with_pages} reads with pages that were not cached");
        }
    }

    #[test]
    fn an_array_that_has_failed_or_stops_is_asked_for_everything() {
        for checksum in KINDS {
            let shape = SimShape::new(2, 1, 4096, 4).logged(checksum, 256 << 10);
            let mut sim = SimArray::create(shape, 7);
            sim.write(0, &[5; 8192]).expect("a write");
            sim.sleep(1000);
            sim.settle();
            sim.read(0, 8192).expect("a read");
            let reader = sim.view_reader();
            let plan = || {
                let mut plan = ReadPlan::default();
                reader.plan(VolumeOffset(0), 8192, &mut plan).map(|()| plan)
            };
            let planned = plan().expect("all of it is in place and known");
            let read = |planned: &ReadPlan| -> Vec<Vec<u8>> {
                let piece = |piece: &ReadPiece| sim.disks[&piece.device.0].peek(piece.offset.0, piece.len);
                planned.pieces().iter().map(piece).collect()
            };
            let mut bytes = read(&planned);
            assert!(bytes.concat() == [5; 8192] && reader.verify(&planned, bytes.iter().map(Vec::as_slice)));
            assert!(!reader.verify(&planned, bytes[..1].iter().map(Vec::as_slice)), "half of it");
            bytes[1][9] ^= 1;
            let is_seen = checksum != ChecksumKind::None;
            assert_eq!(reader.verify(&planned, bytes.iter().map(Vec::as_slice)), !is_seen, "{checksum:?}");
            let orphan = reader.orphan();
            assert_eq!(plan().err(), Some(AskArray));
            drop(orphan);
            assert!(plan().is_ok());
            let gone = planned.pieces()[0].device;
            let member = sim.status().members.iter().position(|member| member.device == Some(gone));
            let member = MemberIndex(member.expect("it serves") as u16);
            sim.admin(AdminRequest::Offline { member }).expect("it leaves");
            assert_eq!(plan().err(), Some(AskArray), "its member has left");
            let mut other = ReadPlan::default();
            let others = reader.plan(VolumeOffset(4096), 4096, &mut other);
            assert_eq!(others, Ok(()), "other members serve");
            sim.admin(AdminRequest::Stop).expect("it stops");
            assert_eq!(reader.plan(VolumeOffset(4096), 4096, &mut other), Err(AskArray));
        }
    }
}
