//! Measures the fingerprints of 4 KiB blocks: one by one, as lone small writes are hashed, and column by
//! column, as whole stripes and large reads are. Single-threaded, beside the rate at which one core copies
//! memory.

use std::fmt::Write as _;
use std::hint::black_box;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::{Arena, MEMORY_BYTES, OUTPUT_VERSION, REPETITIONS, Rate, SLICE_MIN, Samples, Source, copy_rate};
use crate::codec::BlockHasher;
use crate::units::{BlockHash, HumanSize, ROW_BYTES};

/// Bytes hashed over and over for rates in the cache: a stripe of 4+2 columns of 64 KiB.
const CACHED_BYTES: usize = 384 << 10;
/// Bytes of one call that hashes many blocks at once: a column.
const COLUMN_BYTES: usize = 64 << 10;

/// One way to hash on one kind of memory.
#[derive(Clone, Debug, Serialize)]
pub struct HashRow {
    /// `crc32c` or `blake3`.
    pub checksum: &'static str,
    /// Blocks of one call.
    pub blocks_at_once: usize,
    /// Where the blocks are.
    pub source: Source,
    /// Bytes hashed.
    pub rate: Rate,
}

/// The outcome of [`run_hash`].
#[derive(Clone, Debug, Serialize)]
pub struct HashReport {
    /// See [`OUTPUT_VERSION`].
    pub output_version: u32,
    /// Memory that the run used, in bytes.
    pub memory_bytes: usize,
    /// Bytes copied per second by one core from one half of the memory to the other.
    pub memcpy: Rate,
    /// The measurements.
    pub rows: Vec<HashRow>,
}

/// Measures for about `seconds` on the calling thread.
#[must_use]
pub fn run_hash(seconds: f64) -> HashReport {
    run_hash_in(seconds, MEMORY_BYTES)
}

fn run_hash_in(seconds: f64, memory_bytes: usize) -> HashReport {
    let mut arena = Arena::new(memory_bytes.max(CACHED_BYTES));
    let budget = if seconds.is_finite() { seconds.clamp(0.0, 1e6) } else { 0.0 };
    let slice = Duration::from_secs_f64(budget / (8 * REPETITIONS) as f64).max(SLICE_MIN);
    copy_rate(&mut arena);
    let mut copies = vec![copy_rate(&mut arena)];
    let mut measured = Vec::new();
    for (checksum, hasher) in [("crc32c", BlockHasher::Crc32c), ("blake3", BlockHasher::Blake3)] {
        for blocks_at_once in [1, COLUMN_BYTES / ROW_BYTES as usize] {
            for source in [Source::Cache, Source::Memory] {
                let bytes = arena.bytes();
                let bytes = if source == Source::Cache { &bytes[..CACHED_BYTES] } else { &bytes[..] };
                let samples = sample(hasher, blocks_at_once * ROW_BYTES as usize, bytes, slice);
                measured.push((checksum, blocks_at_once, source, samples));
            }
            copies.push(copy_rate(&mut arena));
        }
    }
    let copies = Samples(copies);
    let median = copies.rate(1.0).gb_per_s_median;
    let rows = measured.into_iter().map(|(checksum, blocks_at_once, source, samples)| HashRow {
        checksum,
        blocks_at_once,
        source,
        rate: samples.rate(median),
    });
    HashReport {
        output_version: OUTPUT_VERSION,
        memory_bytes: arena.bytes().len(),
        memcpy: copies.rate(median),
        rows: rows.collect(),
    }
}

fn sample(hasher: BlockHasher, bytes_at_once: usize, bytes: &[u8], slice: Duration) -> Samples {
    let mut samples = Samples::default();
    let mut hashes: Vec<BlockHash> = Vec::new();
    let mut pieces = bytes.chunks_exact(bytes_at_once).cycle();
    let pieces_per_look = CACHED_BYTES / bytes_at_once;
    // The first repetition warms up; its rate is dropped.
    for round in 0..=REPETITIONS {
        let start = Instant::now();
        let mut done = 0;
        let elapsed = loop {
            for piece in pieces.by_ref().take(pieces_per_look) {
                hashes.clear();
                hasher.hash_blocks(black_box(piece), &mut hashes);
                black_box(&hashes);
            }
            done += pieces_per_look * bytes_at_once;
            let elapsed = start.elapsed();
            if elapsed >= slice {
                break elapsed;
            }
        };
        if round > 0 {
            samples.0.push(done as f64 / elapsed.as_secs_f64() / 1e9);
        }
    }
    samples
}

impl HashReport {
    /// The report as a table for people.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "one core; GB/s hashed in blocks of 4 KiB (10^9 bytes), median of {REPETITIONS} (lowest to highest)\n\
             {}\n\
             in cache: {} over and over; in memory: {} in turn\n",
            self.memcpy.memcpy_line(self.memory_bytes / 2),
            HumanSize(CACHED_BYTES as u64),
            HumanSize(self.memory_bytes as u64),
        );
        let _ = writeln!(text, "{:8} {:>6}   {:^22}   {:^22}", "checksum", "blocks", "in cache", "in memory");
        for pair in self.rows.chunks(2) {
            let _ = write!(text, "{:8} {:>6}", pair[0].checksum, pair[0].blocks_at_once);
            for HashRow { rate, .. } in pair {
                let spread = format!("({:.1} to {:.1})", rate.gb_per_s_min, rate.gb_per_s_max);
                let _ = write!(text, "   {:6.1} {spread:15}", rate.gb_per_s_median);
            }
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_a_row_for_each_way_and_kind_of_memory() {
        let report = run_hash_in(0.0, 0);
        assert_eq!(report.rows.len(), 8);
        for rate in report.rows.iter().map(|row| row.rate).chain([report.memcpy]) {
            assert!(rate.gb_per_s_min > 0.0 && rate.gb_per_s_min <= rate.gb_per_s_median);
            assert!(rate.gb_per_s_median <= rate.gb_per_s_max && rate.of_memcpy > 0.0);
        }
        let text = report.render();
        assert_eq!(text.lines().filter(|line| line.starts_with("blake3")).count(), 2, "{text}");
        let json = serde_json::to_value(&report).expect("json");
        assert_eq!(json["rows"][7]["source"], "memory");
    }
}
