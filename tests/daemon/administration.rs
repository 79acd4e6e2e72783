//! The control socket and those at its two ends: whom a command believes, whom the daemon listens to, how
//! many may be silent; and what reaches a terminal or a log of what others wrote.

use super::support::process::{Daemon, Setup};
use super::support::{calpe, try_run};
use calpe::control::{
    ErrorCode, Event, MAX_REPLY_BYTES, MAX_REQUEST_BYTES, PROTOCOL_VERSION, Pong, Reply, Request,
    RequestError, Severity, read_message, write_message,
};
use std::fs;
use std::io::{BufReader, Read, Write};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const SETUP: Setup = Setup { data: 1, parity: 1, checksum: "none", bytes: 1 << 20, chunk: 64 << 10 };

/// A user who is neither root nor the one that tests run as: nobody, on most systems.
const STRANGER: u32 = 65534;

/// Only root can hand files to others and act for them.
fn is_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        eprintln!("not run: it takes root to be somebody else");
    }
    is_root
}

/// A command in a directory, with no socket named anywhere.
fn command(dir: &Path, args: &[&str]) -> Command {
    let mut command = calpe();
    command.args(args).current_dir(dir).env_remove("XDG_RUNTIME_DIR");
    command
}

fn control(dir: &Path) -> PathBuf {
    dir.join("data/control.sock")
}

#[track_caller]
fn refused(output: &Output, code: i32) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{said}");
    said
}

fn ask(stream: &mut BufReader<UnixStream>, request: &Request) -> Option<Reply> {
    write_message(stream.get_mut(), request).ok()?;
    read_message(stream, MAX_REPLY_BYTES).ok()?
}

/// A daemon that answers the requests of one connection with these replies, after a pong.
fn pretender(socket: &Path, replies: Vec<Reply>) -> thread::JoinHandle<()> {
    let listener = UnixListener::bind(socket).expect("a socket");
    let pong = Reply::Pong(Pong { version: PROTOCOL_VERSION, program: "9.9.9".into(), pid: 1 });
    thread::spawn(move || {
        let (stream, _) = listener.accept().expect("a client");
        let mut stream = BufReader::new(stream);
        for reply in [pong].into_iter().chain(replies) {
            if read_message::<Request>(&mut stream, MAX_REQUEST_BYTES).expect("a request").is_none() {
                return;
            }
            write_message(stream.get_mut(), &reply).expect("taken");
        }
    })
}

/// A python program that runs as somebody else. It says when it is ready.
fn stranger(program: &str, args: &[&Path]) -> std::process::Child {
    let mut command = Command::new("/usr/bin/python3");
    command.arg("-c").arg(program).args(args).uid(STRANGER).gid(STRANGER);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("python runs");
    let mut ready = [0; 6];
    child.stdout.as_mut().expect("piped").read_exact(&mut ready).expect("it is ready");
    child
}

#[test]
fn a_socket_that_nobody_named_is_spoken_to_only_if_it_is_ours_or_roots() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("calpe-data");
    fs::create_dir(&data).unwrap();
    let socket = data.join("control.sock");
    let _listener = UnixListener::bind(&socket).unwrap();
    for theirs in [&data, &socket] {
        chown(theirs, Some(STRANGER), None).unwrap();
        let said = refused(&try_run(&mut command(dir.path(), &["status"])), 1);
        for part in
            ["calpe-data/control.sock: not trusted", "belongs to user", "65534", "--socket calpe-data"]
        {
            assert!(said.contains(part), "no '{part}' in {said}");
        }
        // A script that asks for the state learns that it cannot be told.
        refused(&try_run(&mut command(dir.path(), &["status", "--test"])), 4);
        chown(theirs, Some(0), None).unwrap();
    }
    // A link of theirs to a daemon of ours would have our commands go to the wrong one.
    let elsewhere = tempfile::tempdir().unwrap();
    let link = elsewhere.path().join("calpe-data");
    symlink(&data, &link).unwrap();
    std::os::unix::fs::lchown(&link, Some(STRANGER), None).unwrap();
    assert!(refused(&try_run(&mut command(elsewhere.path(), &["status"])), 1).contains("not trusted"));
}

#[test]
fn a_server_of_somebody_else_is_spoken_to_only_if_its_socket_was_named() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let data = dir.path().join("calpe-data");
    fs::create_dir(&data).unwrap();
    let socket = data.join("control.sock");
    chown(&data, Some(STRANGER), None).unwrap();
    let program = r#"
import json, socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("ready", flush=True)
while True:
    client = server.accept()[0]
    for line in client.makefile():
        asked = json.loads(line)["request"]
        pong = {"reply": "pong", "version": 2, "program": "9.9.9", "pid": 1}
        empty = {"reply": "events", "events": [], "next": 0}
        client.sendall((json.dumps(pong if asked == "ping" else empty) + "\n").encode())
"#;
    let mut server = stranger(program, &[&socket]);
    // Their server behind a path that is ours: moved there, or given away.
    chown(&data, Some(0), None).unwrap();
    chown(&socket, Some(0), None).unwrap();
    let implicit = try_run(&mut command(dir.path(), &["events"]));
    let named = try_run(&mut command(dir.path(), &["events", "--socket", "calpe-data/control.sock"]));
    let by_environment = try_run(command(dir.path(), &["events"]).env("CALPE_SOCKET", &socket));
    server.kill().unwrap();
    server.wait().unwrap();
    let said = refused(&implicit, 1);
    assert!(said.contains("not trusted") && said.contains("belongs to user"), "{said}");
    assert!(named.status.success() && by_environment.status.success());
}

#[test]
fn the_daemon_tells_a_stranger_that_it_takes_no_orders_and_logs_few_of_them() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(dir.path(), &SETUP);
    // Somebody opened the way for others.
    for (path, mode) in
        [(dir.path().to_owned(), 0o755), (dir.path().join("data"), 0o755), (control(dir.path()), 0o666)]
    {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let program = r#"
import socket, sys
print("ready", flush=True)
for _ in range(100):
    client = socket.socket(socket.AF_UNIX)
    client.connect(sys.argv[1])
    reply = client.makefile().readline()
print(reply, flush=True)
"#;
    let mut child = stranger(program, &[&control(dir.path())]);
    let mut said = String::new();
    child.stdout.as_mut().unwrap().read_to_string(&mut said).unwrap();
    assert!(child.wait().unwrap().success());
    let reply: Reply = serde_json::from_str(said.trim()).unwrap();
    let Reply::Error(error) = reply else { panic!("{reply:?}") };
    assert_eq!(error.code, ErrorCode::Refused);
    assert!(error.message.contains("root") && error.message.contains("65534"), "{}", error.message);
    let log = daemon.log();
    let lines = log.lines().filter(|line| line.contains("turned away")).count();
    assert!((1..=10).contains(&lines), "{lines} lines:\n{log}");
    daemon.stop();
}

#[test]
fn silent_clients_keep_no_administrator_out() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(dir.path(), &SETUP);
    let connect = || UnixStream::connect(control(dir.path())).expect("accepted");
    // One that asks now and then, as 'events -f' does.
    let mut follower = BufReader::new(connect());
    let follow = |follower: &mut BufReader<UnixStream>| {
        matches!(ask(follower, &Request::Events { since: 0 }), Some(Reply::Events { .. }))
    };
    assert!(follow(&mut follower));
    let silent: Vec<_> = (0..200).map(|_| connect()).collect();
    for _ in 0..3 {
        let output =
            try_run(command(dir.path(), &["status", "--test"]).env("CALPE_SOCKET", control(dir.path())));
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(follow(&mut follower), "the one that speaks keeps its place");
    }
    let is_dropped = |mut stream: &UnixStream| {
        stream.set_nonblocking(true).unwrap();
        matches!(stream.read(&mut [0]), Ok(0))
    };
    assert!(silent[..100].iter().all(is_dropped), "the longest silent went first");
    assert!(!is_dropped(&silent[199]));
    daemon.stop();
}

/// Everything that a terminal would act upon, and text that reads like another line.
const EVIL: &str = "a\x1b[2J\x1b]0;x\x07\u{9b}31m\x7f\u{202e}b\nforged: line";

#[track_caller]
fn is_harmless(what: &str, text: &[u8]) {
    let text = String::from_utf8(text.to_vec()).expect("text");
    let evil = |c: char| c != '\n' && (c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c));
    assert!(!text.contains(evil), "{what}: {text:?}");
    assert!(!text.lines().any(|line| line.starts_with("forged")), "{what}: {text:?}");
}

#[test]
fn names_of_files_cannot_steer_a_terminal_nor_forge_lines() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join(EVIL);
    fs::create_dir(&place).unwrap();
    let member = |name: &str| place.join(name).display().to_string();
    let (m0, m1) = (member("m0"), member("m1"));
    let none = member("none");
    let create = ["create", "tank", "-k", "1", "-m", "1", "--size", "4MiB", &m0, &m1];
    let mut dry = create.to_vec();
    dry.push("-n");
    for (args, code) in [
        (dry.as_slice(), 0),
        (&create, 0),
        (&create, 1),
        (&["inspect", &m0], 0),
        (&["inspect", &none], 1),
        (&["check", &m0, &m1], 0),
        (&["check", &m0], 1),
        (&["check", &m0, &none], 1),
        (&["serve", "--config", &none], 1),
        (&["status", "--socket", &none], 1),
        (&["create", "tank", &format!("--{EVIL}")], 2),
        (&["up", "--size", EVIL], 2),
    ] {
        let output = try_run(&mut command(dir.path(), args));
        assert_eq!(output.status.code(), Some(code), "{args:?} {}", String::from_utf8_lossy(&output.stderr));
        is_harmless(args[0], &output.stdout);
        is_harmless(args[0], &output.stderr);
    }
}

#[test]
fn a_daemon_in_a_directory_with_an_evil_name_logs_and_tells_it_escaped() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join(EVIL);
    fs::create_dir(&place).unwrap();
    let mut daemon = Daemon::start(&place, &SETUP);
    fs::remove_file(daemon.member(1)).unwrap();
    daemon.until("the loss is seen", |daemon| {
        daemon.report().members[1].state != calpe::control::MemberState::Online
    });
    for args in [&["status", "-v"][..], &["events"], &["import"], &["online", "calpe", "1"]] {
        let output = try_run(command(dir.path(), args).env("CALPE_SOCKET", control(&place)));
        assert!(!output.stdout.is_empty() || !output.stderr.is_empty(), "{args:?}");
        is_harmless(args[0], &output.stdout);
        is_harmless(args[0], &output.stderr);
    }
    let json = try_run(command(dir.path(), &["status", "--json"]).env("CALPE_SOCKET", control(&place)));
    is_harmless("status --json", &json.stdout);
    let status: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let name = status["arrays"][0]["members"][0]["name"].as_str().unwrap();
    assert!(name.contains(EVIL), "programs get the name as it is: {name}");
    // What 'up' printed and logged.
    let log = daemon.log();
    assert!(log.contains("\\u{1b}"), "{log}");
    is_harmless("up", log.as_bytes());
    daemon.stop();
}

#[test]
fn what_a_daemon_says_cannot_steer_a_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let event = Event {
        sequence: 1,
        unix: 0,
        first_unix: 0,
        count: 1,
        kind: EVIL.into(),
        offset: None,
        uid: None,
        severity: Severity::Error,
        array: Some(EVIL.into()),
        array_uuid: None,
        member: None,
        text: EVIL.into(),
    };
    let error = RequestError { code: ErrorCode::Failed, message: EVIL.replace('\n', " ") };
    let replies = [
        ("events", Reply::Events { events: vec![event], next: 2 }),
        (
            "export",
            Reply::Done {
                message: EVIL.replace('\n', " "),
                warnings: vec![EVIL.replace('\n', " ")],
                failures: vec![],
            },
        ),
        ("status", Reply::Error(error)),
    ];
    for (at, (name, reply)) in replies.into_iter().enumerate() {
        let socket = dir.path().join(at.to_string());
        let server = pretender(&socket, vec![reply]);
        let mut command = command(dir.path(), &[name]);
        if name == "export" {
            command.arg("tank");
        }
        let output = try_run(command.arg("--socket").arg(&socket));
        assert!(output.stdout.len() + output.stderr.len() > EVIL.len(), "{name}");
        is_harmless(name, &output.stdout);
        is_harmless(name, &output.stderr);
        server.join().unwrap();
    }
}

#[test]
fn what_is_read_whole_is_a_file_of_a_reasonable_size() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::File::create(path("large.toml")).unwrap().set_len(2 << 20).unwrap();
    fs::write(path("binary.toml"), b"\xff\xfe").unwrap();
    nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let tls = |certificate: &str| {
        let name = format!("tls-{}.toml", certificate.replace('/', "-"));
        let text = format!("[listen]\ntls_certificate = \"{certificate}\"\ntls_key = \"key.pem\"\n");
        fs::write(path(&name), text).unwrap();
        name
    };
    let begun = Instant::now();
    for (config, said) in [
        (
            "/dev/zero".to_owned(),
            "/dev/zero: cannot read the configuration: it is a character device, not a file",
        ),
        (".".to_owned(), "it is a directory"),
        ("large.toml".to_owned(), "longer than 1024 KiB"),
        ("binary.toml".to_owned(), "byte 0 is not UTF-8"),
        (tls("/dev/zero"), "/dev/zero: cannot be read: it is a character device"),
        (tls("pipe"), "pipe: cannot be read: it is a pipe"),
    ] {
        let output = try_run(&mut command(dir.path(), &["serve", "--check", "--config", &config]));
        let told = refused(&output, 1);
        assert!(told.contains(said), "{config}: {told}");
    }
    assert!(begun.elapsed() < Duration::from_secs(30), "none of them is waited for");
    // A pipe is one way to give a configuration, and ends.
    let mut child = command(dir.path(), &["serve", "--check", "--config", "/dev/stdin"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"[daemon]\nmemory = \"0.5GiB\"\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "/dev/stdin: valid\n");
}

#[test]
fn directories_of_sockets_are_private_and_open_ones_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(dir.path(), &SETUP);
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(dir.path().join("data")), 0o700);
    assert_eq!(mode(control(dir.path())), 0o600);
    assert_eq!(mode(daemon.socket()), 0o600);
    daemon.stop();
    let open = dir.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    let output = try_run(&mut command(dir.path(), &["up", "--dir", "open", "--size", "1MiB"]));
    assert!(refused(&output, 1).contains("every user may replace files in this directory"));
    assert_eq!(fs::read_dir(&open).unwrap().count(), 0, "nothing was created");
}
