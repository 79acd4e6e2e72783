//! The daemon against real NBD clients: nbdinfo, nbdcopy, qemu-img, fio, healthy and with members gone.

use crate::support::load::Client;
use crate::support::serve::{Serve, array, both, create};
use crate::support::{Up, calpe, disk_image, fio_verify, run, try_run};
use calpe_core::nbd::{Command as Ask, Errno, Request};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

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
        for connections in ["--connections=1", "--connections=8"] {
            run(Command::new("nbdcopy").arg(connections).arg(&image).arg(&uri));
            run(Command::new("nbdcopy").arg(connections).arg(&uri).arg(&back));
            assert!(fs::read(&back).expect("copied") == fs::read(&image).expect("the original"), "{lost:?}");
        }
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
    let deadline = Instant::now() + Duration::from_secs(20);
    while up.status()["state"] != "DEGRADED" {
        assert!(Instant::now() < deadline, "not noticed: {}", up.status());
        std::thread::sleep(Duration::from_millis(100));
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
fn a_daemon_killed_under_load_keeps_what_was_flushed() {
    let dir = tempfile::tempdir().expect("a directory");
    // The first half is flushed data; the load is on the second half.
    let (mut up, image) =
        Up::start_with_image(dir.path(), &["--data", "4", "--parity", "2", "--size", "128MiB"], 64 << 20, 4);
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
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let mut load = load.expect("fio starts");
        std::thread::sleep(Duration::from_millis(700 + 150 * round));
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

/// nbdinfo's map of a context: (bytes, flags).
fn map(uri: &str, context: &str) -> Vec<(u64, u64)> {
    let text = run(Command::new("nbdinfo").arg("--json").arg(format!("--map={context}")).arg(uri));
    let extents: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let number = |extent: &serde_json::Value, key: &str| extent[key].as_u64().expect("a number");
    extents.as_array().expect("extents").iter().map(|e| (number(e, "length"), number(e, "type"))).collect()
}

#[test]
fn nbdinfo_lists_both_contexts_and_maps_health_as_members_come_and_go() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), &["--data", "2", "--parity", "1", "--size", "64MiB"]);
    let (uri, name, bytes) = (up.uri(), up.name(), 64u64 << 20);
    let info = run(Command::new("nbdinfo").arg("--json").arg("--list").arg(&uri));
    let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
    let contexts: Vec<&str> =
        info["exports"][0]["contexts"].as_array().expect("a list").iter().flat_map(|c| c.as_str()).collect();
    assert_eq!(contexts, ["base:allocation", "calpe:health"]);
    assert_eq!(map(&uri, "base:allocation"), [(bytes, 3)], "a new volume is a hole");
    let image = dir.path().join("disk.img");
    fs::write(&image, vec![7; 1 << 20]).expect("an image");
    run(Command::new("nbdcopy").arg(&image).arg(&uri));
    let allocated = map(&uri, "base:allocation");
    assert_eq!((allocated[0].1, allocated.last().map(|extent| extent.1)), (0, Some(3)), "{allocated:?}");

    assert_eq!(map(&uri, "calpe:health"), [(bytes, 0)], "clean");
    up.calpe(&["fail", &name, "1"]);
    assert_eq!(map(&uri, "calpe:health"), [(bytes, 1)], "degraded");
    let fresh = dir.path().join("fresh.img");
    up.calpe(&["replace", &name, "1", fresh.to_str().expect("UTF-8"), "-w"]);
    assert_eq!(map(&uri, "calpe:health"), [(bytes, 0)], "clean again");
    up.stop();
}

#[test]
fn qemu_io_writes_zeroes_discards_and_reads_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), &["--data", "2", "--parity", "1", "--size", "64MiB"]);
    // It says what it got.
    let list = run(Command::new("qemu-nbd").args(["--list", "-k"]).arg(up.socket()));
    for said in ["base:allocation", "calpe:health", "fast-zero", "min block: 512"] {
        assert!(list.contains(said), "{said}: {list}");
    }
    assert_eq!(list.contains("block-status-payload"), qemu_speaks_extended_headers(), "{list}");
    let mut command = Command::new("qemu-io");
    for line in [
        "write -P 0x5a 0 4M",
        "read -P 0x5a 0 4M",
        "write -f -P 0x33 1M 4k",
        "write -z 2M 1M",
        "write -z -u 3M 128k",
        "read -P 0 2M 1M",
        "read -P 0x33 1M 4k",
        "aio_write -P 0x44 8M 64k",
        "aio_flush",
        "read -P 0x44 8M 64k",
        "discard 8M 8M",
        "read -P 0 8M 64k",
        "flush",
    ] {
        command.args(["-c", line]);
    }
    let said = run(command.args(["-f", "raw"]).arg(up.uri()));
    assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    assert_eq!(up.scrub(), (0, 0));
    up.stop();
}

#[test]
fn the_nbd_plugin_of_nbdkit_in_between_changes_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), &["--data", "3", "--parity", "1", "--size", "64MiB"]);
    let image = dir.path().join("disk.img");
    disk_image(&image, 64 << 20, 9);
    let back = dir.path().join("back.img");
    let work = format!(
        "nbdcopy --connections=8 '{image}' \"$uri\" && nbdinfo --map \"$uri\" && nbdcopy \"$uri\" '{back}' && \
         qemu-io -f raw -c 'write -z 0 1M' -c 'read -P 0 0 1M' \"$uri\"",
        image = image.display(),
        back = back.display()
    );
    run(Command::new("nbdkit").args(["-U", "-", "nbd", &format!("uri={}", up.uri()), "--run", &work]));
    assert!(fs::read(&back).expect("copied") == fs::read(&image).expect("the original"));
    up.stop();
}

#[test]
fn a_sparse_copy_moves_data_and_no_zeroes() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), &["--data", "2", "--parity", "1", "--size", "256MiB"]);
    let mut client = Client::connect(&up.socket()).expect("connected");
    assert!(client.export().extended && client.export().structured);
    let data = vec![0x6b; 4096];
    client.call(&Request::new(Ask::Write, 100 << 20, 4096), &data).expect("a connection").expect("written");
    // 32 MiB at once, of which 4 KiB were ever written: little more comes over the socket.
    let before = client.received();
    let read = Request::new(Ask::Read, 96 << 20, 32 << 20);
    let bytes = client.call(&read, &[]).expect("a connection").expect("read");
    assert!(bytes[4 << 20..(4 << 20) + 4096] == data[..]);
    assert!(bytes[..4 << 20].iter().chain(&bytes[(4 << 20) + 4096..]).all(|&byte| byte == 0));
    let received = client.received() - before;
    assert!(received < 8192, "{received} bytes came for 4096 that were ever written");
    up.stop();
}

/// Asked for 4 GiB less one block, where one stripe was ever written to, and for a stretch of nothing but a
/// hole.
#[test]
fn one_answer_about_blocks_covers_a_hole_of_any_length() {
    let dir = tempfile::tempdir().expect("a directory");
    let up = Up::start(dir.path(), &["--data", "2", "--parity", "1", "--size", "16GiB"]);
    let program = r#"
import nbd, sys
h = nbd.NBD()
h.add_meta_context("base:allocation")
h.connect_unix(sys.argv[1])
GIB, most = 1 << 30, (1 << 32) - 4096
stripe = 128 << 10
answers = []
h.pwrite(b"x" * 4096, GIB)
for length, offset in ((most, 0), (most, 8 * GIB)):
    h.block_status(length, offset, lambda context, at, runs, error: answers.append((at, runs)))
assert answers == [(0, [GIB, 3, stripe, 0, most - GIB - stripe, 3]), (8 * GIB, [most, 3])], answers
"#;
    run(Command::new("/usr/bin/python3").arg("-c").arg(program).arg(up.socket()));
    up.stop();
}

/// qemu does from 8.2 on.
fn qemu_speaks_extended_headers() -> bool {
    let text = run(Command::new("qemu-nbd").arg("--version"));
    let version = text.split_whitespace().nth(1).expect("qemu-nbd VERSION");
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or_default());
    (numbers.next(), numbers.next()) >= (Some(8), Some(2))
}

/// A server that ends with the test.
struct Server(Child);

impl Server {
    fn start(command: &mut Command, socket: &Path) -> Server {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("the server starts");
        let deadline = Instant::now() + Duration::from_secs(60);
        while !socket.exists() {
            assert!(Instant::now() < deadline, "nobody listens on {}", socket.display());
            std::thread::sleep(Duration::from_millis(20));
        }
        Server(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn our_client_serves_itself_at_qemu_nbd_and_nbdkit() {
    let dir = tempfile::tempdir().expect("a directory");
    let image = dir.path().join("disk.img");
    // More than 4 GiB, sparse: one trim covers it only with extended headers.
    let bytes = 6u64 << 30;
    fs::File::create(&image).and_then(|file| file.set_len(bytes)).expect("an image");
    let (qemu, kit) = (dir.path().join("qemu.sock"), dir.path().join("kit.sock"));
    let _qemu = Server::start(
        Command::new("qemu-nbd")
            .args(["-f", "raw", "--persistent", "--shared=4", "--discard=unmap", "-k"])
            .args([&qemu, &image]),
        &qemu,
    );
    let _kit =
        Server::start(Command::new("nbdkit").args(["-f", "-U"]).arg(&kit).args(["memory", "6G"]), &kit);
    for (socket, extended) in [(&qemu, qemu_speaks_extended_headers()), (&kit, false)] {
        let mut client = Client::connect(socket).expect("connected");
        let export = client.export().clone();
        assert_eq!((export.size, export.extended, export.structured), (bytes, extended, true), "{export:?}");
        assert!(export.base_allocation.is_some());
        let mut call =
            |request: Request, payload: &[u8]| client.call(&request, payload).expect("a connection");
        let data: Vec<u8> = (0..1 << 20).map(|at| (at / 4096) as u8).collect();
        call(Request::new(Ask::Write, 5 << 30, 1 << 20).with_fua(), &data).expect("written");
        assert!(call(Request::new(Ask::Read, 5 << 30, 1 << 20), &[]).expect("read") == data);
        call(Request::new(Ask::BlockStatus, 0, if extended { bytes } else { 1 << 30 }), &[]).expect("told");
        let zeroes = Request::new(Ask::WriteZeroes, 5 << 30, if extended { 1 << 30 } else { 1 << 20 });
        call(zeroes, &[]).expect("zeroed");
        assert!(call(Request::new(Ask::Read, 5 << 30, 1 << 20), &[]).expect("read").iter().all(|&b| b == 0));
        if extended {
            call(Request::new(Ask::Trim, 0, bytes), &[]).expect("6 GiB trimmed at once");
        }
        call(Request::new(Ask::Flush, 0, 0), &[]).expect("flushed");
    }
    // And an error with its message.
    let sick = dir.path().join("sick.sock");
    let _sick = Server::start(
        Command::new("nbdkit").args(["-f", "-U"]).arg(&sick).args([
            "--filter=error",
            "memory",
            "1M",
            "error-pread=EIO",
            "error-pread-rate=100%",
        ]),
        &sick,
    );
    let mut client = Client::connect(&sick).expect("connected");
    let failure = client.call(&Request::new(Ask::Read, 0, 512), &[]).expect("a connection");
    assert_eq!(failure.map_err(|failure| failure.errno), Err(Errno::Io));
}

#[test]
fn a_read_only_export_serves_readers_and_refuses_writers() {
    let dir = tempfile::tempdir().expect("a directory");
    let (up, image) =
        Up::start_with_image(dir.path(), &["--data", "2", "--parity", "1", "--size", "32MiB"], 32 << 20, 5);
    let name = up.name();
    up.stop();
    let data = dir.path().join("data");
    let config = dir.path().join("calpe.toml");
    let text = format!(
        "[daemon]\nruntime_dir = {data:?}\n[[array]]\nname = {name:?}\nsearch = [{data:?}]\nread_only = true\n"
    );
    fs::write(&config, text).expect("a configuration");
    let up = Up::serve(dir.path(), &config);
    let uri = up.uri();
    let info = run(Command::new("nbdinfo").arg("--json").arg(&uri));
    let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
    let export = &info["exports"][0];
    assert_eq!((&export["is_read_only"], &export["can_trim"]), (&true.into(), &false.into()), "{export}");
    run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw"]).arg(&image).arg(&uri));
    let back = dir.path().join("back.img");
    run(Command::new("nbdcopy").arg("--connections=8").arg(&uri).arg(&back));
    assert!(fs::read(&back).expect("copied") == fs::read(&image).expect("the original"));
    assert!(!try_run(Command::new("nbdcopy").arg(&image).arg(&uri)).status.success());
    assert!(
        !try_run(Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 4k"]).arg(&uri)).status.success()
    );
    run(Command::new("qemu-io").args(["-r", "-f", "raw", "-c", "read 0 4k"]).arg(&uri));
    up.signal("TERM");
    assert!(up.ended().success());
}

/// Nothing is received from a client that waits for a place, so its end has to be looked for.
#[test]
fn who_leaves_while_it_waits_for_a_place_is_gone() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let section = format!("[listen]\nmax_connections = 1\n{}", array("tank", &[&there]));
    let mut serve = Serve::start(dir.path(), &section);
    serve.array_when("it is served", |array| array["state"] == "ONLINE");
    let mut client = Client::connect(&serve.nbd()).expect("connected");
    client.call(&Request::new(Ask::Read, 0, 4096), &[]).expect("connected").expect("read");
    let before = serve.descriptors();
    for asks in [false, true] {
        for _ in 0..5 {
            let mut waits = Client::connect(&serve.nbd()).expect("it is told of the export");
            if asks {
                waits.submit(&Request::new(Ask::Read, 0, 4096), &[]).expect("sent");
            }
        }
    }
    serve.until("they are gone", |serve| serve.descriptors() <= before);
    let told = "a client waits for a place: of 1 (max_connections in [listen]) none is free for it";
    assert_eq!(serve.log().matches(told).count(), 1, "{}", serve.log());
    serve.stop();
}

#[test]
fn tcp_clients_have_all_places_where_there_is_no_unix_socket() {
    let dir = tempfile::tempdir().expect("a directory");
    create(dir.path(), "tank", 2, 1);
    let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound").port();
    let listen = format!("[listen]\ntcp = \"127.0.0.1:{port}\"\nmax_connections = 2\n");
    let mut serve = Serve::start(dir.path(), &(listen + &array("tank", &[dir.path()])));
    serve.array_when("it is served", |array| array["state"] == "ONLINE");
    let config = dir.path().join("calpe.toml");
    let told = both(&try_run(calpe().arg("serve").arg("--check").arg("--config").arg(config)));
    assert!(told.contains("valid") && !told.contains("unix socket"), "{told}");
    let mut clients = Vec::new();
    for _ in 0..2 {
        let mut client = TcpStream::connect(("127.0.0.1", port)).expect("connected");
        client.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        // Without zeroes at the end; then "tank" by its name, which is answered when there is a place.
        client.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x04tank").expect("sent");
        client.read_exact(&mut [0; 18 + 10]).expect("a greeting and an export");
        // A flush, which is answered to one that has a place.
        client
            .write_all(b"\x25\x60\x95\x13\0\0\0\x03\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\0")
            .expect("sent");
        client.read_exact(&mut [0; 16]).expect("a reply");
        clients.push(client);
    }
    drop(clients);
    serve.stop();
}
