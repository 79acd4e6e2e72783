//! Members on other hosts, through the real binary: servers of several makes, and an array over four hosts
//! that loses two of them, in every way in which hosts are lost. The hosts are network namespaces, which
//! takes root to make.

use crate::support::load::{Client, Counts, Load};
use crate::support::pki::Ca;
use crate::support::{Up, calpe, run, signal, try_run};
use calpe_core::nbd::{Command as Nbd, Request};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

const VOLUME: u64 = 48 << 20;
const DISK: u64 = 96 << 20;

/// Longest that anything may take; only a hang gets there.
const PATIENCE: Duration = Duration::from_secs(240);

#[track_caller]
fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !reached() {
        assert!(Instant::now() < deadline, "not reached: {what}");
        sleep(Duration::from_millis(50));
    }
}

/// A process that ends with the test.
struct Process(Child);

impl Process {
    #[track_caller]
    fn start(command: &mut Command) -> Process {
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        Process(spawned.unwrap_or_else(|error| panic!("{command:?} could not be run: {error}")))
    }

    fn signal(&self, name: &str) {
        signal(&self.0, name);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A stopped process ends, too.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn sparse(path: &Path, bytes: u64) {
    fs::File::create(path).expect("a file").set_len(bytes).expect("room");
}

fn unix_uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

#[track_caller]
fn answers(uri: &str) {
    until(uri, || try_run(Command::new("nbdinfo").arg("--size").arg(uri)).status.success());
}

/// Writes a configuration for an array 'tank', and returns its path.
fn configure(dir: &Path, uris: &[String], extra: &str) -> PathBuf {
    let config = dir.join("calpe.toml");
    let search = uris.iter().map(|uri| format!("\"{uri}\"")).collect::<Vec<_>>().join(", ");
    let text = format!(
        "[daemon]\nruntime_dir = \"{}\"\n[gpu]\nmode = \"off\"\n[[array]]\nname = \"tank\"\nsearch = [{search}]\n{extra}",
        dir.join("data").display()
    );
    fs::write(&config, text).expect("written");
    config
}

#[track_caller]
fn create(uris: &[String], data: usize) -> String {
    let parity = uris.len() - data;
    run(calpe()
        .args(["create", "tank", "--data", &data.to_string(), "--parity", &parity.to_string()])
        .args(["--size", &VOLUME.to_string()])
        .args(uris))
}

/// The load of a client in a thread, which stops when told.
struct Working {
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    thread: std::thread::JoinHandle<Load>,
}

impl Working {
    fn start(socket: &Path, mut load: Load) -> Working {
        let (stop, counts) = (Arc::new(AtomicBool::new(false)), Arc::new(Counts::default()));
        let mut client = Client::connect(socket).expect("the daemon accepts");
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&counts));
        let thread = std::thread::spawn(move || {
            load.run(&mut client, &stopped, &counted).expect("the daemon goes on");
            load
        });
        Working { stop, counts, thread }
    }

    /// Waits until so many more writes and reads are done. Returns how long it took.
    #[track_caller]
    fn go_on(&self, more: u64) -> Duration {
        let begun = Instant::now();
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (writes, reads) = (count(&self.counts.writes) + more, count(&self.counts.reads) + more / 8);
        until("the load goes on", || {
            assert!(!self.thread.is_finished(), "the load has failed");
            count(&self.counts.writes) >= writes && count(&self.counts.reads) >= reads
        });
        begun.elapsed()
    }

    fn end(self) -> Load {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("all that was read was right")
    }
}

fn load() -> Load {
    Load::new(VOLUME, 128 << 10, 7)
}

fn states(up: &Up) -> Vec<String> {
    let status = up.status();
    let members = status["members"].as_array().expect("members");
    members.iter().map(|member| member["state"].as_str().expect("a state").to_owned()).collect()
}

fn is_whole(up: &Up) -> bool {
    let status = up.status();
    status["state"] == "ONLINE" && status["scan"].as_array().is_none_or(Vec::is_empty)
}

#[test]
fn servers_of_several_makes_hold_an_array_together() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    sparse(&path("disk0"), DISK);
    sparse(&path("disk1"), DISK);
    let _nbdkit = Process::start(
        Command::new("nbdkit").arg("-f").arg("-U").arg(path("s0")).arg("file").arg(path("disk0")),
    );
    let _qemu = Process::start(
        Command::new("qemu-nbd")
            .args(["-f", "raw", "-t", "-e", "8", "-k"])
            .arg(path("s1"))
            .arg(path("disk1")),
    );
    fs::create_dir(path("own")).expect("a directory");
    let own = Up::start(&path("own"), &["--data", "2", "--parity", "1", "--size", "96MiB", "--gpu", "off"]);
    let uris = [unix_uri(&path("s0")), unix_uri(&path("s1")), own.uri()];
    uris.iter().for_each(|uri| answers(uri));
    assert!(create(&uris, 2).contains("created array 'tank'"));
    let config = configure(dir.path(), &uris, "");
    let up = Up::serve(dir.path(), &config);
    let text = up.calpe(&["status"]);
    assert!(uris.iter().all(|uri| text.contains(uri.as_str())), "{text}");
    let inspected = run(calpe().arg("inspect").arg(&uris[1]));
    assert!(inspected.contains("tank"), "{inspected}");
    let working = Working::start(&up.socket(), load());
    working.go_on(2000);
    // Out by hand, it stays out; back by hand, it is caught up.
    up.calpe(&["offline", "tank", &uris[1]]);
    working.go_on(300);
    sleep(Duration::from_secs(4));
    assert_eq!(states(&up)[1], "OFFLINE");
    up.calpe(&["online", "tank", &uris[1]]);
    until("it is back", || is_whole(&up));
    let mut load = working.end();
    assert_eq!(up.scrub(), (0, 0));
    load.settle(&mut Client::connect(&up.socket()).expect("a client")).expect("all can be read");
    up.stop();
    run(calpe().arg("check").args(&uris));
    // Another start, by command.
    let up = Up::serve(dir.path(), &config);
    load.settle(&mut Client::connect(&up.socket()).expect("a client")).expect("all can be read");
    up.stop();
    own.stop();
}

/// Serves the file `disk0`, say, of the directory at its socket `s0`, by nbdkit.
fn file_server(dir: &Path, at: usize) -> Process {
    let (socket, disk) = (dir.join(format!("s{at}")), dir.join(format!("disk{at}")));
    // One that was killed leaves it behind.
    let _ = fs::remove_file(&socket);
    Process::start(Command::new("nbdkit").arg("-f").arg("-U").arg(socket).arg("file").arg(disk))
}

/// Three of these, and the addresses of what they serve, which is 'tank', 2+1.
fn three_file_servers(dir: &Path) -> (Vec<Process>, Vec<String>) {
    (0..3).for_each(|at| sparse(&dir.join(format!("disk{at}")), DISK));
    let servers = (0..3).map(|at| file_server(dir, at)).collect();
    let uris: Vec<String> = (0..3).map(|at| unix_uri(&dir.join(format!("s{at}")))).collect();
    uris.iter().for_each(|uri| answers(uri));
    create(&uris, 2);
    (servers, uris)
}

#[test]
fn a_member_whose_host_is_away_is_waited_for_and_nobody_is_told_to_replace_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = |at: usize| file_server(dir.path(), at);
    let (mut servers, uris) = three_file_servers(dir.path());
    let up = Up::serve(dir.path(), &configure(dir.path(), &uris, "remote_timeout = 1\n"));
    let working = Working::start(&up.socket(), load());
    working.go_on(100);
    drop(servers.remove(1));
    // FAULTED where it had writes that were not flushed, else MISSING.
    until("the member is out", || ["FAULTED", "MISSING"].contains(&states(&up)[1].as_str()));
    let status = up.status();
    let conditions = status["members"][1]["conditions"].as_array().expect("conditions");
    assert!(conditions.contains(&"returning".into()), "{status}");
    let action = status["action"].as_str().expect("an action");
    // Not before what it was sent last can have landed.
    let is_asked = !conditions.contains(&"quarantined".into());
    assert!(is_asked || action.starts_with("Whether") && action.contains("may still be written"), "{action}");
    assert!(!action.contains("replace"), "{action}");
    until("its host is asked", || {
        let status = up.status();
        let action = status["action"].as_str().expect("an action");
        action.starts_with("Waiting for") && !action.contains("replace") && action.contains("tried")
    });
    assert!(up.calpe(&["status", "-x"]).contains("comes back by itself"));
    let events = up.calpe(&["events"]);
    let is_out = |line: &&str| line.contains("member 1 is FAULTED") || line.contains("member 1 is MISSING");
    let out = events.lines().find(is_out).expect(&events);
    assert!(out.contains("whether it comes back by itself") && !out.contains("replace the member"), "{out}");
    let is_missing = states(&up)[1] == "MISSING";
    let would = up.calpe(&["fail", status["name"].as_str().expect("a name"), "1", "-n"]);
    let stays = "member 1 is FAULTED, and stays away until 'calpe online'";
    assert!(would.contains(if is_missing { "member 1 is FAULTED" } else { stays }), "{would}");
    let _back = server(1);
    until("it is back", || is_whole(&up));
    working.end();
    let status = up.status();
    assert_eq!(status["members"][1]["conditions"].as_array().map(Vec::len), Some(0), "{status}");
    up.stop();
}

/// What an administrator takes out while the array has failed stays out, although nothing can be
/// recorded of it.
#[test]
fn a_member_of_a_failed_array_that_is_taken_out_is_told_to_stay_away_and_until_when() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = |at: usize| file_server(dir.path(), at);
    let (mut servers, uris) = three_file_servers(dir.path());
    let limits = "remote_timeout = 3\nremote_grace = 1\n";
    let up = Up::serve(dir.path(), &configure(dir.path(), &uris, limits));
    until("it is served", || is_whole(&up));
    let mut client = Client::connect(&up.socket()).expect("a client");
    let mut read = || client.call(&Request::new(Nbd::Read, 0, 4096), &[]).expect("an answer");
    drop(servers.drain(..2));
    until("the array has failed", || {
        let _ = read();
        up.status()["state"] == "FAILED"
    });
    let state = states(&up)[1].clone();
    let stays = format!(
        "member 1 is {state}, and stays away until 'calpe online' brings it back; a start of the array forgets that, as nothing can \
         be recorded while it has FAILED"
    );
    let told = up.calpe(&["offline", "tank", "1", "-n"]);
    assert!(told.contains(&stays), "{told}");
    let told = up.calpe(&["offline", "tank", "1"]);
    assert!(told.contains(&stays), "{told}");
    let returns = |up: &Up, member: usize| {
        let conditions = up.status()["members"][member]["conditions"].clone();
        conditions.as_array().expect("conditions").contains(&"returning".into())
    };
    assert_eq!([0, 1].map(|member| returns(&up, member)), [true, false], "{}", up.status());
    servers.extend((0..2).map(server));
    // Refused as long as its server is not asked, or the other one has to come first.
    until("it is brought back", || try_run(&mut up.command(&["online", "tank", "1"])).status.success());
    until("it is whole", || is_whole(&up));
    read().expect("it serves again");
    up.stop();
}

/// Servers that lose power, as it were, with what was written and not flushed: more of them than there is
/// parity.
#[test]
fn a_flush_fails_after_writes_were_lost_that_nobody_had_flushed() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    let server = |at: usize| {
        let (socket, disk) = (path(&format!("s{at}")), path(&format!("disk{at}")));
        let _ = fs::remove_file(&socket);
        let mut command = Command::new("nbdkit");
        command.arg("-f").arg("-U").arg(socket).arg("--filter=cache").arg("file").arg(disk);
        Process::start(command.arg("cache=writeback"))
    };
    (0..3).for_each(|at| sparse(&path(&format!("disk{at}")), DISK));
    let mut servers: Vec<Process> = (0..3).map(server).collect();
    let uris: Vec<String> = (0..3).map(|at| unix_uri(&path(&format!("s{at}")))).collect();
    uris.iter().for_each(|uri| answers(uri));
    create(&uris, 2);
    let limits = "remote_timeout = 2\nremote_grace = 1\n";
    let up = Up::serve(dir.path(), &configure(dir.path(), &uris, limits));
    let [mut writer, mut other] = [0, 1].map(|_| Client::connect(&up.socket()).expect("a client"));
    let write = |client: &mut Client, byte: u8| {
        let request = Request::new(Nbd::Write, 0, 256 << 10);
        client.call(&request, &vec![byte; 256 << 10]).expect("an answer").expect("written");
    };
    let flush = |client: &mut Client| client.call(&Request::new(Nbd::Flush, 0, 0), &[]).expect("an answer");
    write(&mut writer, 1);
    flush(&mut writer).expect("flushed");
    write(&mut writer, 2);
    drop(servers.drain(..2));
    servers.extend((0..2).map(server));
    // Until somebody asks for something, nobody sees that they were gone.
    let read = |client: &mut Client| client.call(&Request::new(Nbd::Read, 0, 4096), &[]).expect("an answer");
    until("the array has failed", || {
        let _ = read(&mut other);
        states(&up).iter().filter(|state| *state == "ONLINE").count() < 2
    });
    until("the array serves again", || read(&mut other).is_ok());
    assert_eq!(read(&mut writer).expect("readable"), [1; 4096], "what was flushed, and no more");
    for client in [&mut writer, &mut other] {
        flush(client).expect_err("acknowledged writes are lost");
        flush(client).expect("it was told");
    }
    flush(&mut Client::connect(&up.socket()).expect("a client")).expect("it had written nothing");
    assert!(up.calpe(&["events"]).contains("acknowledged and not flushed"));
    assert!(!up.calpe(&["status"]).contains("none seen by clients"));
    until("it is whole", || is_whole(&up));
    up.stop();
}

#[test]
fn a_member_that_is_far_slower_than_the_others_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    let servers: Vec<Process> = (0..4)
        .map(|at| {
            let mut command = Command::new("nbdkit");
            command.arg("-f").arg("-U").arg(path(&format!("s{at}"))).arg("--filter=delay").arg("memory");
            let delay = if at == 2 { 60 } else { 1 };
            command.arg(DISK.to_string()).arg(format!("rdelay={delay}ms")).arg(format!("wdelay={delay}ms"));
            Process::start(&mut command)
        })
        .collect();
    let uris: Vec<String> = (0..4).map(|at| unix_uri(&path(&format!("s{at}")))).collect();
    uris.iter().for_each(|uri| answers(uri));
    create(&uris, 3);
    let up = Up::serve(dir.path(), &configure(dir.path(), &uris, ""));
    let working = Working::start(&up.socket(), load());
    let slow = |up: &Up, member: usize| up.status()["members"][member]["conditions"].as_array().map(Vec::len);
    until("it is named", || slow(&up, 2) == Some(1));
    assert_eq!([0, 1, 3].map(|member| slow(&up, member)), [Some(0); 3], "and no other");
    working.end();
    let told = up.calpe(&["status"]);
    assert!(told.contains("far slower than the others") && told.contains("ONLINE"), "{told}");
    assert!(up.calpe(&["events"]).contains("far slower"));
    up.stop();
    drop(servers);
}

#[test]
fn two_uris_of_one_export_are_no_two_members_and_errors_of_a_server_cost_its_member() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    let servers: Vec<Process> = (0..3)
        .map(|at| {
            let mut command = Command::new("nbdkit");
            command.arg("-f").arg("-U").arg(path(&format!("s{at}"))).arg("--filter=error").arg("memory");
            command.arg(DISK.to_string()).arg("error=EIO").arg("error-rate=100%");
            Process::start(command.arg(format!("error-file={}", path(&format!("fail{at}")).display())))
        })
        .collect();
    std::os::unix::fs::symlink(path("s0"), path("also-s0")).expect("a link");
    let uris: Vec<String> = (0..3).map(|at| unix_uri(&path(&format!("s{at}")))).collect();
    uris.iter().for_each(|uri| answers(uri));
    let twice = [uris[0].clone(), uris[1].clone(), unix_uri(&path("also-s0"))];
    let output = try_run(calpe().args(["create", "tank", "--data", "2", "--parity", "1"]).args(&twice));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && told.contains("lead to one place"), "{told}");
    create(&uris, 2);
    let output = try_run(calpe().args(["create", "tank", "--data", "2", "--parity", "1"]).args(&uris));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && told.contains("use --force"), "{told}");
    let up = Up::serve(dir.path(), &configure(dir.path(), &uris, ""));
    let working = Working::start(&up.socket(), load());
    working.go_on(500);
    fs::write(path("fail1"), "").expect("a file");
    until("the member is out", || states(&up)[1] == "FAULTED");
    working.go_on(500);
    // What errs does not come back by itself; the server was reachable all the time.
    fs::remove_file(path("fail1")).expect("removed");
    sleep(Duration::from_secs(5));
    assert_eq!(states(&up)[1], "FAULTED");
    up.calpe(&["online", "tank", "1"]);
    until("it is back", || is_whole(&up));
    let _load = working.end();
    assert_eq!(up.scrub().0, 0);
    up.stop();
    drop(servers);
}

/// A server that takes writes and gives an error for each read: what is rewritten there cannot be
/// read again.
#[test]
fn blocks_that_cannot_be_read_after_they_were_rewritten_do_not_count_as_repaired() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    let errs = path("errs");
    sparse(&path("disk"), DISK);
    let mut command = Command::new("nbdkit");
    command.arg("-f").arg("-U").arg(path("s")).arg("--filter=error").arg("file").arg(path("disk"));
    command.arg("error-pread=EIO").arg("error-pread-rate=100%");
    let server = Process::start(command.arg(format!("error-pread-file={}", errs.display())));
    let uris = [path("m0").display().to_string(), path("m1").display().to_string(), unix_uri(&path("s"))];
    answers(&uris[2]);
    create(&uris, 2);
    let up = Up::serve(dir.path(), &configure(dir.path(), &uris, ""));
    let mut client = Client::connect(&up.socket()).expect("connected");
    let data: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 4096) as u8).collect();
    client.call(&Request::new(Nbd::Write, 0, 1 << 20), &data).expect("connected").expect("written");
    client.call(&Request::new(Nbd::Flush, 0, 0), &[]).expect("connected").expect("flushed");
    sleep(Duration::from_secs(1));
    fs::write(&errs, "").expect("a file");
    let read = client.call(&Request::new(Nbd::Read, 0, 1 << 20), &[]).expect("connected").expect("read");
    assert!(read == data);
    let member = || up.status()["members"][2].clone();
    until("it is told", || up.calpe(&["events"]).contains("cannot be read again after"));
    let told = member();
    assert!(told["read"] != 0 && told["repaired"] == 0, "{told}");
    assert!(told["conditions"].to_string().contains("not_mended"), "{told}");
    let events = up.calpe(&["events"]);
    assert!(!events.contains("they are rewritten") && !events.contains("it is rewritten"), "{events}");
    let status = up.status();
    assert!(status["status"].as_str().expect("text").contains("keeps giving errors"), "{status}");
    assert_eq!(try_run(&mut up.command(&["status", "--test"])).status.code(), Some(1));
    // It passes, and a scrub finds all of it good.
    fs::remove_file(&errs).expect("removed");
    assert_eq!(up.scrub().0, 0);
    assert!(!member()["conditions"].to_string().contains("not_mended"));
    assert_eq!(try_run(&mut up.command(&["status", "--test"])).status.code(), Some(0));
    drop(client);
    up.stop();
    drop(server);
}

#[test]
fn members_by_tls_are_who_they_should_be_or_none() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    let ca = Ca::new(&path("pki"));
    ["server", "client"].iter().zip(1..).for_each(|(name, serial)| drop(ca.issue(name, serial)));
    let stranger = Ca::new(&path("stranger"));
    stranger.issue("client", 1);
    let _servers: Vec<Process> = (0..3)
        .map(|at| {
            sparse(&path(&format!("disk{at}")), DISK);
            let mut command = Command::new("nbdkit");
            command.args(["-f", "--tls=require", "--tls-verify-peer"]);
            command.arg(format!("--tls-certificates={}", path("pki").display()));
            Process::start(
                command.arg("-U").arg(path(&format!("s{at}"))).arg("file").arg(path(&format!("disk{at}"))),
            )
        })
        .collect();
    let uri = |at: usize, parameters: &str| {
        format!("nbds+unix:///?socket={}{parameters}", path(&format!("s{at}")).display())
    };
    let by = |folder: &str| format!("&tls-certificates={}", path(folder).display());
    until("the servers listen", || (0..3).all(|at| path(&format!("s{at}")).exists()));
    let refused = |uri: &str, why: &str| {
        let output = try_run(calpe().arg("inspect").arg(uri));
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && told.contains(why), "{uri}: {told}");
    };
    refused(&uri(0, ""), "tls-certificates=DIR");
    refused(&uri(0, &by("nowhere")), "ca-cert.pem");
    // A CA that did not sign the server's certificate; a name that is not in it; no TLS at all.
    refused(&uri(0, &by("stranger")), "TLS");
    refused(&uri(0, &format!("{}&tls-hostname=elsewhere", by("pki"))), "TLS");
    refused(&unix_uri(&path("s0")), "it demands TLS");
    // The client's certificate is checked, too.
    fs::create_dir(path("anonymous")).expect("a directory");
    fs::copy(ca.certificate(), path("anonymous/ca-cert.pem")).expect("copied");
    refused(&uri(0, &by("anonymous")), "");

    let uris: Vec<String> = (0..3).map(|at| uri(at, &by("pki"))).collect();
    create(&uris, 2);
    let up = Up::serve(dir.path(), &configure(dir.path(), &uris, ""));
    let working = Working::start(&up.socket(), load());
    working.go_on(1000);
    let mut load = working.end();
    up.stop();
    run(calpe().arg("check").args(&uris));
    // The same certificates from the configuration, for URIs that name none.
    let bare: Vec<String> = (0..3).map(|at| uri(at, "")).collect();
    let file = |name: &str| path("pki").join(name).display().to_string();
    let section = format!(
        "[remote]\ntls_ca = \"{}\"\ntls_certificate = \"{}\"\ntls_key = \"{}\"\n",
        file("ca-cert.pem"),
        file("client-cert.pem"),
        file("client-key.pem")
    );
    let up = Up::serve(dir.path(), &configure(dir.path(), &bare, &section));
    load.settle(&mut Client::connect(&up.socket()).expect("a client")).expect("all can be read");
    assert!(is_whole(&up));
    up.stop();
}

#[test]
fn a_server_that_answers_and_refuses_is_told_and_not_waited_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    let ca = Ca::new(&path("pki"));
    ["server", "client"].iter().zip(1..).for_each(|(name, serial)| drop(ca.issue(name, serial)));
    let stranger = Ca::new(&path("stranger"));
    stranger.issue("server", 1);
    // Folders of servers: one with a certificate that has expired, one that believes clients of the stranger
    // alone.
    for (folder, until) in [("expired", 2021), ("distrustful", 2090)] {
        let server = ca.issue_until(folder, 7, until);
        fs::create_dir(path(folder)).expect("a folder");
        for (from, to) in [(&server.certificate, "server-cert.pem"), (&server.key, "server-key.pem")] {
            fs::copy(from, path(folder).join(to)).expect("copied");
        }
        let believed = if folder == "distrustful" { &stranger } else { &ca };
        fs::copy(believed.certificate(), path(folder).join("ca-cert.pem")).expect("copied");
    }
    let serve = |at: usize, folder: Option<&str>, more: &[&str]| {
        let (disk, socket) = (path(&format!("disk{at}")), path(&format!("s{at}")));
        if !disk.exists() {
            sparse(&disk, DISK);
        }
        // What a server leaves behind when it is killed.
        let _ = fs::remove_file(&socket);
        let mut command = Command::new("nbdkit");
        command.arg("-f").arg("-U").arg(&socket);
        if let Some(folder) = folder {
            command.args(["--tls=require", "--tls-verify-peer"]);
            command.arg(format!("--tls-certificates={}", path(folder).display()));
        }
        let filters = more.iter().filter(|argument| argument.starts_with("--"));
        let parameters = more.iter().filter(|argument| !argument.starts_with("--"));
        let server = Process::start(command.args(filters).arg("file").arg(&disk).args(parameters));
        until("the server listens", || socket.exists());
        server
    };
    let mut servers: Vec<Process> = (0..3).map(|at| serve(at, Some("pki"), &[])).collect();
    let bare: Vec<String> =
        (0..3).map(|at| format!("nbds+unix:///?socket={}", path(&format!("s{at}")).display())).collect();
    let with_files: Vec<String> =
        bare.iter().map(|uri| format!("{uri}&tls-certificates={}", path("pki").display())).collect();
    create(&with_files, 2);
    let limits = "remote_timeout = 3\nremote_grace = 1\n";
    let file = |name: &str| path("pki").join(name).display().to_string();
    let section = format!(
        "{limits}[remote]\ntls_ca = \"{}\"\ntls_certificate = \"{}\"\ntls_key = \"{}\"\n",
        file("ca-cert.pem"),
        file("client-cert.pem"),
        file("client-key.pem")
    );
    let up = Up::serve(dir.path(), &configure(dir.path(), &bare, &section));
    until("it is served", || is_whole(&up));
    let told = |part: &str| {
        until(part, || {
            let member = up.status()["members"][2].clone();
            let is_told = member["reason"].as_str().is_some_and(|reason| reason.contains(part));
            is_told && member["conditions"] == serde_json::json!(["refused"])
        });
        let status = up.status();
        let action = status["action"].as_str().expect("an action");
        assert!(!action.contains("hosts and network are up"), "{part}: {action}");
        assert!(action.contains("certificates") && action.contains(&bare[2]), "{part}: {action}");
    };
    let strict = ["--filter=exportname", "exportname-strict=true", "exportname=elsewhere"];
    let failing = ["--filter=error", "error-pread-rate=100%", "error-pread=EIO"];
    let cases: [(Option<&str>, &[&str], &str); 6] = [
        (None, &[], "refused TLS"),
        (Some("stranger"), &[], "UnknownIssuer"),
        (Some("expired"), &[], "expired"),
        (Some("distrustful"), &[], "TLS"),
        (Some("pki"), &strict, "refused export"),
        (Some("pki"), &failing, "cannot be read"),
    ];
    for (folder, more, part) in cases {
        servers.truncate(2);
        servers.push(serve(2, folder, more));
        told(part);
    }
    // It is this host that has nothing to show.
    configure(dir.path(), &bare, limits);
    up.signal("HUP");
    servers.truncate(2);
    servers.push(serve(2, Some("pki"), &[]));
    told("tls_ca");
    configure(dir.path(), &bare, &section);
    up.signal("HUP");
    until("it is back", || is_whole(&up));
    let events = up.calpe(&["events", "--json"]);
    assert!(events.contains("member_blocked") && events.contains("UnknownIssuer"), "{events}");
    up.stop();
}

/// Four hosts and one for the daemon, as network namespaces with a cable from each to the daemon's.
struct Network {
    name: String,
}

impl Network {
    /// None where this process may make no namespaces.
    fn new() -> Option<Network> {
        let name = format!("calpe{}", std::process::id());
        let made = Command::new("ip").args(["netns", "add", &format!("{name}-d")]).output();
        match made {
            Ok(output) if output.status.success() => {}
            Ok(output) if std::env::var_os("CI").is_some() => {
                panic!("no network namespace: {}", String::from_utf8_lossy(&output.stderr))
            }
            refused => {
                eprintln!(
                    "\n*** SKIPPED: an array over four hosts was NOT tested: this process can make no network namespaces \
                     (root and iproute2 are needed): {refused:?} ***\n"
                );
                return None;
            }
        }
        let network = Network { name };
        let daemon = network.namespace(None);
        run(Command::new("ip").args(["-n", &daemon, "link", "set", "lo", "up"]));
        for host in 0..4 {
            let namespace = network.namespace(Some(host));
            let near = format!("c{host}");
            run(Command::new("ip").args(["netns", "add", &namespace]));
            let peer = ["type", "veth", "peer", "name", "eth0", "netns", &namespace];
            run(Command::new("ip").args(["-n", &daemon, "link", "add", &near]).args(peer));
            run(Command::new("ip")
                .args(["-n", &daemon, "addr", "add", &format!("10.77.{host}.1/24")])
                .args(["dev", &near]));
            run(Command::new("ip")
                .args(["-n", &namespace, "addr", "add", &format!("10.77.{host}.2/24")])
                .args(["dev", "eth0"]));
            run(Command::new("ip").args(["-n", &daemon, "link", "set", &near, "up"]));
            run(Command::new("ip").args(["-n", &namespace, "link", "set", "lo", "up"]));
            network.plug(host, true);
        }
        Some(network)
    }

    fn namespace(&self, host: Option<usize>) -> String {
        host.map_or(format!("{}-d", self.name), |host| format!("{}-{host}", self.name))
    }

    /// A command on a host, or where the daemon is.
    fn command(&self, host: Option<usize>, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(host)]).arg(program).env_remove("CALPE_SOCKET");
        command
    }

    /// Takes the cable out, which sends nothing to anybody, or puts it back.
    fn plug(&self, host: usize, plugged: bool) {
        let to = if plugged { "up" } else { "down" };
        run(Command::new("ip").args(["-n", &self.namespace(Some(host)), "link", "set", "eth0", to]));
    }

    fn uri(host: usize) -> String {
        format!("nbd://10.77.{host}.2/")
    }

    #[track_caller]
    fn serve_disk(&self, host: usize, disk: &Path) -> Process {
        let address = format!("10.77.{host}.2");
        // Not nbdkit: 1.32 ends by an assertion (raw_send_socket) when a client leaves with several requests
        // unanswered, which is what clients of hosts that stand still do.
        let options = ["-t", "-e", "0", "-f", "raw", "--discard=unmap", "-b", &address];
        let process = Process::start(self.command(Some(host), "qemu-nbd").args(options).arg(disk));
        until("the host serves", || {
            try_run(self.command(Some(host), "nbdinfo").arg("--size").arg(Network::uri(host)))
                .status
                .success()
        });
        process
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in [None, Some(0), Some(1), Some(2), Some(3)] {
            // One that was not made yet cannot be removed.
            let _ = Command::new("ip").args(["netns", "del", &self.namespace(host)]).output();
        }
    }
}

#[test]
fn an_array_over_four_hosts_survives_the_loss_of_two_and_catches_them_up() {
    let Some(network) = Network::new() else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let disks: Vec<PathBuf> = (0..4).map(|host| dir.path().join(format!("disk{host}"))).collect();
    disks.iter().for_each(|disk| sparse(disk, DISK));
    let mut hosts: Vec<Process> = (0..4).map(|host| network.serve_disk(host, &disks[host])).collect();
    let uris: Vec<String> = (0..4).map(Network::uri).collect();
    let binary = env!("CARGO_BIN_EXE_calpe");
    run(network
        .command(None, binary)
        .args(["create", "tank", "--data", "2", "--parity", "2", "--size", &VOLUME.to_string()])
        .args(&uris));
    let config = configure(dir.path(), &uris, "remote_timeout = 4\nremote_grace = 1\n");
    let mut command = network.command(None, binary);
    command.arg("serve").arg("--config").arg(&config);
    let up = Up::spawn(dir.path(), command);
    let mut working = Working::start(&up.socket(), load());
    working.go_on(500);

    type Loss = fn(&Network, &mut Vec<Process>, usize);
    type Return = fn(&Network, &mut Vec<Process>, usize, &Path);
    let scenes: [(&str, Loss, Return); 3] = [
        (
            "killed",
            |_, hosts, host| hosts[host].signal("KILL"),
            |network, hosts, host, disk| {
                hosts[host] = network.serve_disk(host, disk);
            },
        ),
        (
            "unplugged",
            |network, _, host| network.plug(host, false),
            |network, _, host, _| network.plug(host, true),
        ),
        (
            "stopped",
            |_, hosts, host| hosts[host].signal("STOP"),
            |_, hosts, host, _| {
                hosts[host].signal("CONT");
            },
        ),
    ];
    for (turn, (word, lose, give_back)) in scenes.into_iter().enumerate() {
        let lost = [turn, (turn + 1) % 4];
        lost.iter().for_each(|&host| lose(&network, &mut hosts, host));
        // Whatever waits for a lost host waits no longer than the limit of a request, and some for two of
        // them.
        let took = working.go_on(200);
        eprintln!("hosts {lost:?} {word}: the load went on after {took:?}");
        assert!(took < Duration::from_secs(15), "{word}: {took:?}\n{}", up.log());
        until("both are out", || {
            let states = states(&up);
            // One that is back counts as degraded by the errors it had.
            let is_out = |host: usize| ["FAULTED", "MISSING"].contains(&states[host].as_str());
            (0..4).all(|host| is_out(host) == lost.contains(&host))
        });
        working.go_on(200);
        lost.iter().for_each(|&host| give_back(&network, &mut hosts, host, &disks[host]));
        let begun = Instant::now();
        until("both are back", || {
            assert!(!working.thread.is_finished(), "the load has failed:\n{}", up.log());
            let is_late = begun.elapsed() > PATIENCE * 7 / 8;
            assert!(!is_late, "{word}: not back: {:?}\n{}", up.status(), up.log());
            is_whole(&up)
        });
        eprintln!("hosts {lost:?} are caught up after {:?}", begun.elapsed());
        working.go_on(200);
        let load = working.end();
        assert_eq!(up.scrub().0, 0, "{word}:\n{}", up.log());
        working = Working::start(&up.socket(), load);
    }
    let mut load = working.end();
    let log = up.log();
    let caught_up = log.lines().filter(|line| line.contains("being caught up with what it missed")).count();
    assert!(caught_up >= 6 && !log.contains("being rebuilt"), "{caught_up}\n{log}");
    load.settle(&mut Client::connect(&up.socket()).expect("a client")).expect("all can be read");
    up.stop();
    run(network.command(None, binary).arg("check").args(&uris));
}

#[test]
fn other_storage_behind_the_uri_of_a_member_is_named_and_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let sockets: Vec<PathBuf> = (0..3).map(|index| dir.path().join(format!("s{index}"))).collect();
    let disk = dir.path().join("disk2");
    let serve = |index: usize| {
        let file = dir.path().join(format!("disk{index}"));
        if !file.exists() {
            sparse(&file, DISK);
        }
        // What a server leaves behind when it is killed.
        let _ = fs::remove_file(&sockets[index]);
        Process::start(
            Command::new("nbdkit").args(["-f", "--unix"]).arg(&sockets[index]).arg("file").arg(&file),
        )
    };
    let mut servers: Vec<Process> = (0..3).map(serve).collect();
    let uris: Vec<String> = sockets.iter().map(|socket| unix_uri(socket)).collect();
    uris.iter().for_each(|uri| answers(uri));
    create(&uris, 1);
    let config = configure(dir.path(), &uris, "remote_timeout = 3\nremote_grace = 1\n");
    let up = Up::serve(dir.path(), &config);
    until("it is served", || is_whole(&up));
    servers.pop();
    fs::rename(&disk, dir.path().join("aside")).unwrap();
    servers.push(serve(2));
    let member = |up: &Up| up.status()["members"][2].clone();
    until("the storage is looked at", || {
        member(&up)["reason"].as_str().is_some_and(|reason| reason.contains("holds no Calpe superblock"))
    });
    let (status, text) = (up.status(), up.calpe(&["status"]));
    let action = status["action"].as_str().unwrap();
    assert!(!action.contains("when it answers") && !text.contains("comes back by itself; "), "{text}");
    for part in [uris[2].as_str(), "leads to the device", "'calpe replace tank 2 NEW'"] {
        assert!(action.contains(part), "no '{part}' in {action}");
    }
    assert_eq!(member(&up)["conditions"], serde_json::json!(["displaced"]), "{text}");
    // Back to a server that does not answer, and then to its own device.
    servers.pop();
    until("nothing is in its place", || member(&up)["conditions"] == serde_json::json!(["returning"]));
    fs::rename(dir.path().join("aside"), &disk).unwrap();
    servers.push(serve(2));
    until("it is back", || is_whole(&up));
    // Its own device, cut off or read-only, is no host that does not answer either.
    let short = dir.path().join("short");
    fs::copy(&disk, &short).unwrap();
    fs::File::options().write(true).open(&short).unwrap().set_len(DISK / 2).unwrap();
    for (file, flag, told) in
        [(&short, None, "it was cut off, or copied in part"), (&disk, Some("--readonly"), "is read-only")]
    {
        servers.pop();
        let _ = fs::remove_file(&sockets[2]);
        let mut command = Command::new("nbdkit");
        command.args(["-f", "--unix"]).arg(&sockets[2]).args(flag).arg("file").arg(file);
        servers.push(Process::start(&mut command));
        until(told, || member(&up)["reason"].as_str().is_some_and(|reason| reason.contains(told)));
        assert_eq!(member(&up)["conditions"], serde_json::json!(["displaced"]), "{told}");
        servers.pop();
        servers.push(serve(2));
        until("it is back", || is_whole(&up));
    }
    up.stop();
}

#[test]
fn one_export_that_keeps_nothing_is_not_called_two() {
    let dir = tempfile::tempdir().unwrap();
    let sockets = ["null", "one", "two"].map(|name| dir.path().join(name));
    let _null =
        Process::start(Command::new("nbdkit").args(["-f", "--unix"]).arg(&sockets[0]).args(["null", "64M"]));
    let _memory = Process::start(
        Command::new("nbdkit").args(["-f", "--unix"]).arg(&sockets[1]).args(["memory", "64M"]),
    );
    std::os::unix::fs::symlink(&sockets[1], &sockets[2]).unwrap();
    let uris = sockets.each_ref().map(|socket| unix_uri(socket));
    uris.iter().for_each(|uri| answers(uri));
    let refused = |parity: &str, uris: &[String]| {
        let output = try_run(calpe().args(["create", "tank", "-k1", parity]).args(uris));
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let told = refused("-m0", &uris[..1]);
    assert!(told.contains("does not keep what is written to it") && !told.contains("one place"), "{told}");
    let told = refused("-m1", &uris[1..]);
    assert!(told.contains("two of the paths and URIs lead to one place"), "{told}");
    // A file by its path and by the server that has it, whichever is named first.
    let file = dir.path().join("file");
    fs::write(&file, [0; 4096]).unwrap();
    fs::File::options().write(true).open(&file).unwrap().set_len(64 << 20).unwrap();
    let socket = dir.path().join("server");
    let _file =
        Process::start(Command::new("nbdkit").args(["-f", "--unix"]).arg(&socket).arg("file").arg(&file));
    let both = [file.display().to_string(), unix_uri(&socket)];
    answers(&both[1]);
    for order in [both.clone(), [both[1].clone(), both[0].clone()]] {
        let told = refused("-m1", &order);
        assert!(told.contains("two of the paths and URIs lead to one place"), "{told}");
        assert_eq!(fs::read(&file).unwrap(), vec![0; 64 << 20], "what was there is not given back");
    }
}

/// There are no locks over NBD: the daemon is asked.
#[test]
fn remote_members_that_the_daemon_serves_are_neither_checked_nor_created_over() {
    let dir = tempfile::tempdir().expect("a directory");
    let (_servers, uris) = three_file_servers(dir.path());
    let up = Up::serve(dir.path(), &configure(dir.path(), &uris, ""));
    until("it is served", || is_whole(&up));
    let asked = |line: &str| {
        let output = try_run(up.command(&[]).args(line.split_whitespace()).args(&uris));
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&said).into_owned())
    };
    for line in ["check", "create tank -k 2 -m 1 --force", "create tank -k 2 -m 1 --force -n"] {
        let (code, said) = asked(line);
        let why = format!("{}: is in use by the daemon, as member 0 of array 'tank'", uris[0]);
        assert!(code == Some(1) && said.contains(&why), "{line}: {said}");
    }
    let working = Working::start(&up.socket(), load());
    working.go_on(20);
    working.end();
    up.calpe(&["export", "tank"]);
    let (code, said) = asked("check");
    assert!(code == Some(0) && said.contains("array 'tank' is good") && !said.contains("noticed"), "{said}");
    up.calpe(&["import", "tank"]);
    let mut client = Client::connect(&up.socket()).expect("the daemon accepts");
    client.call(&Request::new(Nbd::Write, 0, 4096), &[7; 4096]).expect("connected").expect("written");
    up.kill();
    let output = try_run(calpe().current_dir(dir.path()).arg("check").args(&uris));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("not marked clean") && said.contains("may be of writes under way"), "{said}");
}
