//! The GPUs of a daemon: started once for all arrays, listed in every status; their failures become events.
//!
//! Invariant: without a working GPU the daemon does everything it does with one, unless it was told to
//! require one. Must not know what jobs are.

use crate::control::{GpuCrossover, GpuDecisions, GpuDeviceReport, GpuDrill, GpuReport};
use crate::daemon::events::{EventLog, News, kinds};
use calpe_core::block_io::Pool;
use calpe_core::volume::NoticeLevel;
use calpe_gpu::cuda::{CudaDriver, Tuning};
use calpe_gpu::{
    CalibrationSource, DeviceReport, DeviceState, Drill, GpuConfig, GpuError, GpuEventKind, GpuRuntime, Mode,
    check_devices,
};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Name of the file with measurements of GPUs, in the runtime directory.
const CALIBRATION_NAME: &str = "gpu-calibration.json";

/// Used in events about GPUs in place of an array's name.
const EVENTS_OF: &str = "gpu";

/// The GPUs, or why none is used.
#[derive(Clone, Debug)]
pub(crate) struct Gpus {
    mode: Mode,
    runtime: Result<GpuRuntime, String>,
}

impl Gpus {
    /// Opens and measures the configured GPUs, which takes a second or so at the first start. `pool`: holds
    /// the bytes of jobs; `dir`: where measurements are kept.
    ///
    /// # Errors
    /// When a GPU is required and none can be used, or one is named that does not exist.
    pub(crate) fn start(config: &GpuConfig, pool: &Pool, dir: Option<&Path>) -> io::Result<Gpus> {
        let mode = config.mode;
        if mode == Mode::Off {
            return Ok(Gpus { mode, runtime: Err("switched off".into()) });
        }
        let calibration = match dir {
            Some(dir) => CalibrationSource::Cache(dir.join(CALIBRATION_NAME)),
            None => CalibrationSource::Measure,
        };
        let driver = Arc::new(CudaDriver::new(Tuning::default()));
        match GpuRuntime::start(config, driver, std::slice::from_ref(pool), calibration) {
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

    /// Fails early if a required GPU is missing; opens nothing.
    ///
    /// # Errors
    /// As [`Gpus::start`].
    pub(crate) fn check(config: &GpuConfig) -> io::Result<()> {
        match config.mode {
            Mode::Require => {
                check_devices(config, &CudaDriver::new(Tuning::default())).map_err(io::Error::other)
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
        let pool = Pool::new(1 << 20).expect("memory");
        let config = GpuConfig { mode: Mode::Off, ..GpuConfig::default() };
        let gpus = Gpus::start(&config, &pool, None).expect("nothing to fail");
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
        let pool = Pool::new(1 << 20).expect("memory");
        let config = GpuConfig { mode: Mode::Require, devices: vec![4000], ..GpuConfig::default() };
        assert!(Gpus::start(&config, &pool, None).is_err());
        assert!(Gpus::check(&config).is_err());
    }
}
