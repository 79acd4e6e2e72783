//! The demands of the explorer on an array with more faults than it survives: errors are allowed, data older
//! than the newest only with an event that says so (T8).

use super::explorer::Explorer;
use super::oracle::BLOCK_BYTES;
use super::{Floor, Oracle, Random, SimArray, SimDisk, logs};
use crate::units::LaneIndex;
use crate::volume::{ClientReply, NoticeLevel};
use std::collections::{BTreeMap, BTreeSet};

/// Part of the notice of a start that drops the end of the log.
const DROPPED: &str = " at the end of the redo log w";

/// Part of the notice of a start that cannot read what may follow in the log.
const HIDDEN: &str = "counts as never written";

/// Part of the notice of a start at which a page of the stripe map may be an older version.
const BEHIND: &str = "may read as they were before";

impl Explorer<'_> {
    /// Starts with more rolled-back members than the array survives, which may be refused.
    pub(super) fn start_beyond(
        &mut self,
        disks: BTreeMap<u32, SimDisk>,
        oracle: &Oracle,
        floor: Floor,
    ) -> Result<(), String> {
        let seed = Random::new(self.random.next_u64());
        match self.world.start(disks, false, seed) {
            Ok(mut sim) => self.read_beside_restored(&mut sim, oracle, floor),
            Err(_) => {
                self.totals.refused += 1;
                Ok(())
            }
        }
    }

    /// Reads all blocks when more is damaged than the array survives. Errors are allowed; an older version
    /// only where the array has reported that (T8); wrong data never.
    pub(super) fn read_all_that_is_left(
        &mut self,
        sim: &mut SimArray,
        oracle: &Oracle,
        floor: Floor,
    ) -> Result<(), String> {
        let may_be_dropped = may_be_dropped(sim);
        let errors = self.read_all_beyond(sim, oracle, "beyond what the array survives", |sim, block| {
            let has_said_so = sim.notices.iter().any(|notice| notice.text.contains(BEHIND));
            let is_excused = has_said_so || has_dropped(sim) && may_be_dropped.contains(&block);
            if is_excused { Floor::Anything } else { floor }
        })?;
        says_why(sim, errors)
    }

    /// Reads every block, each of which must be at least as new as its `floor_of`. Returns how many reads
    /// ended with errors.
    fn read_all_beyond(
        &mut self,
        sim: &mut SimArray,
        oracle: &Oracle,
        when: &str,
        floor_of: impl Fn(&SimArray, usize) -> Floor,
    ) -> Result<u64, String> {
        let before = self.totals.errors;
        for block in 0..oracle.blocks() {
            let id = sim.submit_read((block * BLOCK_BYTES) as u64, BLOCK_BYTES);
            match sim.wait(id) {
                Ok(ClientReply::Data(bytes)) => {
                    oracle.check(block, &bytes, floor_of(sim, block)).map_err(|wrong| {
                        let said: Vec<&str> = sim.notices.iter().map(|notice| notice.text.as_str()).collect();
                        format!("{when}: {wrong}; it said {said:?}")
                    })?;
                }
                Ok(other) => return Err(format!("a read was answered with {other:?}")),
                Err(_) => self.totals.errors += 1,
            }
        }
        Ok(self.totals.errors - before)
    }

    /// Reads all blocks when more members are missing or were rolled back than the array survives (T8).
    /// Errors are allowed where the array has reported them. An older version is allowed only in blocks of
    /// batches that no member in service notes as flushed, and only if the array has reported that it dropped
    /// them: between a flush and its note (W2) a rolled-back member looks like one that a power cut left
    /// behind.
    pub(super) fn read_beside_restored(
        &mut self,
        sim: &mut SimArray,
        oracle: &Oracle,
        floor: Floor,
    ) -> Result<(), String> {
        let may_be_dropped = may_be_dropped(sim);
        let errors =
            self.read_all_beyond(sim, oracle, "beside members that were rolled back", |sim, block| {
                if has_dropped(sim) && may_be_dropped.contains(&block) { Floor::Anything } else { floor }
            })?;
        says_why(sim, errors)
    }
}

/// Checks that an event explains the errors since the start, if there were any.
pub(super) fn says_why(sim: &SimArray, errors: u64) -> Result<(), String> {
    if errors > 0 && sim.notices.iter().all(|notice| notice.level != NoticeLevel::Error) {
        return Err(format!("{errors} requests ended with errors, and no event says why"));
    }
    Ok(())
}

/// Whether the array has reported that it starts without the end of the log.
fn has_dropped(sim: &SimArray) -> bool {
    sim.notices.iter().any(|notice| notice.text.contains(DROPPED) || notice.text.contains(HIDDEN))
}

/// Blocks of batches that no member in service in their lane notes as flushed.
fn may_be_dropped(sim: &SimArray) -> BTreeSet<usize> {
    let of_lane = |(lane, serving): (u16, Vec<(u16, u32)>)| {
        let disks = sim.disks.iter().filter(|(id, _)| serving.iter().any(|(_, disk)| disk == *id));
        logs::blocks_not_noted(disks, LaneIndex(lane))
    };
    let blocks: BTreeSet<usize> = (0..).zip(sim.volume.serving()).flat_map(of_lane).collect();
    match sim.cas_blocks() {
        // What lies there decides what any block holds.
        Some(all) if !blocks.is_empty() => (0..all).collect(),
        _ => blocks,
    }
}
