//! The fault atlas: every way in which disks can return wrong content, in every region of a member, under
//! load.
//!
//! Within the budget at most `m` members lie or are missing at a time: every request must succeed with the
//! right data, errors may be counted for liars only, and scrubs must repair everything. Beyond the budget
//! requests may fail, but wrong data must never be served. Left out is damage that no array could notice: the
//! same old state on all copies of something.

use super::beyond::says_why;
use super::disk::BLOCK;
use super::workload::Run;
use super::{Oracle, Random, Scenario, SimArray, SimDisk, SimWorld, Workload, WriteFault, superblocks};
use crate::array::assembly::AssemblyError;
use crate::array::geometry::Map;
use crate::block_io::DeviceId;
use crate::format::{COPY_BYTES, MemberState, RegionKind, all_copy_offsets};
use crate::units::{LaneIndex, MemberIndex, SlotIndex};
use crate::volume::{ActivityKind, AdminRequest, MemberStatus};
use std::ops::Range;

/// A part of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The four copies of the superblock.
    Superblock,
    /// The ring of the redo log.
    Log,
    /// Checksums and stripe map.
    Pages,
    /// Blocks of slots in which this member holds data.
    Data,
    /// Blocks of slots in which this member holds parity.
    Parity,
}

impl Place {
    /// All places.
    pub const ALL: [Place; 5] = [Place::Superblock, Place::Log, Place::Pages, Place::Data, Place::Parity];
}

/// A kind of damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// One bit of a byte is inverted.
    Flip,
    /// A sector reads as zeroes.
    ZeroSector,
    /// A block reads as zeroes.
    ZeroBlock,
    /// Two blocks are swapped.
    Swap,
    /// A block cannot be read.
    Unreadable,
    /// The next write there is acknowledged but not done.
    LostWrite,
    /// The next write there is done elsewhere.
    MisdirectedWrite,
    /// The whole place is rolled back to an earlier state.
    Stale,
}

impl Damage {
    /// All kinds.
    pub const ALL: [Damage; 8] = [
        Damage::Flip,
        Damage::ZeroSector,
        Damage::ZeroBlock,
        Damage::Swap,
        Damage::Unreadable,
        Damage::LostWrite,
        Damage::MisdirectedWrite,
        Damage::Stale,
    ];

    /// Whether the same damage on all copies of something at once could pass for an older state of it.
    fn is_plausible_everywhere(self) -> bool {
        matches!(
            self,
            Damage::LostWrite | Damage::MisdirectedWrite | Damage::Stale | Damage::ZeroBlock | Damage::Swap
        )
    }
}

/// The aim of a run.
#[derive(Clone, Copy, Debug)]
pub struct Aim {
    /// Damage only this place.
    pub place: Option<Place>,
    /// Do only this kind of damage.
    pub damage: Option<Damage>,
    /// More members lie than the array survives.
    pub beyond: bool,
}

/// Counts of what was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct AtlasTotals {
    /// Number of damages done.
    pub damages: u64,
    /// Blocks in which members were found to be wrong.
    pub found: u64,
    /// Requests that failed, beyond the budget.
    pub errors: u64,
    /// Starts after a stop, a kill or a power cut.
    pub restarts: u64,
    /// Scrubs that found nothing.
    pub scrubs: u64,
}

impl AtlasTotals {
    /// Adds up.
    pub fn add(&mut self, other: &AtlasTotals) {
        self.damages += other.damages;
        self.found += other.found;
        self.errors += other.errors;
        self.restarts += other.restarts;
        self.scrubs += other.scrubs;
    }
}

/// Rounds of damage in one run.
const ROUNDS: usize = 4;
/// Most scrubs until everything is repaired that can be: one scrub may need a member that an earlier one
/// brings back.
const SCRUBS_MAX: usize = 4;

/// One run; the same `seed` always gives the same run.
///
/// # Errors
/// What was wrong, and the steps that led to it.
pub fn atlas(world: &SimWorld, scenario: &Scenario, aim: Aim, seed: u64) -> Result<AtlasTotals, String> {
    let workload = Workload { faults: 0, unreadable: 0, admin: 0, ..scenario.workload };
    let sim = SimArray::create_in(world, seed);
    let oracle = Oracle::new(scenario.shape.volume_bytes);
    let mut load = Run::new(sim, oracle, workload, Random::new(seed ^ 0xa71a5));
    load.errors_allowed = aim.beyond;
    let mut atlas = Atlas {
        world,
        aim,
        random: Random::new(seed),
        liars: 0,
        old: Vec::new(),
        totals: AtlasTotals::default(),
        errors: 0,
        done: Vec::new(),
    };
    match atlas.run(load) {
        Ok(()) => Ok(atlas.totals),
        Err(what) => {
            Err(format!("seed {seed}, {aim:?} on {}: {what}\n  after {:?}", scenario.name, atlas.done))
        }
    }
}

struct Atlas<'a> {
    world: &'a SimWorld,
    aim: Aim,
    random: Random,
    /// Members whose disks may be wrong: bit by index.
    liars: u64,
    /// Disks as they were a while ago.
    old: Vec<(u32, SimDisk)>,
    totals: AtlasTotals,
    /// Requests that have failed so far.
    errors: u64,
    done: Vec<String>,
}

impl Atlas<'_> {
    fn run(&mut self, mut load: Run) -> Result<(), String> {
        self.steps(&mut load, 150)?;
        for _ in 0..ROUNDS {
            if self.liars == 0 {
                self.choose_liars(&mut load)?;
            }
            self.old = load.sim.disks.iter().map(|(id, disk)| (*id, disk.clone())).collect();
            let steps = self.random.below(80) as usize;
            self.steps(&mut load, steps)?;
            if self.random.one_in(2) {
                load.finish()?;
                load.sim.sleep(1000);
                run_idle(&mut load.sim)?;
            }
            self.damage(&mut load.sim);
            let steps = self.random.below(120) as usize;
            self.steps(&mut load, steps)?;
            if self.random.one_in(3) {
                load.read_all()?;
            }
            match self.random.below(4) {
                0 => {
                    let Some(next) = self.restart(load)? else { return Ok(()) };
                    load = next;
                }
                1 | 2 if !self.aim.beyond => self.heal(&mut load)?,
                _ => {}
            }
        }
        load.read_all()?;
        if !self.aim.beyond {
            self.heal(&mut load)?;
        }
        self.count_errors(&load)
    }

    /// Checks that errors occur only beyond the budget, and with an event (T8). Call it before the notices
    /// since the last start are dropped.
    fn count_errors(&mut self, load: &Run) -> Result<(), String> {
        let errors = load.errors - std::mem::replace(&mut self.errors, load.errors);
        self.totals.errors += errors;
        says_why(&load.sim, errors)
    }

    fn steps(&mut self, load: &mut Run, steps: usize) -> Result<(), String> {
        for _ in 0..steps {
            load.step()?;
        }
        Ok(())
    }

    /// Chooses which members lie from now on; members that are taken out count toward the budget too.
    fn choose_liars(&mut self, load: &mut Run) -> Result<(), String> {
        let status = load.sim.status();
        let (width, spare) = (usize::from(status.geometry.width()), usize::from(status.geometry.parity));
        let gone = status.members.iter().filter(|member| member.state != MemberState::Online).count();
        let mut budget = spare.saturating_sub(gone);
        if budget > 0 && self.random.one_in(4) {
            let member = self.random.below(width as u64) as u16;
            if status.members[usize::from(member)].state == MemberState::Online {
                self.done.push(format!("member {member} is taken out"));
                load.finish()?;
                let taken = load.sim.admin(AdminRequest::Offline { member: MemberIndex(member) });
                budget -= usize::from(taken.is_ok());
            }
        }
        let count = if self.aim.beyond { spare + 1 } else { budget };
        self.liars = self.random.choose(count, width).into_iter().map(|at| 1 << at).sum();
        Ok(())
    }

    /// Damages the disks of the liars.
    fn damage(&mut self, sim: &mut SimArray) {
        for (at, member) in sim.status().members.iter().enumerate() {
            let Some(DeviceId(id)) = member.device.filter(|_| self.liars >> at & 1 == 1) else { continue };
            for _ in 0..1 + self.random.below(6) {
                let place = self.aim.place.unwrap_or(Place::ALL[self.random.below(5) as usize]);
                let damage = self.aim.damage.unwrap_or(Damage::ALL[self.random.below(8) as usize]);
                if self.aim.beyond && damage.is_plausible_everywhere() {
                    continue;
                }
                let Some(disk) = sim.disks.get_mut(&id) else { continue };
                let old = self.old.iter().find(|(other, _)| *other == id).map(|(_, disk)| disk);
                // A page whose first sector is zeroed looks as if it had never been written.
                let spare = if self.aim.beyond && place == Place::Pages { 1 } else { 0 };
                if let Some(what) = harm(disk, old, at as u16, (place, spare), damage, &mut self.random) {
                    self.done.push(format!("member {at}: {what}"));
                    self.totals.damages += 1;
                }
            }
        }
    }

    /// Stops, kills or cuts the power, and starts again. None: the start was refused, which is allowed beyond
    /// the budget.
    fn restart(&mut self, mut load: Run) -> Result<Option<Run>, String> {
        self.check_counters(&load.sim)?;
        let kind = if self.aim.beyond { 0 } else { self.random.below(3) };
        self.done.push(format!("restart {kind}"));
        load.sim.disks.values_mut().for_each(|disk| disk.write_fault = None);
        if kind == 0 {
            load.finish()?;
            if load.sim.admin(AdminRequest::Stop).is_err() {
                return Ok(None);
            }
        }
        self.count_errors(&load)?;
        let status = load.sim.status();
        let used: Vec<u32> = status.members.iter().filter_map(|m| m.device).map(|id| id.0).collect();
        load.sim.disks.retain(|id, _| used.contains(id));
        let truthful = |member: &&MemberStatus| {
            member.state == MemberState::Online && self.liars >> member.index.0 & 1 == 0
        };
        let truthful = status.members.iter().filter(truthful).count();
        let mut random = Random::new(self.random.next_u64());
        match load.restart(self.world, kind == 1, kind == 2, &mut random)? {
            Ok(load) => {
                self.totals.restarts += 1;
                Ok(Some(load))
            }
            Err(_) if self.aim.beyond => Ok(None),
            // Where k <= m the members whose superblocks are good need not be a majority, and half of them
            // must not start on their own (A2).
            Err(AssemblyError::NoMajority { .. }) if 2 * truthful <= status.members.len() => Ok(None),
            Err(error) => Err(format!("a restart is refused: {error}")),
        }
    }

    /// Repairs everything, and checks for which members errors were counted and that nothing is wrong any
    /// more.
    fn heal(&mut self, load: &mut Run) -> Result<(), String> {
        load.finish()?;
        load.sim.disks.values_mut().for_each(|disk| disk.write_fault = None);
        for at in 0..load.sim.status().members.len() {
            let member = load.sim.status().members[at].clone();
            if !matches!(member.state, MemberState::Online | MemberState::Rebuilding) {
                let device = load.sim.add_blank_disk();
                let request = AdminRequest::Replace { member: member.index, device };
                load.sim.admin(request).map_err(|error| format!("replacing member {at}: {error}"))?;
            }
        }
        let mut last = None;
        for _ in 0..SCRUBS_MAX {
            load.sim.submit_admin(AdminRequest::ScrubStop);
            run_until_quiet(&mut load.sim)?;
            load.sim.submit_admin(AdminRequest::ScrubStart);
            run_until_quiet(&mut load.sim)?;
            last = load.sim.status().last_scrub;
            if last.is_some_and(|scrub| (scrub.errors, scrub.repaired) == (0, 0)) {
                self.totals.scrubs += 1;
                self.check_counters(&load.sim)?;
                load.read_all()?;
                self.done.push("healed".into());
                self.liars = 0;
                return Ok(());
            }
        }
        Err(format!("scrubs go on finding: {last:?}, {:?}", load.sim.notices))
    }

    /// Checks that no errors are counted for members that do not lie.
    fn check_counters(&mut self, sim: &SimArray) -> Result<(), String> {
        for (at, member) in sim.status().members.iter().enumerate() {
            let counters = member.counters;
            let found = counters.checksum_errors + counters.read_errors;
            if found > 0 && !self.aim.beyond && self.liars >> at & 1 == 0 && !self.has_lied(at) {
                return Err(format!("member {at} is counted and was never wrong: {counters:?}"));
            }
            self.totals.found += found;
        }
        Ok(())
    }

    /// Whether the member ever lied: counters keep their values when a member is healed.
    fn has_lied(&self, member: usize) -> bool {
        let start = format!("member {member}: ");
        self.done.iter().any(|done| done.starts_with(&start))
    }
}

/// Damages a disk; an inverted bit or a zeroed sector lies behind the first `spared_sectors` of its block.
/// Returns what was done; None when there is nothing to damage.
fn harm(
    disk: &mut SimDisk,
    old: Option<&SimDisk>,
    member: u16,
    (place, spared_sectors): (Place, u64),
    damage: Damage,
    random: &mut Random,
) -> Option<String> {
    let count = disk.part().lanes.count;
    let lane = LaneIndex(if count > 1 { random.below(u64::from(count)) as u16 } else { 0 });
    let ranges = ranges_of(disk, (member, lane), place)?;
    let mut blocks: Vec<u64> = Vec::new();
    for range in &ranges {
        blocks.extend(disk.written_blocks(range.clone()));
    }
    if blocks.is_empty() {
        return None;
    }
    let block = blocks[random.below(blocks.len() as u64) as usize];
    let other = blocks[random.below(blocks.len() as u64) as usize];
    let at = block * BLOCK;
    let within = ranges.iter().find(|range| range.contains(&at))?.clone();
    match damage {
        Damage::Flip => {
            let start = 512 * spared_sectors;
            disk.flip(at + start + random.below(BLOCK - start), 1 << random.below(8));
        }
        Damage::ZeroSector => {
            let sector = spared_sectors + random.below(8 - spared_sectors);
            disk.poke(at + 512 * sector, &[0; 512]);
        }
        Damage::ZeroBlock => disk.poke(at, &[0; BLOCK as usize]),
        Damage::Swap => disk.swap_blocks(block, other),
        Damage::Unreadable => drop(disk.bad_blocks.insert(block)),
        Damage::LostWrite => disk.write_fault = Some((within, WriteFault::Lost)),
        Damage::MisdirectedWrite => {
            disk.write_fault = Some((within, WriteFault::Misdirected(other * BLOCK)));
        }
        Damage::Stale => {
            let old = old?;
            for range in ranges {
                let bytes = old.peek(range.start, (range.end - range.start) as usize);
                disk.poke(range.start, &bytes);
            }
        }
    }
    Some(format!("{damage:?} in {place:?}, block {block}"))
}

/// The bytes of a place of a member, in the window of a lane.
fn ranges_of(disk: &SimDisk, (member, lane): (u16, LaneIndex), place: Place) -> Option<Vec<Range<u64>>> {
    let window = disk.window(lane);
    if place == Place::Superblock {
        let copies = all_copy_offsets(window.end - window.start).map(|copy| window.start + copy.0);
        return Some(copies.map(|copy| copy..copy + COPY_BYTES as u64).to_vec());
    }
    let superblock = superblocks::of_lane(disk, lane)?;
    let whole = |kind| {
        let region = superblock.region(kind)?;
        let start = window.start + region.offset.0;
        Some(start..start + region.len)
    };
    let chunks = |parity: bool| {
        let (map, region) = (Map::new(&superblock.geometry), superblock.data_region());
        let (chunk, start) = (map.chunk as u64, window.start + region.offset.0);
        let of = |slot: &u64| {
            let column = map.column_of(SlotIndex(*slot), MemberIndex(member));
            (usize::from(column.0) >= map.k) == parity
        };
        let range = |slot: u64| start + slot * chunk..start + (slot + 1) * chunk;
        (0..map.slots).filter(of).map(range).collect()
    };
    Some(match place {
        Place::Log => vec![whole(RegionKind::Log)?],
        Place::Pages => vec![whole(RegionKind::Pages)?],
        Place::Superblock | Place::Data => chunks(false),
        Place::Parity => chunks(true),
    })
}

/// Executes all queued operations and those that they lead to.
fn run_idle(sim: &mut SimArray) -> Result<(), String> {
    for _ in 0..1_000_000 {
        if !sim.step() {
            return Ok(());
        }
    }
    Err(format!("it does not come to rest: {:?}", sim.status()))
}

/// Executes until no pass is under way.
fn run_until_quiet(sim: &mut SimArray) -> Result<(), String> {
    for _ in 0..2000 {
        run_idle(sim)?;
        let passes = sim.status().activities;
        if passes.iter().all(|pass| pass.kind == ActivityKind::Scrub && pass.rest.is_some()) {
            return Ok(());
        }
        sim.sleep(100);
    }
    Err(format!("a pass hangs: {:?}", sim.status().activities))
}
