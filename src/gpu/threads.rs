//! What threads cost, and how soon they get a core: clocks and priorities of the system. A system that knows
//! none of them costs speed or a figure, nothing else. Must not know what threads do.
#![allow(unsafe_code)] // system calls that no crate wraps; each block argues for itself

use std::mem::MaybeUninit;
use std::time::Duration;

/// The longest that a thread of a device runs in one go where others wait for its core, in nanoseconds. From
/// Linux 6.12 on, a thread that asks for less than what runs gets the core as soon as it wakes.
const SLICE_NANOS: u64 = 500_000;

/// `struct sched_attr` of the kernel, of its first size.
#[repr(C)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Has this thread, and the threads and processes that it starts, run before those of a higher nice value.
pub(super) fn raise_priority(nice: i32) {
    // SAFETY: no memory involved; 0 names the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
    // SAFETY: as above.
    let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    let size = size_of::<Attributes>() as u32;
    let attributes = Attributes {
        size,
        policy: 0,
        flags: 0,
        nice,
        priority: 0,
        runtime: SLICE_NANOS,
        deadline: 0,
        period: 0,
    };
    // SAFETY: the kernel reads as many bytes as `size` says; 0 names the calling thread.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

/// Gives this thread the usual priority in place of one that it inherited.
pub(super) fn reset_priority() {
    // SAFETY: no memory involved; 0 names the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 0) };
}

/// CPU time of this thread.
pub(super) fn own_cpu_time() -> Duration {
    read(libc::CLOCK_THREAD_CPUTIME_ID).unwrap_or_default()
}

/// CPU time of a process, all of its threads; None where the system does not tell.
pub(super) fn cpu_time_of(process: u32) -> Option<Duration> {
    let mut clock = 0;
    // SAFETY: writes one number.
    let code = unsafe { libc::clock_getcpuclockid(i32::try_from(process).ok()?, &raw mut clock) };
    if code == 0 { read(clock) } else { None }
}

fn read(clock: libc::clockid_t) -> Option<Duration> {
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: writes one time.
    if unsafe { libc::clock_gettime(clock, time.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: it was written.
    let time = unsafe { time.assume_init() };
    Some(Duration::new(u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::time::Instant;

    #[test]
    fn clocks_count_what_threads_and_processes_use() {
        let before = own_cpu_time();
        let started = Instant::now();
        while own_cpu_time() < before + Duration::from_millis(5) {
            assert!(started.elapsed() < Duration::from_secs(60), "the clock of this thread stands still");
        }
        let mut child = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .stdin(Stdio::null())
            .spawn()
            .expect("a shell");
        while cpu_time_of(child.id()).expect("a clock") < Duration::from_millis(5) {
            assert!(started.elapsed() < Duration::from_secs(60), "the clock of the process stands still");
        }
        child.kill().expect("killed");
        child.wait().expect("gone");
        assert_eq!(cpu_time_of(child.id()), None, "it is gone");
    }

    #[test]
    fn a_priority_is_that_of_the_thread_alone_and_of_those_that_it_starts() {
        // SAFETY: no memory involved.
        let nice = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let before = nice();
        // Lower than before, which needs no right.
        let wanted = before + 1;
        let seen = std::thread::spawn(move || {
            raise_priority(wanted);
            (nice(), std::thread::spawn(nice).join().expect("no panic"))
        });
        assert_eq!(seen.join().expect("no panic"), (wanted.min(19), wanted.min(19)));
        assert_eq!(nice(), before);
    }
}
