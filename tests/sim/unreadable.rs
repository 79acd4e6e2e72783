//! An array lists as unreadable exactly the blocks that reads answer with EIO: after a scrub and a repair
//! without a member, while members leave, and when one has come back.

use crate::scenes::{CHUNK, filled, live};
use calpe_core::format::ChecksumKind;
use calpe_core::testing::{SimArray, SimShape};
use calpe_core::units::{MemberIndex, VolumeOffset};
use calpe_core::volume::{AdminRequest, ClientRequest, NoticeKind};

const BLOCK: usize = 4096;
/// The damaged slot, and the number of its rows that are damaged, from the first on.
const SLOT: u64 = 4;
const ROWS: usize = 3;

/// Inverts bits in the damaged blocks of a member.
fn rot(sim: &mut SimArray, member: u16) {
    let start = sim.data_region().start + SLOT * CHUNK as u64;
    let id = sim.disk_of(member).expect("in service");
    let disk = sim.disks.get_mut(&id).expect("a disk");
    (0..ROWS).for_each(|row| disk.flip(start + (row * BLOCK) as u64 + 99, 1));
}

fn offline(sim: &mut SimArray, member: u16) {
    sim.admin(AdminRequest::Offline { member: MemberIndex(member) }).expect("it leaves");
    live(sim, 1);
}

/// Brings a member back; returns once the array reports it in service.
fn online(sim: &mut SimArray, member: u16) {
    let disk = sim.disk_out_of_use(member).expect("it is out");
    let device = sim.reopen_disk(disk);
    let before = sim.notices.len();
    let request = sim.submit_admin(AdminRequest::Online { member: MemberIndex(member), device });
    for _ in 0..1000 {
        while !sim.notices[before..].iter().any(|notice| notice.kind == NoticeKind::MemberRebuilt) {
            if !sim.step() {
                break;
            }
        }
        if sim.notices[before..].iter().any(|notice| notice.kind == NoticeKind::MemberRebuilt) {
            return sim.poll_admin(request).expect("answered").map(|_| ()).expect("it returns");
        }
        sim.sleep(10);
    }
    panic!("it does not come back: {:?}", &sim.notices[before..]);
}

fn scrub(sim: &mut SimArray) {
    sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    sim.settle();
}

/// Runs a repair; returns its final notice.
fn repair(sim: &mut SimArray) -> String {
    sim.admin(AdminRequest::Repair).expect("it begins");
    sim.settle();
    let ended = sim.notices.iter().rfind(|notice| notice.kind == NoticeKind::RepairEnded);
    ended.expect("it has ended").text.clone()
}

fn blocks(ranges: &[(VolumeOffset, u64)]) -> Vec<u64> {
    let block = BLOCK as u64;
    let mut blocks: Vec<u64> =
        ranges.iter().flat_map(|(at, bytes)| at.0 / block..(at.0 + bytes) / block).collect();
    blocks.sort_unstable();
    blocks
}

/// The blocks that are listed as beyond repair, and those listed as unreadable for now.
fn listed(sim: &SimArray) -> (Vec<u64>, Vec<u64>) {
    let status = sim.status();
    assert_eq!((status.set_aside, status.unconfirmed_lost), (vec![], vec![]));
    (blocks(&status.lost), blocks(&status.unreadable))
}

/// Reads every block; returns those that end with an error. The others must be as written.
#[track_caller]
fn errors(sim: &mut SimArray, model: &[u8]) -> Vec<u64> {
    let mut errors = Vec::new();
    for (at, want) in model.chunks(BLOCK).enumerate() {
        match sim.read((at * BLOCK) as u64, BLOCK) {
            Ok(read) => assert!(read == want, "block {at}"),
            Err(_) => errors.push(at as u64),
        }
    }
    errors
}

const PAIRS: [(u16, u16); 6] = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)];

#[test]
fn a_scrub_without_a_member_lists_all_that_cannot_be_read_and_nothing_of_it_as_lost() {
    for checksum in [ChecksumKind::Crc32c, ChecksumKind::Blake3] {
        for (bad, away) in PAIRS {
            let what = format!("{checksum:?}: bad on {bad}, {away} is away");
            let (mut sim, model) = filled(2, 1, checksum);
            rot(&mut sim, bad);
            offline(&mut sim, away);
            scrub(&mut sim);
            let scrubbed = listed(&sim);
            assert!(scrubbed.0.is_empty(), "{what}: {scrubbed:?}");
            let told = repair(&mut sim);
            let count = scrubbed.1.len();
            assert!(
                told.contains(&format!("{count} cannot be read for now, 0 are beyond repair")),
                "{what}: {told}"
            );
            assert_eq!(listed(&sim), scrubbed, "{what}");
            let errors_now = errors(&mut sim, &model);
            assert!(errors_now.len() >= ROWS, "{what}: {errors_now:?}");
            assert_eq!(scrubbed.1, errors_now, "{what}");
            assert_eq!(listed(&sim), scrubbed, "{what}");
            online(&mut sim, away);
            assert_eq!(listed(&sim), (vec![], vec![]), "{what}");
            assert!(errors(&mut sim, &model).is_empty(), "{what}");
        }
    }
}

/// A write into a row that cannot be decoded sets aside the blocks of members that are away.
#[test]
fn a_scrub_without_a_member_lists_what_is_set_aside_on_it_also_where_nothing_is_remembered() {
    let mut with_some = 0;
    for (bad, away) in PAIRS {
        let (mut sim, mut model) = filled(2, 1, ChecksumKind::Blake3);
        rot(&mut sim, bad);
        offline(&mut sim, away);
        for at in errors(&mut sim, &model) {
            let at = at as usize * BLOCK;
            let id = sim.submit_write(at as u64, &[7; BLOCK], false);
            live(&mut sim, 12);
            if sim.wait(id).is_ok() {
                model[at..at + BLOCK].fill(7);
            }
            if !sim.status().set_aside.is_empty() {
                break;
            }
        }
        let mut sim = sim.stop_and_restart(false).expect("it starts");
        sim.settle();
        scrub(&mut sim);
        let status = sim.status();
        let mut listed = blocks(&[status.lost, status.set_aside, status.unreadable].concat());
        listed.dedup();
        assert_eq!(listed, errors(&mut sim, &model), "bad on {bad}, {away} is away");
        let counted = status.last_scrub.expect("it has ended").errors;
        assert!(listed.is_empty() || counted > 0, "bad on {bad}, {away} is away");
        with_some += usize::from(!listed.is_empty());
    }
    assert!(with_some >= 2, "blocks of {with_some} pairs were set aside");
}

/// Data flushed just before is only in the log; a member that is taken out on purpose gets it in place first.
#[test]
fn what_was_flushed_right_before_a_member_went_offline_can_be_had_from_it() {
    for checksum in [ChecksumKind::Crc32c, ChecksumKind::Blake3] {
        for (bad, away) in PAIRS {
            let (mut sim, mut model) = filled(2, 1, checksum);
            for block in (0..model.len() / BLOCK).step_by(3) {
                let at = block * BLOCK;
                sim.write(at as u64, &[9; BLOCK]).expect("written");
                model[at..at + BLOCK].fill(9);
            }
            let flush = sim.submit(ClientRequest::Flush);
            sim.wait(flush).expect("flushed");
            sim.admin(AdminRequest::Offline { member: MemberIndex(away) }).expect("it leaves");
            live(&mut sim, 1);
            let region = sim.data_region();
            let id = sim.disk_of(bad).expect("in service");
            let disk = sim.disks.get_mut(&id).expect("a disk");
            (region.start..region.end).step_by(BLOCK).for_each(|at| disk.flip(at + 99, 1));
            online(&mut sim, away);
            let errors = errors(&mut sim, &model);
            assert!(errors.is_empty(), "{checksum:?}: bad on {bad}, {away} is back: {errors:?}");
        }
    }
}

#[test]
fn a_scrub_that_meets_no_data_names_the_members_that_it_did_not_check() {
    let shape = SimShape::new(2, 1, CHUNK as u32, 8).logged(ChecksumKind::Blake3, 1 << 20);
    let mut sim = SimArray::create(shape, 11);
    offline(&mut sim, 2);
    scrub(&mut sim);
    let unchecked = sim.status().last_scrub.expect("it has ended").unchecked;
    assert!(unchecked.contains(MemberIndex(2)), "{unchecked:?}");
}

#[test]
fn one_read_that_fails_lists_what_else_of_its_row_cannot_be_read() {
    for (bad, away) in PAIRS {
        let (mut sim, model) = filled(2, 1, ChecksumKind::Blake3);
        rot(&mut sim, bad);
        offline(&mut sim, away);
        let at = (0..model.len()).step_by(BLOCK).find(|&at| sim.read(at as u64, BLOCK).is_err());
        let row = |block: u64| block % (CHUNK / BLOCK) as u64;
        let first = (at.expect("one is an error") / BLOCK) as u64;
        let (_, unreadable) = listed(&sim);
        let mut all = errors(&mut sim, &model);
        all.retain(|&block| row(block) == row(first));
        assert_eq!(unreadable, all, "bad on {bad}, {away} is away");
    }
}

#[test]
fn rows_that_are_known_to_be_bad_are_looked_at_again_when_a_member_leaves() {
    for (member, other, away) in [(0, 1, 2), (1, 2, 0), (0, 2, 1)] {
        let (mut sim, model) = filled(2, 1, ChecksumKind::Blake3);
        rot(&mut sim, member);
        rot(&mut sim, other);
        scrub(&mut sim);
        let (lost, unreadable) = listed(&sim);
        assert!(!lost.is_empty() && unreadable.is_empty(), "{lost:?} {unreadable:?}");
        offline(&mut sim, away);
        let (still_lost, unreadable) = listed(&sim);
        assert_eq!(still_lost, lost);
        let told = repair(&mut sim);
        let counts = format!("{} cannot be read for now, {} are beyond repair", unreadable.len(), lost.len());
        assert!(told.contains(&counts), "{told}");
        assert_eq!(listed(&sim), (lost.clone(), unreadable.clone()));
        let mut all = [&lost[..], &unreadable].concat();
        all.sort_unstable();
        assert_eq!(errors(&mut sim, &model), all);
        online(&mut sim, away);
        assert_eq!(
            listed(&sim),
            (lost, vec![]),
            "what the member has can be read when it is told to be back"
        );
    }
}

#[test]
fn what_can_be_decoded_again_is_listed_no_more_soon_after_a_scrub() {
    for (bad, away) in PAIRS {
        let (mut sim, model) = filled(2, 1, ChecksumKind::Blake3);
        rot(&mut sim, bad);
        offline(&mut sim, away);
        scrub(&mut sim);
        let is_any = !listed(&sim).1.is_empty();
        // The bytes become again what they were.
        rot(&mut sim, bad);
        sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
        live(&mut sim, 1);
        assert_eq!(listed(&sim), (vec![], vec![]), "bad on {bad}, {away} is away");
        assert!(is_any && errors(&mut sim, &model).is_empty());
    }
}

#[test]
fn to_replace_a_member_that_may_alone_give_blocks_is_told_with_what_that_means() {
    let (mut sim, _) = filled(2, 1, ChecksumKind::Blake3);
    let replace = |sim: &mut SimArray| {
        let device = sim.add_blank_disk();
        sim.would(&AdminRequest::Replace { member: MemberIndex(1), device }).expect("it can be done").0
    };
    assert!(!replace(&mut sim).contains("cannot be read"));
    rot(&mut sim, 0);
    offline(&mut sim, 1);
    assert!(!replace(&mut sim).contains("cannot be read"));
    scrub(&mut sim);
    let bytes = listed(&sim).1.len() * BLOCK / 1024;
    let told = replace(&mut sim);
    assert!(told.contains(&format!("{bytes} KiB of the volume cannot be read")), "{told}");
    assert!(told.contains("bring that device back first") && told.contains("'calpe online sim 1'"), "{told}");
    // Also while the member is caught up, but not for a new device that is being built.
    let disk = sim.disk_out_of_use(1).expect("it is out");
    let device = sim.reopen_disk(disk);
    sim.submit_admin(AdminRequest::Online { member: MemberIndex(1), device });
    let told = replace(&mut sim);
    assert!(
        told.contains(&format!("{bytes} KiB of the volume")) && told.contains("wait for that first"),
        "{told}"
    );
    let device = sim.add_blank_disk();
    let done = sim.admin(AdminRequest::Replace { member: MemberIndex(1), device }).expect("it begins").0;
    assert!(done.contains(&format!("{bytes} KiB of the volume cannot be read")), "{done}");
    assert!(!replace(&mut sim).contains("cannot be read"));
}
