//! The last copy is never dropped for read errors (rule T5 of the crash-safety design): a member with bad
//! places stays in service while rows need it, however many errors there are, and a member with unending
//! errors leaves only if it can be spared.

use crate::scenes::live;
use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{DiskRegion, OpKinds, PassingFault, Random, SimArray, SimShape, Trouble};
use calpe_core::units::{MemberIndex, SlotIndex, VolumeOffset};
use calpe_core::volume::{AdminRequest, ArrayState, ClientError, ClientRequest, MemberCondition};
use std::collections::BTreeSet;

const BLOCK: usize = 4096;
const CHUNK: usize = 16384;
const ROWS: u64 = (CHUNK / BLOCK) as u64;
const STRIPES: u64 = 240;

/// An array and the expected content of its volume.
struct Checked {
    sim: SimArray,
    model: Vec<u8>,
}

impl Checked {
    /// A clean array full of random bytes, with 960 rows.
    fn filled(data: u16, parity: u16) -> Checked {
        let shape = SimShape::new(data, parity, CHUNK as u32, STRIPES).logged(ChecksumKind::Blake3, 1 << 20);
        let mut model = vec![0; shape.volume_bytes as usize];
        Random::new(5).fill(&mut model);
        let mut sim = SimArray::create(shape, 5);
        sim.write(0, &model).expect("written");
        sim.settle();
        Checked { sim, model }
    }

    /// The 4 KiB blocks of a member that belong to rows with data, row by row.
    fn blocks(&self, member: u16) -> Vec<u64> {
        let region = self.sim.data_region();
        let disk = self.sim.disk_of(member).expect("a disk");
        self.sim.disks[&disk].written_blocks(region.start..region.end)
    }

    fn disk(&mut self, member: u16) -> &mut calpe_core::testing::SimDisk {
        let disk = self.sim.disk_of(member).expect("a disk");
        self.sim.disks.get_mut(&disk).expect("a disk")
    }

    fn make_bad(&mut self, member: u16, blocks: &[u64]) {
        self.disk(member).bad_blocks.extend(blocks);
    }

    /// Makes these blocks impossible to read or write.
    fn break_for_good(&mut self, member: u16, blocks: &[u64]) {
        let ranges = blocks.iter().map(|block| block * BLOCK as u64..(block + 1) * BLOCK as u64);
        let fault = PassingFault::new(Trouble::Medium).on(OpKinds::READS | OpKinds::WRITES).within(ranges);
        self.disk(member).inject(fault);
    }

    fn live(&mut self, seconds: u64) {
        live(&mut self.sim, seconds);
    }

    /// Reads and checks everything, block by block, without caches of earlier reads.
    #[track_caller]
    fn verify(&mut self) {
        for at in (0..self.model.len()).step_by(8 * BLOCK) {
            let read = self.sim.read(at as u64, 8 * BLOCK);
            let read = read.unwrap_or_else(|error| panic!("{error} at {at}: {:?}", self.sim.notices.last()));
            assert!(read == self.model[at..at + 8 * BLOCK], "wrong bytes at {at}");
        }
    }

    fn state_of(&self, member: u16) -> MemberState {
        self.sim.status().members[usize::from(member)].state
    }

    fn conditions_of(&self, member: u16) -> Vec<MemberCondition> {
        self.sim.status().members[usize::from(member)].conditions.clone()
    }

    fn said(&self, part: &str) -> usize {
        self.sim.notices.iter().filter(|notice| notice.text.contains(part)).count()
    }
}

#[test]
fn bad_sectors_of_two_members_in_different_rows_cost_nothing_with_one_parity() {
    // Case 3: 257 read errors once removed a member, then another, though every row could be decoded.
    for written_again in [true, false] {
        let mut array = Checked::filled(2, 1);
        let (first, second) = (array.blocks(0), array.blocks(1));
        let first: Vec<u64> = first.into_iter().filter(|block| block % 2 == 0).collect();
        let second: Vec<u64> = second.into_iter().filter(|block| block % 2 == 1).collect();
        assert!(first.len() > 400 && second.len() > 400, "{} and {}", first.len(), second.len());
        for (member, blocks) in [(0, &first), (1, &second)] {
            match written_again {
                true => array.make_bad(member, blocks),
                false => array.break_for_good(member, blocks),
            }
        }
        for _ in 0..3 {
            array.verify();
            array.live(20);
        }
        let status = array.sim.status();
        assert_eq!((status.state, status.lost.len(), status.client_errors), (ArrayState::Online, 0, 0));
        for member in [0, 1] {
            let kept: &[MemberCondition] =
                if written_again { &[] } else { &[MemberCondition::KeptDespiteErrors] };
            assert_eq!(array.conditions_of(member), kept, "written again: {written_again}");
        }
        if !written_again {
            let last: Vec<_> = array.sim.notices.iter().filter(|n| !n.text.contains("rewritten")).collect();
            assert_eq!(array.said("kept in service"), 2, "each is told once: {last:?}");
        }
    }
}

#[test]
fn what_cannot_be_read_after_it_was_rewritten_is_not_repaired_until_it_can() {
    for scrubs in [false, true] {
        let mut array = Checked::filled(2, 1);
        let blocks: Vec<u64> = array.blocks(0).into_iter().skip(7).step_by(9).take(20).collect();
        let ranges = blocks.iter().map(|block| block * BLOCK as u64..(block + 1) * BLOCK as u64);
        array.disk(0).inject(PassingFault::new(Trouble::Medium).on(OpKinds::READS).within(ranges));
        match scrubs {
            true => array.sim.admin(AdminRequest::ScrubStart).map(drop).expect("started"),
            false => array.verify(),
        }
        array.live(5);
        let counters = array.sim.status().members[0].counters;
        assert!(counters.read_errors > 0 && counters.repaired == 0, "scrubs: {scrubs}: {counters:?}");
        assert_eq!(array.said("rewritten"), array.said("cannot be read again after it was rewritten"));
        assert_ne!(array.said("cannot be read again after it was rewritten"), 0, "scrubs: {scrubs}");
        assert_eq!(array.conditions_of(0), [MemberCondition::NotMended], "scrubs: {scrubs}");
        array.disk(0).clear_faults();
        array.live(70);
        assert_eq!(
            array.conditions_of(0),
            [],
            "scrubs: {scrubs}: it has passed, and no client has read anything"
        );
        array.verify();
        assert_eq!(array.state_of(0), MemberState::Online);
    }
}

#[test]
fn an_unreadable_ring_that_no_row_needs_stops_no_start() {
    // Case 3: one dead member and 2 MiB of unreadable ring once meant FAILED at each start.
    for clean in [true, false] {
        let mut array = Checked::filled(2, 1);
        let ring = DiskRegion::Log.ranges(&array.sim.disks[&0]).remove(0);
        if !clean {
            let id = array.sim.submit_write(BLOCK as u64, &[7; BLOCK], true);
            array.model[BLOCK..2 * BLOCK].fill(7);
            array.sim.wait(id).expect("written");
            array.sim.settle();
        }
        array.disk(2).dead = true;
        array.live(2);
        // The ring of a remaining member cannot be read except for the live log, which is at its start.
        let live = 64 * BLOCK as u64;
        let blocks: Vec<u64> =
            (ring.start + live..ring.end).step_by(BLOCK).map(|at| at / BLOCK as u64).collect();
        assert!(blocks.len() > 180);
        array.make_bad(0, &blocks);
        for _ in 0..3 {
            let Checked { sim, model } = array;
            let sim = if clean { sim.stop_and_restart(false) } else { sim.kill_and_restart(false) };
            array = Checked { sim: sim.expect("it starts"), model };
            array.live(20);
            assert_eq!(array.sim.status().state, ArrayState::Degraded, "{:?}", array.sim.notices);
            array.verify();
        }
    }
}

#[test]
fn a_member_whose_errors_do_not_end_leaves_when_it_can_be_spared() {
    let mut array = Checked::filled(2, 2);
    let blocks = array.blocks(0);
    array.break_for_good(0, &blocks[..700]);
    array.verify();
    assert_eq!(array.state_of(0), MemberState::Online, "a fault may pass");
    array.live(15);
    assert_eq!((array.state_of(0), array.sim.status().state), (MemberState::Faulted, ArrayState::Degraded));
    let reason = array.sim.status().members[0].reason.clone().expect("a reason");
    assert!(reason.contains("errors"), "{reason}");
    array.verify();
}

#[test]
fn a_member_is_kept_while_a_row_that_is_bad_elsewhere_needs_it() {
    let mut array = Checked::filled(2, 1);
    // Two bad places on member 1 that cannot be rewritten: these rows need all others.
    let few = array.blocks(1)[10..12].to_vec();
    array.break_for_good(1, &few);
    let bad: Vec<u64> = array.blocks(0).into_iter().filter(|block| !few.contains(block)).collect();
    array.break_for_good(0, &bad[..700]);
    array.verify();
    array.live(30);
    assert_eq!((array.state_of(0), array.state_of(1)), (MemberState::Online, MemberState::Online));
    assert_eq!(array.conditions_of(0), [MemberCondition::KeptDespiteErrors]);
    assert_eq!(array.said("of member 0 do not end"), 1);
    array.verify();
    // The broken blocks are mended: nothing keeps the member in service any more, but nothing is wrong with
    // it either.
    array.disk(0).clear_faults();
    array.disk(1).clear_faults();
    array.live(80);
    array.verify();
    assert_eq!((array.conditions_of(0), array.sim.status().state), (vec![], ArrayState::Online));
}

/// The member leaves once the blocks are written again.
#[test]
fn what_a_departure_leaves_of_a_row_with_bad_blocks_is_told_before_it() {
    let mut array = Checked::filled(2, 2);
    let would = |array: &Checked, member: u16| {
        array.sim.would(&AdminRequest::Offline { member: MemberIndex(member) }).expect("it may leave").0
    };
    assert!(would(&array, 3).ends_with("survives 1 more"), "{}", would(&array, 3));
    let bad = array.blocks(0)[7];
    for member in [0, 1] {
        array.break_for_good(member, &[bad]);
    }
    array.sim.admin(AdminRequest::ScrubStart).expect("it begins");
    array.sim.settle();
    let told = would(&array, 3);
    assert!(
        told.ends_with(
            "survives 1 more; but rows have up to 2 bad blocks, and such a row may then be unreadable"
        ),
        "{told}"
    );
    let told = would(&array, 0);
    assert!(
        told.ends_with(
            "survives 1 more; but rows have up to 1 bad block, and such a row survives only 0 more"
        ),
        "{told}"
    );
    // Beside blocks that a member lacks, in the same slot or in another one.
    let slot = (bad * BLOCK as u64 - array.sim.data_region().start) / CHUNK as u64;
    let device = array.sim.status().members[2].uuid;
    for (first, meets) in [(slot, true), (slot + 1, false)] {
        array.sim.expect_lacking(device, &[(SlotIndex(first), 1)]);
        let told = would(&array, 0);
        let lacks =
            "but blocks of 1 slot were not built on member 2 so far, and these may survive only 0 more";
        assert!(told.contains(lacks), "{told}");
        assert_eq!(told.ends_with("where both meet, rows may then be unreadable"), meets, "{told}");
    }
    // After a restart it is not known which blocks these are.
    array.sim = array.sim.stop_and_restart(false).expect("it starts");
    array.sim.settle();
    let told = would(&array, 3);
    assert!(told.contains("but the last scrub has left") && told.contains("survives fewer"), "{told}");
    for member in [0, 1] {
        array.disk(member).clear_faults();
    }
    array.sim.admin(AdminRequest::ScrubStart).expect("it begins");
    array.sim.settle();
    array.sim.admin(AdminRequest::ScrubStart).expect("it begins");
    array.sim.settle();
    assert!(would(&array, 3).ends_with("survives 1 more"), "{}", would(&array, 3));
}

#[test]
fn a_scrub_without_members_does_not_refute_what_an_earlier_one_has_found_on_them() {
    let mut array = Checked::filled(2, 2);
    let bad = array.blocks(0)[7];
    [0, 1].iter().for_each(|member| array.break_for_good(*member, &[bad]));
    let scrub = |array: &mut Checked| {
        array.sim.admin(AdminRequest::ScrubStart).expect("it begins");
        array.sim.settle();
        let last = array.sim.status().last_scrub.expect("it has ended");
        (last.errors, last.repaired, last.unchecked.len())
    };
    let found = scrub(&mut array);
    assert!(found.0 >= 2 && found.2 == 0, "{found:?}");
    for member in [0, 1] {
        array.sim.admin(AdminRequest::Offline { member: MemberIndex(member) }).expect("it leaves");
        array.sim.settle();
    }
    assert_eq!(scrub(&mut array), (found.0, found.1, 2));
    let notices = &array.sim.notices;
    assert!(notices.iter().any(|notice| notice.text.contains("of an earlier scrub stand")), "{notices:?}");
}

#[test]
fn a_member_is_kept_while_it_alone_has_blocks_that_are_set_aside() {
    let mut array = Checked::filled(2, 1);
    let data = array.sim.data_region();
    for member in [0, 1] {
        let fault = PassingFault::new(Trouble::Medium).on(OpKinds::READS).within([data.clone()]);
        array.disk(member).inject(fault);
    }
    for stripe in 0..3 {
        let at = stripe * 2 * CHUNK;
        let id = array.sim.submit_write(at as u64, &[7; BLOCK], false);
        array.live(12);
        if array.sim.poll(id).is_some_and(|end| end.is_ok()) {
            array.model[at..at + BLOCK].fill(7);
        }
    }
    let alone = array.sim.status().set_aside_on.iter().next().expect("some are set aside").0;
    array.disk(1 - alone).clear_faults();
    array.sim.admin(AdminRequest::ScrubStart).expect("it begins");
    array.live(120);
    let aside = array.sim.status().set_aside;
    assert!(!aside.is_empty());
    assert_eq!(array.state_of(alone), MemberState::Online, "{:?}", array.sim.notices.last());
    assert!(array.conditions_of(alone).contains(&MemberCondition::KeptDespiteErrors));
    assert_eq!(array.said("for it alone has blocks that are set aside"), 1);
    for (offset, len) in aside {
        let at = offset.0 as usize..(offset.0 + len) as usize;
        array.model[at.clone()].fill(9);
        array.sim.write(offset.0, &array.model[at]).expect("written");
    }
    assert!(array.sim.status().set_aside.is_empty());
    array.live(120);
    assert_eq!(array.state_of(alone), MemberState::Faulted);
    array.verify();
}

#[test]
fn healed_errors_cost_no_member_however_many_they_are() {
    let mut array = Checked::filled(2, 2);
    for round in 0..3 {
        let blocks: Vec<u64> = array.blocks(0).into_iter().filter(|block| block % 3 == round).collect();
        assert!(blocks.len() >= 300);
        array.make_bad(0, &blocks);
        array.verify();
        array.live(12);
        assert_eq!((array.state_of(0), array.conditions_of(0)), (MemberState::Online, vec![]), "{round}");
    }
    assert!(array.sim.status().members[0].counters.read_errors > 400);
    // Damage that no client has read.
    array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    array.sim.settle();
    array.sim.assert_scrub_clean();
}

#[test]
fn places_that_go_bad_again_and_again_cost_a_member_that_can_be_spared_and_no_other() {
    for (parity, unreadable) in [(2, true), (2, false), (1, true), (1, false)] {
        let mut array = Checked::filled(2, parity);
        let blocks = array.blocks(0)[..200].to_vec();
        if parity == 1 {
            // A row that needs the member.
            let other = array.blocks(1)[300];
            array.break_for_good(1, &[other]);
            array.verify();
        }
        for _ in 0..20 {
            if array.state_of(0) != MemberState::Online {
                break;
            }
            for &block in &blocks {
                match unreadable {
                    true => array.make_bad(0, &[block]),
                    false => array.disk(0).flip(block * BLOCK as u64 + 9, 1),
                }
            }
            array.verify();
            array.live(1);
        }
        let kept = array.conditions_of(0).contains(&MemberCondition::KeptDespiteErrors);
        assert_eq!(kept, parity == 1);
        let expected = if parity == 2 { MemberState::Faulted } else { MemberState::Online };
        assert_eq!(array.state_of(0), expected, "{parity} {unreadable}: {:?}", array.sim.notices.last());
        array.verify();
        if parity == 1 {
            // Four hours later the errors are forgotten.
            array.sim.sleep(4 * 3_600_000);
            array.disk(1).clear_faults();
            array.live(1);
            assert!(!array.conditions_of(0).contains(&MemberCondition::KeptDespiteErrors));
        }
    }
}

/// Reads everything twice while these members can read nothing; blocks rewritten after the first time are bad
/// again.
fn burst(array: &mut Checked, members: &[u16]) {
    for &member in members {
        array.disk(member).inject(PassingFault::new(Trouble::Medium).on(OpKinds::READS));
    }
    array.verify();
    array.verify();
    for &member in members {
        array.disk(member).clear_faults();
    }
}

#[test]
fn a_burst_of_read_errors_that_is_over_costs_no_member() {
    for members in [&[0][..], &[0, 3]] {
        for (clear, scrub) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut array = Checked::filled(2, 2);
            burst(&mut array, members);
            if scrub {
                array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
                array.sim.settle();
            }
            if clear {
                array.sim.admin(AdminRequest::Clear { member: None }).expect("cleared");
            }
            array.live(30);
            let status = array.sim.status();
            assert_eq!(status.state, ArrayState::Online, "{:?}", array.sim.notices.last());
            assert!(members.iter().all(|&member| array.conditions_of(member).is_empty()));
            array.verify();
            array.sim.assert_scrub_clean();
        }
    }
}

#[test]
fn wrong_content_that_is_over_costs_no_member() {
    let mut array = Checked::filled(2, 2);
    let blocks = array.blocks(0)[..400].to_vec();
    for _ in 0..2 {
        blocks.iter().for_each(|&block| array.disk(0).flip(block * BLOCK as u64 + 9, 1));
        array.verify();
        array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
        array.sim.settle();
    }
    array.live(30);
    assert_eq!(array.sim.status().state, ArrayState::Online, "{:?}", array.sim.notices.last());
    array.verify();
}

#[test]
fn errors_of_a_whole_member_that_pass_cost_nothing() {
    let mut array = Checked::filled(2, 2);
    array.disk(3).inject(PassingFault::new(Trouble::Medium).on(OpKinds::READS));
    array.verify();
    array.disk(3).clear_faults();
    array.live(30);
    array.verify();
    let status = array.sim.status();
    assert_eq!((status.state, array.conditions_of(3)), (ArrayState::Online, vec![]));
    array.sim.assert_scrub_clean();
}

#[test]
fn a_member_that_reads_nothing_leaves_when_it_can_be_spared() {
    let mut array = Checked::filled(2, 2);
    array.disk(3).inject(PassingFault::new(Trouble::Medium).on(OpKinds::READS));
    for _ in 0..4 {
        array.verify();
        array.live(5);
    }
    assert_eq!(array.state_of(3), MemberState::Faulted);
    array.verify();
}

#[test]
fn a_member_that_fails_writes_leaves_though_others_have_bad_rows_and_the_last_one_needed_stops_the_array() {
    let mut array = Checked::filled(2, 1);
    let bad = array.blocks(1)[40];
    array.break_for_good(1, &[bad]);
    array.verify();
    array.disk(0).inject(PassingFault::new(Trouble::Medium).on(OpKinds::WRITES));
    let id = array.sim.submit_write(0, &[3; BLOCK], true);
    array.sim.wait(id).expect("the others serve");
    array.model[..BLOCK].fill(3);
    assert_eq!(array.state_of(0), MemberState::Faulted);
    // The listed row is answered with an error, everything else with data.
    let mut errors = BTreeSet::new();
    for at in (0..array.model.len()).step_by(BLOCK) {
        match array.sim.read(at as u64, BLOCK) {
            Ok(read) => assert!(read == array.model[at..at + BLOCK]),
            Err(error) => {
                assert_eq!(error, ClientError::Io);
                errors.insert(at);
            }
        }
    }
    assert!(!errors.is_empty() && errors.len() <= 2, "{errors:?}");
    array.disk(2).inject(PassingFault::new(Trouble::Medium).on(OpKinds::FLUSHES));
    let id = array.sim.submit_write(0, &[4; BLOCK], true);
    assert_eq!(array.sim.wait(id).map(|_| ()), Err(ClientError::Io), "nothing is acknowledged over it");
    assert_eq!(array.sim.status().state, ArrayState::Failed);
}

#[test]
fn a_row_index_is_a_place_on_every_member() {
    // The tests above rely on this: the blocks of a row lie at the same place on all members.
    let array = Checked::filled(2, 1);
    assert_eq!(array.blocks(0), array.blocks(1));
    assert_eq!(array.blocks(0).len() as u64, STRIPES * ROWS);
}

/// Blocks stay bad after they were rewritten; then their places are not needed any more, and the member
/// counts as good again.
#[test]
fn a_place_that_is_not_needed_is_no_block_that_stays_bad() {
    for writes_again in [false, true] {
        for how in ["waits", "scrubs", "clears"] {
            let mut array = Checked::filled(2, 1);
            let start = array.sim.data_region().start + 2 * BLOCK as u64;
            let within = start..start + BLOCK as u64;
            array.disk(0).inject(PassingFault::new(Trouble::Medium).on(OpKinds::READS).within([within]));
            array.verify();
            array.live(2);
            let case = format!("writes again: {writes_again}, {how}");
            assert_eq!(array.conditions_of(0), [MemberCondition::NotMended], "{case}");
            let len = 2 * CHUNK;
            let trim = ClientRequest::Trim { offset: VolumeOffset(0), len: len as u64, fua: false };
            let trim = array.sim.submit(trim);
            array.sim.wait(trim).expect("trimmed");
            array.model[..len].fill(0);
            if writes_again {
                array.live(2);
                array.sim.write(0, &[7; BLOCK]).expect("written");
                array.model[..BLOCK].fill(7);
            }
            match how {
                "waits" => array.live(70),
                "scrubs" => {
                    array.sim.admin(AdminRequest::ScrubStart).expect("started");
                    array.live(5);
                }
                _ => {
                    array.sim.admin(AdminRequest::Clear { member: None }).expect("cleared");
                }
            }
            assert_eq!(array.conditions_of(0), [], "{case}");
            array.verify();
        }
    }
}
