//! How much memory this process may use. Must not know for what.

use std::fs;
use std::path::Path;

/// Memory in bytes that the host has, or the control group of this process allows, whichever is less. A limit
/// that cannot be read counts as none.
pub(super) fn bytes() -> u64 {
    let host = nix::sys::sysinfo::sysinfo().map_or(u64::MAX, |info| info.ram_total());
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    group_limit(&groups, Path::new("/sys/fs/cgroup")).map_or(host, |group| group.min(host))
}

/// The least limit of a control group and those above it, of either version. `groups`: the text of
/// /proc/PID/cgroup. A container may see only its own group, as the root of all: that one counts
/// whatever the path says.
fn group_limit(groups: &str, root: &Path) -> Option<u64> {
    let unified = groups.lines().find_map(|line| line.strip_prefix("0::/"));
    let own = groups.lines().find_map(|line| line.split_once(":memory:/").map(|(_, path)| path));
    let unified = unified.and_then(|path| least(root, path, "memory.max"));
    let own = own.and_then(|path| least(&root.join("memory"), path, "memory.limit_in_bytes"));
    unified.into_iter().chain(own).min()
}

/// The least number in the files of this name in a folder below `root` and those above it. "max" is
/// no limit.
fn least(root: &Path, path: &str, file: &str) -> Option<u64> {
    let own = root.join(path);
    let above = own.ancestors().take_while(|folder| folder.starts_with(root));
    above.filter_map(|folder| fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()).min()
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
        // Version 1, beside version 2; and in a container that sees its own group as the root.
        let old = root.path().join("memory");
        fs::create_dir_all(old.join("calpe")).unwrap();
        fs::write(old.join("calpe/memory.limit_in_bytes"), "800\n").unwrap();
        assert_eq!(group_limit(&format!("9:memory:/calpe\n{groups}"), root.path()), Some(800));
        fs::write(old.join("memory.limit_in_bytes"), "700\n").unwrap();
        assert_eq!(group_limit("9:memory:/docker/1\n", root.path()), Some(700));
        assert!(bytes() > 1 << 20);
    }
}
