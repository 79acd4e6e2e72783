//! The suite that every engine runs: `portable` against the reed-solomon-erasure crate, the others against
//! `portable`, at boundary lengths, odd alignments and with memory that must not be touched next to every
//! output.

use proptest::prelude::*;
use reed_solomon_erasure::galois_8::ReedSolomon;
use sha2::{Digest, Sha256};

#[cfg(not(miri))]
use super::guarded::{Edge, Guarded};
use super::{COLUMNS_MAX, Codec, CodecError, Engine, xor, xor_into};
use crate::testing::Noise;

/// Empty, one byte, around one vector of either width and around a 4 KiB row, and tails of every kind of
/// step.
const LENGTHS: [usize; 20] =
    [0, 1, 2, 31, 32, 33, 63, 64, 65, 95, 127, 128, 129, 191, 255, 257, 1000, 4095, 4096, 4097];

/// What outputs hold before they are computed, and what the bytes around them must still hold afterwards.
const POISON: u8 = 0xA5;

/// Bytes around an output that must stay as they were: more than one vector.
const MARGIN: usize = 80;

fn engines() -> impl Iterator<Item = Engine> {
    Engine::ALL.into_iter().filter(|engine| engine.is_available())
}

/// An output at a chosen misalignment, poisoned inside and around.
struct Canvas {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Canvas {
    fn new(length: usize, misalignment: usize) -> Canvas {
        let start = MARGIN + misalignment;
        Canvas { bytes: vec![POISON; start + length + MARGIN], start, length }
    }

    fn holding(content: &[u8], misalignment: usize) -> Canvas {
        let mut canvas = Canvas::new(content.len(), misalignment);
        canvas.inner().copy_from_slice(content);
        canvas
    }

    fn inner(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }

    fn assert_holds(&self, content: &[u8], context: &dyn Fn() -> String) {
        let (before, rest) = self.bytes.split_at(self.start);
        let (inner, after) = rest.split_at(self.length);
        assert!(inner == content, "wrong bytes: {}", context());
        assert!(before.iter().chain(after).all(|&byte| byte == POISON), "wrote outside: {}", context());
    }
}

/// All columns of one codeword, data first, coded by the reference crate.
fn reference_codeword(data: usize, parity: usize, length: usize, noise: &mut Noise) -> Vec<Vec<u8>> {
    let mut columns = noise.columns(data, length);
    columns.resize(data + parity, vec![0; length]);
    encode_by_reference(data, &mut columns);
    columns
}

/// Fills in the parities of `columns`. Miri objects to pointer arithmetic inside the reference crate, so
/// under Miri the reference is the portable engine, which the published vector and this comparison outside
/// Miri verify.
fn encode_by_reference(data: usize, columns: &mut [Vec<u8>]) {
    let parity = columns.len() - data;
    if cfg!(miri) {
        let (inputs, outputs) = columns.split_at_mut(data);
        let mut rows: Vec<(usize, &mut [u8])> =
            outputs.iter_mut().map(Vec::as_mut_slice).enumerate().collect();
        let codec = Codec::with_engine(data, parity, Engine::Portable).expect("codec");
        codec.encode(&slices(inputs), &mut rows);
    } else if parity > 0 && !columns[0].is_empty() {
        let reference = ReedSolomon::new(data, parity).expect("geometry");
        reference.encode(columns).expect("encode");
    }
}

fn slices(columns: &[Vec<u8>]) -> Vec<&[u8]> {
    columns.iter().map(Vec::as_slice).collect()
}

/// The named rows, computed into fresh canvases.
fn encoded(codec: &Codec, data: &[&[u8]], rows: &[usize], misalignment: usize) -> Vec<Canvas> {
    let mut canvases: Vec<Canvas> = rows
        .iter()
        .enumerate()
        .map(|(i, _)| Canvas::new(data[0].len(), (misalignment + 7 * i) % 64))
        .collect();
    let mut parity: Vec<(usize, &mut [u8])> =
        rows.iter().copied().zip(canvases.iter_mut().map(Canvas::inner)).collect();
    codec.encode(data, &mut parity);
    canvases
}

fn recovered(codec: &Codec, columns: &[Vec<u8>], present: &[usize], wanted: &[usize]) -> Vec<Canvas> {
    let inputs: Vec<(usize, &[u8])> = present.iter().map(|&c| (c, &columns[c][..])).collect();
    let mut canvases: Vec<Canvas> = wanted.iter().map(|&c| Canvas::new(columns[c].len(), c % 64)).collect();
    let mut outputs: Vec<(usize, &mut [u8])> =
        wanted.iter().copied().zip(canvases.iter_mut().map(Canvas::inner)).collect();
    codec.recover(&inputs, &mut outputs).expect("recover");
    canvases
}

/// Recovers every column outside `present` and compares.
fn check_recovery(codec: &Codec, columns: &[Vec<u8>], present: &[usize], wanted: &[usize]) {
    for (canvas, &column) in recovered(codec, columns, present, wanted).iter().zip(wanted) {
        canvas.assert_holds(&columns[column], &|| {
            let (data, parity) = (codec.data(), codec.parity());
            format!("{}: {data}+{parity}, column {column} from {present:?}", codec.engine())
        });
    }
}

#[test]
fn the_published_vector_comes_out() {
    let data: Vec<Vec<u8>> = (0..10usize)
        .map(|i| (0..64usize).map(|j| ((31 * i + 7 * j + (i * j) % 251) % 256) as u8).collect())
        .collect();
    for engine in engines() {
        let codec = Codec::with_engine(10, 4, engine).expect("codec");
        let mut canvases = encoded(&codec, &slices(&data), &[0, 1, 2, 3], 0);
        let digest =
            canvases.iter_mut().fold(Sha256::new(), |hash, canvas| hash.chain_update(canvas.inner()));
        assert_eq!(digest.finalize()[..8], [0x8b, 0xd0, 0x31, 0xe6, 0x34, 0x2d, 0xb7, 0xe7], "{engine}");
    }
}

#[test]
fn every_engine_encodes_as_the_reference_crate_for_every_small_geometry_and_some_large() {
    let small = (1..=if cfg!(miri) { 3 } else { 24 })
        .flat_map(|data| (0..=if cfg!(miri) { 3 } else { 20 }).map(move |parity| (data, parity)));
    let large =
        [(1, 254), (2, 100), (32, 16), (40, 33), (100, 50), (128, 127), (200, 55), (254, 1), (255, 0)];
    let large = large.into_iter().filter(|_| !cfg!(miri));
    let mut noise = Noise::new(1);
    for (data, parity) in small.chain(large) {
        let columns = reference_codeword(data, parity, 77, &mut noise);
        for engine in engines() {
            let codec = Codec::with_engine(data, parity, engine).expect("codec");
            let rows: Vec<usize> = (0..parity).collect();
            for (row, canvas) in encoded(&codec, &slices(&columns[..data]), &rows, 0).iter().enumerate() {
                canvas.assert_holds(&columns[data + row], &|| {
                    format!("{engine}: row {row} of {data}+{parity}")
                });
            }
        }
    }
}

#[test]
fn every_engine_encodes_every_boundary_length_at_odd_alignments() {
    let mut noise = Noise::new(2);
    for (data, parity) in [(1, 1), (2, 1), (3, 2), (4, 3), (5, 4), (8, 5), (9, 7), (3, 11), (2, 16), (3, 18)]
    {
        for length in LENGTHS.into_iter().filter(|&length| length < 200 || !cfg!(miri)) {
            let whole = reference_codeword(data, parity, length, &mut noise);
            for engine in engines() {
                let codec = Codec::with_engine(data, parity, engine).expect("codec");
                let misalignment = noise.below(64);
                let inputs: Vec<Canvas> =
                    whole[..data].iter().map(|column| Canvas::holding(column, noise.below(64))).collect();
                let inputs: Vec<&[u8]> =
                    inputs.iter().map(|canvas| &canvas.bytes[canvas.start..canvas.start + length]).collect();
                let rows: Vec<usize> = (0..parity).collect();
                for (row, canvas) in encoded(&codec, &inputs, &rows, misalignment).iter().enumerate() {
                    canvas.assert_holds(&whole[data + row], &|| {
                        format!("{engine}: row {row} of {data}+{parity}, {length} bytes")
                    });
                }
            }
        }
    }
}

#[test]
fn columns_larger_than_a_tile_are_coded_whole_when_several_passes_read_them() {
    if cfg!(miri) {
        return;
    }
    let mut noise = Noise::new(3);
    let columns = reference_codeword(130, 34, 20_001, &mut noise);
    for engine in engines() {
        let codec = Codec::with_engine(130, 34, engine).expect("codec");
        let rows: Vec<usize> = (0..34).collect();
        for (row, canvas) in encoded(&codec, &slices(&columns[..130]), &rows, 0).iter().enumerate() {
            canvas.assert_holds(&columns[130 + row], &|| format!("{engine}: row {row}"));
        }
    }
}

#[test]
fn any_subset_of_rows_in_any_order_is_encoded_and_updated() {
    let mut noise = Noise::new(4);
    let columns = reference_codeword(5, 6, 100, &mut noise);
    let changed = noise.bytes(100);
    let mut after = columns.clone();
    after[3].copy_from_slice(&changed);
    encode_by_reference(5, &mut after);
    let mut delta = changed;
    xor_into(&mut delta, &columns[3]);
    for engine in engines() {
        let codec = Codec::with_engine(5, 6, engine).expect("codec");
        for subset in 0..1 << 6 {
            let mut rows: Vec<usize> = (0..6).filter(|row| subset >> row & 1 == 1).collect();
            noise.shuffle(&mut rows);
            let mut canvases = encoded(&codec, &slices(&columns[..5]), &rows, subset);
            for (canvas, row) in canvases.iter().zip(&rows) {
                canvas.assert_holds(&columns[5 + row], &|| format!("{engine}: row {row} of {rows:?}"));
            }
            let mut parity: Vec<(usize, &mut [u8])> =
                rows.iter().copied().zip(canvases.iter_mut().map(Canvas::inner)).collect();
            codec.update(3, &delta, &mut parity);
            for (canvas, row) in canvases.iter().zip(&rows) {
                canvas.assert_holds(&after[5 + row], &|| format!("{engine}: update of {row} in {rows:?}"));
            }
        }
    }
}

#[test]
fn updating_equals_encoding_again_at_every_boundary_length() {
    let mut noise = Noise::new(5);
    for (data, parity) in [(1, 1), (4, 2), (3, 3), (2, 5), (8, 4), (2, 9), (3, 17)] {
        for length in LENGTHS.into_iter().filter(|&length| length < 200 || !cfg!(miri)) {
            let before = reference_codeword(data, parity, length, &mut noise);
            for engine in engines() {
                let codec = Codec::with_engine(data, parity, engine).expect("codec");
                let column = noise.below(data);
                let mut after = before.clone();
                after[column] = noise.bytes(length);
                let rows: Vec<usize> = (0..parity).collect();
                let expected = encoded(&codec, &slices(&after[..data]), &rows, 0);
                let mut delta = Canvas::new(length, noise.below(64));
                xor(delta.inner(), &before[column], &after[column]);
                let mut canvases: Vec<Canvas> =
                    before[data..].iter().map(|bytes| Canvas::holding(bytes, noise.below(64))).collect();
                let mut outputs: Vec<(usize, &mut [u8])> =
                    canvases.iter_mut().map(Canvas::inner).enumerate().collect();
                codec.update(column, delta.inner(), &mut outputs);
                for (row, (canvas, mut expected)) in canvases.iter().zip(expected).enumerate() {
                    canvas.assert_holds(expected.inner(), &|| {
                        format!("{engine}: row {row} of {data}+{parity}, column {column}, {length} bytes")
                    });
                }
            }
        }
    }
}

/// Every choice of `chosen` out of 0..columns.
fn combinations(columns: usize, chosen: usize) -> impl Iterator<Item = (Vec<usize>, Vec<usize>)> {
    (0u32..1 << columns).filter(move |set| set.count_ones() as usize == chosen).map(move |set| {
        let (inside, outside) = (0..columns).partition(|column| set >> column & 1 == 1);
        (inside, outside)
    })
}

#[test]
fn every_erasure_pattern_of_up_to_8_plus_8_is_recovered() {
    let most = if cfg!(miri) { 2 } else { 8 };
    let mut noise = Noise::new(6);
    for data in 1..=most {
        for parity in 1..=most {
            let columns = reference_codeword(data, parity, 37, &mut noise);
            for engine in engines() {
                let codec = Codec::with_engine(data, parity, engine).expect("codec");
                for (present, missing) in combinations(data + parity, data) {
                    check_recovery(&codec, &columns, &present, &missing);
                }
            }
        }
    }
}

#[test]
fn every_erasure_pattern_of_up_to_4_plus_4_is_recovered_at_boundary_lengths_in_any_order() {
    let most = if cfg!(miri) { 2 } else { 4 };
    let lengths = if cfg!(miri) { &[0, 1, 65][..] } else { &[0, 1, 63, 64, 65, 127, 333, 4097][..] };
    let mut noise = Noise::new(7);
    for data in 1..=most {
        for parity in 1..=most {
            for &length in lengths {
                let columns = reference_codeword(data, parity, length, &mut noise);
                for engine in engines() {
                    let codec = Codec::with_engine(data, parity, engine).expect("codec");
                    for (mut present, mut missing) in combinations(data + parity, data) {
                        noise.shuffle(&mut present);
                        noise.shuffle(&mut missing);
                        check_recovery(&codec, &columns, &present, &missing);
                        missing.truncate(1);
                        check_recovery(&codec, &columns, &present, &missing);
                    }
                }
            }
        }
    }
}

#[test]
fn random_erasures_of_codes_up_to_255_columns_are_recovered() {
    let mut noise = Noise::new(8);
    for round in 0..if cfg!(miri) { 2 } else { 40 } {
        let total = if round == 0 { COLUMNS_MAX } else { 2 + noise.below(COLUMNS_MAX - 1) };
        let total = if cfg!(miri) { total % 20 + 2 } else { total };
        let data = 1 + noise.below(total - 1);
        let columns = reference_codeword(data, total - data, 150, &mut noise);
        let mut order: Vec<usize> = (0..total).collect();
        noise.shuffle(&mut order);
        let (present, missing) = order.split_at(data);
        for engine in engines() {
            let codec = Codec::with_engine(data, total - data, engine).expect("codec");
            check_recovery(&codec, &columns, present, missing);
        }
    }
}

#[test]
#[cfg(not(miri))]
fn aligned_columns_too_large_for_the_cache_are_coded_alike() {
    let mut noise = Noise::new(12);
    for (data, parity, length) in [(1, 1, 1_100_000), (2, 3, 450_001), (5, 18, 100_063)] {
        let columns = reference_codeword(data, parity, length, &mut noise);
        let mut outputs: Vec<Guarded> = (0..parity).map(|_| Guarded::new(length, Edge::Before)).collect();
        assert!(outputs.iter().all(|memory| memory.as_ptr().addr().is_multiple_of(64)));
        for engine in engines() {
            let codec = Codec::with_engine(data, parity, engine).expect("codec");
            let mut rows: Vec<(usize, &mut [u8])> =
                outputs.iter_mut().map(|memory| &mut memory[..]).enumerate().collect();
            for (_, bytes) in &mut rows {
                bytes.fill(POISON);
            }
            codec.encode(&slices(&columns[..data]), &mut rows);
            for (row, bytes) in rows {
                assert!(*bytes == columns[data + row], "{engine}: row {row} of {data}+{parity}");
            }
        }
    }
}

#[test]
fn exclusive_or_is_bytewise_at_every_boundary_length() {
    let mut noise = Noise::new(13);
    for length in LENGTHS {
        let (a, b) = (noise.bytes(length), noise.bytes(length));
        let expected: Vec<u8> = a.iter().zip(&b).map(|(a, b)| a ^ b).collect();
        let mut canvas = Canvas::new(length, length % 64);
        xor(canvas.inner(), &a, &b);
        canvas.assert_holds(&expected, &|| format!("xor of {length} bytes"));
        let mut canvas = Canvas::holding(&a, (length + 1) % 64);
        xor_into(canvas.inner(), &b);
        canvas.assert_holds(&expected, &|| format!("xor_into of {length} bytes"));
    }
}

#[test]
#[cfg(not(miri))]
fn no_engine_touches_a_byte_beyond_either_end_of_a_column() {
    let mut noise = Noise::new(9);
    for (data, parity) in [(1, 1), (2, 2), (3, 4), (4, 6), (2, 9), (2, 13), (3, 18)] {
        for length in (0..=140).chain([255, 256, 257, 300, 511, 4095, 4096, 4097]) {
            let columns = reference_codeword(data, parity, length, &mut noise);
            for edge in [Edge::Before, Edge::After] {
                let mut guarded: Vec<Guarded> = columns
                    .iter()
                    .map(|column| {
                        let mut memory = Guarded::new(length, edge);
                        memory.copy_from_slice(column);
                        memory
                    })
                    .collect();
                for engine in engines() {
                    let codec = Codec::with_engine(data, parity, engine).expect("codec");
                    let (inputs, outputs) = guarded.split_at_mut(data);
                    let inputs: Vec<&[u8]> = inputs.iter().map(|memory| &memory[..]).collect();
                    for output in outputs.iter_mut() {
                        output.fill(POISON);
                    }
                    let mut rows: Vec<(usize, &mut [u8])> =
                        outputs.iter_mut().map(|memory| &mut memory[..]).enumerate().collect();
                    codec.encode(&inputs, &mut rows);
                    for (row, bytes) in &rows {
                        assert!(**bytes == columns[data + row], "{engine}: {data}+{parity}, {length} bytes");
                    }
                    // The same delta applied twice cancels out, but exercises all the code of updates.
                    codec.update(data - 1, inputs[0], &mut rows);
                    codec.update(data - 1, inputs[0], &mut rows);
                    for (row, bytes) in &rows {
                        assert!(**bytes == columns[data + row], "{engine}: update, {length} bytes");
                    }
                    xor_into(rows[0].1, inputs[0]);
                    xor_into(rows[0].1, inputs[0]);
                    assert!(*rows[0].1 == columns[data]);
                }
            }
        }
    }
}

#[test]
fn consistency_holds_for_a_codeword_and_for_no_more_than_k_columns() {
    let mut noise = Noise::new(10);
    let long = if cfg!(miri) { 130 } else { 4097 };
    let cases = [(1, 0, 10), (1, 3, 0), (4, 3, 2 * long), (5, 20, long), (3, 9, 1)];
    for engine in engines() {
        for (data, parity, length) in cases {
            let codec = Codec::with_engine(data, parity, engine).expect("codec");
            let columns = reference_codeword(data, parity, length, &mut noise);
            let mut named: Vec<(usize, &[u8])> = slices(&columns).into_iter().enumerate().collect();
            noise.shuffle(&mut named);
            assert!(codec.consistent(&named), "{engine}: {data}+{parity}");
            let damaged = noise.bytes(length);
            named[0].1 = &damaged;
            assert!(codec.consistent(&named[..data]), "{engine}: {data}+{parity}");
        }
    }
}

#[test]
fn consistency_fails_for_any_single_damaged_byte_in_any_column() {
    let mut noise = Noise::new(11);
    for engine in engines() {
        let codec = Codec::with_engine(3, 10, engine).expect("codec");
        let lengths = if cfg!(miri) { &[1, 70][..] } else { &[1, 70, 4096, 8200][..] };
        for &length in lengths {
            let mut columns = reference_codeword(3, 10, length, &mut noise);
            for damaged in 0..13 {
                let positions = [0, length - 1, noise.below(length), noise.below(length)];
                for position in positions {
                    let flip = 1 << noise.below(8);
                    columns[damaged][position] ^= flip;
                    let named: Vec<(usize, &[u8])> = slices(&columns).into_iter().enumerate().collect();
                    assert!(!codec.consistent(&named), "{engine}: byte {position} of column {damaged}");
                    // One surplus column suffices, wherever the damage is among the k + 1 columns.
                    let mut few: Vec<(usize, &[u8])> =
                        named.iter().copied().filter(|(column, _)| *column != damaged).take(3).collect();
                    few.insert(noise.below(4), named[damaged]);
                    assert!(!codec.consistent(&few), "{engine}: byte {position} of column {damaged}");
                    columns[damaged][position] ^= flip;
                }
            }
        }
    }
}

#[test]
fn wrong_geometries_and_recoveries_are_refused_and_write_nothing() {
    for (data, parity) in [(0, 1), (0, 0), (200, 56), (256, 0), (usize::MAX, 1), (1, usize::MAX)] {
        assert_eq!(Codec::new(data, parity).err(), Some(CodecError::Geometry { data, parity }));
    }
    let codec = Codec::with_engine(2, 2, Engine::Portable).expect("codec");
    let (a, b) = ([1u8, 2], [3u8]);
    let mut out = [POISON; 2];
    let mut refuse = |present: &[(usize, &[u8])], wanted: usize, error: CodecError| {
        assert_eq!(codec.recover(present, &mut [(wanted, &mut out)]), Err(error));
        assert_eq!(out, [POISON; 2]);
    };
    refuse(&[(0, &a)], 1, CodecError::PresentCount { given: 1, needed: 2 });
    refuse(&[(0, &a), (1, &a), (2, &a)], 3, CodecError::PresentCount { given: 3, needed: 2 });
    refuse(&[(0, &a), (4, &a)], 1, CodecError::NoSuchColumn { column: 4, columns: 4 });
    refuse(&[(0, &a), (0, &a)], 1, CodecError::Repeated { column: 0 });
    refuse(&[(0, &a), (3, &a)], 3, CodecError::Repeated { column: 3 });
    refuse(&[(0, &a), (3, &b)], 1, CodecError::Length { column: 3, length: 1, expected: 2 });
    refuse(&[(0, &b), (3, &b)], 1, CodecError::Length { column: 1, length: 2, expected: 1 });
}

#[test]
fn an_engine_is_named_by_its_own_name_only() {
    for engine in Engine::ALL {
        assert_eq!(engine.name().parse(), Ok(engine));
        assert_eq!(serde_json::to_value(engine).expect("json"), engine.name());
    }
    let error = "sse9".parse::<Engine>().expect_err("no such engine");
    assert!(error.to_string().contains("sse9"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 64 }))]

    #[test]
    fn coding_a_piece_of_a_stripe_gives_that_piece_of_the_parity(
        data in 1usize..12, parity in 1usize..12, length in 1usize..3000, cut in 0.0f64..1.0, seed: u64,
    ) {
        let cut = (cut * length as f64) as usize;
        let mut noise = Noise::new(seed);
        let columns = reference_codeword(data, parity, length, &mut noise);
        for engine in engines() {
            let codec = Codec::with_engine(data, parity, engine).expect("codec");
            let rows: Vec<usize> = (0..parity).collect();
            for range in [0..cut, cut..length] {
                let pieces: Vec<&[u8]> = columns[..data].iter().map(|column| &column[range.clone()]).collect();
                for (row, canvas) in encoded(&codec, &pieces, &rows, 0).iter().enumerate() {
                    canvas.assert_holds(&columns[data + row][range.clone()], &|| format!("{engine}: row {row}"));
                }
            }
        }
    }
}
