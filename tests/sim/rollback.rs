//! Members whose whole device is not what it was: rolled back to a copy of itself, or with a false
//! superblock. Rule T6 of the crash-safety design: such a member is recognised, and the array loses that
//! member and nothing else.

use crate::scenes::rollback as scenes;
use crate::scenes::rollback::{BLOCK, CHUNK, Checked, disk, shapes, states};
use calpe_core::array::assembly::AssemblyError;
use calpe_core::format::{COUNT_END, ChecksumKind, LanePart, MemberState};
use calpe_core::testing::{Claim, DiskCopy, OpKinds, PassingFault, Random, SimArray, SimShape, Trouble};
use calpe_core::units::{LaneIndex, MemberIndex, Timestamp};
use calpe_core::volume::{AdminRequest, ArrayState};

#[test]
fn numbers_never_counted_to_cost_their_member_and_no_more() {
    for claim in [Claim::Sequence, Claim::EpochNumber, Claim::LogStartSequence, Claim::LogStartEpoch] {
        // With the last value the superblock is read but no array starts from it; with the others it is
        // refused.
        for value in [u64::MAX, u64::MAX - 1, COUNT_END, COUNT_END - 1] {
            let mut array = Checked::filled(2, 2, ChecksumKind::Crc32c, 1);
            disk(&mut array.sim, 1).forge_superblock(claim, |before| claim.in_place(value, before));
            array.sim = array.sim.kill_where(false, |_, _| false).expect("three of four members are enough");
            let missing = states(&array.sim)[1];
            assert_eq!(missing, MemberState::Missing, "{claim:?} {value}: {:?}", states(&array.sim));
            array.sim.settle();
            array.verify();
            // And another start, from the superblocks that this one has written.
            array.sim = array.sim.stop_and_restart(false).expect("enough members");
            array.verify();
        }
    }
}

#[test]
fn pages_of_the_map_that_look_unwritten_and_were_written_are_missed() {
    scenes::pages_of_the_map_that_look_unwritten_and_were_written_are_missed();
}

#[test]
fn where_pages_of_the_map_are_not_counted_a_start_counts_them() {
    let mut array = Checked::filled(2, 1, ChecksumKind::Blake3, 5);
    let counted = |array: &mut Checked, said: fn(u64) -> u64| -> Vec<u64> {
        (0..3)
            .map(|id| disk(&mut array.sim, id).forge_superblock(Claim::MapPages, said).expect("one"))
            .collect()
    };
    // As earlier builds wrote it.
    assert_eq!(counted(&mut array, |_| 0), [1; 3]);
    array.sim = array.sim.kill_where(false, |_, _| false).expect("all members");
    array.sim.settle();
    assert_eq!(array.sim.status().state, ArrayState::Online);
    array.verify();
    assert_eq!(counted(&mut array, |said| said), [1; 3]);
}

#[test]
fn pages_of_the_map_that_a_single_member_has_counted_are_not_missed() {
    let mut array =
        Checked { sim: SimArray::create(SimShape::new(2, 1, CHUNK as u32, 8), 6), model: Vec::new() };
    array.sim.settle();
    assert_eq!(disk(&mut array.sim, 1).forge_superblock(Claim::MapPages, |_| 1), Some(0));
    array.sim = array.sim.kill_where(false, |_, _| false).expect("all members");
    array.sim.settle();
    assert_eq!(array.sim.status().state, ArrayState::Online, "{:?}", array.sim.notices.last());
}

#[test]
fn a_member_with_features_that_forbid_writing_is_left_out_and_not_taken_back() {
    let mut array = Checked::filled(2, 2, ChecksumKind::Crc32c, 2);
    disk(&mut array.sim, 3).forge_superblock(Claim::RoCompat, |_| 1 << 33);
    array.sim = array.sim.kill_where(false, |_, _| false).expect("three of four members are enough");
    array.sim.settle();
    assert_eq!(states(&array.sim)[3], MemberState::Missing);
    let device = array.sim.reopen_disk(3);
    let refused = array.sim.admin(AdminRequest::Online { member: MemberIndex(3), device }).unwrap_err();
    assert!(refused.0.contains("ro-compat bit 33") && refused.0.contains("newer Calpe"), "{refused}");
    array.verify();
    assert_eq!(array.sim.status().state, ArrayState::Degraded);
}

#[test]
fn a_member_that_comes_back_with_numbers_at_their_end_is_refused_by_name() {
    for claim in [Claim::Sequence, Claim::EpochNumber] {
        let mut array = Checked::filled(2, 1, ChecksumKind::Blake3, 3);
        array.sim.admin(AdminRequest::Offline { member: MemberIndex(0) }).expect("it can be spared");
        array.sim.settle();
        disk(&mut array.sim, 0).forge_superblock(claim, |before| claim.in_place(COUNT_END - 2, before));
        let device = array.sim.reopen_disk(0);
        let refused = array.sim.admin(AdminRequest::Online { member: MemberIndex(0), device }).unwrap_err();
        assert!(refused.0.contains("member 0 cannot come back"), "{refused}");
        array.sim.settle();
        array.verify();
    }
}

#[test]
fn a_member_with_the_superblock_of_another_lane_is_not_taken_back() {
    let mut array = Checked::filled(2, 1, ChecksumKind::Blake3, 4);
    array.sim.admin(AdminRequest::Offline { member: MemberIndex(0) }).expect("it can be spared");
    array.sim.settle();
    let mut device = array.sim.reopen_disk(0);
    let superblock = device.superblock.as_mut().expect("a member's");
    superblock.part = LanePart { lane: LaneIndex(5), ..superblock.part };
    let refused = array.sim.admin(AdminRequest::Online { member: MemberIndex(0), device }).unwrap_err();
    assert!(refused.0.contains("superblock of lane 5 where that of lane 0 belongs"), "{refused}");
    array.sim.settle();
    array.verify();
}

// ---- Devices under construction ----

#[test]
fn a_device_that_is_built_and_was_rolled_back_over_a_kill_is_whole_when_it_joins() {
    scenes::a_device_that_is_built_and_was_rolled_back_over_a_kill_is_whole_when_it_joins();
}

#[test]
fn slots_not_compared_before_a_stop_are_not_believed() {
    scenes::slots_not_compared_before_a_stop_are_not_believed();
}

/// A quiet array is not called clean before all is compared: a second kill costs nothing.
#[test]
fn what_was_built_is_recorded_while_it_is_compared() {
    let (mut array, id) = scenes::half_built(ChecksumKind::Blake3);
    let rebuilt = scenes::recorded(&array, id);
    array.sim = array.sim.kill_where(false, |_, _| false).expect("all members");
    array
        .sim
        .admin(AdminRequest::Pace { rebuild_min: 1 << 17, rebuild_max: 1 << 17 })
        .expect("it may be set");
    for _ in 0..40 {
        array.note();
        assert!(!array.sim.disks[&id].says_clean() && scenes::recorded(&array, id) >= rebuilt);
    }
    array.sim.settle();
    assert_eq!(array.sim.status().state, ArrayState::Online);
    array.verify();
}

/// A host that is short of memory for reads of the new device for a while.
#[test]
fn a_shortage_while_what_was_built_is_compared_passes() {
    for seconds in [5, 60] {
        let (mut array, id) = scenes::half_built(ChecksumKind::Blake3);
        array.sim = array.sim.kill_where(false, |_, _| false).expect("all members");
        let until = Timestamp(array.sim.now().0 + seconds * 1_000_000_000);
        let data = array.sim.data_region();
        let fault = PassingFault::new(Trouble::Shortage).on(OpKinds::READS).within([data]);
        disk(&mut array.sim, id).inject(fault.until(until));
        for _ in 0..seconds {
            array.sim.settle();
            array.sim.sleep(1000);
        }
        array.sim.settle();
        array.sim.sleep(5000);
        array.sim.settle();
        assert_eq!(
            array.sim.status().state,
            ArrayState::Online,
            "after {seconds} s: {:?}",
            array.sim.notices
        );
        array.verify();
        array.sim.assert_scrub_clean();
    }
}

#[test]
fn what_was_built_before_a_kill_is_not_built_again() {
    let kinds = [(ChecksumKind::Blake3, false), (ChecksumKind::Crc32c, false), (ChecksumKind::None, true)];
    for (checksum, builds_again) in kinds {
        let (mut array, id) = scenes::half_built(checksum);
        let rebuilt = scenes::recorded(&array, id);
        array.sim = array.sim.kill_where(false, |_, _| false).expect("all members");
        let before = array.sim.disks[&id].writes;
        array.sim.settle();
        assert_eq!(array.sim.status().state, ArrayState::Online);
        let (writes, rest) = (array.sim.disks[&id].writes - before, scenes::SLOTS_BUILT - rebuilt);
        assert_eq!(writes > rest + rebuilt / 2, builds_again, "{checksum:?}: {writes} writes, {rest} slots");
        array.verify();
        array.sim.assert_scrub_clean();
    }
}

/// What was not compared is not recorded as built in a clean array, where a start would believe it.
#[test]
fn a_stop_before_all_is_compared_leaves_the_rest_to_be_built() {
    let (mut array, id) = scenes::half_built(ChecksumKind::Blake3);
    let rebuilt = scenes::recorded(&array, id);
    array.sim = array.sim.kill_where(false, |_, _| false).expect("all members");
    array.sim = array.sim.stop_and_restart(false).expect("all members");
    let recorded = scenes::recorded(&array, id);
    assert!(recorded < rebuilt, "{recorded} of {rebuilt}");
    array.sim.settle();
    assert_eq!(array.sim.status().state, ArrayState::Online);
    array.verify();
    array.sim.assert_scrub_clean();
}

// ---- Members that were rolled back ----

#[test]
fn the_member_that_is_newer_than_what_is_served_is_not_built_over() {
    scenes::the_member_that_is_newer_than_what_is_served_is_not_built_over();
}

#[test]
fn a_member_as_it_was_one_start_earlier_is_rebuilt_and_never_read() {
    scenes::a_member_as_it_was_one_start_earlier_is_rebuilt_and_never_read();
}

#[test]
fn a_member_as_it_was_while_the_array_ran_counts_as_one_fault_and_no_more() {
    scenes::a_member_as_it_was_while_the_array_ran_counts_as_one_fault_and_no_more();
}

#[test]
fn a_rolled_back_member_and_as_many_others_out_as_there_is_parity_read_nothing_old_without_a_word() {
    scenes::a_rolled_back_member_and_as_many_others_out_as_there_is_parity_read_nothing_old_without_a_word();
}

#[test]
fn whenever_the_copy_was_taken_with_too_many_out_nothing_old_is_read() {
    scenes::whenever_the_copy_was_taken_with_too_many_out_nothing_old_is_read();
}

#[test]
fn members_that_an_update_did_not_reach_are_not_old() {
    scenes::members_that_an_update_did_not_reach_are_not_old();
}

#[test]
fn a_replay_over_a_rolled_back_member_that_is_cut_off_is_done_again() {
    scenes::a_replay_over_a_rolled_back_member_that_is_cut_off_is_done_again();
}

#[test]
fn a_member_that_leaves_before_it_is_told_what_is_in_place_is_caught_up() {
    scenes::a_member_that_leaves_before_it_is_told_what_is_in_place_is_caught_up();
}

#[test]
fn a_member_rolled_back_while_it_is_out_returns_whole() {
    scenes::a_member_rolled_back_while_it_is_out_returns_whole();
}

#[test]
fn of_all_members_but_one_as_they_were_one_start_earlier_nothing_is_served() {
    for (data, parity, checksum) in shapes() {
        let random = &mut Random::new(5);
        let mut array = Checked::filled(data, parity, checksum, 5);
        array.load(20, random);
        array.sim.settle();
        let old: Vec<(u32, DiskCopy)> =
            (1..u32::from(data + parity)).map(|id| (id, array.copy(id))).collect();
        let before = array.model.clone();
        array = array.restart_with(&[], false).expect("all is there");
        array.load(20, random);
        let old: Vec<(u32, &DiskCopy)> = old.iter().map(|(id, copy)| (*id, copy)).collect();
        let Checked { sim, model } = array;
        let (disks, model) = (sim.disks.clone(), model);
        let error = Checked { sim, model: model.clone() }.restart_with(&old, false).map(drop).unwrap_err();
        assert!(matches!(error, AssemblyError::Unconfirmed { member: MemberIndex(0), .. }), "{error}");
        // When forced, it starts from the older state, without the member that is newer.
        let _ = disks;
        let mut again = Checked::filled(data, parity, checksum, 5);
        let random = &mut Random::new(5);
        again.load(20, random);
        again.sim.settle();
        again = again.restart_with(&[], false).expect("all is there");
        again.load(20, random);
        let mut forced = again.restart_with(&old, true).expect("forced");
        assert_eq!(states(&forced.sim)[0], MemberState::Missing);
        forced.sim.settle();
        forced.model = before;
        forced.verify();
    }
}

/// The checks of members that come back must not cost honest ones a rebuild.
#[test]
fn members_that_leave_one_right_after_the_other_under_load_are_caught_up() {
    let mut rebuilt = 0;
    for seed in 0..12 {
        let random = &mut Random::new(seed);
        let mut array = Checked::filled(2, 2, ChecksumKind::Blake3, seed);
        array.load(1 + random.below(40), random);
        // Both connections end at once, with writes under way.
        for at in 0..8 {
            array.sim.submit_write(at * CHUNK as u64, &[at as u8; BLOCK], at % 2 == 0);
            array.model[at as usize * CHUNK..][..BLOCK].fill(at as u8);
        }
        for _ in 0..random.below(30) {
            array.sim.step();
        }
        let ids = [0, 1].map(|member| array.sim.disk_of(member).expect("in service"));
        ids.iter().for_each(|&id| disk(&mut array.sim, id).dead = true);
        array.sim.settle();
        array.load(10, random);
        array.sim.settle();
        assert!(states(&array.sim)[..2].iter().all(|&state| state != MemberState::Online));
        for (member, &id) in ids.iter().enumerate() {
            disk(&mut array.sim, id).dead = false;
            let device = array.sim.reopen_disk(id);
            let member = MemberIndex(member as u16);
            let done = array.sim.admin(AdminRequest::Online { member, device }).expect("it returns");
            assert!(done.0.contains("caught up"), "seed {seed}, member {member}: {done:?}");
        }
        array.sim.settle();
        // A member that left while the batch that records a checkpoint was on its way cannot show that batch.
        rebuilt +=
            array.sim.notices.iter().filter(|notice| notice.text.contains("not only caught up")).count();
        array.verify();
        array.offline(2);
        array.offline(3);
        array.verify();
    }
    assert!(rebuilt <= 6, "{rebuilt} of 24");
}

/// The second of two members that leave dies while the epoch without the first is written: it holds that
/// epoch or the one before.
#[test]
fn a_member_that_leaves_while_an_epoch_is_written_is_caught_up() {
    for gap in 0..80 {
        let random = &mut Random::new(gap);
        let mut array = Checked::filled(2, 2, ChecksumKind::Blake3, gap);
        array.load(6, random);
        array.sim.settle();
        let ids = [0, 1].map(|member| array.sim.disk_of(member).expect("in service"));
        array.begin_to_lose(ids[0], gap);
        disk(&mut array.sim, ids[1]).dead = true;
        array.sim.settle();
        array.load(10, random);
        array.sim.settle();
        for (member, &id) in ids.iter().enumerate() {
            disk(&mut array.sim, id).dead = false;
            let device = array.sim.reopen_disk(id);
            let member = MemberIndex(member as u16);
            let done = array.sim.admin(AdminRequest::Online { member, device }).expect("it returns");
            assert!(done.0.contains("caught up"), "gap {gap}, member {member}: {done:?}");
        }
        array.sim.settle();
        array.verify();
        array.offline(2);
        array.offline(3);
        array.verify();
    }
}

#[test]
fn a_member_whose_log_cannot_be_read_for_a_moment_is_caught_up_and_not_rebuilt() {
    // Of some members the superblock alone shows that they are current.
    let seeds: Vec<u64> = (3..11).filter(|&seed| is_rebuilt_without_its_log(seed, 60_000)).collect();
    assert!(!seeds.is_empty(), "no member needed its log");
    for seed in seeds {
        assert!(!is_rebuilt_without_its_log(seed, 3_000), "seed {seed}");
    }
}

/// Takes a member offline and back, whose log cannot be read for so long. Returns whether it was rebuilt.
fn is_rebuilt_without_its_log(seed: u64, millis: u64) -> bool {
    let mut array = Checked::filled(2, 1, ChecksumKind::Blake3, 8);
    array.load(6, &mut Random::new(seed));
    array.offline(1);
    array.load(6, &mut Random::new(seed + 1));
    array.sim.settle();
    let until = Timestamp(array.sim.now().0 + millis * 1_000_000);
    let log = array.sim.log_region();
    let fault = PassingFault::new(Trouble::Medium).on(OpKinds::READS).within(vec![log]).until(until);
    disk(&mut array.sim, 1).inject(fault);
    array.sim.notices.clear();
    let device = array.sim.reopen_disk(1);
    array.sim.admin(AdminRequest::Online { member: MemberIndex(1), device }).expect("it returns");
    for _ in 0..200 {
        array.sim.sleep(100);
        array.sim.settle();
    }
    assert_eq!(states(&array.sim)[1], MemberState::Online);
    let rebuilt =
        array.sim.notices.iter().any(|notice| notice.text.contains("rebuilt and not only caught up"));
    array.offline(0);
    array.verify();
    rebuilt
}

#[test]
fn an_array_that_fails_while_a_returning_members_log_is_read_again_serves_when_it_is_back() {
    let mut array = Checked::filled(2, 1, ChecksumKind::Blake3, 8);
    array.load(6, &mut Random::new(3));
    array.offline(1);
    array.load(6, &mut Random::new(4));
    array.sim.settle();
    let until = Timestamp(array.sim.now().0 + 3_000 * 1_000_000);
    let log = array.sim.log_region();
    let fault = PassingFault::new(Trouble::Medium).on(OpKinds::READS).within(vec![log]).until(until);
    disk(&mut array.sim, 1).inject(fault);
    let device = array.sim.reopen_disk(1);
    array.sim.admin(AdminRequest::Online { member: MemberIndex(1), device }).expect("it returns");
    array.sim.sleep(300);
    // Another member goes away meanwhile, and comes back.
    disk(&mut array.sim, 2).dead = true;
    let write = array.sim.submit_write(BLOCK as u64, &[9; BLOCK], false);
    array.model[BLOCK..2 * BLOCK].fill(9);
    array.sim.wait(write).expect_err("too few members");
    assert_eq!(array.sim.status().state, ArrayState::Failed);
    disk(&mut array.sim, 2).dead = false;
    let device = array.sim.reopen_disk(2);
    array.sim.admin(AdminRequest::Online { member: MemberIndex(2), device }).expect("it returns");
    for _ in 0..200 {
        array.sim.sleep(100);
        array.sim.settle();
    }
    assert_eq!(states(&array.sim), [MemberState::Online; 3]);
    // The failed write may or may not have been done.
    let write = array.sim.submit_write(BLOCK as u64, &[9; BLOCK], false);
    array.sim.wait(write).expect("it serves");
    array.verify();
    array.offline(0);
    array.verify();
}

/// Members leave one after the other at any moment of checkpoints, the daemon may be killed in between, and
/// they come back as they were or as a copy from any earlier moment: no old data is read from them, and
/// nothing is missing.
#[test]
fn members_that_leave_at_any_moment_of_a_checkpoint_come_back_whole_from_copies_too() {
    let range = std::env::var("CALPE_LEAVING_SEEDS").unwrap_or_else(|_| "0..100".into());
    let (from, to) = range.split_once("..").expect("a range");
    let mut rebuilt = [0_u32; 2];
    for seed in from.parse::<u64>().expect("a number")..to.parse().expect("a number") {
        leave_at_any_moment(seed, &mut rebuilt);
    }
    println!("rebuilt: as they were {}, with copies {}", rebuilt[0], rebuilt[1]);
}

fn step_some(array: &mut Checked, steps: u64, random: &mut Random, copies: &mut [Option<DiskCopy>]) {
    for _ in 0..random.below(steps + 1) {
        if !array.sim.step() || random.one_in(30) {
            array.sim.sleep(if random.one_in(20) { 2_500 } else { 100 * (1 + random.below(4)) });
        }
        if random.one_in(25) {
            let member = random.below(copies.len() as u64) as u16;
            if let Some(id) = array.sim.disk_of(member) {
                let durable = random.one_in(2);
                copies[usize::from(member)] = Some(array.sim.disks[&id].copy(durable));
            }
        }
    }
}

fn leave_at_any_moment(seed: u64, rebuilt: &mut [u32; 2]) {
    let random = &mut Random::new(0x1ea_e000 + seed);
    let kinds = [ChecksumKind::None, ChecksumKind::Blake3, ChecksumKind::None];
    let (data, parity) = [(2, 1), (2, 2), (2, 2), (3, 2), (2, 3)][random.below(5) as usize];
    let width = usize::from(data + parity);
    let log = [256 << 10, 256 << 10, 1 << 20][random.below(3) as usize];
    let mut array = Checked::with_log(data, parity, kinds[random.below(3) as usize], seed, log);
    array.load(random.below(30), random);
    let mut copies: Vec<Option<DiskCopy>> = vec![None; width];
    for _ in 0..1 + random.below(3) {
        step_some(&mut array, 60, random, &mut copies);
        let mut writes = Vec::new();
        let stripes = array.model.len() as u64 / (CHUNK as u64 * u64::from(data));
        for stripe in 0..stripes {
            if random.one_in(2) {
                continue;
            }
            let bytes_of = CHUNK as u64 * u64::from(data);
            let whole = random.one_in(4);
            let (at, len) = match whole {
                true => (stripe * bytes_of, bytes_of as usize),
                false => (stripe * bytes_of + random.below(bytes_of / BLOCK as u64) * BLOCK as u64, BLOCK),
            };
            let mut bytes = vec![0; len];
            random.fill(&mut bytes);
            writes.push(array.sim.submit_write(at, &bytes, random.one_in(3)));
            array.model[at as usize..][..len].copy_from_slice(&bytes);
        }
        let mut members: Vec<u16> = (0..width as u16).collect();
        let mut out = Vec::new();
        for _ in 0..1 + random.below(u64::from(parity)) {
            step_some(&mut array, 120, random, &mut copies);
            let member = members.swap_remove(random.below(members.len() as u64) as usize);
            let id = array.sim.disk_of(member).expect("in service");
            match random.one_in(3) {
                true => disk(&mut array.sim, id).dead = true,
                false => _ = array.sim.submit_admin(AdminRequest::Fail { member: MemberIndex(member) }),
            }
            out.push((member, id));
        }
        step_some(&mut array, 60, random, &mut copies);
        if random.one_in(3) {
            for write in writes.drain(..) {
                array.sim.wait(write).expect("enough members");
            }
            step_some(&mut array, 40, random, &mut copies);
            out.iter().for_each(|&(_, id)| disk(&mut array.sim, id).dead = false);
            if random.one_in(2) {
                array.load(0, random);
                step_some(&mut array, 40, random, &mut copies);
                let Checked { sim, model } = array;
                let sim =
                    sim.power_cut_and_restart(false).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
                array = Checked { sim, model };
            } else {
                array = array.restart_with(&[], false).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            }
        }
        step_some(&mut array, 60, random, &mut copies);
        for write in writes {
            array.sim.wait(write).expect("enough members");
        }
        if random.one_in(2) {
            array.load(random.below(20), random);
        }
        if random.one_in(2) {
            array.sim.settle();
        }
        let mut from_copies = false;
        array.sim.notices.clear();
        let mut extra = random.below(3);
        while !out.is_empty() {
            let (member, id) = out.remove(0);
            let states_now = states(&array.sim);
            if states_now[usize::from(member)] == MemberState::Online
                && array.sim.disk_of(member).is_some_and(|id| !array.sim.disks[&id].dead)
            {
                continue;
            }
            if states_now[usize::from(member)] == MemberState::Online {
                // The array has not noticed yet that the disk is dead.
                array.load(1, random);
                array.sim.settle();
            }
            disk(&mut array.sim, id).dead = false;
            let id = array.sim.disk_out_of_use(member).unwrap_or(id);
            if let (true, Some(copy)) = (random.one_in(2), &copies[usize::from(member)]) {
                disk(&mut array.sim, id).restore(copy);
                from_copies = true;
            }
            let device = array.sim.reopen_disk(id);
            let done = array.sim.admin(AdminRequest::Online { member: MemberIndex(member), device });
            done.unwrap_or_else(|error| panic!("seed {seed}: {error:?}"));
            if random.one_in(2) {
                let mut copies: Vec<Option<DiskCopy>> = vec![None; width];
                for _ in 0..random.below(4) {
                    step_some(&mut array, 60, random, &mut copies);
                    if random.one_in(3) {
                        array.load(random.below(4), random);
                    }
                }
                // Another leaves while this one is on its way back.
                let now = states(&array.sim);
                let is_there = |&member: &u16| {
                    let lives = array.sim.disk_of(member).is_some_and(|id| !array.sim.disks[&id].dead);
                    lives && now[usize::from(member)] == MemberState::Online
                };
                let online: Vec<u16> = (0..width as u16).filter(is_there).collect();
                if extra > 0 && online.len() > usize::from(data) {
                    extra -= 1;
                    let other = online[random.below(online.len() as u64) as usize];
                    let id = array.sim.disk_of(other).expect("in service");
                    array.sim.submit_admin(AdminRequest::Fail { member: MemberIndex(other) });
                    step_some(&mut array, 60, random, &mut copies);
                    out.retain(|(member, _)| *member != other);
                    out.push((other, id));
                }
            }
        }
        if random.one_in(3) {
            array.load(random.below(5), random);
        }
        array.sim.settle();
        rebuilt[usize::from(from_copies)] +=
            array.sim.notices.iter().filter(|notice| notice.text.contains("not only caught up")).count()
                as u32;
        assert!(
            states(&array.sim).iter().all(|&state| state == MemberState::Online),
            "seed {seed}: {:?} {:?}",
            states(&array.sim),
            array.sim.notices
        );
        copies.fill(None);
        if random.one_in(2) {
            let lost = array.sim.notices.iter().find(|notice| notice.text.contains("could not be replayed"));
            assert!(lost.is_none(), "seed {seed}: {lost:?}");
        }
    }
    let mut members: Vec<u16> = (0..width as u16).collect();
    let mut out = Vec::new();
    for _ in 0..parity {
        let member = members.swap_remove(random.below(members.len() as u64) as usize);
        array.offline(member);
        out.push(member);
    }
    let read = array
        .sim
        .read(0, array.model.len())
        .unwrap_or_else(|error| panic!("seed {seed}, without {out:?}: {error:?}"));
    let differing: Vec<usize> = (0..read.len() / BLOCK)
        .filter(|block| read[block * BLOCK..][..BLOCK] != array.model[block * BLOCK..][..BLOCK])
        .collect();
    assert!(differing.is_empty(), "seed {seed}, without {out:?}: {differing:?}: {:?}", array.sim.notices);
}
