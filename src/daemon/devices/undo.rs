//! The content of a device where a creation writes, to restore it when the creation fails.
//!
//! Invariants: read before the first byte is written; restoring writes only what differs, so a device that
//! took no write is not written. Knows ranges and bytes; must not know what they mean.

use crate::member::{Device, DeviceError};

/// Bytes that are compared at once: few enough that ends of mostly zeroes take little memory.
const PIECE_BYTES: u64 = 64 << 10;

/// The content of some ranges of a device, and the holes in these and other ranges.
#[derive(Debug, Default)]
pub(super) struct Undo {
    pieces: Vec<Piece>,
    /// Start and length.
    holes: Vec<(u64, u64)>,
}

#[derive(Debug)]
struct Piece {
    offset: u64,
    len: u64,
    /// None: zeroes.
    bytes: Option<Vec<u8>>,
}

impl Undo {
    /// Remembers what `written` ranges hold, and which parts of them and of `allocated` ranges are
    /// holes. Ranges are starts and lengths.
    ///
    /// # Errors
    /// When the device cannot be read: its content could not be restored.
    pub(super) fn of(
        device: &Device,
        written: &[(u64, u64)],
        allocated: &[(u64, u64)],
    ) -> Result<Undo, DeviceError> {
        let mut undo = Undo::default();
        for &(offset, len) in written {
            let mut at = offset;
            while at < offset + len {
                let mut bytes = vec![0; PIECE_BYTES.min(offset + len - at) as usize];
                device.read_at(at, &mut bytes)?;
                let len = bytes.len() as u64;
                let bytes = Some(bytes).filter(|bytes| bytes.iter().any(|byte| *byte != 0));
                undo.pieces.push(Piece { offset: at, len, bytes });
                at += len;
            }
        }
        // Space that was allocated and never written looks like a hole; a file that is not sparse
        // has no holes.
        if device.is_sparse() {
            for &(offset, len) in written.iter().chain(allocated) {
                let mut at = offset;
                for extent in device.extents(offset, len) {
                    if extent.hole {
                        undo.holes.push((at, extent.len));
                    }
                    at += extent.len;
                }
            }
        }
        Ok(undo)
    }

    /// Restores content and holes.
    ///
    /// # Errors
    /// The first failure; the rest is restored in spite of it.
    pub(super) fn give_back(&self, device: &Device) -> Result<(), DeviceError> {
        let mut result = Ok(());
        for piece in &self.pieces {
            result = result.and(restore(device, piece));
        }
        for &(offset, len) in &self.holes {
            result = result.and(device.discard(offset, len).map(|_| ()));
        }
        result.and(device.flush())
    }
}

fn restore(device: &Device, piece: &Piece) -> Result<(), DeviceError> {
    let mut now = vec![0; piece.len as usize];
    device.read_at(piece.offset, &mut now)?;
    let is_same = match &piece.bytes {
        Some(bytes) => now == *bytes,
        None => now.iter().all(|byte| *byte == 0),
    };
    match &piece.bytes {
        _ if is_same => Ok(()),
        Some(bytes) => device.write_at(piece.offset, bytes),
        None => device.write_at(piece.offset, &vec![0; piece.len as usize]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::member::Access;
    use std::fs::{self, File};
    use std::os::unix::fs::{FileExt, MetadataExt};

    const MIB: u64 = 1 << 20;

    #[test]
    fn content_and_holes_come_back_and_what_was_allocated_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let file = File::create(&path).unwrap();
        file.set_len(4 * MIB).unwrap();
        file.write_all_at(&[7; 4096], 8192).unwrap();
        // Zeroes with space of their own.
        file.write_all_at(&vec![0; 128 << 10], MIB).unwrap();
        file.sync_all().unwrap();
        let facts = |path| fs::metadata(path).map(|meta| (meta.len(), meta.blocks())).unwrap();
        let (before, content) = (facts(&path), fs::read(&path).unwrap());
        let device = Device::open(&path, Access::Exclusive).unwrap();
        let undo = Undo::of(&device, &[(0, 2 * MIB)], &[(2 * MIB, MIB)]).unwrap();
        device.write_at(0, &vec![9; 2 * MIB as usize]).unwrap();
        device.preallocate(2 * MIB, MIB).unwrap();
        device.flush().unwrap();
        assert!(facts(&path).1 > before.1);
        undo.give_back(&device).unwrap();
        assert!(fs::read(&path).unwrap() == content);
        assert_eq!(facts(&path), before);
    }

    #[test]
    fn a_file_that_has_all_its_space_keeps_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        File::create(&path).unwrap().set_len(MIB).unwrap();
        let device = Device::open(&path, Access::Exclusive).unwrap();
        device.preallocate(0, MIB).unwrap();
        assert!(!device.is_sparse());
        Undo::of(&device, &[(0, MIB)], &[]).unwrap().give_back(&device).unwrap();
        assert!(!device.is_sparse());
    }
}
