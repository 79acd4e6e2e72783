//! Reed-Solomon coding of columns of bytes: of k data and m parity columns, any k determine the rest.
//!
//! The field is GF(2^8) over 0x11D and the matrix is the systematic Vandermonde matrix of Gibraltar,
//! Backblaze and the reed-solomon-erasure crate, byte for byte. Columns 0..k are data, k..k+m parity.
//! Invariants: every engine writes the same bytes, and a byte of a parity depends only on the bytes at its
//! own position, so that any byte range of a stripe can be coded alone. Must not know of members, stripes or
//! layouts: a column here is a slice.

pub mod bench;
mod cache;
mod engine;
mod gf;
#[cfg(all(test, not(miri)))]
mod guarded;
mod hash;
mod job;
mod matrix;
#[cfg(test)]
mod suite;
mod transform;

use std::sync::Arc;

use cache::MapCache;
use engine::{Kernel, LinearMap, Mode, Output};

pub use engine::{Engine, UnknownEngine, xor, xor_into};
pub use hash::{BlockHasher, keyed_hash_each, whole_hash_each};
pub use job::{CodecJob, CodedColumns, Column, Outputs};
pub use transform::{Form, Transform};

/// Most columns of a code, data and parity: every column is an element of GF(2^8), and the on-disk format
/// leaves 255 free as "none".
pub const COLUMNS_MAX: usize = 255;

/// Environment variable that names the engine of [`Codec::new`], for tests and comparisons.
pub const ENGINE_VARIABLE: &str = "CALPE_ENGINE";

/// Bytes of one column that [`Codec::consistent`] recomputes at a time.
const CHECK_TILE_BYTES: usize = 4096;

/// How many surplus columns [`Codec::consistent`] recomputes at a time; its scratch is this many tiles.
const CHECK_COLUMNS: usize = 8;

/// Why a codec cannot be made or a recovery cannot be done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The numbers of columns are outside the code's range.
    #[error(
        "{data} data and {parity} parity columns cannot be coded: at least 1 data column, at most 255 in all"
    )]
    Geometry {
        /// Data columns asked for.
        data: usize,
        /// Parity columns asked for.
        parity: usize,
    },
    /// The CPU lacks the instructions of the engine.
    #[error("this CPU cannot run the codec engine '{engine}': choose '{fastest}'", fastest = Engine::fastest())]
    EngineUnavailable {
        /// The engine asked for.
        engine: Engine,
    },
    /// The environment variable [`ENGINE_VARIABLE`] names no engine.
    #[error("environment variable CALPE_ENGINE")]
    EngineVariable(#[from] UnknownEngine),
    /// Recovery was given more or fewer than k present columns.
    #[error("recovery needs exactly {needed} present columns, not {given}")]
    PresentCount {
        /// Present columns given.
        given: usize,
        /// The code's k.
        needed: usize,
    },
    /// A column index is not below k+m.
    #[error("column {column} of a code of {columns} columns")]
    NoSuchColumn {
        /// The index.
        column: usize,
        /// The code's k+m.
        columns: usize,
    },
    /// A column is listed twice, or is both present and wanted.
    #[error("column {column} is named twice")]
    Repeated {
        /// The index.
        column: usize,
    },
    /// Columns are not of equal length.
    #[error("column {column} has {length} bytes where the others have {expected}")]
    Length {
        /// The index of the odd one.
        column: usize,
        /// Its length in bytes.
        length: usize,
        /// The length of the first column in bytes.
        expected: usize,
    },
}

/// A code of `data` + `parity` columns on one engine. Cheap to clone; clones share the tables.
#[derive(Clone, Debug)]
pub struct Codec {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    data: usize,
    parity: usize,
    kernel: Kernel,
    /// All data columns to all parities, in order.
    encode: LinearMap,
    /// For every data column, its delta to all parities, in order.
    update: Vec<LinearMap>,
    /// Maps for everything else: recoveries, and subsets of parities.
    others: MapCache,
}

impl Codec {
    /// A codec on the fastest engine of this CPU, or on the one that [`ENGINE_VARIABLE`] names.
    ///
    /// # Errors
    /// `Geometry` unless 1 <= `data` and `data + parity` <= [`COLUMNS_MAX`]; `EngineVariable` and
    /// `EngineUnavailable` when the variable is set wrongly.
    pub fn new(data: usize, parity: usize) -> Result<Codec, CodecError> {
        let engine = match std::env::var_os(ENGINE_VARIABLE) {
            Some(name) => name.to_string_lossy().parse()?,
            None => Engine::fastest(),
        };
        Codec::with_engine(data, parity, engine)
    }

    /// A codec on a given engine.
    ///
    /// # Errors
    /// `Geometry` as for [`Codec::new`]; `EngineUnavailable` when this CPU lacks the instructions.
    pub fn with_engine(data: usize, parity: usize, engine: Engine) -> Result<Codec, CodecError> {
        if data == 0 || data.checked_add(parity).is_none_or(|columns| columns > COLUMNS_MAX) {
            return Err(CodecError::Geometry { data, parity });
        }
        let kernel = Kernel::new(engine).ok_or(CodecError::EngineUnavailable { engine })?;
        let columns: Vec<u8> = (0..(data + parity) as u8).collect();
        let rows = matrix::coefficients(&columns[..data], &columns[data..]);
        let encode = LinearMap::new(kernel, &rows, data);
        let update = (0..data)
            .map(|column| {
                let factors: Vec<u8> = rows.iter().skip(column).step_by(data).copied().collect();
                LinearMap::new(kernel, &factors, 1)
            })
            .collect();
        let shared = Shared { data, parity, kernel, encode, update, others: MapCache::default() };
        Ok(Codec { shared: Arc::new(shared) })
    }

    /// The engine in use.
    #[must_use]
    pub fn engine(&self) -> Engine {
        self.shared.kernel.engine()
    }

    /// Number of data columns, k.
    #[must_use]
    pub fn data(&self) -> usize {
        self.shared.data
    }

    /// Number of parity columns, m.
    #[must_use]
    pub fn parity(&self) -> usize {
        self.shared.parity
    }

    /// Computes parities from all k data columns. `parity` names rows 0..m, any of them in any order, with
    /// the bytes to fill. All columns have one length, any, at any alignment.
    ///
    /// # Panics
    /// When `data` is not k columns, a row is not below m, or lengths differ: the caller owns the layout.
    pub fn encode(&self, data: &[&[u8]], parity: &mut [(usize, &mut [u8])]) {
        let shared = &*self.shared;
        assert_eq!(data.len(), shared.data, "number of data columns");
        if shared.is_every_row(parity) {
            return shared.encode.apply(data, parity, Mode::Replace);
        }
        let columns = (0..shared.data).chain(parity.iter().map(|(row, _)| shared.parity_column(*row)));
        shared.map(columns).apply(data, parity, Mode::Replace);
    }

    /// Adds the change of one data column to parities: `delta` is the old bytes of `column` XOR the new ones,
    /// and row j of `parity` becomes what encoding the new data would give. Rows as for [`Codec::encode`].
    ///
    /// # Panics
    /// When `column` is not below k, a row is not below m, or lengths differ.
    pub fn update(&self, column: usize, delta: &[u8], parity: &mut [(usize, &mut [u8])]) {
        let shared = &*self.shared;
        assert!(column < shared.data, "data column {column} of {}", shared.data);
        if shared.is_every_row(parity) {
            return shared.update[column].apply(&[delta], parity, Mode::Add);
        }
        let rows = parity.iter().map(|(row, _)| shared.parity_column(*row));
        shared.update_map(column, rows).apply(&[delta], parity, Mode::Add);
    }

    /// Computes `wanted` columns, data or parity, from exactly k distinct `present` ones; any order, no
    /// column twice. The factors of a pattern of columns are computed when it first occurs (k^2 look-ups) and
    /// kept.
    ///
    /// # Errors
    /// When the columns are not as described or not of one length; nothing is written then.
    pub fn recover(
        &self,
        present: &[(usize, &[u8])],
        wanted: &mut [(usize, &mut [u8])],
    ) -> Result<(), CodecError> {
        let shared = &*self.shared;
        if present.len() != shared.data {
            return Err(CodecError::PresentCount { given: present.len(), needed: shared.data });
        }
        let expected = present[0].1.len();
        let lengths = present.iter().map(|(column, bytes)| (*column, bytes.len()));
        let lengths = lengths.chain(wanted.iter().map(|(column, bytes)| (*column, bytes.len())));
        shared.check_columns(lengths.clone().map(|(column, _)| column))?;
        if let Some((column, length)) = lengths.clone().find(|&(_, length)| length != expected) {
            return Err(CodecError::Length { column, length, expected });
        }
        let inputs: Vec<&[u8]> = present.iter().map(|(_, bytes)| *bytes).collect();
        let columns = present.iter().map(|(column, _)| *column);
        let columns = columns.chain(wanted.iter().map(|(column, _)| *column));
        shared.map(columns).apply(&inputs, wanted, Mode::Replace);
        Ok(())
    }

    /// Whether all given columns belong to one codeword: the first k of them determine the others. Exactly k
    /// columns always do. Uses a fixed scratch of 32 KiB.
    ///
    /// # Panics
    /// When there are fewer than k columns, a column is named twice or does not exist, or lengths differ.
    #[must_use]
    pub fn consistent(&self, columns: &[(usize, &[u8])]) -> bool {
        let shared = &*self.shared;
        assert!(columns.len() >= shared.data, "{} columns of a code of {} data", columns.len(), shared.data);
        if let Err(error) = shared.check_columns(columns.iter().map(|(column, _)| *column)) {
            panic!("consistency check: {error}");
        }
        let length = columns[0].1.len();
        assert!(columns.iter().all(|(_, bytes)| bytes.len() == length), "columns differ in length");

        let (basis, surplus) = columns.split_at(shared.data);
        let mut scratch = vec![0; CHECK_TILE_BYTES.min(length) * CHECK_COLUMNS.min(surplus.len())];
        surplus.chunks(CHECK_COLUMNS).all(|group| {
            let map = shared.map(basis.iter().chain(group).map(|(column, _)| *column));
            (0..length).step_by(CHECK_TILE_BYTES).all(|start| {
                let end = length.min(start + CHECK_TILE_BYTES);
                let inputs: Vec<&[u8]> = basis.iter().map(|(_, bytes)| &bytes[start..end]).collect();
                let mut outputs: Vec<Output<'_>> = group
                    .iter()
                    .zip(scratch.chunks_mut(CHECK_TILE_BYTES.min(length)))
                    .map(|((column, _), tile)| (*column, &mut tile[..end - start]))
                    .collect();
                map.apply(&inputs, &mut outputs, Mode::Replace);
                outputs.iter().zip(group).all(|((_, computed), (_, bytes))| **computed == bytes[start..end])
            })
        })
    }
}

impl Shared {
    /// Whether `parity` is rows 0..m in order, whose maps are made with the codec.
    fn is_every_row(&self, parity: &[Output<'_>]) -> bool {
        parity.len() == self.parity && parity.iter().enumerate().all(|(index, (row, _))| index == *row)
    }

    /// The column of parity row `row`. Panics when there is no such row.
    fn parity_column(&self, row: usize) -> usize {
        assert!(row < self.parity, "parity row {row} of {}", self.parity);
        self.data + row
    }

    /// Errors unless all indices exist and none comes twice.
    fn check_columns(&self, indices: impl Iterator<Item = usize>) -> Result<(), CodecError> {
        let columns = self.data + self.parity;
        let mut seen = [0u64; COLUMNS_MAX.div_ceil(64)];
        for column in indices {
            if column >= columns {
                return Err(CodecError::NoSuchColumn { column, columns });
            }
            let bit = 1 << (column % 64);
            if seen[column / 64] & bit != 0 {
                return Err(CodecError::Repeated { column });
            }
            seen[column / 64] |= bit;
        }
        Ok(())
    }

    /// The map from the first k of `columns`, all different, to the rest of them; from the cache if it is
    /// there.
    fn map(&self, columns: impl Iterator<Item = usize>) -> Arc<LinearMap> {
        let key = Key::new(columns);
        self.others.get_or_insert(key.bytes(), || {
            let (present, wanted) = key.bytes().split_at(self.data);
            LinearMap::new(self.kernel, &matrix::coefficients(present, wanted), present.len())
        })
    }

    /// The map from the delta of one data column to some parities.
    fn update_map(&self, column: usize, parities: impl Iterator<Item = usize>) -> Arc<LinearMap> {
        // Keys of maps from k columns never begin with COLUMNS_MAX, which no column has as its index.
        let key = Key::new([COLUMNS_MAX, column].into_iter().chain(parities));
        self.others.get_or_insert(key.bytes(), || {
            let present: Vec<u8> = (0..self.data as u8).collect();
            let rows = matrix::coefficients(&present, &key.bytes()[2..]);
            let factors: Vec<u8> = rows.iter().skip(column).step_by(self.data).copied().collect();
            LinearMap::new(self.kernel, &factors, 1)
        })
    }
}

/// Some columns as a key of the cache, on the stack: small recoveries are too fast for an allocation.
struct Key {
    bytes: [u8; KEY_BYTES],
    length: usize,
}

/// A key holds every column of a code at most once; those of updates hold two more bytes beside the parities.
const KEY_BYTES: usize = COLUMNS_MAX + 1;

impl Key {
    fn new(columns: impl Iterator<Item = usize>) -> Key {
        let mut key = Key { bytes: [0; KEY_BYTES], length: 0 };
        for column in columns {
            key.bytes[key.length] = column as u8;
            key.length += 1;
        }
        key
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}
