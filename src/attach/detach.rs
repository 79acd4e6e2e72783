//! Detaching a device without losing what was written to it.
//!
//! Invariants: a device that is mounted, used as swap, built upon or open anywhere is left alone,
//! and from the check to the end nothing can mount it; what was written is flushed first, while the
//! keeper still keeps the connections. There is no way to force a detach.

use super::device::{DeviceError, DeviceIndex, Host};
use super::netlink::Driver;
use super::netlink::message::Request;
use super::server::PREFIX;
use super::state::StateDir;
use super::{AttachError, system};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::File;
use std::time::{Duration, Instant};

/// How long programs that probe devices may have this one open.
const OPENERS: Duration = Duration::from_secs(3);

/// How long a keeper may take to end.
const KEEPER: Duration = Duration::from_secs(30);

/// How long the driver may take to set the device free.
const FREE: Duration = Duration::from_secs(30);

/// Time between two checks.
const STEP: Duration = Duration::from_millis(50);

/// A device that may be detached. While this value exists, nothing can mount the device.
#[derive(Debug)]
pub(crate) struct DetachPlan {
    device: DeviceIndex,
    /// The name of the attached export.
    name: String,
    claim: File,
}

impl DetachPlan {
    /// What will be done, in one line, or with `done` what was done.
    #[must_use]
    pub(crate) fn describe(&self, done: bool) -> String {
        format!("{} {} from {}", if done { "detached" } else { "would detach" }, self.name, self.device)
    }
}

/// Checks whether a device may be detached; changes nothing.
///
/// # Errors
/// When it may not be detached; the error names what uses it.
pub(crate) fn plan_detach(host: &Host, device: DeviceIndex) -> Result<DetachPlan, AttachError> {
    host.exists(device)?;
    let attached = host.attached(device).ok_or(AttachError::NotAttached { device })?;
    let backend = attached.backend.unwrap_or_default();
    let Some(name) = backend.strip_prefix(PREFIX) else {
        let backend = if backend.is_empty() { format!("process {}", attached.pid) } else { backend };
        return Err(AttachError::Foreign { device, backend });
    };
    let claim = host.claim(device, !attached.read_only)?;
    let begun = Instant::now();
    loop {
        let users = host.openers(device);
        if users.is_empty() {
            return Ok(DetachPlan { device, name: name.to_owned(), claim });
        }
        if begun.elapsed() > OPENERS {
            let users = users.into_iter().map(|user| format!("open by {user}")).collect();
            return Err(DeviceError::InUse { device, users }.into());
        }
        std::thread::sleep(STEP);
    }
}

/// Detaches a device, and waits until it is free.
///
/// # Errors
/// When it cannot be flushed: then it stays attached.
pub(crate) fn detach(host: &Host, state: &StateDir, plan: DetachPlan) -> Result<String, AttachError> {
    let device = plan.device;
    let line = plan.describe(true);
    let mut driver = Driver::open()?;
    // Waits for the daemon if need be: the keeper still reconnects.
    plan.claim.sync_all().map_err(|source| AttachError::Flush { device, source })?;
    end_keeper(state, device)?;
    driver.ask(Request::Disconnect { index: device.0 })?;
    // The driver keeps the device attached while any process has it open.
    drop(plan.claim);
    until(FREE, || host.attached(device).is_none_or(|left| left.size == 0))
        .map_err(|seconds| AttachError::Stuck { device, what: "the kernel's use of it", seconds })?;
    state.remove(device);
    Ok(line)
}

/// Ends the keeper of a device, if there is one.
fn end_keeper(state: &StateDir, device: DeviceIndex) -> Result<(), AttachError> {
    if !state.is_kept(device) {
        return Ok(());
    }
    if let Some(pid) = state.keeper(device).and_then(|pid| i32::try_from(pid).ok()) {
        match kill(Pid::from_raw(pid), Signal::SIGTERM) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(errno) => return Err(system("end the keeper")(errno.into())),
        }
    }
    until(KEEPER, || !state.is_kept(device)).map_err(|seconds| AttachError::Stuck {
        device,
        what: "its keeper",
        seconds,
    })
}

/// Waits until `is_so`. The error is the number of seconds waited.
fn until(limit: Duration, mut is_so: impl FnMut() -> bool) -> Result<(), u64> {
    let begun = Instant::now();
    while !is_so() {
        if begun.elapsed() > limit {
            return Err(limit.as_secs());
        }
        std::thread::sleep(STEP);
    }
    Ok(())
}
