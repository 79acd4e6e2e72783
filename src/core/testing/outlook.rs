//! Calls that the daemon makes beside requests: it asks what a request would do, and passes on what an
//! earlier run knew.

use super::{Refused, SimArray};
use crate::units::SlotIndex;
use crate::volume::{AdminOutcome, AdminRequest};
use uuid::Uuid;

impl SimArray {
    /// The expected outcome of a request.
    ///
    /// # Errors
    /// With the reason for which it would be refused.
    pub fn would(&self, request: &AdminRequest) -> Result<AdminOutcome, Refused> {
        self.volume.would(&self.words_of_lanes(request)).map_err(Refused::from)
    }

    /// The data that a device lacked when it went into service in an earlier run: see
    /// [`crate::array::Array::expect_lacking`].
    pub fn expect_lacking(&mut self, device: Uuid, runs: &[(SlotIndex, u64)]) {
        self.volume.only().expect_lacking(device, runs);
    }
}

#[cfg(test)]
mod tests;
