//! TLS and socket activation with real clients and servers: libnbd and qemu (GnuTLS) against our server, our
//! client against nbdkit, and clients that are strangers, liars or silent. What is checked: who gets in, what
//! the others get, and that everybody else is served meanwhile.

use crate::support::pki::{Ca, Identity};
use crate::support::{Up, calpe, disk_image, run, signal, try_run};
use calpe::tls::{ClientFiles, ClientTls, Pumps};
use calpe_core::nbd::{ClientConnection, ClientEvent, ClientOptions, Command as Nbd, Request};
use calpe_core::units::Timestamp;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest that anything may take; only a hang gets there.
const PATIENCE: Duration = Duration::from_secs(60);

const VOLUME: usize = 32 << 20;

const STARTTLS: &[u8] = b"IHAVEOPT\0\0\0\x05\0\0\0\0";
const LIST: &[u8] = b"IHAVEOPT\0\0\0\x03\0\0\0\0";
const ERR_TLS_REQD: u32 = 1 << 31 | 5;

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound").port()
}

/// A daemon with a certificate, an array `tank`, and clients' certificates.
pub(crate) struct World {
    pub dir: tempfile::TempDir,
    pub ca: Ca,
    pub server: Identity,
    pub port: u16,
}

impl World {
    pub(crate) fn new() -> World {
        let dir = tempfile::tempdir().expect("a folder");
        let ca = Ca::new(&dir.path().join("pki"));
        let server = ca.issue("server", 1);
        let mut create = calpe();
        create.args(["create", "tank", "--data", "2", "--parity", "1", "--size", "32MiB"]);
        for member in 0..3 {
            create.arg(dir.path().join(format!("m{member}")));
        }
        for member in 0..3 {
            let file = fs::File::create(dir.path().join(format!("m{member}"))).expect("a file");
            file.set_len(256 << 20).expect("sparse");
        }
        run(&mut create);
        World { dir, ca, server, port: free_port() }
    }

    /// Writes the configuration, with more lines for `[listen]`.
    pub(crate) fn config(&self, listen: &str) -> PathBuf {
        let dir = self.dir.path();
        let config = dir.join("calpe.toml");
        let text = format!(
            "[daemon]\nruntime_dir = {:?}\n[listen]\nunix = {:?}\ntls_certificate = {:?}\ntls_key = {:?}\ntls_client_ca = {:?}\n{listen}\n[[array]]\nname = \"tank\"\nsearch = [{dir:?}]\n",
            dir.join("data"),
            dir.join("data/nbd.sock"),
            self.server.certificate,
            self.server.key,
            self.ca.certificate(),
        );
        fs::write(&config, text).expect("a configuration");
        config
    }

    pub(crate) fn serve(&self, more: &str) -> Up {
        let listen = format!("tcp = \"127.0.0.1:{}\"\n{more}", self.port);
        Up::serve(self.dir.path(), &self.config(&listen))
    }

    /// A folder of a client as libnbd and qemu want it.
    pub(crate) fn client_dir(&self, name: &str, ca: &Path, identity: Option<&Identity>) -> PathBuf {
        let dir = self.dir.path().join(name);
        fs::create_dir_all(&dir).expect("a folder");
        fs::copy(ca, dir.join("ca-cert.pem")).expect("copied");
        if let Some(identity) = identity {
            fs::copy(&identity.certificate, dir.join("client-cert.pem")).expect("copied");
            fs::copy(&identity.key, dir.join("client-key.pem")).expect("copied");
        }
        dir
    }

    /// A client that is welcome.
    pub(crate) fn friend(&self) -> PathBuf {
        self.client_dir("friend", &self.ca.certificate(), Some(&self.ca.issue("friend", 10)))
    }

    pub(crate) fn uri(&self, client: &Path) -> String {
        format!("nbds://localhost:{}/tank?tls-certificates={}", self.port, client.display())
    }

    pub(crate) fn size_over(&self, client: &Path) -> Result<String, String> {
        let output = try_run(Command::new("nbdinfo").arg("--size").arg(self.uri(client)));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    #[track_caller]
    pub(crate) fn welcome(&self, client: &Path) {
        assert_eq!(self.size_over(client), Ok(VOLUME.to_string()));
    }

    /// A raw connection past the greeting and the flags.
    fn raw(&self) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("connected");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("a greeting");
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        stream.write_all(&3u32.to_be_bytes()).expect("flags");
        stream
    }
}

/// (option, kind) of the next option reply.
fn option_reply(stream: &mut TcpStream) -> (u32, u32) {
    let mut head = [0; 20];
    stream.read_exact(&mut head).expect("an option reply");
    let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes"));
    let mut data = vec![0; number(16) as usize];
    stream.read_exact(&mut data).expect("its data");
    (number(8), number(12))
}

/// Everything until the other end closes.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // Reset or closed: it is over.
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

/// A child that is ended with its scope.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !reached() {
        assert!(Instant::now() < deadline, "not reached: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn libnbd_and_qemu_copy_and_compare_over_tls() {
    let world = World::new();
    let up = world.serve("");
    let friend = world.friend();
    world.welcome(&friend);
    let status = up.status();
    let uris: Vec<&str> =
        status["uris"].as_array().expect("a list").iter().filter_map(|u| u.as_str()).collect();
    assert!(uris.iter().any(|uri| uri.starts_with("nbds://127.0.0.1:")), "{uris:?}");
    assert!(uris.iter().any(|uri| uri.starts_with("nbd+unix:///tank?")), "{uris:?}");

    let image = world.dir.path().join("disk.img");
    disk_image(&image, VOLUME, 5);
    run(Command::new("nbdcopy").arg("--connections=4").arg(&image).arg(world.uri(&friend)));
    let back = world.dir.path().join("back.img");
    run(Command::new("nbdcopy").arg(world.uri(&friend)).arg(&back));
    assert!(fs::read(&back).expect("copied") == fs::read(&image).expect("the original"));
    // The same bytes in the clear, where the configuration has it.
    run(Command::new("nbdcopy").arg(up.uri()).arg(&back));
    assert!(fs::read(&back).expect("copied") == fs::read(&image).expect("the original"));
    // And by TLS over the unix socket.
    let unix =
        format!("nbds+unix:///tank?socket={}&tls-certificates={}", up.socket().display(), friend.display());
    assert_eq!(run(Command::new("nbdinfo").arg("--size").arg(&unix)).trim(), VOLUME.to_string());

    let creds = format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", friend.display());
    let export = format!(
        "driver=nbd,server.type=inet,server.host=localhost,server.port={},export=tank,tls-creds=tls0",
        world.port
    );
    let local = format!("driver=file,filename={}", image.display());
    run(Command::new("qemu-img").args(["compare", "--object", &creds, "--image-opts", &local, &export]));
    let mut io = Command::new("qemu-io");
    io.args(["--object", &creds, "--image-opts", &export]);
    run(io.args([
        "-c",
        "write -P 0x5a 1M 2M",
        "-c",
        "flush",
        "-c",
        "read -P 0x5a 1M 2M",
        "-c",
        "discard 8M 1M",
    ]));
    run(Command::new("qemu-img").args(["info", "--object", &creds, "--image-opts", &export]));
    assert_eq!(up.scrub(), (0, 0));
    up.stop();
}

#[test]
fn what_has_expired_is_told_by_a_check_and_only_its_own_clients_are_refused() {
    let world = World::new();
    let old = Ca::new_until(&world.dir.path().join("old"), 2021);
    let both = world.dir.path().join("both.pem");
    let pem = |ca: &Ca| fs::read_to_string(ca.certificate()).expect("a certificate");
    let check = |bundle: String| {
        fs::write(&both, bundle).expect("written");
        let config = world.config(&format!("tcp = \"127.0.0.1:{}\"", world.port));
        let own = format!("tls_client_ca = {:?}", world.ca.certificate());
        let text = fs::read_to_string(&config).expect("a configuration");
        fs::write(&config, text.replace(&own, &format!("tls_client_ca = {both:?}"))).expect("written");
        let output = try_run(calpe().args(["serve", "--check", "--config"]).arg(&config));
        assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains(": valid"));
        (config, String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(check(pem(&world.ca)).1, "");
    let (_, told) = check(pem(&old));
    assert!(
        told.contains("warning: the CA of the clients") && told.contains("no client is let in"),
        "{told}"
    );
    let (config, told) = check(pem(&old) + &pem(&world.ca));
    let few = "clients with certificates that only it has signed are not let in";
    assert!(told.contains("both.pem") && told.contains("expired") && told.contains(few), "{told}");
    let up = Up::serve(world.dir.path(), &config);
    assert!(up.log().contains(few) && !up.log().contains("no client is let in"), "{}", up.log());
    world.welcome(&world.friend());
    let late = world.client_dir("late", &world.ca.certificate(), Some(&old.issue("late", 12)));
    world.size_over(&late).expect_err("its CA has expired");
    until("the refusal is told", || {
        up.log().lines().any(|line| line.contains("was refused") && line.contains("expired"))
    });
    // A file of the daemon's own certificate whose intermediate has expired.
    let own = fs::read_to_string(&world.server.certificate).expect("a certificate");
    fs::write(&world.server.certificate, own + &pem(&old)).expect("written");
    let (_, told) = check(pem(&world.ca));
    assert!(told.contains("server-cert.pem) expired") && told.contains("clients refuse it"), "{told}");
    up.stop();
}

#[test]
fn strangers_are_refused_and_friends_are_served() {
    let world = World::new();
    let crl = world.ca.revoke(&[13]);
    let up = world.serve(&format!("tls_crl = {crl:?}"));
    let friend = world.friend();
    let ca = world.ca.certificate();
    let elsewhere = Ca::new(&world.dir.path().join("elsewhere"));
    let strangers = [
        ("no certificate", world.client_dir("none", &ca, None), "no certificates"),
        (
            "another CA",
            world.client_dir("other", &ca, Some(&elsewhere.issue("x", 11))),
            "no certificates|UnknownIssuer",
        ),
        ("expired", world.client_dir("late", &ca, Some(&world.ca.issue_until("late", 12, 2021))), "expired"),
        ("revoked", world.client_dir("gone", &ca, Some(&world.ca.issue("gone", 13))), "Revoked"),
    ];
    for (number, (what, dir, reasons)) in strangers.iter().enumerate() {
        let error = world.size_over(dir).expect_err(what);
        assert!(!error.is_empty());
        let refusals = || {
            let log = up.log();
            log.lines().filter(|line| line.contains("was refused")).map(str::to_owned).collect::<Vec<_>>()
        };
        until(what, || refusals().len() == number + 1);
        let last = refusals().pop().unwrap_or_default();
        // A client may see by itself that no certificate of its own will do.
        assert!(reasons.split('|').any(|reason| last.contains(reason)), "{what}: {last}");
        world.welcome(&friend);
    }
    // A client that does not trust this server says nothing to it.
    let distrusting = world.client_dir("wary", &elsewhere.certificate(), None);
    let error = world.size_over(&distrusting).expect_err("an unknown CA");
    assert!(error.contains("certificate"), "{error}");
    // No TLS, no export: neither told nor given.
    let plain = format!("nbd://localhost:{}/tank", world.port);
    let output = try_run(Command::new("nbdinfo").arg(&plain));
    assert!(!output.status.success());
    assert!(!String::from_utf8_lossy(&output.stdout).contains("export-size"));
    world.welcome(&friend);

    // The list is read again on SIGHUP; a friend of before is one no more.
    world.ca.revoke(&[10, 13]);
    world.welcome(&friend);
    up.signal("HUP");
    until("the files are read again", || up.log().contains("the files of TLS again"));
    let error = world.size_over(&friend).expect_err("revoked");
    assert!(!error.is_empty());
    // A file that is no use changes nothing, and is reported.
    fs::write(&world.server.certificate, "nothing").expect("written");
    world.ca.revoke(&[]);
    up.signal("HUP");
    until("the report", || up.log().contains("server-cert.pem: holds no certificate"));
    world.size_over(&friend).expect_err("still revoked");
    assert_eq!(up.status()["state"], "ONLINE");
    up.stop();
}

#[test]
fn nothing_said_in_the_clear_counts_and_attackers_cost_only_themselves() {
    let world = World::new();
    let up = world.serve("");
    let friend = world.friend();
    let mut stream = world.raw();
    stream.write_all(LIST).expect("sent");
    assert_eq!(option_reply(&mut stream), (3, ERR_TLS_REQD));
    // EXPORT_NAME has no error reply.
    stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\x04tank").expect("sent");
    assert_eq!(rest(&mut stream), b"");
    // Options behind STARTTLS in the same segment: not answered, neither now nor under TLS.
    let mut stream = world.raw();
    stream.write_all(&[STARTTLS, LIST].concat()).expect("sent");
    assert_eq!(rest(&mut stream), b"");
    // In a segment of their own they are for TLS, which they are not.
    let mut stream = world.raw();
    stream.write_all(STARTTLS).expect("sent");
    assert_eq!(option_reply(&mut stream), (5, 1));
    stream.write_all(LIST).expect("sent");
    let answer = rest(&mut stream);
    assert!(!answer.windows(4).any(|window| window == b"tank"), "{answer:?}");
    // 100 KiB of garbage in place of a ClientHello.
    for byte in [0x00, 0x16, 0xff] {
        let mut stream = world.raw();
        stream.write_all(STARTTLS).expect("sent");
        assert_eq!(option_reply(&mut stream), (5, 1));
        let _ = stream.write_all(&vec![byte; 100 << 10]);
        assert!(rest(&mut stream).len() < 100);
    }
    world.welcome(&friend);

    // Handshakes that never end: all are closed, and meanwhile others are served.
    let begun = Instant::now();
    let mut stalled: Vec<TcpStream> = (0..40)
        .map(|index| {
            let mut stream = world.raw();
            stream.write_all(STARTTLS).expect("sent");
            assert_eq!(option_reply(&mut stream), (5, 1));
            if index % 2 == 0 {
                // A ClientHello that is announced and does not come.
                stream.write_all(&[0x16, 3, 1, 2, 0, 1, 0]).expect("sent");
            }
            stream
        })
        .collect();
    world.welcome(&friend);
    for stream in &mut stalled {
        assert_eq!(rest(stream), b"");
    }
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    let pumps = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", up.pid())).expect("threads");
        let name =
            |task: std::io::Result<fs::DirEntry>| fs::read_to_string(task.ok()?.path().join("comm")).ok();
        tasks.filter_map(name).filter(|name| name.starts_with("tls-")).count()
    };
    until("their threads end", || pumps() == 0);
    world.welcome(&friend);
    up.stop();
}

#[test]
fn a_daemon_that_stops_under_tls_load_stops_cleanly_and_in_time() {
    let world = World::new();
    let up = world.serve("");
    let friend = world.friend();
    let load = Command::new("fio")
        .args(["--name=load", "--ioengine=nbd", &format!("--uri={}", world.uri(&friend)), "--rw=randwrite"])
        .args(["--bsrange=4k-256k", "--iodepth=16", "--size=16M", "--time_based", "--runtime=30"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let load = Running(load.expect("fio starts"));
    std::thread::sleep(Duration::from_secs(2));
    let begun = Instant::now();
    up.stop();
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    drop(load);
    let up = world.serve("");
    assert_eq!(up.status()["state"], "ONLINE");
    up.wait_quiet();
    assert_eq!(up.scrub(), (0, 0));
    up.stop();
}

/// A driver of our client half over a stream, as simple as can be.
struct Client {
    stream: UnixStream,
    connection: ClientConnection,
    out: Vec<u8>,
}

impl Client {
    /// Sends what there is, and receives until an event comes that is not payload; payload is appended to
    /// `data`.
    fn next(&mut self, data: &mut Vec<u8>) -> ClientEvent {
        loop {
            match self.connection.poll_event() {
                Some(ClientEvent::Data { length, .. }) => {
                    let mut payload = vec![0; length as usize];
                    self.stream.read_exact(&mut payload).expect("payload");
                    data.extend(payload);
                    self.connection.payload_taken().expect("sound");
                    continue;
                }
                Some(event) => return event,
                None => {}
            }
            self.stream.write_all(&std::mem::take(&mut self.out)).expect("sent");
            // A byte at a time: nothing behind an event is taken with it.
            let mut byte = [0];
            self.stream.read_exact(&mut byte).expect("more");
            self.connection.receive(&byte, &mut self.out).expect("a sound server");
        }
    }
}

#[test]
fn our_client_half_speaks_tls_with_nbdkit() {
    let dir = tempfile::tempdir().expect("a folder");
    let ca = Ca::new(dir.path());
    ca.issue("server", 1);
    let own = ca.issue("client", 2);
    let socket = dir.path().join("nbdkit.sock");
    let serve = |extra: &[&str]| {
        let _ = fs::remove_file(&socket);
        let mut command = Command::new("nbdkit");
        command.args(["-f", "--tls=require", "--tls-verify-peer"]).args(extra);
        command.arg(format!("--tls-certificates={}", dir.path().display()));
        command.arg("-U").arg(&socket).args(["memory", "8M"]).stderr(Stdio::null());
        let running = Running(command.spawn().expect("nbdkit starts"));
        until("nbdkit listens", || UnixStream::connect(&socket).is_ok());
        running
    };
    let connect = |identity: Option<&Identity>| {
        let files = ClientFiles {
            ca: ca.certificate(),
            identity: identity.map(|own| (own.certificate.clone(), own.key.clone())),
            server_name: None,
        };
        let tls = ClientTls::load(&files).expect("sound files");
        let stream = UnixStream::connect(&socket).expect("connected");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let options = ClientOptions { tls: true, ..ClientOptions::for_export("").expect("a name") };
        let connection = ClientConnection::new(options, Timestamp(0)).expect("a name");
        let mut client = Client { stream, connection, out: Vec::new() };
        assert_eq!(client.next(&mut Vec::new()), ClientEvent::StartTls);
        let Client { stream, mut connection, mut out } = client;
        let pumps = Pumps::default();
        let tunnel = pumps.connect(stream.into(), &tls, "localhost").expect("a pump");
        connection.tls_started(&mut out);
        let stream = UnixStream::from(tunnel.socket.try_clone().expect("a descriptor"));
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        (Client { stream, connection, out }, tunnel, pumps)
    };
    let running = serve(&[]);
    let (mut client, tunnel, pumps) = connect(Some(&own));
    assert_eq!(client.next(&mut Vec::new()), ClientEvent::Ready);
    assert_eq!(client.connection.export().map(|export| export.size), Some(8 << 20));
    let bytes: Vec<u8> = (0..1u32 << 20).map(|at| (at % 251) as u8).collect();
    let cookie = client.connection.submit(&Request::new(Nbd::Write, 4096, 1 << 20), &mut client.out);
    let cookie = cookie.expect("a sound request");
    client.out.extend_from_slice(&bytes);
    assert_eq!(client.next(&mut Vec::new()), ClientEvent::Done { cookie, result: Ok(()) });
    let cookie = client.connection.submit(&Request::new(Nbd::Read, 4096, 1 << 20), &mut client.out);
    let cookie = cookie.expect("a sound request");
    let mut back = Vec::new();
    assert_eq!(client.next(&mut back), ClientEvent::Done { cookie, result: Ok(()) });
    assert!(back == bytes);
    client.connection.disconnect(&mut client.out);
    client.stream.write_all(&client.out).expect("goodbye");
    drop((client, tunnel));
    assert!(pumps.wait(PATIENCE));

    // Without a certificate, nbdkit ends it, and we know why.
    let (mut client, tunnel, pumps) = connect(None);
    let _ = client.stream.write_all(&client.out);
    let mut seen = Vec::new();
    let _ = client.stream.read_to_end(&mut seen);
    assert_eq!(seen, b"");
    assert!(pumps.wait(PATIENCE));
    assert!(tunnel.failure().is_some());
    drop(running);
}

#[test]
fn problems_of_files_name_line_key_and_file() {
    let world = World::new();
    let check = |config: &Path| {
        let output = try_run(calpe().args(["serve", "--check", "--config"]).arg(config));
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = check(&world.config("tcp = \"0.0.0.0:10809\""));
    assert_eq!((code, said.as_str()), (Some(0), ""), "TLS with client certificates may go anywhere");
    let (code, said) = check(&world.config("tcp = \"0.0.0.0:10809\"\ntls = \"optional\""));
    assert!(code == Some(1) && said.contains("listen.tcp") && said.contains("not a loopback"), "{said}");
    let (_, said) = check(&world.config("tls_crl = \"pki/ca-cert.pem\""));
    assert!(
        said.contains(".toml:8:") && said.contains("listen.tls_crl") && said.contains("holds no"),
        "{said}"
    );
    run(Command::new("chmod").arg("644").arg(&world.server.key));
    let (code, said) = check(&world.config(""));
    assert!(code == Some(1) && said.contains(".toml:6:") && said.contains("mode 0644"), "{said}");
}

#[test]
fn a_check_of_the_configuration_tells_every_file_that_cannot_be_used() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("calpe.toml");
    let own = "tls_certificate = \"cert.pem\"\ntls_key = \"key.pem\"\n";
    let listen = format!("[listen]\n{own}tls_client_ca = \"ca.pem\"\ntls_crl = \"crl.pem\"\n");
    let remote = format!("[remote]\n{own}tls_ca = \"remote-ca.pem\"\n");
    fs::write(&config, format!("{listen}{remote}")).unwrap();
    let output = try_run(calpe().args(["serve", "--check", "--config"]).arg(&config));
    let said = String::from_utf8_lossy(&output.stderr);
    for (line, key) in [
        (2, "listen.tls_certificate"),
        (3, "listen.tls_key"),
        (4, "listen.tls_client_ca"),
        (5, "listen.tls_crl"),
        (7, "remote.tls_certificate"),
        (8, "remote.tls_key"),
        (9, "remote.tls_ca"),
    ] {
        let told = said.lines().filter(|told| told.contains(&format!(".toml:{line}:")));
        let told: Vec<&str> = told.filter(|told| told.contains(&format!(" {key}: "))).collect();
        assert!(told.len() == 1 && told[0].contains("cannot be read"), "{key}: {said}");
    }
}

#[test]
fn sockets_of_a_supervisor_are_served_in_place_of_our_own() {
    let world = World::new();
    let config = world.config("");
    let socket = world.dir.path().join("activated.sock");
    let mut command = Command::new("systemd-socket-activate");
    command.arg("-l").arg(&socket).arg("-l").arg(format!("127.0.0.1:{}", world.port));
    command.arg(env!("CARGO_BIN_EXE_calpe")).arg("serve").arg("--config").arg(&config);
    let log = fs::File::create(world.dir.path().join("activated.log")).expect("a log");
    let mut supervisor = Running(command.stderr(log).spawn().expect("systemd-socket-activate starts"));
    until("the supervisor listens", || socket.exists());
    let said = || fs::read_to_string(world.dir.path().join("activated.log")).unwrap_or_default();
    // The first connection starts the daemon, and is answered when the array is there.
    let plain = format!("nbd+unix:///tank?socket={}", socket.display());
    let output = try_run(Command::new("nbdinfo").arg("--size").arg(&plain));
    assert!(output.status.success(), "{}", said());
    world.welcome(&world.friend());
    assert!(!world.dir.path().join("data/nbd.sock").exists(), "its own socket is not bound");
    signal(&supervisor.0, "TERM");
    assert!(supervisor.0.wait().expect("ours").success(), "{}", said());
    assert!(socket.exists(), "the socket's file is the supervisor's");

    // Clients that start their server themselves do it in the same way.
    let binary = env!("CARGO_BIN_EXE_calpe");
    let config = config.to_str().expect("UTF-8");
    let server = ["[", binary, "serve", "--config", config, "]"];
    let size = run(Command::new("nbdinfo").args(["--size", "--"]).args(server));
    assert_eq!(size.trim(), VOLUME.to_string());
    let image = world.dir.path().join("disk.img");
    disk_image(&image, VOLUME, 9);
    run(Command::new("nbdcopy").args(["--flush", "--"]).arg(&image).args(server));
    let back = world.dir.path().join("back.img");
    run(Command::new("nbdcopy").arg("--").args(server).arg(&back));
    assert!(fs::read(&back).expect("copied") == fs::read(&image).expect("the original"));
}

/// The supervisor keeps the socket over a restart: clients that come in between wait for the next daemon.
#[test]
fn a_socket_of_a_supervisor_serves_the_next_daemon_too() {
    let world = World::new();
    let config = world.config("");
    let socket = world.dir.path().join("kept.sock");
    let kept = UnixListener::bind(&socket).expect("a socket");
    let uri = format!("nbd+unix:///tank?socket={}", socket.display());
    for _ in 0..2 {
        let mut command = Command::new("sh");
        let pass = "exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$@\"";
        command.args(["-c", pass, "sh", env!("CARGO_BIN_EXE_calpe"), "serve", "--config"]).arg(&config);
        command.stdin(OwnedFd::from(kept.try_clone().expect("a descriptor"))).stderr(Stdio::null());
        let mut daemon = Running(command.spawn().expect("the daemon starts"));
        // Waits in the socket for the daemon.
        let size = run(Command::new("nbdinfo").arg("--size").arg(&uri));
        assert_eq!(size.trim(), VOLUME.to_string());
        signal(&daemon.0, "TERM");
        assert!(daemon.0.wait().expect("ours").success());
    }
}

#[test]
fn sockets_that_cannot_or_must_not_be_served_are_refused() {
    let world = World::new();
    let refused = |listen: &[&str], more: &str, connect: &dyn Fn(), want: &str| {
        let log = world.dir.path().join("refused.log");
        let mut command = Command::new("systemd-socket-activate");
        command.args(listen).arg(env!("CARGO_BIN_EXE_calpe")).arg("serve");
        command.arg("--config").arg(world.config(more));
        let child = command.stderr(fs::File::create(&log).expect("a log")).spawn();
        let mut child = Running(child.expect("systemd-socket-activate starts"));
        let mut status = None;
        until(want, || {
            connect();
            status = child.0.try_wait().expect("ours");
            status.is_some()
        });
        let said = fs::read_to_string(&log).expect("a log");
        assert_eq!(status.and_then(|status| status.code()), Some(1), "{said}");
        assert!(said.contains(want), "{said}");
    };
    let everywhere = format!("0.0.0.0:{}", world.port);
    let tcp = || drop(TcpStream::connect(("127.0.0.1", world.port)));
    refused(&["-l", &everywhere], "tls = \"optional\"", &tcp, "not loopback");
    let datagram = world.dir.path().join("datagram.sock");
    let send = || {
        if let Ok(socket) = std::os::unix::net::UnixDatagram::unbound() {
            let _ = socket.send_to(b"x", &datagram);
        }
    };
    refused(&["-d", "-l", datagram.to_str().expect("UTF-8")], "", &send, "is not a stream socket");
    let other = format!("127.0.0.1:{}", free_port());
    let two = ["-l", &other, "-l", &format!("127.0.0.1:{}", world.port), "--fdname=control:nbd"];
    refused(&two, "", &tcp, "not a unix socket");
}

/// Where there are lists, a CA without one has its clients refused.
#[test]
fn a_ca_without_a_revocation_list_is_told_where_others_have_one() {
    let world = World::new();
    let other = Ca::new(&world.dir.path().join("other"));
    let both = world.dir.path().join("both.pem");
    let texts =
        [world.ca.certificate(), other.certificate()].map(|file| fs::read_to_string(file).expect("a CA"));
    fs::write(&both, texts.concat()).expect("written");
    let lists = world.dir.path().join("lists.pem");
    fs::copy(other.revoke(&[]), &lists).expect("copied");
    let listen = format!("tls_crl = {lists:?}\ntcp = \"127.0.0.1:{}\"", world.port);
    let config = world.config(&listen);
    let text = fs::read_to_string(&config).expect("a configuration");
    let own = format!("{:?}", world.ca.certificate());
    fs::write(&config, text.replace(&own, &format!("{both:?}"))).expect("a configuration");
    let check = || {
        let output = try_run(calpe().args(["serve", "--check", "--config"]).arg(&config));
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let why = "lists.pem: holds no revocation list of CN=test CA pki in";
    assert!(check().contains(why), "{}", check());
    let up = Up::serve(world.dir.path(), &config);
    assert_eq!(up.log().matches(why).count(), 1, "{}", up.log());
    let friend = world.friend();
    assert!(world.size_over(&friend).is_err());
    up.signal("HUP");
    until("it is told again", || up.log().matches(why).count() == 2);
    let all = [other.revoke(&[]), world.ca.revoke(&[])].map(|file| fs::read_to_string(file).expect("a list"));
    fs::write(&lists, all.concat()).expect("written");
    assert_eq!(check(), "");
    up.signal("HUP");
    until("all is well", || world.size_over(&friend).is_ok());
    assert_eq!(up.log().matches(why).count(), 2, "{}", up.log());
    up.stop();
}
