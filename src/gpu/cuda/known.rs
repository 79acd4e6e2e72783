//! Known answers: columns whose outputs the CPU computes by definition, to compare with a kernel's
//! outputs. Slow, and each call waits for the device. Must not know of slots or batches.
#![allow(unsafe_code)] // copies to and from memory that the caller owns

use super::api::{DeviceMemory, Stream};
use super::tables::product;
use crate::device::DeviceError;

/// The byte that fills outputs, and the gaps around them, before they are computed.
pub const POISON: u8 = 0xA5;

/// How columns lie in a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Bytes before the first column, of inputs and of outputs.
    pub skip: usize,
    /// From an input to the next, in bytes.
    pub input_ld: usize,
    /// From an output to the next, in bytes.
    pub output_ld: usize,
    /// Bytes of a column.
    pub bytes: usize,
    /// Number of inputs.
    pub inputs: usize,
    /// Number of outputs.
    pub outputs: usize,
}

/// Puts bytes at the start of memory that nothing else uses.
///
/// # Errors
/// When the device fails.
///
/// # Panics
/// When they do not fit.
pub(super) fn upload(stream: &Stream, memory: &DeviceMemory, bytes: &[u8]) -> Result<(), DeviceError> {
    assert!(bytes.len() <= memory.bytes(), "{} bytes in {}", bytes.len(), memory.bytes());
    if !bytes.is_empty() {
        // SAFETY: the memory is as long; waited for before either goes.
        unsafe { stream.copy_in(memory.start(), bytes.as_ptr(), bytes.len()) }?;
    }
    stream.synchronise()
}

/// Fills the start of memory that nothing else uses with [`POISON`].
///
/// # Errors
/// When the device fails.
///
/// # Panics
/// When it is shorter.
pub(super) fn poison(stream: &Stream, memory: &DeviceMemory, bytes: usize) -> Result<(), DeviceError> {
    assert!(bytes <= memory.bytes(), "{bytes} bytes in {}", memory.bytes());
    if bytes > 0 {
        // SAFETY: the memory is as long; waited for.
        unsafe { stream.fill(memory.start(), POISON, bytes) }?;
    }
    stream.synchronise()
}

/// The bytes at the start of memory once all that was queued is done.
///
/// # Errors
/// When the device fails.
///
/// # Panics
/// When it is shorter.
pub(super) fn download(stream: &Stream, memory: &DeviceMemory, bytes: usize) -> Result<Vec<u8>, DeviceError> {
    assert!(bytes <= memory.bytes(), "{bytes} bytes of {}", memory.bytes());
    let mut found = vec![0; bytes];
    stream.synchronise()?;
    if bytes > 0 {
        // SAFETY: as long as the memory; waited for.
        unsafe { stream.copy_out(found.as_mut_ptr(), memory.start(), bytes) }?;
        stream.synchronise()?;
    }
    Ok(found)
}

/// The right content of a buffer of [`POISON`] after a kernel, computed on this CPU by definition:
/// `skip` + `outputs` * `output_ld` + `skip` bytes. `input` has at least `skip` + `inputs` *
/// `input_ld`.
#[must_use]
pub fn reference(matrix: &[u8], layout: &Layout, input: &[u8]) -> Vec<u8> {
    let &Layout { skip, input_ld, output_ld, bytes, inputs, outputs } = layout;
    let mut target = vec![POISON; 2 * skip + outputs * output_ld];
    let products: Vec<[u8; 256]> =
        (0..=255u8).map(|factor| std::array::from_fn(|byte| product(factor, byte as u8))).collect();
    for row in 0..outputs {
        let output = &mut target[skip + row * output_ld..][..bytes];
        output.fill(0);
        for column in 0..inputs {
            let table = &products[usize::from(matrix[row * inputs + column])];
            let source = &input[skip + column * input_ld..][..bytes];
            output.iter_mut().zip(source).for_each(|(sum, &byte)| *sum ^= table[usize::from(byte)]);
        }
    }
    target
}
