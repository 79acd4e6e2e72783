//! Read errors are no evidence of loss, and a write changes only what it was asked to change (rules T1 and T2
//! of the crash-safety design). Each test is named after the property that it checks.

use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{Mutation, OpKinds, PassingFault, Random, SimArray, SimShape, Trouble};
use calpe_core::units::{MemberIndex, Timestamp, VolumeOffset};
use calpe_core::volume::{AdminRequest, ClientError, NoticeKind};
use std::ops::Range;

const BLOCK: usize = 4096;
const CHUNK: usize = 16384;
const RING: u64 = 1 << 20;
const SECOND: u64 = 1_000_000_000;

/// An array and the expected content of its volume.
struct Checked {
    sim: SimArray,
    model: Vec<u8>,
}

fn shape(data: u16, parity: u16, checksum: ChecksumKind) -> SimShape {
    SimShape::new(data, parity, CHUNK as u32, 8).logged(checksum, RING)
}

impl Checked {
    /// A clean array full of random bytes, with everything in place.
    fn filled(shape: SimShape, seed: u64) -> Checked {
        let mut model = vec![0; shape.volume_bytes as usize];
        Random::new(seed ^ 0xf111).fill(&mut model);
        let mut sim = SimArray::create(shape, seed);
        sim.write(0, &model).expect("written");
        sim.settle();
        Checked { sim, model }
    }

    /// Starts a write, and expects its bytes from now on.
    fn submit(&mut self, start: usize, byte: u8, len: usize) -> u64 {
        self.model[start..start + len].fill(byte);
        self.sim.submit_write(start as u64, &vec![byte; len], false)
    }

    /// Makes reads of these bytes of these members fail for `seconds`.
    fn fail_reads(&mut self, members: Range<u16>, trouble: Trouble, within: Range<u64>, seconds: u64) {
        let until = Timestamp(self.sim.now().0 + seconds * SECOND);
        for member in members {
            let disk = self.disk(member);
            disk.inject(PassingFault::new(trouble).on(OpKinds::READS).within([within.clone()]).until(until));
        }
    }

    fn disk(&mut self, member: u16) -> &mut calpe_core::testing::SimDisk {
        let id = self.sim.disk_of(member).expect("in service");
        self.sim.disks.get_mut(&id).expect("a disk")
    }

    /// The first block of the data region of every member: row 0 of slot 0, where column c is on member c.
    fn first_block(&self) -> Range<u64> {
        let start = self.sim.data_region().start;
        start..start + BLOCK as u64
    }

    fn break_first_block(&mut self, member: u16) {
        let block = self.first_block().start / BLOCK as u64;
        self.disk(member).bad_blocks.insert(block);
    }

    #[track_caller]
    fn verify(&mut self) {
        for (at, want) in self.model.chunks(BLOCK).enumerate() {
            let read = self.sim.read((at * BLOCK) as u64, BLOCK);
            assert!(read.as_deref() == Ok(want), "block {at}: {:?} {:?}", read.is_ok(), self.sim.notices);
        }
    }

    #[track_caller]
    fn assert_undamaged(&mut self) {
        self.verify();
        self.sim.assert_scrub_clean();
        let status = self.sim.status();
        assert_eq!((status.lost, status.set_aside, status.unreadable), (vec![], vec![], vec![]));
    }

    fn restart(self) -> Checked {
        let sim = self.sim.stop_and_restart(false).expect("it starts");
        Checked { sim, model: self.model }
    }

    fn online(&mut self, member: u16, disk: u32) {
        let device = self.sim.reopen_disk(disk);
        let member = MemberIndex(member);
        self.sim.admin(AdminRequest::Online { member, device }).expect("it returns");
        self.sim.settle();
    }
}

fn offline(array: &mut Checked, member: u16) -> u32 {
    let disk = array.sim.disk_of(member).expect("in service");
    array.sim.admin(AdminRequest::Offline { member: MemberIndex(member) }).expect("it leaves");
    disk
}

const WITH_CHECKSUMS: [ChecksumKind; 2] = [ChecksumKind::Crc32c, ChecksumKind::Blake3];

#[test]
fn a_write_while_no_data_can_be_read_waits_and_harms_no_other_block() {
    for checksum in [ChecksumKind::Crc32c, ChecksumKind::Blake3, ChecksumKind::None] {
        for trouble in [Trouble::Medium, Trouble::Shortage] {
            for (start, len) in [(0, BLOCK), (3 * BLOCK + 512, 512), (CHUNK - BLOCK, 2 * CHUNK)] {
                let mut array = Checked::filled(shape(4, 2, checksum), 1);
                let data = array.sim.data_region();
                array.fail_reads(0..6, trouble, data, 1);
                let write = array.submit(start, 7, len);
                assert_eq!(array.sim.wait(write).map(|_| ()), Ok(()), "{:?}", array.sim.notices);
                array.verify();
                array.restart().assert_undamaged();
            }
        }
    }
}

/// The old content of the block can be read, but nothing that its parity needs: the write has to release the
/// row, and others write to it meanwhile.
#[test]
fn a_part_of_a_block_that_waits_for_its_row_changes_nothing_that_others_write_beside_it() {
    for checksum in [ChecksumKind::Crc32c, ChecksumKind::Blake3, ChecksumKind::None] {
        for (start, len) in [(512, 512), (0, BLOCK), (0, 2 * CHUNK)] {
            let mut array = Checked::filled(shape(2, 1, checksum), 1);
            let data = array.sim.data_region();
            array.fail_reads(1..3, Trouble::Medium, data, 1);
            let other = array.sim.submit_write(1024, &[7; 512], false);
            array.sim.sleep(100);
            let whole = array.submit(start, 8, len);
            array.sim.sleep(100);
            for write in [other, whole] {
                assert_eq!(array.sim.wait(write).map(|_| ()), Ok(()), "{:?}", array.sim.notices);
            }
            // Two writes of the same bytes at a time: either may come last.
            let shown = array.sim.read(1024, 512).expect("it can be read");
            assert!(shown == [7; 512] || (len > 512 && shown == [8; 512]), "{start}+{len} {:?}", &shown[..8]);
            array.model[1024..1536].copy_from_slice(&shown);
            array.verify();
            array.restart().assert_undamaged();
        }
    }
}

#[test]
fn reads_fail_while_nothing_can_be_read_and_succeed_after_it() {
    let mut array = Checked::filled(shape(4, 2, ChecksumKind::Blake3), 2);
    let data = array.sim.data_region();
    array.fail_reads(0..6, Trouble::Medium, data, 1);
    assert_eq!(array.sim.read(0, BLOCK), Err(ClientError::Io));
    let row = [0, 1, 2, 3].map(|column| (VolumeOffset(column * CHUNK as u64), BLOCK as u64));
    assert_eq!(array.sim.status().unreadable, row, "what else of its row cannot be read is known, too");
    assert_eq!(array.sim.status().lost, []);
    array.sim.sleep(1100);
    array.assert_undamaged();
}

#[test]
fn faults_one_after_the_other_that_meet_the_same_read_do_not_fail_it() {
    for is_taken_out in [false, true] {
        let mut array = Checked::filled(shape(2, 1, ChecksumKind::Blake3), 2);
        let once =
            PassingFault::new(Trouble::Medium).on(OpKinds::READS).within([array.first_block()]).times(1);
        array.disk(0).inject(once.clone());
        let read = array.sim.submit_read(0, BLOCK);
        while array.disk(0).struck(Trouble::Medium) == 0 {
            assert!(array.sim.step(), "it reads");
        }
        // The first fault has passed; the reads that would decode the block meet the next one.
        if is_taken_out {
            offline(&mut array, 2);
        } else {
            array.disk(2).inject(once);
        }
        assert!(array.sim.wait(read).is_ok(), "{:?}", array.sim.notices);
        array.verify();
    }
}

/// Block 0 is on a member that is away, and the block at `CHUNK` has a bad sector: 2+1 can decode neither.
fn beyond_the_budget(checksum: ChecksumKind) -> (Checked, u32) {
    let mut array = Checked::filled(shape(2, 1, checksum), 3);
    let away = offline(&mut array, 0);
    array.break_first_block(1);
    (array, away)
}

#[test]
fn a_member_that_was_away_brings_back_what_was_set_aside_meanwhile() {
    for checksum in WITH_CHECKSUMS {
        let (mut array, away) = beyond_the_budget(checksum);
        // Neither its old content nor its neighbour's can be obtained: after a while the neighbour is set
        // aside.
        let write = array.submit(CHUNK, 7, BLOCK);
        let begun = array.sim.now();
        array.sim.wait(write).expect("the row can be written all the same");
        assert!(array.sim.now().0 - begun.0 >= 9 * SECOND, "it has waited for a better moment");
        assert_eq!(array.sim.status().set_aside, [(VolumeOffset(0), BLOCK as u64)]);
        assert_eq!(array.sim.read(0, BLOCK), Err(ClientError::Io));
        assert_eq!(array.sim.read(CHUNK as u64, BLOCK).expect("written"), vec![7; BLOCK]);
        array.online(0, away);
        array.assert_undamaged();
        let mut array = array.restart();
        array.assert_undamaged();
        // The parity includes the block again.
        offline(&mut array, 0);
        array.verify();
    }
}

#[test]
fn what_is_set_aside_outlives_a_crash_and_a_restart_and_is_found_by_a_read() {
    for kill in [true, false] {
        let (mut array, away) = beyond_the_budget(ChecksumKind::Blake3);
        let write = array.submit(CHUNK, 7, BLOCK);
        array.sim.wait(write).expect("written");
        let Checked { sim, model } = array;
        let sim = if kill { sim.kill_and_restart(false) } else { sim.stop_and_restart(false) };
        let mut array = Checked { sim: sim.expect("it starts"), model };
        assert_eq!(array.sim.status().state, calpe_core::volume::ArrayState::Degraded);
        assert_eq!(array.sim.read(0, BLOCK), Err(ClientError::Io));
        array.online(0, away);
        array.assert_undamaged();
    }
}

#[test]
fn what_an_earlier_run_told_of_and_a_client_finds_set_aside_is_looked_at_no_more_often_than_other_damage() {
    let (mut array, away) = beyond_the_budget(ChecksumKind::Blake3);
    let write = array.submit(CHUNK, 7, BLOCK);
    array.sim.wait(write).expect("written");
    let mut array = array.restart();
    array.sim.expect_damage(&[(VolumeOffset(0), BLOCK as u64)], false);
    // A client comes before the first look.
    assert_eq!(array.sim.read(0, BLOCK), Err(ClientError::Io));
    assert_eq!(array.sim.status().set_aside, [(VolumeOffset(0), BLOCK as u64)]);
    array.sim.sleep(1_000);
    array.sim.settle();
    assert_eq!(array.sim.due(), None, "it is looked at again without a pause, and nothing else is");
    array.online(0, away);
    array.assert_undamaged();
}

#[test]
fn a_bad_sector_that_heals_is_repaid_by_itself() {
    let (mut array, _) = beyond_the_budget(ChecksumKind::Blake3);
    array.disk(1).bad_blocks.clear();
    let first = array.first_block();
    array.fail_reads(1..2, Trouble::Medium, first, 20);
    // The member of block 0 is away, and its old content cannot be decoded, since the block at CHUNK cannot
    // be read.
    let write = array.submit(0, 9, BLOCK);
    array.sim.wait(write).expect("written");
    assert_eq!(array.sim.status().set_aside, [(VolumeOffset(CHUNK as u64), BLOCK as u64)]);
    array.sim.sleep(30_000);
    array.sim.settle();
    assert_eq!(array.sim.status().set_aside, []);
    array.verify();
}

#[test]
fn what_every_member_shows_to_be_wrong_is_set_aside_at_once() {
    let mut array = Checked::filled(shape(2, 1, ChecksumKind::Blake3), 4);
    let at = array.first_block().start;
    array.disk(0).flip(at, 1);
    array.disk(1).flip(at, 1);
    let write = array.submit(0, 5, BLOCK);
    let begun = array.sim.now();
    array.sim.wait(write).expect("written");
    assert!(array.sim.now().0 - begun.0 < SECOND, "waiting would show nothing new");
    assert_eq!(array.sim.read(CHUNK as u64, BLOCK), Err(ClientError::Io));
    // The right bytes are put back.
    array.disk(1).flip(at, 1);
    array.assert_undamaged();
}

/// Why the second block of the first row cannot be read from its own member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NotOnItsMember {
    /// The member has left, and missed a write of the block.
    Missed,
    /// The same, and the daemon was started again since.
    MissedBeforeTheStart,
    /// The member returns it wrong.
    Rotten,
    /// The member's device is new, and the block is not built yet.
    NotBuilt,
    /// It can be read there once the member is back: it has left, but has missed nothing.
    OnIt,
}

#[test]
fn a_write_does_not_lose_what_only_others_can_give_once_their_errors_are_over() {
    use NotOnItsMember::*;
    for why in [Missed, MissedBeforeTheStart, Rotten, NotBuilt, OnIt] {
        let mut array = Checked::filled(shape(2, 1, ChecksumKind::Blake3), 4);
        let (at, member) = (array.first_block(), MemberIndex(1));
        if why == Rotten {
            array.disk(1).flip(at.start, 1);
        } else {
            array.sim.admin(AdminRequest::Offline { member }).expect("one is spare");
            array.sim.settle();
        }
        if matches!(why, Missed | MissedBeforeTheStart) {
            let write = array.submit(CHUNK, 7, BLOCK);
            array.sim.wait(write).expect("written");
            array.sim.settle();
        }
        if why == MissedBeforeTheStart {
            array = array.restart();
            array.sim.settle();
        }
        for other in [0, 2] {
            array.fail_reads(other..other + 1, Trouble::Medium, at.clone(), 60);
        }
        if why == NotBuilt {
            let device = array.sim.add_blank_disk();
            array.sim.admin(AdminRequest::Replace { member, device }).expect("it is built");
        }
        let write = array.sim.submit_write(0, &[5; BLOCK], false);
        let result = array.sim.wait(write);
        assert_eq!(result.is_ok(), why == OnIt, "{why:?}: {result:?}, {:?}", array.sim.notices);
        if why == OnIt {
            array.model[..BLOCK].fill(5);
        }
        array.sim.sleep(70_000);
        array.sim.settle();
        if why != OnIt {
            array.verify();
        }
        if matches!(why, Missed | MissedBeforeTheStart | OnIt) {
            let left = array.sim.disk_out_of_use(1).expect("its disk");
            let device = array.sim.reopen_disk(left);
            array.sim.admin(AdminRequest::Online { member, device }).expect("it comes back");
            array.sim.sleep(70_000);
            array.sim.settle();
        }
        array.assert_undamaged();
    }
}

/// An array of which the data blocks of the first row are wrong, and clients have met the errors.
fn beyond_repair(parity: u16) -> Checked {
    let mut array = Checked::filled(shape(2, parity, ChecksumKind::Blake3), 4);
    let at = array.first_block().start;
    for member in 0..=parity {
        array.disk(member).flip(at, 1);
    }
    for column in [0, CHUNK] {
        assert_eq!(array.sim.read(column as u64, BLOCK), Err(ClientError::Io));
    }
    array
}

/// Asserts that the second block of the first row is beyond repair, and nothing else.
#[track_caller]
fn assert_second_is_lost(array: &Checked) {
    let status = array.sim.status();
    let lost = vec![(VolumeOffset(CHUNK as u64), BLOCK as u64)];
    assert_eq!((status.lost, status.set_aside, status.unreadable), (lost, vec![], vec![]));
}

#[test]
fn blocks_beyond_repair_stay_so_when_their_neighbours_are_written() {
    for parity in [1, 2] {
        let mut array = beyond_repair(parity);
        let write = array.submit(0, 5, BLOCK);
        array.sim.wait(write).expect("written");
        assert_second_is_lost(&array);
        assert_eq!(array.sim.read(CHUNK as u64, BLOCK), Err(ClientError::Io));
        assert_second_is_lost(&array);
        array.sim.sleep(30_000);
        let said = repair(&mut array);
        assert!(said.contains("0 blocks are readable again, 0 are still set aside"), "{said}");
        assert!(said.contains("0 cannot be read for now, 1 are beyond repair"), "{said}");
        array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
        array.sim.settle();
        assert_second_is_lost(&array);
        for told in [true, false] {
            array = array.restart();
            if told {
                let second = [(VolumeOffset(CHUNK as u64), BLOCK as u64)];
                array.sim.expect_damage(&second, true);
                let status = array.sim.status();
                assert_eq!((&status.lost[..], &status.unconfirmed_lost[..]), (&[][..], &second[..]));
                array.sim.settle();
                assert_eq!(array.sim.status().unconfirmed_lost, []);
            } else {
                assert_eq!(array.sim.read(CHUNK as u64, BLOCK), Err(ClientError::Io));
            }
            assert_second_is_lost(&array);
            let said = repair(&mut array);
            assert!(said.contains("0 are still set aside"), "{said}");
            assert!(said.contains("1 are beyond repair"), "{said}");
            assert_second_is_lost(&array);
        }
        let write = array.submit(CHUNK, 6, BLOCK);
        array.sim.wait(write).expect("written");
        array.assert_undamaged();
    }
}

#[test]
fn what_is_known_to_be_beyond_repair_is_not_called_unreadable_because_a_member_is_out() {
    let mut array = beyond_repair(2);
    let lost = array.sim.status().lost;
    assert_eq!(lost.len(), 2);
    offline(&mut array, 3);
    for _ in 0..3 {
        assert_eq!(array.sim.read(0, BLOCK), Err(ClientError::Io));
        assert_eq!((array.sim.status().lost, array.sim.status().unreadable), (lost.clone(), vec![]));
        array.sim.sleep(10_000);
        array.sim.settle();
    }
    let device = array.sim.add_blank_disk();
    array.sim.admin(AdminRequest::Replace { member: MemberIndex(3), device }).expect("it begins");
    array.sim.settle();
    array.sim.sleep(10_000);
    array.sim.settle();
    assert_eq!((array.sim.status().lost, array.sim.status().unreadable), (lost, vec![]));
    let told = array.sim.status().members[3].counters.checksum_errors;
    assert_eq!(told, 0, "a device that was built without what is lost gives nothing wrong");
}

#[test]
fn a_rebuild_that_meets_rows_beyond_repair_lists_their_data() {
    // No client has read these rows: members 0 and 1 hold their data, 2 and 3 their parity.
    let mut array = Checked::filled(shape(2, 2, ChecksumKind::Blake3), 4);
    let at = array.first_block().start;
    (0..3).for_each(|member| array.disk(member).flip(at, 1));
    offline(&mut array, 3);
    let device = array.sim.add_blank_disk();
    array.sim.admin(AdminRequest::Replace { member: MemberIndex(3), device }).expect("it begins");
    array.sim.settle();
    let lost = [0, CHUNK].map(|at| (VolumeOffset(at as u64), BLOCK as u64));
    assert_eq!(array.sim.status().lost, lost);
    for (at, _) in lost {
        assert_eq!(array.sim.read(at.0, BLOCK), Err(ClientError::Io));
    }
    assert_eq!(array.sim.status().lost, lost);
    // Only one data block can be neither read nor decoded: its member is away, and so are those that could
    // decode it.
    let mut array = Checked::filled(shape(2, 2, ChecksumKind::Blake3), 4);
    array.disk(0).flip(at, 1);
    offline(&mut array, 2);
    offline(&mut array, 3);
    let device = array.sim.add_blank_disk();
    array.sim.admin(AdminRequest::Replace { member: MemberIndex(3), device }).expect("it begins");
    array.sim.settle();
    let status = array.sim.status();
    assert_eq!((status.lost, status.unreadable), (vec![], vec![(VolumeOffset(0), BLOCK as u64)]));
}

/// The report of an earlier run may be out of date: the block was written again just before that run was
/// killed.
#[test]
fn what_cannot_be_looked_at_is_not_asserted_because_an_earlier_run_did() {
    let array = Checked::filled(shape(2, 1, ChecksumKind::Blake3), 4);
    let stale = [(VolumeOffset(0), BLOCK as u64)];
    let Checked { sim, model } = array;
    let mut array = Checked { sim: sim.kill_and_restart(false).expect("it starts"), model };
    array.sim.settle();
    offline(&mut array, 1);
    array.break_first_block(0);
    array.sim.expect_damage(&stale, true);
    array.sim.expect_damage(&stale, false);
    for _ in 0..10 {
        let status = array.sim.status();
        assert_eq!((status.lost, status.unconfirmed_lost), (vec![], stale.to_vec()));
        array.sim.sleep(500);
        array.sim.settle();
    }
    array.sim.admin(AdminRequest::Repair).expect("it looks");
    array.sim.settle();
    let ended = array.sim.notices.iter().rfind(|notice| notice.kind == NoticeKind::RepairEnded);
    let told = &ended.expect("it has ended").text;
    assert!(told.contains("2 cannot be read for now, 0 are beyond repair"), "{told}");
    array.disk(0).bad_blocks.clear();
    array.sim.sleep(30_000);
    array.sim.settle();
    let status = array.sim.status();
    assert_eq!((status.lost, status.unconfirmed_lost, status.unreadable), (vec![], vec![], vec![]));
}

#[test]
fn what_an_earlier_run_knew_to_be_beyond_repair_is_asserted_when_it_was_seen_and_until_it_can_be_read() {
    let array = beyond_repair(1);
    let at = array.first_block().start;
    let lost = array.sim.status().lost;
    let Checked { sim, model } = array;
    let mut array = Checked { sim: sim.kill_and_restart(false).expect("it starts"), model };
    array.sim.expect_damage(&lost, true);
    array.sim.expect_damage(&lost, false);
    let mut was_confirmed = false;
    for _ in 0..100 {
        let status = array.sim.status();
        let mut told = [status.lost.clone(), status.unconfirmed_lost.clone()].concat();
        told.sort();
        assert_eq!((&told, status.unreadable, status.unconfirmed), (&lost, vec![], vec![]));
        assert!(status.unconfirmed_lost.is_empty() || !was_confirmed, "once it was seen it is known");
        was_confirmed |= status.unconfirmed_lost.is_empty();
        if !array.sim.step() {
            array.sim.sleep(10);
        }
    }
    assert!(was_confirmed, "{:?}", array.sim.status());
    array.disk(0).flip(at, 1);
    array.disk(1).flip(at, 1);
    array.sim.sleep(10_000);
    array.sim.settle();
    array.assert_undamaged();
}

#[test]
fn a_write_of_a_block_that_is_set_aside_makes_it_whole() {
    let (mut array, _) = beyond_the_budget(ChecksumKind::Crc32c);
    let write = array.submit(CHUNK, 7, BLOCK);
    array.sim.wait(write).expect("written");
    assert_eq!(array.sim.write(512, &[1; 512]), Err(ClientError::Io), "a part of it is not enough");
    let write = array.submit(0, 8, BLOCK);
    array.sim.wait(write).expect("written");
    array.verify();
    assert_eq!(array.sim.status().set_aside, []);
}

#[test]
fn without_checksums_a_write_that_cannot_read_its_row_fails_and_changes_nothing() {
    let mut array = Checked::filled(shape(2, 1, ChecksumKind::None), 5);
    let data = array.sim.data_region();
    array.fail_reads(0..3, Trouble::Medium, data, 15);
    assert_eq!(array.sim.write(0, &[7; BLOCK]), Err(ClientError::Io));
    array.sim.sleep(6000);
    array.assert_undamaged();
}

#[test]
fn a_shortage_of_the_host_sets_nothing_aside() {
    for (seconds, fails) in [(15, false), (45, true)] {
        let mut array = Checked::filled(shape(2, 1, ChecksumKind::Blake3), 6);
        let data = array.sim.data_region();
        array.fail_reads(0..3, Trouble::Shortage, data, seconds);
        let written = array.sim.write(0, &[7; BLOCK]);
        assert_eq!(written, if fails { Err(ClientError::Io) } else { Ok(()) });
        if !fails {
            array.model[..BLOCK].fill(7);
        }
        array.sim.sleep(20_000);
        array.assert_undamaged();
    }
}

#[test]
fn a_stop_waits_for_no_member_to_become_readable() {
    let mut array = Checked::filled(shape(2, 1, ChecksumKind::Blake3), 7);
    let data = array.sim.data_region();
    array.fail_reads(0..3, Trouble::Medium, data, 8);
    let write = array.sim.submit_write(0, &[7; BLOCK], false);
    while array.sim.step() {}
    let begun = array.sim.now();
    array.sim.admin(AdminRequest::Stop).expect("stopped");
    let took = array.sim.now().0 - begun.0;
    assert!(took < 5 * SECOND, "{took} ns {:?} {:?}", array.sim.poll(write), array.sim.notices);
    assert_eq!(array.sim.poll(write).map(|end| end.map(|_| ())), Some(Err(ClientError::Io)));
}

#[test]
fn a_rebuild_whose_sources_cannot_be_read_for_a_while_builds_what_it_can_and_harms_nothing() {
    for seconds in [2, 20] {
        let mut array = Checked::filled(shape(2, 1, ChecksumKind::Blake3), 8);
        offline(&mut array, 0);
        let first = array.first_block();
        array.fail_reads(1..2, Trouble::Medium, first, seconds);
        let device = array.sim.add_blank_disk();
        array.sim.admin(AdminRequest::Replace { member: MemberIndex(0), device }).expect("replaced");
        array.sim.settle();
        assert!(array.sim.status().members.iter().all(|member| member.state == MemberState::Online));
        array.sim.sleep(21_000);
        array.verify();
        array.sim.settle();
        array.assert_undamaged();
    }
}

/// The row can be read neither from the old device nor from others for longer than the rebuild waits at one
/// place.
#[test]
fn a_member_is_not_replaced_while_the_old_device_may_hold_the_only_copy_of_a_block() {
    let mut array = Checked::filled(shape(2, 1, ChecksumKind::Blake3), 9);
    let first = array.first_block();
    array.fail_reads(0..2, Trouble::Medium, first, 9);
    let device = array.sim.add_blank_disk();
    array.sim.admin(AdminRequest::Replace { member: MemberIndex(1), device }).expect("it begins");
    whole_without_the_old_device(array);
}

/// Member 1 is replaced within a minute, and then member 0 can be lost.
fn whole_without_the_old_device(mut array: Checked) {
    while array.sim.status().members[1].replacement.is_some() {
        if !array.sim.step() {
            array.sim.sleep(100);
        }
        assert!(array.sim.now().0 < 60 * SECOND, "it ends");
    }
    offline(&mut array, 0);
    array.sim.sleep(10_000);
    array.verify();
}

/// The same, but the array is stopped and started again while that slot is not being tried.
#[test]
fn what_a_new_device_lacks_is_not_forgotten_by_a_restart() {
    let mut array = Checked::filled(shape(2, 1, ChecksumKind::Blake3), 9);
    let first = array.first_block();
    array.fail_reads(0..2, Trouble::Medium, first, 9);
    let device = array.sim.add_blank_disk();
    array.sim.admin(AdminRequest::Replace { member: MemberIndex(1), device }).expect("it begins");
    while array.sim.now().0 < 11 * SECOND / 2 {
        if !array.sim.step() {
            array.sim.sleep(100);
        }
    }
    assert!(array.sim.status().members[1].replacement.is_some(), "it is not complete");
    whole_without_the_old_device(array.restart());
}

/// The same, as the status tells it.
#[test]
fn a_rebuild_that_tries_slots_again_never_goes_back_and_says_so() {
    let mut array = Checked::filled(shape(2, 1, ChecksumKind::Blake3), 9);
    let first = array.first_block();
    array.fail_reads(0..2, Trouble::Medium, first, 9);
    let device = array.sim.add_blank_disk();
    array.sim.admin(AdminRequest::Replace { member: MemberIndex(1), device }).expect("it begins");
    let (mut done, mut retried) = (0, 0);
    let (mut met, mut told) = (None, None);
    while let Some(rebuild) = array.sim.status().activities.into_iter().next() {
        assert!(rebuild.done_bytes >= done, "{rebuild:?} after {done} bytes");
        if rebuild.retried > 0 {
            assert!(rebuild.done_bytes < rebuild.total_bytes, "{rebuild:?}");
        } else {
            assert!(retried == 0 || rebuild.done_bytes == rebuild.total_bytes, "{rebuild:?}");
        }
        (done, retried) = (rebuild.done_bytes, rebuild.retried.max(retried));
        let now = array.sim.now();
        if array.sim.status().members[..2].iter().all(|member| member.counters.read_errors > 0) {
            met.get_or_insert(now);
        }
        if rebuild.retried > 0 {
            told.get_or_insert(now);
        }
        if !array.sim.step() {
            array.sim.sleep(10);
        }
    }
    assert_eq!(retried, 1, "one slot could not be built at first");
    let (met, told) = (met.expect("errors"), told.expect("told"));
    assert!(told.nanos_since(met) < SECOND / 2, "{met:?}, {told:?}: before it is given up for now");
}

/// Blocks that can never be read do not keep a member from being replaced for ever.
#[test]
fn a_member_is_replaced_though_a_block_cannot_be_read() {
    let mut array = Checked::filled(shape(2, 1, ChecksumKind::Blake3), 9);
    array.break_first_block(0);
    array.break_first_block(1);
    let device = array.sim.add_blank_disk();
    array.sim.admin(AdminRequest::Replace { member: MemberIndex(1), device }).expect("it begins");
    array.sim.settle();
    assert!(array.sim.status().members[1].replacement.is_none());
    let said = array.sim.notices.iter().filter(|notice| notice.text.contains("goes without")).count();
    assert_eq!(said, 1, "{:?}", array.sim.notices);
}

// ---- calpe repair and calpe clear ----

/// The array's last notice of a repair.
fn repair(array: &mut Checked) -> String {
    array.sim.settle();
    array.sim.admin(AdminRequest::Repair).expect("it begins");
    array.sim.settle();
    let said = array.sim.notices.iter().rev().find(|notice| notice.text.contains("repair"));
    said.expect("it says how it ended").text.clone()
}

#[test]
fn a_repair_finds_what_was_set_aside_before_a_restart_and_says_what_is_left() {
    let (mut array, away) = beyond_the_budget(ChecksumKind::Blake3);
    let write = array.submit(CHUNK, 7, BLOCK);
    array.sim.wait(write).expect("written");
    let mut array = array.restart();
    assert_eq!(array.sim.status().set_aside, [], "no read has met it yet");
    let said = repair(&mut array);
    assert!(said.contains("0 blocks are readable again, 1 are still set aside"), "{said}");
    assert_eq!(array.sim.status().set_aside, [(VolumeOffset(0), BLOCK as u64)]);
    array.online(0, away);
    let said = repair(&mut array);
    assert!(said.contains("0 are still set aside"), "{said}");
    array.assert_undamaged();
}

#[test]
fn a_repair_counts_each_block_once_whichever_list_has_it() {
    let (mut array, _) = beyond_the_budget(ChecksumKind::Blake3);
    let write = array.submit(CHUNK, 7, BLOCK);
    array.sim.wait(write).expect("written");
    assert_eq!(array.sim.status().set_aside, [(VolumeOffset(0), BLOCK as u64)]);
    let said = repair(&mut array);
    assert!(said.contains("0 blocks are readable again, 1 are still set aside"), "{said}");
}

#[test]
fn a_repair_counts_blocks_of_the_volume() {
    let mut array = beyond_repair(2);
    array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    array.sim.settle();
    let outcome = array.sim.admin(AdminRequest::Repair).expect("it begins").0;
    assert!(outcome.contains("2 blocks"), "{outcome}");
    array.sim.settle();
    let said = array.sim.notices.iter().rev().find(|notice| notice.text.contains("repair is complete"));
    let said = &said.expect("it ended").text;
    assert!(said.contains("2 are beyond repair"), "{said}");
}

#[test]
fn a_repair_that_knows_less_than_the_last_scrub_says_so() {
    let mut array = beyond_repair(1);
    array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    array.sim.settle();
    // Nothing tells the next start where the blocks are.
    let mut array = array.restart();
    let said = repair(&mut array);
    assert!(said.contains("The last scrub found"), "{said}");
}

#[test]
fn a_repair_tells_what_is_lost_from_what_cannot_be_read_for_now() {
    let mut array = Checked::filled(shape(2, 1, ChecksumKind::Blake3), 10);
    let at = array.first_block().start;
    array.disk(0).flip(at, 1);
    array.disk(1).flip(at, 1);
    assert_eq!(array.sim.read(0, BLOCK), Err(ClientError::Io));
    let data = array.sim.data_region();
    let second = data.start + BLOCK as u64..data.start + 2 * BLOCK as u64;
    array.fail_reads(0..3, Trouble::Medium, second, 30);
    assert_eq!(array.sim.read(BLOCK as u64, BLOCK), Err(ClientError::Io));
    assert!(repair(&mut array).contains("2 cannot be read for now, 2 are beyond repair"));
    array.sim.sleep(30_000);
    assert!(repair(&mut array).contains("0 cannot be read for now, 2 are beyond repair"));
    let lost = vec![(VolumeOffset(0), BLOCK as u64), (VolumeOffset(CHUNK as u64), BLOCK as u64)];
    assert_eq!(array.sim.status().lost, lost);
    array.sim.admin(AdminRequest::Clear { member: None }).expect("cleared");
    let status = array.sim.status();
    assert_eq!(
        (status.client_errors, status.lost),
        (0, lost),
        "what is lost is not made whole by not counting it"
    );
    assert!(status.members.iter().all(|member| member.counters.checksum_errors == 0));
    assert_eq!(array.sim.read(0, BLOCK), Err(ClientError::Io));
}

// ---- Each rule is needed ----

/// Block 0 is unreadable for good; the parity cannot be read for a moment, while the block at `CHUNK` is
/// written.
fn write_beside_a_bad_sector() -> Checked {
    let mut array = Checked::filled(shape(2, 2, ChecksumKind::Blake3), 9);
    offline(&mut array, 3);
    array.break_first_block(0);
    let first = array.first_block();
    array.fail_reads(2..3, Trouble::Medium, first, 1);
    let write = array.submit(CHUNK, 7, BLOCK);
    array.sim.wait(write).expect("written");
    array
}

#[test]
fn a_row_that_can_soon_be_read_is_waited_for() {
    write_beside_a_bad_sector().verify();
    let broken = Mutation::NoPatience.with(|| {
        let mut array = write_beside_a_bad_sector();
        array.sim.read(0, BLOCK).is_err()
    });
    assert!(broken, "nothing notices a write without patience");
}

#[test]
fn a_block_that_is_called_lost_without_evidence_is_noticed() {
    let broken = Mutation::LostWithoutEvidence.with(|| {
        let (mut array, away) = beyond_the_budget(ChecksumKind::Blake3);
        let write = array.submit(CHUNK, 7, BLOCK);
        array.sim.wait(write).expect("written");
        array.online(0, away);
        array.sim.read(0, BLOCK).is_err()
    });
    assert!(broken, "nothing notices a loss without evidence");
}

#[test]
fn a_rebuild_that_writes_what_it_lacks_is_noticed() {
    let broken = Mutation::RebuildWritesWhatItLacks.with(|| {
        let (mut array, away) = beyond_the_budget(ChecksumKind::Blake3);
        let write = array.submit(CHUNK, 7, BLOCK);
        array.sim.wait(write).expect("written");
        array.online(0, away);
        array.sim.read(0, BLOCK).is_err()
    });
    assert!(broken, "nothing notices a rebuild that writes what it lacks");
}
