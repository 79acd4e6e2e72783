//! Hunts the rules of what readers on other threads are shown: with one of them broken, a load without
//! crashes comes upon a wrong read.

use super::{Mutation, Oracle, Random, Run, SimArray, SimShape, Workload};
use crate::format::ChecksumKind;

/// A wrong read that shows in some load while a rule is broken, in words; none if there is none.
#[must_use]
pub fn wrong_read_elsewhere(broken: Mutation) -> Option<String> {
    let checksum = match broken {
        Mutation::ViewWriteLate | Mutation::ViewMoveLate => ChecksumKind::Crc32c,
        _ => ChecksumKind::None,
    };
    let shape = SimShape { free_slots: Some(2), ..SimShape::new(2, 1, 8192, 4).logged(checksum, 256 << 10) };
    let workload = Workload { stripe_writes: 14, zeroes: 4, ..Workload::MIXED };
    (0..100).find_map(|seed| {
        let oracle = Oracle::new(shape.volume_bytes);
        let mut load = Run::new(SimArray::create(shape, seed), oracle, workload, Random::new(seed));
        let what = broken.with(|| (0..3000).find_map(|_| load.step().err()))?;
        Some(format!("seed {seed}: {what}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_of_what_is_shown_is_needed() {
        for broken in [
            Mutation::ViewWriteLate,
            Mutation::ViewImagesLate,
            Mutation::ViewMoveLate,
            Mutation::ViewDiscardLate,
            Mutation::ViewMembersLate,
            Mutation::ViewTicketNotCompared,
        ] {
            let found = wrong_read_elsewhere(broken).unwrap_or_else(|| panic!("{broken:?} was not noticed"));
            assert!(found.contains("on another thread"), "{broken:?}: {found}");
            println!("{broken:?}: {found}");
        }
    }
}
