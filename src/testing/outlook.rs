//! What a request of an administrator would come to in the simulated array. Nothing here changes anything.

use super::SimArray;
use crate::volume::{AdminError, AdminOutcome, AdminRequest, Volume};

impl SimArray {
    /// What a request would come to.
    ///
    /// # Errors
    /// Why it would be refused.
    pub fn would(&self, request: &AdminRequest) -> Result<AdminOutcome, AdminError> {
        self.volume.check(request)
    }
}
