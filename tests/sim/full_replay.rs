//! The storage of members is full when their array starts again after a crash, so the content of the redo log
//! cannot be put in place. Reads are served all the same, everything else ends in bounded time, and once
//! there is room everything goes on by itself.

use crate::scenes::{CHUNK, filled, live};
use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{DiskRegion, OpKinds, PassingFault, Random, SimArray, Trouble};
use calpe_core::units::MemberIndex;
use calpe_core::volume::{AdminRequest, ArrayState, ClientError, ClientReply, ClientRequest, LogState, Rest};

const BLOCK: usize = 4096;
const SECOND: u64 = 1_000_000_000;

/// An array and the expected content of its volume.
struct Full {
    sim: SimArray,
    model: Vec<u8>,
    random: Random,
}

impl Full {
    fn new(data: u16, parity: u16, checksum: ChecksumKind, seed: u64) -> Full {
        let (sim, model) = filled(data, parity, checksum);
        Full { sim, model, random: Random::new(seed) }
    }

    /// Makes small writes that are acknowledged; if the storage is full, they are only in the log.
    fn write_some(&mut self, count: usize) {
        for _ in 0..count {
            let at = self.random.below((self.model.len() / BLOCK) as u64) as usize * BLOCK;
            let byte = self.random.below(256) as u8;
            self.model[at..at + BLOCK].fill(byte);
            self.sim.write(at as u64, &[byte; BLOCK]).expect("written to the log");
        }
    }

    /// Makes the storage of these regions of a member full.
    fn fill(&mut self, member: u16, regions: &[DiskRegion]) {
        let id = self.sim.disk_of(member).expect("it has a disk");
        let disk = self.sim.disks.get_mut(&id).expect("a disk");
        for region in regions {
            let ranges = region.ranges(disk);
            disk.inject(PassingFault::new(Trouble::NoSpace).on(OpKinds::WRITES).within(ranges));
        }
    }

    fn fill_all(&mut self, regions: &[DiskRegion]) {
        (0..self.sim.status().members.len() as u16).for_each(|member| self.fill(member, regions));
    }

    fn make_room(&mut self) {
        self.sim.disks.values_mut().for_each(|disk| disk.clear_faults());
    }

    fn restart(self, power: bool) -> Full {
        let Full { sim, model, random } = self;
        let sim = if power { sim.power_cut_and_restart(false) } else { sim.kill_and_restart(false) };
        Full { sim: sim.expect("it starts"), model, random }
    }

    fn flush(&mut self) {
        let id = self.sim.submit(ClientRequest::Flush);
        self.sim.wait(id).expect("flushed");
    }

    /// Asserts that every stripe is read right within this many seconds, whatever else waits.
    #[track_caller]
    fn read_within(&mut self, seconds: u64) {
        let reads: Vec<(usize, u64)> = (0..self.model.len())
            .step_by(CHUNK)
            .map(|at| (at, self.sim.submit_read(at as u64, CHUNK)))
            .collect();
        live(&mut self.sim, seconds);
        for (at, id) in reads {
            match self.sim.poll(id) {
                Some(Ok(ClientReply::Data(bytes))) => {
                    assert!(bytes[..] == self.model[at..at + CHUNK], "wrong bytes at {at}");
                }
                other => panic!("read at {at}: {other:?}; {:?}", self.sim.notices),
            }
        }
    }

    #[track_caller]
    fn assert_sound(mut self) {
        for _ in 0..2 {
            self.sim.settle();
            assert_eq!(self.sim.status().log, LogState::Serving, "{:?}", self.sim.notices);
            let read = self.sim.read(0, self.model.len()).expect("every byte can be read");
            assert!(read == self.model, "{:?}", self.sim.notices);
            self.sim.assert_scrub_clean();
            self = self.restart(true);
        }
    }
}

const IN_PLACE: [DiskRegion; 2] = [DiskRegion::Data, DiskRegion::Pages];

#[test]
fn reads_and_flushes_are_served_while_a_replay_waits_for_room() {
    for checksum in [ChecksumKind::Blake3, ChecksumKind::None] {
        for (data, parity) in [(2, 1), (3, 2), (2, 0)] {
            for power in [false, true] {
                let mut full = Full::new(data, parity, checksum, 1);
                full.fill_all(&IN_PLACE);
                full.write_some(20);
                full.flush();
                full = full.restart(power);
                full.read_within(4);
                let status = full.sim.status();
                assert_eq!((status.log, status.state), (LogState::Settling, ArrayState::Online));
                let would = full.sim.would(&AdminRequest::Stop).expect("it may").0;
                assert!(would.starts_with("stopped, and not cleanly"), "{would}");
                let flush = full.sim.submit(ClientRequest::Flush);
                let write = full.sim.submit_write(0, &[9; BLOCK], false);
                live(&mut full.sim, 5);
                assert!(matches!(full.sim.poll(flush), Some(Ok(_))), "what was acknowledged is durable");
                assert!(full.sim.poll(write).is_none(), "it waits for room");
                live(&mut full.sim, 30);
                assert_eq!(
                    full.sim.poll(write).expect("it has ended").map(|_| ()),
                    Err(ClientError::NoSpace)
                );
                full.read_within(1);
                full.make_room();
                live(&mut full.sim, 3);
                assert_eq!(full.sim.status().log, LogState::Serving);
                full.write_some(5);
                full.assert_sound();
            }
        }
    }
}

#[test]
fn a_write_that_waits_for_a_replay_goes_on_when_there_is_room() {
    let mut full = Full::new(2, 1, ChecksumKind::Blake3, 2);
    full.fill_all(&IN_PLACE);
    full.write_some(10);
    full = full.restart(false);
    full.model[..BLOCK].fill(5);
    let write = full.sim.submit_write(0, &[5; BLOCK], true);
    live(&mut full.sim, 10);
    assert!(full.sim.poll(write).is_none());
    full.make_room();
    live(&mut full.sim, 3);
    assert!(matches!(full.sim.poll(write), Some(Ok(_))));
    full.assert_sound();
}

/// A scrub or a rebuild does nothing before there is room, and everything reported about it says so.
#[test]
fn a_scrub_and_a_rebuild_that_wait_for_a_replay_say_so() {
    const ROOM: &str = "waits until what the redo log holds is in place";
    let mut full = Full::new(2, 1, ChecksumKind::Blake3, 7);
    full.fill_all(&IN_PLACE);
    full.write_some(10);
    full = full.restart(false);
    live(&mut full.sim, 4);
    assert_eq!(full.sim.status().log, LogState::Settling);
    let scrub = AdminRequest::ScrubStart;
    let would = full.sim.would(&scrub).expect("it may begin").0;
    assert_eq!(would, full.sim.admin(scrub).expect("it begins").0);
    assert!(would.contains(ROOM) && would.ends_with("make room"), "{would}");
    let again = full.sim.would(&AdminRequest::ScrubStart).expect_err("there is one").0;
    assert!(again.contains(ROOM), "{again}");

    let device = full.sim.add_blank_disk();
    let replace = AdminRequest::Replace { member: MemberIndex(1), device };
    let would = full.sim.would(&replace).expect("it may be replaced").0;
    let told = full.sim.admin(replace).expect("it is replaced").0;
    for text in [would, told] {
        assert!(text.contains(&format!("that {ROOM}: make room")), "{text}");
    }
    live(&mut full.sim, 5);
    let rests: Vec<_> =
        full.sim.status().activities.iter().map(|pass| (pass.rest, pass.done_bytes)).collect();
    assert_eq!(rests, [(Some(Rest::ForRoom), 0); 2]);
    full.make_room();
    full.sim.settle();
    assert!(full.sim.status().activities.is_empty(), "{:?}", full.sim.status());
    full.assert_sound();
}

#[test]
fn requests_end_when_the_log_itself_has_no_room_for_what_a_replay_notes() {
    let mut full = Full::new(2, 1, ChecksumKind::Blake3, 3);
    full.write_some(10);
    full.flush();
    full.fill_all(&[DiskRegion::Log, DiskRegion::Data, DiskRegion::Pages]);
    full = full.restart(false);
    let read = full.sim.submit_read(0, BLOCK);
    let write = full.sim.submit_write(0, &[9; BLOCK], false);
    let flush = full.sim.submit(ClientRequest::Flush);
    live(&mut full.sim, 20);
    assert!([read, write, flush].iter().all(|&id| full.sim.poll(id).is_none()), "they wait");
    live(&mut full.sim, 13);
    let ends = [read, write, flush].map(|id| full.sim.poll(id).expect("it has ended").map(|_| ()));
    assert_eq!(ends, [Err(ClientError::Io), Err(ClientError::NoSpace), Err(ClientError::NoSpace)]);
    assert_eq!(full.sim.status().log, LogState::Replaying);
    let late = full.sim.submit_write(0, &[9; BLOCK], false);
    live(&mut full.sim, 1);
    assert_eq!(full.sim.poll(late).expect("it ends at once").map(|_| ()), Err(ClientError::NoSpace));
    full.make_room();
    live(&mut full.sim, 3);
    full.assert_sound();
}

#[test]
fn a_member_that_is_full_alone_delays_no_read_and_leaves() {
    let mut full = Full::new(2, 1, ChecksumKind::Blake3, 4);
    full.fill(0, &IN_PLACE);
    full.write_some(10);
    full = full.restart(false);
    full.read_within(3);
    live(&mut full.sim, 25);
    let status = full.sim.status();
    assert_eq!((status.members[0].state, status.log), (MemberState::Missing, LogState::Serving));
    full.write_some(5);
    full.make_room();
    full.sim.settle();
    let disk = full.sim.disk_out_of_use(0).expect("its disk");
    let device = full.sim.reopen_disk(disk);
    full.sim.admin(AdminRequest::Online { member: MemberIndex(0), device }).expect("it returns");
    full.sim.settle();
    assert_eq!(full.sim.status().state, ArrayState::Online, "{:?}", full.sim.notices);
    full.assert_sound();
}

#[test]
fn a_stop_ends_within_seconds_whatever_waits_for_room() {
    let [log, data, pages] = [DiskRegion::Log, DiskRegion::Data, DiskRegion::Pages];
    for regions in [&[data, pages][..], &[log, data, pages]] {
        for (replays, one) in [(true, false), (true, true), (false, false), (false, true)] {
            let mut full = Full::new(2, 1, ChecksumKind::Blake3, 5);
            full.write_some(10);
            match one {
                true => full.fill(1, regions),
                false => full.fill_all(regions),
            }
            if replays {
                full = full.restart(false);
            }
            let ids: Vec<u64> = (0..30)
                .map(|at| full.sim.submit_write(at * BLOCK as u64, &[9; BLOCK], at % 3 == 0))
                .collect();
            live(&mut full.sim, 3);
            let begun = full.sim.now().0;
            full.sim.admin(AdminRequest::Stop).expect("it stops");
            assert!(full.sim.now().0 - begun < 5 * SECOND, "{} ms", (full.sim.now().0 - begun) / 1_000_000);
            for id in ids {
                let end = full.sim.poll(id).expect("it has ended");
                assert!(!matches!(end, Err(ClientError::NoSpace)), "clients ask again");
            }
            assert_eq!(full.sim.in_flight(), 0);
            full.make_room();
            full = full.restart(false);
            full.sim.settle();
            // Writes that were not answered may or may not have happened.
            for at in (0..30).map(|at| at * BLOCK) {
                let now = full.sim.read(at as u64, BLOCK).expect("readable");
                assert!(now == [9; BLOCK] || now == full.model[at..at + BLOCK]);
                full.model[at..at + BLOCK].copy_from_slice(&now);
            }
            full.assert_sound();
        }
    }
}

#[test]
fn a_crash_while_a_replay_waits_for_room_loses_nothing() {
    for power in [false, true] {
        let mut full = Full::new(2, 1, ChecksumKind::Blake3, 6);
        full.fill_all(&IN_PLACE);
        full.write_some(20);
        full.flush();
        for _ in 0..2 {
            full = full.restart(power);
            live(&mut full.sim, 5);
        }
        full.make_room();
        full = full.restart(power);
        full.assert_sound();
    }
}

#[test]
fn crashes_and_losses_while_a_replay_waits_for_room_cost_nothing() {
    for seed in 0..40 {
        let (data, parity) = [(2, 1), (3, 2)][seed as usize % 2];
        let checksum = [ChecksumKind::Blake3, ChecksumKind::Crc32c, ChecksumKind::None][seed as usize % 3];
        let mut full = Full::new(data, parity, checksum, seed);
        for round in 0..3 {
            if full.random.one_in(2) {
                let stripe = usize::from(data) * CHUNK;
                let at = full.random.below((full.model.len() / stripe) as u64) as usize * stripe;
                full.model[at..at + stripe].fill(round);
                full.sim.write(at as u64, &vec![round; stripe]).expect("written");
            }
            let wear = full.random.below(60);
            full.fill_all(&IN_PLACE);
            let count = 1 + full.random.below(25) as usize;
            full.write_some(count);
            full.flush();
            let power = full.random.one_in(2);
            full = full.restart(power);
            full.read_within(4);
            assert_eq!(full.sim.status().log, LogState::Settling, "seed {seed}");
            // Some of the log's content goes in place.
            for member in 0..data + parity {
                if full.random.one_in(3) {
                    let id = full.sim.disk_of(member).expect("a disk");
                    full.sim.disks.get_mut(&id).expect("a disk").clear_faults();
                }
            }
            live(&mut full.sim, 2);
            let mut lost = None;
            if full.random.one_in(3) {
                lost = Some(full.random.below(u64::from(data + parity)) as u16);
                let member = MemberIndex(lost.expect("just chosen"));
                full.sim.admin(AdminRequest::Fail { member }).expect("it leaves");
                live(&mut full.sim, 2);
                full.read_within(2);
            }
            match full.random.below(4) {
                // While the log's content goes in place.
                0 => {
                    full.make_room();
                    full.sim.sleep(1000);
                    for _ in 0..wear {
                        full.sim.step();
                    }
                    full = full.restart(power);
                }
                1 => full = full.restart(!power),
                _ => full.make_room(),
            }
            full.make_room();
            full.sim.settle();
            live(&mut full.sim, 3);
            full.read_within(1);
            if let Some(member) = lost {
                let disk = full.sim.disk_out_of_use(member).expect("its disk");
                let device = full.sim.reopen_disk(disk);
                full.sim
                    .admin(AdminRequest::Online { member: MemberIndex(member), device })
                    .unwrap_or_else(|error| panic!("seed {seed}: {error:?}"));
                full.sim.settle();
            }
            assert_eq!(full.sim.status().state, ArrayState::Online, "seed {seed}: {:?}", full.sim.notices);
        }
        full.assert_sound();
    }
}
