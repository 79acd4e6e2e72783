//! Which kinds of faults a load and its restarts are given, and how often; and the faults that pass while a load runs.
//!
//! Faults add up: a member is sick while a fault may hit it or what hung has not ended, and until it is whole again. At most `m`
//! members of a load are sick at a time, bad sectors included, so that every request must succeed. Only
//! [`FaultKind::ReadsEverywhere`] and [`FaultKind::Everywhere`] make more of them sick, for a moment: then requests may fail
//! until it has passed, and nothing may be lost.

use super::disk::BLOCK;
use super::workload::Run;
use super::{DiskCopy, DiskRegion, HungEnd, OpKinds, PassingFault, Random, SimDisk, Trouble, superblocks};
use crate::units::Timestamp;
use std::fmt;
use uuid::Uuid;

macro_rules! kinds {
    ($($(#[$doc:meta])* $variant:ident $name:literal),* $(,)?) => {
        /// A kind of fault beyond crashes and members that die.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum FaultKind { $($(#[$doc])* $variant),* }

        impl FaultKind {
            /// All of them.
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
    /// Sectors of several members are unreadable for good, in different rows.
    BadSectors "bad sectors",
    /// Faults that pass hit a start and its replay.
    StartErrors "faults during a start",
    /// A member shows at a start what it held some time ago.
    Rollback "rolled-back members",
    /// A member's superblock claims what no other confirms.
    Hostile "hostile superblocks",
    /// Reads end with EIO on more members at once than the array survives.
    ReadsEverywhere "read errors on many members",
    /// Operations end with ENOMEM or ENOSPC on more members at once than the array survives.
    Everywhere "shortages on many members",
    /// At a start more members show what they held some time ago than the array survives.
    RollbackMany "many rolled-back members",
}

/// A set of kinds of faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultKinds(u16);

impl FaultKinds {
    /// These.
    #[must_use]
    pub const fn of(kinds: &[FaultKind]) -> FaultKinds {
        let (mut bits, mut at) = (0, 0);
        while at < kinds.len() {
            bits |= 1 << kinds[at] as u16;
            at += 1;
        }
        FaultKinds(bits)
    }

    /// None.
    pub const NONE: FaultKinds = FaultKinds(0);

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether this is one of them.
    #[must_use]
    pub const fn contains(self, kind: FaultKind) -> bool {
        self.0 >> kind as u16 & 1 == 1
    }

    /// And this one.
    #[must_use]
    pub const fn with(self, kind: FaultKind) -> FaultKinds {
        FaultKinds(self.0 | 1 << kind as u16)
    }

    /// Those that are in both.
    #[must_use]
    pub const fn and(self, other: FaultKinds) -> FaultKinds {
        FaultKinds(self.0 & other.0)
    }

    /// Those that are not in `other`.
    #[must_use]
    pub const fn without(self, other: FaultKinds) -> FaultKinds {
        FaultKinds(self.0 & !other.0)
    }

    /// One of them.
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
    /// Faults of a kind.
    #[must_use]
    pub fn of(&self, kind: FaultKind) -> u64 {
        self.0[kind as usize]
    }

    /// Counts one.
    pub fn count(&mut self, kind: FaultKind) {
        self.0[kind as usize] += 1;
    }

    /// Adds up.
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

/// A copy of a disk that a load has made.
#[derive(Clone)]
pub(super) struct OldCopy {
    /// The identity of the device.
    pub device: Uuid,
    pub copy: DiskCopy,
    /// Copies of one moment have one number.
    pub moment: u64,
}

/// Copies that a load keeps; the oldest go first.
const COPIES_MAX: usize = 24;
/// Operations that a fault hits at most, where it is counted in operations.
const OPERATIONS_MAX: u64 = 40;
/// The same for faults whose operations are tried again, more and more seldom.
const RETRIES_MAX: u64 = 6;
/// The longest fault that is a span of time, in nanoseconds.
pub(super) const SPAN_MAX: u64 = 1_000_000_000;
/// Of the moments at which a fault may begin, at one in so many those that there are end.
const FAULT_ENDS_ONE_IN: u64 = 3;

/// A fault of this kind for one member, within a random region, over after some operations or some time.
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
    // Often one region alone, since the others would hide what it does.
    if let Some(region) = DiskRegion::ALL.get(random.index(6)) {
        fault = fault.within(region.ranges(disk));
    }
    // What waits for a shortage to pass must not have to wait for long.
    let is_shortage = matches!(trouble, Trouble::Shortage | Trouble::NoSpace);
    let operations_max = if is_shortage { RETRIES_MAX } else { OPERATIONS_MAX };
    Some(match random.below(2) {
        0 => fault.times(1 + random.below(operations_max)),
        _ => fault.until(Timestamp(now.0 + (SPAN_MAX >> random.below(8)))),
    })
}

impl Run {
    /// A fault that passes, of a kind that the load is given; or the end of one.
    pub(super) fn passing_fault(&mut self) {
        if self.workload.kinds.is_empty() || self.end_some_fault() {
            return;
        }
        let Some(kind) = self.workload.kinds.pick(&mut self.random) else { return };
        match kind {
            FaultKind::Rollback | FaultKind::RollbackMany => self.copy_disks(),
            FaultKind::BadSectors => self.scatter_bad_sectors(),
            FaultKind::ReadsEverywhere | FaultKind::Everywhere => self.fault_everywhere(kind),
            FaultKind::StartErrors | FaultKind::Hostile => {}
            _ => self.fault_of_one(kind),
        }
    }

    fn fault_of_one(&mut self, kind: FaultKind) {
        let Some((member, id)) = self.victim() else { return };
        let now = self.sim.now();
        let Some(disk) = self.sim.disks.get_mut(&id) else { return };
        let Some(fault) = fault_of(kind, disk, now, &mut self.random) else { return };
        let what = format!("member {member} has trouble: {}", describe(&fault));
        disk.inject(fault);
        self.note(what);
        self.counts.count(kind);
        // A shortage is the host's (T4), and read errors as few as these are no reason to leave (T5).
        if matches!(kind, FaultKind::WriteErrors | FaultKind::Hang) {
            self.guilty |= 1 << member;
        }
        self.tense = super::workload::TENSE_STEPS;
    }

    /// More members at once than can be spared, for a moment.
    fn fault_everywhere(&mut self, kind: FaultKind) {
        let now = self.sim.now();
        if self.impaired() != 0 || self.depth_of_bad_sectors() > 0 {
            return;
        }
        let Some(disk) = self.sim.disks.values().next() else { return };
        let Some(fault) = fault_of(kind, disk, now, &mut self.random) else { return };
        let (width, spare) = (usize::from(self.width), self.spare_members);
        let count = spare + 1 + self.random.index(width - spare);
        let members = self.random.choose(count, width);
        self.note(format!("members {members:?} have trouble: {}", describe(&fault)));
        for member in members {
            let id = self.sim.disk_of(member as u16);
            if let Some(disk) = id.and_then(|id| self.sim.disks.get_mut(&id)) {
                disk.inject(fault.clone());
            }
        }
        self.counts.count(kind);
        self.is_overwhelmed = true;
        self.lenient_below = u64::MAX;
    }

    /// Faults that go on until they are told to end may end. True: some did.
    fn end_some_fault(&mut self) -> bool {
        let now = self.sim.now();
        let is_sick = |(id, disk): &(&u32, &SimDisk)| disk.has_passing_fault(now) || self.sim.hung(**id) > 0;
        let sick: Vec<u32> = self.sim.disks.iter().filter(is_sick).map(|(id, _)| *id).collect();
        if sick.is_empty() || !self.random.one_in(FAULT_ENDS_ONE_IN) {
            return false;
        }
        let how = if self.random.one_in(2) { HungEnd::Late } else { HungEnd::Failed };
        sick.into_iter().for_each(|id| self.end_faults_of(id, how));
        true
    }

    pub(super) fn end_faults_of(&mut self, id: u32, how: HungEnd) {
        self.note(format!("the trouble of disk {id} is over, and what hung has ended: {how:?}"));
        if let Some(disk) = self.sim.disks.get_mut(&id) {
            disk.clear_faults();
        }
        self.sim.end_hung(id, how);
    }

    /// Requests that begin from now on may not fail any more, if a fault on all members has passed.
    pub(super) fn end_leniency(&mut self, next_request: u64) {
        let now = self.sim.now();
        if self.is_overwhelmed && self.sim.disks.values().all(|disk| !disk.has_passing_fault(now)) {
            self.is_overwhelmed = false;
            self.lenient_below = next_request;
        }
    }

    /// Copies of some disks or of all, as they would be after a power cut or as they are while they are in use.
    fn copy_disks(&mut self) {
        let (all, durable, moment) = (self.random.one_in(3), self.random.one_in(2), self.oracle.now());
        let one = self.random.index(self.sim.disks.len());
        let chosen =
            self.sim.disks.iter().enumerate().filter(|(at, (_, disk))| !disk.dead && (all || *at == one));
        let copies = chosen.filter_map(|(_, (_, disk))| {
            let device = superblocks::newest(disk)?.device;
            Some(OldCopy { device, copy: disk.copy(durable), moment })
        });
        let copies: Vec<OldCopy> = copies.collect();
        self.note(format!("{} disks are copied, as moment {moment}", copies.len()));
        self.copies.extend(copies);
        let surplus = self.copies.len().saturating_sub(COPIES_MAX);
        self.copies.drain(..surplus);
    }

    /// Sectors of many rows become unreadable, in each on no more members than may be sick beside those that are.
    fn scatter_bad_sectors(&mut self) {
        let spare = self.spare_members.saturating_sub(self.impaired().count_ones() as usize);
        if spare == 0 {
            return;
        }
        let members: Vec<u32> = (0..self.width).filter_map(|member| self.sim.disk_of(member)).collect();
        let (region, one_in) = (self.sim.data_region(), 1 + self.random.below(8));
        let depth = 1 + self.random.index(spare);
        let mut count = 0;
        for block in region.start / BLOCK..region.end / BLOCK {
            if !self.random.one_in(one_in) {
                continue;
            }
            for at in self.random.choose(depth, members.len()) {
                let there =
                    members.iter().filter(|id| self.sim.disks[*id].bad_blocks.contains(&block)).count();
                if let Some(disk) = self.sim.disks.get_mut(&members[at]).filter(|_| there < depth) {
                    disk.scattered = true;
                    count += usize::from(disk.bad_blocks.insert(block));
                }
            }
        }
        self.note(format!("{count} sectors become unreadable, in each row on at most {depth} members"));
        self.counts.count(FaultKind::BadSectors);
    }

    /// The most members on which one place cannot be read.
    pub(super) fn depth_of_bad_sectors(&self) -> usize {
        depth_of_bad_sectors(self.sim.disks.values())
    }
}

/// The most of these disks on which one place cannot be read, of those with bad sectors in different rows.
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
