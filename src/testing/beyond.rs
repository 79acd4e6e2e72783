//! What the explorer asks of an array with more faults than it survives: errors are right, other data than the newest never without
//! a word (T8).

use super::explorer::Explorer;
use super::oracle::BLOCK_BYTES;
use super::scenarios::{BEYOND, Standing};
use super::{Floor, Oracle, Random, SimArray, SimDisk, logs};
use crate::format::MemberState;
use crate::volume::{ClientReply, MemberStatus, NoticeLevel};
use std::collections::BTreeMap;

/// What a start says that drops the end of the log.
const DROPPED: &str = "batches at the end of the redo log were dropped";

impl Explorer<'_> {
    /// A start with more old members than the array survives: it may be refused.
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

    /// Reads what can be read when more is damaged than the array survives. Errors are right; an older version is only where
    /// the array has said so (T8); wrong data never is.
    pub(super) fn read_what_is_left(
        &mut self,
        sim: &mut SimArray,
        oracle: &Oracle,
        floor: Floor,
    ) -> Result<(), String> {
        for block in 0..oracle.blocks() {
            let id = sim.submit_read((block * BLOCK_BYTES) as u64, BLOCK_BYTES);
            match sim.wait(id) {
                Ok(ClientReply::Data(bytes)) => {
                    let has_said_so = sim.notices.iter().any(|notice| notice.level == NoticeLevel::Error);
                    let may_be_old = BEYOND == Standing::Pending || has_said_so;
                    let floor = if may_be_old { Floor::Anything } else { floor };
                    let checked = oracle.check(block, &bytes, floor);
                    checked.map_err(|wrong| format!("beyond what the array survives: {wrong}"))?;
                }
                Ok(other) => return Err(format!("a read was answered with {other:?}")),
                Err(_) => self.totals.errors += 1,
            }
        }
        Ok(())
    }

    /// Reads what can be read with more members that are missing or were rolled back than the array survives (T8). Errors are
    /// right, where the array has said so. An older version is only in blocks of batches that no member in service notes to have been
    /// flushed, where the array has said that it dropped them: between a flush and its note (W2) a member that was rolled back
    /// looks like one that a power cut left behind.
    pub(super) fn read_beside_restored(
        &mut self,
        sim: &mut SimArray,
        oracle: &Oracle,
        floor: Floor,
    ) -> Result<(), String> {
        let members = sim.status().members;
        let in_service = |id: u32| {
            let of = |member: &MemberStatus| member.device.is_some_and(|device| device.0 == id);
            members.iter().any(|member| of(member) && member.state == MemberState::Online)
        };
        let not_noted = logs::blocks_not_noted(sim.disks.iter().filter(|(id, _)| in_service(**id)));
        let mut has_errors = false;
        for block in 0..oracle.blocks() {
            let id = sim.submit_read((block * BLOCK_BYTES) as u64, BLOCK_BYTES);
            match sim.wait(id) {
                Ok(ClientReply::Data(bytes)) => {
                    let dropped = sim.notices.iter().any(|notice| notice.text.contains(DROPPED));
                    let may_be_old = dropped && not_noted.contains(&block);
                    let floor = if may_be_old { Floor::Anything } else { floor };
                    oracle.check(block, &bytes, floor).map_err(|wrong| {
                        let said: Vec<&str> = sim.notices.iter().map(|notice| notice.text.as_str()).collect();
                        format!("beside members that were rolled back: {wrong}; it said {said:?}")
                    })?;
                }
                Ok(other) => return Err(format!("a read was answered with {other:?}")),
                Err(_) => {
                    has_errors = true;
                    self.totals.errors += 1;
                }
            }
        }
        if has_errors && sim.notices.iter().all(|notice| notice.level != NoticeLevel::Error) {
            return Err("there are errors beside members that were rolled back, and no event says why".into());
        }
        Ok(())
    }
}
