//! The counts of a superblock, and why a member must not be written to: its counts are impossible, or its
//! features forbid it. Pure. Must not know where the fields lie.

use super::features::{KNOWN_RO_COMPAT, bit_names};
use super::{COUNT_END, COUNTED_IN_A_LIFE, Superblock};

/// Why a member that can be read must not be written to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// A newer version has set features that an older one must not write beside.
    #[error("it has features that this Calpe may read and must not write to: {features}; use a newer Calpe")]
    RoCompatFeatures {
        /// Their bits, separated by commas.
        features: String,
    },
    /// A count that no array can have reached.
    #[error(
        "its superblock says that '{what}' is {value}, which no array has counted up to: it is damaged or forged"
    )]
    CountAtItsEnd {
        /// Which.
        what: &'static str,
        /// What was found.
        value: u64,
    },
}

impl Superblock {
    /// Why this version may read the member and must not write to it; none where it may.
    #[must_use]
    pub fn unfit(&self) -> Option<Unfit> {
        let unknown = self.features_ro_compat & !KNOWN_RO_COMPAT;
        if unknown != 0 {
            return Some(Unfit::RoCompatFeatures { features: bit_names("ro-compat", unknown, &[]) });
        }
        let end = COUNT_END - COUNTED_IN_A_LIFE;
        let (what, value) = self.counts().find(|(_, value)| *value >= end)?;
        Some(Unfit::CountAtItsEnd { what, value })
    }

    /// Every count, by name.
    pub(super) fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let scrub = self.scrub;
        let counts = [
            ("sequence", self.sequence),
            ("epoch number", self.epoch.number),
            ("update", self.update),
            ("update complete", self.update_complete),
            ("log start sequence", self.log_start.sequence),
            ("log start epoch", self.log_start.epoch),
            ("created", self.created_unix),
            ("scrub errors so far", scrub.errors_so_far),
            ("scrub repaired so far", scrub.repaired_so_far),
            ("scrub finished", scrub.finished_unix),
            ("scrub errors", scrub.errors),
            ("scrub repaired", scrub.repaired),
        ];
        let left = self.left.iter().flat_map(|left| [("left tail", left.tail), ("left update", left.update)]);
        counts.into_iter().chain(left)
    }
}
