//! Superblocks and signatures on opened devices: the few waiting reads and writes that creation, import and inspection
//! share. Knows where bytes lie from `format`; must not know of arrays that run.

use crate::format::{
    COPY_BYTES, FormatError, Inspection, NewestError, RegionKind, SIGNATURE_WINDOW, Signature, Superblock,
    all_copy_offsets, newest, recognise, superblock_offsets,
};
use crate::member::{Device, DeviceError};

/// Bytes that are zeroed at each end of a device whose content is given up: every place where a signature can be.
const WIPED_BYTES: u64 = SIGNATURE_WINDOW;

/// The four copies as they can be read and decoded; an I/O error as its text.
pub fn read_copies(device: &Device) -> [Result<Result<Superblock, FormatError>, String>; 4] {
    all_copy_offsets(device.facts().bytes).map(|offset| {
        let mut copy = vec![0; COPY_BYTES];
        device.read_at(offset.0, &mut copy).map_err(|error| error.to_string())?;
        Ok(Superblock::decode(&copy))
    })
}

/// The superblock that counts. A copy that cannot be read is as good as not there; when no copy can be read, the
/// device is told to be no member.
///
/// # Errors
/// See [`newest`].
pub fn read_superblock(device: &Device) -> Result<Superblock, NewestError> {
    newest(read_copies(device).into_iter().flatten())
}

/// Whether a device still has the room that its superblock speaks of: one that was cut off since would take writes
/// beyond its end, and read as zeroes what was there.
///
/// # Errors
/// [`DeviceError::CutOff`].
pub fn check_length(device: &Device, superblock: &Superblock) -> Result<(), DeviceError> {
    let (bytes, needed) = (device.facts().bytes, superblock.device_bytes_min());
    if bytes < needed {
        return Err(DeviceError::CutOff { path: device.path().into(), bytes, needed });
    }
    Ok(())
}

/// Writes a superblock to the slot of its sequence at both ends, and flushes.
///
/// # Errors
/// When the device fails; one of the copies may then have been written.
pub fn write_superblock(device: &Device, superblock: &Superblock) -> Result<(), DeviceError> {
    let copy = superblock.encode();
    for offset in superblock_offsets(device.facts().bytes, superblock.sequence) {
        device.write_at(offset.0, copy.as_slice())?;
    }
    device.flush()
}

/// Sets space aside for the log and the metadata pages of a member that has them, so that a filesystem that runs full
/// refuses data, which clients are told of, and never what keeps the array consistent.
///
/// # Errors
/// When there is no room.
pub fn reserve_regions(device: &Device, superblock: &Superblock) -> Result<(), DeviceError> {
    if superblock.redo.is_none() {
        return Ok(());
    }
    let regions = superblock.regions.iter().filter(|region| region.kind != RegionKind::Data);
    regions.into_iter().try_for_each(|region| device.preallocate(region.offset.0, region.len))
}

/// Zeroes both ends of a device, superblocks and all signatures with them, and flushes.
///
/// # Errors
/// When the device fails.
pub fn wipe_ends(device: &Device) -> Result<(), DeviceError> {
    let bytes = device.facts().bytes;
    let zeroes = vec![0; WIPED_BYTES.min(bytes) as usize];
    device.write_at(0, &zeroes)?;
    device.write_at(bytes - zeroes.len() as u64, &zeroes)?;
    device.flush()
}

/// What is recognised on a device.
///
/// # Errors
/// When its ends cannot be read: what cannot be read cannot be known to be worthless.
pub fn signatures(device: &Device) -> Result<Vec<Signature>, DeviceError> {
    let bytes = device.facts().bytes;
    let mut head = vec![0; SIGNATURE_WINDOW.min(bytes) as usize];
    let mut tail = head.clone();
    device.read_at(0, &mut head)?;
    device.read_at(bytes - tail.len() as u64, &mut tail)?;
    Ok(recognise(&head, &tail, bytes))
}

/// Everything that `calpe inspect` tells of a device.
#[must_use]
pub fn inspect(device: &Device) -> Inspection {
    Inspection::new(device.path().display().to_string(), device.facts().bytes, read_copies(device))
}
