//! Kernels by themselves, at lengths and distances that no batch has, against their definitions.

use calpe_gpu::cuda::raw::{Layout, POISON, RawKernels, reference};
use calpe_gpu::cuda::{Method, Tuning};
use sha2::{Digest as _, Sha256};

use super::bed::{driver, turn};
use super::codec;
use calpe_core::testing::Random;

fn open() -> Option<RawKernels> {
    driver(Tuning::default())?;
    Some(RawKernels::open(0).unwrap_or_else(|error| panic!("opening the first device: {error}")))
}

fn check(kernels: &mut RawKernels, method: Method, matrix: &[u8], layout: &Layout, input: &[u8]) {
    let got = kernels
        .code(method, matrix, layout, input)
        .unwrap_or_else(|error| panic!("{method:?}, {layout:?}: {error}"));
    let wanted = reference(matrix, layout, input);
    if let Some(at) = got.iter().zip(&wanted).position(|(got, wanted)| got != wanted) {
        let wrong = got.iter().zip(&wanted).filter(|(got, wanted)| got != wanted).count();
        let place = at.checked_sub(layout.skip).map(|at| (at / layout.output_ld, at % layout.output_ld));
        panic!(
            "{method:?}, {layout:?}: {wrong} of {} bytes are wrong, first at (row, byte) {place:?}: {:02x} for {:02x}",
            got.len(),
            got[at],
            wanted[at]
        );
    }
}

#[test]
fn the_published_vector_comes_out_of_every_kernel() {
    let _turn = turn();
    let Some(mut kernels) = open() else { return };
    let input: Vec<u8> = (0..10usize)
        .flat_map(|i| (0..64usize).map(move |j| ((31 * i + 7 * j + (i * j) % 251) % 256) as u8))
        .collect();
    let transform = codec(10, 4).encoding();
    assert_eq!(transform.matrix()[..10], [129, 150, 175, 184, 210, 196, 254, 232, 3, 2]);
    let layout = Layout { skip: 0, input_ld: 64, output_ld: 64, bytes: 64, inputs: 10, outputs: 4 };
    for method in [Method::Table, Method::LogExp, Method::Xor] {
        let parities = kernels
            .code(method, transform.matrix(), &layout, &input)
            .unwrap_or_else(|error| panic!("{method:?}: {error}"));
        let digest = Sha256::digest(&parities);
        assert_eq!(digest[..8], [0x8b, 0xd0, 0x31, 0xe6, 0x34, 0x2d, 0xb7, 0xe7], "{method:?}");
    }
}

#[test]
fn logarithms_take_any_length_distance_and_address() {
    let _turn = turn();
    let Some(mut kernels) = open() else { return };
    let mut noise = Random::new(30);
    for (inputs, outputs) in [
        (1, 1),
        (2, 2),
        (5, 3),
        (4, 4),
        (7, 5),
        (10, 6),
        (3, 7),
        (8, 8),
        (6, 9),
        (9, 16),
        (5, 17),
        (128, 127),
        (254, 1),
    ] {
        let mut matrix = vec![0; inputs * outputs];
        noise.fill(&mut matrix);
        for bytes in [0, 1, 2, 3, 4, 5, 63, 1023, 1025, 4095, 4096, 4097, 70_001] {
            if bytes * inputs > 1 << 20 {
                continue;
            }
            for (skip, more) in [(0, 0), (0, 1), (1, 3), (2, 2), (4, 4)] {
                let ld = (bytes + more).max(1);
                let layout = Layout { skip, input_ld: ld, output_ld: ld + more, bytes, inputs, outputs };
                let mut input = vec![0; skip + inputs * ld];
                noise.fill(&mut input);
                check(&mut kernels, Method::LogExp, &matrix, &layout, &input);
            }
        }
    }
}

#[test]
fn tables_and_programs_take_any_matrix_and_multiple_of_sixteen() {
    let _turn = turn();
    let Some(mut kernels) = open() else { return };
    let mut noise = Random::new(31);
    let shapes = [
        (1, 1),
        (2, 2),
        (5, 3),
        (4, 4),
        (7, 5),
        (3, 6),
        (10, 7),
        (8, 8),
        (6, 9),
        (16, 12),
        (11, 17),
        (24, 8),
    ];
    for (inputs, outputs) in shapes {
        let mut matrix = vec![0; inputs * outputs];
        noise.fill(&mut matrix);
        // Factors that are special: nothing, the column itself, its double; a whole row of zeroes.
        matrix
            .iter_mut()
            .step_by(7)
            .zip([0, 1, 2].into_iter().cycle())
            .for_each(|(factor, special)| *factor = special);
        if outputs > 2 {
            matrix[inputs..2 * inputs].fill(0);
        }
        for bytes in [0, 16, 32, 2032, 4096, 4112, 65_552] {
            for more in [0, 16, 240] {
                let layout = Layout {
                    skip: more,
                    input_ld: bytes + more,
                    output_ld: (bytes + 2 * more).max(16),
                    bytes,
                    inputs,
                    outputs,
                };
                let mut input = vec![0; more + inputs * layout.input_ld + 16];
                noise.fill(&mut input);
                check(&mut kernels, Method::Table, &matrix, &layout, &input);
                // Each is assembled anew: a few of them.
                if more == 16 && [16, 4112, 65_552].contains(&bytes) {
                    check(&mut kernels, Method::Xor, &matrix, &layout, &input);
                }
            }
        }
    }
}

#[test]
fn blake3_of_blocks_and_chunks_is_blake3() {
    let _turn = turn();
    let Some(kernels) = open() else { return };
    let mut noise = Random::new(32);
    let mut data = vec![0; 6 << 20];
    noise.fill(&mut data);
    for blocks in [0, 1, 2, 3, 5, 31, 63, 64, 65, 127, 255, 257, 1000] {
        let part = &data[..blocks * 4096];
        let wanted: Vec<[u8; 32]> = part.chunks(4096).map(|block| *blake3::hash(block).as_bytes()).collect();
        for lanes in [false, true] {
            let got =
                kernels.blake3_4k(part, lanes).unwrap_or_else(|error| panic!("{blocks} blocks: {error}"));
            assert_eq!(got.len(), blocks);
            for (at, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
                assert_eq!(got[..], wanted[..16], "block {at} of {blocks}, lanes: {lanes}");
            }
        }
    }
    for shift in 12..=16 {
        let block_bytes = 1usize << shift;
        for blocks in [1, 2, 3, 7, 33] {
            let part = &data[..blocks * block_bytes];
            let got = kernels
                .blake3_blocks(part, block_bytes)
                .unwrap_or_else(|error| panic!("{blocks} of {block_bytes}: {error}"));
            for (at, (got, block)) in got.iter().zip(part.chunks(block_bytes)).enumerate() {
                assert_eq!(
                    got,
                    blake3::hash(block).as_bytes(),
                    "block {at} of {blocks}, {block_bytes} bytes"
                );
            }
        }
    }
    let lengths = [
        0, 1, 3, 4, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049, 3072, 3073, 4095, 4096, 4097, 8193,
        31_744, 32_767, 32_768, 32_769, 33_793, 65_536, 65_537, 98_305, 131_073, 1_048_576, 1_048_579,
    ];
    // Behind one another, so that most begin at an odd place.
    let mut offsets = vec![0u64];
    for length in lengths {
        offsets.push(offsets[offsets.len() - 1] + length);
    }
    let got = kernels.blake3_chunks(&data, &offsets).unwrap_or_else(|error| panic!("chunks: {error}"));
    for (at, (got, pair)) in got.iter().zip(offsets.windows(2)).enumerate() {
        let chunk = &data[pair[0] as usize..pair[1] as usize];
        assert_eq!(got, blake3::hash(chunk).as_bytes(), "chunk {at} of {} bytes at {}", chunk.len(), pair[0]);
    }
}

#[test]
fn the_reference_leaves_what_is_not_an_output_alone() {
    let layout = Layout { skip: 3, input_ld: 5, output_ld: 7, bytes: 4, inputs: 2, outputs: 2 };
    let input: Vec<u8> = (0..13).collect();
    let got = reference(&[1, 0, 1, 1], &layout, &input);
    assert_eq!(got.len(), 20);
    assert_eq!(got[3..7], input[3..7]);
    assert_eq!(got[10..14], [3 ^ 8, 4 ^ 9, 5 ^ 10, 6 ^ 11]);
    assert!(got[..3].iter().chain(&got[7..10]).chain(&got[14..]).all(|&byte| byte == POISON));
}
