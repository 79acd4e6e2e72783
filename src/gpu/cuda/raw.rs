//! Kernels one by one on bytes of the host: copied in, computed, copied out, waited for. Slow, and
//! for tests: it reaches lengths, distances and kernels that no batch has. Must not be used by the
//! runtime.
#![allow(unsafe_code)] // kernels are given addresses; all of them are of this file's own memory

use std::sync::Arc;

use super::api::{Context, DeviceMemory, Gpu, Stream};
use super::kernels::{Columns, Kernels};
use super::known;
use super::programs::Program;
use super::tables::push_tables;
use super::tuning::Method;
use crate::device::DeviceError;

pub use super::known::{Layout, POISON, reference};

/// A digest of BLAKE3.
pub type FullDigest = [u8; 32];

/// A device on which kernels are run one by one.
pub struct RawKernels {
    kernels: Kernels,
    stream: Stream,
    context: Arc<Context>,
}

impl RawKernels {
    /// Opens a device.
    ///
    /// # Errors
    /// As [`crate::device::Driver::open`].
    pub fn open(index: usize) -> Result<RawKernels, DeviceError> {
        let gpu = Gpu::nth(index)?;
        let context = Context::new(gpu)?;
        let mut kernels = Kernels::load(&context, gpu)?;
        kernels.load_logexp()?;
        kernels.load_fused()?;
        Ok(RawKernels { kernels, stream: Stream::new(&context, 0)?, context })
    }

    fn uploaded(&self, bytes: &[u8]) -> Result<DeviceMemory, DeviceError> {
        let memory = DeviceMemory::new(&self.context, bytes.len())?;
        known::upload(&self.stream, &memory, bytes)?;
        Ok(memory)
    }

    fn poisoned(&self, bytes: usize) -> Result<DeviceMemory, DeviceError> {
        let memory = DeviceMemory::new(&self.context, bytes)?;
        known::poison(&self.stream, &memory, bytes)?;
        Ok(memory)
    }

    fn downloaded(&self, memory: &DeviceMemory) -> Result<Vec<u8>, DeviceError> {
        known::download(&self.stream, memory, memory.bytes())
    }

    /// The outputs by a kernel of this method (`Auto` and `Fused` are not of one kernel: `Table`),
    /// in a buffer of [`POISON`] of `skip` + `outputs` * `output_ld` + `skip` bytes. `input` has at
    /// least `skip` + `inputs` * `input_ld`. All but `LogExp` want everything in the layout to be a
    /// multiple of 16.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When the buffer is shorter, or the matrix not `outputs` rows of `inputs` factors.
    pub fn code(
        &mut self,
        method: Method,
        matrix: &[u8],
        layout: &Layout,
        input: &[u8],
    ) -> Result<Vec<u8>, DeviceError> {
        let &Layout { skip, input_ld, output_ld, bytes, inputs, outputs } = layout;
        assert_eq!(matrix.len(), inputs * outputs, "factors");
        assert!(bytes <= output_ld && input.len() >= skip + inputs.saturating_sub(1) * input_ld + bytes);
        self.context.bind()?;
        let mut factors = Vec::new();
        match method {
            Method::LogExp => factors.extend_from_slice(matrix),
            _ => push_tables(matrix.iter().copied(), &mut factors),
        }
        let (factors, source) = (self.uploaded(&factors)?, self.uploaded(input)?);
        let target = self.poisoned(2 * skip + outputs * output_ld)?;
        let columns = Columns {
            input: source.start() + skip as u64,
            input_ld,
            output: target.start() + skip as u64,
            output_ld,
            bytes,
            inputs,
            outputs,
        };
        // SAFETY: the columns lie inside source and target by the assertion, and all is waited for
        // by `downloaded`.
        unsafe {
            match method {
                Method::LogExp => {
                    self.kernels.logexp(&self.stream, &columns, factors.start(), matrix.len())?;
                }
                Method::Xor => {
                    let program = Program::compile(&self.context, matrix, inputs, outputs)?;
                    program.launch(&self.stream, &columns)?;
                    self.stream.synchronise()?;
                }
                Method::Auto | Method::Table | Method::Fused => {
                    self.kernels.table(&self.stream, &columns, factors.start())?;
                }
            }
        }
        self.downloaded(&target)
    }

    /// Digests of blocks of 4 KiB, the first half of each.
    ///
    /// # Errors
    /// When the device fails.
    pub fn blake3_4k(&self, data: &[u8], lanes: bool) -> Result<Vec<[u8; 16]>, DeviceError> {
        let blocks = data.len() / 4096;
        self.context.bind()?;
        let (source, target) = (self.uploaded(data)?, self.poisoned(blocks * 16)?);
        // SAFETY: source and target hold that many blocks and digests; waited for by `downloaded`.
        unsafe { self.kernels.blake3_4k(&self.stream, source.start(), blocks, target.start(), lanes) }?;
        Ok(self.downloaded(&target)?.as_chunks::<16>().0.to_vec())
    }

    /// Digests of blocks of `block_bytes`, a power of two from 4096 to 65536.
    ///
    /// # Errors
    /// When the device fails.
    pub fn blake3_blocks(&self, data: &[u8], block_bytes: usize) -> Result<Vec<FullDigest>, DeviceError> {
        let blocks = data.len() / block_bytes;
        self.context.bind()?;
        let (source, target) = (self.uploaded(data)?, self.poisoned(blocks * 32)?);
        // SAFETY: source and target hold that many blocks and digests; waited for by `downloaded`.
        unsafe {
            self.kernels.blake3_blocks(&self.stream, source.start(), blocks, block_bytes, target.start())
        }?;
        Ok(self.downloaded(&target)?.as_chunks::<32>().0.to_vec())
    }

    /// Digests of chunks of any length: from each offset to the next.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When the offsets do not ascend to at most the length of `data`.
    pub fn blake3_chunks(&self, data: &[u8], offsets: &[u64]) -> Result<Vec<FullDigest>, DeviceError> {
        assert!(
            offsets.is_sorted() && offsets.last().is_none_or(|&last| last <= data.len() as u64),
            "offsets"
        );
        let count = offsets.len().saturating_sub(1);
        self.context.bind()?;
        let bytes: Vec<u8> = offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
        let (list, source, target) =
            (self.uploaded(&bytes)?, self.uploaded(data)?, self.poisoned(count * 32)?);
        // SAFETY: the offsets lie in the data by the assertion; waited for by `downloaded`.
        unsafe {
            self.kernels.blake3_chunks(&self.stream, list.start(), source.start(), count, target.start())
        }?;
        Ok(self.downloaded(&target)?.as_chunks::<32>().0.to_vec())
    }
}
