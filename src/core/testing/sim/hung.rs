//! Operations of simulated disks that do not end: what a disk on a filesystem that hangs does. They stay with
//! the array, as its driver must keep their buffers, until the disk ends them after all; meanwhile the driver
//! may lose patience.

use super::super::faults::fault;
use super::SimArray;
use crate::block_io::{Completion, DeviceId, IoFault, IoFaultKind, IoOp, IoToken};
use crate::units::Timestamp;
use crate::volume::VolumeEvent;
use std::collections::BTreeSet;

/// An operation that a disk does not end.
pub(super) struct Hung {
    pub device: DeviceId,
    pub token: IoToken,
    pub op: IoOp,
    /// Operations that all disks had executed when it was submitted.
    pub submitted: u64,
    /// When the disk took it up.
    pub since: Timestamp,
    /// The array was told that its device is gone.
    pub is_told: bool,
}

/// How an operation ends that hung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HungEnd {
    /// The disk does it after all.
    Late,
    /// It fails, and was not done.
    Failed,
}

impl SimArray {
    /// Operations of a disk that do not end.
    #[must_use]
    pub fn hung(&self, id: u32) -> usize {
        self.hung.iter().filter(|hung| hung.device.0 == id).count()
    }

    /// The operations of a disk that hang end now, in the order in which the disk took them up.
    pub fn end_hung(&mut self, id: u32, how: HungEnd) {
        let (ended, hung): (Vec<Hung>, Vec<Hung>) =
            std::mem::take(&mut self.hung).into_iter().partition(|hung| hung.device.0 == id);
        self.hung = hung;
        for Hung { device, token, op, submitted, .. } in ended {
            match how {
                HungEnd::Late => {
                    self.executed += 1;
                    self.changes += u64::from(!matches!(op, IoOp::Read { .. } | IoOp::Extents { .. }));
                    self.end(device, token, op, submitted);
                }
                HungEnd::Failed => {
                    let result = Err(fault(IoFaultKind::Medium));
                    self.event(VolumeEvent::Io(Completion { token, result }));
                }
            }
        }
    }

    /// Says that devices are gone whose operations have not ended for too long.
    pub(super) fn tell_of_hung(&mut self) {
        let Some(limit) = self.hang_limit else { return };
        let mut gone = BTreeSet::new();
        for hung in self.hung.iter_mut().filter(|hung| !hung.is_told) {
            if self.now.nanos_since(hung.since) >= limit {
                hung.is_told = true;
                gone.insert(hung.device);
            }
        }
        for device in gone {
            let fault = IoFault { kind: IoFaultKind::Gone, errno: libc::ETIMEDOUT };
            self.event(VolumeEvent::DeviceGone(device, fault));
        }
    }
}
