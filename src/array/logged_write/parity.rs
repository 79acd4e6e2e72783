//! New parity of a band of rows, from new bytes and whichever old ones were fetched. Pure.

use super::super::plan::{Band, ParityPath};
use crate::block_io::{Buf, BufMut};
use crate::codec;

/// Computes the parities of one band into `targets` (parity row, bytes); `olds` are the columns that were fetched.
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
    // A column neither new nor fetched was never written.
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
