//! The field GF(2^8) of every codec engine: polynomial 0x11D (x^8 + x^4 + x^3 + x^2 + 1), generator 2, with
//! all its tables evaluated at compile time. Invariant: the tables and the functions here are the only
//! definition of the field; engines derive theirs from it. Must not know of matrices, columns or engines.

/// The reduction polynomial, with its x^8 term.
const POLYNOMIAL: u16 = 0x11D;

/// Number of non-zero elements; exponents of the generator live modulo this.
pub(super) const ORDER: u32 = 255;

const fn exp_table() -> [u8; 256] {
    let mut table = [0; 256];
    let mut value: u16 = 1;
    let mut power = 0;
    while power < 256 {
        table[power] = value as u8;
        value <<= 1;
        if value & 0x100 != 0 {
            value ^= POLYNOMIAL;
        }
        power += 1;
    }
    table
}

const fn log_table() -> [u8; 256] {
    let exp = exp_table();
    let mut table = [0; 256];
    let mut power = 0;
    while power < ORDER as usize {
        table[exp[power] as usize] = power as u8;
        power += 1;
    }
    table
}

const fn product_table() -> [[u8; 256]; 256] {
    let mut table = [[0; 256]; 256];
    let mut a = 1;
    while a < 256 {
        let mut b = 1;
        while b < 256 {
            let log = LOG[a] as usize + LOG[b] as usize;
            table[a][b] = EXP[if log >= ORDER as usize { log - ORDER as usize } else { log }];
            b += 1;
        }
        a += 1;
    }
    table
}

const fn nibble_table() -> [[u8; 32]; 256] {
    let mut table = [[0; 32]; 256];
    let mut c = 0;
    while c < 256 {
        let mut n = 0;
        while n < 16 {
            table[c][n] = PRODUCT[c][n];
            table[c][16 + n] = PRODUCT[c][n << 4];
            n += 1;
        }
        c += 1;
    }
    table
}

const fn affine_table() -> [u64; 256] {
    let mut table = [0; 256];
    let mut c = 0;
    while c < 256 {
        let mut input = 0;
        while input < 8 {
            let column = PRODUCT[c][1 << input];
            let mut output = 0;
            while output < 8 {
                if column >> output & 1 == 1 {
                    table[c] |= 1 << (8 * (7 - output) + input);
                }
                output += 1;
            }
            input += 1;
        }
        c += 1;
    }
    table
}

/// `EXP[i]` is 2^i, for i in 0..=255.
pub(super) static EXP: [u8; 256] = exp_table();

/// `LOG[a]` is the i in 0..255 with 2^i = a. `LOG[0]` is meaningless: callers never read it.
pub(super) static LOG: [u8; 256] = log_table();

/// `PRODUCT[a][b]` is a times b.
pub(super) static PRODUCT: [[u8; 256]; 256] = product_table();

/// `NIBBLE[c]` holds c times 0..16, then c times the same values shifted left by four: two byte-shuffle
/// tables.
pub(super) static NIBBLE: [[u8; 32]; 256] = nibble_table();

/// `AFFINE[c]` is multiplication by c as the 8x8 bit matrix that gf2p8affineqb takes: byte 7-i is the mask of
/// the input bits that sum to output bit i. (The instruction that multiplies directly is fixed to another
/// polynomial.)
pub(super) static AFFINE: [u64; 256] = affine_table();

#[cfg(test)]
mod tests {
    use super::*;

    /// Multiplication straight from the definition: shift, add, reduce.
    fn multiply(a: u8, b: u8) -> u8 {
        let mut wide = 0u16;
        for bit in 0..8 {
            if b >> bit & 1 == 1 {
                wide ^= u16::from(a) << bit;
            }
        }
        for bit in (8..16).rev() {
            if wide >> bit & 1 == 1 {
                wide ^= POLYNOMIAL << (bit - 8);
            }
        }
        wide as u8
    }

    #[test]
    fn every_table_agrees_with_shift_and_add_multiplication() {
        for a in 0..=255u8 {
            for b in 0..=255u8 {
                let product = multiply(a, b);
                let (low, high) = (usize::from(b & 15), usize::from(b >> 4));
                let tables = &NIBBLE[usize::from(a)];
                let matrix = AFFINE[usize::from(a)].to_le_bytes();
                let affine =
                    (0..8).fold(0, |sum, i| sum | (((matrix[7 - i] & b).count_ones() as u8 & 1) << i));
                assert_eq!(PRODUCT[usize::from(a)][usize::from(b)], product);
                assert_eq!(tables[low] ^ tables[16 + high], product);
                assert_eq!(affine, product);
            }
        }
    }

    #[test]
    fn logarithms_invert_exponents() {
        for power in 0..ORDER as u8 {
            assert_eq!(LOG[usize::from(EXP[usize::from(power)])], power);
        }
        assert_eq!(EXP[8], 0x1D);
    }
}
