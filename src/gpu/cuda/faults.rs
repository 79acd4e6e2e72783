//! Faults on purpose, on a real device: in the next batch on any device of a driver, a kernel traps, after
//! which every call in that device's context fails, or a kernel runs for [`HANG_SECONDS`]. For drills of how
//! jobs survive that. Costs one load of an atomic per batch. Must not know what a batch computes.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::device::Drill;

/// Length of a hang: longer than any watchdog waits, but limited, so that it does not outlive the test.
pub const HANG_SECONDS: u64 = 20;

/// Names of the kernels in [`PTX`].
pub(super) const ENTRIES: [&str; 2] = ["fault_error", "fault_hang"];

/// The kernels: a trap, and one thread that sleeps for a number of nanoseconds.
pub(super) const PTX: &str = "\
.version 8.0
.target sm_80
.address_size 64

.visible .entry fault_error(.param .u64 unused)
{
    trap;
    ret;
}

.visible .entry fault_hang(.param .u64 nanoseconds)
{
    .reg .pred %more;
    .reg .b64 %begun, %now, %spent, %limit;
    ld.param.u64 %limit, [nanoseconds];
    mov.u64 %begun, %globaltimer;
again:
    nanosleep.u32 100000;
    mov.u64 %now, %globaltimer;
    sub.u64 %spent, %now, %begun;
    setp.lt.u64 %more, %spent, %limit;
    @%more bra again;
    ret;
}
";

/// A fault for the next batch. Shared by a driver and its devices.
#[derive(Debug, Default)]
pub(super) struct Faults(AtomicU8);

impl Faults {
    /// Puts a fault into the next batch to be started.
    pub(super) fn put(&self, fault: Drill) {
        self.0.store(fault as u8 + 1, Ordering::SeqCst);
    }

    /// Takes the waiting fault, if there is one.
    pub(super) fn take(&self) -> Option<Drill> {
        if self.0.load(Ordering::Relaxed) == 0 {
            return None;
        }
        match self.0.swap(0, Ordering::SeqCst) {
            1 => Some(Drill::Error),
            2 => Some(Drill::Hang),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_taken_once() {
        let faults = Faults::default();
        assert_eq!(faults.take(), None);
        for fault in [Drill::Error, Drill::Hang] {
            faults.put(fault);
            assert_eq!(faults.take(), Some(fault));
            assert_eq!(faults.take(), None);
        }
    }
}
