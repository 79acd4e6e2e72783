//! What the daemon keeps of its arrays over a restart, and what an import looks for and promises.

use super::{gpu_off, member, offline, online, replace};
use crate::control::{ArrayReport, ErrorCode, Reply, Request, RequestError};
use crate::daemon::arrays::outcome::Done;
use crate::daemon::arrays::settings::ServeOptions;
use crate::daemon::devices::create::{CreatePlan, CreateRequest, DEFAULT_CHUNK};
use crate::daemon::devices::import::tests::created_in;
use crate::daemon::devices::search::{search, search_with};
use crate::daemon::imports::opening::open_and_serve;
use crate::daemon::reactor::ListenAddress;
use crate::daemon::service::{Daemon, ServiceConfig};
use crate::member::{Access, DEFAULT_MEMBER_TIMEOUT, Device};
use calpe_core::format::{ChecksumKind, VolumeKind};
use nix::fcntl::{Flock, FlockArg};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A folder with 'tank', 2+1, in DIR/m, and daemons one after the other that keep their state in
/// DIR/state.
struct Place {
    dir: TempDir,
}

/// A daemon that ends with the test.
struct Running(Daemon);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.shutdown().unwrap();
    }
}

fn daemon(state_dir: Option<PathBuf>) -> Running {
    let config = ServiceConfig {
        metadata_memory: None,
        resident: false,
        memory: 32 << 20,
        reactors: Some(2),
        connections_max: 20,
        search: Vec::new(),
        gpu: gpu_off(),
        runtime_dir: None,
        state_dir,
    };
    Running(Daemon::start(config).unwrap())
}

fn import(array: Option<&str>, dirs: &[&Path], dry_run: bool) -> Request {
    Request::Import {
        array: array.map(str::to_owned),
        all: array.is_none(),
        dirs: dirs.iter().map(|dir| (*dir).to_owned()).collect(),
        force: false,
        once: false,
        dry_run,
    }
}

impl Running {
    fn done(&self, request: Request) -> Done {
        match self.0.handle(request) {
            Reply::Done { message, warnings, failures } => Done { message, warnings, failures },
            other => panic!("{other:?}"),
        }
    }

    fn refused(&self, request: Request) -> RequestError {
        match self.0.handle(request) {
            Reply::Error(error) => error,
            other => panic!("{other:?}"),
        }
    }

    fn report(&self) -> ArrayReport {
        self.0.arrays().status(Some("tank")).unwrap().remove(0)
    }

    fn until(&self, what: &str, is_so: impl Fn(&ArrayReport) -> bool) -> ArrayReport {
        let begun = Instant::now();
        loop {
            let report = self.report();
            if is_so(&report) {
                return report;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}: {report:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn volume(&self, socket: &Path, array: &str) -> Device {
        let uri = format!("nbd+unix:///{array}?socket={}", socket.display());
        Device::open(Path::new(&uri), Access::Exclusive).unwrap()
    }
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("m")).unwrap();
        created_in(&dir.path().join("m"), "tank", 2, 1);
        Place { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts a daemon, once the one before has written its state and released the directory, which its own
    /// thread does.
    fn start(&self) -> Running {
        let begun = Instant::now();
        while let Ok(file) = fs::File::open(self.path("state/lock")) {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(_) => break,
                Err((_, errno)) => assert!(begun.elapsed() < Duration::from_secs(60), "{errno}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        daemon(Some(self.path("state")))
    }

    /// Serves the array, with rebuilds that take seconds.
    fn serve(&self, running: &Running) -> ArrayReport {
        let found = search(&[self.path("m")], DEFAULT_MEMBER_TIMEOUT);
        let slow = Some(1 << 20);
        let options = ServeOptions { rebuild_min: slow, rebuild_max: slow, ..ServeOptions::default() };
        let array = *found.arrays.keys().next().unwrap();
        open_and_serve(running.0.arrays(), &found, array, options, &[]).unwrap();
        running.until("it serves", |report| report.log.state == crate::control::LogState::Serving)
    }
}

#[test]
fn failed_requests_of_clients_are_counted_over_a_restart_until_they_are_cleared() {
    let place = Place::new();
    let socket = place.path("nbd.sock");
    let running = place.start();
    running.0.listen(&ListenAddress::Unix(socket.clone())).unwrap();
    place.serve(&running);
    let volume = running.volume(&socket, "tank");
    volume.write_at(0, &vec![7; 1 << 20]).unwrap();
    volume.flush().unwrap();
    drop(volume);
    drop(running);
    for name in ["m/m0", "m/m1"] {
        let found = search(&[place.path(name)], DEFAULT_MEMBER_TIMEOUT);
        let offset = found.arrays.values().next().unwrap()[0].superblock.data_region().offset.0;
        let file = fs::File::options().write(true).open(place.path(name)).unwrap();
        file.write_all_at(&[1; 4096], offset).unwrap();
    }
    let running = place.start();
    fs::remove_file(&socket).ok();
    running.0.listen(&ListenAddress::Unix(socket.clone())).unwrap();
    place.serve(&running);
    let volume = running.volume(&socket, "tank");
    assert!(volume.read_at(0, &mut vec![0; 1 << 20]).is_err());
    drop(volume);
    let before = running.report().errors.client;
    assert!(before > 0);
    drop(running);
    for _ in 0..2 {
        let running = place.start();
        assert_eq!(place.serve(&running).errors.client, before);
    }
    let running = place.start();
    place.serve(&running);
    running.done(Request::Clear { array: "tank".into(), member: Some(member(0)), dry_run: false });
    assert_eq!(running.report().errors.client, before, "they are not of a member");
    running.done(Request::Clear { array: "tank".into(), member: None, dry_run: false });
    assert_eq!(running.report().errors.client, 0);
    drop(running);
    let running = place.start();
    assert_eq!(place.serve(&running).errors.client, 0);
}

#[test]
fn a_replacement_that_was_given_up_is_told_over_restarts_until_it_is_cleared() {
    let place = Place::new();
    let socket = place.path("nbd.sock");
    let reason = |report: &ArrayReport| report.members[1].reason.clone().unwrap_or_default();
    let running = place.start();
    running.0.listen(&ListenAddress::Unix(socket.clone())).unwrap();
    place.serve(&running);
    let volume = running.volume(&socket, "tank");
    volume.write_at(0, &vec![7; 6 << 20]).unwrap();
    volume.flush().unwrap();
    drop(volume);
    running.done(replace(member(1), place.path("new"), false, false));
    drop(running);
    fs::remove_file(place.path("new")).unwrap();
    // Given up by the start.
    for _ in 0..2 {
        let running = place.start();
        let report = place.serve(&running);
        let told = reason(&report);
        assert!(told.starts_with("its replacement was given up: ") && told.contains("/new"), "{report:?}");
        assert!(report.status.contains(&told), "{}", report.status);
    }
    // Given up while the array is served.
    let running = place.start();
    place.serve(&running);
    running.done(Request::Clear { array: "tank".into(), member: Some(member(1)), dry_run: false });
    assert_eq!(reason(&running.report()), "");
    running.done(replace(member(1), place.path("second"), false, false));
    running.until("it is recorded", |report| report.members[1].replacement.is_some());
    fs::remove_file(place.path("second")).unwrap();
    let told = reason(&running.until("it is given up", |report| report.members[1].replacement.is_none()));
    assert!(told.starts_with("its replacement was given up: "), "{told}");
    drop(running);
    let running = place.start();
    assert_eq!(reason(&place.serve(&running)), told);
    running.done(Request::Clear { array: "tank".into(), member: None, dry_run: false });
    drop(running);
    let running = place.start();
    assert_eq!(reason(&place.serve(&running)), "");
}

#[test]
fn why_a_member_is_out_of_service_is_told_over_restarts() {
    for fail in [false, true] {
        let place = Place::new();
        let running = place.start();
        place.serve(&running);
        let out = |fail| match fail {
            true => Request::Fail { array: "tank".into(), member: member(1), dry_run: false },
            false => offline(1, false),
        };
        running.done(out(true));
        // A new device that leaves before it is built.
        running.done(replace(member(1), place.path("m/new"), false, false));
        running.done(out(fail));
        let reason = |report: &ArrayReport| report.members[1].reason.clone().unwrap_or_default();
        let cause = reason(&running.report());
        assert!(cause.contains("by an administrator"), "{cause}");
        drop(running);
        for _ in 0..2 {
            let running = place.start();
            let report = place.serve(&running);
            assert_eq!(
                (reason(&report), &report.members[1].name),
                (cause.clone(), &place.path("m/new").display().to_string())
            );
        }
        // And the reason for that, once, however often it is started.
        fs::write(place.path("m/new"), vec![0; 64 << 20]).unwrap();
        for _ in 0..2 {
            let running = place.start();
            let found = search_with(&[place.path("m")], &[place.path("m/new")], DEFAULT_MEMBER_TIMEOUT);
            let array = *found.arrays.keys().next().unwrap();
            let report =
                open_and_serve(running.0.arrays(), &found, array, ServeOptions::default(), &[]).unwrap().0;
            let told = reason(&report);
            let (before, after) = told.split_once("; ").expect(&told);
            assert!(before == cause && after.contains("holds no Calpe superblock"), "{told}");
            assert_eq!(told.matches("superblock any more").count(), 1, "{told}");
        }
    }
}

#[test]
fn members_are_looked_for_where_they_were_found_and_nobody_is_told_of_a_section_that_is_not_there() {
    let place = Place::new();
    let running = place.start();
    let m = place.path("m");
    running.done(import(Some("tank"), &[&m], false));
    running.done(Request::Export { array: "tank".into(), force: false, dry_run: false });
    running.done(import(Some("tank"), &[], false));
    running.done(offline(0, false));
    running.until("its device is closed", |_| Device::open(&m.join("m0"), Access::Exclusive).is_ok());
    let done = running.done(online(0, Some(m.join("m0"))));
    assert_eq!(done.warnings, Vec::<String>::new());
    running.until("it is back", |report| report.scan.is_empty());
    let done = running.done(replace(member(0), m.join("new"), false, true));
    assert_eq!(done.warnings, Vec::<String>::new());
    fs::create_dir(place.path("elsewhere")).unwrap();
    let done = running.done(replace(member(0), place.path("elsewhere/new"), false, true));
    let told = done.warnings.join("\n");
    assert!(told.contains("lies outside of the places") && told.contains("is remembered in"), "{told}");
    assert!(!told.contains("'search'"), "{told}");
    drop(running);
    let running = place.start();
    let imports = running.0.arrays().memory.imports_of_before(&[]);
    assert!(imports[0].search.contains(&m), "{:?}", imports[0].search);
}

/// What the list says of arrays in a directory.
fn listed(daemon: &Daemon, dir: &Path) -> Vec<crate::control::Importable> {
    match daemon.handle(Request::ListImportable { dirs: vec![dir.into()] }) {
        Reply::Importable { arrays, .. } => arrays,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_list_says_of_an_array_whose_name_is_taken_that_it_cannot_be_imported() {
    let place = Place::new();
    let daemon = daemon(None);
    daemon.done(import(Some("tank"), &[&place.path("m")], false));
    let twin = place.path("twin");
    fs::create_dir(&twin).unwrap();
    created_in(&twin, "tank", 1, 1);
    let arrays = listed(&daemon.0, &twin);
    let problem = arrays[0].problem.as_deref().unwrap_or_default();
    assert!(
        problem.contains("only when that is exported") && problem.contains("calpe export tank"),
        "{problem}"
    );
    assert!(problem.contains(&format!("calpe import {}", arrays[0].uuid)), "{problem}");
}

#[test]
fn the_list_says_of_copies_of_a_member_what_an_import_does() {
    let place = Place::new();
    let twin = place.path("twin");
    fs::create_dir(&twin).unwrap();
    created_in(&twin, "copied", 2, 1);
    let daemon = daemon(None);
    assert_eq!(listed(&daemon.0, &twin)[0].usable, 3);
    let member = listed(&daemon.0, &twin)[0].members[1].path.clone().unwrap();
    fs::copy(&member, twin.join("a-copy")).unwrap();
    let arrays = listed(&daemon.0, &twin);
    assert_eq!((arrays[0].usable, arrays[0].problem.as_ref()), (2, None));
    assert_eq!(arrays[0].members[0].note, None);
    let note = arrays[0].members[1].note.as_deref().unwrap_or_default();
    assert!(note.contains("a-copy") && note.contains("so none is used"), "{note}");
    let would = daemon.done(import(Some("copied"), &[&twin], true)).message;
    assert!(would.contains("2 of 3"), "{would}");
}

#[test]
fn a_dry_import_and_the_list_refuse_what_an_import_refuses() {
    let place = Place::new();
    let m = place.path("m");
    let (first, second) = (place.start(), daemon(None));
    first.done(import(Some("tank"), &[&m], false));
    let would = second.refused(import(Some("tank"), &[&m], true));
    assert_eq!(would, second.refused(import(Some("tank"), &[&m], false)));
    match second.0.handle(Request::ListImportable { dirs: vec![m.clone()] }) {
        Reply::Importable { arrays, .. } => {
            let problem = arrays[0].problem.as_deref().unwrap_or_default();
            assert!(problem.contains("is in use by another daemon"), "{problem}");
        }
        other => panic!("{other:?}"),
    }
    first.done(Request::Export { array: "tank".into(), force: false, dry_run: false });
    // Two of one name.
    fs::create_dir(place.path("twin")).unwrap();
    created_in(&place.path("twin"), "tank", 1, 1);
    let all = |dry_run| second.done(import(None, &[&m, &place.path("twin")], dry_run));
    let (would, did) = (all(true), all(false));
    assert_eq!((would.message.lines().count(), would.failures.len()), (1, 1), "{would:?}");
    assert_eq!((did.message.lines().count(), did.failures.len()), (1, 1), "{did:?}");
    assert_eq!(would.failures[0].code, did.failures[0].code);
    // Nothing is served yet: the dry run would import the other one first.
    let told = &would.failures[0].message;
    assert!(told.contains("would be imported before it") && !told.contains("is served already"), "{told}");
    assert!(did.failures[0].message.contains("'tank' is served already"), "{did:?}");
    let uuid = told.split("'calpe import ").nth(1).and_then(|rest| rest.split(' ').next()).expect(told);
    second.done(Request::Export { array: "tank".into(), force: false, dry_run: false });
    second.done(import(Some(uuid), &[&m, &place.path("twin")], false));
}

/// Creates an array of one data and one parity member.
fn create_pair(name: &str, checksum: ChecksumKind, volume_bytes: u64, members: Vec<PathBuf>) {
    let request = CreateRequest {
        name: name.into(),
        data: 1,
        parity: 1,
        chunk: DEFAULT_CHUNK,
        checksum,
        volume: VolumeKind::Plain,
        volume_bytes: Some(volume_bytes),
        lanes: 1,
        members,
        force: false,
    };
    CreatePlan::new(request).unwrap().execute(0).unwrap();
}

#[test]
fn a_file_is_created_as_a_replacement_where_all_members_are_remote() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nbd.sock");
    let exporter = daemon(None);
    exporter.0.listen(&ListenAddress::Unix(socket.clone())).unwrap();
    let mut uris = Vec::new();
    for name in ["e0", "e1"] {
        let place = dir.path().join(name);
        fs::create_dir(&place).unwrap();
        create_pair(name, ChecksumKind::None, 64 << 20, vec![place.join("a"), place.join("b")]);
        exporter.done(import(Some(name), &[&place], false));
        uris.push(PathBuf::from(format!("nbd+unix:///{name}?socket={}", socket.display())));
    }
    create_pair("tank", ChecksumKind::Blake3, 8 << 20, uris.clone());
    let running = daemon(None);
    let places: Vec<&Path> = uris.iter().map(PathBuf::as_path).collect();
    running.done(import(Some("tank"), &places, false));
    let new = dir.path().join("new.img");
    let would = running.done(replace(member(0), new.clone(), false, true));
    assert!(would.message.contains("a new sparse file") && !new.exists(), "{would:?}");
    let nowhere = running.refused(replace(member(0), dir.path().join("no/new.img"), false, true));
    assert_eq!(nowhere.code, ErrorCode::Device);
    running.done(replace(member(0), new.clone(), false, false));
    let report = running.until("it is replaced", |report| report.members[0].replacement.is_none());
    assert_eq!(report.members[0].name, new.display().to_string());
    drop(running);
}
