//! Measures a device: its link and memory, kernels on columns in its memory, and the whole way from host
//! memory and back. Each rate stands beside the ceiling measured in the same run.
//!
//! Invariant: a rate is the median of several measurements, with the slowest and the fastest. Must not know
//! how a run is requested.

mod ceilings;
mod pipeline;
mod resident;

use std::fmt;
use std::time::Instant;

use serde::Serialize;

use super::tuning::{Method, Tuning};
use super::{CudaDriver, info};
use crate::device::{DeviceError, DeviceInfo};
use calpe_core::block_io::{BufMut, Pool};
use calpe_core::codec::{Codec, Transform};

pub use ceilings::Ceilings;
pub use pipeline::{Latency, PipelineRow, SweepRow};
pub use resident::{HashRow, ResidentRow};

/// Version of the JSON form of a report.
pub const OUTPUT_VERSION: u32 = 1;

/// Measurements of one thing; odd, so that the median is one of them.
const REPETITIONS: usize = 5;

/// Bytes of the slab that end-to-end runs read and write: larger than any cache.
const SLAB_BYTES: usize = 2 << 30;

/// Bytes of the slab that hold inputs; half as many hold outputs.
const INPUT_BYTES: usize = 1 << 30;

/// Codes that are measured.
const GEOMETRIES: [(usize, usize); 8] = [(4, 2), (8, 2), (8, 3), (8, 4), (10, 4), (16, 4), (24, 8), (32, 16)];

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Number of the device.
    pub index: usize,
    /// Whether to try other tunings, too.
    pub sweep: bool,
    /// How long one end-to-end measurement lasts, in seconds.
    pub seconds: f64,
}

impl Default for BenchOptions {
    fn default() -> BenchOptions {
        BenchOptions { index: 0, sweep: false, seconds: 0.15 }
    }
}

/// Several measurements of one thing, in units of 10^9 bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rate {
    /// The middle one.
    pub gb_per_s_median: f64,
    /// The slowest.
    pub gb_per_s_min: f64,
    /// The fastest.
    pub gb_per_s_max: f64,
}

impl Rate {
    /// The rate from one or more measurements in bytes per second.
    fn of(mut rates: Vec<f64>) -> Rate {
        rates.sort_by(f64::total_cmp);
        let at = |index: usize| rates[index] / 1e9;
        Rate { gb_per_s_median: at(rates.len() / 2), gb_per_s_min: at(0), gb_per_s_max: at(rates.len() - 1) }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{:.1} ({:.1}-{:.1})", self.gb_per_s_median, self.gb_per_s_min, self.gb_per_s_max);
        f.pad(&text)
    }
}

/// All results.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// [`OUTPUT_VERSION`].
    pub version: u32,
    /// The device.
    pub device: DeviceInfo,
    /// Seconds to open the device: until its kernels were assembled and the buffers registered.
    pub open_seconds: f64,
    /// Bytes of buffers registered.
    pub registered_bytes: usize,
    /// Seconds that registering them took.
    pub registered_seconds: f64,
    /// Link and memory.
    pub ceilings: Ceilings,
    /// Coding of columns in device memory.
    pub resident: Vec<ResidentRow>,
    /// Hashing of blocks in device memory.
    pub blake3: Vec<HashRow>,
    /// Batches from host memory and back.
    pub pipeline: Vec<PipelineRow>,
    /// Duration of one batch at a time.
    pub latency: Vec<Latency>,
    /// Other tunings.
    pub sweep: Vec<SweepRow>,
    /// How long all of it took, in seconds.
    pub seconds: f64,
}

/// Host memory of the end-to-end runs.
struct Memory {
    pool: Pool,
    inputs: BufMut,
    outputs: BufMut,
}

impl Memory {
    fn new() -> Result<Memory, DeviceError> {
        let failed = |error: std::io::Error| DeviceError::Failed {
            operation: "allocating the slab of the benchmark",
            text: error.to_string(),
        };
        let pool = Pool::new(SLAB_BYTES).map_err(failed)?;
        let mut inputs = pool.alloc(INPUT_BYTES);
        noise(&mut inputs);
        let outputs = pool.alloc(INPUT_BYTES / 2);
        Ok(Memory { pool, inputs, outputs })
    }
}

/// Fills memory with random bytes, so that no kernel meets a special case.
fn noise(bytes: &mut [u8]) {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    for word in bytes.as_chunks_mut::<8>().0 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *word = state.to_le_bytes();
    }
}

fn codec(data: usize, parity: usize) -> Codec {
    Codec::new(data, parity).expect("a geometry of the benchmark")
}

/// The first `lost` data columns from the others.
fn recovery(codec: &Codec, lost: usize) -> Transform {
    let present: Vec<usize> = (lost..lost + codec.data()).collect();
    codec.recovery(&present, &(0..lost).collect::<Vec<_>>()).expect("a pattern of the benchmark")
}

/// Measures a device.
///
/// # Errors
/// When there is no such device, it fails, or there is too little memory (3 GiB on host and device each).
pub fn run(options: &BenchOptions) -> Result<BenchReport, DeviceError> {
    let begun = Instant::now();
    let device = info(options.index)?;
    let ceilings = ceilings::measure(options.index)?;
    let (resident, blake3) = resident::measure(options.index, ceilings.device_copy.gb_per_s_median)?;

    let mut memory = Memory::new()?;
    let opening = Instant::now();
    let driver = CudaDriver::new(Tuning::default());
    let mut opened = driver.open_cuda(options.index, std::slice::from_ref(&memory.pool))?;
    let open_seconds = opening.elapsed().as_secs_f64();
    let registered = opened.registered().clone();
    let pipeline = pipeline::measure(&mut opened, &mut memory, &ceilings, options.seconds)?;
    let mut sweep = Vec::new();
    if options.sweep {
        sweep.extend(pipeline::sweep(&mut opened, &mut memory, &ceilings, options.seconds)?);
        // These settings take effect only when a device is opened.
        for (name, tuning) in pipeline::openings() {
            let other = CudaDriver::new(tuning);
            let mut other = other.open_cuda(options.index, std::slice::from_ref(&memory.pool))?;
            sweep.extend(pipeline::sweep_one(&mut other, &mut memory, &ceilings, options.seconds, &name)?);
        }
    }
    // Last, since it leaves compilations running on the other thread.
    let latency = pipeline::latencies(&mut opened, &mut memory)?;
    Ok(BenchReport {
        version: OUTPUT_VERSION,
        device,
        open_seconds,
        registered_bytes: registered.bytes,
        registered_seconds: registered.took.as_secs_f64(),
        ceilings,
        resident,
        blake3,
        pipeline,
        latency,
        sweep,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceInfo { name, driver, memory_bytes, .. } = &self.device;
        writeln!(
            f,
            "{name}, driver {driver}, {} GiB; rates in GB/s: median (slowest-fastest)",
            memory_bytes >> 30
        )?;
        writeln!(
            f,
            "opened in {:.2} s, {} MiB registered in {:.0} ms",
            self.open_seconds,
            self.registered_bytes >> 20,
            self.registered_seconds * 1e3
        )?;
        write!(f, "\n{}", self.ceilings)?;
        writeln!(
            f,
            "\non the device          method      moved                     of copy   user data   compiled"
        )?;
        for row in &self.resident {
            writeln!(f, "{row}")?;
        }
        writeln!(f, "\nBLAKE3, blocks of 4 KiB on the device")?;
        for row in &self.blake3 {
            writeln!(f, "{row}")?;
        }
        writeln!(
            f,
            "\nfrom host memory and back                                  in                   of link  MiB a batch"
        )?;
        for row in &self.pipeline {
            writeln!(f, "{row}")?;
        }
        writeln!(f, "\none batch at a time, microseconds")?;
        for row in &self.latency {
            writeln!(f, "{row}")?;
        }
        if !self.sweep.is_empty() {
            writeln!(f, "\nother tunings (encode + hash, 64 stripes of 64 KiB chunks)")?;
            for row in &self.sweep {
                writeln!(f, "{row}")?;
            }
        }
        writeln!(f, "\n{:.0} s in all", self.seconds)
    }
}

/// Name of a method in tables.
fn method_name(method: Method) -> &'static str {
    match method {
        Method::Auto => "auto",
        Method::Table => "rs_table",
        Method::Xor => "rs_xor",
        Method::LogExp => "rs_logexp",
        Method::Fused => "fused",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_the_middle_one_with_its_neighbours() {
        let rate = Rate::of(vec![3e9, 1e9, 2e9]);
        assert_eq!((rate.gb_per_s_median, rate.gb_per_s_min, rate.gb_per_s_max), (2.0, 1.0, 3.0));
        assert_eq!(rate.to_string(), "2.0 (1.0-3.0)");
    }
}
