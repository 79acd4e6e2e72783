//! Jobs of one kind put together, so that a device does them at once; owns their memory meanwhile.
//!
//! Invariants: while a device has the addresses of a batch, only the batch has its buffers; outputs
//! that a device may still write after it was given up are leaked, never reused. Must not know of
//! devices, threads or policies.

use std::mem;
use std::ptr::NonNull;

use calpe_core::block_io::Pool;
use calpe_core::codec::{BlockHasher, CodecJob, Outputs, Transform};
use calpe_core::units::{BlockHash, ROW_BYTES};

use super::device::{Digest, HostRange, Work};

const BLOCK: usize = ROW_BYTES as usize;

/// Alignment of columns: the widest access of a kernel.
const ALIGNMENT: usize = 16;

/// Why a device cannot do a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    /// It hashes otherwise.
    Hasher,
    /// Its columns have wrong lengths or addresses or too many bytes, or there is nothing to
    /// compute.
    Shape,
}

/// Jobs of one kind can be one batch.
#[derive(Clone, Debug)]
pub(super) struct Kind {
    pub(super) transform: Option<Transform>,
    pub(super) hash: bool,
    /// Whether outputs have no place in host memory.
    hidden: bool,
    /// Input columns of a batch: those of each job, or one column in which all inputs follow one
    /// another.
    columns: usize,
}

impl Kind {
    /// The kind of a job that a device can do.
    pub(super) fn of(job: &CodecJob) -> Result<Kind, Unfit> {
        let hash = match job.hasher {
            None => false,
            Some(BlockHasher::Blake3) => true,
            Some(BlockHasher::Crc32c) => return Err(Unfit::Hasher),
        };
        let fits = |column: &[u8]| {
            column.len().is_multiple_of(BLOCK) && column.as_ptr().addr().is_multiple_of(ALIGNMENT)
        };
        if job.inputs.is_empty() || !job.inputs.iter().all(|column| fits(column)) {
            return Err(Unfit::Shape);
        }
        let Some(transform) = &job.transform else {
            let bytes = job.input_bytes();
            if !hash || bytes == 0 {
                return Err(Unfit::Shape);
            }
            return Ok(Kind { transform: None, hash, hidden: true, columns: 1 });
        };
        let length = job.inputs[0].len();
        let even = length > 0
            && job.inputs.len() >= transform.inputs()
            && transform.outputs() > 0
            && job.inputs.iter().all(|column| column.len() == length);
        let (hidden, whole) = match &job.outputs {
            Outputs::Hashed => (true, hash),
            Outputs::Into(outputs) => {
                let whole = outputs.len() == transform.outputs();
                (false, whole && outputs.iter().all(|column| column.len() == length && fits(column)))
            }
        };
        if !even || !whole {
            return Err(Unfit::Shape);
        }
        // Without hashes, inputs beyond those of the transform are not used.
        let columns = if hash { job.inputs.len() } else { transform.inputs() };
        Ok(Kind { transform: Some(transform.clone()), hash, hidden, columns })
    }

    /// Whether jobs of both can be one batch.
    pub(super) fn same(&self, other: &Kind) -> bool {
        let transforms = match (&self.transform, &other.transform) {
            (Some(one), Some(other)) => one.same(other),
            (None, None) => true,
            _ => false,
        };
        (self.hash, self.hidden, self.columns) == (other.hash, other.hidden, other.columns) && transforms
    }

    fn outputs(&self) -> usize {
        self.transform.as_ref().map_or(0, Transform::outputs)
    }

    /// Bytes that a job takes of each column of a batch.
    fn column_bytes(&self, job: &CodecJob) -> usize {
        if self.transform.is_some() { job.inputs[0].len() } else { job.input_bytes() }
    }

    /// Bytes of a slot that a job takes.
    pub(super) fn slot_bytes(&self, job: &CodecJob) -> usize {
        (self.columns + self.outputs()) * self.column_bytes(job)
    }
}

/// See the module's head.
pub(super) struct Batch {
    kind: Kind,
    jobs: Vec<CodecJob>,
}

impl Batch {
    /// All jobs are of the kind.
    pub(super) fn new(kind: Kind, jobs: Vec<CodecJob>) -> Batch {
        Batch { kind, jobs }
    }

    pub(super) fn into_jobs(self) -> Vec<CodecJob> {
        self.jobs
    }

    fn total_column_bytes(&self) -> usize {
        self.jobs.iter().map(|job| self.kind.column_bytes(job)).sum()
    }

    /// The work for a device. The addresses are those of this batch's buffers.
    pub(super) fn work(&mut self) -> Work {
        let column_bytes = self.total_column_bytes();
        let Batch { kind, jobs } = self;
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        let mut at = 0;
        for job in jobs {
            let mut offset = at;
            for (nth, source) in job.inputs.iter().enumerate() {
                let column = if kind.transform.is_some() { nth } else { 0 };
                // The device only reads it.
                let start = NonNull::from(&source[..]).cast::<u8>();
                if column < kind.columns && !source.is_empty() {
                    inputs.push(HostRange { column, offset, start, bytes: source.len() });
                }
                if kind.transform.is_none() {
                    offset += source.len();
                }
            }
            if let (Outputs::Into(targets), false) = (&mut job.outputs, kind.hidden) {
                for (column, target) in targets.iter_mut().enumerate() {
                    let start = NonNull::new(target.as_mut_ptr()).expect("a buffer has an address");
                    outputs.push(HostRange { column, offset: at, start, bytes: target.len() });
                }
            }
            at += kind.column_bytes(job);
        }
        let (transform, hash) = (kind.transform.clone(), kind.hash);
        Work { transform, hash, columns: kind.columns, column_bytes, inputs, outputs }
    }

    /// Turns the digests of a device into the fingerprints of each job, in the order of
    /// [`CodecJob::run`].
    ///
    /// # Errors
    /// The right number of digests, when there are more or fewer.
    pub(super) fn hashes(&self, digests: &[Digest]) -> Result<Vec<Vec<BlockHash>>, usize> {
        let columns = if self.kind.hash { self.kind.columns + self.kind.outputs() } else { 0 };
        let rows = self.total_column_bytes() / BLOCK;
        if digests.len() != columns * rows {
            return Err(columns * rows);
        }
        let mut at = 0;
        let of_each = self.jobs.iter().map(|job| {
            let blocks = self.kind.column_bytes(job) / BLOCK;
            let mut hashes = Vec::with_capacity(columns * blocks);
            for start in (0..columns).map(|column| column * rows + at) {
                let digests = &digests[start..start + blocks];
                hashes.extend(digests.iter().map(|digest| BlockHasher::stored_digest(*digest)));
            }
            at += blocks;
            hashes
        });
        Ok(of_each.collect())
    }
}

/// Separates a job from a device that was given up and may still use its memory: outputs are
/// replaced and leaked, inputs stay mapped.
pub(super) fn part_from_device(job: &mut CodecJob, pools: &[Pool]) {
    let fresh = &pools[0];
    if let (Outputs::Into(outputs), true) = (&mut job.outputs, job.transform.is_some()) {
        for output in outputs {
            let replacement = fresh.alloc(output.len());
            mem::forget(mem::replace(output, replacement));
        }
    }
    for input in &job.inputs {
        // The slabs of known pools stay for ever once a device was given up; other memory has no
        // other owner.
        if !pools.iter().any(|pool| pool.contains(input.as_ptr(), input.len())) {
            input.keep_mapped();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use calpe_core::codec::{Codec, Column};

    fn pool() -> Pool {
        Pool::new(4 << 20).expect("memory")
    }

    fn encode(pool: &Pool, hasher: Option<BlockHasher>, blocks: usize) -> CodecJob {
        CodecJob {
            transform: Some(Codec::new(2, 1).expect("a geometry").encoding()),
            hasher,
            inputs: (0..2).map(|_| Column::Owned(pool.alloc_zeroed(blocks * BLOCK))).collect(),
            outputs: Outputs::Into(vec![pool.alloc(blocks * BLOCK)]),
        }
    }

    fn hash(pool: &Pool, blocks: &[usize]) -> CodecJob {
        let inputs = blocks.iter().map(|&blocks| Column::Owned(pool.alloc_zeroed(blocks * BLOCK))).collect();
        CodecJob { transform: None, hasher: Some(BlockHasher::Blake3), inputs, outputs: Outputs::Hashed }
    }

    #[test]
    fn jobs_that_a_device_cannot_do_are_told_apart() {
        let pool = pool();
        let blake = Some(BlockHasher::Blake3);
        let of = |job: &CodecJob| Kind::of(job).map(|_| ());
        assert_eq!(of(&encode(&pool, blake, 1)), Ok(()));
        assert_eq!(of(&encode(&pool, None, 1)), Ok(()));
        assert_eq!(of(&encode(&pool, Some(BlockHasher::Crc32c), 1)), Err(Unfit::Hasher));
        assert_eq!(of(&hash(&pool, &[1, 0, 3])), Ok(()));
        assert_eq!(of(&CodecJob { hasher: None, ..hash(&pool, &[1]) }), Err(Unfit::Shape));
        assert_eq!(of(&hash(&pool, &[0, 0])), Err(Unfit::Shape));
        assert_eq!(of(&hash(&pool, &[])), Err(Unfit::Shape));
        let hidden = |hasher| CodecJob { outputs: Outputs::Hashed, ..encode(&pool, hasher, 1) };
        assert_eq!((of(&hidden(blake)), of(&hidden(None))), (Ok(()), Err(Unfit::Shape)));
        let mut odd = [(); 5].map(|()| encode(&pool, blake, 2));
        odd[0].inputs[1] = Column::Owned(pool.alloc(BLOCK));
        odd[1].outputs = Outputs::Into(vec![pool.alloc(BLOCK)]);
        odd[2].outputs = Outputs::Into(Vec::new());
        odd[3].inputs.truncate(1);
        let mut whole = pool.alloc(4 * BLOCK);
        let mut shifted = whole.split_off(8);
        drop(shifted.split_off(2 * BLOCK));
        odd[4].inputs[0] = Column::Owned(shifted);
        assert!(odd.iter().all(|job| of(job) == Err(Unfit::Shape)));
    }

    #[test]
    fn kinds_are_the_same_by_what_a_batch_of_them_would_be() {
        let pool = pool();
        let of = |job: CodecJob| Kind::of(&job).expect("fit");
        let blake = Some(BlockHasher::Blake3);
        let kinds = [
            of(encode(&pool, blake, 1)),
            of(encode(&pool, None, 1)),
            of(CodecJob { outputs: Outputs::Hashed, ..encode(&pool, blake, 1) }),
            of(hash(&pool, &[1])),
            of({
                let mut job = encode(&pool, blake, 1);
                job.inputs.push(Column::Owned(pool.alloc(BLOCK)));
                job
            }),
        ];
        for (one, kind) in kinds.iter().enumerate() {
            for (other, another) in kinds.iter().enumerate() {
                assert_eq!(kind.same(another), one == other, "{one} and {other}");
            }
        }
        assert!(of(encode(&pool, blake, 1)).same(&of(encode(&pool, blake, 7))), "lengths do not matter");
        assert!(of(hash(&pool, &[1])).same(&of(hash(&pool, &[2, 5]))), "nor numbers of columns to hash");
    }

    #[test]
    fn columns_of_a_batch_are_those_of_its_jobs_one_behind_the_other() {
        let pool = pool();
        let jobs: Vec<_> = [1, 3].map(|blocks| encode(&pool, Some(BlockHasher::Blake3), blocks)).into();
        let mut batch = Batch::new(Kind::of(&jobs[0]).expect("fit"), jobs);
        let work = batch.work();
        assert_eq!((work.columns, work.column_bytes, work.bytes()), (2, 4 * BLOCK, 12 * BLOCK));
        let places = |ranges: &[HostRange]| -> Vec<_> {
            ranges.iter().map(|range| (range.column, range.offset / BLOCK, range.bytes / BLOCK)).collect()
        };
        assert_eq!(places(&work.inputs), [(0, 0, 1), (1, 0, 1), (0, 1, 3), (1, 1, 3)]);
        assert_eq!(places(&work.outputs), [(0, 0, 1), (0, 1, 3)]);
        let digests: Vec<Digest> = (0..12).map(|nth| [nth + 1; 16]).collect();
        let firsts = |hashes: &[BlockHash]| hashes.iter().map(|hash| hash.0[0] - 1).collect::<Vec<_>>();
        let hashes = batch.hashes(&digests).expect("as many as blocks");
        assert_eq!(firsts(&hashes[0]), [0, 4, 8]);
        assert_eq!(firsts(&hashes[1]), [1, 2, 3, 5, 6, 7, 9, 10, 11]);
        assert_eq!(batch.hashes(&digests[1..]), Err(12));
    }

    #[test]
    fn columns_to_hash_are_one_column() {
        let pool = pool();
        let jobs = vec![hash(&pool, &[2, 0, 1]), hash(&pool, &[1])];
        let mut batch = Batch::new(Kind::of(&jobs[0]).expect("fit"), jobs);
        let work = batch.work();
        assert_eq!((work.columns, work.column_bytes, work.outputs.len()), (1, 4 * BLOCK, 0));
        let offsets: Vec<_> = work.inputs.iter().map(|range| (range.column, range.offset / BLOCK)).collect();
        assert_eq!(offsets, [(0, 0), (0, 2), (0, 3)]);
    }

    #[test]
    fn outputs_of_a_device_that_was_given_up_are_never_given_out_again() {
        let pool = Pool::new(8 * BLOCK).expect("memory");
        let mut job = encode(&pool, None, 1);
        let Outputs::Into(outputs) = &job.outputs else { unreachable!() };
        let old = outputs[0].as_ptr();
        part_from_device(&mut job, std::slice::from_ref(&pool));
        drop(job);
        let all: Vec<_> = (0..7).map(|_| pool.alloc(BLOCK)).collect();
        assert!(all.iter().all(|buf| buf.as_ptr() != old && pool.contains(buf.as_ptr(), BLOCK)));
        assert!(!pool.contains(pool.alloc(BLOCK).as_ptr(), BLOCK), "one of eight is gone");
    }

    #[test]
    fn inputs_outside_all_slabs_stay_mapped() {
        let (known, other) = (pool(), Pool::new(BLOCK).expect("memory"));
        let mut job = hash(&other, &[1]);
        part_from_device(&mut job, &[known]);
        drop(job);
        assert_eq!(other.overflows(), 0);
        drop(other.alloc(BLOCK));
        assert_eq!(other.overflows(), 1, "the only page is never given out again");
    }
}
