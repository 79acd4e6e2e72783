//! Newtypes for every quantity that two layers exchange, so that an absolute offset is never taken
//! for a relative one and a slot never for a stripe; the printing of sizes, counts and untrusted
//! text; rate limits for logs. Leaf module: knows nothing of the layers above.

mod count;
mod printable;
mod rate_limit;
mod size;
mod time;

pub use count::Count;
pub use printable::{Printable, PrintableLines, ShownPath, is_unprintable, quoted, shown};
pub use rate_limit::RateLimit;
pub use size::{HumanSize, ParseSizeError, SizeBeside, two_sizes};
pub use time::UnixTime;

use std::fmt;

/// Height of a row in bytes: the unit of checksums and of crash atomicity.
pub const ROW_BYTES: u64 = 4096;

/// Smallest sector that a member or an NBD client may use, in bytes.
pub const SECTOR_BYTES: u64 = 512;

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

unit!(
    /// Absolute position on a member device, in bytes from its start.
    ByteOffset(u64)
);
unit!(
    /// A length in bytes.
    ByteCount(u64)
);
unit!(
    /// Absolute position in a volume as clients see it, in bytes.
    VolumeOffset(u64)
);
unit!(
    /// Logical stripe of a volume: `k` chunks of user data.
    StripeIndex(u64)
);
unit!(
    /// Physical slot of an array: slot `i` is chunk `i` of every member's data region.
    SlotIndex(u64)
);
unit!(
    /// Lane of an array, which has some of its stripes.
    LaneIndex(u16)
);
unit!(
    /// Place of a member in its array, `0..k+m`. Fixed for the life of the array.
    MemberIndex(u16)
);
unit!(
    /// A column of a stripe: `0..k` data, `k..k+m` parity. Rotation maps it to a [`MemberIndex`] per slot.
    ColumnIndex(u16)
);

/// Fingerprint of one 4 KiB block of data or parity, as checksum pages and the redo log keep it.
/// Some values are not fingerprints and are never computed from bytes: [`BlockHash::UNWRITTEN`],
/// [`BlockHash::LOST`], and those that [`BlockHash::set_aside`] returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockHash(pub [u8; 16]);

impl BlockHash {
    /// The block was never written: it counts as zeroes, whatever the device holds.
    pub const UNWRITTEN: BlockHash = BlockHash([0; 16]);

    /// The block's content is lost: reading it is an error until it is written whole. It counts as zeroes
    /// where the rest of its row is coded.
    pub const LOST: BlockHash = BlockHash([0xff; 16]);

    /// Marks a block that is set aside.
    const SET_ASIDE_MARK: [u8; 8] = *b"setaside";

    /// Whether the row's coding counts the block's bytes; otherwise it counts zeroes in their place.
    #[must_use]
    pub fn is_stored(self) -> bool {
        self != BlockHash::UNWRITTEN && self != BlockHash::LOST && !self.is_set_aside()
    }

    /// The entry of a block that could not be read when its row was coded again (rule T1 of the
    /// crash-safety design): it counts as zeroes for coding, and reading it is an error, until
    /// content that matches is found on its own member or the block is written. Half of the
    /// fingerprint is kept to recognise that content.
    ///
    /// # Panics
    /// When the block is not stored.
    #[must_use]
    pub fn set_aside(self) -> BlockHash {
        assert!(self.is_stored(), "only a stored block is set aside");
        let mut entry = self;
        entry.0[8..].copy_from_slice(&BlockHash::SET_ASIDE_MARK);
        entry
    }

    /// Whether the block is set aside.
    #[must_use]
    pub fn is_set_aside(self) -> bool {
        self.0[8..] == BlockHash::SET_ASIDE_MARK
    }

    /// Whether content with the fingerprint `found` is what the block held when it was set aside.
    #[must_use]
    pub fn was_set_aside_from(self, found: BlockHash) -> bool {
        self.is_set_aside() && found.is_stored() && self.0[..8] == found.0[..8]
    }
}

/// A moment of the monotonic clock in nanoseconds. Its zero is arbitrary; it enters sans-IO layers as an
/// argument.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// Nanoseconds from `earlier` to `self`, zero when `earlier` is later.
    #[must_use]
    pub fn nanos_since(self, earlier: Timestamp) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl ByteOffset {
    /// The position `bytes` further on. Panics on overflow: offsets are validated against device sizes first.
    #[must_use]
    pub fn plus(self, bytes: u64) -> ByteOffset {
        ByteOffset(self.0.checked_add(bytes).expect("offset beyond 2^64"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_that_is_set_aside_is_not_stored_and_knows_its_content_again() {
        let hash = BlockHash([7; 16]);
        let aside = hash.set_aside();
        assert!(hash.is_stored() && !aside.is_stored() && aside.is_set_aside() && !hash.is_set_aside());
        assert!(aside.was_set_aside_from(hash));
        assert!(!aside.was_set_aside_from(BlockHash([8; 16])) && !hash.was_set_aside_from(hash));
        for other in [BlockHash::UNWRITTEN, BlockHash::LOST] {
            assert!(!other.is_set_aside() && !aside.was_set_aside_from(other));
        }
    }
}
