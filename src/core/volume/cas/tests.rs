//! The volume on simulated disks.

use crate::format::ChecksumKind;
use crate::testing::{Random, SimArray, SimShape};
use crate::volume::ClientRequest;

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
