//! Where things lie on a member: pure arithmetic from the shape of an array and the size of its members.
//!
//! Head superblocks, a gap to 1 MiB, log, pages, data, tail superblocks at the very end; each region starts
//! on a 1 MiB boundary, so that partitions, erase blocks and RAID underneath stay aligned. Everything is
//! derived from the number of slots and grows with it, so "how many slots fit" is a search and
//! `member_bytes_for` its inverse. Of an array of several lanes each one has all of this in a window of the
//! member. docs/on-disk-format.md explains the sizes. Knows nothing of devices, and nothing of what the
//! regions hold.

use super::{
    COPY_BYTES, Geometry, LanePart, Lanes, MAX_CHUNK_BYTES, MAX_DEVICE_BYTES, MAX_LANES, MAX_MEMBERS,
    MIN_CHUNK_BYTES, PageLayout, Region, RegionKind, region_end,
};
use crate::units::{ByteOffset, Count, HumanSize, LaneIndex, ROW_BYTES};

const MIB: u64 = 1 << 20;

/// Boundary that every region starts on.
pub const REGION_ALIGN: u64 = MIB;
/// Start of the first region: behind the head superblocks, and where partition tools put a first partition.
pub const MIN_REGION_OFFSET: u64 = MIB;
/// Both slots of the superblock, at the end of the device.
const TAIL_BYTES: u64 = 2 * COPY_BYTES as u64;

/// The log ring takes this part of the data region: 1/64 costs 1.6 % of the space and holds, for a member
/// that is overwritten at random, enough to gather many writes to one row before they go in place.
const LOG_FRACTION: u64 = 64;
/// A smaller ring would be truncated, hence every metadata page written back, several times a second.
const LOG_MIN: u64 = 16 * MIB;
/// More log would only lengthen replay: at 200 MB/s this much is read in five seconds.
const LOG_MAX: u64 = 1 << 30;
/// On a small member of an array that is not cut the log takes no more than this part of the data region...
const LOG_SMALL_FRACTION: u64 = 4;
/// ...but never less than this: two batches of the largest payload, with their headers.
const LOG_SMALL_MIN: u64 = 4 * MIB;
/// ...nor less than this many chunks: a write of a whole column beside notes, a reserve and a skipped end.
const LOG_CHUNKS_MIN: u64 = 4;

/// Free slots for writes that go to fresh slots: one for this many stripes, so that the reserve costs no more
/// than the log. A slot that a write gave up is used again only after two more flush rounds, the one that
/// makes the record durable and the one of the note that says so; the reserve must hold all whole stripes
/// written meanwhile...
const RESERVE_FRACTION: u64 = 64;
/// ...at least a few, so that the smallest array can have some in flight in each round...
const RESERVE_MIN: u64 = 8;
/// ...and at most what fast devices write in a few rounds: 1 GiB of data with 4 data chunks of 64 KiB.
const RESERVE_MAX: u64 = 4096;

/// The part of a geometry that is known before the size of the members is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrayShape {
    /// Data chunks of a stripe, at least 1.
    pub data: u16,
    /// Parity chunks of a stripe; `data + parity <= 255`.
    pub parity: u16,
    /// Bytes of a chunk: a power of two from 4 KiB to 4 MiB.
    pub chunk: u32,
    /// Smallest unit of I/O in bytes, 512 or 4096: the largest sector of the members.
    pub sector: u32,
    /// Lanes that the stripes are dealt out to.
    pub lanes: u16,
}

/// Why there is no layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// No data chunks.
    #[error("an array needs at least one data chunk: --data 1 or more")]
    NoData,
    /// Too wide.
    #[error("{data} data and {parity} parity make {} members: at most {MAX_MEMBERS} are possible", u32::from(*.data) + u32::from(*.parity))]
    TooWide {
        /// Data chunks.
        data: u16,
        /// Parity chunks.
        parity: u16,
    },
    /// Chunk size out of range.
    #[error(
        "a chunk of {} is not possible: use a power of two from {} to {}",
        Count(u64::from(*found), "byte"),
        HumanSize(u64::from(MIN_CHUNK_BYTES)),
        HumanSize(u64::from(MAX_CHUNK_BYTES))
    )]
    Chunk {
        /// What was asked for.
        found: u32,
    },
    /// Sector size out of range.
    #[error("a sector of {found} bytes is not supported: members must have 512 or 4096 byte sectors")]
    Sector {
        /// What was asked for.
        found: u32,
    },
    /// Number of lanes out of range.
    #[error("an array of {found} lanes is not possible: use 1 to {MAX_LANES}")]
    Lanes {
        /// What was asked for.
        found: u16,
    },
    /// Some lane would have no stripe.
    #[error("a volume of {} is too small for {lanes} lanes: use fewer", HumanSize(*.volume_bytes))]
    EmptyLanes {
        /// What was asked for.
        volume_bytes: u64,
        /// Lanes.
        lanes: u16,
    },
    /// Volume size out of range.
    #[error("a volume of {} is not possible: use a multiple of 4 KiB above zero", Count(*found, "byte"))]
    VolumeSize {
        /// What was asked for.
        found: u64,
    },
    /// No device is large enough for the volume.
    #[error("a volume of {} would need members larger than any device can be: choose a smaller size", HumanSize(*.volume_bytes))]
    Impossible {
        /// What was asked for.
        volume_bytes: u64,
    },
    /// The members are too small.
    #[error("the smallest member has {} ({found} bytes), {} ({needed} bytes) are needed", HumanSize(*.found), HumanSize(*.needed))]
    TooSmall {
        /// Bytes of the smallest member.
        found: u64,
        /// Bytes that would do.
        needed: u64,
    },
}

/// How an array lies on each of its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrayLayout {
    /// How the stripes are dealt out.
    pub lanes: Lanes,
    /// Bytes from one window to the next; 0 with one lane.
    pub stride: u64,
    /// Size of the whole volume in bytes.
    pub volume_bytes: u64,
    /// Per lane its shape, and its regions within its window. Only their shares of the volume differ.
    pub of_lane: Vec<(Geometry, Vec<Region>)>,
}

/// Bytes each member must have for a volume of this size. A multiple of 4 KiB.
///
/// # Errors
/// When the shape or size is out of range.
pub fn member_bytes_for(volume_bytes: u64, shape: ArrayShape) -> Result<u64, LayoutError> {
    shape.check()?;
    let slots = shape.slots_for(volume_bytes)?;
    shape.member_bytes(slots).ok_or(LayoutError::Impossible { volume_bytes })
}

/// Geometry and regions of an array that is not cut, whatever `shape` says of lanes; as [`layout_for`].
///
/// # Errors
/// As [`layout_for`].
pub fn geometry_for(
    member_bytes: u64,
    shape: ArrayShape,
    volume_bytes: Option<u64>,
) -> Result<(Geometry, Vec<Region>), LayoutError> {
    let layout = layout_for(member_bytes, ArrayShape { lanes: 1, ..shape }, volume_bytes)?;
    Ok(layout.of_lane.into_iter().next().expect("an array has a lane"))
}

/// The layout of an array whose smallest member has `member_bytes`. With a volume size, exactly that one;
/// without, the largest that fits.
///
/// # Errors
/// When the shape or size is out of range, or the member too small.
pub fn layout_for(
    member_bytes: u64,
    shape: ArrayShape,
    volume_bytes: Option<u64>,
) -> Result<ArrayLayout, LayoutError> {
    shape.check()?;
    let member_bytes = member_bytes.min(MAX_DEVICE_BYTES) & !(ROW_BYTES - 1);
    let fits = |slots: u64| shape.member_bytes(slots).is_some_and(|needed| needed <= member_bytes);
    let slots = match volume_bytes {
        Some(bytes) => shape.slots_for(bytes)?,
        None => partition_point(member_bytes / u64::from(shape.chunk), |slots| fits(slots + 1)),
    };
    let volume_bytes = match volume_bytes {
        Some(bytes) => bytes,
        None => {
            let most = slots * u64::from(shape.lanes);
            let stripes = partition_point(most, |stripes| shape.slots_of(stripes + 1) <= slots);
            // A volume beyond what offsets can address loses its last stripes, and is still created.
            let bytes = u128::from(stripes) * u128::from(shape.stripe_bytes());
            u64::try_from(bytes).unwrap_or(u64::MAX).min(MAX_DEVICE_BYTES)
        }
    };
    let smallest = shape.stripes_min() * shape.stripe_bytes();
    if volume_bytes.div_ceil(shape.stripe_bytes()) < shape.stripes_min() || !fits(slots) {
        let smallest = volume_bytes.max(smallest);
        return Err(LayoutError::TooSmall {
            found: member_bytes,
            needed: member_bytes_for(smallest, shape)?,
        });
    }
    let (stride, _) = shape.windows(slots).expect("a layout that fits has windows");
    let regions = shape.regions(slots).expect("a layout that fits has regions");
    let mut layout = ArrayLayout { lanes: shape.cut(), stride, volume_bytes, of_lane: Vec::new() };
    let ArrayShape { data, parity, chunk, sector, .. } = shape;
    for lane in layout.lanes.indices() {
        let part = layout.part(lane);
        let share = if part.is_cut() { part.share_bytes(lane, shape.stripe_bytes()) } else { volume_bytes };
        let ahead = part.ahead(shape.width());
        let geometry = Geometry { data, parity, chunk, sector, slots, volume_bytes: share, ahead };
        layout.of_lane.push((geometry, regions.clone()));
    }
    Ok(layout)
}

impl ArrayLayout {
    /// The part of the array that a lane is, for its superblocks.
    #[must_use]
    pub fn part(&self, lane: LaneIndex) -> LanePart {
        let &ArrayLayout { lanes, stride, volume_bytes, .. } = self;
        if lanes.count == 1 {
            return LanePart::WHOLE;
        }
        LanePart { lane, lanes, stride, volume_bytes }
    }

    /// Bytes of a member that the array leaves unused at its end.
    #[must_use]
    pub fn leftover_bytes(&self, device_bytes: u64) -> u64 {
        let last = LaneIndex(self.lanes.count - 1);
        let window = self.part(last).window(last, device_bytes);
        self.of_lane.last().map_or(0, |(_, regions)| leftover_bytes(window.end - window.start, regions))
    }
}

/// Bytes of a device, or of a window, that an array with these regions leaves unused at its end.
#[must_use]
pub fn leftover_bytes(device_bytes: u64, regions: &[Region]) -> u64 {
    let device_bytes = device_bytes & !(ROW_BYTES - 1);
    device_bytes.saturating_sub(TAIL_BYTES).saturating_sub(region_end(regions).0)
}

impl ArrayShape {
    /// Members of the array.
    #[must_use]
    pub fn width(&self) -> u16 {
        self.data + self.parity
    }

    /// Bytes of user data in a stripe.
    #[must_use]
    pub fn stripe_bytes(&self) -> u64 {
        u64::from(self.data) * u64::from(self.chunk)
    }

    /// Whether an array can have this shape.
    ///
    /// # Errors
    /// Which number is out of range.
    pub fn check(&self) -> Result<(), LayoutError> {
        let &ArrayShape { data, parity, chunk, sector, lanes } = self;
        if data == 0 {
            return Err(LayoutError::NoData);
        }
        if u32::from(data) + u32::from(parity) > u32::from(MAX_MEMBERS) {
            return Err(LayoutError::TooWide { data, parity });
        }
        if !chunk.is_power_of_two() || !(MIN_CHUNK_BYTES..=MAX_CHUNK_BYTES).contains(&chunk) {
            return Err(LayoutError::Chunk { found: chunk });
        }
        if !matches!(sector, 512 | 4096) {
            return Err(LayoutError::Sector { found: sector });
        }
        if !(1..=MAX_LANES).contains(&lanes) {
            return Err(LayoutError::Lanes { found: lanes });
        }
        Ok(())
    }

    /// Slots of each lane for a volume: stripes and the reserve.
    fn slots_for(&self, volume_bytes: u64) -> Result<u64, LayoutError> {
        if volume_bytes == 0 || !volume_bytes.is_multiple_of(ROW_BYTES) {
            return Err(LayoutError::VolumeSize { found: volume_bytes });
        }
        if volume_bytes > MAX_DEVICE_BYTES {
            return Err(LayoutError::Impossible { volume_bytes });
        }
        let stripes = volume_bytes.div_ceil(self.stripe_bytes());
        if stripes < self.stripes_min() {
            return Err(LayoutError::EmptyLanes { volume_bytes, lanes: self.lanes });
        }
        Ok(self.slots_of(stripes))
    }

    /// How the stripes are dealt out.
    fn cut(&self) -> Lanes {
        Lanes::of(self.lanes, self.stripe_bytes())
    }

    /// The fewest stripes with which every lane has one.
    fn stripes_min(&self) -> u64 {
        let Lanes { count, group } = self.cut();
        u64::from(count - 1) * u64::from(group) + 1
    }

    /// Slots of each lane for a volume of this many stripes: as many as the one with the most stripes needs.
    fn slots_of(&self, stripes: u64) -> u64 {
        let of_lane = self.cut().stripes_in(LaneIndex(0), stripes);
        of_lane + reserve_for(of_lane)
    }

    /// Bytes of a member whose lanes have this many slots each; none beyond the largest device.
    fn member_bytes(&self, slots: u64) -> Option<u64> {
        let (stride, last) = self.windows(slots)?;
        Some(u64::from(self.lanes - 1) * stride + last)
    }

    /// Bytes from one window to the next, 0 with one lane, and bytes of the last window; none beyond the
    /// largest device.
    fn windows(&self, slots: u64) -> Option<(u64, u64)> {
        let window = region_end(&self.regions(slots)?).0.checked_add(TAIL_BYTES)?;
        let stride = if self.lanes > 1 { window.checked_next_multiple_of(REGION_ALIGN)? } else { 0 };
        let most = MAX_DEVICE_BYTES / u64::from(self.lanes);
        (window.max(stride) <= most).then_some((stride, window))
    }

    /// The regions of a lane with this many slots, within its window.
    fn regions(&self, slots: u64) -> Option<Vec<Region>> {
        let data_len = slots.checked_mul(u64::from(self.chunk)).filter(|&len| len <= MAX_DEVICE_BYTES)?;
        let lengths = [
            (RegionKind::Log, log_bytes(data_len, self.chunk, self.lanes)),
            (RegionKind::Pages, self.page_bytes(slots)?),
            (RegionKind::Data, data_len),
        ];
        let mut offset = MIN_REGION_OFFSET;
        let mut regions = Vec::with_capacity(lengths.len());
        for (kind, len) in lengths {
            regions.push(Region { kind, offset: ByteOffset(offset), len });
            offset = offset.checked_add(len)?.checked_next_multiple_of(REGION_ALIGN)?;
        }
        Some(regions)
    }

    /// Bytes of metadata pages on each member. Room for checksums is included even if none are kept: it is
    /// small beside the data, and so a layout depends on the shape alone.
    fn page_bytes(&self, slots: u64) -> Option<u64> {
        let &ArrayShape { data, parity, chunk, sector, .. } = self;
        // The size of the volume does not matter here.
        let geometry = Geometry { data, parity, chunk, sector, slots, volume_bytes: 0, ahead: 0 };
        PageLayout::new(geometry, true).region_bytes().checked_next_multiple_of(REGION_ALIGN)
    }
}

/// Bytes of the ring of each of so many lanes, with data regions of `data_len` bytes.
fn log_bytes(data_len: u64, chunk: u32, lanes: u16) -> u64 {
    // All rings of a member together are no longer than one would be.
    let wanted = (data_len / LOG_FRACTION).clamp(LOG_MIN, LOG_MAX / u64::from(lanes));
    let small = match lanes {
        1 => (data_len / LOG_SMALL_FRACTION).max(LOG_SMALL_MIN),
        _ => LOG_MAX,
    };
    wanted.min(small).max(LOG_CHUNKS_MIN * u64::from(chunk)).next_multiple_of(REGION_ALIGN)
}

fn reserve_for(stripes: u64) -> u64 {
    (stripes / RESERVE_FRACTION).clamp(RESERVE_MIN, RESERVE_MAX)
}

/// The number of leading values `0, 1, ..` below `limit` that a monotone predicate holds for.
fn partition_point(limit: u64, holds: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, limit);
    while low < high {
        let middle = low + (high - low) / 2;
        if holds(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape(data: u16, parity: u16) -> ArrayShape {
        ArrayShape { data, parity, chunk: 65536, sector: 512, lanes: 1 }
    }

    fn shapes() -> impl Strategy<Value = ArrayShape> {
        let lanes = prop_oneof![Just(1u16), 2..=MAX_LANES];
        (1u16..=255, 12u32..=22, any::<bool>(), lanes).prop_flat_map(|(data, chunk, sector, lanes)| {
            (0..=255 - data).prop_map(move |parity| ArrayShape {
                data,
                parity,
                chunk: 1 << chunk,
                sector: if sector { 512 } else { 4096 },
                lanes,
            })
        })
    }

    fn check_layout(layout: &ArrayLayout, member_bytes: u64) -> Result<(), TestCaseError> {
        prop_assert_eq!(layout.of_lane.len(), usize::from(layout.lanes.count));
        let mut stripes = 0;
        for (lane, (geometry, regions)) in layout.lanes.indices().zip(&layout.of_lane) {
            let mut end = MIN_REGION_OFFSET;
            for region in regions {
                prop_assert!(region.offset.0 >= end && region.len > 0, "{regions:?}");
                prop_assert!(region.offset.0.is_multiple_of(REGION_ALIGN));
                end = region.offset.0 + region.len;
            }
            let window = layout.part(lane).window(lane, member_bytes);
            let window_bytes = window.end - window.start;
            prop_assert!(end + TAIL_BYTES <= window_bytes, "{regions:?} beyond {window_bytes}");
            let data = regions.iter().find(|region| region.kind == RegionKind::Data).unwrap();
            prop_assert_eq!(data.len, geometry.slots * u64::from(geometry.chunk));
            prop_assert!(geometry.stripes() > 0 && geometry.slots >= geometry.stripes() + RESERVE_MIN);
            stripes += geometry.stripes();
            prop_assert!(layout.lanes.count == 1 || regions[0].len >= LOG_MIN);
            prop_assert!(regions[1].len >= PageLayout::new(*geometry, true).region_bytes());
        }
        prop_assert_eq!(stripes, layout.volume_bytes.div_ceil(layout.of_lane[0].0.stripe_bytes()));
        if layout.lanes.count == 1 {
            prop_assert_eq!((layout.of_lane[0].0.volume_bytes, layout.stride), (layout.volume_bytes, 0));
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn members_sized_for_a_volume_hold_it_exactly(shape in shapes(), blocks in 1u64..1 << 34) {
            let volume = blocks * ROW_BYTES;
            prop_assume!(volume.div_ceil(shape.stripe_bytes()) >= shape.stripes_min());
            let member = member_bytes_for(volume, shape).unwrap();
            let layout = layout_for(member, shape, Some(volume)).unwrap();
            prop_assert_eq!(layout.volume_bytes, volume);
            check_layout(&layout, member)?;
            prop_assert_eq!(layout.leftover_bytes(member), 0);
            prop_assert_eq!(layout.leftover_bytes(member + 12345), 12345 & !4095);
            // One block less does not suffice, and without a volume size the largest volume is at least this
            // one.
            let needed = LayoutError::TooSmall { found: member - ROW_BYTES, needed: member };
            prop_assert_eq!(layout_for(member - ROW_BYTES, shape, Some(volume)), Err(needed));
            prop_assert!(layout_for(member, shape, None).unwrap().volume_bytes >= volume);
        }

        #[test]
        fn the_largest_volume_of_any_device_lies_inside_it(shape in shapes(), bytes in any::<u64>(), shift in 0u32..44) {
            let bytes = bytes >> shift;
            match layout_for(bytes, shape, None) {
                Ok(layout) => {
                    check_layout(&layout, bytes)?;
                    // No useful space is left: one stripe more would not fit.
                    let more = layout.volume_bytes.saturating_add(shape.stripe_bytes());
                    if let Ok(member) = member_bytes_for(more, shape) {
                        prop_assert!(member > bytes & !(ROW_BYTES - 1));
                    }
                }
                Err(LayoutError::TooSmall { found, needed }) => {
                    prop_assert_eq!(found, bytes & !(ROW_BYTES - 1));
                    prop_assert!(needed > found);
                    prop_assert!(layout_for(needed, shape, None).is_ok());
                }
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
    }

    #[test]
    fn a_small_array_stays_small() {
        let member = member_bytes_for(1 << 30, shape(4, 3)).unwrap();
        assert!(member < 300 * MIB, "{}", HumanSize(member));
        let (_, regions) = geometry_for(member, shape(4, 3), Some(1 << 30)).unwrap();
        let mib: Vec<_> = regions.iter().map(|r| (r.kind, r.offset.0 / MIB, r.len / MIB)).collect();
        assert_eq!(mib, [(RegionKind::Log, 1, 16), (RegionKind::Pages, 17, 9), (RegionKind::Data, 26, 260)]);
        assert!(member_bytes_for(16 * MIB, shape(4, 4)).unwrap() < 12 * MIB);
    }

    #[test]
    fn lanes_cost_a_ring_each_and_a_little_more() {
        let one = shape(4, 2);
        let eight = ArrayShape { lanes: 8, ..one };
        let layout = layout_for(16 << 30, eight, None).unwrap();
        assert_eq!(layout.lanes, Lanes { count: 8, group: 4 });
        // Together what one lane has, 1/64 of the data region, up to the last mebibyte of each.
        assert!(layout.of_lane.iter().all(|(_, regions)| regions[0].len == 31 * MIB));
        let (whole, _) = geometry_for(16 << 30, one, None).unwrap();
        let lost = whole.volume_bytes - layout.volume_bytes;
        println!(
            "8 lanes cost a member of 16 GiB {} of the volume's {}",
            HumanSize(lost),
            HumanSize(whole.volume_bytes)
        );
        assert!(lost < whole.volume_bytes / 200, "{}", HumanSize(lost));
        let small = member_bytes_for(1 << 30, eight).unwrap();
        let more = small - member_bytes_for(1 << 30, one).unwrap();
        println!("and a member of a volume of 1 GiB {} more", HumanSize(more));
        assert!((7 * LOG_MIN..10 * LOG_MIN).contains(&more), "{}", HumanSize(more));
        let smallest =
            |shape: ArrayShape| member_bytes_for(shape.stripes_min() * shape.stripe_bytes(), shape).unwrap();
        println!(
            "the smallest member has {}, with one lane {}",
            HumanSize(smallest(eight)),
            HumanSize(smallest(one))
        );
        assert!(smallest(eight) < 10 * LOG_MIN);
    }

    #[test]
    fn each_lane_lies_as_an_array_of_its_own_would() {
        let eight = ArrayShape { lanes: 8, ..shape(4, 2) };
        let volume = (10 << 30) - 12288;
        let member = member_bytes_for(volume, eight).unwrap();
        let layout = layout_for(member, eight, Some(volume)).unwrap();
        let (first, regions) = &layout.of_lane[0];
        for (lane, (geometry, of_lane)) in layout.lanes.indices().zip(&layout.of_lane) {
            assert_eq!((of_lane, geometry.slots), (regions, first.slots));
            let part = layout.part(lane);
            assert_eq!(part.window(lane, member).start, u64::from(lane.0) * layout.stride);
            assert_eq!(geometry.volume_bytes, part.share_bytes(lane, geometry.stripe_bytes()));
        }
        // The last window of a larger member is longer.
        assert_eq!(layout.part(LaneIndex(7)).window(LaneIndex(7), member + MIB).end, member + MIB);
        let one = layout_for(member, shape(4, 2), Some(volume)).unwrap();
        assert_eq!((one.part(LaneIndex(0)), one.lanes), (LanePart::WHOLE, Lanes::ONE));
        assert_eq!(geometry_for(member, eight, Some(volume)).unwrap(), one.of_lane[0]);
    }

    #[test]
    fn a_large_member_spends_little_on_metadata() {
        let (geometry, regions) = geometry_for(4 << 40, shape(8, 2), None).unwrap();
        let metadata = (4u64 << 40) - geometry.slots * u64::from(geometry.chunk);
        assert!(metadata < (4 << 40) / 32, "{} of metadata", HumanSize(metadata));
        assert_eq!(regions[0].len, 1 << 30);
    }

    #[test]
    fn one_byte_is_told_as_one() {
        assert!(LayoutError::VolumeSize { found: 1 }.to_string().starts_with("a volume of 1 byte is not"));
        assert!(LayoutError::Chunk { found: 1 }.to_string().starts_with("a chunk of 1 byte is not"));
    }

    #[test]
    fn shapes_and_sizes_out_of_range_are_refused() {
        let good = shape(4, 2);
        let refused = |shape, volume| member_bytes_for(volume, shape).unwrap_err();
        assert_eq!(refused(shape(0, 2), 4096), LayoutError::NoData);
        assert_eq!(refused(shape(200, 56), 4096), LayoutError::TooWide { data: 200, parity: 56 });
        assert_eq!(refused(shape(u16::MAX, 2), 4096), LayoutError::TooWide { data: u16::MAX, parity: 2 });
        for found in [0, 512, 65537, 8 << 20] {
            assert_eq!(refused(ArrayShape { chunk: found, ..good }, 4096), LayoutError::Chunk { found });
        }
        assert_eq!(refused(ArrayShape { sector: 520, ..good }, 4096), LayoutError::Sector { found: 520 });
        for found in [0, MAX_LANES + 1] {
            assert_eq!(refused(ArrayShape { lanes: found, ..good }, 4096), LayoutError::Lanes { found });
        }
        // Eight lanes of four stripes at a time: the last one has a stripe from the 29th stripe on.
        let (eight, stripe) = (ArrayShape { lanes: 8, ..good }, 256 << 10);
        assert!(matches!(refused(eight, 28 * stripe), LayoutError::EmptyLanes { lanes: 8, .. }));
        assert!(member_bytes_for(28 * stripe + 4096, eight).is_ok());
        for found in [0, 4097, u64::MAX] {
            assert_eq!(refused(good, found), LayoutError::VolumeSize { found });
        }
        for volume_bytes in [MAX_DEVICE_BYTES, 1 << 63] {
            assert_eq!(refused(shape(1, 254), volume_bytes), LayoutError::Impossible { volume_bytes });
        }
        assert!(matches!(geometry_for(0, good, None), Err(LayoutError::TooSmall { found: 0, .. })));
    }
}
