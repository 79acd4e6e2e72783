//! Where threads put the outcomes of the engine's operations, and the counter that wakes the
//! engine. Must not know what operations are for.

use calpe_core::block_io::{DeviceId, IoFault, IoToken, IoValue};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

/// An outcome on its way to the engine: owner, device, token.
pub(super) type Returned = (u32, DeviceId, IoToken, Result<IoValue, IoFault>);

/// The end of an entry of a ring beside the engine's: its `user_data`, and the result of the system
/// call.
pub(super) type Ended = (u64, i32);

/// Ends that have come in. The list has no descriptors, so threads with tables of their own may
/// share it.
pub(super) type EndedList = Arc<Mutex<Vec<Ended>>>;

/// What has come in.
#[derive(Debug)]
pub(super) struct Inbox {
    returned: Mutex<Vec<Returned>>,
    ended: EndedList,
    /// Raised when the first of either comes in.
    pub wake: EventFd,
}

impl Inbox {
    pub(super) fn new() -> io::Result<Inbox> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Inbox { returned: Mutex::default(), ended: Arc::default(), wake })
    }

    /// Whether no outcome has come in.
    pub(super) fn is_empty(&self) -> bool {
        self.returned.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    pub(super) fn take(&self) -> Vec<Returned> {
        take(&self.returned)
    }

    pub(super) fn take_ended(&self) -> Vec<Ended> {
        take(&self.ended)
    }

    pub(super) fn give(&self, group: Vec<Returned>) {
        put(&self.returned, group, &self.wake);
    }

    /// The list of ends and its wake flag, for a thread that has its own copy of the counter.
    pub(super) fn ended_list(&self) -> EndedList {
        Arc::clone(&self.ended)
    }
}

/// Adds to a list, and raises the counter if the list was empty.
pub(super) fn put<T>(list: &Mutex<Vec<T>>, mut group: Vec<T>, wake: &EventFd) {
    if group.is_empty() {
        return;
    }
    let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
    let first = list.is_empty();
    list.append(&mut group);
    drop(list);
    if first {
        rouse(wake);
    }
}

/// Wakes the thread that polls this counter.
pub(super) fn rouse(wake: &EventFd) {
    // A full counter means that the thread is being woken already.
    let _ = wake.write(1);
}

fn take<T>(list: &Mutex<Vec<T>>) -> Vec<T> {
    std::mem::take(&mut *list.lock().unwrap_or_else(PoisonError::into_inner))
}
