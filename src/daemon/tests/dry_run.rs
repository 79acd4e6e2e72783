//! A dry run says what then happens: every command that changes something, with a member in every state.

use super::{Bench, member};
use crate::control::{
    ArrayReport, ArrayState, ErrorCode, LogState, MemberState, Reply, Request, RequestError, ScrubAction,
};
use crate::daemon::arrays::serve::serve;
use crate::daemon::arrays::settings::ServeOptions;
use crate::daemon::devices::import;
use crate::daemon::devices::import::tests::created_in;
use crate::daemon::devices::search::search;
use crate::daemon::reactor::ListenAddress;
use crate::member::{Access, DEFAULT_MEMBER_TIMEOUT, Device};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Bytes that are written where a test needs a pass under way: seconds at the permitted rate.
const DATA_BYTES: usize = 6 << 20;

/// The member that the commands are about.
const TARGET: u16 = 1;

/// State of an array when the command is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    Online,
    Offline,
    Faulted,
    Missing,
    Rebuilding,
    Replacing,
    Scrubbing,
    /// The target is online, and cannot be spared.
    Needed,
    /// The target is one of those that are out.
    LimitReached,
    Failed,
}

const CASES: [Case; 10] = [
    Case::Online,
    Case::Offline,
    Case::Faulted,
    Case::Missing,
    Case::Rebuilding,
    Case::Replacing,
    Case::Scrubbing,
    Case::Needed,
    Case::LimitReached,
    Case::Failed,
];

type Command = fn(&Scene, bool) -> Request;

const COMMANDS: [(&str, Command); 13] = [
    ("fail", |scene, dry_run| Request::Fail { array: scene.name(), member: member(TARGET), dry_run }),
    ("offline", |scene, dry_run| Request::Offline { array: scene.name(), member: member(TARGET), dry_run }),
    ("online", |scene, dry_run| Request::Online {
        array: scene.name(),
        member: member(TARGET),
        path: None,
        dry_run,
    }),
    ("online --path", |scene, dry_run| Request::Online {
        array: scene.name(),
        member: member(TARGET),
        path: Some(scene.path("away")),
        dry_run,
    }),
    ("replace", |scene, dry_run| scene.replace("new", dry_run)),
    ("replace by a member", |scene, dry_run| scene.replace("m3", dry_run)),
    ("replace --cancel", |scene, dry_run| Request::CancelReplace {
        array: scene.name(),
        member: member(TARGET),
        dry_run,
    }),
    ("scrub", |scene, dry_run| scene.scrub(ScrubAction::Start, dry_run)),
    ("scrub --pause", |scene, dry_run| scene.scrub(ScrubAction::Pause, dry_run)),
    ("scrub --stop", |scene, dry_run| scene.scrub(ScrubAction::Stop, dry_run)),
    ("repair", |scene, dry_run| Request::Repair { array: scene.name(), dry_run }),
    ("clear", |scene, dry_run| Request::Clear { array: scene.name(), member: Some(member(TARGET)), dry_run }),
    ("export", |scene, dry_run| Request::Export { array: scene.name(), force: false, dry_run }),
];

/// An array of its own, in the state of a case.
struct Scene<'b> {
    bench: &'b Bench,
    dir: PathBuf,
    name: String,
}

impl Scene<'_> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn replace(&self, new: &str, dry_run: bool) -> Request {
        let new = self.path(new);
        Request::Replace { array: self.name(), old: member(TARGET), new, force: false, dry_run }
    }

    fn scrub(&self, action: ScrubAction, dry_run: bool) -> Request {
        Request::Scrub { array: self.name(), action, dry_run }
    }

    fn report(&self) -> ArrayReport {
        self.bench.daemon.arrays().status(Some(&self.name)).unwrap().remove(0)
    }

    /// What a person sees, except progress.
    fn looks(&self) -> (ArrayState, Vec<(MemberState, bool)>, Vec<bool>) {
        let report = self.report();
        let members = report.members.iter().map(|m| (m.state, m.replacement.is_some())).collect();
        (report.state, members, report.scan.iter().map(|scan| scan.paused).collect())
    }

    fn ask(&self, request: Request) -> Result<String, RequestError> {
        match self.bench.daemon.handle(request) {
            Reply::Done { message, .. } => Ok(message),
            Reply::Error(error) => Err(error),
            other => panic!("{other:?}"),
        }
    }

    fn until(&self, what: &str, is_so: impl Fn(&ArrayReport) -> bool) {
        let begun = Instant::now();
        while !is_so(&self.report()) {
            assert!(begun.elapsed() < Duration::from_secs(30), "{what}: {:?}", self.report());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn take_offline(&self, index: u16) {
        let request = Request::Offline { array: self.name(), member: member(index), dry_run: false };
        self.ask(request).unwrap();
    }

    fn write(&self, socket: &Path) {
        let uri = format!("nbd+unix:///{}?socket={}", self.name, socket.display());
        let device = Device::open(Path::new(&uri), Access::Exclusive).unwrap();
        device.write_at(0, &vec![7; DATA_BYTES]).unwrap();
        device.flush().unwrap();
        drop(device);
        // Its connections end after a while, and 'export' refuses until then.
        let export = COMMANDS.iter().find(|(own, _)| *own == "export").unwrap().1;
        let begun = Instant::now();
        while let Err(error) = self.ask(export(self, true)) {
            assert!(begun.elapsed() < Duration::from_secs(10), "{error}");
        }
    }

    fn prepare(&self, case: Case, socket: &Path) {
        let now = |name| COMMANDS.iter().find(|(own, _)| *own == name).unwrap().1(self, false);
        match case {
            Case::Online | Case::Missing => {}
            Case::Offline => self.take_offline(TARGET),
            Case::Faulted => drop(self.ask(now("fail")).unwrap()),
            Case::Rebuilding => {
                self.take_offline(TARGET);
                self.write(socket);
                // Its device may not be closed yet.
                let begun = Instant::now();
                while let Err(error) = self.ask(now("online")) {
                    assert!(begun.elapsed() < Duration::from_secs(10), "{error}");
                }
            }
            Case::Replacing => {
                self.write(socket);
                self.ask(self.replace("first", false)).unwrap();
            }
            Case::Scrubbing => {
                self.write(socket);
                self.ask(now("scrub")).unwrap();
            }
            Case::Needed => [0, 2].into_iter().for_each(|index| self.take_offline(index)),
            Case::LimitReached => [TARGET, 2].into_iter().for_each(|index| self.take_offline(index)),
            Case::Failed => {
                for name in ["m0", "m1", "m2"] {
                    std::fs::rename(self.path(name), self.path(&format!("{name}.gone"))).unwrap();
                    std::fs::remove_file(self.path(&format!("{name}.gone"))).unwrap();
                }
                self.until("it fails", |report| report.state == ArrayState::Failed);
            }
        }
        // Devices of members that have left service are closed after a while, and can be opened then.
        let free = |name: &str| Device::open(&self.path(name), Access::Exclusive).is_ok();
        if matches!(case, Case::Offline | Case::Faulted | Case::LimitReached) {
            let begun = Instant::now();
            while !free("m1") {
                assert!(begun.elapsed() < Duration::from_secs(10));
            }
        }
    }
}

#[test]
fn a_dry_run_promises_what_then_happens_and_nothing_else() {
    let bench = Bench::new();
    let socket = bench.path("nbd.sock");
    bench.daemon.listen(&ListenAddress::Unix(socket.clone())).unwrap();
    let count = AtomicUsize::new(0);
    let scene = |case: Case| {
        let count = count.fetch_add(1, Ordering::Relaxed);
        let scene = Scene { bench: &bench, dir: bench.path(&format!("d{count}")), name: format!("a{count}") };
        std::fs::create_dir(&scene.dir).unwrap();
        let array = created_in(&scene.dir, &scene.name, 2, 2);
        if case == Case::Missing {
            std::fs::rename(scene.path("m1"), scene.path("away")).unwrap();
            std::fs::create_dir(scene.path("hidden")).unwrap();
            std::fs::rename(scene.path("away"), scene.path("hidden/away")).unwrap();
        }
        let members = search(std::slice::from_ref(&scene.dir), DEFAULT_MEMBER_TIMEOUT).arrays.remove(&array);
        if case == Case::Missing {
            std::fs::rename(scene.path("hidden/away"), scene.path("away")).unwrap();
        }
        let opened = import::open(&members.unwrap(), false, DEFAULT_MEMBER_TIMEOUT).unwrap();
        let slow = Some(1 << 20);
        let options = ServeOptions { rebuild_min: slow, rebuild_max: slow, ..ServeOptions::default() };
        serve(bench.daemon.arrays(), opened, options).unwrap();
        scene.until("it serves", |report| report.log.state == LogState::Serving);
        scene.prepare(case, &socket);
        scene
    };
    // Most of it is waiting for disks.
    let walk = |case: Case| {
        let mut outcomes = [0, 0];
        let mut current = scene(case);
        for (name, command) in COMMANDS {
            let what = format!("{name} while {case:?}");
            let before = current.looks();
            let would = current.ask(command(&current, true));
            assert_eq!(current.looks(), before, "a dry run of {what} changed something");
            let did = current.ask(command(&current, false));
            outcomes[usize::from(did.is_ok())] += 1;
            match (would, did) {
                (Err(would), Err(did)) => {
                    assert_eq!(would.code, did.code, "{what}");
                    // A lost device may have been closed between the two.
                    assert!(would.message == did.message || did.code == ErrorCode::Device, "{what}: {did}");
                    assert_eq!(current.looks(), before, "{what} was refused and changed something");
                }
                (Ok(would), Ok(did)) => {
                    assert!(would.contains("would") || would == did, "{what}: {would}");
                    for (word, state) in [("FAILED", ArrayState::Failed), ("survives", ArrayState::Degraded)]
                    {
                        let told = would.contains(word) && !name.starts_with("online");
                        assert!(!told || current.report().state == state, "{what}: {would}");
                    }
                    current = scene(case);
                }
                (would, did) => panic!("{what}: the dry run says {would:?}, and then it is {did:?}"),
            }
        }
        outcomes
    };
    let outcomes = std::thread::scope(|scope| {
        let walk = &walk;
        let walks = CASES.map(|case| scope.spawn(move || walk(case)));
        walks.map(|walk| walk.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    // Some are refused, and some succeed.
    let [refused, done] = outcomes.iter().fold([0, 0], |sum, of| [sum[0] + of[0], sum[1] + of[1]]);
    assert!(refused > 30 && done > 30, "{outcomes:?}");
}

#[test]
fn a_dry_run_tells_the_consequence() {
    let bench = Bench::new();
    let take = |index, dry_run| Request::Offline { array: "tank".into(), member: member(index), dry_run };
    let told = bench.done(take(0, true));
    assert!(told.ends_with("member 0 is OFFLINE, then the array is DEGRADED and survives 1 more"), "{told}");
    bench.done(take(0, false));
    let told = bench.done(take(1, true));
    assert!(told.ends_with("survives 0 more"), "{told}");
    bench.done(take(1, false));
    assert!(bench.refused(take(2, true)).message.contains("member 2 is needed"));
    let new = bench.path("new");
    let replace = Request::Replace {
        array: "tank".into(),
        old: member(0),
        new: new.clone(),
        force: false,
        dry_run: true,
    };
    let told = bench.done(replace);
    assert!(told.contains("a new sparse file of") && told.contains("allocated at once"), "{told}");
    assert!(told.contains("survives 1 more") && !new.exists(), "{told}");
}
