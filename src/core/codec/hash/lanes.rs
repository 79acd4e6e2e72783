//! BLAKE3 of many 4 KiB blocks at once. A block is four chunks of 1 KiB, so one block alone fills four of the
//! sixteen lanes of a register; the same chunk of sixteen blocks fills all of them. The tree over four chunks
//! has two parents and the root.
//!
//! The kernel is the blake3 crate's own for many inputs, which the crate exposes for benchmarks without a
//! promise of stability: Cargo.toml fixes the version, and a test compares the results with the crate's
//! stable interface.

use blake3::IncrementCounter;
use blake3::platform::Platform;
use std::array::from_fn;
use std::sync::LazyLock;

const BLOCK: usize = 4096;
/// Bytes of a leaf of the tree (BLAKE3 paper, 2.4).
const CHUNK: usize = 1024;
const CHUNKS: usize = BLOCK / CHUNK;
/// Bytes of a chaining value, and of a hash.
const VALUE: usize = 32;
/// Blocks hashed at once: the lanes of the widest registers.
const LANES: usize = 16;
/// The fewest inputs that the kernel is given: with four or two, those of the crate (1.8.7) for AVX-512 read
/// 48 or 16 bytes beyond the end of the first input, where there may be no memory.
const HALF: usize = 8;
/// Fewer blocks than this are hashed one by one: a block alone fills as many lanes as they would together.
const LANES_MIN: usize = CHUNKS;

/// The initial value (BLAKE3 paper, table 1), that of SHA-256.
const IV: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

/// Domain flags (BLAKE3 paper, table 3).
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 2;
const PARENT: u8 = 4;
const ROOT: u8 = 8;
const KEYED_HASH: u8 = 16;

/// The initial words, and the flag of every node.
type Words = ([u32; 8], u8);

static PLATFORM: LazyLock<Platform> = LazyLock::new(Platform::detect);

/// What the tree begins with (BLAKE3 paper, 2.3): the initial value, or a key.
#[derive(Clone, Copy)]
pub(super) enum Start<'k> {
    Plain,
    Keyed(&'k [u8; VALUE]),
}

impl Start<'_> {
    /// The initial words and the flag of every node.
    fn words(self) -> ([u32; 8], u8) {
        match self {
            Start::Plain => (IV, 0),
            Start::Keyed(key) => {
                let words = &key.as_chunks().0;
                (from_fn(|at| u32::from_le_bytes(words[at])), KEYED_HASH)
            }
        }
    }

    /// The hash of one block.
    fn one(self, block: &[u8; BLOCK]) -> blake3::Hash {
        match self {
            Start::Plain => blake3::hash(block),
            Start::Keyed(key) => blake3::keyed_hash(key, block),
        }
    }
}

/// Calls back with the hash of each block, in order.
pub(super) fn hash_each<'a>(
    start: Start<'_>,
    mut blocks: impl ExactSizeIterator<Item = &'a [u8; BLOCK]>,
    mut tell: impl FnMut(&[u8; VALUE]),
) {
    let words = start.words();
    while blocks.len() > 0 {
        let left = blocks.len();
        if left < LANES_MIN {
            return blocks.for_each(|block| tell(start.one(block).as_bytes()));
        }
        // Lanes without a block of their own hash zeroes.
        let lanes = if left >= LANES { LANES } else { HALF };
        let now_count = lanes.min(left);
        let mut now = [&[0; BLOCK]; LANES];
        now.iter_mut().zip(blocks.by_ref().take(now_count)).for_each(|(lane, block)| *lane = block);
        hash_lanes(words, &now[..lanes]).iter().take(now_count).for_each(&mut tell);
    }
}

/// Hashes at most [`LANES`] blocks; results beyond their number have no meaning.
fn hash_lanes(words: Words, blocks: &[&[u8; BLOCK]]) -> [[u8; VALUE]; LANES] {
    let lanes = blocks.len();
    let mut chunks = [[[0; VALUE]; LANES]; CHUNKS];
    for (nth, values) in chunks.iter_mut().enumerate() {
        let inputs: [&[u8; CHUNK]; LANES] = from_fn(|lane| &blocks[lane.min(lanes - 1)].as_chunks().0[nth]);
        compress(words, &inputs[..lanes], nth as u64, 0, CHUNK_START, CHUNK_END, values);
    }
    let [first, second, third, fourth] = &chunks;
    let (left, right) = (join(words, first, second, lanes, 0), join(words, third, fourth, lanes, 0));
    join(words, &left, &right, lanes, ROOT)
}

/// The parents of the values of two children each.
fn join(
    words: Words,
    left: &[[u8; VALUE]; LANES],
    right: &[[u8; VALUE]; LANES],
    lanes: usize,
    root: u8,
) -> [[u8; VALUE]; LANES] {
    let nodes: [[u8; 2 * VALUE]; LANES] = from_fn(|lane| {
        let mut node = [0; 2 * VALUE];
        node[..VALUE].copy_from_slice(&left[lane]);
        node[VALUE..].copy_from_slice(&right[lane]);
        node
    });
    let mut values = [[0; VALUE]; LANES];
    compress(words, &nodes.each_ref()[..lanes], 0, PARENT, 0, root, &mut values);
    values
}

fn compress<const N: usize>(
    (key, of_all): Words,
    inputs: &[&[u8; N]],
    counter: u64,
    flags: u8,
    start: u8,
    end: u8,
    values: &mut [[u8; VALUE]; LANES],
) {
    let out = &mut values.as_flattened_mut()[..inputs.len() * VALUE];
    PLATFORM.hash_many(inputs, &key, counter, IncrementCounter::No, flags | of_all, start, end, out);
}
