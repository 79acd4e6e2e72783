//! What is particular to volumes of kind cas.

use super::super::disk::BLOCK;
use super::SimArray;

/// Steps after which a volume counts as not coming to rest.
const AUDIT_STEPS_MAX: usize = 20_000;

impl SimArray {
    /// Blocks of a volume of kind cas.
    pub(in crate::testing) fn cas_blocks(&self) -> Option<usize> {
        let shape = self.world.shape;
        shape.cas.map(|_| (shape.volume_bytes / BLOCK) as usize)
    }

    /// Whether the array has no room for all that the volume may hold.
    pub(in crate::testing) fn may_be_full(&self) -> bool {
        let shape = self.world.shape;
        shape.cas.is_some_and(|bytes| shape.volume_bytes > bytes / 4)
    }

    /// What a cas volume says of itself that is not so. Has its pages read for that: it is to be called when
    /// clients wait for nothing.
    ///
    /// # Errors
    /// With the differences.
    pub fn audit(&mut self) -> Result<(), String> {
        if self.cas_blocks().is_none() {
            return Ok(());
        }
        for _ in 0..AUDIT_STEPS_MAX {
            match self.volume.audit() {
                Some(differences) if differences.is_empty() => return Ok(()),
                Some(differences) => return Err(format!("the volume contradicts itself: {differences:?}")),
                None => {}
            }
            if !self.step() {
                self.sleep(100);
            }
        }
        Err(format!("the volume does not come to rest: {:?}", self.status()))
    }
}
