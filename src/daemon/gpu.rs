//! The GPUs of a daemon: started once for all arrays, listed in every status; their failures become events.
//! Each lies in a process of its own, of this executable: no driver is ever loaded here.
//!
//! Invariant: without a working GPU the daemon does everything it does with one, unless it was told to
//! require one. Must not know what jobs are.

use crate::control::{GpuCrossover, GpuDecisions, GpuDeviceReport, GpuDrill, GpuReport};
use crate::daemon::events::{EventLog, News, kinds};
use calpe_core::block_io::Pool;
use calpe_core::volume::NoticeLevel;
use calpe_gpu::device::Driver;
use calpe_gpu::helper::{HelperCommand, HelperDriver};
use calpe_gpu::{
    CalibrationSource, DeviceReport, DeviceState, Drill, GpuConfig, GpuError, GpuEventKind, GpuRuntime, Mode,
    check_devices,
};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Name of the file with measurements of GPUs, in the runtime directory.
const CALIBRATION_NAME: &str = "gpu-calibration.json";

/// Used in events about GPUs in place of an array's name.
const EVENTS_OF: &str = "gpu";

/// Name of the folder in which the GPU's driver keeps what it has compiled, in the runtime directory.
const COMPILED_NAME: &str = "gpu-cache";

/// The variable that names this folder to the driver.
const COMPILED_VARIABLE: &str = "CUDA_CACHE_PATH";

/// The command of this executable that is the process of a GPU.
pub(crate) const HELPER_COMMAND: &str = "gpu-helper";
/// Its option that has its memory locked.
const HELPER_LOCKED: &str = "--locked";

/// The GPUs, or why none is used.
#[derive(Clone, Debug)]
pub(crate) struct Gpus {
    mode: Mode,
    runtime: Result<GpuRuntime, String>,
}

/// The GPUs that there are, none of them opened.
pub(crate) struct FoundGpus {
    config: GpuConfig,
    driver: Result<Arc<HelperDriver>, String>,
    dir: Option<PathBuf>,
}

impl FoundGpus {
    /// Asks which GPUs there are. `dir`: where measurements are kept; `locked`: whether the memory of their
    /// processes is locked.
    ///
    /// # Errors
    /// When a GPU is required and there is none, or one is named that does not exist.
    pub(crate) fn find(config: &GpuConfig, dir: Option<&Path>, locked: bool) -> io::Result<FoundGpus> {
        let found = |driver| FoundGpus { config: config.clone(), driver, dir: dir.map(Path::to_owned) };
        if config.mode == Mode::Off {
            return Ok(found(Err("switched off".into())));
        }
        let driver = HelperDriver::new(command(dir, locked));
        match check_devices(config, &driver) {
            Ok(()) => Ok(found(Ok(Arc::new(driver)))),
            Err(GpuError::NoDevice(reason)) if config.mode == Mode::Auto => {
                tracing::info!("no GPU is used: {reason}");
                Ok(found(Err(reason)))
            }
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// Memory for the bytes of jobs: where there are GPUs, such as their processes can map.
    ///
    /// # Errors
    /// When the system has none.
    pub(crate) fn memory(&self, bytes: usize) -> io::Result<Pool> {
        if self.driver.is_err() {
            return Pool::new(bytes);
        }
        let pool = Pool::shared(bytes)?;
        // A GPU's driver keeps all of it resident anyway; taken at once, it comes in large pages.
        if let Err(error) = pool.make_resident() {
            tracing::debug!(%error, "memory for requests is not taken at the start");
        }
        Ok(pool)
    }

    /// Opens and measures them, which takes a second or so at the first start. `pool`: holds the bytes of
    /// jobs.
    ///
    /// # Errors
    /// When a GPU is required and none can be used.
    pub(crate) fn start(self, pool: &Pool) -> io::Result<Gpus> {
        let FoundGpus { config, driver, dir } = self;
        let mode = config.mode;
        let driver: Arc<dyn Driver> = match driver {
            Ok(driver) => driver,
            Err(reason) => return Ok(Gpus { mode, runtime: Err(reason) }),
        };
        let calibration = match dir {
            Some(dir) => CalibrationSource::Cache(dir.join(CALIBRATION_NAME)),
            None => CalibrationSource::Measure,
        };
        match GpuRuntime::start(&config, driver, std::slice::from_ref(pool), calibration) {
            Ok(runtime) => {
                for device in runtime.report().devices {
                    tracing::info!("GPU {}", describe(&device));
                }
                Ok(Gpus { mode, runtime: Ok(runtime) })
            }
            Err(GpuError::NoDevice(reason)) if mode == Mode::Auto => {
                tracing::info!("no GPU is used: {reason}");
                Ok(Gpus { mode, runtime: Err(reason) })
            }
            Err(error) => Err(io::Error::other(error)),
        }
    }
}

/// How the processes of GPUs are started.
fn command(dir: Option<&Path>, locked: bool) -> HelperCommand {
    let mut command = HelperCommand::own_executable().argument(HELPER_COMMAND);
    if locked {
        command = command.argument(HELPER_LOCKED);
    }
    match dir {
        // Kept from one process to the next, a GPU is back sooner. The driver's own place for it is the home
        // of a user, which a service may not have.
        Some(dir) if std::env::var_os(COMPILED_VARIABLE).is_none() => {
            command.variable(COMPILED_VARIABLE, dir.join(COMPILED_NAME))
        }
        _ => command,
    }
}

impl Gpus {
    /// Fails early if a required GPU is missing; opens nothing.
    ///
    /// # Errors
    /// As [`FoundGpus::find`].
    pub(crate) fn check(config: &GpuConfig) -> io::Result<()> {
        match config.mode {
            Mode::Require => {
                check_devices(config, &HelperDriver::new(command(None, false))).map_err(io::Error::other)
            }
            Mode::Auto | Mode::Off => Ok(()),
        }
    }

    /// The runtime that reactors offer jobs to.
    #[must_use]
    pub(crate) fn runtime(&self) -> Option<GpuRuntime> {
        self.runtime.as_ref().ok().cloned()
    }

    /// Makes events of what has happened to devices since the last call.
    pub(crate) fn tell(&self, events: &EventLog) {
        let Ok(runtime) = &self.runtime else { return };
        for event in runtime.events() {
            let level = match event.kind {
                GpuEventKind::Reopened => NoticeLevel::Info,
                GpuEventKind::Failed | GpuEventKind::Hung | GpuEventKind::Calibration => NoticeLevel::Warning,
                GpuEventKind::Mismatch | GpuEventKind::Answer => NoticeLevel::Error,
            };
            let text = format!("GPU {} ({}): {}", event.device, event.name, event.text);
            events.tell(News::new(Some(EVENTS_OF), kinds::GPU, level, text));
        }
    }

    /// Makes the next batch fail on purpose, or says what would be done.
    ///
    /// # Errors
    /// Why no GPU runs.
    pub(crate) fn drill(&self, drill: GpuDrill, dry_run: bool) -> Result<String, String> {
        let runtime = self.runtime.as_ref().map_err(|reason| format!("no GPU is used: {reason}"))?;
        let (how, drill) = match drill {
            GpuDrill::Error => ("fails", Drill::Error),
            GpuDrill::Hang => ("does not end", Drill::Hang),
        };
        let devices = runtime.report().devices;
        let runs = devices.iter().any(|device| device.state == DeviceState::Running);
        let done = dry_run || runtime.drill(drill);
        if !runs || !done {
            let reasons: Vec<String> = devices.iter().map(describe).collect();
            return Err(format!("no GPU runs: {}", reasons.join("; ")));
        }
        let when = if dry_run { "would be made to go wrong" } else { "goes wrong" };
        Ok(format!(
            "the next batch on a GPU {when}: it {how}, the CPU does its work, and the GPU is opened again; 'calpe events' tells"
        ))
    }

    /// Their entry in a status.
    #[must_use]
    pub(crate) fn report(&self) -> GpuReport {
        let mode = match self.mode {
            Mode::Auto => "auto",
            Mode::Off => "off",
            Mode::Require => "require",
        };
        let runtime = match &self.runtime {
            Ok(runtime) => runtime.report(),
            Err(reason) => {
                return GpuReport { mode: mode.into(), reason: Some(reason.clone()), ..GpuReport::default() };
            }
        };
        let decisions = runtime.decisions;
        GpuReport {
            mode: mode.into(),
            reason: None,
            devices: runtime.devices.into_iter().map(device).collect(),
            decisions: GpuDecisions {
                taken: decisions.taken,
                small: decisions.small,
                spill: decisions.spill,
                hasher: decisions.hasher,
                shape: decisions.shape,
                unavailable: decisions.unavailable,
            },
            rerun_jobs: runtime.rerun_jobs,
            rerun_us_max: runtime.rerun_us_max,
            verified_rows: runtime.verified_rows,
            waiting_jobs: runtime.waiting_jobs,
            waiting_bytes: runtime.waiting_bytes,
        }
    }
}

fn device(device: DeviceReport) -> GpuDeviceReport {
    let DeviceReport { info, state, batch_latency, .. } = device;
    GpuDeviceReport {
        index: info.index,
        name: info.name,
        uuid: info.uuid,
        driver: info.driver,
        process: device.process,
        failed: match state {
            DeviceState::Running => None,
            DeviceState::Failed { reason, .. } => Some(reason),
        },
        jobs: device.jobs,
        bytes: device.bytes,
        batches: device.batches,
        errors: device.errors,
        hangs: device.hangs,
        mismatches: device.mismatches,
        reopened: device.reopened,
        batch_us_p50: batch_latency.us_p50,
        batch_us_p99: batch_latency.us_p99,
        batch_us_max: batch_latency.us_max,
        crossovers: device
            .crossovers
            .into_iter()
            .map(|crossover| GpuCrossover {
                work: crossover.class.name().into(),
                threads: crossover.threads,
                bytes: crossover.bytes,
            })
            .collect(),
    }
}

fn describe(device: &DeviceReport) -> String {
    let info = &device.info;
    let state = match &device.state {
        DeviceState::Running => String::new(),
        DeviceState::Failed { reason, .. } => format!(", not in use: {reason}"),
    };
    format!("{}: {}, driver {}{state}", info.index, info.name, info.driver)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switched_off_there_is_none_and_the_report_says_so() {
        let config = GpuConfig { mode: Mode::Off, ..GpuConfig::default() };
        let found = FoundGpus::find(&config, None, false).expect("nothing to fail");
        let pool = found.memory(1 << 20).expect("memory");
        assert!(pool.shared_memory().is_none(), "nobody is to map it");
        let gpus = found.start(&pool).expect("nothing to fail");
        assert!(gpus.runtime().is_none());
        let report = gpus.report();
        assert_eq!((report.mode.as_str(), report.reason.as_deref()), ("off", Some("switched off")));
        for dry_run in [true, false] {
            let refused = gpus.drill(GpuDrill::Hang, dry_run);
            assert_eq!(refused, Err("no GPU is used: switched off".into()));
        }
    }

    #[test]
    fn a_device_that_does_not_exist_is_refused_where_one_is_required() {
        let config = GpuConfig { mode: Mode::Require, devices: vec![4000], ..GpuConfig::default() };
        assert!(FoundGpus::find(&config, None, false).is_err());
        assert!(Gpus::check(&config).is_err());
    }
}
