//! The AVX2 engine: 32 bytes are multiplied by a factor with two byte shuffles, one over the products of the low and
//! one over those of the high half of each byte (Plank, Greenan and Miller, "Screaming fast Galois field arithmetic
//! using Intel SIMD instructions", FAST 2013). All outputs of a pass live in registers while the inputs stream past.
//! Invariant: a [`Kernel`] exists only on a CPU with the instructions. Must not know of anything but columns and
//! factors.
#![allow(unsafe_code)]
// Counted loops over const bounds index several arrays at once: the shape that unrolls into registers.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::{
    __m256i, _MM_HINT_ET0, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm256_and_si256,
    _mm256_broadcastsi128_si256, _mm256_loadu_si256, _mm256_set1_epi8, _mm256_setzero_si256,
    _mm256_shuffle_epi8, _mm256_srli_epi16, _mm256_storeu_si256, _mm256_stream_si256, _mm256_xor_si256,
};
use std::ops::Range;

use super::portable::{xor_into_loop, xor_loop};
use super::{Output, PREFETCH_BYTES, Store};

/// Eight accumulators, the halves of an input, a mask, two tables and two products fill the 16 registers.
pub(super) const OUTPUTS_PER_PASS: usize = 8;

/// Bytes of one register.
const VECTOR: usize = 32;

/// The variants of [`Store`] as values that the compiler specialises for.
const REPLACE: u8 = 0;
const STREAM: u8 = 1;
const ADD: u8 = 2;

/// A step over whole vectors that also fetches those further on; one that does not; one over part of a vector.
const AHEAD: u8 = 0;
const WHOLE: u8 = 1;
const PART: u8 = 2;

/// Proof that this CPU has AVX2.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Kernel(());

impl Kernel {
    pub(super) fn detect() -> Option<Kernel> {
        is_x86_feature_detected!("avx2").then_some(Kernel(()))
    }

    /// `dst ^= src` for slices of one length.
    pub(super) fn xor_into(self, dst: &mut [u8], src: &[u8]) {
        // SAFETY: `self` proves AVX2, the only condition of the function.
        unsafe { xor_into(dst, src) }
    }

    /// `dst = a ^ b` for slices of one length.
    pub(super) fn xor(self, dst: &mut [u8], a: &[u8], b: &[u8]) {
        // SAFETY: `self` proves AVX2, the only condition of the function.
        unsafe { xor(dst, a, b) }
    }

    /// Applies `tables` (for each input, two shuffle tables per output) to bytes `range` of the columns.
    pub(super) fn apply(
        self,
        tables: &[[u8; 32]],
        inputs: &[&[u8]],
        outputs: &mut [Output<'_>],
        range: Range<usize>,
        store: Store,
    ) {
        assert_eq!(tables.len(), inputs.len() * outputs.len());
        assert!(range.start <= range.end);
        assert!(inputs.iter().all(|column| column.len() >= range.end));
        assert!(outputs.iter().all(|(_, column)| column.len() >= range.end));
        macro_rules! widths {
            ($($width:literal x $strips:literal),*) => {
                match outputs.len() {
                    0 => {}
                    // SAFETY: `self` proves the instructions; the assertions above are the function's contract, the
                    // array length being the one just matched.
                    $($width => unsafe {
                        let pointers: [*mut u8; $width] = std::array::from_fn(|i| outputs[i].1.as_mut_ptr());
                        match store {
                            Store::Add => run::<$width, $strips, ADD>(tables, inputs, pointers, range),
                            Store::Stream if $strips % 2 == 0 && aligned(&pointers, range.start) => {
                                run::<$width, $strips, STREAM>(tables, inputs, pointers, range);
                            }
                            Store::Stream | Store::Replace => {
                                run::<$width, $strips, REPLACE>(tables, inputs, pointers, range);
                            }
                        }
                    },)*
                    wider => unreachable!("{wider} outputs in a pass of at most {OUTPUTS_PER_PASS}"),
                }
            };
        }
        widths!(1 x 2, 2 x 2, 3 x 2, 4 x 1, 5 x 1, 6 x 1, 7 x 1, 8 x 1);
    }
}

#[target_feature(enable = "avx2")]
fn xor_into(dst: &mut [u8], src: &[u8]) {
    xor_into_loop(dst, src);
}

#[target_feature(enable = "avx2")]
fn xor(dst: &mut [u8], a: &[u8], b: &[u8]) {
    xor_loop(dst, a, b);
}

/// Whether every output can be written around the cache from byte `start` on, by steps of an even number of vectors:
/// cache lines that are not filled in one go cost several times what streaming saves.
fn aligned(outputs: &[*mut u8], start: usize) -> bool {
    outputs.iter().all(|output| (output.addr() + start).is_multiple_of(2 * VECTOR))
}

/// Walks `range` in steps of `S` vectors, then of one, then of the bytes that are left.
///
/// # Safety
/// The CPU has the features; `inputs` and `outputs` are valid up to `range.end`, outputs writable and disjoint from
/// everything else; `tables` holds `R` pairs per input.
#[target_feature(enable = "avx2")]
unsafe fn run<const R: usize, const S: usize, const STORE: u8>(
    tables: &[[u8; 32]],
    inputs: &[&[u8]],
    outputs: [*mut u8; R],
    range: Range<usize>,
) {
    let mut at = range.start;
    // SAFETY: every step stays below `range.end`, up to which the caller vouches for all columns.
    unsafe {
        while range.end - at >= S * VECTOR {
            let ahead = (at + PREFETCH_BYTES).min(range.end - S * VECTOR);
            step::<R, S, STORE, AHEAD>(tables, inputs, &outputs, at, ahead, VECTOR);
            at += S * VECTOR;
        }
        while range.end - at >= VECTOR {
            step::<R, 1, STORE, WHOLE>(tables, inputs, &outputs, at, at, VECTOR);
            at += VECTOR;
        }
        if at < range.end {
            step::<R, 1, STORE, PART>(tables, inputs, &outputs, at, at, range.end - at);
        }
        if STORE == STREAM {
            // Streaming stores reach other threads and devices in order only after a fence.
            _mm_sfence();
        }
    }
}

/// Computes `S` vectors of every output at byte `at`, or only the first `part` bytes of one vector.
///
/// # Safety
/// As [`run`], and `at + S * VECTOR`, or `at + part` with `part < VECTOR`, lies within the columns.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn step<const R: usize, const S: usize, const STORE: u8, const SHAPE: u8>(
    tables: &[[u8; 32]],
    inputs: &[&[u8]],
    outputs: &[*mut u8; R],
    at: usize,
    ahead: usize,
    part: usize,
) {
    // SAFETY: the caller vouches for bytes `at..at + S * VECTOR` of every column, or the first `part` of them, and
    // for R table pairs per input.
    unsafe {
        let load = |from: *const u8| match SHAPE {
            PART => {
                let mut padded = [0u8; VECTOR];
                padded.as_mut_ptr().copy_from_nonoverlapping(from, part);
                _mm256_loadu_si256(padded.as_ptr().cast())
            }
            _ => _mm256_loadu_si256(from.cast()),
        };
        let nibble = _mm256_set1_epi8(15);
        let mut sums = [[_mm256_setzero_si256(); S]; R];
        if STORE == ADD {
            for row in 0..R {
                for strip in 0..S {
                    sums[row][strip] = load(outputs[row].add(at + strip * VECTOR));
                }
            }
        }
        for input in 0..inputs.len() {
            let column = inputs.get_unchecked(input).as_ptr();
            let mut halves: [[__m256i; 2]; S] = [[_mm256_setzero_si256(); 2]; S];
            for (strip, [low, high]) in halves.iter_mut().enumerate() {
                let vector = load(column.add(at + strip * VECTOR));
                if SHAPE == AHEAD && STORE != ADD {
                    _mm_prefetch::<_MM_HINT_T0>(column.add(ahead + strip * VECTOR).cast());
                }
                *low = _mm256_and_si256(vector, nibble);
                *high = _mm256_and_si256(_mm256_srli_epi16::<4>(vector), nibble);
            }
            for row in 0..R {
                let table = tables.get_unchecked(input * R + row).as_ptr();
                let of_low = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.cast()));
                let of_high = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.add(16).cast()));
                for strip in 0..S {
                    let [low, high] = halves[strip];
                    let product = _mm256_xor_si256(
                        _mm256_shuffle_epi8(of_low, low),
                        _mm256_shuffle_epi8(of_high, high),
                    );
                    sums[row][strip] = _mm256_xor_si256(sums[row][strip], product);
                }
            }
        }
        for row in 0..R {
            for strip in 0..S {
                let to = outputs[row].add(at + strip * VECTOR);
                match SHAPE {
                    PART => {
                        let mut padded = [0u8; VECTOR];
                        _mm256_storeu_si256(padded.as_mut_ptr().cast(), sums[row][strip]);
                        to.copy_from_nonoverlapping(padded.as_ptr(), part);
                    }
                    _ if STORE == STREAM => _mm256_stream_si256(to.cast(), sums[row][strip]),
                    _ => {
                        if SHAPE == AHEAD && STORE != ADD {
                            _mm_prefetch::<_MM_HINT_ET0>(outputs[row].add(ahead + strip * VECTOR).cast());
                        }
                        _mm256_storeu_si256(to.cast(), sums[row][strip]);
                    }
                }
            }
        }
    }
}
