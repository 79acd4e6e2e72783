//! The daemon as an administrator meets it: real files, a real reactor, requests in, replies out.

mod dry_run;
mod restarts;
mod returns;

use super::control_server::ControlServer;
use crate::control::{
    ArrayReport, ArrayState, ErrorCode, LogReport, LogState, MAX_REPLY_BYTES, MemberRef, MemberState,
    PROTOCOL_VERSION, Reply, Request, RequestError, ScrubAction, read_message, write_message,
};
use crate::daemon::arrays::serve::serve;
use crate::daemon::arrays::settings::ServeOptions;
use crate::daemon::arrays::waiting::Waiting;
use crate::daemon::config::ArrayChoice;
use crate::daemon::devices::import;
use crate::daemon::devices::import::tests::created_in;
use crate::daemon::devices::search::search;
use crate::daemon::events::News;
use crate::daemon::imports::opening::losses;
use crate::daemon::service::{Daemon, ServiceConfig};
use crate::member::{Access, DEFAULT_MEMBER_TIMEOUT, Device, DeviceError};
use calpe_core::volume::NoticeLevel;
use std::io::{BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn gpu_off() -> calpe_gpu::GpuConfig {
    calpe_gpu::GpuConfig { mode: calpe_gpu::Mode::Off, ..Default::default() }
}

struct Bench {
    dir: TempDir,
    daemon: Arc<Daemon>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.daemon.shutdown().unwrap();
    }
}

impl Bench {
    /// A daemon that serves 'tank', 2+2 on files m0 to m3.
    fn new() -> Bench {
        let dir = tempfile::tempdir().unwrap();
        created_in(dir.path(), "tank", 2, 2);
        let config = ServiceConfig {
            metadata_memory: None,
            resident: false,
            memory: 64 << 20,
            reactors: Some(2),
            connections_max: 10,
            search: vec![dir.path().into()],
            gpu: gpu_off(),
            runtime_dir: None,
            state_dir: None,
        };
        let bench = Bench { dir, daemon: Arc::new(Daemon::start(config).unwrap()) };
        let import = Request::Import {
            array: None,
            all: true,
            dirs: Vec::new(),
            force: false,
            once: false,
            dry_run: false,
        };
        assert!(bench.done(import).contains("ONLINE"));
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn done(&self, request: Request) -> String {
        match self.daemon.handle(request) {
            Reply::Done { message, .. } => message,
            other => panic!("{other:?}"),
        }
    }

    fn refused(&self, request: Request) -> RequestError {
        match self.daemon.handle(request) {
            Reply::Error(error) => error,
            other => panic!("{other:?}"),
        }
    }

    fn report(&self) -> ArrayReport {
        self.daemon.arrays().status(Some("tank")).unwrap().remove(0)
    }

    fn wait_until(&self, what: impl Fn(&ArrayReport) -> bool) -> ArrayReport {
        let start = Instant::now();
        loop {
            let report = self.report();
            if what(&report) {
                return report;
            }
            assert!(start.elapsed() < Duration::from_secs(30), "{report:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn wait_online(&self) -> ArrayReport {
        self.wait_until(|report| report.state == ArrayState::Online && report.scan.is_empty())
    }
}

fn member(index: u16) -> MemberRef {
    MemberRef::Index(index)
}

fn offline(index: u16, dry_run: bool) -> Request {
    Request::Offline { array: "tank".into(), member: member(index), dry_run }
}

fn online(index: u16, path: Option<PathBuf>) -> Request {
    Request::Online { array: "tank".into(), member: member(index), path, dry_run: false }
}

fn replace(old: MemberRef, new: PathBuf, force: bool, dry_run: bool) -> Request {
    Request::Replace { array: "tank".into(), old, new, force, dry_run }
}

#[test]
fn a_member_goes_offline_and_comes_back_from_wherever_it_is() {
    let bench = Bench::new();
    assert!(bench.done(offline(1, true)).starts_with("would"));
    assert_eq!(bench.report().state, ArrayState::Online, "a dry run changes nothing");
    bench.done(offline(1, false));
    let report = bench.report();
    assert_eq!((report.state, report.members[1].state), (ArrayState::Degraded, MemberState::Offline));
    assert_eq!(report.members[1].name, bench.path("m1").display().to_string());
    bench.wait_until(|_| Device::open(&bench.path("m1"), Access::Exclusive).is_ok());
    std::fs::rename(bench.path("m1"), bench.path("elsewhere")).unwrap();
    bench.done(online(1, None));
    let report = bench.wait_online();
    assert_eq!(report.members[1].name, bench.path("elsewhere").display().to_string());
}

#[test]
fn only_the_own_device_of_a_member_brings_it_back() {
    let bench = Bench::new();
    let other = tempfile::tempdir().unwrap();
    created_in(other.path(), "pond", 2, 1);
    std::fs::File::create(bench.path("blank")).unwrap().set_len(64 << 20).unwrap();
    assert!(bench.done(online(0, None)).contains("ONLINE already"));
    assert_eq!(bench.refused(online(0, Some(bench.path("blank")))).code, ErrorCode::Refused);
    bench.done(offline(0, false));
    for (path, why) in [
        (bench.path("blank"), "no Calpe superblock"),
        (other.path().join("m0"), "another array, 'pond'"),
        (bench.path("m1"), "is member 1 of array 'tank': name the device of member 0"),
        (bench.path("nowhere"), "no such file"),
    ] {
        let error = bench.refused(online(0, Some(path)));
        assert!(error.message.contains(why), "{error}");
    }
    std::fs::remove_file(bench.path("m0")).unwrap();
    let error = bench.refused(online(0, None));
    assert!(error.message.contains("was not found") && error.message.contains("calpe replace"), "{error}");
}

#[test]
fn a_member_that_was_overwritten_while_offline_is_told_to_be_replaced_in_its_place() {
    let bench = Bench::new();
    bench.done(offline(3, false));
    let path = bench.path("m3");
    bench.wait_until(|_| Device::open(&path, Access::Exclusive).is_ok());
    let bytes = std::fs::metadata(&path).unwrap().len();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    for at in [0, bytes - 32768] {
        std::os::unix::fs::FileExt::write_all_at(&file, &[0; 32768], at).unwrap();
    }
    let advice = format!("'calpe replace tank 3 {}'", path.display());
    let error = bench.refused(online(3, None));
    assert!(
        error.message.contains("holds no Calpe superblock") && error.message.contains(&advice),
        "{error}"
    );
    let action = bench.report().action;
    assert!(action.contains(&advice) && !action.contains("calpe online"), "{action}");
    bench.done(replace(member(3), path, false, false));
    assert!(bench.wait_online().members[3].conditions.is_empty());
}

#[test]
fn an_import_answers_with_what_its_events_tell_of_losses() {
    let bench = Bench::new();
    let before = bench.daemon.arrays().events.next();
    let report = bench.wait_until(|report| report.log.state == LogState::Serving);
    let tell = |array: &str, kind: &'static str, level, text: &str| {
        bench.daemon.arrays().events.tell(News::new(Some(array), kind, level, text.into()));
    };
    tell("tank", "rows_lost", NoticeLevel::Error, "3 rows could not be replayed");
    tell("tank", "log_dropped", NoticeLevel::Warning, "1 batch was dropped");
    tell("tank", "log_replayed", NoticeLevel::Info, "the redo log was replayed");
    tell("pond", "rows_lost", NoticeLevel::Error, "9 rows could not be replayed");
    let told = losses(bench.daemon.arrays(), &report, before);
    assert_eq!(told, ["array 'tank': 3 rows could not be replayed", "array 'tank': 1 batch was dropped"]);
    let replaying = LogReport { state: LogState::Replaying, reason: None, yields_to_force: false };
    let told = losses(
        bench.daemon.arrays(),
        &ArrayReport { log: replaying, ..report },
        bench.daemon.arrays().events.next(),
    );
    assert!(told.len() == 1 && told[0].contains("still being replayed"), "{told:?}");
}

#[test]
fn a_member_whose_path_holds_another_file_now_is_told_as_that() {
    let bench = Bench::new();
    let path = bench.path("m2");
    std::fs::write(bench.path("new"), "a text").unwrap();
    std::fs::rename(bench.path("new"), &path).unwrap();
    let report = bench.wait_until(|report| report.state == ArrayState::Degraded);
    let reason = report.members[2].reason.as_deref().unwrap_or_default();
    assert!(reason.contains("another file is at its path now"), "{reason}");
}

#[test]
fn a_deleted_file_is_replaced_by_a_new_one_of_the_same_name() {
    let bench = Bench::new();
    std::fs::remove_file(bench.path("m2")).unwrap();
    let report = bench.wait_until(|report| report.state == ArrayState::Degraded);
    assert_eq!(report.members[2].state, MemberState::Missing);
    let by_path = MemberRef::Path(bench.path("m2"));
    assert!(bench.done(replace(by_path.clone(), bench.path("m2"), false, true)).contains("new sparse file"));
    assert!(!bench.path("m2").exists());
    bench.done(replace(by_path, bench.path("m2"), false, false));
    bench.wait_online();
    let len = |name: &str| std::fs::metadata(bench.path(name)).unwrap().len();
    assert_eq!(len("m2"), len("m1"));
}

#[test]
fn a_replacement_must_be_worthless_large_enough_and_its_own() {
    let bench = Bench::new();
    let foreign = tempfile::tempdir().unwrap();
    created_in(foreign.path(), "pond", 1, 1);
    std::fs::File::create(bench.path("short")).unwrap().set_len(1 << 20).unwrap();
    for (path, code) in [
        (foreign.path().join("m0"), ErrorCode::NeedsForce),
        (bench.path("short"), ErrorCode::Device),
        (bench.path("m1"), ErrorCode::Refused),
        (bench.path("no/such/dir/m"), ErrorCode::Device),
        (PathBuf::from("/dev/calpe-nonexistent"), ErrorCode::Device),
        (bench.dir.path().into(), ErrorCode::Device),
    ] {
        let error = bench.refused(replace(member(0), path.clone(), false, false));
        assert_eq!(error.code, code, "{}: {error}", path.display());
    }
    let pond = search(&[foreign.path().into()], DEFAULT_MEMBER_TIMEOUT);
    assert_eq!(pond.arrays.values().next().unwrap().len(), 2, "what is refused is untouched");
    bench.done(replace(member(0), foreign.path().join("m0"), true, false));
    let report = bench.wait_online();
    assert_eq!(report.members[0].name, foreign.path().join("m0").display().to_string());
    // The old device is free, and has no part in the array any more.
    bench.wait_until(|_| Device::open(&bench.path("m0"), Access::Exclusive).is_ok());
}

#[test]
fn what_is_forbidden_is_forbidden_to_the_user_of_the_daemon() {
    let error = RequestError::from(DeviceError::Permission { path: "/srv/m0".into() });
    let own = super::peer::Owner::own();
    assert_eq!(error.code, ErrorCode::Device);
    let told = format!("/srv/m0: permission denied to the daemon, which runs as {own}");
    assert!(error.message.starts_with(&told), "{error}");
    let error = crate::daemon::members::replace::uncreatable(&PathBuf::from("/srv/new"));
    assert!(error.message.contains(&format!("runs as {own}, may not create a file there")), "{error}");
}

#[test]
fn members_that_are_not_there_are_told_by_all_their_names() {
    let bench = Bench::new();
    let uuid = bench.report().members[3].uuid;
    let fail = |member| Request::Fail { array: "tank".into(), member, dry_run: true };
    assert!(bench.done(fail(MemberRef::Uuid(uuid))).contains("member 3"));
    assert!(bench.done(fail(MemberRef::Path(bench.path("./m3")))).contains("member 3"));
    for unknown in [member(4), MemberRef::Uuid(uuid::Uuid::nil()), MemberRef::Path("/m3".into())] {
        assert_eq!(bench.refused(fail(unknown)).code, ErrorCode::NoSuchMember);
    }
    let error = bench.refused(Request::Fail { array: "pond".into(), member: member(0), dry_run: false });
    assert_eq!(error.code, ErrorCode::NoSuchArray);
}

#[test]
fn a_failed_array_comes_back_with_its_members() {
    let bench = Bench::new();
    for name in ["m0", "m1", "m2"] {
        std::fs::rename(bench.path(name), bench.path(&format!("{name}.away"))).unwrap();
    }
    bench.wait_until(|report| report.state == ArrayState::Failed);
    let error = bench.refused(replace(member(0), bench.path("new"), false, false));
    assert!(error.message.contains("FAILED") && !bench.path("new").exists(), "{error}");
    let export = Request::Export { array: "tank".into(), force: false, dry_run: true };
    let Reply::Done { warnings, .. } = bench.daemon.handle(export) else { panic!("it could be stopped") };
    assert!(warnings[0].contains("array 'tank' would be stopped while FAILED"), "{warnings:?}");
    for name in ["m0", "m1", "m2"] {
        std::fs::rename(bench.path(&format!("{name}.away")), bench.path(name)).unwrap();
    }
    bench.wait_until(|report| {
        bench.daemon.observe();
        report.state != ArrayState::Failed
    });
    // Those that it did not need come back as well.
    bench.wait_until(|report| {
        bench.daemon.observe();
        report.state == ArrayState::Online && report.scan.is_empty()
    });
}

#[test]
fn a_member_of_a_failed_array_that_is_to_stay_away_does() {
    let bench = Bench::new();
    std::fs::rename(bench.path("m0"), bench.path("m0.away")).unwrap();
    // The array needs the member that was in service until it failed, not this one.
    bench.wait_until(|report| report.members[0].state == MemberState::Missing);
    for name in ["m1", "m2"] {
        std::fs::rename(bench.path(name), bench.path(&format!("{name}.away"))).unwrap();
    }
    bench.wait_until(|report| {
        // The daemon records what is missing.
        bench.daemon.observe();
        report.state == ArrayState::Failed
    });
    bench.daemon.observe();
    let kept = bench.done(offline(0, false));
    assert!(kept.contains("member 0 is MISSING, and stays away until 'calpe online'"), "{kept}");
    for name in ["m0", "m1", "m2"] {
        std::fs::rename(bench.path(&format!("{name}.away")), bench.path(name)).unwrap();
    }
    let is_back = |report: &ArrayReport| {
        bench.daemon.observe();
        report.scan.is_empty() && report.members[1..].iter().all(|member| member.state == MemberState::Online)
    };
    let report = bench.wait_until(is_back);
    assert_eq!(report.members[0].state, MemberState::Missing);
    bench.done(online(0, None));
    bench.wait_online();
}

#[test]
fn an_exported_array_can_be_listed_and_imported_again() {
    let bench = Bench::new();
    assert!(matches!(
        bench.daemon.handle(Request::ListImportable { dirs: Vec::new() }),
        Reply::Importable { arrays, .. } if arrays.is_empty()
    ));
    bench.done(Request::Export { array: "tank".into(), force: false, dry_run: false });
    std::fs::remove_file(bench.path("m3")).unwrap();
    match bench.daemon.handle(Request::ListImportable { dirs: Vec::new() }) {
        Reply::Importable { arrays, .. } => {
            assert_eq!((arrays.len(), arrays[0].name.as_str()), (1, "tank"));
            assert!(arrays[0].problem.is_none(), "{:?}", arrays[0].problem);
            let paths: Vec<_> = arrays[0].members.iter().map(|member| member.path.clone()).collect();
            assert_eq!(paths[..3], ["m0", "m1", "m2"].map(|name| Some(bench.path(name))));
            assert_eq!(paths[3], None);
        }
        other => panic!("{other:?}"),
    }
    let import = |dry_run| Request::Import {
        array: Some("tank".into()),
        all: false,
        dirs: Vec::new(),
        force: false,
        once: false,
        dry_run,
    };
    assert!(bench.done(import(true)).contains("3 of 4"));
    assert!(bench.done(import(false)).contains("DEGRADED"));
    assert_eq!(bench.refused(import(false)).code, ErrorCode::Refused);
    let events = match bench.daemon.handle(Request::Events { since: 0 }) {
        Reply::Events { events, next } => {
            assert_eq!(next, events.last().unwrap().sequence + 1);
            events
        }
        other => panic!("{other:?}"),
    };
    assert!(events.iter().any(|event| event.text.contains("exported")));
}

#[test]
fn an_array_that_was_waited_for_is_not_served_again_after_an_export() {
    let bench = Bench::new();
    let which = ArrayChoice::Name("tank".into());
    bench.done(Request::Export { array: "tank".into(), force: false, dry_run: false });
    bench
        .daemon
        .arrays()
        .awaited
        .await_array(Waiting::new(which.clone(), vec![bench.path("m0")]), &bench.daemon.arrays().memory);
    assert!(bench.daemon.arrays().awaited.is_awaited(&which));
    let (dirs, array) = (Vec::new(), Some("tank".into()));
    let import = Request::Import { array, all: false, dirs, force: false, once: false, dry_run: false };
    assert!(bench.done(import).contains("ONLINE"));
    assert!(!bench.daemon.arrays().awaited.is_awaited(&which), "an export from now on would be undone");
}

#[test]
fn a_scrub_ends_with_a_result() {
    let bench = Bench::new();
    bench.done(Request::Scrub { array: "tank".into(), action: ScrubAction::Start, dry_run: false });
    let report = bench.wait_until(|report| report.last_scrub.is_some());
    assert_eq!(report.last_scrub.unwrap().errors, 0);
    let error =
        bench.refused(Request::Scrub { array: "tank".into(), action: ScrubAction::Pause, dry_run: false });
    assert_eq!(error.code, ErrorCode::Refused);
}

#[test]
fn a_read_only_array_is_served_under_its_options() {
    let dir = tempfile::tempdir().unwrap();
    let array = created_in(dir.path(), "tank", 1, 1);
    let daemon = Daemon::start(ServiceConfig {
        metadata_memory: None,
        resident: false,
        memory: 32 << 20,
        reactors: Some(2),
        connections_max: 1,
        search: Vec::new(),
        gpu: gpu_off(),
        runtime_dir: None,
        state_dir: None,
    })
    .unwrap();
    let members = search(&[dir.path().into()], DEFAULT_MEMBER_TIMEOUT).arrays.remove(&array).unwrap();
    let options = ServeOptions { read_only: true, ..ServeOptions::default() };
    let report =
        serve(daemon.arrays(), import::open(&members, false, DEFAULT_MEMBER_TIMEOUT).unwrap(), options)
            .unwrap();
    assert_eq!(report.uuid, array);
    daemon.shutdown().unwrap();
    assert!(!daemon.is_alive());
    assert!(daemon.arrays().status(Some("tank")).is_err());
}

#[test]
fn the_control_socket_answers_line_by_line_whatever_comes() {
    let dir = tempfile::tempdir().unwrap();
    let config = ServiceConfig {
        metadata_memory: None,
        resident: false,
        memory: 32 << 20,
        reactors: Some(2),
        connections_max: 1,
        search: vec![dir.path().into()],
        gpu: gpu_off(),
        runtime_dir: None,
        state_dir: None,
    };
    let daemon = Arc::new(Daemon::start(config).unwrap());
    let path = dir.path().join("control.sock");
    let server = ControlServer::start(Arc::clone(&daemon), &path).unwrap();
    let ask = |stream: &UnixStream| {
        read_message::<Reply>(&mut BufReader::new(stream), MAX_REPLY_BYTES).unwrap().unwrap()
    };
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.write_all(b"nonsense\n").unwrap();
    assert!(matches!(ask(&stream), Reply::Error(error) if error.code == ErrorCode::BadRequest));
    write_message(&mut stream, &Request::Ping { version: PROTOCOL_VERSION + 1 }).unwrap();
    assert!(matches!(ask(&stream), Reply::Error(error) if error.code == ErrorCode::BadRequest));
    write_message(&mut stream, &Request::Ping { version: PROTOCOL_VERSION }).unwrap();
    assert!(matches!(ask(&stream), Reply::Pong(pong) if pong.pid == std::process::id()));
    write_message(&mut stream, &Request::Status { array: None }).unwrap();
    assert!(matches!(ask(&stream), Reply::Status(status) if status.arrays.is_empty()));
    write_message(&mut stream, &Request::Shutdown { dry_run: false }).unwrap();
    assert!(matches!(ask(&stream), Reply::Done { .. }));
    // After the reply, which may be here before.
    let deadline = Instant::now() + Duration::from_secs(60);
    while daemon.stop_requested().read().is_err() {
        assert!(Instant::now() < deadline, "whatever runs the daemon is told");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(server);
    assert!(!path.exists() && UnixStream::connect(&path).is_err());
    daemon.shutdown().unwrap();
}

#[test]
fn an_array_whose_metadata_do_not_fit_into_the_memory_is_refused_and_others_are_served() {
    let dir = tempfile::tempdir().unwrap();
    created_in(dir.path(), "small", 2, 2);
    let daemon = |bytes| {
        Daemon::start(ServiceConfig {
            metadata_memory: Some(bytes),
            resident: false,
            memory: 32 << 20,
            reactors: Some(2),
            connections_max: 1,
            search: vec![dir.path().into()],
            gpu: gpu_off(),
            runtime_dir: None,
            state_dir: None,
        })
        .unwrap()
    };
    let import = |dry_run| Request::Import {
        array: None,
        all: true,
        dirs: Vec::new(),
        force: false,
        once: false,
        dry_run,
    };
    let tight = daemon(4096);
    let Reply::Error(would) = tight.handle(import(true)) else { panic!("a dry run promises it") };
    let Reply::Error(error) = tight.handle(import(false)) else { panic!("it was served") };
    assert_eq!(would, error);
    assert!(error.message.contains("array 'small' needs"), "{}", error.message);
    assert!(error.message.contains("of 4 KiB are left: raise metadata_memory"), "{}", error.message);
    assert!(tight.arrays().status(None).unwrap().is_empty());
    tight.shutdown().unwrap();
    let roomy = daemon(64 << 20);
    assert!(matches!(roomy.handle(import(false)), Reply::Done { .. }));
    roomy.shutdown().unwrap();
}

/// Bytes of this process that are in memory.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn an_image_of_a_few_kib_that_claims_a_huge_array_is_refused_before_memory_is_taken_for_it() {
    use calpe_core::array::NewArray;
    use calpe_core::format::{ArrayShape, geometry_for, superblock_offsets};
    use std::os::unix::fs::FileExt;
    // Of the usual filesystems, only one in memory has files of any size.
    let dir = tempfile::tempdir_in("/dev/shm").unwrap_or_else(|_| tempfile::tempdir().unwrap());
    let shape = ArrayShape { data: 1, parity: 0, chunk: 65536, sector: 512, lanes: 1 };
    let (geometry, regions) = geometry_for(1 << 53, shape, Some(1 << 52)).unwrap();
    assert!(geometry.slots >= 1 << 36);
    let new = NewArray { geometry, regions, ..calpe_core::testing::small_array(1, 0) };
    let superblock = new.superblocks(&[uuid::Uuid::from_u128(1)]).remove(0);
    // Once a file of a few KiB, once one of the size that it claims, where the filesystem allows that.
    for bytes in [256 << 10, 1 << 53] {
        let file = std::fs::File::create(dir.path().join("m0")).unwrap();
        if file.set_len(bytes).is_err() {
            continue;
        }
        for at in superblock_offsets(bytes, superblock.sequence) {
            file.write_all_at(&superblock.encode()[..], at.0).unwrap();
        }
        let daemon = Daemon::start(ServiceConfig {
            metadata_memory: Some(64 << 20),
            resident: false,
            memory: 32 << 20,
            reactors: Some(2),
            connections_max: 1,
            search: vec![dir.path().into()],
            gpu: gpu_off(),
            runtime_dir: None,
            state_dir: None,
        })
        .unwrap();
        let before = resident();
        let import = Request::Import {
            array: None,
            all: true,
            dirs: Vec::new(),
            force: true,
            once: false,
            dry_run: false,
        };
        let reply = daemon.handle(import);
        // Other tests of this process use memory, too.
        assert!(resident().saturating_sub(before) < 1 << 30, "{bytes}: {reply:?}");
        assert!(daemon.arrays().status(None).unwrap().is_empty(), "{bytes}: {reply:?}");
        if bytes >= 1 << 53 {
            assert!(matches!(&reply, Reply::Error(error) if error.message.contains("needs")), "{reply:?}");
        }
        daemon.shutdown().unwrap();
    }
}

#[test]
fn the_memory_of_metadata_is_known_for_any_geometry_and_taken_for_none() {
    use calpe_core::array::Footprint;
    let dir = tempfile::tempdir().unwrap();
    let array = created_in(dir.path(), "tank", 2, 2);
    let members = search(&[dir.path().into()], DEFAULT_MEMBER_TIMEOUT).arrays.remove(&array).unwrap();
    let mut superblock = members[0].superblock.clone();
    superblock.geometry.slots = 1 << 36;
    superblock.geometry.volume_bytes = 1 << 53;
    let huge = Footprint::of(&superblock, 64 << 20);
    assert!(huge.stripe_map > 25 << 36 && huge.page_cache > 64 << 20, "{huge}");
    superblock.geometry.slots = u64::MAX / (superblock.geometry.chunk as u64);
    assert!(Footprint::of(&superblock, u64::MAX).total() > huge.total());
}
