//! How much memory this process can have. Must not know what for.

use std::fs;
use std::path::Path;

/// Memory in bytes that the host has, or the control group of this process allows, whichever is less. What cannot be
/// found out counts as no limit.
pub(super) fn bytes() -> u64 {
    let host = nix::sys::sysinfo::sysinfo().map_or(u64::MAX, |info| info.ram_total());
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    group_limit(&groups, Path::new("/sys/fs/cgroup")).map_or(host, |group| group.min(host))
}

/// The least limit of a control group (version 2) and those above it. `groups`: the text of /proc/PID/cgroup.
fn group_limit(groups: &str, root: &Path) -> Option<u64> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let own = root.join(path);
    let above = own.ancestors().take_while(|folder| folder.starts_with(root));
    above.filter_map(|folder| fs::read_to_string(folder.join("memory.max")).ok()?.trim().parse().ok()).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_of_all_groups_above_counts() {
        let root = tempfile::tempdir().unwrap();
        let own = root.path().join("system.slice/calpe.service");
        fs::create_dir_all(&own).unwrap();
        let groups = "1:name=systemd:/\n0::/system.slice/calpe.service\n";
        assert_eq!(group_limit(groups, root.path()), None);
        fs::write(own.join("memory.max"), "max\n").unwrap();
        assert_eq!(group_limit(groups, root.path()), None);
        fs::write(own.join("memory.max"), "1000\n").unwrap();
        fs::write(root.path().join("system.slice/memory.max"), "900\n").unwrap();
        assert_eq!(group_limit(groups, root.path()), Some(900));
        assert_eq!(group_limit("", root.path()), None);
        assert!(bytes() > 1 << 20);
    }
}
