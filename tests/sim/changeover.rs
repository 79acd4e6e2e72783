//! A member is replaced in an array of several lanes: until the new device is whole the old one is the member
//! in every lane, and then all lanes change over.

use crate::scenes::changeover::{
    MEMBER, OLD, Replacing, cancelled_at_any_moment, crashes_in_the_changeover,
    new_disk_fails_in_the_last_lane, shape, write_some, written_while_held,
};
use calpe_core::block_io::DeviceId;
use calpe_core::testing::{Fate, Random, SimWorld};
use calpe_core::units::MemberIndex;
use calpe_core::volume::{
    ActivityKind, AdminRequest, ClientRequest, MemberCondition, NoticeKind, ReplacementStep,
};

const LANES: [u16; 2] = [2, 8];

#[test]
fn lanes_that_have_built_the_new_device_hold_it_until_the_last_one_has() {
    for lanes in LANES {
        let mut replacing = Replacing::begin(shape(lanes, 1, 3), 1);
        replacing.run();
        replacing.check_held().expect("they hold it");
        assert_eq!(replacing.kinds(), [NoticeKind::ReplacementWaits], "{:?}", replacing.sim.notices);
        let rebuild = replacing.sim.status().activities[0].clone();
        assert_eq!((rebuild.kind, rebuild.rest), (ActivityKind::Rebuild, None), "the last lane works");
        write_some(&mut replacing, 7);
        replacing.run();
        replacing.check_held().expect("they hold it still");
        replacing.sim.settle();
        assert_eq!(replacing.kinds()[1..], [NoticeKind::MemberReplaced], "{:?}", replacing.sim.notices);
        let member = replacing.sim.status().members[1].clone();
        assert!(!member.conditions.contains(&MemberCondition::NewDeviceWaits) && member.reason.is_none());
        assert!(replacing.sim.released.contains(&OLD));
        let new = replacing.new;
        replacing.check_whole(new).expect("the new device has what was written while it was held");
    }
}

#[test]
fn the_old_device_has_what_was_written_while_the_new_one_was_held() {
    let mut replacing = written_while_held(shape(2, 1, 3), 2);
    replacing
        .sim
        .admin(AdminRequest::CancelReplace { member: MEMBER, device: None })
        .expect("it is cancelled");
    replacing.sim.settle();
    let kinds = [NoticeKind::ReplacementWaits, NoticeKind::ReplacementCancelled];
    assert_eq!(replacing.kinds(), kinds, "{:?}", replacing.sim.notices);
    assert!(replacing.sim.released.contains(&replacing.new));
    replacing.check_whole(OLD).expect("it is whole");
}

#[test]
fn a_replacement_is_cancelled_in_every_lane_or_in_none() {
    for (lanes, has_old, seed) in [(2, true, 21), (8, true, 22), (2, false, 23), (8, false, 24)] {
        let counts = cancelled_at_any_moment(lanes, has_old, seed);
        let counts = counts.unwrap_or_else(|what| panic!("{lanes} lanes, old disk {has_old}: {what}"));
        assert!(counts.0 > 2 && counts.1 > 2, "{lanes} lanes, old disk {has_old}: {counts:?}");
    }
}

/// Between the question whether all lanes would cancel it, and the request, none must change over.
#[test]
fn no_lane_changes_over_while_all_are_asked_about_a_cancellation() {
    for is_cancelled in [true, false] {
        let mut replacing = Replacing::begin(shape(2, 1, 3), 25);
        replacing.lose_old_early();
        replacing.sim.order_replacement(MEMBER, &ReplacementStep::Stay);
        for _ in 0..2000 {
            if !replacing.sim.step() {
                replacing.sim.sleep(10);
            }
        }
        let status = replacing.sim.status();
        assert_eq!(replacing.sim.serving()[1], [0; 0], "{status:?}");
        if is_cancelled {
            let cancel = AdminRequest::CancelReplace { member: MEMBER, device: None };
            replacing.sim.admin(cancel).expect("it is cancelled");
            assert!(replacing.sim.released.contains(&replacing.new));
            continue;
        }
        replacing.sim.order_replacement(MEMBER, &ReplacementStep::GoOn);
        replacing.sim.settle();
        let new = replacing.new;
        replacing.check_whole(new).expect("it is whole");
    }
}

#[test]
fn a_new_device_that_fails_in_one_lane_is_given_up_in_all() {
    for lanes in LANES {
        new_disk_fails_in_the_last_lane(lanes, 3).unwrap_or_else(|what| panic!("{lanes} lanes: {what}"));
    }
}

#[test]
fn without_the_old_device_there_is_nothing_to_wait_for() {
    for lanes in LANES {
        let mut replacing = written_while_held(shape(lanes, 1, 3), 4);
        replacing.sim.disks.get_mut(&OLD).expect("a disk").dead = true;
        write_some(&mut replacing, 40);
        replacing.run();
        let status = replacing.sim.status();
        let serving = replacing.sim.serving()[1].clone();
        assert!(serving.len() + 1 == usize::from(lanes), "{serving:?} {:?}", replacing.sim.notices);
        assert!(serving.iter().all(|disk| *disk == replacing.new), "the lanes have changed over: {status:?}");
        replacing.sim.settle();
        let new = replacing.new;
        replacing.check_whole(new).expect("it is whole");
    }
}

#[test]
fn after_a_restart_lanes_that_held_the_new_device_have_nothing_left_to_build() {
    for (power, seed) in [(false, 5), (true, 6), (true, 7)] {
        let mut replacing = written_while_held(shape(2, 1, 40), seed);
        replacing.client(ClientRequest::Flush);
        let mut random = Random::new(seed);
        let disks = replacing.sim.wreck().settle(power, |_, _| match random.below(3) {
            0 => Fate::Lost,
            1 => Fate::Kept,
            _ => Fate::Torn(random.next_u64()),
        });
        let world = SimWorld::new(replacing.shape, 8 << 20);
        replacing.sim = world.start(disks, false, Random::new(seed)).expect("it starts again");
        let writes = replacing.run_counting();
        // The replay writes again what the log names.
        assert!(writes <= 8, "{writes} writes of data: it was built anew");
        replacing.check_held().expect("it is held again");
        replacing.sim.settle();
        let new = replacing.new;
        replacing.check_whole(new).expect("it is whole");
    }
}

#[test]
fn a_clean_stop_keeps_what_is_held() {
    let mut replacing = Replacing::begin(shape(2, 1, 40), 8);
    replacing.run();
    let id = replacing.sim.submit_admin(AdminRequest::Stop);
    // What hangs in the last lane ends first.
    while replacing.sim.poll_admin(id).is_none() {
        if !replacing.sim.step() {
            replacing.sim.sleep(100);
        }
    }
    replacing.sim = replacing.sim.kill_where(false, |_, _| true).expect("it starts again");
    assert_eq!(replacing.run_counting(), 0, "nothing of the first lane is left to build");
    let new = replacing.new;
    replacing.sim.settle();
    replacing.check_whole(new).expect("it is whole");
}

/// A device that joins has writes wait, which must not wait for one that is held.
#[test]
fn another_member_comes_back_and_clients_write_while_a_device_is_held() {
    let member = MemberIndex(3);
    let mut replacing = written_while_held(shape(2, 2, 3), 9);
    replacing.admin(AdminRequest::Offline { member });
    write_some(&mut replacing, 50);
    let id = replacing.sim.disk_out_of_use(3).expect("it is there");
    let device = replacing.sim.reopen_disk(id);
    let id = device.device.0;
    replacing.admin(AdminRequest::Online { member, device });
    replacing.run();
    assert_eq!(replacing.sim.serving()[3], [id], "it is back in the first lane");
    assert_eq!(replacing.sim.serving()[1], [OLD, OLD], "the other one is held");
    write_some(&mut replacing, 60);
    replacing.sim.settle();
    let new = replacing.new;
    replacing.check_whole(new).expect("it is whole");
}

#[test]
fn a_device_that_was_given_up_can_be_had_with_another_request() {
    let mut replacing = written_while_held(shape(2, 1, 3), 10);
    replacing.sim.disks.get_mut(&replacing.new).expect("a disk").dead = true;
    replacing.sim.settle();
    let device = replacing.sim.add_blank_disk();
    replacing.new = device.device.0;
    replacing.sim.admin(AdminRequest::Replace { member: MEMBER, device }).expect("it is taken");
    replacing.sim.settle();
    assert_eq!(replacing.sim.status().members[1].device, Some(DeviceId(replacing.new)));
    let new = replacing.new;
    replacing.check_whole(new).expect("it is whole");
}

#[test]
fn a_crash_at_any_moment_of_the_changeover_ends_on_the_new_device_and_loses_nothing() {
    let (mut tried, mut between) = (0, 0);
    for (lanes, seed, one_in) in [(2, 11, 1), (2, 12, 1), (8, 13, 6)] {
        let counts = crashes_in_the_changeover(lanes, seed, one_in);
        let counts = counts.unwrap_or_else(|what| panic!("{lanes} lanes, seed {seed}: {what}"));
        (tried, between) = (tried + counts.0, between + counts.1);
    }
    assert!(tried > 100 && between > 10, "{tried} crashes, {between} of them within the changeover");
}
