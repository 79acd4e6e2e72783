//! Interleavings that an array must survive: members that die, return, fill up or are replaced at chosen
//! moments, and processes that are killed between two chosen operations. Each test is named after the
//! property that it checks.

use calpe_core::array::assembly::AssemblyError;
use calpe_core::block_io::IoOp;
use calpe_core::format::{
    COPY_BYTES, ChecksumKind, MemberState, Superblock, all_copy_offsets, damaged_copies,
};
use calpe_core::testing::{Random, SimArray, SimShape};
use calpe_core::units::{MemberIndex, VolumeOffset};
use calpe_core::volume::{AdminRequest, ArrayNotice, ArrayState, ClientError, ClientRequest, NoticeLevel};

const CHUNK: usize = 16384;

/// An array and the expected content of its volume.
struct Checked {
    sim: SimArray,
    model: Vec<u8>,
}

fn shape(data: u16, parity: u16, stripes: u64) -> SimShape {
    let volume_bytes = stripes * u64::from(data) * CHUNK as u64;
    let shape = SimShape { volume_bytes, ..SimShape::new(data, parity, CHUNK as u32, 1) };
    shape.logged(ChecksumKind::Crc32c, 64 * 4096)
}

impl Checked {
    /// A clean array full of random bytes.
    fn filled(data: u16, parity: u16, stripes: u64, seed: u64) -> Checked {
        let shape = shape(data, parity, stripes);
        let mut model = vec![0; shape.volume_bytes as usize];
        Random::new(seed ^ 0xf111).fill(&mut model);
        let mut sim = SimArray::create(shape, seed);
        sim.write(0, &model).expect("written");
        sim.settle();
        Checked { sim, model }
    }

    fn write(&mut self, start: usize, bytes: &[u8]) {
        self.sim.write(start as u64, bytes).expect("a write within the budget succeeds");
        self.model[start..start + bytes.len()].copy_from_slice(bytes);
    }

    #[track_caller]
    fn verify(&mut self) {
        let read = self.sim.read(0, self.model.len()).expect("every byte can be read");
        if let Some(at) = (0..read.len()).find(|&at| read[at] != self.model[at]) {
            panic!("byte {at} differs; {:?}", self.sim.notices);
        }
    }

    #[track_caller]
    fn assert_scrub_clean(&mut self) {
        self.sim.assert_scrub_clean();
    }
}

fn fail(sim: &mut SimArray, member: u16) {
    // Does not wait for the answer, which comes once the superblocks record the change.
    let request = sim.submit_admin(AdminRequest::Fail { member: MemberIndex(member) });
    assert!(!matches!(sim.poll_admin(request), Some(Err(_))), "a member can be failed");
}

fn replace(sim: &mut SimArray, member: u16) -> u32 {
    let device = sim.add_blank_disk();
    let id = device.device.0;
    // Does not wait for the answer, which comes once the superblocks record the change.
    let request = sim.submit_admin(AdminRequest::Replace { member: MemberIndex(member), device });
    assert!(!matches!(sim.poll_admin(request), Some(Err(_))), "admitted");
    id
}

fn online(sim: &mut SimArray, member: u16, disk: u32) -> Result<(), String> {
    let device = sim.reopen_disk(disk);
    sim.admin(AdminRequest::Online { member: MemberIndex(member), device }).map(|_| ()).map_err(|e| e.0)
}

fn disk(sim: &mut SimArray, id: u32) -> &mut calpe_core::testing::SimDisk {
    sim.disks.get_mut(&id).expect("a disk")
}

/// The newest superblock of a disk.
fn newest(sim: &SimArray, id: u32) -> Superblock {
    let disk = &sim.disks[&id];
    let copies = all_copy_offsets(disk.bytes()).map(|at| Superblock::decode(&disk.peek(at.0, COPY_BYTES)));
    copies.into_iter().flatten().max_by_key(|copy| copy.sequence).expect("a superblock")
}

fn states(sim: &SimArray) -> Vec<MemberState> {
    sim.status().members.iter().map(|m| m.state).collect()
}

/// Executes everything while half a minute passes, whatever hangs meanwhile.
fn drain(sim: &mut SimArray) {
    for _ in 0..300 {
        while sim.step() {}
        sim.sleep(100);
    }
}

fn in_region(region: &std::ops::Range<u64>, op: &IoOp) -> bool {
    match op {
        IoOp::Read { offset, .. } | IoOp::Write { offset, .. } | IoOp::Zero { offset, .. } => {
            region.contains(&offset.0)
        }
        IoOp::Flush | IoOp::Extents { .. } => false,
    }
}

fn is_write(op: &IoOp) -> bool {
    matches!(op, IoOp::Write { .. } | IoOp::Zero { .. })
}

// ---- Epochs and assembly ----

#[test]
fn two_kills_in_the_first_bump_after_a_start_leave_every_member_current() {
    for (k, m) in [(2u16, 0u16), (2, 1), (4, 2)] {
        let mut array = Checked::filled(k, m, 8, 1);
        let mut sim = array.sim;
        // Twice in a row only the first disk gets the new epoch.
        for round in 0..2 {
            sim = sim.kill_where(false, |_, _| true).expect("the array is whole");
            while sim.step_where(|_, op| matches!(op, IoOp::Flush)) {}
            sim = match sim.kill_where(false, |device, _| device == 0) {
                Ok(sim) => sim,
                Err(error) => panic!("{k}+{m}, round {round}: {error}"),
            };
            assert!(
                states(&sim).iter().all(|s| *s == MemberState::Online),
                "{k}+{m}, round {round}: {:?}",
                states(&sim)
            );
        }
        array = Checked { sim, model: array.model };
        array.verify();
    }
}

#[test]
fn any_number_of_kills_at_random_moments_of_the_start_leave_every_member_current() {
    for seed in 0..60 {
        let (k, m) = [(2u16, 1u16), (3, 2), (2, 0)][seed as usize % 3];
        let array = Checked::filled(k, m, 4, seed);
        let mut random = Random::new(seed);
        let mut sim = array.sim;
        for round in 0..12 {
            for _ in 0..random.below(20) {
                sim.step();
            }
            sim = match sim.kill_and_restart(false) {
                Ok(sim) => sim,
                Err(error) => panic!("{k}+{m}, seed {seed}, round {round}: {error}"),
            };
            assert!(
                states(&sim).iter().all(|s| *s == MemberState::Online),
                "seed {seed}: {:?}",
                states(&sim)
            );
        }
        Checked { sim, model: array.model }.verify();
    }
}

#[test]
fn a_bump_that_a_failed_array_left_unfinished_does_not_cut_the_line_of_epochs() {
    let mut array = Checked::filled(2, 2, 8, 2);
    let sim = &mut array.sim;
    // Member 0 dies; before the epoch without it is written anywhere, 1 and 2 die too.
    disk(sim, 0).dead = true;
    let id = sim.submit_read(0, CHUNK);
    assert!(sim.step_where(|d, _| d == 0));
    disk(sim, 1).dead = true;
    disk(sim, 2).dead = true;
    while sim.step_where(|d, _| d == 1 || d == 2) {}
    drain(sim);
    let _ = sim.poll(id);
    assert_eq!(sim.status().state, ArrayState::Failed);
    // Member 2 comes back; the process is killed when half the members hold the next epoch.
    online(sim, 2, 2).expect("it is current");
    while !sim.queued().any(|(d, op)| d == 3 && is_write(op)) {
        assert!(sim.step(), "the next epoch is written");
    }
    let restarted = array.sim.kill_where(false, |d, op| d == 3 && is_write(op));
    let sim = restarted.unwrap_or_else(|error| panic!("members 2 and 3 have every byte: {error}"));
    Checked { sim, model: array.model }.verify();
}

#[test]
fn a_rebuild_survives_a_kill_in_the_first_bump_after_a_start() {
    let mut array = Checked::filled(3, 2, 400, 3);
    fail(&mut array.sim, 2);
    replace(&mut array.sim, 2);
    for _ in 0..300 {
        array.sim.step();
    }
    let mut sim = array.sim.stop_and_restart(false).expect("clean");
    assert_eq!(states(&sim)[2], MemberState::Rebuilding);
    while sim.step_where(|_, op| matches!(op, IoOp::Flush)) {}
    let mut sim = sim.kill_where(false, |device, _| device == 0).expect("enough members");
    assert_eq!(states(&sim)[2], MemberState::Rebuilding, "{:?}", sim.status().members[2]);
    sim.settle();
    assert_eq!(sim.status().state, ArrayState::Online);
}

#[test]
fn a_replacement_survives_a_kill_in_the_first_bump_after_a_start() {
    let mut array = Checked::filled(3, 2, 400, 4);
    replace(&mut array.sim, 2);
    for _ in 0..300 {
        array.sim.step();
    }
    let mut sim = array.sim.stop_and_restart(false).expect("clean");
    assert!(sim.status().members[2].replacement.is_some());
    while sim.step_where(|_, op| matches!(op, IoOp::Flush)) {}
    let sim = sim.kill_where(false, |device, _| device == 0).expect("enough members");
    assert!(sim.status().members[2].replacement.is_some(), "{:?}", sim.status().members[2]);
}

#[test]
fn a_kill_at_any_moment_around_the_end_of_a_replacement_leaves_a_whole_array() {
    // Counts the operations until the new device serves.
    let mut probe = Checked::filled(2, 1, 6, 5);
    let new = replace(&mut probe.sim, 1);
    let mut total = 0;
    while probe.sim.disk_of(1) != Some(new) {
        assert!(probe.sim.step());
        total += 1;
    }
    let mut failures = Vec::new();
    for n in total - 4..total + 20 {
        for only in 0..5u32 {
            let mut array = Checked::filled(2, 1, 6, 5);
            replace(&mut array.sim, 1);
            for _ in 0..n {
                array.sim.step();
            }
            // Of the operations in flight, only those of one disk happen; 4: none.
            match array.sim.kill_where(false, |device, _| device == only) {
                Ok(sim) => {
                    let states = states(&sim);
                    if states.iter().any(|s| *s != MemberState::Online) {
                        failures.push(format!(
                            "{} after the end, disk {only}: {states:?}",
                            n as i64 - total as i64
                        ));
                    }
                    Checked { sim, model: array.model }.verify();
                }
                Err(error) => {
                    failures.push(format!("{} after the end, disk {only}: {error}", n as i64 - total as i64))
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn a_power_cut_at_any_moment_around_the_end_of_a_rebuild_leaves_no_member_believed_that_lacks_data() {
    for replacing in [false, true] {
        // Dirty, and all data flushed.
        let prepare = |seed| {
            let mut array = Checked::filled(2, 1, 6, seed);
            if !replacing {
                fail(&mut array.sim, 1);
                array.sim.settle();
            }
            array.write(0, &[3; 4096]);
            let id = array.sim.submit(ClientRequest::Flush);
            array.sim.wait(id).expect("flushed");
            let new = replace(&mut array.sim, 1);
            (array, new)
        };
        let (mut probe, new) = prepare(6);
        let mut total = 0;
        while probe.sim.disk_of(1) != Some(new) || probe.sim.status().members[1].state != MemberState::Online
        {
            assert!(probe.sim.step());
            total += 1;
        }
        for n in total - 4..total + 20 {
            for seed in 0..5 {
                let (mut array, _) = prepare(6);
                for _ in 0..n {
                    array.sim.step();
                }
                for _ in 0..seed {
                    array.sim.random().next_u64();
                }
                let sim = array.sim.power_cut_and_restart(false).expect("enough members");
                let mut array = Checked { sim, model: array.model };
                array.verify();
                array.assert_scrub_clean();
            }
        }
    }
}

#[test]
fn an_old_disk_that_was_replaced_does_not_speak_for_the_array() {
    let mut array = Checked::filled(2, 2, 8, 7);
    let bytes = vec![1; 4096];
    array.write(0, &bytes);
    // Dirty when the old disk leaves, clean when the array stops; the old disk stays plugged in.
    replace(&mut array.sim, 1);
    array.sim.settle();
    fail(&mut array.sim, 3);
    array.sim.settle();
    let sim =
        array.sim.stop_and_restart(false).unwrap_or_else(|error| panic!("it was stopped cleanly: {error}"));
    assert!(sim.status().activities.is_empty(), "{:?}", sim.status().activities);
    Checked { sim, model: array.model }.verify();
}

#[test]
fn an_array_with_too_few_current_members_is_refused_even_if_a_replaced_disk_is_there() {
    let mut array = Checked::filled(2, 1, 8, 8);
    let new = replace(&mut array.sim, 1);
    array.sim.settle();
    let gone: Vec<u32> = vec![new, 2];
    for id in gone {
        disk(&mut array.sim, id).dead = true;
    }
    if let Ok(sim) = array.sim.kill_where(false, |_, _| false) {
        panic!("started with one current member of 2+1: {:?}", states(&sim));
    }
}

/// An array with ones in its first block, of which a member has just been replaced: after the exchange, and
/// before any disk records it. Returns the new disk, too.
fn exchanged(data: u16, parity: u16, member: u16, seed: u64) -> (SimArray, u32) {
    let mut sim = SimArray::create(shape(data, parity, 8), seed);
    sim.write(0, &[1; 4096]).expect("written");
    sim.settle();
    let new = replace(&mut sim, member);
    until_exchanged(&mut sim, member, new);
    (sim, new)
}

fn until_exchanged(sim: &mut SimArray, member: u16, new: u32) {
    while sim.disk_of(member) != Some(new) {
        if !sim.step() {
            sim.sleep(100);
        }
    }
}

/// One update records both a complete replacement and the departure of a member: the two devices that are out
/// know of neither, and in 2+1 they are k members and a majority.
#[test]
fn a_replaced_disk_and_a_member_that_left_at_that_moment_are_no_array() {
    let (mut sim, new) = exchanged(2, 1, 2, 21);
    sim.admin(AdminRequest::Offline { member: MemberIndex(0) }).expect("a member can leave");
    sim.settle();
    let id = sim.submit_write(0, &vec![2; 4096], true);
    sim.wait(id).expect("a degraded array takes writes");
    for id in [1, new] {
        disk(&mut sim, id).dead = true;
    }
    let started = sim.kill_where(false, |_, _| false);
    assert!(started.is_err(), "a flushed write is rolled back: {:?}", started.map(|sim| states(&sim)));
}

/// A replaced disk counts until its successor does: a mark written earlier would deprive a start without the
/// new disk of both.
#[test]
fn a_kill_before_its_successor_counts_leaves_a_replaced_disk_what_it_was() {
    let (mut marks, mut starts) = (0, 0);
    // How many steps there are between the two differs.
    let mut seeds = 23..27;
    let mut seed = seeds.next();
    let mut n = 0;
    while let Some(at) = seed {
        let (mut sim, new) = exchanged(1, 1, 1, at);
        for _ in 0..n {
            sim.step();
        }
        n += 1;
        if sim.released.contains(&1) {
            (seed, n) = (seeds.next(), 0);
            continue;
        }
        marks += sim.queued().filter(|(disk, op)| *disk == 1 && is_write(op)).count();
        let recorded = |sim: &SimArray| newest(sim, 0).members[1].uuid != newest(sim, 1).device;
        if recorded(&sim) {
            continue;
        }
        // Only the operations on their way to the old disk happen; the new disk is gone.
        disk(&mut sim, new).dead = true;
        let started = sim.kill_where(false, |disk, _| disk == 1);
        let mut sim = started.unwrap_or_else(|error| panic!("seed {at}, {} steps: {error}", n - 1));
        assert_eq!(sim.read(0, 4096).expect("readable"), [1; 4096]);
        starts += 1;
    }
    assert!(marks > 0 && starts > 3, "{marks} marks, {starts} starts");
}

/// A crash may come between the record of an exchange and the mark on the replaced device: the next start
/// writes the mark.
#[test]
fn a_replaced_disk_is_marked_by_the_next_start_where_a_crash_came_between() {
    let mut between = 0;
    for n in 0.. {
        let (mut sim, new) = exchanged(2, 1, 2, 21);
        let _ = sim.submit_admin(AdminRequest::Fail { member: MemberIndex(0) });
        for _ in 0..n {
            sim.step();
        }
        if sim.released.contains(&2) {
            break;
        }
        // The operations on their way to the other disks happen.
        let sim = sim.kill_where(true, |disk, _| disk != 2);
        let mut sim = sim.unwrap_or_else(|error| panic!("{n} steps: {error}"));
        between += u32::from(sim.disk_of(2) == Some(new) && sim.disk_of(0).is_none());
        // The next start may be cut short as well.
        for _ in 0..n % 7 {
            sim.step();
        }
        let sim = sim.kill_where(true, |disk, _| disk != 2);
        let mut sim = sim.unwrap_or_else(|error| panic!("{n} steps, again: {error}"));
        let write = sim.submit_write(0, &[2; 4096], true);
        sim.wait(write).expect("a degraded array takes writes");
        for id in [1, new] {
            disk(&mut sim, id).dead = true;
        }
        if let Ok(mut sim) = sim.kill_where(false, |_, _| false) {
            let read = sim.read(0, 4096).expect("readable");
            assert!(read == [2; 4096], "{n} steps: a flushed write is rolled back");
        }
    }
    assert!(between > 3, "{between} times the exchange was recorded");
}

#[test]
fn a_replaced_disk_is_marked_also_where_its_array_fails_meanwhile_and_returns() {
    let mut failures = 0;
    for n in 0..60 {
        let (mut sim, _) = exchanged(2, 1, 2, 24);
        for _ in 0..n {
            sim.step();
        }
        failures += u32::from(!sim.released.contains(&2));
        for id in [0, 1] {
            disk(&mut sim, id).dead = true;
        }
        while sim.status().state != ArrayState::Failed {
            let _ = sim.read(0, 2 * CHUNK);
        }
        drain(&mut sim);
        let lost = if online(&mut sim, 1, 1).is_ok() { 0 } else { 1 };
        if lost == 1 {
            let last = sim.disk_of(0).is_none();
            assert!(last && online(&mut sim, 0, 0).is_ok(), "{n} steps: the last is current");
        }
        sim.settle();
        let write = sim.submit_write(0, &[2; 4096], true);
        sim.wait(write).expect("a degraded array takes writes");
        let lost = if sim.disks.contains_key(&lost) { lost } else { 1 - lost };
        for (id, disk) in &mut sim.disks {
            disk.dead = ![lost, 2].contains(id);
        }
        if let Ok(mut sim) = sim.kill_where(false, |_, _| false) {
            let read = sim.read(0, 4096).expect("readable");
            assert!(read == [2; 4096], "{n} steps: a flushed write is rolled back");
        }
    }
    assert!(failures > 5, "{failures} failures before the mark");
}

#[test]
fn a_replaced_disk_does_not_come_back_before_it_is_marked() {
    let mut array = Checked::filled(2, 1, 8, 25);
    let new = replace(&mut array.sim, 2);
    until_exchanged(&mut array.sim, 2, new);
    fail(&mut array.sim, 2);
    let refused = online(&mut array.sim, 2, 2).expect_err("it is not released");
    assert!(refused.contains("try again"), "{refused}");
    array.sim.settle();
    // The disk's present handle.
    let old = *array.sim.disks.keys().max().expect("disks");
    online(&mut array.sim, 2, old).expect("it is built anew");
    array.sim.settle();
    assert_eq!(states(&array.sim), [MemberState::Online; 3]);
    array.verify();
}

#[test]
fn a_replaced_disk_that_cannot_be_marked_is_let_go_and_told() {
    let mut array = Checked::filled(2, 1, 8, 22);
    let new = replace(&mut array.sim, 2);
    until_exchanged(&mut array.sim, 2, new);
    disk(&mut array.sim, 2).dead = true;
    array.sim.settle();
    array.write(0, &[3; 4096]);
    array.verify();
    assert!(states(&array.sim).iter().all(|state| *state == MemberState::Online), "{:?}", states(&array.sim));
    assert_eq!(array.sim.status().members[2].counters.write_errors, 0, "they are not the new device's");
    assert!(
        array.sim.notices.iter().any(|notice| notice.text.contains("keep it away")),
        "{:?}",
        array.sim.notices
    );
}

#[test]
fn a_forced_start_does_not_prefer_members_that_are_known_to_be_stale() {
    for force in [false, true] {
        let mut array = Checked::filled(2, 2, 8, 9);
        fail(&mut array.sim, 0);
        fail(&mut array.sim, 1);
        array.write(0, &vec![7; CHUNK]);
        array.sim.settle();
        disk(&mut array.sim, 3).dead = true;
        // Members 0 and 1 are stale; 2 holds the newer epoch and says so. A start from the stale ones would
        // silently go back.
        let refused =
            array.sim.kill_where(force, |_, _| false).map(drop).expect_err("two that are no majority");
        assert!(matches!(refused, AssemblyError::TooFew { .. }), "{refused}");
    }
}

/// Asserts that no write under way to a disk overwrites its newest superblock.
#[track_caller]
fn assert_newest_is_not_at_risk(sim: &SimArray, id: u32) {
    let sequence =
        |at: u64| Superblock::decode(&sim.disks[&id].peek(at, COPY_BYTES)).map_or(0, |copy| copy.sequence);
    let copies = all_copy_offsets(sim.disk_bytes(id)).map(|at| (at.0, sequence(at.0)));
    let newest = copies.iter().map(|(_, sequence)| *sequence).max().expect("four copies");
    let written = |at: u64| {
        sim.queued()
            .any(|(device, op)| device == id && matches!(op, IoOp::Write { offset, .. } if offset.0 == at))
    };
    assert!(
        copies.iter().all(|&(at, sequence)| sequence != newest || !written(at)),
        "an update torn by a crash leaves disk {id} with the superblock before its last"
    );
}

#[test]
fn no_superblock_update_puts_a_newest_copy_of_a_device_at_risk() {
    let array = Checked::filled(2, 1, 8, 24);
    let mut sim = array.sim.kill_where(false, |_, _| true).expect("the array is whole");
    for _ in 0..6 {
        // Only disk 0 gets the update that is under way; the others keep their superblocks.
        loop {
            (0..3).for_each(|id| assert_newest_is_not_at_risk(&sim, id));
            if superblock_under_way(&sim).is_some() {
                break;
            }
            assert!(sim.step(), "a start writes superblocks");
        }
        sim = sim.kill_where(false, |device, _| device == 0).expect("a majority");
    }
}

#[test]
fn a_process_killed_in_a_superblock_update_has_not_damaged_a_copy() {
    for steps in 0..60 {
        let array = Checked::filled(2, 1, 8, 32);
        // Twice, so that both slots have been written to.
        let mut sim = array.sim;
        for _ in 0..2 {
            sim = sim.kill_where(false, |_, _| true).expect("the array is whole");
            for _ in 0..steps {
                sim.step();
            }
        }
        let sim = sim.kill_where(false, |device, _| device != 1).expect("the array is whole");
        for (id, disk) in &sim.disks {
            let copies = all_copy_offsets(sim.disk_bytes(*id))
                .map(|at| Ok(Superblock::decode(&disk.peek(at.0, COPY_BYTES))));
            assert_eq!(damaged_copies(&copies), [], "disk {id} after {steps} steps");
        }
    }
}

/// The superblock on its way to disk 0, and its offset.
fn superblock_under_way(sim: &SimArray) -> Option<(u64, Vec<u8>)> {
    sim.queued().find_map(|(device, op)| match op {
        IoOp::Write { offset, buf, .. } if device == 0 && Superblock::decode(buf).is_ok() => {
            Some((offset.0, buf.to_vec()))
        }
        _ => None,
    })
}

#[test]
fn what_a_torn_superblock_update_has_left_is_not_completed_by_the_next() {
    let array = Checked::filled(2, 1, 8, 31);
    let mut sim = array.sim;
    let mut torn: Option<(u64, Vec<u8>)> = None;
    for _ in 0..2 {
        sim = sim.kill_where(false, |_, _| false).expect("the array is whole");
        while superblock_under_way(&sim).is_none() {
            assert!(sim.step(), "a start writes superblocks");
        }
        let (offset, bytes) = superblock_under_way(&sim).expect("just found");
        let disk = disk(&mut sim, 0);
        match &torn {
            // Only the first sector is written, over content of which no other sector matches.
            None => {
                disk.poke(offset, &vec![0x77; COPY_BYTES]);
                disk.poke(offset, &bytes[..512]);
            }
            // All but the first sector.
            Some((before, _)) => {
                assert_eq!(*before, offset, "it goes where the torn one was");
                disk.poke(offset + 512, &bytes[512..]);
            }
        }
        torn = torn.or(Some((offset, bytes)));
    }
    let (offset, bytes) = torn.expect("an update was torn");
    assert!(sim.disks[&0].peek(offset, COPY_BYTES) != bytes, "an epoch that was given up is back");
}

// ---- Rebuilds ----

#[test]
fn a_member_may_be_replaced_again_while_an_older_superblock_update_is_under_way() {
    let mut array = Checked::filled(2, 1, 6, 25);
    let region = array.sim.data_region();
    // The array is marked dirty: no batch waits for an update.
    array.write(0, &[3; 4096]);
    let new = replace(&mut array.sim, 1);
    // The first update is done and names the replacement; the next one begins, and its writes are slow.
    while array.sim.step_where(|_, op| !in_region(&region, op)) {}
    array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    let bytes = array.sim.disk_bytes(0);
    let is_super =
        |op: &IoOp| matches!(op, IoOp::Write { offset, .. } if all_copy_offsets(bytes).contains(offset));
    while array.sim.disk_of(1) != Some(new) {
        // An update that names the device comes before the one that puts it in service.
        if !array.sim.step_where(|_, op| !is_super(op)) && !array.sim.step() {
            array.sim.sleep(100);
        }
    }
    while !array.sim.queued().any(|(_, op)| is_super(op)) {
        if !array.sim.step() {
            array.sim.sleep(100);
        }
    }
    replace(&mut array.sim, 1);
    array.sim.settle();
    array.verify();
}

#[test]
fn parity_written_to_a_blank_device_before_its_rebuild_reaches_the_row_is_right() {
    let mut array = Checked { sim: SimArray::create(shape(4, 2, 8), 10), model: vec![0; 8 * 4 * CHUNK] };
    array.write(0, &vec![0xd7; 4096]);
    array.sim.settle();
    fail(&mut array.sim, 5);
    array.sim.settle();
    // The old bytes and the present parity are being read when the device of the other parity appears.
    let id = array.sim.submit_write(0, &vec![0; 4096], false);
    array.model[..4096].fill(0);
    replace(&mut array.sim, 5);
    array.sim.wait(id).expect("written");
    array.sim.settle();
    assert_eq!(array.sim.status().state, ArrayState::Online);
    array.assert_scrub_clean();
    fail(&mut array.sim, 0);
    fail(&mut array.sim, 4);
    array.verify();
}

#[test]
fn a_kill_under_writes_while_a_replacement_is_built_leaves_no_torn_row_on_it() {
    for seed in 0..8 {
        let mut array = Checked::filled(3, 1, 120, 100 + seed);
        let mut random = Random::new(seed);
        replace(&mut array.sim, 1);
        // Half of the member is built, and the cursor is on disk.
        for _ in 0..200 {
            array.sim.step();
        }
        array.sim.sleep(5100);
        for _ in 0..60 {
            array.sim.step();
        }
        array.write(0, &[1; 512]);
        let mut unknown = Vec::new();
        for at in 0..8usize {
            let start = at * 3 * CHUNK + random.below(3) as usize * CHUNK;
            let mut bytes = vec![0; 4096];
            random.fill(&mut bytes);
            array.sim.submit_write(start as u64, &bytes, false);
            unknown.push((start, bytes));
        }
        for _ in 0..random.below(80) {
            array.sim.step();
        }
        let mut sim = array.sim.kill_and_restart(false).expect("every member is there");
        let mut model = array.model;
        for (start, bytes) in unknown {
            let now = sim.read(start as u64, bytes.len()).expect("readable");
            model[start..start + bytes.len()].copy_from_slice(&now);
        }
        let mut array = Checked { sim, model };
        array.sim.settle();
        array.verify();
        array.assert_scrub_clean();
    }
}

#[test]
fn a_full_member_can_be_replaced() {
    let mut array = Checked::filled(3, 1, 20, 12);
    disk(&mut array.sim, 1).full = true;
    let write = array.sim.submit_write(0, &vec![3; 3 * CHUNK], false);
    while array.sim.step() {}
    let new = replace(&mut array.sim, 1);
    drain(&mut array.sim);
    assert!(matches!(array.sim.poll(write), Some(Ok(_))), "it does without the full one");
    assert_eq!(array.sim.disk_of(1), Some(new), "the replacement never ends: {:?}", array.sim.status());
}

// ---- Beyond the budget and back ----

#[test]
fn reads_of_a_failed_array_end() {
    let mut array = Checked::filled(1, 0, 4, 15);
    array.write(0, &vec![1; 4096]);
    let sim = &mut array.sim;
    let write = sim.submit_write(0, &vec![2; 4096], false);
    // A read of a block that is not in the log.
    let read = sim.submit_read(8192, 4096);
    disk(sim, 0).dead = true;
    assert!(sim.step_where(|_, op| is_write(op)));
    drain(sim);
    assert_eq!(sim.poll(write).map(|r| r.err()), Some(Some(ClientError::Io)));
    assert_eq!(
        sim.poll(read).map(|r| r.err()),
        Some(Some(ClientError::Io)),
        "a read hangs in an array that has failed"
    );
}

#[test]
fn what_a_member_acknowledged_and_lost_is_not_taken_for_current() {
    for seed in 0..8 {
        // A flush fails because the array cannot spare the member; the member's cache is gone when it
        // returns.
        let mut array = Checked::filled(2, 1, 4, seed);
        fail(&mut array.sim, 2);
        array.sim.settle();
        let id = array.sim.submit(ClientRequest::Flush);
        array.sim.wait(id).expect("flushed");
        array.write(0, &vec![5; 4096]);
        let before = array.sim.disk_of(0).expect("a disk");
        disk(&mut array.sim, before).failing_flushes = 1;
        let id = array.sim.submit(ClientRequest::Flush);
        assert_eq!(array.sim.wait(id).err(), Some(ClientError::Io));
        drain(&mut array.sim);
        let said = |notice: &ArrayNotice| {
            notice.level == NoticeLevel::Error
                && notice.text.contains("acknowledged and not flushed may be lost")
                && notice.text.contains("without --force")
        };
        assert_eq!(array.sim.notices.iter().filter(|n| said(n)).count(), 1, "{:?}", array.sim.notices);
        array.sim.cut_power_of(before);
        if let Err(refused) = online(&mut array.sim, 0, before) {
            assert!(refused.contains("Restart it, without --force"), "{refused}");
            continue;
        }
        array.sim.settle();
        let id = array.sim.submit(ClientRequest::Flush);
        array.sim.wait(id).expect("flushed");
        let read = array.sim.read(0, 4096).expect("readable");
        assert!(
            read == array.model[..4096],
            "an acknowledged write is gone, and flushes succeed as if nothing were"
        );
    }
}

// ---- Stops ----

/// Stops, executes everything, and says whether the stop has ended.
fn stop_ends(sim: &mut SimArray) -> bool {
    let id = sim.submit_admin(AdminRequest::Stop);
    drain(sim);
    sim.poll_admin(id).is_some()
}

#[test]
fn a_stop_ends_although_a_member_is_full_and_a_pass_waits_for_its_row() {
    let mut array = Checked::filled(3, 1, 20, 18);
    disk(&mut array.sim, 1).full = true;
    let write = array.sim.submit_write(0, &vec![3; CHUNK * 3], false);
    while array.sim.step() {}
    array.sim.submit_admin(AdminRequest::ScrubStart);
    for _ in 0..3 {
        array.sim.step_where(|d, _| d != 1);
    }
    // Superblocks have their space already; only new data has none.
    assert!(stop_ends(&mut array.sim), "the stop hangs: {:?}", array.sim.status());
    // The write has not waited as long as clients may be kept waiting: its client will ask the next daemon.
    assert_eq!(array.sim.poll(write).map(|end| end.map(|_| ())), Some(Err(ClientError::Stopping)));
}

#[test]
fn a_stop_ends_when_the_array_fails_during_its_last_update() {
    let mut array = Checked::filled(2, 0, 8, 19);
    array.write(0, &vec![1; 4096]);
    let id = array.sim.submit_admin(AdminRequest::Stop);
    disk(&mut array.sim, 0).dead = true;
    drain(&mut array.sim);
    assert!(array.sim.poll_admin(id).is_some(), "the stop hangs: {:?}", array.sim.status());
}

#[test]
fn a_stopped_array_does_nothing_more() {
    let mut array = Checked::filled(3, 1, 8, 20);
    disk(&mut array.sim, 1).full = true;
    array.sim.submit_write(0, &vec![3; CHUNK * 3], false);
    while array.sim.step() {}
    let id = array.sim.submit_admin(AdminRequest::Stop);
    drain(&mut array.sim);
    assert!(array.sim.poll_admin(id).is_some(), "the stop hangs: {:?}", array.sim.status());
    disk(&mut array.sim, 1).full = false;
    array.sim.sleep(5000);
}

#[test]
fn a_stop_waits_for_the_rewrite_of_an_unreadable_block() {
    let mut array = Checked::filled(3, 1, 8, 22);
    let region = array.sim.data_region();
    disk(&mut array.sim, 0).bad_blocks = [region.start / 4096].into();
    array.sim.read(0, 4096).expect("decoded");
    assert!(array.sim.queued().any(|(_, op)| is_write(op)), "the rewrite is in flight");
    array.sim.submit_admin(AdminRequest::Stop);
    while array.sim.step_where(|_, op| !in_region(&region, op)) {}
    drain(&mut array.sim);
}

// ---- Odds and ends ----

#[test]
fn zeroing_odd_ranges_zeroes_them_and_nothing_else() {
    let mut array = Checked::filled(3, 1, 70, 23);
    let mut random = Random::new(23);
    for _ in 0..60 {
        let sectors = array.model.len() as u64 / 512;
        let start = random.below(sectors);
        let len = 1 + random.below(sectors - start);
        let (start, len) = (start as usize * 512, len as usize * 512);
        let id = array.sim.submit(ClientRequest::WriteZeroes {
            offset: VolumeOffset(start as u64),
            len: len as u64,
            may_unmap: true,
            fast_only: false,
            fua: true,
        });
        array.sim.wait(id).expect("zeroed");
        array.model[start..start + len].fill(0);
        let mut bytes = vec![0; len.min(CHUNK * 5)];
        random.fill(&mut bytes);
        array.write(start, &bytes);
    }
    array.verify();
    array.assert_scrub_clean();
}
