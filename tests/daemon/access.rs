//! Which certificate may use which array, with real clients over TLS: what they see, what they may do, and
//! what becomes of their sessions when it is taken away.

use crate::support::{Up, calpe, run, try_run};
use crate::tls::{World, until};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The configuration of a world with more keys for its array, the last section.
fn config(world: &World, listen: &str, array: &str) -> PathBuf {
    let file = world.config(&format!("tcp = \"127.0.0.1:{}\"\n{listen}", world.port));
    let text = fs::read_to_string(&file).expect("a configuration");
    fs::write(&file, text + array).expect("a configuration");
    file
}

/// A folder of a client whose certificate has this common name and one more name.
fn client(world: &World, name: &str, serial: u64, also: &str) -> PathBuf {
    let identity = world.ca.issue_to(name, serial, &[also]);
    world.client_dir(name, &world.ca.certificate(), Some(&identity))
}

/// What a client is told of the export: none when it is not there for it, else whether it may write.
fn may_write(world: &World, client: &Path) -> Option<bool> {
    let uri = world.uri(client);
    let list = uri.replace("/tank?", "/?");
    let listed = run(Command::new("nbdinfo").args(["--list", "--json"]).arg(list)).contains("\"tank\"");
    let output = try_run(Command::new("nbdinfo").args(["--is", "read-only"]).arg(uri));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let found = !said.contains("has no export named");
    assert_eq!(listed, found, "the list and the answer agree: {said}");
    found.then(|| !output.status.success())
}

#[test]
fn each_certificate_sees_and_may_do_what_the_array_says() {
    let world = World::new();
    let friend = client(&world, "friend", 10, "friend.example.com");
    let named = client(&world, "other", 11, "host7.clients.example.com");
    let reader = client(&world, "reader", 12, "reader.example.com");
    let stranger = client(&world, "stranger", 13, "clients.example.com");
    let rules = "tls_allow = [\"CN:friend\", \"DNS:*.clients.example.com\"]\ntls_allow_read_only = [\"CN:read*\", \"CN:friend\"]\n";
    let up = Up::serve(world.dir.path(), &config(&world, "tls = \"optional\"", rules));
    let check = || {
        assert_eq!(may_write(&world, &friend), Some(true));
        assert_eq!(may_write(&world, &named), Some(true));
        assert_eq!(may_write(&world, &reader), Some(false));
        assert_eq!(may_write(&world, &stranger), None);
    };
    check();
    // In the clear: not at all by TCP, and as before by the socket that its mode protects.
    let plain = try_run(Command::new("nbdinfo").arg(format!("nbd://127.0.0.1:{}/tank", world.port)));
    assert!(String::from_utf8_lossy(&plain.stderr).contains("No such file or directory"), "{plain:?}");
    let local = try_run(Command::new("nbdinfo").args(["--is", "read-only"]).arg(up.uri()));
    assert!(!local.status.success(), "{local:?}");
    // The rules belong to the array, however it comes to be served.
    up.calpe(&["export", "tank"]);
    up.calpe(&["import", "tank"]);
    check();
    up.stop();
}

/// A client that stays connected, and reads whenever it is told to.
struct Session {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Session {
    fn open(world: &World, client: &Path) -> Session {
        let script = "import sys\nprint('open', flush=True)\nfor line in sys.stdin:\n    try:\n        h.pread(512, 0)\n        \
                      print('read', flush=True)\n    except nbd.Error:\n        print('ended', flush=True)\n";
        let connect = format!("h.set_uri_allow_local_file(True)\nh.connect_uri('{}')\n", world.uri(client));
        let mut child = Command::new("/usr/bin/python3")
            .args(["-m", "nbd", "-c", &(connect + script)])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3-libnbd; 'scripts/test' installs it");
        let input = child.stdin.take().expect("a pipe");
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a line");
        assert_eq!(line, "open\n");
        Session { child, input, output }
    }

    fn goes_on(&mut self) -> bool {
        self.input.write_all(b"\n").expect("it waits for it");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line == "read\n"
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn what_is_taken_away_ends_the_sessions_that_have_it() {
    let world = World::new();
    let [one, two, three] = [("one", 10), ("two", 11), ("three", 12)]
        .map(|(name, serial)| client(&world, name, serial, &format!("{name}.example.com")));
    let crl = world.ca.revoke(&[]);
    let listen = format!("tls_crl = {crl:?}");
    let rules = |write: &str, read: &str| {
        config(&world, &listen, &format!("tls_allow = [{write}]\ntls_allow_read_only = [{read}]\n"))
    };
    let up = Up::serve(world.dir.path(), &rules("\"CN:one\", \"CN:two\"", "\"CN:three\""));
    let reload = |times: usize| {
        up.signal("HUP");
        until("the daemon has reloaded", || {
            up.log().matches("read the configuration and the files").count() == times
        });
    };
    let mut sessions = [&one, &two, &three].map(|client| Session::open(&world, client));
    assert_eq!(sessions.each_mut().map(Session::goes_on), [true, true, true]);
    reload(1);
    assert_eq!(sessions.each_mut().map(Session::goes_on), [true, true, true], "nothing changed");
    // Not allowed at all; only to read any more; to write from now on, which a session that reads does not
    // need.
    rules("\"CN:three\"", "\"CN:two\"");
    reload(2);
    assert_eq!(sessions.each_mut().map(Session::goes_on), [false, false, true]);
    assert!(
        up.log().contains("ended 2 sessions of certificates that are not allowed any more"),
        "{}",
        up.log()
    );
    assert_eq!(may_write(&world, &one), None);
    assert_eq!(may_write(&world, &two), Some(false));
    assert_eq!(may_write(&world, &three), Some(true));
    let mut two_again = Session::open(&world, &two);
    // Revoked.
    world.ca.revoke(&[12]);
    reload(3);
    assert!(!sessions[2].goes_on() && two_again.goes_on());
    assert!(up.log().contains("not trusted any more: CN=three"), "{}", up.log());
    assert!(world.size_over(&three).is_err() && world.size_over(&two).is_ok());
    up.stop();
}

#[test]
fn certificates_that_end_soon_are_told_until_they_are_renewed() {
    let mut world = World::new();
    world.server = world.ca.issue_for_days("server", 1, 5);
    let up = world.serve("");
    let status = up.calpe(&["status"]);
    assert!(status.contains("expires in 5"), "{status}");
    let json = |up: &Up| -> serde_json::Value {
        serde_json::from_str(&up.calpe(&["status", "--json"])).expect("JSON")
    };
    let certificates = json(&up)["certificates"].clone();
    assert_eq!((&certificates[0]["role"], &certificates[0]["state"]), (&"server".into(), &"expiring".into()));
    assert_eq!((&certificates[1]["role"], &certificates[1]["state"]), (&"client_ca".into(), &"valid".into()));
    until("an event tells", || up.calpe(&["events"]).contains("the daemon's certificate (CN=server"));
    world.ca.issue("server", 2);
    up.signal("HUP");
    until("the new one is known", || json(&up)["certificates"][0]["state"] == "valid");
    assert!(!up.calpe(&["status"]).contains("expires"), "no advice any more");
    up.stop();
}

#[test]
fn who_has_shown_no_certificate_goes_when_one_is_needed_from_now_on() {
    let world = World::new();
    let file = world.config(&format!("tcp = \"127.0.0.1:{}\"", world.port));
    let with = fs::read_to_string(&file).expect("a configuration");
    let without: String = with
        .lines()
        .filter(|line| !line.starts_with("tls_client_ca"))
        .fold(String::new(), |text, line| text + line + "\n");
    fs::write(&file, without).expect("a configuration");
    let up = Up::serve(world.dir.path(), &file);
    let nobody = world.client_dir("nobody", &world.ca.certificate(), None);
    let friend = world.friend();
    let mut sessions = [&nobody, &friend].map(|client| Session::open(&world, client));
    assert_eq!(sessions.each_mut().map(Session::goes_on), [true, true]);
    fs::write(&file, with).expect("a configuration");
    up.signal("HUP");
    until("the daemon has reloaded", || up.log().contains("read the configuration and the files"));
    assert!(!sessions[0].goes_on());
    assert!(up.log().contains("ended 2 sessions without a certificate"), "{}", up.log());
    assert!(Session::open(&world, &friend).goes_on());
    up.stop();
}

/// Of two sections about one array, neither lifts what the other one demands, and the reload says so.
#[test]
fn an_array_with_a_section_by_name_and_one_by_uuid_grants_what_both_grant() {
    let world = World::new();
    let [one, two] = [("one", 10), ("two", 11)]
        .map(|(name, serial)| client(&world, name, serial, &format!("{name}.example.com")));
    let inspected = run(calpe().args(["inspect", "--json"]).arg(world.dir.path().join("m0")));
    let inspected: serde_json::Value = serde_json::from_str(&inspected).expect("JSON");
    let uuid = inspected["array_uuid"].as_str().expect("a uuid");
    let dir = world.dir.path();
    let by_uuid = |keys: &str| format!("[[array]]\nuuid = \"{uuid}\"\nsearch = [{dir:?}]\n{keys}");
    let seen = || [may_write(&world, &one), may_write(&world, &two)];
    let only_one = "tls_allow = [\"CN:one\"]\n";
    let up = Up::serve(dir, &config(&world, "", only_one));
    assert_eq!(seen(), [Some(true), None]);
    let reloads = std::cell::Cell::new(0);
    let reload = |array: &str| {
        config(&world, "", array);
        up.signal("HUP");
        reloads.set(reloads.get() + 1);
        until("the daemon has reloaded", || {
            up.log().matches("read the configuration and the files").count() == reloads.get()
        });
    };
    reload(&format!("{only_one}{}", by_uuid("tls_allow = [\"CN:two\"]\n")));
    assert_eq!(seen(), [None, None], "each is granted by one section only");
    assert!(up.log().contains("subject CN=one"), "{}", up.log());
    assert!(up.log().contains("goes before section 'tank' about the same array"), "{}", up.log());
    reload(&format!("{only_one}{}", by_uuid("tls_allow_read_only = [\"*\"]\n")));
    assert_eq!(seen(), [Some(false), None]);
    reload(only_one);
    up.calpe(&["export", "tank"]);
    up.calpe(&["import", "tank"]);
    assert_eq!(seen(), [Some(true), None]);
    reload(&format!("{only_one}{}", by_uuid("")));
    assert_eq!(seen(), [Some(true), None], "a section without rules lifts none");
    up.stop();
    let up = Up::serve(dir, &config(&world, "", &format!("{only_one}{}", by_uuid(""))));
    assert_eq!(seen(), [Some(true), None], "nor at a start");
    assert!(!up.log().contains("in use by this process"), "{}", up.log());
    up.stop();
}
