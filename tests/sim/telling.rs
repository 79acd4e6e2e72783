//! What an array reports about itself, its members and its requests is true.

use crate::scenes::{CHUNK, filled, live};
use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{DiskRegion, OpKinds, PassingFault, SimArray, SimDisk, Trouble};
use calpe_core::units::MemberIndex;
use calpe_core::volume::{
    AdminRequest, ArrayState, ClientError, ClientRequest, LogState, MemberCondition, NoticeKind, NoticeLevel,
};

const BLOCK: usize = 4096;

fn disk(sim: &mut SimArray, member: u16) -> &mut SimDisk {
    let id = sim.disk_of(member).expect("in service");
    sim.disks.get_mut(&id).expect("a disk")
}

fn online(sim: &mut SimArray, member: u16) -> Result<String, String> {
    let disk = sim.disk_out_of_use(member).expect("it is out");
    sim.disks.get_mut(&disk).expect("a disk").dead = false;
    let device = sim.reopen_disk(disk);
    let request = AdminRequest::Online { member: MemberIndex(member), device };
    sim.admin(request).map(|outcome| outcome.0).map_err(|error| error.0)
}

/// The notices of one kind.
fn told(sim: &SimArray, kind: NoticeKind) -> Vec<(NoticeLevel, String)> {
    let of_kind = sim.notices.iter().filter(|notice| notice.kind == kind);
    of_kind.map(|notice| (notice.level, notice.text.clone())).collect()
}

fn scrub(sim: &mut SimArray) -> (u64, u64) {
    sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    sim.settle();
    let last = sim.status().last_scrub.expect("it has ended");
    (last.errors, last.repaired)
}

#[test]
fn a_failed_array_names_the_members_that_can_come_back_and_takes_them() {
    let (mut sim, model) = filled(2, 2, ChecksumKind::Blake3);
    for member in 0..3 {
        disk(&mut sim, member).dead = true;
        let id = sim.submit_write(0, &model[..BLOCK], true);
        assert_eq!(sim.wait(id).is_ok(), member < 2);
        sim.settle();
    }
    let status = sim.status();
    assert_eq!(status.state, ArrayState::Failed);
    let first = |member: usize| status.members[member].conditions.contains(&MemberCondition::ServedLast);
    assert_eq!([first(0), first(1), first(2), first(3)], [false, false, true, false]);
    for early in [0, 1] {
        let refusal = online(&mut sim, early).expect_err("it lacks what was written since");
        assert!(refusal.contains("first") && refusal.contains("for member 2;"), "{refusal}");
    }
    online(&mut sim, 2).expect("it comes first");
    sim.settle();
    assert!(sim.status().members.iter().all(|member| member.conditions.is_empty()));
    for early in [0, 1] {
        online(&mut sim, early).expect("it is caught up");
        sim.settle();
    }
    assert_eq!(sim.status().state, ArrayState::Online);
    assert!(sim.read(0, model.len()).expect("readable") == model);
    assert_eq!(told(&sim, NoticeKind::ArrayServesAgain).len(), 1);
}

/// An array of which two members vanished and came back as older copies.
fn refused_while_it_runs() -> SimArray {
    let (mut sim, model) = filled(2, 1, ChecksumKind::Blake3);
    // The superblocks say that the array is dirty before the copies are taken, so the copies cannot be
    // recognised by that.
    let id = sim.submit_write(0, &model[..BLOCK], true);
    sim.wait(id).expect("written");
    let older = [0, 1].map(|member| disk(&mut sim, member).copy(false));
    for round in 0..8 {
        let id = sim.submit_write(round * 5 * BLOCK as u64, &[round as u8; BLOCK], true);
        sim.wait(id).expect("written");
    }
    for member in [0, 1] {
        disk(&mut sim, member).dead = true;
    }
    let id = sim.submit_write(0, &model[..BLOCK], true);
    assert!(sim.wait(id).is_err());
    assert_eq!(sim.status().state, ArrayState::Failed);
    for (id, copy) in [0, 1].into_iter().zip(&older) {
        sim.disks.get_mut(&id).expect("a disk").restore(copy);
    }
    let back = (0..2).find(|&member| {
        let status = sim.status();
        status.members[member].conditions.contains(&MemberCondition::ServedLast)
    });
    let back = back.expect("one was in service until then") as u16;
    online(&mut sim, back).expect("its superblock says that it is current");
    sim.settle();
    live(&mut sim, 20);
    sim
}

#[test]
fn an_array_whose_log_is_refused_while_it_runs_has_failed_and_begins_nothing() {
    let mut sim = refused_while_it_runs();
    let status = sim.status();
    assert!(matches!(status.log, LogState::Refused(_)), "{:?}", status.log);
    assert_eq!(status.state, ArrayState::Failed);
    assert_eq!(told(&sim, NoticeKind::ArrayServesAgain), [], "it does not");
    for request in [AdminRequest::ScrubStart, AdminRequest::Repair] {
        let refusal = sim.admin(request).expect_err("nothing can run").0;
        assert!(refusal.contains("cannot be served"), "{refusal}");
    }
    let device = sim.add_blank_disk();
    sim.admin(AdminRequest::Replace { member: MemberIndex(0), device }).expect_err("nothing can be built");
    assert!(sim.status().activities.is_empty());
    assert_eq!(sim.read(0, BLOCK), Err(ClientError::Io));
}

#[test]
fn of_an_array_whose_log_is_refused_no_member_that_is_taken_out_makes_it_degraded() {
    let mut sim = refused_while_it_runs();
    // One member is out already: without another one the array would have too few.
    let member = (0..3)
        .map(MemberIndex)
        .find(|member| sim.status().members[usize::from(member.0)].state != MemberState::Online);
    let member = member.expect("one is out");
    let would = sim.would(&AdminRequest::Offline { member }).expect("it can be done").0;
    assert!(would.contains("stays FAILED") && !would.contains("DEGRADED"), "{would}");
    sim.admin(AdminRequest::Offline { member }).expect("taken out");
    let last = sim.notices.last().expect("it was told").text.clone();
    assert!(!last.contains("DEGRADED"), "{last}");
    assert_eq!(sim.status().state, ArrayState::Failed);
}

#[test]
fn a_rebuild_that_an_administrator_ends_is_no_error() {
    let (mut sim, _) = filled(2, 1, ChecksumKind::Blake3);
    sim.admin(AdminRequest::Fail { member: MemberIndex(1) }).expect("taken out");
    let device = sim.add_blank_disk();
    sim.admin(AdminRequest::Replace { member: MemberIndex(1), device }).expect("it begins");
    sim.admin(AdminRequest::Offline { member: MemberIndex(1) }).expect("taken out");
    let out = told(&sim, NoticeKind::MemberOut);
    let (level, text) = out.last().expect("it was told");
    assert!(text.starts_with("the rebuild of member 1 ended (OFFLINE)"), "{text}");
    assert_eq!(*level, NoticeLevel::Warning);
}

#[test]
fn a_write_that_ends_for_lack_of_space_is_counted_and_told_and_nothing_else_is_said_to_succeed() {
    let (mut sim, model) = filled(2, 2, ChecksumKind::Blake3);
    for disk in sim.disks.values_mut() {
        disk.inject(PassingFault::new(Trouble::NoSpace).on(OpKinds::WRITES));
    }
    // One write goes into the log, the other to a place of its own.
    let writes = [
        sim.submit_write(0, &[7; BLOCK], false),
        sim.submit_write(2 * CHUNK as u64 * 3, &[8; 2 * CHUNK], false),
    ];
    live(&mut sim, 40);
    for write in writes {
        assert_eq!(sim.poll(write).map(|end| end.map(|_| ())), Some(Err(ClientError::NoSpace)));
    }
    assert_eq!(sim.status().client_errors, 2);
    let failed = told(&sim, NoticeKind::ClientFailed);
    assert!(failed.len() == 1 && failed[0].1.contains("for lack of space"), "{failed:?}");
    assert_eq!(told(&sim, NoticeKind::ShortageEnded), [], "nothing has succeeded");
    let full = |sim: &SimArray| {
        let status = sim.status();
        status.members.iter().filter(|member| member.conditions.contains(&MemberCondition::Full)).count()
    };
    assert!(full(&sim) > 0);
    sim.disks.values_mut().for_each(SimDisk::clear_faults);
    live(&mut sim, 5);
    sim.settle();
    assert_eq!((full(&sim), sim.status().state), (0, ArrayState::Online));
    let read = sim.read(CHUNK as u64, CHUNK).expect("readable");
    assert!(read == model[CHUNK..2 * CHUNK]);
    sim.admin(AdminRequest::Clear { member: None }).expect("cleared");
    assert_eq!(sim.status().client_errors, 0);
}

#[test]
fn a_device_that_another_takes_the_place_of_while_it_is_built_is_said_to_be_given_up() {
    let (mut sim, _) = filled(2, 2, ChecksumKind::Blake3);
    sim.admin(AdminRequest::Fail { member: MemberIndex(1) }).expect("failed");
    let device = sim.add_blank_disk();
    let first = sim.submit_admin(AdminRequest::Replace { member: MemberIndex(1), device });
    assert_eq!(sim.status().members[1].state, MemberState::Rebuilding);
    let device = sim.add_blank_disk();
    let second = sim.submit_admin(AdminRequest::Replace { member: MemberIndex(1), device });
    let given_up = told(&sim, NoticeKind::ReplacementGivenUp);
    assert!(given_up.len() == 1 && given_up[0].1.contains("rebuild of member 1 ended"), "{given_up:?}");
    sim.settle();
    assert_eq!(sim.status().state, ArrayState::Online);
    let mut outcome = |request| sim.poll_admin(request).expect("it has ended");
    let first = outcome(first).expect_err("nothing comes of it").0;
    assert!(first.contains("was cancelled or given up meanwhile"), "{first}");
    let second = outcome(second).expect("it begins").0;
    assert!(second.contains("is given up") && !second.contains("beside it"), "{second}");
}

#[test]
fn a_member_that_goes_offline_before_the_log_is_in_place_says_so_wherever_that_is_told() {
    let (mut sim, _) = filled(2, 1, ChecksumKind::Blake3);
    let offline = AdminRequest::Offline { member: MemberIndex(0) };
    let would = sim.would(&offline).expect("it can go").0;
    assert!(!would.contains("waited for"), "{would}");
    sim.write(0, &[1; BLOCK]).expect("written");
    let would = sim.would(&offline).expect("it can go").0;
    assert!(would.contains("is waited for up to 3 s; then member 0 is OFFLINE"), "{would}");
    let hung = sim.disk_of(2).expect("in service");
    let id = sim.submit_admin(offline);
    // 3 s for the checkpoint and 3 s for the superblocks, both held up by the same member.
    for _ in 0..70 {
        while sim.step_where(|disk, _| disk != hung) {}
        sim.sleep(100);
    }
    let said = sim.poll_admin(id).expect("it does not wait for ever").expect("it went").0;
    assert!(said.contains("could not be put in place on its device in time"), "{said}");
    let early = "taken offline by an administrator, before what was written last was in place on its device";
    let out = told(&sim, NoticeKind::MemberOut);
    assert!(out.last().is_some_and(|(_, text)| text.contains(early)), "{out:?}");
    let member = &sim.status().members[0];
    assert_eq!((member.state, member.reason.as_deref()), (MemberState::Offline, Some(early)));
}

#[test]
fn a_member_that_goes_offline_while_the_log_is_replayed_has_it_in_place_or_says_that_it_may_not() {
    for hangs in [false, true] {
        let (mut sim, _) = filled(1, 2, ChecksumKind::Blake3);
        let id = sim.submit_write(0, &[9; BLOCK], true);
        sim.wait(id).expect("written");
        let mut sim = sim.kill_and_restart(false).expect("it starts");
        let start = sim.data_region().start;
        let own = sim.disk_of(0).expect("in service");
        let hung = sim.disk_of(2).filter(|_| hangs);
        let is_in_place = |sim: &SimArray| sim.disks[&own].peek(start, BLOCK) == [9; BLOCK];
        assert!(!is_in_place(&sim), "it is in the log alone");
        let offline = AdminRequest::Offline { member: MemberIndex(0) };
        let would = sim.would(&offline).expect("it can go").0;
        assert!(would.contains("is waited for up to 3 s; then member 0 is OFFLINE"), "{would}");
        let id = sim.submit_admin(offline);
        for _ in 0..70 {
            while sim.step_where(|disk, _| Some(disk) != hung) {}
            sim.sleep(100);
        }
        let said = sim.poll_admin(id).expect("it does not wait for ever").expect("it went").0;
        let is_early = said.contains("could not be put in place on its device in time");
        assert_eq!((is_early, is_in_place(&sim)), (hangs, !hangs), "{said}");
        let reason = sim.status().members[0].reason.clone().expect("a reason");
        assert_eq!(reason.contains("before what was written last was in place"), hangs, "{reason}");
    }
}

#[test]
fn of_a_member_that_goes_while_its_replacement_is_built_it_is_told_how_it_can_come_back() {
    let (mut sim, _) = filled(2, 2, ChecksumKind::Blake3);
    let mut device = || sim.add_blank_disk();
    let new = [device(), device()];
    for (member, device) in [0, 1].map(MemberIndex).into_iter().zip(new) {
        sim.submit_admin(AdminRequest::Replace { member, device });
    }
    for (request, advice) in [
        (AdminRequest::Offline { member: MemberIndex(0) }, "'calpe replace --cancel' gives that up"),
        (
            AdminRequest::Fail { member: MemberIndex(1) },
            "more; the device that is being built takes its place",
        ),
    ] {
        sim.submit_admin(request);
        let out = told(&sim, NoticeKind::MemberOut);
        assert!(out.last().is_some_and(|(_, text)| text.contains(advice)), "{out:?}");
    }
    sim.settle();
    assert_eq!(sim.status().state, ArrayState::Online);
    assert_eq!(told(&sim, NoticeKind::ArrayWhole).len(), 1);
}

#[test]
fn a_replacement_of_a_member_in_service_brings_no_member_back() {
    let (mut sim, _) = filled(2, 1, ChecksumKind::Blake3);
    let device = sim.add_blank_disk();
    sim.admin(AdminRequest::Replace { member: MemberIndex(1), device }).expect("it begins");
    sim.settle();
    assert_eq!(told(&sim, NoticeKind::MemberReplaced).len(), 1);
    assert_eq!(told(&sim, NoticeKind::ArrayWhole), []);
}

#[test]
fn of_a_device_that_is_full_while_it_is_built_it_is_told_that_it_leaves_and_comes_back() {
    let (mut sim, _) = filled(2, 1, ChecksumKind::Blake3);
    sim.admin(AdminRequest::Fail { member: MemberIndex(1) }).expect("failed");
    let device = sim.add_blank_disk();
    let new = *sim.disks.keys().max().expect("the new one");
    let full = PassingFault::new(Trouble::NoSpace).on(OpKinds::WRITES);
    let data = DiskRegion::Data.ranges(&sim.disks[&new]);
    sim.disks.get_mut(&new).expect("a disk").inject(full.within(data));
    sim.submit_admin(AdminRequest::Replace { member: MemberIndex(1), device });
    live(&mut sim, 2);
    let told = told(&sim, NoticeKind::MemberFull);
    assert!(
        told.len() == 1 && told[0].1.contains("full for 20 s, it leaves, and comes back when"),
        "{told:?}"
    );
    assert_eq!(sim.status().members[1].conditions, [MemberCondition::Full]);
    live(&mut sim, 25);
    let member = &sim.status().members[1];
    assert!(member.state == MemberState::Missing && member.returns, "{member:?}");
}

#[test]
fn errors_of_a_new_device_are_not_counted_of_the_one_that_it_is_to_replace() {
    let (mut sim, _) = filled(2, 2, ChecksumKind::Blake3);
    let device = sim.add_blank_disk();
    let new = *sim.disks.keys().max().expect("the new one");
    sim.disks.get_mut(&new).expect("a disk").inject(PassingFault::new(Trouble::Medium).on(OpKinds::WRITES));
    let replace = AdminRequest::Replace { member: MemberIndex(1), device };
    let answer = sim.admin(replace).expect_err("it is given up before it is recorded").0;
    assert!(answer.contains("given up meanwhile"), "{answer}");
    sim.settle();
    let member = &sim.status().members[1];
    assert_eq!((member.state, member.replacement), (MemberState::Online, None));
    assert_eq!(told(&sim, NoticeKind::ReplacementGivenUp).len(), 1);
    assert_eq!((member.counters.write_errors, member.counters.read_errors), (0, 0));
}

#[test]
fn a_new_device_of_a_faulted_member_that_leaves_at_once_is_no_success() {
    let (mut sim, _) = filled(2, 2, ChecksumKind::Blake3);
    sim.admin(AdminRequest::Fail { member: MemberIndex(1) }).expect("it leaves");
    let device = sim.add_blank_disk();
    let new = *sim.disks.keys().max().expect("the new one");
    sim.disks.get_mut(&new).expect("a disk").inject(PassingFault::new(Trouble::Medium).on(OpKinds::WRITES));
    let replace = AdminRequest::Replace { member: MemberIndex(1), device };
    let answer = sim.admin(replace).expect_err("it has left").0;
    assert!(answer.contains("the new device has left again meanwhile"), "{answer}");
    assert_eq!(sim.status().members[1].state, MemberState::Faulted);
}

#[test]
fn copies_of_pages_that_give_errors_count_as_read_errors() {
    let (mut sim, _) = filled(2, 2, ChecksumKind::Blake3);
    let pages = DiskRegion::Pages.ranges(&sim.disks[&0]);
    disk(&mut sim, 1).inject(PassingFault::new(Trouble::Medium).on(OpKinds::READS).within(pages));
    let (errors, _) = scrub(&mut sim);
    assert!(errors > 0);
    let counters = sim.status().members[1].counters;
    assert!(counters.read_errors > 0 && counters.checksum_errors == 0, "{counters:?}");
}

#[test]
fn copies_of_pages_count_as_repaired_when_they_were_written_and_read_again() {
    for places in [0..1, 1..2, 0..2] {
        let (mut sim, model) = filled(2, 2, ChecksumKind::Blake3);
        let pages = DiskRegion::Pages.ranges(&sim.disks[&0]);
        // Bad sectors that become good when they are written: in one place of each copy, or in both.
        let starts = pages.iter().flat_map(|range| (range.start..range.end).step_by(BLOCK));
        let blocks = starts.map(|at| at / BLOCK as u64).enumerate();
        let first = blocks.filter(|(at, _)| places.contains(&(at % 2))).map(|(_, block)| block);
        disk(&mut sim, 1).bad_blocks.extend(first.collect::<Vec<u64>>());
        let (errors, repaired) = scrub(&mut sim);
        assert!(errors > 0 && errors == repaired, "{places:?}: {errors}, {repaired}");
        assert_eq!(sim.status().members[1].counters.repaired, repaired, "{places:?}");
        assert_eq!(scrub(&mut sim), (0, 0), "{places:?}");
        // A device that takes writes but cannot be read.
        disk(&mut sim, 1).inject(PassingFault::new(Trouble::Medium).on(OpKinds::READS).within(pages));
        assert_eq!(scrub(&mut sim), (errors, 0), "{places:?}");
        assert_eq!(sim.status().members[1].counters.repaired, repaired, "as before, {places:?}");
        disk(&mut sim, 1).clear_faults();
        assert_eq!(scrub(&mut sim), (0, 0), "{places:?}");
        assert!(sim.read(0, model.len()).expect("readable") == model);
    }
}

#[test]
fn a_repair_that_comes_before_the_log_is_replayed_is_told_to_wait() {
    let (mut sim, _) = filled(2, 1, ChecksumKind::Blake3);
    let id = sim.submit_write(0, &[3; BLOCK], true);
    sim.wait(id).expect("written");
    let mut sim = sim.kill_and_restart(false).expect("it starts");
    assert_eq!(sim.status().log, LogState::Replaying);
    let request = sim.submit_admin(AdminRequest::Repair);
    let refusal = sim.poll_admin(request).expect("at once").expect_err("not yet").0;
    assert!(refusal.contains("being replayed"), "{refusal}");
    let flush = sim.submit(ClientRequest::Flush);
    sim.wait(flush).expect("it serves");
    sim.admin(AdminRequest::Repair).expect("it begins");
}

#[test]
fn a_scrub_counts_as_repaired_what_can_be_read_again() {
    let (mut sim, model) = filled(2, 2, ChecksumKind::Blake3);
    let data = sim.data_region();
    let blocks = sim.disks[&1].written_blocks(data.clone());
    disk(&mut sim, 1).bad_blocks.extend(&blocks);
    let (errors, repaired) = scrub(&mut sim);
    assert_eq!(
        (errors, repaired),
        (blocks.len() as u64, blocks.len() as u64),
        "a bad sector that is written is good"
    );
    assert_eq!(sim.status().members[1].counters.repaired, repaired);
    // A device that takes writes but cannot be read.
    disk(&mut sim, 1).inject(PassingFault::new(Trouble::Medium).on(OpKinds::READS).within([data]));
    let (errors, repaired) = scrub(&mut sim);
    assert_eq!((errors, repaired), (blocks.len() as u64, 0));
    assert_eq!(sim.status().members[1].counters.repaired, errors, "as before");
    disk(&mut sim, 1).clear_faults();
    assert_eq!(scrub(&mut sim), (0, 0));
    assert!(sim.read(0, model.len()).expect("readable") == model);
}

#[test]
fn a_scrub_finds_and_mends_superblocks_that_were_overwritten() {
    for (garbage, copies) in [(0x00, 4), (0x77, 4), (0x77, 1), (0x00, 2)] {
        let (mut sim, model) = filled(2, 2, ChecksumKind::Blake3);
        assert_eq!(scrub(&mut sim), (0, 0), "they are whole");
        let ranges = DiskRegion::Superblocks.ranges(&sim.disks[&2]);
        for range in ranges.into_iter().rev().take(copies) {
            let len = (range.end - range.start) as usize;
            disk(&mut sim, 2).poke(range.start, &vec![garbage; len]);
        }
        let (errors, repaired) = scrub(&mut sim);
        assert_eq!(
            (errors, repaired),
            (copies as u64, copies as u64),
            "{garbage}: none was mended before it was seen"
        );
        assert_eq!(told(&sim, NoticeKind::SuperblockDamaged).len() as u64, errors);
        let counters = sim.status().members[2].counters;
        assert_eq!((counters.checksum_errors, counters.repaired), (errors, repaired));
        assert_eq!(scrub(&mut sim), (0, 0), "they are whole again");
        let mut sim = sim.kill_and_restart(false).expect("it starts");
        sim.settle();
        assert_eq!(sim.status().state, ArrayState::Online);
        assert!(sim.read(0, model.len()).expect("readable") == model);
    }
}

#[test]
fn superblocks_that_cannot_be_read_are_errors_of_a_scrub_and_count_as_repaired_when_they_can() {
    let (mut sim, _) = filled(2, 2, ChecksumKind::Blake3);
    let ranges = DiskRegion::Superblocks.ranges(&sim.disks[&2]);
    disk(&mut sim, 2).inject(PassingFault::new(Trouble::Medium).on(OpKinds::READS).within(ranges.clone()));
    assert_eq!(scrub(&mut sim), (4, 0), "they give errors still");
    let counters = sim.status().members[2].counters;
    assert!(counters.read_errors >= 4 && counters.checksum_errors == 0, "{counters:?}");
    let texts = told(&sim, NoticeKind::SuperblockDamaged);
    let of = |what: &str| texts.iter().filter(|(_, text)| text.contains(what)).count();
    assert_eq!((of("cannot be read"), of("is damaged"), of("is bad again")), (4, 0, 4), "{texts:?}");
    disk(&mut sim, 2).clear_faults();
    assert_eq!(scrub(&mut sim), (0, 0));
    // Bad sectors that become good when they are written.
    let blocks = ranges.into_iter().flat_map(|range| (range.start..range.end).step_by(BLOCK));
    let blocks: Vec<u64> = blocks.map(|at| at / BLOCK as u64).collect();
    disk(&mut sim, 2).bad_blocks.extend(blocks);
    assert_eq!(scrub(&mut sim), (4, 4));
}

#[test]
fn a_scrub_of_superblocks_that_are_being_written_finds_nothing_wrong() {
    let (mut sim, _) = filled(2, 2, ChecksumKind::Blake3);
    for round in 0..30 {
        sim.submit_admin(AdminRequest::ScrubStart);
        for step in 0..40 {
            let id = sim.submit_write(step * BLOCK as u64, &[round; BLOCK], step % 3 == 0);
            if step % 4 == 0 {
                sim.wait(id).expect("written");
                sim.sleep(700);
            }
            for _ in 0..step {
                sim.step();
            }
        }
        sim.settle();
        let last = sim.status().last_scrub.expect("it has ended");
        assert_eq!((last.errors, last.repaired), (0, 0), "{:?}", sim.notices.last());
    }
}

#[test]
fn all_slots_that_cannot_be_read_are_told_of_by_the_end_of_a_scrub() {
    let (mut sim, _) = filled(2, 1, ChecksumKind::Blake3);
    let data = sim.data_region();
    for (member, slot) in [0, 1].into_iter().flat_map(|member| (2..7).map(move |slot| (member, slot))) {
        disk(&mut sim, member).flip(data.start + slot * CHUNK as u64 + 99, 1);
    }
    scrub(&mut sim);
    let told = told(&sim, NoticeKind::BlocksUnreadable);
    assert_eq!(told.len(), 2, "{told:?}");
    let first = (2..7).find(|slot| told[0].1.starts_with(&format!("slot {slot} cannot be read")));
    let others: Vec<String> =
        (2..7).filter(|slot| Some(*slot) != first).map(|slot| slot.to_string()).collect();
    let text = format!("4 more slots cannot be read: {}; 'calpe status -v", others.join(", "));
    assert!(first.is_some() && told[1].1.starts_with(&text), "{told:?}");
    let ended = sim.notices.iter().position(|notice| notice.kind == NoticeKind::ScrubEnded);
    let last = sim.notices.iter().rposition(|notice| notice.kind == NoticeKind::BlocksUnreadable);
    assert!(last < ended, "{:?}", sim.notices);
}
