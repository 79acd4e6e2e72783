//! The AVX2 + GFNI engine, for CPUs with GFNI that lack AVX-512: one gf2p8affineqb multiplies 32 bytes by a
//! factor, given as an 8x8 bit matrix. All outputs of a pass live in registers while the inputs stream past.
//! Invariant: a [`Kernel`] exists only on a CPU with the instructions. Must not know of anything but columns
//! and factors.
#![allow(unsafe_code)]
// Counted loops over const bounds index several arrays at once: the shape that unrolls into registers.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_gf2p8affine_epi64_epi8, _mm256_set1_epi64x,
    _mm256_setzero_si256, _mm256_xor_si256,
};

use super::vectors256::{VECTOR, load, store};
use super::walk::{ADD, AHEAD, walk};

/// Ten accumulators, two inputs, two matrices and two products fill the 16 registers.
pub(super) const OUTPUTS_PER_PASS: usize = 10;

/// Proof that this CPU has AVX2 and GFNI.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Kernel(());

impl Kernel {
    pub(super) fn detect() -> Option<Kernel> {
        let present = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("gfni");
        present.then_some(Kernel(()))
    }
}

walk!(
    "avx2,gfni", [u64],
    1 x 4, 2 x 4, 3 x 2, 4 x 2, 5 x 2, 6 x 1, 7 x 1, 8 x 1, 9 x 1, 10 x 1
);

/// Computes `S` vectors of every output at byte `at`, or only the first `part` bytes of one vector.
///
/// # Safety
/// As [`run`], and `at + S * VECTOR`, or `at + part` with `part < VECTOR`, lies within the columns.
#[inline]
#[target_feature(enable = "avx2,gfni")]
unsafe fn step<const R: usize, const S: usize, const STORE: u8, const SHAPE: u8>(
    matrices: &[u64],
    inputs: &[&[u8]],
    outputs: &[*mut u8; R],
    at: usize,
    ahead: usize,
    part: usize,
) {
    // SAFETY: the caller vouches for bytes `at..at + S * VECTOR` of every column, or the first `part` of
    // them, and for R matrices per input.
    unsafe {
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
            let mut vectors: [__m256i; S] = [_mm256_setzero_si256(); S];
            for (strip, vector) in vectors.iter_mut().enumerate() {
                *vector = load::<SHAPE>(column.add(at + strip * VECTOR), part);
                if SHAPE == AHEAD && STORE != ADD {
                    _mm_prefetch::<_MM_HINT_T0>(column.add(ahead + strip * VECTOR).cast());
                }
            }
            for row in 0..R {
                let matrix = _mm256_set1_epi64x(*matrices.get_unchecked(input * R + row) as i64);
                for strip in 0..S {
                    let product = _mm256_gf2p8affine_epi64_epi8::<0>(vectors[strip], matrix);
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
