//! What the daemon does beside requests: it asks what one would come to, and hands over what an
//! earlier run knew.

use super::{Refused, SimArray};
use crate::units::SlotIndex;
use crate::volume::{AdminOutcome, AdminRequest, Volume};
use uuid::Uuid;

impl SimArray {
    /// What a request would come to.
    ///
    /// # Errors
    /// Why it would be refused.
    pub fn would(&self, request: &AdminRequest) -> Result<AdminOutcome, Refused> {
        self.volume.would(request).map_err(Refused::from)
    }

    /// What a device went into service without in an earlier run: see
    /// [`crate::array::Array::expect_lacking`].
    pub fn expect_lacking(&mut self, device: Uuid, runs: &[(SlotIndex, u64)]) {
        self.volume.expect_lacking(device, runs);
    }
}

#[cfg(test)]
mod tests;
