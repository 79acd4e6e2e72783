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
