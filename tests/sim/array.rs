//! The array and the plain volume over simulated members, driven by seeded workloads against a plain byte
//! vector.

use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{Random, SimArray, SimShape};
use calpe_core::units::{MemberIndex, VolumeOffset};
use calpe_core::volume::{AdminRequest, ArrayState, ClientError, ClientReply, ClientRequest};

/// An array and the expected content of its volume.
struct Checked {
    sim: SimArray,
    model: Vec<u8>,
}

impl Checked {
    fn create(data: u16, parity: u16, stripes: u64, seed: u64) -> Checked {
        let chunk = 16384;
        let volume_bytes = stripes * u64::from(data) * u64::from(chunk);
        let shape = SimShape { volume_bytes, ..SimShape::new(data, parity, chunk, 1) };
        let shape = shape.logged(ChecksumKind::None, 256 << 10);
        Checked { sim: SimArray::create(shape, seed), model: vec![0; volume_bytes as usize] }
    }

    /// A sector-aligned range of up to three stripes.
    fn range(&mut self, random: &mut Random) -> (usize, usize) {
        let sectors = self.model.len() as u64 / 512;
        let longest = match random.below(4) {
            0 => 8,
            1 => 64,
            _ => 512,
        };
        let start = random.below(sectors);
        let len = 1 + random.below(longest.min(sectors - start));
        (start as usize * 512, len as usize * 512)
    }

    fn write(&mut self, random: &mut Random) {
        let (start, len) = self.range(random);
        let mut bytes = vec![0; len];
        random.fill(&mut bytes);
        self.sim.write(start as u64, &bytes).expect("a write within the budget succeeds");
        self.model[start..start + len].copy_from_slice(&bytes);
    }

    /// Several requests in flight on ranges that do not overlap, completing in any order.
    fn burst(&mut self, random: &mut Random, count: usize) {
        let mut taken: Vec<(usize, usize)> = Vec::new();
        let mut pending = Vec::new();
        for _ in 0..count {
            let (start, len) = self.range(random);
            if taken.iter().any(|(s, l)| start < s + l && *s < start + len) {
                continue;
            }
            taken.push((start, len));
            if random.one_in(3) {
                pending.push((self.sim.submit_read(start as u64, len), start, None));
            } else if random.one_in(5) {
                let request = ClientRequest::WriteZeroes {
                    offset: VolumeOffset(start as u64),
                    len: len as u64,
                    may_unmap: random.one_in(2),
                    fast_only: false,
                    fua: random.one_in(2),
                };
                pending.push((self.sim.submit(request), start, Some(vec![0; len])));
            } else {
                let mut bytes = vec![0; len];
                random.fill(&mut bytes);
                let id = self.sim.submit_write(start as u64, &bytes, random.one_in(4));
                pending.push((id, start, Some(bytes)));
            }
        }
        for (id, start, bytes) in pending {
            match (self.sim.wait(id).expect("requests within the budget succeed"), bytes) {
                (ClientReply::Data(buf), None) => {
                    assert!(buf[..] == self.model[start..start + buf.len()], "a read at {start} differs");
                }
                (ClientReply::Done, Some(bytes)) => {
                    self.model[start..start + bytes.len()].copy_from_slice(&bytes);
                }
                (other, _) => panic!("{other:?}"),
            }
        }
    }

    fn verify(&mut self) {
        let step = 300 * 512;
        for start in (0..self.model.len()).step_by(step) {
            let len = step.min(self.model.len() - start);
            let read = self.sim.read(start as u64, len).expect("every byte can be read");
            if let Some(at) = (0..len).find(|&at| read[at] != self.model[start + at]) {
                panic!("byte {} differs; {:?}", start + at, self.sim.notices);
            }
        }
    }

    fn fail(&mut self, member: usize) {
        self.sim
            .admin(AdminRequest::Fail { member: MemberIndex(member as u16) })
            .expect("a member can be failed");
    }

    fn replace(&mut self, member: usize) {
        let device = self.sim.add_blank_disk();
        self.sim
            .admin(AdminRequest::Replace { member: MemberIndex(member as u16), device })
            .expect("admitted");
    }

    /// Asserts that every row's parity matches its data.
    fn assert_scrub_clean(&mut self) {
        self.sim.assert_scrub_clean();
    }
}

/// All subsets of `0..n` with at most `most` elements.
fn subsets(n: usize, most: usize) -> Vec<Vec<usize>> {
    (0u32..1 << n)
        .filter(|bits| bits.count_ones() as usize <= most)
        .map(|bits| (0..n).filter(|at| bits & (1 << at) != 0).collect())
        .collect()
}

#[test]
fn every_set_of_lost_members_reads_back_rebuilds_and_survives_other_losses() {
    for k in 1..=4usize {
        for m in 0..=3usize {
            let seed = (k * 10 + m) as u64;
            let mut random = Random::new(seed);
            let mut array = Checked::create(k as u16, m as u16, 5, seed);
            array.burst(&mut random, 12);
            for lost in subsets(k + m, m) {
                for &member in &lost {
                    array.fail(member);
                }
                array.burst(&mut random, 4);
                array.verify();
                for &member in &lost {
                    array.replace(member);
                }
                array.burst(&mut random, 4);
                array.sim.settle();
                assert_eq!(array.sim.status().state, ArrayState::Online, "{k}+{m} {lost:?}");
                // Now other members are lost, so the rebuilt ones must supply the data.
                let others: Vec<usize> = (0..k + m).filter(|at| !lost.contains(at)).take(m).collect();
                for &member in &others {
                    array.fail(member);
                }
                array.verify();
                for &member in &others {
                    array.replace(member);
                }
                array.sim.settle();
            }
            array.assert_scrub_clean();
            array.verify();
        }
    }
}

#[test]
fn wide_arrays_survive_random_losses() {
    for (k, m) in [(8usize, 4usize), (20, 10)] {
        let mut random = Random::new(99);
        let mut array = Checked::create(k as u16, m as u16, 6, 7);
        for _ in 0..6 {
            array.burst(&mut random, 8);
            let count = 1 + random.below(m as u64) as usize;
            let lost = random.choose(count, k + m);
            for &member in &lost {
                array.fail(member);
            }
            array.burst(&mut random, 8);
            array.verify();
            for &member in &lost {
                array.replace(member);
            }
            array.burst(&mut random, 8);
            array.sim.settle();
            let others: Vec<usize> =
                random.choose(k + m, k + m).into_iter().filter(|at| !lost.contains(at)).take(m).collect();
            for &member in &others {
                array.fail(member);
            }
            array.verify();
            for &member in &others {
                array.replace(member);
            }
            array.sim.settle();
        }
        array.assert_scrub_clean();
    }
}

#[test]
fn members_that_die_under_load_are_noticed_and_nothing_is_lost() {
    for seed in 0..30 {
        let mut random = Random::new(seed);
        let mut array = Checked::create(4, 2, 20, seed);
        array.burst(&mut random, 10);
        for member in random.choose(2, 6) {
            let disk = array.sim.disk_of(member as u16).expect("a disk");
            // Some operations are already queued when the disk dies.
            let (start, len) = array.range(&mut random);
            let mut bytes = vec![0; len];
            random.fill(&mut bytes);
            let id = array.sim.submit_write(start as u64, &bytes, false);
            for _ in 0..random.below(6) {
                array.sim.step();
            }
            array.sim.disks.get_mut(&disk).expect("it exists").dead = true;
            array.sim.wait(id).expect("a write within the budget succeeds");
            array.model[start..start + len].copy_from_slice(&bytes);
            array.burst(&mut random, 10);
        }
        array.verify();
        assert_eq!(array.sim.status().state, ArrayState::Degraded);
        let out: Vec<usize> =
            (0..6).filter(|&at| array.sim.status().members[at].state == MemberState::Faulted).collect();
        assert_eq!(out.len(), 2);
        for member in out {
            array.replace(member);
        }
        array.assert_scrub_clean();
        array.verify();
    }
}

#[test]
fn an_old_member_serves_until_its_replacement_is_complete() {
    let mut random = Random::new(5);
    let mut array = Checked::create(4, 2, 40, 5);
    array.burst(&mut random, 20);
    let old = array.sim.disk_of(3).expect("a disk");
    array.replace(3);
    assert_eq!(array.sim.status().state, ArrayState::Online);
    for _ in 0..10 {
        array.burst(&mut random, 6);
    }
    array.sim.settle();
    let new = array.sim.disk_of(3).expect("a disk");
    assert_ne!(old, new);
    assert!(array.sim.released.contains(&old));
    array.fail(0);
    array.fail(1);
    array.verify();
}

#[test]
fn a_failed_array_writes_nothing_and_comes_back_with_its_members() {
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let mut array = Checked::create(3, 1, 12, seed);
        array.burst(&mut random, 10);
        array.fail(0);
        array.burst(&mut random, 5);
        // The second member is lost in the middle of writes.
        let disk = array.sim.disk_of(2).expect("a disk");
        let (start, len) = array.range(&mut random);
        let mut bytes = vec![0; len];
        random.fill(&mut bytes);
        let id = array.sim.submit_write(start as u64, &bytes, false);
        for _ in 0..random.below(8) {
            array.sim.step();
        }
        array.sim.disks.get_mut(&disk).expect("it exists").dead = true;
        let outcome = array.sim.wait(id);
        if array.sim.status().state != ArrayState::Failed {
            // No operation has touched the dead disk yet.
            let _ = array.sim.read(0, array.model.len());
        }
        array.sim.settle();
        assert_eq!(array.sim.status().state, ArrayState::Failed, "seed {seed}");
        assert_eq!(array.sim.read(0, 512), Err(ClientError::Io));
        assert_eq!(array.sim.write(0, &[1; 512]), Err(ClientError::Io));
        let writes: u64 = array.sim.disks.values().map(|disk| disk.writes).sum();
        array.sim.sleep(5000);
        assert_eq!(
            array.sim.disks.values().map(|disk| disk.writes).sum::<u64>(),
            writes,
            "a failed array is left alone"
        );

        let device = array.sim.reopen_disk(disk);
        array
            .sim
            .admin(AdminRequest::Online { member: MemberIndex(2), device })
            .expect("the member is current");
        array.sim.settle();
        assert_eq!(array.sim.status().state, ArrayState::Degraded);
        // Each sector of the interrupted write may or may not be there; everything else is untouched.
        let now = array.sim.read(start as u64, len).expect("readable again");
        for at in (0..len).step_by(512) {
            let (new, old) = (&bytes[at..at + 512], &array.model[start + at..start + at + 512]);
            assert!(
                now[at..at + 512] == *new || (outcome.is_err() && now[at..at + 512] == *old),
                "seed {seed}"
            );
        }
        array.model[start..start + len].copy_from_slice(&now);
        array.verify();
        array.replace(0);
        array.sim.settle();
        array.assert_scrub_clean();
    }
}

#[test]
fn a_member_that_missed_writes_is_rebuilt_not_believed() {
    let mut random = Random::new(11);
    let mut array = Checked::create(3, 2, 12, 11);
    array.burst(&mut random, 10);
    let disk = array.sim.disk_of(1).expect("a disk");
    array.sim.admin(AdminRequest::Offline { member: MemberIndex(1) }).expect("offline");
    array.burst(&mut random, 10);
    let device = array.sim.reopen_disk(disk);
    array.sim.admin(AdminRequest::Online { member: MemberIndex(1), device }).expect("admitted");
    assert_eq!(array.sim.status().members[1].state, MemberState::Rebuilding);
    array.burst(&mut random, 10);
    array.sim.settle();
    array.fail(0);
    array.fail(2);
    array.verify();
}

#[test]
fn blocks_that_cannot_be_read_are_decoded_served_and_rewritten() {
    let mut random = Random::new(12);
    let mut array = Checked::create(4, 2, 10, 12);
    for _ in 0..10 {
        array.write(&mut random);
    }
    for member in [1u16, 4] {
        let disk = array.sim.disk_of(member).expect("a disk");
        let disk = array.sim.disks.get_mut(&disk).expect("it exists");
        disk.bad_blocks = (0..100_000).collect();
        // Superblocks are only written, so bad blocks there do not matter.
    }
    array.verify();
    let status = array.sim.status();
    assert_eq!(
        status.state,
        ArrayState::Online,
        "bad blocks do not cost the member: {:?}",
        array.sim.notices
    );
    assert!(status.members[1].counters.read_errors > 0 && status.members[1].counters.repaired > 0);
    assert!(status.members[0].counters.read_errors == 0);
    array.verify();
    // The scrub heals blocks that no client has read.
    array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    array.assert_scrub_clean();
}

#[test]
fn a_failed_flush_costs_the_member_and_the_client_gets_its_flush() {
    let mut random = Random::new(14);
    let mut array = Checked::create(3, 2, 10, 14);
    array.burst(&mut random, 10);
    let disk = array.sim.disk_of(4).expect("a disk");
    let whole = vec![3; array.model.len()];
    array.sim.write(0, &whole).expect("written");
    array.model = whole;
    array.sim.disks.get_mut(&disk).expect("it exists").failing_flushes = 1;
    let id = array.sim.submit(ClientRequest::Flush);
    array.sim.wait(id).expect("flushed on the others");
    assert_eq!(array.sim.status().members[4].state, MemberState::Faulted);
    array.verify();
}

#[test]
fn a_killed_daemon_loses_nothing_and_parity_is_right() {
    for seed in 0..40 {
        let mut random = Random::new(1000 + seed);
        let mut array = Checked::create(4, 2, 16, seed);
        for _ in 0..3 {
            array.burst(&mut random, 10);
            // Each sector of a write that was not answered may or may not be there.
            let mut unknown = Vec::new();
            for _ in 0..4 {
                let (start, len) = array.range(&mut random);
                let mut bytes = vec![0; len];
                random.fill(&mut bytes);
                unknown.push((array.sim.submit_write(start as u64, &bytes, false), start, bytes));
            }
            for _ in 0..random.below(60) {
                array.sim.step();
            }
            let Checked { sim, mut model } = array;
            let mut sim = sim.kill_and_restart(false).expect("all members are there");
            for (_, start, bytes) in unknown {
                let now = sim.read(start as u64, bytes.len()).expect("readable");
                for at in (0..bytes.len()).step_by(512) {
                    model[start + at..start + at + 512].copy_from_slice(&now[at..at + 512]);
                }
            }
            array = Checked { sim, model };
            array.verify();
            array.assert_scrub_clean();
            for member in random.choose(2, 6) {
                array.fail(member);
                array.verify();
                array.replace(member);
                array.sim.settle();
            }
        }
    }
}

#[test]
fn a_clean_stop_keeps_a_half_done_rebuild() {
    let mut random = Random::new(15);
    let mut array = Checked::create(4, 2, 200, 15);
    array.burst(&mut random, 30);
    array.fail(2);
    array.replace(2);
    let mut before = 0;
    while before == 0 {
        assert!(array.sim.step(), "the rebuild goes on");
        before = array.sim.status().activities.first().map(|a| a.done_bytes).expect("a rebuild is under way");
    }
    let sim = array.sim.stop_and_restart(false).expect("a degraded array that was stopped cleanly starts");
    let mut array = Checked { sim, model: array.model };
    let activity = array.sim.status().activities[0].clone();
    assert!(activity.done_bytes >= before, "the rebuild goes on where it was: {activity:?}");
    assert_eq!(array.sim.status().activities.len(), 1);
    array.sim.settle();
    array.fail(0);
    array.fail(1);
    array.verify();
}

#[test]
fn a_degraded_array_that_was_killed_starts_and_has_everything() {
    let mut random = Random::new(16);
    let mut array = Checked::create(3, 2, 10, 16);
    array.burst(&mut random, 10);
    array.fail(1);
    array.burst(&mut random, 4);
    assert!(array.sim.status().dirty);
    let sim = array.sim.kill_and_restart(false).expect("the log makes up for it");
    let mut array = Checked { sim, model: array.model };
    array.verify();
    array.assert_scrub_clean();
}

#[test]
fn an_idle_array_is_marked_clean() {
    let mut random = Random::new(17);
    let mut array = Checked::create(3, 2, 10, 17);
    array.burst(&mut random, 10);
    array.fail(1);
    array.sim.settle();
    assert!(!array.sim.status().dirty);
    let sim = array.sim.kill_and_restart(false).expect("clean and degraded is fine");
    let mut array = Checked { sim, model: array.model };
    assert!(array.sim.status().activities.is_empty());
    array.verify();
}

#[test]
fn scrub_finds_the_liar_and_repairs_it() {
    let mut random = Random::new(18);
    let mut array = Checked::create(4, 2, 10, 18);
    // Whole stripes of a new array go to the slots of their numbers, so the first ten slots hold data.
    random.fill(&mut array.model);
    array.sim.write(0, &array.model).expect("written");
    array.sim.settle();
    let disk = array.sim.disk_of(3).expect("a disk");
    let region = array.sim.data_region();
    let disk = array.sim.disks.get_mut(&disk).expect("it exists");
    let rows: Vec<u64> = region.take(10 * 16384).step_by(3 * 4096).collect();
    for &row in &rows {
        let mut bytes = disk.peek(row, 4096);
        bytes[77] ^= 0x40;
        disk.poke(row, &bytes);
    }
    let flipped = rows.len() as u64;
    assert!(flipped > 3);
    array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    array.sim.settle();
    let status = array.sim.status();
    let scrub = status.last_scrub.expect("ended");
    assert_eq!((scrub.errors, scrub.repaired), (flipped, flipped), "{:?}", array.sim.notices);
    assert_eq!(status.members[3].counters.checksum_errors, flipped);
    array.verify();
    array.assert_scrub_clean();
}

#[test]
fn a_scrub_and_its_members_count_the_same_repairs_copies_of_pages_among_them() {
    let mut random = Random::new(21);
    let mut array = Checked::create(2, 1, 10, 21);
    array.burst(&mut random, 10);
    array.sim.settle();
    // A restart, so that no page is in the cache.
    array.sim = array.sim.stop_and_restart(false).expect("all is there");
    array.sim.settle();
    let disk = array.sim.disk_of(1).expect("a disk");
    let pages = array.sim.pages_region();
    let disk = array.sim.disks.get_mut(&disk).expect("it exists");
    let written = disk.written_blocks(pages);
    assert!(!written.is_empty());
    for block in written {
        disk.flip(block * 4096 + 1000, 1);
    }
    array.sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    array.sim.settle();
    let status = array.sim.status();
    let scrub = status.last_scrub.expect("ended");
    assert!(scrub.repaired > 0, "{:?}", array.sim.notices);
    let by_member: u64 = status.members.iter().map(|member| member.counters.repaired).sum();
    assert_eq!(scrub.repaired, by_member, "{:?}", array.sim.notices);
}

#[test]
fn zeroed_and_trimmed_stripes_read_as_zeroes_and_become_holes() {
    let mut array = Checked::create(3, 1, 100, 19);
    let stripe = 3 * 16384u64;
    let len = array.model.len();
    array.sim.write(0, &vec![5; len]).expect("written");
    let trim = ClientRequest::Trim { offset: VolumeOffset(stripe + 512), len: 80 * stripe, fua: true };
    let id = array.sim.submit(trim);
    array.sim.wait(id).expect("trimmed");
    let now = array.sim.read(0, len).expect("readable");
    let (first, last) = (2 * stripe as usize, 81 * stripe as usize);
    assert!(now[first..last].iter().all(|&b| b == 0));
    assert!(now[..first].iter().chain(&now[last..]).all(|&b| b == 5), "ragged ends keep their bytes");
    let id =
        array.sim.submit(ClientRequest::BlockStatus { offset: VolumeOffset(512), len: len as u64 - 512 });
    let ClientReply::Extents(extents) = array.sim.wait(id).expect("answered") else { panic!("extents") };
    let shape: Vec<(u64, bool)> = extents.iter().map(|e| (e.len, e.hole)).collect();
    assert_eq!(shape, [(2 * stripe - 512, false), (79 * stripe, true), (len as u64 - 81 * stripe, false)]);
    array.assert_scrub_clean();
}

#[test]
fn members_that_cannot_punch_holes_read_as_zeroes_all_the_same() {
    let mut array = Checked::create(3, 1, 100, 20);
    let stripe = 3 * 16384u64;
    let len = array.model.len();
    array.sim.write(0, &vec![5; len]).expect("written");
    for disk in array.sim.disks.values_mut() {
        disk.cannot_zero = true;
    }
    let request = ClientRequest::WriteZeroes {
        offset: VolumeOffset(0),
        len: 90 * stripe,
        may_unmap: true,
        fast_only: false,
        fua: false,
    };
    let id = array.sim.submit(request);
    array.sim.wait(id).expect("zeroed");
    array.model[..90 * stripe as usize].fill(0);
    array.model[90 * stripe as usize..].fill(5);
    array.verify();
    let id = array.sim.submit(ClientRequest::Trim { offset: VolumeOffset(0), len: len as u64, fua: false });
    array.sim.wait(id).expect("trimmed");
    array.model.fill(0);
    array.verify();
    array.sim.settle();
    array.verify();
    array.assert_scrub_clean();
}

#[test]
fn a_replacement_that_is_lost_is_told_with_the_member_until_that_is_cleared() {
    let mut sim = SimArray::create(SimShape::new(2, 1, 16 << 10, 8), 3);
    let member = MemberIndex(1);
    let device = sim.add_blank_disk();
    let id = device.device.0;
    sim.admin(AdminRequest::Replace { member, device }).expect("admitted");
    sim.disks.get_mut(&id).expect("just added").dead = true;
    sim.settle();
    let reason = |sim: &SimArray| sim.status().members[1].reason.clone();
    assert_eq!(sim.status().members[1].state, MemberState::Online);
    let told = reason(&sim).expect("a reason");
    assert!(told.starts_with("its replacement was given up: "), "{told}");
    sim.admin(AdminRequest::Clear { member: Some(member) }).expect("cleared");
    assert_eq!(reason(&sim), None);
}
