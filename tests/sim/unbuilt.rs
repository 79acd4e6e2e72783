//! A device that went into service without some blocks, because they could not be read, is not called whole,
//! and gets them once they can be read.

use crate::scenes::{CHUNK, filled, live};
use calpe_core::block_io::IoOp;
use calpe_core::format::ChecksumKind;
use calpe_core::testing::{OpKinds, PassingFault, Random, SimArray, SimDisk, SimShape, Trouble};
use calpe_core::units::{MemberIndex, SlotIndex, Timestamp, VolumeOffset};
use calpe_core::volume::{
    AdminRequest, ArrayState, ClientReply, ClientRequest, Health, MemberCondition, NoticeKind,
};
use std::ops::Range;
use uuid::Uuid;

const BLOCK: usize = 4096;
const SECOND: u64 = 1_000_000_000;

fn disk(sim: &mut SimArray, member: u16) -> &mut SimDisk {
    let id = sim.disk_of(member).expect("in service");
    sim.disks.get_mut(&id).expect("a disk")
}

fn conditions(sim: &SimArray, member: usize) -> Vec<MemberCondition> {
    sim.status().members[member].conditions.clone()
}

fn offline_would(sim: &SimArray, member: u16) -> String {
    sim.would(&AdminRequest::Offline { member: MemberIndex(member) }).expect("it may leave").0
}

/// An array of 1+2 whose member 0 was replaced while no member could read `slots` slots; the new device has
/// joined without them. The errors go on for a while.
fn joined_without(slots: usize) -> (SimArray, Vec<u8>) {
    let (mut sim, model) = filled(1, 2, ChecksumKind::Blake3);
    join_without(&mut sim, &[1, 2], 0..slots * CHUNK);
    (sim, model)
}

/// Replaces member 0 while these others cannot read these bytes of their data. The new device joins
/// without them.
fn join_without(sim: &mut SimArray, others: &[u16], bytes: Range<usize>) {
    let device = sim.disk_of(0).expect("in service");
    sim.admin(AdminRequest::Fail { member: MemberIndex(0) }).expect("it leaves");
    sim.settle();
    sim.disks.remove(&device);
    let start = sim.data_region().start;
    for &member in others {
        let within = start + bytes.start as u64..start + bytes.end as u64;
        let fault = PassingFault::new(Trouble::Medium).on(OpKinds::READS).within([within]);
        disk(sim, member).inject(fault);
    }
    let device = sim.add_blank_disk();
    sim.admin(AdminRequest::Replace { member: MemberIndex(0), device }).expect("it begins");
    until_online(sim);
}

fn until_online(sim: &mut SimArray) {
    while sim.status().state != ArrayState::Online {
        if !sim.step() {
            sim.sleep(100);
        }
        assert!(sim.now() < Timestamp(300 * SECOND), "{:?}", sim.notices);
    }
}

fn end_errors(sim: &mut SimArray) {
    [1, 2].into_iter().for_each(|member| disk(sim, member).clear_faults());
}

fn assert_whole_alone(sim: &mut SimArray, model: &[u8]) {
    for member in [1, 2] {
        sim.admin(AdminRequest::Offline { member: MemberIndex(member) }).expect("it leaves");
    }
    assert!(sim.read(0, model.len()).as_deref() == Ok(model), "{:?}", sim.notices);
}

#[test]
fn a_member_that_lacks_blocks_is_called_so_until_they_are_built_by_themselves() {
    let (mut sim, model) = joined_without(3);
    live(&mut sim, 20);
    assert_eq!(conditions(&sim, 0), [MemberCondition::LacksBlocks]);
    let told = offline_would(&sim, 1);
    assert!(
        told.contains(
            "survives 1 more; but blocks of 3 slots were not built on member 0 so far, and these may survive only 0 more"
        ),
        "{told}"
    );
    assert_eq!(sim.status().members[0].counters.checksum_errors, 0, "the device has made no error");
    end_errors(&mut sim);
    live(&mut sim, 10);
    assert_eq!(conditions(&sim, 0), []);
    assert!(offline_would(&sim, 1).ends_with("survives 1 more"));
    assert_whole_alone(&mut sim, &model);
}

#[test]
fn the_slots_that_a_device_goes_without_are_told_of_together() {
    let (sim, _) = joined_without(3);
    let of_kind = sim.notices.iter().filter(|notice| notice.kind == NoticeKind::SlotLacks);
    let told: Vec<&str> = of_kind.map(|notice| &notice.text[..]).collect();
    let text = "the new device of member 0 goes without blocks of 3 slots that cannot be read, the first of which is slot 0: \
        they are looked at again, and built when they can be";
    assert_eq!(told, [text]);
}

#[test]
fn what_clients_write_and_what_a_scrub_repairs_is_lacked_no_more() {
    for scrubs in [false, true] {
        let (mut sim, mut model) = joined_without(2);
        match scrubs {
            true => {
                end_errors(&mut sim);
                sim.admin(AdminRequest::ScrubStart).expect("it begins");
                sim.settle();
            }
            false => {
                model[..2 * CHUNK].fill(7);
                sim.write(0, &model[..2 * CHUNK]).expect("written");
                live(&mut sim, 20);
                end_errors(&mut sim);
            }
        }
        assert_eq!(conditions(&sim, 0), [], "scrubs: {scrubs}");
        assert_whole_alone(&mut sim, &model);
    }
}

#[test]
fn what_a_device_lacks_is_remembered_while_it_is_away() {
    let (mut sim, model) = joined_without(2);
    let away = sim.disk_of(0).expect("in service");
    sim.admin(AdminRequest::Offline { member: MemberIndex(0) }).expect("it leaves");
    assert_eq!(conditions(&sim, 0), []);
    let last = (model.len() - BLOCK) as u64;
    sim.write(last, &model[model.len() - BLOCK..]).expect("written");
    let device = sim.reopen_disk(away);
    sim.admin(AdminRequest::Online { member: MemberIndex(0), device }).expect("it returns");
    live(&mut sim, 60);
    assert_eq!(sim.status().state, ArrayState::Online);
    assert_eq!(conditions(&sim, 0), [MemberCondition::LacksBlocks]);
    end_errors(&mut sim);
    live(&mut sim, 10);
    assert_eq!(conditions(&sim, 0), []);
    assert_whole_alone(&mut sim, &model);
}

/// As the daemon does, what it kept is passed to the array that it starts.
#[test]
fn what_a_device_lacks_is_taken_over_from_an_earlier_run() {
    let (mut sim, model) = joined_without(3);
    // Before it is recorded that the device has joined, a start compares what was built on it.
    sim.settle();
    let known = sim.status().members[0].clone();
    let (device, runs) = known.lacking[0].clone();
    assert_eq!(runs, [(SlotIndex(0), 3)]);
    let mut sim = sim.kill_and_restart(false).expect("it starts");
    assert_eq!(conditions(&sim, 0), [], "the array itself knows of nothing");
    // Passes more slots than there are, and a device that is not one of the array's.
    sim.expect_lacking(device, &[(SlotIndex(0), 3), (SlotIndex(u64::MAX - 1), 9)]);
    sim.expect_lacking(Uuid::from_u128(77), &[(SlotIndex(0), 1)]);
    live(&mut sim, 20);
    assert_eq!(conditions(&sim, 0), [MemberCondition::LacksBlocks]);
    assert_eq!(sim.status().members[0].lacking, [(device, runs)]);
    end_errors(&mut sim);
    live(&mut sim, 10);
    assert_eq!(conditions(&sim, 0), []);
    assert_whole_alone(&mut sim, &model);
}

/// It is enough if one of the other members can supply the blocks.
#[test]
fn what_a_device_lacks_is_built_while_another_member_is_out() {
    let (mut sim, model) = joined_without(2);
    disk(&mut sim, 1).clear_faults();
    sim.admin(AdminRequest::Offline { member: MemberIndex(2) }).expect("it leaves");
    let told = sim.notices.iter().rev().find(|notice| notice.kind == NoticeKind::MemberOut).expect("told");
    let text = "survives 1 more; but blocks of 2 slots were not built on member 0 so far, and these may survive only 0 more";
    assert!(told.text.contains(text), "{}", told.text);
    live(&mut sim, 10);
    assert_eq!(conditions(&sim, 0), [], "member 1 can give them");
    assert!(sim.read(0, model.len()).as_deref() == Ok(&model[..]));
}

/// Two devices are built at the same time; one needs nothing from the slots that it lacks.
#[test]
fn what_a_device_lacks_is_remembered_while_another_one_is_built_beside_it() {
    // More slots than are built at a time.
    let chunk = 4096;
    let shape = SimShape::new(1, 2, chunk as u32, 400).logged(ChecksumKind::Blake3, 1 << 20);
    let mut model = vec![0; shape.volume_bytes as usize];
    Random::new(11).fill(&mut model);
    let mut sim = SimArray::create(shape, 11);
    for at in (0..model.len()).step_by(40 * chunk) {
        sim.write(at as u64, &model[at..at + 40 * chunk]).expect("written");
    }
    sim.settle();
    join_without(&mut sim, &[1, 2], 300 * chunk..306 * chunk);
    assert_eq!(conditions(&sim, 0), [MemberCondition::LacksBlocks]);
    let away = sim.disk_of(0).expect("in service");
    sim.admin(AdminRequest::Offline { member: MemberIndex(0) }).expect("it leaves");
    sim.settle();
    // The errors of the others end while the device is away, and one of them is lost.
    end_errors(&mut sim);
    let lost = sim.disk_of(1).expect("in service");
    sim.admin(AdminRequest::Fail { member: MemberIndex(1) }).expect("it leaves");
    sim.settle();
    sim.disks.remove(&lost);
    let device = sim.reopen_disk(away);
    let new = sim.add_blank_disk();
    let id = new.device.0;
    sim.submit_admin(AdminRequest::Replace { member: MemberIndex(1), device: new });
    sim.submit_admin(AdminRequest::Online { member: MemberIndex(0), device });
    // The new disk is slow, so the other one catches up with it.
    let data = sim.data_region().start;
    let is_slow =
        |disk: u32, op: &IoOp| matches!(op, IoOp::Write { offset, .. } if disk == id && offset.0 >= data);
    while sim.step_where(|disk, op| !is_slow(disk, op)) {}
    until_online(&mut sim);
    live(&mut sim, 60);
    assert_eq!((sim.status().state, conditions(&sim, 0)), (ArrayState::Online, vec![]));
    assert_whole_alone(&mut sim, &model);
}

#[test]
fn what_a_device_lacks_is_not_built_while_a_shortage_keeps_it_from_being_read() {
    for scrubs in [false, true] {
        let (mut sim, model) = joined_without(3);
        let start = sim.data_region().start;
        let within = start..start + (3 * CHUNK) as u64;
        let until = Timestamp(sim.now().0 + 15 * SECOND);
        let short = PassingFault::new(Trouble::Shortage).on(OpKinds::READS).within([within]).until(until);
        disk(&mut sim, 0).inject(short);
        end_errors(&mut sim);
        if scrubs {
            sim.admin(AdminRequest::ScrubStart).expect("it begins");
        }
        live(&mut sim, 10);
        assert!(conditions(&sim, 0).contains(&MemberCondition::LacksBlocks), "scrubs: {scrubs}");
        live(&mut sim, 50);
        assert_eq!(
            (sim.status().state, conditions(&sim, 0)),
            (ArrayState::Online, vec![]),
            "scrubs: {scrubs}"
        );
        assert_whole_alone(&mut sim, &model);
    }
}

#[test]
fn a_dry_run_tells_what_devices_lack_also_where_all_members_are_back_then() {
    let (mut sim, _) = joined_without(2);
    let text = "then the array is ONLINE; but blocks of 2 slots were not built on member 0 so far, and these may survive only 1 more";
    for member in [2, 0] {
        let away = sim.disk_of(member).expect("in service");
        sim.admin(AdminRequest::Offline { member: MemberIndex(member) }).expect("it leaves");
        let device = sim.reopen_disk(away);
        let online = AdminRequest::Online { member: MemberIndex(member), device };
        let would = sim.would(&online).expect("it may come back").0;
        assert!(would.contains(text), "member {member}: {would}");
        sim.admin(online).expect("it returns");
        until_online(&mut sim);
    }
}

/// Only blocks that are called lost may be unreadable.
#[test]
fn blocks_that_a_device_lacks_and_the_others_cannot_give_are_not_called_readable() {
    let (mut sim, model) = filled(2, 1, ChecksumKind::Blake3);
    join_without(&mut sim, &[1], 0..3 * CHUNK);
    sim.settle();
    let known = sim.status().members[0].clone();
    // No read has met the blocks in this run.
    let mut sim = sim.kill_and_restart(false).expect("it starts");
    sim.expect_lacking(known.uuid, &known.lacking[0].1);
    sim.settle();
    let health = |sim: &mut SimArray| {
        let len = model.len() as u64;
        let id = sim.submit(ClientRequest::Health { offset: VolumeOffset(0), len });
        let ClientReply::Health(runs) = sim.wait(id).expect("answered") else { panic!("health") };
        runs
    };
    let of = |runs: &[(u64, Health)], wanted| -> u64 {
        runs.iter().filter(|run| run.1 == wanted).map(|run| run.0).sum()
    };
    let runs = health(&mut sim);
    assert_eq!((of(&runs, Health::Degraded), of(&runs, Health::Lost)), (6 * CHUNK as u64, 0), "{runs:?}");
    sim.admin(AdminRequest::Offline { member: MemberIndex(1) }).expect("it leaves");
    let runs = health(&mut sim);
    assert_eq!(of(&runs, Health::Clean), 0, "{runs:?}");
    let lost = of(&runs, Health::Lost);
    assert!((1..6 * CHUNK as u64).contains(&lost), "some of these are on member 2: {runs:?}");
    let mut at = 0;
    for (len, health) in runs {
        let read = sim.read(at, len as usize);
        assert_eq!(read.is_err(), health == Health::Lost, "{len} bytes at {at}: {health:?}");
        at += len;
    }
}
