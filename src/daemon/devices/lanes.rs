//! The lanes of a device: the windows that its superblocks cut it into, and what is said in each.
//!
//! Invariant: the copies at the very start and the very end of a device say whether it is cut, and how; what
//! lies between them is read only where they say so. Must not know what a lane does.

use super::superblocks::{Copies, read_copies, windows_of};
use crate::member::Device;
use calpe_core::format::{
    CopyPlace, FIRST_SEQUENCE, FormatError, Identity, LanePart, NewestError, Superblock, damaged_copies,
    newest_read,
};
use calpe_core::units::LaneIndex;
use std::ops::Range;

/// Superblocks of an array that has never been in service have this epoch.
const FIRST_EPOCH: u64 = 1;

/// What a device says of itself.
#[derive(Clone, Debug)]
pub(crate) struct DeviceLanes {
    /// How it is cut. The lane in it means nothing.
    part: LanePart,
    /// In order: one where it is not cut.
    pub(crate) lanes: Vec<DeviceLane>,
    /// The first copies of the device are not there: a creation writes them last.
    is_headless: bool,
}

/// One lane of a device.
#[derive(Clone, Debug)]
pub(crate) struct DeviceLane {
    /// Its newest superblock.
    pub(crate) superblock: Result<Superblock, NewestError>,
    /// Copies that should be whole and are not, and why.
    pub(crate) damaged: Vec<(CopyPlace, String)>,
}

impl DeviceLanes {
    /// Reads the superblocks of all lanes.
    pub(crate) fn read(device: &Device) -> DeviceLanes {
        let (part, copies) = read_all(device);
        DeviceLanes::of(part, copies, device.facts().bytes)
    }

    fn of(part: LanePart, copies: Vec<Copies>, device_bytes: u64) -> DeviceLanes {
        let is_missing = |copy: &Result<Result<_, FormatError>, _>| {
            matches!(copy, Ok(Err(FormatError::NoMagic | FormatError::Cleared)))
        };
        let is_headless = copies[0][..2].iter().all(is_missing);
        let lane =
            |copies: Copies| DeviceLane { damaged: damaged_copies(&copies), superblock: newest_read(copies) };
        let mut lanes: Vec<DeviceLane> = copies.into_iter().map(lane).collect();
        let first = lanes.iter().find_map(|lane| lane.superblock.as_ref().ok()).map(identity);
        for (lane, index) in lanes.iter_mut().zip(0..).filter(|_| part.is_cut()) {
            let own = LaneIndex(index);
            let expected = first.map(|first| Identity { lane: Some(own), ..first });
            if let (Ok(superblock), Some(expected)) = (&lane.superblock, expected) {
                let found = identity(superblock);
                if found != expected || superblock.part != (LanePart { lane: own, ..part }) {
                    lane.superblock = Err(NewestError::Mixed { first: expected, second: found });
                }
            }
            let window = part.window(own, device_bytes);
            let bytes = window.end - window.start;
            if let Some(needed) = lane.superblock.as_ref().ok().map(Superblock::device_bytes_min)
                && needed > bytes
            {
                let what = format!("lane {own} takes {needed} bytes, and has {bytes} on this device");
                lane.superblock = Err(NewestError::Unreadable(what));
            }
        }
        DeviceLanes { part, lanes, is_headless }
    }

    /// The superblock of the first lane that has a usable one: all lanes say the same of the array, and of
    /// what the device is in it.
    ///
    /// # Errors
    /// What is wrong with that of the first lane, if none has one.
    pub(crate) fn first(&self) -> Result<&Superblock, &NewestError> {
        let usable = self.superblocks().flatten().next();
        usable.map_or_else(|| self.lanes[0].superblock.as_ref(), Ok)
    }

    /// The superblock of each lane, where it has a usable one.
    pub(crate) fn superblocks(&self) -> impl Iterator<Item = Option<&Superblock>> {
        self.lanes.iter().map(|lane| lane.superblock.as_ref().ok())
    }

    /// Lanes of which no superblock can be used, and why.
    pub(crate) fn unusable(&self) -> impl Iterator<Item = (LaneIndex, &NewestError)> {
        let lanes = self.lanes.iter().zip(0..);
        lanes.filter_map(|(lane, index)| Some((LaneIndex(index), lane.superblock.as_ref().err()?)))
    }

    /// Where the lanes lie on a device of this many bytes.
    pub(crate) fn windows(&self, device_bytes: u64) -> Vec<Range<u64>> {
        windows_of(self.part, device_bytes)
    }

    /// The copies that are damaged, in words: which, and what is wrong.
    pub(crate) fn words_for_damaged(&self) -> Vec<String> {
        let lanes = self.lanes.iter().zip(0..);
        let words = lanes.flat_map(|(lane, index)| {
            let of_lane = of_lane(self.part, LaneIndex(index));
            lane.damaged
                .iter()
                .map(move |(place, why)| format!("{}{of_lane} is damaged: {why}", place.word()))
        });
        words.collect()
    }

    /// Whether it looks as a creation leaves a device when it is cut short there: the superblocks of the last
    /// lanes are there, and all of the first time; those of the first lanes, and the head of the device, are
    /// not.
    pub(crate) fn is_unfinished(&self) -> bool {
        let is_blank = |lane: &DeviceLane| lane.superblock == Err(NewestError::NotAMember);
        let blank = self.lanes.iter().take_while(|lane| is_blank(lane)).count();
        let is_first = |lane: &DeviceLane| lane.superblock.as_ref().is_ok_and(is_new);
        self.part.is_cut() && self.is_headless && self.lanes[blank..].iter().all(is_first)
    }

    /// Whether the array has never been in service, as far as this device tells.
    pub(crate) fn is_new(&self) -> bool {
        self.superblocks().flatten().all(is_new)
            && self.lanes.iter().all(|lane| matches!(lane.superblock, Ok(_) | Err(NewestError::NotAMember)))
    }
}

fn identity(superblock: &Superblock) -> Identity {
    let Superblock { array, device, ref part, .. } = *superblock;
    Identity { array, device, lane: part.is_cut().then_some(part.lane) }
}

fn is_new(superblock: &Superblock) -> bool {
    (superblock.sequence, superblock.epoch.number) == (FIRST_SEQUENCE, FIRST_EPOCH)
}

/// " of lane 3", for an array of several lanes.
pub(crate) fn of_lane(part: LanePart, lane: LaneIndex) -> String {
    if part.is_cut() { format!(" of lane {lane}") } else { String::new() }
}

/// How a device is cut, where the lane means nothing, and the copies of the superblock of each lane.
pub(crate) fn read_all(device: &Device) -> (LanePart, Vec<Copies>) {
    let ends = read_copies(device);
    let part = cut_by(&ends).unwrap_or(LanePart::WHOLE);
    if !part.is_cut() {
        return (LanePart::WHOLE, vec![ends]);
    }
    let windows = windows_of(part, device.facts().bytes);
    (part, windows.iter().map(|window| read_copies(&device.window(window))).collect())
}

/// How a device with these copies at its ends is cut. The head copies are those of the first lane, and the
/// tail copies those of the last one, so either end is enough. Copies of several arrays or devices say
/// nothing: they are found to be mixed.
fn cut_by(ends: &Copies) -> Option<LanePart> {
    let whole: Vec<&Superblock> = ends.iter().flatten().flatten().collect();
    let is_same = |other: &&&Superblock| (other.array, other.device) == (whole[0].array, whole[0].device);
    let is_one = whole.iter().filter(is_same).count() == whole.len();
    whole.iter().map(|superblock| superblock.part).find(LanePart::is_cut).filter(|_| is_one)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::devices::import::tests::created_with_lanes;
    use crate::daemon::devices::superblocks::{write_first_superblocks, write_superblock};
    use crate::member::Access;
    use calpe_core::format::{COPY_BYTES, all_copy_offsets};
    use std::path::Path;

    const COPY: u64 = COPY_BYTES as u64;

    fn open(path: &Path) -> Device {
        Device::open(path, Access::Exclusive).unwrap()
    }

    /// A device of an array of four lanes, and its superblocks.
    fn device() -> (tempfile::TempDir, Device, Vec<Superblock>) {
        let dir = tempfile::tempdir().unwrap();
        created_with_lanes(dir.path(), "tank", 1, 1, 4);
        let device = open(&dir.path().join("m0"));
        let lanes = DeviceLanes::read(&device);
        let superblocks: Vec<_> = lanes.superblocks().map(|superblock| superblock.unwrap().clone()).collect();
        (dir, device, superblocks)
    }

    fn wipe(device: &Device, places: &[u64]) {
        for place in places {
            device.write_at(*place, &vec![0; COPY as usize]).unwrap();
        }
    }

    #[test]
    fn either_end_of_a_device_shows_its_lanes() {
        let (_dir, device, superblocks) = device();
        assert_eq!(superblocks.len(), 4);
        let bytes = device.facts().bytes;
        let windows = windows_of(superblocks[0].part, bytes);
        assert_eq!((windows[0].start, windows[3].end), (0, bytes));
        assert!(windows.windows(2).all(|pair| pair[0].end == pair[1].start));
        for (place, lane) in [(0, 0), (COPY, 0), (bytes - COPY, 3), (bytes - 2 * COPY, 3)] {
            let mut copy = vec![0; COPY as usize];
            device.read_at(place, &mut copy).unwrap();
            if let Ok(copy) = Superblock::decode(&copy) {
                assert_eq!(copy.part.lane, LaneIndex(lane));
            }
        }
        let ends = [[0, COPY], [bytes - COPY, bytes - 2 * COPY]];
        for end in ends {
            let kept = end.map(|place| {
                let mut copy = vec![0; COPY as usize];
                device.read_at(place, &mut copy).unwrap();
                copy
            });
            wipe(&device, &end);
            let lanes = DeviceLanes::read(&device);
            let found: Vec<_> = lanes.superblocks().map(Option::<&Superblock>::cloned).collect();
            let expected: Vec<_> = superblocks.iter().cloned().map(Some).collect();
            assert_eq!(found, expected, "{end:?}");
            let lane = if end[0] == 0 { "of lane 0" } else { "of lane 3" };
            let told = lanes.words_for_damaged();
            assert!(told.len() == 1 && told[0].contains(lane), "{told:?}");
            for (place, copy) in end.into_iter().zip(kept) {
                device.write_at(place, &copy).unwrap();
            }
        }
        wipe(&device, &ends.concat());
        assert_eq!(
            DeviceLanes::read(&device).first(),
            Err(&NewestError::NotAMember),
            "nothing says that it is cut"
        );
    }

    #[test]
    fn a_lane_without_a_usable_superblock_costs_itself_alone() {
        let (_dir, device, superblocks) = device();
        let windows = windows_of(superblocks[0].part, device.facts().bytes);
        let window = device.window(&windows[2]);
        wipe(&window, &all_copy_offsets(window.facts().bytes).map(|offset| offset.0));
        let lanes = DeviceLanes::read(&device);
        let unusable: Vec<_> = lanes.unusable().collect();
        assert_eq!(unusable, [(LaneIndex(2), &NewestError::NotAMember)]);
        assert!(!lanes.is_unfinished(), "a creation leaves no gap");
        // A superblock of another lane, or of another array, is none of this one.
        for stranger in
            [superblocks[1].clone(), Superblock { array: uuid::Uuid::from_u128(9), ..superblocks[2].clone() }]
        {
            write_superblock(&window, &stranger).unwrap();
            let lanes = DeviceLanes::read(&device);
            let unusable: Vec<_> = lanes.unusable().map(|(lane, error)| (lane, error.to_string())).collect();
            assert!(unusable.len() == 1 && unusable[0].0 == LaneIndex(2), "{unusable:?}");
            assert!(unusable[0].1.contains("disagree on what this device is"), "{unusable:?}");
        }
        assert!(lanes.first().is_ok_and(|first| first.part.lane == LaneIndex(0)));
    }

    #[test]
    fn a_creation_that_is_cut_short_on_a_device_is_seen_and_a_used_array_is_not_taken_for_one() {
        let (_dir, device, superblocks) = device();
        let bytes = device.facts().bytes;
        let windows = windows_of(superblocks[0].part, bytes);
        let places = |lane: usize| {
            let window = &windows[lane];
            all_copy_offsets(window.end - window.start).map(|offset| window.start + offset.0)
        };
        assert!(!DeviceLanes::read(&device).is_unfinished() && DeviceLanes::read(&device).is_new());
        // The copy at the start is written last, so everything but that may be there, or less of it.
        wipe(&device, &[0, COPY]);
        assert!(DeviceLanes::read(&device).is_unfinished());
        for lane in 0..3 {
            wipe(&device, &places(lane));
            let lanes = DeviceLanes::read(&device);
            assert!(lanes.is_unfinished() && lanes.is_new(), "without the lanes up to {lane}");
        }
        let used = Superblock { sequence: 2, ..superblocks[3].clone() };
        write_superblock(&device.window(&windows[3]), &used).unwrap();
        let lanes = DeviceLanes::read(&device);
        assert!(!lanes.is_unfinished() && !lanes.is_new(), "it was in service");
        write_first_superblocks(&device, &superblocks).unwrap();
        assert!(!DeviceLanes::read(&device).is_new(), "lane 3 still says so");
    }
}
