//! Devices in memory that compute on the CPU, through the addresses that they are given, and that
//! are as slow, wrong or stuck as a test wants. They check what a CUDA device may rely on, and
//! record violations.
//!
//! Invariant: without faults, a batch has the bytes of `CodecJob::run`. Must not know of the
//! runtime.
#![allow(unsafe_code)] // reads and writes at addresses; each block argues from the contract of `Device::start`

use std::collections::BTreeMap;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use calpe_core::block_io::Pool;
use calpe_core::codec::BlockHasher;

use super::device::{Device, DeviceError, DeviceInfo, Digest, Drill, Driver, HostRange, Wake, Work};

/// The byte that late devices write to memory that is no longer theirs.
pub const LATE_BYTE: u8 = 0xee;

/// How a device is.
#[derive(Clone, Debug)]
pub struct FakeDevice {
    /// Batches at a time.
    pub slots: usize,
    /// Bytes of each, columns in and out.
    pub slot_bytes: usize,
    /// Shortest time of each batch.
    pub latency: Duration,
    /// Bytes per second beyond that, one batch after the other.
    pub bytes_per_second: f64,
    /// Whether it takes pools that its process may only read.
    pub takes_read_only: bool,
}

impl Default for FakeDevice {
    fn default() -> FakeDevice {
        FakeDevice {
            slots: 3,
            slot_bytes: 8 << 20,
            latency: Duration::ZERO,
            bytes_per_second: f64::INFINITY,
            takes_read_only: true,
        }
    }
}

/// What happens to one batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// It cannot be started: the device fails.
    Start,
    /// It is not for this device: nothing is started, and the device continues.
    Refuse,
    /// It ends with an error.
    Finish,
    /// A bit of its outputs is wrong.
    WrongOutput,
    /// A bit of its digests is wrong.
    WrongDigest,
    /// A bit of every block of its outputs, and of every digest, is wrong.
    WrongEverywhere,
    /// One digest is missing.
    MissingDigest,
    /// It is done correctly after this time.
    Slow(Duration),
    /// Nobody is ever woken.
    Never,
    /// After this time all its outputs are overwritten with [`LATE_BYTE`], and `wake` is called.
    Late(Duration),
    /// The call that starts it takes this long.
    BlockStart(Duration),
    /// The call that takes its result takes this long.
    BlockFinish(Duration),
    /// The call that starts it panics.
    PanicStart,
    /// The call that takes its result panics.
    PanicFinish,
}

/// A driver of such devices. Clones are the same driver.
#[derive(Clone)]
pub struct FakeDriver {
    devices: Arc<Vec<Arc<Shared>>>,
    drill: Arc<Mutex<Fault>>,
}

struct Shared {
    info: DeviceInfo,
    shape: FakeDevice,
    state: Mutex<State>,
    /// The fault of the next batch on any device of the driver.
    drill: Arc<Mutex<Fault>>,
    /// Held while computing.
    engine: Mutex<()>,
}

#[derive(Default)]
struct State {
    batches: usize,
    bytes: usize,
    faults: BTreeMap<usize, Fault>,
    opens: usize,
    opens_to_fail: usize,
    /// Whether a call that takes a result is blocked.
    is_stuck: bool,
    violations: Vec<String>,
}

impl FakeDriver {
    /// Some devices, numbered from 0.
    #[must_use]
    pub fn new(devices: Vec<FakeDevice>) -> FakeDriver {
        let drill = Arc::new(Mutex::new(Fault::None));
        let shared = |(index, shape): (usize, FakeDevice)| {
            let (name, uuid) = (format!("Fake {index}"), format!("fake-{index}"));
            let info = DeviceInfo { index, name, uuid, driver: "fake".to_owned(), memory_bytes: 1 << 30 };
            let (state, drill) = (Mutex::default(), Arc::clone(&drill));
            Arc::new(Shared { info, shape, state, drill, engine: Mutex::new(()) })
        };
        let devices = Arc::new(devices.into_iter().enumerate().map(shared).collect());
        FakeDriver { devices, drill }
    }

    /// Gives a fault to the batch of a device that starts after `after` others from now on.
    pub fn inject(&self, device: usize, after: usize, fault: Fault) {
        let mut state = self.devices[device].lock();
        let at = state.batches + after;
        state.faults.insert(at, fault);
    }

    /// Removes faults that have not happened yet.
    pub fn calm(&self) {
        self.devices.iter().for_each(|device| device.lock().faults.clear());
    }

    /// Makes the next attempts to open a device fail.
    pub fn fail_opens(&self, device: usize, attempts: usize) {
        self.devices[device].lock().opens_to_fail = attempts;
    }

    /// How many batches a device has been given.
    #[must_use]
    pub fn batches(&self, device: usize) -> usize {
        self.devices[device].lock().batches
    }

    /// Bytes of all batches that a device has been given, columns in and out.
    #[must_use]
    pub fn bytes(&self, device: usize) -> usize {
        self.devices[device].lock().bytes
    }

    /// How often opening a device was tried.
    #[must_use]
    pub fn opens(&self, device: usize) -> usize {
        self.devices[device].lock().opens
    }

    /// Whether the call that takes a result of a device is blocked, as by [`Fault::BlockFinish`].
    #[must_use]
    pub fn is_stuck(&self, device: usize) -> bool {
        self.devices[device].lock().is_stuck
    }

    /// Violations of the interface of a device.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.devices.iter().flat_map(|device| device.lock().violations.clone()).collect()
    }
}

impl Driver for FakeDriver {
    fn devices(&self) -> Result<Vec<DeviceInfo>, DeviceError> {
        if self.devices.is_empty() {
            return Err(DeviceError::Absent("there is no fake device".to_owned()));
        }
        Ok(self.devices.iter().map(|device| device.info.clone()).collect())
    }

    fn open(&self, index: usize, pools: &[Pool]) -> Result<Box<dyn Device>, DeviceError> {
        let Some(shared) = self.devices.get(index) else {
            return Err(DeviceError::Absent(format!("there is no fake device {index}")));
        };
        let mut state = shared.lock();
        state.opens += 1;
        if state.opens_to_fail > 0 {
            state.opens_to_fail -= 1;
            return Err(failed("open"));
        }
        drop(state);
        let slots = (0..shared.shape.slots).map(|_| None).collect();
        Ok(Box::new(Opened { shared: Arc::clone(shared), slots, failed: false, pools: pools.to_vec() }))
    }

    fn takes_read_only(&self, index: usize) -> bool {
        self.devices.get(index).is_some_and(|device| device.shape.takes_read_only)
    }

    fn drill(&self, drill: Drill) {
        let fault = match drill {
            Drill::Error => Fault::Finish,
            Drill::Hang => Fault::Never,
        };
        *self.drill.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }
}

fn failed(operation: &'static str) -> DeviceError {
    DeviceError::Failed { operation, text: "told to fail".to_owned() }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn violation(&self, text: String) {
        self.lock().violations.push(text);
    }
}

/// The result of a batch, once it has ended.
type Outcome = Arc<Mutex<Option<Vec<Digest>>>>;

struct Opened {
    shared: Arc<Shared>,
    slots: Vec<Option<(Outcome, Fault)>>,
    failed: bool,
    pools: Vec<Pool>,
}

impl Device for Opened {
    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn slots(&self) -> usize {
        self.slots.len()
    }

    fn slot_bytes(&self) -> usize {
        self.shared.shape.slot_bytes
    }

    unsafe fn start(&mut self, slot: usize, work: Work, wake: Wake) -> Result<(), DeviceError> {
        if self.failed || self.slots[slot].is_some() {
            self.shared.violation(format!("slot {slot} is used though busy, or the device failed"));
        }
        if work.bytes() > self.shared.shape.slot_bytes {
            return Err(DeviceError::Unsupported("more bytes than a slot has"));
        }
        if let Some(text) = fault_of(&work) {
            self.shared.violation(text);
        }
        let mut state = self.shared.lock();
        let nth = state.batches;
        let planned = state.faults.remove(&nth);
        state.batches += 1;
        state.bytes += work.bytes();
        drop(state);
        let mut drill = self.shared.drill.lock().unwrap_or_else(PoisonError::into_inner);
        let fault = planned.unwrap_or_else(|| mem::replace(&mut *drill, Fault::None));
        drop(drill);
        match fault {
            Fault::Start => {
                self.failed = true;
                return Err(failed("start"));
            }
            Fault::Refuse => return Err(DeviceError::Unsupported("told to refuse")),
            Fault::PanicStart => {
                self.failed = true;
                panic!("a fake device was told to panic at start");
            }
            Fault::BlockStart(time) => thread::sleep(time),
            _ => {}
        }
        let outcome = Outcome::default();
        self.slots[slot] = Some((Arc::clone(&outcome), fault));
        let shared = Arc::clone(&self.shared);
        thread::spawn(move || shared.compute(work, fault, &outcome, wake));
        Ok(())
    }

    fn finish(&mut self, slot: usize) -> Result<Vec<Digest>, DeviceError> {
        let Some((outcome, fault)) = self.slots[slot].take() else {
            self.shared.violation(format!("slot {slot} is finished though idle"));
            return Err(failed("finish"));
        };
        if matches!(fault, Fault::Late(_)) {
            self.failed = true;
            return Err(failed("finish"));
        }
        let digests = outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(digests) = digests else {
            self.shared.violation(format!("slot {slot} is finished though it has not ended"));
            return Err(failed("finish"));
        };
        match fault {
            Fault::Finish => {
                self.failed = true;
                return Err(failed("finish"));
            }
            Fault::PanicFinish => {
                self.failed = true;
                panic!("a fake device was told to panic at finish");
            }
            Fault::BlockFinish(time) => {
                self.shared.lock().is_stuck = true;
                thread::sleep(time);
                self.shared.lock().is_stuck = false;
            }
            _ => {}
        }
        Ok(digests)
    }

    fn abandon(mut self: Box<Self>) {
        // Running batches keep their addresses: no memory of the pools may go.
        mem::forget(mem::take(&mut self.pools));
        self.slots.clear();
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if self.slots.iter().any(Option::is_some) {
            self.shared.violation("a device is closed while it is busy".to_owned());
        }
    }
}

impl Shared {
    fn compute(&self, work: Work, fault: Fault, outcome: &Outcome, wake: Wake) {
        match fault {
            Fault::Never => return,
            Fault::Slow(time) => thread::sleep(time),
            Fault::Late(time) => {
                thread::sleep(time);
                for range in &work.outputs {
                    // SAFETY: outputs stay mapped, and are neither read nor written by anybody
                    // else, for ever when the device was abandoned: that they are is what this
                    // fault is there to show.
                    unsafe { range.start.as_ptr().write_bytes(LATE_BYTE, range.bytes) };
                }
                return wake();
            }
            _ => {}
        }
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        let busy =
            self.shape.latency + Duration::from_secs_f64(work.bytes() as f64 / self.shape.bytes_per_second);
        if !busy.is_zero() {
            thread::sleep(busy);
        }
        let mut digests = Vec::new();
        let mut memory = vec![0u8; work.bytes()];
        let (inputs, outputs) = memory.split_at_mut(work.columns * work.column_bytes);
        for range in &work.inputs {
            let at = place(&work, range);
            // SAFETY: inputs stay mapped and unchanged until `finish`.
            let source = unsafe { std::slice::from_raw_parts(range.start.as_ptr(), range.bytes) };
            inputs[at..at + range.bytes].copy_from_slice(source);
        }
        if let Some(transform) = &work.transform {
            let columns: Vec<&[u8]> = inputs.chunks(work.column_bytes).take(transform.inputs()).collect();
            let mut targets: Vec<&mut [u8]> = outputs.chunks_mut(work.column_bytes).collect();
            transform.apply(&columns, &mut targets);
        }
        if let (Fault::WrongOutput, Some(byte)) = (fault, outputs.first_mut()) {
            *byte ^= 1;
        }
        if fault == Fault::WrongEverywhere {
            outputs.iter_mut().step_by(4096).for_each(|byte| *byte ^= 1);
        }
        for range in &work.outputs {
            let at = place(&work, range);
            let source = &outputs[at..at + range.bytes];
            // SAFETY: outputs stay mapped, and are neither read nor written by anybody else, until
            // `finish`.
            unsafe { range.start.as_ptr().copy_from_nonoverlapping(source.as_ptr(), range.bytes) };
        }
        if work.hash {
            let mut hashes = Vec::new();
            BlockHasher::Blake3.hash_blocks(&memory, &mut hashes);
            digests.extend(hashes.iter().map(|hash| hash.0));
        }
        if fault == Fault::WrongEverywhere {
            digests.iter_mut().for_each(|digest| digest[7] ^= 2);
        }
        match (fault, digests.last_mut()) {
            (Fault::WrongDigest, Some(last)) => last[15] ^= 0x80,
            (Fault::MissingDigest, _) => drop(digests.pop()),
            _ => {}
        }
        drop(engine);
        *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(digests);
        wake();
    }
}

fn place(work: &Work, range: &HostRange) -> usize {
    range.column * work.column_bytes + range.offset
}

/// The violation in a batch, if there is one.
fn fault_of(work: &Work) -> Option<String> {
    let whole = |bytes: usize| bytes > 0 && bytes.is_multiple_of(4096);
    let wrong = work.inputs.iter().chain(&work.outputs).find(|range| {
        let inside = range.offset + range.bytes <= work.column_bytes;
        let aligned = range.offset.is_multiple_of(4096) && range.start.addr().get().is_multiple_of(16);
        !inside || !aligned || !whole(range.bytes)
    });
    if wrong.is_some() || !whole(work.column_bytes) {
        return Some(format!("a piece lies badly: {wrong:?} in columns of {} bytes", work.column_bytes));
    }
    let mut covered: Vec<(usize, usize)> =
        work.inputs.iter().map(|range| (place(work, range), range.bytes)).collect();
    covered.sort_unstable();
    let end = covered.iter().try_fold(0, |end, &(at, bytes)| (at == end).then_some(end + bytes));
    if end != Some(work.columns * work.column_bytes) {
        return Some("inputs are not covered once by pieces".to_owned());
    }
    let outside = work.outputs.iter().any(|range| range.column >= work.output_columns());
    let needed = work.transform.as_ref().map_or(0, |transform| transform.inputs());
    (outside || work.columns < needed).then(|| "columns that the transform does not have".to_owned())
}
