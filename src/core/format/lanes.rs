//! How an array is cut into lanes: which stripes a lane has, and where it lies on a device. Pure arithmetic;
//! docs/on-disk-format.md, "Lanes".
//!
//! Within a lane stripes and slots are numbered from zero, as in an array that is not cut. Must not know what
//! a lane does.

use crate::units::{LaneIndex, StripeIndex};
use std::ops::Range;

/// Most lanes of an array: more than any machine has use for, each with a ring of 16 MiB on every member; and
/// as many as a superblock has room for.
pub const MAX_LANES: u16 = 32;
/// Most stripes at a time: with a larger group a stream of requests would stay in one lane for long.
pub const MAX_GROUP: u32 = 1 << 16;

/// Bytes of user data that go to one lane at a time: requests of up to 1 MiB mostly stay in one lane, and a
/// stream with a few MiB under way keeps several lanes busy.
const GROUP_BYTES: u64 = 1 << 20;

/// How the stripes of an array are dealt out: stripe `s` is in lane `s / group % count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Lanes {
    /// Number of lanes.
    pub count: u16,
    /// Stripes that go to a lane at a time: a power of two, 1 with one lane.
    pub group: u32,
}

impl Lanes {
    /// An array that is not cut.
    pub const ONE: Lanes = Lanes { count: 1, group: 1 };

    /// As many lanes for an array with stripes of this many bytes of user data.
    #[must_use]
    pub fn of(count: u16, stripe_bytes: u64) -> Lanes {
        if count <= 1 {
            return Lanes::ONE;
        }
        let group = (GROUP_BYTES / stripe_bytes.max(1)).max(1);
        Lanes { count, group: (1 << group.ilog2()).min(MAX_GROUP) }
    }

    /// All lanes.
    pub fn indices(self) -> impl Iterator<Item = LaneIndex> {
        (0..self.count).map(LaneIndex)
    }

    /// Stripes that go to all lanes in one turn.
    pub(super) fn turn(self) -> u64 {
        u64::from(self.count) * u64::from(self.group)
    }

    /// The lane of a stripe of the volume, and the stripe's number in it.
    #[must_use]
    pub fn lane_of(self, stripe: StripeIndex) -> (LaneIndex, StripeIndex) {
        let group = u64::from(self.group);
        let (turn, in_turn) = (stripe.0 / self.turn(), stripe.0 % self.turn());
        (LaneIndex((in_turn / group) as u16), StripeIndex(turn * group + in_turn % group))
    }

    /// The number in the volume of stripe `stripe` of a lane: the inverse of [`Lanes::lane_of`].
    #[must_use]
    pub fn stripe_of(self, lane: LaneIndex, stripe: StripeIndex) -> StripeIndex {
        let group = u64::from(self.group);
        let in_turn = u64::from(lane.0) * group + stripe.0 % group;
        StripeIndex(stripe.0 / group * self.turn() + in_turn)
    }

    /// How many of the first `stripes` stripes of the volume are in a lane.
    #[must_use]
    pub fn stripes_in(self, lane: LaneIndex, stripes: u64) -> u64 {
        let group = u64::from(self.group);
        let rest = stripes % self.turn();
        stripes / self.turn() * group + rest.saturating_sub(u64::from(lane.0) * group).min(group)
    }
}

/// The part of an array that a superblock is about. Each lane has superblocks, log, pages and data of its
/// own, in a window of every device, as if that were the device of an array that is not cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct LanePart {
    /// Which lane.
    pub lane: LaneIndex,
    /// How the stripes of the whole are dealt out.
    pub lanes: Lanes,
    /// Bytes of a device that each lane but the last one has: the last one has the rest. 0 with one lane.
    pub stride: u64,
    /// Size of the whole volume in bytes. 0 with one lane: then the geometry has it.
    pub volume_bytes: u64,
}

impl LanePart {
    /// All of an array that is not cut.
    pub const WHOLE: LanePart =
        LanePart { lane: LaneIndex(0), lanes: Lanes::ONE, stride: 0, volume_bytes: 0 };

    /// Whether there are other lanes.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.lanes.count > 1
    }

    /// Bytes that a lane has of the volume, in whole stripes of as many bytes of user data.
    #[must_use]
    pub fn share_bytes(&self, lane: LaneIndex, stripe_bytes: u64) -> u64 {
        self.lanes.stripes_in(lane, self.volume_bytes.div_ceil(stripe_bytes)) * stripe_bytes
    }

    /// Slots that the rotation of members is ahead by in this lane: as many as slots of the lanes before it
    /// come first in the order of the volume. So a stream, which takes the lanes in turn, loads all members
    /// alike.
    #[must_use]
    pub fn ahead(&self, width: u16) -> u16 {
        (u64::from(self.lane.0) * u64::from(self.lanes.group) % u64::from(width.max(1))) as u16
    }

    /// The window of a lane on a device of this many bytes. Empty where the device is too small.
    #[must_use]
    pub fn window(&self, lane: LaneIndex, device_bytes: u64) -> Range<u64> {
        let start = (u64::from(lane.0) * self.stride).min(device_bytes);
        let is_last = lane.0 + 1 >= self.lanes.count;
        let end = if is_last { device_bytes } else { (start + self.stride).min(device_bytes) };
        start..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lanes() -> impl Strategy<Value = Lanes> {
        (2u16..=MAX_LANES, 0u32..=16).prop_map(|(count, log2)| Lanes { count, group: 1 << log2 })
    }

    proptest! {
        #[test]
        fn every_stripe_is_in_one_lane_and_found_there(lanes in lanes(), stripe in 0u64..1 << 50) {
            let stripe = StripeIndex(stripe);
            let (lane, within) = lanes.lane_of(stripe);
            prop_assert!(lane.0 < lanes.count);
            prop_assert_eq!(u64::from(lane.0), stripe.0 / u64::from(lanes.group) % u64::from(lanes.count));
            prop_assert_eq!(lanes.stripe_of(lane, within), stripe);
        }

        #[test]
        fn the_stripes_of_all_lanes_are_those_of_the_volume(lanes in lanes(), stripes in 0u64..1 << 50) {
            let all: u64 = lanes.indices().map(|lane| lanes.stripes_in(lane, stripes)).sum();
            prop_assert_eq!(all, stripes);
            // They are numbered without gaps: the last one of each lane is below the end.
            for lane in lanes.indices() {
                if let Some(last) = lanes.stripes_in(lane, stripes).checked_sub(1) {
                    prop_assert!(lanes.stripe_of(lane, StripeIndex(last)).0 < stripes);
                    prop_assert!(lanes.stripe_of(lane, StripeIndex(last + 1)).0 >= stripes);
                }
            }
        }
    }

    #[test]
    fn one_lane_changes_nothing() {
        let one = Lanes::ONE;
        for stripe in [0, 1, 77, 1 << 40] {
            assert_eq!(one.lane_of(StripeIndex(stripe)), (LaneIndex(0), StripeIndex(stripe)));
            assert_eq!(one.stripes_in(LaneIndex(0), stripe), stripe);
        }
    }

    #[test]
    fn a_group_holds_about_a_mebibyte() {
        let group = |stripe_bytes| Lanes::of(8, stripe_bytes).group;
        assert_eq!([256 << 10, 192 << 10, 1 << 20, 16 << 20, 4096].map(group), [4, 4, 1, 1, 256]);
        assert_eq!(Lanes::of(1, 4096), Lanes::ONE);
    }
}
