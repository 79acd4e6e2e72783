//! Fingerprints of 4 KiB blocks. The same bytes give the same hash on every engine.

use crate::units::BlockHash;

/// How blocks are fingerprinted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockHasher {
    /// CRC-32C (Castagnoli): finds accidents, not intent.
    Crc32c,
    /// BLAKE3, the first 16 bytes.
    Blake3,
}

/// Behind the four bytes of a CRC: keeps it apart from the hashes that are none.
const CRC_MARK: [u8; 12] = *b"crc-32c\0\0\0\0\x01";

impl BlockHasher {
    /// The fingerprint of a block.
    #[must_use]
    pub fn hash(self, block: &[u8]) -> BlockHash {
        let mut hash = [0; 16];
        match self {
            BlockHasher::Crc32c => {
                hash[..4].copy_from_slice(&crc32c::crc32c(block).to_le_bytes());
                hash[4..].copy_from_slice(&CRC_MARK);
            }
            BlockHasher::Blake3 => hash.copy_from_slice(&blake3::hash(block).as_bytes()[..16]),
        }
        let hash = BlockHash(hash);
        // A content that hashes to a value with another meaning gets a neighbour of it; 2^-127 of all do.
        if hash.is_stored() { hash } else { BlockHash([0x5a; 16]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
