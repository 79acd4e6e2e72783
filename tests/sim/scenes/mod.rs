//! Scenes that tests run with every rule kept, and that `mutations` runs with one rule broken.
#![allow(dead_code)] // with debug assertions alone all of them are played

pub(crate) mod changeover;
pub(crate) mod cold_pages;
pub(crate) mod lanes;
pub(crate) mod page_faults;
pub(crate) mod returning;
pub(crate) mod rollback;
pub(crate) mod trouble;
pub(crate) mod unfinished;

use calpe_core::format::ChecksumKind;
use calpe_core::testing::{Random, SimArray, SimShape};

/// Bytes of a chunk of [`filled`].
pub(crate) const CHUNK: usize = 16384;

/// A clean array of 8 stripes full of random bytes, and the expected content of its volume.
pub(crate) fn filled(data: u16, parity: u16, checksum: ChecksumKind) -> (SimArray, Vec<u8>) {
    let shape = SimShape::new(data, parity, CHUNK as u32, 8).logged(checksum, 1 << 20);
    let mut model = vec![0; shape.volume_bytes as usize];
    Random::new(11).fill(&mut model);
    let mut sim = SimArray::create(shape, 11);
    sim.write(0, &model).expect("written");
    sim.settle();
    (sim, model)
}

/// Lets this many seconds pass, executing every operation that comes up, whatever hangs meanwhile.
pub(crate) fn live(sim: &mut SimArray, seconds: u64) {
    for _ in 0..seconds * 10 {
        while sim.step() {}
        sim.sleep(100);
    }
}
