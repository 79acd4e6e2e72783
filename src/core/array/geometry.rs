//! Where things are: columns to members, slots to device offsets, byte ranges of a stripe to column ranges.
//! Pure arithmetic. Must not know of states or I/O.

use crate::format::Geometry;
use crate::units::{ByteOffset, ColumnIndex, MemberIndex, SlotIndex};
use std::ops::Range;

/// The parts of a geometry that address computations need.
#[derive(Clone, Copy, Debug)]
pub struct Map {
    /// Data columns.
    pub k: usize,
    /// Parity columns.
    pub m: usize,
    /// Bytes of a chunk.
    pub chunk: usize,
    /// Slots of the data region.
    pub slots: u64,
    /// Slots that the rotation of members is ahead by.
    pub ahead: u64,
}

/// A byte range within the chunk of one column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnRange {
    /// Which column.
    pub column: ColumnIndex,
    /// Bytes within the chunk.
    pub range: Range<usize>,
}

impl Map {
    /// The map of a geometry.
    #[must_use]
    pub fn new(geometry: &Geometry) -> Map {
        Map {
            k: usize::from(geometry.data),
            m: usize::from(geometry.parity),
            chunk: geometry.chunk as usize,
            slots: geometry.slots,
            ahead: u64::from(geometry.ahead),
        }
    }

    /// Members of the array: k + m.
    #[must_use]
    pub fn width(&self) -> usize {
        self.k + self.m
    }

    /// Bytes of user data in a stripe.
    #[must_use]
    pub fn stripe_bytes(&self) -> usize {
        self.k * self.chunk
    }

    /// The member that holds `column` of `slot`. Data chunks of consecutive slots go round all members in
    /// turn (left-symmetric rotation for any k and m), so long reads use every member and parity is spread
    /// evenly.
    #[must_use]
    pub fn member_of(&self, slot: SlotIndex, column: ColumnIndex) -> MemberIndex {
        let n = self.width() as u64;
        let start = (slot.0 % n + self.ahead) * (self.k as u64) % n;
        MemberIndex(((start + u64::from(column.0)) % n) as u16)
    }

    /// The column of `slot` that `member` holds: the inverse of [`Map::member_of`].
    #[must_use]
    pub fn column_of(&self, slot: SlotIndex, member: MemberIndex) -> ColumnIndex {
        let n = self.width() as u64;
        let start = (slot.0 % n + self.ahead) * (self.k as u64) % n;
        ColumnIndex(((u64::from(member.0) + n - start) % n) as u16)
    }

    /// Device offset of byte `within` of the chunk of `slot`, on a device whose data region starts at
    /// `data_offset`.
    #[must_use]
    pub fn device_offset(&self, data_offset: ByteOffset, slot: SlotIndex, within: usize) -> ByteOffset {
        debug_assert!(slot.0 < self.slots && within <= self.chunk);
        data_offset.plus(slot.0 * self.chunk as u64 + within as u64)
    }

    /// Cuts `len` bytes at `offset` of a stripe's user data into ranges of single columns, in order.
    pub fn columns(&self, offset: usize, len: usize) -> impl Iterator<Item = ColumnRange> + use<> {
        debug_assert!(offset + len <= self.stripe_bytes());
        let (chunk, end) = (self.chunk, offset + len);
        let mut at = offset;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let column = at / chunk;
            let start = at % chunk;
            let stop = chunk.min(start + (end - at));
            at += stop - start;
            Some(ColumnRange { column: ColumnIndex(column as u16), range: start..stop })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{LanePart, Lanes};
    use crate::units::StripeIndex;
    use proptest::prelude::*;

    fn map(k: usize, m: usize) -> Map {
        Map { k, m, chunk: 4096, slots: 1 << 20, ahead: 0 }
    }

    proptest! {
        #[test]
        fn columns_and_members_are_inverse_and_each_member_holds_one_column(
            k in 1usize..200, m in 0usize..55, slot in 0u64..1 << 20,
        ) {
            let map = map(k, m);
            let mut seen = vec![false; map.width()];
            for column in 0..map.width() as u16 {
                let member = map.member_of(SlotIndex(slot), ColumnIndex(column));
                prop_assert_eq!(map.column_of(SlotIndex(slot), member), ColumnIndex(column));
                prop_assert!(!std::mem::replace(&mut seen[usize::from(member.0)], true));
            }
        }

        #[test]
        fn column_ranges_cover_the_request_exactly(k in 1usize..20, a in 0usize..81920, b in 0usize..81920) {
            let map = map(k, 2);
            let (a, b) = (a % map.stripe_bytes(), b % (map.stripe_bytes() + 1));
            let (start, end) = (a.min(b), a.max(b));
            let mut at = start;
            for part in map.columns(start, end - start) {
                prop_assert_eq!(usize::from(part.column.0) * map.chunk + part.range.start, at);
                prop_assert!(!part.range.is_empty() && part.range.end <= map.chunk);
                at += part.range.len();
            }
            prop_assert_eq!(at, end);
        }
    }

    #[test]
    fn consecutive_data_chunks_go_round_all_members() {
        let map = map(4, 2);
        let order: Vec<u16> = (0..12)
            .map(|chunk| map.member_of(SlotIndex(chunk / 4), ColumnIndex((chunk % 4) as u16)).0)
            .collect();
        assert_eq!(order, [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn a_stream_over_lanes_loads_members_as_one_over_an_array_that_is_not_cut() {
        for (k, m) in [(4, 2), (8, 4), (5, 3)] {
            let whole = map(k, m);
            let (lanes, width) = (Lanes { count: 8, group: 4 }, whole.width() as u16);
            for stripe in 0..u64::from(lanes.count) * u64::from(lanes.group) {
                let (lane, slot) = lanes.lane_of(StripeIndex(stripe));
                let ahead = u64::from(LanePart { lane, lanes, ..LanePart::WHOLE }.ahead(width));
                let of_lane = Map { ahead, ..whole };
                for column in (0..width).map(ColumnIndex) {
                    let member = of_lane.member_of(SlotIndex(slot.0), column);
                    assert_eq!(
                        member,
                        whole.member_of(SlotIndex(stripe), column),
                        "{k}+{m}, stripe {stripe}"
                    );
                    assert_eq!(of_lane.column_of(SlotIndex(slot.0), member), column);
                }
            }
        }
    }

    #[test]
    fn parity_is_spread_evenly_over_members() {
        for (k, m) in [(4, 2), (8, 4), (5, 3), (1, 1), (20, 10)] {
            let map = map(k, m);
            let mut parities = vec![0u32; map.width()];
            for slot in 0..map.width() as u64 * 4 {
                for column in k..k + m {
                    parities[usize::from(map.member_of(SlotIndex(slot), ColumnIndex(column as u16)).0)] += 1;
                }
            }
            assert!(parities.iter().all(|&count| count == 4 * m as u32), "{k}+{m}: {parities:?}");
        }
    }
}
