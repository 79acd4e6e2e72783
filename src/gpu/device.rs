//! The interface of a device: slots in which batches run beside each other, each started without
//! waiting, and reported by a callback from any thread. Implemented by CUDA, and by a fake in
//! memory.
//!
//! Must not know of queues, policies or threads.
#![allow(unsafe_code)] // a device is given addresses; each unsafe item says who keeps them valid

use std::ptr::NonNull;

use calpe_core::block_io::Pool;
use calpe_core::codec::Transform;

/// What a device is, for reports and as the key of its calibration.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DeviceInfo {
    /// Its number among the devices of the driver.
    pub index: usize,
    /// Its name, as the vendor gives it.
    pub name: String,
    /// Its permanent identity.
    pub uuid: String,
    /// The driver's version.
    pub driver: String,
    /// Its memory in bytes.
    pub memory_bytes: u64,
}

/// Why a device failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device or its driver failed; its results are not trusted from now on.
    #[error("{operation}: {text}")]
    Failed {
        /// What was asked of it.
        operation: &'static str,
        /// What the driver said.
        text: String,
    },
    /// The process that it lies in failed or is gone; in that process's words, where it had any.
    #[error("{0}")]
    Lost(String),
    /// There is no driver, or no such device.
    #[error("{0}")]
    Absent(String),
    /// A batch is larger than a slot, or of a kind that this device does not compute. Nothing was
    /// started.
    #[error("not for this device: {0}")]
    Unsupported(&'static str),
}

/// Some bytes of a column in host memory.
#[derive(Clone, Copy, Debug)]
pub struct HostRange {
    /// The column, inputs and outputs each counted from 0.
    pub column: usize,
    /// Offset in the column, in bytes; a multiple of 4096.
    pub offset: usize,
    /// The first byte; a multiple of 16.
    pub start: NonNull<u8>,
    /// Length; a multiple of 4096.
    pub bytes: usize,
}

// SAFETY: a range is an address with a length; `Device::start` says who may read or write there.
unsafe impl Send for HostRange {}

/// A batch: columns made of ranges, coded and hashed at once.
#[derive(Clone, Debug)]
pub struct Work {
    /// Computes outputs from the first inputs; None: inputs are only hashed.
    pub transform: Option<Transform>,
    /// Whether every block of 4 KiB of inputs and outputs is hashed with BLAKE3.
    pub hash: bool,
    /// Number of input columns: at least those of the transform.
    pub columns: usize,
    /// Bytes of every column; a multiple of 4096.
    pub column_bytes: usize,
    /// The ranges of the input columns: together every byte of every column once.
    pub inputs: Vec<HostRange>,
    /// The ranges of the output columns. Bytes outside of them are only computed and hashed.
    pub outputs: Vec<HostRange>,
}

impl Work {
    /// Number of output columns.
    #[must_use]
    pub fn output_columns(&self) -> usize {
        self.transform.as_ref().map_or(0, Transform::outputs)
    }

    /// Bytes of all columns, in and out: what a slot must hold.
    #[must_use]
    pub fn bytes(&self) -> usize {
        (self.columns + self.output_columns()) * self.column_bytes
    }
}

/// The first half of the BLAKE3 hash of a block.
pub type Digest = [u8; 16];

/// Called once when the batch in a slot has ended, with or without success. Called from any thread;
/// must not wait.
pub type Wake = Box<dyn FnOnce() + Send>;

/// A device with its memory, programs and slots. Owned by one thread.
pub trait Device: Send {
    /// What it is.
    fn info(&self) -> &DeviceInfo;

    /// How many batches can be under way at a time.
    fn slots(&self) -> usize;

    /// The most that [`Work::bytes`] of a batch may be.
    fn slot_bytes(&self) -> usize;

    /// Starts a batch in an idle slot and returns without waiting for it. `wake` is called when it
    /// has ended, unless this returns an error; an error other than `Unsupported` leaves the device
    /// as after a failed `finish`.
    ///
    /// # Errors
    /// See [`DeviceError`].
    ///
    /// # Safety
    /// Until `finish` of this slot has returned Ok, or the device is dropped, every input range
    /// must stay mapped and its bytes unchanged, and every output range must stay mapped and be
    /// neither read nor written by anybody else. After an error or when the device is given to
    /// [`Device::abandon`], outputs must stay so for ever; what the inputs hold no longer matters,
    /// but they must stay mapped.
    unsafe fn start(&mut self, slot: usize, work: Work, wake: Wake) -> Result<(), DeviceError>;

    /// Takes the result of a slot whose `wake` was called: the digests of all blocks, column after
    /// column, inputs before outputs; empty without hashing. Frees the slot.
    ///
    /// # Errors
    /// `Unsupported` as `start` returns it, for devices that find out later: nothing was done, and the slot
    /// is free. Any other error when the batch failed; then none of the device's results is trusted.
    fn finish(&mut self, slot: usize) -> Result<Vec<Digest>, DeviceError>;

    /// Writes the outputs of a batch to their ranges, for devices that have not done so before `finish`
    /// returned Ok. Called once after each such `finish`, before the slot's next `start`.
    ///
    /// # Safety
    /// The output ranges of the batch must be mapped, and neither read nor written by anybody else.
    unsafe fn deliver(&mut self, slot: usize) {
        let _ = slot;
    }

    /// Has `lost` called, once, when the device is lost while nothing is asked of it. [`Device::lost`] then
    /// says why. Never called for devices of which nobody can know.
    fn watch(&mut self, lost: Wake) {
        drop(lost);
    }

    /// Why the device is lost, if it is known to be.
    fn lost(&self) -> Option<String> {
        None
    }

    /// The process that it lies in, if it is not this one.
    fn process(&self) -> Option<u32> {
        None
    }

    /// Gives up a device that failed or does not answer: never waits, and leaks the memory that it
    /// may still be using.
    fn abandon(self: Box<Self>);
}

/// A failure on purpose, to see that clients are not affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Drill {
    /// A batch fails, and the device with it.
    Error,
    /// A batch does not end before its device is given up.
    Hang,
}

/// Finds and opens devices.
pub trait Driver: Send + Sync {
    /// What devices there are.
    ///
    /// # Errors
    /// `Absent` with the reason when the driver is missing or cannot be used.
    fn devices(&self) -> Result<Vec<DeviceInfo>, DeviceError>;

    /// Opens a device for batches whose ranges mostly lie in the slabs of `pools`, which it may
    /// register with the driver and which it keeps alive. Ranges elsewhere are allowed, and slower.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn open(&self, index: usize, pools: &[Pool]) -> Result<Box<dyn Device>, DeviceError>;

    /// Whether devices lie in processes of their own, which only read the memory of batches: when a device
    /// is abandoned, its batches can be taken back at once, and nothing of it is left.
    fn is_isolated(&self) -> bool {
        false
    }

    /// Whether a device can be given pools that this process itself may only read.
    fn takes_read_only(&self, index: usize) -> bool {
        let _ = index;
        false
    }

    /// Makes the next batch on any device of this driver fail. Replaces a drill that no batch has
    /// met yet.
    fn drill(&self, drill: Drill);
}
