//! Operations of simulated disks that do not end, as on a filesystem that hangs. They stay with the array,
//! since its driver must keep their buffers, until the disk ends them after all; meanwhile the driver may
//! declare the device gone.

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
    /// Number of operations that all disks together had executed when it was submitted.
    pub submitted: u64,
    /// When the disk started it.
    pub since: Timestamp,
    /// The array was told that the device is gone.
    pub is_told: bool,
}

/// How a hung operation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HungEnd {
    /// The disk does it after all.
    Late,
    /// It fails and is not done.
    Failed,
}

impl SimArray {
    /// Number of hung operations of a disk.
    #[must_use]
    pub fn hung(&self, id: u32) -> usize {
        self.hung.iter().filter(|hung| hung.device.0 == id).count()
    }

    /// Ends the hung operations of a disk, in the order in which the disk started them.
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

    /// Tells the array that devices are gone whose operations have hung too long.
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
