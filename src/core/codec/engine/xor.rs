//! Plain exclusive or of byte slices, for deltas. The loops are safe Rust; on x86-64 they are compiled a second time
//! for AVX2, chosen at run time. Must not know of columns or factors.

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

/// The loop of [`xor_into`], inlined so that it takes the instructions of its caller.
#[inline(always)]
pub(super) fn xor_into_loop(dst: &mut [u8], src: &[u8]) {
    for (out, &byte) in dst.iter_mut().zip(src) {
        *out ^= byte;
    }
}

/// The loop of [`xor`], inlined so that it takes the instructions of its caller.
#[inline(always)]
pub(super) fn xor_loop(dst: &mut [u8], a: &[u8], b: &[u8]) {
    for (out, (&a, &b)) in dst.iter_mut().zip(a.iter().zip(b)) {
        *out = a ^ b;
    }
}
