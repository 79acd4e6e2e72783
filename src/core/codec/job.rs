//! Bulk work on columns: a transform of them, the fingerprints of their blocks, or both in one
//! pass. A job depends on its bytes only, so it may run now, later, on another thread or on another
//! device, with the same result. Must not know the requester or what the columns mean.

use std::fmt;
use std::ops::Deref;

use super::hash::blocks_of;
use super::{BlockHasher, Transform};
use crate::block_io::{Buf, BufMut};
use crate::units::{BlockHash, ROW_BYTES};

const BLOCK: usize = ROW_BYTES as usize;

/// An input of a job: read, and returned unchanged.
pub enum Column {
    /// Shared: others may hold and read it too.
    Shared(Buf),
    /// Exclusive: its owner may write it again after the job.
    Owned(BufMut),
}

/// Where the columns that a transform computes go.
#[derive(Debug)]
pub enum Outputs {
    /// They fill these buffers, which are as long as the inputs.
    Into(Vec<BufMut>),
    /// Only their fingerprints are wanted.
    Hashed,
}

/// Work on some columns. See [`CodecJob::run`] for what it means.
pub struct CodecJob {
    /// Computed from the first inputs; inputs beyond the transform's own are only fingerprinted. With a
    /// transform, all inputs have the same length; without one, they may have any.
    pub transform: Option<Transform>,
    /// Fingerprints every block of all inputs and outputs; None: no fingerprints.
    pub hasher: Option<BlockHasher>,
    /// The columns read.
    pub inputs: Vec<Column>,
    /// The columns written.
    pub outputs: Outputs,
}

/// A job that is done.
#[derive(Debug)]
pub struct CodedColumns {
    /// The job's inputs.
    pub inputs: Vec<Column>,
    /// The outputs it filled, in the order of the transform; none when only their fingerprints were wanted.
    pub outputs: Vec<BufMut>,
    /// The fingerprints of all blocks of 4 KiB, column after column, inputs before outputs. Empty without a
    /// hasher.
    pub hashes: Vec<BlockHash>,
}

impl CodedColumns {
    /// Bytes of all inputs together.
    #[must_use]
    pub fn input_bytes(&self) -> usize {
        self.inputs.iter().map(|column| column.len()).sum()
    }
}

impl CodecJob {
    /// Bytes of all inputs together.
    #[must_use]
    pub fn input_bytes(&self) -> usize {
        self.inputs.iter().map(|column| column.len()).sum()
    }

    /// Does the work on this thread.
    ///
    /// # Panics
    /// When the columns are not as described.
    #[must_use]
    pub fn run(self) -> CodedColumns {
        CodecJob::run_together(vec![self]).pop().expect("every job comes to something")
    }

    /// Does several jobs on this thread; the results are in the same order. Blocks of all jobs are
    /// fingerprinted together, which for small jobs costs a fraction of fingerprinting them one by
    /// one.
    ///
    /// # Panics
    /// When the columns are not as described.
    #[must_use]
    pub fn run_together(jobs: Vec<CodecJob>) -> Vec<CodedColumns> {
        let coded: Vec<Coded> = jobs.into_iter().map(CodecJob::transformed).collect();
        let mut hashes: Vec<Vec<BlockHash>> = coded.iter().map(|_| Vec::new()).collect();
        for hasher in [BlockHasher::Crc32c, BlockHasher::Blake3] {
            let chosen = || coded.iter().enumerate().filter(|(_, coded)| coded.hasher == Some(hasher));
            let owners = chosen().flat_map(|(nth, coded)| coded.blocks().map(move |block| (nth, block)));
            let (owners, blocks): (Vec<usize>, Vec<&[u8; BLOCK]>) = owners.unzip();
            let mut owners = owners.into_iter();
            hasher.hash_each(blocks.into_iter(), |hash| {
                hashes[owners.next().expect("a hash for each block")].push(hash);
            });
        }
        coded
            .into_iter()
            .zip(hashes)
            .map(|(Coded { inputs, outputs, .. }, hashes)| CodedColumns { inputs, outputs, hashes })
            .collect()
    }

    /// Everything but the fingerprints.
    fn transformed(self) -> Coded {
        let CodecJob { transform, hasher, inputs, outputs } = self;
        let Some(transform) = transform else {
            return Coded { hasher, inputs, outputs: Vec::new(), scratch: Vec::new() };
        };
        let sources: Vec<&[u8]> = inputs[..transform.inputs()].iter().map(|column| &column[..]).collect();
        match outputs {
            Outputs::Into(mut outputs) => {
                let mut filled: Vec<&mut [u8]> = outputs.iter_mut().map(|buf| &mut buf[..]).collect();
                transform.apply(&sources, &mut filled);
                Coded { hasher, inputs, outputs, scratch: Vec::new() }
            }
            Outputs::Hashed => {
                let length = sources.first().map_or(0, |source| source.len());
                let mut scratch = vec![0; length * transform.outputs()];
                if length > 0 {
                    let mut filled: Vec<&mut [u8]> = scratch.chunks_mut(length).collect();
                    transform.apply(&sources, &mut filled);
                }
                Coded { hasher, inputs, outputs: Vec::new(), scratch }
            }
        }
    }
}

/// A job of which only the fingerprints are missing.
struct Coded {
    hasher: Option<BlockHasher>,
    inputs: Vec<Column>,
    outputs: Vec<BufMut>,
    /// Outputs of which only the fingerprints are wanted.
    scratch: Vec<u8>,
}

impl Coded {
    /// All blocks, in the order of `CodedColumns::hashes`.
    fn blocks(&self) -> impl Iterator<Item = &[u8; BLOCK]> {
        let inputs = self.inputs.iter().map(|column| &column[..]);
        let outputs = self.outputs.iter().map(|buf| &buf[..]).chain([&self.scratch[..]]);
        inputs.chain(outputs).flat_map(blocks_of)
    }
}

impl Column {
    /// The column as a buffer that others may read too.
    #[must_use]
    pub fn into_shared(self) -> Buf {
        match self {
            Column::Shared(buf) => buf,
            Column::Owned(buf) => buf.freeze(),
        }
    }

    /// As [`BufMut::keep_mapped`].
    pub fn keep_mapped(&self) {
        match self {
            Column::Shared(buf) => buf.keep_mapped(),
            Column::Owned(buf) => buf.keep_mapped(),
        }
    }
}

impl Deref for Column {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Column::Shared(buf) => buf,
            Column::Owned(buf) => buf,
        }
    }
}

impl fmt::Debug for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Column({} bytes)", self.len())
    }
}

impl fmt::Debug for CodecJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CodecJob")
            .field("transform", &self.transform)
            .field("hasher", &self.hasher)
            .field("inputs", &self.inputs)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Codec;
    use super::*;
    use crate::block_io::Pool;

    fn column(pool: &Pool, nth: usize, length: usize) -> BufMut {
        let mut buf = pool.alloc(length);
        buf.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7 + nth * 31) as u8);
        buf
    }

    fn expected(hasher: BlockHasher, columns: &[&[u8]]) -> Vec<BlockHash> {
        columns.iter().flat_map(|column| column.chunks(BLOCK)).map(|block| hasher.hash(block)).collect()
    }

    #[test]
    fn a_stripe_is_coded_and_has_the_hashes_of_all_blocks_in_order() {
        let (pool, hasher) = (Pool::new(1 << 20).expect("memory"), BlockHasher::Blake3);
        let codec = Codec::new(3, 2).expect("a geometry");
        let job = CodecJob {
            transform: Some(codec.encoding()),
            hasher: Some(hasher),
            inputs: (0..3).map(|nth| Column::Shared(column(&pool, nth, 2 * BLOCK).freeze())).collect(),
            outputs: Outputs::Into((0..2).map(|_| pool.alloc(2 * BLOCK)).collect()),
        };
        let coded = job.run();
        let columns: Vec<&[u8]> =
            coded.inputs.iter().map(|c| &c[..]).chain(coded.outputs.iter().map(|c| &c[..])).collect();
        assert!(codec.consistent(&columns.iter().copied().enumerate().collect::<Vec<_>>()));
        assert_eq!(coded.hashes, expected(hasher, &columns));
    }

    #[test]
    fn columns_beyond_the_transforms_own_are_hashed_and_outputs_need_not_be_kept() {
        let (pool, hasher) = (Pool::new(1 << 20).expect("memory"), BlockHasher::Blake3);
        let codec = Codec::new(2, 1).expect("a geometry");
        let mut inputs: Vec<BufMut> = (0..2).map(|nth| column(&pool, nth, BLOCK)).collect();
        let mut parity = pool.alloc(BLOCK);
        codec.encode(&[&inputs[0][..], &inputs[1][..]], &mut [(0, &mut parity[..])]);
        inputs.push(parity);
        let job = CodecJob {
            transform: Some(codec.encoding()),
            hasher: Some(hasher),
            inputs: inputs.into_iter().map(Column::Owned).collect(),
            outputs: Outputs::Hashed,
        };
        let coded = job.run();
        assert!(coded.outputs.is_empty());
        assert_eq!(coded.hashes.len(), 4);
        assert_eq!(coded.hashes[2], coded.hashes[3], "the parity that is there is the parity that should be");
    }

    #[test]
    fn jobs_done_together_come_to_what_each_comes_to_alone() {
        let pool = Pool::new(4 << 20).expect("memory");
        let codec = Codec::new(2, 1).expect("a geometry");
        let job = |nth: usize| {
            let blocks = 1 + nth % 3;
            let coded = nth.is_multiple_of(2);
            let output = || Outputs::Into(vec![pool.alloc(blocks * BLOCK)]);
            CodecJob {
                transform: coded.then(|| codec.encoding()),
                hasher: [Some(BlockHasher::Blake3), Some(BlockHasher::Crc32c), None][nth / 2 % 3],
                inputs: (0..2).map(|n| Column::Owned(column(&pool, 5 * nth + n, blocks * BLOCK))).collect(),
                outputs: if nth.is_multiple_of(4) { output() } else { Outputs::Hashed },
            }
        };
        let together = CodecJob::run_together((0..40).map(job).collect());
        assert_eq!(together.len(), 40);
        for (nth, together) in together.iter().enumerate() {
            let alone = job(nth).run();
            assert_eq!(together.hashes, alone.hashes, "job {nth}");
            let bytes = |coded: &CodedColumns| -> Vec<Vec<u8>> {
                let outputs = coded.outputs.iter().map(|buf| buf.to_vec());
                coded.inputs.iter().map(|column| column.to_vec()).chain(outputs).collect()
            };
            assert_eq!(bytes(together), bytes(&alone), "job {nth}");
        }
        assert!(CodecJob::run_together(Vec::new()).is_empty());
    }

    #[test]
    fn columns_of_any_lengths_are_hashed_without_a_transform() {
        let (pool, hasher) = (Pool::new(1 << 20).expect("memory"), BlockHasher::Crc32c);
        let columns = [column(&pool, 1, 3 * BLOCK), column(&pool, 2, BLOCK)];
        let bytes: Vec<Vec<u8>> = columns.iter().map(|column| column.to_vec()).collect();
        let inputs = columns.into_iter().map(Column::Owned).collect();
        let job = CodecJob { transform: None, hasher: Some(hasher), inputs, outputs: Outputs::Hashed };
        assert_eq!(job.input_bytes(), 4 * BLOCK);
        let coded = job.run();
        assert_eq!(coded.hashes, expected(hasher, &[&bytes[0], &bytes[1]]));
    }
}
