//! Writes that are gathered into whole stripes, and large parts that take the rest of their stripe along,
//! while members lack room: they cost clients nothing that the same writes through the log would not.

use crate::scenes::live;
use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{DiskRegion, OpKinds, PassingFault, SimArray, SimShape, Trouble};
use calpe_core::volume::{ClientError, ClientReply};

const BLOCK: usize = 4096;
const CHUNK: usize = 16384;
const STRIPE: usize = 4 * CHUNK;
const RING: u64 = 8 << 20;
const SECOND: u64 = 1_000_000_000;

/// An array of 4+2 full of ones.
fn filled(stripes: u64) -> SimArray {
    let shape = SimShape::new(4, 2, CHUNK as u32, stripes).logged(ChecksumKind::Blake3, RING);
    let mut sim = SimArray::create(shape, 9);
    for stripe in 0..stripes as usize {
        sim.write((stripe * STRIPE) as u64, &[1; STRIPE]).expect("written");
    }
    sim.settle();
    sim
}

/// Storage below these members is full: what was written can be overwritten, other slots cannot be written.
fn fill_storage(sim: &mut SimArray, members: &[u32], stripes: u64) {
    for id in members {
        let disk = sim.disks.get_mut(id).expect("a disk");
        let data = DiskRegion::Data.ranges(disk);
        let unused = data.into_iter().map(|range| range.start + stripes * CHUNK as u64..range.end);
        disk.inject(PassingFault::new(Trouble::NoSpace).on(OpKinds::WRITES).within(unused));
    }
}

/// Shows the array a stream, so that halves of stripe 1 are gathered.
fn show_stream(sim: &mut SimArray) {
    let halves = [0, STRIPE / 2].map(|at| sim.submit_write(at as u64, &[2; STRIPE / 2], false));
    halves.into_iter().for_each(|id| drop(sim.wait(id).expect("written")));
}

/// Seconds until a request has ended, and how.
fn end_of(sim: &mut SimArray, id: u64) -> (u64, Result<(), ClientError>) {
    let since = sim.now().0;
    loop {
        while sim.step() {}
        if let Some(end) = sim.poll(id) {
            return ((sim.now().0 - since) / SECOND, end.map(|_| ()));
        }
        sim.sleep(100);
        assert!(sim.now().0 - since < 600 * SECOND, "it never ends");
    }
}

fn first_byte(sim: &mut SimArray, at: usize) -> Option<u8> {
    let id = sim.submit_read(at as u64, BLOCK);
    live(sim, 1);
    match sim.poll(id) {
        Some(Ok(ClientReply::Data(data))) => Some(data[0]),
        _ => None,
    }
}

#[test]
fn a_gathered_stripe_that_was_read_does_not_come_back_over_a_later_write() {
    let mut sim = filled(8);
    let small = sim.submit_write(3 * STRIPE as u64, &[8; BLOCK], false);
    sim.wait(small).expect("written: superblocks need no flush any more");
    show_stream(&mut sim);
    for disk in sim.disks.values_mut() {
        disk.inject(PassingFault::new(Trouble::NoSpace).on(OpKinds::FLUSHES));
    }
    let halves = [STRIPE, STRIPE + STRIPE / 2].map(|at| sim.submit_write(at as u64, &[3; STRIPE / 2], true));
    live(&mut sim, 5);
    assert_eq!(first_byte(&mut sim, STRIPE), Some(3), "it has joined a batch, which cannot be flushed");
    let later = sim.submit_write(STRIPE as u64, &[4; BLOCK], false);
    assert_eq!(end_of(&mut sim, later).1, Ok(()));
    assert_eq!(first_byte(&mut sim, STRIPE), Some(4));
    live(&mut sim, 90);
    for id in halves {
        assert!(sim.poll(id).expect("its client was answered").is_err());
    }
    assert_eq!(first_byte(&mut sim, STRIPE), Some(4), "what was acknowledged, and read, stays");
}

#[test]
fn large_parts_of_stripes_need_no_new_space() {
    for full in [&[0, 1, 2, 3, 4, 5][..], &[0]] {
        let mut sim = filled(8);
        fill_storage(&mut sim, full, 8);
        for value in 2..5 {
            let large = sim.submit_write(0, &[value; 3 * CHUNK], false);
            let rest = sim.submit_read(3 * CHUNK as u64, BLOCK);
            let (seconds, read) = end_of(&mut sim, rest);
            assert!(seconds < 2 && read.is_ok(), "a read beside it: {seconds} s, {read:?}");
            let (seconds, written) = end_of(&mut sim, large);
            assert!(seconds < 2 && written.is_ok(), "{seconds} s, {written:?}");
        }
        let states: Vec<MemberState> = sim.status().members.iter().map(|member| member.state).collect();
        assert_eq!(states, [MemberState::Online; 6]);
    }
}

#[test]
fn clients_of_a_gathered_stripe_are_answered_after_30_seconds_without_room() {
    let mut sim = filled(8);
    show_stream(&mut sim);
    sim.settle();
    for disk in sim.disks.values_mut() {
        let regions = [DiskRegion::Data, DiskRegion::Log].iter().flat_map(|region| region.ranges(disk));
        let regions: Vec<_> = regions.collect();
        disk.inject(PassingFault::new(Trouble::NoSpace).on(OpKinds::WRITES).within(regions));
    }
    let since = sim.now().0;
    let halves = [STRIPE, STRIPE + STRIPE / 2].map(|at| sim.submit_write(at as u64, &[3; STRIPE / 2], false));
    for id in halves {
        assert_eq!(end_of(&mut sim, id).1, Err(ClientError::NoSpace));
        let seconds = (sim.now().0 - since) / SECOND;
        assert!(seconds <= 32, "answered after {seconds} s");
    }
}

#[test]
fn large_parts_do_not_wait_for_free_slots() {
    let mut sim = filled(64);
    let small = sim.submit_write(63 * STRIPE as u64, &[8; BLOCK], false);
    sim.wait(small).expect("written: superblocks need no flush any more");
    // No slot that a stripe leaves becomes free without a flush.
    for disk in sim.disks.values_mut() {
        disk.inject(PassingFault::new(Trouble::NoSpace).on(OpKinds::FLUSHES));
    }
    let write = |stripe: usize| (stripe * STRIPE) as u64;
    let parts: Vec<u64> =
        (0..30).map(|stripe| sim.submit_write(write(stripe), &[2; 3 * CHUNK], false)).collect();
    live(&mut sim, 3);
    let waiting = parts.into_iter().filter(|id| sim.poll(*id).is_none()).count();
    assert_eq!(waiting, 0, "of 30 writes");
}
