//! A filesystem for one test, of a size that the test chooses. Mounting it takes root.

use super::run;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Its mount point; unmounted when dropped.
pub(crate) struct Tmpfs(PathBuf);

impl Tmpfs {
    /// Mounts it. Prints a line and returns None if this user may not mount.
    pub(crate) fn mount(at: PathBuf, megabytes: u64) -> Option<Tmpfs> {
        fs::create_dir_all(&at).expect("a directory");
        let size = format!("size={megabytes}m");
        let mut command = Command::new("mount");
        let output = command.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&at).output();
        if output.as_ref().is_ok_and(|output| output.status.success()) {
            return Some(Tmpfs(at));
        }
        eprintln!("skipped: this user may not mount a tmpfs ({output:?})");
        None
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn remount(&self, options: &str) {
        run(Command::new("mount").args(["-o", &format!("remount,{options}")]).arg(&self.0));
    }

    /// Fills it up to `kib` KiB of free space.
    pub(crate) fn leave_room(&self, kib: u64) {
        let used = run(Command::new("df").args(["--block-size=1K", "--output=used"]).arg(&self.0));
        let used: u64 = used.lines().last().and_then(|line| line.trim().parse().ok()).expect("a number");
        self.remount(&format!("size={}k", used + kib));
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // Lazily: the daemon of a failed test may still have files open.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
