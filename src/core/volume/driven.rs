//! Drives an array for a volume: hands it the events that concern it, has it settle once for all of them,
//! returns slot requests one by one as they end, and passes the array's actions on unchanged. Every kind of
//! volume is built on this.
//!
//! Invariants: a volume takes every ended request before it calls `pass_on`; no action leaves an array that
//! has not settled; the array is told to stop once, when the volume has nothing in flight. Must not know how
//! a volume serves its requests.

use super::api::{
    AdminOutcome, AdminRefusal, AdminRequest, ArrayAction, ClientRequest, RequestId, VolumeEvent,
    VolumeOutput,
};
use crate::array::{Array, EndedRequest, StripeRequest, StripeRequestId};
use crate::units::Timestamp;

/// See the head of this file.
pub(super) struct DrivenArray {
    array: Array,
    /// Whether it has taken something since it settled.
    is_unsettled: bool,
    /// Stops that were refused.
    refused: Vec<(RequestId, AdminRefusal)>,
    /// A stop request not yet given to the array.
    stop: Option<RequestId>,
    stopping: bool,
}

impl DrivenArray {
    pub(super) fn new(array: Array) -> DrivenArray {
        DrivenArray { array, is_unsettled: false, refused: Vec::new(), stop: None, stopping: false }
    }

    pub(super) fn array(&self) -> &Array {
        &self.array
    }

    pub(super) fn array_mut(&mut self) -> &mut Array {
        &mut self.array
    }

    /// Gives the array an event that concerns it. Returns a client's request, which is for the volume.
    pub(super) fn take(&mut self, now: Timestamp, event: VolumeEvent) -> Option<(RequestId, ClientRequest)> {
        self.is_unsettled = true;
        match event {
            VolumeEvent::Client(id, request) => return Some((id, request)),
            VolumeEvent::Io(completion) => self.array.io_done(now, completion),
            VolumeEvent::Worked(done) => self.array.worked(now, done),
            VolumeEvent::DeviceGone(device, fault) => self.array.device_gone(now, device, fault),
            VolumeEvent::Replacement(order) => self.array.order_replacement(now, &order),
            VolumeEvent::LeftElsewhere(device, why) => self.array.left_elsewhere(now, device, &why),
            VolumeEvent::ReadElsewhere => self.array.read_elsewhere(now),
            VolumeEvent::Tick => self.array.tick(now),
            VolumeEvent::Admin(id, AdminRequest::Stop) => match self.check_stop() {
                Err(refusal) => self.refused.push((id, refusal)),
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

    /// Gives the array a slot request.
    pub(super) fn submit(&mut self, now: Timestamp, id: StripeRequestId, request: StripeRequest) {
        self.is_unsettled = true;
        self.array.submit(now, id, request);
    }

    /// The next slot request that ended. The volume's response to it may end others.
    pub(super) fn next_ended(&mut self) -> Option<EndedRequest> {
        let ended = self.array.next_ended();
        if ended.is_some() || !std::mem::take(&mut self.is_unsettled) {
            return ended;
        }
        self.array.settle();
        self.array.next_ended()
    }

    /// Passes on the array's actions. `is_idle`: the volume has nothing in flight.
    pub(super) fn pass_on(&mut self, now: Timestamp, is_idle: bool, out: &mut VolumeOutput) {
        if is_idle && let Some(id) = self.stop.take() {
            self.array.admin(now, id, AdminRequest::Stop);
            self.array.settle();
        }
        let refused = self.refused.drain(..).map(|(id, refusal)| ArrayAction::AdminDone(id, Err(refusal)));
        out.actions.extend(refused);
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
