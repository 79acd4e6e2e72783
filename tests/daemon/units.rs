//! The systemd units of conf/: valid together, without a circle among what is started at boot, and with few
//! rights. Needs systemd-analyze; where it is not installed, only the text is looked at.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

const UNITS: [&str; 3] = ["calpe.service", "calpe.socket", "calpe-attach@.service"];

/// The most that `systemd-analyze security` may find the daemon exposed, in tenths.
const EXPOSURE_MAX: &str = "20";

fn conf() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("conf")
}

fn unit(name: &str) -> String {
    fs::read_to_string(conf().join("systemd").join(name)).expect("a unit")
}

/// A folder with the units as they would be installed, all enabled; an instance of the template with a
/// filesystem on its device; and a filesystem for /var, which is mounted after the former's device is there.
fn install(dir: &Path, change: impl Fn(&str, &str) -> String) {
    for name in UNITS {
        // The program need not be installed here.
        let text = change(name, &unit(name).replace("=/usr/bin/calpe", "=/bin/true"));
        fs::write(dir.join(name), text).expect("written");
    }
    let mounts = [
        ("srv.mount", "Requires=calpe-attach@nbd0.service\nAfter=calpe-attach@nbd0.service\n", "/srv"),
        ("var.mount", "", "/var"),
    ];
    for (name, needs, place) in mounts {
        // As systemd-fstab-generator writes them.
        let order = "After=local-fs-pre.target\nBefore=local-fs.target\n";
        let mount = format!("[Mount]\nWhat=/dev/disk/by-label/x\nWhere={place}\nType=xfs\n");
        fs::write(dir.join(name), format!("[Unit]\n{needs}{order}{mount}")).expect("written");
    }
    for (target, unit, file) in [
        ("local-fs.target.requires", "srv.mount", "srv.mount"),
        ("local-fs.target.requires", "var.mount", "var.mount"),
        ("sockets.target.wants", "calpe.socket", "calpe.socket"),
        ("multi-user.target.wants", "calpe.service", "calpe.service"),
        ("multi-user.target.wants", "calpe-attach@nbd0.service", "calpe-attach@.service"),
    ] {
        fs::create_dir_all(dir.join(target)).expect("a folder");
        symlink(dir.join(file), dir.join(target).join(unit)).expect("a link");
    }
}

/// Runs systemd-analyze with the units of a folder; none, with a line about it, where it is not installed.
fn analyze(dir: &Path, args: &[&str]) -> Option<(bool, String)> {
    let output = Command::new("systemd-analyze")
        .args(args)
        .env("SYSTEMD_UNIT_PATH", format!("{}:", dir.display()))
        .output()
        .inspect_err(|error| eprintln!("not verified: systemd-analyze (package systemd): {error}"))
        .ok()?;
    let mut said = String::from_utf8_lossy(&output.stdout).into_owned();
    said.push_str(&String::from_utf8_lossy(&output.stderr));
    Some((output.status.success(), said))
}

/// What systemd has to say about booting with all units.
fn verify(dir: &Path) -> Option<(bool, String)> {
    analyze(
        dir,
        &["verify", "multi-user.target", "calpe.socket", "calpe.service", "calpe-attach@nbd0.service"],
    )
}

#[test]
fn units_are_valid_together_and_boot_has_no_circle() {
    let dir = tempfile::tempdir().expect("a directory");
    install(dir.path(), |_, text| text.to_owned());
    let Some((good, said)) = verify(dir.path()) else { return };
    let about_us: Vec<&str> =
        said.lines().filter(|line| line.contains("calpe") || line.contains("cycle")).collect();
    assert!(good && about_us.is_empty(), "{said}");
}

/// What would be wrong without what keeps the circles away: default dependencies put a unit behind local
/// filesystems, and so does a directory on one of them.
#[test]
fn a_circle_would_be_found() {
    let own = |text: &str| text.replace("DefaultDependencies=no\n", "");
    type Change<'a> = &'a dyn Fn(&str) -> String;
    let changes: [(&str, Change); 4] = [
        ("calpe.service", &own),
        ("calpe.socket", &own),
        ("calpe-attach@.service", &own),
        ("calpe.service", &|text: &str| text.replace("[Service]\n", "[Service]\nStateDirectory=calpe\n")),
    ];
    for (changed, change) in changes {
        let dir = tempfile::tempdir().expect("a directory");
        install(dir.path(), |name, text| if name == changed { change(text) } else { text.to_owned() });
        if let Some((_, said)) = verify(dir.path()) {
            assert!(said.contains("ordering cycle"), "{changed}: {said}");
        }
    }
}

#[test]
fn the_daemon_has_few_rights() {
    let text = unit("calpe.service");
    for line in
        ["User=calpe", "NoNewPrivileges=yes", "IPAddressDeny=any", "SystemCallFilter=~@privileged @resources"]
    {
        assert!(text.lines().any(|found| found == line), "{line}");
    }
    let dir = tempfile::tempdir().expect("a directory");
    install(dir.path(), |_, text| text.to_owned());
    let file = dir.path().join("calpe.service");
    let threshold = format!("--threshold={EXPOSURE_MAX}");
    let args = ["security", "--offline=true", &threshold, file.to_str().expect("plain")];
    if let Some((good, said)) = analyze(dir.path(), &args) {
        assert!(good, "{said}");
    }
}

/// Every drop-in is a valid piece of the unit, and the daemon starts no later with it.
#[test]
fn drop_ins_are_valid_with_the_unit() {
    let dir = tempfile::tempdir().expect("a directory");
    install(dir.path(), |_, text| text.to_owned());
    let drop_ins = dir.path().join("calpe.service.d");
    fs::create_dir(&drop_ins).expect("a folder");
    let mut count = 0;
    for entry in fs::read_dir(conf().join("systemd/calpe.service.d")).expect("drop-ins") {
        let path = entry.expect("a drop-in").path();
        let name = path.file_name().expect("a name").to_str().expect("plain");
        let installed = name.strip_suffix(".conf.example").expect("nothing is installed by a plain copy");
        let text = fs::read_to_string(&path).expect("a drop-in");
        assert!(text.contains(&format!("/etc/systemd/system/calpe.service.d/{installed}.conf")), "{name}");
        fs::write(drop_ins.join(format!("{installed}.conf")), text).expect("written");
        count += 1;
    }
    assert_eq!(count, 4, "disks, gpu, limits, network");
    let Some((good, said)) = verify(dir.path()) else { return };
    // The one program that a host without NVIDIA's driver lacks.
    let about_us = said.lines().filter(|line| !line.contains("nvidia-modprobe"));
    let about_us: Vec<&str> =
        about_us.filter(|line| line.contains("calpe") || line.contains("cycle")).collect();
    assert!(about_us.is_empty() && (good || said.contains("nvidia-modprobe")), "{said}");
}

#[test]
fn units_give_only_capabilities_that_they_explain() {
    for name in ["calpe.service", "calpe-attach@.service"] {
        let text = unit(name);
        assert!(text.contains("NoNewPrivileges=yes") && text.contains("DefaultDependencies=no"), "{name}");
        let comments: String = text.lines().filter(|line| line.starts_with('#')).collect();
        for key in ["CapabilityBoundingSet=", "AmbientCapabilities="] {
            let set = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
            assert!(!set.is_empty() || key.starts_with('A'), "{name}: no {key}");
            for capability in set.split_whitespace() {
                let short = capability.strip_prefix("CAP_").expect("a capability");
                assert!(comments.contains(&format!("{short}:")), "{name}: {capability} is not explained");
            }
        }
    }
}

#[test]
fn the_user_of_the_unit_is_made_and_owns_its_directories() {
    let read = |name: &str| fs::read_to_string(conf().join(name)).expect("a file");
    assert!(read("sysusers.d/calpe.conf").lines().any(|line| line.starts_with("u calpe ")));
    let tmpfiles = read("tmpfiles.d/calpe.conf");
    for line in ["d /var/lib/calpe 0700 calpe calpe -", "d /etc/calpe 0750 root calpe -"] {
        assert!(tmpfiles.lines().any(|found| found == line), "{line}");
    }
    let service = unit("calpe.service");
    assert!(service.contains("RuntimeDirectory=calpe\nRuntimeDirectoryMode=0700\n"));
}

#[test]
fn the_daemon_is_watched_and_started_again() {
    let text = unit("calpe.service");
    let value = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        line.unwrap_or_else(|| panic!("no {key}")).to_owned()
    };
    // An exit status is a failure; on-abnormal would leave a daemon that panicked where it is.
    assert_eq!(value("Restart"), "on-failure");
    assert_eq!((value("Type"), value("NotifyAccess")), ("notify".into(), "main".into()));
    // The reactor looks up once a second at least.
    assert!(value("WatchdogSec").parse::<u64>().expect("seconds") >= 10);
    assert!(value("TimeoutStopSec").parse::<u64>().expect("seconds") > 75, "a clean stop has its time");
}
