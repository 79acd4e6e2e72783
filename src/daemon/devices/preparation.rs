//! Steps on a device before it is a member: reading what it holds, making files, wiping, setting space aside.
//! Each step may take as long as the device goes on answering; a device that does not answer is given up
//! after the limit.
//!
//! Invariants: nothing further is done to a device after a step was given up; the caller learns what may be
//! left. Must not know of running arrays.

use crate::daemon::devices::superblocks::{reserve_regions, wipe_ends, wipe_logs, without_answer};
use crate::member::patience::{begin_step, step_by_step, within};
use crate::member::{CreatedFile, Device, DeviceError};
use calpe_core::format::Superblock;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Carries out a step on a device. `action` is for the error ("write to it").
///
/// # Errors
/// Those of the call, and when the device does not answer within the limit.
pub(crate) fn step<T: Send + 'static>(
    device: &Arc<Device>,
    action: &str,
    limit: Duration,
    call: impl FnOnce(&Device) -> Result<T, DeviceError> + Send + 'static,
) -> Result<T, DeviceError> {
    let own = Arc::clone(device);
    step_by_step(device.path(), action, limit, move || call(&own)).map_err(without_answer)?
}

/// Creates a sparse file and opens it.
///
/// # Errors
/// Those of [`Device::create_sparse`], and when its filesystem does not answer within the limit;
/// then the file may still appear.
pub(crate) fn create_file(path: &Path, bytes: u64, limit: Duration) -> Result<Device, DeviceError> {
    let own = path.to_path_buf();
    let created = step_by_step(path, "create it", limit, move || {
        let device = Device::create_sparse(&own, bytes)?;
        if let Err(error) = is_wanted(&own) {
            let _ = device.remove_file();
            return Err(error);
        }
        Ok(device)
    });
    created
        .map_err(|error| advise(without_answer(error), "if the file is there when it answers, remove it"))?
}

/// Prepares a device to take a member's place, or creates a file for that. Returns it, and whether
/// all of it reads as zeroes. `superblock`: that of any lane of the array; every lane is prepared for.
///
/// # Errors
/// When the device fails or does not answer within the limit. A file that was created is removed
/// again.
pub(crate) fn prepare(
    path: &Path,
    device: Option<Device>,
    file_bytes: u64,
    superblock: &Superblock,
    limit: Duration,
) -> Result<(Device, bool), DeviceError> {
    let (own, part, regions) = (path.to_path_buf(), superblock.part, superblock.regions.clone());
    let is_new = device.is_none();
    let prepared = step_by_step(path, "write to it", limit, move || {
        let (device, is_zero) = match device {
            Some(device) => {
                let is_zero = device.discard_all()?;
                if !is_zero {
                    wipe_ends(&device, part)?;
                    wipe_logs(&device, part, &regions)?;
                }
                (device, is_zero)
            }
            None => (Device::create_sparse(&own, file_bytes)?, true),
        };
        let done = reserve_regions(&device, part, &regions).and_then(|()| is_wanted(&own));
        if done.is_err() && is_new {
            // The error is the answer; a file that stays behind is empty.
            let _ = device.remove_file();
        }
        done.map(|()| (device, is_zero))
    });
    let advice = if is_new {
        "the array is as it was. If the file is there when it answers, remove it or name it again"
    } else {
        "the array is as it was. What the device held may be overwritten in part: when it answers, try again"
    };
    prepared.map_err(|error| advise(without_answer(error), advice))?
}

/// Removes a file that was created and is not needed, if its filesystem answers.
pub(crate) fn remove(path: &Path, created: CreatedFile, limit: Duration) {
    let _ = within(path, "remove it again", limit, move || created.remove());
}

/// An error of a device that does not answer, with what to do.
pub(crate) fn advise(error: DeviceError, advice: &str) -> DeviceError {
    match error {
        DeviceError::Io { path, action, source } if source.kind() == std::io::ErrorKind::TimedOut => {
            let source = std::io::Error::new(source.kind(), format!("{source}: {advice}"));
            DeviceError::Io { path, action, source }
        }
        error => error,
    }
}

/// Fails when the call of this thread was given up.
fn is_wanted(path: &Path) -> Result<(), DeviceError> {
    begin_step().map_err(|source| DeviceError::Io { path: path.into(), action: "finish it".into(), source })
}
