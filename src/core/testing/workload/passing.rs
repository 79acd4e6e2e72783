//! Faults that begin and pass while a load runs.
//!
//! Faults add up: a member is sick while a fault may hit it or operations of it hang, and until it is whole
//! again. At most `m` members of a load are sick at a time, bad sectors included, so that every request must
//! succeed. Only [`FaultKind::ReadsEverywhere`] and [`FaultKind::Everywhere`] make more of them sick, for a
//! moment: until that has passed, requests may fail, but nothing may be lost.

use super::super::disk::BLOCK;
use super::super::old_copies::OldCopy;
use super::super::sickness::{depth_of_bad_sectors, describe, fault_of};
use super::super::{FaultKind, HungEnd, SimDisk, superblocks};
use super::{Run, TENSE_STEPS};

/// Most copies of disks that a load keeps; the oldest are dropped first.
const COPIES_MAX: usize = 24;
/// At one in this many of the moments at which a fault may begin, the present faults end instead.
const FAULT_ENDS_ONE_IN: u64 = 3;

impl Run {
    /// Begins a passing fault of one of the load's kinds, or ends one.
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
        // A shortage counts against the host (T4), and so few read errors are no reason to take a member out
        // (T5).
        if matches!(kind, FaultKind::WriteErrors | FaultKind::Hang) {
            self.guilty |= 1 << member;
        }
        self.tense = TENSE_STEPS;
    }

    /// Begins a fault on more members at once than can be spared, for a moment.
    fn fault_everywhere(&mut self, kind: FaultKind) {
        let now = self.sim.now();
        if self.impaired() != 0 || self.depth_of_bad_sectors() > 0 || self.sim.has_bad_news() {
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

    /// Ends some of the faults that last until they are cleared. Returns whether any ended.
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

    pub(in crate::testing) fn end_faults_of(&mut self, id: u32, how: HungEnd) {
        self.note(format!("the trouble of disk {id} is over, and what hung has ended: {how:?}"));
        if let Some(disk) = self.sim.disks.get_mut(&id) {
            disk.clear_faults();
        }
        self.sim.end_hung(id, how);
    }

    /// If a fault on too many members has passed, requests from `next_request` on may not fail any more.
    pub(super) fn end_leniency(&mut self, next_request: u64) {
        let now = self.sim.now();
        if self.is_overwhelmed && self.sim.disks.values().all(|disk| !disk.has_passing_fault(now)) {
            self.is_overwhelmed = false;
            self.lenient_below = next_request;
        }
    }

    /// Copies some disks or all, either as a power cut would leave them or as they read while in use.
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

    /// Makes sectors in many rows unreadable: in each row on at most as many members as may still become
    /// sick.
    fn scatter_bad_sectors(&mut self) {
        let spare = self.spare_members.saturating_sub(self.impaired().count_ones() as usize);
        if spare == 0 {
            return;
        }
        let members: Vec<u32> = (0..self.width).filter_map(|member| self.sim.disk_of(member)).collect();
        let (regions, one_in) = (self.sim.data_regions(), 1 + self.random.below(8));
        let depth = 1 + self.random.index(spare);
        let mut count = 0;
        for block in regions.iter().flat_map(|region| region.start / BLOCK..region.end / BLOCK) {
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

    /// The largest number of members on which the same place cannot be read.
    pub(super) fn depth_of_bad_sectors(&self) -> usize {
        depth_of_bad_sectors(self.sim.disks.values())
    }
}
