//! The fixed kernels: their PTX, assembled when first wanted, and how each is launched over
//! columns.
//!
//! Invariants: launches have the shape that the head of the kernel's source asks for. Every function here
//! that takes addresses is unsafe for the same reason: the addresses must be of memory of this context that
//! is valid, and not otherwise written, until the launch is done; lengths and distances are as each function
//! says. Must not know of slots or batches.
#![allow(unsafe_code)] // kernels are given addresses

use std::sync::Arc;

use super::api::{Context, DevicePtr, Function, Gpu, Module, Stream};
use super::faults;
use super::tables::{LOGEXP_PASSES, TABLE_BYTES, TABLE_PASSES, passes};
use crate::device::{DeviceError, Drill};

/// Threads of a block of every kernel but `blake3_4k_lanes`.
const THREADS: u32 = 256;

/// Threads of a block of `blake3_4k_lanes`, which takes two blocks of data.
const LANES_THREADS: u32 = 32;

/// Blocks of the looping kernels that a multiprocessor holds at a time.
const RESIDENT: u32 = 4;

/// Bytes of a leaf of BLAKE3: a thread each.
const LEAF: usize = 1024;

/// Most columns of the fused kernel, inputs and outputs.
pub(super) const FUSED_COLUMNS_MAX: usize = 128;

/// Bytes of the matrix that `rs_logexp` holds.
pub(super) const LOGEXP_MATRIX_MAX: usize = 16384;

/// Where the columns of one computation lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Columns {
    /// First byte of the first input.
    pub input: DevicePtr,
    /// From an input to the next, in bytes.
    pub input_ld: usize,
    /// First byte of the first output.
    pub output: DevicePtr,
    /// From an output to the next, in bytes.
    pub output_ld: usize,
    /// Bytes of a column.
    pub bytes: usize,
    /// Number of inputs.
    pub inputs: usize,
    /// Number of outputs.
    pub outputs: usize,
}

/// A module's kernels in the order of their names.
struct Family {
    functions: Vec<Function>,
    module: Module,
}

impl Family {
    fn load(
        context: &Arc<Context>,
        name: &str,
        ptx: &str,
        entries: &[String],
    ) -> Result<Family, DeviceError> {
        let module = Module::new(context, name, ptx)?;
        let functions = entries.iter().map(|entry| module.function(entry)).collect::<Result<_, _>>()?;
        Ok(Family { functions, module })
    }

    fn rows(prefix: &str, sizes: &[usize]) -> Vec<String> {
        sizes.iter().map(|rows| format!("{prefix}_{rows}")).collect()
    }

    fn of_rows(&self, sizes: &[usize], rows: usize) -> &Function {
        let at = sizes.iter().position(|&size| size == rows).expect("a kernel of this many rows");
        &self.functions[at]
    }
}

/// The kernels of one context.
pub(super) struct Kernels {
    context: Arc<Context>,
    multiprocessors: u32,
    copy: Family,
    blake3: Family,
    table: Family,
    delta: Family,
    logexp: Option<Family>,
    fused: Option<Family>,
    faults: Option<Family>,
}

impl Kernels {
    /// Assembles the kernels that every device uses.
    ///
    /// # Errors
    /// When the driver refuses one; the text says which and why.
    pub(super) fn load(context: &Arc<Context>, gpu: Gpu) -> Result<Kernels, DeviceError> {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let copy = names(&["gather", "scatter"]);
        let blake3 = names(&["blake3_4k", "blake3_4k_lanes", "blake3_blocks", "blake3_chunks"]);
        let table = Family::rows("rs_table", &TABLE_PASSES);
        let delta = Family::rows("rs_delta", &TABLE_PASSES);
        Ok(Kernels {
            copy: Family::load(context, "copy.ptx", include_str!("../../../kernels/ptx/copy.ptx"), &copy)?,
            blake3: Family::load(
                context,
                "blake3.ptx",
                include_str!("../../../kernels/ptx/blake3.ptx"),
                &blake3,
            )?,
            table: Family::load(
                context,
                "rs_table.ptx",
                include_str!("../../../kernels/ptx/rs_table.ptx"),
                &table,
            )?,
            delta: Family::load(
                context,
                "rs_delta.ptx",
                include_str!("../../../kernels/ptx/rs_delta.ptx"),
                &delta,
            )?,
            logexp: None,
            fused: None,
            faults: None,
            multiprocessors: gpu.multiprocessors()?,
            context: Arc::clone(context),
        })
    }

    /// Assembles the kernels of [`Kernels::logexp`], once.
    ///
    /// # Errors
    /// As [`Kernels::load`].
    pub(super) fn load_logexp(&mut self) -> Result<(), DeviceError> {
        if self.logexp.is_none() {
            let names = Family::rows("rs_logexp", &LOGEXP_PASSES);
            let ptx = include_str!("../../../kernels/ptx/rs_logexp.ptx");
            self.logexp = Some(Family::load(&self.context, "rs_logexp.ptx", ptx, &names)?);
        }
        Ok(())
    }

    /// Assembles the kernels of [`Kernels::fused`], once.
    ///
    /// # Errors
    /// As [`Kernels::load`].
    pub(super) fn load_fused(&mut self) -> Result<(), DeviceError> {
        if self.fused.is_none() {
            let names = Family::rows("encode_blake3", &TABLE_PASSES);
            let ptx = include_str!("../../../kernels/ptx/fused.ptx");
            self.fused = Some(Family::load(&self.context, "fused.ptx", ptx, &names)?);
        }
        Ok(())
    }

    /// Launches a kernel that traps or hangs.
    ///
    /// # Errors
    /// When it cannot be launched.
    pub(super) fn fault(&mut self, stream: &Stream, fault: Drill) -> Result<(), DeviceError> {
        if self.faults.is_none() {
            let names: Vec<String> = faults::ENTRIES.map(str::to_owned).to_vec();
            self.faults = Some(Family::load(&self.context, "faults.ptx", faults::PTX, &names)?);
        }
        let function = &self.faults.as_ref().expect("just loaded").functions[fault as usize];
        // SAFETY: its one parameter is a number, and it touches no memory.
        unsafe { stream.launch(function, 1, 1, &mut [faults::HANG_SECONDS * 1_000_000_000]) }
    }

    fn looping(&self, units: usize) -> u32 {
        let most = self.multiprocessors * RESIDENT;
        u32::try_from(units).map_or(most, |units| units.clamp(1, most))
    }

    /// Copies a list of ranges into the device.
    ///
    /// # Errors
    /// When it cannot be launched.
    ///
    /// # Safety
    /// See this file's head: it applies to the list of `count` entries and to the memory that the entries
    /// name.
    pub(super) unsafe fn gather(
        &self,
        stream: &Stream,
        list: DevicePtr,
        count: usize,
        blocks: u32,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller vouches for the list.
        unsafe { stream.launch(&self.copy.functions[0], blocks, THREADS, &mut [list, count as u64]) }
    }

    /// Copies a list of ranges out of the device.
    ///
    /// # Errors
    /// When it cannot be launched.
    ///
    /// # Safety
    /// As [`Kernels::gather`].
    pub(super) unsafe fn scatter(
        &self,
        stream: &Stream,
        list: DevicePtr,
        count: usize,
        blocks: u32,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller vouches for the list.
        unsafe { stream.launch(&self.copy.functions[1], blocks, THREADS, &mut [list, count as u64]) }
    }

    /// All outputs by product tables, those of every factor behind one another at `tables`. Lengths
    /// and distances are multiples of 16.
    ///
    /// # Errors
    /// When it cannot be launched.
    ///
    /// # Safety
    /// See this file's head.
    pub(super) unsafe fn table(
        &self,
        stream: &Stream,
        columns: &Columns,
        tables: DevicePtr,
    ) -> Result<(), DeviceError> {
        for (row, rows) in passes(columns.outputs, &TABLE_PASSES) {
            let output = columns.output + (row * columns.output_ld) as u64;
            let mut arguments = [
                tables,
                columns.input,
                columns.input_ld as u64,
                output,
                columns.output_ld as u64,
                columns.bytes as u64,
                columns.inputs as u64,
                row as u64,
            ];
            let function = self.table.of_rows(&TABLE_PASSES, rows);
            let blocks = self.looping(columns.bytes.div_ceil(4096));
            // SAFETY: the parameters of rs_table, in order.
            unsafe { stream.launch(function, blocks, THREADS, &mut arguments) }?;
        }
        Ok(())
    }

    /// Parities after a change: the inputs are `changed` old columns, as many new ones and the old
    /// parities; the tables are those of the factors of the changed columns only, row after row.
    ///
    /// # Errors
    /// When it cannot be launched.
    ///
    /// # Safety
    /// See this file's head.
    pub(super) unsafe fn delta(
        &self,
        stream: &Stream,
        columns: &Columns,
        changed: usize,
        tables: DevicePtr,
    ) -> Result<(), DeviceError> {
        for (row, rows) in passes(columns.outputs, &TABLE_PASSES) {
            let output = columns.output + (row * columns.output_ld) as u64;
            let mut arguments = [
                tables,
                columns.input,
                columns.input_ld as u64,
                output,
                columns.output_ld as u64,
                columns.bytes as u64,
                changed as u64,
                columns.outputs as u64,
                row as u64,
            ];
            let function = self.delta.of_rows(&TABLE_PASSES, rows);
            let blocks = self.looping(columns.bytes.div_ceil(4096));
            // SAFETY: the parameters of rs_delta, in order.
            unsafe { stream.launch(function, blocks, THREADS, &mut arguments) }?;
        }
        Ok(())
    }

    /// All outputs by logarithms, with the matrix of `factors` bytes at `matrix`, which is copied to the
    /// kernel's variable: only one stream at a time may use this. Any lengths and distances.
    ///
    /// # Errors
    /// When it cannot be launched, or was not loaded.
    ///
    /// # Safety
    /// See this file's head; the matrix too.
    pub(super) unsafe fn logexp(
        &self,
        stream: &Stream,
        columns: &Columns,
        matrix: DevicePtr,
        factors: usize,
    ) -> Result<(), DeviceError> {
        let Some(family) = &self.logexp else { return Err(not_loaded("rs_logexp")) };
        let (variable, room) = family.module.variable(c"rs_logexp_matrix")?;
        if factors > room {
            return Err(DeviceError::Unsupported("a matrix larger than rs_logexp holds"));
        }
        // SAFETY: both hold that many bytes; the stream orders this after earlier launches that read the old
        // matrix.
        unsafe { stream.copy_within(variable, matrix, factors) }?;
        for (row, rows) in passes(columns.outputs, &LOGEXP_PASSES) {
            let output = columns.output + (row * columns.output_ld) as u64;
            let mut arguments = [
                columns.input,
                columns.input_ld as u64,
                output,
                columns.output_ld as u64,
                columns.bytes as u64,
                columns.inputs as u64,
                row as u64,
            ];
            let function = family.of_rows(&LOGEXP_PASSES, rows);
            let blocks = self.looping(columns.bytes.div_ceil(1024));
            // SAFETY: the parameters of rs_logexp, in order.
            unsafe { stream.launch(function, blocks, THREADS, &mut arguments) }?;
        }
        Ok(())
    }

    /// Whether [`Kernels::fused`] can take this many columns.
    #[must_use]
    pub(super) fn can_fuse(inputs: usize, outputs: usize) -> bool {
        TABLE_PASSES.contains(&outputs) && inputs + outputs <= FUSED_COLUMNS_MAX
    }

    /// All outputs by product tables, and the digests of all blocks of inputs and outputs, in one
    /// pass. `bytes` is a multiple of 4096; the digests of inputs, then outputs, column after
    /// column, go to `digests`.
    ///
    /// # Errors
    /// When it cannot be launched, or was not loaded.
    ///
    /// # Safety
    /// See this file's head.
    pub(super) unsafe fn fused(
        &self,
        stream: &Stream,
        columns: &Columns,
        tables: DevicePtr,
        digests: DevicePtr,
    ) -> Result<(), DeviceError> {
        let Some(family) = &self.fused else { return Err(not_loaded("encode_blake3")) };
        let rows = columns.bytes / 4096;
        let mut arguments = [
            tables,
            columns.input,
            columns.input_ld as u64,
            columns.output,
            columns.output_ld as u64,
            columns.bytes as u64,
            columns.inputs as u64,
            digests,
            digests + (columns.inputs * rows * 16) as u64,
        ];
        let function = family.of_rows(&TABLE_PASSES, columns.outputs);
        let blocks = self.looping(rows);
        // SAFETY: the parameters of encode_blake3, in order.
        unsafe { stream.launch(function, blocks, THREADS, &mut arguments) }
    }

    /// The first halves of the digests of `blocks` blocks of 4 KiB that lie behind one another; with `lanes`,
    /// four lanes hash each leaf, which is faster for few blocks.
    ///
    /// # Errors
    /// When it cannot be launched.
    ///
    /// # Safety
    /// See this file's head.
    pub(super) unsafe fn blake3_4k(
        &self,
        stream: &Stream,
        input: DevicePtr,
        blocks: usize,
        digests: DevicePtr,
        lanes: bool,
    ) -> Result<(), DeviceError> {
        if blocks == 0 {
            return Ok(());
        }
        let (function, grid, threads) = if lanes {
            (&self.blake3.functions[1], blocks.div_ceil(2), LANES_THREADS)
        } else {
            (&self.blake3.functions[0], (blocks * 4096 / LEAF).div_ceil(THREADS as usize), THREADS)
        };
        // SAFETY: the parameters of both kernels, in order.
        unsafe { stream.launch(function, grid as u32, threads, &mut [input, blocks as u64, digests]) }
    }

    /// The digests, 32 bytes each, of `blocks` blocks of `block_bytes`, a power of two from 4096 to
    /// 65536.
    ///
    /// # Errors
    /// When it cannot be launched.
    ///
    /// # Safety
    /// See this file's head.
    pub(super) unsafe fn blake3_blocks(
        &self,
        stream: &Stream,
        input: DevicePtr,
        blocks: usize,
        block_bytes: usize,
        digests: DevicePtr,
    ) -> Result<(), DeviceError> {
        if blocks == 0 {
            return Ok(());
        }
        let grid = (blocks * block_bytes / LEAF).div_ceil(THREADS as usize);
        let mut arguments = [input, blocks as u64, block_bytes as u64, digests];
        // SAFETY: the parameters of blake3_blocks, in order.
        unsafe { stream.launch(&self.blake3.functions[2], grid as u32, THREADS, &mut arguments) }
    }

    /// The digests, 32 bytes each, of `count` chunks of any length; chunk i is from the i-th to the
    /// next of `count` + 1 offsets of 64 bits.
    ///
    /// # Errors
    /// When it cannot be launched.
    ///
    /// # Safety
    /// See this file's head.
    pub(super) unsafe fn blake3_chunks(
        &self,
        stream: &Stream,
        offsets: DevicePtr,
        input: DevicePtr,
        count: usize,
        digests: DevicePtr,
    ) -> Result<(), DeviceError> {
        let grid = count.div_ceil(8).clamp(1, self.multiprocessors as usize * 8);
        let mut arguments = [offsets, input, count as u64, digests];
        // SAFETY: the parameters of blake3_chunks, in order.
        unsafe { stream.launch(&self.blake3.functions[3], grid as u32, THREADS, &mut arguments) }
    }
}

/// Most bytes of tables that a matrix of a code has: half the columns from the other half.
pub(super) const TABLES_BYTES_MAX: usize = LOGEXP_MATRIX_MAX * TABLE_BYTES;

fn not_loaded(name: &str) -> DeviceError {
    DeviceError::Failed { operation: "launch", text: format!("{name} was not loaded") }
}
