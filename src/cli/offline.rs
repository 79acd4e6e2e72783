//! The commands that need no daemon: create, inspect, check, bench.

use super::args::{BenchCodecArgs, BenchEngine, BenchHashArgs, CheckArgs, CreateArgs, InspectArgs};
use super::client::{Client, ClientError};
use super::paths::not_utf8;
use super::wait::Progress;
use super::{CliError, Outcome, say, say_json, tell, tell_warnings};
use crate::control::{ArrayReport, MemberState};
use crate::daemon::arrays::meters::Meters;
use crate::daemon::check;
use crate::daemon::clock;
use crate::daemon::devices::create::{CreatePlan, CreateRequest};
use crate::daemon::devices::inspection::DeviceInspection;
use crate::daemon::drill;
use crate::member::patience::within;
use crate::member::{Access, Device, DeviceError, is_remote, same_remote};
use calpe_core::block_io::Pool;
use calpe_core::codec::bench;
use calpe_core::units::{HumanSize, Printable, shown};
use calpe_gpu::cuda::{CudaDriver, Tuning, bench as gpu_bench};
use calpe_gpu::{CalibrationSource, Crossover, GpuConfig, GpuRuntime};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use uuid::Uuid;

/// How long an inspection may take before a notice says that the member does not answer.
const WAIT_TOLD: Duration = Duration::from_secs(5);

/// `calpe create`.
pub(super) fn create(args: CreateArgs, connect: impl FnOnce() -> Result<Client, ClientError>) -> Outcome {
    args.members.iter().try_for_each(|member| check_place(member))?;
    Served::among(&args.members, connect).refuse(&args.members)?;
    let chunk = u32::try_from(args.chunk.0).map_err(|_| {
        CliError::Usage(format!("a chunk of {} is not possible: use 4 MiB or less", HumanSize(args.chunk.0)))
    })?;
    let checksum = args.checksum;
    let plan = CreatePlan::new(CreateRequest {
        name: args.name.clone(),
        data: args.data,
        parity: args.parity,
        chunk,
        checksum,
        volume: args.volume,
        volume_bytes: args.size.map(|size| size.0),
        lanes: args.lanes,
        members: args.members,
        force: args.force,
    })?;
    if args.dry_run {
        plan.check_room()?;
        say(&format!("would create:\n{}\n", plan.describe().join("\n")))?;
        return Ok(ExitCode::SUCCESS);
    }
    tell_warnings(&plan.notes());
    let next = plan.next_steps().join("\n");
    let created = plan.execute(clock::unix_seconds())?;
    let geometry = created.geometry;
    let lanes = if args.lanes == 1 { String::new() } else { format!(", {} lanes", args.lanes) };
    say(&format!(
        "created array '{}' ({}): {} data + {} parity, checksum {checksum}, volume of {}{lanes}\n{next}\n",
        args.name,
        created.array,
        geometry.data,
        geometry.parity,
        HumanSize(geometry.volume_bytes)
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// `calpe inspect`. A child process opens a local member: a process that waits for a filesystem that does not
/// answer cannot end, and this process must be able to.
pub(super) fn inspect(args: &InspectArgs) -> Outcome {
    if args.here || is_remote(&args.member) {
        return inspect_here(args);
    }
    let mut looker = Command::new("/proc/self/exe");
    looker.args(["inspect", "--here"]).args(args.json.then_some("--json")).arg("--").arg(&args.member);
    looker.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Where no child process can be started, this process does it.
    let Ok(looker) = looker.spawn() else { return inspect_here(args) };
    let pid = looker.id().cast_signed();
    let (over, is_over) = channel::<()>();
    let waits = format!(
        "{}: no answer so far, it is waited for up to {} s",
        shown(&args.member),
        drill::device_limit().as_secs()
    );
    // Without a thread, there is no notice until the end.
    let _ = std::thread::Builder::new().spawn(move || {
        if is_over.recv_timeout(WAIT_TOLD) == Err(RecvTimeoutError::Timeout) {
            tell(&waits);
        }
    });
    let looked = within(&args.member, "look at it", drill::device_limit(), move || looker.wait_with_output());
    drop(over);
    if looked.is_err() {
        // The inspection may have ended just now.
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
    let looked = looked?;
    let output = looked.map_err(|error| DeviceError::from_io(&args.member, "look at it", error))?;
    // Where standard error fails, there is no other place to report to.
    let _ = io::stderr().write_all(&output.stderr);
    let mut out = io::stdout().lock();
    out.write_all(&output.stdout)?;
    out.flush()?;
    let code = output.status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Fails when there is no usable superblock, after printing everything that was found.
fn inspect_here(args: &InspectArgs) -> Outcome {
    let device = Device::open(&args.member, Access::ReadOnly)?;
    let inspection = DeviceInspection::of(&device);
    if args.json {
        say_json(&inspection)?;
    } else {
        say(&inspection.to_string())?;
    }
    match inspection.error() {
        None => Ok(ExitCode::SUCCESS),
        Some(error) => Err(CliError::Outcome(format!("{}: {error}", shown(&args.member)))),
    }
}

/// `calpe check`. Fails unless everything is proved good, after printing everything that was found.
pub(super) fn check(args: &CheckArgs, connect: impl FnOnce() -> Result<Client, ClientError>) -> Outcome {
    let served = Served::among(&args.members, connect);
    served.refuse(&args.members)?;
    let mut bar = (!args.json).then(Progress::of_check);
    let mut shown = Ok(());
    let mut meters = Meters::default();
    let result = check::check(&args.members, &mut |activity| {
        meters.observe(clock::now(), std::slice::from_ref(activity));
        if let (Some(bar), Ok(())) = (&mut bar, &shown) {
            shown = bar.show(&meters.scan(activity));
        }
    });
    if let Some(bar) = &bar {
        bar.clear();
    }
    shown?;
    let mut report = result?;
    report.notices.extend(served.unnoticed(&args.members, report.uuid, report.clean));
    if args.json {
        say_json(&report)?;
    } else {
        say(&report.to_string())?;
    }
    if report.good { Ok(ExitCode::SUCCESS) } else { Err(CliError::Outcome(report.verdict())) }
}

/// Which members a daemon serves. Local members are locked; over NBD there are no locks, so the
/// daemon is asked.
struct Served {
    /// Arrays of the daemon; none where there is no daemon, or no member is remote.
    arrays: Vec<ArrayReport>,
}

impl Served {
    /// Asks the daemon, if there is one and some of these members are remote.
    fn among(members: &[PathBuf], connect: impl FnOnce() -> Result<Client, ClientError>) -> Served {
        let ask = || connect().and_then(|mut client| client.status(None)).ok();
        let status = if members.iter().any(|member| is_remote(member)) { ask() } else { None };
        let arrays = status.map(|status| status.arrays).unwrap_or_default();
        Served { arrays: arrays.into_iter().filter(|array| array.start.is_none()).collect() }
    }

    /// Refuses members that the daemon serves.
    fn refuse(&self, members: &[PathBuf]) -> Result<(), CliError> {
        for (array, member) in
            self.arrays.iter().flat_map(|array| array.members.iter().map(move |m| (array, m)))
        {
            let in_use =
                matches!(member.state, MemberState::Online | MemberState::Degraded | MemberState::Rebuilding);
            let own = Some(&member.name).filter(|_| in_use);
            let new = member.replacement.as_ref().map(|replacement| &replacement.name);
            let is_it =
                |given: &&PathBuf| own.into_iter().chain(new).any(|name| same_remote(given, Path::new(name)));
            if let Some(given) = members.iter().find(is_it) {
                let (index, name) = (member.index, Printable(&array.name));
                return Err(CliError::Outcome(format!(
                    "{}: is in use by the daemon, as member {index} of array '{name}': 'calpe export {name}' first",
                    shown(given)
                )));
            }
        }
        Ok(())
    }

    /// The warning for a check of remote members, which another host may have written meanwhile.
    fn unnoticed(&self, members: &[PathBuf], array: Uuid, clean: bool) -> Option<String> {
        if !members.iter().any(|member| is_remote(member)) {
            return None;
        }
        if let Some(array) = self.arrays.iter().find(|served| served.uuid == array) {
            let name = Printable(&array.name);
            return Some(format!(
                "the daemon serves array '{name}' from other places: if these lead to the same storage, what was found may be of \
                 writes under way"
            ));
        }
        (!clean).then(|| {
            "remote members that a daemon serves are not noticed, other than those of a daemon that this command can ask; if these \
             are in use, what was found may be of writes under way"
                .to_owned()
        })
    }
}

/// Refuses a path that cannot be sent to a daemon, which takes only text.
fn check_place(member: &Path) -> Result<(), CliError> {
    let absolute = std::path::absolute(member).unwrap_or_else(|_| member.to_owned());
    let place = if is_remote(member) { Some(member) } else { absolute.parent() };
    match place {
        Some(place) if place.to_str().is_none() => Err(not_utf8(place)),
        _ => Ok(()),
    }
}

/// `calpe bench hash`.
pub(super) fn bench_hash(args: &BenchHashArgs) -> Outcome {
    if args.engine == "cuda" {
        return bench_gpu(false, args.json);
    }
    let report = bench::run_hash(bench_seconds(args.seconds)?);
    if args.json {
        say_json(&report)?;
    } else {
        say(&report.render())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// `calpe bench codec`.
pub(super) fn bench_codec(args: BenchCodecArgs) -> Outcome {
    let usage = |text: &str| Err(CliError::Usage(text.into()));
    let mut options =
        bench::BenchOptions { seconds: bench_seconds(args.seconds)?, ..bench::BenchOptions::default() };
    if args.engines == [BenchEngine::Cuda] {
        if !args.geometries.is_empty() || !args.blocks.is_empty() {
            return usage(
                "geometries and sizes of the GPU's run are fixed: leave --geometry and --block out",
            );
        }
        return bench_gpu(args.sweep, args.json);
    }
    if args.sweep {
        return usage("--sweep tries ways to drive a GPU: use it with --engine cuda alone");
    }
    if let Some(block) = args.blocks.iter().find(|block| !is_block(block.0)) {
        let min = HumanSize(bench::BLOCK_BYTES_MIN as u64);
        return usage(&format!("a block of {} bytes is not measured: use a multiple of {min}", block.0));
    }
    let engines = args.engines.iter().map(|engine| match engine {
        BenchEngine::Cpu(engine) => Ok(*engine),
        BenchEngine::Cuda => {
            Err(CliError::Usage("cuda is measured by itself: leave out the other engines".into()))
        }
    });
    let engines = engines.collect::<Result<Vec<_>, _>>()?;
    if !engines.is_empty() {
        options.engines = engines;
    }
    if !args.geometries.is_empty() {
        options.geometries = args.geometries;
    }
    if !args.blocks.is_empty() {
        options.block_bytes = args
            .blocks
            .iter()
            .map(|block| usize::try_from(block.0))
            .collect::<Result<_, _>>()
            .map_err(|_| CliError::Usage("a block of this size does not fit in memory".into()))?;
    }
    let report = bench::run(&options);
    if args.json {
        say_json(&report)?;
    } else {
        say(&report.render())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether a column can have this many bytes.
fn is_block(bytes: u64) -> bool {
    bytes > 0 && bytes.is_multiple_of(bench::BLOCK_BYTES_MIN as u64)
}

/// Longest run of a benchmark: an hour is enough.
const BENCH_SECONDS_MAX: f64 = 3600.0;

/// Checks the time that a benchmark may take.
fn bench_seconds(seconds: f64) -> Result<f64, CliError> {
    if seconds > 0.0 && seconds <= BENCH_SECONDS_MAX {
        return Ok(seconds);
    }
    let text =
        format!("a run of {seconds} seconds is not possible: use more than 0, up to {BENCH_SECONDS_MAX}");
    Err(CliError::Usage(text))
}

/// What `calpe bench ... --engine cuda` prints.
#[derive(Serialize)]
struct GpuBench {
    #[serde(flatten)]
    report: gpu_bench::BenchReport,
    /// From which size on the GPU is as fast, against threads of this CPU.
    crossovers: Vec<Crossover>,
}

/// Memory that crossovers are measured in: as much as a daemon has by default.
const GPU_BENCH_MEMORY: usize = 256 << 20;

fn bench_gpu(sweep: bool, json: bool) -> Outcome {
    let failed = |error: &dyn std::fmt::Display| CliError::Outcome(format!("no GPU was measured: {error}"));
    let options = gpu_bench::BenchOptions { sweep, ..gpu_bench::BenchOptions::default() };
    let report = gpu_bench::run(&options).map_err(|error| failed(&error))?;
    let config = GpuConfig { devices: vec![options.index], ..GpuConfig::default() };
    let driver = Arc::new(CudaDriver::new(Tuning::default()));
    let pool = Pool::new(GPU_BENCH_MEMORY).map_err(|error| failed(&error))?;
    let runtime = GpuRuntime::start(&config, driver, &[pool], CalibrationSource::Measure);
    let devices = runtime.map_err(|error| failed(&error))?.report().devices;
    let crossovers = devices.into_iter().flat_map(|device| device.crossovers).collect();
    let bench = GpuBench { report, crossovers };
    if json {
        say_json(&bench)?;
        return Ok(ExitCode::SUCCESS);
    }
    say(&format!(
        "{}\nwhere the GPU is as fast as CPU threads, in bytes of input handed over at once:\n",
        bench.report
    ))?;
    for Crossover { class, threads, bytes } in &bench.crossovers {
        let from =
            bytes.map_or("the CPU at any size".into(), |bytes| format!("from {} on", HumanSize(bytes)));
        say(&format!("  {:<12} {threads:>2} threads: {from}\n", class.name()))?;
    }
    Ok(ExitCode::SUCCESS)
}
