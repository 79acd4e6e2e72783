//! Loads and stores of the engines with 32-byte registers. Must not know what is computed.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m256i, _MM_HINT_ET0, _mm_prefetch, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256,
};

use super::walk::{ADD, AHEAD, PART, STREAM};

/// Bytes of one register.
pub(super) const VECTOR: usize = 32;

/// The vector at `from`; in a step of shape [`PART`], its first `part` bytes and zeroes.
///
/// # Safety
/// The CPU has AVX2; the bytes named above are readable, and `part < VECTOR` when the shape is [`PART`].
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load<const SHAPE: u8>(from: *const u8, part: usize) -> __m256i {
    // SAFETY: the caller vouches for a vector at `from`, or for `part` bytes, which fit into `padded`.
    unsafe {
        if SHAPE != PART {
            return _mm256_loadu_si256(from.cast());
        }
        let mut padded = [0u8; VECTOR];
        padded.as_mut_ptr().copy_from_nonoverlapping(from, part);
        _mm256_loadu_si256(padded.as_ptr().cast())
    }
}

/// Writes `vector` to `to`, or its first `part` bytes in a step of shape [`PART`]. A step of shape [`AHEAD`]
/// that does not read its outputs fetches the one at `ahead`.
///
/// # Safety
/// The CPU has AVX2; the bytes named above are writable, and `part < VECTOR` when the shape is [`PART`]. `to`
/// is aligned to a vector when the store is [`STREAM`].
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn store<const STORE: u8, const SHAPE: u8>(
    vector: __m256i,
    to: *mut u8,
    ahead: *const u8,
    part: usize,
) {
    // SAFETY: the caller vouches for a vector at `to`, or for `part` bytes, fewer than `padded` has; a
    // prefetch may name any address.
    unsafe {
        match SHAPE {
            PART => {
                let mut padded = [0u8; VECTOR];
                _mm256_storeu_si256(padded.as_mut_ptr().cast(), vector);
                to.copy_from_nonoverlapping(padded.as_ptr(), part);
            }
            _ if STORE == STREAM => _mm256_stream_si256(to.cast(), vector),
            _ => {
                if SHAPE == AHEAD && STORE != ADD {
                    _mm_prefetch::<_MM_HINT_ET0>(ahead.cast());
                }
                _mm256_storeu_si256(to.cast(), vector);
            }
        }
    }
}
