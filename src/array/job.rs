//! Work on bytes that an array gives away: coding and hashing a whole stripe. It depends on nothing but its bytes, so
//! whoever drives the array may do it at once, later, or on another thread. Must not know of members or locks.

use crate::block_io::{Buf, BufMut};
use crate::codec::{BlockHasher, Codec};
use crate::units::BlockHash;
use std::fmt;

/// A whole stripe to be coded and hashed. Answered by a [`CodedStripe`] with the same key, sooner or later.
pub struct StripeJob {
    /// The operation that waits.
    pub key: usize,
    /// The code.
    pub codec: Codec,
    /// What hashes the blocks.
    pub hasher: BlockHasher,
    /// The k data columns.
    pub data: Vec<Buf>,
    /// The m parity columns, to be filled.
    pub parity: Vec<BufMut>,
    /// Nobody else is being served: whoever does it at once answers soonest.
    pub alone: bool,
}

/// What became of a [`StripeJob`].
pub struct CodedStripe {
    /// The operation that waits.
    pub key: usize,
    /// All columns, data before parity.
    pub columns: Vec<Buf>,
    /// The hashes of all blocks, column after column.
    pub hashes: Vec<BlockHash>,
}

impl StripeJob {
    /// Does the work.
    #[must_use]
    pub fn run(self) -> CodedStripe {
        let StripeJob { key, codec, hasher, data, mut parity, .. } = self;
        let sources: Vec<&[u8]> = data.iter().map(|buf| &buf[..]).collect();
        let mut outputs: Vec<(usize, &mut [u8])> =
            parity.iter_mut().enumerate().map(|(row, buf)| (row, &mut buf[..])).collect();
        codec.encode(&sources, &mut outputs);
        let columns: Vec<Buf> = data.into_iter().chain(parity.into_iter().map(BufMut::freeze)).collect();
        let mut hashes = Vec::new();
        for column in &columns {
            hasher.hash_blocks(column, &mut hashes);
        }
        CodedStripe { key, columns, hashes }
    }
}

impl fmt::Debug for StripeJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StripeJob").field("key", &self.key).finish_non_exhaustive()
    }
}

impl fmt::Debug for CodedStripe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CodedStripe").field("key", &self.key).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_io::Pool;
    use crate::units::ROW_BYTES;

    #[test]
    fn a_stripe_has_all_columns_and_a_hash_for_each_block_in_order() {
        let pool = Pool::new(1 << 20).expect("memory");
        let chunk = 2 * ROW_BYTES as usize;
        let codec = Codec::new(3, 2).expect("a geometry");
        let column = |nth: usize| {
            let mut buf = pool.alloc(chunk);
            buf.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7 + nth * 31) as u8);
            buf.freeze()
        };
        let data: Vec<Buf> = (0..3).map(column).collect();
        let (parity, hasher) = ((0..2).map(|_| pool.alloc(chunk)).collect(), BlockHasher::Blake3);
        let job = StripeJob { key: 9, codec: codec.clone(), hasher, data, parity, alone: true };
        let coded = job.run();
        assert_eq!((coded.key, coded.columns.len()), (9, 5));
        let columns: Vec<(usize, &[u8])> = coded.columns.iter().map(|buf| &buf[..]).enumerate().collect();
        assert!(codec.consistent(&columns));
        let blocks = coded.columns.iter().flat_map(|buf| buf.chunks(ROW_BYTES as usize));
        assert_eq!(coded.hashes, blocks.map(|block| hasher.hash(block)).collect::<Vec<_>>());
    }
}
