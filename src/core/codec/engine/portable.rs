//! The reference engine: safe Rust, one table of products per factor. Must not use instructions of a
//! particular CPU.

use std::ops::Range;

use super::super::gf::PRODUCT;
use super::{Output, Store};

/// Inputs are read once per output anyway; a pass per few outputs keeps one tile of the inputs in the cache.
pub(super) const OUTPUTS_PER_PASS: usize = 16;

/// Bytes of one output computed before moving on: it stays in the first-level cache while the inputs stream
/// past.
const TILE_BYTES: usize = 4096;

/// Applies `factors` (for each input, a factor per output) to bytes `range` of the columns.
pub(super) fn apply(
    factors: &[u8],
    inputs: &[&[u8]],
    outputs: &mut [Output<'_>],
    range: Range<usize>,
    store: Store,
) {
    let width = outputs.len();
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min(start + TILE_BYTES);
        for (row, (_, output)) in outputs.iter_mut().enumerate() {
            let output = &mut output[start..end];
            if store != Store::Add {
                output.fill(0);
            }
            for (input, column) in inputs.iter().enumerate() {
                add_product(output, &column[start..end], factors[input * width + row]);
            }
        }
        start = end;
    }
}

/// `output ^= factor * input`, byte by byte.
fn add_product(output: &mut [u8], input: &[u8], factor: u8) {
    let products = &PRODUCT[usize::from(factor)];
    for (out, &byte) in output.iter_mut().zip(input) {
        *out ^= products[usize::from(byte)];
    }
}

/// The loop of [`super::xor_into`], inlined so that it is compiled for the instructions of its caller.
#[inline(always)]
pub(super) fn xor_into_loop(dst: &mut [u8], src: &[u8]) {
    for (out, &byte) in dst.iter_mut().zip(src) {
        *out ^= byte;
    }
}

/// The loop of [`super::xor()`], inlined so that it is compiled for the instructions of its caller.
#[inline(always)]
pub(super) fn xor_loop(dst: &mut [u8], a: &[u8], b: &[u8]) {
    for (out, (&a, &b)) in dst.iter_mut().zip(a.iter().zip(b)) {
        *out = a ^ b;
    }
}
