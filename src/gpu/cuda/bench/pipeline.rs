//! The whole way: batches from registered host memory through the slots of a device and back, with all slots
//! in flight, as the runtime drives them; and the duration of one batch at a time.
#![allow(unsafe_code)] // a device is given addresses of memory that the benchmark keeps

use std::fmt;
use std::ptr::NonNull;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::{Ceilings, Memory, Rate, codec, method_name, recovery};
use crate::cuda::CudaDevice;
use crate::cuda::tuning::{Method, Tuning};
use crate::device::{Device, DeviceError, HostRange, Work};
use calpe_core::codec::Transform;

/// Measurements of one end-to-end run.
const RUNS: usize = 3;

/// Bytes of a chunk of a stripe.
const CHUNK: usize = 64 << 10;

/// Stripes of a scattered batch.
const STRIPES: usize = 64;

/// Number of different batches used in turn: more than there are slots.
const BATCHES: usize = 10;

/// Codes for which tunings are compared.
const SWEPT: [(usize, usize); 3] = [(4, 2), (8, 4), (32, 16)];

/// Longer than any batch takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// An end-to-end run.
#[derive(Clone, Debug, Serialize)]
pub struct PipelineRow {
    /// The geometry and the computation.
    pub name: String,
    /// How the bytes lie in host memory.
    pub layout: &'static str,
    /// How outputs are computed.
    pub method: &'static str,
    /// Bytes of inputs.
    pub input: Rate,
    /// `input` as a fraction of the link's rate while as much comes back.
    pub of_link: f64,
    /// Input bytes of a batch.
    pub batch_bytes: usize,
}

/// The duration of a batch that has the device to itself.
#[derive(Clone, Debug, Serialize)]
pub struct Latency {
    /// What the batch computes.
    pub name: String,
    /// Input bytes.
    pub input_bytes: usize,
    /// The median time from the start of a batch until its result is there, in microseconds.
    pub us_median: f64,
    /// The 99th percentile.
    pub us_p99: f64,
    /// The longest time.
    pub us_max: f64,
}

/// One tuning.
#[derive(Clone, Debug, Serialize)]
pub struct SweepRow {
    /// What differs from the default.
    pub tuning: String,
    /// Data and parity columns.
    pub geometry: String,
    /// How the bytes lie in host memory.
    pub layout: &'static str,
    /// Bytes of inputs.
    pub input: Rate,
    /// `input` as a fraction of the link's rate while as much comes back.
    pub of_link: f64,
}

/// How ranges lie in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// Each batch is one run.
    Contiguous,
    /// Every chunk lies apart from the others.
    Chunks,
    /// Every stripe lies apart from the others, with its chunks adjacent.
    Stripes,
}

impl Layout {
    fn name(self) -> &'static str {
        match self {
            Layout::Contiguous => "contiguous",
            Layout::Chunks => "scattered chunks",
            Layout::Stripes => "scattered stripes",
        }
    }
}

/// The numbers below `count`, shuffled.
fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut state = 0x2545_F491_4F6C_DD1Du64;
    for last in (1..count).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        order.swap(last, (state % (last as u64 + 1)) as usize);
    }
    order
}

/// Ranges for the columns of batch `nth`, within `total` bytes at `start`.
fn ranges(
    layout: Layout,
    columns: usize,
    column_bytes: usize,
    nth: usize,
    start: NonNull<u8>,
    total: usize,
) -> Vec<HostRange> {
    let at = |offset: usize| start.map_addr(|address| address.saturating_add(offset));
    let bytes = columns * column_bytes;
    if bytes == 0 {
        return Vec::new();
    }
    if layout == Layout::Contiguous {
        let base = nth % (total / bytes) * bytes;
        return (0..columns)
            .map(|column| HostRange {
                column,
                offset: 0,
                start: at(base + column * column_bytes),
                bytes: column_bytes,
            })
            .collect();
    }
    let stripes = column_bytes / CHUNK;
    // Number of chunks that lie together, and the places of such groups.
    let together = if layout == Layout::Stripes { columns } else { 1 };
    let places = shuffled(total / (CHUNK * together));
    let groups = stripes * columns / together;
    let mut ranges = Vec::new();
    for stripe in 0..stripes {
        for column in 0..columns {
            let chunk = stripe * columns + column;
            let place = places[(nth * groups + chunk / together) % places.len()];
            let offset = (place * together + chunk % together) * CHUNK;
            ranges.push(HostRange { column, offset: stripe * CHUNK, start: at(offset), bytes: CHUNK });
        }
    }
    ranges
}

/// Batches that differ only in where their ranges lie.
fn batches(
    memory: &mut Memory,
    transform: Option<&Transform>,
    hash: bool,
    columns: usize,
    column_bytes: usize,
    layout: Layout,
) -> Vec<Work> {
    let outputs = transform.map_or(0, Transform::outputs);
    let start = |bytes: &mut [u8]| (NonNull::new(bytes.as_mut_ptr()).expect("memory"), bytes.len());
    let (inputs_start, inputs_bytes) = start(&mut memory.inputs);
    let (outputs_start, outputs_bytes) = start(&mut memory.outputs);
    (0..BATCHES)
        .map(|nth| Work {
            transform: transform.cloned(),
            hash,
            columns,
            column_bytes,
            inputs: ranges(layout, columns, column_bytes, nth, inputs_start, inputs_bytes),
            outputs: ranges(layout, outputs, column_bytes, nth, outputs_start, outputs_bytes),
        })
        .collect()
}

/// Runs the batches in turn for some time, with all slots in flight. Returns input bytes per second.
fn drive(device: &mut CudaDevice, works: &[Work], seconds: f64) -> Result<f64, DeviceError> {
    let (wake, woken) = mpsc::channel();
    let begun = Instant::now();
    let (mut started, mut finished) = (0, 0);
    let mut idle: Vec<usize> = (0..device.slots()).collect();
    loop {
        if begun.elapsed().as_secs_f64() < seconds {
            while let Some(slot) = idle.pop() {
                let (work, wake) = (works[started % works.len()].clone(), wake.clone());
                // SAFETY: inputs are never written; outputs are written only by the device, perhaps by
                // several batches at a time, and nothing reads them. The memory outlives this call, which
                // waits for all batches.
                unsafe { device.start(slot, work, Box::new(move || wake.send(slot).unwrap_or_default())) }?;
                started += 1;
            }
        }
        if started == finished {
            break;
        }
        let slot = woken.recv_timeout(PATIENCE).map_err(|_| hung())?;
        device.finish(slot)?;
        finished += 1;
        idle.push(slot);
    }
    let bytes = works[0].columns * works[0].column_bytes * finished;
    Ok(bytes as f64 / begun.elapsed().as_secs_f64())
}

fn hung() -> DeviceError {
    DeviceError::Failed { operation: "waiting for a batch", text: format!("none ended within {PATIENCE:?}") }
}

fn rate(device: &mut CudaDevice, works: &[Work], seconds: f64) -> Result<Rate, DeviceError> {
    // Warms up pages, caches and the device's clock, which are not to be measured.
    drive(device, works, 0.05)?;
    Ok(Rate::of((0..RUNS).map(|_| drive(device, works, seconds)).collect::<Result<_, _>>()?))
}

/// Length of a column such that `columns` of them fill a slot.
fn largest_column(device: &CudaDevice, columns: usize) -> usize {
    device.slot_bytes() / columns / CHUNK * CHUNK
}

pub(super) fn measure(
    device: &mut CudaDevice,
    memory: &mut Memory,
    ceilings: &Ceilings,
    seconds: f64,
) -> Result<Vec<PipelineRow>, DeviceError> {
    let mut cases: Vec<(String, Option<Transform>, bool, usize)> = Vec::new();
    for (data, parity) in [(4, 2), (8, 2), (8, 3), (8, 4), (10, 4), (16, 4), (24, 8), (32, 16)] {
        let codec = codec(data, parity);
        cases.push((format!("{data}+{parity} encode + hash"), Some(codec.encoding()), true, data));
        if (data, parity) == (8, 4) {
            cases.push(("8+4 encode".to_owned(), Some(codec.encoding()), false, data));
            cases.push(("8+4 recover 1 + hash".to_owned(), Some(recovery(&codec, 1)), true, data));
            cases.push(("8+4 recover 4 + hash".to_owned(), Some(recovery(&codec, 4)), true, data));
        }
    }
    cases.push(("hash".to_owned(), None, true, 8));
    let mut rows = Vec::new();
    for (name, transform, hash, columns) in &cases {
        let outputs = transform.as_ref().map_or(0, Transform::outputs);
        let back = outputs as f64 / *columns as f64;
        if let Some(transform) = transform {
            device.prepare(transform)?;
        }
        let methods: &[Method] = match transform {
            Some(_) if *hash && outputs <= 4 => &[Method::Auto, Method::Fused],
            _ => &[Method::Auto],
        };
        for layout in [Layout::Contiguous, Layout::Chunks, Layout::Stripes] {
            let largest = largest_column(device, columns + outputs);
            let column_bytes = match layout {
                Layout::Contiguous => largest,
                Layout::Chunks | Layout::Stripes => largest.min(STRIPES * CHUNK),
            };
            let works = batches(memory, transform.as_ref(), *hash, *columns, column_bytes, layout);
            for &method in methods {
                device.tuning_mut().method = method;
                let input = rate(device, &works, seconds)?;
                rows.push(PipelineRow {
                    name: name.clone(),
                    layout: layout.name(),
                    method: method_name(method),
                    of_link: input.gb_per_s_median / ceilings.link(back),
                    input,
                    batch_bytes: columns * column_bytes,
                });
            }
        }
    }
    device.tuning_mut().method = Method::Auto;
    Ok(rows)
}

/// Durations of batches run one after the other.
fn times(device: &mut CudaDevice, works: &[Work], count: usize) -> Result<Vec<f64>, DeviceError> {
    let (wake, woken) = mpsc::channel();
    let mut times = Vec::with_capacity(count);
    for nth in 0..count {
        let (work, wake) = (works[nth % works.len()].clone(), wake.clone());
        let begun = Instant::now();
        // SAFETY: as in `drive`.
        unsafe { device.start(0, work, Box::new(move || wake.send(()).unwrap_or_default())) }?;
        woken.recv_timeout(PATIENCE).map_err(|_| hung())?;
        device.finish(0)?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times)
}

fn latency(name: String, works: &[Work], mut times: Vec<f64>) -> Latency {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let input_bytes = works[0].columns * works[0].column_bytes;
    Latency { name, input_bytes, us_median: at(0.5), us_p99: at(0.99), us_max: at(1.0) }
}

pub(super) fn latencies(device: &mut CudaDevice, memory: &mut Memory) -> Result<Vec<Latency>, DeviceError> {
    let codec = codec(8, 4);
    let transform = codec.encoding();
    let mut rows = Vec::new();
    for column_bytes in [4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20] {
        let layout = if column_bytes > CHUNK { Layout::Stripes } else { Layout::Contiguous };
        let works = batches(memory, Some(&transform), true, 8, column_bytes, layout);
        times(device, &works, 20)?;
        let measured = times(device, &works, 200)?;
        rows.push(latency("8+4 encode + hash".to_owned(), &works, measured));
    }
    // Shows whether compiling a large matrix on the other thread holds up batches.
    let works = batches(memory, None, true, 8, 64 << 10, Layout::Stripes);
    let alone = times(device, &works, 2000)?;
    rows.push(latency("hash".to_owned(), &works, alone));
    let wide = super::codec(32, 16);
    for lost in 1..=4 {
        device.prepare_later(&recovery(&wide, 4 * lost));
    }
    let beside = times(device, &works, 10_000)?;
    rows.push(latency("hash while matrices are compiled".to_owned(), &works, beside));
    Ok(rows)
}

pub(super) fn sweep_one(
    device: &mut CudaDevice,
    memory: &mut Memory,
    ceilings: &Ceilings,
    seconds: f64,
    tuning: &str,
) -> Result<Vec<SweepRow>, DeviceError> {
    let mut rows = Vec::new();
    for (data, parity) in SWEPT {
        let transform = codec(data, parity).encoding();
        device.prepare(&transform)?;
        let column_bytes = largest_column(device, data + parity).min(STRIPES * CHUNK);
        for layout in [Layout::Chunks, Layout::Stripes] {
            let works = batches(memory, Some(&transform), true, data, column_bytes, layout);
            let input = rate(device, &works, seconds)?;
            let of_link = input.gb_per_s_median / ceilings.link(parity as f64 / data as f64);
            let (tuning, geometry) = (tuning.to_owned(), format!("{data}+{parity}"));
            rows.push(SweepRow { tuning, geometry, layout: layout.name(), input, of_link });
        }
    }
    Ok(rows)
}

/// Tunings that take effect only when a device is opened.
pub(super) fn openings() -> Vec<(String, Tuning)> {
    let tuning = Tuning::default;
    let mut tried = vec![("no priorities".to_owned(), Tuning { priorities: false, ..tuning() })];
    tried.push(("1 stream for computing".to_owned(), Tuning { compute_streams: 1, ..tuning() }));
    for slots in [3, 6] {
        tried.push((format!("{slots} slots"), Tuning { slots, ..tuning() }));
    }
    tried
}

pub(super) fn sweep(
    device: &mut CudaDevice,
    memory: &mut Memory,
    ceilings: &Ceilings,
    seconds: f64,
) -> Result<Vec<SweepRow>, DeviceError> {
    let before = device.tuning_mut().clone();
    let mut tried: Vec<(String, Tuning)> = vec![("as it is".to_owned(), before.clone())];
    for kib in [16, 32, 64] {
        for (gather_blocks, scatter_blocks) in [(16, 6), (24, 6), (32, 6), (32, 12), (48, 16)] {
            let tuning = Tuning { chunk_bytes: kib << 10, gather_blocks, scatter_blocks, ..before.clone() };
            tried.push((format!("{kib} KiB, {gather_blocks} in, {scatter_blocks} out"), tuning));
        }
    }
    tried.push(("in by the copy engine".to_owned(), Tuning { engine_run_in: 0, ..before.clone() }));
    tried.push(("out by the copy engine".to_owned(), Tuning { engine_run_out: 0, ..before.clone() }));
    let both = Tuning { engine_run_in: 0, engine_run_out: 0, ..before.clone() };
    tried.push(("both by the copy engine".to_owned(), both));
    tried.push(("fused".to_owned(), Tuning { method: Method::Fused, ..before.clone() }));
    let mut rows = Vec::new();
    for (name, tuning) in tried {
        *device.tuning_mut() = tuning;
        rows.extend(sweep_one(device, memory, ceilings, seconds, &name)?);
    }
    *device.tuning_mut() = before;
    Ok(rows)
}

impl fmt::Display for PipelineRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PipelineRow { name, layout, method, input, of_link, batch_bytes } = self;
        let batch = *batch_bytes as f64 / f64::from(1 << 20);
        write!(f, "{name:<22} {layout:<18} {method:<10} {input:<24} {of_link:>5.3} {batch:>9.1}")
    }
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Latency { name, input_bytes, us_median, us_p99, us_max } = self;
        let kib = input_bytes >> 10;
        write!(
            f,
            "{name:<34} {kib:>6} KiB  median {us_median:>7.0}  p99 {us_p99:>7.0}  longest {us_max:>8.0}"
        )
    }
}

impl fmt::Display for SweepRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SweepRow { tuning, geometry, layout, input, of_link } = self;
        write!(f, "{tuning:<26} {geometry:>6} {layout:<18} {input:<24} {of_link:>5.3}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_batch_lie_inside_the_memory_and_cover_every_column_once() {
        let start = NonNull::new(std::ptr::without_provenance_mut::<u8>(1 << 20)).expect("an address");
        let total = 64 << 20;
        for layout in [Layout::Contiguous, Layout::Chunks, Layout::Stripes] {
            for nth in 0..BATCHES {
                let ranges = ranges(layout, 8, 16 * CHUNK, nth, start, total);
                let mut covered: Vec<(usize, usize)> = Vec::new();
                let mut places: Vec<usize> = Vec::new();
                for range in &ranges {
                    let place = range.start.as_ptr().addr() - (1 << 20);
                    assert!(place + range.bytes <= total, "{layout:?}");
                    for at in (0..range.bytes).step_by(CHUNK) {
                        covered.push((range.column, range.offset + at));
                        places.push(place + at);
                    }
                }
                covered.sort_unstable();
                let all = (0..8).flat_map(|column| (0..16).map(move |at| (column, at * CHUNK)));
                assert_eq!(covered, all.collect::<Vec<_>>(), "{layout:?}");
                places.sort_unstable();
                places.dedup();
                assert_eq!(places.len(), 128, "{layout:?}: no memory is in a batch twice");
            }
        }
    }
}
