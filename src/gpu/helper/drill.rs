//! Devices in memory and deliberate faults for tests with real helpers. Only in builds with debug assertions:
//! in a release build, no environment makes a helper do this.
//!
//! The environment variable CALPE_DRILL_GPU names a folder. Its file `devices` says how many devices in
//! memory there are, and `writable` after it that they take no memory which this process may only read;
//! without that file there is none. Its file `start` is obeyed by every helper that starts:
//! `die` or `hang`. When its file `order` appears, it is removed and obeyed by the next helper that is given
//! a batch: see [`Deed`].

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use crate::device::Driver;
use crate::fake::{FakeDevice, FakeDriver, Fault};

/// What a helper does in place of, or before, its next batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deed {
    /// `die`: it crashes.
    Die,
    /// `hang`: it does nothing any more, whatever it is told.
    Hang,
    /// `slot`, `serial`, `note`, `count`: the answer, or the count of answers, is not what it may be.
    Slot,
    Serial,
    Note,
    Count,
    /// `bells`: it rings without end.
    Bells,
    /// `message`: it sends what is no message.
    Message,
    /// `flood`: it prints without end.
    Flood,
    /// `scribble`: it writes to the memory of requests.
    Scribble,
}

static DEVICES: LazyLock<Option<(PathBuf, FakeDriver)>> = LazyLock::new(|| {
    let folder = PathBuf::from(std::env::var_os("CALPE_DRILL_GPU")?);
    let text = fs::read_to_string(folder.join("devices")).unwrap_or_default();
    let mut words = text.split_whitespace();
    let count = words.next().and_then(|count| count.parse().ok()).unwrap_or(0);
    let takes_read_only = words.next() != Some("writable");
    let device = FakeDevice { slots: 4, slot_bytes: 16 << 20, takes_read_only, ..FakeDevice::default() };
    Some((folder, FakeDriver::new(vec![device; count])))
});

/// The devices in memory, if they are wanted. Obeys `start` first.
pub(super) fn driver() -> Option<Arc<dyn Driver>> {
    let (folder, driver) = DEVICES.as_ref()?;
    match fs::read_to_string(folder.join("start")).unwrap_or_default().trim() {
        "die" => std::process::abort(),
        "hang" => sleep(),
        _ => {}
    }
    Some(Arc::new(driver.clone()))
}

/// The deed that is ordered, if there is one. Faults of the device itself are given to it.
pub(super) fn deed() -> Option<Deed> {
    let (folder, driver) = DEVICES.as_ref()?;
    let (from, to) = (folder.join("order"), folder.join("order.taken"));
    fs::rename(&from, &to).ok()?;
    let text = fs::read_to_string(&to).unwrap_or_default();
    let fault = match text.trim() {
        "die" => return Some(Deed::Die),
        "hang" => return Some(Deed::Hang),
        "slot" => return Some(Deed::Slot),
        "serial" => return Some(Deed::Serial),
        "note" => return Some(Deed::Note),
        "count" => return Some(Deed::Count),
        "bells" => return Some(Deed::Bells),
        "message" => return Some(Deed::Message),
        "flood" => return Some(Deed::Flood),
        "scribble" => return Some(Deed::Scribble),
        "finish" => Fault::Finish,
        "refuse" => Fault::Refuse,
        "never" => Fault::Never,
        "wrong" => Fault::WrongEverywhere,
        "panic" => Fault::PanicStart,
        "slow" => Fault::Slow(Duration::from_millis(200)),
        other => panic!("no such order: {other}"),
    };
    (0..4).for_each(|device| {
        if driver.devices().is_ok_and(|devices| device < devices.len()) {
            driver.inject(device, 0, fault);
        }
    });
    None
}

/// For ever.
pub(super) fn sleep() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}
