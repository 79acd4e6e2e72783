//! The AVX2 engine: 32 bytes are multiplied by a factor with two byte shuffles, one over the products of the
//! low and one over those of the high half of each byte (Plank, Greenan and Miller, "Screaming fast Galois
//! field arithmetic using Intel SIMD instructions", FAST 2013). All outputs of a pass live in registers while
//! the inputs stream past. Invariant: a [`Kernel`] exists only on a CPU with the instructions. Must not know
//! of anything but columns and factors.
#![allow(unsafe_code)]
// Counted loops over const bounds index several arrays at once: the shape that unrolls into registers.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm256_and_si256, _mm256_broadcastsi128_si256,
    _mm256_set1_epi8, _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_srli_epi16, _mm256_xor_si256,
};

use super::portable::{xor_into_loop, xor_loop};
use super::vectors256::{VECTOR, load, store};
use super::walk::{ADD, AHEAD, walk};

/// Eight accumulators, the halves of an input, a mask, two tables and two products fill the 16 registers.
pub(super) const OUTPUTS_PER_PASS: usize = 8;

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
}

walk!(
    "avx2", [[u8; 32]],
    1 x 2, 2 x 2, 3 x 2, 4 x 1, 5 x 1, 6 x 1, 7 x 1, 8 x 1
);

#[target_feature(enable = "avx2")]
fn xor_into(dst: &mut [u8], src: &[u8]) {
    xor_into_loop(dst, src);
}

#[target_feature(enable = "avx2")]
fn xor(dst: &mut [u8], a: &[u8], b: &[u8]) {
    xor_loop(dst, a, b);
}

/// Computes `S` vectors of every output at byte `at`, or only the first `part` bytes of one vector. An entry
/// of `tables` holds the products of its factor with the 16 low halves of a byte, then with the 16 high ones.
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
    // SAFETY: the caller vouches for bytes `at..at + S * VECTOR` of every column, or the first `part` of
    // them, and for R tables per input.
    unsafe {
        let nibble = _mm256_set1_epi8(15);
        let mut sums = [[_mm256_setzero_si256(); S]; R];
        if STORE == ADD {
            for row in 0..R {
                for strip in 0..S {
                    sums[row][strip] = load::<SHAPE>(outputs[row].add(at + strip * VECTOR), part);
                }
            }
        }
        for input in 0..inputs.len() {
            let column = inputs.get_unchecked(input).as_ptr();
            let mut halves: [[__m256i; 2]; S] = [[_mm256_setzero_si256(); 2]; S];
            for (strip, [low, high]) in halves.iter_mut().enumerate() {
                let vector = load::<SHAPE>(column.add(at + strip * VECTOR), part);
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
                let (to, next) = (at + strip * VECTOR, ahead + strip * VECTOR);
                store::<STORE, SHAPE>(sums[row][strip], outputs[row].add(to), outputs[row].add(next), part);
            }
        }
    }
}
