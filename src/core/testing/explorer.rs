//! The crash explorer: a seeded load on a small array and, at every moment at which a crash could leave a new
//! state, many crashes. They differ in which writes survive, whole or torn, whether the power failed or the
//! process died, which members are gone and which stale ones are back. After each crash the array recovers
//! and the oracle checks its content; some runs crash again during the recovery, or after it.
//!
//! A crash point is one start after a crash. Everything follows from (scenario, seed, moment, variant), which
//! a violation prints and [`replay`] takes. All crashes happen to copies of the disks, so the load itself
//! runs on as if nothing had crashed.

use super::old_copies::OldCopy;
use super::oracle::BLOCK_BYTES;
use super::presence::Presence;
use super::reads::{REFUSED, Reads, STEPS_MAX, run_until};
use super::sicken::{blind_logs, roll_back_many, sicken};
use super::sickness::depth_of_bad_sectors;
use super::superblocks;
use super::workload::Run;
use super::{
    Fate, FaultCounts, Floor, Next, Oracle, Random, Scenario, SimArray, SimDisk, SimWorld, Wreck, logs,
    presence,
};
use crate::block_io::DeviceId;
use crate::format::MemberState;
use crate::volume::{ActivityKind, AdminRequest, NoticeKind};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Counts of what was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Loads run.
    pub runs: u64,
    /// Moments at which crashes were tried.
    pub moments: u64,
    /// Crashes tried, each with its recovery.
    pub points: u64,
    /// Of `points`: crashes during a recovery or soon after one.
    pub repeated: u64,
    /// Of `points`: starts that were refused, and were allowed to be.
    pub refused: u64,
    /// Scrubs that found nothing.
    pub scrubs: u64,
    /// Reads that ended with an error, as they may when too much is damaged.
    pub errors: u64,
    /// How often everything was made whole, checked and degraded after all faults had passed.
    pub peaces: u64,
    /// Faults beyond crashes and members that die.
    pub faults: FaultCounts,
}

impl Totals {
    /// Adds the numbers of `other`.
    pub fn add(&mut self, other: &Totals) {
        self.runs += other.runs;
        self.moments += other.moments;
        self.points += other.points;
        self.repeated += other.repeated;
        self.refused += other.refused;
        self.scrubs += other.scrubs;
        self.errors += other.errors;
        self.peaces += other.peaces;
        self.faults.add(&other.faults);
    }
}

/// Something an array must never do.
#[derive(Clone, Debug)]
pub struct Violation {
    /// Replays it: `SCENARIO:SEED:MOMENT:VARIANT`, the last two empty when no crash was needed.
    pub token: String,
    /// What the array did wrong.
    pub what: String,
    /// The steps that led to it.
    pub path: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.path {
            writeln!(f, "    {line}")?;
        }
        writeln!(f, "  {}", self.what)?;
        write!(
            f,
            "  replay: CALPE_SIM_REPLAY='{}' cargo test --test sim explore::a_violation_is_replayed -- --nocapture",
            self.token
        )
    }
}

/// Explores one seed until the load has run its steps or the limit of crash points is reached.
pub fn explore(
    world: &SimWorld,
    scenario: &Scenario,
    seed: u64,
    points_max: u64,
) -> (Totals, Option<Violation>) {
    let mut explorer = Explorer::new(world, scenario, seed);
    explorer.points_max = points_max;
    explorer.guarded()
}

/// Runs one seed again, with the crashes of one moment and variant only, and prints how it went.
#[must_use]
pub fn replay(world: &SimWorld, scenario: &Scenario, token: &str) -> Option<Violation> {
    let mut numbers = token.split(':').skip(1).map(str::parse);
    let seed = numbers.next()?.ok()?;
    let mut explorer = Explorer::new(world, scenario, seed);
    explorer.only = Some((numbers.next()?.unwrap_or(u64::MAX), numbers.next()?.unwrap_or(0)));
    explorer.guarded().1
}

pub(super) struct Explorer<'a> {
    pub(super) world: &'a SimWorld,
    scenario: &'a Scenario,
    seed: u64,
    only: Option<(u64, u64)>,
    points_max: u64,
    at: Option<(u64, u64)>,
    pub(super) random: Random,
    pub(super) totals: Totals,
    path: Vec<String>,
}

/// The history of the crashes so far.
#[derive(Clone)]
struct Past {
    /// The disks of the members that were in service and sound at the crash, each with its member.
    seats: Vec<(u32, u16)>,
    /// Members that have been in service and sound ever since the array was created: bit by index.
    faithful: u64,
    /// The writes that must have survived the crashes since the array last served requests.
    floor: Option<Floor>,
    /// Crashes before this one.
    depth: u32,
    /// Members whose logs were damaged since the array last served requests: bit by index.
    ruined: u64,
    /// Copies of disks made during the load.
    copies: Arc<[OldCopy]>,
}

/// Which of the undecided writes survive a crash.
#[derive(Clone, Copy, Debug)]
enum Survivors {
    /// Those whose bit is set.
    Subset(u64),
    None,
    All,
    AllBut(usize),
    Only(usize),
    /// All those of the disks whose bit is set.
    Disks(u64),
    Random,
    /// Each is lost, whole or torn, at random.
    Torn,
    /// One is torn; the others are all there (`true`) or all lost.
    OneTorn(usize, bool),
    /// All are there, but without their first sectors.
    Headless,
    /// The newest of every disk is torn; the others are all there (`true`) or all lost.
    NewestTorn(bool),
}

/// After a recovery that no crash follows, all faults pass one time in this many, and must leave no trace.
const PEACE_ONE_IN: u64 = 6;
/// With at most this many undecided writes, every subset of them is tried.
const SUBSETS_OF_MAX: usize = 4;
/// Most crashes within one recovery; a quarter of it when that recovery follows a crash within a recovery.
const SWEEP_CRASHES_MAX: u32 = 6;
impl Explorer<'_> {
    fn new<'a>(world: &'a SimWorld, scenario: &'a Scenario, seed: u64) -> Explorer<'a> {
        Explorer {
            world,
            scenario,
            seed,
            only: None,
            points_max: u64::MAX,
            at: None,
            random: Random::new(seed),
            totals: Totals::default(),
            path: Vec::new(),
        }
    }

    /// Runs the load; panics of the code under test count as violations.
    fn guarded(mut self) -> (Totals, Option<Violation>) {
        let result = catch_unwind(AssertUnwindSafe(|| self.run()));
        let what = match result {
            Ok(Ok(())) => return (self.totals, None),
            Ok(Err(what)) => what,
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or(panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                format!("panic: {}", text.unwrap_or_default())
            }
        };
        let at = self.at.map_or(":".into(), |(moment, variant)| format!("{moment}:{variant}"));
        let token = format!("{}:{}:{at}", self.scenario.name, self.seed);
        (self.totals, Some(Violation { token, what, path: self.path }))
    }

    fn run(&mut self) -> Result<(), String> {
        let scenario = self.scenario;
        self.totals.runs += 1;
        let sim = SimArray::create_in(self.world, self.seed);
        let oracle = Oracle::new(scenario.shape.volume_bytes);
        let mut load = Run::new(sim, oracle, scenario.workload, Random::new(self.seed ^ 0x5eed));
        let mut moment = 0;
        let mut loss = Random::new(self.seed ^ 0x1055);
        let loss_at = scenario.loss_within.checked_sub(1).map(|within| loss.below(within + 1));
        for step in 0..scenario.steps {
            if loss_at == Some(step as u64) {
                load.lose_member();
            }
            let has_changed = load.step();
            if has_changed.is_err() {
                self.path = load.log().to_vec();
            }
            if !has_changed? {
                continue;
            }
            moment += 1;
            // In the time after the loss of a member, which is short, crashes are most likely to reveal
            // mistakes.
            let mut chance = Random::new(self.seed ^ (moment << 32));
            let one_in =
                if load.is_tense() { scenario.moments_one_in.div_ceil(8) } else { scenario.moments_one_in };
            if !chance.one_in(one_in) {
                continue;
            }
            self.moment(moment, &mut load)?;
            let replayed = self.only.is_some_and(|(only, _)| only == moment);
            if replayed || self.totals.points >= self.points_max {
                self.totals.faults.add(&load.counts);
                return Ok(());
            }
        }
        self.totals.faults.add(&std::mem::take(&mut load.counts));
        if !scenario.workload.kinds.is_empty() {
            self.path = load.log().to_vec();
            self.random = Random::new(self.seed ^ 0xeace);
            return self.peace(load);
        }
        load.read_all()?;
        load.sim.audit()?;
        if load.impaired() == 0 {
            self.scrub(&mut load.sim)?;
            load.read_all()?;
        }
        Ok(())
    }

    /// Lets all faults pass; they must leave no trace.
    fn peace(&mut self, load: Run) -> Result<(), String> {
        self.totals.peaces += 1;
        let mut random = Random::new(self.random.next_u64());
        load.make_peace(self.world, &mut random, &mut self.path)
    }

    /// Tries all variants of a crash at this moment.
    fn moment(&mut self, moment: u64, load: &mut Run) -> Result<(), String> {
        let variants = match self.only {
            None => 0..self.scenario.variants,
            Some((only, variant)) if only == moment => variant..variant + 1,
            Some(_) => return Ok(()),
        };
        self.totals.moments += 1;
        let (seats, faithful) = (seats(&load.sim), load.faithful());
        let copies = load.copies.clone().into();
        let past = Past { seats, faithful, floor: None, depth: 0, ruined: 0, copies };
        let undecided = load.sim.wreck().undecided(true);
        for variant in variants {
            self.at = Some((moment, variant));
            self.random = Random::new(
                self.seed.wrapping_mul(0x9e37_79b9) ^ moment.wrapping_mul(0x85eb_ca6b) ^ (variant << 48),
            );
            self.path.clear();
            self.path.extend_from_slice(load.log());
            let wreck = load.sim.wreck();
            let (power, survivors) = if undecided <= SUBSETS_OF_MAX && variant < 1 << undecided {
                (true, Survivors::Subset(variant))
            } else {
                self.survivors(moment + variant, &wreck)
            };
            self.crash(wreck, (power, survivors), &load.oracle, &past)?;
            self.at = None;
        }
        Ok(())
    }

    /// Picks what survives a crash; rising `pick`s take turns through the kinds of survivors.
    fn survivors(&mut self, pick: u64, wreck: &Wreck) -> (bool, Survivors) {
        let power = !pick.is_multiple_of(4);
        let count = wreck.undecided(power).max(1);
        let one = self.random.below(count as u64) as usize;
        let survivors = match self.random.below(12) {
            0 => Survivors::None,
            1 => Survivors::All,
            2 => Survivors::AllBut(one),
            3 => Survivors::Only(one),
            4 => Survivors::Disks(self.random.next_u64()),
            5 => Survivors::OneTorn(one, self.random.one_in(2)),
            6 | 7 => Survivors::Random,
            8 => Survivors::Headless,
            9 => Survivors::NewestTorn(self.random.one_in(2)),
            _ => Survivors::Torn,
        };
        (power, survivors)
    }

    /// One crash point and, perhaps, more after it.
    fn crash(
        &mut self,
        wreck: Wreck,
        (power, survivors): (bool, Survivors),
        oracle: &Oracle,
        past: &Past,
    ) -> Result<(), String> {
        self.totals.points += 1;
        self.totals.repeated += u64::from(past.depth > 0);
        let undecided = wreck.undecided(power);
        let mut random = Random::new(self.random.next_u64());
        let newest = wreck.newest(power);
        let mut disks =
            wreck.settle(power, |at, disk| survivors.fate((at, newest.contains(&at)), disk, &mut random));
        let floor = match past.floor {
            _ if power => Floor::Flushed,
            Some(Floor::Flushed | Floor::Anything) => Floor::Flushed,
            Some(Floor::Answered(_)) | None => Floor::ALL_ANSWERED,
        };
        let mut presence =
            presence::choose(&mut disks, self.scenario, &past.seats, past.faithful, &mut self.random);
        if past.ruined == 0 {
            let own = (&mut self.random, &mut self.totals.faults);
            if let Some(what) = roll_back_many(&mut disks, &presence, self.scenario, &past.copies, own) {
                self.path.push(format!("{presence}, {what}; floor {floor:?}"));
                return self.start_beyond(disks, oracle, floor);
            }
            let own = (&mut self.random, &mut self.totals.faults);
            sicken(&mut disks, &mut presence, self.scenario, &past.copies, own);
        }
        // Also claims forged at an earlier crash, as long as the disk has not been replaced.
        presence.claims = disks.values().any(|disk| disk.forged.is_some() && !disk.dead);
        let others = !presence.others.is_empty();
        presence.ruined = past.ruined;
        if presence.said.is_empty() && disks.values().all(|disk| !disk.scattered) {
            presence.ruined |= self.damage_logs(&mut disks, power && !others, past.depth);
            let own = (&mut self.random, &mut self.totals.faults);
            if let Some((text, blind)) = blind_logs(&mut disks, self.scenario, own) {
                self.path.push(text);
                presence.blind = blind;
            }
        }
        let word = if power { "the power fails" } else { "the process dies" };
        self.path.push(format!(
            "{word}; of {undecided} undecided writes: {survivors:?}; {presence}; floor {floor:?}"
        ));
        let may_refuse = self.may_refuse(&presence, logs::unreadable(&disks));
        let again = presence.claims.then(|| disks.clone());
        let mut result = self.start_again((disks, false), &presence, oracle, (floor, past));
        if let (Some(disks), Err(error)) = (again, &result)
            && error.starts_with(REFUSED)
            && (error.contains("no other member that is here confirms it")
                || error.contains("cannot start with member"))
        {
            self.totals.refused += 1;
            self.path.push(format!("{error}; it is forced"));
            result = self.start_again((disks, true), &presence, oracle, (floor, past));
        }
        match result {
            Err(error) if error.starts_with(REFUSED) && may_refuse => {
                self.totals.refused += 1;
                self.path.push(error);
                Ok(())
            }
            Err(error) if error.starts_with(REFUSED) => Err(format!("within the budget {error}")),
            other => other,
        }
    }

    /// Starts again after one crash, and goes on as the scenario decides.
    fn start_again(
        &mut self,
        (disks, force): (BTreeMap<u32, SimDisk>, bool),
        presence: &Presence,
        oracle: &Oracle,
        (floor, past): (Floor, &Past),
    ) -> Result<(), String> {
        let seed = Random::new(self.random.next_u64());
        let started = self.world.start(disks, force, seed);
        let mut sim = started.map_err(|error| format!("{REFUSED}: {error}"))?;
        mark_unrecorded(&mut sim);
        // A disk that forgot acknowledged writes, or whose log is damaged, is an erasure in addition to the
        // missing ones.
        let Service { live, partly, forgot, restored } = service(&sim);
        let missing = u32::from(self.scenario.shape.width()) - live.count_ones();
        let survives =
            |bad: u64| missing + (bad & live).count_ones() <= u32::from(self.scenario.shape.parity);
        if presence.ruined & partly != 0 && !survives(presence.ruined | forgot) {
            self.path.push("beyond what the array survives".into());
            // With every log damaged, there may be no record left of where a stripe moved to or what was
            // written in place. The same holds when the undamaged logs cannot be read for a moment
            // (docs/faults.md, known gap 2), or belong to members that were rolled back.
            let unread = presence.ruined | forgot | members_with(&sim, &presence.blind);
            if sim.in_service().iter().any(|lane| lane & !unread == 0) {
                return Ok(());
            }
            // When the ends of that many logs are gone, no record is left of acknowledged writes that were
            // not flushed (docs/faults.md, known gap 2).
            return self.read_all_that_is_left(&mut sim, oracle, Floor::Flushed);
        }
        // A rolled-back member in service is an erasure too, until it is recognised or a recovery has made it
        // whole.
        if restored != 0 && !survives(forgot) {
            self.path.push("beyond what the array survives, with members that were rolled back".into());
            // With no current member left, the array could not know.
            return match presence.current {
                0 => Ok(()),
                _ => self.read_beside_restored(&mut sim, oracle, floor),
            };
        }
        // A place of a member that cannot be read is an erasure too.
        let gone = u32::from(self.scenario.shape.width()) - presence.current.count_ones();
        let depth = depth_of_bad_sectors(sim.disks.values()) as u32;
        if depth > 0 && gone + depth > u32::from(self.scenario.shape.parity) {
            self.path.push("beyond what the array survives, where sectors cannot be read".into());
            return self.read_all_that_is_left(&mut sim, oracle, floor);
        }
        let floor = if forgot == 0 || survives(presence.ruined | forgot) { floor } else { Floor::Flushed };

        let Next { end, sweep, crash, load } = self.scenario.next;
        let last = past.depth >= self.scenario.depth_max;
        let plan = if last { 0 } else { self.random.below(end + sweep + crash + load) };
        if plan < end {
            if !self.scenario.workload.kinds.is_empty() && self.random.one_in(PEACE_ONE_IN) {
                let mut oracle = oracle.clone();
                self.observe_all(&mut sim, &mut oracle, floor)?;
                let load = Run::new(sim, oracle, self.scenario.workload, Random::new(self.random.next_u64()));
                return self.peace(load);
            }
            self.read_all(&mut sim, oracle, floor)?;
            sim.audit()?;
            return self.scrub_sometimes(&mut sim);
        }
        let mut oracle = oracle.clone();
        let ruined = presence.ruined;
        let faithful = presence.current & live;
        let mut past = Past {
            seats: Vec::new(),
            faithful,
            floor: Some(floor),
            depth: past.depth + 1,
            ruined,
            copies: Arc::clone(&past.copies),
        };
        if plan < end + sweep {
            return self.sweep(&mut sim, oracle, floor, past);
        }
        self.observe_all(&mut sim, &mut oracle, floor)?;
        for disk in sim.disks.values_mut().filter(|disk| !disk.dead) {
            (disk.forgot, disk.forgot_in) = (false, Vec::new());
            (disk.restored, disk.restored_before) = (false, false);
        }
        past.ruined = 0;
        if plan < end + sweep + crash {
            past.seats = seats(&sim);
            self.path.push("all is read; crash again".into());
            return self.crash_again(sim.wreck(), &oracle, &past);
        }
        let steps = self.random.below(self.scenario.steps_after);
        let random = Random::new(self.random.next_u64());
        let mut load = Run::new(sim, oracle, self.scenario.workload, random);
        self.path.push("all is read; the load goes on".into());
        let mut result = Ok(());
        for _ in 0..steps {
            result = load.step().map(|_| ());
            if result.is_err() {
                break;
            }
        }
        self.path.extend_from_slice(load.log());
        self.totals.faults.add(&load.counts);
        result?;
        past.copies = past.copies.iter().chain(&load.copies).cloned().collect();
        past.seats = seats(&load.sim);
        past.faithful &= load.faithful();
        past.floor = None;
        let wreck = load.sim.wreck();
        self.crash_again(wreck, &load.oracle, &past)
    }

    /// Crashes again at some moments of a recovery. The crashes happen to copies; the recovery itself goes on
    /// undisturbed.
    fn sweep(
        &mut self,
        sim: &mut SimArray,
        mut oracle: Oracle,
        floor: Floor,
        mut past: Past,
    ) -> Result<(), String> {
        let mut crashes = SWEEP_CRASHES_MAX >> (2 * (past.depth - 1));
        let before = self.path.len();
        let mut reads = self.submit_reads(sim, oracle.blocks());
        let mut changes = sim.changes();
        for _ in 0..STEPS_MAX {
            reads.poll(sim, |first, bytes| {
                oracle.check(first, bytes, floor).map_err(|wrong| format!("after the crash: {wrong}"))?;
                oracle.observe(first, bytes);
                Ok(())
            })?;
            if reads.are_over() {
                return self.scrub_sometimes(sim);
            }
            if changes != sim.changes() && crashes > 0 && self.random.one_in(self.scenario.sweep_one_in) {
                crashes -= 1;
                self.path.push("crash again within the recovery".into());
                past.seats = seats(sim);
                self.crash_again(sim.wreck(), &oracle, &past)?;
                self.path.truncate(before);
            }
            changes = sim.changes();
            reads.step(sim)?;
        }
        Err(format!("the recovery goes on: {:?}", sim.status()))
    }

    fn crash_again(&mut self, wreck: Wreck, oracle: &Oracle, past: &Past) -> Result<(), String> {
        let pick = self.random.below(8);
        let survivors = self.survivors(pick, &wreck);
        self.crash(wreck, survivors, oracle, past)
    }

    /// Damages logs now and then. Returns the members whose logs now count as damaged, bit by index; none
    /// when no row loses anything by it.
    fn damage_logs(&mut self, disks: &mut BTreeMap<u32, SimDisk>, may_spoil: bool, depth: u32) -> u64 {
        let one_in = if depth > 0 { 3 } else { 6 };
        if self.random.one_in(one_in) {
            return logs::ruin(disks, self.scenario.shape.width(), &mut self.random);
        }
        // After a mere death of the process, newer images may exist only in caches, and another crash may
        // lose them.
        if may_spoil && self.random.one_in(self.scenario.spoil_one_in) {
            let spoilt = logs::spoil_superseded(disks, self.scenario.shape.width(), &mut self.random);
            if spoilt > 0 {
                self.path.push(format!("{spoilt} images are damaged that newer ones replace"));
            }
        }
        0
    }

    /// Whether a start may be refused with these members, of which some, `unreadable`, have blocks
    /// in their logs that cannot be read.
    fn may_refuse(&self, presence: &Presence, unreadable: u64) -> bool {
        let (k, width) = (u32::from(self.scenario.shape.data), u32::from(self.scenario.shape.width()));
        let current = presence.current.count_ones();
        let sound = (presence.current & !presence.ruined & !unreadable).count_ones();
        sound < k || 2 * current <= width
    }

    /// Reads the volume and checks the bytes read.
    fn read_all(&mut self, sim: &mut SimArray, oracle: &Oracle, floor: Floor) -> Result<(), String> {
        self.read_blocks(sim, oracle.blocks(), |first, bytes| {
            oracle.check(first, bytes, floor).map_err(|wrong| format!("after the crash: {wrong}"))
        })
    }

    /// The same; from then on reads must return exactly the bytes that were read here.
    fn observe_all(&mut self, sim: &mut SimArray, oracle: &mut Oracle, floor: Floor) -> Result<(), String> {
        self.read_blocks(sim, oracle.blocks(), |first, bytes| {
            oracle.check(first, bytes, floor).map_err(|wrong| format!("after the crash: {wrong}"))?;
            oracle.observe(first, bytes);
            Ok(())
        })
    }

    fn read_blocks(
        &mut self,
        sim: &mut SimArray,
        blocks: usize,
        mut take: impl FnMut(usize, &[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut reads = self.submit_reads(sim, blocks);
        for _ in 0..STEPS_MAX {
            reads.poll(sim, &mut take)?;
            if reads.are_over() {
                return Ok(());
            }
            reads.step(sim)?;
        }
        Err(format!("the recovery goes on: {:?}", sim.status()))
    }

    fn submit_reads(&self, sim: &mut SimArray, blocks: usize) -> Reads {
        // Requests as large as a stripe but not aligned to it, so that some end before others.
        let shape = self.scenario.shape;
        let piece = (usize::from(shape.data) * shape.chunk as usize / BLOCK_BYTES).max(2) + 1;
        let read = |first: usize| {
            let len = piece.min(blocks - first) * BLOCK_BYTES;
            (sim.submit_read((first * BLOCK_BYTES) as u64, len), first)
        };
        Reads { pending: (0..blocks).step_by(piece).map(read).collect(), idle: 0 }
    }

    fn scrub_sometimes(&mut self, sim: &mut SimArray) -> Result<(), String> {
        if self.random.one_in(self.scenario.scrub_one_in) {
            return self.scrub(sim);
        }
        Ok(())
    }

    /// Scrubs from the start, and checks that nothing is found. Passing faults are over by then; sectors that
    /// stay unreadable would be found.
    fn scrub(&mut self, sim: &mut SimArray) -> Result<(), String> {
        if sim.disks.values().any(|disk| disk.scattered) {
            return Ok(());
        }
        sim.disks.values_mut().for_each(SimDisk::clear_faults);
        run_until(sim, "what comes before a scrub", |sim| {
            sim.status().activities.iter().all(|a| a.kind == ActivityKind::Scrub)
        })?;
        sim.submit_admin(AdminRequest::ScrubStop);
        sim.submit_admin(AdminRequest::ScrubStart);
        run_until(sim, "a scrub", |sim| sim.status().activities.is_empty())?;
        let status = sim.status();
        // When nothing could be compared, the result of an earlier scrub stands, whatever this one found.
        let ended = sim.notices.iter().rfind(|notice| notice.kind == NoticeKind::ScrubEnded);
        // Lanes that say different things are told one by one.
        let count = |text: &str, what| text.matches(what).count();
        let found_none = ended.is_some_and(|notice| {
            count(&notice.text, "scrub finished: 0 errors, 0 repaired")
                == count(&notice.text, "scrub finished: ")
        });
        match status.last_scrub {
            Some(scrub) if (scrub.errors, scrub.repaired) == (0, 0) || found_none => {
                self.totals.scrubs += 1;
                Ok(())
            }
            other => {
                let said: Vec<&str> = sim.notices.iter().map(|notice| notice.text.as_str()).collect();
                Err(format!("the scrub after a recovery says {other:?}: {said:?} {:?}", status.members))
            }
        }
    }
}

impl Survivors {
    fn fate(self, (at, is_newest): (usize, bool), disk: u32, random: &mut Random) -> Fate {
        let kept = match self {
            Survivors::Subset(bits) => bits >> at & 1 == 1,
            Survivors::None => false,
            Survivors::All => true,
            Survivors::AllBut(one) => at != one,
            Survivors::Only(one) => at == one,
            Survivors::Disks(bits) => bits >> (disk % 64) & 1 == 1,
            Survivors::Random => random.one_in(2),
            Survivors::OneTorn(one, _) if at == one => return Fate::Torn(random.next_u64()),
            Survivors::Headless => return Fate::HEADLESS,
            Survivors::NewestTorn(_) if is_newest => return Fate::Torn(random.next_u64()),
            Survivors::OneTorn(_, others) | Survivors::NewestTorn(others) => others,
            Survivors::Torn => match random.below(3) {
                0 => return Fate::Torn(random.next_u64()),
                kept => kept == 1,
            },
        };
        if kept { Fate::Kept } else { Fate::Lost }
    }
}

/// Members in service: bits by index.
struct Service {
    /// In every lane, with the same disk.
    live: u64,
    /// In some lane.
    partly: u64,
    /// Of `partly`: members on disks that have forgotten something.
    forgot: u64,
    /// Of `partly`: members on disks that were rolled back.
    restored: u64,
}

fn service(sim: &SimArray) -> Service {
    let mut service = Service { live: 0, partly: 0, forgot: 0, restored: 0 };
    for (at, (seat, disks)) in sim.seats().into_iter().zip(sim.serving()).enumerate() {
        let any = |is: fn(&SimDisk) -> bool| disks.iter().any(|id| sim.disks.get(id).is_some_and(is));
        service.live |= u64::from(seat.is_some()) << at;
        service.partly |= u64::from(!disks.is_empty()) << at;
        service.forgot |= u64::from(any(|disk| disk.forgot)) << at;
        service.restored |= u64::from(any(|disk| disk.restored)) << at;
    }
    service
}

/// Members that have one of these disks: bits by index.
fn members_with(sim: &SimArray, disks: &BTreeSet<u32>) -> u64 {
    let members = sim.status().members;
    let has_one = |device: &Option<DeviceId>| device.is_some_and(|device| disks.contains(&device.0));
    let with = members.iter().enumerate().filter(|(_, member)| has_one(&member.device));
    with.fold(0, |bits, (at, _)| bits | 1 << at)
}

/// Marks disks of members in service that had forgotten something and came back before that was recorded
/// anywhere: they count as disks that forgot until a recovery has made them whole. A log detects that like
/// any other erasure; without a log nothing does. To be called right after a start.
fn mark_unrecorded(sim: &mut SimArray) {
    let status = sim.status();
    let online = status.members.iter().filter(|member| member.state == MemberState::Online);
    for id in online.filter_map(|member| member.device) {
        if let Some(disk) = sim.disks.get_mut(&id.0).filter(|disk| !disk.forgot_in.is_empty()) {
            // Each lane has to record it.
            let shows = superblocks::epochs(disk);
            let is_unrecorded = disk.forgot_in.iter().zip(&shows).any(|(before, now)| before == now);
            disk.forgot |= is_unrecorded;
            disk.restored |= is_unrecorded && disk.restored_before;
        }
    }
}

/// The disks of the members in service that are sound, each with its member.
fn seats(sim: &SimArray) -> Vec<(u32, u16)> {
    let in_order = |(member, id): (u16, Option<u32>)| {
        let id = id?;
        let disk = sim.disks.get(&id).filter(|disk| !disk.dead && !disk.forgot)?;
        (disk.failing_flushes == 0).then_some((id, member))
    };
    (0..).zip(sim.seats()).filter_map(in_order).collect()
}
