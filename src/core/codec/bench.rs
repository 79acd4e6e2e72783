//! Measures the codec: every engine, geometry and block size asked for, beside the rate at which one core
//! copies memory in the same run. Single-threaded. Rates are of user data: what a client wrote, not what the
//! engine touched. Each cell is measured on two kinds of memory: one stripe over and over (its columns stay
//! in the cache) and stripes in turn over a buffer larger than caches (each column comes from memory and each
//! output goes there). Invariant: copying and coding are interleaved, so that other load on the machine slows
//! both. Must not know how a run is requested.

mod hash;

use std::fmt::{self, Write as _};
use std::hint::black_box;
use std::str::FromStr;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::{COLUMNS_MAX, Codec, Engine};
use crate::units::HumanSize;

pub use hash::{HashReport, HashRow, run_hash};

/// Version of the JSON form of a report.
pub const OUTPUT_VERSION: u32 = 1;

/// Memory of a default run. Copying moves one half to the other, which is more than second-level caches and
/// all but the largest third-level caches hold.
const MEMORY_BYTES: usize = 512 << 20;

/// Least memory of a run, enough for one stripe of a small geometry.
const MEMORY_BYTES_MIN: usize = 1 << 20;

/// Shortest column that is measured: a sector, the least that a device takes. Shorter columns would measure
/// the call, not the codec, and the list of the columns would take more memory than the columns.
pub const BLOCK_BYTES_MIN: usize = 512;

/// Measurements per cell; odd, so that the median is one of them.
const REPETITIONS: usize = 7;

/// Shortest time of one measurement, however small the budget: the clock is read every few calls.
const SLICE_MIN: Duration = Duration::from_micros(200);

/// Columns are aligned as the daemon's buffers are.
const ALIGNMENT: usize = 4096;

/// Numbers of data and parity columns that a codec can be made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    data: usize,
    parity: usize,
}

/// Why a text or a pair of numbers is not a geometry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{given}' is not a geometry: write data+parity, at least 1 data column and at most 255 in all (8+4)"
)]
pub struct GeometryError {
    given: String,
}

impl Geometry {
    /// `data` + `parity` columns.
    ///
    /// # Errors
    /// Unless 1 <= `data` and `data + parity` <= [`COLUMNS_MAX`].
    pub fn new(data: usize, parity: usize) -> Result<Geometry, GeometryError> {
        if data >= 1 && data.checked_add(parity).is_some_and(|columns| columns <= COLUMNS_MAX) {
            return Ok(Geometry { data, parity });
        }
        Err(GeometryError { given: format!("{data}+{parity}") })
    }

    fn columns(self) -> usize {
        self.data + self.parity
    }
}

impl FromStr for Geometry {
    type Err = GeometryError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fail = || GeometryError { given: text.to_owned() };
        let (data, parity) = text.split_once('+').ok_or_else(fail)?;
        let number = |digits: &str| digits.trim().parse().map_err(|_| fail());
        Geometry::new(number(data)?, number(parity)?)
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}+{}", self.data, self.parity))
    }
}

/// What to measure and for how long.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Engines to compare; those that this CPU cannot run are reported as skipped.
    pub engines: Vec<Engine>,
    /// Geometries.
    pub geometries: Vec<Geometry>,
    /// Lengths of a column in bytes.
    pub block_bytes: Vec<usize>,
    /// Memory to use, in bytes; the larger, the less of it a cache holds.
    pub memory_bytes: usize,
    /// Time that the whole run should take, in seconds. A floor per measurement may exceed it.
    pub seconds: f64,
}

impl Default for BenchOptions {
    /// All engines, five geometries, rows of 4 KiB and chunks of 64 KiB: about 20 seconds, filling the memory
    /// included.
    fn default() -> Self {
        let geometries = [(4, 2), (8, 4), (16, 4), (24, 8), (32, 16)];
        BenchOptions {
            engines: Engine::ALL.to_vec(),
            geometries: geometries.map(|(data, parity)| Geometry { data, parity }).to_vec(),
            block_bytes: vec![4 << 10, 64 << 10],
            memory_bytes: MEMORY_BYTES,
            seconds: 15.0,
        }
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
    /// The median as a multiple of the median rate of copying in this run.
    pub of_memcpy: f64,
}

impl Rate {
    /// The line of the report about copying, with buffers of `buffer_bytes`.
    fn memcpy_line(self, buffer_bytes: usize) -> String {
        format!(
            "memcpy in this run: {:.1} GB/s copied ({:.1} to {:.1}), buffers of {}",
            self.gb_per_s_median,
            self.gb_per_s_min,
            self.gb_per_s_max,
            HumanSize(buffer_bytes as u64)
        )
    }
}

/// Where the columns of a measurement come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// One stripe over and over.
    Cache,
    /// Many stripes in turn.
    Memory,
}

/// One engine on one geometry, block size and kind of memory.
#[derive(Clone, Debug, Serialize)]
pub struct BenchRow {
    /// The engine.
    pub engine: Engine,
    /// Data columns.
    pub data: usize,
    /// Parity columns.
    pub parity: usize,
    /// Bytes of a column.
    pub block_bytes: usize,
    /// Where the columns are.
    pub source: Source,
    /// All parities from all data columns.
    pub encode: Rate,
    /// The first min(k, m) data columns from the others.
    pub recover: Rate,
    /// All parities from the change of one data column; only that column counts as user data.
    pub update: Rate,
}

/// The outcome of [`run`].
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// See [`OUTPUT_VERSION`].
    pub output_version: u32,
    /// The engine that a codec uses on this CPU by default.
    pub fastest_engine: Engine,
    /// Memory that the run used, in bytes.
    pub memory_bytes: usize,
    /// Bytes copied per second by one core from one half of the memory to the other.
    pub memcpy: Rate,
    /// The measurements, in the order of the options.
    pub rows: Vec<BenchRow>,
    /// What was requested but could not be measured, and why.
    pub skipped: Vec<String>,
}

/// Measures what `options` ask for. Takes about `options.seconds` on the calling thread.
#[must_use]
pub fn run(options: &BenchOptions) -> BenchReport {
    let mut arena = Arena::new(options.memory_bytes.max(MEMORY_BYTES_MIN));
    let mut skipped = Vec::new();
    let cells = cells(options, arena.bytes().len(), &mut skipped);

    // Two sources, three operations.
    let measurements = cells.len().max(1) * 6 * REPETITIONS;
    let budget = if options.seconds.is_finite() { options.seconds.clamp(0.0, 1e6) } else { 0.0 };
    let slice = Duration::from_secs_f64(budget / measurements as f64).max(SLICE_MIN);

    // The first copy faults the arena's pages in; its rate is dropped.
    copy_rate(&mut arena);
    let mut copies = vec![copy_rate(&mut arena)];
    let mut rates: Vec<[Samples; 6]> = Vec::new();
    for cell in &cells {
        rates.push(cell.measure(&mut arena, slice));
        copies.push(copy_rate(&mut arena));
    }
    let copies = Samples(copies);
    let memcpy_median = copies.rate(1.0).gb_per_s_median;
    let rows = cells.iter().zip(&rates).flat_map(|(cell, samples)| {
        [Source::Cache, Source::Memory].into_iter().zip(samples.chunks(3)).map(|(source, samples)| BenchRow {
            engine: cell.codec.engine(),
            data: cell.geometry.data,
            parity: cell.geometry.parity,
            block_bytes: cell.block_bytes,
            source,
            encode: samples[0].rate(memcpy_median),
            recover: samples[1].rate(memcpy_median),
            update: samples[2].rate(memcpy_median),
        })
    });
    BenchReport {
        output_version: OUTPUT_VERSION,
        fastest_engine: Engine::fastest(),
        memory_bytes: arena.bytes().len(),
        memcpy: copies.rate(memcpy_median),
        rows: rows.collect(),
        skipped,
    }
}

impl BenchReport {
    /// The report as a table for people: a line per engine, geometry and block size.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "one core; GB/s of user data (10^9 bytes), median of {REPETITIONS}; fastest engine: {}\n\
             {}\n\
             in cache: one stripe over and over; in memory: stripes in turn over {}; x: encoding / memcpy\n",
            self.fastest_engine,
            self.memcpy.memcpy_line(self.memory_bytes / 2),
            HumanSize(self.memory_bytes as u64),
        );
        let _ = writeln!(text, "{:24}   {:^31}   {:^31}", "", "in cache", "in memory");
        let heads = format!("{:>7} {:>7} {:>7} {:>7}", "encode", "x", "recover", "update");
        let _ = writeln!(text, "{:8} {:>6} {:>8}   {heads}   {heads}", "engine", "k+m", "block");
        for pair in self.rows.chunks(2) {
            let row = &pair[0];
            let block = HumanSize(row.block_bytes as u64).to_string();
            let _ = write!(text, "{:8} {:>6} {block:>8}", row.engine, format!("{}+{}", row.data, row.parity));
            for row in pair {
                let [encode, recover, update] =
                    [row.encode, row.recover, row.update].map(|rate| rate.gb_per_s_median);
                let _ =
                    write!(text, "   {encode:7.1} {:7.2} {recover:7.1} {update:7.1}", row.encode.of_memcpy);
            }
            text.push('\n');
        }
        let spread = self.rows.iter().map(|row| row.encode.gb_per_s_min / row.encode.gb_per_s_median);
        if let Some(least) = spread.min_by(f64::total_cmp) {
            let _ = writeln!(
                text,
                "\nslowest encoding of all, as a fraction of its median: {least:.2} (near 1: a quiet machine)"
            );
        }
        for reason in &self.skipped {
            let _ = writeln!(text, "skipped: {reason}");
        }
        text
    }
}

/// One engine on one geometry and block size.
struct Cell {
    codec: Codec,
    geometry: Geometry,
    block_bytes: usize,
}

fn cells(options: &BenchOptions, memory_bytes: usize, skipped: &mut Vec<String>) -> Vec<Cell> {
    let mut cells = Vec::new();
    for &engine in &options.engines {
        for &geometry in &options.geometries {
            if geometry.parity == 0 {
                skipped.push(format!("{engine} {geometry}: nothing to compute without parity"));
                continue;
            }
            let codec = match Codec::with_engine(geometry.data, geometry.parity, engine) {
                Ok(codec) => codec,
                Err(error) => {
                    skipped.push(format!("{engine} {geometry}: {error}"));
                    continue;
                }
            };
            for &block_bytes in &options.block_bytes {
                match block_bytes.checked_mul(geometry.columns()) {
                    Some(stripe) if stripe > 0 && stripe <= memory_bytes => {
                        cells.push(Cell { codec: codec.clone(), geometry, block_bytes });
                    }
                    _ => skipped.push(format!(
                        "{engine} {geometry}: a stripe of columns of {block_bytes} bytes does not fit {}",
                        HumanSize(memory_bytes as u64)
                    )),
                }
            }
        }
    }
    cells
}

/// The columns of one stripe, sorted for the three operations.
struct Stripe<'a> {
    /// Columns e.. with e = min(k, m), k of them: the inputs of encoding and recovery.
    present: Vec<(usize, &'a [u8])>,
    data: Vec<&'a [u8]>,
    /// The first e columns, the outputs of recovery.
    lost: Vec<(usize, &'a mut [u8])>,
    /// m more columns, the parities.
    parity: Vec<(usize, &'a mut [u8])>,
}

impl Cell {
    /// Samples of encode, recover and update in the cache, then of the same in memory.
    fn measure(&self, arena: &mut Arena, slice: Duration) -> [Samples; 6] {
        let mut samples: [Samples; 6] = Default::default();
        let (cached, in_memory) = samples.split_at_mut(3);
        for (samples, stripes_max) in [(cached, 1), (in_memory, usize::MAX)] {
            let [encode, recover, update] = samples else { unreachable!("three operations") };
            let mut stripes = self.stripes(arena, stripes_max, false);
            self.sample(encode, &mut stripes, slice, self.geometry.data, |codec, stripe| {
                codec.encode(&stripe.data, &mut stripe.parity);
            });
            self.sample(update, &mut stripes, slice, 1, |codec, stripe| {
                codec.update(0, stripe.data[0], &mut stripe.parity);
            });
            drop(stripes);
            let mut stripes = self.stripes(arena, stripes_max, true);
            self.sample(recover, &mut stripes, slice, self.geometry.data, |codec, stripe| {
                let recovered = codec.recover(&stripe.present, &mut stripe.lost);
                recovered.expect("k distinct columns of one length");
            });
        }
        samples
    }

    /// Cuts the arena into stripes, at most `stripes_max`. A recovery writes the first min(k, m) columns of a
    /// stripe and reads the k behind them; encoding reads the first k and writes the last m.
    fn stripes<'a>(&self, arena: &'a mut Arena, stripes_max: usize, recovery: bool) -> Vec<Stripe<'a>> {
        let Geometry { data: k, parity: m } = self.geometry;
        let lost = k.min(m);
        let stripe_bytes = self.block_bytes * self.geometry.columns();
        let cut = |bytes: &'a mut [u8]| {
            let mut stripe =
                Stripe { present: Vec::new(), data: Vec::new(), lost: Vec::new(), parity: Vec::new() };
            for (column, bytes) in bytes.chunks_exact_mut(self.block_bytes).enumerate() {
                match (recovery, column) {
                    (false, column) if column < k => stripe.data.push(bytes),
                    (false, column) => stripe.parity.push((column - k, bytes)),
                    (true, column) if column < lost => stripe.lost.push((column, bytes)),
                    (true, column) if column < lost + k => stripe.present.push((column, bytes)),
                    (true, _) => {}
                }
            }
            stripe
        };
        arena.bytes().chunks_exact_mut(stripe_bytes).take(stripes_max).map(cut).collect()
    }

    fn sample<'a>(
        &self,
        samples: &mut Samples,
        stripes: &mut [Stripe<'a>],
        slice: Duration,
        user_columns: usize,
        operation: impl Fn(&Codec, &mut Stripe<'a>),
    ) {
        /// Bytes coded between two readings of the clock, so that reading it costs next to nothing.
        const BYTES_PER_LOOK: usize = 256 << 10;
        let user_bytes = user_columns * self.block_bytes;
        let calls_per_look = (BYTES_PER_LOOK / (self.geometry.columns() * self.block_bytes)).max(1);
        let mut next = 0;
        // The first repetition warms up the tables and the branch predictor; its rate is dropped.
        for round in 0..=REPETITIONS {
            let start = Instant::now();
            let mut calls = 0;
            let elapsed = loop {
                for _ in 0..calls_per_look {
                    operation(&self.codec, black_box(&mut stripes[next]));
                    next = if next + 1 == stripes.len() { 0 } else { next + 1 };
                }
                calls += calls_per_look;
                let elapsed = start.elapsed();
                if elapsed >= slice {
                    break elapsed;
                }
            };
            if round > 0 {
                samples.0.push((calls * user_bytes) as f64 / elapsed.as_secs_f64() / 1e9);
            }
        }
    }
}

/// Rates of repeated measurements in GB/s.
#[derive(Default)]
struct Samples(Vec<f64>);

impl Samples {
    fn rate(&self, memcpy: f64) -> Rate {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let median = sorted[sorted.len() / 2];
        Rate {
            gb_per_s_median: median,
            gb_per_s_min: sorted[0],
            gb_per_s_max: sorted[sorted.len() - 1],
            of_memcpy: median / memcpy,
        }
    }
}

/// The memory of a run, filled with varying bytes.
struct Arena {
    storage: Vec<u8>,
    start: usize,
    length: usize,
}

impl Arena {
    fn new(length: usize) -> Arena {
        let storage: Vec<u8> = (0..length + ALIGNMENT).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect();
        let start = storage.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Arena { storage, start, length }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.storage[self.start..self.start + self.length]
    }
}

/// Copies the arena's first half to the second and returns the rate in GB/s. It is one call, since a C
/// library copies large buffers around the cache, twice as fast as small ones through it.
fn copy_rate(arena: &mut Arena) -> f64 {
    let bytes = arena.bytes();
    let length = bytes.len() / 2;
    let (from, to) = bytes.split_at_mut(length);
    let start = Instant::now();
    black_box(&mut to[..length]).copy_from_slice(black_box(from));
    length as f64 / start.elapsed().as_secs_f64() / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> BenchOptions {
        BenchOptions {
            geometries: [(2, 1), (1, 3), (3, 0)].map(|(k, m)| Geometry::new(k, m).expect("valid")).to_vec(),
            block_bytes: vec![4096, 0, usize::MAX],
            memory_bytes: 0,
            seconds: 0.0,
            ..BenchOptions::default()
        }
    }

    #[test]
    fn a_report_has_two_rows_per_cell_with_positive_ordered_rates() {
        let report = run(&tiny());
        let engines = Engine::ALL.into_iter().filter(|engine| engine.is_available()).count();
        assert_eq!(report.rows.len(), engines * 2 * 2);
        // No parity; blocks of 0 and of 2^64-1 bytes; perhaps engines that this CPU lacks.
        assert!(report.skipped.len() >= engines * (1 + 2 * 2));
        let rates = report.rows.iter().flat_map(|row| [row.encode, row.recover, row.update]);
        for rate in rates.chain([report.memcpy]) {
            assert!(rate.gb_per_s_min > 0.0 && rate.gb_per_s_min <= rate.gb_per_s_median);
            assert!(rate.gb_per_s_median <= rate.gb_per_s_max && rate.of_memcpy > 0.0);
        }
    }

    #[test]
    fn the_text_has_a_line_per_cell_and_the_json_the_same_rows() {
        let report = run(&BenchOptions { engines: vec![Engine::Portable], ..tiny() });
        let text = report.render();
        assert_eq!(text.lines().filter(|line| line.starts_with("portable")).count(), 2, "{text}");
        assert!(text.contains("skipped: portable 2+1"), "{text}");
        let json = serde_json::to_value(&report).expect("json");
        assert_eq!(json["output_version"], 1);
        assert_eq!(json["rows"].as_array().map(Vec::len), Some(4));
        assert_eq!(json["rows"][0]["engine"], "portable");
        assert_eq!(json["rows"][1]["source"], "memory");
    }

    #[test]
    fn nothing_to_measure_still_reports_the_copy_rate() {
        let report = run(&BenchOptions { engines: Vec::new(), ..tiny() });
        assert!(report.rows.is_empty() && report.memcpy.gb_per_s_median > 0.0);
        assert!(report.render().contains("memcpy"));
    }

    #[test]
    fn geometries_parse_and_impossible_ones_are_refused() {
        assert_eq!("8+4".parse(), Geometry::new(8, 4));
        assert_eq!("255+0".parse::<Geometry>().map(|g| g.to_string()), Ok("255+0".to_owned()));
        for text in ["", "8", "8+", "+4", "0+4", "200+56", "8-4", "99999999999999999999+1", "8+4+2"] {
            assert!(text.parse::<Geometry>().is_err(), "{text}");
        }
    }
}
