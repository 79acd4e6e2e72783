//! A reader on another thread than the array's: it plans reads by the array's view, reads the disks itself
//! some time later, a piece at a time, and answers what verifies. The oracle judges that as a read that began
//! when it was planned.
//!
//! It has its own randomness, so that a load is the same with and without it. Must not ask the array.

use super::oracle::BLOCK_BYTES;
use super::{Floor, Oracle, Random, SimArray};
use crate::units::VolumeOffset;
use crate::volume::ReadPlan;

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
    /// Reads that the array has to be asked for, because the view did not answer or the bytes did not verify.
    pub unplanned: u64,
    pub unverified: u64,
}

struct ForeignRead {
    plan: ReadPlan,
    first_block: usize,
    /// The moment of the plan on the oracle's clock.
    since: u64,
    /// The bytes read so far, by piece.
    bytes: Vec<Vec<u8>>,
    /// A piece is read in one step of so many.
    pause: u64,
}

impl Elsewhere {
    pub(super) fn new(seed: u64) -> Elsewhere {
        let random = Random::new(seed ^ 0xe15e);
        Elsewhere { random, reads: Vec::new(), verified: 0, unplanned: 0, unverified: 0 }
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
                self.end(&read, sim, oracle)?;
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
        let since = oracle.begin_read();
        let mut plan = ReadPlan::default();
        let len = count as usize * BLOCK_BYTES;
        if sim.view_reader().plan(VolumeOffset(first * BLOCK_BYTES as u64), len, &mut plan).is_err() {
            self.unplanned += 1;
            return oracle.end_read(since);
        }
        let pause = [1, 4, 40][self.random.index(3)];
        self.reads.push(ForeignRead { plan, first_block: first as usize, since, bytes: Vec::new(), pause });
    }

    /// Reads the next piece of a read. Returns whether that was the last, or cannot be read.
    fn go_on(&mut self, at: usize, sim: &SimArray) -> bool {
        let read = &mut self.reads[at];
        let piece = read.plan.pieces()[read.bytes.len()];
        let blocks =
            piece.offset.0 / BLOCK_BYTES as u64..(piece.offset.0 + piece.len as u64) / BLOCK_BYTES as u64;
        let disk = sim.disks.get(&piece.device.0).filter(|disk| {
            !disk.dead && !disk.has_passing_fault(sim.now()) && disk.bad_blocks.range(blocks).next().is_none()
        });
        let Some(disk) = disk else { return true };
        read.bytes.push(disk.peek(piece.offset.0, piece.len));
        read.bytes.len() == read.plan.pieces().len()
    }

    fn end(&mut self, read: &ForeignRead, sim: &SimArray, oracle: &mut Oracle) -> Result<(), String> {
        oracle.end_read(read.since);
        let is_whole = read.bytes.len() == read.plan.pieces().len();
        if !is_whole || !sim.view_reader().verify(&read.plan, read.bytes.iter().map(Vec::as_slice)) {
            self.unverified += 1;
            return Ok(());
        }
        self.verified += 1;
        let bytes = read.bytes.concat();
        let checked = oracle.check(read.first_block, &bytes, Floor::Answered(read.since));
        checked.map_err(|wrong| format!("a read on another thread: {wrong}"))
    }
}

#[cfg(test)]
mod tests {
    use crate::format::ChecksumKind;
    use crate::testing::{Oracle, Random, Run, SimArray, SimShape, Workload};

    #[test]
    fn reads_on_another_thread_are_answered_there_and_right() {
        for (seed, checksum) in
            [(1, ChecksumKind::None), (2, ChecksumKind::Crc32c), (3, ChecksumKind::Blake3)]
        {
            let shape = SimShape::new(4, 2, 8192, 6).logged(checksum, 256 << 10);
            let sim = SimArray::create(shape, seed);
            let oracle = Oracle::new(shape.volume_bytes);
            let workload = Workload { faults: 0, admin: 0, ..Workload::MIXED };
            let mut load = Run::new(sim, oracle, workload, Random::new(seed));
            for _ in 0..6000 {
                load.step().expect("nothing is wrong");
            }
            let counts = load.read_elsewhere();
            println!("{checksum:?}: {counts:?} of verified, unplanned, unverified");
            assert!(counts.0 > 100 && counts.1 > 100, "{checksum:?}: {counts:?}");
        }
    }
}
