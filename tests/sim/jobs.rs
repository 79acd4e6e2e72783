//! Bulk work of logged arrays done as jobs: verifying, decoding and coding as a job gives the same results as
//! inline, and no result is trusted earlier. Each test is named after the property that it checks.

use crate::scenes::page_faults::{Scene, shape};
use calpe_core::codec::{CodecJob, Form};
use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{Random, SimArray, SimShape};
use calpe_core::units::MemberIndex;
use calpe_core::volume::{AdminRequest, ArrayState, ClientError, Work};

const BLOCK: usize = 4096;
const CHUNK: usize = 16384;
const RING: u64 = 1 << 20;
const STRIPES: usize = 6;
/// More than any fetch has, so that nothing becomes a job.
const NO_JOBS: usize = usize::MAX;

const K: usize = 5;
const M: usize = 2;

/// An array and the expected content of its volume.
struct Checked {
    sim: SimArray,
    model: Vec<u8>,
}

impl Checked {
    /// A clean array of 5+2 full of random bytes; stripe and slot have the same number.
    fn filled(checksum: ChecksumKind, job_bytes: usize, seed: u64) -> Checked {
        let shape = SimShape::new(K as u16, M as u16, CHUNK as u32, STRIPES as u64).logged(checksum, RING);
        Checked::filled_as(SimShape { job_bytes: Some(job_bytes), ..shape }, seed)
    }

    /// The same without free slots: every write of a part of a stripe goes through the log.
    fn filled_up(checksum: ChecksumKind, job_bytes: usize, seed: u64) -> Checked {
        let shape = SimShape::new(K as u16, M as u16, CHUNK as u32, STRIPES as u64).logged(checksum, RING);
        Checked::filled_as(SimShape { job_bytes: Some(job_bytes), free_slots: Some(0), ..shape }, seed)
    }

    fn filled_as(shape: SimShape, seed: u64) -> Checked {
        let mut model = vec![0; shape.volume_bytes as usize];
        Random::new(seed ^ 0xf111).fill(&mut model);
        let mut sim = SimArray::create(shape, seed);
        sim.write(0, &model).expect("written");
        sim.settle();
        Checked { sim, model }
    }

    fn byte_of(stripe: usize, column: usize, row: usize) -> usize {
        (stripe * K + column) * CHUNK + row * BLOCK
    }

    /// The offset of a slot's row on every disk.
    fn place(&self, slot: usize, row: usize) -> u64 {
        self.sim.data_region().start + (slot * CHUNK + row * BLOCK) as u64
    }

    /// The member that holds a data column of a stripe that has never moved.
    fn member_of(&self, stripe: usize, column: usize) -> u16 {
        let at = Self::byte_of(stripe, column, 0);
        let wanted = &self.model[at..at + BLOCK];
        let holds = |member: &u16| {
            let disk = self.sim.disk_of(*member).expect("in service");
            self.sim.disks[&disk].peek(self.place(stripe, 0), BLOCK) == wanted
        };
        (0..(K + M) as u16).find(holds).expect("some member has the column")
    }

    /// Members that have no data of a stripe.
    fn parity_members(&self, stripe: usize) -> Vec<u16> {
        let data: Vec<u16> = (0..K).map(|column| self.member_of(stripe, column)).collect();
        (0..(K + M) as u16).filter(|member| !data.contains(member)).collect()
    }

    /// Inverts one bit of a block on a member's disk.
    fn damage(&mut self, member: u16, slot: usize, row: usize) {
        let disk = self.sim.disk_of(member).expect("in service");
        let place = self.place(slot, row) + 77;
        self.sim.disks.get_mut(&disk).expect("it exists").flip(place, 4);
    }

    fn fail(&mut self, member: u16) {
        self.sim.admin(AdminRequest::Fail { member: MemberIndex(member) }).expect("a member can be failed");
    }

    fn replace(&mut self, member: u16) {
        let device = self.sim.add_blank_disk();
        // Does not wait for the answer, which comes once the superblocks record the replacement.
        let request = self.sim.submit_admin(AdminRequest::Replace { member: MemberIndex(member), device });
        assert!(!matches!(self.sim.poll_admin(request), Some(Err(_))), "admitted");
    }

    fn wrong(&self) -> Vec<u64> {
        self.sim.status().members.iter().map(|member| member.counters.checksum_errors).collect()
    }

    /// Executes everything that is possible without any job being done.
    fn run_without_jobs(&mut self) {
        self.sim.holds_jobs = true;
        while self.sim.step() {}
    }

    fn let_jobs_go(&mut self) {
        self.sim.holds_jobs = false;
    }

    fn work(&self) -> Vec<&CodecJob> {
        self.sim.jobs().iter().map(|job| &job.work).map(|Work::Code(work)| work).collect()
    }

    #[track_caller]
    fn verify(&mut self) {
        let read = self.sim.read(0, self.model.len()).expect("every byte can be read");
        if let Some(at) = (0..read.len()).find(|&at| read[at] != self.model[at]) {
            panic!("byte {at} differs; {:?}", self.sim.notices);
        }
    }

    #[track_caller]
    fn assert_whole(&mut self) {
        self.sim.settle();
        assert_eq!(self.sim.status().state, ArrayState::Online, "{:?}", self.sim.notices);
        self.verify();
        self.sim.assert_scrub_clean();
        // The rebuilt members must serve without the others.
        for lost in [[0u16, 1], [2, 3], [4, 5], [6, 0]] {
            lost.iter().for_each(|member| self.fail(*member));
            self.verify();
            lost.iter().for_each(|member| self.replace(*member));
            self.sim.settle();
        }
    }
}

fn only_one(counts: &[u64], member: u16, count: u64) {
    for (at, wrong) in counts.iter().enumerate() {
        assert_eq!(*wrong, if at == usize::from(member) { count } else { 0 }, "member {at}: {counts:?}");
    }
}

// ---- Reads ----

#[test]
fn reads_in_bulk_are_verified_as_one_job_and_small_ones_at_once() {
    let mut array = Checked::filled(ChecksumKind::Blake3, 2 * CHUNK, 1);
    let id = array.sim.submit_read(0, 2 * CHUNK);
    array.run_without_jobs();
    assert!(array.sim.poll(id).is_none(), "nothing unverified is answered");
    let work = array.work();
    assert_eq!((work.len(), work[0].input_bytes()), (1, 2 * CHUNK));
    assert!(work[0].transform.is_none() && work[0].hasher.is_some());
    array.let_jobs_go();
    array.sim.wait(id).expect("read");
    let id = array.sim.submit_read(CHUNK as u64 / 2, CHUNK);
    array.run_without_jobs();
    assert!(array.work().is_empty() && array.sim.poll(id).is_some_and(|result| result.is_ok()));
}

#[test]
fn what_nobody_has_is_read_hashed_and_decoded_in_one_round() {
    let mut array = Checked::filled(ChecksumKind::Blake3, BLOCK, 2);
    let (first, second) = (array.member_of(2, 1), array.member_of(2, 3));
    array.fail(first);
    array.fail(second);
    let (at, len) = (Checked::byte_of(2, 0, 0), K * CHUNK);
    let id = array.sim.submit_read(at as u64, len);
    array.run_without_jobs();
    let work = array.work();
    assert_eq!(work.len(), 1);
    let form = work[0].transform.as_ref().map(|transform| transform.form().clone());
    assert_eq!(form, Some(Form::Recover { present: vec![0, 2, 4, 5, 6], wanted: vec![1, 3] }));
    assert_eq!(work[0].inputs.len(), K);
    array.let_jobs_go();
    array.sim.wait(id).expect("read");
    array.verify();
    assert_eq!(array.wrong(), [0; K + M]);
}

#[test]
fn reads_are_the_same_with_jobs_and_without_whatever_is_lost_or_damaged() {
    for checksum in [ChecksumKind::Blake3, ChecksumKind::Crc32c, ChecksumKind::None] {
        for job_bytes in [BLOCK, 3 * BLOCK, 2 * CHUNK, NO_JOBS] {
            for lost in [vec![], vec![0u16], vec![1, 4], vec![3, 5]] {
                let mut array = Checked::filled(checksum, job_bytes, 3);
                let mut random = Random::new(3);
                lost.iter().for_each(|member| array.fail(*member));
                if lost.len() < M && checksum != ChecksumKind::None {
                    (0..STRIPES).for_each(|slot| array.damage(2, slot, random.below(4) as usize));
                }
                // Partial writes leave blocks in the overlay, so some parts of a fetch are already known.
                for _ in 0..6 {
                    let start = random.below((array.model.len() - 9000) as u64) as usize / 512 * 512;
                    let bytes = vec![random.below(256) as u8; 512 * (1 + random.below(16) as usize)];
                    array.sim.write(start as u64, &bytes).expect("written");
                    array.model[start..start + bytes.len()].copy_from_slice(&bytes);
                }
                for _ in 0..30 {
                    let start = random.below(array.model.len() as u64 / 512) as usize * 512;
                    let len = (512 * (1 + random.below(300) as usize)).min(array.model.len() - start);
                    let read = array.sim.read(start as u64, len).expect("read");
                    assert!(
                        read == array.model[start..start + len],
                        "{checksum}, jobs from {job_bytes}, {lost:?} lost: {len} bytes at {start}"
                    );
                }
                array.verify();
            }
        }
    }
}

#[test]
fn a_bad_block_in_a_job_is_counted_against_its_member_decoded_and_rewritten() {
    for checksum in [ChecksumKind::Blake3, ChecksumKind::Crc32c] {
        let mut array = Checked::filled(checksum, BLOCK, 4);
        let member = array.member_of(1, 2);
        array.damage(member, 1, 3);
        array.verify();
        only_one(&array.wrong(), member, 1);
        array.sim.settle();
        assert_eq!(array.sim.status().members[usize::from(member)].counters.repaired, 1);
        array.assert_whole();
    }
}

#[test]
fn a_block_decoded_from_a_bad_source_is_not_believed() {
    for checksum in [ChecksumKind::Blake3, ChecksumKind::Crc32c] {
        let mut array = Checked::filled(checksum, BLOCK, 5);
        let (lost, liar) = (array.member_of(3, 0), array.member_of(3, 1));
        array.fail(lost);
        array.damage(liar, 3, 2);
        let (at, len) = (Checked::byte_of(3, 0, 0), K * CHUNK);
        let id = array.sim.submit_read(at as u64, len);
        array.run_without_jobs();
        assert_eq!(array.work().len(), 1);
        array.let_jobs_go();
        array.sim.wait(id).expect("the second parity helps");
        array.sim.settle();
        array.verify();
        only_one(&array.wrong(), liar, 1);
        array.replace(lost);
        array.assert_whole();
    }
}

#[test]
fn with_all_redundancy_gone_a_bad_block_costs_its_row_and_nothing_else() {
    let mut array = Checked::filled(ChecksumKind::Blake3, BLOCK, 6);
    let (lost, liar) = (array.member_of(0, 0), array.member_of(0, 1));
    let parity = array.parity_members(0)[0];
    array.fail(lost);
    array.fail(parity);
    array.damage(liar, 0, 1);
    assert_eq!(array.sim.read(0, K * CHUNK).err(), Some(ClientError::Io));
    for column in 0..K {
        for row in 0..CHUNK / BLOCK {
            let at = Checked::byte_of(0, column, row);
            let read = array.sim.read(at as u64, BLOCK);
            if row == 1 && column <= 1 {
                assert_eq!(read.err(), Some(ClientError::Io), "column {column}, row {row}");
            } else {
                assert!(
                    read.expect("it can be had") == array.model[at..at + BLOCK],
                    "column {column}, row {row}"
                );
            }
        }
    }
    assert_eq!(array.sim.status().lost, [], "the members that are away may have it");
    // Devices that are built now get every block that can be read.
    array.replace(lost);
    array.replace(parity);
    array.sim.settle();
    assert_eq!(array.sim.status().state, ArrayState::Online, "{:?}", array.sim.notices);
    // Once those members are gone for good, the array checks again and knows that the blocks are lost.
    array.sim.sleep(11_000);
    array.sim.settle();
    let gone: Vec<(u64, u64)> = array.sim.status().lost.iter().map(|(at, bytes)| (at.0, *bytes)).collect();
    assert_eq!(gone, [(Checked::byte_of(0, 0, 1) as u64, 4096), (Checked::byte_of(0, 1, 1) as u64, 4096)]);
    // Once written again, the blocks are whole.
    for column in [0, 1] {
        let at = Checked::byte_of(0, column, 1);
        array.sim.write(at as u64, &[9; BLOCK]).expect("written");
        array.model[at..at + BLOCK].fill(9);
    }
    array.assert_whole();
}

#[test]
fn blocks_that_cannot_be_read_beside_such_as_are_wrong_are_had_from_others() {
    let mut array = Checked::filled(ChecksumKind::Blake3, BLOCK, 7);
    let (silent, liar) = (array.member_of(4, 0), array.member_of(4, 3));
    let disk = array.sim.disk_of(silent).expect("in service");
    let block = array.place(4, 2) / BLOCK as u64;
    array.sim.disks.get_mut(&disk).expect("it exists").bad_blocks = [block].into();
    array.damage(liar, 4, 2);
    array.verify();
    only_one(&array.wrong(), liar, 1);
    assert!(array.sim.status().members[usize::from(silent)].counters.read_errors > 0);
    array.assert_whole();
}

// ---- Rebuild and scrub ----

#[test]
fn a_rebuild_decodes_what_it_writes_in_the_job_that_verifies_its_sources() {
    for checksum in [ChecksumKind::Blake3, ChecksumKind::Crc32c] {
        let mut array = Checked::filled(checksum, BLOCK, 8);
        array.fail(3);
        array.replace(3);
        array.run_without_jobs();
        let work = array.work();
        assert_eq!(work.len(), STRIPES);
        for job in work {
            let form = job.transform.as_ref().map(|transform| transform.form());
            assert!(matches!(form, Some(Form::Recover { wanted, .. }) if wanted.len() == 1), "{job:?}");
            assert_eq!(job.inputs.len(), K);
        }
        array.let_jobs_go();
        array.assert_whole();
    }
}

#[test]
fn a_bad_source_of_a_rebuild_is_found_before_anything_is_built_from_it() {
    for checksum in [ChecksumKind::Blake3, ChecksumKind::Crc32c] {
        let mut array = Checked::filled(checksum, BLOCK, 9);
        array.fail(6);
        for slot in 0..STRIPES {
            array.damage((slot % 6) as u16, slot, slot % 4);
        }
        array.replace(6);
        array.sim.settle();
        assert_eq!(array.sim.status().state, ArrayState::Online, "{:?}", array.sim.notices);
        // One of six columns is read only if the others need it.
        assert!(array.wrong().iter().sum::<u64>() >= STRIPES as u64 - 2, "{:?}", array.wrong());
        array.verify();
        array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
        array.sim.settle();
        assert_eq!(array.wrong().iter().sum::<u64>(), STRIPES as u64);
        array.assert_whole();
    }
}

#[test]
fn members_may_be_lost_and_return_while_the_jobs_of_a_rebuild_are_out() {
    for (checksum, gone) in [
        (ChecksumKind::Blake3, 0u16),
        (ChecksumKind::Blake3, 1),
        (ChecksumKind::Crc32c, 2),
        (ChecksumKind::Crc32c, 4),
    ] {
        let mut array = Checked::filled(checksum, BLOCK, 10);
        array.fail(4);
        array.replace(4);
        array.run_without_jobs();
        assert_eq!(array.work().len(), STRIPES);
        // A source of the rebuild, or the device that is being built.
        array.sim.submit_admin(AdminRequest::Fail { member: MemberIndex(gone) });
        while array.sim.step() {}
        assert_eq!(array.work().len(), STRIPES, "nothing ends without its job");
        array.let_jobs_go();
        array.sim.settle();
        array.verify();
        array.replace(gone);
        array.assert_whole();
    }
}

#[test]
fn an_array_may_fail_and_be_stopped_while_jobs_are_out_and_waits_for_them() {
    for is_read in [true, false] {
        let mut array = Checked::filled(ChecksumKind::Blake3, BLOCK, 11);
        let read = is_read.then(|| array.sim.submit_read(0, K * CHUNK));
        if !is_read {
            array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
        }
        array.run_without_jobs();
        assert!(!array.work().is_empty());
        array.sim.disks.values_mut().take(M + 1).for_each(|disk| disk.dead = true);
        // Writes to all members reveal that some are gone.
        array.sim.submit_admin(AdminRequest::Fail { member: MemberIndex(6) });
        while array.sim.step() {}
        array.sim.sleep(1000);
        assert_eq!(array.sim.status().state, ArrayState::Failed);
        let stop = array.sim.submit_admin(AdminRequest::Stop);
        for _ in 0..50 {
            while array.sim.step() {}
            array.sim.sleep(100);
        }
        assert!(array.sim.poll_admin(stop).is_none(), "a stop waits for what is out");
        array.let_jobs_go();
        for _ in 0..50 {
            while array.sim.step() {}
            array.sim.sleep(100);
        }
        assert!(array.sim.poll_admin(stop).is_some_and(|result| result.is_ok()), "the stop ends");
        if let Some(read) = read {
            assert_eq!(array.sim.poll(read).map(|result| result.err()), Some(Some(ClientError::Io)));
        }
        assert_eq!(array.sim.in_flight(), 0);
    }
}

#[test]
fn a_stop_waits_for_the_jobs_of_a_scrub_and_of_a_read() {
    let mut array = Checked::filled(ChecksumKind::Blake3, BLOCK, 12);
    array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    array.run_without_jobs();
    assert!(!array.work().is_empty());
    let stop = array.sim.submit_admin(AdminRequest::Stop);
    for _ in 0..50 {
        while array.sim.step() {}
        array.sim.sleep(100);
    }
    assert!(array.sim.poll_admin(stop).is_none());
    array.let_jobs_go();
    for _ in 0..50 {
        while array.sim.step() {}
        array.sim.sleep(100);
    }
    assert!(array.sim.poll_admin(stop).is_some_and(|result| result.is_ok()));
    assert_eq!(array.sim.in_flight(), 0);
}

#[test]
fn a_scrub_with_proving_hashes_encodes_in_the_job_that_verifies_and_others_compare() {
    for (checksum, encodes) in [(ChecksumKind::Blake3, true), (ChecksumKind::Crc32c, false)] {
        let mut array = Checked::filled(checksum, BLOCK, 13);
        array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
        array.run_without_jobs();
        let work = array.work();
        assert_eq!(work.len(), STRIPES);
        for job in work {
            assert_eq!(job.inputs.len(), K + M);
            let form = job.transform.as_ref().map(|transform| transform.form().clone());
            assert_eq!(form, encodes.then_some(Form::Encode));
        }
        array.let_jobs_go();
        array.sim.settle();
        let scrub = array.sim.status().last_scrub.expect("it has ended");
        assert_eq!((scrub.errors, scrub.repaired), (0, 0), "{:?}", array.sim.notices);
    }
}

#[test]
fn a_scrub_repairs_what_its_jobs_find_wrong() {
    for checksum in [ChecksumKind::Blake3, ChecksumKind::Crc32c] {
        let mut array = Checked::filled(checksum, BLOCK, 14);
        for slot in 0..STRIPES {
            array.damage((slot % 6) as u16, slot, slot % 4);
            array.damage(((slot + 1) % 6) as u16, slot, (slot / 2) % 4);
        }
        array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
        array.sim.settle();
        let scrub = array.sim.status().last_scrub.expect("it has ended");
        assert_eq!((scrub.errors, scrub.repaired), (12, 12), "{:?}", array.sim.notices);
        array.assert_whole();
    }
}

/// Only a broken rule produces parity that matches its checksum but not its data.
#[cfg(debug_assertions)]
#[test]
fn a_scrub_finds_parity_that_matches_its_checksum_and_not_its_data() {
    use calpe_core::testing::Mutation;
    for checksum in [ChecksumKind::Blake3, ChecksumKind::Crc32c] {
        for job_bytes in [BLOCK, NO_JOBS] {
            let mut array = Checked::filled(checksum, job_bytes, 15);
            let liar = array.parity_members(2)[1];
            array.damage(liar, 2, 1);
            let at = Checked::byte_of(2, 1, 1);
            Mutation::OldParityNotVerified.with(|| {
                array.sim.write(at as u64, &[7; BLOCK]).expect("written");
                array.sim.settle();
            });
            array.model[at..at + BLOCK].fill(7);
            array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
            array.sim.settle();
            let scrub = array.sim.status().last_scrub.expect("it has ended");
            let told =
                array.sim.notices.iter().any(|notice| notice.text.contains("parity does not match data"));
            assert!(
                scrub.errors == 1 && scrub.repaired == 0 && told,
                "{checksum}, jobs from {job_bytes}: {scrub:?}, {:?}",
                array.sim.notices
            );
            array.verify();
        }
    }
}

#[test]
fn jobs_that_are_out_at_a_crash_are_forgotten_with_it() {
    for seed in 20..26 {
        let mut array = Checked::filled(ChecksumKind::Blake3, BLOCK, seed);
        array.fail((seed % 6) as u16);
        array.replace((seed % 6) as u16);
        array.sim.submit_read(0, K * CHUNK);
        array.run_without_jobs();
        assert!(!array.work().is_empty());
        array.sim = array.sim.power_cut_and_restart(false).expect("it starts");
        array.sim.settle();
        assert!(array.sim.status().members.iter().all(|member| member.state == MemberState::Online));
        array.assert_whole();
    }
}

// ---- New parity ----

impl Checked {
    fn submit(&mut self, start: usize, bytes: &[u8]) -> u64 {
        self.model[start..start + bytes.len()].copy_from_slice(bytes);
        self.sim.submit_write(start as u64, bytes, false)
    }

    fn forms(&self) -> Vec<Option<Form>> {
        self.work()
            .iter()
            .map(|job| job.transform.as_ref().map(|transform| transform.form().clone()))
            .collect()
    }
}

#[test]
fn a_bulk_write_verifies_what_is_old_in_the_job_that_computes_new_parity() {
    let cases = [
        // Writing one column of five reads old data and parity; writing four reads the fifth; writing all
        // reads nothing.
        (Checked::byte_of(1, 2, 0), CHUNK, Form::Update { columns: vec![2] }, 1 + 1 + M),
        (Checked::byte_of(1, 0, 0), 4 * CHUNK, Form::Encode, K),
        (Checked::byte_of(3, 1, 1), 2 * BLOCK, Form::Update { columns: vec![1] }, 1 + 1 + M),
    ];
    for checksum in [ChecksumKind::Blake3, ChecksumKind::Crc32c] {
        for (start, len, form, inputs) in cases.clone() {
            let mut array = Checked::filled_up(checksum, BLOCK, 30);
            let id = array.submit(start, &vec![0xab; len]);
            array.run_without_jobs();
            assert_eq!(array.forms(), [Some(form)]);
            assert_eq!(array.work()[0].inputs.len(), inputs);
            assert!(array.sim.poll(id).is_none(), "nothing is logged with parity that is not there");
            array.let_jobs_go();
            array.sim.wait(id).expect("written");
            array.verify();
            array.assert_whole();
        }
    }
}

#[test]
fn no_parity_comes_from_old_blocks_that_are_wrong() {
    for checksum in [ChecksumKind::Blake3, ChecksumKind::Crc32c] {
        for victim in 0..K + M {
            let mut array = Checked::filled(checksum, BLOCK, 31);
            let liar =
                if victim < K { array.member_of(2, victim) } else { array.parity_members(2)[victim - K] };
            array.damage(liar, 2, 1);
            let id = array.submit(Checked::byte_of(2, 3, 0), &[0x5a; CHUNK]);
            array.run_without_jobs();
            assert_eq!(array.forms(), [Some(Form::Update { columns: vec![3] })]);
            array.let_jobs_go();
            array.sim.wait(id).expect("written");
            let is_read = victim == 3 || victim >= K;
            assert_eq!(array.wrong().iter().sum::<u64>(), u64::from(is_read), "column {victim}");
            array.verify();
            array.sim.settle();
            array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
            array.sim.settle();
            array.assert_whole();
        }
    }
}

#[test]
fn what_is_lost_before_a_bulk_write_stays_lost_and_nothing_else_is() {
    let mut array = Checked::filled(ChecksumKind::Blake3, BLOCK, 32);
    // Three blocks of a row are wrong: one more than parity can restore.
    for column in [0, 1] {
        let member = array.member_of(4, column);
        array.damage(member, 4, 2);
    }
    let parity = array.parity_members(4)[0];
    array.damage(parity, 4, 2);
    let id = array.submit(Checked::byte_of(4, 1, 0), &[0x77; CHUNK]);
    array.sim.wait(id).expect("what is written is not lost");
    array.sim.settle();
    let gone = Checked::byte_of(4, 0, 2);
    assert_eq!(array.sim.read(gone as u64, BLOCK).err(), Some(ClientError::Io));
    let id = array.submit(gone, &[1; BLOCK]);
    array.sim.wait(id).expect("written");
    array.sim.settle();
    array.verify();
    array.sim.assert_scrub_clean();
}

#[test]
fn writes_leave_the_same_with_jobs_and_without_whatever_is_lost_meanwhile() {
    for checksum in [ChecksumKind::Blake3, ChecksumKind::Crc32c, ChecksumKind::None] {
        for job_bytes in [BLOCK, 3 * CHUNK, NO_JOBS] {
            for seed in 40..46 {
                let mut array = Checked::filled(checksum, job_bytes, seed);
                let mut random = Random::new(seed);
                if seed % 2 == 0 {
                    // Partial writes to stripes that hold nothing yet.
                    let shape = SimShape::new(K as u16, M as u16, CHUNK as u32, STRIPES as u64)
                        .logged(checksum, RING);
                    array.sim = SimArray::create(SimShape { job_bytes: Some(job_bytes), ..shape }, seed);
                    array.model.fill(0);
                }
                let mut pending = Vec::new();
                for round in 0..24 {
                    let slice = array.model.len() / 24;
                    let start = round * slice + random.below(8) as usize * 512;
                    let len = 512 * (1 + random.below((slice / 512 - 8) as u64) as usize);
                    let mut bytes = vec![0; len];
                    random.fill(&mut bytes);
                    pending.push(array.submit(start, &bytes));
                    for _ in 0..random.below(20) {
                        array.sim.step();
                    }
                    if round == 8 || (round == 16 && seed % 3 == 0) {
                        array.sim.submit_admin(AdminRequest::Fail { member: MemberIndex(round as u16 / 8) });
                    }
                }
                for id in pending {
                    array.sim.wait(id).expect("written");
                }
                array.verify();
                array.sim.settle();
                array.replace(1);
                if seed % 3 == 0 {
                    array.replace(2);
                }
                array.assert_whole();
            }
        }
    }
}

#[test]
fn the_position_of_a_scrub_that_is_said_to_be_paused_survives_a_kill() {
    let done = |sim: &SimArray| sim.status().activities.first().map_or(0, |activity| activity.done_bytes);
    for seed in 0..6 {
        let (world, mut sim, model) = Scene::running(shape(2, 1, 400), seed);
        sim.admin(AdminRequest::ScrubStart).expect("it runs");
        while done(&sim) == 0 {
            sim.step();
        }
        sim.admin(AdminRequest::ScrubPause).expect("it rests");
        let before = done(&sim);
        assert!(before > 0 && before < model.len() as u64, "{before}");
        let again = Scene::killed(world, &sim, model).start(false);
        // Slots that were under way may have finished since.
        assert!(done(&again) >= before, "{seed}: {} of {before}", done(&again));
    }
}

/// A dry run of a pause reports the same as the pause, even when the position cannot be recorded.
#[test]
fn a_dry_run_of_a_pause_of_a_failed_array_says_that_it_is_not_recorded() {
    let (_, mut sim, _) = Scene::running(shape(2, 1, 400), 1);
    sim.admin(AdminRequest::ScrubStart).expect("it runs");
    assert_eq!(sim.would(&AdminRequest::ScrubPause).expect("it would").0, "the scrub is paused");
    for member in [0, 1] {
        let disk = sim.disk_of(member).expect("in service");
        sim.disks.get_mut(&disk).expect("a disk").dead = true;
    }
    sim.write(0, &[7; BLOCK]).expect_err("nothing is served");
    assert_eq!(sim.status().state, ArrayState::Failed);
    let would = sim.would(&AdminRequest::ScrubPause).expect("it would").0;
    assert!(would.contains("is lost if the daemon is killed"), "{would}");
    assert_eq!(sim.admin(AdminRequest::ScrubPause).expect("it rests").0, would);
}
