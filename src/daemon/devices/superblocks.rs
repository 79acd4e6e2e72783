//! Superblocks and signatures on opened devices: the blocking reads and writes that creation,
//! import and inspection share. Knows where bytes lie from `format`; must not know of arrays that
//! run.

use crate::member::patience::{each_within_apart, within};
use crate::member::{Access, Device, DeviceError, ReadAt, RemoteError, Witness, is_remote};
use calpe_core::block_io::IoFaultKind;
use calpe_core::format::{
    COPY_BYTES, CopyPlace, FormatError, LanePart, Lanes, NewestError, Region, RegionKind, Role,
    SIGNATURE_WINDOW, Signature, Superblock, all_copy_offsets, decode_copy, newest, newest_read, recognise,
    superblock_offsets,
};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Bytes that are zeroed at each end of a device that is overwritten: every place where a signature
/// can be.
const WIPED_BYTES: u64 = SIGNATURE_WINDOW;

/// Bytes of a log that are zeroed with one write.
const WIPED_AT_ONCE: u64 = 1 << 20;

/// The four copies of a superblock as they can be read and decoded; an I/O error as its text.
pub(crate) type Copies = [Result<Result<Superblock, FormatError>, String>; 4];

/// How long a call that fails is tried again, counted from its first try: a passing error is no
/// reason to start without a member. A call that hangs ends by its own limit and is not tried
/// again.
const PATIENCE: Duration = Duration::from_secs(1);

/// The same where the host lacks resources, which is no fault of the device (rule T4).
const SHORTAGE_PATIENCE: Duration = Duration::from_secs(10);

/// The time between two tries.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Tries a call about a device, which began at `since`, until it succeeds or patience ends.
///
/// # Errors
/// Those of the last try.
pub(crate) fn patiently<T>(
    since: Instant,
    mut call: impl FnMut() -> Result<T, DeviceError>,
) -> Result<T, DeviceError> {
    loop {
        let error = match call() {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        let limit = match error.fault_kind() {
            Some(IoFaultKind::Shortage) => SHORTAGE_PATIENCE,
            Some(IoFaultKind::Medium) => PATIENCE,
            // Other errors do not pass.
            _ => return Err(error),
        };
        if since.elapsed() >= limit {
            return Err(error);
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
}

/// Reads the copies.
pub(crate) fn read_copies(device: &Device) -> Copies {
    let offsets = all_copy_offsets(device.facts().bytes);
    let began = Instant::now();
    std::array::from_fn(|at| {
        if offsets[at].0 + COPY_BYTES as u64 > device.facts().bytes {
            // A device that is too small is no member.
            return Ok(Err(FormatError::NoMagic));
        }
        let mut copy = vec![0; COPY_BYTES];
        let read = patiently(began, || device.read_at(offsets[at].0, &mut copy));
        read.map_err(|error| error.to_string())?;
        Ok(decode_copy(CopyPlace::ALL[at], &copy))
    })
}

/// Where the lanes of an array lie on a device of this many bytes. `part`: that of any of them.
pub(crate) fn windows_of(part: LanePart, device_bytes: u64) -> Vec<Range<u64>> {
    part.lanes.indices().map(|lane| part.window(lane, device_bytes)).collect()
}

/// The newest valid superblock of a device, or of a window.
///
/// # Errors
/// See [`newest_read`].
pub fn read_superblock(device: &Device) -> Result<Superblock, NewestError> {
    newest_read(read_copies(device))
}

/// Checks that a device still has the length that the superblock of one of its lanes records: a file that was
/// cut off since would grow by writes beyond its end, and read as zeroes in between.
///
/// # Errors
/// [`DeviceError::CutOff`].
pub(crate) fn check_length(device: &Device, superblock: &Superblock) -> Result<(), DeviceError> {
    let (facts, needed) = (device.facts(), superblock.whole_device_bytes_min());
    if facts.bytes < needed {
        let bytes = facts.exact_bytes;
        return Err(DeviceError::CutOff { path: device.path().into(), bytes, needed });
    }
    Ok(())
}

/// Writes a superblock to the slot of its sequence at both ends, and flushes.
///
/// # Errors
/// When the device fails; one of the copies may then have been written.
pub(crate) fn write_superblock(device: &Device, superblock: &Superblock) -> Result<(), DeviceError> {
    let copy = superblock.encode();
    for offset in superblock_offsets(device.facts().bytes, superblock.sequence) {
        device.write_at(offset.0, copy.as_slice())?;
    }
    device.flush()
}

/// Writes the first superblocks of a device, one for each lane, and flushes. The copy at its very start is
/// the last one: where it is missing, a creation was cut short.
///
/// # Errors
/// When the device fails; some of the copies may then have been written.
pub(crate) fn write_first_superblocks(
    device: &Device,
    superblocks: &[Superblock],
) -> Result<(), DeviceError> {
    let [first, others @ ..] = superblocks else { return Ok(()) };
    let windows = windows_of(first.part, device.facts().bytes);
    if others.is_empty() {
        return write_superblock(device, first);
    }
    let places = |window: &Range<u64>, superblock: &Superblock| {
        let offsets = superblock_offsets(window.end - window.start, superblock.sequence);
        offsets.map(|offset| window.start + offset.0)
    };
    for (window, superblock) in windows[1..].iter().zip(others) {
        let copy = superblock.encode();
        for place in places(window, superblock) {
            device.write_at(place, copy.as_slice())?;
        }
    }
    let [head, tail] = places(&windows[0], first);
    device.write_at(tail, first.encode().as_slice())?;
    device.flush()?;
    device.write_at(head, first.encode().as_slice())?;
    device.flush()
}

/// Bytes that [`reserve_regions`] sets aside for an array of which this is the superblock of a lane.
#[must_use]
pub(crate) fn reserved_bytes(superblock: &Superblock) -> u64 {
    reserved_of(superblock.part.lanes, &superblock.regions)
}

/// Bytes that are set aside on a member whose lanes have these regions each.
#[must_use]
pub(crate) fn reserved_of(lanes: Lanes, regions: &[Region]) -> u64 {
    let copies = (CopyPlace::ALL.len() * COPY_BYTES) as u64;
    u64::from(lanes.count) * (copies + reserved(regions).map(|region| region.len).sum::<u64>())
}

/// Bytes that a creation leaves allocated on a device that existed: the reserved regions, and what is zeroed,
/// without regions whose space is discarded again. `regions`: those of each lane.
#[must_use]
pub(crate) fn allocated_on(device: &Device, part: LanePart, regions: &[Region]) -> u64 {
    let windows = windows_of(part, device.facts().bytes);
    let extents = |regions: &[&Region]| -> Vec<Range<u64>> {
        let of_window = |start: u64| {
            let place = move |region: &&Region| start + region.offset.0..start + region.offset.0 + region.len;
            regions.iter().map(place).collect::<Vec<_>>()
        };
        windows.iter().flat_map(|window| of_window(window.start)).collect()
    };
    let is_reserved = |region: &&Region| reserved(regions).any(|other| other == *region);
    let (kept, given_back): (Vec<_>, Vec<_>) = regions.iter().partition(is_reserved);
    let (kept, given_back) = (extents(&kept), extents(&given_back));
    let wiped: Vec<_> =
        wiped_ranges(device, part).into_iter().map(|(offset, len)| offset..offset + len).collect();
    // All starts and ends of ranges: the bytes between two of them are all alike.
    let ranges = kept.iter().chain(&given_back).chain(&wiped);
    let mut cuts: Vec<u64> = ranges.flat_map(|range| [range.start, range.end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let has = |list: &[Range<u64>], at: u64| list.iter().any(|range| range.contains(&at));
    let is_allocated = |at: u64| has(&kept, at) || (has(&wiped, at) && !has(&given_back, at));
    cuts.windows(2).filter(|cut| is_allocated(cut[0])).map(|cut| cut[1] - cut[0]).sum()
}

fn reserved(regions: &[Region]) -> impl Iterator<Item = &Region> {
    regions.iter().filter(|region| !matches!(region.kind, RegionKind::Data | RegionKind::Pages))
}

/// Allocates space for the superblocks and the logs of a member, whose lanes have this part of the array and
/// these regions each: without it no write could be acknowledged on
/// a full filesystem. All slots of superblocks are allocated, because the next superblock goes to a slot that
/// has not been written yet. Metadata pages, two percent of a volume, are allocated when they are written; on
/// a full filesystem they wait in the log until there is room (rule T4), and clients get an error when that
/// takes too long.
///
/// # Errors
/// When there is no room.
pub(crate) fn reserve_regions(
    device: &Device,
    part: LanePart,
    regions: &[Region],
) -> Result<(), DeviceError> {
    for window in windows_of(part, device.facts().bytes) {
        let window = device.window(&window);
        for (offset, len) in copy_places(window.facts().bytes) {
            window.preallocate(offset, len)?;
        }
        reserved(regions).try_for_each(|region| window.preallocate(region.offset.0, region.len))?;
    }
    Ok(())
}

/// What [`reserve_regions`] allocates beside the slots of superblocks: starts and lengths.
#[must_use]
pub(crate) fn reserved_ranges(device: &Device, part: LanePart, regions: &[Region]) -> Vec<(u64, u64)> {
    let windows = windows_of(part, device.facts().bytes).into_iter();
    let of_window = |window: Range<u64>| {
        reserved(regions).map(move |region| (window.start + region.offset.0, region.len))
    };
    windows.flat_map(of_window).collect()
}

/// The places of the four copies on a device, or in a window, of this many bytes: starts and lengths.
fn copy_places(bytes: u64) -> [(u64, u64); 4] {
    all_copy_offsets(bytes).map(|offset| (offset.0, COPY_BYTES as u64))
}

/// Zeroes both ends of a device, superblocks and all signatures with them, and the places of superblocks of
/// all lanes, and flushes. `part`: how the array cuts the device that it is to become a member of.
///
/// # Errors
/// When the device fails.
pub(crate) fn wipe_ends(device: &Device, part: LanePart) -> Result<(), DeviceError> {
    for (offset, len) in wiped_ranges(device, part) {
        device.write_at(offset, &vec![0; len as usize])?;
    }
    device.flush()
}

/// What [`wipe_ends`] writes, all places of superblocks in it: starts and lengths. They may overlap.
#[must_use]
pub(crate) fn wiped_ranges(device: &Device, part: LanePart) -> Vec<(u64, u64)> {
    let bytes = device.facts().bytes;
    let len = WIPED_BYTES.min(bytes);
    let mut wiped = vec![(0, len), (bytes - len, len)];
    for window in windows_of(part, bytes).into_iter().filter(|_| part.is_cut()) {
        let places = copy_places(window.end - window.start);
        wiped.extend(places.map(|(offset, len)| (window.start + offset, len)));
    }
    wiped.retain(|(offset, len)| offset + len <= bytes);
    wiped
}

/// Zeroes the log regions of a device that is to become a member, and flushes. A device that was
/// that member before, perhaps on the other side of a divided array, may hold valid log segments of
/// a later epoch than the array's. They would count once the device is in service, and a rebuild
/// writes everything but the log.
///
/// # Errors
/// When the device fails.
pub(crate) fn wipe_logs(device: &Device, part: LanePart, regions: &[Region]) -> Result<(), DeviceError> {
    for window in windows_of(part, device.facts().bytes) {
        let window = device.window(&window);
        for log in regions.iter().filter(|region| region.kind == RegionKind::Log) {
            let zeroes = vec![0; WIPED_AT_ONCE.min(log.len) as usize];
            let mut done = 0;
            while done < log.len {
                let len = (log.len - done).min(WIPED_AT_ONCE) as usize;
                window.write_at(log.offset.0 + done, &zeroes[..len])?;
                done += len as u64;
            }
        }
    }
    device.flush()
}

/// The check that a remote device is still the same after a reconnection: it must show a superblock of this
/// device, not older than number `sequence`, nor than any that it has shown before.
#[must_use]
pub(crate) fn witness(device_bytes: u64, array: Uuid, device: Uuid, sequence: u64) -> Arc<Witness> {
    let newest_seen = AtomicU64::new(sequence);
    Arc::new(move |read: ReadAt<'_>| {
        let mut copies = Vec::new();
        for (place, offset) in CopyPlace::ALL.into_iter().zip(all_copy_offsets(device_bytes)) {
            let mut copy = vec![0; COPY_BYTES];
            read(offset.0, &mut copy)?;
            copies.push(decode_copy(place, &copy));
        }
        match newest(copies) {
            Ok(superblock) if superblock.array == array && superblock.device == device => {
                if let Some(why) = superblock.unfit() {
                    return Err(RemoteError::Changed(why.to_string()));
                }
                let seen = newest_seen.fetch_max(superblock.sequence, Ordering::Relaxed);
                if superblock.role == Role::Replaced {
                    return Err(RemoteError::Changed("it was replaced by another device".into()));
                }
                if superblock.sequence < seen {
                    return Err(RemoteError::Changed(format!(
                        "it is in an older state than it was: superblock {} after {seen}, as of a snapshot or a copy",
                        superblock.sequence
                    )));
                }
                Ok(())
            }
            Ok(other) => Err(RemoteError::Changed(format!(
                "it holds device {} of array '{}' now, not {device}",
                other.device, other.name
            ))),
            Err(error) => Err(RemoteError::Changed(format!("its superblock: {error}"))),
        }
    })
}

/// Signatures of known formats on a device.
///
/// # Errors
/// When its ends cannot be read: they might hold a signature.
pub(crate) fn signatures(device: &Device) -> Result<Vec<Signature>, DeviceError> {
    let bytes = device.facts().bytes;
    let mut head = vec![0; SIGNATURE_WINDOW.min(bytes) as usize];
    let mut tail = head.clone();
    device.read_at(0, &mut head)?;
    device.read_at(bytes - tail.len() as u64, &mut tail)?;
    Ok(recognise(&head, &tail, bytes))
}

/// Opens and locks a device that is to be a member, and returns the signatures on it, or why they
/// cannot be read. A device that does not answer within `limit` is given up.
///
/// # Errors
/// When it cannot be opened.
pub(crate) fn open_and_recognise(path: &Path, limit: Duration) -> Result<OpenedNew, DeviceError> {
    if is_remote(path) {
        // Every read of a remote device has a limit of its own.
        let device = Device::open_within(path, Access::Exclusive, limit)?;
        let found = signatures(&device);
        return Ok((device, found));
    }
    let own = path.to_path_buf();
    within(path, "open it", limit, move || {
        let device = Device::open(&own, Access::Exclusive)?;
        let found = signatures(&device);
        Ok((device, found))
    })?
}

/// A device that is to be a member, and what is recognised on it.
pub(crate) type OpenedNew = (Device, Result<Vec<Signature>, DeviceError>);

/// Reads the ends of local devices before a command without a daemon opens them, so that a device
/// that does not answer ends the command. Other faults are found later.
///
/// # Errors
/// For the first that does not answer within `limit`.
pub(crate) fn check_answers(paths: &[PathBuf], limit: Duration) -> Result<(), DeviceError> {
    let local: Vec<PathBuf> = paths.iter().filter(|path| !is_remote(path)).cloned().collect();
    let answers = each_within_apart(&local, "look at it", limit, |path| {
        let _ = Device::open(path, Access::ReadOnly).and_then(|device| signatures(&device));
    });
    let silent = answers
        .into_iter()
        .filter_map(Result::err)
        .find(|error| !matches!(error, DeviceError::NoThread { .. }));
    silent.map_or(Ok(()), |error| Err(without_answer(error)))
}

/// Adds the likely reason to the error of an operation that was not answered in time.
pub(crate) fn without_answer(error: DeviceError) -> DeviceError {
    match error {
        DeviceError::Io { path, action, source } => {
            let source =
                io::Error::new(source.kind(), format!("its filesystem or disk does not answer ({source})"));
            DeviceError::Io { path, action, source }
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use calpe_core::array::NewArray;
    use calpe_core::format::COUNT_END;

    fn first_superblock(array: &NewArray) -> Superblock {
        let devices: Vec<Uuid> = (1..4).map(Uuid::from_u128).collect();
        array.superblocks(&devices).swap_remove(0)
    }

    #[test]
    fn what_the_host_is_short_of_is_waited_for_and_what_a_device_is_is_not() {
        let io = |errno| {
            let source = io::Error::from_raw_os_error(errno);
            DeviceError::Io { path: "m0".into(), action: "read it".into(), source }
        };
        let tries = |since: Instant, error: &dyn Fn() -> DeviceError, failures: u32| {
            let mut tries = 0;
            let outcome = patiently(since, || {
                tries += 1;
                if tries <= failures { Err(error()) } else { Ok(()) }
            });
            (outcome.is_ok(), tries)
        };
        let now = Instant::now();
        assert_eq!(tries(now, &|| io(libc::ENOMEM), 2), (true, 3));
        assert_eq!(tries(now, &|| io(libc::EIO), 2), (true, 3));
        assert_eq!(tries(now, &|| io(libc::ENOMEDIUM), 1), (false, 1));
        assert_eq!(tries(now, &|| DeviceError::NotFound { path: "m0".into() }, 1), (false, 1));
        let earlier = |limit: Duration| now.checked_sub(limit).expect("the machine has run for longer");
        assert_eq!(tries(earlier(PATIENCE), &|| io(libc::EIO), 1), (false, 1));
        assert_eq!(tries(earlier(PATIENCE), &|| io(libc::EMFILE), 1), (true, 2));
        assert_eq!(tries(earlier(SHORTAGE_PATIENCE), &|| io(libc::EMFILE), 1), (false, 1));
    }

    #[test]
    fn of_a_log_that_is_wiped_nothing_is_left_and_what_is_beside_it_stays() {
        let mut array = calpe_core::testing::small_array(2, 1);
        // Not a multiple of what is written at once.
        let log = array.regions.iter_mut().find(|region| region.kind == RegionKind::Log).unwrap();
        log.len = WIPED_AT_ONCE + (12 << 10);
        let log = *log;
        let superblock = first_superblock(&array);
        let bytes = superblock.device_bytes_min();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m0");
        let content: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8 | 1).collect();
        std::fs::write(&path, &content).unwrap();
        let device = Device::open(&path, Access::Exclusive).unwrap();
        wipe_logs(&device, superblock.part, &superblock.regions).unwrap();
        drop(device);
        let mut expected = content;
        expected[log.offset.0 as usize..(log.offset.0 + log.len) as usize].fill(0);
        assert!(std::fs::read(&path).unwrap() == expected);
    }

    #[test]
    fn a_device_that_is_back_in_an_older_state_is_not_the_one_that_was_lost() {
        let superblock = first_superblock(&calpe_core::testing::small_array(2, 1));
        let bytes = superblock.device_bytes_min();
        // A superblock overwrites half of the copies of the one before: each state is on a device of its own.
        let look = |witness: &Witness, sequence: u64, role: Role| {
            let dir = tempfile::tempdir().unwrap();
            let device = Device::create_sparse(&dir.path().join("m0"), bytes).unwrap();
            let mut shown = Superblock { sequence, role, ..superblock.clone() };
            if role == Role::Replaced {
                shown.members[0].uuid = Uuid::from_u128(50);
            }
            write_superblock(&device, &shown).unwrap();
            witness(&mut |offset, target| {
                device.read_at(offset, target).unwrap();
                Ok(())
            })
            .map_err(|error| error.to_string())
        };
        let lost = witness(bytes, superblock.array, superblock.device, 5);
        assert!(look(&*lost, 4, Role::Member).unwrap_err().contains("older state"));
        assert_eq!(look(&*lost, 5, Role::Member), Ok(()));
        assert_eq!(look(&*lost, 9, Role::Member), Ok(()));
        assert!(look(&*lost, 8, Role::Member).unwrap_err().contains("superblock 8 after 9"));
        assert!(look(&*lost, 10, Role::Replaced).unwrap_err().contains("was replaced"));
        // Sequences that no array can have counted are not remembered either: the device may be back as it
        // was.
        assert!(look(&*lost, COUNT_END - 2, Role::Member).unwrap_err().contains("no array has counted"));
        assert_eq!(look(&*lost, 10, Role::Member), Ok(()));
        let other = witness(bytes, superblock.array, Uuid::from_u128(99), 0);
        assert!(look(&*other, 11, Role::Member).is_err());
    }
}
