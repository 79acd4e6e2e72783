//! The numbers of the format: its versions, sizes, and the limits of its counts. Uses no other part of the
//! format, so that every part may use it.

use crate::units::ROW_BYTES;

/// Everything that is counted (sequences, epochs, updates, batches, versions of pages, errors)
/// stays below this. At a million a second that takes 146,000 years: a larger number was not
/// reached by counting, and the sum of two smaller ones does not overflow.
pub const COUNT_END: u64 = 1 << 62;
/// More than one start of an array can count: at a million a second, 2,000 years. An array does not
/// start from a device with a count closer than this to [`COUNT_END`], so that counting on needs no
/// checks.
pub const COUNTED_IN_A_LIFE: u64 = 1 << 56;

/// Bytes of one copy: room for 255 member records, and few enough that both slots fit a small head area.
pub const COPY_BYTES: usize = 16 * 1024;

/// Version of the format that this code writes. A higher major version is refused, a higher minor one is
/// read.
pub const FORMAT_MAJOR: u16 = 1;
/// See [`FORMAT_MAJOR`].
pub const FORMAT_MINOR: u16 = 0;

/// Members of an array: the field of 256 elements has that many distinct non-zero coefficients.
pub const MAX_MEMBERS: u16 = 255;
/// Replacements under construction at one time: half an array of the widest kind; the copy has room for no
/// more than 224 beside the other tables.
pub const MAX_REPLACEMENTS: usize = 128;
/// Regions of a member: three today.
pub const MAX_REGIONS: usize = 15;
/// Bytes of an array's name: what fits the fixed field; it is also an NBD export name and part of a URI.
pub const MAX_NAME_BYTES: usize = 64;
/// Smallest chunk: one row.
pub const MIN_CHUNK_BYTES: u32 = 4096;
/// Largest chunk: keeps a stripe of 255 chunks, which a rebuild may hold in memory, below 1 GiB.
pub const MAX_CHUNK_BYTES: u32 = 4 << 20;
/// Largest device and largest volume: file offsets and NBD clients' offsets are signed 64-bit numbers.
pub const MAX_DEVICE_BYTES: u64 = i64::MAX as u64 & !(ROW_BYTES - 1);

/// Members out of service whose tails are recorded: as many as there is room for. No more than m are ever out
/// while an array lives; a member without a record is rebuilt.
pub const MAX_LEFT: usize = 100;

/// Members that are out of service with the update at which they left: what fits into a copy.
pub const MAX_LEFT_UPDATES: usize = 10;
