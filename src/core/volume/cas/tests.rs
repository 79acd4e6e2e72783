//! The volume on simulated disks.

use crate::format::ChecksumKind;
use crate::testing::{Random, SimArray, SimShape};
use crate::units::VolumeOffset;
use crate::volume::{ClientError, ClientRequest};

const BLOCK: usize = 4096;

fn shape() -> SimShape {
    SimShape { volume_bytes: 64 * BLOCK as u64, ..SimShape::new(2, 1, 4 * BLOCK as u32, 1) }
        .logged(ChecksumKind::Blake3, 1 << 20)
        .cas_on(64)
}

fn flush(sim: &mut SimArray) {
    let id = sim.submit(ClientRequest::Flush);
    sim.wait(id).expect("a flush");
}

#[test]
fn what_is_written_is_read_again_also_after_a_restart() {
    let mut sim = SimArray::create(shape(), 1);
    assert_eq!(sim.read(0, 8 * BLOCK).expect("a read"), vec![0; 8 * BLOCK]);
    let mut random = Random::new(2);
    let mut model = vec![0; 64 * BLOCK];
    for round in 0..60 {
        let first = random.index(model.len() / 512 - 8);
        let count = 1 + random.index((model.len() / 512 - first).min(60));
        let bytes: Vec<u8> = (0..count * 512).map(|at| (random.next_u64() >> (at % 7)) as u8).collect();
        sim.write((first * 512) as u64, &bytes).expect("a write");
        model[first * 512..(first + count) * 512].copy_from_slice(&bytes);
        if round % 7 == 0 {
            flush(&mut sim);
        }
        if round % 13 == 12 {
            flush(&mut sim);
            sim = sim.kill_and_restart(false).expect("it starts");
        }
        assert!(sim.read(0, model.len()).expect("a read") == model, "round {round}");
    }
}

/// A block that no other write has.
fn block(number: u64) -> Vec<u8> {
    let mut random = Random::new(number);
    (0..BLOCK / 8).flat_map(|_| random.next_u64().to_le_bytes()).collect()
}

fn chunks(sim: &mut SimArray) -> u64 {
    sim.cas().store.live
}

#[test]
fn a_block_that_is_stored_is_not_stored_again_also_after_a_restart() {
    let mut sim = SimArray::create(shape(), 3);
    for at in 0..16 {
        sim.write(at * BLOCK as u64, &block(at % 4)).expect("a write");
    }
    assert_eq!(chunks(&mut sim), 4);
    let same = [block(9), block(9), block(9), block(1)].concat();
    sim.write(20 * BLOCK as u64, &same).expect("a write");
    assert_eq!(chunks(&mut sim), 5, "three of one write are one chunk");
    sim.write(0, &vec![0; 16 * BLOCK]).expect("a write of zeroes");
    assert_eq!(chunks(&mut sim), 2, "zeroes are holes, and what nobody names is gone");
    for restart in 0..2 {
        flush(&mut sim);
        sim = match restart {
            0 => sim.kill_and_restart(false).expect("it starts"),
            _ => sim.stop_and_restart(false).expect("it starts"),
        };
        assert_eq!(sim.read(20 * BLOCK as u64, 4 * BLOCK).expect("a read"), same);
        sim.sleep(2000);
        sim.settle();
        sim.write(30 * BLOCK as u64, &block(9)).expect("a write");
        assert_eq!(chunks(&mut sim), 2, "it was found by its hash");
    }
}

#[test]
fn writes_that_wait_for_one_anothers_chunks_end() {
    let mut sim = SimArray::create(shape(), 4);
    sim.write(0, &block(1)).expect("a write");
    for round in 0..20 {
        let (one, other) = (block(100 + 2 * round), block(101 + 2 * round));
        let first = sim.submit_write(8 * BLOCK as u64, &[one.clone(), other.clone()].concat(), false);
        let second = sim.submit_write(16 * BLOCK as u64, &[other, one].concat(), false);
        sim.wait(first).expect("a write");
        sim.wait(second).expect("a write");
        assert_eq!(chunks(&mut sim), 3);
    }
}

#[test]
fn a_write_whose_middle_is_a_chunk_of_another_is_read_again() {
    let mut sim = SimArray::create(shape(), 5);
    let blocks: Vec<Vec<u8>> = (0..3).map(|at| block(50 + at)).collect();
    let first = sim.submit_write(0, &blocks[1], false);
    let second = sim.submit_write(8 * BLOCK as u64, &blocks.concat(), false);
    sim.wait(first).expect("a write");
    sim.wait(second).expect("a write");
    assert_eq!(sim.read(8 * BLOCK as u64, 3 * BLOCK).expect("a read"), blocks.concat());
}

/// Blocks of these fillings, one after another.
fn blocks(fillings: &[u8]) -> Vec<u8> {
    fillings.iter().flat_map(|filling| [*filling; BLOCK]).collect()
}

#[test]
fn equal_new_blocks_of_one_write_are_stored_once() {
    let mut sim = SimArray::create(shape(), 3);
    sim.write(0, &blocks(&[7, 7])).expect("a write");
    sim.write(4 * BLOCK as u64, &blocks(&[8, 7, 9, 8, 9])).expect("a write");
    assert_eq!(sim.read(0, 9 * BLOCK).expect("a read"), blocks(&[7, 7, 0, 0, 8, 7, 9, 8, 9]));
    sim.audit().expect("all is as it says");
}

/// A write with holes has several records; one of them takes off the last use of what a later one names.
#[test]
fn a_chunk_that_moves_past_a_hole_within_a_write_stays() {
    for [before, after] in [[[1, 0, 0], [0, 1, 0]], [[1, 2, 3], [3, 0, 1]], [[1, 1, 2], [0, 2, 1]]] {
        let mut sim = SimArray::create(shape(), 4);
        sim.write(0, &blocks(&before)).expect("a write");
        sim.write(0, &blocks(&after)).expect("a write");
        assert_eq!(sim.read(0, 3 * BLOCK).expect("a read"), blocks(&after), "{before:?}");
        sim.audit().expect("all is as it says");
        flush(&mut sim);
        let mut sim = sim.kill_and_restart(false).expect("it starts");
        assert_eq!(sim.read(0, 3 * BLOCK).expect("a read"), blocks(&after), "{before:?}");
        sim.audit().expect("all is as it says");
    }
}

/// More blocks than there is room for are written, and trimmed again: what was answered is there, and the
/// volume goes on.
#[test]
fn a_full_volume_refuses_writes_and_goes_on_after_trims() {
    let volume = 512;
    let shape =
        SimShape { volume_bytes: (volume * BLOCK) as u64, ..SimShape::new(2, 1, 4 * BLOCK as u32, 1) }
            .logged(ChecksumKind::Blake3, 1 << 20)
            .cas_on(32);
    let trim = |sim: &mut SimArray, model: &mut [u8], first: usize, count: usize| {
        let (offset, len) = (VolumeOffset((first * BLOCK) as u64), (count * BLOCK) as u64);
        let id = sim.submit(ClientRequest::Trim { offset, len, fua: false });
        sim.wait(id).expect("a trim");
        model[first * BLOCK..][..count * BLOCK].fill(0);
    };
    for seed in 0..8 {
        let mut sim = SimArray::create(shape, seed);
        let mut random = Random::new(seed);
        let mut model = vec![0; volume * BLOCK];
        let (mut written, mut refused) = (0, 0);
        for round in 0..12 {
            for _ in 0..120 {
                let first = random.index(volume);
                let count = 1 + random.index((volume - first).min(1 + round));
                let mut bytes = vec![0; count * BLOCK];
                random.fill(&mut bytes);
                let range = first * BLOCK..(first + count) * BLOCK;
                match sim.write(range.start as u64, &bytes) {
                    Ok(()) => {
                        model[range].copy_from_slice(&bytes);
                        written += 1;
                    }
                    Err(ClientError::NoSpace) => {
                        refused += 1;
                        // Some of its blocks may be written.
                        let now = sim.read(range.start as u64, range.len()).expect("a read");
                        for (at, block) in now.chunks(BLOCK).enumerate() {
                            let old = &mut model[range.start + at * BLOCK..][..BLOCK];
                            assert!(block == &*old || *block == bytes[at * BLOCK..][..BLOCK]);
                            old.copy_from_slice(block);
                        }
                        let first = random.index(volume - 16);
                        trim(&mut sim, &mut model, first, 16);
                    }
                    Err(error) => panic!("seed {seed}, round {round}: {error}"),
                }
            }
            assert!(sim.read(0, model.len()).expect("a read") == model, "seed {seed}, round {round}");
            sim.audit().expect("all is as it says");
            if round % 3 == 1 {
                flush(&mut sim);
                sim = sim.kill_and_restart(false).expect("it starts");
                assert!(sim.read(0, model.len()).expect("a read") == model, "seed {seed}, round {round}");
            }
        }
        assert!(written > 200 && refused > 50, "seed {seed}: {written} written, {refused} refused");
        trim(&mut sim, &mut model, 0, volume);
        for block in 0..40 {
            sim.write((block * BLOCK) as u64, &[block as u8 + 1; BLOCK]).expect("there is room again");
        }
        sim.audit().expect("all is as it says");
    }
}
