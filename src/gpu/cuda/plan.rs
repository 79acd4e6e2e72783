//! Turns the ranges of a batch into copies: checks them, orders them by column, joins ranges that
//! are neighbours on both sides, and cuts them where a kernel wants them short. Pure. Must not call
//! the driver.

use crate::device::{DeviceError, HostRange, Work};

/// Ranges and columns are multiples of this, in bytes.
const GRAIN: usize = 4096;

/// Most columns of a batch, inputs and outputs together: those of a code, old and new ones, and as
/// many again.
const COLUMNS_MAX: usize = 1024;

/// A copy between host memory and a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Offset of the first byte in the slot.
    pub offset: usize,
    /// Address in host memory.
    pub host: usize,
    /// How many.
    pub bytes: usize,
    /// The region of memory known to the driver that it lies in; None: in none.
    pub region: Option<usize>,
}

/// An entry of the list that the gather and scatter kernels read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Where from, as the device sees it.
    pub source: u64,
    /// Where to, as the device sees it.
    pub target: u64,
    /// How many, a multiple of 16.
    pub bytes: u64,
}

/// Bytes of an entry.
pub(super) const ENTRY_BYTES: usize = 24;

impl Entry {
    /// As the kernels read it.
    #[must_use]
    pub(super) fn to_bytes(self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..8].copy_from_slice(&self.source.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.target.to_le_bytes());
        bytes[16..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }
}

/// The ranges of a batch, in the order of its columns.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ranges {
    /// Into the slot; together all of its input columns.
    pub inputs: Vec<Run>,
    /// Out of the slot.
    pub outputs: Vec<Run>,
}

/// The ranges of `work` for a slot of `slot_bytes`, in which the input columns and then the output
/// columns follow one another.
///
/// # Errors
/// `Unsupported` unless the batch is as [`Work`] describes and fits.
pub(super) fn ranges(work: &Work, slot_bytes: usize) -> Result<Ranges, DeviceError> {
    let refuse = |why| Err(DeviceError::Unsupported(why));
    let (inputs, outputs) = (work.columns, work.output_columns());
    if inputs == 0 || work.column_bytes == 0 || !work.column_bytes.is_multiple_of(GRAIN) {
        return refuse("columns that are empty or not whole blocks");
    }
    if inputs + outputs > COLUMNS_MAX {
        return refuse("too many columns");
    }
    if (inputs + outputs).checked_mul(work.column_bytes).is_none_or(|bytes| bytes > slot_bytes) {
        return refuse("more bytes than a slot holds");
    }
    match &work.transform {
        None if !work.hash => return refuse("nothing to compute"),
        None if !work.outputs.is_empty() => return refuse("outputs without a transform"),
        Some(transform) if transform.inputs() > inputs => {
            return refuse("fewer columns than the transform has");
        }
        _ => {}
    }
    let inputs_bytes = inputs * work.column_bytes;
    let Some(into) = ordered(&work.inputs, inputs, work.column_bytes, 0) else {
        return refuse("input pieces outside their columns, or over one another");
    };
    if into.iter().map(|run| run.bytes).sum::<usize>() != inputs_bytes {
        return refuse("input pieces that leave out some of the columns");
    }
    let Some(out) = ordered(&work.outputs, outputs, work.column_bytes, inputs_bytes) else {
        return refuse("output pieces outside their columns, or over one another");
    };
    Ok(Ranges { inputs: into, outputs: out })
}

/// Ranges by their place in the slot; None when one lies outside or two overlap there.
fn ordered(ranges: &[HostRange], columns: usize, column_bytes: usize, base: usize) -> Option<Vec<Run>> {
    let mut runs = Vec::with_capacity(ranges.len());
    for range in ranges {
        let inside = range.column < columns
            && range.bytes > 0
            && range.bytes.is_multiple_of(GRAIN)
            && range.offset.is_multiple_of(GRAIN)
            && range.offset.checked_add(range.bytes).is_some_and(|end| end <= column_bytes);
        if !inside {
            return None;
        }
        let offset = base + range.column * column_bytes + range.offset;
        let host = range.start.as_ptr().expose_provenance();
        runs.push(Run { offset, host, bytes: range.bytes, region: None });
    }
    runs.sort_unstable_by_key(|run| run.offset);
    runs.windows(2).all(|pair| pair[0].offset + pair[0].bytes <= pair[1].offset).then_some(runs)
}

/// Joins runs that follow one another both in the slot and in one region of host memory.
#[must_use]
pub(super) fn joined(runs: &[Run]) -> Vec<Run> {
    let mut joined: Vec<Run> = Vec::with_capacity(runs.len());
    for &run in runs {
        match joined.last_mut() {
            Some(last)
                if last.offset + last.bytes == run.offset
                    && last.host + last.bytes == run.host
                    && last.region == run.region =>
            {
                last.bytes += run.bytes;
            }
            _ => joined.push(run),
        }
    }
    joined
}

/// Whether these runs are long enough, on average, for the copy engine.
#[must_use]
pub(super) fn is_long(runs: &[Run], least_average: usize) -> bool {
    !runs.is_empty() && runs.iter().map(|run| run.bytes).sum::<usize>() / runs.len() >= least_average
}

/// Which way a list copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Host to slot.
    In,
    /// Slot to host.
    Out,
}

/// Appends entries for runs, none longer than `longest` bytes; `place` says where the device sees a
/// run's first byte. Returns how many entries that are.
pub(super) fn push_entries(
    runs: &[Run],
    way: Way,
    slot: u64,
    longest: usize,
    place: impl Fn(&Run) -> u64,
    list: &mut Vec<u8>,
) -> usize {
    let mut count = 0;
    for run in runs {
        for at in (0..run.bytes).step_by(longest) {
            let bytes = longest.min(run.bytes - at) as u64;
            let (host, slot) = (place(run) + at as u64, slot + (run.offset + at) as u64);
            let (source, target) = if way == Way::In { (host, slot) } else { (slot, host) };
            list.extend(Entry { source, target, bytes }.to_bytes());
            count += 1;
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use super::*;
    use calpe_core::codec::Codec;

    fn range(column: usize, offset: usize, address: usize, bytes: usize) -> HostRange {
        let start = NonNull::new(std::ptr::without_provenance_mut(address)).expect("an address");
        HostRange { column, offset, start, bytes }
    }

    fn work(columns: usize, column_bytes: usize, inputs: Vec<HostRange>) -> Work {
        Work { transform: None, hash: true, columns, column_bytes, inputs, outputs: Vec::new() }
    }

    fn run(offset: usize, host: usize, bytes: usize) -> Run {
        Run { offset, host, bytes, region: None }
    }

    const SLOT: usize = 1 << 20;

    #[test]
    fn neighbours_in_two_regions_are_not_joined() {
        let runs = [run(0, 0x1000, 4096), Run { region: Some(1), ..run(4096, 0x2000, 4096) }];
        assert_eq!(joined(&runs), runs);
    }

    #[test]
    fn pieces_come_in_the_order_of_the_columns_and_neighbours_are_joined() {
        // Column 1 follows column 0 in host memory too; its halves are given backwards.
        let given = vec![
            range(1, 4096, 0x10_3000, 4096),
            range(0, 0, 0x10_0000, 8192),
            range(1, 0, 0x10_2000, 4096),
            range(2, 0, 0x90_0000, 8192),
        ];
        let ranges = ranges(&work(3, 8192, given), SLOT).expect("a batch");
        assert_eq!(ranges.inputs.len(), 4);
        let joined = joined(&ranges.inputs);
        assert_eq!(joined, [run(0, 0x10_0000, 16384), run(16384, 0x90_0000, 8192)]);
        assert!(is_long(&joined, 12288) && !is_long(&joined, 12289) && !is_long(&[], 0));
    }

    #[test]
    fn lists_are_cut_and_keep_every_byte() {
        let runs = [run(4096, 0x1000, 20480), run(0, 0x9000, 4096)];
        let mut list = Vec::new();
        let count = push_entries(&runs, Way::Out, 1 << 40, 8192, |run| run.host as u64 + 5, &mut list);
        assert_eq!((count, list.len()), (4, 4 * ENTRY_BYTES));
        let word = |entry: usize, at: usize| {
            let start = entry * ENTRY_BYTES + at * 8;
            u64::from_le_bytes(list[start..start + 8].try_into().expect("eight bytes"))
        };
        assert_eq!(
            (word(2, 0), word(2, 1), word(2, 2)),
            ((1 << 40) + 4096 + 16384, 0x1000 + 16384 + 5, 4096)
        );
        assert_eq!((word(3, 0), word(3, 1), word(3, 2)), (1 << 40, 0x9005, 4096));
    }

    #[test]
    fn batches_that_are_not_as_described_are_refused() {
        let whole = |column| range(column, 0, 0x1000, 8192);
        let refused = |work: &Work| matches!(ranges(work, SLOT), Err(DeviceError::Unsupported(_)));
        assert!(!refused(&work(2, 8192, vec![whole(0), whole(1)])));
        assert!(refused(&work(2, 8192, vec![whole(0)])), "a column is missing");
        assert!(refused(&work(2, 8192, vec![whole(0), whole(1), whole(1)])), "one is there twice");
        assert!(refused(&work(2, 8192, vec![whole(0), whole(2)])), "no such column");
        assert!(refused(&work(1, 8192, vec![range(0, 4096, 0x1000, 8192)])), "past the end");
        assert!(refused(&work(1, 8192, vec![range(0, 0, 0x1000, 8191)])), "half a block");
        assert!(refused(&work(1, 2 * SLOT, vec![range(0, 0, 0x1000, 2 * SLOT)])), "larger than a slot");
        assert!(refused(&work(0, 8192, Vec::new())), "no columns");
        let mut idle = work(1, 8192, vec![whole(0)]);
        idle.hash = false;
        assert!(refused(&idle), "nothing to do");
        idle.transform = Some(Codec::new(2, 1).expect("a geometry").encoding());
        assert!(refused(&idle), "fewer columns than the transform");
    }
}
