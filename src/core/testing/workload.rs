//! A seeded load on a simulated array: clients, administrators and failing members. The oracle checks every
//! reply.
//!
//! One step is one client request, one fault, one administrator's request, a pause, or one operation of one
//! disk. At most `m` members are out of service or dead at a time, so every request must succeed.
//! Deterministic.

mod content;
mod passing;

use super::elsewhere::Elsewhere;
use super::old_copies::{OldCopy, roll_back};
use super::oracle::{BLOCK_BYTES, SECTOR_BYTES};
use super::superblocks;
use super::watch::Watch;
use super::{
    Fate, FaultCounts, FaultKind, FaultKinds, Floor, Oracle, Random, SimArray, SimDisk, SimWorld, Written,
};
use crate::array::assembly::AssemblyError;
use crate::format::MemberState;
use crate::units::{MemberIndex, Timestamp, VolumeOffset};
use crate::volume::{
    AdminRequest, ClientError, ClientReply, ClientRequest, MemberStatus, NewDevice, ReadRun,
};

/// Sectors of a block.
const SECTORS: u64 = (BLOCK_BYTES / SECTOR_BYTES) as u64;

/// The relative frequencies of the kinds of steps, and limits of the load.
// More than 15 fields: the columns of the table of scenarios.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Operations of disks: the higher, the emptier the queues.
    pub operations: u64,
    /// Writes of a few sectors to a few blocks.
    pub small_writes: u64,
    /// Writes of whole stripes, one to three, some of them in pieces.
    pub stripe_writes: u64,
    /// Writes of any range.
    pub other_writes: u64,
    /// Reads.
    pub reads: u64,
    /// Flushes.
    pub flushes: u64,
    /// One write in this many is FUA.
    pub fua_one_in: u64,
    /// One write in this many has content that other blocks have, too; 0: none.
    pub common_one_in: u64,
    /// Trims and zeroing, of whole stripes and of any range.
    pub zeroes: u64,
    /// Pauses long enough for deadlines and periodic work.
    pub pauses: u64,
    /// Members that die, with or without their caches, fail a flush, or become slow.
    pub faults: u64,
    /// Blocks of members that become unreadable until they are written.
    pub unreadable: u64,
    /// Passing faults, of the kinds in `kinds`.
    pub passing: u64,
    /// The kinds of faults for `passing` and for restarts.
    pub kinds: FaultKinds,
    /// Requests of administrators: take a member out, bring a disk in, scrub.
    pub admin: u64,
    /// Most client requests in flight.
    pub depth: usize,
    /// Disks execute everything else before flushes, so that their caches hold much.
    pub slow_flushes: bool,
}

impl Workload {
    /// Some of everything, and enough operations between requests for queues to run empty at times.
    pub const MIXED: Workload = Workload {
        operations: 60,
        small_writes: 14,
        stripe_writes: 5,
        other_writes: 4,
        reads: 3,
        flushes: 4,
        fua_one_in: 5,
        common_one_in: 0,
        zeroes: 1,
        pauses: 2,
        faults: 1,
        unreadable: 0,
        passing: 0,
        kinds: FaultKinds::NONE,
        admin: 1,
        depth: 5,
        slow_flushes: false,
    };
}

enum Pending {
    Write {
        written: Written,
        fua: bool,
    },
    /// Zeroes that must be refused: nobody may see them.
    Refused,
    Flush {
        began: u64,
    },
    Read {
        first: usize,
        count: usize,
        since: u64,
    },
}

/// A load under way.
// More than 15 fields: the state of one load, which its steps and the explorer share.
pub struct Run {
    /// The array.
    pub sim: SimArray,
    /// Knows what its clients may see, and checks what they do see.
    pub oracle: Oracle,
    /// More is damaged than the array survives: requests may fail.
    pub errors_allowed: bool,
    /// Requests that failed.
    pub errors: u64,
    /// Faults beyond crashes and members that die.
    pub counts: FaultCounts,
    workload: Workload,
    random: Random,
    pending: Vec<(u64, Pending)>,
    pub(super) width: u16,
    pub(super) spare_members: usize,
    stripe_sectors: u64,
    /// Copies of disks made so far.
    pub(super) copies: Vec<OldCopy>,
    /// More members have trouble than the array survives.
    is_overwhelmed: bool,
    /// Requests with lower numbers may fail: they were under way while too many members had trouble.
    lenient_below: u64,
    watch: Watch,
    /// A reader on another thread.
    elsewhere: Elsewhere,
    /// Members that have been in service and in order from the start: bit by index.
    faithful: u64,
    /// Members that had a fault for which a member may be taken out of service: bit by index.
    guilty: u64,
    /// Steps during which the array is still dealing with what happened to a member.
    tense: u32,
    /// Requests to take a member out, each with its member and the time by which it has ended at the latest.
    /// Until then the member may still be in service.
    pub(super) leaving: Vec<(u64, u16, Timestamp)>,
    /// Disks that come back, each with the request, as long as it may not be answered: one lane may have the
    /// disk already.
    coming: Vec<(u64, u32)>,
    /// Number of the array's notices that are already in the log.
    noticed: usize,
    log: Vec<String>,
}

/// Steps after a member's fault, or an administrator's request, until everything is recorded; roughly.
const TENSE_STEPS: u32 = 120;

/// Nanoseconds after which a member that is being taken out has left.
const LEAVING_MAX: u64 = 5_000_000_000;

/// Nanoseconds after which a member whose operations do not end is taken out, in loads where operations hang.
const HANG_LIMIT: u64 = 30_000_000_000;

/// Tenths of a second with nothing in flight after which requests count as hung: [`HANG_LIMIT`], and as much
/// again for requests that wait for an unreadable row, and for those that start to wait after another.
const IDLE_MAX: usize = 600;

/// Most lines kept for the report of a violation.
const LOG_MAX: usize = 400;

impl Run {
    /// A load on an array whose content is the one in `oracle`.
    #[must_use]
    pub fn new(sim: SimArray, oracle: Oracle, workload: Workload, random: Random) -> Run {
        let status = sim.status();
        let geometry = status.geometry;
        let away = status.members.iter().filter(|member| member.state != MemberState::Online);
        // Includes members that were sick before this load began.
        let is_sick = |member: &&MemberStatus| {
            let disk = member.device.and_then(|device| sim.disks.get(&device.0));
            disk.is_some_and(|disk| disk.has_passing_fault(sim.now()))
        };
        let sick = status.members.iter().filter(is_sick);
        let guilty = away.chain(sick).fold(0, |bits, member| bits | 1 << member.index.0);
        let mut sim = sim;
        sim.disks.values_mut().for_each(|disk| disk.slow_flushes = workload.slow_flushes);
        sim.hang_limit = Some(HANG_LIMIT);
        let elsewhere = Elsewhere::new(random.clone().next_u64());
        Run {
            sim,
            oracle,
            errors_allowed: false,
            errors: 0,
            counts: FaultCounts::default(),
            workload,
            random,
            pending: Vec::new(),
            width: geometry.width(),
            spare_members: usize::from(geometry.parity),
            stripe_sectors: geometry.stripe_bytes() / SECTOR_BYTES as u64,
            copies: Vec::new(),
            is_overwhelmed: false,
            lenient_below: 0,
            watch: Watch::default(),
            elsewhere,
            faithful: u64::MAX,
            guilty,
            tense: 0,
            leaving: Vec::new(),
            coming: Vec::new(),
            noticed: 0,
            log: Vec::new(),
        }
    }

    /// What has happened so far, oldest first.
    #[must_use]
    pub fn log(&self) -> &[String] {
        &self.log
    }

    /// Whether a member has just failed, or an administrator has just done something about one.
    #[must_use]
    pub fn is_tense(&self) -> bool {
        self.tense > 0
    }

    pub(super) fn note(&mut self, what: String) {
        if self.log.len() >= LOG_MAX {
            self.log.drain(..LOG_MAX / 2);
        }
        self.log.push(what);
    }

    /// Copies the array's new notices into the log.
    fn hear(&mut self) {
        for at in std::mem::replace(&mut self.noticed, self.sim.notices.len())..self.sim.notices.len() {
            self.note(format!("the array: {}", self.sim.notices[at].text));
        }
    }

    pub(super) fn forget_log(&mut self) {
        self.hear();
        self.log.clear();
    }

    /// Moves the log to the end of `said`.
    pub(super) fn tell(&mut self, said: &mut Vec<String>) {
        self.hear();
        said.append(&mut self.log);
    }

    /// Members that are out of service, or whose disk is not sound: bit by index.
    #[must_use]
    pub fn impaired(&self) -> u64 {
        let mut impaired = 0;
        for (at, member) in self.sim.status().members.iter().enumerate() {
            let disk = member.device.and_then(|device| self.sim.disks.get(&device.0));
            let has_trouble = |id: u32, disk: &SimDisk| {
                !disk.is_sound() || disk.has_passing_fault(self.sim.now()) || self.sim.hung(id) > 0
            };
            let id = member.device.map_or(0, |device| device.0);
            let whole =
                member.state == MemberState::Online && disk.is_some_and(|disk| !has_trouble(id, disk));
            impaired |= u64::from(!whole) << at;
        }
        let still = |&&(id, _, until): &&(u64, u16, Timestamp)| {
            !self.sim.admin_done.contains_key(&id) && self.sim.now() < until
        };
        self.leaving.iter().filter(still).fold(impaired, |impaired, (_, member, _)| impaired | 1 << member)
    }

    /// Members that have been in service and in order from the start: bit by index.
    #[must_use]
    pub fn faithful(&self) -> u64 {
        self.faithful
    }

    /// Takes one step. Returns whether the state that a crash would leave, or must leave, may have changed.
    ///
    /// # Errors
    /// When a client saw something that it must not, with a description.
    pub fn step(&mut self) -> Result<bool, String> {
        self.elsewhere.step(&self.sim, &mut self.oracle)?;
        let w = self.workload;
        let shares = [
            w.operations,
            w.small_writes,
            w.stripe_writes,
            w.other_writes,
            w.reads,
            w.flushes,
            w.zeroes,
            w.pauses,
            w.faults,
            w.unreadable,
            w.admin,
            w.passing,
        ];
        let mut pick = self.random.below(shares.iter().sum());
        let kind = shares.iter().position(|share| {
            let here = pick < *share;
            pick = pick.wrapping_sub(*share);
            here
        });
        let before = (self.sim.changes(), self.oracle.now() + 1);
        self.tense = self.tense.saturating_sub(1);
        match kind.unwrap_or(0) {
            0 => drop(self.sim.step()),
            at @ 1..=6 if self.pending.len() < w.depth => self.client(at),
            7 => {
                let milliseconds = [1, 100, 3000][self.random.below(3) as usize];
                self.sim.sleep(milliseconds);
            }
            8 => self.fault(),
            9 => self.unreadable(),
            10 => self.administrate(),
            11 => self.passing_fault(),
            _ => drop(self.sim.step()),
        }
        // Only in a tense time may something have happened to a member.
        if self.tense > 0 {
            self.faithful &= !self.impaired();
        }
        self.watch()?;
        self.reap()?;
        self.hear();
        Ok((self.sim.changes(), self.oracle.now()) != before)
    }

    /// Reads that were made on another thread: those that verified, those that could not be planned, and
    /// those that did not verify.
    #[cfg(test)]
    pub(super) fn read_elsewhere(&self) -> (u64, u64, u64) {
        (self.elsewhere.verified, self.elsewhere.unplanned, self.elsewhere.unverified)
    }

    /// How many of the verified ones took hashes from pages that were not cached.
    #[cfg(test)]
    pub(super) fn read_elsewhere_with_pages(&self) -> u64 {
        self.elsewhere.with_pages
    }

    /// Waits until every client request has ended.
    ///
    /// # Errors
    /// When a client saw something that it must not, with a description.
    pub fn finish(&mut self) -> Result<(), String> {
        // Nothing waits for ever (T7): a member that does not answer is given up after its limit, and
        // requests wait a bounded time for an unreadable row.
        let mut idle = 0;
        while !self.pending.is_empty() {
            if !self.sim.step() {
                self.sim.sleep(100);
                idle += 1;
            }
            if idle > IDLE_MAX {
                return Err(format!("{} requests hang: {:?}", self.pending.len(), self.sim.status()));
            }
            self.watch()?;
            self.reap()?;
        }
        Ok(())
    }

    /// Reads the whole volume.
    ///
    /// # Errors
    /// When its content is wrong, with a description.
    pub fn read_all(&mut self) -> Result<(), String> {
        self.finish()?;
        self.read(0, self.oracle.sectors());
        self.finish()
    }

    /// Kills the process or cuts the power, unless the array was stopped cleanly, starts again and checks the
    /// content. Returns the reason when the array cannot be started.
    ///
    /// # Errors
    /// When the content is wrong, with a description.
    pub fn restart(
        mut self,
        world: &SimWorld,
        killed: bool,
        power: bool,
        random: &mut Random,
    ) -> Result<Result<Run, AssemblyError>, String> {
        let disks = self.sim.wreck().settle(power, |_, _| match random.below(3) {
            0 => Fate::Lost,
            1 => Fate::Kept,
            _ => Fate::Torn(random.next_u64()),
        });
        let seed = Random::new(random.next_u64());
        self.noticed = 0;
        self.sim = match world.start(disks, false, seed) {
            Ok(sim) => sim,
            Err(error) => return Ok(Err(error)),
        };
        self.sim.hang_limit = Some(HANG_LIMIT);
        self.watch.reset();
        self.guilty = u64::MAX;
        (self.is_overwhelmed, self.lenient_below) = (false, 0);
        self.pending.clear();
        self.elsewhere.end_all();
        self.oracle.end_all_reads();
        let floor = if power { Floor::Flushed } else { Floor::ALL_ANSWERED };
        for block in 0..self.oracle.blocks() {
            let id = self.sim.submit_read((block * BLOCK_BYTES) as u64, BLOCK_BYTES);
            match self.sim.wait(id) {
                Ok(ClientReply::Data(bytes)) => {
                    let checked = self.oracle.check(block, &bytes, floor);
                    checked.map_err(|wrong| format!("after a restart: {wrong}"))?;
                    if killed || power {
                        self.oracle.observe(block, &bytes);
                    }
                }
                Err(_) if self.errors_allowed => self.errors += 1,
                other => {
                    return Err(format!("after a restart block {block}: {other:?}, {:?}", self.sim.status()));
                }
            }
        }
        Ok(Ok(self))
    }

    /// Writes one to three stripes in pieces, as a client does whose requests are smaller than a stripe.
    fn stream(&mut self) {
        let (sectors, stripe) = (self.oracle.sectors() as u64, self.stripe_sectors);
        let first = self.random.below(sectors.div_ceil(stripe)) * stripe;
        let end = (first + stripe * (1 + self.random.below(3))).min(sectors);
        let mut pieces = Vec::new();
        let mut at = first;
        while at < end {
            // Usually of a quarter to the whole of a stripe, and not aligned to anything.
            let count = (stripe / 4 + 1 + self.random.below(stripe)).min(end - at);
            pieces.push((at as usize, count as usize));
            at += count;
        }
        if self.random.one_in(3) {
            pieces.reverse();
        }
        for (first, count) in pieces {
            if !self.oracle.is_busy(first, count) {
                self.write(first, count);
            }
            if self.random.one_in(6) {
                self.sim.step();
            }
        }
    }

    fn client(&mut self, kind: usize) {
        if kind == 2 && self.random.one_in(4) {
            return self.stream();
        }
        let sectors = self.oracle.sectors() as u64;
        let stripe = self.stripe_sectors;
        let (first, count) = match kind {
            2 => {
                let stripes = (sectors / stripe).max(1);
                let at = self.random.below(stripes);
                let count = (1 + self.random.below(3)).min(stripes - at);
                (at * stripe, (count * stripe).min(sectors - at * stripe))
            }
            // Half of the small writes go to two stripes, so that they often share rows and batches.
            1 => {
                let span = if self.random.one_in(2) { sectors.min(stripe * 2) } else { sectors };
                match self.random.below(3) {
                    0 => (self.random.below(span), 1),
                    1 => (self.random.below(span / SECTORS) * SECTORS, SECTORS),
                    _ => (self.random.below(span), 1 + self.random.below(2 * SECTORS)),
                }
            }
            6 if self.random.one_in(2) => {
                let at = self.random.below(sectors.div_ceil(stripe));
                (at * stripe, stripe * (1 + self.random.below(2)))
            }
            _ => (self.random.below(sectors), 1 + self.random.below(stripe * 2)),
        };
        let count = count.min(sectors - first);
        let (first, count) = (first as usize, count as usize);
        match kind {
            4 => self.read(first, count),
            5 => {
                let began = self.oracle.now();
                let id = self.sim.submit(ClientRequest::Flush);
                self.note(format!("flush as request {id}"));
                self.pending.push((id, Pending::Flush { began }));
            }
            _ if self.oracle.is_busy(first, count) => {}
            6 => self.zero(first, count),
            _ => self.write(first, count),
        }
    }

    fn write(&mut self, first: usize, count: usize) {
        let fua = self.random.one_in(self.workload.fua_one_in);
        let written = self.choose_content(first, count);
        let (first, count) = (written.first, written.count);
        let bytes = Oracle::bytes_of(&written);
        let id = self.sim.submit_write((first * SECTOR_BYTES) as u64, &bytes, fua);
        let word = if fua { ", FUA" } else { "" };
        self.note(format!("write {} to sectors {first}+{count}{word}, request {id}", written.value));
        self.pending.push((id, Pending::Write { written, fua }));
    }

    fn read(&mut self, first: usize, count: usize) {
        let since = self.oracle.begin_read();
        let (offset, len) = ((first * SECTOR_BYTES) as u64, count * SECTOR_BYTES);
        let id = match self.has_lanes() && self.random.one_in(2) {
            true => self.sim.submit_sparse_read(offset, len),
            false => self.sim.submit_read(offset, len),
        };
        self.pending.push((id, Pending::Read { first, count, since }));
    }

    /// Whether requests may concern several lanes.
    fn has_lanes(&self) -> bool {
        self.sim.cut().count() > 1
    }

    fn zero(&mut self, first: usize, count: usize) {
        let offset = VolumeOffset((first * SECTOR_BYTES) as u64);
        let len = (count * SECTOR_BYTES) as u64;
        let (advisory, fua) = (self.random.one_in(2), self.random.one_in(3));
        let request = if advisory {
            ClientRequest::Trim { offset, len, fua }
        } else {
            let fast_only = self.has_lanes() && self.random.one_in(2);
            let may_unmap = self.random.one_in(2) || fast_only && self.random.one_in(2);
            ClientRequest::WriteZeroes { offset, len, may_unmap, fast_only, fua }
        };
        let pending = match self.sim.cut().refuses(&request) {
            true => Pending::Refused,
            false => Pending::Write { written: self.oracle.begin_zeroes(first, count, advisory), fua },
        };
        let id = self.sim.submit(request);
        let word = if advisory { "trim" } else { "zero" };
        self.note(format!("{word} sectors {first}+{count}, fua {fua}, request {id}"));
        self.pending.push((id, pending));
    }

    /// Checks the blocks that changed, and ends the time in which new requests may fail once the trouble has
    /// passed.
    fn watch(&mut self) -> Result<(), String> {
        if self.workload.kinds.is_empty() {
            return Ok(());
        }
        self.end_leniency(self.sim.next_request());
        if let Some(member) = self
            .sim
            .status()
            .members
            .iter()
            .find(|member| member.state == MemberState::Faulted && self.guilty >> member.index.0 & 1 == 0)
        {
            return Err(format!(
                "T4: member {} leaves, and nothing is wrong with it: {:?}",
                member.index, member.reason
            ));
        }
        let written = self.pending.iter().filter_map(|(_, pending)| match pending {
            Pending::Write { written, .. } => {
                let end = written.first + written.count;
                Some(written.first / SECTORS as usize..end.div_ceil(SECTORS as usize))
            }
            Pending::Refused | Pending::Flush { .. } | Pending::Read { .. } => None,
        });
        let written: Vec<_> = written.collect();
        self.watch.look(&self.sim, self.oracle.blocks(), (&written, self.lenient_below > 0))
    }

    fn reap(&mut self) -> Result<(), String> {
        let mut at = 0;
        while at < self.pending.len() {
            let Some(result) = self.sim.poll(self.pending[at].0) else {
                at += 1;
                continue;
            };
            let (id, pending) = self.pending.swap_remove(at);
            self.note(format!("request {id} ended: {}", if result.is_ok() { "done" } else { "error" }));
            let may_fail =
                self.errors_allowed || id < self.lenient_below || self.is_refused(&pending, &result);
            self.ended(pending, result, may_fail)?;
        }
        Ok(())
    }

    fn ended(
        &mut self,
        pending: Pending,
        result: Result<ClientReply, ClientError>,
        may_fail: bool,
    ) -> Result<(), String> {
        let reply = match result {
            Err(ClientError::NotSupported) if matches!(pending, Pending::Refused) => return Ok(()),
            Ok(reply) => reply,
            Err(error) if !may_fail => {
                return Err(format!("{error} within the budget: {:?}", self.sim.status()));
            }
            Err(_) => {
                self.errors += 1;
                match pending {
                    Pending::Write { written, .. } => self.oracle.fail_write(&written),
                    Pending::Read { since, .. } => self.oracle.end_read(since),
                    Pending::Refused | Pending::Flush { .. } => {}
                }
                return Ok(());
            }
        };
        match (pending, reply) {
            (Pending::Write { written, fua }, _) => self.oracle.end_write(&written, fua),
            (Pending::Refused, reply) => {
                return Err(format!("zeroes that cannot be fast were answered with {reply:?}"));
            }
            (Pending::Flush { began }, _) => self.oracle.end_flush(began),
            (Pending::Read { first, count, since }, reply) => {
                let bytes = bytes_read(reply)?;
                if bytes.len() != count * SECTOR_BYTES {
                    return Err(format!("a read of {count} sectors was answered with {} bytes", bytes.len()));
                }
                self.oracle.end_read(since);
                let checked = self.oracle.check_sectors(first, &bytes, Floor::Answered(since));
                checked.map_err(|wrong| format!("a read of sectors {first}+{count}: {wrong}"))?;
            }
        }
        Ok(())
    }

    fn any_member(&mut self) -> u16 {
        self.random.below(u64::from(self.width)) as u16
    }

    /// A healthy member, if one more may be lost.
    pub(super) fn victim(&mut self) -> Option<(u16, u32)> {
        let impaired = self.impaired();
        let member = self.any_member();
        let sick = impaired.count_ones() as usize + self.depth_of_bad_sectors();
        if sick >= self.spare_members || impaired >> member & 1 == 1 || self.sim.has_bad_news() {
            return None;
        }
        Some((member, self.sim.disk_of(member)?))
    }

    /// A member dies, with or without its cache, or fails a flush, if one more may be lost.
    pub fn lose_member(&mut self) {
        let kind = self.random.below(3);
        self.harm_member(kind);
    }

    fn fault(&mut self) {
        let kind = self.random.below(4);
        self.harm_member(kind);
    }

    fn harm_member(&mut self, kind: u64) {
        let Some((member, id)) = self.victim() else { return };
        let word =
            ["dies", "dies and loses its cache", "fails its next flush", "becomes slow"][kind as usize];
        self.note(format!("member {member} {word}"));
        self.tense = TENSE_STEPS;
        self.guilty |= 1 << member;
        let seed = self.random.next_u64();
        let Some(disk) = self.sim.disks.get_mut(&id) else { return };
        match kind {
            0 => disk.dead = true,
            1 => {
                let mut random = Random::new(seed);
                disk.cut_power(|_, _| if random.one_in(3) { Fate::Kept } else { Fate::Lost });
                disk.dead = true;
                disk.forgot = true;
            }
            2 => disk.failing_flushes = 1,
            _ => disk.slow = !disk.slow,
        }
    }

    fn unreadable(&mut self) {
        let Some((member, id)) = self.victim() else { return };
        let regions = self.sim.data_regions();
        let Some(disk) = self.sim.disks.get_mut(&id) else { return };
        let blocks: Vec<u64> = regions.into_iter().flat_map(|region| disk.written_blocks(region)).collect();
        let mut bad = Vec::new();
        for _ in 0..3 {
            if !blocks.is_empty() {
                bad.push(blocks[self.random.below(blocks.len() as u64) as usize]);
            }
        }
        disk.bad_blocks.extend(&bad);
        self.note(format!("blocks {bad:?} of member {member} become unreadable"));
    }

    /// The disk of a member that comes back, repaired.
    pub(super) fn reopen(&mut self, id: u32) -> NewDevice {
        if self.workload.kinds.contains(FaultKind::Rollback)
            && self.random.one_in(2)
            && let Some(disk) = self.sim.disks.get_mut(&id)
            && let Some(what) = roll_back(disk, &self.copies, &mut self.random)
        {
            self.note(format!("disk {id} {what}"));
            self.counts.count(FaultKind::Rollback);
        }
        let device = self.sim.reopen_disk(id);
        // The array has to find out whether it forgot anything.
        if let Some(disk) = self.sim.disks.get_mut(&device.device.0) {
            if disk.forgot {
                disk.forgot_in = superblocks::epochs(disk);
            }
            disk.restored_before = disk.restored;
            (disk.forgot, disk.restored) = (false, false);
            (disk.failing_flushes, disk.slow) = (0, false);
        }
        device
    }

    /// Reads a block while no other request is under way. The inner error is the client's.
    ///
    /// # Errors
    /// When the bytes read are wrong, with a description.
    pub(super) fn read_block(&mut self, block: usize) -> Result<Result<(), ClientError>, String> {
        let id = self.sim.submit_read((block * BLOCK_BYTES) as u64, BLOCK_BYTES);
        match self.sim.wait(id) {
            Ok(ClientReply::Data(bytes)) => {
                let checked = self.oracle.check(block, &bytes, Floor::ALL_ANSWERED);
                checked.map(|()| Ok(())).map_err(|wrong| format!("a read: {wrong}"))
            }
            Ok(other) => Err(format!("a read was answered with {other:?}")),
            Err(error) => Ok(Err(error)),
        }
    }

    fn administrate(&mut self) {
        if self.random.one_in(2) {
            let which = self.random.below(3);
            self.note(format!("scrub request {which}"));
            let _ = self.sim.submit_admin(match which {
                0 => AdminRequest::ScrubStart,
                1 => AdminRequest::ScrubPause,
                _ => AdminRequest::ScrubStop,
            });
            return;
        }
        let member = self.any_member();
        let index = MemberIndex(member);
        let status = self.sim.status().members[usize::from(member)].clone();
        match status.state {
            MemberState::Online if self.random.below(4) > 0 => {
                if let Some((member, _)) = self.victim() {
                    self.note(format!("member {member} is taken out"));
                    self.tense = TENSE_STEPS;
                    let until = Timestamp(self.sim.now().0 + LEAVING_MAX);
                    let id = self.sim.submit_admin(AdminRequest::Offline { member: MemberIndex(member) });
                    self.leaving.retain(|(_, _, until)| *until > self.sim.now());
                    self.leaving.push((id, member, until));
                }
            }
            MemberState::Rebuilding => {}
            _ if status.replacement.is_some() => {}
            // A member that was out of service comes back, and needs only what it has missed.
            state if state != MemberState::Online && self.random.one_in(2) => {
                self.coming.retain(|(request, _)| self.sim.poll_admin(*request).is_none());
                let is_coming = |id: u32| self.coming.iter().any(|(_, disk)| *disk == id);
                if let Some(id) = self.sim.disk_out_of_use(member).filter(|id| !is_coming(*id)) {
                    self.note(format!("disk {id} of member {member} ({state:?}) comes back"));
                    self.tense = TENSE_STEPS;
                    let device = self.reopen(id);
                    let disk = device.device.0;
                    let request = self.sim.submit_admin(AdminRequest::Online { member: index, device });
                    self.coming.push((request, disk));
                }
            }
            // A member in service may be replaced too.
            _ => {
                let device = self.sim.add_blank_disk();
                self.note(format!("member {member} ({:?}) is replaced", status.state));
                self.faithful &= !(1 << member);
                self.tense = TENSE_STEPS;
                let _ = self.sim.submit_admin(AdminRequest::Replace { member: index, device });
            }
        }
    }
}

/// The bytes that a read was answered with.
fn bytes_read(reply: ClientReply) -> Result<Vec<u8>, String> {
    match reply {
        ClientReply::Data(buf) => Ok(buf.to_vec()),
        ClientReply::Sparse(runs) => {
            let mut bytes = Vec::new();
            for run in runs {
                match run {
                    ReadRun::Zeroes(len) => bytes.resize(bytes.len() + len as usize, 0),
                    ReadRun::Data(buf) => bytes.extend_from_slice(&buf),
                }
            }
            Ok(bytes)
        }
        other => Err(format!("a read was answered with {other:?}")),
    }
}
