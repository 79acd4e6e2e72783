//! Members that come back, and devices that replace others, while blocks or metadata pages cannot be read:
//! data that exists is found, and reports about it are true.

use crate::scenes::page_faults::{drain, superblock, unreadable, verify, verify_or_error};
use crate::scenes::{CHUNK, live};
use calpe_core::format::{
    COPY_BYTES, ChecksumKind, CopyPlace, MemberState, PAGE_BYTES, PageIndex, PageLayout, RegionKind,
    all_copy_offsets, damaged_copies, decode_copy,
};
use calpe_core::testing::{DiskRegion, Fate, Random, SimArray, SimDisk, SimShape, SimWorld};
use calpe_core::units::{MemberIndex, SlotIndex, Timestamp, VolumeOffset};
use calpe_core::volume::{AdminRequest, ArrayState, ClientRequest, LogState, NewDevice, NoticeKind};
use std::ops::Range;

const BLOCK: usize = 4096;
const SECOND: u64 = 1_000_000_000;

fn shape(stripes: u64) -> SimShape {
    SimShape::new(2, 1, CHUNK as u32, stripes).logged(ChecksumKind::Blake3, 1 << 20)
}

/// An array that was just written in full, and its expected content.
fn just_written(seed: u64) -> (SimArray, Vec<u8>) {
    let shape = shape(8);
    let mut model = vec![0; shape.volume_bytes as usize];
    Random::new(seed).fill(&mut model);
    let mut sim = SimArray::create(shape, seed);
    sim.write(0, &model).expect("written");
    (sim, model)
}

fn disk(sim: &mut SimArray, member: u16) -> &mut SimDisk {
    let id = sim.disk_of(member).expect("in service");
    sim.disks.get_mut(&id).expect("a disk")
}

fn offline(sim: &mut SimArray, member: u16) -> u32 {
    let disk = sim.disk_of(member).expect("in service");
    sim.admin(AdminRequest::Offline { member: MemberIndex(member) }).expect("it leaves");
    disk
}

fn online(sim: &mut SimArray, member: u16, disk: u32) {
    let device = sim.reopen_disk(disk);
    sim.admin(AdminRequest::Online { member: MemberIndex(member), device }).expect("it returns");
}

fn told(sim: &SimArray, kind: NoticeKind) -> Vec<String> {
    let of_kind = sim.notices.iter().filter(|notice| notice.kind == kind);
    of_kind.map(|notice| notice.text.clone()).collect()
}

/// Waits until the array is whole; returns the seconds that it took.
fn until_whole(sim: &mut SimArray) -> u64 {
    let begun = sim.now().0;
    while sim.status().state != ArrayState::Online || !sim.status().activities.is_empty() {
        if !sim.step() {
            sim.sleep(100);
        }
        assert!(sim.now().0 - begun < 300 * SECOND, "{:?}", sim.notices);
    }
    (sim.now().0 - begun) / SECOND
}

/// The array was written just before the member left, so the member is caught up with everything, although it
/// has the data already.
#[test]
fn what_a_member_that_comes_back_has_is_taken_from_it_at_once() {
    let (mut sim, model) = just_written(1);
    let away = offline(&mut sim, 0);
    let start = sim.data_region().start;
    for slot in [2, 5] {
        for row in 0..4 {
            disk(&mut sim, 1).flip(start + (slot * CHUNK + row * BLOCK) as u64, 1);
        }
    }
    sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    sim.sleep(1000);
    let before = told(&sim, NoticeKind::BlocksUnreadable).len();
    online(&mut sim, 0, away);
    let seconds = until_whole(&mut sim);
    assert!(seconds < 5, "{seconds} s: {:?}", sim.notices);
    live(&mut sim, 60);
    assert_eq!(told(&sim, NoticeKind::SlotLacks), [""; 0]);
    let said = told(&sim, NoticeKind::BlocksUnreadable).split_off(before);
    assert!(said.is_empty(), "all can be read: {said:?}");
    assert_eq!(sim.status().unreadable, []);
    assert!(sim.read(0, model.len()).expect("readable") == model);
    sim.assert_scrub_clean();
    // The member's blocks were left alone, and those of the other member are mended.
    for (member, slot) in [(0, 2), (1, 2), (0, 5), (1, 5)] {
        assert!(
            disk(&mut sim, member).peek(start + (slot * CHUNK) as u64, BLOCK).iter().any(|byte| *byte != 0)
        );
    }
    offline(&mut sim, 2);
    assert!(sim.read(0, model.len()).expect("readable") == model);
}

#[test]
fn a_member_that_comes_back_without_what_cannot_be_read_is_no_new_device() {
    let (mut sim, _) = just_written(2);
    let away = offline(&mut sim, 0);
    let start = sim.data_region().start;
    disk(&mut sim, 1).flip(start, 1);
    let mut device = sim.reopen_disk(away);
    sim.disks.get_mut(&device.device.0).expect("a disk").flip(start, 1);
    device.bad_copies = Vec::new();
    sim.admin(AdminRequest::Online { member: MemberIndex(0), device }).expect("it returns");
    until_whole(&mut sim);
    let said = told(&sim, NoticeKind::SlotLacks);
    assert!(
        said.len() == 1 && said[0].starts_with("member 0 is caught up without blocks of slot 0"),
        "{said:?}"
    );
}

/// Pages of stripes that were never written cannot be read while a member is replaced: nothing is lost with
/// them, and the next scrub leaves every copy good.
#[test]
fn pages_that_tell_of_no_data_begin_anew_where_no_copy_is_left() {
    let shape = SimShape { page_cache: Some(8 << 10), ..shape(600) };
    let world = SimWorld::new(shape, 32 << 20);
    let mut model = vec![0; shape.volume_bytes as usize];
    let mut sim = SimArray::create_in(&world, 3);
    Random::new(3).fill(&mut model[..4 * 2 * CHUNK]);
    sim.write(0, &model[..4 * 2 * CHUNK]).expect("written");
    sim.settle();
    sim.admin(AdminRequest::Stop).expect("it stops");
    let mut sim = world.start(sim.disks.clone(), false, Random::new(5)).expect("it starts");
    drain(&mut sim);
    let away = offline(&mut sim, 0);
    let pages = DiskRegion::Pages.ranges(disk(&mut sim, 2));
    disk(&mut sim, 2).inject(unreadable(pages, Timestamp(u64::MAX)));
    online(&mut sim, 0, away);
    let device = sim.add_blank_disk();
    sim.admin(AdminRequest::Replace { member: MemberIndex(2), device }).expect("it begins");
    until_whole(&mut sim);
    drain(&mut sim);
    assert_eq!(sim.status().unreadable_pages, 0, "{:?}", sim.notices);
    assert!(!told(&sim, NoticeKind::PageUnreadable).is_empty(), "some could not be read");
    assert_eq!(told(&sim, NoticeKind::PageLost), [""; 0]);
    sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    drain(&mut sim);
    sim.assert_scrub_clean();
    assert!(sim.status().members.iter().all(|member| member.counters.checksum_errors == 0));
    // The first data written to a stripe sets all entries of its page.
    let stripe = 2 * CHUNK;
    for at in [5, 77, 300, 599] {
        let start = at * stripe + BLOCK;
        model[start..start + BLOCK].fill(at as u8);
        sim.write(start as u64, &model[start..start + BLOCK]).expect("written");
    }
    drain(&mut sim);
    let mut sim = sim.stop_and_restart(false).expect("it starts");
    verify(&mut sim, &model, "after a restart").expect("all is there");
    offline(&mut sim, 1);
    verify(&mut sim, &model, "without a member").expect("all is there");
}

/// Pages cannot be read for a moment while a new device is built; when it has joined, another member leaves
/// at once. Checks that the stripes can then be written, and everything can be read.
fn built_while_pages_cannot_be_read() -> Result<(), String> {
    let shape = shape(600);
    let world = SimWorld::new(shape, 32 << 20);
    let mut model = vec![0; shape.volume_bytes as usize];
    let mut sim = SimArray::create_in(&world, 4);
    Random::new(4).fill(&mut model[..4 * 2 * CHUNK]);
    sim.write(0, &model[..4 * 2 * CHUNK]).expect("written");
    sim.settle();
    sim.admin(AdminRequest::Stop).expect("it stops");
    let mut sim = world.start(sim.disks.clone(), false, Random::new(5)).expect("it starts");
    drain(&mut sim);
    let until = Timestamp(sim.now().0 + 10 * SECOND);
    for member in 0..3 {
        let pages = DiskRegion::Pages.ranges(disk(&mut sim, member));
        disk(&mut sim, member).inject(unreadable(pages, until));
    }
    let device = sim.add_blank_disk();
    sim.admin(AdminRequest::Replace { member: MemberIndex(0), device }).expect("it begins");
    until_whole(&mut sim);
    assert!(sim.status().members[0].replacement.is_none());
    offline(&mut sim, 2);
    for stripe in 4..600 {
        let start = stripe * 2 * CHUNK + BLOCK;
        model[start..start + BLOCK].fill(stripe as u8);
        let written = sim.write(start as u64, &model[start..start + BLOCK]);
        written.map_err(|error| format!("stripe {stripe}: {error}"))?;
    }
    verify(&mut sim, &model, "without a member")
}

#[test]
fn a_new_device_waits_for_pages_that_cannot_be_read_for_a_moment() {
    built_while_pages_cannot_be_read().expect("all is there");
    #[cfg(debug_assertions)]
    calpe_core::testing::Mutation::JoinsLacking
        .with(|| built_while_pages_cannot_be_read().expect_err("it lacks pages"));
}

/// No page of member 2 can ever be read while a device replaces member 0, in an array of which `data` stripes
/// hold data. Returns the whole array, its content, how long it took, and the most pages that were being
/// tried again.
fn built_beside_unreadable_pages(data: u64) -> (SimArray, Vec<u8>, u64, u64) {
    let shape = SimShape { page_cache: Some(8 << 10), ..shape(3000) };
    let world = SimWorld::new(shape, 64 << 20);
    let mut model = vec![0; shape.volume_bytes as usize];
    let mut sim = SimArray::create_in(&world, 6);
    let bytes = data as usize * 2 * CHUNK;
    Random::new(6).fill(&mut model[..bytes]);
    for (at, part) in model[..bytes].chunks(64 * CHUNK).enumerate() {
        sim.write((at * 64 * CHUNK) as u64, part).expect("written");
    }
    sim.settle();
    sim.admin(AdminRequest::Stop).expect("it stops");
    let mut sim = world.start(sim.disks.clone(), false, Random::new(5)).expect("it starts");
    drain(&mut sim);
    sim.admin(AdminRequest::Fail { member: MemberIndex(0) }).expect("it leaves");
    sim.settle();
    let pages = DiskRegion::Pages.ranges(disk(&mut sim, 2));
    disk(&mut sim, 2).inject(unreadable(pages, Timestamp(u64::MAX)));
    let device = sim.add_blank_disk();
    sim.admin(AdminRequest::Replace { member: MemberIndex(0), device }).expect("it begins");
    let begun = sim.now().0;
    let mut retried = 0;
    while sim.status().state != ArrayState::Online || !sim.status().activities.is_empty() {
        retried = sim.status().activities.iter().map(|pass| pass.retried_pages).fold(retried, u64::max);
        if !sim.step() {
            sim.sleep(100);
        }
        assert!(sim.now().0 - begun < 300 * SECOND, "{:?}", sim.notices);
    }
    let seconds = (sim.now().0 - begun) / SECOND;
    (sim, model, seconds, retried)
}

#[test]
fn a_device_waits_half_a_minute_for_all_pages_that_cannot_be_read_together() {
    let (mut sim, model, seconds, retried) = built_beside_unreadable_pages(600);
    assert!(seconds < 40, "{seconds} s");
    assert!((5..30).contains(&retried), "{retried}: those with data");
    let said = told(&sim, NoticeKind::PageUnreadable);
    assert!(said.len() == 2 && said[0].contains("tried again"), "{said:?}");
    assert!(told(&sim, NoticeKind::SlotSkipped).len() <= 2);
    let status = sim.status();
    assert!((5..30).contains(&status.unreadable_pages), "{}", status.unreadable_pages);
    assert!(!status.unreadable.is_empty());
    // Pages that become readable are written to every copy.
    disk(&mut sim, 2).clear_faults();
    drain(&mut sim);
    assert_eq!((sim.status().unreadable_pages, sim.status().unreadable), (0, vec![]));
    assert_eq!(told(&sim, NoticeKind::PageReadable).len(), 1);
    let blamed: Vec<String> = told(&sim, NoticeKind::PageRepaired);
    assert!(
        !blamed.iter().any(|text| text.starts_with("member 0")),
        "what it lacks is no error of it: {blamed:?}"
    );
    verify(&mut sim, &model, "with errors over").expect("all is there");
    sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    drain(&mut sim);
    sim.assert_scrub_clean();
    offline(&mut sim, 2);
    verify(&mut sim, &model, "without a member").expect("all is there");
}

#[test]
fn a_device_does_not_wait_for_pages_without_data() {
    let (mut sim, model, seconds, retried) = built_beside_unreadable_pages(0);
    assert!(seconds < 5 && retried == 0, "{seconds} s");
    let said = told(&sim, NoticeKind::PageUnreadable);
    assert!(said.len() == 1 && said[0].contains("no data is behind them"), "{said:?}");
    assert_eq!((sim.status().unreadable_pages, sim.status().unreadable), (0, vec![]));
    assert!(sim.read(0, model.len()).expect("readable") == model);
    // Pages are begun anew automatically once no copy can know more.
    let device = sim.add_blank_disk();
    sim.admin(AdminRequest::Replace { member: MemberIndex(2), device }).expect("it begins");
    until_whole(&mut sim);
    assert_eq!((sim.status().unreadable_pages, sim.status().unreadable), (0, vec![]));
    // Some begin anew because they are written to, and are not in place yet when a scrub checks them.
    let written = (1..3000).step_by(20);
    for stripe in written.clone() {
        sim.submit_write(stripe * 2 * CHUNK as u64, &[7; BLOCK], false);
    }
    sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    drain(&mut sim);
    let scrub = sim.status().last_scrub.expect("it ran");
    assert_eq!(
        (scrub.errors, scrub.repaired),
        (0, 0),
        "no page that begins anew is an error: {:?}",
        sim.notices
    );
    assert!(sim.status().members.iter().all(|member| member.counters.checksum_errors == 0));
    drain(&mut sim);
    sim.assert_scrub_clean();
    offline(&mut sim, 1);
    for stripe in written {
        let read = sim.read(stripe * 2 * CHUNK as u64, BLOCK).expect("readable");
        assert_eq!(read, [7; BLOCK], "{stripe}");
    }
    let start = 2000 * 2 * CHUNK as u64;
    sim.write(start, &[7; BLOCK]).expect("its page is there");
}

/// The damaged superblock copies of a disk.
fn damaged(disk: &SimDisk) -> Vec<(CopyPlace, String)> {
    let copies = CopyPlace::ALL.into_iter().zip(all_copy_offsets(disk.bytes()));
    let copies: Vec<_> =
        copies.map(|(place, at)| Ok(decode_copy(place, &disk.peek(at.0, COPY_BYTES)))).collect();
    damaged_copies(&copies.try_into().expect("four"))
}

#[test]
fn a_new_device_that_leaves_while_it_is_built_has_no_damaged_superblock() {
    for to_failed in [false, true] {
        let (mut sim, _) = just_written(5);
        sim.admin(AdminRequest::Fail { member: MemberIndex(0) }).expect("it leaves");
        sim.settle();
        let device = sim.add_blank_disk();
        let id = device.device.0;
        sim.admin(AdminRequest::Replace { member: MemberIndex(0), device }).expect("it begins");
        let member = MemberIndex(0);
        let out = if to_failed { AdminRequest::Fail { member } } else { AdminRequest::Offline { member } };
        sim.admin(out).expect("it leaves");
        assert_eq!(damaged(&sim.disks[&id]), []);
        // The request was answered once the other members had recorded it.
        let sim = sim.kill_and_restart(false).expect("it starts");
        let state = if to_failed { MemberState::Faulted } else { MemberState::Offline };
        assert_eq!(sim.status().members[0].state, state);
    }
}

#[test]
fn a_replacement_that_was_answered_is_known_after_a_kill() {
    for seed in 0..8 {
        let (mut sim, model) = just_written(seed);
        sim.admin(AdminRequest::Fail { member: MemberIndex(0) }).expect("it leaves");
        sim.settle();
        let device = sim.add_blank_disk();
        sim.admin(AdminRequest::Replace { member: MemberIndex(0), device }).expect("it begins");
        let mut sim = sim.kill_and_restart(false).expect("it starts");
        assert_eq!(sim.status().members[0].state, MemberState::Rebuilding, "{seed}");
        until_whole(&mut sim);
        assert!(sim.read(0, model.len()).expect("readable") == model);
    }
}

#[test]
fn superblocks_that_were_damaged_while_a_member_was_away_are_told_and_counted() {
    let (mut sim, _) = just_written(6);
    let away = offline(&mut sim, 0);
    let bad_copies = vec!["head A is damaged: it is not there".to_owned()];
    let device = NewDevice { bad_copies, ..sim.reopen_disk(away) };
    sim.admin(AdminRequest::Online { member: MemberIndex(0), device }).expect("it returns");
    let said = told(&sim, NoticeKind::SuperblockDamaged);
    assert_eq!(said, ["member 0: superblock copy head A is damaged: it is not there; it is written anew"]);
    until_whole(&mut sim);
    assert_eq!(sim.status().members[0].counters.checksum_errors, 1);
}

#[test]
fn a_repair_counts_parity_of_a_member_that_is_away() {
    let (mut sim, _) = just_written(7);
    sim.settle();
    let start = sim.data_region().start;
    // Slot 1: its first column is on member 2, its parity on member 1.
    disk(&mut sim, 2).flip(start + CHUNK as u64, 1);
    offline(&mut sim, 1);
    assert!(sim.read(2 * CHUNK as u64, BLOCK).is_err());
    sim.admin(AdminRequest::Repair).expect("it begins");
    live(&mut sim, 10);
    let said = told(&sim, NoticeKind::RepairEnded).pop().expect("it has ended");
    assert!(said.contains("1 block of parity cannot be had either"), "{said}");
}

#[test]
fn a_repair_counts_parity_that_no_scrub_has_found() {
    let (mut sim, _) = just_written(9);
    sim.settle();
    let start = sim.data_region().start;
    for member in [1, 2] {
        disk(&mut sim, member).flip(start, 1);
    }
    assert!(sim.read(CHUNK as u64, BLOCK).is_err());
    for _ in 0..2 {
        sim.admin(AdminRequest::Repair).expect("it begins");
        live(&mut sim, 10);
        let said = told(&sim, NoticeKind::RepairEnded).pop().expect("it has ended");
        let text = "1 are beyond repair; 1 block of parity cannot be had either";
        assert!(said.contains(text), "{said}");
    }
    assert_eq!(sim.status().lost, [(VolumeOffset(CHUNK as u64), BLOCK as u64)]);
}

/// Two of three blocks of a row were read and are wrong: even if the third is good, those two are lost.
#[test]
fn what_a_member_that_is_away_cannot_give_is_beyond_repair() {
    let (mut sim, _) = just_written(8);
    sim.settle();
    let start = sim.data_region().start;
    disk(&mut sim, 1).flip(start, 1);
    disk(&mut sim, 2).flip(start, 1);
    let away = offline(&mut sim, 0);
    for column in [0, 1] {
        assert!(sim.read((column * CHUNK) as u64, BLOCK).is_err());
    }
    let status = sim.status();
    assert_eq!(status.unreadable, [(VolumeOffset(0), BLOCK as u64)]);
    assert_eq!(status.lost, [(VolumeOffset(CHUNK as u64), BLOCK as u64)]);
    online(&mut sim, 0, away);
    until_whole(&mut sim);
    live(&mut sim, 10);
    let status = sim.status();
    assert_eq!((status.unreadable, status.lost), (vec![], vec![(VolumeOffset(CHUNK as u64), BLOCK as u64)]));
    assert!(sim.read(0, BLOCK).is_ok());
}

/// A block is wrong, so its row can only be decoded with a device that is being built. A write into the row
/// does not go to that device, so neither the written data nor the wrong block may then depend on the device.
#[test]
fn a_write_does_not_rest_on_what_only_a_device_that_is_built_has() {
    let shape = shape(64);
    let mut model = vec![0; shape.volume_bytes as usize];
    Random::new(9).fill(&mut model);
    let mut sim = SimArray::create(shape, 9);
    sim.write(0, &model).expect("written");
    let away = offline(&mut sim, 0);
    // Slots 0, 3, 6, ...: the first column is on member 0, the second on member 1.
    let slot = 60;
    let start = sim.data_region().start;
    disk(&mut sim, 1).flip(start + (slot * CHUNK) as u64, 1);
    let device = sim.reopen_disk(away);
    sim.submit_admin(AdminRequest::Online { member: MemberIndex(0), device });
    let at = slot * 2 * CHUNK;
    model[at..at + BLOCK].fill(7);
    let write = sim.submit_write(at as u64, &model[at..at + BLOCK], true);
    sim.wait(write).expect("written");
    until_whole(&mut sim);
    live(&mut sim, 60);
    verify(&mut sim, &model, "when all is built").expect("all is there");
    sim.assert_scrub_clean();
}

/// The places of the pages of checksums on the disk of a member.
fn hash_pages(disk: &SimDisk, member: u16) -> Vec<Range<u64>> {
    some_hash_pages(disk, member, |_| true)
}

fn some_hash_pages(disk: &SimDisk, member: u16, is_wanted: impl Fn(u64) -> bool) -> Vec<Range<u64>> {
    let superblock = superblock(disk);
    let layout = PageLayout::new(superblock.geometry, true);
    let start = superblock.region(RegionKind::Pages).expect("pages").offset.0;
    let pages = (layout.map_pages()..layout.pages()).filter(|page| is_wanted(*page)).map(PageIndex);
    let copies = pages.flat_map(|page| layout.copies(page).collect::<Vec<_>>());
    let own = copies.filter(|(of, _)| of.0 == member).map(|(_, offset)| start + offset);
    own.map(|at| at..at + 2 * PAGE_BYTES as u64).collect()
}

fn hide_hash_pages(sim: &mut SimArray, members: &[u16]) {
    for &member in members {
        let pages = hash_pages(disk(sim, member), member);
        disk(sim, member).inject(unreadable(pages, Timestamp(u64::MAX)));
    }
}

/// A device that replaces one without some pages of checksums lacks them, too: old versions of them on the
/// device must not count when it has joined.
#[test]
fn a_device_in_the_place_of_one_that_lacks_pages_does_not_show_old_ones() {
    for in_service in [false, true] {
        let shape = shape(200);
        let world = SimWorld::new(shape, 32 << 20);
        let mut model = vec![0; shape.volume_bytes as usize];
        Random::new(10).fill(&mut model);
        let mut sim = SimArray::create_in(&world, 10);
        sim.write(0, &model).expect("written");
        drain(&mut sim);
        let old = sim.disks[&sim.disk_of(0).expect("in service")].clone();
        for at in (0..model.len()).step_by(CHUNK) {
            model[at..at + BLOCK].fill((at / CHUNK) as u8);
            sim.write(at as u64, &model[at..at + BLOCK]).expect("written");
        }
        drain(&mut sim);
        // So that no page is in memory.
        let mut sim = sim.stop_and_restart(false).expect("it starts");
        hide_hash_pages(&mut sim, &[0, 1, 2]);
        drain(&mut sim);
        if !in_service {
            sim.admin(AdminRequest::Fail { member: MemberIndex(0) }).expect("it leaves");
        }
        let device = sim.add_blank_disk();
        let first = device.device.0;
        let pages = hash_pages(disk(&mut sim, 1), 0);
        sim.admin(AdminRequest::Replace { member: MemberIndex(0), device }).expect("it begins");
        // Waits until the device has recorded what it lacks.
        let is_told = |sim: &SimArray| {
            pages.iter().all(|page| sim.disks[&first].peek(page.start, BLOCK).iter().any(|byte| *byte != 0))
        };
        while !is_told(&sim) {
            assert!(
                in_service || sim.status().members[0].state != MemberState::Online,
                "told before it joins"
            );
            if !sim.step() {
                sim.sleep(100);
            }
        }
        assert!(!sim.status().activities.is_empty(), "it has not joined");
        if in_service {
            sim.admin(AdminRequest::CancelReplace { member: MemberIndex(0), device: None }).expect("it ends");
        }
        // The next device was once this member.
        let device = NewDevice { known_zero: false, ..sim.add_blank_disk() };
        sim.disks.insert(device.device.0, old);
        sim.admin(AdminRequest::Replace { member: MemberIndex(0), device }).expect("it begins");
        until_whole(&mut sim);
        drain(&mut sim);
        let disks = sim.wreck().settle(false, |_, _| Fate::Kept);
        let mut sim = world.start(disks, false, Random::new(6)).expect("it starts");
        drain(&mut sim);
        hide_hash_pages(&mut sim, &[1, 2]);
        verify_or_error(&mut sim, &model, "with what it lacks").expect("nothing is wrong");
    }
}

/// How a device replaces member 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comes {
    BesideOneInService,
    InPlaceOfOneThatIsOut,
    Back,
}

/// An array of 200 stripes with no page in memory, in which every second page of checksums cannot be read and
/// the building of a device for member 0 begins; and its expected content.
fn begun_beside_unreadable_pages(comes: Comes) -> (SimArray, Vec<u8>) {
    let shape = shape(200);
    let world = SimWorld::new(shape, 32 << 20);
    let mut model = vec![0; shape.volume_bytes as usize];
    Random::new(11).fill(&mut model);
    let mut sim = SimArray::create_in(&world, 11);
    sim.write(0, &model).expect("written");
    drain(&mut sim);
    if comes == Comes::Back {
        // The member misses a write in every page.
        offline(&mut sim, 0);
        for at in (0..model.len()).step_by(2 * CHUNK) {
            model[at..at + BLOCK].fill(at as u8);
            sim.write(at as u64, &model[at..at + BLOCK]).expect("written");
        }
        drain(&mut sim);
    }
    let mut sim = sim.stop_and_restart(false).expect("it starts");
    drain(&mut sim);
    let own = sim.disk_out_of_use(0);
    if comes == Comes::InPlaceOfOneThatIsOut {
        sim.admin(AdminRequest::Fail { member: MemberIndex(0) }).expect("it leaves");
    }
    for member in 0..3 {
        if sim.disk_of(member).is_some() {
            let hidden = some_hash_pages(disk(&mut sim, member), member, |page| page % 2 == 0);
            disk(&mut sim, member).inject(unreadable(hidden, Timestamp(u64::MAX)));
        }
    }
    if let Some(own) = own {
        online(&mut sim, 0, own);
    } else {
        let device = sim.add_blank_disk();
        sim.admin(AdminRequest::Replace { member: MemberIndex(0), device }).expect("it begins");
    }
    (sim, model)
}

/// Pages become readable, and are read, `steps` steps after it was decided that the device joins without
/// them; meanwhile there are writes elsewhere. `fails`: at that time the array fails for lack of another
/// member, which comes back. Returns whether the device had joined before that; an error if a page is not on
/// both of its members in the end.
fn pages_readable_again_before_a_join(comes: Comes, fails: bool, steps: usize) -> Result<bool, String> {
    let (mut sim, mut model) = begun_beside_unreadable_pages(comes);
    let layout = PageLayout::new(superblock(disk(&mut sim, 1)).geometry, true);
    let is_readable = |stripe: &usize| {
        layout.hash_pages(SlotIndex(*stripe as u64), 0..CHUNK / BLOCK).all(|page| page % 2 == 1)
    };
    let readable: Vec<usize> = (0..200).filter(is_readable).collect();
    let mut write = None;
    for turn in 0.. {
        if told(&sim, NoticeKind::PageUnreadable).iter().any(|text| text.contains("is built without")) {
            break;
        }
        write = match write {
            Some(id) => match sim.poll(id) {
                Some(result) => result.map(|_| None).expect("written"),
                None => Some(id),
            },
            None => {
                let at = readable[turn % readable.len()] * 2 * CHUNK;
                model[at..at + BLOCK].fill(turn as u8);
                Some(sim.submit_write(at as u64, &model[at..at + BLOCK], true))
            }
        };
        if !sim.step() || turn % 40 == 0 {
            sim.sleep(100);
        }
        assert!(sim.now().0 < 600 * SECOND, "{comes:?}: {:?}", sim.notices);
    }
    for _ in 0..steps {
        if !sim.step() {
            sim.sleep(100);
        }
    }
    if sim.status().state == ArrayState::Online && sim.status().activities.is_empty() {
        return Ok(true);
    }
    sim.disks.values_mut().for_each(SimDisk::clear_faults);
    if fails {
        let other = sim.disk_of(1).expect("in service");
        sim.device_hangs(other);
        assert_eq!(sim.status().state, ArrayState::Failed);
        sim.sleep(100);
        online(&mut sim, 1, other);
    }
    let reads = (0..model.len()).step_by(2 * CHUNK).map(|at| sim.submit_read(at as u64, BLOCK));
    for read in reads.collect::<Vec<_>>() {
        // Some reads meet an error that was on its way.
        let _ = sim.wait(read);
    }
    until_whole(&mut sim);
    drain(&mut sim);
    if let Some(Err(_)) = write.and_then(|id| sim.poll(id)) {
        return Ok(false);
    }
    let mut sim = sim.stop_and_restart(false).expect("it starts");
    drain(&mut sim);
    hide_hash_pages(&mut sim, &[2]);
    verify(&mut sim, &model, &format!("{comes:?}, {steps} steps")).map(|()| false)
}

#[test]
fn pages_that_are_readable_again_before_a_device_joins_are_on_it_when_it_has() {
    for (comes, fails) in [
        (Comes::BesideOneInService, false),
        (Comes::InPlaceOfOneThatIsOut, false),
        (Comes::InPlaceOfOneThatIsOut, true),
        (Comes::Back, false),
        (Comes::Back, true),
    ] {
        let mut tries = 0;
        while !pages_readable_again_before_a_join(comes, fails, 5 * tries).expect("on both members") {
            tries += 1;
        }
        assert!(tries > 10, "{comes:?}: {tries}");
    }
}

/// A block of each of many rows is wrong while a member that could restore it is away. The member comes back,
/// while clients write and the process may be killed: neither old nor new data is lost.
#[test]
fn what_only_a_member_that_comes_back_can_give_is_not_lost_by_writes_meanwhile() {
    let range = std::env::var("CALPE_SIM_SEEDS").unwrap_or("0..20".into());
    let (first, end) = range.split_once("..").expect("two numbers");
    for seed in first.parse().expect("a number")..end.parse().expect("a number") {
        let mut random = Random::new(seed);
        let shape = shape(48);
        let world = SimWorld::new(shape, 32 << 20);
        let mut model = vec![0; shape.volume_bytes as usize];
        random.fill(&mut model);
        let mut sim = SimArray::create_in(&world, seed);
        sim.write(0, &model).expect("written");
        let away = offline(&mut sim, 0);
        let start = sim.data_region().start;
        for block in 0..48 * CHUNK / BLOCK {
            if random.one_in(3) {
                let member = 1 + random.below(2) as u16;
                disk(&mut sim, member).flip(start + (block * BLOCK) as u64, 1);
            }
        }
        let device = sim.reopen_disk(away);
        let back = sim.submit_admin(AdminRequest::Online { member: MemberIndex(0), device });
        let mut writes = Vec::new();
        for _ in 0..1 + random.below(24) {
            let len = if random.one_in(3) { 512 * (1 + random.index(40)) } else { BLOCK };
            let at = random.index((model.len() - len) / 512) * 512;
            let at = if len == BLOCK { at / BLOCK * BLOCK } else { at };
            let overlaps = |other: &(usize, usize, u64)| at < other.0 + other.1 && other.0 < at + len;
            if !writes.iter().any(overlaps) {
                random.fill(&mut model[at..at + len]);
                let id = sim.submit_write(at as u64, &model[at..at + len], random.one_in(2));
                writes.push((at, len, id));
            }
            for _ in 0..random.below(30) {
                sim.step();
            }
        }
        for (at, len, id) in writes {
            let result = sim.wait(id);
            assert!(result.is_ok(), "{seed}: {len} bytes at {at}: {result:?}");
        }
        assert!(!matches!(sim.poll_admin(back), Some(Err(_))), "{seed}: it returns");
        if random.one_in(3) {
            sim = sim.kill_and_restart(false).expect("it starts");
            drain(&mut sim);
            if sim.status().members[0].state == MemberState::Offline {
                let disk = sim.disk_out_of_use(0).expect("its disk");
                online(&mut sim, 0, disk);
            }
        }
        until_whole(&mut sim);
        drain(&mut sim);
        verify(&mut sim, &model, &format!("{seed}, when all is built")).expect("all is there");
        let member = random.below(3) as u16;
        sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
        drain(&mut sim);
        offline(&mut sim, member);
        verify(&mut sim, &model, &format!("{seed}, without member {member}")).expect("all is there");
    }
}

/// The member is taken offline at any point of a start after a kill.
#[test]
fn a_member_that_is_taken_offline_as_the_array_starts_is_caught_up() {
    for steps in (0..).step_by(3) {
        let (mut sim, model) = just_written(3);
        let flush = sim.submit(ClientRequest::Flush);
        sim.wait(flush).expect("flushed");
        let mut sim = sim.kill_and_restart(false).expect("it starts");
        for _ in 0..steps {
            if !sim.step() {
                sim.sleep(10);
            }
        }
        let is_over = sim.status().log == LogState::Serving;
        let away = offline(&mut sim, 1);
        sim.write(0, &model[..CHUNK]).expect("written");
        live(&mut sim, 1);
        online(&mut sim, 1, away);
        until_whole(&mut sim);
        assert_eq!(told(&sim, NoticeKind::MemberRebuiltWhole), [""; 0], "after {steps} steps");
        offline(&mut sim, 0);
        assert!(sim.read(0, model.len()).expect("readable") == model);
        if is_over {
            assert!(steps > 30, "the replay was met at some of its steps: {steps}");
            return;
        }
    }
}
