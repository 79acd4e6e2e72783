//! How a write of a part of a stripe becomes reads and parity: it is cut into bands of rows with one set of
//! modified columns, and each band gets its new parity by the cheapest way that the available columns allow.
//! Pure; no buffers, no I/O.

use crate::array::geometry::Map;
use std::ops::Range;

/// Rows (bytes within the chunk) in which the same columns are modified.
// Plain data: a part of a write, after cutting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Band {
    /// Bytes within the chunk.
    pub rows: Range<usize>,
    /// Data columns that the write covers in these rows.
    pub columns: Range<usize>,
}

/// How the parity of a band is computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ParityPath {
    /// There is no parity to write, or every data column is new: nothing is read.
    Direct,
    /// Read the old bytes of the modified columns and of the parities: p ^= c * (new ^ old).
    ReadModifyWrite,
    /// Read the other data columns and encode afresh.
    ReconstructWrite,
    /// Read these `k` columns, decode the missing data columns, encode afresh.
    DecodeWrite(Vec<usize>),
    /// Fewer than `k` columns can be read and the others do not suffice.
    Impossible,
}

/// Cuts a write of `len` bytes at `offset` of the stripe's user data into at most three bands, rows
/// ascending.
#[must_use]
pub(super) fn bands(map: &Map, offset: usize, len: usize) -> Vec<Band> {
    debug_assert!(len > 0 && offset + len <= map.stripe_bytes());
    let chunk = map.chunk;
    let (first, start) = (offset / chunk, offset % chunk);
    let last = (offset + len - 1) / chunk;
    let end = (offset + len - 1) % chunk + 1;
    if first == last {
        return vec![Band { rows: start..end, columns: first..first + 1 }];
    }
    // The first column is covered from `start` on, the last one up to `end`, those between them as a whole.
    let middle = if start < end { first..last + 1 } else { first + 1..last };
    let (low, high) = (start.min(end), start.max(end));
    [
        Band { rows: 0..low, columns: first + 1..last + 1 },
        Band { rows: low..high, columns: middle },
        Band { rows: high..chunk, columns: first..last },
    ]
    .into_iter()
    .filter(|band| !band.rows.is_empty() && !band.columns.is_empty())
    .collect()
}

/// Picks the path of a band. `readable(column)` for data and parity columns `0..k+m`; `parities` counts the
/// parity columns that will be written.
#[must_use]
pub(super) fn path(
    map: &Map,
    band: &Band,
    readable: impl Fn(usize) -> bool,
    parities: &[usize],
) -> ParityPath {
    let modified = &band.columns;
    if parities.is_empty() || modified.len() == map.k {
        return ParityPath::Direct;
    }
    let modify = modified.clone().all(&readable) && parities.iter().all(|&p| readable(p));
    let reconstruct = (0..map.k).filter(|c| !modified.contains(c)).all(&readable);
    let modify_cost = modified.len() + parities.len();
    let reconstruct_cost = map.k - modified.len();
    if reconstruct && (!modify || reconstruct_cost <= modify_cost) {
        return ParityPath::ReconstructWrite;
    }
    if modify {
        return ParityPath::ReadModifyWrite;
    }
    let sources: Vec<usize> = (0..map.width()).filter(|&c| readable(c)).take(map.k).collect();
    if sources.len() == map.k { ParityPath::DecodeWrite(sources) } else { ParityPath::Impossible }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAP: Map = Map { k: 4, m: 2, chunk: 65536, slots: 100, ahead: 0 };

    proptest! {
        #[test]
        fn bands_cover_exactly_the_written_bytes(a in 0usize..4 * 65536, b in 0usize..=4 * 65536) {
            prop_assume!(a != b);
            let (start, end) = (a.min(b), a.max(b));
            let bands = bands(&MAP, start, end - start);
            prop_assert!(bands.len() <= 3);
            let covered = |column: usize, row: usize| {
                bands.iter().filter(|band| band.rows.contains(&row) && band.columns.contains(&column)).count()
            };
            let written = |column: usize, row: usize| (start..end).contains(&(column * MAP.chunk + row));
            let mut edges: Vec<usize> = vec![0, 1, 65535];
            for edge in [start % MAP.chunk, end % MAP.chunk] {
                edges.extend([edge.saturating_sub(1), edge, (edge + 1).min(65535)]);
            }
            for row in edges {
                for column in 0..MAP.k {
                    prop_assert_eq!(covered(column, row), usize::from(written(column, row)), "{} {}", column, row);
                }
            }
            prop_assert!(bands.windows(2).all(|pair| pair[0].rows.end <= pair[1].rows.start));
        }
    }

    #[test]
    fn a_small_write_reads_the_fewer_columns() {
        let wide = Map { k: 10, ..MAP };
        let band = |columns: Range<usize>| Band { rows: 0..4096, columns };
        assert_eq!(path(&wide, &band(3..4), |_| true, &[10, 11]), ParityPath::ReadModifyWrite);
        assert_eq!(path(&wide, &band(0..8), |_| true, &[10, 11]), ParityPath::ReconstructWrite);
        assert_eq!(path(&wide, &band(0..10), |_| true, &[10, 11]), ParityPath::Direct);
        assert_eq!(path(&wide, &band(0..1), |_| true, &[]), ParityPath::Direct);
    }

    #[test]
    fn missing_columns_change_the_way() {
        let band = Band { rows: 0..4096, columns: 1..2 };
        let without = |gone: &'static [usize]| move |c: usize| !gone.contains(&c);
        assert_eq!(path(&MAP, &band, without(&[1]), &[4, 5]), ParityPath::ReconstructWrite);
        assert_eq!(path(&MAP, &band, without(&[2]), &[4, 5]), ParityPath::ReadModifyWrite);
        assert_eq!(path(&MAP, &band, without(&[1, 2]), &[4, 5]), ParityPath::DecodeWrite(vec![0, 3, 4, 5]));
        assert_eq!(path(&MAP, &band, without(&[1, 2, 3]), &[4, 5]), ParityPath::Impossible);
    }
}
