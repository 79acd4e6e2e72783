//! Administrators' requests inside volumes, and the requesters that wait for them. Must not know what the
//! requests ask for.

use super::mailbox::Reply;
use super::orders::LaneId;
use calpe_core::block_io::DeviceId;
use calpe_core::volume::{AdminOutcome, RequestId};
use std::collections::HashMap;

/// Ids of administrators' requests have this bit, those of clients do not.
const ADMIN_BIT: u64 = 1 << 63;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Administration {
    pending: HashMap<RequestId, Pending>,
    last: u64,
}

#[derive(Debug)]
struct Pending {
    lane: LaneId,
    /// Devices that came with it.
    devices: Vec<DeviceId>,
    reply: Reply<AdminOutcome>,
}

impl Administration {
    /// An id for a request that nobody waits for.
    pub(super) fn next_id(&mut self) -> RequestId {
        self.last += 1;
        RequestId(ADMIN_BIT | self.last)
    }

    /// Registers a request that came with these devices.
    pub(super) fn begin(
        &mut self,
        lane: LaneId,
        devices: Vec<DeviceId>,
        reply: Reply<AdminOutcome>,
    ) -> RequestId {
        let id = self.next_id();
        self.pending.insert(id, Pending { lane, devices, reply });
        id
    }

    /// Ends a request. Returns the devices that came with it and the channel of its reply, if somebody waits.
    pub(super) fn end(&mut self, id: RequestId) -> Option<(Vec<DeviceId>, Reply<AdminOutcome>)> {
        self.pending.remove(&id).map(|pending| (pending.devices, pending.reply))
    }

    /// Forgets the requests of a lane that is gone; their requesters learn of it by the end of the channel.
    pub(super) fn forget(&mut self, lane: LaneId) {
        self.pending.retain(|_, pending| pending.lane != lane);
    }
}
