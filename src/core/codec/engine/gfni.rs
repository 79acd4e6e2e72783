//! The AVX-512 + GFNI engine: one gf2p8affineqb multiplies 64 bytes by a factor, given as an 8x8 bit matrix
//! that is broadcast from memory inside the instruction. All outputs of a pass live in registers while the
//! inputs stream past, two inputs per three-way XOR. Invariant: a [`Kernel`] exists only on a CPU with the
//! instructions. Must not know of anything but columns and factors.
#![allow(unsafe_code)]
// Counted loops over const bounds index several arrays at once: the shape that unrolls into registers.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::{
    __m512i, _MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch, _mm512_gf2p8affine_epi64_epi8, _mm512_loadu_si512,
    _mm512_mask_storeu_epi8, _mm512_maskz_loadu_epi8, _mm512_set1_epi64, _mm512_setzero_si512,
    _mm512_storeu_si512, _mm512_stream_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512,
};

use super::walk::{ADD, AHEAD, PART, STREAM, walk};

/// Sixteen accumulators, two inputs and two products fit the 32 registers with room for the compiler.
pub(super) const OUTPUTS_PER_PASS: usize = 16;

/// Bytes of one register.
const VECTOR: usize = 64;

/// Truth table of the exclusive or of three operands.
const XOR3: i32 = 0x96;

/// Proof that this CPU has AVX-512 F and BW and GFNI.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Kernel(());

impl Kernel {
    pub(super) fn detect() -> Option<Kernel> {
        let present = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("gfni");
        present.then_some(Kernel(()))
    }
}

walk!(
    "avx512f,avx512bw,gfni", [u64],
    1 x 4, 2 x 4, 3 x 4, 4 x 4, 5 x 2, 6 x 2, 7 x 2, 8 x 2, 9 x 2, 10 x 2, 11 x 2, 12 x 2, 13 x 1, 14 x 1,
    15 x 1, 16 x 1
);

/// Computes `S` vectors of every output at byte `at`, or only the first `part` bytes of one vector, under a
/// mask.
///
/// # Safety
/// As [`run`], and `at + S * VECTOR`, or `at + part` with `part < VECTOR`, lies within the columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
unsafe fn step<const R: usize, const S: usize, const STORE: u8, const SHAPE: u8>(
    matrices: &[u64],
    inputs: &[&[u8]],
    outputs: &[*mut u8; R],
    at: usize,
    ahead: usize,
    part: usize,
) {
    // SAFETY: the caller vouches for bytes `at..at + S * VECTOR` of every column, or the first `part` of them
    // (masked instructions neither read nor write the others), and for R matrices per input.
    unsafe {
        let mask = u64::MAX >> (VECTOR - part);
        let load = |from: *const u8| match SHAPE {
            PART => _mm512_maskz_loadu_epi8(mask, from.cast()),
            _ => _mm512_loadu_si512(from.cast()),
        };
        let mut sums = [[_mm512_setzero_si512(); S]; R];
        if STORE == ADD {
            for row in 0..R {
                for strip in 0..S {
                    sums[row][strip] = load(outputs[row].add(at + strip * VECTOR));
                }
            }
        }
        let read = |input: usize| -> [__m512i; S] {
            let column = inputs.get_unchecked(input).as_ptr();
            let mut vectors = [_mm512_setzero_si512(); S];
            for (strip, vector) in vectors.iter_mut().enumerate() {
                *vector = load(column.add(at + strip * VECTOR));
                if SHAPE == AHEAD && STORE != ADD {
                    _mm_prefetch::<_MM_HINT_T0>(column.add(ahead + strip * VECTOR).cast());
                }
            }
            vectors
        };
        let matrix = |index: usize| _mm512_set1_epi64(*matrices.get_unchecked(index) as i64);
        let mut input = 0;
        while input + 2 <= inputs.len() {
            let (a, b) = (read(input), read(input + 1));
            for row in 0..R {
                let (by_a, by_b) = (matrix(input * R + row), matrix((input + 1) * R + row));
                for strip in 0..S {
                    sums[row][strip] = _mm512_ternarylogic_epi64::<XOR3>(
                        sums[row][strip],
                        _mm512_gf2p8affine_epi64_epi8::<0>(a[strip], by_a),
                        _mm512_gf2p8affine_epi64_epi8::<0>(b[strip], by_b),
                    );
                }
            }
            input += 2;
        }
        if input < inputs.len() {
            let a = read(input);
            for row in 0..R {
                let by_a = matrix(input * R + row);
                for strip in 0..S {
                    let product = _mm512_gf2p8affine_epi64_epi8::<0>(a[strip], by_a);
                    sums[row][strip] = _mm512_xor_si512(sums[row][strip], product);
                }
            }
        }
        for row in 0..R {
            for strip in 0..S {
                let to = outputs[row].add(at + strip * VECTOR);
                match SHAPE {
                    PART => _mm512_mask_storeu_epi8(to.cast(), mask, sums[row][strip]),
                    _ if STORE == STREAM => _mm512_stream_si512(to.cast(), sums[row][strip]),
                    _ => {
                        if SHAPE == AHEAD && STORE != ADD {
                            _mm_prefetch::<_MM_HINT_ET0>(outputs[row].add(ahead + strip * VECTOR).cast());
                        }
                        _mm512_storeu_si512(to.cast(), sums[row][strip]);
                    }
                }
            }
        }
    }
}
