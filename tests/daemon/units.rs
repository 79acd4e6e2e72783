//! The systemd units of conf/: valid, and without a circle among what is started at boot. Needs systemd-analyze; where it is not installed,
//! only the text is looked at.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

fn conf() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("conf")
}

/// A folder with the units as they would be installed, an instance of the template, and a filesystem on its device.
fn install(dir: &Path, change: impl Fn(&str) -> String) {
    for name in ["calpe.service", "calpe-attach@.service"] {
        let text = fs::read_to_string(conf().join("systemd").join(name)).expect("a unit");
        // The program need not be installed here.
        fs::write(dir.join(name), change(&text.replace("=/usr/bin/calpe", "=/bin/true"))).expect("written");
    }
    let mount = "[Unit]\nRequires=calpe-attach@nbd0.service\nAfter=calpe-attach@nbd0.service\n\
                 Before=local-fs.target\n[Mount]\nWhat=/dev/calpe/tank\nWhere=/srv\nType=xfs\n";
    fs::write(dir.join("srv.mount"), mount).expect("written");
    for (target, unit, file) in [
        ("local-fs.target.requires", "srv.mount", "srv.mount"),
        ("multi-user.target.wants", "calpe.service", "calpe.service"),
        ("multi-user.target.wants", "calpe-attach@nbd0.service", "calpe-attach@.service"),
    ] {
        fs::create_dir_all(dir.join(target)).expect("a folder");
        symlink(dir.join(file), dir.join(target).join(unit)).expect("a link");
    }
}

/// What systemd has to say about booting with them; none where it cannot be asked.
fn verify(dir: &Path) -> Option<(bool, String)> {
    let output = Command::new("systemd-analyze")
        .args(["verify", "multi-user.target"])
        .env("SYSTEMD_UNIT_PATH", format!("{}:", dir.display()))
        .output()
        .ok()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Some((output.status.success(), said))
}

#[test]
fn units_are_valid_and_boot_has_no_circle() {
    let dir = tempfile::tempdir().expect("a directory");
    install(dir.path(), str::to_owned);
    let Some((good, said)) = verify(dir.path()) else {
        eprintln!("systemd-analyze is not installed: not verified");
        return;
    };
    let about_us: Vec<&str> =
        said.lines().filter(|line| line.contains("calpe") || line.contains("cycle")).collect();
    assert!(good && about_us.is_empty(), "{said}");
}

#[test]
fn a_circle_would_be_found() {
    let dir = tempfile::tempdir().expect("a directory");
    install(dir.path(), |text| text.replace("DefaultDependencies=no\n", ""));
    if let Some((_, said)) = verify(dir.path()) {
        assert!(said.contains("ordering cycle"), "{said}");
    }
}

#[test]
fn units_give_only_capabilities_that_they_explain() {
    for name in ["calpe.service", "calpe-attach@.service"] {
        let text = fs::read_to_string(conf().join("systemd").join(name)).expect("a unit");
        assert!(text.contains("NoNewPrivileges=yes") && text.contains("DefaultDependencies=no"), "{name}");
        let set = text.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).expect("a set");
        let comments: String = text.lines().filter(|line| line.starts_with('#')).collect();
        for capability in set.split_whitespace() {
            let short = capability.strip_prefix("CAP_").expect("a capability");
            assert!(comments.contains(short), "{name}: {capability} is not explained");
        }
    }
}

#[test]
fn the_daemon_is_watched_and_started_again() {
    let text = fs::read_to_string(conf().join("systemd/calpe.service")).expect("a unit");
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
