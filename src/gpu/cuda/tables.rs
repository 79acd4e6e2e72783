//! The form in which kernels get a matrix: the product tables of the byte-permute kernels, and the division
//! of rows into passes over the inputs. Pure. Must not know of devices.

/// Words of the tables of one factor: two for its products with 0..8, two with (0..8) << 3, one with (0..4)
/// << 6.
pub(super) const TABLE_WORDS: usize = 5;

/// Bytes of the tables of one factor.
pub(super) const TABLE_BYTES: usize = TABLE_WORDS * size_of::<u32>();

/// Numbers of rows that one launch of `rs_table` or `rs_delta` can compute, largest first.
pub(super) const TABLE_PASSES: [usize; 5] = [8, 4, 3, 2, 1];

/// Numbers of rows that one launch of `rs_logexp` can compute, largest first.
pub(super) const LOGEXP_PASSES: [usize; 7] = [16, 8, 6, 4, 3, 2, 1];

/// Product in GF(2^8) over 0x11D.
#[must_use]
pub(super) fn product(a: u8, b: u8) -> u8 {
    let mut sum = 0u16;
    for bit in (0..8).rev() {
        sum = sum << 1 ^ if sum & 0x80 == 0 { 0 } else { 0x11D };
        if b >> bit & 1 == 1 {
            sum ^= u16::from(a);
        }
    }
    sum as u8
}

/// The tables of one factor in the form that the kernels read.
#[must_use]
pub(super) fn factor_tables(factor: u8) -> [u32; TABLE_WORDS] {
    let four = |first: u8, shift: u32| {
        u32::from_le_bytes(std::array::from_fn(|at| product(factor, (first + at as u8) << shift)))
    };
    [four(0, 0), four(4, 0), four(0, 3), four(4, 3), four(0, 6)]
}

/// Appends the tables of all factors to `bytes`, in the order of the factors.
pub(super) fn push_tables(factors: impl Iterator<Item = u8>, bytes: &mut Vec<u8>) {
    for factor in factors {
        bytes.extend(factor_tables(factor).iter().flat_map(|word| word.to_le_bytes()));
    }
}

/// Divides rows into launches, as (first row, rows); the number of rows of each is one of `sizes`, which
/// descend to 1.
#[must_use]
pub(super) fn passes(rows: usize, sizes: &[usize]) -> Vec<(usize, usize)> {
    let mut cut = Vec::new();
    let mut row = 0;
    while row < rows {
        let size = sizes.iter().copied().find(|&size| size <= rows - row).expect("sizes descend to 1");
        cut.push((row, size));
        row += size;
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_those_of_the_field() {
        assert_eq!(product(2, 0x80), 0x1D);
        assert_eq!(product(0x53, 1), 0x53);
        // The generator has order 255.
        let mut power = 1;
        for exponent in 1..=255 {
            power = product(power, 2);
            assert_eq!(power == 1, exponent == 255, "2^{exponent}");
        }
        for (a, b, c) in [(3, 7, 200), (129, 255, 91), (0, 9, 14)] {
            assert_eq!(product(a, b), product(b, a));
            assert_eq!(product(a, b ^ c), product(a, b) ^ product(a, c));
        }
    }

    #[test]
    fn the_tables_of_a_factor_give_its_product_with_every_byte() {
        for factor in [0, 1, 2, 29, 142, 255] {
            let bytes: Vec<u8> = factor_tables(factor).iter().flat_map(|word| word.to_le_bytes()).collect();
            for byte in 0..=255u8 {
                let (low, middle, top) = (byte & 7, byte >> 3 & 7, byte >> 6);
                let sum =
                    bytes[usize::from(low)] ^ bytes[8 + usize::from(middle)] ^ bytes[16 + usize::from(top)];
                assert_eq!(sum, product(factor, byte), "{factor} times {byte}");
            }
        }
    }

    #[test]
    fn passes_compute_every_row_once_with_kernels_that_exist() {
        for sizes in [&TABLE_PASSES[..], &LOGEXP_PASSES[..]] {
            for rows in 0..=255 {
                let mut next = 0;
                for (row, size) in passes(rows, sizes) {
                    assert_eq!(row, next);
                    assert!(sizes.contains(&size));
                    next += size;
                }
                assert_eq!(next, rows);
            }
        }
    }
}
