//! A device with its slots. A batch goes through three streams: in (the copy engine, or a kernel
//! that gathers scattered ranges), compute, out. Events order them, so that batches of different
//! slots overlap in all three. A fourth stream makes callbacks.
//!
//! A slot's memory holds the input columns and then the output columns. Beside it lie the other
//! inputs of kernels (tables or a matrix, lists of ranges), which come in one copy, and the
//! digests, which go out in one. Ranges in memory that the driver does not know are copied through
//! pinned memory of the slot, by `start` and `finish`.
//!
//! Invariants: no memory of a slot is reused before its batch has ended; after a failure nothing is
//! started and no result is trusted. Must not know what columns mean.
#![allow(unsafe_code)] // the device is given addresses; each block says who keeps them valid

use std::ptr;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::api::{Context, DeviceMemory, Event, Gpu, PinnedMemory, Stream};
use super::faults::Faults;
use super::kernels::{Columns, Kernels, LOGEXP_MATRIX_MAX, TABLES_BYTES_MAX};
use super::memory::{Registered, Slabs};
use super::plan::{self, ENTRY_BYTES, Run, Way};
use super::programs::{Program, Programs};
use super::tables::push_tables;
use super::tuning::{Method, Tuning};
use super::{CAPABILITY_MIN, info};
use crate::device::{Device, DeviceError, DeviceInfo, Digest, Wake, Work};
use calpe_core::block_io::Pool;
use calpe_core::codec::{Form, Transform};

/// Bytes of a block that is hashed.
const BLOCK: usize = 4096;

const DIGEST_BYTES: usize = size_of::<Digest>();

/// Smallest slot in bytes: with smaller ones a device is not worth using.
const SLOT_BYTES_MIN: usize = 4 << 20;

/// Lists in the control block start at multiples of this.
const CONTROL_ALIGNMENT: usize = 256;

/// An opened device. See [`Device`].
pub struct CudaDevice {
    info: DeviceInfo,
    tuning: Tuning,
    faults: Arc<Faults>,
    failed: bool,
    slot_bytes: usize,
    slots: Vec<Slot>,
    input: Stream,
    /// Batches take turns between these.
    compute: Vec<Stream>,
    output: Stream,
    /// Makes the callbacks: a stream waits until its callback has returned, and the other streams
    /// must not.
    notice: Stream,
    /// Batches started.
    started: usize,
    kernels: Kernels,
    programs: Programs,
    slabs: Slabs,
    /// The last field, since the fields above belong to it.
    context: Arc<Context>,
}

struct Slot {
    columns: DeviceMemory,
    control: DeviceMemory,
    control_host: PinnedMemory,
    digests: DeviceMemory,
    digests_host: PinnedMemory,
    staging: PinnedMemory,
    arrived: Event,
    computed: Event,
    ended: Event,
    batch: Option<Batch>,
}

/// What `finish` needs to know of a batch under way.
struct Batch {
    digests: usize,
    /// Outputs that are in staging.
    staged: Vec<Staged>,
    /// Kept until its kernels are done.
    _program: Option<Arc<Program>>,
}

/// How the outputs of a batch are computed.
enum Chosen {
    Nothing,
    Program(Arc<Program>),
    Table,
    LogExp,
    Fused,
    /// By the change of this number of columns.
    Delta(usize),
}

/// What a batch copies, with the ranges that go through staging.
struct Copies {
    inputs: Vec<Run>,
    outputs: Vec<Run>,
    /// To be copied into staging now.
    staged_in: Vec<Staged>,
    /// To be copied out of staging when the batch has ended.
    staged_out: Vec<Staged>,
}

/// A range that goes through staging.
struct Staged {
    /// Offset in staging.
    offset: usize,
    /// Its address in host memory.
    host: usize,
    bytes: usize,
}

impl CudaDevice {
    pub(super) fn open(
        index: usize,
        pools: &[Pool],
        tuning: Tuning,
        faults: Arc<Faults>,
    ) -> Result<CudaDevice, DeviceError> {
        let gpu = Gpu::nth(index)?;
        let capability = gpu.capability()?;
        if capability < CAPABILITY_MIN {
            let (major, minor) = (capability / 10, capability % 10);
            let text = format!("GPU {index} has compute capability {major}.{minor}; 8.0 or later is needed");
            return Err(DeviceError::Absent(text));
        }
        let info = info(index)?;
        let context = Context::new(gpu)?;
        let kernels = Kernels::load(&context, gpu)?;
        let slabs = Slabs::register(&context, pools);
        let report = slabs.report();
        tracing::info!(
            "{}: {} MiB of buffers registered in {:.0} ms",
            info.name,
            report.bytes >> 20,
            report.took.as_secs_f64() * 1e3
        );
        if !report.refusals.is_empty() {
            tracing::warn!(
                "{}: some buffers cannot be registered, what lies there is copied once more: {}",
                info.name,
                report.refusals.join("; ")
            );
        }
        let slot_bytes = slot_bytes(&tuning, context.free_bytes()?)?;
        let staging =
            if report.refusals.is_empty() { tuning.staging_bytes.min(slot_bytes) } else { slot_bytes };
        let slots = (0..tuning.slots.max(1))
            .map(|_| Slot::new(&context, slot_bytes, staging))
            .collect::<Result<Vec<Slot>, DeviceError>>()?;
        let (least, greatest) = context.priorities()?;
        let urgent = if tuning.priorities { greatest } else { least };
        Ok(CudaDevice {
            info,
            faults,
            failed: false,
            slot_bytes,
            slots,
            input: Stream::new(&context, urgent)?,
            compute: (0..tuning.compute_streams.max(1))
                .map(|_| Stream::new(&context, least))
                .collect::<Result<_, _>>()?,
            output: Stream::new(&context, urgent)?,
            notice: Stream::new(&context, urgent)?,
            started: 0,
            kernels,
            programs: Programs::new(&context)?,
            slabs,
            tuning,
            context,
        })
    }

    /// The result of registering the slabs.
    #[must_use]
    pub fn registered(&self) -> &Registered {
        self.slabs.report()
    }

    /// Compiles the matrix of a transform now, unless it is ready, so that batches find it.
    ///
    /// # Errors
    /// When the driver does not take the kernels.
    pub fn prepare(&self, transform: &Transform) -> Result<(), DeviceError> {
        self.programs.get_now(transform.matrix(), transform.inputs()).map(|_| ())
    }

    /// Compiles the same in the background.
    pub fn prepare_later(&self, transform: &Transform) {
        let _ = self.programs.get(transform.matrix(), transform.inputs(), 0);
    }

    /// Changes how batches are run from the next one on, for comparisons. Number and size of slots,
    /// staging, streams and priorities stay as they were when the device was opened.
    pub fn tuning_mut(&mut self) -> &mut Tuning {
        &mut self.tuning
    }

    /// The copies of a batch; those from and to unknown memory by way of a slot's staging.
    fn copies(&self, work: &Work, staging: &PinnedMemory) -> Result<Copies, DeviceError> {
        let ranges = plan::ranges(work, self.slot_bytes)?;
        let mut used = 0;
        let mut through = |runs: Vec<Run>| -> Result<(Vec<Run>, Vec<Staged>), DeviceError> {
            let mut staged = Vec::new();
            let mut placed = runs;
            for run in &mut placed {
                run.region = self.slabs.region_of(run.host, run.bytes);
                if run.region.is_none() {
                    if used + run.bytes > staging.bytes() {
                        return Err(DeviceError::Unsupported(
                            "more bytes outside of known memory than are staged",
                        ));
                    }
                    staged.push(Staged { offset: used, host: run.host, bytes: run.bytes });
                    // From here on the run is between slot and staging.
                    run.host = staging.start().expose_provenance() + used;
                    used += run.bytes;
                }
            }
            Ok((plan::joined(&placed), staged))
        };
        let (inputs, staged_in) = through(ranges.inputs)?;
        let (outputs, staged_out) = through(ranges.outputs)?;
        Ok(Copies { inputs, outputs, staged_in, staged_out })
    }

    fn choose(&mut self, work: &Work) -> Result<Chosen, DeviceError> {
        let Some(transform) = work.transform.as_ref().filter(|transform| transform.outputs() > 0) else {
            return Ok(Chosen::Nothing);
        };
        let factors = transform.matrix().len();
        if let Form::Update { columns } = transform.form() {
            return Ok(Chosen::Delta(columns.len()));
        }
        if factors > LOGEXP_MATRIX_MAX {
            return Err(DeviceError::Unsupported("a matrix larger than that of any code"));
        }
        let fusible = work.hash
            && work.columns == transform.inputs()
            && Kernels::can_fuse(transform.inputs(), transform.outputs());
        Ok(match self.tuning.method {
            Method::Table => Chosen::Table,
            Method::Fused if fusible => {
                self.kernels.load_fused()?;
                Chosen::Fused
            }
            Method::Fused => Chosen::Table,
            Method::LogExp => {
                self.kernels.load_logexp()?;
                Chosen::LogExp
            }
            Method::Xor => Chosen::Program(self.programs.get_now(transform.matrix(), transform.inputs())?),
            Method::Auto => {
                let program =
                    self.programs.get(transform.matrix(), transform.inputs(), self.tuning.compile_after);
                program.map_or(Chosen::Table, Chosen::Program)
            }
        })
    }

    /// Queues a whole batch. After an error some of it may be under way.
    ///
    /// # Safety
    /// As [`Device::start`].
    unsafe fn queue(
        &mut self,
        slot: usize,
        work: &Work,
        copies: Copies,
        chosen: Chosen,
        wake: Wake,
    ) -> Result<(), DeviceError> {
        let fault = self.faults.take();
        let CudaDevice { tuning, slots, input, compute, output, notice, started, kernels, slabs, .. } = self;
        let slot = &mut slots[slot];
        // There is only one matrix for logarithms, which must not be replaced while another stream reads it.
        let turn = if matches!(chosen, Chosen::LogExp) { 0 } else { *started % compute.len() };
        let compute = &compute[turn];
        *started += 1;
        let columns_start = slot.columns.start();

        // The other inputs of kernels, in one block: factors, then both lists.
        let mut control = Vec::new();
        if let Some(transform) = &work.transform {
            push_factors(transform, &chosen, &mut control);
        }
        let place = |run: &Run| match run.region {
            Some(_) => slabs.device_pointer(run),
            None => slot.staging.device() + (run.host - slot.staging.start().addr()) as u64,
        };
        let mut list = |runs: &[Run], way, least| {
            if runs.is_empty() || plan::is_long(runs, least) {
                return None;
            }
            control.resize(control.len().next_multiple_of(CONTROL_ALIGNMENT), 0);
            let at = control.len();
            let chunk = tuning.chunk_bytes.max(BLOCK);
            let count = plan::push_entries(runs, way, columns_start, chunk, place, &mut control);
            Some((slot.control.start() + at as u64, count))
        };
        let gathered = list(&copies.inputs, Way::In, tuning.engine_run_in);
        let scattered = list(&copies.outputs, Way::Out, tuning.engine_run_out);
        assert!(control.len() <= slot.control_host.bytes(), "{} bytes of control", control.len());

        for &Staged { offset, host, bytes } in &copies.staged_in {
            let from = ptr::with_exposed_provenance::<u8>(host);
            // SAFETY: the caller keeps the range mapped and unchanged; staging has room by
            // `copies`, and is idle.
            unsafe { ptr::copy_nonoverlapping(from, slot.staging.start().add(offset), bytes) };
        }
        // SAFETY: the slot is idle, so its memory is not in use; it is kept until the batch has
        // ended, as the ranges are by the caller. Runs and lists lie in slot and ranges by
        // `plan::ranges`. What a stream reads was written before in the same one, or before an
        // event that it waits for.
        unsafe {
            if !control.is_empty() {
                slot.control_host.start().copy_from_nonoverlapping(control.as_ptr(), control.len());
                // In the same stream: on a stream of its own the copy was slower, since it competes with the
                // kernels' reads.
                input.copy_in(slot.control.start(), slot.control_host.start(), control.len())?;
            }
            match gathered {
                Some((list, count)) => {
                    kernels.gather(input, list, count, blocks_for(tuning.gather_blocks, count))?;
                }
                None => {
                    for run in &copies.inputs {
                        let from = ptr::with_exposed_provenance(run.host);
                        input.copy_in(columns_start + run.offset as u64, from, run.bytes)?;
                    }
                }
            }
            slot.arrived.record(input)?;

            compute.wait(&slot.arrived)?;
            if let Some(fault) = fault {
                kernels.fault(compute, fault)?;
            }
            let hashed = if work.hash { work.bytes() / BLOCK } else { 0 };
            compute_columns(kernels, compute, slot, work, &chosen)?;
            if hashed > 0 && !matches!(chosen, Chosen::Fused) {
                let lanes = hashed < tuning.lanes_below;
                kernels.blake3_4k(compute, columns_start, hashed, slot.digests.start(), lanes)?;
            }
            slot.computed.record(compute)?;

            output.wait(&slot.computed)?;
            match scattered {
                Some((list, count)) => {
                    kernels.scatter(output, list, count, blocks_for(tuning.scatter_blocks, count))?;
                }
                None => {
                    for run in &copies.outputs {
                        let to = ptr::with_exposed_provenance_mut(run.host);
                        output.copy_out(to, columns_start + run.offset as u64, run.bytes)?;
                    }
                }
            }
            if hashed > 0 {
                output.copy_out(slot.digests_host.start(), slot.digests.start(), hashed * DIGEST_BYTES)?;
            }
            slot.ended.record(output)?;
            let program = if let Chosen::Program(program) = chosen { Some(program) } else { None };
            slot.batch = Some(Batch { digests: hashed, staged: copies.staged_out, _program: program });
        }
        notice.wait(&slot.ended)?;
        notice.call(wake)
    }
}

/// Blocks of a copying kernel: no more than there are entries for its warps.
fn blocks_for(most: u32, entries: usize) -> u32 {
    u32::try_from(entries).map_or(most, |entries| entries.min(most)).max(1)
}

/// Launches the kernels that compute the outputs of a batch.
///
/// # Safety
/// The slot's memory must be kept until they are done, and its columns and control block be there
/// before.
unsafe fn compute_columns(
    kernels: &Kernels,
    stream: &Stream,
    slot: &Slot,
    work: &Work,
    chosen: &Chosen,
) -> Result<(), DeviceError> {
    let Some(transform) = &work.transform else { return Ok(()) };
    let columns = Columns {
        input: slot.columns.start(),
        input_ld: work.column_bytes,
        output: slot.columns.start() + (work.columns * work.column_bytes) as u64,
        output_ld: work.column_bytes,
        bytes: work.column_bytes,
        inputs: transform.inputs(),
        outputs: transform.outputs(),
    };
    let factors = slot.control.start();
    // SAFETY: all columns lie in the slot by `plan::ranges`, factors were put at the start of the
    // control block; the caller keeps both.
    unsafe {
        match chosen {
            Chosen::Nothing => Ok(()),
            Chosen::Program(program) => program.launch(stream, &columns),
            Chosen::Table => kernels.table(stream, &columns, factors),
            Chosen::LogExp => kernels.logexp(stream, &columns, factors, transform.matrix().len()),
            Chosen::Fused => kernels.fused(stream, &columns, factors, slot.digests.start()),
            Chosen::Delta(changed) => kernels.delta(stream, &columns, *changed, factors),
        }
    }
}

/// The factors of a transform as the chosen kernel reads them.
fn push_factors(transform: &Transform, chosen: &Chosen, control: &mut Vec<u8>) {
    match chosen {
        Chosen::Nothing | Chosen::Program(_) => {}
        Chosen::LogExp => control.extend_from_slice(transform.matrix()),
        Chosen::Table | Chosen::Fused => push_tables(transform.matrix().iter().copied(), control),
        Chosen::Delta(changed) => {
            let rows = transform.matrix().chunks(transform.inputs());
            push_tables(rows.flat_map(|row| row[..*changed].iter().copied()), control);
        }
    }
}

/// Bytes of each slot, given the free memory.
fn slot_bytes(tuning: &Tuning, free: usize) -> Result<usize, DeviceError> {
    // Digests and lists take less than a sixteenth of what the columns take.
    let share = (free as f64 * tuning.memory_fraction * 15.0 / 16.0) as usize / tuning.slots.max(1);
    let bytes = share.min(tuning.slot_bytes_max) & !((1 << 20) - 1);
    if bytes < SLOT_BYTES_MIN.min(tuning.slot_bytes_max) {
        let text = format!("{} MiB of device memory are free: too little", free >> 20);
        return Err(DeviceError::Failed { operation: "making slots", text });
    }
    Ok(bytes)
}

impl Slot {
    fn new(context: &Arc<Context>, bytes: usize, staging: usize) -> Result<Slot, DeviceError> {
        let blocks = bytes / BLOCK;
        // Factors, and both lists: ranges are whole blocks, and in and out together no more than
        // the slot.
        let control = TABLES_BYTES_MAX + 2 * CONTROL_ALIGNMENT + blocks * ENTRY_BYTES;
        Ok(Slot {
            columns: DeviceMemory::new(context, bytes)?,
            control: DeviceMemory::new(context, control)?,
            control_host: PinnedMemory::new(context, control)?,
            digests: DeviceMemory::new(context, blocks * DIGEST_BYTES)?,
            digests_host: PinnedMemory::new(context, blocks * DIGEST_BYTES)?,
            staging: PinnedMemory::new(context, staging)?,
            arrived: Event::new(context, false)?,
            computed: Event::new(context, false)?,
            ended: Event::new(context, false)?,
            batch: None,
        })
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn slots(&self) -> usize {
        self.slots.len()
    }

    fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    unsafe fn start(&mut self, slot: usize, work: Work, wake: Wake) -> Result<(), DeviceError> {
        if self.failed {
            return Err(DeviceError::Failed {
                operation: "start",
                text: "the device has failed before".to_owned(),
            });
        }
        assert!(self.slots[slot].batch.is_none(), "slot {slot} is not idle");
        let copies = self.copies(&work, &self.slots[slot].staging)?;
        let begin = || {
            self.context.bind()?;
            let chosen = self.choose(&work)?;
            // SAFETY: the caller's promise is this function's.
            unsafe { self.queue(slot, &work, copies, chosen, wake) }
        };
        begin().inspect_err(|error| self.failed |= !matches!(error, DeviceError::Unsupported(_)))
    }

    fn finish(&mut self, slot: usize) -> Result<Vec<Digest>, DeviceError> {
        let failed = |text: &str| DeviceError::Failed { operation: "finish", text: text.to_owned() };
        if self.failed {
            return Err(failed("the device has failed before"));
        }
        let ended = self.slots[slot].ended.is_done();
        self.failed |= ended.is_err();
        if !ended? {
            self.failed = true;
            return Err(failed("the batch has not ended"));
        }
        let slot = &mut self.slots[slot];
        let Some(batch) = slot.batch.take() else { return Err(failed("no batch was started in this slot")) };
        for &Staged { offset, host, bytes } in &batch.staged {
            let to = ptr::with_exposed_provenance_mut::<u8>(host);
            // SAFETY: the caller of `start` keeps the output range for us until we return; the copy
            // into staging is done.
            unsafe { ptr::copy_nonoverlapping(slot.staging.start().add(offset), to, bytes) };
        }
        let digests = slot.digests_host.start().cast::<Digest>();
        // SAFETY: that many digests were copied there, the copy is done, and the memory has room for those of
        // all blocks of a slot.
        Ok(unsafe { std::slice::from_raw_parts(digests, batch.digests) }.to_vec())
    }

    fn abandon(mut self: Box<Self>) {
        let compiling = self.programs.give_up();
        // In a failed context no work runs any more, and while it exists the driver makes no other
        // one.
        if self.slots.iter().any(|slot| slot.ended.is_done().is_err()) {
            let context = Arc::clone(&self.context);
            let end = move || {
                // This panics only where a matrix breaks an invariant, which has been reported.
                compiling.map(JoinHandle::join);
                context.destroy();
            };
            // If no thread can be started, the context stays, and the device stays failed.
            drop(std::thread::Builder::new().name("gpu-end".to_owned()).spawn(end));
        }
        // Slots, context and registered slabs may be in use for as long as the process lives.
        std::mem::forget(self);
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Whether or not it failed, work that has ended touches no memory any more, so memory may
        // be freed next.
        let _ = self.context.synchronise();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_shrink_with_the_memory_and_end_where_they_are_not_worth_it() {
        let tuning = Tuning::default();
        assert_eq!(slot_bytes(&tuning, 80 << 30), Ok(128 << 20));
        let small = slot_bytes(&tuning, 512 << 20).expect("half a GiB is enough");
        assert!((SLOT_BYTES_MIN..64 << 20).contains(&small) && small.is_multiple_of(1 << 20));
        assert!(slot_bytes(&tuning, 16 << 20).is_err());
    }
}
