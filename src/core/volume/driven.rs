//! Drives an array for a volume: hands it the events that concern it, returns slot requests one by one as
//! they end, and passes the array's actions on unchanged. Every kind of volume is built on this.
//!
//! Invariants: within a step, a volume takes every ended request before it calls `pass_on`; the array is told
//! to stop once, when the volume has nothing in flight. Must not know how a volume serves its requests.

use super::api::{
    AdminOutcome, AdminRefusal, AdminRequest, ArrayAction, ClientRequest, RequestId, VolumeEvent,
    VolumeOutput,
};
use crate::array::{Array, EndedRequest};
use crate::units::Timestamp;

/// See the head of this file.
pub(super) struct DrivenArray {
    array: Array,
    /// A stop request not yet given to the array.
    stop: Option<RequestId>,
    stopping: bool,
}

impl DrivenArray {
    pub(super) fn new(array: Array) -> DrivenArray {
        DrivenArray { array, stop: None, stopping: false }
    }

    pub(super) fn array(&self) -> &Array {
        &self.array
    }

    pub(super) fn array_mut(&mut self) -> &mut Array {
        &mut self.array
    }

    /// Gives the array an event that concerns it. Returns a client's request, which is for the volume.
    pub(super) fn take(
        &mut self,
        now: Timestamp,
        event: VolumeEvent,
        out: &mut VolumeOutput,
    ) -> Option<(RequestId, ClientRequest)> {
        match event {
            VolumeEvent::Client(id, request) => return Some((id, request)),
            VolumeEvent::Io(completion) => self.array.io_done(now, completion),
            VolumeEvent::Worked(done) => self.array.worked(now, done),
            VolumeEvent::DeviceGone(device, fault) => self.array.device_gone(now, device, fault),
            VolumeEvent::ReadElsewhere => self.array.read_elsewhere(now),
            VolumeEvent::Tick => self.array.tick(now),
            VolumeEvent::Admin(id, AdminRequest::Stop) => match self.check_stop() {
                Err(refusal) => out.actions.push(ArrayAction::AdminDone(id, Err(refusal))),
                Ok(()) => {
                    self.stopping = true;
                    self.stop = Some(id);
                    self.array.hurry();
                }
            },
            VolumeEvent::Admin(id, request) => self.array.admin(now, id, request),
        }
        None
    }

    /// The next slot request that ended. The volume's response to it may end others.
    pub(super) fn next_ended(&mut self) -> Option<EndedRequest> {
        self.array.next_ended()
    }

    /// Passes on the array's actions. `is_idle`: the volume has nothing in flight.
    pub(super) fn pass_on(&mut self, now: Timestamp, is_idle: bool, out: &mut VolumeOutput) {
        if is_idle && let Some(id) = self.stop.take() {
            self.array.admin(now, id, AdminRequest::Stop);
        }
        self.array.take_actions(&mut out.actions);
    }

    /// Whether a stop was requested: clients' requests are refused from then on.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// What an administrator's request would come to.
    ///
    /// # Errors
    /// Why it would be refused.
    pub(super) fn would(&self, request: &AdminRequest) -> Result<AdminOutcome, AdminRefusal> {
        if matches!(request, AdminRequest::Stop) {
            self.check_stop()?;
        }
        self.array.would(request)
    }

    /// A volume is stopped once.
    fn check_stop(&self) -> Result<(), AdminRefusal> {
        match self.stopping {
            true => Err(AdminRefusal::StoppingAlready),
            false => Ok(()),
        }
    }
}
