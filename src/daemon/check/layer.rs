//! Members as a check sees them: reads go to their devices, writes go to memory. One thread for each device,
//! so that all of them read at once.
//!
//! Invariants: no device is written; a read returns what was written here before, and bytes that are to be
//! forgotten only once. Must not know what the bytes mean.

use crate::member::{Device, DeviceError, is_remote};
use calpe_core::block_io::{Completion, DeviceId, Extent, IoFault, IoFaultKind, IoOp, IoToken, IoValue};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Written bytes are kept as blocks of this size.
const BLOCK: usize = 4096;

/// Longest time between two calls of [`Layer::give_up_late`] that counts.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// Members over which an array runs without changing them.
#[derive(Debug)]
pub(super) struct Layer {
    workers: BTreeMap<DeviceId, Worker>,
    done: Receiver<Completion>,
    shared: Arc<Shared>,
    /// When [`Layer::give_up_late`] was last called.
    looked: Instant,
}

#[derive(Debug)]
struct Worker {
    /// None when the thread is to end.
    jobs: Option<Sender<(IoToken, IoOp)>>,
    thread: Option<JoinHandle<()>>,
    /// None for a remote device: its operations have limits of their own.
    path: Option<PathBuf>,
    /// How many operations have begun and ended: odd while one is under way.
    turns: Arc<AtomicU64>,
    /// `turns` at the last check, and for how long it had not changed.
    seen: (u64, Duration),
}

#[derive(Debug)]
struct Shared {
    /// Bytes of written blocks in memory.
    kept: AtomicU64,
    /// Whether writes to the forgotten bytes of any device are kept only until they are read back.
    forgets: AtomicBool,
    forgotten: Range<u64>,
}

/// A device and the writes to it.
#[derive(Debug)]
struct Covered {
    device: Device,
    /// By number; none for zeroes.
    blocks: BTreeMap<u64, Option<Box<[u8; BLOCK]>>>,
    /// Numbers of `blocks` that are kept until they are read.
    passing: BTreeSet<u64>,
    shared: Arc<Shared>,
}

impl Layer {
    /// Covers devices. `forgotten`: the bytes of every device that [`Layer::forget`] concerns.
    ///
    /// # Errors
    /// When there are no threads.
    pub(super) fn new(devices: Vec<(DeviceId, Device)>, forgotten: Range<u64>) -> io::Result<Layer> {
        let (sender, done) = channel();
        let shared = Arc::new(Shared { kept: AtomicU64::new(0), forgets: AtomicBool::new(false), forgotten });
        let mut workers = BTreeMap::new();
        for (id, device) in devices {
            let (jobs, queue) = channel();
            let (sender, shared) = (sender.clone(), Arc::clone(&shared));
            let path = Some(device.path()).filter(|path| !is_remote(path)).map(Path::to_path_buf);
            let turns = Arc::new(AtomicU64::new(0));
            let own_turns = Arc::clone(&turns);
            let thread = std::thread::Builder::new().name("check".into()).spawn(move || {
                let mut covered =
                    Covered { device, blocks: BTreeMap::new(), passing: BTreeSet::new(), shared };
                for (token, op) in queue {
                    own_turns.fetch_add(1, Ordering::Relaxed);
                    let result = covered.execute(op);
                    own_turns.fetch_add(1, Ordering::Relaxed);
                    // Nobody waits for it when the check has ended early.
                    let _ = sender.send(Completion { token, result });
                }
            })?;
            let seen = (0, Duration::ZERO);
            workers.insert(id, Worker { jobs: Some(jobs), thread: Some(thread), path, turns, seen });
        }
        Ok(Layer { workers, done, shared, looked: Instant::now() })
    }

    /// Starts an operation; its end comes out of [`Layer::done`].
    ///
    /// # Panics
    /// When the device is not one of the layer's.
    pub(super) fn submit(&self, device: DeviceId, token: IoToken, op: IoOp) {
        let jobs = self.workers[&device].jobs.as_ref().expect("taken away only by drop");
        jobs.send((token, op)).expect("a worker outlives its queue");
    }

    /// Where operations end.
    #[must_use]
    pub(super) fn done(&self) -> &Receiver<Completion> {
        &self.done
    }

    /// The path of a device whose operation has been under way for longer than `limit`; to be called about
    /// once a second. Once there is one, no thread is waited for at the end. Time while the process was
    /// stopped does not count.
    pub(super) fn give_up_late(&mut self, limit: Duration) -> Option<PathBuf> {
        let passed = std::mem::replace(&mut self.looked, Instant::now()).elapsed().min(LOOK_MAX);
        let mut late = None;
        for worker in self.workers.values_mut() {
            let turns = worker.turns.load(Ordering::Relaxed);
            let same = turns % 2 == 1 && turns == worker.seen.0;
            worker.seen = (turns, if same { worker.seen.1 + passed } else { Duration::ZERO });
            if worker.seen.1 > limit && late.is_none() {
                late = worker.path.clone();
            }
        }
        if late.is_some() {
            self.workers.values_mut().for_each(|worker| worker.thread = None);
        }
        late
    }

    /// Bytes of memory for what was written.
    #[must_use]
    pub(super) fn kept_bytes(&self) -> u64 {
        self.shared.kept.load(Ordering::Relaxed)
    }

    /// From now on, a write to the forgotten bytes is kept until it is read once: a scrub reads
    /// what it has rewritten, and nothing reads it after that.
    pub(super) fn forget(&self) {
        self.shared.forgets.store(true, Ordering::Relaxed);
    }

    /// From now on, every write is kept, including those that were to be forgotten.
    pub(super) fn keep_all(&self) {
        self.shared.forgets.store(false, Ordering::Relaxed);
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        for worker in self.workers.values_mut() {
            worker.jobs = None;
        }
        for thread in self.workers.values_mut().filter_map(|worker| worker.thread.take()) {
            // A panic was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl Covered {
    fn execute(&mut self, op: IoOp) -> Result<IoValue, IoFault> {
        match op {
            IoOp::Read { offset, mut buf } => {
                self.read(offset.0, &mut buf)?;
                self.forget_read(offset.0, buf.len() as u64);
                Ok(IoValue::Data(buf))
            }
            IoOp::Write { offset, buf, .. } => {
                self.write(offset.0, buf.len() as u64, Some(&buf))?;
                Ok(IoValue::Done)
            }
            IoOp::Zero { offset, len, .. } => {
                self.write(offset.0, len, None)?;
                Ok(IoValue::Done)
            }
            IoOp::Flush => Ok(IoValue::Done),
            // Calling everything data is correct.
            IoOp::Extents { len, .. } => Ok(IoValue::Extents(vec![Extent { len, hole: false }])),
        }
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), IoFault> {
        let end = offset + target.len() as u64;
        let blocks = offset / BLOCK as u64..end.div_ceil(BLOCK as u64);
        // Written bytes can be read, even where the device gives errors.
        if self.blocks.range(blocks.clone()).count() as u64 != blocks.end - blocks.start {
            self.device.read_at(offset, target).map_err(|error| fault(&error))?;
        }
        for (&number, block) in self.blocks.range(blocks) {
            let start = number * BLOCK as u64;
            let part = start.max(offset)..(start + BLOCK as u64).min(end);
            let (from, to) = ((part.start - offset) as usize, (part.end - offset) as usize);
            match block {
                Some(bytes) => {
                    let within = (part.start - start) as usize;
                    target[from..to].copy_from_slice(&bytes[within..within + to - from]);
                }
                None => target[from..to].fill(0),
            }
        }
        Ok(())
    }

    /// `bytes`: none for zeroes.
    fn write(&mut self, offset: u64, len: u64, bytes: Option<&[u8]>) -> Result<(), IoFault> {
        let end = offset + len;
        let forgotten = &self.shared.forgotten;
        let is_passing =
            self.shared.forgets.load(Ordering::Relaxed) && offset >= forgotten.start && end <= forgotten.end;
        for number in offset / BLOCK as u64..end.div_ceil(BLOCK as u64) {
            // Blocks that the replay has written stay.
            if is_passing && !self.blocks.contains_key(&number) {
                self.passing.insert(number);
            }
            let start = number * BLOCK as u64;
            let part = start.max(offset)..(start + BLOCK as u64).min(end);
            let whole = part.end - part.start == BLOCK as u64;
            if whole && bytes.is_none() {
                self.keep(number, None);
                continue;
            }
            let mut block = Box::new([0; BLOCK]);
            if !whole {
                let within_device = (self.device.facts().bytes - start).min(BLOCK as u64) as usize;
                self.read(start, &mut block[..within_device])?;
            }
            let target = &mut block[(part.start - start) as usize..(part.end - start) as usize];
            match bytes {
                Some(bytes) => {
                    let from = (part.start - offset) as usize;
                    target.copy_from_slice(&bytes[from..from + target.len()]);
                }
                None => target.fill(0),
            }
            self.keep(number, Some(block));
        }
        Ok(())
    }

    /// Drops the blocks that were kept until they are read, once all of each was read.
    fn forget_read(&mut self, offset: u64, len: u64) {
        let whole = offset.div_ceil(BLOCK as u64)..(offset + len) / BLOCK as u64;
        let forgets = self.shared.forgets.load(Ordering::Relaxed);
        if !forgets || self.passing.is_empty() || whole.is_empty() {
            return;
        }
        let read: Vec<u64> = self.passing.range(whole).copied().collect();
        for number in read {
            self.passing.remove(&number);
            if let Some(Some(_)) = self.blocks.remove(&number) {
                self.shared.kept.fetch_sub(BLOCK as u64, Ordering::Relaxed);
            }
        }
    }

    fn keep(&mut self, number: u64, block: Option<Box<[u8; BLOCK]>>) {
        let bytes = |block: &Option<Box<_>>| if block.is_some() { BLOCK as u64 } else { 0 };
        let now = bytes(&block);
        let before = self.blocks.insert(number, block).map_or(0, |block| bytes(&block));
        self.shared.kept.fetch_add(now, Ordering::Relaxed);
        self.shared.kept.fetch_sub(before, Ordering::Relaxed);
    }
}

/// The device stays in service: the other members make up for what it cannot read.
fn fault(error: &DeviceError) -> IoFault {
    let errno = match error {
        DeviceError::Io { source, .. } => source.raw_os_error(),
        _ => None,
    };
    IoFault { kind: IoFaultKind::Medium, errno: errno.unwrap_or(libc::EIO) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::member::Access;
    use calpe_core::block_io::Pool;
    use calpe_core::units::ByteOffset;

    const MIB: u64 = 1 << 20;
    const ID: DeviceId = DeviceId(7);

    struct Bench {
        _dir: tempfile::TempDir,
        path: PathBuf,
        layer: Layer,
        pool: Pool,
    }

    impl Bench {
        /// A device of 1 MiB of sevens, whose second half can be forgotten.
        fn new() -> Bench {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("m");
            std::fs::write(&path, vec![7; MIB as usize]).unwrap();
            let device = Device::open(&path, Access::Still).unwrap();
            let layer = Layer::new(vec![(ID, device)], MIB / 2..MIB).unwrap();
            Bench { _dir: dir, path, layer, pool: Pool::new(4 << 20).unwrap() }
        }

        fn run(&self, op: IoOp) -> Result<IoValue, IoFault> {
            self.layer.submit(ID, IoToken(3), op);
            let completion = self.layer.done().recv().unwrap();
            assert_eq!(completion.token, IoToken(3));
            completion.result
        }

        fn write(&self, offset: u64, byte: u8, len: usize) {
            let mut buf = self.pool.alloc(len);
            buf.fill(byte);
            self.run(IoOp::Write { offset: ByteOffset(offset), buf: buf.freeze(), fua: true }).unwrap();
        }

        fn read(&self, offset: u64, len: usize) -> Vec<u8> {
            match self.run(IoOp::Read { offset: ByteOffset(offset), buf: self.pool.alloc(len) }).unwrap() {
                IoValue::Data(buf) => buf.to_vec(),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn what_is_written_is_read_back_and_the_device_stays_as_it_was() {
        let bench = Bench::new();
        bench.write(4096, 1, 8192);
        bench.write(4096 + 512, 2, 512);
        bench.run(IoOp::Zero { offset: ByteOffset(8192), len: 6144, may_unmap: true }).unwrap();
        bench.run(IoOp::Flush).unwrap();
        let mut expected = vec![7; 20480];
        expected[4096..8192].fill(1);
        expected[4608..5120].fill(2);
        expected[8192..14336].fill(0);
        assert!(bench.read(0, 20480) == expected);
        assert!(bench.read(4096 + 512, 4096) == expected[4608..8704], "across blocks");
        // The blocks written, except blocks that are all zeroes, which take no memory.
        assert_eq!(bench.layer.kept_bytes(), 2 * 4096);
        assert!(std::fs::read(&bench.path).unwrap() == vec![7; MIB as usize]);
    }

    #[test]
    fn what_is_to_be_forgotten_takes_no_memory_once_it_was_read() {
        let bench = Bench::new();
        bench.write(MIB - 4096, 1, 4096);
        bench.layer.forget();
        bench.write(MIB / 2, 2, 65536);
        bench.write(0, 3, 4096);
        assert!(bench.read(MIB / 2, 65536) == [2; 65536], "as a scrub reads what it has rewritten");
        assert_eq!(bench.layer.kept_bytes(), 2 * 4096);
        assert_eq!(bench.read(MIB / 2, 512), [7; 512]);
        assert_eq!((bench.read(MIB - 4096, 512)[0], bench.read(0, 512)[0]), (1, 3));
    }

    #[test]
    fn an_operation_that_hangs_is_told_and_its_thread_not_waited_for() {
        let mut bench = Bench::new();
        assert_eq!(bench.layer.give_up_late(Duration::ZERO), None, "nothing is under way");
        bench.layer.workers[&ID].turns.store(7, Ordering::Relaxed);
        let look = |bench: &mut Bench, ago: u64| {
            let ago = Duration::from_millis(ago);
            bench.layer.looked = Instant::now().checked_sub(ago).expect("the machine has run for longer");
            bench.layer.give_up_late(Duration::from_millis(1500))
        };
        assert_eq!(look(&mut bench, 900), None, "it may have begun just now");
        assert_eq!(look(&mut bench, 5000), None, "the process was stopped");
        bench.layer.workers[&ID].turns.store(9, Ordering::Relaxed);
        assert_eq!(look(&mut bench, 900), None, "it is another operation");
        assert_eq!(look(&mut bench, 900), None);
        let path = bench.path.clone();
        assert_eq!(look(&mut bench, 900), Some(path));
        assert!(bench.layer.workers[&ID].thread.is_none());
    }

    #[test]
    fn a_read_beyond_the_device_fails_and_nothing_else_does() {
        let bench = Bench::new();
        let read = IoOp::Read { offset: ByteOffset(MIB), buf: bench.pool.alloc(4096) };
        assert_eq!(bench.run(read).unwrap_err().kind, IoFaultKind::Medium);
        assert_eq!(bench.read(0, 4096), [7; 4096]);
    }
}
