//! Sizes as people write and read them: parses "1.5TiB", prints "1.50 TiB", and prints two
//! different sizes so that they look different.
//!
//! Invariants: parsing is exact and never rounds; two different sizes never print the same in one
//! message.

use super::{ByteCount, Printable};
use std::fmt;
use std::str::FromStr;

/// Names of the units, largest first, with the power of two that each stands for.
const UNITS: [(&str, u32); 5] = [("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

/// Most digits after the point: one byte as a fraction of a PiB has 50.
const FRACTION_DIGITS_MAX: usize = 50;

/// Longest text that is parsed: 20 digits of 2^64, a point, a fraction, a unit, spaces.
const TEXT_BYTES_MAX: usize = 100;

/// Why a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseSizeError {
    /// The text is not a number with a known unit.
    #[error(
        "'{}' is not a size: write a number of bytes, or one with KiB, MiB, GiB, TiB or PiB (4096, 64KiB, 1.5TiB)",
        Printable(text)
    )]
    NotASize {
        /// What was written.
        text: String,
    },
    /// The size is not a whole number of bytes.
    #[error("'{}' is not a whole number of bytes: it lies between {below} and {}", Printable(text), u128::from(*below) + 1)]
    NotWhole {
        /// What was written.
        text: String,
        /// The whole number of bytes below it.
        below: u64,
    },
    /// The size does not fit into 64 bits.
    #[error("'{}' is too large: a size is less than 16384 PiB", Printable(text))]
    TooLarge {
        /// What was written.
        text: String,
    },
}

impl FromStr for ByteCount {
    type Err = ParseSizeError;

    /// Accepts `4096`, `64KiB`, `1 GiB`, `1.5TiB`; units B, KiB, MiB, GiB, TiB, PiB and their first letters,
    /// in any case.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let not_a_size = || ParseSizeError::NotASize { text: text.chars().take(TEXT_BYTES_MAX).collect() };
        let too_large = || ParseSizeError::TooLarge { text: text.to_owned() };
        let trimmed = text.trim();
        if trimmed.len() > TEXT_BYTES_MAX {
            return Err(not_a_size());
        }
        let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let shift = shift_of(unit.trim()).ok_or_else(not_a_size)?;
        let (whole, fraction) = match number.split_once('.') {
            Some((_, "")) => return Err(not_a_size()),
            Some((whole, fraction)) => (whole, fraction),
            None => (number, ""),
        };
        let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty()
            || !are_digits(whole)
            || !are_digits(fraction)
            || fraction.len() > FRACTION_DIGITS_MAX
        {
            return Err(not_a_size());
        }
        let whole: u64 = whole.parse().map_err(|_| too_large())?;
        let (part, is_whole) = share_of(fraction, shift);
        let bytes =
            whole.checked_mul(1 << shift).and_then(|bytes| bytes.checked_add(part)).ok_or_else(too_large)?;
        if is_whole {
            Ok(ByteCount(bytes))
        } else {
            Err(ParseSizeError::NotWhole { text: text.into(), below: bytes })
        }
    }
}

fn shift_of(unit: &str) -> Option<u32> {
    let unit = unit.to_ascii_lowercase();
    if unit.is_empty() || unit == "b" {
        return Some(0);
    }
    let named = |(name, _): &&(&str, u32)| {
        let name = name.to_ascii_lowercase();
        unit == name || unit == name[..1]
    };
    UNITS.iter().find(named).map(|(_, shift)| *shift)
}

/// The whole bytes in `0.fraction` of 2^shift bytes, and whether nothing is left over. Exact: the decimal
/// fraction is doubled `shift` times by hand, and each carry out of it is a bit of the result.
fn share_of(fraction: &str, shift: u32) -> (u64, bool) {
    let mut digits: Vec<u8> = fraction.bytes().map(|byte| byte - b'0').collect();
    let mut bytes = 0;
    for _ in 0..shift {
        let mut carry = 0;
        for digit in digits.iter_mut().rev() {
            let doubled = *digit * 2 + carry;
            (*digit, carry) = (doubled % 10, doubled / 10);
        }
        bytes = bytes << 1 | u64::from(carry);
    }
    (bytes, digits.iter().all(|digit| *digit == 0))
}

/// Prints a byte count for people: the largest binary unit that keeps three significant digits.
#[derive(Debug, Clone, Copy)]
pub struct HumanSize(pub u64);

impl fmt::Display for HumanSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, shift) in UNITS {
            if self.0 >> shift >= 1 {
                let value = self.0 as f64 / (1u64 << shift) as f64;
                return if self.0.is_multiple_of(1 << shift) {
                    write!(f, "{} {name}", self.0 >> shift)
                } else if value >= 100.0 {
                    write!(f, "{value:.0} {name}")
                } else if value >= 10.0 {
                    write!(f, "{value:.1} {name}")
                } else {
                    write!(f, "{value:.2} {name}")
                };
            }
        }
        write!(f, "{} B", self.0)
    }
}

/// Prints a byte count that is compared with another one. Adds the exact bytes where two different
/// counts would otherwise print the same.
#[derive(Debug, Clone, Copy)]
pub struct SizeBeside {
    /// What is printed.
    pub bytes: u64,
    /// What it is compared with.
    pub other: u64,
}

impl fmt::Display for SizeBeside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (text, other) = (HumanSize(self.bytes).to_string(), HumanSize(self.other).to_string());
        f.write_str(&text)?;
        let looks = |text: &str| text.replace(".00 ", " ").replace(".0 ", " ");
        if self.bytes != self.other && looks(&text) == looks(&other) {
            write!(f, " ({} bytes)", self.bytes)
        } else {
            Ok(())
        }
    }
}

/// Two sizes for one message that compares them.
#[must_use]
pub fn two_sizes(first: u64, second: u64) -> (SizeBeside, SizeBeside) {
    (SizeBeside { bytes: first, other: second }, SizeBeside { bytes: second, other: first })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<u64, ParseSizeError> {
        text.parse::<ByteCount>().map(|size| size.0)
    }

    #[test]
    fn sizes_parse_with_binary_suffixes_in_any_case() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64KiB", 65536),
            ("1 gib", 1 << 30),
            ("2T", 2 << 40),
            ("3PiB", 3 << 50),
            ("1p", 1 << 50),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn fractions_are_exact() {
        for (text, bytes) in [
            ("1.5TiB", 3 << 39),
            ("0.5PiB", 1 << 49),
            ("1.5KiB", 1536),
            ("2.0", 2),
            ("0.25 mib", 1 << 18),
            ("0.0009765625KiB", 1),
            ("16383.99999999999999911182158029987476766109466552734375PiB", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn parts_of_bytes_are_told_with_the_numbers_beside_them() {
        for (text, below) in [("1.5", 1), ("0.1KiB", 102), ("1.1TiB", 1_209_462_790_553)] {
            let error = parse(text).unwrap_err();
            assert_eq!(error, ParseSizeError::NotWhole { text: text.into(), below });
            let said = error.to_string();
            assert!(
                said.contains("not a whole number of bytes") && said.contains(&(below + 1).to_string()),
                "{said}"
            );
        }
    }

    #[test]
    fn nonsense_and_overflowing_sizes_are_refused() {
        for text in ["", "KiB", "-1", "1GB", "1 2", ".", "1.", ".5GiB", "1.5.5GiB", "1e3", "0x10", "+1"] {
            assert!(matches!(parse(text), Err(ParseSizeError::NotASize { .. })), "{text}");
        }
        assert!(parse(&format!("1.{}", "0".repeat(1 << 20))).is_err());
        for text in ["99999999999TiB", "16384PiB", "18446744073709551616", "18446744073709551615.5"] {
            let told = parse(text);
            let fits = matches!(told, Err(ParseSizeError::TooLarge { .. } | ParseSizeError::NotWhole { .. }));
            assert!(fits, "{text}: {told:?}");
        }
        assert!(parse("16384PiB").unwrap_err().to_string().contains("too large"));
    }

    #[test]
    fn human_sizes_keep_three_digits() {
        assert_eq!(HumanSize(512).to_string(), "512 B");
        assert_eq!(HumanSize(1 << 30).to_string(), "1 GiB");
        assert_eq!(HumanSize(1536 * 1024).to_string(), "1.50 MiB");
        assert_eq!(HumanSize(3 << 50).to_string(), "3 PiB");
    }

    #[test]
    fn sizes_that_are_compared_are_told_apart() {
        let (has, needed) = two_sizes(2_254_857_830, 2_254_857_831);
        assert_eq!(format!("{has} / {needed}"), "2.10 GiB (2254857830 bytes) / 2.10 GiB (2254857831 bytes)");
        let (has, needed) = two_sizes(84 << 20, (84 << 20) + 4096);
        assert_eq!(format!("{has} / {needed}"), "84 MiB (88080384 bytes) / 84.0 MiB (88084480 bytes)");
        let (has, needed) = two_sizes(1 << 30, 2 << 30);
        assert_eq!(format!("{has} / {needed}"), "1 GiB / 2 GiB");
        let (has, needed) = two_sizes(7, 7);
        assert_eq!(format!("{has} / {needed}"), "7 B / 7 B");
    }

    proptest! {
        #[test]
        fn sizes_that_differ_never_look_the_same(first in any::<u64>(), shift in 0u32..64, step in 1u64..1000) {
            let first = first >> shift;
            let (a, b) = two_sizes(first, first.saturating_add(step));
            prop_assert!(first == u64::MAX || a.to_string() != b.to_string());
        }

        #[test]
        fn noise_is_no_size_and_no_panic(text in ".{0,80}") {
            let _ = parse(&text);
        }

        #[test]
        fn halves_of_units_are_whole(count in 0u64..8000, shift in 1usize..5) {
            let (name, power) = UNITS[shift - 1];
            prop_assert_eq!(parse(&format!("{count}.5{name}")), Ok((2 * count + 1) << (power - 1)));
        }
    }
}
