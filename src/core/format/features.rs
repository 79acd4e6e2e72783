//! The feature bits of superblocks: which ones this version knows, what they are called, and which
//! ones an array needs. Must not know where the fields lie.

use super::{ChecksumKind, Superblock};

/// Feature bits that this version knows; of the first two classes none exist yet.
pub(super) const KNOWN_COMPAT: u64 = 0;
pub(super) const KNOWN_RO_COMPAT: u64 = 0;
pub(super) const KNOWN_INCOMPAT: u64 = REDO_LOG | CHECKSUM_PAGES | STRIPE_MAP | UPDATE_COUNT | LANES;
/// Incompat bit: writes go through the redo log.
const REDO_LOG: u64 = 1 << 0;
/// Incompat bit: every block has a hash in the pages.
pub(super) const CHECKSUM_PAGES: u64 = 1 << 1;
/// Incompat bit: the stripe map in the pages tells which slot holds which stripe.
const STRIPE_MAP: u64 = 1 << 2;
/// Incompat bit: updates are counted, and a member that left has its tail recorded. Always set by
/// this version; an image without it has counted none, and is upgraded by its next update.
pub(super) const UPDATE_COUNT: u64 = 1 << 4;
/// Incompat bit: the array has more than one lane. A version that did not know it would take all rings for
/// one.
pub(super) const LANES: u64 = 1 << 5;
/// Names of the incompat bits, and of those set aside for the formats that are planned next, so that this
/// version's refusal can name them.
const INCOMPAT_NAMES: [(u32, &str); 6] = [
    (0, "redo-log"),
    (1, "checksum-pages"),
    (2, "stripe-map"),
    (3, "cas-volume"),
    (4, "update-count"),
    (5, "lanes"),
];

impl Superblock {
    /// The incompat bits of an array with this checksum and as many lanes.
    #[must_use]
    pub fn incompat_features(checksum: ChecksumKind, lanes: u16) -> u64 {
        let checksums = if checksum == ChecksumKind::None { 0 } else { CHECKSUM_PAGES };
        let lanes = if lanes > 1 { LANES } else { 0 };
        REDO_LOG | STRIPE_MAP | UPDATE_COUNT | checksums | lanes
    }

    /// The names of the incompat features in use, separated by commas.
    #[must_use]
    pub fn feature_names(&self) -> String {
        feature_names(self.features_incompat)
    }
}

pub(super) fn feature_names(bits: u64) -> String {
    bit_names("incompat", bits, &INCOMPAT_NAMES)
}

pub(super) fn bit_names(class: &str, bits: u64, names: &[(u32, &str)]) -> String {
    let name = |bit: u32| {
        let known = names.iter().find(|(number, _)| *number == bit);
        known.map_or_else(|| format!("{class} bit {bit}"), |(_, name)| (*name).to_owned())
    };
    (0..u64::BITS).filter(|bit| bits >> bit & 1 == 1).map(name).collect::<Vec<_>>().join(", ")
}
