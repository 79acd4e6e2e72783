//! Where threads that have operations of the engine put what they came to, and what wakes the
//! engine. Must not know what operations are for.

use calpe_core::block_io::{DeviceId, IoFault, IoToken, IoValue};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

/// An outcome on its way to the engine: owner, device, token.
pub(super) type Returned = (u32, DeviceId, IoToken, Result<IoValue, IoFault>);

/// The end of an entry that a ring beside the engine's had: its `user_data`, and what the system
/// call would have returned.
pub(super) type Ended = (u64, i32);

/// Ends that have come in. It has no descriptors, so threads with tables of their own may share it.
pub(super) type EndedList = Arc<Mutex<Vec<Ended>>>;

/// What has come in.
#[derive(Debug)]
pub(super) struct Inbox {
    returned: Mutex<Vec<Returned>>,
    ended: EndedList,
    /// Rung when the first of either comes in.
    pub wake: EventFd,
}

impl Inbox {
    pub fn new() -> io::Result<Inbox> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Inbox { returned: Mutex::default(), ended: Arc::default(), wake })
    }

    /// Whether no outcome has come in.
    pub fn is_empty(&self) -> bool {
        self.returned.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    pub fn take(&self) -> Vec<Returned> {
        take(&self.returned)
    }

    pub fn take_ended(&self) -> Vec<Ended> {
        take(&self.ended)
    }

    pub fn give(&self, group: Vec<Returned>) {
        put(&self.returned, group, &self.wake);
    }

    /// Where ends are put, with the wake, by a thread that has its own copy of that.
    pub fn ended_list(&self) -> EndedList {
        Arc::clone(&self.ended)
    }
}

/// Adds to a list, and wakes whoever looks after it when it was empty.
pub(super) fn put<T>(list: &Mutex<Vec<T>>, mut group: Vec<T>, wake: &EventFd) {
    if group.is_empty() {
        return;
    }
    let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
    let first = list.is_empty();
    list.append(&mut group);
    drop(list);
    if first {
        ring(wake);
    }
}

/// Wakes whoever waits for this.
pub(super) fn ring(wake: &EventFd) {
    // A full counter means that it is being woken already.
    let _ = wake.write(1);
}

fn take<T>(list: &Mutex<Vec<T>>) -> Vec<T> {
    std::mem::take(&mut *list.lock().unwrap_or_else(PoisonError::into_inner))
}
