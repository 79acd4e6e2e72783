//! What computes parity and hashes: the CPU's engine, and the GPUs with their counts and decisions.

use serde::{Deserialize, Serialize};

/// What computes parity.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineReport {
    /// Name of the CPU's engine ("gfni").
    pub codec: String,
    /// GPUs beside it.
    #[serde(default)]
    pub gpu: GpuReport,
}

/// The GPUs of a daemon; they serve all its arrays.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuReport {
    /// The configured mode: "auto", "off" or "require".
    pub mode: String,
    /// Why there are none.
    pub reason: Option<String>,
    /// One entry a device.
    pub devices: Vec<GpuDeviceReport>,
    /// How many of the jobs offered to them were taken, and why others were not.
    pub decisions: GpuDecisions,
    /// Jobs taken that the CPU did, because a device failed.
    pub rerun_jobs: u64,
    /// The longest time that a requester waited for one of them, in microseconds.
    pub rerun_us_max: u64,
    /// Rows of blocks that the CPU computed again for comparison.
    pub verified_rows: u64,
    /// Jobs that wait for a device.
    pub waiting_jobs: u64,
    /// Bytes of their inputs.
    pub waiting_bytes: u64,
}

/// Number of jobs for each decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuDecisions {
    /// Taken for a device.
    pub taken: u64,
    /// Left to the CPU, which is faster for so few bytes.
    pub small: u64,
    /// Left to the CPU, because the devices had enough to do.
    pub spill: u64,
    /// Left to the CPU, because no device computes that checksum.
    pub hasher: u64,
    /// Left to the CPU, because no device takes jobs of this shape.
    pub shape: u64,
    /// Left to the CPU, because no device ran.
    pub unavailable: u64,
}

/// One GPU.
// More than 15 fields: mirrors the JSON of `calpe status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuDeviceReport {
    /// Its number, from 0.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// Its identity.
    pub uuid: String,
    /// The driver's version.
    pub driver: String,
    /// The process that it lies in, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<u32>,
    /// None while it runs; else why it does not run.
    pub failed: Option<String>,
    /// Jobs done.
    pub jobs: u64,
    /// Bytes of their inputs.
    pub bytes: u64,
    /// Launches.
    pub batches: u64,
    /// How often it failed, wrong results included.
    pub errors: u64,
    /// How often it did not answer.
    pub hangs: u64,
    /// How often it computed something else than the CPU.
    pub mismatches: u64,
    /// How often it was opened again.
    pub reopened: u64,
    /// Median time of a batch, in microseconds.
    pub batch_us_p50: u64,
    /// 99th percentile of the time of a batch, in microseconds.
    pub batch_us_p99: u64,
    /// The longest.
    pub batch_us_max: u64,
    /// From which size on it is as fast as the CPU.
    pub crossovers: Vec<GpuCrossover>,
}

/// From which size on a GPU is as fast as some CPU threads, measured when the daemon started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuCrossover {
    /// The work: "encode_hash", "encode", "recover_hash" or "hash".
    pub work: String,
    /// CPU threads it is compared with.
    pub threads: usize,
    /// Bytes of input of the smallest batch; None: the threads are faster at any.
    pub bytes: Option<u64>,
}
