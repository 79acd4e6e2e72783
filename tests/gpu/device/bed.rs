//! A device with all its slots in flight, and cases whose outcome is known: what the CPU makes of the same
//! job. Outputs are poisoned before, with poison around them that must be there after.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use calpe_core::block_io::{Buf, BufMut, Pool};
use calpe_core::codec::{BlockHasher, Codec, CodecJob, Column, Outputs, Transform};
use calpe_core::testing::Random;
use calpe_gpu::cuda::{CudaDevice, CudaDriver, Tuning};
use calpe_gpu::device::{Device, DeviceError, Digest, Driver, HostRange, Work};

/// What outputs hold before, and what lies around them for good.
const POISON: u8 = 0xA5;

const BLOCK: usize = 4096;

/// Memory that the device registers.
const POOL_BYTES: usize = 512 << 20;

/// Longer than any batch of this suite takes on any device.
const PATIENCE: Duration = Duration::from_secs(30);

/// Says "require" where a missing device is a failure.
const VARIABLE: &str = "CALPE_GPU_TEST";

/// One test at a time has the device: memory is for one, and messages come in order.
static TURN: Mutex<()> = Mutex::new(());

/// The driver if there is a device; says so if there is none.
pub(super) fn driver(tuning: Tuning) -> Option<CudaDriver> {
    let driver = CudaDriver::new(tuning);
    match driver.devices() {
        Ok(_) => Some(driver),
        Err(error) => {
            let required = std::env::var(VARIABLE).is_ok_and(|value| value == "require");
            assert!(!required, "{VARIABLE}=require, and there is no device: {error}");
            println!("skipped: {error}");
            None
        }
    }
}

pub(super) fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where the bytes of a case lie.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// In the registered slab, every piece by itself.
    Slab,
    /// There, the pieces of one column behind one another.
    Neighbours,
    /// There, at addresses that are multiples of 16 only.
    Uneven,
    /// In memory that the driver does not know.
    Unknown,
    /// Some of each.
    Mixed,
}

impl Place {
    pub(super) const ALL: [Place; 5] =
        [Place::Slab, Place::Neighbours, Place::Uneven, Place::Unknown, Place::Mixed];
}

/// Memory of a piece: the bytes at `at`, poison around them when they are an output.
struct Held {
    buf: BufMut,
    at: usize,
}

/// A batch and what it should come to.
pub(super) struct Case {
    name: String,
    transform: Option<Transform>,
    hash: bool,
    length: usize,
    inputs: Vec<Buf>,
    outputs: Vec<Vec<u8>>,
    digests: Vec<Digest>,
    /// How many outputs have a place.
    kept: usize,
    /// (column, offset, bytes, memory) of inputs that are not whole buffers.
    scattered: Option<Vec<(usize, usize, usize, Held)>>,
    places: Vec<(usize, usize, usize, Held)>,
}

impl Case {
    /// Random inputs of `length` for a transform and `extra` columns beyond its own.
    pub(super) fn of(
        bed: &Bed,
        transform: Option<Transform>,
        extra: usize,
        length: usize,
        hash: bool,
        noise: &mut Random,
    ) -> Case {
        let columns = transform.as_ref().map_or(0, Transform::inputs) + extra;
        let inputs = (0..columns)
            .map(|_| {
                let mut buf = bed.pool.alloc(length);
                noise.fill(&mut buf);
                buf.freeze()
            })
            .collect();
        Case::with(bed, transform, inputs, hash)
    }

    /// The same for given inputs.
    pub(super) fn with(bed: &Bed, transform: Option<Transform>, inputs: Vec<Buf>, hash: bool) -> Case {
        let length = inputs[0].len();
        let rows = transform.as_ref().map_or(0, Transform::outputs);
        let outputs = match rows {
            0 => Outputs::Hashed,
            _ => Outputs::Into((0..rows).map(|_| bed.pool.alloc(length)).collect()),
        };
        let job = CodecJob {
            transform: transform.clone(),
            hasher: hash.then_some(BlockHasher::Blake3),
            inputs: inputs.iter().cloned().map(Column::Shared).collect(),
            outputs,
        };
        let coded = job.run();
        let outputs: Vec<Vec<u8>> = coded.outputs.iter().map(|output| output.to_vec()).collect();
        let digests = coded.hashes.iter().map(|hash| hash.0).collect();
        let case = Case {
            name: String::new(),
            kept: rows,
            transform,
            hash,
            length,
            inputs,
            outputs,
            digests,
            scattered: None,
            places: Vec::new(),
        };
        case.place_outputs(bed)
    }

    /// Lost columns of a codeword from the first k others.
    pub(super) fn recovering(bed: &Bed, codec: &Codec, word: &[Buf], lost: &[usize]) -> Case {
        let present: Vec<usize> =
            (0..word.len()).filter(|column| !lost.contains(column)).take(codec.data()).collect();
        let transform = codec.recovery(&present, lost).expect("a pattern");
        let length = word[0].len();
        let case = Case {
            name: format!("{}+{}, lost {lost:?}", codec.data(), codec.parity()),
            kept: lost.len(),
            transform: Some(transform),
            hash: false,
            length,
            inputs: present.iter().map(|&column| word[column].clone()).collect(),
            outputs: lost.iter().map(|&column| word[column].to_vec()).collect(),
            digests: Vec::new(),
            scattered: None,
            places: Vec::new(),
        };
        case.place_outputs(bed)
    }

    fn place_outputs(mut self, bed: &Bed) -> Case {
        self.places =
            (0..self.kept).map(|column| (column, 0, self.length, held(&bed.pool, self.length, 0))).collect();
        self
    }

    pub(super) fn named(mut self, name: String) -> Case {
        self.name = name;
        self
    }

    /// Only the first `kept` outputs have a place; all are hashed.
    pub(super) fn keeping(mut self, kept: usize) -> Case {
        self.kept = kept;
        self.places.truncate(kept);
        self
    }

    /// All columns cut into pieces of at most `piece` bytes, somewhere else each.
    pub(super) fn scattered(mut self, bed: &Bed, piece: usize, place: Place, noise: &mut Random) -> Case {
        let mut cut: Vec<(bool, usize, usize, usize)> = Vec::new();
        for (is_output, columns) in [(false, self.inputs.len()), (true, self.kept)] {
            for column in 0..columns {
                cut.extend(
                    (0..self.length)
                        .step_by(piece)
                        .map(|at| (is_output, column, at, piece.min(self.length - at))),
                );
            }
        }
        noise.shuffle(&mut cut);
        let neighbours = matches!(place, Place::Neighbours);
        let mut inputs = Vec::new();
        self.places.clear();
        for (is_output, column, at, bytes) in cut {
            let which = match place {
                Place::Mixed => [Place::Slab, Place::Uneven, Place::Unknown][noise.index(3)],
                other => other,
            };
            let mut held = match which {
                Place::Uneven => held(&bed.pool, bytes, 16 * (1 + noise.index(255))),
                Place::Unknown => held(&bed.unknown, bytes, 0),
                Place::Slab | Place::Neighbours | Place::Mixed => held(&bed.pool, bytes, 0),
            };
            if is_output {
                self.places.push((column, at, bytes, held));
            } else if !neighbours {
                let start = held.at;
                held.buf[start..start + bytes].copy_from_slice(&self.inputs[column][at..at + bytes]);
                inputs.push((column, at, bytes, held));
            }
        }
        // Neighbours are the pieces of the inputs as they are.
        self.scattered = (!neighbours).then_some(inputs);
        self
    }

    fn work(&mut self, piece_bytes: usize) -> Work {
        let at = |column, offset, start: *mut u8, bytes| HostRange {
            column,
            offset,
            start: NonNull::new(start).expect("an address"),
            bytes,
        };
        let inputs = match &mut self.scattered {
            Some(pieces) => pieces
                .iter_mut()
                .map(|(column, offset, bytes, held)| {
                    // SAFETY: inside its buffer, which is longer.
                    let start = unsafe { held.buf.as_mut_ptr().add(held.at) };
                    at(*column, *offset, start, *bytes)
                })
                .collect(),
            None => {
                let mut pieces = Vec::new();
                for (column, buf) in self.inputs.iter().enumerate() {
                    for offset in (0..self.length).step_by(piece_bytes) {
                        let bytes = piece_bytes.min(self.length - offset);
                        pieces.push(at(column, offset, buf[offset..].as_ptr().cast_mut(), bytes));
                    }
                }
                pieces
            }
        };
        let outputs = self
            .places
            .iter_mut()
            .map(|(column, offset, bytes, held)| {
                // SAFETY: inside its buffer, which is longer.
                let start = unsafe { held.buf.as_mut_ptr().add(held.at) };
                at(*column, *offset, start, *bytes)
            })
            .collect();
        Work {
            transform: self.transform.clone(),
            hash: self.hash,
            columns: self.inputs.len(),
            column_bytes: self.length,
            inputs,
            outputs,
        }
    }

    fn check(&self, digests: &[Digest]) {
        let name = &self.name;
        assert_eq!(digests.len(), self.digests.len(), "{name}: number of digests");
        if let Some(at) = digests.iter().zip(&self.digests).position(|(got, wanted)| got != wanted) {
            let (column, block) = (at * BLOCK / self.length, at % (self.length / BLOCK));
            let wrong = digests.iter().zip(&self.digests).filter(|(got, wanted)| got != wanted).count();
            panic!(
                "{name}: {wrong} of {} digests are wrong, first column {column} block {block}",
                digests.len()
            );
        }
        for (column, at, bytes, held) in &self.places {
            let (before, rest) = held.buf.split_at(held.at);
            let (got, after) = rest.split_at(*bytes);
            let wanted = &self.outputs[*column][*at..at + bytes];
            if let Some(first) = got.iter().zip(wanted).position(|(got, wanted)| got != wanted) {
                let wrong = got.iter().zip(wanted).filter(|(got, wanted)| got != wanted).count();
                let poisoned = got.iter().all(|&byte| byte == POISON);
                panic!(
                    "{name}: output {column} at {at}: {wrong} of {bytes} bytes are wrong from {first} on, {:02x} for {:02x}{}",
                    got[first],
                    wanted[first],
                    if poisoned { "; nothing was written" } else { "" }
                );
            }
            let outside = before.iter().chain(after).position(|&byte| byte != POISON);
            assert!(outside.is_none(), "{name}: output {column} at {at}: written outside, byte {outside:?}");
        }
    }
}

/// Poisoned memory for `bytes` at `shift` bytes behind a page, with a page of poison before and after.
fn held(pool: &Pool, bytes: usize, shift: usize) -> Held {
    let mut buf = pool.alloc(bytes + shift + 2 * BLOCK);
    buf.fill(POISON);
    Held { buf, at: BLOCK + shift }
}

/// A device under test.
pub(super) struct Bed {
    device: Option<CudaDevice>,
    driver: CudaDriver,
    pub pool: Pool,
    unknown: Pool,
    wake: Sender<usize>,
    woken: Receiver<usize>,
    idle: Vec<usize>,
    flying: HashMap<usize, Case>,
    submitted: usize,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Bed {
    /// The first device; None where there is none.
    pub(super) fn open(tuning: Tuning) -> Option<Bed> {
        let turn = turn();
        let driver = driver(tuning)?;
        let pool = Pool::new(POOL_BYTES).expect("memory");
        let bed = Bed::on(driver, pool, Some(turn));
        Some(bed.unwrap_or_else(|error| panic!("opening the first device: {error}")))
    }

    fn on(driver: CudaDriver, pool: Pool, turn: Option<MutexGuard<'static, ()>>) -> Result<Bed, DeviceError> {
        let device = driver.open_cuda(0, std::slice::from_ref(&pool))?;
        let refusals = &device.registered().refusals;
        assert!(refusals.is_empty(), "the slab cannot be registered: {refusals:?}");
        let (wake, woken) = mpsc::channel();
        Ok(Bed {
            idle: (0..device.slots()).collect(),
            device: Some(device),
            driver,
            pool,
            unknown: Pool::new(POOL_BYTES / 4).expect("memory"),
            wake,
            woken,
            flying: HashMap::new(),
            submitted: 0,
            _turn: turn,
        })
    }

    /// Another device on the same GPU and memory.
    pub(super) fn beside(&self, tuning: Tuning) -> Result<Bed, DeviceError> {
        Bed::on(CudaDriver::new(tuning), self.pool.clone(), None)
    }

    /// The same after its device was given up.
    pub(super) fn again(&mut self) -> Result<(), DeviceError> {
        let device = self.driver.open_cuda(0, std::slice::from_ref(&self.pool))?;
        let refusals = &device.registered().refusals;
        assert!(refusals.is_empty(), "the slab is not reached by the next device: {refusals:?}");
        self.idle = (0..device.slots()).collect();
        // Late calls of the old device's slots end with its channel.
        (self.wake, self.woken) = mpsc::channel();
        self.device = Some(device);
        Ok(())
    }

    pub(super) fn device(&self) -> &CudaDevice {
        self.device.as_ref().expect("a device")
    }

    pub(super) fn driver(&self) -> &CudaDriver {
        &self.driver
    }

    /// A codeword of a code with random data.
    pub(super) fn codeword(&self, codec: &Codec, length: usize, noise: &mut Random) -> Vec<Buf> {
        let mut columns: Vec<BufMut> = (0..codec.data() + codec.parity())
            .map(|_| {
                let mut buf = self.pool.alloc(length);
                noise.fill(&mut buf);
                buf
            })
            .collect();
        let (data, parity) = columns.split_at_mut(codec.data());
        let data: Vec<&[u8]> = data.iter().map(|column| &column[..]).collect();
        let mut parity: Vec<(usize, &mut [u8])> =
            parity.iter_mut().map(|column| &mut column[..]).enumerate().collect();
        codec.encode(&data, &mut parity);
        columns.into_iter().map(BufMut::freeze).collect()
    }

    /// Starts a case as soon as a slot is idle, and checks those that end meanwhile.
    pub(super) fn submit(&mut self, case: Case) {
        while self.idle.is_empty() {
            self.finish_one();
        }
        self.try_start(case).unwrap_or_else(|refused| panic!("{}: {}", refused.0.name, refused.1));
    }

    fn try_start(&mut self, mut case: Case) -> Result<usize, Box<(Case, DeviceError)>> {
        let slot = self.idle.pop().expect("an idle slot");
        // Pieces of inputs that are one buffer: the device has to find that they are neighbours.
        let work = case.work([BLOCK, 4 * BLOCK, case.length][self.submitted % 3]);
        self.submitted += 1;
        let wake = self.wake.clone();
        let wake = Box::new(move || wake.send(slot).unwrap_or_default());
        // SAFETY: the case keeps inputs and outputs, and is kept in `flying` until finished, or leaked when
        // given up.
        match unsafe { self.device.as_mut().expect("a device").start(slot, work, wake) } {
            Ok(()) => {
                self.flying.insert(slot, case);
                Ok(slot)
            }
            Err(error) => {
                self.idle.push(slot);
                Err(Box::new((case, error)))
            }
        }
    }

    /// The error of a case that is not started.
    pub(super) fn refused(&mut self, case: Case) -> DeviceError {
        while self.idle.is_empty() {
            self.finish_one();
        }
        match self.try_start(case) {
            Err(refused) => refused.1,
            Ok(slot) => panic!("a batch that should be refused was started in slot {slot}"),
        }
    }

    fn finish_one(&mut self) {
        let slot = self.woken.recv_timeout(PATIENCE).unwrap_or_else(|_| {
            let names: Vec<&str> = self.flying.values().map(|case| case.name.as_str()).collect();
            panic!("no batch ended in {PATIENCE:?}; under way: {names:?}")
        });
        let case = self.flying.remove(&slot).expect("a case in this slot");
        match self.device.as_mut().expect("a device").finish(slot) {
            Ok(digests) => case.check(&digests),
            Err(error) => {
                let name = case.name.clone();
                std::mem::forget(case);
                panic!("{name}: {error}");
            }
        }
        self.idle.push(slot);
    }

    /// Waits for all cases and checks them.
    pub(super) fn drain(&mut self) {
        while !self.flying.is_empty() {
            self.finish_one();
        }
    }

    /// Starts a case that will fail, and says in which slot.
    pub(super) fn doomed(&mut self, case: Case) -> Result<usize, DeviceError> {
        self.try_start(case).map_err(|refused| {
            let (case, error) = *refused;
            // Some of it may have been queued.
            std::mem::forget(case);
            error
        })
    }

    /// The slot that wakes within a time.
    pub(super) fn woken_within(&self, time: Duration) -> Option<usize> {
        self.woken.recv_timeout(time).ok()
    }

    /// What the device says of a slot.
    pub(super) fn outcome(&mut self, slot: usize) -> Result<Vec<Digest>, DeviceError> {
        self.device.as_mut().expect("a device").finish(slot)
    }

    /// Gives the device up, and leaks what it may still touch.
    pub(super) fn abandon(&mut self) {
        Box::new(self.device.take().expect("a device")).abandon();
        self.flying.drain().for_each(|(_, case)| std::mem::forget(case));
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        // A failed assertion leaves batches under way: the device must be done before their memory goes.
        drop(self.device.take());
    }
}
