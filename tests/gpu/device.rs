//! The suite of a real device: every batch that is computed there against the same job on the CPU, and
//! kernels at lengths and distances that no batch has. Without a device each test says so and passes; with
//! CALPE_GPU_TEST=require that is a failure. `scripts/gpu-test` runs it, with faults and benchmarks.
#![allow(unsafe_code)] // a device is given addresses; the bed keeps what they point to

mod bed;
mod benchmarks;
mod faults;
mod kernels;

use std::time::{Duration, Instant};

use bed::{Bed, Case};
use calpe_core::codec::{Codec, Transform};
use calpe_core::testing::Random;
use calpe_gpu::cuda::{Method, Tuning};
use calpe_gpu::device::{Device, DeviceError};

const KIB: usize = 1 << 10;

/// Lengths of columns in batches.
const LENGTHS: [usize; 4] = [4 * KIB, 8 * KIB, 12 * KIB, 64 * KIB];

/// Slots of the suite: several batches fit, and several devices beside each other.
fn small(method: Method) -> Tuning {
    Tuning { slot_bytes_max: 32 << 20, method, ..Tuning::default() }
}

fn codec(data: usize, parity: usize) -> Codec {
    Codec::new(data, parity).expect("a geometry")
}

/// A recovery of `lost` from the first k others.
fn recovery(codec: &Codec, lost: &[usize]) -> Transform {
    let columns = codec.data() + codec.parity();
    let present: Vec<usize> =
        (0..columns).filter(|column| !lost.contains(column)).take(codec.data()).collect();
    codec.recovery(&present, lost).expect("a pattern")
}

/// All sets of 1 to `most` of `columns` columns.
fn patterns(columns: usize, most: usize) -> Vec<Vec<usize>> {
    let sets = 1u32..1 << columns;
    let sets = sets.filter(|set| set.count_ones() as usize <= most);
    sets.map(|set| (0..columns).filter(|column| set >> column & 1 == 1).collect()).collect()
}

fn random_pattern(noise: &mut Random, columns: usize, most: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..columns).collect();
    noise.shuffle(&mut all);
    all.truncate(1 + noise.index(most));
    all
}

#[test]
fn every_set_of_lost_columns_of_small_codes_comes_back() {
    let Some(mut bed) = Bed::open(small(Method::Table)) else { return };
    let mut noise = Random::new(1);
    let mut checked = 0;
    for data in 1..=8 {
        for parity in 1..=8 {
            let codec = codec(data, parity);
            let mut all = patterns(data + parity, parity);
            // All of them up to 5+5; of larger codes a sample and whatever loses most.
            if data > 5 || parity > 5 {
                noise.shuffle(&mut all);
                all.sort_by_key(|lost| std::cmp::Reverse(lost.len()));
                let (most, fewer) = all.split_at(all.len().min(60));
                all = most.iter().chain(fewer.iter().step_by(1 + fewer.len() / 60)).cloned().collect();
            }
            let word = bed.codeword(&codec, 4 * KIB, &mut noise);
            for lost in all {
                bed.submit(Case::recovering(&bed, &codec, &word, &lost));
                checked += 1;
            }
        }
    }
    bed.drain();
    println!("{checked} sets of lost columns");
    assert!(checked > 5000);
}

#[test]
fn every_method_codes_every_geometry_and_length_as_the_cpu() {
    let geometries = [
        (1, 1),
        (2, 1),
        (4, 2),
        (8, 2),
        (8, 3),
        (8, 4),
        (10, 4),
        (5, 5),
        (7, 6),
        (16, 4),
        (9, 7),
        (24, 8),
        (32, 16),
    ];
    for method in [Method::Table, Method::Xor, Method::LogExp, Method::Fused] {
        let Some(mut bed) = Bed::open(small(method)) else { return };
        let mut noise = Random::new(2);
        for (data, parity) in geometries {
            let codec = codec(data, parity);
            let lost = random_pattern(&mut noise, data + parity, parity);
            for transform in [codec.encoding(), recovery(&codec, &lost)] {
                for length in LENGTHS {
                    for hash in [true, false] {
                        let case = Case::of(&bed, Some(transform.clone()), 0, length, hash, &mut noise);
                        bed.submit(case.named(format!("{method:?} {data}+{parity} {length} {hash}")));
                    }
                }
            }
        }
        bed.drain();
    }
}

#[test]
fn wide_codes_are_coded_and_recovered() {
    for method in [Method::Table, Method::LogExp] {
        let Some(mut bed) = Bed::open(small(method)) else { return };
        let mut noise = Random::new(3);
        let fixed = [(1, 254), (2, 100), (40, 33), (100, 50), (128, 127), (127, 128), (200, 55), (254, 1)];
        let random: Vec<(usize, usize)> = (0..24)
            .map(|_| {
                let columns = 2 + noise.index(254);
                let data = 1 + noise.index(columns - 1);
                (data, columns - data)
            })
            .collect();
        for (data, parity) in fixed.into_iter().chain(random) {
            let codec = codec(data, parity);
            let lost = random_pattern(&mut noise, data + parity, parity);
            for transform in [codec.encoding(), recovery(&codec, &lost)] {
                let case = Case::of(&bed, Some(transform), 0, 8 * KIB, true, &mut noise);
                bed.submit(case.named(format!("{method:?} {data}+{parity}, lost {lost:?}")));
            }
        }
        bed.drain();
    }
}

#[test]
fn changes_of_some_columns_update_all_parities() {
    let Some(mut bed) = Bed::open(small(Method::Auto)) else { return };
    let mut noise = Random::new(4);
    for (data, parity) in
        [(1, 1), (4, 2), (8, 3), (8, 4), (10, 5), (16, 6), (12, 7), (24, 8), (32, 16), (200, 55)]
    {
        let codec = codec(data, parity);
        for changed in 1..=data.min(3) {
            let mut columns: Vec<usize> = (0..data).collect();
            noise.shuffle(&mut columns);
            columns.truncate(changed);
            let transform = codec.updating(&columns).expect("data columns");
            for length in LENGTHS {
                let case = Case::of(&bed, Some(transform.clone()), 0, length, true, &mut noise);
                bed.submit(case.named(format!("{data}+{parity}, {columns:?} change, {length}")));
            }
        }
    }
    bed.drain();
}

#[test]
fn columns_are_hashed_without_a_transform_and_beyond_it_and_outputs_without_a_place() {
    let Some(mut bed) = Bed::open(small(Method::Fused)) else { return };
    let mut noise = Random::new(5);
    // Below, at and above where the kernel for few blocks ends.
    for blocks in [1, 2, 3, 31, 64, 65, 1000, 2047, 2048, 2049, 5000] {
        bed.submit(
            Case::of(&bed, None, 1, blocks * 4 * KIB, true, &mut noise).named(format!("{blocks} blocks")),
        );
    }
    for columns in [2, 7] {
        bed.submit(Case::of(&bed, None, columns, 12 * KIB, true, &mut noise));
    }
    let codec = codec(6, 3);
    for transform in [codec.encoding(), codec.updating(&[2, 5]).expect("data columns")] {
        for extra in [0, 1, 4] {
            for kept in [0, 1, 3] {
                let case = Case::of(&bed, Some(transform.clone()), extra, 64 * KIB, true, &mut noise);
                bed.submit(case.keeping(kept).named(format!("{transform:?}, {extra} more, {kept} kept")));
            }
        }
    }
    bed.drain();
}

#[test]
fn pieces_may_lie_anywhere_and_go_by_either_way() {
    // The copy engine always and never, and with lists whose entries are the smallest.
    for (engine, chunk) in [(0, 16 * KIB), (usize::MAX, 16 * KIB), (usize::MAX, 4 * KIB), (1 << 20, 64 * KIB)]
    {
        let tuning = Tuning {
            engine_run_in: engine,
            engine_run_out: engine,
            chunk_bytes: chunk,
            ..small(Method::Table)
        };
        let Some(mut bed) = Bed::open(tuning) else { return };
        let mut noise = Random::new(6);
        let encoding = codec(5, 3).encoding();
        for length in [8 * KIB, 60 * KIB, 1 << 20] {
            for piece in [4 * KIB, 12 * KIB, 64 * KIB] {
                for place in bed::Place::ALL {
                    let case = Case::of(&bed, Some(encoding.clone()), 1, length, true, &mut noise);
                    let case = case.scattered(&bed, piece, place, &mut noise);
                    bed.submit(
                        case.named(format!("pieces of {piece} of {length} {place:?}, engine from {engine}")),
                    );
                }
            }
        }
        bed.drain();
    }
}

#[test]
fn a_batch_that_does_not_fit_is_refused_and_the_next_is_computed() {
    let Some(mut bed) = Bed::open(Tuning { staging_bytes: 1 << 20, ..small(Method::Table) }) else { return };
    let mut noise = Random::new(7);
    let slot = bed.device().slot_bytes();
    let large = Case::of(&bed, None, 1, slot + 4 * KIB, true, &mut noise);
    assert!(matches!(bed.refused(large), DeviceError::Unsupported(_)), "larger than a slot");
    let outside = Case::of(&bed, None, 1, 2 << 20, true, &mut noise);
    let outside = outside.scattered(&bed, 64 * KIB, bed::Place::Unknown, &mut noise);
    assert!(matches!(bed.refused(outside), DeviceError::Unsupported(_)), "more than is staged");
    let whole = Case::of(&bed, None, 1, slot, true, &mut noise);
    bed.submit(whole.named("as large as a slot".to_owned()));
    bed.drain();
}

#[test]
fn a_matrix_that_comes_again_is_compiled_meanwhile_and_the_bytes_stay_the_same() {
    let Some(mut bed) = Bed::open(small(Method::Auto)) else { return };
    let mut noise = Random::new(8);
    let codec = codec(8, 4);
    let transforms = [codec.encoding(), recovery(&codec, &[0, 3, 9]), recovery(&codec, &[1])];
    let begun = Instant::now();
    let mut batches = 0;
    while begun.elapsed() < Duration::from_secs(3) {
        for transform in &transforms {
            bed.submit(Case::of(&bed, Some(transform.clone()), 0, 16 * KIB, true, &mut noise));
            batches += 1;
        }
    }
    bed.drain();
    println!("{batches} batches");
}

#[test]
fn two_devices_on_one_gpu_share_the_registered_memory_and_end_in_any_order() {
    let Some(mut first) = Bed::open(small(Method::Table)) else { return };
    let mut noise = Random::new(9);
    let transform = codec(4, 2).encoding();
    let mut second = first.beside(small(Method::Xor)).expect("a second device");
    for _ in 0..20 {
        first.submit(Case::of(&first, Some(transform.clone()), 0, 64 * KIB, true, &mut noise));
        second.submit(Case::of(&second, Some(transform.clone()), 0, 64 * KIB, true, &mut noise));
    }
    first.drain();
    drop(first);
    for _ in 0..20 {
        second.submit(Case::of(&second, Some(transform.clone()), 0, 64 * KIB, true, &mut noise));
    }
    second.drain();
}
