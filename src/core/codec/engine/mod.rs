//! One interface over the implementations of the codec's arithmetic: a [`LinearMap`] holds the coefficients
//! of some output columns in the form its engine reads and applies them to columns of bytes. Every engine
//! gives the same bytes. Invariant: a kernel of an instruction set exists only after that set was detected on
//! this CPU, so that applying it is safe. Must not know where coefficients come from or what a column means.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod gfni;
#[cfg(target_arch = "x86_64")]
mod gfni256;
mod portable;
#[cfg(target_arch = "x86_64")]
mod vectors256;
#[cfg(target_arch = "x86_64")]
mod walk;
mod xor;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

pub use xor::{xor, xor_into};

/// One output of a map: the caller's name for the column (a row or column index) and its bytes.
pub(super) type Output<'a> = (usize, &'a mut [u8]);

/// How many bytes of all inputs together one tile holds when several passes read them, so that the later
/// passes find them in the second-level cache. Half of the 1 to 2 MiB that CPUs with these instruction sets
/// have per core.
const TILE_INPUT_BYTES: usize = 512 << 10;

/// Tiles are cut at multiples of this, so that every tile but the last is whole vectors and whole pages.
const TILE_GRAIN_BYTES: usize = 4096;

/// Widest pass over a single input. Reading one input again costs little, while writing many columns at equal
/// distances to a page boundary makes them compete for the same few lines of the first-level cache.
const OUTPUTS_OF_ONE_INPUT: usize = 4;

/// Outputs of a call that touches more bytes than this are written around the cache: they would not stay in a
/// second-level cache of the usual 2 MiB, and a store through the cache first reads the memory that it
/// overwrites.
const STREAM_BYTES_MIN: usize = 2 << 20;

/// How far ahead kernels fetch inputs and outputs, in bytes. Measured: 512 to 1024 are equally fast for
/// columns in memory, and 512 wastes less on short columns.
#[cfg(target_arch = "x86_64")]
const PREFETCH_BYTES: usize = 512;

/// An implementation of the codec's arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// Safe Rust and look-up tables: any CPU, and the reference for the others.
    Portable,
    /// x86-64 with AVX2: byte-shuffle tables, 32 bytes at a time.
    Avx2,
    /// x86-64 with AVX2 and GFNI: bit-matrix products, 32 bytes at a time.
    Gfni256,
    /// x86-64 with AVX-512 (F, BW) and GFNI: bit-matrix products, 64 bytes at a time.
    Gfni,
}

/// A text that names no engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{name}' is not a codec engine: the engines are portable, avx2, gfni256 and gfni")]
pub struct UnknownEngine {
    name: String,
}

impl Engine {
    /// Every engine, the slowest first.
    pub const ALL: [Engine; 4] = [Engine::Portable, Engine::Avx2, Engine::Gfni256, Engine::Gfni];

    /// The name in reports, in CALPE_ENGINE and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Engine::Portable => "portable",
            Engine::Avx2 => "avx2",
            Engine::Gfni256 => "gfni256",
            Engine::Gfni => "gfni",
        }
    }

    /// Whether this CPU can run the engine.
    #[must_use]
    pub fn is_available(self) -> bool {
        Kernel::new(self).is_some()
    }

    /// The fastest engine that this CPU can run.
    #[must_use]
    pub fn fastest() -> Engine {
        Engine::ALL.into_iter().rev().find(|engine| engine.is_available()).unwrap_or(Engine::Portable)
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Engine {
    type Err = UnknownEngine;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = Engine::ALL.into_iter().find(|engine| engine.name() == text);
        named.ok_or_else(|| UnknownEngine { name: text.to_owned() })
    }
}

/// The code of one engine; its existence proves that the CPU has the instructions.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kernel {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Kernel),
    #[cfg(target_arch = "x86_64")]
    Gfni256(gfni256::Kernel),
    #[cfg(target_arch = "x86_64")]
    Gfni(gfni::Kernel),
}

impl Kernel {
    /// The kernel of `engine`, or `None` when this CPU lacks its instructions.
    pub(super) fn new(engine: Engine) -> Option<Kernel> {
        match engine {
            Engine::Portable => Some(Kernel::Portable),
            #[cfg(target_arch = "x86_64")]
            Engine::Avx2 => avx2::Kernel::detect().map(Kernel::Avx2),
            #[cfg(target_arch = "x86_64")]
            Engine::Gfni256 => gfni256::Kernel::detect().map(Kernel::Gfni256),
            #[cfg(target_arch = "x86_64")]
            Engine::Gfni => gfni::Kernel::detect().map(Kernel::Gfni),
            #[cfg(not(target_arch = "x86_64"))]
            _ => None,
        }
    }

    pub(super) fn engine(self) -> Engine {
        match self {
            Kernel::Portable => Engine::Portable,
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2(_) => Engine::Avx2,
            #[cfg(target_arch = "x86_64")]
            Kernel::Gfni256(_) => Engine::Gfni256,
            #[cfg(target_arch = "x86_64")]
            Kernel::Gfni(_) => Engine::Gfni,
        }
    }

    /// How many outputs one pass over the inputs computes at most.
    fn outputs_per_pass(self) -> usize {
        match self {
            Kernel::Portable => portable::OUTPUTS_PER_PASS,
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2(_) => avx2::OUTPUTS_PER_PASS,
            #[cfg(target_arch = "x86_64")]
            Kernel::Gfni256(_) => gfni256::OUTPUTS_PER_PASS,
            #[cfg(target_arch = "x86_64")]
            Kernel::Gfni(_) => gfni::OUTPUTS_PER_PASS,
        }
    }
}

/// What happens to the outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// They become the combination of the inputs.
    Replace,
    /// The combination is added to them.
    Add,
}

/// How a kernel writes an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Store {
    /// Through the cache, where the next reader finds the output.
    Replace,
    /// Around the cache, where outputs are aligned to vectors; elsewhere as `Replace`.
    Stream,
    /// Through the cache, added to the output's bytes.
    Add,
}

/// A matrix over GF(2^8) in the form that its engine applies to columns of bytes.
#[derive(Debug)]
pub(super) struct LinearMap {
    kernel: Kernel,
    inputs: usize,
    passes: Vec<Pass>,
}

/// Consecutive outputs that are computed while the inputs are read once.
#[derive(Debug)]
struct Pass {
    outputs: Range<usize>,
    tables: Tables,
}

/// Factors input by input, and within an input output by output: the order in which kernels read them.
#[derive(Debug)]
enum Tables {
    Bytes(Box<[u8]>),
    #[cfg(target_arch = "x86_64")]
    Nibbles(Box<[[u8; 32]]>),
    #[cfg(target_arch = "x86_64")]
    BitMatrices(Box<[u64]>),
}

impl Tables {
    fn bytes(&self) -> usize {
        match self {
            Tables::Bytes(table) => size_of_val(&table[..]),
            #[cfg(target_arch = "x86_64")]
            Tables::Nibbles(table) => size_of_val(&table[..]),
            #[cfg(target_arch = "x86_64")]
            Tables::BitMatrices(table) => size_of_val(&table[..]),
        }
    }
}

impl LinearMap {
    /// The map with `inputs` factors per output in `coefficients`, output after output.
    pub(super) fn new(kernel: Kernel, coefficients: &[u8], inputs: usize) -> LinearMap {
        assert!(inputs > 0, "a map without inputs");
        let outputs = coefficients.len() / inputs;
        assert_eq!(coefficients.len(), outputs * inputs, "ragged coefficients");
        // Passes of equal width: ten and ten rather than sixteen and four.
        let width = if inputs == 1 { OUTPUTS_OF_ONE_INPUT } else { kernel.outputs_per_pass() };
        let count = outputs.div_ceil(width);
        let passes = (0..count)
            .map(|pass| {
                let rows = pass * outputs / count..(pass + 1) * outputs / count;
                let factors = (0..inputs).flat_map(|input| {
                    rows.clone().map(move |row| usize::from(coefficients[row * inputs + input]))
                });
                let tables = match kernel {
                    Kernel::Portable => Tables::Bytes(factors.map(|c| c as u8).collect()),
                    #[cfg(target_arch = "x86_64")]
                    Kernel::Avx2(_) => Tables::Nibbles(factors.map(|c| super::gf::NIBBLE[c]).collect()),
                    #[cfg(target_arch = "x86_64")]
                    Kernel::Gfni256(_) | Kernel::Gfni(_) => {
                        Tables::BitMatrices(factors.map(|c| super::gf::AFFINE[c]).collect())
                    }
                };
                Pass { outputs: rows, tables }
            })
            .collect();
        LinearMap { kernel, inputs, passes }
    }

    /// Memory held by the tables, in bytes.
    pub(super) fn table_bytes(&self) -> usize {
        self.passes.iter().map(|pass| pass.tables.bytes()).sum()
    }

    /// Applies the map. All columns have one length, any, at any alignment.
    ///
    /// # Panics
    /// When the number of columns is not the map's or their lengths differ.
    pub(super) fn apply(&self, inputs: &[&[u8]], outputs: &mut [Output<'_>], mode: Mode) {
        let mapped = self.passes.last().map_or(0, |pass| pass.outputs.end);
        assert_eq!(inputs.len(), self.inputs, "number of input columns");
        assert_eq!(outputs.len(), mapped, "number of output columns");
        let length = inputs[0].len();
        assert!(inputs.iter().all(|column| column.len() == length), "input columns differ in length");
        assert!(outputs.iter().all(|(_, column)| column.len() == length), "output columns differ in length");

        let store = match mode {
            Mode::Add => Store::Add,
            Mode::Replace if length.saturating_mul(self.inputs + mapped) > STREAM_BYTES_MIN => Store::Stream,
            Mode::Replace => Store::Replace,
        };
        let tile = if self.passes.len() == 1 {
            length
        } else {
            (TILE_INPUT_BYTES / self.inputs).next_multiple_of(TILE_GRAIN_BYTES)
        };
        let mut start = 0;
        while start < length {
            let end = length.min(start.saturating_add(tile));
            for pass in &self.passes {
                self.apply_pass(&pass.tables, inputs, &mut outputs[pass.outputs.clone()], start..end, store);
            }
            start = end;
        }
    }

    fn apply_pass(
        &self,
        tables: &Tables,
        inputs: &[&[u8]],
        outputs: &mut [Output<'_>],
        range: Range<usize>,
        store: Store,
    ) {
        match (self.kernel, tables) {
            (Kernel::Portable, Tables::Bytes(table)) => portable::apply(table, inputs, outputs, range, store),
            #[cfg(target_arch = "x86_64")]
            (Kernel::Avx2(kernel), Tables::Nibbles(table)) => {
                kernel.apply(table, inputs, outputs, range, store)
            }
            #[cfg(target_arch = "x86_64")]
            (Kernel::Gfni256(kernel), Tables::BitMatrices(table)) => {
                kernel.apply(table, inputs, outputs, range, store);
            }
            #[cfg(target_arch = "x86_64")]
            (Kernel::Gfni(kernel), Tables::BitMatrices(table)) => {
                kernel.apply(table, inputs, outputs, range, store);
            }
            #[cfg(target_arch = "x86_64")]
            _ => unreachable!("tables are built for the kernel that holds them"),
        }
    }
}
