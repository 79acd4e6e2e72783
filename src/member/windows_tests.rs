//! Windows of a device through everything that reads or writes one.
#![allow(unsafe_code)] // a statx of zeroes; the block argues for itself

use super::held::{self, Stage};
use super::{Access, Device, DeviceError, DeviceReads, MemberIo, Ring};
use calpe_core::block_io::{DeviceId, IoFault, IoOp, IoToken, IoValue, Pool};
use calpe_core::units::{ByteOffset, Timestamp};
use proptest::prelude::*;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const TAG: u32 = 7;
const READS: u32 = 8;
const MIB: u64 = 1 << 20;
const BYTES: u64 = 4 * MIB;
const ID: DeviceId = DeviceId(1);

/// How the engine reaches a file.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Disk,
    Memory,
    HoldsUp,
}

fn created(kind: Kind) -> (tempfile::TempDir, Device) {
    let dir = match kind {
        Kind::Memory => tempfile::tempdir_in("/dev/shm").unwrap(),
        Kind::Disk | Kind::HoldsUp => tempfile::tempdir().unwrap(),
    };
    let mut device = Device::create_sparse(&dir.path().join("m"), BYTES).unwrap();
    if matches!(kind, Kind::HoldsUp) {
        device.hold_up();
    }
    (dir, device)
}

/// An engine of one thread with one window.
struct Engine {
    ring: Ring,
    pool: Pool,
    members: MemberIo,
}

impl Engine {
    fn new(window: Device) -> Engine {
        let (mut ring, pool) = (Ring::new().unwrap(), Pool::new(4 << 20).unwrap());
        let mut members = MemberIo::new(TAG, &pool, 1);
        members.add(&mut ring, ID, 0, window);
        members.pass_time(Timestamp(1));
        Engine { ring, pool, members }
    }

    fn run(&mut self, op: IoOp) -> Result<IoValue, IoFault> {
        self.members.submit(&mut self.ring, 0, ID, IoToken(1), op);
        loop {
            if let Some(done) = self.members.next_finished() {
                return done.completion.result;
            }
            let mut events = Vec::new();
            self.ring.enter(Some(Duration::from_secs(10)), &mut events).unwrap();
            for event in events {
                self.members.complete(&mut self.ring, event.user_data, event.result);
            }
        }
    }

    fn write(&mut self, offset: u64, len: usize, byte: u8) {
        let mut buf = self.pool.alloc(len);
        buf.fill(byte);
        self.run(IoOp::Write { offset: ByteOffset(offset), buf: buf.freeze(), fua: true }).unwrap();
    }

    fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        match self.run(IoOp::Read { offset: ByteOffset(offset), buf: self.pool.alloc(len) }).unwrap() {
            IoValue::Data(buf) => buf.to_vec(),
            other => panic!("{other:?}"),
        }
    }

    /// As another thread would read it: in this thread, and through a ring.
    fn read_beside(&mut self, offset: u64, len: usize) -> Option<[Vec<u8>; 2]> {
        let shared = self.members.shared(ID)?;
        let mut now = self.pool.alloc(len);
        assert!(shared.begin(0) && shared.read_now(&mut now, offset));
        shared.end(0);
        let mut reads = DeviceReads::new(READS, 0);
        assert!(shared.begin(0));
        reads.submit(&mut self.ring, Arc::clone(&shared), self.pool.alloc(len), offset, (0, 0));
        let mut events = Vec::new();
        while events.is_empty() {
            self.ring.enter(Some(Duration::from_secs(10)), &mut events).unwrap();
        }
        let (_, buf) = reads.complete(events[0].user_data, events[0].result).unwrap();
        Some([now.to_vec(), buf.unwrap().to_vec()])
    }
}

fn content(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

#[test]
fn engines_of_several_windows_keep_to_their_own() {
    for kind in [Kind::Disk, Kind::Memory, Kind::HoldsUp] {
        let (dir, device) = created(kind);
        let windows = device.windows(&[0..MIB, MIB..2 * MIB, 2 * MIB..BYTES]);
        drop(device);
        let mut engines: Vec<Engine> = windows.into_iter().map(Engine::new).collect();
        for (engine, byte) in engines.iter_mut().zip(1..) {
            let end = engine.members.device(ID).unwrap().facts().bytes;
            engine.write(0, 4096, byte);
            engine.write(end - 8192, 8192, byte);
            engine.run(IoOp::Zero { offset: ByteOffset(end - 4096), len: 4096, may_unmap: true }).unwrap();
            engine.run(IoOp::Flush).unwrap();
        }
        let mut expected = vec![0; BYTES as usize];
        for (byte, range) in [(1, 0..MIB), (2, MIB..2 * MIB), (3, 2 * MIB..BYTES)] {
            let (start, end) = (range.start as usize, range.end as usize);
            expected[start..start + 4096].fill(byte);
            expected[end - 8192..end - 4096].fill(byte);
        }
        assert!(content(&dir.path().join("m")) == expected, "{kind:?}");
        for (engine, byte) in engines.iter_mut().zip(1..) {
            let mut first = vec![byte; 8192];
            first[4096..].fill(0);
            assert_eq!(engine.read(0, 8192), first, "{kind:?}");
            let beside = engine.read_beside(0, 8192);
            assert_eq!(beside.is_none(), matches!(kind, Kind::HoldsUp));
            assert!(beside.into_iter().flatten().all(|read| read == first), "{kind:?}");
        }
        let extents = IoOp::Extents { offset: ByteOffset(0), len: MIB };
        let IoValue::Extents(extents) = engines[1].run(extents).unwrap() else { panic!("no extents") };
        assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), MIB);
        assert_eq!(extents.iter().any(|extent| extent.hole), matches!(kind, Kind::Memory), "{extents:?}");
    }
}

#[test]
fn the_lock_lasts_until_the_last_window_is_dropped() {
    let (dir, device) = created(Kind::Disk);
    let path = dir.path().join("m");
    let key = device.held().unwrap().key();
    let mut windows = device.windows(&[0..MIB, MIB..BYTES]);
    drop(device);
    let last = windows.pop().unwrap();
    let mut engine = Engine::new(windows.pop().unwrap());
    engine.write(0, 4096, 1);
    engine.members.release(ID);
    assert!(engine.members.device(ID).is_none(), "nothing is in flight");
    assert_eq!(held::now(key), Some(Stage::Open));
    assert!(matches!(Device::open(&path, Access::Exclusive), Err(DeviceError::Locked { .. })));
    last.write_at(0, &[2; 4096]).unwrap();
    last.close();
    assert_eq!(held::now(key), None);
    let again = Device::open(&path, Access::Exclusive).unwrap();
    let mut both = [0; 2];
    again.read_at(0, &mut both[..1]).unwrap();
    again.read_at(MIB, &mut both[1..]).unwrap();
    assert_eq!(both, [1, 2]);
}

#[test]
fn further_windows_come_from_one_that_is_in_service_unless_its_file_is_handed_over() {
    let (dir, device) = created(Kind::Disk);
    let path = dir.path().join("m");
    let mut window = device.window(&(MIB..2 * MIB));
    device.close();
    let whole = window.whole().expect("its file is open");
    assert_eq!((whole.facts().bytes, whole.path()), (BYTES, path.as_path()));
    whole.window(&(0..MIB)).write_at(0, &[7; 4096]).unwrap();
    whole.window(&(MIB..2 * MIB)).write_at(0, &[8; 4096]).unwrap();
    let mut read = vec![0; 4096];
    whole.read_at(0, &mut read).unwrap();
    assert_eq!(read, [7; 4096]);
    window.read_at(0, &mut read).unwrap();
    assert_eq!(read, [8; 4096]);
    window.hand_over();
    assert!(window.whole().is_none());
    drop(window);
    assert!(matches!(Device::open(&path, Access::Exclusive), Err(DeviceError::Locked { .. })));
    whole.close();
    Device::open(&path, Access::Exclusive).unwrap();
}

#[test]
fn every_window_sees_that_the_file_is_gone_or_shorter() {
    let (_dir, device) = created(Kind::Disk);
    let windows = device.windows(&[0..MIB, MIB..BYTES]);
    let stat = |bytes| {
        // SAFETY: zeroes are a valid statx.
        let mut stat: libc::statx = unsafe { std::mem::zeroed() };
        let meta = std::fs::metadata(device.path()).unwrap();
        (stat.stx_dev_major, stat.stx_dev_minor) = (libc::major(meta.dev()), libc::minor(meta.dev()));
        (stat.stx_mode, stat.stx_ino, stat.stx_size) = (libc::S_IFREG as u16, meta.ino(), bytes);
        stat
    };
    for window in &windows {
        assert_eq!(window.facts().exact_bytes, BYTES);
        assert_eq!(window.has_vanished(Ok(&stat(BYTES))), None);
        assert_eq!(window.has_vanished(Ok(&stat(BYTES - 512))), Some(libc::ENODATA));
        assert_eq!(window.has_vanished(Err(libc::ENOENT)), Some(libc::ENOENT));
    }
}

#[test]
#[should_panic(expected = "of a window of 1048576 bytes")]
fn an_operation_that_leaves_its_window_is_a_broken_invariant() {
    let (_dir, device) = created(Kind::Memory);
    let mut engine = Engine::new(device.window(&(0..MIB)));
    engine.write(MIB - 4096, 8192, 1);
}

fn ranges() -> impl Strategy<Value = Vec<Range<u64>>> {
    let cuts = prop::collection::btree_set(1u64..BYTES / 4096, 1..6);
    cuts.prop_map(|cuts| {
        let mut starts: Vec<u64> = cuts.into_iter().map(|block| block * 4096).collect();
        starts.insert(0, 0);
        let ends = starts[1..].iter().copied().chain([BYTES]);
        starts.iter().copied().zip(ends).map(|(start, end)| start..end).collect()
    })
}

/// A window, a place in it in parts of its length, a length in blocks, and what to do there.
type Step = (usize, f64, u64, u8);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_window_is_as_a_device_of_its_own(
        ranges in ranges(),
        steps in prop::collection::vec((0usize..6, 0.0..1.0, 1u64..20, 0u8..6), 1..40),
    ) {
        let (dir, device) = created(Kind::Memory);
        let windows = device.windows(&ranges);
        let mut models: Vec<Vec<u8>> =
            ranges.iter().map(|range| vec![0; (range.end - range.start) as usize]).collect();
        let steps: Vec<Step> = steps;
        for (at, (window, place, blocks, action)) in steps.into_iter().enumerate() {
            let window = window % windows.len();
            let (device, model) = (&windows[window], &mut models[window]);
            let all = device.facts().bytes / 4096;
            let offset = ((all as f64 * place) as u64).min(all - 1) * 4096;
            let len = (blocks * 4096).min(device.facts().bytes - offset);
            let range = offset as usize..(offset + len) as usize;
            match action {
                0 => {
                    prop_assert!(device.discard(offset, len).unwrap());
                    model[range].fill(0);
                }
                1 => device.preallocate(offset, len).unwrap(),
                2 => {
                    let mut read = vec![1; len as usize - 1];
                    device.read_at(offset + 1, &mut read).unwrap();
                    prop_assert!(read == model[range.start + 1..range.end]);
                }
                3 => prop_assert_eq!(device.extents(offset, len).iter().map(|e| e.len).sum::<u64>(), len),
                _ => {
                    device.write_at(offset, &vec![at as u8 + 1; len as usize]).unwrap();
                    model[range].fill(at as u8 + 1);
                }
            }
            let beyond = device.write_at(device.facts().bytes - 4096, &[9; 8192]);
            let is_refused = matches!(beyond, Err(DeviceError::BadRange { .. }));
            prop_assert!(is_refused, "{:?}", beyond);
        }
        prop_assert!(content(&dir.path().join("m")) == models.concat());
        for (window, model) in windows.iter().zip(&models) {
            let part = window.window(&(4096.min(window.facts().bytes)..window.facts().bytes));
            let mut read = vec![1; part.facts().bytes as usize];
            part.read_at(0, &mut read).unwrap();
            prop_assert!(read == model[model.len() - read.len()..], "a window of a window");
        }
    }
}
