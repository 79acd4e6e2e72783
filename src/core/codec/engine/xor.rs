//! Plain exclusive or of byte slices, for deltas. The loops are safe Rust, in `portable.rs`; on
//! x86-64 they are compiled a second time for AVX2, chosen at run time. Must not know of columns or
//! factors.

use super::portable::{xor_into_loop, xor_loop};

/// `dst ^= src`.
///
/// # Panics
/// When the lengths differ.
pub fn xor_into(dst: &mut [u8], src: &[u8]) {
    assert_eq!(dst.len(), src.len(), "lengths of the operands of an exclusive or");
    #[cfg(target_arch = "x86_64")]
    if let Some(kernel) = super::avx2::Kernel::detect() {
        return kernel.xor_into(dst, src);
    }
    xor_into_loop(dst, src);
}

/// `dst = a ^ b`.
///
/// # Panics
/// When the lengths differ.
pub fn xor(dst: &mut [u8], a: &[u8], b: &[u8]) {
    assert!(dst.len() == a.len() && a.len() == b.len(), "lengths of the operands of an exclusive or");
    #[cfg(target_arch = "x86_64")]
    if let Some(kernel) = super::avx2::Kernel::detect() {
        return kernel.xor(dst, a, b);
    }
    xor_loop(dst, a, b);
}
