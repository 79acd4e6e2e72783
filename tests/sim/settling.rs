//! What happens while a replay that waits for room is put in place beside clients ("settling"), and while
//! members wait for the log before they go offline.

use crate::scenes::{CHUNK, filled, live};
use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{DiskRegion, HungEnd, OpKinds, PassingFault, Random, SimArray, Trouble};
use calpe_core::units::MemberIndex;
use calpe_core::volume::{AdminRequest, ArrayState, ClientReply, ClientRequest, LogState};
use std::collections::HashMap;

const BLOCK: usize = 4096;
const IN_PLACE: [DiskRegion; 2] = [DiskRegion::Data, DiskRegion::Pages];

struct World {
    sim: SimArray,
    model: Vec<u8>,
    /// Writes that were not acknowledged, by block.
    doubt: HashMap<usize, Vec<u8>>,
    pending: Vec<(u64, usize, u8)>,
    random: Random,
    trace: Vec<String>,
    settlings: usize,
}

impl World {
    fn below(&mut self, n: u64) -> u64 {
        self.random.below(n)
    }

    fn fill(&mut self, id: u32, trouble: Trouble, one_in: u64) {
        let seed = self.random.next_u64();
        let disk = self.sim.disks.get_mut(&id).expect("a disk");
        for region in IN_PLACE {
            let ranges = region.ranges(disk);
            if !ranges.is_empty() {
                let fault = PassingFault::new(trouble).on(OpKinds::WRITES).within(ranges);
                disk.inject(fault.one_in(one_in, seed));
            }
        }
    }

    fn ids(&self) -> Vec<u32> {
        self.sim.disks.keys().copied().collect()
    }

    fn clear(&mut self) {
        for id in self.ids() {
            let disk = self.sim.disks.get_mut(&id).expect("a disk");
            disk.clear_faults();
            disk.dead = false;
            self.sim.end_hung(id, HungEnd::Late);
        }
    }

    fn write(&mut self) {
        let blocks = (self.model.len() / BLOCK) as u64;
        let block = self.below(blocks) as usize;
        let byte = self.below(256) as u8;
        let id = self.sim.submit_write((block * BLOCK) as u64, &[byte; BLOCK], true);
        self.pending.push((id, block, byte));
        self.doubt.entry(block).or_default().push(byte);
    }

    fn poll(&mut self) {
        for (id, block, byte) in std::mem::take(&mut self.pending) {
            match self.sim.poll(id) {
                None => self.pending.push((id, block, byte)),
                Some(Ok(_)) => {
                    // Other writes of the block may still be on their way; they stay in doubt.
                    self.model[block * BLOCK..(block + 1) * BLOCK].fill(byte);
                    if self.pending.iter().all(|(_, other, _)| *other != block)
                        && self.doubt.get(&block).is_some_and(|d| d.last() == Some(&byte))
                    {
                        self.doubt.remove(&block);
                    }
                }
                Some(Err(_)) => {}
            }
        }
    }

    fn check(&self, at: usize, bytes: &[u8], what: &str) {
        for (index, now) in bytes.chunks(BLOCK).enumerate() {
            let block = at / BLOCK + index;
            let is = now == &self.model[block * BLOCK..(block + 1) * BLOCK];
            let may = self.doubt.get(&block).is_some_and(|d| d.iter().any(|b| now == [*b; BLOCK]));
            assert!(
                is || may,
                "{what}: wrong bytes in block {block}, trace {:#?}, notices {:#?}",
                self.trace,
                self.sim.notices
            );
        }
    }

    fn read_some(&mut self) {
        self.poll();
        let (before, doubt) = (self.model.clone(), self.doubt.clone());
        let chunks = (self.model.len() / CHUNK) as u64;
        let reads: Vec<(usize, u64)> = (0..chunks)
            .map(|at| at as usize * CHUNK)
            .map(|at| (at, self.sim.submit_read(at as u64, CHUNK)))
            .collect();
        live(&mut self.sim, 2);
        self.poll();
        for (at, id) in reads {
            if let Some(Ok(ClientReply::Data(bytes))) = self.sim.poll(id) {
                // A write may have ended since, before or after the read.
                let changed: Vec<usize> = (at / BLOCK..(at + CHUNK) / BLOCK)
                    .filter(|block| {
                        doubt.contains_key(block) || before[block * BLOCK] != self.model[block * BLOCK]
                    })
                    .collect();
                let mut bytes = bytes.to_vec();
                for block in changed {
                    let now = &mut bytes[block * BLOCK - at..(block + 1) * BLOCK - at];
                    let was = *now == before[block * BLOCK..(block + 1) * BLOCK]
                        || doubt.get(&block).is_some_and(|d| d.iter().any(|b| *now == [*b; BLOCK]));
                    if was {
                        now.copy_from_slice(&self.model[block * BLOCK..(block + 1) * BLOCK]);
                    }
                }
                self.check(at, &bytes, "read");
            }
        }
    }

    fn restart(mut self, power: bool) -> World {
        self.poll();
        self.pending.clear();
        self.trace.push(format!("restart power {power}"));
        for id in self.ids() {
            self.sim.disks.get_mut(&id).expect("a disk").dead = false;
        }
        let notices = format!("{:?}", self.sim.notices);
        let sim =
            if power { self.sim.power_cut_and_restart(false) } else { self.sim.kill_and_restart(false) };
        let sim = sim.unwrap_or_else(|e| panic!("it starts: {e:?} {:#?} {notices}", self.trace));
        World { sim, ..self }
    }

    fn bring_back(&mut self, member: u16) {
        let Some(disk) = self.sim.disk_out_of_use(member) else { return };
        self.sim.disks.get_mut(&disk).expect("a disk").dead = false;
        let device = self.sim.reopen_disk(disk);
        let id = self.sim.submit_admin(AdminRequest::Online { member: MemberIndex(member), device });
        live(&mut self.sim, 1);
        let end = self.sim.poll_admin(id);
        self.trace.push(format!("online {member}: {end:?}"));
    }

    fn act(mut self, width: u16) -> World {
        let member = self.below(u64::from(width)) as u16;
        let action = self.below(15);
        let status = self.sim.status();
        self.settlings += usize::from(status.log == LogState::Settling);
        let states: Vec<&str> = status.members.iter().map(|m| m.state.as_str()).collect();
        let dirty = status.dirty;
        self.trace.push(format!("{action} on {member}; {:?} {states:?} dirty {dirty}", status.log));
        if std::env::var("CALPE_SIM_TRACE").is_ok() {
            eprintln!("{:#?} {:#?}", self.trace.last(), self.sim.notices.last().map(|n| &n.text));
        }
        match action {
            0 => {
                if let Some(id) = self.sim.disk_of(member) {
                    self.sim.disks.get_mut(&id).expect("a disk").clear_faults();
                }
            }
            1 => {
                if let Some(id) = self.sim.disk_of(member) {
                    self.fill(id, Trouble::NoSpace, 1);
                }
            }
            2 => {
                let other = self.below(u64::from(width)) as u16;
                let a = self.sim.submit_admin(AdminRequest::Offline { member: MemberIndex(member) });
                let b = self.sim.submit_admin(AdminRequest::Offline { member: MemberIndex(other) });
                if self.random.one_in(3)
                    && let Some(id) = self.sim.disk_of(member)
                {
                    self.sim.device_hangs(id);
                }
                live(&mut self.sim, 4);
                let ends = (self.sim.poll_admin(a), self.sim.poll_admin(b));
                assert!(ends.0.is_some() && ends.1.is_some(), "offline ends: {ends:?} {:#?}", self.trace);
                self.trace.push(format!("offline {member} {other}: {ends:?}"));
            }
            3 => {
                let id = self.sim.submit_admin(AdminRequest::Fail { member: MemberIndex(member) });
                let end = self.sim.poll_admin(id);
                self.trace.push(format!("fail: {end:?}"));
            }
            4 => {
                // More members than the array survives leave, and come back.
                let count = 1 + self.below(u64::from(width));
                for at in 0..count as u16 {
                    if let Some(id) = self.sim.disk_of((member + at) % width) {
                        self.sim.device_hangs(id);
                    }
                    for _ in 0..self.below(10) {
                        self.sim.step();
                    }
                }
                live(&mut self.sim, 1);
                for at in (0..count as u16).rev() {
                    self.bring_back((member + at) % width);
                }
            }
            5 | 6 => self.bring_back(member),
            7 => {
                let device = self.sim.add_blank_disk();
                let id = self.sim.submit_admin(AdminRequest::Replace { member: MemberIndex(member), device });
                for _ in 0..self.below(80) {
                    self.sim.step();
                }
                let end = self.sim.poll_admin(id);
                self.trace.push(format!("replace: {end:?}"));
            }
            8 => self.read_some(),
            9 => {
                for _ in 0..1 + self.below(8) {
                    self.write();
                }
                for _ in 0..self.below(100) {
                    self.sim.step();
                }
            }
            10 => {
                let id = self.sim.submit(ClientRequest::Flush);
                live(&mut self.sim, 1);
                let _ = self.sim.poll(id);
            }
            11 => {
                for _ in 0..self.below(200) {
                    self.sim.step();
                }
            }
            12 => {
                let power = self.random.one_in(2);
                self = self.restart(power);
                let steps = self.below(200);
                for _ in 0..steps {
                    self.sim.step();
                }
                live(&mut self.sim, 2);
            }
            13 => {
                if let Some(id) = self.sim.disk_of(member) {
                    self.fill(id, Trouble::Hang, 4);
                    live(&mut self.sim, 1);
                    if self.random.one_in(2) {
                        self.sim.device_hangs(id);
                    }
                }
            }
            _ => {
                for id in self.ids() {
                    self.sim.disks.get_mut(&id).expect("a disk").clear_faults();
                    if self.random.one_in(2) {
                        self.sim.end_hung(id, HungEnd::Late);
                    }
                }
                self.sim.sleep(1000);
                for _ in 0..self.below(120) {
                    self.sim.step();
                }
            }
        }
        self.poll();
        self
    }
}

fn play(seed: u64) -> usize {
    let (data, parity) = [(2, 1), (3, 2), (2, 2)][seed as usize % 3];
    let width = data + parity;
    let checksum = [ChecksumKind::Blake3, ChecksumKind::Crc32c, ChecksumKind::None][(seed / 3) as usize % 3];
    let (sim, model) = filled(data, parity, checksum);
    let mut world = World {
        sim,
        model,
        doubt: HashMap::new(),
        pending: Vec::new(),
        random: Random::new(seed),
        trace: vec![format!("seed {seed}")],
        settlings: 0,
    };
    for _ in 0..3 {
        for _ in 0..1 + world.below(25) {
            world.write();
        }
        while world.sim.in_flight() > 0 && world.pending.len() > 3 {
            world.sim.step();
            world.poll();
        }
        let ids = world.ids();
        for id in ids {
            world.fill(id, Trouble::NoSpace, 1);
        }
        let power = world.random.one_in(2);
        world = world.restart(power);
        live(&mut world.sim, 3);
        for _ in 0..1 + world.below(7) {
            world = world.act(width);
        }
        // Ends all faults.
        world.trace.push("well".into());
        world.clear();
        live(&mut world.sim, 35);
        world.clear();
        world.sim.settle();
        world.poll();
        for _ in 0..2 {
            if world.sim.status().state == ArrayState::Failed || !world.pending.is_empty() {
                let failed = world.sim.status().state == ArrayState::Failed;
                assert!(failed || world.pending.is_empty(), "writes hang: {:#?}", world.trace);
                world = world.restart(false);
                live(&mut world.sim, 3);
                world.sim.settle();
            }
        }
        for _ in 0..2 {
            for member in 0..width {
                let state = world.sim.status().members[usize::from(member)].state;
                if state != MemberState::Online && state != MemberState::Rebuilding {
                    world.bring_back(member);
                    world.sim.settle();
                }
            }
        }
        let status = world.sim.status();
        assert_eq!(
            (status.state, status.log),
            (ArrayState::Online, LogState::Serving),
            "{:#?} {:#?}",
            world.trace,
            world.sim.notices
        );
        let bytes = world
            .sim
            .read(0, world.model.len())
            .unwrap_or_else(|e| panic!("{e:?} {:#?} {:#?}", world.trace, world.sim.notices));
        world.check(0, &bytes, "end");
        world.model = bytes;
        world.doubt.clear();
        let lost: Vec<String> = world
            .sim
            .notices
            .iter()
            .map(|n| format!("{:?} {}", n.kind, n.text))
            .filter(|t| t.starts_with("RowsLost") || t.starts_with("WritesLost"))
            .collect();
        assert!(lost.is_empty(), "{lost:?} {:#?}", world.trace);
        let scrub = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.sim.assert_scrub_clean()));
        assert!(scrub.is_ok(), "scrub {:#?}", world.trace);
    }
    world.settlings
}

#[test]
fn whatever_happens_while_a_replay_settles_no_byte_is_wrong() {
    let range = std::env::var("CALPE_SIM_SEEDS").unwrap_or("0..60".into());
    let (from, to) = range.split_once("..").expect("a range");
    let mut failed = Vec::new();
    let mut settlings = 0;
    for seed in from.parse().unwrap()..to.parse().unwrap() {
        match std::panic::catch_unwind(|| play(seed)) {
            Ok(count) => settlings += count,
            Err(_) => failed.push(seed),
        }
    }
    println!("settling at {settlings} actions");
    assert!(failed.is_empty(), "seeds {failed:?}");
}

/// A member that leaves at any moment while a replay settles, and comes back unchanged, is caught up.
#[test]
fn a_member_that_leaves_while_a_replay_settles_is_not_called_rolled_back() {
    let mut whole = Vec::new();
    for wear in 0..160 {
        let (mut sim, _) = filled(2, 1, ChecksumKind::Blake3);
        for at in 0..6 {
            sim.write(at * 3 * BLOCK as u64, &[at as u8; BLOCK]).expect("written");
        }
        let id = sim.submit(ClientRequest::Flush);
        sim.wait(id).expect("flushed");
        fill_all(&mut sim);
        let mut sim = sim.kill_and_restart(false).expect("it starts");
        live(&mut sim, 4);
        assert_eq!(sim.status().log, LogState::Settling);
        sim.disks.values_mut().for_each(|disk| disk.clear_faults());
        sim.sleep(1000);
        for _ in 0..wear {
            sim.step();
        }
        let log = sim.status().log;
        sim.admin(AdminRequest::Fail { member: MemberIndex(1) }).expect("it leaves");
        sim.settle();
        let disk = sim.disk_out_of_use(1).expect("its disk");
        let device = sim.reopen_disk(disk);
        sim.admin(AdminRequest::Online { member: MemberIndex(1), device }).expect("it returns");
        sim.settle();
        let text = sim.notices.iter().find(|n| format!("{:?}", n.kind) == "MemberRebuiltWhole");
        if let Some(notice) = text {
            whole.push((wear, log, notice.text.clone()));
        }
    }
    assert!(whole.is_empty(), "{whole:#?}");
}

/// A request about a member that has got a new device since is not carried out on that device.
#[test]
fn a_departure_does_not_take_out_the_device_that_has_replaced_a_faulted_one() {
    let (mut sim, _) = filled(2, 1, ChecksumKind::Blake3);
    sim.write(0, &[1; BLOCK]).expect("written");
    for disk in sim.disks.values_mut() {
        for region in IN_PLACE {
            let ranges = region.ranges(disk);
            disk.inject(PassingFault::new(Trouble::NoSpace).on(OpKinds::WRITES).within(ranges));
        }
    }
    let offline = sim.submit_admin(AdminRequest::Offline { member: MemberIndex(1) });
    sim.sleep(500);
    assert!(sim.poll_admin(offline).is_none(), "it waits");
    let id = sim.disk_of(1).expect("a disk");
    sim.device_hangs(id);
    let device = sim.add_blank_disk();
    sim.admin(AdminRequest::Replace { member: MemberIndex(1), device }).expect("it is replaced");
    sim.disks.values_mut().for_each(|disk| disk.clear_faults());
    live(&mut sim, 5);
    let end = sim.poll_admin(offline);
    assert_ne!(sim.status().members[1].state, MemberState::Offline, "{end:?} {:#?}", sim.notices);
}

/// As [`live`]; an error with the number of operations if more than 20,000 come within a tenth of a second.
fn lives(sim: &mut SimArray, seconds: u64) -> Result<(), usize> {
    for _ in 0..seconds * 10 {
        let mut steps = 0;
        while sim.step() {
            steps += 1;
            if steps > 20_000 {
                return Err(steps);
            }
        }
        sim.sleep(100);
    }
    Ok(())
}

/// An array of 2+1 that failed `wear` steps after the marking as clean began.
fn failed_half_clean(wear: usize) -> SimArray {
    let (mut sim, _) = filled(2, 1, ChecksumKind::Blake3);
    sim.write(0, &[1; BLOCK]).expect("written");
    sim.settle();
    sim.write(0, &[2; BLOCK]).expect("written");
    // Waits until the array is about to be marked clean.
    for _ in 0..100 {
        if !sim.status().dirty {
            break;
        }
        while sim.step() {}
        sim.sleep(100);
    }
    assert!(!sim.status().dirty);
    for _ in 0..wear {
        sim.step();
    }
    for member in [0, 1] {
        let id = sim.disk_of(member).expect("a disk");
        sim.device_hangs(id);
    }
    lives(&mut sim, 1).expect("it is quiet");
    sim
}

/// Fills the regions of all disks in which blocks and pages go in place.
fn fill_all(sim: &mut SimArray) {
    for disk in sim.disks.values_mut() {
        for region in IN_PLACE {
            let ranges = region.ranges(disk);
            disk.inject(PassingFault::new(Trouble::NoSpace).on(OpKinds::WRITES).within(ranges));
        }
    }
}

fn bring_both_back(sim: &mut SimArray) {
    for member in [1, 0] {
        let Some(disk) = sim.disk_out_of_use(member) else { continue };
        let device = sim.reopen_disk(disk);
        sim.submit_admin(AdminRequest::Online { member: MemberIndex(member), device });
    }
}

/// The superblocks are not written without end while a replay waits for room.
#[test]
fn superblocks_are_not_written_without_end_while_a_replay_waits() {
    let mut endless = Vec::new();
    for wear in 0..60 {
        let mut sim = failed_half_clean(wear);
        fill_all(&mut sim);
        bring_both_back(&mut sim);
        if lives(&mut sim, 5).is_err() {
            endless.push((wear, sim.status().log, sim.status().state));
        }
    }
    assert!(endless.is_empty(), "{endless:?}");
}

/// An array that fails while it is about to be marked clean serves again when its members are back and, with
/// `full`, there is room again.
fn returns_while_half_clean(full: bool) -> Vec<(usize, LogState, ArrayState, bool)> {
    let mut endless = Vec::new();
    for wear in 0..30 {
        let mut sim = failed_half_clean(wear);
        if full {
            fill_all(&mut sim);
        }
        bring_both_back(&mut sim);
        let read = sim.submit_read(0, BLOCK);
        for second in 0..20 {
            let _ = lives(&mut sim, 1);
            if second == 4 {
                sim.disks.values_mut().for_each(|disk| disk.clear_faults());
            }
        }
        let is_read = matches!(sim.poll(read), Some(Ok(_)));
        if sim.status().log != LogState::Serving || !is_read {
            endless.push((wear, sim.status().log, sim.status().state, is_read));
        }
    }
    endless
}

#[test]
fn an_array_that_failed_half_clean_serves_again() {
    let endless = returns_while_half_clean(false);
    assert!(endless.is_empty(), "{endless:?}");
}

#[test]
fn an_array_that_failed_half_clean_and_full_serves_again_when_there_is_room() {
    let endless = returns_while_half_clean(true);
    assert!(endless.is_empty(), "{endless:?}");
}

/// Every member is full, and one of them is being caught up: nothing can be spared, and counting that must
/// not overflow (seed 25 of the above).
#[test]
fn a_member_under_construction_that_is_full_too_is_not_counted_as_one_in_service() {
    for seed in [25, 30, 32] {
        play(seed);
    }
}
