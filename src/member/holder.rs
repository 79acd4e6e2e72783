//! Finds out what uses a file or block device, for error messages: reads /proc and /sys, best effort. An
//! empty answer means "not known", never "unused". Must not know what the answer decides.

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The name of our processes.
const PROGRAM: &str = "calpe";

/// Names this process as the holder of a lock.
pub(super) const OWN: &str = "this process, as a member or to make it one";

/// Advice for the case that this holder has a lock.
pub(super) fn advice_about(holder: &str) -> &'static str {
    match holder == OWN {
        true => "name another, or try again when that has ended",
        false => "stop that first",
    }
}

/// The living process that holds a `flock` on this inode, as "process 12 (calpe)". None also for
/// one that has died: the kernel releases what its io_uring held a moment later.
pub(super) fn flock_holder(device: u64, inode: u64) -> Option<String> {
    let pid = flock_pid(device, inode)?;
    if pid == std::process::id() {
        return Some(OWN.to_owned());
    }
    living_name(pid).map(|name| format!("process {pid} ({name})"))
}

/// Whether the lock on a member is held by this process or by another living Calpe, which may serve
/// its array or check it.
#[must_use]
pub(crate) fn is_held_by_calpe(path: &Path) -> bool {
    let Some(pid) = fs::metadata(path).ok().and_then(|meta| flock_pid(meta.dev(), meta.ino())) else {
        return false;
    };
    let program =
        |pid: &str| fs::metadata(format!("/proc/{pid}/exe")).ok().map(|meta| (meta.dev(), meta.ino()));
    let same_program = || program("self").is_some_and(|own| program(&pid.to_string()) == Some(own));
    // An older version may still run, and other users' programs cannot be read.
    pid == std::process::id() || living_name(pid).is_some_and(|name| name == PROGRAM || same_program())
}

/// The process that took a `flock` on this inode, dead or alive.
fn flock_pid(device: u64, inode: u64) -> Option<u32> {
    let wanted = format!("{:02x}:{:02x}:{inode}", libc::major(device), libc::minor(device));
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        // "1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF"
        let mut fields = line.split_whitespace().skip(1);
        let kind = fields.next()?;
        let pid = fields.nth(2)?;
        (kind == "FLOCK" && fields.next()? == wanted).then(|| pid.parse().ok())?
    })
}

/// The name of a process that has not died.
fn living_name(pid: u32) -> Option<String> {
    let (name, is_dead) = name_and_death(pid)?;
    (!is_dead).then_some(name)
}

/// Whether a process has died and still exists: its parent has not waited for it, or the kernel
/// cannot end a thread of it before a filesystem or a device answers.
#[must_use]
pub(crate) fn is_dead_and_there(pid: u32) -> bool {
    name_and_death(pid).is_some_and(|(_, is_dead)| is_dead)
}

/// Whether a process was stopped by a signal: it answers nothing before it is continued.
#[must_use]
pub(crate) fn is_stopped(pid: u32) -> bool {
    name_and_state(pid).is_some_and(|(_, state)| state == 'T')
}

fn name_and_death(pid: u32) -> Option<(String, bool)> {
    name_and_state(pid).map(|(name, state)| (name, matches!(state, 'Z' | 'X')))
}

fn name_and_state(pid: u32) -> Option<(String, char)> {
    // "1234 (calpe) S ...": a name may hold any character, so the state follows the last
    // parenthesis.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (head, tail) = stat.rsplit_once(')')?;
    let name = head.split_once('(').map_or("", |(_, name)| name);
    Some((name.to_owned(), tail.trim_start().chars().next()?))
}

/// The process that took a `flock` on this inode and has died, or is gone: its operations in the
/// kernel hold the lock.
pub(super) fn dead_flock_holder(device: u64, inode: u64) -> Option<u32> {
    flock_pid(device, inode).filter(|pid| is_dead_and_there(*pid) || is_gone(*pid))
}

fn is_gone(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0).map(Pid::from_raw);
    pid.is_some_and(|pid| kill(pid, None) == Err(Errno::ESRCH))
}

/// The dead process that still holds a `flock` on this open file.
#[must_use]
pub(crate) fn dead_holder_of(file: &fs::File) -> Option<u32> {
    let meta = file.metadata().ok()?;
    dead_flock_holder(meta.dev(), meta.ino())
}

/// Words for a process for which [`is_dead_and_there`] holds, with its role there ("which listens there").
#[must_use]
pub(crate) fn words_for_dead(pid: u32, what: &str) -> String {
    format!(
        "process {pid}, {what}, was killed and cannot end before a filesystem or a device answers it: its writes may still come"
    )
}

/// How a block device is used ("mounted on /srv"), itself or one of its partitions.
pub(super) fn block_usage(rdev: u64) -> Option<String> {
    let numbers = format!("{}:{}", libc::major(rdev), libc::minor(rdev));
    let sys = format!("/sys/dev/block/{numbers}");
    let mut devices = vec![numbers];
    for entry in fs::read_dir(&sys).into_iter().flatten().flatten() {
        if entry.path().join("partition").exists()
            && let Ok(numbers) = fs::read_to_string(entry.path().join("dev"))
        {
            devices.push(numbers.trim().to_owned());
        }
    }
    if let Ok(mounts) = fs::read_to_string("/proc/self/mountinfo") {
        for line in mounts.lines() {
            let mut fields = line.split(' ').skip(2);
            let (Some(device), Some(target)) = (fields.next(), fields.nth(1)) else { continue };
            if devices.iter().any(|d| d == device) {
                return Some(format!("mounted on {target}"));
            }
        }
    }
    for device in &devices {
        let holders = fs::read_dir(format!("/sys/dev/block/{device}/holders"));
        if let Some(holder) = holders.into_iter().flatten().flatten().next() {
            return Some(format!("part of {}", holder.file_name().to_string_lossy()));
        }
    }
    None
}

/// How a regular file is used by the kernel: behind a loop device, or as swap space.
pub(super) fn file_usage(path: &Path) -> Option<String> {
    let path = fs::canonicalize(path).ok()?;
    for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        if let Ok(backing) = fs::read_to_string(entry.path().join("loop/backing_file"))
            && Path::new(backing.trim_end_matches('\n')) == path
        {
            return Some(format!("attached as /dev/{}", entry.file_name().to_string_lossy()));
        }
    }
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let used = swaps.lines().skip(1).any(|line| line.split_whitespace().next().map(Path::new) == Some(&path));
    used.then(|| "used as swap space".to_owned())
}
