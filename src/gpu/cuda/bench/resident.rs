//! Kernels on columns that lie in device memory already: bytes moved against what a copy inside the device moves.
#![allow(unsafe_code)] // kernels on memory that this file owns

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use super::{GEOMETRIES, REPETITIONS, Rate, codec, method_name, noise, recovery};
use crate::codec::Transform;
use crate::gpu::cuda::api::{Context, DeviceMemory, Event, Gpu, Stream};
use crate::gpu::cuda::kernels::{Columns, Kernels, TABLES_BYTES_MAX};
use crate::gpu::cuda::programs::Program;
use crate::gpu::cuda::tables::push_tables;
use crate::gpu::cuda::tuning::Method;
use crate::gpu::device::DeviceError;

/// Bytes of all columns of a computation: many times the caches.
const COLUMNS_BYTES: usize = 1 << 30;

/// Launches of one measurement.
const LAUNCHES: usize = 3;

/// Bytes hashed at a time.
const HASHED: [usize; 5] = [1 << 30, 64 << 20, 16 << 20, 4 << 20, 1 << 20];

/// Random bytes that the columns repeat.
const NOISE_BYTES: usize = 64 << 20;

/// A matrix by one method.
#[derive(Clone, Debug, Serialize)]
pub struct ResidentRow {
    /// Data and parity columns.
    pub geometry: String,
    /// Whether all parities are encoded or as many lost data columns recovered.
    pub operation: &'static str,
    /// How.
    pub method: &'static str,
    /// Bytes of all columns read and written.
    pub moved: Rate,
    /// The same against a copy inside the device.
    pub of_copy: f64,
    /// GB/s of user data.
    pub user_gb_per_s: f64,
    /// Milliseconds that compiling the matrix took; 0 where nothing is compiled.
    pub compile_ms: f64,
    /// Operations on each word of a column; 0 where nothing is compiled.
    pub operations: usize,
}

/// Hashing by one kernel.
#[derive(Clone, Debug, Serialize)]
pub struct HashRow {
    /// Bytes of a launch.
    pub bytes: usize,
    /// The kernel.
    pub kernel: &'static str,
    /// Bytes hashed.
    pub rate: Rate,
}

struct Bench {
    context: Arc<Context>,
    kernels: Kernels,
    stream: Stream,
    begin: Event,
    end: Event,
    columns: DeviceMemory,
    control: DeviceMemory,
    digests: DeviceMemory,
}

pub(super) fn measure(index: usize, copy: f64) -> Result<(Vec<ResidentRow>, Vec<HashRow>), DeviceError> {
    let gpu = Gpu::nth(index)?;
    let context = Context::new(gpu)?;
    let mut kernels = Kernels::load(&context, gpu)?;
    kernels.load_logexp()?;
    let bench = Bench {
        kernels,
        stream: Stream::new(&context, 0)?,
        begin: Event::new(&context, true)?,
        end: Event::new(&context, true)?,
        columns: DeviceMemory::new(&context, COLUMNS_BYTES)?,
        control: DeviceMemory::new(&context, TABLES_BYTES_MAX)?,
        digests: DeviceMemory::new(&context, COLUMNS_BYTES / 256)?,
        context,
    };
    let mut random = vec![0; NOISE_BYTES];
    noise(&mut random);
    for at in (0..COLUMNS_BYTES).step_by(NOISE_BYTES) {
        // SAFETY: inside the columns; waited for.
        unsafe { bench.stream.copy_in(bench.columns.start() + at as u64, random.as_ptr(), NOISE_BYTES) }?;
        bench.stream.synchronise()?;
    }
    let mut coded = Vec::new();
    for (data, parity) in GEOMETRIES {
        let codec = codec(data, parity);
        for (operation, transform) in [("encode", codec.encoding()), ("recover", recovery(&codec, parity))] {
            for method in [Method::Xor, Method::LogExp, Method::Table] {
                let mut row = bench.code(&transform, method)?;
                row.of_copy = row.moved.gb_per_s_median / copy;
                coded.push(ResidentRow { geometry: format!("{data}+{parity}"), operation, ..row });
            }
        }
    }
    let mut hashed = Vec::new();
    for bytes in HASHED {
        for (kernel, lanes) in [("blake3_4k", false), ("blake3_4k_lanes", true)] {
            let blocks = bytes / 4096;
            let rate = bench.timed(bytes, &|| {
                // SAFETY: so many blocks lie in the columns, and their digests have room.
                unsafe {
                    let (input, digests) = (bench.columns.start(), bench.digests.start());
                    bench.kernels.blake3_4k(&bench.stream, input, blocks, digests, lanes)
                }
            })?;
            hashed.push(HashRow { bytes, kernel, rate });
        }
    }
    Ok((coded, hashed))
}

impl Bench {
    fn timed(&self, bytes: usize, queue: &dyn Fn() -> Result<(), DeviceError>) -> Result<Rate, DeviceError> {
        let mut rates = Vec::new();
        for repetition in 0..=REPETITIONS {
            self.begin.record(&self.stream)?;
            for _ in 0..LAUNCHES {
                queue()?;
            }
            self.end.record(&self.stream)?;
            self.stream.synchronise()?;
            if repetition > 0 {
                rates.push((bytes * LAUNCHES) as f64 / self.begin.seconds_to(&self.end)?);
            }
        }
        Ok(Rate::of(rates))
    }

    fn code(&self, transform: &Transform, method: Method) -> Result<ResidentRow, DeviceError> {
        let (inputs, outputs) = (transform.inputs(), transform.outputs());
        let bytes = (COLUMNS_BYTES / (inputs + outputs)) & !0xFFFF;
        let columns = Columns {
            input: self.columns.start(),
            input_ld: bytes,
            output: self.columns.start() + (inputs * bytes) as u64,
            output_ld: bytes,
            bytes,
            inputs,
            outputs,
        };
        let mut factors = Vec::new();
        match method {
            Method::LogExp => factors.extend_from_slice(transform.matrix()),
            _ => push_tables(transform.matrix().iter().copied(), &mut factors),
        }
        // SAFETY: no more than a code's factors, for which there is room; waited for.
        unsafe { self.stream.copy_in(self.control.start(), factors.as_ptr(), factors.len()) }?;
        self.stream.synchronise()?;
        let program = match method {
            Method::Xor => Some(Program::compile(&self.context, transform.matrix(), inputs, outputs)?),
            _ => None,
        };
        let moved = self.timed((inputs + outputs) * bytes, &|| {
            let control = self.control.start();
            // SAFETY: all columns lie in this bench's memory, and program and factors stay until it has been waited for.
            unsafe {
                match &program {
                    Some(program) => program.launch(&self.stream, &columns),
                    None if method == Method::LogExp => {
                        self.kernels.logexp(&self.stream, &columns, control, transform.matrix().len())
                    }
                    None => self.kernels.table(&self.stream, &columns, control),
                }
            }
        })?;
        Ok(ResidentRow {
            geometry: String::new(),
            operation: "",
            method: method_name(method),
            of_copy: 0.0,
            user_gb_per_s: moved.gb_per_s_median * inputs as f64 / (inputs + outputs) as f64,
            compile_ms: program.as_ref().map_or(0.0, |program| program.took.as_secs_f64() * 1e3),
            operations: program.as_ref().map_or(0, |program| program.operations),
            moved,
        })
    }
}

impl fmt::Display for ResidentRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ResidentRow { geometry, operation, method, moved, of_copy, user_gb_per_s, .. } = self;
        write!(
            f,
            "{geometry:>7} {operation:<14} {method:<11} {moved:<26} {of_copy:>5.3} {user_gb_per_s:>11.0}"
        )?;
        if self.operations > 0 {
            write!(f, "   {:.0} ms, {} operations", self.compile_ms, self.operations)?;
        }
        Ok(())
    }
}

impl fmt::Display for HashRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>6} MiB {:<16} {}", self.bytes >> 20, self.kernel, self.rate)
    }
}
