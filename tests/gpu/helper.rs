//! Devices in memory in real helper processes that crash, hang, lie and are killed: each job is answered
//! once, with the bytes that the CPU computes, and the device is back soon. Only the debug build of the
//! binary has such devices.
#![cfg(debug_assertions)]

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use calpe_core::block_io::Pool;
use calpe_core::codec::{CodecJob, Column, Outputs};
use calpe_gpu::device::Driver;
use calpe_gpu::fake::{FakeDevice, FakeDriver};
use calpe_gpu::helper::{HelperCommand, HelperDriver};
use calpe_gpu::{
    Answer, CalibrationSource, CpuLoad, DeviceReport, DeviceState, Drill, GpuConfig, GpuError, GpuEvent,
    GpuEventKind, GpuRuntime, Tag,
};

use super::runtime::{Answers, PATIENCE, check, config, eager, job, ms};

/// A runtime whose devices are in helpers.
struct Bench {
    folder: tempfile::TempDir,
    driver: Arc<HelperDriver>,
    runtime: GpuRuntime,
    pool: Pool,
    answers: Arc<Answers>,
}

/// A device that takes no memory which its process may only read.
const WRITABLE: &str = "1 writable";

fn folder(devices: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("devices"), devices).expect("written");
    folder
}

fn command(program: &Path, folder: &Path) -> HelperCommand {
    HelperCommand::new(program).argument("gpu-helper").variable("CALPE_DRILL_GPU", folder)
}

fn calpe() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_calpe"))
}

fn start(config: &GpuConfig, devices: usize) -> Bench {
    start_with(config, &devices.to_string(), |folder| command(calpe(), folder))
}

fn start_with(config: &GpuConfig, devices: &str, command: impl Fn(&Path) -> HelperCommand) -> Bench {
    let folder = folder(devices);
    let driver = Arc::new(HelperDriver::new(command(folder.path())));
    let pool = Pool::shared(64 << 20).expect("memory");
    let given = CalibrationSource::Given(eager());
    let runtime =
        GpuRuntime::start(config, Arc::clone(&driver) as Arc<dyn Driver>, std::slice::from_ref(&pool), given);
    let runtime = runtime.expect("devices");
    Bench { folder, driver, runtime, pool, answers: Arc::default() }
}

const IDLE: CpuLoad = CpuLoad { threads: 1, waiting_bytes: 0 };

impl Bench {
    /// Offers jobs at once, of which whatever is not taken is done here.
    fn give(&self, tags: impl IntoIterator<Item = u64>) {
        let jobs = tags.into_iter().map(|tag| (Tag(tag), job(&self.pool, tag))).collect();
        let answer = Arc::clone(&self.answers) as Arc<dyn Answer>;
        for (tag, job) in self.runtime.offer(jobs, IDLE, &answer) {
            answer.done(tag, job.run());
        }
    }

    fn expect(&self, count: usize) {
        self.answers.wait(count);
        let answered = self.answers.take();
        assert_eq!(answered.len(), count);
        answered.iter().for_each(|(tag, columns)| check(*tag, columns));
    }

    fn order(&self, order: &str) {
        let path = self.folder.path();
        fs::write(path.join("order.next"), order).expect("written");
        fs::rename(path.join("order.next"), path.join("order")).expect("there");
    }

    fn device(&self, nth: usize) -> DeviceReport {
        self.runtime.report().devices.remove(nth)
    }

    fn pid(&self, nth: usize) -> u32 {
        self.device(nth).process.expect("it runs in a process")
    }

    fn until(&self, what: &str, holds: impl Fn(&Bench) -> bool) -> Duration {
        let started = Instant::now();
        while !holds(self) {
            assert!(started.elapsed() < PATIENCE, "{what}: {:#?}", self.runtime.report());
            thread::sleep(ms(1));
        }
        started.elapsed()
    }

    fn is_running(&self, nth: usize) -> bool {
        self.device(nth).state == DeviceState::Running
    }

    /// The device does jobs by itself.
    fn works(&self, tags: std::ops::Range<u64>) {
        self.until("it runs", |bench| bench.is_running(0));
        let (before, count) = (self.device(0).jobs, (tags.end - tags.start) as usize);
        self.give(tags);
        self.expect(count);
        assert_eq!(self.device(0).jobs - before, count as u64);
    }

    fn events(&self) -> Vec<GpuEvent> {
        self.runtime.events()
    }
}

fn kinds(events: &[GpuEvent]) -> Vec<GpuEventKind> {
    events.iter().map(|event| event.kind).collect()
}

fn kill(pid: u32, signal: &str) {
    let status = Command::new("kill").arg(format!("-{signal}")).arg(pid.to_string()).status();
    assert!(status.expect("kill runs").success());
}

fn is_gone(pid: u32) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn jobs_of_all_kinds_are_done_in_a_helper_wherever_their_bytes_lie() {
    let bench = start(&config(), 1);
    bench.works(0..300);
    let elsewhere = Pool::new(16 << 20).expect("memory");
    let answer = Arc::clone(&bench.answers) as Arc<dyn Answer>;
    let jobs = (300..400).map(|tag| (Tag(tag), job(&elsewhere, tag))).collect();
    assert!(bench.runtime.offer(jobs, IDLE, &answer).is_empty());
    bench.expect(100);
    let report = bench.runtime.report();
    assert_eq!((report.devices[0].jobs, report.rerun_jobs, bench.events().len()), (400, 0, 0));
}

#[test]
fn more_than_a_slot_comes_back_and_a_full_slot_is_done() {
    let bench = start(&config(), 1);
    let answer = Arc::clone(&bench.answers) as Arc<dyn Answer>;
    let of = |bytes: usize| {
        let inputs = vec![Column::Owned(bench.pool.alloc_zeroed(bytes))];
        let hasher = Some(calpe_core::codec::BlockHasher::Blake3);
        CodecJob { transform: None, hasher, inputs, outputs: Outputs::Hashed }
    };
    let rest =
        bench.runtime.offer(vec![(Tag(0), of((16 << 20) + 4096)), (Tag(1), of(16 << 20))], IDLE, &answer);
    assert_eq!(rest.iter().map(|(tag, _)| tag.0).collect::<Vec<_>>(), [0]);
    bench.answers.wait(1);
    assert_eq!(bench.answers.take()[0].1.hashes, of(16 << 20).run().hashes);
}

#[test]
fn whatever_a_helper_does_wrong_costs_it_and_no_job() {
    let failing = [
        ("die", "signal 6"),
        ("slot", "was not asked"),
        ("serial", "was not asked"),
        ("note", "was not asked"),
        ("count", "was not asked"),
        ("bells", "was not asked"),
        ("message", "no message"),
        ("scribble", "signal 11"),
        ("writable scribble", "signal 11"),
        ("finish", "told to fail"),
        ("panic", "status 101"),
    ];
    for (order, words) in failing {
        let config = GpuConfig { hang_after: Duration::from_secs(30), ..config() };
        let (devices, order) =
            order.strip_prefix("writable ").map_or(("1", order), |order| (WRITABLE, order));
        let bench = start_with(&config, devices, |folder| command(calpe(), folder));
        bench.works(0..3);
        let before = bench.pid(0);
        bench.order(order);
        bench.give((0..5).map(|nth| 7 * nth));
        bench.expect(5);
        bench.until("it is opened again", |bench| bench.device(0).reopened == 1);
        let events = bench.events();
        assert_eq!(kinds(&events), [GpuEventKind::Failed, GpuEventKind::Reopened], "{order}: {events:?}");
        assert!(events[0].text.contains(words), "{order}: {}", events[0].text);
        assert_ne!(bench.pid(0), before);
        bench.works(10..15);
        bench.until("the old process is gone", |bench| is_gone(before) && bench.driver.processes() == 1);
    }
}

#[test]
fn a_helper_that_answers_nothing_is_noticed_in_time_and_killed() {
    for order in ["hang", "never", "flood"] {
        let bench = start(&GpuConfig { hang_after: ms(400), ..config() }, 1);
        let before = bench.pid(0);
        bench.order(order);
        let started = Instant::now();
        bench.give((0..5).map(|nth| 7 * nth));
        bench.expect(5);
        assert!((ms(400)..ms(5000)).contains(&started.elapsed()), "{order}: {:?}", started.elapsed());
        bench.until("it is opened again", |bench| bench.device(0).reopened == 1);
        assert_eq!(kinds(&bench.events()), [GpuEventKind::Hung, GpuEventKind::Reopened], "{order}");
        bench.works(10..15);
        bench.until("the old process is gone", |bench| is_gone(before) && bench.driver.processes() == 1);
    }
}

#[test]
fn a_helper_that_is_stopped_is_as_one_that_hangs() {
    let bench = start(&GpuConfig { hang_after: ms(400), ..config() }, 1);
    let before = bench.pid(0);
    kill(before, "STOP");
    bench.give((0..5).map(|nth| 7 * nth));
    bench.expect(5);
    bench.until("it is opened again", |bench| bench.device(0).reopened == 1);
    bench.works(10..15);
    bench.until("the old process is gone", |_| is_gone(before));
}

#[test]
fn a_batch_that_the_device_refuses_goes_to_the_cpu_and_the_helper_goes_on() {
    let bench = start(&config(), 1);
    bench.order("refuse");
    bench.give([7]);
    bench.expect(1);
    bench.works(14..20);
    let report = bench.runtime.report();
    assert_eq!((report.rerun_jobs, report.devices[0].refused, bench.events().len()), (1, 1, 0));
}

#[test]
fn wrong_results_are_never_answered_and_the_device_is_not_used_again() {
    let bench = start(&config(), 1);
    bench.order("wrong");
    bench.give((0..5).map(|nth| 7 * nth));
    bench.expect(5);
    assert_eq!(kinds(&bench.events()), [GpuEventKind::Mismatch]);
    bench.until("its process is gone", |bench| bench.driver.processes() == 0);
    thread::sleep(ms(200));
    assert!(!bench.is_running(0) && bench.driver.processes() == 0);
}

#[test]
fn a_drill_fails_one_batch_and_the_device_is_back_soon() {
    let bench = start(&GpuConfig { hang_after: ms(400), ..GpuConfig::default() }, 1);
    for (drill, kind) in [(Drill::Error, GpuEventKind::Failed), (Drill::Hang, GpuEventKind::Hung)] {
        let before = bench.device(0).reopened;
        assert!(bench.runtime.drill(drill));
        bench.give(0..20);
        bench.expect(20);
        let took = bench.until("it is opened again", |bench| bench.device(0).reopened > before);
        assert!(took < Duration::from_secs(5), "{took:?}");
        assert_eq!(kinds(&bench.events()), [kind, GpuEventKind::Reopened], "{drill:?}");
        bench.works(20..30);
    }
}

#[test]
fn a_helper_that_is_killed_while_nothing_is_asked_of_it_is_back_before_something_is() {
    // It runs for ten times as long as its pauses, so these do not grow.
    let often = GpuConfig { reopen_after: ms(40), reopen_after_max: PATIENCE, ..config() };
    let bench = start(&often, 1);
    for _ in 0..9 {
        let (before, reopened) = (bench.pid(0), bench.device(0).reopened);
        thread::sleep(ms(450));
        kill(before, "KILL");
        let took = bench.until("it is opened again", |bench| bench.device(0).reopened > reopened);
        assert!(took < Duration::from_secs(8), "{took:?}");
        let events = bench.events();
        assert_eq!(kinds(&events), [GpuEventKind::Failed, GpuEventKind::Reopened]);
        assert!(events[0].text.contains(&format!("process {before}, ")), "{}", events[0].text);
        bench.works(0..5);
    }
}

#[test]
fn jobs_are_answered_once_and_rightly_whenever_the_helper_is_killed() {
    let bench = start(&GpuConfig { reopen_after: ms(1), reopen_after_max: ms(1), ..config() }, 1);
    let (mut tag, mut kills, mut rng) = (0, 0, 1u64);
    while kills < 15 {
        if let Some(pid) = bench.device(0).process {
            bench.order("slow");
            bench.give(tag..tag + 10);
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            thread::sleep(ms(rng >> 60));
            kill(pid, "KILL");
            kills += 1;
            bench.give(tag + 10..tag + 40);
            bench.expect(40);
            tag += 40;
        }
        thread::sleep(ms(1));
    }
    bench.works(0..10);
    bench.until("all others are gone", |bench| bench.driver.processes() == 1);
}

#[test]
fn each_device_has_a_process_and_loses_only_that() {
    let bench = start(&config(), 2);
    let [first, second] = [0, 1].map(|nth| bench.pid(nth));
    assert_ne!(first, second);
    kill(first, "KILL");
    bench.until("the first is opened again", |bench| bench.device(0).reopened == 1);
    assert_eq!((bench.pid(1), bench.device(1).reopened), (second, 0));
    bench.give(0..50);
    bench.expect(50);
}

#[test]
fn a_program_that_is_not_there_is_told_at_the_start_and_tried_again_later() {
    let missing = HelperDriver::new(HelperCommand::new("/nonexistent/calpe"));
    let pool = Pool::shared(1 << 20).expect("memory");
    let none = GpuRuntime::start(&config(), Arc::new(missing), &[pool], CalibrationSource::Measure);
    assert!(matches!(&none, Err(GpuError::NoDevice(text)) if text.contains("No such file")), "{none:?}");

    let bench = start_with(&config(), "1", |folder| {
        symlink(calpe(), folder.join("program")).expect("a link");
        command(&folder.join("program"), folder)
    });
    let program = bench.folder.path().join("program");
    fs::remove_file(&program).expect("removed");
    kill(bench.pid(0), "KILL");
    bench.until("it is tried again", |bench| match bench.device(0).state {
        DeviceState::Failed { reason, .. } => reason.contains("No such file"),
        DeviceState::Running => false,
    });
    // One that is no helper at all.
    fs::write(&program, "#!/bin/sh\nexit 3\n").expect("written");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("set");
    bench.until("it is tried again", |bench| match bench.device(0).state {
        DeviceState::Failed { reason, .. } => reason.contains("status 3"),
        DeviceState::Running => false,
    });
    fs::remove_file(&program).expect("removed");
    symlink(calpe(), &program).expect("a link");
    bench.works(0..5);
    assert_eq!(kinds(&bench.events()), [GpuEventKind::Failed, GpuEventKind::Reopened]);
}

#[test]
fn a_driver_that_crashes_or_hangs_when_it_is_loaded_is_no_device() {
    for (start, words) in [("die", "signal 6"), ("hang", "not answered in 300ms"), ("", "no fake device")] {
        let folder = folder("0");
        fs::write(folder.path().join("start"), start).expect("written");
        let driver = HelperDriver::new(command(calpe(), folder.path()).patience(ms(300)));
        let error = driver.devices().expect_err("none");
        assert!(error.to_string().contains(words), "{start}: {error}");
        let started = Instant::now();
        while driver.processes() > 0 {
            assert!(started.elapsed() < PATIENCE, "{start}: a process is left");
            thread::sleep(ms(1));
        }
    }
}

#[test]
fn a_device_that_crashes_again_and_again_rests_and_is_tried_again() {
    let quick = GpuConfig { reopen_after: ms(1), reopen_after_max: ms(2), given_up_max: 4, ..config() };
    let bench = start(&GpuConfig { rest: ms(1500), ..quick }, 1);
    fs::write(bench.folder.path().join("start"), "die").expect("written");
    // Long enough in service that its failures begin anew.
    thread::sleep(ms(10));
    kill(bench.pid(0), "KILL");
    bench.until("it rests", |bench| match bench.device(0).state {
        DeviceState::Failed { reason, .. } => {
            reason.contains("given up 4 times: tried again after 1 minutes")
        }
        DeviceState::Running => false,
    });
    assert_eq!(bench.driver.processes(), 0);
    assert_eq!(kinds(&bench.events()), [GpuEventKind::Failed, GpuEventKind::Failed]);
    fs::remove_file(bench.folder.path().join("start")).expect("removed");
    bench.works(0..5);
    assert_eq!(kinds(&bench.events()), [GpuEventKind::Reopened]);
}

#[test]
fn the_end_of_the_runtime_leaves_no_process_whatever_it_does() {
    for order in ["", "hang", "never", "flood"] {
        let bench = start(&GpuConfig { hang_after: ms(300), ..config() }, 1);
        let (pid, driver) = (bench.pid(0), Arc::clone(&bench.driver));
        if !order.is_empty() {
            bench.order(order);
        }
        bench.give(0..5);
        drop(bench.runtime);
        bench.answers.wait(5);
        let started = Instant::now();
        while driver.processes() > 0 || !is_gone(pid) {
            assert!(started.elapsed() < PATIENCE, "{order}: process {pid} is left");
            thread::sleep(ms(1));
        }
    }
}

#[test]
fn a_helper_has_no_descriptor_of_ours_and_may_only_read_the_memory_of_requests() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = fs::File::create(folder.path().join("inherited")).expect("a file");
    // One that a careless library did not close on exec.
    clear_close_on_exec(&file);
    for devices in ["1", WRITABLE] {
        look_into(&start_with(&config(), devices, |folder| command(calpe(), folder)));
    }
    drop(file);
}

fn look_into(bench: &Bench) {
    let pid = bench.pid(0);
    let names = fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
    let names: Vec<String> = names
        .map(|entry| {
            fs::read_link(entry.expect("an entry").path())
                .map_or(String::new(), |to| to.display().to_string())
        })
        .collect();
    assert!(!names.iter().any(|name| name.contains("inherited")), "{names:?}");
    let own = |name: &String| {
        ["socket:", "pipe:", "/dev/null", "/memfd:calpe-", "anon_inode:[eventfd]"]
            .iter()
            .any(|own| name.starts_with(own))
    };
    let others: Vec<&String> = names.iter().filter(|name| !own(name) && !name.is_empty()).collect();
    assert!(others.is_empty() && names.len() <= 12, "{names:?}");
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
    let of =
        |name: &str| maps.lines().filter(|line| line.contains(name)).map(str::to_owned).collect::<Vec<_>>();
    let (requests, exchange) = (of("memfd:calpe-buffers"), of("memfd:calpe-gpu"));
    assert!(!requests.is_empty() && requests.iter().all(|line| line.contains(" r--s ")), "{requests:?}");
    assert!(!exchange.is_empty() && exchange.iter().all(|line| line.contains(" rw-s ")), "{exchange:?}");
}

/// As a program without std would open it.
fn clear_close_on_exec(file: &fs::File) {
    let flags = nix::fcntl::FdFlag::empty();
    nix::fcntl::fcntl(file, nix::fcntl::FcntlArg::F_SETFD(flags)).expect("set");
    assert!(file.as_raw_fd() > 2);
}

#[test]
#[ignore = "measures"]
fn what_a_process_costs_a_batch() {
    let elsewhere = start(&config(), 1);
    let driver = FakeDriver::new(vec![FakeDevice::default()]);
    let given = CalibrationSource::Given(eager());
    let here = GpuRuntime::start(&config(), Arc::new(driver), std::slice::from_ref(&elsewhere.pool), given)
        .expect("devices");
    let median = |runtime: &GpuRuntime| {
        let answers = Arc::new(Answers::default());
        let answer = Arc::clone(&answers) as Arc<dyn Answer>;
        let mut took: Vec<Duration> = (0..2000)
            .map(|tag| {
                let job = job(&elsewhere.pool, 7);
                let started = Instant::now();
                assert!(runtime.offer(vec![(Tag(tag), job)], IDLE, &answer).is_empty());
                answers.wait(1);
                let took = started.elapsed();
                answers.take();
                took
            })
            .collect();
        took.sort_unstable();
        (took[1000], took[1980])
    };
    for round in 0..3 {
        let (here, elsewhere) = (median(&here), median(&elsewhere.runtime));
        println!(
            "round {round}: 50th and 99th percentile here {here:?}, in a process of its own {elsewhere:?}"
        );
    }
}
