//! Random requests, faults, administrators, kills and stops, checked against a model that knows, sector by
//! sector, which writes a read may show. CALPE_CHAOS_SEEDS ("from..to") picks seeds, CALPE_CHAOS_FAULTS a
//! subset of the faults; a failing seed is printed and replays exactly.

use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{Random, SimArray, SimShape};
use calpe_core::units::{MemberIndex, VolumeOffset};
use calpe_core::volume::{AdminRequest, ArrayState, ClientReply, ClientRequest};
use std::panic::{AssertUnwindSafe, catch_unwind};

const SECTOR: usize = 512;

/// One value that a sector may have; 0 stands for zeroes.
#[derive(Clone, Copy, Debug)]
struct Version {
    value: u64,
    /// When its write was answered; None while it is in flight.
    ended: Option<u64>,
    /// When a later write, begun after this one had ended, was answered: from then on only a power cut brings
    /// this value back.
    superseded: Option<u64>,
    /// The write that superseded it is on stable storage.
    gone: bool,
}

#[derive(Clone)]
struct Model {
    sectors: Vec<Vec<Version>>,
    clock: u64,
}

enum Pending {
    Write { first: usize, count: usize, value: u64, began: u64, fua: bool },
    Trim { first: usize, count: usize, began: u64 },
    Read { first: usize, count: usize, began: u64 },
    Flush { began: u64 },
}

fn content(value: u64, sector: usize) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    if value != 0 {
        let mut random = Random::new(value.wrapping_mul(0x9e37) ^ ((sector as u64) << 32));
        random.fill(&mut bytes);
    }
    bytes
}

impl Model {
    fn new(sectors: usize) -> Model {
        let zero = Version { value: 0, ended: Some(0), superseded: None, gone: false };
        Model { sectors: vec![vec![zero]; sectors], clock: 1 }
    }

    fn begin(&mut self, first: usize, count: usize, value: u64) {
        for sector in &mut self.sectors[first..first + count] {
            sector.push(Version { value, ended: None, superseded: None, gone: false });
        }
    }

    fn end(&mut self, first: usize, count: usize, value: u64, began: u64, ok: bool, fua: bool) {
        self.clock += 1;
        let now = self.clock;
        for sector in &mut self.sectors[first..first + count] {
            for version in sector.iter_mut() {
                if version.value == value && version.ended.is_none() {
                    version.ended = Some(now);
                } else if ok && version.ended.is_some_and(|ended| ended < began) {
                    version.superseded.get_or_insert(now);
                }
            }
            if ok && fua {
                for version in sector.iter_mut() {
                    version.gone |= version.superseded.is_some() && version.ended.is_some_and(|e| e < began);
                }
            }
        }
    }

    fn flushed(&mut self, began: u64) {
        for sector in &mut self.sectors {
            for version in sector.iter_mut() {
                version.gone |= version.superseded.is_some_and(|when| when < began);
            }
        }
    }

    fn killed(&mut self, power: bool) {
        self.clock += 1;
        self.sectors.iter_mut().for_each(|versions| versions.retain(|v| !v.gone));
        for version in self.sectors.iter_mut().flatten() {
            version.ended.get_or_insert(self.clock);
            if power {
                version.superseded = None;
            }
        }
        self.clock += 1;
    }

    /// The values that a read that began at `since` may show.
    fn values(&self, sector: usize, since: u64) -> Vec<u64> {
        let current = |v: &&Version| v.superseded.is_none_or(|when| when > since);
        self.sectors[sector].iter().filter(current).map(|v| v.value).collect()
    }
}

struct Chaos {
    sim: Option<SimArray>,
    model: Model,
    pending: Vec<(u64, Pending)>,
    random: Random,
    n: usize,
    m: usize,
    faults: String,
    log: Vec<String>,
    value: u64,
    /// Some request may have failed for lack of members or space.
    errors_allowed: bool,
    last_impaired: u64,
}

impl Chaos {
    fn sim(&mut self) -> &mut SimArray {
        self.sim.as_mut().expect("it runs")
    }

    fn with(&self, fault: char) -> bool {
        self.faults.contains(fault)
    }

    fn reap(&mut self) {
        let mut still = Vec::new();
        for (id, pending) in std::mem::take(&mut self.pending) {
            match self.sim().poll(id) {
                None => still.push((id, pending)),
                Some(result) => self.ended(pending, result.map_err(|e| e.to_string())),
            }
        }
        self.pending = still;
    }

    fn ended(&mut self, pending: Pending, result: Result<ClientReply, String>) {
        if let Err(error) = &result {
            assert!(self.errors_allowed, "{error} within the budget: {:?}", self.sim().status());
        }
        match (pending, result) {
            (Pending::Write { first, count, value, began, fua }, result) => {
                self.model.end(first, count, value, began, result.is_ok(), fua);
            }
            // A trim leaves the old bytes or zeroes.
            (Pending::Trim { first, count, began }, _) => {
                self.model.end(first, count, 0, began, false, false)
            }
            (Pending::Flush { began }, Ok(_)) => self.model.flushed(began),
            (Pending::Read { first, count, began }, Ok(ClientReply::Data(buf))) => {
                assert_eq!(buf.len(), count * SECTOR);
                for at in 0..count {
                    let got = &buf[at * SECTOR..(at + 1) * SECTOR];
                    let allowed = self.model.values(first + at, began);
                    assert!(
                        allowed.iter().any(|v| content(*v, first + at) == *got),
                        "sector {} is none of {allowed:?}, {:?}",
                        first + at,
                        self.model.sectors[first + at]
                    );
                }
            }
            (_, Err(_)) => {}
            (_, Ok(other)) => panic!("{other:?}"),
        }
    }

    fn range(&mut self) -> (usize, usize) {
        let sectors = self.model.sectors.len() as u64;
        let longest = [8, 64, 300][self.random.below(3) as usize];
        // Half of the load goes to a few stripes, so that requests touch the same stripes.
        let span = if self.random.one_in(2) { sectors.min(200) } else { sectors };
        let first = self.random.below(span);
        (first as usize, 1 + self.random.below(longest.min(sectors - first)) as usize)
    }

    fn client(&mut self) {
        if self.pending.len() > 12 {
            return;
        }
        let (first, count) = self.range();
        let (offset, len) = (VolumeOffset((first * SECTOR) as u64), (count * SECTOR) as u64);
        self.model.clock += 1;
        let began = self.model.clock;
        match self.random.below(10) {
            0..4 => {
                self.value += 1;
                let value = self.value;
                let fua = self.random.one_in(5);
                let bytes: Vec<u8> = (first..first + count).flat_map(|s| content(value, s)).collect();
                self.model.begin(first, count, value);
                let id = self.sim().submit_write(offset.0, &bytes, fua);
                self.pending.push((id, Pending::Write { first, count, value, began, fua }));
            }
            4 => {
                let fua = self.random.one_in(5);
                let may_unmap = self.random.one_in(2);
                // Zeroes have no write number, so they must not overlap anything in flight.
                let busy = |s: &Vec<Version>| s.iter().any(|v| v.ended.is_none());
                if self.model.sectors[first..first + count].iter().any(busy) {
                    return;
                }
                if self.random.one_in(2) {
                    self.model.begin(first, count, 0);
                    let request =
                        ClientRequest::WriteZeroes { offset, len, may_unmap, fast_only: false, fua };
                    let id = self.sim().submit(request);
                    self.pending.push((id, Pending::Write { first, count, value: 0, began, fua }));
                } else {
                    self.model.begin(first, count, 0);
                    let id = self.sim().submit(ClientRequest::Trim { offset, len, fua });
                    self.pending.push((id, Pending::Trim { first, count, began }));
                }
            }
            5 => {
                let id = self.sim().submit(ClientRequest::Flush);
                self.pending.push((id, Pending::Flush { began }));
            }
            _ => {
                let id = self.sim().submit_read(offset.0, count * SECTOR);
                self.pending.push((id, Pending::Read { first, count, began }));
            }
        }
    }

    /// Members that are missing or not whole.
    fn impaired(&mut self) -> Vec<usize> {
        let n = self.n;
        let sim = self.sim();
        let status = sim.status();
        (0..n)
            .filter(|&at| {
                let member = &status.members[at];
                let disk = member.device.and_then(|d| sim.disks.get(&d.0));
                member.state != MemberState::Online
                    || disk
                        .is_none_or(|d| d.dead || d.full || !d.bad_blocks.is_empty() || d.failing_flushes > 0)
            })
            .collect()
    }

    fn fault(&mut self) {
        let impaired = self.impaired();
        if impaired.len() >= self.m {
            return;
        }
        let member = self.random.below(self.n as u64) as u16;
        if impaired.contains(&usize::from(member)) {
            return;
        }
        // Requests that met an earlier, healed fault must not meet this one, too.
        self.finish_requests();
        for _ in 0..self.random.below(8) {
            self.client();
        }
        for _ in 0..self.random.below(30) {
            self.sim().step();
        }
        if self.impaired().len() > impaired.len() {
            return;
        }
        let region = self.sim().data_region();
        let kind = self.random.below(5);
        let Some(id) = self.sim().disk_of(member) else { return };
        let mut random = self.random.clone();
        self.random.next_u64();
        let (dead, bad, flush, admin) = (self.with('d'), self.with('b'), self.with('f'), self.with('a'));
        let disk = self.sim().disks.get_mut(&id).expect("a disk");
        match kind {
            0 if dead => disk.dead = true,
            1 if flush => disk.failing_flushes = 1,
            2 if bad => {
                let blocks = (region.end - region.start) / 4096;
                disk.bad_blocks = (0..4).map(|_| region.start / 4096 + random.below(blocks)).collect();
            }
            3 if admin => {
                let _ = self.sim().admin(AdminRequest::Fail { member: MemberIndex(member) });
            }
            4 if admin => {
                let _ = self.sim().admin(AdminRequest::Offline { member: MemberIndex(member) });
            }
            _ => return,
        }
        self.log.push(format!("fault {kind} on {member}"));
    }

    fn heal(&mut self) {
        let n = self.n as u64;
        let member = self.random.below(n) as u16;
        let index = MemberIndex(member);
        let state = self.sim().status().members[usize::from(member)].state;
        let pick = self.random.below(4);
        let building = self.sim().status().members.iter().any(|m| m.replacement.is_some());
        match (state, pick) {
            (MemberState::Online, 0) if self.with('r') && !building => {
                let device = self.sim().add_blank_disk();
                self.log.push(format!("replace {member} while online"));
                let _ = self.sim().admin(AdminRequest::Replace { member: index, device });
            }
            (MemberState::Online, _) if pick == 1 => {
                let request = [AdminRequest::ScrubStart, AdminRequest::ScrubPause, AdminRequest::ScrubStop];
                let which = self.random.below(3) as usize;
                self.log.push(format!("scrub {which}"));
                let _ = self.sim().admin(request.into_iter().nth(which).expect("three"));
            }
            (_, 1) => {
                let device = self.sim().add_blank_disk();
                self.log.push(format!("replace {member} in state {state:?}"));
                let _ = self.sim().admin(AdminRequest::Replace { member: index, device });
            }
            (_, 2) => {
                let device = self.sim().add_blank_disk();
                self.log.push(format!("online {member} blank"));
                let _ = self.sim().admin(AdminRequest::Online { member: index, device });
            }
            _ => {}
        }
    }

    fn restart(&mut self) -> bool {
        // The end of a rebuild may not be recorded yet.
        let impaired = !self.impaired().is_empty() || self.model.clock < self.last_impaired + 60;
        let kind = self.random.below(3);
        let (kind, word) = match kind {
            0 if self.with('k') => (0, "kill"),
            1 if self.with('p') => (1, "power cut"),
            2 if self.with('s') => (2, "stop"),
            _ => return true,
        };
        self.log.push(word.into());
        let old_disks_stay = self.with('o');
        if kind == 2 {
            self.finish_requests();
            let sim = self.sim();
            let id = sim.submit_admin(AdminRequest::Stop);
            let mut steps = 0;
            while sim.poll_admin(id).is_none() {
                if !sim.step() {
                    sim.sleep(100);
                }
                steps += 1;
                assert!(steps < 100_000, "the stop hangs: {:?}", sim.status());
            }
        }
        let mut sim = self.sim.take().expect("it runs");
        let status = sim.status();
        let used: Vec<u32> = status
            .members
            .iter()
            .flat_map(|m| [m.device, m.replacement.map(|new| new.device)])
            .flatten()
            .map(|d| d.0)
            .collect();
        // Disks that have left service may be unplugged.
        sim.disks.retain(|id, _| old_disks_stay || used.contains(id));
        for disk in sim.disks.values_mut() {
            disk.failing_flushes = 0;
            disk.bad_blocks.clear();
        }
        let restarted = match kind {
            0 => sim.kill_and_restart(false),
            1 => sim.power_cut_and_restart(false),
            _ => sim.kill_where(false, |_, _| false),
        };
        if kind != 2 {
            self.pending.clear();
            self.model.killed(kind == 1);
        }
        match restarted {
            Ok(sim) => {
                self.sim = Some(sim);
                let states: Vec<_> = self.sim().status().members.iter().map(|m| m.state).collect();
                assert!(
                    impaired || states.iter().all(|s| *s == MemberState::Online),
                    "after a {word} of a whole array: {states:?}"
                );
                true
            }
            Err(error) => {
                // If k <= m, the remaining members may be no majority, and the other half could be serving.
                let minority = 2 * self.m >= self.n && error.to_string().contains("not a majority");
                assert!(impaired && kind != 2 && minority, "after a {word}: {error}");
                false
            }
        }
    }

    fn finish_requests(&mut self) {
        for _ in 0..200_000 {
            if self.pending.is_empty() {
                return;
            }
            if !self.sim().step() {
                self.sim().sleep(100);
            }
            self.reap();
        }
        panic!("{} requests hang: {:?}", self.pending.len(), self.sim().status());
    }

    fn check_all(&mut self) {
        self.finish_requests();
        let sectors = self.model.sectors.len();
        for first in (0..sectors).step_by(600) {
            let count = 600.min(sectors - first);
            self.model.clock += 1;
            let began = self.model.clock;
            let id = self.sim().submit_read((first * SECTOR) as u64, count * SECTOR);
            self.pending.push((id, Pending::Read { first, count, began }));
            self.finish_requests();
        }
    }

    fn run(&mut self) {
        for _ in 0..1500 {
            match self.random.below(200) {
                0 | 1 => self.fault(),
                2 | 3 => self.heal(),
                4 if self.random.one_in(2) => {
                    if !self.restart() {
                        return;
                    }
                }
                5 => {
                    let ms = self.random.below(4000);
                    self.sim().sleep(ms);
                }
                6..60 => self.client(),
                _ => {
                    for _ in 0..self.random.below(8) {
                        self.sim().step();
                    }
                }
            }
            self.reap();
            if !self.impaired().is_empty() {
                self.last_impaired = self.model.clock;
            }
            assert_ne!(self.sim().status().state, ArrayState::Failed, "failed within the budget");
        }
        self.check_all();
        // Makes everything whole again, and checks it.
        for member in 0..self.n as u16 {
            let status = self.sim().status().members[usize::from(member)].clone();
            let index = MemberIndex(member);
            if let Some(id) = status.device.map(|d| d.0) {
                let bad = self.sim().disks[&id].dead;
                if bad {
                    let _ = self.sim().admin(AdminRequest::Fail { member: index });
                }
                let disk = self.sim().disks.get_mut(&id).expect("a disk");
                disk.failing_flushes = 0;
            }
            let state = self.sim().status().members[usize::from(member)].state;
            if !matches!(state, MemberState::Online | MemberState::Rebuilding) && status.replacement.is_none()
            {
                let device = self.sim().add_blank_disk();
                self.sim().admin(AdminRequest::Replace { member: index, device }).expect("admitted");
            }
        }
        self.sim().settle();
        let status = self.sim().status();
        assert_eq!(status.state, ArrayState::Online, "{status:?}");
        for disk in self.sim().disks.values_mut() {
            disk.bad_blocks.clear();
        }
        let _ = self.sim().admin(AdminRequest::ScrubStop);
        self.sim().admin(AdminRequest::ScrubStart).expect("a scrub starts");
        self.sim().settle();
        let scrub = self.sim().status().last_scrub.expect("ended");
        assert_eq!((scrub.errors, scrub.repaired), (0, 0), "the last scrub");
        let lost = self.random.choose(self.m, self.n);
        for member in lost {
            self.sim().admin(AdminRequest::Fail { member: MemberIndex(member as u16) }).expect("failed");
        }
        self.check_all();
    }
}

fn chaos(seed: u64, faults: &str) -> Result<(), String> {
    let mut random = Random::new(seed.wrapping_mul(77));
    let (k, m) = [(1u16, 1u16), (2, 1), (3, 2), (4, 2), (2, 2), (5, 3), (1, 2)][random.below(7) as usize];
    let chunk = [4096u32, 16384][random.below(2) as usize];
    let stripes = 8 + random.below(24);
    // Not a whole number of stripes.
    let volume_bytes =
        stripes * u64::from(k) * u64::from(chunk) + 4096 * random.below(u64::from(k * 4).min(3));
    let shape = SimShape { volume_bytes, ..SimShape::new(k, m, chunk, 1) };
    let shape = match seed % 4 {
        0 => shape,
        1 => shape.logged(ChecksumKind::Crc32c, 256 << 10),
        2 => shape.logged(ChecksumKind::Blake3, 1 << 20),
        _ => shape.logged(ChecksumKind::None, 512 << 10),
    };
    let mut chaos = Chaos {
        sim: Some(SimArray::create(shape, seed)),
        model: Model::new((volume_bytes / 512) as usize),
        pending: Vec::new(),
        random,
        n: usize::from(k + m),
        m: usize::from(m),
        faults: faults.into(),
        log: Vec::new(),
        value: 0,
        errors_allowed: false,
        last_impaired: 0,
    };
    let result = catch_unwind(AssertUnwindSafe(|| chaos.run()));
    result.map_err(|panic| {
        let text =
            panic.downcast_ref::<String>().cloned().or(panic.downcast_ref::<&str>().map(|s| (*s).into()));
        let mut text = text.unwrap_or_default();
        text.truncate(400);
        format!(
            "seed {seed} ({k}+{m}, chunk {chunk}, checksum {}): {text}\n   after {:?}",
            shape.checksum, chaos.log
        )
    })
}

#[test]
fn chaos_within_the_budget_loses_nothing() {
    let seeds = std::env::var("CALPE_CHAOS_SEEDS").unwrap_or_else(|_| "0..300".into());
    let faults = std::env::var("CALPE_CHAOS_FAULTS").unwrap_or_else(|_| "dbfarkpso".into());
    let (from, to) = seeds.split_once("..").expect("from..to");
    let (from, to): (u64, u64) = (from.parse().expect("a number"), to.parse().expect("a number"));
    let failures: Vec<String> = (from..to).filter_map(|seed| chaos(seed, &faults).err()).collect();
    for failure in &failures {
        println!("{failure}");
    }
    assert!(failures.is_empty(), "{} of {} seeds fail", failures.len(), to - from);
}
