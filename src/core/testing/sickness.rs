//! Kinds of faults beyond crashes and members that die: the list of them, counts of them, and the effect of
//! each on a disk. `workload/passing.rs` decides when a load has which of them, `sicken.rs` which of them a
//! restart has.

use super::{DiskRegion, OpKinds, PassingFault, Random, SimDisk, Trouble};
use crate::units::Timestamp;
use std::fmt;

macro_rules! kinds {
    ($($(#[$doc:meta])* $variant:ident $name:literal),* $(,)?) => {
        /// A kind of fault beyond crashes and members that die.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum FaultKind { $($(#[$doc])* $variant),* }

        impl FaultKind {
            /// All kinds.
            pub const ALL: &[FaultKind] = &[$(FaultKind::$variant),*];

            /// Its name in a report.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(FaultKind::$variant => $name),* }
            }
        }
    };
}

kinds! {
    /// Reads of a member end with EIO for a while.
    ReadErrors "read errors",
    /// Writes and flushes of a member end with EIO for a while.
    WriteErrors "write errors",
    /// Operations of a member end with ENOMEM for a while.
    Shortage "ENOMEM",
    /// Writes and flushes of a member end with ENOSPC for a while.
    NoSpace "ENOSPC",
    /// Operations of a member do not end for a while.
    Hang "hung operations",
    /// Sectors of several members, in different rows, are permanently unreadable.
    BadSectors "bad sectors",
    /// Passing faults hit a start and its replay.
    StartErrors "faults during a start",
    /// At a start a member is rolled back to an earlier content.
    Rollback "rolled-back members",
    /// A member's superblock makes a claim that no other confirms.
    Hostile "hostile superblocks",
    /// Reads end with EIO on more members at once than the array survives.
    ReadsEverywhere "read errors on many members",
    /// Operations end with ENOMEM or ENOSPC on more members at once than the array survives.
    Everywhere "shortages on many members",
    /// At a start more members are rolled back than the array survives.
    RollbackMany "many rolled-back members",
}

/// A set of kinds of faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultKinds(u16);

impl FaultKinds {
    /// The set of these kinds.
    #[must_use]
    pub const fn of(kinds: &[FaultKind]) -> FaultKinds {
        let (mut bits, mut at) = (0, 0);
        while at < kinds.len() {
            bits |= 1 << kinds[at] as u16;
            at += 1;
        }
        FaultKinds(bits)
    }

    /// The empty set.
    pub const NONE: FaultKinds = FaultKinds(0);

    /// Whether the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether this is one of them.
    #[must_use]
    pub const fn contains(self, kind: FaultKind) -> bool {
        self.0 >> kind as u16 & 1 == 1
    }

    /// The set with this kind added.
    #[must_use]
    pub const fn with(self, kind: FaultKind) -> FaultKinds {
        FaultKinds(self.0 | 1 << kind as u16)
    }

    /// The kinds that are in both sets.
    #[must_use]
    pub const fn and(self, other: FaultKinds) -> FaultKinds {
        FaultKinds(self.0 & other.0)
    }

    /// The kinds that are not in `other`.
    #[must_use]
    pub const fn without(self, other: FaultKinds) -> FaultKinds {
        FaultKinds(self.0 & !other.0)
    }

    /// A random kind of the set.
    pub(super) fn pick(self, random: &mut Random) -> Option<FaultKind> {
        let all: Vec<FaultKind> =
            FaultKind::ALL.iter().copied().filter(|kind| self.contains(*kind)).collect();
        all.get(random.index(all.len().max(1))).copied()
    }
}

/// How many faults there were, by kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultCounts([u64; FaultKind::ALL.len()]);

impl FaultCounts {
    /// The number of faults of a kind.
    #[must_use]
    pub fn of(&self, kind: FaultKind) -> u64 {
        self.0[kind as usize]
    }

    /// Counts one fault.
    pub fn count(&mut self, kind: FaultKind) {
        self.0[kind as usize] += 1;
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &FaultCounts) {
        self.0.iter_mut().zip(other.0).for_each(|(count, other)| *count += other);
    }
}

impl fmt::Display for FaultCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> =
            FaultKind::ALL.iter().map(|kind| format!("{} {}", self.of(*kind), kind.name())).collect();
        f.write_str(&all.join(", "))
    }
}

/// Most operations that a fault hits, when its length is counted in operations.
const OPERATIONS_MAX: u64 = 40;
/// The same for faults whose operations are tried again at growing intervals.
const RETRIES_MAX: u64 = 6;
/// The longest fault whose length is a time, in nanoseconds.
pub(super) const SPAN_MAX: u64 = 1_000_000_000;
/// A fault of this kind for one member, within a random region, that ends after some operations or some time.
pub(super) fn fault_of(
    kind: FaultKind,
    disk: &SimDisk,
    now: Timestamp,
    random: &mut Random,
) -> Option<PassingFault> {
    let any =
        [OpKinds::READS, OpKinds::WRITES, OpKinds::FLUSHES, OpKinds::WRITES | OpKinds::FLUSHES, OpKinds::ALL];
    let changes = [OpKinds::WRITES, OpKinds::FLUSHES, OpKinds::WRITES | OpKinds::FLUSHES];
    let (trouble, ops) = match kind {
        FaultKind::ReadErrors => (Trouble::Medium, OpKinds::READS),
        FaultKind::WriteErrors => (Trouble::Medium, changes[random.index(changes.len())]),
        FaultKind::Shortage => (Trouble::Shortage, any[random.index(any.len())]),
        FaultKind::NoSpace => (Trouble::NoSpace, changes[random.index(changes.len())]),
        FaultKind::Hang => (Trouble::Hang, any[random.index(any.len())]),
        FaultKind::ReadsEverywhere => (Trouble::Medium, OpKinds::READS),
        FaultKind::Everywhere => match random.below(3) {
            0 => (Trouble::NoSpace, changes[random.index(changes.len())]),
            _ => (Trouble::Shortage, any[random.index(any.len())]),
        },
        FaultKind::BadSectors
        | FaultKind::StartErrors
        | FaultKind::Rollback
        | FaultKind::RollbackMany
        | FaultKind::Hostile => return None,
    };
    let mut fault = PassingFault::new(trouble).on(ops).one_in(1 << random.below(3), random.next_u64());
    // Often one region only, since faults in the others would hide its effect.
    if let Some(region) = DiskRegion::ALL.get(random.index(6)) {
        fault = fault.within(region.ranges(disk));
    }
    // Operations that wait for the end of a shortage must not have to wait long.
    let is_shortage = matches!(trouble, Trouble::Shortage | Trouble::NoSpace);
    let operations_max = if is_shortage { RETRIES_MAX } else { OPERATIONS_MAX };
    Some(match random.below(2) {
        0 => fault.times(1 + random.below(operations_max)),
        _ => fault.until(Timestamp(now.0 + (SPAN_MAX >> random.below(8)))),
    })
}

/// For disks with scattered bad sectors: the largest number of them on which the same place cannot be read.
pub(super) fn depth_of_bad_sectors<'a>(disks: impl Iterator<Item = &'a SimDisk>) -> usize {
    let mut bad: Vec<u64> =
        disks.filter(|disk| disk.scattered).flat_map(|disk| disk.bad_blocks.iter().copied()).collect();
    bad.sort_unstable();
    bad.chunk_by(|a, b| a == b).map(<[u64]>::len).max().unwrap_or(0)
}

pub(super) fn describe(fault: &PassingFault) -> String {
    let PassingFault { trouble, ops, within, one_in, lasts, .. } = fault;
    format!("{trouble:?} for {ops:?} within {within:?}, one in {one_in}, {lasts:?}")
}
