//! Arrays of several lanes: each lane is an array of its own in its window of every disk, and together they
//! are one for clients and operators.

use crate::scenes::lanes;
use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{Oracle, Random, Run, SimArray, SimShape, SimWorld, Workload};
use calpe_core::units::{MemberIndex, VolumeOffset};
use calpe_core::volume::{AdminRequest, ClientReply, ClientRequest, Health, NoticeKind, STOPPED_CLEANLY};

const STRIPE: u64 = 2 * 4096;

fn shape(lanes: u16) -> SimShape {
    let shape = SimShape::new(2, 1, 4096, 3 * u64::from(lanes)).in_lanes(lanes, 1);
    shape.logged(ChecksumKind::Crc32c, 128 << 10)
}

fn kinds(sim: &SimArray) -> Vec<NoticeKind> {
    sim.notices.iter().map(|notice| notice.kind).collect()
}

fn restarted(mut sim: SimArray) -> SimArray {
    let outcome = sim.admin(AdminRequest::Stop).expect("it stops");
    assert_eq!(outcome.0, STOPPED_CLEANLY);
    sim.kill_where(false, |_, _| true).expect("it starts again")
}

#[test]
fn what_is_written_over_all_lanes_is_read_again_after_a_stop_a_kill_and_a_power_cut() {
    for (lanes, seed) in [(2, 1), (3, 2), (8, 3)] {
        let mut sim = SimArray::create(shape(lanes), seed);
        let mut bytes: Vec<u8> = (0..sim.status().geometry.volume_bytes).map(|at| (at / 512) as u8).collect();
        sim.write(0, &bytes).expect("all is written");
        assert_eq!(sim.read(0, bytes.len()).expect("all is read"), bytes);
        sim = restarted(sim);
        assert_eq!(
            sim.read(512, 5 * STRIPE as usize).expect("some is read")[..],
            bytes[512..][..5 * STRIPE as usize]
        );
        bytes[512..][..STRIPE as usize * 3].fill(9);
        sim.write(512, &vec![9; STRIPE as usize * 3]).expect("some is written");
        sim = sim.kill_and_restart(false).expect("it starts again");
        assert_eq!(sim.read(0, bytes.len()).expect("all is read"), bytes);
        let flush = sim.submit(ClientRequest::Flush);
        sim.wait(flush).expect("a flush");
        sim = sim.power_cut_and_restart(false).expect("it starts again");
        assert_eq!(sim.read(0, bytes.len()).expect("all is read"), bytes);
        sim.assert_scrub_clean();
    }
}

#[test]
fn a_member_leaves_all_lanes_comes_back_and_is_replaced_as_one() {
    for lanes in [2, 8] {
        let mut sim = SimArray::create(shape(lanes), 5);
        let bytes: Vec<u8> =
            (0..sim.status().geometry.volume_bytes).map(|at| (at / 4096) as u8 + 1).collect();
        sim.write(0, &bytes).expect("written");
        sim.settle();
        sim.notices.clear();
        let member = MemberIndex(1);
        sim.admin(AdminRequest::Offline { member }).expect("it leaves");
        sim.settle();
        assert_eq!(kinds(&sim), [NoticeKind::MemberOut], "{lanes} lanes: {:?}", sim.notices);
        assert_eq!(sim.status().members[1].state, MemberState::Offline);
        assert!(sim.released.contains(&1), "no lane has it any more");
        sim.write(0, &bytes[..4 * STRIPE as usize]).expect("written");
        let id = sim.disk_out_of_use(1).expect("it is there");
        let device = sim.reopen_disk(id);
        sim.admin(AdminRequest::Online { member, device }).expect("it comes back");
        sim.settle();
        let wanted = [NoticeKind::MemberOut, NoticeKind::MemberRebuilt, NoticeKind::ArrayWhole];
        assert_eq!(kinds(&sim), wanted, "{lanes} lanes: {:?}", sim.notices);
        let device = sim.add_blank_disk();
        let new = device.device;
        sim.admin(AdminRequest::Replace { member, device }).expect("it is replaced");
        sim.settle();
        let wanted = [NoticeKind::ReplacementWaits, NoticeKind::MemberReplaced];
        assert_eq!(kinds(&sim)[3..], wanted, "{lanes} lanes: {:?}", sim.notices);
        assert_eq!(sim.status().members[1].device, Some(new));
        for other in [0, 2] {
            let mut disks = sim.disks.clone();
            disks.get_mut(&other).expect("a disk").dead = true;
            let world = SimWorld::new(shape(lanes), 8 << 20);
            let mut again = world.start(disks, false, Random::new(1)).expect("two members are enough");
            assert_eq!(again.read(0, bytes.len()).expect("it is all there"), bytes);
        }
    }
}

#[test]
fn a_device_that_fails_in_one_lane_leaves_the_others() {
    let mut sim = SimArray::create(shape(2), 7);
    sim.write(0, &[1; 4 * STRIPE as usize]).expect("written");
    sim.settle();
    sim.disks.get_mut(&2).expect("a disk").dead = true;
    // In the first lane only.
    sim.write(0, &[2; STRIPE as usize]).expect("written without it");
    sim.settle();
    let status = sim.status();
    assert!(sim.released.contains(&2) && status.members[2].device.is_none());
    assert_eq!(sim.notices.iter().filter(|notice| notice.kind == NoticeKind::MemberOut).count(), 1);
    let health = sim.submit(ClientRequest::Health { offset: VolumeOffset(0), len: 6 * STRIPE });
    let Ok(ClientReply::Health(runs)) = sim.wait(health) else { panic!("the health") };
    assert_eq!(runs, [(6 * STRIPE, Health::Degraded)]);
}

#[test]
fn a_request_that_one_lane_refuses_is_done_by_none() {
    let mut sim = SimArray::create(shape(2), 9);
    let refused = sim.admin(AdminRequest::ScrubPause);
    assert!(refused.is_err());
    sim.admin(AdminRequest::Offline { member: MemberIndex(0) }).expect("it leaves");
    assert!(sim.admin(AdminRequest::Offline { member: MemberIndex(1) }).is_err(), "it is needed");
    assert_eq!(sim.status().members[1].state, MemberState::Online);
}

#[test]
fn loads_over_lanes_go_on_through_all_that_happens_to_members() {
    for (lanes, seed) in [(2, 1), (3, 2), (8, 3)] {
        let shape = shape(lanes);
        let workload = Workload { faults: 2, admin: 2, ..Workload::MIXED };
        let mut load = Run::new(
            SimArray::create(shape, seed),
            Oracle::new(shape.volume_bytes),
            workload,
            Random::new(seed),
        );
        for _ in 0..4000 {
            load.step().unwrap_or_else(|what| panic!("{lanes} lanes: {what}\n{:#?}", load.log()));
        }
        load.read_all().unwrap_or_else(|what| panic!("{lanes} lanes: {what}"));
    }
}

#[test]
fn clients_are_told_when_any_lane_has_lost_their_writes() {
    for stripe in 0..4 {
        lanes::lost_writes_are_told(stripe).unwrap_or_else(|what| panic!("stripe {stripe}: {what}"));
    }
}

#[test]
fn a_request_over_lanes_fails_where_one_of_them_cannot_do_its_part() {
    for seed in 0..8 {
        lanes::errors_of_one_lane_are_told(seed).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }
}

#[test]
fn zeroes_that_must_be_fast_are_in_all_lanes_or_in_none() {
    for lanes in [2, 8] {
        lanes::fast_zeroes(lanes).unwrap_or_else(|what| panic!("{lanes} lanes: {what}"));
    }
}

#[test]
fn a_lane_keeps_a_member_that_it_needs_when_another_lane_lets_go_of_it() {
    for spare in [true, false] {
        lanes::full_for_one_lane(spare).unwrap_or_else(|what| panic!("spare: {spare}: {what}"));
    }
}

#[test]
fn a_lane_keeps_a_member_that_alone_has_something_when_another_lane_lets_go_of_it() {
    for seed in 0..4 {
        lanes::kept_for_last_copies(seed).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }
}

#[test]
fn a_page_that_went_into_another_lane_counts_as_damaged_there() {
    for seed in 0..8 {
        lanes::page_written_into_another_lane(seed).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }
}
