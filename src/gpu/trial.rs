//! Single batches on a device that is not in service yet, for its self-test and its calibration.
//! Must not know of queues or of devices in service.
#![allow(unsafe_code)] // hands addresses to a device; the block argues for itself

use std::mem::ManuallyDrop;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::batch::Batch;
use super::device::{Device, DeviceError, Digest};

/// Runs a batch in the first slot. On an error the batch is leaked, and the device must be
/// abandoned.
pub(super) fn run(
    device: &mut dyn Device,
    batch: Batch,
    hang_after: Duration,
) -> Result<(Batch, Vec<Digest>, Duration), DeviceError> {
    let (sender, woken) = mpsc::channel();
    // If anything below fails or panics, the device may still have the addresses.
    let mut batch = ManuallyDrop::new(batch);
    let work = batch.work();
    let started = Instant::now();
    let wake = Box::new(move || {
        // After a timeout nothing listens any more.
        let _ = sender.send(());
    });
    // SAFETY: the addresses are those of buffers that only `batch` holds; it is handed out again
    // after `finish` only, and leaked otherwise.
    let begun = unsafe { device.start(0, work, wake) };
    let ended = begun.and_then(|()| match woken.recv_timeout(hang_after) {
        Ok(()) => device.finish(0),
        Err(_) => Err(DeviceError::Failed {
            operation: "wait for a test",
            text: format!("no answer in {hang_after:?}"),
        }),
    });
    if ended.is_ok() {
        // SAFETY: only `batch` holds the outputs, and nothing looks at them before this returns.
        unsafe { device.deliver(0) };
    }
    ended.map(|digests| (ManuallyDrop::into_inner(batch), digests, started.elapsed()))
}
