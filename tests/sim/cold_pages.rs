//! Pages of checksums that are not in the cache: what it costs to read them, and that nothing wrong is
//! believed.

use crate::scenes::cold_pages::{
    a_device_that_joins_without_pages, copies_that_lost_a_write, old_blocks_and_pages_read_elsewhere,
    one_trouble_after_another, shape, with_an_eighth_of_the_pages, writes_of_pages_cut_off,
};
use calpe_core::block_io::IoOp;
use calpe_core::testing::{Random, SimArray};

const BLOCK: usize = 4096;

fn bytes_read(sim: &SimArray) -> u64 {
    sim.disks.values().map(|disk| disk.bytes_read).sum()
}

/// Reads 4 KiB at random; returns the bytes that members read for each of them.
fn random_reads(sim: &mut SimArray, model: &[u8], reads: u64, seed: u64) -> u64 {
    let mut random = Random::new(seed);
    let before = bytes_read(sim);
    for _ in 0..reads {
        let start = random.below((model.len() / BLOCK) as u64) as usize * BLOCK;
        assert!(sim.read(start as u64, BLOCK).expect("readable") == model[start..start + BLOCK]);
    }
    (bytes_read(sim) - before) / reads
}

#[test]
fn a_read_whose_page_is_not_cached_costs_one_page_beside_its_data() {
    let (mut sim, model) = with_an_eighth_of_the_pages(1);
    let before = sim.status().page_cache;
    let cost = random_reads(&mut sim, &model, 1000, 2);
    assert!(cost <= 8704, "{cost} bytes");
    let after = sim.status().page_cache;
    let (hits, misses) = (after.hits - before.hits, after.misses - before.misses);
    assert_eq!(hits + misses, 1000);
    assert!((800..950).contains(&misses), "{misses} misses with a cache of an eighth");
    assert!(after.pages_max * 8 <= after.pages_needed + 8 && after.pages <= after.pages_max, "{after:?}");
}

#[test]
fn a_page_and_the_data_behind_it_are_read_at_the_same_time() {
    let (mut sim, model) = with_an_eighth_of_the_pages(3);
    // The page of the first rows was pushed out by those of all others.
    let id = sim.submit_read(0, BLOCK);
    let lengths: Vec<usize> = sim
        .queued()
        .map(|(_, op)| match op {
            IoOp::Read { buf, .. } => buf.len(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(lengths, [BLOCK; 2]);
    sim.wait(id).expect("readable");
    // Whichever comes first, the read waits for both.
    let data = sim.data_region();
    for data_first in [false, true] {
        for start in (0..model.len()).step_by(model.len() / 40 / BLOCK * BLOCK) {
            let id = sim.submit_read(start as u64, BLOCK);
            let is_wanted = |_: u32, op: &IoOp| match op {
                IoOp::Read { offset, .. } => data.contains(&offset.0) == data_first,
                _ => false,
            };
            let was_cold = sim.queued().count() == 2;
            if sim.step_where(is_wanted) && was_cold {
                assert!(sim.poll(id).is_none(), "half of it is enough");
            }
            sim.wait(id).expect("readable");
        }
    }
}

#[test]
fn the_pages_of_a_stream_are_there_before_it_needs_them() {
    let (mut sim, model) = with_an_eighth_of_the_pages(4);
    let start = 4 << 20;
    for at in (start..start + (3 << 20)).step_by(64 << 10) {
        sim.read(at as u64, 64 << 10).expect("readable");
    }
    sim.settle();
    let before = sim.status().page_cache;
    for at in (start + (3 << 20)..model.len()).step_by(64 << 10) {
        sim.read(at as u64, 64 << 10).expect("readable");
        sim.settle();
    }
    let after = sim.status().page_cache;
    assert_eq!(after.misses, before.misses, "of {} pages", after.hits - before.hits);
    // Random reads load nothing but what they need, see the first test.
}

#[test]
fn copies_of_another_version_are_not_used() {
    for (data, parity, seeds) in [(2, 1, 0..3), (4, 2, 0..2)] {
        for seed in seeds {
            copies_that_lost_a_write(shape(data, parity), seed).expect("all is there");
        }
    }
}

#[test]
fn a_write_of_a_page_that_was_read_from_one_copy_spares_the_newest_version() {
    for (data, parity) in [(2, 1), (4, 2)] {
        for seed in 0..2 {
            writes_of_pages_cut_off(shape(data, parity), seed).expect("all is there");
        }
    }
}

#[test]
fn old_blocks_are_not_read_elsewhere_by_old_pages() {
    for seed in 0..5 {
        old_blocks_and_pages_read_elsewhere(shape(2, 1), seed).expect("nothing old");
        old_blocks_and_pages_read_elsewhere(shape(3, 2), seed).expect("nothing old");
    }
}

#[test]
fn the_pages_that_a_device_joined_without_are_not_taken_to_be_on_it() {
    for seed in 0..3 {
        a_device_that_joins_without_pages(shape(2, 1), seed).expect("all is there");
    }
}

#[test]
fn nothing_is_lost_where_pages_are_cold_and_one_trouble_follows_another() {
    for seed in 0..4 {
        one_trouble_after_another(shape(2, 1), seed, 5).expect("all is there");
        one_trouble_after_another(shape(4, 2), seed, 4).expect("all is there");
        one_trouble_after_another(shape(2, 3), seed, 3).expect("all is there");
    }
}
