//! A device that an engine has taken over, with its counts. Must not know operations.

use super::Device;
use super::aside::{self, Aside};
use super::shared::SharedDevice;
use std::collections::VecDeque;
use std::ffi::CString;
use std::mem::MaybeUninit;
use std::sync::Arc;

/// Operations on one local device that the kernel has at one time. More would not make a disk faster, and
/// each may occupy a thread of the kernel.
pub(super) const DEPTH_MAX: u32 = 256;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) device: Device,
    /// The ring that its operations use instead of the shared one.
    pub(super) aside: Option<Aside>,
    /// What other threads read it through; none where only this engine can.
    pub(super) shared: Option<Arc<SharedDevice>>,
    pub(super) owner: u32,
    pub(super) in_flight: u32,
    /// Its operations that the kernel has.
    pub(super) depth: u32,
    /// Its operations that wait until the kernel has fewer.
    pub(super) waiting: VecDeque<usize>,
    pub(super) released: bool,
    pub(super) reported_gone: bool,
    /// Since when it has had operations in flight and ended none.
    pub(super) busy_since: u64,
    /// When an operation last ended, unless it failed for want of room or memory.
    pub(super) last_end: u64,
    /// A check of its path that is in flight.
    pub(super) look: Option<Box<Look>>,
}

/// The path given to statx, and the answer. The kernel has pointers to both.
pub(super) struct Look {
    pub(super) path: CString,
    pub(super) stat: MaybeUninit<libc::statx>,
}

impl std::fmt::Debug for Look {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Look").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Attached {
    /// Whether other threads are reading it.
    pub(super) fn is_read(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| !shared.is_unused())
    }

    /// Whether it is in use, and not known to be gone.
    pub(super) fn is_in_service(&self) -> bool {
        !self.released && !self.reported_gone
    }

    /// Whether it is a window of this local device, of this owner.
    pub(super) fn is_window_of(&self, device: &Device, owner: u32) -> bool {
        self.owner == owner && device.remote().is_none() && self.device.same_device(device)
    }

    /// Whether the kernel gets only a limited number of its operations at one time.
    pub(super) fn is_limited(&self) -> bool {
        self.device.remote().is_none() && !self.device.facts().memory
    }

    /// The most operations that the kernel may have of it.
    pub(super) fn depth_max(&self) -> u32 {
        if self.device.holds_up() { aside::DEPTH_MAX } else { DEPTH_MAX }
    }

    /// How many workers of the shared ring it may occupy.
    pub(super) fn workers(&self) -> u32 {
        match self.aside {
            Some(_) => 0,
            None if self.is_limited() => self.depth_max(),
            None => 0,
        }
    }
}
