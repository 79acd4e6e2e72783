//! Members that were rolled back to an older state of themselves (rule T6): scenes that panic when old data
//! is read, or an honest member is taken for a rolled-back one. Shared by `tests/sim/rollback.rs`, where no
//! scene may panic, and `tests/sim/mutations.rs`, where a scene must panic with a rule broken.

use calpe_core::array::assembly::AssemblyError;
use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{DiskCopy, DiskRegion, Random, SimArray, SimDisk, SimShape};
use calpe_core::units::MemberIndex;
use calpe_core::volume::{AdminRequest, ArrayNotice, ArrayState, ClientRequest, LogState};

pub(crate) const BLOCK: usize = 4096;
pub(crate) const CHUNK: usize = 4 * BLOCK;

/// An array and the expected content of its volume.
pub(crate) struct Checked {
    pub sim: SimArray,
    pub model: Vec<u8>,
}

impl Checked {
    /// A clean array of eight stripes full of random bytes, with a small log that soon wraps round.
    pub(crate) fn filled(data: u16, parity: u16, checksum: ChecksumKind, seed: u64) -> Checked {
        Self::with_log(data, parity, checksum, seed, 256 << 10)
    }

    /// The same with `log` bytes of log.
    pub(crate) fn with_log(data: u16, parity: u16, checksum: ChecksumKind, seed: u64, log: u64) -> Checked {
        let shape = SimShape::new(data, parity, CHUNK as u32, 8).logged(checksum, log);
        let mut model = vec![0; shape.volume_bytes as usize];
        Random::new(seed ^ 0xf111).fill(&mut model);
        let mut sim = SimArray::create(shape, seed);
        sim.write(0, &model).expect("written");
        sim.settle();
        Checked { sim, model }
    }

    /// Writes blocks at random places and makes all of them durable in the end.
    pub(crate) fn load(&mut self, writes: u64, random: &mut Random) {
        for _ in 0..writes {
            let blocks = 1 + random.below(9) as usize;
            let at = random.below((self.model.len() / BLOCK - blocks) as u64) as usize * BLOCK;
            let mut bytes = vec![0; blocks * BLOCK];
            random.fill(&mut bytes);
            self.sim.write(at as u64, &bytes).expect("written");
            self.model[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        let flush = self.sim.submit(ClientRequest::Flush);
        self.sim.wait(flush).expect("flushed");
    }

    /// Lets the note of the last flush become durable (W2).
    pub(crate) fn note(&mut self) {
        for _ in 0..3 {
            while self.sim.step() {}
            self.sim.sleep(100);
        }
    }

    pub(crate) fn copy(&self, id: u32) -> DiskCopy {
        self.sim.disks[&id].copy(false)
    }

    /// Executes this many operations, or fewer if no more are queued.
    pub(crate) fn step(&mut self, operations: u64) {
        for _ in 0..operations {
            self.sim.step();
        }
    }

    /// Kills the disk of a member, has the array notice it by a write to block 0, and executes this many
    /// operations of what follows.
    pub(crate) fn begin_to_lose(&mut self, id: u32, operations: u64) {
        disk(&mut self.sim, id).dead = true;
        self.sim.submit_write(0, &[7; BLOCK], true);
        self.model[..BLOCK].fill(7);
        self.step(operations);
    }

    /// Takes a member out, and lets everything settle.
    pub(crate) fn offline(&mut self, member: u16) {
        self.take_out(member);
        self.sim.settle();
    }

    /// Takes a member out at once, writing only the superblocks that this takes.
    pub(crate) fn take_out(&mut self, member: u16) {
        self.sim.admin(AdminRequest::Fail { member: MemberIndex(member) }).expect("it can be spared");
    }

    /// Kills the process with nothing in flight, rolls these disks back to their copies and starts again.
    pub(crate) fn restart_with(
        self,
        copies: &[(u32, &DiskCopy)],
        force: bool,
    ) -> Result<Checked, AssemblyError> {
        let Checked { mut sim, model } = self;
        copies.iter().for_each(|(id, copy)| disk(&mut sim, *id).restore(copy));
        let sim = sim.kill_where(force, |_, _| false)?;
        Ok(Checked { sim, model })
    }

    /// Asserts that no block reads wrong. Returns how many cannot be read.
    #[track_caller]
    pub(crate) fn count_errors(&mut self) -> usize {
        let mut errors = 0;
        for block in 0..self.model.len() / BLOCK {
            match self.sim.read((block * BLOCK) as u64, BLOCK) {
                Ok(bytes) => {
                    let right = bytes == self.model[block * BLOCK..][..BLOCK];
                    assert!(right, "block {block} reads what is not its: {:?}", self.sim.notices);
                }
                Err(_) => errors += 1,
            }
        }
        errors
    }

    #[track_caller]
    pub(crate) fn verify(&mut self) {
        let read = self.sim.read(0, self.model.len()).expect("every byte can be read");
        let differing = (0..read.len() / BLOCK)
            .filter(|block| read[block * BLOCK..][..BLOCK] != self.model[block * BLOCK..][..BLOCK])
            .count();
        assert_eq!(differing, 0, "blocks read what is not theirs: {:?}", self.sim.notices);
    }
}

pub(crate) fn disk(sim: &mut SimArray, id: u32) -> &mut SimDisk {
    sim.disks.get_mut(&id).expect("a disk")
}

pub(crate) fn states(sim: &SimArray) -> Vec<MemberState> {
    sim.status().members.iter().map(|m| m.state).collect()
}

/// Slots of an array in which a device is built.
pub(crate) const SLOTS_BUILT: u64 = 300;

/// A full array of 2+2 with a new device for member 1, of which superblocks say that it is built in part; and
/// the id of the device.
pub(crate) fn half_built(checksum: ChecksumKind) -> (Checked, u32) {
    let shape = SimShape::new(2, 2, CHUNK as u32, SLOTS_BUILT).logged(checksum, 256 << 10);
    let mut model = vec![0; shape.volume_bytes as usize];
    Random::new(0xb111d).fill(&mut model);
    let mut sim = SimArray::create(shape, 5);
    for at in (0..model.len()).step_by(64 * CHUNK) {
        let end = model.len().min(at + 64 * CHUNK);
        sim.write(at as u64, &model[at..end]).expect("written");
    }
    sim.settle();
    let mut array = Checked { sim, model };
    array.offline(1);
    let new = array.sim.add_blank_disk();
    let id = new.device.0;
    let pace = |array: &mut Checked, rate| {
        array.sim.admin(AdminRequest::Pace { rebuild_min: rate, rebuild_max: rate }).expect("it may be set");
    };
    pace(&mut array, 1 << 20);
    array.sim.admin(AdminRequest::Replace { member: MemberIndex(1), device: new }).expect("it begins");
    // Progress is recorded now and then.
    while recorded(&array, id) == 0 {
        array.note();
    }
    pace(&mut array, 1);
    array.load(10, &mut Random::new(10));
    array.note();
    assert!((50..250).contains(&recorded(&array, id)) && states(&array.sim)[1] == MemberState::Rebuilding);
    (array, id)
}

/// How many slots of the device of member 1 are built, by its superblock.
pub(crate) fn recorded(array: &Checked, id: u32) -> u64 {
    array.sim.disks[&id].recorded_progress(1).unwrap_or(0)
}

/// Its superblock says how far the device was built, before it was rolled back as after: only its blocks show
/// that it lacks writes.
pub(crate) fn a_device_that_is_built_and_was_rolled_back_over_a_kill_is_whole_when_it_joins() {
    for checksum in [ChecksumKind::Blake3, ChecksumKind::Crc32c, ChecksumKind::None] {
        roll_back_what_is_built(checksum);
    }
}

fn roll_back_what_is_built(checksum: ChecksumKind) {
    let (mut array, id) = half_built(checksum);
    let rebuilt = recorded(&array, id);
    let copy = array.copy(id);
    array.load(200, &mut Random::new(11));
    array.note();
    assert_eq!(recorded(&array, id), rebuilt, "the same superblock");
    let mut array = array.restart_with(&[(id, &copy)], false).expect("three of four members are enough");
    array.sim.settle();
    assert_eq!(array.sim.status().state, ArrayState::Online);
    array.sim.assert_scrub_clean();
    array.verify();
    if checksum != ChecksumKind::None {
        let told = |notice: &ArrayNotice| notice.text.contains("all that it held before the stop");
        assert_eq!(array.sim.notices.iter().filter(|notice| told(notice)).count(), 1);
    }
}

/// The last update of a clean stop did not reach the device, whose superblock before that counts slots as
/// built that were not compared.
pub(crate) fn slots_not_compared_before_a_stop_are_not_believed() {
    let (mut array, id) = half_built(ChecksumKind::Blake3);
    let copy = array.copy(id);
    array.load(200, &mut Random::new(11));
    array.note();
    let mut array = array.restart_with(&[(id, &copy)], false).expect("three of four members are enough");
    let rebuilt = recorded(&array, id);
    let stop = array.sim.submit_admin(AdminRequest::Stop);
    let mut before = None;
    while array.sim.poll_admin(stop).is_none() {
        if !array.sim.disks[&id].says_clean() && recorded(&array, id) == rebuilt {
            before = Some(array.copy(id));
        }
        if !array.sim.step() {
            array.sim.sleep(100);
        }
    }
    assert!(array.sim.disks[&id].says_clean() && recorded(&array, id) < rebuilt);
    let before = before.expect("it was not clean at first");
    let mut array = array.restart_with(&[(id, &before)], false).expect("three of four members are enough");
    array.sim.settle();
    assert_eq!(array.sim.status().state, ArrayState::Online);
    array.sim.assert_scrub_clean();
    array.verify();
}

/// Shapes of arrays: data, parity and kind of checksum.
pub(crate) fn shapes() -> impl Iterator<Item = (u16, u16, ChecksumKind)> {
    let kinds = [ChecksumKind::Blake3, ChecksumKind::None, ChecksumKind::Crc32c];
    kinds.into_iter().flat_map(|kind| [(2, 1, kind), (2, 2, kind), (3, 2, kind)])
}

/// The number of seeds: `seeds`, unless CALPE_ROLLBACK_SEEDS says otherwise.
pub(crate) fn trial(seeds: u64) -> u64 {
    std::env::var("CALPE_ROLLBACK_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(seeds)
}

/// All members but one are rolled back, and the array is started from them: the data of that one is nowhere
/// else.
pub(crate) fn the_member_that_is_newer_than_what_is_served_is_not_built_over() {
    for (at, (data, parity, checksum)) in shapes().enumerate() {
        for (is_clean, is_away) in [(true, false), (false, false), (true, true), (false, true)] {
            newer_than_what_is_served(at as u64, (data, parity, checksum), is_clean, is_away);
        }
    }
}

/// `is_clean`: the array is stopped cleanly between the two sets of copies, and idle when it is killed.
/// `is_away`: the newer member is absent when the array is started from the copies.
fn newer_than_what_is_served(seed: u64, shape: (u16, u16, ChecksumKind), is_clean: bool, is_away: bool) {
    let (data, parity, checksum) = shape;
    let what = format!("{data}+{parity} {checksum} clean {is_clean} away {is_away}");
    let random = &mut Random::new(seed);
    let copies = |array: &Checked| -> Vec<(u32, DiskCopy)> {
        (1..u32::from(data + parity)).map(|id| (id, array.copy(id))).collect()
    };
    let restart = |array: Checked| {
        let Checked { mut sim, model } = array;
        sim = match is_clean {
            true => sim.stop_and_restart(false),
            false => sim.kill_where(false, |_, _| false),
        }
        .expect("enough members are there");
        Checked { sim, model }
    };
    let mut array = Checked::filled(data, parity, checksum, seed);
    array.load(20, random);
    array.sim.settle();
    let (old, older) = (copies(&array), array.model.clone());
    array = restart(array);
    array.load(20, random);
    if is_clean {
        array.sim.settle();
    }
    // The process is killed with nothing in flight that the copies of the newer state would lack.
    let (newer, newest) = (copies(&array), array.model.clone());
    let Checked { mut sim, .. } = array;
    old.iter().for_each(|(id, copy)| disk(&mut sim, *id).restore(copy));
    disk(&mut sim, 0).dead = is_away;
    let sim = sim.kill_where(true, |_, _| false).unwrap_or_else(|error| panic!("{what}: {error}"));
    let mut array = Checked { sim, model: older };
    let refuses = |array: &mut Checked| {
        let device = array.sim.reopen_disk(0);
        let done = array.sim.admin(AdminRequest::Online { member: MemberIndex(0), device });
        let error = done.expect_err(&what).to_string();
        assert!(
            error.contains("newer than the array") && error.contains("replace --force"),
            "{what}: {error}"
        );
    };
    // Also before an update of the superblocks has recorded that the array goes on without the member.
    refuses(&mut array);
    array.sim.settle();
    array.verify();
    assert_eq!(states(&array.sim)[0], MemberState::Missing, "{what}");
    let theirs = array.sim.disk_out_of_use(0).and_then(|id| array.sim.disks.remove(&id)).expect("a disk");
    array.sim.disks.insert(0, theirs);
    refuses(&mut array);
    // However much the array has written since.
    let theirs = array.sim.disk_out_of_use(0).and_then(|id| array.sim.disks.remove(&id)).expect("a disk");
    for _ in 0..3 {
        array.load(5, random);
        array.sim.settle();
        array = restart(array);
    }
    array.sim.disks.insert(0, theirs);
    refuses(&mut array);
    array.verify();
    let theirs = array.sim.disk_out_of_use(0).and_then(|id| array.sim.disks.remove(&id)).expect("a disk");
    array.sim.disks.insert(0, theirs);
    // With the newest state of the others, all data is there.
    let newer: Vec<(u32, &DiskCopy)> = newer.iter().map(|(id, copy)| (*id, copy)).collect();
    let mut array = array.restart_with(&newer, false).expect("all are current");
    array.model = newest;
    array.sim.settle();
    array.verify();
}

/// How the life ends in which pages of the stripe map are written for the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Stop,
    KillAtRest,
    /// By a kill, after constant load: the array is never marked clean.
    KillUnderLoad,
}

/// One member is absent, and the other copies of a page of the stripe map were overwritten so that they look
/// as if they were never written.
pub(crate) fn pages_of_the_map_that_look_unwritten_and_were_written_are_missed() {
    for (at, (data, parity, checksum)) in shapes().enumerate() {
        for garbage in [0x00, 0x77] {
            for end in [End::Stop, End::KillAtRest, End::KillUnderLoad] {
                missed_map_pages((data, parity, checksum), garbage, end, at as u64);
            }
        }
    }
}

fn missed_map_pages(shape: (u16, u16, ChecksumKind), garbage: u8, end: End, seed: u64) {
    let (data, parity, checksum) = shape;
    let what = format!("{data}+{parity} {checksum} garbage {garbage} {end:?}");
    let mut array = match end {
        End::KillUnderLoad => {
            let shape = SimShape::new(data, parity, CHUNK as u32, 8).logged(checksum, 256 << 10);
            let model = vec![0; shape.volume_bytes as usize];
            let mut array = Checked { sim: SimArray::create(shape, seed), model };
            let random = &mut Random::new(seed);
            for _ in 0..100 {
                array.load(1, random);
                array.sim.sleep(100);
            }
            array
        }
        End::Stop | End::KillAtRest => Checked::filled(data, parity, checksum, seed),
    };
    if end == End::Stop {
        // Nothing happens before the next kill.
        array.sim = array.sim.stop_and_restart(false).expect("all members");
    }
    // The first page has its copies on members 0 to m.
    disk(&mut array.sim, 0).dead = true;
    for id in 1..=u32::from(parity) {
        let disk = disk(&mut array.sim, id);
        let start = DiskRegion::Pages.ranges(disk)[0].start;
        disk.poke(start, &[garbage; 2 * BLOCK]);
    }
    let Checked { sim, model } = array;
    let mut sim = sim.kill_where(false, |_, _| false).expect("enough members");
    sim.settle();
    assert_eq!(sim.status().state, ArrayState::Failed, "{what}");
    let LogState::Refused(why) = sim.status().log else { panic!("{what}: {:?}", sim.status().log) };
    assert!(why.contains("look on all members that are here as if they never were"), "{what}: {why}");

    // With the missing member back, all data is there, since nothing was written meanwhile.
    disk(&mut sim, 0).dead = false;
    let mut array = Checked { sim: sim.kill_where(false, |_, _| false).expect("all members"), model };
    array.sim.settle();
    assert_eq!(array.sim.status().state, ArrayState::Online, "{what}");
    array.verify();
}

pub(crate) fn a_member_as_it_was_one_start_earlier_is_rebuilt_and_never_read() {
    for (at, (data, parity, checksum)) in shapes().enumerate() {
        for clean in [false, true] {
            let random = &mut Random::new(at as u64);
            let mut array = Checked::filled(data, parity, checksum, at as u64);
            array.load(20, random);
            let copy = array.copy(1);
            if clean {
                array.sim.settle();
            }
            array = array.restart_with(&[], false).expect("all is there");
            array.load(20, random);
            array = array.restart_with(&[(1, &copy)], false).expect("one member may be missing");
            assert_eq!(states(&array.sim)[1], MemberState::Missing, "{data}+{parity} clean {clean}");
            array.verify();
            // With one more out of service there is no copy left that could be wrong.
            if parity > 1 {
                array.offline(0);
                array.verify();
            }
            let device = array.sim.reopen_disk(1);
            let done = array.sim.admin(AdminRequest::Online { member: MemberIndex(1), device }).unwrap();
            assert!(done.0.contains("being rebuilt"), "{done:?}");
            array.sim.settle();
            assert_eq!(states(&array.sim)[1], MemberState::Online);
            array.offline(data + parity - 1);
            array.verify();
        }
    }
}

pub(crate) fn a_member_as_it_was_while_the_array_ran_counts_as_one_fault_and_no_more() {
    let (mut left_out, mut healed) = (0, 0);
    for (at, (data, parity, checksum)) in shapes().enumerate() {
        for seed in 0..trial(24) {
            let random = &mut Random::new(1000 * at as u64 + seed);
            let log = [256 << 10, 4 << 20][seed as usize % 2];
            let mut array = Checked::with_log(data, parity, checksum, seed, log);
            array.load(random.below(12), random);
            let copy = array.copy(1);
            array.load(1 + random.below(40), random);
            // Another member leaves; one more fault would leave too few.
            let others_out = random.below(u64::from(parity)) as u16;
            (0..others_out).for_each(|out| array.take_out(data + out));
            array.load(random.below(20), random);
            let when = format!("{data}+{parity} {checksum:?} seed {seed}, {others_out} out");
            array = match array.restart_with(&[(1, &copy)], false) {
                Ok(array) => array,
                // Without that member the others may be no majority.
                Err(error) if 2 * (data + parity - others_out - 1) <= data + parity => {
                    assert!(error.to_string().contains("member 1"), "{when}: {error}");
                    continue;
                }
                Err(error) => panic!("{when}: {error}"),
            };
            array.sim.settle();
            if matches!(array.sim.status().log, LogState::Refused(_)) {
                assert!(2 * (data + parity - others_out - 1) <= data + parity, "{when}");
                continue;
            }
            array.verify();
            match states(&array.sim)[1] {
                MemberState::Online => healed += 1,
                _ => left_out += 1,
            }
            // The data redone on the member is there without the others, too.
            if states(&array.sim)[1] == MemberState::Online && others_out < parity {
                array.offline(0);
                array.verify();
            }
        }
    }
    assert!(left_out > 20 && healed > 20, "{left_out} left out, {healed} healed");
}

/// Beyond the budget: errors, or a start that is refused. Until a note covers a flushed batch, a member
/// without that batch looks as after a crash that cut it off (W2): then old data may be read, and the array
/// says that it has dropped batches.
pub(crate) fn a_rolled_back_member_and_as_many_others_out_as_there_is_parity_read_nothing_old_without_a_word()
{
    let (mut refused, mut told, mut errors, mut whole) = (0, 0, 0, 0);
    for (at, (data, parity, checksum)) in shapes().enumerate() {
        for seed in 0..trial(16) {
            let random = &mut Random::new(7000 * at as u64 + seed);
            let log = [256 << 10, 4 << 20][seed as usize % 2];
            let mut array = Checked::with_log(data, parity, checksum, seed, log);
            array.load(random.below(12), random);
            let copy = array.copy(0);
            array.load(1 + random.below(40), random);
            (0..parity).for_each(|out| array.take_out(data + out));
            let last = random.below(20);
            array.load(last, random);
            match array.restart_with(&[(0, &copy)], false) {
                Err(_) => refused += 1,
                Ok(mut array) => {
                    array.sim.settle();
                    if let LogState::Refused(why) = &array.sim.status().log {
                        let tells = last == 0 || why.contains("rolled back");
                        assert!(tells, "member 0 lacks an epoch in which batches were written: {why}");
                    }
                    let has_told = |notice: &ArrayNotice| notice.text.contains("dropped: too few members");
                    if array.sim.notices.iter().any(has_told) {
                        assert_eq!(last, 0, "batches of an epoch that member 0 does not hold are dropped");
                        told += 1;
                        continue;
                    }
                    match array.count_errors() {
                        0 => whole += 1,
                        _ => errors += 1,
                    }
                }
            }
        }
    }
    println!("{refused} refused, {told} told that batches were dropped, {errors} with errors, {whole} whole");
    assert!(errors > 0 && refused > 0 && told < errors);
}

/// The copy may be of any moment: before the others leave, between two departures, or after. A note covers
/// all flushed batches.
pub(crate) fn whenever_the_copy_was_taken_with_too_many_out_nothing_old_is_read() {
    let (mut refused, mut errors, mut whole) = (0, 0, 0);
    for (at, (data, parity, checksum)) in shapes().enumerate() {
        for seed in 0..trial(16) {
            let random = &mut Random::new(9000 * at as u64 + seed);
            let log = [256 << 10, 4 << 20][seed as usize % 2];
            let mut array = Checked::with_log(data, parity, checksum, seed, log);
            array.load(random.below(12), random);
            let moment = random.below(u64::from(parity) + 1);
            let mut copy = None;
            for out in 0..=u64::from(parity) {
                if out == moment {
                    array.load(random.below(12), random);
                    copy = Some(array.copy(0));
                    array.load(random.below(40), random);
                }
                if out < u64::from(parity) {
                    array.take_out(data + out as u16);
                }
            }
            array.load(1 + random.below(20), random);
            array.note();
            match array.restart_with(&[(0, copy.as_ref().expect("it was taken"))], false) {
                Err(_) => refused += 1,
                Ok(mut array) => {
                    array.sim.settle();
                    match array.count_errors() {
                        0 => whole += 1,
                        _ => errors += 1,
                    }
                }
            }
        }
    }
    println!("{refused} refused, {errors} with errors, {whole} whole");
    assert!(errors > 0);
}

/// Honest members that an update of the superblocks did not reach, because the process was killed, are in
/// service at the next start.
pub(crate) fn members_that_an_update_did_not_reach_are_not_old() {
    for steps in 0..60 {
        let random = &mut Random::new(steps);
        let mut array = Checked::filled(2, 2, ChecksumKind::Crc32c, steps);
        array.load(3, random);
        array.sim.submit_admin(AdminRequest::Fail { member: MemberIndex(3) });
        for _ in 0..steps {
            array.sim.step();
        }
        array.sim = array.sim.kill_where(false, |_, _| random.one_in(2)).expect("all is there");
        array.sim.settle();
        assert_eq!(states(&array.sim)[..3], [MemberState::Online; 3], "killed after {steps} steps");
        array.verify();
    }
}

/// A replay that is killed leaves nothing that the next one takes for done before it is.
pub(crate) fn a_replay_over_a_rolled_back_member_that_is_cut_off_is_done_again() {
    for seed in 0..trial(60) {
        let random = &mut Random::new(400 + seed);
        let kind = [ChecksumKind::Blake3, ChecksumKind::None][seed as usize % 2];
        let log = [256 << 10, 512 << 10, 1 << 20][seed as usize % 3];
        let mut array = Checked::with_log(2, 1, kind, seed, log);
        array.load(random.below(20), random);
        let copy = array.copy(1);
        array.load(1 + random.below(20), random);
        array = array.restart_with(&[(1, &copy)], false).expect("one member may be missing");
        for _ in 0..random.below(200) {
            array.sim.step();
        }
        array = array.restart_with(&[], false).expect("one member may be missing");
        array.sim.settle();
        array.verify();
        if states(&array.sim)[1] == MemberState::Online {
            array.offline(0);
            array.verify();
        }
    }
}

/// A member that left, and was rolled back before it returns, gets everything that it lacks. When a member
/// leaves, no superblock records yet which blocks were put in place last. The member is caught up if it comes
/// back as it was; a copy from before the blocks went in place gets them again.
pub(crate) fn a_member_that_leaves_before_it_is_told_what_is_in_place_is_caught_up() {
    for (seed, checksum) in (0..trial(12))
        .flat_map(|seed| [ChecksumKind::Blake3, ChecksumKind::None].map(|checksum| (seed, checksum)))
    {
        for from_copy in [false, true] {
            let random = &mut Random::new(900 + seed);
            let mut array = Checked::with_log(2, 1, checksum, seed, 256 << 10);
            array.load(1 + random.below(12), random);
            let copy = array.copy(1);
            // Long enough for a checkpoint, but not for an idle array to be marked clean.
            for _ in 0..1 + random.below(8) {
                while array.sim.step() {}
                array.sim.sleep(100);
            }
            array.take_out(1);
            match random.one_in(2) {
                true => array.sim.settle(),
                // The daemon is killed in between, perhaps before the departure is recorded; then the member
                // is in service again.
                false => {
                    for _ in 0..random.below(40) {
                        array.sim.step();
                    }
                    array = array.restart_with(&[], false).expect("two of three members are enough");
                    array.sim.settle();
                    if states(&array.sim)[1] == MemberState::Online {
                        continue;
                    }
                }
            }
            array.load(random.below(3), random);
            array.sim.settle();
            if from_copy {
                disk(&mut array.sim, 1).restore(&copy);
            }
            let device = array.sim.reopen_disk(1);
            array.sim.admin(AdminRequest::Online { member: MemberIndex(1), device }).expect("it returns");
            array.sim.settle();
            let is_whole = |notice: &&ArrayNotice| notice.text.contains("not only caught up");
            let told: Vec<&ArrayNotice> = array.sim.notices.iter().filter(is_whole).collect();
            assert!(from_copy || told.is_empty(), "seed {seed}, {checksum}: {told:?}");
            assert_eq!(states(&array.sim)[1], MemberState::Online);
            array.offline(0);
            array.verify();
        }
    }
}

pub(crate) fn a_member_rolled_back_while_it_is_out_returns_whole() {
    for seed in 0..trial(24) {
        let random = &mut Random::new(700 + seed);
        let mut array = Checked::with_log(2, 1, ChecksumKind::Blake3, seed, 256 << 10);
        array.load(random.below(12), random);
        let copy = array.copy(1);
        array.load(1 + random.below(60), random);
        array.offline(1);
        array.load(random.below(12), random);
        array.sim.settle();
        disk(&mut array.sim, 1).restore(&copy);
        let device = array.sim.reopen_disk(1);
        array.sim.admin(AdminRequest::Online { member: MemberIndex(1), device }).expect("it returns");
        array.sim.settle();
        assert_eq!(states(&array.sim)[1], MemberState::Online);
        array.offline(0);
        array.verify();
    }
}
