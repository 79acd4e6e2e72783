//! New parity of a band of rows, from its new bytes and the old ones that were fetched. Pure.

use crate::array::client::fetch::{Blend, Ingredient};
use crate::array::client::plan::{Band, ParityPath};
use crate::block_io::{Buf, BufMut};
use crate::codec;

/// Computes the parities of one band into `targets` (parity row, bytes); `olds` are the columns that were
/// fetched.
pub(super) fn of_band(
    codec: &codec::Codec,
    band: &Band,
    path: &ParityPath,
    olds: &mut [(usize, BufMut)],
    new_bytes: impl Fn(usize) -> Buf,
    targets: &mut [(usize, &mut [u8])],
) {
    let k = codec.data();
    if *path == ParityPath::ReadModifyWrite {
        for (column, old) in olds.iter().filter(|(column, _)| *column >= k) {
            if let Some(target) = targets.iter_mut().find(|(p, _)| p + k == *column) {
                target.1.copy_from_slice(old);
            }
        }
        for (column, old) in olds.iter_mut().filter(|(column, _)| *column < k) {
            codec::xor_into(old, &new_bytes(*column));
            codec.update(*column, old, targets);
        }
        return;
    }
    let news: Vec<Option<Buf>> = (0..k).map(|c| band.columns.contains(&c).then(|| new_bytes(c))).collect();
    // A column that is neither new nor fetched was never written.
    let zeroes = vec![0; band.rows.len()];
    let data: Vec<&[u8]> = (0..k)
        .map(|column| match (&news[column], olds.iter().find(|(c, _)| *c == column)) {
            (Some(new), _) => &new[..],
            (None, Some((_, old))) => &old[..],
            (None, None) => &zeroes,
        })
        .collect();
    codec.encode(&data, targets);
}

/// Columns that [`blend_of_band`] would take, if the band suits it. A band into an empty stripe, where the
/// other columns are zeroes, does not suit it: all of these would be hashed for nothing.
pub(super) fn blended_columns(
    codec: &codec::Codec,
    band: &Band,
    path: &ParityPath,
    first: bool,
) -> Option<usize> {
    let (k, m, new) = (codec.data(), codec.parity(), band.columns.len());
    match path {
        _ if m == 0 || (first && new < k) => None,
        ParityPath::ReadModifyWrite => Some(2 * new + m),
        _ => Some(k),
    }
}

/// The new parity of a band as a combination of the columns fetched for it, in the order they are wanted, and
/// of the new bytes.
pub(super) fn blend_of_band(
    codec: &codec::Codec,
    band: &Band,
    path: &ParityPath,
    new_bytes: impl Fn(usize) -> Buf,
) -> Blend {
    let (k, m) = (codec.data(), codec.parity());
    let known = |column: usize| Ingredient::Known(new_bytes(column));
    if *path == ParityPath::ReadModifyWrite {
        let columns: Vec<usize> = band.columns.clone().collect();
        let new = columns.len();
        let old = (0..new).map(Ingredient::Wanted);
        let parity = (new..new + m).map(Ingredient::Wanted);
        let inputs = old.chain(columns.iter().map(|&column| known(column))).chain(parity).collect();
        let transform = codec.updating(&columns).expect("a band has distinct data columns");
        return Blend { transform, inputs, keeps: true };
    }
    let mut wanted = 0..;
    let input = |column: usize| {
        if band.columns.contains(&column) {
            return known(column);
        }
        Ingredient::Wanted(wanted.next().expect("there is no end"))
    };
    let inputs = (0..k).map(input).collect();
    Blend { transform: codec.encoding(), inputs, keeps: true }
}
