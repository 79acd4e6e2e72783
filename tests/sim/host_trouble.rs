//! A temporary shortage of the host, or of the storage under a member, is no fault of the member (rule T4 of
//! the crash-safety design): operations wait and are tried again, and the shortage leaves no trace when it is
//! over.

use crate::scenes::{live, trouble};
use calpe_core::format::{ChecksumKind, MemberSet, MemberState};
use calpe_core::testing::{DiskRegion, OpKinds, PassingFault, Random, SimArray, SimDisk, SimShape, Trouble};
use calpe_core::units::{MemberIndex, Timestamp};
use calpe_core::volume::{
    AdminRequest, ArrayState, ClientError, MemberCondition, NoticeLevel, Rest, ScrubResult,
};

const BLOCK: usize = 4096;
const CHUNK: usize = 16384;
const RING: u64 = 1 << 20;
const SECOND: u64 = 1_000_000_000;

/// An array and the expected content of its volume.
struct Checked {
    sim: SimArray,
    model: Vec<u8>,
}

impl Checked {
    /// A clean array full of random bytes.
    fn filled(data: u16, parity: u16) -> Checked {
        let shape = SimShape::new(data, parity, CHUNK as u32, 8).logged(ChecksumKind::Blake3, RING);
        let mut model = vec![0; shape.volume_bytes as usize];
        Random::new(9).fill(&mut model);
        let mut sim = SimArray::create(shape, 9);
        sim.write(0, &model).expect("written");
        sim.settle();
        Checked { sim, model }
    }

    fn put(&mut self, offset: usize, byte: u8, len: usize) -> u64 {
        self.model[offset..offset + len].fill(byte);
        self.sim.submit_write(offset as u64, &vec![byte; len], true)
    }

    fn inject(&mut self, member: u16, fault: &PassingFault) {
        let disk = self.sim.disk_of(member).expect("a disk");
        self.sim.disks.get_mut(&disk).expect("a disk").inject(fault.clone());
    }

    fn inject_everywhere(&mut self, fault: &PassingFault) {
        self.sim.disks.values_mut().for_each(|disk| disk.inject(fault.clone()));
    }

    fn clear(&mut self) {
        self.sim.disks.values_mut().for_each(|disk| disk.clear_faults());
    }

    fn struck(&self, trouble: Trouble) -> u64 {
        self.sim.disks.values().map(|disk| disk.struck(trouble)).sum()
    }

    fn now(&self) -> u64 {
        self.sim.now().0
    }

    /// Lets this many seconds pass, executing every operation that comes up.
    fn live(&mut self, seconds: u64) {
        live(&mut self.sim, seconds);
    }

    #[track_caller]
    fn verify(&mut self) {
        let read = self.sim.read(0, self.model.len()).expect("every byte can be read");
        assert!(read == self.model, "{:?}", self.sim.notices);
    }

    /// Asserts that every member is in service and never left, and that everything is right, also after a
    /// power cut.
    #[track_caller]
    fn assert_unharmed(mut self) {
        self.sim.settle();
        let status = self.sim.status();
        assert_eq!(status.state, ArrayState::Online, "{:?}", self.sim.notices);
        assert!(status.members.iter().all(|member| member.conditions.is_empty()), "{:?}", status.members);
        assert!(!self.sim.notices.iter().any(|n| n.text.contains("FAULTED")), "{:?}", self.sim.notices);
        assert_eq!((&status.lost, status.client_errors), (&Vec::new(), 0));
        self.verify();
        self.sim.assert_scrub_clean();
        let Checked { sim, model } = self;
        let sim = sim.power_cut_and_restart(false).expect("it starts");
        let mut array = Checked { sim, model };
        array.sim.settle();
        assert_eq!(array.sim.status().state, ArrayState::Online);
        array.verify();
        array.sim.assert_scrub_clean();
    }
}

fn states(sim: &SimArray) -> Vec<MemberState> {
    sim.status().members.iter().map(|member| member.state).collect()
}

fn texts(sim: &SimArray, part: &str) -> Vec<String> {
    sim.notices.iter().filter(|n| n.text.contains(part)).map(|n| n.text.clone()).collect()
}

#[test]
fn a_shortage_of_all_members_at_once_takes_none_out() {
    // Case 6: six ENOMEMs on one write to the log, or on one flush, once faulted six members.
    for (data, parity) in [(4, 2), (2, 1), (2, 0)] {
        for trouble in [Trouble::Shortage, Trouble::NoSpace] {
            for ops in [OpKinds::WRITES, OpKinds::FLUSHES, OpKinds::READS, OpKinds::ALL] {
                if trouble == Trouble::NoSpace && ops == OpKinds::READS {
                    continue;
                }
                let mut array = Checked::filled(data, parity);
                array.inject_everywhere(&PassingFault::new(trouble).on(ops).times(3));
                for round in 0..3 {
                    let small = array.put(round * 3 * BLOCK, round as u8 + 1, BLOCK);
                    let stripe = usize::from(data) * CHUNK;
                    let whole = array.put((5 + round) * stripe, round as u8 + 7, stripe);
                    array.sim.wait(small).expect("written when the shortage is over");
                    array.sim.wait(whole).expect("written when the shortage is over");
                    array.sim.settle();
                    array.verify();
                }
                assert!(array.struck(trouble) >= 3 * u64::from(data + parity), "{data}+{parity} {trouble:?}");
                array.assert_unharmed();
            }
        }
    }
}

#[test]
fn every_region_of_every_member_can_be_full_for_a_while() {
    for region in DiskRegion::ALL {
        for trouble in [Trouble::Shortage, Trouble::NoSpace] {
            let mut array = Checked::filled(3, 2);
            let ranges = region.ranges(&array.sim.disks[&0]);
            let until = Timestamp(array.now() + 20 * SECOND);
            let fault = PassingFault::new(trouble).on(OpKinds::WRITES).within(ranges).until(until);
            array.inject_everywhere(&fault);
            let ids: Vec<u64> = (0..6)
                .map(|n| match n % 2 {
                    0 => array.put(n * 5 * BLOCK, n as u8 + 1, 2 * BLOCK),
                    _ => array.put(n * 3 * CHUNK, n as u8 + 1, 3 * CHUNK),
                })
                .collect();
            for id in ids {
                array.sim.wait(id).expect("written when there is room");
            }
            array.sim.settle();
            array.live(21);
            assert!(array.struck(trouble) > 0, "{region:?}: nothing was hit");
            array.assert_unharmed();
        }
    }
}

#[test]
fn reads_wait_for_the_end_of_a_shortage_of_all_members() {
    let array = Checked::filled(4, 2);
    let Checked { sim, model } = array;
    let mut array = Checked { sim: sim.stop_and_restart(false).expect("it starts"), model };
    array.sim.settle();
    let until = Timestamp(array.now() + 3 * SECOND);
    array.inject_everywhere(&PassingFault::new(Trouble::Shortage).on(OpKinds::READS).until(until));
    // One write is acknowledged meanwhile, of a part of a stripe.
    let write = array.put(7 * BLOCK, 3, BLOCK);
    let reads: Vec<(usize, u64)> =
        (0..12).map(|n| (n, array.sim.submit_read((n * 9 * BLOCK) as u64, BLOCK))).collect();
    for (n, id) in reads {
        array.sim.wait(id).unwrap_or_else(|error| panic!("read {n}: {error}"));
    }
    array.sim.wait(write).expect("written");
    assert!(array.struck(Trouble::Shortage) > 0);
    array.assert_unharmed();
}

#[test]
fn reads_of_a_member_that_stays_short_are_served_by_the_others() {
    let Checked { sim, model } = Checked::filled(4, 2);
    let mut array = Checked { sim: sim.stop_and_restart(false).expect("it starts"), model };
    array.sim.settle();
    array.inject(1, &PassingFault::new(Trouble::Shortage).on(OpKinds::READS));
    let before = array.now();
    array.verify();
    assert!(array.now() - before < 5 * SECOND, "{} ms", (array.now() - before) / 1_000_000);
    let member = &array.sim.status().members[1];
    assert_eq!((member.state, member.counters.repaired), (MemberState::Online, 0), "nothing is wrong on it");
    array.clear();
    array.assert_unharmed();
}

#[test]
fn a_replay_waits_for_the_end_of_a_shortage() {
    for trouble in [Trouble::Shortage, Trouble::NoSpace] {
        for ops in [OpKinds::READS, OpKinds::WRITES, OpKinds::FLUSHES] {
            if trouble == Trouble::NoSpace && ops == OpKinds::READS {
                continue;
            }
            let mut array = Checked::filled(3, 2);
            let ids: Vec<u64> = (0..8).map(|n| array.put(n * 5 * BLOCK, n as u8 + 1, BLOCK)).collect();
            for id in ids {
                array.sim.wait(id).expect("written");
            }
            let fault = PassingFault::new(trouble).on(ops).until(Timestamp(array.now() + 3 * SECOND));
            array.inject_everywhere(&fault);
            let Checked { sim, model } = array;
            let mut array = Checked { sim: sim.kill_and_restart(false).expect("it starts"), model };
            array.verify();
            assert!(array.struck(trouble) > 0, "{trouble:?} {ops:?}: nothing was hit");
            array.assert_unharmed();
        }
    }
}

#[test]
fn a_member_that_stays_full_alone_leaves_and_is_caught_up_when_it_returns() {
    for trouble in [Trouble::NoSpace, Trouble::Shortage] {
        let mut array = Checked::filled(3, 2);
        array.inject(2, &PassingFault::new(trouble).on(OpKinds::WRITES));
        let early = array.put(BLOCK, 7, BLOCK);
        array.live(15);
        assert!(array.sim.poll(early).is_none(), "it waits");
        let member = array.sim.status().members[2].clone();
        let named = if trouble == Trouble::NoSpace {
            MemberCondition::Full
        } else {
            MemberCondition::ShortOfResources
        };
        assert_eq!((member.state, &member.conditions[..]), (MemberState::Online, &[named][..]));
        array.live(7);
        array.sim.poll(early).expect("it is over").expect("written without the member");
        let member = array.sim.status().members[2].clone();
        assert_eq!((member.state, &member.conditions[..]), (MemberState::Missing, &[named][..]));
        assert!(member.returns, "it comes back when the trouble is over");
        let later = array.put(9 * CHUNK, 8, 2 * BLOCK);
        array.sim.wait(later).expect("the others serve");
        array.verify();
        array.clear();
        array.sim.settle();
        let disk = array.sim.disk_out_of_use(2).expect("its disk");
        let device = array.sim.reopen_disk(disk);
        array.sim.admin(AdminRequest::Online { member: MemberIndex(2), device }).expect("it returns");
        assert!(
            !texts(&array.sim, "caught up").is_empty() || {
                let reason = array.sim.status().members[2].reason.clone().unwrap_or_default();
                reason.contains("caught up")
            }
        );
        array.assert_unharmed();
    }
}

#[test]
fn members_that_are_needed_stay_however_long_they_are_full_and_writes_fail_after_a_while() {
    for (data, parity) in [(3, 2), (2, 0)] {
        for trouble in [Trouble::NoSpace, Trouble::Shortage] {
            let mut array = Checked::filled(data, parity);
            let before = array.model.clone();
            array.inject_everywhere(&PassingFault::new(trouble).on(OpKinds::WRITES | OpKinds::FLUSHES));
            let stripe = usize::from(data) * CHUNK;
            let writes = [(BLOCK, BLOCK), (3 * stripe, stripe), (6 * stripe, stripe)];
            let ids: Vec<u64> = writes
                .map(|(offset, len)| {
                    array.sim.submit_write(offset as u64, &vec![5; len], offset == 3 * stripe)
                })
                .into();
            array.live(25);
            assert!(ids.iter().all(|&id| array.sim.poll(id).is_none()), "they wait");
            array.live(15);
            let error = if trouble == Trouble::NoSpace { ClientError::NoSpace } else { ClientError::Io };
            for id in ids {
                let end = array.sim.poll(id).expect("it waits no longer");
                assert_eq!(end.map(|_| ()), Err(error), "{data}+{parity} {trouble:?}");
            }
            array.live(300);
            assert!(states(&array.sim).iter().all(|state| *state == MemberState::Online));
            array.clear();
            array.live(3);
            // Refused writes may or may not have happened; everything else is as it was.
            let read = array.sim.read(0, before.len()).expect("readable");
            for (at, (now, then)) in read.chunks(BLOCK).zip(before.chunks(BLOCK)).enumerate() {
                let at = at * BLOCK;
                let asked = writes.iter().any(|(offset, len)| (*offset..offset + len).contains(&at));
                assert!(now == then || (asked && now.iter().all(|byte| *byte == 5)), "block at {at}");
            }
            array.model = read;
            let id = array.put(2 * stripe, 9, stripe);
            array.sim.wait(id).expect("written");
            let id = array.put(4 * BLOCK, 9, BLOCK);
            array.sim.wait(id).expect("written");
            array.sim.settle();
            assert_eq!(array.sim.status().state, ArrayState::Online);
            array.verify();
            array.sim.assert_scrub_clean();
            let sim = array.sim.power_cut_and_restart(false).expect("it starts");
            let mut array = Checked { sim, model: array.model };
            array.verify();
        }
    }
}

/// An array of 1+2 with a rotten block in each of three slots of member 0; a shortage prevents reads for
/// `seconds`.
fn rotten_and_short(seconds: u64) -> Checked {
    let mut array = Checked::filled(1, 2);
    let start = array.sim.data_region().start;
    let disk = array.sim.disk_of(0).expect("a disk");
    for slot in 0..3 {
        array.sim.disks.get_mut(&disk).expect("a disk").flip(start + slot * CHUNK as u64, 1);
    }
    let until = Timestamp(array.sim.now().0 + seconds * SECOND);
    let within = start..start + 3 * CHUNK as u64;
    let short = PassingFault::new(Trouble::Shortage).on(OpKinds::READS).within([within]).until(until);
    array.inject(0, &short);
    array.sim.admin(AdminRequest::ScrubStart).expect("it begins");
    array
}

#[test]
fn a_scrub_reads_again_what_a_shortage_kept_it_from_reading() {
    let mut array = rotten_and_short(5);
    live(&mut array.sim, 4);
    let retried: Vec<u64> = array.sim.status().activities.iter().map(|scrub| scrub.retried).collect();
    assert_eq!(retried, [3], "it goes on");
    live(&mut array.sim, 4);
    let scrub = array.sim.status().last_scrub.expect("it has ended");
    assert_eq!((scrub.errors, scrub.repaired, scrub.unchecked), (3, 3, MemberSet::new()));
    array.sim.assert_scrub_clean();
}

#[test]
fn a_scrub_that_a_shortage_keeps_from_reading_a_member_ends_and_says_so() {
    let mut array = rotten_and_short(1000);
    live(&mut array.sim, 40);
    let scrub = array.sim.status().last_scrub.expect("it has ended");
    let unchecked: Vec<MemberIndex> = scrub.unchecked.iter().collect();
    assert_eq!((scrub.errors, &unchecked[..]), (0, &[MemberIndex(0)][..]));
    let said = "0 errors, 0 repaired; not checked everywhere, as out of service or for a lack of resources: member 0;";
    assert!(array.sim.notices.iter().any(|notice| notice.text.contains(said)), "{:?}", array.sim.notices);
    array.sim.disks.values_mut().for_each(SimDisk::clear_faults);
    array.sim.admin(AdminRequest::ScrubStart).expect("it begins");
    array.sim.settle();
    let scrub = array.sim.status().last_scrub.expect("it has ended");
    assert_eq!((scrub.errors, scrub.repaired, scrub.unchecked), (3, 3, MemberSet::new()));
}

#[test]
fn a_scrub_waits_for_copies_of_superblocks_that_a_shortage_keeps_from_being_read() {
    for (seconds, is_over) in [(5, true), (1000, false)] {
        let mut array = Checked::filled(1, 2);
        let disk = array.sim.disk_of(0).expect("a disk");
        let ranges = DiskRegion::Superblocks.ranges(&array.sim.disks[&disk]);
        // Updates rewrite some of the bad places.
        for at in ranges.iter().flat_map(|range| [range.start, range.start.midpoint(range.end)]) {
            array.sim.disks.get_mut(&disk).expect("a disk").flip(at, 1);
        }
        let until = Timestamp(array.sim.now().0 + seconds * SECOND);
        let short = PassingFault::new(Trouble::Shortage).on(OpKinds::READS).within(ranges).until(until);
        array.inject(0, &short);
        array.sim.admin(AdminRequest::ScrubStart).expect("it begins");
        live(&mut array.sim, 3);
        assert_eq!(array.sim.status().last_scrub, None, "it goes on");
        live(&mut array.sim, 37);
        let scrub = array.sim.status().last_scrub.expect("it has ended");
        let unchecked: Vec<MemberIndex> = scrub.unchecked.iter().collect();
        match is_over {
            true => assert!(
                scrub.errors > 0 && scrub.errors == scrub.repaired && unchecked.is_empty(),
                "{scrub:?}"
            ),
            false => assert_eq!((scrub.errors, &unchecked[..]), (0, &[MemberIndex(0)][..])),
        }
        assert_eq!(array.sim.status().members[0].state, MemberState::Online);
    }
}

#[test]
fn a_scrub_that_waits_to_read_a_member_can_be_paused_and_stopped() {
    let mut array = rotten_and_short(1000);
    live(&mut array.sim, 5);
    array.sim.admin(AdminRequest::ScrubPause).expect("it is paused");
    let disk = array.sim.disk_of(0).expect("a disk");
    live(&mut array.sim, 2);
    let struck = array.sim.disks[&disk].struck(Trouble::Shortage);
    live(&mut array.sim, 60);
    assert_eq!(array.sim.disks[&disk].struck(Trouble::Shortage), struck, "nothing is read");
    assert_eq!(array.sim.status().last_scrub, None);
    array.sim.admin(AdminRequest::ScrubStart).expect("it goes on");
    live(&mut array.sim, 5);
    let scrub = array.sim.status().last_scrub.expect("it has ended");
    assert!(scrub.unchecked.contains(MemberIndex(0)), "{scrub:?}");

    let mut array = rotten_and_short(1000);
    live(&mut array.sim, 5);
    array.sim.admin(AdminRequest::ScrubStop).expect("it is stopped");
    live(&mut array.sim, 1);
    assert_eq!((array.sim.status().activities.len(), array.sim.status().last_scrub), (0, None));

    let mut array = rotten_and_short(1000);
    live(&mut array.sim, 5);
    let mut sim = array.sim.stop_and_restart(false).expect("it stops and starts");
    sim.disks.values_mut().for_each(SimDisk::clear_faults);
    live(&mut sim, 5);
    let scrub = sim.status().last_scrub.expect("it has ended");
    assert!(scrub.errors == 3 || scrub.unchecked.contains(MemberIndex(0)), "{scrub:?}");

    let mut array = rotten_and_short(1000);
    live(&mut array.sim, 5);
    for member in [0, 1, 2] {
        let disk = array.sim.disk_of(member).expect("a disk");
        array.sim.disks.get_mut(&disk).expect("a disk").dead = true;
    }
    live(&mut array.sim, 5);
    let status = array.sim.status();
    assert_eq!(status.state, ArrayState::Failed);
    let has_read_all = |scrub: ScrubResult| !scrub.unchecked.contains(MemberIndex(0));
    assert!(!status.last_scrub.is_some_and(has_read_all), "{:?}", status.last_scrub);
}

#[test]
fn a_scrub_that_waits_for_room_delays_no_read() {
    assert_eq!(trouble::scrub_without_room(), None);
}

#[test]
fn a_scrub_tells_that_it_waits_for_room_while_it_does_and_only_then() {
    let mut sim = trouble::filled(2, 1);
    for disk in sim.disks.values_mut() {
        let data = DiskRegion::Data.ranges(disk);
        disk.inject(PassingFault::new(Trouble::NoSpace).on(OpKinds::WRITES).within(data));
    }
    let rest = |sim: &SimArray| sim.status().activities.first().map(|activity| activity.rest);
    sim.admin(AdminRequest::ScrubStart).expect("it starts");
    assert_eq!(rest(&sim), Some(None), "nothing is to be written");
    sim.settle();
    assert_eq!(rest(&sim), None, "it has ended");
    for at in 0..16 {
        sim.write(at * 2 * trouble::CHUNK as u64, &[3; 4096]).expect("written");
    }
    sim.admin(AdminRequest::ScrubStart).expect("it starts");
    live(&mut sim, 3);
    assert_eq!(rest(&sim), Some(Some(Rest::ForRoom)));
    let refusal = sim.admin(AdminRequest::ScrubStart).expect_err("it is there").to_string();
    assert!(refusal.contains("waits for room on a member that is full already: make room"), "{refusal}");
    sim.disks.values_mut().for_each(SimDisk::clear_faults);
    live(&mut sim, 2);
    assert!(matches!(rest(&sim), None | Some(None)), "{:?}", rest(&sim));
    live(&mut sim, 30);
    assert_eq!(rest(&sim), None, "it has ended");
}

#[test]
fn each_shortage_is_told_once_at_its_beginning_and_once_at_its_end() {
    let mut array = Checked::filled(3, 2);
    let until = Timestamp(array.now() + 10 * SECOND);
    array.inject(1, &PassingFault::new(Trouble::NoSpace).on(OpKinds::WRITES).until(until));
    let ids: Vec<u64> = (0..8).map(|n| array.put(n * 5 * BLOCK, n as u8 + 1, BLOCK)).collect();
    for id in ids {
        array.sim.wait(id).expect("written when there is room");
    }
    array.live(5);
    let about: Vec<_> = array.sim.notices.iter().filter(|n| n.member == Some(MemberIndex(1))).collect();
    assert_eq!(about.len(), 2, "{about:?}");
    assert_eq!([about[0].level, about[1].level], [NoticeLevel::Error, NoticeLevel::Info]);
    assert!(about[0].text.contains("No space left"), "{about:?}");
    array.assert_unharmed();
}

#[test]
fn an_array_stops_though_its_members_have_no_room_and_the_next_start_goes_on() {
    for (ops, restart_full) in [(OpKinds::WRITES, false), (OpKinds::ALL, false), (OpKinds::WRITES, true)] {
        let mut array = Checked::filled(3, 1);
        let id = array.put(BLOCK, 7, BLOCK);
        array.sim.wait(id).expect("written");
        array.inject_everywhere(&PassingFault::new(Trouble::NoSpace).on(ops));
        let begun = array.now();
        array.sim.admin(AdminRequest::Stop).expect("a stop ends");
        assert!(array.now() - begun < 8 * SECOND, "{} ms", (array.now() - begun) / 1_000_000);
        assert_eq!(array.sim.in_flight(), 0);
        let Checked { mut sim, model } = array;
        if !restart_full {
            sim.disks.values_mut().for_each(|disk| disk.clear_faults());
        }
        let mut array = Checked { sim: sim.kill_and_restart(false).expect("it starts"), model };
        if restart_full {
            array.live(5);
            array.sim.admin(AdminRequest::Stop).expect("a stop ends while it waits to be replayed");
            array.clear();
            let Checked { sim, model } = array;
            array = Checked { sim: sim.kill_and_restart(false).expect("it starts"), model };
        }
        array.assert_unharmed();
    }
}

#[test]
fn a_dry_run_of_a_stop_says_what_the_stop_comes_to_while_members_are_short() {
    let cases = [
        (Trouble::NoSpace, OpKinds::WRITES, "stopped, and not cleanly"),
        (Trouble::Shortage, OpKinds::WRITES, "stopped, and not cleanly"),
        // What reads ask for ends with an error in time.
        (Trouble::Shortage, OpKinds::READS, "stopped cleanly"),
    ];
    for (trouble, ops, expected) in cases {
        let mut array = Checked::filled(3, 1);
        let would = |array: &Checked| array.sim.would(&AdminRequest::Stop).expect("it may").0;
        assert_eq!(would(&array), "stopped cleanly");
        array.inject_everywhere(&PassingFault::new(trouble).on(ops));
        match ops {
            OpKinds::READS => array.sim.submit_read(0, BLOCK),
            _ => array.put(BLOCK, 7, BLOCK),
        };
        array.live(1);
        let would = would(&array);
        assert!(would.starts_with(expected), "{trouble:?} of {ops:?}: {would}");
        let came_to = array.sim.admin(AdminRequest::Stop).expect("a stop ends").0;
        assert_eq!(would, came_to, "{trouble:?} of {ops:?}");
    }
}

#[test]
fn short_shortages_of_any_member_at_any_time_leave_nothing_behind() {
    for seed in 0..30 {
        let mut random = Random::new(seed);
        let (data, parity) = [(2, 1), (3, 2), (4, 2)][seed as usize % 3];
        let mut array = Checked::filled(data, parity);
        for round in 0..3 {
            for member in 0..data + parity {
                let trouble = if random.one_in(2) { Trouble::Shortage } else { Trouble::NoSpace };
                let ops = if trouble == Trouble::NoSpace {
                    OpKinds::WRITES | OpKinds::FLUSHES
                } else {
                    OpKinds::ALL
                };
                let fault = PassingFault::new(trouble).on(ops).one_in(1 + random.below(6), random.next_u64());
                let until = Timestamp(array.now() + random.below(6 * SECOND));
                array.inject(member, &fault.until(until));
            }
            let stripe = usize::from(data) * CHUNK;
            let mut ids = Vec::new();
            for n in 0..20u8 {
                let len = if random.one_in(4) { stripe } else { BLOCK * (1 + random.below(3) as usize) };
                let at = random.below(((array.model.len() - len) / len) as u64 + 1) as usize * len;
                ids.push(array.put(at, n + 20 * round, len));
                for _ in 0..random.below(60) {
                    array.sim.step();
                }
                // One after the other: of two writes at the same time, neither is defined to be the later
                // one.
                let id = ids.pop().expect("just pushed");
                array.sim.wait(id).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            }
            array.verify();
            if random.one_in(2) {
                array.clear();
                let Checked { sim, model } = array;
                let sim = sim.power_cut_and_restart(false);
                array = Checked { sim: sim.expect("it starts"), model };
            }
        }
        array.clear();
        array.assert_unharmed();
    }
}

#[test]
fn a_new_device_that_is_full_is_not_called_its_member() {
    let mut array = Checked::filled(2, 1);
    let device = array.sim.add_blank_disk();
    let full = PassingFault::new(Trouble::NoSpace).on(OpKinds::WRITES);
    let data = array.sim.data_region();
    let disk = array.sim.disks.values_mut().last().expect("the new one");
    disk.inject(full.within(vec![data]));
    array.sim.admin(AdminRequest::Replace { member: MemberIndex(0), device }).expect("it begins");
    array.live(2);
    let told = texts(&array.sim, "is full");
    assert_eq!(told.len(), 1, "{:?}", array.sim.notices);
    assert!(told[0].starts_with("the storage under the new device of member 0 is full"), "{told:?}");
    assert!(told[0].contains("given up") && !told[0].contains("until there is room"), "{told:?}");
    assert_eq!(array.sim.status().members[0].conditions, [MemberCondition::NewDeviceFull]);
    array.live(30);
    assert_eq!(states(&array.sim), [MemberState::Online; 3]);
    let status = array.sim.status();
    assert!(status.members[0].replacement.is_none() && status.members[0].conditions.is_empty(), "{status:?}");
    array.verify();
}
