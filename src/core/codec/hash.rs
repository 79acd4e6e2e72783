//! Fingerprints of 4 KiB blocks. The same bytes give the same hash on every engine, one by one or many at
//! once.

mod lanes;

use lanes::Start;

use crate::units::{BlockHash, ROW_BYTES};

/// How blocks are fingerprinted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockHasher {
    /// CRC-32C (Castagnoli): detects accidental damage, not intended changes.
    Crc32c,
    /// BLAKE3, the first 16 bytes.
    Blake3,
}

/// Follows the four bytes of a CRC, so that no stored CRC equals a hash with a special meaning.
const CRC_MARK: [u8; 12] = *b"crc-32c\0\0\0\0\x01";

const BLOCK: usize = ROW_BYTES as usize;

impl BlockHasher {
    /// The fingerprint of a block.
    #[must_use]
    pub fn hash(self, block: &[u8]) -> BlockHash {
        stored(match self {
            BlockHasher::Crc32c => of_crc(block),
            BlockHasher::Blake3 => first_half(blake3::hash(block).as_bytes()),
        })
    }

    /// The fingerprint of a block, from the first 16 bytes of its BLAKE3 hash computed elsewhere.
    #[must_use]
    pub fn stored_digest(digest: [u8; 16]) -> BlockHash {
        stored(digest)
    }

    /// Appends the fingerprints of consecutive 4 KiB blocks. On a processor with wide registers
    /// this is several times as fast as hashing them one by one.
    ///
    /// # Panics
    /// When `bytes` are not whole blocks.
    pub fn hash_blocks(self, bytes: &[u8], hashes: &mut Vec<BlockHash>) {
        self.hash_each(blocks_of(bytes).iter(), |hash| hashes.push(hash));
    }

    /// Calls back with the fingerprints of scattered blocks, in order, as fast as
    /// [`BlockHasher::hash_blocks`].
    pub fn hash_each<'a>(
        self,
        blocks: impl ExactSizeIterator<Item = &'a [u8; BLOCK]>,
        mut tell: impl FnMut(BlockHash),
    ) {
        match self {
            BlockHasher::Crc32c => blocks.for_each(|block| tell(stored(of_crc(block)))),
            BlockHasher::Blake3 => {
                lanes::hash_each(Start::Plain, blocks, |hash| tell(stored(first_half(hash))))
            }
        }
    }

    /// Whether hashing many blocks at once is cheaper than hashing them one by one.
    #[must_use]
    pub fn gains_from_batching(self) -> bool {
        self == BlockHasher::Blake3
    }
}

/// Calls back with the whole BLAKE3 hashes of scattered 4 KiB blocks, in order, side by side where that is
/// faster.
pub fn whole_hash_each<'a>(
    blocks: impl ExactSizeIterator<Item = &'a [u8; BLOCK]>,
    tell: impl FnMut(&[u8; 32]),
) {
    lanes::hash_each(Start::Plain, blocks, tell);
}

/// Calls back with the keyed BLAKE3 hashes of scattered 4 KiB blocks, in order, side by side where that is
/// faster.
pub fn keyed_hash_each<'a>(
    key: &[u8; 32],
    blocks: impl ExactSizeIterator<Item = &'a [u8; BLOCK]>,
    tell: impl FnMut(&[u8; 32]),
) {
    lanes::hash_each(Start::Keyed(key), blocks, tell);
}

/// The blocks of a column.
///
/// # Panics
/// When `bytes` are not whole blocks.
pub(super) fn blocks_of(bytes: &[u8]) -> &[[u8; BLOCK]] {
    let (blocks, rest) = bytes.as_chunks::<BLOCK>();
    assert!(rest.is_empty(), "{} bytes are not whole blocks", bytes.len());
    blocks
}

fn of_crc(block: &[u8]) -> [u8; 16] {
    let mut hash = [0; 16];
    hash[..4].copy_from_slice(&crc_fast::crc32_iscsi(block).to_le_bytes());
    hash[4..].copy_from_slice(&CRC_MARK);
    hash
}

fn first_half(hash: &[u8; 32]) -> [u8; 16] {
    let [first, _] = hash.as_chunks::<16>().0 else { unreachable!("32 bytes are two halves") };
    *first
}

/// Replaces a hash that equals a value with a special meaning by a neighbour of it. That happens to 2^-127 of
/// all contents.
fn stored(hash: [u8; 16]) -> BlockHash {
    let hash = BlockHash(hash);
    if hash.is_stored() { hash } else { BlockHash([0x5a; 16]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::guarded::{Edge, Guarded};

    #[test]
    fn known_fingerprints() {
        let crc = BlockHasher::Crc32c.hash(b"123456789");
        assert_eq!(crc.0[..4], 0xe306_9283u32.to_le_bytes());
        let blake = BlockHasher::Blake3.hash(b"");
        assert_eq!(blake.0[..4], [0xaf, 0x13, 0x49, 0xb9]);
    }

    #[test]
    fn one_bit_makes_another_fingerprint() {
        let mut block = vec![7u8; 4096];
        for hasher in [BlockHasher::Crc32c, BlockHasher::Blake3] {
            let before = hasher.hash(&block);
            for at in [0, 1000, 4095] {
                block[at] ^= 1;
                assert_ne!(hasher.hash(&block), before);
                block[at] ^= 1;
            }
            assert!(before.is_stored() && hasher.hash(&[0; 4096]).is_stored());
        }
    }

    #[test]
    fn many_at_once_hash_as_they_do_one_by_one() {
        // Covers every number of blocks left over after full registers of any width.
        for blocks in 0..=37 {
            let bytes: Vec<u8> =
                (0..blocks * BLOCK).map(|at| (at * 31 + at / 251 + at / BLOCK * 7) as u8).collect();
            for hasher in [BlockHasher::Crc32c, BlockHasher::Blake3] {
                let mut hashes = vec![BlockHash([9; 16])];
                hasher.hash_blocks(&bytes, &mut hashes);
                let one_by_one = bytes.chunks(BLOCK).map(|block| hasher.hash(block));
                let wanted: Vec<BlockHash> = std::iter::once(BlockHash([9; 16])).chain(one_by_one).collect();
                assert_eq!(hashes, wanted, "{blocks} blocks, {hasher:?}");
            }
        }
    }

    #[test]
    fn keyed_hashes_side_by_side_are_those_of_one_by_one() {
        let key: [u8; 32] = std::array::from_fn(|at| at as u8 * 7);
        let blocks: Vec<[u8; BLOCK]> = (0..37).map(|at| [at as u8 ^ 0x5c; BLOCK]).collect();
        for count in 0..=37 {
            let mut hashes = Vec::new();
            keyed_hash_each(&key, blocks[..count].iter(), |hash| hashes.push(*hash));
            let wanted: Vec<[u8; 32]> =
                blocks[..count].iter().map(|block| *blake3::keyed_hash(&key, block).as_bytes()).collect();
            assert_eq!(hashes, wanted, "{count} blocks");
        }
    }

    #[test]
    fn no_byte_beyond_a_block_is_read() {
        // Each block ends, or begins, at memory that cannot be read.
        for edge in [Edge::After, Edge::Before] {
            let blocks: Vec<Guarded> = (0..37).map(|_| Guarded::new(BLOCK, edge)).collect();
            let blocks: Vec<&[u8; BLOCK]> =
                blocks.iter().map(|block| block[..].try_into().expect("a block")).collect();
            for count in 0..=37 {
                let mut hashes = Vec::new();
                BlockHasher::Blake3.hash_each(blocks[..count].iter().copied(), |hash| hashes.push(hash));
                assert_eq!(hashes, vec![BlockHasher::Blake3.hash(blocks[0]); count]);
            }
        }
    }

    #[test]
    fn digests_of_others_become_what_is_computed_here() {
        let digest = first_half(blake3::hash(&[3; BLOCK]).as_bytes());
        assert_eq!(BlockHasher::stored_digest(digest), BlockHasher::Blake3.hash(&[3; BLOCK]));
        assert!(BlockHasher::stored_digest([0; 16]).is_stored());
        assert!(BlockHasher::stored_digest([0xff; 16]).is_stored());
    }

    #[test]
    #[should_panic(expected = "not whole blocks")]
    fn half_a_block_is_refused() {
        BlockHasher::Blake3.hash_blocks(&[0; 6000], &mut Vec::new());
    }
}
