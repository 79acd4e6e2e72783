//! Replies to clients that are put together from parts.

use super::api::{ClientReply, ReadRun};
use crate::block_io::{BufMut, Pool};
use std::ops::Range;

/// A part of a read: its bytes, and the ranges of them that are zeroes and were not filled in.
pub(super) type Part = (BufMut, Vec<Range<usize>>);

/// Most runs of data in one reply: more of them cost more to send than the zeroes between them.
const SPARSE_RUNS_MAX: usize = 16;

/// The reply to a read: runs of data and of zeroes where the client accepts them and they pay, else one
/// buffer.
pub(super) fn read_reply(pool: &Pool, parts: Vec<Option<Part>>, sparse: bool) -> ClientReply {
    let mut parts: Vec<Part> = parts.into_iter().flatten().collect();
    if parts.iter().all(|(_, zeroes)| zeroes.is_empty()) {
        return ClientReply::Data(pool.join(parts.into_iter().map(|(buf, _)| buf)));
    }
    // Each run of zeroes ends at most one run of data.
    let runs: usize = parts.iter().map(|(_, zeroes)| zeroes.len() + 1).sum();
    if !sparse || runs > SPARSE_RUNS_MAX && data_runs(&parts) > SPARSE_RUNS_MAX {
        for (buf, zeroes) in &mut parts {
            zeroes.drain(..).for_each(|zeroes| buf[zeroes].fill(0));
        }
        return ClientReply::Data(pool.join(parts.into_iter().map(|(buf, _)| buf)));
    }
    let mut runs: Vec<ReadRun> = Vec::new();
    for (mut buf, zeroes) in parts {
        let mut at = 0;
        for zeroes in zeroes {
            let mut rest = buf.split_off(zeroes.start - at);
            ReadRun::Data(buf).push_to(&mut runs);
            ReadRun::Zeroes(zeroes.len() as u64).push_to(&mut runs);
            buf = rest.split_off(zeroes.len());
            at = zeroes.end;
        }
        ReadRun::Data(buf).push_to(&mut runs);
    }
    ClientReply::Sparse(runs)
}

/// Number of runs of data between the zeroes of a read. A run may extend over several parts.
fn data_runs(parts: &[Part]) -> usize {
    let (mut count, mut in_data) = (0, false);
    for (buf, zeroes) in parts {
        let mut at = 0;
        for range in zeroes {
            count += usize::from(range.start > at && !in_data);
            in_data = false;
            at = range.end;
        }
        let data = buf.len() > at;
        count += usize::from(data && !in_data);
        in_data |= data;
    }
    count
}

/// `len` bytes of the runs from `skip` on.
pub(super) fn clip<T: Copy>(runs: &[(u64, T)], skip: u64, len: u64) -> Vec<(u64, T)> {
    let mut start = 0;
    let mut clipped = Vec::new();
    for &(bytes, what) in runs {
        let end = start + bytes;
        let (low, high) = (start.max(skip), end.min(skip + len));
        if low < high {
            clipped.push((high - low, what));
        }
        start = end;
    }
    clipped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::Health;

    /// A part of a read, `bytes` long: sevens, with rubbish in the ranges that are reported as zeroes.
    fn part(buf: &mut BufMut, bytes: usize, zeroes: &[Range<usize>]) -> Part {
        let tail = buf.split_off(bytes);
        let mut part = std::mem::replace(buf, tail);
        part.fill(7);
        zeroes.iter().for_each(|zeroes| part[zeroes.clone()].fill(0xbb));
        (part, zeroes.to_vec())
    }

    /// Runs as (bytes, whether they are data).
    fn shape(reply: &ClientReply) -> Vec<(u64, bool)> {
        match reply {
            ClientReply::Data(buf) => vec![(buf.len() as u64, true)],
            ClientReply::Sparse(runs) => runs
                .iter()
                .map(|run| match run {
                    ReadRun::Zeroes(len) => (*len, false),
                    ReadRun::Data(buf) => {
                        assert!(buf.iter().all(|&byte| byte == 7), "only what was read is sent");
                        (buf.len() as u64, true)
                    }
                })
                .collect(),
            other => panic!("{other:?}"),
        }
    }

    /// A read of 64 KiB in parts of 16 KiB with these zeroes.
    fn reply(sparse: bool, zeroes: [&[Range<usize>]; 4]) -> ClientReply {
        let pool = Pool::new(1 << 20).expect("address space");
        let mut buf = pool.alloc(65536);
        let parts = zeroes.map(|zeroes| Some(part(&mut buf, 16384, zeroes))).into();
        read_reply(&pool, parts, sparse)
    }

    #[test]
    fn zeroes_of_neighbouring_parts_are_one_run_and_data_too() {
        let whole = || 0..16384usize;
        let none: &[Range<usize>] = &[];
        assert_eq!(shape(&reply(true, [none; 4])), [(65536, true)]);
        assert!(matches!(reply(true, [none; 4]), ClientReply::Data(_)));
        assert_eq!(shape(&reply(true, [&[whole()]; 4])), [(65536, false)]);
        assert_eq!(
            shape(&reply(true, [none, &[0..4096, 12288..16384], &[whole()], none])),
            [(16384, true), (4096, false), (8192, true), (20480, false), (16384, true)]
        );
    }

    #[test]
    fn a_reply_is_one_buffer_unless_sparse_is_asked_for_and_pays() {
        let some: &[Range<usize>] = &[0..4096, 8192..12288];
        let ClientReply::Data(bytes) = reply(false, [some; 4]) else { panic!("bytes") };
        for (at, block) in bytes.chunks(4096).enumerate() {
            assert!(block.iter().all(|&byte| byte == if at % 2 == 0 { 0 } else { 7 }), "block {at}");
        }
        let many: Vec<Range<usize>> = (0..16).map(|at| at * 1024 + 512..at * 1024 + 1024).collect();
        let ClientReply::Data(bytes) = reply(true, [&many, &[], &[], &[]]) else { panic!("bytes") };
        assert!(bytes[..16384].chunks(512).enumerate().all(|(at, block)| block[0] == 7 * (1 - at as u8 % 2)));
        let ClientReply::Sparse(_) = reply(true, [&many[..15], &[], &[], &[]]) else { panic!("15 + 1 runs") };
    }

    #[test]
    fn health_is_cut_to_what_was_asked_about() {
        let runs = [(100, Health::Clean), (50, Health::Lost), (850, Health::Degraded)];
        assert_eq!(clip(&runs, 0, 1000), runs);
        assert_eq!(clip(&runs, 100, 10), [(10, Health::Lost)]);
        assert_eq!(clip(&runs, 90, 100), [(10, Health::Clean), (50, Health::Lost), (40, Health::Degraded)]);
    }
}
