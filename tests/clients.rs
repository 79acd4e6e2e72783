//! The daemon against real NBD clients: nbdinfo, nbdcopy, qemu-img, fio, healthy and with members gone.

mod support;

use std::fs;
use std::process::Command;
use support::{Up, calpe, disk_image, fio_verify, run, try_run};

#[test]
fn clients_copy_compare_and_verify_healthy_and_with_three_members_gone() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), &["--data", "4", "--parity", "3", "--size", "256MiB"]);
    let uri = up.uri();
    assert_eq!(run(Command::new("nbdinfo").arg("--size").arg(&uri)).trim(), (256u64 << 20).to_string());
    let info = run(Command::new("nbdinfo").arg("--json").arg(&uri));
    let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
    let export = &info["exports"][0];
    for flag in ["can_flush", "can_fua", "can_trim", "can_zero", "can_multi_conn", "can_df"] {
        assert_eq!(export[flag], true, "{flag}: {export}");
    }
    assert_eq!(export["is_read_only"], false);
    let map = run(Command::new("nbdinfo").arg("--map").arg(&uri));
    assert!(map.contains("hole,zero"), "a new volume is sparse: {map}");

    let image = dir.path().join("disk.img");
    disk_image(&image, 256 << 20, 1);
    let qcow2 = dir.path().join("disk.qcow2");
    run(Command::new("qemu-img").args(["convert", "-O", "qcow2"]).arg(&image).arg(&qcow2));
    for lost in [&[][..], &["0", "3", "6"], &["1", "2", "5"]] {
        let name = up.name();
        for member in lost {
            up.calpe(&["fail", &name, member]);
        }
        assert_eq!(up.status()["state"], if lost.is_empty() { "ONLINE" } else { "DEGRADED" });
        // A qcow2 image to the volume and back.
        run(Command::new("qemu-img").args(["convert", "-n", "-O", "raw"]).arg(&qcow2).arg(&uri));
        run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw"]).arg(&image).arg(&uri));
        // nbdcopy both ways.
        let back = dir.path().join("back.img");
        run(Command::new("nbdcopy").arg(&uri).arg(&back));
        assert!(fs::read(&back).expect("copied") == fs::read(&image).expect("the original"), "{lost:?}");
        run(Command::new("nbdcopy").arg("--connections=4").arg(&image).arg(&uri));
        fio_verify(&uri, 64, lost.len() as u64);
        for member in lost {
            let fresh = dir.path().join(format!("fresh-{}-{member}.img", lost.concat()));
            up.calpe(&["replace", &name, member, fresh.to_str().expect("UTF-8"), "-w"]);
        }
        assert_eq!(up.status()["state"], "ONLINE");
        assert_eq!(up.scrub(), (0, 0));
    }
    up.stop();
}

#[test]
fn a_second_up_finds_everything_again_also_with_files_deleted() {
    let dir = tempfile::tempdir().expect("a directory");
    let image = dir.path().join("disk.img");
    disk_image(&image, 32 << 20, 2);
    let up = Up::start(dir.path(), &["--data", "3", "--parity", "2", "--size", "32MiB"]);
    run(Command::new("nbdcopy").arg(&image).arg(up.uri()));
    let (first, second) = (up.member(0), up.member(3));
    up.stop();

    let up = Up::start(dir.path(), &[]);
    run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw"]).arg(&image).arg(up.uri()));
    up.stop();

    fs::remove_file(&first).expect("removed");
    fs::remove_file(&second).expect("removed");
    let up = Up::start(dir.path(), &[]);
    assert_eq!(up.status()["state"], "DEGRADED");
    assert_eq!(try_run(&mut up.command(&["status", "--test"])).status.code(), Some(1));
    run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw"]).arg(&image).arg(up.uri()));
    let name = up.name();
    for (member, path) in [("0", &first), ("3", &second)] {
        up.calpe(&["replace", &name, member, path.to_str().expect("UTF-8"), "-w"]);
    }
    assert_eq!(up.status()["state"], "ONLINE");
    assert_eq!(try_run(&mut up.command(&["status", "--test"])).status.code(), Some(0));
    assert_eq!(up.scrub(), (0, 0));
    up.stop();
}

#[test]
fn a_file_that_is_deleted_under_the_daemon_is_noticed() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), &["--data", "2", "--parity", "1", "--size", "16MiB"]);
    fs::remove_file(up.member(1)).expect("removed");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while up.status()["state"] != "DEGRADED" {
        assert!(std::time::Instant::now() < deadline, "not noticed: {}", up.status());
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert_eq!(up.status()["members"][1]["state"], "MISSING");
    fio_verify(&up.uri(), 8, 3);
    up.stop();
}

#[test]
fn too_few_members_are_refused_and_named_and_nothing_is_changed() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), &["--data", "2", "--parity", "1", "--size", "16MiB"]);
    let (first, second) = (up.member(0), up.member(2));
    up.stop();
    let away = dir.path().join("away");
    fs::create_dir(&away).expect("a directory");
    for path in [&first, &second] {
        fs::rename(path, away.join(path.file_name().expect("a name"))).expect("moved");
    }
    let output = try_run(calpe().arg("up").arg("--dir").arg(dir.path().join("data")));
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("member 0") && message.contains("member 2"), "{message}");
    for path in [&first, &second] {
        fs::rename(away.join(path.file_name().expect("a name")), path).expect("moved back");
    }
    let up = Up::start(dir.path(), &[]);
    assert_eq!(up.status()["state"], "ONLINE");
    up.stop();
}

#[test]
fn a_daemon_killed_under_load_keeps_what_was_flushed_and_resyncs() {
    let dir = tempfile::tempdir().expect("a directory");
    let image = dir.path().join("disk.img");
    disk_image(&image, 64 << 20, 4);
    let mut up = Up::start(dir.path(), &["--data", "4", "--parity", "2", "--size", "128MiB"]);
    // The first half is flushed data; the load is on the second half.
    run(Command::new("nbdcopy").arg("--flush").arg(&image).arg(up.uri()));
    for round in 0..5 {
        let load = Command::new("fio")
            .args([
                "--name=load",
                "--ioengine=nbd",
                &format!("--uri={}", up.uri()),
                "--rw=randwrite",
                "--bsrange=4k-256k",
            ])
            .args([
                "--iodepth=16",
                "--offset=64M",
                "--size=64M",
                "--time_based",
                "--runtime=30",
                "--verify_state_save=0",
                "--fsync=32",
            ])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn();
        let mut load = load.expect("fio starts");
        std::thread::sleep(std::time::Duration::from_millis(700 + 150 * round));
        up.kill();
        load.kill().expect("killed");
        load.wait().expect("reaped");
        up = Up::start(dir.path(), &[]);
        run(Command::new("qemu-img")
            .args(["compare", "--image-opts"])
            .arg(format!("driver=raw,file.driver=file,file.filename={}", image.display()))
            .arg(format!(
                "driver=raw,size={},file.driver=nbd,file.server.type=unix,file.server.path={}",
                64 << 20,
                up.socket().display()
            )));
        up.wait_quiet();
        assert_eq!(up.scrub(), (0, 0), "round {round}");
    }
    up.stop();
}
