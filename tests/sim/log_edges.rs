//! Edges of the redo log: what it writes for a lone small write, arrays without parity, members without room,
//! and rows that a replay finds lost.

use calpe_core::block_io::IoOp;
use calpe_core::format::{COPY_BYTES, ChecksumKind, MemberState, RegionKind, Superblock};
use calpe_core::testing::{Random, SimArray, SimShape};
use calpe_core::units::{MemberIndex, VolumeOffset};
use calpe_core::volume::{AdminRequest, ArrayState, ClientError, MemberCondition};
use std::ops::Range;

const BLOCK: usize = 4096;
const CHUNK: usize = 16384;
const RING: u64 = 1 << 20;

/// An array with a redo log and the expected content of its volume.
struct Checked {
    sim: SimArray,
    model: Vec<u8>,
    log: Range<u64>,
    pages: Range<u64>,
}

impl Checked {
    /// A clean array full of random bytes.
    fn filled(data: u16, parity: u16, checksum: ChecksumKind) -> Checked {
        let shape = SimShape::new(data, parity, CHUNK as u32, 8).logged(checksum, RING);
        let mut model = vec![0; shape.volume_bytes as usize];
        Random::new(9).fill(&mut model);
        let mut sim = SimArray::create(shape, 9);
        sim.write(0, &model).expect("written");
        sim.settle();
        let superblock = Superblock::decode(&sim.disks[&0].peek(0, COPY_BYTES)).expect("a superblock");
        let region = |kind| {
            let region = superblock.region(kind).expect("a logged array");
            region.offset.0..region.offset.0 + region.len
        };
        let (log, pages) = (region(RegionKind::Log), region(RegionKind::Pages));
        Checked { sim, model, log, pages }
    }

    /// Executes the next operation. Returns what it was: disk, offset and length of a write.
    fn step(&mut self) -> Option<Option<(u32, u64, usize)>> {
        let mut step = None;
        let any = self.sim.step_where(|disk, op| {
            let first = step.is_none();
            if first {
                step = Some(match op {
                    IoOp::Write { offset, buf, .. } => Some((disk, offset.0, buf.len())),
                    _ => None,
                });
            }
            first
        });
        step.filter(|_| any)
    }

    /// Executes everything until nothing is left to do; returns the writes.
    fn writes(&mut self) -> Vec<(u32, u64, usize)> {
        let (mut writes, mut quiet) = (Vec::new(), 0);
        while quiet < 40 {
            match self.step() {
                Some(write) => {
                    quiet = 0;
                    writes.extend(write);
                }
                None => {
                    quiet += 1;
                    self.sim.sleep(100);
                }
            }
        }
        writes
    }

    fn put(&mut self, offset: usize, byte: u8, len: usize) -> u64 {
        self.model[offset..offset + len].fill(byte);
        self.sim.submit_write(offset as u64, &vec![byte; len], true)
    }

    #[track_caller]
    fn verify(&mut self) {
        let read = self.sim.read(0, self.model.len()).expect("every byte can be read");
        assert!(read == self.model, "{:?}", self.sim.notices);
    }

    #[track_caller]
    fn assert_scrub_clean(&mut self) {
        self.sim.assert_scrub_clean();
    }

    fn restarted(self) -> Checked {
        let Checked { sim, model, log, pages } = self;
        Checked { sim: sim.kill_and_restart(false).expect("it starts"), model, log, pages }
    }
}

fn is_serving(sim: &mut SimArray) -> bool {
    sim.settle();
    sim.status().log == calpe_core::volume::LogState::Serving
}

#[test]
fn a_lone_small_write_is_written_twice_on_each_column_that_it_changes() {
    for (data, parity) in [(2, 1), (4, 2), (8, 3), (5, 5), (3, 0)] {
        for checksum in [ChecksumKind::Blake3, ChecksumKind::Crc32c, ChecksumKind::None] {
            let mut array = Checked::filled(data, parity, checksum);
            // The first write after a quiet time marks the array dirty; it is not the one that is measured.
            array.put(5 * CHUNK, 1, BLOCK);
            array.writes();
            array.put(BLOCK, 2, BLOCK);
            let writes = array.writes();
            let within = |range: &Range<u64>| {
                let all = writes.iter().filter(|(_, offset, _)| range.contains(offset));
                all.map(|(_, _, len)| *len).collect::<Vec<usize>>()
            };
            let (log, in_place) = (within(&array.log), within(&array.sim.data_region()));
            let pages = within(&array.pages);
            // Every piece has a header of one block; the rest is payload.
            let payload: usize = log.iter().map(|len| len - BLOCK).sum();
            let (width, changed) = (usize::from(data + parity), 1 + usize::from(parity));
            let what =
                format!("{data}+{parity} {checksum}: log {log:?}, in place {in_place:?}, pages {pages:?}");
            assert_eq!(payload, changed * BLOCK, "{what}");
            assert_eq!(in_place.iter().sum::<usize>(), changed * BLOCK, "{what}");
            assert_eq!(payload + in_place.iter().sum::<usize>(), 2 * changed * BLOCK, "{what}");
            // The batch with the manifest, a note that it is durable, and the tail that frees it.
            assert!(log.len() <= 3 * width && log.len().is_multiple_of(width), "{what}");
            let checksummed = usize::from(checksum != ChecksumKind::None);
            assert_eq!(pages.iter().sum::<usize>(), checksummed * changed * BLOCK, "{what}");
            array.verify();
        }
    }
}

/// Bytes written to the data of members, and bytes of payload in their logs.
fn data_and_log(array: &mut Checked, writes: &[(u32, u64, usize)]) -> (usize, usize) {
    let in_place = array.sim.data_region();
    let bytes = |range: &Range<u64>, less: usize| -> usize {
        let of_range = writes.iter().filter(|(_, offset, _)| range.contains(offset));
        of_range.map(|(_, _, len)| len.saturating_sub(less)).sum()
    };
    // What is logged of these stripes fits into one block of header, and so does a note.
    (bytes(&in_place, 0), bytes(&array.log, BLOCK))
}

#[test]
fn a_large_part_is_written_once_with_the_rest_of_its_stripe() {
    for (offset, len) in
        [(0, 3 * CHUNK), (CHUNK + 512, 2 * CHUNK), (CHUNK / 2, 3 * CHUNK), (2 * CHUNK, 2 * CHUNK)]
    {
        let mut array = Checked::filled(4, 2, ChecksumKind::Blake3);
        array.put(5 * 4 * CHUNK, 1, BLOCK);
        array.writes();
        array.put(2 * 4 * CHUNK + offset, 2, len);
        let writes = array.writes();
        assert_eq!(data_and_log(&mut array, &writes), (6 * CHUNK, 0), "{len} bytes at {offset}: {writes:?}");
        array.verify();
        array.assert_scrub_clean();
        let mut array = array.restarted();
        array.verify();
        array.assert_scrub_clean();
    }
}

#[test]
fn the_first_large_part_of_a_stripe_leaves_the_rest_unwritten() {
    let shape = SimShape::new(4, 2, CHUNK as u32, 8).logged(ChecksumKind::Blake3, RING);
    let mut sim = SimArray::create(shape, 9);
    sim.write(CHUNK as u64, &[7; 2 * CHUNK]).expect("written");
    sim.settle();
    let written = sim
        .disks
        .values()
        .filter(|disk| disk.peek(sim.data_region().start, CHUNK).iter().any(|&byte| byte != 0));
    assert_eq!(written.count(), 2 + 2, "two columns of data, and parity");
    for lost in 0..2 {
        sim.admin(AdminRequest::Fail { member: MemberIndex(lost) }).expect("it can be failed");
        let read = sim.read(0, 4 * CHUNK).expect("it can be read");
        assert!(read[..CHUNK].iter().chain(&read[3 * CHUNK..]).all(|&byte| byte == 0));
        assert!(read[CHUNK..3 * CHUNK].iter().all(|&byte| byte == 7));
    }
}

#[test]
fn a_large_part_goes_through_the_log_where_the_rest_cannot_be_had_or_has_no_slot() {
    // A part of this length would be written with its stripe.
    let len = 3 * CHUNK;
    let mut array = Checked::filled(4, 2, ChecksumKind::Blake3);
    let first = array.sim.data_region().start;
    // No block of the first row of a slot can be read.
    for disk in array.sim.disks.values_mut() {
        disk.bad_blocks.insert(first / BLOCK as u64);
    }
    array.put(0, 2, len);
    let writes = array.writes();
    assert!(data_and_log(&mut array, &writes).1 >= len, "it is logged: {writes:?}");
    assert_eq!(array.sim.read(0, len).expect("what was written can be read"), array.model[..len]);
    array.sim.settle();

    // No free slot is spared for it where few are left.
    let shape = SimShape::new(4, 2, CHUNK as u32, 8).logged(ChecksumKind::Blake3, RING);
    let mut sim = SimArray::create(SimShape { free_slots: Some(0), ..shape }, 9);
    sim.write(0, &vec![1; shape.volume_bytes as usize]).expect("the first writes need none");
    sim.write(0, &vec![2; len]).expect("written through the log");
    sim.settle();
    assert!(sim.read(0, len).expect("it can be read").iter().all(|&byte| byte == 2));
}

#[test]
fn requests_of_a_stream_are_gathered_into_whole_stripes() {
    // (Bytes of a request, where the stream begins in its stripe.)
    for (len, start) in [(3 * CHUNK, 0), (3 * CHUNK, 512), (4 * CHUNK, CHUNK), (6 * CHUNK, 2 * BLOCK)] {
        let mut array = Checked::filled(4, 2, ChecksumKind::Blake3);
        array.put(7 * 4 * CHUNK, 1, BLOCK);
        array.writes();
        let stripes = 6;
        let (mut at, end) = (start, stripes * 4 * CHUNK);
        let mut ids = Vec::new();
        while at < end {
            let len = len.min(end - at);
            array.model[at..at + len].fill(at as u8 | 1);
            ids.push(array.sim.submit_write(at as u64, &vec![at as u8 | 1; len], false));
            at += len;
        }
        let writes = array.writes();
        let (data, logged) = data_and_log(&mut array, &writes);
        // The first stripe shows that it is a stream: its parts are written for themselves.
        let gathered = (stripes - 1) * 6 * CHUNK;
        assert!(
            data <= gathered + 3 * 6 * CHUNK && data >= gathered,
            "{len} at {start}: {data} bytes of data"
        );
        assert!(logged <= 3 * 6 * CHUNK, "{len} at {start}: {logged} bytes in logs");
        for id in ids {
            array.sim.poll(id).expect("it has ended").expect("it is written");
        }
        array.verify();
        let mut array = array.restarted();
        array.verify();
        array.assert_scrub_clean();
    }
}

#[test]
fn as_many_writes_gather_in_a_ring_before_they_go_in_place_however_many_members_take_part_in_each() {
    // An eighth of a ring holds the images of this many chunks, with room for headers.
    let writes = RING as usize / 8 / CHUNK - 1;
    for (data, parity) in [(4, 2), (8, 3), (20, 10), (40, 40)] {
        let mut array = Checked::filled(data, parity, ChecksumKind::Crc32c);
        let in_place = array.sim.data_region();
        for chunk in 0..writes {
            let offset = chunk * usize::from(data) * CHUNK;
            array.model[offset..offset + CHUNK].fill(7);
            let write = array.sim.submit_write(offset as u64, &[7; CHUNK], false);
            while let Some(step) = array.step() {
                assert!(
                    step.is_none_or(|(_, offset, _)| !in_place.contains(&offset)),
                    "{data}+{parity}: write {chunk} of {writes} goes in place"
                );
            }
            array.sim.poll(write).expect("nothing is left to do").expect("written");
        }
        array.verify();
        array.assert_scrub_clean();
    }
}

#[test]
fn an_array_without_parity_keeps_what_was_acknowledged_over_kills_and_power_cuts() {
    for checksum in [ChecksumKind::Crc32c, ChecksumKind::None] {
        for seed in 0..40 {
            let mut array = Checked::filled(3, 0, checksum);
            let mut random = Random::new(seed);
            for round in 0..4 {
                for _ in 0..random.below(6) {
                    let len = if random.one_in(3) { 3 * CHUNK } else { BLOCK };
                    let at = random.below((array.model.len() / len) as u64) as usize * len;
                    let id = array.put(at, round + 1, len);
                    array.sim.wait(id).expect("written");
                }
                for _ in 0..random.below(40) {
                    array.sim.step();
                }
                let Checked { sim, model, log, pages } = array;
                let sim = if random.one_in(2) {
                    sim.kill_and_restart(false)
                } else {
                    sim.power_cut_and_restart(false)
                };
                array = Checked { sim: sim.expect("it starts"), model, log, pages };
                assert!(is_serving(&mut array.sim), "{:?}", array.sim.status());
                array.verify();
            }
            array.assert_scrub_clean();
        }
    }
}

#[test]
fn damage_that_no_parity_makes_up_for_is_an_error_where_checksums_tell_and_nowhere_else() {
    let mut array = Checked::filled(3, 0, ChecksumKind::Crc32c);
    let disk = array.sim.disk_of(1).expect("a disk");
    let region = array.sim.data_region();
    let held = array.sim.disks[&disk].written_blocks(region.start / BLOCK as u64..region.end / BLOCK as u64);
    array.sim.disks.get_mut(&disk).expect("a disk").flip(held[0] * BLOCK as u64 + 7, 1);
    let mut errors = 0;
    for at in (0..array.model.len()).step_by(BLOCK) {
        match array.sim.read(at as u64, BLOCK) {
            Ok(read) => assert!(read == array.model[at..at + BLOCK]),
            Err(error) => {
                assert_eq!(error, ClientError::Io);
                errors += 1;
            }
        }
    }
    assert!(errors <= 1, "{errors}");
    assert_eq!(array.sim.status().lost.len(), errors);
}

#[test]
fn a_member_whose_log_stays_without_room_leaves_and_the_others_serve() {
    for checksum in [ChecksumKind::Crc32c, ChecksumKind::None] {
        let mut array = Checked::filled(3, 1, checksum);
        let disk = array.sim.disk_of(2).expect("a disk");
        array.sim.disks.get_mut(&disk).expect("a disk").full = true;
        let id = array.put(BLOCK, 7, BLOCK);
        array.sim.wait(id).expect("within the budget");
        array.sim.settle();
        let status = array.sim.status();
        assert_eq!(status.state, ArrayState::Degraded);
        let member = &status.members[2];
        assert_eq!((member.state, member.counters.write_errors), (MemberState::Missing, 0));
        assert_eq!(member.conditions, [MemberCondition::Full]);
        let reason = member.reason.as_ref().expect("a reason");
        assert!(reason.contains("full") && reason.contains("space"), "{reason}");
        array.verify();
    }
}

#[test]
fn an_array_without_parity_whose_log_has_no_room_waits_until_there_is_some() {
    let mut array = Checked::filled(2, 0, ChecksumKind::Crc32c);
    let before = array.model.clone();
    let disk = array.sim.disk_of(1).expect("a disk");
    array.sim.disks.get_mut(&disk).expect("a disk").full = true;
    let id = array.put(BLOCK, 7, BLOCK);
    assert_eq!(array.sim.wait(id).map(|_| ()), Err(ClientError::NoSpace));
    let status = array.sim.status();
    assert_eq!(
        (status.state, &status.members[1].conditions[..]),
        (ArrayState::Online, &[MemberCondition::Full][..])
    );
    array.sim.disks.get_mut(&disk).expect("a disk").full = false;
    assert!(is_serving(&mut array.sim), "{:?}", array.sim.status());
    // Writes that were not acknowledged may or may not have happened.
    let read = array.sim.read(0, before.len()).expect("every byte can be read");
    assert!(read == array.model || read == before);
    array.assert_scrub_clean();
}

#[test]
fn rows_that_a_replay_finds_lost_are_listed_at_once_and_heal_when_they_are_written() {
    let mut array = Checked::filled(2, 1, ChecksumKind::Crc32c);
    let at = 3 * 2 * CHUNK + BLOCK;
    let id = array.put(at, 5, BLOCK);
    // Up to the note that says that the write is flushed, and no further.
    let mut images = Vec::new();
    let mut notes = 0;
    while notes < 3 {
        match array.step() {
            Some(Some((disk, offset, len))) if array.log.contains(&offset) => {
                let payload = offset + BLOCK as u64..offset + len as u64;
                notes += usize::from(payload.is_empty() && !images.is_empty());
                images.extend((!payload.is_empty()).then_some((disk, payload.start)));
            }
            Some(Some((_, offset, _))) => assert!(!array.sim.data_region().contains(&offset), "in place"),
            Some(None) => {}
            None => array.sim.sleep(100),
        }
    }
    assert!(matches!(array.sim.poll(id), Some(Ok(_))), "acknowledged");
    assert_eq!(images.len(), 2, "data and parity");
    for (disk, offset) in images {
        array.sim.disks.get_mut(&disk).expect("a disk").flip(offset + 9, 4);
    }
    let mut array = array.restarted();
    // No client has read anything yet.
    assert!(is_serving(&mut array.sim), "{:?}", array.sim.status());
    assert_eq!(array.sim.status().lost, [(VolumeOffset(at as u64), BLOCK as u64)], "{:?}", array.sim.notices);
    assert_eq!(array.sim.read(at as u64, BLOCK), Err(ClientError::Io));
    let id = array.put(at, 6, BLOCK);
    array.sim.wait(id).expect("a write heals");
    assert_eq!(array.sim.status().lost, []);
    array.verify();
    array.assert_scrub_clean();
}

#[test]
fn a_scrub_looks_at_pages_that_were_being_written_when_it_came_to_them() {
    let mut array = Checked::filled(2, 1, ChecksumKind::Crc32c);
    array.put(BLOCK, 3, BLOCK);
    array.writes();
    array.put(BLOCK, 4, BLOCK);
    let page_write = |array: &Checked| {
        let mut queued = array.sim.queued().filter_map(|(disk, op)| match op {
            IoOp::Write { offset, .. } if array.pages.contains(&offset.0) => Some((disk, offset.0)),
            _ => None,
        });
        queued.next()
    };
    let (disk, offset) = loop {
        if let Some(write) = page_write(&array) {
            break write;
        }
        if array.step().is_none() {
            array.sim.sleep(100);
        }
    };
    // The older version, in the other place of the copy.
    let other = array.pages.start + ((offset - array.pages.start) ^ BLOCK as u64);
    array.sim.disks.get_mut(&disk).expect("a disk").flip(other + 100, 1);
    array.sim.submit_admin(AdminRequest::ScrubStart);
    // Executes everything but that write, so the scrub reaches the page first.
    for _ in 0..200 {
        if !array.sim.step_where(|_, op| !matches!(op, IoOp::Write { offset: at, .. } if at.0 == offset)) {
            array.sim.sleep(100);
        }
    }
    array.sim.settle();
    let scrub = array.sim.status().last_scrub.expect("the scrub has ended");
    assert_eq!((scrub.errors, scrub.repaired), (1, 1), "{:?}", array.sim.notices);
    array.assert_scrub_clean();
    array.verify();
}
