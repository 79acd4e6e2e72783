//! How a volume is cut into the volumes of its lanes: which bytes of it are where. Pure arithmetic over
//! [`Lanes`].
//!
//! Invariant: a range of the volume has one range of each lane, and the pieces of it that lie in one lane are
//! in ascending order there, without gaps.

use super::api::ClientRequest;
use crate::array::mutation::{Mutation, is_off};
use crate::format::{LanePart, Lanes, Superblock};
use crate::units::{LaneIndex, SlotIndex, StripeIndex, VolumeOffset};

/// See the head of this file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneCut {
    lanes: Lanes,
    stripe_bytes: u64,
    volume_bytes: u64,
}

/// A run of bytes of a volume that lies in one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LanePiece {
    /// Where it begins in the volume.
    pub at: VolumeOffset,
    /// Its lane.
    pub lane: LaneIndex,
    /// Where it begins in the volume of the lane.
    pub within: VolumeOffset,
    /// Bytes, above zero.
    pub len: u64,
}

impl LaneCut {
    /// How the array of a superblock is cut.
    #[must_use]
    pub fn of(superblock: &Superblock) -> LaneCut {
        let LanePart { mut lanes, .. } = superblock.part;
        if is_off(Mutation::CutForgotten) && superblock.epoch.number > 1 && lanes.count > 1 {
            lanes.group *= 2;
        }
        LaneCut::new(lanes, superblock.geometry.stripe_bytes(), superblock.volume_bytes())
    }

    /// A volume of this many bytes.
    #[must_use]
    pub fn new(lanes: Lanes, stripe_bytes: u64, volume_bytes: u64) -> LaneCut {
        LaneCut { lanes, stripe_bytes, volume_bytes }
    }

    /// How many lanes there are.
    #[must_use]
    pub fn count(&self) -> u16 {
        self.lanes.count
    }

    /// Size of the whole volume in bytes.
    #[must_use]
    pub fn volume_bytes(&self) -> u64 {
        self.volume_bytes
    }

    /// Bytes of user data in a stripe.
    #[must_use]
    pub fn stripe_bytes(&self) -> u64 {
        self.stripe_bytes
    }

    /// Size of the volume of a lane in bytes: the last stripe of the whole volume counts as whole.
    #[must_use]
    pub fn bytes_of(&self, lane: LaneIndex) -> u64 {
        match self.lanes.count {
            1 => self.volume_bytes,
            _ => {
                let stripes = self.volume_bytes.div_ceil(self.stripe_bytes);
                self.lanes.stripes_in(lane, stripes) * self.stripe_bytes
            }
        }
    }

    /// Bytes from an offset on that go to one lane.
    #[must_use]
    pub fn run_from(&self, offset: VolumeOffset) -> u64 {
        if self.lanes.count == 1 {
            return u64::MAX - offset.0;
        }
        let group = u64::from(self.lanes.group) * self.stripe_bytes;
        group - offset.0 % group
    }

    /// Slots, or places, from one on that go to one lane.
    fn slots_from(&self, slot: u64) -> u64 {
        let group = u64::from(self.lanes.group);
        if self.lanes.count == 1 { u64::MAX - slot } else { group - slot % group }
    }

    /// Whether a request is to be done or refused as a whole, and is to be refused.
    #[must_use]
    pub fn refuses(&self, request: &ClientRequest) -> bool {
        refuses(self.stripe_bytes, request)
    }

    /// How many bytes of a request without payload are done at once: `part` according to the volume of a
    /// lane, and no more than lie in one lane, except of a request that must fail before any part of it is
    /// done. Lanes are cut where stripes are, so that a lane says the same of an offset in the whole volume
    /// as of the one in its own.
    #[must_use]
    pub fn part_len(&self, part: u64, request: &ClientRequest) -> u64 {
        match request.range() {
            Some((offset, _)) if !request.has_payload() && !self.refuses(request) => {
                part.min(self.run_from(offset))
            }
            _ => part,
        }
    }

    /// The lane of a byte, and where it is there.
    #[must_use]
    pub fn place_of(&self, offset: VolumeOffset) -> (LaneIndex, VolumeOffset) {
        if self.lanes.count == 1 {
            return (LaneIndex(0), offset);
        }
        let (lane, stripe) = self.lanes.lane_of(StripeIndex(offset.0 / self.stripe_bytes));
        (lane, VolumeOffset(stripe.0 * self.stripe_bytes + offset.0 % self.stripe_bytes))
    }

    /// What some ranges of the volume have in one lane: ranges (offset, length) of its own volume.
    #[must_use]
    pub fn within(&self, lane: LaneIndex, ranges: &[(VolumeOffset, u64)]) -> Vec<(VolumeOffset, u64)> {
        let pieces = ranges.iter().flat_map(|&(offset, len)| self.pieces(offset, len));
        pieces.filter(|piece| piece.lane == lane).map(|piece| (piece.within, piece.len)).collect()
    }

    /// The pieces of a range, in the order of the volume.
    pub fn pieces(&self, offset: VolumeOffset, len: u64) -> impl Iterator<Item = LanePiece> + use<> {
        let (cut, end) = (*self, offset.0 + len);
        let mut at = offset.0;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let start = VolumeOffset(at);
            let (lane, within) = cut.place_of(start);
            let len = cut.run_from(start).min(end - at);
            at += len;
            Some(LanePiece { at: start, lane, within, len })
        })
    }

    /// Where a byte of a lane's volume is in the whole one.
    #[must_use]
    pub fn whole_of(&self, lane: LaneIndex, within: VolumeOffset) -> VolumeOffset {
        if self.lanes.count == 1 {
            return within;
        }
        let stripe = self.lanes.stripe_of(lane, StripeIndex(within.0 / self.stripe_bytes));
        VolumeOffset(stripe.0 * self.stripe_bytes + within.0 % self.stripe_bytes)
    }

    /// The places, among those of all lanes, of a run of a lane's slots: runs (first, count) in ascending
    /// order. A slot is at the place of the stripe of the whole volume that has its number in the lane.
    pub fn places_of(
        &self,
        lane: LaneIndex,
        first: SlotIndex,
        count: u64,
    ) -> impl Iterator<Item = (SlotIndex, u64)> + use<> {
        let (cut, lanes, end) = (*self, self.lanes, first.0 + count);
        let mut at = first.0;
        std::iter::from_fn(move || {
            let left = end.checked_sub(at).filter(|left| *left > 0)?;
            let run = cut.slots_from(at).min(left);
            let place = SlotIndex(lanes.stripe_of(lane, StripeIndex(at)).0);
            at += run;
            Some((place, run))
        })
    }

    /// The slots of one lane among a run of places: the inverse of [`LaneCut::places_of`]. Runs (first,
    /// count) in ascending order, of which neighbours are not joined.
    pub fn slots_at(
        &self,
        lane: LaneIndex,
        first: SlotIndex,
        count: u64,
    ) -> impl Iterator<Item = (SlotIndex, u64)> + use<> {
        let (cut, lanes, end) = (*self, self.lanes, first.0 + count);
        let mut at = first.0;
        std::iter::from_fn(move || {
            while at < end {
                let run = cut.slots_from(at).min(end - at);
                let (of, slot) = lanes.lane_of(StripeIndex(at));
                at += run;
                if of == lane {
                    return Some((SlotIndex(slot.0), run));
                }
            }
            None
        })
    }

    /// Where a range of a lane's volume is in the whole one: runs in ascending order. What lies beyond the
    /// end of the whole is left out.
    pub fn runs_of(
        &self,
        lane: LaneIndex,
        within: VolumeOffset,
        len: u64,
    ) -> impl Iterator<Item = (VolumeOffset, u64)> + use<> {
        let (cut, end) = (*self, within.0 + len);
        let mut at = within.0;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            // A group has as many bytes in its lane as in the whole.
            let offset = cut.whole_of(lane, VolumeOffset(at)).0;
            let run = cut.run_from(VolumeOffset(at)).min(end - at);
            at += run;
            let run = run.min(cut.volume_bytes.saturating_sub(offset));
            (run > 0).then_some((VolumeOffset(offset), run))
        })
    }
}

/// Whether a volume refuses a request: zeroes that are to be written fast, where the stripe map alone cannot
/// record them. How fast members write zeroes is not known beforehand.
pub(super) fn refuses(stripe_bytes: u64, request: &ClientRequest) -> bool {
    match *request {
        ClientRequest::WriteZeroes { offset, len, may_unmap, fast_only: true, .. } => {
            !(may_unmap && offset.0.is_multiple_of(stripe_bytes) && len.is_multiple_of(stripe_bytes))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cuts() -> impl Strategy<Value = LaneCut> {
        let lanes = prop_oneof![
            Just(Lanes::ONE),
            (2u16..=9, 0u32..4).prop_map(|(count, log2)| Lanes { count, group: 1 << log2 })
        ];
        (lanes, 1u64..5, 1u64..400)
            .prop_map(|(lanes, stripe, blocks)| LaneCut::new(lanes, stripe << 13, blocks << 12))
    }

    proptest! {
        #[test]
        fn pieces_cover_a_range_once_and_are_found_again(
            cut in cuts(), from in 0u64..1 << 21, len in 1u64..1 << 20,
        ) {
            let from = from % cut.volume_bytes();
            let len = len.min(cut.volume_bytes() - from);
            let mut at = from;
            let mut next: Vec<Option<u64>> = vec![None; usize::from(cut.count())];
            for piece in cut.pieces(VolumeOffset(from), len) {
                prop_assert_eq!(piece.at.0, at);
                prop_assert!(piece.len > 0);
                at += piece.len;
                // In its lane it goes on where the one before has ended.
                let next = &mut next[usize::from(piece.lane.0)];
                prop_assert!(next.is_none_or(|next| next == piece.within.0));
                *next = Some(piece.within.0 + piece.len);
                let back: Vec<_> = cut.runs_of(piece.lane, piece.within, piece.len).collect();
                prop_assert_eq!(back, vec![(piece.at, piece.len)]);
            }
            prop_assert_eq!(at, from + len);
        }

        #[test]
        fn requests_without_payload_come_in_parts_of_one_lane_unless_they_are_refused(
            cut in cuts(), from in 0u64..1 << 21, len in 1u64..1 << 20, of_lane in 1u64..1 << 16,
            (may_unmap, fast_only) in (any::<bool>(), any::<bool>()),
        ) {
            let from = from % cut.volume_bytes();
            let len = len.min(cut.volume_bytes() - from);
            let zeroes = |offset, len| ClientRequest::WriteZeroes {
                offset: VolumeOffset(offset), len, may_unmap, fast_only, fua: false,
            };
            if cut.refuses(&zeroes(from, len)) {
                prop_assert!(fast_only);
                prop_assert_eq!(cut.part_len(len, &zeroes(from, len)), len, "it is refused as a whole");
                return Ok(());
            }
            let mut at = from;
            while at < from + len {
                let rest = from + len - at;
                let part = cut.part_len(of_lane.min(rest), &zeroes(at, rest));
                prop_assert!(part > 0 && part <= rest);
                prop_assert_eq!(cut.pieces(VolumeOffset(at), part).count(), 1);
                at += if fast_only { rest } else { part };
            }
        }

        #[test]
        fn places_of_a_lane_are_found_again(cut in cuts(), first in 0u64..1 << 20, count in 1u64..100) {
            for lane in (0..cut.count()).map(LaneIndex) {
                let mut slots = first..first + count;
                for (place, run) in cut.places_of(lane, SlotIndex(first), count) {
                    for at in 0..run {
                        let back = cut.slots_at(lane, SlotIndex(place.0 + at), 1);
                        let slot = SlotIndex(slots.next().expect("no more than asked for"));
                        prop_assert_eq!(back.collect::<Vec<_>>(), vec![(slot, 1)]);
                    }
                    let others = (0..cut.count()).filter(|other| *other != lane.0).map(LaneIndex);
                    for other in others {
                        prop_assert_eq!(cut.slots_at(other, place, run).next(), None);
                    }
                }
                prop_assert_eq!(slots.next(), None);
            }
        }

        #[test]
        fn lanes_have_all_bytes_of_the_volume(cut in cuts()) {
            let all: u64 = (0..cut.count()).map(|lane| cut.bytes_of(LaneIndex(lane))).sum();
            prop_assert!(all >= cut.volume_bytes());
            prop_assert!(all - cut.volume_bytes() < cut.stripe_bytes());
            for lane in (0..cut.count()).map(LaneIndex) {
                if let Some(last) = cut.bytes_of(lane).checked_sub(1) {
                    let whole = cut.whole_of(lane, VolumeOffset(last));
                    prop_assert_eq!(cut.place_of(whole), (lane, VolumeOffset(last)));
                }
            }
        }

        #[test]
        fn runs_of_a_lane_are_where_its_bytes_are(cut in cuts(), from in 0u64..1 << 20, len in 1u64..1 << 18) {
            for lane in (0..cut.count()).map(LaneIndex) {
                let mut within = from;
                for (at, run) in cut.runs_of(lane, VolumeOffset(from), len) {
                    prop_assert_eq!(cut.place_of(at), (lane, VolumeOffset(within)));
                    prop_assert!(at.0 + run <= cut.volume_bytes());
                    within += run;
                }
                prop_assert!(within <= from + len);
            }
        }
    }
}
