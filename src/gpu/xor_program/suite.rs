//! What every program must keep: the bytes of the codec's portable engine for codes and recoveries,
//! those of plain multiplication for any matrix, at boundary lengths; and the operations and live
//! words that kernels count on.

use super::interpreter::double;
use super::{Op, XorProgram};
use calpe_core::codec::{COLUMNS_MAX, Codec, Engine};
use calpe_core::testing::Noise;

const POISON: u8 = 0xA5;

/// Multiplication straight from the definition: shift, add, reduce.
fn multiply(a: u8, b: u8) -> u8 {
    let mut wide = (0..8).filter(|bit| b >> bit & 1 == 1).fold(0u16, |sum, bit| sum ^ u16::from(a) << bit);
    for bit in (8..16).rev() {
        if wide >> bit & 1 == 1 {
            wide ^= 0x11D << (bit - 8);
        }
    }
    wide as u8
}

fn slices(columns: &[Vec<u8>]) -> Vec<&[u8]> {
    columns.iter().map(Vec::as_slice).collect()
}

fn run(program: &XorProgram, inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut outputs = vec![vec![POISON; inputs[0].len()]; program.outputs()];
    let mut views: Vec<&mut [u8]> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
    program.run(&slices(inputs), &mut views);
    outputs
}

fn recover(codec: &Codec, present: &[usize], columns: &[Vec<u8>], wanted: &[usize]) -> Vec<Vec<u8>> {
    let present: Vec<(usize, &[u8])> = present.iter().copied().zip(slices(columns)).collect();
    let mut outputs = vec![vec![0; columns[0].len()]; wanted.len()];
    let mut views: Vec<(usize, &mut [u8])> =
        wanted.iter().copied().zip(outputs.iter_mut().map(Vec::as_mut_slice)).collect();
    codec.recover(&present, &mut views).expect("recover");
    outputs
}

fn portable(data: usize, parity: usize) -> Codec {
    Codec::with_engine(data, parity, Engine::Portable).expect("codec")
}

/// The factors of `wanted` columns over `present` ones: what the codec makes of unit vectors.
fn matrix(codec: &Codec, present: &[usize], wanted: &[usize]) -> Vec<u8> {
    let mut units = vec![vec![0; present.len()]; present.len()];
    for (at, unit) in units.iter_mut().enumerate() {
        unit[at] = 1;
    }
    recover(codec, present, &units, wanted).concat()
}

fn encoder(data: usize, parity: usize) -> XorProgram {
    let (present, wanted): (Vec<usize>, Vec<usize>) = (0..data + parity).partition(|&column| column < data);
    XorProgram::compile(&matrix(&portable(data, parity), &present, &wanted), data, parity)
}

/// Compiles the map from `present` to `wanted` columns and compares it with the codec on noise.
fn check_codec(codec: &Codec, present: &[usize], wanted: &[usize], length: usize, noise: &mut Noise) {
    let program = XorProgram::compile(&matrix(codec, present, wanted), present.len(), wanted.len());
    let columns = noise.columns(present.len(), length);
    let expected = recover(codec, present, &columns, wanted);
    assert!(run(&program, &columns) == expected, "{wanted:?} from {present:?}");
}

#[test]
fn doubling_a_word_doubles_each_byte_whatever_its_neighbours_are() {
    let mut noise = Noise::new(1);
    for byte in 0..=255u8 {
        for position in 0..4 {
            for neighbours in [0, u32::MAX, noise.number() as u32, noise.number() as u32] {
                let mut bytes = neighbours.to_le_bytes();
                bytes[position] = byte;
                let doubled = double(u32::from_le_bytes(bytes)).to_le_bytes();
                assert_eq!(doubled, bytes.map(|byte| multiply(byte, 2)), "{bytes:?}");
            }
        }
    }
}

#[test]
fn every_code_up_to_16_plus_16_is_encoded_as_by_the_portable_engine() {
    let mut noise = Noise::new(2);
    for data in 1..=16 {
        for parity in 1..=16 {
            let codec = portable(data, parity);
            let (present, wanted): (Vec<usize>, Vec<usize>) =
                (0..data + parity).partition(|&column| column < data);
            check_codec(&codec, &present, &wanted, 67, &mut noise);
        }
    }
}

#[test]
fn every_erasure_pattern_of_up_to_4_plus_4_is_recovered_in_any_order() {
    let mut noise = Noise::new(3);
    for data in 1..=4usize {
        for parity in 1..=4usize {
            let codec = portable(data, parity);
            for set in (0u32..1 << (data + parity)).filter(|set| set.count_ones() as usize == data) {
                let (mut present, mut wanted): (Vec<usize>, Vec<usize>) =
                    (0..data + parity).partition(|&column| set >> column & 1 == 1);
                noise.shuffle(&mut present);
                noise.shuffle(&mut wanted);
                check_codec(&codec, &present, &wanted, 21, &mut noise);
                wanted.truncate(1);
                check_codec(&codec, &present, &wanted, 21, &mut noise);
            }
        }
    }
}

#[test]
fn random_erasures_of_codes_up_to_255_columns_are_recovered() {
    let mut noise = Noise::new(4);
    for round in 0..150 {
        let most = if round < 140 { 16 } else { COLUMNS_MAX };
        let total = if round == 149 { COLUMNS_MAX } else { 2 + noise.below(most - 1) };
        let data = 1 + noise.below(total - 1);
        let codec = portable(data, total - data);
        let mut present: Vec<usize> = (0..total).collect();
        noise.shuffle(&mut present);
        let mut wanted = present.split_off(data);
        wanted.truncate(1 + noise.below(40));
        check_codec(&codec, &present, &wanted, 67, &mut noise);
    }
}

#[test]
fn any_matrix_is_applied_at_every_boundary_length() {
    let mut noise = Noise::new(5);
    let shapes: [(usize, usize); 9] =
        [(1, 1), (1, 9), (2, 20), (3, 1), (5, 7), (12, 40), (40, 3), (70, 5), (255, 2)];
    for (inputs, outputs) in shapes {
        for kind in 0..5 {
            let matrix: Vec<u8> = (0..inputs * outputs)
                .map(|at| match kind {
                    0 => noise.number() as u8,
                    1 => 0,
                    2 => 1,
                    // Rows and columns of zeroes among others.
                    3 if (at / inputs).is_multiple_of(2) || (at % inputs).is_multiple_of(3) => 0,
                    3 => noise.number() as u8 & 0x90,
                    // An identity, repeated.
                    _ => u8::from(at / inputs % inputs == at % inputs),
                })
                .collect();
            for live_words_max in [0, 24, super::LIVE_WORDS_MAX, 1000] {
                let program = XorProgram::compile_within(&matrix, inputs, outputs, live_words_max);
                let lengths: &[usize] =
                    if inputs < 6 { &[0, 1, 3, 4, 5, 63, 64, 65, 4095, 4096, 4097] } else { &[0, 1, 68] };
                for &length in lengths {
                    let columns = noise.columns(inputs, length);
                    let outputs = run(&program, &columns);
                    for (row, output) in matrix.chunks(inputs).zip(outputs) {
                        for at in (0..length)
                            .step_by(if length > 100 { 31 } else { 1 })
                            .chain(length.checked_sub(1))
                        {
                            let products =
                                row.iter().zip(&columns).map(|(&factor, c)| multiply(factor, c[at]));
                            assert_eq!(
                                output[at],
                                products.fold(0, |sum, product| sum ^ product),
                                "{row:?} at {at}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Operations per word position and live words, as `(k, m, operations, live words)`. Per word of
/// input they are 8.8 for 4+2, 16.8 for 8+4, 17.1 for 24+8 and 28.0 for 32+16, doublings counted as
/// three.
const COSTS: [(usize, usize, usize, usize); 11] = [
    (1, 1, 0, 1),
    (4, 2, 35, 8),
    (8, 2, 68, 16),
    (8, 3, 101, 20),
    (8, 4, 134, 20),
    (10, 4, 134, 24),
    (16, 4, 167, 42),
    (16, 16, 620, 72),
    (24, 8, 410, 84),
    (32, 16, 896, 116),
    (100, 28, 5272, 144),
];

#[test]
fn the_usual_codes_take_no_more_operations_and_live_words_than_kernels_count_on() {
    for (data, parity, operations, live_words) in COSTS {
        let program = encoder(data, parity);
        let (counted, live) = (program.counts().operations(), program.live_words());
        assert!(
            counted <= operations && live <= live_words,
            "{data}+{parity}: {counted} operations, {live} live words"
        );
    }
}

#[test]
fn every_column_is_loaded_once_and_an_unused_one_never() {
    for (data, parity) in [(4, 2), (32, 16), (100, 28)] {
        let counts = encoder(data, parity).counts();
        assert_eq!((counts.loads, counts.stores), (data, parity));
    }
    let program = XorProgram::compile(&[0, 5, 0, 0, 7, 1], 3, 2);
    assert_eq!(program.counts().loads, 2);
    assert!(!program.ops().contains(&Op::Load(0)));
}

#[test]
fn fewer_live_words_are_bought_with_operations() {
    let mut noise = Noise::new(6);
    let matrix = noise.columns(1, 48 * 8).concat();
    let mut before = 0;
    for live_words_max in [160, 112, 80, 48] {
        let program = XorProgram::compile_within(&matrix, 48, 8, live_words_max);
        assert!(program.live_words() <= live_words_max, "{} of {live_words_max}", program.live_words());
        assert!(program.counts().operations() >= before, "{live_words_max}");
        before = program.counts().operations();
    }
}

#[test]
fn many_products_of_one_input_double_the_input_and_not_the_products() {
    let factors: Vec<u8> = (1..=255).collect();
    let counts = XorProgram::compile(&factors, 1, 255).counts();
    assert_eq!(counts.doubles, 7);
}

#[test]
#[should_panic(expected = "factors of 3 inputs and 2 outputs")]
fn a_ragged_matrix_is_refused() {
    let _ = XorProgram::compile(&[1, 2, 3, 4, 5], 3, 2);
}
