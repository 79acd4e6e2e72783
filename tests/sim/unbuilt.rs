//! A device that went into service without blocks that could not be read is not called whole, and
//! gets them when they can be.

use crate::scenes::{CHUNK, filled, live};
use calpe::format::ChecksumKind;
use calpe::testing::{OpKinds, PassingFault, SimArray, SimDisk, Trouble};
use calpe::units::{MemberIndex, SlotIndex, Timestamp};
use calpe::volume::{AdminRequest, ArrayState, MemberCondition, NoticeKind};
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

/// An array of 1+2 whose member 0 was replaced while nobody could read `slots` slots, and has
/// joined without them. The errors go on for a while.
fn joined_without(slots: usize) -> (SimArray, Vec<u8>) {
    let (mut sim, model) = filled(1, 2, ChecksumKind::Blake3);
    let device = sim.disk_of(0).expect("in service");
    sim.admin(AdminRequest::Fail { member: MemberIndex(0) }).expect("it leaves");
    sim.settle();
    sim.disks.remove(&device);
    let start = sim.data_region().start;
    for member in [1, 2] {
        let within = start..start + (slots * CHUNK) as u64;
        let fault = PassingFault::new(Trouble::Medium).on(OpKinds::READS).within([within]);
        disk(&mut sim, member).inject(fault);
    }
    let device = sim.add_blank_disk();
    sim.admin(AdminRequest::Replace { member: MemberIndex(0), device }).expect("it begins");
    while sim.status().state != ArrayState::Online {
        if !sim.step() {
            sim.sleep(100);
        }
        assert!(sim.now() < Timestamp(200 * SECOND), "{:?}", sim.notices);
    }
    (sim, model)
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
        told.ends_with(
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

/// As the daemon does: what it kept is given to the array that it starts.
#[test]
fn what_a_device_lacks_is_taken_over_from_an_earlier_run() {
    let (sim, model) = joined_without(3);
    let known = sim.status().members[0].clone();
    assert_eq!(known.lacking, [(SlotIndex(0), 3)]);
    let mut sim = sim.kill_and_restart(false).expect("it starts");
    assert_eq!(conditions(&sim, 0), [], "the array itself knows of nothing");
    // More than there is, and a device that is none of the array.
    sim.expect_lacking(known.uuid, &[(SlotIndex(0), 3), (SlotIndex(u64::MAX - 1), 9)]);
    sim.expect_lacking(Uuid::from_u128(77), &[(SlotIndex(0), 1)]);
    live(&mut sim, 20);
    assert_eq!(conditions(&sim, 0), [MemberCondition::LacksBlocks]);
    assert_eq!(sim.status().members[0].lacking, [(SlotIndex(0), 3)]);
    end_errors(&mut sim);
    live(&mut sim, 10);
    assert_eq!(conditions(&sim, 0), []);
    assert_whole_alone(&mut sim, &model);
}

/// What only one of the others can give is enough.
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
