//! The description of an export, and the interface through which a server looks exports up.
//!
//! Invariant: an export that passes [`ExportInfo::check`] can be described to any client without breaking the
//! protocol's rules on names and block sizes. It must not know what stores the bytes.

use super::wire::{Headers, StringFault, can, check_string};

/// The largest READ reply and WRITE payload, in bytes: what clients assume when nothing is advertised, and
/// what one request may pin in buffers.
pub const BLOCK_BYTES_MAX: u32 = 32 << 20;

/// The largest minimum block size that the protocol lets a server demand.
pub const BLOCK_MIN_BYTES_MAX: u32 = 1 << 16;

/// The largest minimum block size that a client is taken to respect without having been told: every block
/// layer works in sectors of 512 bytes at least, and the protocol tells clients to assume so.
pub const BLOCK_MIN_BYTES_ASSUMED: u32 = 512;

/// Unfragmented reads of this many bytes must work; one reply carries at most a maximum block.
const DF_BYTES_MIN: u32 = 64 << 10;

/// One export as clients see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// The name that clients request.
    pub name: String,
    /// A line for people; may be empty.
    pub description: String,
    /// Bytes.
    pub size: u64,
    /// Refuse WRITE, TRIM and WRITE_ZEROES with EPERM.
    pub read_only: bool,
    /// Alignment of every offset and length, in bytes: a power of two, at most [`BLOCK_MIN_BYTES_MAX`].
    pub block_min: u32,
    /// The size from which aligned requests are efficient, in bytes: a power of two.
    pub block_preferred: u32,
    /// The largest payload of one READ or WRITE, in bytes; at most [`BLOCK_BYTES_MAX`].
    pub block_max: u32,
    /// Stored on spinning media.
    pub rotational: bool,
    /// Serves TRIM.
    pub trim: bool,
    /// Serves WRITE_ZEROES.
    pub write_zeroes: bool,
    /// Serves WRITE_ZEROES with FAST_ZERO; needs `write_zeroes`.
    pub fast_zero: bool,
    /// FLUSH and FUA on one connection cover writes completed on all of them.
    pub multi_conn: bool,
    /// Serves CACHE.
    pub cache: bool,
}

/// Why an export cannot be offered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportFault {
    /// The name cannot travel.
    #[error("the export's name is {0}")]
    Name(StringFault),
    /// The description cannot travel.
    #[error("the export's description is {0}")]
    Description(StringFault),
    /// The block sizes contradict one another or the protocol.
    #[error(
        "block sizes {min}, {preferred}, {max} of an export of {size} bytes: want powers of two with \
         min <= 65536, min <= preferred <= 32 MiB, and a maximum that is a multiple of min, at most 32 MiB and \
         not below 64 KiB, preferred, or else the export's size"
    )]
    BlockSizes {
        /// Minimum, bytes.
        min: u32,
        /// Preferred, bytes.
        preferred: u32,
        /// Maximum, bytes.
        max: u32,
        /// Export, bytes.
        size: u64,
    },
    /// The size leaves a tail that no aligned request reaches, or cannot be told to clients.
    #[error("a size of {size} bytes is not a multiple of the minimum block size {min}, or above 2^63-1")]
    Size {
        /// Export, bytes.
        size: u64,
        /// Minimum block, bytes.
        min: u32,
    },
}

impl ExportInfo {
    /// Whether the export can be offered. Meant for start-up; a connection refuses what fails here.
    ///
    /// # Errors
    /// [`ExportFault`] names the first rule broken.
    pub fn check(&self) -> Result<(), ExportFault> {
        check_string(self.name.as_bytes()).map_err(ExportFault::Name)?;
        check_string(self.description.as_bytes()).map_err(ExportFault::Description)?;
        let (min, preferred, max) = (self.block_min, self.block_preferred, self.block_max);
        let good = min.is_power_of_two()
            && preferred.is_power_of_two()
            && min <= BLOCK_MIN_BYTES_MAX
            && (min..=BLOCK_BYTES_MAX).contains(&preferred)
            && max > 0
            && max <= BLOCK_BYTES_MAX
            && max.is_multiple_of(min)
            && u64::from(max) >= u64::from(preferred.max(DF_BYTES_MIN)).min(self.size);
        if !good {
            return Err(ExportFault::BlockSizes { min, preferred, max, size: self.size });
        }
        // Clients keep sizes in signed 64-bit integers (off_t).
        if !self.size.is_multiple_of(u64::from(min)) || i64::try_from(self.size).is_err() {
            return Err(ExportFault::Size { size: self.size, min });
        }
        Ok(())
    }

    /// The transmission flags. DF may be announced only to clients that negotiated structured replies, and
    /// BLOCK_STATUS with a payload (`filter`) only to those with extended headers. What would be refused on a
    /// read-only export is not announced there.
    pub(super) fn transmission_flags(&self, headers: Headers, filter: bool) -> u16 {
        let writable = !self.read_only;
        [
            (true, can::HAS_FLAGS | can::FLUSH | can::FUA),
            (self.read_only, can::READ_ONLY),
            (self.rotational, can::ROTATIONAL),
            (self.trim && writable, can::TRIM),
            (self.write_zeroes && writable, can::WRITE_ZEROES),
            (self.fast_zero && self.write_zeroes && writable, can::FAST_ZERO),
            (headers >= Headers::Structured, can::DF),
            (headers == Headers::Extended && filter, can::BLOCK_STATUS_PAYLOAD),
            (self.multi_conn, can::MULTI_CONN),
            (self.cache, can::CACHE),
        ]
        .into_iter()
        .fold(0, |flags, (set, flag)| if set { flags | flag } else { flags })
    }
}

/// Where a connection looks exports up during its handshake.
pub trait Exports {
    /// Every export that clients may know of.
    fn list(&self) -> Vec<ExportInfo>;
    /// The export of that name; "" asks for the default one.
    fn find(&self, name: &str) -> Option<ExportInfo>;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export() -> ExportInfo {
        ExportInfo {
            name: "vol".into(),
            description: String::new(),
            size: 1 << 20,
            read_only: false,
            block_min: 512,
            block_preferred: 65536,
            block_max: BLOCK_BYTES_MAX,
            rotational: false,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            multi_conn: true,
            cache: true,
        }
    }

    #[test]
    fn a_sound_export_passes_and_every_broken_rule_is_named() {
        assert_eq!(export().check(), Ok(()));
        assert_eq!(ExportInfo { size: 0, ..export() }.check(), Ok(()));
        assert!(matches!(ExportInfo { name: "a\0".into(), ..export() }.check(), Err(ExportFault::Name(_))));
        let long = "x".repeat(4097);
        assert!(matches!(
            ExportInfo { description: long, ..export() }.check(),
            Err(ExportFault::Description(StringFault::TooLong))
        ));
        for (min, preferred, max) in [
            (0, 4096, 1 << 20),
            (768, 4096, 768 * 4096),
            (1 << 17, 1 << 17, 1 << 20),
            (4096, 512, 1 << 20),
            (512, 5000, 1 << 20),
            (512, 4096, 0),
            (512, 4096, 1000),
            (512, 4096, 2048),
            (512, 4096, (32 << 20) + 512),
        ] {
            let bad = ExportInfo { block_min: min, block_preferred: preferred, block_max: max, ..export() };
            assert!(matches!(bad.check(), Err(ExportFault::BlockSizes { .. })), "{min} {preferred} {max}");
        }
        assert!(matches!(ExportInfo { size: 1000, ..export() }.check(), Err(ExportFault::Size { .. })));
        assert!(matches!(ExportInfo { size: 1 << 63, ..export() }.check(), Err(ExportFault::Size { .. })));
    }

    #[test]
    fn flags_say_what_the_export_can_do_and_df_only_with_structured_replies() {
        let flags = export().transmission_flags(Headers::Simple, true);
        assert_eq!(flags, 0b1101_0110_1101);
        assert_eq!(export().transmission_flags(Headers::Structured, true), flags | 1 << 7);
        assert_eq!(export().transmission_flags(Headers::Extended, false), flags | 1 << 7);
        assert_eq!(export().transmission_flags(Headers::Extended, true), flags | 1 << 7 | 1 << 12);
        let read_only = ExportInfo { read_only: true, rotational: true, ..export() };
        assert_eq!(read_only.transmission_flags(Headers::Structured, true), 0b0101_1001_1111);
    }
}
