//! Passing faults of a simulated disk: which operations they hit, how those operations end, and when the
//! fault is over.
//!
//! A fault changes nothing on the disk, except that a failed write may take effect wholly or in part.
//! Everything follows from the seed of the fault. Must not know of arrays or disks.

use super::{Fate, Random};
use crate::block_io::{IoFault, IoFaultKind, IoOp};
use crate::units::Timestamp;
use std::ops::{BitOr, Range};

/// A set of kinds of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpKinds(u8);

impl OpKinds {
    /// Reads, and questions for extents.
    pub const READS: OpKinds = OpKinds(1);
    /// Writes, and zeroing.
    pub const WRITES: OpKinds = OpKinds(2);
    /// Flushes.
    pub const FLUSHES: OpKinds = OpKinds(4);
    /// All kinds of operations.
    pub const ALL: OpKinds = OpKinds(7);

    /// Whether it has a kind in common with `other`.
    #[must_use]
    pub const fn meets(self, other: OpKinds) -> bool {
        self.0 & other.0 != 0
    }

    fn of(op: &IoOp) -> OpKinds {
        match op {
            IoOp::Read { .. } | IoOp::Extents { .. } => OpKinds::READS,
            IoOp::Write { .. } | IoOp::Zero { .. } => OpKinds::WRITES,
            IoOp::Flush => OpKinds::FLUSHES,
        }
    }
}

impl BitOr for OpKinds {
    type Output = OpKinds;

    fn bitor(self, other: OpKinds) -> OpKinds {
        OpKinds(self.0 | other.0)
    }
}

/// How an operation that a fault hits ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// EIO.
    Medium,
    /// ENOMEM: the host lacks memory.
    Shortage,
    /// ENOSPC: the storage under the member is full.
    NoSpace,
    /// It does not end until the disk is told to end it.
    Hang,
}

impl Trouble {
    /// All troubles.
    pub const ALL: [Trouble; 4] = [Trouble::Medium, Trouble::Shortage, Trouble::NoSpace, Trouble::Hang];

    /// The error that operations end with; None when they do not end.
    #[must_use]
    pub fn fault(self) -> Option<IoFault> {
        match self {
            Trouble::Medium => Some(fault(IoFaultKind::Medium)),
            Trouble::Shortage => Some(fault(IoFaultKind::Shortage)),
            Trouble::NoSpace => Some(fault(IoFaultKind::NoSpace)),
            Trouble::Hang => None,
        }
    }
}

/// When a fault is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lasts {
    /// After it has hit this many operations.
    Operations(u64),
    /// At this time of the array's clock.
    Until(Timestamp),
    /// When the disk's faults are cleared.
    UntilCleared,
}

/// See the head of this file.
#[derive(Clone, Debug)]
pub struct PassingFault {
    /// How the operations that it hits end.
    pub trouble: Trouble,
    /// The kinds of operations that it hits.
    pub ops: OpKinds,
    /// Reads and writes are hit only if they touch these ranges; an empty list means the whole disk.
    pub within: Vec<Range<u64>>,
    /// It hits one in this many of the matching operations.
    pub one_in: u64,
    /// When it is over.
    pub lasts: Lasts,
    random: Random,
}

impl PassingFault {
    /// A fault that hits every operation until it is cleared.
    #[must_use]
    pub fn new(trouble: Trouble) -> PassingFault {
        PassingFault {
            trouble,
            ops: OpKinds::ALL,
            within: Vec::new(),
            one_in: 1,
            lasts: Lasts::UntilCleared,
            random: Random::new(0),
        }
    }

    /// The same for these kinds of operations only.
    #[must_use]
    pub fn on(self, ops: OpKinds) -> PassingFault {
        PassingFault { ops, ..self }
    }

    /// The same for reads and writes that touch these bytes only.
    #[must_use]
    pub fn within(self, within: impl IntoIterator<Item = Range<u64>>) -> PassingFault {
        PassingFault { within: within.into_iter().collect(), ..self }
    }

    /// The same, but over after hitting this many operations.
    #[must_use]
    pub fn times(self, operations: u64) -> PassingFault {
        PassingFault { lasts: Lasts::Operations(operations), ..self }
    }

    /// The same, but over at this time.
    #[must_use]
    pub fn until(self, moment: Timestamp) -> PassingFault {
        PassingFault { lasts: Lasts::Until(moment), ..self }
    }

    /// The same for one operation in `one_in`, picked by `seed`. The seed also decides how much of a failed
    /// write takes effect.
    #[must_use]
    pub fn one_in(self, one_in: u64, seed: u64) -> PassingFault {
        PassingFault { one_in, random: Random::new(seed), ..self }
    }

    /// Whether it can hit no operation any more.
    #[must_use]
    pub fn is_over(&self, now: Timestamp) -> bool {
        match self.lasts {
            Lasts::Operations(left) => left == 0,
            Lasts::Until(moment) => now >= moment,
            Lasts::UntilCleared => false,
        }
    }

    /// If it hits this operation: how the operation ends, and how much of it takes effect all the same.
    fn strike(&mut self, op: &IoOp, now: Timestamp) -> Option<(Trouble, Fate)> {
        let touched = match op {
            IoOp::Read { offset, buf } => Some((offset.0, buf.len() as u64)),
            IoOp::Write { offset, buf, .. } => Some((offset.0, buf.len() as u64)),
            IoOp::Zero { offset, len, .. } | IoOp::Extents { offset, len } => Some((offset.0, *len)),
            IoOp::Flush => None,
        };
        let meets =
            |range: &Range<u64>| touched.is_none_or(|(at, len)| at < range.end && range.start < at + len);
        let is_meant =
            self.ops.meets(OpKinds::of(op)) && (self.within.is_empty() || self.within.iter().any(meets));
        if !is_meant || self.is_over(now) || !self.random.one_in(self.one_in) {
            return None;
        }
        if let Lasts::Operations(left) = &mut self.lasts {
            *left -= 1;
        }
        let fate = match (op, self.random.below(4)) {
            (IoOp::Write { .. } | IoOp::Zero { .. }, 0) => Fate::Kept,
            (IoOp::Write { .. } | IoOp::Zero { .. }, 1) => Fate::Torn(self.random.next_u64()),
            _ => Fate::Lost,
        };
        Some((self.trouble, fate))
    }
}

/// The faults of one disk, and how many operations they have hit.
#[derive(Clone, Debug, Default)]
pub(super) struct PassingFaults {
    faults: Vec<PassingFault>,
    struck: [u64; Trouble::ALL.len()],
}

impl PassingFaults {
    pub(super) fn add(&mut self, fault: PassingFault) {
        self.faults.push(fault);
    }

    pub(super) fn clear(&mut self) {
        self.faults.clear();
    }

    /// Whether a fault may still hit an operation.
    pub(super) fn are_there(&self, now: Timestamp) -> bool {
        self.faults.iter().any(|fault| !fault.is_over(now))
    }

    /// Number of operations that ended with this trouble.
    pub(super) fn struck(&self, trouble: Trouble) -> u64 {
        self.struck[trouble as usize]
    }

    /// If a fault hits this operation: how the operation ends, and how much of it takes effect all the same.
    pub(super) fn strike(&mut self, op: &IoOp, now: Timestamp) -> Option<(Trouble, Fate)> {
        let (trouble, fate) = self.faults.iter_mut().find_map(|fault| fault.strike(op, now))?;
        self.struck[trouble as usize] += 1;
        self.faults.retain(|fault| !fault.is_over(now));
        Some((trouble, fate))
    }

    /// Starts the clock of the array's next life at zero; `now` is the last moment of this one.
    pub(super) fn start_clock_anew(&mut self, now: Timestamp) {
        for fault in &mut self.faults {
            if let Lasts::Until(moment) = &mut fault.lasts {
                moment.0 = moment.0.saturating_sub(now.0);
            }
        }
    }
}

/// The error of an operation, with the host's errno for it.
pub(super) fn fault(kind: IoFaultKind) -> IoFault {
    let errno = match kind {
        IoFaultKind::Medium => libc::EIO,
        IoFaultKind::Gone => libc::ENODEV,
        IoFaultKind::NoSpace => libc::ENOSPC,
        IoFaultKind::Shortage => libc::ENOMEM,
        IoFaultKind::Unsupported => libc::EOPNOTSUPP,
    };
    IoFault { kind, errno }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_io::{Buf, Pool};
    use crate::format::ChecksumKind;
    use crate::testing::{DiskRegion, HungEnd, SimArray, SimDisk, SimShape};
    use crate::units::ByteOffset;

    fn read(pool: &Pool, offset: u64) -> IoOp {
        IoOp::Read { offset: ByteOffset(offset), buf: pool.alloc(4096) }
    }

    fn write(pool: &Pool, offset: u64, byte: u8) -> IoOp {
        let mut buf = pool.alloc(4096);
        buf.fill(byte);
        let buf: Buf = buf.freeze();
        IoOp::Write { offset: ByteOffset(offset), buf, fua: false }
    }

    fn strike(disk: &mut SimDisk, op: &IoOp, at: u64) -> Option<Trouble> {
        disk.strike(op, (1, Timestamp(at)))
    }

    #[test]
    fn a_fault_hits_the_operations_it_is_meant_for_and_is_over_after_its_count_or_time() {
        let pool = Pool::new(1 << 20).unwrap();
        let mut disk = SimDisk::new(1 << 20);
        disk.inject(
            PassingFault::new(Trouble::Shortage)
                .on(OpKinds::READS)
                .within(std::iter::once(8192..12288))
                .times(2),
        );
        disk.inject(PassingFault::new(Trouble::NoSpace).on(OpKinds::FLUSHES).until(Timestamp(10)));
        assert_eq!(strike(&mut disk, &read(&pool, 4096), 1), None, "elsewhere");
        assert_eq!(strike(&mut disk, &write(&pool, 8192, 1), 1), None, "another kind");
        assert_eq!(strike(&mut disk, &read(&pool, 8192), 1), Some(Trouble::Shortage));
        assert_eq!(strike(&mut disk, &read(&pool, 8192), 1), Some(Trouble::Shortage));
        assert_eq!(strike(&mut disk, &read(&pool, 8192), 1), None, "it has passed");
        assert_eq!(strike(&mut disk, &IoOp::Flush, 9), Some(Trouble::NoSpace));
        assert!(disk.has_passing_fault(Timestamp(9)) && !disk.has_passing_fault(Timestamp(10)));
        assert_eq!(strike(&mut disk, &IoOp::Flush, 10), None);
        assert_eq!((disk.struck(Trouble::Shortage), disk.struck(Trouble::NoSpace)), (2, 1));
        disk.inject(PassingFault::new(Trouble::Medium));
        assert_eq!(strike(&mut disk, &IoOp::Flush, 1 << 60), Some(Trouble::Medium));
        disk.clear_faults();
        assert_eq!(strike(&mut disk, &IoOp::Flush, 1 << 60), None);
    }

    #[test]
    fn a_write_that_fails_may_be_there_wholly_in_part_or_not_at_all() {
        let pool = Pool::new(1 << 20).unwrap();
        let mut seen = [0; 3];
        for seed in 0..60 {
            let mut disk = SimDisk::new(1 << 20);
            disk.inject(PassingFault::new(Trouble::Medium).one_in(1, seed));
            assert_eq!(strike(&mut disk, &write(&pool, 0, 7), 1), Some(Trouble::Medium));
            let there = disk.peek(0, 4096).iter().filter(|byte| **byte == 7).count();
            seen[if there == 0 { 0 } else { 1 + usize::from(there == 4096) }] += 1;
        }
        assert!(seen.iter().all(|count| *count > 4), "{seen:?}");
    }

    #[test]
    fn a_copy_brings_back_the_durable_or_the_visible_content() {
        let pool = Pool::new(1 << 20).unwrap();
        let mut disk = SimDisk::new(1 << 20);
        disk.execute(write(&pool, 0, 1), 1, 0).unwrap();
        disk.execute(IoOp::Flush, 2, 1).unwrap();
        disk.execute(write(&pool, 0, 2), 3, 2).unwrap();
        let (durable, visible) = (disk.copy(true), disk.copy(false));
        disk.execute(write(&pool, 0, 3), 4, 3).unwrap();
        for (copy, byte) in [(&visible, 2), (&durable, 1)] {
            disk.restore(copy);
            disk.cut_power(|_, _| Fate::Kept);
            assert_eq!(disk.peek(0, 1), [byte]);
        }
    }

    #[test]
    fn regions_of_a_member_are_apart_and_a_fault_in_one_leaves_the_others_alone() {
        let shape = SimShape::new(2, 1, 4096, 2).logged(ChecksumKind::Crc32c, 64 << 10);
        let sim = SimArray::create(shape, 1);
        let mut all: Vec<Range<u64>> =
            DiskRegion::ALL.iter().flat_map(|region| region.ranges(&sim.disks[&0])).collect();
        assert_eq!(all.len(), 7, "{all:?}");
        all.sort_by_key(|range| range.start);
        assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start), "{all:?}");
        assert_eq!(DiskRegion::Data.ranges(&sim.disks[&0]), [sim.data_region()]);
        assert_eq!(DiskRegion::Log.ranges(&sim.disks[&0]), [sim.log_region()]);
    }

    #[test]
    fn an_operation_that_hangs_ends_when_the_disk_ends_it_and_not_before() {
        let shape = SimShape::new(2, 1, 4096, 2).logged(ChecksumKind::Crc32c, 64 << 10);
        let mut sim = SimArray::create(shape, 1);
        sim.write(0, &[1; 8192]).unwrap();
        sim.settle();
        let id = sim.disk_of(0).expect("in service");
        sim.disks.get_mut(&id).expect("a disk").inject(PassingFault::new(Trouble::Hang).times(1));
        let write = sim.submit_write(0, &[2; 4096], false);
        while sim.step() {}
        sim.sleep(5000);
        assert!(sim.hung(id) == 1 && sim.poll(write).is_none(), "the device is not declared gone yet");
        sim.end_hung(id, HungEnd::Late);
        assert!(sim.wait(write).is_ok());
        assert_eq!(sim.read(0, 4096).unwrap(), [2; 4096]);
        assert_eq!(sim.hung(id), 0);
    }

    #[test]
    fn the_array_is_told_of_a_device_whose_operations_hang_for_too_long() {
        let shape = SimShape::new(2, 1, 4096, 2).logged(ChecksumKind::Crc32c, 64 << 10);
        let mut sim = SimArray::create(shape, 1);
        sim.settle();
        sim.hang_limit = Some(30_000_000_000);
        let id = sim.disk_of(0).expect("in service");
        sim.disks.get_mut(&id).expect("a disk").inject(PassingFault::new(Trouble::Hang));
        let write = sim.submit_write(0, &[2; 4096], false);
        while sim.step() {}
        assert!(sim.hung(id) > 0);
        sim.sleep(29_000);
        assert_eq!(sim.disk_of(0), Some(id), "its time is not up");
        sim.sleep(2000);
        assert_ne!(sim.status().members[0].state, crate::format::MemberState::Online);
        sim.end_hung(id, HungEnd::Failed);
        assert!(sim.wait(write).is_ok());
    }

    #[test]
    fn a_fault_goes_on_for_the_rest_of_its_time_in_the_next_life() {
        let shape = SimShape::new(2, 1, 4096, 2).logged(ChecksumKind::Crc32c, 64 << 10);
        let mut sim = SimArray::create(shape, 1);
        sim.settle();
        let until = Timestamp(sim.now().0 + 5_000_000_000);
        let fault = PassingFault::new(Trouble::Medium).on(OpKinds::READS).until(until);
        let fault = fault.within([sim.data_region()]);
        sim.disks.get_mut(&0).expect("a disk").inject(fault);
        sim.sleep(2000);
        let sim = sim.stop_and_restart(false).expect("it starts");
        assert!(sim.disks[&0].has_passing_fault(Timestamp(2_900_000_000)));
        assert!(!sim.disks[&0].has_passing_fault(Timestamp(3_100_000_000)));
    }
}
