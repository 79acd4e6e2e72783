//! Chooses rows of a batch that the CPU computes again, and compares them with the device's.
//!
//! A *row* is the block of 4 KiB at one offset of every column of a job; for a job that is only
//! hashed, one block. At least one row and a few hashes of every batch are checked, so that a
//! device that always computes wrongly is found at its first batch; beyond that, a fraction of the
//! rows. Must not know of devices, threads or answers.

use calpe_core::codec::{BlockHasher, CodecJob, Outputs};
use calpe_core::units::{BlockHash, ROW_BYTES};

use super::answer::Finished;

const BLOCK: usize = ROW_BYTES as usize;

/// Fewest hashes of a batch that are checked: BLAKE3 hashes this many blocks side by side with
/// AVX-512, so that fewer would not be cheaper.
const HASHES_MIN: usize = 4;

/// The rows of a batch to check, each by the index of its job and its number in the job.
pub(super) struct Sample {
    rows: Vec<(usize, usize)>,
    fraction: f64,
    seed: u64,
}

impl Sample {
    /// A fraction of the rows of a batch, evenly spread, but at least as many as [`HASHES_MIN`]
    /// blocks need. None when the fraction is 0.
    pub(super) fn of(jobs: &[Finished], fraction: f64, seed: u64) -> Option<Sample> {
        let total: usize = jobs.iter().map(|done| rows(&done.job)).sum();
        if fraction <= 0.0 || total == 0 {
            return None;
        }
        let least = HASHES_MIN.div_ceil(jobs.first().map_or(1, |done| columns(&done.job)));
        let count = ((total as f64 * fraction).ceil() as usize).max(least).min(total);
        let mut picked = spread(count, total, seed);
        let (mut sampled, mut before) = (Vec::with_capacity(count), 0);
        let mut next = picked.next();
        for (nth, done) in jobs.iter().enumerate() {
            let rows = rows(&done.job);
            while let Some(row) = next.filter(|row| *row < before + rows) {
                sampled.push((nth, row - before));
                next = picked.next();
            }
            before += rows;
        }
        Some(Sample { rows: sampled, fraction, seed })
    }

    /// Number of rows.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// The first difference between the device's results for these jobs and the CPU's.
    pub(super) fn difference(&self, jobs: &[Finished]) -> Option<String> {
        self.rows.iter().zip(0..).find_map(|(&(nth, row), salt)| {
            let done = &jobs[nth];
            let wrong = match &done.job.transform {
                Some(_) => self.coded_row(done, row, self.seed ^ salt),
                None => hashed_block(done, row),
            };
            wrong.map(|wrong| {
                let transform = done.job.transform.as_ref();
                format!("{}: {wrong}", transform.map_or("hashing".to_owned(), |form| format!("{form:?}")))
            })
        })
    }

    /// Checks the outputs of a row, and some of the hashes of its blocks.
    fn coded_row(&self, done: &Finished, row: usize, seed: u64) -> Option<String> {
        let job = &done.job;
        let transform = job.transform.as_ref()?;
        let range = row * BLOCK..(row + 1) * BLOCK;
        let inputs: Vec<&[u8]> = job.inputs.iter().map(|column| &column[range.clone()]).collect();
        let mut outputs = vec![0; transform.outputs() * BLOCK];
        let mut filled: Vec<&mut [u8]> = outputs.chunks_exact_mut(BLOCK).collect();
        transform.apply(&inputs[..transform.inputs()], &mut filled);
        if let Outputs::Into(given) = &job.outputs {
            for (column, (given, should)) in given.iter().zip(outputs.chunks_exact(BLOCK)).enumerate() {
                if given[range.clone()] != *should {
                    return Some(format!("block {row} of output {column} is not what the CPU computes"));
                }
            }
        }
        let hasher = job.hasher?;
        let blocks: Vec<&[u8]> = inputs.into_iter().chain(outputs.chunks_exact(BLOCK)).collect();
        let count = ((blocks.len() as f64 * self.fraction).ceil() as usize).max(HASHES_MIN).min(blocks.len());
        let columns: Vec<usize> = spread(count, blocks.len(), seed).collect();
        let rows = job.inputs[0].len() / BLOCK;
        let given = columns.iter().map(|column| done.hashes[column * rows + row]);
        let wrong = differing(hasher, columns.iter().map(|&column| blocks[column]), given)?;
        Some(format!("the hash of block {row} of column {} is not what the CPU computes", columns[wrong]))
    }
}

/// Rows of a job.
fn rows(job: &CodecJob) -> usize {
    let bytes = if job.transform.is_some() { job.inputs[0].len() } else { job.input_bytes() };
    bytes / BLOCK
}

/// Blocks of a row.
fn columns(job: &CodecJob) -> usize {
    job.transform.as_ref().map_or(1, |transform| job.inputs.len() + transform.outputs())
}

/// Checks the hash of a block of a job that is only hashed.
fn hashed_block(done: &Finished, block: usize) -> Option<String> {
    let blocks = done.job.inputs.iter().flat_map(|column| column.chunks_exact(BLOCK));
    let bytes = blocks.skip(block).take(1);
    let wrong = differing(done.job.hasher?, bytes, done.hashes[block..].iter().copied());
    wrong.map(|_| format!("the hash of block {block} is not what the CPU computes"))
}

/// The index of the first block whose hash differs from the given one.
fn differing<'a>(
    hasher: BlockHasher,
    blocks: impl Iterator<Item = &'a [u8]>,
    given: impl Iterator<Item = BlockHash>,
) -> Option<usize> {
    let mut hashes = Vec::new();
    let blocks: Vec<&[u8; BLOCK]> = blocks.map(|block| block.try_into().expect("a block")).collect();
    hasher.hash_each(blocks.into_iter(), |hash| hashes.push(hash));
    hashes.into_iter().zip(given).position(|(should, given)| should != given)
}

/// `count` different numbers below `total`, ascending: a random one from each of `count` equal
/// ranges.
fn spread(count: usize, total: usize, seed: u64) -> impl Iterator<Item = usize> {
    (0..count).map(move |part| {
        let (start, end) = (part * total / count, (part + 1) * total / count);
        start + (mix(seed ^ mix(part as u64)) % (end - start) as u64) as usize
    })
}

/// SplitMix64's finisher: every bit of the result depends on every bit of `state`.
pub(super) fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_different_numbers_and_all_of_them_at_last() {
        for (count, total) in [(1, 1), (1, 7), (3, 7), (7, 7), (4, 1000)] {
            for seed in 0..50 {
                let picked: Vec<usize> = spread(count, total, seed).collect();
                assert!(picked.windows(2).all(|pair| pair[0] < pair[1]), "{picked:?}");
                assert_eq!((picked.len(), picked.iter().all(|&row| row < total)), (count, true));
            }
        }
        let first: std::collections::BTreeSet<usize> = (0..200).flat_map(|seed| spread(1, 7, seed)).collect();
        assert_eq!(first.len(), 7, "every row is picked now and then");
    }
}
