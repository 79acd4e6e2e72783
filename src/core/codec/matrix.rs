//! Coefficients of the code: how any column of a codeword is a combination of any other k columns.
//!
//! The code is the systematic form of the Vandermonde matrix whose row i is (i^0, i^1, ..., i^(k-1)), the
//! matrix of Gibraltar, Backblaze and reed-solomon-erasure. Multiplying such a matrix by the inverse of its
//! top k rows means: column i of a codeword is the value at the field element i of the polynomial of degree <
//! k that takes the data bytes at 0..k. So the coefficients from k present columns to any other column are
//! the Lagrange basis polynomials at that column: the same result as a matrix inversion, with O(k^2) table
//! look-ups instead of O(k^3). Encoding is the case in which the data columns are the present ones. Must not
//! know of engines or bytes of columns.

use super::gf::{EXP, LOG, ORDER};

/// The coefficients of `wanted` columns as combinations of `present` ones: `wanted.len()` rows of
/// `present.len()` factors, row after row. `present` is exactly k distinct columns, `wanted` holds none of
/// them.
pub(super) fn coefficients(present: &[u8], wanted: &[u8]) -> Vec<u8> {
    let log_difference = |a: u8, b: u8| u32::from(LOG[usize::from(a ^ b)]);
    // A sum of at most 255 logarithms below 255 stays far below 2^32: reduce once, at the end.
    let denominators: Vec<u32> = present
        .iter()
        .map(|&p| present.iter().filter(|&&q| q != p).map(|&q| log_difference(p, q)).sum::<u32>() % ORDER)
        .collect();
    let mut rows = Vec::with_capacity(present.len() * wanted.len());
    for &w in wanted {
        let numerator = present.iter().map(|&q| log_difference(w, q)).sum::<u32>() % ORDER;
        rows.extend(present.iter().zip(&denominators).map(|(&p, &denominator)| {
            let log = numerator + 2 * ORDER - log_difference(w, p) - denominator;
            EXP[(log % ORDER) as usize]
        }));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_parity_row_of_10_plus_4_is_the_published_one() {
        let data: Vec<u8> = (0..10).collect();
        assert_eq!(coefficients(&data, &[10]), [129, 150, 175, 184, 210, 196, 254, 232, 3, 2]);
    }

    #[test]
    fn one_data_column_is_mirrored() {
        assert_eq!(coefficients(&[0], &[1, 2, 254]), [1, 1, 1]);
    }

    #[test]
    fn a_later_parity_leaves_earlier_rows_as_they_were() {
        let data: Vec<u8> = (0..20).collect();
        let few = coefficients(&data, &[20, 21]);
        let more = coefficients(&data, &[20, 21, 22]);
        assert_eq!(few[..], more[..40]);
    }
}
