//! Reads what a device at a path is, and what its superblocks say; the device may not answer.
//!
//! Invariant: every call has a limit. Must not know what the answer is for.

use super::lanes::DeviceLanes;
use crate::member::patience::{within, within_apart};
use crate::member::{self, Access, DEFAULT_MEMBER_TIMEOUT, Device, DeviceError, Identity, TimeLimits};
use std::path::Path;
use std::time::Duration;

/// How long it may take to find out what a path of a request leads to.
const GLANCE: Duration = Duration::from_secs(2);

/// What a local path leads to, if it answers soon.
pub(crate) fn identity_of(path: &Path) -> Option<Identity> {
    look_at(path, GLANCE).ok().flatten()
}

/// What a local path leads to, if there is anything.
///
/// # Errors
/// When that is not answered within the limit.
pub(crate) fn look_at(path: &Path, limit: Duration) -> Result<Option<Identity>, DeviceError> {
    if member::is_remote(path) {
        return Ok(None);
    }
    let own = path.to_path_buf();
    within_apart(path, "look at it", limit, move || Identity::of(&own))
}

/// A device, and what it says of itself.
type Opened = (Device, DeviceLanes);

/// Opens a device, and reads the superblocks of its lanes. A device that does not answer in time is given up.
pub(crate) fn open_member(path: &Path, access: Access, limits: TimeLimits) -> Result<Opened, DeviceError> {
    let open = move |path: &Path| {
        let device = Device::open(path, access)?;
        device.set_limits(limits);
        let lanes = DeviceLanes::read(&device);
        Ok((device, lanes))
    };
    if member::is_remote(path) {
        // Every step with a remote device has a limit of its own.
        return open(path);
    }
    let own = path.to_path_buf();
    within(path, "open it", patience(limits), move || open(&own))?
}

/// How long the opening of a device may take. An administrator waits for it, so it has an upper
/// limit.
pub(crate) fn patience(limits: TimeLimits) -> Duration {
    limits.local.min(DEFAULT_MEMBER_TIMEOUT)
}
